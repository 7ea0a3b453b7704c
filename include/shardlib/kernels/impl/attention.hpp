// Definitions of attention.hpp.
#pragma once

#include "shardlib/kernels/attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "shardlib/kernels/body/reduction.hpp"
#include "shardlib/kernels/gemm.hpp"
#include "shardlib/kernels/impl/attention_fused.hpp"
#include "shardlib/kernels/impl/attention_products.hpp"
#include "shardlib/support/math.hpp"

namespace shardlib::kernels {

namespace detail {

/// One head's rows in memory.
template <class T>
struct HeadRows {
  T* first;
  std::int64_t stride;   ///< between rows
  std::int64_t element;  ///< between elements of a row
};

/// Copies the rows [begin, end), times a factor, to a dense array in the accumulator type. store_rows copies back.
template <class T, class A>
void load_rows(const HeadRows<const T>& from, std::int64_t begin, std::int64_t end, std::int64_t width, A factor,
               A* to) {
  for (std::int64_t r = begin; r < end; ++r, to += width) {
    const T* row = from.first + r * from.stride;
    if (from.element == 1) {
      // Rows of a head are on different pages, so the hardware does not load the next row in advance.
      if (r + 8 < end)
        for (std::int64_t c = 0; c < width; c += 64 / static_cast<std::int64_t>(sizeof(T)))
          __builtin_prefetch(row + 8 * from.stride + c);
      independent(width, [=](std::int64_t c) { to[c] = factor * static_cast<A>(row[c]); });
    } else {
      for (std::int64_t c = 0; c < width; ++c) to[c] = factor * static_cast<A>(row[c * from.element]);
    }
  }
}
template <class T, class A>
void store_rows(const A* from, std::int64_t begin, std::int64_t end, std::int64_t width, A factor,
                const HeadRows<T>& to) {
  for (std::int64_t r = begin; r < end; ++r, from += width) {
    T* row = to.first + r * to.stride;
    if (to.element == 1)
      independent(width, [=](std::int64_t c) { row[c] = static_cast<T>(factor * from[c]); });
    else
      for (std::int64_t c = 0; c < width; ++c) row[c * to.element] = static_cast<T>(factor * from[c]);
  }
}

/// Rows of scores are processed in whole groups of lanes, so that compilers vectorize sums without permission to
/// reorder them. -inf fills the last group.
inline constexpr std::int64_t attention_lanes = 32;

/// The maximum of `start` and a row of whole groups. It may miss a NaN, but the row's exponentials then contain it.
template <class A>
A row_maximum(const A* row, std::int64_t n, A start) {
  A lanes[attention_lanes];
  std::fill_n(lanes, attention_lanes, start);
  for (std::int64_t c = 0; c < n; c += attention_lanes)
    for (std::int64_t l = 0; l < attention_lanes; ++l) lanes[l] = row[c + l] > lanes[l] ? row[c + l] : lanes[l];
  for (std::int64_t half = attention_lanes / 2; half > 0; half /= 2)
    for (std::int64_t l = 0; l < half; ++l) lanes[l] = lanes[l + half] > lanes[l] ? lanes[l + half] : lanes[l];
  return lanes[0];
}

/// Sets row = exp(row - shift) over whole groups and returns the sum.
template <class A>
A row_exponentials(A* row, std::int64_t n, A shift) {
  A lanes[attention_lanes] = {};
  for (std::int64_t c = 0; c < n; c += attention_lanes)
    for (std::int64_t l = 0; l < attention_lanes; ++l) {
      const A e = fast_exp(row[c + l] - shift);
      row[c + l] = e;
      lanes[l] += e;
    }
  for (std::int64_t half = attention_lanes / 2; half > 0; half /= 2)
    for (std::int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}

/// A block of scores: the queries [query, query + m) and the keys [key, key + n). Its rows are `stride` apart.
struct ScoreBlock {
  std::int64_t query, m, key, n, stride;
  bool first;    ///< whether it is the first block of these queries
  bool earlier;  ///< whether all of the keys precede the queries

  /// The number of the block's keys, counted from its start, that the query of a row may see.
  [[nodiscard]] std::int64_t seen(std::int64_t row) const {
    return earlier ? n : std::clamp<std::int64_t>(query + row + 1 - key, 0, n);
  }
};

/// The blocks of one head. A block has few queries, so that its part above the diagonal is small, and many keys, so
/// that most rows need one pass. A block of scores fits the second-level cache.
template <class A>
class AttentionBlocks {
 public:
  static constexpr std::int64_t max_rows = 64, max_columns = 512;
  static constexpr A none = -std::numeric_limits<A>::infinity();

  AttentionBlocks(const Exec& exec, const AttentionLoops& loops)
      : rows(std::min(max_rows, loops.length)),
        area(rows * std::min(max_columns, whole(loops.keys()))),
        exec_(exec),
        length_(loops.length),
        keys_(loops.keys()),
        width_(loops.width),
        earlier_(loops.earlier) {}

  const std::int64_t rows;  ///< rows of a block
  const std::int64_t area;  ///< number of scores in a block

  /// The bytes of `matrices` of [keys x width], `tiles` of [rows x width] and `scores` blocks.
  [[nodiscard]] std::size_t bytes(std::int64_t matrices, std::int64_t tiles, std::int64_t scores) const {
    const std::int64_t numbers = (matrices * keys_ + tiles * rows) * width_ + scores * area + 2 * rows;
    return static_cast<std::size_t>(numbers) * sizeof(A) +
           static_cast<std::size_t>(earlier_ ? length_ + keys_ : length_) * sizeof(i32);
  }

  /// Calls f(block) for each block of keys that some query of [begin, end) may see.
  template <class F>
  void for_keys(std::int64_t begin, std::int64_t end, const AttentionSegments& segments, const F& f) const {
    const std::int64_t keys = earlier_ ? keys_ : end;
    std::int64_t key = 0;
    if (segments.queries != nullptr) {  // skips the documents before those of the queries
      const auto [low, high] = std::minmax_element(segments.queries + begin, segments.queries + end);
      while (key < keys && (segments.keys[key] < *low || segments.keys[key] > *high)) ++key;
    }
    for (bool first = true; key < keys; key += max_columns, first = false) {
      const std::int64_t n = std::min(max_columns, keys - key);
      f(ScoreBlock{begin, end - begin, key, n, whole(n), first, earlier_});
    }
  }

  /// The scores of a block, with -inf for keys that a query does not see. Each row is filled to a whole group.
  void scores(const ScoreBlock& b, const A* queries, const A* keys, const AttentionSegments& segments, A* out) const {
    gemm<A>(exec_, false, true, b.m, b.n, width_, queries, width_, keys + b.key * width_, width_, out, b.stride, false);
    for (std::int64_t r = 0; r < b.m; ++r) {
      A* row = out + r * b.stride;
      const std::int64_t seen = b.seen(r);
      if (segments.queries != nullptr) {
        const i32 mine = segments.queries[b.query + r];
        const i32* theirs = segments.keys + b.key;
        independent(seen, [=](std::int64_t c) { row[c] = theirs[c] == mine ? row[c] : none; });
      }
      std::fill(row + seen, row + whole(seen), none);
      if (whole(seen) < b.n) std::fill(row + whole(seen), row + b.n, A(0));
    }
  }
  /// n rounded up to whole groups of lanes.
  static std::int64_t whole(std::int64_t n) { return (n + attention_lanes - 1) / attention_lanes * attention_lanes; }

 private:
  const Exec& exec_;
  std::int64_t length_, keys_, width_;
  bool earlier_;
};

/// Allocates parts of a scratch buffer.
template <class A>
struct Parts {
  A* next;
  A* take(std::int64_t n) {
    A* part = next;
    next += n;
    return part;
  }
};

/// The rows of the head at `at`, in one of the operands.
template <class T>
HeadRows<T> head_rows(const AttentionLoops& loops, T* x, std::size_t operand, const AttentionLoops::Strides& at) {
  return {x + at[operand], loops.along_length[operand], loops.along_width[operand]};
}

/// The segments of one head's positions, contiguous. Null if there are none.
inline AttentionSegments dense_segments(const AttentionLoops& loops, const AttentionSegments& segments,
                                        const AttentionLoops::Strides& at, i32* scratch) {
  const std::int64_t stride = loops.along_length[AttentionLoops::segment];
  const auto dense = [&](const i32* all, std::int64_t n, i32* copy) -> const i32* {
    const i32* const from = all + at[AttentionLoops::segment];
    if (stride == 1) return from;
    for (std::int64_t i = 0; i < n; ++i) copy[i] = from[i * stride];
    return copy;
  };
  if (segments.queries == nullptr) return {};
  const i32* const queries = dense(segments.queries, loops.length, scratch);
  return {queries, loops.earlier ? dense(segments.keys, loops.earlier_keys, scratch + loops.length) : queries};
}

}  // namespace detail

template <class T, class R>
void causal_attention(const Exec& exec, const AttentionLoops& loops, const T* q, const T* k, const T* v,
                      AttentionSegments segments, R* out, accumulator_t<T>* sums) {
  if (exec.on_device()) {
    if constexpr (std::is_same_v<T, bf16>)
      if (detail::fuses_attention(loops, {q, k, v, out}))
        return detail::attention_fused(exec, loops, q, k, v, segments, out, sums);
    return detail::attention_products(exec, loops, q, k, v, segments, out, sums);
  }
  using A = accumulator_t<T>;
  using L = AttentionLoops;
  const std::int64_t length = loops.length, number = loops.keys(), width = loops.width;
  const detail::AttentionBlocks<A> blocks(exec, loops);
  const std::size_t bytes = blocks.bytes(2, 2, 1);
  const std::int64_t count = loops.heads.count();
  if (count == 0 || length == 0 || number == 0) return;
  exec.count_scratch(count, bytes);
  exec.for_each(count, [&](std::int64_t item) {
    const Buffer scratch = exec.pool->allocate(bytes);
    detail::Parts<A> parts{scratch.as<A>()};
    A* const keys = parts.take(number * width);
    A* const values = parts.take(number * width);
    A* const queries = parts.take(blocks.rows * width);
    A* const results = parts.take(blocks.rows * width);
    A* const tops = parts.take(blocks.rows);
    A* const totals = parts.take(blocks.rows);
    A* const scores = parts.take(blocks.area);
    const L::Strides head = Walk<4>(loops.heads, item).offsets;
    const auto rows = [&](auto* x, std::size_t as, const L::Strides& at) {
      return detail::head_rows(loops, x, as, at);
    };
    detail::load_rows(rows(k, L::key, head), 0, number, width, A(1), keys);
    detail::load_rows(rows(v, L::key, head), 0, number, width, A(1), values);
    detail::for_groups(loops, head, [&](const L::Strides& at) {
      const auto mine = detail::dense_segments(loops, segments, at, reinterpret_cast<i32*>(parts.next));
      const auto sum = [&](std::int64_t row) -> accumulator_t<T>& {
        return sums[at[L::sum] + row * loops.along_length[L::sum]];
      };
      for (std::int64_t begin = 0; begin < length; begin += blocks.rows) {
        const std::int64_t end = std::min(length, begin + blocks.rows), m = end - begin;
        detail::load_rows(rows(q, L::query, at), begin, end, width, static_cast<A>(loops.scale), queries);
        if (loops.earlier) {  // results that are divided by their totals: as if one key had given them
          detail::load_rows(rows(static_cast<const R*>(out), L::query, at), begin, end, width, A(1), results);
          for (std::int64_t r = 0; r < m; ++r) tops[r] = sum(begin + r);
          std::fill_n(totals, m, A(1));
        } else {
          // A finite value, so that a row that sees no key of a block does not become NaN.
          std::fill_n(tops, m, std::numeric_limits<A>::lowest() / 4);
          std::fill_n(totals, m, A(0));
        }
        blocks.for_keys(begin, end, mine, [&](const detail::ScoreBlock& b) {
          const bool first = b.first && !loops.earlier;
          blocks.scores(b, queries, keys, mine, scores);
          for (std::int64_t r = 0; r < m; ++r) {
            A* const row = scores + r * b.stride;
            const std::int64_t seen = blocks.whole(b.seen(r));
            const A top = detail::row_maximum(row, seen, tops[r]);
            const A total = detail::row_exponentials(row, seen, top);
            if (!first) {
              const A shrink = fast_exp(tops[r] - top);
              A* const result = results + r * width;
              independent(width, [=](std::int64_t c) { result[c] *= shrink; });
              totals[r] *= shrink;
            }
            totals[r] += total;
            tops[r] = top;
          }
          gemm<A>(exec, false, false, m, width, b.n, scores, b.stride, values + b.key * width, width, results, width,
                  !first);
        });
        for (std::int64_t r = 0; r < m; ++r) {
          detail::store_rows(results + r * width, begin + r, begin + r + 1, width, A(1) / totals[r],
                             rows(out, L::query, at));
          if (sums != nullptr) sum(begin + r) = tops[r] + std::log(totals[r]);
        }
      }
    });
  });
}

namespace detail {

/// The numbers in the backward pass of a head: those of all its keys, of a block's queries, and of a block of scores.
template <class A>
struct BackwardScratch {
  A *keys, *values, *key_cts, *value_cts, *queries, *cts, *query_cts, *dots, *scores, *score_cts;

