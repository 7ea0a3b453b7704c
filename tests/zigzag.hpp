// Tensors in zigzag order, from those in the order of positions, and back.
#pragma once

#include <type_traits>

#include "shardlib/shapes.hpp"

namespace shardlib::test {

/// The zigzag order of a sharded length, "L/s" of x.
template <Spec Length, Spec Axes, class X>
auto zigzag_order(const X& x) {
  constexpr auto dim = shardlib::detail::parsed<Length>.dims[0].name;
  return sequence_positions<Length>(Mesh<Axes>(x.device()), x.size(dim), SequenceOrder::zigzag);
}

// The elements of x in zigzag order along the length, ZIGZAG(x, "d s", "B/d ", "L", "/s", "s", " K") of "B/d L/s K" on
// a Mesh<"d s">. Rows of a matrix pick them, so numbers stay the same, and cotangents go the other way.
#define ZIGZAG(x, mesh, before, length, axes, over_axes, after)                          \
  einsum_unreduced<length axes " J, " before "J" after " -> " before length axes after>( \
      one_hot<"J", typename std::decay_t<decltype(x)>::value_type>(                      \
          ::shardlib::test::zigzag_order<length axes, mesh>(x), (x).size(length)),       \
      rename<length " -> J">(all_gather<over<over_axes>>(x)))
// The elements of x, which is in zigzag order, in the order of positions.
#define UNZIGZAG(x, mesh, before, length, axes, over_axes, after)                                                    \
  rename<"J -> " length>(einsum_unreduced<"I J" axes ", " before "I" after " -> " before "J" axes after>(            \
      one_hot<"J" axes, typename std::decay_t<decltype(x)>::value_type>(                                             \
          rename<length " -> I">(all_gather<over<over_axes>>(::shardlib::test::zigzag_order<length axes, mesh>(x))), \
          (x).size(length)),                                                                                         \
      rename<length " -> I">(all_gather<over<over_axes>>(x))))

}  // namespace shardlib::test
