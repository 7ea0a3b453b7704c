// Definitions of training.hpp: the options, and the settings that follow from them.
#pragma once

#include "shardlib/run/training.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "shardlib/device/exec.hpp"
#include "shardlib/run/accelerators.hpp"
#include "shardlib/run/impl/training_checks.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::run {

namespace detail {

inline void declare_data(Options& o, Training& t) {
  o.group("data");
  o.add("--data", t.data, "tokens: a text file, a flat-tokens data set, llm.c's or nanoGPT's .bin files",
        value_name("PATH"));
  o.add("--validation-data", t.validation_data,
        "validation data, in a format of --data; of a data set with splits, the validation split (default: that of "
        "--data)",
        value_name("PATH"));
  o.add("--stream", t.text_stream,
        "train from the raw texts of this folder instead; a resumed run does not repeat its batches exactly",
        value_name("DIR"));
  o.add("--tokenizer", t.tokenizer, std::string(io::tokenizer_help), value_name("FILE"));
  o.add("--rows", t.rows, "content of a row of a batch: the next tokens, or one padded document",
        one_of({"packed", "padded", "stories"}));
  o.add("--shuffle", t.shuffle, "order of the rows; no: that of the data, in every epoch", one_of({"yes", "no"}));
  o.add("--row-begin", t.row_begin, "id that precedes a document or row; with --load that of the model, if it has one",
        size(0));
  o.add("--batch", t.batch, "sequences per step, over all devices and microbatches", size());
  o.add("--seq", t.seq, "tokens per sequence", size());
}

inline void declare_training(Options& o, Training& t) {
  o.group("training");
  o.add("--mesh", t.mesh,
        "devices, as in d=4,t=2: threads of this process, or MPI ranks under mpirun; an axis left out has size 1 "
        "(default: all ranks on d)",
        value_name("AXES"));
  o.add("--steps", t.steps, "training steps", size(0));
  o.add("--epochs", t.epochs, "passes over the data, instead of --steps (0: --steps)", size(0) | command_line_only());
  o.add("--microbatches", t.microbatches, "parts of a batch whose gradients are accumulated", size());
  o.add("--seed", t.seed, "seed of weights, data order, dropout and samples");
  o.add("--learning-rate", t.learning_rate, "peak learning rate", above(0));
  o.add("--lr-schedule", t.lr_schedule, "the learning rate after the warmup; wsd: the peak, then a linear decay",
        one_of({"constant", "linear", "cosine", "wsd"}));
  o.add("--warmup", t.warmup, "steps of linear warmup; --lr-schedule follows", size(0));
  o.add("--warmup-from", t.warmup_from, "the learning rate of step 0, where the warmup begins",
        one_of({"0", "peak/warmup"}));
  o.add("--decay-steps", t.decay_steps,
        "steps until the decay ends, with the warmup; later steps keep the final rate (0: --steps)", size(0));
  o.add("--decay-fraction", t.decay_fraction, "for wsd: the share of --decay-steps that the decay takes",
        between(0, 1));
  o.add("--final-learning-rate", t.final_learning_rate, "final learning rate, as a fraction of the peak",
        between(0, 1));
  o.add("--weight-decay", t.weight_decay,
        "decoupled weight decay: in gpt2 of matrices, in the other trainers of all leaves", at_least(0));
  o.add("--beta1", t.beta1, "AdamW's decay of the first moment", at_least(0) | below(1));
  o.add("--beta2", t.beta2, "AdamW's decay of the second moment", at_least(0) | below(1));
  // Below that, f32 has no normal number for it, and a gradient of zero would divide zero by zero.
  o.add("--adam-epsilon", t.adam_epsilon, "AdamW's epsilon", between(1e-30, 1));
  o.add("--clip", t.clip, "largest global gradient norm (0: no clipping)", at_least(0));
}

inline void declare_run(Options& o, Training& t) {
  o.group("run");
  o.add("--run", t.directory,
        "folder of the run: configuration, metrics, checkpoints, report; an existing run is resumed",
        value_name("DIR") | command_line_only());
  o.flag("--resume", t.resume, "resume from the run's newest whole checkpoint", command_line_only());
  o.add("--allow-change", t.allow_change,
        "settings that may differ from those of the checkpoint, as in learning_rate,data",
        value_name("NAMES") | command_line_only());
  o.add("--save-every", t.save_every, "with --run: steps between checkpoints (0: only at the end)", size(0));
  o.add("--keep", t.keep, "number of newest checkpoints to keep", size());
  o.add("--keep-every", t.keep_every, "also keep checkpoints whose step is a multiple of this (0: none)", size(0));
  o.add("--keep-best", t.keep_best, "also keep this many checkpoints with the lowest validation loss", size(0));
  o.add("--validate-every", t.validate_every, "steps between validations (0: none)", size(0));
  o.add("--validation-batches", t.validation_batches, "the most batches of a validation", size());
  o.add("--metrics", t.metrics,
        "additional file for one JSON object per step; it is replaced unless the run is resumed",
        value_name("FILE") | command_line_only());
  o.add("--on-spike", t.on_spike,
        "if the loss or the gradient norm spikes: stop the run, skip the update, or rewind to the last checkpoint and "
        "continue with later data",
        one_of({"none", "stop", "skip", "rewind"}));
  o.add("--spike-window", t.spike_window, "number of previous steps for --on-spike", size(2));
  o.add("--spike-deviations", t.spike_deviations, "standard deviations above their mean that make a spike", above(0));
  o.add("--check-replicas", t.check_replicas, "steps between comparisons of replicated weights and moments (0: none)",
        size(0));
  o.add("--collective-timeout", t.collective_timeout,
        "a device that waits longer for others ends the run with a table of who waits for whom (0: never)",
        at_least(0) | unit("s"));
  o.add("--device", t.device,
        fmt::format("device that runs the kernels: the CPU, a GPU (in builds with -DSHARDLIB_LAUNCHER=cuda or hip; the "
                    "launcher of this one is {}), or the CPU with memory of its own, to find code that no accelerator "
                    "could run",
                    launcher_name()),
        one_of({"cpu", "gpu", "simulated"}));
  o.add("--sums", t.sums,
        "with --device gpu: who adds up sums over devices, a tree over their ranks, with the same bits in each run, or "
        "NCCL, in an order of its own",
        one_of({"tree", "nccl"}));
  o.flag("--find-nan", t.find_nan,
         "end the run at the first op whose result has a NaN, and name the op; every op rereads its result");
}

inline void declare_traces_and_plans(Options& o, Training& t) {
  o.flag("--trace", t.trace, "write trace.json into the run's folder: every op and collective of --trace-steps steps");
  o.add("--trace-steps", t.trace_steps, "number of traced steps", size());
  o.add("--trace-from", t.trace_from, "number of steps after this start before the trace begins", size(0));
  o.flag("--plan", t.plan,
         "no training: print memory, communication and FLOPs of a step on a mesh of hypothetical devices",
         command_line_only());
  Validator plan_devices = one_of({"none"});
  for (const Accelerator& one : accelerators) plan_devices.choices.emplace_back(one.name);
  o.add("--plan-device", t.plan_device,
        "with --plan: an accelerator whose peak for --dtype, memory bandwidth and memory the plan takes",
        plan_devices | command_line_only());
  o.add("--plan-flops", t.plan_flops,
        "with --plan: predict the time of a step on devices with this peak (0: no prediction); with --device gpu: the "
        "GPU's peak, for MFU (0: that of a GPU that --plan-device knows)",
        at_least(0) | unit("FLOP/s") | command_line_only());
  o.add("--plan-efficiency", t.plan_efficiency, "with --plan-flops: share of the peak that products reach",
        between(0.01, 1) | command_line_only());
  o.add("--plan-memory", t.plan_memory, "with --plan-flops: a device's memory bandwidth (0: memory takes no time)",
        at_least(0) | unit("B/s") | command_line_only());
  o.add("--plan-capacity", t.plan_capacity,
        "with --plan: a device's memory, which the plan must fit (0: that of --plan-device)",
        between(0, 1e18) | unit("B") | command_line_only());
  o.add("--plan-bandwidth", t.plan_bandwidth,
        "with --plan-flops: B/s that a device sends, as in 300e9, or by axis, d=25e9,t=300e9",
        value_name("B/S") | command_line_only());
  o.add("--plan-latency", t.plan_latency,
        "with --plan-flops: seconds per message, as in 5e-6, or by axis, d=20e-6,t=5e-6 (default: 0)",
        value_name("SECONDS") | command_line_only());
  o.add("--graph", t.graph, "no training: draw one layer, forward and backward, with specs and collectives",
        value_name("FILE.svg") | ends_in(".svg") | command_line_only());
  o.flag("--step-graph", t.draw_step, "draw a whole step into the run's folder, as step.svg", command_line_only());
  o.flag("--tensorboard", t.tensorboard, "write TensorBoard events into the run's folder");
  o.add("--histogram-every", t.histogram_every,
        "with --tensorboard: steps between histograms of weights and gradients (0: none)", size(0));
}

inline void declare_sampling(Options& o, Training& t) {
  o.group("sampling");
  o.add("--sample-every", t.sample_every, "steps between samples, the first before step 0 (0: only at the end)",
        size(0));
  o.flag("--sample-only", t.sample_only,
         "no training: sample from the newest checkpoint of --run, whose folder is only read (shardlib-sample)",
         command_line_only());
  o.flag("--chat", t.chat,
         "with --sample-only: answer each line of the standard input; /reset begins a new conversation, /quit ends; "
         "--collective-timeout does not count the wait for a line",
         command_line_only());
  o.add("--turns", t.turns,
        "with --chat: a turn, with {} for the message, \\n for a new line and special tokens, before the answer",
        command_line_only());
  o.add("--max-tokens", t.sample.max_tokens, "the most tokens of a sample (0: no sample)", size(0));
  o.add("--prompt", t.prompt, "text that the samples continue; -: the standard input");
  o.add("--sample-begin", t.sample_begin, "id of the token before the prompt (-1: none; -2: that of --row-begin)",
        size(-2));
  o.add("--top-k", t.sample.top_k, "keep only the k likeliest tokens (0: all)", size(0));
  o.add("--top-p", t.sample.top_p, "then keep the smallest set of tokens with this total probability", between(0, 1));
  o.add("--stop", t.sample.stops, "end a sample before this text; may be given several times");
  o.add("--samples", t.samples, "number of texts", size(1));
  o.add("--temperature", t.sample.temperature, "temperature of the softmax; 0 takes the likeliest token", at_least(0));
  o.add("--evaluate", t.evaluate,
        "at the end: print the accuracy on a file of multiple-choice questions in HellaSwag's format",
        value_name("FILE.jsonl") | command_line_only());
}

}  // namespace detail

