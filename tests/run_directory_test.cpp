// Records, samples and the run directory: torn and damaged files, resuming, refusals, changed configurations.
#include <signal.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <regex>
#include <shardlib/io/file.hpp>
#include <shardlib/io/impl/temporary.hpp>
#include <shardlib/io/tokenizer/bpe.hpp>
#include <shardlib/run/run_directory.hpp>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "scratch.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;
using run::JsonLines;
using run::Record;
using run::Resume;
using run::RunDirectory;
using run::Sample;

namespace {

std::vector<std::string>* synced = nullptr;  ///< where there is one, the paths that are made durable

}  // namespace

extern "C" int fsync(int file) {
  if (synced != nullptr) synced->push_back(std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(file)));
  return static_cast<int>(::syscall(SYS_fsync, file));
}

namespace {

Record record(std::int64_t step) {
  return {.step = step,
          .loss = 5.5 - 0.001 * static_cast<double>(step),
          .learning_rate = 3e-4,
          .grad_norm = 0.1,
          .tokens_per_second = 12345.678,
          .step_seconds = 0.25};
}

constexpr const char* config = "steps = 10\n";

/// A run of so many steps, closed again.
void make_run(const std::string& path, int steps) {
  RunDirectory run(path, config, Resume::automatic, true);
  CHECK(run.begin(0).empty());
  for (int i = 0; i < steps; ++i) run.write(record(i));
  for (int i = 0; i < steps; i += 5) run.write(Sample{i, "a", "a b"});
  run.sync();
}

}  // namespace

TEST_CASE("run directory: its configurations and starts are durable", "[run]") {
  const Scratch folder;
  const std::string path = std::filesystem::canonical(folder.path()).string() + "/run";
  std::vector<std::string> paths;
  const auto begin_run = [&](const std::string& text) {
    paths.clear();
    synced = &paths;
    RunDirectory run(path, text, Resume::automatic, true);
    run.begin(0);
    run.note_start(0, {{"d", 1}}, "f32");
    synced = nullptr;
  };
  const auto has = [&](const std::string& file) {
    return std::ranges::any_of(paths, [&](const std::string& p) { return p.starts_with(path + file); });
  };
  begin_run(config);
  CHECK(has("/config.toml"));
  CHECK(has("/run.json"));
  CHECK(std::ranges::count(paths, path) == 2);
  begin_run("steps = 20\n");
  CHECK(has("/config.1.toml"));
  CHECK(has("/config.toml"));
}

TEST_CASE("run directory: run.json lists the starts", "[run]") {
  const Scratch folder;
  const std::string path = folder / "run";
  const auto start = [&](std::int64_t step) {
    RunDirectory run(path, config, Resume::automatic, true);
    run.begin(step);
    return run.note_start(step, {{"d", 2}, {"t", 1}}, "bf16");
  };
  CHECK(start(0).empty());
  CHECK(start(4).empty());
  const auto all = nlohmann::json::parse(contents(path + "/run.json"));
  REQUIRE(all.size() == 2);
  CHECK(all[0]["step"] == 0);
  CHECK(all[1]["step"] == 4);
  CHECK(all[1]["mesh"] == "d=2,t=1");
  CHECK(all[1]["dtype"] == "bf16");
  // The commit as git names it, or that it is not known.
  CHECK(std::regex_match(all[1]["commit"].get<std::string>(), std::regex("[0-9a-f]{12,}(-dirty)?|unknown")));
  CHECK(all[1]["devices"] == (under_mpi() ? "ranks" : "threads"));
  CHECK(all[1]["start"].get<std::string>().size() == 20);
  CHECK(all[1]["command"][0].get<std::string>().find("shardlib_tests") != std::string::npos);
  CHECK(all[1]["directory"] == std::filesystem::current_path().string());
  CHECK(all[1]["launcher"] == launcher_name());
  // Folders may have names that are not UTF-8.
  const auto here = std::filesystem::current_path();
  std::filesystem::create_directory(folder / "\xfc");
  std::filesystem::current_path(folder / "\xfc");
  CHECK(start(5).empty());
  std::filesystem::current_path(here);
  CHECK(nlohmann::json::parse(contents(path + "/run.json"))[2]["directory"] == folder / "\xef\xbf\xbd");
  // A damaged one does not stop the run.
  put(path + "/run.json", "{");
  const auto notes = start(5);
  REQUIRE(notes.size() == 1);
  CHECK(notes[0] == "run.json is no longer a list of starts: it is now " + path + "/run.1.json, and a new one begins");
  CHECK(nlohmann::json::parse(contents(path + "/run.json")).size() == 1);
}

