// Cotangents of reductions over any set of dims: max, min, prod.
#pragma once

#include <cstdint>
#include <span>

#include "shardlib/device/exec.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib::kernels {

/// The cotangent of the operand of max or min, whose result is `extrema`. Of the elements that were reduced to one,
/// the first that equals it (in row-major order; a NaN equals a NaN) gets the cotangent of the result, the others 0.
/// It does not write the elements that do not count.
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
#include "shardlib/kernels/impl/reduce_backward.hpp"
#endif
