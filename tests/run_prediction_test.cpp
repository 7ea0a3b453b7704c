// The predicted time of a planned step, and what the optimizer adds to a plan, against figures worked out by hand.
#include <shardlib/comm/dry.hpp>
#include <shardlib/run/dry_run.hpp>
#include <shardlib/run/prediction.hpp>
#include <shardlib/run/trained.hpp>
#include <shardlib/shardlib.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

run::Plan small_plan() {
  run::Plan plan;
  plan.mesh = {{"d", 4}, {"t", 2}, {"p", 1}};
  plan.weights = plan.gradients = 100;
  plan.copies = 50;
  plan.optimizer = 200;
  plan.model_flops = 8 * 600;
  plan.local = {{"einsum_unreduced", "a", 1000, 50}, {"einsum_unreduced", "b", 100, 400}, {"map", "c", 0, 300}};
  plan.collectives = {{"all_gather", "x", "d", 3, 600},
                      {"reduce_scatter", "y", "d", 1, 300},
                      {"all_reduce", "z", "t d", 2, 80},
                      {"shift", "w", "t", 1, 40}};
  return plan;
}

run::Machine small_machine() {
  return {.flops = 100,
          .efficiency = 0.5,
          .memory = 10,
          .mesh = {{"d", 4}, {"t", 2}, {"p", 1}},
          .links = {{20, 0.25}, {40, 0.125}, {0, 9}}};
}

}  // namespace

TEST_CASE("the peak of a GPU by the name of its runtime", "[prediction]") {
  for (const auto& [model, bf16_peak, f32_peak] :
       std::vector<std::tuple<std::string, double, double>>{{"NVIDIA A100-SXM4-80GB", 312e12, 19.5e12},
                                                            {"NVIDIA H100 80GB HBM3", 989e12, 67e12},
                                                            {"NVIDIA H200", 989e12, 67e12},
                                                            {"NVIDIA B200", 2250e12, 75e12},
                                                            {"AMD Instinct MI300X", 1307e12, 163.4e12},
                                                            {"NVIDIA H100 PCIe", 0, 0},
                                                            {"NVIDIA A100-PCIE-40GB", 0, 0},
                                                            {"NVIDIA H200 NVL", 0, 0},
                                                            {"NVIDIA A100-SXM4-40GB MIG 1g.5gb", 0, 0},
                                                            {"NVIDIA GH200 480GB", 0, 0},
                                                            {"NVIDIA GeForce RTX 4090", 0, 0},
                                                            {"", 0, 0}}) {
    INFO(model);
    CHECK(run::peak_flops(model, "bf16") == bf16_peak);
    CHECK(run::peak_flops(model, "f32") == f32_peak);
  }
}

TEST_CASE("messages in sequence of a collective", "[prediction]") {
  for (const auto& [op, devices, messages] :
       std::vector<std::tuple<std::string, int, int>>{{"all_gather", 2, 1},
                                                      {"all_gather", 8, 3},
                                                      {"all_gather", 9, 4},
                                                      {"reduce_scatter", 1024, 10},
                                                      {"wait", 8, 3},
                                                      {"linear_scan_backward", 8, 3},
                                                      {"all_reduce", 8, 6},
                                                      {"all_reduce_max", 5, 6},
                                                      {"all_to_all", 8, 7},
                                                      {"causal_attention", 8, 7},
                                                      {"causal_attention_backward", 4, 9},
                                                      {"einsum_unreduced", 8, 7},
                                                      {"einsum_scatter", 4, 3},
                                                      {"shift", 8, 1}}) {
    INFO(op << " of " << devices);
    REQUIRE(run::messages_in_sequence(op, devices) == messages);
  }
}

TEST_CASE("an op that communicates and computes products counts as both", "[prediction]") {
  const auto device = DevicePtr::make(parse_mesh("s=4"), 0, std::make_shared<DryWorld>());
  const Mesh<"s"> mesh(device);
  const auto x = zeros<f32, "L/s D">(mesh, {{"L", 32}, {"D", 2}});
  const run::Plan plan =
      run::count_step(device, [&] { static_cast<void>(causal_attention<"L", "D", over<"s">>(x, x, x)); });
  REQUIRE(plan.collectives.size() == 1);
  CHECK((plan.collectives[0].op == "causal_attention" && plan.collectives[0].axes == "s"));
  CHECK(plan.collectives[0].bytes == 3 * 8 * 2 * 4);  // keys and values go to half of the others, in the mean
  REQUIRE(plan.local.size() == 1);
  CHECK(plan.local[0].flops == 2 * 2 * 2 * (36 + 1.5 * 64));  // of 8 positions, to themselves and to 1.5 blocks
  CHECK(plan.local[0].flops == plan.flops);
  CHECK(plan.local[0].bytes > 0);
}

