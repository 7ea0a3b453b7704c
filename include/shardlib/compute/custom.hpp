// Ops defined outside the library: a kernel for this device's shards, and one VJP for each operand.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/on_host.hpp"
#include "shardlib/compute/reductions.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/rules/custom.hpp"
#include "shardlib/runtime/bindings.hpp"
#include "shardlib/runtime/tensor.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/spec/require.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/numbers_in.hpp"
#include "shardlib/types/self_contained.hpp"

namespace shardlib::detail {

/// A pending sum over all axes of a mesh, `+d +t`.
template <Spec A>
inline constexpr Spec sum_over_mesh = dual_spec<"", A>();
/// The same, of a VJP that names no mesh.
inline constexpr Spec sum_over_unnamed = Spec((Text("+") + rules::unnamed_axes).view());

template <class First, class...>
inline constexpr Spec first_spec = First::spec;

/// The function of a VJP outside the library. It takes the cotangent and what was saved, `Tensors` tensors together.
/// The cotangent's type has all axes over which its sum may be pending, and those of `Sum`.
template <int Tensors, Spec Sum, class F>
struct OwnVjp {
  static constexpr Spec cotangent_axes = Sum;
  F f;
  template <class... T>
  requires(sizeof...(T) == Tensors) auto operator()(const T&... tensors) const {
    constexpr bool is_taken = std::is_invocable_v<const F&, const T&...>;
    constexpr bool returns_tensor = requires {
      { f(tensors...) } -> tensor;
    };
    static_assert(checked<rules::own_vjp, first_spec<T...>, Tensors - 1, is_taken, returns_tensor>::ok);
    return f(tensors...);
  }
};
/// Throws if the mesh that a VJP names is not that of its operand.
[[gnu::cold]] SHARDLIB_INLINE void require_mesh_of(const DevicePtr& mesh, const ValuePtr& x);
/// Throws if the tape tracks an operand that has no VJP. `differentiated` holds the operand of each VJP.
[[gnu::cold]] SHARDLIB_INLINE void require_vjps(const OpInfo& op, std::span<const ValuePtr> operands,
                                                std::span<const ValuePtr* const> differentiated);
/// Whether a copy of the function refers to nothing that may be gone, as far as its type shows: one that is not
/// trivially copyable may hold a reference in addition to what it owns.
template <OpName Name, bool IsKernel, class F>
inline constexpr bool own_function =
    checked<rules::own_function, Name, IsKernel, self_contained<F> || !std::is_trivially_copyable_v<F>>::ok;

/// Whether it is what `custom::operands` returns.
template <class T>
inline constexpr bool is_operands = false;
template <class... X>
inline constexpr bool is_operands<std::tuple<const X&...>> = true;
inline constexpr Literal record_form =
    "custom::record<\"name\", Out>({spec, site}, kernel, custom::operands(x), vjps...)";

/// Calls run(the result's value, the program's kernel).
template <class K, class F>
struct OwnKernel {
  K kernel;
  F run;
  Buffer operator()(const Value& out) const { return run(out, kernel); }
};
template <class K, class F>
NumbersIn numbers_in(const OwnKernel<K, F>& own) {
  return numbers_in(own.kernel);
}

}  // namespace shardlib::detail

namespace shardlib::custom {

/// Describes the call of an op, for messages and reports: the op spec, which may be empty, and the line of the call.
/// `Call{Dim, site}`
struct Call {
  std::string_view spec;
  Site site;
};

/// The spec that a rule gives, or the rule's message as a compile error. A rule is a constexpr function that returns
/// a `rules::Verdict`. A rule gets a Spec as a TensorSpec, and an OpSpec as a ParsedOp. The library's rules are in
/// `shardlib::rules`; your own may be next to the op.
/// `result_of<rules::along, OpName("ewma"), Dim, S>`
template <auto Rule, auto... Args>
inline constexpr Spec result_of = detail::result_of<Rule, Args...>;

/// The positions of one row's elements in a shard: `data[row[i]]` for i in [0, row.size).
struct Row {
  std::int64_t first = 0;   ///< offset of element 0
  std::int64_t stride = 1;  ///< offset between neighbors
  std::int64_t size = 0;    ///< number of elements, without padding
  /// The offset of element `i` in the shard.
  constexpr std::int64_t operator[](std::int64_t i) const { return first + i * stride; }
};

/// This device's shard of an operand (`Shard<const f32>`) or of the result (`Shard<f32>`), row-major in the order of
/// the spec.
template <class D>
class Shard {
 public:
  D* data = nullptr;  ///< the first element

