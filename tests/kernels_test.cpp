// The untyped kernels, each against plain loops in f64 that are written from the definition.
#include "catch.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernel_teams.hpp"
#include "shardlib/kernels/body/random.hpp"
#include "shardlib/kernels/body/reduction.hpp"
#include "shardlib/kernels/einsum.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/kernels/gemm.hpp"
#include "shardlib/kernels/impl/einsum_loops.hpp"
#include "shardlib/kernels/index.hpp"
#include "shardlib/kernels/layout.hpp"
#include "shardlib/kernels/random.hpp"
#include "shardlib/kernels/reduce.hpp"
#include "shardlib/kernels/rows.hpp"
#include "shardlib/support/math.hpp"

using namespace shardlib;
namespace k = shardlib::kernels;
using k::detail::MaxOp, k::detail::MinOp, k::detail::SumOp;

namespace {

using Shape = std::vector<std::int64_t>;
using Values = std::vector<double>;

struct Fixture {
  std::shared_ptr<Pool> pool = Pool::make();
  Exec exec{pool.get(), 1};
};

std::int64_t count(const Shape& e) {
  return std::accumulate(e.begin(), e.end(), std::int64_t{1}, std::multiplies<>());
}

/// All multi-indices of an array, in row-major order.
std::vector<Shape> indices(const Shape& shape) {
  std::vector<Shape> all;
  for (std::int64_t linear = 0; linear < count(shape); ++linear) {
    Shape index(shape.size());
    std::int64_t rest = linear;
    for (std::size_t d = shape.size(); d-- > 0;) {
      index[d] = rest % shape[d];
      rest /= shape[d];
    }
    all.push_back(index);
  }
  return all;
}
std::int64_t linear(const Shape& index, const Shape& shape) {
  std::int64_t l = 0;
  for (std::size_t d = 0; d < shape.size(); ++d) l = l * shape[d] + index[d];
  return l;
}

template <class T>
double number(T x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return float(x);
  } else {
    return static_cast<double>(x);
  }
}
template <class T>
T element(double x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return bf16(static_cast<float>(x));
  } else if constexpr (std::is_same_v<T, bool_>) {
    return x != 0;
  } else {
    return static_cast<T>(x);
  }
}

template <class T>
std::vector<T> random_array(std::int64_t n, std::mt19937& rng) {
  std::vector<T> a(at(n));
  for (T& x : a) {
    if constexpr (dtype_v<T> == DType::bool_) {
      x = rng() % 2 == 0;
    } else if constexpr (std::is_integral_v<T>) {
      x = static_cast<T>(rng() % 11) - static_cast<T>(std::is_signed_v<T> ? 5 : 0);
    } else {
      x = element<T>(std::uniform_real_distribution<double>(-1, 1)(rng));
    }
  }
  return a;
}
template <class T>
Values numbers(const std::vector<T>& a) {
  Values v;
  for (const T& x : a) v.push_back(number(x));
  return v;
}

/// The tolerance of one element of a type, relative to 1.
template <class T>
double precision() {
  if (std::is_same_v<T, bf16>) return 1.0 / 256;
  if (std::is_same_v<T, f32>) return 4e-6;
  return std::is_same_v<T, f64> ? 1e-13 : 0;
}

/// Every element within precision * max(1, |want|) * scale; NaN and inf must agree.
template <class T>
bool close(const std::vector<T>& got, const Values& want, double scale = 1) {
  if (got.size() != want.size()) return false;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double g = number(got[i]);
    if (std::isnan(want[i]) ? std::isnan(g) : g == want[i]) continue;
    if (!(std::abs(g - want[i]) <= precision<T>() * scale * std::max(1.0, std::abs(want[i])))) {
      UNSCOPED_INFO("element " << i << " is " << g << " instead of " << want[i]);
      return false;
    }
  }
  return true;
}

Shape random_shape(std::mt19937& rng, std::size_t max_rank) {
  static const std::int64_t choice[] = {0, 1, 1, 2, 3, 5, 33, 70};
  Shape e(rng() % (max_rank + 1));
  std::int64_t total = 1;
  for (auto& x : e) {
    x = choice[rng() % std::size(choice)];
    if (total * x > 20000) x = 2;
    total *= std::max<std::int64_t>(x, 1);
  }
  if (rng() % 8 != 0) std::replace(e.begin(), e.end(), std::int64_t{0}, std::int64_t{4});
  return e;
}

float ulps(float got, double want) {
  const auto w = static_cast<float>(want);
  if (got == w || (std::isnan(got) && std::isnan(w))) return 0;
  if (std::isinf(w) || std::isinf(got)) return 1e9F;
  const double unit = std::nextafter(std::abs(w), std::numeric_limits<float>::infinity()) - std::abs(w);
  return static_cast<float>(std::abs(got - want) / unit);
}

}  // namespace

TEST_CASE("kernels: f32 functions stay within a few ulp over the whole range") {
  struct Case {
    const char* name;
    float (*got)(float);
    double (*want)(double);
    float limit;
  };
  const Case cases[] = {{"exp", [](float x) { return k::fast_exp(x); }, [](double x) { return std::exp(x); }, 2},
                        {"log", [](float x) { return k::fast_log(x); }, [](double x) { return std::log(x); }, 2},
                        {"tanh", [](float x) { return k::fast_tanh(x); }, [](double x) { return std::tanh(x); }, 3},
                        {"sigmoid", [](float x) { return k::fast_sigmoid(x); },
                         [](double x) { return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x)); }, 4},
                        {"erf", [](float x) { return k::fast_erf(x); }, [](double x) { return std::erf(x); }, 3}};
  for (const Case& c : cases) {
    float worst = 0;
    for (std::uint64_t u = 0; u < (1ULL << 32); u += 5003) {
      const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(u));
      worst = std::max(worst, ulps(c.got(x), c.want(x)));
    }
    INFO(c.name);
    CHECK(worst <= c.limit);
  }
  constexpr float inf = std::numeric_limits<float>::infinity();
  CHECK(k::fast_exp(-inf) == 0.0F);
  CHECK(k::fast_exp(inf) == inf);
  CHECK(k::fast_exp(0.0F) == 1.0F);
  CHECK(std::isnan(k::fast_exp(std::numeric_limits<float>::quiet_NaN())));
  CHECK(k::fast_log(0.0F) == -inf);
  CHECK(k::fast_log(-0.0F) == -inf);
  CHECK(k::fast_log(inf) == inf);
  CHECK(std::isnan(k::fast_log(-1.0F)));
  CHECK(k::fast_sigmoid(-inf) == 0.0F);
  CHECK(k::fast_tanh(-inf) == -1.0F);
  CHECK(k::fast_erf(inf) == 1.0F);
  CHECK(k::fast_sigmoid(-2.0) == Approx(1 / (1 + std::exp(2.0))).epsilon(1e-15));
}

