// Attention as a device with memory of its own computes it, by products and kernels of rows, or by kernels that keep
// the scores: what the CPU computes, to rounding.
#include "catch.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernel_teams.hpp"
#include "shardlib/kernels/attention.hpp"
#include "shardlib/kernels/body/attention.hpp"
#include "shardlib/kernels/impl/attention_fused.hpp"
#include "shardlib/kernels/impl/attention_products.hpp"
#include "shardlib/spec/dtype.hpp"

using namespace shardlib;
namespace k = shardlib::kernels;

// As in launch.hpp: clang may lack OpenMP's header, and a build may be without it.
extern "C" void attention_test_omp_threads(int) __asm__("omp_set_num_threads") __attribute__((weak));

namespace {

/// oneDNN runs on this thread alone, as on a simulated device that `launch` makes: others may not access its memory.
void stay_on_one_thread() {
  if (attention_test_omp_threads != nullptr) attention_test_omp_threads(1);
}

/// Sizes of batch B, length L, heads H, groups of query heads G and width D, and the orders of the dims in memory.
struct Case {
  std::int64_t batch, length, heads, groups, width;
  std::string_view queries, keys;
  bool segmented = false;
  /// How many of the queries attend to how many of the other block's keys, the last and the first ones; 0: all.
  std::int64_t some_queries = 0, some_keys = 0;

  [[nodiscard]] std::int64_t size(char dim) const {
    switch (dim) {
      case 'B':
        return batch;
      case 'L':
        return length;
      case 'H':
        return heads;
      case 'G':
        return groups;
      default:
        return width;
    }
  }
  [[nodiscard]] std::int64_t stride(std::string_view order, char dim) const {
    const auto here = order.find(dim);
    if (here == std::string_view::npos) return 0;
    std::int64_t n = 1;
    for (const char inner : order.substr(here + 1)) n *= size(inner);
    return n;
  }
  [[nodiscard]] std::int64_t count(std::string_view order) const {
    std::int64_t n = 1;
    for (const char dim : order) n *= size(dim);
    return n;
  }
  [[nodiscard]] k::AttentionLoops loops() const {
    std::string sums(queries);
    sums.erase(sums.find('D'), 1);
    k::AttentionLoops all;
    const auto strides = [&](char dim) {
      return k::AttentionLoops::Strides{stride(queries, dim), stride(keys, dim), stride(sums, dim), stride("BL", dim)};
    };
    for (const char dim : queries) {
      if (dim == 'B' || dim == 'H') all.heads.push(size(dim), strides(dim));
      if (dim == 'G') all.groups.push(size(dim), strides(dim));
    }
    all.length = length;
    all.width = width;
    all.along_length = strides('L');
    all.along_width = strides('D');
    all.scale = 0.7;
    return all;
  }
  /// The loops over the queries' own keys, or over a block of earlier ones, and where its queries begin.
  [[nodiscard]] std::pair<k::AttentionLoops, k::AttentionLoops::Strides> part(bool own) const {
    auto all = loops();
    if (own) return {all, {}};
    all.earlier = true;
    all.length = some_queries > 0 ? some_queries : length;
    all.earlier_keys = some_keys > 0 ? some_keys : length;
    auto first = all.along_length;
    for (auto& offset : first) offset *= length - all.length;
    return {all, first};
  }
  /// Documents of about 40 positions, of which those of the second block of keys go on.
  [[nodiscard]] std::vector<i32> documents(std::int64_t first) const {
    std::vector<i32> ids;
    for (std::int64_t b = 0; b < batch; ++b)
      for (std::int64_t i = 0; i < length; ++i) ids.push_back(static_cast<i32>((first + i + 13 * b) / 40));
    return ids;
  }
};

template <class T>
double number(T x) {
  return static_cast<double>(static_cast<accumulator_t<T>>(x));
}
/// The greatest difference, relative to the greatest element.
template <class T>
double off(const std::vector<T>& got, const std::vector<T>& want) {
  double worst = 0, scale = 1e-30;
  REQUIRE(got.size() == want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double difference = std::abs(number(got[i]) - number(want[i]));
    worst = difference <= worst ? worst : difference;  // a NaN stays
    scale = std::max(scale, std::abs(number(want[i])));
  }
  return worst / scale;
}

/// The code that computes attention.
enum class By { cpu, products, fused };

/// Queries that attend to their own keys and to earlier ones, and all cotangents.
template <class T, class R>
struct Attention {
  using A = accumulator_t<T>;
  std::vector<R> out;
  std::vector<A> sums;
  std::vector<R> dq, dk, dv, earlier_dk, earlier_dv;

