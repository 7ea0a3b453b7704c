// The tokenizer of a tokenizer.json, for impl/ headers. impl/tokenizer_json.hpp reads the file.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/io/tokenizer/bpe_model.hpp"
#include "shardlib/io/tokenizer/impl/added_tokens.hpp"
#include "shardlib/io/tokenizer/impl/cuts.hpp"
#include "shardlib/io/tokenizer/impl/normalize.hpp"
#include "shardlib/io/tokenizer/tokenizer.hpp"

namespace shardlib::io::detail {

/// One step from a token's spelling to its text.
struct Spelling {
  enum Kind : std::uint8_t {
    replace,     ///< `from` is `to`
    bytes,       ///< <0x0A> is the byte
    spaces,      ///< `from` is a space, and nothing in the first token
    strip_first  ///< a text's first space is left out
  } kind;
  std::string from = {}, to = {};
};

/// The settings of a tokenizer.json.
struct TokenizerParts {
  std::vector<std::string> tokens;  ///< their bytes or, without `byte_level`, spellings, by id
  std::vector<bool> findable;       ///< whether a piece may be made of the token
  std::vector<BpeModel::Pair> pairs;
  std::array<std::uint32_t, 256> byte_ids{};
  bool byte_level = false;     ///< parts of a piece are bytes; otherwise characters, and bytes of those without a token
  bool ignore_merges = false;  ///< a piece that is a token becomes it, whatever its parts would be joined to
  AddedTokens added, added_normalized;  ///< found in the text, and in what `rewrites` makes of it
  std::vector<Rewrite> rewrites;
  std::vector<Cut> cuts;
  std::vector<Spelling> spellings;
  std::map<std::uint32_t, std::string> rewritten_tokens;  ///< how added tokens are spelled that `rewrites` changes
  std::string overrides;                                  ///< the added tokens that the tokenizer_config.json changes
  std::uint32_t end_of_text = 0;
};

/// The byte of "<0x0A>"; -1 where the text is another.
inline int spelled_byte(std::string_view text) {
  if (text.size() != 6 || !text.starts_with("<0x") || text[5] != '>') return -1;
  int byte = 0;
  for (const char c : text.substr(3, 2)) {
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
    if (digit < 0) return -1;
    byte = 16 * byte + digit;
  }
  return byte;
}

class JsonTokenizer final : public Tokenizer {
 public:
  JsonTokenizer(TokenizerParts parts, const std::string& digest)
      : Tokenizer("bpe-" + digest.substr(0, 12), digest, static_cast<std::uint32_t>(parts.tokens.size()),
                  parts.end_of_text),
        parts_(std::move(parts)) {
    model_.reserve(parts_.tokens.size());
    for (std::size_t id = 0; id < parts_.tokens.size(); ++id) model_.add(parts_.tokens[id], parts_.findable[id]);
    model_.set_pairs(parts_.pairs);
    for (std::size_t c = 0; c < first_ids_.size(); ++c) {
      const char character = static_cast<char>(c);
      const std::uint32_t id = parts_.byte_level || c >= 128 ? no_token : model_.find({&character, 1});
      first_ids_[c] = id != no_token ? id : parts_.byte_ids[c];
    }
    direct_.assign(parts_.tokens.size(), parts_.ignore_merges ? 1 : 0);
    if (!parts_.ignore_merges) find_direct();
    parts_.tokens = {};
    parts_.pairs = {};
  }

  [[nodiscard]] std::vector<SpecialToken> special_tokens(std::string_view text) const override {
    return parts_.added.special(text);
  }

 private:
  void append_ids(std::string_view text, std::vector<std::uint32_t>& ids) const override {
    append(text, 0, text.size(), ids);
  }
  void append_special_ids(std::string_view text, std::size_t plain_begin, std::size_t plain_end,
                          std::vector<std::uint32_t>& ids) const override {
    append(text, plain_begin, plain_end, ids);
  }
  void append_text(std::uint32_t id, std::string& text) const override { text += spelled(id, false); }
  void append_first_text(std::uint32_t id, std::string& text) const override { text += spelled(id, true); }

