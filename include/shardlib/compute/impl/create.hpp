// Definitions of create.hpp.
#pragma once

#include "shardlib/compute/create.hpp"

#include <algorithm>
#include <string>

#include "shardlib/support/error.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE GlobalSizes given_sizes(const OpInfo& op, const std::shared_ptr<Device>& device, const TensorSpec& spec,
                                        const Sizes& sizes) {
  Bindings names(op, device);
  for (const NamedSize& given : sizes)
    if (spec.has(given.name)) names.bind(given);
  return names.sizes(spec);
}

SHARDLIB_INLINE std::int64_t first_index(const Value& x, int dim) {
  return shard_index(*x.device, x.spec->dims[dim].axes) * x.local[dim];
}

/// Records an array. `fill(shard, value)` writes its shard.
template <class F>
ValuePtr create(const OpInfo& op, const DevicePtr& device, DType dtype, const TensorSpec& spec, const Sizes& sizes,
                F fill) {
  return record_erased(op, device, dtype, spec, given_sizes(op, device, spec, sizes),
                       [fill](const Value& out) {
                         Buffer result = allocate(out);
                         if (!out.device->is_dry()) fill(result, out);
                         return result;
                       },
                       {});
}

SHARDLIB_INLINE void fill_constant(const Buffer& shard, const Value& out, double value) {
  if (out.device->is_dry()) return;
  visit_dtype(out.dtype, [&]<class D>(D /*zero*/) {
    std::fill_n(shard.as<D>(), out.count(), static_cast<D>(static_cast<scalar_of<D>>(value)));
  });
}
SHARDLIB_INLINE ValuePtr create_constant(const OpInfo& op, const DevicePtr& device, DType dtype, const TensorSpec& spec,
                                         const Sizes& sizes, double value) {
  check_number(op, spec, *device, dtype, value);
  return create(op, device, dtype, spec, sizes,
                [value](const Buffer& shard, const Value& out) { fill_constant(shard, out, value); });
}

SHARDLIB_INLINE ValuePtr create_iota(const OpInfo& op, const DevicePtr& device, const TensorSpec& spec, DimSize size) {
  if (size.padded > std::int64_t{1} << 31)
    throw Error(op.describe() + ": the size " + to_string(size) + " is more than i32 counts (" + device->describe() +
                ")");
  const NamedSize only{std::string(spec.dims[0].name), size.size, size.padded};
  return create(op, device, DType::i32, spec, {only}, [](const Buffer& shard, const Value& out) {
    const std::int64_t first = first_index(out, 0);
    for (std::int64_t i = 0; i < out.count(); ++i) shard.as<i32>()[i] = static_cast<i32>(first + i);
  });
}

SHARDLIB_INLINE ValuePtr create_causal_mask(const OpInfo& op, const DevicePtr& device, const TensorSpec& spec,
                                            DimSize rows, DimSize columns) {
  const NamedSize row{std::string(spec.dims[0].name), rows.size, rows.padded};
  const NamedSize column{std::string(spec.dims[1].name), columns.size, columns.padded};
  return create(op, device, DType::bool_, spec, {row, column}, [](const Buffer& shard, const Value& out) {
    const std::int64_t first_row = first_index(out, 0), first_column = first_index(out, 1);
    for (std::int64_t i = 0; i < out.local[0]; ++i)
      for (std::int64_t j = 0; j < out.local[1]; ++j)
        shard.as<bool_>()[i * out.local[1] + j] = first_row + i >= first_column + j;
  });
}

}  // namespace shardlib::detail
