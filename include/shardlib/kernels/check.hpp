// Checks of operands by the device that has them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/body/check.hpp"
#include "shardlib/memory/region.hpp"

namespace shardlib::kernels {

/// Where `exec.on_device()`: begins to look for an i in [0, n) with fault(i). When the host next waits for the device,
/// it throws Error(text) if there is one, with fault.value(i) of the first in place of a '\0' in the text.
template <class F>
void check_late(const Exec& exec, std::int64_t n, const F& fault, std::string text) {
  if (exec.dry || n == 0) return;
  Region& memory = *exec.pool->device_memory();
  shardlib::detail::Faults& faults = *memory.faults();
  auto* words = faults.next(memory);
  if (words == nullptr) {
    memory.synchronize();
    words = faults.next(memory);
  }
  exec.for_items_on_device(body::FindFault<F>::items, 0, body::FindFault<F>{fault, n, words});
  faults.add(std::move(text));
}

}  // namespace shardlib::kernels
