// The simulated device: its memory is out of reach for host code, its kernels run late, and products and elementwise
// ops have the CPU's bits.
#include "catch.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "shardlib/device/tree_kernel.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/kernels/gemm.hpp"
#include "shardlib/memory/flights.hpp"
#include "shardlib/memory/simulated_stream.hpp"
#include "shardlib/shardlib.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

struct Ended {
  bool by_fault;
  std::string error;
};
/// Runs f in a child process, whose standard error comes back.
template <class F>
Ended in_child(const F& f) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    close(STDOUT_FILENO);  // where Catch would report the fault as this test's
    f();
    _exit(0);
  }
  close(ends[1]);
  Ended ended;
  char text[4096];
  for (ssize_t n = 0; (n = read(ends[0], text, sizeof text)) > 0;)
    ended.error.append(text, static_cast<std::size_t>(n));
  close(ends[0]);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  ended.by_fault = !WIFEXITED(status) || WEXITSTATUS(status) != 0;  // AddressSanitizer exits
  return ended;
}

struct Set {
  f32* x;
  f32 value;
  template <class Team>
  void operator()(const Team& team, std::int64_t item) const {
    team.one([to = x + item, v = value] { *to = v; });
  }
};
struct Add {
  const f32* from;
  f32* to;
  template <class Team>
  void operator()(const Team& team, std::int64_t item) const {
    team.one([x = from + item, y = to + item] { *y += *x; });
  }
};
/// Counts its calls in memory of the host, which no GPU could do.
struct Count {
  int* calls;
  template <class Team>
  void operator()(const Team& team, std::int64_t /*item*/) const {
    team.one([n = calls] { ++*n; });
  }
};
/// A function that is longer than what a device copies.
template <std::size_t N>
struct Sum {
  std::array<f32, N> terms;
  SHARDLIB_FUNCTION void operator()(f32& x) const {
    for (const f32 term : terms) x += term;
  }
};

struct Simulated {
  std::shared_ptr<Pool> pool;
  Exec exec;
  explicit Simulated(std::uint64_t seed = 0)
      : pool(Pool::make(Region::make_simulated(seed))), exec{.pool = pool.get()} {}
  [[nodiscard]] Region& region() const { return *pool->device_memory(); }
  /// A block of a number.
  [[nodiscard]] Buffer block(f32 value) const {
    const Buffer made = pool->allocate(sizeof value);
    exec.copy(made.data(), &value, sizeof value);
    exec.synchronize();
    return made;
  }
  void set(const Buffer& block, f32 value) const { exec.for_items(1, 0, Set{block.as<f32>(), value}); }
  void add(const Buffer& from, const Buffer& to) const { exec.for_items(1, 0, Add{from.as<f32>(), to.as<f32>()}); }
  [[nodiscard]] f32 read(const Buffer& block) const {
    f32 value = 0;
    exec.copy(&value, block.data(), sizeof value);
    return value;
  }
  /// A copy that does not wait for the stream.
  [[nodiscard]] f32 peek(const Buffer& block) const {
    const MemoryAccess open(&region());
    return *block.as<f32>();
  }
};

/// A second stream of a device.
struct Second {
  const Simulated& device;
  std::unique_ptr<detail::Stream> stream = device.region().make_stream();

  template <class F>
  void put(const F& f, const Buffer& uses = {}) {
    const auto work = [f, &region = device.region()] {
      const MemoryAccess open(&region);
      f();
      return true;
    };
    detail::SimulatedStream::of(stream->handle())
        .put({.name = "the test's", .uses = {{uses.data(), uses.bytes()}}, .step = work});
  }
  /// Puts in what never ends, and lets the device wait for it.
  void hang() {
    detail::SimulatedStream::of(stream->handle()).put({.name = "the test's", .step = [] { return false; }});
    stream->mark()->hold_device();
  }
  void wait() const {
    const auto mark = stream->mark();
    while (!mark->passed()) {
    }
  }
};

}  // namespace

