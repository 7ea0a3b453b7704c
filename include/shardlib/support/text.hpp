// Text that came from outside: UTF-8, numbers, excerpts for messages, escapes for HTML and SVG. Only the tokenizers use
// utf8proc: timelines and messages need UTF-8 in programs without that library, too.
#pragma once

#include <algorithm>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>
#include <system_error>

namespace shardlib::detail {

/// Whether the byte continues a UTF-8 character, so that no text may be cut before it.
constexpr bool continues_character(char byte) {
  return (static_cast<unsigned char>(byte) & 0xc0U) == 0x80U;
}

/// The length in bytes of the UTF-8 character at the start, or 0 if it is invalid (Unicode 15, table 3-7).
inline std::size_t utf8_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
  const auto within = [&](std::size_t i, unsigned low, unsigned high) { return byte(i) >= low && byte(i) <= high; };
  const unsigned first = byte(0);
  if (text.empty()) return 0;
  if (first < 0x80) return 1;
  if (within(0, 0xc2, 0xdf)) return within(1, 0x80, 0xbf) ? 2 : 0;
  if (within(0, 0xe0, 0xef)) {
    const unsigned low = first == 0xe0 ? 0xa0 : 0x80, high = first == 0xed ? 0x9f : 0xbf;
    return within(1, low, high) && within(2, 0x80, 0xbf) ? 3 : 0;
  }
  const unsigned low = first == 0xf0 ? 0x90 : 0x80, high = first == 0xf4 ? 0x8f : 0xbf;
  return within(0, 0xf0, 0xf4) && within(1, low, high) && within(2, 0x80, 0xbf) && within(3, 0x80, 0xbf) ? 4 : 0;
}

/// Reads all of the text as a number. False if it has other text too, or a number that does not fit.
template <class T, class... Base>
bool parse_number(std::string_view text, T& number, Base... base) {
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number, base...);
  return error == std::errc() && rest == end;
}

/// The text with U+FFFD in place of each invalid byte. Samples of a byte-level model may contain invalid bytes.
inline std::string as_utf8(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t length = utf8_character(text);
    out += length > 0 ? text.substr(0, length) : std::string_view("\xef\xbf\xbd");
    text.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return out;
}

/// The beginning of a text that came from outside, for a message: at most `most` bytes, cut between characters, without
/// control characters.
inline std::string excerpt(std::string_view text, std::size_t most = 80) {
  std::size_t size = text.size();
  if (size > most) {
    size = most;
    while (size > 0 && continues_character(text[size])) --size;
  }
  std::string out(text.substr(0, size));
  for (char& c : out)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  return size < text.size() ? out + "..." : out;
}

/// The text with signs such as "␇" in place of control characters, which a terminal would obey, but for ends of lines
/// and tabs. Invalid bytes become U+FFFD, and so do U+0080 to U+009F, which have no signs.
inline std::string printable(std::string_view text) {
  const std::string whole = as_utf8(text);
  std::string out;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    const auto byte = static_cast<unsigned char>(whole[i]);
    if (byte == 0xc2 && static_cast<unsigned char>(whole[i + 1]) < 0xa0) {
      out += "\xef\xbf\xbd";
      ++i;
    } else if ((byte < 0x20 && whole[i] != '\n' && whole[i] != '\t') || byte == 0x7f) {
      out += {'\xe2', '\x90', static_cast<char>(byte == 0x7f ? 0xa1 : 0x80 + byte)};
    } else {
      out += whole[i];
    }
  }
  return out;
}

/// "1 file", "2 files".
inline std::string counted(std::integral auto count, std::string_view what) {
  return (std::to_string(count) + " ").append(what) + (count == 1 ? "" : "s");
}

/// Escapes the text for HTML and SVG, in elements and in quoted attributes.
inline std::string markup_escape(const std::string& text) {
  std::string out;
  for (const char c : as_utf8(text)) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else if (c == '\'') {
      out += "&#39;";
    } else {
      // HTML and SVG allow no control characters, but a sampled text may contain them.
      const bool control = static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t';
      out += control || c == 0x7f ? ' ' : c;
    }
  }
  return out;
}

}  // namespace shardlib::detail
