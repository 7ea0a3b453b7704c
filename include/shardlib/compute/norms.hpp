// Kernels of ops along one unsharded dim, for a device's shard.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numbers>
#include <span>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/reductions.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/kernels/rows.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/ops/norms.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib {

/// How far a pair turns at a position. It stands here and not in impl/, because a kernel calls it.
SHARDLIB_FUNCTION inline double RopeAngles::operator()(std::int64_t position, std::int64_t pair,
                                                       std::int64_t width) const {
  const double frequency = std::pow(base, -2.0 * static_cast<double>(pair) / static_cast<double>(width));
  double kept = 0;  // the share of the frequency that stays undivided
  if (context > 0 && yarn) {
    const double pairs = static_cast<double>(width) / (2 * std::log(base));  // for a wavelength that is e times as long
    const double turns = static_cast<double>(context) / (2 * std::numbers::pi);
    double first = pairs * std::log(turns / beta_fast), last = pairs * std::log(turns / beta_slow);
    if (truncate) {
      first = std::floor(first);
      last = std::ceil(last);
    }
    // Bounds and step are those of transformers, so that loaded models have the same angles.
    first = std::fmax(first, 0.0);
    last = std::fmin(last, static_cast<double>(width - 1));
    if (first == last) last += 0.001;
    kept = 1 - std::fmin(std::fmax((static_cast<double>(pair) - first) / (last - first), 0.0), 1.0);
  } else if (context > 0) {  // by Llama 3.1's reference code, apply_scaling
    const double fits = static_cast<double>(context) * frequency / (2 * std::numbers::pi);
    kept = fits < low_freq_factor    ? 0
           : fits > high_freq_factor ? 1
                                     : (fits - low_freq_factor) / (high_freq_factor - low_freq_factor);
  }
  return static_cast<double>(position) * ((1 - kept) * frequency / factor + kept * frequency);
}

SHARDLIB_FUNCTION inline double RopeAngles::scale() const {
  return !yarn ? 1 : amplitude != 0 ? amplitude : 0.1 * std::log(factor) + 1;
}

