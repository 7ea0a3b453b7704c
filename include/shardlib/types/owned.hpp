// Functions that run again in the backward pass, when what they refer to may be gone: what can be told of their
// captures.
#pragma once

#include <cstddef>
#include <type_traits>

namespace shardlib {
namespace detail {

template <std::size_t N>
struct zero_bytes {
  unsigned char bytes[N];
};
// A constant expression makes no references and no pointers out of bytes.
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

/// Whether a T is made of numbers alone, without pointers, references and unions, so that a copy refers to nothing
/// else: `self_contained<double>`. A function pointer is one too, and a lambda that captures nothing, or numbers by
/// value. A specialisation may say so of a type of one's own that holds a union.
template <class T>
inline constexpr bool self_contained = detail::is_self_contained<T>();

}  // namespace shardlib
