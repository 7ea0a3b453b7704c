// Elementwise arithmetic, comparisons, where, map and casts: broadcasting by name, pending sums, each with its VJP.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "op_case.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using In = const std::vector<double>&;

#define BINARY(dtype, a, b, symbol, law_, draw_a, draw_b)                                         \
  make_case<Tensor<dtype, a>, Tensor<dtype, b>>(                                                  \
      a " " #symbol " " b " of " #dtype, [](const auto& x, const auto& y) { return x symbol y; }, \
      elementwise([](In v) { return v[0] symbol v[1]; }), {.law = law_, .draws = {draw_a, draw_b}})

TEST_CASE("plus and minus", "[ops]") {
#define SUM(dtype, a, b, symbol) BINARY(dtype, a, b, symbol, Law::joint, Draw::odd, Draw::even)
  check_cases({
      SUM(f32, "A/t/d B", "A/t/d B", +),
      SUM(f32, "B/d L M", "M", +),
      SUM(f32, "M/t", "B/d L M/t", -),
      SUM(f32, "B/d C", "C H/t", +),  // each operand is repeated along a dim of the other
      SUM(f32, "A +t", "A +t", -),
      SUM(f32, "B/d M +t", "M +t", +),
      SUM(f32, "", "B/d", -),
      SUM(f32, "A/p B/d", "A/p B/d", +),
      SUM(bf16, "A/t", "A/t", +),
      SUM(f64, "B/d M", "M", -),
      BINARY(i32, "B/d M", "M", +, Law::joint, Draw::integers, Draw::integers),
      BINARY(u8, "B/d M", "M", +, Law::joint, Draw::naturals, Draw::naturals),
  });
#undef SUM
}

TEST_CASE("times and divided by", "[ops]") {
#define PRODUCT(dtype, a, b) BINARY(dtype, a, b, *, Law::each, Draw::odd, Draw::even)
#define QUOTIENT(dtype, a, b)                                                      \
  make_case<Tensor<dtype, a>, Tensor<dtype, b>>(                                   \
      a " / " b " of " #dtype, [](const auto& x, const auto& y) { return x / y; }, \
      elementwise([](In v) { return v[0] / v[1]; }),                               \
      {.law = Law::none, .tolerance = 1e-6, .draws = {Draw::odd, Draw::positive}})
  std::vector<Case> cases{
      PRODUCT(f32, "A/t/d B", "A/t/d B"),
      PRODUCT(f32, "B/d L M", "M"),
      PRODUCT(f32, "M/t", "B/d L M/t"),
      PRODUCT(f32, "A +t", "A"),
      PRODUCT(f32, "M", "B/d M +t"),
      PRODUCT(f32, "M +d", "B M +t"),
      PRODUCT(f32, "B/d C", "C H/t"),
      PRODUCT(f64, "B/d M", "M"),
      BINARY(i32, "B/d M", "M", *, Law::each, Draw::integers, Draw::integers),
      QUOTIENT(f32, "B/d M", "B/d M"),
      QUOTIENT(f32, "B/d M", "M"),
      QUOTIENT(f32, "B/d M +t", "B/d"),
      QUOTIENT(f32, "C", "B/d C"),
      QUOTIENT(f64, "A/t", "A/t"),
  };
  for (Case& c : cases)  // quotients of summands are rounded each
    if (c.options.tolerance > 0) c.options.tolerance = 1e-5;
  check_cases(std::move(cases));
#undef PRODUCT
#undef QUOTIENT
}

#define UNARY(dtype, spec, expression, reference, ...)                                                     \
  make_case<Tensor<dtype, spec>>(                                                                          \
      #expression " of " #dtype " " spec, [](const auto& x) { return expression; }, elementwise([](In v) { \
        const double x = v[0];                                                                             \
        return reference;                                                                                  \
      }),                                                                                                  \
      __VA_ARGS__)

