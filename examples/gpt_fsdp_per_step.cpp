// gpt_fsdp's --gather per-step, compiled separately.
#include "gpt_fsdp.hpp"

template LossAndGrads<f32> per_step_grads(const GptMesh&, const gpt::Model<f32>&, const Options&, const run::Step&);
template LossAndGrads<bf16> per_step_grads(const GptMesh&, const gpt::Model<bf16>&, const Options&, const run::Step&);
