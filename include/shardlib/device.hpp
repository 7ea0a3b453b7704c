// One device of a mesh of named axes: its place, its communicators, its memory pool and its local state.
#pragma once

#include <atomic>
#include <cstddef>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/buffer.hpp"
#include "shardlib/comm.hpp"
#include "shardlib/detail/inline.hpp"
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
SHARDLIB_INLINE std::string to_string(std::span<const AxisSize> mesh);

namespace detail {

[[noreturn]] SHARDLIB_INLINE void fail_mesh(std::string_view mesh, std::size_t entry, const std::string& why);

}  // namespace detail

/// The number of devices of a mesh. Throws UsageError unless names are valid and distinct and sizes at least 1.
SHARDLIB_INLINE int device_count(std::span<const AxisSize> mesh);

/// Reads "d=4,t=2"; "" is the mesh without axes, which has one device.
SHARDLIB_INLINE std::vector<AxisSize> parse_mesh(std::string_view text);

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
    return Pool::make(is_dry() ? Region::make_phantom() : Region::make());
  }
};

/// One device of a mesh, used by one thread at a time. Lives as long as any tensor on it.
class Device {
 public:
  /// Programs get theirs from `launch`. Without a backend a device cannot communicate: groups of several throw Error.
  Device(std::vector<AxisSize> axes, int index, std::shared_ptr<Backend> backend = nullptr, int threads = 1);
  /// The same device as one of a smaller mesh: of the devices that have its coordinate along `axis`, without that axis.
  /// It has the memory, communicators and local state of `whole`, which it keeps alive; asked again while it lives, it
  /// is the same one. Throws Error for an axis that is not there.
  static std::shared_ptr<Device> submesh(const std::shared_ptr<Device>& whole, std::string_view axis);
  /// The device of the mesh that this one's is a part of; null where it is a part of none.
  [[nodiscard]] const std::shared_ptr<Device>& whole() const { return whole_; }

  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device();

  [[nodiscard]] const std::vector<AxisSize>& axes() const { return axes_; }
  /// Row-major over the axes: the last one varies fastest.
  [[nodiscard]] int index() const { return index_; }
  [[nodiscard]] int count() const { return count_; }
  [[nodiscard]] int size(std::string_view axis) const { return axes_[find(axis)].size; }
  [[nodiscard]] int coordinate(std::string_view axis) const { return coordinates_[find(axis)]; }

  /// The devices that differ from this one along `axes` only. Ranks are row-major in the order given: the first axis is
  /// the major one. Made at first use, by the members alone.
  Communicator& group(std::span<const std::string_view> axes);
  Communicator& group(std::initializer_list<std::string_view> axes);
  /// All devices of the mesh, by index.
  Communicator& everybody();

  [[nodiscard]] const std::shared_ptr<Pool>& pool() const { return pool_; }
  [[nodiscard]] Exec exec() const { return {.pool = pool_.get(), .threads = threads_, .dry = is_dry()}; }
  /// A device of a dry run: all is counted, nothing computed, and tensors have no elements to look at.
  [[nodiscard]] bool is_dry() const { return pool_->is_phantom(); }

  /// "device 3 (d=1,t=1) of mesh d=4,t=2"
  [[nodiscard]] std::string describe() const;

  /// The device's own T, default-constructed at first use.
  template <class T>
  T& local() {
    if (whole_) return whole_->template local<T>();
    const std::size_t slot = local_slot<T>();
    if (slot >= locals_.size()) locals_.resize(slot + 1);
    if (!locals_[slot]) locals_[slot] = std::make_shared<T>();
    return *static_cast<T*>(locals_[slot].get());
  }
  /// Destroys what `local` made. `launch` calls it after the body, because local state may refer back to the device.
  void clear_local() { const auto dying = std::exchange(locals_, {}); }

 private:
  static std::size_t next_slot();
  template <class T>
  static std::size_t local_slot() {
    static const std::size_t slot = next_slot();
    return slot;
  }

  [[nodiscard]] std::size_t find(std::string_view axis) const;

  [[nodiscard]] std::pair<std::vector<int>, int> members_along(std::span<const std::string_view> axes) const;

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
  std::shared_ptr<Device> whole_;
  std::map<std::string, std::weak_ptr<Device>> submeshes_;
};

/// A std::shared_ptr<Device>, under a name that tensor.hpp can declare.
class DevicePtr : public std::shared_ptr<Device> {
 public:
  using std::shared_ptr<Device>::shared_ptr;
  DevicePtr() = default;
  DevicePtr(std::shared_ptr<Device> device)  // NOLINT(google-explicit-constructor): they are one thing
      : std::shared_ptr<Device>(std::move(device)) {}
};

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/device_inl.hpp"
#endif