TEST_CASE("numbers and tensors", "[ops]") {
  check_cases({
      UNARY(f32, "A/t +d", -x, -x, {}),
      UNARY(f32, "A/t +d", x * 1.5, x * 1.5, {}),
      UNARY(f32, "A/t", 0.25 * x, x * 0.25, {}),
      UNARY(f32, "+d", x / 4.0, x / 4, {}),
      UNARY(bf16, "A/d", x * 0.5, x * 0.5, {}),
      UNARY(f32, "A/t", x + 1.25, x + 1.25, {.law = Law::none, .tolerance = 1e-9}),
      UNARY(f32, "A/t/d", x - 0.5, x - 0.5, {.law = Law::none, .tolerance = 1e-9}),
      UNARY(f64, "A", x - 0.5, x - 0.5, {.law = Law::none, .tolerance = 1e-9}),
      UNARY(bf16, "A", x + 1.0, x + 1, {.law = Law::none, .tolerance = 1e-9}),
      UNARY(i32, "A/d", x + 3.0, x + 3, {.draws = {Draw::integers}}),
      UNARY(f32, "A/t", 1.25 + x, 1.25 + x, {.law = Law::none, .tolerance = 1e-9}),
      UNARY(f32, "A/t/d", 0.5 - x, 0.5 - x, {.law = Law::none, .tolerance = 1e-9}),
      UNARY(i32, "A/d", 3.0 - x, 3 - x, {.draws = {Draw::integers}}),
      UNARY(f64, "A/t", 2.0 / x, 2 / x, {.law = Law::none, .tolerance = 1e-6, .draws = {Draw::positive}}),
      UNARY(f32, "A/t", maximum(x, 0.25), std::max(x, 0.25), {.law = Law::none, .tolerance = 1e-6}),
      UNARY(bf16, "A", minimum(x, 0.25), std::min(x, 0.25), {.law = Law::none, .tolerance = 1e-6}),
      UNARY(f32, "A/t", maximum(0.25, x), std::max(x, 0.25), {.law = Law::none, .tolerance = 1e-6}),
      UNARY(i32, "A", minimum(2, x), std::min(x, 2.0), {.draws = {Draw::integers}}),
      UNARY(i32, "A", x / 2, std::trunc(x / 2), {.draws = {Draw::integers}}),
  });
#define COMPARED(dtype, spec, name, symbol)                                                                     \
  make_case<Tensor<dtype, spec>>(#name " with a number of " #dtype, [](const auto& x) { return name(x, 2.0); }, \
                                 elementwise([](In v) { return static_cast<double>(v[0] symbol 2); }),          \
                                 {.law = Law::none, .draws = {Draw::integers}})
  check_cases({
      COMPARED(i32, "A/t", equal, ==),
      COMPARED(f32, "A/t", not_equal, !=),
      COMPARED(i32, "A", less, <),
      COMPARED(f32, "A/d", less_equal, <=),
      COMPARED(bf16, "A", greater, >),
      COMPARED(f64, "A", greater_equal, >=),
  });
#undef COMPARED
}

double sigmoid_of(double x) {
  return 1 / (1 + std::exp(-x));
}

TEST_CASE("functions of one operand", "[ops]") {
  const Options any{.law = Law::none, .tolerance = 2e-6};
  const Options above{.law = Law::none, .tolerance = 4e-6, .draws = {Draw::positive}};
  std::vector<Case> cases{
      UNARY(f32, "A/t/d B", exp(x), std::exp(x), any),
      UNARY(f32, "A/t", log(x), std::log(x), above),
      UNARY(f32, "A/t", tanh(x), std::tanh(x), any),
      UNARY(f32, "A/t", sigmoid(x), sigmoid_of(x), any),
      UNARY(f32, "A/t", sqrt(x), std::sqrt(x), above),
      UNARY(f32, "A/t", rsqrt(x), 1 / std::sqrt(x), above),
      UNARY(f32, "A/t", square(x), x * x, any),
      UNARY(f32, "A/t", abs(x), std::abs(x), any),
      UNARY(f32, "A/t", relu(x), std::max(x, 0.0), any),
      UNARY(f32, "A/t", gelu(x), 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x))),
            any),
      UNARY(f32, "A/t", swish(x), x * sigmoid_of(x), any),
      UNARY(f64, "A/t", swish(x), x * sigmoid_of(x), any),
      UNARY(f32, "A/t", sin(x), std::sin(x), any),
      UNARY(f64, "A/d B/t", cos(x), std::cos(x), any),
      UNARY(f32, "A/t", erf(x), std::erf(x), any),
      UNARY(f32, "A/t", log1p(x), std::log1p(x), above),
      UNARY(f32, "A/t", expm1(x), std::expm1(x), any),
      UNARY(f32, "A/t", softplus(x), std::log1p(std::exp(x)), any),
      UNARY(f32, "A/t", sign(x), x > 0 ? 1 : -1, {.gradient = false}),
      UNARY(f32, "A/t", floor(x), std::floor(x), {.gradient = false}),
      UNARY(f64, "A/t", round(x), std::nearbyint(x), {.gradient = false}),
      UNARY(f32, "A/t", (clamp(x, -0.5, 0.75)), std::clamp(x, -0.5, 0.75), any),
      UNARY(i32, "A/d", (clamp(x, -3.0, 4.0)), std::clamp(x, -3.0, 4.0), {.draws = {Draw::integers}}),
      UNARY(f32, "A/t", (pow(x, 3.0)), x * x * x, {.law = Law::none, .tolerance = 1e-5}),
      UNARY(f64, "A/t", (pow(2.0, x)), std::exp2(x), any),
  };
  Case half = UNARY(bf16, "B/d M", gelu(x),
                    0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x))), any);
  half.options.tolerance = 0.01;
  cases.push_back(half);
  check_cases(std::move(cases));
}

