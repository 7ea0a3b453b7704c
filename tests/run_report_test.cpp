// Traces, event files and the report: what C++ can say of them, and the files that run_report.py reads as others would.
#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <shardlib/run/impl/chart.hpp>
#include <shardlib/run/impl/live_report.hpp>
#include <shardlib/run/report.hpp>
#include <shardlib/run/run_directory.hpp>
#include <shardlib/run/tensorboard.hpp>
#include <shardlib/run/trace.hpp>
#include <string>
#include <thread>
#include <vector>

#include "scratch.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;
using nlohmann::json;
using run::Record;
using run::Resume;
using run::RunDirectory;
using run::Sample;
using run::TensorBoard;
using run::Trace;

namespace {

Record record(std::int64_t step, bool full) {
  Record r{.step = step,
           .loss = 3 + 8 / (1 + 0.01 * static_cast<double>(step)),
           .learning_rate = 1e-3,
           .grad_norm = 1.25,
           .tokens_per_second = 1000,
           .step_seconds = 0.5};
  if (!full) return r;
  r.mfu = 0.4;
  r.memory_bytes = 1 << 20;
  r.seconds = {{"forward", 0.2}, {"all_gather", 0.1}};
  if (step % 10 == 9) r.validation_loss = r.loss + 0.1;
  return r;
}

void make_run(const std::string& path, const std::string& config, std::int64_t steps, bool full) {
  RunDirectory run(path, config, Resume::never, true);
  run.begin(0);
  for (std::int64_t i = 0; i < steps; ++i) run.write(record(i, full));
  run.write(Sample{steps - 1, "And <b>", "And <b> </script> & \"said\" \x01\xff"});
}

Trace traced(int rank) {
  Trace trace(rank, "d=" + std::to_string(rank) + ",t=0");
  const std::int64_t now = Trace::now();
  trace.event({.name = "einsum",
               .spec = "B/d M, M F -> B/d F",
               .pass = "forward",
               .part = "layers/3",
               .bytes = 4096,
               .touched = 12288,
               .flops = 2e9,
               .begin_ns = now,
               .duration_ns = 1500});
  trace.event({.name = "all_gather",
               .spec = "M/d F -> M F",
               .track = "collectives",
               .bytes = 1 << 20,
               .begin_ns = now + 200,
               .duration_ns = 2500});
  trace.event({.name = "odd \"name\"\n\xff", .begin_ns = now + 2000, .duration_ns = 10});
  trace.counter("memory", 12345, now + 3000);
  return trace;
}

}  // namespace

TEST_CASE("trace: events on the tracks of a rank", "[run]") {
  const Scratch folder;
  const std::string path = folder / "trace.json";
  traced(3).write(path);
  const json trace = json::parse(contents(path));
  std::vector<json> rows, events;
  for (const json& e : trace.at("traceEvents")) (e.at("ph") == "M" ? rows : events).push_back(e);
  REQUIRE(rows.size() == 6);
  CHECK(rows[0] ==
        json::parse(R"({"ph":"M","name":"process_name","pid":3,"tid":0,"args":{"name":"rank 3  d=3,t=0"}})"));
  CHECK(rows[2] == json::parse(R"({"ph":"M","name":"thread_name","pid":3,"tid":49,"args":{"name":"ops"}})"));
  CHECK(rows[4] == json::parse(R"({"ph":"M","name":"thread_name","pid":3,"tid":50,"args":{"name":"collectives"}})"));
  REQUIRE(events.size() == 4);
  CHECK(events[0].at("name") == "einsum");
  CHECK(events[0].at("cat") == "ops");
  CHECK(events[0].at("ph") == "X");
  CHECK(events[0].at("pid") == 3);
  CHECK(events[0].at("dur") == 1.5);
  CHECK(
      events[0].at("args") ==
      json::parse(
          R"({"spec": "B/d M, M F -> B/d F", "pass": "forward", "part": "layers/3", "bytes": 4096, "touched": 12288, "flops": 2000000000})"));
  CHECK(events[0].at("ts").get<double>() >= 0);
  CHECK(events[1].at("tid") == 50);
  CHECK(events[1].at("ts").get<double>() - events[0].at("ts").get<double>() == Approx(0.2).margin(1e-6));
  CHECK(events[2].at("name") == "odd \"name\"\n\xef\xbf\xbd");
  CHECK(events[2].at("args").empty());
  CHECK(events[3].at("ph") == "C");
  CHECK(events[3].at("name") == "memory");
  CHECK(events[3].at("args") == json::parse(R"({"bytes": 12345})"));
}

