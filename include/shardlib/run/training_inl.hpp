// The definitions of run/training.hpp.
#pragma once

#include "shardlib/run/training.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <utility>

#include "shardlib/io/prefetch.hpp"
#include "shardlib/io/stream.hpp"
#include "shardlib/io/token_files.hpp"
#include "shardlib/launch.hpp"
#include "shardlib/run/peak.hpp"
#include "shardlib/run/plan.hpp"
#include "shardlib/run/progress.hpp"
#include "shardlib/run/report.hpp"
#include "shardlib/run/run_directory.hpp"
#include "shardlib/run/step_trace.hpp"
#include "shardlib/run/tensorboard.hpp"
#include "shardlib/schedule.hpp"

namespace shardlib::run {

SHARDLIB_INLINE void declare(Options& o, Training& t) {
  o.group("data");
  o.add("--data", t.data, "tokens: a text file, a flat-tokens data set, llm.c's or nanoGPT's .bin files",
        value_name("PATH"));
  o.add("--validation-data", t.validation_data, "as --data (default: the validation split of --data, if it has one)",
        value_name("PATH"));
  o.add("--stream", t.stream, "train from the raw texts of this folder instead; a resumed run does not go on exactly",
        value_name("DIR"));
  o.add("--tokenizer", t.tokenizer, "\"bytes\", or a GPT-2 vocabulary: r50k_base.tiktoken, or a folder with vocab.bpe",
        value_name("FILE"));
  o.add("--rows", t.rows, "what a row of a batch holds: the next tokens, or one document, filled up",
        one_of({"packed", "padded", "stories"}));
  o.add("--batch", t.batch, "sequences a step, over all devices and microbatches", size());
  o.add("--seq", t.seq, "tokens a sequence", size());

  o.group("training");
  o.add("--mesh", t.mesh,
        "devices, as in d=4,t=2: threads of this process, or MPI ranks under mpirun "
        "(default: all ranks on d)",
        value_name("AXES"));
  o.add("--steps", t.steps, "training steps", size(0));
  o.add("--microbatches", t.microbatches, "parts of a batch whose gradients are accumulated", size());
  o.add("--seed", t.seed, "of weights, order of the data, dropout and samples");
  o.add("--learning-rate", t.learning_rate, "peak learning rate", above(0));
  o.add("--warmup", t.warmup, "steps of linear warmup; a cosine decay follows", size(0));
  o.add("--final-learning-rate", t.final_learning_rate, "where the decay ends, as a fraction of the peak",
        between(0, 1));
  o.add("--weight-decay", t.weight_decay, "AdamW's decay", at_least(0));
  o.add("--beta1", t.beta1, "AdamW's decay of the first moment", between(0, 1));
  o.add("--beta2", t.beta2, "AdamW's decay of the second moment", between(0, 1));
  o.add("--clip", t.clip, "largest global gradient norm (0: no clipping)", at_least(0));

  o.group("run");
  o.add("--run", t.directory,
        "folder of the run: configuration, metrics, checkpoints, report; a run that is there goes on",
        value_name("DIR") | command_line_only());
  o.flag("--resume", t.resume, "go on from the run's newest whole checkpoint", command_line_only());
  o.add("--save-every", t.save_every, "steps between checkpoints (0: at the end alone)", size(0));
  o.add("--keep", t.keep, "checkpoints to keep", size());
  o.add("--validate-every", t.validate_every, "steps between validations (0: none)", size(0));
  o.add("--validation-batches", t.validation_batches, "batches of a validation, at most", size());
  o.add("--metrics", t.metrics, "file for one JSON object a step, besides the run's", value_name("FILE") | command_line_only());
  o.flag("--trace", t.trace, "write trace.json into the run's folder: every op and collective of five steps");
  o.flag("--plan", t.plan, "no training: what a step takes on the mesh, which need not be there", command_line_only());
  o.add("--graph", t.graph, "no training: draws one layer, forward and backward, with specs and collectives",
        value_name("FILE.svg") | command_line_only());
  o.flag("--tensorboard", t.tensorboard, "write TensorBoard events into the run's folder");

  o.group("sampling");
  o.add("--sample-every", t.sample_every, "steps between samples (0: at the end alone)", size(0));
  o.add("--max-tokens", t.sample.max_tokens, "tokens to sample (0: no sample)", size(0));
  o.add("--prompt", t.prompt, "what the sample continues");
  o.add("--top-k", t.sample.top_k, "draw among the k likeliest tokens only (0: all)", size(0));
  o.add("--temperature", t.sample.temperature, "of the draw; 0 takes the likeliest token", at_least(0));
}

SHARDLIB_INLINE std::vector<AxisSize> chosen_mesh(const Training& training, std::string_view axes) {
  std::vector<std::string> names;
  for (std::size_t begin = 0; begin < axes.size(); begin = axes.find(' ', begin) + 1) {
    names.emplace_back(axes.substr(begin, axes.find(' ', begin) - begin));
    if (axes.find(' ', begin) == std::string_view::npos) break;
  }
  std::vector<AxisSize> mesh;
  if (training.mesh.empty()) {
    for (const std::string& name : names) mesh.push_back({name, name == "d" ? world_size() : 1});
    return mesh;
  }
  mesh = parse_mesh(training.mesh);
  if (!std::ranges::equal(mesh, names, {}, &AxisSize::name)) {
    std::string example;
    for (const std::string& name : names) example += example.empty() ? name + "=4" : "," + name + "=2";
    throw UsageError("--mesh " + training.mesh + ": this program's mesh has the axes " + std::string(axes) +
                     ", in this order, as in --mesh " + example);
  }
  return mesh;
}

SHARDLIB_INLINE void must_divide(const std::vector<AxisSize>& mesh, std::string_view option, std::int64_t size,
                                 std::string_view axes) {
  std::int64_t parts = 1;
  for (const AxisSize& axis : mesh)
    if (axes.find(axis.name) != std::string_view::npos) parts *= axis.size;
  if (size % parts == 0) return;
  std::string product(axes);
  std::ranges::replace(product, ' ', '*');
  throw UsageError(fmt::format("{} {} does not divide over {} = {} (mesh {}): choose a multiple of {}", option, size,
                               product, parts, to_string(mesh), parts));
}

SHARDLIB_INLINE Data open_data(const Training& t, std::int64_t vocabulary) {
  const bool dry = t.plan || !t.graph.empty();
  if (!dry && t.data.empty() == t.stream.empty())
    throw UsageError("what to train on: give --data PATH, or --stream DIR, and not both (see --help)");
  Data data;
  data.tokenizer = io::load_tokenizer(t.tokenizer);
  data.vocabulary = vocabulary > 0 ? vocabulary : static_cast<std::int64_t>(data.tokenizer->vocabulary_size());
  if (dry) return data;
  const io::TextOptions text{data.tokenizer, false};
  io::LoaderOptions rows;
  rows.batch = t.batch;
  rows.length = t.seq;
  rows.seed = t.seed;
  rows.vocabulary = static_cast<std::uint32_t>(data.vocabulary);
  rows.rows = t.rows == "packed" ? io::Rows::packed : t.rows == "padded" ? io::Rows::padded : io::Rows::stories;
  if (t.stream.empty()) {
    data.train = std::make_shared<io::Loader>(io::open_tokens(t.data, io::Split::train, text), rows);
    if (rows.rows == io::Rows::packed && data.train->source().tokens() < t.seq)
      throw UsageError(fmt::format("'{}' has {} tokens, fewer than a row of --seq {}: choose a longer text or shorter rows",
                                   t.data, data.train->source().tokens(), t.seq));
  } else if (rows.rows != io::Rows::packed) {
    throw UsageError("--stream has packed rows only: give --data for --rows " + t.rows);
  }
  if (t.validate_every > 0) {
    if (t.validation_data.empty() && t.data.empty())
      throw UsageError("--validate-every needs --validation-data where training streams texts");
    rows.shuffle = false;
    const bool own = t.validation_data.empty();
    const auto source = io::open_tokens(own ? t.data : t.validation_data,
                                        own ? io::Split::validation : io::Split::train, text);
    data.validation = std::make_shared<io::Loader>(source, rows);
  }
  return data;
}

SHARDLIB_INLINE void batch_must_divide(const std::vector<AxisSize>& mesh, const Training& t) {
  if (t.batch % t.microbatches != 0)
    throw UsageError(fmt::format("--batch {} does not divide into --microbatches {}: choose a multiple of {}", t.batch,
                                 t.microbatches, t.microbatches));
  const std::string split = t.microbatches == 1 ? "" : fmt::format("{} / --microbatches {} =", t.batch, t.microbatches);
  must_divide(mesh, "--batch" + (split.empty() ? "" : " " + split), t.batch / t.microbatches, "d");
}

SHARDLIB_INLINE void check_finite(const StepResult& result, std::int64_t step) {
  if (std::isfinite(result.loss) && std::isfinite(result.grad_norm)) return;
  throw Error(
      fmt::format("step {}: loss {} and gradient norm {} are not finite; lower --learning-rate, or look at the "
                  "data of this step. The last checkpoint is untouched",
                  step, result.loss, result.grad_norm));
}

namespace detail {

inline std::atomic<int> stop_signal = 0;

/// While it lives, the first SIGTERM or SIGINT asks the run to stop after its step; the second one kills as usual.
class StopOnSignal {
 public:
  StopOnSignal() {
    stop_signal = 0;
    for (const int signal : {SIGTERM, SIGINT})
      std::signal(signal, [](int s) {
        stop_signal = s;
        std::signal(s, SIG_DFL);
      });
  }
  StopOnSignal(const StopOnSignal&) = delete;
  StopOnSignal& operator=(const StopOnSignal&) = delete;
  ~StopOnSignal() {
    for (const int signal : {SIGTERM, SIGINT}) std::signal(signal, SIG_DFL);
  }
};

/// The reduction of one number of each device, everywhere the same.
inline double reduce(const std::shared_ptr<Device>& device, double value, Reduction op) {
  if (device->count() == 1) return value;
  std::vector<std::string_view> axes;
  for (const AxisSize& axis : device->axes()) axes.push_back(axis.name);
  Buffer send = device->pool()->allocate(sizeof(double)), received = device->pool()->allocate(sizeof(double));
  *send.as<double>() = value;
  device->group(axes).all_reduce(send, received, DType::f64, op).wait();
  return *received.as<double>();
}

/// One run on one device.
class Loop {
 public:
  Loop(const std::shared_ptr<Device>& device, const Training& training, const Data& data,
       const std::string& configuration, const Program& program)
      : device_(device),
        training_(training),
        data_(data),
        program_(program),
        speaks_(device->index() == 0),
        directory_(training.directory.empty()
                       ? RunDirectory()
                       : RunDirectory(training.directory, configuration,
                                      training.resume ? Resume::automatic : Resume::never, speaks_)) {}

