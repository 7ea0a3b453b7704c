// Runs the loop nest of an einsum, on the host and on a device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/body/einsum.hpp"
#include "shardlib/kernels/body/reduction.hpp"
#include "shardlib/kernels/gemm.hpp"
#include "shardlib/kernels/impl/einsum_loops.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/loop.hpp"
#include "shardlib/support/wrapping.hpp"

namespace shardlib::kernels::detail {

/// One matrix product of a loop nest at the given offsets, or those along the loop `batch`.
template <class T, class Out>
void einsum_gemm(const Exec& exec, const EinsumLoops& s, const T* lhs, const T* rhs, Out* out, bool accumulate,
                 const Loops3::Loop& batch = {}) {
  const EinsumMatrices g(s);
  auto [next_a, next_b, next_c] = batch.strides;  // distances to the next product's
  if (g.swapped) {
    std::swap(lhs, rhs);
    std::swap(next_a, next_b);
  }
  gemm_batch(exec, g.a.transposed, g.b.transposed, g.rows, g.columns, g.depth, lhs, g.a.stride, next_a, rhs, g.b.stride,
             next_b, out, g.c.stride, next_c, batch.extent, accumulate);
}

inline constexpr shardlib::detail::WrappingProduct multiply;

/// out[i] (+)= product(i). `product` reads its operands with strides that are compile-time constants if they are 0 or
/// 1.
template <class T, class F>
void scale_row(std::int64_t n, T* out, std::int64_t stride, bool accumulate, const F& product) {
  if (accumulate) {
    independent(n, [=](std::int64_t i) { out[i * stride] = SumOp::combine(out[i * stride], product(i)); });
  } else {
    independent(n, [=](std::int64_t i) { out[i * stride] = product(i); });
  }
}

/// The inner kernel at the given offsets.
template <class T>
void einsum_inner(const Exec& exec, const EinsumLoops& s, const T* lhs, const T* rhs, T* out, bool accumulate) {
  const std::int64_t n = s.row.extent;
  const auto [x, y, z] = s.row.strides;
  if constexpr (std::is_floating_point_v<T>) {
    if (s.inner == EinsumLoops::Inner::gemm) return einsum_gemm(exec, s, lhs, rhs, out, accumulate);
  }
  if (s.inner == EinsumLoops::Inner::scale) {
    if (x == 1 && y == 1 && z == 1) {
      scale_row(n, out, 1, accumulate, [=](std::int64_t i) { return multiply(lhs[i], rhs[i]); });
    } else if (x + y == 1 && z == 1) {  // a row times a number
      const T* row = x == 1 ? lhs : rhs;
      const T factor = x == 1 ? *rhs : *lhs;
      scale_row(n, out, 1, accumulate, [=](std::int64_t i) { return multiply(row[i], factor); });
    } else {
      scale_row(n, out, z, accumulate, [=, x = x, y = y](std::int64_t i) { return multiply(lhs[i * x], rhs[i * y]); });
    }
    return;
  }
  T total(0);
  if (x == 1 && y == 1 && n >= 32) {
    T lanes[64];
    Cascade<SumOp, T, 64> cascade;
    for (std::int64_t begin = 0; begin < n; begin += 64) {
      const std::int64_t length = std::min<std::int64_t>(64, n - begin);
      for (std::int64_t i = 0; i < length; ++i) lanes[i] = multiply(lhs[begin + i], rhs[begin + i]);
      std::fill(lanes + length, lanes + 64, T(0));
      cascade.add(lanes, 64);
    }
    total = fold_lanes(cascade);
  } else {
    for (std::int64_t i = 0; i < n; ++i) total = SumOp::combine(total, multiply(lhs[i * x], rhs[i * y]));
  }
  *out = accumulate ? SumOp::combine(*out, total) : total;
}

/// Matrix products of a device: those of the longest outer loop are one batch.
template <class T, class Out>
void einsum_products(const Exec& exec, const EinsumLoops& s, const T* lhs, const T* rhs, Out* out, bool add) {
  Loops3 others;
  int longest = 0;
  for (int d = 1; d < s.kept.depth; ++d)
    if (s.kept.loop(d).extent > s.kept.loop(longest).extent) longest = d;
  for (int d = 0; d < s.kept.depth; ++d)
    if (d != longest) others.push(s.kept.loop(d).extent, s.kept.loop(d).strides);
  const Loops3::Loop batch = s.kept.depth > 0 ? s.kept.loop(longest) : Loops3::Loop{};
  Walk<3> kept(others, 0);
  for (std::int64_t i = 0; i < others.count(); ++i, kept.next()) {
    Walk<3> summed(s.summed, 0);
    for (std::int64_t j = 0; j < s.summed.count(); ++j, summed.next())
      einsum_gemm(exec, s, lhs + kept.offsets[0] + summed.offsets[0], rhs + kept.offsets[1] + summed.offsets[1],
                  out + kept.offsets[2], add || j > 0, batch);
  }
}

/// The loop nest on a device. Only matrix products can `add`.
template <class T, class Out>
void run_einsum_on_device(const Exec& exec, const EinsumLoops& s, const T* lhs, const T* rhs, Out* out, bool add) {
  if constexpr (std::is_same_v<T, bf16> || std::is_floating_point_v<T>)
    if (s.inner == EinsumLoops::Inner::gemm) return einsum_products(exec, s, lhs, rhs, out, add);
  if constexpr (std::is_same_v<T, Out> && !std::is_same_v<T, bf16>) {
    body::ProductTerms<T> terms{s.kept, s.summed, lhs, rhs};
    (s.inner == EinsumLoops::Inner::dot ? terms.summed : terms.kept).push(s.row.extent, s.row.strides);
    const std::int64_t outs = terms.kept.count(), n = terms.summed.count();
    constexpr std::int64_t many = 1 << 14;
    if (outs >= many || n < 64) {
      const body::SumProducts<T> kernel{terms, n, outs, out};
      return exec.for_items(kernel.items(), 0, kernel);
    }
    exec.for_items(outs, 0, body::SumProductsTogether<T>{terms, n, out});
  }
}

/// Runs the loop nest on operands whose dims are in its order. Operands of bf16 have matrix products only.
template <class T, class Out>
void run_einsum_loops(const Exec& exec, const EinsumLoops& s, const T* lhs, const T* rhs, Out* out, bool add) {
  if (exec.on_device()) return run_einsum_on_device(exec, s, lhs, rhs, out, add);
  const std::int64_t outer = s.kept.count();
  const std::int64_t steps = s.summed.count();
  const auto run = [&](std::int64_t first, std::int64_t last) {
    Walk<3> kept(s.kept, first);
    for (std::int64_t i = first; i < last; ++i, kept.next()) {
      Walk<3> summed(s.summed, 0);
      for (std::int64_t j = 0; j < steps; ++j, summed.next()) {
        const T* const x = lhs + kept.offsets[0] + summed.offsets[0];
        const T* const y = rhs + kept.offsets[1] + summed.offsets[1];
        if constexpr (std::is_same_v<T, bf16>) {
          einsum_gemm(exec, s, x, y, out + kept.offsets[2], add || j > 0);
        } else {
          einsum_inner(exec, s, x, y, out + kept.offsets[2], add || j > 0);
        }
      }
    }
  };
  // A large product divides its own work among threads. Many small products are divided among threads here.
  const std::int64_t work = s.row.extent * s.column.extent * s.depth.extent * steps;
  if (work >= large_gemm) {
    if constexpr (std::is_same_v<T, bf16>)
      return run(0, outer);  // `gemm` takes memory for copies, also in a dry run
    else
      return exec.run([&] { run(0, outer); });
  }
  const std::int64_t group = std::max<std::int64_t>(1, 65536 / work);
  exec.for_each((outer + group - 1) / group,
                [&](std::int64_t item) { run(item * group, std::min(outer, (item + 1) * group)); });
}

}  // namespace shardlib::kernels::detail
