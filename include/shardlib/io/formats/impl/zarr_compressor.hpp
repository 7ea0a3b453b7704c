// The compressors of zarr chunks: blosc, zlib, gzip (which is read only) and zstd.
#pragma once

#include <blosc.h>
#include <zlib.h>
#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "shardlib/io/file.hpp"
#include "shardlib/io/formats/zarr_info.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::io::detail {

/// Throws UsageError, beginning with `where`, unless chunks of this compressor, if there is one, can be read (or
/// written).
inline void check_compressor(const ZarrCompressor& c, bool write, const std::string& where) {
  const bool known = c.id.empty() || c.id == "blosc" || c.id == "zlib" || c.id == "zstd" || (!write && c.id == "gzip");
  if (!known)
    throw UsageError(
        where + ": the compressor \"" + shardlib::detail::excerpt(c.id) + "\" is not supported: " +
        (write ? "write none, blosc, zlib or zstd" : "none, blosc, zlib, gzip and zstd are; rewrite the array"));
  if (!write || c.id.empty()) return;
  if (c.id == "blosc" && blosc_compname_to_compcode(c.codec.c_str()) < 0)
    throw UsageError(where + ": this blosc library has no codec \"" + c.codec + "\"");
  const int least = c.id == "zstd" ? ZSTD_minCLevel() : 0, most = c.id == "zstd" ? ZSTD_maxCLevel() : 9;
  if (c.level < least || c.level > most || c.shuffle < 0 || c.shuffle > 2 || c.block < 0)
    throw UsageError(where + ": the compressor's level is " + std::to_string(least) + " to " + std::to_string(most) +
                     ", its shuffle 0 to 2, its block at least 0");
}

inline Error wrong_length(const std::string& where, std::uint64_t bytes, std::size_t expected) {
  return Error(where + ": it decompresses to " + std::to_string(bytes) + " bytes instead of " +
               std::to_string(expected) + ": it is damaged");
}
/// Throws unless so few bytes can hold a chunk, of which each holds `densest` at most: a damaged size must not allocate
/// without bound.
inline void check_density(std::span<const std::byte> file, std::size_t expected, std::size_t densest,
                          const std::string& where) {
  if (expected / densest > file.size())
    throw Error(where + ": " + std::to_string(file.size()) + " bytes cannot hold a chunk of " +
                std::to_string(expected) + ": it is damaged");
}

inline Bytes unblosc(std::span<const std::byte> file, std::size_t expected, const std::string& where) {
  std::size_t bytes = 0;
  if (blosc_cbuffer_validate(file.data(), file.size(), &bytes) < 0)
    throw Error(where + ": it holds no valid blosc data: it is damaged");
  if (bytes != expected) throw wrong_length(where, bytes, expected);
  Bytes out(expected);
  const int n = blosc_decompress_ctx(file.data(), out.data(), out.size(), 1);
  if (n < 0 || static_cast<std::size_t>(n) != expected) {
    const char* codec = blosc_cbuffer_complib(file.data());
    throw Error(where + ": blosc cannot decompress it (library " + (codec != nullptr ? codec : "unknown") +
                "): it is damaged, or its codec is not built in");
  }
  return out;
}

/// Decodes zlib or gzip, as the header says.
inline Bytes inflated(std::span<const std::byte> file, std::size_t expected, const std::string& where) {
  check_density(file, expected, 1032, where);
  Bytes out(expected);
  z_stream stream{};
  if (inflateInit2(&stream, 15 + 32) != Z_OK) throw Error(where + ": zlib cannot start");
  stream.next_in = const_cast<Bytef*>(reinterpret_cast<const Bytef*>(file.data()));
  std::size_t left_in = file.size(), left_out = out.size();
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  int status = Z_OK;
  while (status == Z_OK) {  // zlib counts in 32 bits
    const auto in = static_cast<uInt>(std::min<std::size_t>(left_in, 1U << 30));
    const auto room = static_cast<uInt>(std::min<std::size_t>(left_out, 1U << 30));
    stream.avail_in = in;
    stream.avail_out = room;
    status = inflate(&stream, Z_NO_FLUSH);
    left_in -= in - stream.avail_in;
    left_out -= room - stream.avail_out;
  }
  inflateEnd(&stream);
  if (status != Z_STREAM_END || left_in != 0 || left_out != 0)
    throw Error(where + ": it does not decompress to " + std::to_string(expected) + " bytes: it is damaged");
  return out;
}

