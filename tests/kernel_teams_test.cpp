// Kernels of items and lanes: teams of one lane and of several give the same bits, and what a team of several lanes
// finds.
#include "catch.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "kernel_teams.hpp"
#include "shardlib/kernels/body/einsum.hpp"
#include "shardlib/kernels/body/positions.hpp"
#include "shardlib/kernels/body/reduction.hpp"
#include "shardlib/kernels/body/rows.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/kernels/random.hpp"
#include "shardlib/kernels/reduce.hpp"
#include "shardlib/kernels/rows.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
namespace k = shardlib::kernels;
using k::detail::MaxOp, k::detail::MinOp, k::detail::ProdOp, k::detail::SumOp;

namespace {

using Shape64 = std::vector<std::int64_t>;

/// Adds the item's number to its element, by one lane.
struct AddNumber {
  std::int64_t* x;
  template <class Team>
  void operator()(const Team& team, std::int64_t item) const {
    team.one([to = x + item, item] { *to += item; });
  }
};

/// Reverses each row of n elements through scratch memory. Without the barrier, lanes read what others have yet to
/// write.
template <bool Waits>
struct Reverse {
  std::int32_t* x;
  std::int64_t n;
  template <class Team>
  void operator()(const Team& team, std::int64_t item) const {
    std::int32_t* const row = x + item * n;
    auto* const scratch = team.template scratch<std::int32_t>();
    const std::int64_t last = n - 1;
    team.lanes(n, [=](std::int64_t i) { scratch[i] = row[i]; });
    if (Waits) team.barrier();
    team.lanes(n, [=](std::int64_t i) { row[i] = scratch[last - i]; });
  }
};

/// One lane leaves without the barrier.
struct Leaves {
  template <class Team>
  void operator()(const Team& team, std::int64_t /*item*/) const {
    bool waits = true;
    team.one([&] { waits = false; });
    if (waits) team.barrier();
  }
};

template <class Op, class T>
struct Reduce {
  using A = accumulator_t<T>;
  const T* x;
  A* out;
  std::int64_t n;
  template <class Team>
  void operator()(const Team& team, std::int64_t item) const {
    const T* const row = x + item;
    const std::int64_t end = n;
    const A whole = k::detail::team_reduce_row<Op, A>(team, end, row);
    const A square = k::detail::team_reduce<Op, A>(
        team, end, [=](std::int64_t i) { return static_cast<A>(row[i]) * static_cast<A>(row[end - 1 - i]); });
    team.one([=, to = out + 2 * item] {
      to[0] = whole;
      to[1] = square;
    });
  }
};

}  // namespace

TEST_CASE("kernel teams: each item runs once", "[simulated]") {
  for (const bool simulated : {false, true}) {
    const std::vector<std::int64_t> x(1000, 3);
    std::vector<std::int64_t> expected;
    for (std::int64_t i = 0; i < 1000; ++i) expected.push_back(3 + i);
    const auto all = [](const Exec& exec, std::int64_t* to) { exec.for_items(1000, 0, AddNumber{to}); };
    CHECK(Place(simulated, 2).result(x, all) == expected);
    const auto none = [](const Exec& exec, std::int64_t* to) { exec.for_items(0, 64, AddNumber{to}); };
    CHECK(Place(simulated).result(x, none) == x);
  }
}

TEST_CASE("kernel teams: lanes of the simulated device show a missing barrier", "[simulated]") {
  constexpr std::int64_t rows = 3, n = 64;
  std::vector<std::int32_t> x(at(rows * n)), reversed(at(rows * n));
  for (std::int64_t i = 0; i < rows * n; ++i) {
    x[at(i)] = static_cast<std::int32_t>(i);
    reversed[at(i / n * n + n - 1 - i % n)] = static_cast<std::int32_t>(i);
  }
  const auto result = [&](bool simulated, auto kernel) {
    return Place(simulated, 2).result(x, [&](const Exec& exec, std::int32_t* to) {
      kernel.x = to;
      exec.for_items(rows, at(n) * sizeof(std::int32_t), kernel);
    });
  };
  CHECK(result(false, Reverse<true>{nullptr, n}) == reversed);
  CHECK(result(true, Reverse<true>{nullptr, n}) == reversed);
  CHECK(result(true, Reverse<false>{nullptr, n}) != reversed);
  const Place device(true);
  const char* const words = "simulated device: a lane of a kernel's team missed a barrier that others wait at";
  device.exec.for_items(4, 0, Leaves{});
  for (int i = 0; i < 2; ++i) CHECK_THROWS_WITH(device.exec.synchronize(), words);  // as a GPU's error, which stays
  CHECK(result(true, Reverse<true>{nullptr, n}) == reversed);  // the next device finds all in order
}

