// The errors of --device gpu and the memory of a GPU, with a stand-in for CUDA's runtime. On threads, and on two ranks
// under mpirun.
#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/device/exec.hpp"
#include "shardlib/device/impl/local_place.hpp"
#include "shardlib/device/launch.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/memory/faults.hpp"
#include "shardlib/memory/flights.hpp"
#include "shardlib/memory/gpu.hpp"
#include "shardlib/memory/region.hpp"
#include "shardlib/run/accelerators.hpp"
#include "shardlib/support/error.hpp"

using namespace shardlib;

namespace {

/// The machine of a test, and the environment, until the test ends.
struct Machine {
  explicit Machine(const StandIn& machine, const char* memory = nullptr) {
    stand_in = machine;
    if (memory != nullptr) setenv("SHARDLIB_GPU_MEMORY", memory, 1);
  }
  ~Machine() {
    stand_in = {};
    unsetenv("SHARDLIB_GPU_MEMORY");
  }
};

/// How a program ends whose devices take so many bytes each: with status and message, as run_program prints them.
detail::Ending ending(std::size_t bytes = 0, std::size_t planned_peak = 0) {
  try {
    launch({{"d", world_size()}}, [&](const DevicePtr& device) { static_cast<void>(device->pool()->allocate(bytes)); },
           {.kind = DeviceKind::gpu, .planned_peak = planned_peak});
  } catch (...) {
    return detail::ending_of(std::current_exception());
  }
  return {};
}
void check_ending(const detail::Ending& end, int status, const std::string& message) {
  CHECK(end.message == message);
  CHECK(end.status == status);
}

constexpr std::size_t mib = std::size_t{1} << 20;

}  // namespace

TEST_CASE("a machine that has no GPU, or whose driver is too old, is an error of every rank") {
  {
    const Machine machine({.driver = 0});
    check_ending(
        ending(), 2,
        "--device gpu: this machine has no driver for NVIDIA GPUs: install a newer driver, or use --device cpu");
  }
  {
    const Machine machine({.driver = 12040});
    check_ending(ending(), 2,
                 "--device gpu: the driver supports CUDA 12.4, and this program needs 13.0: install a newer driver, or "
                 "use --device cpu");
  }
  {
    const Machine machine({.gpus = 0});
    check_ending(ending(), 2,
                 "--device gpu: this machine shows no GPU (no CUDA-capable device is detected): check nvidia-smi and "
                 "CUDA_VISIBLE_DEVICES, or use --device cpu");
  }
}

TEST_CASE("a GPU that another program has is an error that names what is free") {
  if (world_size() > 1) return;
  {
    const Machine machine({.exclusive = true});
    check_ending(
        ending(), 2,
        "--device gpu: GPU 0, NVIDIA Stand-in, does not start (cudaStreamCreate: CUDA-capable device(s) is/are "
        "busy or unavailable): end the other programs on it, or take a smaller part of the GPU, as in "
        "SHARDLIB_GPU_MEMORY=0.4");
  }
  const auto busy = [](const std::string& what) {
    return "--device gpu: GPU 0, NVIDIA Stand-in, has " + what +
           ": end the other programs on it, or take a smaller part of the GPU, as in SHARDLIB_GPU_MEMORY=0.4";
  };
  {
    const Machine machine({.others = 63 * mib});
    check_ending(ending(), 2, busy("1048576 of 67108864 bytes free, and the workspace of cuBLAS takes 33554432"));
  }
  {
    const Machine machine({.total = 1024 * mib, .others = 512 * mib});
    check_ending(ending(), 2, busy("503316480 of 1073741824 bytes free, and this device takes 966365184"));
  }
  {  // It starts when the first tensor is made.
    const Machine machine({.total = 1024 * mib});
    CHECK_THROWS_WITH(launch({{"d", 1}},
                             [](const DevicePtr& device) {
                               stand_in.others = 512 * mib;
                               static_cast<void>(device->pool()->allocate(1));
                             },
                             {.kind = DeviceKind::gpu}),
                      busy("503316480 of 1073741824 bytes free, and its pool takes 966365184"));
  }
  const Machine machine({.total = 1024 * mib, .others = 512 * mib}, "0.4");
  check_ending(ending(399 * mib), 0, "");
}

