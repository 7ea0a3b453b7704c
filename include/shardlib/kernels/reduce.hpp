// Sums, products, maxima, minima and argmax over any set of dims, and cotangents of some. The order of the operations
// depends only on the sizes.
#pragma once

#include <cstdint>
#include <span>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib::kernels {

// The type of `dtype` is DType, or that of dtype_c<T> if the dtype is known at compile time.

/// Reduces a dense array over the marked dims by SumOp, ProdOp, MaxOp or MinOp. The result is dense over the other
/// dims, in order. bf16 accumulates in f32; integers wrap around. If there is a NaN, a maximum or minimum is NaN.
/// Without elements the result is 0, 1, -inf (the lowest integer) or inf (the greatest). If `part` is given, only the
/// first part[d] elements of a marked dim d count.
template <class Op, class AnyDType>
void reduce(const Exec& exec, AnyDType dtype, const void* in, std::span<const std::int64_t> shape,
            std::span<const bool> reduced, void* out, std::span<const std::int64_t> part = {});

/// out = the sum of the squares of n numbers, in one pass over pieces of a fixed size, as in `reduce`.
template <class T>
void sum_of_squares(const Exec& exec, std::int64_t n, const T* in, accumulator_t<T>* out);

/// The index of the first maximum (or of the first NaN) of each row. Padding does not count; there is an element that
/// does.
template <class AnyDType>
void argmax(const Exec& exec, AnyDType dtype, const void* in, const Along& a, i32* out);

/// The cotangent of the operand of max or min, whose result is `extrema`. Among the elements that were reduced to one
/// result, the first that equals it (in row-major order; a NaN equals a NaN) gets its cotangent, the others 0. Elements
/// that do not count are not written.
template <class AnyDType>
void extremum_backward(const Exec& exec, AnyDType dtype, const void* in, std::span<const std::int64_t> shape,
                       std::span<const bool> reduced, const void* extrema, const void* ct, void* out,
                       std::span<const std::int64_t> part = {});

/// The cotangent of the operand of prod: the result's cotangent times the product of the other elements. This holds for
/// elements that are 0, too. Padding is not written.
template <class AnyDType>
void prod_backward(const Exec& exec, AnyDType dtype, const void* in, std::span<const std::int64_t> shape,
                   std::span<const bool> reduced, const void* ct, void* out, std::span<const std::int64_t> part = {});

}  // namespace shardlib::kernels

#ifndef SHARDLIB_COMPILED
#include "shardlib/kernels/impl/reduce.hpp"
#endif
