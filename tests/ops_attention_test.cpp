// causal_attention: value and cotangents against whole arrays, against the same in einsums over lengths on both sides
// of the kernel's blocks, and its memory.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "op_case.hpp"
#include "shardlib/comm/dry.hpp"
#include "shardlib/shardlib.hpp"
#include "zigzag.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

/// The dims of attention's arrays, whose names are those of the queries. Dims that keys lack are query heads that share
/// them.
struct AttentionDims {
  AttentionDims(const std::vector<Global>& x, const Global& result, const std::string& width, const std::string& length)
      : y(result), to(strides_along(y, y.names)), l(at(length)), w(at(width)), size(y.shape[w]), queries(y.shape) {
    for (const auto& operand : x) strides.push_back(strides_along(operand, y.names));
    queries[w] = 1;
  }
  [[nodiscard]] std::size_t at(const std::string& name) const {
    return static_cast<std::size_t>(std::find(y.names.begin(), y.names.end(), name) - y.names.begin());
  }
  /// The place of element c of a row in operand k, or in the result.
  [[nodiscard]] std::size_t in(std::size_t k, Shape row, std::int64_t c) const {
    row[w] = c;
    return offset(strides[k], row);
  }
  [[nodiscard]] std::size_t out(Shape row, std::int64_t c) const {
    row[w] = c;
    return offset(to, row);
  }

  const Global& y;
  Shape to;
  std::size_t l, w;
  std::int64_t size;
  Shape queries;  ///< one row for each query
  std::vector<Shape> strides{};
};

/// softmax over the keys j <= i along the length of scale q_i k_j, within a segment where there are four operands,
/// times v_j: calls f with each query and the weights of its keys.
template <class F>
void for_each_query(const std::vector<Global>& x, const AttentionDims& dims, double factor, const F& f) {
  for_each_index(dims.queries, [&](const Shape& query) {
    std::vector<double> p;
    double total = 0;
    Shape key = query;
    for (key[dims.l] = 0; key[dims.l] <= query[dims.l]; ++key[dims.l]) {
      double dot = 0;
      for (std::int64_t c = 0; c < dims.size; ++c)
        dot += x[0].data[dims.in(0, query, c)] * x[1].data[dims.in(1, key, c)];
      const bool seen = x.size() < 4 || x[3].data[dims.in(3, query, 0)] == x[3].data[dims.in(3, key, 0)];
      p.push_back(seen ? std::exp(factor * dot) : 0);
      total += p.back();
    }
    for (double& weight : p) weight /= total;
    f(query, p);
  });
}

/// Its cotangents, from those of the weights: dp_j = ct_i v_j, and ds_j = p_j (dp_j - sum_k p_k dp_k) of the scores.
Reference attention(const std::string& width, double scale = 0, const std::string& length = "L") {
  const auto factor = [scale](const AttentionDims& dims) {
    return scale != 0 ? scale : 1 / std::sqrt(static_cast<double>(dims.size));
  };
  return {[=](const std::vector<Global>& x, Global& y) {
            const AttentionDims dims(x, y, width, length);
            std::fill(y.data.begin(), y.data.end(), 0.0);
            for_each_query(x, dims, factor(dims), [&](const Shape& query, const std::vector<double>& p) {
              Shape key = query;
              for (std::size_t j = 0; j < p.size(); ++j) {
                key[dims.l] = static_cast<std::int64_t>(j);
                for (std::int64_t c = 0; c < dims.size; ++c)
                  y.data[dims.out(query, c)] += p[j] * x[2].data[dims.in(2, key, c)];
              }
            });
          },
          [=](const std::vector<Global>& x, const Global& ct, std::vector<Global>& dx) {
            const AttentionDims dims(x, ct, width, length);
            for_each_query(x, dims, factor(dims), [&](const Shape& query, const std::vector<double>& p) {
              std::vector<double> dp(p.size());
              double mean = 0;
              Shape key = query;
              for (std::size_t j = 0; j < p.size(); ++j) {
                key[dims.l] = static_cast<std::int64_t>(j);
                for (std::int64_t c = 0; c < dims.size; ++c) {
                  const double cotangent = ct.data[dims.out(query, c)];
                  dp[j] += cotangent * x[2].data[dims.in(2, key, c)];
                  dx[2].data[dims.in(2, key, c)] += p[j] * cotangent;
                }
                mean += p[j] * dp[j];
              }
              for (std::size_t j = 0; j < p.size(); ++j) {
                key[dims.l] = static_cast<std::int64_t>(j);
                const double ds = factor(dims) * p[j] * (dp[j] - mean);
                for (std::int64_t c = 0; c < dims.size; ++c) {
                  const std::size_t q = dims.in(0, query, c), k = dims.in(1, key, c);
                  dx[0].data[q] += ds * x[1].data[k];
                  dx[1].data[k] += ds * x[0].data[q];
                }
              }
            });
          }};
}

#define ATTENTION(dtype, queries, keys, width, tolerance_)                                               \
  make_case<Tensor<dtype, queries>, Tensor<dtype, keys>, Tensor<dtype, keys>>(                           \
      "causal_attention " #dtype " " queries ", " keys,                                                  \
      [](const auto& q, const auto& k, const auto& v) { return causal_attention<"L", width>(q, k, v); }, \
      attention(width), {.law = Law::none, .tolerance = tolerance_})
#define IN_SEGMENTS(dtype, queries, keys, ids, width, kind)                                      \
  make_case<Tensor<dtype, queries>, Tensor<dtype, keys>, Tensor<dtype, keys>, Tensor<i32, ids>>( \
      "causal_attention " #dtype " " queries ", " keys " in segments " ids,                      \
      [](const auto& q, const auto& k, const auto& v, const auto& s) {                           \
        return causal_attention<"L", width>(q, k, v, s);                                         \
      },                                                                                         \
      attention(width), {.law = Law::none, .tolerance = 4e-6, .draws = {Draw::odd, Draw::odd, Draw::odd, kind}})

