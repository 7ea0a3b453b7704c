// Definitions of gpu.hpp, and of Region::make_gpu in builds without it.
#pragma once

#include "shardlib/memory/gpu.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "shardlib/memory/impl/gpu_copies.hpp"
#include "shardlib/memory/region.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib {

#if defined(SHARDLIB_LAUNCHER_CUDA)

namespace detail {

// Names of the maker's tools in messages to users.
#if defined(SHARDLIB_LAUNCHER_HIP)
inline constexpr const char *gpu_maker = "AMD", *gpu_system = "HIP",
                            *gpus_that_work = "rocminfo and HIP_VISIBLE_DEVICES",
                            *gpu_blocking = "HIP_LAUNCH_BLOCKING=1", *gpu_architectures = "CMAKE_HIP_ARCHITECTURES";
#else
inline constexpr const char *gpu_maker = "NVIDIA", *gpu_system = "CUDA",
                            *gpus_that_work = "nvidia-smi and CUDA_VISIBLE_DEVICES",
                            *gpu_blocking = "CUDA_LAUNCH_BLOCKING=1", *gpu_architectures = "CMAKE_CUDA_ARCHITECTURES";
#endif

SHARDLIB_INLINE void check_cuda(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  const std::string failed =
      std::string("GPU: ") + call + " failed: " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) + ")";
  if (status == cudaErrorNoKernelImageForDevice)
    throw Error(failed + ": this program was compiled for other GPUs; name this one's architecture in -D" +
                gpu_architectures + " (docs/gpus.md), or use --device cpu");
  throw Error(failed + "; an error of a kernel can show in a later call: " + gpu_blocking + " names its op");
}

SHARDLIB_INLINE void check_cublas(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(std::string("GPU: ") + call + " failed: " + cublasGetStatusString(status));
}

/// The number of GPUs. Throws UsageError, with the reason, if there is none.
inline int gpu_count() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  static_cast<void>(cudaGetLastError());  // forgets the error, which the next call would report again
  if (status == cudaErrorInsufficientDriver) {
    int driver = 0, runtime = 0;
    static_cast<void>(cudaDriverGetVersion(&driver));
    static_cast<void>(cudaRuntimeGetVersion(&runtime));
    const auto text = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
    throw UsageError("--device gpu: " +
                     (driver == 0 ? "this machine has no driver for " + std::string(gpu_maker) + " GPUs"
                                  : "the driver supports " + (gpu_system + (" " + text(driver))) +
                                        ", and this program needs " + text(runtime)) +
                     ": install a newer driver, or use --device cpu");
  }
  if (status != cudaSuccess || count == 0)
    throw UsageError(std::string("--device gpu: this machine shows no GPU (") +
                     (status == cudaSuccess ? "0 devices" : cudaGetErrorString(status)) + "): check " + gpus_that_work +
                     ", or use --device cpu");
  return count;
}

SHARDLIB_INLINE double gpu_part() {
  const char* const text = std::getenv("SHARDLIB_GPU_MEMORY");
  if (text == nullptr) return 0.9;
  char* end = nullptr;
  const double part = std::strtod(text, &end);
  if (end == text || *end != '\0' || !(part > 0 && part <= 1))
    throw UsageError("SHARDLIB_GPU_MEMORY=" + std::string(text) +
                     ": give the part of a GPU's memory to take, above 0 and at most 1, as in 0.4");
  return part;
}

SHARDLIB_INLINE void check_sharing(int local_rank, int ranks) {
  if (ranks == 1 || std::getenv("SHARDLIB_GPU_MEMORY") != nullptr) return;
  throw UsageError("--device gpu: " + std::to_string(ranks) + " ranks of this machine have the same GPU, number " +
                   std::to_string(local_rank % gpu_count()) +
                   ": start one rank for each GPU, or let them share it by SHARDLIB_GPU_MEMORY, the part that they "
                   "take together, as in SHARDLIB_GPU_MEMORY=0.9");
}

SHARDLIB_INLINE HardwareName gpu_name(int local_rank) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, local_rank % gpu_count()), "cudaGetDeviceProperties");
  HardwareName name{};
  std::copy_n(properties.uuid.bytes, name.size(), name.begin());
  return name;
}

