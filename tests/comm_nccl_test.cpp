// Groups of GPUs that communicate by NCCL, over a stand-in for it. First the stand-in: it must find what NCCL forbids.
#include "nccl_stand_in.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "shardlib/comm/dry.hpp"
#include "shardlib/comm/impl/nccl_members.hpp"
#include "shardlib/comm/staged.hpp"
#include "shardlib/comm/threads.hpp"
#include "shardlib/device/tree_kernel.hpp"
#include "shardlib/memory/flights.hpp"
#include "shardlib/shardlib.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;
using stand_in::take_faults;

namespace {

const bool registered = [] {
  nccl_for_tests = {.functions = &stand_in::functions, .check = [] {
                      const auto faults = take_faults();
                      if (!faults.empty()) throw Failure("NCCL: " + faults[0]);
                    }};
  return true;
}();

/// The ranks of a communicator of the stand-in, all on this thread, each with a device and a stream of it.
struct Ranks {
  struct Rank {
    std::shared_ptr<Pool> pool = Pool::make(Region::make_simulated());
    std::unique_ptr<detail::Stream> stream = pool->device_memory()->make_stream();
    ncclComm* comm = nullptr;
    std::vector<Buffer> blocks{};
    std::byte* block(std::size_t bytes) {
      const Buffer& made = blocks.emplace_back(pool->allocate(bytes));
      const MemoryAccess open(made.device_memory());
      std::memset(made.data(), 1, bytes);
      return made.data();
    }
    /// What the last block has now.
    [[nodiscard]] int first() const {
      const MemoryAccess open(blocks.back().device_memory());
      return static_cast<int>(*blocks.back().data());
    }
  };
  std::vector<Rank> all;

  explicit Ranks(int count) : all(static_cast<std::size_t>(count)) {
    take_faults();
    detail::nccl::UniqueId id;
    stand_in::GetUniqueId(&id);
    std::vector<std::thread> threads;
    for (int r = 0; r < count; ++r)
      threads.emplace_back([&, r] { stand_in::CommInitRank(&all[static_cast<std::size_t>(r)].comm, count, id, r); });
    for (std::thread& thread : threads) thread.join();
  }
  Rank& operator[](std::size_t r) { return all[r]; }
  CUstream_st* stream(std::size_t r) {
    all[r].stream->follow_device();
    return all[r].stream->handle();
  }
  bool has_passed(std::size_t r) { return all[r].stream->mark()->passed(); }
  void abort() {
    for (Rank& rank : all)
      if (!rank.comm->has_ended) stand_in::abort_alone(rank.comm);
  }
};

constexpr auto u8s = detail::nccl::Type::uint8, f32s = detail::nccl::Type::float32;

/// The only fault so far, without which there is none.
std::string fault() {
  const auto faults = take_faults();
  return faults.size() == 1 ? faults[0] : std::to_string(faults.size()) + " faults";
}

template <class T>
Buffer on_device(const Device& device, const std::vector<T>& values) {
  return device.to_device(make_buffer(device, values));
}
template <class T>
Buffer on_device(const Device& device, std::size_t count) {
  return device.pool()->allocate(count * sizeof(T));
}
template <class T>
std::vector<T> read(const Device& device, const Buffer& buffer) {
  return values_of<T>(device.to_host(buffer));
}

/// Runs `body` on a mesh of the simulated device with the stand-in, and checks that it has found no fault.
void on_nccl(const std::string& mesh, const DeviceBody& body, GpuSums sums = GpuSums::tree,
             const detail::nccl::Functions& functions = stand_in::functions) {
  if (under_mpi()) return;
  const Temporarily nccl(tuning.nccl, &functions);
  take_faults();
  on_mesh(mesh, body, {.kind = DeviceKind::simulated, .sums = sums});
  CHECK(take_faults() == std::vector<std::string>{});
}

/// What each device of a mesh returns.
using Results = std::map<int, std::vector<std::byte>>;
template <class F>
DeviceBody collecting(Results& results, std::mutex& mutex, const F& f) {
  return [&results, &mutex, f](const DevicePtr& device) {
    std::vector<std::byte> mine = f(*device);
    const std::lock_guard lock(mutex);
    results[device->rank()] = std::move(mine);
  };
}

/// f(device) has the same bytes on CPUs as on devices that communicate by NCCL.
template <class F>
void check_bits(const std::string& mesh, const F& f) {
  if (under_mpi()) return;
  std::mutex mutex;
  Results on_cpu, by_nccl;
  on_mesh(mesh, collecting(on_cpu, mutex, f), {.kind = DeviceKind::cpu});
  on_nccl(mesh, collecting(by_nccl, mutex, f));
  CHECK(on_cpu.size() == static_cast<std::size_t>(device_count(parse_mesh(mesh))));
  CHECK(on_cpu == by_nccl);
}

void append(std::vector<std::byte>& all, const Device& device, const Buffer& buffer) {
  const auto bytes = read<std::byte>(device, buffer);
  all.insert(all.end(), bytes.begin(), bytes.end());
}

template <class T>
std::vector<std::byte> all_reductions(const Device& device, Communicator& group, std::size_t block) {
  std::vector<std::byte> results;
  const auto n = static_cast<std::size_t>(group.size());
  for (const Reduction op : {Reduction::sum, Reduction::max}) {
    const Buffer mine = on_device(device, rough_values<T>(device.rank(), n * block));
    const Buffer part = on_device<T>(device, block), sum = on_device<T>(device, n * block);
    group.reduce_scatter(mine, part, dtype_v<T>, op).wait();
    append(results, device, part);
    group.all_reduce(mine, sum, dtype_v<T>, op).wait();
    append(results, device, sum);
    // Lengths that the group does not divide.
    const Buffer odd = on_device(device, rough_values<T>(device.rank() + 50, n * block + 1));
    const Buffer odd_sum = on_device<T>(device, n * block + 1);
    group.all_reduce(odd, odd_sum, dtype_v<T>, op).wait();
    append(results, device, odd_sum);
  }
  return results;
}

int launched(stand_in::Kind kind) {
  return stand_in::world.launched[kind];
}

}  // namespace

TEST_CASE("the stand-in for NCCL runs operations late, in stream order, and moves the right blocks", "[nccl]") {
  if (under_mpi()) return;
  Ranks ranks(2);
  for (std::size_t r = 0; r < 2; ++r) {
    std::byte* const mine = ranks[r].block(4);
    {
      const MemoryAccess open(ranks[r].pool->device_memory());
      std::memset(mine, static_cast<int>(r) + 2, 4);
    }
    CHECK(stand_in::AllGather(mine, ranks[r].block(8), 4, u8s, ranks[r].comm, ranks.stream(r)) ==
          detail::nccl::Result::success);
    CHECK(ranks[r].first() == 1);  // not yet
    if (r == 0) CHECK(!ranks.has_passed(0));
  }
  CHECK(ranks[0].first() == 1);
  CHECK(ranks.has_passed(0));
  for (std::size_t r = 0; r < 2; ++r) {
    const MemoryAccess open(ranks[r].pool->device_memory());
    const std::byte* const all = ranks[r].blocks.back().data();
    CHECK((all[0] == std::byte{2} && all[7] == std::byte{3}));
  }
  for (std::size_t r = 0; r < 2; ++r) stand_in::CommDestroy(ranks[r].comm);
  CHECK(take_faults().empty());
}

TEST_CASE("an operation of the stand-in for NCCL that does not wait for a kernel reads what was there before",
          "[nccl]") {
  if (under_mpi()) return;
  for (const bool waits : {false, true}) {
    Ranks ranks(1);
    std::byte* const mine = ranks[0].block(4);
    CUstream_st* stream = waits ? nullptr : ranks.stream(0);
    Exec{.pool = ranks[0].pool.get()}.zero(mine, 4);
    if (waits) stream = ranks.stream(0);
    stand_in::AllGather(mine, ranks[0].block(4), 4, u8s, ranks[0].comm, stream);
    CHECK(ranks.has_passed(0));
    CHECK(ranks[0].first() == (waits ? 0 : 1));
    stand_in::CommDestroy(ranks[0].comm);
  }
  CHECK(take_faults().empty());
}

TEST_CASE("a kernel that does not wait for an operation of the stand-in for NCCL reads what was there before",
          "[nccl]") {
  if (under_mpi()) return;
  for (const bool waits : {false, true}) {
    Ranks ranks(1);
    std::byte* const mine = ranks[0].block(4);
    const Exec exec{.pool = ranks[0].pool.get()};
    exec.zero(mine, 4);
    std::byte *const result = ranks[0].block(4), *const read = ranks[0].block(4);
    stand_in::AllGather(mine, result, 4, u8s, ranks[0].comm, ranks.stream(0));
    const auto mark = ranks[0].stream->mark();
    if (waits) mark->hold_device();
    exec.copy(read, result, 4);
    CHECK(ranks[0].first() == 1);  // the host has not waited
    exec.synchronize();
    CHECK(ranks[0].first() == (waits ? 0 : 1));
    CHECK(ranks.has_passed(0));
    stand_in::CommDestroy(ranks[0].comm);
  }
  CHECK(take_faults().empty());
}

TEST_CASE("the stand-in for NCCL finds collectives in another order", "[nccl]") {
  if (under_mpi()) return;
  Ranks ranks(2);
  stand_in::AllGather(ranks[0].block(4), ranks[0].block(8), 4, u8s, ranks[0].comm, ranks.stream(0));
  stand_in::AllReduce(ranks[1].block(16), ranks[1].block(16), 4, f32s, {}, ranks[1].comm, ranks.stream(1));
  CHECK(!ranks.has_passed(0));
  CHECK(fault() ==
        "collective 0 is ncclAllGather of 4 elements of type 1 on rank 0 and ncclAllReduce of 4 elements of type 7 on "
        "rank 1");
  ranks.abort();
}