  void run() {
    if (training_.trace && !directory_.exists())
      throw UsageError("--trace writes into the folder of a run: give --run DIR too");
    std::optional<Checkpoints::Loaded> found;
    if (directory_.exists() && training_.resume) found = program_.checkpoints.load();
    const std::int64_t first = found ? found->step : 0;
    for (const std::string& sentence : directory_.begin(first)) say(sentence);
    if (found) say(fmt::format("going on from step {} of {}", first, training_.steps));
    if (found && found->data != identity())
      say("note: the data, or the options that cut them into batches, are not those of the checkpoint");
    if (speaks_ && !training_.metrics.empty())
      metrics_ = JsonLines(training_.metrics, JsonLines::Mode::overwrite, "check --metrics");
    if (speaks_ && directory_.exists() && training_.tensorboard)
      events_ = std::make_unique<TensorBoard>(directory_.tensorboard(), first);
    describe();
    // Devices that are threads of this process share its cores; ranks of one machine measure theirs together.
    peak_ = reduce(device_,
                   under_mpi() ? measured_peak_flops(device_->exec().threads)
                   : speaks_   ? measured_peak_flops()
                               : 0.0,
                   Reduction::sum);
    const std::int64_t parts = training_.microbatches;
    io::Prefetcher batches(reader(), first * parts);
    std::unique_ptr<Progress> progress =
        speaks_ ? std::make_unique<Progress>(first, training_.steps) : std::make_unique<Progress>();
    // A run's first step is not typical: memory comes from the system.
    constexpr std::int64_t traced_steps = 5;
    if (training_.trace)
      trace_.emplace(device_, directory_.trace(), std::min(first + 1, training_.steps - 1), traced_steps);
    const StopOnSignal stop;
    for (std::int64_t step = first; step < training_.steps; ++step) {
      const bool last = step + 1 == training_.steps;
      Record record = train_step(batches, step);
      if (due(step, training_.validate_every) || (last && training_.validate_every > 0))
        record.validation_loss = validation_loss();
      const bool stopping = reduce(device_, stop_signal != 0 ? 1 : 0, Reduction::max) > 0;
      if (speaks_) write(record);
      progress->step(record);
      if (directory_.exists() && (due(step, training_.save_every) || last || stopping)) {
        directory_.sync();
        program_.checkpoints.save(step + 1, identity());
      } else if (directory_.exists()) {
        program_.checkpoints.poll();
      }
      if (stopping && !last) {
        progress->message(directory_.exists() ? "stopped by a signal; the same command goes on from here"
                                              : "stopped by a signal; without --run nothing was kept");
        break;
      }
      if (due(step, training_.sample_every) || last) {
        progress->pause();
        sample(step);
      }
    }
    if (trace_) {
      trace_->finish();
      say("trace: " + directory_.trace());
    }
    if (first >= training_.steps) {
      if (directory_.exists() && !found)
        program_.checkpoints.save(0, identity());  // a conversion: weights, and no steps
      else
        say(fmt::format("all {} steps are done", training_.steps));
      sample(first - 1);
    }
    if (directory_.exists()) program_.checkpoints.flush();
    progress->finish();
    if (speaks_ && directory_.exists() && first < training_.steps) {
      write_report({directory_.path()}, directory_.report());
      say("report: " + directory_.report());
    }
  }

