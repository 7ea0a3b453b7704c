// Einsum of one or two dense arrays, based on matrix products.
#pragma once

#include <cstdint>
#include <span>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/einsum_plan.hpp"

namespace shardlib::kernels {

// The type of `dtype` is DType, or that of dtype_c<T> if the dtype is known at compile time.

/// result = einsum(lhs, rhs), plus the result before if `add` is set; the result then has the dtype of accumulation.
/// All arrays are dense and row-major. bf16 accumulates in f32 and is rounded once.
template <class AnyIn, class AnyOut>
void einsum(const Exec& exec, const EinsumPlan& plan, AnyIn in, AnyOut out, const void* lhs,
            std::span<const std::int64_t> lhs_shape, const void* rhs, std::span<const std::int64_t> rhs_shape,
            void* result, bool add = false);

/// result = einsum(operand): sums over the ids that `out` lacks and permutes the others.
template <class AnyIn, class AnyOut>
void einsum1(const Exec& exec, AnyIn in, AnyOut out, std::span<const int> in_ids, std::span<const std::int64_t> shape,
             std::span<const int> out_ids, const void* operand, void* result);

}  // namespace shardlib::kernels

#ifndef SHARDLIB_COMPILED
#include "shardlib/kernels/impl/einsum.hpp"
#endif
