// Where chunks lie in the files that they share (ZarrSharding).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "shardlib/io/box.hpp"
#include "shardlib/io/file.hpp"
#include "shardlib/io/formats/zarr_info.hpp"
#include "shardlib/support/crc32c.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::io::detail {

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

}  // namespace shardlib::io::detail
