// Cross-entropy over a vocabulary that may be sharded.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>

#include "shardlib/ops/collectives.hpp"
#include "shardlib/ops/einsum.hpp"
#include "shardlib/ops/elementwise.hpp"
#include "shardlib/ops/index.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/ops/reductions.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib {
namespace detail {

/// The op specs of cross_entropy for logits "lead V/axes".
struct CrossEntropySpecs {
  OpSpec reduce{""};   ///< "lead V/axes -> lead", the maximum
  OpSpec sum{""};      ///< "lead V/axes -> lead +axes"
  OpSpec finish{""};   ///< "lead +axes -> lead"
  OpSpec partial{""};  ///< "lead -> lead +axes"
  OpSpec pick{""};     ///< "lead [V/axes], lead -> lead +axes"
  bool sharded = false;
};
constexpr CrossEntropySpecs cross_entropy_specs(const TensorSpec& logits) {
  TensorSpec with = logits, lead = logits;
  lead.dims.erase(lead.rank() - 1);
  const TensorSpec summed = rules::pending_sum(with, lead);
  const Spec a = spec_of(with), b = spec_of(lead), c = spec_of(summed);
  CrossEntropySpecs specs;
  specs.reduce = op_spec_of(a, b);
  specs.sum = op_spec_of(a, c);
  specs.finish = op_spec_of(c, b);
  specs.partial = op_spec_of(b, c);
  with.dims[with.rank() - 1].bracketed = true;
  specs.pick = op_spec_of(spec_of(with), b, c);
  specs.sharded = !summed.partial.empty();
  return specs;
}

/// sum(exp(x - shift)) over the last dim in one pass, without a derivative: "B/d L V/t", "B/d L" -> "B/d L +t".
template <class D>
struct SumExp {
  ValuePtr x, shift;
  Buffer operator()(const Value& out) const;
};
template <OpSpec O, class X, class Shift>
auto sum_exp(const X& x, const Shift& shift) {
  using D = typename X::value_type;
  using Out = Tensor<D, op_result_for<D, rules::sum, O, X::spec>>;
  return record<"sum", Out>(OpInfo{"sum_exp", O, {}}, x.device(), kept_sizes(x.value(), parsed<Out::spec>),
                            SumExp<D>{x.value(), shift.value()});
}

/// The cotangent of the logits, in one pass over the logits.
template <class D, class I>
struct CrossEntropyBackward {
  ValuePtr ct, x, ids, shift, sum;
  Buffer operator()(const Value& out) const;
};
/// Records it for logits' cotangents of this spec.
template <class D, class I>
ValuePtr record_cross_entropy_vjp(const CrossEntropyBackward<D, I>& kernel, const TensorSpec& spec);
template <class X, class Ids, class Out>
inline constexpr auto cross_entropy_vjp =
    [](const auto& ct, const auto& x, const auto& ids, const auto& shift, const auto& sum) {
      using Due = Dual<X, axes_of<X::spec, Ids::spec, Out::spec>()>;
      return Due(record_cross_entropy_vjp(
          CrossEntropyBackward<typename X::value_type, typename Ids::value_type>{ct.value(), x.value(), ids.value(),
                                                                                 shift.value(), sum.value()},
          parsed<Due::spec>));
    };
/// Returns a value that the op has already computed.
struct Given {
  ValuePtr value;
  Buffer operator()(const Value& out) const;
};
/// Records the loss, which is already computed, with its derivative by the logits. `total` is the sum of exp(logits -
/// highest) over the whole vocabulary.
template <class X, class Ids, class R, class Out>
Out cross_entropy_of(const OpInfo& op, const X& logits, const Ids& targets, const R& highest, const R& total,
                     const Out& loss) {
  return record<"cross_entropy", Out>(
      op, logits.device(), sizes_of(loss.value()), Given{loss.value()},
      vjp(logits, save(logits, targets, highest, total), cross_entropy_vjp<X, Ids, Out>));
}

struct LogSumExp {
  SHARDLIB_FUNCTION auto operator()(auto sum, auto highest) const { return log(sum) + highest; }
};

}  // namespace detail

