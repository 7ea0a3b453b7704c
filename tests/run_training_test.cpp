// The loop around a program's step (run/training.hpp): the weights it hands out, and the losses that follow from them,
// in training and validation, on every mesh and with every number of microbatches.
#include <shardlib/io/data/flat_tokens.hpp>
#include <shardlib/io/data/token_files.hpp>
#include <shardlib/run/checkpoints.hpp>
#include <shardlib/run/hugging_face.hpp>
#include <shardlib/run/impl/stop_on_signal.hpp>
#include <shardlib/run/metrics.hpp>
#include <shardlib/run/microbatches.hpp>
#include <shardlib/run/training.hpp>
#include <shardlib/shardlib.hpp>

#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "resident.hpp"
#include "scratch.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

constexpr std::int64_t batch = 8, length = 6, steps = 3;

/// A run of so many steps of `data`, without samples.
run::Training of_steps(std::int64_t count) {
  run::Training training;
  training.steps = count;
  training.batch = batch;
  training.seq = length;
  training.sample.max_tokens = 0;
  return training;
}

/// A loss of each token that any program can compute: its target's id.
double weighted_sum(const io::TokenBatch& rows) {
  double sum = 0;
  for (std::size_t i = 0; i < rows.targets.size(); ++i)
    sum += static_cast<double>(rows.weights[i]) * static_cast<double>(rows.targets[i]);
  return sum;
}

/// The same over all devices of d: those of t have the same rows.
double over_devices(const DevicePtr& device, double mine) {
  const Buffer send = device->pool()->allocate(sizeof mine), sum = device->pool()->allocate(sizeof mine);
  *send.as<double>() = mine;
  device->everybody().all_reduce(send, sum, DType::f64, Reduction::sum).wait();
  return *sum.as<double>() / static_cast<double>(device->size() / device->size("d"));
}

/// 21 documents of 1 to 9 tokens, some longer than a row: with batches of 8, a pass ends within the third.
run::Data data(io::Rows rows) {
  std::vector<std::vector<std::uint32_t>> documents(21);
  std::uint32_t id = 1;
  for (std::size_t i = 0; i < documents.size(); ++i)
    for (std::size_t k = 0; k < 1 + i * 5 % 9; ++k) documents[i].push_back(id++);
  const auto source = std::make_shared<io::MemoryTokens>("memory", documents);
  io::LoaderOptions options{.batch = batch, .length = length, .seed = 1, .rows = rows, .vocabulary = 256};
  run::Data data{std::make_shared<io::ByteTokenizer>(), std::make_shared<io::Loader>(source, options), nullptr, 256};
  options.shuffle = options.repeat = false;
  data.validation = std::make_shared<io::Loader>(source, options);
  return data;
}

/// The weights of a small model on axes of the program's own names.
struct Table {
  Tensor<f32, "V/shard"> logit;
};
struct TableState {
  Table weights, mu, nu;
};

