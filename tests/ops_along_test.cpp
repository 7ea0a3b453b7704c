// Ops along a dim that keep, select or order its elements: cumsum, cumprod, cummax, linear_scan, argsort, sort, top_k,
// narrow, pad, flip, roll, one_hot, tril, triu, diagonal, with their VJPs, over every spec of two dims on two axes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "op_case.hpp"
#include "shape_specs.hpp"
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

/// Rows along one dim of the operand as rows along another of the result.
Reference rows_as(const std::string& from, const std::string& to, const std::function<void(Row&)>& f) {
  const Reference same_dim = rows(from, f);
  return {[=](const std::vector<Global>& x, Global& y) {
            std::replace(y.names.begin(), y.names.end(), to, from);
            same_dim(x, y);
            std::replace(y.names.begin(), y.names.end(), from, to);
          },
          [=](const std::vector<Global>& x, const Global& ct, std::vector<Global>& dx) {
            Global renamed = ct;
            std::replace(renamed.names.begin(), renamed.names.end(), to, from);
            same_dim.pullback()(x, renamed, dx);
          }};
}

// Each op acts along each dim of every spec over two dims and two axes that its rule accepts. The dtypes take turns.

template <std::size_t I, DimName D>
struct Along {
  static constexpr Spec spec{two_dims[I]};
  static constexpr DimName dim = D;
  static constexpr bool odd = I % 2 == 1;
  static constexpr bool linear = rules::linear_along("cumsum", dim, spec).ok();
  static constexpr bool nonlinear = rules::along("sort", dim, spec).ok();
  using Float = Tensor<turn_of<I>, spec>;
  using Any = Tensor<turn_of_all<I>, spec>;
  static std::string name() { return std::string(std::string_view(dim)); }
};
/// Calls f with an Along for both dims of each spec.
template <class F>
void each_dim(const F& f) {
  each<two_dims.size()>([&](auto i) {
    f(Along<i, "A">());
    f(Along<i, "B">());
  });
}
/// How many are linear, where the other dim and a pending sum have the axes, or nothing has them; and how many are not.
constexpr std::size_t linear_ones = 2 * (3 * 3 + 1), nonlinear_ones = 2 * (2 * 2 + 1);

/// The kinds of ops.
enum class Kind { move, sum, nonlinear };

template <class X, class F>
void add(std::vector<Case>& cases, const std::string& what, const F& f, const Reference& reference, Kind kind,
         bool gradient = true) {
  using D = typename X::value_type;
  Options options{.law = kind == Kind::nonlinear ? Law::none : Law::each,
                  .tolerance = kind == Kind::nonlinear ? 1e-5 : 0,
                  .draws = {is_floating(dtype_v<D>) ? Draw::odd : Draw::integers},
                  .gradient = gradient};
  if (kind != Kind::move && std::is_same_v<D, bf16>) options.tolerance = 0.02;
  cases.push_back(make_case<X>(what + " of " + std::string(std::string_view{X::spec}), f, reference, options));
}
template <class At, class X = typename At::Any, class F>
void add_rows(std::vector<Case>& cases, const std::string& what, Kind kind, const F& f,
              const std::function<void(Row&)>& row, const std::string& to = At::name(), bool gradient = true) {
  add<X>(cases, what + " along " + At::name(), f, rows_as(At::name(), to, row), kind, gradient);
}

