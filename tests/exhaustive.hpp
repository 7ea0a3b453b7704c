// What the exhaustive tests share: specs that are made at run time, ops on values under such specs as the erased core
// carries them out, and the comparison with whole arrays on every mesh.
#pragma once

#include <concepts>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "op_case.hpp"
#include "shape_specs.hpp"
#include "shardlib/shardlib.hpp"

namespace shardlib::test {

/// A spec that owns its text.
struct Layout {
  std::string text;
  TensorSpec spec;

  explicit Layout(std::string s) : text(std::move(s)), spec(parse_tensor(text).spec) {}
  Layout(const Layout& other) : Layout(other.text) {}
  Layout& operator=(const Layout&) = delete;
};
inline std::vector<Layout> layouts(const std::vector<std::vector<std::string>>& dims) {
  std::vector<Layout> all;
  for (const auto& text : specs_of_any(dims)) all.emplace_back(text);
  return all;
}

inline Axes axes_of(const std::vector<const TensorSpec*>& specs) {
  detail::Small<std::string_view, 3 * max_axes> all;
  for (const auto* spec : specs) rules::collect_axes(*spec, all);
  Axes axes;
  for (auto axis : all) axes.push_back(axis);
  return axes;
}
inline std::string arrow(const std::string& from, const std::string& to) {
  return from + " -> " + to;
}

// ---- values under specs that only the run knows --------------------------------------------------------------------

/// The spec behind the text, for as long as the program runs: values point to theirs.
inline const TensorSpec& interned(std::string_view text) {
  static std::mutex mutex;
  static std::map<std::string, Layout, std::less<>> all;
  const std::scoped_lock lock(mutex);
  auto it = all.find(text);
  if (it == all.end()) it = all.try_emplace(std::string(text), std::string(text)).first;
  return it->second.spec;
}
inline std::string text_of(const TensorSpec& spec) {
  return std::string(to_string(spec).view());
}
template <std::same_as<TensorSpec> S>
const TensorSpec& interned(const S& spec) {
  return interned(std::string_view(text_of(spec)));
}
inline std::string text_of(const detail::ValuePtr& x) {
  return text_of(*x->spec);
}
/// The spec of x's cotangent on the axes, which are those of the whole op.
inline const TensorSpec& dual_of(const TensorSpec& x, const Axes& axes) {
  return interned(rules::dual(x, axes));
}
/// What a rule says the result is; a refusal fails the test. Lives as long as the program.
inline const TensorSpec& accepted(const rules::Verdict& verdict) {
  expect(verdict.ok(), "refused: " + std::string(verdict.why.view()));
  return interned(verdict.result);
}
inline detail::GlobalSizes sizes_of(const TensorSpec& spec) {
  detail::GlobalSizes sizes;
  for (const Dim& dim : spec.dims) sizes.push_back(size_of_dim(dim.name));
  return sizes;
}

/// One op: its result, as `record` makes it but without a tape.
inline detail::ValuePtr compute(const char* op, const DevicePtr& device, DType dtype, const TensorSpec& spec,
                                const detail::GlobalSizes& global, const detail::Kernel& kernel) {
  auto out = detail::make_value({op, {}, {}}, device, dtype, spec, global);
  out->storage->buffer = detail::run(kernel, *out);
  return out;
}
inline detail::ValuePtr compute(const char* op, const detail::ValuePtr& x, const TensorSpec& spec,
                                const detail::Kernel& kernel) {
  return compute(op, x->device, x->dtype, spec, sizes_of(spec), kernel);
}

/// sum, under the rule of sum.
inline detail::ValuePtr sum_to(const detail::ValuePtr& x, const TensorSpec& spec) {
  static_cast<void>(accepted(rules::sum(arrow(text_of(x), text_of(spec)), *x->spec)));
  return compute("sum", x, spec,
                 [&](const detail::Value& out) { return detail::reduce_kernel<kernels::detail::SumOp, f32>(*x, out); });
}
/// The transpose of broadcasting: a cotangent of the result's dims as that of an operand with some of them.
inline detail::ValuePtr unbroadcast_to(const detail::ValuePtr& ct, const TensorSpec& due) {
  if (ct->spec->rank() != due.rank()) return sum_to(ct, due);
  expect(*ct->spec == due, "the cotangent is `" + text_of(ct) + "`, due is `" + text_of(due) + "`");
  return ct;
}

/// Calls body(device, i) on each mesh for each i below what prepare() returned, with sizes that the meshes divide and,
/// after another prepare(), padded.
template <class Prepare, class Body>
void on_spec_meshes(const Prepare& prepare, const Body& body) {
  for (const bool padded : {false, true}) {
    std::optional<Padding> padding;
    if (padded) padding.emplace();
    const std::size_t cases = prepare();
    REQUIRE(cases > 0);
    for (const auto& mesh : spec_meshes()) {
      if (padded && mesh.ends_with("p=2")) continue;  // padding knows of no axis that shards nothing
      INFO(mesh << (padded ? ", padded" : ""));
      on_mesh(mesh, [&](const DevicePtr& device) {
        poison(*device);
        for (std::size_t i = 0; i < cases; ++i) body(device, i);
      });
    }
  }
}

/// The case's name on whatever it throws.
template <class F>
void named(const std::string& what, const F& f) {
  try {
    f();
  } catch (const Aborted&) {
    throw;
  } catch (const std::exception& e) {
    throw Failure(what + ": " + e.what());
  }
}

}  // namespace shardlib::test
