// index_unreduced, scatter_add, take_along and cross_entropy: lookups in tables that may be sharded along the looked-up
// dim.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "op_case.hpp"
#include "shape_specs.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

/// The position of element i of an array with the dims `names` in a table: its own dims, and along each of `dims` what
/// the index of x[1] and on says.
struct Rows {
  Shape steps, along;
  std::vector<Shape> ids;

  Rows(const std::vector<Global>& x, const Global& table, const Names& names, const Names& dims)
      : steps(strides_along(table, names)), along(strides_along(table, dims)) {
    for (std::size_t k = 1; k < x.size(); ++k) ids.push_back(strides_along(x[k], names));
  }
  std::size_t operator()(const std::vector<Global>& x, const Shape& i) const {
    std::size_t at = offset(steps, i);
    for (std::size_t k = 0; k < ids.size(); ++k)
      at += static_cast<std::size_t>(along[k]) * static_cast<std::size_t>(x[k + 1].data[offset(ids[k], i)]);
    return at;
  }
};

/// Rows of the table by index along the dims.
Reference lookup(const Names& dims) {
  return [dims](const std::vector<Global>& x, Global& y) {
    const Rows rows(x, x[0], y.names, dims);
    const Shape to = strides_along(y, y.names);
    for_each_index(y.shape, [&](const Shape& i) { y.data[offset(to, i)] = x[0].data[rows(x, i)]; });
  };
}

#define INDEX(dtype, itype, table, bracketed, ids, out)                                                  \
  make_case<Tensor<dtype, table>, Tensor<itype, ids>>(                                                   \
      "index " bracketed ", " ids " -> " out,                                                            \
      [](const auto& x, const auto& i) { return index_unreduced<bracketed ", " ids " -> " out>(x, i); }, \
      lookup({"V"}), {.law = Law::joint, .draws = {Draw::odd, Draw::index}})

TEST_CASE("index_unreduced", "[ops]") {
  check_cases({
      INDEX(f32, i32, "V M", "[V] M", "B L", "B L M"),
      INDEX(f32, i32, "V M", "[V] M", "B/d L", "B/d L M"),
      INDEX(f32, i32, "V/t M", "[V/t] M", "B/d L", "B/d L M +t"),
      INDEX(f32, u32, "V/t M/d", "[V/t] M/d", "L", "L M/d +t"),
      INDEX(f32, i32, "M/t V", "M/t [V]", "B/d", "B/d M/t"),
      INDEX(f32, i32, "B/d L V/t", "B/d L [V/t]", "B/d L", "B/d L +t"),
      INDEX(f32, i32, "B/d V/t", "B/d [V/t]", "B/d L", "L B/d +t"),
      INDEX(f32, i32, "V M +t", "[V] M +t", "B/d", "B/d M +t"),
      INDEX(f32, i32, "V/t/d K", "[V/t/d] K", "L", "L K +d +t"),
      INDEX(f64, i32, "V/t K", "[V/t] K", "B/d L", "B/d L K +t"),
      INDEX(i32, i32, "V/t K", "[V/t] K", "B/d", "B/d K +t"),
  });
}

/// Rows added by index along the dims, summed over the dims that the result lacks.
Reference added(const Names& dims) {
  return [dims](const std::vector<Global>& x, Global& y) {
    const Rows rows(x, y, x[0].names, dims);
    const Shape from = strides_along(x[0], x[0].names);
    std::fill(y.data.begin(), y.data.end(), 0.0);
    for_each_index(x[0].shape, [&](const Shape& i) { y.data[rows(x, i)] += x[0].data[offset(from, i)]; });
  };
}

TEST_CASE("scatter_add", "[ops]") {
#define SCATTER(dtype, itype, rows, ids, bracketed)                                                                 \
  make_case<Tensor<dtype, rows>, Tensor<itype, ids>>(                                                               \
      "scatter_add " rows ", " ids " -> " bracketed,                                                                \
      [](const auto& x, const auto& i) { return scatter_add<rows ", " ids " -> " bracketed>(x, i, {sized("V")}); }, \
      added({"V"}), {.law = Law::joint, .draws = {Draw::odd, Draw::index}})
  check_cases({
      SCATTER(f32, i32, "B/d L M", "B/d L", "[V] M +d"),
      SCATTER(f32, i32, "B/d L M", "B/d L", "[V/t] M +d"),
      SCATTER(f32, u32, "B/d L", "B/d L", "B/d [V]"),
      SCATTER(f64, i32, "L M/t +d", "L", "[V] +d +t"),
      SCATTER(bf16, i32, "K M/t", "K", "[V] M/t"),
  });
#undef SCATTER
}