TEST_CASE("cumsum", "[ops]") {
  std::vector<Case> cases;
  each_dim([&]<class At>(At) {
    if constexpr (At::linear) {
      add_rows<At>(
          cases, "cumsum", Kind::sum, [](const auto& x) { return cumsum<At::dim>(x); }, sums);
      add_rows<At>(
          cases, "from the end, cumsum", Kind::sum, [](const auto& x) { return cumsum<At::dim>(x, true); },
          sums_from_the_end);
    }
  });
  CHECK(cases.size() == 2 * linear_ones);
  check_placements(cases, cases.size());
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
  std::vector<Case> cases;
  each_dim([&]<class At>(At) {
    if constexpr (At::nonlinear) {
      add_rows<At, typename At::Float>(
          cases, "cumprod", Kind::nonlinear, [](const auto& x) { return cumprod<At::dim>(x); }, products_so_far);
      add_rows<At>(
          cases, "cummax", Kind::nonlinear, [](const auto& x) { return cummax<At::dim>(x); }, maxima_so_far);
    }
  });
  CHECK(cases.size() == 2 * nonlinear_ones);
  const std::size_t placements = cases.size();
  cases.push_back(ONE(i32, "K B/d", cumprod<"K">(x), rows("K", products_so_far), .draws = {Draw::integers}));
  check_placements(cases, placements);
}

/// h_t = a_t * h_(t-1) + b_t along one dim, or with h_(t+1).
Reference recurrence(const std::string& dim, bool reverse) {
  // Calls f(this element's place, that before it or -1) in the order of the recurrence, or against it.
  const auto each_step = [dim, reverse](const Global& y, bool backward, const auto& f) {
    const auto l = static_cast<std::size_t>(std::find(y.names.begin(), y.names.end(), dim) - y.names.begin());
    const Shape strides = strides_along(y, y.names);
    for_each_index(y.shape, [&](Shape i) {
      if (backward) i[l] = y.shape[l] - 1 - i[l];
      const bool first = i[l] == 0;
      if (reverse) i[l] = y.shape[l] - 1 - i[l];
      const auto at = static_cast<std::int64_t>(offset(strides, i));
      f(static_cast<std::size_t>(at), first ? -1 : reverse ? at + strides[l] : at - strides[l]);
    });
  };
  const auto value = [each_step](const std::vector<Global>& x, Global& y) {
    each_step(y, false, [&](std::size_t at, std::int64_t before) {
      y.data[at] = x[1].data[at];
      if (before >= 0) y.data[at] += x[0].data[at] * y.data[static_cast<std::size_t>(before)];
    });
  };
  return {value, [each_step, value](const std::vector<Global>& x, const Global& ct, std::vector<Global>& dx) {
            Global h = ct;
            value(x, h);
            dx[1].data = ct.data;
            each_step(ct, true, [&](std::size_t at, std::int64_t before) {
              if (before < 0) return;
              const auto b = static_cast<std::size_t>(before);
              dx[0].data[at] = dx[1].data[at] * h.data[b];
              dx[1].data[b] += dx[1].data[at] * x[0].data[at];
            });
          }};
}

/// The axes of a dim, in their order: "d t".
template <Spec S, DimName Dim>
constexpr OpSpec axes_of_dim() {
  detail::Text names = "over<";
  for (const auto axis : detail::parsed<S>.dims[detail::parsed<S>.find(Dim)].axes)
    names = names + (names == detail::Text("over<") ? "" : " ") + axis;
  return OpSpec((names + ">").view());
}

