// einsum_unreduced: every row of its table, forward and backward.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "op_case.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

#define EINSUM(dtype, lhs, rhs, out)                 \
  make_case<Tensor<dtype, lhs>, Tensor<dtype, rhs>>( \
      "einsum " #dtype " " lhs ", " rhs " -> " out,  \
      [](const auto& x, const auto& y) { return einsum_unreduced<lhs ", " rhs " -> " out>(x, y); }, products())
#define EINSUM1(dtype, in, out)                                                                             \
  make_case<Tensor<dtype, in>>(                                                                             \
      "einsum " #dtype " " in " -> " out, [](const auto& x) { return einsum_unreduced<in " -> " out>(x); }, \
      products())

TEST_CASE("einsum: each row of the table", "[ops]") {
  check_cases({
      // R, R
      EINSUM(f32, "B K", "K C", "B C"),
      // S(k), S(k), k kept: a batch dim
      EINSUM(f32, "B/d K", "B/d K C", "B/d C"),
      // S(k), R, k kept; the replicated operand's cotangent is partial
      EINSUM(f32, "B/d K", "K C", "B/d C"),
      EINSUM(f32, "K B", "K C/t", "B C/t"),
      // contracted, sharded alike: partial
      EINSUM(f32, "B A/t", "A/t C", "B C +t"),
      EINSUM(f32, "B A/t/d", "A/t/d C", "C B +d +t"),
      // summed over a dim that one operand alone has
      EINSUM(f32, "B A/t", "B C", "B C +t"),
      EINSUM(f32, "B/d D K", "K H/t C", "C B/d +t"),
      // P, R
      EINSUM(f32, "B K +t", "K C", "B C +t"),
      EINSUM(f32, "B K", "K C +t", "B C +t"),
      // several axes at once: FSDP and tensor parallelism
      EINSUM(f32, "B/d L M/t", "M/t H", "B/d L H +t"),
      EINSUM(f32, "B/d L M", "M H/t", "B/d L H/t"),
      EINSUM(f32, "B/d K", "B/d C/t", "K C/t +d"),
      EINSUM(f32, "B/d +t", "B/d K", "K +d +t"),
      EINSUM(f32, "A/d/t K", "K C", "A/d/t C"),
      EINSUM(f32, "A/d B/t", "B/t C/p", "A/d C/p +t"),
      // to a scalar, from a scalar
      EINSUM(f32, "B/d", "B/d", "+d"),
      EINSUM(f32, "", "B/t K", "K B/t"),
  });
}

#define EINSUM_SUMMED(lhs, rhs, out)             \
  make_case<Tensor<f32, lhs>, Tensor<f32, rhs>>( \
      "einsum, summed " lhs ", " rhs " -> " out, \
      [](const auto& x, const auto& y) { return einsum<lhs ", " rhs " -> " out>(x, y); }, products())

TEST_CASE("einsum with the sum over devices that its result implies", "[ops]") {
  check_cases({
      EINSUM_SUMMED("B/d M/t", "M/t H", "B/d H/t"),
      EINSUM_SUMMED("B/d M/t", "M/t H", "B/d H"),
      EINSUM_SUMMED("B/d L", "B/d H/t", "L/d H/t"),
      EINSUM_SUMMED("B/d M/t", "M/t H", "H +d"),
  });
}

TEST_CASE("einsum of one operand", "[ops]") {
  check_cases({
      EINSUM1(f32, "A B/t", "A +t"),
      EINSUM1(f32, "A/d B C/t", "C/t A/d"),
      EINSUM1(f32, "A/t/d", "+d +t"),
      EINSUM1(f32, "B K +t", "K +t"),
      EINSUM1(bf16, "B/d C", "C B/d"),
  });
}

