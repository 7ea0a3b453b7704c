// Definitions of flat_tokens.hpp.
#pragma once

#include "shardlib/io/data/flat_tokens.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "shardlib/io/file.hpp"
#include "shardlib/io/formats/impl/zarr_json.hpp"
#include "shardlib/io/impl/posix.hpp"
#include "shardlib/io/impl/temporary.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::io {

namespace detail {

inline ZarrArray open_flat_array(const std::string& path, const std::string& name, const std::string& type,
                                 ZarrOpen options) {
  const ZarrGroup group = ZarrGroup::open(path);
  if (!group.has_array(name))
    throw UsageError("'" + path + "' is not a flat-tokens array: it has no '" + name + "' (docs/data.md)");
  ZarrArray array = group.array(name, options);
  if (array.info().shape.size() != 1 || array.info().dtype.substr(1) != type)
    throw UsageError("'" + path + "' is not a flat-tokens array: '" + name + "' has " +
                     std::to_string(array.info().shape.size()) + " dims of type \"" + array.info().dtype +
                     "\" instead of 1 of type \"<" + type + "\" (docs/data.md)");
  return array;
}

}  // namespace detail

SHARDLIB_INLINE FlatTokens::FlatTokens(const std::string& path, std::size_t cache_bytes, std::string_view remedy)
    : encoded_tokens_(detail::open_flat_array(path, "encoded_tokens", "u4", {true, cache_bytes})),
      seq_starts_(detail::open_flat_array(path, "seq_starts", "u8", {true})) {
  const std::int64_t largest = ZarrGroup::open(path).integer_attribute("max_token_id");
  if (largest < 0 || largest >> 31 != 0)
    throw Error("'" + path + "': max_token_id is " + std::to_string(largest) +
                ", which is not a token id (0 to 2^31 - 1)");
  const auto damaged = [&](const std::string& why) {
    throw Error("'" + path + "': " + why + ": the data are damaged or were not written to the end; make them again");
  };
  const std::int64_t tokens = encoded_tokens_.size(), starts = seq_starts_.size();
  if (starts < 1) damaged("'seq_starts' is empty");
  std::uint64_t first = 0, last = 0;
  seq_starts_.read<std::uint64_t>({0}, {1}, {&first, 1});
  seq_starts_.read<std::uint64_t>({starts - 1}, {1}, {&last, 1});
  if (first != 0) damaged("'seq_starts' begins with " + std::to_string(first) + " instead of 0");
  if (last != static_cast<std::uint64_t>(tokens))
    damaged("'seq_starts' ends with " + std::to_string(last) + ", but there are " + std::to_string(tokens) + " tokens");
  if (tokens > 0) {
    EncodedToken token = 0;
    encoded_tokens_.read<EncodedToken>({0}, {1}, {&token, 1});
    if ((token & 1U) == 0) damaged("the first token is not marked as a document's first");
  }
  hold(path, tokens, static_cast<std::uint32_t>(largest), remedy);
}

SHARDLIB_INLINE void FlatTokens::read_tokens(std::int64_t first, std::span<EncodedToken> out) const {
  encoded_tokens_.read<EncodedToken>({first}, {static_cast<std::int64_t>(out.size())}, out);
}

SHARDLIB_INLINE std::int64_t FlatTokens::count_documents() const {
  const std::lock_guard lock(mutex_);
  const std::int64_t all = seq_starts_.size() - 1;
  if (!empty_) {
    // Empty documents are rare, but a select that leaves them out has to know them.
    std::vector<std::int64_t> empty;
    std::vector<std::uint64_t> starts;
    std::uint64_t before = 0;
    for (std::int64_t begin = 1; begin <= all; begin += std::ssize(starts)) {
      starts.resize(static_cast<std::size_t>(std::min(seq_starts_.chunk_size(), all + 1 - begin)));
      seq_starts_.read<std::uint64_t>({begin}, {std::ssize(starts)}, starts);
      for (std::size_t i = 0; i < starts.size(); before = starts[i++]) {
        const std::int64_t place = begin + static_cast<std::int64_t>(i);
        if (starts[i] < before || starts[i] > static_cast<std::uint64_t>(tokens()))
          throw Error("'" + name() + "': entry " + std::to_string(place) + " of 'seq_starts' is " +
                      std::to_string(starts[i]) + ", after " + std::to_string(before) + " and in " +
                      std::to_string(tokens()) + " tokens: the data are damaged; make them again");
        if (starts[i] == before) empty.push_back(place - 1);
      }
    }
    empty_ = std::move(empty);
  }
  return all - std::ssize(*empty_);
}

