// Ops along a dim that keep, select or order its elements: cumsum, cumprod, cummax, linear_scan, argsort, sort, top_k,
// narrow, pad, flip, roll, one_hot, tril, triu, diagonal, with their VJPs.
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

void products_so_far(Row& row) {
  std::partial_sum(row.begin(), row.end(), row.begin(), std::multiplies<>());
}
/// Elements are compared as they were drawn, in sixteenths, so that differences of the reference choose the same.
void maxima_so_far(Row& row) {
  for (std::size_t i = 1; i < row.size(); ++i)
    if (std::round(16 * row[i]) <= std::round(16 * row[i - 1])) row[i] = row[i - 1];
}

TEST_CASE("cumprod and cummax", "[ops]") {
  check_cases({
      ONE(f32, "B/d L", cumprod<"L">(x), rows("L", products_so_far), .law = Law::none, .tolerance = 1e-5),
      ONE(f64, "L C/t", cumprod<"L">(x), rows("L", products_so_far), .law = Law::none, .tolerance = 1e-6,
          .draws = {Draw::even}),
      ONE(bf16, "B/d/t K", cumprod<"K">(x), rows("K", products_so_far), .law = Law::none, .tolerance = 0.03),
      ONE(i32, "K B/d", cumprod<"K">(x), rows("K", products_so_far), .draws = {Draw::integers}),
      ONE(f32, "B/d V", cummax<"V">(x), rows("V", maxima_so_far), .law = Law::none, .tolerance = 1e-6),
      ONE(f64, "V C/t", cummax<"V">(x), rows("V", maxima_so_far), .law = Law::none, .tolerance = 1e-6),
      ONE(bf16, "V", cummax<"V">(x), rows("V", maxima_so_far), .law = Law::none, .tolerance = 0.02),
      ONE(i32, "V B/d", cummax<"V">(x), rows("V", maxima_so_far), .draws = {Draw::integers}),
  });
}

/// h_t = a_t * h_(t-1) + b_t along one dim, or with h_(t+1).
Reference recurrence(const std::string& dim, bool reverse) {
  return [dim, reverse](const std::vector<Global>& x, Global& y) {
    const auto l = static_cast<std::size_t>(std::find(y.names.begin(), y.names.end(), dim) - y.names.begin());
    const Shape strides = strides_along(y, y.names);
    for_each_index(y.shape, [&](Shape i) {
      const bool first = i[l] == 0;
      if (reverse) i[l] = y.shape[l] - 1 - i[l];
      const auto at = static_cast<std::int64_t>(offset(strides, i));
      const auto before = static_cast<std::size_t>(reverse ? at + strides[l] : at - strides[l]);
      const auto here = static_cast<std::size_t>(at);
      y.data[here] = x[0].data[here] * (first ? 0 : y.data[before]) + x[1].data[here];
    });
  };
}

TEST_CASE("linear_scan", "[ops]") {
#define SCAN(dtype, from, tolerance_, reverse, dim, ...)                                        \
  make_case<Tensor<dtype, from>, Tensor<dtype, from>>(                                          \
      "linear_scan along " dim " of " #dtype " " from " " #reverse,                             \
      [](const auto& a, const auto& b) { return linear_scan<dim __VA_ARGS__>(a, b, reverse); }, \
      recurrence(dim, reverse), {.law = Law::none, .tolerance = tolerance_})
  check_cases({
      SCAN(f32, "B/d L", 1e-5, false, "L"),
      SCAN(f32, "L M/t", 1e-5, false, "L"),
      SCAN(f32, "L M/t", 1e-5, true, "L"),
      SCAN(f64, "C/d L K", 1e-6, false, "L"),
      SCAN(bf16, "B/d/t L", 0.05, false, "L"),
      SCAN(bf16, "B/d/t L", 0.05, true, "L"),
  });
}