#define OVER(dtype, queries, keys, length, axes, tolerance_)                                                          \
  make_case<Tensor<dtype, queries>, Tensor<dtype, keys>, Tensor<dtype, keys>>(                                        \
      "causal_attention over " axes " " #dtype " " queries ", " keys,                                                 \
      [](const auto& q, const auto& k, const auto& v) { return causal_attention<length, "K", over<axes>>(q, k, v); }, \
      attention("K", 0, length), {.law = Law::none, .tolerance = tolerance_})
#define OVER_IN_SEGMENTS(dtype, queries, keys, ids, length, axes, kind)                          \
  make_case<Tensor<dtype, queries>, Tensor<dtype, keys>, Tensor<dtype, keys>, Tensor<i32, ids>>( \
      "causal_attention over " axes " " #dtype " " queries ", " keys " in segments " ids,        \
      [](const auto& q, const auto& k, const auto& v, const auto& s) {                           \
        return causal_attention<length, "K", over<axes>>(q, k, v, s);                            \
      },                                                                                         \
      attention("K", 0, length),                                                                 \
      {.law = Law::none, .tolerance = 4e-6, .draws = {Draw::odd, Draw::odd, Draw::odd, kind}})

/// Those of op_meshes that ZIGZAG's Mesh<"d t"> is for.
std::vector<std::string> zigzag_meshes() {
  std::vector<std::string> meshes = op_meshes();
  std::erase_if(meshes, [](const std::string& mesh) { return mesh.find("p=") != std::string::npos; });
  return meshes;
}
// Operands in the order of positions go to zigzag order, through the op, and back.
#define ZIGZAG_OVER(dtype, before, axes, over_axes, q_after, k_after, tolerance_)                          \
  make_case<Tensor<dtype, before "A" axes q_after>, Tensor<dtype, before "A" axes k_after>,                \
            Tensor<dtype, before "A" axes k_after>>(                                                       \
      "causal_attention in zigzag order " #dtype " " before "A" axes q_after ", " before "A" axes k_after, \
      [](const auto& q, const auto& k, const auto& v) {                                                    \
        const auto y = causal_attention<"A", "K", over<over_axes>>(                                        \
            ZIGZAG(q, "d t", before, "A", axes, over_axes, q_after),                                       \
            ZIGZAG(k, "d t", before, "A", axes, over_axes, k_after),                                       \
            ZIGZAG(v, "d t", before, "A", axes, over_axes, k_after), {}, SequenceOrder::zigzag);           \
        return UNZIGZAG(y, "d t", before, "A", axes, over_axes, q_after);                                  \
      },                                                                                                   \
      attention("K", 0, "A"), {.law = Law::none, .tolerance = tolerance_, .padding = false})
#define ZIGZAG_IN_SEGMENTS(dtype, before, axes, over_axes, q_after, k_after, s_before, s_after, kind)               \
  make_case<Tensor<dtype, before "A" axes q_after>, Tensor<dtype, before "A" axes k_after>,                         \
            Tensor<dtype, before "A" axes k_after>, Tensor<i32, s_before "A" axes s_after>>(                        \
      "causal_attention in zigzag order " #dtype " " before "A" axes q_after " in segments " s_before "A" axes,     \
      [](const auto& q, const auto& k, const auto& v, const auto& s) {                                              \
        const auto numbers = cast<f32>(s);                                                                          \
        const auto y = causal_attention<"A", "K", over<over_axes>>(                                                 \
            ZIGZAG(q, "d t", before, "A", axes, over_axes, q_after),                                                \
            ZIGZAG(k, "d t", before, "A", axes, over_axes, k_after),                                                \
            ZIGZAG(v, "d t", before, "A", axes, over_axes, k_after),                                                \
            cast<i32>(ZIGZAG(numbers, "d t", s_before, "A", axes, over_axes, s_after)), {}, SequenceOrder::zigzag); \
        return UNZIGZAG(y, "d t", before, "A", axes, over_axes, q_after);                                           \
      },                                                                                                            \
      attention("K", 0, "A"),                                                                                       \
      {.law = Law::none, .tolerance = 4e-6, .draws = {Draw::odd, Draw::odd, Draw::odd, kind}, .padding = false})

TEST_CASE("the reference's cotangents of causal_attention and of products are those of differences", "[ops]") {
  const auto agree = [](const Case& plain) {
    Case by_sums = plain, by_differences = plain;
    const Reference value = plain.reference;
    by_differences.reference = Reference([value](const std::vector<Global>& x, Global& y) { value(x, y); });
    by_sums.prepare();
    by_differences.prepare();
    for (std::size_t i = 0; i < plain.in.size(); ++i)
      if (plain.differentiable(i))
        for (std::size_t k = 0; k < by_sums.gradients[i].data.size(); ++k)
          REQUIRE(std::abs(by_sums.gradients[i].data[k] - by_differences.gradients[i].data[k]) < 1e-6);
  };
  agree(ATTENTION(f32, "L two H K", "L H K", "K", 0));
  agree(IN_SEGMENTS(f32, "L K", "L K", "L", "K", Draw::truth));
  agree(make_case<Tensor<f32, "B L M">, Tensor<f32, "M L">>(
      "products", [](const auto& x, const auto& y) { return einsum_unreduced<"B L M, M L -> L B">(x, y); },
      products()));
}

