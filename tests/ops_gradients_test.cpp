// value_and_grad: gradients that would be zero or wrong without a word are errors, auxiliary results, one size a name.
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "op_case.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using Grid = Mesh<"d">;
struct Weights {
  Tensor<f32, "M/d"> a, b;
};
struct Layers {
  Array<"layers", Weights> layers;
};
using Loss = Tensor<f32, "+d">;

Weights weights(const Grid& mesh, std::uint64_t stream = 1) {
  return {random_normal<f32, "M/d">(mesh, {{"M", 4}}, {7, stream}),
          random_normal<f32, "M/d">(mesh, {{"M", 4}}, {7, stream + 1})};
}

/// f throws an Error that says all of it.
template <class F>
void expect_says(const F& f, std::initializer_list<std::string_view> parts,
                 std::source_location where = std::source_location::current()) {
  const std::string got = error_of(f);
  for (const auto part : parts)
    expect(got.find(part) != std::string::npos, "\"" + std::string(part) + "\" is not in \"" + got + "\"", where);
}

template <class F, class W, class... Args>
auto differentiate(const Grid& mesh, const F& f, const W& w, const Args&... args) {
  return [&] { static_cast<void>(value_and_grad(mesh, f, w, args...)); };
}

void on_devices(const std::function<void(const Grid&)>& body) {
  on_meshes({"d=1", "d=2"}, [&](const DevicePtr& device) { body(Grid(device)); });
}

std::string here(int line) {
  return std::string(__FILE__) + ":" + std::to_string(line);
}

}  // namespace

TEST_CASE("a loss of the weights outside, not of the parameter", "[ops][grad]") {
  on_devices([](const Grid& mesh) {
    const Weights w = weights(mesh);
    const auto says = {std::string_view(
        "the weight `a` comes from outside of the function that value_and_grad differentiates, so its gradient would "
        "miss this use; use the function's parameter, or `stop_gradient` of the weight if no gradient is meant, as of "
        "a "
        "copy of the weights, which shares their tensors")};
    expect_says(differentiate(
                    mesh, [&](const Weights&) -> Loss { return sum(w.a); }, w),
                says);
    // Part of it comes from the parameter: the gradient would be wrong, not zero.
    expect_says(differentiate(
                    mesh, [&](const Weights& p) -> Loss { return sum(p.a * p.b * w.a); }, w),
                says);
    const auto gathers = [&](const Weights& p) -> Loss {
      return sum(p.b * shard<"M -> M/d">(all_gather<"M/d -> M">(w.a)));
    };
    expect_says(differentiate(mesh, gathers, w), {"all_gather<`M/d -> M`>", "the weight `a` comes from outside"});
    const Layers deep{{w, weights(mesh, 3)}};
    expect_says(differentiate(
                    mesh, [&](const Layers& p) -> Loss { return sum(p.layers[0].a * deep.layers[1].b); }, deep),
                {"the weight `layers/1/b` comes from outside"});
    expect_says(differentiate(
                    mesh, [&](const Tensor<f32, "M/d">& p) -> Loss { return sum(p * w.a); }, w.a),
                {"the weight comes from outside"});

    // Meant, it is said; and before and after the call the weights are like any tensor.
    const auto meant = [&](const Weights& p) -> Loss { return sum(p.a * p.b * stop_gradient(w.a)); };
    const auto [loss, grads] = value_and_grad(mesh, meant, w);
    expect_equal(values_of<f32>((grads.b).value()->data()), values_of<f32>((w.a * w.a).value()->data()));
    static_cast<void>(sum(w.a * w.b));
    // A copy of a tree has its tensors, until an update.
    const auto beside = [](const Weights& p, const Weights& x) -> Loss { return sum(p.a * p.b * x.a); };
    const auto frozen = [&](const Weights& p, const Weights& x) -> Loss { return beside(p, stop_gradient(x)); };
    expect_says([&] { static_cast<void>(value_and_grad(mesh, beside, w, Weights(w))); }, says);
    const auto by_copy = value_and_grad(mesh, frozen, w, Weights(w)).second;
    expect_equal(values_of<f32>(by_copy.b.value()->data()), values_of<f32>((w.a * w.a).value()->data()));

    // A checkpointed function gets them as an argument, and an op that copies its operands sees through the copy.
    const auto twice = [](const Tensor<f32, "M/d">& x) { return x * 2.0; };
    const auto passed = [&](const Weights& p) -> Loss {
      return sum(p.b * explicit_activation_checkpointing(twice)(w.a) * p.a);
    };
    expect_says(differentiate(mesh, passed, w), says);
  });
}

