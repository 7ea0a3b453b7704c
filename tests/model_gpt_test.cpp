// The whole GPT of examples/gpt_model.hpp: the same loss and gradients on every mesh, with and without recompute, on
// threads and MPI; and both against an independent oracle.
//
// The oracle is a second GPT in f64 (gpt_reference.hpp): its loss directly, its gradients as central finite differences
// over weights in f64, where they are good to about 1e-8. PyTorch would have given all gradients at once, but CI would
// have to install 200 MB of it for this one test; finite differences need nothing.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <ostream>
#include <shardlib/shardlib.hpp>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "../examples/gpt_model.hpp"
#include "gpt_reference.hpp"
#include "gpt_spelled.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using GptMesh = Mesh<"r d s t">;
using Leaves = std::vector<HostArray<f32>>;

constexpr gpt_reference::Shape shape{.B = 8, .L = 16, .M = 16, .Q = 2, .K = 4, .D = 4, .F = 24, .V = 32, .layers = 2};
constexpr auto sized(std::size_t n) {
  return static_cast<std::int64_t>(n);
}
const Sizes sizes{{"B", sized(shape.B)},          {"L", sized(shape.L)},   {"M", sized(shape.M)},
                  {"Q", sized(shape.Q)},          {"K", sized(shape.K)},   {"D", sized(shape.D)},
                  {"F", sized(shape.F)},          {"V", sized(shape.V)},   {"E", sized(shape.K* shape.Q* shape.D)},
                  {"G", sized(shape.K* shape.D)}, {"N", sized(shape.D), 8}};

/// Which model it is: what is one tensor in it, and what else its layers have.
struct Kind {
  bool tied = false, qkv_bias = false, qk_norm = false;
};
constexpr Kind kinds[] = {{}, {.tied = true}, {.qkv_bias = true}, {.tied = true, .qk_norm = true}};

std::ostream& operator<<(std::ostream& out, Kind kind) {
  return out << (kind.tied ? ", tied" : "") << (kind.qkv_bias ? ", biases" : "")
             << (kind.qk_norm ? ", head norms" : "");
}

/// Every leaf random, scales around 1; weights large enough for attention to be far from uniform.
gpt::Model<f32> random_model(const GptMesh& mesh, Kind kind) {
  gpt::Model<f32> model;
  if (!kind.tied) model.unembed.resize(1);
  model.layers.resize(shape.layers);
  for (auto& layer : model.layers) {
    for (auto* biases : {&layer.b_k, &layer.b_v}) biases->resize(kind.qkv_bias ? 1 : 0);
    layer.b_q.resize(kind.qkv_bias ? 1 : 0);
    for (auto* norms : {&layer.q_norm, &layer.k_norm}) norms->resize(kind.qk_norm ? 1 : 0);
  }
  initialize(mesh, model, sizes, 1, [](std::string_view name) {
    return Normal{name.find("norm") != std::string_view::npos ? 1.0 : 0.0, 0.3};
  });
  return model;
}

/// Random tokens; of the rows some are one segment, some several, of all lengths from 1.
gpt_reference::Tokens tokens() {
  gpt_reference::Tokens tokens;
  std::uint64_t random = 7;
  const auto below = [&random](std::uint64_t n) {
    random = random * 6364136223846793005U + 1442695040888963407U;
    return static_cast<int>((random >> 33) % n);
  };
  for (std::size_t b = 0; b < shape.B; ++b)
    for (std::size_t l = 0, segment = 0; l < shape.L; ++l) {
      if (l > 0 && b % 3 != 0 && below(3) == 0) ++segment;
      tokens.inputs.push_back(below(shape.V));
      tokens.targets.push_back(below(shape.V));
      tokens.segments.push_back(static_cast<int>(segment));
    }
  return tokens;
}

/// The tokens as one array, in which the devices of s have theirs in an order.
gpt::Batch batch(const GptMesh& mesh, SequenceOrder order = SequenceOrder::contiguous) {
  const auto on_devices = [&](const std::vector<int>& values) {
    std::vector<int> ordered;
    for (auto row = values.begin(); row != values.end(); row += sized(shape.L))
      for (std::int64_t at = 0; at < mesh.size("s"); ++at)
        for (const auto [first, size] :
             detail::positions_of_shard(order, at, mesh.size("s"), sized(shape.L) / mesh.size("s")))
          ordered.insert(ordered.end(), row + first, row + first + size);
    return place<Tensor<i32, "B/r/d L/s">>(mesh, HostArray<i32>({sized(shape.B), sized(shape.L)}, ordered));
  };
  const auto host = tokens();
  return {on_devices(host.inputs), on_devices(host.targets), on_devices(host.segments),
          full<f32, "B/r/d L/s">(mesh, sizes, 1.0 / static_cast<double>(host.inputs.size()))};
}

