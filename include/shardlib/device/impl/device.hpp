// Definitions of device.hpp.
#pragma once

#include "shardlib/device/device.hpp"

#include <atomic>
#include <iterator>

#include "shardlib/comm/nccl.hpp"
#include "shardlib/comm/single.hpp"
#include "shardlib/comm/staged.hpp"
#include "shardlib/device/tree_kernel.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib {

SHARDLIB_INLINE Device::Device(std::vector<AxisSize> axes, int rank, std::shared_ptr<Backend> backend, int threads,
                               const Tuning& tuning, DeviceKind kind, LocalPlace place, GpuSums sums)
    : axes_(std::move(axes)),
      rank_(rank),
      size_(device_count(axes_)),
      threads_(threads),
      tuning_(tuning),
      sums_(sums),
      host_pool_(backend ? backend->make_pool() : Pool::make()),
      pool_(kind == DeviceKind::cpu || host_pool_->is_meta() ? host_pool_
            : kind == DeviceKind::gpu                        ? Pool::make(Region::make_gpu(place.rank, place.sharers))
                                      : Pool::make(Region::make_simulated(tuning.simulated_seed))),
      backend_(std::move(backend)),
      recorder_(backend_ ? backend_->recorder(rank) : nullptr) {
  int rest = rank;
  for (auto axis = axes_.rbegin(); axis != axes_.rend(); ++axis) {
    coordinates_.insert(coordinates_.begin(), rest % axis->size);
    rest /= axis->size;
  }
  if (backend_ && size_ > 1 && !is_dry()) given_ = std::make_shared<detail::GivenInputs>();
}

SHARDLIB_INLINE DevicePtr Device::view(const DevicePtr& whole, std::vector<AxisSize> axes, int rank,
                                       const std::string& known) {
  auto device = DevicePtr::make(std::move(axes), rank, nullptr, whole->threads_, whole->tuning_);
  device->whole_ = whole;
  device->host_pool_ = whole->host_pool_;
  device->pool_ = whole->pool_;
  whole->views_[known] = device.get();
  return device;
}

SHARDLIB_INLINE void Device::know_absent(std::string_view axis) {
  if (is_absent(axis)) return;
  if (whole_ && !reinterpreted_) {  // which makes the groups
    if (std::ranges::find(whole_->axes_, axis, &AxisSize::name) != whole_->axes_.end())
      throw Error("axis '" + std::string(axis) + "' is not one of this mesh, which is a part of mesh " +
                  to_string(whole_->axes_) + " at one place of it");
    whole_->know_absent(axis);
  }
  absent_.emplace_back(axis);
}

SHARDLIB_INLINE DevicePtr Device::submesh(const DevicePtr& whole, std::string_view axis) {
  if (whole->is_absent(axis)) return whole;
  const std::string known(axis);
  if (const auto it = whole->views_.find(known); it != whole->views_.end()) return DevicePtr::share(it->second);
  auto axes = whole->axes_;
  axes.erase(axes.begin() + static_cast<std::ptrdiff_t>(whole->find(axis)));
  std::vector<std::string_view> names;
  for (const AxisSize& other : whole->axes_)
    if (other.name != axis) names.push_back(other.name);
  auto [members, rank] = whole->members_along(names);
  DevicePtr made = view(whole, std::move(axes), rank, known);
  made->in_whole_ = std::move(members);
  return made;
}

SHARDLIB_INLINE DevicePtr Device::reinterpreted(const DevicePtr& device, std::vector<AxisSize> axes) {
  const DevicePtr& whole = device->reinterpreted_ ? device->whole_ : device;
  std::erase_if(axes, [&](const AxisSize& axis) { return axis.size == 1 && whole->is_absent(axis.name); });
  if (axes == whole->axes_) return whole;
  const std::string known = to_string(axes);
  if (const auto it = whole->views_.find(known); it != whole->views_.end()) return DevicePtr::share(it->second);
  if (const int count = device_count(axes); count != whole->size_)
    throw Error("the mesh " + known + " has " + std::to_string(count) + " devices, and the mesh " +
                to_string(whole->axes_) + " has " + std::to_string(whole->size_));
  DevicePtr made = view(whole, std::move(axes), whole->rank_, known);
  made->reinterpreted_ = true;
  return made;
}

