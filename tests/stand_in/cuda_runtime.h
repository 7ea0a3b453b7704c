// A stand-in for the part of CUDA's runtime that shardlib calls beside its kernels: its answers are those that a test
// asks for, and its GPUs' memory is the host's.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

enum cudaError_t {
  cudaSuccess,
  cudaErrorMemoryAllocation,
  cudaErrorInsufficientDriver,
  cudaErrorNoDevice,
  cudaErrorDevicesUnavailable,
  cudaErrorNoKernelImageForDevice,
  cudaErrorIllegalAddress,
  cudaErrorNotReady,
  cudaErrorInvalidResourceHandle,
  cudaErrorLaunchTimeout,
};
/// A stream, like an event, is of the GPU that was current when it was made.
struct CUstream_st {
  int gpu = 0;
  int behind = 0;  ///< entries put in while it hangs
};
using cudaStream_t = CUstream_st*;
enum cudaMemcpyKind { cudaMemcpyDefault };
inline constexpr unsigned cudaStreamNonBlocking = 1;

enum cudaDataType_t { CUDA_R_32F, CUDA_R_64F, CUDA_R_16BF };
struct cudaDeviceProp {
  struct {
    char bytes[16];
  } uuid;
  char name[256];
  int multiProcessorCount;
};

/// The hardware of the machine, and the calls that fail.
struct StandIn {
  int gpus = 1, driver = 13000, runtime = 13000;  ///< no driver: 0
  std::size_t total = std::size_t{64} << 20;      ///< memory of a GPU
  std::size_t others = 0;                         ///< what other programs have of it
  bool exclusive = false;                         ///< whether another program has all GPUs for itself
  const char* name = "NVIDIA Stand-in";           ///< of all GPUs
  cudaError_t late = cudaSuccess;                 ///< of a kernel, for whoever waits for its stream
  bool hangs = false;                             ///< all streams: a call that waits for one is an error here
  bool events = true;                             ///< whether there can be more events
};
inline StandIn stand_in;
inline std::mutex stand_in_mutex;                                     // of the blocks
inline std::map<void*, std::pair<int, std::size_t>> stand_in_blocks;  // GPU and bytes
inline std::map<void*, std::size_t> stand_in_pinned;                  // memory of the host that GPUs read
inline thread_local int stand_in_gpu = 0;

/// How often the host has waited for a stream, and copied by memory of its own that is not pinned.
inline std::atomic<int> stand_in_waits = 0, stand_in_far_copies = 0;

