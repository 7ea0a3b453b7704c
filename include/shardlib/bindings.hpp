// What an op checks of its operands: the sizes behind the names of dims, and numbers beside tensors.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "shardlib/value.hpp"

namespace shardlib::detail {

/// A number as messages show it: "0.5".
inline std::string show_number(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}
/// Refuses a number that the integers of a tensor's dtype do not hold exactly. Floating ones are rounded.
[[gnu::noinline]] inline void check_number(const OpInfo& op, const TensorSpec& spec, const Device& device, DType dtype,
                                           double value) {
  if (is_floating(dtype)) return;
  const double least = dtype == DType::i32 ? -2147483648.0 : 0.0;
  const double most = dtype == DType::i32   ? 2147483647.0
                      : dtype == DType::u32 ? 4294967295.0
                      : dtype == DType::u8  ? 255.0
                                            : 1.0;
  if (value >= least && value <= most && value == std::trunc(value)) return;
  const std::string of = op.spec.empty() ? " of `" + std::string(to_string(spec).view()) + "`" : "";
  throw Error(op.describe() + of + ": the number " + show_number(value) + " is no " + std::string(name(dtype)) +
              ", and is not rounded silently; write a whole number from " + show_number(least) + " to " +
              show_number(most) + ", or `cast<f32>` the tensor first (" + device.describe() + ")");
}

/// The sizes behind the names within one op call, and within the scopes that are open.
class Bindings {
 public:
  Bindings(const OpInfo& op, const std::shared_ptr<Device>& device) : op_(op), device_(device) {}

  [[gnu::noinline]] void bind(std::string_view name, DimSize size) {
    if (size.size < 0) fail("dim `" + std::string(name) + "` has the negative size " + std::to_string(size.size));
    if (size.padded < size.size)
      fail("dim `" + std::string(name) + "` of size " + std::to_string(size.size) + " cannot be padded to " +
           std::to_string(size.padded) + ", which is less");
    for (const auto& [known, value] : sizes_)
      if (known == name) return check(name, value, size, "in another operand");
    sizes_.push_back({name, size});
    auto& scopes = state(device_).scopes;
    if (scopes.empty()) return;
    const auto [it, fresh] = scopes.back().try_emplace(std::string(name), size);
    if (!fresh) check(name, it->second, size, "earlier in this scope");
  }
  [[gnu::noinline]] void bind(const Value& x) {
    if (!operands_.full()) operands_.push_back(x.spec);
    if (x.device != device_)
      fail(
          x.device->describe() == device_->describe()
              ? "its operands lie on two meshes of the same axes, each with devices of its own; make all tensors on one"
              : "its operands lie on different meshes: " + x.device->describe() + " and " + device_->describe());
    for (int i = 0; i < x.spec->rank(); ++i)
      if (!x.spec->dims[i].is_integer()) bind(x.spec->dims[i].name, x.global[i]);
  }
  [[gnu::noinline]] void bind(const NamedSize& given) { bind(given.name, {given.size, given.padded}); }
  /// The size behind a name, if the op or the scope knows it.
  [[nodiscard, gnu::noinline]] std::optional<DimSize> find(std::string_view name) const {
    for (const auto& [known, value] : sizes_)
      if (known == name) return value;
    const auto& scopes = state(device_).scopes;
    if (!scopes.empty())
      if (const auto it = scopes.back().find(name); it != scopes.back().end()) return it->second;
    return std::nullopt;
  }
  [[nodiscard]] DimSize operator[](const Dim& dim) const {
    if (dim.is_integer()) return dim.integer;
    if (const auto known = find(dim.name)) return *known;
    fail("the size of dim `" + std::string(dim.name) + "` is not known: give it, as in {{\"" + std::string(dim.name) +
         "\", 8}}");
  }
  [[nodiscard, gnu::noinline]] GlobalSizes sizes(const TensorSpec& spec) const {
    GlobalSizes global;
    for (const Dim& dim : spec.dims) global.push_back((*this)[dim]);
    return global;
  }
  [[noreturn, gnu::noinline]] void fail(const std::string& why) const {
    // An op without a spec of its own is told by its operands: "+ of `B/d M` and `M`".
    std::string op = op_.describe();
    for (int i = 0; op_.spec.empty() && i < operands_.size(); ++i)
      op += (i == 0 ? " of `" : " and `") + std::string(to_string(*operands_[i]).view()) + "`";
    throw Error(op + ": " + why + " (" + device_->describe() + ")");
  }

 private:
  void check(std::string_view name, DimSize known, DimSize size, const char* where) const {
    if (known != size)
      fail("dim `" + std::string(name) + "` is " + to_string(size) + ", but " + to_string(known) + " " + where);
  }
  OpInfo op_;
  std::shared_ptr<Device> device_;
  Small<std::pair<std::string_view, DimSize>, 4 * max_dims> sizes_;
  Small<const TensorSpec*, 4> operands_;
};

}  // namespace shardlib::detail
