// Definitions of rows.hpp.
#pragma once

#include "shardlib/kernels/rows.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/impl/reduce.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/math.hpp"

namespace shardlib::kernels {

namespace detail {

/// The sum of term(i) over a row.
template <class A, class F>
A row_sum(std::int64_t n, const F& term) {
  constexpr std::int64_t tile_length = 512;
  if (n == 0) return A(0);
  A tile[tile_length];
  Cascade<SumOp, A, 64> cascade;
  for (std::int64_t begin = 0; begin < n; begin += tile_length) {
    const std::int64_t length = std::min(tile_length, n - begin);
    independent(length, [&tile, term, begin](std::int64_t i) { tile[i] = term(begin + i); });
    add_lanes(cascade, tile, length);
  }
  return fold_lanes(cascade);
}

/// Calls f(input rows, output row) for every row. Contiguous rows of f32 and f64 stay in place. Others are copied to
/// dense scratch memory in the accumulator type.
template <class T, std::size_t In, class F>
void for_rows(const Exec& exec, const std::array<const T*, In>& in, T* out, std::int64_t outer, std::int64_t n,
              std::int64_t inner, const F& f) {
  using A = accumulator_t<T>;
  // Treats both layouts alike: slabs of `columns` rows, which are contiguous or strided.
  const bool flat = inner == 1;
  const std::int64_t columns = flat ? outer : inner;
  const std::int64_t slabs = flat ? 1 : outer;
  const std::int64_t stride = flat ? 1 : inner;
  if (slabs * columns == 0 || n == 0) return;
  const std::int64_t block = flat ? std::max<std::int64_t>(1, 4096 / n) : 16;
  const std::int64_t blocks = (columns + block - 1) / block;
  const auto area = static_cast<std::size_t>(block * n);
  const std::size_t scratch_bytes = (In + 1) * area * sizeof(A);
  if (!(flat && std::is_same_v<T, A>)) exec.count_scratch(slabs * blocks, scratch_bytes);
  exec.for_each(slabs * blocks, [&](std::int64_t item) {
    const std::int64_t slab = item / blocks;
    const std::int64_t first = item % blocks * block;
    const std::int64_t count = std::min(block, columns - first);
    std::array<const A*, In> rows;
    if constexpr (std::is_same_v<T, A>) {
      if (flat) {
        for (std::int64_t c = first; c < first + count; ++c) {
          for (std::size_t k = 0; k < In; ++k) rows[k] = in[k] + c * n;
          f(rows, out + c * n);
        }
        return;
      }
    }
    const Buffer scratch = exec.pool->allocate(scratch_bytes);
    A* const results = scratch.as<A>() + In * area;
    for (std::size_t k = 0; k < In; ++k) {
      const T* from = in[k] + slab * columns * n + first * (flat ? n : 1);
      A* to = scratch.as<A>() + k * area;
      if (flat) {
        independent(count * n, [=](std::int64_t i) { to[i] = static_cast<A>(from[i]); });
      } else {
        for (std::int64_t i = 0; i < n; ++i) {
          for (std::int64_t c = 0; c < count; ++c) to[c * n + i] = static_cast<A>(from[i * stride + c]);
        }
      }
    }
    for (std::int64_t c = 0; c < count; ++c) {
      for (std::size_t k = 0; k < In; ++k) rows[k] = scratch.as<A>() + k * area + static_cast<std::size_t>(c * n);
      f(rows, results + c * n);
    }
    T* to = out + slab * columns * n + first * (flat ? n : 1);
    if (flat) {
      independent(count * n, [=](std::int64_t i) { to[i] = T(results[i]); });
    } else {
      for (std::int64_t i = 0; i < n; ++i) {
        for (std::int64_t c = 0; c < count; ++c) to[i * stride + c] = T(results[c * n + i]);
      }
    }
  });
}

/// The statistics of a row: its mean (0 for RMS norm) and 1 / sqrt(variance + eps).
template <class A>
struct Moments {
  A mean;
  A scale;
};

template <bool Centered, class A>
Moments<A> moments(const A* x, std::int64_t n, double eps) {
  const A mean = Centered ? reduce_row<SumOp, A>(x, n) / static_cast<A>(n) : A(0);
  const A squares = row_sum<A>(n, [=](std::int64_t i) { return (x[i] - mean) * (x[i] - mean); });
  return {mean, A(1) / std::sqrt(squares / static_cast<A>(n) + static_cast<A>(eps))};
}

template <bool Centered, class T>
void norm(const Exec& exec, const T* x, T* y, std::int64_t outer, std::int64_t n, std::int64_t inner, double eps,
          std::int64_t padding) {
  using A = accumulator_t<T>;
  const std::int64_t counted = n - padding;
  for_rows<T, 1>(exec, {x}, y, outer, n, inner, [n, counted, eps](const std::array<const A*, 1>& in, A* out) {
    const A* row = in[0];
    const auto m = moments<Centered>(row, counted, eps);
    independent(counted, [=](std::int64_t i) { out[i] = (row[i] - m.mean) * m.scale; });
    std::fill(out + counted, out + n, A(0));
  });
}

template <bool Centered, class T>
void norm_backward(const Exec& exec, const T* x, const T* dy, T* dx, std::int64_t outer, std::int64_t n,
                   std::int64_t inner, double eps, std::int64_t padding) {
  using A = accumulator_t<T>;
  const std::int64_t counted = n - padding;
  for_rows<T, 2>(exec, {x, dy}, dx, outer, n, inner, [n, counted, eps](const std::array<const A*, 2>& in, A* out) {
    const A* row = in[0];
    const A* d = in[1];
    const auto m = moments<Centered>(row, counted, eps);
    const auto size = static_cast<A>(counted);
    const A shift = Centered ? reduce_row<SumOp, A>(d, counted) / size : A(0);
    const A slope = row_sum<A>(counted, [=](std::int64_t i) { return d[i] * ((row[i] - m.mean) * m.scale); }) / size;
    independent(counted,
                [=](std::int64_t i) { out[i] = m.scale * ((d[i] - shift) - (row[i] - m.mean) * m.scale * slope); });
    std::fill(out + counted, out + n, A(0));
  });
}

}  // namespace detail

template <class T>
void softmax(const Exec& exec, const T* x, T* y, std::int64_t outer, std::int64_t n, std::int64_t inner,
             std::int64_t padding) {
  using A = accumulator_t<T>;
  const std::int64_t counted = n - padding;
  detail::for_rows<T, 1>(exec, {x}, y, outer, n, inner, [n, counted](const std::array<const A*, 1>& in, A* out) {
    const A* row = in[0];
    const A top = detail::reduce_row<detail::MaxOp, A>(row, counted);
    independent(counted, [=](std::int64_t i) { out[i] = fast_exp(row[i] - top); });
    const A scale = A(1) / detail::reduce_row<detail::SumOp, A>(out, counted);
    independent(counted, [=](std::int64_t i) { out[i] *= scale; });
    std::fill(out + counted, out + n, A(0));
  });
}

template <class T>
void softmax_backward(const Exec& exec, const T* y, const T* dy, T* dx, std::int64_t outer, std::int64_t n,
                      std::int64_t inner) {
  using A = accumulator_t<T>;
  detail::for_rows<T, 2>(exec, {y, dy}, dx, outer, n, inner, [n](const std::array<const A*, 2>& in, A* out) {
    const A* p = in[0];
    const A* d = in[1];
    const A dot = detail::row_sum<A>(n, [=](std::int64_t i) { return p[i] * d[i]; });
    independent(n, [=](std::int64_t i) { out[i] = p[i] * (d[i] - dot); });
  });
}

template <class T>
void sum_exp(const Exec& exec, const T* x, const T* shift, T* out, std::int64_t rows, std::int64_t n,
             std::int64_t counted) {
  using A = accumulator_t<T>;
  exec.for_each(rows, [=](std::int64_t r) {
    const T* const row = x + r * n;
    const A top = static_cast<A>(shift[r]);
    out[r] = T(detail::row_sum<A>(counted, [=](std::int64_t i) { return fast_exp(static_cast<A>(row[i]) - top); }));
  });
}

template <class T, class I>
void cross_entropy_backward(const Exec& exec, const T* x, const T* shift, const T* total, const I* targets, const T* dy,
                            T* dx, std::int64_t rows, std::int64_t n, std::int64_t first) {
  using A = accumulator_t<T>;
  exec.for_each(rows, [=](std::int64_t r) {
    const T* const row = x + r * n;
    T* const out = dx + r * n;
    const A top = static_cast<A>(shift[r]), slope = static_cast<A>(dy[r]), scale = slope / static_cast<A>(total[r]);
    const std::int64_t target = static_cast<std::int64_t>(targets[r]) - first;
    const bool here = target >= 0 && target < n;
    const A hit = here ? scale * fast_exp(static_cast<A>(row[target]) - top) - slope : A(0);
    independent(n, [=](std::int64_t i) { out[i] = T(scale * fast_exp(static_cast<A>(row[i]) - top)); });
    if (here) out[target] = T(hit);
  });
}

template <class T>
void rms_norm(const Exec& exec, const T* x, T* y, std::int64_t outer, std::int64_t n, std::int64_t inner, double eps,
              std::int64_t padding) {
  detail::norm<false>(exec, x, y, outer, n, inner, eps, padding);
}

template <class T>
void rms_norm_backward(const Exec& exec, const T* x, const T* dy, T* dx, std::int64_t outer, std::int64_t n,
                       std::int64_t inner, double eps, std::int64_t padding) {
  detail::norm_backward<false>(exec, x, dy, dx, outer, n, inner, eps, padding);
}

template <class T>
void layer_norm(const Exec& exec, const T* x, T* y, std::int64_t outer, std::int64_t n, std::int64_t inner, double eps,
                std::int64_t padding) {
  detail::norm<true>(exec, x, y, outer, n, inner, eps, padding);
}

template <class T>
void layer_norm_backward(const Exec& exec, const T* x, const T* dy, T* dx, std::int64_t outer, std::int64_t n,
                         std::int64_t inner, double eps, std::int64_t padding) {
  detail::norm_backward<true>(exec, x, dy, dx, outer, n, inner, eps, padding);
}

}  // namespace shardlib::kernels
