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
