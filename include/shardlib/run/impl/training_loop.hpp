// Definitions of training.hpp: the loop around a program's step.
#pragma once

#include "shardlib/run/training.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstdio>
#include <memory>
#include <numeric>
#include <span>
#include <sstream>
#include <string>
#include <utility>

#include "shardlib/device/launch.hpp"
#include "shardlib/io/agree.hpp"
#include "shardlib/io/data/read_ahead.hpp"
#include "shardlib/io/data/text_stream.hpp"
#include "shardlib/io/file.hpp"
#include "shardlib/optim/lr_schedule.hpp"
#include "shardlib/run/impl/run_identity.hpp"
#include "shardlib/run/impl/stop_on_signal.hpp"
#include "shardlib/run/peak.hpp"
#include "shardlib/run/plan.hpp"
#include "shardlib/run/progress.hpp"
#include "shardlib/run/report.hpp"
#include "shardlib/run/run_directory.hpp"
#include "shardlib/run/step_trace.hpp"
#include "shardlib/run/tensorboard.hpp"
#include "shardlib/support/version.hpp"

namespace shardlib::run {

namespace detail {

/// The reduction of one number of each device, everywhere the same.
inline double reduce(const std::shared_ptr<Device>& device, double value, Reduction op) {
  if (device->size() == 1) return value;
  Buffer send = device->pool()->allocate(sizeof(double)), received = device->pool()->allocate(sizeof(double));
  *send.as<double>() = value;
  device->everybody().all_reduce(send, received, DType::f64, op).wait();
  return *received.as<double>();
}

/// Which of how many equal parts of a batch is this device's.
struct BatchPlace {
  std::int64_t index = 0, parts = 1;

  BatchPlace(const Device& device, const Training& training) {
    for (const std::string& axis : batch_axes(device.axes(), training)) {
      index = index * device.size(axis) + device.axis_index(axis);
      parts *= device.size(axis);
    }
  }
};

/// The first line of a resolved configuration in which two devices differ, or nothing.
inline std::optional<std::array<std::string, 2>> difference(const std::string& a, const std::string& b) {
  std::istringstream mine(a), theirs(b);
  for (std::string x, y; !mine.eof() || !theirs.eof();) {
    if (!std::getline(mine, x)) x.clear();
    if (!std::getline(theirs, y)) y.clear();
    if (x != y) return std::array{x, y};
  }
  return std::nullopt;
}

/// Throws UsageError, the same on all devices, unless they run the same program on the same data: ranks that were
/// started with other settings would train without a word, each its own model.
inline void require_one_run(const std::shared_ptr<Device>& device, const std::string& configuration, const Data& data) {
  if (device->size() == 1) return;
  const std::string mine =
      fmt::format("shardlib {}\n{}\ndata = {}\n", SHARDLIB_VERSION, configuration, data_hash(data, "none"));
  const std::vector<std::string> all = io::gather_texts(*device, mine);
  std::string others;
  std::optional<std::array<std::string, 2>> first;
  for (std::size_t i = 1; i < all.size(); ++i) {
    const auto differs = difference(all[0], all[i]);
    if (!differs || (first && *differs != *first)) continue;
    first = differs;
    others += (others.empty() ? "" : ", ") + std::to_string(i);
  }
  if (!first) return;
  const auto shown = [](const std::string& line) { return line.empty() ? "nothing" : "`" + line + "`"; };
  throw UsageError(
      fmt::format("the ranks run different programs: rank 0 has {}, but rank {} has {}; start all ranks with "
                  "the same settings, data and program",
                  shown((*first)[0]), others, shown((*first)[1])));
}

/// One run on one device.
class Loop {
  using Stopwatch = shardlib::detail::Stopwatch;

 public:
  Loop(const std::shared_ptr<Device>& device, const Training& training, const Data& data,
       const std::string& configuration, const Program& program)
      : device_(device),
        training_(training),
        place_(*device, training),
        data_(data),
        program_(program),
        configuration_(configuration),
        speaks_(device->rank() == 0),
        directory_(training.directory.empty()
                       ? RunDirectory()
                       : RunDirectory(training.directory, configuration,
                                      training.resume ? Resume::automatic : Resume::never, speaks_)) {}