TEST_CASE("too little memory of a GPU is an error that names the plan's peak") {
  const Machine machine({.gpus = 2, .total = 1000 * mib});
  const std::string wanted = std::to_string(901 * mib);
  const std::string gpu =
      std::to_string(900 * mib) + " bytes of GPU " + std::to_string(world_rank()) + ", NVIDIA Stand-in";
  const std::string remedy = ": use a smaller batch, --recompute, or more devices; --plan lists what is alive";
  check_ending(ending(901 * mib), 1,
               "out of memory: " + wanted + " bytes wanted, 0 in use by this device's pool, of " + gpu + remedy);
  check_ending(ending(901 * mib, 5000), 1,
               "out of memory: " + wanted + " bytes wanted, 0 in use by this device's pool, of " + gpu +
                   "; the plan of a step has 5000 at most" + remedy);
}

TEST_CASE("a part of a GPU's memory is a number above 0 and at most 1") {
  for (const char* part : {"0", "1.5", "half", "", "nan"}) {
    const Machine machine({}, part);
    check_ending(ending(), 2,
                 "SHARDLIB_GPU_MEMORY=" + std::string(part) +
                     ": give the part of a GPU's memory to take, above 0 and at most 1, as in 0.4");
  }
}

TEST_CASE("ranks share a GPU only where they are told to") {
  if (world_size() != 2) return;
  {
    const Machine machine({.total = 1000 * mib});
    check_ending(
        ending(), 2,
        "--device gpu: 2 ranks of this machine have the same GPU, number 0: start one rank for each GPU, or let "
        "them share it by SHARDLIB_GPU_MEMORY, the part that they take together, as in SHARDLIB_GPU_MEMORY=0.9");
  }
  const Machine machine({.total = 1000 * mib}, "0.8");
  check_ending(ending(399 * mib), 0, "");
  CHECK(ending(401 * mib).status == 1);
}

TEST_CASE("threads share GPUs evenly") {
  if (world_size() > 1) return;
  const Machine machine({.gpus = 2, .total = 1000 * mib});
  for (const std::size_t more : {0, 2}) {  // devices 0 and 2 share GPU 0
    const auto body = [&](const DevicePtr& device) {
      static_cast<void>(device->pool()->allocate((device->rank() == 1 ? 899 : 449 + more) * mib));
    };
    if (more == 0)
      launch({{"d", 3}}, body, {.kind = DeviceKind::gpu});
    else
      CHECK_THROWS_WITH(
          launch({{"d", 3}}, body, {.kind = DeviceKind::gpu}),
          Catch::Contains("out of memory: ") && Catch::Contains(std::to_string(450 * mib) + " bytes of GPU 0"));
  }
}

TEST_CASE("what a device will take of its GPU is known before the launch") {
  const auto bytes = [](std::size_t n) { return static_cast<double>(n * mib); };
  const int devices = world_size();  // threads where this is 1
  {
    const Machine machine({.gpus = 2, .total = 1000 * mib});
    CHECK(detail::least_gpu_bytes(devices) == bytes(900));
    check_ending(ending(899 * mib), 0, "");
    CHECK(ending(901 * mib).status == 1);
    if (devices == 1) CHECK(detail::least_gpu_bytes(3) == bytes(450));  // devices 0 and 2 share GPU 0
  }
  {
    const Machine machine({.gpus = 2, .total = 1000 * mib, .others = 700 * mib});
    CHECK(detail::least_gpu_bytes(devices) == bytes(300));
  }
  {  // Two ranks share a GPU only where they are told to.
    const Machine machine({.total = 1000 * mib});
    CHECK(detail::least_gpu_bytes(devices) == bytes(devices == 1 ? 900 : 0));
  }
  {
    const Machine machine({.total = 1000 * mib}, "0.8");
    CHECK(detail::least_gpu_bytes(devices) == bytes(devices == 1 ? 800 : 400));
  }
  for (const StandIn& none : {StandIn{.gpus = 0}, StandIn{.driver = 0}}) {
    const Machine machine(none);
    CHECK(detail::least_gpu_bytes(devices) == 0);
  }
}

TEST_CASE("a GPU's peak follows from its name and the dtype, and from nothing where it is not known") {
  if (world_size() > 1) return;
  const auto peaks = [](const std::string& mesh, const std::string& dtype, double given = 0) {
    std::mutex mutex;
    std::vector<double> all;
    launch(parse_mesh(mesh),
           [&](const DevicePtr& device) {
             const double peak = run::detail::gpu_peak(device->pool()->device_memory()->model(), dtype, given);
             const std::lock_guard lock(mutex);
             all.push_back(peak);
           },
           {.kind = DeviceKind::gpu});
    return all;
  };
  {
    const Machine machine({.total = 1000 * mib, .name = "NVIDIA H100 80GB HBM3"});
    CHECK(peaks("d=1", "bf16") == std::vector{989e12});
    CHECK(peaks("d=1", "f32") == std::vector{67e12});
    CHECK(peaks("d=1", "bf16", 500e12) == std::vector{500e12});
    CHECK(peaks("d=2", "bf16") == std::vector(2, 989e12 / 2));  // they share the GPU
  }
  const Machine machine({.gpus = 2, .total = 1000 * mib});
  for (const double peak : peaks("d=2", "bf16")) CHECK(std::isnan(peak));
  CHECK(peaks("d=2", "bf16", 500e12) == std::vector(2, 500e12));
}

