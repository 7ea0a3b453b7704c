// check_gradients: right gradients pass, of leaves in any placement; wrong ones are named with leaf and place.
#include <cstdint>
#include <limits>
#include <mutex>
#include <set>
#include <shardlib/shardlib.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

template <class D>
struct Layer {
  Tensor<D, "A/d B/t"> w;
  Tensor<D, "B/t/d"> scale;
};
template <class D>
struct Weights {
  Array<"layers", Layer<D>> layers;
  Tensor<D, "B"> bias;
  Tensor<D, ""> factor;
};

template <class D>
Tensor<D, "+d +t"> loss_of(const Weights<D>& w, const Tensor<D, "A/d">& x) {
  auto y = x;
  for (const Layer<D>& layer : w.layers) {
    const auto scale = all_gather<"B/t/d -> B/t">(layer.scale) + shard<"B -> B/t">(w.bias);
    y = all_reduce<"A/d +t -> A/d">(sum<"A/d B/t -> A/d +t">(tanh(layer.w * scale) * y));
  }
  return to_partial<"+d -> +d +t">(sum(y * y * w.factor));
}

template <class D, Spec A>
Weights<D> weights(const Mesh<A>& mesh) {
  const Sizes sizes{{"A", 3, 4}, {"B", 3, 4}};
  Weights<D> w;
  w.layers.resize(2);
  initialize(mesh, w, sizes, 7, [](std::string_view) { return Normal{0, 0.5}; });
  return w;
}

/// y = x^2. The factor scales the VJP; where it is not 1, the VJP is wrong.
template <class D, Spec S>
auto squared(const Tensor<D, S>& x, const Tensor<D, S>& factor, Site site = Site::current()) -> Tensor<D, S> {
  const auto kernel = [](custom::Shard<D> y, custom::Shard<const D> in) {
    for (std::int64_t i = 0; i < y.size(); ++i) y.data[i] = in.data[i] * in.data[i];
  };
  const auto vjp = [](const auto& ct, const auto& in, const auto& f) { return ct * in * f * 2.0; };
  return custom::record<"squared", Tensor<D, S>>({{}, site}, kernel, custom::operands(x),
                                                 custom::vjp(x, custom::save(x, factor), vjp));
}

const std::vector<std::string> meshes{"d=1,t=1", "d=2,t=1", "d=2,t=2"};

TEST_CASE("check_gradients: a right gradient passes, of every leaf", "[grad]") {
  on_meshes(meshes, [](const Mesh<"d t">& mesh) {
    const auto run = [&]<class D>(D, std::int64_t elements) {
      const auto x = random_normal<D, "A/d">(mesh, {{"A", 3, 4}}, {7, 99});
      return check_gradients(mesh, GradientCheck{.elements = elements}, loss_of<D>, weights<D>(mesh), x);
    };
    expect(run(f64{}, 0) == 6, "one of each leaf");
    expect(run(f64{}, 100) == 2 * (9 + 3) + 3 + 1, "all elements");
    expect(run(f32{}, 5) == 2 * (5 + 3) + 3 + 1, "some of a larger leaf");
    // With what it returns besides, and a leaf alone.
    const auto pair = [](const Tensor<f64, "A/d">& p) {
      const auto y = exp(p);
      return std::pair(to_partial<"+d -> +d +t">(sum(y)), y);
    };
    expect(check_gradients(mesh, pair, random_normal<f64, "A/d">(mesh, {{"A", 3, 4}}, {7, 3})) == 3, "a leaf alone");
  });
}