TEST_CASE("the stand-in for NCCL finds other counts and types", "[nccl]") {
  if (under_mpi()) return;
  for (const auto& [count, type] : {std::pair(std::size_t{3}, f32s), std::pair(std::size_t{4}, u8s)}) {
    Ranks ranks(2);
    stand_in::AllReduce(ranks[0].block(16), ranks[0].block(16), 4, f32s, {}, ranks[0].comm, ranks.stream(0));
    stand_in::AllReduce(ranks[1].block(16), ranks[1].block(16), count, type, {}, ranks[1].comm, ranks.stream(1));
    CHECK(!ranks.has_passed(0));
    CHECK(fault() == "collective 0 is ncclAllReduce of 4 elements of type 7 on rank 0 and ncclAllReduce of " +
                         std::to_string(count) + " elements of type " + std::to_string(static_cast<int>(type)) +
                         " on rank 1");
    ranks.abort();
  }
}

TEST_CASE("the stand-in for NCCL finds a send that is not as long as its recv", "[nccl]") {
  if (under_mpi()) return;
  Ranks ranks(2);
  stand_in::Send(ranks[0].block(8), 8, u8s, 1, ranks[0].comm, ranks.stream(0));
  stand_in::Recv(ranks[1].block(8), 4, u8s, 0, ranks[1].comm, ranks.stream(1));
  CHECK(!ranks.has_passed(0));
  CHECK(fault() == "ncclSend of 8 elements of type 1 to rank 1 meets ncclRecv of 4 elements of type 1 from rank 0");
  ranks.abort();
}

TEST_CASE("the stand-in for NCCL finds a group of which a rank lacks a call", "[nccl]") {
  if (under_mpi()) return;
  Ranks ranks(2);
  const auto exchange = [&](std::size_t r, int peer, bool receives) {
    stand_in::GroupStart();
    stand_in::Send(ranks[r].block(8), 8, u8s, peer, ranks[r].comm, ranks.stream(r));
    if (receives) stand_in::Recv(ranks[r].block(8), 8, u8s, peer, ranks[r].comm, ranks.stream(r));
    stand_in::GroupEnd();
  };
  exchange(0, 1, true);
  exchange(1, 0, true);
  CHECK(ranks.has_passed(0));
  CHECK(ranks.has_passed(1));
  exchange(0, 1, true);
  exchange(1, 0, false);
  CHECK(!ranks.has_passed(0));
  stand_in::CommDestroy(ranks[0].comm);
  CHECK(fault() == "ncclCommDestroy while ncclSend of 8 elements of type 1 to rank 1 is under way");
  ranks.abort();
}

TEST_CASE("the stand-in for NCCL finds messages outside of a group that wait for each other", "[nccl]") {
  if (under_mpi()) return;
  for (const int n : {2, 3}) {
    Ranks ranks(n);
    for (int r = 0; r < n; ++r) {
      const auto i = static_cast<std::size_t>(r);
      stand_in::Send(ranks[i].block(8), 8, u8s, (r + 1) % n, ranks[i].comm, ranks.stream(i));
      stand_in::Recv(ranks[i].block(8), 8, u8s, (r + n - 1) % n, ranks[i].comm, ranks.stream(i));
    }
    CHECK(!ranks.has_passed(0));
    CHECK(fault() ==
          "deadlock: ncclSend of 8 elements of type 1 to rank 1 on rank 0 waits for a call behind one that waits for "
          "this rank");
    ranks.abort();
  }
  // In an order that works there is none.
  Ranks ranks(2);
  stand_in::Send(ranks[0].block(8), 8, u8s, 1, ranks[0].comm, ranks.stream(0));
  stand_in::Recv(ranks[0].block(8), 8, u8s, 1, ranks[0].comm, ranks.stream(0));
  stand_in::Recv(ranks[1].block(8), 8, u8s, 0, ranks[1].comm, ranks.stream(1));
  stand_in::Send(ranks[1].block(8), 8, u8s, 0, ranks[1].comm, ranks.stream(1));
  CHECK((ranks.has_passed(0) && ranks.has_passed(1)));
  CHECK(take_faults().empty());
}

TEST_CASE("the stand-in for NCCL finds memory that is not the GPU's", "[nccl]") {
  if (under_mpi()) return;
  Ranks ranks(2);
  std::vector<std::byte> host(8);
  CHECK(stand_in::AllGather(ranks[0].block(4), host.data(), 4, u8s, ranks[0].comm, ranks.stream(0)) ==
        stand_in::invalid_usage);
  CHECK(fault() == "ncclAllGather of 4 elements of type 1 gets memory that is not its GPU's");
  stand_in::AllGather(ranks[1].block(4), ranks[0].block(8), 4, u8s, ranks[0].comm, ranks.stream(0));
  CHECK(fault() == "ncclAllGather of 4 elements of type 1 gets memory that is not its GPU's");
  ranks.abort();
}

TEST_CASE("the stand-in for NCCL finds a block that is freed before the stream has used it", "[nccl]") {
  if (under_mpi()) return;
  Ranks ranks(2);
  for (std::size_t r = 0; r < 2; ++r)
    stand_in::AllGather(ranks[r].block(4), ranks[r].block(8), 4, u8s, ranks[r].comm, ranks.stream(r));
  ranks[0].blocks.erase(ranks[0].blocks.begin());
  expect_error([&] { ranks.has_passed(0); },
               "simulated device: ncclAllGather of 4 elements of type 1 uses a block that was freed before it has run");
  ranks.abort();
}

TEST_CASE("the stand-in for NCCL finds uses of a communicator that has ended, and open groups", "[nccl]") {
  if (under_mpi()) return;
  Ranks ranks(1);
  stand_in::abort_alone(ranks[0].comm);
  stand_in::Send(ranks[0].block(8), 8, u8s, 0, ranks[0].comm, ranks.stream(0));
  CHECK(fault() == "ncclSend on a communicator that has ended");
  stand_in::CommDestroy(ranks[0].comm);
  CHECK(fault() == "ncclCommDestroy on a communicator that has ended");
  stand_in::GroupEnd();
  CHECK(fault() == "ncclGroupEnd without ncclGroupStart");
  Ranks others(1);
  stand_in::GroupStart();
  stand_in::CommDestroy(others[0].comm);
  stand_in::GroupEnd();
  CHECK(fault() == "ncclCommDestroy inside of a group");
}

TEST_CASE("the stand-in for NCCL finds two ranks on one GPU", "[nccl]") {
  if (under_mpi()) return;
  Ranks ranks(2);
  stand_in::AllGather(ranks[0].block(4), ranks[0].block(8), 4, u8s, ranks[0].comm, ranks.stream(0));
  const auto second = ranks[0].pool->device_memory()->make_stream();
  stand_in::AllGather(ranks[0].block(4), ranks[0].block(8), 4, u8s, ranks[1].comm, second->handle());
  CHECK(fault() == "ranks 0 and 1 have the same GPU");
  ranks.abort();
}

TEST_CASE("collectives by NCCL have the bits of the CPU's", "[nccl]") {
  const auto before = stand_in::world.launched;
  for (const std::string mesh : {"d=2", "d=3", "d=4", "d=2,t=2"}) {
    for (const std::size_t block : {std::size_t{1}, std::size_t{5}, std::size_t{3001}}) {
      check_bits(mesh, [block](Device& device) {
        std::vector<std::byte> results;
        std::vector<std::vector<std::string_view>> groups{{"d"}};
        if (device.axes().size() > 1) groups.insert(groups.end(), {{"t"}, {"t", "d"}});
        for (const auto& axes : groups) {
          Communicator& group = device.group(axes);
          const auto n = static_cast<std::size_t>(group.size());
          const Buffer mine = on_device(device, rough_values(device.rank(), n * block));
          const Buffer whole = on_device<f32>(device, n * n * block), turned = on_device<f32>(device, n * block);
          group.all_gather(mine, whole).wait();
          append(results, device, whole);
          group.all_to_all(mine, turned).wait();
          append(results, device, turned);
          for (const auto& part :
               {all_reductions<f32>(device, group, block), all_reductions<bf16>(device, group, block),
                all_reductions<f64>(device, group, block), all_reductions<i32>(device, group, block),
                all_reductions<u32>(device, group, block)})
            results.insert(results.end(), part.begin(), part.end());
        }
        return results;
      });
    }
  }
  if (under_mpi()) return;
  for (const auto kind : {stand_in::Kind::all_gather, stand_in::Kind::send, stand_in::Kind::recv})
    CHECK(launched(kind) > (before.contains(kind) ? before.at(kind) : 0));
  for (const auto kind : {stand_in::Kind::all_reduce, stand_in::Kind::reduce_scatter})
    CHECK(launched(kind) == (before.contains(kind) ? before.at(kind) : 0));
}

TEST_CASE("messages inside of a group of NCCL may be in progress", "[nccl]") {
  const Temporarily in_group(stand_in::world.in_group, detail::nccl::Result::in_progress);
  check_bits("d=3", [](Device& device) {
    std::vector<std::byte> results;
    const Buffer turned = on_device<f32>(device, 12);
    device.everybody().all_to_all(on_device(device, rough_values(device.rank(), 12)), turned).wait();
    append(results, device, turned);
    return results;
  });
}

