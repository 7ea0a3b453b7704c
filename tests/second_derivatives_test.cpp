// Second derivatives: hessian_vector_product and nested value_and_grad against differences of gradients, of each op;
// ops without them throw.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <set>
#include <shardlib/shardlib.hpp>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

const std::vector<std::string> meshes{"d=1,t=1", "d=2,t=1", "d=2,t=2", "d=2,t=4"};
using Grid = Mesh<"d t">;
using Loss = Tensor<f64, "+d +t">;

struct Weights {
  Tensor<f64, "A/d B/t"> a;
  Tensor<f64, "A/d C"> c;
  Tensor<f64, "B"> b;
};
/// One type, so that what differentiates all the losses below is compiled once.
using LossOf = std::function<Loss(const Weights&)>;

// Ops that have second derivatives,
constexpr std::string_view twice =
    "+ - * / abs clamp cos cross_entropy erf exp expm1 gelu log log1p map masked maximum minimum mod pow relu rsqrt "
    "sigmoid sin softplus sqrt square swish tanh where cast custom::record dropout einsum einsum_bias "
    "einsum_bias_gelu einsum_unreduced windows "
    "all_gather all_reduce all_to_all reduce_scatter wait shard shift to_partial index_unreduced scatter_add sort "
    "take_along top_k broadcast concat diagonal flip merge narrow pad rearrange rename roll rope split stack "
    "stack_shards transpose tril triu unstack unstack_shards cumsum grouped_einsum layer_norm log_softmax logsumexp "
    "max mean min ragged_all_to_all reinterpret rms_norm softmax sum var vector_norm";
// and ops that throw.
constexpr std::string_view once =
    "causal_attention conv_unreduced cummax cumprod einsum_scatter gathering linear_scan on_submeshes prod";

/// Positive, as some functions need it, and away from kinks.
Weights random_weights(const Grid& mesh, std::uint64_t seed, double mean = 1) {
  Weights w;
  initialize(mesh, w, {{"A", 3, 4}, {"B", 7, 8}, {"C", 5}}, seed, [mean](std::string_view) {
    return Normal{mean, 0.2};
  });
  return w;
}

/// The sum of all elements.
template <dtype D, Spec S>
Tensor<D, "+d +t"> total(const Tensor<D, S>& y) {
  const auto s = sum(y);
  using T = std::remove_const_t<decltype(s)>;
  if constexpr (T::spec == Spec("+d +t"))
    return s;
  else
    return to_partial<make_op<T::spec, "+d +t">>(s);
}
/// A function with a second derivative, also of what is linear in the weights.
template <Spec S>
Loss cubes(const Tensor<f64, S>& y) {
  return total(y * y * y);
}

using Gradient = gradient_t<Grid, Weights>;

/// The Euclidean norm of all elements.
double norm(const Grid& mesh, const Gradient& gradient) {
  double squares = 0;
  const Weights whole = reduce_gradients(mesh, gradient);
  for_each_leaf(
      [&](std::string_view, const auto& leaf) { squares += item(all_reduce<"+d +t -> ">(total(square(leaf)))); },
      whole);
  return std::sqrt(squares);
}

/// The product by differences alone: of two steps, so that the error falls with the fourth power.
template <class F>
Gradient by_differences(const Grid& mesh, const F& f, const Weights& w, const Weights& v) {
  const auto coarse = hessian_vector_product(mesh, 4e-4, f, w, v), fine = hessian_vector_product(mesh, 2e-4, f, w, v);
  return map_tree([](const auto& p, const auto& q) { return q * (4.0 / 3.0) - p * (1.0 / 3.0); }, coarse, fine);
}

class Ops {
 public:
  explicit Ops(const Grid& mesh) : w(random_weights(mesh, 1)), mesh_(mesh), v_(random_weights(mesh, 2, 0)) {}

  /// `names` of ops that `f` needs.
  void exact(const std::string& names, const LossOf& f) {
    std::istringstream words(names);
    for (std::string word; words >> word;) tried_.insert(word);
    const std::string error = error_of([&] { compare(names, f); });
    if (error != "no error") wrong += names + ": " + error + "\n";
  }
  void compare(const std::string& names, const LossOf& f) {
    const auto loss = allow_unused(f);
    const Gradient found = hessian_vector_product(mesh_, loss, w, v_), expected = by_differences(mesh_, loss, w, v_);
    const auto difference = map_tree([](const auto& p, const auto& q) { return p - q; }, found, expected);
    const double size = norm(mesh_, expected), error = norm(mesh_, difference);
    if (!(size > 1e-3)) wrong += names + ": the test's second derivative is zero\n";
    if (!(error <= 1e-8 * size)) wrong += names + ": the product is off by " + show(error / size) + "\n";
    for_each_leaf([&](std::string_view, const auto& leaf) { expect(!leaf.value()->slot, names + ": on the tape"); },
                  found);
  }
  /// The error names the op that `f` runs.
  void none(const std::string& name, const LossOf& f, std::string_view op = {}) {
    const std::string error =
        error_of([&] { static_cast<void>(hessian_vector_product(mesh_, allow_unused(f), w, v_)); });
    if (!error.starts_with(op.empty() ? name : op) || error.find("its VJP has no derivative") == std::string::npos)
      wrong += name + ": the error is " + error + "\n";
    // The gradient itself is as it was, and so is the next call.
    static_cast<void>(value_and_grad(mesh_, allow_unused(f), w));
    tried_.insert(name);
  }
  /// All ops of the lists above, and no others, have been tried.
  void check_lists() const {
    std::set<std::string> listed;
    std::istringstream words(std::string(twice) + " " + std::string(once));
    for (std::string word; words >> word;) {
      listed.insert(word);
      expect(tried_.contains(word), word + " is listed, but not tried");
    }
    for (const std::string& name : tried_) expect(listed.contains(name), name + " is tried, but not listed");
  }
  std::string wrong;
  const Weights w;

 private:
  std::set<std::string> tried_;
  Grid mesh_;
  const Weights v_;
};

#define ELEMENTWISE(f) ops.exact(#f, [](const Weights& w) { return cubes(f(w.a)); })

