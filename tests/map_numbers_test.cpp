// map in a program without `using namespace shardlib`: its functions are found by the numbers that they are called
// with.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "op_case.hpp"
#include "shardlib/runtime/observe.hpp"
#include "shardlib/shardlib.hpp"

namespace {

namespace sl = shardlib;
namespace test = shardlib::test;
using X = sl::Tensor<sl::f32, "A/d">;

/// Values and derivatives of the sum of map(f, x) at a few points, against `expected` and `slope` in f64.
template <class F, class Value, class Slope>
void check(const F& f, const Value& expected, const Slope& slope) {
  test::on_mesh("d=1", [&](const sl::DevicePtr& device) {
    const sl::Mesh<"d"> mesh(device);
    const X x = sl::random_uniform<sl::f32, "A/d">(mesh, {{"A", 64}}, {1, 2}) * 2.0 + 0.25;
    const auto values = sl::map(f, x);
    const auto loss = [&f](const X& v) -> sl::Tensor<sl::f32, "+d"> {
      return sl::sum(sl::map(f, v));
    };
    const auto [l, gradient] = sl::value_and_grad(mesh, loss, x);
    for (std::size_t i = 0; i < 64; ++i) {
      const auto v = static_cast<double>(x.span()[i]);
      const auto close = [](double a, double b) { return std::abs(a - b) <= 2e-6 * (1 + std::abs(b)); };
      test::expect(close(static_cast<double>(values.span()[i]), expected(v)), "value at " + test::show(v));
      test::expect(close(static_cast<double>(gradient.span()[i]), slope(v)), "derivative at " + test::show(v));
    }
  });
}

sl::i32 twice(sl::i32 i) {
  return 2 * i;
}

}  // namespace

TEST_CASE("functions inside map are ours without a using", "[ops][map]") {
  check([](auto v) { return exp(v); }, [](double v) { return std::exp(v); }, [](double v) { return std::exp(v); });
  const auto logistic = [](double v) { return 1 / (1 + std::exp(-v)); };
  check([](auto v) { return sigmoid(v); }, logistic, [&](double v) { return logistic(v) * (1 - logistic(v)); });
  check([](auto v) { return pow(v, 3); }, [](double v) { return v * v * v; }, [](double v) { return 3 * v * v; });
  check([](auto v) { return pow(v, v); }, [](double v) { return std::pow(v, v); },
        [](double v) { return std::pow(v, v) * (std::log(v) + 1); });
  check([](auto v) { return softplus(v) * sign(v - 1); },
        [](double v) { return std::log1p(std::exp(v)) * (v > 1 ? 1 : -1); },
        [&](double v) { return logistic(v) * (v > 1 ? 1 : -1); });
  check([](auto v) { return floor(v) + 2 * round(v) + 3 * clamp(v, 0.5, 1) + mod(v, 0.7); },
        [](double v) {
          return std::floor(v) + 2 * std::nearbyint(v) + 3 * std::clamp(v, 0.5, 1.0) + v - 0.7 * std::floor(v / 0.7);
        },
        [](double v) { return v > 0.5 && v < 1 ? 4.0 : 1.0; });
  check([](auto v) { return log1p(v) + expm1(v); }, [](double v) { return std::log1p(v) + std::expm1(v); },
        [](double v) { return 1 / (1 + v) + std::exp(v); });
  check([](auto v) { return sin(v) * cos(v) + sqrt(v) - rsqrt(v) + erf(v) + abs(-v) + tanh(v) + log(v); },
        [](double v) {
          return std::sin(v) * std::cos(v) + std::sqrt(v) - 1 / std::sqrt(v) + std::erf(v) + v + std::tanh(v) +
                 std::log(v);
        },
        [](double v) {
          return std::cos(2 * v) + 0.5 / std::sqrt(v) + 0.5 / (v * std::sqrt(v)) +
                 2 / std::sqrt(M_PI) * std::exp(-v * v) + 1 + 1 - std::tanh(v) * std::tanh(v) + 1 / v;
        });
#if !defined(SHARDLIB_TRACED_LAMBDAS)  // there lambdas are interpreted, which may round otherwise
  // The same number forward as the library's own exp, not C's of a double.
  test::on_mesh("d=1", [](const sl::DevicePtr& device) {
    const sl::Mesh<"d"> mesh(device);
    const X x = sl::random_normal<sl::f32, "A/d">(mesh, {{"A", 1000}}, {3, 4});
    const auto all = [](const X& y) { return test::values_of<sl::f32>(y.value()->data()); };
    test::expect_equal(all(sl::map([](auto v) { return exp(v); }, x)), all(sl::exp(x)));
    test::expect_equal(all(sl::map([](auto v) { return gelu(v); }, x)), all(sl::gelu(x)));
  });
#endif
}

