// A device's share of a GPU: memory, and the stream on which its kernels and copies run one after the other.
#pragma once

#if defined(SHARDLIB_LAUNCHER_CUDA)

#if defined(SHARDLIB_LAUNCHER_HIP)
#include "shardlib/memory/hip.hpp"
#else
#include <cublas_v2.h>
#include <cuda_runtime.h>
#endif

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "shardlib/memory/faults.hpp"
#include "shardlib/memory/flights.hpp"
#include "shardlib/memory/region.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// Throws Error, which names the call, unless `status` is success.
SHARDLIB_INLINE void check_cuda(cudaError_t status, const char* call);
SHARDLIB_INLINE void check_cublas(cublasStatus_t status, const char* call);

/// SHARDLIB_GPU_MEMORY, the part of each GPU that this program takes. Throws UsageError if it is not in (0, 1].
[[nodiscard]] SHARDLIB_INLINE double gpu_part();

/// Throws UsageError if several `ranks`, which are processes, have the GPU of device `local_rank`, unless
/// SHARDLIB_GPU_MEMORY is set.
SHARDLIB_INLINE void check_sharing(int local_rank, int ranks);

/// The GPU of device `local_rank` of this machine.
[[nodiscard]] SHARDLIB_INLINE HardwareName gpu_name(int local_rank);

/// The bytes that one of the `sharers` of that GPU will take of it, or less if other programs leave less.
[[nodiscard]] SHARDLIB_INLINE std::size_t gpu_share(int local_rank, int sharers);

class Uploads;
class Mirror;

/// One device's share of a GPU. It takes its memory from the system at once, and cuts blocks from it. A block that is
/// freed may be reused at once, because the device's kernels and copies are in one stream: what reads the old block
/// runs before what writes the new one. NCCL's operations, in a second stream, keep their blocks until the device's
/// stream waits for them.
class Gpu final : public Region {
 public:
  /// The GPU of device `local_rank` of this machine, as one of its `sharers`.
  Gpu(int local_rank, int sharers);
  ~Gpu() override;

  [[nodiscard]] bool is_device() const override { return true; }
  [[nodiscard]] Gpu* gpu() override { return this; }
  void synchronize() override;
  [[nodiscard]] Faults* faults() override { return &faults_; }
  [[nodiscard]] Flights* flights() override { return &flights_; }
  /// One side is this memory. The other one is this memory too, or host memory, but never that of another GPU.
  bool copy(void* to, const void* from, std::size_t bytes) override;
  bool zero(void* to, std::size_t bytes) override;
  [[nodiscard]] std::string describe() const override;
  [[nodiscard]] std::size_t alignment() const override { return 256; }
  std::unique_ptr<Stream> make_stream() override;
  [[nodiscard]] HardwareName hardware() const override { return gpu_name(ordinal_); }
  [[nodiscard]] HardwareModel model() const override { return {name_, sharers_}; }

  [[nodiscard]] cudaStream_t stream() const { return stream_.get(); }
  [[nodiscard]] cublasHandle_t cublas() const { return cublas_.get(); }
  /// The scratch memory of products in this stream: cuBLAS's, which cuBLASLt may use as well. Null with HIP.
  [[nodiscard]] void* workspace() const { return workspace_.get(); }
  static constexpr std::size_t workspace_bytes = std::size_t{32} << 20;
  /// Facts that kernels keep about this GPU, such as the choices of its libraries.
  [[nodiscard]] std::shared_ptr<void>& remembered() { return remembered_; }
  /// What the launcher keeps for this GPU: with Kokkos, the execution space instance of the stream.
  [[nodiscard]] std::shared_ptr<void>& kept_by_launcher() const { return kept_by_launcher_; }
  /// CUDA's number of the GPU.
  [[nodiscard]] int ordinal() const { return ordinal_; }
  /// Makes this the GPU of the calling thread.
  void use() const;
  /// The same, before the host puts a kernel or a copy into the stream. It may wait (Flights::before_enqueue).
  void before_enqueue() const;
  [[nodiscard]] int multiprocessors() const { return multiprocessors_; }

 private:
  /// Waits until the stream is at its end, or waits for no collective any more. Before that, a call of CUDA that waits
  /// for the stream would not end if a collective hangs.
  void wait_for_flights();
  void put_copy(void* to, const void* from, std::size_t bytes);
  /// Waits for the device, and copies so many of its bytes to host memory. Throws what `synchronize` does.
  void read(void* to, const void* from, std::size_t bytes);
  bool grant(std::size_t /*bytes*/) override { return true; }
  Addresses grow(std::size_t bytes) override;
  void discard(std::uintptr_t, std::size_t) override {}
  template <auto F>
  struct End {
    template <class T>
    void operator()(T* owned) const {
      static_cast<void>(F(owned));
    }
  };
  template <class T, auto F>
  using Owned = std::unique_ptr<std::remove_pointer_t<T>, End<F>>;
  using Memory = Owned<void*, &cudaFree>;
  [[nodiscard]] Memory take(std::size_t bytes, const std::string& what) const;
  /// The GPU's free memory, in words.
  [[nodiscard]] static std::string free_memory();
  /// A UsageError about what the GPU does not give.
  [[noreturn]] void refuse(const std::string& what) const;

  int ordinal_ = 0;
  int sharers_ = 1;
  std::string name_;
  int multiprocessors_ = 1;
  Owned<cudaStream_t, &cudaStreamDestroy> stream_;
  Memory workspace_;  ///< of cuBLAS, so that its sums have one order
  Owned<cublasHandle_t, &cublasDestroy> cublas_;
  Memory memory_;
  std::size_t bytes_ = 0;
  Faults faults_;
  std::shared_ptr<void> remembered_;
  mutable std::shared_ptr<void> kept_by_launcher_;
  mutable Flights flights_;
  std::unique_ptr<Uploads> uploads_;
  std::unique_ptr<Mirror> mirror_;
};

}  // namespace shardlib::detail

#endif
