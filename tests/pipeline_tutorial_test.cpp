// The transformer of JaxPP's tutorial: a block against plain loops, and the model in stages against the whole one.
#include <cmath>
#include <cstdint>
#include <shardlib/pipeline/execute.hpp>
#include <shardlib/shardlib.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "../examples/tutorial_stages.hpp"
#include "pipeline_model.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

constexpr int blocks = 8, parts = 8;
constexpr std::int64_t B = 2, L = 5, M = 8, H = 4, D = 3, F = 16;
const Sizes tutorial_sizes{{"B", B}, {"L", L}, {"M", M}, {"H", H}, {"D", D}, {"F", F}};

/// Weights of these blocks of the model, the same numbers whoever holds them.
tutorial::StageModel<f32> weights_of(const Mesh<"d t">& mesh, const std::vector<int>& numbers) {
  tutorial::StageModel<f32> model;
  for (const int number : numbers) {
    std::uint64_t stream = 100 * static_cast<std::uint64_t>(number);
    for_each_leaf(
        [&]<Spec S>(std::string_view name, Tensor<f32, S>& leaf) {
          leaf = random_normal<f32, S>(mesh, tutorial_sizes, {7, stream++}) * 0.3;
          if (name.ends_with("scale")) leaf = leaf + 1.0;
        },
        model.layers.emplace_back());
  }
  return model;
}
tutorial::Batch batch_of(const Mesh<"d t">& mesh, int microbatch) {
  const auto numbers = [&](std::uint64_t stream) {
    return random_normal<f32, "B/d L M">(mesh, tutorial_sizes, {8, stream});
  };
  return {numbers(static_cast<std::uint64_t>(microbatch)), numbers(static_cast<std::uint64_t>(100 + microbatch))};
}
std::vector<int> all_blocks() {
  std::vector<int> numbers;
  for (int i = 0; i < blocks; ++i) numbers.push_back(i);
  return numbers;
}

using Numbers = std::vector<double>;
Numbers host(const HostArray<f32>& array) {
  return {array.data.begin(), array.data.end()};
}

/// y[r][j] = sum over i of x[r][i] w[i][j] + b[j]
Numbers dense(const Numbers& x, const Numbers& w, const Numbers& b) {
  const std::size_t out = b.size(), in = w.size() / out;
  Numbers y(x.size() / in * out);
  for (std::size_t at = 0; at < y.size(); ++at) {
    y[at] = b[at % out];
    for (std::size_t i = 0; i < in; ++i) y[at] += x[at / out * in + i] * w[i * out + at % out];
  }
  return y;
}
Numbers normed(const Numbers& x, const Numbers& y, const Numbers& scale, const Numbers& bias) {
  Numbers z(x.size());
  for (std::size_t row = 0; row < x.size() / M; ++row) {
    double mean = 0, variance = 0;
    for (std::size_t i = row * M; i < (row + 1) * M; ++i) mean += (z[i] = x[i] + y[i]) / M;
    for (std::size_t i = row * M; i < (row + 1) * M; ++i) variance += (z[i] - mean) * (z[i] - mean) / M;
    for (std::size_t i = row * M; i < (row + 1) * M; ++i)
      z[i] = (z[i] - mean) / std::sqrt(variance + 1e-6) * scale[i % M] + bias[i % M];
  }
  return z;
}
/// Every query sees every key of its row of the batch.
Numbers attended(const Numbers& q, const Numbers& k, const Numbers& v) {
  Numbers y(q.size());
  const auto at = [](std::int64_t b, std::int64_t l, std::int64_t h, std::int64_t d) {
    return static_cast<std::size_t>(((b * L + l) * H + h) * D + d);
  };
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t h = 0; h < H; ++h)
      for (std::int64_t l = 0; l < L; ++l) {
        double total = 0;
        for (std::int64_t key = 0; key < L; ++key) {
          double product = 0;
          for (std::int64_t d = 0; d < D; ++d) product += q[at(b, l, h, d)] * k[at(b, key, h, d)];
          const double weight = std::exp(product / std::sqrt(static_cast<double>(D)));
          total += weight;
          for (std::int64_t d = 0; d < D; ++d) y[at(b, l, h, d)] += weight * v[at(b, key, h, d)];
        }
        for (std::int64_t d = 0; d < D; ++d) y[at(b, l, h, d)] /= total;
      }
  return y;
}

}  // namespace

