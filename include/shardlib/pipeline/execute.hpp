// A training step under a pipeline schedule: loss and gradients of all microbatches, stage by stage.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/autodiff/value_and_grad.hpp"
#include "shardlib/compute/collectives.hpp"
#include "shardlib/compute/create.hpp"
#include "shardlib/compute/elementwise.hpp"
#include "shardlib/compute/reductions.hpp"
#include "shardlib/optim/global_norm.hpp"
#include "shardlib/optim/reduce_gradients.hpp"
#include "shardlib/pipeline/program.hpp"
#include "shardlib/pipeline/schedule.hpp"
#include "shardlib/pipeline/simulate.hpp"
#include "shardlib/pipeline/staged_mesh.hpp"
#include "shardlib/runtime/names.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::pipeline {

/// The measured times of a step's tasks as the simulator's costs: the mean of each kind and stage. Transfers take no
/// time.
[[nodiscard]] SHARDLIB_INLINE Costs measured_costs(const std::vector<Interval>& intervals);

/// The result of a step: the loss as a part of the sum over the whole mesh ("+d +p +t", from the last stage), and the
/// gradients of this rank's weights.
template <class Loss, class G>
struct LossAndGradients {
  Loss loss;
  G gradients;
  std::vector<Interval> intervals;  ///< when this rank ran its tasks, in seconds of its own clock; see all_intervals
  double peak_in_flight = 0;        ///< the most activations that this rank kept at once, as Simulation counts them
};
/// The result of a step of a program whose `loss` also returns outputs, Concats or Maxes. Its gradients, intervals and
/// peak_in_flight are those of LossAndGradients.
template <class Loss, class G, class Outputs>
struct GradientsAndOutputs {  // flat, so that a structured binding takes it apart
  Loss loss;
  G gradients;
  std::vector<Interval> intervals;
  double peak_in_flight = 0;
  std::optional<Outputs> outputs;  ///< a tuple of tensors, on the rank of the last stage
};
/// The result of `value` for such a program: the loss and the outputs.
template <class Loss, class Outputs>
struct LossAndOutputs {
  Loss loss;
  std::optional<Outputs> outputs;  ///< a tuple of tensors, on the rank of the last stage
};

