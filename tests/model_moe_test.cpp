// The mixture of experts of examples/moe_model.hpp: the same loss and gradients on every mesh, dropless and with slots
// enough; and both against a model that multiplies every token with every expert.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <shardlib/run/trained.hpp>
#include <shardlib/shardlib.hpp>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "../examples/moe_sampling.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using moe::MoeMesh;
using Leaves = std::vector<HostArray<f32>>;
const Sizes sizes{{"B", 8},  {"L", 8}, {"M", 8},  {"Q", 2}, {"H", 2},    {"D", 4},  {"X", 8},
                  {"F", 12}, {"G", 6}, {"V", 16}, {"I", 1}, {"HQD", 16}, {"HD", 8}, {"E", 4, 8}};

// With what Qwen 2 and Qwen 3 have, if `qwen`.
moe::Model random_model(const MoeMesh& mesh, bool qwen) {
  moe::Model model;
  model.layers.resize(2);
  if (qwen)
    for (moe::Layer& layer : model.layers) {
      layer.shared.emplace_back().mix.resize(1);
      layer.b_q.resize(1);
      layer.b_k.resize(1);
      layer.b_v.resize(1);
      layer.q_norm.resize(1);
      layer.k_norm.resize(1);
    }
  initialize(mesh, model, sizes, 1, [](std::string_view name) {
    return Normal{name.find("norm") != std::string_view::npos ? 1.0 : 0.0, 0.5};
  });
  return model;
}

/// Rows of two texts each, whose border lies within a shard. The devices of s have their tokens in an order.
moe::Batch batch(const MoeMesh& mesh, SequenceOrder order = SequenceOrder::contiguous) {
  constexpr std::int64_t length = 8;
  std::uint64_t random = 7;
  const auto random_id = [&](std::size_t) {
    random = random * 6364136223846793005U + 1442695040888963407U;
    return static_cast<i32>((random >> 33) % 16);
  };
  const auto placed = [&](const auto& value) {
    std::vector<i32> rows, ordered;
    for (std::size_t i = 0; i < 64; ++i) rows.push_back(value(i));
    for (auto row = rows.begin(); row != rows.end(); row += length)
      for (std::int64_t at = 0; at < mesh.size("s"); ++at)
        for (const auto [first, size] : detail::positions_of_shard(order, at, mesh.size("s"), length / mesh.size("s")))
          ordered.insert(ordered.end(), row + first, row + first + size);
    return place<Tensor<i32, "B/d/e L/s">>(mesh, HostArray<i32>({8, length}, ordered));
  };
  const auto inputs = placed(random_id), targets = placed(random_id);
  return {inputs, targets, placed([](std::size_t i) { return i % 8 < 3 ? 0 : 1; }),
          full<f32, "B/d/e L/s">(mesh, sizes, 1.0 / 64)};
}

// ---- every token times every expert, on one device -----------------------------------------------------------------

auto every_expert(const moe::Tokens<f32>& x, const moe::Layer& w, const moe::ModelConfig& config)
    -> std::pair<moe::Tokens<f32>, moe::Loss> {
  const auto experts = static_cast<double>(w.router.size("X")), tokens = static_cast<double>(x.size("T"));
  const auto logits = einsum_unreduced<"P/s/d/e T M, M X -> P/s/d/e T X">(x, all_gather<"M X">(w.router));
  const auto [best, chosen] = top_k<"X", "K">(softmax<"X">(logits), config.top_k);
  const auto hot = one_hot<"X">(chosen, w.router.size("X"));
  const auto share = config.norm_topk_prob ? best / sum<"P/s/d/e T K -> P/s/d/e T">(best) : best;
  // Of the rows of an expert, those of the first tokens have slots.
  const auto place = split<"R -> T K">(cumsum<"R">(merge<"T K -> R">(hot)), {{"K", config.top_k}});
  const double slots =
      config.capacity == 0 ? 1e9 : std::ceil(tokens * config.capacity * static_cast<double>(config.top_k) / experts);
  const auto kept = masked(less_equal(place, slots), hot);
  const auto mix = einsum_unreduced<"P/s/d/e T K X, P/s/d/e T K -> P/s/d/e T X">(kept, share);
  const auto gate = einsum_unreduced<"P/s/d/e T M, X M F -> P/s/d/e T X F">(x, all_gather<"X M F">(w.w_gate));
  const auto up = einsum_unreduced<"P/s/d/e T M, X M F -> P/s/d/e T X F">(x, all_gather<"X M F">(w.w_up));
  const auto y = einsum_unreduced<"P/s/d/e T X F, X M F -> P/s/d/e T M">(gate * sigmoid(gate) * up * mix,
                                                                         all_gather<"X M F">(w.w_down));
  const auto part = sum<"P/s/d/e T K X -> X +d +e +s">(hot) / (tokens * static_cast<double>(config.top_k));
  const auto mean_share = all_reduce<"X">(sum<"P/s/d/e T X -> X +d +e +s">(softmax<"X">(logits))) / tokens;
  const auto z = log(sum<"P/s/d/e T X -> P/s/d/e T">(exp(logits)));
  return {y, to_partial<over<"t">>(sum<"X +d +e +s -> +d +e +s">(stop_gradient(part) * mean_share) *
                                       (config.balance * experts) +
                                   sum<"P/s/d/e T -> +d +e +s">(square(z)) * (config.router_z / tokens))};
}

