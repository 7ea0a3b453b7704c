// The call of an op, for messages: its name, its op spec and its line.
#pragma once

#include <source_location>
#include <string>
#include <string_view>
#include <utility>

namespace shardlib {

/// The line of a call, for messages and for the report of residuals.
using Site = std::source_location;

namespace detail {

/// An op or another operation, for messages, counters and reports.
struct OpInfo {
  const char* name = "";
  std::string_view spec;
  Site site;

  /// "all_gather<`A/d -> A`>", for traces and counters.
  [[nodiscard, gnu::cold]] std::string label() const {
    return spec.empty() ? std::string(name) : std::string(name) + "<`" + std::string(spec) + "`>";
  }
  /// The line of the call, " at trainer.cpp:12", or nothing if it is unknown.
  [[nodiscard, gnu::cold]] std::string at() const {
    return site.line() == 0 ? "" : std::string(" at ") + site.file_name() + ":" + std::to_string(site.line());
  }
  /// "exp at trainer.cpp:12", and for an operator "operator* at trainer.cpp:12".
  [[nodiscard, gnu::cold]] std::string describe() const {
    const bool is_operator = *name != 0 && std::string_view("+-*/").find(*name) != std::string_view::npos;
    return (is_operator ? "operator" : "") + label() + at();
  }
};

/// The current op, which the error about an empty operand names. Ops create one before they read their operands:
/// `const Calling op{"all_gather", O, site};`
class Calling : public OpInfo {
 public:
  Calling(const char* name, std::string_view spec, const Site& site)
      : Calling(OpInfo{name, spec, transposed == nullptr ? site : *transposed}) {}
  /// An op that was called before, and is computed now.
  explicit Calling(const OpInfo& op) : OpInfo(op), outer_(std::exchange(innermost, this)) {}
  Calling(const Calling&) = delete;
  Calling& operator=(const Calling&) = delete;
  ~Calling() { innermost = outer_; }
  /// The op; if it has no line and is one of a VJP, with the line of the op whose VJP that is.
  static OpInfo placed(OpInfo op) {
    if (op.site.line() == 0 && transposed != nullptr) op.site = *transposed;
    return op;
  }
  /// The innermost op of this thread; null outside of ops.
  static inline thread_local const Calling* innermost = nullptr;

 private:
  friend class TransposeOf;
  static inline thread_local const Site* transposed = nullptr;
  const Calling* outer_;
};

/// While it lives, the ops that this thread calls carry the line of the op whose VJP they are, not one of the library.
class TransposeOf {
 public:
  explicit TransposeOf(const Site& site) : outer_(std::exchange(Calling::transposed, &site)) {}
  TransposeOf(const TransposeOf&) = delete;
  TransposeOf& operator=(const TransposeOf&) = delete;
  ~TransposeOf() { Calling::transposed = outer_; }

 private:
  const Site* outer_;
};

}  // namespace detail
}  // namespace shardlib
