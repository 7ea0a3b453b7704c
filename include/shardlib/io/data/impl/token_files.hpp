// Definitions of token_files.hpp.
#pragma once

#include "shardlib/io/data/token_files.hpp"

#include <fcntl.h>
#include <glob.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <filesystem>
#include <initializer_list>
#include <system_error>
#include <utility>

#include "shardlib/io/data/impl/bin_checksums.hpp"
#include "shardlib/io/impl/posix.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::io {
namespace detail {

static_assert(std::endian::native == std::endian::little, "token files are read as they lie");

inline constexpr std::int32_t bin_magic = 20240520, bin_version = 1;
using BinHeader = std::array<std::int32_t, 256>;
inline constexpr std::int64_t bin_block = 8192;  // tokens from one entry of the index of documents to the next

/// llm.c's header, where the file begins with its magic number.
inline std::optional<BinHeader> bin_header(const InputFile& file) {
  BinHeader header{};
  const auto bytes = std::as_writable_bytes(std::span(header));
  const std::size_t there = std::min<std::size_t>(bytes.size(), file.size());
  file.read(0, bytes.first(there));
  constexpr std::int32_t magic_of_4_bytes = 20240801;
  if (there >= sizeof(std::int32_t) && header[0] == magic_of_4_bytes)
    throw UsageError("'" + file.path() +
                     "' is a token file of llm.c with ids of 4 bytes (Llama 3), which is not read: " +
                     "make a flat-tokens data set of its texts (`tokenize`)");
  if (there < sizeof(std::int32_t) || header[0] != bin_magic) return std::nullopt;
  if (there < bytes.size())
    throw Error("'" + file.path() + "' begins as an llm.c token file, but ends within the header, at byte " +
                std::to_string(there) + " of 1024: it was truncated; copy it again");
  return header;
}

}  // namespace detail

SHARDLIB_INLINE BinTokens::BinTokens(const std::vector<std::string>& paths, std::uint32_t end_of_text)
    : end_of_text_(end_of_text) {
  if (paths.empty()) throw UsageError("no token files: name at least one .bin");
  std::int64_t first = 0;
  for (const std::string& path : paths) {
    const InputFile file(path);
    const std::uint64_t size = file.size();
    const auto header = detail::bin_header(file);
    const std::uint64_t offset = header ? sizeof(detail::BinHeader) : 0;
    if (header && (*header)[1] != detail::bin_version)
      throw UsageError("'" + path + "' is an llm.c token file of version " + std::to_string((*header)[1]) +
                       ", but only version 1 is supported: write it again with GPT-2's tokenizer");
    if (header && ((*header)[2] < 0 || size != offset + 2 * static_cast<std::uint64_t>((*header)[2])))
      throw Error("'" + path + "' should hold " + std::to_string((*header)[2]) +
                  " tokens of 2 bytes by its header, but has " + std::to_string(size - offset) +
                  " bytes after it: it was truncated or damaged; copy it again");
    if (size % 2 != 0)
      throw Error("'" + path + "' has " + std::to_string(size) +
                  " bytes, an odd number, but a token has 2: it was truncated or is not a token file");
    if (!shards_.empty() && shards_.front().offset != offset)
      throw UsageError("'" + paths.front() + "' and '" + path +
                       "' are token files of different kinds (llm.c and nanoGPT): use those of one kind");
    const std::int64_t end = first + static_cast<std::int64_t>((size - offset) / 2);
    auto checksums = detail::BinChecksums::open(file, offset);
    if (end > first) shards_.push_back({file, first, end, offset, std::move(checksums)});
    first = end;
  }
  hold(shards_.empty() ? paths.front() : shards_.front().file.path(), first, std::nullopt);
}

SHARDLIB_INLINE void BinTokens::read_ids(std::int64_t first, std::span<std::uint16_t> out) const {
  auto shard = std::upper_bound(shards_.begin(), shards_.end(), first,
                                [](std::int64_t token, const Shard& s) { return token < s.end; });
  for (; !out.empty(); ++shard) {
    const auto count = std::min(out.size(), static_cast<std::size_t>(shard->end - first));
    const auto bytes = std::as_writable_bytes(out.first(count));
    const std::uint64_t at = shard->offset + 2 * static_cast<std::uint64_t>(first - shard->first);
    if (shard->checksums) shard->checksums->verify(shard->file, at, at + bytes.size());
    shard->file.read(at, bytes);
    out = out.subspan(count);
    first += static_cast<std::int64_t>(count);
  }
}