  /// `most_bytes` of scratch memory on the simulated device.
  Attention(const Case& c, By by, bool earlier, std::size_t most_bytes) {
    const bool simulated = by != By::cpu;
    const std::int64_t nq = c.count(c.queries), nk = c.count(c.keys);
    auto q = numbers<T>(nq, 1), ks = numbers<T>(nk, 2), v = numbers<T>(nk, 3), result = numbers<T>(nq, 4);
    auto ct = numbers<T>(nq, 5), earlier_k = numbers<T>(nk, 6), earlier_v = numbers<T>(nk, 7);
    auto ids = c.documents(c.length), earlier_ids = c.documents(0);
    for (auto* all : {&out, &dq}) *all = std::vector<R>(at(nq), R(7));  // what nobody may read
    for (auto* all : {&dk, &dv, &earlier_dk, &earlier_dv}) *all = std::vector<R>(at(nk), R(7));
    sums.resize(at(nq / c.width), 7);
    if (simulated) stay_on_one_thread();
    const Place place(simulated, simulated ? 1 : 2);
    const auto forward = [&](bool own, const std::vector<T>& keys, const std::vector<T>& values,
                             const std::vector<i32>& of_keys) {
      auto x = keys, y = values;
      auto z = of_keys;
      const auto [loops, first] = c.part(own);
      place.run(
          [&, &loops = loops, &first = first](const Exec& exec, const T* qs, const T* kk, const T* vs, const i32* mine,
                                              const i32* theirs, R* to, A* logs) {
            qs += first[0], to += first[0], logs += first[2], mine += first[3];
            const k::AttentionSegments s{c.segmented ? mine : nullptr, c.segmented ? theirs : nullptr};
            if constexpr (std::is_same_v<T, bf16>)
              if (by == By::fused) return k::detail::attention_fused(exec, loops, qs, kk, vs, s, to, logs);
            if (simulated)
              k::detail::attention_products(exec, loops, qs, kk, vs, s, to, logs, most_bytes);
            else
              k::causal_attention(exec, loops, qs, kk, vs, s, to, logs);
          },
          q, x, y, ids, z, out, sums);
    };
    const auto backward = [&](bool own, const std::vector<T>& keys, const std::vector<T>& values,
                              const std::vector<i32>& of_keys, std::vector<R>& to_k, std::vector<R>& to_v) {
      auto x = keys, y = values;
      auto z = of_keys;
      const auto [loops, first] = c.part(own);
      place.run(
          [&, &loops = loops, &first = first](const Exec& exec, const T* qs, const T* kk, const T* vs, const i32* mine,
                                              const i32* theirs, const T* o, const T* d, const A* logs, R* to_q, R* dkk,
                                              R* dvv) {
            qs += first[0], o += first[0], d += first[0], to_q += first[0], logs += first[2], mine += first[3];
            const k::AttentionSegments s{c.segmented ? mine : nullptr, c.segmented ? theirs : nullptr};
            if constexpr (std::is_same_v<T, bf16>)
              if (by == By::fused)
                return k::detail::attention_fused_backward(exec, loops, qs, kk, vs, s, o, logs, d, to_q, dkk, dvv);
            if (simulated)
              k::detail::attention_products_backward(exec, loops, qs, kk, vs, s, o, logs, d, to_q, dkk, dvv,
                                                     most_bytes);
            else
              k::causal_attention_backward(exec, loops, qs, kk, vs, s, o, logs, d, to_q, dkk, dvv);
          },
          q, x, y, ids, z, result, ct, sums, dq, to_k, to_v);
    };
    forward(true, ks, v, ids);
    if (earlier) forward(false, earlier_k, earlier_v, earlier_ids);
    backward(true, ks, v, ids, dk, dv);
    if (earlier) backward(false, earlier_k, earlier_v, earlier_ids, earlier_dk, earlier_dv);
  }
};

template <class T, class R>
void check(const Case& c, double tolerance, std::size_t most_bytes = k::detail::HeadScratch::most_bytes,
           By by = By::products) {
  for (const bool earlier : {false, true}) {
    CAPTURE(c.queries, c.keys, c.length, c.groups, c.width, c.segmented, c.some_queries, c.some_keys, earlier,
            name(dtype_v<T>), name(dtype_v<R>));
    const Attention<T, R> cpu(c, By::cpu, earlier, 0), device(c, by, earlier, most_bytes);
    CHECK(off(device.out, cpu.out) < tolerance);
    CHECK(off(device.sums, cpu.sums) < tolerance);
    CHECK(off(device.dq, cpu.dq) < tolerance);
    CHECK(off(device.dk, cpu.dk) < tolerance);
    CHECK(off(device.dv, cpu.dv) < tolerance);
    CHECK(off(device.earlier_dk, cpu.earlier_dk) < tolerance);
    CHECK(off(device.earlier_dv, cpu.earlier_dv) < tolerance);
  }
}

}  // namespace

