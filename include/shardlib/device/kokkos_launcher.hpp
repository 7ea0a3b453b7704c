// Runs kernels by Kokkos, on the execution space of the host that the build names. cuda_launcher.hpp runs them on GPUs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "shardlib/device/team.hpp"
#include "shardlib/support/kokkos.hpp"

namespace shardlib::detail {

#if defined(SHARDLIB_KOKKOS_SPACE)
using KokkosSpace = Kokkos::SHARDLIB_KOKKOS_SPACE;
#else
using KokkosSpace = Kokkos::DefaultExecutionSpace;
#endif
inline const std::string kokkos_space_name = std::string("Kokkos::") + KokkosSpace::name();
using KokkosPolicy = Kokkos::TeamPolicy<KokkosSpace>;
using KokkosMember = KokkosPolicy::member_type;

/// A team of Kokkos, whose threads are the lanes.
struct KokkosTeam : TeamMemory {
  static constexpr bool single = false;
  const KokkosMember& member;

  KOKKOS_FUNCTION KokkosTeam(const TeamMemory& memory, const KokkosMember& m) : TeamMemory(memory), member(m) {}
  template <class F>
  KOKKOS_FUNCTION void lanes(std::int64_t count, const F& f) const {
    Kokkos::parallel_for(Kokkos::TeamThreadRange(member, count), f);
  }
  template <int Ahead, class Load, class Store>
  KOKKOS_FUNCTION void stream(std::int64_t count, const Load& load, const Store& store) const {
    lanes(count, [&](std::int64_t i) { store(i, load(i)); });
  }
  template <class F>
  KOKKOS_FUNCTION void one(const F& f) const {
    Kokkos::single(Kokkos::PerTeam(member), f);
  }
  KOKKOS_FUNCTION void barrier() const { member.team_barrier(); }
};

/// The functor that Kokkos calls for each team. A team runs every teams-th item.
template <class Kernel>
struct KokkosLaunch {
  Kernel kernel;
  std::int64_t items;
  std::byte* scratch;
  std::size_t scratch_bytes;

  KOKKOS_FUNCTION void operator()(const KokkosMember& member) const {
    auto* const shared = static_cast<std::byte*>(member.team_scratch(0).get_shmem_aligned(shared_bytes, 64));
    const KokkosTeam team(
        {scratch + scratch_bytes * static_cast<std::size_t>(member.league_rank()), shared, shared + tile_bytes},
        member);
    for (std::int64_t item = member.league_rank(); item < items; item += member.league_size()) {
      kernel(team, item);
      team.barrier();
    }
  }
  static constexpr std::size_t tile_bytes = tile_bytes_of<Kernel>, shared_bytes = tile_bytes + team_board_bytes;
};

/// How many teams run a kernel: what its scratch is for.
inline std::int64_t kokkos_teams(std::int64_t items, int threads) {
  return std::min<std::int64_t>(items, threads);
}

template <class Kernel>
void run_by_kokkos(std::int64_t items, std::int64_t teams, std::byte* scratch, std::size_t scratch_bytes,
                   const Kernel& kernel) {
  static_assert(Kokkos::SpaceAccessibility<KokkosSpace, Kokkos::HostSpace>::accessible,
                "SHARDLIB_LAUNCHER_KOKKOS: this execution space cannot access host memory; define "
                "SHARDLIB_KOKKOS_SPACE as Serial, OpenMP or Threads. For a Kokkos of CUDA see docs/gpus.md");
  using Launch = KokkosLaunch<Kernel>;
  KokkosPolicy policy(static_cast<int>(teams), 1);  // a core of the host is a team of one
  policy.set_scratch_size(0, Kokkos::PerTeam(Launch::shared_bytes + 64));
  static std::mutex one_at_a_time;  // devices may be threads, and an execution space of the host serves one thread
  const std::lock_guard lock(one_at_a_time);
  Kokkos::parallel_for("shardlib", policy, Launch{kernel, items, scratch, scratch_bytes});
  KokkosSpace().fence();
}

}  // namespace shardlib::detail
