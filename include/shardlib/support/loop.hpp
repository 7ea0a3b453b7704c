// A loop whose iterations are independent.
#pragma once

#include <cstdint>

namespace shardlib::kernels {

/// Calls f(i) for i in [0, n). Iterations are independent even where pointers are equal (in-place operation): g++ is
/// told so and vectorises without comparing them; clang's way of saying it would warn wherever a body does not
/// vectorise.
template <class F>
inline void independent(std::int64_t n, const F& f) {
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC ivdep
#endif
  for (std::int64_t i = 0; i < n; ++i) f(i);
}

}  // namespace shardlib::kernels