namespace {

/// Calls f with a product of each size {m, n, depth}, in every way to take the operands, and what plain loops give.
/// Rows have elements between them. What the product should write is NaN.
template <class T, class C, class F>
void each_product(std::mt19937& rng, const std::vector<std::array<std::int64_t, 3>>& sizes, const F& f) {
  for (const auto& [m, n, d] : sizes)
    for (int flags = 0; flags < 8; ++flags) {
      const bool ta = (flags & 1) != 0, tb = (flags & 2) != 0, accumulate = (flags & 4) != 0;
      if (std::is_same_v<C, bf16> && accumulate) continue;
      CAPTURE(m, n, d, flags);
      const std::int64_t lda = (ta ? m : d) + 2, ldb = (tb ? d : n) + 1, ldc = n + 3;
      const auto a = random_array<T>((ta ? d : m) * lda, rng), b = random_array<T>((tb ? n : d) * ldb, rng);
      auto c = random_array<C>(m * ldc, rng);
      Values want = numbers(c);
      for (std::int64_t i = 0; i < m; ++i)
        for (std::int64_t j = 0; j < n; ++j) {
          double& sum = want[at(i * ldc + j)];
          if (!accumulate) sum = 0;
          for (std::int64_t p = 0; p < d; ++p)
            sum += number(a[at(ta ? p * lda + i : i * lda + p)]) * number(b[at(tb ? j * ldb + p : p * ldb + j)]);
          if (!accumulate) c[at(i * ldc + j)] = C(std::numeric_limits<float>::quiet_NaN());
        }
      f(k::detail::Gemm<T, C>{ta, tb, m, n, d, a.data(), lda, b.data(), ldb, c.data(), ldc, accumulate}, c, want);
    }
}

}  // namespace

TEST_CASE("kernels: gemm with every flag, padding, empty sizes and accumulation, on any number of threads") {
  Fixture fx;
  std::mt19937 rng(1);
  const auto check = [&]<class T, class C>(T, C) {
    const auto multiply = [&](const k::detail::Gemm<T, C>& g, const std::vector<C>& c, const Values& want) {
      const auto product = [&](int threads) {
        auto out = c;
        fx.exec.threads = threads;
        k::gemm(fx.exec, g.trans_a, g.trans_b, g.m, g.n, g.k, g.a, g.lda, g.b, g.ldb, out.data(), g.ldc, g.accumulate);
        return out;
      };
      const auto one = product(1);
      CHECK(close(one, want, 10));
      for (const int threads : {2, 3, 6, 7}) {
        const auto parts = product(threads);
        const bool same = std::is_same_v<T, bf16> && k::has_bf16_gemm();
        CHECK((same ? numbers(parts) == numbers(one) : close(parts, want, 10)));
      }
    };
    each_product<T, C>(rng, {{1, 1, 1}, {3, 5, 7}, {1, 9, 4}, {8, 1, 6}, {17, 33, 65}, {4, 4, 0}, {0, 3, 2}}, multiply);
    each_product<T, C>(rng, {{2, 0, 3}, {70, 300, 130}, {65, 97, 400}, {9, 7001, 3}}, multiply);
  };
  check(float(), float());
  check(double(), double());
  check(bf16(), float());
  check(bf16(), bf16());
}

TEST_CASE("kernels: a product of bf16 by copies in f32, piece by piece") {
  Fixture fx;
  std::mt19937 rng(4);
  for_types<f32, bf16>([&]<class C>(C) {
    each_product<bf16, C>(rng, {{1, 1, 1}, {17, 33, 65}, {10, 20, 900}, {300, 10, 20}, {9, 1001, 3}, {70, 300, 130}},
                          [&](k::detail::Gemm<bf16, C> g, const std::vector<C>& c, const Values& want) {
                            for (const std::int64_t most : {1, 600, 5000, 1 << 21}) {
                              auto out = c;
                              g.c = out.data();
                              k::detail::gemm_of_copies(fx.exec, g, most);
                              CHECK(close(out, want, 10));
                            }
                          });
  });
}

TEST_CASE("kernels: gemm of rows that share sets of the caches, in several copied panels") {
  Fixture fx;
  fx.exec.threads = 1;
  std::mt19937 rng(3);
  // A panel has at most 2 MiB: the last case has three, of 256, 256 and 8 columns.
  for (const auto& [m, n, d, ldb] :
       std::vector<std::array<std::int64_t, 4>>{{64, 512, 64, 512}, {70, 100, 33, 1024}, {64, 520, 2000, 1536}})
    for (int flags = 0; flags < 4; ++flags) {
      const bool ta = (flags & 1) != 0, accumulate = (flags & 2) != 0;
      const auto a = random_array<float>(m * d, rng), b = random_array<float>(d * ldb, rng);
      const auto before = random_array<float>(m * n, rng);
      Values want(at(m * n));
      for (std::int64_t i = 0; i < m; ++i)
        for (std::int64_t j = 0; j < n; ++j) {
          double sum = accumulate ? static_cast<double>(before[at(i * n + j)]) : 0.0;
          for (std::int64_t p = 0; p < d; ++p)
            sum += number(a[at(ta ? p * m + i : i * d + p)]) * number(b[at(p * ldb + j)]);
          want[at(i * n + j)] = sum;
        }
      auto c = before;
      k::gemm(fx.exec, ta, false, m, n, d, a.data(), ta ? m : d, b.data(), ldb, c.data(), n, accumulate);
      // Rounding grows with the number of products. How a library splits the sum depends on the machine's caches.
      CHECK(close(c, want, std::max(10.0, static_cast<double>(d) / 64)));
    }
}

TEST_CASE("kernels: a batch of products at any strides") {
  Fixture fx;
  std::mt19937 rng(2);
  const auto check = [&]<class T, class C>(T, C) {
    constexpr std::int64_t m = 5, n = 70;
    for (const auto& [products, d] : std::vector<std::array<std::int64_t, 2>>{{0, 9}, {1, 9}, {2, 9}, {7, 9}, {3, 0}}) {
      for (int flags = 0; flags < 8; ++flags) {
        const bool ta = (flags & 1) != 0, tb = (flags & 2) != 0, accumulate = (flags & 4) != 0;
        if (std::is_same_v<C, bf16> && accumulate) continue;
        const std::int64_t lda = (ta ? m : d) + 2, ldb = (tb ? d : n) + 1, ldc = n + 3;
        const std::int64_t to_a = (ta ? d : m) * lda + 4, to_b = flags == 3 ? 0 : 2, to_c = m * ldc + 1;
        const auto a = random_array<T>(products * to_a, rng);
        const auto b = random_array<T>(n * ldb + d * ldb + products * to_b, rng);
        const auto c = random_array<C>(products * to_c, rng);
        Values want = numbers(c);
        for (std::int64_t p = 0; p < products; ++p)
          for (std::int64_t i = 0; i < m; ++i)
            for (std::int64_t j = 0; j < n; ++j) {
              double& sum = want[at(p * to_c + i * ldc + j)];
              if (!accumulate) sum = 0;
              for (std::int64_t s = 0; s < d; ++s)
                sum += number(a[at(p * to_a + (ta ? s * lda + i : i * lda + s))]) *
                       number(b[at(p * to_b + (tb ? j * ldb + s : s * ldb + j))]);
            }
        for (const int threads : {1, 3}) {
          auto out = c;
          fx.exec.threads = threads;
          k::gemm_batch(fx.exec, ta, tb, m, n, d, a.data(), lda, to_a, b.data(), ldb, to_b, out.data(), ldc, to_c,
                        products, accumulate);
          CAPTURE(products, d, flags, threads);
          CHECK(close(out, want, 10));
        }
      }
    }
  };
  check(float(), float());
  check(double(), double());
  check(bf16(), float());
  check(bf16(), bf16());
}

