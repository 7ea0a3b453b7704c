// The state of a ZarrArray: its metadata, the decoded chunks, and the places of chunks, also in files that they share.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "shardlib/io/box.hpp"
#include "shardlib/io/file.hpp"
#include "shardlib/io/formats/impl/zarr_codec.hpp"
#include "shardlib/io/formats/impl/zarr_json.hpp"
#include "shardlib/io/formats/zarr.hpp"
#include "shardlib/io/formats/zarr_info.hpp"
#include "shardlib/support/crc32c.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::io {

namespace detail {

// ---- chunks that share a file (ZarrSharding) ------------------------------------------------------------------------

/// The index of one file: the place and the size of each of its chunks, in C order.
struct ShardIndex {
  struct Entry {
    std::uint64_t begin = 0, size = 0;
  };
  static constexpr std::uint64_t none = ~std::uint64_t{0};  ///< both numbers of a chunk that is not there
  std::vector<Entry> entries;
};
static_assert(sizeof(ShardIndex::Entry) == 16);

/// The number of chunks in a file along each dim.
inline Index chunks_of_shard(const ZarrInfo& info) {
  Index counts;
  for (std::size_t i = 0; i < info.chunks.size(); ++i) counts.push_back(info.sharding->shape[i] / info.chunks[i]);
  return counts;
}

/// Throws Error, beginning with `where`, where the index is damaged or names bytes outside of the file.
inline ShardIndex read_shard_index(const ZarrInfo& info, const InputFile& file, const std::string& where) {
  const auto damaged = [&](const std::string& why) {
    return Error(where + ": " + why + ": it is damaged; copy the file again, or make the data again");
  };
  const auto count = static_cast<std::uint64_t>(volume(chunks_of_shard(info)));
  const std::uint64_t sum_bytes = info.sharding->checksum ? sizeof(std::uint32_t) : 0;
  if (file.size() < sum_bytes || (file.size() - sum_bytes) / sizeof(ShardIndex::Entry) < count)
    throw damaged("it has " + std::to_string(file.size()) + " bytes, too few for the index of its " +
                  std::to_string(count) + " chunks");
  const std::uint64_t bytes = count * sizeof(ShardIndex::Entry);
  Bytes stored(static_cast<std::size_t>(bytes + sum_bytes));
  file.read(info.sharding->at_start ? 0 : file.size() - stored.size(), stored);
  const auto index = std::span(stored).first(static_cast<std::size_t>(bytes));
  if (info.sharding->checksum) {
    std::uint32_t expected = 0;
    std::memcpy(&expected, stored.data() + bytes, sizeof expected);
    if (const std::uint32_t found = crc32c(index); found != expected)
      throw damaged("its index has the checksum " + hex(found) + ", but " + hex(expected) + " was written with it");
  }
  ShardIndex result;
  result.entries.resize(static_cast<std::size_t>(count));
  std::memcpy(result.entries.data(), index.data(), index.size());
  for (std::size_t i = 0; i < result.entries.size(); ++i) {
    const auto [begin, size] = result.entries[i];
    if (begin == ShardIndex::none && size == ShardIndex::none) continue;
    if (size > file.size() || begin > file.size() - size)
      throw damaged("its index has chunk " + std::to_string(i) + " at byte " + std::to_string(begin) + " with " +
                    std::to_string(size) + " bytes, but it has " + std::to_string(file.size()));
  }
  return result;
}

/// The indices of the files that were read last. Thread-safe.
class ShardIndices {
 public:
  /// The place of a chunk in `file`, which is the one of its shard; nothing if it is not there.
  [[nodiscard]] std::optional<ShardIndex::Entry> find(const ZarrInfo& info, const Index& chunk, const InputFile& file,
                                                      const std::string& where) {
    const Index counts = chunks_of_shard(info), strides = row_major_strides(counts);
    Index shard;
    std::size_t place = 0;
    for (std::size_t i = 0; i < chunk.size(); ++i) {
      shard.push_back(chunk[i] / counts[i]);
      place += static_cast<std::size_t>(chunk[i] % counts[i] * strides[i]);
    }
    const ShardIndex::Entry entry = index_of(info, shard, file, where)->entries[place];
    if (entry.begin == ShardIndex::none && entry.size == ShardIndex::none) return std::nullopt;
    return entry;
  }

 private:
  std::shared_ptr<const ShardIndex> index_of(const ZarrInfo& info, const Index& shard, const InputFile& file,
                                             const std::string& where) {
    {
      const std::lock_guard lock(mutex_);
      if (const auto hit = indices_.find(shard); hit != indices_.end()) return hit->second;
    }
    auto index = std::make_shared<const ShardIndex>(read_shard_index(info, file, where));
    const std::lock_guard lock(mutex_);
    if (chunks_ > most_chunks) {
      indices_.clear();
      chunks_ = 0;
    }
    chunks_ += index->entries.size();
    indices_[shard] = index;
    return index;
  }

  static constexpr std::size_t most_chunks = std::size_t{1} << 20;  ///< 16 MiB
  std::mutex mutex_;
  std::map<Index, std::shared_ptr<const ShardIndex>> indices_;
  std::size_t chunks_ = 0;
};

// ---- the array ------------------------------------------------------------------------------------------------------

/// Decoded chunks, or blocks of them, up to a number of bytes; what was used longest ago goes first. Thread-safe.
class DecodedCache {
 public:
  /// A chunk, and the element in it at which the values begin.
  using Key = std::pair<Index, std::size_t>;
  using Values = std::shared_ptr<const Bytes>;