  BackwardScratch(Parts<A>& parts, const AttentionBlocks<A>& blocks, std::int64_t number, std::int64_t width) {
    for (A** matrix : {&keys, &values, &key_cts, &value_cts}) *matrix = parts.take(number * width);
    for (A** tile : {&queries, &cts, &query_cts}) *tile = parts.take(blocks.rows * width);
    dots = parts.take(blocks.rows);
    for (A** block : {&scores, &score_cts}) *block = parts.take(blocks.area);
  }
};
/// The term of the softmax's backward pass that is one number per row: the sum of `products`, which holds the results
/// and is overwritten, times their cotangents.
template <class A>
void row_dots(A* products, const A* cts, std::int64_t rows, std::int64_t width, A* dots) {
  for (std::int64_t r = 0; r < rows; ++r) {
    A* const product = products + r * width;
    const A* const other = cts + r * width;
    independent(width, [=](std::int64_t c) { product[c] *= other[c]; });
    dots[r] = reduce_row<SumOp, A>(product, width);
  }
}
/// Adds the cotangents of a block, whose scores hold their exponentials.
template <class A>
void add_cotangents(const Exec& exec, const ScoreBlock& b, std::int64_t width, const BackwardScratch<A>& x,
                    bool of_queries, bool of_keys, bool of_values) {
  const std::int64_t from = b.key * width;
  if (of_values)
    gemm<A>(exec, true, false, b.n, width, b.m, x.scores, b.stride, x.cts, width, x.value_cts + from, width, true);
  if (!of_queries && !of_keys) return;
  gemm<A>(exec, false, true, b.m, b.n, width, x.cts, width, x.values + from, width, x.score_cts, b.stride, false);
  for (std::int64_t r = 0; r < b.m; ++r) {
    const A* const row = x.scores + r * b.stride;
    A* const d = x.score_cts + r * b.stride;
    const A dot = x.dots[r];
    independent(b.n, [=](std::int64_t c) { d[c] = row[c] * (d[c] - dot); });
  }
  if (of_keys)
    gemm<A>(exec, true, false, b.n, width, b.m, x.score_cts, b.stride, x.queries, width, x.key_cts + from, width, true);
  if (of_queries)
    gemm<A>(exec, false, false, b.m, width, b.n, x.score_cts, b.stride, x.keys + from, width, x.query_cts, width,
            !b.first);
}

}  // namespace detail

template <class T, class R>
void causal_attention_backward(const Exec& exec, const AttentionLoops& loops, const T* q, const T* k, const T* v,
                               AttentionSegments segments, const T* out, const accumulator_t<T>* sums, const T* ct,
                               R* dq, R* dk, R* dv) {
  if (exec.on_device()) {
    if constexpr (std::is_same_v<T, bf16>)
      if (detail::fuses_attention(loops, {q, k, v, out, ct, dq, dk, dv}))
        return detail::attention_fused_backward(exec, loops, q, k, v, segments, out, sums, ct, dq, dk, dv);
    return detail::attention_products_backward(exec, loops, q, k, v, segments, out, sums, ct, dq, dk, dv);
  }
  using A = accumulator_t<T>;
  using L = AttentionLoops;
  const std::int64_t length = loops.length, number = loops.keys(), width = loops.width;
  const detail::AttentionBlocks<A> blocks(exec, loops);
  const std::size_t bytes = blocks.bytes(4, 3, 2);
  const std::int64_t count = loops.heads.count();
  if (count == 0 || length == 0 || number == 0) return;
  exec.count_scratch(count, bytes);
  const auto scale = static_cast<A>(loops.scale);
  exec.for_each(count, [&](std::int64_t item) {
    const Buffer scratch = exec.pool->allocate(bytes);
    detail::Parts<A> parts{scratch.as<A>()};
    const detail::BackwardScratch<A> tiles(parts, blocks, number, width);
    const L::Strides head = Walk<4>(loops.heads, item).offsets;
    const auto rows = [&](auto* x, std::size_t as, const L::Strides& at) {
      return detail::head_rows(loops, x, as, at);
    };
    detail::load_rows(rows(k, L::key, head), 0, number, width, A(1), tiles.keys);
    detail::load_rows(rows(v, L::key, head), 0, number, width, A(1), tiles.values);
    std::fill_n(tiles.key_cts, 2 * number * width, A(0));
    detail::for_groups(loops, head, [&](const L::Strides& at) {
      const auto mine = detail::dense_segments(loops, segments, at, reinterpret_cast<i32*>(parts.next));
      const auto* const row_sums = sums + at[L::sum];
      for (std::int64_t begin = 0; begin < length; begin += blocks.rows) {
        const std::int64_t end = std::min(length, begin + blocks.rows), m = end - begin;
        detail::load_rows(rows(q, L::query, at), begin, end, width, scale, tiles.queries);
        detail::load_rows(rows(ct, L::query, at), begin, end, width, A(1), tiles.cts);
        detail::load_rows(rows(out, L::query, at), begin, end, width, A(1), tiles.query_cts);
        detail::row_dots(tiles.query_cts, tiles.cts, m, width, tiles.dots);
        bool any = false;
        blocks.for_keys(begin, end, mine, [&](const detail::ScoreBlock& b) {
          any = true;
          blocks.scores(b, tiles.queries, tiles.keys, mine, tiles.scores);
          for (std::int64_t r = 0; r < m; ++r)
            static_cast<void>(detail::row_exponentials(tiles.scores + r * b.stride, blocks.whole(b.seen(r)),
                                                       row_sums[(begin + r) * loops.along_length[L::sum]]));
          detail::add_cotangents(exec, b, width, tiles, dq != nullptr, dk != nullptr, dv != nullptr);
        });
        if (dq == nullptr || !any) continue;
        if (loops.earlier) {
          detail::load_rows(rows(static_cast<const R*>(dq), L::query, at), begin, end, width, A(1), tiles.cts);
          independent(m * width, [earlier = tiles.cts, sum = tiles.query_cts, scale](std::int64_t c) {
            sum[c] = earlier[c] + scale * sum[c];
          });
        }
        detail::store_rows(tiles.query_cts, begin, end, width, loops.earlier ? A(1) : scale, rows(dq, L::query, at));
      }
    });
    if (dk != nullptr) detail::store_rows(tiles.key_cts, 0, number, width, A(1), rows(dk, L::key, head));
    if (dv != nullptr) detail::store_rows(tiles.value_cts, 0, number, width, A(1), rows(dv, L::key, head));
  });
}

}  // namespace shardlib::kernels
