// Definitions of check_gradients.hpp.
#pragma once

#include "shardlib/interop/check_gradients.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "shardlib/compute/create.hpp"
#include "shardlib/compute/on_host.hpp"
#include "shardlib/kernels/philox.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/handle.hpp"

namespace shardlib::detail {

/// The number as the dtype stores it.
inline double rounded_to(DType dtype, double number) {
  return visit_dtype(dtype, [&]<class T>(T) {
    return static_cast<double>(static_cast<scalar_of<T>>(static_cast<T>(static_cast<scalar_of<T>>(number))));
  });
}

inline std::string six_digits(double number) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, number, std::chars_format::general, 6).ptr};
}

/// The index of element number i of an array.
inline Shape index_of(std::int64_t i, const Shape& shape) {
  Shape index = shape;
  for (int d = index.size(); d-- > 0;) {
    index[d] = i % shape[d];
    i /= shape[d];
  }
  return index;
}

/// A whole array on this device, which `gathered` returns.
struct WholeArray : HostNumbers {
  ValuePtr value;
  explicit WholeArray(const ValuePtr& whole) : HostNumbers(*whole), value(whole) {}
  /// The place of an element in memory, padding included.
  [[nodiscard]] std::int64_t offset(const Shape& index) const {
    std::int64_t at = 0;
    for (int i = 0; i < index.size(); ++i) at = at * value->local[i] + index[i];
    return at;
  }
};

/// The value with another number at a global index, on each device that holds the element.
inline ValuePtr with_number(const Value& x, const Shape& index, double number) {
  auto changed = detached(x);
  changed->storage = Handle<Storage>::make(allocate(*changed));
  const Buffer& shard = changed->storage->buffer;
  copy(shard, x.data());
  std::int64_t at = 0;
  for (int i = 0; i < index.size(); ++i) {
    const std::int64_t here = index[i] - first_index(x, i);
    if (here < 0 || here >= x.local[i]) return changed;
    at = at * x.local[i] + here;
  }
  visit_dtype(x.dtype, [&]<class T>(T) {
    const auto stored = static_cast<T>(static_cast<scalar_of<T>>(number));
    x.device->exec().copy(shard.as<T>() + at, &stored, sizeof stored);
  });
  return changed;
}

/// The value with other numbers, of which `numbers` has those of the whole array, padding included.
inline ValuePtr with_numbers(const Value& x, const WholeArray& whole, const std::vector<double>& numbers) {
  auto changed = detached(x);
  const Buffer shard = x.device->host_pool()->allocate(x.bytes());
  const HostNumbers to(shard, x.dtype);
  for (std::int64_t i = 0; i < x.count(); ++i) {
    Shape index = index_of(i, x.local);
    for (int d = 0; d < index.size(); ++d) index[d] += first_index(x, d);
    to.set(i, numbers[static_cast<std::size_t>(whole.offset(index))]);
  }
  changed->storage = Handle<Storage>::make(x.device->to_device(shard));
  return changed;
}

/// All elements of an array moved along a direction of random signs, and against it.
struct Direction {
  std::vector<double> above, below;
  double along = 0;    ///< how the loss changes between them, by the gradient
  double typical = 0;  ///< the size that such a sum has

  Direction(const Value& x, const WholeArray& numbers, const WholeArray& gradients, double step)
      : above(static_cast<std::size_t>(product(numbers.value->local))), below(above) {
    const std::int64_t n = product(x.global.logical);
    step /= std::sqrt(static_cast<double>(n));  // all of them move as far as one does that moves alone
    double squares = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t at = numbers.offset(index_of(i, x.global.logical));
      const double here = numbers[at], sign = kernels::bits(0, 0, static_cast<std::uint64_t>(i)) % 2 == 0 ? 1 : -1,
                   h = sign * step * std::max(1.0, std::abs(here));
      const double up = rounded_to(x.dtype, here + h), down = rounded_to(x.dtype, here - h);
      above[static_cast<std::size_t>(at)] = up;
      below[static_cast<std::size_t>(at)] = down;
      const double change = gradients[at] * (up - down);
      along += change;
      squares += change * change;
    }
    typical = std::sqrt(squares);
  }
};

