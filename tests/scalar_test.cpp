// Elements: what converts to a truth value, and the scalar functions on numbers and dual numbers.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "shardlib/ops/map/number.hpp"
#include "shardlib/spec/dtype.hpp"
#include "support.hpp"

using namespace shardlib;

static_assert(std::is_convertible_v<bool, bool_> && std::is_convertible_v<bool_, bool>);
static_assert(!std::is_constructible_v<bool_, const char*> && !std::is_constructible_v<bool_, void*>);
static_assert(!std::is_constructible_v<bool_, int> && !std::is_constructible_v<bool_, float>);

// A constant of any type is an operand next to a number or a dual number.
static_assert(std::is_same_v<decltype(maximum(1.0F, 0)), float>);
static_assert(std::is_same_v<decltype(minimum(0.0, 1.0F)), double>);
static_assert(std::is_same_v<decltype(maximum(Jet<float, 2>(), 0.0)), Jet<float, 2>>);

TEST_CASE("maximum and minimum take constants") {
  CHECK(maximum(-2.0F, 0.0) == 0.0);
  CHECK(maximum(0, 2.5F) == 2.5F);
  CHECK(minimum(3.0, 1) == 1.0);
  for (const float at : {-2.0F, 3.0F}) {
    Jet<float, 1> x(at);
    x.by[0] = 1;
    CHECK(maximum(x, 0.0).value == std::max(at, 0.0F));
    CHECK(maximum(0, x).by[0] == (at > 0 ? 1.0F : 0.0F));
    CHECK(minimum(x, 1.0F).value == std::min(at, 1.0F));
    CHECK(minimum(1.0, x).by[0] == (at < 1 ? 1.0F : 0.0F));
  }
}

TEST_CASE("erf has the derivative of the error function") {
  for (const double at : {-3.0, -0.5, 0.0, 0.25, 1.0, 2.5}) {
    Jet<double, 1> x(at);
    x.by[0] = 1;
    CHECK(std::abs(erf(x).value - std::erf(at)) < 1e-15);
    CHECK(std::abs(erf(x).by[0] - (std::erf(at + 1e-5) - std::erf(at - 1e-5)) / 2e-5) < 1e-9);
    CHECK(std::abs(double(erf(static_cast<float>(at))) - std::erf(at)) < 1e-6);
  }
}
