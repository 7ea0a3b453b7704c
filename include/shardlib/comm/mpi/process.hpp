// Starts and stops MPI, and describes this process among those that mpirun started.
#pragma once

#include <mpi.h>

#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/comm/process_file.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/tuning.hpp"

namespace shardlib::detail::mpi {

inline void check(int code, std::string_view op, std::size_t bytes) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(std::string(op) + " of " + std::to_string(bytes) +
              " bytes: MPI reports: " + std::string(text, static_cast<std::size_t>(length)));
}

/// True between MPI_Init and MPI_Finalize.
inline bool running() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

/// The findings of `start`, a communicator for the library's own messages, and the notes of `launch`.
struct Process {
  int rank = 0;
  int size = 1;
  int local_size = 1;  ///< ranks on this node
  int local_rank = 0;  ///< this rank among them
  MPI_Comm control = MPI_COMM_NULL;
  MPI_Comm node = MPI_COMM_NULL;               ///< the ranks on this node
  std::vector<WatchedProcess> neighbors = {};  ///< by rank: the others on this node
  bool idle = false;                           ///< it ran no device in the last launch

  /// Whether the process of a rank has ended. Always false for this rank and for ranks of other nodes.
  [[nodiscard]] bool has_died(int other) const {
    return static_cast<std::size_t>(other) < neighbors.size() && neighbors[static_cast<std::size_t>(other)].has_ended();
  }
};
inline Process process;

/// Watches the other ranks of this node, whether or not they share memory.
inline void watch_neighbors() {
  struct Place {
    std::int64_t rank = 0, process = 0;
    std::uint64_t names = 0;  ///< the PID namespace; numbers of another namespace are meaningless here
  };
  struct stat names {};
  Place mine{process.rank, getpid(), stat("/proc/self/ns/pid", &names) == 0 ? names.st_ino : 0};
  std::vector<Place> places(static_cast<std::size_t>(process.local_size));
  check(MPI_Allgather(&mine, sizeof mine, MPI_BYTE, places.data(), sizeof mine, MPI_BYTE, process.node),
        "watching neighbors", sizeof mine);
  process.neighbors.resize(static_cast<std::size_t>(process.size));
  for (const Place& place : places) {
    if (place.rank != mine.rank && place.names == mine.names)
      process.neighbors[static_cast<std::size_t>(place.rank)] = WatchedProcess(static_cast<pid_t>(place.process));
  }
}

/// Threads call MPI one at a time. The thread that drops the last handle of a device frees its communicators.
inline void check_threads(int provided) {
  if (provided >= MPI_THREAD_SERIALIZED) return;
  const std::string level = provided == MPI_THREAD_SINGLE ? "SINGLE" : "FUNNELED";
  throw Error("MPI runs at thread level " + level +
              ", but devices need MPI_THREAD_SERIALIZED: leave starting MPI to run_program, call MPI_Init_thread with "
              "that level, or use an MPI that was built with threads");
}

/// Makes Open MPI send each piece over TCP eagerly, unless mpirun or the environment sets this. Otherwise it announces
/// a long message first, and the gathers of a layer all complete together with the last one.
inline void send_pieces_at_once() {
  setenv("OMPI_MCA_btl_tcp_eager_limit", std::to_string(Tuning().collective_piece + 4096).c_str(), 0);
}

/// Initializes MPI unless the program has done so. Returns whether `stop` must finalize it.
inline bool start(int* argc, char*** argv) {
  const bool mine = !running();
  int provided = 0;
  if (mine) {
    send_pieces_at_once();
    check(MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread", 0);
  } else {
    check(MPI_Query_thread(&provided), "MPI_Query_thread", 0);
  }
  check_threads(provided);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  check(MPI_Comm_dup(MPI_COMM_WORLD, &process.control), "MPI_Comm_dup", 0);
  MPI_Comm_rank(MPI_COMM_WORLD, &process.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &process.size);
  check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &process.node),
        "MPI_Comm_split_type", 0);
  MPI_Comm_size(process.node, &process.local_size);
  MPI_Comm_rank(process.node, &process.local_rank);
  watch_neighbors();
  return mine;
}

inline void stop(bool mine) {
  if (process.control != MPI_COMM_NULL) MPI_Comm_free(&process.control);
  if (process.node != MPI_COMM_NULL) MPI_Comm_free(&process.node);
  process = {};
  if (mine) MPI_Finalize();
}

/// Ends the whole job.
[[noreturn]] inline void abort(int status) {
  MPI_Abort(MPI_COMM_WORLD, status);
  std::abort();
}

}  // namespace shardlib::detail::mpi