SHARDLIB_INLINE std::vector<std::string_view> Device::original_axes(std::span<const std::string_view> axes) const {
  if (whole_ && !reinterpreted_) return whole_->original_axes(axes);
  std::vector<std::string_view> result;
  if (!reinterpreted_) {
    std::ranges::copy_if(axes, std::back_inserter(result), [&](std::string_view axis) {
      return std::ranges::find(axes_, axis, &AxisSize::name) != axes_.end();
    });
    return result;
  }
  const Device& whole = original();
  for (const std::string_view axis : axes) {
    if (size(axis) == 1) continue;
    const int least = stride(axis), most = least * size(axis);
    for (const AxisSize& other : whole.axes_) {
      const int from = whole.stride(other.name), to = from * other.size;
      if (from < most && least < to && std::ranges::find(result, other.name) == result.end())
        result.push_back(other.name);
    }
  }
  return result;
}

SHARDLIB_INLINE int Device::stride(std::string_view axis) const {
  int stride = 1;
  for (std::size_t i = axes_.size(); --i > find(axis);) stride *= axes_[i].size;
  return stride;
}

SHARDLIB_INLINE Device::~Device() {
  clear_local();
  if (whole_) std::erase_if(whole_->views_, [&](const auto& known) { return known.second == this; });
  // Freeing an MPI communicator is collective: ascending order is the same on every member.
  while (!groups_.empty()) groups_.erase(groups_.begin());
}

SHARDLIB_INLINE Communicator& Device::group(std::span<const std::string_view> axes) {
  if (whole_ && !reinterpreted_) return whole_->group(axes);  // its axis too is within reach
  for (const auto& [names, communicator] : by_axes_) {
    if (std::ranges::equal(names, axes)) return *communicator;
  }
  auto [members, rank] = members_along(axes);
  Communicator& communicator = group_of(std::move(members), rank, axes);
  by_axes_.emplace_back(std::vector<std::string>(axes.begin(), axes.end()), &communicator);
  return communicator;
}

SHARDLIB_INLINE Communicator& Device::group_of(std::vector<int> members, int rank,
                                               std::span<const std::string_view> axes) {
  if (whole_) {
    if (!reinterpreted_)
      for (int& member : members) member = in_whole_[static_cast<std::size_t>(member)];
    return whole_->group_of(std::move(members), rank, original_axes(axes));
  }
  auto& communicator = groups_[members];
  if (communicator) return *communicator;
  if (members.size() > 1 && !backend_) {
    throw Error("group of " + std::to_string(members.size()) + " devices: this device was made without a backend, so " +
                "it cannot communicate (" + describe() + "): devices that do come from launch");
  }
  if (members.size() == 1 && !is_dry()) {
    communicator = std::make_unique<SingleCommunicator>();
    return *communicator;
  }
  std::string names;
  for (const std::string_view axis : axes)
    if (size(axis) > 1) names += (names.empty() ? "" : ",") + std::string(axis);
  const detail::GroupRecorder recorder(recorder_, names, members);
  const detail::FlightRecord forms = recorder.forms();
  forms.waits();
  communicator = backend_->group(members, rank, host_pool_);
  forms.ends();
  if (pool_ != host_pool_) communicator = device_group(std::move(communicator));
  communicator->record(recorder);
  if (given_) communicator->compare_given({given_, axes_of(members)});
  return *communicator;
}

SHARDLIB_INLINE detail::GivenInputs::AxisSet Device::axes_of(std::span<const int> members) const {
  detail::GivenInputs::AxisSet axes = 0;
  for (std::size_t i = 0; i < axes_.size(); ++i) {
    const int apart = stride(axes_[i].name);
    for (const int member : members)
      if (member / apart % axes_[i].size != coordinates_[i]) axes |= detail::GivenInputs::AxisSet{1} << i;
  }
  return axes;
}

SHARDLIB_INLINE detail::GivenInputs::AxisSet Device::alike_axes(const TensorSpec& spec) const {
  const auto is_alike = [&](const AxisSize& axis) {
    return axis.size > 1 && spec.placement(axis.name).kind == Placement::replicated;
  };
  const Device* root = this;
  for (; root->whole_; root = root->whole_.get()) {
    if (!root->reinterpreted_) continue;
    // One of its axes may cross several of the whole mesh's; all of them are those of the whole mesh.
    const bool all = root == this &&
                     std::ranges::all_of(axes_, [&](const AxisSize& axis) { return axis.size == 1 || is_alike(axis); });
    return all ? whole_->alike_axes({}) : 0;
  }
  detail::GivenInputs::AxisSet axes = 0;
  if (!root->given_) return axes;
  for (const AxisSize& axis : axes_)
    if (is_alike(axis)) axes |= detail::GivenInputs::AxisSet{1} << root->find(axis.name);
  return axes;
}

