// Figures, each a ratio measured in one run (medians, the two sides interleaved):
//   figures                     one process: GEMM, typed shell, fusion, attention, loss, a gpt_fsdp step; the FMA peak
//   mpirun -n 2 figures         collectives against the MPI library's own; -n 4 where there are fewer cores than ranks
// benchmarks/run.sh builds and runs all three.
#include <fmt/format.h>

#include <shardlib/comm/flight_recorder.hpp>
#include <shardlib/kernels/gemm.hpp>
#include <shardlib/run/options.hpp>
#include <shardlib/run/peak.hpp>
#include <shardlib/shardlib.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "../examples/gpt_model.hpp"
#include "times.hpp"
#if defined(SHARDLIB_WITH_MPI)
#include <mpi.h>
#endif

using namespace shardlib;

namespace {

double seconds_of(const std::function<void()>& f) {
  const double begin = wall_seconds();
  f();
  return wall_seconds() - begin;
}

// The best of several: the machine's clock changes, and what is compared with the peak should not exceed it.
double fma_peak(int threads) {
  double best = 0;
  for (int round = 0; round < 5; ++round) best = std::max(best, run::measured_peak_flops(threads));
  return best;
}

std::string threads_of(const Device& device) {
  const int threads = device.exec().threads;
  return threads == 1 ? "1 thread" : fmt::format("{} threads", threads);
}

// The shapes are those of a training step of GPT-2 124M, and a cube. Cold: operands and results lie in memory and in no
// cache, as in a step, where other layers have been between.
void gemm_figures(const Mesh<"d t">& mesh) {
  fmt::print(
      "\nGEMM: einsum_unreduced<\"A K, K N -> A N\"> over the library called directly, with its own threads (f32, 1 "
      "process, {});\nGFLOP/s, and what they are of the peak, measured before each\n",
      threads_of(*mesh.device()));
  fmt::print("{:>18}  {:>14}  {:>14}  {:>6}  {:>14}  {:>14}\n", "m x n x k", "ours", "library", "ratio", "ours, cold",
             "library, cold");
  const std::int64_t shapes[][3] = {{256, 3072, 768},  {256, 768, 3072},  {1024, 768, 768},
                                    {1024, 3072, 768}, {256, 50304, 768}, {2048, 2048, 2048}};
  const auto& exec = mesh.device()->exec();
  const Buffer memory = exec.pool->allocate(std::size_t{1} << 30);
  std::memset(memory.data(), 0, memory.bytes());
  const auto numbers = static_cast<std::int64_t>(memory.bytes() / sizeof(f32));
  for (const auto& [m, n, k] : shapes) {
    const double peak = fma_peak(exec.threads);
    const auto x = random_normal<f32, "A K">(mesh, {{"A", m}, {"K", k}}, {0, 1});
    const auto w = random_normal<f32, "K N">(mesh, {{"K", k}, {"N", n}}, {0, 2});
    const Buffer out = exec.pool->allocate(static_cast<std::size_t>(m * n) * sizeof(f32));
    const auto library = [&, m = m, n = n, k = k](const f32* a, const f32* b, f32* c) {
#if defined(SHARDLIB_WITH_DNNL)
      dnnl_sgemm('N', 'N', m, n, k, 1, a, k, b, n, 0, c, n);
#else
      kernels::gemm<f32>(exec, false, false, m, n, k, a, k, b, n, c, n, false);
#endif
    };
    std::int64_t next = 0;
    const auto cold = [&, m = m, n = n, k = k](const auto& f) {
      const std::int64_t size = m * k + k * n + m * n, at = next + size > numbers ? 0 : next;
      next = at + size;
      f32* const a = memory.as<f32>() + at;
      f(a, a + m * k, a + m * k + k * n);
    };
    const auto t = interleaved(m * n * k > 1'000'000'000 ? 9 : 25,
                               {[&] { einsum_unreduced<"A K, K N -> A N">(x, w); },
                                [&] { library(x.span().data(), w.span().data(), out.as<f32>()); },
                                [&] {
                                  cold([&, m = m, n = n, k = k](const f32* a, const f32* b, f32* c) {
                                    kernels::gemm<f32>(exec, false, false, m, n, k, a, k, b, n, c, n, false);
                                  });
                                },
                                [&] { cold(library); }});
    const auto rate = [&, m = m, n = n, k = k](std::size_t i) {
      const double flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) / t[i].median;
      return fmt::format("{:.0f} ({:2.0f} %)", flops / 1e9, 100 * flops / peak);
    };
    fmt::print("{:>18}  {:>14}  {:>14}  {:>6.3f}  {:>14}  {:>14}\n", fmt::format("{}x{}x{}", m, n, k), rate(0), rate(1),
               t[1].median / t[0].median, rate(2), rate(3));
  }
}

