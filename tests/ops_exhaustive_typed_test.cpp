// The collectives whose kernels are inside their typed functions, over every spec of two dims on two axes: here the
// types are enumerated at compile time. Reductions other than sums over every subset of dims, softmax and norms along
// every dim, and shift round every axis, both ways, with its cotangent and the adjoint law.
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

TEST_CASE("the specs of the typed ops are all that there are", "[ops][exhaustive]") {
  auto all = specs_of({"A", "B"});
  std::vector<std::string> here(two_dims.begin(), two_dims.end());
  std::sort(all.begin(), all.end());
  std::sort(here.begin(), here.end());
  CHECK(here == all);
}

/// "A/t B -> B": without the dims whose bit is not set.
constexpr OpSpec maximum_op(std::size_t from, std::size_t kept) {
  TensorSpec out = parse_tensor(two_dims[from]).spec;
  for (int i = out.rank(); i-- > 0;)
    if ((kept >> i & 1U) == 0) out.dims.erase(i);
  return detail::op_spec_of(Spec(two_dims[from]), Spec(to_string(out).view()));
}

TEST_CASE("all_reduce_max over every spec and subset of dims", "[ops][exhaustive]") {
  std::vector<Case> cases;
  each<two_dims.size()>([&](auto from) {
    each<3>([&](auto kept) {
      static constexpr OpSpec op = maximum_op(from, kept);
      static constexpr Spec spec{two_dims[from]};
      if constexpr (rules::all_reduce_max(op, spec).ok())
        cases.push_back(make_case<Tensor<f32, spec>>("all_reduce_max " + std::string(std::string_view(op)),
                                                     [](const auto& x) { return all_reduce_max<op>(x); },
                                                     extrema(false), {.gradient = false}));
    });
  });
  // 3 states on each axis, in two orders where both are on one dim; nothing partial.
  CHECK(cases.size() == 11 * 3);
  check_cases(cases);
}

/// Where the first greatest element of each row along the one dim that goes is.
Reference first_maxima() {
  return [](const std::vector<Global>& x, Global& y) {
    const Shape from = strides_along(x[0], x[0].names), to = strides_along(y, x[0].names);
    std::vector<double> highest(y.data.size(), -1e9);
    for_each_index(x[0].shape, [&](const Shape& i) {
      const double element = x[0].data[offset(from, i)];
      const std::size_t at = offset(to, i);
      if (element <= highest[at]) return;
      highest[at] = element;
      for (std::size_t d = 0; d < to.size(); ++d)
        if (to[d] == 0) y.data[at] = static_cast<double>(i[d]);
    });
  };
}

double product_of(const std::vector<double>& x) {
  double product = 1;
  for (const double v : x) product *= v;
  return product;
}
double variance_of(const std::vector<double>& x) {
  double mean = 0, sum = 0;
  for (const double v : x) mean += v / static_cast<double>(x.size());
  for (const double v : x) sum += (v - mean) * (v - mean);
  return sum / static_cast<double>(x.size());
}
double norm_of(const std::vector<double>& x) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  return std::sqrt(sum);
}
double log_of_sum(const std::vector<double>& x) {
  double sum = 0;
  for (const double v : x) sum += std::exp(v);
  return std::log(sum);
}

#define FOLD(dtype, from, expression, reference, ...) \
  ONE(dtype, from, expression, folded(reference), .law = Law::none, __VA_ARGS__)

TEST_CASE("reductions other than sums over every spec and subset of dims", "[ops]") {
  std::vector<Case> cases;
  each<two_dims.size()>([&](auto from) {
    each<3>([&](auto kept) {
      static constexpr OpSpec op = maximum_op(from, kept);
      static constexpr Spec spec{two_dims[from]};
      using D = turn_of<from>;
      const auto add = [&]<class E>(std::type_identity<E>, const char* name, const auto& f, const Reference& reference,
                                    double tolerance = 4e-6) {
        cases.push_back(
            make_case<Tensor<E, spec>>(name + (" " + std::string(std::string_view{op})), f, reference,
                                       {.law = Law::none,
                                        .tolerance = tolerance > 0 && std::is_same_v<E, bf16> ? 0.02 : tolerance,
                                        .draws = {is_floating(dtype_v<E>) ? Draw::odd : Draw::naturals}}));
      };
      constexpr std::type_identity<D> any_float;
      constexpr std::type_identity<i32> integer;
      if constexpr (rules::local_max("max", op, spec).ok()) {
        add(
            any_float, "max", [](const auto& x) { return max<op>(x); }, extrema(false), 0);
        add(
            any_float, "min", [](const auto& x) { return min<op>(x); }, extrema(true), 0);
        add(
            any_float, "logsumexp", [](const auto& x) { return logsumexp<op>(x); }, folded(log_of_sum));
        add(
            any_float, "var", [](const auto& x) { return var<op>(x); }, folded(variance_of));
        add(
            any_float, "vector_norm", [](const auto& x) { return vector_norm<op>(x); }, folded(norm_of));
        // Of numbers near 1, so that the products stay in range.
        add(
            std::type_identity<f64>(), "prod", [](const auto& x) { return prod<op>(x * 0.125 + 1.0); },
            folded([](const auto& row) {
              double product = 1;
              for (const double v : row) product *= v / 8 + 1;
              return product;
            }));
        // Few are true, or false, so that rows differ.
        add(
            integer, "any", [](const auto& x) { return any<op>(greater(x, 13)); }, folded([](const auto& row) {
              return std::any_of(row.begin(), row.end(), [](double v) { return v > 13; }) ? 1.0 : 0.0;
            }));
        add(
            integer, "all", [](const auto& x) { return all<op>(less(x, 14)); }, folded([](const auto& row) {
              return std::all_of(row.begin(), row.end(), [](double v) { return v < 14; }) ? 1.0 : 0.0;
            }));
      }
      if constexpr (rules::local_max("argmax", op, spec).ok())
        add(
            std::type_identity<f32>(), "argmax", [](const auto& x) { return argmax<op>(x); }, first_maxima());
    });
  });
  // The dim that stays is sharded or not; both go only where neither is; argmax takes one.
  CHECK(cases.size() == 8 * (5 + 5 + 1) + (5 + 5));
  const std::size_t placements = cases.size();
  // Dims on both sides of those that go, or that stay; products of elements as they are.
  cases.insert(cases.end(), {
                                FOLD(f64, "D B/t K", (prod<"D B/t K -> B/t">(x)), product_of, .tolerance = 1e-6,
                                     .draws = {Draw::even}),
                                FOLD(i32, "L B/d", (prod<"L B/d -> B/d">(x)), product_of, .draws = {Draw::integers}),
                                FOLD(bf16, "D C/t", (prod<"D C/t -> C/t">(x)), product_of, .tolerance = 0.02),
                                FOLD(f64, "B C/t V", (logsumexp<"C/t">(x)), log_of_sum, .tolerance = 1e-6),
                                FOLD(f64, "B C/t V", (var<"C/t">(x)), variance_of, .tolerance = 1e-6),
                                FOLD(f64, "B/t M C", (vector_norm<"B/t C">(x)), norm_of, .tolerance = 1e-6),
                            });
  check_placements(cases, placements);
}

