// explicit_activation_checkpointing, save_for_backward and the report of what is kept.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "op_case.hpp"
#include "random_bits.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using X = Tensor<f32, "B/d M/t">;
using Loss = Tensor<f32, "+d +t">;
using Loss64 = Tensor<f64, "+d +t">;
using Grid = Mesh<"d t">;

struct Weights {
  Tensor<f32, "M/t/d H"> in;
  Tensor<f32, "H M/t/d"> out;
};

// A layer whose backward pass needs everything but its last einsum and its reduce_scatter.
enum class Keep { nothing, hidden, hidden_and_input };
constexpr int layer_line = __LINE__;
template <Keep keep>
X layer(const X& x, const Weights& w) {
  auto whole = all_gather<"B/d M/t -> B/d M">(x);
  if constexpr (keep == Keep::hidden_and_input) whole = save_for_backward(whole);
  const auto w_in = all_gather<"M/t/d H -> M H">(w.in);
  auto hidden = einsum_unreduced<"B/d M, M H -> B/d H">(whole, w_in);
  if constexpr (keep != Keep::nothing) hidden = save_for_backward(hidden);
  const auto part = shard<"B/d H -> B/d H/t">(relu(hidden));
  const auto w_out = shard<"H M -> H/t M">(all_gather<"H M/t/d -> H M">(w.out));
  return reduce_scatter<"B/d M +t -> B/d M/t">(einsum_unreduced<"B/d H/t, H/t M -> B/d M +t">(part, w_out));
}

Weights weights(const Grid& mesh, std::uint64_t stream) {
  const Sizes sizes{{"M", 12}, {"H", 6}};
  return {random_normal<f32, "M/t/d H">(mesh, sizes, {1, stream}),
          random_normal<f32, "H M/t/d">(mesh, sizes, {2, stream})};
}
X input(const Grid& mesh) {
  return random_normal<f32, "B/d M/t">(mesh, {{"B", 6}, {"M", 12}}, {3, 0});
}

/// How often each op ran on this device during f.
std::map<std::string, std::int64_t> calls(const Grid& mesh, const std::function<void()>& f) {
  auto& counts = detail::program_state(mesh.device()).counts;
  counts.clear();
  f();
  std::map<std::string, std::int64_t> all;
  for (const auto& [name, count] : counts) all[name] = count.calls;
  return all;
}

/// The loss of two layers, each wrapped by `wrap`.
template <class Wrap>
auto two_layers(Wrap wrap, const X& x) {
  return [wrap, x](const Array<"layers", Weights>& w) -> Loss {
    X y = x;
    for (const Weights& one : w) y = y + wrap(y, one);
    return sum(square(y));
  };
}
template <Keep keep>
auto checkpointed() {
  return [](const X& x, const Weights& w) { return explicit_activation_checkpointing(layer<keep>)(x, w); };
}
template <Keep keep>
auto plain() {
  return [](const X& x, const Weights& w) { return layer<keep>(x, w); };
}

using Counts = std::map<std::string, std::int64_t>;
Counts among(const Counts& all) {
  Counts some;
  for (const char* name : {"all_gather", "einsum_unreduced", "reduce_scatter"})
    if (const auto it = all.find(name); it != all.end()) some.insert(*it);
  return some;
}
std::string show_counts(const Counts& counts) {
  std::string text;
  for (const auto& [name, n] : counts) text += name + " " + std::to_string(n) + ", ";
  return text;
}
void expect_counts(const Counts& all, const Counts& expected, const std::string& what) {
  expect(among(all) == expected, what + ": " + show_counts(among(all)) + "instead of " + show_counts(expected));
}

