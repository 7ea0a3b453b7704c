// Teams of several lanes on the host, for the simulated device: they show a barrier that a kernel lacks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shardlib/device/team.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib {

namespace detail {
class SimulatedLanes;
}

/// One lane of a team of the simulated device. `single`, `lanes`, `one` and `barrier` are those of HostTeam.
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
  SHARDLIB_HOST_ONLY template <class F>
  SHARDLIB_FUNCTION void one(const F& f) const {
    if (lane_ == 0) f();
  }
  SHARDLIB_HOST_ONLY SHARDLIB_FUNCTION void barrier() const { wait(); }

 private:
  void wait() const;
  int lane_;
  detail::SimulatedLanes* all_;
};

namespace detail {

/// Calls lane(kernel, team) once for each lane of a team. Between two barriers one lane runs after the other, in an
/// order that changes. *Throws* Error if a lane ends while another one waits at a barrier.
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