template <std::size_t I, DimName Dim>
void add_along(std::vector<Case>& cases) {
  static constexpr Spec spec{two_dims[I]};
  const std::string dim(std::string_view{Dim}), text = " along " + dim + " of " + std::string(two_dims[I]);
  const Options options{.law = Law::none, .tolerance = 1e-5};
  if constexpr (rules::along("softmax", Dim, spec).ok()) {
    using X = Tensor<f32, spec>;
    cases.push_back(make_case<X>(
        "softmax" + text, [](const auto& x) { return softmax<Dim>(x); }, rows(dim, softmax_row), options));
    cases.push_back(make_case<X>(
        "rms_norm" + text, [](const auto& x) { return rms_norm<Dim>(x); }, rows(dim, rms_norm_row), options));
    cases.push_back(make_case<X>(
        "layer_norm" + text, [](const auto& x) { return layer_norm<Dim>(x, 0.25); }, rows(dim, layer_norm_row),
        options));
  }
}

TEST_CASE("softmax and norms along every dim of every spec", "[ops][exhaustive]") {
  std::vector<Case> cases;
  each<two_dims.size()>([&](auto i) {
    add_along<i, "A">(cases);
    add_along<i, "B">(cases);
  });
  // The other dim is sharded or not; nothing is partial.
  CHECK(cases.size() == 3 * 2 * 5);
  check_cases(cases);
}

/// The shards of every dim, turned round the axis by `by` devices.
Reference turned(const TensorSpec& spec, const std::vector<AxisSize>& mesh, const std::string& axis, int by) {
  return [=](const std::vector<Global>& x, Global& y) {
    const Shape strides = strides_along(x[0], x[0].names);
    for_each_index(x[0].shape, [&](const Shape& from) {
      Shape to = from;
      for (int i = 0; i < spec.rank(); ++i) {
        if (!spec.dims[i].axes.contains(axis)) continue;
        // The axes after it number the shards within one of its own.
        const auto d = static_cast<std::size_t>(i);
        std::int64_t shard = x[0].shape[d];
        const std::int64_t n = size_of_axis(mesh, axis);
        for (auto other : spec.dims[i].axes) {
          shard /= size_of_axis(mesh, other);
          if (other == axis) break;
        }
        const std::int64_t coordinate = from[d] / shard % n, turn = ((coordinate + by) % n + n) % n;
        to[d] += (turn - coordinate) * shard;
      }
      y.data[offset(strides, to)] = x[0].data[offset(strides, from)];
    });
  };
}

template <class D, std::size_t I, AxisName Axis>
void add_shift(std::vector<Case>& cases, const std::vector<AxisSize>& mesh, int by) {
  static constexpr Spec spec{two_dims[I]};
  static constexpr OpSpec op{two_dims[I]};
  if constexpr (rules::shift(spec, Axis, spec).ok())
    cases.push_back(make_case<Tensor<D, spec>>(
        "shift " + std::string(two_dims[I]) + " round " + std::string(std::string_view(Axis)) + " by " + show(by),
        [by](const auto& x) { return shift<op, Axis>(x, by); },
        turned(detail::parsed<spec>, mesh, std::string(std::string_view(Axis)), by),
        {.draws = {is_floating(dtype_v<D>) ? Draw::odd : Draw::integers}}));
}

constexpr int steps_of_turn[2][2] = {{1, 0}, {-2, 7}};

TEST_CASE("shift over every spec and axis", "[ops][exhaustive]") {
  for (const auto& mesh : op_meshes())
    each<2>([&](auto turn) {
      for (const int by : steps_of_turn[turn]) {
        std::vector<Case> cases;
        each<two_dims.size()>([&](auto i) {
          add_shift<turn_of_all<i + turn>, i, "d">(cases, parse_mesh(mesh), by);
          add_shift<turn_of_all<i + turn + 2>, i, "t">(cases, parse_mesh(mesh), by);
        });
        // The axis is on one of the two dims; the other on one of them, replicated or partial, or on the same dim in
        // the other order.
        CHECK(cases.size() == 2 * (2 * 4 + 2));
        // Under mpirun with too few ranks the mesh is left out, and only there.
        check_cases_as_sized(cases, {mesh});
      }
    });
}

}  // namespace
