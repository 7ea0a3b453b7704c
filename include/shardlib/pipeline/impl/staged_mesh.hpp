// Definitions of staged_mesh.hpp.
#pragma once

#include "shardlib/pipeline/staged_mesh.hpp"

#include <algorithm>
#include <string>

#include "shardlib/autodiff/accumulator.hpp"
#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/collectives.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/handle.hpp"

namespace shardlib::pipeline::detail {

SHARDLIB_INLINE ValuePtr relabeled(const core::Value& x, const TensorSpec& spec, const DevicePtr& device) {
  const auto copy = core::detached(x);
  copy->spec = &spec;
  copy->device = device;
  return copy;
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

SHARDLIB_INLINE ValuePtr sum_over(const std::vector<int>& owners, int rank, const ValuePtr& x, std::string_view axis) {
  if (!std::ranges::is_sorted(owners) || !std::ranges::binary_search(owners, rank))
    throw Error("sum_over: the owners are ascending ranks of axis " + std::string(axis) + ", and this one, " +
                std::to_string(rank) + ", is among them");
  for (const int owner : owners)
    if (owner != rank) send(*x, axis, owner);
  core::Accumulator sum;
  for (const int owner : owners) sum.add(owner == rank ? x : Incoming({x}, axis, owner).wait().front());
  return sum.take();
}

}  // namespace shardlib::pipeline::detail