void elementwise(Ops& ops) {
  ops.exact("+ - *", [](const Weights& w) { return cubes((w.a + shard<"B -> B/t">(w.b)) * (2.0 - w.a) - 0.5); });
  ops.exact("/", [](const Weights& w) { return cubes(w.a / shard<"B -> B/t">(w.b) + 1.0 / w.a - w.a / 2.0); });
  ELEMENTWISE(exp);
  ELEMENTWISE(log);
  ELEMENTWISE(log1p);
  ELEMENTWISE(expm1);
  ELEMENTWISE(sin);
  ELEMENTWISE(cos);
  ELEMENTWISE(erf);
  ELEMENTWISE(tanh);
  ELEMENTWISE(sigmoid);
  ELEMENTWISE(softplus);
  ELEMENTWISE(sqrt);
  ELEMENTWISE(rsqrt);
  ELEMENTWISE(square);
  ELEMENTWISE(abs);
  ELEMENTWISE(relu);
  ELEMENTWISE(gelu);
  ELEMENTWISE(swish);
  ops.exact("pow", [](const Weights& w) {
    return cubes(pow(w.a, shard<"B -> B/t">(w.b)) + pow(w.a, 2.5) + pow(1.5, w.a) + pow(cos(w.a - w.a), 2.0) * w.a);
  });
  ops.exact("map", [&](const Weights& w) {  // where a first derivative is 0 and the second one is not
    return total(map([](auto x) { return pow(cos(x), 2.0); }, w.a - stop_gradient(ops.w.a))) +
           total(map([](auto x, auto y) { return pow(x, y); }, w.b, w.b - stop_gradient(ops.w.b)));
  });
  const auto far = cast<f64>(greater(ops.w.a, 1.0)) * 10.0;  // no element is close to a bound
  ops.exact("clamp maximum minimum", [far](const Weights& w) {
    return cubes(clamp(w.a + far, -5.0, 5.0) * w.a + maximum(w.a + far, 5.0) +
                 minimum(w.a + far, shard<"B -> B/t">(w.b) * 5.0));
  });
  ops.exact("mod", [](const Weights& w) { return cubes(mod(w.a, 0.7)); });
  ops.exact("where masked", [](const Weights& w) {
    const auto large = greater(stop_gradient(w.a), 1.0);
    return cubes(where(large, w.a, square(w.a)) + masked(large, w.a) + where(large, w.a, 3.0));
  });
  ops.exact("cast", [](const Weights& w) { return cubes(cast<f64>(w.a) * w.a); });
  ops.exact("map", [](const Weights& w) {
    return cubes(map([](auto x, auto y, auto z) { return where(x > 1.0, x * y * exp(z), x / (y + z)); }, w.a,
                     shard<"B -> B/t">(w.b), tanh(w.a)));
  });
  ops.exact("custom::record", [](const Weights& w) {
    const auto kernel = [](custom::Shard<f64> y, custom::Shard<const f64> x) {
      for (std::int64_t i = 0; i < y.size(); ++i) y.data[i] = x.data[i] * x.data[i];
    };
    using A = Tensor<f64, "A/d B/t">;
    const auto square_of = custom::record<"squared", A>(
        {{}, Site::current()}, kernel, custom::operands(w.a),
        custom::vjp(w.a, custom::save(w.a), [](const auto& ct, const auto& x) { return ct * x * 2.0; }));
    return cubes(square_of);
  });
  ops.exact("dropout", [](const Weights& w) { return cubes(dropout(w.a, 0.3, {7, 1})); });
}

void reductions(Ops& ops) {
  ops.exact("sum mean broadcast", [](const Weights& w) {
    const auto rows = all_reduce<"A/d +t -> A/d">(mean<"A/d B/t -> A/d +t">(w.a));
    return cubes(broadcast<"A/d -> A/d C">(rows, {{"C", 5}}) * w.c);
  });
  ops.exact("logsumexp", [](const Weights& w) { return cubes(logsumexp<"A/d C -> A/d">(w.c)); });
  ops.exact("var", [](const Weights& w) { return cubes(var<"A/d C -> A/d">(w.c)); });
  ops.exact("vector_norm", [](const Weights& w) { return cubes(vector_norm<"A/d C -> A/d">(w.c)); });
  ops.exact("cumsum", [](const Weights& w) { return cubes(cumsum<"C">(w.c)); });
  ops.exact("logsumexp", [](const Weights& w) { return cubes(logsumexp<"A/d B/t -> A/d", over<"t">>(w.a)); });
  ops.exact("log_softmax", [](const Weights& w) { return cubes(log_softmax<"B", over<"t">>(w.a)); });
  ops.exact("log_softmax", [](const Weights& w) { return cubes(log_softmax<"C">(w.c)); });
  // log softmax over a sharded dim, and a norm, in the ops that have second derivatives.
  ops.exact("log", [](const Weights& w) {
    const auto shifted = w.a - all_reduce_max<"A/d B/t -> A/d">(stop_gradient(w.a));
    const auto sums = all_reduce<"A/d +t -> A/d">(sum<"A/d B/t -> A/d +t">(exp(shifted)));
    return cubes(shifted - log(sums));
  });
  ops.exact("rsqrt", [](const Weights& w) { return cubes(w.c * rsqrt(mean<"A/d C -> A/d">(square(w.c)) + 1e-6)); });
  ops.exact("max", [](const Weights& w) { return cubes(max<"A/d C -> A/d">(w.c)); });
  ops.exact("min", [](const Weights& w) { return cubes(min<"A/d C -> A/d">(w.c)); });
  ops.none("prod", [](const Weights& w) { return cubes(prod<"A/d C -> A/d">(w.c)); });
  ops.none("cumprod", [](const Weights& w) { return cubes(cumprod<"C">(w.c)); });
  ops.none("cummax", [](const Weights& w) { return cubes(cummax<"C">(w.c)); });
  ops.none("linear_scan", [](const Weights& w) { return cubes(linear_scan<"C">(w.c, w.c)); });
  ops.exact("softmax", [](const Weights& w) { return cubes(softmax<"C">(w.c)); });
  ops.exact("softmax", [](const Weights& w) { return cubes(softmax<"B", over<"t">>(w.a)); });
  ops.exact("rms_norm", [](const Weights& w) { return cubes(rms_norm<"C">(w.c)); });
  ops.exact("layer_norm", [](const Weights& w) { return cubes(layer_norm<"C">(w.c)); });
  ops.exact("rms_norm", [](const Weights& w) { return cubes(rms_norm<"B">(w.b, w.b * w.b)); });
  ops.exact("layer_norm", [](const Weights& w) {
    const auto rows = all_gather<"A/d B/t -> A/d B">(w.a);
    return cubes(layer_norm<"B">(rows, w.b, w.b * w.b));
  });
}

