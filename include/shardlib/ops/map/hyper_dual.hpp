// A number with mixed derivatives, whose order is known at run time: for higher derivatives of map.
#pragma once

#include <array>
#include <cstddef>
#include <type_traits>

#include "shardlib/ops/map/number.hpp"
#include "shardlib/ops/map/program.hpp"
#include "shardlib/spec/small.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// A hyper-dual number (Fike and Alonso 2011): a value, and its derivatives by each set of up to `most` variables. It
/// is a Jet of two numbers with one variable fewer each, whose rules it uses, down to plain numbers. One type serves
/// all orders, so the compiler translates a function of map once for them.
class HyperDual {
 public:
  static constexpr int most = 4;

  HyperDual() = default;
  template <class U>
  requires std::is_arithmetic_v<U> SHARDLIB_FUNCTION
  HyperDual(U value)  // NOLINT(google-explicit-constructor): for constants
      : by_{static_cast<double>(value)} {}
  /// One more variable: the derivatives by it are `slope`, which has as many variables as the value or fewer.
  SHARDLIB_INLINE HyperDual(const HyperDual& value, const HyperDual& slope, int variables);

  /// The derivative by each of the first `variables`, one after another.
  [[nodiscard]] double mixed(int variables) const {
    return variables > variables_ ? 0 : by_[(std::size_t{1} << variables) - 1];
  }
  /// Whether the number is 0, and so are its derivatives.
  [[nodiscard]] SHARDLIB_FUNCTION bool vanishes() const {
    for (const double x : by_)
      if (x != 0) return false;
    return true;
  }

#define SHARDLIB_HYPER_DUAL_COMPARISON(op)                                                                 \
  SHARDLIB_EITHER_SIDE friend SHARDLIB_FUNCTION bool operator op(const HyperDual& a, const HyperDual& b) { \
    return a.by_[0] op b.by_[0];                                                                           \
  }
  SHARDLIB_HYPER_DUAL_COMPARISON(<)
  SHARDLIB_HYPER_DUAL_COMPARISON(>)
  SHARDLIB_HYPER_DUAL_COMPARISON(<=)
  SHARDLIB_HYPER_DUAL_COMPARISON(>=)
  SHARDLIB_HYPER_DUAL_COMPARISON(==)
  SHARDLIB_HYPER_DUAL_COMPARISON(!=)
#undef SHARDLIB_HYPER_DUAL_COMPARISON
#define SHARDLIB_HYPER_DUAL_OF_ONE(name, op)                                         \
  SHARDLIB_EITHER_SIDE friend SHARDLIB_FUNCTION HyperDual name(const HyperDual& a) { \
    return of_one(MapOp::op, a);                                                     \
  }
#define SHARDLIB_HYPER_DUAL_OF_TWO(name, op)                                                             \
  SHARDLIB_EITHER_SIDE friend SHARDLIB_FUNCTION HyperDual name(const HyperDual& a, const HyperDual& b) { \
    return of_two(MapOp::op, a, b);                                                                      \
  }
#define SHARDLIB_NAMED(name) SHARDLIB_HYPER_DUAL_OF_ONE(name, name)
  SHARDLIB_MAP_FUNCTIONS_OF_ONE(SHARDLIB_NAMED)
#undef SHARDLIB_NAMED
#define SHARDLIB_NAMED(name) SHARDLIB_HYPER_DUAL_OF_TWO(name, name)
  SHARDLIB_MAP_FUNCTIONS_OF_TWO(SHARDLIB_NAMED)
#undef SHARDLIB_NAMED
  SHARDLIB_HYPER_DUAL_OF_ONE(operator-, negate)
  SHARDLIB_HYPER_DUAL_OF_TWO(operator+, add)
  SHARDLIB_HYPER_DUAL_OF_TWO(operator-, subtract)
  SHARDLIB_HYPER_DUAL_OF_TWO(operator*, multiply)
  SHARDLIB_HYPER_DUAL_OF_TWO(operator/, divide)
#undef SHARDLIB_HYPER_DUAL_OF_ONE
#undef SHARDLIB_HYPER_DUAL_OF_TWO

 private:
  // Not inline here, as higher_input: what includes shapes.hpp alone has no definitions.
  [[gnu::cold]] static HyperDual of_one(MapOp op, const HyperDual& a);
  [[gnu::cold]] static HyperDual of_two(MapOp op, const HyperDual& a, const HyperDual& b);
  /// The number as a Jet of two that have one variable fewer than `variables`.
  [[nodiscard]] SHARDLIB_INLINE Jet<HyperDual, 1> parts(int variables) const;

  int variables_ = 0;
  /// Bit k of an index stands for a derivative by variable k. The rest is 0.
  std::array<double, std::size_t{1} << most> by_{};
};

/// The operands by which a map is differentiated, one after another.
using Differentiations = Small<int, HyperDual::most + 1>;
using HigherJet = Jet<HyperDual, 1>;

/// Operand number `operand` of a function whose derivative by all of `by` is wanted. The Jet has the last one.
[[nodiscard, gnu::cold]] HigherJet higher_input(double value, int operand, const Differentiations& by);

}  // namespace shardlib::detail
