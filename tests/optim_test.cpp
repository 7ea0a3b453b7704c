// Schedules, the global norm and the optimizers.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "reference.hpp"
#include "shardlib/autodiff/value_and_grad.hpp"
#include "shardlib/compute/create.hpp"
#include "shardlib/compute/einsum.hpp"
#include "shardlib/compute/layout.hpp"
#include "shardlib/interop/shard_map.hpp"
#include "shardlib/ops/submesh.hpp"
#include "shardlib/optim/adafactor.hpp"
#include "shardlib/optim/global_norm.hpp"
#include "shardlib/optim/initialize.hpp"
#include "shardlib/optim/lr_schedule.hpp"
#include "shardlib/optim/muon.hpp"
#include "shardlib/optim/optimizers.hpp"
#include "shardlib/optim/reduce_gradients.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

struct Weights {
  Tensor<f32, "M/t/d"> gain;
  Tensor<f32, "A/d B/t"> w;
};

Weights random_weights(const Mesh<"d t">& mesh, std::uint64_t seed,
                       const Sizes& sizes = {{"M", 8}, {"A", 4}, {"B", 12}}) {
  return {random_normal<f32, "M/t/d">(mesh, sizes, {seed, 0}), random_normal<f32, "A/d B/t">(mesh, sizes, {seed, 1})};
}

/// What an optimizer does to a leaf, in f64: weights, moments, the gradient after clipping, whether the leaf decays,
/// and the step from 1.
struct Leaf {
  std::vector<double> w, mu, nu, g;
  Shape shape;
  bool decays;
  double step;
};
constexpr double rate = 0.01;
/// A rule that holds for every leaf.
constexpr auto every_leaf = [](std::string_view) { return true; };

/// Three steps on every mesh, of shards and in f32, against whole arrays in f64. Only `w` decays.
template <class O>
void check_steps(const O& optimizer, const std::function<void(Leaf&)>& reference, double tolerance = 2e-6,
                 const Sizes& sizes = {{"M", 8}, {"A", 4}, {"B", 12}}) {
  static_assert(Optimizer<O, Weights>);
  on_meshes({"d=1,t=1", "d=2,t=1", "d=1,t=2", "d=2,t=2"}, [&](const Mesh<"d t">& mesh) {
    const auto leaves = [](const Weights& w) {
      return std::array{assemble(*w.gain.value(), detail::parsed<"M/t/d">),
                        assemble(*w.w.value(), detail::parsed<"A/d B/t">)};
    };
    Weights w = random_weights(mesh, 1, sizes);
    auto moments = optimizer.init(w);
    std::array<Leaf, 2> expected;
    for (std::size_t k = 0; k < 2; ++k) {
      const Global first = leaves(w)[k];
      const std::vector<double> zeros(first.data.size());
      expected[k] = {first.data, zeros, zeros, {}, first.shape, k == 1, 0};
    }
    for (std::int64_t step = 0; step < 3; ++step) {
      const Weights g = random_weights(mesh, 10 + static_cast<std::uint64_t>(step), sizes);
      const auto grad = leaves(g);
      double squares = 0;
      for (const Global& x : grad)
        for (const double e : x.data) squares += e * e;
      const double norm = global_norm(mesh, g);
      expect(std::abs(norm - std::sqrt(squares)) < 1e-5 * norm, "global norm");
      const double scale = 0.5 / norm;
      optimizer.update(w, moments, g, rate, scale, step, [](std::string_view name) { return name == "w"; });
      const auto now = leaves(w);
      for (std::size_t k = 0; k < 2; ++k) {
        Leaf& leaf = expected[k];
        leaf.g = grad[k].data;
        for (double& e : leaf.g) e *= scale;
        leaf.step = static_cast<double>(step + 1);
        reference(leaf);
        for (std::size_t i = 0; i < leaf.w.size(); ++i)
          expect(std::abs(now[k].data[i] - leaf.w[i]) < tolerance,
                 "weight " + show(i) + " is " + show(now[k].data[i]) + " instead of " + show(leaf.w[i]));
      }
    }
  });
}

void adamw_step(Leaf& x) {
  for (std::size_t i = 0; i < x.w.size(); ++i) {
    x.mu[i] = 0.9 * x.mu[i] + 0.1 * x.g[i];
    x.nu[i] = 0.95 * x.nu[i] + 0.05 * x.g[i] * x.g[i];
    const double mean = x.mu[i] / (1 - std::pow(0.9, x.step)), square = x.nu[i] / (1 - std::pow(0.95, x.step));
    x.w[i] -= rate * (mean / (std::sqrt(square) + 1e-8) + (x.decays ? 0.1 : 0) * x.w[i]);
  }
}

TEST_CASE("AdamW against f64 on whole arrays", "[optim]") {
  check_steps(AdamW{.beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1}, adamw_step);
}

TEST_CASE("AdamW clips gradients of which f32 holds no square", "[optim]") {
  on_mesh("d=1,t=1", [](const Mesh<"d t">& mesh) {
    const auto after = [&](double size) {
      Weights w = random_weights(mesh, 1);
      const Weights g = random_weights(mesh, 2);
      auto moments = AdamW::init(w);
      AdamW().update(w, moments, Weights{g.gain * size, g.w * size}, rate, 1 / size, 0, every_leaf);
      return w;
    };
    const Weights large = after(0x1p100), small = after(1);
    expect(std::ranges::equal(large.w.span(), small.w.span()), "the scale undoes the size");
  });
}

TEST_CASE("SGD with momentum, and Nesterov's, against f64 on whole arrays", "[optim]") {
  for (const bool nesterov : {false, true})
    check_steps(SGD{.momentum = 0.8, .weight_decay = 0.2, .nesterov = nesterov}, [&](Leaf& x) {
      for (std::size_t i = 0; i < x.w.size(); ++i) {
        const double g = x.g[i] + (x.decays ? 0.2 : 0) * x.w[i];
        x.mu[i] = 0.8 * x.mu[i] + g;
        x.w[i] -= rate * (nesterov ? g + 0.8 * x.mu[i] : x.mu[i]);
      }
    });
}

TEST_CASE("Lion against f64 on whole arrays", "[optim]") {
  check_steps(Lion{.beta1 = 0.7, .beta2 = 0.95, .weight_decay = 0.5}, [](Leaf& x) {
    for (std::size_t i = 0; i < x.w.size(); ++i) {
      const double mean = 0.7 * x.mu[i] + 0.3 * x.g[i];
      x.mu[i] = 0.95 * x.mu[i] + 0.05 * x.g[i];
      x.w[i] -= rate * ((mean > 0 ? 1 : -1) + (x.decays ? 0.5 : 0) * x.w[i]);
    }
  });
}

struct HalfWeights {
  Tensor<bf16, "M/t/d"> gain;
  Tensor<bf16, "A/d B/t"> w;
};

HalfWeights rounded(const Weights& w) {
  return {cast<bf16>(w.gain), cast<bf16>(w.w)};
}
Weights widened(const HalfWeights& w) {
  return {cast<f32>(w.gain), cast<f32>(w.w)};
}

template <dtype D, Spec S>
void expect_same(const Tensor<D, S>& a, const Tensor<D, S>& b, const std::string& what) {
  expect(std::ranges::equal(a.span(), b.span()), what);
}

/// x y, or with `transposed` x times the transpose of y.
std::vector<double> product(const std::vector<double>& x, const std::vector<double>& y, std::size_t rows,
                            std::size_t cols, bool transposed) {
  const std::size_t inner = x.size() / rows;
  std::vector<double> out(rows * cols);
  for (std::size_t i = 0; i < rows; ++i)
    for (std::size_t j = 0; j < cols; ++j)
      for (std::size_t k = 0; k < inner; ++k)
        out[i * cols + j] += x[i * inner + k] * (transposed ? y[j * inner + k] : y[k * cols + j]);
  return out;
}

