// A communicator of NCCL, and the operations in it that have started.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <deque>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <typeinfo>
#include <utility>
#include <vector>

#include "shardlib/comm/collective_call.hpp"
#include "shardlib/comm/communicator.hpp"
#include "shardlib/comm/flight_recorder.hpp"
#include "shardlib/comm/nccl.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/memory/faults.hpp"
#include "shardlib/memory/flights.hpp"
#include "shardlib/memory/region.hpp"
#include "shardlib/memory/stream.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/types/call_site.hpp"

namespace shardlib::detail::nccl {

/// A communication under way, for errors, which ops begin with their names and lines.
struct Doing {
  CollectiveCall call = {};
  OpInfo op = {};
  int peer = -1;       ///< of a message
  bool sends = false;  ///< likewise
  bool late = false;   ///< another op may run when they are found
  [[nodiscard]] bool is_of_op() const { return *op.name != '\0'; }
  [[nodiscard]] std::string what() const {
    if (peer < 0) return to_string(call);
    return (sends ? "send of " : "recv of ") + std::to_string(call.bytes) + " bytes " +
           (sends ? "to rank " : "from rank ") + std::to_string(peer);
  }
  [[nodiscard]] std::string text() const {
    if (late && is_of_op()) return op.describe() + ": " + what();
    return what() + (late || Calling::innermost == nullptr ? op.at() : "");
  }
};

inline void require_success(const Functions& nccl, const Doing& doing, const char* function, Result result) {
  if (result != Result::success)
    throw Error(doing.text() + ": " + function + " failed: " + nccl.GetErrorString(result) +
                "; SHARDLIB_NCCL=0 communicates without NCCL");
}

/// An id for a new communicator; all zeros without NCCL.
inline UniqueId new_id(const Use& use, const Doing& doing) {
  UniqueId id;
  if (const Functions* const nccl = use.library.functions)
    require_success(*nccl, doing, "ncclGetUniqueId", nccl->GetUniqueId(&id));
  return id;
}

/// A communicator of NCCL, whose operations go into one stream. It may not be there yet.
class Connection {
 public:
  /// An operation that is in NCCL's stream. It keeps its buffers until the device's stream waits for it. When the host
  /// frees them then, their memory goes to later work of that stream, or of NCCL's stream, which follows it. An
  /// operation that nobody waits for keeps its buffers to its end.
  struct Started {
    std::unique_ptr<StreamMark> mark = {};
    std::vector<Buffer> buffers = {};
    Doing doing = {};
  };

  /// `staged` communicates in host memory, and knows when another member fails.
  Connection(Communicator& staged, const Use& use, std::shared_ptr<Stream> stream)
      : staged_(staged), use_(use), stream_(std::move(stream)) {}
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection() {
    // Others may wait for what this device has started and dropped. Where a member has failed, NCCL could wait
    // forever.
    try {
      staged_.check_failure();
      if (std::uncaught_exceptions() > 0) abort();
      if (comm_ != nullptr) flights().finish(this);
      for (const Started& started : dropped_)
        if (comm_ != nullptr) await(started);
      // `check` asks for errors while it waits. ncclCommDestroy alone could wait for the others forever.
      if (comm_ != nullptr && nccl().CommFinalize != nullptr)
        check(Doing{}, "ncclCommFinalize", nccl().CommFinalize(comm_));
    } catch (...) {
      abort();
    }
    flights().remove(this);
    if (comm_ != nullptr) nccl().CommDestroy(comm_);
    if (aborted_.valid()) aborted_.wait_for(std::chrono::seconds(1));  // the others may know of the failure by now
  }

