// Submeshes: the devices with one index of an axis, which run a program of their own. No data moves when a tensor
// enters or leaves a submesh.
#pragma once

#include <cstddef>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/types/leaves.hpp"
#include "shardlib/types/signature.hpp"
#include "shardlib/types/tree.hpp"

namespace shardlib {

namespace detail {
/// The device as one of those with its index of the axis.
DevicePtr submesh(const DevicePtr& device, std::string_view axis);
}  // namespace detail

/// The devices that have this device's index along the axis, as a mesh without it: `mesh.axis_index("e")` says which
/// one. Tensors that are made on it belong to these devices alone. Random numbers of one key are the same on all
/// submeshes. `const Mesh<"d t"> part = submesh<"e">(mesh);`
template <AxisName Axis, Spec A>
auto submesh(const Mesh<A>& mesh) -> Mesh<detail::result_of<rules::submesh, Axis, A>> {
  return Mesh<detail::result_of<rules::submesh, Axis, A>>(detail::submesh(mesh.device(), Axis));
}

namespace detail {

/// One call of on_submeshes on this device.
class SubmeshCall {
 public:
  SubmeshCall(const OpInfo& op, const DevicePtr& device);
  SubmeshCall(const SubmeshCall&) = delete;
  SubmeshCall& operator=(const SubmeshCall&) = delete;
  ~SubmeshCall();
  [[nodiscard]] const DevicePtr& part() const;
  /// The argument number `number` on the submesh. `dual` is the spec of its cotangent, `dual_inside` that on the
  /// submesh.
  ValuePtr enter(const ValuePtr& x, int number, const TensorSpec& inside, const TensorSpec& dual,
                 const TensorSpec& dual_inside);
  /// Call it when the arguments have come, and when the function has returned.
  void begin();
  void end();
  /// A result on the whole mesh.
  ValuePtr leave(const ValuePtr& y, const TensorSpec& out, const TensorSpec& dual_inside);

 private:
  struct Parts;
  Handle<Parts> parts_;
};

/// The types of one call. `P` is the placement of results, "N/e" or "+e".
template <OpSpec P, Spec A>
struct Submeshes {
  static constexpr Spec axes = result_of<rules::on_submeshes, P, A>;
  using Part = Mesh<axes>;

  /// The type of argument number I in the function.
  template <int I, class T>
  struct inside {
    static constexpr bool checked_leaves() {
      if constexpr (is_tree<T>())
        return all_leaves<T>([]<class D, Spec S>(std::type_identity<Tensor<D, S>>) {
          return checked<rules::enter_submesh, P, A, I, true, S>::ok;
        });
      else
        return check_arguments<"on_submeshes", T>() || true;  // one error
    }
    using type = std::enable_if_t<checked_leaves(), T>;
  };
  template <int I, class D, Spec S>
  struct inside<I, Tensor<D, S>> {
    using type = Tensor<D, result_of<rules::enter_submesh, P, A, I, false, S>>;
  };

  /// The type of a result on the whole mesh.
  template <class R>
  struct outside {
    static_assert(checked<rules::submesh_result, P, false, name_of_type<R>>::ok);
    using type = Tensor<f32, "?">;
  };
  template <class D, Spec S>
  struct outside<Tensor<D, S>> {
    using type = Tensor<D, result_of<rules::leave_submesh, P, A, S>>;
  };
  template <class... D, Spec... S>
  struct outside<std::tuple<Tensor<D, S>...>> {
    using type = std::tuple<typename outside<Tensor<D, S>>::type...>;
  };
  template <class D, Spec S, class E, Spec T>
  struct outside<std::pair<Tensor<D, S>, Tensor<E, T>>> : outside<std::tuple<Tensor<D, S>, Tensor<E, T>>> {};

  /// The result of f(part, arguments...) on the whole mesh, or a compile error of this library.
  template <bool Callable, class F, class... Inside>
  struct result {
    using type = typename outside<std::remove_cvref_t<std::invoke_result_t<F&, const Part&, const Inside&...>>>::type;
  };
  template <class F, class... Inside>
  struct result<false, F, Inside...> {
    static constexpr Misfit wrong = misfit<F, Part, Inside...>();
    static_assert(checked<rules::submesh_function, P, static_cast<int>(sizeof...(Inside)), wrong.parameters, wrong.at,
                          wrong.not_const, as_literal(wrong.declared), as_literal(wrong.given)>::ok);
    using type = Tensor<f32, "?">;
  };
  template <class F, class... Inside>
  using result_t = typename result<std::is_invocable_v<F&, const Part&, const Inside&...>, F, Inside...>::type;
  /// The types of the arguments in the function, as a tuple, and the result.
  template <class F, class I, class... Args>
  struct call;
  template <class F, std::size_t... I, class... Args>
  struct call<F, std::index_sequence<I...>, Args...> {
    using arguments = std::tuple<typename inside<static_cast<int>(I) + 1, Args>::type...>;
    using result = result_t<F, typename inside<static_cast<int>(I) + 1, Args>::type...>;
  };
  template <class F, class... Args>
  using call_t = call<std::remove_cvref_t<F>, std::index_sequence_for<Args...>, Args...>;

