// The mixture of experts of examples/moe_model.hpp: the same loss and gradients on every mesh, dropless and with slots
// enough; and both against a model that multiplies every token with every expert.
#include <cmath>
#include <shardlib/run/trained.hpp>
#include <shardlib/shardlib.hpp>
#include <string>
#include <utility>
#include <vector>

#include "../examples/moe_sampling.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using moe::MoeMesh;
using Leaves = std::vector<HostArray<f32>>;
const Sizes sizes{{"B", 8},  {"L", 6}, {"M", 8},  {"Q", 2}, {"H", 2},    {"D", 4},  {"X", 8},
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

moe::Batch batch(const MoeMesh& mesh) {
  std::uint64_t random = 7;
  const auto ids = [&](std::uint64_t n) {
    std::vector<i32> values(48);
    for (i32& v : values) {
      random = random * 6364136223846793005U + 1442695040888963407U;
      v = static_cast<i32>((random >> 33) % n);
    }
    return place<Tensor<i32, "B/d/e L">>(mesh, HostArray<i32>({8, 6}, values));
  };
  const auto inputs = ids(16), targets = ids(16);
  return {inputs, targets, ids(1), full<f32, "B/d/e L">(mesh, sizes, 1.0 / 48)};
}

// ---- every token times every expert, on one device -----------------------------------------------------------------

auto every_expert(const moe::Tokens& x, const moe::Layer& w, const moe::Config& config)
    -> std::pair<moe::Tokens, moe::Loss> {
  const auto experts = static_cast<double>(w.router.size("X")), tokens = static_cast<double>(x.size("T"));
  const auto logits = einsum_unreduced<"P/d/e T M, M X -> P/d/e T X">(x, all_gather<"M X">(w.router));
  const auto [best, chosen] = top_k<"X", "K">(softmax<"X">(logits), config.top_k);
  const auto hot = one_hot<"X">(chosen, w.router.size("X"));
  const auto share = config.norm_topk_prob ? best / sum<"P/d/e T K -> P/d/e T">(best) : best;
  // Of the rows of an expert, those of the first tokens have slots.
  const auto place = split<"R -> T K">(cumsum<"R">(merge<"T K -> R">(hot)), {{"K", config.top_k}});
  const double slots =
      config.capacity == 0 ? 1e9 : std::ceil(tokens * config.capacity * static_cast<double>(config.top_k) / experts);
  const auto kept = masked(less_equal(place, slots), hot);
  const auto mix = einsum_unreduced<"P/d/e T K X, P/d/e T K -> P/d/e T X">(kept, share);
  const auto gate = einsum_unreduced<"P/d/e T M, X M F -> P/d/e T X F">(x, all_gather<"X M F">(w.w_gate));
  const auto up = einsum_unreduced<"P/d/e T M, X M F -> P/d/e T X F">(x, all_gather<"X M F">(w.w_up));
  const auto y = einsum_unreduced<"P/d/e T X F, X M F -> P/d/e T M">(gate * sigmoid(gate) * up * mix,
                                                                     all_gather<"X M F">(w.w_down));
  const auto part = sum<"P/d/e T K X -> X +d +e">(hot) / (tokens * static_cast<double>(config.top_k));
  const auto mean_share = all_reduce<"X">(sum<"P/d/e T X -> X +d +e">(softmax<"X">(logits))) / tokens;
  const auto z = log(sum<"P/d/e T X -> P/d/e T">(exp(logits)));
  return {y,
          to_partial<over<"t">>(sum<"X +d +e -> +d +e">(stop_gradient(part) * mean_share) * (config.balance * experts) +
                                sum<"P/d/e T -> +d +e">(square(z)) * (config.router_z / tokens))};
}

auto dense_loss(const moe::Model& w, const moe::Batch& b, const moe::Config& config) -> moe::Loss {
  auto x = shard<"B/d/e L M -> B/d/e L M/t">(
      index_unreduced<"[V] M, B/d/e L -> B/d/e L M">(all_gather<"V M">(w.embed), b.inputs));
  auto router = sum<"B/d/e L M/t -> +d +e +t">(x) * 0.0;
  for (const moe::Layer& layer : w.layers) {
    x = x + moe::attention(moe::normalized(x, layer.norm1, config), b.segments, layer, config);
    const auto in = moe::normalized(x, layer.norm2, config);
    const auto tokens = split<"N/d/e -> P/d/e T">(merge<"B/d/e L -> N/d/e">(in), {{"P", 1}});
    const auto [y, loss] = every_expert(tokens, layer, config);
    router = router + loss;
    x = x + shard<"B/d/e L M -> B/d/e L M/t">(
                split<"N/d/e -> B/d/e L">(merge<"P/d/e T -> N/d/e">(y), {{"L", in.size("L")}}));
    if (!layer.shared.empty()) x = x + moe::shared_expert(in, layer.shared[0]);
  }
  const auto logits = einsum_unreduced<"B/d/e L M, V M -> B/d/e L V">(moe::normalized(x, w.final_norm, config),
                                                                      all_gather<"V M">(w.unembed));
  return to_partial<over<"t">>(sum<"B/d/e L -> +d +e">(cross_entropy(logits, b.targets) * b.weights)) + router;
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
  const char* recompute = "seqax";
};
moe::Config config_of(const Variant& v) {
  moe::Config config;
  config.capacity = v.capacity;
  config.top_k = v.top_k;
  config.norm_topk_prob = !v.qwen;
  config.recompute = {v.recompute};
  config.balance = 0.3;
  config.router_z = 0.2;
  return config;
}
Result step(const MoeMesh& mesh, const Variant& v) {
  const auto [l, grads, metrics] =
      value_and_grad(mesh, moe::loss<>, random_model(mesh, v.qwen), batch(mesh), config_of(v), std::int64_t{1});
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
const Variant variants[] = {{}, {.qwen = true}, {.top_k = 1}, {.capacity = 4}, {.capacity = 8, .top_k = 1}};

TEST_CASE("moe: loss and every gradient are equal on every mesh", "[model]") {
  for (const Variant& variant : variants) {
    const Result expected = alone([&](const MoeMesh& mesh) { return step(mesh, variant); });
    const auto names = alone([&](const MoeMesh& mesh) { return leaf_names(random_model(mesh, variant.qwen)); });
    CHECK(expected.dropped == 0);
    CHECK(expected.load > 1.2);  // the experts are used unevenly
    for (const char* mesh : {"d=1,e=1,t=1", "d=1,e=2,t=1", "d=2,e=1,t=1", "d=1,e=1,t=2", "d=2,e=2,t=1", "d=1,e=4,t=1",
                             "d=1,e=2,t=2", "d=2,e=2,t=2"})
      on_mesh(mesh, [&](const DevicePtr& device) {
        const Result result = step(MoeMesh(device), variant);
        expect_close(result, expected, names);
        expect(std::abs(result.load - expected.load) < 1e-5 && result.dropped == 0, "balance");
      });
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
    for (const char* text : {"d=1,e=1,t=1", "d=1,e=2,t=2"})
      on_mesh(text, [&](const DevicePtr& device) {
        const MoeMesh mesh(device);
        const Result kept = step(mesh, {.capacity = capacity, .recompute = "none"});
        for (const char* policy : {"seqax", "dots", "attention", "everything", "argsort,all_gather"}) {
          const Result result = step(mesh, {.capacity = capacity, .recompute = policy});
          expect(result.loss == kept.loss, std::string(policy) + ": the loss");
          for (std::size_t i = 0; i < kept.gradients.size(); ++i)
            expect(result.gradients[i].data == kept.gradients[i].data, policy + (": gradient " + show(i)));
        }
      });
  SUCCEED();
}

// The loss of the last position of each row, by decoding the rows one by one: at once, and token by token.
TEST_CASE("moe: decoding gives the logits of the model, on every mesh", "[model]") {
  for (const char* text : {"d=1,e=1,t=1", "d=2,e=2,t=1", "d=1,e=2,t=2"})
    on_mesh(text, [](const DevicePtr& device) {
      const MoeMesh mesh(device);
      run::Trained<moe::Model, moe::Model> trained;
      trained.copies = random_model(mesh, true);
      auto rows = batch(mesh);
      moe::Config config;
      config.top_k = 2;
      const auto last = cast<f32>(equal(iota<"L">(mesh, 6), 5.0)) / 8.0;
      rows.weights = last + zeros<f32, "B/d/e L">(mesh, sizes);
      const auto cross_entropy = moe::loss(trained.copies, rows, config, 1).second.cross_entropy;
      const double expected = item(all_reduce<"+d +e +t -> ">(cross_entropy));
      const auto inputs = all_gather<"B/d/e L -> B L">(rows.inputs),
                 targets = all_gather<"B/d/e L -> B L">(rows.targets);
      config.capacity = 0.1;  // decoding drops nothing
      const auto decode = moe::decoder(mesh, trained, config, {{"H", 2}, {"D", 4}}, 6);
      double at_once = 0, one_by_one = 0;
      const auto loss = [](const std::vector<float>& logits, i32 target) {
        double total = 0;
        for (const float x : logits) total += std::exp(static_cast<double>(x));
        return (std::log(total) - static_cast<double>(logits[static_cast<std::size_t>(target)])) / 8;
      };
      for (std::size_t row = 0; row < 8; ++row) {
        const auto ids = inputs.span().subspan(row * 6, 6);
        const i32 target = targets.span()[row * 6 + 5];
        at_once += loss(decode(ids, 0), target);
        std::vector<float> logits;
        for (std::size_t i = 0; i < 6; ++i) logits = decode(ids.subspan(i, 1), static_cast<std::int64_t>(i));
        one_by_one += loss(logits, target);
      }
      expect(std::abs(at_once - expected) < 1e-4, show(at_once) + " instead of " + show(expected));
      expect(std::abs(one_by_one - expected) < 1e-4, show(one_by_one) + " instead of " + show(expected));
    });
  SUCCEED();
}

// With experts over e, a device keeps an e-th of them, and rows travel along e alone.
TEST_CASE("moe: rows travel along e", "[model]") {
  on_mesh("d=2,e=2,t=1", [](const DevicePtr& device) {
    const MoeMesh mesh(device);
    auto& state = detail::program_state(device);
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
  SUCCEED();
}

}  // namespace
