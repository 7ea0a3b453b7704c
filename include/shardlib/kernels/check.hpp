// Checks of operands, by the device that has them.
#pragma once

#include <cstdint>
#include <string>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/body/check.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/memory/region.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::kernels {

/// Throws Error(text(value)) if fault(place) for a place of `nest`, with fault.value(place) of the first. Where
/// `exec.on_device()`, the host throws it when it next waits for the device.
template <class F, class Text>
void check(const Exec& exec, Nest<1> nest, const F& fault, const Text& text) {
  if (nest.count() == 0) return;
  if (exec.on_device()) {
    Region& memory = *exec.pool->device_memory();
    shardlib::detail::Faults& faults = *memory.faults();
    auto* words = faults.next(memory);
    if (words == nullptr) {
      memory.synchronize();
      words = faults.next(memory);
    }
    exec.for_items_on_device(body::FindFault<F>::items, 0, body::FindFault<F>{fault, nest, words});
    return faults.add(text(std::string(1, '\0')));
  }
  exec.run([&] {
    const auto inner = nest.pop();
    Walk<1> walk(nest, 0);
    for (std::int64_t r = 0; r < nest.count(); ++r, walk.next())
      for (std::int64_t i = 0; i < inner.extent; ++i)
        if (const std::int64_t at = walk.offsets[0] + i * inner.strides[0]; fault(at))
          throw Error(text(std::to_string(fault.value(at))));
  });
}

}  // namespace shardlib::kernels