TEST_CASE("causal_attention", "[ops]") {
  check_cases({
      ATTENTION(f32, "B/d L K", "B/d L K", "K", 4e-6),
      ATTENTION(f64, "L H/t K", "L H/t K", "K", 1e-7),
      ATTENTION(bf16, "L H/t K", "L H/t K", "K", 0.03),
      // any order of the dims
      ATTENTION(f32, "K B/d L", "K B/d L", "K", 4e-6),
      ATTENTION(f64, "L K C/t", "C/t K L", "K", 1e-7),
      // query heads that share a head of keys; shared over devices the keys' cotangents are partial
      ATTENTION(f32, "L two H/t K", "L H/t K", "K", 4e-6),
      ATTENTION(f32, "L C/t K", "L K", "K", 4e-6),
      ATTENTION(f64, "C/d L two K", "L K", "K", 1e-7),
      // a width that is padded
      ATTENTION(f32, "C/t L M", "C/t L M", "M", 4e-6),
  });
}

TEST_CASE("causal_attention in segments", "[ops]") {
  check_cases({
      IN_SEGMENTS(f32, "B/d L K", "B/d L K", "B/d L", "K", Draw::truth),
      IN_SEGMENTS(f32, "L H/t K", "L H/t K", "L", "K", Draw::truth),
      IN_SEGMENTS(f64, "C/t L two K", "C/t L K", "L", "K", Draw::truth),
      IN_SEGMENTS(f32, "L two H/t K", "L H/t K", "H/t L", "K", Draw::index),
      IN_SEGMENTS(f64, "L C/t K", "L K", "L C/t", "K", Draw::truth),
  });
}

TEST_CASE("causal_attention along a sharded length", "[ops]") {
  check_cases({
      OVER(f32, "B/d L/t K", "B/d L/t K", "L", "t", 4e-6),
      OVER(f64, "L/t H/d K", "L/t H/d K", "L", "t", 1e-7),
      OVER(bf16, "L/d H/t K", "L/d H/t K", "L", "d", 0.03),
      // any order of the dims, two axes in both orders
      OVER(f32, "K two L/d", "K two L/d", "L", "d", 4e-6),
      OVER(f64, "K B/t/d", "B/t/d K", "B", "t d", 1e-7),
      OVER(f32, "B/d/t two K", "B/d/t two K", "B", "d t", 4e-6),
      // query heads that share a head of keys; shared over devices the keys' cotangents are partial
      OVER(f32, "L/d two H/t K", "L/d H/t K", "L", "d", 4e-6),
      OVER(bf16, "L/t two K", "L/t K", "L", "t", 0.03),
      OVER(f64, "C/d L/t two K", "L/t K", "L", "t", 1e-7),
  });
}

TEST_CASE("causal_attention along a sharded length in segments", "[ops]") {
  check_cases({
      OVER_IN_SEGMENTS(f32, "B/d L/t K", "B/d L/t K", "B/d L/t", "L", "t", Draw::truth),
      OVER_IN_SEGMENTS(f64, "C/d L/t two K", "C/d L/t K", "L/t", "L", "t", Draw::truth),
      OVER_IN_SEGMENTS(f32, "B/d/t two K", "B/d/t K", "two B/d/t", "B", "d t", Draw::index),
      OVER_IN_SEGMENTS(f32, "L/t C/d K", "L/t K", "L/t C/d", "L", "t", Draw::truth),
  });
}

TEST_CASE("ulysses_attention", "[ops]") {
#define ULYSSES(dtype, exchange, queries, keys, tolerance_)                                                  \
  make_case<Tensor<dtype, queries>, Tensor<dtype, keys>, Tensor<dtype, keys>>(                               \
      "ulysses_attention " exchange " " #dtype " " queries ", " keys,                                        \
      [](const auto& q, const auto& k, const auto& v) { return ulysses_attention<exchange, "K">(q, k, v); }, \
      attention("K"), {.law = Law::none, .tolerance = tolerance_})
  check_cases({
      ULYSSES(f32, "L/t H -> L H/t", "L/t H C/d K", "L/t H C/d K", 4e-6),
      ULYSSES(f64, "L/t B/d -> L B/d/t", "L/t two B/d K", "B/d L/t K", 1e-7),
      make_case<Tensor<f32, "L/t C/d H K">, Tensor<f32, "L/t H K">, Tensor<f32, "L/t H K">, Tensor<i32, "C/d L/t">>(
          "ulysses_attention in segments",
          [](const auto& q, const auto& k, const auto& v, const auto& s) {
            return ulysses_attention<"L/t H -> L H/t", "K">(q, k, v, s);
          },
          attention("K"),
          {.law = Law::none, .tolerance = 4e-6, .draws = {Draw::odd, Draw::odd, Draw::odd, Draw::truth}}),
  });
#undef ULYSSES
}

TEST_CASE("causal_attention in zigzag order", "[ops]") {
  check_cases(
      {
          ZIGZAG_OVER(f32, "B/d ", "/t", "t", " K", " K", 4e-6),
          ZIGZAG_OVER(bf16, "", "/d", "d", " K", " K", 0.03),
          // any order of the dims, two axes in both orders
          ZIGZAG_OVER(f32, "K two ", "/d", "d", "", "", 4e-6),
          ZIGZAG_OVER(f64, "K ", "/t/d", "t d", "", "", 1e-7),
          ZIGZAG_OVER(f32, "", "/d/t", "d t", " K", " K", 4e-6),
          // query heads that share a head of keys; shared over devices the keys' cotangents are partial
          ZIGZAG_OVER(f64, "", "/t", "t", " two K", " K", 1e-7),
          ZIGZAG_OVER(f32, "", "/t", "t", " C/d K", " K", 4e-6),
      },
      zigzag_meshes());
}

