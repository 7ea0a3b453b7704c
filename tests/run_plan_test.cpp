// Dry runs: what a plan says of the GPT of examples/gpt_model.hpp against what a real step does, on threads and MPI;
// meshes that are not there; the graph of a layer; and the trace of real steps.
#include <shardlib/comm/dry.hpp>
#if defined(SHARDLIB_WITH_MPI)
#include <shardlib/comm/shm/node.hpp>
#endif
#include <shardlib/comm/threads.hpp>
#include <shardlib/run/dry_run.hpp>
#include <shardlib/run/graph.hpp>
#include <shardlib/run/plan.hpp>
#include <shardlib/run/step_trace.hpp>
#include <shardlib/run/training.hpp>
#include <shardlib/shardlib.hpp>

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "../examples/gpt_model.hpp"
#include "scratch.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using GptMesh = Mesh<"r d s t">;

/// A GPT of two layers and one training step of it, AdamW included.
struct Subject {
  std::int64_t B = 8, L = 32, M = 64, Q = 2, K = 4, D = 16, F = 192, V = 500, padded_V = 512, layers = 2;
  bool in_bf16 = false;
  SequenceOrder order = SequenceOrder::contiguous;

  struct TrainState {
    gpt::Model<f32> weights, mu, nu;
  };

  [[nodiscard]] TrainState state(const GptMesh& mesh) const {
    const Sizes sizes{{"V", V, padded_V}, {"M", M}, {"Q", Q}, {"K", K}, {"D", D}, {"F", F}};
    gpt::Model<f32> model;
    model.unembed.resize(1);
    model.layers.resize(static_cast<std::size_t>(layers));
    std::uint64_t stream = 0;
    for_each_leaf(
        [&]<Spec S>(std::string_view name, Tensor<f32, S>& w) {
          const auto normal = random_normal<f32, S>(mesh, sizes, {1, stream++}) * 0.1;
          w = name.find("norm") == std::string_view::npos ? normal : normal + 1.0;
        },
        model);
    return {model, zeros_like(model), zeros_like(model)};
  }
  [[nodiscard]] io::TokenBatch rows(const GptMesh& mesh) const {
    return io::detail::empty_rows(B / (mesh.size("r") * mesh.size("d")), L / mesh.size("s"));
  }
  run::StepResult step(const GptMesh& mesh, TrainState& state, const io::TokenBatch& rows) const {
    const auto tensor = [&]<class T>(const std::vector<T>& values) {
      return from_memory<T, "B/r/d L/s">(mesh, {{"B", B}, {"L", L}}, std::span<const T>(values));
    };
    const gpt::Batch batch{tensor(rows.inputs), tensor(rows.targets), tensor(rows.segments), tensor(rows.weights)};
    gpt::ModelConfig config;
    config.order = order;
    const auto with = [&]<class C>(C) -> run::StepResult {
      auto copies = cast_tree<gpt::Model<C>>(state.weights);
      auto [loss, pending] = value_and_grad(mesh, gpt::loss<C>, copies, batch, config);
      const gpt::Model<C> grads = reduce_gradients(mesh, std::move(pending));
      const double norm = global_norm(mesh, grads);
      AdamW().update(
          state.weights, state.mu, state.nu, grads, 1e-3, 1.0, 0, [](auto) { return true; }, copies);
      return {item(all_reduce<"+d +r +s +t -> ">(loss)), norm};
    };
    return in_bf16 ? with(bf16()) : with(f32());
  }
};

/// The weights of a layer are long enough for views.
Subject wide_subject() {
  Subject subject;
  subject.M = 512, subject.F = 1024, subject.layers = 3;
  return subject;
}

run::Plan counted(const DevicePtr& device, const Subject& subject) {
  const GptMesh mesh(device);
  auto state = subject.state(mesh);
  const auto rows = subject.rows(mesh);
  return run::count_step(device, [&] { subject.step(mesh, state, rows); });
}

run::Plan dry(const std::string& mesh, const Subject& subject, Peers peers = Peers::threads) {
  return counted(DevicePtr::make(parse_mesh(mesh), 0, std::make_shared<DryWorld>(peers)), subject);
}

/// Another backend's groups, with the bytes that a device must send at the least in what it asks of them.
class CountingWorld final : public Backend {
 public:
  explicit CountingWorld(std::shared_ptr<Backend> world) : world_(std::move(world)) {}
  std::unique_ptr<Communicator> group(const std::vector<int>& members, int rank,
                                      const std::shared_ptr<Pool>& pool) override {
    return std::make_unique<Counting>(world_->group(members, rank, pool), sent);
  }
  std::size_t sent = 0;