namespace detail {

/// An output of the last stage without its type: concatenated, or reduced by `larger`.
struct StageOutput {
  OutputShape shape = {};
  ValuePtr (*larger)(const ValuePtr&, const ValuePtr&) = nullptr;  ///< null: concatenated
};
template <DimName Dim, class T>
StageOutput stage_output(std::type_identity<Concat<Dim, T>> output) {
  return {.shape = output_shape(output)};
}
template <class T>
StageOutput stage_output(std::type_identity<Max<T>>) {
  return {.larger = [](const ValuePtr& a, const ValuePtr& b) { return maximum(T(a), T(b)).value(); }};
}

/// A program without types, as one rank runs it.
struct StageProgram {
  DevicePtr device;  ///< of the stage's mesh
  std::string_view axis;
  std::vector<ValuePtr> activations, cotangents;  ///< shapes of what stages hand over
  std::vector<core::Slot> weights;                ///< leaves, where it is differentiated; a rank may have none
  ValuePtr seed;                                  ///< the loss's cotangent
  std::vector<StageOutput> outputs;               ///< what the last stage returns, behind the loss if there is one
  int microbatches = 1;
  /// Maps the message from the previous stage (nothing for the first one) to the result of this stage; the last stage
  /// returns the loss and the outputs.
  std::function<std::vector<ValuePtr>(const StagePlace&, const std::vector<ValuePtr>&)> forward;
  bool differentiate = false;
};
struct StepValues {
  ValuePtr loss;  ///< null on ranks without the last stage
  std::vector<ValuePtr> gradients, outputs;
  std::vector<Interval> intervals;
  double peak_in_flight = 0;
};
/// Runs this rank's tasks, and all sends and receives between them. Errors name the schedule.
[[nodiscard]] SHARDLIB_INLINE StepValues run(const StageProgram& program, const TaskLists& lists,
                                             const std::string& schedule);

/// The forward tasks alone.
[[nodiscard]] SHARDLIB_INLINE TaskLists forward_lists(const Schedule& schedule, int microbatches);

[[nodiscard]] SHARDLIB_INLINE std::vector<Interval> all_intervals(const DevicePtr& device, std::string_view axis,
                                                                  const TaskLists& lists,
                                                                  const std::vector<Interval>& mine);

/// Functions of the last stage return one thing, or a tuple.
template <class R>
auto as_tuple(R result) {
  if constexpr (requires { std::tuple_size<R>::value; })
    return result;
  else
    return std::tuple<R>(std::move(result));
}
template <class R>
using as_tuple_t = decltype(as_tuple(std::declval<R>()));

/// `last(weights, X, place)` is what the program ends with.
template <class Activation, Spec P, Spec A, class Program, class W, class Last>
StageProgram erased(const StagedMesh<P, A>& mesh, int microbatches, const Program& program, const W& weights,
                    const Sizes& sizes, Last last) {
  StageProgram stages;
  stages.device = mesh.stage().device();
  stages.axis = mesh.present_axis();
  stages.microbatches = microbatches;
  {
    // The results of stages are compared with these shapes, stage by stage.
    const core::WithNames unchecked(core::program_state(stages.device), core::Handle<core::NameSizes>::make());
    stages.activations = shapes_of<Activation>(mesh.stage(), sizes, false);
    stages.cotangents = shapes_of<Activation>(mesh.stage(), sizes, true);
  }
  using End = as_tuple_t<decltype(last(weights, std::declval<const Activation&>(), StagePlace{}))>;
  [&]<class... R>(std::type_identity<std::tuple<R...>>) {
    const auto add = [&]<class O>(std::type_identity<O> output) {
      if constexpr (is_output<O>) stages.outputs.push_back(stage_output(output));
    };
    (add(std::type_identity<R>{}), ...);
  }(std::type_identity<End>{});
  stages.forward = [&program, &weights, last](const StagePlace& at, const std::vector<ValuePtr>& received) {
    Activation x = at.is_first() ? program.enter(weights, at) : tree_of<Activation>(received);
    x = program.stage(weights, x, at);
    if (!at.is_last()) return values_of(x);
    const auto value = []<class R>(const R& result) {
      if constexpr (is_output<R>)
        return result.value.value();
      else
        return result.value();
    };
    return std::apply([&](const auto&... results) { return std::vector{value(results)...}; },
                      as_tuple(last(weights, x, at)));
  };
  return stages;
}
template <class Types, Spec P, Spec A, class Program, class W>
StageProgram with_loss(const StagedMesh<P, A>& mesh, int microbatches, const Program& program, const W& weights,
                       const Sizes& sizes) {
  auto stages = erased<typename Types::activation>(
      mesh, microbatches, program, weights, sizes,
      [&program](const W& w, const auto& x, const StagePlace& at) { return program.loss(w, x, at); });
  stages.seed = shardlib::detail::cotangent_of_loss(mesh.stage().device(), dtype_v<typename Types::loss::value_type>);
  return stages;
}

/// Nothing on ranks without the last stage.
template <class Outputs>
std::optional<Outputs> outputs_of_rank(const std::vector<ValuePtr>& values) {
  if (values.empty()) return {};
  return [&]<std::size_t... I>(std::index_sequence<I...>) {
    return Outputs{std::tuple_element_t<I, Outputs>(values[I])...};
  }
  (std::make_index_sequence<std::tuple_size_v<Outputs>>{});
}

/// The results of value_and_grad and value.
template <Spec P, Spec A, class Program, class W>
struct results {
  using types = program_types<P, A, Program, W>;
  using loss = Tensor<typename types::loss::value_type, core::dual_spec<"", A>()>;
  using outputs = typename types::outputs;
  static constexpr bool has_outputs = std::tuple_size_v<outputs> > 0;
  using step = std::conditional_t<has_outputs, GradientsAndOutputs<loss, typename types::gradients, outputs>,
                                  LossAndGradients<loss, typename types::gradients>>;
  using value = std::conditional_t<has_outputs, LossAndOutputs<loss, outputs>, loss>;
};

/// The value of a scalar sum on a device that contributes nothing.
template <class T, Spec A>
T no_part(const Mesh<A>& mesh) {
  return core::typed<T>(zeros<typename T::value_type, "">(mesh, {}).value());
}

/// The type of gradients without pending sums.
template <class M, class G>
struct reduced : core::reduced_gradient<M, G> {};
template <class M, class N, class W>
struct reduced<M, Gradient<N, W>> {
  using type = W;
};
/// The defaults of `owners` and `counts`.
struct NoOwners {};
struct CountsAll {
  constexpr bool operator()(std::string_view /*leaf*/) const { return true; }
};

template <Spec P, Spec A, class Loss>
auto part_of_loss(const StagedMesh<P, A>& mesh, const ValuePtr& loss) {
  return mesh.part_of_sum(loss ? Loss(loss) : no_part<Loss>(mesh.stage()));
}

}  // namespace detail

