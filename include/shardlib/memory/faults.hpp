// Errors that kernels of a device find in their operands, such as an id outside of its table. The host learns of them
// when it next waits for the device, so that no check makes it wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "shardlib/support/error.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib {

class Region;

namespace detail {

/// An error of an earlier op than the one that throws it. Its text already names the earlier op.
struct LateError : Error {
  using Error::Error;
};

/// The result of a team of a check: the first element that is wrong, or `none`.
struct FaultWord {
  static constexpr std::int64_t none = std::numeric_limits<std::int64_t>::max();
  std::int64_t place, value;
};

/// The checks that a device has begun. Each has a few words in the device's memory, one for each team of its kernel.
/// Thread-safe, except `next` and `add`, which are the device's thread's.
class Faults {
 public:
  static constexpr std::int64_t teams = 32;
  static constexpr std::size_t most = 2048;                                                        ///< open checks
  static constexpr std::size_t check_bytes = static_cast<std::size_t>(teams) * sizeof(FaultWord);  ///< the words of one

  /// The words of the next check, for its kernel. Null if too many checks are open: wait for the device then.
  FaultWord* next(Region& memory);
  /// Opens that check, whose kernel has begun. A '\0' in the text stands for the value of the element that is wrong.
  void add(std::string text);
  /// How many checks there have been.
  [[nodiscard]] std::size_t count() const;
  /// Replaces the text of each check after the first `since` by named(text), which adds the op's name to it.
  void name(std::size_t since, const std::function<std::string(const std::string&)>& named);
  /// Closes the checks that are open: wait(to, from, bytes) waits for the device and copies their words to host memory.
  /// Throws the error of the first that has found one.
  void close(const std::function<void(void* to, const void* from, std::size_t bytes)>& wait);

 private:
  struct Check {
    std::string text;
    bool is_named = false;
  };
  mutable std::mutex mutex_;
  FaultWord* words_ = nullptr;
  std::vector<Check> checks_;            ///< those whose words are in use
  std::size_t before_ = 0, closed_ = 0;  ///< the numbers of those before, and of all that are closed
};

}  // namespace detail

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/memory/impl/faults.hpp"
#endif