 private:
  struct Counting final : Communicator {
    std::unique_ptr<Communicator> group;
    std::size_t& sent;
    Counting(std::unique_ptr<Communicator> g, std::size_t& s) : group(std::move(g)), sent(s) {}
    [[nodiscard]] int rank() const override { return group->rank(); }
    [[nodiscard]] int size() const override { return group->size(); }
    [[nodiscard]] std::size_t others() const { return static_cast<std::size_t>(size() - 1); }
    [[nodiscard]] bool takes_rows() const override { return group->takes_rows(); }
    [[nodiscard]] bool has_views(std::size_t bytes) const override { return group->has_views(bytes); }
    Request start_collective(const shardlib::detail::CollectiveCall& call, const shardlib::detail::OpInfo&,
                             const Operands& o) override {
      using shardlib::detail::Collective;
      switch (call.kind) {
        case Collective::all_gather:
          sent += others() * call.bytes;
          return group->all_gather(o.send, o.recv, call.rows);
        case Collective::gather_view:
          sent += others() * call.bytes;
          return group->gather_view(o.send, o.whole);
        case Collective::all_to_all:
          sent += others() * (call.bytes / (others() + 1));
          return group->all_to_all(o.send, o.recv);
        case Collective::reduce_scatter:
          sent += others() * o.recv.bytes();
          return group->reduce_scatter(o.send, o.recv, call.dtype, call.op, call.rows);
        case Collective::all_reduce:
          sent += 2 * others() * call.bytes / (others() + 1);
          return group->all_reduce(o.send, o.recv, call.dtype, call.op);
        case Collective::shift:
          sent += call.bytes;
          return group->shift(o.send, o.recv, call.places);
        case Collective::exchange:  // its messages are counted by themselves, as this group has no `exchanges`
          throw Failure("an exchange as a collective");
        case Collective::barrier:
          group->barrier();
      }
      return {};
    }
    Request start_send(const Buffer& buffer, int to, const shardlib::detail::OpInfo&) override {
      sent += buffer.bytes();
      return group->send(buffer, to);
    }
    Request start_recv(const Buffer& buffer, int from, const shardlib::detail::OpInfo&) override {
      return group->recv(buffer, from);
    }
  };
  std::shared_ptr<Backend> world_;
};

/// `body` on a mesh of threads, with groups that count: f(device, bytes sent so far).
void on_counted_threads(const std::string& mesh,
                        const std::function<void(const DevicePtr&, const std::size_t&)>& body) {
  const auto axes = parse_mesh(mesh);
  const int count = device_count(axes);
  const auto world = std::make_shared<ThreadWorld>(count);
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(count));
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i)
    threads.emplace_back([&, i] {
      try {
        const auto counting = std::make_shared<CountingWorld>(world);
        const auto device = DevicePtr::make(axes, i, counting);
        shardlib::detail::run_device(device, 1, [&](const auto& d) { body(d, counting->sent); });
        world->finish(i);
      } catch (...) {
        errors[static_cast<std::size_t>(i)] = std::current_exception();
        world->abort();
      }
    });
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}

/// Compares the figures that all devices share, and this device's peak within 1 %.
void expect_planned(const run::Plan& plan, const run::Plan& measured) {
  expect_equal(std::vector<std::string>{std::to_string(plan.collectives.size())},
               std::vector<std::string>{std::to_string(measured.collectives.size())});
  for (std::size_t i = 0; i < plan.collectives.size(); ++i) {
    const auto &p = plan.collectives[i], &m = measured.collectives[i];
    expect(p == m, p.op + " " + p.spec + ": planned " + show(p.bytes) + " bytes in " + show(p.calls) + " calls, " +
                       m.op + " " + m.spec + " had " + show(m.bytes) + " in " + show(m.calls));
  }
  expect(plan.flops == measured.flops, "FLOPs: " + show(plan.flops) + " planned, " + show(measured.flops));
  expect(plan.residuals == measured.residuals,
         "residuals: " + show(plan.residuals) + " planned, " + show(measured.residuals));
  expect(std::abs(plan.peak - measured.peak) * 100 <= measured.peak,
         "peak: " + show(plan.peak) + " planned, " + show(measured.peak) + " measured");
}

}  // namespace

