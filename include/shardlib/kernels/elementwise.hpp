// Elementwise loops: one user function over any number of strided, broadcasting arrays.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::kernels {

namespace detail {
using Strides = std::array<std::int64_t, max_rank>;
SHARDLIB_INLINE Strides padded(std::span<const std::int64_t> strides);
}  // namespace detail

/// One array of an elementwise op: const elements for an input. Strides in elements; 0 broadcasts.
template <class T>
struct Operand {
  T* data = nullptr;
  detail::Strides strides{};

  Operand() = default;
  Operand(T* p, std::span<const std::int64_t> s) : data(p), strides(detail::padded(s)) {}
};

namespace detail {

inline constexpr std::size_t max_operands = 10;
inline constexpr std::int64_t tile_size = 256;

/// An operand without its type.
struct ErasedOperand {
  std::byte* data = nullptr;
  std::size_t element = 0;  ///< bytes
  bool output = false;
  const Strides* strides = nullptr;
  std::int64_t stride = 0;  ///< along the innermost loop
};

/// f over n contiguous elements of each operand.
using UnitLoop = void (*)(const void* f, std::int64_t n, std::byte* const* data);

/// Walks the loops; a row that is contiguous in every operand goes to `loop` in place, others through tiles. Not
/// inlined, and free of f's type, so that each further f costs the compiler one loop.
SHARDLIB_INLINE void apply_erased(const Exec& exec, std::span<const std::int64_t> shape,
                                  std::span<ErasedOperand> operands, UnitLoop loop, const void* f);

/// The one loop in which f is compiled.
template <class F, class... T>
struct Loop {
  static void run(const void* f, std::int64_t n, std::byte* const* data) {
    run(*static_cast<const F*>(f), n, data, std::index_sequence_for<T...>{});
  }
  template <std::size_t... I>
  static void run(const F& f, std::int64_t n, std::byte* const* data, std::index_sequence<I...> /*operands*/) {
    unit(n, f, reinterpret_cast<T*>(data[I])...);
  }
  static void unit(std::int64_t n, const F& f, T*... p) {
    independent(n, [f, p...](std::int64_t i) { f(p[i]...); });  // a copy of f, which the stores cannot change
  }
};

}  // namespace detail

/// Calls f(x...) with one reference into each operand, for every index. Outputs may be the same array as an input
/// (with the same strides), and must not broadcast. f must not depend on the order of calls.
template <class F, class... T>
void apply(const Exec& exec, std::span<const std::int64_t> shape, const F& f, const Operand<T>&... operands) {
  static_assert(sizeof...(T) <= detail::max_operands);
  static_assert(((sizeof(T) <= 8) && ...));
  std::array<detail::ErasedOperand, sizeof...(T)> erased{
      detail::ErasedOperand{const_cast<std::byte*>(reinterpret_cast<const std::byte*>(operands.data)), sizeof(T),
                            !std::is_const_v<T>, &operands.strides}...};
  detail::apply_erased(exec, shape, erased, &detail::Loop<F, T...>::run, &f);
}

/// The same over n contiguous elements.
template <class F, class... T>
void apply_flat(const Exec& exec, std::int64_t n, const F& f, T*... data) {
  static constexpr std::array<std::int64_t, 1> unit{1};
  apply(exec, std::span<const std::int64_t>(&n, 1), f, Operand<T>(data, unit)...);
}

/// The same for what comes from memory, as weights and their moments do: it is loaded ahead of the loop, which is a
/// waste of time where the caches have it.
template <class F, class... T>
void apply_nontemporal(const Exec& exec, std::int64_t n, const F& f, T*... data) {
  constexpr std::int64_t grain = 1 << 14, block = 128;  // longer blocks would push each other out of the first cache
  const detail::UnitLoop loop = &detail::Loop<F, T...>::run;
  exec.for_each((n + grain - 1) / grain, [&, loop](std::int64_t item) {
    const std::int64_t end = std::min(n, (item + 1) * grain);
    for (std::int64_t begin = item * grain; begin < end; begin += block) {
      (load_ahead(data, begin + block, block), ...);
      std::byte* const at[] = {const_cast<std::byte*>(reinterpret_cast<const std::byte*>(data + begin))...};
      loop(&f, std::min(block, end - begin), at);
    }
  });
}

}  // namespace shardlib::kernels

#ifndef SHARDLIB_COMPILED
#include "shardlib/kernels/impl/elementwise.hpp"
#endif
