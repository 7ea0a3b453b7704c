// Cross-entropy over a vocabulary that may be sharded.
#pragma once

#include <cstdint>
#include <utility>

#include "shardlib/detail/use_count.hpp"
#include "shardlib/kernels/rows.hpp"
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

/// How many ids of this device's part of the vocabulary, the last dim, are no padding.
inline std::int64_t true_vocabulary(const Value& logits) {
  return true_extents(logits)[logits.local.size() - 1];
}

/// sum(exp(x - shift)) over the last dim in one pass, without a derivative: "B/d L V/t", "B/d L" -> "B/d L +t".
template <Op O, dtype D, Spec S, Spec T>
auto sum_exp(const Tensor<D, S>& x, const Tensor<D, T>& shift) {
  using Out = Tensor<D, result_of<rules::sum, O, S>>;
  return record<"sum", Out>(OpInfo{"sum_exp", O, {}}, x.device(), kept_sizes(*x.value(), parsed<Out::spec>),
                            [x = x.value(), shift = shift.value()](const Value& out) {
                              Buffer result = allocate(out);
                              kernels::sum_exp(out.device->exec(), x->template as<const D>(),
                                               shift->template as<const D>(), result.as<D>(), out.count(),
                                               x->local[x->local.size() - 1], true_vocabulary(*x));
                              return result;
                            });
}

/// The loss, computed already, with its derivative in the logits: one pass that reads them and writes the cotangent.
/// `total`: the sum of exp(logits - highest) over the whole vocabulary.
template <class Out, dtype D, Spec S, dtype I, Spec T, Spec R>
Out cross_entropy_of(const OpInfo& op, const Tensor<D, S>& logits, const Tensor<I, T>& targets,
                     const Tensor<D, R>& highest, const Tensor<D, R>& total, const Out& loss) {
  const auto pull = [](const auto& ct, const auto& x, const auto& ids, const auto& shift, const auto& sum) {
    using Due = Dual<Tensor<D, S>, axes_of<S, T, Out::spec>()>;
    return record<"cross_entropy_backward", Due>(
        OpInfo{"cross_entropy_backward", {}, {}}, ct.device(), x.value()->global,
        [ct = ct.value(), x = x.value(), ids = ids.value(), shift = shift.value(),
         sum = sum.value()](const Value& out) {
          const D* const from = x->template as<const D>();
          // The largest block of a step: it becomes the cotangent where no other value shares it.
          const bool last_use = use_count(x->storage) == 1 && x->storage->buffer.unique();
          state(out.device).work.in_place = last_use;
          Buffer result = last_use ? std::move(x->storage->buffer) : allocate(out);
          const int last = x->local.size() - 1;
          const std::int64_t n = x->local[last];
          kernels::cross_entropy_backward(out.device->exec(), from, shift->template as<const D>(),
                                          sum->template as<const D>(), ids->template as<const I>(),
                                          ct->template as<const D>(), result.as<D>(), ct->count(), n,
                                          block_index(*out.device, x->spec->dims[last].axes) * n);
          return result;
        });
  };
  return record<"cross_entropy", Out>(
      op, logits.device(), loss.value()->global, [loss = loss.value()](const Value&) { return loss->data(); },
      vjp(logits, save(logits, targets, highest, total), pull));
}

}  // namespace detail

template <dtype D, Spec S, dtype I, Spec T>
auto cross_entropy(const Tensor<D, S>& logits, const Tensor<I, T>& targets, Site site)
    -> Tensor<detail::after_t<detail::is_float<"cross_entropy", D> && detail::is_index<"cross_entropy", I>, D>,
              detail::result_of<rules::cross_entropy, S, T>> {
  static constexpr auto specs = detail::cross_entropy_specs(S);
  using Out = Tensor<D, detail::result_of<rules::cross_entropy, S, T>>;
  const detail::Calling op{"cross_entropy", specs.pick, site};
  // The derivative is that of the whole, below.
  const Tensor<D, S> x(detail::stopped(*logits.value()));
  const auto highest = all_reduce_max<specs.reduce>(x, site);
  const auto part = detail::sum_exp<specs.sum>(x, highest);
  const auto target = detail::lookup<specs.pick>(op, x, targets);
  const auto finish = [&](const auto& total) {
    const auto logsumexp = map([](auto s, auto m) { return log(s) + m; }, total, highest);
    if constexpr (specs.sharded)
      return detail::cross_entropy_of<Out>(op, logits, targets, highest, total,
                                           to_partial<specs.partial>(logsumexp, site) - target);
    else
      return detail::cross_entropy_of<Out>(op, logits, targets, highest, total, logsumexp - target);
  };
  if constexpr (specs.sharded)
    return finish(all_reduce<specs.finish, detail::sum_of<D>>(part, site));
  else
    return finish(part);
}

}  // namespace shardlib
