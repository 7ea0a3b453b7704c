// Ranks of one node share arenas and groups in them, and get the bits of MPI.
#if defined(SHARDLIB_WITH_MPI)
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "shardlib/comm/shm/arena.hpp"
#include "shardlib/comm/shm/group.hpp"
#include "shm_nodes.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;
using detail::shm::Arena;
using detail::shm::Group;

namespace {

/// The bits of every collective's result, one after the other.
std::vector<std::uint32_t> results(Device& device, std::size_t block) {
  Communicator& comm = device.group({"d"});
  const auto n = static_cast<std::size_t>(comm.size());
  std::vector<std::uint32_t> bits;
  const auto add = [&](const Buffer& buffer) {
    for (const std::uint32_t v : values_of<std::uint32_t>(buffer)) bits.push_back(v);
  };
  const Buffer small = make_buffer(device, rough_values(comm.rank(), block));
  const Buffer whole = make_buffer(device, rough_values(comm.rank() + 100, n * block));
  const Buffer small_out = make_buffer<float>(device, block);
  const Buffer whole_out = make_buffer<float>(device, n * block);
  comm.all_gather(small, whole_out).wait();
  add(whole_out);
  comm.all_to_all(whole, whole_out).wait();
  add(whole_out);
  comm.all_reduce(whole, whole_out, DType::f32, Reduction::sum).wait();
  add(whole_out);
  comm.reduce_scatter(whole, small_out, DType::f32, Reduction::sum).wait();
  add(small_out);
  comm.all_reduce(small, small_out, DType::f32, Reduction::max).wait();
  add(small_out);
  return bits;
}

}  // namespace

TEST_CASE("an arena gives out what is free, and only that", "[shm]") {
  Arena arena(1 << 16);  // for so many ranks, one of 512 MB: no more than a machine has left
  std::mt19937 random(5);
  std::map<std::byte*, std::size_t> held;
  for (int turn = 0; turn < 3000; ++turn) {
    if (held.size() > 40 || (turn > 2000 && !held.empty())) {
      const auto it = std::next(held.begin(), static_cast<std::ptrdiff_t>(random() % held.size()));
      CHECK(static_cast<unsigned char>(it->first[0]) == it->second % 251);
      CHECK(static_cast<unsigned char>(it->first[it->second - 1]) == it->second % 251);
      arena.free(it->first, it->second);
      held.erase(it);
      continue;
    }
    const std::size_t bytes = random() % 3 == 0 ? 65000 + random() % 200000 : 1 + random() % 3000;
    std::byte* const data = arena.allocate(bytes);
    REQUIRE(data != nullptr);
    REQUIRE(arena.contains(data, bytes));
    REQUIRE(reinterpret_cast<std::uintptr_t>(data) % 64 == 0);
    const auto after = held.lower_bound(data);
    if (after != held.end()) REQUIRE(data + bytes <= after->first);
    if (after != held.begin()) REQUIRE(std::prev(after)->first + std::prev(after)->second <= data);
    std::memset(data, static_cast<int>(bytes % 251), bytes);
    held.emplace(data, bytes);
  }
  CHECK(held.empty());
  // All of it has grown together again.
  const std::size_t whole = arena.address().bytes - 4096 - 64;  // a block may have a guard of 64 bytes behind it
  std::byte* const all = arena.allocate(whole);
  REQUIRE(all != nullptr);
  CHECK(arena.allocate(65) == nullptr);
  arena.free(all, whole);
  // The key is not what anybody gets.
  CHECK(arena.offset(arena.allocate(64)) >= sizeof(std::uint64_t));
}

TEST_CASE("an arena gives its pages back", "[shm]") {
  Arena arena(1);
  const std::size_t bytes = std::size_t{8} << 20;
  const auto blocks = [&] {
    struct stat info {};
    const std::string path = "/proc/self/fd/" + std::to_string(arena.address().file);
    REQUIRE(stat(path.c_str(), &info) == 0);
    return static_cast<std::size_t>(info.st_blocks) * 512;
  };
  CHECK(blocks() <= 65536);
  const auto pool = Pool::make(std::shared_ptr<Region>(&arena, [](Region*) {}));
  {
    const Buffer buffer = pool->allocate(bytes);
    std::memset(buffer.data(), 1, bytes);
    CHECK(blocks() >= bytes);
  }
  CHECK(blocks() >= bytes);  // the pool keeps it for the next
  pool->trim();
  CHECK(blocks() <= 65536);
  CHECK(error_of([&] { pool->allocate(std::size_t{1} << 60); }).starts_with("out of memory: "));
}

