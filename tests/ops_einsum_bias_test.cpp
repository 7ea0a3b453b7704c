// einsum_bias and einsum_bias_gelu: each placement, and the bits, the reads and the memory of the ops that they stand
// for.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "op_case.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

/// f of the product of the first two operands plus the third, by the result's elements.
Reference product_and_bias(double (*f)(double)) {
  return [f](const std::vector<Global>& x, Global& y) {
    products()({x[0], x[1]}, y);
    const Global product = y;
    elementwise([f](const std::vector<double>& v) { return f(v[0] + v[1]); })({product, x[2]}, y);
  };
}
double same_number(double x) {
  return x;
}
double gelu_of(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
}

#define BIAS(op, f, dtype, lhs, rhs, bias, out, ...)                                                    \
  make_case<Tensor<dtype, lhs>, Tensor<dtype, rhs>, Tensor<dtype, bias>>(                               \
      #op " " #dtype " " lhs ", " rhs " -> " out " and " bias,                                          \
      [](const auto& x, const auto& y, const auto& b) { return op<lhs ", " rhs " -> " out>(x, y, b); }, \
      product_and_bias(f), {.law = Law::none, __VA_ARGS__})
#define EINSUM_BIAS(dtype, lhs, rhs, bias, out, ...) \
  BIAS(einsum_bias, same_number, dtype, lhs, rhs, bias, out, __VA_ARGS__)
#define EINSUM_BIAS_GELU(dtype, lhs, rhs, bias, out, ...) \
  BIAS(einsum_bias_gelu, gelu_of, dtype, lhs, rhs, bias, out, __VA_ARGS__)

TEST_CASE("einsum_bias: each placement of product and bias", "[ops]") {
  check_cases({
      EINSUM_BIAS(f32, "B K", "K C", "C", "B C", .tolerance = 1e-6),
      EINSUM_BIAS(f32, "B/d K", "K C", "C", "B/d C", .tolerance = 1e-6),
      EINSUM_BIAS(f32, "B/d L K", "K C/t", "C/t", "B/d L C/t", .tolerance = 1e-6),
      EINSUM_BIAS(f32, "B/d L K", "K H/t D", "H/t D", "B/d L H/t D", .tolerance = 1e-6),
      EINSUM_BIAS(f32, "B/d K", "B/d K C", "B/d", "B/d C", .tolerance = 1e-6),  // the first dim, not the last
      EINSUM_BIAS(f32, "K B/d", "K C/t", "C/t", "C/t B/d", .tolerance = 1e-6),  // a result that is stored transposed
      EINSUM_BIAS(f32, "A/d/t K", "K C", "", "A/d/t C", .tolerance = 1e-6),
      EINSUM_BIAS(f64, "B/d K", "K C/t", "B/d C/t", "B/d C/t", .tolerance = 1e-9),
      EINSUM_BIAS(bf16, "B/d K", "K C/t", "C/t", "B/d C/t", .tolerance = 0.02),
  });
}

TEST_CASE("einsum_bias_gelu: each placement of product and bias", "[ops]") {
  check_cases({
      EINSUM_BIAS_GELU(f32, "B K", "K C", "C", "B C", .tolerance = 4e-6),
      EINSUM_BIAS_GELU(f32, "B/d L K", "K C/t", "C/t", "B/d L C/t", .tolerance = 4e-6),
      EINSUM_BIAS_GELU(f32, "B/d L K", "K H/t D", "H/t D", "B/d L H/t D", .tolerance = 4e-6),
      EINSUM_BIAS_GELU(f32, "K B/d", "K C/t", "B/d", "C/t B/d", .tolerance = 4e-6),
      EINSUM_BIAS_GELU(f64, "A/d/t K", "K C", "C", "A/d/t C", .tolerance = 1e-7),
      EINSUM_BIAS_GELU(bf16, "B/d K", "K C/t", "C/t", "B/d C/t", .tolerance = 0.03),
  });
}

template <class D>
struct Layer {
  Tensor<D, "M F/t"> up;
  Tensor<D, "F/t"> bias;
  Tensor<D, "F/t M"> down;
};
using Grid = Mesh<"d t">;
using Loss = Tensor<f64, "+d +t">;

