// The backward pass of fused_attention.hpp, which computes the scores again: the cotangents of 64 queries, or of 64
// keys and their values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "shardlib/kernels/body/attention.hpp"
#include "shardlib/kernels/body/fused_attention.hpp"
#include "shardlib/kernels/body/row_tile.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib::kernels::body {

/// Two numbers of a query for the backward pass: its log-sum-exp times log2 e, and the sum of its result times the
/// cotangent.
struct alignas(8) AttentionTerms {
  float sum, dot;
};

/// The terms of all queries, in whole blocks for each head. Terms past the length give probabilities of zero.
struct ListAttentionTerms {
  static constexpr int parts = 8;
  FusedAttention all;
  const bf16 *out, *ct;
  const float* sums;
  AttentionTerms* to;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    struct alignas(16) Group {
      bf16 x[8];
    };
    constexpr int block = FusedAttention::block;
    const AttentionItem mine = AttentionItem::of(all.blocks(), item, true);
    const int first = mine.first;
    const HeadOffsets& head = all.heads[mine.head];
    float* const tile = team.template tile<float, block * parts>();
    team.lanes(block * parts, [=, this](std::int64_t i) {
      const int query = first + static_cast<int>(i) / parts;
      float sum = 0;
      if (query < all.length) {
        const std::int64_t row = head[0] + query * all.along_queries;
        for (int c = static_cast<int>(i) % parts * 8; c < all.width; c += parts * 8) {
          const Group x = *reinterpret_cast<const Group*>(out + row + c);
          const Group y = *reinterpret_cast<const Group*>(ct + row + c);
          for (int e = 0; e < 8; ++e) sum += static_cast<float>(x.x[e]) * static_cast<float>(y.x[e]);
        }
      }
      tile[i] = sum;
    });
    team.barrier();
    AttentionTerms* const terms = to + mine.head * all.blocks() * block + first;
    team.lanes(block, [=, this](std::int64_t r) {
      float dot = 0;
      for (int p = 0; p < parts; ++p) dot += tile[r * parts + p];
      const bool there = first + r < all.length;
      terms[r] = {there ? sums[head[2] + (first + r) * all.along_sums] * FusedAttention::log2_e
                        : std::numeric_limits<float>::infinity(),
                  dot};
    });
  }
};

/// Stores the cotangents of 64 rows from `first` on, of `rows`, times a factor, plus, if `add` is set, what is there.
template <class Team, int Width, class R>
SHARDLIB_FUNCTION void store_cotangents(const Team& team, const FusedAttention& all, RowTile<Team, Width>& x,
                                        float factor, R* head, std::int64_t stride, int first, int rows, bool add) {
  x.for_pairs(team, [&](int /*slot*/, int row, int c, float a, float b) {
    if (first + row >= rows || c >= all.width) return;
    auto* const to = reinterpret_cast<ResultPair<R>*>(head + (first + row) * stride + c);
    const ResultPair<R> before = add ? *to : ResultPair<R>{};
    *to = {static_cast<R>(a * factor + static_cast<float>(before.first)),
           static_cast<R>(b * factor + static_cast<float>(before.second))};
  });
}

/// The cotangents of 64 queries.
template <int Width, class R>
struct FusedAttentionQueries {
  using Buffers = AttentionBuffers<Width>;
  static constexpr std::size_t tile_bytes = Buffers::bytes;
  static constexpr int teams_at_once = Buffers::teams_at_once;