/// -log softmax(logits)[target] over a vocabulary (the last dim) that may be sharded. It does not gather the
/// vocabulary: it communicates two all_reduces of the targets' size. The result is partial over the vocabulary's
/// axes; sum its elements to get the loss. `cross_entropy(logits, targets)` of logits "B/d L V/t", targets "B/d L" is
/// "B/d L +t"
template <dtype D, Spec S, dtype I, Spec T>
auto cross_entropy(const Tensor<D, S>& logits, const Tensor<I, T>& targets, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"cross_entropy", D> && detail::is_index<"cross_entropy", I>, D>,
              detail::result_for<detail::summed_in<D, T>, rules::cross_entropy, S, T>> {
  static constexpr auto specs = detail::cross_entropy_specs(detail::parsed<S>);
  using Out = Tensor<D, detail::result_for<detail::summed_in<D, T>, rules::cross_entropy, S, T>>;
  const detail::Calling op{"cross_entropy", specs.pick, site};
  // No gradient flows through the single steps: cross_entropy_of records the derivative of the whole op.
  const Tensor<D, S> x(detail::without_gradient(logits.value()));
  const auto highest = all_reduce_max<specs.reduce>(x, site);
  const auto part = detail::sum_exp<specs.sum>(x, highest);
  const auto target = detail::lookup<specs.pick, Out>(op, x, targets);
  const auto log_sum_exp = [&](const auto& total) {
    return detail::map_as<"map", std::remove_cvref_t<decltype(total)>>(op, detail::LogSumExp{}, total, highest);
  };
  if constexpr (specs.sharded) {
    const auto total = all_reduce<specs.finish, detail::sum_of<D>>(part, site);
    return detail::cross_entropy_of(op, logits, targets, highest, total,
                                    Out(to_partial<specs.partial>(log_sum_exp(total), site) - target));
  } else {
    return detail::cross_entropy_of(op, logits, targets, highest, part, Out(log_sum_exp(part) - target));
  }
}
SHARDLIB_FORM(cross_entropy,
              "cross_entropy(logits, targets)`, where the last dim of the logits is the vocabulary, `\"B/d V/t\"")

namespace detail {

/// The arguments of linear_cross_entropy without the specs: `x` "lead M", `table` "V/axes M", both of one dtype.
struct LinearCrossEntropy {
  OpInfo op;
  ValuePtr x, table, targets;
  std::string_view highest, sum;  ///< the op specs of the reductions over the vocabulary's axes
};
/// Whether a device's logits take at most `most` bytes; without `most`, Tuning::stored_logits.
bool stores_logits(const LinearCrossEntropy& l, DType dtype, std::optional<std::int64_t> most);
/// Records the op without ever storing all logits. `out` is the spec of the loss. `due` holds the specs of the
/// cotangents.
ValuePtr record_linear_cross_entropy(const LinearCrossEntropy& l, const TensorSpec& out,
                                     const std::array<const TensorSpec*, 2>& due);

}  // namespace detail

/// cross_entropy of the logits einsum_unreduced<O>(x, table), which are in f32 (f64 for f64). If a device's logits
/// take more than `stored` bytes (by default 256 MiB), the op never stores all of them. It then computes them piece
/// by piece, and again in the backward pass, which costs one more matrix product. A CPU then multiplies f32 copies of
/// operands of bf16, which it does not keep; in the backward pass of a part of the vocabulary at a time. Communicates
/// like cross_entropy. `linear_cross_entropy<"B/d L M, V/t M -> B/d L V/t">(x, table, targets)` with targets "B/d L" ->
/// "B/d L +t"
template <OpSpec O, dtype D, Spec S, dtype E, Spec T, dtype I, Spec R>
auto linear_cross_entropy(const Tensor<D, S>& x, const Tensor<E, T>& table, const Tensor<I, R>& targets,
                          std::optional<std::int64_t> stored = {}, Site site = Site::current())
    -> Tensor<
        detail::after_t<detail::one_dtype<"linear_cross_entropy", D, E> &&
                            detail::is_float<"linear_cross_entropy", D> && detail::is_index<"linear_cross_entropy", I>,
                        accumulator_t<D>>,
        detail::op_result_for<detail::summed_in<D, R>, rules::linear_cross_entropy, O, S, T, R>> {
  using A = accumulator_t<D>;
  static constexpr auto specs =
      detail::cross_entropy_specs(detail::parsed<detail::op_result_of<rules::einsum, O, S, T>>);
  const detail::LinearCrossEntropy l{
      {"linear_cross_entropy", O, site}, x.value(), table.value(), targets.value(), specs.reduce, specs.finish};
  using Out = Tensor<A, detail::op_result_for<detail::summed_in<D, R>, rules::linear_cross_entropy, O, S, T, R>>;
  if (detail::stores_logits(l, dtype_v<A>, stored))
    return cross_entropy(einsum_unreduced<O, A>(x, table, site), targets, site);
  constexpr Spec axes = detail::axes_of<Out::spec, S, T>();
  static constexpr Spec due_x = detail::dual_spec<S, axes>(), due_table = detail::dual_spec<T, axes>();
  return Out(detail::record_linear_cross_entropy(l, detail::parsed<Out::spec>,
                                                 {&detail::parsed<due_x>, &detail::parsed<due_table>}));
}
SHARDLIB_FORM(linear_cross_entropy, "linear_cross_entropy<\"B M, V M -> B V\">(x, table, targets)")

}  // namespace shardlib
