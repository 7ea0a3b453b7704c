// The tokens and merges of a byte-pair encoding. It joins the parts of a piece; other headers cut texts into pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/support/inline.hpp"

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

}  // namespace shardlib::io::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/tokenizer/impl/bpe_model.hpp"
#endif
