// Definitions of nccl.hpp.
#pragma once

#include "shardlib/comm/nccl.hpp"

#include <cstdint>
#include <exception>
#include <optional>
#include <thread>
#include <typeinfo>
#include <utility>
#include <vector>

#include "shardlib/comm/flight_recorder.hpp"
#include "shardlib/comm/impl/nccl_members.hpp"
#include "shardlib/comm/reduce_tree.hpp"
#include "shardlib/memory/faults.hpp"
#include "shardlib/memory/flights.hpp"
#include "shardlib/memory/region.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail::nccl {

inline Type type_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return Type::float32;
    case DType::f64:
      return Type::float64;
    case DType::bf16:
      return Type::bfloat16;
    case DType::i32:
      return Type::int32;
    case DType::u32:
      return Type::uint32;
    case DType::u8:
    case DType::bool_:
      break;
  }
  return Type::uint8;
}

/// A collective under way, for errors, which ops begin with their names and lines.
struct Doing {
  CollectiveCall call;
  OpInfo op;
  bool late = false;  ///< another op may run when they are found
  [[nodiscard]] bool is_of_op() const { return *op.name != '\0'; }
  [[nodiscard]] std::string text() const {
    if (late && is_of_op()) return op.describe() + ": " + to_string(call);
    return to_string(call) + (late || Calling::innermost == nullptr ? op.at() : "");
  }
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::unique_ptr<Communicator> staged, Use use) : staged_(std::move(staged)), use_(std::move(use)) {}
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  ~NcclCommunicator() override {
    // Others may wait for what this device has started and dropped. Where a member has failed, NCCL could wait
    // forever.
    try {
      staged_->check_failure();
      if (std::uncaught_exceptions() > 0) abort();
      if (comm_ != nullptr) flights().finish(this);
      for (const Started& flight : dropped_)
        if (comm_ != nullptr) await(*flight.mark, Doing{});
      // It asks for errors meanwhile. ncclCommDestroy alone would wait for the others without an end.
      if (comm_ != nullptr && nccl().CommFinalize != nullptr)
        check(Doing{}, "ncclCommFinalize", nccl().CommFinalize(comm_));
    } catch (...) {
      abort();
    }
    flights().remove(this);
    if (comm_ != nullptr) nccl().CommDestroy(comm_);
  }

  [[nodiscard]] int rank() const override { return staged_->rank(); }
  [[nodiscard]] int size() const override { return staged_->size(); }
  [[nodiscard]] bool takes_rows() const override { return false; }
  [[nodiscard]] bool has_views(std::size_t /*bytes*/) const override { return false; }
  void check_failure() const override { staged_->check_failure(); }

 private:
  enum class State : std::uint8_t { undecided, uses_nccl, uses_host, failed };
  /// A collective that has started. It keeps its buffers until the device's stream waits for it. When the host frees
  /// them then, their memory goes to later work of that stream, or of NCCL's stream, which follows it.
  struct Started {
    std::unique_ptr<StreamMark> mark;
    std::vector<Buffer> buffers;
  };
  /// A collective that the device's stream waits for.
  struct DeviceWait final : Flight {
    NcclCommunicator& group;
    std::unique_ptr<StreamMark> mark;
    Doing doing;
    FlightRecord record;
    std::optional<WaitTime> time = {};
    DeviceWait(NcclCommunicator& g, std::unique_ptr<StreamMark> m, const Doing& d, FlightRecord r)
        : Flight(&g), group(g), mark(std::move(m)), doing{d.call, d.op, true}, record(std::move(r)) {}
    bool has_ended() override {
      const bool ended = late([this] { return group.has_passed(*mark, doing, false); });
      if (ended) record.ends();
      return ended;
    }
    void check(bool waits) override {
      late([&] {
        if (group.has_passed(*mark, doing, true) || !waits) return;
        if (!time) {
          time.emplace();
          record.waits();
        }
        group.or_abort([&] { group.check_time(doing, *time); });
      });
    }
    /// Adds to the errors of f what their op would add.
    template <class F>
    auto late(const F& f) -> decltype(f()) {
      try {
        return f();
      } catch (const Error& error) {
        if (typeid(error) != typeid(Error)) throw;
        throw LateError(error.what() + (doing.is_of_op() ? " (" + group.use_.device + ")" : ""));
      }
    }
  };
  struct Arriving final : Request::Pending {
    NcclCommunicator& group;
    Started started;
    Doing doing;
    Arriving(NcclCommunicator& g, Started s, const Doing& d) : group(g), started(std::move(s)), doing(d) {}
    ~Arriving() noexcept override {
      if (started.mark) group.dropped_.push_back(std::move(started));
    }
    bool test() override { return group.has_passed(*started.mark, doing, true); }
    void wait() override { wait_recorded({}); }
    void wait_recorded(const FlightRecord& record) override {
      if (group.state_ == State::failed) throw Aborted();
      group.or_abort([&] { started.mark->hold_device(); });
      group.flights().add(std::make_unique<DeviceWait>(group, std::move(started.mark), doing, record));
      started = {};
    }
  };

  [[nodiscard]] std::size_t ranks() const { return static_cast<std::size_t>(size()); }
  [[nodiscard]] const Functions& nccl() const { return *use_.library.functions; }
  [[nodiscard]] CUstream_st* stream() const { return use_.stream->handle(); }
  [[nodiscard]] Flights& flights() const { return *use_.pool->device_memory()->flights(); }
  [[nodiscard]] static bool on_gpu(const Buffer& send, const Buffer& recv) {
    return send.device_memory() != nullptr && recv.device_memory() != nullptr && send.bytes() > 0;
  }

  Request start_collective(const CollectiveCall& call, const OpInfo& op, const Operands& operands) override {
    const Buffer &send = operands.send, &recv = operands.recv;
    if (!on_gpu(send, recv) || state_ == State::uses_host) return start_in(*staged_, call, op, operands);
    flights().ask();
    record_wait();
    const Doing doing{call, op};
    meet(doing);
    if (state_ == State::undecided) or_abort([&] { begin_use(doing); });
    if (state_ == State::uses_host) {
      record_run();
      if (call.kind == Collective::shift) return staged_->shift(send, recv, call.places, op.site);
      return start_in(*staged_, call, op, operands);
    }
    if (state_ == State::failed) throw Aborted();
    Started started{nullptr, {send, recv}};
    or_abort([&] {
      std::erase_if(dropped_, [](const Started& dropped) { return dropped.mark->passed(); });
      use_.stream->follow_device();
      try {
        put(doing, started, send, recv);
        started.mark = use_.stream->mark();
        if (shares_process_) meet(doing);
      } catch (...) {
        failed_.push_back(std::move(started));  // a part of it may be in the stream
        throw;
      }
    });
    record_run();
    return Request(std::make_unique<Arriving>(*this, std::move(started), doing));
  }
  [[nodiscard]] bool shifts(const Buffer& send, const Buffer& recv) const override {
    return state_ != State::uses_host && on_gpu(send, recv);
  }
  Request start_send(const Buffer& buffer, int to) override { return staged_->send(buffer, to); }
  Request start_recv(const Buffer& buffer, int from) override { return staged_->recv(buffer, from); }

  /// Waits for the other members to come to the same place of the same call. Throws Error if one is in another.
  // An operation of NCCL occupies its GPU until all members have started it. Meanwhile a call of CUDA on another thread
  // of the process can wait for that GPU: a memory allocation, or the first start of a kernel, which loads it. So no
  // member may go on from a call of NCCL before all that share its process have made it.
  void meet(const Doing& doing) {
    CollectiveCall compared = doing.call;
    compared.elsewhere = true;
    start_in(*staged_, compared, doing.op, {}).wait();
  }
  /// Decides, like all members, whether the group uses NCCL. It does so with the first collective, since a
  /// communicator of NCCL takes memory of the GPU, and many groups have none.
  void begin_use(const Doing& doing) {
    UniqueId id;
    if (rank() == 0 && use_.library.functions != nullptr) check(doing, "ncclGetUniqueId", nccl().GetUniqueId(&id));
    const std::vector<Member> all = nccl::meet(*staged_, use_.library, *use_.pool->device_memory(), id);
    if (const std::string why = obstacle(all); !why.empty()) {
      if (use_.sums == GpuSums::nccl)
        throw UsageError("--sums nccl: NCCL cannot be used, as " + why + "; change that, or leave --sums out");
      state_ = State::uses_host;
      return;
    }
    use_.stream->follow_device();  // NCCL takes the thread's GPU
    // Unless it returns at once, a member that dies meanwhile would leave the others in it forever.
    Config config;
    check(doing, "ncclCommInitRank",
          nccl().CommInitRankConfig == nullptr ? nccl().CommInitRank(&comm_, size(), all[0].id, rank())
                                               : nccl().CommInitRankConfig(&comm_, size(), all[0].id, rank(), &config));
    shares_process_ = shares_process(all);
    if (shares_process_) meet(doing);
    state_ = State::uses_nccl;
  }

  /// Puts the operations of a collective into the stream.
  void put(const Doing& doing, Started& started, const Buffer& send, const Buffer& recv) {
    switch (doing.call.kind) {
      case Collective::all_gather:
        return all_gather(doing, send.data(), send.bytes(), recv.data());
      case Collective::all_to_all:
        return exchange(doing, send.data(), recv.data(), send.bytes() / ranks());
      case Collective::reduce_scatter:
        return reduce_scatter(doing, started, send, recv);
      case Collective::all_reduce:
        return all_reduce(doing, started, send, recv);
      case Collective::shift:
        return shift_by(doing, send, recv);
      case Collective::gather_view:
      case Collective::barrier:
        break;
    }
  }
  void all_gather(const Doing& doing, const std::byte* send, std::size_t bytes, std::byte* recv) const {
    check(doing, "ncclAllGather", nccl().AllGather(send, recv, bytes, Type::uint8, comm_, stream()));
  }
  /// Block j of `send` goes to rank j, and block i of `recv` comes from rank i.
  void exchange(const Doing& doing, const std::byte* send, std::byte* recv, std::size_t block) const {
    messages(doing, [&](const auto& send_to, const auto& recv_from) {
      for (int peer = 0; peer < size(); ++peer) {
        const std::size_t at = static_cast<std::size_t>(peer) * block;
        if (!send_to(peer, send + at, block) || !recv_from(peer, recv + at, block)) return;
      }
    });
  }
  void shift_by(const Doing& doing, const Buffer& send, const Buffer& recv) const {
    const int n = size(), places = doing.call.places;
    messages(doing, [&](const auto& send_to, const auto& recv_from) {
      if (send_to((rank() + places) % n, send.data(), send.bytes()))
        recv_from((rank() - places + n) % n, recv.data(), recv.bytes());
    });
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
          return is_in("ncclSend", nccl().Send(from, bytes, Type::uint8, peer, comm_, stream()));
        },
        [&](int peer, std::byte* to, std::size_t bytes) {
          return is_in("ncclRecv", nccl().Recv(to, bytes, Type::uint8, peer, comm_, stream()));
        });
    const Result ended = nccl().GroupEnd();  // also after an error, which would leave the group open
    check(doing, function, failed == Result::success ? ended : failed);
  }
  void reduce_scatter(const Doing& doing, Started& started, const Buffer& send, const Buffer& recv) const {
    const DType dtype = doing.call.dtype;
    const std::size_t n = recv.bytes() / size_of(dtype);
    if (sums_by_nccl(doing.call)) {
      const auto sum =
          nccl().ReduceScatter(send.data(), recv.data(), n, type_of(dtype), Operation::sum, comm_, stream());
      return check(doing, "ncclReduceScatter", sum);
    }
    const Buffer received = scratch(started, send.bytes());
    exchange(doing, send.data(), received.data(), recv.bytes());
    use_.tree(*use_.stream, dtype, doing.call.op, received, ranks(), n, recv);
  }
  void all_reduce(const Doing& doing, Started& started, const Buffer& send, const Buffer& recv) const {
    const DType dtype = doing.call.dtype;
    const std::size_t element = size_of(dtype), n = send.bytes() / element;
    if (sums_by_nccl(doing.call)) {
      const auto sum = nccl().AllReduce(send.data(), recv.data(), n, type_of(dtype), Operation::sum, comm_, stream());
      return check(doing, "ncclAllReduce", sum);
    }
    const auto [slice, left] = gpu_slices(n, element, ranks());
    const std::size_t sliced = slice * ranks();
    if (slice > 0) {
      const Buffer received = scratch(started, sliced * element);
      const Buffer sum = recv.slice(static_cast<std::size_t>(rank()) * slice * element, slice * element);
      exchange(doing, send.data(), received.data(), slice * element);
      use_.tree(*use_.stream, dtype, doing.call.op, received, ranks(), slice, sum);
      all_gather(doing, sum.data(), sum.bytes(), recv.data());
    }
    if (left > 0) {
      const Buffer received = scratch(started, left * element * ranks());
      all_gather(doing, send.data() + sliced * element, left * element, received.data());
      use_.tree(*use_.stream, dtype, doing.call.op, received, ranks(), left,
                recv.slice(sliced * element, left * element));
    }
  }
  /// The tree takes all maxima: NCCL does not promise that a NaN stays one.
  [[nodiscard]] bool sums_by_nccl(const CollectiveCall& call) const {
    return use_.sums == GpuSums::nccl && call.op == Reduction::sum;
  }
  Buffer scratch(Started& started, std::size_t bytes) const {
    Buffer block = started.buffers.emplace_back(use_.pool->allocate(bytes));
    use_.stream->follow_device();  // what the device still does for the block's last owner comes first
    return block;
  }

  /// Waits for the end of a call that has returned before it, as it may when NCCL connects to other members. Throws
  /// unless it succeeds.
  void check(const Doing& doing, const char* function, Result result) const {
    for (WaitTime time; result == Result::in_progress; std::this_thread::yield()) {
      staged_->check_failure();
      check_time(doing, time, function);
      if (const Result asked = nccl().CommGetAsyncError(comm_, &result); asked != Result::success) result = asked;
    }
    if (result != Result::success)
      throw Error(doing.text() + ": " + function + " failed: " + nccl().GetErrorString(result) +
                  "; SHARDLIB_NCCL=0 communicates without NCCL");
  }
  /// Throws if a wait is longer than the watchdog allows.
  void check_time(const Doing& doing, WaitTime& time, const char* what = "the operation of NCCL") const {
    if (timeout().count() > 0 && time.so_far() > timeout())
      throw Error(doing.text() + ": " + what + " has not ended after " + std::to_string(timeout().count() / 1000) +
                  " seconds (--collective-timeout); NCCL_DEBUG=INFO shows which links NCCL uses");
  }
  /// Whether the stream has come past the mark. Unless it has, and if `asks`, throws if it never will.
  bool has_passed(StreamMark& mark, const Doing& doing, bool asks) {
    return or_abort([&] {
      if (state_ == State::failed) throw Aborted();
      if (mark.passed()) return true;
      if (!asks) return false;
      staged_->check_failure();
      Result error = Result::success;
      check(doing, "ncclCommGetAsyncError", nccl().CommGetAsyncError(comm_, &error));
      if (error != Result::in_progress) check(doing, "an operation of NCCL", error);
      return false;
    });
  }
  void await(StreamMark& mark, const Doing& doing) {
    constexpr int polls = 256;  // between two questions, which take longer
    WaitTime time;
    for (int i = 1; !has_passed(mark, doing, i == polls); i = i % polls + 1) {
      if (i == polls) or_abort([&] { check_time(doing, time); });
      std::this_thread::yield();
    }
  }
  /// f(). If that throws, nothing under way can complete any more, and other members must not wait for it.
  template <class F>
  auto or_abort(const F& f) -> decltype(f()) {
    try {
      return f();
    } catch (...) {
      abort();
      throw;
    }
  }
  void abort() {
    state_ = State::failed;
    if (ncclComm* const comm = std::exchange(comm_, nullptr)) nccl().CommAbort(comm);
  }

  std::unique_ptr<Communicator> staged_;
  Use use_;
  State state_ = State::undecided;
  bool shares_process_ = false;   ///< whether two members are threads of one process
  ncclComm* comm_ = nullptr;      ///< null before the first collective, and after `abort`
  std::vector<Started> dropped_;  ///< what nobody waits for
  std::vector<Started> failed_;   ///< keeps the buffers of what started in part
};

SHARDLIB_INLINE std::unique_ptr<Communicator> group(std::unique_ptr<Communicator> staged, const Use& use) {
  return std::make_unique<NcclCommunicator>(std::move(staged), use);
}

}  // namespace shardlib::detail::nccl
