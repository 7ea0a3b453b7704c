// Element types: f32, bf16, f64, i32, u32, u8, bool_, and their run-time names.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace shardlib {

using f32 = float;          ///< 32-bit float: C++ float
using f64 = double;         ///< 64-bit float: C++ double
using i32 = std::int32_t;   ///< signed 32-bit integer: token ids and indices
using u32 = std::uint32_t;  ///< unsigned 32-bit integer
using u8 = std::uint8_t;    ///< unsigned 8-bit integer

/// The upper half of an f32, in `bits`. Conversion from f32 rounds to nearest even and keeps NaNs.
struct bf16 {
  std::uint16_t bits = 0;

  constexpr bf16() = default;
  constexpr explicit bf16(float value) {
#if defined(__CUDA_ARCH__)  // one instruction, which makes any NaN 0x7fff
    if (!__builtin_is_constant_evaluated()) {
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
      return;
    }
#endif
    const auto u = std::bit_cast<std::uint32_t>(value);
    const bool nan = (u & 0x7fffffffU) > 0x7f800000U;
    bits = static_cast<std::uint16_t>(nan ? (u >> 16) | 0x40U : (u + 0x7fffU + ((u >> 16) & 1U)) >> 16);
  }
  constexpr explicit operator float() const {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
  friend constexpr bool operator==(bf16 a, bf16 b) {
    return float(a) == float(b);
  }
};

/// A truth value of one byte, in `byte` as 0 or 1. It is not u8, so that a mask cannot be used as data by mistake.
struct bool_ {
  std::uint8_t byte = 0;

  constexpr bool_() = default;
  /// Accepts only bool, because pointers and numbers convert to bool implicitly.
  template <std::same_as<bool> B>
  constexpr bool_(B value) : byte(value ? 1 : 0) {}      // NOLINT(google-explicit-constructor): `true` is a bool_
  constexpr operator bool() const { return byte != 0; }  // NOLINT(google-explicit-constructor)
};

/// The dtypes as run-time values: f32, bf16, f64, i32, u32, u8 and bool_.
enum class DType : std::uint8_t { f32, bf16, f64, i32, u32, u8, bool_ };

template <class T>
struct dtype_of;
template <>
struct dtype_of<f32> : std::integral_constant<DType, DType::f32> {};
template <>
struct dtype_of<bf16> : std::integral_constant<DType, DType::bf16> {};
template <>
struct dtype_of<f64> : std::integral_constant<DType, DType::f64> {};
template <>
struct dtype_of<i32> : std::integral_constant<DType, DType::i32> {};
template <>
struct dtype_of<u32> : std::integral_constant<DType, DType::u32> {};
template <>
struct dtype_of<u8> : std::integral_constant<DType, DType::u8> {};
template <>
struct dtype_of<bool_> : std::integral_constant<DType, DType::bool_> {};
/// The dtype as a run-time value: `dtype_v<f32>` is DType::f32.
template <class T>
inline constexpr DType dtype_v = dtype_of<T>::value;

/// The name of a dtype in specs and messages: "bf16".
constexpr std::string_view name(DType d) {
  constexpr std::string_view names[] = {"f32", "bf16", "f64", "i32", "u32", "u8", "bool_"};
  return names[static_cast<std::size_t>(d)];
}

/// The size of one element in bytes.
constexpr std::size_t size_of(DType d) {
  constexpr std::size_t sizes[] = {4, 2, 8, 4, 4, 1, 1};
  return sizes[static_cast<std::size_t>(d)];
}

/// Whether the dtype is f32, bf16 or f64.
constexpr bool is_floating(DType d) {
  return d == DType::f32 || d == DType::bf16 || d == DType::f64;
}

/// The C++ types that a tensor's elements may have: f32, bf16, f64, i32, u32, u8, bool_.
template <class T>
concept dtype = requires {
  dtype_of<T>::value;
};
/// The dtypes f32, bf16 and f64.
template <class T>
concept floating = dtype<T> && is_floating(dtype_of<T>::value);

/// The type in which sums of T accumulate: f32 for bf16, else T.
template <dtype T>
using accumulator_t = std::conditional_t<std::is_same_v<T, bf16>, f32, T>;

/// Calls f with a value-initialized element of the run-time dtype, for type-erased code that calls typed kernels.
/// `visit_dtype(dtype, [&]<class T>(T) { ... })`
template <class F>
constexpr decltype(auto) visit_dtype(DType d, F&& f) {
  switch (d) {
    case DType::bf16:
      return f(bf16{});
    case DType::f64:
      return f(f64{});
    case DType::i32:
      return f(i32{});
    case DType::u32:
      return f(u32{});
    case DType::u8:
      return f(u8{});
    case DType::bool_:
      return f(bool_{});
    case DType::f32:
      break;
  }
  return f(f32{});
}

/// The type of `dtype_c<f32>`: a dtype known at compile time.
template <DType D>
using StaticDType = std::integral_constant<DType, D>;
#ifdef SHARDLIB_COMPILED  // the compiled library has the kernels of every dtype
/// A dtype known at compile time, for kernels without the code of other dtypes: `dtype_c<f32>`.
template <class T>
inline constexpr DType dtype_c = dtype_v<T>;
#else
template <class T>
inline constexpr StaticDType<dtype_v<T> > dtype_c{};
#endif

template <DType D, class F>
constexpr decltype(auto) visit_dtype(StaticDType<D>, F&& f) {
  if constexpr (D == DType::f32)
    return f(f32{});
  else if constexpr (D == DType::bf16)
    return f(bf16{});
  else if constexpr (D == DType::f64)
    return f(f64{});
  else if constexpr (D == DType::i32)
    return f(i32{});
  else if constexpr (D == DType::u32)
    return f(u32{});
  else if constexpr (D == DType::u8)
    return f(u8{});
  else
    return f(bool_{});
}

}  // namespace shardlib