TEST_CASE("a plan has a shift whose result nothing reads, and each shift once", "[prediction]") {
  const auto device = DevicePtr::make(parse_mesh("d=4"), 0, std::make_shared<DryWorld>());
  const auto x = zeros<f32, "A/d B">(Mesh<"d">(device), {{"A", 8}, {"B", 3}});
  const run::Plan plan = run::count_step(device, [&] {
    static_cast<void>(shift<over<"d">>(x, 1));
    static_cast<void>(shift<over<"d">>(x, 2) * 2.0);
    const auto kept = shift<over<"d">>(x, 3);
  });
  REQUIRE(plan.collectives == std::vector<run::Plan::Collective>{{"shift", "A/d B", "d", 3, 3 * 2 * 3 * 4}});
}

TEST_CASE("a predicted step is a roofline and the links' latencies and bandwidths", "[prediction]") {
  const run::Prediction p = run::predict(small_plan(), small_machine());
  // 1000 FLOP at 50 a second, not 50 B at 10; 400 B at 10, not 100 FLOP at 50.
  REQUIRE(p.products == 20.0 + 40.0);
  REQUIRE(p.rest == 30.0);
  REQUIRE(p.communication.size() == 3);
  const auto& d = p.communication[0];
  REQUIRE((d.axes == "d" && d.devices == 4 && d.calls == 4));
  REQUIRE(d.latency == 4 * 2 * 0.25);
  REQUIRE(d.bandwidth == 900.0 / 20);
  const auto& t = p.communication[1];
  REQUIRE((t.axes == "t" && t.latency == 0.125 && t.bandwidth == 1.0));
  // Over both axes: at the pace of the slower, 2 * log2(8) messages each.
  const auto& both = p.communication[2];
  REQUIRE((both.axes == "t d" && both.devices == 8 && both.latency == 2 * 6 * 0.25 && both.bandwidth == 4.0));
  REQUIRE(p.communicating() == 2.0 + 45 + 0.125 + 1 + 3 + 4);
  REQUIRE(p.serial() == 90 + p.communicating());
  REQUIRE(p.overlapped() == 90);
  REQUIRE(p.peak_seconds == 6.0);  // 4800 FLOP of the model's over 8 devices at 100 a second
  const std::string table = run::to_string(p);
  for (const char* part : {"over t d", "8 devices, 2 calls, 3 s of it latency", "90 s   MFU 6.67 %"})
    REQUIRE(table.find(part) != std::string::npos);

  run::Machine tensor_cores = small_machine();
  tensor_cores.flops = 1000;
  tensor_cores.f32_flops = 100;
  REQUIRE(run::predict(small_plan(), tensor_cores).peak_seconds == 6.0);
  run::Plan narrow = small_plan();
  narrow.has_bf16 = true;
  REQUIRE(run::predict(narrow, tensor_cores).peak_seconds == 0.6);

  run::Machine endless = small_machine();
  endless.memory = 0;
  endless.links = {{1, 0}, {1, 0}, {0, 0}};
  const run::Prediction bound = run::predict(small_plan(), endless);
  REQUIRE(bound.computing() == 22.0);  // FLOPs alone
  REQUIRE(bound.overlapped() == bound.communicating());
  REQUIRE(bound.communicating() == 900.0 + 80 + 40);
}

