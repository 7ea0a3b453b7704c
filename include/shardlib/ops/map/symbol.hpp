// Functions of map as data: a function is called once with symbols instead of numbers, which write down what it does to
// them. A device that cannot call a lambda of the host interprets these instructions (kernels/body/map_program.hpp).
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/ops/map/number.hpp"
#include "shardlib/ops/map/program.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib {
namespace detail {

/// The instructions of the function that this thread calls with symbols, in the order in which symbols write them.
class MapTracer {
 public:
  /// A constant, an input, or an operation on the results of earlier instructions.
  struct Instruction {
    MapOp op;
    NumberKind kind;
    std::size_t operands;             ///< the number of those results
    std::array<std::size_t, 3> from;  ///< their indices; of an input, what MapOp::input says
    std::uint64_t number;             ///< the bits of a constant: 0.0 is not -0.0
    friend bool operator==(const Instruction&, const Instruction&) = default;
  };

  MapTracer() : outer_(std::exchange(current_, this)) {}
  MapTracer(const MapTracer&) = delete;
  MapTracer& operator=(const MapTracer&) = delete;
  ~MapTracer() { current_ = outer_; }

  static MapTracer& current() {
    if (current_ == nullptr) throw Error("a Symbol outside of a function of map: only map makes them");
    return *current_;
  }
  /// The index of the instruction's result. An instruction that was there before is used again.
  std::size_t add(const Instruction& step) {
    const auto at = std::ranges::find(instructions_, step) - instructions_.begin();
    if (at < std::ssize(instructions_)) return static_cast<std::size_t>(at);
    if (instructions_.size() == most_traced) fail_length(std::to_string(most_traced) + " or more");
    instructions_.push_back(step);
    return instructions_.size() - 1;
  }
  [[nodiscard]] const Instruction& instruction(std::size_t i) const { return instructions_[i]; }
  /// The instructions that make result `last`, without those that it does not need.
  [[nodiscard]] MapProgram program(std::size_t last) const {
    std::vector<bool> needed(last + 1);
    needed[last] = true;
    for (std::size_t i = last + 1; i-- > 0;)
      for (std::size_t k = 0; needed[i] && k < instructions_[i].operands; ++k) needed[instructions_[i].from[k]] = true;
    if (const auto count = static_cast<std::size_t>(std::ranges::count(needed, true)); count > MapProgram::most)
      fail_length(std::to_string(count));
    MapProgram program{};
    std::vector<std::size_t> place(last + 1);  // of each instruction in the program
    for (std::size_t i = 0; i <= last; ++i) {
      if (!needed[i]) continue;
      Instruction step = instructions_[i];
      for (std::size_t k = 0; k < step.operands; ++k) step.from[k] = place[step.from[k]];
      const auto from = [&](std::size_t k) { return static_cast<std::uint8_t>(step.from[k]); };
      place[i] = program.count;
      program.instructions[program.count] = {step.op, from(0), from(1), from(2)};
      program.kinds[program.count] = step.kind;
      program.numbers[program.count++] = std::bit_cast<double>(step.number);
    }
    return program;
  }

 private:
  static constexpr std::size_t most_traced = 1024;
  [[noreturn]] static void fail_length(const std::string& count) {
    throw Error("a device traces the function into instructions, of which it holds " +
                std::to_string(MapProgram::most) + ", and this function has " + count +
                "; split it into several maps, or make it a function object marked SHARDLIB_FUNCTION");
  }
  std::vector<Instruction> instructions_;
  MapTracer* outer_;  ///< of a function that was being traced when this one began
  static inline thread_local MapTracer* current_ = nullptr;
};

}  // namespace detail

/// A number that a function of `map` receives where a device traces it: an element, a constant, or what has been
/// computed of them. It has the operators and functions of a Jet. Conditions are also symbols, and have no value yet:
/// `where(x > 0, x, 0.1 * x)`.
class Symbol {
  using Op = detail::MapOp;
  using Kind = detail::NumberKind;
  using Instruction = detail::MapTracer::Instruction;

 public:
  Symbol() : Symbol(0.0) {}
  template <class U>
  requires std::is_arithmetic_v<U> Symbol(U v)  // NOLINT(google-explicit-constructor): constants mix with symbols
      : Symbol(Instruction{std::is_floating_point_v<U> ? Op::real : Op::integer,
                           kind_of_constant(v),
                           0,
                           {},
                           std::bit_cast<std::uint64_t>(static_cast<double>(v))}) {
    if constexpr (std::is_signed_v<U> && sizeof(U) > 4) one_sign_ = v < 0 || kind_ == Kind::u32;
  }
  /// The elements of an operand of map.
  static Symbol input(std::size_t operand, DType dtype) {
    return Symbol(Instruction{Op::input, detail::kind_of(dtype), 0, {operand, static_cast<std::size_t>(dtype)}, 0});
  }
  /// The instructions that make this number.
  [[nodiscard]] detail::MapProgram program() const { return detail::MapTracer::current().program(at_); }

