// Samples of a run's model, its answers to the questions of --evaluate, and --chat: a conversation on standard input.
#pragma once

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "shardlib/io/agree.hpp"
#include "shardlib/run/chat.hpp"
#include "shardlib/run/console.hpp"
#include "shardlib/run/evaluate.hpp"
#include "shardlib/run/impl/batches.hpp"
#include "shardlib/run/impl/run_identity.hpp"
#include "shardlib/run/impl/stop_on_signal.hpp"
#include "shardlib/run/run_directory.hpp"
#include "shardlib/run/training.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::run::detail {

/// Whether a signal asked any device to stop. Collective: the same answer on all devices.
inline bool stopping(const DevicePtr& device) {
  return reduce(device, stop_signal != 0 ? 1 : 0, Reduction::max) > 0;
}

/// The answers of one device's model. All members are collective; the first rank prints.
class Answers {
 public:
  /// The first rank gives the samples to `keep`.
  Answers(const DevicePtr& device, const Training& training, const Data& data, const Program& program,
          std::function<void(const Sample&)> keep)
      : device_(device), training_(training), data_(data), program_(program), keep_(std::move(keep)) {}

  /// Draws the samples after the step of this number, without the first `drawn`; -1 is before the first step. The run
  /// has the first `kept` of them already. Returns whether no signal has stopped them.
  bool sample(std::int64_t step, std::int64_t drawn = 0, std::int64_t kept = 0) {
    if (training_.sample.max_tokens == 0 || !program_.decode) return true;
    SampleOptions options = sample_options(training_);
    const auto show = [&](std::string_view piece) {
      if (speaks_) print_console(shardlib::detail::printable(piece));
    };
    bool stopped = false;
    const auto stop = [&] { return stopped = stopping(device_); };
    options.seed += static_cast<std::uint64_t>(drawn);
    for (std::int64_t i = drawn; i < training_.samples && !stopped; ++i, ++options.seed) {
      say(fmt::format("\nA sample after {} (temperature {}):\n", shardlib::detail::counted(step + 1, "step"),
                      options.temperature));
      const auto text =
          generate(*data_.tokenizer, training_.prompt, program_.context, program_.decode, options, show, stop);
      say(stopped ? "\nthe sample was stopped by a signal" : "\n");
      if (speaks_ && !stopped && i >= kept) keep_({step, training_.prompt, text});
    }
    return !stopped;
  }
  /// Asks the questions of --evaluate. An ending is one row on one of the devices that share the batch; the others have
  /// none.
  void evaluate() {
    if (data_.questions.empty()) return;
    if (stopping(device_)) return;
    const bool mine = BatchPlace(*device_, training_).index == 0;
    const io::TokenBatch none = io::detail::empty_rows(1, training_.seq);
    const Evaluation result = run::evaluate(
        data_.questions, *data_.tokenizer, training_.seq, sample_options(training_).begin,
        [&](const io::TokenBatch& row) { return program_.validate(mine ? row : none); },
        [this] { return stopping(device_); });
    if (result.questions < std::ssize(data_.questions)) return say("the evaluation was stopped by a signal");
    const auto share = [&](std::int64_t right) {
      return static_cast<double>(right) / static_cast<double>(result.questions);
    };
    say(fmt::format("evaluated {} of {}: acc {:.4f}, acc_norm {:.4f} (chance {:.4f})",
                    shardlib::detail::counted(result.questions, "question"), training_.evaluate, share(result.right),
                    share(result.right_normalized), result.chance));
  }

 private:
  void say(const std::string& line) const {
    if (speaks_) print_console(line + "\n");
  }

  DevicePtr device_;
  const Training& training_;
  const Data& data_;
  const Program& program_;
  std::function<void(const Sample&)> keep_;
  bool speaks_ = device_->rank() == 0;
};

/// The lines of standard input. A signal that asks the run to stop ends them.
class InputLines {
 public:
  /// Nothing at the end. A last line needs no newline.
  std::optional<std::string> next() {
    std::size_t end = 0;
    while ((end = text_.find('\n')) == std::string::npos && fill()) {
    }
    if (text_.empty() || stop_signal != 0) return std::nullopt;
    std::string line = text_.substr(0, end);
    text_.erase(0, end == std::string::npos ? end : end + 1);
    if (line.ends_with('\r')) line.pop_back();
    return line;
  }