TEST_CASE("run directory: console.log takes what is logged, from start to start", "[run]") {
  const Scratch folder;
  const std::string path = folder / "run";
  run::log_console("before\n");
  for (const std::int64_t step : {0, 4}) {
    RunDirectory run(path, config, Resume::automatic, true);
    run.begin(step);
    run::log_console(std::to_string(step) + "\n");
    RunDirectory(folder / "other", config, Resume::automatic, false).begin(0);  // of a process that does not write
  }
  run::log_console("after\n");
  const std::string text = std::regex_replace(contents(path + "/console.log"), std::regex("==== \\S{20},"), "====");
  CHECK(text.ends_with("before\n0\n==== from step 4\n4\n"));
  CHECK(text.starts_with("==== from step 0\n"));
}

TEST_CASE("records: the line of a step, and back", "[run]") {
  CHECK(to_json(record(3)) ==
        R"({"step": 3, "loss": 5.497, "learning_rate": 0.0003, "grad_norm": 0.1, "tokens_per_second": 12345.678, )"
        R"("step_seconds": 0.25})");
  Record full = record(4);
  full.loss = std::nan("");
  full.grad_norm = std::numeric_limits<double>::infinity();
  full.mfu = 0.5;
  full.memory_bytes = std::int64_t{1} << 40;
  full.time = 1764067890.5;
  full.validation_loss = 1.0 / 3;
  full.numbers = {{"load", 1.5}, {"lost", std::nan("")}};
  full.seconds = {{"forward", 0.1}, {"back\"ward", 0.2}, {"all_gather", 0.3}};
  CHECK(
      to_json(full) ==
      R"({"step": 4, "loss": null, "learning_rate": 0.0003, "grad_norm": null, "tokens_per_second": 12345.678, )"
      R"("step_seconds": 0.25, "time": 1764067890.500, "mfu": 0.5, "memory_bytes": 1099511627776, "validation_loss": 0.3333333333333333, )"
      R"("numbers": {"load": 1.5, "lost": null}, "seconds": {"forward": 0.1, "back\"ward": 0.2, "all_gather": 0.3}})");
  const Scratch folder;
  const std::string path = folder / "metrics.jsonl";
  JsonLines file(path, JsonLines::Mode::overwrite);
  file.write(record(3));
  file.write(full);
  const std::vector<Record> back = run::read_records(path);
  REQUIRE(back.size() == 2);
  CHECK(to_json(back[0]) == to_json(record(3)));
  CHECK(to_json(back[1]) == to_json(full));
}

TEST_CASE("samples: bytes that are not UTF-8 are replaced, all others kept", "[run]") {
  const Scratch folder;
  const std::string path = folder / "samples.jsonl";
  JsonLines file(path, JsonLines::Mode::overwrite);
  const std::string text = "q\"\\ \n\t\r\x01 \xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80";
  file.write(Sample{1, "p", text});
  // Cut-off characters, continuation bytes alone, over-long forms, a surrogate, beyond U+10FFFF.
  file.write(Sample{2, "", "\xc3|\xa9|\xc0\xaf|\xe0\x80\x80|\xed\xa0\x80|\xf4\x90\x80\x80|\xff|\xe2\x82"});
  const std::vector<Sample> back = run::read_samples(path);
  REQUIRE(back.size() == 2);
  CHECK(back[0].text == text);
  CHECK(back[0].prompt == "p");
  const std::string r = "\xef\xbf\xbd";
  CHECK(back[1].text ==
        r + "|" + r + "|" + r + r + "|" + r + r + r + "|" + r + r + r + "|" + r + r + r + r + "|" + r + "|" + r + r);
}

