// Typing rules of reinterpret: the axes of a mesh, and the placements of a tensor, under another factorization of the
// same devices.
#pragma once

#include "shardlib/rules/grad.hpp"

#include <string_view>

namespace shardlib::rules {

/// The axes that reinterpret replaces, and those that take their place: "d s -> e, t -> u" has two `groups`.
struct AxisMap {
  struct Group {
    Axes from, to;
  };
  Small<Group, max_axes> groups;
  Text error;  ///< empty if the text is such a map
};
namespace detail_ {
constexpr std::string_view trimmed(std::string_view text) {
  while (text.starts_with(' ')) text.remove_prefix(1);
  while (text.ends_with(' ')) text.remove_suffix(1);
  return text;
}
}  // namespace detail_
constexpr AxisMap parse_axis_map(std::string_view text) {
  AxisMap map;
  const auto fail = [&](const Text& why) {
    map.error = why;
    return map;
  };
  Axes from, to;
  for (bool last = false; !last;) {
    const auto comma = detail::find(text, ","), arrow = detail::find(text, "->");
    last = comma == detail::npos;
    if (arrow == detail::npos || arrow > comma || detail::find(text.substr(0, comma), "->", arrow + 2) != detail::npos)
      return fail("write axes and what takes their place, `d s -> e`, with commas between several such groups");
    const Verdict left = rules::mesh(detail_::trimmed(text.substr(0, arrow)));
    const Verdict right = rules::mesh(detail_::trimmed(text.substr(0, comma).substr(arrow + 2)));
    if (!left.ok() || !right.ok()) return fail(left.ok() ? right.why : left.why);
    if (map.groups.full()) return fail("a mesh has at most " + number(max_axes) + " axes");
    map.groups.push_back({mesh_axes(left.result), mesh_axes(right.result)});
    const auto twice = [&](const Axes& some, Axes& all) {
      for (auto axis : some) {
        if (all.contains(axis)) map.error = "axis " + quoted(axis) + " is in two groups";
        if (!all.full()) all.push_back(axis);
      }
      return !map.error.empty();
    };
    const AxisMap::Group& group = map.groups[map.groups.size() - 1];
    if (twice(group.from, from) || twice(group.to, to)) return map;
    if (!last) text = text.substr(comma + 1);
  }
  return map;
}

namespace detail_ {
/// Where the axes `part` stand in `axes`, one after the other; -1 if they do not.
constexpr int find_run(const Axes& axes, const Axes& part) {
  const int at = axes.find(part[0]);
  for (int i = 0; i < part.size(); ++i)
    if (at < 0 || at + i >= axes.size() || axes[at + i] != part[i]) return -1;
  return at;
}

/// Why the axes are no part of the mesh's numbers of devices, or nothing.
constexpr Text check_run(const TensorSpec& mesh, const Axes& axes) {
  const Axes all = mesh_axes(mesh);
  for (auto axis : axes)
    if (!all.contains(axis)) return "the mesh " + quoted(mesh) + " has no axis " + quoted(axis);
  if (find_run(all, axes) >= 0) return {};
  return "the axes " + quoted(joined(axes, " ")) + " do not follow each other in the mesh " + quoted(mesh) +
         ", which numbers its devices in the order of its axes; name axes that do, or order those of the mesh "
         "otherwise";
}
}  // namespace detail_

/// reinterpret<"d s -> e">(mesh): the mesh with other axes in place of some that follow each other.
constexpr Verdict reinterpret_mesh(const ParsedOp& map, const TensorSpec& mesh) {
  const Text title = title_of("reinterpret", map.text) + ": ";
  const AxisMap parsed = parse_axis_map(map.text);
  if (!parsed.error.empty()) return {{}, title + parsed.error};
  for (const AxisMap::Group& group : parsed.groups)
    if (const Text why = detail_::check_run(mesh, group.from); !why.empty()) return {{}, title + why};
  TensorSpec out;
  for (int i = 0; i < mesh.rank();) {
    Axes axes{{mesh.dims[i].name}, 1};
    int replaced = 1;
    for (const AxisMap::Group& group : parsed.groups)
      if (group.from[0] == mesh.dims[i].name) {
        axes = group.to;
        replaced = group.from.size();
      }
    for (auto axis : axes) {
      if (out.rank() == max_axes) return {{}, title + "the result has more than " + number(max_axes) + " axes"};
      if (out.has(axis)) return {{}, title + "the result has the axis " + quoted(axis) + " twice; choose another name"};
      Dim dim;
      dim.name = axis;
      out.dims.push_back(dim);
    }
    i += replaced;
  }
  return {out, {}};
}

namespace detail_ {

/// Why the operand's placements over the axes of a group are not one over all of them, in the order of the ranks. Empty
/// if they are.
constexpr Text check_group(const AxisMap::Group& group, const TensorSpec& x) {
  const Placement first = x.placement(group.from[0]);
  for (auto axis : group.from) {
    if (x.placement(axis) == first) continue;
    return "the operand " + quoted(x) + " is " + describe(x, group.from[0]) + " and " + describe(x, axis) + ", but " +
           quoted(joined(group.from, " ")) + " become " + quoted(joined(group.to, " ")) +
           " together; give the operand one placement over all of them first";
  }
  if (first.kind != Placement::sharded || find_run(x.dims[first.dim].axes, group.from) >= 0) return {};
  return "dim " + quoted(x.dims[first.dim]) + " is not sharded over " + quoted(joined(group.from, " ")) +
         " in this order, which is that of " + quoted(joined(group.to, " ")) + "; its shards would be on other devices";
}

}  // namespace detail_

/// reinterpret<"d s -> e">(x, mesh): a placement over all axes of a group, in their order, becomes one over the axes
/// that take their place. A tensor that is replicated over all of them stays replicated.
constexpr Verdict reinterpret(const ParsedOp& map, const TensorSpec& mesh, const TensorSpec& x) {
  const Text title = title_of("reinterpret", map.text) + ": ";
  const auto fail = [&](const Text& why) { return Verdict{{}, title + why}; };
  const AxisMap parsed = parse_axis_map(map.text);
  if (!parsed.error.empty()) return fail(parsed.error);
  TensorSpec out = x;
  Axes mapped;
  for (int i = parsed.groups.size(); i-- > 0;) {
    const AxisMap::Group& group = parsed.groups[i];
    if (const Text why = detail_::check_run(mesh, group.to); !why.empty()) return fail(why);
    if (const Text why = detail_::check_group(group, x); !why.empty()) return fail(why);
    for (auto axis : group.from) mapped.push_back(axis);
  }
  // All axes at once, because a group may bring a name that another one takes away.
  Axes used;
  Text wrong;
  const auto change = [&](Axes& axes) {
    Axes after;
    for (auto axis : axes) {
      const AxisMap::Group* in = nullptr;
      for (const AxisMap::Group& group : parsed.groups)
        if (group.from.contains(axis)) in = &group;
      const Axes one = in == nullptr ? Axes{{axis}, 1} : in->from[0] == axis ? in->to : Axes{};
      for (auto name : one) {
        if (used.contains(name)) wrong = "the result has the axis " + quoted(name) + " twice; choose another name";
        if (used.full()) wrong = "the result has more than " + number(max_axes) + " axes";
        if (!wrong.empty()) return;
        used.push_back(name);
        after.push_back(name);
      }
    }
    axes = after;
  };
  for (Dim& dim : out.dims) change(dim.axes);
  Axes partial = x.partial;
  change(partial);
  out.partial = {};
  for (auto axis : partial) out.add_partial(axis);
  if (!wrong.empty()) return fail(wrong);
  const Axes axes = mesh_axes(mesh);
  Axes before;
  collect_axes(x, before);
  for (auto axis : before)
    if (!mapped.contains(axis) && !axes.contains(axis))
      return fail("the operand " + quoted(x) + " is " + describe(x, axis) + ", which the mesh " + quoted(mesh) +
                  " does not have; name the axis that takes its place, as in " +
                  quoted(Text(map.text) + ", " + axis + " -> ...") + ", or take a mesh that has it");
  return {out, {}};
}

}  // namespace shardlib::rules
