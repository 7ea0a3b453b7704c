// The parts of launch and run_program: devices on threads, and the end of a program, which is the same on all ranks.
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/device/mesh_axes.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib {

struct LaunchOptions;

namespace detail {

/// How a program, or a part of it that all ranks run, has ended on this rank.
struct Ending {
  int status = 0;
  std::string message = {};  ///< empty when nothing was thrown
  bool idle = false;         ///< ran no device in the last launch, so it does not contradict others' failures
};

/// Status 2 for UsageError, 1 for all else.
[[nodiscard]] SHARDLIB_INLINE Ending ending_of(const std::exception_ptr& error);

/// This process's number among those that mpirun or srun started, also before MPI starts. Empty if there are none.
[[nodiscard]] SHARDLIB_INLINE std::string_view launcher_rank();

/// Meets the other ranks and returns what to print here: rank 0 alone speaks when all have the same error. If only some
/// have failed, ends the whole job with their message, as the others may wait for them forever. Where MPI has not
/// started, ranks cannot meet: an error of usage is taken to be the same on all.
[[nodiscard]] SHARDLIB_INLINE std::string agreed_message(const Ending& ending);

/// The message without "(device 1 (d=1) of mesh d=2)". The same error differs between devices in this part alone.
[[nodiscard]] SHARDLIB_INLINE std::string without_device(const std::string& message);

/// Prints the message to stderr, after everything that stdout has received.
SHARDLIB_INLINE void print_error(const std::string& message);

/// CPU threads for each of `devices` devices on this node.
[[nodiscard]] SHARDLIB_INLINE int threads_per_device(int devices);

/// The body on one device, whose local state ends with it.
SHARDLIB_INLINE void run_device(const DevicePtr& device, int threads,
                                const std::function<void(const DevicePtr&)>& body);

/// The body on the devices of a mesh, each a thread of this process with `options.threads` CPU threads. Where a device
/// has waited too long and another one does not end, it prints the error and ends the process with status 1.
SHARDLIB_INLINE void launch_threads(const std::vector<AxisSize>& mesh,
                                    const std::function<void(const DevicePtr&)>& body, const LaunchOptions& options);

}  // namespace detail
}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/device/impl/launch.hpp"
#endif