TEST_CASE("records: torn and damaged files", "[run]") {
  const Scratch folder;
  const std::string path = folder / "metrics.jsonl";
  const std::string two = to_json(record(0)) + "\n" + to_json(record(1)) + "\n";
  const std::string third = to_json(record(2));
  for (std::size_t length = 0; length <= third.size(); ++length) {
    put(path, two + third.substr(0, length));
    CHECK(run::read_records(path).size() == 2);
    JsonLines file(path, JsonLines::Mode::append);
    CHECK(file.cut(100) == JsonLines::Removed{0, length > 0});
    CHECK(contents(path) == two);
    file.write(record(2));
    CHECK(run::read_records(path).size() == 3);
  }
  put(path, two + std::string(5, '\0'));
  CHECK(run::read_records(path).size() == 2);

  const std::string text = ": this is not a record of a run", remedy = "; remove the line or choose another run";
  put(path, two + "hello");
  expect_error([&] { static_cast<void>(run::read_records(path)); },
               path + ":3" + text + " (it does not begin with {\"step\":): hello" + remedy);
  const std::string torn = "{\"step\": 2, \"lo" + third;
  for (const auto& [bad, shown, why] : {std::array<std::string, 3>{"{\"step\": 2, \"lo", "{\"step\": 2, \"lo", ""},
                                        {"", "", ""},
                                        {"hello", "hello", ""},
                                        {"{\"step\": x}", "{\"step\": x}", ""},
                                        {"[]", "[]", " (it has no \"step\")"},
                                        {"{\"loss\": 3}", "{\"loss\": 3}", " (it has no \"step\")"},
                                        {torn, torn.substr(0, 60) + "...", ""},
                                        {"{\"step\": \"\t\"", "{\"step\": \" \"", ""}}) {
    put(path, two + bad + "\n" + third + "\n");
    INFO(bad);
    expect_error([&] { static_cast<void>(run::read_records(path)); }, path + ":3" + text + why + ": " + shown + remedy);
    JsonLines file(path, JsonLines::Mode::append);
    expect_error([&] { file.cut(1); }, path + ":3" + text + ": " + shown + remedy);
    CHECK(contents(path) == two + bad + "\n" + third + "\n");
    // As the last line it stops no run: whatever a crash has left of it.
    put(path, two + bad + "\n");
    CHECK(file.cut(2) == JsonLines::Removed{0, true});
    CHECK(contents(path) == two);
  }
  expect_error<UsageError>([&] { static_cast<void>(run::read_records(folder / "none")); },
                           "cannot read the file '" + (folder / "none") + "': No such file or directory");
  expect_error<UsageError>([&] { static_cast<void>(run::read_records(folder.path())); },
                           "cannot read the file '" + folder.path() + "': Is a directory");
}

TEST_CASE("records: cut back to a step", "[run]") {
  const Scratch folder;
  for (std::int64_t step = 0; step <= 6; ++step) {
    const std::string path = folder / std::to_string(step);
    JsonLines file(path, JsonLines::Mode::overwrite);
    for (int i = 0; i < 5; ++i) file.write(record(i));
    CHECK(file.cut(step) == JsonLines::Removed{std::max<std::int64_t>(0, 5 - step), false});
    const std::vector<Record> left = run::read_records(path);
    CHECK(left.size() == static_cast<std::size_t>(std::min<std::int64_t>(step, 5)));
    file.write(record(step));
    CHECK(run::read_records(path).back().step == step);
  }
}

TEST_CASE("records: files that cannot be written", "[run]") {
  expect_error<UsageError>([] { JsonLines("/nowhere/file", JsonLines::Mode::overwrite, "check --metrics"); },
                           "cannot write the file '/nowhere/file': No such file or directory; check --metrics");
  JsonLines full("/dev/full", JsonLines::Mode::overwrite);
  full.write(record(0));  // waits for room
  expect_error<StorageError>([&] { full.sync(); }, "cannot write to the file '/dev/full': No space left on device");
  JsonLines nowhere;
  nowhere.write(record(0));
  CHECK_FALSE(nowhere.is_open());
}