void products(const Grid& mesh, Ops& ops) {
  const auto x = random_normal<f64, "N/d B/t">(mesh, {{"N", 6}, {"B", 7, 8}}, {7, 1});
  ops.exact("einsum_unreduced einsum", [x](const Weights& w) {
    const auto y = einsum<"A/d B/t, B/t -> A/d">(w.a, shard<"B -> B/t">(w.b));
    const auto wide = einsum<"N/d B/t, B/t C -> N/d C">(
        x, all_reduce<"B/t C +d -> B/t C">(einsum_unreduced<"A/d B/t, A/d C -> B/t C +d">(w.a, w.c)));
    return cubes(y) + cubes(wide);
  });
  ops.exact("einsum_unreduced", [](const Weights& w) {  // sums of one operand alone, one operand, a batch, three
    const auto all = all_reduce<"C +d +t -> C">(einsum_unreduced<"A/d B/t, A/d C -> C +d +t">(w.a, w.c));
    const auto only = all_reduce<"A/d +t -> A/d">(einsum_unreduced<"A/d B/t, A/d C -> A/d +t">(w.a, w.c));
    const auto one = einsum_unreduced<"A/d B/t -> B/t A/d">(w.a);
    const auto three = all_reduce<"A/d +t -> A/d">(
        einsum_unreduced<"A/d B/t, A/d C, B/t -> A/d +t">(w.a, w.c, shard<"B -> B/t">(w.b)));
    return cubes(all) + cubes(only) + cubes(one) + cubes(three);
  });
  const auto with_bias = [](const Weights& w, const auto& f) {
    const auto rows = all_reduce<"C B/t +d -> C B/t">(einsum_unreduced<"A/d C, A/d B/t -> C B/t +d">(w.c, w.a)) * 0.05;
    return cubes(f(w.c, rows, shard<"B -> B/t">(w.b)));
  };
  ops.exact("einsum_bias", [with_bias](const Weights& w) {
    return with_bias(
        w, [](const auto& x, const auto& y, const auto& b) { return einsum_bias<"A/d C, C B/t -> A/d B/t">(x, y, b); });
  });
  ops.exact("einsum_bias_gelu", [with_bias](const Weights& w) {
    return with_bias(w, [](const auto& x, const auto& y, const auto& b) {
      return einsum_bias_gelu<"A/d C, C B/t -> A/d B/t">(x, y, b);
    });
  });
  ops.exact("windows", [](const Weights& w) {
    return cubes(windows<"C, K -> N">(w.c, {{"K", 2}}, {.stride = 2, .before = 1}));
  });
  ops.none("causal_attention", [](const Weights& w) {
    const auto q = broadcast<"A/d C -> A/d L Q K C">(w.c, {{"L", 2}, {"Q", 1}, {"K", 2}});
    const auto k = broadcast<"A/d C -> A/d L K C">(w.c, {{"L", 2}, {"K", 2}});
    return cubes(causal_attention<"L", "C">(q, k, k));
  });
  ops.none("conv_unreduced", [](const Weights& w) {
    return cubes(conv_unreduced<"A/d C, K -> A/d C", "C, K -> C">(w.c, rename<"B -> K">(w.b), {.before = 6}));
  });
  ops.none("einsum_scatter", [](const Weights& w) {
    return cubes(einsum_scatter<"A/d B/t, B/t R -> A/d R/t">(
        w.a, broadcast<"B/t -> B/t R">(shard<"B -> B/t">(w.b), {{"R", 8}})));
  });
  ops.none(
      "gathering",
      [](const Weights& w) {
        return cubes(einsum_unreduced<"A/d B, N/t B -> A/d N/t">(gathering<"A/d B/t -> A/d B">(w.a),
                                                                 broadcast<"B -> N/t B">(w.b, {{"N", 8}})));
      },
      "einsum_unreduced");
}

/// A whole dim that each mesh divides.
Tensor<f64, "A K"> four_columns(const Weights& w) {
  return narrow<"C -> K">(all_gather<"A/d C -> A C">(w.c), 0, 4);
}

void placements(Ops& ops) {
  ops.exact("all_gather", [](const Weights& w) { return cubes(all_gather<"A/d B/t -> A B/t">(w.a) * 0.5); });
  ops.exact("reduce_scatter all_reduce", [](const Weights& w) {
    const auto by_row = sum<"A/d B/t -> B/t +d">(w.a);
    return cubes(all_reduce<"B/t +d -> B/t">(by_row)) + cubes(reduce_scatter<"B/t +d -> B/t/d">(by_row));
  });
  ops.exact("wait", [](const Weights& w) {
    const auto whole = wait(all_gather_start<"A/d B/t -> A B">(w.a));
    const auto row = wait(reduce_scatter_start<"B/t +d -> B/t/d">(sum<"A/d B/t -> B/t +d">(w.a)));
    return cubes(whole * 0.5) + cubes(row);
  });
  ops.exact("all_to_all",
            [](const Weights& w) { return cubes(all_to_all<"A/d B -> A B/d">(all_gather<"A/d B/t -> A/d B">(w.a))); });
  ops.exact("shift", [](const Weights& w) {
    const auto rows = four_columns(w);
    return cubes(shift<over<"t">>(shard<"A K -> A K/t">(rows), 1) * shard<"A K -> A K/t">(square(rows)));
  });
  // Each device counts a row for the group of its own number.
  const auto counts = [](const Grid& mesh) {
    return one_hot<"X", i32>(iota<"P/t">(mesh, mesh.size("t")), mesh.size("t"));
  };
  ops.exact("ragged_all_to_all", [counts](const Weights& w) {
    const auto rows = shard<"K A -> K/t A">(transpose(four_columns(w)));
    const auto sent = counts(Grid(w.a.device()));
    return cubes(ragged_all_to_all<"K/t A -> S/t A">(rows, sent, all_to_all<"P/t X -> P X/t">(sent), {{"S", 4}}));
  });
  ops.exact("grouped_einsum", [counts](const Weights& w) {
    const Grid mesh(w.a.device());
    const auto rows = shard<"K A -> K/t A">(transpose(four_columns(w)));
    const auto weights = broadcast<"A C -> X A C">(all_gather<"A/d C -> A C">(w.c), {{"X", mesh.size("t")}});
    return cubes(grouped_einsum<"K/t A, X A C -> K/t C">(rows, weights, counts(mesh)));
  });
  ops.none("on_submeshes", [](const Weights& w) {
    const auto twice_of = [](const Mesh<"d">&, const auto& x) { return x * 2.0; };
    return cubes(all_reduce<"A/d C +t -> A/d C">(on_submeshes<"+t">(Grid(w.a.device()), twice_of, w.c)));
  });
  ops.exact("reinterpret", [](const Weights& w) {
    const auto flat = reinterpret<"d t -> e">(Grid(w.a.device()));
    const auto there = reinterpret<"d t -> e">(all_gather<"A/d C -> A C">(w.c), flat);
    return cubes(reinterpret<"e -> d t">(there, Grid(w.a.device())));
  });
  ops.exact("shard to_partial", [](const Weights& w) {
    return cubes(shard<"B -> B/t">(square(w.b))) + to_partial<" -> +d +t">(square(sum(w.b)));
  });
}

