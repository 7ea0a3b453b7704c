// Definitions of ordering.hpp.
#pragma once

#include "shardlib/kernels/ordering.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "shardlib/device/exec.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib::kernels {

template <class AnyDType>
void argsort(const Exec& exec, AnyDType dtype, const void* x, std::int64_t outer, std::int64_t n, std::int64_t inner,
             std::int64_t padding, bool descending, std::int64_t k, i32* out, std::int64_t rows) {
  if (outer * inner * rows == 0) return;
  const std::int64_t counted = n - padding;
  visit_dtype(dtype, [&]<class T>(T) {
    using A = std::conditional_t<std::is_same_v<T, bool_>, u8, accumulator_t<T>>;
    const std::int64_t even = (counted + 1) / 2 * 2;  // keeps the elements after the indices aligned
    const std::size_t bytes = static_cast<std::size_t>(even) * (sizeof(i32) + sizeof(A));
    exec.count_scratch(outer * inner, bytes);
    exec.for_each(outer * inner, [&](std::int64_t item) {
      const T* from = static_cast<const T*>(x) + item / inner * n * inner + item % inner;
      const Buffer scratch = exec.pool->allocate(bytes);
      i32* const order = scratch.as<i32>();
      A* const row = reinterpret_cast<A*>(order + even);
      for (std::int64_t i = 0; i < counted; ++i) {
        order[i] = static_cast<i32>(i);
        row[i] = static_cast<A>(from[i * inner]);
      }
      const auto less = [row](i32 a, i32 b) { return row[a] < row[b] || (row[b] != row[b] && row[a] == row[a]); };
      const auto before = [&](i32 a, i32 b) {
        const bool ahead = descending ? less(b, a) : less(a, b), behind = descending ? less(a, b) : less(b, a);
        return ahead || (!behind && a < b);
      };
      std::partial_sort(order, order + k, order + counted, before);
      i32* to = out + item / inner * rows * inner + item % inner;
      for (std::int64_t i = 0; i < rows; ++i) to[i * inner] = i < k ? order[i] : 0;
    });
  });
}

}  // namespace shardlib::kernels