TEST_CASE("a weight that the loss does not depend on", "[ops][grad]") {
  on_devices([](const Grid& mesh) {
    const Weights w = weights(mesh);
    const int line = __LINE__ + 1;
    const auto ignores = [](const Weights& p) -> Loss { return sum(p.b); };
    expect_says(differentiate(mesh, ignores, w),
                {"value_and_grad: the loss, which is the result of sum<`M/d -> +d`> at " + here(line) +
                 ", does not depend on the weight `a`, so its gradient would be zero; use the function's parameter, "
                 "leave the weight out, or write value_and_grad(mesh, allow_unused(f), ...) if zeros are meant"});
    const auto [loss, grads] = value_and_grad(mesh, allow_unused(ignores), w);
    expect_equal(values_of<f32>(grads.a.value()->data()), std::vector<f32>(grads.a.span().size(), 0.0F));
    expect_equal(values_of<f32>(grads.b.value()->data()), std::vector<f32>(grads.b.span().size(), 1.0F));

    // So does one that goes into a checkpointed function, which does nothing with it.
    const auto inside = [](const Weights& p) { return p.b * 2.0; };
    const auto recomputed = [&](const Weights& p) -> Loss { return sum(explicit_activation_checkpointing(inside)(p)); };
    expect_says(differentiate(mesh, recomputed, w), {"does not depend on the weight `a`"});

    // stop_gradient says it for a frozen weight, also where the function is recomputed, and of what was made of it.
    const auto frozen = [](const Weights& p) { return p.b * stop_gradient(tanh(p.a)); };
    const auto gradient_of = [&](const auto& f) {
      return values_of<f32>(value_and_grad(mesh, f, w).second.b.value()->data());
    };
    const auto expected = values_of<f32>(tanh(w.a).value()->data());
    expect_equal(gradient_of([&](const Weights& p) -> Loss { return sum(frozen(p)); }), expected);
    expect_equal(
        gradient_of([&](const Weights& p) -> Loss { return sum(explicit_activation_checkpointing(frozen)(p)); }),
        expected);

    // Of the whole loss, it would make all gradients zero.
    const int whole = __LINE__ + 1;
    const auto stopped = [](const Weights& p) -> Loss { return stop_gradient(sum(p.a * p.b)); };
    expect_says(differentiate(mesh, stopped, w),
                {"value_and_grad: the loss, which is the result of sum<`M/d -> +d`> at " + here(whole) +
                 ", depends on the weights through stop_gradient alone, so all gradients would be zero; take "
                 "stop_gradient of a part of it, or write value_and_grad(mesh, allow_unused(f), ...) if zeros are "
                 "meant ("});
    const auto frozen_alone = [](const Weights& p) -> Loss { return sum(stop_gradient(p.a) * stop_gradient(p.b)); };
    expect_says(differentiate(mesh, frozen_alone, w), {"depends on the weights through stop_gradient alone"});
    const auto zero = value_and_grad(mesh, allow_unused(stopped), w).second;
    expect_equal(values_of<f32>(zero.a.value()->data()), std::vector<f32>(zero.a.span().size(), 0.0F));
    struct NoWeights {
      std::optional<Tensor<f32, "M/d">> bias;
    };
    const auto constant = [](const NoWeights&, const Weights& x) -> Loss { return sum(x.a * x.b); };
    static_cast<void>(value_and_grad(mesh, constant, NoWeights{}, w));
  });
}

