// Reductions, layout ops and lookups over every small spec on two axes, enumerated at run time: which are legal by the
// rules, and for those the value and the cotangent against whole arrays in f64.
//
// The kernels are those of the typed ops: reduce_kernel, repeat_kernel, Linear (for mean), permute, and LookupLoops
// with gather and scatter_add. rename, merge and split pass the operand's bytes on, so what is checked is that under
// the rule's spec these are the result. Transposes run under the dual specs and, where they are ops, their rules. Not
// here, but as typed functions: max, argmax, softmax and the norms (ops_exhaustive_typed_test.cpp), concat and its
// transpose (ops_layout_test.cpp), rope (ops_norms_test.cpp).
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "exhaustive.hpp"
#include "shardlib/kernels/layout.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;
using detail::ValuePtr;

namespace {

using Run = std::function<ValuePtr(const ValuePtr& x, const TensorSpec& to)>;
using Of = std::function<void(const Global& x, Global& y)>;

/// A linear op of one operand: with its transpose, from the cotangent of the result to that of the operand.
struct Linear {
  const char* name;
  Run run, transpose;
  Of value, gradient;  ///< on whole arrays, whose result has its dims
  double tolerance = 0;
};
struct Pair {
  const TensorSpec *from, *to;
};

void check(const Linear& op, const std::vector<Pair>& legal) {
  struct Expected {
    Global x, y, ct, gradient;
  };
  std::map<std::pair<Names, Names>, Expected> expected;
  std::vector<const Expected*> of_case;
  const auto prepare = [&] {
    expected.clear();
    of_case.clear();
    for (const auto& [from, to] : legal) {
      auto [it, fresh] = expected.try_emplace({shell(*from).names, shell(*to).names});
      Expected& e = it->second;
      if (fresh) {
        e = {random_global(*from, Draw::odd, 1), shell(*to), random_global(*to, Draw::odd, 2), shell(*from)};
        op.value(e.x, e.y);
        op.gradient(e.ct, e.gradient);
      }
      of_case.push_back(&e);
    }
    return legal.size();
  };
  on_spec_meshes(prepare, [&](const DevicePtr& device, std::size_t i) {
    const auto& [from, to] = legal[i];
    const Expected& e = *of_case[i];
    named(op.name + (" " + arrow(text_of(*from), text_of(*to))), [&] {
      const auto x = place(device, DType::f32, *from, e.x, 1);
      expect_close(assemble(*op.run(x, *to), *to), e.y, DType::f32, op.tolerance, "value");
      const Axes axes = axes_of({from, to});
      const TensorSpec& due = dual_of(*from, axes);
      const auto ct = place(device, DType::f32, dual_of(*to, axes), e.ct, 2);
      expect_close(assemble(*op.transpose(ct, due), due), e.gradient, DType::f32, op.tolerance, "cotangent");
    });
  });
}

using OpRule = rules::Verdict (*)(const ParsedOp&, const TensorSpec&);
/// All pairs that the rule accepts, `count` of them.
std::vector<Pair> legal_pairs(OpRule rule, const std::vector<Layout>& from, const std::vector<Layout>& to,
                              std::size_t count) {
  std::vector<Pair> legal;
  for (const auto& x : from)
    for (const auto& z : to) {
      const std::string op = arrow(x.text, z.text);
      if (const auto verdict = rule(op, x.spec); verdict.ok()) {
        CHECK(verdict.result == z.spec);
        legal.push_back({&interned(x.text), &interned(z.text)});
      }
    }
  CHECK(legal.size() == count);
  return legal;
}

/// Repeats along the new dims, or adds up along those that go.
void sum_or_repeat(const Global& x, Global& y) {
  if (x.names.size() > y.names.size())
    products()({x}, y);
  else
    elementwise([](const std::vector<double>& v) { return v[0]; })({x}, y);
}

ValuePtr repeat_to(const ValuePtr& x, const TensorSpec& to) {
  static_cast<void>(accepted(rules::broadcast(arrow(text_of(x), text_of(to)), *x->spec)));
  return compute("broadcast", x, to, [&](const detail::Value& out) { return detail::repeat_kernel(*x, out); });
}
ValuePtr divided(const ValuePtr& x, std::int64_t n) {
  return compute("scale", x, *x->spec, [&](const detail::Value& out) {
    return detail::Linear<detail::OverNumber<float>, f32>{{static_cast<float>(n)}}(*x, out);
  });
}
std::int64_t elements(const TensorSpec& spec) {
  return static_cast<std::int64_t>(count_of(shell(spec).shape));
}

const std::vector<std::vector<std::string>>& wide() {
  static const std::vector<std::vector<std::string>> dims{{"B", "M"}, {"B", "M", "V"}};
  return dims;
}

TEST_CASE("sum and mean over every subset of dims", "[ops][exhaustive][slow]") {
  const auto from = layouts(wide());
  REQUIRE(from.size() == 18 + 28);
  const auto to = layouts({{}, {"B"}, {"M"}, {"V"}, {"B", "M"}, {"B", "V"}, {"M", "V"}, {"B", "M", "V"}, {"M", "B"}});
  // One result for each subset of dims that stay, not all of them.
  const std::size_t count = 18 * 3 + 28 * 7;
  check({"sum", sum_to, repeat_to, sum_or_repeat, sum_or_repeat}, legal_pairs(rules::sum, from, to, count));
  const auto legal = legal_pairs(rules::mean, from, to, count);
  const auto mean_of = [](const Global& x, Global& y) {
    products()({x}, y);
    for (double& v : y.data) v *= static_cast<double>(y.data.size()) / static_cast<double>(x.data.size());
  };
  const auto spread = [](const Global& ct, Global& gradient) {
    sum_or_repeat(ct, gradient);
    for (double& v : gradient.data)
      v *= static_cast<double>(ct.data.size()) / static_cast<double>(gradient.data.size());
  };
  check({"mean",
         [](const ValuePtr& x, const TensorSpec& z) { return divided(sum_to(x, z), elements(*x->spec) / elements(z)); },
         [](const ValuePtr& ct, const TensorSpec& due) {
           return repeat_to(divided(ct, elements(due) / elements(*ct->spec)), due);
         },
         mean_of, spread, 1e-5},
        legal);
}

TEST_CASE("broadcast over every pair of specs", "[ops][exhaustive][slow]") {
  const auto from = layouts({{}, {"B"}, {"M"}, {"B", "M"}});
  const auto to = layouts({{"B"}, {"M"}, {"B", "M"}, {"M", "B"}, {"B", "M", "V"}});
  // Each spec of the result is that of one operand with the dims that it keeps: 10 of one dim, 18 of two, 28 of three.
  const std::size_t count = 2 * 10 + 3 * 18 + 3 * 18 + 4 * 28;
  check({"broadcast", repeat_to, sum_to, sum_or_repeat, sum_or_repeat}, legal_pairs(rules::broadcast, from, to, count));
}

ValuePtr rearranged(const ValuePtr& x, const TensorSpec& to) {
  static_cast<void>(accepted(rules::rearrange(arrow(text_of(x), text_of(to)), *x->spec)));
  return compute("rearrange", x, to, [&](const detail::Value& out) {
    int order[max_dims];
    for (int i = 0; i < to.rank(); ++i) order[i] = x->spec->find(to.dims[i].name);
    Buffer result = detail::allocate(out);
    kernels::permute(out.device->exec(), size_of(out.dtype), x->data().data(), detail::view(x->local),
                     std::span<const int>(order, static_cast<std::size_t>(to.rank())), result.data());
    return result;
  });
}
TEST_CASE("rearrange over every pair of specs", "[ops][exhaustive][slow]") {
  std::vector<std::vector<std::string>> orders{{"B", "M"}, {"M", "B"}};
  for (std::vector<std::string> three{"B", "M", "V"};;) {
    orders.push_back(three);
    if (!std::next_permutation(three.begin(), three.end())) break;
  }
  check({"rearrange", rearranged, rearranged, sum_or_repeat, sum_or_repeat},
        legal_pairs(rules::rearrange, layouts(wide()), layouts(orders), 18 * 2 + 28 * 6));
}

// ---- the same bytes under another spec -----------------------------------------------------------------------------

/// x's bytes as a value of the spec and sizes.
ValuePtr relabeled(const ValuePtr& x, const TensorSpec& spec, const detail::GlobalSizes& global) {
  return compute("relabel", x->device, x->dtype, spec, global, [&](const detail::Value& out) {
    expect(out.count() == x->count(), "the shard has another size");
    return x->data();
  });
}
detail::GlobalSizes sizes_of(const Global& x) {
  detail::GlobalSizes sizes;
  for (std::size_t i = 0; i < x.shape.size(); ++i) sizes.push_back({x.shape[i], x.padded[i]});
  return sizes;
}

TEST_CASE("rename, merge and split over every spec", "[ops][exhaustive][slow]") {
  /// K is 4 and never padded, so that A K may be one dim, here V, of which the first part takes the padding.
  const auto merged = [](const Global& x) {
    Global y = x;
    for (std::size_t i = 0; i < y.names.size(); ++i)
      if (y.names[i] == "A") {
        y.names[i] = "V";
        y.shape[i] *= 4;
        y.padded[i] *= 4;
        y.names.erase(y.names.begin() + static_cast<std::ptrdiff_t>(i) + 1);
        y.shape.erase(y.shape.begin() + static_cast<std::ptrdiff_t>(i) + 1);
        y.padded.erase(y.padded.begin() + static_cast<std::ptrdiff_t>(i) + 1);
      }
    return y;
  };
  struct Case {
    std::string what;
    const TensorSpec *from, *to;
    bool merges, splits;
  };
  std::vector<Case> cases;
  for (const auto& x : layouts({{"B"}, {"A", "B"}, {"B", "V"}})) {
    const auto verdict = rules::rename("B -> M", x.spec);
    CHECK(verdict.ok());
    cases.push_back({"rename " + x.text, &interned(x.text), &accepted(verdict), false, false});
  }
  CHECK(cases.size() == 10 + 18 + 18);
  for (const auto& x : layouts({{"A", "K"}, {"A", "K", "B"}, {"B", "A", "K"}})) {
    const Dim a = x.spec.dims[x.spec.find("A")], k = x.spec.dims[x.spec.find("K")];
    TensorSpec of_parts;
    of_parts.dims.push_back(a);
    of_parts.dims.push_back(k);
    const std::string parts = text_of(of_parts);
    std::string whole = "V";
    for (auto axis : a.axes) whole += "/" + std::string(axis);
    const std::string merging = arrow(parts, whole), splitting = arrow(whole, parts);
    const auto verdict = rules::merge(merging, x.spec);
    CHECK(verdict.ok() == k.axes.empty());
    if (!verdict.ok()) continue;
    const TensorSpec &from = interned(x.text), &to = accepted(verdict);
    const auto back = rules::split(splitting, to);
    CHECK((back.ok() && back.result == x.spec));
    cases.push_back({"merge " + x.text, &from, &to, true, false});
    cases.push_back({"split " + text_of(to), &to, &from, false, true});
  }
  // On an axis, A or B may be sharded, or nothing.
  CHECK(cases.size() == 46 + 2 * (10 + 18 + 18));
  struct Expected {
    Global x, y;
  };
  std::vector<Expected> expected;
  const auto prepare = [&] {
    expected.clear();
    for (const Case& c : cases) {
      const Global parts = random_global(c.splits ? *c.to : *c.from, Draw::odd, 1);
      Global other = parts;
      if (c.merges || c.splits)
        other = merged(parts);
      else
        other.names = shell(*c.to).names;
      expected.push_back(c.splits ? Expected{other, parts} : Expected{parts, other});
    }
    return cases.size();
  };
  on_spec_meshes(prepare, [&](const DevicePtr& device, std::size_t i) {
    const Case& c = cases[i];
    const auto& [gx, gy] = expected[i];
    named(c.what, [&] {
      const auto x = place(device, DType::f32, *c.from, gx, 1);
      const auto y = relabeled(x, *c.to, sizes_of(gy));
      const Global got = assemble(*y, *c.to);
      expect(got.names == gy.names, "other dims");
      expect_close(got, gy, DType::f32, 0, "value");
      // The transpose is the way back, under the duals.
      const Axes axes = axes_of({c.from, c.to});
      const auto ct = place(device, DType::f32, dual_of(*c.to, axes), gy, 2);
      const TensorSpec& due = dual_of(*c.from, axes);
      expect_close(assemble(*relabeled(ct, due, sizes_of(gx)), due), gx, DType::f32, 0, "cotangent");
    });
  });
}

// ---- lookup --------------------------------------------------------------------------------------------------------

TEST_CASE("index_unreduced over every pair of specs", "[ops][exhaustive][slow]") {
  struct Case {
    const TensorSpec *table, *indices, *out;
  };
  std::vector<Case> legal;
  std::size_t refused = 0;
  for (const auto& table : layouts({{"V"}, {"V", "M"}, {"M", "V"}}))
    for (const auto& indices : layouts({{}, {"B"}, {"A", "B"}}))
      for (const auto& z : layouts({{}, {"B"}, {"M"}, {"B", "M"}, {"A", "B"}, {"A", "B", "M"}})) {
        std::string op;
        for (const Dim& dim : table.spec.dims)
          op += (op.empty() ? "" : " ") +
                (dim.name == "V" ? "[" + std::string(to_string(dim).view()) + "]" : std::string(to_string(dim).view()));
        op +=
            table.text.substr(text_of(rules::without_sums(table.spec)).size()) + ", " + indices.text + " -> " + z.text;
        if (rules::index(op, table.text, indices.text).ok())
          legal.push_back({&interned(table.text), &interned(indices.text), &interned(z.text)});
        else
          ++refused;
      }
  // On an axis: all replicated, the table partial, or one of the dims sharded, which the other operand has not; n dims
  // of them in all. The result is one.
  const auto on_two = [](std::size_t n) { return (2 + n) * (2 + n) + n; };
  CHECK(legal.size() == (on_two(1) + on_two(2) + on_two(3)) + 2 * (on_two(2) + on_two(3) + on_two(4)));
  CHECK(legal.size() + refused == (10 + 18 + 18) * (4 + 10 + 18) * (4 + 10 + 10 + 18 + 18 + 28));
  struct Expected {
    Global table, indices, y, ct, gradient;
  };
  std::map<std::vector<Names>, Expected> expected;  // by the dims
  std::vector<const Expected*> of_case;
  const auto prepare = [&] {
    expected.clear();
    of_case.clear();
    for (const Case& c : legal) {
      auto [it, fresh] = expected.try_emplace({shell(*c.table).names, shell(*c.indices).names, shell(*c.out).names});
      Expected& e = it->second;
      of_case.push_back(&e);
      if (!fresh) continue;
      e = Expected{random_global(*c.table, Draw::odd, 1), random_global(*c.indices, Draw::index, 2), shell(*c.out),
                   random_global(*c.out, Draw::odd, 3), shell(*c.table)};
      // The rows as an einsum with what is 1 where the index is the row.
      Names names = e.indices.names;
      Shape shape = e.indices.shape;
      names.emplace_back("V");
      shape.push_back(size_of_dim("V").size);
      Global one_hot{names, shape, std::vector<double>(count_of(shape))};
      for (std::size_t i = 0; i < e.indices.data.size(); ++i)
        one_hot.data[i * static_cast<std::size_t>(shape.back()) + static_cast<std::size_t>(e.indices.data[i])] = 1;
      products()({e.table, one_hot}, e.y);
      products()({e.ct, one_hot}, e.gradient);
    }
    return legal.size();
  };
  on_spec_meshes(prepare, [&](const DevicePtr& device, std::size_t i) {
    const Case& c = legal[i];
    const Expected& e = *of_case[i];
    named("index_unreduced " + text_of(*c.table) + ", " + arrow(text_of(*c.indices), text_of(*c.out)), [&] {
      const auto table = place(device, DType::f32, *c.table, e.table, 1);
      const auto indices = place(device, DType::i32, *c.indices, e.indices, 2);
      const detail::Indices along{{{c.table->find("V"), indices}}, 1};
      const auto y = compute("index_unreduced", table, *c.out, [&](const detail::Value& out) {
        const detail::LookupLoops loops(*table, along, out.local, *out.spec);
        Buffer result = detail::allocate(out);
        kernels::gather(out.device->exec(), dtype_c<f32>, loops.lookup, table->data().data(), loops.ids(),
                        result.data());
        return result;
      });
      expect_close(assemble(*y, *c.out), e.y, DType::f32, 0, "value");
      const Axes axes = axes_of({c.table, c.indices, c.out});
      const TensorSpec& due = dual_of(*c.table, axes);
      const auto ct = place(device, DType::f32, dual_of(*c.out, axes), e.ct, 3);
      const auto gradient = compute("scatter_add", table, due, [&](const detail::Value& out) {
        const detail::LookupLoops loops(out, along, ct->local, *c.out);
        Buffer result = detail::allocate(out);
        out.device->exec().zero(result.data(), out.bytes());
        kernels::scatter_add(out.device->exec(), dtype_c<f32>, loops.lookup, ct->data().data(), loops.ids(),
                             result.data());
        return result;
      });
      expect_close(assemble(*gradient, due), e.gradient, DType::f32, 0, "cotangent of the table");
    });
  });
}

}  // namespace
