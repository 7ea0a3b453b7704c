// Includes Kokkos. The library includes its headers only here.
#pragma once

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