TEST_CASE("copies between the memories of GPU and host, and loops of the host in a GPU's") {
  if (world_size() > 1) return;
  const Machine machine({.total = 1000 * mib});
  const auto pool = Pool::make(Region::make_gpu(0, 1));
  const auto host = Pool::make();
  const Buffer from = host->allocate(64 * sizeof(int)), there = pool->allocate(64 * sizeof(int));
  const Buffer back = host->allocate(64 * sizeof(int));
  std::iota(from.as<int>(), from.as<int>() + 64, 1);
  copy(there, from);
  copy(back, there);
  CHECK(std::equal(from.as<int>(), from.as<int>() + 64, back.as<int>()));
  const Exec exec{.pool = pool.get()};
  exec.zero(there.data(), 32 * sizeof(int));
  exec.copy(back.data(), there.data(), 64 * sizeof(int));
  CHECK(back.as<int>()[31] == 0);
  CHECK(back.as<int>()[32] == 33);
  CHECK_THROWS_WITH(exec.for_each(1, [](std::int64_t) {}),
                    Catch::Contains("no kernel for a device with memory of its own"));
}

TEST_CASE("a GPU's streams and memory are used with that GPU as the current one") {
  if (world_size() > 1) return;
  const Machine machine({.gpus = 2, .total = 1000 * mib});
  const auto first = Pool::make(Region::make_gpu(0, 1)), second = Pool::make(Region::make_gpu(1, 1));
  const Buffer here = first->allocate(64), there = second->allocate(64);
  const auto stream = first->device_memory()->make_stream();
  for (int round = 0; round < 2; ++round) {
    CHECK_NOTHROW(Exec{.pool = second.get()}.zero(there.data(), 64));
    CHECK(stand_in_gpu == 1);
    CHECK_NOTHROW(stream->follow_device());
    CHECK(stand_in_gpu == 0);
    CHECK(stream->mark()->passed());
    CHECK_NOTHROW(Exec{.pool = first.get()}.zero(here.data(), 64));
  }
  // The stand-in finds what CUDA would refuse: a mark after another GPU has become the current one.
  CHECK(cudaSetDevice(1) == cudaSuccess);
  CHECK_THROWS_WITH(static_cast<void>(stream->mark()), Catch::Contains("cudaEventRecord failed"));
  const detail::Gpu* const gpu = first->device_memory()->gpu();
  CHECK(cudaMemsetAsync(here.data(), 0, 64, gpu->stream()) == cudaErrorInvalidResourceHandle);
  CHECK(cudaSetDevice(0) == cudaSuccess);
  CHECK(cudaMemsetAsync(here.data(), 0, 64, gpu->stream()) == cudaSuccess);
}

TEST_CASE("a host that waits for a GPU asks for errors of what the GPU waits for, and never blocks") {
  if (world_size() > 1) return;
  struct Hangs final : detail::Flight {
    int asked = 0;
    Hangs() : Flight(nullptr) {}
    bool has_ended() override { return false; }
    void check(bool waits) override {
      if (waits && ++asked == 3) throw Error("it hangs");
    }
  };
  const Machine machine({.total = 1000 * mib});
  const auto pool = Pool::make(Region::make_gpu(0, 1)), host = Pool::make();
  const Buffer here = host->allocate(64), there = pool->allocate(64);
  const Buffer longer = host->allocate(detail::most_uploaded + 1), its_place = pool->allocate(longer.bytes());
  const Buffer full = longer.slice(0, detail::most_uploaded);
  Region& gpu = *pool->device_memory();
  const auto zero = [&] { Exec{.pool = pool.get()}.zero(there.data(), 64); };
  const auto stream = gpu.make_stream();
  stream->follow_device();
  CHECK_NOTHROW(stream->mark()->hold_device());
  stand_in.hangs = true;
  for (const std::function<void()>& f : std::vector<std::function<void()>>{
           [&] { gpu.synchronize(); }, [&] { copy(here, there); }, [&] { copy(its_place, longer); },
           [&] {
             for (int i = 0; i < 5000; ++i) zero();
             throw Error("5000 behind what hangs");
           },
           [&] {
             for (int i = 0; i < 5000; ++i) {  // each with a collective's events
               zero();
               stream->follow_device();
               stream->mark()->hold_device();
             }
             throw Error("5000 collectives behind what hangs");
           },
           [&] {
             for (int i = 0; i < 100; ++i) copy(its_place.slice(0, full.bytes()), full);
             throw Error("100 copies under way");
           }}) {
    gpu.gpu()->stream()->behind = 0;
    gpu.flights()->add(std::make_unique<Hangs>());
    CHECK_NOTHROW(zero());
    CHECK_NOTHROW(copy(there, here));  // the host does not wait for a short copy to the GPU
    CHECK_THROWS_WITH(f(), "it hangs");
    CHECK(cudaGetLastError() == cudaSuccess);  // or the next start of a kernel would throw it
    CHECK(!gpu.flights()->ask());
  }
  stand_in.hangs = false;
  stand_in_copies = {};
  CHECK_NOTHROW(copy(here, there));
}