TEST_CASE("attention on a device: as on the CPU, to rounding", "[simulated]") {
  for (const bool segmented : {false, true}) {
    for (const auto& c : {
             Case{2, 70, 3, 1, 8, "BHLGD", "BHLD"},  // in place
             Case{2, 70, 3, 1, 8, "BLHGD", "BLHD"},  // heads between rows
             Case{1, 70, 3, 2, 8, "LHGD", "LHD"},    // in place, with longer rows; groups
             Case{2, 33, 2, 3, 5, "DGBLH", "LHBD"},  // rows are not contiguous
             Case{3, 20, 1, 2, 6, "BLGD", "BDL"},    // queries in place, keys not
             Case{2, 1, 2, 2, 3, "BLHGD", "BLHD"},
             Case{1, 9, 1, 1, 1, "LD", "DL"},
             Case{1, 600, 2, 1, 4, "LHD", "LHD"},  // three blocks of queries
             Case{1, 513, 1, 2, 40, "GLD", "LD"},
             Case{1, 256, 1, 1, 3, "LD", "LD"},
             Case{2, 70, 3, 2, 8, "BHLGD", "BHLD", false, 35, 70},  // as in zigzag order
             Case{2, 70, 3, 2, 8, "BLHGD", "BLHD", false, 70, 35},
             Case{2, 34, 2, 3, 5, "DGBLH", "LHBD", false, 17, 34},
             Case{2, 34, 2, 3, 5, "DGBLH", "LHBD", false, 34, 17},
             Case{1, 600, 2, 1, 4, "LHD", "LHD", false, 300, 600},
             Case{1, 600, 2, 1, 4, "LHD", "LHD", false, 600, 300},
             Case{1, 20, 1, 2, 4, "LGD", "LD", false, 1, 1},
         }) {
      Case with = c;
      with.segmented = segmented;
      check<f32, f32>(with, 1e-5);
      if (segmented) {  // what is masked does not depend on the dtype
        check<bf16, bf16>(with, 0.02);
      } else {
        check<f64, f64>(with, 1e-12);
        check<bf16, f32>(with, 0.02);
      }
    }
  }
}

TEST_CASE("attention on a device: kernels that keep the scores compute what the CPU does", "[simulated]") {
  for (const bool segmented : {false, true}) {
    for (const auto& c : {
             Case{2, 65, 2, 1, 64, "BLHGD", "BLHD"},   // as in gpt2
             Case{1, 300, 2, 1, 64, "BHLGD", "BHLD"},  // several blocks; rows of a head are neighbors
             Case{1, 130, 1, 3, 64, "BLHGD", "BLHD"},  // query heads share keys
             Case{1, 150, 2, 2, 128, "BLGHD", "BLHD"},
             Case{2, 64, 1, 1, 128, "BLHGD", "BLHD"},
             Case{1, 129, 1, 2, 96, "GBLHD", "BLHD"},  // widths that fill no tile
             Case{1, 100, 2, 1, 16, "BLHGD", "BLHD"},
             Case{2, 15, 1, 2, 32, "BLHGD", "BLHD"},
             Case{1, 65, 1, 1, 8, "LD", "LD"},
             Case{1, 193, 1, 1, 80, "LD", "LD"},
             Case{3, 1, 2, 2, 48, "BLHGD", "BLHD"},
             Case{2, 130, 2, 1, 64, "BLHGD", "BLHD", false, 65, 130},  // as in zigzag order
             Case{2, 130, 2, 2, 64, "BHLGD", "BHLD", false, 130, 65},
             Case{1, 300, 1, 2, 128, "BLGHD", "BLHD", false, 150, 300},
             Case{1, 300, 1, 2, 128, "BLGHD", "BLHD", false, 300, 150},
             Case{1, 40, 2, 1, 16, "BLHGD", "BLHD", false, 1, 3},
         }) {
      Case with = c;
      with.segmented = segmented;
      CHECK(k::detail::fuses_attention(with.loops(), {}));
      if (segmented)
        check<bf16, bf16>(with, 0.02, 0, By::fused);
      else
        check<bf16, f32>(with, 0.02, 0, By::fused);
    }
  }
}