TEST_CASE("the tutorial's block is that of plain loops", "[pipeline]") {
  on_mesh("d=2,t=2", [](const Mesh<"d t">& mesh) {
    const auto w = weights_of(mesh, {3}).layers[0];
    const auto input = batch_of(mesh, 0).inputs;
    const auto is = host(fetch(tutorial::block(input, w)));
    const auto of = [](const auto& tensor) { return host(fetch(tensor)); };
    const Numbers x = of(input);
    const Numbers heads =
        attended(dense(x, of(w.w_q), of(w.b_q)), dense(x, of(w.w_k), of(w.b_k)), dense(x, of(w.w_v), of(w.b_v)));
    const Numbers y = normed(x, dense(heads, of(w.w_o), of(w.b_o)), of(w.norm1.scale), of(w.norm1.bias));
    Numbers hidden = dense(y, of(w.w_up), of(w.b_up));
    for (double& z : hidden)
      z = 0.5 * z * (1 + std::tanh(std::sqrt(2 / 3.14159265358979324) * (z + 0.044715 * z * z * z)));
    const Numbers due = normed(y, dense(hidden, of(w.w_down), of(w.b_down)), of(w.norm2.scale), of(w.norm2.bias));
    for (std::size_t i = 0; i < due.size(); ++i)
      expect(std::abs(is[i] - due[i]) < 2e-5,
             "element " + show(i) + ": " + show(is[i]) + " instead of " + show(due[i]));
  });
}

TEST_CASE("pipeline: the tutorial's transformer has the loss and gradients of the whole one under every schedule",
          "[pipeline]") {
  for (const std::string mesh_text : {"p=1,d=1,t=1", "p=2,d=1,t=1", "p=4,d=1,t=1", "p=2,d=2,t=1", "p=2,d=1,t=2"}) {
    Host due;
    double due_loss = 0;
    on_threads(mesh_text.substr(mesh_text.find("d=")), [&](const DevicePtr& device) {
      const Mesh<"d t"> mesh(device);
      const auto model = weights_of(mesh, all_blocks());
      auto sum = zeros_like(model);
      double total = 0;
      for (int m = 0; m < parts; ++m) {
        const auto [inputs, targets] = batch_of(mesh, m);
        const auto whole = [](const tutorial::StageModel<f32>& w, tutorial::Hidden x, const tutorial::Hidden& y) {
          for (const auto& block : w.layers) x = tutorial::block(x, block);
          return tutorial::loss(x, y);
        };
        const auto [loss, gradients] = value_and_grad(mesh, whole, model, inputs, targets);
        total += static_cast<double>(item(all_reduce<"+d +t -> ">(loss)));
        sum = map_tree([](const auto& a, const auto& b) { return a + b; }, sum, gradients);
      }
      const auto names = leaf_names(sum);
      const auto values = fetch(sum);
      if (mesh.rank() != 0) return;
      for (std::size_t i = 0; i < names.size(); ++i) due.insert_or_assign(names[i], values[i]);
      due_loss = total;
    });
    for (const pipeline::Schedule& schedule : schedules(parse_mesh(mesh_text)[0].size))
      on_mesh(mesh_text, [&](const DevicePtr& device) {
        const std::string what = schedule.name() + " on " + mesh_text;
        const Staged mesh(device);
        const pipeline::LayerMap layer_map(schedule, blocks);
        const auto mine = layer_map.of_rank(mesh.rank());
        std::vector<tutorial::Batch> batches;
        for (int m = 0; m < parts; ++m) batches.push_back(batch_of(mesh.stage(), m));
        const auto compare = [&](const std::string& which, const Tensor<f32, "+d +p +t">& parts_of_loss,
                                 const tutorial::StageModel<f32>& gradients) {
          const auto loss = static_cast<double>(item(all_reduce<"+d +p +t -> ">(parts_of_loss)));
          expect(std::abs(loss - due_loss) < 1e-6 * due_loss,
                 which + ": loss " + show(loss) + ", due " + show(due_loss));
          std::size_t leaves = 0;
          for_each_leaf(
              [&](std::string_view name, const auto& leaf) {
                const std::string whole = gpt::name_in_model(std::string(name), mine);
                // The gradients of b_k are zero, as a key's bias shifts all logits of a query alike: noise.
                const auto gradient = fetch(leaf);
                if (whole.ends_with("b_k")) {
                  for (const f32 value : gradient.data) expect(std::abs(value) < 1e-5, which + ": " + whole);
                } else {
                  const double apart = distance(gradient, due.at(whole), whole);
                  expect(apart < 1e-4, which + ", " + whole + " differs by " + show(apart));
                }
                ++leaves;
              },
              gradients);
          expect(leaves == 16 * mine.size() && due.size() == 16 * blocks, which + ": all gradients");
        };
        const auto weights = weights_of(mesh.stage(), mine);
        const auto step = pipeline::value_and_grad(mesh, schedule, parts, tutorial::Stages<f32>{layer_map, batches},
                                                   weights, tutorial_sizes);
        compare(what, step.loss, step.gradients);
        const auto whole = gather_weights<tutorial::StageModel<f32, true>>(weights);
        const auto once = pipeline::value_and_grad(
            mesh, schedule, parts, tutorial::Stages<f32, true>{layer_map, batches}, whole, tutorial_sizes);
        compare(what + ", weights gathered once", once.loss,
                scatter_gradients<tutorial::StageModel<f32>>(once.gradients));
      });
  }
}