TEST_CASE("run directory: records that are removed, moved or replaced while the run writes to them", "[run]") {
  const Scratch folder;
  const std::string path = folder / "run", metrics = path + "/metrics.jsonl", samples = path + "/samples.jsonl";
  RunDirectory run(path, config, Resume::automatic, true);
  run.begin(0);
  run.write(record(0));
  run.write(Sample{0, "a", "a b"});
  for (const std::string& file : {metrics, samples}) std::filesystem::remove(file);
  run.write(record(1));
  run.sync();
  run.write(record(2));
  run.sync();
  CHECK(run::read_records(metrics).size() == 3);
  CHECK(run::read_samples(samples).size() == 1);
  expect_error<Error>(
      [&] { RunDirectory(path, config, Resume::automatic, true); },
      "another process is writing to the run's folder '" + path + "': wait until it ends, or choose another one");
  Record unusual = record(3);
  unusual.events = {"step 3: a spike"};
  run.write(unusual);
  std::filesystem::remove(metrics);
  CHECK(run.go_back(2) == unusual.events);
  CHECK(run::read_records(metrics).size() == 2);
  std::filesystem::rename(path, path + "-away");
  expect_error<StorageError>([&] { run.sync(); },
                             "the file '" + metrics + "' was moved away while this run writes to it: move it back");
  std::filesystem::rename(path + "-away", path);
  run.sync();
  // NFS renames a removed file that is open, and removes it when it is closed.
  std::filesystem::rename(metrics, path + "/.nfs000000000000002a00000001");
  run.sync();
  CHECK(run::read_records(metrics).size() == 2);
  std::filesystem::remove_all(path);
  expect_error<StorageError>([&] { run.sync(); },
                             "cannot write to the file '" + metrics + "': No such file or directory");
  make_run(path, 1);  // another run
  expect_error<StorageError>([&] { run.sync(); },
                             "another file has replaced '" + metrics +
                                 "' while this run writes to it: another run may have begun in its place");
  CHECK(run::read_records(metrics).size() == 1);
}

TEST_CASE("run directory: records behind a symbolic link whose target is removed", "[run]") {
  const Scratch folder;
  const std::string path = folder / "run", elsewhere = folder / "elsewhere";
  std::filesystem::create_directories(path);
  std::filesystem::create_directories(elsewhere);
  put(elsewhere + "/metrics", "");
  std::filesystem::create_symlink("../elsewhere/link", path + "/metrics.jsonl");
  std::filesystem::create_symlink(elsewhere + "/metrics", elsewhere + "/link");
  RunDirectory run(path, config, Resume::automatic, true);
  run.begin(0);
  run.write(record(0));
  std::filesystem::remove(elsewhere + "/metrics");
  run.write(record(1));
  run.sync();
  CHECK(std::filesystem::is_symlink(run.metrics()));
  CHECK(run::read_records(elsewhere + "/metrics").size() == 2);
  run.sync();
}

TEST_CASE("run directory: a folder that is emptied while the run writes to it is a run that resumes", "[run]") {
  const Scratch folder;
  const std::string path = folder / "run", stored = "steps = 20\n";
  std::vector<std::string> bytes;  // the smallest vocabulary
  for (int i = 0; i < 256; ++i) bytes.emplace_back(1, static_cast<char>(i));
  const auto empty = [&] {
    for (const auto& entry : std::filesystem::directory_iterator(path)) std::filesystem::remove_all(entry.path());
  };
  make_run(path, 2);
  {
    RunDirectory run(path, stored, Resume::automatic, true);
    run.begin(2);
    run.note_start(2, {{"d", 1}}, "f32");
    put(folder / "small.tiktoken", "its tokens");
    run.keep_tokenizer(io::BpeTokenizer(bytes), folder / "small.tiktoken");
    run.keep_step_graph("<svg/>");
    std::filesystem::remove(folder / "small.tiktoken");
    const std::string starts = contents(run.starts());
    run.write(record(2));
    run::log_console("before\n");
    empty();
    run::log_console("after\n");
    run.write(record(3));
    run.sync();
    run::log_console("later\n");
    CHECK(files_below(path) == std::vector<std::string>{"config.toml", "console.log", "metrics.jsonl", "run.json",
                                                        "samples.jsonl", "step.svg", "tokenizer/small.tiktoken"});
    CHECK(contents(run.config()) == stored);
    CHECK(contents(run.starts()) == starts);
    CHECK(contents(run.tokenizer() + "/small.tiktoken") == "its tokens");
    CHECK(contents(run.step_graph()) == "<svg/>");
    const std::string log = contents(run.console());
    CHECK_THAT(log, Catch::Contains("before\nafter\nwarning: the file '"));
    CHECK(log.ends_with("later\n"));
    for (const std::string& file : files_below(path))
      CHECK_THAT(log, Catch::Contains("the file '" + path + "/" + file +
                                      "' was removed while this run uses it: it is written again"));
    empty();
    run.go_back(3);
    CHECK(contents(run.config()) == stored);
    std::filesystem::remove_all(run.tokenizer());
    put(run.tokenizer(), "a file");
    expect_error<StorageError>([&] { run.sync(); },
                               "cannot write '" + run.tokenizer() + "/small.tiktoken': Not a directory");
    expect_error<StorageError>([&] { run.go_back(3); },
                               "cannot write '" + run.tokenizer() + "/small.tiktoken': Not a directory");
    std::filesystem::remove(run.tokenizer());
    run.sync();
  }
  RunDirectory again(path, stored, Resume::automatic, true);
  CHECK(again.begin(3).empty());
  CHECK(run::read_records(again.metrics()).size() == 3);
}