  void run() {
    check_allowed(training_, configuration_);
    if ((training_.trace || training_.tensorboard) && !directory_.exists())
      throw UsageError(std::string(training_.trace ? "--trace" : "--tensorboard") +
                       " writes into the folder of a run: give --run DIR too");
    io::together(*device_, "", [this] {
      if (speaks_) require_outputs();
    });
    std::optional<Checkpoints::Loaded> found;
    if (directory_.exists() && training_.resume) found = program_.checkpoints.load();
    const std::int64_t first = found ? found->step : 0;
    // Read from the data: once, and only where a checkpoint will have it.
    const RunIdentity identity = directory_.exists() ? run_identity(training_, data_, configuration_) : RunIdentity();
    // Before anything in the folder changes. Where no step is left, only a sample depends on the settings.
    std::vector<std::string> changes;
    if (found && first < training_.steps) changes = require_same_run(*found, identity, training_);
    for (const std::string& sentence : directory_.begin(first)) say(sentence);
    if (found) say(fmt::format("going on from step {} of {}", first, training_.steps));
    for (const std::string& change : changes) say(change);
    if (speaks_ && !training_.metrics.empty())
      metrics_ = JsonLines(training_.metrics, JsonLines::Mode::overwrite, "check --metrics");
    if (speaks_ && training_.tensorboard) events_ = std::make_unique<TensorBoard>(directory_.tensorboard(), first);
    describe();
    // Devices that are threads of this process share its cores; ranks of one machine measure theirs together.
    peak_ = reduce(device_,
                   under_mpi() ? measured_peak_flops(device_->exec().threads)
                   : speaks_   ? measured_peak_flops()
                               : 0.0,
                   Reduction::sum);
    const StopOnSignal stop;  // before other threads are made, which do as this one does
    const std::int64_t parts = training_.microbatches;
    std::optional<io::ReadAhead> batches;
    if (first < training_.steps) batches.emplace(reader(), first * parts);
    std::unique_ptr<Progress> progress =
        speaks_ ? std::make_unique<Progress>(first, training_.steps) : std::make_unique<Progress>();
    device_->pool()->trim();  // holes that initialisation has left, for which no step may have a use
    // A run's first step is not typical: memory comes from the system.
    constexpr std::int64_t traced_steps = 5;
    if (training_.trace)
      trace_.emplace(device_, directory_.trace(), std::min(first + 1, training_.steps - 1), traced_steps);
    for (std::int64_t step = first; step < training_.steps; ++step) {
      const bool last = step + 1 == training_.steps;
      Record record = train_step(*batches, step);
      if (due(step, training_.check_replicas)) check_replicas(record);
      if (due(step, training_.validate_every) || (last && training_.validate_every > 0)) {
        const double begin = now();
        record.validation_loss = validation_loss();
        record.seconds.emplace_back("validation", now() - begin);
      }
      // A record is written before its checkpoint, or a run could go on from there without it: the time is the next's.
      if (checkpoint_seconds_ > 0) record.seconds.emplace_back("checkpoint", std::exchange(checkpoint_seconds_, 0));
      const bool stopped = stopping();
      if (speaks_) write(record);
      progress->step(record);
      if (directory_.exists() && (due(step, training_.save_every) || last || stopped)) {
        const double begin = now();
        directory_.sync();
        program_.checkpoints.save(step + 1, identity);
        checkpoint_seconds_ = now() - begin;
        // What comes after the training takes time and may fail: it must not take the last checkpoint with it.
        if (last || stopped) program_.checkpoints.flush();
      } else if (directory_.exists()) {
        program_.checkpoints.poll();
      }
      if (stopped && !last) {
        progress->message(directory_.exists() ? "stopped by a signal; the same command goes on from here"
                                              : "stopped by a signal; without --run nothing was kept");
        break;
      }
      if (due(step, training_.sample_every) || last) {
        progress->pause();
        sample(step);
      }
    }
    if (first < training_.steps && program_.finish) program_.finish();
    if (trace_) {
      trace_->finish();
      say("trace: " + directory_.trace());
    }
    if (first >= training_.steps) {
      if (directory_.exists() && !found) {
        program_.checkpoints.save(0, identity);  // a conversion: weights, and no steps
        program_.checkpoints.flush();
      } else {
        say(fmt::format("all {} steps are done", training_.steps));
      }
      sample(first - 1);
    }
    progress->finish();
    if (speaks_ && directory_.exists() && first < training_.steps) {
      write_report({directory_.path()}, directory_.report());
      say("report: " + directory_.report());
    }
  }

