// What a Tensor holds at run time: one device's shard of a global array, erased of its type.
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
/// Where a value's cotangent goes: an output of the node that made it. Empty if nothing is differentiated.
struct Slot {
  std::shared_ptr<Node> node;
  int output = 0;
  explicit operator bool() const { return node != nullptr; }
};

/// The bytes of a value, or the function that computes them on demand (in a replay). Shared by all values that differ
/// only in spec or in whether they are differentiated.
struct Storage {
  Buffer buffer;
  std::function<Buffer()> compute;
  /// Adds what `compute` would make to a sum in the accumulator's type, without making it. For a few values only.
  std::function<void(std::byte* sum)> add_to = nullptr;
  /// "the weight `w1`", while value_and_grad runs the function that it differentiates by it.
  const std::string* weight = nullptr;

  /// Computes now what was left for later.
  void materialize() {
    if (!compute) return;
    const auto how = std::exchange(compute, nullptr);
    add_to = nullptr;
    buffer = how();
  }
};

struct Value;
/// For the device's observer, where it wants to know what ops read.
void note_read(const Value& value);
/// An op reads a weight, but not as the function's parameter: the gradient would miss it.
[[noreturn, gnu::cold]] void fail_outside(const Value& value);

struct Value : Counted {
  DevicePtr device;
  DType dtype = DType::f32;
  const TensorSpec* spec = nullptr;  ///< of static storage: belongs to the tensor's type
  GlobalSizes global;
  Shape local;  ///< of this device's shard, padding included; the padding holds zeros, always
  OpInfo made_by;
  std::string label;  ///< the name of a leaf in its tree; of other values empty
  Slot slot;
  bool stopped = false;  ///< it has no slot on purpose: it is a copy of one that has, or stop_gradient has been taken
  std::shared_ptr<Storage> storage;

  /// Whether this is what a function is differentiated by: then its shard outlives the function's run.
  [[nodiscard]] bool is_leaf() const { return !label.empty(); }
  [[nodiscard]] std::int64_t count() const { return product(local); }
  [[nodiscard]] std::size_t bytes() const { return static_cast<std::size_t>(count()) * size_of(dtype); }
  /// The shard, computed now if that was left for later.
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
};

/// What a Mesh holds: in tensor.hpp a DevicePtr is only declared.
struct MeshDevice : Counted {
  explicit MeshDevice(DevicePtr d) : device(std::move(d)) {}
  DevicePtr device;
};

/// A collective that overlaps with the following ops, until an op asks for its result. If it is dropped, nothing waits
/// for it, because a device that fails must not wait for the others.
struct PendingCollective {
  Request request;
  std::shared_ptr<Buffer> result;  ///< there once `request` is complete
  std::uint64_t hook;              ///< ProgramState::hooks when it was started, or asked for once more
  bool done = false;

  ValuePtr operand;                 ///< of a gather, or while ProgramState::keep_shards is set
  ValuePtr gathered;                ///< of a gather: takes the result when it is read
  std::weak_ptr<Storage> gradient;  ///< of the sum of a gradient: the same
  Buffer sent;  ///< what is summed, until then: so memory does not depend on when peers have read it

  PendingCollective(Request r, std::shared_ptr<Buffer> b, std::uint64_t h)
      : request(std::move(r)), result(std::move(b)), hook(h) {}
  PendingCollective(const PendingCollective&) = delete;
  PendingCollective& operator=(const PendingCollective&) = delete;
  ~PendingCollective() { request.drop(); }
};

/// The sizes behind names, and where each was seen first: what a Scope, value_and_grad or spmd holds a name to.
class NameSizes {
 public:
  /// `owner`: "value_and_grad". Without one nothing is held to its first size: a backward pass, whose ops have been
  /// checked when they ran forward.
  explicit NameSizes(const char* owner = nullptr) : owner_(owner) {}
  [[nodiscard, gnu::cold]] std::optional<DimSize> find(std::string_view name) const;
  /// Why the name cannot have this size, or nothing. `where` it has it is noted of a new name; `here` is said of one
  /// that differs: " in argument 2".
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

/// State of one device's program.
struct ProgramState {
  enum class Mode {
    eager,       ///< compute, and record what differentiation needs
    checkpoint,  ///< inside explicit_activation_checkpointing, forward: compute, record nothing
    replay,      ///< the same function in the backward pass: record, compute on demand
    start        ///< start gathers and scatters, compute on demand, record nothing
  };
  Mode mode = Mode::eager;
  std::vector<ValuePtr> saved;  ///< what save_for_backward keeps (checkpoint) or gives back (replay)
  std::size_t next_saved = 0;
  std::uint64_t sequence = 0;                               ///< numbers the nodes of the tape
  std::vector<std::shared_ptr<NameSizes>> scopes;           ///< the innermost counts; shared with what will be replayed
  std::vector<std::shared_ptr<PendingCollective>> pending;  ///< in this order
  bool overlaps = false;    ///< the differentiated function prefetches, so its gradients are summed asynchronously
  std::uint64_t hooks = 0;  ///< that `prefetch` has run, forward or backward

