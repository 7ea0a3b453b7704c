// One op at one placement as a test: compared with its reference on whole arrays, on every mesh, forward and backward.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "reference.hpp"
#include "shardlib/shapes.hpp"

namespace shardlib::test {

/// The meshes of the op tests. Under mpirun those that have too many devices are left out.
inline const std::vector<std::string>& op_meshes() {
  static const std::vector<std::string> meshes{"d=1,t=1", "d=2,t=1", "d=1,t=2", "d=3,t=1",
                                               "d=1,t=3", "d=2,t=2", "d=2,t=3", "d=2,t=2,p=2"};
  return meshes;
}

/// Which pairings of operands and cotangents are equal by the adjoint law.
enum class Law {
  none,   ///< not linear
  each,   ///< linear in each operand: <op(x), ct> = <x_i, grad_i>
  joint,  ///< linear in all together: <op(x), ct> = sum of <x_i, grad_i>
};

struct Options {
  Law law = Law::each;
  double tolerance = 0;  ///< 0: the reference, rounded once to the result's dtype
  std::vector<Draw> draws{};
  bool gradient = true;
  bool padding = true;  ///< false: an error where its dims are padded
};

struct Case {
  struct Operand {
    DType dtype;
    const TensorSpec* spec;
    Draw draw;
  };
  std::string name;
  std::vector<Operand> in;
  DType dtype;
  const TensorSpec* out;
  std::function<detail::ValuePtr(const std::vector<detail::ValuePtr>&)> run;
  Reference reference;
  Options options;

  // The whole arrays, made once for all meshes.
  std::vector<Global> x{};
  Global y{};
  Global ct{};
  std::vector<Global> gradients{};

  [[nodiscard]] bool differentiable(std::size_t i) const {
    return options.gradient && is_floating(dtype) && is_floating(in[i].dtype);
  }

  void prepare() {
    if (!x.empty()) return;
    for (std::size_t i = 0; i < in.size(); ++i) x.push_back(random_global(*in[i].spec, in[i].draw, i));
    y = shell(*out);
    reference(x, y);
    ct = random_global(*out, Draw::odd, 77);
    Global value = y;
    const auto pairing = [&](const std::vector<Global>& operands) {
      reference(operands, value);
      double dot = 0;
      for (std::size_t i = 0; i < ct.data.size(); ++i) dot += ct.data[i] * value.data[i];
      return dot;
    };
    if (reference.pullback()) {
      for (const Global& operand : x) {
        gradients.push_back(operand);
        std::fill(gradients.back().data.begin(), gradients.back().data.end(), 0.0);
      }
      reference.pullback()(x, ct, gradients);
      return;
    }
    // Differences of a linear function are exact; others are taken in f64.
    const double h = options.law == Law::none ? 1e-4 : 1;
    std::vector<Global> at = x;
    for (std::size_t i = 0; i < in.size(); ++i) {
      Global gradient = x[i];
      if (differentiable(i))
        for (std::size_t k = 0; k < gradient.data.size(); ++k) {
          double& element = at[i].data[k];
          element = x[i].data[k] + h;
          const double up = pairing(at);
          element = x[i].data[k] - h;
          gradient.data[k] = (up - pairing(at)) / (2 * h);
          element = x[i].data[k];
        }
      gradients.push_back(std::move(gradient));
    }
  }
};

/// The case of f over operands of the types X.
template <class... X, class F>
Case make_case(std::string name, F f, Reference reference, Options options = {}) {
  using Out = std::invoke_result_t<F&, const X&...>;
  options.draws.resize(sizeof...(X), Draw::odd);
  Case c{std::move(name),      {},     dtype_v<typename Out::value_type>, &detail::parsed<Out::spec>, {},
         std::move(reference), options};
  std::size_t i = 0;
  (c.in.push_back({dtype_v<typename X::value_type>, &detail::parsed<X::spec>, options.draws[i++]}), ...);
  c.run = [f](const std::vector<detail::ValuePtr>& x) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return f(X(x[I])...).value();
    }
    (std::index_sequence_for<X...>{});
  };
  return c;
}

/// The case of an expression of one operand, x.
#define ONE(dtype, from, expression, reference, ...)                                                           \
  make_case<Tensor<dtype, from>>(#expression " of " #dtype " " from, [](const auto& x) { return expression; }, \
                                 reference, {__VA_ARGS__})