TEST_CASE("host code that touches the simulated device's memory faults", "[simulated]") {
  if (under_mpi()) return;
  const auto pool = Pool::make(Region::make_simulated());
  const Exec exec{.pool = pool.get()};
  const Buffer block = pool->allocate(4096 * sizeof(f32));
  f32* const x = block.as<f32>();
  exec.for_items(1, 0, Set{x, 0});
  exec.for_items(1, 0, Set{x + 1, 1});
  exec.synchronize();
  const char* const words = "error: host code accessed memory of the simulated device, outside of a kernel";
  const Ended reading = in_child([=] { static_cast<void>(*const_cast<volatile f32*>(x)); });
  CHECK(reading.by_fault);
  CHECK(reading.error.starts_with(words));
  const Ended writing = in_child([=] { *const_cast<volatile f32*>(x) = 1; });
  CHECK(writing.by_fault);
  CHECK(writing.error.starts_with(words));
  // Another fault keeps its own message.
  const Ended elsewhere = in_child([] { *reinterpret_cast<volatile int*>(std::uintptr_t{4096}) = 1; });
  CHECK(elsewhere.by_fault);
  CHECK(elsewhere.error.find(words) == std::string::npos);
  // A kernel may, and so may a copy, in either direction.
  const Ended kernel = in_child([=] {
    exec.for_items(1, 0, Add{x + 1, x});
    f32 back[2] = {};
    exec.copy(back, x, sizeof back);
    if (back[0] != 1 || back[1] != 1) _exit(1);
    exec.copy(x, back, sizeof back);
  });
  CHECK(!kernel.by_fault);
  CHECK(kernel.error == "");
  // One device's kernel does not open another one's memory.
  const auto other = Pool::make(Region::make_simulated());
  const Ended theirs = in_child([=, pool = other] {
    const Exec there{.pool = pool.get()};
    there.for_items(1, 0, Set{x, 1});
    there.synchronize();
  });
  CHECK(theirs.by_fault);
  // A loop of the host is no kernel, so a GPU could not run it.
  const auto none = [](auto...) { FAIL("the host's loop ran"); };
  CHECK_THROWS_WITH(exec.for_each(1, none), Catch::Contains("no kernel for a device with memory of its own"));
  CHECK_THROWS_WITH(exec.run(none), Catch::Contains("no kernel for a device with memory of its own"));
}

TEST_CASE("kernels of the simulated device run late, in the order of its stream", "[simulated]") {
  const Simulated on;
  const Buffer x = on.block(0), y = on.block(0);
  on.set(x, 7);
  CHECK(on.peek(x) == 0);
  CHECK(on.read(x) == 7);
  CHECK(on.peek(x) == 7);
  on.set(x, 1);
  on.exec.copy(y.data(), x.data(), sizeof(f32));
  on.set(x, 2);
  on.add(x, y);
  on.exec.zero(x.data(), sizeof(f32));
  CHECK(on.peek(y) == 0);
  CHECK(on.read(y) == 3);
  CHECK(on.read(x) == 0);
  // A copy from the host, too, comes after the kernels before it. The host waits for a long copy. A short one is taken
  // at once, and arrives later.
  on.set(x, 5);
  f32 four = 4;
  on.exec.copy(x.data(), &four, sizeof four);
  four = 0;
  CHECK(on.peek(x) == 0);
  CHECK(on.read(x) == 4);
  on.set(x, 5);
  const std::vector<std::byte> many(detail::most_uploaded + 1);
  on.exec.copy(on.pool->allocate(many.size()).data(), many.data(), many.size());
  CHECK(on.peek(x) == 5);
  // Products
  on.set(x, 3);
  kernels::gemm_batch(on.exec, false, false, 1, 1, 1, x.as<const f32>(), 1, 0, x.as<const f32>(), 1, 0, y.as<f32>(), 1,
                      0, 1, true);
  CHECK(on.peek(y) == 3);
  CHECK(on.read(y) == 12);
}

