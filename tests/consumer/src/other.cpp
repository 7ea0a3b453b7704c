#include <shardlib/shardlib.hpp>

using namespace shardlib;

auto product(const Tensor<f32, "A/d B">& x, const Tensor<f32, "B C">& y) -> Tensor<f32, "A/d C"> {
  const Mesh<"d"> mesh(x.device());
  return einsum_unreduced<"A/d B, B C -> A/d C">(x, y * ones<f32, "B C">(mesh, {{"B", 3}, {"C", 5}}));
}