using Logits = Tensor<f32, "B/r/d L/s V/t">;
Tensor<bool_, "Qlen/s Klen"> causal(const GptMesh& mesh) {
  return causal_mask<"Qlen/s Klen">(mesh, sized(shape.L), sized(shape.L));
}

/// gpt::logits with each layer called directly, so that everything is kept and nothing computed twice.
Logits logits_without_recompute(const gpt::Model<f32>& w, const gpt::Batch& batch, const gpt::ModelConfig& config) {
  const auto embed = all_gather<"V/t M/d/s -> V/t M">(w.embed);
  gpt::Residual x = gpt::token_embeddings(embed, batch.inputs);
  for (const gpt::Layer<f32>& weights : w.layers) x = gpt::layer(x, batch.segments, weights, config);
  const auto unembed = w.unembed.empty() ? embed : all_gather<"V/t M/d/s -> V/t M">(w.unembed[0]);
  return gpt::output_logits(x, w.final_norm, unembed, config);
}

/// Where a step differs from gpt::loss.
struct Variant {
  Kind kind = {};
  bool library_loss = false, recompute = true, spelled_attention = false, whole = false;
  const char* policy = "marked";
  SequenceOrder order = SequenceOrder::contiguous;
};

/// The loss and, whole, every gradient.
struct Result {
  f32 loss = 0;
  Leaves gradients;
};

Result step(const GptMesh& mesh, Variant variant) {
  const auto model = random_model(mesh, variant.kind);
  using Gradients = gradient_t<GptMesh, gpt::Model<f32>>;
  const auto differentiated = [&]() -> std::pair<Tensor<f32, "+d +r +s +t">, Gradients> {
    if (variant.whole) {
      auto [l, gradients] = value_and_grad(mesh, gpt::loss<f32, true>, gather_weights<gpt::Model<f32, true>>(model),
                                           batch(mesh), gpt::ModelConfig{{}, 1e-6, {variant.policy}});
      return {l, scatter_gradients<Gradients>(std::move(gradients))};
    }
    if (!variant.library_loss && variant.recompute && !variant.spelled_attention)
      return value_and_grad(mesh, gpt::loss<f32>, model, batch(mesh, variant.order),
                            gpt::ModelConfig{{}, 1e-6, {variant.policy}, {}, variant.order});
    const auto loss = [&](const gpt::Model<f32>& w, const gpt::Batch& batch,
                          const gpt::ModelConfig& config) -> Tensor<f32, "+d +r +s +t"> {
      const Logits logits = variant.spelled_attention ? gpt_spelled::logits(w, batch, causal(mesh), config)
                            : variant.recompute       ? gpt::logits(w, batch.inputs, batch.segments, config)
                                                      : logits_without_recompute(w, batch, config);
      return variant.library_loss ? gpt_spelled::library_loss(logits, batch) : gpt::mean_loss(logits, batch);
    };
    return value_and_grad(mesh, loss, model, batch(mesh), gpt::ModelConfig{});
  };
  const auto [l, gradients] = differentiated();
  return {item(all_reduce<"+d +r +s +t -> ">(l)), fetch(reduce_gradients(mesh, gradients))};
}

/// f on a mesh of threads in this process, under mpirun too: what MPI's results are compared with, without files. Each
/// device has one CPU thread here and in the runs compared with it, whatever the machine.
template <class F>
auto on_threads(const std::string& mesh, const F& f) {
  decltype(f(std::declval<GptMesh>())) result;
  const auto axes = parse_mesh(mesh);
  const DeviceBody body = [&](const DevicePtr& device) {
    auto mine = f(GptMesh(device));
    if (device->rank() == 0) result = std::move(mine);
  };
  if (device_count(axes) == 1)
    detail::run_device(DevicePtr::make(axes, 0), 1, body);
  else
    detail::launch_threads(axes, body, {.threads = 1});
  return result;
}

