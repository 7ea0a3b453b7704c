// Reads documents for `tokenize` from text files and JSON lines, also behind gzip or zstd, in order and from any place.
#pragma once

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <shardlib/io/file.hpp>
#include <shardlib/io/tokenizer/tokenizer.hpp>
#include <shardlib/support/error.hpp>
#include <shardlib/support/text.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "decompress.hpp"

namespace tokenize {

using namespace shardlib;

struct TextFile {
  std::string path;
  std::uint64_t size;
  std::int64_t changed;
};

/// The files in the order given, those of a folder in the order of their names; names that begin with a dot are passed
/// over.
inline std::vector<TextFile> find_files(const std::vector<std::string>& inputs) {
  namespace fs = std::filesystem;
  std::vector<TextFile> files;
  std::set<fs::path> seen;
  const auto add = [&](const std::string& path) {
    if (!seen.insert(fs::absolute(path).lexically_normal()).second)
      throw UsageError("'" + path + "' is given twice: give each file once");
    std::error_code error;
    const auto changed = fs::last_write_time(path, error).time_since_epoch().count();
    files.push_back({path, io::InputFile(path).size(), static_cast<std::int64_t>(changed)});
  };
  for (const std::string& input : inputs) {
    std::error_code error;
    if (!fs::is_directory(input, error)) {
      add(input);
      continue;
    }
    const std::vector<std::string> found = io::files_below(input);
    if (found.empty()) throw UsageError("the folder '" + input + "' holds no files");
    for (const std::string& path : found) add(path);
  }
  return files;
}

inline constexpr std::size_t batch_bytes = std::size_t{1} << 20;

/// The contents of a file, a block at a time: its bytes, decompressed if gzip or zstd has compressed them.
class Content {
 public:
  /// From byte `begin` of the contents on.
  Content(const TextFile& file, std::uint64_t begin)
      : file_(file), raw_(file.path), at_(begin), decompressor_(decompressor_of(raw_, file.path, file.size)) {
    std::string skipped;
    for (std::uint64_t left = decompressor_ ? begin : 0; left > 0; left -= skipped.size()) {
      skipped.clear();
      if (!decompressor_->read(skipped, std::min<std::uint64_t>(left, batch_bytes))) break;
    }
  }

  /// Appends the next block; false at the end.
  bool read(std::string& buffer) {
    const std::size_t old = buffer.size();
    if (decompressor_) {
      decompressor_->read(buffer, batch_bytes);
    } else {
      buffer.resize(old + static_cast<std::size_t>(std::min<std::uint64_t>(file_.size - at_, batch_bytes)));
      raw_.read(at_, std::as_writable_bytes(std::span(buffer).subspan(old)));
    }
    if (const std::size_t zero = buffer.find('\0', old); zero != std::string::npos)
      throw UsageError(
          fmt::format("'{}' is not a text file: byte {} is zero; leave the file out", file_.path, at_ + zero - old));
    at_ += buffer.size() - old;
    return buffer.size() > old;
  }

  [[nodiscard]] bool compressed() const { return decompressor_ != nullptr; }
  /// Bytes of the file that have been read.
  [[nodiscard]] std::uint64_t place() const { return decompressor_ ? decompressor_->place() : at_; }

 private:
  const TextFile& file_;
  io::InputFile raw_;
  std::uint64_t at_;
  std::unique_ptr<Decompressor> decompressor_;
};

/// Where a document begins, in a file's contents.
struct TextPlace {
  std::size_t file = 0;
  std::uint64_t offset = 0;
};

/// Documents that are encoded together, and where the next one begins.
struct Batch {
  std::vector<std::string> documents;
  TextPlace next;
  std::uint64_t bytes_read;  ///< of all files, up to there
};

/// The separation of documents: by marks, a file each, or a line each.
enum class Layout { marks, file, lines };

/// Reads the documents in order, a few at a time.
class Reader {
 public:
  /// `field` is the key of a document's text where the files hold JSON lines.
  Reader(const std::vector<TextFile>& files, Layout layout, std::string field, TextPlace begin)
      : files_(files), layout_(layout), field_(std::move(field)), at_(begin) {
    for (std::size_t i = 0; i < at_.file; ++i) bytes_before_ += files_[i].size;
  }

