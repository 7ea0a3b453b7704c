// Messages that move while the program computes. ctest's mpi_progress_thread runs it with the thread, the others
// without.
#if defined(SHARDLIB_WITH_MPI)
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <string>
#include <thread>

#include "shardlib/comm/mpi/thread.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

TEST_CASE("SHARDLIB_PROGRESS_THREAD is 0 or 1", "[progress]") {
  const char* const variable = detail::mpi::progress_variable;
  {
    const Setting off(variable, "0");
    CHECK(!detail::mpi::wants_progress_thread());
  }
  {
    const Setting on(variable, "1");
    CHECK(detail::mpi::wants_progress_thread());
  }
  const Setting wrong(variable, "");
  std::string message;
  try {
    detail::mpi::wants_progress_thread();
  } catch (const UsageError& e) {
    message = e.what();
  }
  CHECK(message ==
        "SHARDLIB_PROGRESS_THREAD=: write 1 for a thread of each rank that moves its messages, or 0 to move them "
        "between ops");
}

TEST_CASE("what is wrong in a variable for ranks is said without mpirun too", "[progress]") {
  if (under_mpi()) return;
  const auto message_of = [](const auto& f) -> std::string {
    try {
      f();
    } catch (const UsageError& e) {
      return e.what();
    }
    return "no error";
  };
  const auto one = [] { launch({}, [](const std::shared_ptr<Device>&) {}); };
  {
    const Setting wrong(detail::mpi::progress_variable, "2");
    CHECK(message_of(one) ==
          "SHARDLIB_PROGRESS_THREAD=2: write 1 for a thread of each rank that moves its messages, or 0 to move them "
          "between ops");
  }
  {
    const Setting wrong("SHARDLIB_SHM", "no");
    CHECK(message_of(one) ==
          "SHARDLIB_SHM=no: write 0 to have ranks of one node communicate over MPI, or 1 for shared memory");
  }
  const Setting right(detail::mpi::progress_variable, "1");
  CHECK(message_of(one) == "no error");
}

TEST_CASE("the progress thread is there if it was asked for", "[progress]") {
  const char* const value = std::getenv(detail::mpi::progress_variable);
  CHECK(bool(detail::mpi::progress_thread) == (under_mpi() && value != nullptr && std::string(value) == "1"));
}

TEST_CASE("with the progress thread a collective arrives though its rank makes no call", "[progress]") {
  if (!detail::mpi::progress_thread) return;
  on_mesh("d=2", [](const std::shared_ptr<Device>& device) {
    Communicator& all = device->group({"d"});
    const std::size_t bytes = std::size_t{20} << 20;  // more than what MPI may have sent when the call returns
    const auto filled = [&](std::size_t size, char byte) {
      const Buffer buffer = device->pool()->allocate(size);
      std::memset(buffer.data(), byte, size);
      return buffer;
    };
    const char mine = static_cast<char>(1 + all.rank()), other = static_cast<char>(2 - all.rank());
    const Buffer send = filled(bytes, mine), recv = filled(2 * bytes, 0);
    all.barrier();
    Request request = all.all_gather(send, recv);
    const volatile char* const block = recv.as<char>() + static_cast<std::size_t>(1 - all.rank()) * bytes;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    bool arrived = false;
    while (!arrived && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      arrived = std::all_of(block, block + bytes, [&](char byte) { return byte == other; });
    }
    request.wait();
    expect(arrived, "it has not arrived before somebody waited for it");
  });
  SUCCEED();
}
#endif
