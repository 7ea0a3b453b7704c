// Definitions of rows.hpp.
#pragma once

#include "shardlib/kernels/rows.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <type_traits>

#include "shardlib/kernels/body/affine_norm.hpp"
#include "shardlib/kernels/body/held_rows.hpp"
#include "shardlib/kernels/body/rows.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib::kernels {

namespace detail {

/// Calls hold(groups) if the parts of a device's teams hold whole rows, in this number of groups of 64 numbers. Returns
/// whether.
template <class T, class Hold>
bool hold_rows(const Exec& exec, const Along& a, const Hold& hold) {
  if constexpr (std::is_same_v<T, double>) {
    return false;
  } else {
    if (!exec.on_device() || a.inner != 1 || a.counted() <= 0 || a.n > 2048) return false;
    if (a.n <= 1024)
      hold(std::integral_constant<int, 16>{});
    else
      hold(std::integral_constant<int, 32>{});
    return true;
  }
}

/// Calls row(team, input rows, output row) for every row. On devices the parts of teams hold short contiguous rows, for
/// `held_row`.
template <class T, std::size_t In, class Row, class HeldRow, class Out>
void for_rows(const Exec& exec, const std::array<const T*, In>& in, Out* out, const Along& a, const Row& row,
              const HeldRow& held_row) {
  using A = accumulator_t<T>;
  // Treats both layouts in one way: slabs of `columns` rows, which are contiguous or strided.
  const bool flat = a.inner == 1;
  const std::int64_t n = a.n, columns = flat ? a.outer : a.inner, slabs = flat ? 1 : a.outer;
  if (slabs * columns == 0 || n == 0) return;
  const auto hold = [&]<int Groups>(std::integral_constant<int, Groups>) {
    using Kernel = body::HeldRows<T, In, HeldRow, Groups, Out>;
    exec.for_items_on_device((a.outer + Kernel::together - 1) / Kernel::together, 0,
                             Kernel{in, out, static_cast<int>(n), static_cast<int>(a.counted()), a.outer, held_row});
  };
  if (hold_rows<T>(exec, a, hold)) return;
  // A GPU's scratch memory, for up to 2112 blocks at once, fits its second-level cache if it is for one row each. Along
  // an inner stride two rows share what is read for one; 16, as on the host, would take gigabytes.
  const bool gpu = exec.gpu() != nullptr;
  const std::int64_t block = gpu ? (flat ? 1 : 2) : flat ? std::max<std::int64_t>(1, 4096 / n) : 16;
  const std::int64_t blocks = (columns + block - 1) / block;
  const bool in_place = flat && std::is_same_v<T, A>;
  const std::size_t scratch_bytes = in_place ? 0 : (In + 1) * static_cast<std::size_t>(block * n) * sizeof(A);
  exec.for_items(slabs * blocks, scratch_bytes,
                 body::RowKernel<T, In, Row, Out>{in, out, n, columns, block, blocks, flat, row});
}

}  // namespace detail

template <class T>
void softmax(const Exec& exec, const T* x, T* y, const Along& a) {
  detail::for_rows<T, 1>(exec, {x}, y, a, body::Softmax{a.n, a.counted()}, body::HeldSoftmax{});
}

template <class T>
void softmax_backward(const Exec& exec, const T* y, const T* dy, T* dx, const Along& a) {
  const Along all{a.outer, a.n, a.inner};  // padding holds zeros
  detail::for_rows<T, 2>(exec, {y, dy}, dx, all, body::SoftmaxBackward{a.n}, body::HeldSoftmaxBackward{});
}

template <class T>
void sum_exp(const Exec& exec, const T* x, const T* shift, T* out, std::int64_t rows, std::int64_t n,
             std::int64_t counted) {
  exec.for_items(rows, 0, body::SumExp<T>{x, shift, out, n, counted});
}

template <class T, class I>
void cross_entropy_backward(const Exec& exec, const T* x, const T* shift, const T* total, const I* targets, const T* dy,
                            T* dx, std::int64_t rows, std::int64_t n, std::int64_t first) {
  exec.for_items(rows, 0, body::CrossEntropyBackward<T, I>{x, shift, total, targets, dy, dx, n, first});
}

template <bool Centered, class T>
void normalize(const Exec& exec, const T* x, T* y, const Along& a, double eps) {
  detail::for_rows<T, 1>(exec, {x}, y, a, body::Norm<Centered>{a.n, a.counted(), eps}, body::HeldNorm<Centered>{eps});
}

template <bool Centered, class T>
void normalize_backward(const Exec& exec, const T* x, const T* dy, T* dx, const Along& a, double eps) {
  detail::for_rows<T, 2>(exec, {x, dy}, dx, a, body::NormBackward<Centered>{a.n, a.counted(), eps},
                         body::HeldNormBackward<Centered>{eps});
}

template <bool Centered, class T, class W, class R>
void affine_norm(const Exec& exec, const T* x, const W* scale, const W* bias, R* y, const Along& a, double eps) {
  detail::for_rows<T, 1>(exec, {x}, y, a, body::AffineNorm<Centered, W>{scale, bias, a.n, a.counted(), eps},
                         body::HeldAffineNorm<Centered, W>{scale, bias, eps});
}

template <bool Centered, class T, class W, class R>
void affine_norm_backward(const Exec& exec, const T* x, const W* scale, const R* ct, T* dx, W* dscale, W* dbias,
                          const Along& a, double eps) {
  using Rows = body::AffineNormBackward<Centered, T, W, R>;
  using A = typename Rows::A;
  using Sums = body::SumGroups<A, W>;
  if (a.n == 0) return;
  const std::int64_t n = a.n, rows = a.rows(), groups = (rows + Rows::group - 1) / Rows::group;
  const bool summed = dscale != nullptr || dbias != nullptr;
  Buffer sums;
  if (summed) sums = exec.pool->allocate(static_cast<std::size_t>(groups * Rows::kinds * n) * sizeof(A));
  const typename Rows::Base gradients{x, scale, ct, dx, sums.as<A>(), rows, n, a.counted(), eps};
  const auto hold = [&]<int Groups>(std::integral_constant<int, Groups>) {
    using Kernel = body::HeldAffineNormBackward<Centered, T, W, R, Groups>;
    exec.for_items_on_device((groups + Kernel::together - 1) / Kernel::together, 0, Kernel{gradients});
  };
  if (!detail::hold_rows<T>(exec, a, hold))
    exec.for_items(groups, static_cast<std::size_t>(4 * n) * sizeof(A), Rows{gradients, a.inner});
  if (!summed) return;
  const std::int64_t tiles = (n + Sums::columns - 1) / Sums::columns;
  exec.for_items(tiles * Rows::kinds, 0, Sums{sums.as<A>(), {dscale, dbias}, groups, n, Rows::kinds, tiles});
}

}  // namespace shardlib::kernels
