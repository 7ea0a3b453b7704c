// The optimizers' updates of one weight: functions for apply_nontemporal, with the parameters of a leaf's update. Those
// that write a leaf in place say how many moments they have.
#pragma once

#include <cmath>
#include <cstddef>

#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib::kernels::body {

struct AdamWNumbers {
  static constexpr std::size_t moments = 2;
  float beta1, beta2, epsilon, decay, rate;
  float correct1, correct2;  ///< correct the moments' bias towards zero
  float clip;                ///< factor of the gradient

  template <class G, class... Copy>
  SHARDLIB_FUNCTION void operator()(f32& w, f32& m0, f32& v0, const G& grad, Copy&... copies) const {
    const f32 g = clip * static_cast<f32>(grad);
    m0 = beta1 * m0 + (1 - beta1) * g;
    v0 = beta2 * v0 + (1 - beta2) * g * g;
    w -= rate * (m0 * correct1 / (std::sqrt(v0 * correct2) + epsilon) + decay * w);
    ((copies = Copy(w)), ...);
  }
};

struct SgdNumbers {
  static constexpr std::size_t moments = 1;
  float momentum, decay, rate, clip;
  bool nesterov;

  template <class G, class... Copy>
  SHARDLIB_FUNCTION void operator()(f32& w, f32& m, const G& grad, Copy&... copies) const {
    const f32 g = clip * static_cast<f32>(grad) + decay * w;
    m = momentum * m + g;
    w -= rate * (nesterov ? g + momentum * m : m);
    ((copies = Copy(w)), ...);
  }
};

struct LionNumbers {
  static constexpr std::size_t moments = 1;
  float beta1, beta2, decay, rate, clip;

  template <class G, class... Copy>
  SHARDLIB_FUNCTION void operator()(f32& w, f32& m, const G& grad, Copy&... copies) const {
    const f32 g = clip * static_cast<f32>(grad);
    const f32 mean = beta1 * m + (1 - beta1) * g;
    const f32 sign = mean > 0 ? 1.0F : mean < 0 ? -1.0F : mean;  // NaN stays
    m = beta2 * m + (1 - beta2) * g;
    w -= rate * (sign + decay * w);
    ((copies = Copy(w)), ...);
  }
};

/// Muon's momentum. `along` receives what is to be orthogonalized.
struct MuonMomentum {
  static constexpr std::size_t moments = 1;
  float momentum, clip;
  bool nesterov;

  template <class G>
  SHARDLIB_FUNCTION void operator()(f32& along, f32& m, const G& grad) const {
    const f32 g = clip * static_cast<f32>(grad);
    m = momentum * m + g;
    along = nesterov ? g + momentum * m : m;
  }
};

/// A step along a direction, which `size` multiplies.
struct StepAlong {
  static constexpr std::size_t moments = 0;
  float size, decay, rate;

  template <class... Copy>
  SHARDLIB_FUNCTION void operator()(f32& w, const f32& along, Copy&... copies) const {
    w -= rate * (size * along + decay * w);
    ((copies = Copy(w)), ...);
  }
};

/// The square of a gradient for Adafactor.
struct AdafactorSquare {
  float clip, epsilon;

  template <class G>
  SHARDLIB_FUNCTION void operator()(f32& square, const G& grad) const {
    const f32 g = clip * static_cast<f32>(grad);
    square = g * g + epsilon;
  }
};

/// A gradient over the root of its second moment: of a row's mean, times a column's over the mean of all rows.
struct AdafactorChange {
  float clip, rows;  ///< `rows`: their number

  template <class G>
  SHARDLIB_FUNCTION void operator()(f32& change, const G& grad, const f32& row) const {
    change = clip * static_cast<f32>(grad) / std::sqrt(row);
  }
  template <class G>
  SHARDLIB_FUNCTION void operator()(f32& change, const G& grad, const f32& row, const f32& col,
                                    const f32& sum_of_rows) const {
    change = clip * static_cast<f32>(grad) / (std::sqrt(row) * std::sqrt(col / (sum_of_rows / rows)));
  }
};

/// The factor of a leaf's changes, from the sums of their squares and of the weights' squares.
struct AdafactorFactor {
  float clip, least_scale, elements;
  bool scale_parameter;

  SHARDLIB_FUNCTION void operator()(f32& factor, const f32& changes, const f32& weights) const {
    const f32 size = std::sqrt(changes / elements) / clip, scale = std::sqrt(weights / elements);
    factor = size > 1 ? 1 / size : size <= 1 ? 1.0F : size;  // NaN stays
    if (scale_parameter) factor *= scale < least_scale ? least_scale : scale;
  }
};

struct ScaledElement {
  template <class X>
  SHARDLIB_FUNCTION void operator()(f32& y, const X& x, const f32& factor) const {
    y = static_cast<f32>(x) * factor;
  }
};

struct AddGradient {
  static constexpr std::size_t moments = 0;
  template <class G>
  SHARDLIB_FUNCTION void operator()(f32& sum, const G& grad) const {
    sum += static_cast<f32>(grad);
  }
};

struct EmaNumbers {
  static constexpr std::size_t moments = 0;
  float kept, added;

  template <class W>
  SHARDLIB_FUNCTION void operator()(f32& average, const W& weight) const {
    average = kept * average + added * static_cast<f32>(weight);
  }
};

}  // namespace shardlib::kernels::body
