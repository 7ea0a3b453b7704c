// Sums, means, maxima, softmax, norms and rotary embedding, with their VJPs.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "op_case.hpp"
#include "shardlib/comm/dry.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using Row = std::vector<double>;

/// Products of one operand, divided by how many elements make one of the result.
void averages(const std::vector<Global>& x, Global& y) {
  products()(x, y);
  for (double& v : y.data) v *= static_cast<double>(y.data.size()) / static_cast<double>(x[0].data.size());
}

TEST_CASE("sum and mean", "[ops]") {
  check_cases({
      ONE(f32, "A/t B", (sum<"A/t B -> B +t">(x)), products()),
      ONE(f32, "A/t B", (sum<"A/t B -> A/t">(x)), products()),
      ONE(f32, "B/d L M/t", (sum<"B/d L M/t -> L +d +t">(x)), products()),
      ONE(f32, "A/t/d", (sum<"A/t/d -> +d +t">(x)), products()),
      ONE(f32, "B C +t", (sum<"B C +t -> C +t">(x)), products()),
      ONE(f32, "A/d/t/p C", (sum<"A/d/t/p C -> C +d +p +t">(x)), products()),
      ONE(f32, "B/d C/t", sum(x), products()),
      ONE(f32, "", sum(x), products()),
      ONE(bf16, "B/d C", (sum<"B/d C -> B/d">(x)), products()),
      ONE(f64, "B/d C", (sum<"B/d C -> C +d">(x)), products()),
      ONE(i32, "B/d C", (sum<"B/d C -> C +d">(x)), products(), .draws = {Draw::integers}),
      ONE(f32, "B/d C", (mean<"B/d C -> C +d">(x)), averages, .tolerance = 1e-6),
      ONE(f32, "B/d L M/t", (mean<"B/d L M/t -> +d +t">(x)), averages, .tolerance = 1e-6),
      ONE(bf16, "B/d C", (mean<"B/d C -> B/d">(x)), averages, .tolerance = 0.01),
  });
}

void first_maximum(Row& row) {
  row = {static_cast<double>(std::max_element(row.begin(), row.end()) - row.begin())};
}

TEST_CASE("max, min and argmax", "[ops]") {
  const Reference maxima = extrema(false), minima = extrema(true);
  check_cases({
      ONE(f32, "B V C/t", (max<"B V C/t -> C/t">(x)), maxima, .law = Law::none, .tolerance = 1e-6),
      ONE(f32, "B C/t V", (min<"B C/t V -> C/t">(x)), minima, .law = Law::none, .tolerance = 1e-6),
      ONE(f64, "V", (min<"V -> ">(x)), minima, .law = Law::none, .tolerance = 1e-6),
      ONE(i32, "B/d V", (max<"B/d V -> B/d">(x)), maxima, .draws = {Draw::integers}),
      ONE(i32, "V B/d", (min<"V B/d -> B/d">(x)), minima, .draws = {Draw::integers}),
      ONE(bf16, "B/d V", (max<"B/d V -> B/d">(x)), maxima, .law = Law::none, .tolerance = 0.01),
      ONE(f32, "B V C/t", (argmax<"B V C/t -> B C/t">(x)), rows("V", first_maximum)),
      ONE(i32, "V B/d", (argmax<"V B/d -> B/d">(x)), rows("V", first_maximum), .draws = {Draw::integers}),
  });
}

TEST_CASE("softmax and norms", "[ops]") {
#define ROWS(dtype, from, dim, expression, f, tolerance_) \
  ONE(dtype, from, expression, rows(dim, f), .law = Law::none, .tolerance = tolerance_)
  check_cases({
      ROWS(f32, "B K M/t", "K", softmax<"K">(x), softmax_row, 2e-6),
      ROWS(f64, "K B/d", "K", softmax<"K">(x), softmax_row, 1e-7),
      ROWS(bf16, "B/d M", "M", softmax<"M">(x), softmax_row, 0.01),
      ROWS(f32, "B/d L M", "M", rms_norm<"M">(x), rms_norm_row, 4e-6),
      ROWS(bf16, "B/d M", "M", rms_norm<"M">(x), rms_norm_row, 0.02),
      ROWS(f64, "C/t M B/d", "M", (layer_norm<"M">(x, 0.25)), layer_norm_row, 1e-7),
  });
#undef ROWS
}

