// The functions with which ops are written. An op records its kernel and, for each operand, the VJP. This header only
// declares them for the types; autodiff/tape.hpp and runtime/ define them.
//
// Kernels and VJPs have names (functions, structs, variable templates). A program that includes only shapes.hpp never
// sees the body of `record`, and no other file could name the type of a lambda inside an op.
#pragma once

#include <array>
#include <initializer_list>

#include "shardlib/ops/result.hpp"
#include "shardlib/types/call_site.hpp"
#include "shardlib/types/sizes.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib {

class Buffer;

namespace detail {

/// Records one op: the result's sizes, the kernel (`Buffer kernel(const Value& out)`), and one `vjp(...)` for each
/// operand that has a derivative.
template <OpName Name, class Out, class K, class... V>
[[gnu::noinline, gnu::cold]] Out record(const OpInfo& op, const DevicePtr& device, const GlobalSizes& global,
                                        const K& kernel, const V&... vjps);

/// As above, for an op of one operand, whose kernel is `Buffer kernel(const Value& in, const Value& out)`.
template <OpName Name, class Out, class X, class K, class... V>
Out record_unary(const OpInfo& op, const X& x, const GlobalSizes& global, const K& kernel, const V&... vjps);

/// Records a linear op of a VJP, with the kernel of its transpose, `Buffer kernel(const Value& in, const Value& out)`
/// as well. Each is the VJP of the other, where the VJP is differentiated again.
template <class Out, class X, class K, class T>
Out record_linear(const OpInfo& op, const X& x, const GlobalSizes& global, const K& forward, const T& transpose);

/// The VJP of one operand, a typed function f(cotangent, saved...) with its residuals. Also accepts f(cotangent,
/// saved..., global sizes of the operand). A Vjp is valid during the call of `record` that it is an argument of.
template <class X, class F, class... Saved>
struct Vjp {
  const ValuePtr* x;
  std::array<const ValuePtr*, sizeof...(Saved)> saved;
  F f;
};
/// Tensors of types T that a VJP needs. As an argument of `record`, like a Vjp.
template <class... T>
struct SavedTensors {
  std::array<const ValuePtr*, sizeof...(T)> values;
};
template <class... T>
SavedTensors<T...> save(const T&... t) {
  return {{&t.value()...}};
}
template <class X, class... Saved, class F>
auto vjp(const X& x, const SavedTensors<Saved...>& saved, const F& f) {
  return Vjp<X, F, Saved...>{&x.value(), saved.values, f};
}
template <class X, class F>
auto vjp(const X& x, const F& f) {
  return Vjp<X, F>{&x.value(), {}, f};
}

/// A VJP that needs the op's result: f(cotangent, saved..., result).
template <class X, class F, class... Saved>
struct VjpOfResult {
  const ValuePtr* x;
  std::array<const ValuePtr*, sizeof...(Saved)> saved;
  F f;
};
template <class X, class... Saved, class F>
auto vjp_of_result(const X& x, const SavedTensors<Saved...>& saved, const F& f) {
  return VjpOfResult<X, F, Saved...>{&x.value(), saved.values, f};
}

/// The op spec of the transpose, which maps the result's cotangent to the operand's.
template <class Out, class X>
constexpr OpSpec transpose_op() {
  constexpr Spec axes = axes_of<Out::spec, X::spec>();
  return op_spec_of(dual_spec<Out::spec, axes>(), dual_spec<X::spec, axes>());
}

// ---- sizes and checks ----------------------------------------------------------------------------------------------

const GlobalSizes& sizes_of(const ValuePtr& x);
/// The sizes of `out`. All its names are names of the operands.
GlobalSizes sizes_by_name(const OpInfo& op, const TensorSpec& out, std::initializer_list<const ValuePtr*> operands);
/// As above of one operand, with `given` for the names that the operand lacks.
GlobalSizes sizes_by_name(const OpInfo& op, const TensorSpec& out, const ValuePtr& x, const Sizes& given);
/// The sizes of the dims that `out` keeps. Throws if the op, which chooses among the elements of the others, has none.
GlobalSizes chosen_sizes(const OpInfo& op, const ValuePtr& x, const TensorSpec& out);

/// The same value without a gradient, where the program asks for that.
ValuePtr without_gradient(const ValuePtr& x);
/// Whether the derivatives of what runs now are differentiated again: then an op's derivative may use only what the
/// tape tracks.
bool differentiated_twice(const ValuePtr& x);
/// For an op without a derivative: throws if the tape tracks the operand.
void require_no_gradient(const OpInfo& op, const ValuePtr& x, const char* what);
/// For an op that would move the padding of dim number `at` between elements: throws if the dim is padded.
void require_unpadded(const OpInfo& op, const ValuePtr& x, int at, const char* why);

/// While it lives, a reduce_scatter that sums a gradient is asynchronous.
template <class Ct>
class AsyncSum;

}  // namespace detail
}  // namespace shardlib
