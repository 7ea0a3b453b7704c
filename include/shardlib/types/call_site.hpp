// The call of an op: its name, its spec and its line, for messages.
#pragma once

#include <source_location>
#include <string>
#include <string_view>
#include <utility>

namespace shardlib {

/// Where an op was called: for messages and for the report of what is kept for the backward pass.
using Site = std::source_location;

namespace detail {

/// What is being done, for messages, counters and reports.
struct OpInfo {
  const char* name = "";
  std::string_view spec;
  Site site;

  /// "all_gather<`A/d -> A`>", for traces and counts.
  [[nodiscard]] std::string label() const {
    return spec.empty() ? std::string(name) : std::string(name) + "<`" + std::string(spec) + "`>";
  }
  /// With the line of the call, where it is known: " at trainer.cpp:12".
  [[nodiscard]] std::string at() const {
    return site.line() == 0 ? "" : std::string(" at ") + site.file_name() + ":" + std::to_string(site.line());
  }
  [[nodiscard]] std::string describe() const { return label() + at(); }
};

/// The op that is being called, for the error of an operand that holds nothing. Ops name themselves so before they look
/// at their operands: `const Calling op{"all_gather", O, site};`
class Calling : public OpInfo {
 public:
  Calling(const char* name, std::string_view spec, const Site& site)
      : OpInfo{name, spec, site}, outer_(std::exchange(innermost, this)) {}
  Calling(const Calling&) = delete;
  Calling& operator=(const Calling&) = delete;
  ~Calling() { innermost = outer_; }
  /// The innermost op of this thread; null outside of ops.
  static inline thread_local const Calling* innermost = nullptr;

 private:
  const Calling* outer_;
};

}  // namespace detail
}  // namespace shardlib
