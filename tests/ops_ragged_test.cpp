// ragged_all_to_all and grouped_einsum: rows that counts at run time order, against whole arrays in f64.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "op_case.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

const std::vector<std::string>& ragged_meshes() {
  static const std::vector<std::string> meshes{"d=1,e=1,t=1", "d=1,e=2,t=1", "d=2,e=1,t=1", "d=1,e=4,t=1",
                                               "d=2,e=2,t=1", "d=1,e=2,t=2", "d=1,e=3,t=1", "d=2,e=2,t=2",
                                               "d=1,e=8,t=1", "d=2,e=4,t=1"};
  return meshes;
}

/// Sizes that every mesh divides: rows of a device, places, groups and so on. If `pad`, the last place and the last
/// group are padding.
struct Setup {
  const std::vector<AxisSize>& mesh;
  bool pad;
  std::int64_t places, groups;  // of the whole mesh, with padding
  std::int64_t blocks = 1;      // of rows
  Global counts;

  Setup(const std::vector<AxisSize>& axes, std::int64_t places_each, std::int64_t groups_each, std::uint64_t seed)
      : mesh(axes), pad(seed % 2 == 1) {
    const std::int64_t d = size_of_axis(mesh, "d"), e = size_of_axis(mesh, "e");
    places = d * e * places_each;
    groups = d * e * groups_each;
    blocks = d * e;
    const DimSize p = padded(places), x = padded(groups);
    counts = {
        {"P", "X"}, {p.size, x.size}, std::vector<double>(static_cast<std::size_t>(p.size * x.size)), {places, groups}};
    // Many are 0, and some places have nothing.
    for (std::size_t i = 0; i < counts.data.size(); ++i)
      if (mix(seed + i / static_cast<std::size_t>(x.size)) % 5 != 0)
        counts.data[i] = static_cast<double>(std::max<std::int64_t>(0, std::int64_t(mix(seed * 77 + i) % 6) - 2));
  }
  [[nodiscard]] std::int64_t count(std::int64_t p, std::int64_t x) const {
    if (p >= counts.shape[0] || x >= counts.shape[1]) return 0;
    return static_cast<std::int64_t>(counts.data[static_cast<std::size_t>(p * counts.shape[1] + x)]);
  }
  /// The size with its padding, if this setup has any.
  [[nodiscard]] DimSize padded(std::int64_t size) const { return {pad && size > 1 ? size - 1 : size, size}; }

  /// Calls f(block of rows, place, group, first row in the block) in the order of a block's rows, for counts of `spec`.
  template <class F>
  void for_each(const TensorSpec& spec, const Axes& row_axes, const F& f) const {
    std::vector<bool> done(static_cast<std::size_t>(blocks), false);
    for (int r = 0; r < static_cast<int>(device_count(mesh)); ++r) {
      const Coordinates here = coordinates_of(mesh, r);
      const std::int64_t block = part_of(mesh, here, row_axes).first;
      if (done[static_cast<std::size_t>(block)]) continue;
      done[static_cast<std::size_t>(block)] = true;
      const auto [p_at, p_parts] = part_of(mesh, here, spec.dims[0].axes);
      const auto [x_at, x_parts] = part_of(mesh, here, spec.dims[1].axes);
      std::int64_t first = 0;
      for (std::int64_t x = x_at * (groups / x_parts); x < (x_at + 1) * (groups / x_parts); ++x)
        for (std::int64_t p = p_at * (places / p_parts); p < (p_at + 1) * (places / p_parts); ++p) {
          f(block, p, x, first);
          first += count(p, x);
        }
    }
  }
  /// The most rows that a block has.
  [[nodiscard]] std::int64_t most(const TensorSpec& spec, const Axes& row_axes) const {
    std::int64_t most = 1;
    for_each(spec, row_axes, [&](std::int64_t, std::int64_t p, std::int64_t x, std::int64_t first) {
      most = std::max(most, first + count(p, x));
    });
    return most;
  }
};

Global random_array(Names names, const std::vector<DimSize>& sizes, std::uint64_t seed) {
  Global x{std::move(names), {}, {}};
  for (const DimSize& size : sizes) {
    x.shape.push_back(size.size);
    x.padded.push_back(size.padded);
  }
  x.data.resize(count_of(x.shape));
  for (std::size_t i = 0; i < x.data.size(); ++i) x.data[i] = draw(Draw::odd, seed, i);
  return x;
}

