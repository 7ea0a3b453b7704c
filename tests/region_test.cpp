// Memory that blocks are cut from: which range, ranges that are split and joined again, and the pools over it.
#include <sys/resource.h>
#include <unistd.h>
#if defined(SHARDLIB_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "resident.hpp"
#include "scratch.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/memory/control_groups.hpp"
#include "shardlib/memory/system.hpp"

using namespace shardlib;

namespace {

/// Where the next block lies, looked for unit by unit of 64 bytes.
class Reference {
 public:
  std::size_t allocate(std::size_t units) {
    std::size_t best = in_block_.size(), best_length = 0, begin = 0;
    while (begin < in_block_.size()) {
      std::size_t end = begin;
      while (end < in_block_.size() && !in_block_[end]) ++end;
      const std::size_t length = end - begin;
      const bool is_near = best_length != 0 && best_length <= 4 * units;
      if (length >= units && !is_near && (best_length == 0 || length < best_length)) {
        best = begin;
        best_length = length;
      }
      if (end == in_block_.size() && best_length == 0) best = begin;  // goes on into what is untouched
      begin = end + 1;
    }
    in_block_.resize(std::max(in_block_.size(), best + units));
    mark(best, units, true);
    return best;
  }
  void mark(std::size_t begin, std::size_t units, bool in_block) {
    std::fill_n(in_block_.begin() + static_cast<std::ptrdiff_t>(begin), units, in_block);
  }
  [[nodiscard]] std::size_t units() const { return in_block_.size(); }

 private:
  std::vector<bool> in_block_;
};

}  // namespace

TEST_CASE("a block comes from the lowest range of up to four times its size, else from the smallest") {
  const auto region = Region::make_meta();
  const auto take = [&](std::size_t units) { return region->allocate(units * 64); };
  std::byte* const twenty = take(20);
  take(1);
  std::byte* const six = take(6);
  take(1);
  std::byte* const four = take(4);
  take(1);
  std::byte* const other_six = take(6);
  take(1);
  region->free(other_six, 6 * 64);
  region->free(twenty, 20 * 64);
  region->free(six, 6 * 64);
  CHECK(take(1) == six);  // of 6, 6 and 20, all of them more than four times as many
  region->free(six, 64);
  region->free(four, 4 * 64);
  CHECK(take(1) == four);             // of 4, 6, 6 and 20
  CHECK(take(2) == six);              // of 3, 6, 6 and 20
  CHECK(take(5) == twenty);           // of 6 and 20: four times as many
  CHECK(take(4) == twenty + 5 * 64);  // what is left of a range is a range
  CHECK(take(1) == six + 2 * 64);     // of 3, 4, 6 and 11, the lowest except the 11
  CHECK(take(12) == twenty + 40 * 64);
  CHECK(region->reserved() == 52 * 64);
}

TEST_CASE("freed neighbors are one range again, in whichever order they are freed") {
  std::vector<std::size_t> order{0, 1, 2, 3};
  do {
    const auto region = Region::make_meta();
    std::vector<std::byte*> blocks;
    for (std::size_t i = 0; i < 4; ++i) blocks.push_back(region->allocate((i + 1) * 64));
    const std::byte* const last = region->allocate(64);
    for (const std::size_t i : order) region->free(blocks[i], (i + 1) * 64);
    REQUIRE(region->allocate(10 * 64) == blocks[0]);
    REQUIRE(last == blocks[0] + 10 * 64);
    REQUIRE(region->reserved() == 11 * 64);
  } while (std::ranges::next_permutation(order).found);
}