TEST_CASE("run directory: a new run", "[run]") {
  const Scratch folder;
  const std::string path = folder / "deep/run";
  make_run(path, 7);
  CHECK(files_below(path) == std::vector<std::string>{"config.toml", "console.log", "metrics.jsonl", "samples.jsonl"});
  CHECK(contents(path + "/config.toml") == config);
  CHECK(run::read_records(path + "/metrics.jsonl").size() == 7);
  CHECK(run::read_samples(path + "/samples.jsonl").size() == 2);
}

TEST_CASE("run directory: going on from a checkpoint", "[run]") {
  const Scratch folder;
  const std::string path = folder / "run";
  make_run(path, 7);
  put(path + "/metrics.jsonl", contents(path + "/metrics.jsonl") + "{\"step\": 7, \"lo");
  const std::string middle = "{\"step\": 0, \"lo\n" + contents(path + "/metrics.jsonl");
  std::filesystem::create_directory(folder / "middle");
  put(folder / "middle/config.toml", config);
  put(folder / "middle/metrics.jsonl", middle);
  expect_error([&] { RunDirectory(folder / "middle", config, Resume::automatic, true).begin(4); },
               folder / "middle" +
                   "/metrics.jsonl:1: this is not a record of a run: {\"step\": 0, \"lo; remove the "
                   "line or choose another run");
  CHECK(contents(folder / "middle/metrics.jsonl") == middle);
  RunDirectory run(path, config, Resume::automatic, true);
  CHECK(run.begin(4) ==
        std::vector<std::string>{"the last line of metrics.jsonl was torn, as the run ended while it wrote it: it is "
                                 "dropped",
                                 "3 records after the checkpoint removed from metrics.jsonl: resuming from step 4"});
  CHECK(run::read_records(run.metrics()).size() == 4);
  CHECK(run::read_samples(run.samples()).size() == 1);
  for (int i = 4; i < 10; ++i) run.write(record(i));
  CHECK(run::read_records(run.metrics()).size() == 10);
  CHECK(files_below(path) == std::vector<std::string>{"config.toml", "console.log", "metrics.jsonl", "samples.jsonl"});
}

TEST_CASE("run directory: a run without a checkpoint starts again, and nothing is lost", "[run]") {
  const Scratch folder;
  const std::string path = folder / "run";
  make_run(path, 3);
  const std::string metrics = contents(path + "/metrics.jsonl"), samples = contents(path + "/samples.jsonl");
  for (int again = 1; again <= 2; ++again) {
    RunDirectory run(path, config, Resume::automatic, true);
    const std::string aside = "metrics." + std::to_string(again) + ".jsonl";
    CHECK(run.begin(0) == std::vector<std::string>{"the run in " + path +
                                                   " starts again from step 0; its former records are in " + aside});
    CHECK(contents(path + "/" + aside) == metrics);
    CHECK(contents(path + "/samples." + std::to_string(again) + ".jsonl") == samples);
    CHECK(contents(run.metrics()).empty());
    CHECK(contents(run.samples()).empty());
    for (int i = 0; i < 3; ++i) run.write(record(i));
    run.write(Sample{0, "a", "a b"});
  }
}

