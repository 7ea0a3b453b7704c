// The training step of examples/gpt_fsdp.hpp for a CUDA device: scripts/test-cuda.sh compiles it as a GPU build does, and
// nothing runs it.
#include "../examples/gpt_fsdp.hpp"

template run::StepResult train_step(const GptMesh& mesh, Trained<f32>& trained, const Options& o, const run::Step& step);