TEST_CASE("kernels: strided copies and permutes move every element") {
  Fixture fx;
  std::mt19937 rng(2);
  for (const std::size_t size : {std::size_t{1}, std::size_t{2}, std::size_t{4}, std::size_t{8}, std::size_t{12}}) {
    for (int round = 0; round < 80; ++round) {
      const Shape shape = random_shape(rng, 4);
      std::vector<int> perm(shape.size());
      std::iota(perm.begin(), perm.end(), 0);
      std::shuffle(perm.begin(), perm.end(), rng);
      const auto in = random_array<u8>(count(shape) * static_cast<std::int64_t>(size), rng);
      std::vector<u8> out(in.size(), 99);
      k::permute(fx.exec, size, in.data(), shape, perm, out.data());
      Shape out_shape;
      for (const int d : perm) out_shape.push_back(shape[at(d)]);
      bool same = true;
      for (const Shape& to : indices(out_shape)) {
        Shape from(shape.size());
        for (std::size_t d = 0; d < perm.size(); ++d) from[at(perm[d])] = to[d];
        same = same && std::memcmp(out.data() + at(linear(to, out_shape)) * size,
                                   in.data() + at(linear(from, shape)) * size, size) == 0;
      }
      CHECK(same);
    }
  }
  // A broadcast input, and a block of a larger output whose other elements stay.
  const std::vector<float> row{1, 2, 3};
  std::vector<float> out(20, -1);
  k::copy_strided(fx.exec, 4, Shape{2, 3}, row.data(), Shape{0, 1}, out.data() + 6, Shape{5, 1});
  CHECK(out == std::vector<float>{-1, -1, -1, -1, -1, -1, 1, 2, 3, -1, -1, 1, 2, 3, -1, -1, -1, -1, -1, -1});
}

TEST_CASE("kernels: elementwise loops broadcast, write several outputs and work in place") {
  Fixture fx;
  std::mt19937 rng(3);
  for_types<f32, f64, i32, u32>([&]<class T>(T) {
    for (int round = 0; round < 150; ++round) {
      const Shape shape = random_shape(rng, 4);
      const auto dense = k::row_major(shape);
      // The second input lacks a random set of dims; the second output is laid out in reverse order.
      Shape small = shape;
      Shape reversed(shape.rbegin(), shape.rend());
      for (auto& e : small) {
        if (rng() % 2 == 0) e = 1;
      }
      k::DimVector small_strides = k::row_major(small);
      k::DimVector reversed_strides = k::row_major(reversed);
      std::reverse(reversed_strides.values.begin(), reversed_strides.values.begin() + reversed_strides.count);
      for (int d = 0; d < small_strides.count; ++d) {
        if (small[at(d)] == 1) small_strides.at(d) = 0;
      }
      auto a = random_array<T>(count(shape), rng);
      const auto b = random_array<T>(count(small), rng);
      std::vector<T> second(a.size());
      const std::vector<T> before = a;
      k::apply(
          fx.exec, shape,
          [](T& x, const T& y, T& z) {
            z = x - y;
            x = x + y;
          },
          k::Operand<T>(a.data(), dense), k::Operand<const T>(b.data(), small_strides),
          k::Operand<T>(second.data(), reversed_strides));
      bool same = true;
      for (const Shape& i : indices(shape)) {
        Shape j = i;
        for (std::size_t d = 0; d < j.size(); ++d) j[d] = small[d] == 1 ? 0 : j[d];
        const T x = before[at(linear(i, shape))];
        const T y = b[at(linear(j, small))];
        same = same && a[at(linear(i, shape))] == x + y &&
               second[at(linear(Shape(i.rbegin(), i.rend()), reversed))] == x - y;
      }
      CHECK(same);
    }
  });
  std::vector<bf16> x{bf16(1.5F), bf16(-2.0F)};
  std::vector<f32> y(2);
  k::apply_flat(
      fx.exec, 2, [](const bf16& in, f32& out) { out = 2 * float(in); }, static_cast<const bf16*>(x.data()), y.data());
  CHECK(y == std::vector<f32>{3, -4});
}

TEST_CASE("kernels: sums, maxima and minima over any dims") {
  Fixture fx;
  std::mt19937 rng(4);
  for_types<f32, bf16, f64, i32, u32>([&]<class T>(T) {
    for (int round = 0; round < 150; ++round) {
      const Shape shape = random_shape(rng, 4);
      const auto summed = std::make_unique<bool[]>(shape.size() + 1);
      Shape kept;
      for (std::size_t d = 0; d < shape.size(); ++d) {
        summed[d] = rng() % 2 == 0;
        if (!summed[d]) kept.push_back(shape[d]);
      }
      const auto in = random_array<T>(count(shape), rng);
      Values sums(at(count(kept)));
      constexpr bool infinite = std::is_floating_point_v<accumulator_t<T>>;
      const double lowest = infinite ? -std::numeric_limits<double>::infinity()
                                     : static_cast<double>(std::numeric_limits<accumulator_t<T>>::lowest());
      const double greatest = infinite ? -lowest : static_cast<double>(std::numeric_limits<accumulator_t<T>>::max());
      Values tops(sums.size(), lowest), bottoms(sums.size(), greatest);
      for (const Shape& i : indices(shape)) {
        Shape o;
        for (std::size_t d = 0; d < i.size(); ++d) {
          if (!summed[d]) o.push_back(i[d]);
        }
        const double x = number(in[at(linear(i, shape))]);
        sums[at(linear(o, kept))] += x;
        tops[at(linear(o, kept))] = std::max(tops[at(linear(o, kept))], x);
        bottoms[at(linear(o, kept))] = std::min(bottoms[at(linear(o, kept))], x);
      }
      std::vector<T> out(sums.size());
      const std::span<const bool> mask(summed.get(), shape.size());
      k::reduce<SumOp>(fx.exec, dtype_v<T>, in.data(), shape, mask, out.data());
      CHECK(close(out, sums));
      k::reduce<MaxOp>(fx.exec, dtype_v<T>, in.data(), shape, mask, out.data());
      CHECK(close(out, tops, 0));
      k::reduce<MinOp>(fx.exec, dtype_v<T>, in.data(), shape, mask, out.data());
      CHECK(close(out, bottoms, 0));
    }
  });
  const bool all[] = {true, true};
  const bool first[] = {true, false};
  const bool last[] = {false, true};
  float out[700];
  SECTION("a long f32 sum keeps its digits") {  // one running f32 sum would stop at 2^24
    const std::vector<float> ones(40'000'000, 1.0F);
    k::reduce<SumOp>(fx.exec, DType::f32, ones.data(), Shape{40'000, 1'000}, all, out);
    CHECK(out[0] == 4e7F);
    k::reduce<SumOp>(fx.exec, DType::f32, ones.data(), Shape{20'000'000, 2}, first, out);
    CHECK(out[0] == 2e7F);
    CHECK(out[1] == 2e7F);
  }
  SECTION("large arrays, in pieces") {
    const std::int64_t rows = 1501;
    const std::int64_t columns = 700;
    const auto x = random_array<float>(rows * columns, rng);
    Values want(at(columns));
    Values across(at(rows));
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      want[at(i % columns)] += double(x[at(i)]);
      across[at(i / columns)] += double(x[at(i)]);
    }
    k::reduce<SumOp>(fx.exec, DType::f32, x.data(), Shape{rows, columns}, first, out);
    CHECK(close(std::vector<float>(out, out + columns), want, 10));
    std::vector<float> sums(at(rows));
    k::reduce<SumOp>(fx.exec, DType::f32, x.data(), Shape{rows, columns}, last, sums.data());
    CHECK(close(sums, across, 10));
  }
  SECTION("a NaN wins the maximum, wherever it stands") {
    for (std::size_t i = 0; i < 130; ++i) {
      std::vector<float> x(130, 1.0F);
      x[i] = std::numeric_limits<float>::quiet_NaN();
      k::reduce<MaxOp>(fx.exec, DType::f32, x.data(), Shape{130, 1}, all, out);
      CHECK(std::isnan(out[0]));
    }
  }
  SECTION("the cotangent of an extremum goes to the first of equals, and to a NaN") {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const float x[] = {1, 3, nan, 3, 0, 2, 3, nan}, ct[] = {5, 7, 9, 11};
    const auto check = [&](const Shape& shape, const bool* mask, const std::vector<float>& want) {
      k::reduce<MaxOp>(fx.exec, DType::f32, x, shape, {mask, shape.size()}, out);
      std::vector<float> dx(8, -1);
      k::extremum_backward(fx.exec, DType::f32, x, shape, {mask, shape.size()}, out, ct, dx.data());
      CHECK(dx == want);
    };
    check({2, 4}, last, {0, 0, 5, 0, 0, 0, 0, 7});
    check({2, 4}, first, {5, 7, 9, 0, 0, 0, 0, 11});
    check({4, 2}, first, {0, 0, 5, 0, 0, 0, 0, 7});
    check({2, 4}, all, {0, 0, 5, 0, 0, 0, 0, 0});
    const std::vector<std::int64_t> part{2, 2};  // without the NaNs
    k::reduce<MaxOp>(fx.exec, DType::f32, x, Shape{2, 4}, all, out, part);
    float dx[8] = {};
    k::extremum_backward(fx.exec, DType::f32, x, Shape{2, 4}, all, out, ct, dx, part);
    CHECK(std::vector<float>(dx, dx + 8) == std::vector<float>{0, 5, 0, 0, 0, 0, 0, 0});
  }
  SECTION("masks are not summed") {
    const u8 byte = 1;
    CHECK_THROWS_WITH(k::reduce<SumOp>(fx.exec, DType::u8, &byte, Shape{}, {}, out),
                      "sum: no reduction of u8; cast to i32 first");
  }
}

