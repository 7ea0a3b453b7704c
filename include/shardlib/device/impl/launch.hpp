// Definitions of launch.hpp.
#pragma once

#include "shardlib/device/launch.hpp"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <future>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>

#include "shardlib/comm/nccl.hpp"
#include "shardlib/comm/recordings.hpp"
#include "shardlib/comm/threads.hpp"
#include "shardlib/device/impl/launch_parts.hpp"
#include "shardlib/device/impl/local_place.hpp"
#include "shardlib/device/impl/mpi_session.hpp"
#include "shardlib/device/impl/standard_streams.hpp"
#include "shardlib/memory/system.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/kokkos.hpp"
#include "shardlib/support/openmp.hpp"
#ifndef SHARDLIB_COMPILED
#include "shardlib/device/impl/ending.hpp"
#endif
#if defined(SHARDLIB_LAUNCHER_CUDA)
#include "shardlib/memory/gpu.hpp"
#endif
#if defined(SHARDLIB_WITH_MPI)
#include "shardlib/comm/mpi/backend.hpp"
#include "shardlib/comm/mpi/deadline.hpp"
#include "shardlib/comm/mpi/process.hpp"
#include "shardlib/comm/mpi/watch.hpp"
#include "shardlib/comm/shm/node.hpp"
#endif

