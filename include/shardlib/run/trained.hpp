// The state that a trainer trains: weights, the moments of the optimizer that --optimizer names, the average of --ema,
// and copies of the weights in the dtype of computation. Before them, the factors that an optimizer uses for some
// leaves, by patterns of their names.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/io/checkpoint/checkpoint.hpp"
#include "shardlib/io/formats/safetensors_tree.hpp"
#include "shardlib/optim/adafactor.hpp"
#include "shardlib/optim/global_norm.hpp"
#include "shardlib/optim/leaf_rules.hpp"
#include "shardlib/optim/muon.hpp"
#include "shardlib/optim/optimizers.hpp"
#include "shardlib/run/checkpoints.hpp"
#include "shardlib/run/options.hpp"
#include "shardlib/run/plan.hpp"
#include "shardlib/run/training.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/leaves.hpp"
#include "shardlib/types/tensor.hpp"
#include "shardlib/types/tree.hpp"

namespace shardlib::run {

/// Factors of the learning rate and of the weight decay of leaves, and the leaves that are frozen. Patterns are those
/// of `leaf_matches`. If several patterns of an option match a leaf, the last one counts.
struct ParameterGroups {
  std::vector<std::string> lr_mult, decay_mult;  ///< "layers/0/*=0.1"
  std::vector<std::string> freeze;               ///< "layers/0/*"

  /// The factors that an optimizer and `global_norm` use for a leaf. `decays` says whether a leaf decays that no
  /// pattern of `decay_mult` matches.
  [[nodiscard]] SHARDLIB_INLINE LeafFactors operator()(std::string_view leaf, bool decays = true) const;
};

/// Declares the options --lr-mult, --decay-mult and --freeze. `declare(options, groups)`
SHARDLIB_INLINE void declare(Options& options, ParameterGroups& groups);

/// Throws UsageError for a text without a factor, a pattern that none of the leaves has, and if no leaf is left to
/// train. `check_groups(groups, leaf_names(weights))`
SHARDLIB_INLINE void check_groups(const ParameterGroups& groups, const std::vector<std::string>& leaves);

/// The options --optimizer, which is `name`, and --ema, and those of parameter groups.
struct OptimizerOptions {
  std::string name = "adamw";
  double ema = 0;          ///< what the average keeps of itself in a step; 0: no average
  ParameterGroups groups;  ///< --lr-mult, --decay-mult and --freeze
};

/// Declares these options in the group "optimizer", and says which others have no effect with an optimizer.
/// `declare(options, optimizer)`
SHARDLIB_INLINE void declare(Options& options, OptimizerOptions& o);

/// Whether Muon orthogonalizes the leaf, if it is a matrix or a stack of them: the weights of feed-forward layers.
/// `is_muon_matrix("layers/0/w_up")`
[[nodiscard]] SHARDLIB_INLINE bool is_muon_matrix(std::string_view leaf);

/// The content of a trainer's checkpoints. AdamW and Muon have `mu` and `nu`, Lion and SGD `mu`. Adafactor has `rows`
/// and `cols` of each leaf in their place. With --ema there is one average of the weights.
template <class W>
struct TrainState {
  W weights;
  Array<"mu", W> mu;
  Array<"nu", W> nu;
  Array<"rows", Factors<true, W>> rows;
  Array<"cols", Factors<false, W>> cols;
  Array<"ema", W> ema;
};

/// Names in checkpoints: the one tree of each moment without its number, "mu.embed" in place of "mu.0.embed".
/// `stored_names()`
[[nodiscard]] SHARDLIB_INLINE io::Rename stored_names();

/// A table of weights as one of a checkpoint of a TrainState: it has the average if there is one, else the weights.
/// `table_of_state(o.optimizer, table)`
[[nodiscard]] SHARDLIB_INLINE io::StoredTable table_of_state(const OptimizerOptions& o, const io::StoredTable& weights);

/// The training state, and copies of its weights in the dtype of computation, which a step reads: in f32 the same
/// tensors. `Trained<Model<f32>, Model<bf16>> trained; trained.state.weights = initial_weights(mesh);`
template <class W, class C>
struct Trained {
  TrainState<W> state;
  C copies;

  /// The model for validation and samples: the average if there is one, else `copies`. A copy of the average is kept
  /// until `free_average`.
  [[nodiscard]] const C& model() {
    if (state.ema.empty()) return copies;
    if (average_.empty()) average_.push_back(cast_tree<C>(state.ema[0]));
    return average_[0];
  }
  /// Frees what `model` keeps, as the program of `program_of` does before each step.
  void free_average() { average_.clear(); }

