// Kernels of copies, lookups, sorts, scans and sums of ranks: teams of one lane and of several give the same bits.
#include "catch.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "kernel_teams.hpp"
#include "shardlib/comm/reduce_tree.hpp"
#include "shardlib/device/tree_kernel.hpp"
#include "shardlib/kernels/body/reduction.hpp"
#include "shardlib/kernels/impl/sort_list.hpp"
#include "shardlib/kernels/index.hpp"
#include "shardlib/kernels/layout.hpp"
#include "shardlib/kernels/ordering.hpp"
#include "shardlib/kernels/scans.hpp"
#include "shardlib/kernels/strided.hpp"

using namespace shardlib;
namespace k = shardlib::kernels;

namespace {

using Sizes64 = std::vector<std::int64_t>;

template <class T>
std::vector<T> random_integers(std::int64_t n, std::int64_t low, std::int64_t high, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<std::int64_t> from(low, high);
  std::vector<T> all(at(n));
  for (T& x : all) x = static_cast<T>(from(random));
  return all;
}

}  // namespace

TEST_CASE("kernel teams: copies and clears have the same bits for any number of lanes", "[simulated]") {
  struct Case {
    Sizes64 shape, in, out;
  };
  const auto check = [](std::size_t element) {
    for (const auto& [shape, in, out] : {
             Case{{3, 5, 700}, {3500, 700, 1}, {3500, 700, 1}},  // one run
             Case{{2, 20000}, {20001, 1}, {20003, 1}},           // runs of several pieces
             Case{{7, 11, 3}, {33, 3, 1}, {44, 4, 1}},           // short runs
             Case{{70, 90}, {1, 70}, {90, 1}},                   // transposes
             Case{{3, 33, 64}, {33, 1, 99}, {2112, 64, 1}},
             Case{{64, 3, 33}, {1, 2112, 64}, {99, 33, 1}},
             Case{{5, 100}, {1, 0}, {100, 1}},  // repeats
             Case{{40, 50}, {50, 1}, {2, 80}},  // with gaps
             Case{{1}, {1}, {1}},
             Case{{0, 4}, {4, 1}, {4, 1}},
         }) {
      CAPTURE(element, shape);
      same_everywhere([&](const Exec& exec, const std::uint8_t* x,
                          std::uint8_t* y) { k::copy_strided(exec, element, shape, x, in, y, out); },
                      random_integers<std::uint8_t>(40006 * 16, 0, 255, 1), std::vector<std::uint8_t>(40006 * 16));
      same_everywhere([&](const Exec& exec, std::uint8_t* y) { k::zero_strided(exec, element, shape, y, out); },
                      random_integers<std::uint8_t>(40006 * 16, 1, 255, 2));
    }
  };
  for (const std::size_t element : {1U, 2U, 3U, 4U, 8U, 12U, 16U}) check(element);
}

TEST_CASE("kernel teams: a list is sorted the same by any number of lanes", "[simulated]") {
  for (const std::int64_t n : {0, 1, 2, 511, 512, 513, 1024, 1025, 1536, 5000}) {
    const auto check = [&](std::int64_t different) {
      auto list = random_integers<std::int64_t>(n, 0, different, 3);
      for (std::int64_t i = 0; i < n; ++i) list[at(i)] = list[at(i)] * n + i;  // no two are equal
      auto expected = list;
      std::ranges::sort(expected);
      for (const bool simulated : {false, true}) {
        auto sorted = list, other = list;
        const std::int64_t* result = nullptr;
        const std::int64_t* first = nullptr;
        Place(simulated, 2)
            .run(
                [&](const Exec& exec, std::int64_t* x, std::int64_t* y) {
                  result = k::detail::sort_list(exec, x, y, n);
                  first = x;
                },
                sorted, other);
        CAPTURE(n, different, simulated);
        CHECK((result == first ? sorted : other) == expected);
      }
    };
    check(3);
    check(1'000'000);
  }
}

