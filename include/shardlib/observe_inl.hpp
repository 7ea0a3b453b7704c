// Definitions of observe.hpp.
#pragma once

#include "shardlib/observe.hpp"

#include <chrono>
#include <cstdint>

namespace shardlib::detail {

SHARDLIB_INLINE Buffer observed(const Value& out, const std::function<Buffer()>& run) {
  State& s = state(out.device);
  if (!s.observer) return run();
  const auto now = [] {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
  };
  // In a replay the operands' ops run within this one: each has a record of its own.
  State::Work outer = std::exchange(s.work, {});
  const std::int64_t begin = now();
  Buffer result = run();
  const std::int64_t end = now();
  State::Work mine = std::exchange(s.work, std::move(outer));
  s.work.inner_ns += end - begin;
  // What `evaluate` puts off has no storage.
  s.observer({out.made_by, *out.spec, result.data(), out.bytes(), out.storage == nullptr, std::move(mine), begin, end});
  return result;
}

}  // namespace shardlib::detail