TEST_CASE("a plan's communication is what threads send, and its peak is within 1 % of theirs", "[plan]") {
  for (const std::string where :
       {"d=1,s=1,t=1", "d=2,s=1,t=1", "d=1,s=1,t=2", "d=2,s=1,t=2", "d=4,s=1,t=1", "d=2,s=1,t=2 bf16"}) {
    const std::string mesh = where.substr(0, where.find(' '));
    Subject subject;
    subject.in_bf16 = where != mesh;
    const run::Plan plan = dry(mesh, subject);
    on_counted_threads(mesh, [&](const DevicePtr& device, const std::size_t& sent) {
      const GptMesh m(device);
      auto state = subject.state(m);
      const auto rows = subject.rows(m);
      const std::size_t before = sent;
      const run::Plan measured = run::count_step(device, [&] { subject.step(m, state, rows); });
      expect_planned(plan, measured);
      expect(sent - before == static_cast<std::size_t>(plan.sent()),
             mesh + ": " + show(plan.sent()) + " bytes planned, " + show(sent - before) + " sent");
    });
    // Counting takes no memory itself.
    on_counted_threads(mesh, [&](const DevicePtr& device, const std::size_t&) {
      const GptMesh m(device);
      auto state = subject.state(m);
      const auto rows = subject.rows(m);
      subject.step(m, state, rows);
      const auto peak = static_cast<std::int64_t>(device->pool()->stats().peak);
      expect(std::abs(plan.peak - peak) * 100 <= peak, "peak: " + show(plan.peak) + " planned, " + show(peak));
    });
  }
}

TEST_CASE("a plan's memory falls with the parts of a sharded length, and is that of threads", "[plan]") {
  Subject subject;
  subject.B = 1, subject.L = 512, subject.F = 640;  // the peak is not in attention, where the devices differ
  std::int64_t peak_before = 0;
  for (const int parts : {1, 2, 4}) {
    const std::string mesh = "d=1,s=" + std::to_string(parts) + ",t=1";
    const run::Plan plan = dry(mesh, subject);
    std::vector<run::Plan> measured(static_cast<std::size_t>(parts));
    on_counted_threads(mesh, [&](const DevicePtr& device, const std::size_t&) {
      measured[static_cast<std::size_t>(device->rank())] = counted(device, subject);
    });
    // In attention, later devices compute more and earlier ones send more: the plan has the mean of all.
    std::int64_t peak = 0, sent = 0;
    double flops = 0;
    for (const run::Plan& one : measured) {
      peak = std::max(peak, one.peak);
      sent += one.sent();
      flops += one.flops;
      REQUIRE(one.residuals == plan.residuals);
      for (const auto& c : plan.collectives)
        if (!c.op.starts_with("causal_attention"))
          REQUIRE(std::ranges::find(one.collectives, c) != one.collectives.end());
    }
    REQUIRE(sent == parts * plan.sent());
    REQUIRE(std::abs(flops - parts * plan.flops) < 1e-9 * flops);
    INFO("peak: " << plan.peak << " planned, " << peak << " measured, " << peak_before << " with half the parts");
    REQUIRE(std::abs(plan.peak - peak) * 100 <= peak);
    REQUIRE((parts == 1 || plan.peak * 100 < peak_before * 60));
    peak_before = plan.peak;
  }
}

/// A model whose peak is in the backward pass of attention.
Subject narrow_subject() {
  Subject subject;
  subject.B = 2, subject.L = 128, subject.M = 32, subject.D = 32, subject.F = 64, subject.V = 256;
  subject.padded_V = 256, subject.order = SequenceOrder::zigzag;
  return subject;
}
/// Devices but the first one also hold zeros, where that one has a summand.
void expect_same_peak(const run::Plan& plan, const run::Plan& measured) {
  expect(std::abs(plan.peak - measured.peak) * 400 <= measured.peak,
         "peak: " + show(plan.peak) + " planned, " + show(measured.peak) + " measured");
}

TEST_CASE("a plan's peak is that of the backward pass of attention over devices", "[plan]") {
  for (const std::string mesh : {"d=1,s=4,t=1", "d=1,s=8,t=1"}) {
    const run::Plan plan = dry(mesh, narrow_subject());
    on_counted_threads(mesh, [&](const DevicePtr& device, const std::size_t&) {
      expect_same_peak(plan, counted(device, narrow_subject()));
    });
  }
}

#if defined(SHARDLIB_WITH_MPI)
TEST_CASE("a plan for MPI has its scratch memory", "[plan]") {
  if (!under_mpi()) return;
  const Peers peers = shardlib::detail::shm::node ? Peers::node : Peers::mpi;
  for (const Subject& subject : {Subject(), wide_subject()}) {
    for (const std::string mesh : {"d=1,s=1,t=1", "d=2,s=1,t=1", "d=1,s=1,t=2", "d=2,s=1,t=2"}) {
      const run::Plan plan = dry(mesh, subject, peers);
      on_mesh(mesh, [&](const DevicePtr& device) { expect_planned(plan, counted(device, subject)); });
    }
  }
}