TEST_CASE("a tensor that an earlier call of value_and_grad has computed", "[ops][grad]") {
  on_devices([](const Grid& mesh) {
    using A = Tensor<f32, "M/d">;
    const Weights w = weights(mesh);
    std::optional<A> kept;
    const int line = __LINE__ + 2;
    const auto keeps = [&](const Weights& p) -> Loss {
      kept = tanh(p.a);
      return sum(*kept * p.b);
    };
    const auto takes = [&](const Weights& p) -> Loss { return sum(p.a * p.b * *kept); };
    const auto keep = [&] { static_cast<void>(value_and_grad(mesh, keeps, w)); };
    keep();
    expect_says(
        differentiate(mesh, takes, w),
        {"operator* at " + here(line + 3) + ": it takes the result of tanh at " + here(line) +
         " from an earlier call of value_and_grad, or from another microbatch of a pipeline, so its gradient would be "
         "lost; compute it again, or take `stop_gradient` of it ("});
    // What the program computes of it between the calls is one too, and so is a parameter of that call.
    kept = *kept * 2.0;
    expect_says(differentiate(mesh, takes, w), {": it takes the result of operator* at ", " from an earlier call"});
    const auto keeps_weight = [&](const Weights& p) -> Loss {
      kept = p.a;
      return sum(p.a * p.b);
    };
    static_cast<void>(value_and_grad(mesh, keeps_weight, w));
    expect_says(differentiate(mesh, takes, w), {": it takes a weight from an earlier call"});
    // As an argument, of a checkpointed function and of a call inside, too.
    keep();
    const auto beside = [](const Weights& p, const A& x) -> Loss { return sum(p.a * p.b * x); };
    expect_says(differentiate(mesh, beside, w, *kept), {"it takes the result of tanh at "});
    const auto recomputed = [&](const Weights& p) -> Loss {
      const auto f = [](const A& x, const A& y) { return x * y; };
      return sum(explicit_activation_checkpointing(f)(p.a, *kept) * p.b);
    };
    expect_says(differentiate(mesh, recomputed, w),
                {"explicit_activation_checkpointing: it takes the result of tanh at "});
    const auto nested = [&](const Weights& p) -> Loss {
      const auto inner = [](const Weights& q) -> Loss { return sum(q.a * q.b * q.b); };
      return sum(p.a * value_and_grad(mesh, inner, Weights{*kept, p.b}).second.a);
    };
    expect_says(differentiate(mesh, nested, w), {"value_and_grad: it takes the result of tanh at "});

    // Outside of such functions it is a tensor like any other, and so it is in them without a gradient.
    const auto expected = values_of<f32>((w.b * tanh(w.a)).value()->data());
    const auto is_expected = [&](const auto& f, const auto& weights, const auto&... args) {
      const auto [loss, grads] = value_and_grad(mesh, f, weights, args...);
      expect_equal(values_of<f32>(grads.a.value()->data()), expected);
    };
    expect_equal(values_of<f32>((w.b * *kept).value()->data()), expected);
    is_expected([&](const Weights& p) -> Loss { return sum(p.b * (p.a * stop_gradient(*kept))); }, w);
    is_expected([&](const Weights& p, const A& x) -> Loss { return sum(p.b * (p.a * x)); }, w, stop_gradient(*kept));
    // As a weight of the next call, it is a leaf of that.
    const auto by_kept = value_and_grad(mesh, beside, Weights{*kept, w.b}, w.a).second;
    expect_equal(values_of<f32>(by_kept.b.value()->data()), values_of<f32>((tanh(w.a) * w.a).value()->data()));
    // An auxiliary result has no tape.
    const auto returns = [](const Weights& p, const A& state) {
      const auto next = tanh(p.a) * state;
      return std::pair(Loss(sum(next * p.b)), next);
    };
    A state = ones<f32, "M/d">(mesh, {{"M", 4}});
    for (int step = 0; step < 3; ++step)
      std::tie(std::ignore, std::ignore, state) = value_and_grad(mesh, returns, w, state);
    const auto once = tanh(w.a);
    expect_equal(values_of<f32>(state.value()->data()), values_of<f32>((once * (once * (once * 1.0))).value()->data()));
  });
}

