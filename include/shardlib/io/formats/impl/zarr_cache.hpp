// The decoded chunks of a zarr array, for later reads.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "shardlib/io/box.hpp"
#include "shardlib/io/file.hpp"

namespace shardlib::io::detail {

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

}  // namespace shardlib::io::detail
