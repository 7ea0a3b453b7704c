// The state that gpt2 trains and saves: weights, the optimizer's moments, an average of the weights.
#pragma once

#include <shardlib/optim/adafactor.hpp>
#include <shardlib/shardlib.hpp>

#include <cstdint>
#include <string>
#include <string_view>

#include "gpt2_setup.hpp"

// A checkpoint's content: a model and its moments, or adapters and theirs. AdamW and Muon have mu and nu, Lion and SGD
// mu; Adafactor has a row and a column for each leaf in their place. With --ema there is one moving average of the
// weights.
template <class W>
struct TrainState {
  W weights;
  Array<"mu", W> mu;
  Array<"nu", W> nu;
  Array<"rows", Factors<true, W>> rows;
  Array<"cols", Factors<false, W>> cols;
  Array<"ema", W> ema;
};

// Checkpoints call the one tree of mu "mu", not "mu.0", as they did before Adafactor.
inline std::string stored_name(const std::string& leaf) {
  return leaf.starts_with("mu.0.") ? "mu." + leaf.substr(5) : leaf;
}

// Matrices decay, biases and scales do not.
inline bool decays(std::string_view name) {
  const auto field = name.substr(name.rfind('/') + 1);
  return field.starts_with("w") || field == "embed" || field == "positions";
}

// What an optimizer does to a leaf: --lr-mult, --decay-mult and --freeze.
inline LeafFactors factors_of(const Options& o, std::string_view leaf) {
  return o.groups(leaf, decays(leaf));
}

// The moments of Adafactor, and a step of it, in a file of their own (gpt2_adafactor.cpp): they are compiled once, for
// gradients in f32, and not once for each dtype.
template <class W>
void begin_adafactor(TrainState<W>& state);
template <class W>
void update_adafactor(const Options& o, TrainState<W>& state, const W& grads, double learning_rate, double scale,
                      std::int64_t step);
