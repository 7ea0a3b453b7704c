// MPI from the start of a program to its end. In a build without MPI, the same functions do nothing.
#pragma once

#include <string_view>
#if defined(SHARDLIB_WITH_MPI)
#include <optional>

#include "shardlib/comm/mpi/deadline.hpp"
#include "shardlib/comm/mpi/process.hpp"
#include "shardlib/comm/shm/node.hpp"
#endif

namespace shardlib::detail {

#if defined(SHARDLIB_WITH_MPI)
class MpiSession {
 public:
  /// Starts MPI, unless the program has, and finds the memory that the ranks of a node share.
  void start(int* argc, char*** argv) {
    const mpi::Deadline limit("the start of MPI");
    finalizes_ = mpi::start(argc, argv);
    shm::start();
  }
  /// Whether this rank ran no device in the last launch.
  [[nodiscard]] static bool is_idle() { return mpi::process.idle; }
  /// f(), which waits for other ranks. SHARDLIB_START_TIMEOUT limits it where MPI ends with the program.
  template <class F>
  auto limited(std::string_view what, const F& f) const {
    std::optional<mpi::Deadline> limit;
    if (finalizes_) limit.emplace(what);
    return f();
  }
  void stop() const {
    shm::node.reset();
    limited("the end of MPI", [this] { mpi::stop(finalizes_); });
  }

 private:
  bool finalizes_ = false;
};
#else
struct MpiSession {
  static void start(int* /*argc*/, char*** /*argv*/) {}
  [[nodiscard]] static bool is_idle() { return false; }
  template <class F>
  static auto limited(std::string_view /*what*/, const F& f) {
    return f();
  }
  static void stop() {}
};
#endif

}  // namespace shardlib::detail
