// Causal attention on a device with memory of its own: matrix products of many heads, and kernels of rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/attention.hpp"
#include "shardlib/kernels/body/attention.hpp"
#include "shardlib/kernels/gemm.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib::kernels::detail {

/// Calls f(offsets of a query head) for each query head that shares the keys at `head`.
template <class F>
void for_groups(const AttentionLoops& loops, const AttentionLoops::Strides& head, const F& f) {
  Walk<4> walk(loops.groups, 0);
  const std::int64_t n = loops.groups.count();
  for (std::int64_t i = 0; i < n; ++i, walk.next()) {
    AttentionLoops::Strides at = head;
    for (std::size_t k = 0; k < at.size(); ++k) at[k] += walk.offsets[k];
    f(at);
  }
}

/// Scratch memory of several parts, each with the same number of elements for each head of a chunk.
class HeadScratch {
 public:
  /// A chunk has as many heads as fit, and at least one. More of them would not keep a device busier.
  static constexpr std::size_t most_bytes = std::size_t{512} << 20;

  template <class T>
  struct Part {
    std::size_t begin;
  };
  template <class T>
  Part<T> part(std::int64_t elements) {
    constexpr std::size_t alignment = 256;
    const Part<T> part{bytes_};
    bytes_ += (static_cast<std::size_t>(elements) * sizeof(T) + alignment - 1) / alignment * alignment;
    return part;
  }
  /// Takes the memory, and returns the number of heads of a chunk.
  std::int64_t allocate(const Exec& exec, std::int64_t heads, std::size_t most) {
    const std::size_t fit = std::max<std::size_t>(1, most / std::max<std::size_t>(1, bytes_));
    chunk_ = std::min(fit, static_cast<std::size_t>(heads));
    block_ = exec.pool->allocate(bytes_ * chunk_);
    return static_cast<std::int64_t>(chunk_);
  }
  template <class T>
  T* operator()(Part<T> part) const {
    return reinterpret_cast<T*>(block_.data() + part.begin * chunk_);
  }

 private:
  std::size_t bytes_ = 0, chunk_ = 0;  ///< `bytes_` are of one head
  Buffer block_;
};

/// A matrix for each head of a chunk: `row` elements between rows, `head` between heads.
template <class T>
struct HeadMatrices {
  T* first;
  std::int64_t row, head;

  /// The rows from r on.
  [[nodiscard]] HeadMatrices from(std::int64_t r) const { return {first + r * row, row, head}; }
};

/// The distance between heads of an operand, if products can read and write it in place: it is the same for all heads,
/// and the elements of a row are neighbors.
inline std::optional<std::int64_t> head_stride(const AttentionLoops& loops, std::size_t operand) {
  if (loops.width > 1 && loops.along_width[operand] != 1) return {};
  if (loops.rows(operand) > 1 && loops.along_length[operand] < loops.width) return {};
  Nest<1> heads;
  for (int d = 0; d < loops.heads.depth; ++d)
    heads.push(loops.heads.loop(d).extent, {loops.heads.loop(d).strides[operand]});
  if (heads.depth > 1) return {};
  return heads.pop().strides[0];
}

/// The arithmetic of some heads of keys at a time. T is the type of the operands.
template <class T>
class HeadChunk {
 public:
  using A = accumulator_t<T>;
  using Strides = AttentionLoops::Strides;
  static constexpr std::int64_t block = 256;  ///< queries of a block of scores

  /// `offsets` is scratch memory for `count` heads.
  HeadChunk(const Exec& exec, const AttentionLoops& loops, std::int64_t first, std::int64_t count,
            body::HeadOffsets* offsets)
      : exec_(exec), loops_(loops), count_(count), start_(Walk<4>(loops.heads, first).offsets), offsets_(offsets) {
    constexpr std::int64_t group = body::ListHeads::group;
    exec.for_items((count + group - 1) / group, 0, body::ListHeads{loops.heads, first, count, offsets});
  }

  /// Number of keys that some query before `end` sees, and the distance between rows of scores.
  [[nodiscard]] std::int64_t keys(std::int64_t end) const { return loops_.earlier ? loops_.earlier_keys : end; }
  static std::int64_t stride(std::int64_t keys) { return (keys + 7) / 8 * 8; }  // rows begin at 16 bytes, or at more

