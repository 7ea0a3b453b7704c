// Arrays from nothing: constants, indices, masks, random numbers; and a scalar back on the host.
#pragma once

#include "shardlib/kernels/random.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/ops/elementwise.hpp"
#include "shardlib/shapes.hpp"
#include "shardlib/tape.hpp"

namespace shardlib {
namespace detail {

inline GlobalSizes given_sizes(const OpInfo& op, const std::shared_ptr<Device>& device, const TensorSpec& spec,
                               const Sizes& sizes) {
  Bindings names(op, device);
  // Sizes of other names are welcome: one list serves a whole model.
  for (const NamedSize& given : sizes)
    if (spec.has(given.name)) names.bind(given);
  return names.sizes(spec);
}

/// The global index of this device's first element along a dim.
inline std::int64_t first_index(const Value& x, int dim) {
  return block_index(*x.device, x.spec->dims[dim].axes) * x.local[dim];
}

/// Fills an array element by element; `fill(D* data, const Value& out)`.
template <Op Name, class Out, class F>
Out create(const char* name, const std::shared_ptr<Device>& device, const Sizes& sizes, const Site& site, F fill) {
  using D = typename Out::value_type;
  const OpInfo op{name, Out::spec, site};
  return record<Name, Out>(op, device, given_sizes(op, device, parsed<Out::spec>, sizes), [fill](const Value& out) {
    Buffer result = allocate(out);
    if (!out.device->is_dry()) fill(result.as<D>(), out);
    return result;
  });
}

template <Op Name, class Out>
Out constant(const char* name, const std::shared_ptr<Device>& device, const Sizes& sizes, double value,
             const Site& site) {
  using D = typename Out::value_type;
  check_number(OpInfo{name, Out::spec, site}, parsed<Out::spec>, *device, dtype_v<D>, value);
  return create<Name, Out>(name, device, sizes, site,
                           [k = static_cast<D>(static_cast<scalar_of<D>>(value))](D* data, const auto& out) {
                             std::fill_n(data, out.count(), k);
                           });
}

}  // namespace detail

template <dtype D, Spec S, Spec A>
auto full(const Mesh<A>& mesh, Sizes sizes, double value, Site site)
    -> Tensor<D, detail::result_of<rules::create, Op("full"), A, S>> {
  return detail::constant<"full", Tensor<D, S>>("full", mesh.device(), sizes, value, site);
}
template <dtype D, Spec S, Spec A>
auto zeros(const Mesh<A>& mesh, Sizes sizes, Site site)
    -> Tensor<D, detail::result_of<rules::create, Op("zeros"), A, S>> {
  return detail::constant<"zeros", Tensor<D, S>>("zeros", mesh.device(), sizes, 0.0, site);
}
template <dtype D, Spec S, Spec A>
auto ones(const Mesh<A>& mesh, Sizes sizes, Site site)
    -> Tensor<D, detail::result_of<rules::create, Op("ones"), A, S>> {
  return detail::constant<"ones", Tensor<D, S>>("ones", mesh.device(), sizes, 1.0, site);
}

template <Spec S, Spec A>
auto iota(const Mesh<A>& mesh, DimSize size, Site site) -> Tensor<i32, detail::result_of<rules::iota, A, S>> {
  if (size.padded > std::int64_t{1} << 31)
    throw Error(detail::OpInfo{"iota", S, site}.describe() + ": the size " + detail::to_string(size) +
                " is more than i32 counts (" + mesh.device()->describe() + ")");
  const NamedSize only{std::string(detail::parsed<S>.dims[0].name), size.size, size.padded};
  return detail::create<"iota", Tensor<i32, S>>("iota", mesh.device(), {only}, site, [](i32* data, const auto& out) {
    const std::int64_t first = detail::first_index(out, 0);
    for (std::int64_t i = 0; i < out.count(); ++i) data[i] = static_cast<i32>(first + i);
  });
}

template <Spec S, Spec A>
auto causal_mask(const Mesh<A>& mesh, DimSize rows, DimSize columns, Site site)
    -> Tensor<bool_, detail::result_of<rules::create, Op("causal_mask"), A, S>> {
  static_assert(detail::parsed<S>.rank() == 2, "causal_mask: write two dims, rows and columns");
  const NamedSize row{std::string(detail::parsed<S>.dims[0].name), rows.size, rows.padded};
  const NamedSize column{std::string(detail::parsed<S>.dims[1].name), columns.size, columns.padded};
  return detail::create<"causal_mask", Tensor<bool_, S>>(
      "causal_mask", mesh.device(), {row, column}, site, [](bool_* data, const auto& out) {
        const std::int64_t first_row = detail::first_index(out, 0), first_column = detail::first_index(out, 1);
        for (std::int64_t i = 0; i < out.local[0]; ++i)
          for (std::int64_t j = 0; j < out.local[1]; ++j)
            data[i * out.local[1] + j] = first_row + i >= first_column + j;
      });
}

namespace detail {

/// Calls fill(local extents, global strides, global index of the first element per dim): what keys a number by its
/// global place in the array without padding.
template <class F>
void with_global_index(const Value& out, F fill) {
  Extents offsets;
  for (int i = 0; i < out.spec->rank(); ++i) offsets.push_back(first_index(out, i));
  fill(view(out.local), kernels::row_major(view(out.global.logical)).span(), view(offsets));
}

}  // namespace detail

#define SHARDLIB_RANDOM(name, kernel)                                                                               \
  template <dtype D, Spec S, Spec A>                                                                                \
  auto name(const Mesh<A>& mesh, Sizes sizes, RandomKey key, Site site)                                             \
      ->Tensor<detail::after_t<detail::is_float<#name, D>, D>, detail::result_of<rules::create, Op(#name), A, S>> { \
    return detail::create<#name, Tensor<D, S>>(#name, mesh.device(), sizes, site, [key](D* data, const auto& out) { \
      detail::with_global_index(out, [&](auto local, auto strides, auto offsets) {                                  \
        kernels::kernel(out.device->exec(), data, local, strides, offsets, key.seed, key.stream);                   \
      });                                                                                                           \
    });                                                                                                             \
  }
SHARDLIB_RANDOM(random_normal, fill_normal)
SHARDLIB_RANDOM(random_truncated_normal, fill_truncated_normal)
SHARDLIB_RANDOM(random_uniform, fill_uniform)
#undef SHARDLIB_RANDOM

template <dtype D, Spec S>
auto item(const Tensor<D, S>& x, Site site) -> std::enable_if_t<detail::checked<rules::item, S>::ok, D> {
  const detail::Calling op{"item", {}, site};
  return x.device()->is_dry() ? static_cast<D>(static_cast<detail::scalar_of<D>>(1)) : x.span()[0];
}

}  // namespace shardlib