/// A step of a matrix, which decays.
void muon_step(Leaf& x) {
  const auto rows = static_cast<std::size_t>(x.shape[0]), cols = static_cast<std::size_t>(x.shape[1]);
  std::vector<double> y(x.g.size());
  double squares = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    x.mu[i] = 0.9 * x.mu[i] + x.g[i];
    y[i] = x.g[i] + 0.9 * x.mu[i];
    squares += y[i] * y[i];
  }
  for (double& e : y) e /= std::sqrt(squares);
  for (int iteration = 0; iteration < 5; ++iteration) {  // (a + b Y Y' + c (Y Y')^2) Y
    const auto gram = product(y, y, rows, rows, true);
    const auto cubic = product(gram, y, rows, cols, false), quintic = product(gram, cubic, rows, cols, false);
    for (std::size_t i = 0; i < y.size(); ++i) y[i] = 3.4445 * y[i] - 4.775 * cubic[i] + 2.0315 * quintic[i];
  }
  const double size = 0.2 * std::sqrt(static_cast<double>(std::max(rows, cols)));
  for (std::size_t i = 0; i < y.size(); ++i) x.w[i] -= rate * (size * y[i] + 0.1 * x.w[i]);
}

TEST_CASE("Muon against f64 on whole arrays: wide and tall matrices, AdamW for other leaves", "[optim]") {
  const auto step = [](Leaf& x) { x.shape.size() < 2 ? adamw_step(x) : muon_step(x); };
  check_steps(Muon{.momentum = 0.9}, step);
  check_steps(Muon{.momentum = 0.9}, step, 2e-6, {{"M", 8}, {"A", 14}, {"B", 4}});
  const auto none = [](std::string_view) { return false; };
  check_steps(Muon{.adamw = {}, .matrix = none}, adamw_step);
}

struct Stack {
  Tensor<f32, "X/d A/t B"> w;
};

TEST_CASE("Muon against f64 on stacks of matrices: tall, wide, padded; AdamW by default", "[optim]") {
  const auto whole = [](const Stack& s) { return assemble(*s.w.value(), detail::parsed<"X/d A/t B">); };
  for (const char* text : {"d=1,t=1", "d=2,t=2"})
    for (const Sizes& sizes : {Sizes{{"X", 4}, {"A", 6}, {"B", 4}}, Sizes{{"X", 4}, {"A", 4}, {"B", 6}},
                               Sizes{{"X", 3, 4}, {"A", 5, 6}, {"B", 4}}, Sizes{{"X", 3, 4}, {"A", 3, 4}, {"B", 5}}})
      for (const bool stacked : {true, false})
        on_mesh(text, [&](const Mesh<"d t">& mesh) {
          const auto random = [&](std::uint64_t seed) {
            return Stack{random_normal<f32, "X/d A/t B">(mesh, sizes, {seed, 0})};
          };
          Muon muon{.momentum = 0.9};
          if (stacked) muon.stack = every_leaf;
          Stack stack = random(1);
          auto moments = muon.init(stack);
          const Global first = whole(stack);
          const auto matrices = static_cast<std::size_t>(first.shape[0]), n = first.data.size() / matrices;
          const auto matrix = [&](const Global& x, std::size_t i) {
            const auto begin = x.data.begin() + static_cast<std::ptrdiff_t>(i * n);
            return std::vector<double>(begin, begin + static_cast<std::ptrdiff_t>(n));
          };
          std::vector<Leaf> expected;
          for (std::size_t i = 0; i < matrices; ++i)
            expected.push_back({matrix(first, i),
                                std::vector<double>(n),
                                std::vector<double>(n),
                                {},
                                {first.shape[1], first.shape[2]},
                                true,
                                0});
          for (std::int64_t step = 0; step < 2; ++step) {
            const Stack gradient = random(2 + static_cast<std::uint64_t>(step));
            muon.update(stack, moments, gradient, rate, 0.5, step, every_leaf);
            const Global now = whole(stack), grads = whole(gradient);
            for (std::size_t i = 0; i < matrices; ++i) {
              Leaf& leaf = expected[i];
              leaf.g = matrix(grads, i);
              for (double& e : leaf.g) e *= 0.5;
              leaf.step = static_cast<double>(step + 1);
              stacked ? muon_step(leaf) : adamw_step(leaf);
              for (std::size_t k = 0; k < n; ++k)
                expect(std::abs(now.data[i * n + k] - leaf.w[k]) < 2e-6, "matrix " + show(i) + ": weight " + show(k) +
                                                                             " is " + show(now.data[i * n + k]) +
                                                                             " instead of " + show(leaf.w[k]));
            }
          }
        });
}

TEST_CASE("Muon with a stacked dim: a matrix for each layer, and no matrix of the layers' vectors", "[optim]") {
  struct Layers {
    Tensor<f32, "Y A/d B/t"> w;
    Tensor<f32, "Y A/d"> bias;
    Tensor<f32, "A/d B/t"> other;
  };
  on_meshes({"d=1,t=1", "d=2,t=2"}, [](const Mesh<"d t">& mesh) {
    const auto random = [&](std::uint64_t seed) {
      const Sizes sizes{{"Y", 3}, {"A", 4}, {"B", 6}};
      return Layers{random_normal<f32, "Y A/d B/t">(mesh, sizes, {seed, 0}),
                    random_normal<f32, "Y A/d">(mesh, sizes, {seed, 1}),
                    random_normal<f32, "A/d B/t">(mesh, sizes, {seed, 2})};
    };
    const auto after = [&](const auto& optimizer) {
      Layers w = random(1);
      auto moments = optimizer.init(w);
      for (std::int64_t step = 0; step < 2; ++step)
        optimizer.update(w, moments, random(2), rate, 1.0, step, every_leaf);
      return w;
    };
    const auto same = [](const auto& a, const auto& b) { return std::ranges::equal(a.span(), b.span()); };
    const Layers adamw = after(AdamW());
    const Layers named = after(Muon{.adamw = {}, .stack = [](std::string_view name) { return name == "w"; }});
    const Layers layers = after(Muon{.adamw = {}, .stacked_dim = "Y"});
    expect(same(layers.w, named.w) && !same(layers.w, adamw.w), "matrices of layers");
    expect(same(layers.bias, adamw.bias) && !same(named.bias, adamw.bias), "vectors of layers");
    expect(same(layers.other, named.other) && !same(layers.other, adamw.other), "a matrix apart");
    const auto matrix = [](std::string_view name) { return name != "w"; };
    expect(same(after(Muon{.adamw = {}, .matrix = matrix, .stacked_dim = "Y"}).w, adamw.w), "`matrix` leaves some out");
    ERROR_IS("Muon: no leaf has the stacked_dim `Z` as its first dim; name the dim of scan_layers, or leave it out",
             after(Muon{.adamw = {}, .stacked_dim = "Z"}));
  });
}

TEST_CASE("global_norm: the tree is on the mesh that is given", "[optim]") {
  on_mesh("d=2,t=2", [](const DevicePtr& device) {
    const Mesh<"d t"> mesh(device);
    struct One {
      Tensor<f32, "M"> bias;
    };
    const auto part = submesh<"d">(mesh);
    const One of_part{ones<f32, "M">(part, {{"M", 4}})};
    expect(global_norm(part, of_part) == 2, "of a submesh");
    const std::string wrong = error_of([&] { static_cast<void>(global_norm(mesh, of_part)); });
    expect(wrong.starts_with("global_norm: the leaf `bias` is on another mesh than the one given, ") &&
               wrong.ends_with("; give the mesh of the tree, and for gradients of a pipeline write "
                               "`pipeline::global_norm(mesh, grads, counts)` with its StagedMesh"),
           wrong);
  });
}