namespace shardlib {

namespace detail {

/// The first of the environment variables that is set, or an empty text.
inline std::string_view env(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (const char* value = std::getenv(name)) return value;
  }
  return {};
}

inline bool started_by_mpi() {
  const std::string_view slurm = env({"SLURM_MPI_TYPE"});
  return !env({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"}).empty() ||
         (!env({"SLURM_PROCID"}).empty() && !slurm.empty() && slurm != "none");
}

SHARDLIB_INLINE std::string_view launcher_rank() {
  return env({"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"});
}

SHARDLIB_INLINE int threads_per_device(int devices) {
  cpu_set_t set;
  const int online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  const int mine = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : online;
  // Devices in one process share its cores; mpirun may have bound this rank to its share already.
#if defined(SHARDLIB_WITH_MPI)
  if (started_by_mpi()) return std::max(1, std::min(mine, online / devices));
#endif
  return std::max(1, mine / devices);
}

inline void set_threads(int threads) {
  if (shardlib_omp_set_num_threads != nullptr) shardlib_omp_set_num_threads(threads);
#if defined(SHARDLIB_WITH_OPENMP)
  // The device's threads are made here, so that they take no signals: no handler may run inside a GEMM of oneDNN 2.6.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::atomic<int> made = 0;
#pragma omp parallel num_threads(threads)
  ++made;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
}

}  // namespace detail

SHARDLIB_INLINE bool under_mpi() {
#if defined(SHARDLIB_WITH_MPI)
  return detail::started_by_mpi();
#else
  return false;
#endif
}

SHARDLIB_INLINE int world_rank() {
#if defined(SHARDLIB_WITH_MPI)
  return detail::mpi::process.rank;
#else
  return 0;
#endif
}

SHARDLIB_INLINE int world_size() {
#if defined(SHARDLIB_WITH_MPI)
  return detail::mpi::process.size;
#else
  return 1;
#endif
}

namespace detail {

/// Says on the first device's console, once in the program, which GPUs communicate through host memory.
inline void note_host_memory(Device& device) {
  Region* const memory = device.pool()->device_memory();
  if (device.size() == 1 || memory == nullptr) return;
  if (memory->gpu() == nullptr && device.tuning().nccl == nullptr) return;
  const std::string text =
      nccl::note(device.everybody(), {.library = nccl::library(device.tuning().nccl), .pool = device.pool()});
  static std::atomic<bool> noted = false;
  if (!text.empty() && !noted.exchange(true)) std::fputs(text.c_str(), stderr);
}

SHARDLIB_INLINE void run_device(const DevicePtr& device, int threads, const DeviceBody& body) {
  set_threads(threads);
  try {
    note_host_memory(*device);
    body(device);
    device->exec().synchronize();  // errors of kernels whose results nobody has read
  } catch (...) {
    device->end();
    throw;
  }
  device->end();
}

#if defined(SHARDLIB_WITH_MPI)
inline void launch_rank(const std::vector<AxisSize>& mesh, const DeviceBody& body, const LaunchOptions& options) {
  FlightRing* const ring = shm::node ? shm::node->ring(world_rank()) : nullptr;
  const auto recorder = std::make_shared<FlightRecorder>(world_rank(), options.watchdog, ring);
  const std::uint64_t number = mpi::watch.begin_launch(recorder);
  const int count = device_count(mesh);
  const std::string text = mesh.empty() ? "the mesh without axes" : "mesh " + to_string(mesh);
  if (mpi::process.control == MPI_COMM_NULL) throw Error("launch under mpirun: call it inside run_program");
  if (count > world_size() || (count < world_size() && !options.allow_idle_ranks)) {
    throw UsageError(text + " has " + std::to_string(count) + (count == 1 ? " device" : " devices") +
                     ", but mpirun started " + std::to_string(world_size()) + (world_size() == 1 ? " rank" : " ranks") +
                     ": start " + std::to_string(count) + " or choose another mesh");
  }
  const LocalPlace place = place_of_rank(world_rank() < count, options.kind);
  mpi::process.idle = world_rank() >= count;
  if (mpi::process.idle) return;
  const int threads = options.threads > 0 ? options.threads : threads_per_device(mpi::process.local_size);
  const auto world = std::make_shared<MpiWorld>(number, count, options.tuning, recorder);
  // The device must outlive `leave`, which completes requests that the body has abandoned and so uses the device's
  // communicators. After an error it must outlive `fail`, which keeps the communicators from being freed.
  DevicePtr device;
  try {
    device = DevicePtr::make(mesh, world_rank(), world, threads, options.tuning, options.kind, place, options.sums);
    run_device(device, threads, body);
    world->leave();
  } catch (...) {
    world->fail();
    throw;
  }
}
#endif

/// Checks the environment variables. A wrong value is an error even if this run does not use the variable, such as one
/// for a GPU or for ranks.
inline void check_settings() {
#if defined(SHARDLIB_LAUNCHER_CUDA)
  static_cast<void>(gpu_part());
#endif
  static_cast<void>(nccl::is_wanted());
#if defined(SHARDLIB_WITH_MPI)
  static_cast<void>(shm::is_wanted());
  static_cast<void>(mpi::start_timeout());
#endif
}

/// How the devices of this process, which are its threads, have ended.
class DeviceEndings {
 public:
  explicit DeviceEndings(int devices) : endings_(static_cast<std::size_t>(devices)) {}
  /// Notes that a device has ended, with its error if it has one. `aborted`: it ended because another device failed.
  void add(int device, const std::exception_ptr& error, bool aborted) {
    const std::lock_guard lock(mutex_);
    endings_[static_cast<std::size_t>(device)] = {error, aborted};
    ++ended_;
    changed_.notify_all();
  }
  /// Waits for all devices. False: one has timed out, and another one does not end within `patience` after that.
  [[nodiscard]] bool wait(const ThreadWorld& world, std::chrono::milliseconds patience) {
    const auto all_ended = [&] { return ended_ == endings_.size(); };
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return all_ended() || (ended_ > 0 && world.timed_out()); });
    return changed_.wait_for(lock, patience, all_ended);
  }
  /// The error of the lowest device that failed by itself, or else of the lowest that failed with another.
  [[nodiscard]] std::exception_ptr first_error() {
    const std::lock_guard lock(mutex_);
    for (const bool aborted : {false, true})
      for (const DeviceEnding& ending : endings_)
        if (ending.error && ending.aborted == aborted) return ending.error;
    return nullptr;
  }

 private:
  struct DeviceEnding {
    std::exception_ptr error;
    bool aborted = false;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<DeviceEnding> endings_;
  std::size_t ended_ = 0;
};

SHARDLIB_INLINE void launch_threads(const std::vector<AxisSize>& mesh, const DeviceBody& body,
                                    const LaunchOptions& options) {
  const int count = device_count(mesh);
  constexpr std::size_t device_bytes = std::size_t{1} << 20;  // stack, pool and groups, besides its tensors
  if (const std::size_t left = left_bytes(); left / device_bytes < static_cast<std::size_t>(count))
    throw UsageError("mesh " + to_string(mesh) + ": " + std::to_string(count) + " devices as threads take about " +
                     std::to_string(count) + " MB for themselves, but " + std::to_string(left / device_bytes) +
                     " MB of memory are left: choose a smaller mesh");
  const auto world = std::make_shared<ThreadWorld>(count, options.tuning, options.watchdog);
  DeviceEndings endings(count);
  std::vector<std::thread> devices;
  devices.reserve(static_cast<std::size_t>(count));
  // No device begins before all have a thread, because a device might allocate the memory that the stack of another
  // thread needs.
  std::promise<bool> all_started;
  const std::shared_future<bool> go = all_started.get_future().share();
  const auto run = [&, go](int i) {
    if (!go.get()) return;
    std::exception_ptr error;
    bool aborted = false;
    // The device must outlive `finish` and `abort`, which tell the others that it has ended. The destructors of its
    // groups may wait for the others.
    DevicePtr device;
    try {
      device = DevicePtr::make(mesh, i, world, options.threads, options.tuning, options.kind,
                               place_of_thread(i, count, options.kind), options.sums);
      run_device(device, options.threads, body);
      world->finish(i);
    } catch (const Aborted&) {
      error = std::current_exception(), aborted = true;
    } catch (...) {
      error = std::current_exception();
    }
    if (error) world->abort();
    device = {};
    endings.add(i, error, aborted);
  };
  bool started = true;
  try {
    for (int i = 0; i < count; ++i) devices.emplace_back(run, i);
  } catch (const std::exception&) {
    started = false;
  }
  all_started.set_value(started);
  // A device that is stuck outside of communication never ends, and there is no way to end its thread alone.
  if (started && !endings.wait(*world, 5 * options.tuning.patience)) {
    print_error(ending_of(endings.first_error()).message);
    std::_Exit(1);
  }
  for (std::thread& device : devices) device.join();
  if (!started) {
    throw UsageError("mesh " + to_string(mesh) + ": the system allows no more than " + std::to_string(devices.size()) +
                     " threads, one for each device: choose a smaller mesh");
  }
  if (const std::exception_ptr error = endings.first_error()) std::rethrow_exception(error);
}

}  // namespace detail

SHARDLIB_INLINE void launch(const std::vector<AxisSize>& mesh, const DeviceBody& body, LaunchOptions options) {
  const int count = device_count(mesh);
  if (options.threads < 0) throw UsageError("launch: threads must be positive, or 0 for a share of the cores");
  if (options.sums == GpuSums::nccl && options.kind != DeviceKind::gpu && options.tuning.nccl == nullptr)
    throw UsageError("--sums nccl: only GPUs have NCCL: add --device gpu, or leave --sums out");
  // The thread that runs a kernel opens the memory for itself.
  if (options.kind != DeviceKind::cpu) options.threads = 1;
  if (options.watchdog.timeout.count() < 0)
    throw UsageError("launch: the watchdog's timeout must be positive, or 0 to wait forever");
  if (options.tuning.patience.count() <= 0) throw UsageError("launch: the tuning's patience must be positive");
  constexpr std::chrono::seconds longest{1'000'000'000};  // a clock counts nanoseconds, in 64 bits
  options.watchdog.timeout = std::min<std::chrono::milliseconds>(options.watchdog.timeout, longest);
  const DeviceBody planned = [&](const DevicePtr& device) {
    device->pool()->set_planned_peak(options.planned_peak);
    body(device);
  };
#if defined(SHARDLIB_WITH_MPI)
  if (under_mpi()) return detail::launch_rank(mesh, planned, options);
#endif
  detail::check_settings();
  if (options.threads == 0) options.threads = detail::threads_per_device(count);
  if (count > 1) return detail::launch_threads(mesh, planned, options);
  detail::run_device(DevicePtr::make(mesh, 0, nullptr, options.threads, options.tuning, options.kind), options.threads,
                     planned);
}

SHARDLIB_INLINE void launch_on_meshes(const std::vector<std::string>& axes, int devices, const DeviceBody& body,
                                      LaunchOptions options) {
  if (under_mpi()) devices = std::min(devices, world_size());
  options.allow_idle_ranks = true;
  std::vector<AxisSize> mesh;
  for (const std::string& axis : axes) mesh.push_back({axis, 1});
  for (std::size_t next = 1; next > 0;) {
    launch(mesh, body, options);
    // The next mesh: doubles the last axis that can be doubled, and resets the axes behind it to size 1.
    for (next = mesh.size(); next > 0; --next) {
      mesh[next - 1].size *= 2;
      if (device_count(mesh) <= devices) break;
      mesh[next - 1].size = 1;
    }
  }
}

namespace detail {

/// Throws if mpirun or srun has started several processes of a program without MPI. They would all do the same work and
/// overwrite each other's files.
inline void refuse_copies() {
#if !defined(SHARDLIB_WITH_MPI)
  if (!started_by_mpi()) return;
  const std::string_view by_mpirun = env({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"});
  // SLURM_NTASKS is no sign of copies: a job's script has it too, and may start the program once, without srun.
  const std::string_view copies = by_mpirun.empty() ? env({"SLURM_STEP_NUM_TASKS"}) : by_mpirun;
  if (copies.empty() || copies == "1") return;
  // Without a message the other copies stay silent.
  if (launcher_rank() != "0") throw UsageError("");
  const std::string launcher = by_mpirun.empty() ? "srun" : "mpirun";
  throw UsageError(launcher + " started " + std::string(copies) +
                   " ranks, but this program was built without MPI: start it without " + launcher +
                   (by_mpirun.empty() ? " or with --mpi=none" : "") + ", or build it with SHARDLIB_WITH_MPI");
#endif
}

}  // namespace detail

SHARDLIB_INLINE int run_program(int argc, char** argv, const std::function<int()>& program) {
  detail::occupy_standard_streams();
  detail::keep_running_without_reader();
  bool has_started_kokkos = false;
  detail::MpiSession mpi;
  detail::Ending ending;
  try {
    detail::refuse_copies();
    if (under_mpi()) mpi.start(&argc, &argv);
    detail::check_settings();
    has_started_kokkos = detail::initialize_kokkos();
    ending.status = program();
    ending.idle = mpi.is_idle();
  } catch (...) {
    ending = detail::ending_of(std::current_exception());
  }
  const std::string message = mpi.limited("the end of the program", [&] { return detail::agreed_message(ending); });
  // An idle rank prints nothing, because the other ranks have printed its message.
  if (!message.empty() && !ending.idle) detail::print_error(message);
  // This comes after the ranks have met, because one rank may fail here alone and no other rank waits for it any more.
  if (const std::string output = detail::output_error(); !output.empty() && ending.status == 0) {
    detail::print_error(output);
    ending.status = 1;
  }
  if (has_started_kokkos) detail::finalize_kokkos();
  mpi.stop();
  return ending.status;
}

}  // namespace shardlib
