// Kernels of random.hpp.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "shardlib/kernels/philox.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib::kernels::body {

/// Draws in f32, which `in` converts to the dtype T.
struct Rounded {
  template <class T>
  static constexpr T in(float draw) {
    return T(draw);
  }
};
struct Uniform {
  constexpr float operator()(std::uint32_t word) const { return detail::to_uniform(word); }
  /// In bf16 rounded down: the nearest number could be 1, which is none of the draws.
  template <class T>
  static constexpr T in(float draw) {
    if constexpr (std::is_same_v<T, bf16>)
      return T(std::bit_cast<float>(std::bit_cast<std::uint32_t>(draw) & 0xFFFF0000U));
    else
      return T(draw);
  }
};
/// A standard normal number. Its absolute value is at most about 6.3.
struct Normal : Rounded {
  constexpr float operator()(std::uint32_t word) const { return detail::to_normal(word); }
};
/// A standard normal number given |z| <= 2 (its standard deviation is 0.8796).
struct TruncatedNormal : Rounded {
  constexpr float operator()(std::uint32_t word) const { return detail::to_truncated_normal(word); }
};

/// Fills a piece of a row of the shard. `nest` walks the rows of the shard and of the global array.
template <class T, class Draw>
struct Fill {
  static constexpr std::int64_t tile_length = 1024;
  Nest<2> nest;
  Nest<2>::Loop inner;
  std::int64_t pieces, base;
  std::uint64_t seed, stream;
  T* out;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t length = tile_length;  // nvcc lacks the static one where a reference to it is taken
    const Walk<2> walk(nest, item / pieces);
    const std::int64_t begin = item % pieces * length, stride = inner.strides[1];
    const std::int64_t n = std::min(length, inner.extent - begin);
    const auto first = static_cast<std::uint64_t>(base + walk.offsets[1] + begin * stride);
    auto* const words = team.template tile<std::uint32_t, tile_length>();
    const auto key = seed, lane_of = stream;
    if (stride == 1) {
      const std::uint64_t last = first + static_cast<std::uint64_t>(n), block = first >> 2;
      team.lanes(static_cast<std::int64_t>(((last + 3) >> 2) - block), [=](std::int64_t b) {
        const std::uint64_t at = block + static_cast<std::uint64_t>(b);
        const auto four = philox(key, at, lane_of);
        for (std::uint64_t i = std::max(first, at << 2); i < std::min(last, (at + 1) << 2); ++i)
          words[i - first] = four[i & 3U];
      });
    } else {
      team.lanes(
          n, [=](std::int64_t i) { words[i] = bits(key, lane_of, first + static_cast<std::uint64_t>(i * stride)); });
    }
    team.barrier();
    T* const to = out + walk.offsets[0] + begin;
    team.lanes(n, [=](std::int64_t i) { to[i] = Draw::template in<T>(Draw{}(words[i])); });
  }
};

}  // namespace shardlib::kernels::body