TEST_CASE("kernels of the simulated device run at the end, and where a queue would be full", "[simulated]") {
  int calls = 0;
  {
    const Simulated on;
    on.exec.for_items(3, 0, Count{&calls});
    CHECK(calls == 0);
  }
  CHECK(calls == 3);
  const Simulated on, early(1);
  for (int i = 0; i < 2000; ++i) on.exec.for_items(1, 0, Count{&calls});
  CHECK((calls > 3 && calls < 2003));
  on.exec.synchronize();
  CHECK(calls == 2003);
  for (int i = 0; i < 50; ++i) early.exec.for_items(1, 0, Count{&calls});
  CHECK(calls > 2003);
  early.exec.synchronize();
  CHECK(calls == 2053);
}

TEST_CASE("the simulated device copies what an elementwise op calls", "[simulated]") {
  const Simulated on;
  const Buffer x = on.block(1);
  const auto add_to_x = [&](auto sum) {
    sum.terms.fill(1);
    kernels::apply_flat(on.exec, 1, sum, x.as<f32>());
    sum.terms.fill(1000);
  };
  add_to_x(Sum<2>{});
  CHECK(on.peek(x) == 1);
  CHECK(on.read(x) == 3);
  add_to_x(Sum<100>{});
  CHECK(on.read(x) == 103);
}

TEST_CASE("a block of the simulated device is freed in the order of its stream", "[simulated]") {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    const Simulated on(seed);
    const Buffer sum = on.block(0);
    constexpr std::size_t pages = 4 * 4096;
    Buffer block = on.pool->allocate(pages);
    f32* const x = block.as<f32>() + pages / 2 / sizeof(f32);
    const Add add{x, sum.as<f32>()};
    on.exec.for_items(1, 0, Set{x, 5});
    on.exec.for_items(1, 0, add);  // it runs after the host has freed the block, and even after that is another block
    const std::byte* const place = block.data();
    block = {};
    on.pool->trim();
    block = on.pool->allocate(pages);
    REQUIRE(block.data() == place);
    on.exec.for_items(1, 0, Set{x, 9});
    CHECK(on.read(sum) == 5);
    on.exec.for_items(1, 0, add);
    CHECK(on.read(sum) == 14);
#if !defined(SHARDLIB_ADDRESS_SANITIZER)  // it finds the next line
    block = {};
    on.exec.for_items(1, 0, add);
    CHECK(std::isnan(on.read(sum)));
#endif
  }
}