TEST_CASE("kernels: argmax takes the first of equals, and a NaN") {
  Fixture fx;
  std::mt19937 rng(5);
  for_types<f32, bf16, f64, i32, u32, u8, bool_>([&]<class T>(T) {
    for (const auto& [outer, n, inner] : std::vector<std::array<std::int64_t, 3>>{{3, 40, 1}, {2, 7, 5}, {1, 1, 1}}) {
      auto in = random_array<T>(outer * n * inner, rng);
      for (T& x : in) x = element<T>(std::abs(std::round(number(x) * 2)));  // many equal ones
      std::vector<i32> out(at(outer * inner));
      k::argmax(fx.exec, dtype_v<T>, in.data(), {outer, n, inner}, out.data());
      for (std::int64_t o = 0; o < outer * inner; ++o) {
        const auto x = [&](std::int64_t i) { return number(in[at(o / inner * n * inner + i * inner + o % inner)]); };
        std::int64_t best = 0;
        for (std::int64_t i = 0; i < n; ++i) best = x(i) > x(best) ? i : best;
        CHECK(out[at(o)] == best);
      }
    }
  });
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float x[] = {1, nan, 3, nan};
  i32 out = 0;
  k::argmax(fx.exec, DType::f32, x, {1, 4, 1}, &out);
  CHECK(out == 1);
}

namespace {

/// Applies `row` (n values of each input to n of the result) to every row of (outer, n, inner) arrays.
template <class F>
Values by_rows(const std::vector<Values>& in, std::int64_t outer, std::int64_t n, std::int64_t inner, const F& row) {
  Values out(at(outer * n * inner));
  for (std::int64_t o = 0; o < outer; ++o) {
    for (std::int64_t c = 0; c < inner; ++c) {
      std::vector<Values> rows(in.size(), Values(at(n)));
      for (std::size_t p = 0; p < in.size(); ++p) {
        for (std::int64_t i = 0; i < n; ++i) rows[p][at(i)] = in[p][at((o * n + i) * inner + c)];
      }
      const Values result = row(rows);
      for (std::int64_t i = 0; i < n; ++i) out[at((o * n + i) * inner + c)] = result[at(i)];
    }
  }
  return out;
}

Values softmax_row(const Values& x) {
  double sum = 0;
  for (const double v : x) sum += std::exp(v);
  Values y;
  for (const double v : x) y.push_back(std::exp(v) / sum);
  return y;
}

Values norm_row(const Values& x, bool centered, double eps) {
  const auto n = static_cast<double>(x.size());
  const double mean = centered ? std::accumulate(x.begin(), x.end(), 0.0) / n : 0;
  double square = 0;
  for (const double v : x) square += (v - mean) * (v - mean) / n;
  Values y;
  for (const double v : x) y.push_back((v - mean) / std::sqrt(square + eps));
  return y;
}

/// The cotangent of f at x by central differences: independent of any formula.
template <class F>
Values pull_back(const F& f, const Values& x, const Values& dy) {
  Values dx;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double h = 1e-5;
    Values up = x;
    Values down = x;
    up[i] += h;
    down[i] -= h;
    const Values fu = f(up);
    const Values fd = f(down);
    double sum = 0;
    for (std::size_t j = 0; j < dy.size(); ++j) sum += dy[j] * (fu[j] - fd[j]) / (2 * h);
    dx.push_back(sum);
  }
  return dx;
}

}  // namespace

TEST_CASE("kernels: softmax and norms, forward and backward") {
  Fixture fx;
  std::mt19937 rng(6);
  const double eps = 1e-3;
  for_types<f32, f64, bf16>([&]<class T>(T) {
    for (const auto& [outer, n, inner] : std::vector<std::array<std::int64_t, 3>>{
             {3, 5, 1}, {2, 70, 1}, {2, 3, 4}, {1, 9, 35}, {4, 1, 1}, {0, 3, 2}, {2, 0, 3}, {300, 20, 1}}) {
      CAPTURE(outer, n, inner, name(dtype_v<T>));
      const std::int64_t total = outer * n * inner;
      // Squared norms amplify rounding, and central differences have an error of their own.
      const double scale = std::is_same_v<T, f64> ? 1e5 : 10;
      const auto x = random_array<T>(total, rng);
      const auto dy = random_array<T>(total, rng);
      std::vector<T> y(x.size());
      std::vector<T> dx(x.size());
      k::softmax(fx.exec, x.data(), y.data(), {outer, n, inner});
      CHECK(close(y, by_rows({numbers(x)}, outer, n, inner, [](const auto& r) { return softmax_row(r[0]); })));
      k::softmax_backward(fx.exec, y.data(), dy.data(), dx.data(), {outer, n, inner});
      CHECK(close(dx,
                  by_rows({numbers(x), numbers(dy)}, outer, n, inner,
                          [](const auto& r) { return pull_back(softmax_row, r[0], r[1]); }),
                  scale));
      const auto check = [&]<bool Centered>(std::bool_constant<Centered>) {
        const auto f = [&](const Values& r) { return norm_row(r, Centered, eps); };
        auto inplace = x;
        auto cotangent = dy;
        k::normalize<Centered>(fx.exec, x.data(), y.data(), {outer, n, inner}, eps);
        k::normalize<Centered>(fx.exec, inplace.data(), inplace.data(), {outer, n, inner}, eps);
        k::normalize_backward<Centered>(fx.exec, x.data(), cotangent.data(), cotangent.data(), {outer, n, inner}, eps);
        CHECK(close(y, by_rows({numbers(x)}, outer, n, inner, [&](const auto& r) { return f(r[0]); }), 3));
        CHECK(numbers(inplace) == numbers(y));
        CHECK(close(cotangent,
                    by_rows({numbers(x), numbers(dy)}, outer, n, inner,
                            [&](const auto& r) { return pull_back(f, r[0], r[1]); }),
                    3 * scale));
      };
      check(std::false_type());
      check(std::true_type());
    }
  });
  // Masked positions vanish exactly; large values do not overflow.
  const float inf = std::numeric_limits<float>::infinity();
  const float x[] = {1000, -inf, 1000, 999};
  float y[4];
  k::softmax(fx.exec, x, y, {1, 4, 1});
  CHECK(y[1] == 0.0F);
  CHECK(y[0] == Approx(1 / (2 + std::exp(-1.0))));
}