  /// Connects the ranks, all of which call it. `timeout`: how long an operation may take; 0: forever.
  void open(const Doing& doing, const UniqueId& id, int ranks, int rank, std::chrono::milliseconds timeout) {
    timeout_ = timeout;
    stream_->follow_device();  // NCCL takes the thread's GPU
    // With a Config the call returns at once. Otherwise the others would wait in it forever if a member died meanwhile.
    Config config;
    check(doing, "ncclCommInitRank",
          nccl().CommInitRankConfig == nullptr ? nccl().CommInitRank(&comm_, ranks, id, rank)
                                               : nccl().CommInitRankConfig(&comm_, ranks, id, rank, &config));
  }
  /// Throws if the connection has failed, after which no operation can complete.
  void require() const {
    if (failed_) throw Aborted();
  }
  /// Starts what put(started) puts into the stream. Its buffers are kept.
  template <class F>
  std::unique_ptr<Request::Pending> start(const Doing& doing, std::vector<Buffer> buffers, const F& put) {
    require();
    Started started{nullptr, std::move(buffers), doing};
    or_abort([&] {
      forget_ended();
      stream_->follow_device();
      try {
        put(started);
        started.mark = stream_->mark();
      } catch (...) {
        failures_.push_back(std::move(started));  // a part of it may be in the stream
        throw;
      }
    });
    return std::make_unique<Arriving>(*this, std::move(started));
  }
  /// Starts something that nobody waits for. While as many wait for others as CUDA's queue has room for, the host
  /// waits.
  template <class F>
  void start_dropped(const Doing& doing, std::vector<Buffer> buffers, const F& put) {
    constexpr std::size_t most = 256;
    while (dropped_.size() >= most) {
      await(dropped_.front());
      forget_ended();
    }
    static_cast<void>(start(doing, std::move(buffers), put));
  }
  /// Frees the buffers of what nobody waits for, as far as it has ended.
  void forget_ended() {
    while (!dropped_.empty() && has_passed(dropped_.front(), true)) dropped_.pop_front();
  }
  /// Returns when the stream has come past all that was started.
  void await_dropped() {
    for (const Started& started : dropped_) await(started);
    forget_ended();
  }

  [[nodiscard]] const Functions& nccl() const { return *use_.library.functions; }
  [[nodiscard]] ncclComm* comm() const { return comm_; }
  [[nodiscard]] CUstream_st* handle() const { return stream_->handle(); }
  Buffer scratch(Started& started, std::size_t bytes) const {
    Buffer block = started.buffers.emplace_back(use_.pool->allocate(bytes));
    stream_->follow_device();  // what the device still does for the block's last owner comes first
    return block;
  }
  /// Messages that f(send_to, recv_from) puts into one operation of NCCL, so that none waits for another one. If one of
  /// these functions returns false, there must be no more.
  template <class F>
  void messages(const Doing& doing, const F& f) const {
    check(doing, "ncclGroupStart", nccl().GroupStart());
    Result failed = Result::success;
    const char* function = "ncclGroupEnd";
    const auto is_in = [&](const char* name, Result result) {  // in the group, of which all begins with its end
      if (result == Result::success || result == Result::in_progress) return true;
      failed = result;
      function = name;
      return false;
    };
    f(
        [&](int peer, const std::byte* from, std::size_t bytes) {
          return is_in("ncclSend", nccl().Send(from, bytes, Type::uint8, peer, comm_, handle()));
        },
        [&](int peer, std::byte* to, std::size_t bytes) {
          return is_in("ncclRecv", nccl().Recv(to, bytes, Type::uint8, peer, comm_, handle()));
        });
    const Result ended = nccl().GroupEnd();  // also after an error, which would leave the group open
    check(doing, function, failed == Result::success ? ended : failed);
  }
  /// Waits for the end of a call that has returned before it, as it may when NCCL connects to other members. Throws
  /// unless it succeeds.
  void check(const Doing& doing, const char* function, Result result) const {
    for (WaitTime time; result == Result::in_progress; std::this_thread::yield()) {
      staged_.check_failure();
      check_time(doing, time, function);
      if (const Result asked = nccl().CommGetAsyncError(comm_, &result); asked != Result::success) result = asked;
    }
    require_success(nccl(), doing, function, result);
  }
  /// Calls f(). If it throws, aborts the connection: no operation under way can complete any more, and the other
  /// members must not wait for one.
  template <class F>
  auto or_abort(const F& f) -> decltype(f()) {
    try {
      return f();
    } catch (...) {
      abort();
      throw;
    }
  }