TEST_CASE("linear_scan, also along a sharded dim", "[ops]") {
  std::vector<Case> cases;
  each_dim([&]<class At>(At) {
    using X = typename At::Float;
    static constexpr OpSpec axes = axes_of_dim<At::spec, At::dim>();
    for (const bool reverse : {false, true}) {
      const auto add_scan = [&](const auto& f) {
        cases.push_back(make_case<X, X>(
            "linear_scan along " + At::name() + " of " + std::string(std::string_view{At::spec}) +
                (reverse ? ", reverse" : ""),
            f, recurrence(At::name(), reverse),
            {.law = Law::none, .tolerance = std::is_same_v<typename X::value_type, bf16> ? 0.05 : 1e-5}));
      };
      if constexpr (rules::linear_scan(At::dim, At::spec, At::spec).ok())
        add_scan([reverse](const auto& a, const auto& b) { return linear_scan<At::dim>(a, b, reverse); });
      if constexpr (rules::linear_scan_over(At::dim, axes, At::spec, At::spec).ok())
        add_scan([reverse](const auto& a, const auto& b) { return linear_scan<At::dim, axes>(a, b, reverse); });
    }
  });
  // A sharded dim has both axes, in two orders, or one of them, and the other is on the other dim or nowhere.
  CHECK(cases.size() == 2 * (nonlinear_ones + 2 * (2 + 2 * 2)));
  check_placements(cases, cases.size());
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
TEST_CASE("argsort, sort and top_k", "[ops]") {
  std::vector<Case> cases;
  each_dim([&]<class At>(At) {
    if constexpr (At::nonlinear) {
      const auto add_one = [&](const char* what, const auto& f, const auto& row, const std::string& to, bool gradient) {
        add_rows<At>(cases, what, Kind::nonlinear, f, row, to, gradient);
      };
      add_one(
          "argsort", [](const auto& x) { return argsort<At::dim>(x, At::odd); }, ordered(At::odd, true), At::name(),
          false);
      add_one(
          "sort", [](const auto& x) { return sort<At::dim>(x, At::odd); }, ordered(At::odd, false), At::name(), true);
      add_one(
          "top_k", [](const auto& x) { return top_k<At::dim, "K">(x, 4).values; }, ordered(true, false, 4), "K", true);
      add_one(
          "the indices of top_k", [](const auto& x) { return top_k<At::dim, "K">(x, 4).indices; },
          ordered(true, true, 4), "K", false);
    }
  });
  CHECK(cases.size() == 4 * nonlinear_ones);
  check_placements(cases, cases.size());
}

TEST_CASE("top_k rejects a wrong k", "[ops]") {
  on_mesh("d=1,t=1", [](const Mesh<"d t">& mesh) {
    const auto x = zeros<f32, "V">(mesh, {{"V", 5, 8}});
    for (const std::int64_t k : {0, 6})
      REQUIRE_THROWS_WITH((top_k<"V", "K">(x, k)),
                          Catch::Contains("top_k<`V`>") && Catch::Contains("but dim `V` has 5 elements"));
  });
}

/// Before, 2 elements; after, as many as make 27.
std::function<void(Row&)> surrounded(double value) {
  return [value](Row& row) {
    row.insert(row.begin(), 2, value);
    row.resize(27, value);
  };
}

TEST_CASE("narrow and pad", "[ops]") {
  std::vector<Case> cases;
  each_dim([&]<class At>(At) {
    static constexpr OpSpec to_k = make_op<Spec{std::string_view(At::dim)}, "K">,
                            to_n = make_op<Spec{std::string_view(At::dim)}, "N">;
    if constexpr (rules::resize("narrow", to_k, At::spec).ok())
      add_rows<At>(
          cases, "narrow", Kind::move, [](const auto& x) { return narrow<to_k>(x, 3, 4); },
          [](Row& row) { row = Row(row.begin() + 3, row.begin() + 7); }, "K");
    if constexpr (rules::resize("pad", to_n, At::spec).ok())
      add_rows<At>(
          cases, "pad", Kind::move, [](const auto& x) { return pad<to_n>(x, 2, 25 - x.size(At::dim)); }, surrounded(0),
          "N");
    if constexpr (rules::pad_with(to_n, At::spec).ok())
      add_rows<At>(
          cases, "pad with 3", Kind::nonlinear,
          [](const auto& x) { return pad<to_n>(x, 2, 25 - x.size(At::dim), 3.0); }, surrounded(3), "N");
  });
  CHECK(cases.size() == 2 * linear_ones + nonlinear_ones);
  const std::size_t placements = cases.size();
  // A dim of a fixed size, and one between others.
  cases.push_back(ONE(f64, "2 C/t +d", (pad<"2 -> N">(x, 2, 23)), rows_as("2", "N", surrounded(0))));
  cases.push_back(ONE(bf16, "L K C/t", (pad<"K -> N">(x, 2, 21)), rows_as("K", "N", surrounded(0))));
  check_placements(cases, placements);
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
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    for (const auto& [before, after] :
         {std::pair{most, most}, {most - 3, std::int64_t{1}}, {std::int64_t{0}, most - 2}})
      REQUIRE_THROWS_WITH((pad<"L -> N">(w.x, before, after)),
                          Catch::Contains(" after dim `L` of size 3, which are more than can be counted"));
    REQUIRE_THROWS_WITH((pad<"L -> N">(w.x, most / 2, 1)), Catch::Contains("more bytes than can be counted"));
  });
}