TEST_CASE("an arena refuses a file that is not the peer's", "[shm]") {
  Arena mine(2);
  Arena other(2);
  auto address = other.address();
  mine.attach(1, address);
  other.allocate(100)[0] = std::byte{7};
  CHECK(mine.at(1, 4096)[0] == std::byte{7});
  address.key += 1;
  const std::string path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(address.file);
  CHECK(error_of([&] { mine.attach(1, address); }) == path + ": not the rank's memory");
  address = other.address();
  address.bytes += 4096;
  CHECK(error_of([&] { mine.attach(1, address); }) == path + ": not the rank's memory");
  address = other.address();
  address.file = 1 << 20;
  CHECK(error_of([&] { mine.attach(1, address); }).ends_with("/fd/1048576: No such file or directory"));
}

TEST_CASE("a watched process is seen to end", "[shm]") {
  int hold[2];
  REQUIRE(pipe(hold) == 0);
  const pid_t child = fork();
  if (child == 0) {
    char byte = 0;
    close(hold[1]);
    [[maybe_unused]] const auto got = read(hold[0], &byte, 1);
    _exit(0);
  }
  const detail::WatchedProcess watched(child);
  CHECK(!watched.has_ended());
  close(hold[1]);
  close(hold[0]);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(watched.has_ended());
  CHECK(!detail::WatchedProcess().has_ended());
}

TEST_CASE("SHARDLIB_SHM is 0 or 1", "[shm]") {
  {
    const Setting off("SHARDLIB_SHM", "0");
    CHECK(!detail::shm::is_wanted());
  }
  {
    const Setting on("SHARDLIB_SHM", "1");
    CHECK(detail::shm::is_wanted());
  }
  const Setting wrong("SHARDLIB_SHM", "yes");
  CHECK(error_of([] { detail::shm::is_wanted(); }) ==
        "SHARDLIB_SHM=yes: write 0 to have ranks of one node communicate over MPI, or 1 for shared memory");
}

TEST_CASE("collectives in shared memory give the bits that MPI gives", "[shm]") {
  if (!under_mpi() || !detail::shm::node) return;
  for (const int n : {2, 3, 4}) {
    if (n > world_size()) continue;
    for (const std::size_t block : {0U, 1U, 17U, 16384U, 50021U, 200003U}) {
      const std::string mesh = "d=" + show(n);
      std::vector<std::uint32_t> cached;
      std::vector<std::uint32_t> streamed;
      std::vector<std::uint32_t> over_mpi;
      on_mesh(mesh, [&](const DevicePtr& device) { cached = results(*device, block); });
      {
        const Temporarily lowered(tuning.nontemporal_from, std::size_t{1});
        on_mesh(mesh, [&](const DevicePtr& device) { streamed = results(*device, block); });
      }
      const Nodes apart(std::vector<int>(static_cast<std::size_t>(world_size()), -1));
      on_mesh(mesh, [&](const DevicePtr& device) { over_mpi = results(*device, block); });
      CHECK((cached == over_mpi && streamed == over_mpi));
    }
  }
}

