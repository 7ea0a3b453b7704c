// Meshes, devices, and every communication of every backend: the same file runs on threads and under mpirun.
#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "shardlib/comm/collective_work.hpp"
#include "shardlib/comm/single.hpp"
#include "shardlib/comm/staged.hpp"
#include "shardlib/memory/system.hpp"
#if defined(SHARDLIB_WITH_MPI)
#include "shardlib/comm/mpi/backend.hpp"
#include "shardlib/comm/mpi/process.hpp"
#include "shardlib/comm/mpi/watch.hpp"
#endif
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

const std::vector<std::string> group_meshes{"d=1", "d=2", "d=3", "d=4", "d=8"};

std::string mesh_of(int n) {
  return "d=" + std::to_string(n);
}

Communicator& all_of(Device& device) {
  return device.group({"d"});
}

/// Rank r's element i: integers small enough for every sum to be exact in every type.
template <class T>
std::vector<T> values_at(int rank, std::size_t count) {
  std::vector<T> values;
  for (std::size_t i = 0; i < count; ++i)
    values.push_back(static_cast<T>(static_cast<float>((rank + 1) * 2 + int(i % 3))));
  return values;
}

/// The order contract written out for each size.
float tree_sum(const std::vector<float>& v) {
  switch (v.size()) {
    case 1:
      return v[0];
    case 2:
      return v[0] + v[1];
    case 3:
      return (v[0] + v[1]) + v[2];
    case 4:
      return (v[0] + v[1]) + (v[2] + v[3]);
    case 8:
      return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
    default:
      throw Failure("no formula for this size");
  }
}

std::vector<std::uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<std::uint32_t> bits;
  for (const float v : values) bits.push_back(std::bit_cast<std::uint32_t>(v));
  return bits;
}

template <class T>
std::vector<T> all_gather(Device& device, Communicator& comm, const std::vector<T>& mine) {
  const Buffer recv = make_buffer<T>(device, mine.size() * static_cast<std::size_t>(comm.size()));
  comm.all_gather(make_buffer(device, mine), recv).wait();
  return values_of<T>(recv);
}

template <class T>
std::vector<T> all_reduce(Device& device, Communicator& comm, const std::vector<T>& mine, Reduction op) {
  const T guard = static_cast<T>(77.0F);
  std::vector<T> memory(mine.size() + 8, guard);
  const Buffer recv(memory.data(), mine.size() * sizeof(T), nullptr);
  comm.all_reduce(make_buffer(device, mine), recv, dtype_v<T>, op).wait();
  expect(std::all_of(memory.end() - 8, memory.end(), [&](T v) { return v == guard; }), "written past the end");
  return values_of<T>(recv);
}

template <class T>
std::vector<T> reduce_scatter(Device& device, Communicator& comm, const std::vector<T>& mine, Reduction op) {
  const Buffer recv = make_buffer<T>(device, mine.size() / static_cast<std::size_t>(comm.size()));
  comm.reduce_scatter(make_buffer(device, mine), recv, dtype_v<T>, op).wait();
  return values_of<T>(recv);
}

template <class T>
void check_reductions(Device& device) {
  Communicator& comm = all_of(device);
  const auto n = static_cast<std::size_t>(comm.size());
  for (const std::size_t block : {std::size_t{1}, std::size_t{5}, std::size_t{3000}, std::size_t{40001}}) {
    // One element more than the group divides.
    auto mine = values_at<T>(comm.rank(), n * block + 1);
    std::vector<T> sum;
    std::vector<T> max;
    for (std::size_t i = 0; i < mine.size(); ++i) {
      sum.push_back(static_cast<T>(static_cast<float>(n * (n + 1) + n * (i % 3))));
      max.push_back(static_cast<T>(static_cast<float>(2 * n + i % 3)));
    }
    expect_equal(all_reduce(device, comm, mine, Reduction::sum), sum);
    expect_equal(all_reduce(device, comm, mine, Reduction::max), max);
    mine.pop_back();
    const auto first = static_cast<std::ptrdiff_t>(static_cast<std::size_t>(comm.rank()) * block);
    const auto last = first + static_cast<std::ptrdiff_t>(block);
    expect_equal(reduce_scatter(device, comm, mine, Reduction::sum),
                 std::vector(sum.begin() + first, sum.begin() + last));
    expect_equal(reduce_scatter(device, comm, mine, Reduction::max),
                 std::vector(max.begin() + first, max.begin() + last));
  }
}

void check_moves(Device& device, std::size_t block) {
  Communicator& comm = all_of(device);
  const int n = comm.size();
  const auto number = [](int from, int to, std::size_t i) { return static_cast<i32>(i) * 100 + from * 10 + to; };
  std::vector<i32> mine;
  std::vector<i32> gathered;
  std::vector<i32> sent;
  std::vector<i32> received;
  for (std::size_t i = 0; i < block; ++i) mine.push_back(number(comm.rank(), 0, i));
  for (int peer = 0; peer < n; ++peer) {
    for (std::size_t i = 0; i < block; ++i) {
      gathered.push_back(number(peer, 0, i));
      sent.push_back(number(comm.rank(), peer, i));
      received.push_back(number(peer, comm.rank(), i));
    }
  }
  const auto buffer_of = [&](const std::vector<i32>& values) { return device.to_device(make_buffer(device, values)); };
  const auto expect_values = [&](const Buffer& buffer, const std::vector<i32>& values) {
    expect_equal(values_of<i32>(device.to_host(buffer)), values);
  };
  const Buffer whole = buffer_of(std::vector<i32>(gathered.size())), recv = buffer_of(std::vector<i32>(sent.size()));
  comm.all_gather(buffer_of(mine), whole).wait();
  expect_values(whole, gathered);
  comm.all_to_all(buffer_of(sent), recv).wait();
  expect_values(recv, received);

  const auto block_of = [&](const std::vector<i32>& all, int rank) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>((rank + n) % n) * block);
    return std::vector(begin, begin + static_cast<std::ptrdiff_t>(block));
  };
  const Buffer from_left = buffer_of(std::vector<i32>(block));
  comm.send_recv(buffer_of(mine), (comm.rank() + 1) % n, from_left, (comm.rank() + n - 1) % n).wait();
  expect_values(from_left, block_of(gathered, comm.rank() - 1));

  for (const int places : {1, -1, 2 * n}) {
    const Buffer shifted = buffer_of(std::vector<i32>(block));
    comm.shift(buffer_of(mine), shifted, places).wait();
    expect_values(shifted, block_of(gathered, (comm.rank() - places) % n));
  }
  // Two messages to each member with a smaller number, and one back.
  Communicator::Messages messages;
  std::vector<std::pair<Buffer, std::vector<i32>>> arriving;
  const auto receive_from = [&](int peer) {
    arriving.emplace_back(buffer_of(std::vector<i32>(block)), block_of(received, peer));
    messages.receives.push_back({arriving.back().first, peer});
  };
  for (int peer = 0; peer < n; ++peer) {
    if (peer == comm.rank()) continue;
    receive_from(peer);
    messages.sends.push_back({buffer_of(block_of(sent, peer)), peer});
    if (peer > comm.rank())
      receive_from(peer);
    else
      messages.sends.push_back({buffer_of(block_of(sent, peer)), peer});
  }
  comm.exchange(messages).wait();
  for (const auto& [buffer, values] : arriving) expect_values(buffer, values);
}

