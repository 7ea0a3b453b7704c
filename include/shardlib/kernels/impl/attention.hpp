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
    A* const keys = parts.take(number * width);
    A* const values = parts.take(number * width);
    A* const key_cts = parts.take(number * width);
    A* const value_cts = parts.take(number * width);
    A* const queries = parts.take(blocks.rows * width);
    A* const cts = parts.take(blocks.rows * width);
    A* const query_cts = parts.take(blocks.rows * width);
    A* const dots = parts.take(blocks.rows);
    A* const scores = parts.take(blocks.area);
    A* const score_cts = parts.take(blocks.area);
    const L::Strides head = Walk<4>(loops.heads, item).offsets;
    const auto rows = [&](auto* x, std::size_t as, const L::Strides& at) {
      return detail::head_rows(loops, x, as, at);
    };
    detail::load_rows(rows(k, L::key, head), 0, number, width, A(1), keys);
    detail::load_rows(rows(v, L::key, head), 0, number, width, A(1), values);
    std::fill_n(key_cts, 2 * number * width, A(0));
    detail::for_groups(loops, head, [&](const L::Strides& at) {
      const auto mine = detail::dense_segments(loops, segments, at, reinterpret_cast<i32*>(parts.next));
      const auto sum = [&](std::int64_t row) -> const accumulator_t<T>& {
        return sums[at[L::sum] + row * loops.along_length[L::sum]];
      };
      for (std::int64_t begin = 0; begin < length; begin += blocks.rows) {
        const std::int64_t end = std::min(length, begin + blocks.rows), m = end - begin;
        detail::load_rows(rows(q, L::query, at), begin, end, width, scale, queries);
        detail::load_rows(rows(ct, L::query, at), begin, end, width, A(1), cts);
        detail::load_rows(rows(out, L::query, at), begin, end, width, A(1), query_cts);
        for (std::int64_t r = 0; r < m; ++r) {  // the term of the softmax's backward pass that is one number per row
          A* const product = query_cts + r * width;
          const A* const other = cts + r * width;
          independent(width, [=](std::int64_t c) { product[c] *= other[c]; });
          dots[r] = detail::reduce_row<detail::SumOp, A>(product, width);
        }
        bool any = false;
        blocks.for_keys(begin, end, mine, [&](const detail::ScoreBlock& b) {
          any = true;
          blocks.scores(b, queries, keys, mine, scores);
          for (std::int64_t r = 0; r < m; ++r)
            static_cast<void>(detail::row_exponentials(scores + r * b.stride, blocks.whole(b.seen(r)), sum(begin + r)));
          const std::int64_t from = b.key * width;
          if (dv != nullptr)
            gemm<A>(exec, true, false, b.n, width, m, scores, b.stride, cts, width, value_cts + from, width, true);
          if (dq == nullptr && dk == nullptr) return;
          gemm<A>(exec, false, true, m, b.n, width, cts, width, values + from, width, score_cts, b.stride, false);
          for (std::int64_t r = 0; r < m; ++r) {
            const A* const row = scores + r * b.stride;
            A* const d = score_cts + r * b.stride;
            const A dot = dots[r];
            independent(b.n, [=](std::int64_t c) { d[c] = row[c] * (d[c] - dot); });
          }
          if (dk != nullptr)
            gemm<A>(exec, true, false, b.n, width, m, score_cts, b.stride, queries, width, key_cts + from, width, true);
          if (dq != nullptr)
            gemm<A>(exec, false, false, m, width, b.n, score_cts, b.stride, keys + from, width, query_cts, width,
                    !b.first);
        });
        if (dq == nullptr || !any) continue;
        if (loops.earlier) {
          detail::load_rows(rows(static_cast<const R*>(dq), L::query, at), begin, end, width, A(1), cts);
          independent(m * width, [=](std::int64_t c) { query_cts[c] = cts[c] + scale * query_cts[c]; });
        }
        detail::store_rows(query_cts, begin, end, width, loops.earlier ? A(1) : scale, rows(dq, L::query, at));
      }
    });
    if (dk != nullptr) detail::store_rows(key_cts, 0, number, width, A(1), rows(dk, L::key, head));
    if (dv != nullptr) detail::store_rows(value_cts, 0, number, width, A(1), rows(dv, L::key, head));
  });
}

}  // namespace shardlib::kernels