TEST_CASE("groups on several nodes give the bits that MPI gives", "[shm]") {
  if (!under_mpi() || !detail::shm::node || world_size() < 4) return;
  const auto run = [](const std::vector<int>& node_of, std::size_t block, std::size_t nodes) {
    const Nodes spread(node_of);
    std::vector<std::uint32_t> bits;
    on_mesh("d=4,t=1", [&](const DevicePtr& device) {
      bits = results(*device, block);
      // Many at once, each in two phases.
      Communicator& comm = device->group({"d"});
      std::vector<Request> requests;
      std::vector<Buffer> received;
      for (i32 k = 0; k < 40; ++k) {
        const Buffer send = make_buffer(*device, std::vector<i32>(4 * block, k + comm.rank()));
        received.push_back(make_buffer<i32>(*device, 16 * block));
        requests.push_back(comm.all_gather(send, received.back()));
        received.push_back(make_buffer<i32>(*device, block));
        requests.push_back(comm.reduce_scatter(send, received.back(), DType::i32, Reduction::sum));
        received.push_back(make_buffer<i32>(*device, 4 * block));
        requests.push_back(comm.all_reduce(send, received.back(), DType::i32, Reduction::sum));
      }
      for (std::size_t k = requests.size(); k-- > 0;) requests[k].wait();
      for (i32 k = 0; k < 40; ++k) {
        const std::size_t first = 3 * static_cast<std::size_t>(k);
        const auto gathered = values_of<i32>(received[first]);
        for (std::size_t i = 0; i < gathered.size(); ++i) expect(gathered[i] == k + static_cast<i32>(i / (4 * block)));
        expect_equal(values_of<i32>(received[first + 1]), std::vector<i32>(block, 4 * k + 6));
        expect_equal(values_of<i32>(received[first + 2]), std::vector<i32>(4 * block, 4 * k + 6));
      }
      // bf16 is summed in f32 and rounded once: 256 + 1 is 256 in bf16, and 256 + 1 + 1 + 1 is 259, which it rounds to
      // 260.
      const Buffer rounded = make_buffer<bf16>(*device, block), all_rounded = make_buffer<bf16>(*device, 4 * block);
      const std::vector<bf16> ones(4 * block, bf16(comm.rank() == 0 ? 256.0F : 1.0F));
      comm.reduce_scatter(make_buffer(*device, ones), rounded, DType::bf16, Reduction::sum).wait();
      expect_equal(values_of<bf16>(rounded), std::vector<bf16>(block, bf16(260.0F)));
      comm.all_reduce(make_buffer(*device, ones), all_rounded, DType::bf16, Reduction::sum).wait();
      expect_equal(values_of<bf16>(all_rounded), std::vector<bf16>(4 * block, bf16(260.0F)));
      const Buffer most = make_buffer<bf16>(*device, 4 * block);
      const std::vector<bf16> own(4 * block, bf16(static_cast<float>(comm.rank())));
      comm.all_reduce(make_buffer(*device, own), most, DType::bf16, Reduction::max).wait();
      expect_equal(values_of<bf16>(most), std::vector<bf16>(4 * block, bf16(3.0F)));
      // Memory of the caller's own, also of a sum that the ranks do not divide.
      std::vector<i32> odd(4 * block + 1, comm.rank()), sum(odd.size());
      comm.all_reduce(Buffer(odd.data(), odd.size() * 4, nullptr), Buffer(sum.data(), sum.size() * 4, nullptr),
                      DType::i32, Reduction::sum)
          .wait();
      expect_equal(sum, std::vector<i32>(odd.size(), 6));
      std::vector<i32> mine(block, comm.rank());
      std::vector<i32> all(4 * block);
      comm.all_gather(Buffer(mine.data(), block * 4, nullptr), Buffer(all.data(), block * 16, nullptr)).wait();
      for (std::size_t i = 0; i < all.size(); ++i) expect(all[i] == static_cast<i32>(i / block));
    });
    // What a group shares, by this rank's place.
    MPI_Comm comm = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, world_rank() < 4 ? 0 : 1, world_rank(), &comm);
    if (world_rank() < 4) {
      const auto group =
          detail::shm::node->group({0, 1, 2, 3}, world_rank(), comm, Pool::make(detail::shm::node->arena()));
      CHECK((group ? group->nodes() : 0) == nodes);
      if (group) group->leave();
    }
    MPI_Comm_free(&comm);
    return bits;
  };
  for (const std::size_t block : {std::size_t{1}, std::size_t{17}, std::size_t{30011}}) {
    const auto over_mpi = run({-1, -1, -1, -1}, block, 0);
    CHECK(run({0, 0, 0, 0}, block, 1) == over_mpi);
    CHECK(run({0, 0, 1, 1}, block, 2) == over_mpi);
    // Not side by side, not as many on each, or some without shared memory.
    CHECK(run({0, 1, 0, 1}, block, 0) == over_mpi);
    CHECK(run({0, 1, 1, 0}, block, 0) == over_mpi);
    CHECK(run({0, 0, 0, 1}, block, 0) == over_mpi);
    CHECK(run({0, 0, -1, -1}, block, 0) == over_mpi);
  }
}