namespace {

struct Product {
  std::vector<int> lhs, rhs, out;
};

/// The result by its definition: a loop over all values of all ids. Also the sums of magnitudes, for tolerances.
template <class T>
std::pair<Values, double> naive_einsum(const Product& p, const std::map<int, std::int64_t>& sizes,
                                       const std::vector<T>& lhs, const std::vector<T>& rhs) {
  std::vector<int> ids;
  Shape shape;
  for (const auto& [id, extent] : sizes) {
    ids.push_back(id);
    shape.push_back(extent);
  }
  // Per tensor, the stride of every id.
  const auto strides = [&](const std::vector<int>& tensor) {
    Shape s(ids.size());
    std::int64_t stride = 1;
    for (std::size_t d = tensor.size(); d-- > 0;) {
      s[at(std::find(ids.begin(), ids.end(), tensor[d]) - ids.begin())] = stride;
      stride *= sizes.at(tensor[d]);
    }
    return std::pair(s, stride);
  };
  const Shape sl = strides(p.lhs).first;
  const Shape sr = strides(p.rhs).first;
  const auto [so, outs] = strides(p.out);
  Values result(at(outs));
  Values magnitude(at(outs));
  Shape index(ids.size());
  for (std::int64_t l = 0; l < count(shape); ++l) {
    std::int64_t a = 0;
    std::int64_t b = 0;
    std::int64_t o = 0;
    for (std::size_t d = 0; d < ids.size(); ++d) {
      a += index[d] * sl[d];
      b += index[d] * sr[d];
      o += index[d] * so[d];
    }
    const double term = number(lhs[at(a)]) * number(rhs[at(b)]);
    result[at(o)] += term;
    magnitude[at(o)] += std::abs(term);
    for (std::size_t d = ids.size(); d-- > 0;) {
      if (++index[d] < shape[d]) break;
      index[d] = 0;
    }
  }
  double most = 1;
  for (const double m : magnitude) most = std::max(most, m);
  return {result, most};
}

Shape shape_of(const std::vector<int>& ids, const std::map<int, std::int64_t>& sizes) {
  Shape e;
  for (const int id : ids) e.push_back(sizes.at(id));
  return e;
}

/// Runs one einsum against the naive one, and once more to add to its result. Every loop over ids includes those that
/// the sizes map names.
template <class T, class Out = T>
bool check_einsum(const Fixture& fx, const Product& p, std::map<int, std::int64_t> sizes, std::mt19937& rng) {
  std::erase_if(sizes, [&](const auto& s) {
    return std::find(p.lhs.begin(), p.lhs.end(), s.first) == p.lhs.end() &&
           std::find(p.rhs.begin(), p.rhs.end(), s.first) == p.rhs.end();
  });
  const Shape le = shape_of(p.lhs, sizes);
  const Shape re = shape_of(p.rhs, sizes);
  const auto lhs = random_array<T>(count(le), rng);
  const auto rhs = random_array<T>(count(re), rng);
  std::vector<Out> out(at(count(shape_of(p.out, sizes))), element<Out>(77));
  const auto plan = k::plan_einsum(p.lhs, p.rhs, p.out);
  k::einsum(fx.exec, plan, dtype_v<T>, dtype_v<Out>, lhs.data(), le, rhs.data(), re, out.data());
  auto [want, scale] = naive_einsum(p, sizes, lhs, rhs);
  if constexpr (std::is_same_v<Out, accumulator_t<T>> && !std::is_integral_v<Out>) {
    if (!close(out, want, scale)) return false;
    k::einsum(fx.exec, plan, dtype_v<T>, dtype_v<Out>, lhs.data(), le, rhs.data(), re, out.data(), true);
    for (double& number : want) number *= 2;
  }
  return close(out, want, scale);
}

/// Every result: permutations of every subset of the ids.
void results(const std::vector<int>& ids, std::vector<int>& so_far, std::vector<std::vector<int>>& all) {
  all.push_back(so_far);
  for (const int id : ids) {
    if (std::find(so_far.begin(), so_far.end(), id) != so_far.end()) continue;
    so_far.push_back(id);
    results(ids, so_far, all);
    so_far.pop_back();
  }
}

/// Every pattern of two operands of at most `rank` dims and their results, up to renaming of ids.
std::vector<Product> patterns(std::size_t rank) {
  std::vector<Product> all;
  for (std::size_t l = 0; l <= rank; ++l) {
    std::vector<int> lhs(l);
    std::iota(lhs.begin(), lhs.end(), 0);
    std::vector<std::vector<int>> rights{{}};
    for (std::size_t done = 0; done < rights.size(); ++done) {
      const std::vector<int> right = rights[done];
      if (right.size() == rank) continue;
      int fresh = static_cast<int>(l);
      for (const int id : right) fresh = std::max(fresh, id + 1);
      for (int id = 0; id <= fresh; ++id) {
        const bool known = id < static_cast<int>(l) || id == fresh;
        if (!known || std::find(right.begin(), right.end(), id) != right.end()) continue;
        rights.push_back(right);
        rights.back().push_back(id);
      }
    }
    for (const auto& right : rights) {
      std::vector<int> ids = lhs;
      for (const int id : right) {
        if (id >= static_cast<int>(l)) ids.push_back(id);
      }
      std::vector<std::vector<int>> outs;
      std::vector<int> none;
      results(ids, none, outs);
      for (const auto& out : outs) all.push_back({lhs, right, out});
    }
  }
  return all;
}

/// The product of a spec with one letter per dim, "blm,mn->bln".
Product parse(const std::string& spec) {
  Product p;
  std::vector<int>* parts[] = {&p.lhs, &p.rhs, &p.out};
  std::size_t part = 0;
  for (const char c : spec) {
    if (c == ',' || c == '>') ++part;
    if (c >= 'a' && c <= 'z') parts[part]->push_back(c);
  }
  return p;
}

k::EinsumLoops loops_of(const Product& p, const std::map<int, std::int64_t>& sizes) {
  const auto plan = k::plan_einsum(p.lhs, p.rhs, p.out);
  Shape shape;
  for (int i = 0; i < plan.count; ++i) {
    const auto& index = plan.at(i);
    shape.push_back(sizes.at(index.lhs >= 0 ? p.lhs[at(index.lhs)] : p.rhs[at(index.rhs)]));
  }
  return k::choose_einsum_loops(plan, shape, true);
}

}  // namespace

TEST_CASE("kernels: einsum of every pattern of up to three dims") {
  Fixture fx;
  std::mt19937 rng(7);
  const auto all = patterns(3);
  REQUIRE(all.size() > 6000);
  std::size_t wrong = 0;
  for (const Product& p : all) {
    std::map<int, std::int64_t> sizes;
    for (int id = 0; id < 6; ++id) sizes[id] = 1 + static_cast<std::int64_t>(rng() % 4);
    wrong += check_einsum<float>(fx, p, sizes, rng) ? 0U : 1U;
  }
  CHECK(wrong == 0);
}