TEST_CASE("hessian_vector_product: a direction through X^T diag(12 (Xw)^2) X", "[grad]") {
  const auto loss = []<class D>(const Tensor<D, "M/t">& w, const Tensor<D, "B/d M/t">& x) {
    const auto y = einsum<"B/d M/t, M/t -> B/d">(x, w);
    return to_partial<"+d -> +d +t">(sum(square(square(y))));
  };
  on_meshes(meshes, [&](const Mesh<"d t">& mesh) {
    const auto run = [&]<class D>(D, double exact, double tolerance) {
      const auto of = [&]<Spec S>(std::uint64_t stream) {
        return random_normal<D, S>(mesh, {{"B", 3, 4}, {"M", 5, 6}}, {7, stream});
      };
      const auto x = of.template operator()<"B/d M/t">(1);
      const auto w = of.template operator()<"M/t">(2), v = of.template operator()<"M/t">(3);
      const Tensor<D, "M/t +d"> found = hessian_vector_product(mesh, loss, w, v * 1000.0, x);
      const Tensor<D, "M/t +d"> near = hessian_vector_product(mesh, 0.0, loss, w, v * 1000.0, x);
      const auto along = [&](const auto& u) { return einsum<"B/d M/t, M/t -> B/d">(x, u); };
      const auto expected = einsum<"B/d, B/d M/t -> M/t">(square(along(w)) * along(v) * 12000.0, x);
      const auto error = [&](const auto& product) {
        const auto difference = all_reduce<"M/t +d -> M/t">(product) - expected;
        return global_norm(mesh, cast<f32>(difference)) / global_norm(mesh, cast<f32>(expected));
      };
      expect(error(found) < exact, "the product is off by " + show(error(found)));
      expect(error(near) < tolerance, "the difference is off by " + show(error(near)));
      const auto nothing = hessian_vector_product(mesh, 0.0, loss, w, v * 0.0, x);
      expect(global_norm(mesh, cast<f32>(all_reduce<"M/t +d -> M/t">(nothing))) == 0, "no direction");
    };
    run(f64{}, 1e-13, 1e-8);
    run(f32{}, 1e-5, 1e-3);
  });
}

namespace {
// A model may lack a tensor, and each of its layers is of one kind.
struct Dense {
  Tensor<f64, "M F/t"> up;
};
struct Experts {
  Tensor<f64, "X M F/t"> up;
};
struct Kind {
  Array<"bias", Tensor<f64, "M">> bias;
  Array<"dense", Dense> dense;
  Array<"experts", Experts> experts;
};
using Kinds = Array<"layers", Kind>;
Tensor<f64, "+d +t"> loss_of_kinds(const Kinds& layers, const Tensor<f64, "B/d M">& x) {
  auto y = x;
  auto total = sum<"B/d -> +d">(sum<"B/d M -> B/d">(y) * 0.0);
  for (const Kind& layer : layers) {
    for (const auto& bias : layer.bias) y = y + bias;
    for (const auto& w : layer.dense)
      total = total + all_reduce<"+d +t -> +d">(
                          sum<"B/d F/t -> +d +t">(tanh(einsum_unreduced<"B/d M, M F/t -> B/d F/t">(y, w.up))));
    for (const auto& w : layer.experts)
      total = total + all_reduce<"+d +t -> +d">(
                          sum<"B/d X F/t -> +d +t">(tanh(einsum_unreduced<"B/d M, X M F/t -> B/d X F/t">(y, w.up))));
  }
  return to_partial<"+d -> +d +t">(total);
}
}  // namespace

TEST_CASE("check_gradients: an Array of layers of two kinds", "[grad]") {
  launch_on_meshes({"d", "t"}, 4, [](const DevicePtr& device) {
    const Mesh<"d t"> mesh(device);
    Kinds layers(3);
    layers[0].dense.resize(1);
    layers[1].experts.resize(1);
    layers[1].bias.resize(1);
    layers[2].dense.resize(1);
    initialize(mesh, layers, {{"M", 3}, {"F", 4}, {"X", 2}}, 7, [](std::string_view) { return Normal{0, 0.5}; });
    expect(leaf_names(layers) == std::vector<std::string>{"0/dense/0/up", "1/bias/0", "1/experts/0/up", "2/dense/0/up"},
           "the leaves that are there");
    check_gradients(mesh, loss_of_kinds, layers, random_normal<f64, "B/d M">(mesh, {{"B", 4}, {"M", 3}}, {7, 1}));
  });
}