TEST_CASE("a missing event between streams of the simulated device shows", "[simulated]") {
  f32 seen = -1;
  const auto reads = [&seen](const Buffer& x) { return [&seen, from = x.as<f32>()] { seen = *from; }; };
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    const Simulated on(seed);
    Second second{on};
    const Buffer x = on.block(0), y = on.block(0), sum = on.block(0);
    on.set(x, 7);
    second.stream->follow_device();
    second.put(reads(x));
    second.wait();
    CHECK(seen == 7);
    second.put([to = y.as<f32>()] { *to = 2; });
    second.wait();
    on.add(y, sum);
    CHECK(on.read(sum) == 2);
    // The kernel of sums runs in the second stream.
    on.set(x, 4);
    second.stream->follow_device();
    detail::reduce_in_stream(*second.stream, DType::f32, Reduction::sum, x, 1, 1, y);
    second.wait();
    CHECK(on.read(y) == 4);
  }
  {  // The second stream does not wait for the kernel, or for an earlier one.
    const Simulated on;
    Second second{on};
    const Buffer x = on.block(0), y = on.block(1);
    on.set(x, 7);
    second.put(reads(x));
    second.wait();
    CHECK(seen == 0);
    on.set(x, 8);
    second.stream->follow_device();
    on.set(x, 9);
    second.put(reads(x));
    second.wait();
    CHECK(seen == 8);
    detail::reduce_in_stream(*second.stream, DType::f32, Reduction::sum, x, 1, 1, y);
    second.wait();
    CHECK(on.read(y) == 8);
    CHECK(on.read(x) == 9);
  }
  for (const bool waits : {false, true}) {  // the kernel for the second stream
    const Simulated on;
    Second second{on};
    const Buffer x = on.block(0), sum = on.block(0);
    second.put([to = x.as<f32>()] { *to = 2; });
    if (waits) second.stream->mark()->hold_device();
    on.add(x, sum);
    CHECK(on.peek(sum) == 0);  // the host has not waited
    CHECK(on.read(sum) == (waits ? 2 : 0));
    second.wait();
    CHECK(on.read(x) == 2);
  }
  // A kernel overwrites what the second stream has yet to read. Only if it runs early, this shows.
  enum class Waits { nobody, host, device };
  const auto overwritten = [&](std::uint64_t seed, Waits who) {
    const Simulated on(seed);
    Second second{on};
    const Buffer x = on.block(0);
    on.set(x, 7);
    second.stream->follow_device();
    second.put(reads(x));
    if (who == Waits::host) second.wait();
    if (who == Waits::device) second.stream->mark()->hold_device();
    on.set(x, 9);
    second.wait();
    return seen;
  };
  int found = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    CHECK(overwritten(seed, Waits::host) == 7);
    CHECK(overwritten(seed, Waits::device) == 7);
    found += overwritten(seed, Waits::nobody) == 9 ? 1 : 0;
  }
  CHECK(found > 0);
  CHECK(found < 20);
}

TEST_CASE("a block may be freed when the simulated device waits for the stream that uses it", "[simulated]") {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    for (const bool waits : {false, true}) {
      const Simulated on(seed);
      Second second{on};
      f32 seen = -1;
      Buffer block = on.block(7);
      const std::byte* const place = block.data();
      second.put([&seen, from = block.as<f32>()] { seen = *from; }, block);
      const auto mark = second.stream->mark();
      if (waits) mark->hold_device();
      block = {};
      const Buffer next = on.pool->allocate(sizeof(f32));
      REQUIRE(next.data() == place);
      on.set(next, 9);
      if (waits) {
        CHECK(on.read(next) == 9);
        CHECK(seen == 7);
      } else {
        expect_error([&] { static_cast<void>(mark->passed()); },
                     "simulated device: the test's uses a block that was freed before it has run");
      }
    }
  }
}

TEST_CASE("a host that waits for a device asks for errors of what the device waits for", "[simulated]") {
  struct Hangs final : detail::Flight {
    int asked = 0;
    Hangs() : Flight(nullptr) {}
    bool has_ended() override { return false; }
    void check(bool waits) override {
      if (waits && ++asked == 3) throw Error("it hangs");
    }
  };
  const Simulated on;
  Second second{on};
  const Buffer x = on.block(0), y = on.block(0);
  detail::Flights& flights = *on.region().flights();
  const auto starts = [&] {
    second.hang();
    flights.add(std::make_unique<Hangs>());
  };
  f32 there = 0;
  std::vector<std::byte> many(detail::most_uploaded + 1);
  const Buffer longer = on.pool->allocate(many.size());
  const auto copies = [&](void* to, const void* from) { on.exec.copy(to, from, sizeof there); };
  for (const std::function<void()>& f :
       std::vector<std::function<void()>>{[&] { on.exec.synchronize(); }, [&] { copies(&there, x.data()); },
                                          [&] { on.exec.copy(longer.data(), many.data(), many.size()); }}) {
    starts();
    copies(y.data(), x.data());  // the host goes on
    copies(x.data(), &there);
    CHECK(flights.ask());
    expect_error(f, "it hangs");
    CHECK(!flights.ask());
  }
  // Nor does it hang where the device's queue is full, as a GPU's would be behind what waits.
  starts();
  int launched = 0;
  expect_error(
      [&] {
        for (; launched < 5000; ++launched) on.set(x, 1);
      },
      "it hangs");
  CHECK((launched > 200 && launched < 1000));
}