TEST_CASE("index_unreduced and scatter_add along several dims", "[ops]") {
  const Options options{.law = Law::joint, .draws = {Draw::odd, Draw::index, Draw::index, Draw::index}};
#define LOOK_UP(op, table, i, j)                                                                             \
  make_case<Tensor<f32, table>, Tensor<i32, i>, Tensor<u32, j>>(                                             \
      "index " op, [](const auto& x, const auto& a, const auto& b) { return index_unreduced<op>(x, a, b); }, \
      lookup({"V", "M"}), options)
#define SCATTER(dtype, op, rows, ids)                                 \
  make_case<Tensor<dtype, rows>, Tensor<i32, ids>, Tensor<u32, "K">>( \
      "scatter_add " op,                                              \
      [](const auto& x, const auto& a, const auto& b) {               \
        return scatter_add<op>(x, a, b, {sized("V"), sized("M")});    \
      },                                                              \
      added({"V", "M"}), options)
  check_cases({
      LOOK_UP("[V/t] [M/d] C, L, L K -> L K C +d +t", "V/t M/d C", "L", "L K"),
      LOOK_UP("[V] C/t [M], L/d, L/d -> C/t L/d", "V C/t M", "L/d", "L/d"),
      LOOK_UP("B/d [V] [M/t], B/d L,  -> L B/d +t", "B/d V M/t", "B/d L", ""),
      SCATTER(f32, "L/d K C, L/d, K -> [V] [M/t] C +d", "L/d K C", "L/d"),
      SCATTER(bf16, "L K C/t, L K, K -> C/t [V] [M/d]", "L K C/t", "L K"),
      make_case<Tensor<f64, "V/t M B C">, Tensor<i32, "L/d">, Tensor<i32, "L/d">, Tensor<i32, "">>(
          "index along three dims",
          [](const auto& x, const auto& a, const auto& b, const auto& c) {
            return index_unreduced<"[V/t] [M] [B] C, L/d, L/d,  -> L/d C +t">(x, a, b, c);
          },
          lookup({"V", "M", "B"}), options),
      make_case<Tensor<f64, "L/d">, Tensor<i32, "L/d">, Tensor<i32, "L/d">, Tensor<i32, "">>(
          "scatter_add along three dims",
          [](const auto& x, const auto& a, const auto& b, const auto& c) {
            return scatter_add<"L/d, L/d, L/d,  -> [V/t] [M] [B] +d">(x, a, b, c, {sized("V"), sized("M"), sized("B")});
          },
          added({"V", "M", "B"}), options),
  });
#undef LOOK_UP
#undef SCATTER
}

/// Elements at the indices along a dim, in whose place the indices have this dim or another.
Reference taken_along(const std::string& dim) {
  const auto each_element = [dim](const std::vector<Global>& x, const Global& y, const auto& f) {
    const Names& names = x[0].names;
    const auto at = static_cast<std::size_t>(std::find(names.begin(), names.end(), dim) - names.begin());
    const Shape from = strides_along(x[0], names), to = strides_along(y, y.names);
    for_each_index(y.shape, [&](Shape i) {
      const std::size_t element = offset(to, i);
      i[at] = static_cast<std::int64_t>(x[1].data[element]);
      f(offset(from, i), element);
    });
  };
  return {[=](const std::vector<Global>& x, Global& y) {
            each_element(x, y, [&](std::size_t from, std::size_t to) { y.data[to] = x[0].data[from]; });
          },
          [=](const std::vector<Global>& x, const Global& ct, std::vector<Global>& dx) {
            each_element(x, ct, [&](std::size_t from, std::size_t to) { dx[0].data[from] += ct.data[to]; });
          }};
}

/// Adds the cases of indices of all specs for an operand of spec I, and the same dims.
template <DimName Dim, std::size_t I>
void add_take(std::vector<Case>& cases) {
  each<two_dims.size()>([&](auto k) {
    static constexpr Spec spec{two_dims[I]}, ids{two_dims[k]};
    if constexpr (rules::take_along(Dim, spec, ids).ok()) {
      using D = turn_of_all<I + k>;
      const std::string dim(std::string_view{Dim});
      cases.push_back(make_case<Tensor<D, spec>, Tensor<std::conditional_t<k % 2 == 0, i32, u32>, ids>>(
          "take_along " + dim + " of " + std::string(two_dims[I]) + ", " + std::string(two_dims[k]),
          [](const auto& x, const auto& i) { return take_along<Dim>(x, i); }, taken_along(dim),
          {.law = Law::joint,
           .tolerance = std::is_same_v<D, bf16> ? 0.02 : 0,
           .draws = {is_floating(dtype_v<D>) ? Draw::odd : Draw::integers, Draw::index}}));
    }
  });
}