namespace detail {

template <class D>
Buffer Softmax<D>::operator()(const Value& in, const Value& out) const {
  const Along a = along(in, dim);
  Buffer result = allocate(out);
  kernels::softmax(out.device->exec(), in.as<const D>(), result.as<D>(), a);
  return result;
}
template <class D>
Buffer SoftmaxBackward<D>::operator()(const Value& out) const {
  const Along a = along(out, dim);
  Buffer shard = allocate(out);
  kernels::softmax_backward(out.device->exec(), x->template as<const D>(), ct->template as<const D>(), shard.as<D>(),
                            a);
  return shard;
}

/// A VJP along one dim as a function of the cotangent, in which it is linear and its own transpose, and of x.
struct RowsVjp {
  enum class Kind { softmax, rms, layer } kind;
  int dim;
  double epsilon;
  std::function<Kernel(const ValuePtr& ct, const ValuePtr& x)> kernel;
};
SHARDLIB_INLINE ValuePtr record_rows_vjp(const OpInfo& op, const ValuePtr& ct, const ValuePtr& x, const RowsVjp& vjp);
template <class D>
RowsVjp rows_vjp(const SoftmaxBackward<D>& k) {
  return {RowsVjp::Kind::softmax, k.dim, 0, nullptr};
}
template <Norm kind, class D>
RowsVjp rows_vjp(const NormalizeBackward<kind, D>& k) {
  return {kind == Norm::rms ? RowsVjp::Kind::rms : RowsVjp::Kind::layer, k.dim, k.epsilon, nullptr};
}
template <class K>
ValuePtr record_rows_vjp(const OpInfo& op, const K& kernel) {
  RowsVjp vjp = rows_vjp(kernel);
  K shape = kernel;
  shape.ct = shape.x = nullptr;
  vjp.kernel = [shape](const ValuePtr& ct, const ValuePtr& x) {
    K k = shape;
    k.ct = ct;
    k.x = x;
    return Kernel(k);
  };
  return record_rows_vjp(op, kernel.ct, kernel.x, vjp);
}

template <Norm kind, class D>
Buffer Normalize<kind, D>::operator()(const Value& in, const Value& out) const {
  const Along a = along(in, dim);
  Buffer result = allocate(out);
  kernels::normalize<kind == Norm::layer>(out.device->exec(), in.as<const D>(), result.as<D>(), a, epsilon);
  return result;
}
template <Norm kind, class D>
Buffer NormalizeBackward<kind, D>::operator()(const Value& out) const {
  const Along a = along(out, dim);
  Buffer result = allocate(out);
  kernels::normalize_backward<kind == Norm::layer>(out.device->exec(), x->template as<const D>(),
                                                   ct->template as<const D>(), result.as<D>(), a, epsilon);
  return result;
}

/// The arguments, the dtype of the result, and the kernels for all dtypes.
struct AffineNormKernels : AffineNorm {
  DType result;
  Buffer (*forward)(const AffineNorm& norm, const Value& out);
  /// Writes the cotangents of x, scale and bias that are not null.
  void (*backward)(const AffineNorm& norm, const Value& ct, std::span<const ValuePtr> cotangents);
};
[[nodiscard]] SHARDLIB_INLINE ValuePtr record_affine_norm_erased(AffineNormKernels norm,
                                                                 const std::array<const TensorSpec*, 3>& due);
template <Norm kind, class D, class E, class R>
struct AffineNormOf {
  static constexpr bool centered = kind == Norm::layer;
  static Buffer forward(const AffineNorm& norm, const Value& out) {
    const Along a = along(*norm.x, norm.dim);
    Buffer result = allocate(out);
    kernels::affine_norm<centered>(out.device->exec(), norm.x->as<const D>(), norm.scale->as<const E>(),
                                   centered ? norm.bias->as<const E>() : nullptr, result.as<R>(), a, norm.epsilon);
    return result;
  }
  static void backward(const AffineNorm& norm, const Value& ct, std::span<const ValuePtr> cotangents) {
    const Along a = along(*norm.x, norm.dim);
    const auto memory = [&]<class T>(std::size_t i, T* /*type*/) {
      return cotangents[i] ? cotangents[i]->storage->buffer.as<T>() : nullptr;
    };
    E* const none = nullptr;
    kernels::affine_norm_backward<centered>(ct.device->exec(), norm.x->as<const D>(), norm.scale->as<const E>(),
                                            ct.as<const R>(), memory(0, static_cast<D*>(nullptr)), memory(1, none),
                                            centered ? memory(2, none) : nullptr, a, norm.epsilon);
  }
};
template <Norm kind, class D, class E, class R>
ValuePtr record_affine_norm(const AffineNorm& norm, const std::array<const TensorSpec*, 3>& due) {
  using Of = AffineNormOf<kind, D, E, R>;
  return record_affine_norm_erased({norm, dtype_v<R>, &Of::forward, &Of::backward}, due);
}

struct RotateElement {
  template <class D, class T>
  SHARDLIB_FUNCTION void operator()(const D& u, const D& v, const T& c, const T& s, D& p, D& q) const {
    const T x0 = static_cast<T>(u), x1 = static_cast<T>(v);
    p = static_cast<D>(x0 * c - x1 * s);
    q = static_cast<D>(x1 * c + x0 * s);
  }
};

/// Fills two tables, of the cosines and of the sines times `sign`, both times angles.scale(): a row of n / 2 for each
/// of the positions.
template <class T>
void fill_rotary_tables(const Exec& exec, const RopeAngles& angles, PositionRun positions, std::int64_t n, double sign,
                        T* cosine, T* sine);

template <class D>
Buffer Rotate<D>::operator()(const Value& in, const Value& out) const {
  const std::int64_t n = in.local[dim], half = n / 2, count = in.local[length];
  const auto& axes = in.spec->dims[length].axes;
  const auto strides = kernels::row_major(view(in.local));
  using T = scalar_of<D>;
  Buffer tables = in.device->pool()->allocate(static_cast<std::size_t>(2 * count * half) * sizeof(T));
  T* const cosine = tables.as<T>();
  T* const sine = cosine + count * half;
  std::int64_t row = 0;
  for (auto run :
       positions_of_shard(positions.order, shard_index(*in.device, axes), shard_count(*in.device, axes), count)) {
    run.first += positions.first;
    if (run.size > 0)
      fill_rotary_tables(in.device->exec(), angles, run, n, sign, cosine + row * half, sine + row * half);
    row += run.size;
  }
  Buffer result = allocate(out);
  // The loop runs over the first half of the dim; each step rotates one pair.
  Shape halves = in.local;
  halves[dim] = half;
  kernels::DimVector along, table;
  for (int i = 0; i < in.local.size(); ++i) {
    along.push(strides[i]);
    table.push(i == length ? half : i == dim ? 1 : 0);
  }
  const std::int64_t skip = half * strides[dim];
  const D* a = in.as<const D>();
  D* b = result.as<D>();
  kernels::apply(out.device->exec(), view(halves), RotateElement{}, kernels::Operand<const D>(a, along),
                 kernels::Operand<const D>(a + skip, along), kernels::Operand<const T>(cosine, table),
                 kernels::Operand<const T>(sine, table), kernels::Operand<D>(b, along),
                 kernels::Operand<D>(b + skip, along));
  return result;
}

}  // namespace detail
}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/norms.hpp"
#endif
