// Dropout: the same elements on every mesh, forward and backward.
#include <cstddef>
#include <vector>

#include "op_case.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

constexpr RandomKey key{7, 3};

void drop_quarter(const std::vector<Global>& x, Global& y) {
  const Shape strides = strides_along(x[0], x[0].names);
  for_each_index(x[0].shape, [&](const Shape& i) {
    const std::size_t at = offset(strides, i);
    const float u = kernels::uniform(key.seed, key.stream, at);
    y.data[at] = u < 0.25F ? 0.0 : x[0].data[at] / 0.75;
  });
}

TEST_CASE("dropout", "[ops]") {
#define DROPOUT(dtype, from, tolerance_)                                                                             \
  make_case<Tensor<dtype, from>>("dropout of " #dtype " " from, [](const auto& x) { return dropout(x, 0.25, key); }, \
                                 drop_quarter, {.law = Law::each, .tolerance = tolerance_})
  check_cases({
      DROPOUT(f32, "B/d L M/t", 1e-6),
      DROPOUT(f32, "M/t/d", 1e-6),
      DROPOUT(f32, "A +t", 1e-6),
      DROPOUT(f64, "A/t B", 1e-14),
      DROPOUT(bf16, "B/d M", 0.01),
  });
#undef DROPOUT
}

TEST_CASE("dropout's rate is a probability", "[ops]") {
  on_mesh("d=1", [](const DevicePtr& device) {
    const auto x = ones<f32, "A">(Mesh<"d">(device), {{"A", 4}});
    expect_error<UsageError>([&] { dropout(x, 1.0, key); },
                             "dropout: the rate 1.000000 is not a probability; give a number from 0 to below 1");
    const auto whole = dropout(x, 0.0, key);
    for (const f32 v : whole.span()) expect(v == 1, "rate 0 keeps everything");
  });
}

}  // namespace