TEST_CASE("Adafactor against f64 on whole arrays, with padding too", "[optim]") {
  const auto mean_square = [](const std::vector<double>& x) {
    double squares = 0;
    for (const double e : x) squares += e * e;
    return squares / static_cast<double>(x.size());
  };
  const auto check = [&](const Adafactor& o, const Sizes& sizes) {
    check_steps(
        o,
        [&](Leaf& x) {
          const bool matrix = x.shape.size() == 2;
          const std::size_t n = x.w.size(), rows = matrix ? static_cast<std::size_t>(x.shape[0]) : n, cols = n / rows;
          const double kept = 1 - std::pow(x.step, -o.decay_power);
          std::vector<double> row(rows), col(cols), change(n);
          for (std::size_t i = 0; i < n; ++i) {
            row[i / cols] += (x.g[i] * x.g[i] + o.epsilon) / static_cast<double>(cols);
            col[i % cols] += (x.g[i] * x.g[i] + o.epsilon) / static_cast<double>(rows);
          }
          double mean = 0;
          for (std::size_t r = 0; r < rows; ++r) {
            x.mu[r] = kept * x.mu[r] + (1 - kept) * row[r];
            mean += x.mu[r] / static_cast<double>(rows);
          }
          for (std::size_t c = 0; c < cols; ++c) x.nu[c] = kept * x.nu[c] + (1 - kept) * col[c];
          for (std::size_t i = 0; i < n; ++i)
            change[i] = x.g[i] / std::sqrt(x.mu[i / cols] * (matrix ? x.nu[i % cols] / mean : 1));
          const double down = std::max(1.0, std::sqrt(mean_square(change)) / o.clip);
          const double size = o.scale_parameter ? std::max(o.least_scale, std::sqrt(mean_square(x.w))) : 1;
          for (std::size_t i = 0; i < n; ++i)
            x.w[i] -= rate * (change[i] / down * size + (x.decays ? o.weight_decay : 0) * x.w[i]);
        },
        2e-6, sizes);
  };
  const Sizes even{{"M", 8}, {"A", 4}, {"B", 12}}, padded{{"M", 6, 8}, {"A", 3, 4}, {"B", 5, 8}};
  for (const Sizes& sizes : {even, padded}) {
    check(Adafactor{}, sizes);
    check(Adafactor{.clip = 0.25, .weight_decay = 0.1}, sizes);
    check(Adafactor{.decay_power = 0.5, .epsilon = 1e-3, .clip = 100, .scale_parameter = true}, sizes);
    check(Adafactor{.scale_parameter = true, .least_scale = 5}, sizes);
  }
}

TEST_CASE("Adafactor's moments of a matrix without columns are finite", "[optim]") {
  on_mesh("d=2,t=1", [](const Mesh<"d t">& mesh) {
    const Sizes sizes{{"M", 8}, {"A", 4}, {"B", 0}};
    Weights w = random_weights(mesh, 1, sizes);
    auto moments = Adafactor::init(w);
    Adafactor().update(w, moments, random_weights(mesh, 2, sizes), rate, 1.0, 0, every_leaf);
    for_each_leaf(
        [](std::string_view name, const auto& moment) {
          for (const f32 x : moment.span()) expect(std::isfinite(x), std::string(name) + " has " + show(x));
        },
        moments);
  });
}

struct Wide {
  Array<"layers", Tensor<f32, "A/d K/t D">> w;
  Tensor<f32, "A K/t"> replicated;
};
struct Merged {
  Array<"layers", Tensor<f32, "A/d E/t">> w;
  Tensor<f32, "A/d K/t"> replicated;
};

TEST_CASE("Adafactor takes all dims but the first together, and keeps a row and a column", "[optim]") {
  on_meshes({"d=1,t=1", "d=2,t=2", "d=4,t=1"}, [&](const Mesh<"d t">& mesh) {
    const Sizes sizes{{"A", 4}, {"K", 6}, {"D", 2}};
    const auto draw = [&](std::uint64_t seed) {
      return Wide{{random_normal<f32, "A/d K/t D">(mesh, sizes, {seed, 0}),
                   random_normal<f32, "A/d K/t D">(mesh, sizes, {seed, 1})},
                  random_normal<f32, "A K/t">(mesh, sizes, {seed, 2})};
    };
    const auto merged = [](const Wide& w) {
      return Merged{{merge<"K/t D -> E/t">(w.w[0]), merge<"K/t D -> E/t">(w.w[1])},
                    shard<"A K/t -> A/d K/t">(w.replicated)};
    };
    Wide w = draw(1);
    Merged m = merged(w);
    auto moments = Adafactor::init(w);
    auto of_merged = Adafactor::init(m);
    expect(leaf_names(moments) == std::vector<std::string>{"rows/w/0", "rows/w/1", "rows/replicated", "cols/w/0",
                                                           "cols/w/1", "cols/replicated"},
           "names");
    expect(parameter_count(moments) == 2 * (4 + 12) + 4 + 6, "a row and a column of each");
    for (std::int64_t step = 0; step < 2; ++step) {
      const Wide g = draw(10 + static_cast<std::uint64_t>(step));
      Adafactor().update(w, moments, g, rate, 1.0, step, every_leaf);
      Adafactor().update(m, of_merged, merged(g), rate, 1.0, step, every_leaf);
    }
    const Merged now = merged(w);
    for_each_leaf(
        [](std::string_view name, const auto& a, const auto& b) {
          double apart = 0;
          for (std::size_t i = 0; i < a.span().size(); ++i)
            apart = std::max(apart, std::abs(static_cast<double>(a.span()[i] - b.span()[i])));
          expect(apart < 1e-6, std::string(name) + " is apart by " + show(apart));
        },
        now, m);
  });
}

/// The mean square of the errors of a linear map, summed over devices.
Tensor<f32, "+d +t"> squared_error(const Weights& w, const Tensor<f32, "N A/d">& x, const Tensor<f32, "N B/t">& y) {
  const auto guess = all_reduce<over<"d">>(einsum_unreduced<"N A/d, A/d B/t -> N B/t +d">(x, w.w));
  return to_partial<over<"d">>(sum(square(guess - y))) * (1.0 / 64) + sum(square(w.gain));
}

/// The loss of a regression before and after some steps.
template <class O>
void check_regression(const char* name, const O& optimizer, double peak) {
  static constexpr std::int64_t steps = 80;
  const LrSchedule learning_rate{
      .kind = LrSchedule::Kind::linear, .peak = peak, .decay_steps = steps, .final_fraction = 0};
  on_mesh("d=2,t=1", [&](const Mesh<"d t">& mesh) {
    const Sizes sizes{{"N", 64}, {"M", 4}, {"A", 4}, {"B", 6}};
    const auto x = random_normal<f32, "N A/d">(mesh, sizes, {7, 0});
    const auto y =
        all_reduce<over<"d">>(einsum_unreduced<"N A/d, A/d B/t -> N B/t +d">(x, random_weights(mesh, 3, sizes).w));
    Weights w = random_weights(mesh, 1, sizes);
    auto moments = optimizer.init(w);
    // Copies in bf16 are those of the new weights, with every optimizer.
    HalfWeights copies = rounded(w);
    double first = 0, last = 0;
    for (std::int64_t step = 0; step < steps; ++step) {
      const auto [loss, grads] = value_and_grad(mesh, squared_error, w, x, y);
      last = item(all_reduce<"">(loss));
      if (step == 0) first = last;
      optimizer.update(
          w, moments, grads, learning_rate(step), 1.0, step, [](std::string_view) { return false; }, copies);
    }
    expect(last < 0.02 * first, std::string(name) + ": a loss of " + show(first) + " falls to " + show(last));
    expect_same(copies.w, cast<bf16>(w.w), "copies");
  });
}

