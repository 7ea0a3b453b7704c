// Pipelines that run: the GPT of examples/gpt_model.hpp in stages gives the loss and the gradients of the whole one
// under every schedule; backward passes in halves; what stays in memory; what goes wrong.
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <shardlib/pipeline/execute.hpp>
#include <shardlib/shardlib.hpp>
#include <string>
#include <vector>

#include "../examples/gpt_stages.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using Staged = pipeline::StagedMesh<"p", "p d t">;
using Host = std::map<std::string, HostArray<f32>>;  // by the names of gpt::Model's leaves

constexpr int microbatches = 8, layers = 8;
constexpr std::int64_t rows = 2, length = 6, vocabulary = 32;
const Sizes model_sizes{{"M", 16}, {"Q", 1}, {"K", 2}, {"D", 4}, {"F", 24}, {"V", vocabulary}};
const Sizes activation_sizes{{"B", rows}, {"L", length}, {"M", 16}};

/// A batch's ids; row by row they come in microbatches.
std::vector<i32> ids(std::uint64_t random) {
  std::vector<i32> values;
  for (std::int64_t i = 0; i < microbatches * rows * length; ++i) {
    random = random * 6364136223846793005U + 1442695040888963407U;
    values.push_back(static_cast<i32>((random >> 33) % vocabulary));
  }
  return values;
}

gpt::Batch batch(const Mesh<"d t">& mesh, int microbatch) {
  const auto tensor = [&](const std::vector<i32>& all) {
    const auto begin = all.begin() + microbatch * rows * length;
    return place<Tensor<i32, "B/d L">>(mesh, HostArray<i32>({rows, length}, {begin, begin + rows * length}));
  };
  const Sizes sizes{{"B", rows}, {"L", length}};
  return {tensor(ids(1)), tensor(ids(2)), zeros<i32, "B/d L">(mesh, sizes),
          full<f32, "B/d L">(mesh, sizes, 1.0 / static_cast<double>(microbatches * rows * length))};
}

struct Whole {
  Host weights, gradients;
  double loss = 0;
};

/// The body on devices that are threads of this process, also under mpirun.
void on_threads(const std::string& mesh, const DeviceBody& body) {
  const auto axes = parse_mesh(mesh);
  if (device_count(axes) == 1)
    detail::run_device(std::make_shared<Device>(axes, 0), 1, body);
  else
    detail::launch_threads(axes, body, device_count(axes), 1);
}

/// The model that is not cut, on the mesh that its stages would have: the gradients of the microbatches, one by one.
Whole unpipelined(bool tied, const std::string& stage_mesh = "d=1,t=1") {
  Whole whole;
  on_threads(stage_mesh, [&](const std::shared_ptr<Device>& device) {
    const Mesh<"d t"> mesh(device);
    gpt::Model model;
    model.unembed.resize(tied ? 0 : 1);
    model.layers.resize(layers);
    initialize(mesh, model, model_sizes, 1, [](std::string_view name) {
      return Normal{name.find("norm") != std::string_view::npos ? 1.0 : 0.0, 0.3};
    });
    const auto names = leaf_names(model);
    const auto put = [&](Host& host, const gpt::Model& tree) {
      const auto values = fetch(tree);
      for (std::size_t i = 0; i < names.size() && mesh.index() == 0; ++i) host.insert_or_assign(names[i], values[i]);
    };
    put(whole.weights, model);
    gpt::Model sum = zeros_like(model);
    double total = 0;
    const auto causal = causal_mask<"Qlen Klen">(mesh, length, length);
    for (int m = 0; m < microbatches; ++m) {
      const auto [loss, gradients] = value_and_grad(mesh, gpt::loss, model, batch(mesh, m), causal, gpt::Form{});
      total += static_cast<double>(item(all_reduce<"+d +t -> ">(loss)));
      sum = map_tree([](const auto& a, const auto& b) { return a + b; }, sum, gradients);
    }
    put(whole.gradients, sum);
    if (mesh.index() == 0) whole.loss = total;
  });
  return whole;
}

