// Corner cases that were wrong once: recomputation of host data and of a sum over devices, memory of the caller's,
// padded results, values that overflow, NaN.
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/shardlib.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using Data = Mesh<"d t">;
constexpr float infinity = std::numeric_limits<float>::infinity();

TEST_CASE("recompute: a host array that is gone, and an operand that one device alone keeps", "[ops]") {
  on_mesh("d=1,t=2", [](const Data& mesh) {
    const auto x = ones<f32, "M">(mesh, {{"M", 4}});
    const auto scaled = [](const Tensor<f32, "M">& v) {
      const HostArray<f32> factors{{4}, {1, 2, 3, 4}};
      return v * place<Tensor<f32, "M">>(Data(v.device()), factors);
    };
    const auto loss = [&](const Tensor<f32, "M">& v) {
      return to_partial<"+d +t">(sum<"M -> ">(explicit_activation_checkpointing(scaled)(v)));
    };
    const auto gradient = std::get<1>(value_and_grad(mesh, loss, x));
    const auto host = fetch(gradient).data;
    expect(host[0] == 1 && host[3] == 4, "the gradient is the array");

    struct Weights {
      Tensor<f32, "M/t"> bias;
      Tensor<f32, "M"> scale;
    };
    const Weights w{ones<f32, "M/t">(mesh, {{"M", 4}}), ones<f32, "M">(mesh, {{"M", 4}})};
    const auto biased = [](const Weights& u) -> Tensor<f32, "M +t"> {
      return to_partial<"M -> M +t">(all_gather<"M/t -> M">(u.bias)) * u.scale;
    };
    const auto total = [&](const Weights& u) -> Tensor<f32, "+d +t"> {
      return to_partial<"+t -> +d +t">(sum<"M +t -> +t">(explicit_activation_checkpointing(biased)(u)));
    };
    const auto found = std::get<1>(value_and_grad(mesh, total, w));
    expect(item(sum<"M -> ">(all_reduce<"M +d +t -> M">(found.template get<&Weights::scale>()))) == 4,
           "every device makes the same calls");
  });
}

TEST_CASE("from_memory: no optimizer writes into the caller's memory", "[ops]") {
  on_mesh("d=1,t=1", [](const DevicePtr& device) {
    if (device->exec().on_device()) return;  // there it is a copy
    const Data mesh(device);
    const std::vector<f32> initial(4, 1.0F);
    struct Weights {
      Tensor<f32, "M"> w;
    };
    Weights weights{from_memory<f32, "M">(mesh, {{"M", 4}}, std::span<const f32>(initial))};
    const Weights grads{ones<f32, "M">(mesh, {{"M", 4}})};
    SGD sgd;
    SGD::Moments<Weights> moments{zeros_like(weights)};
    sgd.update(weights, moments, grads, 0.5, 1.0, 1, [](std::string_view) { return true; });
    expect(initial[0] == 1 && weights.w.span()[0] == 0.5F, "the weights are new, the memory is as before");
  });
}

TEST_CASE("corner cases of values: draws of bf16, zeros like infinity, NaN of maximum", "[ops]") {
  on_mesh("d=1,t=1", [](const Data& mesh) {
    const auto draws = fetch(cast<f32>(random_uniform<bf16, "A">(mesh, {{"A", 1 << 14}}, {1, 2}))).data;
    for (const f32 draw : draws) expect(draw >= 0 && draw < 1, "uniform in [0, 1)");
    const auto x = full<f32, "A">(mesh, {{"A", 2}}, infinity);
    expect(fetch(zeros_like(x)).data[0] == 0, "zeros_like of infinity");
    const auto nan = x - x, zero = zeros<f32, "A">(mesh, {{"A", 2}});
    for (const auto& y : {maximum(zero, nan), maximum(nan, zero), minimum(zero, nan), minimum(nan, zero)})
      expect(std::isnan(fetch(y).data[0]), "a NaN is the maximum and the minimum");
  });
}

TEST_CASE("map: a root of 0 that is not differentiated", "[ops]") {
  on_mesh("d=1,t=1", [](const Data& mesh) {
    using X = Tensor<f64, "A">;
    const Sizes sizes{{"A", 2}};
    const X g = full<f64, "A">(mesh, sizes, 3.0), v = zeros<f64, "A">(mesh, sizes);
    const auto over_root = [](auto a, auto b) { return a * a / (sqrt(b) + 0.5); };
    const auto loss = [&](const X& x, const X& y) { return to_partial<"+d +t">(sum(map(over_root, x, y))); };
    expect(fetch(value_and_grad(mesh, loss, g, v).second).data[0] == 12, "2 a / 0.5");
    expect(fetch(hessian_vector_product(mesh, loss, g, g, v)).data[0] == 12, "2 / 0.5 along 3");
    struct Both {
      X x, y;
    };
    const auto of_both = [&](const Both& w) { return loss(w.x, w.y); };
    const auto both = value_and_grad(mesh, of_both, Both{g, v}).second;
    expect(fetch(both.get<&Both::x>()).data[0] == 12, "next to an infinite derivative by the other operand");
    expect(fetch(both.get<&Both::y>()).data[0] == -double{infinity}, "which stays");
  });
}