TEST_CASE("roll by the most negative number has the gradient of its places", "[ops]") {
  on_meshes({"d=1,t=1", "d=2,t=2"}, [](const Mesh<"d t">& mesh) {
    struct Weights {
      Tensor<f64, "3"> x;
    };
    HostArray<f64> host({3});
    host.data = {1, 2, 3};
    const Weights w{place<Tensor<f64, "3">>(mesh, host, {})};
    constexpr std::int64_t least = std::numeric_limits<std::int64_t>::min();  // -2^63 is -2 modulo 3
    REQUIRE(fetch(roll<"3">(w.x, least)).data == std::vector<f64>{3, 1, 2});
    const auto loss = [&](const Weights& v) -> Tensor<f64, "+d +t"> {
      return to_partial<" -> +d +t">(sum(roll<"3">(v.x, least) * stop_gradient(w.x)));
    };
    REQUIRE(fetch(reduce_gradients(mesh, value_and_grad(mesh, loss, w).second).x).data == std::vector<f64>{2, 3, 1});
  });
}

TEST_CASE("flip and roll", "[ops]") {
  std::vector<Case> cases;
  each_dim([&]<class At>(At) {
    static constexpr std::int64_t by = At::odd ? -31 : 2;
    if constexpr (At::linear) {
      add_rows<At>(
          cases, "flip", Kind::move, [](const auto& x) { return flip<At::dim>(x); },
          [](Row& row) { std::reverse(row.begin(), row.end()); });
      add_rows<At>(
          cases, "roll", Kind::move, [](const auto& x) { return roll<At::dim>(x, by); },
          [](Row& row) {
            const auto n = static_cast<std::int64_t>(row.size());
            std::rotate(row.begin(), row.end() - (by % n + n) % n, row.end());
          });
    }
  });
  CHECK(cases.size() == 2 * linear_ones);
  const std::size_t placements = cases.size();
  // Elements of one byte.
  cases.push_back(ONE(bool_, "A/d B", flip<"B">(x), rows("B", [](Row& row) { std::reverse(row.begin(), row.end()); }),
                      .draws = {Draw::truth}));
  cases.push_back(ONE(u8, "B C/t", (roll<"B">(x, 1)),
                      rows("B", [](Row& row) { std::rotate(row.begin(), row.end() - 1, row.end()); }),
                      .draws = {Draw::naturals}));
  check_placements(cases, placements);
}

/// Keeps the elements whose position along the columns is at most, or at least, `diagonal` to the right of that along
/// the rows.
Reference triangle(const std::string& rows, const std::string& columns, std::int64_t diagonal, bool lower) {
  const auto keep = [=](const Global& x, Global& y) {
    const auto of = [&](const std::string& dim) {
      return std::find(y.names.begin(), y.names.end(), dim) - y.names.begin();
    };
    const auto r = static_cast<std::size_t>(of(rows)), c = static_cast<std::size_t>(of(columns));
    const Shape strides = strides_along(y, y.names);
    for_each_index(y.shape, [&](const Shape& i) {
      const std::size_t at = offset(strides, i);
      y.data[at] = (lower ? i[c] - i[r] <= diagonal : i[c] - i[r] >= diagonal) ? x.data[at] : 0;
    });
  };
  return {[keep](const std::vector<Global>& x, Global& y) { keep(x[0], y); },
          [keep](const std::vector<Global>&, const Global& ct, std::vector<Global>& dx) { keep(ct, dx[0]); }};
}
/// 1 where the index along the last dim of the result is the operand's element.
void hot(const std::vector<Global>& x, Global& y) {
  const Shape from = strides_along(x[0], y.names), to = strides_along(y, y.names);
  for_each_index(y.shape, [&](const Shape& i) {
    y.data[offset(to, i)] = static_cast<double>(i.back()) == x[0].data[offset(from, i)] ? 1 : 0;
  });
}