struct Result {
  double loss = 0, value = 0;
  Host gradients;  ///< of this rank's weights
  pipeline::Step<Tensor<f32, "+d +p +t">, gpt::StageModel> step;
};

/// A step of the model in stages, as this device sees it. `Program` may spoil gpt::Stages.
template <class Program = gpt::Stages>
Result staged(const std::shared_ptr<Device>& device, const pipeline::Schedule& schedule, const Host& weights, bool tied,
              const Sizes& sizes = activation_sizes) {
  const Staged mesh(device);
  const pipeline::LayerMap layer_map(schedule, layers);
  const auto mine = layer_map.of_rank(mesh.rank());
  gpt::StageModel model = gpt::empty_stages(schedule, layer_map, mesh.rank(), tied);
  for_each_leaf(
      [&](std::string_view name, auto& leaf) {
        leaf = place<std::remove_cvref_t<decltype(leaf)>>(mesh.stage(),
                                                          weights.at(gpt::name_in_model(std::string(name), mine)));
      },
      model);
  std::vector<gpt::Batch> batches;
  for (int m = 0; m < microbatches; ++m) batches.push_back(batch(mesh.stage(), m));
  const Program program{{layer_map, batches, causal_mask<"Qlen Klen">(mesh.stage(), length, length), {}}};
  Result result;
  result.step = pipeline::value_and_grad(mesh, schedule, microbatches, program, model, sizes, true);
  auto& gradients = result.step.gradients;
  if (const auto owners = gpt::embedding_owners(schedule, tied); !gradients.embed.empty() && owners.size() > 1)
    gradients.embed[0] = mesh.sum_over(owners, gradients.embed[0]);
  result.loss = static_cast<double>(item(all_reduce<"+d +p +t -> ">(result.step.loss)));
  result.value = static_cast<double>(
      item(all_reduce<"+d +p +t -> ">(pipeline::value(mesh, schedule, microbatches, program, model, sizes))));
  for_each_leaf(
      [&](std::string_view name, const auto& leaf) {
        result.gradients.insert_or_assign(gpt::name_in_model(std::string(name), mine), fetch(leaf));
      },
      gradients);
  return result;
}
struct Plain : gpt::Stages {};

void expect_close(const Result& result, const Whole& whole, const std::string& what) {
  expect(std::abs(result.loss - whole.loss) < 1e-6 * whole.loss,
         what + ": the loss is " + show(result.loss) + " instead of " + show(whole.loss));
  expect(result.value == result.loss, what + ": the loss without gradients is " + show(result.value));
  for (const auto& [name, gradient] : result.gradients) {
    const auto& due = whole.gradients.at(name).data;
    expect(gradient.data.size() == due.size(), what + ", " + name + ": another size");
    double scale = 0, worst = 0;
    for (std::size_t i = 0; i < due.size(); ++i) {
      scale = std::max(scale, std::abs(static_cast<double>(due[i])));
      worst = std::max(worst, std::abs(static_cast<double>(due[i]) - static_cast<double>(gradient.data[i])));
    }
    expect(scale > 0 && worst <= 1e-5 * scale,
           what + ": the gradient of " + name + " differs by " + show(worst / scale));
  }
}

/// Those that differ in what ranks hold, or in how backward passes are cut; and the others.
std::vector<pipeline::Schedule> main_schedules(int p) {
  using namespace pipeline;
  return {Std1F1B(p), ZeroBubble(p), Interleaved1F1B({.num_stages = 2 * p, .mpmd_dim = p}),
          DualPipeV({.num_stages = 2 * p, .mpmd_dim = p})};
}
std::vector<pipeline::Schedule> schedules(int p) {
  using namespace pipeline;
  auto all = main_schedules(p);
  all.insert(all.end(), {GPipe(p), Eager1F1B(p), Interleaved1F1B({.num_stages = p, .mpmd_dim = p}),
                         Interleaved1F1B({.num_stages = 2 * p, .mpmd_dim = p, .fuse_steady_state = true})});
  return all;
}

/// With a model that is tied, or stages that are meshes, the schedules that differ do.
std::vector<pipeline::Schedule> schedules_on(const std::string& mesh, bool tied) {
  const int p = parse_mesh(mesh)[0].size;
  return tied || !mesh.ends_with("d=1,t=1") ? main_schedules(p) : schedules(p);
}

}  // namespace

