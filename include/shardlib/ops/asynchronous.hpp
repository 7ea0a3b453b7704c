// Asynchronous collectives: they start at one line of a program and end at another. The ops between the two run
// meanwhile.
#pragma once

#include <utility>

#include "shardlib/ops/collectives.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"

namespace shardlib {

/// A program's handle to a collective that has started, from a tensor of type Tensor<D, From> to one of type Tensor<D,
/// To>. Only `wait` accepts it, and reads `operand` and `result`. `value_type` is the dtype, `from` and `to` are the
/// specs.
template <dtype D, Spec From, Spec To>
class InFlight : public detail::Unfinished<InFlight<D, From, To>> {
 public:
  using value_type = D;
  static constexpr Spec from = From, to = To;

  /// The operand, and what the collective will have written; null if `wait` is to run it.
  InFlight(Tensor<D, From> operand, detail::ValuePtr result)
      : operand_(std::move(operand)), result_(std::move(result)) {}

  [[nodiscard]] const Tensor<D, From>& operand() const { return operand_; }
  [[nodiscard]] const detail::ValuePtr& result() const { return result_; }

  /// A compile error that says what to do.
  template <class E, Spec S>
  operator Tensor<E, S>() const {  // NOLINT(google-explicit-constructor): meant to catch implicit conversions
    static_assert(detail::checked<rules::not_awaited, From, To, S>::ok);
    return {};
  }

#define SHARDLIB_EINSUM(op)                                                      \
  template <OpSpec O>                                                            \
  friend auto op(const InFlight& x, const auto& y) {                             \
    return op<O>(InFlight::whole(x), y);                                         \
  }                                                                              \
  template <OpSpec O, class X>                                                   \
  requires(!requires { X::to; }) friend auto op(const X& x, const InFlight& y) { \
    return op<O>(x, InFlight::whole(y));                                         \
  }
  SHARDLIB_EINSUM(einsum)
  SHARDLIB_EINSUM(einsum_unreduced)
#undef SHARDLIB_EINSUM

 private:
  Tensor<D, From> operand_;
  detail::ValuePtr result_;
};

namespace detail {

/// Starts the collective that makes a value of spec `to` of x. The first read of the result waits for it. Returns null
/// in a replay, where derivatives are differentiated again, and where `prefetch` starts it: the collective then runs at
/// the first read of its result.
ValuePtr start_gather(const OpInfo& op, const ValuePtr& x, const TensorSpec& to);
ValuePtr start_scatter(const OpInfo& op, const ValuePtr& x, const TensorSpec& to);

/// The kernel of `wait`: gives the result of the collective that has started, or runs the collective.
struct Awaited {
  ValuePtr result;
  Buffer (*collective)(const Value& in, const Value& out);
  Buffer operator()(const Value& in, const Value& out) const;
};

/// The cotangent of the operand of type X. It is in flight when the VJP returns it.
template <class Out, class X>
inline constexpr auto gather_wait_vjp = [](const auto& ct) {
  static constexpr OpSpec O = transpose_op<Out, X>();
  using Sum = sum_of<typename X::value_type>;
  using Due = decltype(reduce_scatter<O, Sum>(ct));
  const ValuePtr coming = start_scatter(OpInfo{"reduce_scatter", O, {}}, ct.value(), parsed<Due::spec>);
  return coming ? Due(coming) : reduce_scatter<O, Sum>(ct);
};
template <class Out, class X>
inline constexpr auto scatter_wait_vjp = [](const auto& ct) {
  static constexpr OpSpec O = transpose_op<Out, X>();
  using Due = decltype(all_gather<O>(ct));
  const ValuePtr coming = start_gather(OpInfo{"all_gather", O, {}}, ct.value(), parsed<Due::spec>);
  return coming ? Due(coming) : all_gather<O>(ct);
};

}  // namespace detail

/// Starts an all_gather. The ops up to `wait` run meanwhile. Backward: a reduce_scatter that starts where the backward
/// pass reaches `wait`, and that the first op that reads the cotangent waits for.
/// `auto coming = all_gather_start<"L/t B M -> L B M">(x);`
template <OpSpec O, class Sum = void, dtype D, Spec S>
[[nodiscard]] auto all_gather_start(const Tensor<D, S>& x, Site site = Site::current())
    -> InFlight<detail::after_t<detail::backward_sums_in<D, Sum>, D>, S,
                detail::op_result_for<D, rules::all_gather, O, S>> {
  static constexpr Spec to = detail::op_result_for<D, rules::all_gather, O, S>;
  const detail::Calling op{"all_gather", detail::full_op<"all_gather", O, S>, site};
  return {x, detail::start_gather(op, x.value(), detail::parsed<to>)};
}
SHARDLIB_NEEDS_OP_SPEC(all_gather_start)

/// Starts a reduce_scatter, as all_gather_start starts an all_gather.
/// `auto coming = reduce_scatter_start<"L B M +t -> L/t B M">(y);`
template <OpSpec O, class Sum = void, dtype D, Spec S>
[[nodiscard]] auto reduce_scatter_start(const Tensor<D, S>& x, Site site = Site::current())
    -> InFlight<detail::after_t<detail::is_summed<"reduce_scatter", D, Sum>, D>, S,
                detail::op_result_for<D, rules::reduce_scatter, O, S>> {
  static constexpr Spec to = detail::op_result_for<D, rules::reduce_scatter, O, S>;
  const detail::Calling op{"reduce_scatter", detail::full_op<"reduce_scatter", O, S>, site};
  return {x, detail::start_scatter(op, x.value(), detail::parsed<to>)};
}
SHARDLIB_NEEDS_OP_SPEC(reduce_scatter_start)

/// The result of a collective that has started, once it is complete. Move the InFlight into it, as that keeps the
/// operand and the result. `const auto whole = wait(std::move(coming));`
template <dtype D, Spec From, Spec To>
auto wait(InFlight<D, From, To> coming, Site site = Site::current()) -> Tensor<D, To> {
  using X = Tensor<D, From>;
  using Out = Tensor<D, To>;
  const X& x = coming.operand();
  static constexpr OpSpec O = detail::op_spec_of(From, To);
  const detail::Calling op{"wait", O, site};
  const auto record = [&](auto* collective, const auto& vjp) {
    return detail::record_unary<"wait", Out>(op, x, detail::sizes_of(x.value()),
                                             detail::Awaited{coming.result(), collective}, detail::vjp(x, vjp));
  };
  if constexpr (detail::parsed<From>.partial == detail::parsed<To>.partial) {
    const Out out = record(&detail::gather, detail::gather_wait_vjp<Out, X>);
    detail::gather_ahead(x.value(), out.value());
    return out;
  } else {
    return record(&detail::scatter, detail::scatter_wait_vjp<Out, X>);
  }
}
/// A compile error for a tensor, which is complete.
template <dtype D, Spec S>
auto wait(const Tensor<D, S>& x) {
  return detail::wrong_call<"wait", "wait(all_gather_start<\"...\">(x))">(x);
}

}  // namespace shardlib
