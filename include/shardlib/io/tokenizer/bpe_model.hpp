// The tokens and merges of a byte-pair encoding. It joins the parts of a piece; other headers cut texts into pieces.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/support/error.hpp"

namespace shardlib::io::detail {

/// The value for "no id".
inline constexpr std::uint32_t no_token = 0xffffffffU;

class BpeModel {
 public:
  /// Two tokens that may be joined to the token `id`; of all pairs in a piece, that of the lowest rank is joined first,
  /// of equal ones the leftmost.
  struct Pair {
    std::uint32_t left, right, rank, id;
  };
  /// The parts of a piece while they are joined: a list, and a heap of the pairs that could be, lowest rank first, then
  /// leftmost. Kept from piece to piece for its memory.
  struct Joining {
    struct Part {
      std::uint32_t id, previous, next;
    };
    std::vector<Part> parts;
    std::vector<std::uint64_t> heap;
    /// Call it before the parts of another piece, at most `most` of them. Throws UsageError if they are too many.
    void start(std::size_t most);
    void add(std::uint32_t id) {
      const auto at = static_cast<std::uint32_t>(parts.size());
      parts.push_back({id, at - 1, at + 1});
    }
  };

  /// Makes room for this many tokens.
  void reserve(std::size_t tokens);
  /// The token of the next id. One that no piece is made of, as `findable` says, has an id alone.
  void add(std::string_view bytes, bool findable = true);
  /// The pairs; of two with the same tokens, the later one counts.
  void set_pairs(std::span<const Pair> pairs);

  [[nodiscard]] std::uint32_t size() const { return static_cast<std::uint32_t>(begins_.size() - 1); }
  [[nodiscard]] std::size_t longest() const { return longest_; }
  [[nodiscard]] std::string_view token(std::uint32_t id) const {
    return std::string_view(bytes_).substr(begins_[id], begins_[id + 1] - begins_[id]);
  }
  /// The token of these bytes, or no_token.
  [[nodiscard]] std::uint32_t find(std::string_view bytes) const;
  /// Joins the parts of `joining`, and appends the ids of the remaining parts.
  void append_joined(Joining& joining, std::vector<std::uint32_t>& ids) const;

 private:
  [[nodiscard]] const Pair& joined(std::uint32_t left, std::uint32_t right) const;

