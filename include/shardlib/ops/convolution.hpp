// Windows that move along one or several lengths. `windows` returns the elements under each window. `conv_unreduced`
// multiplies them with weights and sums on each device, as an einsum does: a sum over devices stays partial.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "shardlib/ops/einsum.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/types/numbers_in.hpp"

namespace shardlib {

/// The moves of windows along one length: `stride` elements from one to the next, over the operand with zeros `before`
/// and `after` it. The elements of a window are `dilation` apart.
struct Window {
  std::int64_t stride = 1, before = 0, after = 0, dilation = 1;
};

namespace detail {

/// One length: window element k of position n is the operand's element n * stride + k * dilation - before.
struct WindowLoop {
  std::int64_t elements = 1;  ///< of a window
  std::int64_t stride = 1, before = 0, dilation = 1;
};
using WindowLoops = Small<WindowLoop, max_dims>;
struct WindowSizes {
  GlobalSizes global;  ///< of the result
  WindowLoops loops;
};
/// The elements of a window have the sizes of `w`, or, without weights, those of `sizes`. Throws if a window is larger
/// than the operand with its zeros, or a name has two sizes.
WindowSizes window_sizes(const OpInfo& op, const OpParts& lengths, const TensorSpec& out, const ValuePtr& x,
                         const ValuePtr& w, const Sizes& sizes, std::initializer_list<Window> windows);

/// The einsum of `y` with the elements of `x` under each window, whose spec is `seen`. If `transposed`, those are the
/// einsum of `x` and `y`, and each element of the result is the sum of its own under all windows.
template <class D>
struct Convolution {
  const kernels::EinsumPlan* plan;
  ValuePtr x, y;
  const OpParts* lengths;
  const TensorSpec* seen;
  WindowLoops loops;
  bool transposed;
  Buffer operator()(const Value& out) const;
};
template <class D>
NumbersIn numbers_in(const Convolution<D>& kernel) {
  return numbers_in(kernel.loops);
}

template <OpSpec Lengths, bool Transposed, class Out, class X, class Y, class... V>
Out convolution(const OpInfo& op, const X& x, const Y& y, const GlobalSizes& global, const WindowLoops& loops,
                const V&... vjps) {
  static constexpr const OpParts& lengths = parsed_op<Lengths>.parts;
  static constexpr TensorSpec seen =
      rules::under_windows(parsed<(Transposed ? Out::spec : X::spec)>, lengths.in[0], lengths.in[1], lengths.out);
  static constexpr OpSpec product =
      Transposed ? op_spec_of(X::spec, Y::spec, spec_of(seen)) : op_spec_of(spec_of(seen), Y::spec, Out::spec);
  static_assert(rules::detail_::einsum(parsed_op<product>.parts).empty(),
                "a convolution is an einsum over its windows");
  return record<"conv_unreduced", Out>(
      op, x.device(), global,
      Convolution<typename X::value_type>{&einsum_plan<product>(), x.value(), y.value(), &lengths, &seen, loops,
                                          Transposed},
      vjps...);
}
/// Windows that move by one element are, seen from the operand, windows over the cotangent, backwards. Others would
/// find most of their elements between those of the cotangent, so they are added to the operand's.
template <OpSpec Lengths, class Due>
struct ConvOperandVjp {
  static constexpr OpSpec reverse = [] {
    constexpr const OpParts& lengths = parsed_op<Lengths>.parts;
    return op_spec_of(spec_of(lengths.out), spec_of(lengths.in[1]), spec_of(lengths.in[0]));
  }();
  WindowLoops loops;
  template <class Ct, class W>
  auto operator()(const Ct& ct, const W& w, const GlobalSizes& global) const {
    const OpInfo op{"conv_unreduced", Due::spec, {}};
    WindowLoops backwards = loops;
    for (WindowLoop& loop : backwards) {
      if (loop.stride != 1) return convolution<Lengths, true, Due>(op, ct, w, global, loops);
      loop.before = -loop.before;
      loop.dilation = -loop.dilation;
    }
    return convolution<reverse, false, Due>(op, ct, w, global, backwards);
  }
};
template <OpSpec Lengths, class Due>
struct ConvWeightsVjp {
  WindowLoops loops;
  template <class Ct, class X>
  auto operator()(const Ct& ct, const X& x, const GlobalSizes& global) const {
    return convolution<Lengths, false, Due>(OpInfo{"conv_unreduced", Due::spec, {}}, x, ct, global, loops);
  }
};

struct TakeWindows {
  const OpParts* lengths;
  WindowLoops loops;
  Buffer operator()(const Value& in, const Value& out) const;
};
inline NumbersIn numbers_in(const TakeWindows& kernel) {
  return numbers_in(kernel.loops);
}
/// Its transpose: each element of the result is the sum of its cotangents under all windows.
struct SumWindows {
  const OpParts* lengths;
  WindowLoops loops;
  Buffer operator()(const Value& in, const Value& out) const;
};
template <class Due>
struct WindowsVjp {
  SumWindows kernel;
  template <class Ct>
  auto operator()(const Ct& ct, const GlobalSizes& global) const {
    return record_linear<Due>(OpInfo{"windows", Due::spec, {}}, ct, global, kernel,
                              TakeWindows{kernel.lengths, kernel.loops});
  }
};

}  // namespace detail

/// The elements under windows that move along some lengths, as further dims: `sizes` has the elements of a window.
/// `Lengths` is as of conv_unreduced. With a reduction it is a pooling: `max<"B N K C -> B N C">` of it. Throws if a
/// window is larger than the operand with its zeros. Backward: the sum over all windows that have an element.
/// `windows<"L, K -> N">(x, {{"K", 3}}, {.stride = 2})` of "B/d L C" is "B/d N K C"
template <OpSpec Lengths, dtype D, Spec S>
auto windows(const Tensor<D, S>& x, const Sizes& sizes, std::initializer_list<Window> moves,
             Site site = Site::current()) -> Tensor<D, detail::result_for<D, rules::windows, Lengths, S>> {
  using Out = Tensor<D, detail::result_for<D, rules::windows, Lengths, S>>;
  using Due = Dual<Tensor<D, S>, detail::axes_of<S, Out::spec>()>;
  static constexpr const OpParts& lengths = detail::parsed_op<Lengths>.parts;
  const detail::Calling op{"windows", Lengths, site};
  const auto [global, loops] =
      detail::window_sizes(op, lengths, detail::parsed<Out::spec>, x.value(), nullptr, sizes, moves);
  return detail::record_unary<"windows", Out>(op, x, global, detail::TakeWindows{&lengths, loops},
                                              detail::vjp(x, detail::WindowsVjp<Due>{{&lengths, loops}}));
}
/// As above, with the same window along each length. `windows<"H W, P Q -> Y X">(x, {{"P", 2}, {"Q", 2}}, {.stride =
/// 2})`
template <OpSpec Lengths, dtype D, Spec S>
auto windows(const Tensor<D, S>& x, const Sizes& sizes, Window move = {}, Site site = Site::current())
    -> Tensor<D, detail::result_for<D, rules::windows, Lengths, S>> {
  return windows<Lengths>(x, sizes, std::initializer_list<Window>{move}, site);
}
SHARDLIB_FORM_WITH_SIZES(windows, "windows<\"L, K -> N\">(x, {{\"K\", 3}})")

/// The convolution of any number of lengths, with windows of its own along each: `Lengths` pairs the operand's lengths
/// with the dims of the weights' window and the result's lengths; the other dims follow einsum_unreduced. So a dim that
/// the result keeps of both makes it depthwise. A length whose name stays keeps its size. Weights are not flipped.
/// Throws if a window is larger than the operand with its zeros. Backward: two convolutions.
/// `conv_unreduced<"B H W C, P Q C F -> B Y X F", "H W, P Q -> Y X">(x, w, {{.stride = 2}, {.stride = 2}})`
template <OpSpec O, OpSpec Lengths, dtype D, Spec S, dtype E, Spec T>
auto conv_unreduced(const Tensor<D, S>& x, const Tensor<E, T>& w, std::initializer_list<Window> windows,
                    Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"conv_unreduced", D> && detail::one_dtype<"conv_unreduced", D, E>, D>,
              detail::result_for<D, rules::conv, O, Lengths, S, T>> {
  using Out = Tensor<D, detail::result_for<D, rules::conv, O, Lengths, S, T>>;
  static constexpr Spec axes = detail::axes_of<S, T, Out::spec>();
  const detail::Calling op{"conv_unreduced", O, site};
  const auto [global, loops] = detail::window_sizes(op, detail::parsed_op<Lengths>.parts, detail::parsed<Out::spec>,
                                                    x.value(), w.value(), {}, windows);
  return detail::convolution<Lengths, false, Out>(
      op, x, w, global, loops,
      detail::vjp(x, detail::save(w), detail::ConvOperandVjp<Lengths, Dual<Tensor<D, S>, axes>>{loops}),
      detail::vjp(w, detail::save(x), detail::ConvWeightsVjp<Lengths, Dual<Tensor<E, T>, axes>>{loops}));
}
/// As above, with the same window along each length. This one is causal and depthwise, as Mamba's:
/// `conv_unreduced<"B L C, K C -> B L C", "L, K -> L">(x, w, {.before = 3})` with K of 4
template <OpSpec O, OpSpec Lengths, dtype D, Spec S, dtype E, Spec T>
auto conv_unreduced(const Tensor<D, S>& x, const Tensor<E, T>& w, Window window = {}, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"conv_unreduced", D> && detail::one_dtype<"conv_unreduced", D, E>, D>,
              detail::result_for<D, rules::conv, O, Lengths, S, T>> {
  return conv_unreduced<O, Lengths>(x, w, std::initializer_list<Window>{window}, site);
}
SHARDLIB_FORM(conv_unreduced, "conv_unreduced<\"B L C, K C F -> B N F\", \"L, K -> N\">(x, w, {.stride = 2})")

}  // namespace shardlib
