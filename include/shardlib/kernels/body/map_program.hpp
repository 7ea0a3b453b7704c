// The kernel of a map whose function is instructions (ops/map/program.hpp).
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "shardlib/kernels/body/elementwise.hpp"
#include "shardlib/ops/map/number.hpp"
#include "shardlib/ops/map/program.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/support/wrapping.hpp"

namespace shardlib::kernels::body {

/// Calls f with a pointer of the element type of a dtype.
template <class F>
SHARDLIB_FUNCTION void with_pointer(DType dtype, std::byte* data, const F& f) {
  switch (dtype) {
    case DType::f32:
      return f(reinterpret_cast<f32*>(data));
    case DType::bf16:
      return f(reinterpret_cast<bf16*>(data));
    case DType::f64:
      return f(reinterpret_cast<f64*>(data));
    case DType::i32:
      return f(reinterpret_cast<i32*>(data));
    case DType::u32:
      return f(reinterpret_cast<u32*>(data));
    case DType::u8:
      return f(reinterpret_cast<u8*>(data));
    case DType::bool_:
      return f(reinterpret_cast<bool_*>(data));
  }
}

/// Runs a program on E elements at once, in numbers T with N derivatives. An integer or a truth value is the bits of a
/// T.
template <class T, std::size_t N, int E>
class ProgramRun {
  using Op = shardlib::detail::MapOp;
  using Kind = shardlib::detail::NumberKind;

 public:
  /// Computes the results of all instructions. load(operand, dtype, put) calls put(e, x) with each of its elements, and
  /// seed(operand) is the derivative that it stands for, or -1.
  template <class Load, class Seed>
  SHARDLIB_FUNCTION ProgramRun(const shardlib::detail::MapProgram& program, const Load& load, const Seed& seed) {
    for (std::size_t r = 0; r < program.count; ++r) {
      const auto& step = program.instructions[r];
      if (step.op == Op::input) {
        const int by = seed(step.a);
        load(step.a, static_cast<DType>(step.b), [&](int e, const auto& x) { put(r, e, input(x, by)); });
      } else {
        run(r, step, program.numbers[r]);
      }
    }
  }
  /// An element of the result r, as a number R.
  template <class R>
  [[nodiscard]] SHARDLIB_FUNCTION R value(std::size_t r, Kind kind, int e) const {
    if constexpr (std::is_same_v<R, bool_>) {
      return bool_(bits(r, e) != 0);
    } else {
      using C = accumulator_t<R>;
      if (kind == Kind::real) return static_cast<R>(static_cast<C>(values_[r][e]));
      if (kind == Kind::u32) return static_cast<R>(static_cast<C>(bits(r, e)));
      return static_cast<R>(static_cast<C>(static_cast<i32>(bits(r, e))));
    }
  }
  /// The derivative of the result r by number `by`.
  [[nodiscard]] SHARDLIB_FUNCTION T slope(std::size_t r, std::size_t by, Kind kind, int e) const {
    return kind == Kind::real ? slopes_[r][e][by] : T(0);
  }

 private:
  using Number = Jet<T, N>;
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  static constexpr std::size_t most = shardlib::detail::MapProgram::most;

  SHARDLIB_FUNCTION Number get(std::size_t r, int e) const {
    Number x(values_[r][e]);
    if constexpr (N > 0)
      for (std::size_t k = 0; k < N; ++k) x.by[k] = slopes_[r][e][k];
    return x;
  }
  SHARDLIB_FUNCTION void put(std::size_t r, int e, const Number& x) {
    values_[r][e] = x.value;
    if constexpr (N > 0)
      for (std::size_t k = 0; k < N; ++k) slopes_[r][e][k] = x.by[k];
  }
  SHARDLIB_FUNCTION u32 bits(std::size_t r, int e) const {
    return static_cast<u32>(std::bit_cast<Bits>(values_[r][e]));
  }
  SHARDLIB_FUNCTION i32 integer(std::size_t r, int e) const { return static_cast<i32>(bits(r, e)); }
  SHARDLIB_FUNCTION static Number of_bits(u32 x) { return Number(std::bit_cast<T>(Bits{x})); }
  template <class X>
  SHARDLIB_FUNCTION static Number input(const X& x, int by) {
    if constexpr (floating<X>) {
      Number number(static_cast<T>(static_cast<accumulator_t<X>>(x)));
      if constexpr (N > 0)
        if (by >= 0) number.by[static_cast<std::size_t>(by)] = T(1);
      return number;
    } else if constexpr (std::is_same_v<X, bool_>) {
      return of_bits(x ? 1 : 0);
    } else {
      return of_bits(static_cast<u32>(x));
    }
  }

