// scan_layers, fori, scan and unstack: the bits of the same loop written by hand, forward and in gradients.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "random_bits.hpp"
#include "shardlib/comm/dry.hpp"
#include "shardlib/runtime/observe.hpp"
#include "shardlib/shardlib.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using Grid = Mesh<"d t">;
using Loss = Tensor<f32, "+d +t">;

template <dtype C>
using X = Tensor<C, "B/d M">;
template <dtype C>
struct Layer {
  Tensor<C, "M/d H/t"> in;
  Tensor<C, "H/t M/d"> out;
};
template <dtype C>
using Layers = Array<"layers", Layer<C>>;
template <dtype C>
struct Stacked {
  Tensor<C, "Y M/d H/t"> in;
  Tensor<C, "Y H/t M/d"> out;
};
template <dtype C>
struct Gathered {
  Tensor<C, "M H/t"> in;
  Tensor<C, "H/t M"> out;
};

template <dtype C>
Gathered<C> gather(const Layer<C>& w) {
  return {all_gather<"M/d H/t -> M H/t">(w.in), all_gather<"H/t M/d -> H/t M">(w.out)};
}
template <dtype C>
X<C> layer_of_gathered(const X<C>& x, const Gathered<C>& w, const X<C>& bias) {
  const auto hidden = save_for_backward(einsum_unreduced<"B/d M, M H/t -> B/d H/t">(x, w.in));
  return x + bias +
         all_reduce<"B/d M +t -> B/d M", f32>(einsum_unreduced<"B/d H/t, H/t M -> B/d M +t">(tanh(hidden), w.out));
}
template <dtype C>
X<C> layer(const X<C>& x, const Layer<C>& w, const X<C>& bias) {
  return layer_of_gathered<C>(x, gather(w), bias);
}
template <class T>
Loss mean_square(const T& x) {
  return to_partial<"+d -> +d +t">(sum(square(cast<f32>(x))));
}

// All dims are padded.
constexpr std::int64_t width = 48, hidden_width = 24;
template <dtype C>
X<C> input(const Grid& mesh, std::uint64_t stream = 0) {
  const std::int64_t rows = 4 * mesh.size("d");
  return random_normal<C, "B/d M">(mesh, {{"B", rows - 1, rows}, {"M", width - 3, width}}, {4, stream});
}
template <dtype C>
Layers<C> listed(const Grid& mesh, std::int64_t count, std::int64_t h = hidden_width) {
  const Sizes sizes{{"M", width - 3, width}, {"H", h - 1, h}};
  Layers<C> layers;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto stream = static_cast<std::uint64_t>(i);
    layers.push_back({random_normal<C, "M/d H/t">(mesh, sizes, {2, stream}) * 0.125,
                      random_normal<C, "H/t M/d">(mesh, sizes, {3, stream}) * 0.125});
  }
  return layers;
}
template <dtype C>
Stacked<C> stacked(const Layers<C>& layers) {
  std::vector<Tensor<C, "M/d H/t">> in;
  std::vector<Tensor<C, "H/t M/d">> out;
  for (const auto& one : layers) in.push_back(one.in), out.push_back(one.out);
  return {stack<"Y">(in), stack<"Y">(out)};
}

template <class A, class B>
void expect_same(const A& a, const B& b, const std::string& what) {
  expect_same_bits(a.first, b.first, what + ", the loss");
  expect_same_bits(a.second, b.second, what + ", the gradient");
}

using Calls = std::map<std::string, std::int64_t>;
template <class F>
Calls calls(const Grid& mesh, const F& f) {
  auto& counts = detail::program_state(mesh.device()).counts;
  counts.clear();
  f();
  Calls all;
  for (const auto& [name, count] : counts)
    if (name != std::string_view("unstack") && name != std::string_view("stack")) all[name] = count.calls;
  return all;
}

const std::vector<std::string> meshes{"d=1,t=1", "d=2,t=1", "d=1,t=2", "d=2,t=2", "d=4,t=1"};
const std::vector<std::string> policies{"none", "marked", "dots", "everything", "einsum_unreduced,all_gather"};

