// What ops are written with: an op records its kernel and, for each operand, how the cotangent comes back. Declared
// here, for the types alone; autodiff/tape.hpp and runtime/ define it.
//
// Kernels and VJPs have names (functions, structs, variable templates), since a program that includes shapes.hpp alone
// never sees `record`'s body, and a lambda inside of an op would be a type that no other file can know.
#pragma once

#include <array>
#include <cstddef>
#include <tuple>
#include <utility>

#include "shardlib/ops/result.hpp"
#include "shardlib/types/call_site.hpp"
#include "shardlib/types/sizes.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib {

class Buffer;

namespace detail {

/// Records one op: the result's sizes, the kernel (`Buffer kernel(const Value& out)`), and one `vjp(...)` per operand
/// that has a derivative.
template <OpName Name, class Out, class K, class... V>
Out record(const OpInfo& op, const DevicePtr& device, const GlobalSizes& global, const K& kernel, const V&... vjps);

/// The same of an op of one operand, whose kernel is `Buffer kernel(const Value& in, const Value& out)`.
template <OpName Name, class Out, class X, class K, class... V>
Out record_unary(const OpInfo& op, const X& x, const GlobalSizes& global, const K& kernel, const V&... vjps);

/// A cotangent that is zero but for few elements: left for later, so that `add(out, sum)` can add it to a sum of its
/// shape without making it.
template <class Out, class K, class Add>
Out record_addend(const OpInfo& op, const DevicePtr& device, const GlobalSizes& global, const K& kernel,
                  const Add& add);

/// How one operand's cotangent comes from the result's: f(cotangent, saved...), a typed function, with what it needs;
/// or f(cotangent, saved..., global sizes of the operand). Lives as long as the call of `record` that it is made for.
template <class X, class F, class... Saved>
struct Vjp {
  const ValuePtr* x;
  std::array<const ValuePtr*, sizeof...(Saved)> saved;
  F f;
};
template <class... T>
std::tuple<const T&...> save(const T&... t) {
  return {t...};
}
template <class X, class... Saved, class F>
auto vjp(const X& x, std::tuple<const Saved&...> saved, const F& f) {
  return std::apply([&](const auto&... s) { return Vjp<X, F, Saved...>{&x.value(), {&s.value()...}, f}; }, saved);
}
template <class X, class F>
auto vjp(const X& x, const F& f) {
  return Vjp<X, F>{&x.value(), {}, f};
}

/// A VJP that needs the op's own result: f(cotangent, saved..., result).
template <class X, class F, class... Saved>
struct VjpOfResult {
  const ValuePtr* x;
  std::array<const ValuePtr*, sizeof...(Saved)> saved;
  F f;
};
template <class X, class... Saved, class F>
auto vjp_of_result(const X& x, std::tuple<const Saved&...> saved, const F& f) {
  return std::apply(
      [&](const auto&... s) {
        return VjpOfResult<X, F, Saved...>{&x.value(), {&s.value()...}, f};
      },
      saved);
}

/// The op spec of a transpose: from the result's cotangent to the operand's.
template <class Out, class X>
constexpr OpSpec transpose_op() {
  constexpr Spec axes = axes_of<Out::spec, X::spec>();
  return make_op(dual_spec(Out::spec, axes), dual_spec(X::spec, axes));
}

// ---- sizes and checks ----------------------------------------------------------------------------------------------

const GlobalSizes& sizes_of(const ValuePtr& x);
/// The sizes of `out`, whose names are those of the operands.
GlobalSizes sizes_by_name(const OpInfo& op, const TensorSpec& out, const ValuePtr& x);
GlobalSizes sizes_by_name(const OpInfo& op, const TensorSpec& out, const ValuePtr& x, const ValuePtr& y);
GlobalSizes sizes_by_name(const OpInfo& op, const TensorSpec& out, const ValuePtr& x, const ValuePtr& y,
                          const ValuePtr& z);
/// The same, where the names that the operand lacks are given.
GlobalSizes sizes_by_name(const OpInfo& op, const TensorSpec& out, const ValuePtr& x, const Sizes& given);

/// Whether anything differentiates the value.
bool is_differentiated(const ValuePtr& x);
/// The same value, of which nothing is differentiated: the program means it so.
ValuePtr without_gradient(const ValuePtr& x);
/// For an op without a derivative: the error that says so, if its operand is differentiated.
void require_no_gradient(const OpInfo& op, const ValuePtr& x, const char* what);
/// For ops that would bring the padding of dim number `at` between its elements: the error that says so, if it has any.
void require_unpadded(const OpInfo& op, const ValuePtr& x, int at, const char* why);

/// While it lives, a reduce_scatter of a gradient runs asynchronously.
template <class Ct>
class AsyncSum;

}  // namespace detail
}  // namespace shardlib