TEST_CASE("a regression's loss falls with every optimizer", "[optim]") {
  check_regression("AdamW", AdamW{}, 0.1);
  check_regression("SGD", SGD{}, 0.02);
  check_regression("SGD", SGD{.nesterov = true}, 0.02);
  check_regression("Lion", Lion{}, 0.1);
  check_regression("Muon", Muon{}, 0.4);
  check_regression("Adafactor", Adafactor{}, 0.1);
}

TEST_CASE("patterns of leaf names", "[optim]") {
  for (const char* pattern : {"layers/3/b_up", "*", "layers/*", "*b_up", "*/b_*", "l*3*p", "layers/3/b_up*", "**up"}) {
    INFO(pattern);
    CHECK(leaf_matches(pattern, "layers/3/b_up"));
  }
  for (const char* pattern : {"", "b_up", "layers", "layers/*/w_*", "*b_u", "layers/3/b_up/*", "*3*3*"}) {
    INFO(pattern);
    CHECK(!leaf_matches(pattern, "layers/3/b_up"));
  }
  const LeafRules rules{{{"*", {.rate = 2}}, {"*/b_*", {.decay = 0}}}};
  CHECK(rules("embed").rate == 2);
  CHECK(rules("layers/3/b_up").rate == 1);  // the last pattern that fits
  CHECK(rules("layers/3/b_up").decay == 0);
  CHECK(LeafRules{}("embed").decay == 1);
}

struct GainLayer {
  Tensor<f32, "M"> gain;
};
struct Gains {
  Tensor<f32, "M"> embed;
  Array<"layers", GainLayer> layers;
};
TEST_CASE("a pattern that no leaf has is an error", "[optim]") {
  on_mesh("d=1,t=1", [](const DevicePtr& device) {
    const Mesh<"d t"> mesh(device);
    const auto x = ones<f32, "M">(mesh, {{"M", 4}});
    Gains w{x, {{x}, {x}}};
    const Gains grads = w;
    const auto sentence = [](const std::string& pattern) {
      return "LeafRules: '" + pattern +
             "' matches no leaf; write a name in which a * stands for any text, or leave the pattern out: the "
             "leaves are embed, layers/*/gain";
    };
    const LeafRules rules{{{"*/gain", {.decay = 0}}, {"gain", {.rate = 0}}}};
    SGD sgd;
    auto moments = SGD::init(w);
    expect_error<UsageError>([&] { sgd.update(w, moments, grads, 0.5, 1.0, 0, rules); }, sentence("gain"));
    expect_same(w.embed, grads.embed, "nothing is updated");
    Adafactor factored;
    auto rows = Adafactor::init(w);
    expect_error<UsageError>([&] { factored.update(w, rows, grads, 0.5, 1.0, 0, rules); }, sentence("gain"));
    expect_error<UsageError>([&] { update_average(w, grads, 0.5, rules); }, sentence("gain"));
    expect_error<UsageError>(
        [&] {
          static_cast<void>(global_norm(mesh, grads, LeafRules{{{"layers/2/*", {.rate = 0}}}}));
        },
        sentence("layers/2/*"));
    sgd.update(w, moments, grads, 0.5, 1.0, 0, LeafRules{{{"*/gain", {.rate = 0}}}});
    expect_same(w.layers[1].gain, grads.layers[1].gain, "a frozen leaf");
  });
  SUCCEED();
}
TEST_CASE("a rule without an effect, because later rules have all of its leaves, is an error", "[optim]") {
  on_mesh("d=1,t=1", [](const DevicePtr& device) {
    const Mesh<"d t"> mesh(device);
    const auto x = ones<f32, "M">(mesh, {{"M", 4}});
    Gains w{x, {{x}, {x}}};
    auto moments = SGD::init(w);
    const auto step = [&](const LeafRules& rules) { SGD().update(w, moments, zeros_like(w), 0.5, 1.0, 0, rules); };
    const auto sentence = [](const std::string& pattern, const std::string& later) {
      return "LeafRules: '" + pattern + "' has no effect: later rules, as that of '" + later +
             "', match each of its leaves, and the last rule of a leaf applies; write general patterns before special "
             "ones";
    };
    const LeafFactors still{.decay = 0}, slow{.rate = 0.5};
    ERROR_IS(sentence("embed", "*"), step({{{"embed", still}, {"*", slow}}}));
    ERROR_IS(sentence("*/gain", "layers/1/*"),
             step({{{"*/gain", still}, {"layers/0/*", slow}, {"layers/1/*", slow}}}));  // by two rules together
    ERROR_IS(sentence("embed", "embed"), global_norm(mesh, w, LeafRules{{{"embed", still}, {"embed", slow}}}));
    step({{{"*", slow}, {"embed", still}}});
    step({{{"*/gain", still}, {"layers/0/*", slow}}});  // of two leaves, one is its own
  });
  SUCCEED();
}

auto& first_moments(auto& moments) {
  if constexpr (requires { moments.mu; })
    return moments.mu;
  else
    return moments.rows;
}

template <class O>
void check_rules(const O& optimizer) {
  on_mesh("d=1,t=1", [&](const Mesh<"d t">& mesh) {
    const Weights first = random_weights(mesh, 1), g = random_weights(mesh, 2);
    const auto after = [&](double learning_rate, const auto& decays) {
      Weights w = first;
      auto moments = optimizer.init(w);
      optimizer.update(w, moments, g, learning_rate, 1.0, 0, decays);
      return w;
    };
    const Weights ruled = after(0.5, LeafRules{{{"*", {.decay = 0}}, {"w", {.rate = 0.25}}}});
    const LeafRules frozen{{{"w", {.rate = 0}}}};
    Weights still = first;
    auto moments = optimizer.init(still);
    optimizer.update(still, moments, g, 0.5, 1.0, 0, frozen);
    expect_same(still.w, first.w, "a frozen leaf");
    for_each_leaf(
        [](std::string_view name, const auto& moment) {
          expect(name != "w" || std::ranges::all_of(moment.span(), [](float x) { return x == 0; }), "its moments");
        },
        first_moments(moments));
    expect(global_norm(mesh, g, frozen) == global_norm(mesh, Weights{g.gain, zeros_like(g.w)}), "and its gradient");
    const Weights plain = after(0.5, [](std::string_view) { return false; });
    const Weights slow = after(0.125, every_leaf);
    expect_same(ruled.gain, plain.gain, "a leaf without decay");
    expect_same(ruled.w, slow.w, "a leaf at a quarter of the rate");
    expect(!std::ranges::equal(slow.gain.span(), plain.gain.span()), "the rules matter");
  });
}

TEST_CASE("every optimizer takes factors of a leaf's learning rate and decay", "[optim]") {
  check_rules(AdamW{});
  check_rules(SGD{.weight_decay = 0.1});
  check_rules(Lion{});
  check_rules(Muon{});
  check_rules(Adafactor{.weight_decay = 0.1});
}

