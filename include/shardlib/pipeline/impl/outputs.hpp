// Joins the outputs of the last stage for all microbatches: concatenated, or reduced by max; for impl/ headers.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>

#include "shardlib/kernels/layout.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/pipeline/execute.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/handle.hpp"

namespace shardlib::pipeline::detail {

/// Passes on the microbatches' values in the order of the microbatches, in whatever order they arrive.
template <class T>
class InOrder {
 public:
  template <class Use>
  void add(int microbatch, T value, const Use& use) {
    early_.emplace(microbatch, std::move(value));
    for (; !early_.empty() && early_.begin()->first == next_; ++next_)
      use(std::move(early_.extract(early_.begin()).mapped()));
  }

 private:
  int next_ = 0;
  std::map<int, T> early_;
};

/// One tensor of all microbatches. Each is copied to its place as it comes, in whatever order.
class Concatenation {
 public:
  Concatenation(const OutputShape& shape, int microbatches) : shape_(shape), microbatches_(microbatches) {}

  void add(int microbatch, const ValuePtr& value) {
    const core::Value& part = *value;
    const bool is_new = part.spec->rank() < shape_.spec->rank();  // the dim: first, and of size 1 in a part
    core::GlobalSizes sizes;
    if (is_new) sizes.push_back(DimSize(1));
    for (int i = 0; i < part.global.size(); ++i) sizes.push_back(part.global[i]);
    const DimSize one = sizes[shape_.dim];
    if (one.is_padded())
      throw Error("Concat: dim `" + std::string(shape_.spec->dims[shape_.dim].name) + "` is " + core::to_string(one) +
                  ", and the padding of a microbatch would be before the next one; choose a size that needs none");
    sizes.set(shape_.dim, DimSize(one.size * microbatches_));
    if (!whole_) {
      whole_ = core::make_value({"concat", {}, {}}, part.device, part.dtype, *shape_.spec, sizes);
      whole_->storage = core::Handle<core::Storage>::make(core::allocate(*whole_));
    }
    if (!(sizes.logical == whole_->global.logical && sizes.padded == whole_->global.padded))
      throw Error("Concat: microbatch " + std::to_string(microbatch) +
                  " has other sizes than those before it; all microbatches of a step have one shape (" +
                  part.device->describe() + ")");
    kernels::DimVector strides, whole = kernels::row_major(core::view(whole_->local));
    for (int i = is_new ? 1 : 0; i < whole.count; ++i) strides.push(whole[i]);
    const std::size_t element = size_of(part.dtype);
    const std::int64_t size = whole_->local[shape_.dim] / microbatches_;
    const auto offset = static_cast<std::size_t>(microbatch * size * whole[shape_.dim]) * element;
    kernels::copy_strided(part.device->exec(), element, core::view(part.local), part.data().data(),
                          kernels::row_major(core::view(part.local)), whole_->storage->buffer.data() + offset, strides);
  }
  ValuePtr take() { return std::move(whole_); }

 private:
  OutputShape shape_;
  int microbatches_;
  core::Handle<core::Value> whole_;
};

/// The maximum over the microbatches, taken in their order: of 0 and -0 the first one stays.
class Maximum {
 public:
  explicit Maximum(ValuePtr (*larger)(const ValuePtr&, const ValuePtr&)) : larger_(larger) {}

  void add(int microbatch, const ValuePtr& part) {
    in_order_.add(microbatch, part, [&](const ValuePtr& next) {
      if (most_ && !(most_->global.logical == next->global.logical && most_->global.padded == next->global.padded))
        throw Error(
            "Max: a microbatch has other sizes than those before it; all microbatches of a step have one shape (" +
            next->device->describe() + ")");
      most_ = most_ ? larger_(most_, next) : next;
    });
  }
  ValuePtr take() { return std::move(most_); }

 private:
  ValuePtr (*larger_)(const ValuePtr&, const ValuePtr&);
  InOrder<ValuePtr> in_order_;
  ValuePtr most_;
};

/// An output of the last stage, as its type says.
class LastStageOutput {
 public:
  LastStageOutput(const StageOutput& output, int microbatches)
      : joined_(output.larger ? Joined(Maximum(output.larger)) : Joined(Concatenation(output.shape, microbatches))) {}

  void add(int microbatch, const ValuePtr& part) {
    std::visit([&](auto& joined) { joined.add(microbatch, part); }, joined_);
  }
  ValuePtr take() {
    return std::visit([](auto& joined) { return joined.take(); }, joined_);
  }

 private:
  using Joined = std::variant<Concatenation, Maximum>;
  Joined joined_;
};

}  // namespace shardlib::pipeline::detail