template <bool Fused, class D>
auto feed_forward(const Tensor<D, "B/d L M">& x, const Layer<D>& w) -> Tensor<D, "B/d L M +t"> {
  const auto product = [&] { return einsum_unreduced<"B/d L M, M F/t -> B/d L F/t">(x, w.up); };
  Tensor<D, "B/d L F/t"> y;
  if constexpr (Fused)
    y = einsum_bias_gelu<"B/d L M, M F/t -> B/d L F/t">(x, w.up, w.bias);
  else
    y = gelu(save_for_backward(product() + w.bias));
  return einsum_unreduced<"B/d L F/t, F/t M -> B/d L M +t">(y, w.down);
}

/// Loss and gradients on this device, and how often the ops ran.
struct Step {
  std::vector<std::byte> bytes;
  std::vector<double> numbers;  ///< the same
  std::int64_t products = 0, gelus = 0;
};
template <bool Fused, class D>
Step step(const Grid& mesh, const RecomputePolicy& policy, const Sizes& sizes) {
  const Layer<D> w{cast<D>(random_normal<f32, "M F/t">(mesh, sizes, {1, 0})),
                   cast<D>(random_normal<f32, "F/t">(mesh, sizes, {1, 1})),
                   cast<D>(random_normal<f32, "F/t M">(mesh, sizes, {1, 2}))};
  const auto x = cast<D>(random_normal<f32, "B/d L M">(mesh, sizes, {1, 3}));
  const auto loss = [policy](const Layer<D>& weights, const Tensor<D, "B/d L M">& in,
                             const Tensor<f64, "B/d L M">& factors) -> Loss {
    return sum(cast<f64>(explicit_activation_checkpointing(feed_forward<Fused, D>, policy)(in, weights)) * factors);
  };
  auto& counts = detail::program_state(mesh.device()).counts;
  counts.clear();
  const auto [l, g] = value_and_grad(mesh, loss, w, x, random_normal<f64, "B/d L M">(mesh, sizes, {1, 4}));
  Step result{{}, {}, counts[Fused ? "einsum_bias" : "+"].calls, counts["gelu"].calls};
  const auto add = [&](const detail::ValuePtr& value) {
    const Buffer shard = value->on_host();
    result.bytes.insert(result.bytes.end(), shard.data(), shard.data() + value->bytes());
    for (std::size_t i = 0; i < static_cast<std::size_t>(value->count()); ++i)
      result.numbers.push_back(load_element(value->dtype, shard.data(), i));
  };
  add(l.value());
  for_each_leaf([&](std::string_view, const auto& leaf) { add(leaf.value()); }, g);
  return result;
}

/// Whether all bits are the same. On a GPU, cuBLASLt does not round a sum before it takes the gelu, and has a gelu of
/// its own, so there the numbers may differ as much as D rounds.
template <class D>
bool is_same(const Step& a, const Step& b) {
  if (device_kind() != DeviceKind::gpu) return a.bytes == b.bytes;
  constexpr double tolerance = std::is_same_v<D, bf16> ? 0.02 : std::is_same_v<D, f32> ? 1e-5 : 1e-12;
  double error = 0, size = 0;
  for (std::size_t i = 0; i < a.numbers.size(); ++i) {
    error += std::pow(a.numbers[i] - b.numbers[i], 2);
    size += std::pow(b.numbers[i], 2);
  }
  return a.numbers.size() == b.numbers.size() && error <= tolerance * tolerance * size;
}

template <class D>
void check_bits(const Grid& mesh) {
  for (const auto& sizes :
       {Sizes{{"B", 4}, {"L", 3}, {"M", 12}, {"F", 20}}, Sizes{{"B", 4}, {"L", 33}, {"M", 96}, {"F", 160}}})
    for (const char* policy : {"none", "marked", "dots", "everything"}) {
      const Step fused = step<true, D>(mesh, {policy}, sizes), spelled = step<false, D>(mesh, {policy}, sizes);
      expect(is_same<D>(fused, spelled), std::string("other bits, recompute ") + policy);
      // What `dots` keeps has the bias in it already.
      const std::int64_t products = std::string(policy) == "dots" ? 1 : spelled.products;
      expect(fused.products == products, std::string("other products, recompute ") + policy);
      expect(fused.gelus == spelled.gelus, std::string("other gelus, recompute ") + policy);
    }
}

TEST_CASE("einsum_bias_gelu has the bits of the ops that it stands for, however it is recomputed", "[ops]") {
  for (const char* axes : {"d=1,t=1", "d=2,t=2"})
    on_mesh(axes, [&](const DevicePtr& device) {
      const Grid mesh(device);
      check_bits<f32>(mesh);
      check_bits<f64>(mesh);
      check_bits<bf16>(mesh);
    });
}

