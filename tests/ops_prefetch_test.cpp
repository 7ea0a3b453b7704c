// prefetch: gathers that run during the layer before theirs, and sums of gradients during the backward pass.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
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
using X = Tensor<f32, "B/d M">;
using Loss = Tensor<f32, "+d +t">;

struct Weights {
  Tensor<f32, "M/d H/t"> in;
  Tensor<f32, "H/t M/d"> out;  // whose shards need another order once they are gathered
};
struct Model {
  Tensor<f32, "M/t/d"> gain;  // before the layers, so that these have an input that is differentiated
  Array<"layers", Weights> layers;
};

struct Gathered {
  Tensor<f32, "M H/t"> in;
  Tensor<f32, "H/t M"> out;
};
Gathered gathered(const Weights& w) {
  return {all_gather<"M/d H/t -> M H/t">(w.in), all_gather<"H/t M/d -> H/t M">(w.out)};
}
/// The same over another factorization of the devices.
Gathered gathered_over_e(const Weights& w) {
  const Grid mesh(w.in.device());
  const auto other = reinterpret<"d -> e">(mesh);
  return {reinterpret<"e -> d">(all_gather<"M/e H/t -> M H/t">(reinterpret<"d -> e">(w.in, other)), mesh),
          reinterpret<"e -> d">(all_gather<"H/t M/e -> H/t M">(reinterpret<"d -> e">(w.out, other)), mesh)};
}
template <bool saves, auto gathers = gathered>
X layer(const X& x, const Weights& w) {
  const auto [in, out] = gathers(w);
  auto hidden = einsum_unreduced<"B/d M, M H/t -> B/d H/t">(x, in);
  if constexpr (saves) hidden = save_for_backward(hidden);
  return x + all_reduce<"B/d M +t -> B/d M">(einsum_unreduced<"B/d H/t, H/t M -> B/d M +t">(tanh(hidden), out));
}

enum class How { plain, prefetch };
template <class Layer, class Gathers>
X through(const X& start, const Array<"layers", Weights>& layers, How how, const Layer& layer, const Gathers& gathers) {
  X x = start;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (how == How::prefetch) x = prefetch(x, gathers, layers, i);
    x = explicit_activation_checkpointing(layer)(x, layers[i]);
  }
  return how == How::prefetch ? prefetch(x, gathers, layers, layers.size()) : x;
}
Loss mean_square(const X& x) {
  return to_partial<"+d -> +d +t">(sum(square(x)));
}
Loss loss(const Model& w, const X& x, How how) {
  return mean_square(through(x * all_gather<"M/t/d -> M">(w.gain), w.layers, how, layer<false>, gathered));
}

constexpr std::int64_t rows = 4, width = 48, hidden = 96;
Model model(const Grid& mesh, std::int64_t layers) {
  const Sizes sizes{{"M", width}, {"H", hidden}};
  Model w{random_normal<f32, "M/t/d">(mesh, sizes, {1, 0}), {}};
  for (std::int64_t i = 0; i < layers; ++i) {
    const auto stream = static_cast<std::uint64_t>(i);
    w.layers.push_back({random_normal<f32, "M/d H/t">(mesh, sizes, {2, stream}) * 0.1,
                        random_normal<f32, "H/t M/d">(mesh, sizes, {3, stream}) * 0.1});
  }
  return w;
}
X input(const Grid& mesh) {
  return random_normal<f32, "B/d M">(mesh, {{"B", rows * mesh.size("d")}, {"M", width}}, {4, 0});
}
std::size_t gathered_bytes(const Grid& mesh) {
  return 2 * sizeof(float) * static_cast<std::size_t>(width * hidden / mesh.size("t"));
}

std::size_t under_way(const detail::ProgramState& state, bool gathers) {
  return static_cast<std::size_t>(
      std::ranges::count_if(state.pending, [&](const auto& s) { return bool(s->gathered) == gathers; }));
}

/// "all_gather 12 calls 3456 bytes, ..." of all collectives on this device during f.
template <class F>
std::string traffic(const DevicePtr& device, const F& f) {
  auto& counts = detail::program_state(device).counts;
  counts.clear();
  f();
  std::string text;
  for (const char* name : {"all_gather", "reduce_scatter"})
    text += std::string(name) + " " + std::to_string(counts[name].calls) + " calls " +
            std::to_string(counts[name].bytes) + " bytes, ";
  return text;
}

