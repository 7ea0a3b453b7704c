// Teams of several lanes on the host, for the simulated device. They make a missing barrier in a kernel visible.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shardlib/device/team.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib {

namespace detail {
class SimulatedLanes;
}

/// One lane of a team of the simulated device. `single`, `lanes`, `stream`, `one` and `barrier` are as in HostTeam.
class SimulatedTeam : public detail::TeamMemory {
 public:
  static constexpr bool single = false;
  static constexpr int width = 5;  ///< no power of two, so that no kernel gets away with assuming one

  SimulatedTeam(const detail::TeamMemory& memory, int lane, detail::SimulatedLanes* all)
      : TeamMemory(memory), lane_(lane), all_(all) {}
  SHARDLIB_HOST_ONLY template <class F>
  SHARDLIB_FUNCTION void lanes(std::int64_t count, const F& f) const {
    for (std::int64_t i = lane_; i < count; i += width) f(i);
  }
  SHARDLIB_HOST_ONLY template <int Ahead, class Load, class Store>
  SHARDLIB_FUNCTION void stream(std::int64_t count, const Load& load, const Store& store) const {
    std::int64_t i = lane_;
    for (; i + (Ahead - 1) * width < count; i += Ahead * width) {
      decltype(load(i)) loaded[Ahead];
      for (int k = 0; k < Ahead; ++k) loaded[k] = load(i + k * width);
      for (int k = 0; k < Ahead; ++k) store(i + k * width, loaded[k]);
    }
    for (; i < count; i += width) store(i, load(i));
  }
  SHARDLIB_HOST_ONLY template <class F>
  SHARDLIB_FUNCTION void one(const F& f) const {
    if (lane_ == 0) f();
  }
  SHARDLIB_HOST_ONLY SHARDLIB_FUNCTION void barrier() const { wait(); }

  /// A part of a team is some lanes that exchange numbers: of a GPU, those of a warp. Here one lane is left over.
  static constexpr int parts = 2, part_lanes = 2;
  /// Which part this lane is in: `parts` or more if it is left over.
  [[nodiscard]] SHARDLIB_FUNCTION int part() const { return lane_ / part_lanes; }
  /// The number of this lane in its part.
  [[nodiscard]] SHARDLIB_FUNCTION int part_lane() const { return lane_ % part_lanes; }
  /// The value of the part's lane whose number differs in the bit `distance`. All lanes of the team must come here. It
  /// uses the board.
  SHARDLIB_HOST_ONLY template <class A>
  [[nodiscard]] SHARDLIB_FUNCTION A exchange(A value, int distance) const {
    A* const board = this->template board<A>();
    board[lane_] = value;
    wait();
    if (part() < parts) value = board[lane_ ^ distance];
    wait();
    return value;
  }

 private:
  void wait() const;
  int lane_;
  detail::SimulatedLanes* all_;
};

namespace detail {

/// Calls lane(kernel, team) once for each lane of a team. Between two barriers one lane runs after the other, in an
/// order that changes. Throws Error if a lane ends while another one waits at a barrier.
SHARDLIB_INLINE void run_lanes(const TeamMemory& memory, void (*lane)(const void* kernel, const SimulatedTeam& team),
                               const void* kernel);

/// Runs a kernel's items one after the other, from the last to the first.
template <class Kernel>
void run_simulated(std::int64_t items, std::byte* scratch, const Kernel& kernel) {
  struct Launch {
    std::int64_t items;
    const Kernel& kernel;
  };
  const Launch launch{items, kernel};
  const auto lane = [](const void* of, const SimulatedTeam& team) {
    const auto& [n, f] = *static_cast<const Launch*>(of);
    for (std::int64_t item = n; item-- > 0;) {
      f(team, item);
      team.barrier();
    }
  };
  alignas(64) std::byte tile[tile_bytes_of<Kernel>];
  alignas(64) std::byte board[team_board_bytes];
  run_lanes({scratch, tile, board}, lane, &launch);
}

}  // namespace detail

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/device/impl/simulated_team.hpp"
#endif