TEST_CASE("einsum in other dtypes", "[ops]") {
  // The reference is exact in f64 and rounded once: so are sums of bf16, taken in f32, where one device has them whole.
  std::vector<Case> cases{
      EINSUM(bf16, "B/d M", "M H", "B/d H"),
      make_case<Tensor<bf16, "B/d M">, Tensor<bf16, "M H">>(
          "einsum bf16 to f32",
          [](const auto& x, const auto& y) { return einsum_unreduced<"B/d M, M H -> B/d H", f32>(x, y); }, products()),
      make_case<Tensor<bf16, "B/d M">>(
          "einsum bf16 to f32, one operand", [](const auto& x) { return einsum_unreduced<"B/d M -> B/d", f32>(x); },
          products()),
  };
  check_cases(cases, {"d=1,t=1"});
  // Elsewhere each device rounds its summand of what is partial.
  for (Case& c : cases) c.options.tolerance = 0.01;
  check_cases(std::move(cases));
  check_cases({EINSUM(f64, "B/d L M/t", "M/t H", "B/d L H +t")});
}

#define EINSUM3(op, dtype, a, b, c, out)                           \
  make_case<Tensor<dtype, a>, Tensor<dtype, b>, Tensor<dtype, c>>( \
      #op " " #dtype " " a ", " b ", " c " -> " out,               \
      [](const auto& x, const auto& y, const auto& z) { return op<a ", " b ", " c " -> " out>(x, y, z); }, products())

TEST_CASE("einsum of three and four operands", "[ops]") {
  check_cases({
      EINSUM3(einsum_unreduced, f32, "C/d K", "K H/t", "H/t D", "C/d D +t"),
      EINSUM3(einsum_unreduced, f32, "K D", "D two", "two L/t", "L/t K"),
      EINSUM3(einsum_unreduced, f32, "C K +t", "K D", "D two", "C two +t"),
      EINSUM3(einsum_unreduced, f32, "C/d", "C/d K", "K", "+d"),
      EINSUM3(einsum_unreduced, f32, "C/d K", "K C/d", "C/d K", "C/d"),
      EINSUM3(einsum_unreduced, f64, "H/t K", "H/t", "K L two", "L +t"),
      EINSUM3(einsum, f32, "C/d K", "K H/t", "H/t D", "C/d D"),
      EINSUM3(einsum, f32, "two K", "K H/t", "H/t L", "two L/t"),
      make_case<Tensor<f64, "K two">, Tensor<f64, "two C/t">, Tensor<f64, "C/t D">, Tensor<f64, "D more">>(
          "einsum_unreduced of four",
          [](const auto& x, const auto& y, const auto& z, const auto& u) {
            return einsum_unreduced<"K two, two C/t, C/t D, D more -> K more +t">(x, y, z, u);
          },
          products()),
      make_case<Tensor<f64, "K">, Tensor<f64, "K C/t">, Tensor<f64, "C/t">, Tensor<f64, "D">>(
          "einsum of four",
          [](const auto& x, const auto& y, const auto& z, const auto& u) {
            return einsum<"K, K C/t, C/t, D -> D">(x, y, z, u);
          },
          products()),
  });
}