TEST_CASE("functions of two operands", "[ops]") {
#define TWO(dtype, a, b, name, reference, draw_a, draw_b)                                                \
  make_case<Tensor<dtype, a>, Tensor<dtype, b>>(#name " of " #dtype " " a ", " b,                        \
                                                [](const auto& x, const auto& y) { return name(x, y); }, \
                                                elementwise([](In v) {                                   \
                                                  const double x = v[0], y = v[1];                       \
                                                  return static_cast<double>(reference);                 \
                                                }),                                                      \
                                                {.law = Law::none, .tolerance = 1e-6, .draws = {draw_a, draw_b}})
  check_cases({
      TWO(f32, "B/d M", "M", maximum, std::max(x, y), Draw::odd, Draw::even),
      TWO(f32, "M/t", "B/d M/t", minimum, std::min(x, y), Draw::odd, Draw::even),
      TWO(i32, "B/d L", "B/d L", equal, x == y, Draw::integers, Draw::integers),
      TWO(f32, "B/d L", "L", less, x < y, Draw::odd, Draw::odd),
      TWO(i32, "L/t", "B/d", greater_equal, x >= y, Draw::integers, Draw::integers),
      TWO(i32, "L", "L", greater, x > y, Draw::integers, Draw::integers),
      TWO(u32, "L", "L", less_equal, x <= y, Draw::naturals, Draw::naturals),
      TWO(u8, "L", "L", not_equal, x != y, Draw::naturals, Draw::naturals),
      TWO(bool_, "B/d L", "L", logical_and, x != 0 && y != 0, Draw::truth, Draw::truth),
      TWO(bool_, "L/t", "L/t", logical_or, x != 0 || y != 0, Draw::truth, Draw::truth),
  });
#undef TWO
}

double python_quotient(double a, double b) {
  return std::floor(std::round(16 * a) / std::round(16 * b));  // as drawn: not moved over a step by a difference
}

TEST_CASE("pow, floor_divide and mod", "[ops]") {
#define TWO(dtype, a, b, op, reference, ...)                                                                  \
  make_case<Tensor<dtype, a>, Tensor<dtype, b>>(                                                              \
      #op " of " #dtype " " a ", " b, [](const auto& x, const auto& y) { return op; }, elementwise([](In v) { \
        const double x = v[0], y = v[1];                                                                      \
        return static_cast<double>(reference);                                                                \
      }),                                                                                                     \
      {.law = Law::none, __VA_ARGS__})
  check_cases({
      TWO(f32, "B/d M", "M", pow(x, y), std::pow(x, y), .tolerance = 1e-5, .draws = {Draw::positive, Draw::odd}),
      TWO(f64, "M/t", "B/d M/t", pow(x, y), std::pow(x, y), .tolerance = 1e-6, .draws = {Draw::positive, Draw::odd}),
      TWO(f32, "B/d M", "M", mod(x, y), x - python_quotient(x, y) * y, .tolerance = 1e-5,
          .draws = {Draw::odd, Draw::odd}),
      TWO(f32, "B/d", "M/t", floor_divide(x, y), python_quotient(x, y), .gradient = false),
      TWO(i32, "B/d M", "M", (mod(x, y * 2.0 + 1.0)), x - std::floor(x / (2 * y + 1)) * (2 * y + 1),
          .draws = {Draw::integers, Draw::integers}),
      TWO(i32, "M/t", "M/t", (floor_divide(x, y * 2.0 + 1.0)), std::floor(x / (2 * y + 1)),
          .draws = {Draw::integers, Draw::integers}),
      TWO(u8, "M/t", "M/t", (mod(x, y + 1.0)), std::fmod(x, y + 1), .draws = {Draw::naturals, Draw::naturals}),
      UNARY(f32, "A/t", (mod(x, 0.5)), x - std::floor(x / 0.5) * 0.5, {.law = Law::none, .tolerance = 1e-6}),
      UNARY(i32, "A/t", (mod(x, -3.0)), x + std::floor(-x / 3) * 3, {.draws = {Draw::integers}}),
      UNARY(i32, "A/t", (floor_divide(x, -3.0)), std::floor(-x / 3), {.draws = {Draw::integers}}),
  });
