// Events of a GPU's streams, and the memory of the host through which copies to and from a GPU go.
#pragma once

#include "shardlib/memory/gpu.hpp"

#if defined(SHARDLIB_LAUNCHER_CUDA)

#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "shardlib/memory/faults.hpp"
#include "shardlib/memory/region.hpp"

namespace shardlib::detail {

/// Whether the work that a query asks about has ended or failed.
inline bool is_over(cudaError_t status) {
  if (status != cudaErrorNotReady) return true;
  static_cast<void>(cudaGetLastError());  // older versions of HIP would return it after the next start of a kernel
  return false;
}

/// An event of CUDA.
class CudaEvent {
 public:
  CudaEvent() { check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate"); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;
  ~CudaEvent() { static_cast<void>(cudaEventDestroy(event_)); }
  void record(cudaStream_t stream) { check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  [[nodiscard]] bool passed() const {
    const cudaError_t status = cudaEventQuery(event_);
    if (!is_over(status)) return false;
    check_cuda(status, "cudaEventQuery");
    return true;
  }
  /// Later entries of `stream` run after the event.
  void hold(cudaStream_t stream) const { check_cuda(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent"); }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Memory of the host that a GPU reads and writes by itself, or none if the system does not give it.
class Pinned {
 public:
  explicit Pinned(std::size_t bytes) {
    void* memory = nullptr;
    if (cudaMallocHost(&memory, bytes) == cudaSuccess)
      memory_ = static_cast<std::byte*>(memory);
    else
      static_cast<void>(cudaGetLastError());  // forgets the error, which the next call would report again
  }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  ~Pinned() {
    if (memory_ != nullptr) static_cast<void>(cudaFreeHost(memory_));
  }
  [[nodiscard]] std::byte* data() const { return memory_; }

 private:
  std::byte* memory_ = nullptr;
};

/// Copies of what goes from host memory to a GPU, in a ring from which the GPU takes them later.
class Uploads {
 public:
  /// Starts such a copy. Returns false if it is too long, if the ring is full, or if there is none. The ring is also
  /// full if `most_copies` are under way.
  bool start(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
    if (bytes > most_uploaded || ring_.data() == nullptr) return false;
    const std::size_t length = (bytes + 255) / 256 * 256;
    const std::optional<std::size_t> begin = place(length);
    if (!begin) return false;
    std::byte* const there = ring_.data() + *begin;
    std::memcpy(there, from, bytes);
    // What can fail comes before the copy, whose place would be free too early without its event.
    if (spare_.empty()) spare_.push_back(std::make_unique<CudaEvent>());
    Copy& copy = under_way_.emplace_back();
    copy = {*begin, *begin + length, std::move(spare_.back())};
    spare_.pop_back();
    check_cuda(cudaMemcpyAsync(to, there, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    copy.read->record(stream);
    return true;
  }

 private:
  static constexpr std::size_t ring_bytes = 4 * most_uploaded;
  static constexpr std::size_t most_copies = 4096;  ///< each keeps an event
  struct Copy {
    std::size_t begin = 0, end = 0;
    std::unique_ptr<CudaEvent> read;  ///< the GPU has read it
  };
  /// Where so many bytes are free: behind the newest copy, or else at the begin of the ring.
  std::optional<std::size_t> place(std::size_t length) {
    for (; !under_way_.empty() && under_way_.front().read->passed(); under_way_.pop_front())
      spare_.push_back(std::move(under_way_.front().read));
    if (under_way_.empty()) return 0;
    if (under_way_.size() == most_copies) return std::nullopt;
    const std::size_t oldest = under_way_.front().begin, next = under_way_.back().end;
    const bool wraps = next <= oldest;
    if ((wraps ? oldest : ring_bytes) - next >= length) return next;
    if (!wraps && oldest >= length) return 0;
    return std::nullopt;
  }

  Pinned ring_{ring_bytes};
  std::deque<Copy> under_way_;
  std::vector<std::unique_ptr<CudaEvent>> spare_;
};

/// A pinned buffer for reads: the GPU writes it by itself, and the host takes from there what it reads.
class Mirror {
 public:
  /// The mirror for one read. Its `data` is null if there is none, if it is too small, or if another thread reads.
  class Use {
   public:
    Use(Mirror& mirror, std::size_t bytes)
        : lock_(mirror.mutex_, std::try_to_lock),
          data_(lock_.owns_lock() && bytes <= size ? mirror.pinned_.data() : nullptr) {}
    [[nodiscard]] std::byte* data() const { return data_; }

   private:
    std::unique_lock<std::mutex> lock_;
    std::byte* data_;
  };

 private:
  /// A short array, and the words of all checks that can be open.
  static constexpr std::size_t size = (std::size_t{1} << 16) + Faults::most * Faults::check_bytes;
  Pinned pinned_{size};
  std::mutex mutex_;
};

}  // namespace shardlib::detail

#endif
