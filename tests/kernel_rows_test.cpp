// Kernels for the memory of accelerators, on the simulated device: held rows, sums of squares and packs of elements
// give the host's bits; the kernels of linear_cross_entropy agree with a reference in f64.
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
#include "shardlib/kernels/body/logits.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/kernels/reduce.hpp"
#include "shardlib/kernels/rows.hpp"

using namespace shardlib;
namespace k = shardlib::kernels;

namespace {

/// Counts the calls for each element, and adds what another lane of the part has.
struct CountCalls {
  std::int32_t* calls;
  std::int64_t n;
  template <class Team>
  void operator()(const Team& team, std::int64_t item) const {
    std::int32_t* const to = calls + item * n;
    team.template stream<3>(
        n, [=](std::int64_t i) { return to[i]; }, [=](std::int64_t i, std::int32_t before) { to[i] = before + 1; });
  }
};
/// Each lane of a part writes the sum of its own number and its neighbor's.
struct AddNeighbor {
  std::int32_t* sums;
  template <class Team>
  void operator()(const Team& team, std::int64_t /*item*/) const {
    const std::int32_t mine = 100 * team.part() + team.part_lane();
    const std::int32_t other = team.exchange(mine, 1);
    if (team.part() < Team::parts) sums[team.part() * Team::part_lanes + team.part_lane()] = mine + other;
  }
};

struct Blend {
  template <class A, class B, class C>
  void operator()(const A& a, const B& b, C& c) const {
    c = static_cast<C>(static_cast<accumulator_t<C>>(c) * 2 + static_cast<accumulator_t<C>>(float(a)) * float(b));
  }
};
template <class T>
T nan_of() {
  return static_cast<T>(std::numeric_limits<float>::quiet_NaN());
}

}  // namespace

TEST_CASE("kernel rows: a stream visits each element once, and parts exchange numbers", "[simulated]") {
  for (const bool simulated : {false, true})
    for (const std::int64_t n : {0, 1, 4, 5, 14, 15, 16, 31, 1000}) {
      std::vector<std::int32_t> calls(at(3 * n), 7);
      Place(simulated).run([n](const Exec& e, std::int32_t* to) { e.for_items(3, 0, CountCalls{to, n}); }, calls);
      CAPTURE(simulated, n);
      CHECK(std::ranges::count(calls, 8) == 3 * n);
    }
  std::vector<std::int32_t> sums(4, -1);
  Place(true).run([](const Exec& e, std::int32_t* to) { e.for_items_on_device(2, 0, AddNeighbor{to}); }, sums);
  CHECK(sums == std::vector<std::int32_t>{1, 1, 201, 201});
}

