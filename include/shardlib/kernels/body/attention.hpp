// Kernels of attention_products.hpp: rows of scores, and copies between dense heads and strided ones.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "shardlib/kernels/strided.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/support/math.hpp"

namespace shardlib::kernels::body {

/// Where a head begins in the four arrays of AttentionLoops.
using HeadOffsets = std::array<std::int64_t, 4>;

/// Lists where the heads from `first` on begin. An item is up to `group` heads. Other kernels read the list, because a
/// walk takes many divisions.
struct ListHeads {
  static constexpr std::int64_t group = 64;
  Nest<4> heads;
  std::int64_t first, count;
  HeadOffsets* out;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t longest = group;
    const std::int64_t begin = item * longest;
    team.lanes(std::min(longest, count - begin), [=, this](std::int64_t i) {
      const Walk<4> walk(heads, first + begin + i);
      for (std::size_t k = 0; k < 4; ++k) out[begin + i][k] = walk.offsets[k];
    });
  }
};

/// An operand's rows: elements of row r of a head lie `element` apart from first + heads[head][operand] + r row on.
template <class T>
struct StridedHeads {
  T* first;
  const HeadOffsets* heads;
  std::size_t operand;
  std::int64_t row, element;

  [[nodiscard]] SHARDLIB_FUNCTION T* at(std::int64_t head, std::int64_t r) const {
    return first + heads[head][operand] + r * row;
  }
};

/// The rows of heads of `rows` rows each. An item is up to `group` rows of one head.
struct HeadItems {
  std::int64_t heads, rows, group;
  std::int64_t groups = (rows + group - 1) / group;

  /// Rows of one head, and the number of the first of them among the rows of all heads.
  struct Rows {
    std::int64_t head, first, count, number;
  };
  [[nodiscard]] constexpr std::int64_t count() const { return heads * groups; }
  [[nodiscard]] constexpr Rows of(std::int64_t item) const {  // 32 bits, as longer divisions are slow
    const std::int64_t head = static_cast<std::uint32_t>(item) / static_cast<std::uint32_t>(groups);
    const std::int64_t start = (item - head * groups) * group, left = rows - start;
    return {head, start, group < left ? group : left, head * rows + start};
  }
};

/// Copies strided rows to dense ones.
template <class T>
struct LoadHeads {
  HeadItems items;
  std::int64_t width;
  StridedHeads<const T> in;
  T* out;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    const auto rows = items.of(item);
    const T* const from = in.at(rows.head, rows.first);
    T* const to = out + rows.number * width;
    const auto n = static_cast<std::uint32_t>(width);
    const std::int64_t row = in.row, element = in.element;
    team.lanes(rows.count * width, [=](std::int64_t i) {
      const std::uint32_t r = static_cast<std::uint32_t>(i) / n, c = static_cast<std::uint32_t>(i) - r * n;
      to[i] = from[r * row + c * element];
    });
  }
};

/// Copies dense rows to strided ones. If `add` is set, adds them to what those hold, times its row's factor if there
/// are any.
template <class From, class T>
struct StoreHeads {
  using A = accumulator_t<From>;
  HeadItems items;
  std::int64_t width;
  const From* in;
  StridedHeads<T> out;
  const A* factors = nullptr;
  bool add = false;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    const auto rows = items.of(item);
    const From* const from = in + rows.number * width;
    T* const to = out.at(rows.head, rows.first);
    const A* const scales = factors == nullptr ? nullptr : factors + rows.number;
    const auto n = static_cast<std::uint32_t>(width);
    const std::int64_t row = out.row, element = out.element;
    const bool adds = add;
    team.lanes(rows.count * width, [=](std::int64_t i) {
      const std::uint32_t r = static_cast<std::uint32_t>(i) / n, c = static_cast<std::uint32_t>(i) - r * n;
      T& result = to[r * row + c * element];
      A value = static_cast<A>(from[i]);
      if (adds) value += (scales == nullptr ? A(1) : scales[r]) * static_cast<A>(result);
      result = static_cast<T>(value);
    });
  }
};

/// Lanes of a kernel of rows: four rows, each with 32 columns, so that neighboring lanes read neighboring elements,
/// and a short row keeps the lanes busy too. Column c has the elements c, c + 32, ... of its row.
struct RowLanes {
  static constexpr std::int64_t rows = 4, columns = 32, count = rows * columns;

  /// Calls f(j, load(j)) for the elements j < n of a column. It loads four at a time, so that a lane waits for them
  /// together. No later load may read the elements that f writes.
  template <class Load, class F>
  SHARDLIB_FUNCTION static void for_column(std::int64_t column, std::int64_t n, const Load& load, const F& f) {
    constexpr int together = 4;
    for (std::int64_t first = column; first < n; first += together * columns) {
      decltype(load(first)) loaded[together] = {};
      for (int u = 0; u < together; ++u)
        if (first + u * columns < n) loaded[u] = load(first + u * columns);
      for (int u = 0; u < together; ++u)
        if (first + u * columns < n) f(first + u * columns, loaded[u]);
    }
  }
};