TEST_CASE("pipeline: under every schedule loss and gradients are those of the model that is not cut", "[pipeline]") {
  for (const bool tied : {false, true}) {
    std::vector<std::string> meshes{"p=2,d=1,t=1", "p=4,d=1,t=1", "p=2,d=2,t=1"};
    if (!tied)
      meshes.insert(meshes.end(),
                    {"p=1,d=1,t=1", "p=2,d=1,t=2", "p=1,d=2,t=2", "p=2,d=2,t=2", "p=4,d=2,t=1", "p=4,d=1,t=2"});
    for (const std::string& mesh : meshes) {
      const Whole whole = unpipelined(tied, mesh.substr(mesh.find("d=")));
      for (const pipeline::Schedule& schedule : schedules_on(mesh, tied))
        on_mesh(mesh, [&](const std::shared_ptr<Device>& device) {
          const std::string what = schedule.name() + " on " + mesh + (tied ? ", tied" : "");
          const Result result = staged<Plain>(device, schedule, whole.weights, tied);
          expect_close(result, whole, what);
          // The simulator counts what the tasks keep; these are the tapes that were there.
          const auto lists = schedule.tasks(microbatches);
          const auto rank = static_cast<std::size_t>(device->coordinate("p"));
          const double due = pipeline::simulate(lists, pipeline::even_costs(lists)).peak_in_flight[rank];
          expect(std::abs(result.step.peak_in_flight - due) < 1e-9,
                 what + ": " + show(result.step.peak_in_flight) + " in flight instead of " + show(due));
          std::size_t tasks = 0;
          for (const auto& list : lists) tasks += pipeline::parts_of(list).size();
          expect(result.step.intervals.size() == tasks, what + ": as many intervals as tasks");
          for (const auto& interval : result.step.intervals)
            expect(interval.begin > 0 && interval.end >= interval.begin,
                   what + ": times of " + to_string(interval.task));
        });
    }
  }
}

TEST_CASE("pipeline: a weight's gradient has the same bits under all schedules that cut the model alike",
          "[pipeline]") {
  const Whole whole = unpipelined(false);
  on_mesh("p=2,d=1,t=1", [&](const std::shared_ptr<Device>& device) {
    const Result first = staged<Plain>(device, pipeline::GPipe(2), whole.weights, false);
    for (const pipeline::Schedule& schedule :
         {pipeline::Schedule(pipeline::Std1F1B(2)), pipeline::Schedule(pipeline::Eager1F1B(2)),
          pipeline::Schedule(pipeline::ZeroBubble(2)),
          pipeline::parse_csv("fwd_0__7,fwd_0__6,fwd_0__5,fwd_0__4,fwd_0__3,fwd_0__2,fwd_0__1,fwd_0__0,bwd_0__7,"
                              "bwdA_0__6,bwd_0__5,bwd_0__4,bwd_0__3,bwd_0__2,bwd_0__1,bwd_0__0,bwdW_0__6\n"
                              "fwd_1__7,fwd_1__6,fwd_1__5,fwd_1__4,fwd_1__3,fwd_1__2,fwd_1__1,fwd_1__0,bwd_1__7,"
                              "bwdA_1__6,bwd_1__5,bwd_1__4,bwd_1__3,bwd_1__2,bwd_1__1,bwd_1__0,bwdW_1__6\n",
                              "microbatches in reverse")}) {
      const Result result = staged<Plain>(device, schedule, whole.weights, false);
      expect(result.loss == first.loss, schedule.name() + ": the loss's bits");
      for (const auto& [name, gradient] : first.gradients)
        expect(std::memcmp(gradient.data.data(), result.gradients.at(name).data.data(),
                           gradient.data.size() * sizeof(f32)) == 0,
               schedule.name() + ": the bits of " + name);
    }
  });
}