auto dense_loss(const moe::Model& w, const moe::Batch& b, const moe::ModelConfig& config) -> moe::Loss {
  auto x = shard<"B/d/e L/s M -> B/d/e L/s M/t">(
      index_unreduced<"[V] M, B/d/e L/s -> B/d/e L/s M">(all_gather<"V M">(w.embed), b.inputs));
  auto router = sum<"B/d/e L/s M/t -> +d +e +s +t">(x) * 0.0;
  for (const moe::Layer& layer : w.layers) {
    x = x + moe::attention(moe::normalized(x, layer.norm1, config), b.segments, layer, config);
    const auto in = moe::normalized(x, layer.norm2, config);
    const auto shards = stack_shards<"B/d/e L/s M -> P/s/d/e U W M">(in);
    const auto tokens = merge<"U W -> T">(shards);
    const auto [y, loss] = every_expert(tokens, layer, config);
    router = router + loss;
    x = x + shard<"B/d/e L/s M -> B/d/e L/s M/t">(
                unstack_shards<"P/s/d/e U W M -> B/d/e L/s M">(split<"T -> U W">(y, {{"W", shards.size("W")}})));
    if (!layer.shared.empty()) x = x + moe::shared_expert(in, layer.shared[0]);
  }
  const auto logits = einsum_unreduced<"B/d/e L/s M, V M -> B/d/e L/s V">(moe::normalized(x, w.final_norm, config),
                                                                          all_gather<"V M">(w.unembed));
  return to_partial<over<"t">>(sum<"B/d/e L/s -> +d +e +s">(cross_entropy(logits, b.targets) * b.weights)) + router;
}

// ---- the comparison ------------------------------------------------------------------------------------------------

struct Result {
  double loss = 0, load = 0, dropped = 0;
  Leaves gradients;
};
struct Variant {
  double capacity = 0;
  bool qwen = false;
  std::int64_t top_k = 2;
  const char* recompute = "marked";
  SequenceOrder order = SequenceOrder::contiguous;
};
moe::ModelConfig config_of(const Variant& v) {
  moe::ModelConfig config;
  config.capacity = v.capacity;
  config.top_k = v.top_k;
  config.norm_topk_prob = !v.qwen;
  config.recompute = {v.recompute};
  config.order = v.order;
  config.balance = 0.3;
  config.router_z = 0.2;
  return config;
}
Result step(const MoeMesh& mesh, const Variant& v) {
  const auto [l, grads, metrics] = value_and_grad(mesh, moe::loss<f32>, random_model(mesh, v.qwen),
                                                  batch(mesh, v.order), config_of(v), std::int64_t{1});
  return {item(all_reduce<"">(l)), item(metrics.balance.load), item(metrics.balance.dropped), fetch(grads)};
}
Result dense_step(const MoeMesh& mesh, const Variant& v) {
  const auto [l, grads] = value_and_grad(mesh, dense_loss, random_model(mesh, v.qwen), batch(mesh), config_of(v));
  return {item(all_reduce<"">(l)), 0, 0, fetch(grads)};
}
/// f on one device of this process, under mpirun too.
template <class F>
auto alone(const F& f) {
  decltype(f(std::declval<MoeMesh>())) result;
  const auto axes = parse_mesh("d=1,e=1,t=1");
  detail::run_device(DevicePtr::make(axes, 0), 1, [&](const DevicePtr& device) { result = f(MoeMesh(device)); });
  return result;
}

