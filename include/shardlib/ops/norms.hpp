// Ops along one unsharded dim: softmax, rms_norm, layer_norm, rope.
#pragma once

#include <cstdint>
#include <string_view>
#include <type_traits>

#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"

namespace shardlib {

namespace detail {
template <class D>
struct Softmax {
  int dim;
  Buffer operator()(const Value& in, const Value& out) const;
};
template <class D>
struct SoftmaxBackward {
  ValuePtr ct, result;
  int dim;
  Buffer operator()(const Value& out) const;
};
struct SoftmaxVjp {
  OpInfo op;
  int dim;
  template <class Ct>
  auto operator()(const Ct& ct, const auto& y) const {
    using D = typename Ct::value_type;
    return record<"softmax", Ct>(op, ct.device(), sizes_of(ct.value()), SoftmaxBackward<D>{ct.value(), y.value(), dim});
  }
};
}  // namespace detail

/// exp(x) / sum(exp(x)) along an unsharded dim. Backward: one kernel. `softmax<"Klen">(logits)`
template <DimName Dim, dtype D, Spec S>
auto softmax(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"softmax", D>, D>,
              detail::result_of<rules::along, OpName("softmax"), Dim, S>> {
  constexpr int dim = detail::parsed<S>.find(Dim);
  const detail::Calling op{"softmax", Dim, site};
  return detail::record_unary<"softmax", Tensor<D, S>>(
      op, x, detail::sizes_of(x.value()), detail::Softmax<D>{dim},
      detail::vjp_of_result(x, detail::save(), detail::SoftmaxVjp{op, dim}));
}

namespace detail {
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
    return record < kind == Norm::rms ? OpName("rms_norm") : OpName("layer_norm"),
           Ct > (op, ct.device(), sizes_of(ct.value()),
                 NormalizeBackward<kind, typename Ct::value_type>{ct.value(), x.value(), dim, epsilon});
  }
};
}  // namespace detail

/// x / sqrt(mean(x^2) + epsilon) along an unsharded dim (Zhang and Sennrich 2019), without a scale.
/// `rms_norm<"M">(x)`
template <DimName Dim, dtype D, Spec S>
auto rms_norm(const Tensor<D, S>& x, double epsilon = 1e-6, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"rms_norm", D>, D>,
              detail::result_of<rules::along, OpName("rms_norm"), Dim, S>> {
  constexpr int dim = detail::parsed<S>.find(Dim);
  const detail::Calling op{"rms_norm", Dim, site};
  return detail::record_unary<"rms_norm", Tensor<D, S>>(
      op, x, detail::sizes_of(x.value()), detail::Normalize<detail::Norm::rms, D>{dim, epsilon},
      detail::vjp(x, detail::save(x), detail::NormalizeVjp<detail::Norm::rms>{op, dim, epsilon}));
}
/// (x - mean) / sqrt(variance + epsilon) along an unsharded dim (Ba et al. 2016), without scale and bias.
/// `layer_norm<"M">(x)`
template <DimName Dim, dtype D, Spec S>
auto layer_norm(const Tensor<D, S>& x, double epsilon = 1e-5, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"layer_norm", D>, D>,
              detail::result_of<rules::along, OpName("layer_norm"), Dim, S>> {
  constexpr int dim = detail::parsed<S>.find(Dim);
  const detail::Calling op{"layer_norm", Dim, site};
  return detail::record_unary<"layer_norm", Tensor<D, S>>(
      op, x, detail::sizes_of(x.value()), detail::Normalize<detail::Norm::layer, D>{dim, epsilon},
      detail::vjp(x, detail::save(x), detail::NormalizeVjp<detail::Norm::layer>{op, dim, epsilon}));
}

namespace detail {
/// Rotates each pair (i, i + n/2) of the dim by the angle position * base^(-2i/n), or by its negative (`sign` -1).
/// The map is orthogonal, so its transpose is the rotation back.
template <class D>
struct Rotate {
  int length, dim;
  double base;
  std::int64_t offset;
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
/// in the second half by the angle position / base^(2i/|Dim|). The position is `offset` + the global index along
/// `Length`. `Dim` may not be padded. `rope<"L", "D">(q)`
template <DimName Length, DimName Dim, dtype D, Spec S>
auto rope(const Tensor<D, S>& x, double base = 10000.0, std::int64_t offset = 0, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"rope", D>, D>, detail::result_of<rules::rope, Length, Dim, S>> {
  constexpr int length = detail::parsed<S>.find(Length), dim = detail::parsed<S>.find(Dim);
  const detail::Calling op{"rope", Dim, site};
  detail::require_pairs(op, x.value(), dim);
  const detail::Rotate<D> rotate{length, dim, base, offset, 1.0};
  return detail::record_unary<"rope", Tensor<D, S>>(op, x, detail::sizes_of(x.value()), rotate,
                                                    detail::vjp(x, detail::RotateVjp<D>{op, rotate}));
}

}  // namespace shardlib
