// Checks the captures of functions that run again in the backward pass. By then, objects that such a function refers
// to may be gone. And the numbers of an object, by which a function shows that it does the same when it runs again.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <type_traits>
#include <utility>

namespace shardlib {
namespace detail {

template <std::size_t N>
struct zero_bytes {
  unsigned char bytes[N];
};
// A constant expression cannot make a reference or a pointer from bytes.
template <class T, bool = (static_cast<void>(__builtin_bit_cast(T, zero_bytes<sizeof(T)>{})), true)>
constexpr bool made_of_bytes(int) {
  return true;
}
template <class T>
constexpr bool made_of_bytes(...) {
  return false;
}

template <class T>
constexpr bool is_self_contained() {
  if constexpr (std::is_empty_v<T> || std::is_function_v<T> || std::is_arithmetic_v<T> || std::is_enum_v<T>)
    return true;
  else if constexpr (std::is_pointer_v<T>)
    return std::is_function_v<std::remove_pointer_t<T>>;
  else if constexpr (std::is_trivially_copyable_v<T>)
    return made_of_bytes<T>(0);
  else
    return false;
}

}  // namespace detail

/// Whether a T consists of numbers only, without pointers, references and unions, so that a copy refers to nothing
/// else: `self_contained<double>`. It is also true for a function pointer, and for a lambda that captures nothing, or
/// numbers by value. A program may specialize it for its own type that holds a union.
template <class T>
inline constexpr bool self_contained = detail::is_self_contained<T>();

namespace detail {

// Padding has no value, so a constant expression cannot read it.
template <class T, std::size_t I,
          bool = __builtin_bit_cast(zero_bytes<sizeof(T)>, __builtin_bit_cast(T, zero_bytes<sizeof(T)>{})).bytes[I] ==
                 0>
constexpr bool holds_number(int) {
  return true;
}
template <class T, std::size_t I>
constexpr bool holds_number(...) {
  return std::is_pointer_v<T>;
}
template <class T, std::size_t... I>
constexpr std::array<bool, sizeof(T)> bytes_of_numbers(std::index_sequence<I...> /*bytes*/) {
  return {holds_number<T, I>(0)...};
}

/// The numbers of an object: those of its bytes that are not padding.
struct NumbersIn {
  const void* object = nullptr;
  std::span<const bool> counts = {};  ///< for each byte
};
template <class T>
inline constexpr auto counted_bytes = bytes_of_numbers<T>(std::make_index_sequence<sizeof(T)>{});
/// The numbers that a kernel has besides its operands. A kernel that holds operands has an overload of its own.
template <class T>
NumbersIn numbers_in(const T& kernel) {
  // g++ takes the padding of a long double for a part of the number.
  if constexpr (self_contained<T> && std::is_trivially_copyable_v<T> && !std::is_empty_v<T> &&
                alignof(T) < alignof(long double))
    return {&kernel, counted_bytes<T>};
  else
    return {};
}

}  // namespace detail
}  // namespace shardlib
