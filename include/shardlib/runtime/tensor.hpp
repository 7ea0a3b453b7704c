// The members of Tensor and Mesh that ask the value or the device. types/tensor.hpp declares them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "shardlib/device/device.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib {

namespace detail {
/// The place of a dim in a spec, which `text` spells. Throws if the spec has none of this name.
[[nodiscard]] SHARDLIB_INLINE int dim_of(const TensorSpec& spec, std::string_view text, const OpInfo& call,
                                         std::string_view dim);
/// Makes a device known to have the axes of a mesh's type. Throws if its own are not those, in their order.
SHARDLIB_INLINE void match_axes(const DevicePtr& device, std::string_view axes);
[[noreturn, gnu::cold]] SHARDLIB_INLINE void fail_without_device(std::string_view axes);
}  // namespace detail

template <class D, Spec S>
std::int64_t Tensor<D, S>::size(std::string_view dim, Site site) const {
  return value()->global.logical[detail::dim_of(detail::parsed<S>, S, {"size", {}, site}, dim)];
}
template <class D, Spec S>
std::int64_t Tensor<D, S>::padded_size(std::string_view dim, Site site) const {
  return value()->global.padded[detail::dim_of(detail::parsed<S>, S, {"padded_size", {}, site}, dim)];
}
template <class D, Spec S>
std::span<const std::int64_t> Tensor<D, S>::local_shape() const {
  return detail::view(value()->local);
}
template <class D, Spec S>
std::span<const std::int64_t> Tensor<D, S>::global_shape() const {
  return detail::view(value()->global.logical);
}
template <class D, Spec S>
std::span<const D> Tensor<D, S>::span() const& {
  if (value()->device->is_dry())  // zeros in their place would take the memory that a dry run does without
    throw Error("span: in a dry run tensors have no elements (" + value()->device->describe() + ")");
  return {reinterpret_cast<const D*>(detail::host_data(*value())), static_cast<std::size_t>(value()->count())};
}
template <class D, Spec S>
const DevicePtr& Tensor<D, S>::device() const {
  return value()->device;
}

template <Spec Axes>
Mesh<Axes>::Mesh(DevicePtr given) : device_(std::move(given)) {
  detail::match_axes(device_, Axes);
}
template <Spec Axes>
const DevicePtr& Mesh<Axes>::device() const {
  if (!device_) detail::fail_without_device(Axes);
  return device_;
}
template <Spec Axes>
int Mesh<Axes>::size(std::string_view axis) const {
  return device()->size(axis);
}
template <Spec Axes>
int Mesh<Axes>::axis_index(std::string_view axis) const {
  return device()->axis_index(axis);
}
template <Spec Axes>
int Mesh<Axes>::size() const {
  return device()->size();
}
template <Spec Axes>
int Mesh<Axes>::rank() const {
  return device()->rank();
}

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/runtime/impl/tensor.hpp"
#endif
