// Typing rules of pipelines: the values between stages, the results of microbatches, the placement of layers.
#pragma once

#include "shardlib/rules/all.hpp"
#include "shardlib/spec/dtype.hpp"

#include <string_view>

namespace shardlib::rules {

/// A stage receives the previous stage's result, so it must return the type that it accepts.
constexpr Verdict stage_result(DType begin_dtype, const TensorSpec& begin, DType end_dtype, const TensorSpec& end) {
  if (begin == end && begin_dtype == end_dtype) return {};
  const Text begins = quoted(Text(name(begin_dtype)) + "[" + begin + "]"),
             ends = quoted(Text(name(end_dtype)) + "[" + end + "]");
  return {{},
          "pipeline: `stage` takes " + begins + ", but returns " + ends +
              "; the next stage takes what this one returns, so the two must be one type: " +
              assign(begin_dtype, begin, end_dtype, end).why};
}

/// Layers that are sharded over stages, `layers/p`, must use the mesh's stage axis.
constexpr Verdict stage_label(std::string_view stage_axis, std::string_view label) {
  const auto parsed = parse_tensor(label);
  const Text title = "pipeline: the label " + quoted(label) + " of an Array among the weights ";
  if (!parsed.error.empty()) return {{}, title + "is not a dim: " + parsed.error};
  for (const Dim& dim : parsed.spec.dims)
    if (stage_axis.empty() && !dim.axes.empty())
      return {{},
              title + "spreads its entries over an axis, but the mesh has no stage axis; write " + quoted(dim.name)};
    else if (dim.axes.size() > 1 || (dim.axes.size() == 1 && dim.axes[0] != stage_axis))
      return {{},
              title + "spreads its entries over another axis than " + quoted(stage_axis) +
                  ", whose ranks are the stages; write " + quoted(Text(dim.name) + "/" + stage_axis) +
                  ", or name the stage axis of the StagedMesh"};
  return {};
}

/// Whether an Array's label spreads its entries over the stage axis: "layers/p".
constexpr bool is_spread(std::string_view stage_axis, std::string_view label) {
  const auto parsed = parse_tensor(label);
  for (const Dim& dim : parsed.spec.dims)
    if (dim.axes.contains(stage_axis)) return true;
  return false;
}

/// sum_over: each owner has its part of a sum over the stage axis, which the result has no more. Without an axis there
/// is one rank, and no sum.
constexpr Verdict sum_over(std::string_view stage_axis, const TensorSpec& x) {
  if (stage_axis.empty()) return {x, {}};
  if (!x.partial.contains(stage_axis))
    return {x, "sum_over: " + quoted(x) + " is not partial over the stage axis " + stage_axis +
                   ": the sum over the ranks is taken already, and a second one would be a multiple of it; leave it "
                   "out, or say with `mesh.part_of_sum(x)` that each rank has a part"};
  TensorSpec out = x;
  out.partial.erase(out.partial.find(stage_axis));
  return {out, {}};
}

/// reduce_gradients of a pipeline without `owners`: no rank but this one holds the leaf.
constexpr Verdict one_owner(std::string_view stage_axis, DType dtype, const TensorSpec& gradient) {
  if (!gradient.partial.contains(stage_axis)) return {};
  return {{},
          "reduce_gradients: the gradient " + quoted(Text(name(dtype)) + "[" + gradient + "]") +
              " is of a weight outside of the Arrays over " + stage_axis + ", which several ranks may hold; write " +
              "`reduce_gradients(mesh, grads, owners)`, where owners(leaf name) has the ranks that hold it"};
}
/// global_norm of a pipeline without `counts`, likewise.
constexpr Verdict counted_leaf(std::string_view stage_axis, bool is_shared) {
  if (!is_shared) return {};
  return {{},
          "pipeline::global_norm: a leaf is outside of the Arrays over " + Text(stage_axis) +
              ", so several ranks may hold it, of which one counts it; write `global_norm(mesh, grads, counts)`, where "
              "counts(leaf name) is true on one of them"};
}

/// Concat<"N", Tensor<f32, "B/d L">>: the spec of all microbatches together. If the tensor lacks the dim, it becomes
/// a new first dim. If the tensor has it, it must be unsharded, as for `concat`.
constexpr Verdict concat_microbatches(std::string_view dim, const TensorSpec& x) {
  if (x.has(dim)) {
    Verdict verdict{x, detail_::concat_dim(x, dim)};
    if (!verdict.ok())
      verdict.why = "Concat<" + quoted(dim) + ">: " + verdict.why +
                    "; or keep the microbatches apart along a dim that the tensor has not, " +
                    quoted("Concat<\"microbatch\", ...>");
    return verdict;
  }
  const Text all = Text(dim) + " " + to_string(x);
  if (const Verdict whole = tensor(all); !whole.ok()) return {{}, "Concat<" + quoted(dim) + ">: " + whole.why};
  TensorSpec out = parse_tensor(dim).spec;
  for (const Dim& each : x.dims) out.dims.push_back(each);
  for (auto axis : x.partial) out.add_partial(axis);
  return {out, {}};
}

}  // namespace shardlib::rules
