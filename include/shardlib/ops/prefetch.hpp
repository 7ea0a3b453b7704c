// prefetch: starts the all_gathers of later layers before they are due. autodiff/overlap.hpp has the transfers in
// flight.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/types/entries.hpp"

namespace shardlib {

namespace detail {
/// The all_gathers of some layers, not yet started.
struct Gathers : Counted {
  virtual void start() const = 0;
};
template <class F, class Layer>
struct GathersOf final : Gathers {
  F gathers;
  std::vector<Layer> layers;
  GathersOf(const F& f, std::vector<Layer> some) : gathers(f), layers(std::move(some)) {}
  void start() const override {
    for (const Layer& layer : layers) static_cast<void>(gathers(layer));
  }
};
/// Whether the tape tracks the value.
bool is_tracked(const ValuePtr& value);
/// The identity: starts the gathers of `ahead` now, and those of `behind` in the backward pass.
ValuePtr prefetched(const OpInfo& op, const ValuePtr& x, const Handle<const Gathers>& ahead,
                    const Handle<const Gathers>& behind);
[[noreturn]] void fail_next(const OpInfo& op, const ValuePtr& x, std::size_t next, std::size_t layers);
/// As the public one. Without `again` the backward pass starts no gathers, because it has all that it needs.
template <class F, class Layer>
ValuePtr prefetched_layers(const OpInfo& op, const ValuePtr& x, const F& gathers, const std::vector<Layer>& layers,
                           std::size_t next, bool again) {
  using Some = GathersOf<F, Layer>;
  const auto here = layers.begin() + static_cast<std::ptrdiff_t>(next);
  const auto back = layers.rend() - static_cast<std::ptrdiff_t>(next);  // the layers before, the last one first
  const std::ptrdiff_t left = layers.end() - here, passed = again ? here - layers.begin() : 0;
  const std::ptrdiff_t ahead = left < 2 ? left : 2, behind = passed < 2 ? passed : 2;
  return prefetched(op, x, Handle<Some>::make(gathers, std::vector<Layer>(here, here + ahead)),
                    Handle<Some>::make(gathers, std::vector<Layer>(back, back + behind)));
}
}  // namespace detail

/// Returns x and prefetches weights. Call it before layer number `next`, and with `next` equal to the number of
/// layers after the last one. In the forward pass it starts the all_gathers in `gathers(layer)` of layer `next` and
/// of the one after it. When the backward pass comes back to this point, it starts those of the two layers before.
/// The gathers are asynchronous until the layer itself calls all_gather for the same weights. The transposes, which
/// sum gradients, are then asynchronous in the backward pass as well. `gathers` captures nothing, or numbers by
/// value. `x = prefetch(x, gathers, w.layers, i)`
template <dtype D, Spec S, class F, Spec N, class Layer>
auto prefetch(const Tensor<D, S>& x, const F& gathers, const Array<N, Layer>& layers, std::size_t next,
              Site site = Site::current()) -> std::enable_if_t<detail::owned_function<"prefetch", F>, Tensor<D, S>> {
  const detail::OpInfo op{"prefetch", {}, site};
  if (next > layers.size()) detail::fail_next(op, x.value(), next, layers.size());
  return Tensor<D, S>(detail::prefetched_layers<std::decay_t<F>, Layer>(op, x.value(), gathers, layers, next, true));
}

}  // namespace shardlib
