// Collectives that start at one place and end at another: what runs meanwhile in both passes, recompute, second
// derivatives, and memory. Values, cotangents and adjoint law are in ops_collectives_test.cpp.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "random_bits.hpp"
#include "shardlib/autodiff/value_and_grad.hpp"
#include "shardlib/comm/dry.hpp"
#include "shardlib/runtime/observe.hpp"
#include "shardlib/shardlib.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using Grid = Mesh<"d t">;
using X = Tensor<f32, "L/t B/d M">;
using Loss = Tensor<f32, "+d +t">;

struct Weights {
  Tensor<f32, "M F/t"> up;
  Tensor<f32, "F/t M"> down;
};
using Layers = Array<"layers", Weights>;
using Hidden = Tensor<f32, "L B/d F/t">;
using Summand = Tensor<f32, "L B/d M +t">;

Hidden rise(const Tensor<f32, "L B/d M">& x, const Weights& w) {
  return tanh(einsum_unreduced<"L B/d M, M F/t -> L B/d F/t">(x, w.up));
}
Summand fall(const Hidden& h, const Weights& w) {
  return einsum_unreduced<"L B/d F/t, F/t M -> L B/d M +t">(h, w.down);
}
auto gather_start(const X& x) {
  return all_gather_start<"L/t B/d M -> L B/d M">(x);
}
auto sum_start(const Summand& y) {
  return reduce_scatter_start<"L B/d M +t -> L/t B/d M">(y);
}

/// Two inputs through the layers, one after the other.
X in_turn(const X& x, const X& y, const Layers& layers) {
  const auto through = [&](X z) {
    for (const Weights& w : layers)
      z = z + reduce_scatter<"L B/d M +t -> L/t B/d M">(fall(rise(all_gather<"L/t B/d M -> L B/d M">(z), w), w));
    return z;
  };
  return through(x) + through(y);
}
/// The same. The collectives of one input run during the products of the other.
X interleaved(X x, X y, const Layers& layers) {
  auto to_x = gather_start(x);
  std::optional<decltype(sum_start(Summand()))> of_y;
  for (const Weights& w : layers) {
    const Hidden h = rise(wait(std::move(to_x)), w);
    if (of_y) y = y + wait(*std::exchange(of_y, std::nullopt));
    auto to_y = gather_start(y);
    auto of_x = sum_start(fall(h, w));
    const Hidden g = rise(wait(std::move(to_y)), w);
    x = x + wait(std::move(of_x));
    if (&w != &layers.back()) to_x = gather_start(x);
    of_y = sum_start(fall(g, w));
  }
  return x + (y + wait(*std::move(of_y)));
}

Loss mean_square(const X& x) {
  return sum<"L/t B/d M -> +d +t">(square(x)) / 8.0;
}
template <auto model>
Loss loss(const Layers& layers, const X& x, const X& y) {
  return mean_square(model(x, y, layers));
}
template <auto model>
Loss checkpointed_loss(const Layers& layers, const X& x, const X& y, const RecomputePolicy& policy) {
  return mean_square(explicit_activation_checkpointing(model, policy)(x, y, layers));
}

X input(const Grid& mesh, std::uint64_t stream) {
  return random_normal<f32, "L/t B/d M">(mesh, {{"L", 8}, {"B", 2}, {"M", 4}}, {7, stream});
}
Layers make_layers(const Grid& mesh, std::uint64_t count) {
  Layers layers;
  const Sizes sizes{{"M", 4}, {"F", 8}};
  for (std::uint64_t i = 0; i < count; ++i)
    layers.push_back(
        {random_normal<f32, "M F/t">(mesh, sizes, {8, i}), random_normal<f32, "F/t M">(mesh, sizes, {9, i})});
  return layers;
}
const std::vector<std::string> meshes{"d=1,t=1", "d=1,t=2", "d=2,t=2", "d=1,t=4"};

}  // namespace

