// Functions that also run on a device.
#pragma once

/// Marks a function that a kernel calls. A compiler of device code makes it for both sides; constexpr functions need no
/// mark, as those compilers are told to accept them.
#if defined(__CUDACC__) || defined(__HIPCC__)
#define SHARDLIB_FUNCTION __host__ __device__
#else
#define SHARDLIB_FUNCTION
#endif
