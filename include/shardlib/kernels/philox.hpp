// Philox, a counter-based generator of random words, and uniform and normal numbers made of its words.
#pragma once

#if defined(__HIPCC__)  // Random123 marks its functions for nvcc alone
#define R123_CUDA_DEVICE __host__ __device__
#endif
#if !defined(R123_USE_SSE)
#define R123_USE_SSE 0  // Philox does not use it, and its header of all intrinsics is long
#endif
#include <Random123/philox.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "shardlib/support/function.hpp"
#include "shardlib/support/math.hpp"

namespace shardlib::kernels {

/// The four words of Philox4x32-10 for one counter.
SHARDLIB_FUNCTION inline std::array<std::uint32_t, 4> philox(std::uint64_t key, std::uint64_t counter_low,
                                                             std::uint64_t counter_high) {
  const auto low = [](std::uint64_t v) { return static_cast<std::uint32_t>(v); };
  const auto high = [](std::uint64_t v) { return static_cast<std::uint32_t>(v >> 32); };
  const r123::Philox4x32::ctr_type counter{
      {low(counter_low), high(counter_low), low(counter_high), high(counter_high)}};
  const auto words = r123::Philox4x32()(counter, r123::Philox4x32::key_type{{low(key), high(key)}});
  return {words[0], words[1], words[2], words[3]};
}

/// 32 random bits for one element. `stream` separates the uses of one seed (a parameter, the dropout of a step).
SHARDLIB_FUNCTION inline std::uint32_t bits(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return philox(seed, index >> 2, stream)[index & 3U];
}

namespace detail {

/// Converts the upper 24 bits, so that every value is exact and below 1.
constexpr float to_uniform(std::uint32_t word) {
  return static_cast<float>(word >> 8) * 0x1p-24F;
}

/// The normal number whose upper tail has probability p, for p in (0, 1/2]. Accurate to about 1e-6.
constexpr float normal_tail(float p) {
  // erfinv(x) = x * f(w) with x = 1 - 2p and w = -log(1 - x^2). f is one polynomial for w < 5, and one in sqrt(w)
  // above.
  const float w = -fast_log(4.0F * p * (1.0F - p));
  const float center = polynomial(w - 2.5F, 2.260597774e-8F, 3.422247090e-7F, -3.454779514e-6F, -4.380346714e-6F,
                                  2.183129798e-4F, -0.001253758885F, -0.004177346517F, 0.2466407663F, 1.501409351F);
  // std::sqrt sets errno, which would prevent the vectorization of loops over this function.
  const float root = fast_exp(0.5F * fast_log(select(w < 5.0F, 5.0F, w)));
  const float tail = polynomial(root - 3.0F, 1.517725849e-5F, -2.345881995e-4F, 0.001226635368F, -0.003319975827F,
                                0.005715541456F, -0.007732029328F, 0.009453946010F, 1.001683077F, 2.832976294F);
  return 1.41421356F * (1.0F - 2.0F * p) * select(w < 5.0F, center, tail);
}

/// The low bit is the sign. The other bits are the tail's probability, which resolves both tails down to 2^-32.
constexpr float to_normal(std::uint32_t word, float probability, float offset) {
  const float p = offset + probability * (static_cast<float>(word >> 1) + 0.5F) * 0x1p-32F;
  const float z = normal_tail(p);
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(z) ^ (word << 31));
}
constexpr float to_normal(std::uint32_t word) {
  return to_normal(word, 1.0F, 0.0F);
}

/// A normal number given |z| <= 2. The tail's probability is in the range from P(z > 2) to 1/2, instead of from 0.
constexpr float to_truncated_normal(std::uint32_t word) {
  constexpr float beyond = 0.0227501319F;
  const float z = to_normal(word, 1.0F - 2.0F * beyond, beyond);
  return std::min(2.0F, std::max(-2.0F, z));
}

}  // namespace detail

}  // namespace shardlib::kernels
