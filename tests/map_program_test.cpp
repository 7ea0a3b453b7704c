// Functions of map as instructions, which a kernel interprets: results and derivatives are those of the function itself
// on plain numbers and Jets, on teams of one lane and of several.
#include "catch.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "kernel_teams.hpp"
#include "shardlib/kernels/body/map_program.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/ops/map/symbol.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
namespace body = shardlib::kernels::body;

namespace {

constexpr std::int64_t elements = 1003;

// Named and closure types, told apart by their names.
struct Named {
  template <class T>
  T operator()(const T& x) const {
    return x;
  }
};
template <class F>
struct Around {
  F f;
};
[[maybe_unused]] constexpr auto outside = [](auto x) { return x; };
static_assert(!detail::is_closure<Named> && !detail::is_closure<Around<Named>> && !detail::is_closure<float>);
static_assert(detail::is_closure<std::remove_const_t<decltype(outside)>>);
static_assert(detail::is_closure<Around<std::remove_const_t<decltype(outside)>>>);

/// Runs a program over dense arrays of x, y, id, keep (and before them the cotangent), and then of what it writes.
template <class T, std::size_t N, int E>
void run(const Exec& exec, const detail::MapProgram& program, const std::vector<std::byte*>& data,
         const std::vector<DType>& dtypes, const std::array<std::int8_t, 4>& seeds) {
  static constexpr std::array<std::int64_t, 1> shape{elements}, unit{1};
  std::vector<kernels::detail::Strides> strides(data.size(), kernels::detail::padded(unit));
  std::vector<kernels::detail::ErasedOperand> arrays;
  body::ProgramRow<T, N, E> row{program, {}, {}, 4, seeds};
  for (std::size_t i = 0; i < data.size(); ++i) {
    arrays.push_back({data[i], size_of(dtypes[i]), false, &strides[i]});
    row.data[i] = data[i];
    row.dtypes[i] = dtypes[i];
  }
  const auto loops = kernels::detail::elementwise_loops(exec, shape, arrays);
  exec.for_items(loops.items(), 0, body::Elementwise<body::ProgramRow<T, N, E>>{loops, row});
}

template <class T>
std::byte* bytes(T* data) {
  return reinterpret_cast<std::byte*>(data);
}
template <class Y>
double number(const Y& y) {
  if constexpr (is_jet<Y>)
    return static_cast<double>(y.value);
  else
    return static_cast<double>(y);
}
template <class Y>
double slope(const Y& y, std::size_t i) {
  if constexpr (is_jet<Y>)
    return static_cast<double>(y.by[i]);
  else
    return 0;
}
void expect_close(double a, double b, double tolerance, const std::string& what, std::size_t i) {
  const bool close = a == b || (std::isnan(a) && std::isnan(b)) || std::abs(a - b) <= tolerance * (1 + std::abs(b));
  if (!close) FAIL(what << " of element " << i << ": " << a << " instead of " << b);
}

/// A value of the function and its derivatives by x and y.
using Expected = std::array<double, 3>;

/// f(x, y, id, keep) with x and y of dtype D, a result of dtype R, and both derivatives. Compiled once for all
/// functions.
template <class D, class R, class T>
void check_program(const std::string& name, const detail::MapProgram& program,
                   const std::function<Expected(const Jet<T, 2>&, const Jet<T, 2>&, i32, bool)>& f) {
  INFO(name);
  std::vector<D> x, y, ct = numbers<D>(elements, 3);
  std::vector<i32> id(at(elements));
  std::vector<bool_> keep(at(elements));
  for (std::size_t i = 0; i < at(elements); ++i) {
    x.push_back(static_cast<D>(0.05F + static_cast<float>(i % 101) * 0.031F));
    y.push_back(static_cast<D>(static_cast<float>(i % 29) * 0.17F - 1.9F));
    id[i] = static_cast<i32>(i * 97 % 43) - 11;
    keep[i] = bool_(i % 3 == 0);
  }
  const double tolerance = std::is_same_v<D, f64> ? 1e-12 : std::is_same_v<D, bf16> ? 1e-2 : 4e-6;
  for (const bool simulated : {false, true}) {
    std::vector<R> result(at(elements));
    std::vector<D> by_x(at(elements)), by_y(at(elements)), all_x(at(elements)), all_y(at(elements));
    Place(simulated).run(
        [&](const Exec& exec, D* px, D* py, i32* pid, bool_* pkeep, D* pct, R* pr, D* gx, D* gy, D* ax, D* ay) {
          std::vector<std::byte*> data{bytes(px), bytes(py), bytes(pid), bytes(pkeep), bytes(pr)};
          std::vector<DType> dtypes{dtype_v<D>, dtype_v<D>, dtype_v<i32>, dtype_v<bool_>, dtype_v<R>};
          run<T, 0, 4>(exec, program, data, dtypes, {-1, -1, -1, -1});
          data.insert(data.begin(), bytes(pct));
          dtypes.insert(dtypes.begin(), dtype_v<D>);
          dtypes.back() = dtype_v<D>;
          data.back() = bytes(gx);
          run<T, 1, 2>(exec, program, data, dtypes, {0, -1, -1, -1});
          data.back() = bytes(gy);
          run<T, 1, 2>(exec, program, data, dtypes, {-1, 0, -1, -1});
          data.back() = bytes(ax);
          data.push_back(bytes(ay));
          dtypes.push_back(dtype_v<D>);
          run<T, 4, 1>(exec, program, data, dtypes, {0, 1, -1, -1});
        },
        x, y, id, keep, ct, result, by_x, by_y, all_x, all_y);
    for (std::size_t i = 0; i < at(elements); ++i) {
      Jet<T, 2> jx(static_cast<T>(static_cast<accumulator_t<D>>(x[i])));
      Jet<T, 2> jy(static_cast<T>(static_cast<accumulator_t<D>>(y[i])));
      jx.by[0] = 1;
      jy.by[1] = 1;
      const Expected expected = f(jx, jy, id[i], static_cast<bool>(keep[i]));
      const auto c = static_cast<double>(static_cast<accumulator_t<D>>(ct[i]));
      const auto as_double = [](const auto& v) {
        return static_cast<double>(static_cast<accumulator_t<std::remove_cvref_t<decltype(v)>>>(v));
      };
      if constexpr (std::is_same_v<R, bool_>)
        CHECK(static_cast<bool>(result[i]) == (expected[0] != 0));
      else
        expect_close(as_double(result[i]), expected[0], tolerance, name, i);
      const double slopes[] = {c * expected[1], c * expected[2]};
      expect_close(as_double(by_x[i]), slopes[0], tolerance, name + ", derivative by x", i);
      expect_close(as_double(by_y[i]), slopes[1], tolerance, name + ", derivative by y", i);
      expect_close(as_double(all_x[i]), slopes[0], tolerance, name + ", all derivatives, by x", i);
      expect_close(as_double(all_y[i]), slopes[1], tolerance, name + ", all derivatives, by y", i);
    }
  }
}
template <class D, class R, class F>
void check_as(const std::string& name, const F& f) {
  using T = std::conditional_t<std::is_same_v<D, f64>, f64, f32>;
  check_program<D, R, T>(name, detail::traced(f, dtype_v<D>, dtype_v<D>, dtype_v<i32>, dtype_v<bool_>),
                         [&](const Jet<T, 2>& x, const Jet<T, 2>& y, i32 id, bool keep) {
                           const auto result = f(x, y, id, keep);
                           return Expected{number(result), slope(result, 0), slope(result, 1)};
                         });
}
template <class F>
void check(const std::string& name, const F& f) {
  using Y = decltype(f(Jet<f32, 2>(), Jet<f32, 2>(), i32(), true));
  if constexpr (is_jet<Y> || std::is_floating_point_v<Y>) {
    check_as<f32, f32>(name, f);
    check_as<f64, f64>(name, f);
    check_as<bf16, bf16>(name, f);
  } else {
    using R = std::conditional_t<std::is_same_v<Y, bool>, bool_, Y>;
    check_as<f32, R>(name, f);
    check_as<f64, R>(name, f);
  }
}
#define CHECK_FUNCTION(...)                                                                          \
  check(#__VA_ARGS__, []([[maybe_unused]] auto x, [[maybe_unused]] auto y, [[maybe_unused]] auto id, \
                         [[maybe_unused]] auto keep) { return __VA_ARGS__; })

