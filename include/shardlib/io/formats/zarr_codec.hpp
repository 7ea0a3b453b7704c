// The steps between a zarr chunk's file and its elements: checksum, compressor, delta filter, byte order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "shardlib/io/file.hpp"
#include "shardlib/io/formats/zarr_info.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::io::detail {

/// The bytes of one chunk in a file: all of it, or a part where chunks share a file.
class FilePart {
 public:
  explicit FilePart(const InputFile& file) : FilePart(file, 0, file.size()) {}
  FilePart(const InputFile& file, std::uint64_t begin, std::uint64_t size) : file_(file), begin_(begin), size_(size) {}
  [[nodiscard]] const std::string& path() const { return file_.path(); }
  [[nodiscard]] std::uint64_t size() const { return size_; }
  /// Fills `out` from byte `offset` of the part on. Throws Error where the part ends before.
  void read(std::uint64_t offset, std::span<std::byte> out) const;
  [[nodiscard]] Bytes read_all() const;

 private:
  const InputFile& file_;
  std::uint64_t begin_, size_;
};

/// A numpy dtype.
struct ZarrType {
  char kind = 'f';  ///< f, i, u or b
  std::size_t bytes = 4;
  bool big_endian = false;
  friend bool operator==(const ZarrType&, const ZarrType&) = default;
};
/// Throws UsageError, beginning with `where`, for a dtype that is not supported.
[[nodiscard]] ZarrType zarr_type(std::string_view text, const std::string& where);

/// Throws UsageError, beginning with `where`, unless decode_chunk can read (or encode_chunk write) such chunks.
void check_zarr_codec(const ZarrInfo& info, bool write, const std::string& where);

/// True if a chunk's file holds the elements as they are in memory.
[[nodiscard]] bool is_raw(const ZarrInfo& info);

/// The `count` elements of a chunk in this machine's byte order, compared with its checksum if it has one. Throws
/// Error, beginning with `where`, if damaged.
[[nodiscard]] Bytes decode_chunk(const ZarrInfo& info, Bytes file, std::size_t count, const std::string& where);
/// Reads all of a chunk and compares it with its checksum. Throws as decode_chunk does.
void verify_chunk(const ZarrInfo& info, const FilePart& file, const std::string& where);
/// The number of elements that are compressed together, or 0 if no part of the chunk's file can be decoded alone.
[[nodiscard]] std::size_t block_elements(const ZarrInfo& info, const FilePart& file);
/// Elements [first, first + count) of a chunk of `elements`, where block_elements gives a number. Reads and decodes
/// their blocks alone, so that damage elsewhere in the file goes unnoticed: see verify_chunk. Throws as decode_chunk
/// does.
[[nodiscard]] Bytes decode_part(const ZarrInfo& info, const FilePart& file, std::size_t elements, std::size_t first,
                                std::size_t count, const std::string& where);
[[nodiscard]] Bytes encode_chunk(const ZarrInfo& info, std::span<const std::byte> values, const std::string& where);

}  // namespace shardlib::io::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/formats/impl/zarr_codec.hpp"
#endif