 private:
  std::string identity() const { return data_.train ? fmt::format("{:016x}", data_.train->identity()) : "stream"; }
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  static bool due(std::int64_t step, std::int64_t every) { return every > 0 && (step + 1) % every == 0; }
  void say(const std::string& line) const {
    if (speaks_) fmt::print("{}\n", line);
    std::fflush(stdout);
  }
  void describe() const {
    const std::string data = data_.train ? fmt::format("{} tokens of data, seen {:.2f} times",
                                                       data_.train->source().tokens(), data_.train->epochs(training_.steps))
                                         : "texts of " + training_.stream;
    say(fmt::format("{} parameters, mesh {}, {} tokens a step, {}", program_.parameters, to_string(device_->axes()),
                    training_.batch * training_.seq, data));
  }
  /// This device's rows of one of `parts` parts of a batch.
  io::TokenBatch rows(const io::Loader& loader, std::int64_t step, std::int64_t part, std::int64_t parts) const {
    const std::int64_t size = training_.batch / parts, mine = size / device_->size("d");
    return loader.rows(step, part * size + device_->coordinate("d") * mine, mine);
  }
  /// Microbatches of training, numbered through.
  io::Prefetcher::Make reader() const {
    const std::int64_t parts = training_.microbatches;
    if (data_.train)
      return [this, parts](std::int64_t i) { return rows(*data_.train, i / parts, i % parts, parts); };
    const std::int64_t size = training_.batch / parts, mine = size / device_->size("d");
    const auto stream = std::make_shared<io::TextStream>(
        training_.stream,
        io::StreamOptions{size, training_.seq, training_.seed, io::TextOptions{data_.tokenizer, false},
                          static_cast<std::uint32_t>(data_.vocabulary)},
        device_->coordinate("d") * mine, mine);
    return [stream](std::int64_t) { return stream->next(); };
  }

