// The run-time value of a Tensor: one device's shard of a global array, type-erased.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/support/stopwatch.hpp"
#include "shardlib/types/sizes.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib::detail {

struct Node;
/// The destination of a value's cotangent: an output of the node that made it. Empty if the tape does not track the
/// value.
struct Slot {
  std::shared_ptr<Node> node;
  int output = 0;
  explicit operator bool() const { return node != nullptr; }
};

/// The buffer of a value or, for a deferred value, the function that computes it. Values that differ only in spec or
/// in slot share it.
struct Storage {
  Buffer buffer;
  std::function<Buffer()> compute;
  /// Adds the result of `compute` to a sum of the value's dtype, without materializing it. Only few values have it.
  std::function<void(std::byte* sum)> add_to = nullptr;
  /// "the weight `w1`", while value_and_grad runs the function that it differentiates by this weight.
  const std::string* weight = nullptr;
  Buffer mirror = {};  ///< a copy of device memory in host memory, for `span`

  /// Computes the value if it is deferred.
  void materialize() {
    if (!compute) return;
    const auto how = std::exchange(compute, nullptr);
    add_to = nullptr;
    buffer = how();
  }
};

struct Value;
/// Reports a read to the device's observer, if it wants reads.
void note_read(const Value& value);
/// The error if an op reads a weight that is not the function's parameter, because the gradient would miss it.
[[noreturn, gnu::cold]] void fail_outside(const Value& value);

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
  std::shared_ptr<Storage> storage;

  /// Whether a function is differentiated by this value. The shard of such a value outlives the function's call.
  [[nodiscard]] bool is_leaf() const { return !label.empty(); }
  [[nodiscard]] std::int64_t count() const { return product(local); }
  [[nodiscard]] std::size_t bytes() const { return static_cast<std::size_t>(count()) * size_of(dtype); }
  /// The shard; computes it now if it is deferred.
  [[nodiscard]] const Buffer& data() const {
    if (storage->weight != nullptr && !slot && !stopped) [[unlikely]]
      fail_outside(*this);
    storage->materialize();
    note_read(*this);
    return storage->buffer;
  }
  template <class T>
  [[nodiscard]] T* as() const {
    return data().template as<T>();
  }
  /// The shard as host code can read it.
  [[nodiscard]] Buffer on_host() const { return device->to_host(data()); }
};

/// The content of a Mesh. tensor.hpp only declares DevicePtr.
struct MeshDevice : Counted {
  explicit MeshDevice(DevicePtr d) : device(std::move(d)) {}
  DevicePtr device;
};

/// An asynchronous collective. The first op that reads its result waits for it. The destructor does not wait, because a
/// failing device must not wait for the others.
struct PendingCollective {
  Request request;
  std::shared_ptr<Buffer> result;  ///< set once `request` is complete
  std::uint64_t hook;              ///< ProgramState::hooks at its start, or at the latest request for it
  bool done = false;

  ValuePtr operand;                 ///< for a gather, or while ProgramState::keep_shards is set
  ValuePtr gathered;                ///< for a gather: receives the result at the first read
  std::weak_ptr<Storage> gradient;  ///< for the sum of a gradient: likewise
  /// The operand of a sum, held until `request` is complete, so that memory use does not depend on when peers read it.
  Buffer sent;

  PendingCollective(Request r, std::shared_ptr<Buffer> b, std::uint64_t h)
      : request(std::move(r)), result(std::move(b)), hook(h) {}
  PendingCollective(const PendingCollective&) = delete;
  PendingCollective& operator=(const PendingCollective&) = delete;
  ~PendingCollective() { request.drop(); }
};

/// The sizes of named dims, with the place where each occurred first. A Scope, value_and_grad and spmd each have one.
class NameSizes {
 public:
  /// `owner` is for example "value_and_grad". Without an owner, sizes are not checked: in a backward pass the forward
  /// pass has checked the ops.
  explicit NameSizes(const char* owner = nullptr) : owner_(owner) {}
  [[nodiscard, gnu::cold]] std::optional<DimSize> find(std::string_view name) const;
  /// Returns the reason why the name cannot have this size, or nothing. For a new name it stores `where` the size
  /// occurred. For a conflict the error contains `here`: " in argument 2".
  [[nodiscard, gnu::cold]] std::string bind(std::string_view name, DimSize size,
                                            const std::function<std::string()>& where, std::string_view here = {});

 private:
  struct Entry {
    std::string name;
    DimSize size;
    std::string where;
  };
  const char* owner_;
  std::vector<Entry> entries_;
};

/// What a RecomputePolicy means.
struct Kept {
  bool marked = true;            ///< what passes through save_for_backward
  std::vector<std::string> ops;  ///< the results of these ops
  bool all_occur = false;        ///< an op that does not occur is an error
};

