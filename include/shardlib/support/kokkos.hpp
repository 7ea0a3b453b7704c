// Includes Kokkos. The library includes its headers only here. With SHARDLIB_WITHOUT_KOKKOS, programs whose kernels
// start on GPUs do without it.
#pragma once

#include <string>

#if !defined(SHARDLIB_WITHOUT_KOKKOS)

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
#else
  return "Kokkos " + std::to_string(KOKKOS_VERSION / 10000) + "." + std::to_string(KOKKOS_VERSION / 100 % 100) + "." +
         std::to_string(KOKKOS_VERSION % 100);
#endif
}

/// Initializes Kokkos. Returns false if there is nothing to finalize, as when the program has done it.
inline bool initialize_kokkos() {
#if defined(SHARDLIB_WITHOUT_KOKKOS)
  return false;
#else
  if (Kokkos::is_initialized()) return false;
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
#if !defined(SHARDLIB_WITHOUT_KOKKOS)
  Kokkos::finalize();
#endif
}

}  // namespace shardlib::detail