 private:
  std::vector<C> average_;
};

/// Makes what the weights need for training: moments, the average, copies. Weights that are to stay need no moments:
/// `trained.copies = cast_tree<Model<bf16>>(trained.state.weights)` is enough. `begin(trained, o.optimizer)`
template <class W, class C>
void begin(Trained<W, C>& trained, const OptimizerOptions& o) {
  TrainState<W>& state = trained.state;
  if (o.name == "adafactor") {
    auto [rows, cols] = Adafactor::init(state.weights);
    state.rows = {std::move(rows)};
    state.cols = {std::move(cols)};
  } else {
    state.mu = {zeros_like(state.weights)};
  }
  if (o.name == "adamw" || o.name == "muon") state.nu = {zeros_like(state.weights)};
  if (o.ema > 0) {  // memory of its own, which the plan of the first step must count
    state.ema = {zeros_like(state.weights)};
    accumulate(state.ema[0], state.weights);
  }
  trained.copies = cast_tree<C>(state.weights);
}

namespace detail {
/// The values of the leaves, in their order.
template <class Tree>
std::vector<shardlib::detail::ValuePtr> leaf_values(const Tree& tree) {
  std::vector<shardlib::detail::ValuePtr> values;
  for (const auto& leaf : shardlib::detail::untyped_leaves(tree).leaves) values.push_back(leaf.value());
  return values;
}
}  // namespace detail

/// Scalars, each the same number on every device.
using Scalars = std::vector<Tensor<f32, "">>;

/// The result of a step: the sum of `losses`, the norm of the gradients, and numbers of the program's own, each the
/// mean of its scalars. The host reads all of them at once, so the host of a GPU waits for a step once, here.
/// `run::step_result({loss}, squared_global_norm(mesh, grads))`
[[nodiscard]] SHARDLIB_INLINE StepResult step_result(const Scalars& losses, const Tensor<f32, "">& squared_norm,
                                                     const std::vector<std::pair<std::string, Scalars>>& numbers = {});

/// Makes the update if the step accepts the result, which is returned: the gradients are clipped by its norm, the
/// optimizer makes a step, and the average follows. `factors(leaf name)` are a leaf's LeafFactors. Without them they
/// are those of the options. `return update(trained, o.optimizer, o.training, step, grads, result);`
template <class W, class C, class Grads, class F>
StepResult update(Trained<W, C>& trained, const OptimizerOptions& o, const Training& t, const Step& step,
                  const Grads& grads, StepResult result, const F& factors) {
  if (!step.accepts(result)) return result;
  TrainState<W>& state = trained.state;
  const double scale = clip_factor(result.grad_norm, t.clip);
  if (step.show_gradients) step.show_gradients(detail::leaf_values(grads), scale);
  // The moments are moved, not copied, so that they are written in place.
  const auto by = [&]<class O>(const O& optimizer, auto&... moments) {
    typename O::template Moments<W> all{std::exchange(moments, {})...};
    optimizer.update(state.weights, all, grads, step.learning_rate, scale, step.number, factors, trained.copies);
    return all;
  };
  const AdamW adamw{.beta1 = t.beta1, .beta2 = t.beta2, .epsilon = t.adam_epsilon, .weight_decay = t.weight_decay};
  if (o.name == "adafactor") {
    auto [rows, cols] = by(Adafactor{.weight_decay = t.weight_decay}, state.rows[0], state.cols[0]);
    state.rows[0] = std::move(rows);
    state.cols[0] = std::move(cols);
  } else if (o.name == "sgd") {
    state.mu[0] = by(SGD{.momentum = t.beta1, .weight_decay = t.weight_decay}, state.mu[0]).mu;
  } else if (o.name == "lion") {
    state.mu[0] = by(Lion{.beta1 = t.beta1, .beta2 = t.beta2, .weight_decay = t.weight_decay}, state.mu[0]).mu;
  } else {
    const Muon muon{.momentum = t.beta1, .adamw = adamw, .matrix = is_muon_matrix, .stack = is_muon_matrix};
    auto [mu, nu] = o.name == "muon" ? by(muon, state.mu[0], state.nu[0]) : by(adamw, state.mu[0], state.nu[0]);
    state.mu[0] = std::move(mu);
    state.nu[0] = std::move(nu);
  }
  for (W& average : state.ema) update_average(average, state.weights, o.ema, factors);
  return result;
}
template <class W, class C, class Grads>
StepResult update(Trained<W, C>& trained, const OptimizerOptions& o, const Training& t, const Step& step,
                  const Grads& grads, const StepResult& result) {
  return update(trained, o, t, step, grads, result, o.groups);
}

/// A program that trains `trained`, which must outlive it. It has the numbers of parameters and bytes, a context of
/// --seq tokens, and the checkpoints; to load one renews the copies. The caller sets `step`, `validate` and the other
/// functions. Call it after `begin`. `run::Program program = run::program_of(mesh, trained, o.training);`
template <Spec A, class W, class C>
[[nodiscard]] Program program_of(const Mesh<A>& mesh, Trained<W, C>& trained, const Training& training,
                                 const io::Rename& rename = stored_names()) {
  const auto renew = [&trained] {
    trained.free_average();
    return cast_tree<C>(trained.state.weights);
  };
  Program program;
  program.begin_step = [&trained] { trained.free_average(); };
  program.checkpoints = renewing(checkpoints_of(mesh, trained.state, training, rename), trained.copies, renew);
  const std::int64_t in_c = shard_bytes(trained.copies);
  program.parameters = parameter_count(trained.state.weights);
  program.weight_bytes = shard_bytes(trained.state.weights);
  program.copy_bytes = std::is_same_v<W, C> ? 0 : in_c;
  // Those of one microbatch have the copies' dtype, and sums of several are in f32.
  program.gradient_bytes = training.microbatches == 1 ? in_c : program.weight_bytes;
  program.optimizer_bytes = shard_bytes(trained.state) - program.weight_bytes;
  program.context = training.seq;
  return program;
}

/// Notes that a step gathers the weights once, each over `devices` devices, and sums the gradients by them in f32.
/// `note_gathered(program, trained, mesh.size("d"))`
template <class W, class C>
void note_gathered(Program& program, const Trained<W, C>& trained, std::int64_t devices) {
  program.copy_bytes += devices * shard_bytes(trained.copies);
  program.gradient_bytes = devices * shard_bytes(trained.state.weights);
}

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/trained.hpp"
#endif