void indices(const Grid& mesh, Ops& ops) {
  const auto ids = place<Tensor<i32, "L/d">>(mesh, HostArray<i32>({4}, {2, 0, 2, 1}), {});
  ops.exact("index_unreduced", [ids](const Weights& w) {
    const auto rows = index_unreduced<"[A] C, L/d -> L/d C">(all_gather<"A/d C -> A C">(w.c), ids);
    return cubes(rows) +
           cubes(all_reduce<"L/d +t -> L/d">(index_unreduced<"[B/t], L/d -> L/d +t">(shard<"B -> B/t">(w.b), ids)));
  });
  ops.exact("scatter_add", [ids](const Weights& w) {
    const auto rows = index_unreduced<"[A] C, L/d -> L/d C">(all_gather<"A/d C -> A C">(w.c), ids);
    return cubes(all_reduce<"V C +d -> V C">(scatter_add<"L/d C, L/d -> [V] C +d">(square(rows), ids, {{"V", 4}})));
  });
  ops.exact("sort top_k take_along", [](const Weights& w) {
    return cubes(sort<"C">(w.c) * w.c) + cubes(top_k<"C", "K">(w.c, 2).values) +
           cubes(take_along<"C">(w.c, argsort<"C">(stop_gradient(w.c), true)) * w.c);
  });
  const auto targets = place<Tensor<i32, "A/d">>(mesh, HostArray<i32>({3}, {6, 0, 3}), {{"A", 3, 4}});
  ops.exact("cross_entropy", [targets](const Weights& w) {
    return cubes(all_reduce<"A/d +t -> A/d">(cross_entropy(w.a * 3.0, targets))) +
           cubes(cross_entropy(w.c, cast<i32>(cast<f64>(targets) * 0.5)));
  });
  const auto x = random_normal<f64, "A/d D">(mesh, {{"A", 3, 4}, {"D", 2}}, {7, 5});
  ops.exact("cross_entropy", [x, targets](const Weights& w) {
    const auto table = all_reduce<"B/t D +d -> B/t D">(einsum_unreduced<"A/d B/t, A/d D -> B/t D +d">(w.a, x));
    return total(all_reduce<"A/d +t -> A/d">(linear_cross_entropy<"A/d D, B/t D -> A/d B/t">(x, table, targets)));
  });
}

void layouts(Ops& ops) {
  ops.exact("rename rearrange transpose", [](const Weights& w) {
    return cubes(rearrange<"A/d K -> K A/d">(rename<"C -> K">(w.c)) * transpose(rename<"C -> K">(w.c)));
  });
  ops.exact("merge split", [](const Weights& w) {
    const auto both = merge<"A/d C -> E/d">(w.c);
    return cubes(both * both) + cubes(split<"E/d -> F/d C">(both, {{"C", 5}}));
  });
  ops.exact("concat narrow pad", [](const Weights& w) {
    const auto k = narrow<"C -> K">(w.c, 1, 3);
    return cubes(concat<"C, K -> E">(w.c, square(k))) + cubes(pad<"C -> E2">(w.c, 2, 1)) +
           cubes(pad<"K -> K2">(k, 1, 0, 2.0));
  });
  ops.exact("flip roll tril triu diagonal", [](const Weights& w) {
    const auto y = flip<"C">(w.c) * roll<"C">(w.c, 2);
    const auto square_of = all_gather<"A/d C -> A C">(w.c);
    return cubes(y) + cubes(tril<"A", "C">(square_of)) + cubes(triu<"A", "C">(square_of)) +
           cubes(diagonal<"A", "C">(square_of));
  });
  ops.exact("rope", [](const Weights& w) {
    return cubes(rope<"C", "D">(broadcast<"A/d C -> A/d C D">(w.c, {{"D", 4}})));
  });
  ops.exact("stack", [](const Weights& w) { return cubes(stack<"L">(w.c, square(w.c))); });
  ops.exact("unstack", [](const Weights& w) {
    const auto parts = unstack<"C">(transpose(w.c));
    return cubes(parts[0] * parts[2]) + cubes(parts[3]);
  });
  ops.exact("stack unstack", [](const Weights& w) {  // along a padded dim
    const auto step = [](const Tensor<f64, "B/t">& h, const Tensor<f64, "B/t">& row) {
      const auto next = h * row;
      return std::pair(next, next + row);
    };
    const auto rows = all_gather<"A/d B/t -> A B/t">(w.a);
    const auto [last, seen] = scan<"A">(step, shard<"B -> B/t">(w.b), rows);
    return cubes(last) + cubes(seen * rows);
  });
  ops.exact("stack_shards unstack_shards", [](const Weights& w) {
    const auto columns = shard<"A K -> A K/t">(four_columns(w));
    const auto shards = stack_shards<"A K/t -> P/t A W">(columns);
    return cubes(shards * exp(shards)) + cubes(unstack_shards<"P/t A W -> A K/t">(square(shards)) * columns);
  });
}

