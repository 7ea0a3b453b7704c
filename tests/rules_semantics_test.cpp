// The rules against their meaning: every device computes on its own part only, the parts are put together as the
// result's spec says, and that must be the op of the global arrays exactly where the rule says legal. Integers, so
// equality is exact; both directions, so neither a wrong program passes nor a right one is rejected.
#include "catch.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "shape_specs.hpp"
#include "shardlib/rules/all.hpp"

using namespace shardlib;

namespace {

constexpr int extent = 4;                  // of every dim: divisible by both axes together
constexpr int devices = 4;                 // a 2 x 2 mesh
using Dims = std::vector<std::string>;     // names in order
using Values = std::vector<std::int64_t>;  // row-major
using Index = std::vector<int>;            // one per dim

int axis_index(int device, std::string_view axis) {
  return axis == "d" ? device / 2 : device % 2;
}

struct Layout {
  std::string text;
  TensorSpec spec;
  Dims dims;
  Index shape;                           // of a device's shard
  std::array<Index, devices> offsets{};  // where each device's shard begins

  explicit Layout(std::string s) : text(std::move(s)), spec(parse_tensor(text).spec) {
    for (const Dim& dim : spec.dims) {
      dims.emplace_back(dim.name);
      shape.push_back(extent >> dim.axes.size());
      for (int device = 0; device < devices; ++device) {
        int shard = 0;
        for (auto axis : dim.axes) shard = shard * 2 + axis_index(device, axis);
        offsets[static_cast<std::size_t>(device)].push_back(shard * shape.back());
      }
    }
  }
  Layout(const Layout&) = delete;  // the spec views the text
  Layout& operator=(const Layout&) = delete;
};
using Layouts = std::deque<Layout>;

/// Calls f for every index below the shape.
void for_each(const Index& shape, const std::function<void(const Index&)>& f) {
  Index index(shape.size(), 0);
  for (;;) {
    f(index);
    std::size_t i = shape.size();
    while (i > 0 && ++index[i - 1] == shape[i - 1]) index[--i] = 0;
    if (i == 0) return;
  }
}
std::size_t flat(const Index& index, const Index& shape) {
  std::size_t at = 0;
  for (std::size_t i = 0; i < shape.size(); ++i)
    at = at * static_cast<std::size_t>(shape[i]) + static_cast<std::size_t>(index[i]);
  return at;
}
std::size_t volume(const Index& shape) {
  std::size_t n = 1;
  for (int e : shape) n *= static_cast<std::size_t>(e);
  return n;
}

/// An array with named dims, local or global.
struct Array {
  Dims dims;
  Index shape;
  Values values;

  Array() = default;
  Array(Dims d, Index e) : dims(std::move(d)), shape(std::move(e)), values(volume(shape)) {}
  [[nodiscard]] std::int64_t at(const Dims& names, const Index& index) const {
    Index own;
    for (const auto& dim : dims)
      own.push_back(index[static_cast<std::size_t>(std::find(names.begin(), names.end(), dim) - names.begin())]);
    return values[flat(own, shape)];
  }
};

/// Deterministic pseudo-random integers.
struct Random {
  std::uint64_t state;
  std::int64_t operator()(int below) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    return static_cast<std::int64_t>((state >> 33) % static_cast<std::uint64_t>(below));
  }
};

Array global_array(const Dims& dims, std::uint64_t seed, int below = 97) {
  Array array(dims, Index(dims.size(), extent));
  Random random{seed};
  for (auto& v : array.values) v = random(below) + (below > extent ? 1 : 0);
  return array;
}

/// The devices' parts of a global array: shards of it, and where the spec is partial random summands.
std::vector<Array> distribute(const Array& global, const Layout& x, std::uint64_t seed) {
  std::vector<Array> parts;
  for (int device = 0; device < devices; ++device) {
    Array part(x.dims, x.shape);
    for_each(x.shape, [&](const Index& index) {
      Index where = index;
      for (std::size_t i = 0; i < where.size(); ++i) where[i] += x.offsets[static_cast<std::size_t>(device)][i];
      // Each pending axis splits v into r and v - r, where r depends on the place and on the split before.
      std::int64_t v = global.at(global.dims, where);
      std::uint64_t key = seed + 1 + flat(where, global.shape);
      for (auto axis : x.spec.partial) {
        const auto r = Random{key}(1000) + 7;
        const int half = axis_index(device, axis);
        v = half == 0 ? r : v - r;
        key = key * 31 + static_cast<std::uint64_t>(half) + 1;
      }
      part.values[flat(index, x.shape)] = v;
    });
    parts.push_back(part);
  }
  return parts;
}

