// Ops of a user's own: values, gradients by operands and by the result, padding, recompute, and dry runs.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <shardlib/shardlib.hpp>
#include <string>
#include <vector>

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
    -> Tensor<D, custom::result_of<rules::linear_along, OpName("ewma"), Dim, S>> {
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

/// x, whose cotangent is clipped to [-1, 1].
template <Spec S>
auto clip_gradient(const Mesh<"d t">& mesh, const Tensor<f64, S>& x, Site site = Site::current()) -> Tensor<f64, S> {
  const auto kernel = [](custom::Shard<f64> y, custom::Shard<const f64> in) {
    std::copy_n(in.data, in.size(), y.data);
  };
  const auto clip = [](const auto& ct) { return to_partial<over<"t">>(clamp(all_reduce<over<"t">>(ct), -1.0, 1.0)); };
  return custom::record<"clip_gradient", Tensor<f64, S>>({{}, site}, kernel, custom::operands(x),
                                                         custom::vjp(mesh, x, clip));
}

using Rows = Tensor<f64, "B/d M">;
using Scale = Tensor<f64, "M">;
constexpr auto multiply = [](custom::Shard<f64> y, custom::Shard<const f64> x, custom::Shard<const f64> scale) {
  for (std::int64_t i = 0; i < y.size(); ++i) y.data[i] = x.data[i] * scale.data[i % scale.size()];
};
/// x * scale, with a VJP of x alone.
auto scaled(const Rows& x, const Scale& scale, Site site = Site::current()) {
  return custom::record<"scaled", Rows>(
      {{}, site}, multiply, custom::operands(x, scale),
      custom::vjp(x, custom::save(scale), [](const auto& ct, const auto& s) { return ct * s; }));
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

TEST_CASE("an op of one's own: the cotangent names the axes of the mesh, or passes its sum on", "[custom]") {
  on_meshes({"d=1,t=1", "d=2,t=1", "d=1,t=2", "d=2,t=2"}, [](const Mesh<"d t">& mesh) {
    struct Weights {
      Scale scale;
      Tensor<f64, "M F/t"> up;
    };
    const Sizes sizes{{"B", 4}, {"M", 3}, {"F", 4}};
    const Weights w{ones<f64, "M">(mesh, sizes), full<f64, "M F/t">(mesh, sizes, 0.4)};
    const auto x = full<f64, "B/d M">(mesh, sizes, 2.0);
    const auto gradient = [&](const auto& f) {
      const auto loss = [&](const Weights& v) -> Tensor<f64, "+d +t"> {
        return sum(einsum_unreduced<"B/d M, M F/t -> B/d F/t">(f(x * v.scale), v.up));
      };
      return fetch(value_and_grad(mesh, loss, w).second.template get<&Weights::scale>()).data;
    };
    // 1.6 is clipped, and not each device's summand, which is 0.8 for t=2. Each of 4 rows adds x times that.
    expect_equal(gradient([&](const Rows& y) { return clip_gradient(mesh, y); }), std::vector<f64>(3, 4 * 2.0));
    // sqrt(y^2 + 0) has the derivative 1 at 2; ewma with 0 is y.
    const auto linear = gradient(
        [&](const Rows& y) { return hypotenuse(y, zeros<f64, "B/d M">(mesh, sizes)) * 0.5 + ewma<"M">(y, 0.0) * 0.5; });
    for (const double each : linear) expect(std::abs(each - 4 * 2.0 * 1.6) < 1e-12, show(each));
  });
  on_mesh("d=2,t=2", [](const Mesh<"d t">& mesh) {
    const auto on_part = [&](const Mesh<"d">& part, const Tensor<f64, "A/d">& x) {
      const auto error = error_of([&] { static_cast<void>(custom::vjp(mesh, x, [](const auto& ct) { return ct; })); });
      expect(error.starts_with("custom::vjp: the operand `A/d` is on device ") &&
                 error.find("but the VJP is for mesh d=2,t=2; name the mesh of the operand") != std::string::npos,
             error);
      static_cast<void>(custom::vjp(part, x, [](const auto& ct) { return ct; }));
      return x;
    };
    static_cast<void>(on_submeshes<"N/t">(mesh, on_part, full<f64, "A/d">(mesh, {{"A", 4}}, 3.0)));
  });
}

TEST_CASE("an op of one's own: an operand that is differentiated has a VJP", "[custom]") {
  on_mesh("d=2", [](const Mesh<"d">& mesh) {
    struct Weights {
      Scale gain, scale;
    };
    const Sizes sizes{{"B", 4}, {"M", 3}};
    const Weights w{full<f64, "M">(mesh, sizes, 2.0), full<f64, "M">(mesh, sizes, 3.0)};
    const auto x = ones<f64, "B/d M">(mesh, sizes);
    const auto gradient = [&](const auto& f) {
      const auto loss = [&](const Weights& v) -> Tensor<f64, "+d"> {
        return sum(f(v));
      };
      return value_and_grad(mesh, loss, w).second;
    };
    const auto missing = [&](const auto& f) { return error_of([&] { gradient(f); }); };
    // Both weights have other uses, so that the loss depends on them.
    const auto forgotten = missing([&](const Weights& v) { return scaled(x * v.gain, v.scale) * v.scale; });
    expect(
        forgotten.starts_with("scaled at ") &&
            forgotten.find(": operand 2, `M`, is differentiated, but the op has no VJP for it, so its gradient would "
                           "miss this use; give the op a `custom::vjp` of this operand, or take `stop_gradient` of "
                           "it before (device ") != std::string::npos,
        forgotten);
    const auto recomputed = missing([&](const Weights& v) {
      return explicit_activation_checkpointing([](const Rows& y, const Scale& s) { return scaled(y, s); })(x * v.gain,
                                                                                                           v.scale) *
             v.scale;
    });
    expect(recomputed.find("operand 2, `M`, is differentiated") != std::string::npos, recomputed);
    // One tensor as two operands needs two VJPs, also where its first use has one.
    const auto squared = [](const Scale& a, const Scale& b, const auto&... vjps) {
      return custom::record<"squared", Scale>({{}, Site::current()}, multiply, custom::operands(a, b), vjps...);
    };
    const auto times = [](const Scale& a, const Scale& b) {
      return custom::vjp(a, custom::save(b), [](const auto& ct, const auto& other) { return ct * other; });
    };
    const auto once =
        missing([&](const Weights& v) { return x * squared(v.scale, v.scale, times(v.scale, v.scale)) * v.gain; });
    expect(once.find("operand 2, `M`, is differentiated") != std::string::npos, once);
    const auto twice = gradient([&](const Weights& v) {
      return x * squared(v.scale, v.scale, times(v.scale, v.scale), times(v.scale, v.scale)) * v.gain;
    });
    expect_equal(fetch(twice.template get<&Weights::scale>()).data, std::vector<f64>(3, 4 * 2 * 3.0 * 2.0));
    const auto extra = missing([&](const Weights& v) {
      return x * squared(v.scale, stop_gradient(v.scale), times(v.scale, v.scale), times(v.scale, v.scale)) * v.gain;
    });
    expect(extra.find("squared at ") == 0 &&
               extra.find(": the op has more VJPs of `M` than operands that are this tensor, 1, so its gradient would "
                          "count a use twice; give each operand one `custom::vjp` (") != std::string::npos,
           extra);
    // No gradient is wanted, or there is none: a stopped operand, a constant, an integer result.
    const auto stopped = gradient([&](const Weights& v) {
      return scaled(x * v.gain, stop_gradient(v.scale)) * v.scale + scaled(x * v.gain, zeros<f64, "M">(mesh, sizes));
    });
    expect_equal(fetch(stopped.template get<&Weights::scale>()).data, std::vector<f64>(3, 4 * 2.0 * 3.0));
    const auto sign_of = gradient([&](const Weights& v) {
      const auto kernel = [](custom::Shard<i32> y, custom::Shard<const f64> in) {
        for (std::int64_t i = 0; i < y.size(); ++i) y.data[i] = in.data[i] > 0 ? 1 : -1;
      };
      const auto signs =
          custom::record<"signs", Tensor<i32, "M">>({{}, Site::current()}, kernel, custom::operands(v.scale));
      return x * cast<f64>(signs) * v.scale * v.gain;
    });
    expect_equal(fetch(sign_of.template get<&Weights::scale>()).data, std::vector<f64>(3, 4 * 2.0));
    // A VJP may save a tensor that is not an operand. Here it is a statistic of one, which other ops have computed.
    const auto saved = gradient([&](const Weights& v) {
      const auto kernel = [](custom::Shard<f64> y, custom::Shard<const f64> in) {
        for (std::int64_t i = 0; i < y.size(); ++i) y.data[i] = in.data[i] * in.data[i];
      };
      return x * v.gain *
             custom::record<"squared", Scale>(
                 {{}, Site::current()}, kernel, custom::operands(v.scale),
                 custom::vjp(v.scale, custom::save(v.scale * 2.0),
                             [](const auto& ct, const auto& slope) { return ct * slope; }));
    });
    expect_equal(fetch(saved.template get<&Weights::scale>()).data, std::vector<f64>(3, 4 * 2.0 * 2 * 3.0));
  });
}

TEST_CASE("an op of one's own: a VJP returns the sizes of its operand", "[custom]") {
  on_mesh("d=2", [](const Mesh<"d">& mesh) {
    using X = Tensor<f64, "B/d L">;
    const int line = __LINE__ + 6;
    const auto gradient = [&](const X& x, const auto& cotangent) {
      const auto copy = [](custom::Shard<f64> y, custom::Shard<const f64> in) {
        std::copy_n(in.data, in.size(), y.data);
      };
      const auto loss = [&](const X& v) -> Tensor<f64, "+d"> {
        return sum(custom::record<"copy", X>({{}, Site::current()}, copy, custom::operands(v),
                                             custom::vjp(v, cotangent))) +
               sum(v);  // the cotangents of both uses are summed
      };
      return value_and_grad(mesh, loss, x).second;
    };
    const auto says = [&](const X& x, const auto& cotangent, const std::string& sizes) {
      const auto error = error_of([&] { static_cast<void>(gradient(x, cotangent)); });
      expect(error.starts_with("copy at " + std::string(__FILE__) + ":" + std::to_string(line) +
                               ": its VJP returns a cotangent with `L` of size " + sizes +
                               "; return one for all elements of the operand (device "),
             error);
    };
    const auto x = ones<f64, "B/d L">(mesh, {{"B", 4}, {"L", 8}});
    says(
        x, [](const auto& ct) { return rename<"H -> L">(narrow<"L -> H">(ct, 0, 4)); }, "4, where the operand has 8");
    says(
        x, [](const auto& ct) { return rename<"H -> L">(pad<"L -> H">(ct, 0, 8)); }, "16, where the operand has 8");
    // Padding is a part of the sizes, and an operand that has some gets a cotangent that has it, too.
    const auto padded = ones<f64, "B/d L">(mesh, {{"B", 4}, {"L", 3, 4}});
    says(
        padded, [](const auto& ct) { return rename<"H -> L">(narrow<"L -> H">(ct, 0, 2)); },
        "2, where the operand has 3 (padded to 4)");
    expect_equal(fetch(gradient(padded, [](const auto& ct) { return ct * 2.0; })).data, std::vector<f64>(12, 3.0));
  });
}
