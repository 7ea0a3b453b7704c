// One device of a mesh of named axes: its place, its communicators, its memory pool and its local state.
#pragma once

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstddef>
#include <initializer_list>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/buffer.hpp"
#include "shardlib/comm.hpp"
#include "shardlib/comm/single.hpp"
#include "shardlib/error.hpp"
#include "shardlib/exec.hpp"
#include "shardlib/spec.hpp"

namespace shardlib {

/// A mesh axis and the number of devices along it.
struct AxisSize {
  std::string name;
  int size = 1;
  friend bool operator==(const AxisSize&, const AxisSize&) = default;
};

/// "d=4,t=2"; "" for the mesh without axes.
inline std::string to_string(std::span<const AxisSize> mesh) {
  std::string text;
  for (const auto& [name, size] : mesh) text += (text.empty() ? "" : ",") + name + "=" + std::to_string(size);
  return text;
}

namespace detail {

[[noreturn]] inline void fail_mesh(std::string_view mesh, std::size_t entry, const std::string& why) {
  throw UsageError("mesh \"" + std::string(mesh) + "\", entry " + std::to_string(entry + 1) + ": " + why);
}

}  // namespace detail

/// The number of devices of a mesh. Throws UsageError unless names are valid and distinct and sizes at least 1.
inline int device_count(std::span<const AxisSize> mesh) {
  int count = 1;
  for (std::size_t i = 0; i < mesh.size(); ++i) {
    const auto& [name, size] = mesh[i];
    const auto fail = [&](const std::string& why) { detail::fail_mesh(to_string(mesh), i, why); };
    if (!detail::is_name(name)) {
      fail("'" + name + "' is no axis name: use letters, digits and _, not starting with a digit");
    }
    if (std::ranges::count(mesh.first(i), name, &AxisSize::name) != 0) {
      fail("axis '" + name + "' stands there already: name each axis once");
    }
    if (size < 1) fail("axis '" + name + "' has size " + std::to_string(size) + ": give it at least 1");
    if (count > std::numeric_limits<int>::max() / size) fail("too many devices: choose smaller sizes");
    count *= size;
  }
  return count;
}

/// Reads "d=4,t=2"; "" is the mesh without axes, which has one device.
inline std::vector<AxisSize> parse_mesh(std::string_view text) {
  std::vector<AxisSize> mesh;
  for (std::size_t begin = 0; !text.empty() && begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view entry = text.substr(begin, end - begin);
    const std::size_t equals = entry.find('=');
    if (equals == std::string_view::npos) {
      detail::fail_mesh(text, mesh.size(), "'" + std::string(entry) + "' has no '=': write name=size, as in d=4,t=2");
    }
    const std::string_view digits = entry.substr(equals + 1);
    int size = 0;
    const auto [rest, error] = std::from_chars(digits.data(), digits.data() + digits.size(), size);
    if (error != std::errc() || rest != digits.data() + digits.size()) {
      detail::fail_mesh(text, mesh.size(),
                        "'" + std::string(digits) + "' is no size: write a whole number, as in d=4,t=2");
    }
    mesh.push_back({std::string(entry.substr(0, equals)), size});
    begin = end + 1;
  }
  device_count(mesh);
  return mesh;
}

/// Where communicators of more than one device come from: threads of one process, or MPI.
class Backend {
 public:
  virtual ~Backend() = default;
  /// The communicator over `members` (device indices in rank order), seen from `rank`. Only the members take part.
  virtual std::unique_ptr<Communicator> group(const std::vector<int>& members, int rank,
                                              const std::shared_ptr<Pool>& pool) = 0;
  /// True of a backend whose devices are not there: see comm/dry.hpp.
  [[nodiscard]] virtual bool is_dry() const { return false; }
  /// A device's memory.
  [[nodiscard]] virtual std::shared_ptr<Pool> make_pool() const {
    return is_dry() ? Pool::make_phantom() : Pool::make();
  }
};

/// One device of a mesh, used by one thread at a time. Lives as long as any tensor on it.
class Device {
 public:
  /// Programs get theirs from `launch`. Without a backend a device cannot communicate: groups of several throw Error.
  Device(std::vector<AxisSize> axes, int index, std::shared_ptr<Backend> backend = nullptr, int threads = 1)
      : axes_(std::move(axes)),
        index_(index),
        count_(device_count(axes_)),
        threads_(threads),
        pool_(backend ? backend->make_pool() : Pool::make()),
        backend_(std::move(backend)) {
    int rest = index;
    for (auto axis = axes_.rbegin(); axis != axes_.rend(); ++axis) {
      coordinates_.insert(coordinates_.begin(), rest % axis->size);
      rest /= axis->size;
    }
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() {
    clear_local();
    // Freeing an MPI communicator is collective: ascending order is the same on every member.
    while (!groups_.empty()) groups_.erase(groups_.begin());
  }

  [[nodiscard]] const std::vector<AxisSize>& axes() const { return axes_; }
  /// Row-major over the axes: the last one varies fastest.
  [[nodiscard]] int index() const { return index_; }
  [[nodiscard]] int count() const { return count_; }
  [[nodiscard]] int size(std::string_view axis) const { return axes_[find(axis)].size; }
  [[nodiscard]] int coordinate(std::string_view axis) const { return coordinates_[find(axis)]; }

  /// The devices that differ from this one along `axes` only. Ranks are row-major in the order given: the first axis is
  /// the major one. Made at first use, by the members alone.
  Communicator& group(std::span<const std::string_view> axes) {
    for (const auto& [names, communicator] : by_axes_) {
      if (std::ranges::equal(names, axes)) return *communicator;
    }
    auto [members, rank] = members_along(axes);
    auto& communicator = groups_[members];
    if (!communicator) {
      if (members.size() > 1 && !backend_) {
        throw Error("group of " + std::to_string(members.size()) +
                    " devices: this device was made without a backend, so " + "it cannot communicate (" + describe() +
                    "): devices that do come from launch");
      }
      communicator = members.size() == 1 && !is_dry() ? std::make_unique<SingleCommunicator>()
                                                      : backend_->group(members, rank, pool_);
    }
    by_axes_.emplace_back(std::vector<std::string>(axes.begin(), axes.end()), communicator.get());
    return *communicator;
  }
  Communicator& group(std::initializer_list<std::string_view> axes) {
    return group(std::span(axes.begin(), axes.end()));
  }
  /// All devices of the mesh, by index.
  Communicator& everybody() {
    std::vector<std::string_view> axes;
    for (const AxisSize& axis : axes_) axes.push_back(axis.name);
    return group(axes);
  }

  [[nodiscard]] const std::shared_ptr<Pool>& pool() const { return pool_; }
  [[nodiscard]] Exec exec() const { return {.pool = pool_.get(), .threads = threads_, .dry = is_dry()}; }
  /// A device of a dry run: all is counted, nothing computed, and tensors have no elements to look at.
  [[nodiscard]] bool is_dry() const { return pool_->is_phantom(); }

  /// "device 3 (d=1,t=1) of mesh d=4,t=2"
  [[nodiscard]] std::string describe() const {
    if (axes_.empty()) return "device 0 of the mesh without axes";
    auto place = axes_;
    for (std::size_t i = 0; i < place.size(); ++i) place[i].size = coordinates_[i];
    return "device " + std::to_string(index_) + " (" + to_string(place) + ") of mesh " + to_string(axes_);
  }

  /// The device's own T, default-constructed at first use.
  template <class T>
  T& local() {
    const std::size_t slot = local_slot<T>();
    if (slot >= locals_.size()) locals_.resize(slot + 1);
    if (!locals_[slot]) locals_[slot] = std::make_shared<T>();
    return *static_cast<T*>(locals_[slot].get());
  }
  /// Destroys what `local` made. `launch` calls it after the body, because local state may refer back to the device.
  void clear_local() { const auto dying = std::exchange(locals_, {}); }

 private:
  static std::size_t next_slot() {
    static std::atomic<std::size_t> next = 0;
    return next++;
  }
  template <class T>
  static std::size_t local_slot() {
    static const std::size_t slot = next_slot();
    return slot;
  }

  [[nodiscard]] std::size_t find(std::string_view axis) const {
    const auto it = std::ranges::find(axes_, axis, &AxisSize::name);
    if (it == axes_.end()) {
      throw Error("unknown axis '" + std::string(axis) + "': the mesh " +
                  (axes_.empty() ? "has no axes" : "is " + to_string(axes_)));
    }
    return static_cast<std::size_t>(it - axes_.begin());
  }

  [[nodiscard]] std::pair<std::vector<int>, int> members_along(std::span<const std::string_view> axes) const {
    std::vector<int> strides(axes_.size(), 1);
    for (std::size_t i = axes_.size(); i-- > 1;) strides[i - 1] = strides[i] * axes_[i].size;
    std::vector<int> members{index_};
    int rank = 0;
    for (std::size_t k = 0; k < axes.size(); ++k) {
      const std::size_t i = find(axes[k]);
      if (std::ranges::count(axes.first(k), axes[k]) != 0) {
        throw Error("group over axis '" + std::string(axes[k]) + "' twice: name each axis once");
      }
      std::vector<int> longer;
      for (const int member : members) {
        for (int c = 0; c < axes_[i].size; ++c) longer.push_back(member + (c - coordinates_[i]) * strides[i]);
      }
      members = std::move(longer);
      rank = rank * axes_[i].size + coordinates_[i];
    }
    return {std::move(members), rank};
  }

  std::vector<AxisSize> axes_;
  std::vector<int> coordinates_;
  int index_;
  int count_;
  int threads_;
  std::shared_ptr<Pool> pool_;
  std::shared_ptr<Backend> backend_;
  std::map<std::vector<int>, std::unique_ptr<Communicator>> groups_;
  std::vector<std::pair<std::vector<std::string>, Communicator*>> by_axes_;
  std::vector<std::shared_ptr<void>> locals_;
};

}  // namespace shardlib
