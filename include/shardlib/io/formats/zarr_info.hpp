// The metadata of a zarr array: the content of `.zarray` (v2) or of `zarr.json` (v3).
#pragma once

#include <optional>
#include <string>

#include "shardlib/io/box.hpp"

namespace shardlib::io {

/// The compressor of chunks. Arrays are written with none, blosc, zlib or zstd, and read with gzip, too.
struct ZarrCompressor {
  std::string id;             ///< "" (none), "blosc", "zlib", "zstd" or "gzip"
  std::string codec = "lz4";  ///< blosc's: lz4, lz4hc, zstd, zlib, blosclz
  int level = 5;              ///< effort of the compressor, 0 to 9, zstd's to 22
  int shuffle = 1;            ///< blosc's: 0 none, 1 bytes, 2 bits
  int block = 0;  ///< blosc's: about the bytes that are compressed together, as numcodecs has it; 0: it chooses
};

/// The filter "delta": differences of neighbors in the flattened chunk; integers only.
struct ZarrDelta {
  std::string dtype;   ///< dtype of the values
  std::string stored;  ///< dtype of the differences ("astype"); as wide as dtype or narrower
};

/// Chunks that share files, zarr v3's codec `sharding_indexed`: a file begins or ends with an index, which says where
/// each of its chunks is.
struct ZarrSharding {
  Index shape;            ///< elements of one file: multiples of the chunks
  bool at_start = false;  ///< the index stands before the chunks
  bool checksum = true;   ///< behind the index stands its CRC-32C
};

/// The content of `.zarray` or `zarr.json`. Arrays are in C order.
struct ZarrInfo {
  Index shape;
  Index chunks;                                   ///< as many as shape, at least 1 each
  std::string dtype = "<f4";                      ///< numpy's: byte order (< > |), kind (f i u b), bytes
  std::optional<ZarrDelta> delta = std::nullopt;  ///< the filter, if there is one
  ZarrCompressor compressor = {};                 ///< compressor of each chunk
  std::string fill_value = "0";  ///< JSON: a number, "NaN" in quotes, or null (then a missing chunk has no value)
  std::string separator = ".";   ///< between the places of a chunk in its file's name: "." or "/"
  bool checksum = false;         ///< a chunk's file begins with the CRC-32 of its other bytes: numcodecs' "crc32"
  bool v3 = false;               ///< a `zarr.json`, which is only read; the fields below are v3's
  bool prefixed = false;         ///< the file's name begins with "c" and the separator
  bool crc32c = false;           ///< a chunk ends with the CRC-32C of its other bytes
  std::optional<ZarrSharding> sharding = std::nullopt;  ///< the codec, if there is one
  /// The elements of one file along each dim.
  [[nodiscard]] const Index& file_shape() const { return sharding ? sharding->shape : chunks; }
};

}  // namespace shardlib::io