SHARDLIB_INLINE void BinTokens::read_tokens(std::int64_t first, std::span<EncodedToken> out) const {
  // llm.c marks a document by its first token, nanoGPT by the last one of the document before it.
  const bool ends = shards_.front().offset == 0;
  const std::int64_t from = ends && first > 0 ? first - 1 : first;
  std::vector<std::uint16_t> ids(out.size() + static_cast<std::size_t>(first - from));
  read_ids(from, ids);
  const std::uint16_t* const id = ids.data() + (first - from);
  const std::uint16_t* const mark = ends ? id - 1 : id;
  const std::size_t begin = first == 0 ? 1 : 0;
  if (begin == 1) out[0] = EncodedToken{id[0]} << 1 | 1U;
  for (std::size_t i = begin; i < out.size(); ++i)
    out[i] = EncodedToken{id[i]} << 1 | static_cast<EncodedToken>(mark[i] == end_of_text_);
}

SHARDLIB_INLINE std::int64_t BinTokens::count_documents() const {
  const std::lock_guard lock(mutex_);
  if (starts_before_.empty()) {
    std::vector<std::int64_t> before{0};
    std::vector<EncodedToken> block(static_cast<std::size_t>(detail::bin_block));
    for (std::int64_t first = 0; first < tokens(); first += detail::bin_block) {
      block.resize(static_cast<std::size_t>(std::min(detail::bin_block, tokens() - first)));
      read_tokens(first, block);
      std::int64_t starts = 0;
      for (const EncodedToken token : block) starts += token & 1U;
      before.push_back(before.back() + starts);
    }
    starts_before_ = std::move(before);
  }
  return starts_before_.back();
}

SHARDLIB_INLINE std::int64_t BinTokens::find_start(std::int64_t index) const {
  const auto block = std::upper_bound(starts_before_.begin(), starts_before_.end(), index) - starts_before_.begin() - 1;
  const std::int64_t first = block * detail::bin_block;
  std::vector<EncodedToken> tokens(static_cast<std::size_t>(std::min(detail::bin_block, this->tokens() - first)));
  read_tokens(first, tokens);
  std::int64_t left = index - starts_before_[static_cast<std::size_t>(block)];
  std::size_t i = 0;
  while (i < tokens.size() && ((tokens[i] & 1U) == 0 || left-- > 0)) ++i;
  if (i == tokens.size()) throw Error("'" + name() + "' has changed while it is being read: start again");
  return first + static_cast<std::int64_t>(i);
}

SHARDLIB_INLINE TokenRange BinTokens::find_document(std::int64_t index) const {
  const std::int64_t begin = find_start(index);
  return {begin, index + 1 < count_documents() ? find_start(index + 1) : tokens()};
}

// ---- the writer -----------------------------------------------------------------------------------------------------

SHARDLIB_INLINE BinWriter::BinWriter(std::string path, std::uint32_t end_of_text)
    : path_(std::move(path)),
      end_of_text_(static_cast<std::uint16_t>(end_of_text)),
      checksums_(std::make_unique<detail::BinChecksumWriter>()) {
  if (end_of_text >> 16 != 0)
    throw UsageError("the end of text " + std::to_string(end_of_text) + " does not fit the 2 bytes of a .bin");
  if (file_exists(path_)) throw UsageError("'" + path_ + "' already exists: remove it first, or write elsewhere");
  file_ = detail::create_file(path_ + ".partial");
  if (file_ < 0) detail::fail_file("write", path_ + ".partial", errno);
  ::lseek(file_, sizeof(detail::BinHeader), SEEK_SET);  // the header comes last
}

SHARDLIB_INLINE BinWriter::~BinWriter() {
  if (file_ < 0) return;
  ::close(file_);
  ::unlink((path_ + ".partial").c_str());
}

SHARDLIB_INLINE void BinWriter::flush() {
  const auto bytes = std::as_bytes(std::span(pending_));
  detail::write_all(file_, bytes, path_ + ".partial");
  checksums_->add(bytes);
  pending_.clear();
}

SHARDLIB_INLINE void BinWriter::add(std::span<const std::uint32_t> ids) {
  if (file_ < 0) throw Error("BinWriter: '" + path_ + "' is finished; nothing can be added");
  if (ids.empty()) return;
  const std::uint32_t largest = *std::max_element(ids.begin(), ids.end());
  if (largest >> 16 != 0)
    throw UsageError("a document for '" + path_ + "' has the token id " + std::to_string(largest) +
                     ", which does not fit the 2 bytes of a .bin: write flat-tokens instead");
  if (tokens_ + std::ssize(ids) > INT32_MAX - 1)
    throw UsageError("'" + path_ + "' would exceed the 2^31 - 1 tokens of a .bin: write several, or flat-tokens");
  pending_.push_back(end_of_text_);
  for (const std::uint32_t id : ids) pending_.push_back(static_cast<std::uint16_t>(id));
  tokens_ += 1 + std::ssize(ids);
  if (pending_.size() >= std::size_t{1} << 20) flush();
}