void shell_figures(const Mesh<"d t">& mesh) {
  fmt::print(
      "\nTyped op over the erased kernel called by hand (relu of a [1024 x 768] f32; time ratio, 1.00 is no cost)\n");
  const std::int64_t n = 1024 * 768;
  const auto x = random_normal<f32, "A K">(mesh, {{"A", 1024}, {"K", 768}}, {0, 3});
  const auto times = interleaved(401, {[&] { relu(x); },
                                       [&] {
                                         const Buffer out =
                                             mesh.device()->pool()->allocate(static_cast<std::size_t>(n) * 4);
                                         kernels::apply_flat(
                                             mesh.device()->exec(), n, [](const f32& in, f32& y) { y = relu(in); },
                                             x.span().data(), out.as<f32>());
                                       }});
  // The spread of a ratio of two medians that take turns: the fastest over the slowest, and the other way round.
  fmt::print("typed {:.1f} us, by hand {:.1f} us, ratio {:.3f} ({:.2f} .. {:.2f})\n", times[0].median * 1e6,
             times[1].median * 1e6, times[0].median / times[1].median, times[0].low / times[1].high,
             times[0].high / times[1].low);
}

struct Gated {
  Tensor<f32, "B/d M/t"> v, w;
};

// The same function as six elementwise ops and as one `map`, which fuses them.
void fusion_figures(const Mesh<"d t">& mesh) {
  fmt::print(
      "\ntanh(2 v) w + swish(v) / 2 of [1024 x 768] f32 as six ops and as one map; us, medians; the ratio of six ops "
      "to "
      "one map\n");
  const Sizes sizes{{"B", 1024}, {"M", 768}};
  const auto random = [&](std::uint64_t i) { return random_normal<f32, "B/d M/t">(mesh, sizes, {0, i}); };
  const Gated gated{random(1), random(2)};
  const auto ct = random(3);
  const auto ops = [](const Gated& x) { return tanh(x.v * 2.0) * x.w + swish(x.v) * 0.5; };
  const auto fused = [](const Gated& x) {
    return map([](auto v, auto w) { return tanh(v * 2.0) * w + swish(v) * 0.5; }, x.v, x.w);
  };
  const auto step = [&](const auto& f) {
    static_cast<void>(value_and_grad(
        mesh, [&](const Gated& x) { return sum(f(x) * ct); }, gated));
  };
  const auto t =
      interleaved(51, {[&] { ops(gated); }, [&] { fused(gated); }, [&] { step(ops); }, [&] { step(fused); }});
  for (const std::size_t i : {std::size_t{0}, std::size_t{2}})
    fmt::print("{:<9}  six ops {:>7.0f}  one map {:>7.0f}  ratio {:.2f}\n", i == 0 ? "forward" : "both",
               t[i].median * 1e6, t[i + 1].median * 1e6, t[i].median / t[i + 1].median);
}

gpt::Model<f32> random_model(const Mesh<"r d s t">& mesh, const Sizes& sizes, int layers) {
  gpt::Model<f32> w;
  w.unembed.resize(1);
  w.layers.resize(static_cast<std::size_t>(layers));
  initialize(mesh, w, sizes, 0, [](std::string_view) { return Normal{0, 0.05}; });
  return w;
}

