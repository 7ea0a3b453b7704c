// Loops with independent iterations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "shardlib/support/function.hpp"

namespace shardlib::kernels {

/// Calls f(i) for i in [0, n). The iterations are independent even if pointers are equal (in-place operation). A
/// pragma tells g++ so, which then vectorizes without comparing pointers. clang's pragma would warn about each body
/// that it cannot vectorize.
SHARDLIB_EITHER_SIDE template <class F>
SHARDLIB_FUNCTION inline void independent(std::int64_t n, const F& f) {
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDA_ARCH__)
#pragma GCC ivdep
#endif
  for (std::int64_t i = 0; i < n; ++i) f(i);
}

/// Applies F to contiguous elements of arrays of types T... The only loop that contains F: code that does not depend on
/// it calls `run` through a pointer.
template <class F, class... T>
struct ElementLoop {
  static void run(const void* f, std::int64_t n, std::byte* const* data) {
    run(*static_cast<const F*>(f), n, data, std::index_sequence_for<T...>{});
  }
  template <std::size_t... I>
  static void run(const F& f, std::int64_t n, std::byte* const* data, std::index_sequence<I...> /*operands*/) {
    unit(n, f, reinterpret_cast<T*>(data[I])...);
  }
  static void unit(std::int64_t n, const F& f, T*... p) {
    independent(n, [f, p...](std::int64_t i) { f(p[i]...); });  // copies f, so that stores cannot change it
  }
};

}  // namespace shardlib::kernels
