// Where a device's time goes: parts that take turns.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace shardlib::detail {

inline std::int64_t steady_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

/// One part has the clock at a time. Nested parts count once, so the parts add up to the whole.
class Stopwatch {
 public:
  enum Part { rest, forward, backward, communication };

  /// Forgets all times; `rest` has the clock.
  void reset(std::int64_t now = steady_ns()) {
    ns_ = {};
    part_ = rest;
    since_ = now;
  }
  /// Gives the clock to `next` and returns the part that had it.
  Part change(Part next, std::int64_t now = steady_ns()) {
    ns_[part_] += now - std::exchange(since_, now);
    return std::exchange(part_, next);
  }
  /// Of a part, up to the last change.
  [[nodiscard]] double seconds(Part part) const { return static_cast<double>(ns_[part]) * 1e-9; }

 private:
  std::array<std::int64_t, 4> ns_{};
  std::int64_t since_ = 0;
  Part part_ = rest;
};

}  // namespace shardlib::detail
