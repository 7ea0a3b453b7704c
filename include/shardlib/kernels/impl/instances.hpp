// Instances of the kernels' templates for every dtype, compiled into shardlib::compiled.
#pragma once

#include <cstdint>
#include <span>

#ifdef SHARDLIB_COMPILED

#include "shardlib/kernels/impl/attention.hpp"
#include "shardlib/kernels/impl/einsum.hpp"
#include "shardlib/kernels/impl/index.hpp"
#include "shardlib/kernels/impl/ordering.hpp"
#include "shardlib/kernels/impl/random.hpp"
#include "shardlib/kernels/impl/reduce.hpp"
#include "shardlib/kernels/impl/reduce_backward.hpp"
#include "shardlib/kernels/impl/rows.hpp"
#include "shardlib/kernels/impl/scans.hpp"

namespace shardlib::kernels {

template void einsum(const Exec&, const EinsumPlan&, DType, DType, const void*, std::span<const std::int64_t>,
                     const void*, std::span<const std::int64_t>, void*);
template void einsum1(const Exec&, DType, DType, std::span<const int>, std::span<const std::int64_t>,
                      std::span<const int>, const void*, void*);
template void sum(const Exec&, DType, const void*, std::span<const std::int64_t>, std::span<const bool>, void*);
template void max(const Exec&, DType, const void*, std::span<const std::int64_t>, std::span<const bool>, void*,
                  std::span<const std::int64_t>);
template void min(const Exec&, DType, const void*, std::span<const std::int64_t>, std::span<const bool>, void*,
                  std::span<const std::int64_t>);
template void extremum_backward(const Exec&, DType, const void*, std::span<const std::int64_t>, std::span<const bool>,
                                const void*, const void*, void*, std::span<const std::int64_t>);
template void prod(const Exec&, DType, const void*, std::span<const std::int64_t>, std::span<const bool>, void*,
                   std::span<const std::int64_t>);
template void prod_backward(const Exec&, DType, const void*, std::span<const std::int64_t>, std::span<const bool>,
                            const void*, void*, std::span<const std::int64_t>);
template f32 sum_of_squares(const Exec&, std::int64_t, const f32*);
template f32 sum_of_squares(const Exec&, std::int64_t, const bf16*);
template void argmax(const Exec&, DType, const void*, std::int64_t, std::int64_t, std::int64_t, i32*, std::int64_t);
template void argsort(const Exec&, DType, const void*, std::int64_t, std::int64_t, std::int64_t, std::int64_t, bool,
                      std::int64_t, i32*, std::int64_t);
template void cumsum(const Exec&, DType, const void*, void*, std::int64_t, std::int64_t, std::int64_t, bool);
template void cumprod(const Exec&, DType, const void*, void*, std::int64_t, std::int64_t, std::int64_t);
template void cumprod_backward(const Exec&, DType, const void*, const void*, const void*, void*, std::int64_t,
                               std::int64_t, std::int64_t);
template void cummax(const Exec&, DType, const void*, void*, std::int64_t, std::int64_t, std::int64_t);
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
template void gather(const Exec&, DType, const Lookup&, const void*, const void*, void*);
template void scatter_add_to(const Exec&, DType, const Lookup&, const void*, const void*, void*);
template void scatter_add(const Exec&, DType, const Lookup&, const void*, const void*, void*, std::int64_t);

#define SHARDLIB_INSTANTIATE(T)                                                                                        \
  template void softmax(const Exec&, const T*, T*, std::int64_t, std::int64_t, std::int64_t, std::int64_t);            \
  template void softmax_backward(const Exec&, const T*, const T*, T*, std::int64_t, std::int64_t, std::int64_t);       \
  template void sum_exp(const Exec&, const T*, const T*, T*, std::int64_t, std::int64_t, std::int64_t);                \
  template void cross_entropy_backward(const Exec&, const T*, const T*, const T*, const i32*, const T*, T*,            \
                                       std::int64_t, std::int64_t, std::int64_t);                                      \
  template void cross_entropy_backward(const Exec&, const T*, const T*, const T*, const u32*, const T*, T*,            \
                                       std::int64_t, std::int64_t, std::int64_t);                                      \
  template void rms_norm(const Exec&, const T*, T*, std::int64_t, std::int64_t, std::int64_t, double, std::int64_t);   \
  template void rms_norm_backward(const Exec&, const T*, const T*, T*, std::int64_t, std::int64_t, std::int64_t,       \
                                  double, std::int64_t);                                                               \
  template void layer_norm(const Exec&, const T*, T*, std::int64_t, std::int64_t, std::int64_t, double, std::int64_t); \
  template void layer_norm_backward(const Exec&, const T*, const T*, T*, std::int64_t, std::int64_t, std::int64_t,     \
                                    double, std::int64_t);                                                             \
  template void fill_uniform(const Exec&, T*, std::span<const std::int64_t>, std::span<const std::int64_t>,            \
                             std::span<const std::int64_t>, std::uint64_t, std::uint64_t);                             \
  template void fill_normal(const Exec&, T*, std::span<const std::int64_t>, std::span<const std::int64_t>,             \
                            std::span<const std::int64_t>, std::uint64_t, std::uint64_t);                              \
  template void fill_truncated_normal(const Exec&, T*, std::span<const std::int64_t>, std::span<const std::int64_t>,   \
                                      std::span<const std::int64_t>, std::uint64_t, std::uint64_t);
SHARDLIB_INSTANTIATE(f32)
SHARDLIB_INSTANTIATE(bf16)
SHARDLIB_INSTANTIATE(f64)
#undef SHARDLIB_INSTANTIATE

#define SHARDLIB_INSTANTIATE(T, R)                                                                                    \
  template void causal_attention(const Exec&, const AttentionLoops&, const T*, const T*, const T*, AttentionSegments, \
                                 R*, accumulator_t<T>*);                                                              \
  template void causal_attention_backward(const Exec&, const AttentionLoops&, const T*, const T*, const T*,           \
                                          AttentionSegments, const T*, const accumulator_t<T>*, const T*, R*, R*, R*);
SHARDLIB_INSTANTIATE(f32, f32)
SHARDLIB_INSTANTIATE(bf16, bf16)
SHARDLIB_INSTANTIATE(bf16, f32)
SHARDLIB_INSTANTIATE(f64, f64)
#undef SHARDLIB_INSTANTIATE

}  // namespace shardlib::kernels

#endif
