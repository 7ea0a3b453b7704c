// Instances of templates for every dtype, compiled into shardlib::compiled: lookups and sorting.
#pragma once

#include <cstdint>

#include "shardlib/spec/dtype.hpp"

#ifdef SHARDLIB_COMPILED

#include "shardlib/kernels/impl/index.hpp"
#include "shardlib/kernels/impl/ordering.hpp"

namespace shardlib::kernels {

template void argsort(const Exec&, DType, const void*, std::int64_t, std::int64_t, std::int64_t, std::int64_t, bool,
                      std::int64_t, i32*, std::int64_t);
template void join_ids(const Exec&, const Lookup&, const i32*, const char*, u32*);
template void join_ids(const Exec&, const Lookup&, const u32*, const char*, u32*);
template void gather(const Exec&, DType, const Lookup&, const void*, const void*, void*);
template void scatter_add_to(const Exec&, DType, const Lookup&, const void*, const void*, void*);
template void scatter_add(const Exec&, DType, const Lookup&, const void*, const void*, void*, std::int64_t);

}  // namespace shardlib::kernels

#endif
