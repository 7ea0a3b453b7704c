// Tensors as other libraries' arrays, without copies: Kokkos::View, and tensors over the user's memory.
// eigen.hpp has Eigen::Map.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "shardlib/compute/create.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/runtime/padding.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/kokkos.hpp"

namespace shardlib {

#if !defined(SHARDLIB_WITHOUT_KOKKOS)
namespace detail {

template <class T, int Rank>
struct pointers {
  using type = typename pointers<T*, Rank - 1>::type;
};
template <class T>
struct pointers<T, 0> {
  using type = T;
};

}  // namespace detail

/// This device's shard as an unmanaged Kokkos::View of the spec's rank (at most 8), LayoutRight. Padding is part
/// of the shard. `as_kokkos(x)`
template <dtype D, Spec S>
auto as_kokkos(const Tensor<D, S>& x) {
  constexpr int rank = detail::parsed<S>.rank();
  static_assert(rank <= 8, "as_kokkos: a Kokkos::View has at most 8 dims; merge some first");
  using View = Kokkos::View<typename detail::pointers<const D, rank>::type, Kokkos::LayoutRight, Kokkos::HostSpace,
                            Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  return [&]<std::size_t... I>(std::index_sequence<I...>) {
    return View(x.span().data(), static_cast<std::size_t>(x.local_shape()[I])...);
  }
  (std::make_index_sequence<static_cast<std::size_t>(rank)>{});
}
#endif

namespace detail {
template <dtype D>
[[gnu::noinline, gnu::cold]] ValuePtr value_over_memory(const OpInfo& op, const DevicePtr& device,
                                                        const TensorSpec& spec, const Sizes& sizes,
                                                        std::span<const D> shard, std::shared_ptr<void> owner) {
  auto value = make_value(op, device, dtype_v<D>, spec, given_sizes(op, device, spec, sizes));
  if (value->count() != static_cast<std::int64_t>(shard.size()))
    throw Error(op.describe() + ": the shard of this device has " + std::to_string(value->count()) +
                " elements, the memory " + std::to_string(shard.size()) + " (" + device->describe() + ")");
  for_each_padding(*value, [&](auto shape, std::int64_t offset, auto strides) {
    kernels::Nest<1> nest;
    // The array by name, as nvcc 13 drops bare braces here.
    for (std::size_t i = 0; i < shape.size(); ++i) nest.push(shape[i], std::array<std::int64_t, 1>{strides[i]});
    kernels::Walk<1> walk(nest, 0);
    for (std::int64_t i = 0; i < nest.count(); ++i, walk.next())
      if (const auto at = offset + walk.offsets[0]; !(shard[static_cast<std::size_t>(at)] == D{}))
        throw Error(op.describe() + ": element " + std::to_string(at) +
                    " of the memory is padding, but not zero; clear the padding first (" + device->describe() + ")");
  });
  // A slice, because the memory is the caller's: no op may write a slice in place.
  const Buffer memory(const_cast<D*>(shard.data()), shard.size_bytes(), std::move(owner));
  value->storage->buffer = device->to_device(memory.slice(0, shard.size_bytes()));
  return value;
}
}  // namespace detail

/// A tensor over memory that the caller owns: this device's shard, row-major. The memory must stay valid and
/// unchanged while the tensor, or anything computed from it, is in use; `owner` can keep it alive. A device with its
/// own memory takes a copy. Padding is part of the shard and must be zero. Throws if it is not. `from_memory<f32,
/// "B/d M">(mesh, {{"B", 8}, {"M", 4}}, shard)`
template <dtype D, Spec S, Spec A>
Tensor<D, S> from_memory(const Mesh<A>& mesh, const Sizes& sizes, std::span<const D> shard,
                         std::shared_ptr<void> owner = nullptr, Site site = Site::current()) {
  static_assert(detail::checked<rules::on_mesh, A, S>::ok);
  return Tensor<D, S>(detail::value_over_memory<D>({"from_memory", S, site}, mesh.device(), detail::parsed<S>, sizes,
                                                   shard, std::move(owner)));
}

}  // namespace shardlib
