// The progress line on a terminal and elsewhere, durations, the measured peak.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <shardlib/run/peak.hpp>
#include <shardlib/run/progress.hpp>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "support.hpp"

using namespace shardlib;
using run::Progress;
using run::Record;
using run::Terminal;

namespace {

/// Progress over 100 steps into a text, one second a step.
struct Shown {
  explicit Shown(Terminal terminal, std::int64_t first = 0)
      : progress(std::make_unique<Progress>(first, 100, out, terminal, [this] { return now; })) {}
  void step(std::int64_t i, std::optional<double> validation = {}, std::optional<double> mfu = {}) {
    now += 1;
    progress->step({.step = i,
                    .loss = 3.25,
                    .learning_rate = 3e-4,
                    .grad_norm = 1.5,
                    .tokens_per_second = 12345,
                    .step_seconds = 1,
                    .mfu = mfu,
                    .validation_loss = validation});
  }
  std::string take() {
    std::string text = out.str();
    out.str("");
    return text;
  }
  std::ostringstream out;
  double now = 0;
  std::unique_ptr<Progress> progress;
};

/// The lines that a terminal shows after `text`; the last one is being drawn.
std::vector<std::string> screen(const std::string& text) {
  std::vector<std::string> lines{""};
  std::size_t column = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\n') {
      lines.emplace_back();
      column = 0;
    } else if (text[i] == '\r') {
      column = 0;
    } else if (text.compare(i, 3, "\x1b[K") == 0) {
      lines.back().resize(column);
      i += 2;
    } else if (text[i] == '\x1b') {
      i = text.find('m', i);
    } else {
      lines.back().resize(std::max(lines.back().size(), column + 1), ' ');
      lines.back()[column++] = text[i];
    }
  }
  return lines;
}

const Terminal file{}, wide{.live = true, .color = false, .width = 200},
    colored{.live = true, .color = true, .width = 200};

}  // namespace

TEST_CASE("progress: plain lines where there is no terminal", "[run]") {
  Shown shown(file);
  std::string expected;
  for (int i = 0; i < 100; ++i) shown.step(i);
  const std::string text = shown.take();
  CHECK(text.substr(0, text.find('\n') + 1) ==
        "step     0/100  loss 3.2500  lr 3.00e-04  grad norm  1.500    12345 tokens/s  99 s left\n");
  CHECK(std::count(text.begin(), text.end(), '\n') == 11);
  CHECK(text.ends_with("step    99/100  loss 3.2500  lr 3.00e-04  grad norm  1.500    12345 tokens/s   0 s left\n"));
  CHECK(text.find('\x1b') == std::string::npos);
  CHECK(text.find('\r') == std::string::npos);
  shown.progress->finish();
  CHECK(shown.take().empty());
}

TEST_CASE("progress: validation and utilization in 100 columns, a resumed run's time left", "[run]") {
  Shown shown(file, 90);
  shown.step(90, {}, 0.414);
  CHECK(shown.take() ==
        "step    90/100  loss 3.2500  lr 3.00e-04  grad norm  1.500    12345 tokens/s  MFU 41 %   9 s left\n");
  shown.step(93, 3.5);
  CHECK(shown.take() ==
        "step    93/100  loss 3.2500  validation loss 3.5000  grad norm  1.500    12345 tokens/s   6 s left\n");
}

TEST_CASE("progress: a stopped run's last step is shown", "[run]") {
  Shown shown(file);
  shown.step(0);
  shown.step(4);
  shown.take();
  shown.progress->finish();
  CHECK(shown.take().starts_with("step     4/100  loss 3.2500"));
}

TEST_CASE("progress: one live line on a terminal", "[run]") {
  Shown shown(wide);
  for (int i = 0; i < 50; ++i) shown.step(i);
  std::string text = shown.take();
  CHECK(text.find('\n') == std::string::npos);
  CHECK(screen(text) == std::vector<std::string>{"step    49/100  [==========>         ]  50 %  loss 3.2500  lr "
                                                 "3.00e-04  grad norm  1.500    12345 tokens/s  50 s left"});
  CHECK(text.find("\x1b[3") == std::string::npos);

  shown.progress->message("saved\nverified");
  text += shown.take();
  CHECK(screen(text) == std::vector<std::string>{"saved", "verified",
                                                 "step    49/100  [==========>         ]  50 %  loss 3.2500  lr "
                                                 "3.00e-04  grad norm  1.500    12345 tokens/s  50 s left"});

  shown.progress->pause();
  text += shown.take() + "a sample\n";
  shown.progress->message("more");
  shown.step(50, 4.0);
  shown.step(51);
  shown.progress->finish();
  text += shown.take();
  const std::vector<std::string> lines = screen(text);
  REQUIRE(lines.size() == 7);
  CHECK(lines[2] == "a sample");
  CHECK(lines[3] == "more");
  CHECK(lines[4].starts_with("step    50/100  loss 3.2500  validation loss 4.0000"));
  CHECK(lines[5].starts_with("step    51/100  loss 3.2500  lr"));
  CHECK(lines[6].empty());
}