TEST_CASE("trace: off, full, empty", "[run]") {
  const Scratch folder;
  const std::string path = folder / "trace.json";
  Trace off;
  off.start();
  off.event({.name = "x"});
  off.counter("x", 1, 0);
  off.write(path);
  CHECK_FALSE(off.on());
  CHECK(files_below(folder.path()).empty());

  Trace small(0, "", 2);
  for (int i = 0; i < 5; ++i) small.event({.name = "x", .begin_ns = Trace::now(), .duration_ns = 1});
  small.write(path);
  const json last = json::parse(contents(path)).at("traceEvents").back();
  CHECK(last.at("name") == "trace full: 3 later events left out");
  CHECK(last.at("ph") == "i");

  Trace(0, "").write(path);
  CHECK(json::parse(contents(path)).at("traceEvents").size() == 2);
  expect_error<UsageError>([&] { small.write("/nowhere/x"); }, "cannot write '/nowhere/x': No such file or directory");
  expect_error([&] { small.write("/dev/full"); },
               "cannot write '/dev/full': it is not a regular file; move it away, or choose another path");
}

TEST_CASE("trace: several threads", "[run]") {
  const Scratch folder;
  Trace trace(0, "");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&trace, t] {
      for (int i = 0; i < 500; ++i) {
        const std::string name = "e" + std::to_string(i), track = "t" + std::to_string(t);
        trace.event({.name = name, .track = track, .bytes = i, .begin_ns = i, .duration_ns = 1});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  trace.write(folder / "trace.json");
  CHECK(json::parse(contents(folder / "trace.json")).at("traceEvents").size() == 2 + 2 * 4 + 2000);
}

TEST_CASE("trace: ranks are joined", "[run]") {
  const Scratch folder;
  std::vector<std::string> parts;
  std::size_t events = 0;
  for (int rank = 0; rank < 3; ++rank) {
    parts.push_back(folder / ("trace." + std::to_string(rank) + ".json"));
    traced(rank).write(parts.back());
    events += json::parse(contents(parts.back())).at("traceEvents").size();
  }
  const std::string whole = folder / "trace.json";
  run::merge_traces(parts, whole);
  CHECK(json::parse(contents(whole)).at("traceEvents").size() == events);
  const std::string before = contents(whole);

  const std::string part = contents(parts[1]);
  const std::string damaged = "the trace '" + parts[1] + "' is damaged or was not written by shardlib";
  for (const std::size_t length : {std::size_t{0}, std::size_t{20}, part.size() / 2, part.size() - 3}) {
    put(parts[1], part.substr(0, length));
    expect_error([&] { run::merge_traces(parts, whole); }, damaged);
  }
  std::remove(parts[1].c_str());
  expect_error([&] { run::merge_traces(parts, whole); },
               "cannot read the trace '" + parts[1] + "': has its rank written it?");
  CHECK(contents(whole) == before);
  CHECK(files_below(folder.path()).size() == 3);
}

TEST_CASE("tensorboard: off and files that cannot be written", "[run]") {
  TensorBoard off;
  off.scalar("x", 0, 1);
  off.write(record(0, true));
  off.flush();
  CHECK_FALSE(off.on());
  const Scratch folder;
  put(folder / "file", "");
  CHECK_THROWS_WITH(TensorBoard(folder / "file"), Catch::Matchers::StartsWith("cannot write the event file '"));
  // Files of the same second do not share a name.
  const TensorBoard one(folder / "tb"), two(folder / "tb");
  CHECK(one.path() != two.path());
}

TEST_CASE("texts of numbers have an exponent where the report's script gives them one", "[run]") {
  const auto text = [](double v) { return run::unit_text(run::Unit::number, v); };
  CHECK((text(0) == "0" && text(3) == "3" && text(-3.14159) == "-3.142"));
  CHECK((text(12346) == "12350" && text(123456) == "123500" && text(-999999) == "-1000000"));
  CHECK((text(1e6) == "1e6" && text(1234567) == "1.235e6" && text(-2.5e12) == "-2.5e12"));
  CHECK((text(0.001) == "0.001" && text(0.00123456) == "0.001235" && text(0.000999) == "9.99e-4" &&
         text(3e-7) == "3e-7"));
}

TEST_CASE("report: one run, a metrics file, and what is not a run", "[run]") {
  const Scratch folder;
  make_run(folder / "first", "steps = 50\n[model]\nd = 1\n", 50, true);
  run::write_report({folder / "first"}, folder / "first/report.html");
  const std::string page = contents(folder / "first/report.html");
  for (const char* text :
       {"<title>first</title>", "id=\"loss\"", "id=\"grad_norm\"", "id=\"learning_rate\"", "id=\"speed\"", "id=\"mfu\"",
        "id=\"memory\"", "id=\"breakdown0\"", "Sampled texts", "<th>model</th>"})
    CHECK(page.find(text) != std::string::npos);
  CHECK(run::report({folder / "first/metrics.jsonl"}).find("<title>metrics.jsonl</title>") != std::string::npos);
  CHECK(run::report({(folder / "first") + "/"}).find("<title>first</title>") != std::string::npos);

  expect_error<UsageError>([] { static_cast<void>(run::report({})); }, "name at least one run");
  expect_error<UsageError>([] { static_cast<void>(run::report({"/nowhere"})); },
                           "there is no folder or file '/nowhere': give the folder of a run, or its metrics.jsonl");
  put(folder / "weights", "no line end");
  expect_error<UsageError>(
      [&] { static_cast<void>(run::report({folder / "weights"})); },
      "'" + (folder / "weights") + "' has no record of a run: give the folder of a run, or its metrics.jsonl");
  expect_error<UsageError>([&] { static_cast<void>(run::report({folder.path()})); },
                           "the folder '" + folder.path() + "' is not a run: it has no metrics.jsonl");
  RunDirectory(folder / "empty", "", Resume::never, true);
  expect_error<UsageError>([&] { static_cast<void>(run::report({folder / "empty"})); },
                           "the run '" + (folder / "empty") + "' has no records yet");
  expect_error<UsageError>([&] { run::write_report({folder / "first"}, "/nowhere/x.html"); },
                           "cannot write '/nowhere/x.html': No such file or directory");
}

TEST_CASE("report: odd records are drawn too", "[run]") {
  const Scratch folder;
  // One step; all equal; no finite value at all; a gap; zeros on a log scale.
  const std::vector<std::vector<double>> losses{{1.0},  {2, 2, 2},           {NAN, NAN},      {1, NAN, 3, 4},
                                                {0, 0}, {-1, 1e300, 1e-300}, {1e-320, 2e-320}};
  for (std::size_t i = 0; i < losses.size(); ++i) {
    const std::string path = folder / std::to_string(i);
    run::JsonLines file(path, run::JsonLines::Mode::overwrite);
    for (std::size_t k = 0; k < losses[i].size(); ++k) {
      Record r = record(static_cast<std::int64_t>(k), false);
      r.loss = losses[i][k];
      file.write(r);
    }
    const std::string page = run::report({path});
    INFO(i);
    CHECK(page.find("id=\"loss\"") != std::string::npos);
    CHECK((page.find(">not finite</td>") != std::string::npos) == (i == 2));
    for (const char* bad : {"=\"nan", "=\"-nan", "=\"inf", "=\"-inf", "nan ", " nan", "inf ", " inf "})
      CHECK(page.find(bad, page.find("<main>")) > page.find("<script>("));
  }
}

TEST_CASE("report: what a run has done out of turn is marked and listed", "[run]") {
  const Scratch folder;
  const std::string path = folder / "metrics.jsonl";
  {
    run::JsonLines lines(path, run::JsonLines::Mode::append);
    for (std::int64_t step = 0; step < 80; ++step) {
      Record r = record(step, true);
      r.skipped = step % 2 == 1;
      if (step % 2 == 1) r.events = {fmt::format("step {}: a \"spike\" <b>", step), "and more"};
      lines.write(r);
    }
  }
  const auto records = run::read_records(path);
  CHECK((records[3].skipped && !records[4].skipped));
  CHECK(records[3].events == std::vector<std::string>{"step 3: a \"spike\" <b>", "and more"});
  CHECK(records[4].events.empty());
  const std::string page = run::report({path});
  CHECK(page.find(R"({"step":3,"run":0,"text":"step 3: a \"spike\" \u003cb>"})") != std::string::npos);
  CHECK(page.find("the last 50 of 80") != std::string::npos);
  CHECK(page.find("<td class=\"num step\">29</td>") == std::string::npos);
  CHECK(page.find("<td class=\"num step\">31</td><td>step 31: a &quot;spike&quot; &lt;b&gt;</td>") !=
        std::string::npos);
}

TEST_CASE("report: a long run stays small", "[run]") {
  const Scratch folder;
  for (const char* name : {"a", "b"}) {
    run::JsonLines file(folder / name, run::JsonLines::Mode::overwrite);
    for (std::int64_t i = 0; i < 100'000; ++i) file.write(record(i, true));
  }
  CHECK(run::report({folder / "a", folder / "b"}).size() < 1'500'000);
}

TEST_CASE("report: thinned curves keep extremes, ends and gaps", "[run]") {
  run::detail::Series series{"a", 0, {}, {}};
  for (int i = 0; i < 1000; ++i) {
    series.x.push_back(7 + 2 * i);
    series.y.push_back(i % 10 == 3 ? -i : i);
  }
  const run::detail::ThinnedSeries same = run::detail::thinned(series, 1000, false);
  CHECK((same.x == series.x && same.y == series.y && same.low.empty() && same.high.empty()));

  for (std::size_t i = 500; i < 510; ++i) series.y[i] = NAN;
  series.y[512] = NAN;
  const run::detail::ThinnedSeries mean = run::detail::thinned(series, 100, false),
                                   median = run::detail::thinned(series, 100, true);
  REQUIRE((mean.x.size() == 100 && mean.y.size() == 100 && mean.low.size() == 100 && mean.high.size() == 100));
  CHECK((mean.x.front() == 7 && mean.x.back() == 7 + 2 * 999));
  CHECK((mean.low[2] == -23 && mean.high[2] == 29));
  CHECK(mean.y[2] == Approx((245.0 - 2 * 23) / 10));
  CHECK(median.y[2] == 25);
  CHECK((std::isnan(mean.y[50]) && std::isnan(mean.low[50]) && std::isnan(median.high[50])));
  CHECK((mean.low[51] == -513 && mean.high[51] == 519 && std::isfinite(mean.y[51])));
  series.y[0] = series.y[1] = 1.7e308;
  CHECK(std::isfinite(run::detail::thinned(series, 100, false).y[0]));
}

TEST_CASE("report: of a run that goes on", "[run]") {
  const Scratch folder;
  const std::string path = folder / "run";
  std::vector<std::string> messages;
  {
    RunDirectory directory(path, "", Resume::never, true);
    directory.begin(0);
    CHECK(run::in_progress(path));
    run::detail::LiveReport live(
        directory, [&](const std::string& text) { messages.push_back(text); }, 0);
    live.step();  // there are no records yet
    live.step();
    CHECK_FALSE(std::filesystem::exists(directory.report()));
    REQUIRE(messages.size() == 1);
    CHECK(messages[0] == "the report could not be written: the run '" + path +
                             "' has no records yet; `shardlib-report " + path + "` writes it later");

    directory.write(record(0, true));
    run::detail::LiveReport good(
        directory, [&](const std::string& text) { messages.push_back(text); }, 0);
    good.step();
    CHECK(messages.size() == 1);
    REQUIRE(std::filesystem::exists(directory.report()));
    CHECK(contents(directory.report()).find("\"every\":0,") == std::string::npos);
    std::filesystem::remove(directory.report());
    good.step();  // the first one has taken some time, of which this must be a hundredth
    CHECK_FALSE(std::filesystem::exists(directory.report()));
    run::detail::LiveReport later(directory, {}, 3600);
    later.step();
    CHECK_FALSE(std::filesystem::exists(directory.report()));
  }
  CHECK_FALSE(run::in_progress(path));
  CHECK_FALSE(run::in_progress("/nowhere"));
  CHECK(run::report({path}).find("\"every\":0,") != std::string::npos);
  CHECK(run::report({path}, 30).find("\"every\":30,") != std::string::npos);
}

// run_report.py runs this and reads the files as their other readers would.
TEST_CASE("run files for run_report.py", "[.run_report]") {
  const char* const set = std::getenv("SHARDLIB_RUN_REPORT");
  REQUIRE(set != nullptr);
  const std::string folder = set;
  make_run(folder + "/first", "steps = 300\nname = \"<b>&\"\n[model]\nd = 1\n", 300, true);
  make_run(folder + "/second", "steps = 200\nname = \"<b>&\"\n[model]\nd = 2\n", 200, false);
  run::write_report({folder + "/first"}, folder + "/first/report.html");
  run::write_report({folder + "/first", folder + "/second"}, folder + "/compared.html");
  run::write_report({folder + "/first"}, folder + "/live.html", 30);
  std::vector<std::string> parts;
  for (int rank = 0; rank < 2; ++rank) {
    parts.push_back(folder + "/trace." + std::to_string(rank) + ".json");
    traced(rank).write(parts.back());
  }
  run::merge_traces(parts, folder + "/trace.json");
  TensorBoard board(folder + "/tensorboard");
  for (std::int64_t i = 0; i < 300; ++i) board.write(record(i, true));
  board.text("configuration", 0, "[model]\nd = 64\n");
  for (const char* text : {"And *so* on\nto the end", "And", "And then"}) board.write(Sample{299, "And", text});
  run::Histogram some, none;
  for (const double x : {-3.0, 0.5, 0.5, 0.6, 1e-20, 8.0, std::nan(""), HUGE_VAL}) some.add(x);
  board.histogram("weights/layers/0/w", 299, some);
  board.histogram("weights/none", 299, none);
  TensorBoard resumed(folder + "/tensorboard", 250);
  resumed.scalar("train/loss", 250, 0.5);
  resumed.flush();
}
