// A training step under a pipeline schedule: loss and gradients of all microbatches, stage by stage.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/detail/inline.hpp"
#include "shardlib/grad.hpp"
#include "shardlib/ops/collectives.hpp"
#include "shardlib/ops/create.hpp"
#include "shardlib/ops/elementwise.hpp"
#include "shardlib/ops/reductions.hpp"
#include "shardlib/optim.hpp"
#include "shardlib/pipeline/schedule.hpp"
#include "shardlib/pipeline/simulate.hpp"
#include "shardlib/pipeline/staged_mesh.hpp"

namespace shardlib::pipeline {

/// Which part of the model a program is asked for, and for which microbatch.
struct Place {
  int stage = 0, num_stages = 1, microbatch = 0;
  [[nodiscard]] bool is_first() const { return stage == 0; }
  [[nodiscard]] bool is_last() const { return stage + 1 == num_stages; }
};

/// Which layers lie where: every stage has the same number of consecutive ones.
class LayerMap {
 public:
  /// Throws UsageError where the stages do not divide the layers.
  SHARDLIB_INLINE LayerMap(const Schedule& schedule, std::int64_t layers);
  [[nodiscard]] int per_stage() const { return per_stage_; }
  /// The model's numbers of the layers that a rank holds, in the order in which it holds them.
  [[nodiscard]] SHARDLIB_INLINE std::vector<int> of_rank(int rank) const;
  /// Where the stage's first layer stands among those of its rank.
  [[nodiscard]] SHARDLIB_INLINE std::size_t first_of_stage(int stage) const;

