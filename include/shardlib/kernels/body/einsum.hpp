// Kernels of einsum.hpp, for einsums that are not matrix products.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "shardlib/kernels/body/reduction.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/support/wrapping.hpp"

namespace shardlib::kernels::body {

/// The sums of products of an einsum: over `kept` for the results, and over `summed` for the terms of each.
template <class T>
struct ProductTerms {
  Nest<3> kept, summed;
  const T* lhs;
  const T* rhs;

  /// Term i of the result that stands at the offsets.
  [[nodiscard]] SHARDLIB_FUNCTION T operator()(const std::array<std::int64_t, 3>& at, std::int64_t i) const {
    const Walk<3> term(summed, i);
    return shardlib::detail::WrappingProduct()(lhs[at[0] + term.offsets[0]], rhs[at[1] + term.offsets[1]]);
  }
};

/// Many results: each lane sums its own.
template <class T>
struct SumProducts {
  static constexpr std::int64_t grain = 1024;
  ProductTerms<T> terms;
  std::int64_t n, outs;
  T* out;

  [[nodiscard]] std::int64_t items() const { return (outs + grain - 1) / grain; }
  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    const std::int64_t piece = grain, first = item * piece;
    team.lanes(std::min(piece, outs - first), [this, first](std::int64_t i) {
      const auto at = Walk<3>(terms.kept, first + i).offsets;
      T total = terms(at, 0);
      for (std::int64_t k = 1; k < n; ++k) total = detail::SumOp::combine(total, terms(at, k));
      out[at[2]] = total;
    });
  }
};

/// Few results: the lanes share the terms of each.
template <class T>
struct SumProductsTogether {
  ProductTerms<T> terms;
  std::int64_t n;
  T* out;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    const auto at = Walk<3>(terms.kept, item).offsets;
    const T total =
        detail::team_reduce<detail::SumOp, T>(team, n, [this, &at](std::int64_t i) { return terms(at, i); });
    team.one([this, &at, total] { out[at[2]] = total; });
  }
};

}  // namespace shardlib::kernels::body
