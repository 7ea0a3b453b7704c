// The report of an op to the device's observer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "shardlib/spec/dtype.hpp"
#include "shardlib/types/call_site.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib::detail {

/// A shard that an op has read: an operand's, or its own result's if it writes through a Value.
struct OpRead {
  const void* shard;
  std::string what;  ///< the leaf's name, or the op that made it
  const TensorSpec* spec;
  std::size_t bytes;
  bool written = false;      ///< the op wrote into it too
  bool overwritten = false;  ///< the op wrote into it without reading it
};

/// The work of one op.
struct OpWork {
  std::int64_t bytes = 0;  ///< sent by this device
  double flops = 0;
  Axes axes;                  ///< the axes that it communicated over
  std::vector<OpRead> reads;  ///< while ProgramState::note_reads is set
  bool in_place = false;      ///< the op wrote its result into a shard that it read
  bool made_before = false;   ///< the kernel of the operand's op has made the result
};

/// One execution of an op, in times of the steady clock.
struct OpReport {
  const OpInfo& op;
  const TensorSpec& spec;  ///< of the result
  DType dtype;             ///< of the result
  const void* shard;       ///< of the result
  std::size_t bytes;       ///< of the result's shard
  /// The op ran in the backward pass, because something read a value that the replay had deferred.
  bool recomputed;
  OpWork work;
  std::int64_t begin_ns, end_ns;
};

}  // namespace shardlib::detail