TEST_CASE("buffers that lie outside the arena are copied, and blocks inside it are not", "[shm]") {
  if (!under_mpi() || !detail::shm::node) return;
  on_mesh("d=" + show(world_size()), [](const DevicePtr& device) {
    Communicator& comm = device->group({"d"});
    const auto n = static_cast<std::size_t>(comm.size());
    for (const std::size_t block : {std::size_t{5}, std::size_t{70000}}) {
      std::vector<float> mine(block, static_cast<float>(comm.rank()));
      std::vector<float> all(n * block + 1, -1);
      const Buffer send(mine.data(), block * sizeof(float), nullptr);
      const Buffer recv(all.data(), n * block * sizeof(float), nullptr);
      Request request = comm.all_gather(send, recv);
      request.wait();
      for (std::size_t i = 0; i < n * block; ++i) expect(all[i] == static_cast<float>(i / block));
      expect(all.back() == -1, "written past the end");
      // Part of a block of the pool is in the arena too.
      const Buffer whole = make_buffer(*device, all);
      const Buffer part(whole.data() + block * sizeof(float), block * sizeof(float), nullptr);
      const Buffer sum = make_buffer<float>(*device, block);
      comm.all_reduce(part, sum, DType::f32, Reduction::sum).wait();
      expect_equal(values_of<float>(sum), std::vector<float>(block, static_cast<float>(n)));
    }
  });
}

TEST_CASE("more collectives may be under way than a group has slots", "[shm]") {
  on_mesh("d=2", [](const DevicePtr& device) {
    Communicator& comm = device->group({"d"});
    constexpr std::size_t operations = 3 * Group::slots + 1;
    std::vector<Request> requests;
    std::vector<Buffer> sums;
    for (std::size_t k = 0; k < operations; ++k) {
      sums.push_back(make_buffer<i32>(*device, k + 1));
      const Buffer send = make_buffer(*device, std::vector<i32>(k + 1, static_cast<i32>(k) + comm.rank()));
      requests.push_back(comm.all_reduce(send, sums.back(), DType::i32, Reduction::sum));
    }
    // One waits from the front, the other from the back.
    for (std::size_t k = 0; k < operations; ++k) requests[comm.rank() == 0 ? k : operations - 1 - k].wait();
    for (std::size_t k = 0; k < operations; ++k) {
      expect_equal(values_of<i32>(sums[k]), std::vector<i32>(k + 1, 2 * static_cast<i32>(k) + 1));
    }
  });
}

TEST_CASE("random collectives, waited for in random order, leave nothing behind", "[shm]") {
  on_mesh("d=" + show(std::max(2, world_size())), [](const DevicePtr& device) {
    Communicator& comm = device->group({"d"});
    const int n = comm.size();
    std::mt19937 together(11);  // the same on every rank
    std::mt19937 alone(static_cast<unsigned>(comm.rank()));
    struct Pending {
      Request request;
      Buffer recv;
      std::vector<i32> expected;
    };
    std::vector<Pending> pending;
    const auto finish = [&](std::size_t k) {
      pending[k].request.wait();
      expect_equal(values_of<i32>(pending[k].recv), pending[k].expected);
      std::vector<Pending> rest;
      for (std::size_t i = 0; i < pending.size(); ++i) {
        if (i != k) rest.push_back(std::move(pending[i]));
      }
      pending.swap(rest);
    };
    const std::size_t live = device->pool()->stats().live;
    for (i32 turn = 0; turn < 600; ++turn) {
      const std::size_t block = together() % 5 == 0 ? together() % 60000 : together() % 100;
      const auto kind = together() % 3;
      const auto blocks = static_cast<std::size_t>(kind == 0 ? 1 : n);
      std::vector<i32> mine(block * blocks);
      for (std::size_t i = 0; i < mine.size(); ++i)
        mine[i] = turn + comm.rank() * 1000 + static_cast<i32>(i / std::max<std::size_t>(1, block));
      std::vector<i32> expected;
      const i32 ranks = n * (n - 1) / 2 * 1000;
      for (i32 b = 0; b < (kind == 2 ? 1 : n); ++b) {
        const i32 value = kind == 0   ? turn + b * 1000
                          : kind == 1 ? n * (turn + b) + ranks
                                      : n * (turn + comm.rank()) + ranks;
        expected.insert(expected.end(), block, value);
      }
      const Buffer send = make_buffer(*device, mine);
      const Buffer recv = make_buffer<i32>(*device, expected.size());
      pending.push_back({kind == 0   ? comm.all_gather(send, recv)
                         : kind == 1 ? comm.all_reduce(send, recv, DType::i32, Reduction::sum)
                                     : comm.reduce_scatter(send, recv, DType::i32, Reduction::sum),
                         recv, std::move(expected)});
      while (pending.size() > alone() % 25) finish(alone() % pending.size());
    }
    while (!pending.empty()) finish(alone() % pending.size());
    comm.barrier();
    expect(device->pool()->stats().live == live, "a finished collective keeps memory");
  });
}

