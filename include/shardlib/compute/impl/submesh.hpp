// The run-time part of submesh and on_submeshes.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/layout.hpp"
#include "shardlib/ops/submesh.hpp"
#include "shardlib/runtime/names.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/spec/op.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE DevicePtr submesh(const DevicePtr& device, std::string_view axis) {
  return Device::submesh(device, axis);
}

struct SubmeshCall::Parts : Counted {
  Parts(const OpInfo& info, const DevicePtr& device)
      : op(info),
        leaving(rules::leaving_as(ParsedOp(op.spec))),
        whole(device),
        part(Device::submesh(device, leaving.axis)),
        names(std::in_place, program_state(device), Handle<NameSizes>::make("on_submeshes")) {}

  [[noreturn]] void fail(const std::string& why) const {
    throw Error(op.describe() + ": " + why + " (" + whole->describe_view() + ")");
  }
  [[noreturn]] void fail_padded(const std::string& what, const Dim& dim, DimSize size) const {
    fail(what + " is padded along `" + std::string(to_string(dim).view()) + "`, of size " + to_string(size) +
         ", and the padding would be that of some submeshes alone; choose a size that needs none");
  }

  OpInfo op;
  rules::Leaving leaving;
  DevicePtr whole, part;
  std::optional<WithNames> names;  ///< the function's own, until it has returned
  std::vector<ValuePtr> entered;   ///< what the tape tracks
  std::vector<EdgeSource> zeros;   ///< for each of these
  ValuePtr gate;
};

/// A cotangent of zeros, which costs nothing where others arrive.
inline ValuePtr no_cotangent(const OpInfo& op, const DevicePtr& device, DType dtype, const TensorSpec& spec,
                             const GlobalSizes& global) {
  const Kernel zeros = [](const Value& out) {
    Buffer result = allocate(out);
    out.device->exec().zero(result.data(), out.bytes());
    return result;
  };
  return record_addend_erased(op, device, dtype, spec, global, Kernel(zeros), [](const Value&, std::byte*) {});
}

SHARDLIB_INLINE SubmeshCall::SubmeshCall(const OpInfo& op, const DevicePtr& device)
    : parts_(Handle<Parts>::make(op, device)) {}
SHARDLIB_INLINE SubmeshCall::~SubmeshCall() = default;
SHARDLIB_INLINE const DevicePtr& SubmeshCall::part() const {
  return parts_->part;
}

SHARDLIB_INLINE ValuePtr SubmeshCall::enter(const ValuePtr& x, int number, const TensorSpec& inside,
                                            const TensorSpec& dual, const TensorSpec& dual_inside) {
  const Parts& p = *parts_;
  const std::string what = "argument " + std::to_string(number);
  if (x->device != p.whole)
    p.fail(what + " is on " + x->device->describe_view() + ", but the call is for mesh " + to_string(p.whole->axes()) +
           (x->device == p.part ? "; the function may capture what is on its submesh already"
            : &x->device->original() == &p.whole->original() ? "; `reinterpret` it for that mesh (no traffic)"
                                                             : "; make it on the mesh of the call"));
  // A recomputation may communicate here with the other submeshes, also where this one does not read the argument.
  if (program_state(p.whole).mode == ProgramState::Mode::replay) x->storage->materialize();
  GlobalSizes global = x->global;
  for (int i = 0; i < x->spec->rank(); ++i) {
    const Dim& dim = x->spec->dims[i];
    if (!dim.axes.contains(p.leaving.axis)) continue;
    if (x->global[i].is_padded()) p.fail_padded(what, dim, x->global[i]);
    global.set(i, x->global[i].size / p.whole->size(p.leaving.axis));
  }
  EdgeSource source{&x};
  if (is_floating(x->dtype))
    source.vjp = [op = p.op, whole = p.whole, due = &dual, sizes = x->global](const ValuePtr& ct, const Residuals&) {
      return record_on(op, ct, whole, *due, sizes, {});
    };
  ValuePtr there = record_on(p.op, x, p.part, inside, global, {&source, 1});
  if (there->slot) {
    parts_->entered.push_back(there);
    parts_->zeros.push_back(
        {nullptr,
         {},
         [op = p.op, part = p.part, dtype = x->dtype, due = &dual_inside, global](const ValuePtr&, const Residuals&) {
           return no_cotangent(op, part, dtype, *due, global);
         }});
  }
  return there;
}

// Each result depends on the gate, and the gate on each argument. Its number is lower than those of the function's ops,
// so its zeros come last. So each argument gets a cotangent on every submesh, and the ops before the call, which may
// communicate with all of them, run backward on every device.
SHARDLIB_INLINE void SubmeshCall::begin() {
  static constexpr TensorSpec scalar;
  Parts& p = *parts_;
  for (std::size_t i = 0; i < p.zeros.size(); ++i) p.zeros[i].x = &p.entered[i];
  p.gate = make_recorded(p.op, p.part, DType::f32, scalar, {}, p.zeros);
  p.zeros.clear();
  p.entered.clear();
}

SHARDLIB_INLINE void SubmeshCall::end() {
  parts_->names.reset();
}

SHARDLIB_INLINE ValuePtr SubmeshCall::leave(const ValuePtr& y, const TensorSpec& out, const TensorSpec& dual_inside) {
  const Parts& p = *parts_;
  if (y->device != p.part)
    p.fail("the result of the function is on " + y->device->describe_view() +
           (&y->device->original() == &p.part->original()
                ? "; `reinterpret` it for the submesh that the function gets (no traffic)"
                : "; return a tensor that is made on the submesh that the function gets, or of its arguments"));
  const int count = p.whole->size(p.leaving.axis), at = y->spec->find(p.leaving.dim);
  GlobalSizes global;
  if (!p.leaving.dim.empty() && at < 0) global.push_back(count);
  for (int i = 0; i < y->spec->rank(); ++i) {
    const DimSize size = y->global[i];
    if (i == at && size.is_padded()) p.fail_padded("the result of the function", y->spec->dims[i], size);
    global.push_back(i == at ? DimSize(size.size * count) : size);
  }
  auto sources = std::to_array<EdgeSource>(
      {{&y,
        {},
        [op = p.op, part = p.part, due = &dual_inside, sizes = y->global](const ValuePtr& ct, const Residuals&) {
          return record_on(op, ct, part, *due, sizes, {});
        }},
       {&p.gate, {}, [op = p.op, part = p.part](const ValuePtr&, const Residuals&) {
          static constexpr TensorSpec scalar;
          return no_cotangent(op, part, DType::f32, scalar, {});
        }}});
  return record_on(p.op, y, p.whole, out, global, std::span(sources).first(is_floating(y->dtype) ? 2 : 1));
}

}  // namespace shardlib::detail
