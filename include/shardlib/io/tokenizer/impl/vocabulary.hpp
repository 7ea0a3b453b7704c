// Vocabularies of byte pairs, for impl/ headers: digest and name, and how GPT-2's files spell bytes.
#pragma once

#include <utf8proc.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "shardlib/support/sha256.hpp"

namespace shardlib::io::detail {

inline std::string base64(std::string_view bytes) {
  constexpr std::string_view digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t word = 0;
    const std::size_t n = std::min<std::size_t>(3, bytes.size() - i);
    for (std::size_t k = 0; k < 3; ++k) word = word << 8 | (k < n ? static_cast<unsigned char>(bytes[i + k]) : 0U);
    for (std::size_t k = 0; k < 4; ++k) text += k <= n ? digits[(word >> (18 - 6 * k)) & 63U] : '=';
  }
  return text;
}

/// The digest of the vocabulary's `.tiktoken` file, for every format that it was read from.
inline std::string vocabulary_digest(const std::vector<std::string>& tokens) {
  std::string text;
  for (std::size_t id = 0; id < tokens.size(); ++id) text += base64(tokens[id]) + " " + std::to_string(id) + "\n";
  return hex(sha256(text));
}

inline constexpr std::string_view gpt2_digest = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930";

inline std::string vocabulary_name(const std::string& digest) {
  return digest == gpt2_digest ? "gpt2" : "bpe-" + digest.substr(0, 12);
}

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