/// The loops of this file, for the function without and with a policy.
template <dtype C>
struct Losses {
  static Loss by_hand(const Layers<C>& w, const X<C>& start, const X<C>& bias) {
    X<C> x = start;
    for (const auto& one : w) x = layer<C>(x, one, bias);
    return mean_square(x);
  }
  static Loss by_hand_again(const Layers<C>& w, const X<C>& start, const X<C>& bias, const std::string& policy) {
    X<C> x = start;
    for (const auto& one : w) x = explicit_activation_checkpointing(layer<C>, {policy})(x, one, bias);
    return mean_square(x);
  }
  static Loss plain(const Layers<C>& w, const X<C>& x, const X<C>& bias) {
    return mean_square(scan_layers(layer<C>, w, x, bias));
  }
  static Loss again(const Layers<C>& w, const X<C>& x, const X<C>& bias, const std::string& policy) {
    return mean_square(scan_layers(layer<C>, w, x, {.recompute = {policy}}, bias));
  }
  static Loss of_stacked(const Stacked<C>& w, const X<C>& x, const X<C>& bias) {
    return mean_square(scan_layers<"Y">(layer<C>, w, x, bias));
  }
  static Loss of_stacked_again(const Stacked<C>& w, const X<C>& x, const X<C>& bias, const std::string& policy) {
    return mean_square(scan_layers<"Y">(layer<C>, w, x, {.recompute = {policy}}, bias));
  }
  static Loss ahead(const Layers<C>& w, const X<C>& x, const X<C>& bias, const std::string& policy) {
    return mean_square(
        scan_layers(with_prefetch(gather<C>, layer_of_gathered<C>), w, x, {.recompute = {policy}}, bias));
  }
  static Loss ahead_stacked(const Stacked<C>& w, const X<C>& x, const X<C>& bias, const std::string& policy) {
    return mean_square(
        scan_layers<"Y">(with_prefetch(gather<C>, layer_of_gathered<C>), w, x, {.recompute = {policy}}, bias));
  }
};

template <dtype C>
void expect_loops(const Grid& mesh, std::int64_t count, std::int64_t h) {
  using L = Losses<C>;
  const Layers<C> w = listed<C>(mesh, count, h);
  const Stacked<C> s = stacked(w);
  const X<C> x = input<C>(mesh), bias = input<C>(mesh, 1);
  std::pair<Loss, Layers<C>> expected, found;
  std::pair<Loss, Stacked<C>> of_stacked;
  const Calls by_hand = calls(mesh, [&] { expected = value_and_grad(mesh, L::by_hand, w, x, bias); });
  const std::pair stacked_gradient(expected.first, stacked(expected.second));
  expect(calls(mesh, [&] { found = value_and_grad(mesh, L::plain, w, x, bias); }) == by_hand, "ops of scan_layers");
  expect_same(expected, found, "listed");
  expect(calls(mesh, [&] { of_stacked = value_and_grad(mesh, L::of_stacked, s, x, bias); }) == by_hand,
         "ops of stacked layers");
  expect_same(stacked_gradient, of_stacked, "stacked");
  for (const std::string& policy : policies) {
    const Calls again = calls(mesh, [&] { found = value_and_grad(mesh, L::by_hand_again, w, x, bias, policy); });
    expect((again == by_hand) == (policy == "none"), policy + " by hand");
    expect_same(expected, found, policy + " by hand");
    expect(calls(mesh, [&] { found = value_and_grad(mesh, L::again, w, x, bias, policy); }) == again, policy);
    expect_same(expected, found, policy);
    expect(calls(mesh, [&] { of_stacked = value_and_grad(mesh, L::of_stacked_again, s, x, bias, policy); }) == again,
           policy + ", stacked");
    expect_same(stacked_gradient, of_stacked, policy + ", stacked");
    if (policy.find("all_gather") != std::string::npos) continue;  // the backward pass gathers nothing again
    expect_same(expected, value_and_grad(mesh, L::ahead, w, x, bias, policy), policy + ", prefetched");
    expect_same(stacked_gradient, value_and_grad(mesh, L::ahead_stacked, s, x, bias, policy),
                policy + ", stacked and prefetched");
    expect(detail::program_state(mesh.device()).pending.empty(), "something is under way behind the end");
  }
  // The stacked dim, too.
  const auto padded = [&](const auto& x) {
    return place<std::remove_cvref_t<decltype(x)>>(mesh, fetch(x),
                                                   {{"Y", count, count + 2}, {"M", width - 3, width}, {"H", h - 1, h}});
  };
  of_stacked = value_and_grad(mesh, L::ahead_stacked, Stacked<C>{padded(s.in), padded(s.out)}, x, bias, "dots");
  const Stacked<C>& due = stacked_gradient.second;
  expect_same(std::pair(expected.first, Stacked<C>{padded(due.in), padded(due.out)}), of_stacked,
              "a padded number of layers");
}

}  // namespace

