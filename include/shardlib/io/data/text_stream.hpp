// Batches straight from text files that are tokenized as they are read. They need no preparation, but a run does not
// resume exactly.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/io/data/loader.hpp"
#include "shardlib/io/data/token_source.hpp"
#include "shardlib/io/file.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::io {

/// The rows that a TextStream makes.
struct TextStreamOptions {
  std::int64_t batch = 1;        ///< rows of the global batch
  std::int64_t length = 1;       ///< tokens a row
  std::uint64_t seed = 0;        ///< seed of the order of files and of the rows' first positions
  TextOptions text = {};         ///< how the texts become tokens
  std::uint32_t vocabulary = 0;  ///< ids must be below it; 0: not checked
  std::int32_t begin = 0;        ///< the input before the first token of a document, and of a row
};

/// Packed rows from the files of a folder. The bytes of all files make a ring, in an order that the seed decides, and
/// each row of the global batch goes round in its own part of it: the batches are the same on every mesh, and a device
/// reads the parts of its rows only. Not thread-safe: each device has its own.
class TextStream {
 public:
  /// Streams the rows [first, first + count) of each batch. `path` is a text file, or a folder that is searched
  /// recursively; names that begin with a dot are skipped. Throws UsageError if it has no text, or less than 64 bytes a
  /// row.
  TextStream(const std::string& path, TextStreamOptions options, std::int64_t first, std::int64_t count);
  TextStream(const TextStream&) = delete;
  TextStream& operator=(const TextStream&) = delete;

  /// The rows' next batch.
  [[nodiscard]] TokenBatch next();

 private:
  struct TextFile {
    std::string path;
    std::int64_t begin, end;  ///< its bytes among all
  };
  /// One row's part of the ring, [begin, end) with end up to twice the ring's size, and how far it has come.
  struct Lane {
    std::int64_t row = 0, begin = 0, end = 0, place = 0;
    std::shared_ptr<const InputFile> file = nullptr;  ///< the one that place is in
    std::string text = {};                            ///< read; tokenized up to `done`
    std::size_t done = 0;
    bool starts = true;  ///< whether text begins a document
    bool ends = false;   ///< whether text ends with a file, or with the part
    std::vector<EncodedToken> tokens = {};
    std::size_t taken = 0;        ///< of the tokens
    std::int64_t idle_bytes = 0;  ///< read since the last token
  };
  [[nodiscard]] const TextFile& file_at(std::int64_t place) const;
  [[nodiscard]] std::int64_t cut(std::int64_t place) const;
  void find_files(const std::string& path);
  void read_more(Lane& lane) const;
  void tokenize_piece(Lane& lane) const;
  void put(Lane& lane, std::string_view piece, bool ends) const;

  TextStreamOptions options_;
  std::vector<TextFile> files_;
  std::int64_t bytes_ = 0;  ///< of all files
  std::vector<Lane> lanes_;
};

namespace detail {

inline constexpr std::int64_t text_stream_block = 65536;                // bytes of one read
inline constexpr std::size_t text_stream_piece = std::size_t{1} << 18;  // a longer document is tokenized in pieces

/// Where a text without a document's end may be cut so that its tokens stay the same: before a line's end between two
/// letters or signs, the last one in [from, to); elsewhere at least not within a UTF-8 character.
inline std::size_t last_cut(std::string_view text, std::size_t from, std::size_t to) {
  const auto space = [](char c) { return std::string_view(" \t\n\v\f\r").find(c) != std::string_view::npos; };
  for (std::size_t i = to - 1; i > from; --i)
    if (text[i] == '\n' && !space(text[i - 1]) && !space(text[i + 1])) return i;
  while (to > from + 1 && shardlib::detail::continues_character(text[to])) --to;
  return to;
}

}  // namespace detail

