// Encodes texts as token ids and decodes them: by bytes, GPT-2's byte-pair encoding (bpe.hpp), or a tokenizer.json of
// Hugging Face. docs/tokenizer.md has the rules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/support/inline.hpp"

namespace shardlib::io {

/// The text of the end of text in tokenizers, which also separates the documents of a text file.
inline constexpr std::string_view end_of_text_mark = "<|endoftext|>";

/// The treatment of a special token's spelling in a text, such as `end_of_text_mark`: `as_text` encodes its
/// characters (a user's text must not end a document), `allowed` encodes it as the token.
enum class Special { as_text, allowed };

/// A special token, its `id`, that is spelled in a text at the bytes [begin, end).
struct SpecialToken {
  std::size_t begin = 0, end = 0;
  std::uint32_t id = 0;
};

/// A tokenizer does not change after its construction: any number of threads may use one.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  /// "bytes", "gpt2", or for other vocabularies "bpe-" and the first 12 digits of `fingerprint`.
  [[nodiscard]] const std::string& name() const { return name_; }
  /// Identifies the tokenizer in a data set or checkpoint. It is equal if the encodings are equal.
  [[nodiscard]] const std::string& fingerprint() const { return fingerprint_; }
  /// All ids are below this number.
  [[nodiscard]] std::uint32_t vocabulary_size() const { return vocabulary_size_; }
  [[nodiscard]] std::uint32_t end_of_text() const { return end_of_text_; }  ///< the id that ends a document

  /// Appends the ids of `text`, which may be any bytes, to `ids`.
  void encode(std::string_view text, std::vector<std::uint32_t>& ids, Special special = Special::as_text) const;
  [[nodiscard]] std::vector<std::uint32_t> encode(std::string_view text, Special special = Special::as_text) const;
  /// The ids of a user's text within a template: those of before + text + after, where the special tokens of the
  /// template count and those that the text spells do not. `tokenizer->encode_within("<|user|>", line, "<|end|>")`
  [[nodiscard]] std::vector<std::uint32_t> encode_within(std::string_view before, std::string_view text,
                                                         std::string_view after) const;
  /// The special tokens that `Special::allowed` finds in the text, in order, except those that a normalizer spells.
  [[nodiscard]] virtual std::vector<SpecialToken> special_tokens(std::string_view text) const;
  /// Returns the bytes of the ids: `decode(encode(text)) == text` for any bytes, unless a tokenizer.json changes texts.
  /// Throws UsageError for an id that is not in the vocabulary.
  [[nodiscard]] std::string decode(std::span<const std::uint32_t> ids) const;
  /// Appends the bytes of an id within a text. Some encodings put a space before the first token only.
  void append_decoded(std::uint32_t id, std::string& text) const;

 protected:
  Tokenizer(std::string name, std::string fingerprint, std::uint32_t vocabulary_size, std::uint32_t end_of_text);

 private:
  virtual void append_ids(std::string_view text, std::vector<std::uint32_t>& ids) const = 0;
  /// Special tokens count, except those with bytes of [plain_begin, plain_end).
  virtual void append_special_ids(std::string_view text, std::size_t plain_begin, std::size_t plain_end,
                                  std::vector<std::uint32_t>& ids) const;
  virtual void append_text(std::uint32_t id, std::string& text) const = 0;
  virtual void append_first_text(std::uint32_t id, std::string& text) const { append_text(id, text); }
  void require_id(std::uint32_t id) const;

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

/// The tokenizer of a tokenizer.json. Its ids are those of transformers' `encode(text, add_special_tokens=False)`;
/// `Special::as_text` is `split_special_tokens=True`. The end of text is the `eos_token` of the tokenizer_config.json
/// in the same folder, or else the only special token with a known name, such as "</s>". Throws UsageError, which names
/// the key, for a setting that is not computed exactly, and Error if the file is damaged.
/// `read_tokenizer_json("qwen/tokenizer.json")`
[[nodiscard]] std::shared_ptr<const Tokenizer> read_tokenizer_json(const std::string& path);

/// The arguments of `load_tokenizer`, for --help.
inline constexpr std::string_view tokenizer_help =
    "\"bytes\", a tokenizer.json, GPT-2's r50k_base.tiktoken, or a folder with one of them, vocab.bpe or merges.txt";

/// The tokenizer of this name or path: "bytes"; a tokenizer.json of Hugging Face, any name that ends in ".json"; a
/// `.tiktoken` file with GPT-2's splitting rule (r50k_base); or a folder with `tokenizer.json`, else with `vocab.bpe`
/// and `encoder.json`, or the same under Hugging Face's names `merges.txt` and `vocab.json`, else with one `.tiktoken`
/// file. Throws UsageError where there is nothing of the kind or what it says is not computed, Error where a file is
/// damaged.
[[nodiscard]] std::shared_ptr<const Tokenizer> load_tokenizer(const std::string& name_or_path);

/// Copies what `load_tokenizer` reads of this name or path into a folder, which is then a tokenizer with the same
/// encoding. The folder appears, or replaces an older one, in one step. Nothing to copy, as of "bytes", is a
/// UsageError. `copy_tokenizer("llama/tokenizer.json", "runs/first/tokenizer")`
void copy_tokenizer(const std::string& name_or_path, const std::string& folder);
/// Whether the folder has the files that `copy_tokenizer` writes, byte by byte. It costs less than to read a tokenizer.
/// `is_tokenizer_copy("llama/tokenizer.json", "runs/first/tokenizer")`
[[nodiscard]] bool is_tokenizer_copy(const std::string& name_or_path, const std::string& folder);

}  // namespace shardlib::io

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/tokenizer/bpe.hpp"
#include "shardlib/io/tokenizer/impl/tokenizer.hpp"
#endif
