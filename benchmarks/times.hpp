// Medians of functions that take turns.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

inline double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Times {
  double median = 0, low = 0, high = 0;  ///< seconds; the spread is the middle 80 %
};
inline Times summary(std::vector<double> t) {
  std::sort(t.begin(), t.end());
  const auto at = [&](double q) { return t[static_cast<std::size_t>(q * static_cast<double>(t.size() - 1))]; };
  return {at(0.5), at(0.1), at(0.9)};
}

// Times of several functions that take turns, so that all of them see the same noise. A first call of each does not
// count. `now` is the clock, in seconds.
inline std::vector<Times> interleaved(int rounds, const std::vector<std::function<void()>>& functions,
                                      double (*now)() = wall_seconds) {
  std::vector<std::vector<double>> times(functions.size());
  for (const auto& f : functions) f();
  for (int r = 0; r < rounds; ++r)
    for (std::size_t i = 0; i < functions.size(); ++i) {
      const double begin = now();
      functions[i]();
      times[i].push_back(now() - begin);
    }
  std::vector<Times> result;
  for (auto& t : times) result.push_back(summary(std::move(t)));
  return result;
}
