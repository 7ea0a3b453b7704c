// Definitions of norms.hpp.
#pragma once

#include "shardlib/compute/norms.hpp"

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "shardlib/compute/on_host.hpp"
#include "shardlib/kernels/body/positions.hpp"
#include "shardlib/runtime/bindings.hpp"
#include "shardlib/runtime/padding.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

template <class T>
void fill_rotary_tables(const Exec& exec, const RopeAngles& angles, PositionRun positions, std::int64_t n, double sign,
                        T* cosine, T* sine) {
  exec.for_items(positions.size, 0,
                 kernels::body::RotaryTable<T, RopeAngles>{angles, positions.first, n / 2, n, sign, cosine, sine});
}
#ifdef SHARDLIB_COMPILED
SHARDLIB_INSTANCE(fill_rotary_tables<f32>)
SHARDLIB_INSTANCE(fill_rotary_tables<f64>)
#endif

/// The derivative of <g, VJP(ct, x)> by x, for one row of elements `step` apart: `ct`, `g` and `x` begin at `first`. It
/// runs in f64.
inline void second_of_row(const RowsVjp& vjp, const HostNumbers& ct, const HostNumbers& g, const HostNumbers& x,
                          const HostNumbers& out, std::int64_t first, std::int64_t step, std::int64_t n) {
  const auto sum = [&](const auto& f) {
    double total = 0;
    for (std::int64_t i = 0; i < n; ++i) total += f(first + i * step);
    return total;
  };
  const auto set = [&](const auto& f) {
    for (std::int64_t i = 0; i < n; ++i) out.set(first + i * step, f(first + i * step));
  };
  const bool centered = vjp.kind == RowsVjp::Kind::layer;
  const auto size = static_cast<double>(n);
  const auto mean = [&](const HostNumbers& a) { return centered ? sum([&](auto i) { return a[i]; }) / size : 0; };
  const double of_ct = mean(ct), of_g = mean(g), of_x = mean(x);
  const auto c = [&](std::int64_t i) { return ct[i] - of_ct; };
  const auto h = [&](std::int64_t i) { return g[i] - of_g; };
  const auto y = [&](std::int64_t i) { return x[i] - of_x; };
  const double s = sum([&](auto i) { return c(i) * y(i); }), t = sum([&](auto i) { return h(i) * y(i); });
  if (vjp.kind == RowsVjp::Kind::softmax)  // of y (ct - <ct, y>)
    return set([&](auto i) { return h(i) * (c(i) - s) - c(i) * t; });
  // Of r (c - r^2 y <c, y> / n), where r = (<y, y> / n + epsilon)^(-1/2).
  const double r = 1 / std::sqrt(sum([&](auto i) { return y(i) * y(i); }) / size + vjp.epsilon),
               cube = r * r * r / size;
  const double q = sum([&](auto i) { return h(i) * c(i); });
  set([&](auto i) { return y(i) * (3 * cube * r * r * s * t / size - cube * q) - cube * (c(i) * t + h(i) * s); });
}

SHARDLIB_INLINE ValuePtr record_rows_vjp(const OpInfo& op, const ValuePtr& ct, const ValuePtr& x, const RowsVjp& vjp) {
  std::vector<EdgeSource> sources;
  if (ct->slot || x->slot) {
    sources.push_back({&ct, {&x}, [op, vjp](const ValuePtr& g, const Residuals& saved) {
                         return record_rows_vjp(op, g, saved.values[0], vjp);
                       }});
    sources.push_back({&x, {&ct, &x}, [op, vjp](const ValuePtr& g, const Residuals& saved) {
                         const ValuePtr &by = saved.values[0], &at = saved.values[1];
                         const Kernel kernel = [vjp, by, g, at](const Value& out) {
                           const Along a = along(out, vjp.dim);
                           const HostNumbers ct(*by), h(*g), numbers(*at);
                           return filled_on_host(out, [&](const HostNumbers& result) {
                             for (std::int64_t i = 0; i < out.count(); ++i) result.set(i, 0);  // padding
                             out.device->host_exec().for_each(a.rows(), [&](std::int64_t i) {
                               second_of_row(vjp, ct, h, numbers, result, a.offset(i), a.inner, a.counted());
                             });
                           });
                         };
                         return evaluate(make_recorded(op, by->device, by->dtype, *by->spec, by->global, {}), kernel);
                       }});
  }
  return evaluate(make_recorded(op, ct->device, ct->dtype, *ct->spec, ct->global, sources), vjp.kernel(ct, x));
}

SHARDLIB_INLINE void require_epsilon(const OpInfo& op, const ValuePtr& x, double epsilon) {
  if (epsilon >= 0 && std::isfinite(epsilon)) return;
  throw Error(op.describe() + ": the epsilon is " + show_number(epsilon) +
              ", of which no root can be taken; give a finite number that is not negative, such as 1e-6 (" +
              x->device->describe() + ")");
}

SHARDLIB_INLINE ValuePtr record_affine_norm_erased(AffineNormKernels norm,
                                                   const std::array<const TensorSpec*, 3>& due) {
  const std::array<ValuePtr, 3> operands{norm.x, norm.scale, norm.bias};
  const auto& device = norm.x->device;
  require_epsilon(norm.op, norm.x, norm.epsilon);
  Bindings names(norm.op, device);
  std::vector<Node::Edge> edges(norm.bias ? 3 : 2);
  std::array<bool, 3> wanted{};
  for (std::size_t i = 0; i < edges.size(); ++i) {
    names.bind(*operands[i]);
    edges[i].input = operands[i]->slot;
    wanted[i] = bool(operands[i]->slot);
  }
  auto out = make_value(norm.op, device, norm.result, *norm.x->spec, norm.x->global);
  for (ValuePtr* operand : {&norm.x, &norm.scale, &norm.bias})
    if (*operand) *operand = detached(**operand);
  edges[0].saved.values = {norm.x, norm.scale};
  attach(out, std::move(edges), [norm, wanted, due, count = edges.size()](const std::vector<ValuePtr>& cts) {
    const std::array operands{norm.x, norm.scale, norm.bias};
    const OpInfo op{norm.bias ? "layer_norm_backward" : "rms_norm_backward", norm.op.spec, {}};
    return fused_cotangents(op, std::span(operands).first(count), wanted, due,
                            [&](const Value& /*first*/, std::span<const ValuePtr> cotangents) {
                              norm.backward(norm, *cts[0], cotangents);
                            });
  });
  const std::array numbers{norm.epsilon};
  evaluate(
      out, [norm](const Value& shape) { return norm.forward(norm, shape); }, {}, numbers_in(numbers));
  return out;
}

SHARDLIB_INLINE void require_pairs(const OpInfo& op, const ValuePtr& x, int dim) {
  require_unpadded(op, x, dim,
                   "rotary embedding pairs its halves, which padding would move; choose a size that needs none");
  const std::int64_t size = x->global.logical[dim];
  if (size % 2 != 0)
    throw Error(op.describe() + ": dim `" + std::string(x->spec->dims[dim].name) + "` has the odd size " +
                std::to_string(size) + "; rotary embedding rotates pairs (" + x->device->describe() + ")");
}

}  // namespace shardlib::detail
