// Arguments that count elements, places or steps.
#pragma once

#include <cstdint>
#include <type_traits>

namespace shardlib {

namespace detail {
template <class N>
concept whole_number = std::is_convertible_v<N, std::int64_t> && !std::is_floating_point_v<N>;
}  // namespace detail

/// An integer as the argument of an op. A floating one does not compile, as C++ would drop its fraction:
/// `roll<"L">(x, 1)`
class WholeNumber {
 public:
  template <detail::whole_number N>
  constexpr WholeNumber(N n) : value_(static_cast<std::int64_t>(n)) {}  // NOLINT(google-explicit-constructor): a number
  constexpr operator std::int64_t() const { return value_; }            // NOLINT(google-explicit-constructor)

 private:
  std::int64_t value_;
};

}  // namespace shardlib
