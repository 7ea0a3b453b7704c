// Definitions of trained.hpp.
#pragma once

#include "shardlib/run/trained.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace shardlib::run {

SHARDLIB_INLINE void declare(Options& options, OptimizerOptions& o) {
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