/// What frames of zstd say that they hold together, or nothing where one of them does not say it. Throws Error unless
/// they are whole, with nothing after them.
inline std::optional<std::uint64_t> content_size(std::span<const std::byte> frames, const std::string& where) {
  std::uint64_t sum = 0;
  bool known = true;
  while (!frames.empty()) {
    const std::size_t size = ZSTD_findFrameCompressedSize(frames.data(), frames.size());
    if (ZSTD_isError(size) != 0)
      throw Error(where + ": it does not consist of whole frames of zstd (" + ZSTD_getErrorName(size) +
                  "): it is damaged");
    const std::uint64_t content = ZSTD_getFrameContentSize(frames.data(), frames.size());
    known = known && content != ZSTD_CONTENTSIZE_UNKNOWN && content != ZSTD_CONTENTSIZE_ERROR;
    sum += content;
    frames = frames.subspan(size);
  }
  if (!known) return std::nullopt;
  return sum;
}

/// Decodes frames of zstd (RFC 8878): the contents of several follow each other. A writer that does not know the length
/// of its data before it compresses them leaves it out of the frame.
inline Bytes unzstd(std::span<const std::byte> file, std::size_t expected, const std::string& where) {
  if (const auto bytes = content_size(file, where); bytes && *bytes != expected)
    throw wrong_length(where, *bytes, expected);
  check_density(file, expected, ZSTD_BLOCKSIZE_MAX / 4, where);  // a block has 4 bytes at least
  Bytes out(expected);
  const std::size_t n = ZSTD_decompress(out.data(), out.size(), file.data(), file.size());
  if (ZSTD_isError(n) == 0 && n != expected) throw wrong_length(where, n, expected);
  if (ZSTD_isError(n) != 0)
    throw Error(where +
                (ZSTD_getErrorCode(n) == ZSTD_error_dstSize_tooSmall
                     ? ": it decompresses to more than " + std::to_string(expected) + " bytes"
                     : ": zstd cannot decompress it (" + std::string(ZSTD_getErrorName(n)) + ")") +
                ": it is damaged");
  return out;
}

/// The `expected` bytes that were compressed. Throws Error, beginning with `where`, if these are not what is there.
inline Bytes decompressed(const ZarrCompressor& c, std::span<const std::byte> file, std::size_t expected,
                          const std::string& where) {
  if (c.id == "blosc") return unblosc(file, expected, where);
  return c.id == "zstd" ? unzstd(file, expected, where) : inflated(file, expected, where);
}

/// Compresses elements of `width` bytes each.
inline Bytes compressed_by(const ZarrCompressor& c, std::span<const std::byte> bytes, std::size_t width,
                           const std::string& where) {
  if (c.id == "blosc") {
    if (bytes.size() > BLOSC_MAX_BUFFERSIZE)
      throw UsageError(where + ": blosc takes less than 2 GiB: choose smaller chunks");
    Bytes out(bytes.size() + BLOSC_MAX_OVERHEAD);
    const int n = blosc_compress_ctx(c.level, c.shuffle, width, bytes.size(), bytes.data(), out.data(), out.size(),
                                     c.codec.c_str(), static_cast<std::size_t>(c.block), 1);
    if (n <= 0) throw Error(where + ": blosc cannot compress it (error " + std::to_string(n) + ")");
    out.resize(static_cast<std::size_t>(n));
    return out;
  }
  if (c.id == "zstd") {
    Bytes out(ZSTD_compressBound(bytes.size()));
    const std::size_t n = ZSTD_compress(out.data(), out.size(), bytes.data(), bytes.size(), c.level);
    if (ZSTD_isError(n) != 0) throw Error(where + ": zstd cannot compress it (" + ZSTD_getErrorName(n) + ")");
    out.resize(n);
    return out;
  }
  uLongf size = compressBound(static_cast<uLong>(bytes.size()));
  Bytes out(size);
  if (compress2(reinterpret_cast<Bytef*>(out.data()), &size, reinterpret_cast<const Bytef*>(bytes.data()),
                static_cast<uLong>(bytes.size()), c.level) != Z_OK)
    throw Error(where + ": zlib cannot compress it");
  out.resize(size);
  return out;
}

}  // namespace shardlib::io::detail