/// Every ordered set of axes, the empty one included.
std::vector<std::vector<std::string_view>> ordered_sets(const std::vector<AxisSize>& axes) {
  std::vector<std::vector<std::string_view>> sets{{}};
  for (std::size_t done = 0; done < sets.size(); ++done) {
    for (const auto& [name, size] : axes) {
      auto longer = sets[done];
      if (std::ranges::count(longer, name) != 0) continue;
      longer.push_back(name);
      sets.push_back(longer);
    }
  }
  return sets;
}

std::string usage_error(const std::string& mesh) {
  return error_of<UsageError>([&] { parse_mesh(mesh); });
}

}  // namespace

TEST_CASE("parse_mesh reads axes in order") {
  CHECK(parse_mesh("").empty());
  CHECK(parse_mesh("d=4,t=2") == std::vector<AxisSize>{{"d", 4}, {"t", 2}});
  CHECK(to_string(parse_mesh("data_1=1,_t=12")) == "data_1=1,_t=12");
  CHECK(device_count(parse_mesh("")) == 1);
  CHECK(device_count(parse_mesh("d=4,t=2,p=3")) == 24);
}

TEST_CASE("parse_mesh says what is wrong") {
  CHECK(usage_error("d=4,t") == "mesh \"d=4,t\", entry 2: 't' has no '=': write name=size, as in d=4,t=2");
  CHECK(usage_error("d=4,") == "mesh \"d=4,\", entry 2: '' has no '=': write name=size, as in d=4,t=2");
  CHECK(usage_error("d=x") == "mesh \"d=x\", entry 1: 'x' is not a size: write a whole number, as in d=4,t=2");
  CHECK(usage_error("d=") == "mesh \"d=\", entry 1: '' is not a size: write a whole number, as in d=4,t=2");
  CHECK(usage_error("d=2.5") == "mesh \"d=2.5\", entry 1: '2.5' is not a size: write a whole number, as in d=4,t=2");
  CHECK(usage_error("d=0") == "mesh \"d=0\", entry 1: axis 'd' has size 0: give it at least 1");
  CHECK(usage_error("t=1,d=-3") == "mesh \"t=1,d=-3\", entry 2: axis 'd' has size -3: give it at least 1");
  CHECK(usage_error("d=2,d=2") == "mesh \"d=2,d=2\", entry 2: axis 'd' is given twice: name each axis once");
  CHECK(usage_error("2d=2") ==
        "mesh \"2d=2\", entry 1: '2d' is not an axis name: use letters, digits and _, not starting with a digit");
  CHECK(usage_error("d=2, t=2") ==
        "mesh \"d=2, t=2\", entry 2: ' t' is not an axis name: use letters, digits and _, not starting with a digit");
  CHECK(usage_error("=2") ==
        "mesh \"=2\", entry 1: '' is not an axis name: use letters, digits and _, not starting with a digit");
  CHECK(usage_error("a=65536,b=65536") == "mesh \"a=65536,b=65536\", entry 2: too many devices: choose smaller sizes");
}

TEST_CASE("a device knows its place") {
  on_mesh("d=2,t=2", [](const DevicePtr& device) {
    expect(device->rank() == device->axis_index("d") * 2 + device->axis_index("t"));
    expect(device->size() == 4 && device->size("d") == 2);
    expect_error([&] { return device->size("q"); }, "unknown axis 'q': the mesh is d=2,t=2");
    expect_error([&] { device->group({"d", "q"}); }, "unknown axis 'q': the mesh is d=2,t=2");
    expect_error([&] { device->group({"d", "d"}); }, "group over axis 'd' twice: name each axis once");
    if (device->rank() == 1) expect(device->describe() == "device 1 (d=0,t=1) of mesh d=2,t=2", device->describe());
    expect(&device->group({"d", "t"}) == &device->group({"d", "t"}));
  });
  on_mesh("", [](const DevicePtr& device) {
    expect(device->describe() == "device 0 of the mesh without axes", device->describe());
    expect_error([&] { return device->axis_index("d"); }, "unknown axis 'd': the mesh has no axes");
    expect(device->group({}).size() == 1);
  });
}

TEST_CASE("local state is one per device and type, and ends with the launch") {
  struct Counter {
    int value = 0;
  };
  struct Owner {
    DevicePtr device;  // a cycle, which clear_local breaks
    std::shared_ptr<int> alive = std::make_shared<int>();
  };
  std::atomic<int> devices = 0;
  std::vector<std::weak_ptr<int>> seen(2);
  const bool runs = on_mesh("d=2", [&](const DevicePtr& device) {
    device->local<Counter>().value += 1;
    device->local<int>() += 5;
    all_of(*device).barrier();
    expect(device->local<Counter>().value == 1 && device->local<int>() == 5);
    device->local<Owner>().device = device;
    seen[static_cast<std::size_t>(device->rank())] = device->local<Owner>().alive;
    ++devices;
  });
  const int here = !under_mpi() ? 2 : world_rank() < 2 ? 1 : 0;
  CHECK(devices == (runs ? here : 0));
  CHECK((seen[0].expired() && seen[1].expired()));
}

TEST_CASE("groups rank their members in the order of the axes given") {
  on_meshes({"a=2,b=2", "a=2,b=3", "a=2,b=2,c=2", "a=2,b=1,c=2"}, [](const DevicePtr& device) {
    const auto coordinates = [&](int index) {
      std::map<std::string_view, int> at;
      for (std::size_t i = device->axes().size(); i-- > 0;) {
        at[device->axes()[i].name] = index % device->axes()[i].size;
        index /= device->axes()[i].size;
      }
      return at;
    };
    for (const auto& axes : ordered_sets(device->axes())) {
      std::map<std::vector<int>, i32> members;  // sorted by the coordinates, first axis first
      for (int other = 0; other < device->size(); ++other) {
        auto rest = coordinates(other);
        auto mine = coordinates(device->rank());
        std::vector<int> place;
        for (const auto axis : axes) {
          place.push_back(rest[axis]);
          rest.erase(axis);
          mine.erase(axis);
        }
        if (rest == mine) members[place] = other;
      }
      std::vector<i32> expected;
      for (const auto& [place, index] : members) expected.push_back(index);
      Communicator& comm = device->group(axes);
      expect(comm.size() == static_cast<int>(expected.size()));
      expect(expected[static_cast<std::size_t>(comm.rank())] == device->rank());
      expect_equal(all_gather<i32>(*device, comm, {device->rank()}), expected);
    }
  });
}