TEST_CASE("AdamW takes gradients in bf16, and its copies are what a cast of the new weights is", "[optim]") {
  on_meshes({"d=1,t=1", "d=2,t=2"}, [&](const Mesh<"d t">& mesh) {
    const Sizes sizes{{"M", 1060}, {"A", 6}, {"B", 134}};  // shards of some vectors and a rest
    Weights w = random_weights(mesh, 1, sizes), mu = zeros_like(w), nu = zeros_like(w);
    Weights w32 = w, mu32 = mu, nu32 = nu, same = w;
    HalfWeights copies = rounded(w);
    const HalfWeights before = copies;
    const void* place = nullptr;
    for (std::int64_t step = 0; step < 4; ++step) {
      const HalfWeights g = rounded(random_weights(mesh, 10 + static_cast<std::uint64_t>(step), sizes));
      const Weights wide = widened(g);
      expect(global_norm(mesh, g) == global_norm(mesh, wide), "the norm is that of the numbers in f32");
      // Copies with gradients of either dtype, and either alone: the same bits.
      if (step == 1)
        AdamW().update(w, mu, nu, wide, 0.01, 0.5, step, every_leaf, copies);
      else
        AdamW().update(w, mu, nu, g, 0.01, 0.5, step, every_leaf, copies);
      if (step == 2)
        AdamW().update(w32, mu32, nu32, g, 0.01, 0.5, step, every_leaf);
      else
        AdamW().update(w32, mu32, nu32, wide, 0.01, 0.5, step, every_leaf, same);
      expect_same(w.w, w32.w, "weights");
      expect_same(mu.w, mu32.w, "means");
      expect_same(nu.gain, nu32.gain, "variances");
      expect_same(copies.w, cast<bf16>(w.w), "copies");
      expect_same(copies.gain, cast<bf16>(w.gain), "copies");
      expect(step == 2 || same.w.value() == w32.w.value(), "in f32 the copy is the weight");
      expect(step < 2 || copies.w.span().data() == place, "copies that nobody else has stay where they are");
      place = copies.w.span().data();
    }
    expect_same(before.w, cast<bf16>(random_weights(mesh, 1, sizes).w), "what somebody else has stays as it was");
  });
}

TEST_CASE("accumulate and update_average write in place what arithmetic gives", "[optim]") {
  on_meshes({"d=1,t=1", "d=2,t=2"}, [](const Mesh<"d t">& mesh) {
    const Weights first = random_weights(mesh, 1), g = random_weights(mesh, 2);
    const HalfWeights half = rounded(g);
    Weights sums = map_tree([](const auto& x) { return x * 1.0; }, first);
    const void* place = sums.w.span().data();
    accumulate(sums, g);
    accumulate(sums, half);
    expect(sums.w.span().data() == place, "in place");
    expect_same(sums.w, first.w + g.w + cast<f32>(half.w), "sums");
    expect_same(sums.gain, first.gain + g.gain + cast<f32>(half.gain), "sums");

    Weights average = first;
    update_average(average, g, 0.5, LeafRules{{{"gain", {.rate = 0}}}});
    expect_same(average.w, first.w * 0.5 + g.w * 0.5, "averages");
    expect_same(average.gain, first.gain, "the average of a frozen leaf");
  });
}

struct Named {
  Tensor<f32, "O P Q"> stack;
  Tensor<f32, "P Q"> matrix;
};
struct Numbered {
  Tensor<f32, "O 3 5"> stack;
  Tensor<f32, "3 5"> matrix;
};

TEST_CASE("Muon and Adafactor take dims that are numbers", "[optim]") {
  on_mesh("d=2,t=1", [](const Mesh<"d t">& mesh) {
    const Sizes sizes{{"O", 4}, {"P", 3}, {"Q", 5}};
    const auto named = [&](std::uint64_t seed) {
      return Named{random_normal<f32, "O P Q">(mesh, sizes, {seed, 0}),
                   random_normal<f32, "P Q">(mesh, sizes, {seed, 1})};
    };
    const auto numbered = [&](const Named& x) {
      const auto values = [](const auto& t) { return std::vector<float>(t.span().begin(), t.span().end()); };
      return Numbered{place<Tensor<f32, "O 3 5">>(mesh, HostArray<f32>({4, 3, 5}, values(x.stack))),
                      place<Tensor<f32, "3 5">>(mesh, HostArray<f32>({3, 5}, values(x.matrix)))};
    };
    const auto check = [&](const auto& optimizer) {
      Named w = named(1);
      Numbered n = numbered(w);
      auto moments = optimizer.init(w);
      auto of_numbers = optimizer.init(n);
      for (const std::int64_t step : {0, 1}) {
        const Named g = named(2 + static_cast<std::uint64_t>(step));
        optimizer.update(w, moments, g, rate, 1.0, step, every_leaf);
        optimizer.update(n, of_numbers, numbered(g), rate, 1.0, step, every_leaf);
      }
      expect(std::ranges::equal(w.stack.span(), n.stack.span()), "a stack");
      expect(std::ranges::equal(w.matrix.span(), n.matrix.span()), "a matrix");
    };
    check(Muon{.stack = every_leaf});
    check(Adafactor{});
  });
}

TEST_CASE("every optimizer takes bf16 gradients, and leaves what others hold as it was", "[optim]") {
  on_mesh("d=2,t=2", [](const Mesh<"d t">& mesh) {
    const HalfWeights g = rounded(random_weights(mesh, 2));
    const auto check = [&](const auto& optimizer) {
      Weights w = random_weights(mesh, 1), wide = random_weights(mesh, 1), same = wide;
      const Weights before = w;
      auto moments = optimizer.init(w);
      auto of_wide = optimizer.init(wide);
      const auto moments_before = moments;
      optimizer.update(w, moments, g, rate, 0.5, 0, every_leaf);
      optimizer.update(wide, of_wide, widened(g), rate, 0.5, 0, every_leaf, same);
      expect_same(w.w, wide.w, "weights");
      expect_same(w.gain, wide.gain, "weights");
      expect(same.w.value() == wide.w.value(), "in f32 the copy is the weight");
      expect_same(before.w, random_weights(mesh, 1).w, "what somebody else has stays as it was");
      for_each_leaf(
          [](std::string_view, const auto& moment) {
            expect(std::ranges::all_of(moment.span(), [](float x) { return x == 0; }), "their moments too");
          },
          moments_before);
    };
    check(AdamW{});
    check(SGD{});
    check(Lion{});
    check(Muon{});
    check(Adafactor{});
  });
}

TEST_CASE("updates in place and trees that are passed twice, or that the tape tracks", "[optim]") {
  on_mesh("d=1,t=2", [](const Mesh<"d t">& mesh) {
    Weights w = random_weights(mesh, 1), sums = w, mu = zeros_like(w);
    accumulate(sums, sums);
    expect_same(sums.w, w.w * 2.0, "a tree added to itself");
    update_average(sums, sums, 0.5);
    expect_same(sums.w, w.w * 2.0, "the average of a tree and itself");
    const char* const one_tree =
        "AdamW: the leaf `gain` is in two of the trees that it writes (weights, moments, copies): pass a tree of its "
        "own for each";
    Weights nu = zeros_like(w);
    expect_error<UsageError>([&] { AdamW().update(w, mu, mu, w, rate, 1.0, 0, every_leaf); }, one_tree);
    expect_error<UsageError>([&] { AdamW().update(w, mu, w, w, rate, 1.0, 0, every_leaf); }, one_tree);
    expect_error<UsageError>([&] { AdamW().update(w, mu, nu, w, rate, 1.0, 0, every_leaf, nu); }, one_tree);
    const std::string shared = "share the weight's memory; make them with `init` or `zeros_like`";
    Weights same = w;
    const auto before = w;
    expect_error<UsageError>([&] { AdamW().update(w, mu, same, w, rate, 1.0, 0, every_leaf); },
                             "AdamW: the moments of `gain` " + shared);
    Weights partly{mu.gain, w.w};
    SGD::Moments<Weights> velocity{partly};
    expect_error<UsageError>([&] { SGD().update(w, velocity, w, rate, 1.0, 0, every_leaf); },
                             "SGD: the moments of `w` " + shared);
    expect(w.w.value() == before.w.value(), "nothing is updated");
    nu = mu;  // moments that share memory are each written for themselves
    Weights again = w, other_mu = zeros_like(w), other_nu = zeros_like(w);
    AdamW().update(w, mu, nu, before, rate, 1.0, 0, every_leaf);
    AdamW().update(again, other_mu, other_nu, before, rate, 1.0, 0, every_leaf);
    expect_same(w.w, again.w, "weights");
    expect_same(nu.w, other_nu.w, "moments");
    const auto loss = [](const Weights& x) {
      Weights total = x;
      accumulate(total, x);
      return sum(total.w) + sum(total.gain);
    };
    const std::string error = error_of([&] { static_cast<void>(value_and_grad(mesh, loss, w)); });
    expect(
        error.starts_with("accumulate: an update in place has no derivative; take stop_gradient of the operand first"),
        error);
  });
}

