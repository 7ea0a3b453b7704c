// Definitions of names.hpp.
#pragma once

#include "shardlib/runtime/names.hpp"

#include "shardlib/support/error.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE std::optional<DimSize> NameSizes::find(std::string_view name) const {
  for (const Entry& entry : entries_)
    if (entry.name == name) return entry.size;
  return std::nullopt;
}

SHARDLIB_INLINE std::string NameSizes::bind(std::string_view name, DimSize size,
                                            const std::function<std::string()>& where, std::string_view here) {
  if (owner_ == nullptr) return {};
  for (const Entry& entry : entries_) {
    if (entry.name != name) continue;
    if (entry.size == size) return {};
    return "dim `" + std::string(name) + "` is " + to_string(size) + std::string(here) + ", but " +
           to_string(entry.size) + " in " + entry.where + ", and a name has one size within " + owner_ +
           "; `rename` one of the two, or open a `Scope` around the part that means another size";
  }
  entries_.push_back({std::string(name), size, where()});
  return {};
}

SHARDLIB_INLINE Handle<NameSizes> names_within(const ProgramState& state, const char* owner) {
  return state.scopes.empty() ? Handle<NameSizes>::make(owner) : state.scopes.back();
}

SHARDLIB_INLINE void bind_names(const OpInfo& op, const Value& value, const std::string& where) {
  ProgramState& s = program_state(value.device);
  if (s.scopes.empty()) return;
  for (int i = 0; i < value.spec->rank(); ++i) {
    const Dim& dim = value.spec->dims[i];
    if (dim.is_integer()) continue;
    const std::string why = s.scopes.back()->bind(
        dim.name, value.global[i], [&] { return where.empty() ? op.describe() : where; },
        where.empty() ? where : " in " + where);
    if (!why.empty()) throw Error(op.describe() + ": " + why + " (" + value.device->describe() + ")");
  }
}

}  // namespace shardlib::detail
