// Dropout with a mask that depends only on a key and the global index, so that the backward pass can compute it
// again.
#pragma once

#include <type_traits>

#include "shardlib/ops/create.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"

namespace shardlib {

namespace detail {
void require_probability(const OpInfo& op, double rate);
template <class D>
struct Dropout {
  float rate;
  RandomKey key;
  Buffer operator()(const Value& in, const Value& out) const;
};
struct DropoutVjp {
  double rate;
  RandomKey key;
  template <class Ct>
  auto operator()(const Ct& ct) const {
    return dropout(ct, rate, key);
  }
};
}  // namespace detail

/// Sets each element to zero with probability `rate`, else to x / (1 - rate) (Srivastava et al. 2014). The mask
/// depends on the key and the global index: it is the same on every mesh, and the op keeps nothing for the backward
/// pass. `dropout(x, 0.1, {seed, step})`
template <dtype D, Spec S>
auto dropout(const Tensor<D, S>& x, double rate, RandomKey key, Site site = Site::current())
    -> Tensor<detail::if_float<"dropout", D>, detail::result_of<rules::cast, true, true, S>> {
  const detail::Calling op{"dropout", {}, site};
  detail::require_probability(op, rate);
  return detail::record_unary<"dropout", Tensor<D, S>>(op, x, detail::sizes_of(x.value()),
                                                       detail::Dropout<D>{static_cast<float>(rate), key},
                                                       detail::vjp(x, detail::DropoutVjp{rate, key}));
}
namespace detail {
template <class... Args>
inline constexpr bool dropout_takes = false;
template <class D, Spec S, class Rate, class Key, class... Place>
inline constexpr bool dropout_takes<Tensor<D, S>, Rate, Key, Place...> =
    std::is_convertible_v<Rate, double>&& std::is_convertible_v<Key, RandomKey>;
}  // namespace detail
/// A compile error for other arguments.
template <class... Args>
requires(!detail::dropout_takes<Args...>) auto dropout(const Args&... args) {
  return detail::wrong_call<"dropout", "dropout(x, 0.1, {seed, stream})">(args...);
}

}  // namespace shardlib