/// The global array that the parts make, if the spec is true of them.
std::optional<Array> assemble(const std::vector<Array>& parts, const Layout& z) {
  std::array<int, devices> group{};  // devices whose summands belong together have the same first one
  for (int device = 0; device < devices; ++device) {
    group[static_cast<std::size_t>(device)] = device;
    for (auto axis : z.spec.partial)
      group[static_cast<std::size_t>(device)] -= axis_index(device, axis) * (axis == "d" ? 2 : 1);
  }
  Array global(z.dims, Index(z.dims.size(), extent));
  bool consistent = true;
  Index local(z.dims.size());
  for_each(global.shape, [&](const Index& index) {
    std::array<std::int64_t, devices> sums{};
    std::array<bool, devices> owners{};
    for (std::size_t device = 0; device < devices; ++device) {
      bool owner = true;
      for (std::size_t i = 0; i < index.size(); ++i) {
        local[i] = index[i] - z.offsets[device][i];
        owner = owner && local[i] >= 0 && local[i] < z.shape[i];
      }
      if (!owner) continue;
      owners[static_cast<std::size_t>(group[device])] = true;
      sums[static_cast<std::size_t>(group[device])] += parts[device].values[flat(local, z.shape)];
    }
    // All groups that own the element have it, and have the same.
    std::optional<std::int64_t> value;
    for (std::size_t device = 0; device < devices; ++device) {
      if (!owners[device]) continue;
      if (value && *value != sums[device]) consistent = false;
      value = sums[device];
    }
    global.values[flat(index, global.shape)] = value.value_or(-1);
  });
  if (!consistent) return {};
  return global;
}

/// An op on arrays with named dims; nothing where the shape do not fit. `device` is -1 for the global arrays.
using Arrays = std::vector<const Array*>;
using Function = std::function<std::optional<Array>(const Arrays& in, const Dims& out, int device)>;

using Operands = std::vector<const Layout*>;

/// An operand's global array and its parts; `position` makes operands differ.
struct Sample {
  Array global;
  std::vector<Array> parts;
};
const Sample& sample(const Layout& x, std::size_t position, int below) {
  static std::map<std::tuple<std::string, std::size_t, int>, Sample> samples;
  const auto [it, fresh] = samples.try_emplace({x.text, position, below});
  if (fresh) {
    it->second.global = global_array(x.dims, 17 + position, below);
    it->second.parts = distribute(it->second.global, x, 1000 * (position + 1));
  }
  return it->second;
}

/// True if the op of the parts, put together as z, is the op of the global arrays.
bool right(const Function& f, const Operands& in, const Layout& z, int below = 97) {
  std::vector<const Sample*> samples;
  for (std::size_t i = 0; i < in.size(); ++i) samples.push_back(&sample(*in[i], i, i == 1 ? below : 97));
  std::vector<Array> results;
  for (std::size_t device = 0; device < devices; ++device) {
    Arrays local;
    for (const Sample* operand : samples) local.push_back(&operand->parts[device]);
    auto result = f(local, z.dims, static_cast<int>(device));
    if (!result || result->shape != z.shape) return false;
    results.push_back(std::move(*result));
  }
  const auto actual = assemble(results, z);
  if (!actual) return false;
  Arrays globals;
  for (const Sample* operand : samples) globals.push_back(&operand->global);
  const auto expected = f(globals, z.dims, -1);
  return expected && actual->values == expected->values;
}

/// Extents of all dims of the operands; nothing if two operands disagree on one.
bool join(const Arrays& in, Dims& names, Index& shape) {
  for (const Array* x : in)
    for (std::size_t i = 0; i < x->dims.size(); ++i) {
      const auto it = std::find(names.begin(), names.end(), x->dims[i]);
      if (it == names.end()) {
        names.push_back(x->dims[i]);
        shape.push_back(x->shape[i]);
      } else if (shape[static_cast<std::size_t>(it - names.begin())] != x->shape[i]) {
        return false;
      }
    }
  return true;
}