TEST_CASE("kernel teams: rows are ordered the same by any number of lanes", "[simulated]") {
  for_types<f32, bf16, f64, i32, u32, u8>([]<class T>(T) {
    struct Case {
      std::int64_t outer, n, inner, padding, k;
    };
    for (const auto& [outer, n, inner, padding, first] :
         {Case{3, 700, 1, 0, 700}, Case{2, 33, 19, 3, 30}, Case{5, 1200, 1, 100, 4}, Case{40, 8, 1, 0, 2},
          Case{1, 1, 1, 0, 1}, Case{2, 3, 2, 3, 0}}) {
      auto x = random_integers<i32>(outer * n * inner, -40, 40, 18);
      std::vector<T> rows;
      for (std::size_t i = 0; i < x.size(); ++i) {
        if constexpr (floating<T>) {
          const float special[] = {std::numeric_limits<float>::quiet_NaN(),
                                   -std::numeric_limits<float>::quiet_NaN(),
                                   std::numeric_limits<float>::infinity(),
                                   -std::numeric_limits<float>::infinity(),
                                   -0.0F,
                                   0.0F,
                                   std::numeric_limits<float>::denorm_min()};
          rows.push_back(static_cast<T>(i % 3 == 0 ? special[i / 3 % 7] : static_cast<float>(x[i]) / 8));
        } else {
          rows.push_back(i % 9 == 0   ? std::numeric_limits<T>::max()
                         : i % 9 == 1 ? std::numeric_limits<T>::lowest()
                                      : static_cast<T>(x[i]));
        }
      }
      for (const bool descending : {false, true}) {
        CAPTURE(name(dtype_v<T>), outer, n, inner, padding, descending);
        const std::int64_t k_rows = first + 2;
        same_everywhere(
            [&](const Exec& exec, const T* from, i32* to) {
              k::argsort(exec, dtype_v<T>, from, {outer, n, inner, padding}, descending, first, to, k_rows);
            },
            rows, std::vector<i32>(at(outer * k_rows * inner), -1));
      }
    }
  });
}

TEST_CASE("kernel teams: lookups and their transposes have the same bits for any number of lanes", "[simulated]") {
  struct Case {
    Sizes64 shape, table, index;  // the table has 50 rows of 6 * 70 elements
    std::int64_t row_stride;
  };
  const auto check = []<class T, class I>(T, I) {
    for (const auto& [shape, table, index, row_stride] : {
             Case{{4, 9, 420}, {0, 0, 1}, {9, 1, 0}, 420},                                               // whole rows
             Case{{4, 9, 6, 70}, {0, 0, 70, 1}, {9, 1, 0, 0}, 420}, Case{{40, 30}, {0, 0}, {30, 1}, 1},  // numbers
             Case{{6, 33, 70}, {70, 0, 1}, {33, 1, 0}, 420},                        // a table with a batch dim
             Case{{6, 8, 70}, {70, 0, 1}, {560, 70, 1}, 420},                       // an index for each element
             Case{{1}, {1}, {1}, 420}, Case{{4, 9, 5}, {0, 0, 1}, {9, 1, 0}, 420},  // short rows
         }) {
      CAPTURE(name(dtype_v<T>), name(dtype_v<I>), shape);
      k::Lookup lookup{shape, table, index, dtype_v<I>, row_stride, 50, 0, 60};
      for (const std::int64_t first_row : {0, 10}) {
        lookup.first_row = first_row;
        const std::int64_t n = k::product(shape);
        const auto ids = random_integers<I>(n, 0, 59, 4);
        same_everywhere([&](const Exec& exec, const T* rows, const I* at_rows,
                            T* out) { k::gather(exec, dtype_v<T>, lookup, rows, at_rows, out); },
                        numbers<T>(50 * 420, 5), ids, std::vector<T>(at(n)));
        same_everywhere([&](const Exec& exec, const T* ct, const I* at_rows,
                            T* sums) { k::scatter_add(exec, dtype_v<T>, lookup, ct, at_rows, sums); },
                        numbers<T>(n, 6), ids, numbers<T>(50 * 420, 8));
      }
    }
  };
  check(f32{}, i32{});
  check(bf16{}, u32{});
  check(f64{}, i32{});
}

TEST_CASE("kernel teams: the ids of several dims are joined alike by any number of lanes", "[simulated]") {
  const Sizes64 shape{7, 700}, of_first{1, 0}, of_second{700, 1}, table{0, 0};
  const k::Lookup first{shape, table, of_first, DType::i32, 20, 30, 10, 60};
  const k::Lookup second{shape, table, of_second, DType::u32, 1, 20, 0, 40};
  const auto a = random_integers<i32>(7, 0, 59, 9);
  const auto b = random_integers<u32>(4900, 0, 39, 10);
  const auto joined = [&](const Exec& exec, const i32* i, const u32* j, u32* ids) {
    k::join_ids(exec, first, i, "i", ids);
    k::join_ids(exec, second, j, "j", ids);
  };
  same_everywhere(joined, a, b, std::vector<u32>(4900));
  std::vector<u32> expected;
  for (std::size_t i = 0; i < 4900; ++i) {
    const bool here = a[i / 700] >= 10 && a[i / 700] < 40 && b[i] < 20;
    expected.push_back(here ? static_cast<u32>(a[i / 700] - 10) * 20 + b[i] : std::numeric_limits<u32>::max());
  }
  CHECK(Place(false).result(std::vector<u32>(4900), joined, a, b) == expected);
}

