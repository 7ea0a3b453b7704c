// Instances of templates for every dtype, compiled into shardlib::compiled: reductions.
#pragma once

#include <cstdint>
#include <span>

#include "shardlib/spec/dtype.hpp"

#ifdef SHARDLIB_COMPILED

#include "shardlib/kernels/impl/reduce.hpp"

namespace shardlib::kernels {

#define SHARDLIB_INSTANTIATE(Op)                                                                   \
  template void reduce<detail::Op>(const Exec&, DType, const void*, std::span<const std::int64_t>, \
                                   std::span<const bool>, void*, std::span<const std::int64_t>);
SHARDLIB_INSTANTIATE(SumOp)
SHARDLIB_INSTANTIATE(ProdOp)
SHARDLIB_INSTANTIATE(MaxOp)
SHARDLIB_INSTANTIATE(MinOp)
#undef SHARDLIB_INSTANTIATE
template void extremum_backward(const Exec&, DType, const void*, std::span<const std::int64_t>, std::span<const bool>,
                                const void*, const void*, void*, std::span<const std::int64_t>);
template void prod_backward(const Exec&, DType, const void*, std::span<const std::int64_t>, std::span<const bool>,
                            const void*, void*, std::span<const std::int64_t>);
template void sum_of_squares(const Exec&, std::int64_t, const f32*, f32*);
template void sum_of_squares(const Exec&, std::int64_t, const bf16*, f32*);
template void argmax(const Exec&, DType, const void*, std::int64_t, std::int64_t, std::int64_t, i32*, std::int64_t);

}  // namespace shardlib::kernels

#endif
