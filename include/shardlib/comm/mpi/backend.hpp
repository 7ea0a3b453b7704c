// Devices as MPI ranks, behind the interface Backend: the groups of one launch.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "shardlib/comm/backend.hpp"
#include "shardlib/comm/communicator.hpp"
#include "shardlib/comm/flight_recorder.hpp"
#include "shardlib/comm/mpi/communicator.hpp"
#include "shardlib/comm/mpi/process.hpp"
#include "shardlib/comm/mpi/progress.hpp"
#include "shardlib/comm/mpi/watch.hpp"
#include "shardlib/comm/shm/node.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/support/tuning.hpp"

namespace shardlib {

/// This process as one device of a mesh whose devices are the first ranks of MPI_COMM_WORLD.
class MpiWorld final : public Backend {
 public:
  /// The world of one launch on the ranks 0 to `ranks` - 1.
  MpiWorld(std::uint64_t launch, int ranks, const Tuning& tuning, std::shared_ptr<detail::FlightRecorder> recorder)
      : launch_(launch),
        tuning_(tuning),
        recorder_(std::move(recorder)),
        progress_(std::make_shared<detail::mpi::ProgressEngine>(ranks, recorder_->watchdog().timeout)) {}

  [[nodiscard]] std::shared_ptr<detail::FlightRecorder> recorder(int) override { return recorder_; }

  std::unique_ptr<Communicator> group(const std::vector<int>& members, int rank,
                                      const std::shared_ptr<Pool>& pool) override {
    using detail::mpi::check;
    const auto log =
        std::make_shared<detail::mpi::GroupLog>(detail::mpi::GroupLog{.members = members, .tuning = tuning_});
    // Groups that form at the same time need distinct tags, also from those that a failed launch has left behind: a
    // receive that waits there forever would take the message of a later group.
    const int tag = detail::mpi::Watch::first_free_tag + static_cast<int>((log->key() + launch_) % tags());
    meet(log, rank, tag);
    MPI_Group world = MPI_GROUP_NULL;
    MPI_Group group = MPI_GROUP_NULL;
    MPI_Comm comm = MPI_COMM_NULL;
    check(MPI_Comm_group(MPI_COMM_WORLD, &world), "group", 0);
    check(MPI_Group_incl(world, static_cast<int>(members.size()), members.data(), &group), "group", 0);
    check(MPI_Comm_create_group(MPI_COMM_WORLD, group, tag, &comm), "group", 0);
    MPI_Group_free(&group);
    MPI_Group_free(&world);
    log->collectives = 1;
    logs_.push_back(log);
    if (detail::shm::node) log->shared = detail::shm::node->group(members, rank, comm, pool, tuning_);
    return std::make_unique<MpiCommunicator>(comm, launch_, log, progress_, pool);
  }
  /// The pool is in memory that the node's ranks share, so that peers read tensors in place.
  [[nodiscard]] std::shared_ptr<Pool> make_pool() const override {
    return detail::shm::node ? Pool::make(detail::shm::node->arena()) : Pool::make();
  }
  /// Call it when the body has returned: it completes what nobody waits for, such as sends. The communicators must
  /// still exist, because the second phase of a collective uses them.
  void leave() {
    progress_->drain();
    detail::mpi::watch.end_launch(launch_, logs_);
  }
  /// Call it when the body has failed: it leaves the communicators to MPI_Finalize.
  void fail() {
    progress_->fail();
    detail::mpi::watch.end_launch(launch_, logs_);
  }

 private:
  /// How many tags are free: up to 2^31 - 1 with Open MPI. The standard promises tags up to 32767.
  static std::uint64_t tags() {
    const int* most = nullptr;
    int found = 0;
    detail::mpi::check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&most), &found), "group", 0);
    return static_cast<std::uint64_t>((found != 0 ? *most : 32767) - detail::mpi::Watch::first_free_tag);
  }
  /// Waits until all members have arrived, because MPI_Comm_create_group blocks forever if one has left. After step k
  /// each member knows of 2^k members, through the one 2^k places before it.
  void meet(const std::shared_ptr<detail::mpi::GroupLog>& log, int rank, int tag) {
    const auto& members = log->members;
    const auto n = members.size();
    const auto mine = static_cast<std::size_t>(rank);
    for (std::size_t step = 1; step < n; step *= 2) {
      const auto op = progress_->add({.name = "group", .group = log, .question = {launch_, log->key()}});
      op->recv(detail::mpi::process.control, nullptr, 0, members[(mine + n - step) % n], tag);
      op->send(detail::mpi::process.control, nullptr, 0, members[(mine + step) % n], tag);
      progress_->start(op);
      progress_->wait(*op);
    }
  }

  std::uint64_t launch_;
  Tuning tuning_;
  std::shared_ptr<detail::FlightRecorder> recorder_;
  std::shared_ptr<detail::mpi::ProgressEngine> progress_;
  detail::mpi::Watch::Logs logs_;
};

}  // namespace shardlib