/// An even share of the part of a GPU's memory that this program takes.
inline std::size_t share_of(double part, std::size_t total, int sharers) {
  return static_cast<std::size_t>(part * static_cast<double>(total)) / static_cast<std::size_t>(sharers);
}

SHARDLIB_INLINE std::size_t gpu_share(int local_rank, int sharers) {
  check_cuda(cudaSetDevice(local_rank % gpu_count()), "cudaSetDevice");
  std::size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return std::min(share_of(gpu_part(), total, sharers), free / static_cast<std::size_t>(sharers));
}

SHARDLIB_INLINE Gpu::Gpu(int local_rank, int sharers) : ordinal_(local_rank % gpu_count()), sharers_(sharers) {
  const double part = gpu_part();
  const auto start = [&](cudaError_t status, const char* call) {
    if (status != cudaSuccess) refuse(std::string("does not start (") + call + ": " + cudaGetErrorString(status) + ")");
  };
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, ordinal_), "cudaGetDeviceProperties");
  name_ = properties.name;
  multiprocessors_ = properties.multiProcessorCount;
  start(cudaSetDevice(ordinal_), "cudaSetDevice");
  cudaStream_t stream = nullptr;
  start(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  stream_.reset(stream);
  cublasHandle_t cublas = nullptr;
  const cublasStatus_t created = cublasCreate(&cublas);
  if (created != CUBLAS_STATUS_SUCCESS)
    refuse(std::string("does not start (cublasCreate: ") + cublasGetStatusString(created) + ")");
  cublas_.reset(cublas);
  check_cublas(cublasSetStream(cublas, stream), "cublasSetStream");
#if defined(SHARDLIB_LAUNCHER_HIP)
  check_cublas(hipblasSetAtomicsMode(cublas, HIPBLAS_ATOMICS_NOT_ALLOWED), "hipblasSetAtomicsMode");
#else
  workspace_ = take(workspace_bytes, "the workspace of cuBLAS");
  check_cublas(cublasSetWorkspace(cublas, workspace_.get(), workspace_bytes), "cublasSetWorkspace");
  // Parts of a sum of bf16 stay f32 until they are added.
  check_cublas(cublasSetMathMode(cublas, static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH |
                                                                   CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)),
               "cublasSetMathMode");
#endif
  std::size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  bytes_ = share_of(part, total, sharers);
  const std::size_t started = total / 32;  // what CUDA and cuBLAS take for themselves, if the part leaves it no room
  if (bytes_ > free && bytes_ <= free + started) bytes_ = free - std::min(free, started / 2);
  bytes_ = bytes_ / 4096 * 4096;
  if (bytes_ > free) refuse("has " + free_memory() + ", and this device takes " + std::to_string(bytes_));
  uploads_ = std::make_unique<Uploads>();
  mirror_ = std::make_unique<Mirror>();
}

SHARDLIB_INLINE Gpu::~Gpu() {
  static_cast<void>(cudaSetDevice(ordinal_));
  if (stream_) static_cast<void>(cudaStreamSynchronize(stream_.get()));
}

SHARDLIB_INLINE void Gpu::use() const {
  check_cuda(cudaSetDevice(ordinal_), "cudaSetDevice");
}

SHARDLIB_INLINE void Gpu::before_enqueue() const {
  use();
  flights_.before_enqueue();
}

SHARDLIB_INLINE void Gpu::wait_for_flights() {
  flights_.wait([this] { return is_over(cudaStreamQuery(stream())); });
}

SHARDLIB_INLINE void Gpu::put_copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream()), "cudaMemcpyAsync");
}

