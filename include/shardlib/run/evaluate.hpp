// Multiple-choice evaluation: which of several endings a model finds most likely.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "shardlib/io/data/token_batch.hpp"
#include "shardlib/io/tokenizer/tokenizer.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// A text, the `context`, with several `endings`. `label` is the index of the right one.
struct Question {
  std::string context;
  std::vector<std::string> endings;
  std::size_t label = 0;
};

/// Reads the questions of a file. Each line is a JSON object, as in HellaSwag: {"ctx": "A man", "endings": ["sleeps.",
/// "flies."], "label": 0}. Other keys are ignored. Throws UsageError with file and line for a line that is not a
/// question. `read_questions("hellaswag_val.jsonl")`
[[nodiscard]] SHARDLIB_INLINE std::vector<Question> read_questions(const std::string& path);

/// The scores of a model on `questions`. `right` counts the questions whose right ending has the largest log-likelihood
/// after the context. `right_normalized` divides the log-likelihood by the ending's characters. These are acc and
/// acc_norm of EleutherAI's lm-evaluation-harness. `chance` is the accuracy of random guesses.
struct Evaluation {
  std::int64_t questions = 0, right = 0, right_normalized = 0;
  double chance = 0;
};

/// A row for an ending. Only the ending's `tokens` have a weight; the weights add up to 1.
struct EndingRow {
  io::TokenBatch row;
  std::int64_t tokens = 0;
};
/// Makes the row of `length` tokens for an ending. An ending without white space before it gets a space, and white
/// space before it is a part of it. If context and ending are longer than a row, the context loses its first tokens.
/// `begin` is the token before the text, if there is one. Throws UsageError if the ending alone is longer than a row,
/// or has no token. `row_of(*tokenizer, "A man", "sleeps.", 128, 0)`
[[nodiscard]] SHARDLIB_INLINE EndingRow row_of(const io::Tokenizer& tokenizer, const std::string& context,
                                               const std::string& ending, std::int64_t length,
                                               std::optional<std::int32_t> begin);

/// Asks a model the questions. `mean_loss(row)` is the loss of an EndingRow's tokens, the same on all devices. The
/// evaluation ends before the next question when `stop()` returns true; it must return the same on all devices. Throws
/// Error if a loss is not finite. `evaluate(questions, *tokenizer, 128, 0, mean_loss)`
[[nodiscard]] SHARDLIB_INLINE Evaluation evaluate(const std::vector<Question>& questions,
                                                  const io::Tokenizer& tokenizer, std::int64_t length,
                                                  std::optional<std::int32_t> begin,
                                                  const std::function<double(const io::TokenBatch& row)>& mean_loss,
                                                  const std::function<bool()>& stop = nullptr);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/evaluate.hpp"
#endif