TEST_CASE("collectives and messages move the right blocks") {
  on_meshes(group_meshes, [](const DevicePtr& device) {
    for (const std::size_t block : {0U, 1U, 3U, 1000U, 50001U}) check_moves(*device, block);
  });
}

TEST_CASE("collectives and messages move the right blocks of a device's memory") {
  std::vector<bool> are_collectives(9);
  on_meshes(group_meshes,
            [&](const DevicePtr& device) {
              const bool is_collective = all_of(*device).exchanges();  // all form the group
              if (device->rank() == 0) are_collectives[static_cast<std::size_t>(device->size())] = is_collective;
            },
            {.kind = DeviceKind::cpu});
  on_meshes(group_meshes,
            [&](const DevicePtr& device) {
              for (const std::size_t block : {0U, 1U, 3U, 1000U}) check_moves(*device, block);
              if (device->rank() == 0)
                expect(all_of(*device).exchanges() == are_collectives[static_cast<std::size_t>(device->size())],
                       "a group through host memory exchanges as its group of the host");
            },
            {.kind = DeviceKind::simulated});
}

namespace {
/// A group of one member, each of whose shifts and exchanges is one collective.
class OneCollective final : public Communicator {
 public:
  std::vector<detail::Collective> kinds;
  bool on_host = true;  ///< all buffers so far
  [[nodiscard]] int rank() const override { return 0; }
  [[nodiscard]] int size() const override { return 1; }
  [[nodiscard]] bool takes_rows() const override { return false; }
  [[nodiscard]] bool has_views(std::size_t /*bytes*/) const override { return false; }
  [[nodiscard]] bool exchanges() const override { return true; }

 private:
  [[nodiscard]] bool shifts(const Buffer& /*send*/, const Buffer& /*recv*/) const override { return true; }
  void move(const Buffer& to, const Buffer& from) {
    on_host = on_host && to.device_memory() == nullptr && from.device_memory() == nullptr;
    copy(to, from);
  }
  Request start_collective(const detail::CollectiveCall& call, const detail::OpInfo&,
                           const Operands& operands) override {
    kinds.push_back(call.kind);
    if (call.kind != detail::Collective::exchange) return move(operands.recv, operands.send), Request();
    for (std::size_t i = 0; i < operands.messages->sends.size(); ++i)
      move(operands.messages->receives[i].buffer, operands.messages->sends[i].buffer);
    return {};
  }
  Request start_send(const Buffer&, int, const detail::OpInfo&) override { throw Failure("a message"); }
  Request start_recv(const Buffer&, int, const detail::OpInfo&) override { throw Failure("a message"); }
};
}  // namespace

TEST_CASE("a shift or an exchange of a device's memory through host memory is one of the host's group") {
  if (under_mpi()) return;
  on_mesh("",
          [](const DevicePtr& device) {
            auto host = std::make_unique<OneCollective>();
            const OneCollective& inner = *host;
            StagedCommunicator group(std::move(host), device->host_pool());
            const auto buffer_of = [&](const std::vector<i32>& values) {
              return device->to_device(make_buffer(*device, values));
            };
            const auto expect_values = [&](const Buffer& buffer, const std::vector<i32>& values) {
              expect_equal(values_of<i32>(device->to_host(buffer)), values);
            };
            const Buffer shifted = buffer_of({0, 0}), first = buffer_of({0}), second = buffer_of({0, 0, 0});
            group.shift(buffer_of({1, 2}), shifted, 1).wait();
            expect_values(shifted, {1, 2});
            group.exchange({{{buffer_of({3}), 0}, {buffer_of({4, 5, 6}), 0}}, {{first, 0}, {second, 0}}}).wait();
            expect_values(first, {3});
            expect_values(second, {4, 5, 6});
            using detail::Collective;
            expect(inner.kinds == std::vector{Collective::shift, Collective::exchange}, "two collectives");
            expect(inner.on_host, "all in host memory");
          },
          {.kind = DeviceKind::simulated});
}

TEST_CASE("reductions give the exact values in every type") {
  on_meshes(group_meshes, [](const DevicePtr& device) {
    check_reductions<f32>(*device);
    check_reductions<f64>(*device);
    check_reductions<i32>(*device);
    check_reductions<u32>(*device);
    check_reductions<bf16>(*device);
  });
}

TEST_CASE("sums follow the tree over the ranks, bit by bit") {
  on_meshes(group_meshes, [](const DevicePtr& device) {
    const int n = device->size();
    Communicator& comm = all_of(*device);
    for (const std::size_t block : {std::size_t{7}, std::size_t{30011}}) {
      const std::size_t count = block * static_cast<std::size_t>(n);
      std::vector<float> mine;
      std::vector<float> expected;
      bool matters = n <= 2;
      for (std::size_t i = 0; i < count; ++i) {
        std::vector<float> column;
        for (int r = 0; r < n; ++r) column.push_back(rough(r, i));
        mine.push_back(column[static_cast<std::size_t>(comm.rank())]);
        expected.push_back(tree_sum(column));
        matters = matters || expected.back() != std::accumulate(column.rbegin(), column.rend(), 0.0F);
      }
      expect(matters, "the data do not tell the orders apart");
      expect_equal(bits_of(all_reduce(*device, comm, mine, Reduction::sum)), bits_of(expected));
      const auto first = expected.begin() + static_cast<std::ptrdiff_t>(block) * comm.rank();
      const std::vector<float> slice(first, first + static_cast<std::ptrdiff_t>(block));
      expect_equal(bits_of(reduce_scatter(*device, comm, mine, Reduction::sum)), bits_of(slice));
    }
  });
}

TEST_CASE("bf16 sums are taken in f32 and rounded once") {
  const std::map<int, float> expected{{1, 256}, {2, 256}, {3, 258}, {4, 260}, {8, 264}};
  for (const auto& [n, sum] : expected) {
    on_mesh(mesh_of(n), [sum = sum](const DevicePtr& device) {
      Communicator& comm = all_of(*device);
      for (const std::size_t count : {std::size_t{24}, std::size_t{48000}}) {
        const std::vector<bf16> mine(count, bf16(comm.rank() == 0 ? 256.0F : 1.0F));
        expect_equal(all_reduce(*device, comm, mine, Reduction::sum), std::vector<bf16>(count, bf16(sum)));
        expect_equal(reduce_scatter(*device, comm, mine, Reduction::sum),
                     std::vector<bf16>(count / static_cast<std::size_t>(comm.size()), bf16(sum)));
      }
    });
  }
}

