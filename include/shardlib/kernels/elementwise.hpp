// Elementwise loops: one function over any number of strided, broadcasting arrays.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/body/elementwise.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::kernels {

namespace detail {
using Strides = std::array<std::int64_t, max_rank>;
SHARDLIB_INLINE Strides padded(std::span<const std::int64_t> strides);
}  // namespace detail

/// One array of an elementwise op. An input has const elements. Strides are in elements; 0 broadcasts.
template <class T>
struct Operand {
  T* data = nullptr;
  detail::Strides strides{};

  Operand() = default;
  Operand(T* p, std::span<const std::int64_t> s) : data(p), strides(detail::padded(s)) {}
};

namespace detail {

using body::max_operands;

/// A type-erased operand.
struct ErasedOperand {
  std::byte* data = nullptr;
  std::size_t element = 0;  ///< size of an element in bytes
  bool output = false;
  const Strides* strides = nullptr;
  std::int64_t stride = 0;  ///< stride of the innermost loop
};

/// Applies f to n contiguous elements of each operand.
using UnitLoop = void (*)(const void* f, std::int64_t n, std::byte* const* data);

/// The loops over the operands' shape, without those of size 1. Sets the operands' innermost strides.
SHARDLIB_INLINE body::ElementwiseLoops elementwise_loops(const Exec& exec, std::span<const std::int64_t> shape,
                                                         std::span<ErasedOperand> operands);

/// The size of an F whose bytes are a copy of it, or else 0.
template <class F>
inline constexpr std::size_t plain_size = std::is_trivially_copyable_v<F> ? sizeof(F) : 0;

/// Runs the loops. A row that is contiguous in every operand goes to `loop` in place; others are copied through
/// tiles. This function is not inlined and does not depend on f's type, so that each f costs the compiler only one
/// loop. A device copies f, of `f_bytes` as plain_size says; it waits for the kernel if f is larger than 64 bytes or
/// not plain.
SHARDLIB_INLINE void apply_erased(const Exec& exec, std::span<const std::int64_t> shape,
                                  std::span<ErasedOperand> operands, UnitLoop loop, const void* f, std::size_t f_bytes);

}  // namespace detail

#if defined(SHARDLIB_TYPED_KERNELS)
/// Whether kernels hold the functions of their loops: always with Kokkos, and on GPUs, which cannot call a host's loop
/// through a pointer.
inline bool takes_typed_kernels([[maybe_unused]] const Exec& exec) {
#if defined(SHARDLIB_LAUNCHER_KOKKOS)
  return true;
#else
  return exec.gpu() != nullptr;
#endif
}
/// Runs a kernel that holds its function, where takes_typed_kernels.
template <class Kernel>
void run_typed(const Exec& exec, std::int64_t items, const Kernel& kernel) {
#if defined(SHARDLIB_LAUNCHER_KOKKOS)
  exec.for_items(items, 0, kernel);
#else
  exec.for_items_on_gpu(items, 0, kernel);
#endif
}
#endif

/// Calls f(x...) for every index, with one reference into each operand. An output may be the same array as an input,
/// with the same strides. It must not broadcast. f must not depend on the order of calls.
template <class F, class... T>
void apply(const Exec& exec, std::span<const std::int64_t> shape, const F& f, const Operand<T>&... operands) {
  static_assert(sizeof...(T) <= detail::max_operands);
  static_assert(((sizeof(T) <= 8) && ...));
  std::array<detail::ErasedOperand, sizeof...(T)> erased{
      detail::ErasedOperand{const_cast<std::byte*>(reinterpret_cast<const std::byte*>(operands.data)), sizeof(T),
                            !std::is_const_v<T>, &operands.strides}...};
#if defined(SHARDLIB_TYPED_KERNELS)
  if (takes_typed_kernels(exec)) {
    const auto loops = detail::elementwise_loops(exec, shape, erased);
    const body::ElementRow<F, T...> row{f,
                                        {const_cast<std::byte*>(reinterpret_cast<const std::byte*>(operands.data))...}};
    return run_typed(exec, loops.items(), body::Elementwise<body::ElementRow<F, T...>>{loops, row});
  }
#endif
  detail::apply_erased(exec, shape, erased, &ElementLoop<F, T...>::run, &f, detail::plain_size<F>);
}

/// As above, over n contiguous elements.
template <class F, class... T>
void apply_flat(const Exec& exec, std::int64_t n, const F& f, T*... data) {
  static constexpr std::array<std::int64_t, 1> unit{1};
  apply(exec, std::span<const std::int64_t>(&n, 1), f, Operand<T>(data, unit)...);
}

/// As above, for data that is not in the caches, such as weights and their moments. It loads the data into the caches
/// ahead of the loop, which costs time if the data is there already.
template <class F, class... T>
void apply_nontemporal(const Exec& exec, std::int64_t n, const F& f, T*... data) {
#if defined(SHARDLIB_LAUNCHER_CUDA)
  if (exec.gpu() != nullptr) return apply_flat(exec, n, f, data...);
#endif
  using Kernel = body::Nontemporal<F, T...>;
  exec.for_items((n + Kernel::grain - 1) / Kernel::grain, 0,
                 Kernel{n, f, {const_cast<std::byte*>(reinterpret_cast<const std::byte*>(data))...}});
}

}  // namespace shardlib::kernels

#ifndef SHARDLIB_COMPILED
#include "shardlib/kernels/impl/elementwise.hpp"
#endif
