// A thread that prepares the next batches while the devices compute.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "shardlib/io/data/token_batch.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::io {

/// Makes the batches of steps first_step, first_step + 1, ... in a thread of its own, at most `depth` of them ahead. An
/// error of `make` comes out of `get` at its own step. The destructor waits for the batch in the making.
class ReadAhead {
 public:
  /// Makes the batch of a step.
  using Make = std::function<TokenBatch(std::int64_t step)>;

  ReadAhead(Make make, std::int64_t first_step, std::size_t depth = 2)
      : make_(std::move(make)), next_(first_step), depth_(depth) {
    if (depth_ < 1) throw UsageError("ReadAhead: the depth is at least 1");
    thread_ = std::thread([this, first_step] { work(first_step); });
  }
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;
  ~ReadAhead() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  /// The batch of a step. Callers ask for the steps in order. After an error each further call throws it again.
  [[nodiscard]] TokenBatch get(std::int64_t step) {
    std::unique_lock lock(mutex_);
    if (step != next_)
      throw Error("ReadAhead: step " + std::to_string(step) + " is asked for, but step " + std::to_string(next_) +
                  " comes next: make a ReadAhead for each step that one starts from");
    changed_.wait(lock, [this] { return !ready_.empty() || error_; });
    if (ready_.empty()) std::rethrow_exception(error_);
    TokenBatch batch = std::move(ready_.front());
    ready_.pop_front();
    ++next_;
    lock.unlock();
    changed_.notify_all();
    return batch;
  }

 private:
  void work(std::int64_t step) {
    for (;; ++step) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return ready_.size() < depth_ || stop_; });
        if (stop_) return;
      }
      try {
        TokenBatch batch = make_(step);
        const std::lock_guard lock(mutex_);
        ready_.push_back(std::move(batch));
      } catch (...) {
        const std::lock_guard lock(mutex_);
        error_ = std::current_exception();
      }
      changed_.notify_all();
      if (failed()) return;
    }
  }
  [[nodiscard]] bool failed() {
    const std::lock_guard lock(mutex_);
    return error_ != nullptr;
  }

  Make make_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<TokenBatch> ready_;
  std::exception_ptr error_;
  std::int64_t next_;
  std::size_t depth_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace shardlib::io