TEST_CASE("numbers inside map mix with plain ones", "[ops][map]") {
  const float k = 3;
  check([k](auto v) { return where(v > 1, v * k, 0.0F); }, [](double v) { return v > 1 ? 3 * v : 0; },
        [](double v) { return v > 1 ? 3 : 0; });
  check([](auto v) { return 1 - 2 * v / 4.0 + 1 / v; }, [](double v) { return 1 - v / 2 + 1 / v; },
        [](double v) { return -0.5 - 1 / (v * v); });
  check(
      [](auto v) {
        auto s = v;
        s += 1;
        s *= v;
        s -= 2.0;
        s /= 2;
        return maximum(s, v);
      },
      [](double v) { return std::max((v * v + v - 2) / 2, v); },
      [](double v) { return (v * v + v - 2) / 2 > v ? v + 0.5 : 1; });
  check([](auto v) { return where(v == v && v != 0, +v, -v); }, [](double v) { return v; }, [](double) { return 1; });
  check([](auto) { return 2.5; }, [](double) { return 2.5; }, [](double) { return 0; });
  static_assert(sizeof(sl::Jet<float, 0>) == sizeof(float) && sizeof(sl::Jet<double, 0>) == sizeof(double));
}

#if defined(SHARDLIB_TRACED_LAMBDAS)
TEST_CASE("functions inside map that kernels cannot run", "[ops][map][errors]") {
  const auto error = [](const auto& f) {
    std::string text;
    test::on_mesh("d=1", [&](const sl::DevicePtr& device) {
      const X x = sl::random_uniform<sl::f32, "A/d">(sl::Mesh<"d">(device), {{"A", 4}}, {1, 2});
      try {
        if constexpr (std::is_invocable_v<decltype(f), sl::Jet<float, 0>>)
          sl::map(f, x);
        else
          sl::map(f, x, sl::cast<sl::i32>(x));
      } catch (const sl::Error& e) {
        text = e.what();
      }
    });
    return text;
  };
  using Catch::Contains;
  using Catch::Matchers::StartsWith;
  const auto branches = error([](auto v) { return v > 1 ? v : 0.0F; });
  CHECK_THAT(branches, StartsWith("map at ") && Contains("map_numbers_test.cpp:") &&
                           Contains(": a device traces the function, so that it cannot branch on an element") &&
                           Contains("use where(condition, a, b), or maximum, minimum") && Contains("d=0"));
  CHECK_THAT(error([](auto v) { return std::max(v, 2 * v); }), Contains("so that it cannot branch on an element"));
  CHECK_THAT(error([](auto v) {
               for (int i = 0; i < 64; ++i) v = sin(v);
               return v;
             }),
             Contains("of which it holds 64, and this function has 65; split it into several maps"));
  CHECK_THAT(error([](auto v, sl::i32 n) { return v * n; }), Contains("whose parameters must be `auto` for that"));
  test::on_mesh("d=1", [&](const sl::DevicePtr& device) {
    const auto ids = sl::iota<"A/d">(sl::Mesh<"d">(device), 4);
    CHECK_THROWS_WITH(sl::map(&twice, ids),
                      Contains("cannot call the host's function through a pointer: write a lambda"));
  });
}
#else
TEST_CASE("map calls a function through its pointer", "[ops][map]") {
  test::on_mesh("d=1", [](const sl::DevicePtr& device) {
    const auto ids = sl::iota<"A/d">(sl::Mesh<"d">(device), 4);
    test::expect_equal(test::values_of<sl::i32>(sl::map(&twice, ids).value()->data()),
                       std::vector<sl::i32>{0, 2, 4, 6});
  });
}
TEST_CASE("functions inside map may branch", "[ops][map]") {
  const float k = 3;
  check([k](auto v) { return v > 1 ? v * k : 0.0F; }, [](double v) { return v > 1 ? 3 * v : 0; },
        [](double v) { return v > 1 ? 3 : 0; });
  check([](auto v) { return v == v && v != 0 ? +v : -v; }, [](double v) { return v; }, [](double) { return 1; });
  check([](auto v) { return std::max(v * v, v); }, [](double v) { return std::max(v * v, v); },
        [](double v) { return v > 1 ? 2 * v : 1; });
}
#endif

