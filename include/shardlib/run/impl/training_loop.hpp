// Definitions of training.hpp: the loop around a program's step.
#pragma once

#include "shardlib/run/training.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "shardlib/device/launch.hpp"
#include "shardlib/interop/find_nan.hpp"
#include "shardlib/io/agree.hpp"
#include "shardlib/io/file.hpp"
#include "shardlib/run/check_replicas.hpp"
#include "shardlib/run/console.hpp"
#include "shardlib/run/impl/answers.hpp"
#include "shardlib/run/impl/batches.hpp"
#include "shardlib/run/impl/judge.hpp"
#include "shardlib/run/impl/live_report.hpp"
#include "shardlib/run/impl/run_histograms.hpp"
#include "shardlib/run/impl/run_identity.hpp"
#include "shardlib/run/impl/run_start.hpp"
#include "shardlib/run/impl/saving.hpp"
#include "shardlib/run/impl/stop_on_signal.hpp"
#include "shardlib/run/impl/training_checks.hpp"
#include "shardlib/run/impl/written_records.hpp"
#include "shardlib/run/plan.hpp"
#include "shardlib/run/progress.hpp"
#include "shardlib/run/report.hpp"
#include "shardlib/run/run_directory.hpp"
#include "shardlib/run/step_trace.hpp"
#include "shardlib/run/tensorboard.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/stopwatch.hpp"

namespace shardlib::run {

namespace detail {

/// One run on one device.
class TrainingLoop {
  using Stopwatch = shardlib::detail::Stopwatch;

 public:
  TrainingLoop(const DevicePtr& device, const Training& training, const Data& data, const std::string& configuration,
               const Program& program)
      : device_(device),
        training_(training),
        data_(data),
        program_(program),
        configuration_(configuration),
        lr_schedule_(lr_schedule(training)),
        speaks_(device->rank() == 0),
        directory_(training.directory.empty()
                       ? RunDirectory()
                       : RunDirectory(training.directory, configuration,
                                      training.resume ? Resume::automatic : Resume::never, speaks_)),
        answers_(device, training, data, program,
                 [this](const Sample& sample) {
                   directory_.write(sample);
                   if (events_) events_->write(sample);
                 }),
        batches_(device, training, data),
        judge_(training),
        histograms_(device, training, program.checkpoints),
        saving_(device, program.checkpoints, directory_, [this](const std::string& text) { message(text); }),
        live_report_(directory_, [this](const std::string& text) { message(text); }) {}

  void run() {
    try {
      run_to_end();
    } catch (const std::exception& error) {
      if (progress_) progress_->finish();  // the line of the last step comes first
      if (speaks_) log_console(fmt::format("error: {}\n", error.what()));
      throw;
    }
  }

 private:
  void run_to_end() {
    const std::optional<Checkpoints::Saved> found = begin();
    const std::int64_t first = found ? found->step : 0;
    const StopOnSignal stop(speaks_ ? &directory_ : nullptr);  // before other threads start: they inherit its mask
    first < training_.steps ? loop(first, found) : use_model(first, found.has_value());
    if (progress_) progress_->finish();
    if (speaks_ && metrics_.is_open()) metrics_.sync();
    if (speaks_ && directory_.exists() && first < training_.steps && live_report_.finish())
      say("report: " + directory_.report());
    answers_.evaluate();
  }