/// The loss of `program` and its gradients by `weights`, those of this rank, summed over the microbatches in their
/// order: the same bits under each schedule that gives a rank the same stages. A program has three functions:
///
///   enter(weights, place) -> X        what the first stage begins with: the embedding
///   stage(weights, X, place) -> X     the layers of place.stage, which are among this rank's weights
///   loss(weights, X, place) -> Loss   what the last stage ends with, "+d +t" on the mesh of a stage
///
/// X, a tensor or a struct of tensors, is what stages send each other; `sizes` has the sizes of its names. `loss` may
/// return a tuple of the loss and of outputs, Concats or Maxes: these come as GradientsAndOutputs::outputs. The tape of
/// a (stage, microbatch) lives from `fwd` to `bwd` or `bwdW`; `bwdA` runs the VJPs that X needs, `bwdW` the others.
/// Throws UsageError for a schedule that is not for this mesh or number, and Error if the loss does not depend on a
/// weight of this rank. `auto [loss, gradients, intervals, peak] = value_and_grad(mesh, schedule, 8, program, weights,
/// sizes)`
template <Spec P, Spec A, class Program, class W>
[[nodiscard]] auto value_and_grad(const StagedMesh<P, A>& mesh, const Schedule& schedule, int microbatches,
                                  const Program& program, const W& weights, const Sizes& sizes) ->
    typename detail::results<P, A, Program, W>::step {
  namespace core = shardlib::detail;
  using Types = detail::program_types<P, A, Program, W>;
  using Results = detail::results<P, A, Program, W>;
  must_fit(schedule, P, mesh.ranks());
  const TaskLists lists = schedule.tasks(microbatches);
  core::Differentiation call("pipeline::value_and_grad", mesh.stage().device());
  const W tracked = core::with_leaves(
      weights, [&](const core::ValuePtr& value, const std::string& name) { return call.weight(value, name); },
      "pipeline::value_and_grad");
  detail::StageProgram stages = detail::with_loss<Types>(mesh, microbatches, program, tracked, sizes);
  stages.differentiate = true;
  stages.weights = call.leaves();
  core::OverlapScope overlap(mesh.stage().device());
  detail::StepValues values = detail::run(stages, lists, schedule.name());
  overlap.end_backward();
  call.require_used(values.gradients, "no stage of this rank has a result that depends on ",
                    "use it in a stage, leave it out, or call `stop_gradient` of it there if zeros are meant");
  using Loss = typename Types::loss;
  typename Results::step result{};
  result.loss = detail::part_of_loss<P, A, Loss>(mesh, values.loss);
  result.intervals = std::move(values.intervals);
  result.peak_in_flight = values.peak_in_flight;
  if constexpr (Results::has_outputs)
    result.outputs = detail::outputs_of_rank<typename Results::outputs>(values.outputs);
  result.gradients = core::collect<decltype(result.gradients)>(weights, values.gradients);
  for (const auto& leaf : core::untyped_leaves(result.gradients, false).leaves)
    if (leaf.spec->partial.contains(P))
      *leaf.pointer = detail::relabeled(*leaf.value(), *leaf.spec, mesh.whole().device());
  return result;
}

SHARDLIB_FORM_OF_CALL(value_and_grad, "value_and_grad(mesh, schedule, microbatches, program, weights, sizes)")

/// The loss without gradients, for validation; and the outputs if `loss` returns them. `value(mesh, schedule, 8,
/// program, weights, sizes)`
template <Spec P, Spec A, class Program, class W>
[[nodiscard]] auto value(const StagedMesh<P, A>& mesh, const Schedule& schedule, int microbatches,
                         const Program& program, const W& weights, const Sizes& sizes) ->
    typename detail::results<P, A, Program, W>::value {
  using Types = detail::program_types<P, A, Program, W>;
  using Results = detail::results<P, A, Program, W>;
  must_fit(schedule, P, mesh.ranks());
  const auto values = detail::run(detail::with_loss<Types>(mesh, microbatches, program, weights, sizes),
                                  detail::forward_lists(schedule, microbatches), schedule.name());
  auto loss = detail::part_of_loss<P, A, typename Types::loss>(mesh, values.loss);
  if constexpr (Results::has_outputs)
    return {std::move(loss), detail::outputs_of_rank<typename Results::outputs>(values.outputs)};
  else
    return loss;
}

/// The outputs of the last stage for all microbatches, without a loss, for inference. In place of `loss` the program
/// has `outputs(weights, X, place)`, which returns a Concat, a Max or a tuple of them. A tuple of tensors on the rank
/// of the last stage, nothing elsewhere. `outputs(mesh, schedule, 8, program, weights, sizes)`
template <Spec P, Spec A, class Program, class W>
[[nodiscard]] auto outputs(const StagedMesh<P, A>& mesh, const Schedule& schedule, int microbatches,
                           const Program& program, const W& weights, const Sizes& sizes)
    -> std::optional<typename detail::output_program<P, Program, W>::outputs> {
  using Types = detail::output_program<P, Program, W>;
  must_fit(schedule, P, mesh.ranks());
  const auto values = detail::run(
      detail::erased<typename Types::activation>(
          mesh, microbatches, program, weights, sizes,
          [&program](const W& w, const auto& x, const StagePlace& at) { return program.outputs(w, x, at); }),
      detail::forward_lists(schedule, microbatches), schedule.name());
  return detail::outputs_of_rank<typename Types::outputs>(values.outputs);
}