const std::vector<std::string> meshes{"d=1,t=1", "d=2,t=1", "d=1,t=2", "d=3,t=1", "d=4,t=1", "d=2,t=2"};

}  // namespace

TEST_CASE("prefetch changes no bit, and each gather and sum is one collective", "[ops][prefetch]") {
  on_meshes(meshes, [](const DevicePtr& device) {
    const Grid mesh(device);
    const X x = input(mesh);
    for (const std::int64_t layers : {1, 2, 5}) {
      const Model w = model(mesh, layers);
      std::pair<Loss, Model> plain, ahead;
      const std::string expected = traffic(device, [&] { plain = value_and_grad(mesh, loss, w, x, How::plain); });
      const std::string found = traffic(device, [&] { ahead = value_and_grad(mesh, loss, w, x, How::prefetch); });
      expect(found == expected, found + "instead of " + expected);
      expect_same_bits(plain.first, ahead.first, "loss");
      expect_same_bits(plain.second, ahead.second, "gradient");
      expect_same_bits(plain.first, loss(w, x, How::prefetch), "the loss alone");
      expect(detail::program_state(device).pending.empty(), "something is under way behind the end");
    }
  });
}

TEST_CASE("weights that a layer reinterprets are prefetched too", "[ops][prefetch]") {
  const auto over_e = [](const Model& w, const X& x, How how) {
    const X first = x * all_gather<"M/t/d -> M">(w.gain);
    return mean_square(through(first, w.layers, how, layer<false, gathered_over_e>, gathered_over_e));
  };
  on_meshes(meshes, [&](const DevicePtr& device) {
    const Grid mesh(device);
    const Model w = model(mesh, 3);
    const X x = input(mesh);
    const auto expected = value_and_grad(mesh, loss, w, x, How::plain);
    for (const How how : {How::plain, How::prefetch}) {
      std::optional<decltype(value_and_grad(mesh, over_e, w, x, how))> found;
      const std::string sent = traffic(device, [&] { found = value_and_grad(mesh, over_e, w, x, how); });
      expect(sent == traffic(device, [&] { static_cast<void>(value_and_grad(mesh, loss, w, x, how)); }), sent);
      expect_same_bits(expected.first, found->first, "loss");
      expect_same_bits(expected.second, found->second, "gradient");
    }
    expect(detail::program_state(device).pending.empty(), "nothing stays under way");
  });
}

TEST_CASE("the gathers of the next layer run during each layer, and the gradients' sums", "[ops][prefetch]") {
  on_mesh("d=2,t=1", [](const Grid& mesh) {
    const Model w = model(mesh, 5);
    const X x = input(mesh);
    const detail::ProgramState& state = detail::program_state(mesh.device());
    std::vector<std::size_t> forward, backward;
    std::size_t most_sums = 0, fewest_sums = 100;
    {
      const detail::Observing watch(mesh.device(), [&](const detail::OpReport& ran) {
        const std::string_view op = ran.op.name;
        if (op == "reduce_scatter") expect(!ran.recomputed, "a gradient's sum is not a recompute");
        if (op != "tanh") return;  // once a layer and pass
        (ran.recomputed ? backward : forward).push_back(under_way(state, true));
        if (!ran.recomputed) return;
        most_sums = std::max(most_sums, under_way(state, false));
        if (backward.size() > 1) fewest_sums = std::min(fewest_sums, under_way(state, false));
      });
      static_cast<void>(value_and_grad(mesh, loss, w, x, How::prefetch));
    }
    // Those of the next layer: a layer has asked for its own before.
    expect_equal(forward, {2, 2, 2, 2, 0});
    expect_equal(backward, {2, 2, 2, 2, 0});
    expect(fewest_sums >= 2 && most_sums <= 4,
           "sums under way: " + std::to_string(fewest_sums) + " to " + std::to_string(most_sums));
  });
}

