// Kernels of elementwise.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "shardlib/kernels/strided.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib::kernels::body {

inline constexpr std::size_t max_operands = 10;

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
  static constexpr std::int64_t grain = 8192;
  Nest<max_operands> nest;
  Nest<max_operands>::Loop inner;
  std::int64_t rows = 0, pieces = 0, group = 0;

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
    constexpr std::int64_t grain = ElementwiseLoops::grain;
    const std::int64_t first = item / loops.pieces * loops.group, start = item % loops.pieces * grain;
    const std::int64_t n = std::min(grain, loops.inner.extent - start);
    Walk<max_operands> walk(loops.nest, first);
    for (std::int64_t r = first; r < std::min(loops.rows, first + loops.group); ++r, walk.next())
      row(team, walk.offsets, loops.inner.strides, start, n);
  }
};

/// Some neighbouring elements, which a lane reads or writes at once.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T values[N];
};
/// The pack at p; or, with a step of 0, of copies of the element there.
template <int N, class T>
SHARDLIB_FUNCTION Pack<std::remove_const_t<T>, N> load_pack(T* p, std::int64_t step) {
  using P = Pack<std::remove_const_t<T>, N>;
  if (step != 0) return *reinterpret_cast<const P*>(p);
  P pack;
  for (int k = 0; k < N; ++k) pack.values[k] = *p;
  return pack;
}
template <int N, class T>
SHARDLIB_FUNCTION void store_pack(T* p, const Pack<std::remove_const_t<T>, N>& pack) {
  if constexpr (!std::is_const_v<T>) *reinterpret_cast<Pack<T, N>*>(p) = pack;
}
/// Whether a lane may read and write packs of N elements of a row: they are neighbours, or copies of one that is only
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
      constexpr int some = ((sizeof(T) > 4) || ...) ? 4 : 8;
      if (n % some == 0 && (takes_packs<some, T>(at[I], strides[I]) && ...)) {
        team.lanes(n / some, [at, steps = strides, g = f](std::int64_t i) {
          packs<some>(g, steps, reinterpret_cast<T*>(at[I]) + i * some * steps[I]...);
        });
        return;
      }
    }
    team.lanes(n, [at, steps = strides, g = f](std::int64_t i) { g(reinterpret_cast<T*>(at[I])[i * steps[I]]...); });
  }
  // All is loaded before something is stored, so that loads do not wait for stores. What g overwrites without reading
  // is not loaded.
  template <int N>
  SHARDLIB_FUNCTION static void packs(const F& g, const std::array<std::int64_t, max_operands>& steps, T*... p) {
    apply_packs<N>(g, steps, std::index_sequence_for<T...>{}, p...);
  }
  template <int N, std::size_t... I>
  SHARDLIB_FUNCTION static void apply_packs(const F& g, const std::array<std::int64_t, max_operands>& steps,
                                            std::index_sequence<I...> /*operands*/, T*... p) {
    apply_loaded<N>(g, load_pack<N>(p, steps[I])..., p...);
  }
  template <int N>
  SHARDLIB_FUNCTION static void apply_loaded(const F& g, Pack<std::remove_const_t<T>, N>... pack, T*... p) {
    for (int k = 0; k < N; ++k) g(static_cast<T&>(pack.values[k])...);
    (store_pack<N>(p, pack), ...);
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
