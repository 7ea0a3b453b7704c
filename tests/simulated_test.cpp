// The simulated device: its memory is out of reach for host code, and products and elementwise ops have the CPU's bits.
#include "catch.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "shardlib/interop/arrays.hpp"
#include "shardlib/interop/shard_map.hpp"
#include "shardlib/kernels/elementwise.hpp"
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

}  // namespace

TEST_CASE("host code that touches the simulated device's memory faults", "[simulated]") {
  if (under_mpi()) return;
  const auto pool = Pool::make(Region::make_simulated());
  const Exec exec{.pool = pool.get()};
  const Buffer block = pool->allocate(4096 * sizeof(f32));
  f32* const x = block.as<f32>();
  exec.for_each(4096, [=](std::int64_t i) { x[i] = static_cast<f32>(i); });
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
    exec.for_each(2, [=](std::int64_t i) { x[i] += 1; });
    f32 back[2] = {};
    exec.copy(back, x, sizeof back);
    if (back[0] != 1 || back[1] != 2) _exit(1);
    exec.copy(x, back, sizeof back);
  });
  CHECK(!kernel.by_fault);
  CHECK(kernel.error == "");
  // One device's kernel does not open another one's memory.
  const auto other = Pool::make(Region::make_simulated());
  const Ended theirs = in_child([=, pool = other] {
    Exec{.pool = pool.get()}.for_each(1, [=](std::int64_t i) { const_cast<volatile f32*>(x)[i] = 1; });
  });
  CHECK(theirs.by_fault);
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
          [](const DevicePtr& device) {
            const Mesh<"d"> mesh(device);
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

TEST_CASE("a step on the simulated device has the CPU's bits", "[simulated]") {
  const auto step = [](DeviceKind kind) {
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
    on_mesh("d=2,t=2", body, {.kind = kind});
    return result;
  };
  CHECK(step(DeviceKind::cpu) == step(DeviceKind::simulated));
}
