// gpt_fsdp's training in bf16, compiled separately.
#include <string>

#include "gpt_fsdp.hpp"

template void train<bf16>(const DevicePtr&, const Options&, const run::Data&, const std::string&);
