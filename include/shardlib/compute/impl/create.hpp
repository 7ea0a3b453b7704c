// Definitions of create.hpp.
#pragma once

#include "shardlib/compute/create.hpp"

#include <string>

#include "shardlib/kernels/body/positions.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/support/crc32c.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE GlobalSizes given_sizes(const OpInfo& op, const DevicePtr& device, const TensorSpec& spec,
                                        const Sizes& sizes) {
  Bindings names(op, device);
  for (const NamedSize& given : sizes)
    if (spec.has(given.name)) names.bind(given);
  return names.sizes(spec);
}

SHARDLIB_INLINE std::int64_t first_index(const Value& x, int dim) {
  return shard_index(*x.device, x.spec->dims[dim].axes) * x.local[dim];
}

SHARDLIB_INLINE void note_data(const OpInfo& op, const Value& out, std::span<const std::byte> elements) {
  const auto axes = out.device->alike_axes(*out.spec);
  if (axes == 0) return;  // before the elements are read
  out.device->note_given({.kind = GivenInput::data, .op = op, .first = io::crc32c(elements), .size = out.bytes()},
                         axes);
}
SHARDLIB_INLINE void note_key(const Value& out, RandomKey key, float rate) {
  out.device->note_given({.kind = GivenInput::key,
                          .op = out.made_by,
                          .first = key.seed,
                          .second = key.stream,
                          .setting = rate,
                          .size = out.bytes()},
                         out.device->alike_axes(*out.spec));
}

SHARDLIB_INLINE void copy_first(const Value& x, void* element) {
  x.device->exec().copy(element, x.data().data(), size_of(x.dtype));
}

SHARDLIB_INLINE std::vector<f32> scalars_on_host(const std::vector<ValuePtr>& scalars) {
  std::vector<f32> numbers(scalars.size(), 1);
  if (scalars.empty()) return numbers;
  const Exec exec = scalars[0]->device->exec();
  const std::size_t bytes = numbers.size() * sizeof(f32);
  // A copy to the host waits, so those of a device are gathered in its memory first.
  const Buffer gathered = exec.on_device() ? scalars[0]->device->pool()->allocate(bytes) : Buffer();
  f32* const to = gathered ? gathered.as<f32>() : numbers.data();
  for (std::size_t k = 0; k < numbers.size(); ++k) exec.copy(to + k, scalars[k]->data().data(), sizeof(f32));
  if (gathered) exec.copy(numbers.data(), to, bytes);
  return numbers;
}

/// Records an array. `fill(shard, value)` writes its shard.
template <class F>
ValuePtr create(const OpInfo& op, const DevicePtr& device, DType dtype, const TensorSpec& spec, const Sizes& sizes,
                F fill) {
  return evaluate(
      make_recorded(op, device, dtype, spec, given_sizes(op, device, spec, sizes), {}),
      [fill](const Value& out) {
        Buffer result = allocate(out);
        fill(result, out);
        return result;
      },
      {}, numbers_in(fill));
}

SHARDLIB_INLINE void fill_constant(const Buffer& shard, const Value& out, double value) {
  visit_dtype(out.dtype, [&]<class D>(D /*zero*/) {
    kernels::apply_flat(out.device->exec(), out.count(),
                        kernels::body::ConstantElement<D>{static_cast<D>(static_cast<scalar_of<D>>(value))},
                        shard.as<D>());
  });
}
SHARDLIB_INLINE ValuePtr create_constant(const OpInfo& op, const DevicePtr& device, DType dtype, const TensorSpec& spec,
                                         const Sizes& sizes, double value) {
  check_number(op, spec, *device, dtype, value);
  return create(op, device, dtype, spec, sizes,
                [value](const Buffer& shard, const Value& out) { fill_constant(shard, out, value); });
}

SHARDLIB_INLINE ValuePtr create_iota(const OpInfo& op, const DevicePtr& device, const TensorSpec& spec, DimSize size) {
  return create_positions(op, device, spec, size, SequenceOrder::contiguous);
}
SHARDLIB_INLINE ValuePtr create_positions(const OpInfo& op, const DevicePtr& device, const TensorSpec& spec,
                                          DimSize size, SequenceOrder order) {
  if (size.padded > std::int64_t{1} << 31)
    throw Error(op.describe() + ": the size " + to_string(size) + " is more than i32 counts (" + device->describe() +
                ")");
  const NamedSize only{std::string(spec.dims[0].name), size.size, size.padded};
  auto positions = create(op, device, DType::i32, spec, {only}, [order](const Buffer& shard, const Value& out) {
    using kernels::body::Iota;
    const auto& axes = out.spec->dims[0].axes;
    i32* to = shard.as<i32>();
    for (const auto [first, n] :
         positions_of_shard(order, shard_index(*out.device, axes), shard_count(*out.device, axes), out.local[0])) {
      if (n > 0) out.device->exec().for_items((n + Iota::piece - 1) / Iota::piece, 0, Iota{first, n, to});
      to += n;
    }
  });
  require_order(op, positions, 0, order);
  return positions;
}

SHARDLIB_INLINE ValuePtr create_causal_mask(const OpInfo& op, const DevicePtr& device, const TensorSpec& spec,
                                            DimSize rows, DimSize columns) {
  if (rows.size < columns.size) {
    const std::string row(spec.dims[0].name), column(spec.dims[1].name);
    throw Error(op.describe() + ": row i sees the columns up to i, so with the sizes " + std::to_string(rows.size) +
                " and " + std::to_string(columns.size) + ", column " + std::to_string(columns.size - 1) +
                " is seen by no row; with a cache of `past` keys write `greater_equal(iota<\"" + row +
                "\">(mesh, rows) + past, iota<\"" + column + "\">(mesh, columns))` (" + device->describe() + ")");
  }
  const NamedSize row{std::string(spec.dims[0].name), rows.size, rows.padded};
  const NamedSize column{std::string(spec.dims[1].name), columns.size, columns.padded};
  return create(op, device, DType::bool_, spec, {row, column}, [](const Buffer& shard, const Value& out) {
    const std::int64_t ahead = first_index(out, 0) - first_index(out, 1), n = out.local[1];
    out.device->exec().for_items(out.local[0], 0, kernels::body::CausalMask{ahead, n, shard.as<bool_>()});
  });
}

}  // namespace shardlib::detail