TEST_CASE("training: a program's mesh has axes of its own names", "[run][training]") {
  const Scratch folder = Scratch::shared(under_mpi(), world_rank());
  std::vector<double> losses;
  for (const char* text : {"replica=1,shard=1,model=1", "replica=2,shard=1,model=1", "replica=1,shard=2,model=2",
                           "replica=2,shard=2,model=1"}) {
    INFO(text);
    const run::Data tokens = data(io::Rows::packed);
    run::Training training = of_steps(4);
    training.batch_axes = "replica shard";
    training.mesh = text;
    training.microbatches = 2;
    training.validate_every = 2;
    training.directory = folder / std::string(text);
    training.metrics = folder / (std::string(text) + ".jsonl");
    training.save_every = 2;
    const auto mesh_sizes = run::chosen_mesh(training, "replica shard model");
    run::batch_must_divide(mesh_sizes, training);
    const bool ran = on_mesh(text, [&](const Mesh<"replica shard model">& mesh) {
      const Table w{random_normal<f32, "V/shard">(mesh, {{"V", 256}}, {1, 2})};
      TableState state{w, zeros_like(w), zeros_like(w)};
      using Loss = Tensor<f32, "+replica +shard +model">;
      const auto loss = [](const Table& table, const Tensor<i32, "B/replica/shard L">& targets,
                           const Tensor<f32, "B/replica/shard L">& shares) -> Loss {
        const auto logits = all_gather<over<"shard">>(table.logit);
        const auto picked = index_unreduced<"[V], B/replica/shard L -> B/replica/shard L">(square(logits), targets);
        return to_partial<over<"model">>(sum(picked * shares));
      };
      const auto place = [&](const io::TokenBatch& rows) {
        const Sizes sizes{{"B", std::ssize(rows.targets) / length * mesh.size("replica") * mesh.size("shard")},
                          {"L", length}};
        return std::pair(from_memory<i32, "B/replica/shard L">(mesh, sizes, std::span<const i32>(rows.targets)),
                         from_memory<f32, "B/replica/shard L">(mesh, sizes, std::span<const f32>(rows.weights)));
      };
      run::Program program;
      program.checkpoints = run::checkpoints_of(mesh, state, training);
      program.parameters = 256;
      program.flops_per_token = 1;
      program.step = [&](const run::Step& step) {
        Loss total;
        gradient_t<Mesh<"replica shard model">, Table> sums;
        for (const io::TokenBatch& part : step.microbatches) {
          const auto [targets, shares] = place(part);
          const auto [l, g] = value_and_grad(mesh, loss, state.weights, targets, shares);
          sums = total ? map_tree([](const auto& a, const auto& b) { return a + b; }, sums, g) : g;
          total = total ? total + l : l;
        }
        const Table grads = reduce_gradients(mesh, sums);
        const double norm = global_norm(mesh, grads);
        AdamW().update(state.weights, state.mu, state.nu, grads, step.learning_rate, 1.0, step.number,
                       [](std::string_view) { return false; });
        return run::StepResult{item(all_reduce<"">(total)), norm};
      };
      program.validate = [&](const io::TokenBatch& rows) -> double {
        const auto [targets, shares] = place(rows);
        return item(all_reduce<"">(loss(state.weights, targets, shares)));
      };
      run::train(mesh.device(), training, tokens, "", program);
    });
    if (!ran || world_rank() != 0) continue;
    std::istringstream lines(contents(training.metrics));
    std::vector<double> found;
    for (std::string line; std::getline(lines, line);) {
      const auto record = nlohmann::json::parse(line);
      if (record.contains("loss")) found.push_back(record["loss"].get<double>());
    }
    REQUIRE(found.size() >= 4);
    if (losses.empty()) losses = found;
    for (std::size_t i = 0; i < found.size(); ++i)
      CHECK(std::abs(found[i] - losses[i]) <= 1e-5 * (1 + std::abs(losses[i])));
    CHECK(std::filesystem::exists(std::filesystem::path(training.directory) / "checkpoints"));
  }
  // A name that the mesh has not is an error at once.
  run::Training wrong = of_steps(1);
  const auto mesh = parse_mesh("data=1,model=1");
  expect_error<UsageError>([&] { run::batch_must_divide(mesh, wrong); },
                           "the batch is sharded over `d`, says run::Training::batch_axes, but the program's mesh has "
                           "the axes `data model`: name those of them that shard the batch");
  expect_error<UsageError>([&] { static_cast<void>(run::chosen_mesh(wrong, "data model")); },
                           "the batch is sharded over `d`, says run::Training::batch_axes, but the program's mesh has "
                           "the axes `data model`: name those of them that shard the batch");
  for (const auto& [given, chosen, batch] :
       {std::tuple("d=4", "d=4,t=1", "d"),
        {"r=1,d=4", "d=4,t=1", "d"},  // as without r, so that it resumes such a run
        {"r=2,d=2", "r=2,d=2,t=1", "r d"}}) {
    run::Training training;
    training.batch_axes = "r d";
    training.mesh = given;
    CHECK(to_string(run::chosen_mesh(training, "r d t", "r")) == chosen);
    CHECK(training.mesh == chosen);
    CHECK(training.batch_axes == batch);
  }
  wrong.batch_axes = "data model";
  wrong.batch = 7;
  expect_error<UsageError>([&] { run::batch_must_divide(parse_mesh("data=2,model=2"), wrong); },
                           "--batch 7 does not divide over data * model = 4 (mesh data=2,model=2): choose a multiple "
                           "of 4, or a mesh of data * model = 1");
  // With microbatches too, the remedy is a --batch, and one that passes both checks.
  wrong.microbatches = 3;
  expect_error<UsageError>([&] { run::batch_must_divide(parse_mesh("data=2,model=2"), wrong); },
                           "--batch 7 does not divide into --microbatches 3, each over data * model = 4: choose a "
                           "multiple of 12");
  wrong.batch = 6;
  expect_error<UsageError>(
      [&] { run::batch_must_divide(parse_mesh("data=2,model=2"), wrong); },
      "--batch 6 / --microbatches 3 = 2 does not divide over data * model = 4 (mesh data=2,model=2): "
      "choose a --batch that is a multiple of 12, or a mesh of data * model = 2");
  wrong.batch = 12;
  CHECK_NOTHROW(run::batch_must_divide(parse_mesh("data=2,model=2"), wrong));
}

