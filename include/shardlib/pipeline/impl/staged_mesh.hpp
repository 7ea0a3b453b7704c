// Definitions of staged_mesh.hpp.
#pragma once

#include "shardlib/pipeline/staged_mesh.hpp"

#include <algorithm>
#include <set>

#include "shardlib/autodiff/accumulator.hpp"
#include "shardlib/autodiff/tape.hpp"
#include "shardlib/comm/collective_call.hpp"
#include "shardlib/compute/collectives.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/handle.hpp"

namespace shardlib::pipeline::detail {

SHARDLIB_INLINE ValuePtr relabeled(const core::Value& x, const TensorSpec& spec, const DevicePtr& device) {
  const auto copy = core::detached(x);
  copy->spec = &spec;
  copy->device = device;
  return copy;
}

/// The purposes for which this device has exchanged messages.
struct ExchangedBefore {
  std::set<std::uint64_t> purposes;
};

SHARDLIB_INLINE void set_direct(const DevicePtr& device, std::string_view axis, std::uint64_t purpose,
                                const std::vector<int>& peers) {
  const bool again = !device->local<ExchangedBefore>().purposes.insert(purpose).second;
  for (const int peer : peers) device->group({axis}).set_direct(peer, again);
}

SHARDLIB_INLINE void send(const core::Value& x, std::string_view axis, int to) {
  core::Value shape = x;
  shape.made_by = {"send", {}, {}};
  core::count(shape);
  core::observed(shape, [&] {
    core::add_traffic(shape, x.bytes(), {axis});
    x.device->group({axis}).send(x.data(), to);
    return x.data();
  });
}

SHARDLIB_INLINE Incoming::Incoming(const std::vector<ValuePtr>& shapes, std::string_view axis, int from) {
  for (const ValuePtr& shape : shapes) {
    auto value = core::Handle<core::Value>::make(*shape);
    value->made_by = {"receive", {}, {}};
    value->storage = core::Handle<core::Storage>::make(core::allocate(*value));
    requests_.push_back(value->device->group({axis}).recv(value->storage->buffer, from));
    values_.push_back(std::move(value));
  }
}

SHARDLIB_INLINE std::vector<ValuePtr> Incoming::wait() {
  for (std::size_t i = 0; i < values_.size(); ++i) {
    core::count(*values_[i]);
    core::observed(*values_[i], [&] {
      core::complete(*values_[i], [&] { return std::move(requests_[i]); });
      return values_[i]->storage->buffer;
    });
  }
  return std::move(values_);
}

SHARDLIB_INLINE DevicePtr stage_device(const DevicePtr& whole, std::string_view axis) {
  // Made by all ranks of the axis together: later, a message of two of them would wait for the others here.
  static_cast<void>(whole->group({axis}));
  core::program_state(whole).stage_axis = axis;
  return Device::submesh(whole, axis);
}

SHARDLIB_INLINE ValuePtr sum_over(const std::vector<int>& owners, int rank, const core::Value& x,
                                  const TensorSpec& spec, const DevicePtr& stage, std::string_view axis,
                                  const std::string& what) {
  if (std::ranges::adjacent_find(owners, std::ranges::greater_equal()) != owners.end() ||
      !std::ranges::binary_search(owners, rank)) {
    std::string given;
    for (const int owner : owners) given += (given.empty() ? "" : " ") + std::to_string(owner);
    throw Error(what + " is on rank " + std::to_string(rank) + " of " + std::string(axis) + ", but its owners are [" +
                given + "]; name all ranks that hold it, in ascending order");
  }
  // Sums along another axis have other ranks, and those of another dtype or other sizes can need other kernels.
  core::Fingerprint purpose;
  purpose.add("sum_over").add(axis).add(shardlib::name(x.dtype));
  for (const int owner : owners) purpose.add(static_cast<std::uint64_t>(owner));
  for (int i = 0; i < x.global.size(); ++i) purpose.add(core::to_string(x.global[i]));
  set_direct(stage, axis, purpose.value(), owners);
  const ValuePtr part = relabeled(x, spec, stage);
  for (const int owner : owners)
    if (owner != rank) send(*part, axis, owner);
  core::Accumulator sum;
  for (const int owner : owners) sum.add(owner == rank ? part : Incoming({part}, axis, owner).wait().front());
  return sum.take();
}

}  // namespace shardlib::pipeline::detail