TEST_CASE("products run in the stream of kernels, with a workspace of the GPU's own") {
  if (world_size() > 1) return;
  const Machine machine({.total = 1000 * mib});
  const auto memory = Region::make_gpu(0, 1);
  const detail::Gpu& gpu = *memory->gpu();
  CHECK(gpu.cublas()->stream == gpu.stream());
  CHECK(gpu.workspace() != nullptr);
  CHECK(gpu.cublas()->workspace == gpu.workspace());
}

TEST_CASE("arrays on their way to a GPU have places of their own in a ring, for which the host does not wait") {
  if (world_size() > 1) return;
  const Machine machine({.gpus = 2, .total = 1000 * mib});
  const auto pool = Pool::make(Region::make_gpu(0, 1)), host = Pool::make();
  struct Sent {
    Buffer there;
    int value;
  };
  std::deque<Sent> sent;  // and not yet there
  std::size_t under_way = 0;
  const auto take = [&] {
    stand_in_copies.run();
    const Sent next = std::move(sent.front());
    sent.pop_front();
    under_way -= next.there.bytes();
    const auto* const bytes = next.there.as<const unsigned char>();
    CHECK(std::all_of(bytes, bytes + next.there.bytes(), [&](unsigned char b) { return b == next.value; }));
  };
  stand_in.hangs = true;
  const int waits = stand_in_waits, far = stand_in_far_copies;
  for (int i = 0; i < 200; ++i) {
    const std::size_t bytes = i % 3 == 0   ? detail::most_uploaded / 2 - 1000 * static_cast<std::size_t>(i)
                              : i % 3 == 1 ? static_cast<std::size_t>(1 + i)
                                           : detail::most_uploaded / 8 + 100 * static_cast<std::size_t>(i);
    const Buffer from = host->allocate(bytes);
    std::memset(from.data(), i % 256, bytes);
    sent.push_back({pool->allocate(bytes), i % 256});
    under_way += bytes;
    copy(sent.back().there, from);  // fails if it waits
    std::memset(from.data(), 255, bytes);
    while (under_way > 2 * detail::most_uploaded) take();
  }
  while (!sent.empty()) take();
  CHECK(stand_in_waits == waits);
  CHECK(stand_in_far_copies == far);
  // Four of the longest fill it, and the next one would wait.
  const Buffer longest = host->allocate(detail::most_uploaded);
  std::memset(longest.data(), 7, longest.bytes());
  for (int i = 0; i < 4; ++i) {
    sent.push_back({pool->allocate(longest.bytes()), 7});
    under_way += longest.bytes();
    copy(sent.back().there, longest);
  }
  CHECK_THROWS_WITH(copy(pool->allocate(64), host->allocate(64)), Catch::Contains("cudaMemcpyAsync failed"));
  while (!sent.empty()) take();
  // A copy whose event cannot be made does not begin.
  const std::size_t begun = stand_in_copies.begun;
  stand_in.hangs = false;
  const auto other = Pool::make(Region::make_gpu(1, 1));
  stand_in.hangs = true;
  stand_in.events = false;
  CHECK_THROWS_WITH(copy(other->allocate(64), host->allocate(64)), Catch::Contains("cudaEventCreate failed"));
  CHECK(stand_in_copies.begun == begun);
  stand_in.events = true;
  // Short copies are bounded as well.
  const Buffer short_one = host->allocate(64), its_place = pool->allocate(64);
  for (int i = 0; i < 4096; ++i) {
    pool->device_memory()->gpu()->stream()->behind = 0;
    CHECK_NOTHROW(copy(its_place, short_one));
  }
  CHECK_THROWS_WITH(copy(its_place, short_one), Catch::Contains("cudaMemcpyAsync failed"));
  stand_in.hangs = false;
  stand_in_copies = {};
}

