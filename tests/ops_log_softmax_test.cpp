// log_softmax, and softmax, log_softmax and logsumexp along sharded dims, with their VJPs, over every spec of two dims
// on two axes. Their second derivatives are in second_derivatives_test.cpp.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "op_case.hpp"
#include "shape_specs.hpp"
#include "shardlib/shardlib.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

void log_softmax_row(std::vector<double>& row) {
  double total = 0;
  for (const double v : row) total += std::exp(v);
  for (double& v : row) v -= std::log(total);
}
double log_of_sum(const std::vector<double>& x) {
  double sum = 0;
  for (const double v : x) sum += std::exp(v);
  return std::log(sum);
}

/// The axes of the dims of From that To lacks, in their order: "over<d t>".
constexpr OpSpec axes_between(Spec from, Spec to) {
  detail::Text names = "over<";
  for (const Dim& dim : parse_tensor(from).spec.dims)
    if (!parse_tensor(to).spec.has(dim.name))
      for (const auto axis : dim.axes) names = names + (names == detail::Text("over<") ? "" : " ") + axis;
  return OpSpec((names + ">").view());
}

template <dtype D>
constexpr Options within(double tolerance) {
  return {.law = Law::none, .tolerance = std::is_same_v<D, bf16> ? 0.03 : tolerance};
}

template <std::size_t I, DimName Dim>
void add_along(std::vector<Case>& cases) {
  static constexpr Spec spec{two_dims[I]};
  using D = turn_of<I>;
  using X = Tensor<D, spec>;
  static constexpr OpSpec axes = axes_between(spec, without_dim<spec, Dim>);
  const std::string dim(std::string_view{Dim}), text = " along " + dim + " of " + std::string(two_dims[I]);
  if constexpr (rules::softmax("log_softmax", Dim, spec).ok())
    cases.push_back(make_case<X>(
        "log_softmax" + text, [](const auto& x) { return log_softmax<Dim>(x); }, rows(dim, log_softmax_row),
        within<D>(1e-5)));
  if constexpr (rules::softmax_over("softmax", Dim, axes, spec).ok()) {
    cases.push_back(make_case<X>(
        "log_softmax over axes" + text, [](const auto& x) { return log_softmax<Dim, axes>(x); },
        rows(dim, log_softmax_row), within<D>(1e-5)));
    cases.push_back(make_case<X>(
        "softmax over axes" + text, [](const auto& x) { return softmax<Dim, axes>(x); }, rows(dim, softmax_row),
        within<D>(1e-5)));
  }
}

TEST_CASE("log_softmax, and softmax along sharded dims", "[ops]") {
  std::vector<Case> cases;
  each<two_dims.size()>([&](auto i) {
    add_along<i, "A">(cases);
    add_along<i, "B">(cases);
  });
  // Of an unsharded dim the other one is sharded or not. A sharded one has both axes, in two orders, or one of them,
  // and the other is on the other dim or nowhere.
  CHECK(cases.size() == 2 * 5 + 2 * 2 * (2 + 2 * 2));
  check_placements(cases, cases.size());
}

template <std::size_t I, Spec To>
void add_logsumexp(std::vector<Case>& cases) {
  static constexpr Spec from{two_dims[I]};
  static constexpr OpSpec op = make_op<from, To>, axes = axes_between(from, To);
  using D = turn_of<I>;
  if constexpr (rules::logsumexp_over(op, axes, detail::parsed<from>).ok())
    cases.push_back(make_case<Tensor<D, from>>(
        "logsumexp " + std::string(std::string_view(op)), [](const auto& x) { return logsumexp<op, axes>(x); },
        folded(log_of_sum), within<D>(4e-6)));
}

TEST_CASE("logsumexp over sharded dims", "[ops]") {
  std::vector<Case> cases;
  each<two_dims.size()>([&](auto i) {
    static constexpr Spec spec{two_dims[i]};
    add_logsumexp<i, without_dim<spec, "A">>(cases);
    add_logsumexp<i, without_dim<spec, "B">>(cases);
    add_logsumexp<i, "">(cases);
  });
  CHECK(cases.size() == 2 * (2 + 2 * 2) + (2 * 2 + 2 + 2 * 2));
  check_placements(cases, cases.size());
}