TEST_CASE("norms refuse an epsilon of which no root can be taken", "[ops]") {
  on_mesh("d=1,t=1", [](const Mesh<"d t">& mesh) {
    const auto x = zeros<f32, "B/d M">(mesh, {{"B", 2}, {"M", 4}});
    REQUIRE_THROWS_WITH(rms_norm<"M">(x, -1e-6),
                        Catch::Contains("rms_norm<`M`> at ") &&
                            Catch::Contains(": the epsilon is -1e-06, of which no root can be taken; give a finite "
                                            "number that is not negative, such as 1e-6 (device 0 (d=0,t=0)"));
    REQUIRE_THROWS_WITH(layer_norm<"M">(x, -0.5), Catch::Contains("layer_norm<`M`> at "));
    const auto scale = ones<f32, "M">(mesh, {{"M", 4}});
    REQUIRE_THROWS_WITH(rms_norm<"M">(x, scale, -0.5), Catch::Contains("the epsilon is -0.5"));
    REQUIRE_THROWS_WITH(layer_norm<"M">(x, std::numeric_limits<double>::quiet_NaN()),
                        Catch::Contains("the epsilon is nan"));
    REQUIRE(fetch(rms_norm<"M">(ones<f32, "B/d M">(mesh, {{"B", 1}, {"M", 2}}), 0.0)).data == std::vector<f32>{1, 1});
  });
}

/// A norm of rows with a scale, the second operand, and a bias if there is a third.
Reference scaled(const std::function<void(Row&)>& norm) {
  return {[norm](const std::vector<Global>& x, Global& y) {
    rows("M", [&](Row& row) {
      norm(row);
      for (std::size_t i = 0; i < row.size(); ++i) row[i] = row[i] * x[1].data[i] + (x.size() > 2 ? x[2].data[i] : 0);
    })(x, y);
  }};
}

TEST_CASE("norms with a scale and a bias", "[ops]") {
#define RMS(dtype, from, scale_dtype, expression, tolerance_)                                      \
  make_case<Tensor<dtype, from>, Tensor<scale_dtype, "M">>(                                        \
      #expression " of " #dtype " " from, [](const auto& x, const auto& s) { return expression; }, \
      scaled(rms_norm_row), {.law = Law::none, .tolerance = tolerance_})
#define LAYER(dtype, from, scale_dtype, expression, tolerance_)                                                   \
  make_case<Tensor<dtype, from>, Tensor<scale_dtype, "M">, Tensor<scale_dtype, "M">>(                             \
      #expression " of " #dtype " " from, [](const auto& x, const auto& s, const auto& b) { return expression; }, \
      scaled(layer_norm_row), {.law = Law::none, .tolerance = tolerance_})
  check_cases({
      RMS(f32, "B/d L M", f32, (rms_norm<"M">(x, s)), 1e-5),
      RMS(bf16, "L B/d M", bf16, (rms_norm<"M">(x, s)), 0.03),
      RMS(bf16, "B/d M", f32, (rms_norm<"M", f32>(x, s)), 0.03),
      RMS(f64, "M B/d/t", f64, (rms_norm<"M">(x, s)), 1e-6),
      LAYER(f32, "B/t M", f32, (layer_norm<"M">(x, s, b, 0.25)), 1e-5),
      LAYER(f32, "B/d L M", f32, (layer_norm<"M", bf16>(x, s, b, 0.25)), 0.03),
      LAYER(bf16, "B/d M C/t", bf16, (layer_norm<"M">(x, s, b, 0.25)), 0.03),
      LAYER(f64, "C/t M B/d", f64, (layer_norm<"M">(x, s, b, 0.25)), 1e-6),
      LAYER(f64, "M", f64, (layer_norm<"M">(x, s, b, 0.25)), 1e-6),
  });
#undef RMS
#undef LAYER
}

using Grid = Mesh<"d t">;
template <dtype D>
struct Normed {
  Tensor<D, "B/d L M"> x;
  Tensor<D, "M"> scale, bias;
};
/// A norm's weights: `spelled` with an op each for casts, norm, scale and bias.
template <dtype D>
auto normed(const Normed<D>& w, bool spelled) -> Tensor<D, "B/d L M"> {
  using A = accumulator_t<D>;
  if (spelled) return cast<D>(layer_norm<"M">(cast<A>(w.x), 1e-5) * cast<A>(w.scale) + cast<A>(w.bias));
  return layer_norm<"M">(w.x, w.scale, w.bias, 1e-5);
}
template <dtype D>
Normed<D> normed_weights(const Grid& mesh, const Sizes& sizes) {
  return {random_normal<D, "B/d L M">(mesh, sizes, {1, 1}), random_normal<D, "M">(mesh, sizes, {1, 2}),
          random_normal<D, "M">(mesh, sizes, {1, 3})};
}
/// The sum of the elements of a result, each times a number of its own.
template <dtype D>
auto weighed(const Tensor<D, "B/d L M">& y) -> Tensor<f32, "+d +t"> {
  const auto factors = random_normal<f32, "B/d L M">(
      Grid(y.device()), {{"B", y.size("B")}, {"L", y.size("L")}, {"M", y.size("M")}}, {1, 4});
  return to_partial<"+d -> +d +t">(sum<"B/d L M -> +d">(cast<f32>(y) * factors));
}