SHARDLIB_INLINE void BinWriter::finish() {
  if (tokens_ == 0) throw UsageError("nothing to write to '" + path_ + "': no document has tokens");
  flush();
  detail::BinHeader header{detail::bin_magic, detail::bin_version, static_cast<std::int32_t>(tokens_)};
  ::lseek(file_, 0, SEEK_SET);
  detail::write_all(file_, std::as_bytes(std::span(header)), path_ + ".partial");
  if (::fsync(file_) != 0) detail::fail_file("write", path_ + ".partial", errno);
  if (::close(std::exchange(file_, -1)) != 0) detail::fail_file("write", path_ + ".partial", errno);
  replace_file(detail::bin_checksums_path(path_), as_bytes(checksums_->finish(sizeof header)), true);
  rename_path(path_ + ".partial", path_);
  sync_path(std::filesystem::path(path_).parent_path().string());
}

// ---- any format -----------------------------------------------------------------------------------------------------

namespace detail {

/// Whether one of the words of a file's name, between characters that are no letters, is one of these.
inline bool has_word(std::string_view name, std::initializer_list<std::string_view> words) {
  const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
  for (auto at = name.begin(); at != name.end();) {
    at = std::find_if(at, name.end(), is_letter);
    const auto end = std::find_if_not(at, name.end(), is_letter);
    if (std::ranges::find(words, std::string_view(at, end)) != words.end()) return true;
    at = end;
  }
  return false;
}

/// The files of a folder that are a split's: "train.bin", "fineweb_val_000000.bin"; sorted.
inline std::vector<std::string> bins_of(const std::string& folder, Split split) {
  std::vector<std::string> paths;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.ends_with(".bin")) continue;
    const bool trains = has_word(name, {"train", "training"}),
               validates = has_word(name, {"val", "valid", "validation"});
    if (trains && validates)
      throw UsageError("'" + it->path().string() + "' is named for training and for validation: rename it");
    if (split == Split::train ? trains : validates) paths.push_back(it->path().string());
  }
  if (error) throw UsageError("cannot list the folder '" + folder + "': " + error.message());
  std::sort(paths.begin(), paths.end());
  return paths;
}

inline std::vector<std::string> matches(const std::string& pattern) {
  glob_t found{};
  std::vector<std::string> paths;
  if (::glob(pattern.c_str(), GLOB_ERR, nullptr, &found) == 0)
    paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  std::erase_if(paths, [](const std::string& path) { return path.ends_with(".bin.crc32c"); });
  return paths;
}

/// Whether a file's first 64 KiB have a zero byte, as 2-byte ids do and text does not.
inline bool has_zeros(const InputFile& file) {
  Bytes start(std::min<std::size_t>(file.size(), 65536));
  file.read(0, start);
  return std::find(start.begin(), start.end(), std::byte{0}) != start.end();
}

/// The content of `tokens_note` in this folder; empty if there is none.
inline std::optional<TokensMaker> read_tokens_note(const std::string& folder) {
  const std::string path = (folder.empty() ? "." : folder) + "/" + std::string(tokens_note);
  if (!file_exists(path)) return {};
  const json all = read_json(path);
  const json name = all.value("tokenizer", json()), fingerprint = all.value("tokenizer_fingerprint", json());
  const json end = all.value("end_of_text", json());
  if (all.value("format", json()) != "shardlib-tokens" || !name.is_string() || !fingerprint.is_string() ||
      !end.is_number_unsigned() || end.get<std::uint64_t>() > 0xffff)
    throw Error("'" + path + "' does not say which tokenizer made the .bin files beside it: it is damaged; copy it " +
                "again, or remove it to read them as GPT-2's");
  return TokensMaker{name.get<std::string>(), fingerprint.get<std::string>(), end.get<std::uint32_t>()};
}

inline std::shared_ptr<const TokenSource> open_bins(const std::vector<std::string>& paths) {
  const auto maker = read_tokens_note(std::filesystem::path(paths.at(0)).parent_path().string());
  return std::make_shared<BinTokens>(paths, maker && maker->end_of_text ? *maker->end_of_text : gpt2_end_of_text);
}

inline std::shared_ptr<const TokenSource> open_file(const std::string& path, const TextOptions& text) {
  refuse_json_lines(path);
  const InputFile file(path);
  if (bin_header(file)) return open_bins({path});
  const bool named = path.ends_with(".bin"), zeros = has_zeros(file);
  if (named && file.size() > 0 && !zeros)
    throw UsageError("'" + path +
                     "' is named as a token file, but has neither llm.c's header nor, as 2-byte ids have, " +
                     "any zero byte in its first 64 KiB: rename it to .txt if it is a text");
  if (named) return open_bins({path});
  refuse_compressed(file);
  if (zeros)
    throw UsageError("'" + path +
                     "' is not a text file (it has zero bytes), and not a token file of llm.c: rename it to .bin if " +
                     "it holds bare 2-byte ids (nanoGPT)");
  return read_text_tokens(path, text);
}

