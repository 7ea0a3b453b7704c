// Texts are rewritten before they are cut into pieces, for impl/ headers.
#pragma once

#include <utf8proc.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <span>
#include <string>
#include <string_view>

#include "shardlib/support/text.hpp"

namespace shardlib::io::detail {

/// One of Unicode's normal forms; `prepend` puts `to` before a text; `replace` puts `to` in place of each `from`.
struct Rewrite {
  enum Kind : std::uint8_t { nfc, nfd, nfkc, nfkd, prepend, replace } kind;
  std::string from, to;
};

inline std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t begin = 0;;) {
    const std::size_t at = text.find(from, begin);
    out += text.substr(begin, at - begin);
    if (at == std::string_view::npos) return out;
    out += to;
    begin = at + from.size();
  }
}

/// The end of the run of valid UTF-8 at `begin`. The run ends before a character that the normal form does not change
/// and does not join to the character before it: ASCII, and in NFC all below U+0300, whose first bytes are below 0xcc.
inline std::size_t unsettled_end(std::string_view text, std::size_t begin, unsigned char settled) {
  std::size_t end = begin;
  while (end < text.size() && static_cast<unsigned char>(text[end]) >= settled) {
    utf8proc_int32_t code = 0;
    const auto size = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data() + end),
                                       static_cast<utf8proc_ssize_t>(text.size() - end), &code);
    if (size <= 0) break;
    end += static_cast<std::size_t>(size);
  }
  return end;
}

/// Bytes that are not UTF-8 stay, and the texts on their two sides are normalized separately.
inline std::string normal_form(std::string_view text, Rewrite::Kind kind) {
  const unsigned char settled = kind == Rewrite::nfc ? 0xcc : 0x80;
  const bool compose = kind == Rewrite::nfc || kind == Rewrite::nfkc, compatible = kind >= Rewrite::nfkc;
  const int options =
      UTF8PROC_STABLE | (compose ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) | (compatible ? UTF8PROC_COMPAT : 0);
  std::string out;
  std::size_t begin = 0, at = 0, last = 0;  // what is copied; the next character, and the one before
  while (at < text.size()) {
    const auto c = static_cast<unsigned char>(text[at]);
    if (c < settled) {
      const bool two = c >= 0xc2 && at + 1 < text.size() && shardlib::detail::continues_character(text[at + 1]);
      last = c < 0x80 || two ? at : at + 1;
      at += two ? 2 : 1;
      continue;
    }
    const std::size_t end = unsettled_end(text, at, settled);
    if (end == at) {
      last = ++at;
      continue;
    }
    out += text.substr(begin, last - begin);
    // The character before may join those that follow.
    utf8proc_uint8_t* form = nullptr;
    const auto size =
        utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data() + last),
                     static_cast<utf8proc_ssize_t>(end - last), &form, static_cast<utf8proc_option_t>(options));
    if (size == UTF8PROC_ERROR_NOMEM) throw std::bad_alloc();
    if (size < 0) {
      out += text.substr(last, end - last);
    } else {
      out.append(reinterpret_cast<const char*>(form), static_cast<std::size_t>(size));
    }
    std::free(form);  // NOLINT(cppcoreguidelines-no-malloc): utf8proc allocates so
    begin = last = at = end;
  }
  out += text.substr(begin);
  return out;
}

inline std::string rewritten(std::string_view text, std::span<const Rewrite> rewrites) {
  std::string out(text);
  for (const Rewrite& rewrite : rewrites) {
    if (out.empty()) break;
    if (rewrite.kind == Rewrite::prepend)
      out.insert(0, rewrite.to);
    else if (rewrite.kind == Rewrite::replace)
      out = replaced(out, rewrite.from, rewrite.to);
    else
      out = normal_form(out, rewrite.kind);
  }
  return out;
}

}  // namespace shardlib::io::detail