void expect_close(const Result& actual, const Result& expected, const std::vector<std::string>& names) {
  const double error = std::abs(actual.loss - expected.loss) / expected.loss;
  expect(error <= 1e-5, "the loss differs by " + show(error));
  expect(actual.gradients.size() == names.size() && expected.gradients.size() == names.size(), "gradients");
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto &a = actual.gradients[i].data, &e = expected.gradients[i].data;
    double scale = 0, worst = 0;
    for (const f32 x : e) scale = std::max(scale, std::abs(static_cast<double>(x)));
    expect(a.size() == e.size() && scale > 0, names[i] + " has a gradient");
    for (std::size_t k = 0; k < a.size(); ++k)
      worst = std::max(worst, std::abs(static_cast<double>(a[k]) - static_cast<double>(e[k])) / scale);
    expect(worst <= 1e-5, names[i] + ": the gradient differs by " + show(worst));
  }
}

// Slots for all tokens of a place: nothing is dropped, so that the mesh does not matter.
const Variant variants[] = {{},
                            {.qwen = true},
                            {.top_k = 1},
                            {.capacity = 4},
                            {.capacity = 8, .top_k = 1},
                            {.qwen = true, .order = SequenceOrder::zigzag},
                            {.capacity = 4, .order = SequenceOrder::zigzag}};

TEST_CASE("moe: loss and every gradient are equal on every mesh", "[model]") {
  for (const Variant& variant : variants) {
    const Result expected = alone([&](const MoeMesh& mesh) { return step(mesh, variant); });
    const auto names = alone([&](const MoeMesh& mesh) { return leaf_names(random_model(mesh, variant.qwen)); });
    CHECK(expected.dropped == 0);
    CHECK(expected.load > 1.2);  // the experts are used unevenly
    on_meshes({"d=1,e=1,t=1", "d=1,e=2,t=1", "d=2,e=1,t=1", "d=1,e=1,t=2", "d=2,e=2,t=1", "d=1,e=4,t=1", "d=1,e=2,t=2",
               "d=2,e=2,t=2", "d=1,e=1,s=2,t=1", "d=1,e=2,s=2,t=1", "d=2,e=1,s=2,t=1", "d=1,e=1,s=2,t=2",
               "d=1,e=1,s=4,t=1", "d=2,e=2,s=2,t=1", "d=1,e=2,s=2,t=2"},
              [&](const DevicePtr& device) {
                const Result result = step(MoeMesh(device), variant);
                expect_close(result, expected, names);
                expect(std::abs(result.load - expected.load) < 1e-5 && result.dropped == 0, "balance");
              });
  }
}

TEST_CASE("moe: an axis s of one device changes no bit, in no order of tokens", "[model]") {
  for (const SequenceOrder order : {SequenceOrder::contiguous, SequenceOrder::zigzag}) {
    std::vector<Result> found;
    on_meshes({"d=2,e=2,t=1", "d=2,e=2,s=1,t=1"}, [&](const DevicePtr& device) {
      const Result result = step(MoeMesh(device), {.order = order});
      if (device->rank() == 0) found.push_back(result);
    });
    if (found.size() < 2) continue;  // another rank's
    CHECK(found[0].loss == found[1].loss);
    REQUIRE(found[0].gradients.size() == found[1].gradients.size());
    for (std::size_t i = 0; i < found[0].gradients.size(); ++i)
      CHECK(found[0].gradients[i].data == found[1].gradients[i].data);
  }
}

TEST_CASE("moe: every gradient is that of a model that multiplies every token with every expert", "[model]") {
  for (const Variant& variant :
       {Variant{}, Variant{.qwen = true}, Variant{.capacity = 4}, Variant{.capacity = 0.75}, Variant{.top_k = 3}}) {
    INFO("capacity " << variant.capacity << ", top_k " << variant.top_k);
    const auto both = alone([&](const MoeMesh& mesh) {
      return std::tuple{step(mesh, variant), dense_step(mesh, variant), leaf_names(random_model(mesh, variant.qwen))};
    });
    expect_close(std::get<0>(both), std::get<1>(both), std::get<2>(both));
    CHECK((std::get<0>(both).dropped > 0) == (variant.capacity == 0.75));
  }
}

