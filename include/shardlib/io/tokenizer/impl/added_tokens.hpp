// Tokens that are found in a text before it is cut into pieces, for impl/ headers.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "shardlib/io/tokenizer/bpe_model.hpp"
#include "shardlib/io/tokenizer/impl/pieces.hpp"
#include "shardlib/io/tokenizer/tokenizer.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::io::detail {

/// A token with a text of its own. `left` and `right` say whether it takes the white space there too.
struct AddedToken {
  std::uint32_t id = 0;
  bool special = false, left = false, right = false;
};

/// Finds tokens as Hugging Face's tokenizers do: the leftmost first, of those the longest.
class AddedTokens {
 public:
  /// Adds a token. Returns false if its text is empty, or if another token has the same text.
  bool add(const std::string& text, const AddedToken& token) {
    if (text.empty() || !tokens_.emplace(text, token).second) return false;
    std::vector<std::size_t>& sizes = sizes_[static_cast<unsigned char>(text[0])];
    const auto at = std::lower_bound(sizes.begin(), sizes.end(), text.size(), std::greater<>());
    if (at == sizes.end() || *at != text.size()) sizes.insert(at, text.size());
    ordinary_ = ordinary_ || !token.special;
    return true;
  }

  /// Calls f(text, no_token) for each text between tokens and f({}, id) for each token, in order. Special tokens with
  /// bytes of [plain_begin, plain_end) are text; other tokens within their text are not found.
  template <class F>
  void split(std::string_view text, std::size_t plain_begin, std::size_t plain_end, F&& f) const {
    std::size_t begin = 0;
    const bool all_plain = plain_begin == 0 && plain_end >= text.size();
    for (std::size_t at = 0; (ordinary_ || !all_plain) && at < text.size();) {
      const auto [size, token] = match(text.substr(at));
      at += std::max<std::size_t>(size, 1);
      if (token == nullptr || (token->special && at - size < plain_end && at > plain_begin)) continue;
      std::size_t first = at - size, end = at;
      if (token->left) first = std::max(begin, spaces_before(text, first));
      if (token->right) end += spaces_at(text.substr(end));
      if (first >= end) continue;  // white space that the token before has taken
      if (begin < first) f(text.substr(begin, first - begin), no_token);
      f(std::string_view(), token->id);
      begin = end;
    }
    if (begin < text.size()) f(text.substr(begin), no_token);
  }

  /// The special tokens in the text.
  [[nodiscard]] std::vector<SpecialToken> special(std::string_view text) const {
    std::vector<SpecialToken> found;
    for (std::size_t at = 0; at < text.size();) {
      const auto [size, token] = match(text.substr(at));
      if (token != nullptr && token->special) found.push_back({at, at + size, token->id});
      at += std::max<std::size_t>(size, 1);
    }
    return found;
  }

 private:
  [[nodiscard]] std::pair<std::size_t, const AddedToken*> match(std::string_view text) const {
    for (const std::size_t size : sizes_[static_cast<unsigned char>(text[0])]) {
      if (size > text.size()) continue;
      const auto found = tokens_.find(text.substr(0, size));
      if (found != tokens_.end()) return {size, &found->second};
    }
    return {0, nullptr};
  }
  static std::size_t spaces_at(std::string_view text) {
    return static_cast<std::size_t>(run_end(text.data(), text.data() + text.size(), Kind::space) - text.data());
  }
  static std::size_t spaces_before(std::string_view text, std::size_t end) {
    while (end > 0) {
      std::size_t begin = end - 1;
      while (begin > 0 && end - begin < 4 && shardlib::detail::continues_character(text[begin])) --begin;
      const Character c = character(text.data() + begin, text.data() + end);
      if (c.kind != Kind::space || c.size != end - begin) break;
      end = begin;
    }
    return end;
  }

  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  std::unordered_map<std::string, AddedToken, Hash, std::equal_to<>> tokens_;
  std::array<std::vector<std::size_t>, 256> sizes_;  // of the tokens that begin with a byte, the largest first
  bool ordinary_ = false;                            // whether one is not special
};

}  // namespace shardlib::io::detail
