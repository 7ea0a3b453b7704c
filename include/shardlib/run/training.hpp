// A training run: its settings, and the loop around a model's step. Data, checkpoints, metrics, progress, validation
// and samples are here; what a step computes is the program's.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/device/launch.hpp"
#include "shardlib/io/data/loader.hpp"
#include "shardlib/io/tokenizer/tokenizer.hpp"
#include "shardlib/optim/lr_schedule.hpp"
#include "shardlib/run/evaluate.hpp"
#include "shardlib/run/options.hpp"
#include "shardlib/run/sampling.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib::run {

/// The settings of a run that do not depend on the model. Members hold the defaults until `declare` and parse.
struct Training {
  /// --data, --validation-data, --stream, --tokenizer, --rows.
  std::string data, validation_data, text_stream, tokenizer = "bytes", rows = "packed";
  std::string mesh;              ///< --mesh, "d=4,t=2"; empty: all ranks on the first of batch_axes
  std::string batch_axes = "d";  ///< of the program's mesh, those that shard the batch: "d" of "B/d", "x y" of "B/x/y"
  /// --row-begin: the input before the first token of a document, and of a row. --sample-begin: what stands before a
  /// prompt; -1: nothing. A loaded model has its own.
  std::int64_t row_begin = 0, sample_begin = 0;
  /// The steps of training, the rows of the global batch, the tokens of a row, and the parts of a batch.
  std::int64_t steps = 300, batch = 16, seq = 128, microbatches = 1;
  std::uint64_t seed = 0;  ///< of the weights, of the order of the data and of samples
  /// Of AdamW; `clip` is the largest gradient norm, 0 for none.
  double learning_rate = 3e-3, weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, adam_epsilon = 1e-8, clip = 1.0;
  /// Of the learning rate, as LrSchedule has them; its peak is learning_rate.
  std::string lr_schedule = "cosine", warmup_from = "peak/warmup";
  std::int64_t warmup = 20, decay_steps = 0;               ///< decay_steps 0: `steps`
  double final_learning_rate = 0.1, decay_fraction = 0.1;  ///< the first as a fraction of the peak
  /// --run, --metrics, --graph: where the run's folder, its records and its graph go.
  std::string directory, metrics, graph;
  double plan_flops = 0, plan_efficiency = 1, plan_memory = 0;  ///< of a device; 0: not given
  std::string plan_bandwidth, plan_latency;  ///< of links, for each axis of the mesh; empty: not given
  /// save_every, validate_every and sample_every count steps, validation_batches batches.
  std::int64_t save_every = 1000, validate_every = 0, validation_batches = 8, sample_every = 0;
  /// Checkpoints to keep: the newest, those of steps that keep_every divides, and the best.
  std::int64_t keep = 2, keep_every = 0, keep_best = 1;
  /// --on-spike: what to do about a step that SpikeWindow(spike_window, spike_deviations) finds: none, stop, skip or
  /// rewind.
  std::string on_spike = "none";
  std::int64_t spike_window = 100;
  double spike_deviations = 6;
  std::int64_t check_replicas = 0;  ///< steps between comparisons of what is replicated; 0: none
  std::string device = "cpu";       ///< --device: what runs the kernels
  double collective_timeout = 600;  ///< seconds that a device waits for others; 0: for ever
  /// Set by the options --resume, --trace, --plan, --tensorboard, --find-nan and --sample-only.
  bool resume = true, trace = false, plan = false, tensorboard = false, find_nan = false, sample_only = false;
  std::string allow_change;  ///< --allow-change: what may differ from the checkpoint that a run goes on from
  /// What the program has loaded before the run, as a text that the ranks compare: a file's name and checksum.
  std::string initial_weights;
  /// Weights that the run reads and neither trains nor saves, in the same form: a run goes on only with the same ones.
  std::string frozen_weights;
  /// The program's own settings that a run may change when it goes on, as the steps compute the same: "schedule".
  std::vector<std::string> may_change;
  std::string evaluate;                 ///< --evaluate: a file of multiple-choice questions, asked at the end
  std::string prompt = "And God said";  ///< what samples begin with
  std::int64_t samples = 1;             ///< texts at a time, each of its own seed
  SampleOptions sample{.max_tokens = 200, .top_k = 0, .temperature = 0.7};  ///< how tokens of samples are drawn
};