TEST_CASE("scan_layers has the bits and the ops of a loop by hand, listed and stacked", "[ops][loops]") {
  on_meshes(meshes, [](const Grid& mesh) {
    // Parts of the one size are views of what is stacked, those of the other are copies.
    for (const std::int64_t h : {hidden_width, std::int64_t{6}})
      for (const std::int64_t count : {1, 3}) expect_loops<f32>(mesh, count, h);
    expect_loops<bf16>(mesh, 3, hidden_width);
  });
}

TEST_CASE("scan_layers of no layers returns its carry", "[ops][loops]") {
  on_mesh("d=2,t=2", [](const Grid& mesh) {
    const auto x = input<f32>(mesh);
    const Layers<f32> none;
    expect_same_bits(x, scan_layers(layer<f32>, none, x, x), "no layers");
    expect_same_bits(x, scan_layers(layer<f32>, none, x, {.recompute = {"dots"}}, x), "no layers, recompute");
    expect_same_bits(x, scan_layers(with_prefetch(gather<f32>, layer_of_gathered<f32>), none, x, x), "prefetch");
    const Sizes sizes{{"Y", 0}, {"M", width - 3, width}, {"H", hidden_width - 1, hidden_width}};
    const Stacked<f32> stacked{zeros<f32, "Y M/d H/t">(mesh, sizes), zeros<f32, "Y H/t M/d">(mesh, sizes)};
    expect_same_bits(x, scan_layers<"Y">(layer<f32>, stacked, x, x), "stacked");
    expect_same_bits(x,
                     fori(
                         0, [](std::int64_t, const X<f32>& h) { return h + h; }, x),
                     "fori");
  });
}

namespace {

/// Copies between layers and their gathered weights under way, when tanh runs.
std::vector<std::size_t> under_way(const DevicePtr& device, const std::function<void()>& f) {
  std::vector<std::size_t> gathers;
  const detail::Observing watch(device, [&](const detail::OpReport& ran) {
    if (std::string_view(ran.op.name) != "tanh") return;
    const auto& pending = detail::program_state(device).pending;
    gathers.push_back(static_cast<std::size_t>(
        std::count_if(pending.begin(), pending.end(), [](const auto& one) { return bool(one->gathered); })));
  });
  f();
  return gathers;
}

}  // namespace

TEST_CASE("with_prefetch gathers one layer ahead, forward and backward", "[ops][loops][prefetch]") {
  on_mesh("d=2,t=1", [](const Grid& mesh) {
    const auto w = listed<f32>(mesh, 4);
    const auto s = stacked(w);
    const auto x = input<f32>(mesh);
    const auto step = [&](const auto& f, const auto& weights, const char* policy) {
      return under_way(mesh.device(), [&] { static_cast<void>(value_and_grad(mesh, f, weights, x, x, policy)); });
    };
    const auto ahead = [](const auto& v, const auto& y, const auto& bias, const char* policy) {
      return Losses<f32>::ahead(v, y, bias, policy);
    };
    const auto ahead_stacked = [](const auto& v, const auto& y, const auto& bias, const char* policy) {
      return Losses<f32>::ahead_stacked(v, y, bias, policy);
    };
    // Forward, the two weights of the next layer; backward, those of the layer before. Nothing is differentiated before
    // the first layer, so that no hook stands there.
    expect_equal(step(ahead, w, "everything"), {2, 2, 2, 0, 2, 2, 2, 0});
    expect_equal(step(ahead_stacked, s, "everything"), {2, 2, 2, 0, 2, 2, 2, 0});
    // If all is kept, the backward pass gathers nothing.
    expect_equal(step(ahead, w, "none"), {2, 2, 2, 0});
  });
}

