// Typing rules of softmax, log_softmax and logsumexp, along unsharded and along sharded dims.
#pragma once

#include "shardlib/rules/local.hpp"

#include <string_view>

namespace shardlib::rules {

namespace detail_ {

constexpr Text or_over(std::string_view name, std::string_view what, const Axes& axes) {
  return ", or write " + form_over(name, what, axes) + ", which sends maxima and sums only (communicates)";
}
/// The axes of the call must be those of the dims, in their order.
constexpr Text over_these(std::string_view name, std::string_view what, const ParsedOp& over, const Text& subject,
                          const Axes& axes) {
  return over_exactly(over, axes, subject, "the call names exactly these axes", form_of(name, what),
                      form_over(name, what, axes));
}

}  // namespace detail_

/// softmax<"V">(x) and log_softmax: the dim must be unsharded, and nothing may be partial.
constexpr Verdict softmax(std::string_view name, std::string_view dim, const TensorSpec& x) {
  Verdict verdict = along(name, dim, x);
  if (const int at = x.find(dim); x.partial.empty() && at >= 0 && !x.dims[at].axes.empty())
    verdict.why = verdict.why + detail_::or_over(name, dim, x.dims[at].axes);
  return verdict;
}
/// softmax<"V", over<"t">>(x) and log_softmax: along a dim that is sharded over exactly these axes.
constexpr Verdict softmax_over(std::string_view name, std::string_view dim, const ParsedOp& over, const TensorSpec& x) {
  if (const Text why = detail_::nonlinear(name, x); !why.empty()) return {x, why};
  const auto fail = [&](const Text& why) {
    return Verdict{x, Text(name) + "<" + quoted(dim) + ", " + over.text + ">: " + why};
  };
  const int at = x.find(dim);
  if (at < 0) return fail(detail_::unsharded(x, dim));
  if (const Text why = detail_::over_these(name, dim, over, dim_is(x.dims[at]), x.dims[at].axes); !why.empty())
    return fail(why);
  return {x, {}};
}

/// logsumexp<"A V/t -> A", over<"t">>(x): the removed dims are sharded over exactly these axes.
constexpr Verdict logsumexp_over(const ParsedOp& op, const ParsedOp& over, const TensorSpec& x) {
  const OpCall call = call_of("logsumexp", op, x);
  if (!call.why.empty()) return call.fail();
  const TensorSpec& out = call.op.out;
  Small<Dim, max_dims> removed;
  if (const Text why = detail_::nonlinear("logsumexp", x); !why.empty()) return {out, why};
  if (const Text why = removed_dims(call, removed); !why.empty()) return call.fail(why);
  if (!out.partial.empty())
    return call.fail("the result has no pending sum, which the op takes; drop `+" + Text(out.partial[0]) + "`");
  const Text subject = removed.size() == 1 ? dim_is(removed[0]) : Text("the removed dims are");
  if (const Text why =
          detail_::over_these("logsumexp", to_string(x) + " -> " + to_string(out), over, subject, axes_removed(x, out));
      !why.empty())
    return call.fail(why);
  return call.accept();
}
/// logsumexp<"A V -> A">(x): the removed dims must be unsharded, and nothing may be partial.
constexpr Verdict logsumexp(const ParsedOp& op, const TensorSpec& x) {
  Verdict verdict = local_max("logsumexp", op, x);
  const Axes axes = axes_removed(x, verdict.result);
  if (!verdict.ok() && logsumexp_over(op, "over<" + joined(axes, " ") + ">", x).ok())
    verdict.why = verdict.why + detail_::or_over("logsumexp", to_string(x) + " -> " + to_string(verdict.result), axes);
  return verdict;
}

}  // namespace shardlib::rules