/// Combines the operands element by element and sums over the dims that the result lacks.
Function combine(const std::function<std::int64_t(const std::vector<std::int64_t>&)>& g) {
  return [g](const Arrays& in, const Dims& out, int) -> std::optional<Array> {
    Dims names;
    Index shape;
    if (!join(in, names, shape)) return {};
    Index out_shape;
    for (const auto& dim : out) {
      const auto it = std::find(names.begin(), names.end(), dim);
      if (it == names.end()) return {};
      out_shape.push_back(shape[static_cast<std::size_t>(it - names.begin())]);
    }
    // For each operand and the result, where an index of all dims leads.
    const auto strides = [&](const Dims& dims, const Index& sizes) {
      std::vector<std::size_t> steps(names.size(), 0);
      std::size_t step = 1;
      for (std::size_t i = dims.size(); i-- > 0; step *= static_cast<std::size_t>(sizes[i]))
        steps[static_cast<std::size_t>(std::find(names.begin(), names.end(), dims[i]) - names.begin())] = step;
      return steps;
    };
    std::vector<std::vector<std::size_t>> steps;
    for (const Array* x : in) steps.push_back(strides(x->dims, x->shape));
    steps.push_back(strides(out, out_shape));
    const auto offset = [](const std::vector<std::size_t>& by, const Index& index) {
      std::size_t at = 0;
      for (std::size_t i = 0; i < by.size(); ++i) at += by[i] * static_cast<std::size_t>(index[i]);
      return at;
    };
    Array result(out, out_shape);
    std::vector<std::int64_t> operands(in.size());
    for_each(shape, [&](const Index& index) {
      for (std::size_t i = 0; i < in.size(); ++i) operands[i] = in[i]->values[offset(steps[i], index)];
      result.values[offset(steps.back(), index)] += g(operands);
    });
    return result;
  };
}

Layouts layouts(const std::vector<Dims>& lists) {
  Layouts all;
  for (const auto& spec : test::specs_of_any(lists)) all.emplace_back(spec);
  return all;
}

/// The rule and the meaning agree on every result that has the given dims.
void agree(const Function& f, const Operands& in, const Layout& z, bool legal, int below = 97) {
  const bool meaning = right(f, in, z, below);
  if (meaning == legal) return;  // CHECK is slow, and this is asked a hundred thousand times
  std::string text;
  for (const Layout* x : in) text += "`" + x->text + "` ";
  INFO(text << "-> `" << z.text << "`");
  CHECK(legal == meaning);
}

TEST_CASE("meaning of einsum") {
  const auto f = combine([](const auto& v) { return v[0] * v[1]; });
  const auto zs = layouts({{}, {"A"}, {"B"}, {"C"}, {"A", "B"}, {"A", "C"}, {"A", "B", "C"}});
  int legal = 0;
  for (const auto& x : layouts({{}, {"B"}, {"A", "B"}}))
    for (const auto& y : layouts({{"B"}, {"B", "C"}}))
      for (const auto& z : zs) {
        const bool ok = rules::einsum(x.text + ", " + y.text + " -> " + z.text, x.text, y.text).ok();
        legal += ok ? 1 : 0;
        agree(f, {&x, &y}, z, ok);
      }
  CHECK(legal > 500);
}

TEST_CASE("meaning of einsum with one operand, sum and mean") {
  const auto f = combine([](const auto& v) { return v[0]; });
  for (const auto& x : layouts({{}, {"A"}, {"A", "B"}, {"A", "B", "C"}}))
    for (const auto& z : layouts({{}, {"A"}, {"B"}, {"A", "B"}, {"B", "A"}, {"A", "C"}})) {
      const bool ok = rules::einsum1(x.text + " -> " + z.text, x.text).ok();
      agree(f, {&x}, z, ok);
      const bool keeps_order = z.dims != Dims{"B", "A"} && z.dims != x.dims;
      CHECK(rules::sum(x.text + " -> " + z.text, x.text).ok() == (ok && keeps_order));
      CHECK(rules::mean(x.text + " -> " + z.text, x.text).ok() == (ok && keeps_order));
    }
}

/// Rules that find the result themselves: legal exactly if some result is right, and then that one, and no other.
template <class Rule>
void agree_elementwise(const std::function<std::int64_t(const std::vector<std::int64_t>&)>& g, const Rule& rule) {
  const auto f = combine(g);
  const auto operands = layouts({{}, {"A"}, {"B"}, {"A", "B"}});
  int legal = 0;
  for (const auto& x : operands)
    for (const auto& y : operands) {
      const rules::Verdict verdict = rule(x.text, y.text);
      Dims names = x.dims;
      if (verdict.ok())
        names = Layout(std::string(to_string(verdict.result).view())).dims;
      else
        for (const auto& dim : y.dims)
          if (std::find(names.begin(), names.end(), dim) == names.end()) names.push_back(dim);
      legal += verdict.ok() ? 1 : 0;
      for (const auto& z : layouts({names})) {
        const bool is_result = verdict.ok() && verdict.result == z.spec;
        agree(f, {&x, &y}, z, is_result);
      }
    }
  CHECK(legal > 50);
}

