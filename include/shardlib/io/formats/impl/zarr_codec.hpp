// The steps between a zarr chunk's file and its elements: checksum, compressor, delta filter, byte order.
#pragma once

#include <blosc.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/io/file.hpp"
#include "shardlib/io/formats/impl/zarr_compressor.hpp"
#include "shardlib/io/formats/zarr_info.hpp"
#include "shardlib/support/crc32c.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::io::detail {

static_assert(std::endian::native == std::endian::little, "chunks are written as they are in memory, little-endian");

/// The bytes of one chunk in a file: all of it, or a part where chunks share a file.
class FilePart {
 public:
  explicit FilePart(const InputFile& file) : FilePart(file, 0, file.size()) {}
  FilePart(InputFile file, std::uint64_t begin, std::uint64_t size)
      : file_(std::move(file)), begin_(begin), size_(size) {}
  [[nodiscard]] const std::string& path() const { return file_.path(); }
  [[nodiscard]] std::uint64_t size() const { return size_; }
  /// Fills `out` from byte `offset` of the part on. Throws Error where the part ends before.
  void read(std::uint64_t offset, std::span<std::byte> out) const {
    if (offset > size_ || out.size() > size_ - offset)
      throw Error("'" + path() + "': a chunk ends before what it should hold: it is damaged");
    file_.read(begin_ + offset, out);
  }
  [[nodiscard]] Bytes read_all() const {
    Bytes all(static_cast<std::size_t>(size_));
    read(0, all);
    return all;
  }

