// Values of leaves that are not finite: training has diverged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "shardlib/spec/dtype.hpp"

namespace shardlib::io::detail {

/// The numbers of a type whose exponent has all bits set: infinities and NaNs.
template <class Bits>
std::size_t count_not_finite(std::span<const std::byte> bytes, Bits exponent) {
  std::size_t count = 0;
  for (std::size_t at = 0; at + sizeof(Bits) <= bytes.size(); at += sizeof(Bits)) {
    Bits value;
    std::memcpy(&value, bytes.data() + at, sizeof value);
    count += (value & exponent) == exponent ? 1 : 0;
  }
  return count;
}
inline std::size_t count_not_finite(std::span<const std::byte> bytes, DType dtype) {
  switch (dtype) {
    case DType::f32:
      return count_not_finite<std::uint32_t>(bytes, 0x7f800000U);
    case DType::bf16:
      return count_not_finite<std::uint16_t>(bytes, 0x7f80U);
    case DType::f64:
      return count_not_finite<std::uint64_t>(bytes, std::uint64_t{0x7ff} << 52U);
    default:
      return 0;
  }
}

/// "the leaf 'w' has 3 values that are not finite"
inline std::string not_finite_message(const std::string& leaf, std::size_t count) {
  return "the leaf '" + leaf + "' has " + std::to_string(count) + (count == 1 ? " value that is" : " values that are") +
         " not finite";
}

}  // namespace shardlib::io::detail