TEST_CASE("attention on a device: which layouts the kernels that keep the scores can read", "[simulated]") {
  using k::detail::fuses_attention;
  const auto fits = [](const Case& c) { return fuses_attention(c.loops(), {}); };
  CHECK(fits({2, 70, 3, 2, 128, "BLHGD", "BLHD"}));
  CHECK_FALSE(fits({2, 70, 3, 2, 136, "BLHGD", "BLHD"}));  // too wide
  CHECK_FALSE(fits({2, 70, 3, 2, 60, "BLHGD", "BLHD"}));   // no whole pieces of 16 bytes
  CHECK_FALSE(fits({2, 64, 3, 2, 64, "BDHGL", "BLHD"}));   // rows are not contiguous
  CHECK_FALSE(fits({2, 64, 3, 2, 64, "BLHGD", "BHDL"}));
  k::AttentionLoops loops = Case{2, 70, 3, 2, 64, "BLHGD", "BLHD"}.loops();
  alignas(16) const std::array<bf16, 16> x{};
  CHECK(fuses_attention(loops, {x.data(), x.data() + 8, nullptr}));
  CHECK_FALSE(fuses_attention(loops, {x.data(), x.data() + 4}));
  loops.along_length[k::AttentionLoops::key] = 68;  // a view of longer rows
  CHECK_FALSE(fuses_attention(loops, {}));
  loops.along_length[k::AttentionLoops::key] = 72;
  CHECK(fuses_attention(loops, {}));
  loops.scale = -1;
  CHECK_FALSE(fuses_attention(loops, {}));
}

TEST_CASE("attention on a device: heads are taken in chunks that fit the scratch memory", "[simulated]") {
  for (const std::string_view order : {"BHLGD", "BLHGD"}) {
    const Case c{5, 40, 3, 2, 4, order, order == "BHLGD" ? "BHLD" : "BLHD", true};
    check<f32, f32>(c, 1e-5, 80000);
    check<bf16, bf16>(c, 0.02, 1);
  }
  k::detail::HeadScratch scratch;
  static_cast<void>(scratch.part<f32>(1 << 20));
  const auto second = scratch.part<f64>(1);
  const auto pool = Pool::make(Region::make_meta());
  const Exec exec{.pool = pool.get(), .dry = true};
  CHECK(scratch.allocate(exec, 100, std::size_t{64} << 20) == 15);
  CHECK(reinterpret_cast<std::byte*>(scratch(second)) - scratch(k::detail::HeadScratch::Part<std::byte>{0}) ==
        15 * (4 << 20));
  CHECK(scratch.allocate(exec, 3, std::size_t{64} << 20) == 3);
  CHECK(scratch.allocate(exec, 3, 100) == 1);
}

TEST_CASE("attention on a device: what is not wanted is not computed", "[simulated]") {
  stay_on_one_thread();
  const std::int64_t width = GENERATE(4, 64, 128);  // of products, and of kernels that keep the scores
  const Case c{width == 4 ? 2 : 1, width == 4 ? 300 : 70, 2, 2, width, "BLHGD", "BLHD"};
  const std::int64_t nq = c.count(c.queries), nk = c.count(c.keys);
  const auto run = [&](bool q, bool keys, bool values) {
    auto x = numbers<bf16>(nq + 2 * nk, 1);
    auto sums = numbers<f32>(nq / c.width, 2);
    for (f32& sum : sums) sum += 5;
    std::vector<bf16> cts(at(nq + 2 * nk), bf16(7));
    Place(true).run(
        [&](const Exec& exec, const bf16* all, const f32* logs, bf16* to) {
          const bf16* const ks = all + nq;
          k::causal_attention_backward(exec, c.loops(), all, ks, ks + nk, {}, all, logs, all, q ? to : nullptr,
                                       keys ? to + nq : nullptr, values ? to + nq + nk : nullptr);
        },
        x, sums, cts);
    return cts;
  };
  const auto all = run(true, true, true);
  for (int wanted = 0; wanted < 8; ++wanted) {
    const bool q = (wanted & 1) != 0, keys = (wanted & 2) != 0, values = (wanted & 4) != 0;
    const auto some = run(q, keys, values);
    bool same = true;
    for (std::int64_t i = 0; i < nq + 2 * nk; ++i)
      same = same && some[at(i)] == ((i < nq ? q : i < nq + nk ? keys : values) ? all[at(i)] : bf16(7));
    CAPTURE(wanted);
    CHECK(same);
  }
}

