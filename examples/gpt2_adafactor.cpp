// Adafactor for gpt2.cpp.
#include <cstdint>
#include <string_view>
#include <utility>

#include "gpt2_state.hpp"

template <class W>
void begin_adafactor(TrainState<W>& state) {
  auto [rows, cols] = Adafactor::init(state.weights);
  state.rows = {std::move(rows)};
  state.cols = {std::move(cols)};
}

template <class W>
void update_adafactor(const Options& o, TrainState<W>& state, const W& grads, double learning_rate, double scale,
                      std::int64_t step) {
  Adafactor::Moments<W> moments{std::move(state.rows[0]), std::move(state.cols[0])};
  Adafactor{.weight_decay = o.training.weight_decay}.update(state.weights, moments, grads, learning_rate, scale, step,
                                                            [&](std::string_view leaf) { return factors_of(o, leaf); });
  state.rows[0] = std::move(moments.rows);
  state.cols[0] = std::move(moments.cols);
}

template void begin_adafactor(TrainState<gpt2::Model<f32>>&);
template void begin_adafactor(TrainState<gpt2::Adapters<f32>>&);
template void update_adafactor(const Options&, TrainState<gpt2::Model<f32>>&, const gpt2::Model<f32>&, double, double,
                               std::int64_t);
template void update_adafactor(const Options&, TrainState<gpt2::Adapters<f32>>&, const gpt2::Adapters<f32>&, double,
                               double, std::int64_t);