/// State of one device's program.
struct ProgramState {
  enum class Mode {
    eager,       ///< compute, and record for differentiation
    checkpoint,  ///< forward pass inside explicit_activation_checkpointing: compute, record nothing
    replay,      ///< the same function in the backward pass: record, compute when read
    start        ///< start gathers and scatters, compute when read, record nothing
  };
  Mode mode = Mode::eager;
  std::vector<ValuePtr> saved;  ///< the values that save_for_backward keeps (checkpoint) or returns (replay)
  std::size_t next_saved = 0;
  std::shared_ptr<const Kept> kept;                ///< what the function that is checkpointed or replayed keeps
  std::uint64_t sequence = 0;                      ///< numbers the nodes of the tape
  std::vector<std::shared_ptr<NameSizes>> scopes;  ///< the innermost one applies; a replay shares it
  std::vector<std::shared_ptr<PendingCollective>> pending;  ///< in the order of their start
  bool overlaps = false;    ///< the differentiated function calls prefetch, so sums of gradients are asynchronous
  std::uint64_t hooks = 0;  ///< number of times that `prefetch` has run, forward or backward

  struct Count {
    std::int64_t calls = 0;
    std::int64_t bytes = 0;  ///< sent by this device in collectives
    double flops = 0;        ///< of products; a multiply-add counts as two
  };
  std::map<std::string, Count, std::less<>> counts;

  /// A shard that an op has read: an operand's, or its own result's if it writes through a Value.
  struct Read {
    const void* shard;
    std::string what;  ///< the leaf's name, or the op that made it
    const TensorSpec* spec;
    std::size_t bytes;
  };
  /// The work of one op.
  struct OpWork {
    std::int64_t bytes = 0;  ///< sent by this device
    double flops = 0;
    Axes axes;                ///< the axes that it communicated over
    std::vector<Read> reads;  ///< while note_reads is set
    bool in_place = false;    ///< the op wrote its result into a shard that it read
  };
  /// One execution of an op, in times of the steady clock.
  struct Ran {
    const OpInfo& op;
    const TensorSpec& spec;  ///< of the result
    DType dtype;             ///< of the result
    const void* shard;       ///< of the result
    std::size_t bytes;       ///< of the result's shard
    /// The op ran in the backward pass, because something read a value that the replay had deferred.
    bool recomputed;
    OpWork work;
    std::int64_t begin_ns, end_ns;
  };
  OpWork work;                               ///< of the op that runs now, while there is an observer
  std::function<void(const Ran&)> observer;  ///< called after each op
  bool note_reads = false;
  bool keep_shards = false;        ///< an op's operands keep their shards until the observer has the op's report
  std::size_t residual_bytes = 0;  ///< bytes of the pool that the last value_and_grad kept for its backward pass
  enum class Pass { none, forward, backward };
  Pass pass = Pass::none;  ///< of value_and_grad
  Stopwatch stopwatch;     ///< times of value_and_grad's passes and of the collectives, since the last reset
};

[[gnu::cold]] SHARDLIB_INLINE ProgramState& program_state(const std::shared_ptr<Device>& device);

/// Opens a scope of names and closes it on every exit from the C++ block.
class WithNames {
 public:
  WithNames(ProgramState& state, std::shared_ptr<NameSizes> names) : state_(state) {
    state_.scopes.push_back(std::move(names));
  }
  WithNames(const WithNames&) = delete;
  WithNames& operator=(const WithNames&) = delete;
  ~WithNames() { state_.scopes.pop_back(); }

 private:
  ProgramState& state_;
};

/// The open scope, or a new one for `owner`. Sizes of names apply to all ops that a function runs.
[[gnu::cold]] SHARDLIB_INLINE std::shared_ptr<NameSizes> names_within(const ProgramState& state, const char* owner);

/// Checks the names of a value's dims against their sizes in the open scope. The value is the result of `op`, or an
/// operand of its call at `where`: "argument 2".
[[gnu::cold]] SHARDLIB_INLINE void bind_names(const OpInfo& op, const Value& value, const std::string& where = {});

/// Sets the program's mode and resets it on every exit from the C++ block.
class WithMode {
 public:
  WithMode(ProgramState& state, ProgramState::Mode mode, std::vector<ValuePtr> saved = {},
           std::shared_ptr<const Kept> kept = nullptr)
      : state_(state),
        mode_(std::exchange(state.mode, mode)),
        kept_(std::exchange(state.kept, std::move(kept))),
        saved_(std::exchange(state.saved, std::move(saved))),
        next_(std::exchange(state.next_saved, 0)) {}
  WithMode(const WithMode&) = delete;
  WithMode& operator=(const WithMode&) = delete;
  ~WithMode() {
    state_.mode = mode_;
    state_.kept = std::move(kept_);
    state_.saved = std::move(saved_);
    state_.next_saved = next_;
  }

