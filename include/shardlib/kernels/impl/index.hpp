// Definitions of index.hpp.
#pragma once

#include "shardlib/kernels/index.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::kernels {

namespace detail {

/// The loops of a lookup over the result, the table and the indices.
inline Nest<3> lookup_nest(const Lookup& l) {
  Nest<3> nest;
  const Dims out = row_major(l.shape);
  for (std::size_t d = 0; d < l.shape.size(); ++d) {
    nest.push(l.shape[d], {out[static_cast<int>(d)], l.table_strides[d], l.index_strides[d]});
  }
  return nest;
}

template <class I>
void check_ids(const Lookup& l, const I* indices, const char* op) {
  Nest<1> nest;  // each index once: skips the dims that the indices lack
  for (std::size_t d = 0; d < l.shape.size(); ++d) {
    if (l.index_strides[d] != 0) nest.push(l.shape[d], {l.index_strides[d]});
  }
  const auto inner = nest.pop();
  const std::int64_t rows = nest.count();
  Walk<1> walk(nest, 0);
  for (std::int64_t r = 0; r < rows; ++r, walk.next()) {
    for (std::int64_t i = 0; i < inner.extent; ++i) {
      const auto id = static_cast<std::int64_t>(indices[walk.offsets[0] + i * inner.strides[0]]);
      if (id >= 0 && id < l.global_rows) continue;
      throw Error(std::string(op) + ": id " + std::to_string(id) + " is outside the table's size " +
                  std::to_string(l.global_rows) + "; check the data against the vocabulary size");
    }
  }
}

template <class F>
void visit_ids(const Exec& exec, const Lookup& l, const void* indices, const char* op, const F& f) {
  if (product(l.shape) == 0) return;
  const auto run = [&]<class I>(const I* ids) {
    if (!exec.dry) {
      const MemoryAccess open = exec.access();
      check_ids(l, ids, op);
    }
    f(ids);
  };
  if (l.index_dtype == DType::i32) return run(static_cast<const i32*>(indices));
  if (l.index_dtype == DType::u32) return run(static_cast<const u32*>(indices));
  throw Error(std::string(op) + ": indices are " + std::string(name(l.index_dtype)) + "; cast them to i32 or u32");
}

template <class U, class I>
void gather_rows(const Exec& exec, const Lookup& l, const U* table, const I* indices, U* out) {
  Nest<3> nest = lookup_nest(l);
  const auto inner = nest.pop();
  const std::int64_t n = inner.extent;
  const auto [out_stride, table_stride, index_stride] = inner.strides;
  const std::int64_t rows = nest.count();
  const std::int64_t group = std::max<std::int64_t>(1, 8192 / n);
  exec.for_each((rows + group - 1) / group, [&, out_stride = out_stride, table_stride = table_stride,
                                             index_stride = index_stride](std::int64_t item) {
    Walk<3> walk(nest, item * group);
    for (std::int64_t r = item * group; r < std::min(rows, (item + 1) * group); ++r, walk.next()) {
      U* to = out + walk.offsets[0];
      const U* from = table + walk.offsets[1];
      const I* id = indices + walk.offsets[2];
      if (index_stride == 0 && table_stride == 1 && out_stride == 1) {
        const std::int64_t row = static_cast<std::int64_t>(*id) - l.first_row;
        const std::size_t bytes = static_cast<std::size_t>(n) * sizeof(U);
        if (row >= 0 && row < l.rows) {
          std::memcpy(to, from + row * l.row_stride, bytes);
        } else {
          std::memset(to, 0, bytes);
        }
        continue;
      }
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t row = static_cast<std::int64_t>(id[i * index_stride]) - l.first_row;
        const bool here = row >= 0 && row < l.rows;
        to[i * out_stride] = here ? from[i * table_stride + row * l.row_stride] : U{};
      }
    }
  });
}

/// Adds in the order of the result's elements. Threads divide the innermost dim, so that each element of the table
/// has one writer, and the order is the same for any number of threads.
template <class T, class I>
void scatter_rows(const Exec& exec, const Lookup& l, const T* cotangent, const I* indices, T* table) {
  Nest<3> nest = lookup_nest(l);
  const auto inner = nest.pop();
  const auto [in_stride, table_stride, index_stride] = inner.strides;
  const bool splits = exec.threads > 1 && index_stride == 0 && table_stride != 0;
  const std::int64_t piece = splits ? 64 : inner.extent;
  const std::int64_t rows = nest.count();
  exec.for_each((inner.extent + piece - 1) / piece, [&, in_stride = in_stride, table_stride = table_stride,
                                                     index_stride = index_stride](std::int64_t item) {
    const std::int64_t begin = item * piece;
    const std::int64_t end = std::min(inner.extent, begin + piece);
    Walk<3> walk(nest, 0);
    for (std::int64_t r = 0; r < rows; ++r, walk.next()) {
      const T* from = cotangent + walk.offsets[0];
      T* to = table + walk.offsets[1];
      const I* id = indices + walk.offsets[2];
      if (index_stride == 0 && table_stride == 1 && in_stride == 1) {
        const std::int64_t row = static_cast<std::int64_t>(*id) - l.first_row;
        if (row < 0 || row >= l.rows) continue;
        T* sums = to + row * l.row_stride + begin;
        from += begin;
        independent(end - begin, [=](std::int64_t i) { sums[i] += from[i]; });
        continue;
      }
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t row = static_cast<std::int64_t>(id[i * index_stride]) - l.first_row;
        if (row < 0 || row >= l.rows) continue;
        to[i * table_stride + row * l.row_stride] += from[i * in_stride];
      }
    }
  });
}