/// The value and the cotangents of `leaves` under the result's cotangent `ct`, compared with those expected.
struct Expected {
  Global y;
  std::vector<Global> gradients;
};
template <class Out, class F>
void check_op(const DevicePtr& device, const F& f, std::vector<detail::ValuePtr> leaves,
              const std::vector<const TensorSpec*>& specs, const Global& ct, const Expected& expected) {
  std::vector<detail::Slot> slots;
  for (auto& x : leaves) {
    x = detail::as_leaf(*x);
    slots.push_back(x->slot);
  }
  const Out y = f(leaves);
  constexpr DType dtype = dtype_v<typename Out::value_type>;
  expect_close(assemble(*y.value(), detail::parsed<Out::spec>), expected.y, dtype, 0, "value");
  const std::string dual = dual_on(*device, detail::parsed<Out::spec>);
  const TensorSpec ct_spec = parse_tensor(dual).spec;
  const auto cotangent = place(device, dtype, ct_spec, ct, 7);
  const auto found = detail::Backward({{y.value()->slot, cotangent}}, slots).run();
  const double law = pair_up(*y.value(), *cotangent).sum;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const std::string due = dual_on(*device, *specs[i]);
    const TensorSpec due_spec = parse_tensor(due).spec;
    // Summands of bf16 are rounded on each device.
    const double rounding = dtype == DType::bf16 && !due_spec.partial.empty() ? 0.01 : 0;
    expect_close(assemble(*found[i], due_spec), expected.gradients[i], dtype, rounding, "cotangent " + show(i));
    const double pairing = pair_up(*leaves[i], *found[i]).sum;
    const double tolerance = dtype == DType::bf16 ? 0.01 * pair_up(*y.value(), *cotangent).magnitude : 0;
    expect(std::abs(pairing - law) <= tolerance, "adjoint law: " + show(pairing) + " and " + show(law));
  }
}

/// Rows that one layout of counts orders, in the order of another.
Global moved(const Setup& s, const Global& x, const TensorSpec& from, const TensorSpec& to, const Axes& axes,
             const std::string& name, std::int64_t rows) {
  Global y = x;
  y.names[0] = name;
  y.padded[0] = y.shape[0] = rows * s.blocks;
  y.data.assign(count_of(y.shape), 0.0);
  const auto row = static_cast<std::int64_t>(count_of(y.shape)) / y.shape[0];
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> at;
  s.for_each(from, axes, [&](std::int64_t block, std::int64_t p, std::int64_t g, std::int64_t first) {
    at[{p, g}] = block * (x.shape[0] / s.blocks) + first;
  });
  s.for_each(to, axes, [&](std::int64_t block, std::int64_t p, std::int64_t g, std::int64_t first) {
    std::copy_n(x.data.begin() + at[{p, g}] * row, s.count(p, g) * row, y.data.begin() + (block * rows + first) * row);
  });
  return y;
}

template <class D, Spec Rows, Spec Result, Spec From, Spec To>
void check_exchange(const DevicePtr& device, std::int64_t places_each, std::int64_t groups_each) {
  using X = Tensor<D, Rows>;
  using Out = Tensor<D, Result>;
  const TensorSpec &rows = detail::parsed<Rows>, &from = detail::parsed<From>, &to = detail::parsed<To>;
  const Axes axes = rows.dims[0].axes;
  for (std::uint64_t seed = 1; seed < 5; ++seed) {
    const Setup s(device->axes(), places_each, groups_each, seed);
    const std::int64_t have = s.most(from, axes) + 2, bound = s.most(to, axes) + static_cast<std::int64_t>(seed % 2);
    const Global x = random_array({std::string(rows.dims[0].name), "M"}, {have * s.blocks, s.padded(4)}, seed);
    const Global ct = random_array({"S", "M"}, {bound * s.blocks, s.padded(4)}, seed + 9);
    Global back = moved(s, ct, to, from, axes, x.names[0], have);
    const Tensor<i32, From> sent(place(device, DType::i32, from, s.counts));
    const Tensor<i32, To> received(place(device, DType::i32, to, s.counts));
    const std::string name(detail::parsed<Result>.dims[0].name);
    check_op<Out>(
        device,
        [&](const auto& leaves) {
          return ragged_all_to_all<make_op<Rows, Result>>(X(leaves[0]), sent, received, {{name, bound * s.blocks}});
        },
        {place(device, dtype_v<D>, rows, x, 3)}, {&rows}, ct, {moved(s, x, from, to, axes, name, bound), {back}});
  }
}

