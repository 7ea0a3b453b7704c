// Cross-entropy over a vocabulary that may be sharded.
#pragma once

#include "shardlib/ops/collectives.hpp"
#include "shardlib/ops/elementwise.hpp"
#include "shardlib/ops/index.hpp"
#include "shardlib/ops/reductions.hpp"

namespace shardlib {
namespace detail {

/// The op specs of cross_entropy for logits "lead V/axes".
struct CrossEntropySpecs {
  Op reduce{""};   ///< "lead V/axes -> lead", the maximum
  Op sum{""};      ///< "lead V/axes -> lead +axes"
  Op finish{""};   ///< "lead +axes -> lead"
  Op partial{""};  ///< "lead -> lead +axes"
  Op pick{""};     ///< "lead [V/axes], lead -> lead +axes"
  bool sharded = false;
};
constexpr CrossEntropySpecs cross_entropy_specs(Spec logits) {
  TensorSpec with = parse_tensor(logits).spec, lead = with;
  lead.dims.erase(lead.rank() - 1);
  TensorSpec summed = lead;
  for (auto axis : with.dims[with.rank() - 1].axes) summed.add_partial(axis);
  const Text a = to_string(with), b = to_string(lead), c = to_string(summed);
  CrossEntropySpecs specs;
  specs.reduce = make_op(a, b);
  specs.sum = make_op(a, c);
  specs.finish = make_op(c, b);
  specs.partial = make_op(b, c);
  with.dims[with.rank() - 1].bracketed = true;
  specs.pick = make_op(to_string(with), b, c);
  specs.sharded = !summed.partial.empty();
  return specs;
}

}  // namespace detail

template <dtype D, Spec S, dtype I, Spec T>
auto cross_entropy(const Tensor<D, S>& logits, const Tensor<I, T>& targets, Site site)
    -> Tensor<detail::after_t<detail::is_float<"cross_entropy", D> && detail::is_index<"cross_entropy", I>, D>,
              detail::result_of<rules::cross_entropy, S, T>> {
  static constexpr auto specs = detail::cross_entropy_specs(S);
  const auto highest = all_reduce_max<specs.reduce>(stop_gradient(logits), site);
  const auto summands = sum<specs.sum>(map([](auto x, auto m) { return exp(x - m); }, logits, highest), site);
  const auto target = detail::lookup<specs.pick>(detail::OpInfo{"cross_entropy", specs.pick, site}, logits, targets);
  if constexpr (specs.sharded) {
    const auto logsumexp = map([](auto s, auto m) { return log(s) + m; },
                               all_reduce<specs.finish, detail::sum_of<D>>(summands, site), highest);
    return to_partial<specs.partial>(logsumexp, site) - target;
  } else {
    return map([](auto s, auto m) { return log(s) + m; }, summands, highest) - target;
  }
}

}  // namespace shardlib
