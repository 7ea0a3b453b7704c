// CMake compiles these functions in files of their own, at the same time as gpt_fsdp.cpp. Without GPT_FSDP_PARTS
// gpt_fsdp.cpp is the whole program.
#pragma once

#include <string>

// In gpt_fsdp_per_step.cpp:
extern template LossAndGrads<f32> per_step_grads(const GptMesh&, const gpt::Model<f32>&, const Options&,
                                                 const run::Step&);
extern template LossAndGrads<bf16> per_step_grads(const GptMesh&, const gpt::Model<bf16>&, const Options&,
                                                  const run::Step&);
// In gpt_fsdp_parts.cpp:
extern template void train<bf16>(const DevicePtr&, const Options&, const run::Data&, const std::string&);