TEST_CASE("max keeps a NaN from any rank, and integer sums wrap around") {
  on_meshes(group_meshes, [](const DevicePtr& device) {
    const int n = device->size();
    Communicator& comm = all_of(*device);
    std::vector<float> mine(static_cast<std::size_t>(n), static_cast<float>(-comm.rank()));
    mine[static_cast<std::size_t>(comm.rank())] = std::numeric_limits<float>::quiet_NaN();
    for (const float v : all_reduce(*device, comm, mine, Reduction::max)) expect(std::isnan(v), show(v));
    expect_equal(all_reduce<float>(*device, comm, {static_cast<float>(-comm.rank() - 1)}, Reduction::max), {-1});

    const auto total = static_cast<u32>(n) * 0x7fffffffU;
    expect_equal(all_reduce<i32>(*device, comm, {0x7fffffff}, Reduction::sum), {static_cast<i32>(total)});
    expect_equal(all_reduce<u32>(*device, comm, {0x7fffffffU}, Reduction::sum), {total});
  });
}

TEST_CASE("requests may be waited for in any order on each device") {
  on_meshes({"a=2,b=2", "a=2,b=4", "a=3,b=1", "a=2,b=1"}, [](const DevicePtr& device) {
    constexpr std::size_t operations = 6;
    for (const std::size_t count : {std::size_t{8}, std::size_t{40000}}) {
      for (std::size_t round = 0; round < operations; ++round) {
        std::vector<Request> requests;
        std::vector<Buffer> results;
        for (std::size_t k = 0; k < operations; ++k) {
          Communicator& comm = device->group({k % 2 == 0 ? "a" : "b"});
          const auto value = static_cast<float>(comm.rank() + 10 * static_cast<int>(k));
          const Buffer send = make_buffer(*device, std::vector<float>(count, value));
          if (k < 4) {
            results.push_back(make_buffer<float>(*device, count));
            requests.push_back(comm.all_reduce(send, results.back(), DType::f32, Reduction::max));
          } else {
            results.push_back(make_buffer<float>(*device, count * static_cast<std::size_t>(comm.size())));
            requests.push_back(comm.all_gather(send, results.back()));
          }
        }
        for (std::size_t k = 0; k < operations; ++k) {
          requests[(k + round * static_cast<std::size_t>(device->rank())) % operations].wait();
        }
        for (std::size_t k = 0; k < operations; ++k) {
          const auto last = static_cast<float>(device->group({k % 2 == 0 ? "a" : "b"}).size() - 1);
          expect(values_of<float>(results[k]).back() == last + static_cast<float>(10 * k));
        }
      }
    }
  });
}

TEST_CASE("test makes progress, and a dropped request is waited for") {
  on_mesh("d=2", [](const DevicePtr& device) {
    Communicator& comm = all_of(*device);
    const std::vector<float> mine(30000, static_cast<float>(comm.rank() + 1));
    const Buffer polled = make_buffer<float>(*device, mine.size());
    const Buffer dropped = make_buffer<float>(*device, mine.size());
    Request request = comm.all_reduce(make_buffer(*device, mine), polled, DType::f32, Reduction::sum);
    while (!request.test()) std::this_thread::yield();
    request.wait();
    { const Request r = comm.all_reduce(make_buffer(*device, mine), dropped, DType::f32, Reduction::max); }
    expect_equal(values_of<float>(polled), std::vector<float>(mine.size(), 3));
    expect_equal(values_of<float>(dropped), std::vector<float>(mine.size(), 2));
  });
}

TEST_CASE("messages of a pair stay in order, sends never wait, and a device may write to itself") {
  on_meshes(group_meshes, [](const DevicePtr& device) {
    const int n = device->size();
    Communicator& comm = all_of(*device);
    constexpr int messages = 3;
    constexpr std::size_t count = 100000;  // too long for MPI to send eagerly
    const auto value = [](int from, int to, int k) { return static_cast<i32>(100 * from + 10 * to + k); };
    for (int to = 0; to < n; ++to) {
      for (int k = 0; k < messages; ++k) {
        comm.send(make_buffer(*device, std::vector<i32>(count, value(comm.rank(), to, k))), to).wait();
      }
    }
    std::vector<Request> requests;
    std::vector<Buffer> received;
    for (int from = 0; from < n; ++from) {
      for (int k = 0; k < messages; ++k) {
        received.push_back(make_buffer<i32>(*device, count));
        requests.push_back(comm.recv(received.back(), from));
      }
    }
    while (!requests.empty()) {
      requests.back().wait();
      requests.pop_back();
    }
    for (int from = 0; from < n; ++from) {
      for (int k = 0; k < messages; ++k) {
        expect_equal(values_of<i32>(received[static_cast<std::size_t>(from * messages + k)]),
                     std::vector<i32>(count, value(from, comm.rank(), k)));
      }
    }
  });
}

TEST_CASE("memory that no handle keeps alive may be overwritten once it is sent") {
  on_meshes({"d=1", "d=2"}, [](const DevicePtr& device) {
    const int n = device->size();
    Communicator& comm = all_of(*device);
    const int to = (comm.rank() + 1) % n, from = (comm.rank() + n - 1) % n;
    std::vector<i32> mine(100000, comm.rank());
    const Buffer memory(mine.data(), mine.size() * sizeof(i32), nullptr);
    expect(!memory.slice(4, 4).is_owned() && make_buffer<i32>(*device, 2).slice(4, 4).is_owned());
    comm.send(memory.slice(0, memory.bytes()), to);
    std::ranges::fill(mine, -1);
    comm.barrier();
    const Buffer received = make_buffer<i32>(*device, mine.size());
    comm.recv(received, from).wait();
    expect_equal(values_of<i32>(received), std::vector<i32>(mine.size(), from));
  });
}

TEST_CASE("buffers may be overwritten and freed once a collective is over") {
  on_meshes({"d=2", "d=4"}, [](const DevicePtr& device) {
    const int n = device->size();
    Communicator& comm = all_of(*device);
    const Buffer send = make_buffer<i32>(*device, 5000);
    const Buffer gathered = make_buffer<i32>(*device, 5000 * static_cast<std::size_t>(n));
    const Buffer sum = make_buffer<i32>(*device, 5000);
    for (i32 step = 0; step < 200; ++step) {
      std::fill_n(send.as<i32>(), 5000, step + comm.rank());
      comm.all_gather(send, gathered).wait();
      std::fill_n(send.as<i32>(), 5000, 2 * step);
      comm.all_reduce(send, sum, DType::i32, Reduction::sum).wait();
      for (int r = 0; r < n; ++r) expect(gathered.as<i32>()[5000 * r + 4999] == step + r);
      expect(sum.as<i32>()[0] == 2 * step * n && sum.as<i32>()[4999] == 2 * step * n);
    }
    const auto before = device->pool()->stats();
    for (int step = 0; step < 20; ++step) all_gather(*device, comm, std::vector<i32>(5000, step));
    comm.barrier();
    expect(device->pool()->stats().live == before.live, "a finished collective keeps memory");
  });
}