TEST_CASE("kernel rows: held rows, and strided ones, have the host's bits", "[simulated]") {
  for_types<f32, bf16, f64>([]<class T>(T) {
    struct Case {
      std::int64_t outer, n, padding, begin, inner = 1;  // `begin`: the first element, so that rows are unaligned
    };
    for (const auto& [outer, n, padding, begin, inner] : {Case{1, 1, 0, 0},
                                                          {3, 2, 1, 0},
                                                          {5, 63, 0, 0},
                                                          {4, 64, 0, 0},
                                                          {2, 65, 0, 1},
                                                          {2, 33, 2, 0, 19},
                                                          {1, 600, 7, 0},
                                                          {7, 96, 0, 0},
                                                          {9, 768, 0, 0},
                                                          {3, 768, 5, 0},
                                                          {3, 768, 0, 1},
                                                          {2, 1000, 0, 0},
                                                          {2, 1024, 0, 0},
                                                          {2, 1025, 0, 0},
                                                          {3, 1600, 60, 0},
                                                          {1, 2047, 0, 0},
                                                          {2, 2048, 0, 0},
                                                          {1, 2049, 0, 0}}) {
      CAPTURE(outer, n, padding, begin, inner, name(dtype_v<T>));
      const std::int64_t size = outer * n * inner;
      const auto x = numbers<T>(size + begin, 2), d = numbers<T>(size + begin, 3);
      const auto check_rows = [&](auto kernel) {  // into another array, and in place
        same_everywhere([&](const Exec& e, T* a, T* b, T* y) { kernel(e, a + begin, b + begin, y + begin); }, x, d,
                        std::vector<T>(at(size + begin)));
        same_everywhere([&](const Exec& e, T* a, T* b) { kernel(e, a + begin, b + begin, b + begin); }, x, d);
      };
      check_rows([&](const Exec& e, T*, T* b, T* y) { k::softmax(e, b, y, {outer, n, inner, padding}); });
      check_rows([&](const Exec& e, T*, T* b, T* y) {
        k::normalize<false>(e, b, y, {outer, n, inner, padding}, 1e-5);
      });
      check_rows([&](const Exec& e, T*, T* b, T* y) { k::normalize<true>(e, b, y, {outer, n, inner, padding}, 1e-5); });
      check_rows([&](const Exec& e, T* a, T* b, T* y) { k::softmax_backward(e, a, b, y, {outer, n, inner}); });
      check_rows([&](const Exec& e, T* a, T* b, T* y) {
        k::normalize_backward<false>(e, a, b, y, {outer, n, inner, padding}, 1e-5);
      });
      check_rows([&](const Exec& e, T* a, T* b, T* y) {
        k::normalize_backward<true>(e, a, b, y, {outer, n, inner, padding}, 1e-5);
      });
    }
    for (const std::int64_t i : {0, 64, 149}) {  // a NaN makes its row NaN, and no other
      auto x = numbers<T>(3 * 150, 4);
      x[at(150 + i)] = nan_of<T>();
      Place(true).run(
          [](const Exec& e, T* y) {
            k::normalize<true>(e, y, y, {1, 150, 1}, 1e-5);
            k::normalize<true>(e, y + 150, y + 150, {1, 150, 1}, 1e-5);
            k::softmax(e, y + 300, y + 300, {1, 150, 1});
          },
          x);
      for (std::int64_t j = 0; j < 450; ++j) {
        const float y = static_cast<float>(x[at(j)]);
        if (std::isnan(y) != (j / 150 == 1)) FAIL("element " << j << " is " << y);
      }
    }
  });
}

/// A norm with a scale and a bias, and its cotangents, of scales W and results R.
template <class T, class W, class R>
void check_affine_norm(std::int64_t outer, std::int64_t n, std::int64_t padding, std::int64_t begin,
                       std::int64_t inner) {
  CAPTURE(outer, n, padding, begin, inner, name(dtype_v<T>), name(dtype_v<W>), name(dtype_v<R>));
  const std::int64_t size = outer * n * inner + begin;
  const auto x = numbers<T>(size, 2);
  const auto ct = numbers<R>(size, 3);
  const auto scale = numbers<W>(n, 4), bias = numbers<W>(n, 5);
  const auto check = [&]<bool Centered>(std::bool_constant<Centered>) {
    same_everywhere(
        [&](const Exec& e, const T* from, const W* s, const W* b, R* y) {
          k::affine_norm<Centered>(e, from + begin, s, b, y + begin, {outer, n, inner, padding}, 1e-5);
        },
        x, scale, bias, std::vector<R>(at(size)));
    for (const int wanted : {1, 2, 4, 7})  // one of the cotangents, and all
      same_everywhere(
          [&](const Exec& e, const T* from, const W* s, const R* c, T* dx, W* ds, W* db) {
            k::affine_norm_backward<Centered>(e, from + begin, s, c + begin, wanted & 1 ? dx + begin : nullptr,
                                              wanted & 2 ? ds : nullptr, Centered && wanted & 4 ? db : nullptr,
                                              {outer, n, inner, padding}, 1e-5);
          },
          x, scale, ct, std::vector<T>(at(size)), std::vector<W>(at(n)), std::vector<W>(at(n)));
  };
  check(std::true_type());
  check(std::false_type());
}

TEST_CASE("kernel rows: norms with a scale have the host's bits", "[simulated]") {
  for (const auto& [outer, n, padding, begin, inner] : std::vector<std::array<std::int64_t, 5>>{{0, 5, 0, 0, 1},
                                                                                                {1, 1, 0, 0, 1},
                                                                                                {17, 2, 1, 0, 1},
                                                                                                {33, 65, 0, 1, 1},
                                                                                                {2, 33, 2, 0, 19},
                                                                                                {140, 96, 0, 0, 1},
                                                                                                {40, 768, 5, 0, 1},
                                                                                                {70, 1025, 0, 0, 1},
                                                                                                {3, 2049, 0, 0, 1}}) {
    check_affine_norm<f32, f32, f32>(outer, n, padding, begin, inner);
    check_affine_norm<f32, f32, bf16>(outer, n, padding, begin, inner);
    check_affine_norm<bf16, bf16, bf16>(outer, n, padding, begin, inner);
    check_affine_norm<bf16, f32, f32>(outer, n, padding, begin, inner);
    check_affine_norm<f64, f64, f64>(outer, n, padding, begin, inner);
  }
}