TEST_CASE("kernel teams: a reduction has the same bits for any number of lanes", "[simulated]") {
  const auto check = []<class Op, class T>(Op, T) {
    for (const std::int64_t n : {0, 1, 2, 63, 64, 65, 511, 512, 513, 1000, 2048, 2049, 5000, 70000}) {
      CAPTURE(n, Op::name, name(dtype_v<T>));
      same_everywhere(
          [n](const Exec& exec, const T* x, accumulator_t<T>* out) {
            exec.for_items(3, 0, Reduce<Op, T>{x, out, n});
          },
          numbers<T>(n + 3, 1), std::vector<accumulator_t<T>>(6));
    }
  };
  check(SumOp{}, f32{});
  check(SumOp{}, f64{});
  check(MaxOp{}, f32{});
}

TEST_CASE("kernel teams: a dry run counts the scratch memory of a kernel", "[simulated]") {
  constexpr std::size_t bytes = 10000;
  std::vector<std::int32_t> x(8);
  const Place real(false, 2);
  real.run([](const Exec& exec, std::int32_t* to) { exec.for_items(1, bytes, Reverse<true>{to, 8}); }, x);
  const auto pool = Pool::make(Region::make_meta());
  const Exec dry{.pool = pool.get(), .threads = 2, .dry = true};
  const Buffer block = pool->allocate(8 * sizeof(std::int32_t) + 1);
  dry.for_items(1, bytes, Reverse<true>{nullptr, 8});
  CHECK(pool->stats().peak == real.pool->stats().peak);
}

TEST_CASE("kernel teams: cross-entropy and its sums have the same bits for any number of lanes", "[simulated]") {
  for_types<f32, bf16, f64>([]<class T>(T) {
    constexpr std::int64_t rows = 4, n = 150, first = 10;
    std::vector<T> small;  // shift, total, dy: one of each for a row
    for (std::int64_t i = 0; i < 3 * rows; ++i) small.push_back(static_cast<T>(2.0F + static_cast<float>(i) / 8));
    const std::vector<i32> targets{10, 159, 9, 100};  // the third is in another shard
    same_everywhere(
        [](const Exec& exec, T* x, T* of_rows, i32* ids) {
          k::sum_exp(exec, x, of_rows, of_rows + rows, rows, n, n - 3);
          k::cross_entropy_backward(exec, x, of_rows, of_rows + rows, ids, of_rows + 2 * rows, x, rows, n, first);
        },
        numbers<T>(rows * n, 4), small, targets);
  });
}

TEST_CASE("kernel teams: the logits of targets are the same for any number of lanes", "[simulated]") {
  const auto check = []<class T, class I>(T, I) {
    using Kernel = k::body::TargetLogits<T, I>;
    for (const std::int64_t rows : {1, 64, 130}) {
      constexpr std::int64_t n = 7, first = 10;
      std::vector<I> targets;
      for (std::int64_t r = 0; r < rows; ++r) targets.push_back(static_cast<I>(8 + r % 11));  // some in other shards
      const auto x = numbers<T>(rows * n, 14);
      const auto run = [&](const Exec& exec, const T* logits, const I* of_rows, T* to) {
        exec.for_items((rows + Kernel::group - 1) / Kernel::group, 0, Kernel{logits, of_rows, to, rows, n, first});
      };
      for (const bool simulated : {false, true}) {
        const auto out = Place(simulated, 2).result(std::vector<T>(at(rows)), run, x, targets);
        CAPTURE(rows, simulated);
        bool right = true;
        for (std::int64_t r = 0; r < rows; ++r) {
          const std::int64_t target = static_cast<std::int64_t>(targets[at(r)]) - first;
          right = right && out[at(r)] == (target >= 0 && target < n ? -x[at(r * n + target)] : T(0));
        }
        CHECK(right);
      }
    }
  };
  check(f32{}, i32{});
  check(f64{}, u32{});
}