  /// An operand in place, if head_stride allows it, or else a dense copy.
  [[nodiscard]] HeadMatrices<const T> load(const T* x, std::size_t operand, T* copy) const {
    if (head_stride(loops_, operand)) return in_place(x, operand);
    const body::LoadHeads<T> kernel{items(operand), loops_.width, strided(x, operand), copy};
    exec_.for_items(kernel.items.count(), 0, kernel);
    return dense<const T>(copy, operand);
  }
  /// Where products put results: in place or into scratch memory, from which `store` then copies them. Null stays so.
  template <class R>
  [[nodiscard]] HeadMatrices<R> in_place(R* x, std::size_t operand) const {
    return {x == nullptr ? nullptr : x + start_[operand], std::max(loops_.along_length[operand], loops_.width),
            *head_stride(loops_, operand)};
  }
  template <class R>
  [[nodiscard]] HeadMatrices<R> dense(R* x, std::size_t operand) const {
    return {x, loops_.width, loops_.rows(operand) * loops_.width};
  }
  /// Stores dense results, or, if `add` is set, adds them as StoreHeads does.
  template <class From, class R>
  void store(const From* from, R* x, std::size_t operand, bool add = false,
             const accumulator_t<From>* factors = nullptr) const {
    const body::StoreHeads<From, R> kernel{items(operand), loops_.width, from, strided(x, operand), factors, add};
    exec_.for_items(kernel.items.count(), 0, kernel);
  }
  /// The sums of x y over the width, of operands with the queries' layout.
  void dots(const T* x, const T* y, A* out) const {
    const body::HeadDots<T> kernel{{count_, loops_.length, body::RowLanes::rows},
                                   loops_.width,
                                   strided(x, AttentionLoops::query),
                                   strided(y, AttentionLoops::query),
                                   out};
    exec_.for_items(kernel.items.count(), 0, kernel);
  }

  /// Rows of the scores of the queries [begin, end), of the query heads at `group`.
  [[nodiscard]] body::ScoreRows rows(const Strides& group, AttentionSegments segments, std::int64_t begin,
                                     std::int64_t end) const {
    constexpr std::size_t ids = AttentionLoops::segment;
    const auto at = [&](const i32* all) { return all == nullptr ? nullptr : all + group[ids]; };
    const i32* const queries = at(segments.queries);
    return {.items = {count_, end - begin, body::RowLanes::rows},
            .heads = offsets_,
            .query = begin,
            .keys = keys(end),
            .stride = stride(keys(end)),
            .earlier = loops_.earlier,
            .query_segments = queries,
            .key_segments = loops_.earlier ? at(segments.keys) : queries,
            .along_sums = loops_.along_length[AttentionLoops::sum],
            .along_segments = loops_.along_length[ids]};
  }
  /// x y' for `m` rows of x and as many rows of y as there are `keys`: a dense array of scores.
  void scores(std::int64_t m, std::int64_t keys, const HeadMatrices<const T>& x, const HeadMatrices<const T>& y,
              A* out) const {
    gemm_batch<T, A>(exec_, false, true, m, keys, loops_.width, x.first, x.row, x.head, y.first, y.row, y.head, out,
                     stride(keys), m * stride(keys), count_, false);
  }
  /// p y, for `m` rows of p, an array like the scores.
  template <class R>
  void times_scores(std::int64_t m, std::int64_t keys, const T* p, const HeadMatrices<const T>& y,
                    const HeadMatrices<R>& out, bool accumulate = false) const {
    gemm_batch<T, R>(exec_, false, false, m, loops_.width, keys, p, stride(keys), m * stride(keys), y.first, y.row,
                     y.head, out.first, out.row, out.head, count_, accumulate);
  }
  /// p' x, plus `out` if `accumulate` is set.
  void times_transposed(std::int64_t m, std::int64_t keys, const T* p, const HeadMatrices<const T>& x,
                        const HeadMatrices<A>& out, bool accumulate) const {
    gemm_batch<T, A>(exec_, true, false, keys, loops_.width, m, p, stride(keys), m * stride(keys), x.first, x.row,
                     x.head, out.first, out.row, out.head, count_, accumulate);
  }

 private:
  template <class U>
  [[nodiscard]] body::StridedHeads<U> strided(U* x, std::size_t operand) const {
    return {x, offsets_, operand, loops_.along_length[operand], loops_.along_width[operand]};
  }
  /// Rows to copy: an item has some thousand elements.
  [[nodiscard]] body::HeadItems items(std::size_t operand) const {
    return {count_, loops_.rows(operand), std::max<std::int64_t>(1, 2048 / std::max<std::int64_t>(1, loops_.width))};
  }

  const Exec& exec_;
  const AttentionLoops& loops_;
  std::int64_t count_;
  Strides start_;
  body::HeadOffsets* offsets_;
};

