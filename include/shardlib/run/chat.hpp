// A conversation with a language model: turns in a template, and a context that drops the oldest of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/io/tokenizer/tokenizer.hpp"
#include "shardlib/run/impl/growing_text.hpp"
#include "shardlib/run/sampling.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::run {

/// The texts before and after the user's message in a turn. The model's answer follows.
struct TurnTemplate {
  std::string before = "User: ", after = "\nAssistant:";
};

/// A conversation. The model is given each token once, as long as the turns fit its context; otherwise the oldest whole
/// turns are dropped, and the model is given the others again. Every device makes the same calls.
///
/// Without special tokens in the template, the model is given the ids of the conversation as one text. Where these
/// differ from those that it has drawn, it is given them again, too.
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

/// The template of a text in which {} stands for the message, \n for a new line, \t for a tab and \\ for a backslash.
/// Throws UsageError unless {} occurs once. `turn_template("User: {}\\nAssistant:")`
[[nodiscard]] inline TurnTemplate turn_template(std::string_view text) {
  std::string plain;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const std::string_view two = text.substr(i, 2);
    if (two == "{}") places.push_back(plain.size());
    if (two == "\\n" || two == "\\t" || two == "\\\\" || two == "{}") ++i;
    if (two == "{}") continue;
    plain += two == "\\n" ? '\n' : two == "\\t" ? '\t' : text[i];
  }
  if (places.size() != 1)
    throw UsageError("--turns '" + std::string(text) + "' has {} " + std::to_string(places.size()) +
                     " times: write it once, in the place of the message, as in 'User: {}\\nAssistant:'");
  return {plain.substr(0, places[0]), plain.substr(places[0])};
}

inline Chat::Chat(const io::Tokenizer& tokenizer, TurnTemplate turns, std::int64_t context, std::int64_t vocabulary,
                  Decode decode, SampleOptions options)
    : tokenizer_(tokenizer),
      template_(std::move(turns)),
      separator_(template_.before.starts_with('\n') ? "" : "\n"),
      context_(context),
      vocabulary_(vocabulary),
      room_(std::max<std::int64_t>(1, std::min(options.max_tokens, context / 2))),
      decode_(std::move(decode)),
      options_(std::move(options)) {
  read_special_tokens();
  if (!tokenizer_.special_tokens(template_.before).empty()) return;  // one of `ends_` begins the next turn
  // Without the space that ends it: models end a line where the next turn would begin, and a space comes with a word.
  std::string next = separator_ + template_.before;
  while (!next.empty() && next.back() == ' ') next.pop_back();
  if (next.find_first_not_of('\n') != std::string::npos) options_.stops.push_back(next);
}

inline void Chat::read_special_tokens() {
  const auto behind = tokenizer_.special_tokens(template_.after);
  for (const std::string& part : {template_.before, template_.after})
    for (const io::SpecialToken& token : tokenizer_.special_tokens(part))
      ends_.push_back(static_cast<std::int32_t>(token.id));
  if (ends_.empty()) return;
  const std::uint32_t end = tokenizer_.end_of_text();
  end_ = static_cast<std::int32_t>(end);
  end_text_ = tokenizer_.decode(std::span(&end, 1));
  if (const auto found = tokenizer_.special_tokens(end_text_); found.size() != 1 || found[0].id != end)
    end_text_.clear();
  separator_.clear();
  if (behind.empty() || (behind.size() == 1 && behind[0].id != end)) return;
  end_ = static_cast<std::int32_t>(behind[0].id);
  end_text_ = template_.after.substr(behind[0].begin, behind[0].end - behind[0].begin);
  const std::string_view rest = std::string_view(template_.after).substr(behind[0].end);
  separator_ = rest.substr(0, rest.find_first_not_of(" \t\n"));
}