TEST_CASE("run directory: a changed configuration", "[run]") {
  const Scratch folder;
  const std::string path = folder / "run";
  make_run(path, 3);
  RunDirectory run(path, "steps = 20\n[model]\nd = 1\n", Resume::automatic, true);
  CHECK(contents(run.config()) == config);
  CHECK(run.begin(3, false).empty());
  CHECK(contents(run.config()) == config);
  CHECK(run.begin(3) == std::vector<std::string>{"the configuration has changed (the former one is in config.1.toml):",
                                                 "  steps: 10 -> 20", "  model.d: (absent) -> 1"});
  CHECK(contents(run.config()) == "steps = 20\n[model]\nd = 1\n");
  CHECK(contents(path + "/config.1.toml") == config);
}

TEST_CASE("records: what --metrics may replace", "[run]") {
  using run::detail::begins_as_record;
  for (const Record& one : {record(0), record(123456), Record{.step = 3, .loss = std::nan("")}}) {
    const std::string line = to_json(one) + "\n";
    CHECK(begins_as_record(line + line));
    for (std::size_t size = 0; size < line.size(); ++size) CHECK(begins_as_record(line.substr(0, size)));
  }
  for (const std::string& other :
       {to_json(Sample{0, "And", "And God"}) + "\n", std::string("{\"step\": 1}\n"), std::string("{}"),
        std::string("{\"step\": 1, \"loss\": 2.5, \"lr\": 0.1}\n"), std::string("a text"), std::string(40, '\0')})
    CHECK(!begins_as_record(other));
}

TEST_CASE("run directory: refusals leave everything as it was", "[run]") {
  const Scratch folder;
  const auto refuses = [&](const std::string& path, Resume resume, const std::string& text,
                           std::source_location where = std::source_location::current()) {
    const std::vector<std::string> before = files_below(folder.path());
    expect_error<UsageError>([&] { RunDirectory(path, "steps = 1\n", resume, true); }, text, where);
    CHECK(files_below(folder.path()) == before);
  };
  const std::string path = folder / "run", other = folder / "other", file = folder / "file", half = folder / "half";
  make_run(path, 3);
  refuses(path, Resume::never,
          "the run's folder '" + path +
              "' already holds a run: choose another one, or resume that run (leave out --no-resume)");
  std::filesystem::create_directory(other);
  put(other + "/thesis.tex", "x");
  refuses(other, Resume::automatic, "the folder '" + other + "' holds other files and no run: choose another folder");
  put(file, "x");
  for (const std::string& there : {file, file + "/below"})
    refuses(there, Resume::automatic,
            "cannot make the folder '" + there + "': Not a directory; choose another one for the run");
  std::filesystem::create_symlink("not-mounted", folder / "dangling");
  refuses(folder / "dangling", Resume::automatic,
          "cannot make the folder '" + folder / "dangling" +
              "': it is a symbolic link to 'not-mounted', which is not "
              "there (is its disk mounted?); choose another one for the run");
  std::filesystem::create_directory(half);
  put(half + "/metrics.jsonl", to_json(record(0)) + "\n");
  refuses(half, Resume::automatic,
          "the run's folder '" + half +
              "' holds metrics.jsonl but no config.toml: choose another one, or move the file away");
  refuses("", Resume::automatic, "the path of the run's folder is empty");
  std::filesystem::remove(path + "/config.toml");
  std::filesystem::create_directory(path + "/config.toml");
  refuses(path, Resume::automatic,
          "'" + path + "/config.toml' is a folder: a run has a file there; move the folder away");
  std::filesystem::remove(path + "/config.toml");
  put(path + "/config.toml", "steps = \n");
  CHECK_THROWS_WITH(RunDirectory(path, config, Resume::automatic, true),
                    Catch::Matchers::StartsWith(path + "/config.toml:1: this is not TOML: "));
}