TEST_CASE("ragged_all_to_all", "[ops]") {
  on_meshes(ragged_meshes(), [&](const DevicePtr& device) {
    poison(*device);
    check_exchange<f32, "R/d/e M", "S/d/e M", "P/d/e X", "P/d X/e">(device, 1, 2);
    check_exchange<f32, "R/d/e M", "S/d/e M", "P/d/e X", "P/d X/e">(device, 2, 1);
    check_exchange<f64, "R/d/e M", "S/d/e M", "P/d X/e", "P/d/e X">(device, 2, 2);
    check_exchange<bf16, "R/d/e M", "S/d/e M", "P/d/e X", "P X/d/e">(device, 1, 1);
    check_exchange<f32, "R/d/e M/t", "S/d/e M/t", "P/d/e X", "P/d X/e">(device, 1, 1);
    check_exchange<f32, "R/d/e M +t", "S/d/e M +t", "P/d X/e", "P/d/e X">(device, 1, 1);
    check_exchange<f32, "R/e/d M", "S/e/d M", "P/d X/e", "P/d/e X">(device, 1, 2);
  });
}

// What travels are the counted rows, and nothing to this device itself.
TEST_CASE("ragged_all_to_all sends the rows that are counted", "[ops]") {
  on_mesh("d=1,e=2,t=1", [](const DevicePtr& device) {
    const Mesh<"d e t"> mesh(device);
    const Global counts{{"P", "X"}, {2, 2}, {5, 3, 0, 4}};
    const Tensor<i32, "P/e X"> sent(place(device, DType::i32, detail::parsed<"P/e X">, counts));
    const auto rows = ones<f32, "R/e M">(mesh, {{"R", 200}, {"M", 8}});
    static_cast<void>(
        ragged_all_to_all<"R/e M -> S/e M">(rows, sent, all_to_all<"P/e X -> P X/e">(sent), {{"S", 100}}));
    const auto bytes = detail::program_state(device).counts.find("ragged_all_to_all")->second.bytes;
    expect(bytes == (device->rank() == 0 ? 3 * 8 * 4 : 0), "sent " + show(bytes) + " bytes");
  });
}

// Rows that nobody sends are an error where they are awaited, not a hang.
TEST_CASE("ragged_all_to_all rejects counts of rows that are not sent", "[ops]") {
  on_mesh("d=1,e=2,t=1", [](const DevicePtr& device) {
    const auto counts = [&](const TensorSpec& spec, std::vector<double> values) {
      return place(device, DType::i32, spec, {{"P", "X"}, {2, 2}, std::move(values)});
    };
    const Tensor<i32, "P/e X"> sent(counts(detail::parsed<"P/e X">, {1, 0, 0, 1}));
    const Tensor<i32, "P X/e"> received(counts(detail::parsed<"P X/e">, {1, 2, 2, 1}));
    const auto rows = ones<f32, "R/e M">(Mesh<"d e t">(device), {{"R", 8}, {"M", 2}});
    const std::string text = error_of([&] {
      static_cast<void>(ragged_all_to_all<"R/e M -> S/e M">(rows, sent, received, {{"S", 8}}));
    });
    const std::string here = std::to_string(device->rank()), there = std::to_string(1 - device->rank());
    expect(text.find("rank " + there + " of 2 sends 0 rows to rank " + here +
                     ", which expects 2; take `all_to_all` of the counts") != std::string::npos,
           text);
  });
}