TEST_CASE("meaning of elementwise operations") {
  agree_elementwise([](const auto& v) { return v[0] + v[1]; },
                    [](const auto& a, const auto& b) { return rules::add("+", a, b); });
  agree_elementwise([](const auto& v) { return v[0] * v[1]; },
                    [](const auto& a, const auto& b) { return rules::multiply(a, b); });
  // In place of 1/v, which integers have not, another function that is not linear.
  agree_elementwise([](const auto& v) { return v[0] * ((v[1] * v[1] * v[1] + 5) % 1009); },
                    [](const auto& a, const auto& b) { return rules::divide(a, b); });
  agree_elementwise([](const auto& v) { return (v[0] * v[0] + 3 * v[1] * v[1] + 1) % 1009; },
                    [](const auto& a, const auto& b) { return rules::map2("map", a, b); });
  // A condition is not linear, what it masks is.
  agree_elementwise([](const auto& v) { return v[0] * v[0] % 1009 * v[1]; },
                    [](const auto& c, const auto& a) { return rules::where(c, a, a); });
}

TEST_CASE("meaning of functions of one operand") {
  const auto nonlinear = combine([](const auto& v) { return v[0] * v[0] + 1; });
  const auto linear = combine([](const auto& v) { return -3 * v[0]; });
  const auto plus_one = combine([](const auto& v) { return v[0] + 1; });
  for (const auto& x : layouts({{}, {"A"}, {"A", "B"}})) {
    agree(nonlinear, {&x}, x, rules::map1("exp", x.text).ok());
    agree(plus_one, {&x}, x, rules::add_constant("+", x.text).ok());
    agree(linear, {&x}, x, rules::linear(x.text).ok());
  }
}

TEST_CASE("meaning of ops along a dim") {
  // Squares divided among the dim: like softmax, what an element becomes depends on its whole row.
  const auto along = [](bool squares) {
    return [squares](const Arrays& in, const Dims& out, int) -> std::optional<Array> {
      const Array& x = *in[0];
      if (x.dims != out) return {};
      Array result(out, x.shape);
      for_each(x.shape, [&](const Index& index) {
        Index other = index;
        std::int64_t total = 0;
        for (other[0] = 0; other[0] < x.shape[0]; ++other[0]) total += (other[0] + 1) * x.at(x.dims, other);
        const auto v = x.at(x.dims, index);
        result.values[flat(index, x.shape)] = squares ? v * v + total : 3 * v + total;
      });
      return result;
    };
  };
  for (const auto& x : layouts({{"A"}, {"A", "B"}})) {
    agree(along(true), {&x}, x, rules::along("softmax", "A", x.text).ok());
    if (x.dims.size() == 2) agree(along(false), {&x}, x, rules::rope("B", "A", x.text).ok());
  }
}

TEST_CASE("meaning of index") {
  int legal = 0;
  for (const auto& table : layouts({{"V"}, {"V", "M"}, {"V", "B"}}))
    for (const auto& indices : layouts({{}, {"B"}})) {
      // Rows by global index; a row that this device has not is 0.
      const Function f = [&](const Arrays& in, const Dims& out, int device) -> std::optional<Array> {
        const Array &rows = *in[0], &ids = *in[1];
        Dims names;
        Index shape;
        if (!join({&ids, &rows}, names, shape)) return {};
        Array result;
        for (const auto& dim : out) {
          const auto it = std::find(names.begin(), names.end(), dim);
          if (it == names.end() || dim == "V") return {};
          result.dims.push_back(dim);
          result.shape.push_back(shape[static_cast<std::size_t>(it - names.begin())]);
        }
        result.values.resize(volume(result.shape));
        const int offset = device < 0 ? 0 : table.offsets[static_cast<std::size_t>(device)][0];
        bool covers = true;  // every dim but V stands in the result
        for (const auto& dim : names)
          covers = covers && (dim == "V" || std::find(out.begin(), out.end(), dim) != out.end());
        if (!covers) return {};
        for_each(result.shape, [&](const Index& index) {
          Dims all = out;
          Index where = index;
          const auto row = ids.at(out, index) - offset;
          all.push_back("V");
          where.push_back(static_cast<int>(row));
          const bool here = row >= 0 && row < rows.shape[0];
          result.values[flat(index, result.shape)] = here ? rows.at(all, where) : 0;
        });
        return result;
      };
      const std::string v(to_string(table.spec.dims[0]).view());
      for (const auto& z : layouts({{}, {"B"}, {"M"}, {"B", "M"}})) {
        const std::string op = "[" + v + "]" + table.text.substr(v.size()) + ", " + indices.text + " -> " + z.text;
        const bool ok = rules::index(op, table.text, indices.text).ok();
        legal += ok ? 1 : 0;
        agree(f, {&table, &indices}, z, ok, extent);
      }
    }
  CHECK(legal > 100);
}

}  // namespace
