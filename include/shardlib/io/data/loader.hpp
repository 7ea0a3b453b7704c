// Batches of tokens for training: a pure function of (seed, step), the same on every mesh. docs/data.md has the rules.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "shardlib/io/data/token_batch.hpp"
#include "shardlib/io/data/token_source.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::io {

/// The content of a row.
enum class Rows {
  packed,   ///< the next `length` tokens, whatever documents they belong to
  padded,   ///< the first `length` tokens of one document, filled up with 0 that do not count
  stories,  ///< the same, but inputs are the tokens themselves, targets those shifted left, and the filling counts
};

/// The rows that a Loader makes, and their order.
struct LoaderOptions {
  std::int64_t batch = 1;        ///< rows of the global batch
  std::int64_t length = 1;       ///< tokens a row
  std::uint64_t seed = 0;        ///< seed of the order
  Rows rows = Rows::packed;      ///< what a row holds
  bool shuffle = true;           ///< false: rows in the order of the source
  bool repeat = true;            ///< false: one pass, then the end; what fills the last batch up does not count
  std::uint32_t vocabulary = 0;  ///< ids must be below it; 0: not checked
  std::int32_t begin = 0;        ///< the input before the first token of a document, and of a row; not of Rows::stories
};

/// A bijection of [0, count) that needs no memory: a four-round Feistel network over the next power of four, walked
/// until it lands inside (Black and Rogaway 2002).
class Permutation {
 public:
  /// Each `key` (an epoch) has its own order.
  Permutation(std::int64_t count, std::uint64_t seed, std::uint64_t key) : count_(count), seed_(seed), key_(key) {
    while ((std::int64_t{1} << (2 * half_)) < count_) ++half_;
  }
  [[nodiscard]] std::int64_t operator()(std::int64_t i) const {
    const std::uint64_t mask = (std::uint64_t{1} << half_) - 1;
    auto x = static_cast<std::uint64_t>(i);
    do {
      std::uint64_t left = x >> half_, right = x & mask;
      for (std::uint64_t round = 0; round < 4; ++round)
        left = std::exchange(right, left ^ (mix(right + (round << 32) + (key_ << 34)) & mask));
      x = (left << half_) | right;
    } while (x >= static_cast<std::uint64_t>(count_));
    return static_cast<std::int64_t>(x);
  }

 private:
  [[nodiscard]] std::uint64_t mix(std::uint64_t x) const {
    return detail::mix_bits(x + 0x9e3779b97f4a7c15U * (seed_ + 1));
  }
  std::int64_t count_;
  std::uint64_t seed_, key_;
  unsigned half_ = 1;
};

/// Cuts a source into rows. Row `r` of step `s` is number `s * batch + r` of an endless sequence of rows, in which each
/// epoch has each token (packed) or each document (padded, stories) exactly once. Const members are thread-safe. Its
/// `source` and `options` stay as they were given.
class Loader {
 public:
  /// Throws UsageError for sizes that make no sense, and where the source's ids exceed the vocabulary.
  Loader(std::shared_ptr<const TokenSource> source, LoaderOptions options);

  [[nodiscard]] const TokenSource& source() const { return *source_; }
  [[nodiscard]] const LoaderOptions& options() const { return options_; }

  /// Rows [first, first + count) of the batch of a step: each device asks for its own, and only they are read.
  [[nodiscard]] TokenBatch rows(std::int64_t step, std::int64_t first, std::int64_t count) const;
  /// All rows of a step.
  [[nodiscard]] TokenBatch batch(std::int64_t step) const { return rows(step, 0, options_.batch); }

  /// Steps after which every token (or document) has been seen once, rounded up.
  [[nodiscard]] std::int64_t steps_per_epoch() const { return steps_for(1); }
  /// The steps of this many passes over the data, rounded up once: a batch may reach into the next epoch.
  [[nodiscard]] std::int64_t steps_for(std::int64_t epochs) const;
  /// The number of passes over the data when a step begins.
  [[nodiscard]] double epochs(std::int64_t step) const;
  /// A hash of the tokens and of everything that decides the batches, for checkpoints: while it stays the same, step k
  /// is the same batch.
  [[nodiscard]] std::uint64_t identity() const;

 private:
  struct Row;
  [[nodiscard]] Row row(std::int64_t number) const;
  void read_row(const Row& row, std::span<EncodedToken> tokens) const;
  void check_vocabulary(const Row& row, std::span<const EncodedToken> tokens) const;

  std::shared_ptr<const TokenSource> source_;
  LoaderOptions options_;
  std::int64_t units_;  // what an epoch has: tokens, or documents
};

}  // namespace shardlib::io

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/data/impl/loader.hpp"
#endif