  Record train_step(io::Prefetcher& batches, std::int64_t step) {
    const double begin = now();
    std::vector<io::TokenBatch> parts;
    for (std::int64_t i = 0; i < training_.microbatches; ++i)
      parts.push_back(batches.get(step * training_.microbatches + i));
    const double ready = now();
    Record record;
    record.step = step;
    record.learning_rate =
        warmup_cosine(step, training_.steps, training_.warmup, training_.learning_rate, training_.final_learning_rate);
    if (trace_) trace_->before(step);
    const StepResult result = program_.step(parts, step, record.learning_rate);
    const std::optional<double> communication = trace_ ? trace_->after(step) : std::nullopt;
    const double end = now();
    record.loss = result.loss;
    record.grad_norm = result.grad_norm;
    record.step_seconds = end - begin;
    record.tokens_per_second = static_cast<double>(training_.batch * training_.seq) / record.step_seconds;
    record.mfu = record.tokens_per_second * program_.flops_per_token / peak_;
    record.memory_bytes =
        static_cast<std::int64_t>(reduce(device_, static_cast<double>(device_->pool()->stats().peak), Reduction::max));
    record.seconds = {{"data", ready - begin}, {"step", end - ready - communication.value_or(0)}};
    if (communication) record.seconds.emplace_back("communication", *communication);
    return record;
  }

