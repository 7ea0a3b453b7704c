// A loop with independent iterations.
#pragma once

#include <cstdint>

namespace shardlib::kernels {

/// Calls f(i) for i in [0, n). The iterations are independent even if pointers are equal (in-place operation). A
/// pragma tells g++ so, which then vectorizes without comparing pointers. clang's pragma would warn about each body
/// that it cannot vectorize.
template <class F>
inline void independent(std::int64_t n, const F& f) {
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC ivdep
#endif
  for (std::int64_t i = 0; i < n; ++i) f(i);
}

}  // namespace shardlib::kernels