namespace {

// Cell 29 of the notebook, "Simple SPMD training with micro-batching", and what it calls: one mesh without stages,
// weights sharded over it, gradients summed over microbatches. The names are those of the notebook, and
// docs/pipeline-jaxpp.md sets both side by side.
struct TrainState {
  tutorial::StageModel<f32> params;
  AdamW::Moments<tutorial::StageModel<f32>> opt_state;
  std::int64_t step = 0;
};
constexpr int NUM_MB = 4, BATCH_SIZE = 8;

Sizes sizes_on(const Mesh<"d t">& mesh) {  // 2 rows of a microbatch on 4 devices: padded
  Sizes sizes = tutorial_sizes;
  sizes[0] = {"B", BATCH_SIZE / NUM_MB, round_up(BATCH_SIZE / NUM_MB, mesh.size("d"))};
  return sizes;
}
TrainState init_state(const Mesh<"d t">& mesh) {
  tutorial::StageModel<f32> params;
  params.layers.resize(blocks);
  initialize(mesh, params, tutorial_sizes, 0, [](std::string_view name) {
    if (name.ends_with("scale")) return Normal{1, 0};
    return Normal{0, name.find("/w_") != std::string_view::npos ? 0.3 : 0.0};
  });
  return {params, AdamW::init(params)};
}

auto loss_fn(const tutorial::StageModel<f32>& params, tutorial::Hidden x, const tutorial::Hidden& targets)
    -> Tensor<f32, "+d +t"> {
  for (const auto& block : params.layers) x = tutorial::block(x, block);
  return tutorial::loss(x, targets);
}
f32 train_step(const Mesh<"d t">& mesh, TrainState& state, const std::vector<tutorial::Batch>& microbatches) {
  auto loss_acc = to_partial<" -> +d +t">(zeros<f32, "">(mesh, {}));
  auto grads_acc = zeros_like(state.params);
  for (const auto& [x, targets] : microbatches) {
    const auto [loss, grads] = value_and_grad(mesh, loss_fn, state.params, x, targets);
    loss_acc = loss_acc + loss;
    grads_acc = map_tree([](const auto& sum, const auto& grad) { return sum + grad; }, grads_acc, grads);
  }
  const AdamW adamw{.beta2 = 0.999, .weight_decay = 1e-4};  // optax.adamw
  adamw.update(state.params, state.opt_state, grads_acc, 0.001, 1, state.step++, [](std::string_view) { return true; });
  return item(all_reduce<"+d +t -> ">(loss_acc));
}

}  // namespace

TEST_CASE("pipeline: the notebook's training without stages, cell 29", "[pipeline]") {
  for (const char* name : {"d=1,t=1", "d=4,t=1"})
    on_mesh(name, [&](const Mesh<"d t">& mesh) {
      const auto xs = ones<f32, "B/d L M">(mesh, sizes_on(mesh));
      const std::vector<tutorial::Batch> microbatches(NUM_MB, {xs, xs});
      TrainState state = init_state(mesh);
      f32 before = 0;
      for (int i = 0; i < 6; ++i) {
        const f32 loss = train_step(mesh, state, microbatches);
        // A LayerNorm's rows have mean 0 and variance 1: their mean square distance from ones is 2, in each microbatch.
        if (i == 0) expect(std::abs(loss - 8) < 1e-3F, std::string(name) + ": the first loss is " + show(loss));
        if (i > 0) expect(loss < before, std::string(name) + ": the loss rises to " + show(loss));
        before = loss;
      }
    });
}