TEST_CASE("a plan for MPI has the peak of the backward pass of attention", "[plan]") {
  if (!under_mpi()) return;
  const run::Plan plan = dry("d=1,s=4,t=1", narrow_subject(), shardlib::detail::shm::node ? Peers::node : Peers::mpi);
  on_mesh("d=1,s=4,t=1", [&](const DevicePtr& device) { expect_same_peak(plan, counted(device, narrow_subject())); });
}
#endif

TEST_CASE("a plan of thousands of devices that are not there", "[plan]") {
  Subject big;
  big.B = 1024, big.L = 1024, big.M = 4096, big.Q = 4, big.K = 8, big.D = 128, big.F = 16384, big.V = 50257;
  big.padded_V = 50688, big.layers = 4;
  const std::string mesh = "d=512,s=1,t=8";
  const run::Plan plan = dry(mesh, big);

  // By hand: the embedding is gathered over d in the forward pass alone, as the backward pass needs it not.
  const auto find = [&](std::string_view op, std::string_view spec) {
    for (const auto& c : plan.collectives)
      if (c.op == op && c.spec == spec) return c;
    throw Failure("no " + std::string(op) + " " + std::string(spec));
  };
  const std::int64_t shard = big.padded_V / 8 * (big.M / 512) * 4;
  const auto embed = find("all_gather", "V/t M/d/s -> V/t M");
  REQUIRE(embed.axes == "d s");
  REQUIRE(embed.calls == 2);  // and the output layer
  REQUIRE(embed.bytes == 2 * 511 * shard);
  // Each layer gathers the keys' and values' weights in the forward pass and again in the backward pass.
  const auto keys = find("all_gather", "M/d/s K/t D -> M K/t D");
  REQUIRE(keys.calls == big.layers * 2 * 2);
  REQUIRE(keys.bytes == keys.calls * 511 * (big.M / 512 * big.K / 8 * big.D * 4));
  REQUIRE(find("reduce_scatter", "B/r/d L/s M +t -> B/r/d L/s M/t").axes == "t");
  // The logits are the largest tensor of a device.
  REQUIRE(plan.peak > big.B / 512 * big.L * big.padded_V / 8 * 4);
  const double products = 6.0 * static_cast<double>(big.M * big.padded_V / 8 * big.B / 512 * big.L);
  REQUIRE(plan.flops > products);

  const std::string table = run::to_string(plan);
  for (const char* part : {"4096 devices, mesh d=512,s=1,t=8", "M/d/s K/t D -> M K/t D", "saved residuals"})
    REQUIRE(table.find(part) != std::string::npos);
}

TEST_CASE("in a plan for one node a long weight is gathered as a view, and a temporary is not", "[plan]") {
  const auto taken = [](Peers peers, bool is_weight) {
    const Mesh<"d"> mesh(DevicePtr::make(parse_mesh("d=2"), 0, std::make_shared<DryWorld>(peers)));
    const Pool& pool = *mesh.device()->pool();
    const Array<"layers", Tensor<f32, "M/d F">> weights{
        random_normal<f32, "M/d F">(mesh, {{"M", 512}, {"F", 512}}, {0, 0})};
    std::size_t bytes = 0;
    static_cast<void>(value_and_grad(
        mesh,
        [&](const Array<"layers", Tensor<f32, "M/d F">>& w) {
          const auto part = is_weight ? w[0] : w[0] * 2.0;
          const std::size_t before = pool.stats().live;
          const auto whole = all_gather<"M/d F -> M F">(part);
          bytes = pool.stats().live - before;
          const auto again = all_gather<"M/d F -> M F">(shard<"M F -> M/d F">(whole));
          return sum<"M/d F -> +d">(shard<"M F -> M/d F">(again));
        },
        weights));
    return bytes;
  };
  const std::size_t whole = 512 * 512 * sizeof(f32);
  for (const Peers peers : {Peers::threads, Peers::node, Peers::mpi}) {
    REQUIRE(taken(peers, true) == (peers == Peers::node ? 0 : whole));
    REQUIRE(taken(peers, false) == whole);
  }
}