TEST_CASE("kernel rows: sums of squares have the host's bits", "[simulated]") {
  for_types<f32, bf16>([]<class T>(T) {
    for (const std::int64_t n : {0, 1, 63, 64, 65, 2047, 2048, 2049, 4099, 65535, 65536, 65537, 150000, 300001})
      for (const std::int64_t begin : {0, 1}) {
        CAPTURE(n, begin, name(dtype_v<T>));
        same_everywhere([&](const Exec& e, const T* x, f32* sum) { k::sum_of_squares(e, n, x + begin, sum); },
                        numbers<T>(n + begin, 6), std::vector<f32>{-1});
      }
    auto x = numbers<T>(5000, 7);
    x[4999] = nan_of<T>();
    std::vector<f32> sum(1);
    Place(true).run([](const Exec& e, const T* from, f32* to) { k::sum_of_squares(e, 5000, from, to); }, x, sum);
    CHECK(std::isnan(sum[0]));
  });
}

TEST_CASE("kernel rows: packs of elements have the bits of single ones", "[simulated]") {
  const auto check = []<class A, class B, class C>(A, B, C) {
    using Shape = std::vector<std::int64_t>;
    struct Case {
      Shape shape, a, b, c;  // strides
      std::int64_t begin;
    };
    for (const auto& [shape, a, b, c, begin] : {Case{{0}, {1}, {1}, {1}, 0},
                                                {{1}, {1}, {1}, {1}, 0},
                                                {{7}, {1}, {1}, {1}, 0},
                                                {{64}, {1}, {1}, {1}, 0},
                                                {{64}, {1}, {1}, {1}, 1},
                                                {{20000}, {1}, {1}, {1}, 0},
                                                {{20003}, {1}, {1}, {1}, 0},
                                                {{48, 96}, {96, 1}, {0, 1}, {96, 1}, 0},
                                                {{48, 96}, {96, 1}, {1, 0}, {96, 1}, 0},
                                                {{4, 6, 40}, {240, 40, 1}, {40, 0, 1}, {240, 40, 1}, 0},
                                                {{33, 31}, {1, 33}, {31, 1}, {31, 1}, 0}}) {
      const std::int64_t n = k::product(shape) + begin;
      const auto x = numbers<A>(n, 8);
      const auto y = numbers<B>(n, 9);
      const auto z = numbers<C>(n, 10);
      auto packs = z;
      auto host = z;
      const auto run = [&](bool simulated, std::vector<C>& to) {
        auto p = x;
        auto q = y;
        Place(simulated).run(
            [&](const Exec& e, const A* from, const B* other, C* into) {
              const k::Operand<const A> of_a(from + begin, a);
              const k::Operand<const B> of_b(other + begin, b);
              const k::Operand<C> of_c(into + begin, c);
              if (!simulated) return k::apply(e, shape, Blend{}, of_a, of_b, of_c);
              const auto bytes = [](const auto* data) {
                return const_cast<std::byte*>(reinterpret_cast<const std::byte*>(data));
              };
              std::array<k::detail::ErasedOperand, 3> all{
                  k::detail::ErasedOperand{bytes(of_a.data), sizeof(A), false, &of_a.strides},
                  k::detail::ErasedOperand{bytes(of_b.data), sizeof(B), false, &of_b.strides},
                  k::detail::ErasedOperand{bytes(of_c.data), sizeof(C), true, &of_c.strides}};
              const auto loops = k::detail::elementwise_loops(e, shape, all);
              using Row = k::body::ElementRow<Blend, const A, const B, C>;
              e.for_items_on_device(loops.items(), 0,
                                    k::body::Elementwise<Row>{loops, {{}, {all[0].data, all[1].data, all[2].data}}});
            },
            p, q, to);
      };
      run(false, host);
      run(true, packs);
      CAPTURE(n, begin, shape.size());
      CHECK(same_bits(host, packs));
    }
  };
  check(f32{}, f32{}, f32{});
  check(bf16{}, bf16{}, bf16{});
  check(bf16{}, f32{}, f32{});
  check(f32{}, bf16{}, bf16{});
}

