// Ops along a dim and lookups over every small spec on two axes, enumerated at run time: which are legal by the rules,
// and for those the value and the cotangent against whole arrays in f64.
//
// The kernels are those that the typed ops call: softmax, the norms and their backward loops, LookupLoops with gather
// and scatter_add; the results stand under the rules' specs, the cotangents under their duals. Not here, as its kernel
// is inside its typed function: rope (ops_norms_test.cpp).
#include <map>
#include <string>
#include <vector>

#include "exhaustive.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;
using detail::ValuePtr;

namespace {

// ---- along a dim ---------------------------------------------------------------------------------------------------

using Row = std::vector<double>;
struct Along {
  const char* name;
  std::function<void(const Exec&, const f32* x, detail::Along, f32* y)> forward;
  /// Of the operand or, where `of_result`, the result.
  std::function<void(const Exec&, const f32* saved, const f32* ct, detail::Along, f32* dx)> backward;
  bool of_result;
  std::function<Row(const Row& x)> value;
  std::function<Row(const Row& x, const Row& ct)> gradient;
};
constexpr double epsilon = 1e-5;
double dot(const Row& a, const Row& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}
Row softmax_of(const Row& x) {
  Row y(x.size());
  double total = 0;
  for (std::size_t i = 0; i < x.size(); ++i) total += y[i] = std::exp(x[i]);
  for (double& v : y) v /= total;
  return y;
}
/// (x - mean) / root of the mean square; without `centered` the mean counts as 0.
Row normalized(Row x, bool centered, double* scale = nullptr) {
  const auto n = static_cast<double>(x.size());
  const double mean = centered ? dot(x, Row(x.size(), 1)) / n : 0;
  for (double& v : x) v -= mean;
  const double s = 1 / std::sqrt(dot(x, x) / n + epsilon);
  for (double& v : x) v *= s;
  if (scale != nullptr) *scale = s;
  return x;
}
Row normalized_gradient(const Row& x, const Row& ct, bool centered) {
  const auto n = static_cast<double>(x.size());
  double scale = 0;
  const Row y = normalized(x, centered, &scale);
  const double mean = centered ? dot(ct, Row(x.size(), 1)) / n : 0, projection = dot(ct, y) / n;
  Row dx(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) dx[i] = scale * (ct[i] - mean - y[i] * projection);
  return dx;
}
/// f of the rows of two arrays of one shape.
Global by_rows(const Global& x, const Global& ct, const std::string& dim,
               const std::function<Row(const Row&, const Row&)>& f) {
  Global y = x;
  const Shape strides = strides_along(x, x.names);
  const auto d = static_cast<std::size_t>(std::find(x.names.begin(), x.names.end(), dim) - x.names.begin());
  Shape heads = x.shape;
  heads[d] = 1;
  for_each_index(heads, [&](const Shape& head) {
    const auto at = [&](std::int64_t i) { return offset(strides, head) + static_cast<std::size_t>(i * strides[d]); };
    Row a, b;
    for (std::int64_t i = 0; i < x.shape[d]; ++i) {
      a.push_back(x.data[at(i)]);
      b.push_back(ct.data[at(i)]);
    }
    const Row row = f(a, b);
    for (std::int64_t i = 0; i < x.shape[d]; ++i) y.data[at(i)] = row[static_cast<std::size_t>(i)];
  });
  return y;
}

const std::vector<Along>& along_ops() {
  static const std::vector<Along> all{
      {"softmax",
       [](const Exec& exec, const f32* x, detail::Along a, f32* y) {
         kernels::softmax(exec, x, y, a.outer, a.n, a.inner, a.padding);
       },
       [](const Exec& exec, const f32* y, const f32* ct, detail::Along a, f32* dx) {
         kernels::softmax_backward(exec, y, ct, dx, a.outer, a.n, a.inner);
       },
       true, softmax_of,
       [](const Row& x, const Row& ct) {
         Row dx = softmax_of(x);
         const double mean = dot(dx, ct);
         for (std::size_t i = 0; i < dx.size(); ++i) dx[i] *= ct[i] - mean;
         return dx;
       }},
      {"rms_norm",
       [](const Exec& exec, const f32* x, detail::Along a, f32* y) {
         kernels::rms_norm(exec, x, y, a.outer, a.n, a.inner, epsilon, a.padding);
       },
       [](const Exec& exec, const f32* x, const f32* ct, detail::Along a, f32* dx) {
         kernels::rms_norm_backward(exec, x, ct, dx, a.outer, a.n, a.inner, epsilon, a.padding);
       },
       false, [](const Row& x) { return normalized(x, false); },
       [](const Row& x, const Row& ct) { return normalized_gradient(x, ct, false); }},
      {"layer_norm",
       [](const Exec& exec, const f32* x, detail::Along a, f32* y) {
         kernels::layer_norm(exec, x, y, a.outer, a.n, a.inner, epsilon, a.padding);
       },
       [](const Exec& exec, const f32* x, const f32* ct, detail::Along a, f32* dx) {
         kernels::layer_norm_backward(exec, x, ct, dx, a.outer, a.n, a.inner, epsilon, a.padding);
       },
       false, [](const Row& x) { return normalized(x, true); },
       [](const Row& x, const Row& ct) { return normalized_gradient(x, ct, true); }},
  };
  return all;
}

TEST_CASE("softmax and norms along every dim of every spec", "[ops][exhaustive][slow]") {
  struct Case {
    const TensorSpec* spec;
    int dim;
  };
  std::vector<Case> legal;
  for (const auto& x : layouts({{"B"}, {"B", "M"}, {"B", "M", "V"}}))
    for (int i = 0; i < x.spec.rank(); ++i) {
      const bool ok = rules::along("softmax", x.spec.dims[i].name, x.text).ok();
      CHECK(ok == (x.spec.partial.empty() && x.spec.dims[i].axes.empty()));
      if (ok) legal.push_back({&interned(x.text), i});
    }
  // On an axis: replicated, or one of the other dims is sharded.
  CHECK(legal.size() == 1 + 2 * 5 + 3 * 11);
  for (const Along& op : along_ops()) {
    struct Expected {
      Global x, y, ct, gradient;
    };
    std::vector<Expected> expected;
    const auto prepare = [&] {
      expected.clear();
      for (const auto& [spec, dim] : legal) {
        Expected e{random_global(*spec, Draw::odd, 1), {}, random_global(*spec, Draw::odd, 2), {}};
        const auto name = e.x.names[static_cast<std::size_t>(dim)];
        e.y = by_rows(e.x, e.ct, name, [&](const Row& x, const Row&) { return op.value(x); });
        e.gradient = by_rows(e.x, e.ct, name, op.gradient);
        expected.push_back(std::move(e));
      }
      return legal.size();
    };
    on_spec_meshes(prepare, [&](const DevicePtr& device, std::size_t i) {
      const auto& [spec, dim] = legal[i];
      const Expected& e = expected[i];
      named(op.name + (" along dim " + show(dim) + " of " + text_of(*spec)), [&, spec = spec, dim = dim] {
        const auto x = place(device, DType::f32, *spec, e.x);
        const auto y = compute(op.name, x, *spec, [&](const detail::Value& out) {
          Buffer result = detail::allocate(out);
          op.forward(out.device->exec(), x->as<const f32>(), detail::along(*x, dim), result.as<f32>());
          return result;
        });
        expect_close(assemble(*y, *spec), e.y, DType::f32, 1e-5, "value");
        // The backward is linear in the cotangent, which may be partial.
        const auto ct = place(device, DType::f32, dual_of(*spec, axes_of({spec})), e.ct, 2);
        const auto dx = compute(op.name, ct, *ct->spec, [&](const detail::Value& out) {
          Buffer result = detail::allocate(out);
          op.backward(out.device->exec(), (op.of_result ? y : x)->as<const f32>(), ct->as<const f32>(),
                      detail::along(out, dim), result.as<f32>());
          return result;
        });
        expect_close(assemble(*dx, *ct->spec), e.gradient, DType::f32, 1e-5, "cotangent");
      });
    });
  }
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
        kernels::scatter_add(out.device->exec(), dtype_c<f32>, loops.lookup, ct->data().data(), loops.ids(),
                             result.data(), out.count());
        return result;
      });
      expect_close(assemble(*gradient, due), e.gradient, DType::f32, 0, "cotangent of the table");
    });
  });
}

}  // namespace