template <class F>
std::string error_of(const F& f) {
  try {
    detail::traced(f, DType::f32);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace

TEST_CASE("instructions of a map: functions of numbers", "[map]") {
  CHECK_FUNCTION(exp(y));
  CHECK_FUNCTION(log(x));
  CHECK_FUNCTION(tanh(y));
  CHECK_FUNCTION(sigmoid(y));
  CHECK_FUNCTION(sqrt(x));
  CHECK_FUNCTION(rsqrt(x));
  CHECK_FUNCTION(square(y));
  CHECK_FUNCTION(abs(y));
  CHECK_FUNCTION(relu(y));
  CHECK_FUNCTION(gelu(y));
  CHECK_FUNCTION(swish(y));
  CHECK_FUNCTION(sin(y));
  CHECK_FUNCTION(cos(y));
  CHECK_FUNCTION(erf(y));
  CHECK_FUNCTION(log1p(x));
  CHECK_FUNCTION(expm1(y));
  CHECK_FUNCTION(softplus(y));
  CHECK_FUNCTION(sign(y) * y);
  CHECK_FUNCTION(floor(y) * x);
  CHECK_FUNCTION(round(y) * x);
  CHECK_FUNCTION(pow(x, y));
  CHECK_FUNCTION(pow(y, 3));
  CHECK_FUNCTION(pow(x, 0.5));
  CHECK_FUNCTION(mod(y, x));
  CHECK_FUNCTION(floor_divide(y, x) * y);
  CHECK_FUNCTION(maximum(x, y));
  CHECK_FUNCTION(minimum(x, 1));
  CHECK_FUNCTION(clamp(y, -0.5, x));
}

TEST_CASE("instructions of a map: operators, conditions and integers", "[map]") {
  CHECK_FUNCTION(x + y - 2 * x / (y + 0.03) + 1 - x);
  CHECK_FUNCTION(-x * +y);
  CHECK_FUNCTION(where(x > y, x, 0.1 * y));
  CHECK_FUNCTION(where(x < 1 && !(y >= 0.5), x, y) + where(x <= y || x != x, 2, 3.5F));
  CHECK_FUNCTION(where(keep, x, 0.0));
  CHECK_FUNCTION(where(keep, 1 / (x * 0.0), 1 / (x * -0.0)));
  CHECK_FUNCTION(where(id == 5, log(y - 5), y));  // a NaN that is not chosen has no derivative
  CHECK_FUNCTION((x > y) * y + keep * x);
  CHECK_FUNCTION(x * id + id / 4 * y);
  CHECK_FUNCTION(2.5);
  CHECK_FUNCTION(x > y);
  CHECK_FUNCTION(keep);
  CHECK_FUNCTION(keep && id < 3);
  CHECK_FUNCTION(x == x);
  CHECK_FUNCTION(id * 100000 + 7);
  CHECK_FUNCTION(16777217 + id);  // no f32
  CHECK_FUNCTION(id % 7 - (id / 3) * 2 + ((id & 6) | 1) - (id ^ 2));
  CHECK_FUNCTION(where(id <= 0, -id, id + keep));
  // Constants of 64 bits are integers as others are.
  CHECK_FUNCTION(id + 16777217 == std::int64_t{16777218});
  CHECK_FUNCTION(where(id % std::int64_t{7} == std::int64_t{-2}, x, y));
#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wsign-conversion"  // numbers of both signs are what is tested
#endif
  CHECK_FUNCTION((id + 11U) % std::size_t{5} < std::int64_t{3});
  CHECK_FUNCTION(id + 3000000000U > std::int64_t{3000000005});
  CHECK_FUNCTION(where((id & 7U) < std::size_t{4}, x, y));
#if defined(__clang__)
#pragma clang diagnostic pop
#endif
  check("assignments", [](auto x, auto y, auto id, auto) {
    auto s = x;
    s += 1;
    s *= y;
    s -= id;
    s /= 2.0;
    return s;
  });
  check("loop", [k = 0.5F](auto x, auto y, auto, auto) {
    decltype(x) sum = 0;
    for (int i = 0; i < 5; ++i) sum = sum * x + k * y;
    return sum;
  });
}

TEST_CASE("instructions of a map are few", "[map]") {
  // Each result once, and none that the last does not need.
  const auto program = detail::traced([](auto x) { return exp(x) + exp(x) * (0 * x, 2.0); }, DType::f32);
  CHECK(program.count == 5);
  const auto sixty_four = detail::traced(
      [](auto x) {
        auto y = x;
        for (int i = 0; i < 63; ++i) y = sin(y);
        return y;
      },
      DType::f32);
  CHECK(sixty_four.count == 64);
}

TEST_CASE("instructions of a map: errors", "[map][errors]") {
  const std::string branch =
      "a device traces the function, so that it cannot branch on an element (if, ?:, while, std::max): use "
      "where(condition, a, b), or maximum, minimum, abs, relu or clamp";
  CHECK(error_of([](auto x) { return x > 0 ? x : 0; }) == branch);
  CHECK(error_of([](auto x) {
          const bool positive = x > 0;
          return positive * x;
        }) == branch);
  CHECK(error_of([](auto x) { return std::max(x, 2 * x); }) == branch);
  CHECK(error_of([](auto x) {
          auto y = x;
          for (int i = 0; i < 64; ++i) y = sin(y);
          return y;
        }) ==
        "a device traces the function into instructions, of which it holds 64, and this function has 65; split it "
        "into several maps, or make it a function object marked SHARDLIB_FUNCTION");
  CHECK(error_of([](auto x) {
          auto y = x;
          for (int i = 0; i < 5000; ++i) y = sin(y);
          return y;
        }).find("has 1024 or more; split it") != std::string::npos);
  CHECK(error_of([](auto x) { return x & 1; }) == "the operator & takes integers and truth values only");
  CHECK(error_of([](auto x) { return x % 2; }) == "the operator % takes integers only; use mod(a, b)");
  CHECK(error_of([](auto x) { return static_cast<float>(x); }) ==
        "a device traces the function, so that an element has no value to convert: calculate without the cast");
  const std::string too_long = "a device calculates with integers of 32 bits, and the constant ";
  CHECK(error_of([](auto x) { return where(x == std::int64_t{4294967296}, x, 0); }) ==
        too_long + "4294967296 takes 64; write it as a floating-point number, as in 1e10");
  CHECK(error_of([](auto x) { return x + std::int64_t{-2147483649}; }).find(too_long + "-2147483649 ") == 0);
  CHECK(error_of([](auto x) { return x + std::uint64_t{4294967296}; }).find(too_long + "4294967296 ") == 0);
  const auto meets = [](const auto& f, DType dtype) {
    CHECK_THROWS_WITH(detail::traced(f, dtype),
                      Catch::Contains("constant of 64 bits meets a number that does not have"));
  };
  meets([](auto i) { return i < std::int64_t{3000000000}; }, DType::i32);
  meets([](auto i) { return i > std::int64_t{-1}; }, DType::u32);
  CHECK_THROWS_WITH(Symbol(1.0), "a Symbol outside of a function of map: only map makes them");
  // A function that failed leaves nothing behind.
  CHECK(detail::traced([](auto x) { return x; }, DType::f32).count == 1);
}