inline TextStream::TextStream(const std::string& path, TextStreamOptions options, std::int64_t first,
                              std::int64_t count)
    : options_(std::move(options)) {
  const auto [batch, length] = std::pair(options_.batch, options_.length);
  detail::check_batch(batch, length);
  if (first < 0 || count < 0 || first > batch - count)
    throw Error("rows " + std::to_string(first) + " to " + std::to_string(first + count) +
                " are asked for, but a batch has " + std::to_string(batch));
  find_files(path);
  constexpr std::int64_t least = 64;
  if (bytes_ / batch < least)
    throw UsageError("'" + path + "' has " + std::to_string(bytes_) + " bytes of text, but a stream needs at least " +
                     std::to_string(least) + " for each of the " + std::to_string(batch) +
                     " rows of a batch: choose more text, or a smaller --batch");
  const auto turn = static_cast<std::int64_t>(detail::hash_in(1, options_.seed) % static_cast<std::uint64_t>(bytes_));
  // bytes * row would overflow for rows and bytes that are both large.
  const auto border = [&](std::int64_t row) { return cut(turn + bytes_ / batch * row + bytes_ % batch * row / batch); };
  for (std::int64_t row = first; row < first + count; ++row) {
    const std::int64_t begin = border(row);
    lanes_.push_back({row, begin, border(row + 1), begin});
  }
}

inline void TextStream::find_files(const std::string& path) {
  const std::vector<std::string> paths = is_folder(path) ? files_below(path) : std::vector{path};
  const Permutation order(std::ssize(paths), options_.seed, 0);
  for (std::int64_t i = 0; i < std::ssize(paths); ++i) {
    const std::string& name = paths[static_cast<std::size_t>(order(i))];
    detail::refuse_json_lines(name);
    const InputFile file(name);
    detail::refuse_compressed(file);
    const auto size = static_cast<std::int64_t>(file.size());
    if (size > 0) files_.push_back({name, bytes_, bytes_ + size});
    bytes_ += size;
  }
  if (files_.empty()) throw UsageError("'" + path + "' holds no text: choose a file or a folder with some");
}

inline const TextStream::TextFile& TextStream::file_at(std::int64_t place) const {
  return *std::upper_bound(files_.begin(), files_.end(), place % bytes_,
                           [](std::int64_t byte, const TextFile& file) { return byte < file.end; });
}

/// The border of a row's part that is nearest behind `place`: a document's end within half a part, else a line's end,
/// else a character's.
inline std::int64_t TextStream::cut(std::int64_t place) const {
  const TextFile& file = file_at(place);
  const std::int64_t inside = place % bytes_ - file.begin, size = file.end - file.begin;
  if (inside == 0) return place;
  const std::int64_t reach = std::min<std::int64_t>(bytes_ / options_.batch / 2, std::int64_t{1} << 20);
  // A separator may stand around the place.
  const std::int64_t from = std::max<std::int64_t>(0, inside - std::ssize(end_of_text_mark));
  std::string text(static_cast<std::size_t>(std::min(inside + reach, size) - from), '\0');
  InputFile(file.path).read(static_cast<std::uint64_t>(from), std::as_writable_bytes(std::span(text)));
  const auto behind = [&](std::size_t at) { return place + from + static_cast<std::int64_t>(at) - inside; };
  std::size_t at = text.find(end_of_text_mark);
  if (at != std::string::npos && behind(at + end_of_text_mark.size()) >= place)
    return behind(at + end_of_text_mark.size());
  if (inside + reach >= size) return place + size - inside;
  at = text.find('\n', static_cast<std::size_t>(inside - from));
  if (at != std::string::npos) return behind(at + 1);
  at = static_cast<std::size_t>(inside - from);
  while (at + 1 < text.size() && shardlib::detail::continues_character(text[at])) ++at;
  return behind(at);
}