TEST_CASE("kernel teams: scans have the same bits for any number of lanes", "[simulated]") {
  for_types<f32, bf16, f64, i32>([]<class T>(T) {
    using A = accumulator_t<T>;
    struct Case {
      std::int64_t outer, n, inner;
    };
    for (const auto& [outer, n, inner] : {Case{3, 70, 1}, Case{2, 33, 19}, Case{1, 40, 150}, Case{4, 1, 3}}) {
      const std::int64_t all = outer * n * inner, columns = outer * inner;
      const DType dtype = dtype_v<T>;
      CAPTURE(name(dtype), outer, n, inner);
      const k::Along along{outer, n, inner};
      const auto x = numbers<T>(all, 9), y = numbers<T>(all, 10), ct = numbers<T>(all, 11);
      same_everywhere(
          [&](const Exec& exec, const T* from, T* to) {
            k::cumulate<k::detail::SumOp>(exec, dtype, from, to, along);
            k::cumulate<k::detail::SumOp>(exec, dtype, from, to + all, along, true);
            k::cumulate<k::detail::ProdOp>(exec, dtype, from, to + 2 * all, along);
            k::cumulate<k::detail::MaxOp>(exec, dtype, from, to + 3 * all, along);
          },
          x, std::vector<T>(at(4 * all)));
      if constexpr (floating<T>) {
        same_everywhere(
            [&](const Exec& exec, const T* a, const T* b, const T* d, T* to) {
              k::cumprod_backward(exec, dtype, a, b, d, to, along);
              k::cummax_backward(exec, dtype, a, d, to + all, along);
            },
            x, y, ct, std::vector<T>(at(2 * all)));
        for (const bool reverse : {false, true}) {
          same_everywhere(
              [&](const Exec& exec, const T* a, const T* b, const T* d, const A* of_shards, T* to, A* ends) {
                const k::ScanEnds none, passed{of_shards, 3, 4, 2};
                const auto backward = [&](const T* h, T* out, const k::ScanEnds& from) {
                  k::linear_scan_backward(exec, dtype, a, h, d, out, along, reverse, from);
                };
                k::linear_scan(exec, dtype, a, b, to, along, reverse, none);
                k::linear_scan(exec, dtype, a, b, to + all, along, reverse, passed);
                backward(nullptr, to + 2 * all, none);
                backward(to, to + 3 * all, none);
                backward(to, to + 4 * all, passed);
                k::linear_scan_ends(exec, dtype, a, b, ends, along, reverse);
                k::linear_scan_backward_ends(exec, dtype, a, to, d, ends + 2 * columns, along, reverse);
              },
              x, y, ct, numbers<A>(4 * 3 * columns, 12), std::vector<T>(at(5 * all)), std::vector<A>(at(5 * columns)));
        }
      }
    }
  });
}

TEST_CASE("kernel teams: sums of ranks have the bits of the communicators' tree", "[simulated]") {
  const auto check = []<class T, class Op>(T, Op, Reduction reduction) {
    using Kernel = detail::ReduceTree<T, Op>;
    for (const std::int64_t ranks : {1, 2, 3, 5, 6, 7, 8, 13, 16, 33}) {
      constexpr std::int64_t n = 2500, stride = 2600;
      const auto x = numbers<T>(ranks * stride, 13);
      std::vector<const std::byte*> in;
      for (std::int64_t r = 0; r < ranks; ++r) in.push_back(reinterpret_cast<const std::byte*>(x.data() + r * stride));
      std::vector<T> expected(at(n));
      detail::reduce_tree(dtype_v<T>, reduction, in, reinterpret_cast<std::byte*>(expected.data()), at(n));
      for (const bool simulated : {false, true}) {
        CAPTURE(name(dtype_v<T>), ranks, simulated);
        const auto sum = [&](const Exec& exec, const T* of_ranks, T* to) {
          exec.for_items((n + Kernel::piece - 1) / Kernel::piece, 0, Kernel{of_ranks, stride, ranks, n, to});
        };
        CHECK(same_bits(Place(simulated, 2).result(std::vector<T>(at(n)), sum, x), expected));
      }
    }
  };
  check(f32{}, detail::Sum{}, Reduction::sum);
  check(bf16{}, detail::Sum{}, Reduction::sum);
  check(f64{}, detail::Sum{}, Reduction::sum);
  check(i32{}, detail::Sum{}, Reduction::sum);
  check(f32{}, detail::Max{}, Reduction::max);
  check(bf16{}, detail::Max{}, Reduction::max);
}
