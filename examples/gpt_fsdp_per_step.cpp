// gpt_fsdp's --gather per-step, compiled separately.
#include "gpt_fsdp.hpp"

template Found<f32> by_whole_weights(const GptMesh&, const gpt::Model<f32>&, const Options&, const run::Step&);
template Found<bf16> by_whole_weights(const GptMesh&, const gpt::Model<bf16>&, const Options&, const run::Step&);
