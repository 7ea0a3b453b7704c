// Adafactor for gpt2.cpp, compiled beside the rest.
#include "gpt2_state.hpp"

template struct run::AdafactorSteps<gpt2::Model<f32>>;
template struct run::AdafactorSteps<gpt2::Adapters<f32>>;
