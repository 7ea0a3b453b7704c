// A batch of tokens as the devices take it, and how rows are filled.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "shardlib/support/error.hpp"

namespace shardlib::io {

/// A token with the mark of a document's first one: 2 * id + 1 where a document begins, 2 * id elsewhere (as in
/// flat-tokens). Ids are below 2^31.
using EncodedToken = std::uint32_t;

/// Rows of a batch, each array row-major "rows length". `targets` are the tokens that follow the `inputs`; `segments`
/// number the documents in a row from 0, and attention stays within one; `weights` are 1 where a target counts in the
/// loss and 0 where a row is only filled up.
struct TokenBatch {
  std::vector<std::int32_t> inputs, targets, segments;
  std::vector<float> weights;
};

/// The batch as so many of consecutive rows; the number must divide its rows. `split_rows(batch, microbatches)`
[[nodiscard]] inline std::vector<TokenBatch> split_rows(const TokenBatch& batch, std::int64_t parts) {
  const auto part = static_cast<std::ptrdiff_t>(batch.inputs.size()) / parts;
  std::vector<TokenBatch> all;
  for (std::ptrdiff_t begin = 0; begin < parts * part; begin += part) {
    const auto of = [&](const auto& values) {
      return std::vector(values.begin() + begin, values.begin() + begin + part);
    };
    all.push_back({of(batch.inputs), of(batch.targets), of(batch.segments), of(batch.weights)});
  }
  return all;
}

namespace detail {

/// Throws UsageError for a size of a batch that makes no sense.
inline void check_batch(std::int64_t batch, std::int64_t length) {
  constexpr std::int64_t most = std::int64_t{1} << 31;
  if (batch < 1 || length < 1 || batch > most / length)
    throw UsageError("a batch of " + std::to_string(batch) + " rows of " + std::to_string(length) +
                     " tokens: both are at least 1, and their product at most 2^31; check --batch and --seq");
}

/// Rows of `length`, all filling: 0 that do not count.
inline TokenBatch empty_rows(std::int64_t rows, std::int64_t length) {
  const auto size = static_cast<std::size_t>(rows * length);
  return {std::vector<std::int32_t>(size), std::vector<std::int32_t>(size), std::vector<std::int32_t>(size),
          std::vector<float>(size)};
}

/// Writes the tokens of one row, and what follows from them, at `begin` of a batch; the rest of the row is filling, a
/// segment of its own. `first` is the input before a document's first token, and a row's, which have nothing before
/// them.
inline void fill_row(std::span<const EncodedToken> tokens, std::size_t begin, std::size_t length, std::int32_t first,
                     TokenBatch& batch) {
  const auto id = [](EncodedToken token) { return static_cast<std::int32_t>(token >> 1); };
  std::int32_t* const inputs = batch.inputs.data() + begin;
  std::int32_t* const targets = batch.targets.data() + begin;
  std::int32_t* const segments = batch.segments.data() + begin;
  const std::size_t n = tokens.size();
  for (std::size_t i = 0; i < n; ++i) targets[i] = id(tokens[i]);
  if (n > 0) inputs[0] = first;
  for (std::size_t i = 1; i < n; ++i) inputs[i] = (tokens[i] & 1U) != 0 ? first : id(tokens[i - 1]);
  std::int32_t segment = 0;
  for (std::size_t i = 0; i < n; ++i) {
    segment += i > 0 ? static_cast<std::int32_t>(tokens[i] & 1U) : 0;
    segments[i] = segment;
  }
  std::fill_n(batch.weights.data() + begin, n, 1.0F);
  std::fill(segments + n, segments + length, n > 0 ? segment + 1 : 0);
}

/// A row in the layout of JAX's miniGPT tutorial.
inline void fill_story(std::span<const EncodedToken> tokens, std::size_t begin, std::size_t length, TokenBatch& batch) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    batch.inputs[begin + i] = static_cast<std::int32_t>(tokens[i] >> 1);
    if (i > 0) batch.targets[begin + i - 1] = static_cast<std::int32_t>(tokens[i] >> 1);
  }
  std::fill_n(batch.weights.data() + begin, length, 1.0F);
}

}  // namespace detail

}  // namespace shardlib::io