TEST_CASE("a late member's part is done by those who wait", "[shm]") {
  if (!under_mpi() || !detail::shm::node) return;
  on_mesh("d=2", [](const DevicePtr& device) {
    Communicator& comm = device->group({"d"});
    const Buffer send = make_buffer(*device, std::vector<float>(100000, static_cast<float>(comm.rank())));
    const Buffer recv = make_buffer<float>(*device, 200000);
    // A word of rank 0's memory, by which it says that its wait is over.
    const auto& arena = *detail::shm::node->arena();
    const Buffer word = make_buffer(*device, std::vector<u32>{0});
    const Buffer offsets = make_buffer<f64>(*device, 2);
    comm.all_gather(make_buffer(*device, std::vector<f64>{static_cast<double>(arena.offset(word.data()))}), offsets)
        .wait();
    std::atomic_ref<u32> over(*reinterpret_cast<u32*>(arena.at(0, static_cast<std::size_t>(offsets.as<f64>()[0]))));
    comm.barrier();
    Request request = comm.all_gather(send, recv);
    if (comm.rank() == 0) {
      request.wait();
      over = 1;
    } else {
      // Makes no call of the library meanwhile.
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
      while (over == 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
      expect(over == 1, "rank 0 waits for what rank 1 is to do");
      request.wait();
    }
    comm.barrier();
    expect(values_of<float>(recv)[0] == 0 && values_of<float>(recv)[199999] == 1);
  });
}

TEST_CASE("a launch ends when a collective is done that nobody waited for", "[shm]") {
  if (!under_mpi() || !detail::shm::node || world_size() < 2) return;
  Buffer recv;
  on_mesh("d=2", [&](const DevicePtr& device) {
    Communicator& comm = device->group({"d"});
    recv = make_buffer<float>(*device, 200000);
    const Buffer send = make_buffer(*device, std::vector<float>(100000, static_cast<float>(comm.rank())));
    comm.barrier();
    if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    comm.all_gather(send, recv).drop();
  });
  if (world_rank() < 2) CHECK((values_of<float>(recv)[0] == 0 && values_of<float>(recv)[199999] == 1));
}

TEST_CASE("a launch ends when both phases of a collective are done that nobody waited for", "[shm]") {
  if (!under_mpi() || !detail::shm::node || world_size() < 2) return;
  const Nodes apart(std::vector<int>(static_cast<std::size_t>(world_size()), -1));
  Buffer recv;
  on_mesh("d=2", [&](const DevicePtr& device) {
    Communicator& comm = device->group({"d"});
    recv = make_buffer<float>(*device, 200000);
    const Buffer send = make_buffer(*device, std::vector<float>(200000, static_cast<float>(comm.rank() + 1)));
    comm.barrier();
    if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    comm.all_reduce(send, recv, DType::f32, Reduction::sum).drop();
  });
  if (world_rank() < 2) CHECK((values_of<float>(recv)[0] == 3 && values_of<float>(recv)[199999] == 3));
}

TEST_CASE("ranks out of step get an error that names both calls", "[shm]") {
  if (!under_mpi() || !detail::shm::node || world_size() < 2) return;
  std::string error;
  try {
    on_mesh("d=" + show(world_size()), [&](const DevicePtr& device) {
      Communicator& comm = device->group({"d"});
      const Buffer send = make_buffer<float>(*device, 8 * static_cast<std::size_t>(comm.size()));
      const Buffer recv = make_buffer<float>(*device, 8 * static_cast<std::size_t>(comm.size()));
      error = error_of([&] {
        if (comm.rank() == 0) {
          comm.all_to_all(send, recv).wait();
        } else {
          comm.all_reduce(send, recv, DType::f32, Reduction::sum).wait();
        }
      });
      throw Error("stop");
    });
  } catch (const Error&) {
  }
  const std::string bytes = show(world_size() * 32) + " bytes";
  const std::string move = "all_to_all of " + bytes + " at ", sum = "all_reduce of " + bytes + " (f32 sum) at ";
  const bool moves = world_rank() == 0;
  CHECK(
      error.starts_with("rank " + show(world_rank()) + " of " + show(world_size()) + " calls " + (moves ? move : sum)));
  CHECK(error.find(" where rank " + show(moves ? 1 : 0) + " calls " + (moves ? sum : move)) != std::string::npos);
  CHECK(error.ends_with(": every device of a group must make the same calls in the same order"));
}

TEST_CASE("what MPI may still write outlives a collective that fails when it starts", "[shm]") {
  if (!under_mpi() || !detail::shm::node || world_size() < 2) return;
  const Nodes apart(std::vector<int>(static_cast<std::size_t>(world_size()), -1));
  std::string error;
  bool kept = false;
  static_cast<void>(error_of([&] {
    on_mesh("d=" + show(world_size()), [&](const DevicePtr& device) {
      Communicator& comm = device->group({"d"});
      const Buffer send = make_buffer<float>(*device, 1 << 20), recv = make_buffer<float>(*device, 1 << 20);
      comm.barrier();
      // Rank 0's call is known when the others begin theirs.
      if (comm.rank() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
      error = error_of([&] {
        comm.rank() == 0 ? comm.all_to_all(send, recv).wait()
                         : comm.all_reduce(send, recv, DType::f32, Reduction::sum).wait();
      });
      kept = !recv.unique();
      throw Error("stop");
    });
  }));
  CHECK((error.find(" where rank ") != std::string::npos && kept));
}

TEST_CASE("groups come and go without filling the arena", "[shm]") {
  if (!under_mpi() || !detail::shm::node || world_size() < 2) return;
  const auto room = [] {
    const auto& arena = detail::shm::node->arena();
    std::byte* const probe = arena->allocate(64);
    const std::size_t offset = arena->offset(probe);
    arena->free(probe, 64);
    return offset;
  };
  std::size_t most = 0;
  for (int turn = 0; turn < 40; ++turn) {
    on_mesh("d=" + show(world_size()), [](const DevicePtr& device) {
      Communicator& comm = device->group({"d"});
      comm.barrier();
      // Too long for MPI to send eagerly, so it is under way when the body returns.
      const Buffer message = make_buffer<float>(*device, 200000);
      if (comm.rank() == 0) comm.send(message, 1);
      if (comm.rank() == 1) comm.recv(message, 0).wait();
    });
    if (turn == 5) most = room();
  }
  CHECK(room() <= most);
}

// For rank_faults.py, which kills a rank of it.
TEST_CASE("endless collectives", "[.endless]") {
  on_mesh("d=" + show(world_size()), [](const DevicePtr& device) {
    Communicator& comm = device->group({"d"});
    const Buffer send = make_buffer<float>(*device, 50000);
    const Buffer recv = make_buffer<float>(*device, 50000 * static_cast<std::size_t>(comm.size()));
    comm.barrier();
    std::printf("rank %d is process %d\n", comm.rank(), static_cast<int>(getpid()));
    std::fflush(stdout);
    for (;;) comm.all_gather(send, recv).wait();
  });
}

// For rank_faults.py: a rank that does not come to the end of the program.
TEST_CASE("stopped after the last collective", "[.stopped]") {
  on_mesh("d=" + show(world_size()), [](const DevicePtr& device) { device->group({"d"}).barrier(); });
  if (world_rank() == 1) std::raise(SIGSTOP);
}
#endif
