// Definitions of launch.hpp.
#pragma once

#include "shardlib/device/launch.hpp"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <future>
#include <initializer_list>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "shardlib/comm/recordings.hpp"
#include "shardlib/comm/threads.hpp"
#include "shardlib/device/impl/launch_parts.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/kokkos.hpp"
#if defined(SHARDLIB_WITH_MPI)
#include "shardlib/comm/mpi/backend.hpp"
#include "shardlib/comm/mpi/deadline.hpp"
#include "shardlib/comm/mpi/process.hpp"
#include "shardlib/comm/mpi/watch.hpp"
#include "shardlib/comm/shm/node.hpp"
#endif

/// OpenMP's thread count is per thread. Weak, and under a name of our own: there may be no OpenMP in the program, and
/// <omp.h> declares it differently.
extern "C" void shardlib_omp_set_num_threads(int) __asm__("omp_set_num_threads") __attribute__((weak));

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

SHARDLIB_INLINE int threads_per_device(int devices) {
  cpu_set_t set;
  const bool known = sched_getaffinity(0, sizeof set, &set) == 0;
  const int online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  const int mine = known ? CPU_COUNT(&set) : online;
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

SHARDLIB_INLINE void run_device(const std::shared_ptr<Device>& device, int threads, const DeviceBody& body) {
  set_threads(threads);
  try {
    body(device);
  } catch (...) {
    device->clear_local();
    throw;
  }
  device->clear_local();
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
  if (world_rank() >= count) return;
  const int threads = options.threads > 0 ? options.threads : threads_per_device(mpi::process.local_size);
  const auto world = std::make_shared<MpiWorld>(number, count, options.tuning, recorder);
  try {
    run_device(std::make_shared<Device>(mesh, world_rank(), world, threads, options.tuning), threads, body);
    world->leave();
  } catch (...) {
    world->fail();
    throw;
  }
}
#endif

/// An environment variable for ranks changes nothing without mpirun, but a wrong value is an error there too. Under
/// mpirun `shm::start` reads it.
inline void check_settings() {
#if defined(SHARDLIB_WITH_MPI)
  static_cast<void>(shm::is_wanted());
  static_cast<void>(mpi::start_timeout());
#endif
}

inline void print_error(const std::string& message) {
  std::cout.flush();
  std::fflush(stdout);
  std::fputs(("error: " + message + "\n").c_str(), stderr);
  std::fflush(stderr);
}

SHARDLIB_INLINE void launch_threads(const std::vector<AxisSize>& mesh, const DeviceBody& body, int count, int threads,
                                    const Tuning& tuning, const Watchdog& watchdog) {
  const auto world = std::make_shared<ThreadWorld>(count, tuning, watchdog);
  struct Result {
    std::exception_ptr error;
    bool aborted = false;
  };
  std::vector<Result> results(static_cast<std::size_t>(count));
  std::vector<std::thread> devices;
  devices.reserve(results.size());
  // No device begins before all have a thread: what one allocates may be what another's stack needed.
  std::promise<bool> all_started;
  const std::shared_future<bool> go = all_started.get_future().share();
  std::mutex mutex;
  std::condition_variable changed;
  int ended = 0;  // guarded by the mutex, as the results are
  const auto run = [&, go](int i) {
    if (!go.get()) return;
    Result result;
    try {
      run_device(std::make_shared<Device>(mesh, i, world, 1, tuning), threads, body);
      world->finish(i);
    } catch (const Aborted&) {
      result = {std::current_exception(), true};
    } catch (...) {
      result = {std::current_exception(), false};
    }
    if (result.error) world->abort();
    const std::lock_guard lock(mutex);
    results[static_cast<std::size_t>(i)] = std::move(result);
    ++ended;
    changed.notify_all();
  };
  // The error of the lowest device that failed by itself, or else of the lowest that failed with another.
  const auto first_error = [&]() -> std::exception_ptr {
    for (const bool aborted : {false, true})
      for (const Result& result : results)
        if (result.error && result.aborted == aborted) return result.error;
    return nullptr;
  };
  bool started = true;
  try {
    for (int i = 0; i < count; ++i) devices.emplace_back(run, i);
  } catch (const std::exception&) {
    started = false;
  }
  all_started.set_value(started);
  if (started) {
    const auto all_ended = [&] { return ended == count; };
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return all_ended() || (ended > 0 && world->timed_out()); });
    // A device that is stuck outside of communication never ends, and there is no way to end its thread alone.
    if (!changed.wait_for(lock, 5 * tuning.patience, all_ended)) {
      print_error(ending_of(first_error()).message);
      std::_Exit(1);
    }
  }
  for (std::thread& device : devices) device.join();
  if (!started) {
    throw UsageError("mesh " + to_string(mesh) + ": the system allows no more than " + std::to_string(devices.size()) +
                     " threads, one for each device: choose a smaller mesh");
  }
  if (const std::exception_ptr error = first_error()) std::rethrow_exception(error);
}

}  // namespace detail

SHARDLIB_INLINE void launch(const std::vector<AxisSize>& mesh, const DeviceBody& body, LaunchOptions options) {
  const int count = device_count(mesh);
  if (options.threads < 0) throw UsageError("launch: threads must be positive, or 0 for a share of the cores");
#if defined(SHARDLIB_WITH_MPI)
  if (under_mpi()) return detail::launch_rank(mesh, body, options);
#endif
  detail::check_settings();
  const int threads = options.threads > 0 ? options.threads : detail::threads_per_device(count);
  if (count == 1) {
    detail::run_device(std::make_shared<Device>(mesh, 0, nullptr, threads, options.tuning), threads, body);
  } else {
    detail::launch_threads(mesh, body, count, threads, options.tuning, options.watchdog);
  }
}

