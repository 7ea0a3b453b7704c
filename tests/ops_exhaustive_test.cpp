// Every small spec of every collective and einsum, legal or not, enumerated at run time: what the rules accept is
// carried out by the erased core and compared with the whole arrays, forward and transposed. The other ops stand in
// ops_exhaustive_elementwise_test.cpp and ops_exhaustive_local_test.cpp; those that only their types can run, in
// ops_exhaustive_typed_test.cpp.
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "exhaustive.hpp"
#include "shardlib/runtime/padding.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

// ---- collectives ---------------------------------------------------------------------------------------------------

/// The result's value, of which the kernel fills the buffer.
detail::Handle<detail::Value> result_of(const char* op, const detail::Value& in, const TensorSpec& spec) {
  auto out = detail::make_value({op, {}, {}}, in.device, in.dtype, spec, in.global);
  detail::count(*out);
  return out;
}

Axes added(const Axes& more, const Axes& less) {
  Axes rest;
  for (auto axis : more)
    if (!less.contains(axis)) rest.push_back(axis);
  return rest;
}

Buffer summed(const detail::Value& in, const detail::Value& out) {
  return detail::reduce(in, out, detail::in_mesh_order(*out.device, added(in.spec->partial, out.spec->partial)),
                        Reduction::sum);
}

using Rule = rules::Verdict (*)(const ParsedOp&, const TensorSpec&);
struct Collective {
  const char* name;
  Rule rule;
  Rule transposed;  ///< null: the transpose has no rule of its own
  Buffer (*run)(const detail::Value&, const detail::Value&);
  int legal;  ///< of the 18 x 18 pairs of specs over A and B, counted by hand
};
const std::vector<Collective>& collectives() {
  static const std::vector<Collective> all{
      {"all_gather", rules::all_gather, rules::reduce_scatter, detail::gather, 22},
      {"reduce_scatter", rules::reduce_scatter, rules::all_gather, detail::scatter, 22},
      {"all_reduce", rules::all_reduce, rules::all_reduce, summed, 9},
      {"all_to_all", rules::all_to_all, rules::all_to_all, detail::exchange, 20},
      {"to_partial", rules::to_partial, rules::to_partial, detail::keep_on_first, 9},
      {"shard", rules::shard, nullptr, detail::cut_shard, 22},
  };
  return all;
}

TEST_CASE("every collective over two dims and two axes", "[ops][exhaustive]") {
  const auto specs = layouts({{"A", "B"}});
  REQUIRE(specs.size() == 18);
  struct Legal {
    const Collective* op;
    const Layout *from, *to;
  };
  std::vector<Legal> legal;
  for (const auto& op : collectives()) {
    int accepted = 0, refused = 0;
    for (const auto& from : specs)
      for (const auto& to : specs) {
        const bool ok = op.rule(arrow(from.text, to.text), from.spec).ok();
        ++(ok ? accepted : refused);
        if (!ok) continue;
        legal.push_back({&op, &from, &to});
        if (op.transposed == nullptr) continue;
        const Axes axes = axes_of({&from.spec, &to.spec});
        const std::string ct = text_of(rules::dual(to.spec, axes)), due = text_of(rules::dual(from.spec, axes));
        INFO(op.name << " " << arrow(from.text, to.text) << ", transposed " << arrow(ct, due));
        CHECK(op.transposed(arrow(ct, due), ct).ok());
      }
    INFO(op.name << ": " << accepted << " legal, " << refused << " not");
    CHECK(accepted == op.legal);
    CHECK(accepted + refused == 18 * 18);
  }
  for (std::size_t run = 0; run < 2 * op_meshes().size(); ++run) {
    const auto& mesh = op_meshes()[run / 2];
    std::optional<Padding> padding;
    if (run % 2 == 1) padding.emplace();
    const Global x = random_global(specs.front().spec, Draw::odd, 3);
    INFO(mesh << (padding ? ", padded" : ""));
    on_mesh(mesh, [&](const DevicePtr& device) {
      for (const auto& [op, from, to] : legal) {
        const std::string what = op->name + (" " + arrow(from->text, to->text));
        const auto in = place(device, DType::f32, from->spec, x);
        const auto out = result_of(op->name, *in, to->spec);
        out->storage->buffer = op->run(*in, *out);
        expect_close(assemble(*out, to->spec), x, DType::f32, 0, what);
        if (op->transposed != nullptr) continue;
        // Each device's shard in zeros: S -> P.
        const Axes axes = axes_of({&from->spec, &to->spec});
        const Layout ct(text_of(rules::dual(to->spec, axes))), due(text_of(rules::dual(from->spec, axes)));
        // On the axes that the op does not name, the cotangent is what it is; here the same as the operand.
        const auto part = place(device, DType::f32, ct.spec, x);
        const auto whole = result_of("embed", *part, due.spec);
        whole->storage->buffer = detail::embed_shard(*part, *whole);
        expect_close(assemble(*whole, due.spec), x, DType::f32, 0, what + ", transposed");
      }
    });
  }
}