TEST_CASE("training: a longer run keeps its learning rates with --decay-steps", "[run][training]") {
  run::Training training;
  // The rates of the steps of a run with a peak of 1 and two steps of warmup.
  const auto rates = [&](std::vector<const char*> line) {
    training = of_steps(0);
    run::Options options("trainer", "Trains.");
    run::declare(options, training);
    line.insert(line.begin(), {"trainer", "--warmup=2", "--learning-rate=1"});
    REQUIRE(options.parse(static_cast<int>(line.size()), line.data()));
    const LrSchedule rate = run::lr_schedule(training);
    std::vector<double> found;
    for (std::int64_t step = 0; step < training.steps; ++step) found.push_back(rate(step));
    return found;
  };
  const char *linear = "--lr-schedule=linear", *half = "--final-learning-rate=0.5";
  using Rates = std::vector<double>;
  CHECK(rates({"--steps=3"}) == Rates{0.5, 1, 0.1});  // the default: a cosine until --steps
  CHECK(rates({"--steps=7", linear, half}) == Rates{0.5, 1, 1, 0.875, 0.75, 0.625, 0.5});
  CHECK(rates({"--steps=4", linear, half, "--decay-steps=7"}) == Rates{0.5, 1, 1, 0.875});
  CHECK(rates({"--steps=4", "--lr-schedule=constant", "--warmup-from=0"}) == Rates{0, 0.5, 1, 1});
  CHECK(rates({"--steps=7", "--lr-schedule=wsd", "--decay-fraction=0.3", "--final-learning-rate=0"}) ==
        Rates{0.5, 1, 1, 1, 1, 0.5, 0});
  const Rates longer = rates({"--steps=9", linear, half, "--decay-steps=7"});
  CHECK(longer == Rates{0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.5, 0.5});

  // The loop gives them to the program.
  on_mesh("d=1", [&](const DevicePtr& device) {
    Rates found;
    run::Program program;
    program.step = [&](const run::Step& step) {
      found.push_back(step.learning_rate);
      return run::StepResult{1, 1};
    };
    run::train(device, training, data(io::Rows::packed), "", program);
    expect(found == longer, "the rates of the steps");
  });

  training.decay_steps = training.warmup = 20;
  expect_error<UsageError>([&] { static_cast<void>(run::lr_schedule(training)); },
                           "--decay-steps 20 counts the steps of --warmup 20 too, so no step is left for the decay: "
                           "choose more than 20, or a shorter --warmup");
}

TEST_CASE("training: what a program without a function cannot do", "[run][training]") {
  if (under_mpi()) return;
  const Scratch folder;
  on_mesh("d=1", [&](const DevicePtr& device) {
    run::Program program;
    const auto without_step = [&] { run::train(device, of_steps(1), data(io::Rows::packed), "", program); };
    CHECK(error_of<Error>(without_step) ==
          "train: Program::step is empty, so there is nothing to train; give it a function that computes a step, "
          "program.step = [&](const run::Step& step) -> run::StepResult { ... }");
    program.step = [](const run::Step&) { return run::StepResult{1, 1}; };
    const auto train = [&](const run::Training& training) {
      return error_of<UsageError>([&] { run::train(device, training, data(io::Rows::packed), "", program); });
    };
    const std::string why = " computes a loss, and this program's Program::validate is empty: leave it out";
    run::Training validates = of_steps(1), evaluates = of_steps(1), samples = of_steps(1);
    validates.validate_every = 10;
    CHECK(train(validates) == "--validate-every 10" + why);
    evaluates.evaluate = "questions.jsonl";
    CHECK(train(evaluates) == "--evaluate questions.jsonl" + why);
    samples.sample.max_tokens = 3;
    samples.directory = folder / "run";
    run::train(device, samples, data(io::Rows::packed), "", program);  // saves nothing
    CHECK(run::read_records(samples.directory + "/metrics.jsonl").size() == 1);
    CHECK(files_below(samples.directory + "/checkpoints").empty());
    CHECK(contents(samples.directory + "/console.log")
              .find("note: this program draws no samples: its Program::decode is empty") != std::string::npos);
    samples.on_spike = "rewind";
    CHECK(train(samples) ==
          "--on-spike rewind goes back to a checkpoint, and this program saves none: choose another action");
    samples.sample_only = true;
    program.decode = [](auto, std::int64_t) { return std::vector<float>(256); };
    CHECK(train(samples) == "--run '" + samples.directory +
                                "' has no checkpoint to sample from: give the folder of a run that has saved one");
  });
}

TEST_CASE("training: a loss is the mean over the tokens that count, on every mesh, in microbatches, in validation",
          "[run][training]") {
  const Scratch folder = Scratch::shared(under_mpi(), world_rank());
  for (const auto rows : {io::Rows::packed, io::Rows::padded, io::Rows::stories})
    for (const char* mesh : {"d=1,t=1", "d=2,t=2"})
      for (const std::int64_t microbatches : {1, 2}) {
        INFO(mesh << ", " << microbatches << " microbatches, rows " << static_cast<int>(rows));
        const run::Data tokens = data(rows);
        run::Training training;
        training.steps = steps;
        training.batch = batch;
        training.seq = length;
        training.microbatches = microbatches;
        training.validate_every = 1;
        training.sample.max_tokens = 0;
        training.metrics = folder / "metrics.jsonl";
        const bool ran = on_mesh(mesh, [&](const DevicePtr& device) {
          run::Program program;
          program.parameters = 1;
          program.flops_per_token = 1;
          program.step = [&](const run::Step& step) {
            const std::vector<io::TokenBatch>& parts = step.microbatches;
            expect(std::ssize(parts) == microbatches, "as many parts as microbatches");
            double loss = 0, shares = 0;
            for (const io::TokenBatch& part : parts) {
              loss += weighted_sum(part);
              for (const float weight : part.weights) shares += static_cast<double>(weight);
            }
            const double all = over_devices(device, shares);
            expect(std::abs(all - 1) < 1e-6, "the weights add up to " + show(all));
            return run::StepResult{over_devices(device, loss), 0};
          };
          std::int64_t calls = 0;
          program.validate = [&](const io::TokenBatch& all) {
            calls = 0;
            const auto loss_of = [&](const io::TokenBatch& part) { return ++calls, weighted_sum(part); };
            const double mine = run::sum_of_parts(training, all, loss_of);
            expect(calls == microbatches, "a part for each microbatch");
            return over_devices(device, mine);
          };
          run::train(device, training, tokens, "", program);
        });
        if (!ran || world_rank() != 0) continue;

        // By hand, from whole batches as the loader has them: sums over sums.
        const auto mean = [](const io::Loader& loader, std::int64_t first, std::int64_t end) {
          double loss = 0, count = 0;
          for (std::int64_t step = first; step < end; ++step) {
            const io::TokenBatch whole = loader.batch(step);
            loss += weighted_sum(whole);
            for (const float weight : whole.weights) count += static_cast<double>(weight);
          }
          return loss / count;
        };
        const double validation = mean(*tokens.validation, 0, tokens.validation->steps_per_epoch());
        std::istringstream lines(contents(training.metrics));
        std::int64_t step = 0;
        for (std::string line; std::getline(lines, line); ++step) {
          const auto record = nlohmann::json::parse(line);
          CHECK(record.at("loss").get<double>() == Approx(mean(*tokens.train, step, step + 1)).epsilon(1e-6));
          CHECK(record.at("validation_loss").get<double>() == Approx(validation).epsilon(1e-6));
        }
        CHECK(step == steps);
      }
}