TEST_CASE("second derivatives of each op, or an error", "[grad]") {
  on_meshes(meshes, [](const Grid& mesh) {
    Ops ops(mesh);
    elementwise(ops);
    reductions(ops);
    products(mesh, ops);
    placements(ops);
    indices(mesh, ops);
    layouts(ops);
    expect(ops.wrong.empty(), ops.wrong);
    ops.check_lists();
  });
}

/// Both trees have the same bits.
template <class Tree>
void expect_same(const Tree& a, const Tree& b) {
  for_each_leaf(
      [](std::string_view, const auto& x, const auto& y) {
        expect_equal(std::vector<f64>(x.span().begin(), x.span().end()),
                     std::vector<f64>(y.span().begin(), y.span().end()));
      },
      a, b);
}
TEST_CASE("the spec of a cotangent outlives the text that it comes from", "[grad]") {
  std::string text = "Rows/d Columns +t";
  const TensorSpec& spec = detail::lasting(TensorSpec(text));
  text.assign(text.size(), '?');
  CHECK(to_string(spec).view() == "Rows/d Columns +t");
  CHECK(&detail::lasting("Rows/d Columns +t") == &spec);
}

TEST_CASE("value_and_grad of a function that calls it: a gradient penalty", "[grad]") {
  on_meshes(meshes, [](const Grid& mesh) {
    const Weights w = random_weights(mesh, 1);
    const auto inner = [](const Weights& q) -> Loss {
      const auto hidden = tanh(einsum<"A/d B/t, B/t -> A/d">(q.a, shard<"B -> B/t">(q.b)));
      return cubes(einsum_unreduced<"A/d, A/d C -> A/d C">(hidden, q.c));
    };
    // The loss, its gradient, and what is made of both.
    const auto penalty = [&](const Weights& p) -> Loss {
      const auto [loss, grads] = value_and_grad(mesh, inner, p);
      const Weights whole = reduce_gradients(mesh, grads);
      return loss + (total(square(whole.a)) + total(square(whole.b)) + total(square(whole.c))) * 0.1;
    };
    expect(check_gradients(mesh, GradientCheck{.elements = 3}, penalty, w) == 9, "each leaf");
    // By hand: the gradient of sum(g^2), where g = 3 a^2, is 36 a^3.
    const auto squares = [&](const Tensor<f64, "A/d B/t">& a) -> Loss {
      const auto of = [](const Tensor<f64, "A/d B/t">& x) -> Loss { return sum(x * x * x); };
      return sum(square(value_and_grad(mesh, of, a).second));
    };
    const auto found = value_and_grad(mesh, squares, w.a).second, expected = w.a * w.a * w.a * 36.0;
    const auto size = [](const auto& x) { return std::sqrt(item(all_reduce<"+d +t -> ">(sum(square(x))))); };
    expect(size(found - expected) <= 1e-14 * size(expected), "36 a^3");
    expect(!found.value()->slot, "on the tape");
    // Tensors of the outer function as an argument, captured, and behind ops; the inner function returns more.
    const auto rest = [&](const Weights& p) -> Loss {
      const auto with = [&](const Tensor<f64, "A/d C">& c, const Tensor<f64, "A/d B/t">& a) {
        const auto y = einsum_unreduced<"A/d C, B C -> A/d B">(c * p.c, broadcast<"B -> B C">(p.b, {{"C", 5}}));
        return std::pair(cubes(shard<"A/d B -> A/d B/t">(y) * a), y);
      };
      const auto [loss, grad, y] = value_and_grad(mesh, with, tanh(p.c), square(p.a));
      return loss * 0.5 + cubes(y) * 0.01 + cubes(all_reduce<"A/d C +t -> A/d C">(grad)) * 0.01;
    };
    expect(check_gradients(mesh, GradientCheck{.elements = 3}, rest, w) == 9, "of all that it uses");
    // A gradient that is not differentiated costs what it did.
    const auto constant = [&](const Tensor<f64, "A/d B/t">& a) -> Loss {
      return sum(a * stop_gradient(value_and_grad(mesh, squares, stop_gradient(a)).second));
    };
    expect_same(value_and_grad(mesh, constant, w.a).second, found);
  });
}