inline std::shared_ptr<const TokenSource> open_folder(const std::string& path, Split split) {
  if (is_zarr_array(path + "/encoded_tokens")) {
    if (split == Split::validation && std::filesystem::path(path).filename() != "validation")
      throw UsageError("'" + path + "' is one split of a flat-tokens data set: name the data set instead");
    return std::make_shared<FlatTokens>(path);
  }
  if (is_zarr_group(path)) {
    const std::string folder = path + "/" + to_string(split);
    if (!is_zarr_group(folder))
      throw UsageError("'" + path + "' is a zarr group without '" + to_string(split) +
                       "': a flat-tokens data set has train and validation (docs/data.md)");
    return std::make_shared<FlatTokens>(folder, FlatTokens::default_cache_bytes,
                                        split == Split::train ? other_data : other_validation);
  }
  if (path.ends_with(".partial"))
    throw UsageError("'" + path + "' is unfinished: let the program that writes it continue");
  const std::vector<std::string> paths = bins_of(path, split);
  if (paths.empty())
    throw UsageError("the folder '" + path + "' holds neither flat-tokens (a .zgroup) nor " +
                     (split == Split::train ? "*train*.bin" : "*val*.bin") + " files: " +
                     (split == Split::train ? "tokenize its texts first, or train straight from them with --stream"
                                            : std::string(other_validation)));
  return open_bins(paths);
}

}  // namespace detail

SHARDLIB_INLINE void write_tokens_note(const std::string& folder, const Tokenizer& tokenizer) {
  const detail::json note = {{"format", "shardlib-tokens"},
                             {"tokenizer", tokenizer.name()},
                             {"tokenizer_fingerprint", tokenizer.fingerprint()},
                             {"end_of_text", tokenizer.end_of_text()}};
  replace_file(folder + "/" + std::string(tokens_note), as_bytes(note.dump(1) + "\n"), true);
}

SHARDLIB_INLINE std::optional<TokensMaker> made_by(const std::string& path) {
  // The attributes are in the folder above the splits, and the path may name a split.
  for (const std::string& folder : {path, path + "/.."}) {
    if (!detail::is_zarr_group(folder)) continue;
    const detail::json attributes = ZarrGroup::open(folder).attributes();
    const auto text = [&](const char* key) {
      const auto found = attributes.find(key);
      return found != attributes.end() && found->is_string() ? found->get<std::string>() : std::string();
    };
    if (const std::string fingerprint = text("tokenizer_fingerprint"); !fingerprint.empty())
      return TokensMaker{text("tokenizer"), fingerprint};
  }
  if (is_folder(path)) return detail::read_tokens_note(path);
  std::optional<TokensMaker> maker;
  for (const std::string& file : file_exists(path) ? std::vector{path} : detail::matches(path)) {
    if (!file.ends_with(".bin")) continue;  // a text file beside .bin files is not theirs
    const auto one = detail::read_tokens_note(std::filesystem::path(file).parent_path().string());
    if (one && maker && one->fingerprint != maker->fingerprint)
      throw UsageError("the files of '" + path + "' were made with two tokenizers, " + maker->name + " and " +
                       one->name + ": give files of one, or tokenize the texts again");
    if (one) maker = one;
  }
  return maker;
}

SHARDLIB_INLINE bool has_validation(const std::string& path) {
  if (!is_folder(path)) return false;
  return detail::is_zarr_group(path + "/" + to_string(Split::validation)) ||
         (!detail::is_zarr_group(path) && !detail::bins_of(path, Split::validation).empty());
}

SHARDLIB_INLINE std::shared_ptr<const TokenSource> open_tokens(const std::string& path, Split split,
                                                               const TextOptions& text) {
  if (is_folder(path)) return detail::open_folder(path, split);
  const bool exists = file_exists(path);
  const std::vector<std::string> paths = exists ? std::vector<std::string>{} : detail::matches(path);
  if (!exists && paths.empty())
    throw UsageError("cannot read '" + path + "': there is no such file, folder or glob" +
                     (file_exists(path + ".partial") ? ", only an unfinished '" + path + ".partial'" : "") +
                     "; check the path");
  if (split == Split::validation)
    throw UsageError("'" + path +
                     "' has no validation split: give the validation data a path of its own (--validation-data)");
  if (paths.empty()) return detail::open_file(path, text);
  for (const std::string& file : paths)
    if (!file.ends_with(".bin") && !detail::bin_header(InputFile(file)))
      throw UsageError("'" + path + "' names '" + file + "', which is not a .bin file, and a glob stands for those " +
                       "alone: tokenize texts first, or train straight from their folder with --stream");
  return detail::open_bins(paths);
}

}  // namespace shardlib::io