TEST_CASE("slices of an all_reduce begin at multiples of 16 bytes", "[nccl]") {
  for (const std::size_t element : std::vector<std::size_t>{2, 4, 8})
    for (const std::size_t ranks : std::vector<std::size_t>{2, 3, 5, 8})
      for (const std::size_t n : {std::size_t{1}, std::size_t{3 * 4097 + 2}, std::size_t{65536}}) {
        const auto [slice, left] = detail::gpu_slices(n, element, ranks);
        CHECK(slice * element % 16 == 0);
        CHECK(slice * ranks + left == n);
        if (n * element * ranks > detail::small_all_reduce) CHECK(left * element < 16 * ranks);
      }
  CHECK(detail::gpu_slices(65536, 4, 8).left == 0);
  const int before = stand_in::world.unaligned;
  check_bits("d=3", [](Device& device) {
    std::vector<std::byte> results;
    for (const std::size_t n : std::vector<std::size_t>{3 * 4097 + 2, 3 * 4099}) {
      const Buffer mine = on_device(device, rough_values<bf16>(device.rank(), n)), sum = on_device<bf16>(device, n);
      device.everybody().all_reduce(mine, sum, DType::bf16, Reduction::sum).wait();
      append(results, device, sum);
    }
    return results;
  });
  CHECK(stand_in::world.unaligned == before);
}

TEST_CASE("shifts go through NCCL, in groups of which a member sends and receives one message", "[nccl]") {
  const auto sent = launched(stand_in::Kind::send), received = launched(stand_in::Kind::recv);
  for (const std::string mesh : {"d=2", "d=3", "d=2,t=2"}) {
    check_bits(mesh, [](Device& device) {
      std::vector<std::byte> results;
      Communicator& group = device.everybody();
      for (const int places : {1, -1, 2, 5, 0}) {
        const Buffer mine = on_device(device, rough_values(device.rank(), 7)), theirs = on_device<f32>(device, 7);
        group.shift(mine, theirs, places).wait();
        append(results, device, theirs);
      }
      // Those of host memory, and of nothing, are messages.
      const Buffer host = make_buffer(device, rough_values(device.rank(), 7)), there = make_buffer<f32>(device, 7);
      group.shift(host, there, 1).wait();
      append(results, device, there);
      group.shift(on_device<f32>(device, 0), on_device<f32>(device, 0), 1).wait();
      return results;
    });
  }
  if (under_mpi()) return;
  CHECK(launched(stand_in::Kind::send) == sent + 5 * (2 + 3 + 4));
  CHECK(launched(stand_in::Kind::recv) == received + 5 * (2 + 3 + 4));
}

TEST_CASE("operands that stay in host memory, single messages and empty operands go without NCCL", "[nccl]") {
  const auto moves = [] {
    int all = 0;
    for (const auto& [kind, count] : stand_in::world.launched) all += count;
    return all;
  };
  const int before = moves();
  check_bits("d=3", [](Device& device) {
    std::vector<std::byte> results;
    Communicator& group = device.everybody();
    const int next = (group.rank() + 1) % 3, last = (group.rank() + 2) % 3;
    const Buffer host = make_buffer(device, rough_values(device.rank(), 7));
    const Buffer gathered = make_buffer<f32>(device, 21);
    group.all_gather(host, gathered).wait();
    append(results, device, gathered);
    const Buffer mine = on_device(device, rough_values(device.rank(), 7)), theirs = on_device<f32>(device, 7);
    group.send(mine, next).wait();
    group.recv(theirs, last).wait();
    append(results, device, theirs);
    group.all_gather(on_device<f32>(device, 0), on_device<f32>(device, 0)).wait();
    group.barrier();
    return results;
  });
  CHECK(moves() == before);
}

namespace {
/// All pairs of a group's members send their messages from GPU to GPU from now on, or through host memory.
void set_direct(Communicator& group, bool direct) {
  for (int peer = 0; peer < group.size(); ++peer) group.set_direct(peer, direct);
}

/// While it lives, each device is as in a process of its own.
struct Apart : shardlib::detail::WithValue<bool> {
  Apart() : WithValue(tuning.nccl_apart, true) {}
};

/// Each member sends `rounds` messages of several lengths to each other one, before it receives any. Members receive in
/// orders of their own.
std::vector<std::byte> crossing_messages(Device& device, std::size_t rounds) {
  std::vector<std::byte> results;
  Communicator& group = device.everybody();
  const int n = group.size();
  const auto length = [](int from, int to, std::size_t round) {
    return static_cast<std::size_t>(3 + from + 10 * to) * (1 + 100 * round);
  };
  for (std::size_t round = 0; round < rounds; ++round)
    for (int i = 1; i < n; ++i) {
      const int to = (group.rank() + i) % n;
      const int seed = device.rank() + 7 * to + static_cast<int>(round);
      // The memory is free for others at once, as far as the program knows.
      group.send(on_device(device, rough_values(seed, length(group.rank(), to, round))), to);
      device.exec().zero(on_device<f32>(device, length(group.rank(), to, round)).data(), 4);
    }
  std::vector<Request> requests;
  std::vector<Buffer> received;
  for (int i = 1; i < n; ++i)
    for (std::size_t round = 0; round < rounds; ++round) {
      const int from = (group.rank() + i) % n;
      received.push_back(on_device<f32>(device, length(from, group.rank(), round)));
      requests.push_back(group.recv(received.back(), from));
    }
  for (auto request = requests.rbegin(); request != requests.rend(); ++request) request->wait();
  for (const Buffer& buffer : received) append(results, device, buffer);
  return results;
}
}  // namespace

TEST_CASE("messages between devices that have said so go from GPU to GPU, and wait for no others", "[nccl]") {
  using stand_in::Kind;
  const Apart apart;
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    const Temporarily early(tuning.simulated_seed, seed);
    const int sent = launched(Kind::send), received = launched(Kind::recv);
    check_bits("d=3", [](Device& device) {
      set_direct(device.everybody(), true);
      auto results = crossing_messages(device, 4);
      set_direct(device.everybody(), true);  // they are connected
      // Host memory, and nothing, go as before.
      Communicator& group = device.everybody();
      const int next = (group.rank() + 1) % 3, last = (group.rank() + 2) % 3;
      const Buffer host = make_buffer(device, rough_values(device.rank(), 7)), there = make_buffer<f32>(device, 7);
      group.send_recv(host, next, there, last).wait();
      append(results, device, there);
      group.send_recv({}, next, {}, last).wait();
      set_direct(group, false);
      const auto more = crossing_messages(device, 1);
      results.insert(results.end(), more.begin(), more.end());
      return results;
    });
    if (under_mpi()) return;
    constexpr int pairs = 6, connecting = pairs;
    CHECK(launched(Kind::send) == sent + connecting + 4 * pairs);
    CHECK(launched(Kind::recv) == received + connecting + 4 * pairs);
  }
}

TEST_CASE("messages from GPU to GPU take no host memory", "[nccl]") {
  const Apart apart;
  constexpr std::size_t count = 100'000;
  std::vector<std::size_t> taken(4);
  on_nccl("d=2", [&](const DevicePtr& device) {
    Communicator& group = device->everybody();
    const int other = 1 - group.rank();
    for (const bool direct : {false, true}) {
      set_direct(group, direct);
      const Buffer mine = on_device(*device, rough_values(device->rank(), count)),
                   theirs = on_device<f32>(*device, count);
      device->host_pool()->reset_peak();
      const std::size_t live = device->host_pool()->stats().live;
      group.send_recv(mine, other, theirs, other).wait();
      taken[static_cast<std::size_t>(2 * group.rank() + (direct ? 1 : 0))] = device->host_pool()->stats().peak - live;
      expect_equal(read<f32>(*device, theirs), rough_values(other, count));
    }
  });
  if (under_mpi()) return;
  for (const std::size_t r : {std::size_t{0}, std::size_t{1}}) {
    CHECK(taken[2 * r] >= count * sizeof(f32));
    CHECK(taken[2 * r + 1] == 0);
  }
}

TEST_CASE("messages between threads of a process, or on one GPU, go through host memory", "[nccl]") {
  const int before = launched(stand_in::Kind::send);
  check_bits("d=3", [](Device& device) {
    set_direct(device.everybody(), true);
    return crossing_messages(device, 2);
  });
  CHECK(launched(stand_in::Kind::send) == before);
}

TEST_CASE("an exchange is one operation of NCCL, also on members without messages", "[nccl]") {
  using stand_in::Kind;
  const auto exchanged = [](Device& device) {
    std::vector<std::byte> results;
    Communicator& group = device.everybody();
    for (int step = 1; step < 3; ++step) {  // as ring attention does: the first member receives nothing
      Communicator::Messages messages;
      std::vector<Buffer> received;
      for (const std::size_t length : std::vector<std::size_t>{5, 2000}) {
        if (group.rank() + step < 3)
          messages.sends.push_back(
              {on_device(device, rough_values(device.rank() + step, length)), group.rank() + step});
        if (group.rank() < step) continue;
        received.push_back(on_device<f32>(device, length));
        messages.receives.push_back({received.back(), group.rank() - step});
      }
      Request request = group.exchange(messages);
      messages = {};
      request.wait();
      for (const Buffer& buffer : received) append(results, device, buffer);
    }
    return results;
  };
  for (const bool apart : {false, true}) {
    const Temporarily processes(tuning.nccl_apart, apart);
    const int sent = launched(Kind::send);
    check_bits("d=3", exchanged);
    if (!under_mpi()) CHECK(launched(Kind::send) == sent + 2 * (2 + 1));
  }
  if (under_mpi()) return;
  const std::string text = error_of([] {
    on_nccl("d=2", [](const DevicePtr& device) {
      if (device->rank() == 0)
        device->everybody().exchange({}).wait();
      else
        device->everybody().all_gather(on_device<f32>(*device, 4), on_device<f32>(*device, 8)).wait();
    });
  });
  CHECK(text.find("exchange by NCCL") != std::string::npos);
  CHECK(text.find("all_gather of 16 bytes by NCCL") != std::string::npos);
  take_faults();
}