TEST_CASE("recompute changes no bit, and runs again only what someone needs", "[ops][recompute]") {
  on_meshes({"d=1,t=1", "d=2,t=1", "d=1,t=3", "d=2,t=2", "d=2,t=3"}, [](const Grid& mesh) {
    const Array<"layers", Weights> w{weights(mesh, 1), weights(mesh, 2)};
    const X x = input(mesh);
    std::pair<Loss, Array<"layers", Weights>> all, none, hidden, both, unwrapped;
    // Per layer, forward: 3 gathers, 2 einsums, 1 scatter. Backward: a scatter for each gather, a gather for the
    // scatter, 2 einsums for each einsum; less in the first layer, whose x is not a weight: no scatter and no einsum
    // for its gather.
    const Counts eager{{"all_gather", 8}, {"einsum_unreduced", 11}, {"reduce_scatter", 7}};
    expect_counts(calls(mesh, [&] { all = value_and_grad(mesh, two_layers(plain<Keep::nothing>(), x), w); }), eager,
                  "without recompute");
    // save_for_backward means nothing outside.
    expect_counts(calls(mesh, [&] { unwrapped = value_and_grad(mesh, two_layers(plain<Keep::hidden>(), x), w); }),
                  eager, "save_for_backward without recompute");
    // Again: 3 gathers and the first einsum of each layer. Not the second einsum and the scatter: no VJP uses them.
    expect_counts(calls(mesh, [&] { none = value_and_grad(mesh, two_layers(checkpointed<Keep::nothing>(), x), w); }),
                  {{"all_gather", 14}, {"einsum_unreduced", 13}, {"reduce_scatter", 7}}, "recompute");
    // No einsum; and in the first layer nobody needs the gathered w.in.
    expect_counts(calls(mesh, [&] { hidden = value_and_grad(mesh, two_layers(checkpointed<Keep::hidden>(), x), w); }),
                  {{"all_gather", 13}, {"einsum_unreduced", 11}, {"reduce_scatter", 7}}, "one value saved");
    // Nor the gathers of x.
    expect_counts(
        calls(mesh, [&] { both = value_and_grad(mesh, two_layers(checkpointed<Keep::hidden_and_input>(), x), w); }),
        {{"all_gather", 11}, {"einsum_unreduced", 11}, {"reduce_scatter", 7}}, "two values saved");
    for (const auto* other : {&none, &hidden, &both, &unwrapped}) {
      expect_same_bits(all.first, other->first, "loss");
      expect_same_bits(all.second, other->second, "gradient");
    }
  });
}

TEST_CASE("the gradient through recompute is that of finite differences", "[ops][recompute]") {
  on_mesh("d=2,t=2", [](const Grid& mesh) {
    using V = Tensor<f64, "A/d C/t">;
    const V v = random_normal<f64, "A/d C/t">(mesh, {{"A", 4}, {"C", 4}}, {5, 1});
    const auto f = [](const V& a) -> Loss64 {
      const auto g =
          explicit_activation_checkpointing([](const V& b) { return exp(all_gather<"A/d C/t -> A/d C">(b)); });
      return sum(tanh(shard<"A/d C -> A/d C/t">(g(a))) * a);
    };
    const auto [loss, gradient] = value_and_grad(mesh, f, v);
    const Global whole = assemble(*v.value(), *v.value()->spec);
    const Global found = assemble(*gradient.value(), *v.value()->spec);
    for (std::size_t i = 0; i < whole.data.size(); ++i) {
      const auto at = [&](double u) { return std::tanh(std::exp(u)) * u; };
      const double expected = (at(whole.data[i] + 1e-5) - at(whole.data[i] - 1e-5)) / 2e-5;
      expect(std::abs(found.data[i] - expected) < 1e-6, "gradient " + show(found.data[i]) + ", " + show(expected));
    }
    static_cast<void>(loss);
  });
}

struct Pair {
  X sum;
  Tensor<f32, "B/d"> size;
};