TEST_CASE("a gradient within a differentiated function", "[ops][grad]") {
  on_devices([](const Grid& mesh) {
    const Weights w = weights(mesh);
    const auto inner = [](const Weights& q) -> Loss { return sum(q.a * q.b); };
    const auto nested = [&](const Weights& p) -> Loss {
      const auto [loss, grads] = value_and_grad(mesh, inner, p);
      return sum(p.b * grads.a);
    };
    // Of sum(b^2) by b: the gradient by a, which is b, is a function of b alone.
    const auto [outer, second] = value_and_grad(mesh, allow_unused(nested), w);
    expect_equal(values_of<f32>(second.a.value()->data()), std::vector<f32>(second.a.span().size(), 0.0F));
    expect_equal(values_of<f32>(second.b.value()->data()), values_of<f32>((w.b * 2.0).value()->data()));
    expect_says(differentiate(mesh, nested, w), {"does not depend on the weight `a`"});
    // The inner pass would take the outer tape apart.
    const auto captured = [&](const Weights& p) -> Loss {
      const auto with = [&](const Weights& q) -> Loss { return sum(q.a * q.b * p.a); };
      const auto [loss, grads] = value_and_grad(mesh, with, Weights{stop_gradient(p.a), stop_gradient(p.b)});
      return sum(p.b * grads.a);
    };
    expect_says(differentiate(mesh, captured, w), {"value_and_grad: its function uses a weight from outside"});

    // In the place of the parameter, an outer weight is the mistake that it is in a call that is not nested.
    const auto with_outer = [&](const auto& own) {
      return allow_unused([&, own](const Weights& p) -> Loss {
        const auto x = own(p.a);
        const auto with = [&](const Weights& q) -> Loss { return sum(q.a * q.b * x); };
        return sum(p.b * value_and_grad(mesh, with, p).second.a);  // the gradient by q.a is q.b * x
      });
    };
    using A = Tensor<f32, "M/d">;
    expect_says(differentiate(mesh, with_outer([](const A& a) { return a; }), w),
                {"the weight `a` comes from outside of the function that value_and_grad differentiates",
                 ", or `w * 1.0` from before the call if only the gradient of the function around the call is meant"});
    const auto deeper = [&](const Weights& p) -> Loss {
      const auto middle = [&](const Weights& q) -> Loss {
        const auto with = [&](const Weights& r) -> Loss { return sum(r.a * r.b * p.a); };
        return sum(q.b * value_and_grad(mesh, with, q).second.a);
      };
      return sum(p.b * value_and_grad(mesh, middle, p).second.b);
    };
    expect_says(differentiate(mesh, deeper, w), {"the weight `a` comes from outside"});
    const auto kept = value_and_grad(mesh, with_outer([](const A& a) { return a * 1.0; }), w).second;
    expect_equal(values_of<f32>(kept.a.value()->data()), values_of<f32>((w.b * w.b).value()->data()));
    const auto stopped = value_and_grad(mesh, with_outer([](const A& a) { return stop_gradient(a); }), w).second;
    expect_equal(values_of<f32>(stopped.a.value()->data()), std::vector<f32>(stopped.a.span().size(), 0.0F));
    expect_equal(values_of<f32>(stopped.b.value()->data()), values_of<f32>((w.b * w.a * 2.0).value()->data()));

    // With constants it is a number like any other, and leaves the outer tape alone.
    const auto constant = [&](const Weights& p) -> Loss {
      const auto [loss, grads] = value_and_grad(mesh, inner, Weights{stop_gradient(p.a), stop_gradient(p.b)});
      return sum(p.a * p.b * grads.a);  // the gradient by q.a is q.b
    };
    const auto [loss, grads] = value_and_grad(mesh, constant, w);
    expect_equal(values_of<f32>(grads.a.value()->data()), values_of<f32>((w.b * w.b).value()->data()));
    expect_equal(values_of<f32>(grads.b.value()->data()), values_of<f32>((w.a * w.b).value()->data()));
    // After an error the next call is not taken for one that is nested.
    const auto [value, after] = value_and_grad(mesh, inner, w);
    expect(after.a.span().size() == w.b.span().size(), "a call after errors");
  });
}