SHARDLIB_INLINE void Gpu::read(void* to, const void* from, std::size_t bytes) {
  use();
  faults_.close([&](void* words, const void* first_word, std::size_t word_bytes) {
    wait_for_flights();
    const Mirror::Use mirror(*mirror_, bytes + word_bytes);
    std::byte* const data = mirror.data();
    put_copy(data != nullptr ? data : to, from, bytes);
    put_copy(data != nullptr ? data + bytes : words, first_word, word_bytes);
    check_cuda(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
    if (data == nullptr) return;
    if (bytes > 0) std::memcpy(to, data, bytes);
    if (word_bytes > 0) std::memcpy(words, data + bytes, word_bytes);
  });
}

SHARDLIB_INLINE void Gpu::synchronize() {
  read(nullptr, nullptr, 0);
}

SHARDLIB_INLINE bool Gpu::copy(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return true;
  before_enqueue();
  if (!contains(to, bytes)) {
    read(to, from, bytes);
  } else if (contains(from, bytes)) {
    put_copy(to, from, bytes);
  } else if (!uploads_->start(to, from, bytes, stream())) {
    wait_for_flights();
    put_copy(to, from, bytes);
    synchronize();  // the host may change its array as soon as this returns
  }
  return true;
}

SHARDLIB_INLINE bool Gpu::zero(void* to, std::size_t bytes) {
  before_enqueue();
  if (bytes > 0) check_cuda(cudaMemsetAsync(to, 0, bytes, stream()), "cudaMemsetAsync");
  return true;
}

/// An event of a GPU's second stream.
class GpuMark final : public StreamMark {
 public:
  GpuMark(const Gpu& gpu, cudaStream_t stream) : gpu_(gpu) { event_.record(stream); }
  bool passed() override { return event_.passed(); }
  void hold_device() override {
    gpu_.use();
    event_.hold(gpu_.stream());
  }

 private:
  const Gpu& gpu_;
  CudaEvent event_;
};

/// A second stream of a GPU, next to that of its kernels.
class GpuStream final : public Stream {
 public:
  explicit GpuStream(const Gpu& gpu) : gpu_((gpu.use(), gpu)) {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;
  ~GpuStream() override { static_cast<void>(cudaStreamDestroy(stream_)); }
  CUstream_st* handle() override { return reinterpret_cast<CUstream_st*>(stream_); }
  void follow_device() override {
    gpu_.use();
    begun_.record(gpu_.stream());
    begun_.hold(stream_);
  }
  std::unique_ptr<StreamMark> mark() override { return std::make_unique<GpuMark>(gpu_, stream_); }

 private:
  const Gpu& gpu_;
  cudaStream_t stream_ = nullptr;
  CudaEvent begun_;
};

SHARDLIB_INLINE std::unique_ptr<Stream> Gpu::make_stream() {
  return std::make_unique<GpuStream>(*this);
}

SHARDLIB_INLINE std::string Gpu::describe() const {
  return std::to_string(bytes_) + " bytes of GPU " + std::to_string(ordinal_) + ", " + name_;
}

SHARDLIB_INLINE std::string Gpu::free_memory() {
  std::size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return std::to_string(free) + " of " + std::to_string(total) + " bytes free";
}

SHARDLIB_INLINE void Gpu::refuse(const std::string& what) const {
  static_cast<void>(cudaGetLastError());  // forgets the error, which the next call would report again
  throw UsageError("--device gpu: GPU " + std::to_string(ordinal_) + ", " + name_ + ", " + what +
                   ": end the other programs on it, or take a smaller part of the GPU, as in SHARDLIB_GPU_MEMORY=0.4");
}

SHARDLIB_INLINE Gpu::Memory Gpu::take(std::size_t bytes, const std::string& what) const {
  void* memory = nullptr;
  const cudaError_t status = cudaMalloc(&memory, bytes);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());  // forgets the error, which the next call would report again
    refuse("has " + free_memory() + ", and " + what + " takes " + std::to_string(bytes));
  }
  check_cuda(status, "cudaMalloc");
  return Memory(memory);
}

SHARDLIB_INLINE Region::Addresses Gpu::grow(std::size_t bytes) {
  if (memory_ || bytes > bytes_) return {};
  use();
  memory_ = take(bytes_, "its pool");
  return {reinterpret_cast<std::uintptr_t>(memory_.get()), bytes_};
}

}  // namespace detail

SHARDLIB_INLINE std::shared_ptr<Region> Region::make_gpu(int local_rank, int sharers) {
  return std::make_shared<detail::Gpu>(local_rank, sharers);
}

#else

SHARDLIB_INLINE std::shared_ptr<Region> Region::make_gpu(int /*local_rank*/, int /*sharers*/) {
  throw UsageError(
      "--device gpu: this program was built without a launcher for GPUs; configure it with "
      "-DSHARDLIB_LAUNCHER=cuda or hip (docs/gpus.md), or use --device cpu");
}

#endif

}  // namespace shardlib