 private:
  /// Throws UsageError if an output that an option names cannot be written: now, not behind the steps.
  void require_outputs() const {
    if (!training_.metrics.empty())
      const JsonLines tried(training_.metrics, JsonLines::Mode::append, "check --metrics");
    if (!directory_.exists()) return;
    try {
      io::make_folders(directory_.checkpoints());
      if (training_.tensorboard) io::make_folders(directory_.tensorboard());
    } catch (const Error& error) {
      throw UsageError(fmt::format("--run: {}; move what is there away, or choose another folder", error.what()));
    }
    for (const std::string& path : {directory_.checkpoints() + "/LATEST", directory_.samples(), directory_.report()})
      io::require_writable(path, "--run");
    if (training_.trace) io::require_writable(directory_.trace(), "--trace");
    if (training_.tensorboard) io::require_writable(directory_.tensorboard() + "/events", "--tensorboard");
  }
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  /// Whether a signal asked any device to stop. Collective: the same answer on all devices.
  bool stopping() const { return reduce(device_, stop_signal != 0 ? 1 : 0, Reduction::max) > 0; }
  static bool due(std::int64_t step, std::int64_t every) { return every > 0 && (step + 1) % every == 0; }
  void say(const std::string& line) const {
    if (speaks_) fmt::print("{}\n", line);
    std::fflush(stdout);
  }
  void describe() const {
    const std::string data = data_.train
                                 ? fmt::format("{} tokens of data, seen {:.2f} times", data_.train->source().tokens(),
                                               data_.train->epochs(training_.steps))
                             : training_.text_stream.empty() ? "no data"
                                                             : "texts of " + training_.text_stream;
    say(fmt::format("{} parameters, mesh {}, {} tokens a step, {}", program_.parameters, to_string(device_->axes()),
                    training_.batch * training_.seq, data));
  }
  /// Throws Error where devices have drifted apart in what all of them should have alike.
  void check_replicas(const Record& record) const {
    if (!program_.checkpoints.check_replicas) return;
    const std::int64_t before = record.step + 1 - training_.check_replicas;
    const std::string when = fmt::format("after step {}{}", record.step,
                                         before > 0 ? fmt::format(" (after step {} all was alike)", before - 1) : "");
    program_.checkpoints.check_replicas(when, {{"step", static_cast<std::uint64_t>(record.step)},
                                               {"seed", training_.seed},
                                               {"loss", std::bit_cast<std::uint64_t>(record.loss)},
                                               {"grad_norm", std::bit_cast<std::uint64_t>(record.grad_norm)}});
  }
  /// This device's rows of one of `parts` parts of a batch.
  io::TokenBatch rows(const io::Loader& loader, std::int64_t step, std::int64_t part, std::int64_t parts) const {
    const std::int64_t mine = training_.batch / parts / place_.parts;
    return loader.rows(step, part * training_.batch / parts + place_.index * mine, mine);
  }
  /// Microbatches of training, numbered through.
  io::ReadAhead::Make reader() const {
    const std::int64_t parts = training_.microbatches;
    if (data_.train) return [this, parts](std::int64_t i) { return rows(*data_.train, i / parts, i % parts, parts); };
    const std::int64_t size = training_.batch / parts, mine = size / place_.parts;
    if (training_.text_stream.empty())
      return [this, mine](std::int64_t) { return io::detail::empty_rows(mine, training_.seq); };
    const auto stream = std::make_shared<io::TextStream>(
        training_.text_stream,
        io::TextStreamOptions{size, training_.seq, training_.seed, io::TextOptions{data_.tokenizer, false},
                              static_cast<std::uint32_t>(data_.vocabulary)},
        place_.index * mine, mine);
    return [stream](std::int64_t) { return stream->next(); };
  }

  /// Turns the weights of a step's rows into shares of its loss: all of them, on all devices, then add up to 1. Returns
  /// the number of tokens that count. Sums of whole numbers: the same on every mesh.
  double share_loss(std::span<io::TokenBatch> parts) const {
    double mine = 0;
    for (const io::TokenBatch& rows : parts) mine += std::accumulate(rows.weights.begin(), rows.weights.end(), 0.0);
    const std::int64_t copies = device_->size() / place_.parts;  // devices that have the same rows
    const double tokens = reduce(device_, mine, Reduction::sum) / static_cast<double>(copies);
    for (io::TokenBatch& rows : parts)
      for (float& weight : rows.weights) weight = static_cast<float>(weight / tokens);
    return tokens;
  }

