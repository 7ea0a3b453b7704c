// A source of tokens in any format: one long row of token ids with the beginnings of documents.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/io/data/token_batch.hpp"
#include "shardlib/io/file.hpp"
#include "shardlib/io/tokenizer/tokenizer.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::io {

/// Tokens [begin, end) of a source.
struct TokenRange {
  std::int64_t begin = 0, end = 0;
};

/// The remedy in errors about data without tokens.
inline constexpr std::string_view other_data = "choose another --data";
/// The remedy in errors about a validation split without tokens.
inline constexpr std::string_view other_validation =
    "tokenize the texts again with a larger --validation-fraction, give --validation-data, or leave out "
    "--validate-every";

/// The tokens of all documents, one after another. Const members are thread-safe.
class TokenSource {
 public:
  virtual ~TokenSource() = default;
  TokenSource(const TokenSource&) = delete;
  TokenSource& operator=(const TokenSource&) = delete;

  /// The name in messages: a path.
  [[nodiscard]] const std::string& name() const { return name_; }
  /// The number of tokens, at least 1.
  [[nodiscard]] std::int64_t tokens() const { return tokens_; }
  /// A bound on all ids, where the format states one; `read` checks it.
  [[nodiscard]] std::optional<std::uint32_t> max_token_id() const { return max_token_id_; }

  /// Tokens [first, first + out.size()). Throws Error outside of the source and for damaged data.
  void read(std::int64_t first, std::span<EncodedToken> out) const;

  /// The number of documents that have tokens; `document` is the place of one of them. The first call may look through
  /// the source.
  [[nodiscard]] std::int64_t documents() const { return count_documents(); }
  [[nodiscard]] TokenRange document(std::int64_t index) const;

  /// A hash of the tokens, the same in every format: of their number and 64 evenly spread samples of up to 256 tokens.
  [[nodiscard]] std::uint64_t identity() const;

 protected:
  TokenSource() = default;
  /// Every constructor ends with this. Throws UsageError for a source without tokens; `remedy` is what helps then.
  void hold(std::string name, std::int64_t tokens, std::optional<std::uint32_t> max_token_id,
            std::string_view remedy = other_data);

 private:
  virtual void read_tokens(std::int64_t first, std::span<EncodedToken> out) const = 0;
  [[nodiscard]] virtual std::int64_t count_documents() const = 0;
  [[nodiscard]] virtual TokenRange find_document(std::int64_t index) const = 0;

  std::string name_;
  std::int64_t tokens_ = 0;
  std::optional<std::uint32_t> max_token_id_;
};

/// Tokens in memory, 4 bytes each.
class MemoryTokens final : public TokenSource {
 public:
  /// Throws UsageError where no document has a token or an id is 2^31 or more. Empty documents vanish.
  MemoryTokens(std::string name, const std::vector<std::vector<std::uint32_t>>& documents);

 private:
  void read_tokens(std::int64_t first, std::span<EncodedToken> out) const override;
  [[nodiscard]] std::int64_t count_documents() const override;
  [[nodiscard]] TokenRange find_document(std::int64_t index) const override;

  std::vector<EncodedToken> tokens_;
  std::vector<std::int64_t> starts_;
};

/// The options by which texts become tokens.
struct TextOptions {
  std::shared_ptr<const Tokenizer> tokenizer = std::make_shared<ByteTokenizer>();
  bool end_of_text = false;  ///< whether the tokenizer's end of text ends each document
};

/// Calls `f` for each document of a text; they are separated by "<|endoftext|>". Documents of nothing but white space
/// are dropped. `for_each_document(text, [&](std::string_view document) { ... })`
void for_each_document(std::string_view text, const std::function<void(std::string_view document)>& f);

/// A text file as tokens in memory. Throws UsageError for an unreadable or blank file. `read_text_tokens("bible.txt",
/// {tokenizer})`
[[nodiscard]] std::shared_ptr<const TokenSource> read_text_tokens(const std::string& path,
                                                                  const TextOptions& options = {});

namespace detail {
/// The finalizer of splitmix64 (Steele et al. 2014), a bijection that spreads every bit.
[[nodiscard]] constexpr std::uint64_t mix_bits(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}
[[nodiscard]] constexpr std::uint64_t hash_in(std::uint64_t hash, std::uint64_t value) {
  return mix_bits((hash ^ value) + 0x9e3779b97f4a7c15U);
}
/// Throws UsageError for the name of a file of JSON lines, whose keys and escapes are no text to train on.
void refuse_json_lines(const std::string& path);
/// The compression of a file, by its first bytes: "gzip", "zstd", or empty if there is none.
[[nodiscard]] std::string_view compression(const InputFile& file);
/// Throws UsageError for a compressed file, which is no text to train on either.
void refuse_compressed(const InputFile& file);
}  // namespace detail

}  // namespace shardlib::io

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/data/impl/token_source.hpp"
#endif
