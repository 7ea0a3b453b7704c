// This process among those that mpirun started: starting and stopping MPI, and agreeing on how the program has ended.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>

#include "shardlib/error.hpp"

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

/// What `start` found out and `compare_failures` needs.
struct Process {
  int rank = 0;
  int size = 1;
  int local_size = 1;  ///< ranks on this node
  MPI_Comm control = MPI_COMM_NULL;
};
inline Process process;

/// Initialises MPI unless the program has; returns whether `stop` must finalise it.
inline bool start(int* argc, char*** argv) {
  const bool mine = !running();
  int provided = 0;
  if (mine) check(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread", 0);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  check(MPI_Comm_dup(MPI_COMM_WORLD, &process.control), "MPI_Comm_dup", 0);
  MPI_Comm_rank(MPI_COMM_WORLD, &process.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &process.size);
  MPI_Comm node = MPI_COMM_NULL;
  check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node), "MPI_Comm_split_type", 0);
  MPI_Comm_size(node, &process.local_size);
  MPI_Comm_free(&node);
  return mine;
}

inline void stop(bool mine) {
  if (process.control != MPI_COMM_NULL) MPI_Comm_free(&process.control);
  process = {};
  if (mine) MPI_Finalize();
}

/// Ends the whole job.
[[noreturn]] inline void abort(int status) {
  MPI_Abort(MPI_COMM_WORLD, status);
  std::abort();
}

/// How the ranks' outcomes compare; `some` also when the others do not answer.
enum class Failures { none, all_alike, all, some };
enum class Outcome { success, failure, idle };

/// Meets all ranks. A rank that has failed waits at most two seconds for the others, who may be stuck waiting for it.
inline Failures compare_failures(Outcome outcome, std::uint64_t hash) {
  const bool failed = outcome == Outcome::failure;
  const std::uint64_t mine[4] = {failed ? 1U : 0U, outcome == Outcome::success ? 1U : 0U, failed ? hash : 0,
                                 failed ? ~hash : 0};
  // Static, because after the two seconds MPI still owns it.
  static std::uint64_t all[4];
  static std::uint64_t sent[4];
  std::copy_n(mine, 4, sent);
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Iallreduce(sent, all, 4, MPI_UINT64_T, MPI_MAX, process.control, &request), "compare_failures",
        sizeof sent);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  auto nap = std::chrono::microseconds(1);
  for (int done = 0;;) {
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "compare_failures", sizeof sent);
    if (done != 0) break;
    if (failed && std::chrono::steady_clock::now() > deadline) return Failures::some;
    std::this_thread::sleep_for(nap);
    nap = std::min(2 * nap, std::chrono::microseconds(1000));
  }
  if (all[0] == 0) return Failures::none;
  if (all[1] != 0) return Failures::some;
  return all[2] == ~all[3] ? Failures::all_alike : Failures::all;
}

}  // namespace shardlib::detail::mpi
