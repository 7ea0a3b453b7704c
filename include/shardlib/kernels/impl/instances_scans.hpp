// Instances of templates for every dtype, compiled into shardlib::compiled: scans.
#pragma once

#include <cstdint>

#include "shardlib/spec/dtype.hpp"

#ifdef SHARDLIB_COMPILED

#include "shardlib/kernels/impl/scans.hpp"

namespace shardlib::kernels {

template void cumulate<detail::SumOp>(const Exec&, DType, const void*, void*, std::int64_t, std::int64_t, std::int64_t,
                                      bool);
template void cumulate<detail::ProdOp>(const Exec&, DType, const void*, void*, std::int64_t, std::int64_t, std::int64_t,
                                       bool);
template void cumulate<detail::MaxOp>(const Exec&, DType, const void*, void*, std::int64_t, std::int64_t, std::int64_t,
                                      bool);
template void cumprod_backward(const Exec&, DType, const void*, const void*, const void*, void*, std::int64_t,
                               std::int64_t, std::int64_t);
template void cummax_backward(const Exec&, DType, const void*, const void*, void*, std::int64_t, std::int64_t,
                              std::int64_t);
template void linear_scan(const Exec&, DType, const void*, const void*, void*, std::int64_t, std::int64_t, std::int64_t,
                          bool, const ScanEnds&);
template void linear_scan_ends(const Exec&, DType, const void*, const void*, void*, std::int64_t, std::int64_t,
                               std::int64_t, bool);
template void linear_scan_backward(const Exec&, DType, const void*, const void*, const void*, void*, std::int64_t,
                                   std::int64_t, std::int64_t, bool, const ScanEnds&);
template void linear_scan_backward_ends(const Exec&, DType, const void*, const void*, const void*, void*, std::int64_t,
                                        std::int64_t, std::int64_t, bool);

}  // namespace shardlib::kernels

#endif
