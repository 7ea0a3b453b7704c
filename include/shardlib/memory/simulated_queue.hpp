// The stream of a simulated device's kernels and copies. They run late, and in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "shardlib/support/inline.hpp"

namespace shardlib {

class Region;

namespace detail {

/// The work that a simulated device has begun and not yet done. It runs not when it is put in, but when a thread asks
/// for it: any thread, because GPUs run by themselves. After an error nothing runs any more, and all that asks throws
/// it.
class SimulatedQueue {
 public:
  /// With a seed, work also runs at random moments, which are the same for the same seed. With 0 it runs as late as it
  /// can.
  SimulatedQueue(Region& region, std::uint64_t seed);
  ~SimulatedQueue();
  SimulatedQueue(const SimulatedQueue&) = delete;
  SimulatedQueue& operator=(const SimulatedQueue&) = delete;

  /// Puts work() behind what was put before. It holds by value all that it needs, like a kernel of a GPU.
  template <class F>
  void put(const F& work) {
    static_assert(std::is_trivially_copy_constructible_v<F> && std::is_trivially_destructible_v<F> &&
                      alignof(F) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__,
                  "a kernel is a plain struct: a device gets a copy of its bytes");
    auto held = std::make_unique_for_overwrite<std::byte[]>(sizeof(F));
    ::new (held.get()) F(work);
    put({[](const std::byte* of) { (*std::launder(reinterpret_cast<const F*>(of)))(); }, std::move(held)});
  }
  /// The same for a kernel or a copy. With a seed, all so far may run now. It does where much is left to do, because
  /// the queue of a GPU is short, too.
  template <class F>
  void launch(const F& work) {
    put(work);
    run_early();
  }
  /// The same for a copy to the device, for which the bytes in host memory are copied now.
  void upload(void* to, const void* from, std::size_t bytes);
  /// Work that is put in from now on runs after passed() is true.
  void hold(std::function<bool()> passed);
  /// The number of pieces of work so far.
  [[nodiscard]] std::uint64_t last() const;
  /// Runs the first `until` pieces of work. Never waits: it returns false if another thread runs some, or if the queue
  /// is on hold.
  bool advance(std::uint64_t until);
  /// Runs all work, as a host that waits for the stream of a GPU.
  void synchronize();
  /// How often the host has called `synchronize`.
  [[nodiscard]] std::uint64_t waits() const;

 private:
  struct Work {
    void (*run)(const std::byte* held);
    std::unique_ptr<std::byte[]> held;
    std::function<bool()> passed = {};  ///< of a hold, which has no `run`
  };
  void put(Work work);
  void run_early();

  struct State;  ///< what takes the compiler long: a mutex, a condition variable, a deque
  std::unique_ptr<State> state_;
};

}  // namespace detail

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/memory/impl/simulated_queue.hpp"
#endif