/// As above for bf16, which is rounded once: the sum of an element is taken as a whole, in f32 and in the same order.
template <class I>
void scatter_rows(const Exec& exec, const Lookup& l, const bf16* cotangent, const I* indices, bf16* table) {
  if (exec.dry) return;
  const MemoryAccess open = exec.access();
  Nest<3> nest = lookup_nest(l);
  Nest<3>::Loop inner;
  if (nest.depth > 0 && nest.loop(nest.depth - 1).strides == std::array<std::int64_t, 3>{1, 1, 0}) inner = nest.pop();
  struct Addition {
    std::int64_t to, from;  // offsets of rows
  };
  std::vector<Addition> additions;
  const std::int64_t rows = nest.count();
  Walk<3> walk(nest, 0);
  for (std::int64_t r = 0; r < rows; ++r, walk.next()) {
    const std::int64_t row = static_cast<std::int64_t>(indices[walk.offsets[2]]) - l.first_row;
    if (row >= 0 && row < l.rows) additions.push_back({walk.offsets[1] + row * l.row_stride, walk.offsets[0]});
  }
  std::ranges::stable_sort(additions, {}, &Addition::to);
  std::vector<std::span<const Addition>> sums;
  for (auto begin = additions.cbegin(); begin != additions.cend();) {
    const auto end = std::find_if(begin, additions.cend(), [&](const Addition& a) { return a.to != begin->to; });
    sums.emplace_back(begin, end);
    begin = end;
  }
  exec.for_each(std::ssize(sums), [&](std::int64_t item) {
    const auto& sum = sums[static_cast<std::size_t>(item)];
    bf16* const row = table + sum.front().to;
    constexpr std::int64_t piece = 64;
    for (std::int64_t begin = 0; begin < inner.extent; begin += piece) {
      const std::int64_t n = std::min(piece, inner.extent - begin);
      f32 wide[piece];
      for (std::int64_t i = 0; i < n; ++i) wide[i] = static_cast<f32>(row[begin + i]);
      for (const Addition& a : sum) {
        const bf16* const from = cotangent + a.from + begin;
        for (std::int64_t i = 0; i < n; ++i) wide[i] += static_cast<f32>(from[i]);
      }
      for (std::int64_t i = 0; i < n; ++i) row[begin + i] = bf16(wide[i]);
    }
  });
}

}  // namespace detail

template <class AnyDType>
void gather(const Exec& exec, AnyDType dtype, const Lookup& lookup, const void* table, const void* indices, void* out) {
  detail::visit_ids(exec, lookup, indices, "gather", [&](const auto* ids) {
    visit_dtype(dtype, [&]<class T>(T) {
      // Only bytes move, so types of the same size share code.
      using U = Word<sizeof(T)>;
      detail::gather_rows(exec, lookup, static_cast<const U*>(table), ids, static_cast<U*>(out));
    });
  });
}

template <class AnyDType>
void scatter_add_to(const Exec& exec, AnyDType dtype, const Lookup& lookup, const void* cotangent, const void* indices,
                    void* sums) {
  visit_dtype(dtype, [&]<class T>(T) {
    if constexpr (floating<T>) {
      detail::visit_ids(exec, lookup, indices, "scatter_add", [&](const auto* ids) {
        detail::scatter_rows(exec, lookup, static_cast<const T*>(cotangent), ids, static_cast<T*>(sums));
      });
    } else {
      throw Error("scatter_add: no gradient of " + std::string(name(dtype)) + "; use f32, bf16 or f64");
    }
  });
}

template <class AnyDType>
void scatter_add(const Exec& exec, AnyDType dtype, const Lookup& lookup, const void* cotangent, const void* indices,
                 void* table_out, std::int64_t table_elements) {
  visit_dtype(dtype, [&]<class T>(T) { exec.zero(table_out, static_cast<std::size_t>(table_elements) * sizeof(T)); });
  scatter_add_to(exec, dtype, lookup, cotangent, indices, table_out);
}

}  // namespace shardlib::kernels
