// Sums of cotangents, for impl/ headers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "shardlib/device/exec.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/runtime/observe.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// Copies n numbers and converts them, between bf16 and the f32 in which bf16 accumulates.
SHARDLIB_INLINE void convert_numbers(const Exec& exec, std::int64_t n, DType from_dtype, const Buffer& from,
                                     DType to_dtype, const Buffer& to);
/// Adds n numbers of a dtype to `sum`, of its accumulator.
SHARDLIB_INLINE void add_numbers(const Exec& exec, std::int64_t n, DType dtype, const Buffer& from, const Buffer& sum);

/// The sum as a value of the tape, where that tracks some of the addends, whose slots are given.
SHARDLIB_INLINE ValuePtr tracked_sum(const Value& sum, const std::vector<Slot>& addends);

/// Sums the cotangents of all uses of one value. It sums in f32, rounds once, and works in place if the buffer has no
/// other owner. The sum is on the tape if an addend is, for a gradient that is differentiated. What a value adds by
/// itself (add_to) is rounded apart: an f32 copy of a table, for the few rows that a lookup reads, would be more than
/// all else that a step adds to the weights' memory.
class Accumulator {
 public:
  void add(ValuePtr ct) {
    if (ct->slot) {
      tracked_.push_back(ct->slot);
      ct = detached(*ct);
    }
    if (!sum_) {
      if (ct->storage->add_to) ct->storage->materialize();  // the first cotangent: there is no sum yet to add it to
      sum_ = std::move(ct);
      return;
    }
    // The order of the sum decides its bits. So a cotangent that has not arrived also delays those that come after it.
    const auto arrived = std::find_if(later_.begin(), later_.end(), under_way);
    std::for_each(later_.begin(), arrived, [&](const ValuePtr& early) { add_now(early); });
    later_.erase(later_.begin(), arrived);
    under_way(ct) || !later_.empty() ? later_.push_back(std::move(ct)) : add_now(ct);
  }
  ValuePtr take() {
    for (const ValuePtr& ct : std::exchange(later_, {})) add_now(ct);
    if (owned_ && sum_->dtype != dtype_) sum_ = copied(*sum_, dtype_);
    return tracked_.empty() ? std::move(sum_) : tracked_sum(*sum_, tracked_);
  }

 private:
  static bool under_way(const ValuePtr& ct) { return ct->storage->compute && !ct->storage->add_to; }
  void add_now(const ValuePtr& ct) {
    if (!program_state(ct->device).observer) return add_to_sum(ct);
    Value shape = *sum_;
    shape.made_by = ct->storage->add_to ? ct->made_by : OpInfo{"accumulate", {}, {}};
    shape.storage = Handle<Storage>::make();  // its own storage, because otherwise the sum would count as in use
    observed(shape, [&] {
      static_cast<void>(sum_->data());
      add_to_sum(ct);
      program_state(ct->device).work.in_place = true;
      return sum_->storage->buffer;
    });
  }
  void add_to_sum(const ValuePtr& ct) {
    if (!owned_) dtype_ = sum_->dtype;
    const bool adds_itself = ct->storage->add_to && sum_->dtype == dtype_;
    const DType wide = !adds_itself && dtype_ == DType::bf16 ? DType::f32 : dtype_;
    const auto shared = [&] { return sum_.use_count() > 1 || sum_->storage.use_count() > 1 || !sum_->data().unique(); };
    if (wide != sum_->dtype || (!owned_ && shared())) sum_ = copied(*sum_, wide);
    owned_ = true;
    if (adds_itself) return ct->storage->add_to(sum_->storage->buffer.data());
    add_numbers(ct->device->exec(), ct->count(), ct->dtype, ct->data(), sum_->storage->buffer);
  }
  static Handle<Value> copied(const Value& from, DType dtype) {
    auto to = Handle<Value>::make(from);
    to->dtype = dtype;
    to->storage = Handle<Storage>::make(allocate(*to));
    convert_numbers(from.device->exec(), from.count(), from.dtype, from.data(), dtype, to->storage->buffer);
    return to;
  }
  ValuePtr sum_;
  std::vector<ValuePtr> later_;  ///< not yet in the sum
  std::vector<Slot> tracked_;    ///< of the addends that the tape tracks
  DType dtype_ = DType::f32;
  bool owned_ = false;
};

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/autodiff/impl/accumulator.hpp"
#endif