TEST_CASE("freed memory of the simulated device reads as NaN", "[simulated]") {
  const auto pool = Pool::make(Region::make_simulated());
  const Exec exec{.pool = pool.get()};
  const auto first = [&](const Buffer& block) {
    f32 value = 0;
    exec.copy(&value, block.data(), sizeof value);
    return value;
  };
  Buffer block = pool->allocate(256);
  exec.zero(block.data(), block.bytes());
  CHECK(first(block) == 0);
  const std::byte* const place = block.data();
  block = {};
  block = pool->allocate(256);
  REQUIRE(block.data() == place);
  CHECK(std::isnan(first(block)));
}

TEST_CASE("spans of the simulated device are copies that stay where they are", "[simulated]") {
  on_mesh("d=1",
          [](const Mesh<"d">& mesh) {
            const std::vector<f32> mine{1, 2, 3, 4};
            const auto x = from_memory<f32, "L">(mesh, {{"L", 4}}, std::span<const f32>(mine));
            const auto y = x + x;
            const std::span<const f32> elements = y.span();
            expect_equal(std::vector<f32>(elements.begin(), elements.end()), {2, 4, 6, 8});
            expect(y.span().data() == elements.data());
            expect(y.value()->data().device_memory() != nullptr);
            expect(item(sum<"L -> ">(y)) == 20);
            expect_equal(fetch(y).data, {2, 4, 6, 8});
          },
          {.kind = DeviceKind::simulated});
}