TEST_CASE("causal_attention in zigzag order and in segments", "[ops]") {
  check_cases(
      {
          ZIGZAG_IN_SEGMENTS(f32, "", "/t", "t", " H/d K", " H/d K", "", "", Draw::truth),
          ZIGZAG_IN_SEGMENTS(f32, "", "/d/t", "d t", " two K", " K", "two ", "", Draw::index),
          ZIGZAG_IN_SEGMENTS(f64, "", "/t", "t", " C/d K", " K", "", " C/d", Draw::truth),
      },
      zigzag_meshes());
}

TEST_CASE("causal_attention is linear in the values, at a given scale", "[ops]") {
  // Integers have no cotangents, so queries and keys are such.
  check_cases({make_case<Tensor<i32, "L H/t K">, Tensor<i32, "L H/t K">, Tensor<f64, "L H/t K">>(
      "causal_attention of values",
      [](const auto& q, const auto& k, const auto& v) {
        return causal_attention<"L", "K">(cast<f64>(q), cast<f64>(k), v, 0.02);
      },
      attention("K", 0.02),
      {.law = Law::each, .tolerance = 1e-12, .draws = {Draw::integers, Draw::integers, Draw::odd}})});
  check_cases({make_case<Tensor<i32, "L/d H/t K">, Tensor<i32, "L/d H/t K">, Tensor<f64, "L/d H/t K">>(
      "causal_attention over d of values",
      [](const auto& q, const auto& k, const auto& v) {
        return causal_attention<"L", "K", over<"d">>(cast<f64>(q), cast<f64>(k), v, 0.02);
      },
      attention("K", 0.02),
      {.law = Law::each, .tolerance = 1e-12, .draws = {Draw::integers, Draw::integers, Draw::odd}})});
  check_cases({make_case<Tensor<i32, "A/d H/t K">, Tensor<i32, "A/d H/t K">, Tensor<f64, "A/d H/t K">>(
                  "causal_attention in zigzag order of values",
                  [](const auto& q, const auto& k, const auto& v) {
                    const auto of_q = cast<f64>(q), of_k = cast<f64>(k);
                    const auto y = causal_attention<"A", "K", over<"d">>(
                        ZIGZAG(of_q, "d t", "", "A", "/d", "d", " H/t K"),
                        ZIGZAG(of_k, "d t", "", "A", "/d", "d", " H/t K"),
                        ZIGZAG(v, "d t", "", "A", "/d", "d", " H/t K"), 0.02, SequenceOrder::zigzag);
                    return UNZIGZAG(y, "d t", "", "A", "/d", "d", " H/t K");
                  },
                  attention("K", 0.02, "A"),
                  {.law = Law::each,
                   .tolerance = 1e-12,
                   .draws = {Draw::integers, Draw::integers, Draw::odd},
                   .padding = false})},
              zigzag_meshes());
}

using Mesh2 = Mesh<"d t">;
template <dtype D>
struct Operands {
  Tensor<D, "B/d L Q K/t D"> q;
  Tensor<D, "B/d L K/t D"> k, v;
};

/// The attention in einsums, as the examples spell it.
template <dtype D>
auto in_einsums(const Operands<D>& x, const Tensor<bool_, "B/d Qlen Klen">& mask) -> Tensor<D, "B/d L Q K/t D"> {
  const auto logits = einsum_unreduced<"B/d Qlen Q K/t D, B/d Klen K/t D -> B/d Q K/t Qlen Klen">(
      rename<"L -> Qlen">(x.q), rename<"L -> Klen">(x.k));
  const double scale = 1 / std::sqrt(static_cast<double>(x.q.size("D")));
  const auto probabilities = softmax<"Klen">(where(mask, logits * scale, -1e30));
  return einsum_unreduced<"B/d Q K/t L Klen, B/d Klen K/t D -> B/d L Q K/t D">(rename<"Qlen -> L">(probabilities),
                                                                               rename<"L -> Klen">(x.v));
}

/// Loss and gradients of sum(weights * attention), of either form; with segments or as one.
template <dtype D>
void check_against_einsums(const Mesh2& mesh, std::int64_t length, std::int64_t width, bool segmented, bool recompute,
                           double tolerance) {
  const Sizes sizes{{"B", 2}, {"L", length}, {"Q", 2}, {"K", 2}, {"D", width}};
  const Operands<D> x{random_normal<D, "B/d L Q K/t D">(mesh, sizes, {1, 1}),
                      random_normal<D, "B/d L K/t D">(mesh, sizes, {1, 2}),
                      random_normal<D, "B/d L K/t D">(mesh, sizes, {1, 3})};
  const auto weights = random_normal<D, "B/d L Q K/t D">(mesh, sizes, {1, 4});
  // Documents of about 40 tokens, in order, as a loader packs them.
  const auto segments =
      cast<i32>(cast<f32>(iota<"L">(mesh, length)) / (segmented ? 40.0 : 1e9)) + zeros<i32, "B/d L">(mesh, sizes);
  const auto same = equal(rename<"L -> Qlen">(segments), rename<"L -> Klen">(segments));
  const auto mask = logical_and(same, causal_mask<"Qlen Klen">(mesh, length, length));
  const auto of = [&](auto attend, const auto& seen) {
    const auto f = [&](const Operands<D>& operands) -> Tensor<D, "+d +t"> {
      const auto again = explicit_activation_checkpointing(attend);
      return sum((recompute ? again(operands, seen) : attend(operands, seen)) * weights);
    };
    return value_and_grad(mesh, f, x);
  };
  const auto fused = [segmented](const Operands<D>& o, const Tensor<i32, "B/d L">& s) {
    return segmented ? causal_attention<"L", "D">(o.q, o.k, o.v, s) : causal_attention<"L", "D">(o.q, o.k, o.v);
  };
  const auto [loss, grads] = of(fused, segments);
  const auto [expected_loss, expected] = of(in_einsums<D>, mask);
  const auto close = [&](const auto& found, const auto& right, const char* what) {
    const double apart = off(found, right, 1);  // of one position, queries and keys have no gradient
    expect(apart <= tolerance,
           std::string(what) + " of length " + show(length) + ", width " + show(width) + " is off by " + show(apart));
  };
  // A sum of many numbers of both signs: within the tolerance of their root mean square.
  const auto y = static_cast<double>(loss.span()[0]), z = static_cast<double>(expected_loss.span()[0]);
  expect(std::abs(y - z) <= tolerance * std::sqrt(static_cast<double>(weights.span().size())), "loss");
  close(grads.q, expected.q, "the queries' gradient");
  close(grads.k, expected.k, "the keys' gradient");
  close(grads.v, expected.v, "the values' gradient");
}