TEST_CASE("a product whose cotangent is that of a gelu runs right before the gelu's VJP", "[ops]") {
  on_mesh("d=1,t=1", [&](const DevicePtr& device) {
    const Grid mesh(device);
    std::vector<std::string> ran;
    {
      const detail::Observing observing(device, [&](const detail::OpReport& op) {
        ran.push_back(std::string(op.op.name) + " " + std::string(to_string(op.spec).view()));
      });
      static_cast<void>(step<true, f32>(mesh, {"none"}, {{"B", 4}, {"L", 3}, {"M", 12}, {"F", 20}}));
    }
    const auto vjp =
        std::find_if(ran.begin(), ran.end(), [](const std::string& op) { return op.starts_with("map_backward"); });
    expect(vjp != ran.end() && vjp != ran.begin() && (vjp - 1)->starts_with("einsum_unreduced B/d L F/t"),
           vjp == ran.end() ? "no VJP of gelu ran" : *(vjp - 1) + " ran before " + *vjp);
  });
}

TEST_CASE("the bytes of a gelu that einsum_bias has made are those of einsum_bias", "[ops]") {
  on_mesh("d=1,t=1", [&](const DevicePtr& device) {
    const Grid mesh(device);
    const Sizes sizes{{"B", 8}, {"M", 16}, {"F", 24}};
    const auto x = ones<f32, "B M">(mesh, sizes);
    const auto w = ones<f32, "M F">(mesh, sizes);
    const auto bias = ones<f32, "F">(mesh, sizes);
    std::vector<std::pair<std::string, std::int64_t>> ran;
    {
      const detail::NoteReads noting(detail::program_state(device));
      const detail::Observing observing(
          device, [&](const detail::OpReport& op) { ran.emplace_back(op.op.name, detail::touched(op)); });
      static_cast<void>(einsum_bias_gelu<"B M, M F -> B F">(x, w, bias));
    }
    const auto bytes = [&](const char* name) {
      std::int64_t sum = 0;
      for (const auto& [op, touched] : ran) sum += op == name ? touched : 0;
      return sum;
    };
    expect(bytes("einsum_bias") == 4 * (8 * 16 + 16 * 24 + 24 + 2 * 8 * 24),
           "einsum_bias: " + show(bytes("einsum_bias")));
    expect(ran.size() == 2 && bytes("gelu") == 0, "gelu: " + show(bytes("gelu")));
  });
}

TEST_CASE("gelu's VJP takes a product that has its derivative already", "[ops]") {
  on_mesh("d=1,t=1", [&](const DevicePtr& device) {
    const Grid mesh(device);
    const Sizes sizes{{"B", 2}, {"M", 3}, {"F", 4}};
    const auto filled = [](const detail::Value& out, f32 number) {
      Buffer result = detail::allocate(out);
      kernels::apply_flat(out.device->exec(), out.count(), kernels::body::ConstantElement<f32>{number},
                          result.as<f32>());
      return result;
    };
    const auto gradient = [&](bool multiplies) {
      const auto leaf = detail::as_leaf(*zeros<f32, "B F">(mesh, sizes).value());
      const auto y = einsum_bias_gelu<"B M, M F -> B F">(zeros<f32, "B M">(mesh, sizes), zeros<f32, "M F">(mesh, sizes),
                                                         Tensor<f32, "B F">(leaf));
      detail::ValuePtr ct = detail::defer_product(
          detail::make_recorded({"einsum_unreduced", {}, {}}, device, DType::f32, *y.value()->spec, y.value()->global,
                                {}),
          [&](const detail::Value& out) { return filled(out, 6); },
          [&](const detail::Value& out, const detail::Value&) { return multiplies ? filled(out, 7) : Buffer(); });
      std::vector<std::pair<detail::Slot, detail::ValuePtr>> roots;
      roots.emplace_back(y.value()->slot, std::move(ct));
      detail::Backward backward(roots, {leaf->slot});
      roots.clear();
      return fetch(Tensor<f32, "B F">(backward.run()[0])).data.at(3);
    };
    expect(gradient(true) == 7, "not the kernel's result");
    expect(gradient(false) == 3, "not the product times 0.5, the derivative at 0");
  });
}

}  // namespace
