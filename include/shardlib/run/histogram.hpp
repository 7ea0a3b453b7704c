// A histogram of an array's values, in buckets that do not depend on them.
#pragma once

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardlib::run {

/// The numbers of values of an array in fixed buckets: four for each power of 2 from 2^-40 to 2^40 and for each
/// sign, one for values nearer to zero, and one for those beyond on either side. A value at an edge is in the bucket
/// that is farther from zero. Values that are not finite are in no bucket, and in none of the other numbers.
/// `Histogram h; h.add(0.5);`
struct Histogram {
  static constexpr int powers = 40;                    ///< edges lie from 2^-powers to 2^powers
  static constexpr int parts = 4;                      ///< the number of buckets of a power of 2
  static constexpr int zero = 2 * powers * parts + 1;  ///< the number of the middle bucket
  static constexpr int buckets = 2 * zero + 1;         ///< the number of buckets

  std::vector<std::int64_t> counts = std::vector<std::int64_t>(buckets);  ///< the values in each bucket
  std::int64_t not_finite = 0;                                            ///< infinities and NaNs
  double min = DBL_MAX, max = -DBL_MAX;                                   ///< these two, if there are no values
  double sum = 0, sum_squares = 0;                                        ///< sums of the values and of their squares

  /// The bucket of a finite value.
  [[nodiscard]] static int bucket_of(double value) {
    // The exponent with the first two bits of the mantissa counts quarters of a power of 2.
    const auto quarter = static_cast<std::int64_t>(std::bit_cast<std::uint64_t>(std::abs(value)) >> 50U);
    const auto distance = std::clamp<std::int64_t>(quarter - parts * (1023 - powers) + 1, 0, zero);
    return zero + static_cast<int>(value < 0 ? -distance : distance);
  }
  /// The right edge of a bucket, which is the left one of the next.
  [[nodiscard]] static double right_edge(int bucket) {
    // The distance of the bucket that begins at the edge and leads away from zero.
    const int distance = bucket < zero ? zero - bucket : bucket - zero + 1;
    if (distance > zero) return DBL_MAX;
    const double edge = std::ldexp(1 + (distance - 1) % parts / double{parts}, (distance - 1) / parts - powers);
    return bucket < zero ? -edge : edge;
  }

  /// Counts a value in its bucket and in the sums, or as one that is not finite.
  void add(double value) {
    if (!std::isfinite(value)) {
      ++not_finite;
      return;
    }
    ++counts[static_cast<std::size_t>(bucket_of(value))];
    min = std::min(min, value);
    max = std::max(max, value);
    sum += value;
    sum_squares += value * value;
  }
};

}  // namespace shardlib::run
