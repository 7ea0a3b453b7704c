// Softmax, cross-entropy, RMS norm and layer norm along a dim, forward and backward.
#pragma once

#include <cstdint>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/strided.hpp"

namespace shardlib::kernels {

// T is f32, bf16 or f64. Padding does not count: softmax treats it as -inf, and the norms ignore it. Its results are 0.

/// y = softmax(x) along n. y may be x. A row that contains only -inf gives NaN.
template <class T>
void softmax(const Exec& exec, const T* x, T* y, const Along& a);

/// dx = y * (dy - sum(y * dy)) along n, where y is the forward result. dx may be dy.
template <class T>
void softmax_backward(const Exec& exec, const T* y, const T* dy, T* dx, const Along& a);

/// out = sum(exp(x - shift)) for each of `rows` contiguous rows. Only the first `counted` elements of a row count.
template <class T>
void sum_exp(const Exec& exec, const T* x, const T* shift, T* out, std::int64_t rows, std::int64_t n,
             std::int64_t counted);

/// dx = dy * (exp(x - shift) / total - (1 at the target)) for rows of n. `total` is the sum over the whole
/// vocabulary. The rows hold the ids from `first` on. dx may be x.
template <class T, class I>
void cross_entropy_backward(const Exec& exec, const T* x, const T* shift, const T* total, const I* targets, const T* dy,
                            T* dx, std::int64_t rows, std::int64_t n, std::int64_t first);

/// y = (x - m) / sqrt(mean((x - m)^2) + eps) along n, where m is the mean if `Centered` (layer norm), else 0 (RMS
/// norm). y may be x.
template <bool Centered, class T>
void normalize(const Exec& exec, const T* x, T* y, const Along& a, double eps);

/// The cotangent of its x. dx may be dy.
template <bool Centered, class T>
void normalize_backward(const Exec& exec, const T* x, const T* dy, T* dx, const Along& a, double eps);

/// y = normalize(x) * scale + bias along n, without a bias if not Centered. W is T or the accumulator of T, and so is
/// R, which may be bf16 for f32. `scale` and `bias` have n numbers.
template <bool Centered, class T, class W, class R>
void affine_norm(const Exec& exec, const T* x, const W* scale, const W* bias, R* y, const Along& a, double eps);

/// The cotangents of its operands that are not null. It takes scratch memory for the sums of each 16 rows. The order of
/// additions depends only on the sizes.
template <bool Centered, class T, class W, class R>
void affine_norm_backward(const Exec& exec, const T* x, const W* scale, const R* ct, T* dx, W* dscale, W* dbias,
                          const Along& a, double eps);

}  // namespace shardlib::kernels

#ifndef SHARDLIB_COMPILED
#include "shardlib/kernels/impl/rows.hpp"
#endif