TEST_CASE("scan_layers with recompute saves less", "[ops][loops][recompute]") {
  on_mesh("d=2,t=2", [](const Grid& mesh) {
    const auto w = listed<f32>(mesh, 3);
    const auto s = stacked(w);
    const auto x = input<f32>(mesh);
    const auto total = [](const std::vector<SavedResidual>& residuals) {
      std::size_t bytes = 0;
      for (const auto& one : residuals) bytes += one.bytes;
      return bytes;
    };
    using L = Losses<f32>;
    std::map<std::string, std::size_t> bytes, of_stacked;
    for (const std::string& policy : policies) {
      bytes[policy] = total(saved_residuals(L::again, w, x, x, policy));
      of_stacked[policy] = total(saved_residuals(L::of_stacked_again, s, x, x, policy));
      expect(bytes[policy] == total(saved_residuals(L::by_hand_again, w, x, x, policy)), policy + ": as by hand");
    }
    expect(bytes["none"] == total(saved_residuals(L::by_hand, w, x, x)), "none is the plain loop");
    expect(bytes["everything"] < bytes["marked"] && bytes["marked"] < bytes["dots"] && bytes["dots"] < bytes["none"],
           "everything " + show(bytes["everything"]) + ", marked " + show(bytes["marked"]) + ", dots " +
               show(bytes["dots"]) + ", none " + show(bytes["none"]));
    expect(of_stacked == bytes, "stacked layers keep as much");
    // Parts that are views take no memory in addition to what is stacked.
    const std::size_t weights = (s.in.span().size_bytes() + s.out.span().size_bytes());
    const std::size_t taken = peak(mesh.device(), [&] { static_cast<void>(unstack<"Y">(s)); });
    expect(s.in.span().size_bytes() / 3 % 64 == 0 && taken == 0,
           show(taken) + " bytes in addition to " + show(weights));
  });
}

TEST_CASE("unstack is the inverse of stack", "[ops][loops]") {
  on_meshes(meshes, [](const Grid& mesh) {
    // A part of 8 bytes is copied; the stacked dim is padded.
    const auto x = random_normal<f32, "L C/d">(mesh, {{"L", 3, 5}, {"C", 2 * mesh.size("d")}}, {7, 0});
    const auto parts = unstack<"L">(x);
    static_assert(std::is_same_v<decltype(parts)::value_type, Tensor<f32, "C/d">>);
    expect(parts.size() == 3, "the padding is no part");
    const std::size_t row = parts[0].span().size();
    for (std::size_t i = 0; i < 3; ++i)
      expect(std::memcmp(parts[i].span().data(), x.span().data() + i * row, row * sizeof(f32)) == 0, "a part");
    // Of the three, one has no derivative.
    const auto f = [](const Tensor<f32, "L C/d">& v) -> Loss {
      const auto each = unstack<"L">(v);
      return to_partial<"+d -> +d +t">(sum(square(each[0])) + sum(each[2] * 3.0));
    };
    const auto gradient = all_reduce<"L C/d +t -> L C/d">(value_and_grad(mesh, f, x).second);
    for (std::size_t i = 0; i < x.span().size(); ++i) {
      const float expected = i < row ? 2 * x.span()[i] : i / row == 2 ? 3.0F : 0.0F;
      expect(gradient.span()[i] == expected, "element " + show(i) + " is " + show(gradient.span()[i]));
    }
    // A value that others read is not overwritten, although each part has but one handle.
    const auto wide = random_normal<f32, "L C">(mesh, {{"L", 2}, {"C", 16}}, {8, 0});
    const std::vector<f32> before(wide.span().begin(), wide.span().end());
    Tensor<f32, "C"> view = unstack<"L">(wide)[1];
    expect(view.value()->data().data() == wide.value()->data().data() + 64, "a part of 64 bytes is a view");
    auto mu = view * 0.0, nu = view * 0.0;
    const auto slope = view * 1.0;
    AdamW().update(view, mu, nu, slope, 0.1, 1.0, 0, [](std::string_view) { return false; });
    expect(view.span()[0] != before[16], "the update");
    expect(std::memcmp(before.data(), wide.span().data(), before.size() * sizeof(f32)) == 0, "a part was overwritten");
  });
}