SHARDLIB_INLINE void declare(Options& o, Training& t) {
  detail::declare_data(o, t);
  detail::declare_training(o, t);
  detail::declare_run(o, t);
  detail::declare_traces_and_plans(o, t);
  detail::declare_sampling(o, t);
  detail::declare_without_effect(o, t);
}

SHARDLIB_INLINE LaunchOptions launch_options(const Training& t) {
  // Devices wait for the user without a limit.
  const std::chrono::duration<double> timeout(t.chat ? 0 : std::min(t.collective_timeout, 1e9));
  return {.kind = t.device == "simulated" ? DeviceKind::simulated
                  : t.device == "gpu"     ? DeviceKind::gpu
                                          : DeviceKind::cpu,
          .sums = t.sums == "nccl" ? GpuSums::nccl : GpuSums::tree,
          .watchdog = {.timeout = std::chrono::ceil<std::chrono::milliseconds>(timeout), .folder = t.directory},
          .planned_peak = static_cast<std::size_t>(t.planned_peak)};
}

SHARDLIB_INLINE LrSchedule lr_schedule(const Training& t) {
  // Without --decay-steps, a run may be shorter than its warmup.
  if (t.decay_steps > 0 && t.decay_steps <= t.warmup && t.lr_schedule != "constant")
    throw UsageError(
        fmt::format("--decay-steps {} counts the steps of --warmup {} too, so no step is left for the decay: choose "
                    "more than {}, or a shorter --warmup",
                    t.decay_steps, t.warmup, t.warmup));
  using Kind = LrSchedule::Kind;
  return {.kind = t.lr_schedule == "constant" ? Kind::constant
                  : t.lr_schedule == "linear" ? Kind::linear
                  : t.lr_schedule == "cosine" ? Kind::cosine
                                              : Kind::wsd,
          .peak = t.learning_rate,
          .warmup = t.warmup,
          .warmup_from = t.warmup_from == "0" ? LrSchedule::WarmupFrom::zero : LrSchedule::WarmupFrom::peak_share,
          .decay_steps = t.decay_steps > 0 ? t.decay_steps : std::max<std::int64_t>(t.steps, 1),
          .final_fraction = t.final_learning_rate,
          .decay_fraction = t.decay_fraction};
}

SHARDLIB_INLINE SampleOptions sample_options(const Training& t) {
  SampleOptions options = t.sample;
  options.seed = t.seed;
  options.begin.reset();
  const std::int64_t begin = t.sample_begin == -2 ? t.row_begin : t.sample_begin;
  if (t.rows != "stories" && begin >= 0) options.begin = static_cast<std::int32_t>(begin);
  return options;
}

}  // namespace shardlib::run