TEST_CASE("recompute of nested calls and of several results", "[ops][recompute]") {
  on_meshes({"d=1,t=1", "d=2,t=2"}, [](const Grid& mesh) {
    const Weights w = weights(mesh, 1);
    const X x = input(mesh);
    const auto inner = [](const X& a, const Weights& v) { return layer<Keep::hidden>(a, v) + a; };
    const auto outer = [inner](auto wrap) {
      return [=](const X& a, const Weights& v) -> Pair {
        const X b = wrap(inner)(a, v);
        const auto whole = all_gather<"B/d M/t -> B/d M">(b);
        return {b * b, sum<"B/d M -> B/d">(exp(whole * 0.1))};
      };
    };
    // Both results are used, or one alone: nothing arrives for the other.
    const auto loss = [&](auto wrap_outer, auto wrap_inner, bool both) {
      return [=](const Weights& v) -> Loss {
        const Pair pair = wrap_outer(outer(wrap_inner))(x, v);
        const Loss first = sum(pair.sum);
        return both ? first + to_partial<"+d -> +d +t">(sum(pair.size)) : first;
      };
    };
    const auto as_is = [](auto f) { return f; };
    const auto again = [](auto f) { return explicit_activation_checkpointing(f); };
    for (const bool both : {true, false}) {
      const auto expected = value_and_grad(mesh, loss(as_is, as_is, both), w);
      const auto check = [&](const auto& found, const char* what) {
        expect_same_bits(expected.first, found.first, what);
        expect_same_bits(expected.second, found.second, what);
      };
      check(value_and_grad(mesh, loss(again, as_is, both), w), "outer");
      check(value_and_grad(mesh, loss(as_is, again, both), w), "inner");
      check(value_and_grad(mesh, loss(again, again, both), w), "nested");
    }
  });
}

void expect_residuals(const std::vector<SavedResidual>& residuals, const std::vector<SavedResidual>& expected) {
  std::string all;
  for (const SavedResidual& k : residuals) all += "\n" + k.what + " [" + k.spec + "] " + std::to_string(k.bytes);
  expect(residuals.size() == expected.size(), "kept:" + all);
  for (std::size_t i = 0; i < residuals.size(); ++i)
    expect(residuals[i].what == expected[i].what && residuals[i].spec == expected[i].spec &&
               residuals[i].bytes == expected[i].bytes,
           "entry " + std::to_string(i) + " of what is kept:" + all);
}

TEST_CASE("the report of what is kept for the backward pass", "[ops][recompute]") {
  on_mesh("d=2,t=2", [](const Grid& mesh) {
    const Array<"layers", Weights> w{weights(mesh, 1), weights(mesh, 2)};
    const X x = input(mesh);
    const auto at = [](const std::string& op, int line) {
      return op + " at " + std::string(__FILE__) + ":" + std::to_string(layer_line + line);
    };
    // Shards of a 2 x 2 mesh at B=6, M=12, H=6. The gathered w.in of the first layer would make the gradient of x,
    // which is not a weight.
    const SavedResidual w_in{at("all_gather<`M/t/d H -> M H`>", 5), "M H", 288};
    const SavedResidual whole{at("all_gather<`B/d M/t -> B/d M`>", 3), "B/d M", 144};
    const SavedResidual w_out{at("shard<`H M -> H/t M`>", 9), "H/t M", 144};
    const SavedResidual hidden{at("einsum_unreduced<`B/d M, M H -> B/d H`>", 6), "B/d H", 72};
    const SavedResidual part{at("shard<`B/d H -> B/d H/t`>", 8), "B/d H/t", 36};
    const SavedResidual last{at("operator+", 37), "B/d M/t", 72};
    expect_residuals(saved_residuals(two_layers(plain<Keep::nothing>(), x), w),
                     {w_in, whole, whole, w_out, w_out, hidden, hidden, last, part, part});
    // With recompute: the arguments of each call, and what is saved.
    const SavedResidual saved_hidden{at("save_for_backward", 7), "B/d H", 72};
    const std::vector<SavedResidual> arguments{{"0/in", "M/t/d H", 72},
                                               {"0/out", "H M/t/d", 72},
                                               {"1/in", "M/t/d H", 72},
                                               {"1/out", "H M/t/d", 72},
                                               last,
                                               last,
                                               {at("random_normal<`B/d M/t`>", 19), "B/d M/t", 72}};
    expect_residuals(saved_residuals(two_layers(checkpointed<Keep::nothing>(), x), w), arguments);
    auto with_saved = arguments;
    with_saved.insert(with_saved.end(), {saved_hidden, saved_hidden});
    expect_residuals(saved_residuals(two_layers(checkpointed<Keep::hidden>(), x), w), with_saved);
  });
}

auto with_policy(const char* policy) {
  return [policy](const X& x, const Weights& w) {
    return explicit_activation_checkpointing(layer<Keep::hidden>, {policy})(x, w);
  };
}