// ---- einsum --------------------------------------------------------------------------------------------------------

std::vector<int> ids(const TensorSpec& spec) {
  std::vector<int> all;
  for (const Dim& dim : spec.dims) all.push_back(dim.name[0]);
  return all;
}

/// The einsum of two shards as the erased core carries it out, with the plan made at run time.
detail::Handle<detail::Value> multiply(const detail::Value& x, const detail::Value& y, const TensorSpec& spec) {
  detail::GlobalSizes global;
  for (const Dim& dim : spec.dims)
    global.push_back(x.spec->has(dim.name) ? x.global[x.spec->find(dim.name)] : y.global[y.spec->find(dim.name)]);
  auto out = detail::make_value({"einsum", {}, {}}, x.device, x.dtype, spec, global);
  out->storage->buffer = detail::allocate(*out);
  const auto plan = kernels::plan_einsum(ids(*x.spec), ids(*y.spec), ids(spec));
  kernels::einsum(out->device->exec(), plan, x.dtype, out->dtype, x.data().data(), detail::view(x.local),
                  y.data().data(), detail::view(y.local), out->storage->buffer.data());
  return out;
}

/// x repeated along the dims of `spec` that it lacks.
detail::Handle<detail::Value> repeated(const detail::Value& x, const TensorSpec& spec,
                                       const detail::GlobalSizes& global) {
  auto out = detail::make_value({"broadcast", {}, {}}, x.device, x.dtype, spec, global);
  out->storage->buffer = detail::allocate(*out);
  const Global shard{{}, Shape(out->local.begin(), out->local.end()), {}};
  Global from{{}, Shape(x.local.begin(), x.local.end()), {}};
  Names to;
  for (const Dim& dim : x.spec->dims) from.names.emplace_back(dim.name);
  for (const Dim& dim : spec.dims) to.emplace_back(dim.name);
  const Shape strides = strides_along(from, to);
  std::size_t i = 0;
  for_each_index(shard.shape, [&](const Shape& at) { out->as<f32>()[i++] = x.as<f32>()[offset(strides, at)]; });
  detail::zero_padding(*out, out->data());
  return out;
}

struct LegalEinsum {
  const Layout *x, *y, *out;
};

bool divides(const Device& device, const TensorSpec& spec) {
  bool even = true;
  for (const Dim& dim : spec.dims)
    even = even && size_of_dim(dim.name).padded % detail::shard_count(device, dim.axes) == 0;
  return even;
}

struct EinsumFamily {
  std::vector<Layout> x, y, out;
  std::vector<LegalEinsum> legal{};
  std::size_t refused = 0;