  SHARDLIB_FUNCTION void run(std::size_t r, const shardlib::detail::MapProgram::Instruction& step, double number) {
    const std::size_t a = step.a, b = step.b, c = step.c;
    const auto each = [&](const auto& f) {
      for (int e = 0; e < E; ++e) put(r, e, f(e));
    };
    switch (step.op) {
#define SHARDLIB_CASE(name) \
  case Op::name:            \
    return each([&](int e) { return name(get(a, e)); });
      SHARDLIB_MAP_FUNCTIONS_OF_ONE(SHARDLIB_CASE)
#undef SHARDLIB_CASE
#define SHARDLIB_CASE(name) \
  case Op::name:            \
    return each([&](int e) { return name(get(a, e), get(b, e)); });
      SHARDLIB_MAP_FUNCTIONS_OF_TWO(SHARDLIB_CASE)
#undef SHARDLIB_CASE
#define SHARDLIB_CASE(name, result) \
  case Op::name:                    \
    return each([&](int e) { return result; });
      SHARDLIB_CASE(select, bits(a, e) != 0 ? get(b, e) : get(c, e))
      SHARDLIB_CASE(from_int, Number(static_cast<T>(integer(a, e))))
      SHARDLIB_CASE(from_uint, Number(static_cast<T>(bits(a, e))))
      SHARDLIB_CASE(negate, -get(a, e))
      SHARDLIB_CASE(add, get(a, e) + get(b, e))
      SHARDLIB_CASE(subtract, get(a, e) - get(b, e))
      SHARDLIB_CASE(multiply, get(a, e) * get(b, e))
      SHARDLIB_CASE(divide, get(a, e) / get(b, e))
      SHARDLIB_CASE(less, of_bits(values_[a][e] < values_[b][e]))
      SHARDLIB_CASE(less_equal, of_bits(values_[a][e] <= values_[b][e]))
      SHARDLIB_CASE(equal, of_bits(values_[a][e] == values_[b][e]))
      SHARDLIB_CASE(int_add, of_bits(bits(a, e) + bits(b, e)))
      SHARDLIB_CASE(int_subtract, of_bits(bits(a, e) - bits(b, e)))
      SHARDLIB_CASE(int_multiply, of_bits(bits(a, e) * bits(b, e)))
      SHARDLIB_CASE(int_divide, of_bits(static_cast<u32>(quotient(integer(a, e), integer(b, e)))))
      SHARDLIB_CASE(uint_divide, of_bits(quotient(bits(a, e), bits(b, e))))
      SHARDLIB_CASE(int_remainder, of_bits(static_cast<u32>(remainder(integer(a, e), integer(b, e)))))
      SHARDLIB_CASE(uint_remainder, of_bits(remainder(bits(a, e), bits(b, e))))
      SHARDLIB_CASE(int_less, of_bits(integer(a, e) < integer(b, e)))
      SHARDLIB_CASE(uint_less, of_bits(bits(a, e) < bits(b, e)))
      SHARDLIB_CASE(int_less_equal, of_bits(integer(a, e) <= integer(b, e)))
      SHARDLIB_CASE(uint_less_equal, of_bits(bits(a, e) <= bits(b, e)))
      SHARDLIB_CASE(int_equal, of_bits(bits(a, e) == bits(b, e)))
      SHARDLIB_CASE(int_not, of_bits(bits(a, e) == 0))
      SHARDLIB_CASE(int_and, of_bits(bits(a, e) & bits(b, e)))
      SHARDLIB_CASE(int_or, of_bits(bits(a, e) | bits(b, e)))
      SHARDLIB_CASE(int_xor, of_bits(bits(a, e) ^ bits(b, e)))
#undef SHARDLIB_CASE
      case Op::real:
        return each([&](int) { return Number(static_cast<T>(number)); });
      case Op::integer:
        return each([&](int) { return of_bits(static_cast<u32>(static_cast<std::int64_t>(number))); });
      case Op::input:
        return;
    }
  }
  template <class I>
  SHARDLIB_FUNCTION static I quotient(I p, I q) {
    return shardlib::detail::Quotient{}(p, q);
  }
  template <class I>
  SHARDLIB_FUNCTION static I remainder(I p, I q) {
    return q == 0 || q == static_cast<I>(-1) ? (q == 0 || std::is_signed_v<I> ? I{0} : p % q) : p % q;
  }

