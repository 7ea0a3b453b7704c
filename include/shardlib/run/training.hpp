// A training run: its settings, and the loop around a model's step. The library supplies data, checkpoints, metrics,
// progress, validation and samples; the program computes the step.
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
#include "shardlib/device/mesh_axes.hpp"
#include "shardlib/io/checkpoint/writer.hpp"
#include "shardlib/io/data/loader.hpp"
#include "shardlib/io/tokenizer/tokenizer.hpp"
#include "shardlib/optim/lr_schedule.hpp"
#include "shardlib/run/evaluate.hpp"
#include "shardlib/run/options.hpp"
#include "shardlib/run/sampling.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib::run {

/// The settings of a run that do not depend on the model, in the order of --help. Members hold the defaults until
/// `declare` and parse. A member has the option of its name, as save_every has --save-every, unless it names another.
struct Training {
  // ---- data ----
  std::string data, validation_data;             ///< paths of tokens; empty: none, or the validation split of `data`
  std::string text_stream;                       ///< --stream: a folder of texts, in place of `data`
  std::string tokenizer = "bytes";               ///< a name or path for io::load_tokenizer
  std::string rows = "packed", shuffle = "yes";  ///< an io::Rows; whether their order is random, yes or no
  std::int64_t row_begin = 0;  ///< the input before a document's or row's first token; a loaded model has its own
  std::int64_t batch = 16, seq = 128;  ///< the rows of the global batch, and the tokens of a row

  // ---- training ----
  std::string mesh;                         ///< "d=4,t=2"; empty: all ranks on one of batch_axes
  std::int64_t steps = 300;                 ///< the number of training steps
  std::int64_t epochs = 0;                  ///< passes over the data that `steps` becomes; 0: `steps` as given
  std::int64_t microbatches = 1;            ///< the parts of a batch
  std::uint64_t seed = 0;                   ///< seed of weights, data order, dropout and samples
  double learning_rate = 3e-3;              ///< the peak of the learning rate, as in LrSchedule
  std::string lr_schedule = "cosine";       ///< LrSchedule::kind
  std::int64_t warmup = 20;                 ///< steps of LrSchedule
  std::string warmup_from = "peak/warmup";  ///< LrSchedule::warmup_from
  std::int64_t decay_steps = 0;             ///< steps of LrSchedule; 0 stands for `steps`
  double decay_fraction = 0.1, final_learning_rate = 0.1;                     ///< fractions of LrSchedule
  double weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, adam_epsilon = 1e-8;  ///< settings of AdamW
  double clip = 1.0;                                                          ///< the largest gradient norm; 0: any

  // ---- run ----
  std::string directory;           ///< --run: the path of the run's folder; empty: none
  bool resume = true;              ///< resume from the newest checkpoint
  std::string allow_change;        ///< settings that may differ from those of the checkpoint from which a run resumes
  std::int64_t save_every = 1000;  ///< steps between checkpoints; 0: one at the end alone
  std::int64_t keep = 2, keep_every = 0, keep_best = 1;  ///< the checkpoints that stay, as in io::Retention
  std::int64_t validate_every = 0;                       ///< steps between validations; 0 for none
  std::int64_t validation_batches = 8;                   ///< the most batches of a validation
  std::string metrics;                                   ///< the path of further records
  /// The reaction to a spike, which is a step above the mean of the last spike_window steps by more than
  /// spike_deviations standard deviations: none, stop, skip or rewind.
  std::string on_spike = "none";
  std::int64_t spike_window = 100;
  double spike_deviations = 6;
  std::int64_t check_replicas = 0;               ///< steps between comparisons of replicated values; 0 for none
  double collective_timeout = 600;               ///< seconds that a device waits for others; 0: forever
  std::string device = "cpu";                    ///< what runs the kernels
  std::string sums = "tree";                     ///< who adds up the sums of GPUs, `tree` or `nccl`
  bool find_nan = false;                         ///< end the run at the first op whose result has a NaN
  bool trace = false;                            ///< write trace.json into the run's folder
  std::int64_t trace_steps = 5, trace_from = 1;  ///< the number of its steps, and of steps of this start before them
  bool plan = false;                             ///< print a plan of the step, and do not train
  std::string plan_device = "none";              ///< one of `accelerators`, or none
  /// Figures of a device; 0 if not given. plan_memory is B/s, plan_capacity bytes. plan_flops is also a GPU's peak, for
  /// MFU.
  double plan_flops = 0, plan_efficiency = 1, plan_memory = 0, plan_capacity = 0;
  std::string plan_bandwidth, plan_latency;  ///< figures of links, for each axis of the mesh; empty if not given
  std::string graph;                 ///< the path of a picture of one layer, which is drawn in place of training
  bool draw_step = false;            ///< --step-graph: draw the step into the run's folder
  bool tensorboard = false;          ///< write TensorBoard events into the run's folder
  std::int64_t histogram_every = 0;  ///< with `tensorboard`: steps between histograms; 0 for none