TEST_CASE("training: documents of a text end with the end of text where they are rows", "[run][training]") {
  if (world_rank() != 0) return;
  const Scratch folder;
  run::Training training;
  training.data = training.validation_data = folder / "text.txt";
  put(training.data, "abc<|endoftext|>defgh<|endoftext|>i");
  training.batch = 2;
  training.seq = 8;
  training.validate_every = 1;
  const auto counted = [&](const std::string& rows) {
    training.rows = rows;
    const run::Data data = run::open_data(training, 0);
    double tokens = 0;
    for (std::int64_t step = 0; step < data.validation->steps_per_epoch(); ++step)
      for (const float weight : data.validation->batch(step).weights) tokens += static_cast<double>(weight);
    CHECK_THROWS_AS(data.validation->batch(data.validation->steps_per_epoch()), Error);  // no token twice
    return tokens;
  };
  CHECK(counted("padded") == 4 + 6 + 2);
  CHECK(counted("stories") == 3 * 8);  // the filling of a row counts, the filling of the last batch does not
  CHECK(counted("packed") == 3 + 5 + 1);
}

TEST_CASE("training: epochs become steps, and rows may keep the order of the data", "[run][training]") {
  if (world_rank() != 0) return;
  const Scratch folder;
  run::Training training;
  training.data = folder / "text.txt";
  put(training.data, "abcdefghijklmnopqrstuvwxyz");  // 7 rows of 4 tokens, the last one filled up
  training.batch = 2;
  training.seq = 4;
  training.epochs = 3;
  CHECK(run::open_data(training, 0).train->options().shuffle);
  CHECK(training.steps == 10);              // of 78 tokens
  training.epochs = std::int64_t{1} << 24;  // what --epochs takes at most, and --steps
  CHECK_THROWS_WITH(run::open_data(training, 0),
                    "--epochs 16777216 are 54525952 steps, but a run has 16777216 at most: choose fewer epochs");
  training.epochs = std::numeric_limits<std::int64_t>::max() / 8;
  CHECK_THROWS_WITH(run::open_data(training, 0), Catch::Contains("choose fewer epochs"));
  training.epochs = 0;
  training.shuffle = "no";
  training.steps = 7;
  const run::Data data = run::open_data(training, 0);
  CHECK(training.steps == 7);
  const io::TokenBatch first = data.train->batch(0);
  CHECK(std::string(first.targets.begin(), first.targets.end()) == "abcdefgh");

  training.data.clear();
  training.text_stream = folder.path();
  CHECK_THROWS_WITH(run::open_data(training, 0), Catch::Contains("--shuffle no has no meaning"));
  training.shuffle = "yes";
  training.epochs = 1;
  CHECK_THROWS_WITH(run::open_data(training, 0), Catch::Contains("--epochs has no meaning"));
}

TEST_CASE("training: data that another tokenizer made are refused, whichever of their folders is named",
          "[run][training]") {
  if (world_rank() != 0) return;
  const Scratch folder;
  run::Training training;
  training.data = folder / "tokens.zarr";
  training.seq = 4;
  io::FlatTokensWriter writer(training.data);
  writer.add(io::Split::train, std::vector<std::uint32_t>(20, 7));
  writer.finish();
  CHECK(run::open_data(training, 0).train);  // no tokenizer is named
  put(training.data + "/.zattrs", R"({"tokenizer": "gpt2", "tokenizer_fingerprint": "306cd27f03c1"})");
  const std::string whole = training.data;
  for (const std::string& path : {whole, whole + "/train"}) {
    training.data = path;
    CHECK_THROWS_WITH(run::open_data(training, 0),
                      "--data: '" + path +
                          "' was made with the tokenizer gpt2 (fingerprint 306cd27f03c1), but --tokenizer bytes is "
                          "bytes (fingerprint bytes): give the tokenizer that made it, or tokenize its texts again");
  }
  put(whole + "/.zattrs", R"({"tokenizer": "bytes", "tokenizer_fingerprint": "bytes"})");
  CHECK(run::open_data(training, 0).train);
}