TEST_CASE("leaves of different numbers of layers are an error", "[ops][loops]") {
  on_mesh("d=2,t=2", [](const Grid& mesh) {
    const auto x = input<f32>(mesh);
    const auto two = stacked(listed<f32>(mesh, 2)), three = stacked(listed<f32>(mesh, 3));
    ERROR_IS("scan_layers<`Y`>: the leaf `out` has 3 parts, but the first has 2; stack as many tensors in each leaf",
             scan_layers<"Y">(layer<f32>, Stacked<f32>{two.in, three.out}, x, x));
    const auto padded =
        place<Tensor<f32, "Y H/t M/d">>(mesh, fetch(two.out), {{"Y", 2, 4}, {"H", 23, 24}, {"M", 45, 48}});
    ERROR_IS(
        "scan_layers<`Y`>: the leaf `out` has 2 (padded to 4) parts, but the first has 2; stack as many tensors in "
        "each leaf",
        scan_layers<"Y">(layer<f32>, Stacked<f32>{two.in, padded}, x, x));
    ERROR_IS("scan_layers<`Y`>: no leaf of the tree has a value", scan_layers<"Y">(layer<f32>, Stacked<f32>{}, x, x));
    expect_error(
        [&] {
          fori(
              -1, [](std::int64_t, const X<f32>& h) { return h; }, x);
        },
        "fori: the number of iterations is -1; it must not be negative");
  });
}

namespace {

/// A carry of two tensors.
struct Pair {
  X<f32> x;
  Tensor<f32, "B/d"> size;
};
Pair turn(std::int64_t i, const Pair& p, const X<f32>& w) {
  const X<f32> next = tanh(p.x * w + static_cast<double>(i));
  return {next, p.size + sum<"B/d M -> B/d">(square(next))};
}
Loss loss_of(const Pair& p) {
  return mean_square(p.x) + to_partial<"+d -> +d +t">(sum(p.size));
}

}  // namespace

TEST_CASE("fori has the bits of a loop by hand", "[ops][loops]") {
  on_meshes(meshes, [](const Grid& mesh) {
    const X<f32> w = input<f32>(mesh), x = input<f32>(mesh, 1);
    const auto start = [](const X<f32>& v) { return Pair{v, sum<"B/d M -> B/d">(v)}; };
    const auto by_hand = [start](const X<f32>& v, const X<f32>& y, int count) {
      Pair p = start(y);
      for (int i = 0; i < count; ++i) p = turn(i, p, v);
      return loss_of(p);
    };
    const auto loop = [start](const X<f32>& v, const X<f32>& y, int count) {
      return loss_of(fori(count, turn, start(y), v));
    };
    const auto again = [start](const X<f32>& v, const X<f32>& y, int count, const std::string& policy) {
      return loss_of(fori(count, turn, start(y), {.recompute = {policy}}, v));
    };
    for (const int count : {1, 5}) {
      const auto expected = value_and_grad(mesh, by_hand, w, x, count);
      expect_same(expected, value_and_grad(mesh, loop, w, x, count), "fori");
      for (const std::string policy : {"none", "everything", "tanh"})
        expect_same(expected, value_and_grad(mesh, again, w, x, count, policy), policy);
    }
    const auto kept = [&](const char* policy) {
      std::size_t bytes = 0;
      for (const auto& one : saved_residuals(again, w, x, 5, policy)) bytes += one.bytes;
      return bytes;
    };
    expect(kept("everything") < kept("none"), "recompute saves less");
  });
}

TEST_CASE("fori is differentiated", "[ops][loops]") {
  on_mesh("d=2,t=2", [](const Grid& mesh) {
    using V = Tensor<f64, "A/d C/t">;
    const V v = random_normal<f64, "A/d C/t">(mesh, {{"A", 4}, {"C", 4}}, {5, 1});
    const auto f = [](const V& w) -> Tensor<f64, "+d +t"> {
      const auto step = [](std::int64_t i, const V& h, const V& a) { return tanh(h * a + 0.5 * double(i)); };
      return sum(fori(4, step, w, {.recompute = {"everything"}}, w));
    };
    check_gradients(mesh, f, v);
  });
}