TEST_CASE("a collective completes and lets go of the buffers while a member is yet to wait for it") {
  on_mesh("d=2", [](const DevicePtr& device) {
    Communicator& comm = all_of(*device);
    const Buffer token = make_buffer<i32>(*device, 1);
    const Buffer send = make_buffer(*device, std::vector<float>(50000, 1));
    const Buffer recv = make_buffer<float>(*device, 50000);
    Request request = comm.all_reduce(send, recv, DType::f32, Reduction::sum);
    if (comm.rank() == 1) comm.recv(token, 0).wait();
    request.wait();
    expect(send.unique() && recv.unique(), "the request keeps its buffers");
    expect_equal(values_of<float>(recv), std::vector<float>(50000, 2));
    if (comm.rank() == 0) comm.send(token, 1).wait();
  });
}

TEST_CASE("large messages") {
  on_mesh("d=2", [](const DevicePtr& device) {
    Communicator& comm = all_of(*device);
    const std::size_t count = (std::size_t{80} << 20) / (is_slow() ? 8 : 1) / sizeof(u32);
    const Buffer send = make_buffer<u32>(*device, count);
    for (std::size_t i = 0; i < count; ++i) send.as<u32>()[i] = static_cast<u32>(i) * 2 + static_cast<u32>(comm.rank());
    const Buffer gathered = make_buffer<u32>(*device, 2 * count);
    const Buffer sum = make_buffer<u32>(*device, count);
    Request first = comm.all_gather(send, gathered);
    comm.all_reduce(send, sum, DType::u32, Reduction::sum).wait();
    first.wait();
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const u32 v = static_cast<u32>(i) * 2;
      wrong += gathered.as<u32>()[i] != v || gathered.as<u32>()[count + i] != v + 1 || sum.as<u32>()[i] != 2 * v + 1;
    }
    expect(wrong == 0, show(wrong) + " wrong elements");
  });
}

TEST_CASE("the blocks of a matrix's columns are gathered and scattered in place", "[rows]") {
  const auto run = [](const DevicePtr& device) {
    Communicator& comm = all_of(*device);
    const auto n = static_cast<std::size_t>(comm.size()), rank = static_cast<std::size_t>(comm.rank());
    if (!comm.takes_rows()) {
      const Buffer block = make_buffer<i32>(*device, 2), whole = make_buffer<i32>(*device, 2 * n);
      const std::string why =
          " in 2 rows: these devices share no memory: put the blocks in rank order, and leave out rows";
      expect_error([&] { comm.all_gather(block, whole, 2); }, "all_gather" + why);
      expect_error([&] { comm.reduce_scatter(whole, block, DType::i32, Reduction::sum, 2); }, "reduce_scatter" + why);
      return;
    }
    // Chunks of 64 KiB end within pieces, and pieces within chunks.
    for (const auto& [rows, columns] :
         {std::pair<std::size_t, std::size_t>{1, 40001}, {7, 1}, {3, 30011}, {5000, 13}}) {
      const auto element = [&](std::size_t from, std::size_t row, std::size_t column) {
        return static_cast<float>((row * 31 + column * 7 + from * 3) % 1000) * 0.37F;
      };
      std::vector<float> block, gathered, matrix, in_rank_order;
      for (std::size_t row = 0; row < rows; ++row) {
        for (std::size_t c = 0; c < columns; ++c) block.push_back(element(rank, row, c));
        for (std::size_t c = 0; c < n * columns; ++c) {
          gathered.push_back(element(c / columns, row, c % columns));
          matrix.push_back(element(rank, row, c));
        }
      }
      for (std::size_t part = 0; part < n; ++part)
        for (std::size_t row = 0; row < rows; ++row)
          for (std::size_t c = 0; c < columns; ++c) in_rank_order.push_back(element(rank, row, part * columns + c));
      const Buffer whole = make_buffer<float>(*device, gathered.size()),
                   sum = make_buffer<float>(*device, block.size());
      comm.all_gather(make_buffer(*device, block), whole, rows).wait();
      expect_equal(values_of<float>(whole), gathered);
      comm.reduce_scatter(make_buffer(*device, matrix), sum, DType::f32, Reduction::sum, rows).wait();
      expect_equal(bits_of(values_of<float>(sum)),
                   bits_of(reduce_scatter(*device, comm, in_rank_order, Reduction::sum)));
    }
    const Buffer block = make_buffer<i32>(*device, 2), whole = make_buffer<i32>(*device, 2 * n);
    expect_error(
        [&] { comm.all_gather(block, whole, 3); },
        "all_gather in 3 rows: a block has 8 bytes: they must split into as many equal pieces, of 1 bytes an element");
    expect_error([&] { comm.reduce_scatter(whole, block, DType::i32, Reduction::sum, 4); },
                 "reduce_scatter in 4 rows: a block has 8 bytes: they must split into as many equal pieces, of 4 bytes "
                 "an element");
  };
  for (const std::size_t from : {tuning.nontemporal_from, std::size_t{1}}) {
    const Temporarily nontemporal(tuning.nontemporal_from, from);
    on_meshes({"d=2", "d=4", "d=8"}, run);
  }
}

TEST_CASE("buffers that do not fit are refused") {
  on_mesh("d=2", [](const DevicePtr& device) {
    Communicator& comm = all_of(*device);
    const auto bytes = [&](std::size_t n) { return device->pool()->allocate(n); };
    expect_error(
        [&] { comm.all_gather(bytes(12), bytes(20)); },
        "all_gather over 2 devices: send has 12 bytes, recv has 20 bytes: recv must have 2 times the bytes of send");
    expect_error([&] { comm.all_to_all(bytes(3), bytes(3)); },
                 "all_to_all over 2 devices: send has 3 bytes: they must split into 2 equal blocks");
    expect_error([&] { comm.reduce_scatter(bytes(12), bytes(12), DType::f32, Reduction::sum); },
                 "reduce_scatter over 2 devices: send has 12 bytes, recv has 12 bytes: send must have 2 times the "
                 "bytes of recv");
    expect_error([&] { comm.all_reduce(bytes(12), bytes(16), DType::f32, Reduction::sum); },
                 "all_reduce over 2 devices: send has 12 bytes, recv has 16 bytes: make them equal");
    expect_error([&] { comm.all_reduce(bytes(6), bytes(6), DType::f32, Reduction::sum); },
                 "all_reduce of f32: recv has 6 bytes: they must be a multiple of 4");
    expect_error([&] { comm.all_reduce(bytes(6), bytes(6), DType::bool_, Reduction::max); },
                 "all_reduce of bool_: only f32, bf16, f64, i32 and u32 can be reduced: convert first");
    const Buffer one = bytes(8);
    expect_error(
        [&] { comm.all_reduce(one, one, DType::f32, Reduction::sum); },
        "all_reduce over 2 devices: send has 8 bytes, recv has 8 bytes: they are the same memory: give recv its own");
    expect_error([&] { comm.send(one, 2); }, "send to rank 2: the group has the ranks 0 to 1");
    expect_error([&] { comm.recv(one, -1); }, "recv from rank -1: the group has the ranks 0 to 1");
    comm.send(bytes(4), 1 - comm.rank());
    expect_error([&] { comm.recv(one, 1 - comm.rank()).wait(); },
                 "recv from rank " + show(1 - comm.rank()) +
                     ": 4 bytes were sent, but 8 were expected: send and recv must agree on the size");
    // MPI does not say how long a message is that does not fit.
    comm.send(bytes(16), 1 - comm.rank());
    expect_error([&] { comm.recv(one, 1 - comm.rank()).wait(); },
                 "recv from rank " + show(1 - comm.rank()) + (under_mpi() ? ": more than 8" : ": 16") +
                     " bytes were sent, but 8 were expected: send and recv must agree on the size");
  });
  SingleCommunicator alone;
  CHECK(error_of<Error>([&] { alone.recv({}, 0).wait(); }) ==
        "recv from rank 0: the only device of a group waits for its own message: send first");
}

