// Factors of the learning rate and of the weight decay for the leaves of a tree, by patterns of their names.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/support/inline.hpp"
#include "shardlib/types/call_site.hpp"
#include "shardlib/types/leaves.hpp"

namespace shardlib {

/// The factors of an optimizer's learning rate and weight_decay for a leaf. An optimizer leaves a leaf of rate 0 as it
/// is, with its moments: the leaf is frozen.
struct LeafFactors {
  double rate = 1, decay = 1;  ///< factors of the learning rate and of the weight decay
};

namespace detail {
/// A compile error for a rule with a number in place of LeafFactors, or outside of a list.
struct WrongRules {
  struct Rule {
    template <class X>
    requires std::is_arithmetic_v<X> Rule(std::string_view /*pattern*/, X /*factor*/) {
      sentence<std::conditional_t<true, LeafFactors, X>>();
    }
  };
  WrongRules(std::initializer_list<Rule> /*rules*/) {}
  template <class X>
  requires std::is_arithmetic_v<X> WrongRules(std::string_view /*pattern*/, X /*factor*/) {
    sentence<std::conditional_t<true, LeafFactors, X>>();
  }
  template <class X = LeafFactors>
  WrongRules(std::string_view /*pattern*/, const LeafFactors& /*factors*/) {
    sentence<X>();
  }
  template <class X>
  static void sentence() {
    static_assert(std::is_void_v<X>,
                  "LeafRules: it takes a list of rules, of a pattern and LeafFactors each; write "
                  "LeafRules{{{\"*norm*\", {.decay = 0}}}}, and `.rate = 0` for leaves that are frozen");
  }
};
/// The first member of an optimizer. It makes `AdamW(1e-3)` a compile error, which would set the first setting and not
/// the learning rate.
struct NoRate {
  NoRate() = default;
  template <class X>
  NoRate(const X&) {  // NOLINT(google-explicit-constructor): it catches what stands there
    static_assert(
        std::is_void_v<X>,
        "the settings of an optimizer have names, as in `AdamW{.weight_decay = 0.1}`; weights and the rate are "
        "arguments of `update(weights, moments, grads, rate, scale, step, decays)`");
  }
};
/// The argument `step` of an optimizer's update. A floating-point number is a compile error: it is most often the
/// scale, which comes before the step.
struct StepNumber {
  std::int64_t number;
  Site site;  ///< the line of the update
  template <class X>
  requires std::is_arithmetic_v<X>
  constexpr StepNumber(X step,  // NOLINT(google-explicit-constructor): steps are numbers
                       Site at = Site::current())
      : number(static_cast<std::int64_t>(step)), site(at) {
    static_assert(std::is_integral_v<X>,
                  "update: the step is a whole number, and comes after the scale of the gradients; write "
                  "update(weights, moments, grads, rate, scale, step, decays)");
  }
};
}  // namespace detail

/// Whether the name matches the pattern; a `*` stands for any text. `leaf_matches("layers/*/b_*", "layers/3/b_up")`
[[nodiscard]] constexpr bool leaf_matches(std::string_view pattern, std::string_view name) {
  const auto star = pattern.find('*');
  if (star == std::string_view::npos) return pattern == name;
  if (!name.starts_with(pattern.substr(0, star))) return false;
  for (std::size_t i = star; i <= name.size(); ++i)
    if (leaf_matches(pattern.substr(star + 1), name.substr(i))) return true;
  return false;
}

/// The factors of leaves, for `update` in place of `decays`: those of the last pattern that a name has, else 1. A
/// pattern that is the last one of no leaf is a UsageError of `update`, `update_average` and `global_norm`. A rank of a
/// pipeline has a part of the leaves: give a function there, `[&](std::string_view name) { return rules(name); }`.
/// `LeafRules{{{"*/b_*", {.decay = 0}}, {"embed", {.rate = 0.1}}}}`
struct LeafRules {
  std::vector<std::pair<std::string, LeafFactors>> rules;  ///< patterns and factors

  /// No rules: all leaves have the factors 1.
  LeafRules() = default;
  /// A list of rules, of a pattern and factors each.
  LeafRules(std::vector<std::pair<std::string, LeafFactors>> list)  // NOLINT(google-explicit-constructor): in braces
      : rules(std::move(list)) {}
  /// A compile error for a rule that lacks its factors or its list.
  LeafRules(const detail::WrongRules& /*wrong*/) {}  // NOLINT(google-explicit-constructor): in braces

  [[nodiscard]] LeafFactors operator()(std::string_view name) const {
    LeafFactors factors;
    for (const auto& [pattern, of] : rules)
      if (leaf_matches(pattern, name)) factors = of;
    return factors;
  }
};

namespace detail {
/// Throws UsageError if none of the leaves has the pattern, which `giver`, such as "--freeze", has been given.
SHARDLIB_INLINE void require_match(const std::string& giver, std::string_view pattern,
                                   const std::vector<std::string>& leaves);
/// Throws UsageError if one of the rules applies to none of the leaves.
SHARDLIB_INLINE void require_effect(const LeafRules& rules, const std::vector<std::string>& leaves);
/// The same if `decays` is a LeafRules.
template <class Decays, class Tree>
void require_matches(const Decays& decays, Tree& tree) {
  if constexpr (std::is_same_v<Decays, LeafRules>) {
    if (decays.rules.empty()) return;
    std::vector<std::string> names;
    for (const auto& leaf : untyped_leaves(tree).leaves) names.push_back(leaf.name);
    require_effect(decays, names);
  }
}

/// Call it before the loop over the leaves, so that the sentence stands near the top of the compiler's output.
template <class F>
constexpr void require_factors() {
  constexpr bool takes_name = std::is_invocable_v<const F&, std::string_view>;
  static_assert(takes_name,
                "decays(name) of an optimizer takes the name of a leaf, [](std::string_view name) { return true; }");
  if constexpr (takes_name) {
    using Result = std::remove_cvref_t<std::invoke_result_t<const F&, std::string_view>>;
    static_assert(
        std::is_same_v<Result, bool> || std::is_same_v<Result, LeafFactors>,
        "decays(name) of an optimizer returns a bool, or LeafFactors: LeafFactors{.decay = 0.1} for a factor");
  }
}
/// The factors of a leaf from the result of decays(name): LeafFactors, or whether it decays.
template <class F>
[[nodiscard]] LeafFactors leaf_factors(const F& decays, std::string_view name) {
  if constexpr (std::is_same_v<std::remove_cvref_t<decltype(decays(name))>, LeafFactors>)
    return decays(name);
  else
    return {.decay = decays(name) ? 1.0 : 0.0};
}
}  // namespace detail

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/optim/impl/leaf_rules.hpp"
#endif