TEST_CASE("log_softmax and softmax along sharded dims, of large numbers, infinities, NaN and padding", "[ops]") {
  on_mesh("d=1,t=2", [](const Mesh<"d t">& mesh) {
    constexpr f64 inf = std::numeric_limits<f64>::infinity();
    const auto of = [&](const std::vector<f64>& values) {
      const auto n = static_cast<std::int64_t>(values.size());
      return place<Tensor<f64, "V/t">>(mesh, HostArray<f64>({n}, values), {{"V", n, 8}});
    };
    const auto check = [&](const std::vector<f64>& x, const std::vector<f64>& shares, f64 total) {
      const auto v = of(x);
      expect_equal(fetch(softmax<"V", over<"t">>(v)).data, shares);
      expect(item(logsumexp<"V/t -> ", over<"t">>(v)) == total, "logsumexp");
      std::vector<f64> logs;
      for (const f64 share : shares) logs.push_back(std::log(share));
      expect_equal(fetch(log_softmax<"V", over<"t">>(v)).data, logs);
      expect_equal(fetch(log_softmax<"V">(all_gather<"V">(v))).data, logs);
      const auto loss = [](const Tensor<f64, "V/t">& y) {
        return to_partial<" -> +d +t">(logsumexp<"V/t -> ", over<"t">>(y));
      };
      expect_equal(fetch(value_and_grad(mesh, loss, v).second).data, shares);
    };
    check({1e17, 1e17}, {0.5, 0.5}, 1e17);
    check({-inf, 3, -inf}, {0, 1, 0}, 3);
    check({0, inf, -1, -2, inf}, {0, 0.5, 0, 0, 0.5}, inf);
    check({-inf, -inf}, {0, 0}, -inf);
    // A NaN stays visible in all that it reaches.
    const auto check_nan = [](const HostArray<f64>& values) {
      for (const f64 value : values.data) expect(std::isnan(value), "a number instead of a NaN: " + show(value));
    };
    for (const f64 other : {0.0, inf, -inf}) {
      const auto x = of({other, std::numeric_limits<f64>::quiet_NaN()});
      check_nan(fetch(softmax<"V", over<"t">>(x)));
      check_nan(fetch(log_softmax<"V", over<"t">>(x)));
      check_nan(fetch(log_softmax<"V">(all_gather<"V">(x))));
      check_nan(fetch(logsumexp<"V/t -> ", over<"t">>(x)));
      const auto loss = [](const Tensor<f64, "V/t">& y) {
        return to_partial<" -> +d +t">(logsumexp<"V/t -> ", over<"t">>(y));
      };
      check_nan(fetch(value_and_grad(mesh, loss, x).second));
    }
    // The log of a share below the least number, where log(softmax(x)) is -inf.
    expect_equal(fetch(log_softmax<"V", over<"t">>(of({1000, -1000, 0}))).data, std::vector<f64>{0, -2000, -1000});
    expect_equal(fetch(log_softmax<"V">(all_gather<"V">(of({1000, -1000, 0})))).data,
                 std::vector<f64>{0, -2000, -1000});
  });
}

TEST_CASE("log_softmax along a sharded dim, in a recomputed function", "[ops]") {
  on_mesh("d=1,t=2", [](const Mesh<"d t">& mesh) {
    using X = Tensor<f64, "B V/t">;
    const auto f = [](const X& x) {
      const auto y = sin(x);
      return log_softmax<"V", over<"t">>(y) * softmax<"V", over<"t">>(x) + logsumexp<"B V/t -> B", over<"t">>(y);
    };
    const auto loss_of = [](const auto& g) {
      return [g](const X& x) { return to_partial<"+t -> +d +t">(sum(square(g(x)))); };
    };
    const auto x = random_normal<f64, "B V/t">(mesh, {{"B", 3}, {"V", 7, 8}}, {1, 1});
    const auto [kept, by_kept] = value_and_grad(mesh, loss_of(f), x);
    const auto [again, by_again] = value_and_grad(mesh, loss_of(explicit_activation_checkpointing(f)), x);
    expect_equal(fetch(again).data, fetch(kept).data);
    expect_equal(fetch(by_again).data, fetch(by_kept).data);
  });
}

}  // namespace
