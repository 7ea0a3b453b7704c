// The simulated device's memory.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "shardlib/memory/faults.hpp"
#include "shardlib/memory/flights.hpp"
#include "shardlib/memory/impl/heap.hpp"
#include "shardlib/memory/region.hpp"
#include "shardlib/memory/simulated_queue.hpp"
#include "shardlib/memory/simulated_stream.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib {

namespace detail {

/// The addresses of all simulated memory of this process, which a signal handler reads. Where there are more ranges
/// than entries, a fault in the others has the system's message only.
class SimulatedAddresses {
 public:
  void add(std::uintptr_t begin, std::size_t bytes) {
    for (Range& range : ranges_) {
      std::uintptr_t none = 0;
      if (!range.begin.compare_exchange_strong(none, begin)) continue;
      range.end = begin + bytes;
      return;
    }
  }
  void remove(std::uintptr_t begin) {
    for (Range& range : ranges_) {
      if (range.begin != begin) continue;
      range.end = 0;
      range.begin = 0;
      return;
    }
  }
  [[nodiscard]] bool contain(std::uintptr_t address) const {
    for (const Range& range : ranges_)
      if (address >= range.begin && address < range.end) return true;
    return false;
  }

 private:
  struct Range {
    std::atomic<std::uintptr_t> begin = 0, end = 0;
  };
  std::array<Range, 64> ranges_;
};
inline SimulatedAddresses simulated_addresses;

/// The handler that was there before ours.
inline struct sigaction fault_handler_before {};

/// Explains a fault in simulated memory, and leaves every fault to the handler that was there before.
inline void explain_fault(int, siginfo_t* info, void*) {
  constexpr const char* text =
      "error: host code accessed memory of the simulated device, outside of a kernel and of a copy; read tensors with "
      "span, item or fetch, and write loops over them as kernels (docs/kernels.md)\n";
  if (simulated_addresses.contain(reinterpret_cast<std::uintptr_t>(info->si_addr)))
    static_cast<void>(!write(STDERR_FILENO, text, std::strlen(text)));
  sigaction(SIGSEGV, &fault_handler_before, nullptr);  // the access runs again, under that handler
}

/// Makes explain_fault the handler, unless it is. Others may have replaced it since.
inline void explain_simulated_faults() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  struct sigaction now {};
  sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == explain_fault) return;
  fault_handler_before = now;
  struct sigaction action {};
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  action.sa_sigaction = explain_fault;
  sigaction(SIGSEGV, &action, nullptr);
}

/// The region that make_simulated returns: host memory that is inaccessible while it is closed. Where the processor has
/// protection keys, the region has one, and is open for one thread at a time without a system call. Else all threads
/// see the pages change.
class Simulated final : public Heap {
 public:
  explicit Simulated(std::uint64_t seed) : key_(pkey_alloc(0, PKEY_DISABLE_ACCESS)), queue_(*this, seed) {
    explain_simulated_faults();
  }
  ~Simulated() override {
    try {
      queue_.synchronize();
    } catch (...) {  // as a GPU's error that no call has asked for
    }
    for (const Addresses& range : ranges_) simulated_addresses.remove(range.first);
    if (has_key()) pkey_free(key_);
  }
  [[nodiscard]] bool is_device() const override { return true; }
  [[nodiscard]] SimulatedQueue* queue() override { return &queue_; }
  [[nodiscard]] Faults* faults() override { return &faults_; }
  [[nodiscard]] Flights* flights() override { return &flights_; }
  void synchronize() override {
    faults_.close([this](void* to, const void* from, std::size_t bytes) {
      flights_.wait([this, until = queue_.last()] { return queue_.advance(until); });
      queue_.synchronize();
      if (bytes == 0) return;
      const MemoryAccess access(this);
      std::memcpy(to, from, bytes);
    });
  }
  bool copy(void* to, const void* from, std::size_t bytes) override {
    if (bytes == 0) return true;  // memcpy takes no null pointers
    const bool is_within = contains(from, bytes);
    if (contains(to, bytes) && (is_within || bytes <= most_uploaded)) {
      is_within ? queue_.launch([to, from, bytes] { std::memcpy(to, from, bytes); }) : queue_.upload(to, from, bytes);
      return true;
    }
    synchronize();
    const MemoryAccess access(this);
    std::memcpy(to, from, bytes);
    return true;
  }
  bool zero(void* to, std::size_t bytes) override {
    if (bytes > 0) queue_.launch([to, bytes] { std::memset(to, 0, bytes); });
    return true;
  }
  std::unique_ptr<Stream> make_stream() override { return std::make_unique<SimulatedStream>(*this); }
  [[nodiscard]] HardwareName hardware() const override {
    HardwareName name{};
    const Simulated* const here = this;
    std::memcpy(name.data(), &here, sizeof here);
    return name;
  }
  void open() override {
    if (has_key()) {
      if (openings_of_thread()++ == 0) pkey_set(key_, 0);
      return;
    }
    const std::lock_guard lock(mutex_);
    if (openings_++ == 0 && !protect(PROT_READ | PROT_WRITE))
      throw Error(std::string("simulated device: mprotect cannot open its memory: ") + std::strerror(errno));
  }
  void close() override {
    if (has_key()) {
      if (--openings_of_thread() == 0) pkey_set(key_, PKEY_DISABLE_ACCESS);
      return;
    }
    const std::lock_guard lock(mutex_);
    if (--openings_ == 0) conceal();
  }

