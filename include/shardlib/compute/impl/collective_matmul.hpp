// Einsums of a device's shards that overlap with the transfer of an operand's or the result's shards.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/autodiff/accumulator.hpp"
#include "shardlib/autodiff/tape.hpp"
#include "shardlib/comm/reduce_tree.hpp"
#include "shardlib/compute/einsum.hpp"
#include "shardlib/compute/impl/shard_transfer.hpp"
#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/einsum.hpp"
#include "shardlib/kernels/layout.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/ops/collective_matmul.hpp"
#include "shardlib/runtime/names.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// A dense array as equal slices along a dim. An array without that dim is one slice, which all others meet. A slice is
/// a dense array, too: within the whole one, or in memory of its own.
class Sliced {
 public:
  /// At `dim` -1 the array lacks the dim.
  Sliced(const Exec& exec, DType dtype, const Shape& whole, int dim, std::int64_t slices)
      : exec_(exec), element_(size_of(dtype)), whole_(whole), slice_(whole) {
    if (dim < 0) return;
    slices_ = slices;
    slice_[dim] /= slices;
    if (slices > 1)
      for (int i = 0; i < dim; ++i) rows_ *= whole[i];
    stride_ = slice_[dim] * kernels::row_major(view(whole))[dim];
  }
  [[nodiscard]] const Shape& shape() const { return slice_; }  ///< of a slice
  /// How many bytes of the whole array must be there to read the slices up to this one. All, if they lie in pieces.
  [[nodiscard]] std::size_t read_until(std::int64_t index) const {
    return in_place() ? offset(index) + bytes(slice_) : bytes(whole_);
  }
  /// How many bytes of it are complete when the slices up to this one are written. None, if more follow in pieces.
  [[nodiscard]] std::size_t written_until(std::int64_t index) const {
    return in_place() || index + 1 == slices_ ? read_until(index) : 0;
  }
  /// A slice to read.
  [[nodiscard]] Buffer read(const Buffer& whole, std::int64_t index) const {
    const Buffer slice = write(whole, index);
    if (!in_place())
      kernels::copy_strided(exec_, element_, view(slice_), whole.data() + offset(index),
                            kernels::row_major(view(whole_)), slice.data(), kernels::row_major(view(slice_)));
    return slice;
  }
  /// A slice to write; `written` puts it into the whole array.
  [[nodiscard]] Buffer write(const Buffer& whole, std::int64_t index) const {
    return in_place() ? whole.slice(offset(index), bytes(slice_)) : exec_.pool->allocate(bytes(slice_));
  }
  void written(const Buffer& slice, const Buffer& whole, std::int64_t index) const {
    if (!in_place())
      kernels::copy_strided(exec_, element_, view(slice_), slice.data(), kernels::row_major(view(slice_)),
                            whole.data() + offset(index), kernels::row_major(view(whole_)));
  }

 private:
  [[nodiscard]] bool in_place() const { return rows_ <= 1; }
  [[nodiscard]] std::size_t offset(std::int64_t index) const {
    return static_cast<std::size_t>(index * stride_) * element_;
  }
  [[nodiscard]] std::size_t bytes(const Shape& shape) const {
    return static_cast<std::size_t>(product(shape)) * element_;
  }

  Exec exec_;
  std::size_t element_;
  Shape whole_, slice_;
  std::int64_t slices_ = 1;
  std::int64_t rows_ = 1;    ///< contiguous pieces of a slice in the whole array
  std::int64_t stride_ = 0;  ///< between two slices, in elements
};

/// In how many parts a device multiplies a shard, which has `length` elements along the dim. Parts are longer where
/// they are added (`sums`), as each reads and writes the whole sum. On CPUs it depends on the sizes and the tuning
/// alone, so that every backend gives the same bits.
inline std::int64_t parts_of_shard(const Value& made, std::int64_t length, double flops, bool sums) {
  constexpr std::int64_t most = 8;
  if (made.device->exec().on_device()) return 1;  // kernels there need no turn of the host
  const double least = made.device->tuning().product_part * (sums ? 4 : 1);
  for (std::int64_t parts = most; parts > 1; --parts)
    if (length > 0 && length % parts == 0 && flops >= static_cast<double>(parts) * least) return parts;
  return 1;
}

