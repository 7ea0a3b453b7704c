// gpt_fsdp's --gather per-step in f32, compiled beside the other ways.
#include "gpt_fsdp.hpp"

template run::StepResult gather_once(const GptMesh&, Trained<f32>&, const Options&, const run::Step&);
