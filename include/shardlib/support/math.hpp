// Branch-free exp, log, tanh, sigmoid and erf on f32, written so that compilers vectorize loops over them. Compiler
// builtins replace the functions of <cmath>, because parsing <cmath> would take a seventh of the time of shapes.hpp.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "shardlib/support/function.hpp"

namespace shardlib::kernels {

namespace detail {

/// Horner's rule, highest power first.
template <class... C>
constexpr float polynomial(float x, float head, C... rest) {
  float sum = head;
  ((sum = sum * x + rest), ...);
  return sum;
}

/// 2^n for n in [-126, 127], built from its bits.
constexpr float exp2_int(std::uint32_t n) {
  return std::bit_cast<float>((n + 127U) << 23);
}

/// c ? a : b as a mask. g++ 12 turns chained conditions into branches and then does not vectorize.
constexpr float select(bool c, float a, float b) {
  const std::uint32_t mask = 0U - static_cast<std::uint32_t>(c);
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(a) & mask) | (std::bit_cast<std::uint32_t>(b) & ~mask));
}

/// a / b; on a GPU within 2 ulp, and 0 for b > 2^126.
constexpr float quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  if (!__builtin_is_constant_evaluated()) return ::__fdividef(a, b);
#endif
  return a / b;
}

}  // namespace detail

/// e^x within 2 ulp. Exactly 0 for x <= -104, inf for x >= 89.
constexpr float fast_exp(float x) {
#if defined(__CUDA_ARCH__)  // a GPU has an instruction for powers of 2
  if (!__builtin_is_constant_evaluated()) return ::expf(x);
#endif
  constexpr float shifter = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
  x = x < -104.0F ? -104.0F : x;
  x = x > 89.0F ? 89.0F : x;
  const float shifted = x * 1.44269504F + shifter;
  const float n = shifted - shifter;
  const float r = (x - n * 0.693359375F) - n * -2.12194440e-4F;  // ln 2 in two parts, of which the first is exact
  const float p = detail::polynomial(r, 1.989108046e-4F, 1.393373072e-3F, 8.333310845e-3F, 4.166646420e-2F,
                                     0.1666666668F, 0.5000000014F);
  const float e = p * r * r + r + 1.0F;
  // 2^n as two factors, because n can exceed the exponent range of one f32 on both sides.
  const auto bits = std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(shifter);
  const auto half = static_cast<std::uint32_t>(static_cast<std::int32_t>(bits) >> 1);
  return e * detail::exp2_int(half) * detail::exp2_int(bits - half);
}

/// Natural logarithm within a few ulp, including subnormals; -inf at 0, NaN for negative x.
constexpr float fast_log(float x) {
  const auto input = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t tiny = (input - 0x00800000U) >> 31;
  const float scaled = x * detail::exp2_int(tiny * 23U);
  // Splits x into 2^e * m with m in [sqrt(1/2), sqrt(2)). The subtraction moves the exponent's boundary to sqrt(1/2).
  const auto bits = std::bit_cast<std::uint32_t>(scaled) - 0x3f3504f3U;
  const auto exponent = (static_cast<std::int32_t>(bits) >> 23) - static_cast<std::int32_t>(tiny * 23U);
  const auto e = static_cast<float>(exponent);
  const float f = std::bit_cast<float>((bits & 0x007fffffU) + 0x3f3504f3U) - 1.0F;
  const float p = detail::polynomial(f, 0.06971611471F, -0.1147973385F, 0.1168541992F, -0.1242568733F, 0.1424905765F,
                                     -0.1666780232F, 0.2000071575F, -0.2499999696F, 0.3333333118F);
  const float y = (f * f * f * p + e * -2.12194440e-4F - 0.5F * f * f) + f + e * 0.693359375F;
  constexpr float inf = std::numeric_limits<float>::infinity();
  const float special = detail::select((input << 1) == 0U, -inf, std::numeric_limits<float>::quiet_NaN());
  const float unbounded = detail::select(input == 0x7f800000U, inf, special);
  return detail::select(input - 1U < 0x7f7fffffU, y, unbounded);
}

/// Hyperbolic tangent within a few ulp.
constexpr float fast_tanh(float x) {
  const float a = x < 0.0F ? -x : x;
  const float z = x * x;
  const float p =
      detail::polynomial(z, -0.005992961254F, 0.02092414818F, -0.05383514126F, 0.1333266348F, -0.3333332786F);
  const float small = x + x * z * p;
  const float large = 1.0F - detail::quotient(2.0F, fast_exp(2.0F * a) + 1.0F);
  return a < 0.64F ? small : SHARDLIB_C(copysignf)(large, x);
}

/// 1 / (1 + e^-x) within a few ulp, including the range where it underflows.
constexpr float fast_sigmoid(float x) {
  const float a = x < 0.0F ? x : -x;
  const float e = fast_exp(a);
  return detail::quotient(x < 0.0F ? e : 1.0F, 1.0F + e);
}

/// Error function within a few ulp.
constexpr float fast_erf(float x) {
  float a = x < 0.0F ? -x : x;
  const float z = x * x;
  const float p = detail::polynomial(z, 8.334718615e-5F, -8.134709332e-4F, 0.005200368587F, -0.02685915147F,
                                     0.1128369152F, -0.3761263352F, 0.1283791666F);
  const float small = x + x * p;
  a = a > 4.0F ? 4.0F : a;
  const float q =  // -log(erfc(a)) on [0.9, 4]
      detail::polynomial(a, 4.453896388e-8F, -2.594339321e-6F, 5.493616927e-5F, -6.433164710e-4F, 0.004910779965F,
                         -0.02673623389F, 0.110499571F, 0.6314834945F, 1.130388423F, -3.495821141e-4F);
  const float large = 1.0F - fast_exp(-q);
  return a < 0.92F ? small : SHARDLIB_C(copysignf)(large, x);
}

SHARDLIB_FUNCTION inline double fast_exp(double x) {
  return SHARDLIB_C(exp)(x);
}
SHARDLIB_FUNCTION inline double fast_log(double x) {
  return SHARDLIB_C(log)(x);
}
SHARDLIB_FUNCTION inline double fast_tanh(double x) {
  return SHARDLIB_C(tanh)(x);
}
SHARDLIB_FUNCTION inline double fast_erf(double x) {
  return SHARDLIB_C(erf)(x);
}
SHARDLIB_FUNCTION inline double fast_sigmoid(double x) {
  const double e = SHARDLIB_C(exp)(x < 0 ? x : -x);
  return (x < 0 ? e : 1.0) / (1.0 + e);
}

}  // namespace shardlib::kernels
