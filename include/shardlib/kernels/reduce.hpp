// Sums, maxima and argmax over any set of dims, in an order that depends on the sizes alone.
#pragma once

#include <cstdint>
#include <span>

#include "shardlib/device/exec.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib::kernels {

// A dtype is a DType, or a dtype_c<T> where the type is known.

/// Sums a dense array over the marked dims; the result is dense over the others, in order. bf16 sums in f32.
template <class AnyDType>
void sum(const Exec& exec, AnyDType dtype, const void* in, std::span<const std::int64_t> shape,
         std::span<const bool> summed, void* out);

/// The sum of the squares of n numbers, in one pass; summed as `sum` does, by pieces of one size.
template <class T>
accumulator_t<T> sum_of_squares(const Exec& exec, std::int64_t n, const T* in);

/// Maximum over the marked dims: a NaN wins, nothing at all gives -inf (the lowest integer). `part`, if given: of a
/// marked dim d only the first part[d] elements count.
template <class AnyDType>
void max(const Exec& exec, AnyDType dtype, const void* in, std::span<const std::int64_t> shape,
         std::span<const bool> reduced, void* out, std::span<const std::int64_t> part = {});

/// Index of the first greatest element (or of the first NaN) along the middle dim of (outer, n, inner), of which the
/// last `padding` elements do not count.
template <class AnyDType>
void argmax(const Exec& exec, AnyDType dtype, const void* in, std::int64_t outer, std::int64_t n, std::int64_t inner,
            i32* out, std::int64_t padding = 0);

}  // namespace shardlib::kernels

#ifndef SHARDLIB_COMPILED
#include "shardlib/kernels/impl/reduce.hpp"
#endif