TEST_CASE("a block that shrinks leaves its end to the next one, and its pool counts that") {
  const auto region = Region::make_meta();
  std::byte* const block = region->allocate(10 * 64);
  region->allocate(64);
  region->shrink(block, 10 * 64, 4 * 64);
  CHECK(region->allocate(6 * 64) == block + 4 * 64);
  region->free(block, 4 * 64);
  CHECK(region->allocate(4 * 64) == block);
  CHECK(region->reserved() == 11 * 64);

  const auto pool = Pool::make();
  {
    const Buffer kept = pool->allocate(100'000);
    std::memset(kept.data(), 7, 50'000);
    pool->shrink(kept, 50'000);
    CHECK(kept.bytes() == 50'000);
    CHECK(pool->stats().live == 50'048);
    const Buffer next = pool->allocate(50'000);
    std::memset(next.data(), 8, 50'000);
    const auto between = next.data() - (kept.data() + 50'048);  // 64 bytes with AddressSanitizer
    CHECK((between == 0 || between == 64));
    CHECK(kept.data()[49'999] == std::byte{7});
  }
  CHECK(pool->stats().live == 0);
  const Buffer all = pool->allocate(100'000);
  CHECK(pool->stats().reserved < 110'000);
  int elsewhere = 0;
  pool->shrink(Buffer(&elsewhere, sizeof elsewhere, nullptr), 2);  // is not the pool's, and stays
  Pool::make()->shrink(all, 2);
  CHECK(all.bytes() == 100'000);
}

TEST_CASE("a block that no free range holds begins in the last one") {
  const auto region = Region::make_meta();
  region->allocate(64);
  std::byte* const block = region->allocate(100 * 64);
  region->free(block, 100 * 64);
  CHECK(region->allocate(300 * 64) == block);
  CHECK(region->reserved() == 301 * 64);
}

TEST_CASE("blocks lie where the rule puts them, over many steps") {
  const auto region = Region::make_meta();
  Reference reference;
  const std::byte* const first = region->allocate(64);
  reference.allocate(1);
  std::mt19937 random(7);
  const auto below = [&](std::size_t n) { return random() % n; };
  std::vector<std::pair<std::size_t, std::size_t>> blocks;  // first unit, units
  for (int step = 0; step < 20000; ++step) {
    if (!blocks.empty() && below(100) < (step / 1000 % 2 == 0 ? 45U : 55U)) {
      std::swap(blocks[below(blocks.size())], blocks.back());
      const auto [begin, units] = blocks.back();
      blocks.pop_back();
      region->free(const_cast<std::byte*>(first) + begin * 64, units * 64);
      reference.mark(begin, units, false);
    } else {
      const std::size_t units = 1 + below(below(10) == 0 ? 60 : 6);
      const std::size_t begin = reference.allocate(units);
      REQUIRE(region->allocate(units * 64) == first + begin * 64);
      REQUIRE(region->reserved() == reference.units() * 64);
      blocks.emplace_back(begin, units);
    }
  }
}

TEST_CASE("blocks of any size are aligned, and none reaches into another") {
  const auto region = Region::make();
  std::mt19937 random(11);
  struct Block {
    std::byte* data;
    std::size_t bytes;
    std::byte fill;
  };
  std::vector<Block> blocks;
  const auto free_last = [&] {
    const auto [data, bytes, fill] = blocks.back();
    REQUIRE(std::all_of(data, data + bytes, [fill = fill](std::byte b) { return b == fill; }));
    region->free(data, bytes);
    blocks.pop_back();
  };
  for (int step = 0; step < 3000; ++step) {
    if (!blocks.empty() && random() % 2 == 0) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      free_last();
    } else {
      const std::size_t bytes = random() % (random() % 8 == 0 ? 300000 : 300);
      blocks.push_back({region->allocate(bytes), bytes, static_cast<std::byte>(random() % 256)});
      REQUIRE(reinterpret_cast<std::uintptr_t>(blocks.back().data) % 64 == 0);
      std::memset(blocks.back().data, static_cast<int>(blocks.back().fill), bytes);
    }
  }
  while (!blocks.empty()) free_last();
  const std::size_t reserved = region->reserved();
  REQUIRE(region->allocate(reserved - 64) != nullptr);  // all one range again, except for a sanitizer's guard
  CHECK(region->reserved() == reserved);
}

TEST_CASE("a region without room says so and goes on") {
  for (const auto& region : {Region::make(), Region::make_meta()}) {
    std::byte* const block = region->allocate(1000);
    CHECK(region->allocate(std::size_t{1} << 62) == nullptr);
    CHECK(region->allocate(1000) != nullptr);
    region->free(block, 1000);
    CHECK(region->allocate(1000) == block);
  }
}

TEST_CASE("what a range has left is granted before blocks come from it") {
  rlimit before{};
  getrlimit(RLIMIT_AS, &before);
  if (before.rlim_max != RLIM_INFINITY) return;
  const rlimit any{RLIM_INFINITY - 1, RLIM_INFINITY};  // a limit, so that ranges are of 64 MiB, but of no effect
  setrlimit(RLIMIT_AS, &any);
  constexpr std::size_t range = std::size_t{64} << 20, most_guards = 1024;
  const auto region = Region::make();
  region->allocate(64);
  const std::size_t granted = detail::grants.bytes;
  region->allocate(range + 64);  // in a range of its own
  CHECK(detail::grants.bytes >= granted + 2 * range - most_guards);
  const std::size_t all = detail::grants.bytes;
  region->allocate(range / 2);  // in what the first one has left
  CHECK(detail::grants.bytes == all);
  setrlimit(RLIMIT_AS, &before);
}

TEST_CASE("pages stay for the next block until trim") {
  const auto pool = Pool::make();
  const std::size_t bytes = std::size_t{32} << 20;  // into the huge pages, if there are any
  Buffer before = pool->allocate(1000);
  std::memset(before.data(), 1, 1000);
  Buffer buffer = pool->allocate(bytes);
  const std::byte* const data = buffer.data();
  std::memset(buffer.data(), 1, bytes);
  const std::size_t pages = resident_pages(data, bytes);
  CHECK(pages >= bytes / static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) - 1);
  buffer = Buffer();
  CHECK(resident_pages(data, bytes) == pages);
  pool->trim();
  CHECK(resident_pages(data, bytes) == 0);
  CHECK(before.data()[999] == std::byte{1});
  CHECK(pool->allocate(bytes).data() == data);
}

TEST_CASE("pools of one region use what the others have freed, and count their own") {
  const auto region = Region::make();
  const auto one = Pool::make(region), other = Pool::make(region);
  Buffer buffer = one->allocate(100000);
  const std::byte* const data = buffer.data();
  CHECK(one->stats().live == 102400);
  CHECK(other->stats().live == 0);
  buffer = Buffer();
  buffer = other->allocate(70000);
  CHECK(buffer.data() == data);
  CHECK(one->stats().live == 0);
  CHECK(one->stats().peak == 102400);
  CHECK(other->stats().peak == 73728);
}

TEST_CASE("threads free each other's blocks") {
  constexpr std::size_t threads = 4;
  const auto pool = Pool::make();
  struct Mailbox {
    std::mutex mutex;
    std::vector<std::pair<Buffer, std::byte>> buffers;
  };
  std::vector<Mailbox> mailboxes(threads);
  std::vector<int> spoiled(threads);
  const auto read = [&](std::size_t me) {
    std::vector<std::pair<Buffer, std::byte>> mine;
    {
      const std::lock_guard lock(mailboxes[me].mutex);
      mine.swap(mailboxes[me].buffers);
    }
    for (const auto& [buffer, fill] : mine) {
      const std::byte* const data = buffer.data();
      if (!std::all_of(data, data + buffer.bytes(), [fill = fill](std::byte b) { return b == fill; })) ++spoiled[me];
    }
  };
  {
    std::vector<std::jthread> running;
    for (std::size_t me = 0; me < threads; ++me) {
      running.emplace_back([&, me] {
        std::mt19937 random(static_cast<std::uint32_t>(me));
        for (int step = 0; step < 500; ++step) {
          Buffer buffer = pool->allocate(random() % (random() % 8 == 0 ? 100000 : 1000));
          const auto fill = static_cast<std::byte>(random() % 256);
          std::memset(buffer.data(), static_cast<int>(fill), buffer.bytes());
          Mailbox& to = mailboxes[random() % threads];
          {
            const std::lock_guard lock(to.mutex);
            to.buffers.emplace_back(std::move(buffer), fill);
          }
          read(me);
        }
      });
    }
  }
  for (std::size_t me = 0; me < threads; ++me) read(me);
  CHECK(spoiled == std::vector<int>(threads));
  const auto stats = pool->stats();
  CHECK(stats.live == 0);
  const Buffer all = pool->allocate(stats.reserved / 4096 * 4096 - 4096);
  CHECK(pool->stats().reserved == stats.reserved);
}

TEST_CASE("what is left for a process is what is available, less what it may write yet") {
  using detail::left_of;
  STATIC_REQUIRE(left_of(1000, 0, 0) == 1000);
  STATIC_REQUIRE(left_of(1000, 640, 640) == 990);   // page tables
  STATIC_REQUIRE(left_of(1000, 640, 9000) == 990);  // other memory, too
  STATIC_REQUIRE(left_of(1000, 640, 240) == 590);
  STATIC_REQUIRE(left_of(1000, 6400, 0) == 0);
  const test::Scratch folder;
  const std::string path = folder / "meminfo";
  const auto sum = [&](const std::string& text) {
    test::put(path, text);
    return detail::sum_of_lines(path, "MemAvailable:", "SwapFree:");
  };
  CHECK(sum("MemTotal:  100 kB\nMemAvailable:  30 kB\nSwapFree:  5 kB\nHugepagesize: 2048 kB\n") == 35 * 1024);
  CHECK(sum("SwapFree:  5 kB\nMemAvailable:  0 kB\n") == 5 * 1024);
  CHECK(sum("MemAvailable:  30 kB\n") == 30 * 1024);
  CHECK(sum("MemTotal:  100 kB\nSwapFree:  5 kB\n") == std::nullopt);
  CHECK(detail::sum_of_lines(folder / "nothing", "MemAvailable:", "SwapFree:") == std::nullopt);

  // Control groups: the least of the groups around a process, without what can be dropped.
  const std::string groups = folder / "cgroup", root = folder / "fs";
  const auto group = [&](const std::string& path, const std::string& files) {
    std::filesystem::create_directories(root + path);
    std::istringstream each(files);
    for (std::string name, value; each >> name && std::getline(each, value, ';');)
      test::put(root + path + "/" + name, value);
  };
  test::put(groups, "0::/jobs/one\n");
  CHECK(detail::control_group_left(groups, root) == std::nullopt);
  group("/jobs/one", "memory.max max; memory.current 50;");
  CHECK(detail::control_group_left(groups, root) == std::nullopt);
  group("/jobs", "memory.max 1000; memory.current 700; memory.stat anon 1\ninactive_file 300\n;");
  CHECK(detail::control_group_left(groups, root) == 600);
  group("/jobs/one", "memory.max 100; memory.current 150;");
  CHECK(detail::control_group_left(groups, root) == 0);
  group("/jobs/one", "memory.max 900; memory.current 150;");
  CHECK(detail::control_group_left(groups, root) == 600);
  CHECK(detail::least_group_limit(groups, root, 5000) == 900);
  CHECK(detail::least_group_limit(groups, root, 800) == 800);
  test::put(groups, "3:cpuset:/\n4:cpu,memory:/outside/container\n0::/\n");
  CHECK(detail::control_group_left(groups, root) == std::nullopt);
  group("/memory", "memory.limit_in_bytes 5000; memory.usage_in_bytes 1000; memory.stat total_inactive_file 10\n;");
  CHECK(detail::control_group_left(groups, root) == 4010);
  CHECK(detail::least_group_limit(groups, root, 6000) == 5000);
  CHECK(detail::control_group_left(folder / "nothing", root) == std::nullopt);

  // What is written is pending no more.
  constexpr std::size_t bytes = std::size_t{64} << 20;
  const auto written = [] { return detail::sum_of_lines("/proc/self/status", "RssAnon:", "VmSwap:").value(); };
  const auto pool = Pool::make();
  const Buffer block = pool->allocate(bytes);
  const std::size_t before = written();
  std::memset(block.data(), 1, bytes);
  CHECK(written() >= before + bytes / 2);
}

#if defined(SHARDLIB_ADDRESS_SANITIZER)
TEST_CASE("AddressSanitizer sees what lies in no block") {
  std::byte* data = nullptr;
  {
    const auto region = Region::make();
    data = region->allocate(128);
    CHECK(__asan_region_is_poisoned(data, 128) == nullptr);
    CHECK(__asan_address_is_poisoned(data + 128) == 1);
    std::byte* const next = region->allocate(128);
    CHECK(__asan_region_is_poisoned(next, 128) == nullptr);
    region->free(data, 128);
    CHECK(__asan_address_is_poisoned(data) == 1);
    CHECK(region->allocate(64) == data);
    CHECK(__asan_address_is_poisoned(data) == 0);
    CHECK(__asan_address_is_poisoned(data + 64) == 1);
    region->shrink(next, 128, 64);
    CHECK(__asan_region_is_poisoned(next, 64) == nullptr);
    CHECK(__asan_address_is_poisoned(next + 64) == 1);
    CHECK(__asan_address_is_poisoned(next + 128) == 1);
  }
  CHECK(__asan_region_is_poisoned(data, 128 + 64 + 128) == nullptr);  // whoever has the addresses next
}
#endif