namespace {

template <dtype C>
struct Cell {
  Tensor<C, "M/d H"> x;
  Tensor<C, "H/d K"> h;
};
template <dtype C>
using State = Tensor<C, "B/d H">;
template <dtype C>
std::pair<State<C>, Tensor<f32, "B/d">> cell(const State<C>& h, const X<C>& x, const Cell<C>& w) {
  const auto w_x = all_gather<"M/d H -> M H">(w.x);
  const auto w_h = all_gather<"H/d K -> H K">(w.h);
  const State<C> next = tanh(einsum_unreduced<"B/d M, M H -> B/d H">(x, w_x) +
                             rename<"K -> H">(einsum_unreduced<"B/d H, H K -> B/d K">(h, w_h)));
  return {next, sum<"B/d H -> B/d">(cast<f32>(next))};
}
template <dtype C>
using Sequence = Tensor<C, "L B/d M">;

template <dtype C>
void expect_recurrence(const Grid& mesh, const NamedSize& length) {
  const int d = mesh.size("d");
  const Sizes sizes{length, {"B", 2 * d - 1, 2 * d}, {"M", 15, 16}, {"H", 8}, {"K", 8}};
  using Sums = Tensor<f32, "L B/d">;
  struct Weights {
    Cell<C> cell;
    Sequence<C> xs;
    State<C> h;
    Sums scale;
  };
  const Weights w{
      {random_normal<C, "M/d H">(mesh, sizes, {1, 0}) * 0.25, random_normal<C, "H/d K">(mesh, sizes, {2, 0}) * 0.25},
      random_normal<C, "L B/d M">(mesh, sizes, {3, 0}),
      random_normal<C, "B/d H">(mesh, sizes, {4, 0}),
      random_normal<f32, "L B/d">(mesh, sizes, {5, 0})};
  using Parts = std::vector<Tensor<f32, "B/d">>;
  const auto loss = [](const State<C>& h, const Parts& ys) -> Loss {
    Loss sum = mean_square(h);
    for (const auto& y : ys) sum = sum + mean_square(y);
    return sum;
  };
  const auto by_hand = [loss](const Weights& v) {
    State<C> h = v.h;
    Parts ys;
    const Parts scale = unstack<"L">(v.scale);
    for (const auto& x : unstack<"L">(v.xs)) {
      const auto [next, y] = cell<C>(h, x, v.cell);
      h = next;
      ys.push_back(y * scale[ys.size()]);
    }
    return loss(h, ys);
  };
  // The sums are padded as the sequence is: both are in one op.
  const auto loop = [loss](const Weights& v) {
    const auto [h, ys] = scan<"L">(cell<C>, v.h, v.xs, v.cell);
    return loss(h, unstack<"L">(ys * v.scale));
  };
  const auto again = [loss](const Weights& v, const std::string& policy) {
    const auto [h, ys] = scan<"L">(cell<C>, v.h, v.xs, {.recompute = {policy}}, v.cell);
    return loss(h, unstack<"L">(ys * v.scale));
  };
  const auto expected = value_and_grad(mesh, by_hand, w);
  expect_same(expected, value_and_grad(mesh, loop, w), "scan");
  for (const std::string policy : {"none", "dots", "everything"})
    expect_same(expected, value_and_grad(mesh, again, w, policy), policy);
}

}  // namespace

TEST_CASE("scan has the bits of a recurrence by hand", "[ops][loops]") {
  std::vector<std::string> all = meshes;
  all.emplace_back("d=4,t=2");
  on_meshes(all, [](const DevicePtr& device) {
    expect_recurrence<f32>(Grid(device), {"L", 5});
    expect_recurrence<f32>(Grid(device), {"L", 5, 8});
    expect_recurrence<bf16>(Grid(device), {"L", 5, 7});
  });
}

namespace {

struct Seen {
  Tensor<f64, "B/d"> state;
  Array<"P", Tensor<f64, "B/d">> powers;
};
struct SeenStacked {
  Tensor<f64, "L B/d"> state;
  Array<"P", Tensor<f64, "L B/d">> powers;
};
std::pair<Tensor<f64, "B/d">, Seen> see(const Tensor<f64, "B/d">& h, const Tensor<f64, "B/d">& x) {
  const auto next = h * 0.5 + x;
  return {next, {next, {next * next, next * x}}};
}

}  // namespace