SHARDLIB_INLINE TokenRange FlatTokens::find_document(std::int64_t index) const {
  std::int64_t low = 0;
  {
    const std::lock_guard lock(mutex_);
    for (std::int64_t high = std::ssize(*empty_); low < high;) {  // how many empty ones stand before it
      const std::int64_t middle = (low + high) / 2;
      if ((*empty_)[static_cast<std::size_t>(middle)] - middle <= index)
        low = middle + 1;
      else
        high = middle;
    }
  }
  std::array<std::uint64_t, 2> ends{};
  seq_starts_.read<std::uint64_t>({index + low}, {2}, ends);
  return {static_cast<std::int64_t>(ends[0]), static_cast<std::int64_t>(ends[1])};
}

SHARDLIB_INLINE std::string to_string(Split split) {
  return split == Split::train ? "train" : "validation";
}

// ---- the writer -----------------------------------------------------------------------------------------------------

/// The arrays of one split, and what of them is not in a whole chunk yet.
struct FlatTokensWriter::Output {
  std::string path;
  ZarrArray encoded_tokens, seq_starts;
  FlatTokensProgress progress = {};
  std::vector<EncodedToken> tokens = {};
  std::vector<std::uint64_t> starts = {0};
  std::vector<std::string> unsynced = {};

  /// Blocks of 64 KiB (16 KiB times the item), the smallest that blosc makes: a shuffled row decodes one or two of
  /// them.
  static ZarrInfo tokens_info(std::int64_t chunk) {
    return {{0}, {chunk}, "<u4", std::nullopt, {"blosc", "lz4", 5, 2, 1 << 14}, "null", ".", true};
  }
  static ZarrInfo starts_info(std::int64_t chunk) {
    return {{0}, {chunk}, "<u8", ZarrDelta{"<i8", "<i8"}, {"blosc", "lz4", 5, 2}, "0", ".", true};
  }

  static void resize(ZarrArray& array, std::int64_t size) {
    if (array.size() != size) array.resize({size});
  }
  /// Writes the pending elements of an array with `size` elements. A chunk that is not full stays pending.
  template <class T>
  void flush(ZarrArray& array, std::vector<T>& pending, std::int64_t size) {
    // It grows ahead, as each change of the size waits for the disk; `sync` sets the true one.
    if (size > array.size()) resize(array, 2 * size);
    if (pending.empty()) return;
    const std::int64_t chunk = (size - 1) / array.chunk_size();
    array.write_chunk<T>({chunk}, pending);
    unsynced.push_back(array.path() + "/" + array.chunk_key({chunk}));
    if (std::ssize(pending) == array.chunk_size()) pending.clear();
  }
  void flush_tokens() { flush(encoded_tokens, tokens, progress.tokens); }
  void flush_starts() { flush(seq_starts, starts, progress.documents + 1); }
  void put(EncodedToken token) {
    tokens.push_back(token);
    ++progress.tokens;
    if (std::ssize(tokens) == encoded_tokens.chunk_size()) flush_tokens();
  }

  /// Goes back to the last commit. Later data is written again.
  void go_back(const FlatTokensProgress& committed) {
    progress = committed;
    const auto tail = [](ZarrArray& array, auto& pending, std::int64_t size) {
      if (array.size() < size) throw Error("'" + array.path() + "' is shorter than its last commit: remove the folder");
      resize(array, size);
      pending.resize(static_cast<std::size_t>(size % array.chunk_size()));
      array.read({size - std::ssize(pending)}, {std::ssize(pending)}, std::span(pending));
    };
    tail(encoded_tokens, tokens, progress.tokens);
    tail(seq_starts, starts, progress.documents + 1);
  }
};