TEST_CASE("moe: no policy of recompute changes a bit of the loss or of a gradient", "[model]") {
  for (const double capacity : {0.0, 1.0})
    on_meshes({"d=1,e=1,t=1", "d=1,e=2,t=2", "d=1,e=2,s=2,t=1"}, [&](const MoeMesh& mesh) {
      const Result kept = step(mesh, {.capacity = capacity, .recompute = "none"});
      for (const char* policy : {"marked", "dots", "attention", "everything", "argsort,all_gather"}) {
        const Result result = step(mesh, {.capacity = capacity, .recompute = policy});
        expect(result.loss == kept.loss, std::string(policy) + ": the loss");
        for (std::size_t i = 0; i < kept.gradients.size(); ++i)
          expect(result.gradients[i].data == kept.gradients[i].data, policy + (": gradient " + show(i)));
      }
    });
}

// The loss of the last position of each row, by decoding the rows one by one: at once, and token by token.
TEST_CASE("moe: decoding gives the logits of the model, on every mesh", "[model]") {
  on_meshes({"d=1,e=1,t=1", "d=2,e=2,t=1", "d=1,e=2,t=2", "d=1,e=2,s=2,t=1", "d=1,e=1,s=4,t=1"},
            [](const MoeMesh& mesh) {
              run::Trained<moe::Model, moe::Model> trained;
              trained.copies = random_model(mesh, true);
              auto rows = batch(mesh);
              moe::ModelConfig config;
              config.top_k = 2;
              const auto last = cast<f32>(equal(iota<"L/s">(mesh, 8), 7.0)) / 8.0;
              rows.segments = full<i32, "B/d/e L/s">(mesh, sizes, 0);
              rows.weights = last + zeros<f32, "B/d/e L/s">(mesh, sizes);
              const auto cross_entropy = moe::loss(trained.copies, rows, config, 1).second.cross_entropy;
              const double expected = item(all_reduce<"+d +e +s +t -> ">(cross_entropy));
              const auto inputs = all_gather<"B/d/e L/s -> B L">(rows.inputs),
                         targets = all_gather<"B/d/e L/s -> B L">(rows.targets);
              config.capacity = 0.1;  // decoding drops nothing
              const auto decode = moe::decoder(mesh, trained, config, {{"H", 2}, {"D", 4}}, 8);
              double at_once = 0, one_by_one = 0;
              const auto loss = [](const std::vector<float>& logits, i32 target) {
                double total = 0;
                for (const float x : logits) total += std::exp(static_cast<double>(x));
                return (std::log(total) - static_cast<double>(logits[static_cast<std::size_t>(target)])) / 8;
              };
              for (std::size_t row = 0; row < 8; ++row) {
                const auto ids = inputs.span().subspan(row * 8, 8);
                const i32 target = targets.span()[row * 8 + 7];
                at_once += loss(decode(ids, 0), target);
                std::vector<float> logits;
                for (std::size_t i = 0; i < 8; ++i) logits = decode(ids.subspan(i, 1), static_cast<std::int64_t>(i));
                one_by_one += loss(logits, target);
              }
              expect(std::abs(at_once - expected) < 1e-4, show(at_once) + " instead of " + show(expected));
              expect(std::abs(one_by_one - expected) < 1e-4, show(one_by_one) + " instead of " + show(expected));
            });
}

// With experts over e, a device keeps an e-th of them, and rows travel along e alone.
TEST_CASE("moe: rows travel along e", "[model]") {
  on_meshes({"d=2,e=2,t=1", "d=1,e=2,s=2,t=1"}, [](const MoeMesh& mesh) {
    auto& state = detail::program_state(mesh.device());
    std::string axes;
    state.observer = [&](const detail::OpReport& ran) {
      if (std::string_view(ran.op.name) == "ragged_all_to_all")
        for (const auto axis : ran.work.axes) axes += axis;
    };
    static_cast<void>(step(mesh, {}));
    state.observer = nullptr;
    // Of two layers: there and back, once more for the recomputed forward pass, and backward.
    expect(axes == "eeeeeeeeeeee", axes);
  });
}

}  // namespace