  // ---- sampling ----
  std::int64_t sample_every = 0;                ///< in steps; 0: samples at the end alone
  bool sample_only = false;                     ///< samples of the newest checkpoint, and no training
  bool chat = false;                            ///< with `sample_only`: a conversation in place of samples
  std::string turns = "User: {}\\nAssistant:";  ///< how `turn_template` writes a turn of it
  std::string prompt = "And God said";          ///< what samples begin with
  std::int64_t sample_begin = -2;  ///< the token before a prompt; -1: none, -2: row_begin. A loaded model has its own
  std::int64_t samples = 1;        ///< number of texts, each with its own seed
  /// The options of samples: --max-tokens, --top-k, --top-p, --stop and --temperature.
  SampleOptions sample{.max_tokens = 200, .top_k = 0, .temperature = 0.7};
  std::string evaluate;  ///< a file of multiple-choice questions, asked at the end

  // ---- what a program sets ----
  std::string batch_axes = "d";  ///< axes that shard the batch: "d" of "B/d", "x y" of "B/x/y"
  /// The weights that the program has loaded before the run, as a text that ranks compare: a file's name and checksum.
  std::string initial_weights;
  /// Weights that the run reads but neither trains nor saves, in the same form. A run resumes only with the same ones.
  std::string frozen_weights;
  /// The program's own settings that may change when a run resumes, because they do not change the steps: "schedule".
  std::vector<std::string> may_change;
  /// Settings that may change in other programs, but change the steps of this one: "microbatches" where a loss is no
  /// mean over tokens.
  std::vector<std::string> may_not_change;
  /// The program's own settings that decide the numbers of a model but no shape, with their values in checkpoints that
  /// do not name them (texts; "": not known). Every use of a checkpoint compares them: {{"init", "depth-scaled"}}
  std::map<std::string, std::string> model_settings;

  // ---- what `dry_run` sets ----
  std::string step_svg;           ///< the picture of the first device's step, on the first rank
  std::int64_t planned_peak = 0;  ///< most bytes of a device's pool by a plan, where errors name it
};

/// Declares the options of a run: --data, --steps, --mesh, --run and the others. `declare(options, training)`
SHARDLIB_INLINE void declare(Options& options, Training& training);

/// The options of `launch` for the run: its --device, its --sums and its --collective-timeout. If a wait lasts longer,
/// the recordings go into the run's folder. `launch(mesh, body, launch_options(training))`
[[nodiscard]] SHARDLIB_INLINE LaunchOptions launch_options(const Training& training);

/// The mesh of --mesh, or without it all ranks on the first of training.batch_axes that is not optional. Axes that are
/// left out have size 1. The result is also stored in training.mesh, so that the stored configuration names it; an axis
/// of `optional` is in neither, nor in training.batch_axes, unless --mesh gives it a size above 1. Throws UsageError
/// for axes that are not among `axes` ("d t"), or in another order. `chosen_mesh(training, "d t")`,
/// `chosen_mesh(training, "r d t", "r")`
[[nodiscard]] SHARDLIB_INLINE std::vector<AxisSize> chosen_mesh(Training& training, std::string_view axes,
                                                                std::string_view optional = "");

namespace detail {
/// training.batch_axes as a list. Throws UsageError for a name that is not an axis of the mesh.
[[nodiscard]] SHARDLIB_INLINE std::vector<std::string> batch_axes(const std::vector<AxisSize>& mesh,
                                                                  const Training& training);
}  // namespace detail