namespace {

// Stages that hand over two tensors, of which one is replicated over t: its gradient comes back partial. Replicated
// weights, one of them used by every stage: their gradients are partial, and the shared one's are summed over all
// ranks.
struct Pair {
  Tensor<f64, "B/d M"> x;
  Tensor<f64, "B/d N/t"> y;
};
struct PairWeights {
  Tensor<f64, "M"> gain;
  Array<"layers/p", Tensor<f64, "M N/t">> layers;
};
struct PairStages {
  std::vector<std::size_t> first;  // layer of each stage
  std::size_t count = 1;

  [[nodiscard]] Pair enter(const PairWeights& w, const pipeline::Place& at) const {
    const Mesh<"d t"> mesh(w.gain.device());
    const Sizes sizes{{"B", 4}, {"M", 6}, {"N", 8}};
    const auto x = random_normal<f64, "B/d M">(mesh, sizes, {2, static_cast<std::uint64_t>(at.microbatch)});
    return {x * w.gain, zeros<f64, "B/d N/t">(mesh, sizes)};
  }
  [[nodiscard]] Pair stage(const PairWeights& w, Pair z, const pipeline::Place& at) const {
    const std::size_t begin = first[static_cast<std::size_t>(at.stage)];
    for (std::size_t i = begin; i < begin + count; ++i) {
      const auto& layer = w.layers[i];
      z.y = z.y + tanh(einsum_unreduced<"B/d M, M N/t -> B/d N/t">(z.x * w.gain, layer));
      z.x = z.x + all_reduce<"B/d M +t -> B/d M">(einsum_unreduced<"B/d N/t, M N/t -> B/d M +t">(z.y, layer));
    }
    return z;
  }
  [[nodiscard]] auto loss(const PairWeights&, const Pair& z, const pipeline::Place&) const -> Tensor<f64, "+d +t"> {
    return sum<"B/d N/t -> +d +t">(square(z.y)) + to_partial<"+d -> +d +t">(sum<"B/d M -> +d">(tanh(z.x)));
  }
};
PairWeights pair_weights(const Mesh<"d t">& mesh, const std::vector<int>& held) {
  const Sizes sizes{{"M", 6}, {"N", 8}};
  PairWeights w{random_normal<f64, "M">(mesh, sizes, {1, 100}), {}};
  for (const int layer : held)
    w.layers.push_back(random_normal<f64, "M N/t">(mesh, sizes, {1, static_cast<std::uint64_t>(layer)}) * 0.3);
  return w;
}

}  // namespace