/// The N-th derivative of each element of f(x).
using Block = Tensor<f64, "A/d B/t">;
template <int N>
Block nth_gradient(const Grid& mesh, const std::function<Block(const Block&)>& f, const Block& x) {
  const auto loss = [&](const Block& y) -> Loss {
    if constexpr (N == 1)
      return sum(f(y));
    else
      return sum(nth_gradient<N - 1>(mesh, f, y));
  };
  return value_and_grad(mesh, loss, x).second;
}
TEST_CASE("second derivatives of recomputed and prefetched functions, and higher ones", "[grad]") {
  on_meshes(meshes, [](const Grid& mesh) {
    const Weights w = random_weights(mesh, 1), v = random_weights(mesh, 2, 0);
    const auto layer = [](const Tensor<f64, "A/d C">& c, const Tensor<f64, "A/d B/t">& a) {
      return einsum<"A/d C, A/d B/t -> A/d C">(tanh(c), a) * 0.5;
    };
    const auto plain = allow_unused([&](const Weights& p) { return cubes(layer(layer(p.c, p.a), p.a)); });
    const auto recomputed = allow_unused([&](const Weights& p) {
      const auto again = explicit_activation_checkpointing(layer);
      return cubes(again(again(p.c, p.a), p.a));
    });
    expect_same(hessian_vector_product(mesh, recomputed, w, v), hessian_vector_product(mesh, plain, w, v));

    struct Layers {
      Array<"layers", Tensor<f64, "A/d C">> layers;
    };
    Layers layers, along;
    layers.layers = {w.c, w.c * 0.5};
    along.layers = {v.c, v.c * 2.0};
    const auto loop = [](bool ahead) {
      return [ahead](const Layers& p) {
        const auto gather = [](const Tensor<f64, "A/d C">& x) { return all_gather<"A/d C -> A C">(x); };
        const auto step = [](const Tensor<f64, "A C">& x, const Tensor<f64, "A C">& y) { return tanh(x * y); };
        const auto x = ones<f64, "A C">(Grid(p.layers[0].device()), {{"A", 3, 4}, {"C", 5}});
        if (ahead) return cubes(scan_layers(with_prefetch(gather, step), p.layers, x));
        return cubes(scan_layers([=](const auto& y, const auto& l) { return step(y, gather(l)); }, p.layers, x));
      };
    };
    expect_same(hessian_vector_product(mesh, loop(true), layers, along),
                hessian_vector_product(mesh, loop(false), layers, along));

    // d^3/dx^3 of x^4, and of products of sharded tensors; a product along a direction inside a loss.
    const auto cube = [&](const Tensor<f64, "A/d B/t">& a) -> Loss {
      const auto outer = [&](const Tensor<f64, "A/d B/t">& p) -> Loss {
        const auto of = [](const Tensor<f64, "A/d B/t">& x) -> Loss { return sum(x * x * x * x); };
        return sum(value_and_grad(mesh, of, p).second);
      };
      return sum(value_and_grad(mesh, outer, a).second);
    };
    const auto third = value_and_grad(mesh, cube, w.a).second - w.a * 24.0;
    expect(item(all_reduce<"+d +t -> ">(sum(square(third)))) < 1e-24, "24 x");
    const auto of_products = allow_unused([](const Weights& p) -> Loss {
      const auto y = einsum<"A/d B/t, A/d C -> C B/t">(p.a, p.c);
      return total(y * y);
    });
    const auto product = [&](const Weights& p) -> Loss {
      const Weights h = reduce_gradients(mesh, hessian_vector_product(mesh, of_products, p, v));
      return total(h.a * v.a) + total(h.c * v.c);
    };
    expect(check_gradients(mesh, GradientCheck{.elements = 3}, allow_unused(product), w) == 9, "third");
    // Of functions of numbers, which broadcast, and exactly: of v^2 exp(a).
    const auto curvature = [&](const auto& f) {
      return allow_unused([&mesh, &v, f](const Weights& p) -> Loss {
        const Weights h = reduce_gradients(mesh, hessian_vector_product(mesh, f, p, v));
        return total(h.a * v.a) + total(h.b * v.b);
      });
    };
    const auto elementwise = allow_unused([](const Weights& p) -> Loss {
      const auto x = p.a;
      const auto b = shard<"B -> B/t">(p.b);
      const auto one = exp(x) * 0.1 + log(x) + log1p(x) + expm1(x) * 0.1 + sin(x) + cos(x) + erf(x) + tanh(x);
      const auto other = sigmoid(x) + softplus(x) + sqrt(x) + rsqrt(x) + gelu(x) + swish(x) + abs(x) * square(x);
      const auto two = pow(x, b) + maximum(x * x * x, -b) + x / b + mod(x, 0.7) * x * x;
      return total(one) + total(other * b) + total(two * map([](auto y, auto z) { return z * exp(y * z); }, x, b));
    });
    expect(check_gradients(mesh, GradientCheck{.elements = 3}, curvature(elementwise), w) == 9, "third, of numbers");
    const auto exps = allow_unused([](const Weights& p) { return total(exp(p.a)); });
    const Weights found = reduce_gradients(mesh, value_and_grad(mesh, curvature(exps), w).second);
    const auto by_hand = found.a - square(v.a) * exp(w.a);
    expect(item(all_reduce<"+d +t -> ">(sum(square(by_hand)))) < 1e-28, "v^2 exp(a)");
    // Up to the fifth: of one operand, by one of two, and by all.
    const auto fifth = [&](const char* what, const std::function<Block(const Block&)>& f, const Block& expected) {
      const auto squares = [](const Block& x) { return item(all_reduce<"+d +t -> ">(sum(square(x)))); };
      const double error = squares(nth_gradient<5>(mesh, f, w.a) - expected) / squares(expected);
      expect(error < 1e-24, std::string("fifth, ") + what + ": " + show(error));
      const std::string sixth = error_of([&] { static_cast<void>(nth_gradient<6>(mesh, f, w.a)); });
      expect(sixth.find("functions of numbers have derivatives up to order 5; take") != std::string::npos,
             std::string("sixth, ") + what + ": " + sixth);
    };
    fifth(
        "exp(x)", [](const Block& y) { return exp(y); }, exp(w.a));
    if (mesh.size() == 4) {
      const auto b = shard<"B -> B/t">(w.b);
      const Block x = w.a, x2 = x * x;
      fifth(
          "b / x", [b](const Block& y) { return map([](auto p, auto q) { return q / p; }, y, b); },
          b * -120.0 / (x2 * x2 * x2));
      fifth(
          "x^b", [b](const Block& y) { return pow(y, b); },
          pow(x, b - 5.0) * (b * (b - 1.0) * (b - 2.0) * (b - 3.0) * (b - 4.0)));
      fifth(
          "exp(x x)", [](const Block& y) { return map([](auto p, auto q) { return exp(p * q); }, y, y); },
          exp(x2) * x * (x2 * x2 * 32.0 + x2 * 160.0 + 120.0));
      fifth(
          "exp(x x x)",
          [](const Block& y) { return map([](auto p, auto q, auto r) { return exp(p * q * r); }, y, y, y); },
          exp(x2 * x) * x * (x2 * x * (x2 * x2 * x2 * 243.0 + x2 * x * 1620.0 + 2160.0) + 360.0));
    }
    // What has no third derivative says so.
    const auto softmaxes = allow_unused([](const Weights& p) { return cubes(softmax<"C">(p.c)); });
    const auto of_softmax = allow_unused([&](const Weights& p) -> Loss {
      return total(reduce_gradients(mesh, hessian_vector_product(mesh, softmaxes, p, v)).c * v.c);
    });
    const std::string none = error_of([&] { static_cast<void>(value_and_grad(mesh, of_softmax, w)); });
    expect(none.find("its VJP has no derivative") != std::string::npos, none);
  });
}