TEST_CASE("ragged_all_to_all rejects counts that do not fit", "[ops]") {
  const auto message = [](std::vector<double> counts, std::int64_t bound) {
    std::string text;
    on_mesh("d=1,e=1,t=1", [&](const Mesh<"d e t">& mesh) {
      const Tensor<i32, "P/e X"> sent(
          place(mesh.device(), DType::i32, detail::parsed<"P/e X">, {{"P", "X"}, {1, 2}, std::move(counts)}));
      const auto rows = ones<f32, "R/e M">(mesh, {{"R", 6}, {"M", 2}});
      text = error_of([&] {
        static_cast<void>(
            ragged_all_to_all<"R/e M -> S/e M">(rows, sent, all_to_all<"P/e X -> P X/e">(sent), {{"S", bound}}));
      });
    });
    return text;
  };
  const auto has = [&](const std::string& text, const std::string& part) {
    INFO(text);
    CHECK((text.empty() || text.find(part) != std::string::npos));  // ranks beyond the mesh have none
  };
  has(message({4, 3}, 9),
      "this device counts 7 rows, but the operand has 6 of `R/e` here; count fewer rows, or give `R` a size of at "
      "least 7 for each device");
  has(message({4, 2}, 5), "this device counts 6 rows, but the result has 5 of `S/e` here");
  has(message({4, -1}, 9), "a count of rows is -1, of place 0 and group 1");
}

// ---- grouped_einsum ------------------------------------------------------------------------------------------------

/// The dims of a spec as names and sizes, of which `rows` is the first of `x`.
using DimSizes = std::map<std::string, DimSize, std::less<>>;
Global sized_array(const TensorSpec& spec, const DimSizes& sizes, std::uint64_t seed) {
  Names names;
  std::vector<DimSize> shape;
  for (const Dim& dim : spec.dims) {
    names.emplace_back(dim.name);
    shape.push_back(sizes.find(dim.name)->second);
  }
  return random_array(std::move(names), shape, seed);
}

/// Adds the products of corresponding elements to those of `y`; a row's group is its index along X.
void add_products(const std::vector<std::int64_t>& group, const Global& a, const Global& b, Global& y,
                  const DimSizes& sizes) {
  Names names{"S"};
  Shape shape{sizes.find("S")->second.size};
  for (const Global* x : {&a, &b, static_cast<const Global*>(&y)})
    for (std::size_t i = 0; i < x->names.size(); ++i)
      if (x->names[i] != "X" && std::find(names.begin(), names.end(), x->names[i]) == names.end()) {
        names.push_back(x->names[i]);
        shape.push_back(x->shape[i]);
      }
  const auto at = [&](const Global& x, const Shape& index) {
    const auto stride = static_cast<std::size_t>(strides_along(x, {"X"})[0]);
    return offset(strides_along(x, names), index) +
           stride * static_cast<std::size_t>(group[static_cast<std::size_t>(index[0])]);
  };
  for_each_index(shape, [&](const Shape& index) {
    if (group[static_cast<std::size_t>(index[0])] < 0) return;
    y.data[at(y, index)] += a.data[at(a, index)] * b.data[at(b, index)];
  });
}

template <class D, OpSpec O, Spec Rows, Spec Weights, Spec Result, Spec Counts>
void check_grouped(const DevicePtr& device, std::int64_t places_each, std::int64_t groups_each) {
  const TensorSpec &rows = detail::parsed<Rows>, &weights = detail::parsed<Weights>, &result = detail::parsed<Result>,
                   &counted = detail::parsed<Counts>;
  const Axes axes = rows.dims[0].axes;
  constexpr std::uint64_t seeds[] = {1, 2, 3};
  for (const std::uint64_t seed : few(seeds, 1)) {
    Setup s(device->axes(), places_each, groups_each, seed);
    s.blocks = part_of(device->axes(), coordinates_of(device->axes(), 0), axes).second;
    const std::int64_t each = s.most(counted, axes) + static_cast<std::int64_t>(seed % 3);
    const DimSizes sizes{
        {"S", each * s.blocks}, {"X", s.padded(s.groups)}, {"M", s.padded(4)}, {"F", s.padded(6)}, {"H", 2}};
    std::vector<std::int64_t> group(static_cast<std::size_t>(each * s.blocks), -1);
    s.for_each(counted, axes, [&](std::int64_t block, std::int64_t p, std::int64_t x, std::int64_t first) {
      for (std::int64_t i = 0; i < s.count(p, x); ++i) group[static_cast<std::size_t>(block * each + first + i)] = x;
    });
    const Global x = sized_array(rows, sizes, seed), w = sized_array(weights, sizes, seed + 20),
                 ct = sized_array(result, sizes, seed + 30);
    const auto zeros_of = [](Global z) {
      std::fill(z.data.begin(), z.data.end(), 0.0);
      return z;
    };
    Global y = zeros_of(ct), dx = zeros_of(x), dw = zeros_of(w);
    add_products(group, x, w, y, sizes);
    add_products(group, ct, w, dx, sizes);
    add_products(group, ct, x, dw, sizes);
    const Tensor<i32, Counts> counts(place(device, DType::i32, counted, s.counts));
    check_op<Tensor<D, Result>>(
        device,
        [&](const auto& leaves) {
          return grouped_einsum<O>(Tensor<D, Rows>(leaves[0]), Tensor<D, Weights>(leaves[1]), counts);
        },
        {place(device, dtype_v<D>, rows, x, 3), place(device, dtype_v<D>, weights, w, 4)}, {&rows, &weights}, ct,
        {y, {dx, dw}});
  }
}

