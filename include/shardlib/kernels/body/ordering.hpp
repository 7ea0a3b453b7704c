// Kernels of ordering.hpp, for teams of several lanes: they list the elements of rows, which sort_list sorts.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "shardlib/kernels/strided.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib::kernels::body {

/// An integer that is less where the element is: NaN is greater than all numbers, and 0 equals -0.
template <class T>
constexpr std::uint64_t order_key(T element) {
  if constexpr (floating<T>) {
    using A = accumulator_t<T>;
    using Bits = std::conditional_t<std::is_same_v<A, f64>, std::uint64_t, std::uint32_t>;
    constexpr Bits sign = Bits{1} << (sizeof(Bits) * 8 - 1);
    const auto x = static_cast<A>(element);
    if (x != x) return std::numeric_limits<Bits>::max();
    const auto bits = x == A(0) ? Bits{0} : std::bit_cast<Bits>(x);
    return (bits & sign) != 0 ? Bits(~bits) : Bits(bits | sign);
  } else if constexpr (std::is_same_v<T, bool_>) {
    return element.byte;
  } else {
    return static_cast<std::uint64_t>(static_cast<std::int64_t>(element) - std::numeric_limits<i32>::min());
  }
}

/// An element of a row. The lower index of equal elements comes first.
struct Ordered {
  std::uint64_t key;
  std::int32_t row, index;

  friend constexpr bool operator<(const Ordered& a, const Ordered& b) {
    if (a.row != b.row) return a.row < b.row;
    return a.key < b.key || (a.key == b.key && a.index < b.index);
  }
};

/// Lists the elements that count of the rows from `first` on, `total` in all, in pieces.
template <class T>
struct ListElements {
  static constexpr std::int64_t piece = 1024;
  const T* in;
  Ordered* list;
  Along rows;
  std::int64_t first, total;
  bool descending;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t longest = piece;
    const std::int64_t begin = item * longest;
    team.lanes(std::min(longest, total - begin), [=, this](std::int64_t i) {
      const std::int64_t counted = rows.counted(), row = (begin + i) / counted, index = (begin + i) % counted;
      const std::uint64_t key = order_key(in[rows.offset(first + row, index)]);
      list[begin + i] = {descending ? ~key : key, static_cast<std::int32_t>(row), static_cast<std::int32_t>(index)};
    });
  }
};

/// Writes the indices of the first k elements of the rows from `first` on, and zeros after them, `total` in all, in
/// pieces. The list has `counted` elements of each row.
struct TakeIndices {
  static constexpr std::int64_t piece = 1024;
  const Ordered* list;
  i32* out;
  Along rows;
  std::int64_t first, counted, k, total;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t longest = piece;
    const std::int64_t begin = item * longest;
    team.lanes(std::min(longest, total - begin), [=, this](std::int64_t i) {
      const std::int64_t row = (begin + i) / rows.n, place = (begin + i) % rows.n;
      out[rows.offset(first + row, place)] = place < k ? list[row * counted + place].index : 0;
    });
  }
};

}  // namespace shardlib::kernels::body