/// Element number `i` of `count`, spread over n elements: one in each part of n, at a place that does not repeat itself
/// from row to row.
constexpr std::int64_t spread(std::int64_t i, std::int64_t count, std::int64_t n) {
  const std::int64_t first = n / count * i + std::min(i, n % count), part = n / count + (i < n % count ? 1 : 0);
  return first + static_cast<std::int64_t>(static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15U >> 33) % part;
}

/// Compares the gradients of leaves with differences of the loss, and keeps what it has found.
class GradientComparison {
 public:
  GradientComparison(const GradientCheck& how, std::span<const LeafGradient> leaves, DType loss_dtype,
                     FunctionRef<double(const std::vector<ValuePtr>&)> loss)
      : how_(how), leaves_(leaves), loss_dtype_(loss_dtype), loss_(loss) {
    for (const LeafGradient& leaf : leaves) {
      at_.push_back(leaf.value);
      const WholeArray& gradients = gradients_.emplace_back(gathered(*leaf.gradient));
      double& largest = maxima_.emplace_back(0);
      for (std::int64_t i = 0; i < product(gradients.value->local); ++i)
        if (!(std::abs(gradients[i]) <= largest)) largest = std::abs(gradients[i]);  // a NaN stays
    }
    if (!maxima_.empty()) largest_of_all_ = *std::max_element(maxima_.begin(), maxima_.end());
  }

  /// Compares leaf number k. Returns the number of elements that it has compared.
  std::int64_t compare(std::size_t k) {
    const Value& x = *leaves_[k].value;
    if (!std::isfinite(maxima_[k])) {
      add_wrong(k, "not finite everywhere");
      return 0;
    }
    const double epsilon = std::max(epsilon_of(x.dtype), epsilon_of(loss_dtype_));
    const double step = how_.step > 0 ? how_.step : std::cbrt(epsilon);
    const Leaf leaf{k, WholeArray(gathered(x)), epsilon, step, how_.tolerance > 0 ? how_.tolerance : 2 * step};
    const std::int64_t n = product(x.global.logical), count = std::min(n, std::max<std::int64_t>(how_.elements, 1));
    const bool fits = compare_elements(leaf, count, n);
    if (fits && count < n) compare_together(leaf, count, n);
    return count;
  }

  /// Throws what is wrong in the leaves that have been compared.
  void require_right() const {
    const std::string on_mesh = leaves_.empty() ? "" : " (mesh " + to_string(leaves_[0].value->device->axes()) + ")";
    if (!wrong_.empty())
      throw Error(
          "check_gradients: " + wrong_ +
          "; check the VJPs of the ops from there to the loss. Where the loss has a kink, no gradient fits: move "
          "the values away from it. A value under `stop_gradient` changes the loss, too: compute it before the call, "
          "and pass it as an argument" +
          on_mesh);
    if (too_coarse_ > 0)
      throw Error("check_gradients: the loss is too large for its dtype: rounding changes a difference by up to " +
                  six_digits(too_coarse_) +
                  " per unit, more than a wrong gradient might; use f64, or a mean in place of a sum" + on_mesh);
  }

 private:
  struct Leaf {
    std::size_t k;
    WholeArray numbers;
    double epsilon, step, tolerance;
  };