void step_figures(const Mesh<"r d s t">& mesh, double peak) {
  const std::int64_t batch = 16, length = 128;
  fmt::print("\nA gpt_fsdp forward and backward pass (4 layers, d_model 256, batch 16, seq 128; 1 process, {})\n",
             threads_of(*mesh.device()));
  const Sizes sizes{{"V", 256}, {"M", 256}, {"Q", 2}, {"K", 2}, {"D", 64}, {"F", 768}, {"B", batch}, {"L", length}};
  const auto w = random_model(mesh, sizes, 4);
  const auto ids = cast<i32>(random_uniform<f32, "B/r/d L/s">(mesh, sizes, {0, 99}) * 255.0);
  const gpt::Batch data{ids, ids, zeros<i32, "B/r/d L/s">(mesh, sizes),
                        full<f32, "B/r/d L/s">(mesh, sizes, 1 / static_cast<double>(batch * length))};
  const auto step = [&] { value_and_grad(mesh, gpt::loss<f32>, w, data, gpt::ModelConfig{}); };
  step();
  auto& counts = detail::program_state(mesh.device()).counts;
  counts.clear();
  step();
  const double flops = counts.at("einsum_unreduced").flops;
  const auto t = interleaved(9, {step})[0];
  fmt::print(
      "{:.1f} ms ({:.1f} .. {:.1f}), {:.2f} GFLOP of einsums (recompute included), {:.1f} GFLOP/s, {:.1f} % of the "
      "peak\n",
      t.median * 1e3, t.low * 1e3, t.high * 1e3, flops / 1e9, flops / t.median / 1e9, 100 * flops / t.median / peak);
}

struct Heads {
  Tensor<f32, "B/d L H/t D"> q, k, v;
};

// GPT-2's attention in one op, in einsums, and the matrix products of its scores alone, forward and with backward.
void attention_figures(const Mesh<"d t">& mesh) {
  fmt::print(
      "\nAttention of 12 heads of width 64: causal_attention, the same in einsums, and the matrix products of the "
      "visible\n"
      "half of the scores alone (2 forward; 7 with the backward pass); ms, medians; the ratio of einsums to fused\n");
  fmt::print("{:>8}  {:<9}  {:>8}  {:>8}  {:>8}  {:>6}\n", "B x T", "pass", "fused", "einsums", "products", "ratio");
  for (const auto& [batch, length] : {std::pair<std::int64_t, std::int64_t>{4, 64}, {1, 1024}}) {
    const Sizes sizes{{"B", batch}, {"L", length}, {"H", 12}, {"D", 64}};
    const auto random = [&](std::uint64_t i) { return random_normal<f32, "B/d L H/t D">(mesh, sizes, {0, i}); };
    const Heads heads{random(1), random(2), random(3)};
    const auto ct = random(4);
    const auto segments = zeros<i32, "B/d L">(mesh, sizes);
    const auto mask = logical_and(equal(rename<"L -> Qlen">(segments), rename<"L -> Klen">(segments)),
                                  causal_mask<"Qlen Klen">(mesh, length, length));
    const auto fused = [&](const Heads& h) { return causal_attention<"L", "D">(h.q, h.k, h.v, segments); };
    const auto einsums = [&](const Heads& h) {
      const auto logits = einsum_unreduced<"B/d Qlen H/t D, B/d Klen H/t D -> B/d H/t Qlen Klen">(
          rename<"L -> Qlen">(h.q), rename<"L -> Klen">(h.k));
      const auto p = softmax<"Klen">(where(mask, logits * 0.125, -1e30));
      return einsum_unreduced<"B/d H/t L Klen, B/d Klen H/t D -> B/d L H/t D">(rename<"Qlen -> L">(p),
                                                                               rename<"L -> Klen">(h.v));
    };
    const auto step = [&](const auto& f) {
      static_cast<void>(value_and_grad(
          mesh, [&](const Heads& h) { return sum(f(h) * ct); }, heads));
    };
    const std::int64_t keys = (length + 1) / 2;
    const Buffer scores = mesh.device()->pool()->allocate(static_cast<std::size_t>(length * keys) * sizeof(f32));
    const auto products = [&](std::int64_t n) {
      for (std::int64_t i = 0; i < n * batch * 12; ++i)
        kernels::gemm<f32>(mesh.device()->exec(), false, true, length, keys, 64, heads.q.span().data(), 64,
                           heads.k.span().data(), 64, scores.as<f32>(), keys, false);
    };
    const auto t =
        interleaved(length < 256 ? 51 : 9, {[&] { fused(heads); }, [&] { einsums(heads); }, [&] { products(2); },
                                            [&] { step(fused); }, [&] { step(einsums); }, [&] { products(7); }});
    for (const std::size_t i : {std::size_t{0}, std::size_t{3}})
      fmt::print("{:>8}  {:<9}  {:>8.2f}  {:>8.2f}  {:>8.2f}  {:>6.2f}\n", fmt::format("{} x {}", batch, length),
                 i == 0 ? "forward" : "both", t[i].median * 1e3, t[i + 1].median * 1e3, t[i + 2].median * 1e3,
                 t[i + 1].median / t[i].median);
  }
}

