// Plans the memory, communication and FLOPs of a training step on any mesh, without training. The program itself runs
// one step dry on one device of the mesh, and the plan counts it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/device/mesh_axes.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/leaves.hpp"

namespace shardlib::run {

/// The cost of a training step. Bytes and FLOPs are those of one device, the first of the mesh, unless noted otherwise.
struct Plan {
  std::vector<AxisSize> mesh;                              ///< the mesh of the step
  std::int64_t parameters = 0;                             ///< parameters of the whole model
  std::int64_t weights = 0, gradients = 0, optimizer = 0;  ///< bytes at rest
  std::int64_t copies = 0;     ///< bytes of the weights' copies in the dtype of computation, if that is another
  std::int64_t residuals = 0;  ///< bytes of saved residuals, without weights
  std::int64_t peak = 0;       ///< peak of the pool from the program's start to the end of the step
  std::int64_t peak_node = 0;  ///< the peak for MPI ranks of one node, which view each other's weights
  std::int64_t peak_mpi = 0;   ///< the peak for MPI ranks without shared memory, whose reductions need scratch memory
  std::int64_t peak_gpus = 0;  ///< the peak for GPUs that communicate by NCCL, whose reductions need more of it
  /// All calls of a collective on the same specs.
  struct Collective {
    std::string op, spec, axes;  ///< "all_gather", "M/d F/t -> M F/t", "d"
    std::int64_t calls = 0;      ///< calls in a step
    std::int64_t bytes = 0;      ///< bytes that this device sends in all calls
    friend bool operator==(const Collective&, const Collective&) = default;
  };
  std::vector<Collective> collectives;  ///< collectives of a step, most bytes first
  /// All calls of a local op with the same result, or of one that communicates and computes products.
  struct Local {
    std::string op, spec;    ///< "einsum_unreduced", and the spec of the result
    double flops = 0;        ///< FLOPs of all calls
    std::int64_t bytes = 0;  ///< bytes of the shards that all calls read and write
  };
  std::vector<Local> local;  ///< the other ops of a step, the optimizer's too
  double flops = 0;          ///< FLOPs of all products in a step; a multiply-add counts as two
  bool has_bf16 = false;     ///< products are of bf16, as in training with --dtype bf16
  double all_flops = 0;      ///< FLOPs of all products on all devices
  double model_flops = 0;    ///< FLOPs of the model on all devices, without recomputation

  /// Bytes that this device sends in a step.
  [[nodiscard]] std::int64_t sent() const {
    std::int64_t total = 0;
    for (const Collective& c : collectives) total += c.bytes;
    return total;
  }
};

/// The plan as a table to print.
[[nodiscard]] SHARDLIB_INLINE std::string to_string(const Plan& plan);

/// Runs `body` as `launch` does, but dry and on the mesh's first device alone, and returns what run::train reports. The
/// devices of the mesh need not exist. It takes milliseconds. `plan({{"d", 8}}, body)`
[[nodiscard]] SHARDLIB_INLINE Plan plan(const std::vector<AxisSize>& mesh,
                                        const std::function<void(const DevicePtr&)>& body);

/// Plans as `plan` does, on a mesh whose devices do different work along `axis`, as the ranks of a pipeline do. Returns
/// a plan for each index of the axis, of the first device there. `plan_along("p", {{"p", 4}, {"d", 2}}, body)`
[[nodiscard]] SHARDLIB_INLINE std::vector<Plan> plan_along(std::string_view axis, const std::vector<AxisSize>& mesh,
                                                           const std::function<void(const DevicePtr&)>& body);

/// The plan of the first index as a table to print, and the memory and FLOPs of all.
[[nodiscard]] SHARDLIB_INLINE std::string to_string(std::string_view axis, const std::vector<Plan>& plans);

/// Runs `step`, dry or not, and counts what this device does: collectives, FLOPs, residuals and the pool's peak.
/// `count_step(device, [&] { step(); })`
[[nodiscard]] SHARDLIB_INLINE Plan count_step(const DevicePtr& device, const std::function<void()>& step);

namespace detail {
/// As tables show it: "1.83 GB".
[[nodiscard]] SHARDLIB_INLINE std::string short_bytes(std::int64_t bytes);
}  // namespace detail

/// The bytes of this device's shards of all leaves. `shard_bytes(weights)`
template <class Tree>
[[nodiscard]] std::int64_t shard_bytes(const Tree& tree) {
  std::int64_t bytes = 0;
  if constexpr (shardlib::detail::checked_tree<"shard_bytes", Tree>)
    for (const auto& leaf : shardlib::detail::untyped_leaves(tree).leaves)
      bytes += static_cast<std::int64_t>(leaf.value()->bytes());
  return bytes;
}

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/plan.hpp"
#endif