#if defined(SHARDLIB_WITH_MPI)
TEST_CASE("long messages go in pieces") {
  const Temporarily sends(tuning.send_piece, std::size_t{1000});
  const Temporarily collectives(tuning.collective_piece, std::size_t{1000});
  on_meshes(group_meshes, [](const DevicePtr& device) {
    for (const std::size_t block : {0U, 3U, 250U, 5001U}) check_moves(*device, block);
    check_reductions<f32>(*device);
  });
}
#endif

TEST_CASE("when one device fails the others wake up, and its own error comes out") {
  if (under_mpi()) return;  // there run_program ends the job instead
  using Wait = std::function<void(Device&, Communicator&)>;
  const std::vector<Wait> waits{
      [](Device& d, Communicator& c) { all_gather<i32>(d, c, {1}); },
      [](Device& d, Communicator& c) { all_reduce<float>(d, c, {1}, Reduction::sum); },
      [](Device& d, Communicator& c) { c.recv(make_buffer<i32>(d, 1), 3).wait(); },
      [](Device&, Communicator& c) { c.barrier(); },
      [](Device& d, Communicator& c) {
        Request r = c.all_gather(make_buffer<i32>(d, 1), make_buffer<i32>(d, 4));
        while (!r.test()) std::this_thread::yield();
      },
  };
  for (const Wait& wait : waits) {
    for (const bool late : {false, true}) {
      std::atomic<int> aborted = 0;
      const auto body = [&](const DevicePtr& device) {
        Communicator& comm = all_of(*device);
        if (device->rank() == 3) {
          if (late) std::this_thread::sleep_for(std::chrono::milliseconds(30));
          throw UsageError("no data for device 3");
        }
        try {
          wait(*device, comm);
        } catch (const Aborted&) {
          ++aborted;
          throw;
        }
      };
      CHECK(error_of<UsageError>([&] { launch(parse_mesh("d=4"), body); }) == "no data for device 3");
      CHECK(aborted == 3);
    }
  }
}

TEST_CASE("a failing device does not wait for the requests that it drops") {
  if (under_mpi()) return;
  const auto body = [](const DevicePtr& device) {
    Communicator& comm = all_of(*device);
    if (device->rank() == 1) {
      const Request request = comm.all_gather(make_buffer<i32>(*device, 1), make_buffer<i32>(*device, 2));
      throw Error("mine");
    }
    comm.recv(make_buffer<i32>(*device, 1), 1).wait();
  };
  CHECK(error_of<Error>([&] { launch(parse_mesh("d=2"), body); }) == "mine");
}

TEST_CASE("devices out of step get an error instead of hanging") {
  if (under_mpi()) return;
  const auto returns = [](const DevicePtr& device) {
    if (device->rank() != 1) all_of(*device).barrier();
  };
  CHECK(error_of<Error>([&] { launch(parse_mesh("d=3"), returns); }) ==
        "barrier: device 1 (rank 1 of 3) has returned without taking part: every device of a group must make the same "
        "calls");
  const auto silent = [](const DevicePtr& device) {
    if (device->rank() == 0) all_of(*device).recv(make_buffer<i32>(*device, 1), 1).wait();
  };
  CHECK(error_of<Error>([&] { launch(parse_mesh("d=2"), silent); }) ==
        "recv: device 1 (rank 1 of 2) has returned without taking part: every device of a group must make the same "
        "calls");
  const auto differs = [](const DevicePtr& device) {
    if (device->rank() == 0)
      all_gather<i32>(*device, all_of(*device), {1});
    else
      all_reduce<float>(*device, all_of(*device), {1, 2}, Reduction::max);
  };
  const std::string error = error_of([&] { launch(parse_mesh("d=2"), differs); });
  const std::string gather = "all_gather of 4 bytes at ", reduce = "all_reduce of 8 bytes (f32 max) at ";
  const bool gathers_first = error.starts_with("rank 1");  // the later call finds the mistake
  CHECK(error.starts_with("rank " + show(gathers_first ? 1 : 0) + " of 2 calls " + (gathers_first ? reduce : gather)));
  CHECK(error.find(" where rank " + show(gathers_first ? 0 : 1) + " calls " + (gathers_first ? gather : reduce)) !=
        std::string::npos);
  CHECK(error.ends_with(": every device of a group must make the same calls in the same order"));
}

TEST_CASE("members compare collectives whose data NCCL moves, and move nothing themselves") {
  class Comparing final : public Communicator {
   public:
    explicit Comparing(Communicator& inner) : inner_(inner) {}
    [[nodiscard]] int rank() const override { return inner_.rank(); }
    [[nodiscard]] int size() const override { return inner_.size(); }
    [[nodiscard]] bool takes_rows() const override { return false; }
    [[nodiscard]] bool has_views(std::size_t) const override { return false; }

   private:
    Request start_collective(const detail::CollectiveCall& call, const detail::OpInfo& op, const Operands&) override {
      detail::CollectiveCall compared = call;
      compared.elsewhere = true;
      return start_in(inner_, compared, op, {});
    }
    Request start_send(const Buffer& buffer, int to, const detail::OpInfo&) override { return inner_.send(buffer, to); }
    Request start_recv(const Buffer& buffer, int from, const detail::OpInfo&) override {
      return inner_.recv(buffer, from);
    }
    Communicator& inner_;
  };
  const auto compare = [](const DevicePtr& device, std::size_t count) {
    Comparing group(all_of(*device));
    const auto n = static_cast<std::size_t>(group.size());
    const Buffer one = make_buffer<i32>(*device, count), other = make_buffer<i32>(*device, count);
    const Buffer all = make_buffer<i32>(*device, n * count);
    std::fill_n(one.as<i32>(), count, 7);
    group.all_gather(one, all).wait();
    group.reduce_scatter(all, other, DType::i32, Reduction::sum).wait();
    group.all_reduce(one, other, DType::i32, Reduction::sum).wait();
    expect_equal(values_of<i32>(all), std::vector<i32>(n * count, 0));
    expect_equal(values_of<i32>(other), std::vector<i32>(count, 0));
    // Between them, collectives of its own.
    expect_equal(all_reduce<i32>(*device, all_of(*device), {1}, Reduction::sum), {group.size()});
  };
  for (const std::size_t count : {std::size_t{1}, std::size_t{30000}})
    on_meshes({"d=2", "d=3", "d=4", "d=8"}, [&](const DevicePtr& device) { compare(device, count); });
  if (under_mpi()) return;  // the job would end
  const std::string error = error_of([&] {
    on_mesh("d=2", [&](const DevicePtr& device) { compare(device, static_cast<std::size_t>(4 + device->rank())); });
  });
  CHECK(error.find("all_gather of 16 bytes by NCCL at ") != std::string::npos);
  CHECK(error.find("all_gather of 20 bytes by NCCL at ") != std::string::npos);
}

