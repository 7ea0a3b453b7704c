// A conversation with a language model: turns in a template, and a context that drops the oldest of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/io/tokenizer/tokenizer.hpp"
#include "shardlib/run/sampling.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// The texts before and after the user's message in a turn. The model's answer follows.
struct TurnTemplate {
  std::string before = "User: ", after = "\nAssistant:";
};
/// The template of a text in which {} stands for the message, \n for a new line, \t for a tab and \\ for a backslash.
/// Throws UsageError unless {} occurs once. `turn_template("User: {}\\nAssistant:")`
[[nodiscard]] SHARDLIB_INLINE TurnTemplate turn_template(std::string_view text);

/// A conversation. The model is given each token once, as long as the turns fit its context; otherwise the oldest whole
/// turns are dropped, and the model is given the others anew. Every device makes the same calls.
///
/// Without special tokens in the template, the model is given the ids of the conversation as one text. Where these
/// differ from those that it has drawn, it is given them anew too.
///
/// Special tokens of the tokenizer count in the template, as in "<|user|>{}<|end|><|model|>", and are text in a
/// message. The first one behind the message ends an answer too, and with the white space behind it stands before the
/// next turn, if another one follows it there. Otherwise, in a template with special tokens, the end of text does that.
class Chat {
 public:
  /// Ids of tokens are below `vocabulary`. An answer ends at the end of text, at options.stops, at a special token of
  /// the template, or where the next turn would begin. `Chat(*tokenizer, turn_template("Q: {}\\nA:"), 1024, 50257,
  /// decode, {.temperature = 0.7})`
  Chat(const io::Tokenizer& tokenizer, TurnTemplate turns, std::int64_t context, std::int64_t vocabulary, Decode decode,
       SampleOptions options);

  /// Adds a turn, and returns the answer, of which `show` is given each piece as soon as it is certain. Ends early
  /// where `stop`, which must say the same on every device, is true. Throws UsageError for a message that the context
  /// has no room for; then the conversation is as before. `chat.answer("Who are you?", show)`
  std::string answer(std::string_view message, const std::function<void(std::string_view)>& show = nullptr,
                     const std::function<bool()>& stop = nullptr);
  /// Forgets all turns, so that the next message begins a conversation.
  void reset() { turns_.clear(); }
  /// The number of turns in the context.
  [[nodiscard]] std::size_t turns() const { return turns_.size(); }

 private:
  using Ids = std::vector<std::int32_t>;
  struct Turn {
    std::string message, answer;
    Ids ids;  ///< of the answer as the model has drawn them, where `answer` does not have it
  };
  void read_special_tokens();
  [[nodiscard]] Ids encoded() const;
  void drop_oldest();
  [[nodiscard]] std::vector<float> next_logits();

  const io::Tokenizer& tokenizer_;
  TurnTemplate template_;
  std::string separator_;            ///< before each turn but the first
  std::vector<std::int32_t> ends_;   ///< special tokens that end an answer
  std::optional<std::int32_t> end_;  ///< the one of them that stands behind each answer
  std::string end_text_;             ///< its spelling; empty if it has none
  std::int64_t context_, vocabulary_, room_;
  Decode decode_;
  SampleOptions options_;
  std::deque<Turn> turns_;
  Ids ids_;    ///< of all turns
  Ids given_;  ///< what the model has in its cache
  std::int64_t drawn_ = 0;
};

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/chat.hpp"
#endif
