// Definitions of trained.hpp.
#pragma once

#include "shardlib/run/trained.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "shardlib/compute/create.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::run {

namespace detail {

/// "layers/0/*=0.1" as pattern and factor; the factor is negative if the text has none.
struct GroupText {
  explicit GroupText(std::string_view text) : pattern(text.substr(0, text.rfind('='))) {
    if (double value = 0; pattern.size() < text.size() &&
                          shardlib::detail::parse_number(std::string(text.substr(pattern.size() + 1)), value) &&
                          std::isfinite(value))
      factor = value;
  }
  std::string_view pattern;
  double factor = -1;
};

}  // namespace detail

SHARDLIB_INLINE LeafFactors ParameterGroups::operator()(std::string_view leaf, bool decays) const {
  LeafFactors factors{.rate = 1, .decay = decays ? 1.0 : 0.0};
  const auto apply = [&](const std::vector<std::string>& texts, double& factor) {
    for (const std::string& text : texts)
      if (const detail::GroupText group(text); leaf_matches(group.pattern, leaf)) factor = group.factor;
  };
  apply(lr_mult, factors.rate);
  apply(decay_mult, factors.decay);
  if (std::ranges::any_of(freeze, [&](const std::string& pattern) { return leaf_matches(pattern, leaf); }))
    factors.rate = 0;
  return factors;
}

SHARDLIB_INLINE void declare(Options& options, ParameterGroups& groups) {
  options.add("--lr-mult", groups.lr_mult,
              "factor of the learning rate for leaves of this pattern, as in 'layers/0/*=0.1'; may be given several "
              "times, and the last that fits a leaf counts",
              value_name("PATTERN=FACTOR"));
  options.add("--decay-mult", groups.decay_mult, "the same for --weight-decay, where 0 is none",
              value_name("PATTERN=FACTOR"));
  options.add(
      "--freeze", groups.freeze,
      "do not train leaves of this pattern, as 'layers/0/*': they and their moments stay as they are, and their "
      "gradients do not count in --clip; may be given several times",
      value_name("PATTERN"));
}

SHARDLIB_INLINE void check_groups(const ParameterGroups& groups, const std::vector<std::string>& leaves) {
  const auto check = [&](const char* option, const std::vector<std::string>& texts) {
    for (const std::string& text : texts) {
      const detail::GroupText group(text);
      if (group.factor < 0)
        throw UsageError(fmt::format("{} '{}' has no factor of at least 0 after its pattern; write it as in '{}=0.1'",
                                     option, text, group.pattern));
      shardlib::detail::require_match(option, group.pattern, leaves);
    }
  };
  check("--lr-mult", groups.lr_mult);
  check("--decay-mult", groups.decay_mult);
  for (const std::string& pattern : groups.freeze) shardlib::detail::require_match("--freeze", pattern, leaves);
  if (std::ranges::all_of(leaves, [&](const std::string& leaf) { return groups(leaf).rate == 0; }))
    throw UsageError("--freeze and --lr-mult leave nothing to train: all leaves have the rate 0");
}

SHARDLIB_INLINE void declare(Options& options, OptimizerOptions& o) {
  options.group("optimizer");
  options.add("--optimizer", o.name,
              "the optimizer; --beta1 is the momentum of sgd and muon, muon's matrices are those of the feed-forward "
              "layers, and adafactor keeps rows and columns of moments",
              one_of({"adamw", "adafactor", "lion", "muon", "sgd"}));
  const auto unused = [&](const char* option, const std::vector<std::string>& by) {
    options.without_effect({option}, [&o, by](const Options&) {
      return std::ranges::find(by, o.name) == by.end()
                 ? ""
                 : fmt::format("with --optimizer {}: leave it out, or choose another optimizer", o.name);
    });
  };
  unused("--beta1", {"adafactor"});
  unused("--beta2", {"adafactor", "sgd"});
  unused("--adam-epsilon", {"adafactor", "lion", "sgd"});
  options.add(
      "--ema", o.ema,
      "validation, samples and exports read a moving average of the weights, which keeps this share of itself each "
      "step (0: the weights)",
      between(0, 0.999999));
  declare(options, o.groups);
}

SHARDLIB_INLINE bool is_muon_matrix(std::string_view leaf) {
  return leaf.ends_with("/w_gate") || leaf.ends_with("/w_up") || leaf.ends_with("/w_down");
}

SHARDLIB_INLINE StepResult step_result(const Scalars& losses, const Tensor<f32, "">& squared_norm,
                                       const std::vector<std::pair<std::string, Scalars>>& numbers) {
  std::vector<shardlib::detail::ValuePtr> all{squared_norm.value()};
  const auto list = [&](const Scalars& scalars) {
    for (const auto& scalar : scalars) all.push_back(scalar.value());
  };
  list(losses);
  for (const auto& [name, scalars] : numbers) list(scalars);
  const std::vector<f32> on_host = shardlib::detail::scalars_on_host(all);
  auto next = on_host.begin();
  StepResult result;
  result.grad_norm = std::sqrt(static_cast<double>(*next++));
  for (std::size_t k = 0; k < losses.size(); ++k) result.loss += static_cast<double>(*next++);
  for (const auto& [name, scalars] : numbers) {
    double mean = 0;
    for (std::size_t k = 0; k < scalars.size(); ++k)
      mean += static_cast<double>(*next++) / static_cast<double>(scalars.size());
    result.numbers.emplace_back(name, mean);
  }
  return result;
}

SHARDLIB_INLINE io::Rename stored_names() {
  return [](const std::string& leaf) {
    return leaf.starts_with("mu.0.") || leaf.starts_with("nu.0.") ? leaf.substr(0, 2) + leaf.substr(4) : leaf;
  };
}

SHARDLIB_INLINE io::StoredTable table_of_state(const OptimizerOptions& o, const io::StoredTable& weights) {
  const std::string member = o.ema > 0 ? "ema.0." : "weights.";
  return [=](const std::string& leaf) {
    return leaf.starts_with(member) ? weights(leaf.substr(member.size())) : io::StoredLeaf{};
  };
}

}  // namespace shardlib::run
