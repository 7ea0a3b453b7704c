// Definitions of layout.hpp.
#pragma once

#include "shardlib/kernels/layout.hpp"

#include <utility>

#include "shardlib/kernels/body/layout.hpp"
#include "shardlib/kernels/strided.hpp"

namespace shardlib::kernels {

namespace detail {

template <class U>
void copy_nest(const Exec& exec, const Nest<2>& nest, const U* in, U* out) {
  const auto inner = nest.depth > 0 ? nest.loop(nest.depth - 1) : Nest<2>::Loop();
  int fastest = -1;  // the loop along which `in` is contiguous, if it is not the innermost one
  for (int d = 0; d + 1 < nest.depth; ++d) {
    if (nest.loop(d).strides[0] == 1 && inner.strides[0] > 1 && inner.strides[1] == 1) fastest = d;
  }
  if (fastest < 0) {
    const body::CopyRows<U> kernel{body::RowLoops<2>(nest, body::CopyRows<U>::grain), in, out};
    return exec.for_items(kernel.loops.items(), 0, kernel);
  }
  using Kernel = body::Transpose<U>;
  const auto row = nest.loop(fastest);
  Nest<2> others = nest;
  others.depth -= 2;  // without the innermost loop, and without that one
  for (int d = fastest; d < others.depth; ++d) others.loop(d) = nest.loop(d + 1);
  const std::int64_t bands = (row.extent + Kernel::height - 1) / Kernel::height;
  exec.for_items(others.count() * bands, 0,
                 Kernel{others, row.extent, inner.extent, bands, inner.strides[0], row.strides[1], in, out});
}

}  // namespace detail

SHARDLIB_INLINE void copy_strided(const Exec& exec, std::size_t element_size, std::span<const std::int64_t> shape,
                                  const void* in, std::span<const std::int64_t> in_strides, void* out,
                                  std::span<const std::int64_t> out_strides) {
  if (product(shape) == 0) return;
  const bool word = element_size == 1 || element_size == 2 || element_size == 4 || element_size == 8;
  const auto unit = word ? std::int64_t{1} : static_cast<std::int64_t>(element_size);
  // Sorts the loops by the output's strides (insertion sort), so that they run in the order of its memory.
  DimVector order;
  const auto stride = [&](std::int64_t d) { return out_strides[static_cast<std::size_t>(d)]; };
  for (std::size_t d = 0; d < shape.size(); ++d) {
    order.push(static_cast<std::int64_t>(d));
    for (int i = order.count - 1; i > 0 && stride(order[i]) > stride(order[i - 1]); --i) {
      std::swap(order.at(i), order.at(i - 1));
    }
  }
  Nest<2> nest;
  for (const std::int64_t i : order.span()) {
    const auto d = static_cast<std::size_t>(i);
    nest.push(shape[d], {in_strides[d] * unit, out_strides[d] * unit});
  }
  if (!word) nest.push(unit, {1, 1});  // an element without a matching word type is a run of bytes
  const auto run = [&]<class U>(U) { detail::copy_nest(exec, nest, static_cast<const U*>(in), static_cast<U*>(out)); };
  switch (element_size) {
    case 2:
      return run(Word<2>{});
    case 4:
      return run(Word<4>{});
    case 8:
      return run(Word<8>{});
    default:
      return run(Word<1>{});
  }
}

SHARDLIB_INLINE void zero_strided(const Exec& exec, std::size_t element_size, std::span<const std::int64_t> shape,
                                  void* out, std::span<const std::int64_t> out_strides) {
  if (product(shape) == 0) return;
  const auto element = static_cast<std::int64_t>(element_size);
  Nest<1> nest;
  for (std::size_t d = 0; d < shape.size(); ++d) nest.push(shape[d], {out_strides[d] * element});
  const body::RowLoops<1> loops(nest, body::CopyRows<std::byte>::grain);
  exec.for_items(loops.items(), 0, body::ZeroRows{loops, element, static_cast<std::byte*>(out)});
}

SHARDLIB_INLINE void permute(const Exec& exec, std::size_t element_size, const void* in,
                             std::span<const std::int64_t> shape, std::span<const int> perm, void* out) {
  const DimVector strides = row_major(shape);
  DimVector out_shape;
  DimVector in_strides;
  for (const int d : perm) {
    out_shape.push(shape[static_cast<std::size_t>(d)]);
    in_strides.push(strides[d]);
  }
  copy_strided(exec, element_size, out_shape, in, in_strides, out, row_major(out_shape));
}

}  // namespace shardlib::kernels
