// Reductions of the values that formulas get wrong: prod, logsumexp, var, vector_norm, max, min, any, all, with their
// VJPs. Their placements are in ops_exhaustive_typed_test.cpp.
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "shardlib/shardlib.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

TEST_CASE("reductions of zeros, infinities and nothing", "[ops]") {
  on_mesh("d=1,t=1", [](const Mesh<"d t">& mesh) {
    constexpr f64 inf = std::numeric_limits<f64>::infinity();
    using X = Tensor<f64, "V">;
    const auto of = [&](std::vector<f64> values) {
      return place<X>(mesh, HostArray<f64>({static_cast<std::int64_t>(values.size())}, values),
                      {{"V", static_cast<std::int64_t>(values.size()), 8}});
    };
    const auto check = [&](const auto& f, std::vector<f64> x, f64 value, std::vector<f64> gradient) {
      const auto loss = [&](const X& v) { return to_partial<" -> +d +t">(f(v)); };
      const auto [l, g] = value_and_grad(mesh, loss, of(std::move(x)));
      expect_equal(fetch(l).data, std::vector<f64>{value});
      expect_equal(fetch(g).data, gradient);
    };
    const auto product = [](const X& v) { return prod<"V -> ">(v); };
    check(product, {2, 3, 5}, 30, {15, 10, 6});
    check(product, {2, 0, 5}, 0, {0, 10, 0});
    check(product, {0, 3, 0}, 0, {0, 0, 0});
    check(product, {1e-200, 1e-200}, 0, {1e-200, 1e-200});
    check(product, {inf, 2}, inf, {2, inf});
    const auto log_sum = [](const X& v) { return logsumexp<"V -> ">(v); };
    check(log_sum, {-inf, -inf}, -inf, {0, 0});
    check(log_sum, {inf, 0, -inf}, inf, {1, 0, 0});
    check(log_sum, {-inf, 3, -inf}, 3, {0, 1, 0});
    check(log_sum, {1000, -1000}, 1000, {1, 0});
    check(log_sum, {1e17, 1e17}, 1e17, {0.5, 0.5});
    check(log_sum, {inf, inf}, inf, {0.5, 0.5});
    check([](const X& v) { return vector_norm<"V -> ">(v); }, {0, 0}, 0, {0, 0});
    check([](const X& v) { return vector_norm<"V -> ">(v); }, {3, 4}, 5, {0.6, 0.8});
    check([](const X& v) { return var<"V -> ">(v); }, {7, 7, 7}, 0, {0, 0, 0});
    check([](const X& v) { return max<"V -> ">(v); }, {1, 4, 4}, 4, {0, 1, 0});
    check([](const X& v) { return min<"V -> ">(v); }, {1, 4, 1}, 1, {1, 0, 0});
    // bf16: neither the mean nor the result of a sum may be rounded on the way.
    const auto bf = [&](const auto& f, std::vector<f64> x, f64 value, std::vector<f64> gradient) {
      check([&](const X& v) { return cast<f64>(f(cast<bf16>(v))); }, std::move(x), value, std::move(gradient));
    };
    bf([](const auto& v) { return var<"V -> ">(v); }, {256, 258}, 1, {-1, 1});
    bf([](const auto& v) { return logsumexp<"V -> ">(v); }, {200, 200}, 201, {0.5, 0.5});
    bf([](const auto& v) { return vector_norm<"V -> ">(v); }, {3, 4}, 5, {0.6015625, 0.80078125});
    const auto nothing = zeros<bool_, "V">(mesh, {{"V", 0, 8}});
    expect(!item(any<"V -> ">(nothing)) && item(all<"V -> ">(nothing)), "of nothing");
    expect(item(prod<"V -> ">(zeros<f32, "V">(mesh, {{"V", 0, 8}}))) == 1, "the product of nothing");
  });
}

}  // namespace