TEST_CASE("wrong ids of the simulated device are errors when the host next waits for it", "[simulated]") {
  const auto ids = [](const Mesh<"d">& mesh, const std::vector<i32>& values) {
    return place<Tensor<i32, "B">>(mesh, HostArray<i32>({static_cast<std::int64_t>(values.size())}, values));
  };
  const auto look_up = [](const Mesh<"d">& mesh, const Tensor<i32, "B">& rows) {
    return index_unreduced<"[V] M, B -> B M">(full<f32, "V M">(mesh, {{"V", 8}, {"M", 2}}, 1), rows);
  };
  const auto text = [](int id) {
    return "index_unreduced<`[V] M, B -> B M`>: gather: index " + show(id) +
           " is outside dim `V` of size 8; check the data against that size (device 0 (d=0) of mesh d=1)";
  };
  const LaunchOptions on_device{.kind = DeviceKind::simulated};
  on_mesh(
      "d=1",
      [&](const Mesh<"d">& mesh) {
        // Both come from the host, which waits for this.
        const auto rows = ids(mesh, {1, 9, 8}), others = ids(mesh, {-1, 2, 3});
        const auto numerator = ids(mesh, {4, 4}), divisor = ids(mesh, {2, 0});
        const auto first = look_up(mesh, rows);  // no error here
        const auto second = look_up(mesh, others);
        const auto both = first + second;
        ERROR_IS(text(9), both.span());
        // It has been said, and what reads on is whole: zeros in place of the rows that are not there.
        expect_equal(fetch(first).data, {1, 1, 0, 0, 0, 0});
        // The divisor's zero, of each width, and in the order of ops.
        const auto quotient = numerator / divisor;
        const auto zero = [](const std::string& divisor) {
          return "operator/: the divisor `" + divisor +
                 "` has a zero in this shard, by which integers cannot be divided; replace it, e.g. with `where` "
                 "(device 0 (d=0) of mesh d=1)";
        };
        ERROR_IS(zero("B"), wait_for(quotient));
        const auto bytes = full<u8, "A">(mesh, {{"A", 5}}, 6) / full<u8, "A">(mesh, {{"A", 5}}, 0);
        ERROR_IS(zero("A"), wait_for(bytes));
        // Many checks without a wait, of many elements.
        std::vector<i32> many(10'000);
        many[7000] = 700;
        many[9999] = 800;
        const auto wrong = ids(mesh, many), right = ids(mesh, {0, 7});
        int looked = 0;
        expect_error(
            [&] {
              static_cast<void>(look_up(mesh, wrong));
              for (; looked < 3000; ++looked) static_cast<void>(look_up(mesh, right));
            },
            text(700));
        expect(looked > 20 && looked < 3000, show(looked) + " lookups after the wrong one");
        wait_for(look_up(mesh, right));
      },
      on_device);
  // What nobody reads is an error of the launch.
  const auto unread = [&] {
    on_mesh(
        "d=1", [&](const Mesh<"d">& mesh) { static_cast<void>(look_up(mesh, ids(mesh, {8}))); }, on_device);
  };
  ERROR_IS(text(8), unread());
}

TEST_CASE("checks of ids, targets and divisors do not wait for the device", "[simulated]") {
  on_mesh(
      "d=1",
      [&](const Mesh<"d">& mesh) {
        int calls = 0;
        const Sizes sizes{{"B", 8}, {"M", 16}, {"V", 32}};
        const auto x = random_normal<f32, "V M">(mesh, sizes, RandomKey{1, 0});
        const auto w = random_normal<f32, "V M">(mesh, sizes, RandomKey{2, 0});
        const auto ids = place<Tensor<i32, "B/d">>(mesh, HostArray<i32>({8}, {1, 2, 3, 4, 5, 6, 7, 31}));
        const auto loss_of = [&](const Tensor<f32, "V M">& table, const Tensor<f32, "V M">& head) {
          const auto rows = index_unreduced<"[V] M, B/d -> B/d M">(table, ids / full<i32, "B/d">(mesh, {{"B", 8}}, 1));
          return sum(linear_cross_entropy<"B/d M, V M -> B/d V">(rows, head, ids));
        };
        mesh.device()->exec().for_items(1, 0, Count{&calls});
        const auto [loss, gradients] = value_and_grad(mesh, loss_of, x, w);
        expect(calls == 0, "the host has waited");
        expect(item(all_reduce<"+d -> ">(loss)) > 0);
        expect(calls == 1);
      },
      {.kind = DeviceKind::simulated});
}

TEST_CASE("a step on the simulated device has the CPU's bits", "[simulated]") {
  const auto step = [](DeviceKind kind, std::uint64_t seed = 0) {
    std::vector<f32> result;
    const auto body = [&](const DevicePtr& device) {
      const Mesh<"d t"> mesh(device);
      const Sizes sizes{{"B", 8}, {"M", 16}, {"F", 32}};
      const auto x = random_normal<f32, "B/d M">(mesh, sizes, RandomKey{1, 0});
      const auto w = random_normal<f32, "M/d F/t">(mesh, sizes, RandomKey{2, 0});
      const auto loss_of = [](const Tensor<f32, "M/d F/t">& weight, const Tensor<f32, "B/d M">& input) {
        const auto whole = all_gather<"M/d F/t -> M F/t">(weight);
        const auto h = einsum_unreduced<"B/d M, M F/t -> B/d F/t">(input, whole);
        return sum(gelu(h));
      };
      const auto [loss, gradient] = value_and_grad(mesh, loss_of, w, x);
      const auto all = fetch(gradient);
      const f32 total = item(all_reduce<"+d +t -> ">(loss));
      if (device->rank() == 0) {
        result = all.data;
        result.push_back(total);
      }
    };
    const Temporarily early(tuning.simulated_seed, seed);
    on_mesh("d=2,t=2", body, {.kind = kind});
    return result;
  };
  const auto expected = step(DeviceKind::cpu);
  for (std::uint64_t seed = 0; seed < 3; ++seed) CHECK(step(DeviceKind::simulated, seed) == expected);
}
