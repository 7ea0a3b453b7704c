// Definitions of adafactor.hpp.
#pragma once

#include "shardlib/optim/adafactor.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/map.hpp"
#include "shardlib/kernels/body/optimizers.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/optim/impl/leaf_ops.hpp"

namespace shardlib {
namespace detail {

SHARDLIB_INLINE void zero_factors(const UntypedLeaves<const ValuePtr>& weights, const UntypedLeaves<ValuePtr>& rows,
                                  const UntypedLeaves<ValuePtr>& cols) {
  for (std::size_t i = 0; i < weights.leaves.size(); ++i) {
    const Value& w = *weights.leaves[i].value();
    const auto &row = rows.leaves[i], &col = cols.leaves[i];
    *row.pointer = zeros_as(w, row);
    *col.pointer = zeros_as(w, col, 1);
  }
}

/// The result of f(element, element of the gradient, elements of f32 operands that broadcast...), of the leaf's shape.
template <class F, class... X>
ValuePtr leaf_map(const char* name, const ValuePtr& grad, const F& f, const X&... x) {
  const auto kernel = [=](const Value& out) {
    Buffer result = allocate(out);
    const auto apply = [&]<class G>(const G* g) {
      kernels::apply(out.device->exec(), view(out.local), f, whole_operand(result.template as<f32>(), out),
                     whole_operand(g, out), broadcast_operand<const f32>(*x, *out.spec)...);
    };
    grad->dtype == DType::bf16 ? apply(grad->as<const bf16>()) : apply(grad->as<const f32>());
    return result;
  };
  return evaluate(make_recorded({name, {}, {}}, grad->device, DType::f32, *grad->spec, grad->global, {}), kernel);
}

}  // namespace detail

SHARDLIB_INLINE void Adafactor::update(const detail::LeafUpdate& leaf, double learning_rate, double scale,
                                       std::int64_t step) const {
  using namespace kernels::body;
  const auto f = [](double x) { return static_cast<float>(x); };
  const detail::ValuePtr& grad = *leaf.grad;
  detail::ValuePtr &rows = *leaf.moments[0], &cols = *leaf.moments[1];
  const double kept = 1 - std::pow(static_cast<double>(step + 1), -decay_power);
  const auto elements = std::max(static_cast<double>(detail::product(grad->global.logical)), 1.0);  // no 0 / 0
  const auto in = [](const detail::ValuePtr& factor) {
    return static_cast<double>(detail::product(factor->global.logical));
  };

  const auto squares = detail::leaf_map("adafactor_squares", grad, AdafactorSquare{f(scale), f(epsilon)});
  for (detail::ValuePtr* factor : {&rows, &cols}) {
    const auto sum = detail::leaf_sum(squares, *(*factor)->spec);
    const double mean = in(*factor) / elements;
    detail::LeafUpdate of_mean = leaf;
    of_mean.weight = factor;
    of_mean.grad = &sum;
    of_mean.copy = nullptr;
    detail::update_in_place("adafactor_mean", detail::EmaNumbers{f(kept), f((1 - kept) * mean)}, of_mean);
  }
  // The product of the means of a row and of a column, over the mean of all: exact where the squares have rank 1.
  const AdafactorChange by{f(scale), f(in(rows))};
  const TensorSpec& scalar = detail::lasting({});
  detail::ValuePtr change = leaf.spec->rank() < 2 ? detail::leaf_map("adafactor_change", grad, by, rows)
                                                  : detail::leaf_map("adafactor_change", grad, by, rows, cols,
                                                                     detail::leaf_sum(rows, scalar));
  const auto changes = detail::leaf_sum_of_squares(change);
  const auto weights = scale_parameter ? detail::leaf_sum_of_squares(*leaf.weight) : changes;
  const AdafactorFactor of{f(clip), f(least_scale), f(elements), scale_parameter};
  const auto factor =
      detail::evaluate(detail::make_recorded({"adafactor_factor", {}, {}}, grad->device, DType::f32, scalar, {}, {}),
                       [=](const detail::Value& out) {
                         Buffer result = detail::allocate(out);
                         kernels::apply_flat(out.device->exec(), 1, of, result.as<f32>(), changes->as<const f32>(),
                                             weights->as<const f32>());
                         return result;
                       });
  change = detail::leaf_map("adafactor_change", change, ScaledElement{}, factor);
  detail::LeafUpdate of_step = leaf;
  of_step.grad = &change;
  detail::update_in_place(
      "adafactor", detail::StepAlong{1, f(weight_decay * leaf.factors.decay), f(learning_rate * leaf.factors.rate)},
      of_step);
}

}  // namespace shardlib
