// Causal attention of bf16 that keeps scores in the variables of lanes: the online softmax in blocks of keys
// (FlashAttention-2, Dao 2023). A team has 64 queries. fused_attention_backward.hpp has the backward pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "shardlib/kernels/body/attention.hpp"
#include "shardlib/kernels/body/row_tile.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib::kernels::body {

/// The members of AttentionLoops that the attention kernels use. Lengths fit 32 bits.
struct FusedAttention {
  static constexpr int block = 64;
  static constexpr float log2_e = 1.44269504F;

  const HeadOffsets* heads;  ///< of all query heads; those that share keys are neighbors
  int groups;                ///< query heads that share keys
  int length, key_count, width;
  float scale;  ///< more than 0
  bool earlier;
  std::int64_t along_queries, along_keys, along_sums, along_segments;
  const i32 *query_segments, *key_segments;  ///< null if there are none

  [[nodiscard]] constexpr int blocks() const { return (length + block - 1) / block; }
  [[nodiscard]] constexpr int key_blocks() const { return (key_count + block - 1) / block; }
  /// Number of keys that some query before `end` sees.
  [[nodiscard]] constexpr int keys(int end) const { return earlier || end > key_count ? key_count : end; }
  /// Rows of a head's queries, or keys, from `begin` on.
  [[nodiscard]] SHARDLIB_FUNCTION OperandRows rows(const bf16* head, std::int64_t stride, int begin) const {
    return {head + begin * stride, stride, length - begin, width};
  }
  [[nodiscard]] SHARDLIB_FUNCTION OperandRows key_rows(const bf16* head, int begin) const {
    return {head + begin * along_keys, along_keys, key_count - begin, width};
  }
};

/// An item of a kernel: 64 queries of a query head, or keys of a head.
struct AttentionItem {
  std::int64_t head;
  int first;

  /// The item of this number, with `blocks` items for each head. The last blocks come first, because they see the most
  /// keys. With `forward` the first blocks come first, because the most queries see them.
  [[nodiscard]] SHARDLIB_FUNCTION static AttentionItem of(int blocks, std::int64_t item, bool forward) {
    const auto n = static_cast<std::uint32_t>(blocks), i = static_cast<std::uint32_t>(item);
    const int block = static_cast<int>(i % n);
    return {i / n, FusedAttention::block * (forward ? block : static_cast<int>(n) - 1 - block)};
  }
};

/// The keys that the queries of a tile's rows see.
template <class Team>
struct SeenKeys {
  int seen[TileRows<Team>::slots];
  i32 segment[TileRows<Team>::slots];
  const i32* segments;  ///< of the keys; null if there are none
  std::int64_t along;
  int all;  ///< keys that each query sees, except for segments

  SHARDLIB_FUNCTION SeenKeys(const Team& team, const FusedAttention& of, const HeadOffsets& head, int first)
      : segments(of.key_segments == nullptr ? nullptr : of.key_segments + head[3]),
        along(of.along_segments),
        all(of.earlier ? of.key_count : first + 1) {
    TileRows<Team>::for_each(team, [&](int slot, int row) {
      const int query = first + row;
      seen[slot] = of.keys(query + 1);
      segment[slot] = segments != nullptr && query < of.length ? of.query_segments[head[3] + query * along] : 0;
    });
  }
  [[nodiscard]] SHARDLIB_FUNCTION bool sees_all(int end) const { return segments == nullptr && end <= all; }
  [[nodiscard]] SHARDLIB_FUNCTION bool sees(int slot, int key) const {
    return key < seen[slot] && (segments == nullptr || segments[key * along] == segment[slot]);
  }
};

/// Stores two neighboring elements of a result.
template <class R>
struct alignas(2 * sizeof(R)) ResultPair {
  R first, second;
};

