// Definitions of bpe.hpp: pieces and joining. impl/bpe_files.hpp reads the files.
#pragma once

#include "shardlib/io/tokenizer/bpe.hpp"

#include <utf8proc.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include "shardlib/io/tokenizer/impl/bpe_digest.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::io {
namespace detail {

// ---- pieces ---------------------------------------------------------------------------------------------------------

enum class Kind : std::uint8_t { letter, number, space, other, beyond_ascii };

inline constexpr std::array<Kind, 256> byte_kinds = [] {
  std::array<Kind, 256> kinds{};
  for (std::size_t c = 0; c < 256; ++c) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'), number = c >= '0' && c <= '9';
    const bool space = (c >= '\t' && c <= '\r') || c == ' ';
    kinds[c] = c >= 128 ? Kind::beyond_ascii
               : letter ? Kind::letter
               : number ? Kind::number
               : space  ? Kind::space
                        : Kind::other;
  }
  return kinds;
}();

/// Unicode's property White_Space, which no general category equals.
inline bool white_space(utf8proc_int32_t c) {
  return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
         c == 0x202f || c == 0x205f || c == 0x3000;
}

struct Character {
  Kind kind;
  std::size_t size;
};

/// The character at `p`, before `end`. A byte that belongs to no valid UTF-8 is one of kind other.
inline Character character(const char* p, const char* end) {
  const Kind kind = byte_kinds[static_cast<unsigned char>(*p)];
  if (kind != Kind::beyond_ascii) return {kind, 1};
  utf8proc_int32_t code = 0;
  const auto size = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(p), end - p, &code);
  if (size <= 0) return {Kind::other, 1};
  const auto n = static_cast<std::size_t>(size);
  if (white_space(code)) return {Kind::space, n};
  switch (utf8proc_category(code)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      return {Kind::letter, n};
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
      return {Kind::number, n};
    default:
      return {Kind::other, n};
  }
}

/// Where the run of characters of `kind` that begins at `p` ends.
inline const char* run_end(const char* p, const char* end, Kind kind) {
  while (p < end) {
    const Kind byte = byte_kinds[static_cast<unsigned char>(*p)];
    if (byte == kind) {
      ++p;
    } else {
      if (byte != Kind::beyond_ascii) return p;
      const Character c = character(p, end);
      if (c.kind != kind) return p;
      p += c.size;
    }
  }
  return p;
}