 private:
  InputFile file_;
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
inline ZarrType zarr_type(std::string_view text, const std::string& where) {
  const auto fail = [&]() {
    throw UsageError(where + ": the dtype \"" + shardlib::detail::excerpt(text) +
                     "\" is not supported: f4, f8, i1 to i8, u1 to u8 and b1 are, each after <, > or |");
  };
  if (text.size() != 3 || std::string_view("<>|").find(text[0]) == std::string_view::npos) fail();
  const ZarrType type{text[1], static_cast<std::size_t>(text[2] - '0'), text[0] == '>' && text[2] != '1'};
  const auto one_of = [&](std::string_view digits) { return digits.find(text[2]) != std::string_view::npos; };
  const bool known = type.kind == 'f'                       ? one_of("48")
                     : type.kind == 'i' || type.kind == 'u' ? one_of("1248")
                                                            : type.kind == 'b' && one_of("1");
  if (!known || (text[0] == '|' && type.bytes > 1)) fail();
  return type;
}

/// True if a chunk's file holds the elements as they are in memory.
inline bool is_raw(const ZarrInfo& info) {
  return info.compressor.id.empty() && !info.checksum && !info.crc32c && !info.delta && info.dtype[0] != '>';
}

/// Throws UsageError, beginning with `where`, unless decode_chunk can read (or encode_chunk write) such chunks.
inline void check_zarr_codec(const ZarrInfo& info, bool write, const std::string& where) {
  const ZarrType type = zarr_type(info.dtype, where + ": key \"dtype\"");
  if (write && info.v3) throw UsageError(where + ": arrays of zarr version 3 are read only: write version 2");
  if (write && type.big_endian) throw UsageError(where + ": big-endian arrays are read only: write \"<\"");
  check_compressor(info.compressor, write, where);
  if (!info.delta) return;
  const ZarrType values = zarr_type(info.delta->dtype, where + ": the delta filter's \"dtype\"");
  const ZarrType stored = zarr_type(info.delta->stored, where + ": the delta filter's \"astype\"");
  for (const ZarrType& t : {type, values, stored})
    if (t.kind != 'i' && t.kind != 'u') throw UsageError(where + ": the delta filter is supported for integers only");
  if (values.bytes != type.bytes || values.big_endian != type.big_endian || stored.bytes > values.bytes)
    throw UsageError(where + ": the delta filter's dtype \"" + info.delta->dtype + "\" and astype \"" +
                     info.delta->stored + "\" do not fit the array's \"" + info.dtype + "\"");
}

/// A checksum of a chunk's bytes, little-endian: CRC-32 before them (v2), or CRC-32C behind them (v3).
inline constexpr std::size_t checksum_bytes = sizeof(std::uint32_t);

inline std::uint32_t crc32_of(std::span<const std::byte> bytes) {
  uLong sum = crc32(0, nullptr, 0);
  while (!bytes.empty()) {  // zlib counts in 32 bits
    const auto piece = bytes.first(std::min<std::size_t>(bytes.size(), 1U << 30));
    sum = crc32(sum, reinterpret_cast<const Bytef*>(piece.data()), static_cast<uInt>(piece.size()));
    bytes = bytes.subspan(piece.size());
  }
  return static_cast<std::uint32_t>(sum);
}

/// The bytes of a chunk without their checksum, if there is one. Throws Error if the two do not match.
inline std::span<const std::byte> checked(const ZarrInfo& info, std::span<const std::byte> file,
                                          const std::string& where) {
  if (!info.checksum && !info.crc32c) return file;
  const auto restore = [&](const std::string& why) {
    return Error(where + ": " + why + ": it is damaged; copy the file again, or make the data again");
  };
  if (file.size() < checksum_bytes)
    throw restore("it has " + std::to_string(file.size()) + " bytes, too few for its checksum");
  std::uint32_t expected = 0;
  const std::size_t size = file.size() - checksum_bytes;
  std::memcpy(&expected, file.data() + (info.crc32c ? size : 0), sizeof expected);
  const auto bytes = file.subspan(info.crc32c ? 0 : checksum_bytes, size);
  if (const std::uint32_t found = info.crc32c ? crc32c(bytes) : crc32_of(bytes); found != expected)
    throw restore("its bytes have the checksum " + hex(found) + ", but " + hex(expected) + " was written with them");
  return bytes;
}

/// Reads all of a chunk and compares it with its checksum. Throws as decode_chunk does.
inline void verify_chunk(const ZarrInfo& info, const FilePart& file, const std::string& where) {
  static_cast<void>(checked(info, file.read_all(), where));
}

inline void swap_bytes(std::span<std::byte> values, std::size_t width) {
  for (std::size_t i = 0; i + width <= values.size(); i += width)
    std::reverse(values.begin() + static_cast<std::ptrdiff_t>(i),
                 values.begin() + static_cast<std::ptrdiff_t>(i + width));
}

/// Calls f with a zero of the integer type.
template <class F>
void with_integer(const ZarrType& type, F f) {
  const bool s = type.kind == 'i';
  switch (type.bytes) {
    case 1:
      return s ? f(std::int8_t{}) : f(std::uint8_t{});
    case 2:
      return s ? f(std::int16_t{}) : f(std::uint16_t{});
    case 4:
      return s ? f(std::int32_t{}) : f(std::uint32_t{});
    default:
      return s ? f(std::int64_t{}) : f(std::uint64_t{});
  }
}

/// Integers of one type as 64 bits, sign-extended, and back: sums modulo 2^64 are right in every width.
inline std::vector<std::uint64_t> widened(std::span<const std::byte> values, const ZarrType& type) {
  std::vector<std::uint64_t> wide(values.size() / type.bytes);
  with_integer(type, [&]<class T>(T one) {
    for (std::size_t i = 0; i < wide.size(); ++i) {
      std::memcpy(&one, values.data() + i * sizeof(T), sizeof(T));
      wide[i] = static_cast<std::uint64_t>(one);
    }
  });
  return wide;
}
inline Bytes narrowed(std::span<const std::uint64_t> wide, const ZarrType& type) {
  Bytes values(wide.size() * type.bytes);
  with_integer(type, [&]<class T>(T one) {
    for (std::size_t i = 0; i < wide.size(); ++i) {
      one = static_cast<T>(wide[i]);
      std::memcpy(values.data() + i * sizeof(T), &one, sizeof(T));
    }
  });
  return values;
}

/// The `count` elements of a chunk in this machine's byte order, compared with its checksum if it has one. Throws
/// Error, beginning with `where`, if damaged.
inline Bytes decode_chunk(const ZarrInfo& info, Bytes file, std::size_t count, const std::string& where) {
  const ZarrType type = zarr_type(info.dtype, where);
  const ZarrType stored = info.delta ? zarr_type(info.delta->stored, where) : type;
  const std::size_t expected = count * stored.bytes;
  const std::span<const std::byte> bytes = checked(info, file, where);
  if (!info.compressor.id.empty())
    file = decompressed(info.compressor, bytes, expected, where);
  else if (bytes.size() != file.size())
    file = Bytes(bytes.begin(), bytes.end());
  if (file.size() != expected)
    throw Error(where + ": it has " + std::to_string(file.size()) + " bytes instead of " + std::to_string(expected) +
                ": it is damaged");
  if (stored.big_endian) swap_bytes(file, stored.bytes);
  if (!info.delta) return file;
  std::vector<std::uint64_t> wide = widened(file, stored);
  for (std::size_t i = 1; i < wide.size(); ++i) wide[i] += wide[i - 1];
  return narrowed(wide, type);
}

/// The beginning of the blosc data in a file.
struct BloscHeader {
  std::array<std::byte, BLOSC_MIN_HEADER_LENGTH> bytes{};
  std::size_t begin = 0, size = 0;  ///< of that part in the file
  std::size_t decompressed = 0, compressed = 0, block = 0, item = 0;
  bool stored = false;  ///< not compressed at all
};

/// Nothing where the file does not begin so.
inline std::optional<BloscHeader> blosc_header(const ZarrInfo& info, const FilePart& file) {
  BloscHeader h;
  h.begin = info.checksum ? checksum_bytes : 0;
  const std::size_t end = info.crc32c ? checksum_bytes : 0;
  if (file.size() < h.begin + h.bytes.size() + end) return std::nullopt;
  h.size = file.size() - h.begin - end;
  file.read(h.begin, h.bytes);
  int flags = 0;
  if (blosc_cbuffer_validate(h.bytes.data(), h.size, &h.decompressed) < 0) return std::nullopt;
  blosc_cbuffer_sizes(h.bytes.data(), &h.decompressed, &h.compressed, &h.block);
  blosc_cbuffer_metainfo(h.bytes.data(), &h.item, &flags);
  h.stored = (flags & BLOSC_MEMCPYED) != 0;
  return h;
}

/// The number of elements that are compressed together, or 0 if no part of the chunk's file can be decoded alone.
inline std::size_t block_elements(const ZarrInfo& info, const FilePart& file) {
  if (info.compressor.id != "blosc" || info.delta) return 0;  // a delta needs all that stands before
  const auto header = blosc_header(info, file);
  const std::size_t item = zarr_type(info.dtype, file.path()).bytes;
  return header && header->item == item && header->block % item == 0 ? header->block / item : 0;
}

/// Elements [first, first + count) of a chunk of `elements`, where block_elements gives a number. Reads and decodes
/// their blocks alone, so that damage elsewhere in the file goes unnoticed: see verify_chunk. Throws as decode_chunk
/// does.
inline Bytes decode_part(const ZarrInfo& info, const FilePart& file, std::size_t elements, std::size_t first,
                         std::size_t count, const std::string& where) {
  const auto damaged = [&](const std::string& why) -> Error { return Error(where + ": " + why + ": it is damaged"); };
  const ZarrType type = zarr_type(info.dtype, where);
  const auto header = blosc_header(info, file);
  if (!header || header->item != type.bytes || header->block == 0) throw damaged("it holds no valid blosc data");
  if (header->decompressed != elements * type.bytes)
    throw damaged("it decompresses to " + std::to_string(header->decompressed) + " bytes instead of " +
                  std::to_string(elements * type.bytes));
  Bytes out(count * type.bytes);
  if (header->stored) {
    file.read(header->begin + header->bytes.size() + first * type.bytes, out);
  } else {
    // blosc_getitem takes the whole file, but looks at the header, the blocks' places and the blocks it needs: only
    // these are read, the rest stays zero.
    const std::size_t blocks = (header->decompressed + header->block - 1) / header->block;
    const std::size_t begin = header->bytes.size() + blocks * sizeof(std::int32_t);
    if (begin > header->size) throw damaged("it is too short for its blocks");
    std::vector<std::int32_t> places(blocks);
    file.read(header->begin + header->bytes.size(), std::as_writable_bytes(std::span(places)));
    Bytes sparse(header->size);
    std::ranges::copy(header->bytes, sparse.begin());
    std::ranges::copy(std::as_bytes(std::span(places)), sparse.begin() + BLOSC_MIN_HEADER_LENGTH);
    for (std::size_t b = first * type.bytes / header->block; b * header->block < (first + count) * type.bytes; ++b) {
      const auto from = static_cast<std::int64_t>(places[b]);
      auto to = static_cast<std::int64_t>(header->size);  // blocks need not stand in their order
      if (from < static_cast<std::int64_t>(begin) || from >= to) throw damaged("a block lies outside of it");
      for (const std::int64_t place : places) to = place > from ? std::min(to, place) : to;
      file.read(header->begin + static_cast<std::uint64_t>(from),
                std::span(sparse).subspan(static_cast<std::size_t>(from), static_cast<std::size_t>(to - from)));
    }
    const int n = blosc_getitem(sparse.data(), static_cast<int>(first), static_cast<int>(count), out.data());
    if (n < 0 || static_cast<std::size_t>(n) != out.size()) throw damaged("blosc cannot decompress it");
  }
  if (type.big_endian) swap_bytes(out, type.bytes);
  return out;
}

/// A chunk's bytes without their checksum.
inline Bytes compressed(const ZarrInfo& info, std::span<const std::byte> values, const std::string& where) {
  Bytes bytes(values.begin(), values.end());
  std::size_t width = zarr_type(info.dtype, where).bytes;
  if (info.delta) {
    const ZarrType stored = zarr_type(info.delta->stored, where);
    const std::vector<std::uint64_t> wide = widened(values, zarr_type(info.delta->dtype, where));
    std::vector<std::uint64_t> steps = wide;
    for (std::size_t i = wide.size(); i-- > 1;) steps[i] -= wide[i - 1];
    bytes = narrowed(steps, stored);
    // A narrower type may be unable to hold a difference.
    std::vector<std::uint64_t> back = widened(bytes, stored);
    for (std::size_t i = 1; i < back.size(); ++i) back[i] += back[i - 1];
    if (narrowed(back, zarr_type(info.delta->dtype, where)) != Bytes(values.begin(), values.end()))
      throw UsageError(where + ": a difference does not fit the delta filter's astype \"" + info.delta->stored +
                       "\": choose a wider one");
    width = stored.bytes;
  }
  if (!info.compressor.id.empty()) bytes = compressed_by(info.compressor, bytes, width, where);
  return bytes;
}

inline Bytes encode_chunk(const ZarrInfo& info, std::span<const std::byte> values, const std::string& where) {
  Bytes bytes = compressed(info, values, where);
  if (!info.checksum) return bytes;
  const std::uint32_t sum = crc32_of(bytes);
  Bytes file(checksum_bytes + bytes.size());
  std::memcpy(file.data(), &sum, checksum_bytes);
  std::ranges::copy(bytes, file.begin() + checksum_bytes);
  return file;
}

}  // namespace shardlib::io::detail