TEST_CASE("results in addition to the loss", "[ops][grad]") {
  on_devices([](const Grid& mesh) {
    const Weights w = weights(mesh);
    const auto plain = [](const Weights& p) -> Loss { return sum(tanh(p.a) * p.b); };
    const auto with = [&](const Weights& p) {
      const auto hidden = tanh(p.a);
      return std::pair(Loss(sum(hidden * p.b)), std::tuple(hidden, Weights{hidden, p.b}, 3));
    };
    const auto [loss, grads] = value_and_grad(mesh, plain, w);
    const auto [same_loss, same_grads, besides] = value_and_grad(mesh, with, w);
    expect_equal(values_of<f32>(same_loss.value()->data()), values_of<f32>(loss.value()->data()));
    expect_equal(values_of<f32>(same_grads.a.value()->data()), values_of<f32>(grads.a.value()->data()));
    const auto& [hidden, tree, number] = besides;
    expect_equal(values_of<f32>(hidden.value()->data()), values_of<f32>(tanh(w.a).value()->data()));
    expect(!hidden.value()->slot && !tree.a.value()->slot && !tree.b.value()->slot, "nothing of the tape is left");
    expect(number == 3, "a number");
    const auto one = [](const Weights& p) { return std::pair(Loss(sum(p.a * p.b)), p.a * 2.0); };
    const auto [l, g, twice] = value_and_grad(mesh, one, w);
    static_assert(std::is_same_v<std::remove_const_t<decltype(twice)>, Tensor<f32, "M/d">>);
    expect(!twice.value()->slot, "a tensor alone");
  });
}

TEST_CASE("a name has one size in all that value_and_grad runs", "[ops][grad]") {
  on_devices([](const Grid& mesh) {
    const Weights w = weights(mesh);
    const std::string rule =
        ", and a name has one size within value_and_grad; `rename` one of the two, or open a `Scope` around the part "
        "that means another size";
    const auto other = [&](const Weights& p) -> Loss {
      return sum(p.a * p.b) + sum(zeros<f32, "M/d">(mesh, {{"M", 8}}));
    };
    expect_says(differentiate(mesh, other, w), {"zeros<`M/d`>", "dim `M` is 8, but 4 in the weight `a`" + rule});
    // Two ops of the function, neither of which sees the other's operand.
    const int line = __LINE__ + 2;
    const auto unary = [&](const Weights& p) -> Loss {
      const auto x = rename<"M -> N">(p.a);
      return sum(x) + sum(p.b) + sum(rename<"K -> N">(zeros<f32, "K/d">(mesh, {{"K", 2}})));
    };
    expect_says(differentiate(mesh, unary, w),
                {"rename<`K -> N`>", "dim `N` is 2, but 4 in rename<`M -> N`> at " + here(line) + rule});
    const auto of_argument = [](const Weights& p, const Tensor<f32, "M/d">& x) -> Loss {
      return sum(p.a * p.b) + sum(x);
    };
    expect_says(differentiate(mesh, of_argument, w, zeros<f32, "M/d">(mesh, {{"M", 8}})),
                {"value_and_grad: dim `M` is 8 in argument 1, but 4 in the weight `a`" + rule});

    // A program that means it says so; the backward pass then meets both sizes.
    const auto scoped = [&](const Weights& p) -> Loss {
      const auto first = sum(p.a * p.b);
      const auto wide = split<"M/d -> N/d K">(p.a, {{"K", 2}});
      const Scope own(mesh);
      return first + sum(rename<"N -> M">(wide) * 3.0);  // M is 2 here
    };
    const auto [loss, grads] = value_and_grad(mesh, scoped, w);
    expect_equal(values_of<f32>(grads.a.value()->data()), values_of<f32>((w.b + 3.0).value()->data()));
    // Calls of their own may differ.
    const auto single = [](const Tensor<f32, "M/d">& p) -> Loss { return sum(p * p); };
    static_cast<void>(value_and_grad(mesh, single, w.a));
    static_cast<void>(value_and_grad(mesh, single, zeros<f32, "M/d">(mesh, {{"M", 8}})));
  });
}