  /// Null where it is not there.
  [[nodiscard]] Values find(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto hit = places_.find(key);
    if (hit == places_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, hit->second);
    return hit->second->second;
  }
  void keep(const Key& key, const Values& values, std::size_t most_bytes) {
    const std::lock_guard lock(mutex_);
    if (places_.contains(key)) return;  // another thread has decoded it too
    entries_.emplace_front(key, values);
    places_[key] = entries_.begin();
    bytes_ += values->size();
    while (!entries_.empty() && bytes_ > most_bytes) {
      bytes_ -= entries_.back().second->size();
      places_.erase(entries_.back().first);
      entries_.pop_back();
    }
  }

 private:
  std::mutex mutex_;
  std::list<std::pair<Key, Values>> entries_;  // the latest used first
  std::map<Key, std::list<std::pair<Key, Values>>::iterator> places_;
  std::size_t bytes_ = 0;
};

}  // namespace detail

struct ZarrArray::Impl {
  std::string path;
  ZarrInfo info;
  ZarrOpen options;
  detail::ZarrType type;
  Bytes fill;  ///< one element; empty for null
  detail::ShardIndices indices;
  detail::DecodedCache cache;
  /// The number of a chunk's elements that can be decoded alone, read from its first file; 0: only whole chunks can.
  static constexpr std::size_t unknown = ~std::size_t{0};
  std::atomic<std::size_t> block = unknown;
  std::mutex mutex;
  std::vector<bool> verified;  ///< the chunks of an array of one dim that were compared with their checksums

  Impl(std::string folder, ZarrInfo what, ZarrOpen how, bool write)
      : path(std::move(folder)), info(std::move(what)), options(how) {
    const std::string where = "'" + path + (info.v3 ? "/zarr.json'" : "/.zarray'");
    detail::check_zarr_codec(info, write, where);
    type = detail::zarr_type(info.dtype, where);
    fill = detail::fill_bytes(info.fill_value, type, where);
    if (info.separator != "." && info.separator != "/")
      throw UsageError(where + ": key \"" + (info.v3 ? "separator" : "dimension_separator") + "\": \"" +
                       shardlib::detail::excerpt(info.separator) + "\" is neither . nor /");
    const ZarrInfo& array = info;
    for (const Index* sizes : {&array.chunks, &array.file_shape()})
      if (info.shape.size() != sizes->size())
        throw Error(where + ": the shape " + detail::show_shape(info.shape) + " and the chunks " +
                    detail::show_shape(*sizes) + " differ in the number of dims");
    for (std::size_t i = 0; i < info.chunks.size(); ++i)
      if (info.chunks[i] > 0 && info.file_shape()[i] % info.chunks[i] != 0)
        throw Error(where + ": the chunks " + detail::show_shape(info.chunks) + " do not divide the files' " +
                    detail::show_shape(info.file_shape()));
    // No product of sizes may overflow below.
    for (const Index* sizes : {&array.shape, &array.chunks, &array.file_shape()}) {
      std::int64_t bytes = static_cast<std::int64_t>(type.bytes);
      for (const auto size : *sizes)
        if (size < (sizes == &array.shape ? 0 : 1) ||
            __builtin_mul_overflow(bytes, std::max<std::int64_t>(size, 1), &bytes))
          throw Error(where + ": " + detail::show_shape(*sizes) + " are not sizes of an array");
    }
  }

  /// Compares a chunk with its checksum, if it has one, before the first part of the chunk is decoded.
  void verify(const ZarrArray& array, std::int64_t chunk, const detail::FilePart& file) {
    if (!info.checksum && !info.crc32c) return;
    const auto place = static_cast<std::size_t>(chunk);
    {
      const std::lock_guard lock(mutex);
      verified.resize(std::max(verified.size(), place + 1));  // a damaged shape may have any number of chunks
      if (verified[place]) return;
    }
    detail::verify_chunk(info, file, where(array, {chunk}));
    const std::lock_guard lock(mutex);
    verified[place] = true;
  }

  [[nodiscard]] std::string where(const std::string& key) const { return "zarr chunk '" + path + "/" + key + "'"; }
  [[nodiscard]] std::string where(const ZarrArray& array, const Index& chunk) const {
    return info.sharding
               ? "zarr chunk " + detail::show_shape(chunk) + " in '" + path + "/" + array.chunk_key(chunk) + "'"
               : where(array.chunk_key(chunk));
  }

  void must_be_v2() const {
    if (info.v3) throw UsageError("zarr array '" + path + "' is of version 3, which is read only: write version 2");
  }

  /// The bytes of a chunk; nothing where it is not there.
  [[nodiscard]] std::optional<detail::FilePart> stored(const ZarrArray& array, const Index& chunk) {
    const std::string name = path + "/" + array.chunk_key(chunk);
    if (!file_exists(name)) return std::nullopt;
    const InputFile file(name);
    if (!info.sharding) return detail::FilePart(file);
    const auto entry = indices.find(info, chunk, file, "zarr shard '" + name + "'");
    if (!entry) return std::nullopt;
    if (entry->size > file.size() || entry->begin > file.size() - entry->size)  // written anew since
      throw Error(where(array, chunk) + " ends behind the file: it is damaged");
    return detail::FilePart(file, entry->begin, entry->size);
  }
};

}  // namespace shardlib::io
