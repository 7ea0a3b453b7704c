// Ops along one unsharded dim: softmax, rms_norm, layer_norm, rope.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

#include "shardlib/ops/arithmetic.hpp"
#include "shardlib/ops/elementwise.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/ops/sequences.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib {

namespace detail {
/// Records the kernel of a VJP along one dim, of the cotangent `ct` and of `x`, with its VJPs.
template <class K>
ValuePtr record_rows_vjp(const OpInfo& op, const K& kernel);

template <class D>
struct Softmax {
  int dim;
  Buffer operator()(const Value& in, const Value& out) const;
};
template <class D>
struct SoftmaxBackward {
  ValuePtr ct, x;  ///< x: the result of softmax
  int dim;
  Buffer operator()(const Value& out) const;
};
struct SoftmaxVjp {
  OpInfo op;
  int dim;
  template <class Ct>
  auto operator()(const Ct& ct, const auto& y) const {
    return Ct(record_rows_vjp(op, SoftmaxBackward<typename Ct::value_type>{ct.value(), y.value(), dim}));
  }
};
}  // namespace detail

/// exp(x) / sum(exp(x)) along an unsharded dim. Backward: one kernel. `softmax<"Klen">(logits)`
template <DimName Dim, dtype D, Spec S>
auto softmax(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::if_float<"softmax", D>, detail::named_result_for<D, rules::softmax, "softmax", Dim, S>> {
  constexpr int dim = detail::parsed<S>.find(Dim);
  const detail::Calling op{"softmax", Dim, site};
  return detail::record_unary<"softmax", Tensor<D, S>>(
      op, x, detail::sizes_of(x.value()), detail::Softmax<D>{dim},
      detail::vjp_of_result(x, detail::save(), detail::SoftmaxVjp{op, dim}));
}
SHARDLIB_NEEDS_DIM(softmax, "softmax<\"M\">(x)")

namespace detail {
/// Throws if the epsilon of a norm is negative or not finite: the roots would be NaN.
void require_epsilon(const OpInfo& op, const ValuePtr& x, double epsilon);
enum class Norm { rms, layer };
template <Norm kind, class D>
struct Normalize {
  int dim;
  double epsilon;
  Buffer operator()(const Value& in, const Value& out) const;
};
template <Norm kind, class D>
struct NormalizeBackward {
  ValuePtr ct, x;
  int dim;
  double epsilon;
  Buffer operator()(const Value& out) const;
};
template <Norm kind>
struct NormalizeVjp {
  OpInfo op;
  int dim;
  double epsilon;
  template <class Ct, class X>
  auto operator()(const Ct& ct, const X& x) const {
    return Ct(
        record_rows_vjp(op, NormalizeBackward<kind, typename Ct::value_type>{ct.value(), x.value(), dim, epsilon}));
  }
};

/// The arguments of a norm with a scale, without the specs.
struct AffineNorm {
  OpInfo op;
  ValuePtr x, scale;
  ValuePtr bias;  ///< null in rms_norm
  int dim;
  double epsilon;
};
/// Records the op, whose result is in R. `due` holds the specs of the cotangents of x, scale and bias.
template <Norm kind, class D, class E, class R>
ValuePtr record_affine_norm(const AffineNorm& norm, const std::array<const TensorSpec*, 3>& due);

template <OpName Name, dtype D, dtype E, dtype F, class Out>
inline constexpr bool norm_dtypes =
    checked<rules::norm_dtypes, Name, dtype_v<D>, dtype_v<E>, dtype_v<F>, dtype_v<dtype_or<Out, D>>>::ok;
template <Norm kind, class Out, class X, class Scale>
Out affine_norm(AffineNorm norm, const X& x, const Scale& scale, const Scale* bias) {
  constexpr Spec axes = axes_of<X::spec, Scale::spec>();
  static constexpr Spec due_x = dual_spec<X::spec, axes>(), due_scale = dual_spec<Scale::spec, axes>();
  norm.x = x.value();
  norm.scale = scale.value();
  if (bias != nullptr) norm.bias = bias->value();
  return Out(record_affine_norm<kind, typename X::value_type, typename Scale::value_type, typename Out::value_type>(
      norm, {&parsed<due_x>, &parsed<due_scale>, &parsed<due_scale>}));
}
}  // namespace detail

/// Divides x by sqrt(mean(x^2) + epsilon) along an unsharded dim (Zhang and Sennrich 2019), without a scale.
/// `rms_norm<"M">(x)`
template <DimName Dim, dtype D, Spec S>
auto rms_norm(const Tensor<D, S>& x, double epsilon = 1e-6, Site site = Site::current())
    -> Tensor<detail::if_float<"rms_norm", D>, detail::named_result_for<D, rules::along, "rms_norm", Dim, S>> {
  constexpr int dim = detail::parsed<S>.find(Dim);
  const detail::Calling op{"rms_norm", Dim, site};
  detail::require_epsilon(op, x.value(), epsilon);
  return detail::record_unary<"rms_norm", Tensor<D, S>>(
      op, x, detail::sizes_of(x.value()), detail::Normalize<detail::Norm::rms, D>{dim, epsilon},
      detail::vjp(x, detail::save(x), detail::NormalizeVjp<detail::Norm::rms>{op, dim, epsilon}));
}
/// Computes cast<Out>(rms_norm<Dim>(x) * scale) in one kernel, and in f32 (f64 for f64). The result is in x's dtype, or
/// in the `Out` that the call states, f32 or bf16. The scale has the normalized dim alone, in x's dtype or, where x is
/// bf16, in f32. Backward: one kernel, and one that adds the scale's cotangents of groups of rows.
/// `rms_norm<"M">(x, scale)` of x "B/d M", scale "M", `rms_norm<"M", f32>(x, scale, 1e-5)`
template <DimName Dim, class Out = void, dtype D, Spec S, dtype E, Spec T>
auto rms_norm(const Tensor<D, S>& x, const Tensor<E, T>& scale, double epsilon = 1e-6, Site site = Site::current())
    -> Tensor<detail::after_t<detail::norm_dtypes<"rms_norm", D, E, E, Out>, detail::dtype_or<Out, D>>,
              detail::named_result_for<D, rules::scaled_norm, "rms_norm", Dim, S, T>> {
  using A = accumulator_t<D>;
  using R = detail::dtype_or<Out, D>;
  if (detail::differentiated_twice(x.value()))
    return cast<R>(detail::multiply(rms_norm<Dim>(cast<A>(x, site), epsilon, site), cast<A>(scale, site), site), site);
  return detail::affine_norm<detail::Norm::rms, Tensor<R, S>>(
      {detail::Calling{"rms_norm", Dim, site}, {}, {}, {}, detail::parsed<S>.find(Dim), epsilon}, x, scale,
      static_cast<const Tensor<E, T>*>(nullptr));
}
/// A compile error for a call without the dim, with other operands, or with a whole number, which is no epsilon.
template <DimName... Dim, class... Args>
requires(detail::tensor_first<Args...> &&
         !((std::is_same_v<Args, float> || detail::unfinished<Args>) || ...)) auto rms_norm(const Args&... args) {
  return detail::wrong_along<"rms_norm", "rms_norm<\"M\">(x, scale, 1e-6)", Dim...>(args...);
}
SHARDLIB_DTYPE_FIRST(rms_norm, "rms_norm<\"M\", bf16>(x, scale, 1e-6)")
/// A compile error for an operand that is not a tensor yet.
template <DimName Dim, class... Args>
requires(detail::unfinished<Args> || ...) auto rms_norm(const Args&... args) {
  return rms_norm<Dim>(detail::finished(args)...);
}
/// A compile error for the dtype of a result without a scale.
template <DimName Dim, dtype Out, dtype D, Spec S>
auto rms_norm(const Tensor<D, S>& x, double /*epsilon*/ = 1e-6) {
  return detail::wrong_call<"rms_norm",
                            "rms_norm<\"M\", bf16>(x, scale)`, or without a scale `cast<bf16>(rms_norm<\"M\">(x))">(x);
}
/// (x - mean) / sqrt(variance + epsilon) along an unsharded dim (Ba et al. 2016), without scale and bias.
/// `layer_norm<"M">(x)`
template <DimName Dim, dtype D, Spec S>
auto layer_norm(const Tensor<D, S>& x, double epsilon = 1e-5, Site site = Site::current())
    -> Tensor<detail::if_float<"layer_norm", D>, detail::named_result_for<D, rules::along, "layer_norm", Dim, S>> {
  constexpr int dim = detail::parsed<S>.find(Dim);
  const detail::Calling op{"layer_norm", Dim, site};
  detail::require_epsilon(op, x.value(), epsilon);
  return detail::record_unary<"layer_norm", Tensor<D, S>>(
      op, x, detail::sizes_of(x.value()), detail::Normalize<detail::Norm::layer, D>{dim, epsilon},
      detail::vjp(x, detail::save(x), detail::NormalizeVjp<detail::Norm::layer>{op, dim, epsilon}));
}
/// Computes cast<Out>(layer_norm<Dim>(x) * scale + bias) in one kernel, with the dtypes and the backward pass of
/// rms_norm with a scale. `layer_norm<"M">(x, scale, bias)` of x "B/d M", scale and bias "M", `layer_norm<"M", bf16>(x,
/// scale, bias, 1e-6)`
template <DimName Dim, class Out = void, dtype D, Spec S, dtype E, Spec T, dtype F, Spec U>
auto layer_norm(const Tensor<D, S>& x, const Tensor<E, T>& scale, const Tensor<F, U>& bias, double epsilon = 1e-5,
                Site site = Site::current())
    -> Tensor<detail::after_t<detail::norm_dtypes<"layer_norm", D, E, F, Out>, detail::dtype_or<Out, D>>,
              detail::named_result_for<D, rules::affine_norm, "layer_norm", Dim, S, T, U>> {
  using A = accumulator_t<D>;
  using R = detail::dtype_or<Out, D>;
  if (detail::differentiated_twice(x.value())) {
    const auto normal = layer_norm<Dim>(cast<A>(x, site), epsilon, site);
    return cast<R>(detail::add(detail::multiply(normal, cast<A>(scale, site), site), cast<A>(bias, site), site), site);
  }
  return detail::affine_norm<detail::Norm::layer, Tensor<R, S>>(
      {detail::Calling{"layer_norm", Dim, site}, {}, {}, {}, detail::parsed<S>.find(Dim), epsilon}, x, scale, &bias);
}
/// A compile error for a call without the dim, with other operands, or with a whole number, which is no epsilon.
template <DimName... Dim, class... Args>
requires(detail::tensor_first<Args...> &&
         !((std::is_same_v<Args, float> || detail::unfinished<Args>) || ...)) auto layer_norm(const Args&... args) {
  return detail::wrong_along<"layer_norm", "layer_norm<\"M\">(x, scale, bias, 1e-5)", Dim...>(args...);
}
SHARDLIB_DTYPE_FIRST(layer_norm, "layer_norm<\"M\", bf16>(x, scale, bias, 1e-5)")
/// A compile error for an operand that is not a tensor yet.
template <DimName Dim, class... Args>
requires(detail::unfinished<Args> || ...) auto layer_norm(const Args&... args) {
  return layer_norm<Dim>(detail::finished(args)...);
}
/// A compile error for the dtype of a result without scale and bias.
template <DimName Dim, dtype Out, dtype D, Spec S>
auto layer_norm(const Tensor<D, S>& x, double /*epsilon*/ = 1e-5) {
  return detail::wrong_call<
      "layer_norm", "layer_norm<\"M\", bf16>(x, scale, bias)`, or without both `cast<bf16>(layer_norm<\"M\">(x))">(x);
}

/// The angles of rotary positions: pair i of n/2 turns by position * base^(-2i/n) (Su et al. 2021). A `factor` above 1
/// stretches them to longer texts, in one of three ways. With a `context` of 0, each angle is divided by it (Chen et
/// al. 2023). With a `context`, as in Llama 3.1, angles whose wavelength is more than context / low_freq_factor are
/// divided, and those whose wavelength is less than context / high_freq_factor stay. In between, the frequency is
/// interpolated.
/// With `yarn` as well (Peng et al. 2023), the pairs up to the one that turns beta_fast times in `context` stay, and
/// those from the one that turns beta_slow times on are divided. The frequencies of the pairs between are interpolated
/// by the pair's number, and rotated pairs are longer by scale(). `RopeAngles{.base = 500000}`
struct RopeAngles {
  double base = 10000;
  double factor = 1;                                 ///< by which texts become longer; 1: no change
  double low_freq_factor = 1, high_freq_factor = 4;  ///< wavelengths that fit so often into `context`
  std::int64_t context = 0;                          ///< the texts' length before they were made longer; 0: linear
  bool yarn = false;                                 ///< with `context`: as YaRN does
  double beta_fast = 32, beta_slow = 1;              ///< with `yarn`: turns in `context`
  bool truncate = true;                              ///< with `yarn`: count these in whole pairs
  double amplitude = 0;                              ///< with `yarn`: scale(); 0: 0.1 log(factor) + 1

  /// The angle by which a pair of a dim of `width` elements turns at a position. `angles(3, 0, 64)`
  [[nodiscard]] SHARDLIB_FUNCTION double operator()(std::int64_t position, std::int64_t pair, std::int64_t width) const;
  /// The factor of cosines and sines, 1 without `yarn`. `angles.scale()`
  [[nodiscard]] SHARDLIB_FUNCTION double scale() const;
  friend bool operator==(const RopeAngles&, const RopeAngles&) = default;
};

namespace detail {
/// Rotates each pair (i, i + n/2) of the dim by its angle, or by its negative (`sign` -1), and multiplies it by
/// angles.scale(). A rotation is orthogonal, so the map's transpose is the rotation back with the same factor.
template <class D>
struct Rotate {
  int length, dim;
  RopeAngles angles;
  Positions positions;
  double sign;
  Buffer operator()(const Value& in, const Value& out) const;
};
template <class D>
struct RotateVjp {
  OpInfo op;
  Rotate<D> forward;
  template <class Ct>
  auto operator()(const Ct& ct) const {
    Rotate<D> back = forward;
    back.sign = -back.sign;
    return record_unary<"rope", Ct>(op, ct, sizes_of(ct.value()), back, vjp(ct, RotateVjp{op, back}));
  }
};
void require_pairs(const OpInfo& op, const ValuePtr& x, int dim);
}  // namespace detail

/// Rotary position embedding (Su et al. 2021): rotates the pair of element i in the first half of `Dim` and element i
/// in the second half by the angle of `angles`, and multiplies it by angles.scale(). `positions` are those along
/// `Length`: the global index, from a number on, or in a SequenceOrder. `Dim` may not be padded. `rope<"L", "D">(q)`,
/// `rope<"L", "D">(q, {}, 512)`
template <DimName Length, DimName Dim, dtype D, Spec S>
auto rope(const Tensor<D, S>& x, const RopeAngles& angles = {}, Positions positions = {}, Site site = Site::current())
    -> Tensor<detail::if_float<"rope", D>, detail::result_of<rules::rope, Length, Dim, S>> {
  constexpr int length = detail::parsed<S>.find(Length), dim = detail::parsed<S>.find(Dim);
  const detail::Calling op{"rope", Dim, site};
  detail::require_pairs(op, x.value(), dim);
  detail::require_order(op, x.value(), length, positions.order);
  const detail::Rotate<D> rotate{length, dim, angles, positions, 1.0};
  return detail::record_unary<"rope", Tensor<D, S>>(op, x, detail::sizes_of(x.value()), rotate,
                                                    detail::vjp(x, detail::RotateVjp<D>{op, rotate}));
}
SHARDLIB_FORM(rope,
              "rope<\"L\", \"D\">(x, {.base = 10000})`, where L is the dim of positions and D the width of a head")

}  // namespace shardlib