TEST_CASE("progress: a log has the plain lines, whatever the terminal shows", "[run]") {
  std::string logs[2];
  for (int live = 0; live < 2; ++live) {
    std::ostringstream out;
    Progress progress(
        0, 25, out, live != 0 ? colored : file, [] { return 0.0; },
        [&log = logs[live]](std::string_view text) { log += text; });
    for (int i = 0; i < 24; ++i)
      progress.step({.step = i, .loss = 1, .validation_loss = i == 13 ? std::optional(2.0) : std::nullopt});
    progress.message("stopped");
    progress.finish();
    if (live == 0) CHECK(logs[0] == out.str());
  }
  CHECK(logs[0] == logs[1]);
  CHECK(std::count(logs[0].begin(), logs[0].end(), '\n') == 6);
}

TEST_CASE("progress: speed and time left are smoothed, and count what is between steps", "[run]") {
  std::ostringstream out;
  double now = 0;
  Progress progress(0, 1000, out, file, [&] { return now; });
  const auto step = [&](std::int64_t i, double seconds, double between) {
    out.str("");
    now += seconds + between;
    progress.step({.step = i, .tokens_per_second = 1000 / seconds, .step_seconds = seconds});
    const std::string text = out.str();
    return text.substr(std::min(text.find("grad"), text.size()));
  };
  CHECK(step(0, 10, 0) == "grad norm  0.000      100 tokens/s  2 h 46 min left\n");  // the first step is slow
  for (int i = 1; i < 10; ++i) step(i, 1, 0);
  CHECK(step(10, 1, 0) == "grad norm  0.000     1000 tokens/s  16 min left\n");
  for (int i = 11; i < 200; ++i) step(i, 1, i % 10 == 0 ? 5 : 0);
  CHECK(step(200, 1, 0) == "grad norm  0.000     1000 tokens/s  19 min left\n");  // 5 seconds after each tenth step
}

TEST_CASE("progress: drawn ten times a second at most, and color only where it is wanted", "[run]") {
  Shown shown(colored);
  shown.step(0);
  CHECK(shown.take().find("\x1b[36mstep ") != std::string::npos);
  shown.now -= 0.95;
  shown.step(1);
  CHECK(shown.take().empty());
  shown.step(99);
  CHECK_FALSE(shown.take().empty());
  shown.progress.reset();
  const std::string end = shown.take();
  CHECK(end.ends_with("left\n"));
  CHECK(end.find("\x1b[36m") == std::string::npos);
}

TEST_CASE("progress: narrow terminals", "[run]") {
  std::size_t last = 0;
  for (int width = 1; width < 120; ++width) {
    Shown shown({.live = true, .color = false, .width = width});
    shown.step(49, {}, 0.5);
    const std::vector<std::string> lines = screen(shown.take());
    REQUIRE(lines.size() == 1);
    CHECK(lines[0].size() <= static_cast<std::size_t>(std::max(width - 1, 1)));
    CHECK(lines[0].size() >= last);
    last = lines[0].size();
    if (width == 30) CHECK(lines[0] == "step    49/100  loss 3.2500");
    if (width == 50) CHECK(lines[0] == "step    49/100  loss 3.2500  50 s left");
    if (width == 60) CHECK(lines[0] == "step    49/100  loss 3.2500    12345 tokens/s  50 s left");
    if (width == 90)
      CHECK(lines[0] == "step    49/100  [==========>         ]  50 %  loss 3.2500    12345 tokens/s  50 s left");
  }
}

TEST_CASE("progress: threads do not tear each other's lines", "[run]") {
  Shown shown(file);
  shown.step(0);
  shown.take();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&shown] {
      for (int i = 0; i < 200; ++i) shown.progress->message("a message of some length");
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::string expected;
  for (int i = 0; i < 800; ++i) expected += "a message of some length\n";
  CHECK(shown.take() == expected);
}

TEST_CASE("progress: without arguments nothing is shown", "[run]") {
  Progress silent;
  silent.step({});
  silent.message("x");
  silent.pause();
  silent.finish();
}

TEST_CASE("progress: durations", "[run]") {
  CHECK(run::duration_text(-1) == "0 s");
  CHECK(run::duration_text(119.4) == "119 s");
  CHECK(run::duration_text(120) == "2 min");
  CHECK(run::duration_text(7199) == "119 min");
  CHECK(run::duration_text(7200) == "2 h 00 min");
  CHECK(run::duration_text(3 * 3600 + 300) == "3 h 05 min");
  CHECK(run::duration_text(2 * 86400 + 4 * 3600) == "2 d 04 h");
  CHECK(run::duration_text(std::numeric_limits<double>::quiet_NaN()) == "long");
  CHECK(run::duration_text(std::numeric_limits<double>::infinity()) == "long");
}

TEST_CASE("peak: a figure of this world", "[run]") {
  // No timing is tested: any core of the last twenty years is between these, in a sanitizer's build too.
  const double one = run::measured_peak_flops(1);
  CHECK(one > 1e7);
  CHECK(one < 1e12);
}
