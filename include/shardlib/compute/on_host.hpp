// Numbers of a device's shard in host memory, for kernels that are plain loops.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "shardlib/device/exec.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib::detail {

/// The elements of a shard, to read and to write as f64.
class HostNumbers {
 public:
  explicit HostNumbers(const Value& x) : HostNumbers(x.on_host(), x.dtype) {}
  HostNumbers(Buffer array, DType dtype) : array_(std::move(array)), dtype_(dtype) {}
  [[nodiscard]] const std::byte* data() const { return array_.data(); }
  [[nodiscard]] double operator[](std::int64_t i) const {
    return visit_dtype(dtype_, [&]<class T>(T /*zero*/) {
      return static_cast<double>(static_cast<scalar_of<T>>(array_.as<const T>()[i]));
    });
  }
  void set(std::int64_t i, double number) const {
    visit_dtype(dtype_, [&]<class T>(T /*zero*/) {
      if constexpr (floating<T>) array_.as<T>()[i] = static_cast<T>(static_cast<scalar_of<T>>(number));
    });
  }

 private:
  Buffer array_;
  DType dtype_;
};

/// Calls fill(buffer), which writes the shard of `out` in host memory: `result` itself, or what is copied there. A dry
/// run does nothing.
template <class F>
void write_on_host(const Value& out, Buffer& result, const F& fill) {
  out.device->host_exec().run([&] {
    const bool copies = out.device->exec().on_device();
    const Buffer there = copies ? out.device->host_pool()->allocate(result.bytes()) : result;
    fill(there);
    if (copies) copy(result, there);
  });
}

/// The shard of `out`, whose numbers in host memory `fill` sets.
inline Buffer filled_on_host(const Value& out, const std::function<void(const HostNumbers&)>& fill) {
  Buffer result = allocate(out);
  write_on_host(out, result, [&](const Buffer& there) { fill(HostNumbers(there, out.dtype)); });
  return result;
}

}  // namespace shardlib::detail