namespace {
/// The error of two devices, of which `first` is what device 0 does and `second` what device 1 does once their messages
/// go from GPU to GPU.
std::string error_between(const std::function<void(Device&, Communicator&)>& first,
                          const std::function<void(Device&, Communicator&)>& second) {
  const Apart apart;
  const Temporarily nccl(tuning.nccl, &stand_in::functions);
  std::string text = error_of([&] {
    on_mesh("d=2",
            [&](const DevicePtr& device) {
              Communicator& group = device->everybody();
              set_direct(group, true);
              group.barrier();
              (group.rank() == 0 ? first : second)(*device, group);
            },
            {.kind = DeviceKind::simulated, .watchdog = {.timeout = std::chrono::milliseconds(1000)}});
  });
  CHECK(take_faults() == std::vector<std::string>{});
  return text;
}
}  // namespace

TEST_CASE("errors of messages from GPU to GPU end both devices", "[nccl]") {
  if (under_mpi()) return;
  const auto fail = [](const std::map<std::string, int>& functions) {
    stand_in::locked([&] { return stand_in::world.failing = functions, detail::nccl::Result::success; });
  };
  const auto sends = [](Device& device, Communicator& group) { group.send(on_device<f32>(device, 4), 1); };
  const auto receives = [](Device& device, Communicator& group) {
    const Buffer there = on_device<f32>(device, 4);
    group.recv(there, 0).wait();
    static_cast<void>(read<f32>(device, there));
  };
  // A sender that ends, fails, or is late.
  CHECK(error_between([](Device&, Communicator&) {}, receives)
            .starts_with("recv: device 0 (rank 0 of 2) has returned without taking part"));
  CHECK(error_between([](Device&, Communicator&) { throw Error("my own"); }, receives) == "my own");
  std::string text = error_between([](Device&, Communicator& group) { group.barrier(); }, receives);
  CHECK(text.find("collective timeout of 1.0 s") != std::string::npos);
  CHECK(text.find("16 bytes in recv at") != std::string::npos);
  // A sender whose receiver fails.
  CHECK(error_between([&](Device& device, Communicator& group) { sends(device, group), group.barrier(); },
                      [](Device&, Communicator&) { throw Error("my own"); }) == "my own");
  // NCCL's own errors: in the call, and late.
  const std::string words = " failed: unhandled cuda error; SHARDLIB_NCCL=0 communicates without NCCL";
  text = error_between(
      [&](Device& device, Communicator& group) {
        fail({{"ncclSend", 0}});
        sends(device, group);
      },
      receives);
  fail({});
  CHECK(text.starts_with("send of 16 bytes to rank 1 at "));
  CHECK(text.ends_with(": ncclSend" + words));
  for (const bool by_time : {false, true}) {
    text = error_between(
        [&](Device& device, Communicator& group) {
          fail({{"stuck", 0}, {by_time ? "none" : "asynchronous", 1}});
          sends(device, group);
        },
        receives);
    fail({});
    INFO(text);
    CHECK(text.find(": recv of 16 bytes from rank 0: ") != std::string::npos);
    CHECK(text.find(by_time ? "the operation of NCCL has not ended after 1 seconds (--collective-timeout)" : words) !=
          std::string::npos);
    CHECK(text.ends_with(" (device 1 (d=1) of mesh d=2)"));
  }
}

TEST_CASE("members that cannot be connected end their communicators of NCCL", "[nccl]") {
  if (under_mpi()) return;
  const Apart apart;
  const Temporarily nccl(tuning.nccl, &stand_in::functions);
  // The receiver of the first connection does not come to where NCCL connects the two.
  const Temporarily absent(stand_in::world.failing, std::map<std::string, int>{{"absent", 1}});
  on_mesh("d=2",
          [](const DevicePtr& device) {
            const std::string text = error_of([&] { set_direct(device->everybody(), true); });
            expect(text.find("ncclCommInitRank has not ended after 1 seconds") != std::string::npos, text);
            stand_in::locked([&] {
              const auto mine = std::ranges::find_if(stand_in::world.comms.rbegin(), stand_in::world.comms.rend(),
                                                     [&](const auto& comm) { return comm->rank == device->rank(); });
              expect((*mine)->has_ended, "the error has ended it");
              return detail::nccl::Result::success;
            });
          },
          {.kind = DeviceKind::simulated, .watchdog = {.timeout = std::chrono::milliseconds(1000)}});
  CHECK(take_faults().empty());
}

namespace {
/// Notes the lines of the messages that it is given.
class LinesOfMessages final : public Communicator {
 public:
  explicit LinesOfMessages(std::vector<unsigned>& lines) : lines_(lines) {}
  [[nodiscard]] int rank() const override { return 0; }
  [[nodiscard]] int size() const override { return 1; }
  [[nodiscard]] bool takes_rows() const override { return false; }
  [[nodiscard]] bool has_views(std::size_t /*bytes*/) const override { return false; }

 private:
  Request note(const detail::OpInfo& op) {
    lines_.push_back(op.site.line());
    return {};
  }
  Request start_collective(const detail::CollectiveCall&, const detail::OpInfo& op, const Operands&) override {
    return note(op);
  }
  Request start_send(const Buffer&, int, const detail::OpInfo& op) override { return note(op); }
  Request start_recv(const Buffer&, int, const detail::OpInfo& op) override { return note(op); }

  std::vector<unsigned>& lines_;
};
}  // namespace

TEST_CASE("a message through host memory has the line of its call", "[nccl]") {
  const auto pool = Pool::make(Region::make_simulated());
  std::vector<unsigned> lines;
  const auto group = detail::nccl::group(
      std::make_unique<StagedCommunicator>(std::make_unique<LinesOfMessages>(lines), Pool::make()),
      {.library = {.functions = &stand_in::functions}, .pool = pool, .stream = pool->device_memory()->make_stream()});
  const Buffer block = pool->allocate(4);
  const unsigned line = __LINE__;
  group->send(block, 0);
  group->recv(block, 0).wait();
  CHECK(lines == std::vector{line + 1, line + 2});
}

TEST_CASE("messages from GPU to GPU must agree on the length", "[nccl]") {
  if (under_mpi()) return;
  const Apart apart;
  const Temporarily nccl(tuning.nccl, &stand_in::functions);
  const std::string text = error_of([&] {
    on_mesh("d=2",
            [](const DevicePtr& device) {
              Communicator& group = device->everybody();
              set_direct(group, true);
              if (group.rank() == 0)
                group.send(on_device<f32>(*device, 4), 1);
              else
                group.recv(on_device<f32>(*device, 5), 0).wait();
            },
            {.kind = DeviceKind::simulated});
  });
  // The stand-in, unlike NCCL, compares the lengths itself, if it has both calls before the receiver waits.
  const bool seen_first =
      take_faults().size() > 0 && text.find("ncclGroupEnd failed: invalid usage") != std::string::npos;
  CHECK((seen_first ||
         text == "recv from rank 0: 16 bytes were sent, but 20 were expected: send and recv must agree on the size"));
}

namespace {
/// The bytes of all leaves.
template <class T>
std::vector<std::byte> bytes_of(const T& tree) {
  std::vector<std::byte> results;
  for_each_leaf(
      [&](std::string_view, const auto& leaf) {
        const auto values = fetch(leaf).data;
        const auto* const bytes = reinterpret_cast<const std::byte*>(values.data());
        results.insert(results.end(), bytes, bytes + values.size() * sizeof values[0]);
      },
      tree);
  return results;
}

/// f(device, measured) has the same bytes by NCCL as through host memory. What it passes to `measured` takes `shard`
/// bytes of host memory there, and hardly any by NCCL.
template <class F>
void check_takes_no_host_memory(const std::string& mesh, std::size_t shard, const F& f) {
  const Apart apart;
  const auto devices = static_cast<std::size_t>(device_count(parse_mesh(mesh)));
  std::vector<std::size_t> taken(2 * devices);
  const auto body = [&](std::size_t way) {
    return [&, way](Device& device) {
      return f(device, [&, way](const auto& measured) {
        device.host_pool()->reset_peak();
        const std::size_t live = device.host_pool()->stats().live;
        auto result = measured();
        taken[2 * static_cast<std::size_t>(device.rank()) + way] = device.host_pool()->stats().peak - live;
        return result;
      });
    };
  };
  std::mutex mutex;
  Results by_host, by_nccl;
  on_mesh(mesh, collecting(by_host, mutex, body(0)), {.kind = DeviceKind::simulated});
  on_nccl(mesh, collecting(by_nccl, mutex, body(1)));
  CHECK(by_host == by_nccl);
  for (std::size_t r = 0; r < devices; ++r) {
    CHECK(taken[2 * r] >= shard);
    CHECK(taken[2 * r + 1] < shard / 4);
  }
}
}  // namespace

TEST_CASE("ring attention by NCCL sends its keys, values and cotangents from GPU to GPU", "[nccl]") {
  if (under_mpi()) return;
  struct Operands {
    Tensor<f32, "B L/s D"> q, k, v;
  };
  check_takes_no_host_memory("s=3", 2 * 16 * 32 * sizeof(f32), [](Device& device, const auto& measured) {
    const Mesh<"s"> mesh(DevicePtr::share(&device));
    const Sizes sizes{{"B", 2}, {"L", 48}, {"D", 32}};
    const auto made = [&](std::uint64_t key) { return random_normal<f32, "B L/s D">(mesh, sizes, {key, 0}); };
    const Operands operands{made(1), made(2), made(3)};
    const auto loss_of = [](const Operands& x) {
      return sum<"B L/s D -> +s">(gelu(causal_attention<"L", "D", over<"s">>(x.q, x.k, x.v)));
    };
    return bytes_of(measured([&] { return value_and_grad(mesh, loss_of, operands).second; }));
  });
}