TEST_CASE("a policy keeps what its name says, and changes no bit", "[ops][recompute]") {
  // As above: what runs again of two layers.
  const std::map<std::string, Counts> policies{
      {"none", {{"all_gather", 8}, {"einsum_unreduced", 11}, {"reduce_scatter", 7}}},
      {"marked", {{"all_gather", 13}, {"einsum_unreduced", 11}, {"reduce_scatter", 7}}},
      {"dots", {{"all_gather", 13}, {"einsum_unreduced", 11}, {"reduce_scatter", 7}}},
      {"everything", {{"all_gather", 14}, {"einsum_unreduced", 13}, {"reduce_scatter", 7}}},
      {"all_gather", {{"all_gather", 8}, {"einsum_unreduced", 13}, {"reduce_scatter", 7}}},
      {"all_gather,einsum_unreduced", {{"all_gather", 8}, {"einsum_unreduced", 11}, {"reduce_scatter", 7}}}};
  on_meshes({"d=1,t=1", "d=2,t=2", "d=2,t=3"}, [&](const Grid& mesh) {
    const Array<"layers", Weights> w{weights(mesh, 1), weights(mesh, 2)};
    const X x = input(mesh);
    const auto all = value_and_grad(mesh, two_layers(plain<Keep::nothing>(), x), w);
    for (const auto& [name, expected] : policies) {
      std::pair<Loss, Array<"layers", Weights>> found;
      expect_counts(calls(mesh, [&] { found = value_and_grad(mesh, two_layers(with_policy(name.c_str()), x), w); }),
                    expected, name);
      expect_same_bits(all.first, found.first, name);
      expect_same_bits(all.second, found.second, name);
    }
    // Without `marked`, save_for_backward means nothing.
    const auto kept = [&](const char* policy) { return saved_residuals(two_layers(with_policy(policy), x), w); };
    expect_residuals(kept("everything"), saved_residuals(two_layers(checkpointed<Keep::nothing>(), x), w));
    const auto count = [&](const char* policy, std::string_view what) {
      const auto residuals = kept(policy);
      return std::ranges::count_if(residuals, [&](const SavedResidual& r) { return r.what.starts_with(what); });
    };
    expect(count("dots", "einsum_unreduced<") == 4 && count("dots", "save_for_backward") == 0, "dots: both products");
    expect(count("marked", "einsum_unreduced<") == 0 && count("marked", "save_for_backward") == 2, "marked: hidden");
    for (const char* policy : {"attention", "einsun_unreduced", "all_gather,", ""}) {
      const std::string message = error_of([&] { static_cast<void>(kept(policy)); });
      expect(message.find("explicit_activation_checkpointing: the policy keeps the results of") == 0 &&
                 message.find("`einsum_unreduced`") != std::string::npos,
             message);
    }
  });
}

// What a function must not do: read a variable that has changed when the backward pass runs it again.
thread_local int runs = 0;  // of this device
thread_local X outside[2];
struct alignas(32) Wide {
  float numbers[3];
  int last;
};
thread_local Tensor<bool_, "B/d M/t"> seen[2];
int negative(int v) {
  return -v;
}
int squared(int v) {
  return v * v;
}

template <class F>
std::string error_of_second_run(const Grid& mesh, const F& f) {
  runs = 0;
  return error_of([&] {
    const auto loss = [&](const X& x) -> Loss { return sum(square(explicit_activation_checkpointing(f)(x))); };
    static_cast<void>(value_and_grad(mesh, loss, input(mesh)));
  });
}