TEST_CASE("kernel teams: tables of positions have the same bits for any number of lanes", "[simulated]") {
  for_types<f32, f64>([]<class T>(T) {
    for (const std::int64_t half : {1, 3, 32}) {
      for (const bool yarn : {false, true}) {
        const RopeAngles angles{.base = 500000, .factor = 8, .context = 8192, .yarn = yarn};
        constexpr std::int64_t positions = 17, first = 5;
        same_everywhere(
            [&](const Exec& exec, T* cosine, T* sine) {
              exec.for_items(positions, 0,
                             k::body::RotaryTable<T, RopeAngles>{angles, first, half, 2 * half, -1.0, cosine, sine});
            },
            std::vector<T>(at(positions * half)), std::vector<T>(at(positions * half)));
      }
    }
  });
  for (const bool simulated : {false, true}) {
    for (const std::int64_t n : {1, 4096, 5000, 9000}) {
      using k::body::Iota;
      std::vector<i32> expected;
      for (std::int64_t i = 0; i < n; ++i) expected.push_back(static_cast<i32>(7 + i));
      const auto count = [n](const Exec& exec, i32* to) {
        exec.for_items((n + Iota::piece - 1) / Iota::piece, 0, Iota{7, n, to});
      };
      CAPTURE(simulated, n);
      CHECK(Place(simulated, 2).result(std::vector<i32>(at(n)), count) == expected);
    }
    constexpr std::int64_t rows = 6, columns = 9, ahead = 2;
    std::vector<std::uint8_t> expected;
    for (std::int64_t i = 0; i < rows * columns; ++i) expected.push_back(ahead + i / columns >= i % columns ? 1 : 0);
    const auto mask = [](const Exec& exec, std::uint8_t* to) {
      exec.for_items(rows, 0, k::body::CausalMask{ahead, columns, reinterpret_cast<bool_*>(to)});
    };
    CHECK(Place(simulated, 2).result(std::vector<std::uint8_t>(at(rows * columns), 2), mask) == expected);
  }
}

TEST_CASE("kernel teams: random numbers have the same bits for any number of lanes", "[simulated]") {
  for_types<f32, bf16, f64>([]<class T>(T) {
    const std::vector<std::int64_t> shape{3, 5, 1030}, offsets{1, 2, 3};
    for (const auto& strides : {std::vector<std::int64_t>{10000, 2000, 1}, {1, 5000, 3}}) {
      same_everywhere(
          [&](const Exec& exec, T* x) {
            constexpr std::int64_t size = 3 * 5 * 1030;
            k::fill_random<k::body::Uniform>(exec, x, shape, strides, offsets, 7, 8);
            k::fill_random<k::body::Normal>(exec, x + size, shape, strides, offsets, 7, 8);
            k::fill_random<k::body::TruncatedNormal>(exec, x + 2 * size, shape, strides, offsets, 7, 9);
          },
          std::vector<T>(3 * 3 * 5 * 1030));
    }
  });
}