TEST_CASE("einsums by NCCL shift their shards from GPU to GPU", "[nccl]") {
  if (under_mpi()) return;
  struct Operands {
    Tensor<f32, "L M/t"> x;
    Tensor<f32, "M F/t"> up;
    Tensor<f32, "F/t M"> down;
  };
  const int sent = launched(stand_in::Kind::send), received = launched(stand_in::Kind::recv);
  check_takes_no_host_memory("t=3", 64 * 32 * sizeof(f32), [](Device& device, const auto& measured) {
    const Mesh<"t"> mesh(DevicePtr::share(&device));
    const Sizes sizes{{"L", 64}, {"M", 96}, {"F", 48}};
    const Operands operands{random_normal<f32, "L M/t">(mesh, sizes, {1, 0}),
                            random_normal<f32, "M F/t">(mesh, sizes, {2, 0}),
                            random_normal<f32, "F/t M">(mesh, sizes, {3, 0})};
    const auto loss_of = [](const Operands& o) {
      const auto h = gelu(einsum_unreduced<"L M, M F/t -> L F/t">(gathering<over<"t">>(o.x), o.up));
      return sum<"L M/t -> +t">(gelu(einsum_scatter<"L F/t, F/t M -> L M/t">(h, o.down)));
    };
    return bytes_of(measured([&] { return value_and_grad(mesh, loss_of, operands).second; }));
  });
  // On each of three devices two shifts, for both einsums, and backward for their shards, which travel once for the
  // result of einsum_scatter, and for each operand of the other einsum.
  CHECK(launched(stand_in::Kind::send) == sent + 3 * 2 * 5);
  CHECK(launched(stand_in::Kind::recv) == received + 3 * 2 * 5);
}

TEST_CASE("rows that are counted go by NCCL from GPU to GPU", "[nccl]") {
  if (under_mpi()) return;
  const int sent = launched(stand_in::Kind::send), received = launched(stand_in::Kind::recv);
  check_takes_no_host_memory("e=3", 20 * 64 * sizeof(f32), [](Device& device, const auto& measured) {
    const Mesh<"e"> mesh(DevicePtr::share(&device));
    // The last place has no rows for the first device, so no message goes there.
    const auto counts = place<Tensor<i32, "P/e X">>(
        mesh, HostArray<i32>({6, 3}, {5, 10, 11, 6, 10, 9, 4, 3, 12, 6, 7, 8, 0, 25, 7, 0, 4, 8}));
    const auto received_counts = all_to_all<"P/e X -> P X/e">(counts);
    const auto rows = random_normal<f32, "R/e M">(mesh, {{"R", 180}, {"M", 64}}, {1, 0});
    const auto loss_of = [&](const Tensor<f32, "R/e M">& x) {
      return sum<"S/e M -> +e">(gelu(ragged_all_to_all<"R/e M -> S/e M">(x, counts, received_counts, {{"S", 300}})));
    };
    return bytes_of(measured([&] { return value_and_grad(mesh, loss_of, rows).second; }));
  });
  constexpr int of_counts = 3 * 3;                                    // all_to_all
  CHECK(launched(stand_in::Kind::send) == sent + of_counts + 2 * 5);  // forward and backward
  CHECK(launched(stand_in::Kind::recv) == received + of_counts + 2 * 5);
}

TEST_CASE("sums of NCCL are taken where the program asks for them, and maxima never", "[nccl]") {
  using stand_in::Kind;
  const auto body = [](const DevicePtr& device) {
    Communicator& group = device->everybody();
    const std::size_t n = 3, block = 1000;
    const auto mine = on_device(*device, rough_values(device->rank(), n * block));
    const Buffer sum = on_device<f32>(*device, n * block), part = on_device<f32>(*device, block);
    group.all_reduce(mine, sum, DType::f32, Reduction::sum).wait();
    group.reduce_scatter(mine, part, DType::f32, Reduction::sum).wait();
    std::vector<f32> expected(n * block);
    for (int r = 0; r < 3; ++r) {  // in the stand-in's order
      const auto theirs = rough_values(r, n * block);
      for (std::size_t i = 0; i < n * block; ++i) expected[i] += theirs[i];
    }
    expect_equal(read<f32>(*device, sum), expected);
    const auto first = expected.begin() + static_cast<std::ptrdiff_t>(block) * group.rank();
    expect_equal(read<f32>(*device, part), std::vector<f32>(first, first + static_cast<std::ptrdiff_t>(block)));
    std::vector<f32> with_nan{1, 2};
    if (device->rank() == 1) with_nan[1] = std::numeric_limits<f32>::quiet_NaN();
    const Buffer largest = on_device<f32>(*device, 2);
    group.all_reduce(on_device(*device, with_nan), largest, DType::f32, Reduction::max).wait();
    const auto values = read<f32>(*device, largest);
    expect(values[0] == 1 && std::isnan(values[1]));
  };
  const int before = launched(Kind::all_reduce), scattered = launched(Kind::reduce_scatter);
  on_nccl("d=3", body, GpuSums::nccl);
  if (under_mpi()) return;
  CHECK(launched(Kind::all_reduce) == before + 3);
  CHECK(launched(Kind::reduce_scatter) == scattered + 3);
  CHECK(error_of<UsageError>([] {
          launch({{"d", 2}}, [](const DevicePtr&) {}, {.sums = GpuSums::nccl});
        }) == "--sums nccl: only GPUs have NCCL: add --device gpu, or leave --sums out");
}