/// The sums of x y over the width, for each row.
template <class T>
struct HeadDots {
  using A = accumulator_t<T>;
  HeadItems items;  ///< of RowLanes::rows
  std::int64_t width;
  StridedHeads<const T> x, y;
  A* out;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t columns = RowLanes::columns;
    const auto rows = items.of(item);
    const T* const left = x.at(rows.head, rows.first);
    const T* const right = y.at(rows.head, rows.first);
    const std::int64_t n = width, x_row = x.row, x_element = x.element, y_row = y.row, y_element = y.element;
    A* const to = out + rows.number;
    A* const tile = team.template tile<A, RowLanes::count>();
    team.lanes(rows.count * columns, [=](std::int64_t i) {
      const std::int64_t r = i / columns;
      A sum = 0;
      for (std::int64_t c = i % columns; c < n; c += columns)
        sum += static_cast<A>(left[r * x_row + c * x_element]) * static_cast<A>(right[r * y_row + c * y_element]);
      tile[i] = sum;
    });
    team.barrier();
    team.lanes(rows.count, [=](std::int64_t r) {
      A sum = 0;
      for (std::int64_t c = 0; c < columns; ++c) sum += tile[r * columns + c];
      to[r] = sum;
    });
  }
};

/// The scores of a block of queries with the keys from 0 on, of several heads: a dense array of rows that are `stride`
/// apart. An item has RowLanes::rows of them.
struct ScoreRows {
  HeadItems items;
  const HeadOffsets* heads;
  std::int64_t query;                        ///< the number of the first query
  std::int64_t keys, stride;                 ///< scores of a row, and the distance to the next row
  bool earlier;                              ///< each query sees all keys, of its segment
  const i32 *query_segments, *key_segments;  ///< where the segments of the heads begin; null if there are none
  std::int64_t along_sums, along_segments;

  /// The row and the first column of a lane.
  struct Lane {
    std::int64_t column;
    std::int64_t number;    ///< of the row in the array of scores
    std::int64_t sum;       ///< where the row's log-sum-exp is
    std::int64_t position;  ///< the row's query, among all of its head
    std::int64_t head;
    std::int64_t seen;    ///< the keys from 0 on that are not later than the query
    const i32* segments;  ///< of the keys; null if there are none
    std::int64_t along_segments;
    i32 segment;  ///< of the query

    [[nodiscard]] SHARDLIB_FUNCTION bool sees(std::int64_t key) const {
      return key < seen && (segments == nullptr || segments[key * along_segments] == segment);
    }
  };
  [[nodiscard]] SHARDLIB_FUNCTION Lane lane(const HeadItems::Rows& rows, std::int64_t i) const {
    const std::int64_t r = i / RowLanes::columns, position = query + rows.first + r;
    const HeadOffsets& head = heads[rows.head];
    const bool segmented = query_segments != nullptr;
    return {.column = i % RowLanes::columns,
            .number = rows.number + r,
            .sum = head[2] + position * along_sums,
            .position = position,
            .head = rows.head,
            .seen = earlier || position + 1 > keys ? keys : position + 1,
            .segments = segmented ? key_segments + head[3] : nullptr,
            .along_segments = along_segments,
            .segment = segmented ? query_segments[head[3] + position * along_segments] : 0};
  }
};

/// The score of a key, whether the query sees it, and the probability's cotangent in the backward pass.
template <class A>
struct Score {
  A value = 0;
  bool seen = false;
  A ct = 0;
};

/// A part of a sum of exponentials: exp(top) total.
template <class A>
struct PartOfSum {
  A top = std::numeric_limits<A>::lowest() / 4;  ///< finite, so that a sum of nothing does not become NaN
  A total = 0;

  /// Adds exp(score). A NaN shows in the total.
  SHARDLIB_FUNCTION void add(A score) {
    const A above = score - top;
    const bool higher = above > 0;
    const A e = fast_exp(higher ? -above : above);
    total = higher ? total * e + 1 : total + e;
    top = higher ? score : top;
  }
  /// Adds another part.
  SHARDLIB_FUNCTION void add(const PartOfSum& part) {
    const A highest = part.top > top ? part.top : top;
    total = total * fast_exp(top - highest) + part.total * fast_exp(part.top - highest);
    top = highest;
  }
};