void expect_same_bits(const Result& a, const Result& b, const std::vector<std::string>& names) {
  expect(std::memcmp(&a.loss, &b.loss, sizeof a.loss) == 0, "the losses' bits differ");
  expect(a.gradients.size() == names.size() && b.gradients.size() == names.size(), "as many gradients as leaves");
  for (std::size_t i = 0; i < names.size(); ++i) {
    expect(a.gradients[i].shape == b.gradients[i].shape, names[i] + ": another shape");
    expect(std::memcmp(a.gradients[i].data.data(), b.gradients[i].data.data(),
                       a.gradients[i].data.size() * sizeof(f32)) == 0,
           names[i] + ": the gradients' bits differ");
  }
}

double largest(const std::vector<f32>& x) {
  double most = 0;
  for (const f32 v : x) most = std::max(most, std::abs(static_cast<double>(v)));
  return most;
}

/// Within `tolerance` of the loss, and of each leaf's largest element.
void expect_close(const Result& actual, const Result& expected, double tolerance,
                  const std::vector<std::string>& names) {
  const auto relative = [](double a, double b, double scale) { return std::abs(a - b) / scale; };
  const double error = relative(actual.loss, expected.loss, expected.loss);
  expect(error <= tolerance, "the loss differs by " + show(error));
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto &a = actual.gradients[i].data, &e = expected.gradients[i].data;
    const double scale = largest(e);
    expect(a.size() == e.size() && scale > 0, names[i] + " has a gradient");
    double worst = 0;
    for (std::size_t k = 0; k < a.size(); ++k)
      worst = std::max(worst, relative(static_cast<double>(a[k]), static_cast<double>(e[k]), scale));
    expect(worst <= tolerance, names[i] + ": the gradient differs by " + show(worst));
  }
}

std::vector<std::string> names_of_leaves(Kind kind) {
  return on_threads("d=1,s=1,t=1", [&](const GptMesh& mesh) { return leaf_names(random_model(mesh, kind)); });
}

/// The library's results to compare the oracle's with, on one device.
struct Subject {
  std::vector<std::string> names;
  Leaves weights;
  Result result;
};
Subject subject(Kind kind) {
  return on_threads("d=1,s=1,t=1", [&](const GptMesh& mesh) {
    const auto model = random_model(mesh, kind);
    return Subject{leaf_names(model), fetch(model), step(mesh, {.kind = kind})};
  });
}

gpt_reference::Weights in_f64(const Subject& subject) {
  gpt_reference::Weights weights;
  for (std::size_t i = 0; i < subject.names.size(); ++i)
    weights[subject.names[i]] = {subject.weights[i].data.begin(), subject.weights[i].data.end()};
  return weights;
}

}  // namespace

TEST_CASE("gpt: loss and every gradient are equal on every mesh, and on threads and MPI bit for bit", "[model]") {
  const Variant variants[] = {{},
                              {.order = SequenceOrder::zigzag},
                              {.kind = {.tied = true}},
                              {.kind = {.qkv_bias = true}},
                              {.kind = {.tied = true, .qk_norm = true}},
                              {.library_loss = true},
                              {.spelled_attention = true}};
  for (const Variant& variant : few(variants, 2)) {
    const auto names = names_of_leaves(variant.kind);
    const auto run = [&](const GptMesh& mesh) { return step(mesh, variant); };
    const Result alone = on_threads("d=1,s=1,t=1", run);
    for (const char* mesh : {"d=1,s=1,t=1", "d=2,s=1,t=1", "d=1,s=1,t=2", "d=2,s=1,t=2", "d=4,s=1,t=1", "d=1,s=1,t=4",
                             "d=4,s=1,t=2", "d=1,s=2,t=1", "d=2,s=2,t=1", "d=1,s=2,t=2", "d=1,s=4,t=1", "d=2,s=2,t=2",
                             "r=2,d=2,s=1,t=1", "r=2,d=1,s=2,t=2"}) {
      if (under_mpi() && device_count(parse_mesh(mesh)) > world_size()) continue;
      const Result threads = on_threads(mesh, run);
      expect_close(threads, alone, 1e-5, names);
      // Without mpirun this is the second run on threads.
      on_mesh(mesh, [&](const DevicePtr& device) { expect_same_bits(run(GptMesh(device)), threads, names); },
              {.threads = 1});
    }
  }
}