struct OutputLayer {
  Tensor<f32, "B/d M"> x;
  Tensor<f32, "V/t M/d"> table;
};

// The loss of GPT-2's output layer, forward and backward: its logits stored, and made piece by piece.
void loss_figures(const Mesh<"d t">& mesh) {
  fmt::print(
      "\nlinear_cross_entropy over 50304 ids, width 768, forward and backward: the logits stored (3 products), and in "
      "pieces\n(4); ms, medians, and the most memory that the pool hands out, with both cotangents\n");
  fmt::print("{:>8}  {:>8}  {:>9}  {:>8}  {:>9}  {:>6}\n", "tokens", "stored", "MB", "pieces", "MB", "ratio");
  for (const std::int64_t tokens : {1024, 4096}) {
    const Sizes sizes{{"B", tokens}, {"V", 50304}, {"M", 768}};
    const OutputLayer w{random_normal<f32, "B/d M">(mesh, sizes, {0, 1}),
                        random_normal<f32, "V/t M/d">(mesh, sizes, {0, 2})};
    const auto ids = cast<i32>(random_uniform<f32, "B/d">(mesh, sizes, {0, 3}) * 50000.0);
    const auto step = [&](std::int64_t stored) {
      const auto loss = [&](const OutputLayer& of) -> Tensor<f32, "+d +t"> {
        const auto table = all_gather<"V/t M/d -> V/t M">(of.table);
        return sum<"B/d +t -> +d +t">(
            linear_cross_entropy<"B/d M, V/t M -> B/d V/t">(of.x * (1.0 / 768), table, ids, stored));
      };
      static_cast<void>(value_and_grad(mesh, loss, w));
    };
    const auto memory = [&](std::int64_t stored) {
      Pool& pool = *mesh.device()->pool();
      const std::size_t before = pool.stats().live;
      pool.reset_peak();
      step(stored);
      return static_cast<double>(pool.stats().peak - before) / 1e6;
    };
    const double all = memory(std::numeric_limits<std::int64_t>::max()), some = memory(0);
    const auto t = interleaved(3, {[&] { step(std::numeric_limits<std::int64_t>::max()); }, [&] { step(0); }});
    fmt::print("{:>8}  {:>8.0f}  {:>9.0f}  {:>8.0f}  {:>9.0f}  {:>6.2f}\n", tokens, t[0].median * 1e3, all,
               t[1].median * 1e3, some, t[1].median / t[0].median);
  }
}

#if defined(SHARDLIB_WITH_MPI)
// One collective: ours, the MPI library's, and how many bytes cross the bus per byte of the whole.
struct Contest {
  const char* name;
  const std::vector<Buffer>& send;
  std::function<void()> ours, theirs;
  double moved;
};

