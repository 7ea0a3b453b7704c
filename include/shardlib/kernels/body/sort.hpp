// Kernels that sort a list: they sort runs, and merge neighboring runs until one is left.
#pragma once

#include <algorithm>
#include <cstdint>

#include "shardlib/support/function.hpp"

namespace shardlib::kernels::body {

/// Sorts runs of `in` into `out`, an item each. No two elements are equal, so the result does not depend on the way.
template <class E>
struct SortRuns {
  static constexpr std::int64_t length = 512;
  const E* in;
  E* out;
  std::int64_t n;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t longest = length;
    const E* const from = in + item * longest;
    E* const to = out + item * longest;
    const std::int64_t count = std::min(longest, n - item * longest);
    if constexpr (Team::single) {
      std::copy_n(from, count, to);
      std::sort(to, to + count);
    } else {
      team.lanes(count, [=](std::int64_t i) {
        std::int64_t before = 0;
        for (std::int64_t j = 0; j < count; ++j) before += from[j] < from[i] ? 1 : 0;
        to[before] = from[i];
      });
    }
  }
};

/// Merges each two neighboring runs of `length` elements of `in` into one of `out`. An item is a piece of a result.
template <class E>
struct MergeRuns {
  static constexpr std::int64_t piece = 2 * SortRuns<E>::length;
  const E* in;
  E* out;
  std::int64_t n, length;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t longest = piece;
    const std::int64_t begin = item * longest, start = begin / (2 * length) * (2 * length), first = begin - start;
    const std::int64_t count = std::min(longest, n - begin);
    const Runs runs{in + start, in + std::min(n, start + length), std::min(length, n - start),
                    std::clamp(n - start - length, std::int64_t{0}, std::int64_t{length})};
    E* const to = out + begin;
    if constexpr (Team::single) {
      std::int64_t taken = runs.split(first);
      for (std::int64_t i = 0; i < count; ++i) {
        const bool left = runs.takes_left(first + i, taken);
        to[i] = left ? runs.left[taken] : runs.right[first + i - taken];
        taken += left ? 1 : 0;
      }
    } else {
      team.lanes(count, [=](std::int64_t i) {
        const std::int64_t taken = runs.split(first + i);
        to[i] = runs.takes_left(first + i, taken) ? runs.left[taken] : runs.right[first + i - taken];
      });
    }
  }

 private:
  struct Runs {
    const E *left, *right;
    std::int64_t lefts, rights;

    /// How many of the first `place` elements of the result come from the left run.
    [[nodiscard]] SHARDLIB_FUNCTION std::int64_t split(std::int64_t place) const {
      std::int64_t low = std::max<std::int64_t>(0, place - rights), high = std::min(place, lefts);
      while (low < high) {
        const std::int64_t middle = (low + high) / 2;
        if (left[middle] < right[place - 1 - middle])
          low = middle + 1;
        else
          high = middle;
      }
      return low;
    }
    /// Whether the result's element at `place` is the next one of the left run, after `taken` of it.
    [[nodiscard]] SHARDLIB_FUNCTION bool takes_left(std::int64_t place, std::int64_t taken) const {
      return place - taken == rights || (taken < lefts && left[taken] < right[place - taken]);
    }
  };
};

}  // namespace shardlib::kernels::body