  /// Compares the newest checkpoint with this run, loads it, and opens what the run writes. Returns what was loaded.
  std::optional<Checkpoints::Saved> begin() {
    io::together(*device_, "", [this] {
      if (speaks_) require_outputs(training_, directory_);
    });
    // The identity needs reads of the data: once, and only if a checkpoint stores it.
    if (saves_) identity_ = run_identity(training_, data_, configuration_);
    // Compare before anything in the folder changes. If no step is left, samples and exports depend on the model alone.
    const auto same = [this](const Checkpoints::Saved& saved) {
      const bool trains = saved.step < training_.steps;
      return require_same_run(saved, trains ? identity_ : model_identity(training_, data_, configuration_), training_,
                              trains);
    };
    Resumed resumed;
    if (directory_.exists() && training_.resume) resumed = load_same_run(program_.checkpoints, training_, same);
    const std::optional<Checkpoints::Saved>& found = resumed.saved;
    const std::int64_t first = found ? found->step : 0;
    // Without a step left, the stored configuration and the starts stay those of what was trained.
    const bool changes_run = first < training_.steps || !found;
    for (const std::string& sentence : directory_.begin(first, changes_run)) say(sentence);
    if (changes_run) {
      for (const std::string& sentence : directory_.note_start(first, device_->axes(), program_.dtype)) say(sentence);
      io::together(*device_, "", [this] {
        if (data_.tokenizer) directory_.keep_tokenizer(*data_.tokenizer, training_.tokenizer);
        directory_.keep_step_graph(training_.step_svg);
      });
    }
    if (found && changes_run) say(fmt::format("resuming from step {} of {}", first, training_.steps));
    for (const std::string& note : resumed.notes) say(note);
    io::together(*device_, "", [&] {
      if (!speaks_ || training_.metrics.empty()) return;
      std::error_code none;  // of a pipe
      if (!found && std::filesystem::file_size(training_.metrics, none) > 0 && !none)
        say("--metrics: replacing the records of an earlier run in '" + training_.metrics + "'");
      metrics_ =
          JsonLines(training_.metrics, found ? JsonLines::Mode::append : JsonLines::Mode::overwrite, "check --metrics");
      cut_metrics(metrics_, training_.metrics, first);
    });
    if (speaks_ && training_.tensorboard && first < training_.steps) {
      events_ = std::make_unique<TensorBoard>(directory_.tensorboard(), first);
      events_->text("configuration", first, configuration_);
    }
    say(fmt::format("{} parameters, mesh {}, {}", program_.parameters, to_string(device_->axes()),
                    described_data(training_, data_)));
    if (training_.sample.max_tokens > 0 && !program_.decode)
      say("note: this program draws no samples: its Program::decode is empty");
    peak_ = peak_of_run(device_, training_, program_.dtype);
    return found;
  }

  /// Trains from step `first` on, until the last step or a signal.
  void loop(std::int64_t first, const std::optional<Checkpoints::Saved>& found) {
    if (found) {
      skipped_batches_ = found->skipped_batches;
      resumed_at_ = first;
      events_of_next_.push_back(fmt::format("resumed at step {} on mesh {}", first, to_string(device_->axes())));
    }
    if (training_.on_spike == "rewind" && !found)  // a spike may come before --save-every
      saving_.save({0, identity_, 0, {}}, true);
    judge_.begin(first, records_of_window(), found.has_value());
    // Before the first step, or after the last one before a stop: the samples that the run does not have.
    if (due(first - 1, training_.sample_every) &&
        !answers_.sample(first - 1, samples_of(*device_, directory_, first - 1, training_.prompt)))
      return say(stopped_by_signal(saves_));
    read_from(first);               // starts the clock of the time left
    device_->pool()->trim();        // initialization has left free ranges that no step may use
    device_->pool()->reset_peak();  // a resumed run has held two states
    // By default without a run's first step, which is not typical: memory comes from the system.
    if (training_.trace)
      trace_.emplace(device_, directory_.trace(), std::min(first + training_.trace_from, training_.steps - 1),
                     training_.trace_steps);
    for (std::int64_t step = first; step < training_.steps;) {
      Record record = train_step(step);
      if (!judge_.goes_back() && !after_step(record)) break;
      step = judge_.goes_back() ? go_back(step) : step + 1;
    }
    if (program_.finish) program_.finish();
    if (trace_) trace_->finish();
    if (trace_ && trace_->written()) say("trace: " + directory_.trace());
  }

  /// Validates, writes the record, saves and samples, where they are due. Returns whether no signal stops the run here.
  bool after_step(Record& record) {
    const std::int64_t step = record.step;
    const bool last = step + 1 == training_.steps;
    if (due(step, training_.check_replicas)) check_replicas(record);
    histograms_.write(record, events_.get());
    if (due(step, training_.validate_every) || (last && training_.validate_every > 0)) {
      const double begin = shardlib::detail::steady_seconds();
      record.validation_loss = last_validation_ = batches_.validation_loss(program_.validate);
      record.seconds.emplace_back("validation", shardlib::detail::steady_seconds() - begin);
    }
    // The record is written before the checkpoint, so that a resumed run has it. The checkpoint's time counts in the
    // next record.
    if (checkpoint_seconds_ > 0) record.seconds.emplace_back("checkpoint", std::exchange(checkpoint_seconds_, 0));
    bool stopped = stopping(device_);
    std::optional<Checkpoints::Saved> saved;
    if (speaks_) write(record);
    progress_->step(record);
    if (speaks_) live_report_.step();
    if (saves_ && (due(step, training_.save_every) || last || stopped)) {
      const double begin = shardlib::detail::steady_seconds();
      // Wait for the last checkpoint: what follows the training takes time and may fail, and must not lose it.
      saved = {step + 1, identity_, skipped_batches_, std::exchange(last_validation_, {})};
      saving_.save(*saved, last || stopped);
      checkpoint_seconds_ = shardlib::detail::steady_seconds() - begin;
    } else if (saves_) {
      saving_.poll();
    }
    if ((due(step, training_.sample_every) && !stopped) || last) {
      progress_->pause();
      if (!answers_.sample(step) && !last && !stopped) {
        stopped = true;  // the run resumes here, with the samples that are missing
        if (!saved) saved = {step + 1, identity_, skipped_batches_, std::exchange(last_validation_, {})};
        if (saves_) saving_.save(*saved, true);  // again, as the one under way may fail
      }
    }
    if (stopped && !last) progress_->message(stopped_by_signal(saves_));
    return last || !stopped;
  }