 private:
  bool fill() {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    while (stop_signal == 0) {
      constexpr int milliseconds = 100;
      const int ready = ::poll(&input, 1, milliseconds);
      if (ready == 0 || (ready < 0 && errno == EINTR)) continue;
      std::array<char, 4096> piece{};
      const ssize_t count = ::read(STDIN_FILENO, piece.data(), piece.size());
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return false;
      text_.append(piece.data(), static_cast<std::size_t>(count));
      return true;
    }
    text_.clear();
    return false;
  }
  std::string text_;
};

/// Answers each line until /quit or the end of the input. The first rank reads and prints; all calls are collective.
inline void converse(const DevicePtr& device, const Training& training, const Data& data, const Program& program,
                     const std::function<bool()>& stop) {
  const bool speaks = device->rank() == 0, terminal = speaks && ::isatty(STDIN_FILENO) != 0;
  Chat chat(*data.tokenizer, turn_template(training.turns), program.context, data.vocabulary, program.decode,
            sample_options(training));
  const auto show = [&](std::string_view piece) {
    if (speaks) fmt::print("{}", shardlib::detail::printable(piece)), std::fflush(stdout);
  };
  const auto complain = [&](const std::string& what) {
    if (speaks) fmt::print(stderr, "error: {}\n", what);
  };
  if (terminal) show("/reset begins a new conversation, /quit ends the program\n");
  InputLines lines;
  while (true) {
    std::string mine;
    if (terminal) show("> ");
    if (speaks)
      if (const auto line = lines.next()) mine = "+" + *line;  // an empty text is the end
    const std::string line = io::gather_texts(*device, mine)[0];
    if (line.empty() || line == "+/quit") break;
    const std::string_view message = std::string_view(line).substr(1);
    if (message.find_first_not_of(" \t") == std::string_view::npos) continue;
    if (message == "/reset") {
      chat.reset();
    } else if (message.starts_with('/')) {
      complain(
          fmt::format("there is no command '{}', but /reset and /quit; a message that begins with / needs a space "
                      "before it",
                      message));
    } else {
      try {
        chat.answer(message, show, stop);
        show("\n");
        if (stop()) {
          show("stopped by a signal\n");
          break;
        }
      } catch (const UsageError& error) {
        complain(error.what());
      }
    }
  }
  if (terminal) show("\n");
}

/// --sample-only: answers from the run's newest checkpoint, and writes nothing.
inline void answer_only(const DevicePtr& device, const Training& training, const Data& data,
                        const std::string& configuration, const Program& program) {
  if (training.chat && (!program.decode || training.sample.max_tokens == 0))
    throw UsageError(program.decode ? "--chat with --max-tokens 0 has no answers: choose more tokens"
                                    : "--chat: this program cannot sample");
  if (training.chat && !data.questions.empty())
    throw UsageError("--chat and --evaluate do not go together: give one of them");
  if (data.questions.empty() && (!program.decode || training.sample.max_tokens == 0))
    throw UsageError(program.decode
                         ? "--max-tokens 0 leaves nothing to do: choose more tokens, or give --evaluate FILE.jsonl"
                         : "this program cannot sample: give --evaluate FILE.jsonl, which asks its model questions");
  const RunIdentity model = model_identity(training, data, configuration);
  const std::optional<Checkpoints::Saved> found =
      load_same_run(program.checkpoints, training, [&](const Checkpoints::Saved& saved) {
        return require_same_run(saved, model, training, false);
      }).saved;
  if (!found)
    throw UsageError(
        fmt::format("--run '{}' has no checkpoint to sample from: give the folder of a run that has saved one",
                    training.directory));
  const StopOnSignal stop;
  if (training.chat) return converse(device, training, data, program, [&] { return stopping(device); });
  Answers answers(device, training, data, program, [](const Sample&) {});
  answers.sample(found->step - 1);
  answers.evaluate();
}

}  // namespace shardlib::run::detail