 private:
  [[nodiscard]] bool has_key() const { return key_ >= 0; }
  [[nodiscard]] int& openings_of_thread() const {
    static constexpr std::size_t keys = 16;  // of the processor
    static thread_local std::array<int, keys> openings{};
    return openings[static_cast<std::size_t>(key_)];
  }
  Addresses grow(std::size_t bytes) override {
    const Addresses more = Heap::grow(bytes);
    if (more.second == 0) return more;
    const std::lock_guard lock(mutex_);
    ranges_.push_back(more);
    simulated_addresses.add(more.first, more.second);
    if (has_key() || openings_ == 0) conceal();
    return more;
  }
  // In the order of the stream: kernels that have yet to run may use what is free for later ones.
  void discard(std::uintptr_t begin, std::size_t bytes) override {
    queue_.put([this, begin, bytes] { Heap::discard(begin, bytes); });
  }
  void begin_block(std::uintptr_t begin, std::size_t size) override {
    if (guard_bytes > 0) queue_.put([this, begin, size] { Heap::begin_block(begin, size); });
  }
  void end_block(std::uintptr_t begin, std::size_t bytes) override {
    SimulatedStream::freed(reinterpret_cast<const void*>(begin), bytes);
    queue_.put([this, begin, bytes] {
      std::memset(reinterpret_cast<void*>(begin), 0xff, bytes);  // NaN in every floating dtype
      Heap::end_block(begin, bytes);
    });
  }
  [[nodiscard]] bool protect(int access) const {
    bool done = true;
    for (const auto& [begin, bytes] : ranges_) {
      void* const pages = reinterpret_cast<void*>(begin);
      done = (has_key() ? pkey_mprotect(pages, bytes, PROT_READ | PROT_WRITE, key_) : mprotect(pages, bytes, access)) ==
                 0 &&
             done;
    }
    return done;
  }
  /// Closes the memory. A failure ends the process, because the host could then access the memory unnoticed.
  void conceal() const {
    if (protect(PROT_NONE)) return;
    std::perror("error: simulated device: mprotect cannot close its memory");
    std::abort();
  }

  const int key_;  ///< negative: none
  std::mutex mutex_;
  std::vector<Addresses> ranges_;
  int openings_ = 0;  ///< without a key
  Faults faults_;
  Flights flights_;
  SimulatedQueue queue_;
};

}  // namespace detail

SHARDLIB_INLINE std::shared_ptr<Region> Region::make_simulated(std::uint64_t seed) {
  return std::make_shared<detail::Simulated>(seed);
}

}  // namespace shardlib
