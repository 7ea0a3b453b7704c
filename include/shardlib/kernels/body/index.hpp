// Kernels of index.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "shardlib/kernels/body/layout.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib::kernels::body {

/// The rows of the table that this shard has.
struct TableRows {
  std::int64_t first, count, stride;

  /// The offset of a row, or -1 if another shard has it.
  template <class I>
  [[nodiscard]] constexpr std::int64_t find(I id) const {
    const std::int64_t row = static_cast<std::int64_t>(id) - first;
    return row >= 0 && row < count ? row * stride : -1;
  }
};

/// Adds the rows of one dim's ids to the joined ids of several dims. `loops` walk the joined ids and these.
template <class I>
struct JoinIds {
  static constexpr std::int64_t grain = 4096;
  RowLoops<2> loops;
  TableRows rows;
  const I* ids;
  u32* joined;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    loops.for_elements(
        team, item,
        [steps = loops.inner.strides, rows = rows, ids = ids, joined = joined](const auto& at, std::int64_t i) {
          constexpr u32 elsewhere = std::numeric_limits<u32>::max();
          const std::int64_t row = rows.find(ids[at[1] + i * steps[1]]);
          u32& sum = joined[at[0] + i * steps[0]];
          sum = row < 0 || sum == elsewhere ? elsewhere : sum + static_cast<u32>(row);
        });
  }
};

/// Looks rows up. `loops` walk the result, the table and the indices.
template <class U, class I>
struct Gather {
  static constexpr std::int64_t grain = 8192;
  RowLoops<3> loops;
  TableRows rows;
  const U* table;
  const I* indices;
  U* out;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    const auto element = [steps = loops.inner.strides, rows = rows, table = table, indices = indices, out = out](
                             const auto& at, std::int64_t i) {
      const std::int64_t row = rows.find(indices[at[2] + i * steps[2]]);
      out[at[0] + i * steps[0]] = row < 0 ? U{} : table[at[1] + i * steps[1] + row];
    };
    if constexpr (Team::single) {
      const auto steps = loops.inner.strides;
      const bool whole = steps[0] == 1 && steps[1] == 1 && steps[2] == 0;  // one index for a row
      if (!whole) return loops.for_elements(team, item, element);
      loops.for_rows(item, [&](const auto& at, std::int64_t begin, std::int64_t n) {
        const std::int64_t row = rows.find(indices[at[2]]);
        const std::size_t bytes = static_cast<std::size_t>(n) * sizeof(U);
        U* const to = out + at[0] + begin;
        if (row < 0)
          std::memset(static_cast<void*>(to), 0, bytes);
        else
          std::memcpy(to, table + at[1] + begin + row, bytes);
      });
    } else {
      loops.for_elements(team, item, element);
    }
  }
};

/// A row of the cotangent that a row of the table gets: the offset of the latter and the number of the former.
struct Addition {
  static constexpr std::int64_t nowhere = std::numeric_limits<std::int64_t>::max();
  std::int64_t to, from;

  friend constexpr bool operator<(const Addition& a, const Addition& b) {
    return a.to < b.to || (a.to == b.to && a.from < b.from);
  }
};

/// Lists the additions of a scatter. `loops` walk the list, the table and the indices.
template <class I>
struct ListAdditions {
  static constexpr std::int64_t grain = 4096;
  RowLoops<3> loops;
  TableRows rows;
  const I* indices;
  Addition* list;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    const auto element = [steps = loops.inner.strides, rows = rows, indices = indices, list = list](const auto& at,
                                                                                                    std::int64_t i) {
      const std::int64_t row = rows.find(indices[at[2] + i * steps[2]]), n = at[0] + i * steps[0];
      list[n] = {row < 0 ? Addition::nowhere : at[1] + i * steps[1] + row, n};
    };
    loops.for_elements(team, item, element);
  }
};

/// Adds rows of `columns` elements to the table's, each sum as a whole, in the order of the sorted list, and rounded
/// once. An item is a group of additions. The first one of a row of the table does them all.
template <class T>
struct AddRows {
  const Addition* list;
  const T* cotangent;
  T* table;
  std::int64_t n, columns, group;

  constexpr AddRows(const Addition* additions, const T* from, T* to, std::int64_t count, std::int64_t width)
      : list(additions),
        cotangent(from),
        table(to),
        n(count),
        columns(width),
        group(std::max<std::int64_t>(1, 64 / std::max<std::int64_t>(1, width))) {}
  [[nodiscard]] constexpr std::int64_t items() const { return (n + group - 1) / group; }

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    const std::int64_t first = item * group, width = columns;
    const std::int64_t count = std::min(group, n - first);
    if constexpr (Team::single) {
      for (std::int64_t a = first; a < first + count; ++a) {
        for (std::int64_t c = 0; begins(a) && c < width; c += 64) add<64>(a, c, std::min<std::int64_t>(64, width - c));
      }
    } else {
      team.lanes(count * width, [=, this](std::int64_t i) {
        if (begins(first + i / width)) add<1>(first + i / width, i % width, 1);
      });
    }
  }

 private:
  [[nodiscard]] constexpr bool begins(std::int64_t a) const {
    return list[a].to != Addition::nowhere && (a == 0 || list[a - 1].to != list[a].to);
  }
  /// Makes `width` neighboring sums, up to W.
  template <std::int64_t W>
  SHARDLIB_FUNCTION void add(std::int64_t a, std::int64_t column, std::int64_t width) const {
    const std::int64_t to = list[a].to;
    accumulator_t<T> sums[W];
    T* const row = table + to + column;
    for (std::int64_t i = 0; i < width; ++i) sums[i] = static_cast<accumulator_t<T>>(row[i]);
    for (; a < n && list[a].to == to; ++a) {
      const T* const from = cotangent + list[a].from * columns + column;
      for (std::int64_t i = 0; i < width; ++i) sums[i] += static_cast<accumulator_t<T>>(from[i]);
    }
    for (std::int64_t i = 0; i < width; ++i) row[i] = static_cast<T>(sums[i]);
  }
};

}  // namespace shardlib::kernels::body