TEST_CASE("scan stacks trees, and stack is the inverse of unstack", "[ops][loops]") {
  on_meshes(meshes, [](const Grid& mesh) {
    using Xs = Tensor<f64, "L B/d">;
    const Sizes sizes{{"L", 5}, {"B", 4 * mesh.size("d")}};
    const Xs xs = random_normal<f64, "L B/d">(mesh, sizes, {1, 0});
    const auto zero = unstack<"L">(xs)[0] * 0.0;
    const auto loss_of = [](const SeenStacked& ys) -> Tensor<f64, "+d +t"> {
      return to_partial<"+d -> +d +t">(sum(square(ys.state)) + sum(ys.powers[0] * ys.state) + sum(ys.powers[1]));
    };
    const auto loop = [loss_of](const Xs& v, const Tensor<f64, "B/d">& h, const std::string& policy) {
      return loss_of(scan<"L">(see, h, v, {.recompute = {policy}}).second);
    };
    const auto by_hand = [loss_of](const Xs& v, const Tensor<f64, "B/d">& h) {
      std::vector<Tensor<f64, "B/d">> states, squares, products;
      Tensor<f64, "B/d"> at = h;
      for (const auto& x : unstack<"L">(v)) {
        const auto [next, y] = see(at, x);
        at = next;
        states.push_back(y.state);
        squares.push_back(y.powers[0]);
        products.push_back(y.powers[1]);
      }
      return loss_of({stack<"L">(states), {stack<"L">(squares), stack<"L">(products)}});
    };
    const auto expected = value_and_grad(mesh, by_hand, xs, zero);
    for (const std::string policy : {"none", "everything"})
      expect_same(expected, value_and_grad(mesh, loop, xs, zero, policy), policy);

    const auto [last, ys] = scan<"L">(see, zero, xs);
    const Tensor<f64, "L B/d"> states = ys.get<&Seen::state>();
    const SeenStacked stacked = ys;
    expect_same_bits(stacked.state, states, "one member");
    std::vector<Seen> parts;
    for (const Seen part : unstack<"L">(stacked)) parts.push_back(part);
    expect(parts.size() == 5 && parts[0].powers.size() == 2, "as many parts");
    const SeenStacked again = stack<"L">(parts);
    expect_same_bits(again, stacked, "stacked again");

    parts[3].powers.resize(1);
    ERROR_IS(
        "stack<`L`>: trees of different structure: the Array `powers` has 2 entries in the first tree and 1 in "
        "another; "
        "build them from one configuration",
        stack<"L">(parts));
    parts.clear();
    ERROR_IS("stack<`L`>: there is nothing to stack; give one tree at least", stack<"L">(parts));
  });
}

namespace {

struct Up {
  Tensor<f32, "M"> w;
};
struct Twice {
  Tensor<f32, "M"> first, second;
};
struct Mixed {
  std::optional<Tensor<f32, "M">> bias;
  std::variant<Up, Twice> kind;
};
struct UpOfAll {
  Tensor<f32, "Y M"> w;
};
struct TwiceOfAll {
  Tensor<f32, "Y M"> first, second;
};
struct MixedOfAll {
  std::optional<Tensor<f32, "Y M">> bias;
  std::variant<UpOfAll, TwiceOfAll> kind;
};
using Extra = std::optional<Tensor<f32, "M">>;
X<f32> mixed_layer(const X<f32>& x, const Mixed& w, const Extra& extra) {
  X<f32> y = extra ? x * *extra : x;
  if (const auto* up = std::get_if<Up>(&w.kind)) y = tanh(y * up->w);
  if (const auto* both = std::get_if<Twice>(&w.kind)) y = tanh(y * both->first) * both->second;
  return w.bias ? y + *w.bias : y;
}

}  // namespace

TEST_CASE("stack, unstack and scan_layers take what a std::optional or std::variant holds", "[ops][loops]") {
  on_meshes(meshes, [](const Grid& mesh) {
    std::uint64_t stream = 0;
    const auto draw = [&] { return random_normal<f32, "M">(mesh, {{"M", 6}}, {9, ++stream}); };
    std::vector<Mixed> parts;
    for (int i = 0; i < 3; ++i) parts.push_back({draw(), Twice{draw(), draw()}});
    const MixedOfAll all = stack<"Y">(parts);
    expect(all.bias.has_value() && all.kind.index() == 1, "what it holds");
    std::size_t i = 0;
    for (const Mixed part : unstack<"Y">(all)) expect_same_bits(part, parts.at(i++), "a part");

    const X<f32> x = random_normal<f32, "B/d M">(mesh, {{"B", 4 * mesh.size("d")}, {"M", 6}}, {9, 0});
    const auto of_stacked = [&](const MixedOfAll& w, const Extra& extra, const std::string& policy) {
      return mean_square(scan_layers<"Y">(mixed_layer, w, x, {.recompute = {policy}}, extra));
    };
    const auto of_list = [&](const Array<"layers", Mixed>& w, const Extra& extra) {
      return mean_square(scan_layers(mixed_layer, w, x, extra));
    };
    const Extra extra = draw();
    Array<"layers", Mixed> list;
    list.assign(parts.begin(), parts.end());
    const auto [loss, grads] = value_and_grad(mesh, of_list, list, extra);
    std::vector<Mixed> each;
    for (const auto& one : reduce_gradients(mesh, grads)) each.push_back(one);
    const MixedOfAll expected = stack<"Y">(each);
    for (const std::string policy : {"none", "everything"}) {
      const auto [found, by_stacked] = value_and_grad(mesh, of_stacked, all, extra, policy);
      expect_same_bits(found, loss, policy);
      expect_same_bits(reduce_gradients(mesh, by_stacked), expected, policy);
    }

    parts[1].bias.reset();
    ERROR_IS(
        "stack<`Y`>: trees of different structure: the std::optional `bias` has a value in the first tree and no value "
        "in another; build them from one configuration",
        stack<"Y">(parts));
  });
}