namespace {

struct Peaks {
  std::size_t forward, backward;
};
Peaks peaks(const DevicePtr& device, std::int64_t layers, How how) {
  const Grid mesh(device);
  const Model w = model(mesh, layers);
  const X x = input(mesh);
  return {peak(device, [&] { loss(w, x, how); }),
          peak(device, [&] { static_cast<void>(value_and_grad(mesh, loss, w, x, how)); })};
}

void expect_two_layers(const DevicePtr& device) {
  const std::size_t gathered = gathered_bytes(Grid(device));
  for (const std::int64_t layers : {3, 9}) {
    const Peaks plain = peaks(device, layers, How::plain), ahead = peaks(device, layers, How::prefetch);
    expect(ahead.forward > plain.forward && ahead.forward <= plain.forward + gathered,
           "forward " + std::to_string(ahead.forward) + ", plain " + std::to_string(plain.forward));
    // The next layer's weights, and the gradients of the layer before: each as large as a gathered layer. MPI receives
    // less than once more of what it sums over sockets, while two layers' gradients are under way.
    const std::size_t more = (under_mpi() ? 4 : 2) * gathered;
    expect(ahead.backward > plain.backward && ahead.backward <= plain.backward + more,
           "backward " + std::to_string(ahead.backward) + ", plain " + std::to_string(plain.backward));
  }
}

}  // namespace

TEST_CASE("prefetch keeps two gathered layers at most, however many there are", "[ops][prefetch]") {
  on_meshes({"d=2,t=1", "d=4,t=1", "d=2,t=2"}, expect_two_layers);
}

TEST_CASE("a dry run of prefetch counts and takes what a real one does", "[ops][prefetch]") {
  const auto make = [](Peers peers) {
    return DevicePtr::make(parse_mesh("d=2,t=2"), 0, std::make_shared<DryWorld>(peers));
  };
  const auto dry = make(Peers::threads), received = make(Peers::mpi);
  expect_two_layers(dry);
  const auto step = [](const DevicePtr& device) {
    const Grid mesh(device);
    const Model w = model(mesh, 4);
    const X x = input(mesh);
    return traffic(device, [&] { static_cast<void>(value_and_grad(mesh, loss, w, x, How::prefetch)); });
  };
  std::string counted;
  Peaks planned{}, most{};
  {  // as `--plan` does
    const detail::NoteReads noting(detail::program_state(dry));
    const detail::Observing observing(dry, [](const detail::OpReport&) {});
    counted = step(dry);
    planned = peaks(dry, 4, How::prefetch);
    most = peaks(received, 4, How::prefetch);
  }
  for (const auto& device : {dry, received}) device->clear_local();
  on_mesh("d=2,t=2", [&](const DevicePtr& device) {
    expect(step(device) == counted, "a dry run counts " + counted);
    const Peaks real = peaks(device, 4, How::prefetch);
    // Where MPI moves the blocks, what is received for a sum takes memory until it arrives: nobody knows when.
    const bool exact = real.backward == planned.backward;
    const bool between = under_mpi() && real.backward > planned.backward && real.backward <= most.backward;
    expect(real.forward == planned.forward && (exact || between),
           "planned " + std::to_string(planned.backward) + ", taken " + std::to_string(real.backward));
  });
}

TEST_CASE("what the derivatives of a layer do not need is gathered for nothing, and counted", "[ops][prefetch]") {
  on_mesh("d=2,t=1", [](const Grid& mesh) {
    const Model w = model(mesh, 3);
    const X x = input(mesh);
    // Nothing differentiates the input of the first layer, so nobody needs its gathered `in` again.
    const auto of_layers = [](const Array<"layers", Weights>& layers, const X& x, How how) {
      return mean_square(through(x, layers, how, layer<true>, gathered));
    };
    auto& counts = detail::program_state(mesh.device()).counts;
    counts.clear();
    const auto plain = value_and_grad(mesh, of_layers, w.layers, x, How::plain);
    const auto without = counts["all_gather"];
    counts.clear();
    const auto ahead = value_and_grad(mesh, of_layers, w.layers, x, How::prefetch);
    const auto with = counts["all_gather"];
    expect(without.calls == 11 && with.calls == 12, std::to_string(with.calls) + " gathers");
    expect(with.bytes == without.bytes + static_cast<std::int64_t>(gathered_bytes(mesh) / 4), "bytes");
    expect_same_bits(plain.second, ahead.second, "gradient");
  });
}

TEST_CASE("a gradient that is taken between prefetched layers leaves their gathers alone", "[ops][prefetch]") {
  on_mesh("d=2,t=1", [](const Grid& mesh) {
    const auto between = [&](const Model& w, const X& x, bool inner) {
      X y = x * all_gather<"M/t/d -> M">(w.gain);
      for (std::size_t i = 0; i < w.layers.size(); ++i) {
        y = prefetch(y, gathered, w.layers, i);
        if (inner) static_cast<void>(value_and_grad(mesh, mean_square, stop_gradient(y)));
        y = explicit_activation_checkpointing(layer<false>)(y, w.layers[i]);
      }
      return mean_square(prefetch(y, gathered, w.layers, w.layers.size()));
    };
    const auto gradient = [&](bool inner) {
      return value_and_grad(mesh, between, model(mesh, 3), input(mesh), inner).second;
    };
    expect_same_bits(gradient(false), gradient(true), "gradient");
  });
}