  // Not set at first: an instruction's results are written before they are read.
  T values_[most][E];
  T slopes_[most][E][N > 0 ? N : 1];
};

/// A row of a map: arrays are the result's cotangent if there are derivatives, the operands, and what the row writes:
/// the result, or the cotangents of the operands that have a seed. Each lane takes E elements at once, so that decoding
/// an instruction costs less.
template <class T, std::size_t N, int E>
struct ProgramRow {
  shardlib::detail::MapProgram program;
  std::array<std::byte*, max_operands> data;
  std::array<DType, max_operands> dtypes;
  std::size_t operands;
  /// Which derivative each operand has; -1: none.
  std::array<std::int8_t, 4> seeds;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, const std::array<std::int64_t, max_operands>& offsets,
                                    const std::array<std::int64_t, max_operands>& strides, std::int64_t start,
                                    std::int64_t n) const {
    const std::int64_t step = (n + E - 1) / E;
    team.lanes(step, [&](std::int64_t i) {
      constexpr std::size_t first = N > 0 ? 1 : 0;
      // Elements beyond the end are the last one again, and are not written.
      const auto at = [&](std::size_t k, int e) {
        const std::int64_t element = i + e * step;
        return offsets[k] + (start + (element < n ? element : n - 1)) * strides[k];
      };
      const auto load = [&](std::size_t operand, DType dtype, const auto& put) {
        const std::size_t k = first + operand;
        with_pointer(dtype, data[k], [&](auto* x) {
          for (int e = 0; e < E; ++e) put(e, x[at(k, e)]);
        });
      };
      const ProgramRun<T, N, E> run(program, load, [&](std::size_t operand) { return int{seeds[operand]}; });
      const std::size_t last = program.count - 1;
      const auto kind = program.kinds[last];
      const std::size_t out = first + operands;
      if constexpr (N == 0) {
        with_pointer(dtypes[out], data[out], [&](auto* y) {
          using R = std::remove_reference_t<decltype(*y)>;
          for (int e = 0; e < E && i + e * step < n; ++e) y[at(out, e)] = run.template value<R>(last, kind, e);
        });
      } else {
        T cotangent[E];
        with_pointer(dtypes[0], data[0], [&](auto* ct) {
          using C = std::remove_reference_t<decltype(*ct)>;
          if constexpr (floating<C>)
            for (int e = 0; e < E; ++e) cotangent[e] = static_cast<T>(static_cast<accumulator_t<C>>(ct[at(0, e)]));
        });
        std::size_t k = out;
        for (std::size_t operand = 0; operand < operands; ++operand) {
          if (seeds[operand] < 0) continue;
          const auto by = static_cast<std::size_t>(seeds[operand]);
          with_pointer(dtypes[k], data[k], [&](auto* g) {
            using G = std::remove_reference_t<decltype(*g)>;
            if constexpr (floating<G>)
              for (int e = 0; e < E && i + e * step < n; ++e)
                g[at(k, e)] =
                    static_cast<G>(static_cast<accumulator_t<G>>(cotangent[e] * run.slope(last, by, kind, e)));
          });
          ++k;
        }
      }
    });
  }
};

}  // namespace shardlib::kernels::body
