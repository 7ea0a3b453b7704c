// Settings of a training that contradict each other, or do not fit the data: they are found before devices start.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "shardlib/device/impl/launch_parts.hpp"
#include "shardlib/device/launch.hpp"
#include "shardlib/device/mesh_axes.hpp"
#include "shardlib/io/checkpoint/checkpoint.hpp"
#include "shardlib/io/data/token_files.hpp"
#include "shardlib/io/file.hpp"
#include "shardlib/io/tokenizer/tokenizer.hpp"
#include "shardlib/run/chat.hpp"
#include "shardlib/run/console.hpp"
#include "shardlib/run/evaluate.hpp"
#include "shardlib/run/sampling.hpp"
#include "shardlib/run/training.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::run {

namespace detail {

/// Says which options of a training have no effect together with which others.
inline void declare_without_effect(Options& o, const Training& t) {
  o.without_effect({"--steps"}, [&t](const Options&) {
    return t.epochs > 0 ? fmt::format("with --epochs {}, which sets the number of steps: give one of them", t.epochs)
                        : "";
  });
  const auto needs = [&o](const std::vector<std::string>& names, const char* option, const auto& there) {
    o.without_effect(names, [option, there](const Options&) {
      return there() ? "" : fmt::format("without {}: give that too, or leave it out", option);
    });
  };
  needs({"--decay-fraction"}, "--lr-schedule wsd", [&t] { return t.lr_schedule == "wsd"; });
  o.without_effect({"--decay-steps", "--final-learning-rate"}, [&t](const Options&) {
    return t.lr_schedule == "constant" ? "with --lr-schedule constant, which does not decay: leave it out" : "";
  });
  needs({"--spike-window", "--spike-deviations"}, "--on-spike", [&t] { return t.on_spike != "none"; });
  needs({"--trace-steps", "--trace-from"}, "--trace", [&t] { return t.trace; });
  o.without_effect({"--step-graph", "--find-nan"}, [&t](const Options&) {
    return t.plan || t.sample_only || !t.graph.empty() ? "in a call that does not train: leave it out" : "";
  });
  o.without_effect({"--sample-every", "--top-k", "--top-p", "--stop", "--samples", "--temperature"},
                   [&t](const Options&) {
                     return t.sample.max_tokens == 0
                                ? "with --max-tokens 0, which draws no samples: choose more tokens, or leave it out"
                                : "";
                   });
  o.without_effect({"--samples"}, [&t](const Options&) {
    return t.chat ? "with --chat, which answers each message once: leave it out" : "";
  });
  o.without_effect({"--prompt"}, [&t](const Options&) {
    return t.chat && t.prompt != "-" ? "with --chat, which reads its messages from the standard input: leave it out"
                                     : "";
  });
  o.without_effect({"--top-k", "--top-p"}, [&t](const Options&) {
    return t.sample.temperature == 0 ? "with --temperature 0, which takes the likeliest token: leave it out" : "";
  });
  needs({"--turns"}, "--chat", [&t] { return t.chat; });
  needs({"--validation-batches", "--keep-best"}, "--validate-every N", [&t] { return t.validate_every > 0; });
  needs({"--resume", "--allow-change", "--save-every", "--keep", "--keep-every", "--keep-best"}, "--run DIR",
        [&t] { return !t.directory.empty(); });
}

/// The error of a training without data.
inline std::string no_data(const Training& t) {
  const bool has_run = !t.directory.empty() && io::file_exists(t.directory) &&
                       !io::list_checkpoints(t.directory + "/checkpoints").empty();
  return "no data to train on: give --data PATH or --stream DIR (see --help)" +
         (has_run ? fmt::format("; shardlib-sample {} prints samples of the run", t.directory) : std::string());
}

/// Notes that the devices are threads, where they are far more than the cores: such a run looks as if it hangs.
inline void note_threads(const Training& t) {
  const int devices = device_count(parse_mesh(t.mesh)), cores = shardlib::detail::threads_per_device(1);
  if (under_mpi() || devices <= 4 * cores) return;
  print_console(
      fmt::format("note: the {} devices of mesh {} are threads, which take turns on {}: a step takes long; --plan "
                  "describes it without running it\n",
                  devices, t.mesh, shardlib::detail::counted(cores, "core")));
}

inline void check_begin(const char* option, std::int64_t id, std::int64_t vocabulary) {
  if (id >= vocabulary)
    throw UsageError(
        fmt::format("{} {} is not a token of the model: its vocabulary ends at {}", option, id, vocabulary - 1));
}

/// Throws UsageError for options of a conversation that do not go together.
inline void check_conversation(const Training& t) {
  if (t.chat && !t.sample_only)
    throw UsageError(
        "--chat talks with a run's model and trains nothing: use shardlib-sample RUN --chat, or give "
        "--sample-only too");
  if (t.chat) static_cast<void>(turn_template(t.turns));
  if (t.chat && t.prompt == "-")
    throw UsageError(
        "--prompt - reads the standard input, from which --chat takes its messages: leave one of them out");
}

/// Throws UsageError for settings that contradict each other, before data are read and devices start.
inline void check_settings(const Training& t) {
  check_conversation(t);
  static_cast<void>(lr_schedule(t));
  if (t.histogram_every > 0 && !t.tensorboard)
    throw UsageError("--histogram-every writes TensorBoard events: give --tensorboard too, or leave it out");
  if (!t.directory.empty()) return;
  if (t.sample_only) throw UsageError("--sample-only reads the folder of a run: give --run DIR too");
  for (const auto& [name, given] : {std::pair("--trace", t.trace), std::pair("--tensorboard", t.tensorboard),
                                    std::pair("--step-graph", t.draw_step)})
    if (given) throw UsageError(std::string(name) + " writes into the folder of a run: give --run DIR too");
  if (t.on_spike == "rewind")
    throw UsageError("--on-spike rewind goes back to a checkpoint, and without --run DIR there is none: give it too");
}

/// Throws Error for a program that computes no step.
inline void check_step(const Program& program) {
  if (!program.step)
    throw Error(
        "train: Program::step is empty, so there is nothing to train; give it a function that computes a step, "
        "program.step = [&](const run::Step& step) -> run::StepResult { ... }");
}

/// Throws UsageError for options that need a loss, if the program computes none without a step.
inline void check_validate(const Training& t, const Program& program) {
  if (program.validate) return;
  const std::string why = " computes a loss, and this program's Program::validate is empty: leave it out";
  if (t.validate_every > 0) throw UsageError(fmt::format("--validate-every {}{}", t.validate_every, why));
  if (!t.evaluate.empty()) throw UsageError("--evaluate " + t.evaluate + why);
}

/// Throws UsageError for options that read a program's checkpoints, or the leaves of its state, if it gives none.
inline void check_checkpoints(const Training& t, const Program& program) {
  if (!program.checkpoints.save != !program.checkpoints.load)
    throw Error("Program::checkpoints has one of save and load: set both, or neither");
  if (t.sample_only && !program.checkpoints.load)
    throw UsageError("--sample-only reads a checkpoint, and this program saves none: leave it out");
  if (t.on_spike == "rewind" && !program.checkpoints.load)
    throw UsageError("--on-spike rewind goes back to a checkpoint, and this program saves none: choose another action");
  if (program.checkpoints.leaves) return;
  for (const auto& [option, every] :
       {std::pair("--histogram-every", t.histogram_every), std::pair("--check-replicas", t.check_replicas)})
    if (every > 0)
      throw UsageError(
          fmt::format("{} {} reads the leaves of the state, and this program names none: leave it out, or "
                      "set Program::checkpoints, as by run::program_of or run::checkpoints_of",
                      option, every));
}

/// Sampling comes after training, which is too late to find that the model cannot take the prompt.
inline void check_prompt(const Training& t, const Data& data) {
  const SampleOptions options = sample_options(t);
  check_begin("--sample-begin", t.sample_begin, data.vocabulary);
  check_begin("--row-begin", t.row_begin, data.vocabulary);
  if (options.max_tokens == 0) return;
  if (std::ranges::any_of(options.stops, &std::string::empty))
    throw UsageError("--stop is empty: give a text, or leave the option out");
  const std::vector<std::uint32_t> ids = data.tokenizer->encode(t.prompt);
  if (ids.empty() && !options.begin)
    throw UsageError("--prompt is empty, and this model needs a first token: give a text, or --max-tokens 0");
  for (const std::uint32_t id : ids)
    if (static_cast<std::int64_t>(id) >= data.vocabulary)
      throw UsageError(fmt::format(
          "--prompt has the token {}, but the model's vocabulary ends at {}: give another prompt, {}, or "
          "--max-tokens 0",
          id, data.vocabulary - 1,
          t.initial_weights.empty() && !t.sample_only ? "a larger --vocabulary" : "the model's --tokenizer"));
}

/// The same holds for questions that do not fit a row.
inline void check_questions(const Training& t, const Data& data) {
  for (std::size_t i = 0; i < data.questions.size(); ++i)
    for (const std::string& ending : data.questions[i].endings) try {
        const EndingRow row =
            row_of(*data.tokenizer, data.questions[i].context, ending, t.seq, sample_options(t).begin);
        for (const std::int32_t id : row.row.targets)
          if (id >= data.vocabulary)
            throw UsageError(
                fmt::format("it has the token {}, but the model's vocabulary ends at {}", id, data.vocabulary - 1));
      } catch (const UsageError& error) {
        throw UsageError(fmt::format("--evaluate {}: question {}: {}", t.evaluate, i + 1, error.what()));
      }
}

/// For another tokenizer than the one that made them, the ids of a data set mean something else. `tokenize` stores the
/// tokenizer's name.
inline void check_tokenizer(const std::string& path, const std::string& chosen, const io::Tokenizer& tokenizer) {
  const auto maker = io::made_by(path);
  if (!maker || maker->fingerprint == tokenizer.fingerprint()) return;
  throw UsageError(
      fmt::format("'{}' was made with the tokenizer {} (fingerprint {:.12}), but --tokenizer {} is {} "
                  "(fingerprint {:.12}): give the tokenizer that made it, or tokenize its texts again",
                  path, maker->name, maker->fingerprint, chosen, tokenizer.name(), tokenizer.fingerprint()));
}

}  // namespace detail

}  // namespace shardlib::run