inline Chat::Ids Chat::encoded() const {
  Ids all;
  if (options_.begin) all.push_back(*options_.begin);
  const auto append = [&](const auto& ids) { all.insert(all.end(), ids.begin(), ids.end()); };
  std::string text;
  for (const Turn& turn : turns_) {
    const bool first = &turn == &turns_.front();
    const std::string before = (first ? "" : separator_) + template_.before;
    if (!end_) {
      text += before + turn.message + template_.after + turn.answer;
      continue;
    }
    // With the end of the answer before it, so that the text between two special tokens is encoded as such.
    if (!first && end_text_.empty()) all.push_back(*end_);
    append(tokenizer_.encode_within((first ? "" : end_text_) + before, turn.message, template_.after + turn.answer));
    append(turn.ids);
  }
  // Without special tokens the conversation is one text: tokens lie across the borders of turns, and a space that a
  // tokenizer puts before a text is at its beginning alone.
  if (end_) return all;
  append(tokenizer_.encode(text));
  append(turns_.back().ids);
  return all;
}

inline void Chat::drop_oldest() {
  while (turns_.size() > 1 && std::ssize(ids_) > context_ - room_) {
    turns_.pop_front();
    ids_ = encoded();
  }
}

inline std::vector<float> Chat::next_logits() {
  // The cache only grows: if it holds anything else, the model starts again.
  if (given_.size() >= ids_.size() || !std::equal(given_.begin(), given_.end(), ids_.begin())) given_.clear();
  const std::size_t begin = given_.size();
  given_.clear();  // a decode that throws leaves the cache unknown
  auto logits = decode_(std::span<const std::int32_t>(ids_).subspan(begin), static_cast<std::int64_t>(begin));
  given_ = ids_;
  logits.resize(std::min<std::size_t>(logits.size(), tokenizer_.vocabulary_size()));
  return logits;
}

inline std::string Chat::answer(std::string_view message, const std::function<void(std::string_view)>& show,
                                const std::function<bool()>& stop) {
  const std::string before = (turns_.empty() ? "" : separator_) + template_.before,
                    prompt = before + std::string(message) + template_.after;
  const std::vector<std::uint32_t> own = tokenizer_.encode_within(before, message, template_.after);
  const std::int64_t most = context_ - (options_.begin ? 1 : 0);
  if (std::ssize(own) > most)
    throw UsageError("the message and its template have " + std::to_string(own.size()) +
                     " tokens, but the model's context has room for " + std::to_string(most) + ": shorten it");
  if (own.empty() && turns_.empty() && !options_.begin)
    throw UsageError("the message is empty, and this model needs a first token: write something");
  turns_.push_back({std::string(message), {}, {}});
  ids_ = encoded();
  if (const auto id = std::ranges::max_element(ids_); *id >= vocabulary_) {
    turns_.pop_back();
    throw UsageError("the message has the token " + std::to_string(*id) + ", but the model's vocabulary ends at " +
                     std::to_string(vocabulary_ - 1) + ": write it without");
  }
  drop_oldest();

  detail::GrowingText text(tokenizer_, prompt, prompt.size(), options_.stops, show);
  std::vector<std::size_t> ends;  // of the answer's tokens in the text
  Turn& turn = turns_.back();
  for (std::int64_t i = 0; i < options_.max_tokens && !(stop && stop()); ++i) {
    if (std::ssize(ids_) > context_) drop_oldest();
    if (std::ssize(ids_) > context_) break;  // the last turn fills it alone
    const std::int32_t id = draw_token(next_logits(), options_, drawn_++);
    if (static_cast<std::uint32_t>(id) == tokenizer_.end_of_text() || std::ranges::count(ends_, id) > 0) break;
    turn.ids.push_back(id);
    ids_.push_back(id);
    if (!text.add(static_cast<std::uint32_t>(id))) break;
    ends.push_back(text.text().size());
  }
  // Text that a stop has cut off is no part of the conversation. The cache stays valid if the next turn begins with the
  // same tokens.
  const std::string& whole = text.finish();
  std::string answer = whole.substr(prompt.size());
  const auto kept = static_cast<std::size_t>(std::ranges::upper_bound(ends, whole.size()) - ends.begin());
  if (end_ && whole.size() == (kept == 0 ? prompt.size() : ends[kept - 1])) {
    turn.ids.resize(kept);
  } else {  // as text, too, if a stop has cut a token in two
    turn.ids.clear();
    turn.answer = answer;
  }
  return answer;
}

}  // namespace shardlib::run
