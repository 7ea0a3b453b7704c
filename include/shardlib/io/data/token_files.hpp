// Token files of other programs: llm.c's and nanoGPT's `.bin`; and a function that opens a path of any format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/io/data/flat_tokens.hpp"
#include "shardlib/io/data/token_source.hpp"
#include "shardlib/io/file.hpp"
#include "shardlib/io/tokenizer/tokenizer.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::io {

namespace detail {
class BinChecksums;
class BinChecksumWriter;
}  // namespace detail

/// GPT-2's end of text, which separates the documents of `.bin` files.
inline constexpr std::uint32_t gpt2_end_of_text = 50256;

/// Token ids of type uint16 in one or more files, read as one. The files have llm.c's header (256 int32: 20240520, 1,
/// the number of ids; a document begins with the end of text), or are bare as nanoGPT writes them (a document ends with
/// it). If a file has checksums (BinWriter), each of its chunks is compared with them when it is first read.
class BinTokens final : public TokenSource {
 public:
  /// Throws UsageError where there are no files or some have a header and others have none, Error where a size does not
  /// fit.
  explicit BinTokens(const std::vector<std::string>& paths, std::uint32_t end_of_text = gpt2_end_of_text);

 private:
  struct Shard {
    InputFile file;
    std::int64_t first, end;                          ///< its tokens among all
    std::uint64_t offset;                             ///< of the first id in the file
    std::shared_ptr<detail::BinChecksums> checksums;  ///< null: it has none
  };
  void read_ids(std::int64_t first, std::span<std::uint16_t> out) const;
  void read_tokens(std::int64_t first, std::span<EncodedToken> out) const override;
  [[nodiscard]] std::int64_t count_documents() const override;
  [[nodiscard]] TokenRange find_document(std::int64_t index) const override;
  [[nodiscard]] std::int64_t find_start(std::int64_t index) const;

  std::vector<Shard> shards_;
  std::uint32_t end_of_text_;
  mutable std::mutex mutex_;
  mutable std::vector<std::int64_t> starts_before_;  // each block of tokens; found at first need
};

/// Writes one llm.c `.bin`, and the checksums of its chunks to `path`.crc32c. Everything goes to `path`.partial, which
/// `finish` renames to `path`.
class BinWriter {
 public:
  /// Throws UsageError where `path` exists.
  explicit BinWriter(std::string path, std::uint32_t end_of_text = gpt2_end_of_text);
  BinWriter(const BinWriter&) = delete;
  BinWriter& operator=(const BinWriter&) = delete;
  /// Removes what was not finished.
  ~BinWriter();

  /// Adds the end of text and the document's tokens; one without tokens is left out. Throws UsageError for an id of
  /// 2^16 or more.
  void add(std::span<const std::uint32_t> ids);
  [[nodiscard]] std::int64_t tokens() const { return tokens_; }  ///< written so far
  void finish();

 private:
  void flush();

  std::string path_;
  std::uint16_t end_of_text_;
  int file_ = -1;
  std::int64_t tokens_ = 0;
  std::vector<std::uint16_t> pending_;
  std::unique_ptr<detail::BinChecksumWriter> checksums_;
};

/// The file next to `.bin` files that names the tokenizer that made them, as the attributes of flat-tokens do.
inline constexpr std::string_view tokens_note = "tokens.json";

/// The tokenizer that made a data set, its `name` and `fingerprint`; and the id that is the `end_of_text` of each
/// document, where the data set says it.
struct TokensMaker {
  std::string name, fingerprint;
  std::optional<std::uint32_t> end_of_text = {};
};

/// Writes `tokens_note` into a folder of `.bin` files. `write_tokens_note("data/bins", *tokenizer)`
void write_tokens_note(const std::string& folder, const Tokenizer& tokenizer);
/// The tokenizer that made the data set at a path for `open_tokens`; nothing if the data set does not name it.
/// `made_by("books.zarr")`
[[nodiscard]] std::optional<TokensMaker> made_by(const std::string& path);

/// Whether a folder has a validation split beside the training data: a flat-tokens data set, or *val*.bin files.
/// `has_validation("books.zarr")`
[[nodiscard]] bool has_validation(const std::string& path);

/// Opens what `path` is, by its contents: a flat-tokens data set or one split of it, an llm.c or nanoGPT `.bin`, a
/// folder of them (train*.bin, *_val_*.bin), a glob ("data/*_train_*.bin"), or a text file. A single file, a glob and a
/// text have no splits: they are the training data. Throws UsageError where there is nothing of the kind.
/// `open_tokens("books.zarr", Split::validation)`
[[nodiscard]] std::shared_ptr<const TokenSource> open_tokens(const std::string& path, Split split = Split::train,
                                                             const TextOptions& text = {});

}  // namespace shardlib::io

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/data/impl/token_files.hpp"
#endif