#undef TWO
}

TEST_CASE("where and masked", "[ops]") {
  const Reference choose = elementwise([](In v) { return v[0] != 0 ? v[1] : v.size() > 2 ? v[2] : 0.0; });
#define WHERE(dtype, c, a, b)                                                                                          \
  make_case<Tensor<bool_, c>, Tensor<dtype, a>, Tensor<dtype, b>>(                                                     \
      "where " #dtype " " c ", " a ", " b, [](const auto& m, const auto& x, const auto& y) { return where(m, x, y); }, \
      choose, {.law = Law::joint, .draws = {Draw::truth, Draw::odd, Draw::odd}})
#define MASKED(dtype, c, a)                                                                                        \
  make_case<Tensor<bool_, c>, Tensor<dtype, a>>("masked " #dtype " " c ", " a,                                     \
                                                [](const auto& m, const auto& x) { return masked(m, x); }, choose, \
                                                {.law = Law::joint, .draws = {Draw::truth, Draw::odd}})
  check_cases({
      WHERE(f32, "B/d M", "B/d M", "M"),
      WHERE(f32, "M/t", "B/d M/t", "B/d"),
      WHERE(f32, "A", "A +d +t", "A +d +t"),
      WHERE(bf16, "A/d", "A/d", "A/d"),
      MASKED(f32, "L", "B/d L"),
      MASKED(f32, "B/d L", "L +t"),
      MASKED(bf16, "L", "L"),
      make_case<Tensor<bool_, "L">, Tensor<f32, "B/d L">>(
          "where with a constant", [](const auto& m, const auto& x) { return where(m, x, -7.5); },
          elementwise([](In v) { return v[0] != 0 ? v[1] : -7.5; }),
          {.law = Law::none, .draws = {Draw::truth, Draw::odd}}),
      make_case<Tensor<bool_, "B/d L">, Tensor<f32, "L">>(
          "where with a constant first", [](const auto& m, const auto& x) { return where(m, -7.5, x); },
          elementwise([](In v) { return v[0] != 0 ? -7.5 : v[1]; }),
          {.law = Law::none, .draws = {Draw::truth, Draw::odd}}),
      make_case<Tensor<bool_, "B/d L">, Tensor<i32, "L">>(
          "where with a constant, of integers", [](const auto& m, const auto& x) { return where(m, x, 9); },
          elementwise([](In v) { return v[0] != 0 ? v[1] : 9; }), {.draws = {Draw::truth, Draw::integers}}),
  });
#undef WHERE
#undef MASKED
}

