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
#include "shardlib/types/tensor.hpp"

namespace shardlib {

namespace detail {
/// The place of a dim in a spec. Throws if the spec has none of this name.
template <Spec S>
int dim_of(const OpInfo& call, std::string_view dim) {
  const int at = parsed<S>.find(dim);
  if (at < 0)
    throw Error(call.describe() + ": `" + std::string(std::string_view(S)) + "` has no dim `" + std::string(dim) + "`");
  return at;
}
}  // namespace detail

template <class D, Spec S>
std::int64_t Tensor<D, S>::size(std::string_view dim, Site site) const {
  return value()->global.logical[detail::dim_of<S>({"size", {}, site}, dim)];
}
template <class D, Spec S>
std::int64_t Tensor<D, S>::padded_size(std::string_view dim, Site site) const {
  return value()->global.padded[detail::dim_of<S>({"padded_size", {}, site}, dim)];
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
std::span<const D> Tensor<D, S>::span() const {
  if (value()->device->is_dry())
    throw Error("span: in a dry run tensors have no elements (" + value()->device->describe() + ")");
  return {reinterpret_cast<const D*>(detail::host_data(*value())), static_cast<std::size_t>(value()->count())};
}
template <class D, Spec S>
const DevicePtr& Tensor<D, S>::device() const {
  return value()->device;
}

template <Spec Axes>
Mesh<Axes>::Mesh(DevicePtr given) : device_(std::move(given)) {
  if (!device_)
    throw Error("a mesh `" + std::string(std::string_view(Axes)) +
                "` needs a device; take the one that `launch` gives to its function");
  Device& device = *device_;
  auto next = device.axes().begin();
  detail::Small<std::string_view, max_axes> absent;
  for (const std::string_view name : rules::mesh_axes(Axes)) {
    if (next != device.axes().end() && next->name == name)
      ++next;
    else
      absent.push_back(name);
  }
  if (next == device.axes().end())
    for (const std::string_view name : absent) device.know_absent(name);
  else
    throw UsageError("the program is written for a mesh with the axes `" + std::string(std::string_view(Axes)) +
                     "`, in this order, but was given `" + to_string(device.axes()) +
                     "`; give `launch` the axes of the program");
}
template <Spec Axes>
const DevicePtr& Mesh<Axes>::device() const {
  if (!device_)
    throw Error("a mesh `" + std::string(std::string_view(Axes)) +
                "` was never given its device; make it of the one that `launch` gives to its function");
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