TEST_CASE("run::plan counts the step that a program gives to run::train", "[plan]") {
  const Subject subject = wide_subject();
  run::Training training;
  training.batch = subject.B;
  training.seq = subject.L;
  training.plan = true;
  const auto body = [&](const DevicePtr& device) {
    const GptMesh mesh(device);
    auto state = subject.state(mesh);
    run::Program program;
    program.step = [&](const run::Step& step) { return subject.step(mesh, state, step.microbatches.at(0)); };
    program.parameters = parameter_count(state.weights);
    program.weight_bytes = run::shard_bytes(state.weights);
    program.optimizer_bytes = 2 * program.weight_bytes;
    program.flops_per_token = 100;
    run::train(device, training, {}, "", program);
  };
  const run::Plan plan = run::plan(parse_mesh("d=4,s=1,t=2"), body);
  const run::Plan expected = dry("d=4,s=1,t=2", subject);
  REQUIRE(plan.collectives == expected.collectives);
  REQUIRE(plan.peak == expected.peak);
  REQUIRE(plan.peak_node == dry("d=4,s=1,t=2", subject, Peers::node).peak);
  REQUIRE(plan.peak_mpi == dry("d=4,s=1,t=2", subject, Peers::mpi).peak);
  REQUIRE(plan.peak_mpi >= plan.peak);
  REQUIRE(plan.peak_gpus == dry("d=4,s=1,t=2", subject, Peers::gpus).peak);
  REQUIRE(plan.peak_gpus > plan.peak);
  REQUIRE(plan.weights == (plan.parameters + (subject.padded_V - subject.V) * subject.M * 2) * 4 / 8);
  REQUIRE(plan.gradients == plan.weights);
  REQUIRE(plan.optimizer == 2 * plan.weights);
  REQUIRE(plan.model_flops == 100.0 * static_cast<double>(subject.B * subject.L));
  // What the step differentiates can be drawn too.
  const std::string passes = run::dot(parse_mesh("d=4,s=1,t=2"), body);
  REQUIRE(passes.find("layers/1/w_gate") != std::string::npos);
  REQUIRE(passes.find("cluster_update") == std::string::npos);
  REQUIRE(passes.find("adamw") == std::string::npos);
  const std::string step = run::dot(parse_mesh("d=4,s=1,t=2"), body, {.whole_step = true});
  REQUIRE(step.find("adamw") > step.find("cluster_update"));
  REQUIRE(step.find("adamw") != std::string::npos);
  training.plan = false;
  REQUIRE(!run::dry_run(training, parse_mesh("d=4,s=1,t=2"), body, body));
  REQUIRE(training.planned_peak == 0);
  training.device = "gpu";  // whose errors about too little memory name the figure
  REQUIRE(!run::dry_run(training, parse_mesh("d=4,s=1,t=2"), body, body));
  REQUIRE(training.planned_peak == plan.peak_gpus);
  REQUIRE(run::launch_options(training).planned_peak == static_cast<std::size_t>(plan.peak_gpus));
  expect_error([] { static_cast<void>(run::plan(parse_mesh("d=2,s=1,t=1"), [](const auto&) {})); },
               "plan: the program has not called run::train");
}

TEST_CASE("a plan names no axis that the mesh lacks", "[plan]") {
  const run::Plan counted = run::plan(parse_mesh("d=2"), [](const DevicePtr& device) {
    const auto x = zeros<f32, "A/d/s">(Mesh<"d s">(device), {{"A", 8}});
    device->local<run::Plan>() = run::count_step(device, [&] { static_cast<void>(all_gather<"A">(x)); });
  });
  REQUIRE(counted.collectives.size() == 1);
  CHECK(counted.collectives[0].axes == "d");
}

TEST_CASE("a dry device has no elements to look at, and checks what it does not do", "[plan]") {
  const auto device = DevicePtr::make(parse_mesh("d=2"), 0, std::make_shared<DryWorld>());
  const Mesh<"d"> mesh(device);
  const auto x = random_normal<f32, "A/d">(mesh, {{"A", std::int64_t{1} << 40}}, {0, 0});
  REQUIRE(device->pool()->stats().live == std::size_t{1} << 41);  // half of it, in f32
  REQUIRE(item(all_reduce<"+d -> ">(sum(x))) == 1.0F);
  REQUIRE(item(all_reduce<"+d -> ">(sum(x)), 2.5) == 2.5F);
  expect_error([&] { static_cast<void>(x.span()); },
               "span: in a dry run tensors have no elements (device 0 (d=0) of mesh d=2)");
  Communicator& group = device->group({"d"});
  REQUIRE(group.size() == 2);
  const Buffer four = device->pool()->allocate(4);
  expect_error([&] { group.all_gather(four, device->pool()->allocate(4)).wait(); },
               "all_gather over 2 devices: send has 4 bytes, recv has 4 bytes: recv must have 2 times the "
               "bytes of send");
  // Under MPI a reduction receives the peers' blocks: memory, until it is waited for.
  const auto at_rank = DevicePtr::make(parse_mesh("d=8"), 0, std::make_shared<DryWorld>(Peers::mpi));
  Pool& pool = *at_rank->pool();
  const Buffer send = pool.allocate(8 * 640), recv = pool.allocate(640);
  {
    auto request = at_rank->group({"d"}).reduce_scatter(send, recv, DType::f32, Reduction::sum);
    REQUIRE(pool.stats().live == 8 * 640 + 640 + 7 * 640);
    request.wait();
  }
  REQUIRE(pool.stats().live == 8 * 640 + 640);
  const auto first = four.data();
  REQUIRE(device->pool()->allocate(4).data() != first);
}