TEST_CASE("attention on a device: a dry run takes the same scratch memory", "[simulated]") {
  stay_on_one_thread();
  const auto check = []<class T>(T, std::int64_t width, std::size_t least, std::size_t most) {
    const Case c{2, 300, 2, 1, width, "BLHGD", "BLHD"};
    const auto peak = [&](bool dry) {
      const auto pool = Pool::make(Region::make_simulated());
      const Exec exec{.pool = pool.get(), .dry = dry};
      const std::int64_t n = c.count(c.queries);
      const Buffer block = pool->allocate(at(10 * n) * sizeof(T));
      exec.zero(block.data(), block.bytes());
      T* const x = block.as<T>();
      auto* const sums = reinterpret_cast<f32*>(x + 5 * n);
      k::causal_attention(exec, c.loops(), x, x, x, {}, x + n, sums);
      k::causal_attention_backward(exec, c.loops(), x, x, x, {}, x + n, sums, x, x + 2 * n, x + 3 * n, x + 4 * n);
      return pool->stats().peak - block.bytes();
    };
    CHECK(peak(true) == peak(false));
    CHECK(peak(true) >= least);
    CHECK(peak(true) < most);
  };
  check(f32{}, 4, 4 * 256 * 300 * 2 * sizeof(f32), 4 * 256 * 304 * 3 * sizeof(f32));
  check(bf16{}, 64, 4 * 320 * 8, 4 * 320 * 8 + 4096);  // kernels that keep the scores: for sums alone
}

TEST_CASE("attention on a device: kernels that keep the scores, and numbers that are far apart or none",
          "[simulated]") {
  stay_on_one_thread();
  const Case c{1, 200, 1, 1, 64, "LD", "LD"};
  const std::int64_t n = c.count("LD");
  std::vector<bf16> q(at(n)), keys(at(n)), v(at(n), bf16(1)), out(at(n));
  std::vector<f32> sums(200);
  q[at(150 * 64)] = bf16(100);
  keys[0] = bf16(150);
  for (std::int64_t i = 0; i < 64; ++i) v[at(i)] = bf16(5);
  const auto run = [&] {
    Place(true).run([&](const Exec& exec, const bf16* qs, const bf16* ks, const bf16* vs, bf16* to,
                        f32* logs) { k::causal_attention(exec, c.loops(), qs, ks, vs, {}, to, logs); },
                    q, keys, v, out, sums);
    return out;
  };
  const auto row = [](const std::vector<bf16>& all, std::int64_t i) { return float(all[at(i * 64 + 7)]); };
  const auto y = run();
  CHECK(row(y, 150) == 5);
  CHECK(std::abs(sums[150] - 0.7F * 15000) < 0.01F);
  CHECK(std::abs(sums[149] - std::log(150.0F)) < 1e-5F);
  CHECK(row(y, 0) == 5);
  CHECK(row(y, 1) == 3);
  CHECK(row(y, 3) == 2);
  CHECK(row(y, 199) == float(bf16(1.02F)));
  keys[at(3 * 64)] = bf16(std::nanf(""));
  const auto z = run();
  CHECK(row(z, 2) == row(y, 2));
  CHECK((std::isnan(row(z, 3)) && std::isnan(row(z, 199)) && std::isnan(sums[199])));
}

TEST_CASE("attention on a device: scores far apart, and numbers that are none", "[simulated]") {
  stay_on_one_thread();
  const Case c{1, 700, 1, 1, 1, "LD", "LD"};
  std::vector<f32> q(700, 0), keys(700, 0), v(700, 1), out(700), sums(700);
  q[600] = 100;
  keys[0] = 150;
  v[0] = 5;
  const auto run = [&] {
    Place(true).run([&](const Exec& exec, const f32* qs, const f32* ks, const f32* vs, f32* to,
                        f32* logs) { k::causal_attention(exec, c.loops(), qs, ks, vs, {}, to, logs); },
                    q, keys, v, out, sums);
    return out;
  };
  const auto y = run();
  CHECK(y[600] == 5);
  CHECK(sums[600] == 0.7F * 15000);
  CHECK(std::abs(y[699] - (5 + 699.0F) / 700) < 1e-5F);
  keys[3] = std::nanf("");
  const auto z = run();
  CHECK(z[2] == y[2]);
  CHECK((std::isnan(z[3]) && std::isnan(z[699])));
}