TEST_CASE("causal_attention is what the einsums give, over lengths around its blocks", "[ops]") {
  on_meshes({"d=1,t=1", "d=2,t=2"},
            [](const Mesh2& mesh) {
              for (const std::int64_t length : {1, 31, 33, 64, 65, 129})
                check_against_einsums<f32>(mesh, length, length == 64 ? 8 : 5, length % 2 == 1, length == 65, 1e-5);
              if (mesh.size() == 1) return;  // the long ones once, shared out
              for (const std::int64_t length : {512, 513})
                check_against_einsums<f32>(mesh, length, 4, length % 2 == 1, false, 1e-5);
              check_against_einsums<f64>(mesh, 530, 3, true, true, 1e-12);
            },
            {.threads = 1, .kind = device_kind()});
}

TEST_CASE("causal_attention: scores far apart, and numbers that are none", "[ops]") {
  on_mesh("d=1,t=1", [](const Mesh2& mesh) {
    // Query 600 has a score of 1e4 with key 0 alone, which lies in another block than its own.
    const std::int64_t n = 700;
    std::vector<f32> q(n, 0), k(n, 0), v(n, 1);
    q[600] = 100;
    k[0] = 100;
    v[0] = 5;
    const Sizes sizes{{"L", n}, {"D", 1}};
    const auto tensor = [&](const std::vector<f32>& x) { return from_memory<f32, "L D">(mesh, sizes, std::span(x)); };
    const auto y = causal_attention<"L", "D">(tensor(q), tensor(k), tensor(v));
    expect(y.span()[600] == 5, "the greatest score takes all: " + show(y.span()[600]));
    expect(std::abs(y.span()[699] - (5 + 699.0F) / 700) < 1e-6F, "equal scores share: " + show(y.span()[699]));
    k[3] = std::nanf("");
    const auto z = causal_attention<"L", "D">(tensor(q), tensor(k), tensor(v));
    expect(z.span()[2] == y.span()[2], "what does not see a NaN stays");
    expect(std::isnan(z.span()[3]) && std::isnan(z.span()[699]), "a NaN shows in what sees it");
  });
}

TEST_CASE("causal_attention keeps no scores", "[ops]") {
  on_mesh("d=1,t=1",
          [](const DevicePtr& device) {
            const Mesh2 mesh(device);
            const std::int64_t n = 1024;
            const Sizes sizes{{"B", 1}, {"L", n}, {"Q", 1}, {"K", 8}, {"D", 4}};
            const Operands<f32> x{zeros<f32, "B/d L Q K/t D">(mesh, sizes), zeros<f32, "B/d L K/t D">(mesh, sizes),
                                  zeros<f32, "B/d L K/t D">(mesh, sizes)};
            const auto before = device->pool()->stats();
            const auto loss = [](const Operands<f32>& o) { return sum(causal_attention<"L", "D">(o.q, o.k, o.v)); };
            static_cast<void>(value_and_grad(mesh, loss, x));
            const auto after = device->pool()->stats();
            const std::size_t operand = static_cast<std::size_t>(n) * 8 * 4 * sizeof(f32);
            expect(detail::program_state(device).residual_bytes <
                       operand + static_cast<std::size_t>(n) * 8 * sizeof(f32) + 4096,
                   "the result and one number for each query are kept");
            // Multiply-adds count as two, and only those of keys that a query sees.
            const auto& counts = detail::program_state(device).counts;
            const double pairs = 8.0 * static_cast<double>(n * (n + 1) / 2);
            expect(counts.at("causal_attention").flops == 2 * 2 * 4 * pairs, "two products forward");
            expect(counts.at("causal_attention_backward").flops == 5 * 2 * 4 * pairs, "five backward");
            // A dry run takes the same memory from its pool.
            const auto dry = DevicePtr::make(parse_mesh("d=1,t=1"), 0, std::make_shared<DryWorld>(Peers::threads));
            const Mesh2 nowhere(dry);
            const Operands<f32> nothing{zeros<f32, "B/d L Q K/t D">(nowhere, sizes),
                                        zeros<f32, "B/d L K/t D">(nowhere, sizes),
                                        zeros<f32, "B/d L K/t D">(nowhere, sizes)};
            const auto live = dry->pool()->stats().live;
            static_cast<void>(value_and_grad(nowhere, loss, nothing));
            expect(dry->pool()->stats().peak - live == after.peak - before.live, "a dry run's peak");
            // Result, three gradients, the cotangent twice; blocks of 64 x 512 scores, and one head's rows.
            expect(after.peak - before.live < 7 * operand + (2U << 18),
                   "scratch is a few blocks: " + show(after.peak - before.live));
          },
          {.threads = 1});
}

// ---- a sharded length, compared with the gathered one --------------------------------------------------------------

