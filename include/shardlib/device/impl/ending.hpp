// The end of a program: its status and its message, which are the same on all ranks.
#pragma once

#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <iostream>
#include <string>
#include <string_view>
#include <thread>

#include "shardlib/device/impl/launch_parts.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/error_text.hpp"
#include "shardlib/support/inline.hpp"
#if defined(SHARDLIB_WITH_MPI)
#include "shardlib/comm/mpi/process.hpp"
#include "shardlib/comm/mpi/watch.hpp"
#include "shardlib/device/launch.hpp"
#endif

namespace shardlib::detail {

SHARDLIB_INLINE void print_error(const std::string& message) {
  std::cout.flush();
  std::fflush(stdout);
  std::fputs(("error: " + message + "\n").c_str(), stderr);
  std::fflush(stderr);
}

SHARDLIB_INLINE Ending ending_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const UsageError&) {
    return {2, error_text(error)};
  } catch (...) {
    return {1, error_text(error)};
  }
}

SHARDLIB_INLINE std::string without_device(const std::string& message) {
  const std::size_t begin = message.find(" (device ");
  const std::size_t mesh = begin == std::string::npos ? begin : message.find(" of mesh ", begin);
  const std::size_t end = mesh == std::string::npos ? mesh : message.find(')', mesh);
  return end == std::string::npos ? message : message.substr(0, begin) + message.substr(end + 1);
}

SHARDLIB_INLINE std::string agreed_message(const Ending& ending) {
#if defined(SHARDLIB_WITH_MPI)
  if (under_mpi() && mpi::process.control != MPI_COMM_NULL) {
    using mpi::Failures;
    const bool failed = ending.status != 0;
    const auto outcome = failed        ? mpi::RankOutcome::failure
                         : ending.idle ? mpi::RankOutcome::idle
                                       : mpi::RankOutcome::success;
    const Failures failures = mpi::compare_failures(outcome, std::hash<std::string>()(without_device(ending.message)));
    const std::string rank = "rank " + std::to_string(world_rank());
    if (failed && failures == Failures::some) {
      const std::string status = rank + " has returned status " + std::to_string(ending.status);
      print_error(ending.message.empty() ? status : rank + ": " + ending.message);
      mpi::abort(ending.status);
    }
    if (!failed && failures == Failures::one_has_died) {
      print_error(rank +
                  ": another rank of this node has ended without its outcome: its output or the system log may " +
                  "say why; start again, from the last checkpoint if there is one");
      mpi::abort(1);
    }
    if (ending.idle && failures != Failures::none) return "the devices of the mesh have failed";
    if (failures == Failures::all && !ending.message.empty()) return rank + ": " + ending.message;
    return world_rank() == 0 ? ending.message : "";
  }
  const std::string_view rank = under_mpi() ? launcher_rank() : "";
  if (ending.status == 2 && !rank.empty() && rank != "0") {
    std::this_thread::sleep_for(std::chrono::seconds(1));  // mpirun ends all ranks with the first, and rank 0 speaks
    return "";
  }
#endif
  return ending.message;
}

}  // namespace shardlib::detail
