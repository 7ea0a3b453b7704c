// The peak that the MFU of a run is measured against.
#pragma once

#include <string_view>

#include "shardlib/device/device.hpp"
#include "shardlib/device/launch.hpp"
#include "shardlib/memory/region.hpp"
#include "shardlib/run/accelerators.hpp"
#include "shardlib/run/impl/batches.hpp"
#include "shardlib/run/peak.hpp"

namespace shardlib::run::detail {

/// The peak of all devices together, or 0 if it is not known. All devices call it.
inline double peak_of_run(const DevicePtr& device, const Training& training, std::string_view dtype) {
  // Devices that are threads of this process share its cores. Ranks of one machine measure their cores together.
  const double peak = device->exec().gpu() != nullptr
                          ? gpu_peak(device->pool()->device_memory()->model(), dtype, training.plan_flops)
                      : under_mpi()         ? measured_peak_flops(device->exec().threads)
                      : device->rank() == 0 ? measured_peak_flops()
                                            : 0.0;
  const double sum = reduce(device, peak, Reduction::sum);
  return sum > 0 ? sum : 0;
}

}  // namespace shardlib::run::detail
