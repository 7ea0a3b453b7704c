// Kernels of elementwise.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include "shardlib/kernels/strided.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib::kernels::body {

inline constexpr std::size_t max_operands = 10;

/// Sets an element.
template <class D>
struct ConstantElement {
  D value;
  SHARDLIB_FUNCTION void operator()(D& y) const { y = value; }
};

/// Converts an element, over its accumulator's type.
struct ConvertElement {
  template <class From, class To>
  SHARDLIB_FUNCTION void operator()(const From& x, To& y) const {
    y = static_cast<To>(static_cast<accumulator_t<From>>(x));
  }
};

/// Adds an element to a sum in its accumulator's type.
struct AddElement {
  template <class T, class A>
  SHARDLIB_FUNCTION void operator()(const T& x, A& sum) const {
    sum += static_cast<A>(x);
  }
};

/// The loops of an elementwise op: an item is a piece of a row, or a group of short rows.
struct ElementwiseLoops {
  Nest<max_operands> nest;
  Nest<max_operands>::Loop inner;
  std::int64_t rows = 0, pieces = 0, group = 0;
  std::int64_t grain = 0;  ///< the most elements of an item

  [[nodiscard]] constexpr std::int64_t items() const { return group == 0 ? 0 : (rows + group - 1) / group * pieces; }
};

/// Calls row(team, offsets, strides, start, n) for each piece of a row: elements start to start + n of the innermost
/// loop.
template <class Row>
struct Elementwise {
  ElementwiseLoops loops;
  Row row;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    const std::int64_t first = item / loops.pieces * loops.group, start = item % loops.pieces * loops.grain;
    const std::int64_t n = std::min(loops.grain, loops.inner.extent - start);
    const std::int64_t end = std::min(loops.rows, first + loops.group);
    if constexpr (Team::single) {
      Walk<max_operands> walk(loops.nest, first);
      for (std::int64_t r = first; r < end; ++r, walk.next()) row(team, walk.offsets, loops.inner.strides, start, n);
    } else {  // offsets in registers; a lane of a GPU would keep a walk in memory
      for (std::int64_t r = first; r < end; ++r) row(team, loops.nest.offsets(r), loops.inner.strides, start, n);
    }
  }
};

/// Some neighboring elements, which a lane reads or writes at once.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T values[N];
};
/// The pack at p; or, with a step of 0, of copies of the element there.
template <int N, class T>
SHARDLIB_FUNCTION Pack<std::remove_const_t<T>, N> load_pack(T* p, std::int64_t step) {
  using P = Pack<std::remove_const_t<T>, N>;
#if defined(__CUDA_ARCH__)  // nvcc takes elements of two bytes four at a time
  if constexpr (sizeof(P) == 16)
    if (step != 0) return std::bit_cast<P>(*reinterpret_cast<const uint4*>(p));
#endif
  if (step != 0) return *reinterpret_cast<const P*>(p);
  P pack;
  for (int k = 0; k < N; ++k) pack.values[k] = *p;
  return pack;
}
template <int N, class T>
SHARDLIB_FUNCTION void store_pack(T* p, const Pack<std::remove_const_t<T>, N>& pack) {
#if defined(__CUDA_ARCH__)
  if constexpr (!std::is_const_v<T> && sizeof(pack) == 16) {
    *reinterpret_cast<uint4*>(p) = std::bit_cast<uint4>(pack);
    return;
  }
#endif
  if constexpr (!std::is_const_v<T>) *reinterpret_cast<Pack<T, N>*>(p) = pack;
}
/// Whether a lane may read and write packs of N elements of a row: they are neighbors, or copies of one that is only
/// read.
template <int N, class T>
SHARDLIB_FUNCTION bool takes_packs(const std::byte* at, std::int64_t step) {
  return (step == 0 && std::is_const_v<T>) ||
         (step == 1 && reinterpret_cast<std::uintptr_t>(at) % alignof(Pack<std::remove_const_t<T>, N>) == 0);
}

/// A row that applies F to elements of types T..., each lane to its own.
template <class F, class... T>
struct ElementRow {
  F f;
  std::array<std::byte*, sizeof...(T)> data;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, const std::array<std::int64_t, max_operands>& offsets,
                                    const std::array<std::int64_t, max_operands>& strides, std::int64_t start,
                                    std::int64_t n) const {
    run(team, offsets, strides, start, n, std::index_sequence_for<T...>{});
  }

 private:
  template <class Team, std::size_t... I>
  SHARDLIB_FUNCTION void run(const Team& team, const std::array<std::int64_t, max_operands>& offsets,
                             const std::array<std::int64_t, max_operands>& strides, std::int64_t start, std::int64_t n,
                             std::index_sequence<I...> /*operands*/) const {
    const std::array<std::byte*, sizeof...(T)> at{data[I] + (offsets[I] + start * strides[I]) *
                                                                static_cast<std::int64_t>(sizeof(T))...};
    if constexpr (!Team::single) {
      // Packs of at most 16 bytes, so that neighboring lanes of a GPU read or write neighboring packs at once. A lane
      // loads some of them before it stores the first: those it awaits together.
      constexpr int some = static_cast<int>(std::min<std::size_t>(8, 16 / std::max({sizeof(T)...})));
      constexpr std::size_t bytes = some * (sizeof(T) + ...);
      constexpr int ahead = bytes <= 32 ? 4 : bytes <= 96 ? 2 : 1;
      if (n % some == 0 && (takes_packs<some, T>(at[I], strides[I]) && ...)) {
        using Packs = std::tuple<Pack<std::remove_const_t<T>, some>...>;
        const auto load = [&at, &strides](std::int64_t i) {
          return Packs(load_pack<some>(reinterpret_cast<T*>(at[I]) + i * some * strides[I], strides[I])...);
        };
        const auto store = [&at, this](std::int64_t i, Packs packs) {
          for (int k = 0; k < some; ++k) f(static_cast<T&>(std::get<I>(packs).values[k])...);
          (store_pack<some>(reinterpret_cast<T*>(at[I]) + i * some, std::get<I>(packs)), ...);
        };
        return team.template stream<ahead>(n / some, load, store);
      }
    }
    team.lanes(n, [at, steps = strides, g = f](std::int64_t i) { g(reinterpret_cast<T*>(at[I])[i * steps[I]]...); });
  }
};

/// Applies F to n contiguous elements of arrays that are not in the caches, `grain` of them an item.
template <class F, class... T>
struct Nontemporal {
  static constexpr std::int64_t grain = 1 << 14;
  std::int64_t n;
  F f;
  std::array<std::byte*, sizeof...(T)> data;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    run(team, item, std::index_sequence_for<T...>{});
  }

 private:
  template <class Team, std::size_t... I>
  SHARDLIB_FUNCTION void run(const Team& team, std::int64_t item, std::index_sequence<I...> /*operands*/) const {
    constexpr std::int64_t block = 128;  // longer ones would evict each other from the first-level cache
    const std::int64_t end = std::min(n, (item + 1) * grain);
    for (std::int64_t begin = item * grain; begin < end; begin += block) {
      if constexpr (Team::single) (load_ahead(reinterpret_cast<const T*>(data[I]), begin + block, block), ...);
      unit(team, std::min(block, end - begin), f, reinterpret_cast<T*>(data[I]) + begin...);
    }
  }
  template <class Team>
  SHARDLIB_FUNCTION static void unit(const Team& team, std::int64_t n, const F& f, T*... p) {
    team.lanes(n, [f, p...](std::int64_t i) { f(p[i]...); });  // copies f, so that stores cannot change it
  }
};

}  // namespace shardlib::kernels::body