TEST_CASE("linear_scan along a sharded dim: a product of factors that overflows", "[ops]") {
  on_mesh("d=1,t=2", [](const Data& mesh) {
    const auto a = full<f32, "L/t">(mesh, {{"L", 400}}, 2.0), b = zeros<f32, "L/t">(mesh, {{"L", 400}});
    for (const f32 state : fetch(linear_scan<"L", over<"t">>(a, b)).data) expect(state == 0, "no state stays none");
  });
}

TEST_CASE("ragged_all_to_all: a padded result is an error", "[ops]") {
  on_mesh("e=2", [](const Mesh<"e">& mesh) {
    const auto rows = ones<f32, "R/e M">(mesh, {{"R", 4}, {"M", 2}});
    const auto sent = ones<i32, "P/e X">(mesh, {{"P", 2}, {"X", 2}});
    const auto received = ones<i32, "P X/e">(mesh, {{"P", 2}, {"X", 2}});
    const std::string said = error_of([&] {
      (void)ragged_all_to_all<"R/e M -> S/e M">(rows, sent, received, {{"S", 6, 8}});
    });
    expect(said.find("rows are counted on each device") != std::string::npos, said);
  });
}

TEST_CASE("recompute: an integer that a function returns has no derivative", "[ops]") {
  on_mesh("d=1,t=1", [](const Data& mesh) {
    struct Both {
      Tensor<f32, "M"> y;
      Tensor<i32, "M"> ids;
    };
    const auto layer = [](const Tensor<f32, "M">& v) -> Both { return {v * 2.0, cast<i32>(stop_gradient(v) * 7.0)}; };
    const auto loss = [&](const Tensor<f32, "M">& v) -> Tensor<f32, "+d +t"> {
      const Both both = explicit_activation_checkpointing(layer)(v);
      return to_partial<"+d +t">(sum<"M -> ">(both.y * cast<f32>(floor_divide(both.ids, 2.0))));
    };
    const auto gradient = std::get<1>(value_and_grad(mesh, loss, ones<f32, "M">(mesh, {{"M", 2}})));
    expect(fetch(gradient).data[1] == 6, "2 times the rounded half of 7");
  });
}

TEST_CASE("optimizers: NaN in Lion, Muon where names have sizes, trees without leaves", "[ops]") {
  on_mesh("d=1,t=1", [](const Data& mesh) {
    const auto all = [](std::string_view) { return true; };
    struct Vector {
      Tensor<f32, "M"> w;
    };
    Vector weights{ones<f32, "M">(mesh, {{"M", 2}})};
    const Vector grads{full<f32, "M">(mesh, {{"M", 2}}, std::numeric_limits<double>::quiet_NaN())};
    Lion::Moments<Vector> moments{zeros_like(weights)};
    Lion{}.update(weights, moments, grads, 0.1, 1.0, 0, all);
    expect(std::isnan(weights.w.span()[0]), "a gradient that is NaN shows in the weight");

    struct Matrices {
      Tensor<f32, "M N"> wide, other;
      Tensor<f32, "K M"> tall;
    };
    const Sizes sizes{{"M", 4}, {"N", 6}, {"K", 9}};
    const Scope scope(mesh);
    Matrices w{random_normal<f32, "M N">(mesh, sizes, {1, 1}), random_normal<f32, "M N">(mesh, sizes, {1, 2}),
               random_normal<f32, "K M">(mesh, sizes, {1, 3})};
    const Matrices g = w;
    auto state = Muon::init(w);
    Muon().update(w, state, g, 0.1, 1.0, 0, all);
    expect(std::isfinite(w.tall.span()[0]), "matrices of every shape");

    expect(global_norm(mesh, Array<"layers", Vector>{}) == 0, "the norm of nothing");
  });
}

TEST_CASE("scatter_gradients leaves a leaf where it is that was not gathered", "[ops]") {
  on_mesh("d=2,t=1", [](const Data& mesh) {
    struct Rest {
      Tensor<bf16, "M/d"> w;
      Tensor<bf16, "X +d"> kept;
    };
    struct Sums {
      Tensor<f32, "M +d"> w;
      Tensor<f32, "X +d"> kept;
    };
    const auto rest = scatter_gradients<Rest>(Sums{to_partial<"M -> M +d">(ones<f32, "M">(mesh, {{"M", 4}})),
                                                   to_partial<"X -> X +d">(full<f32, "X">(mesh, {{"X", 2}}, 3.0))});
    expect(fetch(cast<f32>(rest.w)).data[3] == 1 && fetch(cast<f32>(rest.kept)).data[1] == 3, "the sums");
  });
}

TEST_CASE("place: a host array whose values are not those of its shape", "[ops]") {
  on_mesh("d=1,t=1", [](const DevicePtr& device) {
    HostArray<f32> host;
    host.shape = {4, 8};
    const std::string said = error_of([&] { (void)place<Tensor<f32, "A B">>(Data(device), host); });
    expect(said.find("the host array has 0 values for a shape of 32") != std::string::npos, said);
  });
}

}  // namespace
