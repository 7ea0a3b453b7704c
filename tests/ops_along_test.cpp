// Ops along a dim that keep or select its elements in order: cumsum, linear_scan, argsort, sort, top_k, narrow, pad,
// with their VJPs.
#include <algorithm>
#include <cmath>
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

/// The indices of the row's elements in order; of equal ones the lower comes first. Elements are compared as they were
/// drawn, in sixteenths, so that differences of the reference keep the order.
std::vector<std::size_t> order_of(const Row& row, bool descending) {
  std::vector<std::size_t> order(row.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {},
                    [&](std::size_t i) { return std::pair((descending ? -1 : 1) * std::round(16 * row[i]), i); });
  return order;
}
/// The first k elements, or their indices. Other k: all.
std::function<void(Row&)> ordered(bool descending, bool indices, std::size_t k = 1000) {
  return [=](Row& row) {
    const Row all = row;
    row.clear();
    for (const std::size_t i : order_of(all, descending))
      if (row.size() < k) row.push_back(indices ? static_cast<double>(i) : all[i]);
  };
}
/// Rows along one dim of the operand as rows along another of the result.
Reference rows_as(const std::string& from, const std::string& to, const std::function<void(Row&)>& f) {
  return [=](const std::vector<Global>& x, Global& y) {
    std::replace(y.names.begin(), y.names.end(), to, from);
    rows(from, f)(x, y);
    std::replace(y.names.begin(), y.names.end(), from, to);
  };
}

TEST_CASE("argsort, sort and top_k", "[ops]") {
  check_cases({
      ONE(f32, "B/d V", argsort<"V">(x), rows("V", ordered(false, true)), .gradient = false),
      ONE(bf16, "V C/t", (argsort<"V">(x, true)), rows("V", ordered(true, true)), .gradient = false),
      ONE(f32, "B/d V", sort<"V">(x), rows("V", ordered(false, false)), .law = Law::none, .tolerance = 1e-6),
      ONE(f64, "V C/t", (sort<"V">(x, true)), rows("V", ordered(true, false)), .law = Law::none, .tolerance = 1e-6),
      ONE(i32, "B/d V", sort<"V">(x), rows("V", ordered(false, false)), .draws = {Draw::integers}),
      ONE(f32, "B/d V", (top_k<"V", "K">(x, 4).values), rows_as("V", "K", ordered(true, false, 4)), .law = Law::none,
          .tolerance = 1e-6),
      ONE(bf16, "V A/t/d", (top_k<"V", "K">(x, 4).values), rows_as("V", "K", ordered(true, false, 4)), .law = Law::none,
          .tolerance = 0.01),
      ONE(f32, "V C/t", (top_k<"V", "K">(x, 4).indices), rows_as("V", "K", ordered(true, true, 4)), .gradient = false),
  });
}

TEST_CASE("top_k rejects a wrong k", "[ops]") {
  on_mesh("d=1,t=1", [](const std::shared_ptr<Device>& device) {
    const Mesh<"d t"> mesh(device);
    const auto x = zeros<f32, "V">(mesh, {{"V", 5, 8}});
    for (const std::int64_t k : {0, 6})
      REQUIRE_THROWS_WITH((top_k<"V", "K">(x, k)),
                          Catch::Contains("top_k<`V`>") && Catch::Contains("but dim `V` has 5 elements"));
  });
}

Reference surrounded(const std::string& from, const std::string& to, std::size_t before, std::size_t after,
                     double value) {
  return rows_as(from, to, [=](Row& row) {
    row.insert(row.begin(), before, value);
    row.insert(row.end(), after, value);
  });
}

TEST_CASE("narrow and pad", "[ops]") {
  const Reference middle = rows_as("V", "K", [](Row& row) { row = Row(row.begin() + 3, row.begin() + 7); });
  check_cases({
      ONE(f32, "B/d V", (narrow<"V -> K">(x, 3, 4)), middle),
      ONE(bf16, "V C/t +d", (narrow<"V -> K">(x, 3, 4)), middle),
      ONE(i32, "B V C/t", (narrow<"V -> K">(x, 3, 4)), middle, .draws = {Draw::integers}),
      ONE(f32, "B/d K", (pad<"K -> D">(x, 1, 0)), surrounded("K", "D", 1, 0, 0)),
      ONE(f64, "2 C/t +d", (pad<"2 -> D">(x, 1, 2)), surrounded("2", "D", 1, 2, 0)),
      ONE(bf16, "two C/t", (pad<"two -> D">(x, 2, 1, -1.5)), surrounded("two", "D", 2, 1, -1.5), .law = Law::none,
          .tolerance = 0.01),
      ONE(i32, "K C/t", (pad<"K -> D">(x, 0, 1, 3.0)), surrounded("K", "D", 0, 1, 3), .draws = {Draw::integers}),
  });
}

TEST_CASE("pad takes a padded operand, narrow no range outside the dim", "[ops]") {
  on_mesh("d=1,t=1", [](const std::shared_ptr<Device>& device) {
    const Mesh<"d t"> mesh(device);
    HostArray<f64> host({3});
    host.data = {1, 2, 3};
    struct Weights {
      Tensor<f64, "L"> x;
    };
    const Weights w{place<Tensor<f64, "L">>(mesh, host, {{"L", 3, 8}})};
    REQUIRE(fetch(pad<"L -> N">(w.x, 1, 2, 9.0)).data == std::vector<f64>{9, 1, 2, 3, 9, 9});
    const auto loss = [](const Weights& w) -> Tensor<f64, "+d +t"> {
      return to_partial<" -> +d +t">(sum(square(pad<"L -> N">(w.x, 1, 0))));
    };
    REQUIRE(fetch(reduce_gradients(mesh, value_and_grad(mesh, loss, w).second).x).data == std::vector<f64>{2, 4, 6});
    REQUIRE_THROWS_WITH((narrow<"L -> N">(w.x, 1, 3)),
                        Catch::Contains("the range of 3 indices from 1 on is not inside dim `L` of size 3"));
    REQUIRE_THROWS_WITH((narrow<"L -> N">(w.x, -1, 2)), Catch::Contains("from -1 on is not inside dim `L`"));
    REQUIRE_THROWS_WITH((pad<"L -> N">(w.x, -1, 2)), Catch::Contains("take `narrow` to drop elements"));
  });
}

}  // namespace