TEST_CASE("map", "[ops]") {
  const Options smooth{.law = Law::none, .tolerance = 4e-6};
  check_cases({
      make_case<Tensor<f32, "B/d M/t">, Tensor<f32, "B/d M/t">>(
          "map of two",
          [](const auto& g, const auto& u) { return map([](auto a, auto b) { return swish(a) * b; }, g, u); },
          elementwise([](In v) { return v[0] * sigmoid_of(v[0]) * v[1]; }), smooth),
      make_case<Tensor<f32, "B/d M">, Tensor<f32, "M">, Tensor<f32, "B/d">>(
          "map of three, broadcast",
          [](const auto& x, const auto& y, const auto& z) {
            return map([](auto a, auto b, auto c) { return sin(a) * b + cos(c) / (2.0 + c); }, x, y, z);
          },
          elementwise([](In v) { return std::sin(v[0]) * v[1] + std::cos(v[2]) / (2 + v[2]); }),
          {.law = Law::none, .tolerance = 1e-5, .draws = {Draw::odd, Draw::odd, Draw::positive}}),
      make_case<Tensor<f32, "C">, Tensor<f32, "B/d C">, Tensor<f32, "C">, Tensor<f32, "B/d">>(
          "map of four",
          [](const auto& p, const auto& q, const auto& r, const auto& s) {
            return map([](auto a, auto b, auto c, auto d) { return maximum(a * b, c) - abs(d) * exp(-b); }, p, q, r, s);
          },
          elementwise([](In v) { return std::max(v[0] * v[1], v[2]) - std::abs(v[3]) * std::exp(-v[1]); }),
          {.law = Law::none, .tolerance = 1e-5}),
      // An operand without a gradient among others that have one.
      make_case<Tensor<f32, "B/d M">, Tensor<i32, "M">>(
          "map with integers",
          [](const auto& x, const auto& n) {
            return map([](auto a, auto k) { return where(k > 0, a * a, -a); }, x, n);
          },
          elementwise([](In v) { return v[1] > 0 ? v[0] * v[0] : -v[0]; }),
          {.law = Law::none, .tolerance = 1e-6, .draws = {Draw::odd, Draw::integers}}),
      make_case<Tensor<f32, "B/d M">>(
          "map to truth values", [](const auto& x) { return map([](auto a) { return a > 0.5F; }, x); },
          elementwise([](In v) { return v[0] > 0.5 ? 1.0 : 0.0; })),
  });
}

#if !defined(SHARDLIB_TRACED_LAMBDAS)  // there the parameters are auto, and nothing branches
TEST_CASE("map with a parameter of a type", "[ops]") {
  check_cases({
      make_case<Tensor<f32, "B/d M">, Tensor<i32, "M">>(
          "map with integers, of a type",
          [](const auto& x, const auto& n) { return map([](auto a, i32 k) { return k > 0 ? a * a : -a; }, x, n); },
          elementwise([](In v) { return v[1] > 0 ? v[0] * v[0] : -v[0]; }),
          {.law = Law::none, .tolerance = 1e-6, .draws = {Draw::odd, Draw::integers}}),
  });
}
#endif

TEST_CASE("cast", "[ops]") {
#define CAST(from, to, spec, draw)                                                           \
  make_case<Tensor<from, spec>>(#from " to " #to, [](const auto& x) { return cast<to>(x); }, \
                                elementwise([](In v) { return v[0]; }), {.draws = {draw}})
  check_cases({
      CAST(f32, bf16, "A/t +d", Draw::odd),
      CAST(bf16, f32, "A/t/d", Draw::odd),
      CAST(f32, f64, "A +d +t", Draw::odd),
      CAST(f64, f32, "A/t", Draw::odd),
      CAST(f32, i32, "A/t", Draw::integers),
      CAST(i32, f32, "A/t", Draw::integers),
      CAST(bool_, f32, "A/t", Draw::truth),
      CAST(u8, i32, "A/t", Draw::naturals),
      CAST(u32, bf16, "A/t", Draw::naturals),
  });
#undef CAST
}

template <class T>
HostArray<T> vector_of(const std::vector<T>& values) {
  return HostArray<T>({static_cast<std::int64_t>(values.size())}, values);
}