  /// Always throws Error, because a condition has no value yet.
  template <std::same_as<bool> U>
  operator U() const {  // NOLINT(google-explicit-constructor): where a bool converts, so does this
    throw Error(
        "a device traces the function, so that it cannot branch on an element (if, ?:, while, std::max): use "
        "where(condition, a, b), or maximum, minimum, abs, relu or clamp");
  }
  template <class U>
  requires(std::is_arithmetic_v<U> && !std::is_same_v<U, bool>) explicit operator U() const {
    throw Error("a device traces the function, so that an element has no value to convert: calculate without the cast");
  }

  // ---- arithmetic: constants become symbols by the constructor ----
  friend Symbol operator+(const Symbol& a, const Symbol& b) {
    return arithmetic(Op::add, Op::int_add, Op::int_add, a, b);
  }
  friend Symbol operator-(const Symbol& a, const Symbol& b) {
    return arithmetic(Op::subtract, Op::int_subtract, Op::int_subtract, a, b);
  }
  friend Symbol operator*(const Symbol& a, const Symbol& b) {
    return arithmetic(Op::multiply, Op::int_multiply, Op::int_multiply, a, b);
  }
  friend Symbol operator/(const Symbol& a, const Symbol& b) {
    return arithmetic(Op::divide, Op::int_divide, Op::uint_divide, a, b);
  }
  friend Symbol operator%(const Symbol& a, const Symbol& b) {
    if (common(a, b) == Kind::real) throw Error("the operator % takes integers only; use mod(a, b)");
    return arithmetic(Op::mod, Op::int_remainder, Op::uint_remainder, a, b);
  }
  friend Symbol operator-(const Symbol& a) {
    if (a.kind_ == Kind::real) return {Op::negate, Kind::real, a};
    return Symbol(0) - a;
  }
  friend Symbol operator+(const Symbol& a) { return a.kind_ == Kind::truth ? a + Symbol(0) : a; }
  Symbol& operator+=(const Symbol& b) { return *this = *this + b; }
  Symbol& operator-=(const Symbol& b) { return *this = *this - b; }
  Symbol& operator*=(const Symbol& b) { return *this = *this * b; }
  Symbol& operator/=(const Symbol& b) { return *this = *this / b; }

  // ---- conditions ----
  friend Symbol operator<(const Symbol& a, const Symbol& b) {
    return comparison(Op::less, Op::int_less, Op::uint_less, a, b);
  }
  friend Symbol operator<=(const Symbol& a, const Symbol& b) {
    return comparison(Op::less_equal, Op::int_less_equal, Op::uint_less_equal, a, b);
  }
  friend Symbol operator>(const Symbol& a, const Symbol& b) { return b < a; }
  friend Symbol operator>=(const Symbol& a, const Symbol& b) { return b <= a; }
  friend Symbol operator==(const Symbol& a, const Symbol& b) {
    return comparison(Op::equal, Op::int_equal, Op::int_equal, a, b);
  }
  friend Symbol operator!=(const Symbol& a, const Symbol& b) { return !(a == b); }
  friend Symbol operator!(const Symbol& a) {
    if (a.kind_ == Kind::real) return a == Symbol(0.0);
    return {Op::int_not, Kind::truth, a};
  }
  // Templates, so that a constant needs no conversion: the built-in operators take it as it is, and the symbol as a
  // bool.
  template <class A, class B>
  requires(std::same_as<A, Symbol> || std::same_as<B, Symbol>) friend Symbol operator&&(const A& a, const B& b) {
    return truth(a) & truth(b);
  }
  template <class A, class B>
  requires(std::same_as<A, Symbol> || std::same_as<B, Symbol>) friend Symbol operator||(const A& a, const B& b) {
    return truth(a) | truth(b);
  }
  friend Symbol operator&(const Symbol& a, const Symbol& b) { return bits(Op::int_and, "&", a, b); }
  friend Symbol operator|(const Symbol& a, const Symbol& b) { return bits(Op::int_or, "|", a, b); }
  friend Symbol operator^(const Symbol& a, const Symbol& b) { return bits(Op::int_xor, "^", a, b); }

  // ---- functions ----
#define SHARDLIB_SYMBOL_FUNCTION(name)         \
  friend Symbol name(const Symbol& a) {        \
    return {Op::name, Kind::real, as_real(a)}; \
  }
  SHARDLIB_MAP_FUNCTIONS_OF_ONE(SHARDLIB_SYMBOL_FUNCTION)
#undef SHARDLIB_SYMBOL_FUNCTION
#define SHARDLIB_SYMBOL_FUNCTION(name)                     \
  friend Symbol name(const Symbol& a, const Symbol& b) {   \
    return {Op::name, Kind::real, as_real(a), as_real(b)}; \
  }
  SHARDLIB_MAP_FUNCTIONS_OF_TWO(SHARDLIB_SYMBOL_FUNCTION)
#undef SHARDLIB_SYMBOL_FUNCTION
  friend Symbol clamp(const Symbol& a, const Symbol& low, const Symbol& high) {
    return minimum(maximum(a, low), high);
  }
  friend Symbol relu(const Symbol& a) {
    return where(a <= Symbol(0.0), Symbol(0.0), a);
  }
  friend Symbol where(const Symbol& condition, const Symbol& a, const Symbol& b) {
    const Kind kind = truths(a, b) ? Kind::truth : common(a, b);
    return {Op::select, kind, truth(condition), to(kind, a), to(kind, b)};
  }

