// The order of a batch's tokens along a sharded length.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "shardlib/device/launch.hpp"
#include "shardlib/device/mesh_axes.hpp"
#include "shardlib/ops/sequences.hpp"
#include "shardlib/run/console.hpp"
#include "shardlib/run/training.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::run {

/// The order of a batch's tokens along a length that is sharded over `axis`. Each device has an equal part of every
/// sequence: two of 2n parts in zigzag order, with which all devices compute as much of attention, or, with a note, one
/// of n parts if 2n does not divide --seq. Throws UsageError if n does not. `sequence_order(mesh, o.training, "s")`
inline SequenceOrder sequence_order(const std::vector<AxisSize>& mesh, const Training& t, std::string_view axis) {
  const int n = axis_size(mesh, axis);
  if (n == 1) return SequenceOrder::contiguous;
  const bool has_rows = !t.sample_only || !t.evaluate.empty();
  if (t.seq % n != 0 && has_rows)
    throw UsageError(
        fmt::format("--seq {} does not divide over {} = {} (mesh {}): choose a multiple of {}, or of {} for equal work",
                    t.seq, axis, n, to_string(mesh), n, 2 * n));
  if (t.seq % (2 * std::int64_t{n}) == 0) return SequenceOrder::zigzag;
  if (world_rank() == 0 && !t.sample_only)
    print_console(
        fmt::format("note: --seq {} is not a multiple of 2{} = {}, so tokens are sharded over {} in contiguous order, "
                    "in which the last device computes the most of attention; with a multiple they are in zigzag "
                    "order\n",
                    t.seq, axis, 2 * n, axis));
  return SequenceOrder::contiguous;
}

}  // namespace shardlib::run
