// The numbers of an object, by which a function shows that it does the same when it runs again.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <type_traits>

#include "shardlib/types/owned.hpp"

namespace shardlib::detail {

/// Whether bytes [begin, end) of a T are those of numbers. Padding has no value, so no constant expression reads it.
template <class T>
constexpr bool reads(std::size_t begin, std::size_t end) {
  const auto all = __builtin_bit_cast(zero_bytes<sizeof(T)>, __builtin_bit_cast(T, zero_bytes<sizeof(T)>{}));
  while (begin < end && all.bytes[begin] == 0) ++begin;
  return true;
}
template <class T, std::size_t Begin, std::size_t End, bool = reads<T>(Begin, End)>
constexpr bool hold_numbers(int) {
  return true;
}
template <class T, std::size_t Begin, std::size_t End>
constexpr bool hold_numbers(...) {
  return std::is_pointer_v<T>;
}
template <class T, std::size_t Begin, std::size_t End>
constexpr void mark_padding(std::array<bool, sizeof(T)>& padding) {
  constexpr std::size_t middle = (Begin + End) / 2;
  if constexpr (middle == Begin) {
    padding[Begin] = !hold_numbers<T, Begin, End>(0);
  } else if constexpr (!hold_numbers<T, Begin, End>(0)) {
    mark_padding<T, Begin, middle>(padding);
    mark_padding<T, middle, End>(padding);
  }
}
template <class T>
inline constexpr auto padding_of = [] {
  std::array<bool, sizeof(T)> padding{};
  mark_padding<T, 0, sizeof(T)>(padding);
  return padding;
}();

/// The numbers of an object: those of its bytes that are not padding.
struct NumbersIn {
  const void* object = nullptr;
  std::span<const bool> padding = {};  ///< for each byte whether it is padding
};
/// The numbers that a kernel has besides its operands. A kernel that holds operands has an overload of its own.
template <class T>
NumbersIn numbers_in(const T& kernel) {
  // g++ takes the padding of a long double for a part of the number.
  if constexpr (self_contained<T> && std::is_trivially_copyable_v<T> && !std::is_empty_v<T> &&
                alignof(T) < alignof(long double))
    return {&kernel, padding_of<T>};
  else
    return {};
}

}  // namespace shardlib::detail
