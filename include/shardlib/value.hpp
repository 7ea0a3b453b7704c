// What a Tensor holds at run time: one device's block of a global array, erased of its type.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/buffer.hpp"
#include "shardlib/device.hpp"
#include "shardlib/dtype.hpp"
#include "shardlib/error.hpp"
#include "shardlib/tensor.hpp"

namespace shardlib::detail {

using Extents = Small<std::int64_t, max_dims>;

inline std::span<const std::int64_t> view(const Extents& e) {
  return {e.begin(), static_cast<std::size_t>(e.size())};
}
inline std::int64_t product(const Extents& e) {
  std::int64_t n = 1;
  for (auto extent : e) n *= extent;
  return n;
}

/// What is being done, for messages, counters and reports.
struct OpInfo {
  const char* name = "";
  std::string_view spec;
  std::source_location site;

  [[nodiscard]] std::string describe() const {
    return spec.empty() ? std::string(name) : std::string(name) + "<`" + std::string(spec) + "`>";
  }
  /// With the line of the call, where it is known: operators have none.
  [[nodiscard]] std::string describe_call() const {
    if (site.line() == 0) return describe();
    return describe() + " at " + site.file_name() + ":" + std::to_string(site.line());
  }
};

struct Node;
/// Where a value's cotangent goes: an output of the node that made it. Empty if nothing is differentiated.
struct Slot {
  std::shared_ptr<Node> node;
  int output = 0;
  explicit operator bool() const { return node != nullptr; }
};

/// The bytes of a value, or how to compute them when somebody asks (in a replay). Shared by all values that differ only
/// in spec or in whether they are differentiated.
struct Storage {
  Buffer buffer;
  std::function<Buffer()> compute;
};

struct Value {
  std::shared_ptr<Device> device;
  DType dtype = DType::f32;
  const TensorSpec* spec = nullptr;  ///< of static storage: belongs to the tensor's type
  Extents global;
  Extents local;
  OpInfo made_by;
  std::string label;  ///< the name of a leaf in its tree
  Slot slot;
  std::shared_ptr<Storage> storage;

  [[nodiscard]] std::int64_t count() const { return product(local); }
  [[nodiscard]] std::size_t bytes() const { return static_cast<std::size_t>(count()) * size_of(dtype); }
  /// The block, computed now if a replay left it out.
  [[nodiscard]] const Buffer& data() const {
    if (storage->compute) {
      const auto how = std::exchange(storage->compute, nullptr);
      storage->buffer = how();
    }
    return storage->buffer;
  }
  template <class T>
  [[nodiscard]] T* as() const {
    return data().template as<T>();
  }
};

/// State of one device's program.
struct State {
  enum class Mode {
    eager,       ///< compute, and record what differentiation needs
    checkpoint,  ///< inside explicit_activation_checkpointing, forward: compute, record nothing
    replay       ///< the same function in the backward pass: record, compute on demand
  };
  Mode mode = Mode::eager;
  std::vector<ValuePtr> saved;  ///< what save_for_backward keeps (checkpoint) or gives back (replay)
  std::size_t next_saved = 0;
  std::uint64_t sequence = 0;  ///< numbers the nodes of the tape
  std::vector<std::map<std::string, std::int64_t, std::less<>>> scopes;

  struct Count {
    std::int64_t calls = 0;
    std::int64_t bytes = 0;  ///< sent by this device, for collectives
    double flops = 0;        ///< multiply-adds count as two, for einsums
  };
  std::map<std::string, Count, std::less<>> counts;
};

[[gnu::noinline]] inline State& state(const std::shared_ptr<Device>& device) {
  return device->local<State>();
}

/// The sizes behind the names within one op call, and within the scopes that are open.
class Bindings {
 public:
  Bindings(const OpInfo& op, const std::shared_ptr<Device>& device) : op_(op), device_(device) {}

  [[gnu::noinline]] void bind(std::string_view name, std::int64_t size) {
    if (size < 0) fail("dim `" + std::string(name) + "` has the negative size " + std::to_string(size));
    for (const auto& [known, value] : sizes_)
      if (known == name) return check(name, value, size, "in another operand");
    sizes_.push_back({name, size});
    auto& scopes = state(device_).scopes;
    if (scopes.empty()) return;
    const auto [it, fresh] = scopes.back().try_emplace(std::string(name), size);
    if (!fresh) check(name, it->second, size, "earlier in this scope");
  }
  [[gnu::noinline]] void bind(const Value& x) {
    if (!operands_.full()) operands_.push_back(x.spec);
    if (x.device != device_)
      fail("its operands lie on different meshes: " + x.device->describe() + " and " + device_->describe());
    for (int i = 0; i < x.spec->rank(); ++i)
      if (!x.spec->dims[i].is_integer()) bind(x.spec->dims[i].name, x.global[i]);
  }
  [[nodiscard]] std::int64_t operator[](const Dim& dim) const {
    if (dim.is_integer()) return dim.integer;
    for (const auto& [known, value] : sizes_)
      if (known == dim.name) return value;
    const auto& scopes = state(device_).scopes;
    if (!scopes.empty())
      if (const auto it = scopes.back().find(dim.name); it != scopes.back().end()) return it->second;
    fail("the size of dim `" + std::string(dim.name) + "` is not known: give it, as in {{\"" + std::string(dim.name) +
         "\", 8}}");
  }
  [[nodiscard, gnu::noinline]] Extents sizes(const TensorSpec& spec) const {
    Extents global;
    for (const Dim& dim : spec.dims) global.push_back((*this)[dim]);
    return global;
  }
  [[noreturn, gnu::noinline]] void fail(const std::string& why) const {
    // An op without a spec of its own is told by its operands: "+ of `B/d M` and `M`".
    std::string op = op_.describe();
    for (int i = 0; op_.spec.empty() && i < operands_.size(); ++i)
      op += (i == 0 ? " of `" : " and `") + std::string(to_string(*operands_[i]).view()) + "`";
    throw Error(op + ": " + why + " (" + device_->describe() + ")");
  }

