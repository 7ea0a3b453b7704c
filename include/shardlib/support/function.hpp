// Functions that also run on a device.
#pragma once

/// Marks a function that a kernel calls. A compiler of device code makes it for both sides; constexpr functions need no
/// mark, because those compilers accept them by an option.
#if defined(__CUDACC__) || defined(__HIPCC__)
#define SHARDLIB_FUNCTION __host__ __device__
#else
#define SHARDLIB_FUNCTION
#endif

/// Stands before a SHARDLIB_FUNCTION that only the host's teams run. It may call functions of the host, and nvcc does
/// not warn about them.
#if defined(__CUDACC__)
#define SHARDLIB_HOST_ONLY _Pragma("nv_exec_check_disable")
#else
#define SHARDLIB_HOST_ONLY
#endif

/// Stands before a template of a SHARDLIB_FUNCTION that the host may use with types of its own. nvcc does not warn
/// about the functions of these types.
#if defined(__NVCC__)
#define SHARDLIB_EITHER_SIDE _Pragma("nv_exec_check_disable")
#else
#define SHARDLIB_EITHER_SIDE
#endif

/// Stands before a loop of constant length. A lane of a GPU then holds the loop's numbers in registers.
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
#define SHARDLIB_UNROLL _Pragma("unroll")
#else
#define SHARDLIB_UNROLL
#endif

/// A function of the C library: on the host its builtin, which needs no header.
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
#define SHARDLIB_C(name) ::name
#else
#define SHARDLIB_C(name) __builtin_##name
#endif

/// Is defined in builds whose launcher compiles the function of a `map` into its kernel. Such kernels cannot call the
/// host's loops through a pointer.
#if defined(SHARDLIB_LAUNCHER_KOKKOS) || defined(SHARDLIB_LAUNCHER_CUDA)
#define SHARDLIB_TYPED_KERNELS
#endif

/// Is defined where such kernels hold no lambda, because nvcc takes none in a kernel's name: `map` traces it. (With
/// Kokkos too, so that tests on the host run what nvcc's kernels do.) HIP's clang makes each lambda for both sides.
#if defined(SHARDLIB_TYPED_KERNELS) && !defined(SHARDLIB_LAUNCHER_HIP)
#define SHARDLIB_TRACED_LAMBDAS
#endif
