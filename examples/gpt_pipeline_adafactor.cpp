// Adafactor for gpt_pipeline.cpp, compiled beside the rest.
#include <shardlib/run/trained.hpp>

#include "gpt_stages.hpp"
#include "tutorial_stages.hpp"

using namespace shardlib;

template struct run::AdafactorSteps<gpt::StageModel<f32>>;
template struct run::AdafactorSteps<tutorial::StageModel<f32>>;
