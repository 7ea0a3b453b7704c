// GPT-2's byte-pair encoding (Radford et al. 2019), exact: docs/tokenizer.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/io/tokenizer/bpe_model.hpp"
#include "shardlib/io/tokenizer/impl/pieces.hpp"
#include "shardlib/io/tokenizer/impl/vocabulary.hpp"
#include "shardlib/io/tokenizer/tokenizer.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::io {

/// The tokens of a `.tiktoken` file, in the order of their ids: "base64 rank" lines whose ranks count up from 0.
/// Throws Error, naming the line, where the file is damaged.
[[nodiscard]] std::vector<std::string> read_tiktoken(const std::string& path);
/// The tokens in the order of their ids from GPT-2's own files, which must agree: one has the pairs in the order of
/// their ranks, the other the ids of all tokens. `read_merges("vocab.bpe", "encoder.json")`
[[nodiscard]] std::vector<std::string> read_merges(const std::string& merges_path, const std::string& ids_path);

/// Byte-pair encoding with GPT-2's pieces. The id of a token is also its rank: of all pairs that could be joined, the
/// one whose joined token has the lowest id is, the leftmost first.
class BpeTokenizer final : public Tokenizer {
 public:
  /// `tokens[id]` are the bytes of a token; the end of text gets the id after the last. Throws Error, naming `source`,
  /// where a token is repeated, one of the 256 bytes is missing, or no two tokens join to a longer one; UsageError
  /// where a token lies in no piece, because the model has other pieces.
  explicit BpeTokenizer(const std::vector<std::string>& tokens, const std::string& source = "the vocabulary");

 private:
  BpeTokenizer(const std::vector<std::string>& tokens, const std::string& source, const std::string& digest);
  void append_ids(std::string_view text, std::vector<std::uint32_t>& ids) const override;
  void append_text(std::uint32_t id, std::string& text) const override;
  void add_tokens(const std::vector<std::string>& tokens, const std::string& source);
  void add_pairs(const std::string& source);

  detail::BpeModel model_;
  std::array<std::uint32_t, 256> byte_ids_{};
};

inline BpeTokenizer::BpeTokenizer(const std::vector<std::string>& tokens, const std::string& source)
    : BpeTokenizer(tokens, source, detail::vocabulary_digest(tokens)) {}

inline BpeTokenizer::BpeTokenizer(const std::vector<std::string>& tokens, const std::string& source,
                                  const std::string& digest)
    : Tokenizer(detail::vocabulary_name(digest), digest, static_cast<std::uint32_t>(tokens.size()) + 1,
                static_cast<std::uint32_t>(tokens.size())) {
  add_tokens(tokens, source);
  add_pairs(source);
}

inline void BpeTokenizer::add_tokens(const std::vector<std::string>& tokens, const std::string& source) {
  model_.reserve(tokens.size());
  for (const std::string& bytes : tokens) {
    const auto fail = [&](const std::string& why) {
      throw Error(source + ": token " + std::to_string(model_.size()) + why);
    };
    if (bytes.empty()) fail(" is empty");
    if (const std::uint32_t twin = model_.find(bytes); twin != detail::no_token)
      fail(" has the same bytes as token " + std::to_string(twin));
    // A part of a character is in the piece of the whole one.
    if (const char* const end = bytes.data() + bytes.size();
        detail::piece_end(bytes.data(), end) != end && shardlib::detail::as_utf8(bytes) == bytes)
      throw UsageError(source + ": token " + std::to_string(model_.size()) + ", \"" + shardlib::detail::excerpt(bytes) +
                       "\", is one that GPT-2's rule cuts, so this is the vocabulary of a model that splits texts " +
                       "differently (cl100k_base, Qwen): give that model's tokenizer.json");
    model_.add(bytes);
  }
  for (std::size_t byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    byte_ids_[byte] = model_.find({&c, 1});
    if (byte_ids_[byte] == detail::no_token)
      throw Error(source + " has no token for the byte " + std::to_string(byte) + ", so not every text can be encoded");
  }
}

inline void BpeTokenizer::add_pairs(const std::string& source) {
  std::vector<detail::BpeModel::Pair> pairs;
  for (std::uint32_t id = 0; id < model_.size(); ++id) {
    const std::string_view bytes = model_.token(id);
    const std::size_t before = pairs.size();
    for (std::size_t cut = 1; cut < bytes.size(); ++cut) {
      const std::uint32_t left = model_.find(bytes.substr(0, cut)), right = model_.find(bytes.substr(cut));
      if (left != detail::no_token && right != detail::no_token) pairs.push_back({left, right, id, id});
    }
    if (bytes.size() > 1 && pairs.size() == before)
      throw Error(source + ": token " + std::to_string(id) + " cannot be joined from two other tokens");
  }
  model_.set_pairs(pairs);
}

inline void BpeTokenizer::append_ids(std::string_view text, std::vector<std::uint32_t>& ids) const {
  detail::BpeModel::Joining scratch;
  const char *p = text.data(), *const end = p + text.size();
  while (p < end) {
    const char* const next = detail::piece_end(p, end);
    const std::string_view piece(p, static_cast<std::size_t>(next - p));
    const std::uint32_t id = piece.size() <= model_.longest() ? model_.find(piece) : detail::no_token;
    if (id != detail::no_token) {
      ids.push_back(id);
    } else {
      scratch.start(piece.size());
      for (const char c : piece) scratch.add(byte_ids_[static_cast<unsigned char>(c)]);
      model_.append_joined(scratch, ids);
    }
    p = next;
  }
}

inline void BpeTokenizer::append_text(std::uint32_t id, std::string& text) const {
  text += id == end_of_text() ? end_of_text_mark : model_.token(id);
}

}  // namespace shardlib::io

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/tokenizer/impl/bpe_files.hpp"
#include "shardlib/io/tokenizer/impl/tokenizer_json.hpp"
#endif
