// Spikes, values that are not finite, saves that fail, and which checkpoints stay.
#include <fmt/format.h>

#include <shardlib/run/checkpoints.hpp>
#include <shardlib/run/impl/judge.hpp>
#include <shardlib/run/metrics.hpp>
#include <shardlib/run/training.hpp>
#include <shardlib/shardlib.hpp>

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "scratch.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

constexpr std::int64_t batch = 4, length = 5;
constexpr double inf = std::numeric_limits<double>::infinity();

/// Batches that can be told apart: each has a mark of its own.
run::Data numbered_data() {
  std::vector<std::uint32_t> document(2000);
  for (std::size_t i = 0; i < document.size(); ++i) document[i] = static_cast<std::uint32_t>(i);
  const auto source = std::make_shared<io::MemoryTokens>("numbers", std::vector<std::vector<std::uint32_t>>{document});
  const io::LoaderOptions options{.batch = batch, .length = length, .seed = 1, .vocabulary = 2000};
  const auto loader = std::make_shared<io::Loader>(source, options);
  return {std::make_shared<io::ByteTokenizer>(), loader, loader, 2000};
}

double mark_of(const io::TokenBatch& rows) {
  double sum = 0;
  for (const auto target : rows.targets) sum += std::sqrt(static_cast<double>(target));
  return sum / static_cast<double>(rows.targets.size());
}

/// A run's past: the batches that its updates were made of, and its error if it had one.
struct Done {
  std::vector<std::int64_t> batches;  ///< in the state at the end
  std::string error;
};

/// Runs a program whose state is the batches it has seen, in its checkpoints too. `loss_of(batch, state)` is the loss.
struct Experiment {
  Scratch folder = Scratch::shared(under_mpi(), world_rank());
  run::Data data = numbered_data();
  run::Training training = [this] {
    run::Training t;
    t.directory = folder / "run";
    t.batch = batch;
    t.seq = length;
    t.steps = 40;
    t.save_every = 8;
    t.spike_window = 5;
    t.check_replicas = 1;  // the devices do alike
    t.sample.max_tokens = 0;
    return t;
  }();
  std::function<double(std::int64_t batch, std::span<const f32> state)> loss_of = [](std::int64_t, auto) { return 1; };
  std::function<double(std::int64_t step)> validation_loss_after = [](std::int64_t) { return 1; };
  /// Changes the state after the update of a step.
  std::function<void(std::int64_t step, std::vector<f32>& state)> meddle = [](std::int64_t, auto&) {};

  std::int64_t state_size = 64;

  /// Nothing where there are not enough ranks, and on all ranks but the first, which alone may look at the folder.
  std::optional<Done> run(const char* mesh_text) const {
    Done done;
    const bool ran = on_mesh(mesh_text, [&](const DevicePtr& device) {
      const Mesh<"d t"> mesh(device);
      const Sizes sizes{{"Seen", state_size}};
      // Element 0 counts; batch b is element i + 1 if it was number i.
      Tensor<f32, "Seen"> seen = zeros<f32, "Seen">(mesh, sizes);
      run::Program program;
      program.checkpoints = run::checkpoints_of(mesh, seen, training);
      program.step = [&](const run::Step& step) {
        double mine = 0;
        for (const io::TokenBatch& rows : step.microbatches) mine += mark_of(rows);
        const Buffer send = device->pool()->allocate(sizeof mine), sum = device->pool()->allocate(sizeof mine);
        *send.as<double>() = mine;
        device->everybody().all_reduce(send, sum, DType::f64, Reduction::sum).wait();
        const double mean = *sum.as<double>() / device->size();
        std::int64_t number = 0;
        while (std::abs(mark_of(data.train->batch(number)) - mean) > 1e-9) ++number;
        std::vector<f32> state(seen.span().begin(), seen.span().end());
        const run::StepResult result{loss_of(number, state), 1};
        if (!step.accepts(result)) return result;
        state[static_cast<std::size_t>(++state[0])] = static_cast<f32>(number);
        meddle(step.number, state);
        const auto kept = std::make_shared<std::vector<f32>>(state);
        seen = from_memory<f32, "Seen">(mesh, sizes, std::span<const f32>(*kept), kept);
        validated_step = step.number;
        return result;
      };
      program.validate = [&](const io::TokenBatch&) { return validation_loss_after(validated_step); };
      std::string error;
      try {
        run::train(device, training, data, "", program);
      } catch (const Aborted&) {
        throw;
      } catch (const Error& e) {
        error = e.what();
      }
      if (device->rank() != 0) return;
      const auto state = seen.span();
      done.error = error;
      for (std::size_t i = 0; i < static_cast<std::size_t>(state[0]); ++i)
        done.batches.push_back(static_cast<std::int64_t>(state[i + 1]));
    });
    if (!ran || world_rank() != 0) return std::nullopt;
    return done;
  }
  [[nodiscard]] std::vector<run::Record> records() const {
    return run::read_records(training.directory + "/metrics.jsonl");
  }
  [[nodiscard]] std::vector<std::string> checkpoints() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(training.directory + "/checkpoints"))
      if (entry.is_directory()) names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  mutable std::atomic<std::int64_t> validated_step = 0;
};

