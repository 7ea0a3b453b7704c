// The mesh that --mesh names.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shardlib/device/mesh_axes.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::run {

/// The mesh that --mesh names, for a program whose mesh has these axes, in this order: "d t". An axis that the text
/// leaves out has size 1; one of `optional` is then left out of the mesh too. Throws UsageError that names --mesh for
/// other axes and wrong sizes. `mesh_of("d=4", "d t")` is d=4,t=1
inline std::vector<AxisSize> mesh_of(const std::string& text, std::string_view axes, std::string_view optional = "") {
  const auto given = naming_option("--mesh", [&] { return parse_mesh(text); });
  const auto may_lack = rules::mesh_axes(optional);
  std::vector<AxisSize> mesh;
  std::string example;
  auto next = given.begin();
  for (const auto name : rules::mesh_axes(axes)) {
    const bool has = next != given.end() && next->name == name, may = may_lack.contains(name);
    const int size = has ? next->size : 1;
    if (has) ++next;
    if (size > 1 || !may) mesh.push_back({std::string(name), size});
    if (!may) example += (example.empty() ? "" : ",") + std::string(name) + (example.empty() ? "=4" : "=2");
  }
  if (next != given.end())
    throw UsageError("--mesh " + text + ": this program's mesh has the axes " + std::string(axes) +
                     ", in this order, as in --mesh " + example);
  return mesh;
}

}  // namespace shardlib::run