TEST_CASE("kernels: einsum of larger sizes takes every kind of inner kernel and permute") {
  Fixture fx;
  std::mt19937 rng(8);
  auto all = patterns(3);
  std::shuffle(all.begin(), all.end(), rng);
  std::map<k::EinsumLoops::Inner, int> inner;
  std::array<int, 3> moved{};
  int trailing = 0;
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < 500; ++i) {
    std::map<int, std::int64_t> sizes;
    std::vector<int> ids = all[i].lhs;
    ids.insert(ids.end(), all[i].rhs.begin(), all[i].rhs.end());
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    const std::int64_t most = ids.size() > 5 ? 8 : ids.size() > 4 ? 13 : ids.size() > 3 ? 24 : 70;
    for (int id = 0; id < 6; ++id) sizes[id] = most - static_cast<std::int64_t>(rng() % 5);
    wrong += check_einsum<float>(fx, all[i], sizes, rng) ? 0U : 1U;
    if (i < 100) wrong += check_einsum<double>(fx, all[i], sizes, rng) ? 0U : 1U;
    if (i < 100) wrong += check_einsum<bf16>(fx, all[i], sizes, rng) ? 0U : 1U;
    if (i < 100) wrong += check_einsum<bf16, f32>(fx, all[i], sizes, rng) ? 0U : 1U;
    const auto s = loops_of(all[i], sizes);
    ++inner[s.inner];
    for (std::size_t t = 0; t < 3; ++t) moved[t] += s.moved[t] ? 1 : 0;
    trailing += s.inner == k::EinsumLoops::Inner::gemm && s.summed.depth > 0 ? 1 : 0;
  }
  CHECK(wrong == 0);
  using Inner = k::EinsumLoops::Inner;
  for (const Inner kind : {Inner::gemm, Inner::dot, Inner::scale}) CHECK(inner[kind] > 0);
  for (const int times : moved) CHECK(times > 0);
  CHECK(trailing > 0);  // an accumulating loop around matrix products
}

TEST_CASE("kernels: a large einsum of bf16 holds no copies of whole operands in f32") {
  std::mt19937 rng(5);
  // The logits of a vocabulary, and the cotangents of their two operands.
  const std::map<int, std::int64_t> sizes{{0, 2}, {1, 64}, {2, 100000}};
  for (const Product& p : {Product{{0, 1}, {2, 1}, {0, 2}}, Product{{0, 2}, {2, 1}, {0, 1}},
                           Product{{0, 2}, {0, 1}, {2, 1}}, Product{{2, 1}, {0, 1}, {2, 0}}}) {
    Fixture fx;
    CHECK(check_einsum<bf16>(fx, p, sizes, rng));
    const std::size_t peak = fx.pool->stats().peak, most = std::size_t{k::detail::copied_piece} * sizeof(f32);
    CHECK(peak <= 2 * most);  // the table has three times as much
    Fixture dry;
    dry.exec.dry = true;
    const Shape lhs = shape_of(p.lhs, sizes), rhs = shape_of(p.rhs, sizes);
    const std::vector<bf16> x(at(count(lhs))), y(at(count(rhs)));
    std::vector<bf16> out(at(count(shape_of(p.out, sizes))));
    k::einsum(dry.exec, k::plan_einsum(p.lhs, p.rhs, p.out), DType::bf16, DType::bf16, x.data(), lhs, y.data(), rhs,
              out.data());
    CHECK(dry.pool->stats().peak == peak);
  }
}

TEST_CASE("kernels: einsum in every type, and with empty sizes") {
  Fixture fx;
  std::mt19937 rng(9);
  const auto all = patterns(2);
  for (const Product& p : all) {
    for (const std::int64_t size : {0, 1, 5}) {
      std::map<int, std::int64_t> sizes;
      for (int id = 0; id < 4; ++id) sizes[id] = id == 1 ? size : 6;
      CHECK(check_einsum<bf16>(fx, p, sizes, rng));
      CHECK(check_einsum<bf16, f32>(fx, p, sizes, rng));
      CHECK(check_einsum<f32, bf16>(fx, p, sizes, rng));
      CHECK(check_einsum<i32>(fx, p, sizes, rng));
      CHECK(check_einsum<u32>(fx, p, sizes, rng));
      CHECK(check_einsum<f64>(fx, p, sizes, rng));
    }
  }
  // bf16 is rounded once: 256 + 1 + 1 is lost if partial sums were bf16.
  const std::vector<bf16> x{bf16(256.0F), bf16(1.0F), bf16(1.0F)};
  const std::vector<bf16> one(3, bf16(1.0F));
  bf16 sum;
  const auto plan = k::plan_einsum(std::vector{0}, std::vector{0}, std::vector<int>{});
  k::einsum(fx.exec, plan, DType::bf16, DType::bf16, x.data(), Shape{3}, one.data(), Shape{3}, &sum);
  CHECK(float(sum) == 258.0F);
  CHECK_THROWS_WITH(k::einsum(fx.exec, plan, DType::f32, DType::f64, x.data(), Shape{1}, one.data(), Shape{1}, &sum),
                    "einsum: no product of f32 with result f64; cast the operands to the result's type first");
  CHECK_THROWS_AS(k::einsum(fx.exec, plan, DType::f32, DType::f32, x.data(), Shape{1}, one.data(), Shape{2}, &sum),
                  Error);
  CHECK_THROWS_AS(k::plan_einsum(std::vector{0}, std::vector{0}, std::vector{3}), Error);
}

TEST_CASE("kernels: one-operand einsum sums away and permutes") {
  Fixture fx;
  std::mt19937 rng(10);
  std::vector<std::vector<int>> outs;
  std::vector<int> none;
  results({0, 1, 2, 3}, none, outs);
  const std::map<int, std::int64_t> sizes{{0, 3}, {1, 4}, {2, 1}, {3, 5}};
  const std::vector<int> ids{0, 1, 2, 3};
  const Shape shape = shape_of(ids, sizes);
  for (const auto& out : outs) {
    const auto check = [&]<class T, class Out>(T, Out) {
      const auto in = random_array<T>(count(shape), rng);
      std::vector<Out> got(at(count(shape_of(out, sizes))));
      k::einsum1(fx.exec, dtype_v<T>, dtype_v<Out>, ids, shape, out, in.data(), got.data());
      const auto [want, scale] = naive_einsum({ids, {}, out}, sizes, in, std::vector<T>{element<T>(1)});
      CHECK(close(got, want, scale));
    };
    check(f32{}, f32{});
    check(bf16{}, bf16{});
    check(bf16{}, f32{});
    check(f32{}, bf16{});
    check(f64{}, f64{});
    check(i32{}, i32{});
  }
}

// Plans and loop nests are constants where the sizes are.
constexpr bool constant_loops() {
  constexpr int lhs[] = {0, 1, 2};
  constexpr int rhs[] = {2, 3};
  constexpr int out[] = {0, 1, 3};
  constexpr auto plan = k::plan_einsum(lhs, rhs, out);
  const std::int64_t shape[] = {4, 64, 768, 3072};
  const auto s = k::choose_einsum_loops(plan, shape, true);
  return !s.permutes() && s.row.extent == 256 && s.column.extent == 3072 && s.depth.extent == 768;
}
static_assert(constant_loops());

