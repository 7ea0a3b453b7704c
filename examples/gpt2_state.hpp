// How gpt2 trains its leaves.
#pragma once

#include <shardlib/run/trained.hpp>
#include <shardlib/shardlib.hpp>

#include <string_view>

#include "gpt2_setup.hpp"

// Matrices decay, biases and scales do not.
inline bool decays(std::string_view name) {
  const auto field = name.substr(name.rfind('/') + 1);
  return field.starts_with("w") || field == "embed" || field == "positions";
}

// What an optimizer does to a leaf: --lr-mult, --decay-mult and --freeze.
inline LeafFactors factors_of(const Options& o, std::string_view leaf) {
  return o.optimizer.groups(leaf, decays(leaf));
}
