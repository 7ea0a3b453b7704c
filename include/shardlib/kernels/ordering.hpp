// The order of the elements along a dim.
#pragma once

#include <cstdint>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib::kernels {

/// The indices of the first k elements of each row in ascending or descending order. The lower index of equal elements
/// comes first. NaN is greater than all numbers. Padding does not count. `out` has `rows` indices along the dim; those
/// after k are 0.
template <class AnyDType>
void argsort(const Exec& exec, AnyDType dtype, const void* x, const Along& a, bool descending, std::int64_t k, i32* out,
             std::int64_t rows);

}  // namespace shardlib::kernels

#ifndef SHARDLIB_COMPILED
#include "shardlib/kernels/impl/ordering.hpp"
#endif
