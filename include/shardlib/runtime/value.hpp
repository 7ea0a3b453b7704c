// The run-time value of a Tensor: one device's shard of a global array, type-erased.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>

#include "shardlib/device/device.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/sizes.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib::detail {

struct Node;
/// The destination of a value's cotangent: an output of the node that made it. Empty if the tape does not track the
/// value.
struct Slot {
  Handle<Node> node;
  int output = 0;
  explicit operator bool() const { return node != nullptr; }
  friend bool operator==(const Slot&, const Slot&) = default;
};

/// A weight by which value_and_grad differentiates the function that runs now.
struct Differentiated {
  std::string title;             ///< "the weight `w1`"
  Slot outside;                  ///< of the tensor that the call was given
  const Differentiated* around;  ///< the same storage as a weight of a call around this one
};

struct Value;

/// The buffer of a value or, for a deferred value, the function that computes it. Values that differ only in spec or
/// in slot share it.
struct Storage : Counted {
  explicit Storage(Buffer b = {}) : buffer(std::move(b)) {}

  Buffer buffer;
  std::function<Buffer()> compute;
  /// Adds the result of `compute` to a sum of the value's dtype, without materializing it. Only few values have it.
  std::function<void(std::byte* sum)> add_to = nullptr;
  /// For a product: computes it, in one kernel with its multiplication by the derivative of gelu at `x` if there is
  /// such a kernel, and returns whether it has multiplied. Only products that a gelu's VJP reads have it.
  std::function<bool(Storage& product, const Value& x)> with_gelu_slope = nullptr;
  const Differentiated* weight = nullptr;  ///< of the innermost call that differentiates by it
  Buffer mirror = {};                      ///< a copy of device memory in host memory, for `span`
  std::uint64_t number = 0;  ///< which tensor it is for functions that run again (tensor_number); 0: none has used it

  /// Computes the value if it is deferred.
  void materialize() {
    if (!compute) return;
    const auto how = std::exchange(compute, nullptr);
    add_to = nullptr;
    with_gelu_slope = nullptr;
    buffer = how();
  }
};

/// Reports a read to the device's observer, if it wants reads.
[[gnu::cold]] SHARDLIB_INLINE void note_read(const Value& value);
/// Adds to the report of this read that the op writes into the shard too.
[[gnu::cold]] SHARDLIB_INLINE void note_write(const Value& value);
/// Notes that the op has written the shard, and has not read it.
[[gnu::cold]] SHARDLIB_INLINE void note_overwritten(const Value& value);
/// Numbers a value that a function makes which runs again. An op of it numbers it once more.
[[gnu::cold]] SHARDLIB_INLINE void note_made(const Value& value);
/// Throws if an op reads a weight that is not the function's parameter, because the gradient would miss it.
[[gnu::cold]] SHARDLIB_INLINE void check_inside(const Value& value);
/// The error if the VJP of an op is differentiated, but has no derivative.
[[noreturn, gnu::cold]] SHARDLIB_INLINE void fail_twice(const OpInfo& op, const DevicePtr& device);

struct Value : Counted {
  DevicePtr device;
  DType dtype = DType::f32;
  const TensorSpec* spec = nullptr;  ///< static storage; belongs to the tensor's type
  GlobalSizes global;
  Shape local;  ///< of this device's shard, padding included; the padding always holds zeros
  OpInfo made_by;
  std::string label;  ///< the name of a leaf in its tree; empty for other values
  Slot slot;
  bool stopped = false;  ///< has no slot on purpose: a copy of a value with a slot, or the result of stop_gradient
  std::uint64_t checkpoint = 0;  ///< the ProgramState::checkpoint in which an op has made it
  Handle<Storage> storage;

  /// Whether a function is differentiated by this value. The shard of such a value outlives the function's call.
  [[nodiscard]] bool is_leaf() const { return !label.empty(); }
  [[nodiscard]] std::int64_t count() const { return product(local); }
  [[nodiscard]] std::size_t bytes() const { return static_cast<std::size_t>(count()) * size_of(dtype); }
  /// The shard; computes it now if it is deferred.
  [[nodiscard]] const Buffer& data() const {
    if (storage->weight != nullptr && !stopped) [[unlikely]]
      check_inside(*this);
    storage->materialize();
    note_read(*this);
    return storage->buffer;
  }
  /// The elements of the shard, to write into if T is not const.
  template <class T>
  [[nodiscard]] T* as() const {
    T* const elements = data().template as<T>();
    if constexpr (!std::is_const_v<T>) note_write(*this);
    return elements;
  }
  /// The shard as host code can read it.
  [[nodiscard]] Buffer on_host() const { return device->to_host(data()); }
};

/// The number of shards along a dim, and the index of this device's shard.
SHARDLIB_INLINE std::int64_t shard_count(const Device& device, const Axes& axes);
SHARDLIB_INLINE std::int64_t shard_index(const Device& device, const Axes& axes);

/// Throws if the device's `launch` has returned.
[[gnu::cold]] SHARDLIB_INLINE void require_running(const OpInfo& op, const Device& device);
/// A spec that is made at run time. It stays until the program ends, because values and recordings refer to it. It is
/// taken by value: g++ 16 warns of a reference that may dangle where a reference to a temporary goes in.
[[nodiscard]] SHARDLIB_INLINE const TensorSpec& lasting(TensorSpec spec);

/// A value without data: its sizes and local shape. Throws if the axes do not divide a size evenly.
[[gnu::cold]] SHARDLIB_INLINE Handle<Value> make_value(const OpInfo& op, const DevicePtr& device, DType dtype,
                                                       const TensorSpec& spec, const GlobalSizes& global);

/// The number of elements along each dim of this device's shard that are not padding. They come first in the shard.
[[gnu::cold]] SHARDLIB_INLINE Shape true_shape(const Value& x);

[[gnu::cold]] SHARDLIB_INLINE Buffer allocate(const Value& value);

/// The shard in host memory, for as long as the value's storage lives.
[[nodiscard]] SHARDLIB_INLINE const std::byte* host_data(const Value& value);

/// The same value without a slot.
[[gnu::cold]] SHARDLIB_INLINE Handle<Value> detached(const Value& value);
/// The same value without a slot, on the program's request. Also accepts a weight from outside the function.
[[gnu::cold]] SHARDLIB_INLINE Handle<Value> stopped(const Value& value);

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/runtime/impl/value.hpp"
#include "shardlib/runtime/program_state.hpp"  // defines note_read and the like, which Value::data calls
#endif