TEST_CASE("take_along", "[ops]") {
  std::vector<Case> cases;
  each<two_dims.size()>([&](auto i) {
    add_take<"A", i>(cases);
    add_take<"B", i>(cases);
  });
  // An axis on which the operand is not replicated has one place in the indices. Of the others, each may be on the dim:
  // one axis in 2 ways, both in 5.
  CHECK(cases.size() == 2 * (5 + 4 * 2 + 5));
  const std::size_t placements = cases.size();
  // Another dim in its place, and dims of a fixed size.
#define TAKE(dtype, from, ids)                                                                            \
  make_case<Tensor<dtype, from>, Tensor<i32, ids>>(                                                       \
      "take_along of " from ", " ids, [](const auto& x, const auto& i) { return take_along<"V">(x, i); }, \
      taken_along("V"), {.law = Law::joint, .draws = {Draw::odd, Draw::index}})
  cases.push_back(TAKE(f32, "V C/t +d", "D C/t"));
  cases.push_back(TAKE(f64, "B V", "B L/t"));
  cases.push_back(TAKE(f32, "2 V 2", "2 V/t 2"));
#undef TAKE
  check_placements(cases, placements);
}

TEST_CASE("take_along inverts a permutation, finds top_k's values, and rejects an index outside the dim", "[ops]") {
  on_mesh("d=1,t=1", [](const Mesh<"d t">& mesh) {
    HostArray<f32> host({2, 3, 2});
    host.data = {3, 1, 2, 9, 7, 8, -4, -5, -6, 6, 5, 4};
    const auto x = place<Tensor<f32, "2 V two">>(mesh, host);
    REQUIRE(fetch(take_along<"V">(x, argsort<"V">(x))).data == fetch(sort<"V">(x)).data);
    REQUIRE(fetch(sort<"V">(x)).data == std::vector<f32>{2, 1, 3, 8, 7, 9, -6, -5, -4, 4, 5, 6});
    const auto best = top_k<"V", "K">(x, 2);
    REQUIRE(fetch(take_along<"V">(x, best.indices)).data == fetch(best.values).data);
    const auto order = argsort<"V">(x);
    REQUIRE_THROWS_WITH(wait_for(take_along<"V">(x, order + 1)),
                        Catch::Contains("index 3 is outside dim `V` of size 3"));
  });
}

/// -log softmax(logits)[target] along V, the logits' last dim.
void negative_log_likelihood(const std::vector<Global>& x, Global& y) {
  const auto n = static_cast<std::size_t>(x[0].shape.back());
  for (std::size_t row = 0; row < y.data.size(); ++row) {
    const double* logits = x[0].data.data() + row * n;
    double total = 0;
    for (std::size_t v = 0; v < n; ++v) total += std::exp(logits[v]);
    y.data[row] = std::log(total) - logits[static_cast<std::size_t>(x[1].data[row])];
  }
}

TEST_CASE("cross_entropy", "[ops]") {
#define CROSS_ENTROPY(dtype, logits, targets, tolerance_)                                        \
  make_case<Tensor<dtype, logits>, Tensor<i32, targets>>(                                        \
      "cross_entropy " logits, [](const auto& x, const auto& t) { return cross_entropy(x, t); }, \
      negative_log_likelihood, {.law = Law::none, .tolerance = tolerance_, .draws = {Draw::odd, Draw::index}})
  check_cases({
      CROSS_ENTROPY(f32, "B/d L V/t", "B/d L", 4e-6),
      CROSS_ENTROPY(f32, "B/d L V", "B/d L", 4e-6),
      CROSS_ENTROPY(f32, "L V/t/d", "L", 4e-6),
      CROSS_ENTROPY(f64, "L/d V/t", "L/d", 1e-6),
      CROSS_ENTROPY(bf16, "L/d V", "L/d", 0.02),
  });
#undef CROSS_ENTROPY
}

TEST_CASE("cross_entropy of large logits stays finite", "[ops]") {
  on_mesh("d=1,t=2", [](const DevicePtr& device) {
    static const TensorSpec spec = parse_tensor("V/t").spec, none = parse_tensor("").spec;
    Global logits = shell(spec);
    for (std::size_t i = 0; i < logits.data.size(); ++i) logits.data[i] = 1000 - 100 * static_cast<double>(i);
    const Tensor<f32, "V/t"> x(place(device, DType::f32, spec, logits));
    const Tensor<i32, ""> target(place(device, DType::i32, none, {{}, {}, {1}}));
    const Global loss = assemble(*cross_entropy(x, target).value(), parse_tensor("+t").spec);
    expect(loss.data[0] == 100, "loss " + show(loss.data[0]));
  });
}

}  // namespace
