// Host arrays in and out: placement, fetching, and spmd(mesh, f), which places by the types in f's signature.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/ops/collectives.hpp"
#include "shardlib/ops/create.hpp"

namespace shardlib {

/// A whole array in host memory, row-major.
template <dtype D>
struct HostArray {
  std::vector<std::int64_t> shape;
  std::vector<D> data;

  HostArray() = default;
  /// Zeros.
  explicit HostArray(std::vector<std::int64_t> sizes) : HostArray(std::move(sizes), {}) {}
  HostArray(std::vector<std::int64_t> sizes, std::vector<D> values) : shape(std::move(sizes)), data(std::move(values)) {
    std::int64_t n = 1;
    for (auto size : shape) n *= size;
    if (data.empty()) data.resize(static_cast<std::size_t>(n));
    if (static_cast<std::int64_t>(data.size()) != n)
      throw Error("HostArray: " + std::to_string(data.size()) + " values for a shape of " + std::to_string(n));
  }
};

namespace detail {

template <class T>
struct place_one;
template <class D, Spec S>
struct place_one<Tensor<D, S>> {
  template <Spec A>
  static Tensor<D, S> run(const Mesh<A>& mesh, const HostArray<D>& host) {
    static_assert(checked<rules::create, Op("place"), A, S>::ok);
    const OpInfo op{"place", S, {}};
    Bindings names(op, mesh.device());
    const TensorSpec& spec = parsed<S>;
    if (static_cast<int>(host.shape.size()) != spec.rank())
      names.fail("the host array has " + std::to_string(host.shape.size()) + " dims, the spec " +
                 std::to_string(spec.rank()));
    Extents global;
    for (int i = 0; i < spec.rank(); ++i) {
      global.push_back(host.shape[static_cast<std::size_t>(i)]);
      if (!spec.dims[i].is_integer()) names.bind(spec.dims[i].name, global[i]);
    }
    return record<"place", Tensor<D, S>>(op, mesh.device(), global, [&host](const Value& out) {
      Buffer block = allocate(out);
      with_global_index(out, [&](auto local, auto strides, auto offsets) {
        std::int64_t first = 0;
        for (std::size_t i = 0; i < offsets.size(); ++i) first += offsets[i] * strides[i];
        kernels::copy_strided(out.device->exec(), sizeof(D), local, host.data.data() + first, strides, block.data(),
                              kernels::row_major(local));
      });
      return block;
    });
  }
};

/// The global array on every device: sharded blocks side by side, partial ones summed.
inline ValuePtr gathered(const Value& x) {
  auto summed = std::make_shared<Value>(x);
  TensorSpec without_sums = *x.spec;
  without_sums.partial = {};
  summed->spec = &without_sums;
  summed->made_by = {"fetch", {}, {}};
  count(*summed);
  summed->storage = std::make_shared<Storage>();
  summed->storage->buffer = x.spec->partial.empty()
                                ? x.data()
                                : reduce(x, *summed, in_mesh_order(*x.device, x.spec->partial), Reduction::sum);
  auto whole = std::make_shared<Value>(*summed);
  TensorSpec unsharded = without_sums;
  for (Dim& dim : unsharded.dims) dim.axes = {};
  whole->spec = &unsharded;
  whole->local = x.global;
  whole->storage = std::make_shared<Storage>();
  whole->storage->buffer = gather(*summed, *whole);
  whole->spec = nullptr;  // the specs end with this function
  return whole;
}

}  // namespace detail

/// The host array as a tensor: each device keeps its block. `place<Tensor<f32, "batch/d in">>(mesh, host)`
template <tensor T, Spec A>
T place(const Mesh<A>& mesh, const HostArray<typename T::value_type>& host) {
  return detail::place_one<T>::run(mesh, host);
}

/// A struct of tensors of one dtype from host arrays in the order of its leaves. Arrays in `structure` fix their
/// lengths.
template <class W, Spec A, dtype D>
requires(!is_tensor<W>) W place(const Mesh<A>& mesh, const std::vector<HostArray<D>>& leaves, W structure = {}) {
  const auto names = leaf_names(structure);
  if (names.size() != leaves.size())
    throw Error("place: " + std::to_string(leaves.size()) + " host arrays for a struct of " +
                std::to_string(names.size()) + " tensors");
  std::size_t i = 0;
  for_each_leaf(
      [&](std::string_view, auto& leaf) { leaf = place<std::remove_cvref_t<decltype(leaf)>>(mesh, leaves[i++]); },
      structure);
  return structure;
}

/// The whole array, on every device: blocks are put together, pending sums are taken.
template <dtype D, Spec S>
HostArray<D> fetch(const Tensor<D, S>& x) {
  const auto whole = detail::gathered(*x.value());
  const D* data = whole->template as<const D>();
  return {{whole->global.begin(), whole->global.end()}, {data, data + whole->count()}};
}
/// All leaves of a tree of one dtype, in order.
template <dtype D = f32, class W>
requires(!is_tensor<W>) std::vector<HostArray<D>> fetch(const W& tree) {
  std::vector<HostArray<D>> leaves;
  for_each_leaf([&](std::string_view, const auto& leaf) { leaves.push_back(fetch(leaf)); }, tree);
  return leaves;
}

namespace detail {

template <class F>
struct signature : signature<decltype(&F::operator())> {};
template <class R, class... P>
struct signature<R (*)(P...)> {
  using parameters = std::tuple<std::remove_cvref_t<P>...>;
};
template <class C, class R, class... P>
struct signature<R (C::*)(P...) const> : signature<R (*)(P...)> {};
template <class C, class R, class... P>
struct signature<R (C::*)(P...)> : signature<R (*)(P...)> {};

template <class P, class M, class Arg>
decltype(auto) placed(const M& mesh, const Arg& arg) {
  if constexpr (std::is_convertible_v<const Arg&, const P&>)
    return static_cast<const P&>(arg);
  else
    return place<P>(mesh, arg);
}

}  // namespace detail

/// seqax's typed_shard_map: a function that takes host arrays (or what f itself takes), places each by the type of f's
/// parameter, runs f on this device, and puts the result together by its type. Call it on every device of the mesh.
/// `auto y = spmd(mesh, forward_pass)(x, weights);`
template <Spec A, class F>
auto spmd(const Mesh<A>& mesh, F f) {
  return [mesh, f = std::move(f)](const auto&... args) {
    using Parameters = typename detail::signature<F>::parameters;
    static_assert(std::tuple_size_v<Parameters> == sizeof...(args), "spmd: as many arguments as the function takes");
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return fetch(f(detail::placed<std::tuple_element_t<I, Parameters>>(mesh, args)...));
    }
    (std::index_sequence_for<decltype(args)...>{});
  };
}

}  // namespace shardlib