namespace {

/// What a layer is differentiated by.
struct LayerAndInput {
  gpt::Layer<f32> layer;
  gpt::Residual x;
};

void one_layer(const DevicePtr& device) {
  const GptMesh mesh(device);
  const Sizes sizes{{"B", 8}, {"L", 32}, {"M", 64}, {"Q", 2}, {"K", 4}, {"D", 16}, {"F", 192}};
  LayerAndInput weights;
  for_each_leaf([&]<Spec S>(std::string_view, Tensor<f32, S>& w) { w = zeros<f32, S>(mesh, sizes); }, weights);
  const auto loss = [](const LayerAndInput& w, const Tensor<i32, "B/r/d L/s">& segments) -> Tensor<f32, "+d +r +s +t"> {
    return sum(explicit_activation_checkpointing(gpt::layer<f32>)(w.x, segments, w.layer, gpt::ModelConfig{}));
  };
  static_cast<void>(value_and_grad(mesh, loss, weights, zeros<i32, "B/r/d L/s">(mesh, sizes)));
}

int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

}  // namespace

TEST_CASE("the graph of a layer has its weights, its collectives and what flows, forward and backward", "[graph]") {
  const std::string dot = run::dot(parse_mesh("d=4,s=1,t=2"), one_layer);
  for (const std::string weight : {"norm1", "norm2", "w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down"})
    REQUIRE(count(dot, "label=\"layer/" + weight + "\\n") == 1);
  // Gathered in the forward pass and again in the backward pass, where the gradient is scattered.
  REQUIRE(count(dot, "[label=\"all_gather\\nM/d/s F/t -> M F/t\\nsends ") == 3);
  REQUIRE(count(dot, "[label=\"all_gather\\nM/d/s F/t -> M F/t\\n(recomputed)\\nsends ") == 3);
  REQUIRE(count(dot, "[label=\"reduce_scatter\\nM F/t +d +s -> M/d/s F/t\\nsends ") == 3);
  // Saved for the backward pass, hence computed once.
  REQUIRE(count(dot, "[label=\"einsum_unreduced\\nB/r/d L/s M, M F/t -> B/r/d L/s F/t\\n786.4 kFLOP") ==
          3);  // gate, up; y's cotangent
  REQUIRE(count(dot, "B/r/d L/s M, M F/t -> B/r/d L/s F/t\\n(recomputed)") == 0);
  REQUIRE(count(dot, "subgraph cluster_") == 3);
  REQUIRE(count(dot, "\"axes ") == 3);  // d, t, and both for the scales

  // Every op reads something but the cotangent 1, and all that is computed is used but the loss and the gradients.
  std::set<std::string> nodes, from, to;
  std::istringstream lines(dot);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string id, arrow, target;
    words >> id >> arrow >> target;
    if (arrow == "->") {
      from.insert(id);
      to.insert(target);
    } else if (id.starts_with("n") && arrow.starts_with("[label")) {
      nodes.insert(id);
    }
  }
  int unread = 0;
  for (const auto& node : nodes) unread += from.contains(node) ? 0 : 1;
  REQUIRE(unread == 1 + 10);
  // 9 weights, the input and the segments come from elsewhere. The cotangent 1 is made of nothing. Attention keeps the
  // log-sum-exps for its backward pass; they are not the result of an op.
  REQUIRE(nodes.size() - to.size() == 9 + 2 + 1 + 1);
}