struct Deep {
  Array<"layers", Tensor<f32, "M/d">> layers;
};
struct Nested {
  Array<"blocks", Deep> blocks;
  Tensor<f32, "M/d"> last;
};

TEST_CASE("trees with Arrays in Arrays keep their structure", "[optim]") {
  on_mesh("d=2,t=1", [](const Mesh<"d t">& mesh) {
    const auto leaf = [&](std::uint64_t seed) { return random_normal<f32, "M/d">(mesh, {{"M", 4}}, {seed, 0}); };
    const Nested tree{{Deep{{leaf(1), leaf(2)}}, Deep{}, Deep{{leaf(3)}}}, leaf(4)};
    const auto empty = same_structure<Nested>(tree);
    expect(empty.blocks.size() == 3 && empty.blocks[0].layers.size() == 2 && empty.blocks[1].layers.empty() &&
               empty.blocks[2].layers.size() == 1 && !empty.last,
           "sizes");
    Nested sums = zeros_like(tree);
    accumulate(sums, tree);
    expect_same(sums.blocks[2].layers[0], leaf(3), "a leaf of an inner Array");
    expect_same(sums.last, leaf(4), "the leaf after Arrays");
  });
}

template <class D = f32>
struct Dense {
  Tensor<D, "A/d B/t"> up;
};
template <class D = f32>
struct Experts {
  Tensor<D, "A/d"> router;
  Array<"experts", Tensor<D, "A/d B/t">> up;
};
template <class D = f32>
struct Mixed {
  Array<"layers", std::variant<Dense<D>, Experts<D>>> layers;
  std::optional<Tensor<D, "A/d">> bias, none;
};
struct Listed {
  Dense<> first;
  Experts<> second;
  Tensor<f32, "A/d"> bias;
};

Listed listed(const Mesh<"d t">& mesh, std::uint64_t seed) {
  const Sizes sizes{{"A", 4}, {"B", 6}};
  const auto matrix = [&] { return random_normal<f32, "A/d B/t">(mesh, sizes, {seed, 0}); };
  const auto vector = [&] { return random_normal<f32, "A/d">(mesh, sizes, {seed, 1}); };
  return {{matrix()}, {vector(), {matrix(), matrix()}}, vector()};
}
Mixed<> mixed(const Listed& x) {
  return {{x.first, x.second}, x.bias, std::nullopt};
}

template <class O>
void check_mixed(const std::string& name, const O& optimizer) {
  on_meshes({"d=1,t=1", "d=2,t=1", "d=2,t=2"}, [&](const Mesh<"d t">& mesh) {
    Listed w = listed(mesh, 1);
    Mixed<> m = mixed(w);
    auto moments = optimizer.init(w);
    auto of_mixed = optimizer.init(m);
    auto copies = cast_tree<Mixed<bf16>>(m);
    for (std::int64_t step = 0; step < 2; ++step) {
      const Listed g = listed(mesh, 10 + static_cast<std::uint64_t>(step));
      const LeafRules of_layers{{{"first/up", {.decay = 0}}, {"second/up/*", {.decay = 0}}, {"bias", {.rate = 0.5}}}};
      optimizer.update(w, moments, g, 0.1, 1.0, step, of_layers);
      optimizer.update(
          m, of_mixed, mixed(g), 0.1, 1.0, step,
          LeafRules{{{"layers/0/up", {.decay = 0}}, {"layers/1/up/*", {.decay = 0}}, {"bias", {.rate = 0.5}}}}, copies);
    }
    const auto same = [](const auto& a, const auto& b) {
      for_each_leaf([](std::string_view leaf, const auto& x, const auto& y) { expect_same(x, y, std::string(leaf)); },
                    a, b);
    };
    same(m, mixed(w));
    same(copies, cast_tree<Mixed<bf16>>(m));
    expect(global_norm(mesh, m) == global_norm(mesh, w), "the norm");
    Mixed<> other = m;
    other.bias.reset();
    expect_error(
        [&] { optimizer.update(m, of_mixed, other, 0.1, 1.0, 2, every_leaf); },
        name +
            ": trees of different structure: the std::optional `bias` has a value in the first tree and no value in "
            "another; build them from one configuration");
  });
}

TEST_CASE("every optimizer takes what a std::optional or std::variant holds", "[optim]") {
  check_mixed("AdamW", AdamW{});
  check_mixed("SGD", SGD{});
  check_mixed("Lion", Lion{});
  check_mixed("Muon", Muon{});
  check_mixed("Adafactor", Adafactor{});
}

TEST_CASE("an optimizer names what is missing or of another length", "[optim]") {
  on_mesh("d=2,t=1", [](const Mesh<"d t">& mesh) {
    const auto leaf = [&](std::uint64_t seed) { return random_normal<f32, "M/d">(mesh, {{"M", 4}}, {seed, 0}); };
    Deep w{{leaf(1), leaf(2)}};
    auto moments = AdamW::init(w);
    expect_error(
        [&] { AdamW().update(w, moments, Deep{{leaf(3)}}, rate, 1.0, 0, every_leaf); },
        "AdamW: trees of different structure: the Array `layers` has 2 entries in the first tree and 1 in another; "
        "build them from one configuration");
    expect_error(
        [&] {
          AdamW().update(w, moments, Deep{{leaf(3), {}}}, rate, 1.0, 0, every_leaf);
        },
        "the leaf `layers/1`: a tensor `f32[M/d]` was never given a value, or was moved from; make one with an op, as "
        "`zeros` or `place`, "
        "before it is used");
    const Deep grads{{leaf(3), leaf(4)}};
    expect_error<UsageError>([&] { AdamW().update(w, moments, grads, rate, 1.0, -1, every_leaf); },
                             "AdamW: step -1 is negative; steps count from 0");
    expect_error<UsageError>([&] { AdamW{.beta1 = 1.5}.update(w, moments, grads, rate, 1.0, 0, every_leaf); },
                             "AdamW: a moment's decay is 1.5; give a number of at least 0 and less than 1");
    auto mu = SGD::init(w);
    expect_error<UsageError>([&] { SGD().update(w, mu, grads, std::nan(""), 1.0, 0, every_leaf); },
                             "SGD: the learning rate is nan; give a finite number");
    expect_error<UsageError>([&] { SGD().update(w, mu, grads, -0.1, 1.0, 0, every_leaf); },
                             "SGD: the learning rate is -0.1, and an update with it would increase the loss; give a "
                             "number of at least 0, and to maximize, differentiate the negative value");
    expect_error<UsageError>([&] { SGD().update(w, mu, grads, rate, 1 / 0.0, 0, every_leaf); },
                             "SGD: the scale of the gradients is inf; give a finite number, and skip a step whose "
                             "gradients are not finite");
    Deep broken = grads;
    broken.layers[1] = broken.layers[1] * std::nan("");
    Deep huge = grads;
    huge.layers[1] = huge.layers[1] * 1e30;  // its square is infinite
    for (const Deep& bad : {broken, huge})
      expect_error<UsageError>(
          [&] { SGD().update(w, mu, bad, rate, clip_factor(global_norm(mesh, bad), 1.0), 0, every_leaf); },
          "SGD: the scale of the gradients is nan; give a finite number, and skip a step whose gradients are not "
          "finite");
    const int microbatches = 4;
    expect_error<UsageError>(
        [&] { SGD().update(w, mu, grads, rate, 1 / microbatches, 0, every_leaf); },
        "SGD: the scale of the gradients is 0, so the step would ignore them; a quotient of integers such as 1 / n is "
        "0: write `1.0 / n`, and skip a step whose gradients are not to count");
    expect(clip_factor(0.5, 1.0) == 1.0 && clip_factor(4.0, 1.0) == 0.25 && clip_factor(4.0, 0) == 1.0, "clip_factor");
    expect_error<UsageError>([&] { update_average(w, grads, 2.0); },
                             "update_average: the part that it keeps is in [0, 1]");
    AdamW().update(w, moments, grads, rate, 1.0, 0, every_leaf);  // nothing was lost
  });
}