using Ring = Mesh<"d s">;
template <dtype D>
struct Sharded {
  Tensor<D, "B/d L/s Q K D"> q;
  Tensor<D, "B/d L/s K D"> k, v;
};
template <dtype D>
Sharded<D> sharded_operands(const Ring& mesh, const Sizes& sizes) {
  return {random_normal<D, "B/d L/s Q K D">(mesh, sizes, {2, 1}), random_normal<D, "B/d L/s K D">(mesh, sizes, {2, 2}),
          random_normal<D, "B/d L/s K D">(mesh, sizes, {2, 3})};
}
/// Documents of about 40 positions each, or one.
auto documents(const Ring& mesh, const Sizes& sizes, DimSize length, bool segmented) -> Tensor<i32, "B/d L/s"> {
  return cast<i32>(cast<f32>(iota<"L/s">(mesh, length)) / (segmented ? 40.0 : 1e9)) +
         zeros<i32, "B/d L/s">(mesh, sizes);
}
template <dtype D>
auto attend_over(const Sharded<D>& x, const Tensor<i32, "B/d L/s">& segments, bool segmented)
    -> Tensor<D, "B/d L/s Q K D"> {
  return segmented ? causal_attention<"L", "D", over<"s">>(x.q, x.k, x.v, segments)
                   : causal_attention<"L", "D", over<"s">>(x.q, x.k, x.v);
}
template <dtype D>
auto attend_gathered(const Sharded<D>& x, const Tensor<i32, "B/d L/s">& segments, bool segmented)
    -> Tensor<D, "B/d L/s Q K D"> {
  using A = accumulator_t<D>;
  const auto q = all_gather<over<"s">>(cast<A>(x.q));
  const auto k = all_gather<over<"s">>(cast<A>(x.k)), v = all_gather<over<"s">>(cast<A>(x.v));
  return cast<D>(shard<"B/d L Q K D -> B/d L/s Q K D">(
      segmented ? causal_attention<"L", "D">(q, k, v, all_gather<over<"s">>(segments))
                : causal_attention<"L", "D">(q, k, v)));
}

/// attend_over in zigzag order, of operands and with a result in the order of positions.
template <dtype D>
auto attend_zigzag(const Sharded<D>& x, const Tensor<i32, "B/d L/s">& segments, bool segmented)
    -> Tensor<D, "B/d L/s Q K D"> {
  const auto q = ZIGZAG(x.q, "d s", "B/d ", "L", "/s", "s", " Q K D");
  const auto k = ZIGZAG(x.k, "d s", "B/d ", "L", "/s", "s", " K D");
  const auto v = ZIGZAG(x.v, "d s", "B/d ", "L", "/s", "s", " K D");
  const auto ordered = [](const auto& numbers) { return ZIGZAG(numbers, "d s", "B/d ", "L", "/s", "s", ""); };
  const auto ids = cast<i32>(ordered(cast<f32>(segments)));
  const auto y = segmented ? causal_attention<"L", "D", over<"s">>(q, k, v, ids, {}, SequenceOrder::zigzag)
                           : causal_attention<"L", "D", over<"s">>(q, k, v, {}, SequenceOrder::zigzag);
  return UNZIGZAG(y, "d s", "B/d ", "L", "/s", "s", " Q K D");
}

/// Values and gradients, with and without recompute.
template <dtype D, class Attend>
void check_against_gathered(const Ring& mesh, const Attend& attend_in_order, DimSize length, bool segmented,
                            bool recompute, double tolerance) {
  const Sizes sizes{{"B", 2}, {"L", length.size, length.padded}, {"Q", 2}, {"K", 2}, {"D", 5}};
  const auto x = sharded_operands<D>(mesh, sizes);
  const auto weights = random_normal<D, "B/d L/s Q K D">(mesh, sizes, {2, 4});
  const auto segments = documents(mesh, sizes, length, segmented);
  const auto of = [&](auto attend, bool again) {
    const auto f = [&](const Sharded<D>& operands) -> Tensor<f32, "+d +s"> {
      const auto y = again ? explicit_activation_checkpointing(attend)(operands, segments, segmented)
                           : attend(operands, segments, segmented);
      return sum(cast<f32>(y * weights));
    };
    return std::get<1>(value_and_grad(mesh, f, x));
  };
  const auto grads = of(attend_in_order, recompute), expected = of(attend_gathered<D>, false);
  const std::string what = " over " + show(mesh.size("s")) + " devices, of length " + show(length.size);
  const auto close = [&](const auto& a, const auto& b, const char* name) {
    expect(off(a, b, 1) <= tolerance, name + what + " is off by " + show(off(a, b, 1)));
  };
  close(attend_in_order(x, segments, segmented), attend_gathered<D>(x, segments, segmented), "the result");
  close(grads.q, expected.q, "the queries' gradient");
  close(grads.k, expected.k, "the keys' gradient");
  close(grads.v, expected.v, "the values' gradient");
}

TEST_CASE("causal_attention along a sharded length is that along the gathered one", "[ops]") {
  on_meshes({"d=1,s=1", "d=1,s=2", "d=2,s=2", "d=1,s=3", "d=1,s=4", "d=2,s=4"},
            [](const Ring& mesh) {
              for (const bool segmented : {false, true}) {
                check_against_gathered<f32>(mesh, attend_over<f32>, 12, segmented, false, 1e-5);
                check_against_gathered<f32>(mesh, attend_over<f32>, 264, segmented, segmented, 1e-5);
                check_against_gathered<f64>(mesh, attend_over<f64>, 132, segmented, !segmented, 1e-12);
                check_against_gathered<bf16>(mesh, attend_over<bf16>, 132, segmented, false, 0.02);
                check_against_gathered<f32>(mesh, attend_over<f32>, {121, 132}, segmented, false, 1e-5);
              }
              // Shards are longer than a block of keys; of 12 positions, all but the first shard are padding.
              if (mesh.size() == 4) check_against_gathered<f32>(mesh, attend_over<f32>, 2064, true, false, 1e-5);
              check_against_gathered<f32>(mesh, attend_over<f32>, {3, 12}, false, false, 1e-5);
            },
            {.threads = 1});
}

