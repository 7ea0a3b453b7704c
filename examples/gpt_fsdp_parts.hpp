// CMake compiles these functions in files of their own, at the same time as gpt_fsdp.cpp. Without GPT_FSDP_PARTS
// gpt_fsdp.cpp is the whole program.
#pragma once

#include <string>

// In gpt_fsdp_per_step.cpp:
extern template Found<f32> by_whole_weights(const GptMesh&, const gpt::Model<f32>&, const Options&, const run::Step&);
extern template Found<bf16> by_whole_weights(const GptMesh&, const gpt::Model<bf16>&, const Options&, const run::Step&);
// In gpt_fsdp_parts.cpp:
extern template void train<bf16>(const DevicePtr&, const Options&, const run::Data&, const std::string&);