TEST_CASE("what a kernel finds wrong is an error when the host next waits for the GPU") {
  if (world_size() > 1) return;
  const Machine machine({.total = 1000 * mib});
  const auto pool = Pool::make(Region::make_gpu(0, 1)), host = Pool::make();
  const Buffer here = host->allocate(64), there = pool->allocate(64);
  Region& gpu = *pool->device_memory();
  const auto check = [&](std::int64_t place, std::int64_t value) {  // as its kernel
    detail::FaultWord* const words = gpu.faults()->next(gpu);
    REQUIRE(gpu.contains(words, detail::Faults::teams * sizeof(detail::FaultWord)));
    std::fill_n(words, detail::Faults::teams, detail::FaultWord{detail::FaultWord::none, 0});
    words[3] = {place, value};
    gpu.faults()->add(std::string("id \0 is wrong", 13));
  };
  check(detail::FaultWord::none, 0);
  check(100, 5);
  check(50, 6);
  CHECK_NOTHROW(Exec{.pool = pool.get()}.zero(there.data(), 64));  // the host does not wait
  CHECK_THROWS_WITH(copy(here, there), Catch::Matchers::Equals("id 5 is wrong"));
  CHECK_NOTHROW(copy(here, there));
  check(1, -7);
  CHECK_THROWS_WITH(gpu.synchronize(), Catch::Matchers::Equals("id -7 is wrong"));
  CHECK_NOTHROW(gpu.synchronize());
  // A read takes the words along: one wait, and the GPU writes both by itself.
  const int waits = stand_in_waits, far = stand_in_far_copies;
  check(detail::FaultWord::none, 0);
  std::fill_n(there.as<int>(), 16, 5);
  copy(here, there);
  CHECK(std::all_of(here.as<int>(), here.as<int>() + 16, [](int x) { return x == 5; }));
  CHECK(stand_in_waits == waits + 1);
  CHECK(stand_in_far_copies == far);
  // Those of many checks too.
  for (int i = 0; i < 300; ++i) check(detail::FaultWord::none, 0);
  copy(here, there);
  CHECK(stand_in_waits == waits + 2);
  CHECK(stand_in_far_copies == far);
  // What is too long for the mirror is copied as it is.
  const Buffer many = host->allocate(2 * mib), their_place = pool->allocate(2 * mib);
  std::memset(their_place.data(), 6, 2 * mib);
  check(detail::FaultWord::none, 0);
  copy(many, their_place);
  CHECK(std::memcmp(many.data(), their_place.data(), 2 * mib) == 0);
  CHECK(stand_in_waits == waits + 3);
  CHECK(stand_in_far_copies == far + 2);
}

TEST_CASE("an error of a kernel whose result nobody has read is one of the launch") {
  if (world_size() > 1) return;
  const Machine machine({.total = 1000 * mib, .late = cudaErrorIllegalAddress});
  const auto run = [] {
    launch({{"d", 1}},
           [](const DevicePtr& device) {
             const Buffer block = device->pool()->allocate(64);
             device->exec().zero(block.data(), block.bytes());  // as a kernel: nothing waits for it
           },
           {.kind = DeviceKind::gpu});
  };
  CHECK_THROWS_WITH(run(), Catch::Contains("cudaStreamSynchronize failed: an error"));
  stand_in.late = cudaSuccess;
  CHECK_NOTHROW(run());
}

TEST_CASE("an error of CUDA names the call, and what to do where kernels are for other GPUs") {
  CHECK_NOTHROW(detail::check_cuda(cudaSuccess, "a call"));
  CHECK_THROWS_WITH(
      detail::check_cuda(cudaErrorIllegalAddress, "cudaMemcpyAsync"),
      Catch::Contains("cudaMemcpyAsync failed: an error") && Catch::Contains("CUDA_LAUNCH_BLOCKING=1 names its op"));
  CHECK_THROWS_WITH(detail::check_cuda(cudaErrorNoKernelImageForDevice, "the start of a kernel"),
                    Catch::Contains("compiled for other GPUs") && Catch::Contains("-DCMAKE_CUDA_ARCHITECTURES"));
}

#include "main.cpp"  // here, as it takes the same headers
