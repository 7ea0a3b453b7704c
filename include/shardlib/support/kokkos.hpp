// Includes Kokkos. The library includes its headers only here. With SHARDLIB_WITHOUT_KOKKOS, programs whose kernels
// start on GPUs do without it. SHARDLIB_KOKKOS_CUDA is the version of a Kokkos that starts kernels on GPUs. Only nvcc
// can compile its headers, so other compilers do without them.
#pragma once

#include <cstdlib>
#include <string>

#if !defined(SHARDLIB_WITHOUT_KOKKOS) && (!defined(SHARDLIB_KOKKOS_CUDA) || defined(__CUDACC__))
/// Is defined where Kokkos' headers are included.
#define SHARDLIB_KOKKOS_HEADERS

// C++26 has no arithmetic between two enums, but Kokkos 4 uses it to lay out its teams' scratch memory. This operator
// in its namespace does the same. Later releases of Kokkos do not need it.
#if __cplusplus > 202302L
#include <concepts>
#include <type_traits>
namespace Kokkos::Impl {
template <class A, class B>
requires(std::is_enum_v<A>&& std::is_enum_v<B> && !std::same_as<A, B> && std::convertible_to<A, int> &&
         std::convertible_to<B, int>) constexpr int
operator+(A a, B b) {
  return static_cast<int>(a) + static_cast<int>(b);
}
}  // namespace Kokkos::Impl
#endif

#include <Kokkos_Core.hpp>

#endif

namespace shardlib::detail {

/// "Kokkos 5.2.2"
inline std::string kokkos_text() {
#if defined(SHARDLIB_WITHOUT_KOKKOS)
  return "no Kokkos";
#elif defined(SHARDLIB_KOKKOS_CUDA)
  return "Kokkos " SHARDLIB_KOKKOS_CUDA;
#else
  return "Kokkos " + std::to_string(KOKKOS_VERSION / 10000) + "." + std::to_string(KOKKOS_VERSION / 100 % 100) + "." +
         std::to_string(KOKKOS_VERSION % 100);
#endif
}

/// Initializes Kokkos. Returns false if there is nothing to finalize, as when the program has done it. A Kokkos of GPUs
/// starts with the first kernel on a GPU (start_kokkos_on), because it would end a program on a machine without one.
inline bool initialize_kokkos() {
#if defined(SHARDLIB_WITHOUT_KOKKOS) || defined(SHARDLIB_KOKKOS_CUDA)
  return false;
#else
  if (Kokkos::is_initialized()) {
    return false;
  }
  // Its options belong in its environment variables: argv is the program's. Its warnings are about the binding of
  // threads, which is this library's.
#if KOKKOS_VERSION >= 30700
  Kokkos::initialize(Kokkos::InitializationSettings().set_disable_warnings(true));
#else
  Kokkos::initialize();
#endif
  return true;
#endif
}
inline void finalize_kokkos() {
#if !defined(SHARDLIB_WITHOUT_KOKKOS) && !defined(SHARDLIB_KOKKOS_CUDA)
  Kokkos::finalize();
#endif
}

#if defined(SHARDLIB_KOKKOS_CUDA) && defined(__CUDACC__)
/// Initializes Kokkos with a GPU, unless the program has, and finalizes it when the program ends.
inline void start_kokkos_on(int gpu) {
  if (Kokkos::is_initialized()) return;
  Kokkos::initialize(Kokkos::InitializationSettings().set_disable_warnings(true).set_device_id(gpu));
  std::atexit([] {
    if (Kokkos::is_initialized()) Kokkos::finalize();
  });
}
#endif

}  // namespace shardlib::detail