#if defined(SHARDLIB_WITH_MPI)
TEST_CASE("a rank that waits for one that has returned gets an error instead of hanging") {
  if (!under_mpi() || world_size() < 2) return;
  const std::vector<AxisSize> mesh{{"d", world_size()}};
  const std::string absent = "device 1 (rank 1 of " + show(world_size()) +
                             ") has returned without taking part: every device of a group must make the same calls";
  // Rank 1 returns and the others wait for it; then all meet, where it tells those who ask.
  const auto outcome = [&](const DeviceBody& before, const DeviceBody& wait) {
    const std::string error = error_of<Error>([&] {
      launch(mesh,
             [&](const DevicePtr& device) {
               before(device);
               if (device->rank() != 1) wait(device);
             },
             {.tuning = {.patience = std::chrono::milliseconds(50)}});
    });
    detail::mpi::compare_failures(detail::mpi::RankOutcome::success, 0);
    return error;
  };
  const DeviceBody nothing = [](const DevicePtr&) {};
  const DeviceBody barrier = [](const DevicePtr& device) { all_of(*device).barrier(); };
  const bool me = world_rank() == 1;
  CHECK(outcome(nothing, barrier) == (me ? "no error" : "group: " + absent));
  CHECK(outcome(barrier, barrier) == (me ? "no error" : "barrier: " + absent));
  CHECK(outcome(barrier, [](const DevicePtr& device) {
          all_of(*device).recv(make_buffer<i32>(*device, 1), 1).wait();
        }) == (me ? "no error" : "recv: " + absent));
  // The end of the launch waits for the receiver, or the next launch might receive a short message.
  for (const std::size_t count : {std::size_t{1}, std::size_t{1} << 20})
    CHECK(outcome(barrier, [count](const DevicePtr& device) {
            all_of(*device).send(make_buffer<i32>(*device, count), 1);
          }) == (me ? "no error" : "send: " + absent));
  // A rank that launches nothing and waits at the program's end.
  if (me) {
    detail::mpi::compare_failures(detail::mpi::RankOutcome::success, 0);
    detail::mpi::watch.begin_launch(nullptr);  // as many launches as the others
  } else {
    CHECK(outcome(nothing, barrier) == "group: " + absent);
  }
  // Who has taken part may leave, however long the others wait for each other.
  CHECK(outcome(
            [](const DevicePtr& device) {
              Communicator& comm = all_of(*device);
              const Buffer token = make_buffer<i32>(*device, 1);
              if (device->rank() == 1) comm.send(token, 0);
              if (device->rank() != 0) return;
              std::this_thread::sleep_for(std::chrono::milliseconds(500));
              comm.recv(token, 1).wait();
            },
            nothing) == "no error");
}

TEST_CASE("a message of a launch that has failed does not reach the next launch") {
  if (!under_mpi() || world_size() < 2) return;
  for (const bool fails : {true, false}) {
    const auto body = [fails](const DevicePtr& device) {
      Communicator& comm = all_of(*device);
      comm.barrier();
      if (comm.rank() == 0) comm.send(make_buffer(*device, std::vector<i32>{fails ? 1 : 2}), 1);
      if (fails) throw Error("stop");
      const Buffer received = make_buffer<i32>(*device, 1);
      if (comm.rank() == 1) comm.recv(received, 0).wait();
      if (comm.rank() == 1) expect_equal(values_of<i32>(received), {2});
    };
    const bool runs = world_rank() < 2;
    CHECK(error_of([&] {
            launch({{"d", 2}}, body, {.allow_idle_ranks = true});
          }) == (fails && runs ? "stop" : "no error"));
    detail::mpi::compare_failures(detail::mpi::RankOutcome::success, 0);
  }
}

TEST_CASE("a rank knows whether it was idle in the last launch") {
  if (!under_mpi()) return;
  for (const int n : {1, world_size()}) {
    if (on_mesh(mesh_of(n), [](const DevicePtr&) {})) CHECK(detail::mpi::process.idle == (world_rank() >= n));
  }
}

TEST_CASE("MPI must allow the threads that devices need") {
  CHECK_NOTHROW(detail::mpi::check_threads(MPI_THREAD_MULTIPLE));
  CHECK_NOTHROW(detail::mpi::check_threads(MPI_THREAD_SERIALIZED));
  CHECK(error_of<Error>([] { detail::mpi::check_threads(MPI_THREAD_FUNNELED); }) ==
        "MPI runs at thread level FUNNELED, but devices need MPI_THREAD_SERIALIZED: leave starting MPI to run_program, "
        "call MPI_Init_thread with that level, or use an MPI that was built with threads");
}
#endif

TEST_CASE("a device without a backend says that it cannot communicate") {
  Device device({{"d", 2}, {"t", 1}}, 1);
  CHECK(device.group({"t"}).size() == 1);
  CHECK(error_of<Error>([&] { device.group({"d"}); }) ==
        "group of 2 devices: this device was made without a backend, so it cannot communicate (device 1 (d=1,t=0) of "
        "mesh d=2,t=1): devices that do come from launch");
}

TEST_CASE("too little memory is an error that says how much is in use") {
  const auto pool = Pool::make();
  const Buffer held = pool->allocate(100);
  const std::size_t reserved = pool->stats().reserved;
  for (const std::size_t bytes :
       {std::numeric_limits<std::size_t>::max(), std::numeric_limits<std::size_t>::max() - 4096, std::size_t{1} << 60,
        detail::machine_bytes() + 1}) {
    CHECK(error_of<Error>([&] { pool->allocate(bytes); }).starts_with("out of memory: "));
    CHECK(pool->stats().live == 128);
    CHECK(pool->stats().reserved == reserved);
  }
  // The machine has it, but not to spare; where there is swap to spare, more than it has.
  const std::size_t machine = detail::machine_bytes(), left = detail::left_bytes();
  const std::size_t wanted = left < machine ? left + (machine - left) / 2 : machine + 1;
  const auto error = [](Pool& from, std::size_t bytes) { return error_of<Error>([&] { from.allocate(bytes); }); };
  if (left < machine) {
    CHECK_THAT(error(*pool, wanted),
               Catch::Matchers::Matches("out of memory: " + std::to_string(wanted) +
                                        " bytes wanted, 128 in use by this device.s pool, [0-9]+ left on this machine: "
                                        "use smaller sizes, or more machines"));
  } else {
    CHECK(error(*pool, wanted).starts_with("out of memory: "));
  }
  CHECK(pool->stats().reserved == reserved);
  CHECK(error(*Pool::make(Region::make_meta()), std::numeric_limits<std::size_t>::max()) ==
        "out of memory: 18446744073709551615 bytes wanted, 0 in use by this device's pool: use smaller sizes, or more "
        "machines");
}

