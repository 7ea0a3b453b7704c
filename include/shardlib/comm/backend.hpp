// The services of a kind of device: communicators between devices, and memory.
#pragma once

#include <memory>
#include <vector>

#include "shardlib/comm/communicator.hpp"
#include "shardlib/comm/flight_recorder.hpp"
#include "shardlib/memory/buffer.hpp"

namespace shardlib {

/// Where communicators of more than one device come from: threads of one process, or MPI.
class Backend {
 public:
  virtual ~Backend() = default;
  /// Creates the communicator over `members` (device indices in rank order), seen from `rank`. Only the members take
  /// part.
  virtual std::unique_ptr<Communicator> group(const std::vector<int>& members, int rank,
                                              const std::shared_ptr<Pool>& pool) = 0;
  /// The flight recorder of a device, or null if there is none.
  [[nodiscard]] virtual std::shared_ptr<detail::FlightRecorder> recorder(int /*device*/) { return nullptr; }
  /// True if the backend runs dry: its devices do not exist (comm/dry.hpp).
  [[nodiscard]] virtual bool is_dry() const { return false; }
  /// Creates the memory pool of a device.
  [[nodiscard]] virtual std::shared_ptr<Pool> make_pool() const {
    return Pool::make(is_dry() ? Region::make_meta() : Region::make());
  }
};

}  // namespace shardlib
