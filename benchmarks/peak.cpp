// The peaks of the machine on all its cores at once: FMA, and copies from memory to memory.
//   peak         GFLOP/s of f32 multiply-adds, GB/s read and written by copies
// The best of several windows: the machine's clock changes, and what is compared with a peak should not exceed it.
#include <shardlib/run/options.hpp>
#include <shardlib/run/peak.hpp>
#include <shardlib/support/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>
#include <vector>

namespace {

// Bytes a second, read and written, of `threads` threads that copy blocks larger than their caches.
double copy_bandwidth(int threads) {
  using Clock = std::chrono::steady_clock;
  constexpr std::size_t bytes = std::size_t{256} << 20;
  constexpr int rounds = 7;
  std::barrier together(threads);
  double best = 0;
  const auto copy = [&](bool times) {
    std::vector<char> from(bytes, 1), to(bytes, 2);
    for (int round = 0; round < rounds; ++round) {
      together.arrive_and_wait();
      const auto begin = Clock::now();
      std::memcpy(to.data(), from.data(), bytes);
      together.arrive_and_wait();
      const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      if (times) best = std::max(best, 2.0 * threads * static_cast<double>(bytes) / seconds);
    }
  };
  std::vector<std::jthread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(copy, false);
  copy(true);
  return best;
}

}  // namespace

int main(int argc, char** argv) try {
  shardlib::run::Options options("peak", "Prints GFLOP/s of f32 multiply-adds and GB/s read and written by copies.");
  if (!options.parse(argc, argv)) return 0;
  const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  double flops = 0;
  for (int round = 0; round < 3; ++round) flops = std::max(flops, shardlib::run::measured_peak_flops(cores));
  fmt::print("{:.1f} {:.1f}\n", flops / 1e9, copy_bandwidth(cores) / 1e9);
  return 0;
} catch (const shardlib::Error& error) {
  fmt::print(stderr, "error: {}\n", error.what());
  return 2;
}
