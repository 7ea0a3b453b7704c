// Typing rules of linear_scan, along an unsharded and along a sharded dim.
#pragma once

#include "shardlib/rules/local.hpp"

#include <string_view>

namespace shardlib::rules {

namespace detail_ {

/// Checks the operands of a scan except the sharding of its dim. It is not linear in both together, so nothing may be
/// partial.
constexpr Text scanned(const TensorSpec& factors, const TensorSpec& summands) {
  for (const TensorSpec* x : {&factors, &summands})
    if (const Text why = nonlinear("linear_scan", *x); !why.empty()) return why;
  return {};
}
constexpr Text one_scan_spec(const TensorSpec& factors, const TensorSpec& summands) {
  if (factors == summands) return {};
  const Text advice = conversion(factors, summands);
  return "the factors " + quoted(factors) + " must have the spec of the summands " + quoted(summands) + ": " +
         difference(factors, summands) + (advice.empty() ? "" : "; ") + advice;
}

}  // namespace detail_

/// linear_scan<"L">(a, b): operands of one spec, along an unsharded dim.
constexpr Verdict linear_scan(std::string_view dim, const TensorSpec& a, const TensorSpec& b) {
  if (const Text why = detail_::scanned(a, b); !why.empty()) return {a, why};
  const auto fail = [&](const Text& why) { return Verdict{a, title_of("linear_scan", dim) + ": " + why}; };
  if (const Text why = detail_::unsharded(b, dim); !why.empty()) {
    const int at = b.find(dim);
    if (at < 0 || b.dims[at].axes.empty()) return fail(why);
    return fail(why + ", or write " + form_over("linear_scan", dim, b.dims[at].axes) +
                ", which gathers the last states only (communicates)");
  }
  if (const Text why = detail_::one_scan_spec(a, b); !why.empty()) return fail(why);
  return {a, {}};
}

/// linear_scan<"L", over<"s">>(a, b): along a dim that is sharded over exactly these axes.
constexpr Verdict linear_scan_over(std::string_view dim, const ParsedOp& over, const TensorSpec& a,
                                   const TensorSpec& b) {
  if (const Text why = detail_::scanned(a, b); !why.empty()) return {a, why};
  const auto fail = [&](const Text& why) {
    return Verdict{a, Text("linear_scan<") + quoted(dim) + ", " + over.text + ">: " + why};
  };
  const int at = b.find(dim);
  if (at < 0) return fail(detail_::unsharded(b, dim));
  const Dim& along = b.dims[at];
  if (const Text why = over_exactly(over, along.axes, dim_is(along), "the states of all its shards are gathered",
                                    form_of("linear_scan", dim), form_over("linear_scan", dim, along.axes));
      !why.empty())
    return fail(why);
  if (const Text why = detail_::one_scan_spec(a, b); !why.empty()) return fail(why);
  return {a, {}};
}

}  // namespace shardlib::rules