 private:
  std::vector<std::vector<int>> stages_;  ///< of each rank
  std::vector<int> owners_;
  int per_stage_ = 1;
};

/// Throws UsageError unless the schedule is for as many ranks as the stage axis has.
SHARDLIB_INLINE void must_fit(const Schedule& schedule, std::string_view axis, int ranks);

/// What the tasks of a step took, as the simulator's costs: the mean of each kind and stage. Transfers take no time.
[[nodiscard]] SHARDLIB_INLINE Costs measured_costs(const std::vector<Interval>& intervals);

/// What a step gives: the loss as a part of the sum over the whole mesh ("+d +p +t", from the last stage), and the
/// gradients of this rank's weights.
template <class Loss, class G>
struct Step {
  Loss loss;
  G gradients;
  std::vector<Interval>
      intervals;              ///< when which rank ran which task, in seconds; of all ranks, where they were asked for
  double peak_in_flight = 0;  ///< the most activations that this rank kept at once, as Simulation counts them
};

namespace detail {

/// A program without types, as one rank runs it.
struct StageProgram {
  std::shared_ptr<Device> device;  ///< of the stage's mesh
  std::string_view axis;
  std::vector<ValuePtr> activations, cotangents;  ///< shapes of what stages hand over
  std::vector<core::Slot> weights;                ///< leaves, where it is differentiated; a rank may have none
  ValuePtr seed;                                  ///< the loss's cotangent
  /// From what the stage before handed over (the first one: nothing) to what this one does; of the last one the loss.
  std::function<std::vector<ValuePtr>(const Place&, const std::vector<ValuePtr>&)> forward;
  bool differentiate = false, measure = false;
};
struct StepValues {
  ValuePtr loss;  ///< null on ranks without the last stage
  std::vector<ValuePtr> gradients;
  std::vector<Interval> intervals;
  double peak_in_flight = 0;
};
/// Runs this rank's tasks, and all sends and receives between them.
[[nodiscard]] SHARDLIB_INLINE StepValues run(const StageProgram& program, const TaskLists& lists);

/// The forward tasks alone.
[[nodiscard]] SHARDLIB_INLINE TaskLists forward_lists(const Schedule& schedule, int microbatches);

/// Trees whose number of tensors is not known from the type.
template <class T>
constexpr bool holds_array() {
  if constexpr (is_tensor<T>) {
    return false;
  } else if constexpr (is_array<T>) {
    return true;
  } else {
    return []<std::size_t... I>(std::index_sequence<I...>) {
      return (holds_array<std::remove_cvref_t<decltype(std::get<I>(core::fields(std::declval<T&>())))>>() || ...);
    }
    (std::make_index_sequence<core::tree_width<T>>{});
  }
}

/// A program's three functions; see value_and_grad.
template <class Program, class W>
concept staged = requires(const Program& program, const W& weights, const Place& at) {
  program.loss(weights, program.stage(weights, program.enter(weights, at), at), at);
};

template <class Program, class W>
using activation_t = std::decay_t<decltype(std::declval<const Program&>().enter(std::declval<const W&>(), Place{}))>;
template <class Program, class W>
using loss_t = std::decay_t<decltype(std::declval<const Program&>().loss(
    std::declval<const W&>(), std::declval<const activation_t<Program, W>&>(), Place{}))>;
template <class Program, class W, Spec P, Spec A>
using step_t =
    Step<Tensor<typename loss_t<Program, W>::value_type, core::dual_spec("", A)>,
         typename core::loss_and_gradient<typename StagedMesh<P, A>::Stage, W, loss_t<Program, W>>::type::second_type>;

template <Spec P, Spec A, class Program, class W>
StageProgram erased(const StagedMesh<P, A>& mesh, const Program& program, const W& weights, const Sizes& sizes) {
  using Activation = activation_t<Program, W>;
  using Loss = loss_t<Program, W>;
  static_assert(core::is_tree<Activation>() && !holds_array<Activation>(),
                "pipeline: a stage hands over a tensor, or a plain struct of tensors; an Array has no fixed length");
  StageProgram stages;
  stages.device = mesh.stage().device();
  stages.axis = P;
  stages.activations = shapes_of<Activation>(mesh.stage(), sizes, false);
  stages.cotangents = shapes_of<Activation>(mesh.stage(), sizes, true);
  stages.seed = full<typename Loss::value_type, "">(mesh.stage(), {}, 1.0).value();
  stages.forward = [&program, &weights](const Place& at, const std::vector<ValuePtr>& received) {
    Activation x = at.is_first() ? program.enter(weights, at) : tree_of<Activation>(received);
    x = program.stage(weights, x, at);
    if (at.is_last()) return std::vector{program.loss(weights, x, at).value()};
    return values_of(x);
  };
  return stages;
}

/// What a device that has nothing to add holds of a scalar sum.
template <class T, Spec A>
T no_part(const Mesh<A>& mesh) {
  return core::typed<T>(zeros<typename T::value_type, "">(mesh, {}).value());
}

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
/// X, a tensor or a struct of tensors, is what stages send each other; `sizes` has the sizes of its names. The tape of
/// a (stage, microbatch) lives from `fwd` to `bwd` or `bwdW`; `bwdA` runs the pulls that X needs, `bwdW` the others.
/// `measure`: note when each task ran. Throws UsageError for a schedule that is not for this mesh or number.
template <Spec P, Spec A, class Program, class W>
requires detail::staged<Program, W>
[[nodiscard]] auto value_and_grad(const StagedMesh<P, A>& mesh, const Schedule& schedule, int microbatches,
                                  const Program& program, const W& weights, const Sizes& sizes, bool measure = false)
    -> detail::step_t<Program, W, P, A> {
  namespace core = shardlib::detail;
  using Result = detail::step_t<Program, W, P, A>;
  must_fit(schedule, P, mesh.ranks());
  const TaskLists lists = schedule.tasks(microbatches);
  std::vector<core::Slot> leaves;
  const W tracked = core::with_leaves(
      weights,
      [&](const core::ValuePtr& value, const core::Path& path) {
        auto leaf = core::as_leaf(*value);
        leaf->label = path.text();
        leaves.push_back(leaf->slot);
        return leaf;
      },
      "pipeline::value_and_grad");
  detail::StageProgram stages = detail::erased(mesh, program, tracked, sizes);
  stages.differentiate = true;
  stages.weights = std::move(leaves);
  stages.measure = measure;
  detail::StepValues values = detail::run(stages, lists);
  using Loss = detail::loss_t<Program, W>;
  Result result{
      detail::part_of_loss<P, A, Loss>(mesh, values.loss), {}, std::move(values.intervals), values.peak_in_flight};
  std::size_t i = 0;
  core::value_and_grad_hook<std::pair<Loss, decltype(result.gradients)>>::template collect<
      typename StagedMesh<P, A>::Stage>(mesh.stage(), weights, result.gradients, values.gradients, i);
  return result;
}

/// The loss alone, without gradients: for validation.
template <Spec P, Spec A, class Program, class W>
requires detail::staged<Program, W>
[[nodiscard]] auto value(const StagedMesh<P, A>& mesh, const Schedule& schedule, int microbatches,
                         const Program& program, const W& weights, const Sizes& sizes) {
  must_fit(schedule, P, mesh.ranks());
  const auto values =
      detail::run(detail::erased(mesh, program, weights, sizes), detail::forward_lists(schedule, microbatches));
  return detail::part_of_loss<P, A, detail::loss_t<Program, W>>(mesh, values.loss);
}

/// The Euclidean norm of all ranks' gradients together, each fully sharded over the mesh of a stage. `counts(leaf
/// name)` is false where another rank counts the leaf: of a weight that several ranks hold, one does.
template <Spec P, Spec A, class Tree, class Counts>
[[nodiscard]] double global_norm(const StagedMesh<P, A>& mesh, const Tree& gradients, const Counts& counts) {
  using Stage = typename StagedMesh<P, A>::Stage;
  static_assert(fully_sharded<Stage, Tree>);
  constexpr Spec part = shardlib::detail::dual_spec("", Stage::axes), everywhere = shardlib::detail::dual_spec("", A);
  auto total = detail::no_part<Tensor<f32, part>>(mesh.stage());
  for_each_leaf(
      [&](std::string_view name, const auto& leaf) {
        if (!counts(name)) return;
        total = total + shardlib::detail::sum_of_squares<Stage::axes>(leaf);
      },
      gradients);
  return std::sqrt(
      static_cast<double>(item(all_reduce<shardlib::detail::make_op(everywhere, "")>(mesh.part_of_sum(total)))));
}

}  // namespace shardlib::pipeline

#ifndef SHARDLIB_COMPILED
#include "shardlib/pipeline/execute_inl.hpp"
#endif
