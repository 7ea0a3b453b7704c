// How texts are cut into the pieces within which bytes are joined, for impl/ headers.
#pragma once

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace shardlib::io::detail {

// ---- GPT-2 ----------------------------------------------------------------------------------------------------------

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

/// The end of the run of characters of `kind` that begins at `p`.
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

/// The end of the piece that begins at `p`. GPT-2 joins bytes within pieces:
///   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
/// A byte that is not part of valid UTF-8 is a character that is not a letter, number or space.
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

// ---- Llama 3 and Qwen 2 ---------------------------------------------------------------------------------------------

/// As `contraction`, in any case. The long s is a case of s.
inline std::size_t contraction_of_any_case(const char* p, const char* end) {
  if (std::string_view(p, static_cast<std::size_t>(end - p)).starts_with("'\u017f")) return 3;
  char lower[3] = {'\'', '\0', '\0'};
  const auto size = std::min<std::ptrdiff_t>(end - p, 3);
  for (std::ptrdiff_t i = 1; i < size; ++i) lower[i] = p[i] >= 'A' && p[i] <= 'Z' ? static_cast<char>(p[i] + 32) : p[i];
  return contraction(lower, lower + size);
}

inline bool line_end(char c) {
  return c == '\r' || c == '\n';
}

/// Where the piece that begins at `p` ends by the rule of Llama 3, whose numbers have at most `digits` characters
/// (Qwen 2: 1):
///   (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|
///   ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
inline const char* llama_piece_end(const char* p, const char* end, int digits) {
  if (*p == '\'')
    if (const std::size_t size = contraction_of_any_case(p, end); size > 0) return p + size;
  Character c = character(p, end);
  const char* q = p + c.size;
  if (c.kind == Kind::letter) return run_end(q, end, Kind::letter);
  if (c.kind == Kind::number) {
    for (int n = 1; n < digits && q < end; ++n, q += c.size)
      if (c = character(q, end); c.kind != Kind::number) break;
    return q;
  }
  const Kind next = q < end ? character(q, end).kind : Kind::space;
  if (next == Kind::letter && !line_end(*p)) return run_end(q, end, Kind::letter);
  if (c.kind == Kind::other || (*p == ' ' && next == Kind::other)) {
    q = run_end(q, end, Kind::other);
    while (q < end && line_end(*q)) ++q;
    return q;
  }
  // White space up to its last line's end; without one as in GPT-2's rule.
  const char *last = p, *lines = nullptr;
  for (q = p; q < end; q += c.size) {
    c = character(q, end);
    if (c.kind != Kind::space) break;
    last = q;
    if (line_end(*q)) lines = q + 1;
  }
  if (lines != nullptr) return lines;
  return q < end && last > p ? last : q;
}

}  // namespace shardlib::io::detail
