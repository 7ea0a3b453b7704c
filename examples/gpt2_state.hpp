// How gpt2 trains its leaves, and what is compiled apart.
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

// gpt2_adafactor.cpp compiles Adafactor beside the rest, and once for both dtypes.
extern template struct run::AdafactorSteps<gpt2::Model<f32>>;
extern template struct run::AdafactorSteps<gpt2::Adapters<f32>>;