TEST_CASE("kernel teams: sums, maxima and products have the same bits for any number of lanes", "[simulated]") {
  for_types<f32, bf16, f64, i32>([]<class T>(T) {
    const std::vector<std::int64_t> shape{6, 70, 330};
    for (const std::array<bool, 3>& over : {std::array{false, false, true},
                                            {false, true, true},
                                            {true, true, true},
                                            {false, true, false},
                                            {true, false, false},
                                            {true, false, true}}) {
      CAPTURE(name(dtype_v<T>), over[0], over[1], over[2]);
      same_everywhere(
          [&](const Exec& exec, const T* x, T* out, i32* places) {
            constexpr std::int64_t outs = 6 * 70 * 330;
            const DType dtype = dtype_v<T>;
            k::reduce<SumOp>(exec, dtype, x, shape, over, out);
            k::reduce<MaxOp>(exec, dtype, x, shape, over, out + outs);
            k::reduce<MinOp>(exec, dtype, x, shape, over, out + 2 * outs, std::array<std::int64_t, 3>{5, 61, 307});
            k::reduce<ProdOp>(exec, dtype, x, shape, over, out + 3 * outs);
            k::argmax(exec, dtype, x, {6, 70, 330, 3}, places);
          },
          numbers<T>(6 * 70 * 330, 5), std::vector<T>(4 * 6 * 70 * 330), std::vector<i32>(6 * 330));
    }
    const std::vector<std::int64_t> nothing{3, 0, 2};
    same_everywhere(
        [&](const Exec& exec, T* out) {
          k::reduce<MaxOp>(exec, dtype_v<T>, nullptr, nothing, std::array{false, true, false}, out);
        },
        std::vector<T>(6));
  });
}

TEST_CASE("kernel teams: argmax takes the first of equals, and of NaNs, for any number of lanes", "[simulated]") {
  for_types<f32, bf16, f64, i32>([]<class T>(T) {
    for (const std::int64_t n : {1, 2, 3, 9, 127, 128, 129, 1000})
      for (const std::int64_t inner : {1, 3}) {
        const std::int64_t rows = 12, padding = n % 2;  // which holds the largest numbers
        std::vector<T> x(at(rows * (n + padding) * inner), static_cast<T>(9));
        for (std::int64_t row = 0; row < rows; ++row)
          for (std::int64_t i = 0; i < n * inner; ++i) {
            const auto h = static_cast<std::uint32_t>(row * 7919 + i) * 2654435761U >> 8;
            const std::uint32_t most = row % 3 == 0 ? 1 : 4;  // all equal in each third row
            T value = static_cast<T>(static_cast<float>(h % most) - 2);
            if constexpr (!std::is_same_v<T, i32>)
              if (row % 3 == 1 && h % 50 < 3) value = static_cast<T>(std::numeric_limits<float>::quiet_NaN());
            x[at(row * (n + padding) * inner + i)] = value;
          }
        same_everywhere(
            [=](const Exec& exec, const T* from, i32* places) {
              kernels::argmax(exec, dtype_v<T>, from, {rows, n + padding, inner, padding}, places);
            },
            x, std::vector<i32>(at(rows * inner)));
      }
  });
}

TEST_CASE("kernel teams: sums of products have the same bits for any number of lanes", "[simulated]") {
  const auto check = []<class T>(T, double tolerance) {
    struct Sizes {
      std::int64_t i, j, k, l;
    };
    for (const auto& [i, j, k, l] : {Sizes{3, 5, 7, 64}, {40, 30, 1, 3}, {1, 1, 2, 1000}, {2, 3, 1, 1}}) {
      CAPTURE(i, j, k, l, name(dtype_v<T>));
      // out[j, i] = the sum over k and l of lhs[i, k, l] rhs[k, j, l], by lanes with a result each, and by all together
      const auto lhs = numbers<T>(i * k * l, 15), rhs = numbers<T>(k * j * l, 16);
      std::vector<double> expected(at(i * j));
      for (std::int64_t a = 0; a < i; ++a)
        for (std::int64_t b = 0; b < j; ++b)
          for (std::int64_t c = 0; c < k; ++c)
            for (std::int64_t d = 0; d < l; ++d)
              expected[at(b * i + a)] +=
                  static_cast<double>(lhs[at((a * k + c) * l + d)]) * static_cast<double>(rhs[at((c * j + b) * l + d)]);
      const auto run = [&, i = i, j = j, k = k, l = l](const Exec& exec, const T* x, const T* y, T* each, T* together) {
        shardlib::kernels::body::ProductTerms<T> terms{{}, {}, x, y};
        terms.kept.push(i, {k * l, 0, 1});
        terms.kept.push(j, {0, l, i});
        terms.summed.push(k, {l, j * l, 0});
        terms.summed.push(l, {1, 1, 0});
        const shardlib::kernels::body::SumProducts<T> kernel{terms, k * l, i * j, each};
        exec.for_items(kernel.items(), 0, kernel);
        exec.for_items(i * j, 0, shardlib::kernels::body::SumProductsTogether<T>{terms, k * l, together});
      };
      same_everywhere(run, lhs, rhs, std::vector<T>(at(i * j)), std::vector<T>(at(i * j)));
      auto x = lhs, y = rhs;
      std::vector<T> each(at(i * j)), together(at(i * j));
      Place(true).run(run, x, y, each, together);
      const auto apart = [&](const std::vector<T>& sums) {
        double most = 0;
        for (std::size_t n = 0; n < sums.size(); ++n)
          most = std::max(most, std::abs(static_cast<double>(sums[n]) - expected[n]));
        return most;
      };
      CHECK(apart(each) <= tolerance);
      CHECK(apart(together) <= tolerance);
    }
  };
  check(f32{}, 1e-3);
  check(f64{}, 1e-11);
  check(i32{}, 0);
}