TEST_CASE("a folded graph keeps products and collectives, and has no cycle", "[graph]") {
  const auto mesh = parse_mesh("d=4,s=1,t=2");
  const std::string whole = run::dot(mesh, one_layer), folded = run::dot(mesh, one_layer, {.fold = true});
  for (const std::string kind : {"product", "axes0", "axes1", "axes2"})
    REQUIRE(count(folded, "class=\"" + kind) == count(whole, "class=\"" + kind));
  REQUIRE(count(folded, "class=\"input") == 0);
  for (const std::string weight : {"w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down"})  // gathered in both passes
    REQUIRE(count(folded, "[label=\"all_gather\\n[layer/" + weight + ",\\n") == 2);
  // The backward pass below the forward pass, not beside it, and all text at least 9 pixels high in a window of 1400.
  const std::string svg = run::svg(folded);
  struct Frame {
    double left, bottom, right, top;  // y grows downward
  };
  const auto frame = [&](const std::string& pass) {
    const std::size_t at = svg.find("points=\"", svg.find("<title>cluster_" + pass)) + 8;
    std::string numbers = svg.substr(at, svg.find('"', at) - at);
    std::ranges::replace(numbers, ',', ' ');
    std::istringstream points(numbers);
    Frame f{};
    points >> f.left >> f.bottom >> f.right >> f.top >> f.right;  // three corners: the left ones, and a right one
    return f;
  };
  const Frame forward = frame("forward"), backward = frame("backward");
  REQUIRE(forward.top < forward.bottom);
  REQUIRE(forward.bottom < backward.top);
  const double width = std::max(forward.right, backward.right) - std::min(forward.left, backward.left);
  REQUIRE(width < 1.1 * std::max(forward.right - forward.left, backward.right - backward.left));
  REQUIRE(count(folded, "fontsize=12") == 2);
  REQUIRE(std::stod(svg.substr(svg.find("viewBox=\"0.00 0.00 ") + 19)) <= 12 * 1400 / 9.0);
  REQUIRE(count(folded, "  // kept n") > 5);
  REQUIRE(count(svg, "<path class=\"kept\"") == count(folded, "  // kept n"));
  const int small = count(whole, "class=\"op\"");
  REQUIRE(count(folded, "class=\"op\"") < small - 8);
  REQUIRE(count(folded, "[label=\"+, sum\\n(2 ops)\"") == 1);
  int ops = count(folded, "class=\"op\"");
  for (std::size_t at = folded.find("ops)"); at != std::string::npos; at = folded.find("ops)", at + 1))
    ops += std::stoi(folded.substr(folded.rfind('(', at) + 1)) - 1;
  REQUIRE(ops == small);

  std::map<std::string, std::set<std::string>> after;
  std::istringstream lines(folded);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string id, arrow, target;
    words >> id >> arrow >> target;
    if (arrow != "->") continue;
    after[id].insert(target);
    after[target];
  }
  // Nodes that nothing more follows are taken away until none is left.
  while (!after.empty()) {
    const auto last = std::ranges::find_if(after, [](const auto& node) { return node.second.empty(); });
    REQUIRE(last != after.end());
    const std::string name = last->first;
    after.erase(last);
    for (auto& [id, targets] : after) targets.erase(name);
  }
}

TEST_CASE("the graph names the weights where gathering them is not work", "[graph]") {
  const std::string dot = run::dot(parse_mesh("d=1,s=1,t=1"), one_layer);
  for (const std::string weight : {"norm1", "norm2", "w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down"})
    REQUIRE(count(dot, "label=\"layer/" + weight + "\\n") == 1);
  REQUIRE(count(dot, "all_gather") == 0);
}

TEST_CASE("a graph is drawn by dot, and without it the error names the package", "[graph]") {
  const std::string path = "/tmp/shardlib_graph_" + std::to_string(getpid()) + ".svg";
  const std::string old = std::getenv("PATH");
  setenv("PATH", "/nonexistent", 1);
  expect_error<UsageError>([&] { run::write_svg("digraph {}", path); },
                           "a graph needs the program `dot`: install the package graphviz");
  setenv("PATH", old.c_str(), 1);
  REQUIRE(!std::ifstream(path));
  expect_error<UsageError>([&] { run::write_svg("digraph {}", "/nonexistent/a.svg"); },
                           "cannot write '/nonexistent/a.svg': No such file or directory");
  // What is not a file stays what it is.
  const std::string pipe = path + ".pipe";
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  expect_error<UsageError>(
      [&] { run::write_svg("digraph {}", pipe); },
      "cannot write '" + pipe + "': it is not a regular file; move it away, or choose another path");
  REQUIRE(std::filesystem::is_fifo(pipe));
  REQUIRE(!std::ifstream(pipe + ".dot"));
  REQUIRE(!std::ifstream(pipe + ".new"));
  REQUIRE(std::remove(pipe.c_str()) == 0);
  run::write_svg(run::dot(parse_mesh("d=4,s=1,t=2"), one_layer), path);
  std::ifstream file(path);
  const std::string svg{std::istreambuf_iterator<char>(file), {}};
  REQUIRE(svg.find("</svg>") != std::string::npos);
  // What the pointer shows at a node, and at an arrow.
  REQUIRE(svg.find("<title>layer/w_gate\nM/d/s F/t</title>") != std::string::npos);
  REQUIRE(svg.find("<title>layer/w_gate → all_gather\nM/d/s F/t\n") != std::string::npos);
  REQUIRE(svg.find("<title>n1") == std::string::npos);
  REQUIRE(svg.find("<svg width=\"100%\" height=\"100%\" viewBox=\"") != std::string::npos);
  REQUIRE(svg.find("prefers-color-scheme: dark") != std::string::npos);
  REQUIRE(std::remove(path.c_str()) == 0);
  REQUIRE(!std::ifstream(path + ".dot"));
}