TEST_CASE("training: .bin files remember their tokenizer too", "[run][training]") {
  if (world_rank() != 0) return;
  const Scratch folder;
  run::Training training;
  training.seq = 4;
  io::BinWriter writer(folder / "train.bin");
  writer.add(std::vector<std::uint32_t>(20, 7));
  writer.finish();
  put(folder / "tokens.json",
      R"({"format": "shardlib-tokens", "tokenizer": "bpe-0", "tokenizer_fingerprint": "0", "end_of_text": 9})");
  for (const std::string& path : {folder.path(), folder / "train.bin", folder / "train*.bin"}) {
    training.data = path;
    CHECK_THROWS_WITH(run::open_data(training, 50257),
                      "--data: '" + path +
                          "' was made with the tokenizer bpe-0 (fingerprint 0), but --tokenizer bytes is " +
                          "bytes (fingerprint bytes): give the tokenizer that made it, or tokenize its texts again");
  }
  std::filesystem::remove(folder / "tokens.json");
  CHECK(run::open_data(training, 50257).train);
}

TEST_CASE("training: a loaded folder gives its tokenizer, unless another is given", "[run][training]") {
  const Scratch folder;
  const auto tokenizer_of = [&](const std::vector<const char*>& arguments, bool gpt2 = false) {
    run::Training training;
    run::Options options("test", "Tests.");
    run::declare(options, training);
    CHECK(options.parse(static_cast<int>(arguments.size()), arguments.data()));
    run::imply_tokenizer(options, folder.path(), gpt2);
    CHECK(options.given("--tokenizer") == (training.tokenizer != "bytes" || arguments.size() > 1));
    return training.tokenizer;
  };
  CHECK(tokenizer_of({"test"}) == "bytes");  // the folder has none
  put(folder / "merges.txt", "");
  CHECK(tokenizer_of({"test"}, true) == "bytes");
  put(folder / "vocab.json", "{}");
  CHECK(tokenizer_of({"test"}, true) == folder.path());
  CHECK(tokenizer_of({"test"}) == "bytes");
  CHECK(tokenizer_of({"test", "--tokenizer", "bytes"}, true) == "bytes");
  put(folder / "tokenizer.json", "{}");
  CHECK(tokenizer_of({"test"}) == folder / "tokenizer.json");
  CHECK(tokenizer_of({"test", "--tokenizer", "bytes"}) == "bytes");
}

TEST_CASE("training: the parts of a step add up, and what lies within another counts once", "[run][training]") {
  using shardlib::detail::Stopwatch;
  Stopwatch watch;
  watch.change(Stopwatch::backward, 5);  // before anybody looks
  watch.reset(100);
  const auto outside = watch.change(Stopwatch::forward, 103);
  const auto inside = watch.change(Stopwatch::communication, 110);
  CHECK(inside == Stopwatch::forward);
  watch.change(inside, 150);
  watch.change(Stopwatch::backward, 151);
  watch.change(outside, 181);
  watch.change(Stopwatch::rest, 186);
  CHECK(watch.seconds(Stopwatch::rest) == Approx(8e-9));
  CHECK(watch.seconds(Stopwatch::forward) == Approx(8e-9));
  CHECK(watch.seconds(Stopwatch::backward) == Approx(30e-9));
  CHECK(watch.seconds(Stopwatch::communication) == Approx(40e-9));

  const Scratch folder = Scratch::shared(under_mpi(), world_rank());
  const run::Data tokens = data(io::Rows::packed);
  run::Training training = of_steps(4);
  training.validate_every = 2;
  training.save_every = 2;
  training.directory = folder / "run";
  const bool ran = on_mesh("d=2", [&](const Mesh<"d">& mesh) {
    Tensor<f32, "A/d"> weight = ones<f32, "A/d">(mesh, {{"A", 4}});
    const auto loss = [](const Tensor<f32, "A/d">& w) -> Tensor<f32, "+d"> {
      return sum<"A/d -> +d">(shard<"A -> A/d">(square(all_gather<"A/d -> A">(w))));
    };
    run::Program program;
    program.checkpoints = run::checkpoints_of(mesh, weight, training);
    program.step = [&](const run::Step&) {
      const auto [l, g] = value_and_grad(mesh, loss, weight);
      weight = weight - g * 0.1;
      return run::StepResult{item(all_reduce<"+d -> ">(l)), 0};
    };
    program.validate = [&](const io::TokenBatch&) { return item(all_reduce<"+d -> ">(loss(weight))); };
    run::train(mesh.device(), training, tokens, "", program);
  });
  if (!ran || world_rank() != 0) return;
  const auto records = run::read_records(training.directory + "/metrics.jsonl");
  REQUIRE(records.size() == 4);
  for (const run::Record& record : records) {
    std::vector<std::string> names;
    double step = 0;
    for (const auto& [name, seconds] : record.seconds) {
      names.push_back(name);
      CHECK(seconds > 0);
      if (name != "validation" && name != "checkpoint") step += seconds;
    }
    std::vector<std::string> expected{"data", "forward", "backward", "optimizer", "communication"};
    if (record.step % 2 == 1) expected.emplace_back("validation");
    if (record.step == 2) expected.emplace_back("checkpoint");  // of the two steps before
    CHECK(names == expected);
    CHECK(record.step_seconds == Approx(step).epsilon(1e-9));
  }
}