  /// Finds the tokens whose own bytes join to them. A piece that equals such a token needs no joining.
  void find_direct() {
    BpeModel::Joining scratch;
    std::vector<std::uint32_t> ids;
    for (std::uint32_t id = 0; id < model_.size(); ++id) {
      if (!parts_.findable[id]) continue;
      ids.clear();
      append_joined(model_.token(id), scratch, ids);
      direct_[id] = ids.size() == 1 && ids[0] == id ? 1 : 0;
    }
  }

  void append_joined(std::string_view piece, BpeModel::Joining& scratch, std::vector<std::uint32_t>& ids) const {
    scratch.start(piece.size());
    for (std::size_t at = 0; at < piece.size();) {
      const auto byte = static_cast<unsigned char>(piece[at]);
      if (parts_.byte_level || byte < 128) {
        scratch.add(first_ids_[byte]);
        ++at;
        continue;
      }
      const std::size_t size = character(piece.data() + at, piece.data() + piece.size()).size;
      const std::string_view bytes = piece.substr(at, size);
      // A byte outside of valid UTF-8 is not a character, so it has no token of one.
      const std::uint32_t id = size > 1 ? model_.find(bytes) : no_token;
      if (id != no_token)
        scratch.add(id);
      else
        for (const char c : bytes) scratch.add(parts_.byte_ids[static_cast<unsigned char>(c)]);
      at += size;
    }
    model_.append_joined(scratch, ids);
  }

  void append(std::string_view text, std::size_t plain_begin, std::size_t plain_end,
              std::vector<std::uint32_t>& ids) const {
    BpeModel::Joining scratch;
    const auto append_piece = [&](std::string_view piece) {
      const std::uint32_t id = piece.size() <= model_.longest() ? model_.find(piece) : no_token;
      if (id != no_token && direct_[id] != 0)
        ids.push_back(id);
      else
        append_joined(piece, scratch, ids);
    };
    parts_.added.split(text, plain_begin, plain_end, [&](std::string_view between, std::uint32_t added) {
      if (added != no_token) return ids.push_back(added);
      const bool first = between.data() == text.data();
      // Where bytes are in a rewritten text is not known: a part of it that is plain makes all of it plain.
      const auto begin = static_cast<std::size_t>(between.data() - text.data());
      const bool plain = begin < plain_end && begin + between.size() > plain_begin;
      std::string normal;
      if (!parts_.rewrites.empty()) between = normal = rewritten(between, parts_.rewrites);
      parts_.added_normalized.split(
          between, 0, plain ? between.size() : 0, [&](std::string_view inner, std::uint32_t token) {
            if (token != no_token) return ids.push_back(token);
            for_each_piece(parts_.cuts, inner, first && inner.data() == between.data(), append_piece);
          });
    });
  }

  [[nodiscard]] std::string spelled(std::uint32_t id, bool first) const {
    const auto changed = parts_.rewritten_tokens.find(id);
    std::string text(changed != parts_.rewritten_tokens.end() ? changed->second : model_.token(id));
    for (const Spelling& step : parts_.spellings) {
      if (step.kind == Spelling::replace) text = replaced(text, step.from, step.to);
      if (step.kind == Spelling::spaces) text = replaced(text, step.from, first ? "" : " ");
      if (step.kind == Spelling::strip_first && first && text.starts_with(' ')) text.erase(0, 1);
      if (const int byte = step.kind == Spelling::bytes ? spelled_byte(text) : -1; byte >= 0)
        text.assign(1, static_cast<char>(byte));
    }
    return text;
  }

  TokenizerParts parts_;
  BpeModel model_;
  std::array<std::uint32_t, 256> first_ids_{};  // of bytes, or of the characters below 128
  std::vector<std::uint8_t> direct_;            // by id
};

}  // namespace shardlib::io::detail