TEST_CASE("grouped_einsum", "[ops]") {
#define GROUPED(dtype, rows, weights, result, counts) \
  check_grouped<dtype, rows ", " weights " -> " result, rows, weights, result, counts>
  on_meshes(ragged_meshes(), [&](const DevicePtr& device) {
    poison(*device);
    GROUPED(f32, "S/d/e M", "X/e M F", "S/d/e F", "P/d X/e")(device, 1, 2);
    GROUPED(f64, "S/d/e F", "X/e M F", "S/d/e M", "P/d X/e")(device, 2, 1);
    GROUPED(bf16, "S/d/e M", "X/e M F", "S/d/e F", "P/d X/e")(device, 1, 1);
    GROUPED(f32, "S/d/e M", "X/e M F/t", "S/d/e F/t", "P/d X/e")(device, 1, 1);
    GROUPED(f32, "S/d/e F/t", "X/e F/t M", "S/d/e M +t", "P/d X/e")(device, 1, 1);
    GROUPED(f32, "S/d/e H M", "X M H F", "S/d/e F H", "P/d/e X")(device, 1, 1);
    GROUPED(f32, "S/d/e H M", "X M F", "S/d/e F H", "P/d/e X")(device, 1, 1);
  });
#undef GROUPED
}

struct Parts {
  Tensor<f64, "R/d/e M"> rows;
  Tensor<f64, "X/e M F"> weights;
};
auto dispatched_loss(const Parts& w, const Tensor<i32, "P/d/e X">& counts) -> Tensor<f64, "+d +e +t"> {
  const auto received = all_to_all<"P/d/e X -> P/d X/e">(counts);
  const std::int64_t rows = w.rows.size("R");
  const auto here = ragged_all_to_all<"R/d/e M -> S/d/e M">(w.rows, counts, received, {{"S", 4 * rows}});
  const auto y = grouped_einsum<"S/d/e M, X/e M F -> S/d/e F">(here, w.weights, received);
  const auto back = ragged_all_to_all<"S/d/e F -> A/d/e F">(y, received, counts, {{"A", rows}});
  return to_partial<"+d +e -> +d +e +t">(sum<"A/d/e F -> +d +e">(sin(back)));
}

TEST_CASE("rows to their groups and back have the gradients of finite differences", "[ops]") {
  on_meshes({"d=1,e=1,t=1", "d=1,e=2,t=1", "d=2,e=2,t=1", "d=1,e=4,t=1"}, [](const Mesh<"d e t">& on) {
    Global counts{{"P", "X"}, {4, 4}, {2, 0, 1, 3, 0, 0, 4, 1, 1, 2, 3, 0, 6, 0, 0, 0}};
    static const TensorSpec placed = parse_tensor("P/d/e X").spec;
    const Tensor<i32, "P/d/e X"> sent(place(on.device(), DType::i32, placed, counts));
    const Sizes sizes{{"R", 28}, {"M", 3}, {"X", 4}, {"F", 2}};
    const Parts w{random_normal<f64, "R/d/e M">(on, sizes, {1, 1}), random_normal<f64, "X/e M F">(on, sizes, {1, 2})};
    expect(check_gradients(on, {}, dispatched_loss, w, sent) > 0, "nothing was compared");
  });
}

}  // namespace