TEST_CASE("gpt: by weights that are gathered before, loss and every gradient are the same", "[model]") {
  // The loss communicates nothing over d and s, and its gradients are pending there.
  static_assert(
      std::is_same_v<gradient_t<GptMesh, gpt::Weight<f32, "M/d/s F/t", true>>, Tensor<f32, "M F/t +d +r +s">>);
  on_meshes({"d=1,s=1,t=1", "d=2,s=1,t=2", "d=2,s=2,t=1", "d=1,s=2,t=2", "r=2,d=2,s=1,t=1"}, [](const GptMesh& on) {
    for (const Kind kind : few(kinds, 1)) {
      const Result gathered_in_loss = step(on, {.kind = kind});
      for (const char* policy : {"none", "marked", "everything"})
        expect_close(step(on, {.kind = kind, .whole = true, .policy = policy}), gathered_in_loss, 1e-5,
                     leaf_names(random_model(on, kind)));
    }
  });
  on_mesh("d=2,s=2,t=1", [](const GptMesh& on) {
    const auto sent = [&](const auto& loss, const auto& model) {
      auto& counts = detail::program_state(on.device()).counts;
      counts.clear();
      static_cast<void>(value_and_grad(on, loss, model, batch(on), gpt::ModelConfig{}));
      return std::array{counts["all_gather"].bytes, counts["reduce_scatter"].bytes};
    };
    const auto model = random_model(on, {});
    const auto often = sent(gpt::loss<f32>, model);
    const auto once = sent(gpt::loss<f32, true>, gather_weights<gpt::Model<f32, true>>(model));
    expect(often[0] > 0 && often[1] > 0 && once[0] == 0 && once[1] == 0,
           "sent by gathers and scatters: " + show(once[0]) + " and " + show(once[1]));
  });
}

TEST_CASE("gpt: without devices along s the order of tokens changes no bit", "[model]") {
  on_meshes({"d=1,s=1,t=1", "d=2,s=1,t=2"}, [](const GptMesh& on) {
    expect_same_bits(step(on, {.order = SequenceOrder::zigzag}), step(on, {}), leaf_names(random_model(on, {})));
  });
}

TEST_CASE("gpt: recompute changes no bit", "[model]") {
  on_meshes({"d=1,s=1,t=1", "d=2,s=1,t=2", "d=2,s=2,t=1"}, [](const GptMesh& on) {
    for (const Kind kind : few(kinds, 1)) {
      const Result kept = step(on, {.kind = kind, .recompute = false});
      for (const char* policy : {"none", "dots", "attention", "marked", "everything", "rms_norm,reduce_scatter,map"})
        expect_same_bits(step(on, {.kind = kind, .policy = policy}), kept, leaf_names(random_model(on, kind)));
    }
  });
}

TEST_CASE("gpt: the library's cross_entropy gives what the spelled loss gives", "[model]") {
  on_mesh("d=2,s=1,t=2", [](const GptMesh& mesh) {
    expect_close(step(mesh, {.library_loss = true}), step(mesh, {}), 2e-6, leaf_names(random_model(mesh, {})));
  });
}

TEST_CASE("gpt: the library's causal_attention gives what attention in einsums gives", "[model]") {
  on_meshes({"d=1,s=1,t=1", "d=2,s=1,t=2"}, [](const GptMesh& on) {
    expect_close(step(on, {}), step(on, {.spelled_attention = true}), 1e-5, leaf_names(random_model(on, {})));
  });
}

TEST_CASE("gpt: the loss is that of an independent f64 model", "[model]") {
  for (const Kind kind : kinds) {
    const Subject s = subject(kind);
    const double expected = gpt_reference::loss(shape, in_f64(s), tokens());
    INFO(kind);
    CHECK(std::abs(static_cast<double>(s.result.loss) - expected) <= 1e-6 * expected);
  }
}