TEST_CASE("training: the holes that initialization leaves have gone back to the system before the first step",
          "[run][training]") {
  const run::Data tokens = data(io::Rows::packed);
  run::Training training = of_steps(1);
  on_mesh("d=2", [&](const DevicePtr& device) {
    constexpr std::size_t bytes = std::size_t{8} << 20;
    Buffer block = device->pool()->allocate(bytes);
    std::memset(block.data(), 1, bytes);
    const Buffer behind = device->pool()->allocate(bytes);
    const std::byte* const hole = block.data();
    const std::size_t pages = resident_pages(hole, bytes);
    block = Buffer();
    expect(resident_pages(hole, bytes) == pages, "pages stay until then");
    run::Program program;
    program.step = [&](const run::Step&) {
      expect(resident_pages(hole, bytes) < pages / 8, "except what the loop itself has taken");
      return run::StepResult{1, 1};
    };
    run::train(device, training, tokens, "", program);
  });
}

TEST_CASE("training: a run goes on with other data or settings only where --allow-change names them",
          "[run][training]") {
  if (under_mpi()) return;
  const Scratch folder;
  run::Training training = of_steps(2);
  training.directory = folder / "run";
  std::int64_t done = 0;
  const auto ids = [](std::uint32_t first) {
    std::vector<std::uint32_t> document(60);
    for (auto& id : document) id = first++;
    const auto source = std::make_shared<io::MemoryTokens>("tokens " + std::to_string(first),
                                                           std::vector<std::vector<std::uint32_t>>{document});
    const io::LoaderOptions options{.batch = batch, .length = length, .seed = 1, .vocabulary = 256};
    return run::Data{std::make_shared<io::ByteTokenizer>(), std::make_shared<io::Loader>(source, options), nullptr,
                     256};
  };
  /// Trains to training.steps, and gives the error that all devices have, or nothing.
  const auto train = [&](const std::string& mesh_text, const std::string& settings, const run::Data& tokens) {
    std::string said;
    done = 0;
    on_mesh(mesh_text, [&](const DevicePtr& device) {
      const Mesh<"d"> mesh(device);
      Tensor<f32, "A"> weight = ones<f32, "A">(mesh, {{"A", 4}});
      run::Program program;
      program.checkpoints = run::checkpoints_of(mesh, weight, training);
      program.step = [&](const run::Step&) {
        if (device->rank() == 0) ++done;
        return run::StepResult{1, 1};
      };
      try {
        run::train(device, training, tokens, settings, program);
      } catch (const UsageError& error) {
        if (device->rank() == device->size() - 1) said = error.what();
      }
    });
    return said;
  };
  const auto settings = [](double rate, int depth, const char* free = "save_every = 10\nprefetch = false\n") {
    return fmt::format("{}[training]\nlearning_rate = {}\n[model]\ndepth = {}\n", free, rate, depth);
  };
  training.may_change = {"prefetch"};
  const run::Data first = ids(1), other = ids(2);
  CHECK(train("d=1", settings(0.5, 4), first).empty());
  CHECK(done == 2);

  training.steps = 4;
  const std::string before = contents(training.directory + "/metrics.jsonl");
  const auto hash = [](const run::Data& d) { return fmt::format("{:016x}", d.train->source().identity()); };
  const std::string begin = "the run in '" + training.directory + "' would resume from step 2 with another curve: ";
  const std::string end =
      "; give the checkpoint's values, choose another --run, or allow the change with --allow-change ";
  CHECK(train("d=2", settings(0.25, 8), other) ==
        begin + "data is 'tokens 61' with 60 tokens of hash " + hash(first) +
            " in the checkpoint, but 'tokens 62' with 60 tokens of hash " + hash(other) +
            " now; depth is 4 in the checkpoint, but 8 now; learning_rate is 0.5 in the checkpoint, but 0.25 now" +
            end + "data,depth,learning_rate");
  training.allow_change = "data,--learning-rate";
  CHECK(train("d=1", settings(0.25, 8), other) == begin + "depth is 4 in the checkpoint, but 8 now" + end + "depth");
  CHECK(done == 0);
  CHECK(contents(training.directory + "/metrics.jsonl") == before);
  training.allow_change = "dpth";
  CHECK(train("d=1", settings(0.25, 8), other) ==
        "--allow-change: 'dpth' is not a setting that is compared with the checkpoint; did you mean depth?; those are "
        "data, tokenizer, depth, learning_rate");
  training.allow_change = "data,depth,learning_rate";
  CHECK(train("d=2", settings(0.25, 8), other).empty());
  CHECK(done == 2);

  // The new checkpoint has the new values; the mesh, free settings and new ones need no leave.
  training.steps = 6;
  training.allow_change = "";
  const auto trained_by = [&](const char* optimizer, double ema, const char* groups) {
    return settings(0.25, 8, "save_every = 1\nprefetch = true\nnew = 1\n") +
           fmt::format("[optimizer]\noptimizer = \"{}\"\nema = {:.1f}\nfreeze = {}\n", optimizer, ema, groups);
  };
  // A checkpoint that does not name these has been made by AdamW, without an average and groups.
  CHECK(train("d=1", trained_by("lion", 0.5, "[\"embed\"]"), other) ==
        "the run in '" + training.directory +
            "' would resume from step 4 with another curve: ema is 0.0 in the checkpoint, but 0.5 now; freeze is [] in "
            "the checkpoint, but [\"embed\"] now; optimizer is \"adamw\" in the checkpoint, but \"lion\" now" +
            end + "ema,freeze,optimizer");
  CHECK(done == 0);
  CHECK(train("d=1", trained_by("adamw", 0, "[]"), other).empty());
  CHECK(done == 2);
  CHECK(train("d=1", settings(0.75, 8), first).empty());  // no step is left: nothing to compare

  // But the model is compared. A checkpoint that does not name its setting has the program's value of before.
  training.model_settings = {{"init", "plain"}};
  CHECK(train("d=1", settings(0.75, 8) + "init = \"plain\"\n", first).empty());
  CHECK(train("d=1", settings(0.75, 8) + "init = \"other\"\n", first) ==
        "the run in '" + training.directory +
            "' has another model or tokenizer: init is \"plain\" in the checkpoint, but \"other\" now; give the "
            "checkpoint's values, or allow the change with --allow-change init");

  // A checkpoint without a record of settings, as another program may save it.
  training.steps = 8;
  on_mesh("d=1", [&](const Mesh<"d">& mesh) {
    const Tensor<f32, "A"> weight = ones<f32, "A">(mesh, {{"A", 4}});
    io::save(mesh, training.directory + "/checkpoints", 6, weight, {6, "0123456789abcdef", {{"who", "someone"}}});
  });
  CHECK(train("d=1", settings(0.75, 2), first).empty());
  CHECK(done == 2);

  // Frozen weights are those of the same checksum, wherever they lie, and as older versions spelled their number.
  training.directory += "-adapters";
  training.model_settings = {};
  for (const auto& [steps, files] : {std::pair{2, "a/model, 1 tensors, crc32c 00000001"},
                                     {4, "b/model, 1 tensor, crc32c 00000001"},
                                     {6, "b/model, 1 tensor, crc32c 00000002"}}) {
    training.steps = steps;
    training.frozen_weights = files;
    const std::string said = train("d=1", settings(0.5, 4), first);
    INFO(said);
    CHECK(said.empty() == (steps < 6));
    CHECK((said.find("frozen_weights is b/model, 1 tensor, crc32c 00000001 in the checkpoint") != std::string::npos) ==
          (steps == 6));
  }
}