  template <int I, class D, Spec S>
  static auto enter(SubmeshCall& run, const Tensor<D, S>& x) -> typename inside<I, Tensor<D, S>>::type {
    using There = typename inside<I, Tensor<D, S>>::type;
    const Calling op{"on_submeshes", P, {}};
    return There(run.enter(x.value(), I, parsed<There::spec>, parsed<dual_spec<S, A>()>,
                           parsed<dual_spec<There::spec, axes>()>));
  }
  template <int I, class T>
  static T enter(SubmeshCall& run, const T& x) {
    T there = x;
    const auto change = [&]<class D, Spec S>(const Path&, Tensor<D, S>& leaf) {
      if (UntypedAccess::value(leaf)) leaf = enter<I>(run, leaf);
    };
    if constexpr (is_tree<T>()) visit(change, {}, there);
    return there;
  }
  template <class D, Spec S>
  static auto leave(SubmeshCall& run, const Tensor<D, S>& y) {
    using Out = typename outside<Tensor<D, S>>::type;
    const Calling op{"on_submeshes", P, {}};
    return Out(run.leave(y.value(), parsed<Out::spec>, parsed<dual_spec<S, axes>()>));
  }
  template <class... T>
  static auto leave(SubmeshCall& run, const std::tuple<T...>& y) {
    return std::apply([&](const auto&... each) { return std::tuple{leave(run, each)...}; }, y);
  }
};
/// The result of a call. A struct, because nvcc's front end looks into Submeshes before it has deduced A.
template <OpSpec P, Spec A, class F, class... Args>
struct submeshes_result {
  using type = typename Submeshes<P, A>::template call_t<F, Args...>::result;
};

}  // namespace detail

/// Calls f(part, arguments...) on each device with the submesh of its own index of an axis, `Mesh<"d t">` of a
/// `Mesh<"d e t">`. Submeshes may compute different things: `mesh.axis_index("e")` tells which one it is. Nothing
/// moves. f gets a tensor that is replicated over e as it is. If e is the first axis of a dim, as in `X/e/t`, f gets
/// the elements of its submesh, `X/t`. It gets a tree of tensors if no leaf names e, and copies of other arguments.
/// With `"N/e"` a result becomes a shard of the dim N, which is new and first unless the result has it; with `"+e"` it
/// becomes a summand. f returns a tensor, or several in a pair or tuple, which become a tuple. They must have the same
/// sizes on all submeshes; otherwise the next collective over e throws. Throws if an argument is not on `mesh`, if a
/// result is not on `part`, and for a padded dim that e shards. Backward: the cotangent of a replicated argument is a
/// sum over e; a submesh that does not use an argument adds zeros.
/// `on_submeshes<"N/e">(mesh, [](const Mesh<"d t">& part, const auto& x) { return x * 2.0; }, x)`
template <OpSpec P, Spec A, class F, class... Args>
auto on_submeshes(const Mesh<A>& mesh, F&& f, const Args&... args) ->
    typename detail::submeshes_result<P, A, F, Args...>::type {
  using Types = detail::Submeshes<P, A>;
  detail::SubmeshCall call({"on_submeshes", P, {}}, mesh.device());
  const typename Types::Part part(call.part());  // before arguments come: it makes the axes known that the devices lack
  const auto result = [&]<std::size_t... I>(std::index_sequence<I...>) {
    const typename Types::template call_t<F, Args...>::arguments there{
        Types::template enter<static_cast<int>(I) + 1>(call, args)...};  // in their order
    call.begin();
    return f(part, std::get<I>(there)...);
  }
  (std::index_sequence_for<Args...>{});
  call.end();
  if constexpr (is_tensor<std::remove_cvref_t<decltype(result)>>)
    return Types::leave(call, result);
  else
    return Types::leave(call, std::tuple(result));
}

}  // namespace shardlib
