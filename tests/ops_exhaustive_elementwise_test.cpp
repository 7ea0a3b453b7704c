// Elementwise ops over every pair of small specs on two axes, enumerated at run time: which are legal by the rules, and
// for those the value and each cotangent against whole arrays in f64.
//
// The loops are those that the typed ops call: Pointwise for + - * /, Linear for negation and scaling, MapLoops for
// maps (forward, one cotangent, all cotangents in one loop), Where, WhereElseNumber for what is masked, reduce_kernel
// where a cotangent sheds broadcast dims. The VJPs are put together here from the same ops, each step under its own
// rule. That what the rules refuse is wrong, rules_semantics_test.cpp checks over the same specs.
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "exhaustive.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;
using detail::ValuePtr;

namespace {

/// Operands that the rule accepts, with the result that it gives.
struct Legal {
  std::vector<const TensorSpec*> in;
  const TensorSpec* out;
  Axes axes;  ///< of them all

  Legal(std::vector<const TensorSpec*> operands, const rules::Verdict& verdict)
      : in(std::move(operands)), out(&accepted(verdict)) {
    auto all = in;
    all.push_back(out);
    axes = axes_of(all);
  }
};

/// An elementwise op: its value and, operand by operand, its cotangent; on devices and on whole arrays.
struct Elementwise {
  const char* name;
  std::vector<Draw> draws;
  std::vector<DType> dtypes;
  std::function<ValuePtr(const std::vector<ValuePtr>& x, const TensorSpec& out)> run;
  std::function<double(const std::vector<double>& x)> value;
  /// All cotangents, of the result's dims (null: not differentiable).
  std::function<std::vector<ValuePtr>(const std::vector<ValuePtr>& x, const ValuePtr& ct)> vjp;
  std::vector<std::function<double(const std::vector<double>& x)>> derivatives;
  double tolerance = 0;
};

void check(const Elementwise& op, const std::vector<Legal>& legal) {
  /// By the dims of operands and result.
  struct Expected {
    std::vector<Global> x;
    Global y, ct;
    std::vector<Global> gradients;
  };
  using Key = std::vector<Names>;
  std::map<Key, Expected> expected;
  std::vector<const Expected*> of_case;
  const auto prepare = [&] {
    expected.clear();
    of_case.clear();
    for (const Legal& c : legal) {
      Key key{shell(*c.out).names};
      for (const auto* spec : c.in) key.push_back(shell(*spec).names);
      auto [it, fresh] = expected.try_emplace(key);
      Expected& e = it->second;
      if (fresh) {
        for (std::size_t i = 0; i < c.in.size(); ++i) e.x.push_back(random_global(*c.in[i], op.draws[i], i));
        e.y = shell(*c.out);
        elementwise(op.value)(e.x, e.y);
        e.ct = random_global(*c.out, Draw::odd, 77);
        for (std::size_t i = 0; i < c.in.size(); ++i) {
          Global gradient = e.x[i], slope = e.y;
          if (op.derivatives[i]) {
            elementwise(op.derivatives[i])(e.x, slope);
            products()({e.ct, slope}, gradient);
          }
          e.gradients.push_back(std::move(gradient));
        }
      }
      of_case.push_back(&e);
    }
    return legal.size();
  };
  on_spec_meshes(prepare, [&](const DevicePtr& device, std::size_t i) {
    const Legal& c = legal[i];
    const Expected& e = *of_case[i];
    std::string what = op.name;
    for (const auto* spec : c.in) what += " `" + text_of(*spec) + "`";
    named(what, [&] {
      std::vector<ValuePtr> x;
      for (std::size_t k = 0; k < c.in.size(); ++k) x.push_back(place(device, op.dtypes[k], *c.in[k], e.x[k], k));
      const auto y = op.run(x, *c.out);
      expect_close(assemble(*y, *c.out), e.y, y->dtype, op.tolerance, "value");
      const auto ct = place(device, y->dtype, dual_of(*c.out, c.axes), e.ct, 7);
      const auto cts = op.vjp(x, ct);
      for (std::size_t k = 0; k < c.in.size(); ++k) {
        if (!cts[k]) continue;
        const TensorSpec& due = dual_of(*c.in[k], c.axes);
        expect_close(assemble(*unbroadcast_to(cts[k], due), due), e.gradients[k], DType::f32, op.tolerance,
                     "cotangent of operand " + show(k));
      }
    });
  });
}

using Rule2 = rules::Verdict (*)(const TensorSpec&, const TensorSpec&);
rules::Verdict plus(const TensorSpec& a, const TensorSpec& b) {
  return rules::add("+", a, b);
}
rules::Verdict mapped(const TensorSpec& a, const TensorSpec& b) {
  return rules::map2("map", a, b);
}

/// The legal ones of all pairs; `states` are those that two operands may have on one axis without sharding.
std::vector<Legal> legal_pairs(Rule2 rule, std::size_t states) {
  const std::vector<std::vector<std::string>> dims{{}, {"A"}, {"B"}, {"A", "B"}};
  const auto operands = layouts(dims);
  REQUIRE(operands.size() == 42);
  std::vector<Legal> legal;
  for (const auto& a : operands)
    for (const auto& b : operands)
      if (const auto verdict = rule(a.spec, b.spec); verdict.ok())
        legal.emplace_back(std::vector{&interned(a.text), &interned(b.text)}, verdict);
  // An axis may also shard one of the n dims of the result: (states + n)^2 on two axes, and n more where both are on
  // one dim in the other order. Of the 16 pairs of dims, 1 has no dim, 6 have one, 9 have two.
  const auto on_two = [&](std::size_t n) { return (states + n) * (states + n) + n; };
  CHECK(legal.size() == on_two(0) + 6 * on_two(1) + 9 * on_two(2));
  return legal;
}

/// a F b under its rule, as the typed operators carry it out.
template <class F>
ValuePtr apply(Rule2 rule, const ValuePtr& a, const ValuePtr& b) {
  const rules::Verdict verdict = rule(*a->spec, *b->spec);
  const TensorSpec& spec = accepted(verdict);
  return compute("binary", a, spec, detail::Pointwise<F, f32>{a, b});
}
ValuePtr negative(const ValuePtr& x) {
  return compute("negate", x, *x->spec,
                 [&](const detail::Value& out) { return detail::Linear<detail::Negate, f32>{}(*x, out); });
}
template <class F>
std::function<ValuePtr(const std::vector<ValuePtr>&, const TensorSpec&)> run_of(Rule2 rule) {
  return [rule](const std::vector<ValuePtr>& x, const TensorSpec&) { return apply<F>(rule, x[0], x[1]); };
}
using In = const std::vector<double>&;
const std::vector<DType> two_f32{DType::f32, DType::f32};

TEST_CASE("+ and - over every pair of specs", "[ops][exhaustive][slow]") {
  const auto legal = legal_pairs(plus, 2);
  check({"+",
         {Draw::odd, Draw::odd},
         two_f32,
         run_of<std::plus<>>(plus),
         [](In v) { return v[0] + v[1]; },
         [](const auto&, const ValuePtr& ct) {
           return std::vector{ct, ct};
         },
         {[](In) { return 1.0; }, [](In) { return 1.0; }}},
        legal);
  check({"-",
         {Draw::odd, Draw::odd},
         two_f32,
         run_of<std::minus<>>(plus),
         [](In v) { return v[0] - v[1]; },
         [](const auto&, const ValuePtr& ct) {
           return std::vector{ct, negative(ct)};
         },
         {[](In) { return 1.0; }, [](In) { return -1.0; }}},
        legal);
}

TEST_CASE("* over every pair of specs", "[ops][exhaustive][slow]") {
  check({"*",
         {Draw::odd, Draw::odd},
         two_f32,
         run_of<std::multiplies<>>(rules::multiply),
         [](In v) { return v[0] * v[1]; },
         [](const auto& x, const ValuePtr& ct) {
           return std::vector{apply<std::multiplies<>>(rules::multiply, ct, x[1]),
                              apply<std::multiplies<>>(rules::multiply, ct, x[0])};
         },
         {[](In v) { return v[1]; }, [](In v) { return v[0]; }}},
        legal_pairs(rules::multiply, 3));
}

TEST_CASE("/ over every pair of specs", "[ops][exhaustive][slow]") {
  check({"/",
         {Draw::odd, Draw::positive},
         two_f32,
         run_of<std::divides<>>(rules::divide),
         [](In v) { return v[0] / v[1]; },
         [](const auto& x, const ValuePtr& ct) {
           const auto numerator = apply<std::multiplies<>>(rules::multiply, ct, x[0]);
           const auto square = apply<std::multiplies<>>(rules::multiply, x[1], x[1]);
           return std::vector{apply<std::divides<>>(rules::divide, ct, x[1]),
                              negative(apply<std::divides<>>(rules::divide, numerator, square))};
         },
         {[](In v) { return 1 / v[1]; }, [](In v) { return -v[0] / (v[1] * v[1]); }},
         1e-5},
        legal_pairs(rules::divide, 2));
}

struct Larger {
  template <class P, class Q>
  SHARDLIB_FUNCTION auto operator()(P p, Q q) const {
    return p < q ? q * q : p * q;
  }
};
TEST_CASE("map over every pair of specs", "[ops][exhaustive][slow]") {
  static const detail::MapLoops<Larger, f32, f32, f32> loops{Larger{}};
  const auto legal = legal_pairs(mapped, 1);
  Elementwise op{"map",
                 {Draw::odd, Draw::even},
                 two_f32,
                 [](const auto& x, const TensorSpec& out) {
                   return compute("map", x[0], out,
                                  [&](const detail::Value& shape) { return detail::map_forward(loops, x, shape); });
                 },
                 [](In v) { return Larger{}(v[0], v[1]); },
                 [](const auto& x, const ValuePtr& ct) { return detail::map_vjp_all(loops, *ct, x, false); },
                 {[](In v) { return v[0] < v[1] ? 0 : v[1]; }, [](In v) { return v[0] < v[1] ? 2 * v[1] : v[0]; }}};
  check(op, legal);
  op.name = "map, one cotangent at a time";
  op.vjp = [](const auto& x, const ValuePtr& ct) {
    return std::vector{detail::map_vjp(loops, 0, *ct, x, false), detail::map_vjp(loops, 1, *ct, x, false)};
  };
  check(op, legal);
}

/// The cotangent of what a condition keeps.
ValuePtr masked_by(const ValuePtr& condition, const ValuePtr& ct) {
  const rules::Verdict verdict = rules::where(*condition->spec, *ct->spec, *ct->spec);
  return compute("masked", ct, accepted(verdict), detail::WhereElseNumber<f32>{condition, ct, 0});
}
TEST_CASE("where over every triple of specs", "[ops][exhaustive][slow]") {
  const auto operands = layouts({{}, {"A"}, {"A", "B"}});
  std::vector<Legal> legal;
  std::size_t refused = 0;
  for (const auto& c : operands)
    for (const auto& a : operands)
      for (const auto& b : operands) {
        if (const auto verdict = rules::where(c.spec, a.spec, b.spec); verdict.ok())
          legal.emplace_back(std::vector{&interned(c.text), &interned(a.text), &interned(b.text)}, verdict);
        else
          ++refused;
      }
  // On an axis the branches are both replicated or both partial, or it shards a dim. Of the 27 triples of dims 1 has
  // none, 7 have one, 19 have two.
  CHECK(legal.size() == 4 + 7 * 10 + 19 * 18);
  CHECK(legal.size() + refused == 32 * 32 * 32);
  check({"where",
         {Draw::truth, Draw::odd, Draw::even},
         {DType::bool_, DType::f32, DType::f32},
         [](const auto& x, const TensorSpec& out) {
           return compute("where", x[1], out, detail::Where<f32>{x[0], x[1], x[2]});
         },
         [](In v) { return v[0] != 0 ? v[1] : v[2]; },
         [](const auto& x, const ValuePtr& ct) {
           const auto kept = masked_by(x[0], ct);
           return std::vector<ValuePtr>{nullptr, kept, apply<std::minus<>>(plus, ct, kept)};
         },
         {nullptr, [](In v) { return v[0]; }, [](In v) { return 1 - v[0]; }}},
        legal);
}

TEST_CASE("functions of one operand over every spec", "[ops][exhaustive][slow]") {
  static const detail::MapLoops<detail::exp_function, f32, f32> loops{detail::exp_function{}};
  std::vector<Legal> linear, nonlinear;
  for (const auto& x : layouts({{}, {"A"}, {"A", "B"}})) {
    const std::vector in{&interned(x.text)};
    linear.emplace_back(in, rules::linear(x.spec));
    const auto verdict = rules::map1("exp", x.spec);
    CHECK(verdict.ok() == in[0]->partial.empty());
    CHECK(rules::add_constant("+", x.spec).ok() == verdict.ok());
    if (verdict.ok()) nonlinear.emplace_back(in, verdict);
  }
  CHECK(linear.size() == 32);
  CHECK(nonlinear.size() == 1 + 5 + 11);
  check({"-",
         {Draw::odd},
         {DType::f32},
         [](const auto& x, const TensorSpec&) { return negative(x[0]); },
         [](In v) { return -v[0]; },
         [](const auto&, const ValuePtr& ct) { return std::vector{negative(ct)}; },
         {[](In) { return -1.0; }}},
        linear);
  check({"exp",
         {Draw::odd},
         {DType::f32},
         [](const auto& x, const TensorSpec& out) {
           return compute("exp", x[0], out,
                          [&](const detail::Value& shape) { return detail::map_forward(loops, x, shape); });
         },
         [](In v) { return std::exp(v[0]); },
         [](const auto& x, const ValuePtr& ct) { return std::vector{detail::map_vjp(loops, 0, *ct, x, false)}; },
         {[](In v) { return std::exp(v[0]); }},
         1e-5},
        nonlinear);
}

}  // namespace
