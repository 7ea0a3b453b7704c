// Starting programs: one body per device, on threads or MPI ranks, and one clear message when something fails.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "shardlib/comm/flight_recorder.hpp"
#include "shardlib/device/device.hpp"
#include "shardlib/device/mesh_axes.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/support/tuning.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib {

/// True when the program can use MPI and mpirun or srun has started it.
[[nodiscard]] SHARDLIB_INLINE bool under_mpi();

/// This process's rank among those that mpirun started; 0 without MPI. Call it inside run_program.
[[nodiscard]] SHARDLIB_INLINE int world_rank();

/// The number of processes that mpirun started; 1 without MPI. Call it inside run_program.
[[nodiscard]] SHARDLIB_INLINE int world_size();

/// The options of `launch`.
struct LaunchOptions {
  bool allow_idle_ranks = false;      ///< under mpirun: ranks beyond the mesh do nothing
  int threads = 0;                    ///< CPU threads per device; 0: the cores shared out among the devices
  DeviceKind kind = DeviceKind::cpu;  ///< what runs the kernels
  GpuSums sums = GpuSums::tree;       ///< who adds up the sums of GPUs
  Tuning tuning = {};                 ///< what tests set
  Watchdog watchdog = {};             ///< how long a device may wait for others
  std::size_t planned_peak = 0;       ///< bytes that a device's pool should need, for errors to name; 0: not known
};

/// The program of one device.
using DeviceBody = std::function<void(const DevicePtr&)>;

/// Runs `body` once per device of the mesh and returns when all are done: as this MPI rank under mpirun, otherwise on
/// threads of this process (one device: on the calling thread). Rethrows the lowest failed device's own error.
/// `launch({{"d", 4}}, [](const DevicePtr& device) { ... })`
SHARDLIB_INLINE void launch(const std::vector<AxisSize>& mesh, const DeviceBody& body, LaunchOptions options = {});
/// A compile error for a function that does not take its device.
template <class F>
requires(!std::is_convertible_v<const F&, DeviceBody>) void launch(const std::vector<AxisSize>& /*mesh*/,
                                                                   const F& /*body*/,
                                                                   const LaunchOptions& /*options*/ = {}) {
  static_assert(std::is_convertible_v<const F&, DeviceBody>,
                "launch: the function does not take a device; write launch({{\"d\", 4}}, [](const DevicePtr& device) { "
                "... }), and make the Mesh in it, `const Mesh<\"d\"> mesh(device)`");
}
/// A compile error for a mesh that is a text, a number or a Mesh.
template <class M, class F>
requires(!std::is_convertible_v<const M&, std::vector<AxisSize>>) void launch(const M& /*mesh*/, const F& /*body*/,
                                                                              const LaunchOptions& /*options*/ = {}) {
  static_assert(sizeof(M) == 0,
                "launch: the mesh is not a list of axes with their sizes; write launch({{\"d\", 4}}, body), or "
                "launch(parse_mesh(\"d=4\"), body)");
}
/// The same for one axis without the braces of a list. A template is never preferred to the right form.
template <class Never = void>
void launch(const detail::LoneAxis& axis, const DeviceBody& body, const LaunchOptions& options = {}) {
  launch<detail::LoneAxis, DeviceBody>(axis, body, options);
}

/// Launches `body` on one mesh of these axes after the other, for tests: on all that have at most this number of
/// devices and whose sizes are powers of two, from d=1,t=1 to d=4,t=1. Under mpirun a mesh has at most as many devices
/// as there are ranks, and the other ranks wait. `launch_on_meshes({"d", "t"}, 4, [](const DevicePtr& device) { ... })`
SHARDLIB_INLINE void launch_on_meshes(const std::vector<std::string>& axes, int devices, const DeviceBody& body,
                                      LaunchOptions options = {});

/// The body of main: initializes Kokkos and, under mpirun, MPI; runs `program`; returns its status. An exception
/// becomes one message on stderr and status 2 (UsageError) or 1; so does standard output that cannot be written
/// (status 1). Kokkos takes its settings from its environment variables (KOKKOS_NUM_THREADS, ...). `return
/// run_program(argc, argv, [] { ...; return 0; })`
SHARDLIB_INLINE int run_program(int argc, char** argv, const std::function<int()>& program);
/// A compile error for a function that returns no status, or that takes arguments.
template <class F>
requires(!std::is_convertible_v<const F&, std::function<int()>>) int run_program(int /*argc*/, char** /*argv*/,
                                                                                 const F& /*program*/) {
  static_assert(std::is_convertible_v<const F&, std::function<int()>>,
                "run_program: the program takes nothing and returns the exit status; write return run_program(argc, "
                "argv, [&] { ...; return 0; })");
  return 1;
}

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/device/impl/launch.hpp"
#endif
