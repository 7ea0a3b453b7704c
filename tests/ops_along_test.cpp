// Ops along a dim that keep or select its elements in order: cumsum, linear_scan, with their VJPs.
#include <algorithm>
#include <functional>
#include <numeric>

#include "op_case.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using Row = std::vector<double>;

#define ONE(dtype, from, expression, reference, ...)                                                           \
  make_case<Tensor<dtype, from>>(#expression " of " #dtype " " from, [](const auto& x) { return expression; }, \
                                 reference, {__VA_ARGS__})

void sums(Row& row) {
  std::partial_sum(row.begin(), row.end(), row.begin());
}
void sums_from_the_end(Row& row) {
  std::partial_sum(row.rbegin(), row.rend(), row.rbegin());
}

TEST_CASE("cumsum", "[ops]") {
  check_cases({
      ONE(f32, "B/d L", cumsum<"L">(x), rows("L", sums)),
      ONE(f32, "B/d L", (cumsum<"L">(x, true)), rows("L", sums_from_the_end)),
      ONE(f32, "L M/t +d", cumsum<"L">(x), rows("L", sums)),
      ONE(f32, "L M/t +d", (cumsum<"L">(x, true)), rows("L", sums_from_the_end)),
      ONE(f32, "L", cumsum<"L">(x), rows("L", sums)),
      ONE(bf16, "B/d L", cumsum<"L">(x), rows("L", sums)),
      ONE(f64, "A/d/t L C", cumsum<"L">(x), rows("L", sums)),
      ONE(i32, "B/d L", cumsum<"L">(x), rows("L", sums), .draws = {Draw::integers}),
  });
}

/// h_t = a_t * h_(t-1) + b_t along dim L.
void recurrence(const std::vector<Global>& x, Global& y) {
  const auto l = static_cast<std::size_t>(std::find(y.names.begin(), y.names.end(), "L") - y.names.begin());
  const Shape strides = strides_along(y, y.names);
  for_each_index(y.shape, [&](const Shape& i) {
    const std::size_t at = offset(strides, i);
    const double before = i[l] == 0 ? 0 : y.data[at - static_cast<std::size_t>(strides[l])];
    y.data[at] = x[0].data[at] * before + x[1].data[at];
  });
}

TEST_CASE("linear_scan", "[ops]") {
#define SCAN(dtype, from, tolerance_)                                                                         \
  make_case<Tensor<dtype, from>, Tensor<dtype, from>>(                                                        \
      "linear_scan of " #dtype " " from, [](const auto& a, const auto& b) { return linear_scan<"L">(a, b); }, \
      recurrence, {.law = Law::none, .tolerance = tolerance_})
  check_cases({
      SCAN(f32, "B/d L", 1e-5),
      SCAN(f32, "L M/t", 1e-5),
      SCAN(f64, "C/d L K", 1e-6),
      SCAN(bf16, "B/d/t L", 0.05),
  });
#undef SCAN
}

}  // namespace