// What C++ leaves undefined is defined here: the same on every compiler, and quiet under a sanitizer.
TEST_CASE("integers at their bounds", "[ops]") {
  on_mesh("d=1,t=1", [](const Mesh<"d t">& mesh) {
    constexpr i32 least = std::numeric_limits<i32>::min(), greatest = std::numeric_limits<i32>::max();
    constexpr float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    const auto floats =
        place<Tensor<f32, "A">>(mesh, vector_of<f32>({3e9F, -3e9F, infinity, -infinity, nan, 2.9F, -2.9F, 300}));
    expect_equal(fetch(cast<i32>(floats)).data, std::vector<i32>{greatest, least, greatest, least, 0, 2, -2, 300});
    expect_equal(fetch(cast<u8>(floats)).data, std::vector<u8>{255, 0, 255, 0, 0, 2, 0, 255});
    expect_equal(fetch(cast<u32>(floats)).data, std::vector<u32>{3000000000U, 0, 0xffffffffU, 0, 0, 2, 0, 300});
    const auto doubles = place<Tensor<f64, "A">>(mesh, vector_of<f64>({greatest, greatest + 1.0, -0.5}));
    expect_equal(fetch(cast<i32>(doubles)).data, std::vector<i32>{greatest, greatest, 0});
    expect_equal(fetch(cast<u32>(doubles)).data, std::vector<u32>{0x7fffffffU, 0x80000000U, 0});

    const auto x = place<Tensor<i32, "A">>(mesh, vector_of<i32>({greatest, least, 65537}));
    expect_equal(fetch(x + x).data, std::vector<i32>{-2, 0, 131074});
    expect_equal(fetch(x - (-x)).data, std::vector<i32>{-2, 0, 131074});
    expect_equal(fetch(x * x).data, std::vector<i32>{1, 0, 131073});
    expect_equal(fetch(-x).data, std::vector<i32>{-greatest, least, -65537});
    expect_equal(fetch(x + 1.0).data, std::vector<i32>{least, least + 1, 65538});
    expect_equal(fetch(x - 1.0).data, std::vector<i32>{greatest - 1, greatest, 65536});
    expect_equal(fetch(-2.0 - x).data, std::vector<i32>{greatest, greatest - 1, -65539});
    expect_equal(fetch(x * 2.0).data, std::vector<i32>{-2, 0, 131074});
    expect_equal(fetch(sum<"A -> ">(x)).data, std::vector<i32>{65536});
  });
}