TEST_CASE("causal_attention in zigzag order is that in the order of positions", "[ops]") {
  on_meshes({"d=1,s=1", "d=1,s=2", "d=2,s=2", "d=1,s=3", "d=1,s=4", "d=2,s=4", "d=1,s=8"},
            [](const Ring& mesh) {
              for (const bool segmented : {false, true}) {
                check_against_gathered<f32>(mesh, attend_zigzag<f32>, 48, segmented, false, 1e-5);
                check_against_gathered<f32>(mesh, attend_zigzag<f32>, 288, segmented, segmented, 1e-5);
                check_against_gathered<f64>(mesh, attend_zigzag<f64>, 144, segmented, !segmented, 1e-12);
                check_against_gathered<bf16>(mesh, attend_zigzag<bf16>, 144, segmented, false, 0.02);
              }
              // Half of a shard is longer than a block of keys.
              if (mesh.size() == 2) check_against_gathered<f32>(mesh, attend_zigzag<f32>, 2064, true, false, 1e-5);
            },
            {.threads = 1});
}

TEST_CASE("causal_attention over an axis of one device has the bits of that without", "[ops]") {
  on_mesh("d=1,s=1", [](const Ring& mesh) {
    const auto check = [&]<dtype D>(D /*type*/, bool segmented) {
      const Sizes sizes{{"B", 2}, {"L", 90}, {"Q", 2}, {"K", 2}, {"D", 6}};
      const auto x = sharded_operands<D>(mesh, sizes);
      const auto segments = documents(mesh, sizes, 90, segmented);
      const auto whole = [&](const Sharded<D>& o) {
        const auto q = all_gather<over<"s">>(o.q);
        const auto k = all_gather<over<"s">>(o.k), v = all_gather<over<"s">>(o.v);
        return shard<"B/d L Q K D -> B/d L/s Q K D">(
            segmented ? causal_attention<"L", "D">(q, k, v, all_gather<over<"s">>(segments))
                      : causal_attention<"L", "D">(q, k, v));
      };
      const auto zigzag = [&](const Sharded<D>& o) {  // the order of one device's positions is the same
        return segmented ? causal_attention<"L", "D", over<"s">>(o.q, o.k, o.v, segments, {}, SequenceOrder::zigzag)
                         : causal_attention<"L", "D", over<"s">>(o.q, o.k, o.v, {}, SequenceOrder::zigzag);
      };
      const auto y = attend_over(x, segments, segmented), z = whole(x), in_zigzag = zigzag(x);
      const auto of = [&](const auto& attend) {
        const auto f = [&](const Sharded<D>& o) { return sum(cast<f32>(attend(o))); };
        return std::get<1>(value_and_grad(mesh, f, x));
      };
      const auto a = of([&](const Sharded<D>&o) { return attend_over(o, segments, segmented); }), b = of(whole),
                 c = of(zigzag);
      const auto same = [](const auto& p, const auto& r) {
        return std::memcmp(p.span().data(), r.span().data(), p.span().size_bytes()) == 0;
      };
      expect(same(y, z) && same(a.q, b.q) && same(a.k, b.k) && same(a.v, b.v), "other bits");
      expect(same(in_zigzag, z) && same(c.q, b.q) && same(c.k, b.k) && same(c.v, b.v), "other bits in zigzag order");
    };
    for (const bool segmented : {false, true}) {
      check(f32(), segmented);
      check(f64(), segmented);
      check(bf16(), segmented);
    }
  });
}

TEST_CASE("causal_attention along a sharded length: a NaN shows in what sees it", "[ops]") {
  on_mesh("d=1,s=2", [](const Ring& mesh) {
    const Sizes sizes{{"B", 1}, {"L", 8}, {"Q", 1}, {"K", 1}, {"D", 1}};
    const auto x = sharded_operands<f32>(mesh, sizes);
    // Position 5 of the second shard, and position 2 of the first.
    for (const int at : {5, 2}) {
      const int first = 4 * mesh.device()->axis_index("s");
      // The tensor owns the memory, which the other device may read after this one has its result.
      const auto keys = std::make_shared<std::vector<f32>>(x.k.span().begin(), x.k.span().end());
      if (first <= at && at < first + 4) keys->at(static_cast<std::size_t>(at - first)) = std::nanf("");
      const auto k = from_memory<f32, "B/d L/s K D">(mesh, sizes, std::span<const f32>(*keys), keys);
      const auto y = causal_attention<"L", "D", over<"s">>(x.q, k, x.v);
      for (int i = 0; i < 4; ++i)
        expect(std::isnan(y.span()[static_cast<std::size_t>(i)]) == (first + i >= at), "position " + show(first + i));
    }
  });
}

TEST_CASE("causal_attention along a sharded length: a width of 0 has sums of its scores, too", "[ops]") {
  on_mesh("d=1,s=2", [](const Ring& mesh) {
    const Sizes sizes{{"B", 1}, {"L", 64}, {"Q", 2}, {"K", 2}, {"D", 0}, {"N", 16}};
    const auto x = sharded_operands<f32>(mesh, sizes);
    // Blocks as short as an empty one, and between them room for others.
    std::vector<Tensor<f32, "N">> others;
    for (int i = 0; i < 128; ++i) others.push_back(ones<f32, "N">(mesh, sizes));
    for (std::size_t i = 64; i < others.size(); ++i) others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
    const auto y = causal_attention<"L", "D", over<"s">>(x.q, x.k, x.v);
    expect(y.span().empty(), "no elements");
    for (const auto& other : others)
      for (const f32 element : other.span()) expect(element == 1, "the memory of others");
  });
}

