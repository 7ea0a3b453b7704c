// CRC-32C (Castagnoli, RFC 3720 appendix B.4): the checksum of checkpoint files.
#pragma once

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace shardlib::io {
namespace detail {

/// Tables for eight bytes at a time (Kounavis and Berry 2005): row k advances a byte by k additional zero bytes.
constexpr auto crc32c_tables() {
  std::array<std::array<std::uint32_t, 256>, 8> t{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ (0x82f63b78U & (0U - (c & 1U)));
    t[0][i] = c;
  }
  for (std::size_t k = 1; k < 8; ++k)
    for (std::size_t i = 0; i < 256; ++i) t[k][i] = (t[k - 1][i] >> 8) ^ t[0][t[k - 1][i] & 0xffU];
  return t;
}

inline std::uint32_t crc32c_by_table(std::uint32_t crc, const std::byte* p, std::size_t n) {
  static constexpr auto t = crc32c_tables();
  for (; n >= 8; n -= 8, p += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, p, 8);
    word ^= crc;
    crc = 0;
    for (std::size_t k = 0; k < 8; ++k) crc ^= t[7 - k][(word >> (8 * k)) & 0xffU];
  }
  for (; n > 0; --n, ++p) crc = (crc >> 8) ^ t[0][(crc ^ static_cast<std::uint32_t>(*p)) & 0xffU];
  return crc;
}

#if defined(__x86_64__)
[[gnu::target("sse4.2")]] inline std::uint32_t crc32c_by_hardware(std::uint32_t crc, const std::byte* p,
                                                                  std::size_t n) {
  std::uint64_t wide = crc;
  for (; n >= 8; n -= 8, p += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, p, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  crc = static_cast<std::uint32_t>(wide);
  for (; n > 0; --n, ++p) crc = _mm_crc32_u8(crc, static_cast<unsigned char>(*p));
  return crc;
}
#endif

}  // namespace detail

/// The checksum of `bytes`. `before` is the checksum of preceding bytes, to compute the checksum of both together.
/// `crc32c(as_bytes("abc"))`
inline std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0) {
#if defined(__x86_64__)
  static const bool hardware = __builtin_cpu_supports("sse4.2") != 0;
  if (hardware) return ~detail::crc32c_by_hardware(~before, bytes.data(), bytes.size());
#endif
  return ~detail::crc32c_by_table(~before, bytes.data(), bytes.size());
}

/// Eight lower-case hexadecimal digits.
inline std::string hex(std::uint32_t value) {
  return fmt::format("{:08x}", value);
}

}  // namespace shardlib::io