  Shard(const detail::Value& value, D* elements) : data(elements), value_(&value) {}

  /// The shape, padding included, in the order of the spec.
  [[nodiscard]] std::span<const std::int64_t> shape() const { return detail::view(value_->local); }
  /// The number of elements, padding included.
  [[nodiscard]] std::int64_t size() const { return value_->count(); }
  /// Calls f(row) for each row along an unsharded dim. The device's threads run the rows in parallel, so f may write
  /// only to its own row. `x.for_each_row("L", [&](Row row) { ... })`
  template <class F>
  void for_each_row(std::string_view dim, const F& f) const {
    const int at = value_->spec->find(dim);
    if (at < 0 || !value_->spec->dims[at].axes.empty())
      throw Error("for_each_row: `" + std::string(to_string(*value_->spec).view()) + "` has no unsharded dim `" +
                  std::string(dim) + "`; name one that each device holds whole");
    const detail::Along a = detail::along(*value_, at);
    value_->device->host_exec().for_each(a.rows(), [&](std::int64_t i) { f(Row{a.offset(i), a.inner, a.counted()}); });
  }

 private:
  const detail::Value* value_;
};

/// The operands of an op, in the order in which its kernel receives their shards. `operands(x, w)`
template <class... X>
std::tuple<const X&...> operands(const X&... x) {
  return {x...};
}
/// The residuals of a VJP, in the order in which it receives them after the cotangent. `save(x, w)`
template <class... X>
auto save(const X&... x) {
  return detail::save(x...);
}
/// The VJP of operand x: f(cotangent, saved...), a function of tensors. The type of its result is checked against the
/// dual of x. Throws in the backward pass if its sizes are not those of x. f is linear in the cotangent, as all
/// derivatives are. So the type of the cotangent may say that a sum is pending over the axes that no type of the op
/// names, `B/d M +unnamed`, which f passes on. Ops that are not linear do not compile with it.
/// `vjp(x, save(w), [](const auto& ct, const auto& w) { return ct * w; })`
template <class X, class F>
auto vjp(const X& x, const F& f) {
  return detail::vjp(x, detail::OwnVjp<1, detail::sum_over_unnamed, F>{f});
}
template <class X, class... Saved, class F>
auto vjp(const X& x, const detail::SavedTensors<Saved...>& saved, const F& f) {
  return detail::vjp(x, saved, detail::OwnVjp<1 + sizeof...(Saved), detail::sum_over_unnamed, F>{f});
}
/// The same on a mesh, whose axes the type of the cotangent names, `B/d M +t`: f may reduce it, and then be a function
/// that is not linear. It returns the dual of x on that mesh. Throws if x is not on the mesh. To clip a gradient:
/// `vjp(mesh, x, [](const auto& ct) { return to_partial<over<"t">>(clamp(all_reduce<over<"t">>(ct), -1.0, 1.0)); })`
template <Spec A, class X, class F>
auto vjp(const Mesh<A>& mesh, const X& x, const F& f) {
  detail::require_mesh_of(mesh.device(), x.value());
  return detail::vjp(x, detail::OwnVjp<1, detail::sum_over_mesh<A>, F>{f});
}
template <Spec A, class X, class... Saved, class F>
auto vjp(const Mesh<A>& mesh, const X& x, const detail::SavedTensors<Saved...>& saved, const F& f) {
  detail::require_mesh_of(mesh.device(), x.value());
  return detail::vjp(x, saved, detail::OwnVjp<1 + sizeof...(Saved), detail::sum_over_mesh<A>, F>{f});
}
/// A VJP that needs the op's result, which is the last argument of f. With a mesh before x, the type of the cotangent
/// names its axes. For exp: `vjp_of_result(x, save(), [](const auto& ct, const auto& y) { return ct * y; })`
template <class X, class... Saved, class F>
auto vjp_of_result(const X& x, const detail::SavedTensors<Saved...>& saved, const F& f) {
  return detail::vjp_of_result(x, saved, detail::OwnVjp<2 + sizeof...(Saved), detail::sum_over_unnamed, F>{f});
}
template <Spec A, class X, class... Saved, class F>
auto vjp_of_result(const Mesh<A>& mesh, const X& x, const detail::SavedTensors<Saved...>& saved, const F& f) {
  detail::require_mesh_of(mesh.device(), x.value());
  return detail::vjp_of_result(x, saved, detail::OwnVjp<2 + sizeof...(Saved), detail::sum_over_mesh<A>, F>{f});
}

/// Records an op. `kernel(result's shard, operands' shards...)` writes the whole shard of the result. Each operand
/// that may need a gradient has a `vjp`. Throws if a function is differentiated by a floating operand that has none:
/// the gradient would miss the op. A result of integers has no derivative. A name of a dim has one size in all
/// operands; `sizes` gives the sizes of dims that only the result has. The padding of operands is zero, and the padding
/// of the result is set to zero after the kernel. Kernel and VJPs capture by value, because copies of them run later: a
/// capture by reference does not compile, except with a captured object that owns memory, such as a vector. The
/// kernel does not run in a dry run, such as `--plan`. Several devices' threads may run kernels at the same time.
/// `record<"ewma", Tensor<D, S>>({Dim, site}, kernel, operands(x), vjp(x, f))`
template <OpName Name, class Out, class Kernel, class... X, class... V>
Out record(const Call& call, const Sizes& sizes, const Kernel& kernel, std::tuple<const X&...> operands,
           const V&... vjps) {
  static constexpr OpName name = Name;
  static_assert(sizeof...(X) > 0, "custom::record: an op has one operand at least");
  static_assert(detail::own_function<Name, true, Kernel>);
  static_assert(
      std::is_invocable_v<const Kernel&, Shard<typename Out::value_type>, Shard<const typename X::value_type>...>,
      "custom::record: the kernel takes the shard of the result and those of all operands, as "
      "kernel(custom::Shard<f32> y, custom::Shard<const f32> x)");
  static_assert((... && detail::own_function<Name, false, decltype(V::f)>));
  const detail::Calling op{name.text, call.spec, call.site};
  const std::array<detail::ValuePtr, sizeof...(X)> values =
      std::apply([](const auto&... x) { return std::array{x.value()...}; }, operands);
  detail::Bindings names(op, values[0]->device);
  for (const detail::ValuePtr& value : values) names.bind(*value);
  for (const NamedSize& size : sizes) names.bind(size);
  if constexpr (floating<typename Out::value_type>)
    detail::require_vjps(op, values, std::array<const detail::ValuePtr*, sizeof...(V)>{vjps.x...});
  const auto run = [values](const detail::Value& out, const Kernel& kernel) {
    Buffer result = detail::allocate(out);
    for (const detail::ValuePtr& value : values) static_cast<void>(value->data());
    // The kernel is host code. A device's shards are copied to it, and the result back.
    detail::write_on_host(out, result, [&](const Buffer& there) {
      [&]<std::size_t... I>(std::index_sequence<I...>) {
        const std::array<Buffer, sizeof...(X)> shards{out.device->to_host(values[I]->data())...};
        kernel(
            Shard<typename Out::value_type>(out, there.template as<typename Out::value_type>()),
            Shard<const typename X::value_type>(*values[I], shards[I].template as<const typename X::value_type>())...);
      }
      (std::index_sequence_for<X...>{});
    });
    return result;
  };
  return detail::record<Name, Out>(op, std::get<0>(operands).device(), names.sizes(detail::parsed<Out::spec>),
                                   detail::OwnKernel<Kernel, decltype(run)>{kernel, run}, vjps...);
}
template <OpName Name, class Out, class Kernel, class... X, class... V>
Out record(const Call& call, const Kernel& kernel, std::tuple<const X&...> operands, const V&... vjps) {
  return custom::record<Name, Out>(call, Sizes{}, kernel, operands, vjps...);
}
/// A compile error where the tensors are not in `operands`.
template <OpName Name, class Out, class Kernel, class... More>
requires(!(detail::is_operands<More> || ...)) Out record(const Call& call, const Kernel& kernel, const More&... more) {
  detail::wrong_call<"custom::record", detail::record_form>(call, kernel, more...);
  return {};
}
template <OpName Name, class Out, class Kernel, class... More>
requires(!(detail::is_operands<More> || ...)) Out
    record(const Call& call, const Sizes& /*sizes*/, const Kernel& kernel, const More&... more) {
  return custom::record<Name, Out>(call, kernel, more...);
}

}  // namespace shardlib::custom

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/custom.hpp"
#endif
