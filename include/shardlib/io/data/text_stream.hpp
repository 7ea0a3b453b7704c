// Batches straight from text files that are tokenized as they are read. They need no preparation, but a run does not
// resume exactly.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/io/data/loader.hpp"
#include "shardlib/io/data/token_source.hpp"
#include "shardlib/io/file.hpp"
#include "shardlib/support/inline.hpp"

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
  ~TextStream();
  TextStream(const TextStream&) = delete;
  TextStream& operator=(const TextStream&) = delete;

  /// The rows' next batch.
  [[nodiscard]] TokenBatch next();

 private:
  struct TextFile {
    std::string path;
    std::int64_t begin, end;  ///< its bytes among all
  };
  struct Lane;
  [[nodiscard]] const TextFile& file_at(std::int64_t place) const;
  [[nodiscard]] std::int64_t cut(std::int64_t place) const;
  void find_files(const std::string& path);
  void read_more(Lane& lane) const;
  void tokenize_piece(Lane& lane) const;
  void put(Lane& lane, std::string_view piece, bool ends) const;

  TextStreamOptions options_;
  std::vector<TextFile> files_;
  std::int64_t bytes_ = 0;  ///< of all files
  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace shardlib::io

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/data/impl/text_stream.hpp"
#endif