std::vector<std::int64_t> range(std::int64_t first, std::int64_t end) {
  std::vector<std::int64_t> numbers;
  for (; first < end; ++first) numbers.push_back(first);
  return numbers;
}
std::vector<std::int64_t> operator+(std::vector<std::int64_t> a, const std::vector<std::int64_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const char* const meshes[] = {"d=1,t=1", "d=2,t=1", "d=2,t=2"};

TEST_CASE("spikes: what leaps out of the last steps", "[run][recovery]") {
  run::detail::SpikeWindow window(4, 3);
  for (const double loss : {2.0, 1.0, 2.0}) {
    window.add(loss, 1);
    CHECK(window.spike(100, 1).empty());  // not enough to compare with
  }
  window.add(1, 1);
  CHECK(window.spike(3.0, 1.03).empty());
  CHECK(window.spike(0, 0).empty());  // a fall is none
  CHECK(window.spike(3.5, 1) == "the loss 3.5 is 4 standard deviations above 1.5, the mean of the last 4 steps");
  // Norms that are all alike still have a deviation, of 1 %.
  CHECK(window.spike(1, 1.04) ==
        "the gradient norm 1.04 is 4 standard deviations above 1, the mean of the last 4 steps");
  for (int i = 0; i < 4; ++i) window.add(0, 0);
  CHECK(window.spike(1e-30, 0) == "the loss 1e-30 is above 0, the mean of the last 4 steps");
  window.clear();
  CHECK(window.spike(1, 1).empty());
}

TEST_CASE("training: --on-spike skip makes no update of a step that leaps, and says so", "[run][recovery]") {
  for (const char* mesh : meshes)
    for (const double loss : {50.0, inf}) {
      INFO(mesh << " " << loss);
      Experiment e;
      e.training.on_spike = "skip";
      e.loss_of = [&](std::int64_t number, auto) {
        return number == 20 || number == 21 ? loss : 1 + 0.01 * static_cast<double>(number % 3);
      };
      e.training.steps = 18;
      if (const auto done = e.run(mesh)) CHECK(done->error.empty());
      e.training.steps = 40;  // the window of the first run counts
      const auto done = e.run(mesh);
      if (!done) continue;
      CHECK(done->error.empty());
      CHECK(done->batches == range(0, 20) + range(22, 40));
      const auto records = e.records();
      REQUIRE(records.size() == 40);
      CHECK(records[18].events == std::vector<std::string>{fmt::format("resumed at step 18 on mesh {}", mesh)});
      CHECK((records[20].skipped && records[21].skipped && !records[22].skipped));
      REQUIRE(records[20].events.size() == 1);
      const std::string why = std::isfinite(loss) ? "the loss 50 is " : "loss inf and gradient norm 1 are not finite";
      CHECK(records[20].events[0].starts_with("step 20: " + why));
      CHECK(records[20].events[0].ends_with("; its update is skipped"));
      CHECK(records[22].events.empty());
    }
}

TEST_CASE("training: --on-spike rewind goes back to a checkpoint and on with later batches", "[run][recovery]") {
  for (const char* mesh : meshes) {
    INFO(mesh);
    const auto loss = [](std::int64_t number, auto) { return number == 20 || number == 25 ? 50.0 : 1.0; };
    // Back to 16, then with batch 21; at batch 25, step 20, back to 16 again, then with batch 26.
    const auto expected = range(0, 16) + range(26, 50);
    Experiment e;
    e.training.on_spike = "rewind";
    e.loss_of = loss;
    const auto whole = e.run(mesh);
    Experiment parts;
    parts.training.on_spike = "rewind";
    parts.loss_of = loss;
    parts.training.steps = 30;
    parts.run(mesh);
    parts.training.steps = 40;
    const auto rest = parts.run(mesh);
    if (!whole || !rest) continue;
    CHECK(whole->error.empty());
    CHECK(whole->batches == expected);
    CHECK(rest->batches == expected);  // the checkpoint knows which batches were passed over
    const auto records = e.records();
    REQUIRE(records.size() == 40);
    for (std::size_t i = 0; i < records.size(); ++i)
      CHECK((records[i].step == std::int64_t(i) && records[i].loss == 1));
    REQUIRE(records[16].events.size() == 2);
    CHECK(records[16].events[1] ==
          "step 20: the loss 50 is 4.9e+03 standard deviations above 1, the mean of the last 5 steps; the run goes "
          "back to the checkpoint of step 16, and from there on with the batches after this one");
  }
}

TEST_CASE("training: a run that cannot get past a spike ends", "[run][recovery]") {
  const char* const mesh = "d=2,t=1";
  Experiment e;
  e.loss_of = [](std::int64_t number, auto) { return number >= 20 ? 50.0 : 1.0; };
  const std::string leaps = "step 20: the loss 50 is 4.9e+03 standard deviations above 1, the mean of the last 5 steps";
  const std::string remedy = "lower --learning-rate, look at the data of this step, or continue with --on-spike ";
  e.training.on_spike = "stop";
  if (const auto done = e.run(mesh)) {
    CHECK(done->error == leaps + "; " + remedy + "skip or rewind. The last checkpoint is untouched");
    CHECK(done->batches == range(0, 20));
  }
  e.training.on_spike = "skip";
  if (const auto done = e.run(mesh)) {
    CHECK(done->error == "step 30" + leaps.substr(7) + ", and 10 steps in a row were skipped; " + remedy +
                             "rewind. The last checkpoint is untouched");
    CHECK(done->batches == range(0, 20));
  }
  e.training.on_spike = "rewind";
  if (const auto done = e.run(mesh))
    CHECK(
        done->error.ends_with("; 3 times the run has gone back to the checkpoint of step 24, each time with later "
                              "data: lower --learning-rate, or start from an older checkpoint"));
  Experiment early;
  early.training.on_spike = "rewind";
  early.loss_of = [](std::int64_t number, auto) { return number == 6 ? 50.0 : 1.0; };
  if (const auto done = early.run(mesh)) {
    CHECK(done->error.empty());
    CHECK(done->batches == range(7, 47));  // back to the first values, which the run has saved as step 0
  }
  Experiment nowhere;
  nowhere.training.on_spike = "rewind";
  nowhere.training.directory = "";
  if (const auto done = nowhere.run(mesh))
    CHECK(done->error ==
          "--on-spike rewind goes back to a checkpoint, and without --run DIR there is none: give it too");
}

TEST_CASE("training: a program that does not ask before its update cannot have --on-spike", "[run][recovery]") {
  on_mesh("d=2", [](const DevicePtr& device) {
    run::Training training;
    training.on_spike = "skip";
    training.sample.max_tokens = 0;
    run::Program program;
    program.step = [](const run::Step&) { return run::StepResult{1, 1}; };
    expect_error<UsageError>(
        [&] { run::train(device, training, run::Data{}, "", program); },
        "--on-spike skip: this program does not check a step before it updates: it has to call run::Step::accepts");
  });
}

TEST_CASE("training: a checkpoint whose first steps are not finite is set aside, once", "[run][recovery]") {
  for (const char* mesh : meshes)
    for (const bool always : {false, true}) {
      INFO(mesh << " " << always);
      Experiment e;
      e.training.steps = 24;
      // Element 60 is what goes bad in the last step, too late to be seen before the checkpoint is saved.
      e.meddle = [](std::int64_t step, std::vector<f32>& state) { state[60] = step == 23 ? 1 : 0; };
      e.loss_of = [](std::int64_t, std::span<const f32> state) { return state[60] == 1 ? inf : 1.0; };
      e.run(mesh);
      e.training.steps = 40;
      e.meddle = [always](std::int64_t step, std::vector<f32>& state) { state[60] = always && step == 20 ? 1 : 0; };
      const auto done = e.run(mesh);
      if (!done) continue;
      using Names = std::vector<std::string>;
      CHECK(e.checkpoints() == (always ? Names{"step-00000016", "step-00000024.diverged"}
                                       : Names{"step-00000024.diverged", "step-00000032", "step-00000040"}));
      if (always) {
        CHECK(done->error.starts_with(
            "step 21: loss inf and gradient norm 1 are not finite; lower --learning-rate, look at the data of this "
            "step, find the first op with a NaN, if one has it, by --find-nan, or continue with --on-spike "));
        continue;
      }
      CHECK(done->error.empty());
      CHECK(done->batches == range(0, 40));
      const auto records = e.records();
      REQUIRE(records.size() == 40);
      REQUIRE(records[16].events.size() == 2);
      CHECK(records[16].events[1] ==
            "step 24: loss inf and gradient norm 1 are not finite; the checkpoint of step 24 is set aside as diverged, "
            "and the run continues from the one of step 16");
    }
}

TEST_CASE("training: a save that fails is tried again at the next one", "[run][recovery]") {
  if (under_mpi()) return;
  for (const char* mesh : {"d=1,t=1", "d=2,t=1"}) {
    std::atomic<int> saves = 0;
    std::vector<int> failing;
    const auto restore = std::shared_ptr<void>(nullptr, [](void*) { test::checkpoint_phase = nullptr; });
    test::checkpoint_phase = [&](std::string_view phase, int device) {
      if (device != 0) return;
      if (phase == "planned") ++saves;
      if (phase == "manifest" && std::ranges::find(failing, saves.load()) != failing.end())
        throw StorageError("cannot write 'x': No space left on device");
    };
    Experiment e;
    failing = {2, 3};
    const auto done = e.run(mesh);
    CHECK(done->error.empty());
    CHECK(saves == 5);
    CHECK(e.checkpoints() == std::vector<std::string>{"step-00000032", "step-00000040"});

    Experiment ends;
    saves = 0;
    failing = {2, 3, 4};
    const auto stopped = ends.run(mesh);
    CHECK(stopped->error.starts_with("3 checkpoints in a row could not be saved; the last error: checkpoint '"));
    CHECK(stopped->error.find("was not saved: cannot write 'x': No space left on device") != std::string::npos);
    CHECK(
        stopped->error.ends_with("; make room, and give the same command, which resumes from the last complete "
                                 "checkpoint, or starts again if there is none"));
    CHECK(ends.checkpoints() == std::vector<std::string>{"step-00000008"});

    // The last one has no next: it is tried again at once.
    Experiment last;
    saves = 0;
    failing = {5};
    CHECK(last.run(mesh)->error.empty());
    CHECK(saves == 6);
    CHECK(last.checkpoints() == std::vector<std::string>{"step-00000032", "step-00000040"});
  }
}

TEST_CASE("training: a folder that is emptied during a save costs that save", "[run][recovery]") {
  if (under_mpi()) return;
  for (const char* mesh : {"d=1,t=1", "d=2,t=1"}) {
    std::atomic<int> saves = 0;
    std::vector<int> emptied;
    std::string folder;
    const auto restore = std::shared_ptr<void>(nullptr, [](void*) { test::checkpoint_phase = nullptr; });
    test::checkpoint_phase = [&](std::string_view phase, int device) {
      if (device != 0) return;
      if (phase == "planned") ++saves;
      if (phase != "manifest" || std::ranges::find(emptied, saves.load()) == emptied.end()) return;
      for (const auto& entry : std::filesystem::directory_iterator(folder)) std::filesystem::remove_all(entry.path());
    };
    Experiment e;
    folder = e.training.directory;
    emptied = {2, 3};
    const auto done = e.run(mesh);
    CHECK(done->error.empty());
    CHECK(e.checkpoints() == std::vector<std::string>{"step-00000032", "step-00000040"});
    CHECK(e.records().size() == 40);

    Experiment ends;
    folder = ends.training.directory;
    saves = 0;
    emptied = {2, 3, 4};
    CHECK(ends.run(mesh)->error.starts_with("3 checkpoints in a row could not be saved; the last error: checkpoint '" +
                                            folder + "/checkpoints/step-00000032' was not saved: cannot rename '"));
  }
}

TEST_CASE("training: the newest checkpoints stay, every k-th, and the best", "[run][recovery]") {
  Experiment e;
  e.training.save_every = 4;
  e.training.validate_every = 2;
  e.training.keep = 2;
  e.training.keep_every = 16;
  e.training.keep_best = 1;
  // After step 11 the loss is lowest, so the checkpoint of step 12 has the best; that of 16 would have been next.
  e.validation_loss_after = [](std::int64_t step) { return std::abs(static_cast<double>(step) - 11.5) + 1; };
  const auto done = e.run("d=2,t=1");
  if (!done) return;
  CHECK(done->error.empty());
  CHECK(e.checkpoints() ==
        std::vector<std::string>{"step-00000012", "step-00000016", "step-00000032", "step-00000036", "step-00000040"});
  const io::CheckpointMeta meta = io::Checkpoint::open(e.training.directory + "/checkpoints/step-00000012").meta();
  CHECK(meta.validation_loss == 1.5);
}

TEST_CASE("metrics: lines that the storage refuses wait for room", "[run][recovery]") {
  if (world_rank() != 0) return;
  const Scratch folder;
  const std::string path = folder / "metrics.jsonl";
  const auto before = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{}, unlimited{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &unlimited) == 0);
  limit = unlimited;
  {
    run::JsonLines lines(path, run::JsonLines::Mode::append);
    lines.write(run::Record{.step = 0});
    const std::string first = contents(path);
    limit.rlim_cur = first.size() + 10;  // the next line would be torn
    REQUIRE(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    for (std::int64_t step = 1; step < 4; ++step) lines.write(run::Record{.step = step});
    const std::string cut = contents(path), refused = error_of<StorageError>([&] { lines.sync(); });
    const auto back = lines.cut(3);  // also among those that wait
    REQUIRE(setrlimit(RLIMIT_FSIZE, &unlimited) == 0);
    CHECK(cut == first);
    CHECK(refused == "cannot write to the file '" + path + "': File too large");
    CHECK(back == run::JsonLines::Removed{});
    lines.write(run::Record{.step = 3});
    lines.sync();
  }
  std::signal(SIGXFSZ, before);
  const auto records = run::read_records(path);
  REQUIRE(records.size() == 4);
  for (std::size_t i = 0; i < 4; ++i) CHECK(records[i].step == std::int64_t(i));
}

}  // namespace