/// Matrices in team memory: two buffers of two matrices of `step` rows, which are used in turns, and `Extra` more bytes
/// for each. Before the first step, the second buffer passes operands of 64 rows.
template <int Width, int Extra = 0>
struct AttentionBuffers {
  static constexpr int step = Width <= 64 ? 64 : 32, size = 2 * step * Width;
  static constexpr std::size_t bytes = 2 * (size * sizeof(bf16) + Extra);
  static constexpr int teams_at_once = Width <= 64 ? 3 : 2;                ///< of a kernel that has them
  static constexpr int operands = size / (FusedAttention::block * Width);  ///< that pass at a time
  static_assert(operands >= 1);
  bf16* first;

  template <class Team>
  SHARDLIB_FUNCTION explicit AttentionBuffers(const Team& team) : first(team.template whole_tile<bf16>()) {}
  [[nodiscard]] SHARDLIB_FUNCTION TeamMatrix<Width> matrix(int turn, int i) const {
    return {first + turn % 2 * size + i * step * Width};
  }
  /// Starts to copy rows of x and y, for a step.
  template <class Team>
  SHARDLIB_FUNCTION void start(const Team& team, int turn, const OperandRows& x, const OperandRows& y) const {
    start_copy<step>(team, x, matrix(turn, 0));
    start_copy<step>(team, y, matrix(turn, 1));
  }
  template <class T>
  [[nodiscard]] SHARDLIB_FUNCTION T* extra(int turn) const {
    return reinterpret_cast<T*>(reinterpret_cast<std::byte*>(first + 2 * size) + turn % 2 * Extra);
  }
  [[nodiscard]] SHARDLIB_FUNCTION TeamMatrix<Width> operand(int i) const {
    return {first + size + i * FusedAttention::block * Width};
  }
  /// Loads two operands. Earlier copies are also complete.
  template <class Team>
  SHARDLIB_FUNCTION void load(const Team& team, const OperandRows& x, RowOperand<Team, Width>& to_x,
                              const OperandRows& y, RowOperand<Team, Width>& to_y) const {
    constexpr int block = FusedAttention::block, second = operands > 1 ? 1 : 0;
    start_copy<block>(team, x, operand(0));
    if (second > 0) start_copy<block>(team, y, operand(second));
    finish_copies(team);
    team.barrier();
    to_x.load(team, operand(0));
    if (second == 0) {
      team.barrier();
      start_copy<block>(team, y, operand(0));
      finish_copies(team);
      team.barrier();
    }
    to_y.load(team, operand(second));
  }
};

/// The results of 64 queries, and their log-sum-exps.
template <int Width, class R>
struct FusedAttentionForward {
  using Buffers = AttentionBuffers<Width>;
  static constexpr std::size_t tile_bytes = Buffers::bytes;
  static constexpr int teams_at_once = Buffers::teams_at_once;