  FusedAttention all;
  const bf16 *q, *k, *v, *ct;
  const AttentionTerms* terms;
  R* dq;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    using Rows = TileRows<Team>;
    constexpr int step = Buffers::step, part = 32, parts = step / part;  // scores of a part at a time are in variables
    const AttentionItem mine = AttentionItem::of(all.blocks(), item, false);
    const int first = mine.first;
    const HeadOffsets& head = all.heads[mine.head];
    const bf16 *const keys = k + head[1], *const values = v + head[1];
    const SeenKeys<Team> sight(team, all, head, first);
    const Buffers buffers(team);
    const auto start_step = [&](int t) {
      buffers.start(team, t, all.key_rows(keys, t * step), all.key_rows(values, t * step));
    };
    RowOperand<Team, Width> queries, cts;
    RowTile<Team, Width> results;
    RowTile<Team, part> scores, score_cts;
    AttentionTerms of_rows[Rows::slots];
    Rows::for_each(team, [&](int slot, int row) {
      of_rows[slot] = terms[mine.head * all.blocks() * FusedAttention::block + first + row];
    });
    results.clear(team);
    start_step(0);
    buffers.load(team, all.rows(q + head[0], all.along_queries, first), queries,
                 all.rows(ct + head[0], all.along_queries, first), cts);
    const int steps = (all.keys(first + FusedAttention::block) + step - 1) / step;
    const float factor = all.scale * FusedAttention::log2_e;
    for (int i = 0; i < steps * parts; ++i) {
      const int t = i / parts, key = i * part;
      if (i % parts == 0) {
        if (t > 0) finish_copies(team);
        team.barrier();
        if (t + 1 < steps) start_step(t + 1);
      }
      const auto key_rows = buffers.matrix(t, 0).from(i % parts * part);
      scores.set_product_transposed(team, queries, key_rows);
      scores.for_each(
          team, [&](int slot, int /*row*/, int /*c*/, float& x) { x = power_of_two(x * factor - of_rows[slot].sum); });
      score_cts.set_product_transposed(team, cts, buffers.matrix(t, 1).from(i % parts * part));
      score_cts.for_each_with(team, scores, [&](int slot, int /*row*/, int /*c*/, float& d, const float& p) {
        d = p * (d - of_rows[slot].dot);
      });
      if (!sight.sees_all(key + part))
        score_cts.for_each(team, [&](int slot, int /*row*/, int c, float& d) {
          if (!sight.sees(slot, key + c)) d = 0;
        });
      results.add_product(team, score_cts, key_rows);
    }
    store_cotangents(team, all, results, all.scale, dq + head[0], all.along_queries, first, all.length, all.earlier);
  }
};

/// The queries that see the keys of a tile's rows.
template <class Team>
struct SeenBy {
  i32 segment[TileRows<Team>::slots];
  int length, first;  ///< first: key
  bool segmented, earlier;
  std::int64_t along;

  SHARDLIB_FUNCTION SeenBy(const Team& team, const FusedAttention& all, const HeadOffsets& head, int begin)
      : length(all.length),
        first(begin),
        segmented(all.key_segments != nullptr),
        earlier(all.earlier),
        along(all.along_segments) {
    TileRows<Team>::for_each(team, [&](int slot, int row) {
      const int key = begin + row;
      segment[slot] = segmented && key < all.key_count ? all.key_segments[head[3] + key * along] : 0;
    });
  }
  /// Whether all queries from one on see all of the keys.
  [[nodiscard]] SHARDLIB_FUNCTION bool all_see(int query) const {
    return !segmented && (earlier || first + FusedAttention::block <= query + 1);
  }
  [[nodiscard]] SHARDLIB_FUNCTION bool sees(int slot, int key, int query, const i32* segments) const {
    if (query >= length || (!earlier && key > query)) return false;
    return !segmented || segments[query * along] == segment[slot];
  }
  /// Sets to zero what the queries from one on, the columns of a tile, do not see of the keys, its rows.
  template <class Tile>
  SHARDLIB_FUNCTION void hide(const Team& team, Tile& tile, int query, const i32* segments) const {
    tile.for_each(team, [&](int slot, int row, int c, float& x) {
      if (!sees(slot, first + row, query + c, segments)) x = 0;
    });
  }
};

/// The cotangents of 64 keys, or of their values, or of both.
template <int Width, class R, bool OfKeys, bool OfValues>
struct FusedAttentionKeys {
  using Buffers = AttentionBuffers<Width, FusedAttention::block * sizeof(AttentionTerms)>;
  static constexpr std::size_t tile_bytes = Buffers::bytes;
  static constexpr int teams_at_once = Buffers::teams_at_once;

