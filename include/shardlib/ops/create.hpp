// Ops that create arrays: constants, indices, masks, random numbers. `item` reads a scalar back on the host.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/ops/sequences.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/types/tree.hpp"

namespace shardlib {

// Sizes are global, before sharding. Padding is zero.

namespace detail {
/// Records an array with every element equal to `value`. `sizes` gives the size of each dim in the spec.
ValuePtr create_constant(const OpInfo& op, const DevicePtr& device, DType dtype, const TensorSpec& spec,
                         const Sizes& sizes, double value);
ValuePtr create_iota(const OpInfo& op, const DevicePtr& device, const TensorSpec& spec, DimSize size);
ValuePtr create_positions(const OpInfo& op, const DevicePtr& device, const TensorSpec& spec, DimSize size,
                          SequenceOrder order);
ValuePtr create_causal_mask(const OpInfo& op, const DevicePtr& device, const TensorSpec& spec, DimSize rows,
                            DimSize columns);
enum class Distribution { normal, truncated_normal, uniform };

/// The spec of what an op creates. All parameters have types, for nvcc as in named_result_of.
template <OpName Name, Spec A, Spec S>
inline constexpr Spec created = result_of<rules::create, Name, A, S>;
}  // namespace detail

/// An array of one value. `full<f32, "B/d L">(mesh, {{"B", 8}, {"L", 16}}, 1.0)`
template <dtype D, Spec S, Spec A>
auto full(const Mesh<A>& mesh, Sizes sizes, double value, Site site = Site::current())
    -> Tensor<D, detail::created<"full", A, S>> {
  return Tensor<D, S>(
      detail::create_constant({"full", S, site}, mesh.device(), dtype_v<D>, detail::parsed<S>, sizes, value));
}
/// An array of zeros. `zeros<f32, "B/d L">(mesh, {{"B", 8}, {"L", 16}})`
template <dtype D, Spec S, Spec A>
auto zeros(const Mesh<A>& mesh, Sizes sizes, Site site = Site::current()) -> Tensor<D, detail::created<"zeros", A, S>> {
  return Tensor<D, S>(
      detail::create_constant({"zeros", S, site}, mesh.device(), dtype_v<D>, detail::parsed<S>, sizes, 0));
}
/// An array of ones. `ones<f32, "B/d L">(mesh, {{"B", 8}, {"L", 16}})`
template <dtype D, Spec S, Spec A>
auto ones(const Mesh<A>& mesh, Sizes sizes, Site site = Site::current()) -> Tensor<D, detail::created<"ones", A, S>> {
  return Tensor<D, S>(
      detail::create_constant({"ones", S, site}, mesh.device(), dtype_v<D>, detail::parsed<S>, sizes, 1));
}
/// 0, 1, 2, ... along one dim. The elements are global indices under every sharding. `iota<"L/t">(mesh, 128)`, padded
/// `iota<"L/t">(mesh, {125, 128})`
template <Spec S, Spec A>
auto iota(const Mesh<A>& mesh, DimSize size, Site site = Site::current())
    -> Tensor<i32, detail::result_of<rules::iota, A, S>> {
  return Tensor<i32, S>(detail::create_iota({"iota", S, site}, mesh.device(), detail::parsed<S>, size));
}
SHARDLIB_FORM(iota, "iota<\"L\">(mesh, 128)`, whose dtype is `i32")
/// A compile error for a dtype, which zeros and full take.
template <dtype D, Spec S, class... Args>
auto iota(const Args&... args) {
  return detail::wrong_call<"iota", "iota<\"L\">(mesh, 128)`, or of another dtype `cast<f32>(iota<\"L\">(mesh, 128))">(
      args..., S);
}
/// The positions of a sequence's elements along one dim: those of iota, or in zigzag order.
/// `sequence_positions<"L/s">(mesh, 128, SequenceOrder::zigzag)`
template <Spec S, Spec A>
auto sequence_positions(const Mesh<A>& mesh, DimSize size, SequenceOrder order, Site site = Site::current())
    -> Tensor<i32, detail::result_of<rules::sequence_positions, A, S>> {
  return Tensor<i32, S>(
      detail::create_positions({"sequence_positions", S, site}, mesh.device(), detail::parsed<S>, size, order));
}
SHARDLIB_FORM(sequence_positions, "sequence_positions<\"L/s\">(mesh, 128, SequenceOrder::zigzag)")
/// True where the row may see the column: row >= column. Throws if there are fewer rows than columns.
/// `causal_mask<"Qlen Klen">(mesh, 128, 128)`
template <Spec S, Spec A>
auto causal_mask(const Mesh<A>& mesh, DimSize rows, DimSize columns, Site site = Site::current())
    -> Tensor<bool_, detail::created<"causal_mask", A, S>> {
  return Tensor<bool_, S>(
      detail::create_causal_mask({"causal_mask", S, site}, mesh.device(), detail::parsed<S>, rows, columns));
}
SHARDLIB_FORM(causal_mask, "causal_mask<\"Qlen Klen\">(mesh, 128, 128)")

/// Identifies a sequence of random numbers by a seed and a stream. Use a different stream for each array.
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
};

