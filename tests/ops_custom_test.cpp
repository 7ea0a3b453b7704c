// Ops of a user's own: values, gradients by operands and by the result, padding, recompute, and dry runs.
#include <array>
#include <cmath>
#include <memory>
#include <shardlib/shardlib.hpp>
#include <string>

#include "shardlib/comm/dry.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

// docs/adding-an-op.md shows this op.

/// Exponentially weighted moving averages along an unsharded dim, from its end if `reverse`. Backward: the same from
/// the other end. `ewma<"L">(x, 0.9)`
template <DimName Dim, dtype D, Spec S>
auto ewma(const Tensor<D, S>& x, D decay, bool reverse = false, Site site = Site::current())
    -> Tensor<D, custom::result_of<rules::along, OpName("ewma"), Dim, S>> {
  const auto kernel = [decay, reverse](custom::Shard<D> y, custom::Shard<const D> x) {
    x.for_each_row(Dim, [&](custom::Row row) {
      D mean = 0;
      for (std::int64_t i = 0; i < row.size; ++i) {
        const std::int64_t at = row[reverse ? row.size - 1 - i : i];
        y.data[at] = mean = decay * mean + (1 - decay) * x.data[at];
      }
    });
  };
  const auto vjp = [decay, reverse](const auto& ct) { return ewma<Dim>(ct, decay, !reverse); };
  return custom::record<"ewma", Tensor<D, S>>({Dim, site}, kernel, custom::operands(x), custom::vjp(x, vjp));
}

/// sqrt(a^2 + b^2), whose VJPs need an operand and the result.
template <Spec S>
auto hypotenuse(const Tensor<f64, S>& a, const Tensor<f64, S>& b, Site site = Site::current()) -> Tensor<f64, S> {
  const auto kernel = [](custom::Shard<f64> y, custom::Shard<const f64> p, custom::Shard<const f64> q) {
    for (std::int64_t i = 0; i < y.size(); ++i) y.data[i] = std::sqrt(p.data[i] * p.data[i] + q.data[i] * q.data[i]);
  };
  const auto f = [](const auto& ct, const auto& side, const auto& y) { return ct * side / y; };
  return custom::record<"hypotenuse", Tensor<f64, S>>({{}, site}, kernel, custom::operands(a, b),
                                                      custom::vjp_of_result(a, custom::save(a), f),
                                                      custom::vjp_of_result(b, custom::save(b), f));
}

}  // namespace

TEST_CASE("an op of one's own: values and gradients on meshes, with padding and recompute", "[custom]") {
  on_meshes({"d=1", "d=2", "d=4"}, [](const Mesh<"d">& mesh) {
    struct Weights {
      Tensor<f64, "B/d L"> x;
    };
    HostArray<f64> host({4, 3});
    for (std::size_t i = 0; i < host.data.size(); ++i) host.data[i] = static_cast<double>(i + 1);
    const Sizes padded{{"L", 3, 5}};
    const Weights w{place<Tensor<f64, "B/d L">>(mesh, host, padded)};
    const auto y = fetch(ewma<"L">(w.x, 0.25));
    for (std::size_t b = 0; b < 4; ++b)
      for (std::size_t l = 0; l < 3; ++l) {
        const double before = l == 0 ? 0 : y.data[b * 3 + l - 1];
        REQUIRE(y.data[b * 3 + l] == 0.25 * before + 0.75 * host.data[b * 3 + l]);
      }
    // d/dx of sum(ewma(x)): element l counts in the averages l to 2.
    const auto loss = [](const Weights& w) -> Tensor<f64, "+d"> { return sum(ewma<"L">(w.x, 0.25)); };
    const auto recomputed = [](const Weights& w) -> Tensor<f64, "+d"> {
      return sum(
          explicit_activation_checkpointing([](const Tensor<f64, "B/d L">& x) { return ewma<"L">(x, 0.25); })(w.x));
    };
    for (const auto& gradient : {value_and_grad(mesh, loss, w).second, value_and_grad(mesh, recomputed, w).second}) {
      const auto g = fetch(gradient.x);
      for (std::size_t i = 0; i < g.data.size(); ++i) REQUIRE(g.data[i] == std::array{0.984375, 0.9375, 0.75}[i % 3]);
    }
  });
}

TEST_CASE("an op of one's own: a VJP takes operands and the result", "[custom]") {
  on_mesh("d=2", [](const Mesh<"d">& mesh) {
    struct Weights {
      Tensor<f64, "A/d"> a, b;
    };
    const Weights w{full<f64, "A/d">(mesh, {{"A", 4}}, 3.0), full<f64, "A/d">(mesh, {{"A", 4}}, 4.0)};
    const auto loss = [](const Weights& w) -> Tensor<f64, "+d"> { return sum(hypotenuse(w.a, w.b)); };
    const auto [l, g] = value_and_grad(mesh, loss, w);
    REQUIRE(item(all_reduce<"+d -> ">(l)) == 20.0);
    REQUIRE(fetch(g.a).data == std::vector<f64>(4, 0.6));
    REQUIRE(fetch(g.b).data == std::vector<f64>(4, 0.8));
  });
}

TEST_CASE("an op of one's own: its kernel does not run in a dry run, and errors name it", "[custom]") {
  if (under_mpi()) return;
  const auto dry = DevicePtr::make(parse_mesh("d=64"), 0, std::make_shared<DryWorld>());
  const Mesh<"d"> mesh(dry);
  const auto x = zeros<f64, "A/d L">(mesh, {{"A", std::int64_t{1} << 40}, {"L", 8}});
  const auto y = ewma<"L">(x, 0.25);
  REQUIRE(y.size("A") == std::int64_t{1} << 40);
  REQUIRE(detail::program_state(dry).counts.at("ewma").calls == 1);
  dry->clear_local();

  on_mesh("d=1", [](const Mesh<"d">& one) {
    const auto a = full<f64, "A/d">(one, {{"A", 4}}, 3.0), b = full<f64, "A/d">(one, {{"A", 5}}, 3.0);
    REQUIRE_THROWS_WITH(hypotenuse(a, b),
                        Catch::Contains("hypotenuse") && Catch::Contains("dim `A` is 5, but 4 in another operand"));
  });
}
