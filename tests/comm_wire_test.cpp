// The bytes that collectives hand to MPI, and those that the program counts.
#if defined(SHARDLIB_WITH_MPI)
#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "shardlib/comm/mpi/process.hpp"
#include "shardlib/comm/shm/node.hpp"
#include "shardlib/shardlib.hpp"
#include "shm_nodes.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

std::int64_t sent = 0;
/// Where questions about ranks that let others wait were, and the answers.
std::vector<const void*> questions;

/// Where the last comparison of calls arrives, and whether the next all_to_all finds no memory.
const void* compared = nullptr;
bool memory_ends = false;

std::int64_t size_of(int count, MPI_Datatype type) {
  int size = 0;
  PMPI_Type_size(type, &size);
  return static_cast<std::int64_t>(count) * size;
}

/// A rank's part of a collective that takes a block to each of the others.
void add_to_all_others(int count, MPI_Datatype type, MPI_Comm comm) {
  int ranks = 0;
  PMPI_Comm_size(comm, &ranks);
  sent += (ranks - 1) * size_of(count, type);
}

}  // namespace

// In place of MPI's own, which the standard gives a second name for this purpose.
extern "C" int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
                         MPI_Request* request) {
  // Questions belong to no collective.
  if (comm == shardlib::detail::mpi::process.control)
    questions.push_back(data);
  else
    sent += size_of(count, type);
  return PMPI_Isend(data, count, type, to, tag, comm, request);
}
extern "C" int MPI_Iallgather(const void* from, int count, MPI_Datatype type, void* to, int received,
                              MPI_Datatype to_type, MPI_Comm comm, MPI_Request* request) {
  add_to_all_others(count, type, comm);
  compared = to;
  return PMPI_Iallgather(from, count, type, to, received, to_type, comm, request);
}
extern "C" int MPI_Ialltoall(const void* from, int count, MPI_Datatype type, void* to, int received,
                             MPI_Datatype to_type, MPI_Comm comm, MPI_Request* request) {
  if (memory_ends) throw std::bad_alloc();
  add_to_all_others(count, type, comm);
  return PMPI_Ialltoall(from, count, type, to, received, to_type, comm, request);
}

namespace {

struct Bytes {
  std::int64_t counted, sent;
};
template <class F>
Bytes bytes_of(const DevicePtr& device, const std::string& op, const F& f) {
  auto& counts = detail::program_state(device).counts;
  counts.clear();
  sent = 0;
  f();
  return {counts[op].bytes, sent};
}

/// Before its data, a member of a collective over n devices sends its fingerprint of the call, and the two sums of what
/// it was given, to each of the others.
std::int64_t fingerprints(int n) {
  return (n - 1) * 3 * static_cast<std::int64_t>(sizeof(std::uint64_t));
}

/// The bytes that each collective sends of 512 x 1536 elements, in this order.
template <class D>
std::vector<std::pair<std::string, Bytes>> traffic(const DevicePtr& device) {
  const Mesh<"d"> mesh(device);
  const Sizes sizes{{"A", 512}, {"B", 1536}};
  const auto block = zeros<D, "A/d B">(mesh, sizes);
  const auto part = to_partial<"A B -> A B +d">(zeros<D, "A B">(mesh, sizes));
  std::vector<std::pair<std::string, Bytes>> all;
  const auto add = [&](const std::string& op, const auto& f) { all.emplace_back(op, bytes_of(device, op, f)); };
  add("all_gather", [&] { all_gather<"A/d B -> A B">(block); });
  add("reduce_scatter", [&] { reduce_scatter<"A B +d -> A/d B", f32>(part); });
  add("all_reduce", [&] { all_reduce<"A B +d -> A B", f32>(part); });
  add("all_to_all", [&] { all_to_all<"A/d B -> A B/d">(block); });
  return all;
}

}  // namespace