TEST_CASE("pipeline: stages hand over structs, and replicated weights get partial gradients", "[pipeline]") {
  // All stages in a row on one device, differentiated as one function.
  double loss = 0;
  std::vector<HostArray<f64>> due;  // of the gain, then of each layer
  detail::run_device(std::make_shared<Device>(parse_mesh("d=1,t=1"), 0), 1, [&](const std::shared_ptr<Device>& device) {
    const Mesh<"d t"> mesh(device);
    const PairStages stages{{0}, 4};
    for (int m = 0; m < 4; ++m) {
      const auto whole = [&](const PairWeights& w) {
        const pipeline::Place at{0, 1, m};
        return stages.loss(w, stages.stage(w, stages.enter(w, at), at), at);
      };
      const auto [l, gradients] = value_and_grad(mesh, whole, pair_weights(mesh, {0, 1, 2, 3}));
      loss += item(all_reduce<"+d +t -> ">(l));
      const auto values = fetch<f64>(gradients);
      if (due.empty()) due.assign(values.size(), {});
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (due[i].data.empty()) due[i] = HostArray<f64>(values[i].shape);
        for (std::size_t k = 0; k < values[i].data.size(); ++k) due[i].data[k] += values[i].data[k];
      }
    }
  });
  const auto expect_near = [](const HostArray<f64>& is, const HostArray<f64>& expected, const std::string& what) {
    expect(is.data.size() == expected.data.size(), what + ": the size");
    for (std::size_t k = 0; k < is.data.size(); ++k)
      expect(std::abs(is.data[k] - expected.data[k]) < 1e-11 * (1 + std::abs(expected.data[k])), what);
  };
  for (const char* name : {"p=2,d=1,t=2", "p=2,d=2,t=1", "p=4,d=1,t=1"})
    on_mesh(name, [&](const std::shared_ptr<Device>& device) {
      const Staged mesh(device);
      const int p = mesh.ranks();
      for (const pipeline::Schedule& schedule :
           {pipeline::Schedule(pipeline::Std1F1B(p)), pipeline::Schedule(pipeline::ZeroBubble(p))}) {
        const pipeline::LayerMap layer_map(schedule, 4);
        const auto mine = layer_map.of_rank(mesh.rank());
        PairStages stages{{}, static_cast<std::size_t>(layer_map.per_stage())};
        for (int s = 0; s < p; ++s) stages.first.push_back(layer_map.first_of_stage(s));
        const auto step = pipeline::value_and_grad(mesh, schedule, 4, stages, pair_weights(mesh.stage(), mine),
                                                   {{"B", 4}, {"M", 6}, {"N", 8}});
        static_assert(
            std::is_same_v<std::decay_t<decltype(step.gradients.get<&PairWeights::gain>())>, Tensor<f64, "M +d +t">>);
        const double mine_and_others = item(all_reduce<"+d +p +t -> ">(step.loss));
        expect(std::abs(mine_and_others - loss) < 1e-11 * std::abs(loss), std::string(name) + ": the loss");
        std::vector<int> all;
        for (int rank = 0; rank < p; ++rank) all.push_back(rank);
        const auto gain = mesh.sum_over(all, step.gradients.get<&PairWeights::gain>());
        expect_near(fetch(gain), due[0], std::string(name) + ": the gradient of gain");
        const auto& layers_of_rank = step.gradients.get<&PairWeights::layers>();
        for (std::size_t i = 0; i < mine.size(); ++i)
          expect_near(fetch(layers_of_rank[i]), due[1 + static_cast<std::size_t>(mine[i])],
                      std::string(name) + ": the gradient of layer " + show(mine[i]));
      }
    });
}

TEST_CASE("pipeline: messages of one's own, and a device's submesh", "[pipeline]") {
  on_mesh("p=2,d=2,t=1", [](const std::shared_ptr<Device>& device) {
    const Staged mesh(device);
    expect(mesh.stage().count() == 2 && mesh.stage().index() == mesh.whole().coordinate("d"), "the stage's mesh");
    expect(Device::submesh(device, "p") == mesh.stage().device(), "asked again, the same device");
    expect(mesh.stage().device()->describe() == device->describe(), "messages name the device of the whole mesh");
    const Sizes sizes{{"B", 4}, {"M", 6}};
    using X = Tensor<f32, "B/d M">;
    const auto of_rank = [&](int rank) {
      return random_normal<f32, "B/d M">(mesh.stage(), sizes, {5, static_cast<std::uint64_t>(rank)});
    };
    // Both send first: sends do not wait.
    const int other = 1 - mesh.rank();
    for (int i = 0; i < 3; ++i) mesh.send(of_rank(mesh.rank()) * (i + 1.0), other);
    for (int i = 0; i < 3; ++i) {
      const X got = mesh.receive<X>(sizes, other), due = of_rank(other) * (i + 1.0);
      expect(std::equal(got.span().begin(), got.span().end(), due.span().begin()), "messages arrive in order");
    }
    expect_error<Error>([&] { (void)Device::submesh(device, "x"); }, "unknown axis 'x': the mesh is p=2,d=2,t=1");
  });
}

