// Tensors as other libraries' arrays, without copies: Kokkos::View, and tensors over the user's memory.
// eigen.hpp has Eigen::Map.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/function_ref.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/support/kokkos.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib {

#if defined(SHARDLIB_KOKKOS_HEADERS)
namespace detail {

template <class T, int Rank>
struct pointers {
  using type = typename pointers<T*, Rank - 1>::type;
};
template <class T>
struct pointers<T, 0> {
  using type = T;
};

/// A view of the shard, whose elements are at `shard`.
template <class Space, dtype D, Spec S>
auto kokkos_view(const Tensor<D, S>& x, const D* shard) {
  constexpr int rank = parsed<S>.rank();
  static_assert(rank <= 8, "as_kokkos: a Kokkos::View has at most 8 dims; merge some first");
  using View = Kokkos::View<typename pointers<const D, rank>::type, Kokkos::LayoutRight, Space,
                            Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  return [&]<std::size_t... I>(std::index_sequence<I...>) {
    return View(shard, static_cast<std::size_t>(x.local_shape()[I])...);
  }
  (std::make_index_sequence<static_cast<std::size_t>(rank)>{});
}

}  // namespace detail

/// This device's shard as an unmanaged Kokkos::View of the spec's rank (at most 8), LayoutRight. Padding is part
/// of the shard. `as_kokkos(x)`
template <dtype D, Spec S>
auto as_kokkos(const Tensor<D, S>& x) {
  return detail::kokkos_view<Kokkos::HostSpace>(x, x.span().data());
}
#if defined(SHARDLIB_KOKKOS_CUDA)
/// The same where it is in a GPU's memory, after the GPU has computed it. Throws for a device with other memory.
/// `as_kokkos<Kokkos::CudaSpace>(x)`
template <class Space, dtype D, Spec S>
requires std::is_same_v<Space, Kokkos::CudaSpace>
auto as_kokkos(const Tensor<D, S>& x) {
  const D* const shard = x.value()->template as<const D>();
  const Exec exec = x.value()->device->exec();
  if (exec.gpu() == nullptr)
    throw Error("as_kokkos<Kokkos::CudaSpace>: this device's memory is not a GPU's; use as_kokkos(x), or --device gpu");
  exec.synchronize();
  return detail::kokkos_view<Space>(x, shard);
}
/// A compile error for a tensor without a name: its elements go with it.
template <class Space, dtype D, Spec S>
requires std::is_same_v<Space, Kokkos::CudaSpace>
auto as_kokkos(const Tensor<D, S>&& x) {
  static_assert(detail::checked<rules::no_view, OpName("as_kokkos"), S>::ok);
  return as_kokkos<Space>(x);
}
#endif
/// A compile error for a tensor without a name: its elements go with it.
template <dtype D, Spec S>
auto as_kokkos(const Tensor<D, S>&& x) {
  static_assert(detail::checked<rules::no_view, OpName("as_kokkos"), S>::ok);
  return as_kokkos(x);
}
#endif

namespace detail {
/// A value over the caller's memory. `is_zero(i)` reads its element number i.
[[gnu::cold]] SHARDLIB_INLINE ValuePtr value_over_memory(const OpInfo& op, const DevicePtr& device, DType dtype,
                                                         const TensorSpec& spec, const Sizes& sizes,
                                                         std::span<const std::byte> shard, std::shared_ptr<void> owner,
                                                         FunctionRef<bool(std::int64_t)> is_zero);
}  // namespace detail

/// A tensor over memory that the caller owns: this device's shard, row-major. The memory must stay valid and
/// unchanged while the tensor, or anything computed from it, is in use; `owner` can keep it alive. A device with its
/// own memory takes a copy. Padding is part of the shard and must be zero. Throws if it is not. Where devices share a
/// shard, its bytes are read once for their comparison, which takes about 0.3 ms per MiB.
/// `from_memory<f32, "B/d M">(mesh, {{"B", 8}, {"M", 4}}, shard)`
template <dtype D, Spec S, Spec A>
Tensor<D, S> from_memory(const Mesh<A>& mesh, const Sizes& sizes, std::span<const D> shard,
                         std::shared_ptr<void> owner = nullptr, Site site = Site::current()) {
  static_assert(detail::checked<rules::on_mesh, A, S>::ok);
  return Tensor<D, S>(detail::value_over_memory(
      {"from_memory", S, site}, mesh.device(), dtype_v<D>, detail::parsed<S>, sizes, std::as_bytes(shard),
      std::move(owner), [&](std::int64_t i) { return shard[static_cast<std::size_t>(i)] == D{}; }));
}
/// A compile error for a vector without a name, which is gone when the statement ends. `{first, last}` has no type of
/// its own and stays a span.
template <dtype D, Spec S, Spec A, class Vector>
requires std::is_same_v<Vector, std::vector<D>> Tensor<D, S> from_memory(const Mesh<A>& mesh, const Sizes& sizes,
                                                                         Vector&& shard,
                                                                         std::shared_ptr<void> owner = nullptr,
                                                                         Site site = Site::current()) {
  static_assert(std::is_void_v<D>,
                "from_memory: the tensor uses the memory of a vector without a name, which is gone when the statement "
                "ends; name the vector, and keep it while the tensor is in use");
  return from_memory<D, S>(mesh, sizes, std::span<const D>(shard), std::move(owner), site);
}

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/interop/impl/arrays.hpp"
#endif