TEST_CASE("prefetch says what is wrong", "[ops][prefetch]") {
  on_mesh("d=2,t=1", [](const DevicePtr& device) {
    const Grid mesh(device);
    const Model w = model(mesh, 3);
    const X x = input(mesh);
    const auto where = [](int line) { return " at " + std::string(__FILE__) + ":" + std::to_string(line); };
    const std::string on = " (" + device->describe() + ")";

    const int other_line = __LINE__ + 1;
    const auto others = [](const Weights& v) { return all_gather<"M/d H/t -> M H/t">(v.in * 1.0); };
    const std::string unused = "all_gather<`M/d H/t -> M H/t`>" + where(other_line) +
                               ": prefetch has started it, but the layer has not asked for its result: let the layer "
                               "gather the same tensors with the same function that prefetch is given" +
                               on;
    expect_error([&] { through(x, w.layers, How::prefetch, layer<false>, others); }, unused);
    detail::program_state(device).pending.clear();
    // Without a later prefetch the end of the forward pass notices.
    const auto one = [&](const Array<"layers", Weights>& layers) {
      return mean_square(layer<false>(prefetch(x, others, layers, 2), layers[2]));
    };
    expect_error([&] { static_cast<void>(value_and_grad(mesh, one, w.layers)); }, unused);

    const int next_line = __LINE__ + 2;
    expect_error(
        [&] { prefetch(x, gathered, w.layers, 4); },
        "prefetch" + where(next_line) +
            ": layer 4 is given as the next one, but there are 3; count from 0, and give 3 after the last one" + on);
    const int inside_line = __LINE__ + 1;
    const auto inside = [](const X& y, const Array<"layers", Weights>& v) { return prefetch(y, gathered, v, 0); };
    expect_error([&] { explicit_activation_checkpointing(inside)(x, w.layers); },
                 "prefetch" + where(inside_line) +
                     ": inside explicit_activation_checkpointing it would start gathers that the backward pass does "
                     "not ask for; call it between the layers, outside" +
                     on);
    expect(detail::program_state(device).pending.empty(), "errors leave nothing under way");
  });
}

TEST_CASE("an op that throws while gathers and sums are under way leaves none of them", "[ops][prefetch]") {
  on_meshes(meshes, [](const DevicePtr& device) {
    const Grid mesh(device);
    const Model w = model(mesh, 5);
    const X x = input(mesh);
    const auto expected = value_and_grad(mesh, loss, w, x, How::plain);
    for (const int fatal : {3, 8, 20, 25}) {  // among the einsums: forward there are 10, then recomputed ones too
      int einsums = 0;
      bool thrown = false;
      {
        const detail::Observing watch(device, [&](const detail::OpReport& ran) {
          if (std::string_view(ran.op.name) == "einsum_unreduced" && ++einsums == fatal) throw Error("enough");
        });
        try {
          static_cast<void>(value_and_grad(mesh, loss, w, x, How::prefetch));
        } catch (const Error&) {
          thrown = true;
        }
      }
      expect(thrown, "nothing was thrown");
      expect(detail::program_state(device).pending.empty(), "something is still under way");
    }
    // What the others still have to copy is theirs; the device goes on.
    const auto again = value_and_grad(mesh, loss, w, x, How::prefetch);
    expect_same_bits(expected.first, again.first, "loss");
    expect_same_bits(expected.second, again.second, "gradient");
  });
  // One device alone: the others must not wait for it forever.
  if (under_mpi()) return;
  REQUIRE_THROWS_WITH(on_mesh("d=4,t=1",
                              [](const Grid& mesh) {
                                const Model w = model(mesh, 3);
                                const auto failing = [&](const Model& v, const X& x) {
                                  const X y = prefetch(x, gathered, v.layers, 0);
                                  if (mesh.axis_index("d") == 1) throw Error("enough");
                                  return loss(v, y, How::prefetch);
                                };
                                static_cast<void>(value_and_grad(mesh, failing, w, input(mesh)));
                              }),
                      "enough");
}
