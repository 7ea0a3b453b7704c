// Cumulative sums, products and maxima, and linear recurrences along a dim.
#pragma once

#include <cstdint>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/strided.hpp"

namespace shardlib::kernels {

// bf16 accumulates in f32. The results of the arrays' padding are finite, but of no meaning.

/// The sum, product or maximum y_i of x_0 to x_i, or of x_i to x_(n-1) if `reverse`. Integers wrap around; behind a NaN
/// the maximum is NaN.
template <class Op, class AnyDType>
void cumulate(const Exec& exec, AnyDType dtype, const void* x, void* y, const Along& along, bool reverse = false);

/// The cotangent of the x of products, s_i * y_(i-1), where s_i = ct_i + x_(i+1) * s_(i+1) and y_(-1) is 1.
template <class AnyDType>
void cumprod_backward(const Exec& exec, AnyDType dtype, const void* x, const void* y, const void* ct, void* out,
                      const Along& along);

/// The cotangent of the x of maxima: each ct_i goes to the first element that equals y_i.
template <class AnyDType>
void cummax_backward(const Exec& exec, AnyDType dtype, const void* x, const void* ct, void* out, const Along& along);

/// The rows that the shards of a scan along a sharded dim exchange: for each shard `rows` rows, which have a number of
/// the accumulator's type for each row of the array. A single shard has none.
struct ScanEnds {
  const void* all = nullptr;
  std::int64_t rows = 0, shards = 1, rank = 0;
};

/// h_i = a_i * h_(i-1) + b_i, where h_(-1) is 0 or what `ends` pass on. `reverse`: h_i = a_i * h_(i+1) + b_i, from the
/// last element.
template <class AnyDType>
void linear_scan(const Exec& exec, AnyDType dtype, const void* a, const void* b, void* h, const Along& along,
                 bool reverse, const ScanEnds& ends);
/// The ends of this shard alone: the product of all a_i, and the last state.
template <class AnyDType>
void linear_scan_ends(const Exec& exec, AnyDType dtype, const void* a, const void* b, void* ends, const Along& along,
                      bool reverse);

/// The cotangent of b, s_i = ct_i + a_(i+1) * s_(i+1). If `h`, the result of the scan, is given: the cotangent of a,
/// s_i * h_(i-1). `reverse` is the argument of the forward scan.
template <class AnyDType>
void linear_scan_backward(const Exec& exec, AnyDType dtype, const void* a, const void* h, const void* ct, void* out,
                          const Along& along, bool reverse, const ScanEnds& ends);
/// The ends of this shard alone: the product of all a_i, a_0 * s_0, and the last h if `h` is given.
template <class AnyDType>
void linear_scan_backward_ends(const Exec& exec, AnyDType dtype, const void* a, const void* h, const void* ct,
                               void* ends, const Along& along, bool reverse);

}  // namespace shardlib::kernels

#ifndef SHARDLIB_COMPILED
#include "shardlib/kernels/impl/scans.hpp"
#endif