TEST_CASE("kernel rows: one pass over logits gives the sums of a loss and their cotangents", "[simulated]") {
  const auto check = []<class A, class T, class I>(A, T, I) {
    constexpr std::int64_t rows = 4, first = 10;
    constexpr double inf = std::numeric_limits<double>::infinity();
    struct Case {
      std::int64_t n, stride, begin;
    };
    for (const auto& [n, stride, begin] : {Case{1, 64, 0},
                                           {5, 7, 1},
                                           {64, 64, 0},
                                           {1000, 1024, 0},
                                           {1000, 1000, 1},
                                           {5003, 5056, 0},
                                           {2048, 2048, 0},
                                           {0, 0, 0}}) {
      CAPTURE(n, stride, begin, name(dtype_v<A>), name(dtype_v<T>));
      auto x = numbers<A>(rows * stride + begin, 11);
      for (A& v : x) v *= 20;
      if (n > 4) {
        x[at(begin + 1)] = A(-inf);                                                // counts for nothing
        for (std::int64_t i = 0; i < n; ++i) x[at(begin + stride + i)] = A(-inf);  // a row of nothing but the last
        x[at(begin + stride + n - 1)] = A(3);
        x[at(begin + 2 * stride + 3)] = nan_of<A>();
      }
      std::vector<I> targets{static_cast<I>(first), static_cast<I>(first + n - 1), static_cast<I>(first - 1),
                             static_cast<I>(first + n / 2)};
      std::vector<A> sums(at(3 * rows)), dy{A(1), A(0.5), A(2), A(-1)};
      std::vector<T> slopes(at(rows * stride + begin));
      Place(true).run(
          [&](const Exec& e, A* logits, const I* ids, A* of_rows, const A* ct, T* to) {
            e.for_items_on_device(rows, 0,
                                  k::body::LogitSums<A, I>{logits + begin, stride, ids, of_rows, of_rows + rows,
                                                           of_rows + 2 * rows, n, first});
            if (begin == 0 && n > 0)
              e.for_items_on_device(
                  rows, 0,
                  k::body::LogitSlopes<A, I, T>{logits, stride, of_rows, of_rows + rows, ids, ct, to, n, first});
          },
          x, targets, sums, dy, slopes);
      for (std::int64_t r = 0; r < rows; ++r) {
        const A* const row = x.data() + begin + r * stride;
        double top = -inf, total = 0;
        for (std::int64_t i = 0; i < n; ++i) top = row[i] > top || std::isnan(row[i]) ? double(row[i]) : top;
        if (r == 2 && n > 4) top = std::numeric_limits<double>::quiet_NaN();
        for (std::int64_t i = 0; i < n; ++i) total += std::exp(row[i] - top);
        const std::int64_t target = static_cast<std::int64_t>(targets[at(r)]) - first;
        const bool here = target >= 0 && target < n;
        const auto close = [](double a, double b, double tolerance) {
          return (std::isnan(a) && std::isnan(b)) || a == b || std::abs(a - b) <= tolerance * std::abs(b);
        };
        CAPTURE(r, top, total, sums[at(r)], sums[at(rows + r)]);
        CHECK(close(sums[at(r)], top, 0));
        CHECK(close(sums[at(rows + r)], total, 1e-5));
        CHECK(close(sums[at(2 * rows + r)], here ? -row[target] : 0.0, 0));
        for (std::int64_t i = 0; begin == 0 && i < n; ++i) {
          const double p = std::exp(row[i] - top) / total - (i == target ? 1 : 0);
          const double slope = double(dy[at(r)]) * p,
                       got = static_cast<double>(static_cast<A>(slopes[at(r * stride + i)]));
          const double error = std::abs(got - slope), allowed = sizeof(T) == 2 ? 0.005 * std::abs(slope) + 1e-6 : 2e-6;
          if (!(error <= allowed) && !(std::isnan(got) && std::isnan(slope)))
            FAIL("row " << r << " element " << i << ": " << got << " and not " << slope);
        }
      }
    }
  };
  check(f32{}, f32{}, i32{});
  check(f32{}, bf16{}, u32{});
  check(f64{}, f64{}, i32{});
}