/// An einsum with one shard of an operand after the other, in order to get the shard `out` of a value.
class ShardProducts {
 public:
  ShardProducts(const GatheringEinsum& e, const Value& out, const Buffer& result, int devices)
      : exec_(out.device->exec()),
        e_(e),
        result_(result),
        count_(out.count()),
        sums_(devices > 1 && !out.spec->has(e.dim)),
        dtype_(sums_ ? dtype_of_sum(out.dtype) : out.dtype),
        shard_((e.first ? e.a : e.b).get()),
        other_((e.first ? e.b : e.a).get()),
        others_data_(other_->data()),
        at_(shard_->spec->find(e.dim)),
        parts_(devices == 1 ? 1 : parts_of_shard(out, shard_->local[at_], einsum_flops(*shard_, *other_), sums_)),
        shards_(exec_, shard_->dtype, shard_->local, at_, parts_),
        others_(exec_, other_->dtype, other_->local, other_->spec->find(e.dim), parts_ * devices),
        outs_(exec_, out.dtype, out.local, out.spec->find(e.dim), parts_ * devices) {
    if (dtype_ != out.dtype) total_ = exec_.pool->allocate(static_cast<std::size_t>(count_) * size_of(dtype_));
    add_flops(out, devices * einsum_flops(*shard_, *other_));
  }

  /// Multiplies the shard of the device with index `place`. Calls `need`, with the bytes of the shard that it reads,
  /// before each part, and `between` after it.
  template <class F, class G>
  void add(const Buffer& shard, int place, const F& need, const G& between) {
    for (std::int64_t part = 0; part < parts_; ++part) {
      const std::int64_t index = place * parts_ + part;
      need(shards_.read_until(part));
      const Buffer x = shards_.read(shard, part), y = others_.read(others_data_, index);
      if (sums_) {
        multiply(x, y, total_ ? total_ : result_, std::exchange(started_, true));
      } else {
        const Buffer z = outs_.write(result_, index);
        multiply(x, y, z, false);
        outs_.written(z, result_, index);
      }
      between();
    }
  }
  /// After the last shard.
  void finish() const {
    if (total_) convert_numbers(exec_, count_, DType::f32, total_, DType::bf16, result_);
  }

 private:
  void multiply(const Buffer& x, const Buffer& y, const Buffer& to, bool add) const {
    const auto run = [&](const Buffer& a, const Sliced& of_a, const Buffer& b, const Sliced& of_b) {
      kernels::einsum(exec_, *e_.plan, shard_->dtype, dtype_, a.data(), view(of_a.shape()), b.data(),
                      view(of_b.shape()), to.data(), add);
    };
    e_.first ? run(x, shards_, y, others_) : run(y, others_, x, shards_);
  }

  Exec exec_;
  const GatheringEinsum& e_;
  Buffer result_, total_;
  std::int64_t count_;
  bool sums_, started_ = false;
  DType dtype_;  ///< in which the products are added
  const Value *shard_, *other_;
  Buffer others_data_;
  int at_;
  std::int64_t parts_;
  Sliced shards_, others_, outs_;
};

/// Lets the shards of all devices pass through this one, its own first, and computes with each the products.
inline void multiply_gathered(const Value& made, const Value& shard, std::string_view axis,
                              std::span<ShardProducts* const> products) {
  const DeviceRing ring(made, axis);
  Buffer here = shard.data();
  std::optional<ShardTransfer> arriving;  // of `here`, except for the device's own
  for (int step = 0; step < ring.size(); ++step) {
    std::optional<ShardTransfer> after;
    if (step + 1 < ring.size()) after.emplace(ring, here, 1);
    const auto need = [&](std::size_t bytes) {
      const std::size_t arrived = arriving ? arriving->wait_until(bytes) : here.bytes();
      if (after) after->send_until(arrived);
    };
    const auto progress = [&] {
      if (arriving) arriving->test();
      if (after) after->test();
    };
    for (ShardProducts* const p : products) p->add(here, ring.at(-step), need, progress);
    need(here.bytes());
    arriving = std::move(after);
    here = arriving ? arriving->arriving() : Buffer();
  }
  for (const ShardProducts* const p : products) p->finish();
}

SHARDLIB_INLINE Buffer GatheringEinsum::operator()(const Value& out) const {
  Buffer result = allocate(out);
  ShardProducts products(*this, out, result, out.device->size(axis));
  const std::array<ShardProducts*, 1> all{&products};
  multiply_gathered(out, first ? *a : *b, axis, all);
  return result;
}

