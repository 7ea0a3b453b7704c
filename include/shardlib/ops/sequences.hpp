// The order in which the devices of a sharded length hold the positions of a sequence, and the part of causal attention
// that each device computes in each order.
#pragma once

#include <array>
#include <cstdint>

#include "shardlib/ops/record.hpp"

namespace shardlib {

/// The order in which n devices share the positions of a sequence. The type "B L/s" does not tell the order, so give
/// the same order to all ops that depend on positions. On one device both orders are equal. `SequenceOrder::zigzag`
enum class SequenceOrder : std::uint8_t {
  contiguous,  ///< device i holds part i of n equal parts
  zigzag,  ///< device i holds the parts i and 2n - 1 - i of 2n equal parts, so that causal attention costs all the same
};

/// The positions that the elements of a dim have: `first` on, in an order. A number is the first one of a contiguous
/// order. `rope<"L", "D">(q, {}, SequenceOrder::zigzag)`
struct Positions {
  std::int64_t first = 0;
  SequenceOrder order = SequenceOrder::contiguous;

  constexpr Positions() = default;
  template <detail::whole_number N>
  constexpr Positions(N from, SequenceOrder as = SequenceOrder::contiguous)
      : first(static_cast<std::int64_t>(from)), order(as) {}
  constexpr Positions(SequenceOrder as) : order(as) {}
};

namespace detail {

/// Consecutive positions.
struct PositionRun {
  std::int64_t first = 0, size = 0;
};
/// The positions of a device's shard, which has `local` of them, in their order in memory: two runs, of which one may
/// be empty. `place` is the device's number among those of the dim.
constexpr std::array<PositionRun, 2> positions_of_shard(SequenceOrder order, std::int64_t place, std::int64_t devices,
                                                        std::int64_t local) {
  if (order == SequenceOrder::contiguous || devices == 1) return {{{place * local, local}, {}}};
  const std::int64_t part = local / 2;
  return {{{place * part, part}, {(2 * devices - 1 - place) * part, part}}};
}

/// Queries and keys of two shards, by their places in memory. Each of these queries sees each of these keys, except
/// segments, and no other pair of the shards sees each other.
struct AttendedBlock {
  std::int64_t first_query = 0, queries = 0, first_key = 0, keys = 0;
};
/// The queries and keys of step 1, 2, ... of n - 1. The keys come from the device `step` places before in the ring.
/// In zigzag order an earlier device holds an earlier first part, which all queries see, and a later second part. All
/// keys of a later device precede the queries of the second part, and follow those of the first one.
constexpr AttendedBlock attended_block(SequenceOrder order, std::int64_t place, std::int64_t step, std::int64_t local) {
  const bool keys_of_earlier = step <= place;
  if (order == SequenceOrder::contiguous) return keys_of_earlier ? AttendedBlock{0, local, 0, local} : AttendedBlock{};
  const std::int64_t part = local / 2;
  return keys_of_earlier ? AttendedBlock{0, local, 0, part} : AttendedBlock{part, part, 0, local};
}

/// Throws if a dim of x cannot have the order: its shards must be two equal parts, without padding.
void require_order(const OpInfo& op, const ValuePtr& x, int dim, SequenceOrder order);

}  // namespace detail
}  // namespace shardlib