TEST_CASE("numbers for each axis", "[prediction]") {
  const std::vector<AxisSize> mesh{{"d", 4}, {"t", 2}};
  REQUIRE(run::for_each_axis(run::plan_bandwidth, "300e9", mesh) == std::vector{300e9, 300e9});
  REQUIRE(run::for_each_axis(run::plan_latency, "t=2,d=0.5", mesh) == std::vector{0.5, 2.0});
  const auto fails = [](const run::AxisOption& option, const std::string& text, const std::vector<AxisSize>& axes,
                        const std::string& message) {
    expect_error<UsageError>([&] { static_cast<void>(run::for_each_axis(option, text, axes)); },
                             std::string(option.name) + " " + text + ": " + message);
  };
  const std::string remedy =
      "; give one number for all axes, as in 300e9, or one for each axis of mesh d=4,t=2 that has several devices, as "
      "in d=25e9,t=300e9";
  const auto no_number = [](const std::string& text) { return "'" + text + "' is not a number of at least 1, in B/s"; };
  for (const auto& [text, reason] :
       std::vector<std::pair<std::string, std::string>>{{"fast", no_number("fast")},
                                                        {"-1", no_number("-1")},
                                                        {"0", no_number("0")},
                                                        {"1e-300", no_number("1e-300")},
                                                        {"inf", no_number("inf")},
                                                        {"nan", no_number("nan")},
                                                        {"1e400", no_number("1e400")},
                                                        {"d=1", "axis t is missing"},
                                                        {"d=1,", "'' is not an axis"},
                                                        {"d=1,q=2", "'q' is not an axis"},
                                                        {"d=1,d=2", "axis d is given twice"},
                                                        {"d=1,t=2,d=1", "axis d is given twice"},
                                                        {"d=,t=1", no_number("")},
                                                        {"d=1,t", no_number("")}})
    fails(run::plan_bandwidth, text, mesh, reason + remedy);
  fails(run::plan_latency, "d=0,t=-1", mesh,
        "'-1' is not a number of at least 0, in seconds; give one number for all axes, as in 5e-6, or one for each "
        "axis of mesh d=4,t=2 that has several devices, as in d=20e-6,t=5e-6");

  // Over an axis of one device nothing is sent.
  const std::vector<AxisSize> flat{{"d", 8}, {"t", 1}};
  REQUIRE(run::for_each_axis(run::plan_bandwidth, "d=600e9", flat) == std::vector{600e9, 0.0});
  REQUIRE(run::for_each_axis(run::plan_bandwidth, "d=600e9,t=1", flat) == std::vector{600e9, 1.0});
  fails(run::plan_bandwidth, "t=1", flat,
        "axis d is missing; give one number for all axes, as in 300e9, or one for each axis of mesh d=8,t=1 that has "
        "several devices, as in d=25e9");
  REQUIRE(run::for_each_axis(run::plan_latency, "d=1", {{"d", 1}, {"t", 1}}) == std::vector{1.0, 0.0});
  fails(run::plan_latency, "d=x", {{"d", 1}},
        "'x' is not a number of at least 0, in seconds; give one number for all axes, as in 5e-6");
}

TEST_CASE("a plan predicts from what it counts", "[prediction]") {
  run::Training training;
  training.batch = training.seq = 8;
  training.plan = true;
  const auto body = [&](const DevicePtr& device) {
    const Mesh<"d"> mesh(device);
    const Sizes sizes{{"B", 64}, {"M", 32}, {"N", 16}};
    const auto x = random_normal<f32, "B/d M">(mesh, sizes, {0, 1});
    const auto w = random_normal<f32, "M/d N">(mesh, sizes, {0, 2});
    run::Program program;
    program.step = [&](const run::Step&) {
      const auto y = einsum_unreduced<"B/d M, M N -> B/d N">(x, all_gather<"M/d N -> M N">(w));
      static_cast<void>(rename<"N -> K">(y) + 1.0);
      return run::StepResult{};
    };
    program.weight_bytes = 1000;
    run::train(device, training, {}, "", program);
  };
  const run::Plan plan = run::plan({{"d", 4}}, body);
  const auto find = [&](std::string_view op) {
    std::int64_t bytes = 0;
    for (const auto& local : plan.local)
      if (local.op == op) bytes += local.bytes;
    return bytes;
  };
  REQUIRE(find("einsum_unreduced") == 4 * (16 * 32 + 32 * 16 + 16 * 16));
  REQUIRE(find("rename") == 0);  // a new name is not work
  REQUIRE(find("all_gather") == 0);
  std::int64_t all = 0;
  for (const auto& local : plan.local) all += local.bytes;
  REQUIRE(all == 4 * (16 * 32 + 32 * 16 + 16 * 16) + 2 * 4 * 16 * 16);  // and + reads and writes
}