namespace detail {
template <class D>
ValuePtr create_random(const OpInfo& op, const DevicePtr& device, const TensorSpec& spec, const Sizes& sizes,
                       RandomKey key, Distribution distribution);
}  // namespace detail

/// Normal numbers of mean 0 and standard deviation 1. This op and the next two derive each number from the key and
/// the element's global index, so the array is the same on every mesh and with any padding.
/// `random_normal<f32, "M/t F">(mesh, sizes, {seed, 0})`
template <dtype D, Spec S, Spec A>
auto random_normal(const Mesh<A>& mesh, Sizes sizes, RandomKey key, Site site = Site::current())
    -> Tensor<detail::if_float<"random_normal", D>, detail::created<"random_normal", A, S>> {
  return Tensor<D, S>(detail::create_random<D>({"random_normal", S, site}, mesh.device(), detail::parsed<S>, sizes, key,
                                               detail::Distribution::normal));
}
/// Normal numbers within two standard deviations. `random_truncated_normal<f32, "M/t F">(mesh, sizes, {seed, 1})`
template <dtype D, Spec S, Spec A>
auto random_truncated_normal(const Mesh<A>& mesh, Sizes sizes, RandomKey key, Site site = Site::current())
    -> Tensor<detail::if_float<"random_truncated_normal", D>, detail::created<"random_truncated_normal", A, S>> {
  return Tensor<D, S>(detail::create_random<D>({"random_truncated_normal", S, site}, mesh.device(), detail::parsed<S>,
                                               sizes, key, detail::Distribution::truncated_normal));
}
/// Uniform in [0, 1). `random_uniform<f32, "M/t F">(mesh, sizes, {seed, 2})`
template <dtype D, Spec S, Spec A>
auto random_uniform(const Mesh<A>& mesh, Sizes sizes, RandomKey key, Site site = Site::current())
    -> Tensor<detail::if_float<"random_uniform", D>, detail::created<"random_uniform", A, S>> {
  return Tensor<D, S>(detail::create_random<D>({"random_uniform", S, site}, mesh.device(), detail::parsed<S>, sizes,
                                               key, detail::Distribution::uniform));
}

