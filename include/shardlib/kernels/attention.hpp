// Causal attention with an online softmax, forward and backward, in blocks of queries and keys. It never stores the
// scores of all queries (Milakov and Gimelshein 2018, Rabe and Staats 2021; the backward pass as in FlashAttention,
// Dao 2022).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib::kernels {

/// The loops of an attention. Strides are in elements, for four arrays: queries (results have the same layout), keys
/// (values have the same layout), log-sum-exps, segments. A stride is 0 along a dim that the array lacks.
struct AttentionLoops {
  using Strides = std::array<std::int64_t, 4>;
  static constexpr std::size_t query = 0, key = 1, sum = 2, segment = 3;

  Nest<4> heads;            ///< over the dims of the keys; these iterations are independent
  Nest<4> groups;           ///< over the query heads that share a head of keys
  std::int64_t length = 0;  ///< number of queries and of their own keys; query i sees keys 0 .. i
  std::int64_t width = 0;   ///< width of a head
  Strides along_length{}, along_width{};
  double scale = 1;  ///< factor of the scores
  /// The keys are a block of `earlier_keys` before the queries: each query sees all of them. The call continues the one
  /// with the queries' own keys, and with other blocks.
  bool earlier = false;
  std::int64_t earlier_keys = 0;

  [[nodiscard]] constexpr std::int64_t keys() const { return earlier ? earlier_keys : length; }
  /// The rows that an operand has along the length.
  [[nodiscard]] constexpr std::int64_t rows(std::size_t operand) const { return operand == key ? keys() : length; }
};

/// The segments of the queries and of the keys. Null: all positions belong to one segment.
struct AttentionSegments {
  const i32* queries = nullptr;
  const i32* keys = nullptr;
};

/// out = softmax(scale q k') v, where query i sees the keys 0 .. i of its own segment. If `sums` is not null, it
/// receives the log-sum-exp of each query's scores, for the backward pass. With `earlier` keys, `out` and `sums` hold
/// the attention to the keys of the calls before, and receive that to all keys. R is T, or its accumulator type.
template <class T, class R>
void causal_attention(const Exec& exec, const AttentionLoops& loops, const T* q, const T* k, const T* v,
                      AttentionSegments segments, R* out, accumulator_t<T>* sums);

/// Computes the cotangents of q, k and v from the result's cotangent, the result and its log-sum-exps, which are of
/// all keys. A null output is not computed. With `earlier` keys, dq is added to what it holds.
template <class T, class R>
void causal_attention_backward(const Exec& exec, const AttentionLoops& loops, const T* q, const T* k, const T* v,
                               AttentionSegments segments, const T* out, const accumulator_t<T>* sums, const T* ct,
                               R* dq, R* dk, R* dv);

}  // namespace shardlib::kernels

#ifndef SHARDLIB_COMPILED
#include "shardlib/kernels/impl/attention.hpp"
#endif
