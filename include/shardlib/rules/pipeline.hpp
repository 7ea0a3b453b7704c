// Typing rules of pipelines: what stages hand over, what is kept of microbatches, where layers lie.
#pragma once

#include "shardlib/rules/all.hpp"

#include <string_view>

namespace shardlib::rules {

/// A stage begins with what the one before it hands over, so it returns the type that it takes.
constexpr Verdict stage_result(DType begin_dtype, const TensorSpec& begin, DType end_dtype, const TensorSpec& end) {
  if (begin == end && begin_dtype == end_dtype) return {};
  const Text begins = quoted(Text(name(begin_dtype)) + "[" + begin + "]"),
             ends = quoted(Text(name(end_dtype)) + "[" + end + "]");
  return {{},
          "pipeline: `stage` takes " + begins + ", but returns " + ends +
              "; the next stage takes what this one returns, so the two must be one type: " +
              assign(begin_dtype, begin, end_dtype, end).why};
}

/// Layers that are spread over ranks, `layers/p`, are spread over the ranks of the stage axis.
constexpr Verdict stage_label(std::string_view stage_axis, std::string_view label) {
  const auto parsed = parse_tensor(label);
  const Text title = "pipeline: the label " + quoted(label) + " of an Array among the weights ";
  if (!parsed.error.empty()) return {{}, title + "is no dim: " + parsed.error};
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

/// Concat<"N", Tensor<f32, "B/d L">>: the spec of all microbatches together. A dim that the tensor has not is new, and
/// first; one that it has is whole on each device, as for `concat`.
constexpr Verdict concat_microbatches(std::string_view dim, const TensorSpec& x) {
  const TensorSpec& spec = x;
  if (spec.has(dim)) {
    Verdict verdict{x, detail_::concat_dim(spec, dim)};
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
