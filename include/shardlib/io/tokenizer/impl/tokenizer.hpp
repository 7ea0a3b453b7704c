// Definitions of tokenizer.hpp.
#pragma once

#include "shardlib/io/tokenizer/tokenizer.hpp"

#include <algorithm>
#include <utility>

#include "shardlib/support/error.hpp"

namespace shardlib::io {

SHARDLIB_INLINE Tokenizer::Tokenizer(std::string name, std::string fingerprint, std::uint32_t vocabulary_size,
                                     std::uint32_t end_of_text)
    : name_(std::move(name)),
      fingerprint_(std::move(fingerprint)),
      vocabulary_size_(vocabulary_size),
      end_of_text_(end_of_text) {}

SHARDLIB_INLINE void Tokenizer::encode(std::string_view text, std::vector<std::uint32_t>& ids, Special special) const {
  if (special == Special::as_text)
    append_ids(text, ids);
  else
    append_special_ids(text, 0, 0, ids);
}

SHARDLIB_INLINE std::vector<SpecialToken> Tokenizer::special_tokens(std::string_view text) const {
  std::vector<SpecialToken> found;
  for (std::size_t at = text.find(end_of_text_mark); at != std::string_view::npos;
       at = text.find(end_of_text_mark, found.back().end))
    found.push_back({at, at + end_of_text_mark.size(), end_of_text_});
  return found;
}

SHARDLIB_INLINE void Tokenizer::append_special_ids(std::string_view text, std::size_t plain_begin,
                                                   std::size_t plain_end, std::vector<std::uint32_t>& ids) const {
  std::size_t begin = 0;
  for (const SpecialToken& token : special_tokens(text)) {
    if (token.begin < plain_end && token.end > plain_begin) continue;
    append_ids(text.substr(begin, token.begin - begin), ids);
    ids.push_back(token.id);
    begin = token.end;
  }
  append_ids(text.substr(begin), ids);
}

SHARDLIB_INLINE std::vector<std::uint32_t> Tokenizer::encode_within(std::string_view before, std::string_view text,
                                                                    std::string_view after) const {
  std::vector<std::uint32_t> ids;
  std::string all(before);
  all.append(text).append(after);
  append_special_ids(all, before.size(), before.size() + text.size(), ids);
  return ids;
}

SHARDLIB_INLINE std::vector<std::uint32_t> Tokenizer::encode(std::string_view text, Special special) const {
  std::vector<std::uint32_t> ids;
  encode(text, ids, special);
  return ids;
}

SHARDLIB_INLINE void Tokenizer::require_id(std::uint32_t id) const {
  if (id >= vocabulary_size_)
    throw UsageError("the token id " + std::to_string(id) + " is not in the vocabulary of '" + name_ + "', which has " +
                     std::to_string(vocabulary_size_) + " ids: was the text encoded with another tokenizer?");
}

SHARDLIB_INLINE std::string Tokenizer::decode(std::span<const std::uint32_t> ids) const {
  std::string text;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    require_id(ids[i]);
    if (i == 0)
      append_first_text(ids[i], text);
    else
      append_text(ids[i], text);
  }
  return text;
}

SHARDLIB_INLINE void Tokenizer::append_decoded(std::uint32_t id, std::string& text) const {
  require_id(id);
  append_text(id, text);
}

SHARDLIB_INLINE void ByteTokenizer::append_ids(std::string_view text, std::vector<std::uint32_t>& ids) const {
  ids.reserve(std::max(ids.size() + text.size(), std::min(ids.capacity() * 2, ids.size() + 2 * text.size())));
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
}

}  // namespace shardlib::io