/// The softmax of rows of scores, with zeros for keys that a query does not see, and each row's log-sum-exp. After
/// earlier keys, `sums` holds their log-sum-exp; `factors` receives the factors of their results in the whole result.
template <class T>
struct AttentionProbabilities {
  using A = accumulator_t<T>;
  ScoreRows rows;
  A scale;
  const A* scores;
  T* out;      ///< may be `scores`
  A* sums;     ///< null: not wanted
  A* factors;  ///< for all queries of each head, `length` apart
  std::int64_t length;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t columns = RowLanes::columns, some = 8;
    const ScoreRows all = rows;
    const auto mine = all.items.of(item);
    const A times = scale;
    const A* const from = scores;
    auto* const parts = team.template tile<PartOfSum<A>, RowLanes::count>();
    team.lanes(mine.count * columns, [=](std::int64_t i) {
      const auto lane = all.lane(mine, i);
      const A* const row = from + lane.number * all.stride;
      PartOfSum<A> part;
      const auto load = [=](std::int64_t j) { return Score<A>{row[j], lane.sees(j)}; };
      RowLanes::for_column(lane.column, lane.seen, load, [&part, times](std::int64_t /*key*/, const Score<A>& score) {
        if (score.seen) part.add(times * score.value);
      });
      parts[i] = part;
    });
    team.barrier();
    // The parts of a row in two steps. One step would keep four lanes busy for long, and more would be more barriers.
    team.lanes(mine.count * some, [=](std::int64_t i) {
      PartOfSum<A>* const first = parts + i / some * columns + i % some;
      PartOfSum<A> part = *first;
      for (std::int64_t c = some; c < columns; c += some) part.add(first[c]);
      *first = part;
    });
    team.barrier();
    team.lanes(mine.count, [=, to = sums, ratios = factors, queries = length](std::int64_t r) {
      PartOfSum<A>* const first = parts + r * columns;
      PartOfSum<A> part = *first;
      for (std::int64_t c = 1; c < some; ++c) part.add(first[c]);
      const auto lane = all.lane(mine, r * columns);
      if (all.earlier) {
        const A before = to[lane.sum];
        part.add(PartOfSum<A>{before, A(1)});
        ratios[lane.head * queries + lane.position] = fast_exp(before - part.top) / part.total;
      }
      if (to != nullptr) to[lane.sum] = part.top + std::log(part.total);
      part.total = A(1) / part.total;
      *first = part;
    });
    team.barrier();
    team.lanes(mine.count * columns, [=, to = out](std::int64_t i) {
      const auto lane = all.lane(mine, i);
      const A* const row = from + lane.number * all.stride;
      T* const result = to + lane.number * all.stride;
      const PartOfSum<A> sum = parts[i / columns * columns];
      const auto load = [=](std::int64_t j) { return lane.sees(j) ? Score<A>{row[j], true} : Score<A>{}; };
      RowLanes::for_column(lane.column, all.keys, load, [=](std::int64_t j, const Score<A>& score) {
        result[j] = static_cast<T>(score.seen ? fast_exp(times * score.value - sum.top) * sum.total : A(0));
      });
    });
  }
};

/// The probabilities again, from the scores and their log-sum-exps, and the cotangents of q k' from those of the
/// probabilities: p (d - dot) scale, with a dot for each query. Null results are not computed.
template <class T>
struct AttentionScoresBackward {
  using A = accumulator_t<T>;
  ScoreRows rows;
  A scale;
  const A* scores;
  const A* sums;
  const A* cts;
  const A* dots;  ///< for all queries of each head, `length` apart
  std::int64_t length;
  T* probabilities;  ///< may be `scores`
  T* out;            ///< may be `cts`

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t columns = RowLanes::columns;
    const ScoreRows all = rows;
    const auto mine = all.items.of(item);
    team.lanes(mine.count * columns, [=, times = scale, from = scores, d = cts, to = probabilities, ds = out,
                                      logs = sums, products = dots, queries = length](std::int64_t i) {
      const auto lane = all.lane(mine, i);
      const std::int64_t row = lane.number * all.stride;
      const A sum = logs[lane.sum];
      const A dot = ds == nullptr ? A(0) : products[lane.head * queries + lane.position];
      const auto load = [=](std::int64_t j) {
        return lane.sees(j) ? Score<A>{from[row + j], true, ds == nullptr ? A(0) : d[row + j]} : Score<A>{};
      };
      RowLanes::for_column(lane.column, all.keys, load, [=](std::int64_t j, const Score<A>& score) {
        const A p = score.seen ? fast_exp(times * score.value - sum) : A(0);
        if (to != nullptr) to[row + j] = static_cast<T>(p);
        if (ds != nullptr) ds[row + j] = static_cast<T>(score.seen ? p * (score.ct - dot) * times : A(0));
      });
    });
  }
};

}  // namespace shardlib::kernels::body