/// The intervals of all ranks, given those of this rank's last step and the schedule's lists: for pictures and
/// `measured_costs`. All devices call it together. Times are of one clock; those of several machines are set by a
/// barrier. A dry run has none. `all_intervals(mesh, schedule.tasks(8), step.intervals)`
template <Spec P, Spec A>
[[nodiscard]] std::vector<Interval> all_intervals(const StagedMesh<P, A>& mesh, const TaskLists& lists,
                                                  const std::vector<Interval>& mine) {
  return detail::all_intervals(mesh.whole().device(), P, lists, mine);
}

/// Takes the pending sums of gradients, as shardlib::reduce_gradients, those over the stage axis too: a leaf outside of
/// the Arrays over it (`Array<"layers/p", Layer>`) is one weight on all ranks that hold it, which are owners(leaf
/// name), in ascending order. These get the same bits. Without such leaves, leave `owners` out. All ranks call it, once
/// per step. Throws if a rank that holds a leaf is not among its owners; an owner that holds none makes the others
/// wait. `reduce_gradients(mesh, std::move(step.gradients), [&](std::string_view) { return ranks_of(schedule, {0});
/// })`
template <Spec P, Spec A, class G, class Owners = detail::NoOwners>
[[nodiscard]] auto reduce_gradients(const StagedMesh<P, A>& mesh, G gradients, const Owners& owners = {}) ->
    typename detail::reduced<Mesh<A>, G>::type {
  namespace core = shardlib::detail;
  static_assert(std::is_same_v<Owners, detail::NoOwners> ||
                    std::is_invocable_r_v<std::vector<int>, const Owners&, std::string_view>,
                "reduce_gradients: owners(leaf name) returns a std::vector<int>, the ranks that hold the weight");
  auto sums = same_structure<typename detail::reduced<Mesh<A>, G>::type>(gradients);
  const auto reduce = [&]<dtype D, Spec S>(const core::Path& path, auto& sum, Tensor<D, S>& gradient) {
    if constexpr (!core::parsed<S>.partial.contains(P)) {
      core::reduce_into(sum, gradient);
    } else if constexpr (!std::is_same_v<Owners, detail::NoOwners>) {
      Tensor<D, detail::with_partial<std::remove_cvref_t<decltype(sum)>::spec, P>> of_rank;
      core::reduce_into(of_rank, gradient);
      const std::string name = path.text();
      sum = detail::sum_over(mesh, owners(name), of_rank, "reduce_gradients: the weight `" + name + "`");
    } else {
      static_assert(core::checked<rules::one_owner, core::Literal{std::string_view(P)}, dtype_v<D>, S>::ok);
    }
  };
  core::visit(reduce, {}, sums, gradients);
  return sums;
}

/// The square of global_norm as a scalar of the whole mesh, which the host does not wait for.
/// `squared_global_norm(mesh, gradients, [](std::string_view) { return true; })`
template <Spec P, Spec A, class Tree, class Counts = detail::CountsAll>
[[nodiscard]] Tensor<f32, ""> squared_global_norm(const StagedMesh<P, A>& mesh, const Tree& gradients,
                                                  const Counts& counts = {}) {
  namespace core = shardlib::detail;
  constexpr bool is_shared = std::is_same_v<Counts, detail::CountsAll> && detail::has_shared<P, Tree>();
  static_assert(core::checked<rules::counted_leaf, core::Literal{std::string_view(P)}, is_shared>::ok);
  constexpr Spec part = core::dual_spec<"", StagedMesh<P, A>::stage_axes>();
  auto total = detail::no_part<Tensor<f32, part>>(mesh.stage());
  core::add_squares(mesh.stage(), total, gradients, counts);
  return core::over_devices(mesh.whole(), mesh.part_of_sum(total));
}
/// The Euclidean norm of all ranks' gradients together, of reduced ones. Each element counts once, as in
/// shardlib::global_norm; `counts(leaf name)` is false where another rank counts the leaf: of a weight that several
/// ranks hold, one does. Without leaves outside of the Arrays over the stage axis, leave it out.
/// `global_norm(mesh, gradients, [](std::string_view) { return true; })`
template <Spec P, Spec A, class Tree, class Counts = detail::CountsAll>
[[nodiscard]] double global_norm(const StagedMesh<P, A>& mesh, const Tree& gradients, const Counts& counts = {}) {
  return shardlib::detail::root_of(pipeline::squared_global_norm(mesh, gradients, counts));
}

}  // namespace shardlib::pipeline

#ifndef SHARDLIB_COMPILED
#include "shardlib/pipeline/impl/execute.hpp"
#endif
