// Ops on leaves without their types, for optimizers that communicate. They have no derivatives.
#pragma once

#include <mutex>
#include <set>
#include <string>
#include <string_view>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/collectives.hpp"
#include "shardlib/compute/reductions.hpp"
#include "shardlib/optim/global_norm.hpp"
#include "shardlib/optim/optimizers.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib::detail {

/// The op spec "from -> to", which is made at run time and lasts, as `lasting` makes a spec.
inline std::string_view lasting_op(const TensorSpec& from, const TensorSpec& to) {
  static std::mutex mutex;
  static std::set<std::string> all;
  const std::lock_guard lock(mutex);
  return *all.insert(std::string(to_string(from).view()) + " -> " + std::string(to_string(to).view())).first;
}

inline ValuePtr leaf_op(const char* name, const ValuePtr& x, const TensorSpec& to, const GlobalSizes& sizes,
                        Buffer (*kernel)(const Value&, const Value&)) {
  return evaluate(make_recorded({name, lasting_op(*x->spec, to), {}}, x->device, DType::f32, to, sizes, {}),
                  OfOperand<decltype(kernel)>{x, kernel});
}

/// all_gather and shard. `to` is a lasting spec. Where nothing is sharded, they return x.
[[nodiscard]] inline ValuePtr gathered_leaf(const ValuePtr& x, const TensorSpec& to) {
  return *x->spec == to ? x : leaf_op("all_gather", x, to, x->global, gather);
}
[[nodiscard]] inline ValuePtr leaf_shard(const ValuePtr& x, const TensorSpec& to) {
  return *x->spec == to ? x : leaf_op("shard", x, to, x->global, cut_shard);
}

inline ValuePtr completed_sum(const ValuePtr& x, const TensorSpec& to) {
  return *x->spec == to ? x : leaf_op("all_reduce", x, to, x->global, sum_pending);
}

/// The sum in f32 over the dims that `to`, a lasting spec, lacks, of all devices: "A/d B/t" to "A/d".
[[nodiscard]] inline ValuePtr leaf_sum(const ValuePtr& x, const TensorSpec& to) {
  if (x->spec->dims == to.dims) return x;
  const TensorSpec& pending = lasting(rules::pending_sum(*x->spec, to));
  return completed_sum(leaf_op("sum", x, pending, kept_sizes(x, pending), reduce_kernel<kernels::detail::SumOp, f32>),
                       to);
}
/// The sum of all elements' squares, of all devices.
[[nodiscard]] inline ValuePtr leaf_sum_of_squares(const ValuePtr& x) {
  const TensorSpec& scalar = lasting({});
  return completed_sum(sum_of_squares(*x, lasting(rules::pending_sum(*x->spec, {}))), scalar);
}

}  // namespace shardlib::detail