TEST_CASE("recompute: a function that does not do the same again is an error", "[ops][recompute]") {
  on_meshes({"d=1,t=1", "d=2,t=2"}, [](const Grid& mesh) {
    const auto expect_why = [&](const std::string& error, const std::string& op, const std::string& why) {
      const std::string begin =
          "explicit_activation_checkpointing: the function computed something else when it ran again for the backward "
          "pass, up to ";
      expect(error.starts_with(begin + op) && error.find(": " + why) != std::string::npos &&
                 error.find("; it must not depend on global or static variables that change") != std::string::npos,
             error);
    };
    const auto again = [] { return runs++ > 0; };
    for (int i = 0; i < 2; ++i) {
      outside[i] = input(mesh) * (i + 1.0);
      seen[i] = greater(outside[i], 0.1);
    }
    constexpr std::uint64_t seed = 5;
    expect_why(error_of_second_run(mesh, [again](const X& x) { return again() ? exp(x) * 2.0 : exp(x); }),
               "operator* at ", "the number of ops is 1 in the forward pass and 2 now");
    expect_why(error_of_second_run(mesh, [again](const X& x) { return again() ? exp(x) : tanh(x); }), "exp at ",
               "other ops have run, or ops of other tensors");
    const auto expect_number = [&](const std::string& op, const auto& f) {
      expect_why(error_of_second_run(mesh, [again, f](const X& x) { return f(x, again() ? 2 : 1); }), op,
                 "other ops have run, or ops of other tensors, sizes, numbers or random keys");
    };
    expect_number("operator* at ", [](const X& x, int k) { return x * k; });
    expect_number("operator/ at ", [](const X& x, int k) { return k / x; });
    expect_number("map at ", [](const X& x, int k) {
      return map([flag = true, k](auto v) { return flag ? v * double(k) : v; }, x);
    });
    expect_number("map at ", [](const X& x, int k) {
      return map([wide = Wide{{}, k}](auto v) { return v * double(wide.last); }, x);
    });
    expect_number("masked at ", [](const X& x, int k) {
      return masked(greater(map(k == 1 ? &negative : &squared, cast<i32>(stop_gradient(x))), 0.0), x);
    });
    expect_number("where at ", [](const X& x, int k) { return where(greater(x, 0.0), x, k); });
    expect_number("dropout at ", [](const X& x, int k) { return dropout(x, 0.1 * k, {seed, 1}); });
    expect_number("dropout at ", [](const X& x, int k) { return dropout(x, 0.1, {seed, std::uint64_t(k)}); });
    expect_number("shift<`B/d M/t`> at ", [](const X& x, int k) { return shift<over<"t">>(x, k); });
    expect_number("twice", [](const X& x, int k) {
      return custom::record<"twice", X>(
          {}, [k](custom::Shard<f32> y, custom::Shard<const f32> in) { y.data[0] = float(k) * in.data[0]; },
          custom::operands(x), custom::vjp(x, [](const auto& ct) { return ct; }));
    });
    const auto expect_along = [&](const auto& f) {
      expect_number("sum<`B/d M/t ", [f](const X& x, int k) -> X {
        return f(broadcast<"B/d M/t -> B/d M/t K">(x, {{"K", 4}}), k);
      });
    };
    static constexpr OpSpec sum_k = "B/d M/t K -> B/d M/t", sum_n = "B/d M/t N -> B/d M/t";
    expect_along([](const auto& x, int k) { return sum<sum_k>(roll<"K">(x, k)); });
    expect_along([](const auto& x, int k) { return sum<sum_n>(narrow<"K -> N">(x, k, 2)); });
    expect_along([](const auto& x, int k) { return sum<sum_n>(pad<"K -> N">(x, k, 2 - k)); });
    expect_along([](const auto& x, int k) {
      return sum<"B/d M/t N W -> B/d M/t">(windows<"K, W -> N">(x, {{"W", 1}}, {.before = k, .after = 2 - k}));
    });
    expect_along([](const auto& x, int k) { return sum<sum_k>(rms_norm<"K">(x, 1.0 * k)); });
    expect_along([](const auto& x, int k) { return sum<sum_k>(linear_scan<"K">(x, x, k == 1)); });
    // Another tensor of the same type: of its own, of its arguments, or from outside, by each kind of op.
    const auto expect_operand = [&](const std::string& op, const auto& f) {
      expect_why(error_of_second_run(mesh, [again, f](const X& x) { return f(x, again()); }), op,
                 "other ops have run, or ops of other tensors");
    };
    expect_operand("operator* at ", [](const X& x, bool other) {
      const X a = exp(x), b = tanh(x);
      return a * (other ? a : b);
    });
    expect_operand("exp at ", [](const X& x, bool other) {
      const X a = x * 2.0;
      return exp(other ? a : x);
    });
    expect_operand("masked at ", [](const X& x, bool other) { return masked(other ? seen[1] : seen[0], x); });
    expect_operand("where at ", [](const X& x, bool other) { return where(other ? seen[1] : seen[0], x, 1.0); });
    expect_operand("masked at ", [](const X& x, bool other) {
      return masked(greater(other ? outside[1] : outside[0], stop_gradient(x)), x);
    });
    expect_operand("masked at ", [](const X& x, bool other) {
      return masked(greater(cast<i32>(other ? outside[1] : outside[0]), 0.0), x);
    });
    expect_operand("map at ", [](const X& x, bool other) {
      return map([](auto a, auto b) { return a * b; }, x, other ? outside[1] : outside[0]);
    });
    expect_operand("operator+ at ", [](const X& x, bool other) {
      return x + reduce_scatter<"B/d M +t -> B/d M/t">(
                     to_partial<over<"t">>(all_gather<"B/d M/t -> B/d M">(other ? outside[1] : outside[0])));
    });
    expect_operand("sum<", [](const X& x, bool other) {
      return sum<"K B/d M/t -> B/d M/t">(stack<"K">(x, other ? outside[1] : outside[0]));
    });
    expect_operand("einsum_unreduced<", [](const X& x, bool other) {
      return einsum_unreduced<"B/d M/t, B/d M/t -> B/d M/t">(x, other ? outside[1] : outside[0]);
    });
    for (const int changes : {0, 1, 2})
      expect_operand("shard<", [changes](const X& x, bool other) {
        const auto whole = all_gather<"B/d M/t -> B/d M">(x), twice = whole * 2.0;
        const auto scale = ones<f32, "M">(Grid(x.device()), {{"M", 12}}), bias = scale * 2.0;
        return shard<"B/d M -> B/d M/t">(layer_norm<"M">(other && changes == 0 ? twice : whole,
                                                         other && changes == 1 ? bias : scale,
                                                         other && changes == 2 ? scale : bias));
      });
    expect_operand("twice", [](const X& x, bool other) {
      return custom::record<"twice", X>(
          {},
          [](custom::Shard<f32> y, custom::Shard<const f32> in, custom::Shard<const f32>) {
            y.data[0] = 2 * in.data[0];
          },
          custom::operands(x, other ? outside[1] : outside[0]), custom::vjp(x, [](const auto& ct) { return ct; }));
    });
    expect_why(error_of_second_run(mesh,
                                   [again](const X& x) {
                                     const X a = exp(x), b = tanh(x);
                                     return again() ? a : b;
                                   }),
               "exp at ", "it returns another tensor");
    // The same tensor may come from outside.
    expect(error_of_second_run(mesh, [](const X& x) {
             const X made = x * outside[0] + x;
             return map([](auto a, auto b) { return a * b; }, masked(seen[0], made), outside[0]);
           }) == "no error");
    // What was saved does not fit: there are too few values, too many, or another one is due.
    expect_why(error_of_second_run(mesh, [again](const X& x) { return again() ? save_for_backward(exp(x)) : exp(x); }),
               "exp at ", "the forward pass has saved 0 values, and now there are more");
    expect_why(error_of_second_run(mesh, [again](const X& x) { return again() ? exp(x) : save_for_backward(exp(x)); }),
               "exp at ", "the number of saved values is 1 in the forward pass and 0 now");
    expect_why(error_of_second_run(mesh,
                                   [again](const X& x) {
                                     if (again()) return save_for_backward(exp(x));
                                     static_cast<void>(save_for_backward(sum<"B/d M/t -> M/t +d">(x)));
                                     return exp(x);
                                   }),
               "exp at ", "the forward pass has saved the result of save_for_backward at ");
    // What stays the same may be read, and padding is no number.
    expect(error_of_second_run(mesh, [](const X& x) { return dropout(x, 0.1, {seed, 1}); }) == "no error");
    expect(error_of_second_run(mesh, [](const X& x) {
             return map([flag = true, k = 2.0](auto v) { return flag ? v * k : v; }, x);
           }) == "no error");
    const auto padded = [flag = true, k = 2.0](auto v) { return flag ? v * k : v; };
    const auto numbers = [](const auto& kernel) {
      return static_cast<std::size_t>(std::ranges::count(detail::numbers_in(kernel).padding, false));
    };
    expect(numbers(padded) == sizeof(bool) + sizeof(double));
    expect(numbers(Wide{}) == 4 * sizeof(float));
    if (std::numeric_limits<long double>::digits == 64)  // of x86, in 10 of 16 bytes
      expect(numbers([flag = true, k = 2.0L] { return flag ? k : 0; }) == sizeof(bool) + 10);
    for (int i = 0; i < 2; ++i) {
      outside[i] = {};
      seen[i] = {};
    }
  });
}