/// `setting` is what require_setting rejects.
std::string setting_is(const std::string& setting, const char* value) {
  return setting + " is " + value + "; give a finite number of at least 0";
}

TEST_CASE("an optimizer rejects settings without a meaning, and takes their neighbors", "[optim]") {
  on_mesh("d=2,t=1", [](const Mesh<"d t">& mesh) {
    const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
    const Weights first = random_weights(mesh, 1), g = random_weights(mesh, 2);
    const auto ruled = [&](const auto& optimizer, double learning_rate, const auto& decays) {
      Weights w = first;
      auto moments = optimizer.init(w);
      optimizer.update(w, moments, g, learning_rate, 1.0, 0, decays);
      return w;
    };
    const auto step = [&](const auto& optimizer) { return ruled(optimizer, 0.5, every_leaf); };

    ERROR_IS(setting_is("AdamW: weight_decay", "-0.1"), step(AdamW{.weight_decay = -0.1}));
    ERROR_IS(setting_is("AdamW: weight_decay", "nan"), step(AdamW{.weight_decay = nan}));
    ERROR_IS(setting_is("AdamW: epsilon", "-1"), step(AdamW{.epsilon = -1}));
    ERROR_IS(setting_is("AdamW: epsilon", "nan"), step(AdamW{.epsilon = nan}));
    ERROR_IS(setting_is("SGD: weight_decay", "-0.1"), step(SGD{.weight_decay = -0.1}));
    ERROR_IS(setting_is("Lion: weight_decay", "inf"), step(Lion{.weight_decay = infinity}));
    ERROR_IS(setting_is("Muon: iterations", "-1"), step(Muon{.iterations = -1}));
    ERROR_IS(setting_is("Muon: adamw.epsilon", "-1"), step(Muon{.adamw = {.epsilon = -1}}));
    ERROR_IS(setting_is("Muon: adamw.weight_decay", "-0.1"), step(Muon{.adamw = {.weight_decay = -0.1}}));
    ERROR_IS(setting_is("Adafactor: decay_power", "nan"), step(Adafactor{.decay_power = nan}));
    ERROR_IS(setting_is("Adafactor: epsilon", "-1"), step(Adafactor{.epsilon = -1}));
    ERROR_IS(setting_is("Adafactor: weight_decay", "-0.1"), step(Adafactor{.weight_decay = -0.1}));
    ERROR_IS(setting_is("Adafactor: least_scale", "-1"), step(Adafactor{.least_scale = -1}));
    for (const double clip : {0.0, -1.0, nan})
      expect(error_of<UsageError>([&] { step(Adafactor{.clip = clip}); }).starts_with("Adafactor: clip is "), "clip");
    expect_same(step(Adafactor{.clip = infinity}).w, step(Adafactor{.clip = 1e6}).w, "no clip");

    const auto too_much = [](const std::string& optimizer, const char* product) {
      return optimizer + ": the learning rate times weight_decay of the leaf `gain` is " + product +
             ", so the step would change the sign of its weights; lower one of them, to a product of at most 1";
    };
    ERROR_IS(too_much("AdamW", "1.25"), step(AdamW{.weight_decay = 2.5}));
    ERROR_IS(too_much("SGD", "1.25"), step(SGD{.weight_decay = 2.5}));
    ERROR_IS(too_much("Lion", "1.25"), step(Lion{.weight_decay = 2.5}));
    ERROR_IS(too_much("Muon", "1.25"), step(Muon{.adamw = {.weight_decay = 2.5}}));
    ERROR_IS(too_much("Adafactor", "1.25"), step(Adafactor{.weight_decay = 2.5}));
    ERROR_IS(too_much("AdamW", "2"), ruled(AdamW{.weight_decay = 2}, 0.5, LeafRules{{{"gain", {.decay = 2}}}}));
    step(AdamW{.epsilon = 0, .weight_decay = 2});
    ruled(AdamW{.weight_decay = 3}, 0.5, LeafRules{{{"*", {.decay = 0.5}}}});
    ruled(AdamW{.weight_decay = 3}, 0.5, LeafRules{{{"*", {.rate = 0.5}}}});

    const LeafRules backwards{{{"w", {.rate = -1}}}}, growing{{{"w", {.decay = nan}}}};
    ERROR_IS(setting_is("Lion: the factor of the rate of the leaf `w`", "-1"), ruled(Lion{}, rate, backwards));
    ERROR_IS(setting_is("SGD: the factor of the decay of the leaf `w`", "nan"), ruled(SGD{}, rate, growing));

    ERROR_IS("clip_factor: the largest norm is -1; give a number of at least 0, which stands for no clipping",
             clip_factor(5, -1));
    ERROR_IS("clip_factor: the largest norm is nan; give a number of at least 0, which stands for no clipping",
             clip_factor(5, nan));
    expect(clip_factor(5, infinity) == 1, "no clipping");

    for (const auto& [deviation, text] : {std::pair{-0.1, "-0.1"}, std::pair{nan, "nan"}})
      expect_error<UsageError>(
          [&] {
            Weights w;
            const Normal normal{0, deviation};
            initialize(mesh, w, {{"M", 8}, {"A", 4}, {"B", 12}}, 1, [&](std::string_view) { return normal; });
          },
          setting_is("initialize: the deviation of the leaf `gain`", text));
  });
}

