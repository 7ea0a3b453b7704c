// The part of a Kokkos of CUDA that the launcher uses (docs/gpus.md#kokkos), for compile checks where there is none.
// The names and signatures are Kokkos'. Nothing runs.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace Kokkos {

inline bool is_initialized() {
  return false;
}
struct InitializationSettings {
  InitializationSettings& set_disable_warnings(bool /*disable*/) { return *this; }
  InitializationSettings& set_device_id(int /*id*/) { return *this; }
};
inline void initialize(const InitializationSettings& /*settings*/) {}
inline void finalize() {}

struct Cuda {
  explicit Cuda(cudaStream_t /*stream*/) {}
};
template <unsigned Threads, unsigned Blocks>
struct LaunchBounds {};
struct PerTeamValue {};
inline PerTeamValue PerTeam(std::size_t /*bytes*/) {
  return {};
}

template <class Space, class Bounds>
struct TeamPolicy {
  struct scratch_memory_space {
    __device__ void* get_shmem_aligned(const std::size_t& /*bytes*/, const std::ptrdiff_t /*alignment*/) const {
      extern __shared__ std::byte memory[];
      return memory;
    }
  };
  struct member_type {
    scratch_memory_space memory;
    __device__ const scratch_memory_space& team_scratch(int /*level*/) const { return memory; }
    __device__ int league_rank() const { return static_cast<int>(blockIdx.x); }
    __device__ int league_size() const { return static_cast<int>(gridDim.x); }
  };
  TeamPolicy(const Space& /*space*/, int /*teams*/, int /*team_size*/) {}
  TeamPolicy& set_scratch_size(int /*level*/, const PerTeamValue& /*bytes*/) { return *this; }
};

struct HostSpace {};
struct CudaSpace {};
struct LayoutRight {};
enum { Unmanaged = 1 };
template <unsigned Traits>
struct MemoryTraits {};
template <class Data, class Layout, class Space, class Traits>
struct View {
  template <class Pointer, class... Sizes>
  explicit View(Pointer /*data*/, Sizes... /*sizes*/) {}
};

namespace Experimental {
struct WorkItemProperty {
  struct Hint {};
  static constexpr Hint HintLightWeight{};
};
template <class Policy>
Policy require(const Policy& policy, WorkItemProperty::Hint /*hint*/) {
  return policy;
}
}  // namespace Experimental

template <class Policy, class Functor>
__global__ void run_stand_in(const Functor functor) {
  functor(typename Policy::member_type{});
}
template <class Policy, class Functor>
void parallel_for(const Policy& /*policy*/, const Functor& functor) {
  run_stand_in<Policy><<<1, 1>>>(functor);
}

}  // namespace Kokkos