struct Passed {
  X x;
  Tensor<i32, "B/d"> ids;
};
TEST_CASE("recompute: a function may return an argument that only a later one uses", "[ops][recompute]") {
  on_meshes({"d=1,t=1", "d=2,t=2"}, [](const Grid& mesh) {
    const auto passes = [](const Passed& in) { return Passed{exp(in.x), in.ids}; };
    const auto uses = [](const Passed& in) { return Passed{in.x * cast<f32>(in.ids), in.ids}; };
    const auto gradient = [&](const RecomputePolicy& policy) {
      const auto loss = [&](const X& x) -> Loss {
        const auto ids = iota<"B/d">(mesh, 6) + 1;
        const Passed one = explicit_activation_checkpointing(passes, policy)(Passed{x, ids});
        return sum(explicit_activation_checkpointing(uses, policy)(one).x);
      };
      return value_and_grad(mesh, loss, input(mesh)).second;
    };
    const auto kept = gradient({"none"}), again = gradient({"marked"});
    expect(std::ranges::equal(kept.span(), again.span()), "another gradient");
  });
}

// What a function must not do either: pass a tensor on, or return one, other than by its arguments and its result.
thread_local X aside;  // of this device

TEST_CASE("recompute: a tensor that leaves the function otherwise than as its result is an error", "[ops][recompute]") {
  on_meshes({"d=1,t=1", "d=2,t=2"}, [](const Grid& mesh) {
    const auto error = [&](const auto& use) {
      return error_of([&] { static_cast<void>(value_and_grad(mesh, use, input(mesh))); });
    };
    const auto leaves = [](const X& x) {
      aside = exp(x);
      return x * 2.0;
    };
    const auto two = [leaves](const X& x) { return explicit_activation_checkpointing(leaves)(x); };
    const auto gone = [](const std::string& said) {
      return said.find("the result of exp at ") != std::string::npos &&
             said.find(
                 "has left explicit_activation_checkpointing, but not as a result of its function, so its "
                 "gradient would be lost; return it, or take `stop_gradient` of it if no gradient is meant") !=
                 std::string::npos;
    };
    std::string said = error([&](const X& x) -> Loss { return sum(two(x) + aside); });
    expect(gone(said), said);
    expect(error([&](const X& x) -> Loss { return sum(x * aside); }) == "no error", "that of an earlier call");
    const auto reads = [](const X& x) { return x * aside; };
    said = error([&](const X& x) -> Loss { return sum(explicit_activation_checkpointing(reads)(two(x))); });
    expect(gone(said), said);
    const auto takes = [](const X& x, const X& y) { return x * y; };
    said = error([&](const X& x) -> Loss { return sum(explicit_activation_checkpointing(takes)(two(x), aside)); });
    expect(gone(said), said);
    // No gradient is lost where none is meant.
    const auto stopped = [&](const X& x) -> Loss { return sum(two(x) * stop_gradient(aside)); };
    expect(error(stopped) == "no error");
    const auto constant = [&](const X& x) -> Loss {
      static_cast<void>(two(stop_gradient(x)));
      return sum(x * aside);
    };
    expect(error(constant) == "no error");
    // The function returns what it was not given.
    said = error([](const X& x) -> Loss {
      aside = x * 3.0;
      return sum(explicit_activation_checkpointing([](const X& y) -> Pair {
                   return {aside, sum<"B/d M -> B/d">(all_gather<"B/d M/t -> B/d M">(y))};
                 })(x)
                     .sum);
    });
    expect(said.starts_with("explicit_activation_checkpointing: its function returns a tensor from outside, the result "
                            "of operator* at ") &&
               said.find("; pass that as an argument, or its gradient would be lost (") != std::string::npos,
           said);
    aside = {};
  });
}

}  // namespace
