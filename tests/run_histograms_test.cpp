// Histograms of leaves over all devices, by a call of one's own, and in the events of a run.
#include <shardlib/run/leaf_histograms.hpp>
#include <shardlib/run/run_directory.hpp>
#include <shardlib/run/trained.hpp>
#include <shardlib/run/training.hpp>
#include <shardlib/shardlib.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "scratch.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;
using run::Histogram;

namespace {

constexpr double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();

/// The edges between buckets, written out.
std::vector<double> all_edges() {
  std::vector<double> edges;
  for (int power = -40; power < 40; ++power)
    for (const double part : {1.0, 1.25, 1.5, 1.75}) edges.push_back(part * std::pow(2.0, power));
  edges.push_back(std::pow(2.0, 40));
  std::vector<double> both(edges.rbegin(), edges.rend());
  for (double& edge : both) edge = -edge;
  both.insert(both.end(), edges.begin(), edges.end());
  return both;
}

/// The histogram of the whole array, from the edges alone.
template <class T>
Histogram reference(const std::vector<T>& values) {
  static const std::vector<double> edges = all_edges();
  Histogram h;
  for (const T element : values) {
    const auto value = static_cast<double>(accumulator_t<T>(element));
    if (std::isnan(value) || std::isinf(value)) {
      ++h.not_finite;
      continue;
    }
    // A value at an edge is farther from zero than the edge.
    const auto after = value < 0 ? std::ranges::lower_bound(edges, value) : std::ranges::upper_bound(edges, value);
    ++h.counts[static_cast<std::size_t>(after - edges.begin())];
    h.min = std::min(h.min, value);
    h.max = std::max(h.max, value);
    h.sum += value;
    h.sum_squares += value * value;
  }
  return h;
}

void expect_same(const Histogram& found, const Histogram& due, const std::string& what) {
  for (std::size_t i = 0; i < due.counts.size(); ++i)
    expect(found.counts[i] == due.counts[i],
           what + ": bucket " + show(i) + " has " + show(found.counts[i]) + " instead of " + show(due.counts[i]));
  expect(found.not_finite == due.not_finite, what + ": not finite");
  expect(found.min == due.min && found.max == due.max, what + ": from " + show(found.min) + " to " + show(found.max));
  const auto close = [](double a, double b, double scale) { return std::abs(a - b) <= 1e-12 * scale; };
  expect(close(found.sum, due.sum, std::sqrt(due.sum_squares) * 100), what + ": the sum is " + show(found.sum));
  expect(close(found.sum_squares, due.sum_squares, due.sum_squares), what + ": squares " + show(found.sum_squares));
}

TEST_CASE("histogram: buckets and their edges", "[run][histogram]") {
  const std::vector<double> edges = all_edges();
  REQUIRE(std::ssize(edges) == Histogram::buckets - 1);
  CHECK(Histogram::right_edge(Histogram::buckets - 1) == std::numeric_limits<double>::max());
  for (int i = 0; i + 1 < Histogram::buckets; ++i) {
    INFO("bucket " << i);
    const double edge = edges[static_cast<std::size_t>(i)];
    CHECK(Histogram::right_edge(i) == edge);
    const bool negative = edge < 0;
    CHECK(Histogram::bucket_of(edge) == (negative ? i : i + 1));
    CHECK(Histogram::bucket_of(std::nextafter(edge, 0)) == (negative ? i + 1 : i));
  }
  for (const double small : {0.0, -0.0, 1e-13, -1e-13, 5e-324}) CHECK(Histogram::bucket_of(small) == Histogram::zero);
  for (const double large : {1e13, 1e300, std::numeric_limits<double>::max()}) {
    CHECK(Histogram::bucket_of(large) == Histogram::buckets - 1);
    CHECK(Histogram::bucket_of(-large) == 0);
  }
}

/// Values of every size and sign.
template <class T>
HostArray<T> values(std::vector<std::int64_t> shape) {
  HostArray<T> host(std::move(shape));
  for (std::size_t i = 0; i < host.data.size(); ++i) {
    const double x = std::sin(static_cast<double>(i + 1)) * std::pow(2.0, static_cast<double>(i * 7 % 100) - 50);
    if constexpr (std::is_same_v<T, bf16>)
      host.data[i] = bf16(static_cast<float>(x));
    else if constexpr (std::is_floating_point_v<T>)
      host.data[i] = static_cast<T>(x);
    else if constexpr (std::is_same_v<T, bool_>)
      host.data[i] = i % 3 == 0;
    else
      host.data[i] = static_cast<T>(std::is_signed_v<T> ? static_cast<double>(i % 50) - 20 : static_cast<double>(i));
  }
  return host;
}

struct Tree {
  Tensor<f32, "M/d F/t"> both;
  Tensor<f32, "M/t/d F"> rows;
  Tensor<f32, "M F"> replicated;
  Array<"layers", Tensor<f64, "F/d M">> layers;
  Tensor<bf16, "M F/t"> half;
  Tensor<i32, "M/d"> ids;
  Tensor<u32, "F/t"> counts;
  Tensor<u8, "M"> bytes;
  Tensor<bool_, "F/d"> mask;
  Tensor<f32, ""> scalar;
};

TEST_CASE("leaf_histograms: those of the whole arrays on every mesh, without padding and copies", "[run][histogram]") {
  std::map<std::string, Histogram> due;
  auto both = values<f32>({7, 13}), rows = values<f32>({7, 13}), replicated = values<f32>({7, 13});
  both.data[0] = -static_cast<float>(inf);
  both.data[20] = both.data[90] = static_cast<float>(nan);
  rows.data[13] = static_cast<float>(inf);
  replicated.data[5] = static_cast<float>(nan);
  const auto first = values<f64>({13, 7});
  const HostArray<f64> second({13, 7}, std::vector<f64>(91, nan));  // no value that counts
  const auto half = values<bf16>({7, 13});
  const auto ids = values<i32>({7});
  const auto counts = values<u32>({13});
  const auto bytes = values<u8>({7});
  const auto mask = values<bool_>({13});
  const HostArray<f32> scalar({}, {-3});
  const auto add = [&](const char* name, const auto& host) { due[name] = reference(host.data); };
  add("both", both), add("rows", rows), add("replicated", replicated), add("layers.0", first), add("half", half);
  add("layers.1", second), add("ids", ids), add("counts", counts), add("bytes", bytes), add("mask", mask);
  add("scalar", scalar);
  CHECK(due["both"].not_finite == 3);
  on_meshes(
      {"d=1,t=1", "d=2,t=1", "d=1,t=2", "d=2,t=2", "d=4,t=1", "d=4,t=2", "d=1,t=8"}, [&](const Mesh<"d t">& mesh) {
        // Of 7 elements in shards of one, some devices have nothing but padding.
        const Sizes sizes{{"M", 7, round_up(7, mesh.device()->size())}, {"F", 13, round_up(13, mesh.device()->size())}};
        Tree tree;
        tree.both = place<decltype(tree.both)>(mesh, both, sizes);
        tree.rows = place<decltype(tree.rows)>(mesh, rows, sizes);
        tree.replicated = place<decltype(tree.replicated)>(mesh, replicated, sizes);
        for (const auto* layer : {&first, &second})
          tree.layers.push_back(place<Tensor<f64, "F/d M">>(mesh, *layer, sizes));
        tree.half = place<decltype(tree.half)>(mesh, half, sizes);
        tree.ids = place<decltype(tree.ids)>(mesh, ids, sizes);
        tree.counts = place<decltype(tree.counts)>(mesh, counts, sizes);
        tree.bytes = place<decltype(tree.bytes)>(mesh, bytes, sizes);
        tree.mask = place<decltype(tree.mask)>(mesh, mask, sizes);
        tree.scalar = place<decltype(tree.scalar)>(mesh, scalar, sizes);
        const auto found = run::leaf_histograms(mesh, tree);
        expect(found.size() == due.size(), show(found.size()) + " leaves");
        for (const auto& [name, h] : due) expect_same(found.at(name), h, name);
      });
}

struct Stage {
  Tensor<f32, "M/d"> own, shared;
};

TEST_CASE("leaf_histograms: stages have leaves of their own, and a leaf on two stages counts once",
          "[run][histogram]") {
  const auto shared = values<f32>({5});
  on_mesh("p=2,d=2", [&](const Mesh<"p d">& whole) {
    const Mesh<"d"> stage(Device::submesh(whole.device(), "p"));
    const Sizes sizes{{"M", 5, 6}};
    auto own = values<f32>({5});
    for (f32& x : own.data) x *= static_cast<f32>(1 + 2 * whole.axis_index("p"));
    const Stage tree{place<Tensor<f32, "M/d">>(stage, own, sizes), place<Tensor<f32, "M/d">>(stage, shared, sizes)};
    const std::string name = "layers." + show(whole.axis_index("p"));
    const auto found =
        run::leaf_histograms(whole, tree, [&](const std::string& leaf) { return leaf == "own" ? name : leaf; });
    expect(found.size() == 3, show(found.size()) + " leaves");
    expect_same(found.at("shared"), reference(shared.data), "shared");
    expect_same(found.at(name), reference(own.data), name);
    expect(found.at("layers.1").max > found.at("layers.0").max, "the stages' own leaves");
  });
}

TEST_CASE("leaf_histograms: leaves that are empty, or not alike on all devices", "[run][histogram]") {
  on_mesh("d=2,t=1", [](const Mesh<"d t">& mesh) {
    const Tensor<f32, "M/d"> none;
    expect(error_of([&] { static_cast<void>(run::leaf_histograms(mesh, none)); }) ==
               "leaf_histograms: the leaf 'value' is empty",
           "an empty leaf");
    const auto odd = zeros<f32, "M/d">(mesh, {{"M", mesh.device()->rank() == 0 ? 4 : 6}});
    expect(error_of([&] { static_cast<void>(run::leaf_histograms(mesh, odd)); }) ==
               "the leaf 'value' has another shape, dtype or layout on device 1",
           "other sizes");
    const auto nothing = zeros<f32, "M/d">(mesh, {{"M", 0}});
    const Histogram h = run::leaf_histograms(mesh, nothing).at("value");
    expect(std::ranges::all_of(h.counts, [](auto count) { return count == 0; }) && h.min > h.max, "no elements");
  });
}

// ---- in a run -------------------------------------------------------------------------------------------------------

struct Weights {
  Array<"layers", Tensor<f32, "M/d F/t">> layers;
  Tensor<f32, "M/d"> bias;
};

/// The events of a folder with its one file, from the fourth field on, which is behind their time and step.
std::vector<std::pair<std::uint64_t, std::string>> events_of(const std::string& folder) {
  std::vector<std::pair<std::uint64_t, std::string>> events;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(file)), {});
    for (std::size_t at = 0; at < bytes.size();) {
      std::uint64_t length = 0;
      std::memcpy(&length, bytes.data() + at, sizeof length);
      const std::string event = bytes.substr(at + 12, length);
      at += 16 + length;
      // wall_time takes nine bytes, and a step below 128 two.
      events.emplace_back(static_cast<unsigned char>(event.at(10)), event.substr(11));
    }
  }
  return events;
}