  /// A run without steps left to train: saves the model if no checkpoint has it yet, and samples from it.
  void use_model(std::int64_t first, bool found) {
    if (saves_ && !found)
      saving_.save({0, identity_}, true);  // a conversion: weights, and no steps
    else if (first > training_.steps)
      say(fmt::format("the checkpoint of step {} is used: --steps {} leaves nothing to train", first, training_.steps));
    else
      say(training_.steps == 1 ? "the one step is done" : fmt::format("all {} steps are done", training_.steps));
    answers_.sample(first - 1, 0, samples_of(*device_, directory_, first - 1, training_.prompt));
  }

  void say(const std::string& line) const {
    if (speaks_) print_console(line + "\n");
  }
  /// Prints above the live line of progress, if there is one.
  void message(const std::string& line) const { progress_ ? progress_->message(line) : say(line); }
  /// Throws Error if devices differ in values that should be the same on all.
  void check_replicas(const Record& record) const {
    const std::int64_t before = record.step + 1 - training_.check_replicas;
    const std::string when =
        fmt::format("after step {}{}", record.step,
                    before > 0 ? fmt::format(" (after step {} no device differed)", before - 1) : "");
    detail::check_replicas(*device_, program_.checkpoints.leaves(),
                           {{"step", static_cast<std::uint64_t>(record.step)},
                            {"seed", training_.seed},
                            {"loss", std::bit_cast<std::uint64_t>(record.loss)},
                            {"grad_norm", std::bit_cast<std::uint64_t>(record.grad_norm)}},
                           when);
  }
  /// The window that finds spikes must equal that of an undisturbed run.
  std::vector<Judge::AcceptedStep> records_of_window() const {
    if (!judge_.watches() || !directory_.exists()) return {};
    return shared_records(*device_, directory_, training_.spike_window);
  }
  /// Continues with the batches of `step` and later.
  void read_from(std::int64_t step) {
    batches_.seek(step, skipped_batches_);
    progress_ = speaks_ ? std::make_unique<Progress>(step, training_.steps) : std::make_unique<Progress>();
  }
  /// Loads an earlier checkpoint after a step that was not accepted. Returns the next step.
  std::int64_t go_back(std::int64_t step) {
    const bool distrusts = judge_.verdict() == Judge::StepVerdict::distrust_checkpoint;
    saving_.flush();
    const std::optional<Checkpoints::Saved> found = program_.checkpoints.load(distrusts ? resumed_at_ : INT64_MAX, {});
    if (!found)
      throw Error(
          fmt::format("step {}: {}; there is no checkpoint to go back to: start again with other settings, and "
                      "with --save-every for an earlier one",
                      step, judge_.why()));
    if (distrusts) {
      judge_.trust();
      program_.checkpoints.set_aside(resumed_at_);
      skipped_batches_ = found->skipped_batches;
    } else {
      judge_.rewinds(step, found->step);
      skipped_batches_ += step + 1 - found->step;
    }
    io::together(*device_, "", [&] {
      if (!speaks_) return;
      std::ranges::copy(directory_.go_back(found->step), std::back_inserter(events_of_next_));
      cut_metrics(metrics_, training_.metrics, found->step);
      if (events_) events_ = std::make_unique<TensorBoard>(directory_.tensorboard(), found->step);
    });
    judge_.begin(found->step, records_of_window(), false);
    last_validation_.reset();
    events_of_next_.push_back(judge_.event_of_return(step, found->step, resumed_at_));
    message(events_of_next_.back());
    read_from(found->step);
    return found->step;
  }
  bool accepts(const StepResult& result, std::int64_t step) {
    try {
      return judge_.accepts(result, step);
    } catch (const Error&) {
      saving_.flush();  // the checkpoint under way is good
      throw;
    }
  }
  Record train_step(std::int64_t step) {
    const double begin = shardlib::detail::steady_seconds();
    const std::vector<io::TokenBatch> parts = batches_.microbatches(step);
    const double ready = shardlib::detail::steady_seconds();
    Record record;
    record.step = step;
    record.learning_rate = lr_schedule_(step);
    if (trace_) trace_->before(step);
    std::optional<FindNan> guard;
    if (training_.find_nan) guard.emplace(device_);
    auto& stopwatch = shardlib::detail::program_state(device_).stopwatch;
    stopwatch.reset();
    bool asked = false;
    if (program_.begin_step) program_.begin_step();
    const auto accepted = [&](const StepResult& r) {
      asked = true;
      return accepts(r, step);
    };
    const StepResult result =
        program_.step({step, record.learning_rate, parts, accepted, histograms_.gradients_of(step)});
    if (!asked && training_.on_spike != "none")
      throw UsageError("--on-spike " + training_.on_spike +
                       ": this program does not check a step before it updates: it has to call run::Step::accepts");
    stopwatch.change(Stopwatch::rest);
    guard.reset();
    if (trace_) trace_->after(step);
    record.loss = result.loss;
    record.grad_norm = result.grad_norm;
    record.numbers = result.numbers;
    record.skipped = judge_.verdict() == Judge::StepVerdict::skipped;
    if (record.skipped) {
      events_of_next_.push_back(fmt::format("step {}: {}; its update is skipped", step, judge_.why()));
      message(events_of_next_.back());
    }
    if (judge_.verdict() == Judge::StepVerdict::accepted || record.skipped) record.events.swap(events_of_next_);
    note_seconds(record, ready - begin, stopwatch);
    record.tokens_per_second = static_cast<double>(training_.batch * training_.seq) / record.step_seconds;
    if (peak_ > 0) record.mfu = record.tokens_per_second * program_.flops_per_token / peak_;
    record.time = shardlib::detail::unix_seconds();
    record.memory_bytes =
        static_cast<std::int64_t>(reduce(device_, static_cast<double>(device_->pool()->stats().peak), Reduction::max));
    return record;
  }