TEST_CASE("tril, triu and one_hot", "[ops]") {
  std::vector<Case> cases;
  each<two_dims.size()>([&](auto i) {
    static constexpr Spec spec{two_dims[i]};
    using X = Tensor<turn_of_all<i>, spec>;
    add<X>(
        cases, "tril", [](const auto& x) { return tril<"B", "A">(x); }, triangle("B", "A", 0, true), Kind::move);
    add<X>(
        cases, "triu", [](const auto& x) { return triu<"A", "B">(x, -3); }, triangle("A", "B", -3, false), Kind::move);
    // The dim B is new.
    static constexpr TensorSpec both = detail::parsed<spec>;
    if constexpr (both.partial.empty()) {
      static constexpr Spec ids = without_dim<spec, "B">;
      static constexpr Spec fresh = without_dim<spec, "A">;
      using I = std::conditional_t<i % 2 == 0, i32, u32>;
      using To = turn_of_all<i>;
      cases.push_back(make_case<Tensor<I, ids>>(
          "one_hot " + std::string(two_dims[i]), [](const auto& x) { return one_hot<fresh, To>(x, size_of_dim("B")); },
          hot, {.draws = {i % 2 == 0 ? Draw::integers : Draw::naturals}, .gradient = false}));
    }
  });
  CHECK(cases.size() == 2 * 18 + 11);
  const std::size_t placements = cases.size();
  cases.push_back(ONE(f32, "L/t D A/d", (tril<"A", "L">(x, 2)), triangle("A", "L", 2, true)));
  cases.push_back(ONE(i32, "", (one_hot<"A/t/d", i32>(x, size_of_dim("A"))), hot, .draws = {Draw::integers}));
  check_placements(cases, placements);
}

/// Elements at equal positions along a dim of the result and one that it lacks.
Reference diagonal_of(const std::string& kept, const std::string& dropped) {
  const auto each_element = [=](const Global& x, const Global& y, const auto& f) {
    const Shape from = strides_along(x, y.names), to = strides_along(y, y.names);
    const auto step = static_cast<std::size_t>(strides_along(x, {dropped})[0]);
    const auto at = static_cast<std::size_t>(std::find(y.names.begin(), y.names.end(), kept) - y.names.begin());
    for_each_index(y.shape,
                   [&](const Shape& i) { f(offset(from, i) + static_cast<std::size_t>(i[at]) * step, offset(to, i)); });
  };
  return {[=](const std::vector<Global>& x, Global& y) {
            each_element(x[0], y, [&](std::size_t from, std::size_t to) { y.data[to] = x[0].data[from]; });
          },
          [=](const std::vector<Global>& x, const Global& ct, std::vector<Global>& dx) {
            each_element(x[0], ct, [&](std::size_t from, std::size_t to) { dx[0].data[from] += ct.data[to]; });
          }};
}

TEST_CASE("diagonal", "[ops]") {
  std::vector<Case> cases;
  each<two_dims.size()>([&](auto i) {
    static constexpr Spec spec{two_dims[i]};
    if constexpr (rules::diagonal("B", "A", spec).ok())
      add<Tensor<turn_of_all<i>, spec>>(
          cases, "diagonal", [](const auto& x) { return diagonal<"B", "A">(x); }, diagonal_of("B", "A"), Kind::move);
  });
  CHECK(cases.size() == linear_ones / 2);
  const std::size_t placements = cases.size();
  cases.push_back(ONE(f32, "B/d M/t V", (diagonal<"M", "V">(x)), diagonal_of("M", "V")));
  cases.push_back(ONE(f64, "V L B/d +t", (diagonal<"B", "V">(x)), diagonal_of("B", "V")));
  check_placements(cases, placements);
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