/// Declares the options of a run: --data, --steps, --mesh, --run and the others. `declare(options, training)`
SHARDLIB_INLINE void declare(Options& options, Training& training);

/// How `launch` starts the run: on its --device, with its --collective-timeout, and recordings of a wait that lasts
/// longer in its folder. `launch(mesh, body, launch_options(training))`
[[nodiscard]] SHARDLIB_INLINE LaunchOptions launch_options(const Training& training);

/// The mesh that was asked for, and without --mesh all ranks on the first of training.batch_axes; axes that are left
/// out have size 1. It becomes training.mesh, so that the stored configuration names it. Throws UsageError for axes
/// that are not among `axes` ("d t"), or in another order. `chosen_mesh(training, "d t")`
[[nodiscard]] SHARDLIB_INLINE std::vector<AxisSize> chosen_mesh(Training& training, std::string_view axes);

namespace detail {
/// training.batch_axes as names. Throws UsageError for a name that the mesh has not.
[[nodiscard]] SHARDLIB_INLINE std::vector<std::string> batch_axes(const std::vector<AxisSize>& mesh,
                                                                  const Training& training);
}  // namespace detail

/// Prints the non-default settings (Options::describe) where a run with a folder begins: by the first rank.
/// `announce(options, training)`
SHARDLIB_INLINE void announce(const Options& options, const Training& training);

/// The learning rates of the run's steps. Throws UsageError where --decay-steps ends the decay within the warmup.
/// `lr_schedule(training)(step)`
[[nodiscard]] SHARDLIB_INLINE LrSchedule lr_schedule(const Training& training);

/// How to sample: --seed, and no token before the first where rows are stories.
[[nodiscard]] SHARDLIB_INLINE SampleOptions sample_options(const Training& training);

/// Prints, on the first rank, which of the model's dims the mesh makes more than a twentieth larger by padding.
/// `note_padding(mesh, sizes)`
SHARDLIB_INLINE void note_padding(const std::vector<AxisSize>& mesh, const Sizes& sizes);

/// Throws UsageError unless the batch divides into microbatches, each of them over training.batch_axes, and the host
/// has memory for a step's rows. `batch_must_divide(mesh, training)`
SHARDLIB_INLINE void batch_must_divide(const std::vector<AxisSize>& mesh, const Training& training);

/// What a run reads: made once in each process, and shared by its devices. With all empty, a program's steps get rows
/// of weight 0, and make up inputs of their own.
struct Data {
  std::shared_ptr<const io::Tokenizer> tokenizer;  ///< of prompts and samples
  std::shared_ptr<const io::Loader> train;         ///< null with --stream, and with --steps 0 without data
  std::shared_ptr<const io::Loader> validation;    ///< null without validation
  std::int64_t vocabulary = 0;                     ///< ids are below it
  std::vector<Question> questions = {};            ///< of --evaluate
};
/// Opens the tokenizer and the data of a run; `vocabulary` 0 stands for the tokenizer's. Throws UsageError for what
/// cannot be read or does not fit together: data that another tokenizer made and a prompt that the model cannot take,
/// too. With --plan or --graph it reads the tokenizer alone; --steps 0 needs no data. `open_data(training, 50257)`
[[nodiscard]] SHARDLIB_INLINE Data open_data(const Training& training, std::int64_t vocabulary);

/// The loss of a step, and the norm of its gradients, grad_norm. `numbers`: more of the step for its record, by names
/// that a program chooses, the same on all devices: {{"expert_load", 1.3}}.
struct StepResult {
  double loss = 0, grad_norm = 0;
  std::vector<std::pair<std::string, double>> numbers = {};
};

/// One training step, as the loop asks a program for it.
struct Step {
  std::int64_t number = 0;   ///< from 0
  double learning_rate = 0;  ///< of the optimizer
  /// This device's rows of each microbatch. Their weights, of all microbatches on all devices, add up to 1, so that the
  /// loss is the weighted sum of the tokens' losses.
  const std::vector<io::TokenBatch>& microbatches;
  /// Whether to make the update. Ask it once, with the loss and the norm of the gradients, before the state changes;
  /// if it is false, leave the state as it is. Throws Error if one of the two is not finite or is a spike, unless the
  /// run has something else to do then (--on-spike). `if (!step.accepts(result)) return result;`
  std::function<bool(const StepResult&)> accepts;
};

