// Kernels of arrays that the positions of their elements determine.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib::kernels::body {

/// The cosines and sines of the angles of `half` pairs at a position, which is an item. angles(position, pair, width)
/// is an angle, angles.scale() a factor of both, and `sign` one of the sines.
template <class T, class Angles>
struct RotaryTable {
  Angles angles;
  std::int64_t first, half, width;
  double sign;
  T* cosine;
  T* sine;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    team.lanes(half, [of = angles, position = first + item, pairs = width, scale = angles.scale(),
                      signed_scale = sign * angles.scale(), to_cosine = cosine + item * half,
                      to_sine = sine + item * half](std::int64_t i) {
      const double angle = of(position, i, pairs);
      to_cosine[i] = static_cast<T>(scale * std::cos(angle));
      to_sine[i] = static_cast<T>(signed_scale * std::sin(angle));
    });
  }
};

/// The numbers from `first` on, in pieces.
struct Iota {
  static constexpr std::int64_t piece = 4096;
  std::int64_t first, n;
  i32* out;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t longest = piece;
    const std::int64_t begin = item * longest;
    team.lanes(std::min(longest, n - begin),
               [to = out + begin, from = first + begin](std::int64_t i) { to[i] = static_cast<i32>(from + i); });
  }
};

/// A row, which is an item, of n columns: whether `ahead` + the row is at least the column.
struct CausalMask {
  std::int64_t ahead, n;
  bool_* out;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    team.lanes(n, [to = out + item * n, last = ahead + item](std::int64_t j) { to[j] = last >= j; });
  }
};

}  // namespace shardlib::kernels::body
