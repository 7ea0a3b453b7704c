// Typing rules of submesh and on_submeshes: the mesh of the devices with one index of an axis, and the types of tensors
// that enter or leave it.
#pragma once

#include "shardlib/rules/grad.hpp"

#include <string_view>

namespace shardlib::rules {

namespace detail_ {
constexpr Verdict without_axis(const Text& title, std::string_view axis, const TensorSpec& mesh) {
  if (!mesh_axes(mesh).contains(axis))
    return {{}, title + "the mesh " + quoted(mesh) + " has no axis " + quoted(axis) + "; name one of its axes"};
  TensorSpec out;
  for (const Dim& each : mesh.dims)
    if (each.name != axis) out.dims.push_back(each);
  if (out.rank() > 0) return {out, {}};
  return {{},
          title + "the mesh " + quoted(mesh) + " has no axis besides " + axis +
              ", and a mesh has at least one; add an axis to the Mesh, whose size is 1 where the devices lack it"};
}
}  // namespace detail_

/// submesh<"e">(mesh): the mesh without one of its axes.
constexpr Verdict submesh(std::string_view axis, const TensorSpec& mesh) {
  return detail_::without_axis(title_of("submesh", axis) + ": ", axis, mesh);
}

/// How results leave the submeshes: as shards of a dim, "N/e", or as summands, "+e".
struct Leaving {
  std::string_view axis;
  std::string_view dim;  ///< empty for summands
  Text error;            ///< empty if the text is such a placement
};
constexpr Leaving leaving_as(const ParsedOp& op) {
  const TensorSpec& spec = op.named.spec;
  const bool is_spec = op.form == ParsedOp::result && op.named.error.empty();
  if (is_spec && spec.rank() == 0 && spec.partial.size() == 1) return {spec.partial[0], {}, {}};
  if (is_spec && spec.rank() == 1 && spec.partial.empty() && spec.dims[0].axes.size() == 1 && !spec.dims[0].bracketed)
    return {spec.dims[0].axes[0], spec.dims[0].name, {}};
  return {
      {}, {}, "write how results leave the submeshes of an axis e: `N/e`, as shards of a dim, or `+e`, as summands"};
}

/// on_submeshes<"N/e">(mesh, ...): the mesh that the function gets.
constexpr Verdict on_submeshes(const ParsedOp& leaving, const TensorSpec& mesh) {
  const Text title = title_of("on_submeshes", leaving.text) + ": ";
  const Leaving leaves = leaving_as(leaving);
  if (!leaves.error.empty()) return {{}, title + leaves.error};
  return detail_::without_axis(title, leaves.axis, mesh);
}

/// An argument of the function, number `argument`, as its mesh sees it. A leaf of a tree keeps its type.
constexpr Verdict enter_submesh(const ParsedOp& leaving, const TensorSpec& mesh, int argument, bool of_tree,
                                const TensorSpec& x) {
  const std::string_view axis = leaving_as(leaving).axis;
  const Text title = title_of("on_submeshes", leaving.text) + ": argument " + number(argument) +
                     (of_tree ? " has " : ", ") + quoted(x) + (of_tree ? ", which is " : ", is ");
  if (const Verdict verdict = on_mesh(mesh, x); !verdict.ok())
    return {x, title_of("on_submeshes", leaving.text) + ": argument " + number(argument) + ": " + verdict.why};
  const Placement placement = x.placement(axis);
  TensorSpec inside = x;
  if (placement.kind == Placement::partial)
    return {x, title + "partial over " + axis + ", so each submesh would compute with a summand of its own; " +
                   reduce_first(x)};
  if (placement.kind == Placement::replicated) return {inside, {}};
  Dim& dim = inside.dims[placement.dim];
  if (of_tree)
    return {x, title + describe(x, axis) +
                   " and would have another type in the function; pass it as an argument of its own"};
  if (dim.axes[0] != axis)
    return {x, title + describe(x, axis) + ", but not over " + axis +
                   " first, so that the elements of a submesh do not follow each other; shard the dim over " + axis +
                   " first"};
  dim.axes.erase(0);
  return {inside, {}};
}

/// A result of the function on the mesh of all submeshes: "N/e" is a new first dim, or the dim N that the result has,
/// whose elements then follow each other by the index of the axis.
constexpr Verdict leave_submesh(const ParsedOp& leaving, const TensorSpec& mesh, const TensorSpec& y) {
  const Leaving leaves = leaving_as(leaving);
  const Text title = title_of("on_submeshes", leaving.text) + ": the function returns ";
  const Verdict inside = on_submeshes(leaving, mesh);
  if (!inside.ok()) return inside;
  if (y.placement(leaves.axis).kind != Placement::replicated)
    return {{},
            title + quoted(y) + ", which is " + describe(y, leaves.axis) + ", an axis that its mesh " +
                quoted(inside.result) + " does not have; return what one submesh has"};
  if (const Verdict verdict = on_mesh(inside.result, y); !verdict.ok()) return {{}, title + "a tensor: " + verdict.why};
  TensorSpec out = y;
  if (leaves.dim.empty()) {
    out.add_partial(leaves.axis);
  } else if (const int at = out.find(leaves.dim); at >= 0) {
    Axes axes{{leaves.axis}, 1};
    for (auto axis : y.dims[at].axes) axes.push_back(axis);
    out.dims[at].axes = axes;
  } else if (y.dims.full()) {
    return {
        {},
        title + quoted(y) + " of " + number(max_dims) + " dims, and " + quoted(leaving.text) + " would be one more"};
  } else {
    out = leaving.named.spec;
    for (const Dim& dim : y.dims) out.dims.push_back(dim);
    out.partial = y.partial;
  }
  return {out, {}};
}

/// The reason why the function does not accept the mesh and `args` more arguments.
constexpr Verdict submesh_function(const ParsedOp& leaving, int args, int parameters, int at, bool not_const,
                                   std::string_view declared, std::string_view given) {
  const Text form("; write f(part, arguments...), where part is the submesh"),
      arguments = "the submesh and " + number(args) + " more";
  return misfit(title_of("on_submeshes", leaving.text) + ": ", parameters, at, not_const, declared,
                arguments + ", each by value or as a const reference" + form, "is given " + arguments + form,
                ", " + quoted(declared) + ", is given " + quoted(given) + form);
}

/// The function returns tensors.
constexpr Verdict submesh_result(const ParsedOp& leaving, bool is_tensors, std::string_view returned) {
  if (is_tensors) return {};
  return {{},
          title_of("on_submeshes", leaving.text) + ": the function returns " + quoted(returned) +
              "; return a tensor, or a std::pair or std::tuple of tensors"};
}

}  // namespace shardlib::rules
