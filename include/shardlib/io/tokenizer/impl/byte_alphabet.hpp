// How GPT-2's files spell bytes, for impl/ headers.
#pragma once

#include <utf8proc.h>

#include <string>
#include <string_view>
#include <unordered_map>

namespace shardlib::io::detail {

/// GPT-2's files spell bytes as characters that can be seen: the printable ones of Latin-1 as themselves, the others
/// as 256, 257... in order. Tokens are ranked in that order too.
struct ByteAlphabet {
  ByteAlphabet() {
    const auto printable = [](int b) { return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174; };
    int next = 256;
    for (const bool first : {true, false})
      for (int b = 0; b < 256; ++b)
        if (printable(b) == first) {
          order += static_cast<char>(b);
          bytes.emplace(printable(b) ? b : next++, static_cast<char>(b));
        }
  }
  /// The bytes that `text` spells; empty where it has other characters.
  [[nodiscard]] std::string decode(std::string_view text) const {
    std::string out;
    const char *p = text.data(), *const end = p + text.size();
    while (p < end) {
      utf8proc_int32_t code = 0;
      const auto size = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(p), end - p, &code);
      const auto byte = size > 0 ? bytes.find(code) : bytes.end();
      if (byte == bytes.end()) return {};
      out += byte->second;
      p += size;
    }
    return out;
  }

  std::string order;
  std::unordered_map<utf8proc_int32_t, char> bytes;
};

}  // namespace shardlib::io::detail
