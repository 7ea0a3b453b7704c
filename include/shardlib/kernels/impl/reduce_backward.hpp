// Definitions of reduce_backward.hpp.
#pragma once

#include "shardlib/kernels/reduce_backward.hpp"

#include <cstddef>
#include <cstdint>
#include <span>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/body/reduce_backward.hpp"
#include "shardlib/kernels/impl/floating.hpp"
#include "shardlib/kernels/strided.hpp"

namespace shardlib::kernels {

namespace detail {

inline body::ReducedResults reduced_results(std::span<const std::int64_t> shape, std::span<const bool> reduced,
                                            std::span<const std::int64_t> part) {
  const Dims strides = row_major(shape);
  Nest<1> kept;
  Nest<1> taken;
  for (std::size_t d = 0; d < shape.size(); ++d)
    (reduced[d] ? taken : kept).push(reduced[d] && !part.empty() ? part[d] : shape[d], {strides[static_cast<int>(d)]});
  return {kept, taken};
}

}  // namespace detail

template <class AnyDType>
void extremum_backward(const Exec& exec, AnyDType dtype, const void* in, std::span<const std::int64_t> shape,
                       std::span<const bool> reduced, const void* extrema, const void* ct, void* out,
                       std::span<const std::int64_t> part) {
  const auto results = detail::reduced_results(shape, reduced, part);
  detail::visit_floating(dtype, "max", [&]<class T>(T) {
    exec.for_items(results.items(), 0,
                   body::ExtremumBackward<T>{results, static_cast<const T*>(in), static_cast<const T*>(extrema),
                                             static_cast<const T*>(ct), static_cast<T*>(out)});
  });
}

template <class AnyDType>
void prod_backward(const Exec& exec, AnyDType dtype, const void* in, std::span<const std::int64_t> shape,
                   std::span<const bool> reduced, const void* ct, void* out, std::span<const std::int64_t> part) {
  const auto results = detail::reduced_results(shape, reduced, part);
  detail::visit_floating(dtype, "prod", [&]<class T>(T) {
    exec.for_items(
        results.items(), 0,
        body::ProdBackward<T>{results, static_cast<const T*>(in), static_cast<const T*>(ct), static_cast<T*>(out)});
  });
}

}  // namespace shardlib::kernels
