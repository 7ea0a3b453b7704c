// map in a program without `using namespace shardlib`: its functions are found by the numbers that they are called
// with.
#include <algorithm>
#include <cmath>

#include "op_case.hpp"
#include "shardlib/autodiff/value_and_grad.hpp"
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
  SUCCEED();
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
  // The same number forward as the library's own exp, not C's of a double.
  test::on_mesh("d=1", [](const sl::DevicePtr& device) {
    const sl::Mesh<"d"> mesh(device);
    const X x = sl::random_normal<sl::f32, "A/d">(mesh, {{"A", 1000}}, {3, 4});
    const auto all = [](const X& y) { return test::values_of<sl::f32>(y.value()->data()); };
    test::expect_equal(all(sl::map([](auto v) { return exp(v); }, x)), all(sl::exp(x)));
    test::expect_equal(all(sl::map([](auto v) { return gelu(v); }, x)), all(sl::gelu(x)));
  });
}

TEST_CASE("numbers inside map mix with plain ones", "[ops][map]") {
  const float k = 3;
  check([k](auto v) { return v > 1 ? v * k : 0.0F; }, [](double v) { return v > 1 ? 3 * v : 0; },
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
        return std::max(s, v);
      },
      [](double v) { return std::max((v * v + v - 2) / 2, v); },
      [](double v) { return (v * v + v - 2) / 2 > v ? v + 0.5 : 1; });
  check([](auto v) { return v == v && v != 0 ? +v : -v; }, [](double v) { return v; }, [](double) { return 1; });
  check([](auto) { return 2.5; }, [](double) { return 2.5; }, [](double) { return 0; });
  static_assert(sizeof(sl::Jet<float, 0>) == sizeof(float) && sizeof(sl::Jet<double, 0>) == sizeof(double));
}
