// The order of the elements along the middle dim of (outer, n, inner).
#pragma once

#include <cstdint>

#include "shardlib/device/exec.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib::kernels {

/// The indices of the first k elements of each row in ascending or descending order, k <= n - padding. The
/// lower index of equal elements comes first. NaN is greater than all numbers. The last `padding` elements do not
/// count. `out` has `rows` indices along the middle dim; those after k are 0.
template <class AnyDType>
void argsort(const Exec& exec, AnyDType dtype, const void* x, std::int64_t outer, std::int64_t n, std::int64_t inner,
             std::int64_t padding, bool descending, std::int64_t k, i32* out, std::int64_t rows);

}  // namespace shardlib::kernels

#ifndef SHARDLIB_COMPILED
#include "shardlib/kernels/impl/ordering.hpp"
#endif