/// The number of a histogram's field 1 to 5, which follows its key.
double number(const std::string& event, int field) {
  const std::size_t tag = event.find("/layers/");
  const std::size_t begin = event.find('\x09', tag);  // min = 1, of 8 bytes
  double found = 0;
  std::memcpy(&found, event.data() + begin + 1 + 9 * static_cast<std::size_t>(field - 1), sizeof found);
  return found;
}

TEST_CASE("training: --histogram-every writes weights and clipped gradients, the same on every mesh",
          "[run][histogram]") {
  const Scratch folder = Scratch::shared(under_mpi(), world_rank());
  using Events = std::vector<std::pair<std::uint64_t, std::string>>;
  Events one;
  for (const char* mesh_text : {"d=1,t=1", "d=2,t=1", "d=1,t=2", "d=2,t=2", "d=4,t=2"}) {
    INFO(mesh_text);
    run::Training training;
    training.steps = 5;
    training.tensorboard = true;
    training.histogram_every = 2;
    training.sample.max_tokens = 0;
    training.beta1 = 0;
    training.clip = 1;
    training.learning_rate = 0.5;
    training.warmup = 0;
    training.lr_schedule = "constant";
    training.weight_decay = 0;
    training.directory = folder / std::string(mesh_text);
    const bool ran = on_mesh(mesh_text, [&](const DevicePtr& device) {
      const Mesh<"d t"> mesh(device);
      const Sizes sizes{{"M", 3, round_up(3, device->size())}, {"F", 5, round_up(5, device->size())}};
      run::OptimizerOptions optimizer;
      optimizer.name = "sgd";
      run::Trained<Weights, Weights> trained;
      for (int i = 0; i < 2; ++i) trained.state.weights.layers.push_back(full<f32, "M/d F/t">(mesh, sizes, i + 1));
      trained.state.weights.bias = zeros<f32, "M/d">(mesh, sizes);
      run::begin(trained, optimizer);
      run::Program program = run::program_of(mesh, trained, training);
      program.step = [&](const run::Step& step) {
        expect(static_cast<bool>(step.show_gradients) == (step.number % 2 == 1), "due in steps 1 and 3");
        Weights gradients;
        for (int i = 0; i < 2; ++i) gradients.layers.push_back(full<f32, "M/d F/t">(mesh, sizes, 8));
        gradients.bias = full<f32, "M/d">(mesh, sizes, -4);
        return run::update(trained, optimizer, training, step, gradients, {1, 4}, run::ParameterGroups{});
      };
      run::train(device, training, run::Data{}, "", program);
    });
    if (!ran || world_rank() != 0) continue;
    Events events = events_of(training.directory + "/tensorboard");
    std::erase_if(events, [](const auto& event) {
      return event.second.find("weights/") == std::string::npos && event.second.find("gradients/") == std::string::npos;
    });
    std::vector<std::string> tags;
    for (const auto& [step, event] : events)
      for (const char* tag : {"gradients/bias", "gradients/layers/0", "gradients/layers/1", "weights/bias",
                              "weights/layers/0", "weights/layers/1"})
        if (event.find(tag) != std::string::npos) tags.push_back(show(step) + " " + tag);
    CHECK(tags == std::vector<std::string>{"1 gradients/bias", "1 gradients/layers/0", "1 gradients/layers/1",
                                           "1 weights/bias", "1 weights/layers/0", "1 weights/layers/1",
                                           "3 gradients/bias", "3 gradients/layers/0", "3 gradients/layers/1",
                                           "3 weights/bias", "3 weights/layers/0", "3 weights/layers/1"});
    if (events.size() != 12) continue;
    // Of the norm 4, clipping leaves a quarter: 2 of each 8, of which a step subtracts a half.
    for (const int field : {1, 2}) CHECK(number(events[2].second, field) == 2);
    for (const int field : {1, 2}) CHECK(number(events[5].second, field) == 0);
    CHECK(number(events[10].second, 1) == -3);
    CHECK(number(events[10].second, 3) == 15);
    CHECK(number(events[10].second, 4) == -45);
    CHECK(number(events[10].second, 5) == 135);
    for (const run::Record& record : run::read_records(training.directory + "/metrics.jsonl"))
      CHECK(std::ranges::count(record.seconds, "histograms", [](const auto& part) { return part.first; }) ==
            record.step % 2);
    if (one.empty()) one = events;
    CHECK(events == one);
  }
}

