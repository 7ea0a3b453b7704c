// Kernels of ragged_all_to_all and grouped_einsum for a device's shards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/collectives.hpp"
#include "shardlib/compute/einsum.hpp"
#include "shardlib/kernels/einsum.hpp"
#include "shardlib/ops/ragged.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/function_ref.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// The first row of each place and group on a device: the entry of place p and group x is at [p * groups + x]. Rows are
/// ordered by x, then by p. `total` is the number of counted rows. Where there are no counts to read, in a dry run, all
/// rows count, and belong to no group.
struct RowStarts {
  std::int64_t places = 0, groups = 0, total = 0;
  std::vector<std::int64_t> first, size;
  bool known = false;  ///< whether there are counts

  /// Throws if a count is negative or the counts exceed the rows of `tensor`, which the message calls `rows`.
  SHARDLIB_INLINE RowStarts(const Value& counts, const Value& tensor, const char* rows);
  [[nodiscard]] std::size_t at(std::int64_t place, std::int64_t group) const {
    return static_cast<std::size_t>(place * groups + group);
  }
  /// The first row of a group, or `total` for the number of groups.
  [[nodiscard]] std::int64_t group(std::int64_t x) const { return x == groups ? total : first[at(0, x)]; }
};

/// Sets the rows of the result that nothing counts to zero.
SHARDLIB_INLINE void zero_rows(const Value& out, const Buffer& result, std::int64_t first);
/// The sizes of a shard of one group: without the first dim, or with `rows` in its place.
SHARDLIB_INLINE Shape shape_of_rows(const Value& x, std::int64_t rows);
SHARDLIB_INLINE Shape shape_of_group(const Value& x);
/// Makes the result of a product of `rows` with `other`: counts its floating-point operations and calls
/// write(where the counted rows begin, result).
SHARDLIB_INLINE Buffer grouped(const Value& out, const Value& rows, const Value& other, const Value& counts,
                               FunctionRef<void(const RowStarts&, const Buffer&)> write);

template <class D>
Buffer GroupedProduct<D>::operator()(const Value& out) const {
  return grouped(out, *rows, *weights, *counts, [&](const RowStarts& starts, const Buffer& result) {
    const Shape one = shape_of_group(*weights);
    const D *const from = rows->template as<const D>(), *const w = weights->template as<const D>();
    const std::int64_t in_row = product(shape_of_group(*rows)), out_row = product(shape_of_group(out));
    for (std::int64_t x = 0; x < starts.groups; ++x) {
      const std::int64_t first = starts.group(x), size = starts.group(x + 1) - first;
      if (size == 0) continue;
      kernels::einsum(out.device->exec(), *plan, dtype_c<D>, dtype_c<D>, from + first * in_row,
                      view(shape_of_rows(*rows, size)), w + x * product(one), view(one),
                      result.template as<D>() + first * out_row);
    }
    zero_rows(out, result, starts.total);
  });
}

template <class D>
Buffer GroupedOuter<D>::operator()(const Value& out) const {
  return grouped(out, *a, *b, *counts, [&](const RowStarts& starts, const Buffer& result) {
    const D *const left = a->template as<const D>(), *const right = b->template as<const D>();
    const std::int64_t a_row = product(shape_of_group(*a)), b_row = product(shape_of_group(*b)),
                       one = product(shape_of_group(out));
    for (std::int64_t x = 0; x < starts.groups; ++x) {
      const std::int64_t first = starts.group(x), size = starts.group(x + 1) - first;
      D* const to = result.template as<D>() + x * one;
      if (size == 0)
        out.device->exec().zero(to, static_cast<std::size_t>(one) * sizeof(D));
      else
        kernels::einsum(out.device->exec(), *plan, dtype_c<D>, dtype_c<D>, left + first * a_row,
                        view(shape_of_rows(*a, size)), right + first * b_row, view(shape_of_rows(*b, size)), to);
    }
  });
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/ragged.hpp"
#endif