TEST_CASE("check_gradients: a wrong gradient is named", "[grad]") {
  struct Two {
    Tensor<f64, "A/d B/t"> right, wrong;
  };
  const auto loss = [](const Two& w, const Tensor<f64, "A/d B/t">& ones, const Tensor<f64, "A/d B/t">& factor) {
    return sum(squared(w.right, ones) + squared(w.wrong, factor));
  };
  on_meshes(meshes, [&](const Mesh<"d t">& mesh) {
    const Sizes sizes{{"A", 2}, {"B", 3, 4}};
    const auto of = [&](std::vector<f64> values) {
      return place<Tensor<f64, "A/d B/t">>(mesh, HostArray<f64>({2, 3}, std::move(values)), sizes);
    };
    const Two w{of({1, 2, 3, 4, 5, 6}), of({1, 2, 3, 4, 5, 6})};
    const auto ones = of({1, 1, 1, 1, 1, 1});
    const GradientCheck exact{.step = 0x1p-7, .tolerance = 1e-3};
    expect(check_gradients(mesh, exact, loss, w, ones, ones) == 12, "the right ones");
    ERROR_IS(
        "check_gradients: the gradient of `wrong` is wrong at 2 of 6 elements; its worst, at [1, 2], is 0, but the "
        "loss changes by 12 per unit (allowed is a difference of 0.012); check the VJPs of the ops from there to the "
        "loss. Where the loss has a kink, no gradient fits: move the values away from it. A value under "
        "`stop_gradient` changes the loss, too: "
        "compute it before the call, and pass it as an argument (mesh " +
            to_string(mesh.device()->axes()) + ")",
        check_gradients(mesh, exact, loss, w, ones, of({1, 1, 1.25, 1, 1, 0})));
    const f64 nan = std::numeric_limits<f64>::quiet_NaN();
    expect(error_of([&] {
             check_gradients(mesh, exact, loss, w, ones, of({1, nan, 1, 1, 1, 1}));
           }).find("`wrong` is wrong at") != std::string::npos,
           "a NaN");
    // An element that is not compared by itself is found too.
    ERROR_IS(
        "check_gradients: the gradient of `wrong` is wrong at some of its 6 elements, but not at the 2 that were "
        "compared: a small move of all changes the loss by 0.11482, not by 0.143525 as the gradient says (allowed is a "
        "difference of 0.00061457); compare more of them with GradientCheck::elements; check the VJPs of the ops from "
        "there to the loss. Where the loss has a kink, no gradient fits: move the values away from it. A value under "
        "`stop_gradient` changes the loss, too: "
        "compute it before the call, and pass it as an argument (mesh " +
            to_string(mesh.device()->axes()) + ")",
        check_gradients(mesh, {.step = 0x1p-7, .tolerance = 1e-3, .elements = 2}, loss, w, ones,
                        of({1, 1, 1.25, 1, 1, 1})));
    // A wrong factor of all is found with the default step, too, and in f32.
    const auto halved = [&](const Tensor<f32, "A/d B/t">& x) {
      return sum(squared(x, full<f32, "A/d B/t">(mesh, sizes, 0.5)));
    };
    expect(
        error_of([&] {
          check_gradients(mesh, halved, cast<f32>(w.wrong));
        }).starts_with("check_gradients: the gradient of the weight is wrong at 6 of 6 elements; its worst, at [1, 2]"),
        "a leaf alone");
  });
}

TEST_CASE("launch_on_meshes: each mesh of powers of two", "[grad]") {
  std::mutex mutex;
  std::set<std::string> seen;
  launch_on_meshes({"d", "t"}, 4, [&](const DevicePtr& device) {
    const Mesh<"d t"> mesh(device);
    const auto x = random_normal<f64, "A/d B/t">(mesh, {{"A", 8}, {"B", 12}}, {7, 3});
    const auto loss = [](const Tensor<f64, "A/d B/t">& y) { return sum(tanh(y)); };
    expect(check_gradients(mesh, {.elements = 3}, loss, x) == 3, "three, and all along one direction");
    const std::lock_guard lock(mutex);
    seen.insert(to_string(device->axes()));
  });
  std::set<std::string> all{"d=1,t=1", "d=1,t=2", "d=2,t=1", "d=1,t=4", "d=2,t=2", "d=4,t=1"};
  if (under_mpi())  // those that have a device on this rank
    std::erase_if(all, [](const std::string& mesh) {
      const int count = device_count(parse_mesh(mesh));
      return count > world_size() || count <= world_rank();
    });
  REQUIRE(seen == all);
}

}  // namespace