TEST_CASE("gpt: every gradient is that of an independent f64 model, by finite differences", "[model][differences]") {
  for (const Kind kind : kinds) {
    const Subject s = subject(kind);
    auto weights = in_f64(s);
    const auto host = tokens();
    constexpr double h = 1e-4;
    for (std::size_t i = 0; i < s.names.size(); ++i) {
      const auto& gradient = s.result.gradients[i].data;
      auto& w = weights.at(s.names[i]);
      REQUIRE(gradient.size() == w.size());
      // The derivative of the f64 loss along a direction of this leaf.
      const auto along = [&](const std::vector<double>& direction) {
        const auto moved = [&, at = w](double by) {
          for (std::size_t k = 0; k < w.size(); ++k) w[k] = at[k] + by * direction[k];
          const double loss = gpt_reference::loss(shape, weights, host);
          w = at;
          return loss;
        };
        return (moved(h) - moved(-h)) / (2 * h);
      };
      const double scale = largest(gradient);
      INFO(s.names[i] << kind << ", largest gradient " << scale);
      CHECK(scale > 1e-5);
      // The largest element, and some spread over the leaf.
      std::vector<std::size_t> places{0, w.size() / 3, w.size() / 2, w.size() - 1};
      for (std::size_t k = 0; k < w.size(); ++k)
        if (std::abs(static_cast<double>(gradient[k])) == scale) places.push_back(k);
      for (const std::size_t k : places) {
        std::vector<double> one(w.size(), 0.0);
        one[k] = 1;
        INFO("element " << k);
        CHECK(std::abs(static_cast<double>(gradient[k]) - along(one)) <= 1e-5 * scale);
      }
      // A direction that all elements share in, with signs that no symmetry of the model explains.
      std::vector<double> mixed(w.size());
      double expected = 0, size = 0;
      for (std::size_t k = 0; k < w.size(); ++k) {
        mixed[k] = std::cos(static_cast<double>(k * k + 1));
        expected += mixed[k] * static_cast<double>(gradient[k]);
        size += std::abs(mixed[k] * static_cast<double>(gradient[k]));
      }
      CHECK(std::abs(expected - along(mixed)) <= 1e-5 * size);
    }
  }
}

namespace {

struct LayerAndInput {
  gpt::Layer<f32> weights;
  gpt::Residual x;
};

using Counts = std::map<std::string, detail::ProgramState::Count>;

/// How often each op ran in one step of one layer, and its multiply-adds. `loss(in, seen)`: the mean of the layer's
/// result, as what it attends to says; that is a mask, or the segments.
template <class Loss, class Seen>
Counts counts(const GptMesh& mesh, const Loss& loss, const Seen& seen) {
  const LayerAndInput in{random_model(mesh, {}).layers[0], random_normal<f32, "B/r/d L/s M/t">(mesh, sizes, {2, 0})};
  auto& counts = detail::program_state(mesh.device()).counts;
  counts.clear();
  static_cast<void>(value_and_grad(mesh, loss, in, seen));
  return {counts.begin(), counts.end()};
}
/// Of the layer whose attention is one op, or einsums.
Counts counts(const GptMesh& mesh, bool recompute, bool spelled) {
  const auto mean_of = [recompute](const auto& layer) {
    return [=](const LayerAndInput& in, const auto& seen) -> Tensor<f32, "+d +r +s +t"> {
      const auto y = recompute ? explicit_activation_checkpointing(layer)(in.x, seen, in.weights, gpt::ModelConfig{})
                               : layer(in.x, seen, in.weights, gpt::ModelConfig{});
      return mean<"B/r/d L/s M/t -> +d +r +s +t">(y);
    };
  };
  const auto segments = batch(mesh).segments;
  if (spelled) return counts(mesh, mean_of(gpt_spelled::layer), gpt_spelled::segment_mask(segments, causal(mesh)));
  return counts(mesh, mean_of(gpt::layer<f32>), segments);
}

/// The calls of each op that recomputing adds.
std::map<std::string, std::int64_t> added(const Counts& with, const Counts& without) {
  std::map<std::string, std::int64_t> more;
  for (const auto& [op, count] : with) {
    const auto it = without.find(op);
    if (const auto calls = count.calls - (it == without.end() ? 0 : it->second.calls); calls != 0) more[op] = calls;
  }
  return more;
}
void expect_added(const std::map<std::string, std::int64_t>& is, const std::map<std::string, std::int64_t>& due) {
  std::string text;
  for (const auto& [op, calls] : is) text += op + " " + std::to_string(calls) + ", ";
  expect(is == due, "computed again: " + text);
}

}  // namespace

TEST_CASE("gpt: a layer's backward computes again what it needs, and nothing else", "[model]") {
  // q, k, v, the residual stream after attention, gate and up are kept. Again computed are:
  const std::map<std::string, std::int64_t> expected{
      // The two residual streams over t, for the norms' derivatives and as operands of the weights' gradients; the
      // two scales; and the seven matrices over d, which FSDP does not keep: operands of their inputs' gradients.
      {"all_gather", 11},
      // The norms times their scales, as operands of the gradients of w_q, w_k, w_v, w_gate, w_up.
      {"rms_norm", 2},
      // Heads, an operand of the gradient of w_o, and what the derivative of attention needs.
      {"causal_attention", 1},
      // swish(gate) * up, an operand of the gradient of w_down.
      {"map", 1},
  };
  on_meshes({"d=1,s=1,t=1", "d=2,s=1,t=2", "d=1,s=2,t=2"}, [&](const DevicePtr& device) {
    const auto with = counts(GptMesh(device), true, false), without = counts(GptMesh(device), false, false);
    expect_added(added(with, without), expected);
    // Forward 7 einsums; backward two for each. No einsum runs again.
    expect(without.at("einsum_unreduced").calls == 21, "einsums without recompute");
    expect(with.at("einsum_unreduced").flops == without.at("einsum_unreduced").flops, "FLOPs of einsums");
    // Forward 11 gathers and 2 scatters; backward each becomes the other.
    expect(without.at("all_gather").calls == 13 && without.at("reduce_scatter").calls == 13, "collectives");
  });
}

