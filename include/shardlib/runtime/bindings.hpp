// Checks of an op's operands: the sizes of named dims, and the values of number operands.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "shardlib/ops/record.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// A number as messages print it: "0.5".
SHARDLIB_INLINE std::string show_number(double value);
/// Throws if an integer tensor's dtype cannot represent the number exactly. Floating dtypes round it. A number of a
/// recomputed function is also noted in its FunctionRun.
[[gnu::cold]] SHARDLIB_INLINE void check_number(const OpInfo& op, const TensorSpec& spec, const Device& device,
                                                DType dtype, double value);

/// The sizes of named dims, within one op call and within the open scopes.
class Bindings {
 public:
  Bindings(const OpInfo& op, const DevicePtr& device) : op_(op), device_(device) {}

  [[gnu::cold]] void bind(std::string_view name, DimSize size);
  /// Binds the sizes of an operand, and notes it for functions that run again.
  [[gnu::cold]] void bind(const Value& x);
  [[gnu::cold]] void bind(const NamedSize& given);
  /// The size of a named dim, if the op or an open scope knows it.
  [[nodiscard, gnu::cold]] std::optional<DimSize> find(std::string_view name) const;
  [[nodiscard]] DimSize operator[](const Dim& dim) const {
    if (dim.is_integer()) return dim.integer;
    if (const auto known = find(dim.name)) return *known;
    fail("the size of dim `" + std::string(dim.name) + "` is not known: give it, as in {{\"" + std::string(dim.name) +
         "\", 8}}");
  }
  [[nodiscard, gnu::cold]] GlobalSizes sizes(const TensorSpec& spec) const;
  [[noreturn, gnu::cold]] void fail(const std::string& why) const;

 private:
  void check(std::string_view name, DimSize known, DimSize size, const char* where) const;
  /// The op with its operands, and the line of the call if known.
  [[nodiscard]] std::string describe() const;
  OpInfo op_;
  DevicePtr device_;
  Small<std::pair<std::string_view, DimSize>, 4 * max_dims> sizes_;
  Small<const TensorSpec*, 4> operands_;
};

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/runtime/impl/bindings.hpp"
#endif