TEST_CASE("run directory: no option may name a file that a run writes", "[run]") {
  const Scratch folder;
  const std::string a = folder / "a", b = folder / "b", user = folder / "user";
  for (const std::string& made : {a + "/checkpoints/step-00000002", b + "/checkpoints", user})
    std::filesystem::create_directories(made);
  for (const std::string& made :
       {a + "/config.toml", a + "/run.json", b + "/checkpoints/LATEST", user + "/config.toml", user + "/metrics.jsonl"})
    put(made, "");
  const std::string next = folder / "next";                           // the folder of --run, which does not exist yet
  std::filesystem::create_symlink("a/report.html", folder / "link");  // to what does not exist yet
  std::filesystem::create_symlink("loop", folder / "loop");
  const auto refused = [&](const std::string& path, const std::string& run, const std::string& name) {
    CAPTURE(path);
    expect_error<UsageError>([&] { run::require_no_run_file(path, "--metrics", next); },
                             "--metrics '" + path + "': '" + run + "' is the folder of a run, which writes " + name +
                                 " itself; choose another name or folder");
  };
  for (const std::string& run : {a, b, next})
    for (const char* name : {"config.toml", "config.1.toml", "run.json", "run.12.json", "metrics.jsonl",
                             "metrics.3.jsonl", "samples.jsonl", "samples.1.jsonl", "console.log", "report.html",
                             "tokenizer", "checkpoints", "trace.json", "step.svg", "timeline.svg", "tensorboard"})
      refused(run + "/" + name, run, name);
  refused(a + "/checkpoints/step-00000002/manifest.json", a, "checkpoints");
  refused(next + "/tokenizer/", next, "tokenizer");
  refused(user + "/../a/./run.json", a, "run.json");
  refused(folder / "link", a, "report.html");
  for (const std::string& path :
       {a + "/mine.jsonl", a + "/report.1.html", a + "/mine/metrics.jsonl", a + "/config.x.toml", a + "/config..toml",
        next, next + "/exported", user + "/metrics.jsonl", user + "/config.toml", folder / "loop", folder / "run.json"})
    CHECK_NOTHROW(run::require_no_run_file(path, "--metrics", next));
  CHECK_NOTHROW(run::require_no_run_file(next + "/config.toml", "--metrics"));
}

TEST_CASE("run directory: a run goes on from imported checkpoints", "[run]") {
  const Scratch folder;
  const std::string path = folder / "imported", none = folder / "none";
  for (const std::string& one : {path + "/checkpoints/step-00000004", none + "/checkpoints"}) {
    std::filesystem::create_directories(one);
    put(one + "/file", "x");
  }
  for (const auto& [at, resume] : {std::pair(path, Resume::never), {none, Resume::automatic}})
    expect_error<UsageError>([&] { RunDirectory(at, config, resume, true); },
                             "the folder '" + at + "' holds other files and no run: choose another folder");
  RunDirectory run(path, config, Resume::automatic, true);
  CHECK(run.begin(4).empty());
  run.write(record(4));
  CHECK(contents(run.config()) == config);
  CHECK(run::read_records(run.metrics()).size() == 1);
}

TEST_CASE("run directory: the temporaries of a killed process are gone when the run goes on", "[run]") {
  if (under_mpi()) return;  // a rank must not fork
  const Scratch folder;
  const std::string path = folder / "run", checkpoints = path + "/checkpoints";
  make_run(path, 1);
  std::filesystem::create_directories(checkpoints);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const io::OutputFile config(path + "/config.toml"), latest(checkpoints + "/LATEST");
    std::filesystem::create_directories(io::detail::temporary_name(checkpoints + "/step-00000001") + "/weights");
    kill(getpid(), SIGKILL);
  }
  REQUIRE(waitpid(child, nullptr, 0) == child);
  CHECK(files_below(path).size() == 6);
  RunDirectory run(path, config, Resume::automatic, true);
  run.begin(0);
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path))
    CHECK(entry.path().string().find(".tmp-") == std::string::npos);
}

TEST_CASE("run directory: one process at a time", "[run]") {
  const Scratch folder;
  const std::string path = folder / "run";
  make_run(path, 1);
  {
    const RunDirectory first(path, config, Resume::automatic, true);
    expect_error(
        [&] { RunDirectory(path, config, Resume::automatic, true); },
        "another process is writing to the run's folder '" + path + "': wait until it ends, or choose another one");
  }
  CHECK(RunDirectory(path, config, Resume::automatic, true).begin(1).empty());
}

TEST_CASE("run directory: other ranks and runs without a folder write nothing", "[run]") {
  const Scratch folder;
  RunDirectory other(folder / "run", config, Resume::automatic, false), none;
  for (RunDirectory* run : {&other, &none}) {
    CHECK(run->begin(0).empty());
    run->write(record(0));
    run->write(Sample{0, "", ""});
    run->sync();
  }
  CHECK(files_below(folder.path()).empty());
  CHECK(other.checkpoints() == folder / "run/checkpoints");
  CHECK((other.exists() && !none.exists()));
}