SHARDLIB_INLINE FlatTokensWriter::FlatTokensWriter(std::string path, FlatTokensOptions options)
    : path_(std::move(path)), options_(options) {
  while (path_.size() > 1 && path_.back() == '/') path_.pop_back();
  if (options_.chunk_tokens < 1 || options_.chunk_documents < 1)
    throw UsageError("FlatTokensWriter: a chunk has at least one token, or document");
  if (file_exists(path_)) throw UsageError("'" + path_ + "' already exists: remove it first, or write elsewhere");
  const std::string record = partial() + "/.progress";
  lock_ = begin_folder(partial(), [this](bool begun) { require_own_folder(begun); });
  remove_temporaries();
  const bool known = file_exists(record);
  ZarrGroup::create(partial());
  for (const Split split : {Split::train, Split::validation}) {
    const std::string folder = partial() + "/" + to_string(split);
    if (!known) remove_folder(folder);  // an attempt that did not get as far as its first commit
    ZarrGroup::create(folder);
    const auto array = [&](const char* name, const ZarrInfo& info) {
      return known ? ZarrArray::open(folder + name) : ZarrArray::create(folder + name, info);
    };
    splits_[static_cast<std::size_t>(split)] =
        std::make_unique<Output>(Output{folder, array("/encoded_tokens", Output::tokens_info(options_.chunk_tokens)),
                                        array("/seq_starts", Output::starts_info(options_.chunk_documents))});
  }
  if (known)
    resume(record);
  else
    commit();
}

SHARDLIB_INLINE FlatTokensWriter::~FlatTokensWriter() = default;

/// Throws UsageError if the folder has anything that this class does not write, such as the .bin files of tokenize.
SHARDLIB_INLINE void FlatTokensWriter::require_own_folder(bool begun) const {
  constexpr std::array<std::string_view, 6> own{".lock", ".progress", ".zgroup", ".zattrs", "train", "validation"};
  std::error_code error;
  for (std::filesystem::directory_iterator it(partial(), error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!begun || std::ranges::find(own, name.substr(0, name.find(detail::temporary_mark))) == own.end())
      throw UsageError("'" + partial() + "' is not an unfinished data set: remove it, or write elsewhere");
  }
  if (error && error != std::errc::no_such_file_or_directory)
    detail::fail_file("list the folder", partial(), error.value());
}

/// Files that a killed writer was about to rename.
SHARDLIB_INLINE void FlatTokensWriter::remove_temporaries() const {
  std::vector<std::string> files;
  std::error_code error;
  for (std::filesystem::recursive_directory_iterator it(partial(), error), end; !error && it != end;
       it.increment(error))
    if (it->path().filename().string().find(".tmp-") != std::string::npos) files.push_back(it->path().string());
  if (error) detail::fail_file("list the folder", partial(), error.value());
  for (const std::string& file : files)
    if (::unlink(file.c_str()) != 0) detail::fail_file("remove", file, errno);
}

SHARDLIB_INLINE void FlatTokensWriter::resume(const std::string& record) {
  const detail::json all = detail::read_json(record);
  try {
    if (all.at("chunk_tokens") != options_.chunk_tokens || all.at("chunk_documents") != options_.chunk_documents)
      throw UsageError("'" + partial() + "' was begun with other sizes of chunks: choose the same, or remove it");
    note_ = all.at("note").get<std::string>();
    for (const Split split : {Split::train, Split::validation}) {
      const detail::json& entry = all.at(to_string(split));
      splits_[static_cast<std::size_t>(split)]->go_back({entry.at("documents").get<std::int64_t>(),
                                                         entry.at("tokens").get<std::int64_t>(),
                                                         entry.at("max_token_id").get<std::uint32_t>()});
    }
  } catch (const detail::json::exception&) {
    throw Error("'" + record + "' is damaged: remove '" + partial() + "' and begin again");
  }
}