  double validation_loss() const {
    const io::Loader& loader = *data_.validation;
    const std::int64_t whole = loader.source().tokens() / (training_.batch * training_.seq);
    const std::int64_t batches = std::max<std::int64_t>(1, std::min(training_.validation_batches, whole));
    double total = 0;
    for (std::int64_t i = 0; i < batches; ++i) total += program_.validate(rows(loader, i, 0, 1));
    return total / static_cast<double>(batches);
  }

  void sample(std::int64_t step) {
    if (training_.sample.max_tokens == 0 || !program_.decode) return;
    SampleOptions options = training_.sample;
    options.seed = training_.seed;
    if (training_.rows == "stories") options.begin.reset();
    say(fmt::format("\nA sample after step {} (temperature {}):\n", step + 1, options.temperature));
    const auto show = [&](std::string_view piece) {
      if (!speaks_) return;
      fmt::print("{}", piece);
      std::fflush(stdout);
    };
    const std::string text =
        generate(*data_.tokenizer, training_.prompt, program_.context, program_.decode, options, show);
    say("\n");
    if (speaks_) directory_.write(Sample{step, training_.prompt, text});
  }

  void write(const Record& record) {
    directory_.write(record);
    if (metrics_.is_open()) metrics_.write(record);
    if (events_) events_->write(record);
  }

  std::shared_ptr<Device> device_;
  const Training& training_;
  const Data& data_;
  const Program& program_;
  bool speaks_;
  RunDirectory directory_;
  JsonLines metrics_;
  std::unique_ptr<TensorBoard> events_;
  std::optional<StepTrace> trace_;
  double peak_ = 0;
};

/// What `train` reports in a dry run: one step, counted.
inline Plan plan_step(const std::shared_ptr<Device>& device, const Training& t, const Program& program) {
  const std::int64_t rows = t.batch / t.microbatches / device->size("d");
  const std::vector parts(static_cast<std::size_t>(t.microbatches), io::detail::empty_rows(rows, t.seq));
  Plan plan = count_step(device, [&] { program.step(parts, 0, t.learning_rate); });
  plan.parameters = program.parameters;
  plan.weights = plan.gradients = program.weight_bytes;  // their types are dual: blocks of the same sizes
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
  detail::Loop(device, training, data, configuration, program).run();
}

}  // namespace shardlib::run