/// A sum and that of the terms' magnitudes, to which rounding errors are proportional.
struct Dot {
  double sum = 0;
  double magnitude = 0;
};
/// The dot products of what each device holds, summed: how a value pairs with a cotangent of its dual type.
inline Dot pair_up(const detail::Value& a, const detail::Value& b) {
  Dot mine, total;
  const Buffer of_a = a.on_host(), of_b = b.on_host();
  for (std::size_t i = 0; i < static_cast<std::size_t>(a.count()); ++i) {
    const double term = load_element(a.dtype, of_a.data(), i) * load_element(b.dtype, of_b.data(), i);
    mine.sum += term;
    mine.magnitude += std::abs(term);
  }
  const auto all = everybodys(*a.device, &mine, sizeof mine);
  for (std::size_t r = 0; r * sizeof mine < all.size(); ++r) {
    std::memcpy(&mine, all.data() + r * sizeof mine, sizeof mine);
    total.sum += mine.sum;
    total.magnitude += mine.magnitude;
  }
  return total;
}

/// The spec of the cotangent of `x`, on every axis of the mesh.
inline std::string dual_on(const Device& device, const TensorSpec& x) {
  Axes axes;
  for (const auto& axis : device.axes()) axes.push_back(axis.name);
  return std::string(to_string(rules::dual(x, axes)).view());
}

inline bool names_axes_of(const Device& device, const TensorSpec& spec) {
  detail::Small<std::string_view, 3 * max_axes> used;
  rules::collect_axes(spec, used);
  return std::all_of(used.begin(), used.end(), [&](auto axis) {
    return std::any_of(device.axes().begin(), device.axes().end(), [&](const auto& a) { return a.name == axis; });
  });
}

inline void check_backward(const DevicePtr& device, const Case& c, const std::vector<bool>& tracked) {
  const auto fits = [&](double actual, const Dot& expected, const std::string& what) {
    // Both sides of bf16 are rounded.
    const bool half = c.dtype == DType::bf16 || c.in[0].dtype == DType::bf16;
    const double tolerance = std::max(c.options.tolerance, half ? 0.01 : 0.0);
    expect(std::abs(actual - expected.sum) <= tolerance * expected.magnitude,
           what + ": " + show(actual) + " and " + show(expected.sum));
  };
  std::vector<detail::ValuePtr> x;
  std::vector<detail::Slot> leaves;
  for (std::size_t i = 0; i < c.in.size(); ++i) {
    auto value = place(device, c.in[i].dtype, *c.in[i].spec, c.x[i], i);
    if (tracked[i]) {
      value = detail::as_leaf(*value);
      leaves.push_back(value->slot);
    }
    x.push_back(std::move(value));
  }
  const auto y = c.run(x);
  const std::string dual = dual_on(*device, *c.out);
  const TensorSpec ct_spec = parse_tensor(dual).spec;
  const auto ct = place(device, c.dtype, ct_spec, c.ct, 7);
  const auto found = detail::Backward({{y->slot, ct}}, leaves).run();
  double pairings = 0;
  std::size_t leaf = 0;
  for (std::size_t i = 0; i < c.in.size(); ++i) {
    if (!tracked[i]) continue;
    const std::string what = "cotangent of operand " + show(i);
    const auto& gradient = found[leaf++];
    expect(gradient != nullptr, what + " is missing");
    expect(gradient->dtype == c.in[i].dtype, what + " has another dtype");
    const std::string due = dual_on(*device, *c.in[i].spec);
    const TensorSpec due_spec = parse_tensor(due).spec;
    expect_close(assemble(*gradient, due_spec), c.gradients[i], c.in[i].dtype, c.options.tolerance, what);
    const double pairing = c.options.law == Law::none ? 0 : pair_up(*x[i], *gradient).sum;
    if (c.options.law == Law::each) fits(pairing, pair_up(*y, *ct), "adjoint law of operand " + show(i));
    pairings += pairing;
  }
  const bool all = std::find(tracked.begin(), tracked.end(), false) == tracked.end();
  if (c.options.law == Law::joint && all) fits(pairings, pair_up(*y, *ct), "adjoint law");
}