TEST_CASE("backward in halves: only the pulls that are needed run, and the sums are the same bits", "[pipeline]") {
  on_mesh("d=2,t=1", [](const std::shared_ptr<Device>& device) {
    using X = Tensor<f32, "B/d M">;
    struct Weights {
      Tensor<f32, "M/d N"> a, b;
    };
    const Mesh<"d t"> mesh(device);
    const Sizes sizes{{"B", 4}, {"M", 8}, {"N", 8}};
    const auto layer = [](const X& x, const Weights& w) -> X {
      const auto y = tanh(einsum_unreduced<"B/d M, M N -> B/d N">(x, all_gather<"M/d N -> M N">(w.a)));
      return x + einsum_unreduced<"B/d N, M N -> B/d M">(y, all_gather<"M/d N -> M N">(w.b)) * x;
    };
    for (const bool recompute : {false, true}) {
      const auto record = [&](X& x, Weights& w, bool halves) {
        x = X(detail::as_leaf(*random_normal<f32, "B/d M">(mesh, sizes, {1, 0}).value()));
        w.a = Tensor<f32, "M/d N">(detail::as_leaf(*random_normal<f32, "M/d N">(mesh, sizes, {1, 1}).value()));
        w.b = Tensor<f32, "M/d N">(detail::as_leaf(*random_normal<f32, "M/d N">(mesh, sizes, {1, 2}).value()));
        // Each weight is used twice, so that sums are taken.
        X y = x;
        for (int i = 0; i < 2; ++i) y = recompute ? explicit_activation_checkpointing(layer)(y, w) : layer(y, w);
        detail::Backward pass({{y.value()->slot, detail::detached(*x.value())}},
                              {x.value()->slot, w.a.value()->slot, w.b.value()->slot});
        const auto scattered = [&] { return detail::state(device).counts["reduce_scatter"].calls; };
        const auto before = scattered();
        if (!halves) return pass.run();
        auto found = pass.run({true, false, false});
        expect(found[0] && !found[1] && !found[2], "the input's gradient alone");
        expect(scattered() == before, "the weights' gradients are not reduced yet");
        auto rest = pass.run();
        expect(!rest[0] && rest[1] && rest[2], "then the weights' gradients");
        expect(scattered() == before + 4, "each is reduced once");
        rest[0] = found[0];
        return rest;
      };
      X x;
      Weights w;
      const auto whole = record(x, w, false), halves = record(x, w, true);
      for (std::size_t i = 0; i < whole.size(); ++i)
        expect(std::memcmp(whole[i]->data().data(), halves[i]->data().data(), whole[i]->bytes()) == 0,
               "the bits of gradient " + show(i));
    }
  });
}

namespace {

struct Throwing : gpt::Stages {
  [[nodiscard]] auto stage(const gpt::StageModel& w, const gpt::Residual& x, const pipeline::Place& at) const
      -> gpt::Residual {
    if (at.stage == 1 && at.microbatch == 3) throw Error("the disk is full");
    return gpt::Stages::stage(w, x, at);
  }
};

}  // namespace

TEST_CASE("pipeline: what fails ends all ranks with one message", "[pipeline]") {
  const Whole whole = unpipelined(false);
  const auto run = [&](const std::string& mesh, const auto& step) {
    on_threads(mesh, [&](const std::shared_ptr<Device>& device) { step(device); });
  };
  for (const pipeline::Schedule& schedule : schedules(2))
    expect_error<Error>(
        [&] {
          run("p=2,d=1,t=2", [&](const std::shared_ptr<Device>& device) {
            (void)staged<Throwing>(device, schedule, whole.weights, false);
          });
        },
        "fwd_1__3: the disk is full");
  expect_error<UsageError>(
      [&] {
        run("p=2,d=1,t=1", [&](const std::shared_ptr<Device>& device) {
          (void)staged<Plain>(device, pipeline::Std1F1B(4), whole.weights, false);
        });
      },
      "Std1F1B(num_stages=4) is for 4 ranks, but the mesh has p=2; choose p=4, or a schedule for 2 ranks");
  expect_error<UsageError>([] { (void)pipeline::LayerMap(pipeline::Std1F1B(3), 8); },
                           "8 layers do not divide into the 3 stages of Std1F1B(num_stages=3); choose a multiple of 3, "
                           "or fewer stages");
  expect_error<Error>(
      [&] {
        run("p=2,d=1,t=1", [&](const std::shared_ptr<Device>& device) {
          (void)staged<Plain>(device, pipeline::Std1F1B(2), whole.weights, false,
                              {{"B", rows}, {"L", length + 1}, {"M", 16}});
        });
      },
      "fwd_0__0: stage 0 hands over `B/d L M/t` with L = 6, but the sizes given for the pipeline say 7; give what a "
      "microbatch has (device 0 (p=0,d=0,t=0) of mesh p=2,d=1,t=1)");
}