  /// Documents of at least `batch_bytes`, fewer at the end; none after it.
  Batch next() {
    Batch batch{};
    for (std::size_t bytes = 0; bytes < batch_bytes && at_.file < files_.size();) {
      std::string document = read_document();
      // A document is more than white space, as in io::for_each_document.
      if (document.find_first_not_of(" \t\n\v\f\r") == std::string::npos) continue;
      bytes += document.size();
      batch.documents.push_back(std::move(document));
    }
    batch.next = at_;
    batch.bytes_read = bytes_before_ + (content_ && content_->compressed() ? content_->place() : at_.offset);
    return batch;
  }

 private:
  std::string read_document() {
    const TextFile& file = files_[at_.file];
    if (!content_) open(file);
    const std::string_view mark = layout_ == Layout::lines ? std::string_view("\n") : io::end_of_text_mark;
    std::size_t searched = begin_;
    for (;;) {
      const std::size_t found = layout_ == Layout::file ? std::string::npos : buffer_.find(mark, searched);
      if (found != std::string::npos) {
        std::string document = text_of(std::string_view(buffer_).substr(begin_, found - begin_));
        at_.offset += found + mark.size() - begin_;
        begin_ = found + mark.size();
        return document;
      }
      buffer_.erase(0, std::exchange(begin_, 0));  // once a block, as it moves all that is left
      // A mark may lie across the end of what has been read.
      searched = buffer_.size() - std::min(buffer_.size(), mark.size() - 1);
      if (!content_->read(buffer_)) {
        std::string document = text_of(buffer_);
        buffer_.clear();
        bytes_before_ += file.size;
        at_ = {at_.file + 1, 0};
        content_.reset();
        return document;
      }
    }
  }

  void open(const TextFile& file) {
    const std::string_view name = file.path;
    if (layout_ != Layout::lines &&
        (name.ends_with(".jsonl") || name.ends_with(".jsonl.gz") || name.ends_with(".jsonl.zst")))
      throw UsageError("'" + file.path +
                       "' holds JSON lines by its name: say with --field which of their keys has the text, " +
                       "as in --field text, or give the file another name");
    content_.emplace(file, at_.offset);
  }

  /// The document between two marks, or in a line of JSON.
  [[nodiscard]] std::string text_of(std::string_view found) const {
    if (layout_ != Layout::lines || found.find_first_not_of(" \t\r") == std::string_view::npos)
      return std::string(found);
    const auto fail = [&](const std::string& why) {
      const TextFile& file = files_[at_.file];
      throw UsageError(
          fmt::format("{}:{}: the line {}: mend or remove it", file.path, line_number(file, at_.offset), why));
    };
    const auto json = nlohmann::json::parse(found, depth_limit(), false);
    if (!json.is_object()) fail("is not a JSON object (" + shardlib::detail::excerpt(found, 60) + ")");
    const auto text = json.find(field_);
    if (text == json.end()) fail("has no key \"" + field_ + "\", which --field names");
    if (!text->is_string()) fail("has no text as \"" + field_ + "\"");
    auto document = text->get<std::string>();
    if (document.find('\0') != std::string::npos) fail("has a text with a zero byte");
    return document;
  }

  /// The number of the line that begins at this byte of the contents. It reads the file again: only errors need it.
  static std::int64_t line_number(const TextFile& file, std::uint64_t offset) {
    Content content(file, 0);
    std::int64_t number = 1;
    for (std::string block; offset > 0 && content.read(block); block.clear()) {
      const std::size_t before = static_cast<std::size_t>(std::min<std::uint64_t>(offset, block.size()));
      number += std::count_if(block.begin(), block.begin() + static_cast<std::ptrdiff_t>(before),
                              [](char c) { return c == '\n'; });
      offset -= before;
    }
    return number;
  }

  /// Deeper values would use up the stack when they are freed: they count as no JSON.
  static nlohmann::json::parser_callback_t depth_limit() {
    return [](int depth, nlohmann::json::parse_event_t, nlohmann::json&) { return depth < 64; };
  }

  const std::vector<TextFile>& files_;
  Layout layout_;
  std::string field_;
  TextPlace at_;
  std::uint64_t bytes_before_ = 0;  // of the files before
  std::optional<Content> content_;
  std::string buffer_;     // read of the contents
  std::size_t begin_ = 0;  // where at_.offset is in it
};

}  // namespace tokenize