  // Hash tables with open addressing, at most half full; an `id` of no_token marks an empty slot.
  struct Slot {
    std::uint32_t hash, id;
  };
  std::string bytes_;                        // of all tokens, one after the other
  std::vector<std::uint32_t> begins_ = {0};  // a token's bytes in them, and their end
  std::size_t longest_ = 0;
  std::vector<Slot> tokens_ = {{0, no_token}, {0, no_token}};
  std::vector<Pair> pairs_ = {{0, 0, no_token, no_token}, {0, 0, no_token, no_token}};
};

template <class T>
std::uint64_t load(const char* p) {
  T word;
  std::memcpy(&word, p, sizeof(T));
  return word;
}

/// Reads at most 8 bytes at once, the last ones twice where the size is odd; multiplication mixes (as in wyhash).
inline std::uint32_t hash_bytes(std::string_view s) {
  constexpr std::uint64_t odd = 0x9e3779b97f4a7c15U;
  const char* p = s.data();
  const std::size_t n = s.size();
  std::uint64_t h = n * odd;
  const auto mix = [&](std::uint64_t word) {
    h = (h ^ word) * odd;
    h ^= h >> 32;
  };
  if (n >= 8) {
    for (std::size_t i = 0; i + 8 < n; i += 8) mix(load<std::uint64_t>(p + i));
    mix(load<std::uint64_t>(p + n - 8));
  } else if (n >= 4) {
    mix(load<std::uint32_t>(p) | load<std::uint32_t>(p + n - 4) << 32);
  } else if (n > 0) {
    mix(load<std::uint8_t>(p) | load<std::uint8_t>(p + n / 2) << 8 | load<std::uint8_t>(p + n - 1) << 16);
  }
  return static_cast<std::uint32_t>(h ^ (h >> 29));
}

inline std::size_t hash_pair(std::uint32_t left, std::uint32_t right) {
  const std::uint64_t h = (std::uint64_t{left} << 32 | right) * 0x9e3779b97f4a7c15U;
  return static_cast<std::size_t>(h ^ (h >> 32));
}

/// A power of two of at least twice as many slots.
inline std::size_t table_size(std::size_t entries) {
  std::size_t size = 2;
  while (size < 2 * entries) size *= 2;
  return size;
}

inline void BpeModel::reserve(std::size_t tokens) {
  tokens_.assign(table_size(tokens), {0, no_token});
  begins_.reserve(tokens + 1);
}

inline void BpeModel::add(std::string_view bytes, bool findable) {
  const std::uint32_t id = size();
  bytes_ += bytes;
  begins_.push_back(static_cast<std::uint32_t>(bytes_.size()));
  if (!findable) return;
  longest_ = std::max(longest_, bytes.size());
  const std::uint32_t hash = hash_bytes(bytes);
  std::size_t slot = hash & (tokens_.size() - 1);
  while (tokens_[slot].id != no_token) slot = (slot + 1) & (tokens_.size() - 1);
  tokens_[slot] = {hash, id};
}

inline void BpeModel::set_pairs(std::span<const Pair> pairs) {
  pairs_.assign(table_size(pairs.size()), {0, 0, no_token, no_token});
  for (const Pair& pair : pairs) {
    std::size_t slot = hash_pair(pair.left, pair.right) & (pairs_.size() - 1);
    while (pairs_[slot].id != no_token && (pairs_[slot].left != pair.left || pairs_[slot].right != pair.right))
      slot = (slot + 1) & (pairs_.size() - 1);
    pairs_[slot] = pair;
  }
}

inline std::uint32_t BpeModel::find(std::string_view bytes) const {
  const std::uint32_t hash = hash_bytes(bytes);
  for (std::size_t slot = hash & (tokens_.size() - 1);; slot = (slot + 1) & (tokens_.size() - 1)) {
    const Slot& entry = tokens_[slot];
    if (entry.id == no_token || (entry.hash == hash && token(entry.id) == bytes)) return entry.id;
  }
}

/// The pair of these two, or one whose id is no_token.
inline const BpeModel::Pair& BpeModel::joined(std::uint32_t left, std::uint32_t right) const {
  for (std::size_t slot = hash_pair(left, right) & (pairs_.size() - 1);; slot = (slot + 1) & (pairs_.size() - 1)) {
    const Pair& entry = pairs_[slot];
    if (entry.id == no_token || (entry.left == left && entry.right == right)) return entry;
  }
}

inline void BpeModel::Joining::start(std::size_t most) {
  if (most >= no_token) throw UsageError("a text has 4 GiB without a space that would end a piece: is it a text?");
  parts.clear();
}

inline void BpeModel::append_joined(Joining& joining, std::vector<std::uint32_t>& ids) const {
  auto& [parts, heap] = joining;
  heap.clear();
  const auto n = static_cast<std::uint32_t>(parts.size());
  const auto consider = [&](std::uint32_t left) {
    const std::uint32_t right = parts[left].next;
    if (right == n) return;
    const Pair& pair = joined(parts[left].id, parts[right].id);
    if (pair.id == no_token) return;
    heap.push_back(std::uint64_t{pair.rank} << 32 | left);
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  for (std::uint32_t i = 0; i < n; ++i) consider(i);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const auto rank = static_cast<std::uint32_t>(heap.back() >> 32), left = static_cast<std::uint32_t>(heap.back());
    heap.pop_back();
    const std::uint32_t right = parts[left].next;
    if (right == n) continue;
    // The pair may have gone since: a part that was joined to its left neighbor is no longer a token.
    const Pair& pair = joined(parts[left].id, parts[right].id);
    if (pair.id == no_token || pair.rank != rank) continue;
    parts[left] = {pair.id, parts[left].previous, parts[right].next};
    parts[right].id = no_token;
    if (parts[left].next < n) parts[parts[left].next].previous = left;
    consider(left);
    if (left > 0) consider(parts[left].previous);
  }
  for (std::uint32_t i = 0; i < n; i = parts[i].next) ids.push_back(parts[i].id);
}

}  // namespace shardlib::io::detail