  void enumerate() {
    for (const auto& a : x)
      for (const auto& b : y)
        for (const auto& c : out) {
          if (rules::einsum(arrow(a.text + ", " + b.text, c.text), a.text, b.text).ok())
            legal.push_back({&a, &b, &c});
          else
            ++refused;
        }
  }
  /// On three axes the sizes do not divide by all of some meshes together; what does not is left out there.
  void check(const std::string& mesh) const {
    const Global gx = random_global(x.front().spec, Draw::odd, 1), gy = random_global(y.front().spec, Draw::odd, 2);
    // The references by the result's dims.
    struct Expected {
      Global out, ct, by_x, by_y;
    };
    std::map<Names, Expected> expected;
    for (const auto& c : out) {
      Expected e{shell(c.spec), random_global(c.spec, Draw::odd, 3), gx, gy};
      if (expected.contains(e.out.names)) continue;
      products()({gx, gy}, e.out);
      products()({e.ct, gy}, e.by_x);
      products()({e.ct, gx}, e.by_y);
      // A dim that only one operand has and the result lacks: every element of it gets the same.
      expected.emplace(e.out.names, std::move(e));
    }
    on_mesh(mesh, [&](const DevicePtr& device) {
      for (const auto& [a, b, c] : legal) {
        if (!divides(*device, a->spec) || !divides(*device, b->spec)) continue;
        const std::string what = "einsum " + arrow(a->text + ", " + b->text, c->text);
        const Expected& e = expected.at(shell(c->spec).names);
        const auto vx = place(device, DType::f32, a->spec, gx, 1), vy = place(device, DType::f32, b->spec, gy, 2);
        expect_close(assemble(*multiply(*vx, *vy, c->spec), c->spec), e.out, DType::f32, 0, what);
        // Transposed: the einsum of the cotangent with the other operand, then repeated along what was summed away.
        const Axes axes = axes_of({&a->spec, &b->spec, &c->spec});
        const Layout ct(text_of(rules::dual(c->spec, axes)));
        const auto vct = place(device, DType::f32, ct.spec, e.ct, 3);
        const auto transposed = [&](const Layout& operand, const detail::Value& value, const Layout& other,
                                    const detail::Value& other_value, const Global& gradient, const char* which) {
          const Layout due(text_of(rules::dual(operand.spec, axes)));
          const Layout kept(text_of(detail::reachable(due.spec, ct.spec, other.spec)));
          const std::string op = arrow(ct.text + ", " + other.text, kept.text);
          expect(rules::einsum(op, ct.text, other.text).ok(), what + ": its transpose " + op + " is not legal");
          const auto grad = multiply(*vct, other_value, kept.spec);
          expect_close(assemble(*repeated(*grad, due.spec, value.global), due.spec), gradient, DType::f32, 0,
                       what + ", cotangent of the " + which);
        };
        transposed(*a, *vx, *b, *vy, e.by_x, "first");
        transposed(*b, *vy, *a, *vx, e.by_y, "second");
      }
    });
  }
};

TEST_CASE("every einsum over small specs and two axes", "[ops][exhaustive]") {
  // A matrix product, and one with a batch dim; the result has any of the dims.
  EinsumFamily matrix{layouts({{"A", "B"}}), layouts({{"B", "M"}}),
                      layouts({{}, {"A"}, {"M"}, {"A", "B"}, {"A", "M"}, {"M", "A"}, {"A", "B", "M"}})};
  EinsumFamily rows{layouts({{"B", "M"}}), layouts({{"B", "M"}}), layouts({{}, {"B"}, {"M", "B"}})};
  for (auto* family : {&matrix, &rows}) family->enumerate();
  // On one axis the table has 6 legal pairs of states for A B times B M (R R, P R, R P, A R, R M, B B), so 36 on two,
  // and 3 more where both axes are on one dim in the other order; each has one result for each of the 7 lists of dims.
  // For B M times B M: 5 (R R, P R, R P, B B, M M), 2 more, 3 lists.
  CHECK(matrix.legal.size() == 39 * 7);
  CHECK(matrix.refused == 34071);
  CHECK(rows.legal.size() == 27 * 3);
  CHECK(rows.refused == 10287);
  for (const std::string mesh : {"d=1,t=1", "d=2,t=1", "d=1,t=3", "d=2,t=2", "d=2,t=3"}) {
    for (const bool padded : {false, true}) {
      std::optional<Padding> padding;
      if (padded) padding.emplace();
      INFO(mesh << (padded ? ", padded" : ""));
      matrix.check(mesh);
      rows.check(mesh);
    }
  }
}