TEST_CASE("bf16 on the wire is half of f32, to the byte", "[wire]") {
  for (const int n : {2, 4}) {
    on_mesh("d=" + show(n), [&](const DevicePtr& device) {
      const auto single = traffic<f32>(device), half = traffic<bf16>(device);
      expect(single.size() == 4, show(single.size()) + " collectives");
      for (std::size_t i = 0; i < single.size(); ++i) {
        const auto& [op, whole] = single[i];
        const Bytes less = half[i].second;
        // An all_to_all exchanges a block, an all_reduce sums and gathers.
        const std::int64_t tensors = op == "all_reduce" ? 2 * n : op == "all_to_all" ? 1 : n;
        expect(whole.counted == 4 * 512 * 1536 / n * tensors * (n - 1) / n, op + " counts " + show(whole.counted));
        expect(2 * less.counted == whole.counted, op + " of bf16 counts " + show(less.counted));
        // Ranks that share memory send nothing.
        if (!under_mpi() || detail::shm::node) continue;
        expect(whole.sent == whole.counted + fingerprints(n), op + " sends " + show(whole.sent));
        expect(less.sent == less.counted + fingerprints(n), op + " of bf16 sends " + show(less.sent));
      }
    });
  }
}

#if !defined(SHARDLIB_ADDRESS_SANITIZER)  // which does not give freed memory out again soon
TEST_CASE("the questions of a long wait take no more and more memory", "[wire]") {
  if (!under_mpi() || world_size() < 2) return;
  const Temporarily often(tuning.patience, std::chrono::milliseconds(10));
  on_mesh("d=2", [](const DevicePtr& device) {
    Communicator& comm = device->group({"d"});
    const Buffer token = make_buffer<i32>(*device, 1);
    comm.barrier();
    questions.clear();
    while (comm.rank() == 1 && questions.size() < 100) comm.check_failure();  // answers
    if (comm.rank() == 1) comm.send(token, 0);
    if (comm.rank() == 0) comm.recv(token, 1).wait();
    const auto places = std::set(questions.begin(), questions.end()).size();
    expect(questions.size() >= 50 && places < questions.size() / 4,
           show(questions.size()) + " messages in " + show(places) + " places");
  });
}

TEST_CASE("memory that MPI may still write to stays when a collective cannot start", "[wire]") {
  if (!under_mpi() || !detail::shm::node || world_size() < 2) return;
  const Nodes apart(std::vector<int>(static_cast<std::size_t>(world_size()), -1));  // which compare calls over MPI
  on_mesh("d=2", [](const DevicePtr& device) {
    const Buffer sent = make_buffer<i32>(*device, 2), received = make_buffer<i32>(*device, 2);
    {
      const Temporarily ends(memory_ends, true);
      CHECK_THROWS_AS(device->group({"d"}).all_to_all(sent, received), std::bad_alloc);
    }
    std::vector<std::vector<std::uint64_t>> others;
    for (int i = 0; i < 100; ++i) expect(others.emplace_back(2).data() != compared, "it is in use");
  });
}
#endif

TEST_CASE("two ranks on each of two nodes send a block, or a sum, to the other node once", "[wire]") {
  if (!under_mpi() || !detail::shm::node || world_size() < 4) return;
  const Nodes spread({0, 0, 1, 1});
  std::vector<std::string> measured;
  const bool ran = on_mesh("d=4", [&](const DevicePtr& device) {
    for (const auto& [op, bytes] : traffic<f32>(device)) {
      if (op != "all_gather" && op != "reduce_scatter") continue;
      // Each rank sends one block, and not the three that are counted.
      const std::int64_t block = 4 * 512 * 1536 / 4;
      expect(bytes.counted == 3 * block && bytes.sent == block + fingerprints(4),
             op + " sends " + show(bytes.sent) + " of " + show(block));
      measured.push_back(op);
    }
  });
  CHECK(ran);
  if (world_rank() < 4) CHECK(measured == std::vector<std::string>{"all_gather", "reduce_scatter"});
}
#endif