inline const char* cudaGetErrorName(cudaError_t) {
  return "cudaErrorName";
}
inline const char* cudaGetErrorString(cudaError_t status) {
  switch (status) {
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorDevicesUnavailable:
      return "CUDA-capable device(s) is/are busy or unavailable";
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
    default:
      return "an error";
  }
}
/// The last error that no call of cudaGetLastError has returned: here of queries alone, as older versions of HIP count
/// their cudaErrorNotReady.
inline thread_local cudaError_t stand_in_last = cudaSuccess;
inline cudaError_t cudaGetLastError() {
  return std::exchange(stand_in_last, cudaSuccess);
}
inline cudaError_t cudaDriverGetVersion(int* version) {
  return *version = stand_in.driver, cudaSuccess;
}
inline cudaError_t cudaRuntimeGetVersion(int* version) {
  return *version = stand_in.runtime, cudaSuccess;
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  if (stand_in.driver < stand_in.runtime) return cudaErrorInsufficientDriver;
  *count = stand_in.gpus;
  return stand_in.gpus > 0 ? cudaSuccess : cudaErrorNoDevice;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  properties->uuid.bytes[0] = static_cast<char>(1 + device);
  std::strcpy(properties->name, stand_in.name);
  properties->multiProcessorCount = 4;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  return stand_in_gpu = device, cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  if (stand_in.exclusive) return cudaErrorDevicesUnavailable;
  *stream = new CUstream_st{stand_in_gpu};
  return cudaSuccess;
}
/// Whether a call that puts something into the stream may be made now: with the stream's GPU as the current one. CUDA
/// demands this of kernels, and of events that they are of the stream's GPU. Here all such calls must keep to it.
inline cudaError_t stand_in_put(cudaStream_t stream) {
  if (stream->gpu != stand_in_gpu) return cudaErrorInvalidResourceHandle;
  constexpr int most = 1000;  // then CUDA waits for room
  return stand_in.hangs && ++stream->behind > most ? cudaErrorLaunchTimeout : cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return delete stream, cudaSuccess;
}
inline cudaError_t cudaStreamQuery(cudaStream_t) {
  return stand_in.hangs ? stand_in_last = cudaErrorNotReady : stand_in.late;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
  ++stand_in_waits;
  return stand_in.hangs ? cudaErrorLaunchTimeout : stand_in.late;
}
inline cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  const std::lock_guard lock(stand_in_mutex);
  *total = *free = stand_in.total;
  *free -= std::min(*free, stand_in.others);
  for (const auto& [memory, block] : stand_in_blocks)
    if (block.first == stand_in_gpu) *free -= std::min(*free, block.second);
  return cudaSuccess;
}
inline cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  std::size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  if (bytes > free) return cudaErrorMemoryAllocation;
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  const std::lock_guard lock(stand_in_mutex);
  stand_in_blocks[*memory] = {stand_in_gpu, bytes};
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) {
  const std::lock_guard lock(stand_in_mutex);
  stand_in_blocks.erase(memory);
  std::free(memory);
  return cudaSuccess;
}
inline cudaError_t cudaMallocHost(void** memory, std::size_t bytes) {
  *memory = std::malloc(bytes);
  const std::lock_guard lock(stand_in_mutex);
  stand_in_pinned[*memory] = bytes;
  return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* memory) {
  const std::lock_guard lock(stand_in_mutex);
  stand_in_pinned.erase(memory);
  std::free(memory);
  return cudaSuccess;
}
/// Whether the address is a GPU's or pinned.
inline bool stand_in_is_near(const void* address) {
  const std::lock_guard lock(stand_in_mutex);
  const auto is_in = [&](const void* begin, std::size_t bytes) {
    return address >= begin && address < static_cast<const char*>(begin) + bytes;
  };
  for (const auto& [memory, block] : stand_in_blocks)
    if (is_in(memory, block.second)) return true;
  for (const auto& [memory, bytes] : stand_in_pinned)
    if (is_in(memory, bytes)) return true;
  return false;
}
/// The copies that have begun while the streams hang: `run` does the next one.
struct StandInCopies {
  struct Copy {
    void* to;
    const void* from;
    std::size_t bytes;
  };
  std::deque<Copy> waiting;
  std::size_t begun = 0, done = 0;
  void run() {
    const Copy next = waiting.front();
    waiting.pop_front();
    std::memcpy(next.to, next.from, next.bytes);
    ++done;
  }
};
inline StandInCopies stand_in_copies;
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  // It waits for the stream, or returns at once, as CUDA likes, if one side is memory of the host that is not pinned.
  const bool near = stand_in_is_near(to) && stand_in_is_near(from);
  if (!near) ++stand_in_far_copies;
  if (stand_in.hangs && !near) return cudaErrorLaunchTimeout;
  if (stand_in.hangs) {
    stand_in_copies.waiting.push_back({to, from, bytes});
    ++stand_in_copies.begun;
  } else {
    std::memcpy(to, from, bytes);
  }
  return stand_in_put(stream);
}
inline cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  return std::memset(to, value, bytes), stand_in_put(stream);
}

struct CUevent_st {
  int gpu = 0;
  std::size_t copies = 0;  ///< that come before it
};
using cudaEvent_t = CUevent_st*;
inline constexpr unsigned cudaEventDisableTiming = 2;
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (!stand_in.events) return cudaErrorMemoryAllocation;
  return *event = new CUevent_st{stand_in_gpu}, cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return delete event, cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->copies = stand_in_copies.begun;
  return event->gpu == stream->gpu ? stand_in_put(stream) : cudaErrorInvalidResourceHandle;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  const bool passed = !stand_in.hangs || (event->copies > 0 && event->copies <= stand_in_copies.done);
  return passed ? cudaSuccess : stand_in_last = cudaErrorNotReady;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned) {
  return stand_in_put(stream);
}
