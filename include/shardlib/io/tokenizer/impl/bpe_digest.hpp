// The digest of a vocabulary, for impl/ headers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
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

}  // namespace shardlib::io::detail