inline void TextStream::read_more(Lane& lane) const {
  if (lane.place == lane.end) lane.place = lane.begin;
  const TextFile& file = file_at(lane.place);
  if (!lane.file || lane.file->path() != file.path) lane.file = std::make_shared<const InputFile>(file.path);
  const std::int64_t at = lane.place % bytes_ - file.begin;
  const std::int64_t count = std::min({detail::text_stream_block, file.end - file.begin - at, lane.end - lane.place});
  const std::size_t before = lane.text.size();
  lane.text.resize(before + static_cast<std::size_t>(count));
  const std::span<char> block = std::span(lane.text).subspan(before);
  lane.file->read(static_cast<std::uint64_t>(at), std::as_writable_bytes(block));
  if (const auto zero = std::find(block.begin(), block.end(), '\0'); zero != block.end())
    throw UsageError("'" + file.path + "' is not a text file: it has a zero byte at " +
                     std::to_string(at + (zero - block.begin())) + "; keep other files out of the folder of --stream");
  lane.place += count;
  lane.idle_bytes += count;
  lane.ends = at + count == file.end - file.begin || lane.place == lane.end;
}

inline void TextStream::put(Lane& lane, std::string_view piece, bool ends) const {
  const bool blank = piece.find_first_not_of(" \t\n\v\f\r") == std::string_view::npos;
  if (!(blank && lane.starts && ends)) {
    std::vector<std::uint32_t> ids = options_.text.tokenizer->encode(piece);
    if (ends && options_.text.end_of_text) ids.push_back(options_.text.tokenizer->end_of_text());
    const std::uint32_t bound = options_.vocabulary > 0 ? options_.vocabulary : std::uint32_t{1} << 31;
    for (const std::uint32_t id : ids) {
      if (id >= bound)
        throw UsageError("a text near byte " +
                         std::to_string((lane.place - 1) % bytes_ + 1 - file_at(lane.place - 1).begin) + " of '" +
                         lane.file->path() + "' has the token id " + std::to_string(id) + ", but the vocabulary has " +
                         std::to_string(bound) +
                         " tokens: choose a larger vocabulary (--vocabulary of the trainers; that of a loaded model is "
                         "fixed), or another tokenizer");
      lane.tokens.push_back(id << 1 | (lane.starts ? 1U : 0U));
      lane.starts = false;
      lane.idle_bytes = 0;
    }
  }
  if (ends) lane.starts = true;
}

/// Tokenizes the next document of `text`, or a piece of it where it is long.
inline void TextStream::tokenize_piece(Lane& lane) const {
  std::size_t searched = 0;
  for (;;) {
    const std::string_view text = std::string_view(lane.text).substr(lane.done);
    const std::size_t at = text.find(end_of_text_mark, searched);
    if (at != std::string::npos) {
      put(lane, text.substr(0, at), true);
      lane.done += at + end_of_text_mark.size();
      return;
    }
    if (lane.ends) {
      lane.ends = false;
      put(lane, text, true);
      lane.done = lane.text.size();
      return;
    }
    if (text.size() >= detail::text_stream_piece) {
      const std::size_t end = detail::last_cut(text, text.size() / 2, text.size() - end_of_text_mark.size());
      put(lane, text.substr(0, end), false);
      lane.done += end;
      return;
    }
    searched = text.size() - std::min(text.size(), end_of_text_mark.size());
    lane.text.erase(0, lane.done);  // once a block, as documents may be small
    lane.done = 0;
    read_more(lane);
  }
}

inline TokenBatch TextStream::next() {
  const auto length = static_cast<std::size_t>(options_.length);
  TokenBatch out = detail::empty_rows(std::ssize(lanes_), options_.length);
  for (std::size_t r = 0; r < lanes_.size(); ++r) {
    Lane& lane = lanes_[r];
    while (lane.tokens.size() - lane.taken < length) {
      tokenize_piece(lane);
      if (lane.idle_bytes > 2 * (lane.end - lane.begin))
        throw UsageError("row " + std::to_string(lane.row) + " of a batch finds only white space in its part of the " +
                         "text, near '" + lane.file->path() + "': choose more text, or a smaller --batch");
    }
    detail::fill_row(std::span(lane.tokens).subspan(lane.taken, length), r * length, length, options_.begin, out);
    lane.taken += length;
    if (2 * lane.taken > lane.tokens.size()) {  // moving what is left costs no more than it cost to make
      lane.tokens.erase(lane.tokens.begin(), lane.tokens.begin() + static_cast<std::ptrdiff_t>(lane.taken));
      lane.taken = 0;
    }
  }
  return out;
}

}  // namespace shardlib::io
