// GPT-2's byte-pair encoding (Radford et al. 2019), exact: docs/tokenizer.md.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/io/tokenizer/bpe_model.hpp"
#include "shardlib/io/tokenizer/tokenizer.hpp"
#include "shardlib/support/inline.hpp"

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
  /// where a token is repeated, one of the 256 bytes is missing, or no two tokens join to a longer one; UsageError where
  /// a token lies in no piece, because the model has other pieces.
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

}  // namespace shardlib::io

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/tokenizer/impl/bpe.hpp"
#include "shardlib/io/tokenizer/impl/bpe_files.hpp"
#include "shardlib/io/tokenizer/impl/tokenizer_json.hpp"
#endif