TEST_CASE("a recomputed function finds the sizes of its forward pass", "[ops][grad]") {
  on_devices([](const Grid& mesh) {
    const Weights w = weights(mesh);
    const auto layer = [](const Tensor<f32, "M/d">& x, const Grid& m) { return x * ones<f32, "M/d">(m, {}); };
    const auto f = [&](const Weights& p) -> Loss {
      return sum(explicit_activation_checkpointing(layer)(p.a, mesh) * p.b);
    };
    const auto [loss, grads] = value_and_grad(mesh, f, w);
    expect_equal(values_of<f32>(grads.a.value()->data()), values_of<f32>(w.b.value()->data()));
  });
}

TEST_CASE("a name has one size in all that spmd runs", "[ops][grad]") {
  on_devices([](const Grid& mesh) {
    const auto add = [](const Tensor<f32, "M/d">& a, const Tensor<f32, "M">& b) -> Loss {
      return sum(a) + to_partial<" -> +d">(sum(b));
    };
    expect_says([&] { static_cast<void>(spmd(mesh, add)(HostArray<f32>({4}), HostArray<f32>({8}))); },
                {"place<`M", "and a name has one size within spmd"});
    // What value_and_grad runs inside belongs to it.
    const auto inside = [&](const Tensor<f32, "M/d">& a) -> Loss {
      return value_and_grad(
                 mesh, [](const Tensor<f32, "M/d">& p) -> Loss { return sum(p); }, a)
                 .first +
             value_and_grad(
                 mesh, [](const Tensor<f32, "M/d">& p) -> Loss { return sum(p); }, zeros<f32, "M/d">(mesh, {{"M", 8}}))
                 .first;
    };
    expect_says([&] { static_cast<void>(spmd(mesh, inside)(HostArray<f32>({4}))); },
                {"dim `M` is 8", "but 4 in place<`M/d`>", "within spmd"});
    expect(spmd(mesh, add)(HostArray<f32>({4}), HostArray<f32>({4})).data[0] == 0, "one size");
  });
}

namespace {

using X = Tensor<f32, "B/d M">;
struct Dense {
  Tensor<f32, "M/d"> up;
  Tensor<f32, "M"> gain;
};
struct Experts {
  Array<"experts", Tensor<f32, "M/d">> up;
};
using Kinds = std::variant<Dense, Experts>;
struct Block {
  std::optional<Tensor<f32, "M">> bias;
  Kinds mlp;
};
/// The same with an Array of 0 or 1 entries for each tree that may be missing.
struct BlockOfArrays {
  Array<"bias", Tensor<f32, "M">> bias;
  Array<"dense", Dense> dense;
  Array<"experts", Experts> experts;
};

X feed_forward(const X& x, const Dense& w) {
  return tanh(x * all_gather<"M/d -> M">(w.up)) * w.gain;
}
X feed_forward(const X& x, const Experts& w) {
  X sum = x;
  for (const auto& up : w.up) sum = sum + tanh(x * all_gather<"M/d -> M">(up));
  return sum;
}
struct FeedForward {
  X operator()(const X& x, const Kinds& kinds) const {
    return std::visit([&](const auto& w) { return feed_forward(x, w); }, kinds);
  }
};
X layer(const X& x, const Block& w, bool recompute) {
  const X y = recompute ? explicit_activation_checkpointing(FeedForward())(x, w.mlp) : FeedForward()(x, w.mlp);
  return w.bias ? y + *w.bias : y;
}
X layer(const X& x, const BlockOfArrays& w, bool /*recompute*/) {
  X y = x;
  for (const auto& dense : w.dense) y = feed_forward(y, dense);
  for (const auto& experts : w.experts) y = feed_forward(y, experts);
  for (const auto& bias : w.bias) y = y + bias;
  return y;
}
template <class B>
Loss loss_of(const Array<"layers", B>& layers, const X& x, bool recompute) {
  X y = x;
  for (const B& block : layers) y = layer(y, block, recompute);
  return sum(square(y));
}
/// The elements of all leaves on this device, one leaf behind the other.
template <class Tree>
std::vector<f32> elements_of(const Tree& tree) {
  std::vector<f32> all;
  for_each_leaf(
      [&](std::string_view, const auto& leaf) {
        const auto values = values_of<f32>(leaf.value()->data());
        all.insert(all.end(), values.begin(), values.end());
      },
      tree);
  return all;
}

}  // namespace