TEST_CASE("a plan counts the scratch memory of sums by NCCL", "[nccl]") {
  on_nccl("d=3", [](const DevicePtr& device) {
    Communicator& group = device->everybody();
    const auto pool = Pool::make(Region::make_meta());
    DryCommunicator dry(group.rank(), 3, Peers::gpus, pool);
    for (const std::size_t n : {std::size_t{1}, std::size_t{2'000}, std::size_t{3'001}, std::size_t{30'000}}) {
      const Buffer mine = on_device<f32>(*device, 3 * n), part = on_device<f32>(*device, n);
      const Buffer result = on_device<f32>(*device, n), planned_result = pool->allocate(n * sizeof(f32));
      const Buffer planned_mine = pool->allocate(3 * n * sizeof(f32)), planned_part = pool->allocate(n * sizeof(f32));
      const auto same = [&](const auto& f) {
        const std::size_t taken = peak(device, [&] { f(group, mine, part, result); });
        pool->reset_peak();
        const std::size_t before = pool->stats().live;
        f(dry, planned_mine, planned_part, planned_result);
        expect(taken == pool->stats().peak - before,
               show(taken) + " bytes in place of " + show(pool->stats().peak - before));
        return taken;
      };
      const auto scattered = same([](Communicator& by, const Buffer& all, const Buffer&, const Buffer& one) {
        by.reduce_scatter(all, one, DType::f32, Reduction::sum).wait();
      });
      expect(scattered >= 3 * n * sizeof(f32));
      const auto reduced = same([](Communicator& by, const Buffer&, const Buffer& one, const Buffer& sum) {
        by.all_reduce(one, sum, DType::f32, Reduction::max).wait();
      });
      expect(reduced >= n * sizeof(f32));
      expect(same([](Communicator& by, const Buffer& all, const Buffer& one, const Buffer&) {
               by.all_gather(one, all).wait();
             }) == 0);
    }
  });
}

TEST_CASE("requests of NCCL may be waited for in any order, tested and dropped", "[nccl]") {
  on_nccl("d=2,t=2", [](const DevicePtr& device) {
    constexpr std::size_t operations = 6, count = 3000;
    for (std::size_t round = 0; round < 3; ++round) {
      std::vector<Request> requests;
      std::vector<Buffer> results;
      for (std::size_t k = 0; k < operations; ++k) {
        Communicator& group = device->group({k % 2 == 0 ? "d" : "t"});
        const auto value = static_cast<f32>(group.rank() + 10 * static_cast<int>(k));
        results.push_back(on_device<f32>(*device, count));
        requests.push_back(group.all_reduce(on_device(*device, std::vector<f32>(count, value)), results.back(),
                                            DType::f32, Reduction::max));
      }
      for (std::size_t k = 0; k < operations; ++k)
        requests[(k + round * static_cast<std::size_t>(device->rank())) % operations].wait();
      for (std::size_t k = 0; k < operations; ++k)
        expect_equal(read<f32>(*device, results[k]), std::vector<f32>(count, static_cast<f32>(10 * k + 1)));
    }
    Communicator& group = device->everybody();
    const Buffer polled = on_device<f32>(*device, 4), dropped = on_device<f32>(*device, 4);
    Request request = group.all_gather(on_device(*device, std::vector<f32>{static_cast<f32>(device->rank())}), polled);
    while (!request.test()) std::this_thread::yield();
    request.wait();
    expect_equal(read<f32>(*device, polled), {0, 1, 2, 3});
    {
      Request left = group.all_gather(on_device(*device, std::vector<f32>{1}), dropped);
      left.drop();  // the buffers live until the stream has used them
    }
    group.barrier();
    group.all_gather(on_device(*device, std::vector<f32>{2}), on_device<f32>(*device, 4)).wait();
    expect_equal(read<f32>(*device, dropped), {1, 1, 1, 1});
  });
}

TEST_CASE("a device that ends after a dropped request serves the others", "[nccl]") {
  if (under_mpi()) return;
  on_nccl("d=2", [](const DevicePtr& device) {
    Communicator& group = device->everybody();
    const Buffer sums = on_device<f32>(*device, 2);
    group.all_reduce(on_device(*device, std::vector<f32>{1, 2}), sums, DType::f32, Reduction::sum).wait();
    Request request = group.all_gather(on_device(*device, std::vector<f32>{static_cast<f32>(device->rank())}), sums);
    if (device->rank() == 0) return request.drop();
    request.wait();
    expect_equal(read<f32>(*device, sums), {0, 1});
  });
}

TEST_CASE("with several GPUs in a process none goes on before all have made a call of NCCL", "[nccl]") {
  if (under_mpi()) return;
  using namespace std::chrono_literals;
  static std::atomic<int> connected, started;
  connected = started = 0;
  auto functions = stand_in::functions;
  functions.CommInitRankConfig = [](ncclComm** comm, int ranks, detail::nccl::UniqueId id, int rank,
                                    detail::nccl::Config* config) {
    const auto result = stand_in::CommInitRankConfig(comm, ranks, id, rank, config);
    if (rank == 1) std::this_thread::sleep_for(50ms);
    ++connected;
    return result;
  };
  functions.AllGather = [](const void* from, void* to, std::size_t count, detail::nccl::Type type, ncclComm* comm,
                           CUstream_st* stream) {
    if (connected < 2) stand_in::locked([] { return stand_in::fault("ncclAllGather before all have connected"); });
    if (comm->rank == 1) std::this_thread::sleep_for(50ms);
    const auto result = stand_in::AllGather(from, to, count, type, comm, stream);
    ++started;
    return result;
  };
  on_nccl(
      "d=2",
      [](const DevicePtr& device) {
        for (int round = 1; round <= 2; ++round) {
          const Buffer all = on_device<f32>(*device, 8);
          Request request = device->everybody().all_gather(on_device<f32>(*device, 4), all);
          expect(started >= 2 * round, show(started.load()) + " calls after round " + show(round));
          request.wait();
        }
      },
      GpuSums::tree, functions);
  using Members = std::vector<detail::nccl::Member>;
  CHECK(detail::nccl::shares_process(Members{{.process = 1}, {.process = 2}, {.process = 1}}));
  CHECK(!detail::nccl::shares_process(Members{{.process = 1}, {.process = 2}}));
}

TEST_CASE("a device that ends before another one calls a collective of NCCL does not leave it waiting", "[nccl]") {
  if (under_mpi()) return;
  const std::string text = error_of([] {
    on_nccl("d=2", [](const DevicePtr& device) {
      const auto gather = [&] {
        device->everybody().all_gather(on_device<f32>(*device, 4), on_device<f32>(*device, 8)).wait();
      };
      gather();
      if (device->rank() == 0) gather();
    });
  });
  CHECK(text.starts_with("all_gather: device 1 (rank 1 of 2) has returned without taking part"));
  CHECK(take_faults().empty());
}

TEST_CASE("the stand-in for NCCL finds a call that does not follow the device's kernels", "[nccl]") {
  if (under_mpi()) return;
  Ranks ranks(1);
  CHECK(stand_in::AllGather(ranks[0].block(4), ranks[0].block(4), 4, u8s, ranks[0].comm, ranks[0].stream->handle()) !=
        stand_in::Result::success);
  CHECK(fault() == "ncclAllGather of 4 elements of type 1 does not follow the kernels of its device");
  ranks.abort();
}

TEST_CASE("devices out of step are told so before NCCL gets their calls", "[nccl]") {
  if (under_mpi()) return;
  const auto error = [](const std::function<void(Device&, Communicator&)>& f) {
    std::string text =
        error_of([&] { on_nccl("d=2", [&](const DevicePtr& device) { f(*device, device->everybody()); }); });
    CHECK(take_faults() == std::vector<std::string>{});
    return text;
  };
  const std::string order = ": every device of a group must make the same calls in the same order";
  std::string text = error([](Device& device, Communicator& group) {
    const Buffer mine = on_device<f32>(device, 4), all = on_device<f32>(device, 8);
    if (group.rank() == 0)
      group.all_gather(mine, all).wait();
    else
      group.all_to_all(mine, on_device<f32>(device, 4)).wait();
  });
  CHECK(text.find("all_gather of 16 bytes by NCCL") != std::string::npos);
  CHECK(text.find("all_to_all of 16 bytes by NCCL") != std::string::npos);
  CHECK(text.ends_with(order));
  text = error([](Device& device, Communicator& group) {
    const auto count = static_cast<std::size_t>(4 + group.rank());
    group.all_reduce(on_device<f32>(device, count), on_device<f32>(device, count), DType::f32, Reduction::sum).wait();
  });
  CHECK(text.find("all_reduce of 16 bytes (f32 sum) by NCCL") != std::string::npos);
  CHECK(text.find("all_reduce of 20 bytes (f32 sum) by NCCL") != std::string::npos);
  text = error([](Device& device, Communicator& group) {
    group.shift(on_device<f32>(device, 4), on_device<f32>(device, 4), 1 + group.rank()).wait();
  });
  CHECK(text.find("shift of 16 bytes by 1 by NCCL") != std::string::npos);
  CHECK(text.find("shift of 16 bytes by 0 by NCCL") != std::string::npos);
  CHECK(text.ends_with(order));
  text = error([](Device& device, Communicator& group) {
    if (group.rank() == 0) group.all_gather(on_device<f32>(device, 4), on_device<f32>(device, 8)).wait();
  });
  CHECK(text.starts_with("all_gather: device 1 (rank 1 of 2) has returned without taking part"));
}

TEST_CASE("an error of NCCL names the op, the call and NCCL's words, and the others end, too", "[nccl]") {
  if (under_mpi()) return;
  const auto failing = [](const std::map<std::string, int>& functions, const DeviceBody& body) {
    const Temporarily fails(stand_in::world.failing, functions);
    std::string text = error_of([&] { on_nccl("d=3", body); });
    CHECK(take_faults() == std::vector<std::string>{});  // such as a use of what was aborted
    return text;
  };
  const auto gather_or_fail = [](const DevicePtr& device, bool fails) {
    const Buffer all = on_device<f32>(*device, 12);
    Request request = device->everybody().all_gather(on_device<f32>(*device, 4), all);
    if (fails) throw Error("my own");
    request.wait();
  };
  const auto gather = [&](const DevicePtr& device) { gather_or_fail(device, false); };
  const std::string words = " failed: unhandled cuda error; SHARDLIB_NCCL=0 communicates without NCCL";
  std::string text = failing({{"ncclAllGather", 1}}, gather);
  CHECK(text.starts_with("all_gather of 16 bytes at "));
  CHECK(text.ends_with(": ncclAllGather" + words));
  text = failing({{"stuck", 1}, {"asynchronous", 1}}, gather);
  CHECK(text.starts_with("all_gather of 16 bytes at "));
  CHECK(text.ends_with(": an operation of NCCL" + words));
  // The operations of the others are in their streams, and wait, when this device fails.
  text = failing({{"stuck", 1}}, [&](const DevicePtr& device) { gather_or_fail(device, device->rank() == 1); });
  CHECK(text == "my own");
  text = failing({{"ncclGroupEnd", 1}}, [](const DevicePtr& device) {
    const Mesh<"d"> mesh(device);
    const auto x = random_normal<f32, "B/d M">(mesh, {{"B", 12}, {"M", 3000}}, RandomKey{1, 0});
    const auto y = all_to_all<"B/d M -> B M/d">(x);
    expect(!fetch(y).data.empty());
  });
  CHECK(text.starts_with("all_to_all<`B/d M -> B M/d`> at "));
  CHECK(text.ends_with(": all_to_all of 48000 bytes: ncclGroupEnd" + words + " (device 1 (d=1) of mesh d=3)"));
  text = failing({{"ncclCommInitRank", 2}}, gather);
  CHECK(text.starts_with("all_gather of 16 bytes at "));
  CHECK(text.find(": ncclCommInitRank failed: ") != std::string::npos);
}

TEST_CASE("the host goes on while the device waits for NCCL", "[nccl]") {
  const auto stuck = [](bool is) {
    stand_in::locked([is] {
      is ? static_cast<void>(stand_in::world.failing["stuck"] = 0) : stand_in::world.failing.clear();
      return detail::nccl::Result::success;
    });
  };
  stuck(true);
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    const Temporarily early(tuning.simulated_seed, seed);
    on_nccl("d=2", [&](const DevicePtr& device) {
      const auto pool = device->pool();
      const Exec exec = device->exec();
      const auto rank = static_cast<f32>(device->rank());
      Buffer mine = on_device(*device, std::vector<f32>{rank}), all = on_device<f32>(*device, 2);
      const Buffer sums = on_device<f32>(*device, 2), first = on_device<f32>(*device, 2);
      device->everybody().barrier();
      if (device->rank() == 0) stuck(true);
      device->everybody().barrier();
      device->everybody().all_gather(mine, all).wait();
      // Kernels of the device, operations of NCCL and the next owners of the blocks come after the gather.
      exec.copy(first.data(), all.data(), all.bytes());
      device->everybody().all_reduce(all, sums, DType::f32, Reduction::sum).wait();
      mine = all = {};
      const Buffer next = pool->allocate(sizeof(f32)), after = pool->allocate(2 * sizeof(f32));
      exec.zero(next.data(), next.bytes());
      exec.zero(after.data(), after.bytes());
      device->everybody().barrier();
      if (device->rank() == 0) stuck(false);
      expect_equal(read<f32>(*device, first), {0, 1});
      expect_equal(read<f32>(*device, sums), {0, 2});
      expect_equal(read<f32>(*device, after), {0, 0});
    });
  }
  stuck(false);
}

namespace {
/// The error of a step whose first gather fails or hangs on device 1, which then goes on as far as it can.
std::string late_error(const std::map<std::string, int>& failing, int& line,
                       const std::function<void(const Tensor<f32, "A">&)>& goes_on) {
  const Temporarily fails(stand_in::world.failing, failing);
  const Temporarily nccl(tuning.nccl, &stand_in::functions);
  std::string text = error_of([&] {
    on_mesh("d=2",
            [&](const DevicePtr& device) {
              const Mesh<"d"> mesh(device);
              const auto x = full<f32, "A/d">(mesh, {{"A", 8}}, 1);
              line = __LINE__ + 1;
              const auto whole = all_gather<"A/d -> A">(x);
              goes_on(whole * 2.0);
            },
            {.kind = DeviceKind::simulated, .watchdog = {.timeout = std::chrono::milliseconds(1000)}});
  });
  CHECK(take_faults() == std::vector<std::string>{});
  return text;
}
}  // namespace

TEST_CASE("an error of NCCL that is found late names its op, not the one that waits", "[nccl]") {
  if (under_mpi()) return;
  const std::map<std::string, int> fails{{"stuck", 1}, {"asynchronous", 1}}, hangs{{"stuck", 1}};
  const std::string failed =
      "an operation of NCCL failed: unhandled cuda error; SHARDLIB_NCCL=0 communicates without NCCL";
  const std::string late =
      "the operation of NCCL has not ended after 1 seconds (--collective-timeout); NCCL_DEBUG=INFO shows which links "
      "NCCL uses";
  using Whole = Tensor<f32, "A">;
  const std::vector<std::function<void(const Whole&)>> all{
      [](const Whole& x) { static_cast<void>(item(sum<"A -> ">(x))); },  // reads
      [](const Whole&) {},                                               // ends
      [](const Whole& x) {                                               // computes more than fits in a queue
        auto y = x;
        for (int i = 0; i < 3000; ++i) y = y + x;
        throw Failure("3000 kernels behind what hangs");
      }};
  for (const auto& goes_on : all) {
    for (const bool by_time : {false, true}) {
      int line = 0;
      const std::string text = late_error(by_time ? hangs : fails, line, goes_on);
      const std::string start =
          "all_gather<`A/d -> A`> at " + std::string(__FILE__) + ":" + show(line) + ": all_gather of 16 bytes: ";
      INFO(text);
      CHECK(text.starts_with(start + (by_time ? late : failed) + " (device "));
      CHECK(text.ends_with(" of mesh d=2)"));
    }
  }
  // The next collective finds it, too, but not the time: nobody waits for that yet.
  int line = 0;
  const std::string text = late_error(fails, line, [](const Whole& x) {
    static_cast<void>(all_reduce<"A +d -> A">(to_partial<"A -> A +d">(x)));
    throw Failure("it went on");
  });
  CHECK(text.find(failed) != std::string::npos);
}

TEST_CASE("a member that fails ends those whose devices wait for it in NCCL", "[nccl]") {
  if (under_mpi()) return;
  const Temporarily stuck(stand_in::world.failing, std::map<std::string, int>{{"stuck", 1}});
  const std::string text = error_of([] {
    on_nccl("d=2", [](const DevicePtr& device) {
      const Buffer all = on_device<f32>(*device, 8);
      device->everybody().all_gather(on_device<f32>(*device, 4), all).wait();
      if (device->rank() == 1) throw Error("my own");
      static_cast<void>(read<f32>(*device, all));
    });
  });
  CHECK(text == "my own");
  CHECK(take_faults().empty());
}

TEST_CASE("a device that waits too long for NCCL says so", "[nccl]") {
  if (under_mpi()) return;
  const Temporarily stuck(stand_in::world.failing, std::map<std::string, int>{{"stuck", 0}});
  const Temporarily nccl(tuning.nccl, &stand_in::functions);
  const std::string text = error_of([] {
    on_mesh("d=2",
            [](const DevicePtr& device) {
              const Buffer all = on_device<f32>(*device, 8);
              device->everybody().all_gather(on_device<f32>(*device, 4), all).wait();
            },
            {.kind = DeviceKind::simulated, .watchdog = {.timeout = std::chrono::milliseconds(1000)}});
  });
  CHECK(text.starts_with("all_gather of 16 bytes at "));
  CHECK(
      text.ends_with(": the operation of NCCL has not ended after 1 seconds (--collective-timeout); NCCL_DEBUG=INFO "
                     "shows which links NCCL uses"));
  CHECK(take_faults().empty());
}

TEST_CASE("a device that does not come to where NCCL connects a group does not leave the others there", "[nccl]") {
  if (under_mpi()) return;
  const DeviceBody gather = [](const DevicePtr& device) {
    const Buffer all = on_device<f32>(*device, 12);
    device->everybody().all_gather(on_device<f32>(*device, 4), all).wait();
  };
  {  // It is stuck elsewhere: the watchdog ends all.
    const Temporarily absent(stand_in::world.failing, std::map<std::string, int>{{"absent", 1}});
    const Temporarily nccl(tuning.nccl, &stand_in::functions);
    const std::string text = error_of([&] {
      on_mesh("d=3", gather, {.kind = DeviceKind::simulated, .watchdog = {.timeout = std::chrono::milliseconds(1000)}});
    });
    CHECK(text.starts_with("all_gather of 16 bytes at "));
    CHECK(
        text.ends_with(": ncclCommInitRank has not ended after 1 seconds (--collective-timeout); NCCL_DEBUG=INFO shows "
                       "which links NCCL uses"));
  }
  // It ends by an error of its own.
  auto functions = stand_in::functions;
  functions.CommInitRankConfig = [](ncclComm** comm, int ranks, detail::nccl::UniqueId id, int rank,
                                    detail::nccl::Config* config) {
    if (rank == 1) throw Error("my own");
    return stand_in::CommInitRankConfig(comm, ranks, id, rank, config);
  };
  CHECK(error_of([&] { on_nccl("d=3", gather, GpuSums::tree, functions); }) == "my own");
  CHECK(take_faults().empty());
}

// For rank_faults.py, which kills a rank of it.
TEST_CASE("ranks whose NCCL connects forever", "[.connecting]") {
  // The stand-in does not reach other processes, so none of them sees another one arrive.
  const Temporarily nccl(tuning.nccl, &stand_in::functions);
  on_mesh("d=" + show(world_size()),
          [](const DevicePtr& device) {
            device->everybody().barrier();
            std::printf("rank %d is process %d\n", world_rank(), static_cast<int>(getpid()));
            std::fflush(stdout);
            const Buffer all = on_device<f32>(*device, 4 * static_cast<std::size_t>(device->size()));
            device->everybody().all_gather(on_device<f32>(*device, 4), all).wait();
          },
          {.kind = DeviceKind::simulated});
}

TEST_CASE("an NCCL whose communicators block gives the same sums", "[nccl]") {
  on_nccl(
      "d=3",
      [](const DevicePtr& device) {
        const Buffer sums = on_device<f32>(*device, 2);
        device->everybody()
            .all_reduce(on_device(*device, std::vector<f32>{1, 2}), sums, DType::f32, Reduction::sum)
            .wait();
        expect_equal(read<f32>(*device, sums), {3, 6});
      },
      GpuSums::tree, stand_in::blocking_functions);
}

TEST_CASE("the stand-in for NCCL finds uses of a communicator whose last call is in progress", "[nccl]") {
  if (under_mpi()) return;
  Ranks ranks(1);
  detail::nccl::UniqueId id;
  stand_in::GetUniqueId(&id);
  detail::nccl::Config config;
  ncclComm* comm = nullptr;
  using detail::nccl::Result;
  CHECK(stand_in::CommInitRankConfig(&comm, 1, id, 0, &config) == Result::in_progress);
  const auto gather = [&] {
    return stand_in::AllGather(ranks[0].block(4), ranks[0].block(4), 4, u8s, comm, ranks.stream(0));
  };
  CHECK(gather() == stand_in::invalid_usage);
  CHECK(fault() == "ncclAllGather of 4 elements of type 1 while the last call of its communicator is in progress");
  Result state = Result::success;
  const auto ask = [&] {
    stand_in::CommGetAsyncError(comm, &state);
    return state;
  };
  CHECK(ask() == Result::in_progress);
  CHECK(ask() == Result::success);
  CHECK(gather() == Result::in_progress);  // not in the stream, so that a mark would not wait for it
  CHECK(gather() == stand_in::invalid_usage);
  take_faults();
  stand_in::CommDestroy(comm);
  CHECK(take_faults() ==
        std::vector<std::string>{"ncclCommDestroy while a call is in progress",
                                 "ncclCommDestroy of a communicator that does not block, without ncclCommFinalize"});
  ranks.abort();
}

TEST_CASE("a group with two devices on one GPU, or without NCCL, goes through host memory", "[nccl]") {
  if (under_mpi()) return;
  const auto region = Region::make_simulated();
  // What each of two devices says about a sum, and how often NCCL was called.
  const auto sums = [&](const std::vector<detail::nccl::Library>& libraries, bool shares, GpuSums who) {
    const auto world = std::make_shared<ThreadWorld>(2);
    const auto before = stand_in::world.launched;
    std::vector<std::string> texts(2);
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < 2; ++r)
      threads.emplace_back([&, r] {
        const auto pool = Pool::make(shares ? region : Region::make_simulated()), host = Pool::make();
        const auto group = detail::nccl::group(
            std::make_unique<StagedCommunicator>(world->group({0, 1}, static_cast<int>(r), nullptr), host),
            {.library = libraries[r],
             .sums = who,
             .pool = pool,
             .stream = pool->device_memory()->make_stream(),
             .tree = detail::reduce_in_stream});
        const Buffer there = host->allocate(sizeof(f32));
        *there.as<f32>() = static_cast<f32>(r + 1);
        const Buffer mine = pool->allocate(sizeof(f32)), sum = pool->allocate(sizeof(f32));
        copy(mine, there);
        try {
          group->all_reduce(mine, sum, DType::f32, Reduction::sum).wait();
          copy(there, sum);
          texts[r] = show(*there.as<f32>()) + (stand_in::world.launched == before ? " by the host" : " by NCCL");
        } catch (const UsageError& error) {
          texts[r] = error.what();
        }
      });
    for (std::thread& thread : threads) thread.join();
    return texts;
  };
  using Texts = std::vector<std::string>;
  const detail::nccl::Library there{.functions = &stand_in::functions}, none{.reason = "libnccl.so.2 is ill"};
  CHECK(sums({there, there}, false, GpuSums::tree) == Texts(2, "3 by NCCL"));
  CHECK(sums({there, there}, false, GpuSums::nccl) == Texts(2, "3 by NCCL"));
  CHECK(sums({there, there}, true, GpuSums::tree) == Texts(2, "3 by the host"));
  CHECK(sums({there, none}, false, GpuSums::tree) == Texts(2, "3 by the host"));
  CHECK(sums({there, there}, true, GpuSums::nccl) ==
        Texts(2,
              "--sums nccl: NCCL cannot be used, as ranks 0 and 1 of a group have the same GPU, which NCCL does not "
              "allow; change that, or leave --sums out"));
  CHECK(sums({none, there}, false, GpuSums::nccl) ==
        Texts(2, "--sums nccl: NCCL cannot be used, as libnccl.so.2 is ill; change that, or leave --sums out"));
  CHECK(take_faults().empty());
}

