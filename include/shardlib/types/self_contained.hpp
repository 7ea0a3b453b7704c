// self_contained<T>: the check of what a function that runs again in the backward pass captures. By then, objects that
// it refers to may be gone.
#pragma once

#include <cstddef>
#include <type_traits>

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

}  // namespace shardlib