TEST_CASE("causal_attention along a sharded length: traffic, arithmetic and memory", "[ops]") {
  constexpr std::int64_t local = 64, heads = 2, width = 4;
  const auto sizes_for = [](std::int64_t devices) {
    return Sizes{{"B", 1}, {"L", local * devices}, {"Q", 2}, {"K", heads}, {"D", width}};
  };
  const std::int64_t shard = local * heads * width * static_cast<std::int64_t>(sizeof(f32));  // of k, and of v
  const double pairs = 2.0 * heads * static_cast<double>(local) * static_cast<double>(local + 1) / 2;
  const double all_pairs = 2.0 * heads * static_cast<double>(local * local);
  const auto loss = [](const Sharded<f32>& o) { return sum(causal_attention<"L", "D", over<"s">>(o.q, o.k, o.v)); };
  on_mesh("d=1,s=4",
          [&](const DevicePtr& device) {
            const Ring mesh(device);
            const auto x = sharded_operands<f32>(mesh, sizes_for(4));
            std::map<std::string, std::string> axes;
            const detail::Observing observing(device, [&](const detail::OpReport& ran) {
              for (const auto axis : ran.work.axes) axes[ran.op.name] += std::string(axis);
            });
            static_cast<void>(value_and_grad(mesh, loss, x));
            const std::int64_t before = device->axis_index("s"), after = 3 - before;
            const auto& counts = detail::program_state(device).counts;
            const auto &forward = counts.at("causal_attention"), &backward = counts.at("causal_attention_backward");
            expect(forward.bytes == after * 2 * shard, "keys and values go to the later devices");
            expect(backward.bytes == (after + before) * 2 * shard, "and their cotangents come back");
            const double seen = 2 * width * (pairs + static_cast<double>(before) * all_pairs);
            expect(forward.flops == 2 * seen && backward.flops == 5 * seen, "blocks of the future are not computed");
            expect(axes["causal_attention"] == (after > 0 ? "s" : "") && axes["causal_attention_backward"] == "s",
                   "reports name the axis");
          },
          {.threads = 1});
  const auto zigzag_loss = [](const Sharded<f32>& o) {
    return sum(causal_attention<"L", "D", over<"s">>(o.q, o.k, o.v, {}, SequenceOrder::zigzag));
  };
  // In zigzag order all devices, and that of a dry run, have the same traffic, arithmetic and memory.
  const auto check_zigzag = [&](const DevicePtr& device, const std::string& who) {
    const Ring mesh(device);
    const auto devices = static_cast<std::int64_t>(mesh.size("s"));
    const Sizes sizes = sizes_for(devices);
    const Sharded<f32> x{zeros<f32, "B/d L/s Q K D">(mesh, sizes), zeros<f32, "B/d L/s K D">(mesh, sizes),
                         zeros<f32, "B/d L/s K D">(mesh, sizes)};
    const std::size_t most = peak(device, [&] { static_cast<void>(value_and_grad(mesh, zigzag_loss, x)); });
    const auto& counts = detail::program_state(device).counts;
    const auto &forward = counts.at("causal_attention"), &backward = counts.at("causal_attention_backward");
    expect(forward.bytes == (devices - 1) * 2 * shard && backward.bytes == (devices - 1) * 4 * shard,
           who + ": keys and values to all others, and their cotangents back");
    const double seen = 2 * width * (pairs + static_cast<double>(devices - 1) / 2 * all_pairs);
    expect(forward.flops == 2 * seen && backward.flops == 5 * seen, who + ": half of the pairs with each other shard");
    return most;
  };
  std::vector<std::size_t> measured(4);
  on_mesh("d=1,s=4",
          [&](const DevicePtr& device) {
            measured.at(static_cast<std::size_t>(device->rank())) = check_zigzag(device, device->describe());
          },
          {.threads = 1});
  const std::size_t planned =
      check_zigzag(DevicePtr::make(parse_mesh("d=1,s=4"), 0, std::make_shared<DryWorld>(Peers::threads)), "planned");
  for (const std::size_t most : measured)
    if (most != 0)  // under mpirun those of other ranks are not here
      expect(most * 100 <= planned * 101 && planned * 100 <= most * 110,
             "planned " + show(planned) + ", a peak of " + show(most));
  // A dry run's device is the mean of all, except for its memory, which does not grow with the devices.
  std::vector<std::size_t> peaks;
  for (const int devices : {4, 8}) {
    const auto dry =
        DevicePtr::make(parse_mesh("d=1,s=" + std::to_string(devices)), 0, std::make_shared<DryWorld>(Peers::threads));
    const Ring mesh(dry);
    const Sizes sizes = sizes_for(devices);
    const Sharded<f32> x{zeros<f32, "B/d L/s Q K D">(mesh, sizes), zeros<f32, "B/d L/s K D">(mesh, sizes),
                         zeros<f32, "B/d L/s K D">(mesh, sizes)};
    peaks.push_back(peak(dry, [&] { static_cast<void>(value_and_grad(mesh, loss, x)); }));
    const auto& counts = detail::program_state(dry).counts;
    const auto &forward = counts.at("causal_attention"), &backward = counts.at("causal_attention_backward");
    const double others = (devices - 1) / 2.0;
    expect(forward.bytes == static_cast<std::int64_t>(others * 2) * shard, "traffic forward");
    expect(backward.bytes == static_cast<std::int64_t>(others * 4) * shard, "traffic backward");
    expect(forward.flops == 2 * 2 * width * (pairs + others * all_pairs), "arithmetic");
  }
  expect(peaks[0] == peaks[1], "the peak is " + show(peaks[0]) + " and " + show(peaks[1]));
}

}  // namespace