namespace detail {

SHARDLIB_INLINE Ending ending_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const UsageError& e) {
    return {2, e.what()};
  } catch (const std::exception& e) {
    return {1, e.what()};
  } catch (...) {
    return {1, "unknown exception"};
  }
}

SHARDLIB_INLINE std::string without_device(const std::string& message) {
  const std::size_t begin = message.find(" (device ");
  const std::size_t mesh = begin == std::string::npos ? begin : message.find(" of mesh ", begin);
  const std::size_t end = mesh == std::string::npos ? mesh : message.find(')', mesh);
  return end == std::string::npos ? message : message.substr(0, begin) + message.substr(end + 1);
}

SHARDLIB_INLINE std::string settle(const Ending& ending) {
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
#endif
  return ending.message;
}

/// Where 0, 1 or 2 are closed, files opened later would take their place and receive what the program prints. Opened
/// for the wrong direction, so that using them fails as before.
inline void occupy_standard_streams() {
  for (const int stream : {0, 1, 2}) {
    if (fcntl(stream, F_GETFD) != -1 || errno != EBADF) continue;
    const int opened = open("/dev/null", stream == 0 ? O_WRONLY : O_RDONLY);
    if (opened != -1 && opened != stream) close(opened);
  }
}

/// Set when the reader of standard output has left, as in `| head`.
inline volatile std::sig_atomic_t reader_left = 0;

/// A reader of standard output that leaves does not end the program: what is printed later goes nowhere. A file that
/// reaches the limit of its size (ulimit -f) is an error of the write, not a signal.
inline void keep_running_without_reader() {
  if (std::signal(SIGPIPE, SIG_IGN) == SIG_DFL) {
    std::signal(SIGPIPE, [](int) {
      const int before = errno;
      pollfd output{STDOUT_FILENO, POLLOUT, 0};
      if (poll(&output, 1, 0) == 1 && (output.revents & POLLERR) != 0) {
        const int nowhere = open("/dev/null", O_WRONLY);
        if (nowhere >= 0 && dup2(nowhere, STDOUT_FILENO) >= 0) reader_left = 1;
        if (nowhere >= 0) close(nowhere);
      }
      errno = before;
    });
  }
  std::signal(SIGXFSZ, SIG_IGN);
}

/// Why standard output did not accept everything that was printed; empty if it did. A reader that left early is no
/// error.
inline std::string output_error() {
  if (reader_left != 0) return {};
  errno = 0;
  std::cout.flush();
  const bool failed = std::fflush(stdout) != 0 || std::ferror(stdout) != 0 || !std::cout;
  if (!failed || errno == EPIPE) return {};
  return "cannot write to standard output" + (errno == 0 ? std::string() : ": " + std::string(std::strerror(errno)));
}

/// Without MPI, copies that mpirun started would all do the same work and overwrite each other's files.
inline void refuse_copies() {
#if !defined(SHARDLIB_WITH_MPI)
  const std::string_view copies = env({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"});
  if (copies.empty() || copies == "1") return;
  // Without a message the other copies stay silent.
  if (env({"OMPI_COMM_WORLD_RANK", "PMI_RANK"}) != "0") throw UsageError("");
  throw UsageError("mpirun started " + std::string(copies) +
                   " ranks, but this program was built without MPI: start it without mpirun, or build it with "
                   "SHARDLIB_WITH_MPI");
#endif
}

}  // namespace detail

SHARDLIB_INLINE int run_program([[maybe_unused]] int argc, [[maybe_unused]] char** argv,
                                const std::function<int()>& program) {
  detail::occupy_standard_streams();
  detail::keep_running_without_reader();
  bool finalize_kokkos = false;
  detail::Ending ending;
#if defined(SHARDLIB_WITH_MPI)
  bool finalize_mpi = false;
#endif
  try {
    detail::refuse_copies();
#if defined(SHARDLIB_WITH_MPI)
    if (under_mpi()) {
      const detail::mpi::Deadline deadline("the start of MPI");
      finalize_mpi = detail::mpi::start(&argc, &argv);
      detail::shm::start();
    }
#endif
    if (!under_mpi()) detail::check_settings();
    if (!Kokkos::is_initialized()) {
      Kokkos::initialize();  // its options belong in its environment variables: argv is the program's
      finalize_kokkos = true;
    }
    ending.status = program();
  } catch (...) {
    ending = detail::ending_of(std::current_exception());
  }
  std::string message;
  {
#if defined(SHARDLIB_WITH_MPI)
    std::optional<detail::mpi::Deadline> deadline;
    if (finalize_mpi) deadline.emplace("the end of the program");
#endif
    message = detail::settle(ending);
  }
  if (!message.empty()) detail::print_error(message);
  // After the ranks have met: one of them alone may fail here, and none waits for it any more.
  if (const std::string output = detail::output_error(); !output.empty() && ending.status == 0) {
    detail::print_error(output);
    ending.status = 1;
  }
  if (finalize_kokkos) Kokkos::finalize();
#if defined(SHARDLIB_WITH_MPI)
  detail::shm::node.reset();
  if (finalize_mpi) {
    const detail::mpi::Deadline deadline("the end of MPI");
    detail::mpi::stop(true);
  } else {
    detail::mpi::stop(false);
  }
#endif
  return ending.status;
}

}  // namespace shardlib