SHARDLIB_INLINE void Device::note_given(const detail::GivenInput& given, detail::GivenInputs::AxisSet axes) {
  if (axes == 0) return;
  Device* root = this;
  while (root->whole_) root = root->whole_.get();
  root->given_->add(given, axes);
}

SHARDLIB_INLINE std::unique_ptr<Communicator> Device::device_group(std::unique_ptr<Communicator> host) {
  auto staged = std::make_unique<StagedCommunicator>(std::move(host), host_pool_);
  Region& memory = *pool_->device_memory();
  if (memory.gpu() == nullptr && tuning_.nccl == nullptr) return staged;
  if (!stream_) {
    stream_ = memory.make_stream();
    detail::load_reductions(memory);
  }
  detail::nccl::Use use{.library = detail::nccl::library(tuning_.nccl),
                        .sums = sums_,
                        .pool = pool_,
                        .stream = stream_,
                        .tree = detail::reduce_in_stream,
                        .device = describe(),
                        .apart = tuning_.nccl_apart};
  return detail::nccl::group(std::move(staged), use);
}

SHARDLIB_INLINE Communicator& Device::group(std::initializer_list<std::string_view> axes) {
  return group(std::span(axes.begin(), axes.end()));
}

SHARDLIB_INLINE Communicator& Device::everybody() {
  std::vector<std::string_view> axes;
  for (const AxisSize& axis : axes_) axes.push_back(axis.name);
  return group(axes);
}

SHARDLIB_INLINE Buffer Device::to_host(const Buffer& buffer) const {
  if (buffer.device_memory() == nullptr) return buffer;
  Buffer there = host_pool_->allocate(buffer.bytes());
  copy(there, buffer);
  return there;
}

SHARDLIB_INLINE Buffer Device::to_device(const Buffer& buffer) const {
  if (buffer.device_memory() == pool_->device_memory()) return buffer;
  Buffer there = pool_->allocate(buffer.bytes());
  copy(there, buffer);
  return there;
}

SHARDLIB_INLINE std::string Device::describe() const {
  if (reinterpreted_) return whole_->describe() + " seen as mesh " + to_string(axes_);
  if (whole_) return whole_->describe();
  if (axes_.empty()) return "device 0 of the mesh without axes";
  auto place = axes_;
  for (std::size_t i = 0; i < place.size(); ++i) place[i].size = coordinates_[i];
  return "device " + std::to_string(rank_) + " (" + to_string(place) + ") of mesh " + to_string(axes_);
}

SHARDLIB_INLINE std::string Device::describe_view() const {
  if (!whole_ || reinterpreted_) return describe();
  return whole_->describe_view() + ", in its submesh " + (axes_.empty() ? "without axes" : to_string(axes_));
}

SHARDLIB_INLINE std::size_t Device::find(std::string_view axis) const {
  const auto it = std::ranges::find(axes_, axis, &AxisSize::name);
  if (it == axes_.end()) {
    throw Error("unknown axis '" + std::string(axis) + "': the mesh " +
                (axes_.empty() ? "has no axes" : "is " + to_string(axes_)));
  }
  return static_cast<std::size_t>(it - axes_.begin());
}

SHARDLIB_INLINE std::pair<std::vector<int>, int> Device::members_along(std::span<const std::string_view> axes) const {
  std::vector<int> strides(axes_.size(), 1);
  for (std::size_t i = axes_.size(); i-- > 1;) strides[i - 1] = strides[i] * axes_[i].size;
  std::vector<int> members{rank_};
  int rank = 0;
  for (std::size_t k = 0; k < axes.size(); ++k) {
    if (std::ranges::count(axes.first(k), axes[k]) != 0) {
      throw Error("group over axis '" + std::string(axes[k]) + "' twice: name each axis once");
    }
    if (is_absent(axes[k])) continue;
    const std::size_t i = find(axes[k]);
    std::vector<int> longer;
    for (const int member : members) {
      for (int c = 0; c < axes_[i].size; ++c) longer.push_back(member + (c - coordinates_[i]) * strides[i]);
    }
    members = std::move(longer);
    rank = rank * axes_[i].size + coordinates_[i];
  }
  return {std::move(members), rank};
}

SHARDLIB_INLINE std::size_t Device::next_slot() {
  static std::atomic<std::size_t> next = 0;
  return next++;
}

}  // namespace shardlib
