// Multiple-choice evaluation: which of several endings a model finds the likeliest.
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

/// A text, the `context`, with several `endings`, of which number `label` is right.
struct Question {
  std::string context;
  std::vector<std::string> endings;
  std::size_t label = 0;
};

/// The questions of a file with a JSON object a line, as HellaSwag's: {"ctx": "A man", "endings": ["sleeps.",
/// "flies."], "label": 0}. Other keys are left aside. Throws UsageError, with file and line, for what is none.
/// `read_questions("hellaswag_val.jsonl")`
[[nodiscard]] SHARDLIB_INLINE std::vector<Question> read_questions(const std::string& path);

/// Of how many `questions` a model finds the right ending the likeliest, by two scores: `right`, by the log-likelihood
/// of the ending's tokens after the context, and `right_normalized`, by that divided by the ending's bytes. They are
/// acc and acc_norm of EleutherAI's lm-evaluation-harness. Guesses would answer the share `chance` right.
struct Evaluation {
  std::int64_t questions = 0, right = 0, right_normalized = 0;
  double chance = 0;
};

/// A row for an ending, in which only the ending's `tokens` count, with weights that add up to 1.
struct EndingRow {
  io::TokenBatch row;
  std::int64_t tokens = 0;
};
/// The row of `length` tokens for an ending. An ending without white space before it gets a space. Where context and
/// ending are longer than a row, the context loses its first tokens. `begin` is the token before the text, if there is
/// one. Throws UsageError if the ending alone is longer than a row. `row_of(*tokenizer, "A man", "sleeps.", 128, 0)`
[[nodiscard]] SHARDLIB_INLINE EndingRow row_of(const io::Tokenizer& tokenizer, const std::string& context,
                                               const std::string& ending, std::int64_t length,
                                               std::optional<std::int32_t> begin);

/// Asks a model. `mean_loss(row)` is the loss of an EndingRow's tokens, the same on all devices. `stop`, which must say
/// the same on all devices, ends it before a question. Throws Error if a loss is not finite. `evaluate(questions,
/// *tokenizer, 128, 0, mean_loss)`
[[nodiscard]] SHARDLIB_INLINE Evaluation evaluate(const std::vector<Question>& questions,
                                                  const io::Tokenizer& tokenizer, std::int64_t length,
                                                  std::optional<std::int32_t> begin,
                                                  const std::function<double(const io::TokenBatch& row)>& mean_loss,
                                                  const std::function<bool()>& stop = nullptr);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/evaluate.hpp"
#endif