/// Prints the non-default settings (Options::describe) on the first rank, if the run has a folder. `announce(options,
/// training)`
SHARDLIB_INLINE void announce(const Options& options, const Training& training);

/// `io::require_writable` for a file that may be in the folder of --run, which this makes if it is not there yet. It
/// may not be one that a run writes itself (`require_no_run_file`). `require_output(training,
/// "runs/first/logits.safetensors", "--logits")`
SHARDLIB_INLINE void require_output(const Training& training, const std::string& path, const std::string& option);

/// The learning rates of the run's steps. Throws UsageError if --decay-steps ends the decay within the warmup.
/// `lr_schedule(training)(step)`
[[nodiscard]] SHARDLIB_INLINE LrSchedule lr_schedule(const Training& training);

/// The options of sampling, from --seed and --rows. `sample_options(training)`
[[nodiscard]] SHARDLIB_INLINE SampleOptions sample_options(const Training& training);

/// Prints, on the first rank, which dims of the model grow by more than a twentieth through padding. `options` has the
/// options that give their sizes; other dims follow from these. `note_padding(mesh, sizes, {{"M", "--d-model"}})`
SHARDLIB_INLINE void note_padding(const std::vector<AxisSize>& mesh, const Sizes& sizes,
                                  const std::map<std::string, std::string>& options);

/// Throws UsageError unless the batch divides into microbatches, each of them over training.batch_axes, and the host
/// has memory for a step's rows. With --sample-only there are none. `batch_must_divide(mesh, training)`
SHARDLIB_INLINE void batch_must_divide(const std::vector<AxisSize>& mesh, const Training& training);

/// The inputs of a run. Each process makes them once, and its devices share them. If all members are empty, a step gets
/// rows of weight 0 and makes up its inputs.
struct Data {
  std::shared_ptr<const io::Tokenizer> tokenizer;  ///< the tokenizer of prompts and samples
  std::shared_ptr<const io::Loader> train;       ///< training data; null with --stream, and with --steps 0 without data
  std::shared_ptr<const io::Loader> validation;  ///< validation data; null without validation
  std::int64_t vocabulary = 0;                   ///< ids are below it
  std::vector<Question> questions = {};          ///< the questions of --evaluate
};
/// Opens the tokenizer and the data of a run; `vocabulary` 0 stands for the tokenizer's. Throws UsageError for data
/// that cannot be read, data that another tokenizer made, and a prompt that the model cannot take. With --plan or
/// --graph it reads the tokenizer alone; --steps 0 needs no data. With --epochs, it sets `training.steps`, and for
/// `--prompt -` the prompt.
/// `open_data(training, 50257)`
[[nodiscard]] SHARDLIB_INLINE Data open_data(Training& training, std::int64_t vocabulary);

/// The loss of a step, and grad_norm, the norm of its gradients. `numbers` are further values for the record, with
/// names that a program chooses, the same on all devices: {{"expert_load", 1.3}}.
struct StepResult {
  double loss = 0, grad_norm = 0;
  std::vector<std::pair<std::string, double>> numbers = {};
};

/// One training step that the loop asks a program to compute.
struct Step {
  std::int64_t number = 0;   ///< the number of the step, from 0
  double learning_rate = 0;  ///< the learning rate of this step
  /// This device's rows of each microbatch. Their weights, summed over all microbatches and devices, add up to 1, so
  /// that the loss is the weighted sum of the tokens' losses.
  const std::vector<io::TokenBatch>& microbatches;
  /// Whether to make the update. Call it once, with the loss and the norm of the gradients, before the state changes;
  /// if it returns false, leave the state as it is. Throws Error if one of the two is not finite or is a spike, unless
  /// --on-spike says what to do then. `if (!step.accepts(result)) return result;`
  std::function<bool(const StepResult&)> accepts;
  /// Not empty if --histogram-every shows the gradients of this step. `update` of run/trained.hpp calls it; a program
  /// with an update of its own may call it with the gradients of all weights, in the weights' order, and the factor
  /// that clips them.
  std::function<void(std::vector<shardlib::detail::ValuePtr> gradients, double scale)> show_gradients = {};
};