TEST_CASE("linear_scan along a sharded dim", "[ops]") {
  check_cases({
      SCAN(f32, "B/d L/t", 1e-5, false, "L", , over<"t">),
      SCAN(f32, "B/d L/t", 1e-5, true, "L", , over<"t">),
      SCAN(f64, "B/d/t two", 1e-6, false, "B", , over<"d t">),
      SCAN(f64, "B/t/d two", 1e-6, true, "B", , over<"t d">),
      SCAN(f32, "two L/t C/d", 1e-5, false, "L", , over<"t">),
      SCAN(bf16, "K L/t", 0.05, false, "L", , over<"t">),
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
  on_mesh("d=1,t=1", [](const Mesh<"d t">& mesh) {
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
  on_mesh("d=1,t=1", [](const Mesh<"d t">& mesh) {
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

TEST_CASE("flip and roll", "[ops]") {
  const auto rolled = [](std::int64_t by) {
    return rows("L", [by](Row& row) {
      const auto n = static_cast<std::int64_t>(row.size());
      std::rotate(row.begin(), row.end() - (by % n + n) % n, row.end());
    });
  };
  const Reference reversed = rows("L", [](Row& row) { std::reverse(row.begin(), row.end()); });
  check_cases({
      ONE(f32, "B/d L", flip<"L">(x), reversed),
      ONE(bf16, "L C/t +d", flip<"L">(x), reversed),
      ONE(i32, "A/d/t L K", flip<"L">(x), reversed, .draws = {Draw::integers}),
      ONE(bool_, "L", flip<"L">(x), reversed, .draws = {Draw::truth}),
      ONE(f32, "B/d L", (roll<"L">(x, 2)), rolled(2)),
      ONE(f64, "L C/t +d", (roll<"L">(x, -1)), rolled(-1)),
      ONE(u8, "A/d L K", (roll<"L">(x, 13)), rolled(13), .draws = {Draw::naturals}),
      ONE(f32, "L", (roll<"L">(x, 0)), rolled(0)),
  });
}

/// Keeps the elements whose position along the columns is at most, or at least, `diagonal` to the right of that along
/// the rows.
Reference triangle(const std::string& rows, const std::string& columns, std::int64_t diagonal, bool lower) {
  return [=](const std::vector<Global>& x, Global& y) {
    const auto of = [&](const std::string& dim) {
      return std::find(y.names.begin(), y.names.end(), dim) - y.names.begin();
    };
    const auto r = static_cast<std::size_t>(of(rows)), c = static_cast<std::size_t>(of(columns));
    const Shape strides = strides_along(y, y.names);
    for_each_index(y.shape, [&](const Shape& i) {
      const std::size_t at = offset(strides, i);
      y.data[at] = (lower ? i[c] - i[r] <= diagonal : i[c] - i[r] >= diagonal) ? x[0].data[at] : 0;
    });
  };
}
/// 1 where the index along the last dim of the result is the operand's element.
void hot(const std::vector<Global>& x, Global& y) {
  const Shape from = strides_along(x[0], y.names), to = strides_along(y, y.names);
  for_each_index(y.shape, [&](const Shape& i) {
    y.data[offset(to, i)] = static_cast<double>(i.back()) == x[0].data[offset(from, i)] ? 1 : 0;
  });
}

TEST_CASE("tril, triu and one_hot", "[ops]") {
  check_cases({
      ONE(f32, "B/d L", (tril<"B", "L">(x)), triangle("B", "L", 0, true)),
      ONE(f32, "L/t D A/d", (tril<"A", "L">(x, 2)), triangle("A", "L", 2, true)),
      ONE(bf16, "L V +t", (triu<"L", "V">(x, 1)), triangle("L", "V", 1, false)),
      ONE(f64, "A/d/t M", (triu<"M", "A">(x, -3)), triangle("M", "A", -3, false)),
      ONE(i32, "V/t L", (triu<"V", "L">(x)), triangle("V", "L", 0, false), .draws = {Draw::integers}),
      ONE(i32, "B/d L", (one_hot<"V/t">(x, size_of_dim("V"))), hot, .draws = {Draw::index}, .gradient = false),
      ONE(u32, "L/t", (one_hot<"V", bf16>(x, size_of_dim("V"))), hot, .draws = {Draw::naturals}, .gradient = false),
      ONE(i32, "", (one_hot<"A/t/d", i32>(x, size_of_dim("A"))), hot, .draws = {Draw::integers}),
  });
}

/// Elements at equal positions along a dim of the result and one that it lacks.
Reference diagonal_of(const std::string& kept, const std::string& dropped) {
  return [=](const std::vector<Global>& x, Global& y) {
    const Shape from = strides_along(x[0], y.names), to = strides_along(y, y.names);
    const auto step = static_cast<std::size_t>(strides_along(x[0], {dropped})[0]);
    const auto at = static_cast<std::size_t>(std::find(y.names.begin(), y.names.end(), kept) - y.names.begin());
    for_each_index(y.shape, [&](const Shape& i) {
      y.data[offset(to, i)] = x[0].data[offset(from, i) + static_cast<std::size_t>(i[at]) * step];
    });
  };
}

TEST_CASE("diagonal", "[ops]") {
  check_cases({
      ONE(f32, "B/d M/t V", (diagonal<"M", "V">(x)), diagonal_of("M", "V")),
      ONE(f64, "V L B/d +t", (diagonal<"B", "V">(x)), diagonal_of("B", "V")),
      ONE(bf16, "A/d/t F", (diagonal<"A", "F">(x)), diagonal_of("A", "F")),
      ONE(i32, "K B V/d", (diagonal<"K", "B">(x)), diagonal_of("K", "B"), .draws = {Draw::integers}),
  });
  on_mesh("d=1,t=1", [](const DevicePtr& device) {
    const auto x = zeros<f32, "X Y">(Mesh<"d t">(device), {{"X", 3}, {"Y", 2}});
    expect_error([&] { diagonal<"X", "Y">(x); },
                 "diagonal of `X Y`: dim `X` is 3, but `Y` only 2, so there is no diagonal element for each "
                 "index of `X`; write `diagonal<\"Y\", \"X\">` (device 0 (d=0,t=0) of mesh d=1,t=1)");
    const auto sharded = zeros<f32, "X/t Y">(Mesh<"d t">(device), {{"X", 3}, {"Y", 2}});
    expect(error_of([&] { diagonal<"X", "Y">(sharded); }).find("`X`; gather `X` first, and then write `diagonal<") !=
               std::string::npos,
           "the dim that the other diagonal leaves out must be whole");
  });
}

}  // namespace
