// gpt_fsdp's --gather per-step, compiled beside the rest.
#include <utility>

#include "gpt_fsdp.hpp"

template auto gathered_once(const GptMesh&, const gpt::Model<f32>&, const Options&, const run::Step&)
    -> std::pair<Loss, Gradients<f32>>;
template auto gathered_once(const GptMesh&, const gpt::Model<bf16>&, const Options&, const run::Step&)
    -> std::pair<Loss, Gradients<bf16>>;