TEST_CASE("a note names the devices that communicate through host memory, on the first one alone", "[nccl]") {
  if (under_mpi()) return;
  const auto notes = [](const std::vector<detail::nccl::Library>& libraries, std::size_t first, std::size_t second) {
    std::vector<std::shared_ptr<Region>> gpus(libraries.size());
    for (auto& gpu : gpus) gpu = Region::make_simulated();
    gpus[second] = gpus[first];
    const auto world = std::make_shared<ThreadWorld>(static_cast<int>(libraries.size()));
    std::vector<std::string> texts(libraries.size());
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < libraries.size(); ++r)
      threads.emplace_back([&, r] {
        const auto everybody = world->group({0, 1, 2, 3}, static_cast<int>(r), nullptr);
        texts[r] = detail::nccl::note(*everybody, {.library = libraries[r], .pool = Pool::make(gpus[r])});
      });
    for (std::thread& thread : threads) thread.join();
    for (std::size_t r = 1; r < texts.size(); ++r) CHECK(texts[r] == "");
    return texts[0];
  };
  const detail::nccl::Library there{.functions = &stand_in::functions}, none{.reason = "libnccl.so.2 is ill"};
  CHECK(notes({there, there, there, there}, 0, 0) == "");
  CHECK(notes({there, there, none, none}, 0, 0) ==
        "note: the groups of devices 2, 3 communicate through host memory in place of NCCL, as libnccl.so.2 is ill\n");
  CHECK(notes({there, there, there, {.reason = "SHARDLIB_NCCL is 0"}}, 0, 2) ==
        "note: the groups of device 3 communicate through host memory in place of NCCL, as SHARDLIB_NCCL is 0\n"
        "note: groups of several of devices 0, 2 communicate through host memory in place of NCCL, as these have the "
        "same GPU, which NCCL does not allow\n");
}