/// The FLOPs of forward and backward for a token: 6 for each parameter that multiplies, and attention's two products,
/// not halved for causality (Chowdhery et al. 2022, appendix B). `width` is heads * head width.
/// `training_flops_per_token(124'000'000, 12, 768, 1024)`
[[nodiscard]] inline double training_flops_per_token(std::int64_t parameters, std::int64_t layers, std::int64_t width,
                                                     std::int64_t length) {
  return 6.0 * static_cast<double>(parameters) +
         12.0 * static_cast<double>(layers) * static_cast<double>(width) * static_cast<double>(length);
}

/// Everything besides program and state that decides the curve of a run. Checkpoints store it. `data` is
/// Loader::identity, `settings` are texts by names that begin with "setting.", and others for messages.
struct RunIdentity {
  std::string data;
  std::map<std::string, std::string> settings;
};

/// Saves the state in the run's folder and loads it; see run/checkpoints.hpp. If all members are empty, the run saves
/// nothing.
struct Checkpoints {
  /// The content of a checkpoint besides the program's state.
  struct Saved {
    std::int64_t step = 0;  ///< the next step
    RunIdentity identity;   ///< identity of the run that has saved it
    /// The number of batches that the run has skipped: step s trains on batch s + skipped_batches.
    std::int64_t skipped_batches = 0;
    std::optional<double> validation_loss = {};  ///< the last one since the checkpoint before
  };
  /// Takes a snapshot; a thread writes it during training.
  std::function<void(const Saved&)> save;
  /// Loads the newest whole checkpoint of a step below `before`. Returns nothing if there is none. Calls `check`, if it
  /// is not empty, before any leaf is read or compared: it throws, the same on all devices, if the run must not load
  /// it.
  std::function<std::optional<Saved>(std::int64_t before, const std::function<void(const Saved&)>& check)> load;
  /// Renames the checkpoint of a step because it belongs to a diverged run, so that no run resumes from it.
  std::function<void(std::int64_t step)> set_aside;
  std::function<bool()> poll;   ///< called once a step; returns whether a checkpoint has become complete
  std::function<bool()> flush;  ///< waits for the checkpoint under way; returns whether one has become complete
  /// The leaves of the state, for --check-replicas and --histogram-every. It is set also if the run saves nothing.
  std::function<io::detail::NamedValues()> leaves;
};

/// The functions of a program that the loop calls on each device. All devices call them in the same order.
struct Program {
  std::function<StepResult(const Step& step)> step;  ///< computes a step, and updates the state if it is accepted
  std::function<void()> begin_step;  ///< called before `step`: frees what validation and samples keep. May be empty.
  /// The mean loss of a batch; these are this device's rows, with weights that add up to 1 over all devices.
  std::function<double(const io::TokenBatch& rows)> validate;
  /// Called after the last step on all devices, also if a signal has stopped the run. May be empty.
  std::function<void()> finish;
  Decode decode;            ///< computes the logits for sampling
  Checkpoints checkpoints;  ///< how the state is saved and loaded

  std::int64_t parameters = 0;  ///< parameters of the whole model
  double flops_per_token = 0;   ///< FLOPs of forward and backward without recomputation, for MFU
  std::int64_t context = 0;     ///< the most tokens that the model can take
  std::string dtype = "f32";    ///< the dtype of products and communication, which run.json records
  /// Bytes on this device (shard_bytes), for --plan. Copies are the weights in the dtype of computation, if that is
  /// another.
  std::int64_t weight_bytes = 0, copy_bytes = 0, optimizer_bytes = 0;
  std::optional<std::int64_t> gradient_bytes;  ///< if absent, the gradients take as many bytes as the weights
};

/// Runs training.steps steps, from the newest checkpoint if there is one. `configuration` (Options::to_toml) is stored
/// with the run. On the device of a dry run (run::plan) one step is counted instead. `train(device, training, data,
/// options.to_toml(), program)`
SHARDLIB_INLINE void train(const DevicePtr& device, const Training& training, const Data& data,
                           const std::string& configuration, const Program& program);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/training.hpp"
#include "shardlib/run/impl/training_loop.hpp"
#include "shardlib/run/impl/training_options.hpp"
#endif
