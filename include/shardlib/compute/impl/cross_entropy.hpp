// Definitions of loss.hpp: the backward pass of cross_entropy, as a function that can be differentiated.
#pragma once

#include "shardlib/compute/loss.hpp"

#include <array>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "shardlib/compute/collectives.hpp"
#include "shardlib/compute/on_host.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// One row of this device's logits: the softmax, and where the target is. The cotangent of the logits is ct (p - e),
/// where e is 1 at the target.
class SoftmaxRows {
 public:
  SoftmaxRows(const Value& logits, const std::array<ValuePtr, 3>& rows)
      : x_(logits), ids_(*rows[0]), shift_(*rows[1]), sum_(*rows[2]) {
    const int last = logits.local.size() - 1;
    n = logits.local[last];
    counted = true_shape(logits)[last];
    first_ = shard_index(*logits.device, logits.spec->dims[last].axes) * n;
  }
  [[nodiscard]] double p(std::int64_t row, std::int64_t i) const {
    return std::exp(x_[row * n + i] - shift_[row]) / sum_[row];
  }
  [[nodiscard]] double at_target(std::int64_t row, std::int64_t i) const {
    return static_cast<std::int64_t>(ids_[row]) == first_ + i ? 1 : 0;
  }
  std::int64_t n = 0;        ///< ids of this device
  std::int64_t counted = 0;  ///< those that are not padding

 private:
  HostNumbers x_, ids_, shift_, sum_;
  std::int64_t first_ = 0;
};

/// A number for each row: the sum over this device's ids of f(row, id).
template <class F>
Buffer row_sums(const Value& out, const SoftmaxRows& rows, const F& f) {
  return filled_on_host(out, [&](const HostNumbers& result) {
    out.device->host_exec().for_each(out.count(), [&](std::int64_t row) {
      double total = 0;
      for (std::int64_t i = 0; i < rows.counted; ++i) total += f(row, i);
      result.set(row, total);
    });
  });
}

/// The derivative of <g, ct (p - e)> by the logits: ct p (g - sum(p g)), with the sum over the whole vocabulary.
inline ValuePtr second_by_logits(const ValuePtr& g, const ValuePtr& ct, const ValuePtr& logits,
                                 const std::array<ValuePtr, 3>& rows, const TensorSpec& spec) {
  const TensorSpec& whole = *rows[1]->spec;
  const TensorSpec part = rules::pending_sum(*logits->spec, whole);
  const auto record = [&](const char* name, const TensorSpec& of, const GlobalSizes& sizes, Kernel&& kernel) {
    return evaluate(make_recorded(Calling(name, {}, {}), logits->device, logits->dtype, of, sizes, {}),
                    std::move(kernel));
  };
  ValuePtr dots = record("sum", lasting(part), rows[1]->global, [g, logits, rows](const Value& out) {
    const SoftmaxRows softmax(*logits, rows);
    const HostNumbers numbers(*g);
    return row_sums(out, softmax, [&](auto row, auto i) { return softmax.p(row, i) * numbers[row * softmax.n + i]; });
  });
  if (!(part == whole)) dots = record("all_reduce", whole, rows[1]->global, OfOperand{dots, &sum_pending});
  return record("cross_entropy_backward", spec, logits->global, [g, ct, dots, logits, rows](const Value& out) {
    const SoftmaxRows softmax(*logits, rows);
    const HostNumbers numbers(*g), slope(*ct), dot(*dots);
    return filled_on_host(out, [&](const HostNumbers& result) {
      out.device->host_exec().for_each(out.count(), [&](std::int64_t at) {
        const std::int64_t row = at / softmax.n, i = at % softmax.n;
        result.set(at, i < softmax.counted ? slope[row] * softmax.p(row, i) * (numbers[at] - dot[row]) : 0);
      });
    });
  });
}

SHARDLIB_INLINE ValuePtr record_cross_entropy_vjp(const ValuePtr& ct, const ValuePtr& logits,
                                                  const std::array<ValuePtr, 3>& rows, const TensorSpec& spec,
                                                  Kernel&& kernel) {
  std::vector<EdgeSource> sources;
  if (ct->slot || logits->slot) {
    sources.push_back(
        {&ct,
         {&logits},
         [rows, due = &lasting_dual(*ct->spec, {logits->spec})](const ValuePtr& g, const Residuals& saved) {
           const Kernel sum = [rows, g, logits = saved.values[0]](const Value& out) {
             const SoftmaxRows softmax(*logits, rows);
             const HostNumbers numbers(*g);
             return row_sums(out, softmax, [&](auto row, auto i) {
               return numbers[row * softmax.n + i] * (softmax.p(row, i) - softmax.at_target(row, i));
             });
           };
           return evaluate(make_recorded(Calling("sum", {}, {}), g->device, g->dtype, *due, saved.sizes, {}), sum);
         }});
    sources.push_back({&logits, {&ct, &logits}, [rows, &spec](const ValuePtr& g, const Residuals& saved) {
                         return second_by_logits(g, saved.values[0], saved.values[1], rows, spec);
                       }});
  }
  return evaluate(
      make_recorded({"cross_entropy_backward", {}, {}}, ct->device, logits->dtype, spec, logits->global, sources),
      std::move(kernel));
}

}  // namespace shardlib::detail