TEST_CASE("two interleaved inputs have the bits of one after the other", "[ops]") {
  on_meshes(meshes, [](const DevicePtr& device) {
    const Grid mesh(device);
    const Layers layers = make_layers(mesh, 3);
    const X x = input(mesh, 0), y = input(mesh, 1);
    auto& counts = detail::program_state(device).counts;
    const auto bytes = [&] { return counts["all_gather"].bytes + counts["reduce_scatter"].bytes; };
    const auto start = bytes();
    const auto expected = value_and_grad(mesh, loss<in_turn>, layers, x, y);
    const auto sent = bytes() - start;
    const auto found = value_and_grad(mesh, loss<interleaved>, layers, x, y);
    expect(bytes() - start == 2 * sent, "both send the same");
    expect_same_bits(expected.first, found.first, "loss");
    expect_same_bits(expected.second, found.second, "gradient");
    expect(detail::program_state(device).pending.empty(), "nothing is under way behind the end");
  });
}

TEST_CASE("a collective is under way during the ops between its start and wait, in both passes", "[ops]") {
  on_mesh("d=1,t=2", [](const Grid& mesh) {
    const Layers layers = make_layers(mesh, 3);
    const detail::ProgramState& state = detail::program_state(mesh.device());
    std::size_t products = 0, beside = 0;
    const detail::Observing watch(mesh.device(), [&](const detail::OpReport& ran) {
      if (std::string_view(ran.op.name) != "einsum_unreduced") return;
      ++products;
      if (!state.pending.empty()) ++beside;
    });
    static_cast<void>(value_and_grad(mesh, loss<interleaved>, layers, input(mesh, 0), input(mesh, 1)));
    // Twelve products and two derivatives of each, except the input's in the first layer. Nothing runs during the
    // first and the last products of a pass.
    expect(products == 34, std::to_string(products) + " products");
    expect(beside >= 27, std::to_string(beside) + " products ran during a collective");
  });
}

TEST_CASE("asynchronous collectives are recomputed, and differentiated twice", "[ops]") {
  on_meshes(meshes, [](const DevicePtr& device) {
    const Grid mesh(device);
    const Layers layers = make_layers(mesh, 2);
    const X x = input(mesh, 0), y = input(mesh, 1);
    const auto expected = value_and_grad(mesh, loss<in_turn>, layers, x, y);
    for (const char* const kept : {"none", "dots", "wait"}) {
      const RecomputePolicy policy = std::string_view(kept) == "none" ? RecomputePolicy{} : RecomputePolicy{kept};
      const auto found = value_and_grad(mesh, checkpointed_loss<interleaved>, layers, x, y, policy);
      expect_same_bits(expected.first, found.first, kept);
      expect_same_bits(expected.second, found.second, kept);
    }
    const Layers along = make_layers(mesh, 2);
    const auto curved = hessian_vector_product(mesh, loss<in_turn>, layers, along, x, y);
    const auto found = hessian_vector_product(mesh, loss<interleaved>, layers, along, x, y);
    // The contributions to a tensor that several ops read are added in another order.
    for_each_leaf(
        [](std::string_view name, const auto& one, const auto& other) {
          for (std::size_t i = 0; i < one.span().size(); ++i)
            expect(std::abs(one.span()[i] - other.span()[i]) <= 1e-4F * (1 + std::abs(one.span()[i])), name);
        },
        curved, found);
  });
}

TEST_CASE("a result that nothing waits for is dropped", "[ops]") {
  on_meshes(meshes, [](const DevicePtr& device) {
    const Grid mesh(device);
    const X x = input(mesh, 0);
    const auto dropping = [](const X& z) {
      static_cast<void>(gather_start(z));
      return mean_square(z);
    };
    const auto expected = value_and_grad(mesh, mean_square, x);
    const auto found = value_and_grad(mesh, dropping, x);
    expect_same_bits(expected.second, found.second, "gradient");
    expect_same_bits(all_gather<"L/t B/d M -> L B/d M">(x), wait(gather_start(x)), "later");
  });
}