TEST_CASE("kernels: the products of a transformer need no permute and one large matrix product") {
  const std::map<int, std::int64_t> sizes{{'b', 4},  {'l', 128}, {'m', 768}, {'n', 1024}, {'q', 3},
                                          {'k', 12}, {'d', 64},  {'s', 128}, {'v', 5000}};
  const auto loops = [&](const char* spec) { return loops_of(parse(spec), sizes); };
  for (const char* spec : {"blm,mn->bln", "bln,mn->blm", "blm,bln->mn", "blm,mqkd->blqkd", "blqkd,mqkd->blm",
                           "blm,blqkd->mqkd", "blqkd,qkdm->blm", "blm,vm->blv", "blv,vm->blm", "blv,blm->vm"}) {
    const auto s = loops(spec);
    INFO(spec);
    CHECK_FALSE(s.permutes());
    CHECK(s.inner == k::EinsumLoops::Inner::gemm);
    CHECK(s.kept.depth + s.summed.depth == 0);
  }
  for (const char* spec : {"bkqld,bksd->bkqls", "bkqls,bksd->bkqld", "bkqls,bkqld->bksd", "bkqld,bkqls->bksd",
                           "blkqd,bskd->bklqs", "bklqs,bskd->blkqd"}) {
    const auto s = loops(spec);
    INFO(spec);
    CHECK_FALSE(s.permutes());
    CHECK(s.inner == k::EinsumLoops::Inner::gemm);
    CHECK(s.depth.extent >= 64);
  }
  // Vector and outer products, and products without a sum.
  using Inner = k::EinsumLoops::Inner;
  CHECK(loops("vm,m->v").inner == Inner::gemm);
  CHECK(loops("bln,n->bl").row.extent == 512);
  CHECK_FALSE(loops("l,m->lm").permutes());
  CHECK(loops("blm,m->blm").inner == Inner::scale);
  CHECK(loops("blm,blm->bl").inner == Inner::dot);
  // Here the heads, innermost in the result, would leave products of one column: permutes pay.
  CHECK(loops("blqkd,bskd->blsqk").permutes());
}

TEST_CASE("kernels: lookups in one shard of a table, and their transpose") {
  Fixture fx;
  std::mt19937 rng(11);
  const std::int64_t rows = 6;
  const std::int64_t global = 18;
  const std::int64_t first = 6;
  const auto check = [&]<class T, class I>(T, I, const Shape& shape, const std::vector<bool>& in_table,
                                           const std::vector<bool>& in_indices, std::size_t place) {
    // The table's dims: those of the result that it has, in order, with the looked-up dim before the place-th of them.
    Shape table_shape;
    Shape table_at(shape.size(), -1);
    Shape index_shape;
    std::size_t row_dim = 0;
    bool placed = false;
    for (std::size_t d = 0; d <= shape.size(); ++d) {
      if (!placed && (table_shape.size() == place || d == shape.size())) {
        row_dim = table_shape.size();
        table_shape.push_back(rows);
        placed = true;
      }
      if (d == shape.size()) break;
      if (in_table[d]) {
        table_at[d] = static_cast<std::int64_t>(table_shape.size());
        table_shape.push_back(shape[d]);
      }
      if (in_indices[d]) index_shape.push_back(shape[d]);
    }
    const k::DimVector table_strides = k::row_major(table_shape);
    const k::DimVector dense_index = k::row_major(index_shape);
    Shape strides(shape.size());
    Shape index_strides(shape.size());
    int next = 0;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      if (in_table[d]) strides[d] = table_strides[static_cast<int>(table_at[d])];
      if (in_indices[d]) index_strides[d] = dense_index[next++];
    }
    std::vector<I> ids(at(count(index_shape)));
    for (I& id : ids) id = static_cast<I>(rng() % global);
    const auto table = random_array<T>(count(table_shape), rng);
    const k::Lookup lookup{shape, strides, index_strides, dtype_v<I>, table_strides[static_cast<int>(row_dim)],
                           rows,  first,   global};
    const auto cotangent = random_array<T>(count(shape), rng);
    Values want(at(count(shape)));
    Values sums(table.size(), 1);
    for (const Shape& i : indices(shape)) {
      Shape j;
      Shape t(table_shape.size());
      for (std::size_t d = 0; d < i.size(); ++d) {
        if (in_indices[d]) j.push_back(i[d]);
        if (in_table[d]) t[at(table_at[d])] = i[d];
      }
      t[row_dim] = static_cast<std::int64_t>(ids[at(linear(j, index_shape))]) - first;
      if (t[row_dim] < 0 || t[row_dim] >= rows) continue;
      want[at(linear(i, shape))] = number(table[at(linear(t, table_shape))]);
      sums[at(linear(t, table_shape))] += number(cotangent[at(linear(i, shape))]);
    }
    std::vector<T> out(want.size(), element<T>(1));
    k::gather(fx.exec, dtype_v<T>, lookup, table.data(), ids.data(), out.data());
    CHECK(close(out, want, 0));
    if constexpr (floating<T>) {
      std::vector<T> got(table.size(), element<T>(1));
      k::scatter_add(fx.exec, dtype_v<T>, lookup, cotangent.data(), ids.data(), got.data());
      CHECK(close(got, sums, 4));
    }
  };
  for (const Shape& shape : {Shape{2, 3, 5}, Shape{4, 1, 70}, Shape{2, 0, 3}, Shape{7, 2, 1}}) {
    for (unsigned mask = 0; mask < 64; ++mask) {
      std::vector<bool> in_table;
      std::vector<bool> in_indices;
      for (unsigned d = 0; d < 3; ++d) {
        in_table.push_back((mask >> d & 1U) != 0);
        in_indices.push_back((mask >> (d + 3) & 1U) != 0);
      }
      for (std::size_t place = 0; place < 3; ++place) {
        check(f32{}, i32{}, shape, in_table, in_indices, place);
        check(f32{}, u32{}, shape, in_table, in_indices, place);
        check(bf16{}, i32{}, shape, in_table, in_indices, place);
        check(f64{}, i32{}, shape, in_table, in_indices, place);
        check(i32{}, i32{}, shape, in_table, in_indices, place);
        check(u8{}, u32{}, shape, in_table, in_indices, place);
      }
    }
  }
  const Shape one{1};
  const Shape zero{0};
  const k::Lookup lookup{one, zero, one, DType::i32, 1, rows, first, global, false, "V"};
  float x = 0;
  for (const i32 id : {18, -1}) {
    CHECK_THROWS_WITH(
        k::gather(fx.exec, DType::f32, lookup, &x, &id, &x),
        "gather: index " + std::to_string(id) + " is outside dim `V` of size 18; check the data against that size");
  }
}

