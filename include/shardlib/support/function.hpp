// Functions that also run on a device.
#pragma once

/// Marks a function that a kernel calls. A compiler of device code makes it for both sides; constexpr functions need no
/// mark, because those compilers accept them by an option.
#if defined(__CUDACC__) || defined(__HIPCC__)
#define SHARDLIB_FUNCTION __host__ __device__
#else
#define SHARDLIB_FUNCTION
#endif

/// Stands before a function that is marked so that kernels can name it, but that only the host's teams run: it may call
/// functions of the host.
#if defined(__CUDACC__)
#define SHARDLIB_HOST_ONLY _Pragma("nv_exec_check_disable")
#else
#define SHARDLIB_HOST_ONLY
#endif

/// Before a template of such a function which the host may use with types of its own: nvcc would warn about their
/// functions.
#if defined(__NVCC__)
#define SHARDLIB_EITHER_SIDE _Pragma("nv_exec_check_disable")
#else
#define SHARDLIB_EITHER_SIDE
#endif

/// Before a loop of a constant length whose numbers a lane of a GPU is to hold in registers.
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

/// Defined in builds whose launcher takes kernels with their functions inside, as devices do. They cannot call the
/// host's loops through a pointer.
#if defined(SHARDLIB_LAUNCHER_KOKKOS) || defined(SHARDLIB_LAUNCHER_CUDA)
#define SHARDLIB_TYPED_KERNELS
#endif