/// The size of 's, 't, 're, 've, 'm, 'll or 'd after an apostrophe at `p`; 0 where there is none.
inline std::size_t contraction(const char* p, const char* end) {
  if (end - p < 2) return 0;
  const char a = p[1], b = end - p > 2 ? p[2] : '\0';
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
  return ((a == 'r' || a == 'v') && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

/// Where the piece that begins at `p` ends.
inline const char* piece_end(const char* p, const char* end) {
  if (*p == '\'')
    if (const std::size_t size = contraction(p, end); size > 0) return p + size;
  Character c = character(p, end);
  const char* q = p + c.size;
  if (*p == ' ' && q < end) {
    // One space belongs to what follows it, unless that is a space as well.
    c = character(q, end);
    if (c.kind != Kind::space) q += c.size;
  }
  if (c.kind != Kind::space) return run_end(q, end, c.kind);
  // White space leaves its last character to what follows, where it has another.
  const char* last = p;
  for (q = p; q < end; q += c.size) {
    c = character(q, end);
    if (c.kind != Kind::space) return last > p ? last : q;
    last = q;
  }
  return end;
}

// ---- hashing --------------------------------------------------------------------------------------------------------

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

}  // namespace detail

SHARDLIB_INLINE std::vector<std::string_view> gpt2_pieces(std::string_view text) {
  std::vector<std::string_view> pieces;
  const char *p = text.data(), *const end = p + text.size();
  while (p < end) {
    const char* const next = detail::piece_end(p, end);
    pieces.emplace_back(p, static_cast<std::size_t>(next - p));
    p = next;
  }
  return pieces;
}

// ---- joining --------------------------------------------------------------------------------------------------------

/// The parts of a piece while they are joined: a list, and a heap of the pairs that could be, lowest id first, then
/// leftmost. Kept from piece to piece for its memory.
struct BpeTokenizer::Joining {
  struct Part {
    std::uint32_t id, previous, next;
  };
  std::vector<Part> parts;
  std::vector<std::uint64_t> heap;
};

SHARDLIB_INLINE BpeTokenizer::BpeTokenizer(const std::vector<std::string>& tokens, const std::string& source)
    : BpeTokenizer(tokens, source, detail::vocabulary_digest(tokens)) {}

SHARDLIB_INLINE BpeTokenizer::BpeTokenizer(const std::vector<std::string>& tokens, const std::string& source,
                                           const std::string& digest)
    : Tokenizer(detail::vocabulary_name(digest), digest, static_cast<std::uint32_t>(tokens.size()) + 1,
                static_cast<std::uint32_t>(tokens.size())) {
  add_tokens(tokens, source);
  add_pairs(source);
}

SHARDLIB_INLINE void BpeTokenizer::add_tokens(const std::vector<std::string>& tokens, const std::string& source) {
  tokens_.assign(detail::table_size(tokens.size()), {0, detail::no_token});
  begins_.push_back(0);
  for (const std::string& bytes : tokens) {
    const auto id = static_cast<std::uint32_t>(begins_.size() - 1);
    const auto fail = [&](const std::string& why) { throw Error(source + ": token " + std::to_string(id) + why); };
    if (bytes.empty()) fail(" is empty");
    if (const std::uint32_t twin = find(bytes); twin != detail::no_token)
      fail(" has the same bytes as token " + std::to_string(twin));
    bytes_ += bytes;
    begins_.push_back(static_cast<std::uint32_t>(bytes_.size()));
    longest_ = std::max(longest_, bytes.size());
    const std::uint32_t hash = detail::hash_bytes(bytes);
    std::size_t slot = hash & (tokens_.size() - 1);
    while (tokens_[slot].id != detail::no_token) slot = (slot + 1) & (tokens_.size() - 1);
    tokens_[slot] = {hash, id};
  }
  for (std::size_t byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    byte_ids_[byte] = find({&c, 1});
    if (byte_ids_[byte] == detail::no_token)
      throw Error(source + " has no token for the byte " + std::to_string(byte) + ", so not every text can be encoded");
  }
}

SHARDLIB_INLINE void BpeTokenizer::add_pairs(const std::string& source) {
  std::vector<PairSlot> pairs;
  for (std::uint32_t id = 0; id + 1 < begins_.size(); ++id) {
    const std::string_view bytes = token(id);
    const std::size_t before = pairs.size();
    for (std::size_t cut = 1; cut < bytes.size(); ++cut) {
      const std::uint32_t left = find(bytes.substr(0, cut)), right = find(bytes.substr(cut));
      if (left != detail::no_token && right != detail::no_token) pairs.push_back({left, right, id});
    }
    if (bytes.size() > 1 && pairs.size() == before)
      throw Error(source + ": token " + std::to_string(id) + " cannot be joined from two other tokens");
  }
  pairs_.assign(detail::table_size(pairs.size()), {0, 0, detail::no_token});
  for (const PairSlot& pair : pairs) {
    std::size_t slot = detail::hash_pair(pair.left, pair.right) & (pairs_.size() - 1);
    while (pairs_[slot].id != detail::no_token) slot = (slot + 1) & (pairs_.size() - 1);
    pairs_[slot] = pair;
  }
}

SHARDLIB_INLINE std::uint32_t BpeTokenizer::find(std::string_view piece) const {
  const std::uint32_t hash = detail::hash_bytes(piece);
  for (std::size_t slot = hash & (tokens_.size() - 1);; slot = (slot + 1) & (tokens_.size() - 1)) {
    const TokenSlot& entry = tokens_[slot];
    if (entry.id == detail::no_token || (entry.hash == hash && token(entry.id) == piece)) return entry.id;
  }
}

SHARDLIB_INLINE std::uint32_t BpeTokenizer::joined(std::uint32_t left, std::uint32_t right) const {
  for (std::size_t slot = detail::hash_pair(left, right) & (pairs_.size() - 1);;
       slot = (slot + 1) & (pairs_.size() - 1)) {
    const PairSlot& entry = pairs_[slot];
    if (entry.id == detail::no_token || (entry.left == left && entry.right == right)) return entry.id;
  }
}

SHARDLIB_INLINE void BpeTokenizer::append_joined(std::string_view piece, Joining& scratch,
                                                 std::vector<std::uint32_t>& ids) const {
  if (piece.size() >= detail::no_token)
    throw UsageError("a text has 4 GiB without a space that would end a piece: is it a text?");
  auto& [parts, heap] = scratch;
  parts.clear();
  heap.clear();
  const auto n = static_cast<std::uint32_t>(piece.size());
  for (std::uint32_t i = 0; i < n; ++i)
    parts.push_back({byte_ids_[static_cast<unsigned char>(piece[i])], i - 1, i + 1});
  const auto consider = [&](std::uint32_t left) {
    const std::uint32_t right = parts[left].next;
    if (right == n) return;
    const std::uint32_t id = joined(parts[left].id, parts[right].id);
    if (id == detail::no_token) return;
    heap.push_back(std::uint64_t{id} << 32 | left);
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  for (std::uint32_t i = 0; i < n; ++i) consider(i);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const auto id = static_cast<std::uint32_t>(heap.back() >> 32), left = static_cast<std::uint32_t>(heap.back());
    heap.pop_back();
    const std::uint32_t right = parts[left].next;
    // The pair may have gone since: a part that was joined to its left neighbour is no token any more.
    if (right == n || joined(parts[left].id, parts[right].id) != id) continue;
    parts[left] = {id, parts[left].previous, parts[right].next};
    parts[right].id = detail::no_token;
    if (parts[left].next < n) parts[parts[left].next].previous = left;
    consider(left);
    if (left > 0) consider(parts[left].previous);
  }
  for (std::uint32_t i = 0; i < n; i = parts[i].next) ids.push_back(parts[i].id);
}

SHARDLIB_INLINE void BpeTokenizer::append_ids(std::string_view text, std::vector<std::uint32_t>& ids) const {
  Joining scratch;
  const char *p = text.data(), *const end = p + text.size();
  while (p < end) {
    const char* const next = detail::piece_end(p, end);
    const std::string_view piece(p, static_cast<std::size_t>(next - p));
    const std::uint32_t id = piece.size() <= longest_ ? find(piece) : detail::no_token;
    if (id != detail::no_token)
      ids.push_back(id);
    else
      append_joined(piece, scratch, ids);
    p = next;
  }
}

SHARDLIB_INLINE void BpeTokenizer::append_text(std::uint32_t id, std::string& text) const {
  text += id == end_of_text() ? end_of_text_mark : token(id);
}

}  // namespace shardlib::io
