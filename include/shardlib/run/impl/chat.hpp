// Definitions of chat.hpp.
#pragma once

#include "shardlib/run/chat.hpp"

#include <algorithm>
#include <span>
#include <utility>

#include "shardlib/run/impl/growing_text.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::run {

SHARDLIB_INLINE TurnTemplate turn_template(std::string_view text) {
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
                     " times: write it once, where the message stands, as in 'User: {}\\nAssistant:'");
  return {plain.substr(0, places[0]), plain.substr(places[0])};
}

SHARDLIB_INLINE Chat::Chat(const io::Tokenizer& tokenizer, TurnTemplate turns, std::int64_t context,
                           std::int64_t vocabulary, Decode decode, SampleOptions options)
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

SHARDLIB_INLINE void Chat::read_special_tokens() {
  const auto behind = tokenizer_.special_tokens(template_.after);
  for (const std::string& part : {template_.before, template_.after})
    for (const io::SpecialToken& token : tokenizer_.special_tokens(part))
      ends_.push_back(static_cast<std::int32_t>(token.id));
  if (ends_.empty()) return;
  end_ = static_cast<std::int32_t>(tokenizer_.end_of_text());
  separator_.clear();
  if (behind.empty() || (behind.size() == 1 && behind[0].id != tokenizer_.end_of_text())) return;
  end_ = static_cast<std::int32_t>(behind[0].id);
  const std::string_view rest = std::string_view(template_.after).substr(behind[0].end);
  separator_ = rest.substr(0, rest.find_first_not_of(" \t\n"));
}

SHARDLIB_INLINE std::int64_t Chat::tokens() const {
  std::int64_t count = options_.begin ? 1 : 0;
  for (const Ids& turn : turns_) count += std::ssize(turn);
  return count;
}

SHARDLIB_INLINE void Chat::drop_oldest() {
  while (turns_.size() > 1 && tokens() > context_ - room_) turns_.pop_front();
}

SHARDLIB_INLINE std::vector<float> Chat::next_logits() {
  Ids all;
  if (options_.begin) all.push_back(*options_.begin);
  for (const Ids& turn : turns_) all.insert(all.end(), turn.begin(), turn.end());
  // The cache only grows: if it holds anything else, the model begins anew.
  if (given_.size() >= all.size() || !std::equal(given_.begin(), given_.end(), all.begin())) given_.clear();
  const std::size_t begin = given_.size();
  given_.clear();  // a decode that throws leaves the cache unknown
  auto logits = decode_(std::span<const std::int32_t>(all).subspan(begin), static_cast<std::int64_t>(begin));
  given_ = std::move(all);
  logits.resize(std::min<std::size_t>(logits.size(), tokenizer_.vocabulary_size()));
  return logits;
}

SHARDLIB_INLINE std::string Chat::answer(std::string_view message, const std::function<void(std::string_view)>& show,
                                         const std::function<bool()>& stop) {
  const std::string before = (turns_.empty() ? "" : separator_) + template_.before,
                    prompt = before + std::string(message) + template_.after;
  const std::vector<std::uint32_t> encoded = tokenizer_.encode_within(before, message, template_.after);
  for (const std::uint32_t id : encoded)
    if (static_cast<std::int64_t>(id) >= vocabulary_)
      throw UsageError("the message has the token " + std::to_string(id) + ", but the model's vocabulary ends at " +
                       std::to_string(vocabulary_ - 1) + ": write it without");
  const std::int64_t most = context_ - (options_.begin ? 1 : 0);
  if (std::ssize(encoded) > most)
    throw UsageError("the message and its template have " + std::to_string(encoded.size()) +
                     " tokens, but the model's context has room for " + std::to_string(most) + ": shorten it");
  if (encoded.empty() && turns_.empty() && !options_.begin)
    throw UsageError("the message is empty, and this model needs a first token: write something");
  if (end_ && !turns_.empty()) turns_.back().push_back(*end_);
  turns_.emplace_back(encoded.begin(), encoded.end());
  drop_oldest();

  detail::GrowingText text(tokenizer_, prompt, prompt.size(), options_.stops, show);
  std::vector<std::size_t> ends;  // of the answer's tokens in the text
  const auto first = std::ssize(turns_.back());
  for (std::int64_t i = 0; i < options_.max_tokens && !(stop && stop()); ++i) {
    if (tokens() > context_) drop_oldest();
    if (tokens() > context_) break;  // the last turn fills it alone
    const std::int32_t id = draw_token(next_logits(), options_, drawn_++);
    if (static_cast<std::uint32_t>(id) == tokenizer_.end_of_text() || std::ranges::count(ends_, id) > 0) break;
    turns_.back().push_back(id);
    if (!text.add(static_cast<std::uint32_t>(id))) break;
    ends.push_back(text.text().size());
  }
  // Text that a stop has cut off is no part of the conversation. The cache stays valid if the next turn begins with the
  // same tokens.
  const std::string& whole = text.finish();
  const auto kept = std::ranges::upper_bound(ends, whole.size()) - ends.begin();
  const std::size_t end = kept == 0 ? prompt.size() : ends[static_cast<std::size_t>(kept) - 1];
  turns_.back().resize(static_cast<std::size_t>(first + kept));
  const std::vector<std::uint32_t> rest = tokenizer_.encode(std::string_view(whole).substr(end));
  turns_.back().insert(turns_.back().end(), rest.begin(), rest.end());
  return whole.substr(prompt.size());
}

}  // namespace shardlib::run
