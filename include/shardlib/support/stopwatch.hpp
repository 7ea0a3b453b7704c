// Measures the parts of a device's time, one part at a time.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <utility>

namespace shardlib::detail {

inline std::int64_t steady_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

/// The same time in seconds.
inline double steady_seconds() {
  return 1e-9 * static_cast<double>(steady_ns());
}

/// The seconds since 1970.
inline double unix_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// Only one part's clock runs at a time. Nested time counts for the inner part only, so the parts sum to the total.
class Stopwatch {
 public:
  enum Part { rest, forward, backward, communication };

  /// Sets all times to zero and starts the clock of `rest`.
  void reset(std::int64_t now = steady_ns()) {
    ns_ = {};
    part_ = rest;
    since_ = now;
  }
  /// Starts the clock of `next` and returns the previous part.
  Part change(Part next, std::int64_t now = steady_ns()) {
    ns_[part_] += now - std::exchange(since_, now);
    return std::exchange(part_, next);
  }
  /// The time of a part, up to the last change.
  [[nodiscard]] double seconds(Part part) const { return static_cast<double>(ns_[part]) * 1e-9; }

 private:
  std::array<std::int64_t, 4> ns_{};
  std::int64_t since_ = 0;
  Part part_ = rest;
};

}  // namespace shardlib::detail