/// The scratch memory of an operand or a result: a whole head if it is `held`, else none.
inline std::int64_t head_size(const AttentionLoops& loops, std::size_t operand, bool held) {
  return held ? loops.rows(operand) * loops.width : 0;
}
/// The scores of a block of queries of one head.
template <class T>
std::int64_t block_size(const AttentionLoops& loops) {
  return std::min(HeadChunk<T>::block, loops.length) * HeadChunk<T>::stride(loops.keys());
}

/// causal_attention as products. A block of queries has its scores with all keys that one of them sees in memory.
template <class T, class R>
void attention_products(const Exec& exec, const AttentionLoops& loops, const T* q, const T* k, const T* v,
                        const AttentionSegments& segments, R* out, accumulator_t<T>* sums,
                        std::size_t most_bytes = HeadScratch::most_bytes) {
  using A = accumulator_t<T>;
  using L = AttentionLoops;
  constexpr bool same = std::is_same_v<T, A>;
  const std::int64_t length = loops.length, count = loops.heads.count();
  if (count == 0 || length == 0 || loops.keys() == 0) return;
  const bool copies_queries = !head_stride(loops, L::query), copies_keys = !head_stride(loops, L::key);
  HeadScratch scratch;
  const auto offsets = scratch.part<body::HeadOffsets>(1);
  const auto queries = scratch.part<T>(head_size(loops, L::query, copies_queries));
  const auto keys = scratch.part<T>(head_size(loops, L::key, copies_keys));
  const auto values = scratch.part<T>(head_size(loops, L::key, copies_keys));
  const auto results = scratch.part<R>(head_size(loops, L::query, copies_queries && !loops.earlier));
  const auto added = scratch.part<A>(head_size(loops, L::query, loops.earlier));
  const auto factors = scratch.part<A>(loops.earlier ? length : 0);
  const auto scores = scratch.part<A>(block_size<T>(loops));
  const auto probabilities = scratch.part<T>(same ? 0 : block_size<T>(loops));
  const std::int64_t chunk = scratch.allocate(exec, count, most_bytes);
  T* p = scratch(probabilities);
  if constexpr (same) p = scratch(scores);
  for (std::int64_t first = 0; first < count; first += chunk) {
    const HeadChunk<T> heads(exec, loops, first, std::min(chunk, count - first), scratch(offsets));
    const auto ks = heads.load(k, L::key, scratch(keys)), vs = heads.load(v, L::key, scratch(values));
    for_groups(loops, {}, [&](const L::Strides& at) {
      const auto qs = heads.load(q + at[L::query], L::query, scratch(queries));
      R* const to = out + at[L::query];
      const auto all_blocks = [&]<class To>(const HeadMatrices<To>& products) {
        for (std::int64_t begin = 0; begin < length; begin += heads.block) {
          const std::int64_t end = std::min(length, begin + heads.block), m = end - begin, n = heads.keys(end);
          heads.scores(m, n, qs.from(begin), ks, scratch(scores));
          const body::AttentionProbabilities<T> kernel{heads.rows(at, segments, begin, end),
                                                       static_cast<A>(loops.scale),
                                                       scratch(scores),
                                                       p,
                                                       sums == nullptr ? nullptr : sums + at[L::sum],
                                                       scratch(factors),
                                                       length};
          exec.for_items(kernel.rows.items.count(), 0, kernel);
          heads.times_scores(m, n, p, vs, products.from(begin));
        }
      };
      if (loops.earlier) {
        all_blocks(heads.dense(scratch(added), L::query));
        heads.store(scratch(added), to, L::query, true, scratch(factors));
      } else if (copies_queries) {
        all_blocks(heads.dense(scratch(results), L::query));
        heads.store(scratch(results), to, L::query);
      } else {
        all_blocks(heads.in_place(to, L::query));
      }
    });
  }
}

