// The collectives that a device's stream waits for. The host asks for their errors where it waits for the device.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <utility>

namespace shardlib::detail {

/// A collective in a second stream, for which the stream of the device's kernels waits.
class Flight {
 public:
  explicit Flight(const void* owner) : owner_(owner) {}
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;
  virtual ~Flight() = default;
  /// Whether it has ended. Throws Error if it has failed, as does `check`.
  [[nodiscard]] virtual bool has_ended() = 0;
  /// Throws Error if an error keeps it from ending or, when the host `waits` for it, if it takes too long.
  virtual void check(bool waits) = 0;
  [[nodiscard]] const void* owner() const { return owner_; }

 private:
  const void* owner_;
};

/// The flights that have not ended, as far as the host knows, in the order in which the device waits for them. Only the
/// device's thread uses it.
class Flights {
 public:
  void add(std::unique_ptr<Flight> flight) { open_.push_back({std::move(flight), ++added_}); }
  /// Whether some have not ended. Throws the error of the first of these, which is then forgotten.
  bool ask(bool waits = false) {
    forget_ended();
    if (!open_.empty()) guarded([&] { return open_.front().flight->check(waits), false; });
    return !open_.empty();
  }
  /// Returns when done() is true, or when all flights have ended. A call that blocks would wait forever for
  /// one that hangs.
  template <class F>
  void wait(const F& done) {
    constexpr int polls = 256;  // between two questions for errors, which take longer
    for (int i = 1; !done(); i = i % polls + 1) {
      forget_ended();
      if (i == polls) ask(true);
      if (open_.empty()) return;
      std::this_thread::yield();
    }
  }
  /// Waits for the flights of an owner.
  void finish(const void* owner) {
    wait([&] {
      for (const Open& open : open_)
        if (open.flight->owner() == owner) return false;
      return true;
    });
  }
  /// Forgets the flights of an owner.
  void remove(const void* owner) {
    std::erase_if(open_, [&](const Open& open) { return open.flight->owner() == owner; });
  }
  /// The host calls this before it puts a kernel or a copy into the device's stream. A stream of CUDA holds about a
  /// thousand entries. When it is full, the next call blocks, and forever if a flight in the stream hangs. So the host
  /// waits here for flights that have twice `most` entries behind them. That is far below a thousand, because events
  /// are entries, too, and a product can be two kernels.
  void before_enqueue() {
    constexpr int most = 128;
    if (open_.empty() || ++enqueued_ < most) return;
    enqueued_ = 0;
    ask();
    wait([&] { return open_.empty() || open_.front().number > before_; });
    before_ = added_;
  }

 private:
  struct Open {
    std::unique_ptr<Flight> flight;
    std::uint64_t number;
  };
  template <class F>
  bool guarded(const F& f) {
    try {
      return f();
    } catch (...) {
      open_.pop_front();
      throw;
    }
  }
  void forget_ended() {
    while (!open_.empty() && guarded([&] { return open_.front().flight->has_ended(); })) open_.pop_front();
  }

  std::deque<Open> open_;
  std::uint64_t added_ = 0, before_ = 0;  ///< numbers of flights: of the last, and of the last at the last look
  int enqueued_ = 0;                      ///< since that look
};

}  // namespace shardlib::detail
