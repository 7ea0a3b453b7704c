// The same devices under another factorization of their number: one axis `e` in place of `d` and `s`, or two axes
// in place of one. No data moves: a device keeps its rank, its shards and its memory.
#pragma once

#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"

namespace shardlib {

namespace detail {
/// The device as one of a mesh with the dims of `axes`, "e t", as its axes. `given` has the sizes that the map does not
/// determine.
DevicePtr reinterpreted(const OpInfo& op, const DevicePtr& device, const TensorSpec& axes, const Sizes& given);
/// The value on another view of its device, and its cotangent, whose spec is `dual`, back on the value's own.
ValuePtr reinterpreted(const OpInfo& op, const ValuePtr& x, const DevicePtr& device, const TensorSpec& out,
                       const TensorSpec& dual);
}  // namespace detail

/// The mesh with other axes in place of some that follow each other; ranks stay. One new axis gets the product of
/// the sizes that it replaces. For several new ones the call gives the sizes: `reinterpret<"e -> d s">(mesh, {{"d", 2},
/// {"s", 4}})`. Throws if their product is another number of devices. `reinterpret<"d s -> e">(mesh)`
template <OpSpec Axes, Spec A>
auto reinterpret(const Mesh<A>& mesh, const Sizes& sizes = {}, Site site = Site::current())
    -> Mesh<detail::result_of<rules::reinterpret_mesh, Axes, A>> {
  using Out = Mesh<detail::result_of<rules::reinterpret_mesh, Axes, A>>;
  return Out(detail::reinterpreted(detail::Calling("reinterpret", Axes, site), mesh.device(), detail::parsed<Out::axes>,
                                   sizes));
}

/// The tensor on another mesh of the same devices, without communication or copy: "X/d/s M" becomes "X/e M", "+d +s"
/// becomes "+e", and what is replicated stays replicated. Throws if the new axes are not the same devices in the same
/// order. Backward: the inverse reinterpret. `reinterpret<"d s -> e">(x, mesh)`
template <OpSpec Axes, dtype D, Spec S, Spec A>
auto reinterpret(const Tensor<D, S>& x, const Mesh<A>& mesh, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::reinterpret, Axes, A, S>> {
  using Out = Tensor<D, detail::result_of<rules::reinterpret, Axes, A, S>>;
  const detail::Calling op{"reinterpret", Axes, site};
  return Out(detail::reinterpreted(op, x.value(), mesh.device(), detail::parsed<Out::spec>,
                                   detail::parsed<detail::dual_spec<S, detail::axes_of<S>()>()>));
}
/// A compile error: a tensor comes first, and the new mesh second.
template <OpSpec Axes, class First, class... Args>
requires((is_tensor<First> && sizeof...(Args) == 0) ||
         detail::tensor_first<Args...>) auto reinterpret(const First& first, const Args&... args) {
  return detail::wrong_call<"reinterpret", "reinterpret<\"d s -> e\">(x, new_mesh)">(first, args...);
}

}  // namespace shardlib