// Each round's seconds of the slowest rank.
std::vector<double> slowest(std::vector<double> t) {
  MPI_Allreduce(MPI_IN_PLACE, t.data(), static_cast<int>(t.size()), MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return t;
}

void collective_figures(const Mesh<"d">& mesh) {
  const int n = mesh.size();
  auto& group = mesh.device()->group({"d"});
  const auto& pool = mesh.device()->pool();
  const bool speaks = mesh.rank() == 0;
  if (speaks) {
    fmt::print(
        "\nCollectives on {} ranks against the MPI library's own, in turn; bus bandwidth, GB/s, from the slowest "
        "rank's "
        "median; MPI's times and copy's over ours, in turn: median (middle 80 %).\nBuffers rotate and are written "
        "before each call; copy: memcpy of the bus's bytes by all ranks at once. A view is made and dropped; it moves "
        "nothing.\n",
        n);
    fmt::print("{:>9}  {:<16}  {:>7}  {:>7}  {:>7}  {:<27}{}\n", "bytes", "collective", "ours", "MPI", "copy",
               "over MPI", "over copy");
  }
  for (std::size_t bytes = 4096; bytes <= 64U << 20; bytes *= 4) {
    const std::size_t part = bytes / static_cast<std::size_t>(n);
    // A buffer that stays in the cache would flatter.
    const std::size_t copies = std::clamp<std::size_t>((16U << 20) / bytes, 4, 64);
    std::vector<Buffer> whole, small, out;
    for (std::size_t i = 0; i < copies; ++i) {
      whole.push_back(pool->allocate(bytes));
      small.push_back(pool->allocate(part));
      out.push_back(pool->allocate(bytes));
      for (const Buffer& b : {whole.back(), small.back(), out.back()}) std::memset(b.data(), 0, b.bytes());
    }
    std::size_t turn = 0;
    const auto pick = [&](const std::vector<Buffer>& set) { return set[turn % copies]; };
    const int count = static_cast<int>(part / sizeof(f32));
    const double share = static_cast<double>(n - 1) / n;
    const auto mpi_gathers = [&] {
      MPI_Allgather(pick(small).data(), count, MPI_FLOAT, pick(whole).data(), count, MPI_FLOAT, MPI_COMM_WORLD);
    };
    std::vector<Contest> contests{
        {"all_gather", small, [&] { group.all_gather(pick(small), pick(whole)).wait(); }, mpi_gathers, share},
        {"reduce_scatter", whole,
         [&] { group.reduce_scatter(pick(whole), pick(small), DType::f32, Reduction::sum).wait(); },
         [&] {
           MPI_Reduce_scatter_block(pick(whole).data(), pick(small).data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
         },
         share},
        {"all_reduce", whole, [&] { group.all_reduce(pick(whole), pick(out), DType::f32, Reduction::sum).wait(); },
         [&] { MPI_Allreduce(pick(whole).data(), pick(out).data(), count * n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); },
         2 * share},
        {"all_to_all", whole, [&] { group.all_to_all(pick(whole), pick(out)).wait(); },
         [&] {
           MPI_Alltoall(pick(whole).data(), count, MPI_FLOAT, pick(out).data(), count, MPI_FLOAT, MPI_COMM_WORLD);
         },
         share}};
    if (group.has_views(part)) {
      const auto views = [&] { group.gather_view(pick(small), std::make_shared<Buffer>()).wait(); };
      contests.push_back({"all_gather, view", small, views, mpi_gathers, share});
    }
    for (const Contest& contest : contests) {
      const auto moved = static_cast<std::size_t>(static_cast<double>(bytes) * contest.moved);
      const std::vector<std::function<void()>> sides{contest.ours, contest.theirs, [&] {
                                                       for (std::size_t done = 0; done < moved; done += bytes) {
                                                         std::memcpy(pick(out).data(), pick(whole).data(),
                                                                     std::min(bytes, moved - done));
                                                       }
                                                     }};
      const int rounds = bytes > (4U << 20) ? 15 : bytes > (256U << 10) ? 41 : 201;
      std::vector<std::vector<double>> times(sides.size());
      for (int r = -2; r < rounds; ++r) {
        for (std::size_t side = 0; side < sides.size(); ++side) {
          f32* const values = pick(contest.send).as<f32>();
          const std::size_t length = pick(contest.send).bytes() / sizeof(f32);
          for (std::size_t i = 0; i < length; ++i) values[i] = 0.5F * values[i] + static_cast<float>(turn);
          group.barrier();
          const double t = seconds_of(sides[side]);
          if (r >= 0) times[side].push_back(t);
          ++turn;
        }
      }
      for (auto& t : times) t = slowest(std::move(t));
      if (!speaks) continue;
      const auto rate = [&](std::size_t side) {
        return static_cast<double>(moved) / summary(times[side]).median / 1e9;
      };
      const auto over = [&](std::size_t side) {
        std::vector<double> ratios;
        for (std::size_t r = 0; r < times[0].size(); ++r) ratios.push_back(times[side][r] / times[0][r]);
        const Times ratio = summary(std::move(ratios));
        return fmt::format("{:.2f} ({:.2f} .. {:.2f})", ratio.median, ratio.low, ratio.high);
      };
      fmt::print("{:>9}  {:<16}  {:>7.2f}  {:>7.2f}  {:>7.2f}  {:<27}{}\n", bytes, contest.name, rate(0), rate(1),
                 rate(2), over(1), over(2));
      std::fflush(stdout);
    }
  }
}

// What every communication pays to be found when it hangs or differs; benchmarks/always_on.py makes a share of it.
void safeguard_figures(const Mesh<"d">& mesh) {
  const int n = mesh.size(), calls = 20000;
  const auto recorder = std::make_shared<detail::FlightRecorder>(mesh.rank());
  std::vector<int> members(static_cast<std::size_t>(n));
  std::iota(members.begin(), members.end(), 0);
  const detail::GroupRecorder group(recorder, "d", members);
  const detail::OpInfo op{.name = "all_gather", .spec = "V/t M/d -> V/t M", .site = {}};
  std::uint64_t all = 0;  // printed, so that no fingerprint is left out
  const double record = seconds_of([&] {
    for (int i = 0; i < calls; ++i) {
      const detail::CollectiveCall call{.bytes = static_cast<std::size_t>(i), .caller = detail::fingerprint(op)};
      const detail::FlightRecord one = group.starts(call, op);
      one.waits();
      one.ends();
      all ^= call.fingerprint();
    }
  });
  const double compare = seconds_of([&] {
    std::vector<std::uint64_t> theirs(static_cast<std::size_t>(n));
    for (int i = 0; i < calls; ++i)
      MPI_Allgather(&all, 1, MPI_UINT64_T, theirs.data(), 1, MPI_UINT64_T, MPI_COMM_WORLD);
  });
  if (mesh.rank() == 0)
    fmt::print(
        "\nA communication is recorded in {:.3f} us; over MPI itself its call is compared in {:.3f} us more ({:x})\n",
        1e6 * record / calls, 1e6 * compare / calls, all & 15U);
}
#endif

int figures(bool safeguards_only) {
  if (under_mpi() && world_size() > 1) {
#if defined(SHARDLIB_WITH_MPI)
    launch({{"d", world_size()}}, [&](const DevicePtr& device) {
      const Mesh<"d"> mesh(device);
      if (!safeguards_only) collective_figures(mesh);
      safeguard_figures(mesh);
    });
#endif
    return 0;
  }
  double peak = 0;
  launch({{"d", 1}, {"t", 1}}, [&](const DevicePtr& device) {
    const Mesh<"d t"> mesh(device);
    const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
    const double one = fma_peak(1), all = fma_peak(cores);
    fmt::print("FMA peak: {:.1f} GFLOP/s on one core, {:.1f} on {} at once\n", one / 1e9, all / 1e9, cores);
    gemm_figures(mesh);
    shell_figures(mesh);
    fusion_figures(mesh);
    attention_figures(mesh);
    loss_figures(mesh);
    const double again = fma_peak(cores);  // the machine's clock changes
    fmt::print("\nFMA peak, measured again: {:.1f} GFLOP/s on {} at once\n", again / 1e9, cores);
    peak = std::max(all, again);
  });
  launch({{"d", 1}, {"s", 1}, {"t", 1}}, [&](const DevicePtr& device) { step_figures(Mesh<"r d s t">(device), peak); });
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    run::Options options("figures", "Measures kernels, and under mpirun collectives instead, for a minute.");
    bool safeguards = false;
    options.flag("--safeguards", safeguards, "under mpirun: what records and comparisons of calls cost, alone");
    return options.parse(argc, argv) ? figures(safeguards) : 0;
  });
}
