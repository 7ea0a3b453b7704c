// Kernels that exist for floating dtypes alone.
#pragma once

#include <string>

#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::kernels::detail {

/// Calls f with an element of the dtype, which must be floating.
template <class AnyDType, class F>
void visit_floating(AnyDType dtype, const char* op, const F& f) {
  visit_dtype(dtype, [&]<class T>(T zero) {
    if constexpr (floating<T>)
      f(zero);
    else
      throw Error(std::string(op) + ": " + std::string(name(dtype_v<T>)) + " is not floating; use f32, bf16 or f64");
  });
}

}  // namespace shardlib::kernels::detail