TEST_CASE("a gradient by what std::optional and std::variant hold is that by Arrays", "[ops][grad]") {
  on_meshes({"d=1", "d=2", "d=4"}, [](const DevicePtr& device) {
    const Grid mesh(device);
    std::uint64_t stream = 0;
    const auto whole = [&] { return random_normal<f32, "M">(mesh, {{"M", 8}}, {7, ++stream}); };
    const auto part = [&] { return random_normal<f32, "M/d">(mesh, {{"M", 8}}, {7, ++stream}); };
    const Dense dense{part(), whole()};
    const Experts experts{{part(), part()}};
    const auto bias = whole();
    const Array<"layers", Block> w{{std::nullopt, dense}, {bias, experts}};
    const Array<"layers", BlockOfArrays> listed{{{}, {dense}, {}}, {{bias}, {}, {experts}}};
    const X x = random_normal<f32, "B/d M">(mesh, {{"B", 4}, {"M", 8}}, {8, 0});
    const auto [loss, grads] = value_and_grad(mesh, loss_of<Block>, w, x, false);
    const auto [expected_loss, expected] = value_and_grad(mesh, loss_of<BlockOfArrays>, listed, x, false);
    expect_equal(elements_of(loss), elements_of(expected_loss));
    expect_equal(elements_of(grads), elements_of(expected));
    expect(
        leaf_names(grads) == std::vector<std::string>{"0/mlp/up", "0/mlp/gain", "1/bias", "1/mlp/up/0", "1/mlp/up/1"},
        "names");
    const auto recomputed = value_and_grad(mesh, loss_of<Block>, w, x, true);
    expect_equal(elements_of(recomputed.second), elements_of(expected));
    const auto reduced = reduce_gradients(mesh, grads);
    static_assert(std::is_same_v<std::remove_const_t<decltype(reduced)>, Array<"layers", Block>>);
    expect_equal(elements_of(reduced), elements_of(reduce_gradients(mesh, expected)));

    // By a part, which is a std::variant itself, with a std::optional as an argument and as a result in addition to the
    // loss.
    const auto of_part = [](const Kinds& kinds, const X& y, const std::optional<Tensor<f32, "M">>& b) {
      const X z = FeedForward()(y, kinds);
      return std::pair(sum(square(b ? z + *b : z)), b);
    };
    const auto [l, by_part, back] = value_and_grad(mesh, of_part, Kinds(dense), x, std::optional(bias));
    static_assert(std::is_same_v<std::remove_cvref_t<decltype(by_part)>, std::variant<Gradient<Grid, Dense>, Experts>>);
    expect(back.has_value(), "the result in addition to the loss");
    expect_says(differentiate(mesh, of_part, Kinds(dense), x, std::optional<Tensor<f32, "M">>()), {"no error"});
    expect_says(
        [&] {
          static_cast<void>(
              map_tree([](const auto& a, const auto&) { return a; }, w, Array<"layers", Block>{w[1], w[1]}));
        },
        {"map_tree: trees of different structure: the std::optional `0/bias` has no value in the first tree and a "
         "value "
         "in another"});
    // Frozen, it is still an error to take the loss of it by surprise.
    const auto frozen = [&](const Kinds& kinds, const Kinds& others) {
      return sum(square(FeedForward()(FeedForward()(x, kinds), others)));
    };
    expect_says(differentiate(mesh, frozen, Kinds(dense), Kinds(dense)), {"the weight `up` comes from outside"});
    expect_says(differentiate(mesh, frozen, Kinds(dense), stop_gradient(Kinds(dense))), {"no error"});
  });
}