TEST_CASE("learning-rate schedules at their edges", "[optim]") {
  using Kind = LrSchedule::Kind;
  struct Row {
    std::int64_t step;
    double constant, linear, cosine, wsd;
  };
  // Ten steps of warmup, a peak of 2, and from it to 0.2 in the steps 10 to 50; of wsd in the steps 40 to 50.
  const double eighth = std::sqrt(0.5);                                                 // cosine of an eighth of a turn
  for (const Row& row : {Row{0, 0.2, 0.2, 0.2, 0.2},                                    // peak / warmup
                         Row{8, 1.8, 1.8, 1.8, 1.8},                                    //
                         Row{9, 2, 2, 2, 2}, Row{10, 2, 2, 2, 2},                       // the end of the warmup
                         Row{20, 2, 1.55, 0.2 + 0.9 * (1 + eighth), 2},                 // a quarter of the decay
                         Row{30, 2, 1.1, 1.1, 2},                                       //
                         Row{40, 2, 0.65, 0.2 + 0.9 * (1 - eighth), 2},                 //
                         Row{45, 2, 0.425, 0.2 + 0.9 * (1 - std::cos(M_PI / 8)), 1.1},  //
                         Row{50, 2, 0.2, 0.2, 0.2}, Row{51, 2, 0.2, 0.2, 0.2}, Row{1'000'000, 2, 0.2, 0.2, 0.2}}) {
    INFO(row.step);
    LrSchedule rate{.peak = 2, .warmup = 10, .decay_steps = 51, .decay_fraction = 0.2};
    for (const auto& [kind, expected] : {std::pair{Kind::constant, row.constant}, std::pair{Kind::linear, row.linear},
                                         std::pair{Kind::cosine, row.cosine}, std::pair{Kind::wsd, row.wsd}}) {
      rate.kind = kind;
      rate.warmup_from = LrSchedule::WarmupFrom::peak_share;
      CHECK(rate(row.step) == Approx(expected).epsilon(1e-14));
      // From 0 the peak is reached a step later, and what follows is the same.
      rate.warmup_from = LrSchedule::WarmupFrom::zero;
      CHECK(rate(row.step) == (row.step < 10 ? Approx(expected - 0.2).margin(1e-14) : Approx(expected).epsilon(1e-14)));
    }
  }
  for (const Kind kind : {Kind::constant, Kind::linear, Kind::cosine, Kind::wsd}) {
    // Without a warmup step 0 has the peak, and the one step of a run too, if nothing is to decay.
    CHECK(LrSchedule{.kind = kind, .peak = 3, .warmup_from = LrSchedule::WarmupFrom::zero, .decay_steps = 9}(0) == 3);
    CHECK(LrSchedule{.kind = kind, .peak = 3, .decay_steps = 1, .final_fraction = 1}(0) == 3);
    // A run that ends within its warmup.
    CHECK(LrSchedule{.kind = kind, .peak = 3, .warmup = 30, .decay_steps = 2}(1) == 0.2);
  }
  CHECK(error_of<UsageError>([] { static_cast<void>(LrSchedule{.peak = 3, .decay_steps = 9}(-1)); }) ==
        "LrSchedule: step -1 is negative; steps count from 0");
  CHECK(LrSchedule{.kind = Kind::constant, .peak = 3, .warmup = 2}(2) == 3);
  const auto error = [](const LrSchedule& of) { return error_of<UsageError>([&] { static_cast<void>(of(5)); }); };
  CHECK(error({.peak = -1, .decay_steps = 9}) == setting_is("LrSchedule: peak", "-1"));
  CHECK(error({.peak = std::nan(""), .decay_steps = 9}) == setting_is("LrSchedule: peak", "nan"));
  CHECK(error({.warmup = -5, .decay_steps = 9}) == setting_is("LrSchedule: warmup", "-5"));
  CHECK(error({.decay_steps = 9, .final_fraction = -1}) == setting_is("LrSchedule: final_fraction", "-1"));
  CHECK(error({.decay_steps = 9, .decay_fraction = std::nan("")}) == setting_is("LrSchedule: decay_fraction", "nan"));
  CHECK(LrSchedule{.peak = 0, .decay_steps = 9}(5) == 0);
  // At once, not after the warmup.
  CHECK(error_of<UsageError>([] { static_cast<void>(LrSchedule{.peak = 3, .warmup = 2}(0)); }) ==
        "LrSchedule: decay_steps is 0, so no step is left for the decay; give the number of steps of the training, or "
        "choose Kind::constant");
  // wsd's decay begins no earlier than the warmup's end.
  CHECK(LrSchedule{.kind = Kind::wsd, .warmup = 4, .decay_steps = 9, .final_fraction = 0, .decay_fraction = 1}(6) ==
        0.5);
  CHECK(LrSchedule{.kind = Kind::wsd, .decay_steps = 9, .final_fraction = 0, .decay_fraction = 0}(8) == 1);
  // A decay that rounds to no step takes one step.
  CHECK(LrSchedule{.kind = Kind::wsd, .decay_steps = 4, .final_fraction = 0, .decay_fraction = 0.1}(3) == 0);
}

struct Replicated {
  Tensor<f32, "M"> bias;
  Tensor<f32, "A/d B"> w;
};
struct Parallel {
  Replicated head;
  Array<"layers", Replicated> layers;
  Tensor<bf16, "M"> half;
};
using DataParallel = Mesh<"d t">;

Replicated replicated(const DataParallel& mesh, std::uint64_t seed) {
  const Sizes sizes{{"M", 8}, {"A", 4}, {"B", 6}};
  return {random_normal<f32, "M">(mesh, sizes, {seed, 0}), random_normal<f32, "A/d B">(mesh, sizes, {seed, 1})};
}

/// A loss to which each device of the mesh adds its own part of x.
Tensor<f32, "+d +t"> loss_of(const Parallel& w, const Tensor<f32, "X/d/t M">& x) {
  Tensor<f32, "+d +t"> total = sum(tanh(x * w.head.bias)) + sum(x * cast<f32>(w.half));
  for (const Replicated& layer : w.layers) {
    total += sum(square(x * layer.bias));
    total += to_partial<over<"t">>(sum(square(layer.w)));
  }
  return total + to_partial<over<"t">>(sum(w.head.w));
}

TEST_CASE("reduce_gradients: replicated weights under data parallelism, on every mesh", "[optim]") {
  std::vector<std::vector<double>> whole;  // on one device, the first mesh
  for (const std::string text : {"d=1,t=1", "d=2,t=1", "d=1,t=2", "d=2,t=2"}) {
    INFO(text);
    on_mesh(text, [&](const DataParallel& mesh) {
      const Parallel w{replicated(mesh, 1),
                       {replicated(mesh, 2), replicated(mesh, 3)},
                       cast<bf16>(random_normal<f32, "M">(mesh, {{"M", 8}}, {4, 0}))};
      const auto x = random_normal<f32, "X/d/t M">(mesh, {{"X", 12}, {"M", 8}}, {5, 0});
      const auto [loss, grads] = value_and_grad(mesh, loss_of, w, x);
      const auto reduced = reduce_gradients(mesh, grads);
      static_assert(std::is_same_v<std::remove_const_t<decltype(reduced)>, Parallel>);
      std::vector<std::vector<double>> found;
      for_each_leaf(
          [&]<class D, Spec S>(std::string_view, const Tensor<D, S>& g) {
            found.push_back(assemble(*g.value(), detail::parsed<S>).data);
          },
          reduced);
      if (text == "d=1,t=1" && mesh.device()->rank() == 0) whole = found;
      for (std::size_t i = 0; i < found.size() && i < whole.size(); ++i)
        for (std::size_t k = 0; k < found[i].size(); ++k)
          expect(std::abs(found[i][k] - whole[i][k]) <= (i == 6 ? 2e-2 : 1e-4) * (1 + std::abs(whole[i][k])),
                 "leaf " + show(i) + ": " + show(found[i][k]) + " instead of " + show(whole[i][k]));
      // Each element counts once in the norm, however many devices hold it.
      double squares = 0;
      for (const auto& leaf : found)
        for (const double g : leaf) squares += g * g;
      const double norm = global_norm(mesh, reduced);
      expect(std::abs(norm - std::sqrt(squares)) <= 1e-5 * norm,
             "norm " + show(norm) + ", " + show(std::sqrt(squares)));
      // A tree without a pending sum, or a tensor, by itself.
      const auto again = reduce_gradients(mesh, reduced.head);
      expect(again.bias.value() == reduced.head.bias.value(), "nothing to reduce");
      const auto one = [](const Tensor<f32, "M">& b, const Tensor<f32, "X/d/t M">& y) { return sum(y * b); };
      const auto [l, g] = value_and_grad(mesh, one, w.head.bias, x);
      const Tensor<f32, "M"> single = reduce_gradients(mesh, g);
      expect(single.size("M") == 8, "a tensor alone");
      // And the update takes them.
      Replicated p = w.head, mu = zeros_like(p), nu = zeros_like(p);
      AdamW().update(p, mu, nu, reduced.head, 1e-2, 1.0, 0, every_leaf);
      expect(p.bias.span()[0] != w.head.bias.span()[0], "an update");
    });
  }
}

}  // namespace