TEST_CASE("training: an output that cannot be written is refused before the first step", "[run][training]") {
  if (under_mpi()) return;  // one folder for each mesh below
  const run::Data tokens = data(io::Rows::packed);
  for (const char* mesh : {"d=1", "d=2"}) {
    const Scratch folder;
    const auto refused = [&](run::Training training, const std::string& words) {
      training.directory = training.directory.empty() ? "" : folder / training.directory;
      bool stepped = false;
      std::string said;
      on_mesh(mesh, [&](const DevicePtr& device) {
        run::Program program;
        program.step = [&](const run::Step&) {
          stepped = true;
          return run::StepResult{1, 1};
        };
        try {
          run::train(device, training, tokens, "", program);
        } catch (const UsageError& error) {
          if (device->rank() == device->size() - 1) said = error.what();  // not the one that looks
        }
      });
      CAPTURE(said, words);
      CHECK(said.starts_with(words));
      CHECK(!stepped);
    };
    run::Training with = of_steps(2);
    put(folder / "file", "");
    with.metrics = folder / "file/metrics.jsonl";
    refused(with, "cannot write the file '" + with.metrics + "': Not a directory; check --metrics");
    for (const char* other :
         {"a text", "{\"step\":\n", "{}", "{\"step\": 1}\n", "{\"step\": 1, \"prompt\": \"And\", \"text\": \"And \"}\n",
          "{\"step\": 1, \"loss\": 2.5, \"lr\": 0.1}\n", "{\"step\": now, \"loss\": "}) {
      with.metrics = folder / "other";
      put(with.metrics, other);
      refused(with, "--metrics '" + with.metrics + "': the file holds something else than records of a run");
      CHECK(contents(with.metrics) == other);
    }
    {
      put(folder / "begins.jsonl", "");
      run::JsonLines living(folder / "begins.jsonl", run::JsonLines::Mode::append);
      REQUIRE(living.lock());
      with.metrics = folder / "begins.jsonl";
      refused(with, "--metrics '" + with.metrics + "': another run is writing to this file");
    }
    const std::string line = run::to_json(run::Record{});
    // A file of a run: its own, before its folder exists, or another run's.
    with.directory = "new";
    with.metrics = folder / "new/config.toml";
    refused(with,
            "--metrics '" + with.metrics + "': '" + folder / "new" + "' is the folder of a run, which writes config");
    CHECK(!std::filesystem::exists(folder / "new"));
    std::filesystem::create_directory(folder / "second");
    for (const char* name : {"config.toml", "run.json", "metrics.jsonl"})
      put(folder / ("second/" + std::string(name)), line + "\n");
    for (const char* directory : {"", "new"}) {
      with.directory = directory;
      with.metrics = folder / "second/metrics.jsonl";
      refused(with,
              "--metrics '" + with.metrics + "': '" + folder / "second" + "' is the folder of a run, which writes me");
      CHECK(contents(with.metrics) == line + "\n");
    }
    CHECK(!std::filesystem::exists(folder / "new"));
    // A new folder is no run after that.
    with.directory = "new";
    with.resume = false;
    with.metrics = folder / "file/metrics.jsonl";
    for (int again = 0; again < 2; ++again)
      refused(with, "cannot write the file '" + with.metrics + "': Not a directory; check --metrics");
    CHECK(!std::filesystem::exists(folder / "new/config.toml"));
    with = of_steps(2);
    with.directory = "a";
    const auto blocked = [&](const std::string& name) {
      const std::string path = folder / ("a/" + name);
      std::filesystem::remove_all(folder / "a");
      std::filesystem::create_directories(path);
      put(folder / "a/config.toml", "");
      put(folder / "a/metrics.jsonl", "");
      return "cannot write '" + path +
             "': it is not a regular file; move it away, or choose another path; nothing has been computed yet: check ";
    };
    refused(with, "--run: " + blocked("report.html") + "--run");
    refused(with, "--run: " + blocked("checkpoints/LATEST") + "--run");
    refused(with, "--run: " + blocked("samples.jsonl") + "--run");
    with.trace = true;
    refused(with, "--trace: " + blocked("trace.json") + "--trace");
    with.trace = false;
    blocked("");
    put(folder / "a/checkpoints", "");
    refused(with, "--run: cannot make the folder '" + folder / "a/checkpoints" +
                      "': Not a directory; move the existing file away, or choose another folder");
    with.tensorboard = true;
    blocked("");
    put(folder / "a/tensorboard", "");
    refused(with, "--run: cannot make the folder '" + folder / "a/tensorboard" +
                      "': Not a directory; move the existing file away, or choose another folder");
    blocked("");
    CHECK(contents(folder / "a/metrics.jsonl").empty());
  }
}