  void write(const Record& record) {
    directory_.write(record);
    if (metrics_.is_open()) metrics_.write(record);
    if (events_) events_->write(record);
  }

  DevicePtr device_;
  const Training& training_;
  const Data& data_;
  const Program& program_;
  const std::string& configuration_;
  LrSchedule lr_schedule_;
  bool speaks_;
  RunDirectory directory_;
  bool saves_ = directory_.exists() && program_.checkpoints.save;  ///< checkpoints
  Answers answers_;
  JsonLines metrics_;
  std::unique_ptr<TensorBoard> events_;
  std::optional<StepTrace> trace_;
  RunIdentity identity_ = {};
  Batches batches_;
  Judge judge_;
  RunHistograms histograms_;
  Saving saving_;
  LiveReport live_report_;
  std::unique_ptr<Progress> progress_;
  std::vector<std::string> events_of_next_;  ///< events for the next record
  std::int64_t skipped_batches_ = 0;         ///< Checkpoints::Saved::skipped_batches
  std::int64_t resumed_at_ = 0;
  std::optional<double> last_validation_;
  double peak_ = 0;  ///< FLOP/s of all devices; 0 if they are not known
  double checkpoint_seconds_ = 0;
};

}  // namespace detail

SHARDLIB_INLINE void train(const DevicePtr& device, const Training& training, const Data& data,
                           const std::string& configuration, const Program& program) {
  if (!training.sample_only) detail::check_step(program);
  if (device->is_dry()) {
    device->local<Plan>() = detail::plan_step(device, training, program);
    return;
  }
  detail::check_settings(training);  // for programs that open no data by open_data
  detail::require_one_run(device, training, configuration, data);
  detail::check_validate(training, program);
  if (training.sample_only) return detail::answer_only(device, training, data, configuration, program);
  detail::check_checkpoints(training, program);
  detail::check_allowed(training, configuration);
  detail::check_metrics(device, training);
  detail::TrainingLoop(device, training, data, configuration, program).run();
}

}  // namespace shardlib::run
