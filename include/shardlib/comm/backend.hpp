// What a kind of devices offers: the communicators between them, and their memory.
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
  /// The communicator over `members` (device indices in rank order), seen from `rank`. Only the members take part.
  virtual std::unique_ptr<Communicator> group(const std::vector<int>& members, int rank,
                                              const std::shared_ptr<Pool>& pool) = 0;
  /// What records a device's communications; null: nobody does.
  [[nodiscard]] virtual std::shared_ptr<detail::FlightRecorder> recorder(int /*device*/) { return nullptr; }
  /// True of a backend whose devices are not there: see comm/dry.hpp.
  [[nodiscard]] virtual bool is_dry() const { return false; }
  /// A device's memory.
  [[nodiscard]] virtual std::shared_ptr<Pool> make_pool() const {
    return Pool::make(is_dry() ? Region::make_meta() : Region::make());
  }
};

}  // namespace shardlib