  /// Compares `count` of the leaf's n elements, one by one.
  bool compare_elements(const Leaf& leaf, std::int64_t count, std::int64_t n) {
    const Value& x = *leaves_[leaf.k].value;
    const WholeArray& gradients = gradients_[leaf.k];
    std::int64_t differ = 0;
    double worst = 0;
    std::string where;
    for (std::int64_t i = 0; i < count; ++i) {
      const Shape index = index_of(spread(i, count, n), x.global.logical);
      const double here = leaf.numbers[leaf.numbers.offset(index)], gradient = gradients[gradients.offset(index)];
      const double h = leaf.step * std::max(1.0, std::abs(here));
      const double above = rounded_to(x.dtype, here + h), below = rounded_to(x.dtype, here - h);
      const double up = loss_with(leaf.k, with_number(x, index, above)),
                   down = loss_with(leaf.k, with_number(x, index, below));
      const double slope = (up - down) / (above - below);
      // The loss is rounded as well.
      const double noise = 4 * leaf.epsilon * std::max(std::abs(up), std::abs(down)) / (above - below);
      const double wanted = leaf.tolerance * std::max(maxima_[leaf.k], std::abs(slope)), allowed = wanted + noise;
      const double excess = std::abs(gradient - slope) / allowed;
      if (gradient == slope || excess <= 1) {
        const bool hides = noise > leaf.tolerance * std::max(largest_of_all_, std::abs(slope));
        if (hides && std::abs(gradient - slope) > wanted) too_coarse_ = std::max(too_coarse_, noise);
        continue;
      }
      ++differ;
      if (differ > 1 && !(excess > worst)) continue;
      worst = excess;
      std::string place;
      for (const std::int64_t position : index) place += (place.empty() ? "" : ", ") + std::to_string(position);
      where = "[" + place + "], is " + six_digits(gradient) + ", but the loss changes by " + six_digits(slope) +
              " per unit (allowed is a difference of " + six_digits(allowed) + ")";
    }
    if (differ > 0)
      add_wrong(leaf.k, "wrong at " + std::to_string(differ) + " of " + std::to_string(count) +
                            " elements; its worst, at " + where);
    return differ == 0;
  }

  /// Compares all n elements at once, along one direction, where `count` of them have been compared.
  void compare_together(const Leaf& leaf, std::int64_t count, std::int64_t n) {
    const Value& x = *leaves_[leaf.k].value;
    const Direction direction(x, leaf.numbers, gradients_[leaf.k], leaf.step);
    const double up = loss_with(leaf.k, with_numbers(x, leaf.numbers, direction.above));
    const double down = loss_with(leaf.k, with_numbers(x, leaf.numbers, direction.below));
    const double change = up - down;
    const double noise = 4 * leaf.epsilon * std::max(std::abs(up), std::abs(down));
    const double wanted = leaf.tolerance * std::max(direction.typical, std::abs(change)), allowed = wanted + noise;
    const double difference = std::abs(change - direction.along);
    if (difference > wanted && difference <= allowed && noise > wanted)
      too_coarse_ = std::max(too_coarse_, noise / (2 * leaf.step));
    if (!(difference <= allowed))
      add_wrong(leaf.k, "wrong at some of its " + std::to_string(n) + " elements, but not at the " +
                            std::to_string(count) + " that were compared: a small move of all changes the loss by " +
                            six_digits(change) + ", not by " + six_digits(direction.along) +
                            " as the gradient says (allowed is a difference of " + six_digits(allowed) +
                            "); compare more of them with GradientCheck::elements");
  }

  double loss_with(std::size_t k, const ValuePtr& value) {
    at_[k] = value;
    const double result = loss_(at_);
    at_[k] = leaves_[k].value;
    return result;
  }

  void add_wrong(std::size_t k, const std::string& what) {
    const std::string& name = leaves_[k].name;
    wrong_ += (wrong_.empty() ? "" : "; ") + std::string("the gradient of ") +
              (name.empty() ? "the weight" : "`" + name + "`") + " is " + what;
  }

  const GradientCheck& how_;
  std::span<const LeafGradient> leaves_;
  DType loss_dtype_;
  FunctionRef<double(const std::vector<ValuePtr>&)> loss_;
  std::vector<ValuePtr> at_;  ///< the arguments of the loss
  std::vector<WholeArray> gradients_;
  std::vector<double> maxima_;  ///< the largest gradient of each leaf
  double largest_of_all_ = 0;
  std::string wrong_;
  double too_coarse_ = 0;  ///< what rounding changes a difference by, where that hides an error
};

SHARDLIB_INLINE std::int64_t compare_gradients(const GradientCheck& how, std::span<const LeafGradient> leaves,
                                               DType loss_dtype,
                                               FunctionRef<double(const std::vector<ValuePtr>&)> loss) {
  GradientComparison comparison(how, leaves, loss_dtype, loss);
  std::int64_t compared = 0;
  for (std::size_t k = 0; k < leaves.size(); ++k) compared += comparison.compare(k);
  comparison.require_right();
  return compared;
}

}  // namespace shardlib::detail
