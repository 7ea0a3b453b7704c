// Arrays of bits that tell where they come from.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
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

/// The trees have the same bits in this device's shards, padding included. All leaves but `empty` have elements.
template <class A, class B>
void expect_same_bits(const A& a, const B& b, const std::string& what = "the trees", int empty = 0) {
  int compared = 0, without = 0;
  for_each_leaf(
      [&](std::string_view name, const auto& x, const auto& y) {
        const auto one = std::as_bytes(x.span()), other = std::as_bytes(y.span());
        expect(std::ranges::equal(one, other), what + ": " + std::string(name) + " differs");
        ++(one.empty() ? without : compared);
      },
      a, b);
  expect(compared > 0 && without == empty,
         what + ": " + show(compared) + " leaves are compared, and " + show(without) + " have nothing to compare");
}

}  // namespace shardlib::test