TEST_CASE("gpt: a policy keeps the results of its ops, and nothing else", "[model]") {
  const auto again_on = [](const GptMesh& on, const char* policy) {
    const auto loss = [policy](bool recompute) {
      return [=](const LayerAndInput& in, const Tensor<i32, "B/r/d L/s">& seen) -> Tensor<f32, "+d +r +s +t"> {
        const auto wrapped = explicit_activation_checkpointing(gpt::layer<f32>, {recompute ? policy : "none"});
        return mean<"B/r/d L/s M/t -> +d +r +s +t">(wrapped(in.x, seen, in.weights, gpt::ModelConfig{}));
      };
    };
    const auto segments = batch(on).segments;
    return added(counts(on, loss(true), segments), counts(on, loss(false), segments));
  };
  on_meshes({"d=1,s=1,t=1", "d=2,s=1,t=2"}, [&](const GptMesh& here) {
    const auto again = [&](const char* policy) { return again_on(here, policy); };
    const std::map<std::string, std::int64_t> nothing;
    expect_added(again("none"), nothing);
    // Einsums and attention are computed once. The rest is cheap, or sent again.
    auto dots = again("dots");
    expect(!dots.contains("einsum_unreduced") && !dots.contains("causal_attention") && dots.at("all_gather") == 11,
           "dots");
    // What attention keeps spares neither q, k and v, nor the residual stream between the branches.
    auto attention = again("attention"), everything = again("everything");
    expect(everything.at("causal_attention") == 1 && everything.at("einsum_unreduced") == 6, "everything");
    everything.erase("causal_attention");
    expect(attention == everything, "attention");
    // Kept, and what only fed it too.
    auto some = again("einsum_unreduced,all_gather");
    expect(!some.contains("einsum_unreduced") && !some.contains("all_gather") && some.at("causal_attention") == 1,
           "a list");
    const std::string text = error_of([&] { static_cast<void>(again("einsun_unreduced")); });
    expect(text.find("`einsun_unreduced`") != std::string::npos && text.find("`rms_norm`") != std::string::npos &&
               text.find("attention or everything") != std::string::npos,
           text);
  });
}

TEST_CASE("gpt: with attention in einsums a layer's backward computes scores and heads again", "[model]") {
  const std::map<std::string, std::int64_t> expected{
      // As with causal_attention, and keys and values over s.
      {"all_gather", 13},
      {"rms_norm", 2},
      {"*", 1},  // from scores to probabilities
      {"map", 1},
      // Scores, and heads, an operand of the gradient of w_o. Not q, k, v, gate, up, nor the two output products.
      {"einsum_unreduced", 2},
      // From scores to probabilities.
      {"where", 1},
      {"softmax", 1},
      // Of q, k, v and the probabilities, without a copy.
      {"rename", 4},
  };
  on_meshes({"d=1,s=1,t=1", "d=2,s=1,t=2"}, [&](const DevicePtr& device) {
    const auto with = counts(GptMesh(device), true, true), without = counts(GptMesh(device), false, true);
    expect_added(added(with, without), expected);
    // Of both products: B L^2 Q K D multiply-adds, on this device's share of batch and heads.
    const auto product = static_cast<double>(shape.B * shape.L * shape.L * shape.Q * shape.K * shape.D) * 2.0;
    const double more = with.at("einsum_unreduced").flops - without.at("einsum_unreduced").flops;
    expect(more == 2 * product / device->size(), "FLOPs computed again: " + show(more));
    // Forward 9 einsums; backward two for each.
    expect(without.at("einsum_unreduced").calls == 27, "einsums without recompute");
    // Forward 13 gathers and 2 scatters; backward each becomes the other.
    expect(without.at("all_gather").calls == 15 && without.at("reduce_scatter").calls == 15, "collectives");
  });
}
