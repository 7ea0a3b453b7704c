// Arrays of bits that tell where they come from.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "shardlib/interop/shard_map.hpp"
#include "shardlib/spec/dtype.hpp"
#include "support.hpp"

namespace shardlib::test {

/// Fills an array with the bits that follow `x` in a linear congruential generator. All bits of an element are in use.
template <class D>
void fill_with_bits(HostArray<D>& host, std::uint64_t x) {
  for (auto& value : host.data) {
    x = x * 6364136223846793005U + 1442695040888963407U;
    const std::uint64_t bits = x >> 7;
    if constexpr (std::is_same_v<D, bool_>)
      value = (bits & 1U) != 0;
    else
      std::memcpy(static_cast<void*>(&value), &bits, sizeof value);
  }
}

/// The trees have the same bits in this device's shards, padding included.
template <class Tree>
void expect_same_bits(const Tree& a, const Tree& b) {
  for_each_leaf(
      [](std::string_view name, const auto& x, const auto& y) {
        const bool same =
            x.span().size() == y.span().size() &&
            (x.span().empty() || std::memcmp(x.span().data(), y.span().data(), x.span().size_bytes()) == 0);
        expect(same, std::string(name) + " differs");
      },
      a, b);
}

}  // namespace shardlib::test
