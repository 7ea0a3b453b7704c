// einsum_bias and einsum_bias_gelu: a product on each device, with its bias and its activation in one pass.
#pragma once

#include <type_traits>

#include "shardlib/ops/einsum.hpp"
#include "shardlib/ops/elementwise.hpp"
#include "shardlib/ops/map.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/ops/value_and_grad.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/handle.hpp"

namespace shardlib {
namespace detail {

/// The product of two operands plus a bias, all of dtype D. Its kernel also makes `gelu`, the gelu of the sum, if that
/// is wanted.
template <class D>
struct EinsumBias {
  const kernels::EinsumPlan* plan;
  ValuePtr a, b, bias;
  Handle<MadeWithOperand> gelu;
  Buffer operator()(const Value& out) const;
};
/// Makes the place where an operand's kernel, recorded next, leaves the result of a map.
Handle<MadeWithOperand> make_with_operand(const DevicePtr& device);

template <OpSpec O, class Out, class X, class Y, class B>
Out record_einsum_bias(const Site& site, const X& x, const Y& y, const B& bias, const Handle<MadeWithOperand>& gelu) {
  using D = typename Out::value_type;
  const Calling op{"einsum_bias", O, site};
  return record<"einsum_bias", Out>(
      op, x.device(), sizes_by_name(op, parsed<Out::spec>, {&x.value(), &y.value(), &bias.value()}),
      EinsumBias<D>{&einsum_plan<O>(), x.value(), y.value(), bias.value(), gelu}, vjp(x, save(y), einsum_vjp<X>),
      vjp(y, save(x), einsum_vjp<Y>), vjp(bias, add_vjp<B>));
}
template <OpName Name, class D, class E, class F>
inline constexpr bool einsum_bias_dtypes =
    is_float<Name, D>&& one_dtype<Name, D, E>&& checked<rules::bias_dtype, Name, dtype_v<D>, dtype_v<F>>::ok;

}  // namespace detail

/// einsum_unreduced of two operands plus a bias, whose dims are some of the result's. It needs one pass over the result
/// less than `+`, and gives the same bits on the CPU. The product may not be a pending sum, which would count the bias
/// once per device. Backward: two einsums, and the sum over the dims that the bias lacks. `einsum_bias<"B/d L M, M F/t
/// -> B/d L F/t">(x, w, bias)`
template <OpSpec O, dtype D, Spec S, dtype E, Spec T, dtype F, Spec B>
auto einsum_bias(const Tensor<D, S>& x, const Tensor<E, T>& y, const Tensor<F, B>& bias, Site site = Site::current())
    -> Tensor<detail::after_t<detail::einsum_bias_dtypes<"einsum_bias", D, E, F>, D>,
              detail::named_result_for<D, rules::einsum_bias, "einsum_bias", O, S, T, B>> {
  using Out = Tensor<D, detail::named_result_for<D, rules::einsum_bias, "einsum_bias", O, S, T, B>>;
  return detail::record_einsum_bias<O, Out>(site, x, y, bias, nullptr);
}
SHARDLIB_FORM(einsum_bias, "einsum_bias<\"A B, B C -> A C\">(x, y, bias)")
/// A compile error for a result in another dtype.
template <OpSpec O, dtype Out, tensor X, class... More>
requires(!std::is_same_v<Out, typename X::value_type>) auto einsum_bias(const X& x, const More&... more) {
  return detail::wrong_call<"einsum_bias", "cast<f32>(einsum_bias<\"A B, B C -> A C\">(x, y, bias))">(x, more...);
}
SHARDLIB_SPEC_IN_PARENTHESES(einsum_bias)
/// A compile error for an operand that is not a tensor yet.
template <OpSpec O, class... Args>
requires(detail::unfinished<Args> || ...) auto einsum_bias(const Args&... args) {
  return einsum_bias<O>(detail::finished(args)...);
}

/// The `gelu` of `einsum_bias`, whose kernel makes both. The backward pass reads what `einsum_bias` has made, which the
/// op passes through save_for_backward. Errors and traces show `einsum_bias` and `gelu`.
/// `einsum_bias_gelu<"B/d L M, M F/t -> B/d L F/t">(x, w, bias)`
template <OpSpec O, dtype D, Spec S, dtype E, Spec T, dtype F, Spec B>
auto einsum_bias_gelu(const Tensor<D, S>& x, const Tensor<E, T>& y, const Tensor<F, B>& bias,
                      Site site = Site::current())
    -> Tensor<detail::after_t<detail::einsum_bias_dtypes<"einsum_bias_gelu", D, E, F>, D>,
              detail::named_result_for<D, rules::einsum_bias, "einsum_bias_gelu", O, S, T, B>> {
  using Out = Tensor<D, detail::named_result_for<D, rules::einsum_bias, "einsum_bias_gelu", O, S, T, B>>;
  const auto made = detail::make_with_operand(x.device());
  const Out sum = save_for_backward(detail::record_einsum_bias<O, Out>(site, x, y, bias, made), site);
  const auto gelu = detail::Handle<detail::MapLoops<detail::gelu_function, D, D>>::make(detail::gelu_function{});
  gelu->made_with_operand = made;
  return detail::map_by<"gelu", Out>(detail::Calling{"gelu", {}, site}, gelu, sum);
}
SHARDLIB_FORM(einsum_bias_gelu, "einsum_bias_gelu<\"A B, B C -> A C\">(x, y, bias)")
/// A compile error for a result in another dtype.
template <OpSpec O, dtype Out, tensor X, class... More>
requires(!std::is_same_v<Out, typename X::value_type>) auto einsum_bias_gelu(const X& x, const More&... more) {
  return detail::wrong_call<"einsum_bias_gelu", "cast<f32>(einsum_bias_gelu<\"A B, B C -> A C\">(x, y, bias))">(
      x, more...);
}
SHARDLIB_SPEC_IN_PARENTHESES(einsum_bias_gelu)
/// A compile error for an operand that is not a tensor yet.
template <OpSpec O, class... Args>
requires(detail::unfinished<Args> || ...) auto einsum_bias_gelu(const Args&... args) {
  return einsum_bias_gelu<O>(detail::finished(args)...);
}

}  // namespace shardlib