  Record train_step(io::ReadAhead& batches, std::int64_t step) {
    const double begin = now();
    std::vector<io::TokenBatch> parts;
    for (std::int64_t i = 0; i < training_.microbatches; ++i)
      parts.push_back(batches.get(step * training_.microbatches + i));
    if (data_.train || !training_.text_stream.empty()) share_loss(parts);
    const double ready = now();
    Record record;
    record.step = step;
    record.learning_rate =
        warmup_cosine(step, training_.steps, training_.warmup, training_.learning_rate, training_.final_learning_rate);
    if (trace_) trace_->before(step);
    auto& stopwatch = shardlib::detail::program_state(device_).stopwatch;
    stopwatch.reset();
    const StepResult result = program_.step(parts, step, record.learning_rate);
    stopwatch.change(Stopwatch::rest);
    if (trace_) trace_->after(step);
    record.loss = result.loss;
    record.grad_norm = result.grad_norm;
    record.seconds = {{"data", ready - begin},
                      {"forward", stopwatch.seconds(Stopwatch::forward)},
                      {"backward", stopwatch.seconds(Stopwatch::backward)},
                      {"optimizer", stopwatch.seconds(Stopwatch::rest)},
                      {"communication", stopwatch.seconds(Stopwatch::communication)}};
    for (const auto& [part, seconds] : record.seconds) record.step_seconds += seconds;
    record.tokens_per_second = static_cast<double>(training_.batch * training_.seq) / record.step_seconds;
    record.mfu = record.tokens_per_second * program_.flops_per_token / peak_;
    record.memory_bytes =
        static_cast<std::int64_t>(reduce(device_, static_cast<double>(device_->pool()->stats().peak), Reduction::max));
    return record;
  }

  double validation_loss() const {
    const io::Loader& loader = *data_.validation;
    const std::int64_t batches = std::min(training_.validation_batches, loader.steps_per_epoch());
    double losses = 0, tokens = 0;
    for (std::int64_t i = 0; i < batches; ++i) {
      io::TokenBatch batch = rows(loader, i, 0, 1);
      const double counted = share_loss({&batch, 1});  // the last batch may be filled up
      losses += program_.validate(batch) * counted;
      tokens += counted;
    }
    return losses / tokens;
  }

  void sample(std::int64_t step) {
    if (training_.sample.max_tokens == 0 || !program_.decode) return;
    const SampleOptions options = sample_options(training_);
    say(fmt::format("\nA sample after step {} (temperature {}):\n", step + 1, options.temperature));
    const auto show = [&](std::string_view piece) {
      if (!speaks_) return;
      fmt::print("{}", piece);
      std::fflush(stdout);
    };
    bool stopped = false;
    const auto stop = [&] { return stopped = stopping(); };
    const std::string text =
        generate(*data_.tokenizer, training_.prompt, program_.context, program_.decode, options, show, stop);
    say(stopped ? "\nthe sample was stopped by a signal" : "\n");
    if (speaks_ && !stopped) directory_.write(Sample{step, training_.prompt, text});
  }

  void write(const Record& record) {
    directory_.write(record);
    if (metrics_.is_open()) metrics_.write(record);
    if (events_) events_->write(record);
  }

  std::shared_ptr<Device> device_;
  const Training& training_;
  const BatchPlace place_;
  const Data& data_;
  const Program& program_;
  const std::string& configuration_;
  bool speaks_;
  RunDirectory directory_;
  JsonLines metrics_;
  std::unique_ptr<TensorBoard> events_;
  std::optional<StepTrace> trace_;
  double peak_ = 0, checkpoint_seconds_ = 0;
};

/// What `train` reports in a dry run: one step, counted.
inline Plan plan_step(const std::shared_ptr<Device>& device, const Training& t, const Program& program) {
  const std::int64_t rows = t.batch / t.microbatches / BatchPlace(*device, t).parts;
  const std::vector parts(static_cast<std::size_t>(t.microbatches), io::detail::empty_rows(rows, t.seq));
  Plan plan = count_step(device, [&] { program.step(parts, 0, t.learning_rate); });
  plan.parameters = program.parameters;
  plan.weights = program.weight_bytes;
  plan.copies = program.copy_bytes;
  plan.gradients = program.gradient_bytes.value_or(program.weight_bytes);
  plan.optimizer = program.optimizer_bytes;
  plan.model_flops = program.flops_per_token * static_cast<double>(t.batch * t.seq);
  return plan;
}

}  // namespace detail

SHARDLIB_INLINE void train(const std::shared_ptr<Device>& device, const Training& training, const Data& data,
                           const std::string& configuration, const Program& program) {
  if (device->is_dry()) {
    device->local<Plan>() = detail::plan_step(device, training, program);
    return;
  }
  detail::require_one_run(device, configuration, data);
  detail::Loop(device, training, data, configuration, program).run();
}

}  // namespace shardlib::run