/// All specs with these dims, in this order, that place the axes in any way and order.
std::vector<Layout> layouts_on(const std::vector<std::string>& dims, const std::vector<std::string>& axes) {
  // Per dim, the axes on it; then the pending sums.
  std::vector<std::vector<std::vector<std::string>>> placements{std::vector<std::vector<std::string>>(dims.size() + 1)};
  for (const auto& axis : axes) {
    auto all = placements;  // with the axis replicated
    for (const auto& placement : placements)
      for (std::size_t i = 0; i <= dims.size(); ++i)
        for (std::size_t at = i < dims.size() ? 0 : placement[i].size(); at <= placement[i].size(); ++at) {
          auto& next = all.emplace_back(placement);
          next[i].insert(next[i].begin() + static_cast<std::ptrdiff_t>(at), axis);
        }
    placements = std::move(all);
  }
  std::vector<Layout> result;
  for (const auto& placement : placements) {
    std::string text;
    for (std::size_t i = 0; i < dims.size(); ++i) {
      text += (i > 0 ? " " : "") + dims[i];
      for (const auto& axis : placement[i]) text += "/" + axis;
    }
    for (const auto& axis : placement.back()) text += " +" + axis;
    result.emplace_back(text);
  }
  return result;
}

TEST_CASE("every einsum over matrices and three axes", "[ops][exhaustive][slow]") {
  EinsumFamily matrix{layouts_on({"A", "B"}, {"d", "t", "p"}), layouts_on({"B", "M"}, {"d", "t", "p"}), {}};
  // k axes are on dims, in any order on each: 3! / (3 - k)! ways to line them up, which 2 dims divide in k + 1.
  REQUIRE(matrix.x.size() == 8 + 3 * 2 * 4 + 6 * 3 * 2 + 6 * 4);
  const auto product = [](const TensorSpec& a, const TensorSpec& b) {
    TensorSpec c;
    c.dims.push_back(a.dims[0]);
    c.dims.push_back(b.dims[1]);
    for (const std::string_view axis : {"d", "t", "p"})
      if (a.partial.contains(axis) || b.partial.contains(axis) || a.dims[1].axes.contains(axis)) c.add_partial(axis);
    return text_of(c);
  };
  // Of each pair of operands only one result can be legal; on two axes all are tried.
  std::vector<std::pair<const Layout*, const Layout*>> operands;
  for (const auto& a : matrix.x)
    for (const auto& b : matrix.y) {
      if (rules::einsum(arrow(a.text + ", " + b.text, product(a.spec, b.spec)), a.text, b.text).ok())
        operands.emplace_back(&a, &b);
      else
        ++matrix.refused;
    }
  for (const auto& [a, b] : operands) matrix.out.emplace_back(product(a->spec, b->spec));
  for (std::size_t i = 0; i < operands.size(); ++i)
    matrix.legal.push_back({operands[i].first, operands[i].second, &matrix.out[i]});
  // On one axis R R, P R, R P, or one of the 3 dims sharded: as above with 3 states in addition to the dims.
  CHECK(matrix.legal.size() == 27 + 3 * 3 * 9 + 6 * 6 * 3 + 6 * 10);
  CHECK(matrix.legal.size() + matrix.refused == 92 * 92);
  for (const std::string mesh : {"d=2,t=2,p=2", "d=2,t=3,p=2", "d=1,t=2,p=2"}) {
    INFO(mesh);
    matrix.check(mesh);
  }
}

}  // namespace
