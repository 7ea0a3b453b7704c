// Definitions of reduce_backward.hpp.
#pragma once

#include "shardlib/kernels/reduce_backward.hpp"

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "shardlib/kernels/impl/floating.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::kernels {

namespace detail {

inline constexpr std::int64_t results_at_once = 64;
/// Calls f(first, n, for_rows) for pieces of the results of a reduction: n neighboring ones from `first` on.
/// for_rows(g) calls g(at) in order for each element that the first of them reduces, where `at` is its offset, or from
/// the last to the first one if `backwards`. That of the next result is behind it.
template <class F>
void for_results(const Exec& exec, std::span<const std::int64_t> shape, std::span<const bool> reduced,
                 std::span<const std::int64_t> part, const F& f) {
  const Dims strides = row_major(shape);
  Nest<1> kept;
  Nest<1> taken;
  for (std::size_t d = 0; d < shape.size(); ++d)
    (reduced[d] ? taken : kept).push(reduced[d] && !part.empty() ? part[d] : shape[d], {strides[static_cast<int>(d)]});
  const std::int64_t rows = taken.count();
  const bool together = kept.depth > 0 && kept.loop(kept.depth - 1).strides[0] == 1;
  const std::int64_t columns = together ? kept.pop().extent : 1;
  if (rows == 0) return;
  const std::int64_t tiles = (columns + results_at_once - 1) / results_at_once;
  exec.for_each(kept.count() * tiles, [&](std::int64_t item) {
    const std::int64_t outer = item / tiles, start = item % tiles * results_at_once;
    const Walk<1> first(kept, outer);
    f(outer * columns + start, std::min(results_at_once, columns - start), [&](const auto& g, bool backwards = false) {
      Walk<1> row(taken, 0);
      for (std::int64_t r = 0; r < rows; ++r, row.next()) {
        const std::int64_t offset = backwards ? Walk<1>(taken, rows - 1 - r).offsets[0] : row.offsets[0];
        g(first.offsets[0] + offset + start);
      }
    });
  });
}

}  // namespace detail

template <class AnyDType>
void extremum_backward(const Exec& exec, AnyDType dtype, const void* in, std::span<const std::int64_t> shape,
                       std::span<const bool> reduced, const void* extrema, const void* ct, void* out,
                       std::span<const std::int64_t> part) {
  detail::visit_floating(dtype, "max", [&]<class T>(T) {
    using Acc = accumulator_t<T>;
    detail::for_results(exec, shape, reduced, part, [&](std::int64_t first, std::int64_t n, const auto& for_rows) {
      const T* const best = static_cast<const T*>(extrema) + first;
      const T* const cts = static_cast<const T*>(ct) + first;
      bool found[detail::results_at_once] = {};
      for_rows([&](std::int64_t at) {
        const T* const x = static_cast<const T*>(in) + at;
        T* const dx = static_cast<T*>(out) + at;
        for (std::int64_t c = 0; c < n; ++c) {
          const auto v = static_cast<Acc>(x[c]), e = static_cast<Acc>(best[c]);
          const bool here = !found[c] && (v == e || (v != v && e != e));
          dx[c] = here ? cts[c] : T(0);
          found[c] = found[c] || here;
        }
      });
    });
  });
}

template <class AnyDType>
void prod_backward(const Exec& exec, AnyDType dtype, const void* in, std::span<const std::int64_t> shape,
                   std::span<const bool> reduced, const void* ct, void* out, std::span<const std::int64_t> part) {
  detail::visit_floating(dtype, "prod", [&]<class T>(T) {
    using Acc = accumulator_t<T>;
    detail::for_results(exec, shape, reduced, part, [&](std::int64_t first, std::int64_t n, const auto& for_rows) {
      const T* const cts = static_cast<const T*>(ct) + first;
      // The product of the elements before, then times that of the elements behind: nothing is divided.
      Acc product[detail::results_at_once];
      std::fill_n(product, n, Acc(1));
      for_rows([&](std::int64_t at) {
        const T* const x = static_cast<const T*>(in) + at;
        T* const dx = static_cast<T*>(out) + at;
        for (std::int64_t c = 0; c < n; ++c) {
          dx[c] = static_cast<T>(product[c]);
          product[c] *= static_cast<Acc>(x[c]);
        }
      });
      for (std::int64_t c = 0; c < n; ++c) product[c] = static_cast<Acc>(cts[c]);
      const bool backwards = true;
      for_rows(
          [&](std::int64_t at) {
            const T* const x = static_cast<const T*>(in) + at;
            T* const dx = static_cast<T*>(out) + at;
            for (std::int64_t c = 0; c < n; ++c) {
              dx[c] = static_cast<T>(static_cast<Acc>(dx[c]) * product[c]);
              product[c] *= static_cast<Acc>(x[c]);
            }
          },
          backwards);
    });
  });
}

}  // namespace shardlib::kernels