 private:
  /// An operation that the device's stream waits for.
  struct DeviceWait final : Flight {
    Connection& by;
    Started started;
    FlightRecord record;
    std::optional<WaitTime> time = {};
    DeviceWait(Connection& c, std::unique_ptr<StreamMark> mark, Doing doing, FlightRecord r)
        : Flight(&c), by(c), started{std::move(mark), {}, std::move(doing)}, record(std::move(r)) {
      started.doing.late = true;
    }
    bool has_ended() override {
      const bool ended = late([this] { return by.has_passed(started, false); });
      if (ended) record.ends();
      return ended;
    }
    void check(bool waits) override {
      late([&] {
        if (by.has_passed(started, true) || !waits) return;
        if (!time) {
          time.emplace();
          record.waits();
        }
        by.or_abort([&] { by.check_time(started.doing, *time); });
      });
    }
    /// Calls f(), and adds to its errors what the op would add.
    template <class F>
    auto late(const F& f) -> decltype(f()) {
      try {
        return f();
      } catch (const Error& error) {
        if (typeid(error) != typeid(Error)) throw;
        throw LateError(error.what() + (started.doing.is_of_op() ? " (" + by.use_.device + ")" : ""));
      }
    }
  };
  struct Arriving final : Request::Pending {
    Connection& by;
    Started started;
    Arriving(Connection& c, Started s) : by(c), started(std::move(s)) {}
    ~Arriving() noexcept override {
      if (started.mark) by.dropped_.push_back(std::move(started));
    }
    bool test() override { return by.has_passed(started, true); }
    void wait() override { wait_recorded({}); }
    void wait_recorded(const FlightRecord& record) override {
      by.require();
      by.or_abort([&] { started.mark->hold_device(); });
      by.flights().add(std::make_unique<DeviceWait>(by, std::move(started.mark), started.doing, record));
      started = {};
    }
  };

  [[nodiscard]] Flights& flights() const { return *use_.pool->device_memory()->flights(); }
  /// Throws if a wait is longer than the watchdog allows.
  void check_time(const Doing& doing, WaitTime& time, const char* what = "the operation of NCCL") const {
    if (timeout_.count() > 0 && time.so_far() > timeout_)
      throw Error(doing.text() + ": " + what + " has not ended after " + std::to_string(timeout_.count() / 1000) +
                  " seconds (--collective-timeout); NCCL_DEBUG=INFO shows which links NCCL uses");
  }
  /// Whether the stream has come past the mark. Unless it has, and if `asks`, throws if it never will.
  bool has_passed(const Started& started, bool asks) {
    return or_abort([&] {
      require();
      if (started.mark->passed()) return true;
      if (!asks) return false;
      staged_.check_failure();
      Result error = Result::success;
      check(started.doing, "ncclCommGetAsyncError", nccl().CommGetAsyncError(comm_, &error));
      if (error != Result::in_progress) check(started.doing, "an operation of NCCL", error);
      return false;
    });
  }
  void await(const Started& started) {
    constexpr int polls = 256;  // between two questions, which take longer
    WaitTime time;
    for (int i = 1; !has_passed(started, i == polls); i = i % polls + 1) {
      if (i == polls) or_abort([&] { check_time(started.doing, time); });
      std::this_thread::yield();
    }
  }
  /// Aborts. The operations under way end soon, but NCCL's call returns only when the other members on this machine
  /// have made it, too. They do so when they learn of the failure. This thread is to tell them, so another one calls.
  void abort() {
    failed_ = true;
    ncclComm* const comm = std::exchange(comm_, nullptr);
    if (comm == nullptr) return;
    const auto call = nccl().CommAbort;
    try {
      std::packaged_task<void()> task([call, comm] { call(comm); });
      aborted_ = task.get_future();
      std::thread(std::move(task)).detach();
    } catch (const std::exception&) {  // no thread or memory to be had: then here
      call(comm);
    }
    constexpr std::chrono::milliseconds soon{200};  // then no operation uses the buffers any more
    if (aborted_.valid()) aborted_.wait_for(soon);
  }

  Communicator& staged_;
  const Use& use_;
  std::shared_ptr<Stream> stream_;
  std::chrono::milliseconds timeout_{0};
  ncclComm* comm_ = nullptr;  ///< null before `open`, and after `abort`
  bool failed_ = false;
  std::future<void> aborted_;      ///< is there when `abort` has been called, and ready when NCCL has done it
  std::deque<Started> dropped_;    ///< operations that nobody waits for
  std::vector<Started> failures_;  ///< operations that started in part
};

}  // namespace shardlib::detail::nccl
