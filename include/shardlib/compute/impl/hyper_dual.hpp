// Definitions of ops/map/hyper_dual.hpp.
#pragma once

#include <algorithm>
#include <cstddef>

#include "shardlib/ops/map/hyper_dual.hpp"
#include "shardlib/ops/map/number.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE HyperDual::HyperDual(const HyperDual& value, const HyperDual& slope, int variables)
    : variables_(variables), by_(value.by_) {
  const std::size_t half = std::size_t{1} << (variables - 1);
  std::copy_n(slope.by_.begin(), half, by_.begin() + static_cast<std::ptrdiff_t>(half));
}

SHARDLIB_INLINE HigherJet HyperDual::parts(int variables) const {
  HigherJet jet(*this);
  if (variables_ < variables) return jet;  // it has no derivative by the last one
  HyperDual &value = jet.value, &slope = jet.by[0];
  const auto half = std::ptrdiff_t{1} << (variables - 1);
  std::copy_n(by_.begin() + half, half, slope.by_.begin());
  std::fill_n(value.by_.begin() + half, half, 0.0);
  value.variables_ = slope.variables_ = variables - 1;
  return jet;
}

SHARDLIB_INLINE HyperDual HyperDual::of_one(MapOp op, const HyperDual& a) {
  const auto apply = [op](const auto& x) {
    switch (op) {
#define SHARDLIB_CASE(name) \
  case MapOp::name: {       \
    using shardlib::name;   \
    return name(x);         \
  }
      SHARDLIB_MAP_FUNCTIONS_OF_ONE(SHARDLIB_CASE)
#undef SHARDLIB_CASE
      default:
        return -x;
    }
  };
  if (a.variables_ == 0) return apply(a.by_[0]);
  const HigherJet y = apply(a.parts(a.variables_));
  return {y.value, y.by[0], a.variables_};
}

SHARDLIB_INLINE HyperDual HyperDual::of_two(MapOp op, const HyperDual& a, const HyperDual& b) {
  const auto apply = [op](const auto& x, const auto& y) {
    switch (op) {
#define SHARDLIB_CASE(name) \
  case MapOp::name: {       \
    using shardlib::name;   \
    return name(x, y);      \
  }
      SHARDLIB_MAP_FUNCTIONS_OF_TWO(SHARDLIB_CASE)
#undef SHARDLIB_CASE
      case MapOp::add:
        return x + y;
      case MapOp::subtract:
        return x - y;
      case MapOp::multiply:
        return x * y;
      default:
        return x / y;
    }
  };
  const int variables = std::max(a.variables_, b.variables_);
  if (variables == 0) return apply(a.by_[0], b.by_[0]);
  const HigherJet y = apply(a.parts(variables), b.parts(variables));
  return {y.value, y.by[0], variables};
}

SHARDLIB_INLINE HigherJet higher_input(double value, int operand, const Differentiations& by) {
  HyperDual x(value);
  for (int k = 0; k + 1 < by.size(); ++k) x = HyperDual(x, by[k] == operand ? 1 : 0, k + 1);
  HigherJet jet(x);
  jet.by[0] = by[by.size() - 1] == operand ? 1 : 0;
  return jet;
}

}  // namespace shardlib::detail