TEST_CASE("norms with a scale have the bits of the ops that they fuse, and their gradients nearly so", "[ops]") {
  const auto check = [](const Grid& mesh, auto element, double tolerance) {
    using D = decltype(element);
    const auto w = normed_weights<D>(mesh, {{"B", 6}, {"L", 37}, {"M", 150}});
    const auto of_one = normed(w, false), of_several = normed(w, true);
    expect(std::ranges::equal(of_one.span(), of_several.span()), "another result");
    const auto gradient = [&](bool spelled) {
      return value_and_grad(
          mesh, [spelled](const Normed<D>& v) { return weighed(normed(v, spelled)); }, w);
    };
    const auto [loss, fused] = gradient(false);
    const auto right = gradient(true).second;
    const auto close = [&](const auto& a, const auto& b, const char* what) {
      double error = 0, size = 0;
      for (std::size_t i = 0; i < b.span().size(); ++i) {
        const auto p = static_cast<detail::scalar_of<D>>(a.span()[i]),
                   q = static_cast<detail::scalar_of<D>>(b.span()[i]);
        error += (p - q) * (p - q);
        size += q * q;
      }
      expect(error <= tolerance * tolerance * size,
             std::string(what) + ": " + show(std::sqrt(error)) + " of " + show(std::sqrt(size)));
    };
    const auto dscale = fused.template get<&Normed<D>::scale>(), dbias = fused.template get<&Normed<D>::bias>();
    close(fused.template get<&Normed<D>::x>(), right.template get<&Normed<D>::x>(), "the gradient of x");
    close(dscale, right.template get<&Normed<D>::scale>(), "the gradient of the scale");
    close(dbias, right.template get<&Normed<D>::bias>(), "the gradient of the bias");
    // The result is linear in scale and bias together.
    const Dot of_scale = pair_up(*w.scale.value(), *dscale.value()), of_bias = pair_up(*w.bias.value(), *dbias.value());
    const double pairing = of_scale.sum + of_bias.sum, whole = item(all_reduce<"+d +t -> ">(loss));
    expect(std::abs(pairing - whole) <= std::max(tolerance, 1e-6) * (of_scale.magnitude + of_bias.magnitude),
           "adjoint law: " + show(pairing) + " and " + show(whole));
  };
  on_meshes({"d=1,t=1", "d=2,t=1", "d=2,t=2"}, [&](const Grid& mesh) {
    check(mesh, f32(), 1e-6);
    check(mesh, f64(), 1e-14);
    check(mesh, bf16(), 5e-3);
  });
}

TEST_CASE("a norm with a scale is one op forward and one backward, whose memory a dry run knows", "[ops][memory]") {
  on_mesh("d=1,t=1", [](const DevicePtr& device) {
    const auto step = [](const DevicePtr& on, bool recompute) {
      const Grid mesh(on);
      const auto loss = [recompute](const Normed<f32>& w) {
        const auto one = [](const Normed<f32>& v) { return normed(v, false); };
        return weighed(recompute ? explicit_activation_checkpointing(one)(w) : one(w));
      };
      return value_and_grad(mesh, loss, normed_weights<f32>(mesh, {{"B", 6}, {"L", 37}, {"M", 150}})).second;
    };
    auto& counts = detail::program_state(device).counts;
    counts.clear();
    const auto grads = step(device, false), again = step(device, true);
    expect(counts.at("layer_norm_backward").calls == 2 && !counts.contains("+"), "other ops");
    const auto same = [](const auto& a, const auto& b) {
      expect(std::ranges::equal(a.span(), b.span()), "a replay changes the bits");
    };
    same(grads.get<&Normed<f32>::x>(), again.get<&Normed<f32>::x>());
    same(grads.get<&Normed<f32>::scale>(), again.get<&Normed<f32>::scale>());
    same(grads.get<&Normed<f32>::bias>(), again.get<&Normed<f32>::bias>());
    const auto dry = DevicePtr::make(parse_mesh("d=1,t=1"), 0, std::make_shared<DryWorld>(Peers::threads), 1, tuning);
    expect(peak(device, [&] { step(device, false); }) == peak(dry, [&] { step(dry, false); }), "a dry run's memory");
  });
}

