// Definitions of index.hpp.
#pragma once

#include "shardlib/kernels/index.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <type_traits>

#include "shardlib/kernels/body/check.hpp"
#include "shardlib/kernels/body/index.hpp"
#include "shardlib/kernels/check.hpp"
#include "shardlib/kernels/impl/sort_list.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::kernels {

namespace detail {

/// The loops of a lookup over the result, the table and the indices.
inline Nest<3> lookup_nest(const Lookup& l) {
  Nest<3> nest;
  const DimVector out = row_major(l.shape);
  for (std::size_t d = 0; d < l.shape.size(); ++d) {
    nest.push(l.shape[d], {out[static_cast<int>(d)], l.table_strides[d], l.index_strides[d]});
  }
  return nest;
}

/// Throws Error if an id is outside the table, on a device when the host next waits for it.
template <class I>
void check_ids(const Exec& exec, const Lookup& l, const I* indices, const char* op) {
  Nest<1> nest;  // each index once: skips the dims that the indices lack
  for (std::size_t d = 0; d < l.shape.size(); ++d)
    if (l.index_strides[d] != 0) nest.push(l.shape[d], {l.index_strides[d]});
  check(exec, nest, body::IdOutside<I>{indices, l.global_rows}, [&](const std::string& id) {
    return std::string(op) + ": index " + id + " is outside dim `" + std::string(l.dim) + "` of size " +
           std::to_string(l.global_rows) + "; check the data against that size";
  });
}

template <class F>
void visit_ids(const Exec& exec, const Lookup& l, const void* indices, const char* op, const F& f) {
  if (product(l.shape) == 0) return;
  const auto run = [&]<class I>(const I* ids) {
    if (!l.joined) check_ids(exec, l, ids, op);
    f(ids);
  };
  if (l.index_dtype == DType::i32) return run(static_cast<const i32*>(indices));
  if (l.index_dtype == DType::u32) return run(static_cast<const u32*>(indices));
  throw Error(std::string(op) + ": indices are " + std::string(name(l.index_dtype)) + "; cast them to i32 or u32");
}

inline body::TableRows table_rows(const Lookup& l) {
  return {l.first_row, l.rows, l.row_stride};
}

template <class U, class I>
void gather_rows(const Exec& exec, const Lookup& l, const U* table, const I* indices, U* out) {
  using Kernel = body::Gather<U, I>;
  const body::RowLoops<3> loops(lookup_nest(l), Kernel::grain);
  exec.for_items(loops.items(), 0, Kernel{loops, table_rows(l), table, indices, out});
}

/// Adds in the order of the result's elements, with one lane. Threads divide the innermost dim, so that each element of
/// the table has one writer, and the order is the same for any number of threads.
template <class T, class I>
void scatter_in_order(const Exec& exec, const Lookup& l, const T* cotangent, const I* indices, T* table) {
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

/// As above on any team, in the same order. It sorts a list of all additions by the table's rows. Sums are rounded
/// once.
template <class T, class I>
void scatter_sorted(const Exec& exec, const Lookup& l, const T* cotangent, const I* indices, T* table) {
  Nest<3> nest = lookup_nest(l);
  std::int64_t columns = 1;  // of a row that is added as a whole
  if (nest.depth > 0 && nest.loop(nest.depth - 1).strides == std::array<std::int64_t, 3>{1, 1, 0})
    columns = nest.pop().extent;
  for (int d = 0; d < nest.depth; ++d) nest.loop(d).strides[0] /= columns;  // the number of a row, not its offset
  const std::int64_t n = nest.count();
  const std::size_t bytes = static_cast<std::size_t>(n) * sizeof(body::Addition);
  const Buffer list = exec.pool->allocate(bytes), other = exec.pool->allocate(bytes);
  const body::RowLoops<3> loops(nest, body::ListAdditions<I>::grain);
  exec.for_items(loops.items(), 0, body::ListAdditions<I>{loops, table_rows(l), indices, list.as<body::Addition>()});
  const body::AddRows<T> add(sort_list(exec, list.as<body::Addition>(), other.as<body::Addition>(), n), cotangent,
                             table, n, columns);
  exec.for_items(add.items(), 0, add);
}

}  // namespace detail

template <class I>
void join_ids(const Exec& exec, const Lookup& lookup, const I* ids, const char* indices, u32* joined) {
  if (product(lookup.shape) == 0) return;
  detail::check_ids(exec, lookup, ids, indices);
  using Kernel = body::JoinIds<I>;
  Nest<2> nest;
  const DimVector out = row_major(lookup.shape);
  for (std::size_t d = 0; d < lookup.shape.size(); ++d)
    nest.push(lookup.shape[d], {out[static_cast<int>(d)], lookup.index_strides[d]});
  const body::RowLoops<2> loops(nest, Kernel::grain);
  exec.for_items(loops.items(), 0, Kernel{loops, detail::table_rows(lookup), ids, joined});
}

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
void scatter_add(const Exec& exec, AnyDType dtype, const Lookup& lookup, const void* cotangent, const void* indices,
                 void* sums) {
  visit_dtype(dtype, [&]<class T>(T) {
    if constexpr (floating<T>) {
      detail::visit_ids(exec, lookup, indices, "scatter_add", [&](const auto* ids) {
        const auto* const from = static_cast<const T*>(cotangent);
        if constexpr (std::is_same_v<T, accumulator_t<T>>) {
          if (detail::single_lane(exec))
            return detail::scatter_in_order(exec, lookup, from, ids, static_cast<T*>(sums));
        }
        detail::scatter_sorted(exec, lookup, from, ids, static_cast<T*>(sums));
      });
    } else {
      throw Error("scatter_add: no gradient of " + std::string(name(dtype)) + "; use f32, bf16 or f64");
    }
  });
}

}  // namespace shardlib::kernels