namespace {

template <dtype C>
struct Layer {
  Tensor<C, "M/d N"> w;
  Tensor<C, "N"> b;
};

/// Plans of two steps of an optimizer, one after the other in one program. A device's weights are 16 * 32 + 32 numbers.
template <dtype C>
std::pair<run::Plan, run::Plan> plans_of(const char* optimizer, double ema = 0) {
  const run::OptimizerOptions o{optimizer, ema, {}};
  const auto device = DevicePtr::make(parse_mesh("d=4"), 0, std::make_shared<DryWorld>());
  const Mesh<"d"> mesh(device);
  run::Trained<Layer<f32>, Layer<C>> trained;
  const auto make = [&](auto& tree) {
    initialize(mesh, tree, {{"M", 64}, {"N", 32}}, 0, [](auto) { return Normal{0, 1}; });
  };
  make(trained.state.weights);
  Layer<C> grads;
  make(grads);
  run::begin(trained, o);
  device->pool()->reset_peak();  // initialization takes more
  const auto step = [&] {
    return run::count_step(device, [&] {
      const std::vector<io::TokenBatch> rows;
      const run::Step of_plan{0, 1e-3, rows, [](const run::StepResult&) { return true; }, {}};
      static_cast<void>(run::update(trained, o, run::Training{}, of_plan, grads, {0, 1}, run::ParameterGroups{}));
    });
  };
  const run::Plan first = step();
  return {first, step()};
}

std::int64_t local_bytes(const run::Plan& plan) {
  std::int64_t bytes = 0;
  for (const auto& local : plan.local) bytes += local.bytes;
  return bytes;
}

}  // namespace

TEST_CASE("a plan counts each pass of the optimizer once", "[prediction]") {
  const std::int64_t n = 16 * 32 + 32;
  const auto fused = [&](const char* name) { return local_bytes(plans_of<f32>(name).first); };
  CHECK(fused("adamw") == 4 * 7 * n);  // weights and two moments read and written, gradients read
  CHECK(fused("lion") == 4 * 5 * n);
  CHECK(fused("sgd") == 4 * 5 * n);
  // Gradients in bf16 are read, and copies are written.
  CHECK(local_bytes(plans_of<bf16>("adamw").first) == (4 * 6 + 2 + 2) * n);
  // The average is read and written, and the weights are read.
  CHECK(local_bytes(plans_of<f32>("sgd", 0.5).first) == 4 * (5 + 3) * n);
  for (const char* name : {"muon", "adafactor"}) {
    const run::Plan plan = plans_of<f32>(name).first;
    const run::Prediction p = run::predict(plan, {.flops = 1e300, .memory = 1, .mesh = plan.mesh, .links = {{1, 0}}});
    CHECK(p.products + p.rest == static_cast<double>(local_bytes(plan)));
  }
}

TEST_CASE("a plan's memory includes the average of --ema", "[prediction]") {
  for (const char* name : {"adamw", "adafactor", "lion", "muon", "sgd"}) {
    INFO(name);
    const auto [first, second] = plans_of<f32>(name, 0.5);
    CHECK(first.peak == second.peak);
    CHECK(first.peak == plans_of<f32>(name).first.peak + 4 * (16 * 32 + 32));
  }
}

TEST_CASE("a prediction asks for what it needs", "[prediction]") {
  run::Training training;
  const std::vector<AxisSize> mesh{{"d", 4}};
  const auto fails = [&](const std::string& message) {
    expect_error<UsageError>(
        [&] {
          run::dry_run(
              training, mesh, [](const auto&) {}, [](const auto&) {});
        },
        message);
  };
  training.plan_memory = 1e12;
  fails(
      "--plan-efficiency, --plan-memory, --plan-bandwidth and --plan-latency describe a device whose peak is missing: "
      "give --plan-flops or --plan-device too");
  training.plan = true;
  training.plan_device = "h100";
  fails(
      "--plan-efficiency, --plan-memory and --plan-latency are of a prediction, which needs the B/s that each of 4 "
      "devices sends too, as in --plan-bandwidth d=25e9");
  training.plan = false;
  training.plan_device = "none";
  training.plan_memory = 0;
  training.plan_capacity = 64e9;
  fails("--plan-capacity is the memory of a planned step's device: give --plan too");
  training.plan_memory = 1e12;
  training.plan_flops = 1e12;
  fails("--plan-flops predicts the time of a planned step: give --plan too");
  training.device = "gpu";  // whose peak it may be, but that has no use for the other figures
  fails("--plan-flops predicts the time of a planned step: give --plan too");
  training.plan_memory = training.plan_capacity = 0;
  CHECK(!run::dry_run(
      training, mesh, [](const auto&) {}, [](const auto&) {}));
  training.device = "cpu";
  training.plan_memory = 1e12;
  training.plan = true;
  fails("--plan-flops: a prediction for 4 devices needs the B/s that each sends, as in --plan-bandwidth d=25e9");
  training.plan_bandwidth = "0";
  fails(
      "--plan-bandwidth 0: '0' is not a number of at least 1, in B/s; give one number for all axes, as in 300e9, or "
      "one for each axis of mesh d=4 that has several devices, as in d=25e9");
}
