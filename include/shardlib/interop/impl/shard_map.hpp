// Definitions of shard_map.hpp.
#pragma once

#include "shardlib/interop/shard_map.hpp"

#include "shardlib/support/handle.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE ValuePtr gathered(const Value& x) {
  auto summed = Handle<Value>::make(x);
  TensorSpec without_sums = *x.spec;
  without_sums.partial = {};
  summed->spec = &without_sums;
  summed->made_by = {"fetch", {}, {}};
  count(*summed);
  summed->storage = Handle<Storage>::make();
  summed->storage->buffer = x.spec->partial.empty()
                                ? x.data()
                                : reduce(x, *summed, in_mesh_order(*x.device, x.spec->partial), Reduction::sum);
  auto whole = Handle<Value>::make(*summed);
  TensorSpec unsharded = without_sums;
  for (Dim& dim : unsharded.dims) dim.axes = {};
  whole->spec = &unsharded;
  whole->local = x.global.padded;
  whole->storage = Handle<Storage>::make();
  whole->storage->buffer = gather(*summed, *whole);
  whole->spec = nullptr;  // the specs are local to this function
  return whole;
}

}  // namespace shardlib::detail
