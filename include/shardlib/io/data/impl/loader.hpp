// Definitions of loader.hpp.
#pragma once

#include "shardlib/io/data/loader.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <vector>

#include "shardlib/support/error.hpp"

namespace shardlib::io {

/// The tokens of a row; a packed row may continue at the beginning of the source.
struct Loader::Row {
  std::int64_t begin = 0, count = 0;
  std::int64_t document = -1;  ///< of a padded row
};

SHARDLIB_INLINE Loader::Loader(std::shared_ptr<const TokenSource> source, LoaderOptions options)
    : source_(std::move(source)), options_(options) {
  detail::check_batch(options_.batch, options_.length);
  if (options_.vocabulary > 0 && source_->max_token_id().value_or(0) >= options_.vocabulary)
    throw UsageError("'" + source_->name() + "' has token ids up to " + std::to_string(*source_->max_token_id()) +
                     ", but the vocabulary has " + std::to_string(options_.vocabulary) +
                     " tokens: choose a larger vocabulary (--vocabulary of the trainers; that of a loaded model is "
                     "fixed), or data made with the model's tokenizer");
  units_ = options_.rows == Rows::packed ? source_->tokens() : source_->documents();
}

SHARDLIB_INLINE std::int64_t Loader::steps_for(std::int64_t epochs) const {
  const std::int64_t per_step = options_.rows == Rows::packed ? options_.batch * options_.length : options_.batch;
  const std::int64_t whole = units_ / per_step, rest = units_ % per_step;
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max() / 4;
  if (epochs > most / (units_ + per_step))
    throw UsageError(std::to_string(epochs) + " passes over '" + source_->name() +
                     "' are more steps than can be counted; choose fewer epochs");
  return epochs * whole + (epochs * rest + per_step - 1) / per_step;
}

SHARDLIB_INLINE double Loader::epochs(std::int64_t step) const {
  const std::int64_t per_step = options_.rows == Rows::packed ? options_.batch * options_.length : options_.batch;
  return static_cast<double>(step) * static_cast<double>(per_step) / static_cast<double>(units_);
}

SHARDLIB_INLINE std::uint64_t Loader::identity() const {
  constexpr std::uint64_t rule = 1;  // to be counted up whenever the same options give other batches
  std::uint64_t hash = detail::hash_in(source_->identity(), rule);
  for (const std::int64_t value : {options_.batch, options_.length, static_cast<std::int64_t>(options_.rows),
                                   std::int64_t{options_.shuffle}, std::int64_t{options_.repeat}})
    hash = detail::hash_in(hash, static_cast<std::uint64_t>(value));
  if (options_.begin != 0) hash = detail::hash_in(hash, static_cast<std::uint64_t>(options_.begin));
  return options_.shuffle ? detail::hash_in(hash, options_.seed) : hash;
}

// A packed row of an endless source (its tokens repeated without end) begins at number * length, so that rows run over
// an epoch's end; it belongs to the epoch in which it begins, and the rows of an epoch are shuffled among themselves.
SHARDLIB_INLINE Loader::Row Loader::row(std::int64_t number) const {
  const auto place = [&](std::int64_t i, std::int64_t count, std::int64_t epoch) {
    return options_.shuffle ? Permutation(count, options_.seed, static_cast<std::uint64_t>(epoch))(i) : i;
  };
  const std::int64_t length = options_.length;
  if (options_.rows != Rows::packed) {
    if (!options_.repeat && number >= units_) return {};
    const std::int64_t document = place(number % units_, units_, number / units_);
    const TokenRange range = source_->document(document);
    return {range.begin, std::min(range.end - range.begin, length), document};
  }
  if (!options_.repeat) {
    const std::int64_t rows = (units_ - 1) / length + 1;
    if (number >= rows) return {};
    const std::int64_t begin = place(number, rows, 0) * length;
    return {begin, std::min(length, units_ - begin)};
  }
  const std::int64_t epoch = number * length / units_;
  const auto first_of = [&](std::int64_t e) { return (e * units_ + length - 1) / length; };
  const std::int64_t first = first_of(epoch), rows = first_of(epoch + 1) - first;
  return {(first + place(number - first, rows, epoch)) * length % units_, length};
}

SHARDLIB_INLINE void Loader::check_vocabulary(const Row& row, std::span<const EncodedToken> tokens) const {
  EncodedToken largest = 0;
  for (const EncodedToken token : tokens) largest = std::max(largest, token);
  if (largest >> 1 < options_.vocabulary) return;
  const auto bad =
      std::find_if(tokens.begin(), tokens.end(), [&](EncodedToken t) { return t >> 1 >= options_.vocabulary; });
  throw UsageError("token " + std::to_string((row.begin + (bad - tokens.begin())) % source_->tokens()) + " of '" +
                   source_->name() + "' has the id " + std::to_string(*bad >> 1) + ", but the vocabulary has " +
                   std::to_string(options_.vocabulary) +
                   " tokens: choose a larger vocabulary (--vocabulary of the trainers; that of a loaded model is "
                   "fixed), or data made with the model's tokenizer");
}

SHARDLIB_INLINE void Loader::read_row(const Row& row, std::span<EncodedToken> tokens) const {
  for (std::size_t done = 0; done < tokens.size();) {
    const std::int64_t begin = (row.begin + static_cast<std::int64_t>(done)) % source_->tokens();
    const auto rest = static_cast<std::size_t>(source_->tokens() - begin);
    const std::size_t count = std::min(tokens.size() - done, rest);
    source_->read(begin, tokens.subspan(done, count));
    done += count;
  }
  if (options_.vocabulary > 0) check_vocabulary(row, tokens);
  if (row.document < 0) return;
  for (std::size_t i = 0; i < tokens.size(); ++i)
    if ((tokens[i] & 1U) != (i == 0 ? 1U : 0U))
      throw Error("document " + std::to_string(row.document) + " of '" + source_->name() + "' begins at token " +
                  std::to_string(row.begin) + ", but the mark on token " +
                  std::to_string(row.begin + static_cast<std::int64_t>(i)) +
                  " says otherwise: the data are damaged; make them again");
}

SHARDLIB_INLINE TokenBatch Loader::rows(std::int64_t step, std::int64_t first, std::int64_t count) const {
  const auto [batch, length] = std::pair(options_.batch, options_.length);
  if (first < 0 || count < 0 || first > batch - count)
    throw Error("rows " + std::to_string(first) + " to " + std::to_string(first + count) + " of step " +
                std::to_string(step) + " are asked for, but a batch has " + std::to_string(batch));
  const std::int64_t end =
      options_.repeat ? std::numeric_limits<std::int64_t>::max() / 4 / (batch * length) : steps_per_epoch();
  if (step < 0 || step >= end)
    throw Error("step " + std::to_string(step) + " is asked for, but '" + source_->name() + "' lasts for steps 0 to " +
                std::to_string(end - 1));
  TokenBatch out = detail::empty_rows(count, length);
  std::vector<EncodedToken> tokens;
  for (std::int64_t r = 0; r < count; ++r) {
    const Row at = row(step * batch + first + r);
    tokens.resize(static_cast<std::size_t>(at.count));
    read_row(at, tokens);
    const auto begin = static_cast<std::size_t>(r * length), size = static_cast<std::size_t>(length);
    if (options_.rows == Rows::stories && !tokens.empty())
      detail::fill_story(tokens, begin, size, out);
    else
      detail::fill_row(tokens, begin, size, options_.begin, out);
  }
  return out;
}

}  // namespace shardlib::io
