// The reduction that every backend shares: an element-wise balanced binary tree over the ranks.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <type_traits>

#include "shardlib/comm/collective_call.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/wrapping.hpp"

namespace shardlib::detail {

using Sum = WrappingSum;

/// The maximum; if one side is a NaN, so is the result.
struct Max {
  template <class A>
  constexpr A operator()(A a, A b) const {
    return a > b || a != a ? a : b;
  }
};

/// Up to this size, counting the copies of all ranks, every rank reduces the whole vector: one step instead of two.
inline constexpr std::size_t small_all_reduce = 32768;

/// How GPUs that communicate by NCCL divide an all_reduce of n elements: each rank sums a slice, and the slices are
/// gathered. What is left, and all of a short operand, goes to each rank, which sums it by itself.
struct GpuSlices {
  std::size_t slice = 0;  ///< elements of a rank's slice
  std::size_t left = 0;   ///< elements that each rank sums
};
constexpr GpuSlices gpu_slices(std::size_t n, std::size_t element, std::size_t ranks) {
  const std::size_t unit = 16 / element;  // what a GPU copies at once, from and to multiples of it
  const std::size_t slice = n * element * ranks <= small_all_reduce ? 0 : n / ranks / unit * unit;
  return {slice, n - slice * ranks};
}

/// Elements reduced at once: small enough for every level's partial result to stay in the first-level cache.
inline constexpr std::size_t reduce_strip = 1024;

template <class T, class Op, class A = accumulator_t<T>>
void reduce_strip_tree(std::span<const std::byte* const> in, std::size_t first, std::size_t n, A* __restrict out) {
  const Op op;
  const auto source = [&](std::size_t i) { return reinterpret_cast<const T*>(in[i]) + first; };
  if (in.size() == 1) {
    const T* a = source(0);
    for (std::size_t k = 0; k < n; ++k) out[k] = static_cast<A>(a[k]);
  } else if (in.size() == 2) {
    const T* a = source(0);
    const T* b = source(1);
    for (std::size_t k = 0; k < n; ++k) out[k] = op(static_cast<A>(a[k]), static_cast<A>(b[k]));
  } else {
    const std::size_t mid = std::bit_floor(in.size() - 1);
    std::array<A, reduce_strip> right;
    reduce_strip_tree<T, Op>(in.first(mid), first, n, out);
    reduce_strip_tree<T, Op>(in.subspan(mid), first, n, right.data());
    for (std::size_t k = 0; k < n; ++k) out[k] = op(out[k], right[k]);
  }
}

/// Reduces elements of T to results of R. Between the two are sums of T's accumulator, which are rounded once.
template <class T, class Op, class R = T>
void reduce_tree(std::span<const std::byte* const> in, std::byte* out, std::size_t count) {
  R* result = reinterpret_cast<R*>(out);
  for (std::size_t first = 0; first < count; first += reduce_strip) {
    const std::size_t n = std::min(reduce_strip, count - first);
    if constexpr (std::is_same_v<R, accumulator_t<T>>) {
      reduce_strip_tree<T, Op>(in, first, n, result + first);
    } else {
      std::array<accumulator_t<T>, reduce_strip> wide;
      reduce_strip_tree<T, Op>(in, first, n, wide.data());
      for (std::size_t k = 0; k < n; ++k) result[first + k] = static_cast<R>(wide[k]);
    }
  }
}

constexpr bool is_reducible(DType d) {
  return d != DType::u8 && d != DType::bool_;
}

/// out = the reduction of the inputs, in[i] being rank i's `count` elements; `out` overlaps none of them.
inline void reduce_tree(DType dtype, Reduction op, std::span<const std::byte* const> in, std::byte* out,
                        std::size_t count) {
  visit_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (is_reducible(dtype_v<T>)) {
      op == Reduction::sum ? reduce_tree<T, Sum>(in, out, count) : reduce_tree<T, Max>(in, out, count);
    } else {
      throw Error("reduction of " + std::string(name(dtype)) + ": only f32, bf16, f64, i32 and u32 can be reduced");
    }
  });
}

/// The dtype of a sum that is not complete yet: of bf16, f32.
constexpr DType dtype_of_sum(DType d) {
  return d == DType::bf16 ? DType::f32 : d;
}
/// reduce_tree into sums that are not complete: `out` has `count` elements of dtype_of_sum(dtype).
inline void begin_tree(DType dtype, Reduction op, std::span<const std::byte* const> in, std::byte* out,
                       std::size_t count) {
  if (dtype != DType::bf16) return reduce_tree(dtype, op, in, out, count);
  op == Reduction::sum ? reduce_tree<bf16, Sum, f32>(in, out, count) : reduce_tree<bf16, Max, f32>(in, out, count);
}
/// reduce_tree of such sums: `in` has elements of dtype_of_sum(dtype).
inline void end_tree(DType dtype, Reduction op, std::span<const std::byte* const> in, std::byte* out,
                     std::size_t count) {
  if (dtype != DType::bf16) return reduce_tree(dtype, op, in, out, count);
  op == Reduction::sum ? reduce_tree<f32, Sum, bf16>(in, out, count) : reduce_tree<f32, Max, bf16>(in, out, count);
}

}  // namespace shardlib::detail
