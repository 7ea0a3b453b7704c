// --chat: a conversation between standard input and a run's model.
#pragma once

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "shardlib/io/agree.hpp"
#include "shardlib/run/chat.hpp"
#include "shardlib/run/impl/stop_on_signal.hpp"
#include "shardlib/run/training.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::run::detail {

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
    if (speaks) fmt::print("{}", piece), std::fflush(stdout);
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

}  // namespace shardlib::run::detail