TEST_CASE("einsum of three operands takes the order with the fewest operations", "[ops]") {
  on_mesh("d=1,t=1", [](const Mesh<"d t">& mesh) {
    const auto flops = [&](std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) {
      const double before = detail::program_state(mesh.device()).counts["einsum_unreduced"].flops;
      const Sizes sizes{{"A", a}, {"B", b}, {"C", c}, {"D", d}};
      const auto x = ones<f32, "A B">(mesh, sizes);
      const auto y = ones<f32, "B C">(mesh, sizes);
      const auto z = ones<f32, "C D">(mesh, sizes);
      REQUIRE(fetch(einsum_unreduced<"A B, B C, C D -> D A">(x, y, z)).data.at(0) == static_cast<f32>(b * c));
      return detail::program_state(mesh.device()).counts["einsum_unreduced"].flops - before;
    };
    REQUIRE(flops(2, 30, 3, 50) == 2 * (2 * 30 * 3 + 2 * 3 * 50));
    REQUIRE(flops(50, 3, 30, 2) == 2 * (3 * 30 * 2 + 50 * 3 * 2));
    REQUIRE(flops(2, 3, 40, 1) == 2 * (3 * 40 * 1 + 2 * 3 * 1));
    const auto x = ones<f32, "A B">(mesh, {{"A", 2}, {"B", 3}});
    const auto z = ones<f32, "B D">(mesh, {{"B", 4}, {"D", 2}});
    REQUIRE_THROWS_WITH((einsum_unreduced<"A B, A, B D -> D">(x, ones<f32, "A">(mesh, {{"A", 2}}), z)),
                        Catch::Contains("einsum_unreduced<`A B, A, B D -> D`>") &&
                            Catch::Contains("dim `B` is 4, but 3 in another operand"));
  });
}

// What every device multiplies is computed again here on one, so that threads and MPI must agree with it in every bit.
TEST_CASE("einsum and reduction have the bits of the tree over local products, on threads and MPI", "[ops]") {
  on_meshes({"d=1,t=1", "d=2,t=1", "d=3,t=1", "d=4,t=1", "d=2,t=2", "d=6,t=1"}, [](const Mesh<"d t">& mesh) {
    const DevicePtr& device = mesh.device();
    const Sizes sizes{{"B", 7}, {"A", 24}, {"C", 12}};
    const auto x = random_normal<f32, "B A">(mesh, sizes, {1, 1});
    const auto w = random_normal<f32, "A C">(mesh, sizes, {1, 2});
    const auto y = einsum_unreduced<"B A/d, A/d C -> B C +d">(shard<"B A -> B A/d">(x), shard<"A C -> A/d C">(w));
    const auto parts = static_cast<std::size_t>(mesh.size("d"));
    std::vector<std::vector<float>> summands;
    for (std::size_t d = 0; d < parts; ++d) {
      const std::size_t n = 24 / parts;
      std::vector<float> left, right;
      for (std::size_t b = 0; b < 7; ++b)
        for (std::size_t a = 0; a < n; ++a) left.push_back(x.span()[b * 24 + d * n + a]);
      right.assign(w.span().begin() + static_cast<std::ptrdiff_t>(d * n * 12),
                   w.span().begin() + static_cast<std::ptrdiff_t>((d + 1) * n * 12));
      const int lhs[]{0, 1}, rhs[]{1, 2}, out[]{0, 2};
      const auto k = static_cast<std::int64_t>(n);
      const Buffer a = device->to_device(make_buffer(*device, left)),
                   b = device->to_device(make_buffer(*device, right));
      const Buffer product = device->pool()->allocate(sizeof(float) * 7 * 12);
      kernels::einsum(device->exec(), kernels::plan_einsum(lhs, rhs, out), DType::f32, DType::f32, a.data(),
                      Shape{7, k}, b.data(), Shape{k, 12}, product.data());
      summands.push_back(values_of<float>(product));
    }
    const auto whole = all_reduce<"B C +d -> B C">(y);
    const auto part = reduce_scatter<"B C +d -> B C/d">(y);
    const std::size_t columns = 12 / parts, first = static_cast<std::size_t>(mesh.axis_index("d")) * columns;
    for (std::size_t i = 0; i < 7 * 12; ++i) {
      std::vector<float> column;
      for (const auto& product : summands) column.push_back(product[i]);
      const float expected = tree_sum(column);
      expect(std::memcmp(&whole.span()[i], &expected, 4) == 0, "all_reduce: element " + show(i));
      const std::size_t at = i % 12;
      if (at >= first && at < first + columns)
        expect(std::memcmp(&part.span()[i / 12 * columns + at - first], &expected, 4) == 0,
               "reduce_scatter: element " + show(i));
    }
  });
}

}  // namespace