TEST_CASE("second derivatives: what a nested call takes from the function around it", "[grad]") {
  on_mesh("d=2,t=2", [](const Grid& mesh) {
    const Weights w = random_weights(mesh, 1), v = random_weights(mesh, 2, 0);
    // A direction of the outer function, at constant weights.
    const auto products = allow_unused([](const Weights& p) -> Loss {
      const auto y = einsum<"A/d B/t, A/d C -> C B/t">(p.a, p.c);
      return total(y * y);
    });
    const auto by_direction = [&](const auto& of) {
      return allow_unused([&](const Weights& p) -> Loss {
        const Weights h = reduce_gradients(mesh, hessian_vector_product(mesh, of, w, p));
        return total(h.a * p.a) + total(h.c * p.c);
      });
    };
    expect(check_gradients(mesh, GradientCheck{.elements = 3}, by_direction(products), v) == 9, "by the direction");
    const auto exps = allow_unused([](const Weights& p) { return total(exp(p.a)); });
    expect(check_gradients(mesh, GradientCheck{.elements = 3}, by_direction(exps), v) == 9, "of numbers");
    // A tensor of the outer function that is captured, at constant weights and directions.
    const auto captured = [&](const Weights& p) -> Loss {
      const auto k = tanh(p.c);
      const auto of = [&](const Tensor<f64, "A/d C">& c) -> Loss { return total(exp(c) * k); };
      return total(hessian_vector_product(mesh, of, w.c, v.c)) + total(k);
    };
    const std::string outside = error_of([&] { static_cast<void>(value_and_grad(mesh, allow_unused(captured), w)); });
    expect(outside.find("its function uses the result of tanh at ") != std::string::npos, outside);
    // An auxiliary result keeps its gradient in the outer function.
    const auto auxiliary = allow_unused([&](const Weights& p) -> Loss {
      const auto of = [&](const Tensor<f64, "A/d B/t">& a) { return std::pair(cubes(a), p.c * 2.0); };
      return cubes(std::get<2>(value_and_grad(mesh, of, w.a)));
    });
    expect(check_gradients(mesh, GradientCheck{.elements = 3}, auxiliary, w) == 9, "auxiliary");
    // Weights of a call below another one that are constants: all of them, and one of several.
    const auto all_constant = allow_unused([&](const Weights& p) -> Loss {
      const auto middle = [&](const Tensor<f64, "A/d C">& c) -> Loss {
        const auto inner = [](const Tensor<f64, "A/d B/t">& a) { return std::pair(cubes(a), square(a)); };
        return cubes(c) + total(std::get<2>(value_and_grad(mesh, inner, w.a)));
      };
      const auto slope = all_reduce<"A/d C +t -> A/d C">(value_and_grad(mesh, middle, w.c).second);
      return total(p.c * slope);
    });
    expect(check_gradients(mesh, GradientCheck{.elements = 3}, all_constant, v) == 9, "constants below a call");
    const auto one_constant = allow_unused([&](const Weights& p) -> Loss {
      const auto middle = [&](const Tensor<f64, "A/d C">& c) -> Loss {
        const auto inner = [](const Weights& q) -> Loss {
          return total(einsum<"A/d B/t, B/t -> A/d">(q.a, shard<"B -> B/t">(q.b))) * 0.1 + cubes(q.c);
        };
        const auto [loss, grads] = value_and_grad(mesh, inner, Weights{w.a, c, w.b});
        return loss + total(square(reduce_gradients(mesh, grads).c));
      };
      const auto slope = all_reduce<"A/d C +t -> A/d C">(value_and_grad(mesh, middle, w.c).second);
      return total(p.c * slope);
    });
    expect(check_gradients(mesh, GradientCheck{.elements = 3}, one_constant, v) == 9, "a constant below a call");
  });
  SUCCEED();
}

TEST_CASE("second derivatives: logsumexp of infinities", "[grad]") {
  on_mesh("d=2,t=1", [](const DevicePtr& device) {
    const Grid mesh(device);
    const double inf = std::numeric_limits<double>::infinity();
    using Rows = Tensor<f64, "A/d C">;
    HostArray<f64> rows({4, 3}), along({4, 3});
    rows.data = {1, inf, inf, -inf, -inf, -inf, inf, -inf, 2, -inf, 0, 0};
    along.data = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 4};
    const auto x = place<Rows>(mesh, rows), v = place<Rows>(mesh, along);
    const auto expect_near = [](const auto& y, const std::vector<f64>& expected) {
      const auto found = fetch(all_reduce<"A/d C +t -> A/d C">(y)).data;
      for (std::size_t i = 0; i < expected.size(); ++i)
        expect(std::abs(found.at(i) - expected[i]) <= 1e-15, show(i) + ": " + show(found[i]));
    };
    const auto loss = [](const Rows& y) -> Loss { return total(logsumexp<"A/d C -> A/d">(y)); };
    const std::vector<f64> shares{0, 0.5, 0.5, 0, 0, 0, 1, 0, 0, 0, 0.5, 0.5};
    expect_near(value_and_grad(mesh, loss, x).second, shares);
    const auto outer = [&](const Rows& y) { return value_and_grad(mesh, loss, y); };
    expect_near(std::get<2>(value_and_grad(mesh, outer, x)), shares);
    expect_near(hessian_vector_product(mesh, loss, x, v), {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, -0.5, 0.5});  // p (v - p v)
  });
  SUCCEED();
}