TEST_CASE("kernel teams: cotangents of maxima and products have the same bits for any number of lanes", "[simulated]") {
  for_types<f32, bf16, f64>([]<class T>(T) {
    const std::vector<std::int64_t> shape{6, 70, 33};
    constexpr std::int64_t size = 6 * 70 * 33;
    auto x = numbers<T>(size, 15);
    for (std::int64_t i = 0; i < size; ++i) {  // equal elements, and some NaN
      const float rounded = static_cast<float>(static_cast<int>(static_cast<float>(x[at(i)]) * 2)) / 2;
      x[at(i)] = static_cast<T>(i % 911 == 910 ? std::numeric_limits<float>::quiet_NaN() : rounded);
    }
    const auto whole = numbers<T>(size, 16), ct = numbers<T>(size, 17);
    for (const std::array<bool, 3>& over : {std::array{false, false, true},
                                            {false, true, true},
                                            {true, true, true},
                                            {false, true, false},
                                            {true, false, false},
                                            {true, false, true},
                                            {false, false, false}}) {
      for (const Shape64& part : {Shape64{}, Shape64{5, 61, 30}, Shape64{5, 0, 30}}) {
        CAPTURE(name(dtype_v<T>), over[0], over[1], over[2], part);
        same_everywhere(
            [&](const Exec& exec, const T* in, const T* product, const T* d, T* best, T* out) {
              const DType dtype = dtype_v<T>;
              k::reduce<MaxOp>(exec, dtype, in, shape, over, best, part);
              k::extremum_backward(exec, dtype, in, shape, over, best, d, out, part);
              k::reduce<MinOp>(exec, dtype, in, shape, over, best, part);
              k::extremum_backward(exec, dtype, in, shape, over, best, d, out + size, part);
              k::prod_backward(exec, dtype, product, shape, over, d, out + 2 * size, part);
            },
            x, whole, ct, std::vector<T>(size), std::vector<T>(3 * size));
      }
    }
  });
}

TEST_CASE("kernel teams: elementwise loops have the same bits for any number of lanes", "[simulated]") {
  const std::vector<std::int64_t> shape{4, 3, 700};
  const std::vector<std::int64_t> dense{2100, 700, 1}, swapped{3, 1, 12}, row{0, 0, 1}, column{1, 0, 0};
  same_everywhere(
      [&](const Exec& exec, const f32* x, const bf16* y, f32* sum, bf16* product) {
        const auto f = [](const f32& a, const bf16& b, const f32& c, f32& p, bf16& q) {
          p = a * static_cast<f32>(b) + c;
          q = bf16(a - c);
        };
        k::apply(exec, shape, f, k::Operand<const f32>(x, dense), k::Operand<const bf16>(y, row),
                 k::Operand<const f32>(x, column), k::Operand<f32>(sum, swapped), k::Operand<bf16>(product, dense));
        const auto step = [](const f32& a, f32& b, bf16& c) {
          b += a * 0.5F;
          c = bf16(b);
        };
        k::apply_nontemporal(exec, 8400, step, x, sum, product + 8400);
      },
      numbers<f32>(8400, 7), numbers<bf16>(700, 8), std::vector<f32>(8400), std::vector<bf16>(2 * 8400));
}
