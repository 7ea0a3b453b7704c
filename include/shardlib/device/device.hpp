// One device of a mesh of named axes: its place, its communicators, its memory pool and its local state.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/comm/backend.hpp"
#include "shardlib/comm/communicator.hpp"
#include "shardlib/comm/flight_recorder.hpp"
#include "shardlib/comm/given.hpp"
#include "shardlib/device/exec.hpp"
#include "shardlib/device/mesh_axes.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/spec/spec.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/support/tuning.hpp"

namespace shardlib {

/// The kind of hardware that runs a program's kernels.
enum class DeviceKind {
  cpu,       ///< the host's cores, in host memory
  gpu,       ///< a GPU, in its memory, in builds with the CUDA launcher; see docs/gpus.md
  simulated  ///< the host's cores, in memory that only kernels and copies can access; see docs/kernels.md
};

/// A device's number on its machine, and how many devices share its GPU.
struct LocalPlace {
  int rank = 0;     ///< its number among the devices of this machine
  int sharers = 1;  ///< the number of devices that have the same GPU
};

class Device;
/// Shares a Device. Every tensor and every mesh holds one. `[](const DevicePtr& device) { ... }`
using DevicePtr = detail::Handle<Device>;

/// One device of a mesh, used by one thread at a time. Lives as long as any tensor on it.
class Device : public detail::Counted {
 public:
  /// Programs get theirs from `launch`. Without a backend a device cannot communicate: groups of several throw Error.
  Device(std::vector<AxisSize> axes, int rank, std::shared_ptr<Backend> backend = nullptr, int threads = 1,
         const Tuning& tuning = {}, DeviceKind kind = DeviceKind::cpu, LocalPlace place = {},
         GpuSums sums = GpuSums::tree);
  /// The same device as one of a smaller mesh: of the devices that have its index along `axis`, without that axis.
  /// It has the memory, communicators and local state of `whole`, which it keeps alive. While the result lives, a
  /// second call returns it again. For an axis that `whole` knows as absent, returns `whole` itself. Throws Error for
  /// an axis that the mesh lacks.
  static DevicePtr submesh(const DevicePtr& whole, std::string_view axis);
  /// The same device as one of a mesh with other axes of the same number of devices, which have the same ranks. It has
  /// the memory, communicators and local state of `device`, which it keeps alive. While the result lives, a second call
  /// returns it again. Throws Error for another number of devices.
  static DevicePtr reinterpreted(const DevicePtr& device, std::vector<AxisSize> axes);
  /// The device that `submesh` or `reinterpreted` made this one from. Null if neither made it.
  [[nodiscard]] const DevicePtr& whole() const { return whole_; }
  /// The device without `reinterpreted`: itself, unless that made it.
  [[nodiscard]] const Device& original() const { return reinterpreted_ ? *whole_ : *this; }
  /// The device of the mesh that `launch` made: itself, unless `submesh` or `reinterpreted` made it.
  [[nodiscard]] const Device& root() const { return whole_ ? whole_->root() : *this; }
  /// The axes of `original` that the group over `axes` spans, without those that it lacks. A factor that spans a part
  /// of an axis counts as that axis.
  [[nodiscard]] std::vector<std::string_view> original_axes(std::span<const std::string_view> axes) const;
  /// The difference of rank of neighbors along the axis.
  [[nodiscard]] int stride(std::string_view axis) const;

  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() override;

  [[nodiscard]] const std::vector<AxisSize>& axes() const { return axes_; }
  /// Makes an axis of size 1 known that the mesh was made without. Neither `axes` nor a text names it. Throws Error
  /// for an axis of the mesh that this one is a part of.
  void know_absent(std::string_view axis);
  /// Whether `know_absent` has made the axis known.
  [[nodiscard]] bool is_absent(std::string_view axis) const {
    return std::ranges::find(absent_, axis) != absent_.end();
  }
  /// The number of this device among `count`, row-major over the axes: the last one varies fastest.
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  /// The number of devices along the axis.
  [[nodiscard]] int size(std::string_view axis) const { return is_absent(axis) ? 1 : axes_[find(axis)].size; }
  /// Its place along the axis.
  [[nodiscard]] int axis_index(std::string_view axis) const { return is_absent(axis) ? 0 : coordinates_[find(axis)]; }

  /// The devices that differ from this one along `axes` only. Ranks are row-major in the order given: the first axis is
  /// the major one. Made at first use, by the members alone.
  Communicator& group(std::span<const std::string_view> axes);
  Communicator& group(std::initializer_list<std::string_view> axes);
  /// All devices of the mesh, by rank.
  Communicator& everybody();

