// Every small tensor spec over given dims and axes, for exhaustive tests of the rules.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/spec/dtype.hpp"
#include "shardlib/spec/spec.hpp"

namespace shardlib::test {

/// All specs that have exactly these dims, in this order, with every placement of the axes d and t: replicated,
/// partial, or on a dim, in both orders where they share one.
inline std::vector<std::string> specs_of(const std::vector<std::string>& dims) {
  const int n = static_cast<int>(dims.size());
  std::vector<std::string> specs;
  const auto emit = [&](int d, int t, bool d_first) {
    std::string spec;
    for (int i = 0; i < n; ++i) {
      spec += (i > 0 ? " " : "") + dims[static_cast<std::size_t>(i)];
      if (d == i && d_first) spec += "/d";
      if (t == i) spec += "/t";
      if (d == i && !d_first) spec += "/d";
    }
    if (d == n) spec += spec.empty() ? "+d" : " +d";
    if (t == n) spec += spec.empty() ? "+t" : " +t";
    specs.push_back(spec);
  };
  for (int d = 0; d <= n + 1; ++d)  // a dim, n: partial, n + 1: replicated
    for (int t = 0; t <= n + 1; ++t) {
      emit(d, t, true);
      if (d == t && d < n) emit(d, t, false);
    }
  return specs;
}

/// The same for each of several lists of dims.
inline std::vector<std::string> specs_of_any(const std::vector<std::vector<std::string>>& lists) {
  std::vector<std::string> all;
  for (const auto& dims : lists)
    for (auto& spec : specs_of(dims)) all.push_back(spec);
  return all;
}

/// Those of the dims A and B, for types.
inline constexpr std::array<std::string_view, 18> two_dims{
    "A/d/t B", "A/t/d B",  "A/d B/t",  "A/d B +t",  "A/d B",  "A/t B/d", "A B/d/t", "A B/t/d", "A B/d +t",
    "A B/d",   "A/t B +d", "A B/t +d", "A B +d +t", "A B +d", "A/t B",   "A B/t",   "A B +t",  "A B"};

/// The dtypes, which take turns from spec to spec: of floating point, and with an integer.
template <std::size_t I>
using turn_of = std::tuple_element_t<I % 3, std::tuple<f32, bf16, f64>>;
template <std::size_t I>
using turn_of_all = std::tuple_element_t<I % 4, std::tuple<f32, bf16, f64, i32>>;

/// Calls f with 0 to n - 1, each a constant.
template <std::size_t N, class F>
void each(const F& f) {
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    (f(std::integral_constant<std::size_t, I>{}), ...);
  }
  (std::make_index_sequence<N>{});
}

}  // namespace shardlib::test
