// zarr groups and arrays on a file system: v2, and for reading v3 (zarr-specs.readthedocs.io).
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/io/box.hpp"
#include "shardlib/io/file.hpp"
#include "shardlib/io/formats/zarr_info.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::io {

/// The name of a C++ type in numpy: "<f4" for float. `zarr_dtype<float>()`
template <class T>
requires std::is_arithmetic_v<T> std::string zarr_dtype() {
  if (std::is_same_v<T, bool>) return "|b1";
  const char kind = std::is_floating_point_v<T> ? 'f' : std::is_signed_v<T> ? 'i' : 'u';
  return std::string(sizeof(T) == 1 ? "|" : "<") + kind + static_cast<char>('0' + sizeof(T));
}

/// The options of reading an array.
struct ZarrOpen {
  bool missing_is_error = false;                    ///< a chunk without a file is an error, not fill_value
  std::size_t cache_bytes = std::size_t{64} << 20;  ///< what was decompressed is kept for the next read
};

/// One array with its `path` and its `info`. Copies share it, and reads are thread-safe. A chunk has one writer, which
/// writes it whole and never reads it. Errors are UsageError for missing or unsupported data, Error for damaged data;
/// both name file and key.
class ZarrArray {
 public:
  /// Reads the `.zarray` or `zarr.json` of an existing array.
  [[nodiscard]] static ZarrArray open(const std::string& path, ZarrOpen options = {});
  /// Creates the folder and its `.zarray`. Throws UsageError if there already is an array.
  static ZarrArray create(const std::string& path, const ZarrInfo& info);

  [[nodiscard]] const std::string& path() const;
  [[nodiscard]] const ZarrInfo& info() const;
  /// Bytes of one element; `size` counts the elements of the array, `chunk_size` those of one chunk.
  [[nodiscard]] std::size_t item_bytes() const;
  [[nodiscard]] std::int64_t size() const;
  [[nodiscard]] std::int64_t chunk_size() const;
  /// The number of chunks along each dim.
  [[nodiscard]] Index grid() const;
  /// The file of a chunk, relative to path(): "0.1". Several chunks share it where there is ZarrInfo::sharding.
  [[nodiscard]] std::string chunk_key(const Index& chunk) const;

  /// The hyper-rectangle of `shape` at `offset`, row-major, in this machine's byte order.
  void read_bytes(const Index& offset, const Index& shape, std::span<std::byte> out) const;
  /// The same as elements of T, which must be the type of the array.
  template <class T>
  void read(const Index& offset, const Index& shape, std::span<T> out) const {
    check_type(zarr_dtype<T>());
    read_bytes(offset, shape, std::as_writable_bytes(out));
  }
  /// Reads the whole array.
  template <class T>
  requires(!std::is_same_v<T, bool>) [[nodiscard]] std::vector<T> read_all() const {
    check_type(zarr_dtype<T>());
    std::vector<T> all(static_cast<std::size_t>(size()));
    read_bytes(Index(info().shape.size(), 0), info().shape, std::as_writable_bytes(std::span(all)));
    return all;
  }

  /// Writes one chunk (as `write_chunk` does): its chunk_size() elements, or at an edge only those within the array.
  void write_chunk_bytes(const Index& chunk, std::span<const std::byte> values) const;
  template <class T>
  void write_chunk(const Index& chunk, std::span<const T> values) const {
    check_type(zarr_dtype<T>());
    write_chunk_bytes(chunk, std::as_bytes(values));
  }
  /// Writes every chunk, as `write_all` does.
  void write_all_bytes(std::span<const std::byte> values) const;
  template <class T>
  void write_all(std::span<const T> values) const {
    check_type(zarr_dtype<T>());
    write_all_bytes(std::as_bytes(values));
  }
  /// Changes the shape in `.zarray`; chunks stay as they are. For writers that learn the length at the end.
  void resize(const Index& shape);

  /// The contents of `.zattrs`, which `set_attributes` writes. For v3: `attributes` of `zarr.json`.
  [[nodiscard]] nlohmann::json attributes() const;
  void set_attributes(const nlohmann::json& attributes) const;

 private:
  struct Impl;
  explicit ZarrArray(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  void check_type(const std::string& dtype) const;
  const Bytes& fill_of(const Index& chunk) const;
  struct Piece;
  Piece cached(const Index& chunk, bool whole, std::size_t element) const;
  void copy_from_chunk(const Index& chunk, const Index& box, const Index& chunk_strides, std::size_t from,
                       const Index& out_strides, std::byte* to) const;
  std::shared_ptr<Impl> impl_;
};

/// A folder of groups and arrays, `path`. `array` opens one below it; `has_array` looks for one.
class ZarrGroup {
 public:
  /// Opens a group. Throws UsageError if there is no `.zgroup` and no `zarr.json` of a group.
  [[nodiscard]] static ZarrGroup open(const std::string& path);
  /// Creates the folder and its `.zgroup`, or opens an existing group.
  static ZarrGroup create(const std::string& path);

  [[nodiscard]] const std::string& path() const { return path_; }
  /// The names of the arrays directly below, sorted.
  [[nodiscard]] std::vector<std::string> arrays() const;
  [[nodiscard]] bool has_array(const std::string& name) const;
  [[nodiscard]] ZarrArray array(const std::string& name, ZarrOpen options = {}) const;

  /// The contents of `.zattrs`, which `set_attributes` writes.
  [[nodiscard]] nlohmann::json attributes() const;
  void set_attributes(const nlohmann::json& attributes) const;
  /// The attribute as an integer; throws Error where it is missing or none.
  [[nodiscard]] std::int64_t integer_attribute(const std::string& name) const;

 private:
  explicit ZarrGroup(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

}  // namespace shardlib::io

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/formats/impl/zarr.hpp"
#endif