SHARDLIB_INLINE Buffer ScatteringEinsum::operator()(const Value& out) const {
  const DeviceRing ring(out, axis);
  const Exec exec = out.device->exec();
  const auto& pool = out.device->pool();
  const int at = out.spec->find(dim), devices = ring.size();
  const double flops = einsum_flops(*a, *b);
  add_flops(out, flops);
  const std::int64_t parts = devices == 1 ? 1 : parts_of_shard(out, out.local[at], flops / devices, false);
  const Sliced of_a(exec, a->dtype, a->local, a->spec->find(dim), parts * devices),
      of_b(exec, b->dtype, b->local, b->spec->find(dim), parts * devices);
  const DType sum_dtype = dtype_of_sum(out.dtype);
  const std::int64_t count = out.count();
  const std::size_t sum_bytes = static_cast<std::size_t>(count) * size_of(sum_dtype);
  const bool wide = sum_dtype != out.dtype && devices > 1;

  const Buffer left = a->data(), right = b->data();
  const auto multiply = [&](int place, DType dtype, const Buffer& to, const auto& after) {
    const Sliced shard(exec, dtype, out.local, at, parts);
    for (std::int64_t part = 0; part < parts; ++part) {
      const std::int64_t index = place * parts + part;
      const Buffer x = of_a.read(left, index), y = of_b.read(right, index), z = shard.write(to, part);
      kernels::einsum(exec, *plan, a->dtype, dtype, x.data(), view(of_a.shape()), y.data(), view(of_b.shape()),
                      z.data());
      shard.written(z, to, part);
      after(shard.written_until(part));
    }
  };

  Buffer result = allocate(out);
  const Buffer total = wide ? pool->allocate(sum_bytes) : result;
  std::optional<ShardTransfer> arriving;
  const auto take = [&](bool first) {
    const Buffer& received = arriving->arriving();
    arriving->wait_until(received.bytes());
    first ? convert_numbers(exec, count, out.dtype, received, sum_dtype, total)
          : add_numbers(exec, count, out.dtype, received, total);
  };
  for (int step = 1; step < devices; ++step) {
    const Buffer sum = allocate(out);
    ShardTransfer after(ring, sum, step);
    multiply(ring.at(step), out.dtype, sum, [&](std::size_t bytes) {
      after.send_until(bytes);
      after.test();
    });
    if (step > 1) take(step == 2);
    arriving = std::move(after);
  }
  if (devices == 1) {
    multiply(0, out.dtype, result, [](std::size_t) {});
    return result;
  }
  const Buffer own = pool->allocate(sum_bytes);
  multiply(ring.at(0), sum_dtype, own, [&](std::size_t) { arriving->test(); });
  take(devices == 2);
  add_numbers(exec, count, sum_dtype, own, total);
  if (wide) convert_numbers(exec, count, sum_dtype, total, out.dtype, result);
  return result;
}

SHARDLIB_INLINE ValuePtr record_einsum_scatter(const OpInfo& op, const ScatteringEinsum& product,
                                               const TensorSpec& spec, const GlobalSizes& global,
                                               const std::array<const kernels::EinsumPlan*, 2>& backward,
                                               const std::array<const TensorSpec*, 2>& due) {
  note_operand(*product.a);
  note_operand(*product.b);
  auto out = make_value(op, product.a->device, product.a->dtype, spec, global);
  bind_names(op, *out);
  std::array<Handle<Value>, 2> kept{detached(*product.a), detached(*product.b)};
  std::vector<Node::Edge> edges(kept.size());
  edges[0].input = product.a->slot;
  edges[1].input = product.b->slot;
  const std::array wanted{bool(product.a->slot), bool(product.b->slot)};
  // The cotangent of each operand needs the data of the other operand, and only the shape of its own.
  for (std::size_t i = 0; i < kept.size(); ++i)
    if (wanted[i])
      edges[i].saved.values = {kept[1 - i]};
    else
      kept[1 - i]->storage = nullptr;
  const std::array<ValuePtr, 2> operands{kept[0], kept[1]};
  const auto dim = product.dim, axis = product.axis;
  attach(out, std::move(edges), [=](const std::vector<ValuePtr>& cts) {
    return fused_cotangents({"einsum_scatter_backward", op.spec, {}}, operands, wanted, due,
                            [&](const Value& first, std::span<const ValuePtr> grads) {
                              std::array<GatheringEinsum, 2> einsums{};
                              std::array<std::optional<ShardProducts>, 2> products;
                              std::vector<ShardProducts*> used;
                              for (std::size_t i = 0; i < grads.size(); ++i) {
                                if (!grads[i]) continue;
                                einsums[i] = {backward[i], cts[0], operands[1 - i], true, dim, axis};
                                used.push_back(&products[i].emplace(einsums[i], *grads[i], grads[i]->storage->buffer,
                                                                    first.device->size(axis)));
                              }
                              multiply_gathered(first, *cts[0], axis, used);
                            });
  });
  evaluate(out, product);
  return out;
}

}  // namespace shardlib::detail
