// The sizes of named dims, which one call of value_and_grad, of spmd or a Scope shares.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/runtime/program_state.hpp"
#include "shardlib/runtime/tensor.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/sizes.hpp"

namespace shardlib::detail {

/// The sizes of named dims, with the place where each occurred first. A Scope, value_and_grad and spmd each have one.
class NameSizes : public Counted {
 public:
  /// `owner` is for example "value_and_grad". Without an owner, sizes are not checked: in a backward pass the forward
  /// pass has checked the ops.
  explicit NameSizes(const char* owner = nullptr) : owner_(owner) {}
  [[nodiscard, gnu::cold]] std::optional<DimSize> find(std::string_view name) const;
  /// Returns the reason why the name cannot have this size, or nothing. For a new name it stores `where` the size
  /// occurred. For a conflict the error contains `here`: " in argument 2".
  [[nodiscard, gnu::cold]] std::string bind(std::string_view name, DimSize size,
                                            const std::function<std::string()>& where, std::string_view here = {});

 private:
  struct Entry {
    std::string name;
    DimSize size;
    std::string where;
  };
  const char* owner_;
  std::vector<Entry> entries_;
};

/// Opens a scope of names and closes it on every exit from the C++ block.
class WithNames {
 public:
  WithNames(ProgramState& state, Handle<NameSizes> names) : state_(state) { state_.scopes.push_back(std::move(names)); }
  WithNames(const WithNames&) = delete;
  WithNames& operator=(const WithNames&) = delete;
  ~WithNames() { state_.scopes.pop_back(); }

 private:
  ProgramState& state_;
};

/// The open scope, or a new one for `owner`. Sizes of names apply to all ops that a function runs.
[[gnu::cold]] SHARDLIB_INLINE Handle<NameSizes> names_within(const ProgramState& state, const char* owner);

/// Checks the names of a value's dims against their sizes in the open scope. The value is the result of `op`, or an
/// operand of its call at `where`: "argument 2".
[[gnu::cold]] SHARDLIB_INLINE void bind_names(const OpInfo& op, const Value& value, const std::string& where = {});

}  // namespace shardlib::detail

namespace shardlib {

/// While it lives, a name has one size across calls on this device (seqax's Scope). A call of value_and_grad or spmd
/// opens one for all its ops. If a part of the program uses the names for other sizes, it opens its own Scope: scopes
/// nest, and the innermost one applies. `const Scope scope(mesh);`
class Scope {
 public:
  template <Spec A>
  explicit Scope(const Mesh<A>& mesh)
      : device_(mesh.device()),
        names_(detail::program_state(device_), detail::Handle<detail::NameSizes>::make("this Scope")) {}

 private:
  DevicePtr device_;
  detail::WithNames names_;
};

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/runtime/impl/names.hpp"
#endif