/// Runs the case on this device; false if the mesh lacks one of its axes.
inline bool check_case(const DevicePtr& device, const Case& c) {
  bool fits = names_axes_of(*device, *c.out);
  for (const auto& operand : c.in) fits = fits && names_axes_of(*device, *operand.spec);
  if (!fits) return false;
  try {
    std::vector<detail::ValuePtr> x;
    std::vector<bool> tracked;
    for (std::size_t i = 0; i < c.in.size(); ++i) {
      x.push_back(place(device, c.in[i].dtype, *c.in[i].spec, c.x[i], i));
      tracked.push_back(c.differentiable(i));
    }
    const auto y = c.run(x);
    expect(y->dtype == c.dtype, "another dtype");
    expect(!y->slot, "a result is recorded although nothing is differentiated");
    expect_close(assemble(*y, *c.out), c.y, c.dtype, c.options.tolerance, "value");
    for (std::size_t i = 0; i < c.in.size(); ++i)
      expect_close(assemble(*x[i], *c.in[i].spec), c.x[i], c.in[i].dtype, 0, "operand after the op");
    const auto differentiable = std::count(tracked.begin(), tracked.end(), true);
    if (differentiable > 0) check_backward(device, c, tracked);
    if (differentiable > 1)
      for (std::size_t i = 0; i < c.in.size(); ++i) {
        std::vector<bool> alone(c.in.size(), false);
        alone[i] = tracked[i];
        if (alone[i]) check_backward(device, c, alone);
      }
  } catch (const Aborted&) {
    throw;
  } catch (const std::exception& e) {
    throw Failure(c.name + " on " + device->describe() + ": " + e.what());
  }
  return true;
}

/// Leaves the device's pool with memory that holds NaN, or -1: what an op does not write shows.
inline void poison(const Device& device) {
  if (device_kind() == DeviceKind::simulated) {  // which overwrites what is freed
    const Buffer all = device.pool()->allocate(std::size_t{1} << 18U);
    return;
  }
  std::vector<Buffer> blocks;
  for (std::size_t bytes = 64; bytes <= 8192; bytes += 64)
    for (int i = 0; i < 4; ++i) {
      blocks.push_back(device.pool()->allocate(bytes));
      const MemoryAccess open(blocks.back().device_memory());
      std::memset(blocks.back().data(), 0xff, bytes);
    }
}

/// Runs all cases on every mesh that has their axes, each at least once.
inline void check_cases_as_sized(std::vector<Case> cases, const std::vector<std::string>& meshes) {
  for (Case& c : cases) c.prepare();
  std::vector<int> runs(cases.size(), 0);
  for (const auto& mesh : meshes) {
    INFO(mesh);
    on_mesh(mesh, [&](const DevicePtr& device) {
      poison(*device);
      for (std::size_t i = 0; i < cases.size(); ++i)
        if (check_case(device, cases[i]) && device->rank() == 0) ++runs[i];
    });
  }
  // Ranks that are idle on a mesh count nothing, and few devices have no mesh with three axes.
  const bool has_all = !under_mpi() && device_kind() != DeviceKind::simulated;
  for (std::size_t i = 0; i < cases.size(); ++i)
    if (has_all && runs[i] == 0) FAIL(cases[i].name << " ran on no mesh");
}

/// The cases on every mesh, with sizes that it divides, and padded; the references know of no padding.
inline void check_cases(const std::vector<Case>& cases, const std::vector<std::string>& meshes = op_meshes()) {
  REQUIRE(!cases.empty());
  check_cases_as_sized(cases, meshes);
  std::vector<Case> padded;
  for (const Case& c : cases)
    if (c.options.padding) padded.push_back(c);
  const Padding padding;
  INFO("padded");
  check_cases_as_sized(std::move(padded), meshes);
}

/// The meshes for specs over d and t: 1, 2, 3, 4, 6 and 8 devices; on the last, all are replicated over a third axis.
inline const std::vector<std::string>& spec_meshes() {
  static const std::vector<std::string> meshes{"d=1,t=1", "d=2,t=1", "d=1,t=3", "d=2,t=2", "d=2,t=3", "d=2,t=2,p=2"};
  return meshes;
}

/// check_cases of an op's legal placements, which are the first `placements` cases, and of the others. Under MPI, on
/// devices other than the CPU and with a sanitizer it takes every seventh placement, as cases take longer there.
inline void check_placements(const std::vector<Case>& cases, std::size_t placements) {
  const bool all = !is_slow() && !under_mpi() && device_kind() == DeviceKind::cpu;
  std::vector<Case> taken;
  for (std::size_t i = 0; i < cases.size(); i += all || i >= placements ? 1 : 7) taken.push_back(cases[i]);
  check_cases(taken, spec_meshes());
}

}  // namespace shardlib::test
