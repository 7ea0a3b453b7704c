// Ops by the positions of elements along dims: flip, roll, one_hot, tril, triu, diagonal.
#pragma once

#include <cstdint>

#include "shardlib/ops/create.hpp"
#include "shardlib/ops/elementwise.hpp"
#include "shardlib/ops/index.hpp"
#include "shardlib/ops/map.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib {

namespace detail {
struct Flip {
  int dim;
  Buffer operator()(const Value& in, const Value& out) const;
};
template <DimName Dim>
struct FlipVjp {
  template <class Ct>
  auto operator()(const Ct& ct) const {
    return flip<Dim>(ct);
  }
};
}  // namespace detail

/// The elements in reverse order along an unsharded dim. Backward: flip. `flip<"L">(x)`
template <DimName Dim, dtype D, Spec S>
auto flip(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::named_result_of<rules::linear_along, "flip", Dim, S>> {
  constexpr int dim = detail::parsed<S>.find(Dim);
  const detail::Calling op{"flip", Dim, site};
  return detail::record_unary<"flip", Tensor<D, S>>(op, x, detail::sizes_of(x.value()), detail::Flip{dim},
                                                    detail::vjp(x, detail::FlipVjp<Dim>{}));
}
SHARDLIB_NEEDS_DIM(flip, "flip<\"L\">(x)")

namespace detail {
struct Roll {
  int dim;
  std::int64_t by;
  Buffer operator()(const Value& in, const Value& out) const;
};
template <DimName Dim>
struct RollVjp {
  std::int64_t by;
  template <class Ct>
  auto operator()(const Ct& ct) const {
    return roll<Dim>(ct, -by);
  }
};
}  // namespace detail

/// Moves the elements by `by` places along an unsharded dim, and those beyond its end to its beginning. Backward: roll
/// by -by. `roll<"L">(x, 1)`
template <DimName Dim, dtype D, Spec S>
auto roll(const Tensor<D, S>& x, WholeNumber by, Site site = Site::current())
    -> Tensor<D, detail::named_result_of<rules::linear_along, "roll", Dim, S>> {
  constexpr int dim = detail::parsed<S>.find(Dim);
  const detail::Calling op{"roll", Dim, site};
  const std::int64_t size = x.size(Dim), places = size > 0 ? by % size : 0;  // the backward pass negates it
  return detail::record_unary<"roll", Tensor<D, S>>(op, x, detail::sizes_of(x.value()), detail::Roll{dim, places},
                                                    detail::vjp(x, detail::RollVjp<Dim>{places}));
}
template <class... Args>
requires detail::tensor_first<Args...>
auto roll(const Args&... args) {
  return detail::needs_dim<"roll">(args...);
}
SHARDLIB_FORM(roll, "roll<\"L\">(x, 1)")

namespace detail {
template <class D>
struct OneAt {
  template <class I>
  SHARDLIB_FUNCTION auto operator()(const I& id, const i32& position) const {
    return static_cast<scalar_of<D>>(id == static_cast<I>(position) ? 1 : 0);
  }
};
}  // namespace detail

/// 1 at each index along a new dim of the given size, which is the last of the result and may be sharded; 0 elsewhere,
/// and for an index outside of the dim. `one_hot<"V/t">(ids, 8)` of "B/d L" is "B/d L V/t", in f32 or another dtype,
/// `one_hot<"V", bf16>(ids, 8)`
template <Spec V, dtype To = f32, dtype I, Spec S>
auto one_hot(const Tensor<I, S>& indices, DimSize size, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_index<"one_hot", I>, To>, detail::result_of<rules::one_hot, V, S>> {
  using Out = Tensor<To, detail::result_of<rules::one_hot, V, S>>;
  const detail::Calling op{"one_hot", V, site};
  const Tensor<i32, V> positions(detail::create_iota(op, indices.device(), detail::parsed<V>, size));
  return detail::map_as<"one_hot", Out>(op, detail::OneAt<To>{}, indices, positions);
}
SHARDLIB_FORM(one_hot, "one_hot<\"V\">(ids, 8)")

namespace detail {

/// The spec of one dim, or of two, of x.
template <Spec S, int... Dims>
constexpr Spec only_dims() {
  TensorSpec spec;
  (spec.dims.push_back(parsed<S>.dims[Dims]), ...);
  return spec_of(spec);
}
/// Whether an element is kept, by its positions along two dims in the order of the operand.
struct InTriangle {
  std::int64_t diagonal;
  bool lower, rows_first;
  SHARDLIB_FUNCTION bool operator()(const i32& a, const i32& b) const {
    const std::int64_t right = rows_first ? std::int64_t{b} - a : std::int64_t{a} - b;
    return lower ? right <= diagonal : right >= diagonal;
  }
};
template <OpName Name, DimName Rows, DimName Columns, class D, Spec S>
Tensor<D, S> triangle(const OpInfo& op, const Tensor<D, S>& x, std::int64_t diagonal, bool lower) {
  constexpr int rows = parsed<S>.find(Rows), columns = parsed<S>.find(Columns);
  constexpr int a = rows < columns ? rows : columns, b = rows < columns ? columns : rows;
  constexpr Spec first = only_dims<S, a>(), second = only_dims<S, b>(), both = only_dims<S, a, b>();
  const auto along = [&](const TensorSpec& spec) {
    const auto name = spec.dims[0].name;
    return create_iota(op, x.device(), spec, {x.size(name), x.padded_size(name)});
  };
  const Tensor<i32, first> i(along(parsed<first>));
  const Tensor<i32, second> j(along(parsed<second>));
  return masked(map_as<Name, Tensor<bool_, both>>(op, InTriangle{diagonal, lower, rows < columns}, i, j), x, op.site);
}

}  // namespace detail

/// Keeps the elements on and below a diagonal of two dims, which may be sharded; the others become 0. A diagonal of 1
/// is above the main one. Backward: tril. `tril<"Qlen", "Klen">(x)`
template <DimName Rows, DimName Columns, dtype D, Spec S>
auto tril(const Tensor<D, S>& x, WholeNumber diagonal = 0, Site site = Site::current())
    -> Tensor<D, detail::named_result_of<rules::triangle, "tril", Rows, Columns, S>> {
  return detail::triangle<"tril", Rows, Columns>(detail::Calling{"tril", {}, site}, x, diagonal, true);
}
SHARDLIB_FORM(tril, "tril<\"Qlen\", \"Klen\">(x)")
/// Keeps the elements on and above a diagonal of two dims, as tril those below it. `triu<"Qlen", "Klen">(x, 1)`
template <DimName Rows, DimName Columns, dtype D, Spec S>
auto triu(const Tensor<D, S>& x, WholeNumber diagonal = 0, Site site = Site::current())
    -> Tensor<D, detail::named_result_of<rules::triangle, "triu", Rows, Columns, S>> {
  return detail::triangle<"triu", Rows, Columns>(detail::Calling{"triu", {}, site}, x, diagonal, false);
}
SHARDLIB_FORM(triu, "triu<\"Qlen\", \"Klen\">(x)")

namespace detail {

/// The lookup along the dim that goes, by the positions along the one that stays.
template <DimName Kept, DimName Dropped, Spec S>
constexpr OpSpec diagonal_op() {
  TensorSpec table = parsed<S>;
  table.dims[table.find(Dropped)].bracketed = true;
  return op_spec_of(spec_of(table), only_dims<S, parsed<S>.find(Kept)>(), result_of<rules::diagonal, Kept, Dropped, S>);
}
/// Throws if the diagonal ends before the dim that stays.
void require_diagonal(const OpInfo& op, const ValuePtr& x, int kept, int dropped);

}  // namespace detail

/// The elements at equal positions along two dims, of which the first stays and may be sharded; the second must be
/// unsharded and at least as long. Backward: zeros off the diagonal. `diagonal<"X", "Y">(x)` of "B/d X/t Y" is "B/d
/// X/t"
template <DimName Kept, DimName Dropped, dtype D, Spec S>
auto diagonal(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::diagonal, Kept, Dropped, S>> {
  constexpr int kept = detail::parsed<S>.find(Kept), dropped = detail::parsed<S>.find(Dropped);
  constexpr Spec along = detail::only_dims<S, kept>();
  const detail::Calling op{"diagonal", {}, site};
  detail::require_diagonal(op, x.value(), kept, dropped);
  const Tensor<i32, along> positions(
      detail::create_iota(op, x.device(), detail::parsed<along>, {x.size(Kept), x.padded_size(Kept)}));
  using Out = Tensor<D, detail::result_of<rules::diagonal, Kept, Dropped, S>>;
  return detail::lookup<detail::diagonal_op<Kept, Dropped, S>(), Out>(op, x, positions);
}
SHARDLIB_FORM(diagonal, "diagonal<\"X\", \"Y\">(x)")

}  // namespace shardlib