namespace {
// A function object. Where kernels have their functions inside, a device calls it, and interprets the lambda beside it.
struct Gate {
  template <class T, class I>
  SHARDLIB_FUNCTION auto operator()(const T& a, const T& b, const I& k) const {
    return where(k > 0, swish(a) * b, a - pow(b, 2) * k) + 0.5;
  }
};
struct Weigh {
  template <class T>
  SHARDLIB_FUNCTION auto operator()(const T& a, const T& b) const {
    return tanh(a) * maximum(b, 0.25) / (2 + a * a);
  }
};

/// Values and gradients of a function object and of a lambda with the same body, with operands that broadcast.
template <class D>
void check_both(double tolerance) {
  using A = sl::Tensor<D, "B/d M">;
  using B = sl::Tensor<D, "M">;
  test::on_mesh("d=1", [&](const sl::DevicePtr& device) {
    const sl::Mesh<"d"> mesh(device);
    const auto a = sl::cast<D>(sl::random_normal<sl::f32, "B/d M">(mesh, {{"B", 7}, {"M", 53}}, {1, 2}));
    const auto b = sl::cast<D>(sl::random_uniform<sl::f32, "M">(mesh, {{"M", 53}}, {3, 4}));
    const auto k = sl::cast<sl::i32>(sl::random_normal<sl::f32, "M">(mesh, {{"M", 53}}, {5, 6}) * 3.0);
    const auto gate = [](auto p, auto q, auto i) { return where(i > 0, swish(p) * q, p - pow(q, 2) * i) + 0.5; };
    const auto weigh = [](auto p, auto q) { return tanh(p) * maximum(q, 0.25) / (2 + p * p); };
    const auto expect_same = [&](const auto& x, const auto& y) {
      const auto p = test::values_of<D>(x.value()->data()), q = test::values_of<D>(y.value()->data());
      REQUIRE(p.size() == q.size());
      for (std::size_t i = 0; i < p.size(); ++i) {
        const auto u = static_cast<double>(static_cast<sl::accumulator_t<D>>(p[i]));
        const auto v = static_cast<double>(static_cast<sl::accumulator_t<D>>(q[i]));
        test::expect(std::abs(u - v) <= tolerance * (1 + std::abs(u)), test::show(u) + " and " + test::show(v));
      }
    };
    expect_same(sl::map(Gate{}, a, b, k), sl::map(gate, a, b, k));
    expect_same(sl::map(Weigh{}, a, b), sl::map(weigh, a, b));
    const auto total = [](const auto& x) { return sl::sum(sl::cast<sl::f32>(x)); };
    const auto gradients = [&](const auto& first, const auto& second) {
      const auto loss = [&](const A& p, const B& q) -> sl::Tensor<sl::f32, "+d"> {
        return total(sl::map(second, sl::map(first, p, q, k), q));
      };
      const auto by_b = [&](const B& q, const A& p) { return loss(p, q); };
      return std::pair(sl::value_and_grad(mesh, loss, a, b).second, sl::value_and_grad(mesh, by_b, b, a).second);
    };
    const auto [object_a, object_b] = gradients(Gate{}, Weigh{});
    const auto [lambda_a, lambda_b] = gradients(gate, weigh);
    expect_same(object_a, lambda_a);
    expect_same(object_b, lambda_b);
    // All derivatives in one loop.
    const auto both = [&](const auto& f) {
      const auto loss = [&](const A& p) -> sl::Tensor<sl::f32, "+d"> {
        return total(sl::map(f, p, p * 0.5));
      };
      return sl::value_and_grad(mesh, loss, a).second;
    };
    expect_same(both(Weigh{}), both(weigh));
  });
}
}  // namespace

TEST_CASE("map of a function object and of a lambda", "[ops][map]") {
  check_both<sl::f32>(2e-6);
  check_both<sl::f64>(1e-13);
  check_both<sl::bf16>(1e-2);
}

TEST_CASE("a map computes what a chain of ops does, by one op forward and one backward", "[ops][map]") {
  test::on_mesh("d=1", [](const sl::DevicePtr& device) {
    const sl::Mesh<"d"> mesh(device);
    const X x = sl::random_normal<sl::f32, "A/d">(mesh, {{"A", 1000}}, {1, 2});
    const auto y = sl::random_normal<sl::f32, "A/d">(mesh, {{"A", 1000}}, {3, 4});
    const auto ran = [&](const auto& loss) {
      std::vector<std::string> ops;
      const sl::detail::Observing observing(device, [&](const auto& op) { ops.emplace_back(op.op.name); });
      return std::pair(test::values_of<sl::f32>(sl::value_and_grad(mesh, loss, x, y).second.value()->data()), ops);
    };
    const auto chain = ran([](const X& v, const X& w) { return sl::sum(sl::tanh(v * 2.0) * w + sl::swish(v) * 0.5); });
    const auto fused = ran([](const X& v, const X& w) {
      return sl::sum(sl::map([](auto a, auto b) { return tanh(a * 2.0) * b + swish(a) * 0.5; }, v, w));
    });
    for (std::size_t i = 0; i < 1000; ++i)
      test::expect(std::abs(chain.first[i] - fused.first[i]) <= 1e-5F * (1 + std::abs(chain.first[i])),
                   test::show(chain.first[i]) + " and " + test::show(fused.first[i]));
    test::expect_equal(fused.second, {"map", "sum", "full", "broadcast", "map_backward"});
    test::expect(chain.second.size() == 15);
  });
}