/// causal_attention_backward as products.
template <class T, class R>
void attention_products_backward(const Exec& exec, const AttentionLoops& loops, const T* q, const T* k, const T* v,
                                 const AttentionSegments& segments, const T* out, const accumulator_t<T>* sums,
                                 const T* ct, R* dq, R* dk, R* dv, std::size_t most_bytes = HeadScratch::most_bytes) {
  using A = accumulator_t<T>;
  using L = AttentionLoops;
  constexpr bool same = std::is_same_v<T, A>, wide = std::is_same_v<R, A>;
  const std::int64_t length = loops.length, count = loops.heads.count();
  if (count == 0 || length == 0 || loops.keys() == 0) return;
  const bool copies_queries = !head_stride(loops, L::query), copies_keys = !head_stride(loops, L::key);
  const bool wants_scores = dq != nullptr || dk != nullptr;
  HeadScratch scratch;
  const auto part_of = [&]<class U>(U /*type*/, std::size_t operand, bool held) {
    return scratch.part<U>(head_size(loops, operand, held));
  };
  const auto offsets = scratch.part<body::HeadOffsets>(1);
  const auto queries = part_of(T(), L::query, copies_queries), cotangents = part_of(T(), L::query, copies_queries);
  const auto keys = part_of(T(), L::key, copies_keys), values = part_of(T(), L::key, copies_keys);
  const auto query_cts = part_of(R(), L::query, dq != nullptr && copies_queries && !loops.earlier);
  const auto added = part_of(A(), L::query, dq != nullptr && loops.earlier);
  const bool holds_keys = copies_keys || !wide;
  const auto key_cts = part_of(A(), L::key, dk != nullptr && holds_keys),
             value_cts = part_of(A(), L::key, dv != nullptr && holds_keys);
  const auto dots = scratch.part<A>(wants_scores ? length : 0);
  const auto scores = scratch.part<A>(block_size<T>(loops));
  const auto score_cts = scratch.part<A>(wants_scores ? block_size<T>(loops) : 0);
  const auto narrow = scratch.part<T>(same ? 0 : block_size<T>(loops));
  const auto narrow_cts = scratch.part<T>(same || !wants_scores ? 0 : block_size<T>(loops));
  const std::int64_t chunk = scratch.allocate(exec, count, most_bytes);
  T* p = scratch(narrow);
  T* ds = scratch(narrow_cts);
  if constexpr (same) p = scratch(scores), ds = scratch(score_cts);
  for (std::int64_t first = 0; first < count; first += chunk) {
    const HeadChunk<T> heads(exec, loops, first, std::min(chunk, count - first), scratch(offsets));
    const auto ks = heads.load(k, L::key, scratch(keys)), vs = heads.load(v, L::key, scratch(values));
    const auto sum_of = [&](R* to, A* dense) {
      if constexpr (wide)
        if (!copies_keys) return heads.in_place(to, L::key);
      return heads.dense(dense, L::key);
    };
    const auto dks = sum_of(dk, scratch(key_cts)), dvs = sum_of(dv, scratch(value_cts));
    bool begun = false;
    for_groups(loops, {}, [&](const L::Strides& at) {
      const auto qs = heads.load(q + at[L::query], L::query, scratch(queries));
      const auto cts = heads.load(ct + at[L::query], L::query, scratch(cotangents));
      if (wants_scores) heads.dots(ct + at[L::query], out + at[L::query], scratch(dots));
      const auto all_blocks = [&]<class To>(const HeadMatrices<To>& products) {
        // From the last block on, which sees all keys: so the first products set their sums.
        for (std::int64_t begin = (length - 1) / heads.block * heads.block; begin >= 0; begin -= heads.block) {
          const std::int64_t end = std::min(length, begin + heads.block), m = end - begin, n = heads.keys(end);
          heads.scores(m, n, qs.from(begin), ks, scratch(scores));
          if (wants_scores) heads.scores(m, n, cts.from(begin), vs, scratch(score_cts));
          const body::AttentionScoresBackward<T> kernel{heads.rows(at, segments, begin, end),
                                                        static_cast<A>(loops.scale),
                                                        scratch(scores),
                                                        sums + at[L::sum],
                                                        scratch(score_cts),
                                                        scratch(dots),
                                                        length,
                                                        dv == nullptr ? nullptr : p,
                                                        wants_scores ? ds : nullptr};
          exec.for_items(kernel.rows.items.count(), 0, kernel);
          if (dv != nullptr) heads.times_transposed(m, n, p, cts.from(begin), dvs, begun);
          if (dk != nullptr) heads.times_transposed(m, n, ds, qs.from(begin), dks, begun);
          if (dq != nullptr) heads.times_scores(m, n, ds, ks, products.from(begin));
          begun = true;
        }
      };
      R* const to = dq == nullptr ? nullptr : dq + at[L::query];
      if (loops.earlier) {
        all_blocks(heads.dense(scratch(added), L::query));
        if (dq != nullptr) heads.store(scratch(added), to, L::query, true);
      } else if (copies_queries) {
        all_blocks(heads.dense(scratch(query_cts), L::query));
        if (dq != nullptr) heads.store(scratch(query_cts), to, L::query);
      } else {
        all_blocks(heads.in_place(to, L::query));
      }
    });
    if (!holds_keys) continue;
    if (dk != nullptr) heads.store(scratch(key_cts), dk, L::key);
    if (dv != nullptr) heads.store(scratch(value_cts), dv, L::key);
  }
}

}  // namespace shardlib::kernels::detail