template <class D>
struct WeightsOf {
  Tensor<D, "A/d B/t"> a;
  Tensor<D, "A/d C"> c;
};
/// Second derivatives by weights of D are those by the same numbers in f64, except for rounding.
template <class D>
void check_dtype(const Grid& mesh, double tolerance) {
  const auto loss = []<class E>(const WeightsOf<E>& w) {
    const auto scale = einsum_unreduced<"A/d C, A/d C -> A/d">(softmax<"C">(w.c), w.c);
    const auto y = tanh(w.a * scale);
    return total(cast<std::conditional_t<std::is_same_v<E, bf16>, f32, E>>(y * y * w.a));
  };
  const auto penalty = [&]<class E>(const WeightsOf<E>& w) {
    const auto [value, grads] = value_and_grad(mesh, loss, w);
    const auto whole = reduce_gradients(mesh, grads);
    using Wide = typename decltype(value)::value_type;
    return value + total(cast<Wide>(square(whole.a))) + total(cast<Wide>(square(whole.c)));
  };
  const auto near = [&](const auto& found, const auto& expected, const char* what) {
    double error = 0, size = 0;
    for_each_leaf(
        [&](std::string_view, const auto& x, const auto& y) {
          for (std::size_t i = 0; i < y.span().size(); ++i) {
            error += std::pow(static_cast<double>(static_cast<float>(x.span()[i])) - y.span()[i], 2);
            size += std::pow(y.span()[i], 2);
          }
        },
        found, expected);
    expect(size > 0 && std::sqrt(error / size) <= tolerance, std::string(what) + ": " + show(std::sqrt(error / size)));
  };
  const Weights w = random_weights(mesh, 1), v = random_weights(mesh, 2, 0);
  const WeightsOf<D> at{cast<D>(w.a), cast<D>(w.c)}, along{cast<D>(v.a), cast<D>(v.c)};
  const auto wide_at = cast_tree<WeightsOf<f64>>(at), wide_along = cast_tree<WeightsOf<f64>>(along);
  near(hessian_vector_product(mesh, loss, at, along), hessian_vector_product(mesh, loss, wide_at, wide_along),
       "product");
  near(value_and_grad(mesh, penalty, at).second, value_and_grad(mesh, penalty, wide_at).second, "penalty");
}
TEST_CASE("second derivatives in f32 and bf16", "[grad]") {
  on_meshes(meshes, [](const Grid& mesh) {
    check_dtype<f32>(mesh, 1e-5);
    check_dtype<bf16>(mesh, 0.03);
  });
}

struct Pair {
  Tensor<bf16, "A/d"> p, q;
};
TEST_CASE("second derivatives: many uses of a bf16 weight are summed in f32", "[grad]") {
  on_mesh("d=2,t=1", [](const DevicePtr& device) {
    const Grid mesh(device);
    const Pair w{ones<bf16, "A/d">(mesh, {{"A", 4}}), ones<bf16, "A/d">(mesh, {{"A", 4}})};
    const auto uses = [](const Pair& x) {
      auto sum = x.p;
      for (int i = 1; i < 300; ++i) sum = sum + x.p;
      return total(cast<f32>(sum * x.q));  // its gradient by p is 300 q, and 256 + 1 is 256 in bf16
    };
    const auto slope = allow_unused([&](const Pair& x) {
      const auto by_p = Pair(reduce_gradients(mesh, value_and_grad(mesh, uses, x).second)).p;
      return std::pair(total(cast<f32>(by_p)), by_p);
    });
    const auto [loss, grads, by_p] = value_and_grad(mesh, slope, w);
    const Pair second = reduce_gradients(mesh, grads);
    expect_equal(values_of<bf16>(by_p.value()->data()), values_of<bf16>((w.q * 300.0).value()->data()));
    expect_equal(values_of<bf16>(second.q.value()->data()), values_of<bf16>((w.q * 300.0).value()->data()));
  });
}

TEST_CASE("second derivatives: the sentence where there are none", "[grad]") {
  on_mesh("d=2,t=2", [](const Grid& mesh) {
    const Weights w = random_weights(mesh, 1), v = random_weights(mesh, 2, 0);
    const auto loss = [](const Tensor<f64, "A/d C">& c) -> Loss { return cubes(prod<"A/d C -> A/d">(c)); };
    expect_error(
        [&] { static_cast<void>(hessian_vector_product(mesh, loss, w.c, v.c)); },
        "prod<`A/d C -> A/d`>: its VJP has no derivative, so a derivative of higher order would miss a part; write it "
        "in the ops that have one (docs/autodiff.md lists them), take `stop_gradient` of the operand, or take a "
        "difference: hessian_vector_product with a step is that of two gradients, and a third derivative is that of "
        "two products (" +
            mesh.device()->describe() + ")");
    // Logits that are not stored are no residuals.
    const auto ids = place<Tensor<i32, "A/d">>(mesh, HostArray<i32>({3}, {4, 0, 3}), {{"A", 3, 4}});
    const auto pieces = [&](const Tensor<f64, "A/d C">& c, std::int64_t stored) -> Loss {
      const auto table = ones<f64, "V/t C">(mesh, {{"V", 6, 8}, {"C", 5}});
      return total(all_reduce<"A/d +t -> A/d">(linear_cross_entropy<"A/d C, V/t C -> A/d V/t">(c, table, ids, stored)));
    };
    static_cast<void>(hessian_vector_product(mesh, pieces, w.c, v.c, std::int64_t{1000}));
    expect(error_of([&] {
             static_cast<void>(hessian_vector_product(mesh, pieces, w.c, v.c, std::int64_t{0}));
           }).starts_with("linear_cross_entropy"),
           "not stored");
    const auto squares = [](const Tensor<f64, "A/d C">& c) -> Loss { return total(c * c); };
    const Tensor<f64, "A/d C"> other = place<Tensor<f64, "A/d C">>(mesh, HostArray<f64>({2, 5}), {});
    expect(error_of([&] {
             static_cast<void>(hessian_vector_product(mesh, squares, w.c, other));
           }).find("the direction `A/d C` has other sizes than its weight") != std::string::npos,
           "a direction of other sizes");
    using Parts = Array<"parts", Tensor<f64, "A/d C">>;
    const auto parts = [&](const Parts& all) -> Loss { return squares(all[0]); };
    expect_error(
        [&] { static_cast<void>(hessian_vector_product(mesh, parts, Parts{w.c}, Parts{})); },
        "hessian_vector_product: trees of different structure: the Array `parts` has 1 entry in the first tree "
        "and 0 in another; build them from one configuration");
    // An optimizer's step is no op.
    const auto after_step = [&](const Tensor<f32, "A/d C">& c) -> Tensor<f32, "+d +t"> {
      const auto of = [](const Tensor<f32, "A/d C">& x) -> Tensor<f32, "+d +t"> {
        return to_partial<"+d -> +d +t">(sum(x * x));
      };
      auto moved = c;
      SGD sgd;
      auto moments = SGD::init(moved);
      sgd.update(moved, moments, reduce_gradients(mesh, value_and_grad(mesh, of, c).second), 0.1, 1.0, 0,
                 [](std::string_view) { return true; });
      return of(moved);
    };
    const std::string says = error_of([&] { static_cast<void>(value_and_grad(mesh, after_step, cast<f32>(w.c))); });
    expect(says.find("an update in place has no derivative") != std::string::npos, says);
  });
}

}  // namespace
