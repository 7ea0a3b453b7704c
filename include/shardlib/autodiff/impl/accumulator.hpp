// Definitions of accumulator.hpp.
#pragma once

#include "shardlib/autodiff/accumulator.hpp"

#include <cstddef>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/kernels/elementwise.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE void convert_numbers(const Exec& exec, std::int64_t n, DType from_dtype, const Buffer& from,
                                     DType to_dtype, const Buffer& to) {
  using kernels::body::ConvertElement;
  if (from_dtype == to_dtype)
    exec.copy(to.data(), from.data(), static_cast<std::size_t>(n) * size_of(to_dtype));
  else if (from_dtype == DType::bf16)
    kernels::apply_flat(exec, n, ConvertElement{}, from.as<const bf16>(), to.as<f32>());
  else
    kernels::apply_flat(exec, n, ConvertElement{}, from.as<const f32>(), to.as<bf16>());
}

SHARDLIB_INLINE void add_numbers(const Exec& exec, std::int64_t n, DType dtype, const Buffer& from, const Buffer& sum) {
  visit_dtype(dtype, [&]<class T>(T /*zero*/) {
    if constexpr (floating<T>)
      kernels::apply_flat(exec, n, kernels::body::AddElement{}, from.as<const T>(), sum.as<accumulator_t<T>>());
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
