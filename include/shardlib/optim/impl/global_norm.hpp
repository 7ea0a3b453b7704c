// Definitions of global_norm.hpp.
#pragma once

#include "shardlib/optim/global_norm.hpp"

#include <algorithm>

#include "shardlib/device/mesh_axes.hpp"
#include "shardlib/kernels/reduce.hpp"
#include "shardlib/runtime/observe.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE ValuePtr sum_of_squares(const Value& x, const TensorSpec& spec) {
  bool counts = true;
  for (const auto axis : spec.partial)
    if (x.spec->placement(axis).kind == shardlib::Placement::replicated)
      counts = counts && x.device->axis_index(axis) == 0;
  auto out = make_value({"sum_of_squares", {}, {}}, x.device, DType::f32, spec, {});
  out->storage->buffer = observed(*out, [&] {
    Buffer result = allocate(*out);
    const Exec exec = x.device->exec();
    const auto of = [&]<class D>(D) { kernels::sum_of_squares(exec, x.count(), x.as<const D>(), result.as<f32>()); };
    if (!counts)
      exec.zero(result.data(), sizeof(f32));
    else
      x.dtype == DType::bf16 ? of(bf16()) : of(f32());
    return result;
  });
  return out;
}

SHARDLIB_INLINE void require_on_mesh(const DevicePtr& mesh, const std::string& leaf, const Value& x) {
  if (x.device == mesh) return;
  throw Error("global_norm: the leaf `" + leaf + "` is on another mesh than the one given, " +
              x.device->describe_view() + " and not " + mesh->describe_view() +
              "; give the mesh of the tree, and for gradients of a pipeline write `pipeline::global_norm(mesh, grads, "
              "counts)` with its StagedMesh");
}

SHARDLIB_INLINE void require_no_stage(const DevicePtr& mesh) {
  const std::string& axis = program_state(mesh).stage_axis;
  const auto has_axis = [&](const Device& device) {
    return std::ranges::find(device.axes(), axis, &AxisSize::name) != device.axes().end();
  };
  // A `reinterpret` of the whole mesh lacks the stage axis, too, but has all devices.
  if (axis.empty() || has_axis(*mesh) || !has_axis(mesh->root()) || mesh->size() == mesh->root().size()) return;
  throw Error("global_norm: the mesh is one stage of a pipeline, so each rank of " + axis +
              " would get another number, the norm of its own stages; write `pipeline::global_norm(mesh, grads, "
              "counts)` with the StagedMesh");
}

}  // namespace shardlib::detail
