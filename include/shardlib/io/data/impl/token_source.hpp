// Definitions of token_source.hpp.
#pragma once

#include "shardlib/io/data/token_source.hpp"

#include <algorithm>
#include <array>
#include <cstddef>

#include "shardlib/support/error.hpp"

namespace shardlib::io {

SHARDLIB_INLINE void TokenSource::hold(std::string name, std::int64_t tokens, std::optional<std::uint32_t> max_token_id,
                                       std::string_view remedy) {
  if (tokens < 1) throw UsageError("'" + name + "' has no tokens: " + std::string(remedy));
  name_ = std::move(name);
  tokens_ = tokens;
  max_token_id_ = max_token_id;
}

SHARDLIB_INLINE void TokenSource::read(std::int64_t first, std::span<EncodedToken> out) const {
  const auto count = static_cast<std::int64_t>(out.size());
  if (first < 0 || count > tokens_ || first > tokens_ - count)
    throw Error("tokens " + std::to_string(first) + " to " + std::to_string(first + count) + " of '" + name_ +
                "' are asked for, but it has " + std::to_string(tokens_));
  if (out.empty()) return;
  read_tokens(first, out);
  if (!max_token_id_) return;
  EncodedToken largest = 0;
  for (const EncodedToken token : out) largest = std::max(largest, token);
  if (largest >> 1 <= *max_token_id_) return;
  const auto bad = std::find_if(out.begin(), out.end(), [&](EncodedToken t) { return t >> 1 > *max_token_id_; });
  throw Error("token " + std::to_string(first + (bad - out.begin())) + " of '" + name_ + "' has the id " +
              std::to_string(*bad >> 1) + ", but max_token_id is " + std::to_string(*max_token_id_) +
              ": the data are damaged; make them again");
}

SHARDLIB_INLINE TokenRange TokenSource::document(std::int64_t index) const {
  if (index < 0 || index >= documents())
    throw Error("document " + std::to_string(index) + " of '" + name_ + "' is asked for, but it has " +
                std::to_string(documents()));
  return find_document(index);
}

SHARDLIB_INLINE std::uint64_t TokenSource::identity() const {
  constexpr std::int64_t samples = 64, sample = 256;
  std::vector<EncodedToken> tokens(static_cast<std::size_t>(std::min(sample, tokens_)));
  std::uint64_t hash = detail::hash_in(0, static_cast<std::uint64_t>(tokens_));
  const std::int64_t last = tokens_ - static_cast<std::int64_t>(tokens.size());
  for (std::int64_t i = 0; i < samples; ++i) {
    read(last / (samples - 1) * i + last % (samples - 1) * i / (samples - 1), tokens);
    for (const EncodedToken token : tokens) hash = detail::hash_in(hash, token);
  }
  return hash;
}

SHARDLIB_INLINE MemoryTokens::MemoryTokens(std::string name, const std::vector<std::vector<std::uint32_t>>& documents) {
  std::size_t tokens = 0;
  for (const auto& document : documents) tokens += document.size();
  tokens_.reserve(tokens);
  std::uint32_t largest = 0;
  for (const auto& document : documents) {
    if (document.empty()) continue;
    starts_.push_back(std::ssize(tokens_));
    for (const std::uint32_t id : document) {
      if (id >> 31 != 0)
        throw UsageError("token " + std::to_string(tokens_.size()) + " of '" + name + "' has the id " +
                         std::to_string(id) + ": ids must be below 2^31; check the tokenizer");
      largest = std::max(largest, id);
      tokens_.push_back(id << 1);
    }
    tokens_[static_cast<std::size_t>(starts_.back())] |= 1U;
  }
  hold(std::move(name), std::ssize(tokens_), largest);
}

SHARDLIB_INLINE void MemoryTokens::read_tokens(std::int64_t first, std::span<EncodedToken> out) const {
  std::copy_n(tokens_.begin() + first, out.size(), out.begin());
}

SHARDLIB_INLINE std::int64_t MemoryTokens::count_documents() const {
  return std::ssize(starts_);
}

SHARDLIB_INLINE TokenRange MemoryTokens::find_document(std::int64_t index) const {
  const auto i = static_cast<std::size_t>(index);
  return {starts_[i], i + 1 < starts_.size() ? starts_[i + 1] : tokens()};
}

SHARDLIB_INLINE void for_each_document(std::string_view text, const std::function<void(std::string_view)>& f) {
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(end_of_text_mark, begin), text.size());
    const std::string_view document = text.substr(begin, end - begin);
    if (document.find_first_not_of(" \t\n\v\f\r") != std::string_view::npos) f(document);
    begin = end + end_of_text_mark.size();
  }
}

namespace detail {
SHARDLIB_INLINE void refuse_json_lines(const std::string& path) {
  if (path.ends_with(".jsonl") || path.ends_with(".jsonl.gz") || path.ends_with(".jsonl.zst"))
    throw UsageError("'" + path + "' holds JSON lines by its name, and training would read their keys and escapes as " +
                     "text: `tokenize --field text` makes a data set of them");
}

SHARDLIB_INLINE std::string_view compression(const InputFile& file) {
  std::array<char, 4> head{};
  file.read(0, std::as_writable_bytes(std::span(head).first(std::min<std::size_t>(head.size(), file.size()))));
  const std::string_view begin(head.data(), head.size());
  if (begin.starts_with("\x1f\x8b")) return "gzip";
  // A frame of zstd, or one to be skipped, with which parallel compressors begin.
  const bool skipped = (head[0] & 0xf0) == 0x50 && begin.substr(1) == "\x2a\x4d\x18";
  return skipped || begin == "\x28\xb5\x2f\xfd" ? "zstd" : std::string_view();
}

SHARDLIB_INLINE void refuse_compressed(const InputFile& file) {
  if (const std::string_view by = compression(file); !by.empty())
    throw UsageError("'" + file.path() + "' is compressed by " + std::string(by) +
                     ", which training does not read: `tokenize` makes a data set of it");
}
}  // namespace detail

SHARDLIB_INLINE std::shared_ptr<const TokenSource> read_text_tokens(const std::string& path,
                                                                    const TextOptions& options) {
  const Bytes bytes = read_file(path);
  std::vector<std::vector<std::uint32_t>> documents;
  for_each_document(as_text(bytes), [&](std::string_view document) {
    documents.push_back(options.tokenizer->encode(document));
    if (options.end_of_text) documents.back().push_back(options.tokenizer->end_of_text());
  });
  return std::make_shared<MemoryTokens>(path, documents);
}

}  // namespace shardlib::io