  [[nodiscard]] const std::shared_ptr<Pool>& pool() const { return pool_; }  ///< the device's memory
  /// Memory of the process that holds the device: `pool` itself, where kernels run in host memory.
  [[nodiscard]] const std::shared_ptr<Pool>& host_pool() const { return host_pool_; }
  /// The buffer in host memory, or with `to_device` in the device's: itself, if it is there already, or else a copy.
  [[nodiscard]] Buffer to_host(const Buffer& buffer) const;
  [[nodiscard]] Buffer to_device(const Buffer& buffer) const;
  /// The execution argument of this device's kernels.
  [[nodiscard]] Exec exec() const { return {.pool = pool_.get(), .threads = threads_, .dry = is_dry()}; }
  /// The same for loops over host memory.
  [[nodiscard]] Exec host_exec() const { return {.pool = host_pool_.get(), .threads = threads_, .dry = is_dry()}; }
  [[nodiscard]] const Tuning& tuning() const { return tuning_; }  ///< as LaunchOptions gave it
  /// A device of a dry run: all is counted, nothing computed, and tensors have no elements to look at. Code that
  /// touches memory by its Exec, and code that communicates, need not ask; tests/rooms.py lists what does.
  [[nodiscard]] bool is_dry() const { return pool_->is_meta(); }

  /// The axes of several devices along which all must be given the same for a tensor of this spec, because it is
  /// replicated there. On a mesh that `reinterpreted` made: all axes of the whole mesh, if it is replicated on all of
  /// the new ones, otherwise none.
  [[nodiscard]] detail::GivenInputs::AxisSet alike_axes(const TensorSpec& spec) const;
  /// Notes what the program gives for a tensor that is the same along these axes. The next collective of an op over any
  /// of them throws Error if the devices were given other values.
  void note_given(const detail::GivenInput& given, detail::GivenInputs::AxisSet axes);

  /// The device in words: "device 3 (d=1,t=1) of mesh d=4,t=2".
  [[nodiscard]] std::string describe() const;
  /// The same with the axes of a submesh: "device 3 (d=1,e=1) of mesh d=2,e=2, in its submesh d=2".
  [[nodiscard]] std::string describe_view() const;

  /// The device's own T, default-constructed at first use.
  template <class T>
  T& local() {
    if (whole_) return whole_->template local<T>();
    const std::size_t slot = local_slot<T>();
    if (slot >= locals_.size()) locals_.resize(slot + 1);
    if (!locals_[slot]) locals_[slot] = std::make_shared<T>();
    return *static_cast<T*>(locals_[slot].get());
  }
  /// Destroys what `local` made, which may refer back to the device.
  void clear_local() { const auto dying = std::exchange(locals_, {}); }
  /// `launch` calls it after the body: from then on, ops on the device's tensors are errors.
  void end() {
    clear_local();
    ended_ = true;
  }
  /// Whether the body of its `launch` has returned.
  [[nodiscard]] bool has_ended() const { return whole_ ? whole_->has_ended() : ended_; }

 private:
  static std::size_t next_slot();
  template <class T>
  static std::size_t local_slot() {
    static const std::size_t slot = next_slot();
    return slot;
  }

  [[nodiscard]] std::size_t find(std::string_view axis) const;
  [[nodiscard]] std::pair<std::vector<int>, int> members_along(std::span<const std::string_view> axes) const;
  /// The axes along which the members of a group lie apart.
  [[nodiscard]] detail::GivenInputs::AxisSet axes_of(std::span<const int> members) const;
  /// The group of the devices with these ranks. This device has the rank `rank` in it.
  Communicator& group_of(std::vector<int> members, int rank, std::span<const std::string_view> axes);
  /// A group of devices that have memory of their own.
  std::unique_ptr<Communicator> device_group(std::unique_ptr<Communicator> host);
  /// Another view of the device, which `known` finds as long as it lives.
  static DevicePtr view(const DevicePtr& whole, std::vector<AxisSize> axes, int rank, const std::string& known);

  std::vector<AxisSize> axes_;
  std::vector<int> coordinates_;
  std::vector<std::string> absent_;  ///< see know_absent
  int rank_;
  int size_;
  int threads_;
  Tuning tuning_;
  GpuSums sums_ = GpuSums::tree;
  std::shared_ptr<Pool> host_pool_;
  std::shared_ptr<Pool> pool_;
  std::shared_ptr<detail::Stream> stream_;  ///< of NCCL; null before the first group
  std::shared_ptr<Backend> backend_;
  std::shared_ptr<detail::FlightRecorder> recorder_;
  std::shared_ptr<detail::GivenInputs> given_;  ///< null where no group compares them
  std::map<std::vector<int>, std::unique_ptr<Communicator>> groups_;
  std::vector<std::pair<std::vector<std::string>, Communicator*>> by_axes_;
  std::vector<std::shared_ptr<void>> locals_;
  DevicePtr whole_;
  bool reinterpreted_ = false;
  bool ended_ = false;
  std::vector<int> in_whole_;             ///< of a submesh, by rank: the devices' ranks in the mesh of `whole_`
  std::map<std::string, Device*> views_;  ///< the living ones, which keep this device alive
};

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/device/impl/device.hpp"
#endif
