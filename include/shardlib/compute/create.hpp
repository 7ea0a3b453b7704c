// Kernels of the ops that create arrays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/kernels/random.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/ops/create.hpp"
#include "shardlib/runtime/bindings.hpp"
#include "shardlib/runtime/tensor.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// The sizes of an array's dims, looked up by name. The list may contain other names, so that one list serves a whole
/// model.
[[nodiscard]] SHARDLIB_INLINE GlobalSizes given_sizes(const OpInfo& op, const DevicePtr& device, const TensorSpec& spec,
                                                      const Sizes& sizes);
/// The global index of this device's first element along a dim.
[[nodiscard]] SHARDLIB_INLINE std::int64_t first_index(const Value& x, int dim);

/// Sets every element of the shard to the number.
SHARDLIB_INLINE void fill_constant(const Buffer& shard, const Value& out, double value);

/// Calls fill(local shape, global strides, global index of the first element per dim). Together they give each
/// element a key: its position in the global array without padding.
template <class F>
void with_global_index(const Value& out, F fill) {
  Shape offsets;
  for (int i = 0; i < out.spec->rank(); ++i) offsets.push_back(first_index(out, i));
  fill(view(out.local), kernels::row_major(view(out.global.logical)).span(), view(offsets));
}

/// Notes the host's elements of a value's shard, without padding, or the key of its random numbers, and dropout's rate.
/// The devices that have the same shard compare them.
SHARDLIB_INLINE void note_data(const OpInfo& op, const Value& out, std::span<const std::byte> elements);
SHARDLIB_INLINE void note_key(const Value& out, RandomKey key, float rate = 1);

template <class D>
ValuePtr create_random(const OpInfo& op, const DevicePtr& device, const TensorSpec& spec, const Sizes& sizes,
                       RandomKey key, Distribution distribution) {
  const Kernel fill = [key, distribution](const Value& out) {
    note_key(out, key);
    Buffer result = allocate(out);
    with_global_index(out, [&](auto local, auto strides, auto offsets) {
      const auto draw = distribution == Distribution::normal ? kernels::fill_random<kernels::body::Normal, D>
                        : distribution == Distribution::truncated_normal
                            ? kernels::fill_random<kernels::body::TruncatedNormal, D>
                            : kernels::fill_random<kernels::body::Uniform, D>;
      draw(out.device->exec(), result.as<D>(), local, strides, offsets, key.seed, key.stream);
    });
    return result;
  };
  return evaluate(make_recorded(op, device, dtype_v<D>, spec, given_sizes(op, device, spec, sizes), {}), fill, {},
                  numbers_in(key));
}

/// Copies the shard's first element to the host. In a dry run there is none.
SHARDLIB_INLINE void copy_first(const Value& x, void* element);
/// The numbers of scalars of f32, in a dry run 1. The host gets all of them at once: it waits for their device once.
[[nodiscard]] SHARDLIB_INLINE std::vector<f32> scalars_on_host(const std::vector<ValuePtr>& scalars);
template <class D>
D first_element(const ValuePtr& x, D planned) {
  copy_first(*x, &planned);
  return planned;
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/create.hpp"
#endif
