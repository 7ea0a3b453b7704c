// The measured peak of the machine. On CPUs, MFU (model FLOPs utilization) is a fraction of it.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shardlib::run {

namespace detail {

// Chains in flight: latency 4 x 2 units needs 8; AVX2 has 16 registers, two of which hold the operands.
inline constexpr int fma_chains = 12;
inline constexpr int fma_rounds = 20'000;

/// Runs fma_chains * fma_rounds multiply-adds of `lanes` floats; returns a value that depends on all of them.
struct FmaLoop {
  float (*run)(float factor, float addend);
  int lanes;
};

#if defined(__x86_64__)
// In assembly: what the loop measures must not depend on how the program is optimized. Below -O2 compilers keep the
// chains in memory, and read half of the machine's peak. Early clobbers: no chain may share a register with an operand
// that has its first value, or all others wait for it.
#define SHARDLIB_FMA(chain) "vfmadd213ps %[b], %[a], %" #chain "\n\t"
#define SHARDLIB_FMA_LOOP(x, rounds, a, b)                                                                          \
  asm volatile("1:\n\t" SHARDLIB_FMA(0) SHARDLIB_FMA(1) SHARDLIB_FMA(2) SHARDLIB_FMA(3) SHARDLIB_FMA(4)             \
                   SHARDLIB_FMA(5) SHARDLIB_FMA(6) SHARDLIB_FMA(7) SHARDLIB_FMA(8) SHARDLIB_FMA(9) SHARDLIB_FMA(10) \
                       SHARDLIB_FMA(11) "dec %[n]\n\tjnz 1b"                                                        \
               : "+&v"(x[0]), "+&v"(x[1]), "+&v"(x[2]), "+&v"(x[3]), "+&v"(x[4]), "+&v"(x[5]), "+&v"(x[6]),         \
                 "+&v"(x[7]), "+&v"(x[8]), "+&v"(x[9]), "+&v"(x[10]), "+&v"(x[11]), [n] "+r"(rounds)                \
               : [a] "v"(a), [b] "v"(b)                                                                             \
               : "cc")
static_assert(fma_chains == 12);

__attribute__((target("avx512f"))) inline float fma_loop_avx512(float factor, float addend) {
  const __m512 a = _mm512_set1_ps(factor), b = _mm512_set1_ps(addend);
  __m512 x[fma_chains];
  for (__m512& chain : x) chain = b;
  int rounds = fma_rounds;
  SHARDLIB_FMA_LOOP(x, rounds, a, b);
  for (int i = 1; i < fma_chains; ++i) x[0] += x[i];
  return x[0][0];
}

__attribute__((target("avx2,fma"))) inline float fma_loop_avx2(float factor, float addend) {
  const __m256 a = _mm256_set1_ps(factor), b = _mm256_set1_ps(addend);
  __m256 x[fma_chains];
  for (__m256& chain : x) chain = b;
  int rounds = fma_rounds;
  SHARDLIB_FMA_LOOP(x, rounds, a, b);
  for (int i = 1; i < fma_chains; ++i) x[0] += x[i];
  return x[0][0];
}
#undef SHARDLIB_FMA_LOOP
#undef SHARDLIB_FMA
#endif

/// Vectors of 16 bytes, which every 64-bit CPU has; the compiler fuses where the target's instructions allow it.
inline float fma_loop_portable(float factor, float addend) {
  using Vector = float __attribute__((vector_size(16)));
  const Vector a = Vector{} + factor, b = Vector{} + addend;
  Vector x[fma_chains];
  for (Vector& chain : x) chain = b;
  for (int round = 0; round < fma_rounds; ++round) {
#if !defined(__NVCC__)  // whose front end does not know it
#pragma GCC unroll 12
#endif
    for (Vector& chain : x) chain = chain * a + b;
  }
  for (int i = 1; i < fma_chains; ++i) x[0] += x[i];
  return x[0][0];
}

inline FmaLoop widest_fma_loop() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {fma_loop_avx512, 16};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {fma_loop_avx2, 8};
#endif
  return {fma_loop_portable, 4};
}

inline int usable_cores() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN)));
}

}  // namespace detail

/// The measured f32 FLOP/s of fused multiply-adds from registers on `threads` threads at once (0: one for each core
/// that this process may use). It uses the widest vectors of the CPU, whatever this program was compiled for, because
/// the GEMM library also chooses at run time. It takes about 0.15 s. A GEMM cannot be faster, so a model's FLOPs over
/// its time and this figure is at most 1. Ranks of one machine call it together and add up, so that all share its power
/// budget.
[[nodiscard]] inline double measured_peak_flops(int threads = 0) {
  const detail::FmaLoop loop = detail::widest_fma_loop();
  const int count = threads > 0 ? threads : detail::usable_cores();
  using Clock = std::chrono::steady_clock;
  constexpr auto warmup = std::chrono::milliseconds(30), measured = std::chrono::milliseconds(120);
  std::atomic<double> total{0};
  std::atomic<int> ready{0}, awaited{count};
  const auto work = [&] {
    // Volatile, so that the loop cannot be computed beforehand.
    volatile float factor = 0.999999F, addend = 1e-6F, sink = 0;
    ready.fetch_add(1);
    while (ready.load() < awaited.load()) std::this_thread::yield();
    const auto begin = Clock::now();
    while (Clock::now() - begin < warmup) sink = loop.run(factor, addend);
    // The best of short windows: one that another process disturbs says nothing about the machine.
    double best = 0;
    const auto start = Clock::now();
    while (Clock::now() - start < measured) {
      const auto from = Clock::now();
      constexpr int repeats = 20;
      for (int i = 0; i < repeats; ++i) sink = loop.run(factor, addend);
      const double seconds = std::chrono::duration<double>(Clock::now() - from).count();
      best = std::max(best, 2.0 * loop.lanes * detail::fma_chains * detail::fma_rounds * repeats / seconds);
    }
    static_cast<void>(sink);
    total.fetch_add(best);
  };
  std::vector<std::thread> workers;
  try {
    for (int i = 1; i < count; ++i) workers.emplace_back(work);
  } catch (const std::system_error&) {  // the peak of the threads that the system allows
    awaited = static_cast<int>(workers.size()) + 1;
  }
  work();
  for (std::thread& worker : workers) worker.join();
  return total.load();
}

}  // namespace shardlib::run
