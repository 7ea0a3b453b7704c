// Text of files in messages.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace shardlib::detail {

/// The beginning of a text that came from outside, for a message: at most `most` bytes, cut between characters, without
/// control characters.
inline std::string excerpt(std::string_view text, std::size_t most = 80) {
  std::size_t size = text.size();
  if (size > most) {
    size = most;
    while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xc0U) == 0x80U) --size;
  }
  std::string out(text.substr(0, size));
  for (char& c : out)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  return size < text.size() ? out + "..." : out;
}

}  // namespace shardlib::detail