  FusedAttention all;
  const bf16 *q, *k, *v, *ct;
  const AttentionTerms* terms;
  R *dk, *dv;  ///< null: not wanted

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr int step = Buffers::step, part = 32, parts = step / part;
    const AttentionItem mine = AttentionItem::of(all.key_blocks(), item, true);
    const int first = mine.first, first_head = static_cast<int>(mine.head) * all.groups;
    const HeadOffsets& keys_head = all.heads[first_head];
    const Buffers buffers(team);
    Step now{first_head, all.earlier ? 0 : first / step * step}, next = now;
    const int begin = now.query;
    const auto start_step = [&](int t) {
      const std::int64_t at = all.heads[next.head][0];
      buffers.start(team, t, all.rows(q + at, all.along_queries, next.query),
                    all.rows(ct + at, all.along_queries, next.query));
      start_copy(team, step, terms + std::int64_t{next.head} * all.blocks() * FusedAttention::block + next.query,
                 buffers.template extra<AttentionTerms>(t));
      next.advance(step, begin, all.length);
    };
    const SeenBy<Team> sight(team, all, keys_head, first);
    RowOperand<Team, Width> keys, values;
    RowTile<Team, Width> key_cts, value_cts;
    RowTile<Team, part> scores, score_cts;
    key_cts.clear(team);
    value_cts.clear(team);
    start_step(0);
    buffers.load(team, all.key_rows(k + keys_head[1], first), keys, all.key_rows(v + keys_head[1], first), values);
    const float factor = all.scale * FusedAttention::log2_e;
    const int steps = (all.length - begin + step - 1) / step * all.groups;
    for (int i = 0; i < steps * parts; ++i) {
      const int t = i / parts, row = i % parts * part;
      if (row == 0) {
        if (t > 0) {
          finish_copies(team);
          now.advance(step, begin, all.length);
        }
        team.barrier();
        if (t + 1 < steps) start_step(t + 1);
      }
      const int query = now.query + row;
      const auto query_rows = buffers.matrix(t, 0).from(row), ct_rows = buffers.matrix(t, 1).from(row);
      const auto* const columns = buffers.template extra<AttentionTerms>(t) + row;
      const bool masked = !sight.all_see(query);
      const i32* const segments = all.query_segments == nullptr ? nullptr : all.query_segments + all.heads[now.head][3];
      scores.set_product_transposed(team, keys, query_rows);
      scores.for_each(
          team, [&](int /*slot*/, int /*row*/, int c, float& x) { x = power_of_two(x * factor - columns[c].sum); });
      if (masked) sight.hide(team, scores, query, segments);
      if constexpr (OfValues) value_cts.add_product(team, scores, ct_rows);
      if constexpr (OfKeys) {
        score_cts.set_product_transposed(team, values, ct_rows);
        score_cts.for_each_with(team, scores, [&](int /*slot*/, int /*row*/, int c, float& d, const float& p) {
          d = p * (d - columns[c].dot);
        });
        if (masked) sight.hide(team, score_cts, query, segments);
        key_cts.add_product(team, score_cts, query_rows);
      }
    }
    if (OfKeys && dk != nullptr)
      store_cotangents(team, all, key_cts, all.scale, dk + keys_head[1], all.along_keys, first, all.key_count, false);
    if (OfValues && dv != nullptr)
      store_cotangents(team, all, value_cts, 1.0F, dv + keys_head[1], all.along_keys, first, all.key_count, false);
  }

 private:
  /// A query head, and the first query of a step.
  struct Step {
    int head, query;

    SHARDLIB_FUNCTION void advance(int by, int begin, int length) {
      query += by;
      if (query < length) return;
      query = begin;
      ++head;
    }
  };
};

}  // namespace shardlib::kernels::body
