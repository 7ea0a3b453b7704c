// Definitions of bindings.hpp.
#pragma once

#include "shardlib/runtime/bindings.hpp"

#include <charconv>
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "shardlib/ops/elementwise.hpp"
#include "shardlib/runtime/names.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE std::string show_number(double value) {
  if (std::isnan(value)) return "nan";  // the sign of a NaN tells nothing
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

SHARDLIB_INLINE void check_number(const OpInfo& op, const TensorSpec& spec, const Device& device, DType dtype,
                                  double value) {
  if (is_floating(dtype)) return;
  const double least = dtype == DType::i32 ? -2147483648.0 : 0.0;
  const double most = dtype == DType::i32   ? 2147483647.0
                      : dtype == DType::u32 ? 4294967295.0
                      : dtype == DType::u8  ? 255.0
                                            : 1.0;
  if (value >= least && value <= most && value == std::trunc(value)) return;
  const std::string of = op.spec.empty() ? " of `" + std::string(to_string(spec).view()) + "`" : "";
  throw Error(op.label() + of + op.at() + ": the number " + show_number(value) +
              (dtype == DType::i32 ? " is not an " : " is not a ") + std::string(name(dtype)) +
              ", and is not rounded silently; write a whole number from " + show_number(least) + " to " +
              show_number(most) + ", or `cast<f32>` the tensor first (" + device.describe() + ")");
}

SHARDLIB_INLINE void Bindings::bind(std::string_view name, DimSize size) {
  if (size.size < 0) fail("dim `" + std::string(name) + "` has the negative size " + std::to_string(size.size));
  if (size.padded < size.size)
    fail("dim `" + std::string(name) + "` of size " + std::to_string(size.size) + " cannot be padded to " +
         std::to_string(size.padded) + ", which is less");
  for (const auto& [known, value] : sizes_)
    if (known == name) return check(name, value, size, "in another operand");
  if (sizes_.full()) fail("more than " + std::to_string(sizes_.size()) + " sizes are given; give those of its dims");
  sizes_.push_back({name, size});
  const auto& scopes = program_state(device_).scopes;
  if (scopes.empty()) return;
  const std::string why = scopes.back()->bind(name, size, [&] { return describe(); });
  if (!why.empty()) fail(why);
}

SHARDLIB_INLINE void Bindings::bind(const Value& x) {
  if (!operands_.full()) operands_.push_back(x.spec);
  if (x.device != device_) {
    const bool one_mesh = &x.device->original() == &device_->original();
    const bool one_device = x.device->rank() == device_->rank() || &x.device->root() == &device_->root();
    const std::string here = x.device->describe_view(), there = device_->describe_view();
    if (!one_device)
      fail("its operands are of two devices, " + here + " and " + there +
           "; let each device make its own tensors, and move shards with a collective");
    fail(
        here == there
            ? "its operands are on two meshes of the same axes, each with devices of its own; make all tensors on one, "
              "in one `launch`"
            : "its operands are on different meshes: " + here + " and " + there +
                  (one_mesh                                ? "; `reinterpret` one of them (no traffic)"
                   : &x.device->root() == &device_->root() ? "; tensors come to a submesh as arguments of "
                                                             "`on_submeshes`, and leave it as results (no traffic)"
                                                           : "; make all tensors on one"));
  }
  for (int i = 0; i < x.spec->rank(); ++i)
    if (!x.spec->dims[i].is_integer()) bind(x.spec->dims[i].name, x.global[i]);
  note_operand(x);
}

SHARDLIB_INLINE void Bindings::bind(const NamedSize& given) {
  bind(given.name, {given.size, given.padded});
}

SHARDLIB_INLINE std::optional<DimSize> Bindings::find(std::string_view name) const {
  for (const auto& [known, value] : sizes_)
    if (known == name) return value;
  const auto& scopes = program_state(device_).scopes;
  return scopes.empty() ? std::nullopt : scopes.back()->find(name);
}

SHARDLIB_INLINE GlobalSizes Bindings::sizes(const TensorSpec& spec) const {
  GlobalSizes global;
  for (const Dim& dim : spec.dims) global.push_back((*this)[dim]);
  return global;
}

SHARDLIB_INLINE std::string Bindings::describe() const {
  // An op without an op spec is described by its operands: "+ of `B/d M` and `M`".
  std::string op = op_.label();
  for (int i = 0; op_.spec.empty() && i < operands_.size(); ++i)
    op += (i == 0 ? " of `" : " and `") + std::string(to_string(*operands_[i]).view()) + "`";
  return op + op_.at();
}

SHARDLIB_INLINE void Bindings::fail(const std::string& why) const {
  throw Error(describe() + ": " + why + " (" + device_->describe() + ")");
}

SHARDLIB_INLINE void Bindings::check(std::string_view name, DimSize known, DimSize size, const char* where) const {
  if (known != size)
    fail("dim `" + std::string(name) + "` is " + to_string(size) + ", but " + to_string(known) + " " + where +
         (known.size == size.size ? "; give the dim one padded size, in a `Scope` or where the tensors are made" : ""));
}

SHARDLIB_INLINE const GlobalSizes& sizes_of(const ValuePtr& x) {
  return x->global;
}
SHARDLIB_INLINE GlobalSizes sizes_by_name(const OpInfo& op, const TensorSpec& out,
                                          std::initializer_list<const ValuePtr*> operands) {
  Bindings names(op, (**operands.begin())->device);
  for (const ValuePtr* operand : operands) names.bind(**operand);
  return names.sizes(out);
}
SHARDLIB_INLINE GlobalSizes sizes_by_name(const OpInfo& op, const TensorSpec& out, const ValuePtr& x,
                                          const Sizes& given) {
  Bindings names(op, x->device);
  names.bind(*x);
  for (const NamedSize& size : given) names.bind(size);
  return names.sizes(out);
}

SHARDLIB_INLINE void require_no_gradient(const OpInfo& op, const ValuePtr& x, const char* what) {
  if (x->slot)
    throw Error(op.describe() + ": " + what + "; take stop_gradient of the operand first (" + x->device->describe() +
                ")");
}
SHARDLIB_INLINE void check_number(const OpInfo& op, const ValuePtr& x, double value) {
  check_number(op, *x->spec, *x->device, x->dtype, value);
}
SHARDLIB_INLINE void require_nonzero(const OpInfo& op, const ValuePtr& x, double divisor) {
  if (divisor == 0)
    throw Error(std::string(op.name) + " of `" + std::string(to_string(*x->spec).view()) + "`" + op.at() +
                ": integers cannot be divided by zero (" + x->device->describe() + ")");
}
SHARDLIB_INLINE void require_exponent(const OpInfo& op, const ValuePtr& x, double exponent) {
  if (exponent == 0)
    throw Error(op.describe() +
                ": the exponent is the integer 0, so all elements would be 1; a quotient of integers such as 1 / 2 is "
                "0: write `1.0 / 2`, and `0.0` for ones (" +
                x->device->describe() + ")");
}
SHARDLIB_INLINE void check_bounds(const OpInfo& op, const ValuePtr& x, double low, double high) {
  if (low <= high) return;
  throw Error(op.describe() + ": the lower bound " + show_number(low) + (low > high ? " is above" : " or") +
              " the upper bound " + show_number(high) +
              (low > high ? "; the lower one comes first (" : " is not a number; give two numbers (") +
              x->device->describe() + ")");
}

}  // namespace shardlib::detail
