// Text of files in messages.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "shardlib/support/utf8.hpp"

namespace shardlib::detail {

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

}  // namespace shardlib::detail