SHARDLIB_INLINE const FlatTokensProgress& FlatTokensWriter::progress(Split split) const {
  return splits_[static_cast<std::size_t>(split)]->progress;
}

SHARDLIB_INLINE void FlatTokensWriter::check_open() const {
  if (!lock_) throw Error("FlatTokensWriter: '" + path_ + "' is finished; nothing can be added");
}

SHARDLIB_INLINE void FlatTokensWriter::add(Split split, std::span<const std::uint32_t> ids) {
  check_open();
  if (ids.empty()) return;
  Output& out = *splits_[static_cast<std::size_t>(split)];
  const std::uint32_t largest = *std::max_element(ids.begin(), ids.end());
  if (largest >> 31 != 0)
    throw UsageError("document " + std::to_string(out.progress.documents) + " for '" + path_ + "' has the token id " +
                     std::to_string(largest) + ": ids must be below 2^31; check the tokenizer");
  out.progress.max_token_id = std::max(out.progress.max_token_id, largest);
  for (std::size_t i = 0; i < ids.size(); ++i) out.put(ids[i] << 1 | (i == 0 ? 1U : 0U));
  ++out.progress.documents;
  out.starts.push_back(static_cast<std::uint64_t>(out.progress.tokens));
  if (std::ssize(out.starts) == out.seq_starts.chunk_size()) out.flush_starts();
}

SHARDLIB_INLINE void FlatTokensWriter::sync() {
  check_open();
  for (const Split split : {Split::train, Split::validation}) {
    Output& out = *splits_[static_cast<std::size_t>(split)];
    Output::resize(out.encoded_tokens, out.progress.tokens);
    Output::resize(out.seq_starts, out.progress.documents + 1);
    out.flush_tokens();
    out.flush_starts();
    ZarrGroup::open(out.path).set_attributes({{"max_token_id", out.progress.max_token_id}});
    const std::string tokens = out.encoded_tokens.path(), starts = out.seq_starts.path();
    for (const std::string& file : out.unsynced) sync_path(file);
    for (const std::string& file : {tokens + "/.zarray", starts + "/.zarray", out.path + "/.zattrs"}) sync_path(file);
    for (const std::string& folder : {tokens, starts, out.path}) sync_path(folder);
    out.unsynced.clear();
  }
}

SHARDLIB_INLINE void FlatTokensWriter::commit(const std::string& note) {
  sync();
  detail::json record = {
      {"note", note}, {"chunk_tokens", options_.chunk_tokens}, {"chunk_documents", options_.chunk_documents}};
  for (const Split split : {Split::train, Split::validation}) {
    const FlatTokensProgress& written = progress(split);
    record[to_string(split)] = {
        {"documents", written.documents}, {"tokens", written.tokens}, {"max_token_id", written.max_token_id}};
  }
  replace_file(partial() + "/.progress", as_bytes(record.dump() + "\n"), true);
  note_ = note;
}

SHARDLIB_INLINE void FlatTokensWriter::finish() {
  if (progress(Split::train).tokens == 0)
    throw UsageError("nothing to write to '" + path_ + "': no document for training has tokens");
  sync();  // no commit: a writer that continues from here adds what follows the last note
  for (const char* name : {"/.zgroup", "/train/.zgroup", "/validation/.zgroup"}) sync_path(partial() + name);
  sync_path(partial());
  if (file_exists(path_)) throw UsageError("'" + path_ + "' has appeared meanwhile: move it away and start again");
  rename_path(partial(), path_);
  sync_path(std::filesystem::path(path_).parent_path().string());
  // The data set is complete from here on. These two files would do no harm if they stayed.
  for (const char* name : {"/.progress", "/.lock"}) ::unlink((path_ + name).c_str());
  lock_.reset();
}

}  // namespace shardlib::io