TEST_CASE("a recorder shows a collective of NCCL as waiting until all have called it, and as running until its end",
          "[nccl]") {
  if (under_mpi()) return;
  using State = detail::FlightEntry::State;
  const auto world = std::make_shared<ThreadWorld>(2);
  const std::vector recorders{world->recorder(0), world->recorder(1)};
  std::barrier<> both(2);
  std::vector<std::vector<State>> states(2);
  std::vector<int> waits(2, 2);
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      const auto pool = Pool::make(Region::make_simulated()), host = Pool::make();
      const auto group = detail::nccl::group(
          std::make_unique<StagedCommunicator>(world->group({0, 1}, static_cast<int>(r), nullptr), host),
          {.library = {.functions = &stand_in::functions},
           .pool = pool,
           .stream = pool->device_memory()->make_stream(),
           .tree = detail::reduce_in_stream});
      group->record(detail::GroupRecorder(recorders[r], "d", {0, 1}));
      const Buffer mine = pool->allocate(4), all = pool->allocate(8);
      const auto note = [&] { states[r].push_back(recorders[r]->record().last.back().state); };
      // The other one calls only when this one is seen to wait.
      while (r == 1 && !recorders[0]->record().waiting) std::this_thread::yield();
      Request request = group->all_gather(mine, all);
      note();
      both.arrive_and_wait();
      waits[r] = recorders[1 - r]->record().waiting.has_value() ? 1 : 0;
      both.arrive_and_wait();
      request.wait();
      note();
      pool->device_memory()->synchronize();
      static_cast<void>(pool->device_memory()->flights()->ask());
      note();
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(states == std::vector(2, std::vector{State::running, State::running, State::ended}));
  CHECK(waits == std::vector{0, 0});
  CHECK(take_faults().empty());
}

TEST_CASE("an error says why a library cannot be used as NCCL", "[nccl]") {
  const auto absent = detail::nccl::load("libnccl-that-is-not-there.so");
  CHECK(absent.functions == nullptr);
  CHECK(absent.reason.starts_with("libnccl-that-is-not-there.so cannot be loaded (libnccl-that-is-not-there.so: "));
  CHECK(detail::nccl::load("libc.so.6").reason == "libc.so.6 has no ncclGetErrorString: it needs NCCL 2.10 or later");
  // That of a CUDA toolkit does not need a GPU for this.
  for (const std::string folder : {"/usr/local/cuda/lib", "/usr/local/cuda/lib64"})
    if (const std::string file = folder + "/libnccl.so.2"; std::filesystem::exists(file)) {
      const auto loaded = detail::nccl::load(file);
      CHECK(loaded.reason == "");
      REQUIRE(loaded.functions != nullptr);
      CHECK(std::string(loaded.functions->GetErrorString(detail::nccl::Result::success)) == "no error");
    }
  const Setting wrong("SHARDLIB_NCCL", "yes");
  CHECK(error_of<UsageError>([] { static_cast<void>(detail::nccl::is_wanted()); }) ==
        "SHARDLIB_NCCL=yes: write 0 to have GPUs communicate through host memory, or 1 for NCCL");
}

TEST_CASE("a training step waits for its device where it reads its numbers, and nowhere else", "[nccl]") {
  struct Weights {
    Tensor<f32, "M F/d"> up;
    Tensor<f32, "F M/d"> down;
  };
  /// A flight that must not be waited for until it is over.
  struct Watch final : detail::Flight {
    const bool& over;
    explicit Watch(const bool& o) : Flight(&o), over(o) {}
    bool has_ended() override { return over; }
    void check(bool waits) override {
      if (waits) throw Failure("the host waits for the device");
    }
  };
  on_nccl("d=2", [](const DevicePtr& device) {
    const Mesh<"d"> mesh(device);
    const Sizes sizes{{"B", 8}, {"M", 6}, {"F", 10}};
    Weights w{random_normal<f32, "M F/d">(mesh, sizes, {1, 0}), random_normal<f32, "F M/d">(mesh, sizes, {2, 0})};
    auto moments = AdamW().init(w);
    const auto loss_of = [](const Weights& weights, const Tensor<f32, "B/d M">& x) {
      const auto h = gelu(einsum_unreduced<"B/d M, M F -> B/d F">(x, all_gather<"M F/d -> M F">(weights.up)));
      const auto y = einsum_unreduced<"B/d F, F M -> B/d M">(h, all_gather<"F M/d -> F M">(weights.down));
      return sum<"B/d M -> +d">((y - x) * (y - x));
    };
    Region& memory = *device->pool()->device_memory();
    const auto other = memory.make_stream();
    double last = 0;
    for (std::int64_t step = 1; step <= 3; ++step) {
      bool over = false;
      detail::SimulatedStream::of(other->handle()).put({.name = "the watch", .step = [&over] { return over; }});
      other->mark()->hold_device();
      memory.flights()->add(std::make_unique<Watch>(over));
      const std::vector<f32> batch = rough_values(device->rank() + static_cast<int>(step), 8 * 6);
      const auto x = place<Tensor<f32, "B/d M">>(mesh, HostArray<f32>({8, 6}, batch));
      const auto [loss, grads] = value_and_grad(mesh, loss_of, w, x);
      const auto total = all_reduce<"+d -> ">(loss);
      // The watch begins after the update of the step before, which has read its norm. It ends where this one is read.
      stand_in::locked([&] { return over = true, detail::nccl::Result::success; });
      const double norm = global_norm(mesh, grads);
      last = item(total);
      expect(norm > 0 && last > 0);
      AdamW().update(w, moments, grads, 1e-3, 1 / norm, step, [](std::string_view) { return true; });
    }
    expect(last > 0);
  });
}

TEST_CASE("a step by NCCL has the CPU's bits", "[nccl]") {
  std::uint64_t seed = 0;
  for (const std::string mesh : {"d=2,t=2", "d=2,t=2", "d=4,t=1", "d=1,t=3"}) {
    const Temporarily early(tuning.simulated_seed, seed++);
    check_bits(mesh, [](Device& of) {
      const Mesh<"d t"> mesh(DevicePtr::share(&of));
      const Sizes sizes{{"B", 12}, {"M", 16}, {"F", 36}};
      const auto x = random_normal<f32, "B/d M">(mesh, sizes, RandomKey{1, 0});
      const auto w = random_normal<f32, "M/d F/t">(mesh, sizes, RandomKey{2, 0});
      const auto loss_of = [](const Tensor<f32, "M/d F/t">& weight, const Tensor<f32, "B/d M">& input) {
        const auto whole = all_gather<"M/d F/t -> M F/t">(weight);
        const auto h = einsum_unreduced<"B/d M, M F/t -> B/d F/t">(input, whole);
        return sum(gelu(shift<over<"d">>(h, 1)));
      };
      const auto [loss, gradient] = value_and_grad(mesh, loss_of, w, x);
      auto all = fetch(gradient).data;
      all.push_back(item(all_reduce<"+d +t -> ">(loss)));
      const auto* const bytes = reinterpret_cast<const std::byte*>(all.data());
      return std::vector<std::byte>(bytes, bytes + all.size() * sizeof(f32));
    });
  }
}