 private:
  ProgramState& state_;
  ProgramState::Mode mode_;
  std::shared_ptr<const Kept> kept_;
  std::vector<ValuePtr> saved_;
  std::size_t next_;
};

[[gnu::cold]] SHARDLIB_INLINE void note_read(const Value& value);

/// The number of shards along a dim, and the index of this device's shard.
SHARDLIB_INLINE std::int64_t shard_count(const Device& device, const Axes& axes);
SHARDLIB_INLINE std::int64_t shard_index(const Device& device, const Axes& axes);

/// A value without data: its sizes and local shape. Throws if the axes do not divide a size evenly.
[[gnu::cold]] SHARDLIB_INLINE Handle<Value> make_value(const OpInfo& op, const std::shared_ptr<Device>& device,
                                                       DType dtype, const TensorSpec& spec, const GlobalSizes& global);

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

namespace shardlib {

/// While it lives, a name has one size across calls on this device (seqax's Scope). A call of value_and_grad or spmd
/// opens one for all its ops. If a part of the program uses the names for other sizes, it opens its own Scope: scopes
/// nest, and the innermost one applies. `const Scope scope(mesh);`
class Scope {
 public:
  template <Spec A>
  explicit Scope(const Mesh<A>& mesh)
      : device_(mesh.device()),
        names_(detail::program_state(device_), std::make_shared<detail::NameSizes>("this Scope")) {}

 private:
  std::shared_ptr<Device> device_;
  detail::WithNames names_;
};

template <class D, Spec S>
std::int64_t Tensor<D, S>::size(std::string_view dim) const {
  const int at = detail::parsed<S>.find(dim);
  if (at < 0) throw Error("size: `" + std::string(std::string_view(S)) + "` has no dim `" + std::string(dim) + "`");
  return value()->global.logical[at];
}
template <class D, Spec S>
std::int64_t Tensor<D, S>::padded_size(std::string_view dim) const {
  const int at = detail::parsed<S>.find(dim);
  if (at < 0)
    throw Error("padded_size: `" + std::string(std::string_view(S)) + "` has no dim `" + std::string(dim) + "`");
  return value()->global.padded[at];
}
template <class D, Spec S>
std::span<const std::int64_t> Tensor<D, S>::local_shape() const {
  return detail::view(value()->local);
}
template <class D, Spec S>
std::span<const std::int64_t> Tensor<D, S>::global_shape() const {
  return detail::view(value()->global.logical);
}
template <class D, Spec S>
std::span<const D> Tensor<D, S>::span() const {
  if (value()->device->is_dry())
    throw Error("span: in a dry run the elements of tensors are not there (" + value()->device->describe() + ")");
  return {reinterpret_cast<const D*>(detail::host_data(*value())), static_cast<std::size_t>(value()->count())};
}
template <class D, Spec S>
const DevicePtr& Tensor<D, S>::device() const {
  return value()->device;
}

template <Spec Axes>
Mesh<Axes>::Mesh(DevicePtr given) : device_(detail::Handle<detail::MeshDevice>::make(std::move(given))) {
  if (!device_->device)
    throw Error("a mesh `" + std::string(std::string_view(Axes)) +
                "` needs a device; take the one that `launch` gives to its function");
  const Device& device = *device_->device;
  const auto names = rules::mesh_axes(Axes);
  bool same = names.size() == static_cast<int>(device.axes().size());
  for (int i = 0; same && i < names.size(); ++i) same = names[i] == device.axes()[static_cast<std::size_t>(i)].name;
  if (!same)
    throw UsageError("the program is written for a mesh with the axes `" + std::string(std::string_view(Axes)) +
                     "`, in this order, but was given `" + to_string(device.axes()) + "`");
}
template <Spec Axes>
const DevicePtr& Mesh<Axes>::device() const {
  if (!device_) throw Error("a mesh `" + std::string(std::string_view(Axes)) + "` was never given its device");
  return device_->device;
}
template <Spec Axes>
int Mesh<Axes>::size(std::string_view axis) const {
  return device()->size(axis);
}
template <Spec Axes>
int Mesh<Axes>::axis_index(std::string_view axis) const {
  return device()->axis_index(axis);
}
template <Spec Axes>
int Mesh<Axes>::size() const {
  return device()->size();
}
template <Spec Axes>
int Mesh<Axes>::rank() const {
  return device()->rank();
}

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/runtime/impl/value.hpp"
#endif
