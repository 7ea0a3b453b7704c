// Copies between strided layouts, and permutation of dims.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "shardlib/device/exec.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::kernels {

/// Copies every element of a strided array to another one. Strides are in elements; an input stride of 0 repeats.
SHARDLIB_INLINE void copy_strided(const Exec& exec, std::size_t element_size, std::span<const std::int64_t> shape,
                                  const void* in, std::span<const std::int64_t> in_strides, void* out,
                                  std::span<const std::int64_t> out_strides);

/// Sets every element of a strided array to zero.
SHARDLIB_INLINE void zero_strided(const Exec& exec, std::size_t element_size, std::span<const std::int64_t> shape,
                                  void* out, std::span<const std::int64_t> out_strides);

/// Reorders the dims of a dense array: dim d of the result is dim perm[d] of the input.
SHARDLIB_INLINE void permute(const Exec& exec, std::size_t element_size, const void* in,
                             std::span<const std::int64_t> shape, std::span<const int> perm, void* out);

}  // namespace shardlib::kernels

#ifndef SHARDLIB_COMPILED
#include "shardlib/kernels/impl/layout.hpp"
#endif