 private:
  void check(std::string_view name, std::int64_t known, std::int64_t size, const char* where) const {
    if (known != size)
      fail("dim `" + std::string(name) + "` is " + std::to_string(size) + ", but " + std::to_string(known) + " " +
           where);
  }
  OpInfo op_;
  std::shared_ptr<Device> device_;
  Small<std::pair<std::string_view, std::int64_t>, 4 * max_dims> sizes_;
  Small<const TensorSpec*, 4> operands_;
};

/// The number of blocks along a dim, and which of them is this device's.
inline std::int64_t blocks(const Device& device, const Axes& axes) {
  std::int64_t n = 1;
  for (auto axis : axes) n *= device.size(axis);
  return n;
}
inline std::int64_t block_index(const Device& device, const Axes& axes) {
  std::int64_t index = 0;
  for (auto axis : axes) index = index * device.size(axis) + device.coordinate(axis);
  return index;
}

/// A value without data: sizes and local extents, which must divide evenly.
[[gnu::noinline]] inline std::shared_ptr<Value> make_value(const OpInfo& op, const std::shared_ptr<Device>& device,
                                                           DType dtype, const TensorSpec& spec, const Extents& global) {
  auto value = std::make_shared<Value>();
  value->device = device;
  value->dtype = dtype;
  value->spec = &spec;
  value->global = global;
  value->made_by = op;
  value->storage = std::make_shared<Storage>();
  const auto fail = [&](const std::string& why) {
    throw Error(op.describe() + ": " + why + " (" + device->describe() + ")");
  };
  try {
    for (auto axis : spec.partial) static_cast<void>(device->size(axis));
    for (int i = 0; i < spec.rank(); ++i) {
      const Dim& dim = spec.dims[i];
      const std::int64_t parts = blocks(*device, dim.axes);
      if (dim.is_integer() && dim.integer != global[i])
        fail("the integer dim `" + std::string(dim.name) + "` has size " + std::to_string(global[i]));
      if (global[i] % parts != 0)
        fail("dim `" + std::string(to_string(dim).view()) + "` of size " + std::to_string(global[i]) +
             " does not divide evenly into " + std::to_string(parts) + " blocks; choose a multiple of " +
             std::to_string(parts));
      value->local.push_back(global[i] / parts);
    }
  } catch (const Error& error) {
    if (std::string_view(error.what()).starts_with("unknown axis"))
      throw Error(op.describe() + ": `" + std::string(to_string(spec).view()) + "`: " + error.what() + " (" +
                  device->describe() + ")");
    throw;
  }
  return value;
}

[[gnu::noinline]] inline Buffer allocate(const Value& value) {
  return value.device->pool()->allocate(value.bytes());
}

/// The same value, of which nothing is differentiated.
[[gnu::noinline]] inline std::shared_ptr<Value> detached(const Value& value) {
  auto copy = std::make_shared<Value>(value);
  copy->slot = {};
  return copy;
}
}  // namespace shardlib::detail

namespace shardlib {

/// A guard within which a name keeps one size across calls on this device (seqax's Scope); scopes nest, the innermost
/// counts. `const Scope scope(mesh);`
class Scope {
 public:
  template <Spec A>
  explicit Scope(const Mesh<A>& mesh) : device_(mesh.device()) {
    detail::state(device_).scopes.emplace_back();
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  ~Scope() { detail::state(device_).scopes.pop_back(); }

 private:
  std::shared_ptr<Device> device_;
};

template <dtype D, Spec S>
std::int64_t Tensor<D, S>::size(std::string_view dim) const {
  const int at = detail::parsed<S>.find(dim);
  if (at < 0) throw Error("size: `" + std::string(std::string_view(S)) + "` has no dim `" + std::string(dim) + "`");
  return value_->global[at];
}
template <dtype D, Spec S>
std::span<const std::int64_t> Tensor<D, S>::local_extents() const {
  return detail::view(value_->local);
}
template <dtype D, Spec S>
std::span<const std::int64_t> Tensor<D, S>::global_extents() const {
  return detail::view(value_->global);
}
template <dtype D, Spec S>
std::span<const D> Tensor<D, S>::span() const {
  return {value_->template as<const D>(), static_cast<std::size_t>(value_->count())};
}
template <dtype D, Spec S>
const std::shared_ptr<Device>& Tensor<D, S>::device() const {
  return value_->device;
}

template <Spec Axes>
Mesh<Axes>::Mesh(std::shared_ptr<Device> device) : device_(std::move(device)) {
  const auto names = rules::mesh_axes(Axes);
  bool same = names.size() == static_cast<int>(device_->axes().size());
  for (int i = 0; same && i < names.size(); ++i) same = names[i] == device_->axes()[static_cast<std::size_t>(i)].name;
  if (!same)
    throw UsageError("the program is written for a mesh with the axes `" + std::string(std::string_view(Axes)) +
                     "`, in this order, but was given `" + to_string(device_->axes()) + "`");
}
template <Spec Axes>
int Mesh<Axes>::size(std::string_view axis) const {
  return device_->size(axis);
}
template <Spec Axes>
int Mesh<Axes>::coordinate(std::string_view axis) const {
  return device_->coordinate(axis);
}
template <Spec Axes>
int Mesh<Axes>::count() const {
  return device_->count();
}
template <Spec Axes>
int Mesh<Axes>::index() const {
  return device_->index();
}

}  // namespace shardlib