TEST_CASE("an error about too little memory names the ops that have most of it") {
  const auto pool = Pool::make();
  const auto text = [&] {
    const std::string error = error_of<Error>([&] { pool->allocate(std::numeric_limits<std::size_t>::max()); });
    return error.substr(0, error.find(')') + 1).substr(error.find("wanted"));
  };
  const auto by = [&](const char* name, std::string_view spec, std::size_t bytes) {
    const detail::Calling op(name, spec, Site());
    return pool->allocate(bytes);
  };
  std::vector<Buffer> layers;
  for (int i = 0; i < 3; ++i) layers.push_back(by("einsum", "L M, M F -> L F", 1024000));
  const Buffer gelu = by("gelu", {}, 2048000), exp = by("exp", {}, 655360), none = pool->allocate(131072),
               few = by("silu", {}, 64);
  {
    const detail::Calling op("exp", {}, Site());
    const Buffer temporary = by("sum", {}, 6553600);
  }
  CHECK(text() ==
        "wanted, 5906496 in use by this device's pool (3072000 by einsum<`L M, M F -> L F`>, 2048000 by gelu, 655360 "
        "by exp)");
  layers.clear();
  CHECK(text() ==
        "wanted, 2834496 in use by this device's pool (2048000 by gelu, 655360 by exp, 131072 outside of ops)");
  pool->shrink(gelu, 524288);
  const Site here = Site::current();
  const Buffer placed = pool->allocate(720896, detail::OpInfo{"+", {}, here});
  CHECK(text() == "wanted, 2031680 in use by this device's pool (720896 by operator+ at " +
                      std::string(here.file_name()) + ":" + std::to_string(here.line()) +
                      ", 655360 by exp, 524288 by gelu)");
}

TEST_CASE("the scratch of a kernel's threads counts for the op that runs them") {
  const auto pool = Pool::make();
  const Exec exec{.pool = pool.get(), .threads = 2};
  std::vector<Buffer> scratch(96);
  const auto take = [&](std::size_t first, std::size_t count) {
    exec.for_each(static_cast<std::int64_t>(count), [&](std::int64_t i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // so that the second thread has some of them
      scratch[first + static_cast<std::size_t>(i)] = pool->allocate(131072);
    });
  };
  {
    const detail::Calling op("sort", "L", Site());
    take(0, 64);
  }
  take(64, 32);
  CHECK_THAT(error_of<Error>([&] { pool->allocate(std::numeric_limits<std::size_t>::max()); }),
             Catch::Contains("(8388608 by sort<`L`>, 4194304 outside of ops)"));
}

#if !defined(SHARDLIB_ADDRESS_SANITIZER)  // which writes an eighth of what a test has in blocks
TEST_CASE("devices of one process are not given more memory together than the machine has") {
  // Not one of the blocks is written, so that the system would have given all of them.
  const std::size_t left = detail::left_bytes(), size = detail::machine_bytes() / 8;
  const auto take_all = [&] {
    std::vector<Buffer> blocks;
    try {
      while (blocks.size() * size <= left + size) blocks.push_back(Pool::make()->allocate(size));
    } catch (const Error& e) {
      CHECK(std::string(e.what()).starts_with("out of memory: "));
    }
    return blocks.size();
  };
  const std::size_t most = take_all();
  CHECK(most * size <= left + size);
  CHECK(take_all() >= most / 2);  // what has gone with its pool is there again
}
#endif

TEST_CASE("the same error on all devices is told from different ones") {
  using detail::without_device;
  CHECK(without_device("op: bad (device 3 (d=1,t=1) of mesh d=2,t=2)") == "op: bad");
  CHECK(without_device("op: bad (device 3 (d=1,t=1) of mesh d=2,t=2); do x") == "op: bad; do x");
  CHECK(without_device("op: bad") == "op: bad");
  CHECK(without_device("op: bad (device 0 of the mesh without axes)") == "op: bad (device 0 of the mesh without axes)");
}

TEST_CASE("launch refuses what cannot be") {
  const auto nothing = [](const DevicePtr&) {};
  CHECK(error_of<UsageError>([&] {
          launch({{"d", 2}, {"d", 2}}, nothing);
        }) == "mesh \"d=2,d=2\", entry 2: axis 'd' is given twice: name each axis once");
  CHECK(error_of<UsageError>([&] { launch({}, nothing, {.threads = -1}); }) ==
        "launch: threads must be positive, or 0 for a share of the cores");
  CHECK(error_of<UsageError>([&] { launch({}, nothing, {.threads = -1, .kind = DeviceKind::simulated}); }) ==
        "launch: threads must be positive, or 0 for a share of the cores");
  CHECK(error_of<UsageError>([&] { launch({}, nothing, {.watchdog = {.timeout = std::chrono::milliseconds(-1)}}); }) ==
        "launch: the watchdog's timeout must be positive, or 0 to wait forever");
  CHECK(error_of<UsageError>([&] { launch({}, nothing, {.tuning = {.patience = std::chrono::milliseconds(0)}}); }) ==
        "launch: the tuning's patience must be positive");  // or no wait would ever be too long
  if (under_mpi()) {
    const int more = world_size() + 1;
    CHECK(error_of<UsageError>([&] {
            launch({{"d", more}}, nothing);
          }) == "mesh d=" + show(more) + " has " + show(more) + " devices, but mpirun started " + show(world_size()) +
                    (world_size() == 1 ? " rank" : " ranks") + ": start " + show(more) + " or choose another mesh");
  }
  if (under_mpi() && world_size() > 1) {
    CHECK(error_of<UsageError>([&] { launch({}, nothing); }) ==
          "the mesh without axes has 1 device, but mpirun started " + show(world_size()) +
              " ranks: start 1 or choose another mesh");
  }
}

TEST_CASE("devices share out the threads") {
  CHECK(detail::threads_per_device(1) >= 1);
  CHECK(detail::threads_per_device(1000000) == 1);
  const std::vector<AxisSize> mesh{{"d", under_mpi() ? world_size() : 2}};
  launch(mesh, [](const DevicePtr& device) {
    expect(device->exec().threads >= 1 && device->exec().pool == device->pool().get());
  });
  launch(mesh, [](const DevicePtr& device) { expect(device->exec().threads == 3); }, {.threads = 3});
}
