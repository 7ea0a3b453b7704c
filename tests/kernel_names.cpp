// The names in kernels.cu, for machines without nvcc: any compiler instantiates the types of the kernels.
#include <cstddef>
#include <cstdint>

using cudaError_t = int;
using cudaStream_t = void*;

namespace shardlib::detail {

template <class Kernel>
cudaError_t launch_on_cuda(cudaStream_t, std::int64_t, unsigned, std::byte*, std::size_t, const Kernel&) {
  return sizeof(Kernel) != 0 ? 0 : 1;
}

}  // namespace shardlib::detail

#include "kernels.cu"
