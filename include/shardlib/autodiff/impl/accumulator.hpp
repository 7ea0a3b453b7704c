// Definitions of accumulator.hpp.
#pragma once

#include "shardlib/autodiff/accumulator.hpp"

#include <utility>
#include <vector>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/runtime/program_state.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE void convert(const Value& from, const Value& to) {
  const Exec exec = from.device->exec();
  if (from.dtype == to.dtype)
    exec.copy(to.storage->buffer.data(), from.data().data(), from.bytes());
  else if (from.dtype == DType::bf16)
    kernels::apply_flat(exec, from.count(), kernels::body::ConvertElement{}, from.as<const bf16>(),
                        to.storage->buffer.as<f32>());
  else
    kernels::apply_flat(exec, from.count(), kernels::body::ConvertElement{}, from.as<const f32>(),
                        to.storage->buffer.as<bf16>());
}

SHARDLIB_INLINE void set_to_one(const Value& out, const Buffer& number) {
  visit_dtype(out.dtype, [&]<class D>(D /*zero*/) {
    if constexpr (floating<D>) {
      const auto one = static_cast<D>(static_cast<scalar_of<D>>(1));
      kernels::apply_flat(out.device->exec(), 1, kernels::body::ConstantElement<D>{one}, number.as<D>());
    }
  });
}

SHARDLIB_INLINE void add_elements(const Value& ct, const Buffer& sum) {
  visit_dtype(ct.dtype, [&]<class T>(T /*zero*/) {
    if constexpr (floating<T>)
      kernels::apply_flat(ct.device->exec(), ct.count(), kernels::body::AddElement{}, ct.as<const T>(),
                          sum.as<accumulator_t<T>>());
  });
}

SHARDLIB_INLINE ValuePtr tracked_sum(const Value& sum, const std::vector<Slot>& addends) {
  auto out = Handle<Value>::make(sum);
  out->stopped = false;
  if (addends.size() == 1) {
    out->slot = addends.front();  // whose cotangent is the sum's
    return out;
  }
  out->made_by = {"accumulate", {}, {}};
  std::vector<Node::Edge> edges;
  for (const Slot& addend : addends)
    edges.push_back({addend, {}, [](const ValuePtr& ct, const Residuals& /*none*/) { return ct; }});
  attach(out, std::move(edges), nullptr, program_state(out->device).twice);
  return out;
}

}  // namespace shardlib::detail
