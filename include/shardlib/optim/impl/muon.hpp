// Definitions of muon.hpp.
#pragma once

#include "shardlib/optim/muon.hpp"

#include <cmath>

#include "shardlib/compute/einsum.hpp"
#include "shardlib/compute/reductions.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE Tensor<f32, "Rows Cols"> orthogonalized(const Tensor<f32, "Rows Cols">& x, int steps) {
  using Matrix = Tensor<f32, "Rows Cols">;
  // Products of the shorter side's length.
  const bool tall = x.size("Rows") > x.size("Cols");
  const auto flipped = [tall](const Matrix& m) { return tall ? rename<"Cols Rows -> Rows Cols">(transpose(m)) : m; };
  Matrix y = flipped(x);
  y = y / (std::sqrt(static_cast<double>(item(sum(square(y))))) + 1e-7);  // singular values of at most 1
  for (int i = 0; i < steps; ++i) {
    const auto gram = einsum_unreduced<"Rows Cols, Inner Cols -> Rows Inner">(y, rename<"Rows -> Inner">(y));
    const auto square_of =
        einsum_unreduced<"Rows Inner, Inner Other -> Rows Other">(gram, rename<"Rows Inner -> Inner Other">(gram));
    const auto polynomial = gram * -4.7750 + rename<"Other -> Inner">(square_of) * 2.0315;
    y = y * 3.4445 + einsum_unreduced<"Rows Inner, Inner Cols -> Rows Cols">(polynomial, rename<"Rows -> Inner">(y));
  }
  return flipped(y);
}

}  // namespace shardlib::detail
