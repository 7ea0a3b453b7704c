// Watching a device's ops as they run: for traces, for the report of a dry run, for the graph.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "shardlib/value.hpp"

namespace shardlib::detail {

/// run(), and a record of it for the device's observer if there is one.
template <class F>
Buffer observed(const Value& out, const F& run) {
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

/// Tells `observer` of the device's ops while it lives, besides those who observe already.
class Observing {
 public:
  Observing(const std::shared_ptr<Device>& device, std::function<void(const State::Ran&)> observer)
      : state_(state(device)), before_(state_.observer) {
    if (before_)
      state_.observer = [before = before_, also = std::move(observer)](const State::Ran& ran) {
        before(ran);
        also(ran);
      };
    else
      state_.observer = std::move(observer);
    state_.work = {};
  }
  Observing(const Observing&) = delete;
  Observing& operator=(const Observing&) = delete;
  ~Observing() { state_.observer = std::move(before_); }

 private:
  State& state_;
  std::function<void(const State::Ran&)> before_;
};

}  // namespace shardlib::detail