TEST_CASE("norms with a scale: rows of padding add nothing to the scale's gradient", "[ops]") {
  on_meshes({"d=1,t=1", "d=2,t=1", "d=2,t=2"}, [](const Grid& mesh) {
    const auto x = random_normal<f32, "B/d M">(mesh, {{"B", 5, 6}, {"M", 7, 8}}, {1, 1});
    const auto scale = random_normal<f32, "M">(mesh, {{"M", 7, 8}}, {1, 2});
    const auto gradient = [&](auto norm) {
      const auto loss = [&](const Tensor<f32, "M">& s) -> Tensor<f32, "+d +t"> {
        return to_partial<"+d -> +d +t">(sum<"B/d M -> +d">(norm(s)));
      };
      return value_and_grad(mesh, loss, scale).second;
    };
    const auto fused = gradient([&](const auto& s) { return rms_norm<"M">(x, s, 0.0); });
    const auto right = gradient([&](const auto& s) { return rms_norm<"M">(x, 0.0) * s; });
    for (std::size_t i = 0; i < right.span().size(); ++i)
      expect(std::abs(fused.span()[i] - right.span()[i]) <= 1e-5F,
             show(fused.span()[i]) + ", not " + show(right.span()[i]));
  });
}

TEST_CASE("norms with a scale: a NaN is in all of the scale's gradient", "[ops]") {
  on_mesh("d=1,t=1", [](const Grid& mesh) {
    HostArray<f32> host({2, 3});
    host.data = {1, std::numeric_limits<f32>::quiet_NaN(), 2, 3, 4, 5};
    const auto x = place<Tensor<f32, "B M">>(mesh, host, {});
    const auto loss = [&](const Tensor<f32, "M">& s) -> Tensor<f32, "+d +t"> {
      return to_partial<" -> +d +t">(sum<"B M -> ">(rms_norm<"M">(x, s)));
    };
    const auto gradient = value_and_grad(mesh, loss, ones<f32, "M">(mesh, {{"M", 3}})).second;
    for (const f32 number : gradient.span()) expect(std::isnan(number), show(number));
  });
}

constexpr RopeAngles yarn{
    .base = 100, .factor = 8, .context = 40, .yarn = true, .beta_fast = 3, .beta_slow = 0.5, .truncate = false};

/// Turns pairs (i, i + n/2) of dim D by position along L, at base 100: plainly, or as `yarn`.
template <bool by_yarn = false>
void rotate(const std::vector<Global>& x, Global& y) {
  const Global& in = x[0];
  const auto at = [&](const char* name) {
    return static_cast<std::size_t>(std::find(in.names.begin(), in.names.end(), name) - in.names.begin());
  };
  const std::size_t l = at("L"), k = at("K");
  const Shape strides = strides_along(in, in.names);
  const std::int64_t half = in.shape[k] / 2;
  for_each_index(in.shape, [&](const Shape& i) {
    const std::int64_t pair = i[k] % half;
    double angle = static_cast<double>(i[l]) * std::pow(100.0, -static_cast<double>(pair) / static_cast<double>(half)),
           scale = 1;
    if (by_yarn) {
      // Pair 0 stays. Pair 1 lies between those that would turn 3 and 0.5 times in 40 positions.
      const double first = 0.3267588682501849, last = 1.1049101186338284,
                   share = pair == 0 ? 0 : (1 - first) / (last - first);
      angle *= 1 - share + share / 8;
      scale = 1.2079441541679836;  // 0.1 ln 8 + 1
    }
    Shape other = i;
    other[k] = i[k] < half ? i[k] + half : i[k] - half;
    const double own = in.data[offset(strides, i)], its = in.data[offset(strides, other)];
    y.data[offset(strides, i)] = scale * (std::cos(angle) * own + (i[k] < half ? -1 : 1) * std::sin(angle) * its);
  });
}

