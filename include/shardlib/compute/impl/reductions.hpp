// Definitions of reductions.hpp.
#pragma once

#include "shardlib/compute/reductions.hpp"

#include <string>

#include "shardlib/kernels/layout.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE Small<bool, max_dims> removed_dims(const TensorSpec& in, const TensorSpec& out) {
  Small<bool, max_dims> removed;
  int at = 0;
  for (int i = 0; i < in.rank(); ++i) {
    const bool kept = at < out.rank() && out.dims[at].name == in.dims[i].name;
    removed.push_back(!kept);
    at += kept ? 1 : 0;
  }
  return removed;
}

SHARDLIB_INLINE GlobalSizes kept_sizes(const ValuePtr& x, const TensorSpec& out) {
  const auto removed = removed_dims(*x->spec, out);
  GlobalSizes sizes;
  for (int i = 0; i < x->global.size(); ++i)
    if (!removed[i]) sizes.push_back(x->global[i]);
  return sizes;
}

SHARDLIB_INLINE GlobalSizes chosen_sizes(const OpInfo& op, const ValuePtr& x, const TensorSpec& out) {
  const GlobalSizes sizes = kept_sizes(x, out);
  const int empty = x->global.logical.find(0);
  if (empty >= 0 && !sizes.logical.contains(0))
    throw Error(op.describe() + ": dim `" + std::string(x->spec->dims[empty].name) +
                "` has size 0; it needs at least one element (" + x->device->describe() + ")");
  return sizes;
}

SHARDLIB_INLINE std::int64_t count_averaged(const OpInfo& op, const ValuePtr& x, const TensorSpec& out) {
  const auto removed = removed_dims(*x->spec, out);
  std::int64_t n = 1;
  for (int i = 0; i < x->global.size(); ++i) {
    if (!removed[i]) continue;
    n *= x->global.logical[i];
    if (n == 0)
      throw Error(op.describe() + ": the dim `" + std::string(x->spec->dims[i].name) +
                  "` has 0 elements, and a mean divides by their number; give it at least one element, for example " +
                  "one row for each microbatch (" + x->device->describe() + ")");
  }
  return n;
}

SHARDLIB_INLINE Buffer repeat_kernel(const Value& in, const Value& out) {
  Shape strides;
  std::int64_t stride = product(in.local);
  const auto added = removed_dims(*out.spec, *in.spec);
  int at = 0;
  for (int i = 0; i < out.spec->rank(); ++i) {
    if (added[i]) {
      strides.push_back(0);
    } else {
      stride = in.local[at] > 0 ? stride / in.local[at] : 0;
      strides.push_back(stride);
      ++at;
    }
  }
  Buffer result = allocate(out);
  kernels::copy_strided(out.device->exec(), size_of(out.dtype), view(out.local), in.data().data(), view(strides),
                        result.data(), kernels::row_major(view(out.local)));
  return result;
}

}  // namespace shardlib::detail
