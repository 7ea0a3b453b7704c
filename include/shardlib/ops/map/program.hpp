// The instructions of a function of map: operations, kinds of numbers, and a program of both. Symbols write them
// (ops/map/symbol.hpp), and kernels/body/map_program.hpp interprets them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "shardlib/spec/dtype.hpp"

namespace shardlib::detail {

// Functions of one and two real numbers, which the interpreter calls by these names.
#define SHARDLIB_MAP_FUNCTIONS_OF_ONE(X) \
  X(exp)                                 \
  X(log) X(tanh) X(sigmoid) X(sqrt) X(abs) X(sin) X(cos) X(erf) X(log1p) X(expm1) X(softplus) X(sign) X(floor) X(round)
#define SHARDLIB_MAP_FUNCTIONS_OF_TWO(X) X(pow) X(mod) X(floor_divide) X(maximum) X(minimum)

/// The operation of an instruction. Operations on integers begin with int_, or with uint_ where the sign matters.
enum class MapOp : std::uint8_t {
#define SHARDLIB_NAME(name) name,
  SHARDLIB_MAP_FUNCTIONS_OF_ONE(SHARDLIB_NAME) SHARDLIB_MAP_FUNCTIONS_OF_TWO(SHARDLIB_NAME)
#undef SHARDLIB_NAME
      input,  ///< operand a, whose dtype is b
  real,       ///< a constant
  integer,    ///< a constant
  select,     ///< b where a is true, else c
  from_int,
  from_uint,
  negate,
  add,
  subtract,
  multiply,
  divide,
  less,
  less_equal,
  equal,
  int_add,
  int_subtract,
  int_multiply,
  int_divide,
  uint_divide,
  int_remainder,
  uint_remainder,
  int_less,
  uint_less,
  int_less_equal,
  uint_less_equal,
  int_equal,
  int_not,  ///< whether it is 0
  int_and,
  int_or,
  int_xor,
};

/// The type of an instruction's result. C++ arithmetic converts every dtype of an operand to one of these.
enum class NumberKind : std::uint8_t { truth, i32, u32, real };

constexpr NumberKind kind_of(DType dtype) {
  if (dtype == DType::bool_) return NumberKind::truth;
  if (dtype == DType::u32) return NumberKind::u32;
  return is_floating(dtype) ? NumberKind::real : NumberKind::i32;
}

/// The instructions of a function, by value, so that a kernel holds them. The last one makes the result.
struct MapProgram {
  static constexpr std::size_t most = 64;
  struct Instruction {
    MapOp op;
    std::uint8_t a, b, c;
  };
  std::array<Instruction, most> instructions;
  std::array<NumberKind, most> kinds;
  std::array<double, most> numbers;  ///< of constants
  std::size_t count = 0;
};

}  // namespace shardlib::detail