namespace detail {
/// The size of one dim as `{"B", 8}`, which is no list of sizes: `{{"B", 8}}`.
struct LoneSize {
  LoneSize(const char*, std::int64_t);  // NOLINT(google-explicit-constructor): for braces
};
}  // namespace detail
// Compile errors for calls without the mesh, the dtype, the spec, the names of the dims, the sizes, their outer braces
// or the last argument, and for a pipeline's mesh of all stages.
#define SHARDLIB_CREATES(name, more, Last)                                                               \
  template <dtype D, Spec S>                                                                             \
  auto name(const Sizes&, Last = {}) {                                                                   \
    return detail::wrong_call<#name, #name "<f32, \"B/d L\">(mesh, {{\"B\", 8}, {\"L\", 16}}" more ")">( \
        std::type_identity<D>(), S);                                                                     \
  }                                                                                                      \
  template <dtype D, Spec S, Spec A>                                                                     \
  auto name(const Mesh<A>&) {                                                                            \
    return name<D, S>(Sizes());                                                                          \
  }                                                                                                      \
  template <dtype D, Spec S, Spec A>                                                                     \
  requires(!std::is_same_v<Last, int>) auto name(const Mesh<A>&, const Sizes& sizes, ...) {              \
    return name<D, S>(sizes);                                                                            \
  }                                                                                                      \
  template <Spec S, Spec A>                                                                              \
  auto name(const Mesh<A>&, const Sizes& sizes, Last = {}) {                                             \
    return name<f32, S>(sizes);                                                                          \
  }                                                                                                      \
  template <dtype D, Spec S, Spec A, std::integral Size, std::size_t N>                                  \
  auto name(const Mesh<A>&, const Size(&)[N], Last = {}) {                                               \
    return name<D, S>(Sizes());                                                                          \
  }                                                                                                      \
  template <dtype D, Spec S, Spec A>                                                                     \
  auto name(const Mesh<A>&, const detail::LoneSize&, Last = {}) {                                        \
    return name<D, S>(Sizes());                                                                          \
  }                                                                                                      \
  template <dtype D, Spec S, class X>                                                                    \
  requires std::is_same_v<X, DevicePtr>                                                                  \
  auto name(const X&, const Sizes& sizes, Last = {}) {                                                   \
    return name<D, S>(sizes);                                                                            \
  }                                                                                                      \
  template <dtype D, Spec S, class X>                                                                    \
  requires requires {                                                                                    \
    X::stage_axes;                                                                                       \
  }                                                                                                      \
  auto name(const X& x, const Sizes& n, Last = {}) {                                                     \
    return detail::wrong_call<#name, #name "<f32, \"B/d L\">(mesh.stage(), sizes" more ")">(x, n);       \
  }                                                                                                      \
  template <tensor T, class M>                                                                           \
  requires detail::is_mesh<M>                                                                            \
  auto name(const M&, const Sizes& sizes, Last = {}) {                                                   \
    return name<f32, T::spec>(sizes);                                                                    \
  }                                                                                                      \
  template <class M>                                                                                     \
  requires detail::is_mesh<M>                                                                            \
  auto name(const M&, const Sizes& sizes, Last = {}) {                                                   \
    return name<f32, M::axes>(sizes);                                                                    \
  }
SHARDLIB_CREATES(full, ", 1.0", double)
SHARDLIB_CREATES(zeros, "", int)
SHARDLIB_CREATES(ones, "", int)
SHARDLIB_CREATES(random_normal, ", {seed, 0}", RandomKey)
SHARDLIB_CREATES(random_truncated_normal, ", {seed, 0}", RandomKey)
SHARDLIB_CREATES(random_uniform, ", {seed, 0}", RandomKey)
#undef SHARDLIB_CREATES

namespace detail {
/// Element 0 of the shard. Returns `planned` where shards have no memory.
template <class D>
D first_element(const ValuePtr& x, D planned);
}  // namespace detail

/// A scalar as a number on the host. Its spec must be "", so that every device reads the same number. A dry run, which
/// has no numbers, gets `planned`. `item(loss)`, `item(rows, 40)`
template <dtype D, Spec S>
auto item(const Tensor<D, S>& x, std::type_identity_t<detail::scalar_of<D>> planned = 1, Site site = Site::current())
    -> std::enable_if_t<detail::checked<rules::with_dtype<rules::item, dtype_v<D>>, S>::ok, D> {
  const detail::Calling op{"item", {}, site};
  return detail::first_element<D>(x.value(), static_cast<D>(planned));
}
/// A compile error for other arguments.
template <class... Args>
requires(!detail::tensor_first<Args...> && (detail::holds_tensor<Args>() || ...)) auto item(const Args&... args) {
  return detail::wrong_call<"item", "item(metrics.loss)">(args...);
}

}  // namespace shardlib