TEST_CASE("rope", "[ops]") {
#define ROPE(dtype, from, tolerance_) \
  ONE(dtype, from, (rope<"L", "K">(x, {100})), rotate<>, .law = Law::each, .tolerance = tolerance_)
#define YARN(dtype, from, tolerance_) \
  ONE(dtype, from, (rope<"L", "K">(x, yarn)), rotate<true>, .law = Law::each, .tolerance = tolerance_)
  check_cases({
      ROPE(f32, "B/d L H/t K", 1e-6),
      ROPE(f32, "L/t K B", 1e-6),
      ROPE(f32, "K L/d +t", 2e-6),
      ROPE(f64, "L/t K", 1e-12),
      ROPE(bf16, "B/d L K", 0.02),
      YARN(f32, "B/d L H/t K", 1e-5),
      YARN(f64, "K L/t", 1e-12),
  });
#undef ROPE
#undef YARN
}

/// Llama 3.1's apply_scaling, by wavelengths.
double llama_frequency(double base, std::int64_t pair, std::int64_t width) {
  const double frequency = std::pow(base, -2.0 * static_cast<double>(pair) / static_cast<double>(width));
  const double wavelength = 2 * std::acos(-1.0) / frequency;
  if (wavelength < 8192 / 4.0) return frequency;
  if (wavelength > 8192 / 1.0) return frequency / 8;
  const double smooth = (8192 / wavelength - 1) / (4.0 - 1);
  return (1 - smooth) * frequency / 8 + smooth * frequency;
}

TEST_CASE("rope: angles, plain, linear and as Llama 3.1 stretches them", "[ops]") {
  const RopeAngles plain{.base = 500000}, linear{.base = 500000, .factor = 4},
      llama{.base = 500000, .factor = 8, .context = 8192};
  int kept = 0, divided = 0;
  for (std::int64_t pair = 0; pair < 64; ++pair) {
    const double frequency = std::pow(500000.0, -static_cast<double>(pair) / 64);
    for (const std::int64_t position : {0, 1, 77, 131071}) {
      const auto at = static_cast<double>(position);
      CHECK(std::abs(plain(position, pair, 128) - at * frequency) <= 1e-15 * at);
      CHECK(std::abs(linear(position, pair, 128) - at * frequency / 4) <= 1e-15 * at);
      CHECK(std::abs(llama(position, pair, 128) - at * llama_frequency(500000, pair, 128)) <= 1e-14 * at);
    }
    kept += llama(1, pair, 128) == plain(1, pair, 128) ? 1 : 0;
    divided += std::abs(llama(1, pair, 128) * 8 - plain(1, pair, 128)) < 1e-20 ? 1 : 0;
  }
  CHECK(kept > 20);  // all three cases are met
  CHECK(divided > 20);
  CHECK(kept + divided < 64);
}

TEST_CASE("rope: angles and factor of YaRN", "[ops]") {
  // As Qwen's model cards stretch texts from 32768 tokens. The pairs 23.6 and 39.7 turn 32 times and once in them.
  const RopeAngles whole{.base = 1e6, .factor = 4, .context = 32768, .yarn = true};
  RopeAngles exact = whole, bounded = whole, equal = whole;
  exact.truncate = false;
  bounded.beta_fast = 1e6;  // before pair 0
  bounded.beta_slow = 1e-9;
  equal.context = 6;  // before pair 0, both: only that one stays
  for (std::int64_t pair = 0; pair < 64; ++pair) {
    const auto number = static_cast<double>(pair);
    const double frequency = std::pow(1e6, -number / 64);
    const auto turns = [&](double first, double last) {
      const double share = std::clamp((number - first) / (last - first), 0.0, 1.0);
      return frequency * (1 - share + share / 4);
    };
    CAPTURE(pair);
    CHECK(std::abs(whole(1000, pair, 128) - 1000 * turns(23, 40)) <= 1e-12 * frequency * 1000);
    CHECK(std::abs(exact(1, pair, 128) - turns(23.5959476083381, 39.6508807104171)) <= 1e-12 * frequency);
    CHECK(std::abs(bounded(1, pair, 128) - turns(0, 127)) <= 1e-12 * frequency);
    CHECK(std::abs(equal(1, pair, 128) - (pair == 0 ? frequency : frequency / 4)) <= 1e-12 * frequency);
  }
  CHECK(std::abs(whole.scale() - (0.1 * std::log(4.0) + 1)) <= 1e-15);
  CHECK(RopeAngles{.factor = 4, .context = 9}.scale() == 1);
  CHECK(RopeAngles{.factor = 4, .context = 9, .yarn = true, .amplitude = 0.75}.scale() == 0.75);
}

}  // namespace