  struct Count {
    std::int64_t calls = 0;
    std::int64_t bytes = 0;  ///< sent by this device, for collectives
    double flops = 0;        ///< multiply-adds count as two, of products
  };
  std::map<std::string, Count, std::less<>> counts;

  /// A shard that an op has asked for: its operands', and its own where it writes through a Value.
  struct Read {
    const void* shard;
    std::string what;  ///< the leaf's name, or the op that made it
    const TensorSpec* spec;
    std::size_t bytes;
  };
  /// What one op has done.
  struct OpWork {
    std::int64_t bytes = 0;  ///< sent by this device
    double flops = 0;
    Axes axes;                ///< that it communicated over
    std::vector<Read> reads;  ///< while note_reads is set
    bool in_place = false;    ///< the result's shard is one that was read, written anew
  };
  /// One execution of an op, by the steady clock.
  struct Ran {
    const OpInfo& op;
    const TensorSpec& spec;  ///< of the result
    const void* shard;       ///< of the result
    std::size_t bytes;       ///< of the result's shard
    bool recomputed;         ///< a replay has left it out, and it was asked for
    OpWork work;
    std::int64_t begin_ns, end_ns;
  };
  OpWork work;                               ///< of the op that runs now, while there is an observer
  std::function<void(const Ran&)> observer;  ///< told of each op once it has run
  bool note_reads = false;
  bool keep_shards = false;        ///< an op's operands keep their shards until the observer has been told of it
  std::size_t residual_bytes = 0;  ///< bytes of the pool that the last value_and_grad kept for its backward pass
  enum class Pass { none, forward, backward };
  Pass pass = Pass::none;  ///< of value_and_grad
  Stopwatch stopwatch;     ///< value_and_grad's passes and the collectives, since the last reset
};

[[gnu::cold]] SHARDLIB_INLINE ProgramState& program_state(const std::shared_ptr<Device>& device);

/// Opens a scope of names, and closes it however the block is left.
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

/// The scope that is open, or a new one of `owner`: the sizes of names hold for all that a function runs.
[[gnu::cold]] SHARDLIB_INLINE std::shared_ptr<NameSizes> names_within(const ProgramState& state, const char* owner);

/// Holds the names of a value's dims to their sizes in the scope that is open. The value is the result of `op`, or
/// stands `where` in its call: "argument 2".
[[gnu::cold]] SHARDLIB_INLINE void bind_names(const OpInfo& op, const Value& value, const std::string& where = {});

/// Sets the program's mode, and resets it however the block is left.
class WithMode {
 public:
  WithMode(ProgramState& state, ProgramState::Mode mode, std::vector<ValuePtr> saved = {})
      : state_(state),
        mode_(std::exchange(state.mode, mode)),
        saved_(std::exchange(state.saved, std::move(saved))),
        next_(std::exchange(state.next_saved, 0)) {}
  WithMode(const WithMode&) = delete;
  WithMode& operator=(const WithMode&) = delete;
  ~WithMode() {
    state_.mode = mode_;
    state_.saved = std::move(saved_);
    state_.next_saved = next_;
  }

 private:
  ProgramState& state_;
  ProgramState::Mode mode_;
  std::vector<ValuePtr> saved_;
  std::size_t next_;
};

[[gnu::cold]] SHARDLIB_INLINE void note_read(const Value& value);

/// The number of shards along a dim, and which of them is this device's.
SHARDLIB_INLINE std::int64_t shard_count(const Device& device, const Axes& axes);
SHARDLIB_INLINE std::int64_t shard_index(const Device& device, const Axes& axes);

/// A value without data: sizes and local shape, which must divide evenly.
[[gnu::cold]] SHARDLIB_INLINE Handle<Value> make_value(const OpInfo& op, const std::shared_ptr<Device>& device,
                                                       DType dtype, const TensorSpec& spec, const GlobalSizes& global);

/// How many elements of this device's shard along each dim are no padding: the shard's first ones.
[[gnu::cold]] SHARDLIB_INLINE Shape true_shape(const Value& x);

[[gnu::cold]] SHARDLIB_INLINE Buffer allocate(const Value& value);

/// The same value, of which nothing is differentiated.
[[gnu::cold]] SHARDLIB_INLINE Handle<Value> detached(const Value& value);
/// The same, where the program means it so, also of a weight from outside.
[[gnu::cold]] SHARDLIB_INLINE Handle<Value> stopped(const Value& value);
}  // namespace shardlib::detail

namespace shardlib {

/// A guard within which a name keeps one size across calls on this device (seqax's Scope). All that a call of
/// value_and_grad or spmd runs is within one already; a part of it whose names mean other sizes opens a Scope of its
/// own, since scopes nest and the innermost counts. `const Scope scope(mesh);`
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
  return {value()->template as<const D>(), static_cast<std::size_t>(value()->count())};
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
