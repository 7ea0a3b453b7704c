// Host arrays as input and output: place, fetch, and spmd(mesh, f), which places arguments by the types in f's
// signature.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/compute/collectives.hpp"
#include "shardlib/compute/create.hpp"
#include "shardlib/kernels/layout.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/runtime/names.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/leaves.hpp"

namespace shardlib {

namespace detail {
/// The number of elements of a host array. Throws for a negative size, and if the bytes cannot be counted. `width`
/// is the size of an element in bytes.
[[nodiscard]] inline std::size_t host_elements(std::span<const std::int64_t> shape, std::int64_t width) {
  std::int64_t n = 1;
  for (const std::int64_t size : shape) {
    if (size < 0) throw Error("HostArray: the shape has the negative size " + std::to_string(size));
    if (size > 0 && n > std::numeric_limits<std::int64_t>::max() / width / size)
      throw Error("HostArray: the sizes of the shape multiply to more bytes than can be counted");
    n *= size;
  }
  return static_cast<std::size_t>(n);
}
}  // namespace detail

/// A whole array in host memory. `shape` is its shape, and `data` its elements, row-major.
template <dtype D>
struct HostArray {
  std::vector<std::int64_t> shape;
  std::vector<D> data;

  HostArray() = default;
  /// An array of zeros.
  explicit HostArray(std::vector<std::int64_t> sizes)
      : shape(std::move(sizes)), data(detail::host_elements(shape, sizeof(D))) {}
  template <std::size_t N>
  explicit HostArray(const std::int64_t (&sizes)[N]) : HostArray(std::vector<std::int64_t>(sizes, sizes + N)) {}
  /// Throws Error where there is not one value for each element.
  HostArray(std::vector<std::int64_t> sizes, std::vector<D> values) : shape(std::move(sizes)), data(std::move(values)) {
    if (const auto n = detail::host_elements(shape, sizeof(D)); data.size() != n)
      throw Error("HostArray: " + std::to_string(data.size()) + " values for a shape of " + std::to_string(n) +
                  " elements; give as many, or the shape alone for zeros");
  }
  /// A compile error for another shape, or values of another type.
  template <class X, class... More>
  requires(!std::is_base_of_v<HostArray, X> &&
           !(std::is_convertible_v<X, std::vector<std::int64_t>> &&
             (std::is_convertible_v<More, std::vector<D>> && ...))) explicit HostArray(const X&, const More&...) {
    static_assert(std::is_void_v<X>,
                  "HostArray: it is made of a shape and values of its dtype; write "
                  "HostArray<f32>({8, 4}, std::vector<f32>(32, 1.0F)), or HostArray<f32>({8, 4}) "
                  "for zeros");
  }
  template <class X>
  requires(!std::is_convertible_v<X, std::vector<D>>) HostArray(std::initializer_list<std::int64_t>, const X& values)
      : HostArray(nullptr, values) {}
};

namespace detail {

template <class T>
struct place_one;
template <class D, Spec S>
struct place_one<Tensor<D, S>> {
  template <Spec A>
  static Tensor<D, S> run(const Mesh<A>& mesh, const HostArray<D>& host, std::span<const NamedSize> sizes,
                          const Site& site = {}) {
    static_assert(checked<rules::create, OpName("place"), A, S>::ok);
    const OpInfo op{"place", S, site};
    Bindings names(op, mesh.device());
    const TensorSpec& spec = parsed<S>;
    if (static_cast<int>(host.shape.size()) != spec.rank())
      names.fail("the host array has " + std::to_string(host.shape.size()) + " dims, the spec " +
                 std::to_string(spec.rank()));
    std::int64_t count = 1;
    for (const std::int64_t size : host.shape) count *= size;
    if (std::ssize(host.data) != count)
      names.fail("the host array has " + std::to_string(host.data.size()) + " values for a shape of " +
                 std::to_string(count) + "; make it with HostArray(shape, values)");
    for (const NamedSize& given : sizes)
      if (spec.has(given.name)) names.bind(given);
    GlobalSizes global;
    for (int i = 0; i < spec.rank(); ++i) {
      DimSize size = host.shape[static_cast<std::size_t>(i)];
      if (!spec.dims[i].is_integer()) {
        // The host array has no padding. The given sizes, or the open scope, determine the padded size.
        const auto known = names.find(spec.dims[i].name);
        if (known && known->size == size.size) size = *known;
        names.bind(spec.dims[i].name, size);
      }
      global.push_back(size);
    }
    const auto made = record<"place", Tensor<D, S>>(op, mesh.device(), global, [&host, &op](const Value& out) {
      const Buffer shard = out.device->host_pool()->allocate(out.bytes());
      const Shape part = true_shape(out);
      if (product(part) == 0) return out.device->to_device(shard);
      with_global_index(out, [&](auto local, auto strides, auto offsets) {
        std::int64_t first = 0;
        for (std::size_t i = 0; i < offsets.size(); ++i) first += offsets[i] * strides[i];
        const auto copy_part = [&](std::byte* to, const auto& steps) {
          kernels::copy_strided(out.device->host_exec(), sizeof(D), view(part), host.data.data() + first, strides, to,
                                steps);
        };
        copy_part(shard.data(), kernels::row_major(local));
        if (product(part) == out.count()) {
          note_data(op, out, {shard.data(), shard.bytes()});
        } else if (out.device->alike_axes(*out.spec) != 0) {  // the padding holds anything
          std::vector<std::byte> elements(static_cast<std::size_t>(product(part)) * sizeof(D));
          copy_part(elements.data(), kernels::row_major(view(part)));
          note_data(op, out, elements);
        }
      });
      return out.device->to_device(shard);
    });
    static_cast<void>(made.value()->data());  // a recomputation would read the host array later, when it may be gone
    return made;
  }
};

/// The global array on every device: gathers shards and sums partial values.
SHARDLIB_INLINE ValuePtr gathered(const Value& x);

/// Whether `place<T>` of a tensor type takes these arguments.
template <class T, class... Args>
inline constexpr bool is_place_call = false;
template <class T, Spec A, class Array, class... More>
inline constexpr bool is_place_call<T, Mesh<A>, Array, More...> =
    std::is_convertible_v<Array, HostArray<typename T::value_type>>;

}  // namespace detail

/// Makes a tensor from a host array: each device keeps its shard. `sizes` or the open scope determine the padding,
/// which is zero. Where devices share a shard, its bytes are read once for their comparison, which takes about 0.3 ms
/// per MiB. `place<Tensor<f32, "batch/d in">>(mesh, host)`,
/// `place<Tensor<f32, "V/t M">>(mesh, host, {{"V", 50257, 50304}})`
template <tensor T, Spec A>
T place(const Mesh<A>& mesh, const HostArray<typename T::value_type>& host, Sizes sizes = {},
        Site site = Site::current()) {
  return detail::place_one<T>::run(mesh, host, sizes, site);
}

/// A compile error for other arguments, such as a std::vector, an array of another dtype, or no mesh.
template <tensor T, class... Args>
requires(!detail::is_place_call<T, Args...>) auto place(const Args&... args) {
  return detail::wrong_call<"place", "place<Tensor<f32, \"M\">>(mesh, HostArray<f32>({size}, values))">(args...);
}
/// A compile error for a spec, or a dtype and a spec, in place of the type.
template <Spec S, class... Args>
auto place(const Args&... args) {
  return detail::wrong_call<"place", "place<Tensor<f32, \"M\">>(mesh, HostArray<f32>({size}, values))">(args...);
}
template <dtype D, Spec S, class... Args>
auto place(const Args&... args) {
  return place<S>(args...);
}

namespace detail {

template <dtype D>
struct IsPlaced {
  template <class E, Spec S>
  constexpr bool operator()(std::type_identity<Tensor<E, S>> /*leaf*/) const {
    return checked<rules::placed_leaf, dtype_v<D>, dtype_v<E>, S>::ok && std::is_same_v<D, E>;
  }
};
template <class W, Spec A, dtype D>
W place_tree(const Mesh<A>& mesh, const std::vector<HostArray<D>>& leaves, W structure,
             std::span<const NamedSize> sizes) {
  if constexpr (!checked_tree<"place", W>) {
    return structure;
  } else if constexpr (!all_leaves<W>(IsPlaced<D>())) {
    return structure;
  } else {
    const auto names = leaf_names(structure);
    if (names.size() != leaves.size())
      throw Error("place: " + std::to_string(leaves.size()) + " host arrays for a struct of " +
                  std::to_string(names.size()) + " tensors");
    std::size_t i = 0;
    for_each_leaf(
        [&](std::string_view, auto& leaf) {
          leaf = place_one<std::remove_cvref_t<decltype(leaf)>>::run(mesh, leaves[i++], sizes);
        },
        structure);
    return structure;
  }
}

}  // namespace detail

/// Makes a struct of tensors of one dtype from host arrays, in the order of its leaves. `structure` gives the lengths
/// of its Arrays.
template <class W, Spec A, dtype D>
requires(!is_tensor<W>) W
    place(const Mesh<A>& mesh, const std::vector<HostArray<D>>& leaves, W structure = {}, Sizes sizes = {}) {
  return detail::place_tree(mesh, leaves, std::move(structure), sizes);
}

/// The whole array, on every device. It gathers shards, sums partial values and removes padding. `fetch(x)` of "B/d
/// M" is a HostArray of B x M.
template <dtype D, Spec S>
HostArray<D> fetch(const Tensor<D, S>& x, Site site = Site::current()) {
  static_assert(detail::checked<rules::fetch, S>::ok);
  const detail::Calling op{"fetch", {}, site};
  if constexpr (!detail::parsed<S>.partial.empty()) static_assert(detail::is_reduced<"fetch", D>);
  detail::require_running(op, *x.device());
  const auto whole = detail::gathered(*x.value());
  const detail::Shape& sizes = whole->global.logical;
  HostArray<D> host(std::vector<std::int64_t>(sizes.begin(), sizes.end()));
  kernels::copy_strided(x.device()->host_exec(), sizeof(D), detail::view(sizes), whole->on_host().data(),
                        kernels::row_major(detail::view(whole->local)), host.data.data(),
                        kernels::row_major(detail::view(sizes)));
  return host;
}
namespace detail {
template <dtype D>
struct IsFetched {
  template <class E, Spec S>
  constexpr bool operator()(std::type_identity<Tensor<E, S>> /*leaf*/) const {
    return checked<rules::fetched_leaf, dtype_v<D>, dtype_v<E>, S>::ok;
  }
};
}  // namespace detail
/// The whole arrays of all leaves of a tree of one dtype, in order.
template <dtype D = f32, class W>
requires(!is_tensor<W>) std::vector<HostArray<D>> fetch(const W& tree) {
  std::vector<HostArray<D>> leaves;
  if constexpr (detail::checked_tree<"fetch", W> && detail::all_leaves<W>(detail::IsFetched<D>()))
    for_each_leaf(
        [&]<class E, Spec S>(std::string_view, const Tensor<E, S>& leaf) {
          if constexpr (std::is_same_v<D, E>) leaves.push_back(fetch(leaf));  // else the error was above
        },
        tree);
  return leaves;
}
/// A compile error for the dtype of the array, which is the tensor's.
template <dtype Out, dtype D, Spec S>
requires(!std::is_same_v<Out, D>) auto fetch(const Tensor<D, S>& x) {
  return detail::wrong_call<"fetch", "fetch(x)`, or for an array of another dtype `fetch(cast<f32>(x))">(x);
}
/// A compile error for a mesh: a tensor knows its own.
template <Spec A, class T>
auto fetch(const Mesh<A>& mesh, const T& x) {
  return detail::wrong_call<"fetch", "fetch(x)">(mesh, x);
}

namespace detail {

template <class T>
inline constexpr bool is_host_arrays = false;
template <class D>
inline constexpr bool is_host_arrays<std::vector<HostArray<D>>> = true;

template <class P, class M, class Arg>
decltype(auto) placed(const M& mesh, const Arg& arg, std::span<const NamedSize> sizes) {
  if constexpr (std::is_base_of_v<P, Arg> || std::is_same_v<P, Arg>) {
    if constexpr (is_tensor<P>)
      bind_names(OpInfo{"spmd", {}, {}}, *arg.value(), "an argument `" + std::string(std::string_view(P::spec)) + "`");
    return static_cast<const P&>(arg);
  } else if constexpr (std::is_convertible_v<const Arg&, P>) {
    return static_cast<P>(arg);  // a new object, such as the double of an int: no reference
  } else if constexpr (is_tensor<P>) {
    static_assert(std::is_convertible_v<const Arg&, const HostArray<typename P::value_type>&>,
                  "spmd: the argument for a Tensor is a HostArray of its dtype, or such a Tensor");
    return place_one<P>::run(mesh, arg, sizes);
  } else {
    static_assert(is_host_arrays<Arg>,
                  "spmd: the argument for a struct of tensors is a std::vector of a HostArray for each leaf, or such a "
                  "struct; that for anything else converts to the type of the function's parameter");
    return place_tree(mesh, arg, P{}, sizes);
  }
}

}  // namespace detail

/// Wraps f in a function of host arrays, like typed_shard_map in seqax. It places each argument by the type of f's
/// parameter, padded by `sizes`, runs f on this device, and assembles the result by its type, without padding. An
/// argument may also have the type of f's parameter. Within the call, a dim's name has one size. If a part of f uses
/// the names for other sizes, it opens its own Scope. Call it on every device of the mesh.
/// `auto y = spmd(mesh, forward_pass)(x, weights);`
template <Spec A, class F>
auto spmd(const Mesh<A>& mesh, F f, Sizes sizes = {}) {
  static_assert(detail::has_signature<F>,
                "spmd: arguments are placed by the types of the function's parameters, so each must be written out; "
                "`auto` parameters, templates and overloaded functions have none");
  return [mesh, f = std::move(f), sizes = std::move(sizes)](const auto&... args) {
    using Parameters = typename detail::signature<F>::parameters;
    static_assert(std::tuple_size_v<Parameters> == sizeof...(args), "spmd: as many arguments as the function takes");
    detail::ProgramState& state = detail::program_state(mesh.device());
    const detail::WithNames names(state, detail::names_within(state, "spmd"));
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return fetch(f(detail::placed<std::tuple_element_t<I, Parameters>>(mesh, args, sizes)...));
    }
    (std::index_sequence_for<decltype(args)...>{});
  };
}

/// A compile error without a mesh.
template <class F>
auto spmd(const F& f) {
  detail::wrong_call<"spmd", "spmd(mesh, f)(x, weights)">(f);
  return [](const auto&...) { return HostArray<f32>(); };
}

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/interop/impl/shard_map.hpp"
#endif