TEST_CASE("a traced step has an event for each collective and op of each device", "[plan][trace]") {
  // Only the first device's folder is there, as on machines that share none.
  const Scratch folder;
  const std::string path = world_rank() == 0 ? folder / "trace.json" : "/nonexistent/trace.json";
  const Subject subject;
  const std::string mesh = "d=2,s=1,t=2";
  const run::Plan plan = dry(mesh, subject);
  const bool ran = on_mesh(mesh, [&](const GptMesh& m) {
    auto state = subject.state(m);
    const auto rows = subject.rows(m);
    run::detail::StepTrace trace(m.device(), path, 1, 2);
    for (std::int64_t step = 0; step < 4; ++step) {
      trace.before(step);
      const run::StepResult result = subject.step(m, state, rows);
      expect(std::isfinite(result.loss), "a loss");
      trace.after(step);
    }
    trace.finish();  // nothing is left to do
  });
  if (!ran || world_rank() != 0) return;
  std::int64_t events = 0, bytes = 0, calls = 0, ops = 0, counters = 0, touched = 0, planned_touched = 0;
  double flops = 0;
  std::map<std::string, int> named;  // of the tracks of steps and parts
  std::set<std::string> passes;      // of the ops of a layer
  const auto text_of = [](const std::string& line, const std::string& key) {
    const std::size_t at = line.find("\"" + key + "\": \"");
    if (at == std::string::npos) return std::string();
    const std::size_t begin = at + key.size() + 5;
    return line.substr(begin, line.find('"', begin) - begin);
  };
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::string track = text_of(line, "cat");
    if (track == "steps" || track == "parts") ++named[text_of(line, "name")];
    if (text_of(line, "ph") == "C") ++counters;
    if (track == "ops") ++ops;
    if (const std::size_t at = line.find("\"touched\": "); at != std::string::npos && track == "ops")
      touched += std::stoll(line.substr(at + 11));
    if (text_of(line, "part") == "layers/0") passes.insert(text_of(line, "pass"));
    if (const std::size_t at = line.find("\"flops\": "); at != std::string::npos)
      flops += std::stod(line.substr(at + 9));
    if (line.find("\"cat\": \"collectives\"") == std::string::npos) continue;
    ++events;
    const std::size_t at = line.find("\"bytes\": ");
    if (at != std::string::npos) bytes += std::stoll(line.substr(at + 9));
  }
  for (const auto& c : plan.collectives) calls += c.calls;
  REQUIRE(events == 4 * 2 * calls);
  REQUIRE(bytes == 4 * 2 * plan.sent());
  REQUIRE(ops > events);
  REQUIRE(counters == ops + events);
  REQUIRE(flops == Approx(4 * 2 * plan.flops));
  for (const auto& op : plan.local) planned_touched += op.bytes;
  // The plan is that of the first device, from which others differ by the zeros that stand for parts of pending sums.
  REQUIRE(static_cast<double>(touched) == Approx(4.0 * 2.0 * static_cast<double>(planned_touched)).epsilon(1e-3));
  // Two steps of four devices.
  for (const char* name : {"step 1", "step 2"}) CHECK(named[name] == 4);
  for (const char* name : {"forward layers/0", "backward layers/0", "forward layers/1", "update"})
    CHECK(named[name] == 4 * 2);
  CHECK(passes == std::set<std::string>{"forward", "backward", "recomputed"});
  REQUIRE(files_below(folder.path()) == std::vector<std::string>{"trace.json"});
}

TEST_CASE("a trace that cannot be written is an error on every device", "[plan][trace]") {
  on_mesh("d=2,t=2", [](const DevicePtr& device) {
    run::detail::StepTrace trace(device, "/nonexistent/trace.json", 0, 1);
    trace.before(0);
    expect_error<StorageError>([&] { trace.after(0); },
                               "cannot write '/nonexistent/trace.json.0': No such file or directory (on device 0 "
                               "(d=0,t=0) of mesh d=2,t=2)");
  });
}
