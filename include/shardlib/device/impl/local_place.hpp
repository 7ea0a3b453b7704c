// Where devices are on their machine, and which of them share a GPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <limits>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/support/error.hpp"
#if defined(SHARDLIB_LAUNCHER_CUDA)
#include "shardlib/memory/gpu.hpp"
#endif
#if defined(SHARDLIB_WITH_MPI)
#include "shardlib/comm/mpi/process.hpp"
#endif

namespace shardlib::detail {

/// The place of a device that is one of `count` threads.
inline LocalPlace place_of_thread(int device, [[maybe_unused]] int count, [[maybe_unused]] DeviceKind kind) {
  LocalPlace place{device, 1};
#if defined(SHARDLIB_LAUNCHER_CUDA)
  if (kind != DeviceKind::gpu) return place;
  const HardwareName mine = gpu_name(device);
  place.sharers = 0;
  for (int other = 0; other < count; ++other) place.sharers += gpu_name(other) == mine ? 1 : 0;
#endif
  return place;
}

#if defined(SHARDLIB_WITH_MPI)
/// The place of this rank. All ranks call it, and those that run no device do not count.
inline LocalPlace place_of_rank([[maybe_unused]] bool runs, [[maybe_unused]] DeviceKind kind) {
  LocalPlace place{mpi::process.local_rank, 1};
#if defined(SHARDLIB_LAUNCHER_CUDA)
  if (kind != DeviceKind::gpu) return place;
  HardwareName mine{};
  std::exception_ptr error;  // thrown after the others have this rank's answer
  try {
    if (runs) mine = gpu_name(place.rank);
  } catch (...) {
    error = std::current_exception();
  }
  std::vector<HardwareName> names(static_cast<std::size_t>(mpi::process.local_size));
  mpi::check(MPI_Allgather(mine.data(), static_cast<int>(mine.size()), MPI_BYTE, names.data(),
                           static_cast<int>(mine.size()), MPI_BYTE, mpi::process.node),
             "sharing GPUs", mine.size());
  if (error) std::rethrow_exception(error);
  place.sharers = static_cast<int>(std::ranges::count(names, mine));
  if (runs) check_sharing(place.rank, place.sharers);
#endif
  return place;
}
#endif

/// The least GPU memory of the devices that this process will run, of `devices` on the mesh, before `launch` makes
/// them. 0 if it is not known: then `launch` throws and says why. Under mpirun all ranks call it.
inline double least_gpu_bytes([[maybe_unused]] int devices) {
  double least = 0;
#if defined(SHARDLIB_LAUNCHER_CUDA)
  least = std::numeric_limits<double>::infinity();
  const auto count = [&](const LocalPlace& place) {
    least = std::min(least, static_cast<double>(gpu_share(place.rank, place.sharers)));
  };
  try {
#if defined(SHARDLIB_WITH_MPI)
    if (mpi::process.control != MPI_COMM_NULL) {
      const bool runs = mpi::process.rank < devices;
      const LocalPlace place = place_of_rank(runs, DeviceKind::gpu);
      if (runs) count(place);
      return least;
    }
#endif
    for (int i = 0; i < devices; ++i) count(place_of_thread(i, devices, DeviceKind::gpu));
  } catch (const Error&) {
    return 0;
  }
#endif
  return least;
}

}  // namespace shardlib::detail