/// The factor that brings a gradient norm down to `clip` (0: no clipping). `clip_factor(norm, 1.0)`
[[nodiscard]] inline double clip_factor(double norm, double clip) {
  return clip > 0 && norm > clip ? clip / norm : 1.0;
}

/// FLOPs of forward and backward for a token: 6 for each parameter that multiplies, and attention's two products, not
/// halved for causality (Chowdhery et al. 2022, appendix B). `width` is heads * head width.
/// `training_flops_per_token(124'000'000, 12, 768, 1024)`
[[nodiscard]] inline double training_flops_per_token(std::int64_t parameters, std::int64_t layers, std::int64_t width,
                                                     std::int64_t length) {
  return 6.0 * static_cast<double>(parameters) +
         12.0 * static_cast<double>(layers) * static_cast<double>(width) * static_cast<double>(length);
}

/// What decides the curve of a run besides its program and its state, as its checkpoints hold it: `data` is
/// Loader::identity, `settings` are texts by names that begin with "setting.", and others for messages.
struct RunIdentity {
  std::string data;
  std::map<std::string, std::string> settings;
};

/// Numbers of a program that are the same on all devices, by names for messages: {{"step", 7}}.
using ReplicatedNumbers = std::vector<std::pair<std::string, std::uint64_t>>;

/// The state to and from the run's folder; see run/checkpoints.hpp. All empty: the run keeps nothing.
struct Checkpoints {
  /// What a checkpoint holds besides the program's state.
  struct Saved {
    std::int64_t step = 0;  ///< the next to do
    RunIdentity identity;   ///< of the run that has saved it
    /// How many batches of the data the run has passed over: step s trains on batch s + skipped_batches.
    std::int64_t skipped_batches = 0;
    std::optional<double> validation_loss = {};  ///< the last one since the checkpoint before
  };
  /// Takes a snapshot, which a thread writes during training.
  std::function<void(const Saved&)> save;
  /// The newest whole one of a step below `before`, or nothing.
  std::function<std::optional<Saved>(std::int64_t before)> load;
  /// The checkpoint of a step is of a run that has diverged: renames it, so that no run goes on from it.
  std::function<void(std::int64_t step)> set_aside;
  std::function<bool()> poll;   ///< once a step; whether a checkpoint has become complete
  std::function<bool()> flush;  ///< waits for what is being written; whether a checkpoint has become complete
  /// run::check_replicas of the state, with these numbers; there also where the run keeps nothing.
  std::function<void(const std::string& when, const ReplicatedNumbers& numbers)> check_replicas;
};

/// What the loop asks of a program, on each device. Functions are called by all devices alike.
struct Program {
  std::function<StepResult(const Step& step)> step;  ///< computes a step, and updates the state if it is accepted
  /// The mean loss of a batch; these are this device's rows, with weights that add up to 1 over all devices.
  std::function<double(const io::TokenBatch& rows)> validate;
  /// Behind the last step, also of a run that a signal has stopped, on all devices; may be empty.
  std::function<void()> finish;
  Decode decode;            ///< for sampling
  Checkpoints checkpoints;  ///< how the state is saved and loaded

  std::int64_t parameters = 0;  ///< of the whole model
  double flops_per_token = 0;   ///< of forward and backward without recomputation, for the utilisation
  std::int64_t context = 0;     ///< most tokens of a text that the model can take
  /// On this device (shard_bytes), for --plan. Copies are the weights in the dtype of computation, where that is
  /// another.
  std::int64_t weight_bytes = 0, copy_bytes = 0, optimizer_bytes = 0;
  std::optional<std::int64_t> gradient_bytes;  ///< none: the weights', whose types are dual
};

/// Runs training.steps steps, from the newest checkpoint where there is one. `configuration` (Options::to_toml) is
/// stored with the run. On the device of a dry run (run::plan) one step is counted instead. `train(device, training,
/// data, options.to_toml(), program)`
SHARDLIB_INLINE void train(const std::shared_ptr<Device>& device, const Training& training, const Data& data,
                           const std::string& configuration, const Program& program);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/training.hpp"
#include "shardlib/run/impl/training_loop.hpp"
#endif
