// A text that grows by tokens: the part of it that may be shown, and whether a stop has ended it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/io/tokenizer/tokenizer.hpp"

#include "shardlib/support/text.hpp"

namespace shardlib::run::detail {

/// The number of bytes at the end of `text` that begin a UTF-8 character without ending it.
inline std::size_t incomplete(std::string_view text) {
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, text.size()); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if (shardlib::detail::continues_character(text[text.size() - back])) continue;
    const std::size_t length = byte >= 0xF0U ? 4 : byte >= 0xE0U ? 3 : byte >= 0xC0U ? 2 : 1;
    return length > back ? back : 0;
  }
  return 0;
}

/// The number of bytes at the end of `text` that may become one of the stops.
inline std::size_t begun(std::string_view text, const std::vector<std::string>& stops) {
  std::size_t longest = 0;
  for (const std::string& stop : stops)
    for (std::size_t n = std::min(stop.size(), text.size()); n > longest; --n)
      if (text.ends_with(std::string_view(stop).substr(0, n))) longest = n;
  return longest;
}

/// The text, which begins with a prompt. `show` is given what comes after the first `shown` bytes, in pieces of whole
/// characters that no stop can take back. It may be null.
class GrowingText {
 public:
  GrowingText(const io::Tokenizer& tokenizer, std::string prompt, std::size_t shown,
              const std::vector<std::string>& stops, const std::function<void(std::string_view)>& show)
      : tokenizer_(tokenizer), stops_(stops), show_(show), text_(std::move(prompt)), shown_(shown) {
    flush(0);
  }
  /// Whether the text may grow: false once a stop, which the text does not include, has ended it.
  [[nodiscard]] bool add(std::uint32_t token) {
    if (text_.empty())
      text_ = tokenizer_.decode(std::span(&token, 1));
    else
      tokenizer_.append_decoded(token, text_);
    std::size_t end = std::string::npos;  // a stop may have begun in what was held back, not in the prompt
    for (const std::string& one : stops_) end = std::min(end, text_.find(one, shown_));
    if (end != std::string::npos) {
      text_.resize(end);
      return false;
    }
    flush(std::max(incomplete(text_), begun(std::string_view(text_).substr(shown_), stops_)));
    return true;
  }
  /// Shows what was held back.
  const std::string& finish() {
    flush(0);
    return text_;
  }
  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  void flush(std::size_t held) {
    const std::size_t end = std::max(text_.size() - held, shown_);
    if (show_ && end > shown_) show_(std::string_view(text_).substr(shown_, end - shown_));
    shown_ = end;
  }
  const io::Tokenizer& tokenizer_;
  const std::vector<std::string>& stops_;
  const std::function<void(std::string_view)>& show_;
  std::string text_;
  std::size_t shown_;
};

}  // namespace shardlib::run::detail