TEST_CASE("kernel teams: rows of attention have the same bits for any number of lanes", "[simulated]") {
  for_types<f32, bf16, f64>([]<class T>(T) {
    using A = accumulator_t<T>;
    using k::body::RowLanes;
    constexpr std::int64_t count = 3, length = 11, width = 37, heads = count * length;
    // Heads of rows [length, count, width]; sums [count, length]; segments of all heads are the same.
    k::Nest<4> nest;
    nest.push(count, {width, width, length, 0});
    const k::body::HeadItems copies{count, length, 4}, items{count, 6, RowLanes::rows};
    for (const std::int64_t n : {1, 31, 200}) {
      const std::int64_t stride = n + 3;
      CAPTURE(n, name(dtype_v<T>));
      std::vector<i32> segments;
      for (std::int64_t i = 0; i < 200; ++i) segments.push_back(static_cast<i32>(i / 7 % 2));
      same_everywhere(
          [&](const Exec& exec, k::body::HeadOffsets* offsets, const T* x, T* y, A* scores, A* cts, T* p, A* sums,
              A* of_rows, const i32* ids) {
            exec.for_items(1, 0, k::body::ListHeads{nest, 0, count, offsets});
            const k::body::StridedHeads<const T> in{x, offsets, 0, count * width, 1};
            exec.for_items(copies.count(), 0, k::body::LoadHeads<T>{copies, width, in, y});
            const k::body::StridedHeads<T> out{y + heads * width, offsets, 0, count * width, 1};
            exec.for_items(copies.count(), 0, k::body::StoreHeads<A, T>{copies, width, scores, out, of_rows, true});
            const k::body::HeadItems all{count, length, RowLanes::rows};
            exec.for_items(all.count(), 0, k::body::HeadDots<T>{all, width, in, in, of_rows + heads});
            for (const bool earlier : {false, true}) {
              const k::body::ScoreRows rows{.items = items,
                                            .heads = offsets,
                                            .query = 5,
                                            .keys = n,
                                            .stride = stride,
                                            .earlier = earlier,
                                            .query_segments = ids,
                                            .key_segments = ids + 3,
                                            .along_sums = 1,
                                            .along_segments = 1};
              exec.for_items(items.count(), 0,
                             k::body::AttentionScoresBackward<T>{rows, A(0.5), scores, sums, cts, of_rows, length,
                                                                 p + 2 * heads * stride, p + 3 * heads * stride});
              exec.for_items(
                  items.count(), 0,
                  k::body::AttentionProbabilities<T>{rows, A(0.5), scores, p + (earlier ? heads * stride : 0), sums,
                                                     of_rows + 2 * heads, length});
            }
          },
          std::vector<k::body::HeadOffsets>(at(count)), numbers<T>(heads * width, 1), numbers<T>(2 * heads * width, 2),
          numbers<A>(heads * (stride + width), 3), numbers<A>(heads * stride, 4), numbers<T>(4 * heads * stride, 5),
          numbers<A>(heads, 6), numbers<A>(3 * heads, 7), segments);
    }
  });
}

TEST_CASE("kernel teams: kernels that keep the scores have the same bits for any number of lanes", "[simulated]") {
  for (const std::int64_t width : {64, 128}) {
    const Case c{1, 100, 2, 2, width, "BLHGD", "BLHD"};
    const std::int64_t nq = c.count(c.queries), nk = c.count(c.keys);
    CAPTURE(width);
    same_everywhere(
        [&](const Exec& exec, const bf16* q, const bf16* keys, const bf16* v, const bf16* ct, bf16* out, f32* sums,
            bf16* dq, f32* dk) {
          k::detail::attention_fused<bf16>(exec, c.loops(), q, keys, v, {}, out, sums);
          k::detail::attention_fused_backward<bf16>(exec, c.loops(), q, keys, v, {}, out, sums, ct, dq, nullptr,
                                                    nullptr);
          k::detail::attention_fused_backward<f32>(exec, c.loops(), q, keys, v, {}, out, sums, ct, nullptr, dk,
                                                   dk + nk);
        },
        numbers<bf16>(nq, 1), numbers<bf16>(nk, 2), numbers<bf16>(nk, 3), numbers<bf16>(nq, 4), numbers<bf16>(nq, 5),
        numbers<f32>(nq / width, 6), numbers<bf16>(nq, 7), numbers<f32>(2 * nk, 8));
  }
}