 private:
  /// Integers have 32 bits here. A 64-bit integer keeps its value, or the conversion throws Error.
  template <class U>
  static Kind kind_of_constant(U v) {
    if constexpr (std::is_same_v<U, bool>)
      return Kind::truth;
    else if constexpr (std::is_floating_point_v<U>)
      return Kind::real;
    else if constexpr (sizeof(U) <= 4)
      return std::is_unsigned_v<U> && sizeof(U) == 4 ? Kind::u32 : Kind::i32;
    else if (std::is_signed_v<U> && std::in_range<std::int32_t>(v))
      return Kind::i32;
    else if (std::in_range<std::uint32_t>(v))
      return Kind::u32;
    else
      throw Error("a device calculates with integers of 32 bits, and the constant " + std::to_string(v) +
                  " takes 64; write it as a floating-point number, as in 1e10");
  }
  explicit Symbol(const Instruction& step) : at_(detail::MapTracer::current().add(step)), kind_(step.kind) {}
  template <std::same_as<Symbol>... S>
  Symbol(Op op, Kind kind, const S&... from) : Symbol(Instruction{op, kind, sizeof...(S), {from.at_...}, 0}) {}
  /// The kind in which C++ adds two numbers of these kinds.
  static Kind common(const Symbol& a, const Symbol& b) {
    const Kind kind = a.kind_ < b.kind_ ? b.kind_ : a.kind_;
    const bool signs_differ = kind == Kind::u32 && (a.kind_ == Kind::i32 || b.kind_ == Kind::i32);
    if (signs_differ && (a.one_sign_ || b.one_sign_))
      throw Error(
          "a device calculates with integers of 32 bits, and this constant of 64 bits meets a number that does not "
          "have its sign: i32 has no number from 2147483648 on, u32 none below 0");
    return kind == Kind::truth ? Kind::i32 : kind;
  }
  static Symbol as_real(const Symbol& a) {
    if (a.kind_ == Kind::real) return a;
    const auto& step = detail::MapTracer::current().instruction(a.at_);
    if (step.op == Op::integer) return Symbol(std::bit_cast<double>(step.number));
    return {a.kind_ == Kind::u32 ? Op::from_uint : Op::from_int, Kind::real, a};
  }
  static Symbol to(Kind kind, const Symbol& a) {
    return kind == Kind::real ? as_real(a) : a;
  }
  static Symbol truth(const Symbol& a) {
    return a.kind_ == Kind::truth ? a : !!a;
  }
  static bool truths(const Symbol& a, const Symbol& b) {
    return a.kind_ == Kind::truth && b.kind_ == Kind::truth;
  }
  /// The operation for the common kind of the operands: of reals, of i32, or of u32.
  static Symbol arithmetic(Op real, Op i32, Op u32, const Symbol& a, const Symbol& b, bool compares = false) {
    const Kind kind = common(a, b);
    const Op op = kind == Kind::real ? real : kind == Kind::u32 ? u32 : i32;
    return {op, compares ? Kind::truth : kind, to(kind, a), to(kind, b)};
  }
  static Symbol comparison(Op real, Op i32, Op u32, const Symbol& a, const Symbol& b) {
    return arithmetic(real, i32, u32, a, b, true);
  }
  static Symbol bits(Op op, const char* name, const Symbol& a, const Symbol& b) {
    if (a.kind_ == Kind::real || b.kind_ == Kind::real)
      throw Error("the operator " + std::string(name) + " takes integers and truth values only");
    return {op, truths(a, b) ? Kind::truth : common(a, b), a, b};
  }

  std::size_t at_ = 0;
  Kind kind_ = Kind::real;
  bool one_sign_ = false;  ///< a constant of int64_t that i32 and u32 do not both hold
};
template <>
inline constexpr bool is_symbol<Symbol> = true;

namespace detail {

template <class T>
constexpr bool names_closure() {
  const std::string_view name = __PRETTY_FUNCTION__;
  for (const std::string_view mark : {"<lambda(", "(lambda at ", "lambda ["})  // of g++, clang, nvcc
    if (name.find(mark) != std::string_view::npos) return true;
  return false;
}
/// Whether T is a lambda's type, or made of one. nvcc takes no kernel with such a type in its name.
template <class T>
inline constexpr bool is_closure = names_closure<T>();

/// The instructions of a function over operands of these dtypes. Throws Error if it branches, or is too long.
template <class F, class... D>
MapProgram traced(const F& f, D... dtype) {
  const MapTracer trace;
  std::size_t operand = 0;
  const std::array<Symbol, sizeof...(D)> in{Symbol::input(operand++, dtype)...};
  return std::apply([&](const auto&... x) { return Symbol(f(x...)); }, in).program();
}

}  // namespace detail
}  // namespace shardlib
