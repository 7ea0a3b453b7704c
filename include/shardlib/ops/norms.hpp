// Ops along one whole dim: softmax, rms_norm, layer_norm, rope.
#pragma once

#include <cmath>

#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/kernels/rows.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/ops/reductions.hpp"
#include "shardlib/padding.hpp"
#include "shardlib/shapes.hpp"
#include "shardlib/tape.hpp"

namespace shardlib {
namespace detail {

/// A nonlinear op along a dim whose backward is one kernel of the cotangent and one saved tensor (the operand, or with
/// `from_result` the result): forward(exec, x, a, y), backward(exec, saved, ct, a, dx).
template <Op Name, Op Dim, bool from_result, dtype D, Spec S, class Forward, class Backward>
Tensor<D, S> normalise(const OpInfo& op, const Tensor<D, S>& x, Forward forward, Backward backward) {
  using X = Tensor<D, S>;
  static constexpr int dim = parsed<S>.find(Dim);
  const auto kernel = [forward](const Value& in, const Value& out) {
    Buffer result = allocate(out);
    forward(out.device->exec(), in.as<const D>(), along(in, dim), result.as<D>());
    return result;
  };
  const auto pull = [op, backward](const auto& ct, const auto& saved) {
    using Ct = std::remove_cvref_t<decltype(ct)>;
    return record<Name, Ct>(op, ct.device(), ct.value()->global,
                            [backward, ct = ct.value(), saved = saved.value()](const Value& out) {
                              Buffer result = allocate(out);
                              backward(out.device->exec(), saved->template as<const D>(), ct->template as<const D>(),
                                       along(out, dim), result.as<D>());
                              return result;
                            });
  };
  if constexpr (from_result)
    return record_unary<Name, X>(op, x, x.value()->global, kernel, vjp_of_result(x, pull));
  else
    return record_unary<Name, X>(op, x, x.value()->global, kernel, vjp(x, save(x), pull));
}

}  // namespace detail

template <Op Dim, dtype D, Spec S>
auto softmax(const Tensor<D, S>& x, Site site) -> Tensor<detail::after_t<detail::is_float<"softmax", D>, D>,
                                                         detail::result_of<rules::along, Op("softmax"), Dim, S>> {
  return detail::normalise<"softmax", Dim, true>(
      detail::Calling{"softmax", Dim, site}, x,
      [](const Exec& exec, const D* in, detail::Along a, D* y) {
        kernels::softmax(exec, in, y, a.outer, a.n, a.inner, a.padding);
      },
      [](const Exec& exec, const D* y, const D* ct, detail::Along a, D* dx) {
        kernels::softmax_backward(exec, y, ct, dx, a.outer, a.n, a.inner);
      });
}

template <Op Dim, dtype D, Spec S>
auto rms_norm(const Tensor<D, S>& x, double epsilon, Site site)
    -> Tensor<detail::after_t<detail::is_float<"rms_norm", D>, D>,
              detail::result_of<rules::along, Op("rms_norm"), Dim, S>> {
  return detail::normalise<"rms_norm", Dim, false>(
      detail::Calling{"rms_norm", Dim, site}, x,
      [epsilon](const Exec& exec, const D* in, detail::Along a, D* y) {
        kernels::rms_norm(exec, in, y, a.outer, a.n, a.inner, epsilon, a.padding);
      },
      [epsilon](const Exec& exec, const D* in, const D* ct, detail::Along a, D* dx) {
        kernels::rms_norm_backward(exec, in, ct, dx, a.outer, a.n, a.inner, epsilon, a.padding);
      });
}

template <Op Dim, dtype D, Spec S>
auto layer_norm(const Tensor<D, S>& x, double epsilon, Site site)
    -> Tensor<detail::after_t<detail::is_float<"layer_norm", D>, D>,
              detail::result_of<rules::along, Op("layer_norm"), Dim, S>> {
  return detail::normalise<"layer_norm", Dim, false>(
      detail::Calling{"layer_norm", Dim, site}, x,
      [epsilon](const Exec& exec, const D* in, detail::Along a, D* y) {
        kernels::layer_norm(exec, in, y, a.outer, a.n, a.inner, epsilon, a.padding);
      },
      [epsilon](const Exec& exec, const D* in, const D* ct, detail::Along a, D* dx) {
        kernels::layer_norm_backward(exec, in, ct, dx, a.outer, a.n, a.inner, epsilon, a.padding);
      });
}

namespace detail {

/// Turns each pair (i, i + n/2) of the dim by position * base^(-2i/n), or back (`sign` -1): an orthogonal map, so its
/// transpose is the turn back.
template <Op Length, Op Dim, class X>
X rotate(const OpInfo& op, const X& x, double base, std::int64_t offset, double sign) {
  using D = typename X::value_type;
  static constexpr int length = parsed<X::spec>.find(Length), dim = parsed<X::spec>.find(Dim);
  return record_unary<"rope", X>(
      op, x, x.value()->global,
      [base, offset, sign](const Value& in, const Value& out) {
        const std::int64_t n = in.local[dim], half = n / 2, positions = in.local[length];
        const std::int64_t first = offset + block_index(*in.device, in.spec->dims[length].axes) * positions;
        const auto strides = kernels::row_major(view(in.local));
        Buffer tables =
            in.device->pool()->allocate(static_cast<std::size_t>(2 * positions * half) * sizeof(scalar_of<D>));
        using T = scalar_of<D>;
        T* cosine = tables.as<T>();
        T* sine = cosine + positions * half;
        // A dry run has no table to fill.
        for (std::int64_t p = 0; p < positions && !in.device->is_dry(); ++p)
          for (std::int64_t i = 0; i < half; ++i) {
            const double angle =
                static_cast<double>(first + p) * std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(n));
            cosine[p * half + i] = static_cast<T>(std::cos(angle));
            sine[p * half + i] = static_cast<T>(sign * std::sin(angle));
          }
        Buffer result = allocate(out);
        // The loop runs over the first halves; each step turns one pair.
        Extents halves = in.local;
        halves[dim] = half;
        kernels::Dims along, table;
        for (int i = 0; i < in.local.size(); ++i) {
          along.push(strides[i]);
          table.push(i == length ? half : i == dim ? 1 : 0);
        }
        const std::int64_t skip = half * strides[dim];
        const D* a = in.as<const D>();
        D* b = result.as<D>();
        kernels::apply(
            out.device->exec(), view(halves),
            [](const D& u, const D& v, const T& c, const T& s, D& p, D& q) {
              const T x0 = static_cast<T>(u), x1 = static_cast<T>(v);
              p = static_cast<D>(x0 * c - x1 * s);
              q = static_cast<D>(x1 * c + x0 * s);
            },
            kernels::Operand<const D>(a, along), kernels::Operand<const D>(a + skip, along),
            kernels::Operand<const T>(cosine, table), kernels::Operand<const T>(sine, table),
            kernels::Operand<D>(b, along), kernels::Operand<D>(b + skip, along));
        return result;
      },
      vjp(x, save(),
          [op, base, offset, sign](const auto& ct) { return rotate<Length, Dim>(op, ct, base, offset, -sign); }));
}

}  // namespace detail

template <Op Length, Op Dim, dtype D, Spec S>
auto rope(const Tensor<D, S>& x, double base, std::int64_t offset, Site site)
    -> Tensor<detail::after_t<detail::is_float<"rope", D>, D>, detail::result_of<rules::rope, Length, Dim, S>> {
  const detail::Calling op{"rope", Dim, site};
  if (const DimSize size = x.value()->global[detail::parsed<S>.find(Dim)]; size.is_padded())
    detail::fail_padded(op, *x.device(), std::string_view(Dim), size,
                        "rotary embedding pairs its halves, which padding would move; choose a size that needs none");
  if (x.size(std::string_view(Dim)) % 2 != 0)
    throw Error(op.describe() + ": dim `" + std::string(std::string_view(Dim)) + "` has the odd size " +
                std::to_string(x.size(std::string_view(Dim))) + "; rotary embedding turns pairs (" +
                x.device()->describe() + ")");
  return detail::rotate<Length, Dim>(op, x, base, offset, 1.0);
}

}  // namespace shardlib
