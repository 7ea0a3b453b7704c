// Sums, means, maxima, softmax, norms and rotary embedding, with their VJPs.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "op_case.hpp"
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
    REQUIRE_THROWS_WITH(layer_norm<"M">(x, std::numeric_limits<double>::quiet_NaN()),
                        Catch::Contains("the epsilon is nan"));
    REQUIRE(fetch(rms_norm<"M">(ones<f32, "B/d M">(mesh, {{"B", 1}, {"M", 2}}), 0)).data == std::vector<f32>{1, 1});
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