TEST_CASE("functions where they have limits, steps or poles", "[ops]") {
  on_mesh("d=1,t=1", [](const Mesh<"d t">& mesh) {
    constexpr f64 infinity = std::numeric_limits<f64>::infinity();
    const auto of = [&](std::vector<f64> values) { return place<Tensor<f64, "A">>(mesh, vector_of<f64>(values)); };
    expect_equal(fetch(softplus(of({1000, -1000, infinity, -infinity}))).data, std::vector<f64>{1000, 0, infinity, 0});
    expect_equal(fetch(round(of({0.5, 1.5, 2.5, -0.5, -1.5}))).data, std::vector<f64>{0, 2, 2, 0, -2});
    expect_equal(fetch(sign(of({0, -3, 5}))).data, std::vector<f64>{0, -1, 1});
    expect_equal(fetch(floor(of({-0.5, 2, 2.75}))).data, std::vector<f64>{-1, 2, 2});
    // As Python has it.
    const auto p = of({7.5, -7.5, 7.5, -7.5, 1.0, -5.0, 3.0}), q = of({2, 2, -2, -2, 0.1, infinity, 0.0});
    expect_equal(fetch(floor_divide(p, q)).data, std::vector<f64>{3, -4, -4, 3, 9, -1, infinity});
    const auto rests = fetch(mod(p, q)).data;
    expect_equal(std::vector<f64>(rests.begin(), rests.end() - 1),
                 std::vector<f64>{1.5, 0.5, -0.5, -1.5, 0.09999999999999995, infinity});
    constexpr i32 least = std::numeric_limits<i32>::min();
    const auto a = place<Tensor<i32, "A">>(mesh, vector_of<i32>({7, -7, 7, -7, least, least}));
    const auto b = place<Tensor<i32, "A">>(mesh, vector_of<i32>({2, 2, -2, -2, -1, 3}));
    expect_equal(fetch(floor_divide(a, b)).data, std::vector<i32>{3, -4, -4, 3, least, -715827883});
    expect_equal(fetch(mod(a, b)).data, std::vector<i32>{1, 1, -1, -1, 0, 1});
    expect(error_of([&] { wait_for(mod(a, b - b)); }).find("by which integers cannot be divided") != std::string::npos,
           "mod");
    expect(error_of([&] { floor_divide(a, 0.0); }).starts_with("floor_divide of `A` at "), "floor_divide by a number");
    expect(
        error_of([&] { clamp(a, 2.0, 1.0); }).find("the lower bound 2 is above the upper bound 1") != std::string::npos,
        "clamp");
    const auto nine = full<f32, "A">(mesh, {{"A", 6}}, 9);
    expect(error_of([&] { pow(nine, 1 / 2); })
                   .find(": the exponent is the integer 0, so all elements would be 1; a quotient of integers such as "
                         "1 / 2 is 0: write `1.0 / 2`, and `0.0` for ones (") != std::string::npos,
           "pow");
    expect_equal(fetch(pow(nine, 0.0)).data, std::vector<f32>(6, 1));
    expect_equal(fetch(pow(nine, 2)).data, std::vector<f32>(6, 81));
    expect_equal(fetch(pow(nine, -1)).data, fetch(pow(nine, -1.0)).data);

    struct Powers {
      Tensor<f64, "A"> base, exponent;
    };
    const auto slopes = [&](std::vector<f64> base, std::vector<f64> exponent) {
      const auto loss = [](const Powers& w) { return to_partial<" -> +d +t">(sum(pow(w.base, w.exponent))); };
      const auto g = value_and_grad(mesh, loss, Powers{of(std::move(base)), of(std::move(exponent))}).second;
      return std::pair(fetch(g.get<&Powers::base>()).data, fetch(g.get<&Powers::exponent>()).data);
    };
    const auto [by_base, by_exponent] = slopes({0, 0, 0, 0, 2}, {2, 1, 0, 0.5, 0});
    expect_equal(by_base, std::vector<f64>{0, 1, 0, infinity, 0});
    expect_equal(std::vector<f64>(by_exponent.begin(), by_exponent.end() - 1), std::vector<f64>{0, 0, 0, 0});
    // The squares of the divisors are infinite, and 0.
    const auto ones = [](const Tensor<f64, "A">& x) { return to_partial<" -> +d +t">(sum(stop_gradient(x) / x)); };
    expect_equal(fetch(value_and_grad(mesh, ones, of({0x1p600, -0x1p-600})).second).data,
                 std::vector<f64>{-0x1p-600, 0x1p600});
    const auto cubes = [&](const Tensor<f64, "A">& x) {
      return to_partial<" -> +d +t">(sum(pow(x, 3.0) + pow(x, of({2, 2, 2}))));
    };
    expect_equal(fetch(value_and_grad(mesh, cubes, of({-2, 0, 1})).second).data, std::vector<f64>{8, 0, 5});
    for (const auto& steps : {std::function([](const Tensor<f64, "A">& x) { return floor(x); }),
                              std::function([](const Tensor<f64, "A">& x) { return round(x); }),
                              std::function([](const Tensor<f64, "A">& x) { return sign(x); }),
                              std::function([](const Tensor<f64, "A">& x) { return floor_divide(x, 2.0); }),
                              // The use of x as it is would hide that the other one has no gradient.
                              std::function([](const Tensor<f64, "A">& x) { return x + cast<f64>(cast<i32>(x)); }),
                              std::function([](const Tensor<f64, "A">& x) { return x + cast<f64>(cast<u8>(x)); })}) {
      const auto loss = [&](const Tensor<f64, "A">& x) { return to_partial<" -> +d +t">(sum(steps(x))); };
      expect(error_of([&] {
               value_and_grad(mesh, loss, of({1, 2}));
             }).find("its derivative is zero wherever it has one; take stop_gradient of the operand first") !=
                 std::string::npos,
             "a step has no gradient");
    }
    // What is no number has no derivative, and needs none.
    const auto conditions = [&](const Tensor<f64, "A">& x) {
      const auto best = cast<f64>(argmax<"A -> ">(x) + cast<i32>(stop_gradient(x) * 1.5) * 0.0);
      return to_partial<" -> +d +t">(sum(x * cast<f64>(greater(x, 1.0)) * cast<f64>(cast<bool_>(x)) * best));
    };
    expect_equal(fetch(value_and_grad(mesh, conditions, of({1, 2})).second).data, std::vector<f64>{0, 1});
  });
}

TEST_CASE("stop_gradient cuts the tape", "[ops]") {
  on_mesh("d=1,t=1", [](const DevicePtr& device) {
    static const TensorSpec spec = parse_tensor("A").spec;
    const Global whole = random_global(spec, Draw::odd, 1);
    const Tensor<f32, "A"> x(detail::as_leaf(*place(device, DType::f32, spec, whole)));
    const auto y = x * stop_gradient(x);
    const auto found =
        detail::Backward({{y.value()->slot, place(device, DType::f32, spec, whole)}}, {x.value()->slot}).run();
    const Buffer gradient = found[0]->on_host();
    for (std::size_t i = 0; i < whole.data.size(); ++i)  // not 2 x ct
      expect(gradient.as<f32>()[i] == static_cast<f32>(whole.data[i] * whole.data[i]), "gradient of x * stop(x)");
    expect(!stop_gradient(x).value()->slot, "a stopped value is recorded");
  });
}

}  // namespace
