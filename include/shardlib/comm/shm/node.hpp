// The ranks of this node and the memory that they share. They are found and mapped once, when MPI starts.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "shardlib/comm/mpi/process.hpp"
#include "shardlib/comm/recordings.hpp"
#include "shardlib/comm/shm/arena.hpp"
#include "shardlib/comm/shm/group.hpp"
#include "shardlib/support/environment.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/tuning.hpp"

namespace shardlib::detail::shm {

/// The ranks that share memory with this one.
class NodeRanks {
 public:
  /// `ranks` are ranks of MPI_COMM_WORLD, by place on this node. `node_of` has, for each rank of MPI_COMM_WORLD, the
  /// node with which it shares memory; a negative number means none. `rings` are the offsets of the ranks' flight
  /// recorders in their arenas, by place on this node.
  NodeRanks(std::shared_ptr<Arena> arena, std::vector<int> ranks, std::vector<int> node_of,
            std::vector<std::uint64_t> rings)
      : arena_(std::move(arena)), ranks_(std::move(ranks)), node_of_(std::move(node_of)), rings_(std::move(rings)) {}

  [[nodiscard]] const std::shared_ptr<Arena>& arena() const { return arena_; }
  [[nodiscard]] const std::vector<int>& ranks() const { return ranks_; }
  [[nodiscard]] const std::vector<std::uint64_t>& rings() const { return rings_; }
  /// The flight recorder of a rank of MPI_COMM_WORLD; null if the rank is on another node.
  [[nodiscard]] FlightRing* ring(int rank) const {
    const auto place = std::ranges::find(ranks_, rank) - ranks_.begin();
    if (place == std::ssize(ranks_)) return nullptr;
    return reinterpret_cast<FlightRing*>(arena_->at(static_cast<int>(place), rings_[static_cast<std::size_t>(place)]));
  }
  /// Creates the group of these ranks of MPI_COMM_WORLD; `rank` is the index of this process among them. Only they take
  /// part, over their communicator `comm`. `pool` is this process's pool, in the arena. Returns null unless each node
  /// has the same number of them, at least two, next to each other.
  std::shared_ptr<Group> group(const std::vector<int>& members, int rank, MPI_Comm comm,
                               const std::shared_ptr<Pool>& pool, const Tuning& tuning = {}) {
    const auto node_at = [&](std::size_t i) { return node_of_[static_cast<std::size_t>(members[i])]; };
    std::size_t size = 1;
    while (size < members.size() && node_at(size) == node_at(0)) ++size;
    if (size == 1 || members.size() % size != 0) return nullptr;
    std::set<int> nodes;
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (node_at(i) < 0 || node_at(i) != node_at(i / size * size)) return nullptr;
      nodes.insert(node_at(i));
    }
    if (nodes.size() != members.size() / size) return nullptr;

    const auto mine = static_cast<std::size_t>(rank);
    const std::size_t first = mine / size * size;
    std::vector<int> places;
    for (std::size_t i = first; i < first + size; ++i) {
      places.push_back(static_cast<int>(std::ranges::find(ranks_, members[i]) - ranks_.begin()));
    }
    std::vector<std::uint64_t> offsets(members.size());
    if (mine == first) offsets[mine] = arena_->offset(make_state(size));
    mpi::check(MPI_Allgather(MPI_IN_PLACE, 1, MPI_UINT64_T, offsets.data(), 1, MPI_UINT64_T, comm), "group",
               sizeof offsets[0]);
    std::byte* const state = arena_->at(places[0], offsets[first]);
    return std::make_shared<Group>(arena_, pool, std::move(places), mine - first, state, members, first, tuning);
  }

 private:
  std::byte* make_state(std::size_t members) {
    std::erase_if(states_, [this](const auto& state) {
      const bool abandoned = Group::is_abandoned(state.first);
      if (abandoned) arena_->free(state.first, Group::state_bytes(state.second));
      return abandoned;
    });
    return states_.emplace_back(Group::make_state(*arena_, members), members).first;
  }

  std::shared_ptr<Arena> arena_;
  std::vector<int> ranks_;
  std::vector<int> node_of_;
  std::vector<std::uint64_t> rings_;
  std::vector<std::pair<std::byte*, std::size_t>> states_{};  ///< of groups whose first member this is, with sizes
};

/// Null if ranks share no memory: a rank alone on its node, SHARDLIB_SHM=0, or a system that does not allow it.
inline std::shared_ptr<NodeRanks> node;

/// Throws UsageError unless the environment variable SHARDLIB_SHM is unset, 0 or 1.
inline bool is_wanted() {
  return switched_on("SHARDLIB_SHM", "1",
                     "write 0 to have ranks of one node communicate over MPI, or 1 for shared memory");
}

/// Sets `node`. All ranks take part. Either all ranks of a node share memory or none does; the reason is printed on
/// stderr.
inline void start() {
  const MPI_Comm comm = mpi::process.node;
  const int size = mpi::process.local_size;
  int place = 0;
  MPI_Comm_rank(comm, &place);
  int wanted = is_wanted() ? 1 : 0;
  mpi::check(MPI_Allreduce(MPI_IN_PLACE, &wanted, 1, MPI_INT, MPI_MIN, comm), "sharing memory", sizeof wanted);
  const bool tries = wanted != 0 && size > 1;

  std::shared_ptr<Arena> arena;
  std::string error;
  const auto attempt = [&](const auto& f) {
    if (!tries || !error.empty()) return;
    try {
      f();
    } catch (const std::exception& e) {
      error = e.what();
    }
  };
  Address mine;
  attempt([&] {
    arena = std::make_shared<Arena>(size);
    mine = arena->address();
    std::byte* const ring = arena->allocate(sizeof(FlightRing));
    if (ring == nullptr) throw Error("out of memory: no room for the flight recorder");
    mine.ring = arena->offset(reinterpret_cast<std::byte*>(new (ring) FlightRing));
  });
  std::vector<Address> addresses(static_cast<std::size_t>(size));
  std::vector<int> ranks(addresses.size());
  const int bytes = static_cast<int>(sizeof mine);
  mpi::check(MPI_Allgather(&mine, bytes, MPI_BYTE, addresses.data(), bytes, MPI_BYTE, comm), "sharing memory",
             sizeof mine);
  mpi::check(MPI_Allgather(&mpi::process.rank, 1, MPI_INT, ranks.data(), 1, MPI_INT, comm), "sharing memory",
             sizeof(int));
  attempt([&] {
    for (int i = 0; i < size; ++i) {
      const Address& address = addresses[static_cast<std::size_t>(i)];
      if (i != place && address.file >= 0) arena->attach(i, address);
    }
  });
  int failed = error.empty() ? size : place;
  mpi::check(MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MIN, comm), "sharing memory", sizeof failed);
  if (failed == place) {
    std::fputs(("note: the ranks of this node cannot share memory (" + error +
                "), so they communicate over MPI alone; SHARDLIB_SHM=0 asks for that\n")
                   .c_str(),
               stderr);
  }
  const bool shares = tries && failed == size;
  const int id = shares ? ranks[0] : -1;
  std::vector<int> node_of(static_cast<std::size_t>(mpi::process.size));
  mpi::check(MPI_Allgather(&id, 1, MPI_INT, node_of.data(), 1, MPI_INT, MPI_COMM_WORLD), "sharing memory", sizeof id);
  if (!shares) return;
  std::vector<std::uint64_t> rings;
  for (const Address& address : addresses) rings.push_back(address.ring);
  node = std::make_shared<NodeRanks>(std::move(arena), std::move(ranks), std::move(node_of), std::move(rings));
}

}  // namespace shardlib::detail::shm
