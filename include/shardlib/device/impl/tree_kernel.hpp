// Definitions of tree_kernel.hpp.
#pragma once

#include "shardlib/device/tree_kernel.hpp"

#include "shardlib/device/exec.hpp"
#include "shardlib/memory/simulated_stream.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

template <class Kernel>
void start_in_stream(Stream& stream, std::int64_t items, const Kernel& kernel, const Buffer& in, const Buffer& out) {
#if defined(SHARDLIB_LAUNCHER_CUDA)
  if (const Gpu* const gpu = in.device_memory()->gpu(); gpu != nullptr) {
#if defined(__CUDACC__) || defined(__HIPCC__)
    return check_cuda(launch_on_cuda(reinterpret_cast<cudaStream_t>(stream.handle()), items,
                                     cuda_blocks(*gpu, items, 0), nullptr, 0, kernel),
                      "the start of a kernel");
#else
    throw Error("the compiler for GPUs must compile the sums of GPUs; in CMake, link shardlib::compiled");
#endif
  }
#endif
  const auto run = [items, kernel, device = in.device_memory()] {
    const MemoryAccess open(device);
    run_simulated(items, nullptr, kernel);
    return true;
  };
  SimulatedStream::of(stream.handle())
      .put({"the tree kernel", {{in.data(), in.bytes()}, {out.data(), out.bytes()}}, run});
}

#if defined(SHARDLIB_LAUNCHER_CUDA) && (defined(__CUDACC__) || defined(__HIPCC__))
template <class... T>
void load_reductions_of(const T&...) {
  (load_on_cuda<ReduceTree<T, Sum>>(), ...);
  (load_on_cuda<ReduceTree<T, Max>>(), ...);
}
#endif

SHARDLIB_INLINE void load_reductions([[maybe_unused]] Region& memory) {
#if defined(SHARDLIB_LAUNCHER_CUDA) && (defined(__CUDACC__) || defined(__HIPCC__))
  const Gpu* const gpu = memory.gpu();
  if (gpu == nullptr) return;
  gpu->use();
  load_reductions_of(f32{}, f64{}, bf16{}, i32{}, u32{});
#endif
}

SHARDLIB_INLINE void reduce_in_stream(Stream& stream, DType dtype, Reduction op, const Buffer& in, std::size_t ranks,
                                      std::size_t n, const Buffer& out) {
  visit_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (is_reducible(dtype_v<T>)) {
      const auto elements = static_cast<std::int64_t>(n), arrays = static_cast<std::int64_t>(ranks);
      const auto start = [&](auto operation) {
        using Kernel = ReduceTree<T, decltype(operation)>;
        const std::int64_t items = (elements + Kernel::piece - 1) / Kernel::piece;
        start_in_stream(stream, items, Kernel{in.as<T>(), elements, arrays, elements, out.as<T>()}, in, out);
      };
      op == Reduction::sum ? start(Sum()) : start(Max());
    }
  });
}

}  // namespace shardlib::detail
