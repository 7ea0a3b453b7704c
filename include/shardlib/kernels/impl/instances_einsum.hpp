// Instances of templates for every dtype, compiled into shardlib::compiled: products and sums of products.
#pragma once

#include <cstdint>
#include <span>

#include "shardlib/spec/dtype.hpp"

#ifdef SHARDLIB_COMPILED

#include "shardlib/kernels/impl/einsum.hpp"

namespace shardlib::kernels {

template void einsum(const Exec&, const EinsumPlan&, DType, DType, const void*, std::span<const std::int64_t>,
                     const void*, std::span<const std::int64_t>, void*, bool);
template void einsum1(const Exec&, DType, DType, std::span<const int>, std::span<const std::int64_t>,
                      std::span<const int>, const void*, void*);

}  // namespace shardlib::kernels

#endif
