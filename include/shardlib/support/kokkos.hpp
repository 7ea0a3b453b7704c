// Kokkos, whose headers the library includes here only.
#pragma once

// C++26 has no arithmetic between two enums, which Kokkos 4 does to lay out its teams' scratch memory. An operator of
// its own namespace does the same; later releases of Kokkos have no use for it.
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