TEST_CASE("a collective that starts in a checkpointed function and is awaited outside is an error", "[ops]") {
  on_meshes(meshes, [](const DevicePtr& device) {
    const Grid mesh(device);
    static thread_local std::optional<decltype(gather_start(X()))> coming;
    const auto leaving = [](const X& x) {
      const auto starts = [](const X& z) {
        coming = gather_start(z);
        return z * 2.0;
      };
      const X y = explicit_activation_checkpointing(starts)(x);
      static_cast<void>(wait(*std::exchange(coming, {})));
      return mean_square(y);
    };
    const std::string error =
        error_of<Error>([&] { static_cast<void>(value_and_grad(mesh, leaving, input(mesh, 0))); });
    expect(error.find("has left explicit_activation_checkpointing, but not as a result of its function") !=
               std::string::npos,
           error);
  });
}

TEST_CASE("prefetch starts the gathers of a function that starts and awaits them, each once", "[ops]") {
  on_mesh("d=1,t=2", [](const Grid& mesh) {
    Array<"layers", X> layers;
    for (std::uint64_t i = 0; i < 3; ++i) layers.push_back(input(mesh, i));
    detail::ProgramState& state = detail::program_state(mesh.device());
    const auto add = [](const X& x, const auto& whole) { return tanh(x + shard<"L/t B/d M">(whole)); };
    int beside = 0;
    const detail::Observing watch(mesh.device(), [&](const detail::OpReport& ran) {
      const auto gathers = [](const auto& pending) { return bool(pending->gathered); };
      if (std::string_view(ran.op.name) == "tanh" && std::ranges::any_of(state.pending, gathers)) ++beside;
    });
    const auto run = [&](const auto& gather, const char* kept) {
      const auto through = [&](const Array<"layers", X>& w) {
        return mean_square(scan_layers(with_prefetch(gather, add), w,
                                       ones<f32, "L/t B/d M">(mesh, {{"L", 8}, {"B", 2}, {"M", 4}}),
                                       {.recompute = {kept}}));
      };
      state.counts.clear();
      beside = 0;
      const auto result = value_and_grad(mesh, through, layers);
      std::int64_t bytes = 0;
      for (const auto& [name, count] : state.counts) bytes += count.bytes;
      return std::pair(result, bytes);
    };
    for (const char* const kept : {"none", "marked"}) {
      const auto [expected, sent] = run([](const X& w) { return all_gather<"L/t B/d M -> L B/d M">(w); }, kept);
      const auto [found, sent_now] = run([](const X& w) { return wait(gather_start(w)); }, kept);
      expect_same_bits(expected.second, found.second, kept);
      expect(sent_now == sent, std::to_string(sent_now) + " bytes instead of " + std::to_string(sent));
      expect(beside >= 2, std::to_string(beside) + " layers ran during the gather of another one");
    }
  });
}

TEST_CASE("a dry run takes the memory of asynchronous collectives", "[ops]") {
  const auto taken = [](const DevicePtr& device) {
    const Grid mesh(device);
    const Layers layers = make_layers(mesh, 3);
    const X x = input(mesh, 0), y = input(mesh, 1);
    return peak(device, [&] { static_cast<void>(value_and_grad(mesh, loss<interleaved>, layers, x, y)); });
  };
  const auto dry =
      DevicePtr::make(parse_mesh("d=1,t=2"), 0, std::make_shared<DryWorld>(under_mpi() ? Peers::mpi : Peers::threads));
  const std::size_t planned = taken(dry);
  dry->clear_local();
  on_mesh("d=1,t=2", [&](const DevicePtr& device) {
    const std::size_t real = taken(device);
    expect(under_mpi() ? real <= planned : real == planned,
           "planned " + std::to_string(planned) + ", taken " + std::to_string(real));
  });
}