TEST_CASE("scan agrees with linear_scan", "[ops][loops]") {
  on_mesh("d=2,t=1", [](const Grid& mesh) {
    using A = Tensor<f64, "L B/d">;
    struct Both {
      A a, b;
    };
    const Sizes sizes{{"L", 6}, {"B", 4}};
    const Both w{random_normal<f64, "L B/d">(mesh, sizes, {1, 0}), random_normal<f64, "L B/d">(mesh, sizes, {2, 0})};
    const auto of_scan = [](const Both& v) -> Tensor<f64, "+d +t"> {
      const auto zero = unstack<"L">(v.a)[0] * 0.0;
      // The parts of a struct of sequences.
      const auto step = [](const Tensor<f64, "B/d">& h, const auto& x) {
        const auto next = x.template get<&Both::a>() * h + x.template get<&Both::b>();
        return std::pair(next, next);
      };
      return to_partial<"+d -> +d +t">(sum(square(scan<"L">(step, zero, v).second)));
    };
    const auto of_op = [](const Both& v) -> Tensor<f64, "+d +t"> {
      return to_partial<"+d -> +d +t">(sum(square(linear_scan<"L">(v.a, v.b))));
    };
    const auto found = value_and_grad(mesh, of_scan, w), expected = value_and_grad(mesh, of_op, w);
    for_each_leaf(
        [](std::string_view name, const auto& x, const auto& y) {
          for (std::size_t i = 0; i < x.span().size(); ++i)
            expect(std::abs(x.span()[i] - y.span()[i]) <= 1e-9 * (1 + std::abs(y.span()[i])), name);
        },
        found.second, expected.second);
  });
}

TEST_CASE("a dry run of loops counts and takes what a real one does", "[ops][loops]") {
  const auto dry = DevicePtr::make(parse_mesh("d=2,t=2"), 0, std::make_shared<DryWorld>(Peers::threads));
  const auto step = [](const DevicePtr& device) {
    const Grid mesh(device);
    const auto w = listed<f32>(mesh, 3);
    const auto s = stacked(w);
    const auto x = input<f32>(mesh);
    std::string text;
    std::size_t most = 0;
    const auto all = calls(mesh, [&] {
      most = peak(device, [&] {
        static_cast<void>(value_and_grad(mesh, Losses<f32>::of_stacked_again, s, x, x, "everything"));
        static_cast<void>(value_and_grad(mesh, Losses<f32>::ahead_stacked, s, x, x, "everything"));
        const auto f = [](const X<f32>& v) {
          return loss_of(fori(3, turn, Pair{v, sum<"B/d M -> B/d">(v)}, {.recompute = {"everything"}}, v));
        };
        static_cast<void>(value_and_grad(mesh, f, x));
      });
    });
    for (const auto& [name, n] : all) text += name + " " + std::to_string(n) + ", ";
    return std::pair(text, most);
  };
  const auto planned = step(dry);
  dry->clear_local();
  expect(planned.first.find("all_gather") != std::string::npos, planned.first);
  on_mesh("d=2,t=2", [&](const DevicePtr& device) {
    const auto real = step(device);
    expect(real.first == planned.first, "planned " + planned.first + "ran " + real.first);
    // Where MPI moves the blocks, what is received for a sum takes memory until it arrives.
    if (!under_mpi())
      expect(real.second == planned.second, "planned " + show(planned.second) + ", taken " + show(real.second));
  });
}
