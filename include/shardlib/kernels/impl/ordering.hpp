// Definitions of ordering.hpp.
#pragma once

#include "shardlib/kernels/ordering.hpp"

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "shardlib/kernels/body/ordering.hpp"
#include "shardlib/kernels/impl/sort_list.hpp"

namespace shardlib::kernels {

namespace detail {

/// Sorts each row with one lane, no further than the k elements that are wanted.
template <class T>
void argsort_of_rows(const Exec& exec, const T* x, const Along& a, bool descending, std::int64_t k, i32* out,
                     std::int64_t rows) {
  using A = std::conditional_t<std::is_same_v<T, bool_>, u8, accumulator_t<T>>;
  const std::int64_t inner = a.inner, counted = a.counted();
  const Along results{a.outer, rows, inner};
  const std::int64_t even = (counted + 1) / 2 * 2;  // keeps the elements after the indices aligned
  const std::size_t bytes = static_cast<std::size_t>(even) * (sizeof(i32) + sizeof(A));
  exec.count_scratch(a.rows(), bytes);
  exec.for_each(a.rows(), [&](std::int64_t item) {
    const T* from = x + a.offset(item);
    const Buffer scratch = exec.pool->allocate(bytes);
    i32* const order = scratch.as<i32>();
    A* const row = reinterpret_cast<A*>(order + even);
    for (std::int64_t i = 0; i < counted; ++i) {
      order[i] = static_cast<i32>(i);
      row[i] = static_cast<A>(from[i * inner]);
    }
    const auto less = [row](i32 i, i32 j) { return row[i] < row[j] || (row[j] != row[j] && row[i] == row[i]); };
    const auto before = [&](i32 i, i32 j) {
      const bool ahead = descending ? less(j, i) : less(i, j), behind = descending ? less(i, j) : less(j, i);
      return ahead || (!behind && i < j);
    };
    std::partial_sort(order, order + k, order + counted, before);
    i32* to = out + results.offset(item);
    for (std::int64_t i = 0; i < rows; ++i) to[i * inner] = i < k ? order[i] : 0;
  });
}

/// The same on any team, by a list of the elements of as many rows as fit into scratch memory.
template <class T>
void argsort_by_list(const Exec& exec, const T* x, const Along& a, bool descending, std::int64_t k, i32* out,
                     std::int64_t rows) {
  using List = body::ListElements<T>;
  using Take = body::TakeIndices;
  constexpr std::int64_t longest = 1 << 22;
  const std::int64_t all = a.rows(), counted = a.counted(),
                     at_once = std::clamp<std::int64_t>(longest / std::max<std::int64_t>(1, counted), 1, all);
  const std::size_t bytes = static_cast<std::size_t>(at_once * counted) * sizeof(body::Ordered);
  const Buffer list = exec.pool->allocate(bytes), other = exec.pool->allocate(bytes);
  for (std::int64_t first = 0; first < all; first += at_once) {
    const std::int64_t group = std::min(at_once, all - first), elements = group * counted, results = group * rows;
    exec.for_items((elements + List::piece - 1) / List::piece, 0,
                   List{x, list.as<body::Ordered>(), a, first, elements, descending});
    const body::Ordered* const sorted = sort_list(exec, list.as<body::Ordered>(), other.as<body::Ordered>(), elements);
    exec.for_items((results + Take::piece - 1) / Take::piece, 0,
                   Take{sorted, out, {a.outer, rows, a.inner}, first, counted, k, results});
  }
}

}  // namespace detail

template <class AnyDType>
void argsort(const Exec& exec, AnyDType dtype, const void* x, const Along& a, bool descending, std::int64_t k, i32* out,
             std::int64_t rows) {
  if (a.rows() * rows == 0) return;
  visit_dtype(dtype, [&]<class T>(T) {
    const auto sort = detail::single_lane(exec) ? detail::argsort_of_rows<T> : detail::argsort_by_list<T>;
    sort(exec, static_cast<const T*>(x), a, descending, k, out, rows);
  });
}

}  // namespace shardlib::kernels
