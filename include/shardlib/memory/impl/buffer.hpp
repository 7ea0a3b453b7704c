// Definitions of buffer.hpp.
#pragma once

#include "shardlib/memory/buffer.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "shardlib/memory/system.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib {

SHARDLIB_INLINE void copy(const Buffer& to, const Buffer& from) {
  for (Region* const device : {to.device_memory(), from.device_memory()})
    if (device != nullptr && device->copy(to.data(), from.data(), from.bytes())) return;
  if (from.bytes() > 0) std::memcpy(to.data(), from.data(), from.bytes());  // which must not be given null pointers
}

SHARDLIB_INLINE Buffer Pool::allocate(std::size_t bytes) {
  const detail::OpInfo* const op = detail::Calling::innermost;
  return allocate(bytes, op == nullptr ? detail::OpInfo() : *op);
}

SHARDLIB_INLINE Buffer Pool::allocate(std::size_t bytes, const detail::OpInfo& op) {
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) fail(bytes);  // too large to round up, and for any machine
  const std::size_t rounded = round(bytes);
  // The region aligns to 64 bytes only. A long block gets extra bytes, so that its data can start at an aligned
  // address.
  const std::size_t alignment = rounded < long_block ? 64 : region_->alignment();
  const std::size_t taken = rounded + alignment - 64;
  std::byte* const begin = region_->allocate(taken);
  if (begin == nullptr) fail(bytes);
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  std::byte* const data = begin + ((address + alignment - 1) / alignment * alignment - address);
  auto lease = std::shared_ptr<void>(begin, Lease{shared_from_this(), rounded, taken, count(rounded, op)});
  return Buffer(data, bytes, std::move(lease), false, device_);
}

SHARDLIB_INLINE void Pool::shrink(const Buffer& block, std::size_t bytes) {
  Lease* const lease = std::get_deleter<Lease>(block.block_->owner);
  if (lease == nullptr || lease->pool.get() != this) return;  // memory from elsewhere
  const std::size_t freed = lease->bytes - round(bytes), taken = std::exchange(lease->taken, lease->taken - freed);
  block.block_->bytes = bytes;
  lease->bytes -= freed;
  uncount(freed, lease->made);
  region_->shrink(static_cast<std::byte*>(block.block_->owner.get()), taken, lease->taken);
}

SHARDLIB_INLINE Pool::Stats Pool::stats() const {
  const std::lock_guard lock(mutex_);
  Stats result = stats_;
  result.reserved = region_->reserved();
  return result;
}

SHARDLIB_INLINE void Pool::reset_peak() {
  const std::lock_guard lock(mutex_);
  stats_.peak = stats_.live;
}

SHARDLIB_INLINE void Pool::fail(std::size_t bytes) const {
  const std::size_t left = detail::left_bytes();
  if (region_->is_meta() && left < (std::size_t{1} << 30))
    throw Error("out of memory: a dry run records each of its tensors, and " + std::to_string(left) +
                " bytes are left on this machine: use fewer layers or microbatches");
  std::string text = "out of memory: " + std::to_string(bytes) + " bytes wanted, " + std::to_string(stats().live) +
                     " in use by this device's pool";
  if (const std::string ops = largest(); !ops.empty()) text += " (" + ops + ")";
  const std::string memory = region_->describe();
  // If enough memory is left on the machine, the limit is on addresses, or this is a dry run.
  if (!memory.empty())
    text += ", of " + memory;
  else if (left < bytes && !region_->is_meta())
    text += ", " + std::to_string(left) + " left on this machine";
  if (const std::size_t peak = planned_peak_; peak > 0)
    text += "; the plan of a step has " + std::to_string(peak) + " at most";
  throw Error(text + (memory.empty()
                          ? ": use smaller sizes, or more machines"
                          : ": use a smaller batch, --recompute, or more devices; --plan lists what is alive"));
}

SHARDLIB_INLINE Pool::Made* Pool::count(std::size_t bytes, const detail::OpInfo& op) {
  const std::lock_guard lock(mutex_);
  stats_.live += bytes;
  stats_.peak = std::max(stats_.peak, stats_.live);
  if (bytes < counted_block) return nullptr;
  const std::tuple<std::uint_least32_t, const char*, std::string_view, std::string_view> maker{
      op.site.line(), op.site.file_name(), op.name, op.spec};
  auto made = live_.find(maker);
  if (made == live_.end())
    made = live_.emplace(maker, Made{*op.name == '\0' ? "outside of ops" : "by " + op.describe()}).first;
  made->second.bytes += bytes;
  return &made->second;
}

// Before the memory is free, because the next owner of the block counts its bytes again.
SHARDLIB_INLINE void Pool::uncount(std::size_t bytes, Made* made) {
  const std::lock_guard lock(mutex_);
  stats_.live -= bytes;
  if (made != nullptr) made->bytes -= bytes;
}

SHARDLIB_INLINE std::string Pool::largest() const {
  std::vector<Made> all;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [maker, made] : live_)
      if (made.bytes > 0) all.push_back(made);
  }
  std::ranges::sort(all, std::greater(), &Made::bytes);
  constexpr std::size_t most = 3;
  std::string text;
  for (const Made& made : std::span(all).first(std::min(most, all.size())))
    text += (text.empty() ? "" : ", ") + std::to_string(made.bytes) + " " + made.by;
  return text;
}

}  // namespace shardlib