TEST_CASE("training: histograms of a state without weights, and of gradients that do not fit", "[run][histogram]") {
  const Scratch folder = Scratch::shared(under_mpi(), world_rank());
  run::Training training;
  training.steps = 1;
  training.tensorboard = true;
  training.histogram_every = 1;
  training.sample.max_tokens = 0;
  for (const int gradients : {0, 2}) {
    training.directory = folder / show(gradients);
    std::string said;
    const bool ran = on_mesh("d=2", [&](const Mesh<"d">& mesh) {
      auto state = ones<f32, "M/d">(mesh, {{"M", 4}});
      run::Program program;
      program.checkpoints = run::checkpoints_of(mesh, state, training);
      program.step = [&](const run::Step& step) {
        if (gradients > 0) step.show_gradients({state.value(), state.value()}, 1);
        return run::StepResult{1, 1};
      };
      const std::string error = error_of([&] { run::train(mesh.device(), training, run::Data{}, "", program); });
      if (mesh.device()->rank() == 0) said = error;
    });
    if (!ran || world_rank() != 0) continue;
    if (gradients == 0) {
      const auto events = events_of(training.directory + "/tensorboard");
      CHECK(said == "no error");
      CHECK(std::ranges::count_if(events, [](const auto& event) {
              return event.second.find("weights/value") != std::string::npos;
            }) == 1);
    } else {
      CHECK(said ==
            "--histogram-every: Step::show_gradients got 2 gradients of 1 weights: give one for each leaf of the "
            "weights, in their order");
    }
  }
  training.tensorboard = false;
  training.directory.clear();
  on_mesh("d=1", [&](const DevicePtr& device) {
    run::Program program;
    program.step = [](const run::Step&) { return run::StepResult{1, 1}; };
    expect(error_of<UsageError>([&] { run::train(device, training, run::Data{}, "", program); }) ==
               "--histogram-every writes TensorBoard events: give --tensorboard too, or leave it out",
           "without TensorBoard");
  });
}

TEST_CASE("training: options that read the leaves of a program without leaves are errors", "[run][histogram]") {
  const Scratch folder = Scratch::shared(under_mpi(), world_rank());
  for (const char* option : {"--histogram-every 2", "--check-replicas 3"}) {
    run::Training training;
    training.steps = 4;
    training.sample.max_tokens = 0;
    training.directory = folder / std::string(option);
    training.tensorboard = option[2] == 'h';
    (training.tensorboard ? training.histogram_every : training.check_replicas) = training.tensorboard ? 2 : 3;
    on_mesh("d=2", [&](const DevicePtr& device) {
      run::Program program;
      program.step = [](const run::Step&) -> run::StepResult { throw Error("it has begun"); };
      const std::string said = error_of<UsageError>([&] { run::train(device, training, run::Data{}, "", program); });
      expect(said == option + std::string(" reads the leaves of the state, and this program names none: leave it out, "
                                          "or set Program::checkpoints, as by run::program_of or run::checkpoints_of"),
             said);
    });
  }
}

}  // namespace
