// The collectives whose kernels are inside their typed functions, over every spec of two dims on two axes: here the
// types are enumerated at compile time. Maxima and the like over every subset of dims, softmax and norms along every
// dim, and shift round every axis, both ways, with its cotangent and the adjoint law.
#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "op_case.hpp"
#include "shape_specs.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

constexpr std::array<std::string_view, 18> specs{"A/d/t B",   "A/t/d B", "A/d B/t",  "A/d B +t", "A/d B",    "A/t B/d",
                                                 "A B/d/t",   "A B/t/d", "A B/d +t", "A B/d",    "A/t B +d", "A B/t +d",
                                                 "A B +d +t", "A B +d",  "A/t B",    "A B/t",    "A B +t",   "A B"};

TEST_CASE("the specs of the typed ops are all that there are", "[ops][exhaustive]") {
  auto all = specs_of({"A", "B"});
  std::vector<std::string> here(specs.begin(), specs.end());
  std::sort(all.begin(), all.end());
  std::sort(here.begin(), here.end());
  CHECK(here == all);
}

/// Calls f with 0 to n - 1, each a constant.
template <std::size_t N, class F>
void each(const F& f) {
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    (f(std::integral_constant<std::size_t, I>{}), ...);
  }
  (std::make_index_sequence<N>{});
}

/// "A/t B -> B": without the dims whose bit is not set.
constexpr OpSpec maximum_op(std::size_t from, std::size_t kept) {
  TensorSpec out = parse_tensor(specs[from]).spec;
  for (int i = out.rank(); i-- > 0;)
    if ((kept >> i & 1U) == 0) out.dims.erase(i);
  return detail::op_spec_of(Spec(specs[from]), Spec(to_string(out).view()));
}

TEST_CASE("all_reduce_max over every spec and subset of dims", "[ops][exhaustive]") {
  std::vector<Case> cases;
  each<specs.size()>([&](auto from) {
    each<3>([&](auto kept) {
      static constexpr OpSpec op = maximum_op(from, kept);
      static constexpr Spec spec{specs[from]};
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

TEST_CASE("max, min, prod, logsumexp and argmax over every spec and subset of dims", "[ops][exhaustive]") {
  std::vector<Case> cases;
  each<specs.size()>([&](auto from) {
    each<3>([&](auto kept) {
      static constexpr OpSpec op = maximum_op(from, kept);
      static constexpr Spec spec{specs[from]};
      const std::string text(std::string_view{op});
      if constexpr (rules::local_max("max", op, spec).ok()) {
        const Options options{.law = Law::none, .tolerance = 1e-6};
        cases.push_back(make_case<Tensor<f32, spec>>(
            "max " + text, [](const auto& x) { return max<op>(x); }, extrema(false), options));
        cases.push_back(make_case<Tensor<f32, spec>>(
            "min " + text, [](const auto& x) { return min<op>(x); }, extrema(true), options));
        // Of numbers near 1, so that the products stay in range.
        cases.push_back(make_case<Tensor<f64, spec>>(
            "prod " + text, [](const auto& x) { return prod<op>(x * 0.125 + 1.0); }, folded([](const auto& row) {
              double product = 1;
              for (const double v : row) product *= v / 8 + 1;
              return product;
            }),
            options));
        cases.push_back(make_case<Tensor<f32, spec>>(
            "logsumexp " + text, [](const auto& x) { return logsumexp<op>(x); }, folded([](const auto& row) {
              double sum = 0;
              for (const double v : row) sum += std::exp(v);
              return std::log(sum);
            }),
            {.law = Law::none, .tolerance = 4e-6}));
      }
      if constexpr (rules::local_max("argmax", op, spec).ok())
        cases.push_back(make_case<Tensor<f32, spec>>("argmax " + text, [](const auto& x) { return argmax<op>(x); },
                                                     first_maxima(), {.gradient = false}));
    });
  });
  // The dim that stays is sharded or not; both go only where neither is; argmax takes one.
  CHECK(cases.size() == 4 * (5 + 5 + 1) + (5 + 5));
  check_cases(cases);
}

template <std::size_t I, DimName Dim>
void add_along(std::vector<Case>& cases) {
  static constexpr Spec spec{specs[I]};
  const std::string dim(std::string_view{Dim}), text = " along " + dim + " of " + std::string(specs[I]);
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
  each<specs.size()>([&](auto i) {
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
  static constexpr Spec spec{specs[I]};
  static constexpr OpSpec op{specs[I]};
  if constexpr (rules::shift(spec, Axis, spec).ok())
    cases.push_back(make_case<Tensor<D, spec>>(
        "shift " + std::string(specs[I]) + " round " + std::string(std::string_view(Axis)) + " by " + show(by),
        [by](const auto& x) { return shift<op, Axis>(x, by); },
        turned(detail::parsed<spec>, mesh, std::string(std::string_view(Axis)), by)));
}

TEST_CASE("shift over every spec and axis", "[ops][exhaustive]") {
  for (const auto& mesh : op_meshes())
    for (const int by : {1, -2, 0, 7}) {
      std::vector<Case> cases;
      each<specs.size()>([&](auto i) {
        add_shift<f32, i, "d">(cases, parse_mesh(mesh), by);
        add_shift<bf16, i, "t">(cases, parse_mesh(mesh), by);
      });
      // The axis is on one of the two dims; the other on one of them, replicated or partial, or on the same dim in the
      // other order.
      CHECK(cases.size() == 2 * (2 * 4 + 2));
      // Under mpirun with too few ranks the mesh is left out, and only there.
      check_cases_as_sized(cases, {mesh});
    }
}

}  // namespace