  FusedAttention all;
  const bf16 *q, *k, *v;
  R* out;
  float* sums;  ///< may be null

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    using Rows = TileRows<Team>;
    constexpr int step = Buffers::step;
    const AttentionItem mine = AttentionItem::of(all.blocks(), item, false);
    const int first = mine.first;
    const HeadOffsets& head = all.heads[mine.head];
    const bf16 *const keys = k + head[1], *const values = v + head[1];
    const SeenKeys<Team> sight(team, all, head, first);
    const Buffers buffers(team);
    const auto start_step = [&](int t) {
      buffers.start(team, t, all.key_rows(keys, t * step), all.key_rows(values, t * step));
    };
    RowOperand<Team, Width> queries;
    RowTile<Team, Width> results;
    RowTile<Team, step> scores;
    float top[Rows::slots], total[Rows::slots], shrink[Rows::slots];  // top: the maximum of the products so far
    Rows::for_each(team, [&](int slot, int row) {
      top[slot] = all.earlier ? earlier_top(head, first + row) : lowest;
      total[slot] = 0;
    });
    results.clear(team);
    start_copy<FusedAttention::block>(team, all.rows(q + head[0], all.along_queries, first), buffers.operand(0));
    start_step(0);
    finish_copies(team);
    team.barrier();
    queries.load(team, buffers.operand(0));
    const int steps = (all.keys(first + FusedAttention::block) + step - 1) / step;
    const float factor = all.scale * FusedAttention::log2_e;
    for (int t = 0; t < steps; ++t) {
      if (t > 0) finish_copies(team);
      team.barrier();
      if (t + 1 < steps) start_step(t + 1);
      scores.set_product_transposed(team, queries, buffers.matrix(t, 0));
      if (!sight.sees_all((t + 1) * step))
        scores.for_each(team, [&](int slot, int /*row*/, int c, float& x) {
          if (!sight.sees(slot, t * step + c)) x = -std::numeric_limits<float>::infinity();
        });
      float next[Rows::slots];
      Rows::for_each(team, [&](int slot, int /*row*/) { next[slot] = top[slot]; });
      scores.for_each(team, [&](int slot, int /*row*/, int /*c*/, const float& x) {
        next[slot] = SHARDLIB_C(fmaxf)(next[slot], x);  // misses a NaN, but the total will not
      });
      Rows::maximum(next);
      Rows::for_each(team, [&](int slot, int /*row*/) {
        shrink[slot] = power_of_two((top[slot] - next[slot]) * factor);
        total[slot] *= shrink[slot];
        top[slot] = next[slot];
        next[slot] *= factor;
      });
      scores.for_each(team, [&](int slot, int /*row*/, int /*c*/, float& x) {
        x = power_of_two(x * factor - next[slot]);
        total[slot] += x;
      });
      results.for_each(team, [&](int slot, int /*row*/, int /*c*/, float& x) { x *= shrink[slot]; });
      results.add_product(team, scores, buffers.matrix(t, 1));
    }
    store(team, head, first, results, top, total);
  }

 private:
  static constexpr float lowest = -1e30F;  ///< finite, so that a row that sees no key of a step does not become NaN

  /// The log-sum-exp of the calls before, as a product of one key.
  [[nodiscard]] SHARDLIB_FUNCTION float earlier_top(const HeadOffsets& head, int query) const {
    const float x = query < all.length ? sums[head[2] + query * all.along_sums] / all.scale : lowest;
    return x < lowest ? lowest : x;
  }
  template <class Team, class Tile, int N>
  SHARDLIB_FUNCTION void store(const Team& team, const HeadOffsets& head, int first, Tile& results,
                               const float (&top)[N], float (&total)[N]) const {
    float before[N];  // the part that the results of the calls before are of all, times the total
    const float factor = all.scale * FusedAttention::log2_e;
    TileRows<Team>::sum(total);
    TileRows<Team>::for_each(team, [&](int slot, int row) {
      before[slot] = all.earlier ? power_of_two((earlier_top(head, first + row) - top[slot]) * factor) : 0.0F;
      total[slot] += before[slot];
    });
    results.for_pairs(team, [&](int slot, int row, int c, float x, float y) {
      if (first + row >= all.length || c >= all.width) return;
      auto* const to = reinterpret_cast<ResultPair<R>*>(out + head[0] + (first + row) * all.along_queries + c);
      const float part = 1.0F / total[slot];
      if (all.earlier) {
        x += before[slot] * static_cast<float>(to->first);
        y += before[slot] * static_cast<float>(to->second);
      }
      *to = {static_cast<R>(x * part), static_cast<R>(y * part)};
    });
    if (sums == nullptr) return;
    float log[N];
    TileRows<Team>::for_each(team, [&](int slot, int /*row*/) { log[slot] = top[slot]; });
    TileRows<Team>::maximum(log);  // the lanes of a row have read what the one of them overwrites
    TileRows<Team>::for_each_once(team, [&](int slot, int row) {
      if (first + row < all.length)
        sums[head[2] + (first + row) * all.along_sums] = log[slot] * all.scale + fast_log(total[slot]);
    });
  }
};

}  // namespace shardlib::kernels::body