TEST_CASE("kernels: Philox gives the published words") {
  using Words = std::array<std::uint32_t, 4>;
  CHECK(k::philox(0, 0, 0) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(k::philox(~0ULL, ~0ULL, ~0ULL) == Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(k::philox(0x299f31d0a4093822ULL, 0x85a308d3243f6a88ULL, 0x0370734413198a2eULL) ==
        Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
  CHECK(k::bits(0, 0, 2) == 0xbc57ac4cU);
}

TEST_CASE("kernels: random numbers depend on the global place alone and have the right distribution") {
  Fixture fx;
  const Shape global{6, 10, 7};
  const k::DimVector strides = k::row_major(global);
  std::vector<f32> whole(420);
  const auto fill = [&](int kind, auto* out, const Shape& shape, const Shape& offsets) {
    if (kind == 0) k::fill_random<k::body::Uniform>(fx.exec, out, shape, strides, offsets, 42, 7);
    if (kind == 1) k::fill_random<k::body::Normal>(fx.exec, out, shape, strides, offsets, 42, 7);
    if (kind == 2) k::fill_random<k::body::TruncatedNormal>(fx.exec, out, shape, strides, offsets, 42, 7);
  };
  for (const int kind : {0, 1, 2}) {
    fill(kind, whole.data(), global, {0, 0, 0});
    for (std::uint64_t i = 0; i < 420; ++i) {
      const float one = kind == 0   ? k::uniform(42, 7, i)
                        : kind == 1 ? k::body::Normal{}(k::bits(42, 7, i))
                                    : k::body::TruncatedNormal{}(k::bits(42, 7, i));
      CHECK(std::abs(whole[i] - one) <= 1e-6F);
    }
    for (const auto& [shape, offsets] : std::vector<std::pair<Shape, Shape>>{
             {{2, 10, 7}, {4, 0, 0}}, {{6, 5, 7}, {0, 5, 0}}, {{6, 10, 1}, {0, 0, 3}}, {{1, 2, 3}, {5, 3, 2}}}) {
      std::vector<f32> block(at(count(shape)));
      std::vector<bf16> half(block.size());
      fill(kind, block.data(), shape, offsets);
      fill(kind, half.data(), shape, offsets);
      bool same = true;
      for (const Shape& i : indices(shape)) {
        Shape j = i;
        for (std::size_t d = 0; d < 3; ++d) j[d] += offsets[d];
        const float want = whole[at(linear(j, global))];
        const auto l = at(linear(i, shape));
        // A uniform draw is rounded down: the nearest number could be 1.
        const float shorter = kind != 0 ? want : std::bit_cast<float>(std::bit_cast<std::uint32_t>(want) & 0xFFFF0000U);
        same = same && block[l] == want && half[l] == bf16(shorter);
      }
      CHECK(same);
    }
  }
  const std::int64_t n = 1'000'000;
  std::vector<double> x(at(n));
  const auto moments = [&] {
    double mean = 0;
    double square = 0;
    double fourth = 0;
    for (const double v : x) {
      mean += v / double(n);
      square += v * v / double(n);
      fourth += v * v * v * v / double(n);
    }
    return std::array{mean, square, fourth};
  };
  const Shape flat{n};
  const Shape unit{1};
  const Shape zero{0};
  k::fill_random<k::body::Uniform>(fx.exec, x.data(), flat, unit, zero, 1, 2);
  CHECK(*std::min_element(x.begin(), x.end()) >= 0);
  CHECK(*std::max_element(x.begin(), x.end()) < 1);
  CHECK(moments()[0] == Approx(0.5).margin(2e-3));
  CHECK(moments()[1] == Approx(1.0 / 3).margin(2e-3));
  k::fill_random<k::body::Normal>(fx.exec, x.data(), flat, unit, zero, 1, 2);
  CHECK(moments()[0] == Approx(0).margin(5e-3));
  CHECK(moments()[1] == Approx(1).margin(7e-3));
  CHECK(moments()[2] == Approx(3).margin(0.05));
  std::vector<double> sorted = x;
  std::sort(sorted.begin(), sorted.end());
  for (const double z : {-3.0, -1.0, 0.0, 0.5, 2.0}) {
    const double below = double(std::lower_bound(sorted.begin(), sorted.end(), z) - sorted.begin()) / double(n);
    CHECK(below == Approx(0.5 * std::erfc(-z / std::sqrt(2.0))).margin(2e-3));
  }
  k::fill_random<k::body::TruncatedNormal>(fx.exec, x.data(), flat, unit, zero, 1, 2);
  CHECK(*std::max_element(x.begin(), x.end()) <= 2);
  CHECK(*std::min_element(x.begin(), x.end()) >= -2);
  CHECK(*std::max_element(x.begin(), x.end()) > 1.999);
  CHECK(moments()[1] == Approx(0.8796 * 0.8796).margin(3e-3));
  // The inverse of the normal distribution, over all magnitudes of its tail.
  double worst = 0;
  for (double p = 0.5; p > 1.2e-10; p *= 0.97) {
    const double z = k::detail::normal_tail(static_cast<float>(p));
    const double density = std::exp(-z * z / 2) / std::sqrt(2 * std::acos(-1.0));
    const double error = (0.5 * std::erfc(z / std::sqrt(2.0)) - double(static_cast<float>(p))) / density;
    worst = std::max(worst, std::abs(error) / std::max(1.0, z));
  }
  CHECK(worst < 3e-6);
}

TEST_CASE("kernels: what is loaded ahead has the elements of a plain loop, at any size and on any number of threads") {
  std::mt19937 rng(7);
  const auto all = random_array<float>(3 * 65536 + 6, rng);
  const auto step = [](float& w, float& m, const float& g) {
    m = 0.5F * m + g;
    w -= 0.1F * m;
  };
  for (const std::int64_t n :
       {0, 1, 63, 65, 127, 128, 129, 2047, 2049, 16383, 16384, 16385, 65535, 65537, 3 * 65536 + 5}) {
    INFO(n);
    const float* const g = all.data() + 1;  // as a row of a matrix may begin
    std::vector<float> weights(at(n), 1), means(at(n), 2);
    double squares = 0;
    k::apply_flat(Fixture().exec, n, step, weights.data(), means.data(), g);
    for (std::int64_t i = 0; i < n; ++i) squares += static_cast<double>(g[i]) * static_cast<double>(g[i]);
    std::vector<float> sums;
    for (const int threads : {1, 2, 3}) {
      Fixture fx;
      fx.exec.threads = threads;
      std::vector<float> w(at(n), 1), m(at(n), 2);
      k::apply_nontemporal(fx.exec, n, step, w.data(), m.data(), g);
      CHECK(w == weights);
      CHECK(m == means);
      k::sum_of_squares(fx.exec, n, g, &sums.emplace_back());
      CHECK(sums.back() == sums.front());
      CHECK(sums.back() == Approx(squares).epsilon(1e-6));
    }
  }
  Fixture dry;
  dry.exec.dry = true;
  k::apply_nontemporal(dry.exec, 1 << 20, step, static_cast<float*>(nullptr), static_cast<float*>(nullptr),
                       static_cast<const float*>(nullptr));
  k::sum_of_squares(dry.exec, 1 << 20, static_cast<const float*>(nullptr), static_cast<float*>(nullptr));
}

TEST_CASE("kernels: several threads at once, and any thread count, give the same bits") {
  const std::int64_t b = 3;
  const std::int64_t l = 65;
  const std::int64_t m = 96;
  std::mt19937 rng(12);
  const auto x = random_array<float>(b * l * m, rng);
  const auto w = random_array<float>(m * m, rng);
  std::vector<i32> ids(at(b * l));
  for (i32& id : ids) id = static_cast<i32>(rng() % 50);
  const auto work = [&](int threads) {
    Fixture fx;
    fx.exec.threads = threads;
    std::vector<float> y(x.size());
    std::vector<float> z(x.size() + 50 * at(m) + at(m) + at(b * l * l));
    float* out = z.data();
    const Shape xe{b, l, m};
    const auto product = k::plan_einsum(std::vector{0, 1, 2}, std::vector{2, 3}, std::vector{0, 1, 3});
    k::einsum(fx.exec, product, DType::f32, DType::f32, x.data(), xe, w.data(), Shape{m, m}, y.data());
    k::softmax(fx.exec, y.data(), out, {b * l, m});
    const Shape strides{0, 1};
    const Shape index_strides{1, 0};
    const Shape result{b * l, m};
    const k::Lookup lookup{result, strides, index_strides, DType::i32, m, 50, 0, 50};
    k::scatter_add(fx.exec, DType::f32, lookup, out, ids.data(), out + x.size());
    const bool summed[] = {true, true, false};
    k::reduce<SumOp>(fx.exec, DType::f32, out, xe, summed, out + x.size() + 50 * at(m));
    const auto scores = k::plan_einsum(std::vector{0, 1, 2}, std::vector{0, 3, 2}, std::vector{0, 1, 3});
    k::einsum(fx.exec, scores, DType::f32, DType::f32, y.data(), xe, y.data(), xe, out + x.size() + 51 * at(m));
    return z;
  };
  const auto want = work(1);
  CHECK(work(2) == want);
  std::vector<std::vector<float>> got(4);
  std::vector<std::thread> threads;
  for (auto& g : got) threads.emplace_back([&] { g = work(1); });
  for (auto& t : threads) t.join();
  for (const auto& g : got) CHECK(g == want);
}
