// The numbers of an object, by which a function shows that it does the same when it runs again.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <type_traits>
#include <utility>

#include "shardlib/types/self_contained.hpp"

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
// g++ takes the padding of a long double for a part of its number, but a byte that is set there gets lost.
template <class T>
constexpr bool keeps_byte(std::size_t at) {
  zero_bytes<sizeof(T)> all{};
  all.bytes[at] = 1;
  return __builtin_bit_cast(zero_bytes<sizeof(T)>, __builtin_bit_cast(T, all)).bytes[at] == 1;
}
template <class T, std::size_t At, bool Keeps = keeps_byte<T>(At)>
constexpr bool is_kept(int) {
  return Keeps;
}
template <class T, std::size_t At>
constexpr bool is_kept(...) {
  return false;
}
template <class T, std::size_t At>
constexpr bool pads_long_double() {
  if constexpr (At % alignof(long double) >= 10)
    return !is_kept<T, At>(0);
  else
    return false;
}
template <class T>
inline constexpr auto padding_of = [] {
  std::array<bool, sizeof(T)> padding{};
  mark_padding<T, 0, sizeof(T)>(padding);
  if constexpr (alignof(T) >= alignof(long double)) [&]<std::size_t... At>(std::index_sequence<At...>) {
      ((padding[At] = padding[At] || pads_long_double<T, At>()), ...);
    }
  (std::make_index_sequence<sizeof(T)>());
  return padding;
}();

/// The numbers of an object: those of its bytes that are not padding. A union has none, because it is
/// unknown which of its members holds a value.
struct NumbersIn {
  const void* object = nullptr;
  std::span<const bool> padding = {};  ///< for each byte whether it is padding
};
/// The numbers that a kernel has besides its operands. A kernel that holds operands has an overload of its own.
template <class T>
NumbersIn numbers_in(const T& kernel) {
  if constexpr (self_contained<T> && std::is_trivially_copyable_v<T> && !std::is_empty_v<T>)
    return {&kernel, padding_of<T>};
  else
    return {};
}

}  // namespace shardlib::detail