TEST_CASE("training: ranks with other settings are found before the first step", "[run][training]") {
  const run::Data tokens = data(io::Rows::packed);
  const run::Training training = of_steps(3);
  bool stepped = false;
  on_mesh("d=2", [&](const DevicePtr& device) {
    run::Program program;
    program.step = [&](const run::Step&) {
      stepped = true;
      return run::StepResult{1, 1};
    };
    const std::string settings =
        "steps = 3\nlearning_rate = " + std::string(device->rank() == 0 ? "1e-3" : "1e-1") + "\n";
    expect_error<UsageError>([&] { run::train(device, training, tokens, settings, program); },
                             "the ranks run different programs: rank 0 has `learning_rate = 1e-3`, but rank 1 has "
                             "`learning_rate = 1e-1`; start all ranks with the same settings, data and program");
    run::Training loaded = training;
    loaded.initial_weights = device->rank() == 0 ? "a" : "b";
    expect_error<UsageError>([&] { run::train(device, loaded, tokens, "", program); },
                             "the ranks run different programs: rank 0 has `initial weights: a`, but rank 1 has "
                             "`initial weights: b`; start all ranks with the same settings, data and program");
    run::Training elsewhere = training;
    if (device->rank() == 1) elsewhere.resume = false;
    expect_error<UsageError>([&] { run::train(device, elsewhere, tokens, "", program); },
                             "the ranks run different programs: rank 0 has `--resume true`, but rank 1 has `--resume "
                             "false`; start all ranks with the same settings, data and program");
  });
  CHECK(!stepped);
}

TEST_CASE("training: a signal stops a run after its step, and is handled on no thread that computes",
          "[run][training]") {
  const run::Data tokens = data(io::Rows::packed);
  run::Training training = of_steps(100);
  const auto blocked = [] {
    sigset_t mask;
    pthread_sigmask(SIG_BLOCK, nullptr, &mask);
    bool all = true;
    for (const int signal : run::detail::stop_signals) all = all && sigismember(&mask, signal) == 1;
    return all;
  };
  for (const int signal : run::detail::stop_signals) {
    const char* const mesh = signal == SIGTERM ? "d=1" : "d=2";
    INFO(mesh << ", signal " << signal);
    on_mesh(mesh, [&](const DevicePtr& device) {
      std::int64_t steps_done = 0;
      run::Program program;
      program.step = [&](const run::Step& step) {
        expect(blocked(), "signals do not come here");
        if (step.number == 2 && device->rank() == 0) {
          kill(getpid(), signal);
          while (run::detail::stop_signal == 0) std::this_thread::yield();  // the handler runs elsewhere
        }
        ++steps_done;
        return run::StepResult{1, 1};
      };
      run::train(device, training, tokens, "", program);
      expect(steps_done == 3, "stopped after step 3, not " + show(steps_done));
      expect(!blocked(), "what was before");
    });
  }
}

}  // namespace
