// Text to token ids and back: bytes, or GPT-2's byte-pair encoding (io/bpe.hpp). docs/tokenizer.md has the rules.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/support/inline.hpp"

namespace shardlib::io {

/// How a tokenizer spells its end of text, and what separates the documents of a text file.
inline constexpr std::string_view end_of_text_mark = "<|endoftext|>";

/// What `end_of_text_mark` within a text is: `as_text` makes it ordinary characters (a user's text must not end a
/// document), `allowed` the one special id.
enum class Special { as_text, allowed };

/// A tokenizer does not change after its construction: any number of threads may use one.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  /// "bytes", "gpt2", or for other vocabularies "bpe-" and the first 12 digits of `fingerprint`.
  [[nodiscard]] const std::string& name() const { return name_; }
  /// What a data set or checkpoint remembers its tokenizer by: equal where the encodings are equal.
  [[nodiscard]] const std::string& fingerprint() const { return fingerprint_; }
  /// Ids are below it.
  [[nodiscard]] std::uint32_t vocabulary_size() const { return vocabulary_size_; }
  [[nodiscard]] std::uint32_t end_of_text() const { return end_of_text_; }  ///< the id that ends a document

  /// Appends the ids of `text`, which may be any bytes, to `ids`.
  void encode(std::string_view text, std::vector<std::uint32_t>& ids, Special special = Special::as_text) const;
  [[nodiscard]] std::vector<std::uint32_t> encode(std::string_view text, Special special = Special::as_text) const;
  /// The bytes that the ids stand for: `decode(encode(text)) == text` for any bytes. Throws UsageError for an id that
  /// is not in the vocabulary.
  [[nodiscard]] std::string decode(std::span<const std::uint32_t> ids) const;

 protected:
  Tokenizer(std::string name, std::string fingerprint, std::uint32_t vocabulary_size, std::uint32_t end_of_text);

 private:
  virtual void append_ids(std::string_view text, std::vector<std::uint32_t>& ids) const = 0;
  virtual void append_text(std::uint32_t id, std::string& text) const = 0;

  std::string name_, fingerprint_;
  std::uint32_t vocabulary_size_, end_of_text_;
};

/// Ids are bytes. The end of text is the byte 0, which does not occur in text, so that the vocabulary stays at 256; a
/// batch has the input 0 where a document starts anyway.
class ByteTokenizer final : public Tokenizer {
 public:
  ByteTokenizer() : Tokenizer("bytes", "bytes", 256, 0) {}

 private:
  void append_ids(std::string_view text, std::vector<std::uint32_t>& ids) const override;
  void append_text(std::uint32_t id, std::string& text) const override { text += static_cast<char>(id); }
};

/// The tokenizer of this name or path: "bytes"; a `.tiktoken` file with GPT-2's splitting rule (r50k_base); or a folder
/// with `vocab.bpe` and `encoder.json`, or the same under Hugging Face's names `merges.txt` and `vocab.json`. Throws
/// UsageError where there is nothing of the kind, Error where a file is damaged.
[[nodiscard]] std::shared_ptr<const Tokenizer> load_tokenizer(const std::string& name_or_path);

}  // namespace shardlib::io

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/tokenizer/bpe.hpp"
#include "shardlib/io/tokenizer/impl/tokenizer.hpp"
#endif
