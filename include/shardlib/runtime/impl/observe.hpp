// Definitions of observe.hpp.
#pragma once

#include "shardlib/runtime/observe.hpp"

#include <cstdint>

#include "shardlib/support/stopwatch.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE Buffer observed(const Value& out, const std::function<Buffer()>& run) {
  ProgramState& s = program_state(out.device);
  if (!s.observer) return run();
  // In a replay, the operands' ops run inside this one. Each has its own record.
  const WithValue work(s.work, {});
  const std::int64_t begin = steady_ns();
  Buffer result = run();
  const std::int64_t end = steady_ns();
  // A value that `evaluate` deferred has no storage.
  s.observer({out.made_by, *out.spec, out.dtype, result.data(), out.bytes(), out.storage == nullptr,
              std::exchange(s.work, {}), begin, end});
  return result;
}

}  // namespace shardlib::detail
