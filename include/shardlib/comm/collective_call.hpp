// A member's request in one collective. The members of the group compare their requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "shardlib/comm/given.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/types/call_site.hpp"

namespace shardlib {

/// How a collective reduces: `sum` adds, `max` takes the largest.
enum class Reduction { sum, max };

/// Who adds up the sums of GPUs: `tree`, the tree over ranks that all backends share, or `nccl`, NCCL's own sums, whose
/// order NCCL chooses.
enum class GpuSums { tree, nccl };

namespace detail {

enum class Collective : std::uint8_t {
  all_gather,
  gather_view,
  all_to_all,
  reduce_scatter,
  all_reduce,
  barrier,
  shift,
  exchange
};

constexpr std::string_view name(Collective c) {
  constexpr std::string_view names[] = {
      "all_gather", "all_gather as a view", "all_to_all", "reduce_scatter", "all_reduce", "barrier", "shift",
      "exchange"};
  return names[static_cast<std::size_t>(c)];
}

/// A member's request to its group. All members must make the same one. Plain data, so other processes can read it.
struct CollectiveCall {
  Collective kind = Collective::barrier;
  std::size_t bytes = 0;  ///< of the send buffer
  DType dtype = DType::u8;
  Reduction op = Reduction::sum;
  std::size_t rows = 1;      ///< Communicator::takes_rows
  std::size_t nodes = 1;     ///< over which the group spreads evenly; above 1 this is one node's share
  std::uint64_t caller = 0;  ///< fingerprint of the op, its op spec and the line of its call
  bool elsewhere = false;    ///< the members only compare their calls: NCCL moves the data
  int places = 0;            ///< of a shift: how far it goes along the ring

  bool operator==(const CollectiveCall&) const = default;

  [[nodiscard]] std::uint64_t fingerprint() const {
    return Fingerprint()
        .add(static_cast<std::uint64_t>(kind))
        .add(bytes)
        .add(static_cast<std::uint64_t>(dtype))
        .add(static_cast<std::uint64_t>(op))
        .add(rows)
        .add(caller)
        .add(elsewhere ? 1 : 0)
        .add(static_cast<std::uint64_t>(places))
        .value();
  }
};

inline std::string to_string(const CollectiveCall& call) {
  const bool reduces = call.kind == Collective::reduce_scatter || call.kind == Collective::all_reduce;
  return std::string(name(call.kind)) +
         (call.kind == Collective::exchange ? "" : " of " + std::to_string(call.bytes) + " bytes") +
         (call.rows == 1 ? "" : " in " + std::to_string(call.rows) + " rows") +
         (call.kind == Collective::shift ? " by " + std::to_string(call.places) : "") +
         (reduces ? " (" + std::string(name(call.dtype)) + (call.op == Reduction::sum ? " sum)" : " max)") : "") +
         (call.elsewhere ? " by NCCL" : "");
}

/// "all_reduce of 64 bytes (f32 sum) in all_reduce<`A +d -> A`> at trainer.cpp:12"
inline std::string describe(const CollectiveCall& call, const OpInfo& op) {
  return to_string(call) + (*op.name == '\0' ? "" : " in " + op.label()) + op.at();
}

/// Throws the error for two calls that differ; `mine` and `theirs` are as `describe` returns them.
[[noreturn]] inline void fail_call(int rank, std::size_t size, const std::string& mine, int other,
                                   const std::string& theirs) {
  throw Error("rank " + std::to_string(rank) + " of " + std::to_string(size) + " calls " + mine + " where rank " +
              std::to_string(other) + " calls " + theirs +
              ": every device of a group must make the same calls in the same order");
}

}  // namespace detail
}  // namespace shardlib
