// The erased communicator: one group of devices, bytes in, bytes out.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "shardlib/comm/checks.hpp"
#include "shardlib/comm/collective_call.hpp"
#include "shardlib/comm/flight_recorder.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/types/call_site.hpp"

namespace shardlib {

/// A communication under way. `wait` completes it. For a collective of GPUs by NCCL, `wait` makes the device's stream
/// wait, and the host continues. The destructor of a Request waits for it, unless an exception is in flight: a failing
/// device must not wait for the others.
class Request {
 public:
  /// What a backend has started. The interface that it implements.
  struct Pending {
    virtual ~Pending() = default;
    virtual void wait() = 0;  ///< blocks; may be called once
    virtual bool test() = 0;  ///< makes progress; true when `wait` would not block
    /// `wait`, which the recorder shows.
    virtual void wait_recorded(const detail::FlightRecord& record) {
      record.waits();
      wait();
      record.ends();
    }
  };
  Request() = default;
  explicit Request(std::unique_ptr<Pending> pending) : pending_(std::move(pending)) {}
  Request(Request&&) noexcept = default;
  Request& operator=(Request&&) = delete;
  ~Request() noexcept(false) {
    if (std::uncaught_exceptions() <= exceptions_) wait();
  }
  void wait() {
    if (auto pending = std::move(pending_)) {
      const detail::FlightRecord record = std::move(record_);
      pending->wait_recorded(record);
    }
  }
  bool test() { return !pending_ || pending_->test(); }  ///< makes progress; true when `wait` would not block
  /// Abandons the request. Its buffers live until no other device needs them.
  void drop() {
    pending_.reset();
    std::exchange(record_, {}).ends();
  }

 private:
  friend class Communicator;
  std::unique_ptr<Pending> pending_;
  detail::FlightRecord record_;
  int exceptions_ = std::uncaught_exceptions();
};

/// One group of devices, seen from one member with number `rank` of `size`. Every member calls the same operations in
/// the same order. A call carries its op, op spec and line, and the members compare them. A block is the bytes that a
/// buffer has for one rank, or from one; blocks are in rank order.
/// Nonblocking operations keep handles to their buffers until they complete. Only after `wait` is the receive buffer
/// defined, and may the send buffer of a collective be overwritten: device memory by what the device's stream does from
/// then on.
class Communicator {
 public:
  virtual ~Communicator() = default;
  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;

  /// Whether `rows` may exceed 1. The whole array, the result of all_gather or the operand of reduce_scatter, then has
  /// `rows` rows. A rank's block is one piece of each row, and is read or written in place.
  [[nodiscard]] virtual bool takes_rows() const = 0;

  /// Every device contributes `send` (s bytes); `recv` holds size() * s bytes.
  Request all_gather(const Buffer& send, const Buffer& recv, std::size_t rows = 1, Site site = Site::current()) {
    detail::check_fit("all_gather", size(), send, recv, detail::Fit::recv_n_times);
    detail::check_rows("all_gather", send.bytes(), 1, rows, takes_rows());
    return start({.kind = detail::Collective::all_gather, .bytes = send.bytes(), .rows = rows}, site, {send, recv});
  }
  /// Whether shards of `bytes` bytes can be gathered as a view.
  [[nodiscard]] virtual bool has_views(std::size_t bytes) const = 0;
  /// all_gather without a copy. Once complete, `*whole` is a view of the shards in the devices' own memory. It is valid
  /// as long as a handle to it exists. Writing to it is a fault. While a device has a view of `send`, `send.unique()`
  /// is false.
  Request gather_view(const Buffer& send, std::shared_ptr<Buffer> whole, Site site = Site::current()) {
    if (!has_views(send.bytes())) detail::fail_view();
    return start({.kind = detail::Collective::gather_view, .bytes = send.bytes()}, site,
                 {send, Buffer(), std::move(whole)});
  }
  /// Block j of `send` goes to rank j; block i of `recv` comes from rank i. Both hold size() equal blocks.
  Request all_to_all(const Buffer& send, const Buffer& recv, Site site = Site::current()) {
    detail::check_all_to_all(size(), send, recv);
    return start({.kind = detail::Collective::all_to_all, .bytes = send.bytes()}, site, {send, recv});
  }
  /// `send` holds size() blocks; `recv` gets the reduction of block rank() of all members. Sums follow the balanced
  /// binary tree over ranks: sum(lo, hi) = sum(lo, mid) + sum(mid, hi), mid = lo + bit_floor(hi - lo - 1). It is the
  /// same on every backend. A sum of bf16 sends bf16, adds in f32 and rounds once.
  Request reduce_scatter(const Buffer& send, const Buffer& recv, DType dtype, Reduction op, std::size_t rows = 1,
                         Site site = Site::current()) {
    detail::check_reduction("reduce_scatter", size(), send, recv, detail::Fit::send_n_times, dtype);
    detail::check_rows("reduce_scatter", recv.bytes(), size_of(dtype), rows, takes_rows());
    return start(
        {.kind = detail::Collective::reduce_scatter, .bytes = send.bytes(), .dtype = dtype, .op = op, .rows = rows},
        site, {send, recv});
  }
  /// `recv` gets the reduction of all members' `send`, the same bits on every rank (same tree as reduce_scatter).
  Request all_reduce(const Buffer& send, const Buffer& recv, DType dtype, Reduction op, Site site = Site::current()) {
    detail::check_reduction("all_reduce", size(), send, recv, detail::Fit::same, dtype);
    return start({.kind = detail::Collective::all_reduce, .bytes = send.bytes(), .dtype = dtype, .op = op}, site,
                 {send, recv});
  }
  /// Returns once every member has called it.
  void barrier(Site site = Site::current()) { start({.kind = detail::Collective::barrier}, site, {}).wait(); }

  /// Sends to `to` and receives from `from` (ranks of the group) at once; messages of a pair stay in order. A message
  /// is read when its receiver takes it, which the sender's requests do not wait for: it must stay unchanged until
  /// then. A send copies only memory that its handles do not keep alive.
  Request send_recv(const Buffer& send, int to, const Buffer& recv, int from, Site site = Site::current()) {
    this->send(send, to, site);
    return this->recv(recv, from, site);
  }
  /// Sends to the member that is `places` later in the ring of all members, and receives from the one that is as many
  /// earlier. Every member calls it. It may be a collective: then a member that does not call it leaves the others
  /// waiting at its start.
  Request shift(const Buffer& send, const Buffer& recv, int places, Site site = Site::current()) {
    const int n = size(), by = (places % n + n) % n;
    if (!shifts(send, recv)) return send_recv(send, (rank() + by) % n, recv, (rank() - by + n) % n, site);
    detail::check_fit("shift", n, send, recv, detail::Fit::same);
    return start({.kind = detail::Collective::shift, .bytes = send.bytes(), .places = by}, site, {send, recv});
  }
  Request send(const Buffer& buffer, int to, Site site = Site::current()) {
    detail::check_peer("send to", size(), to);
    const detail::OpInfo op = caller("send", site);
    return recorded(recorder_.sends(op, buffer.bytes(), to), [&] { return start_send(detail::owned(buffer), to, op); });
  }
  Request recv(const Buffer& buffer, int from, Site site = Site::current()) {
    detail::check_peer("recv from", size(), from);
    const detail::OpInfo op = caller("recv", site);
    return recorded(recorder_.receives(op, buffer.bytes(), from), [&] { return start_recv(buffer, from, op); });
  }
  /// A message that this member sends to `peer`, or receives from it.
  struct Message {
    Buffer buffer;
    int peer = 0;
  };
  /// One member's part of an exchange.
  struct Messages {
    std::vector<Message> sends = {}, receives = {};
  };
  /// Whether `exchange` is a collective. If not, it is messages. Its buffers are in the memory of the device.
  [[nodiscard]] virtual bool exchanges() const { return false; }
  /// All messages that the members send each other at one place of their program. Every member calls it, also without
  /// messages of its own. If it is a collective, those that do not call it leave the others waiting at its start.
  Request exchange(const Messages& messages, Site site = Site::current()) {
    if (exchanges()) return start({.kind = detail::Collective::exchange}, site, {.messages = &messages});
    std::vector<Request> all;
    for (const Message& message : messages.receives) all.push_back(recv(message.buffer, message.peer, site));
    for (const Message& message : messages.sends) all.push_back(send(message.buffer, message.peer, site));
    return Request(std::make_unique<Several>(std::move(all)));
  }
  /// Says whether messages of device memory between this member and `peer` go from device to device from now on, or, as
  /// at first, through host memory. Both call it at the same place among their messages. The first call with `direct`
  /// waits for the other member's.
  virtual void set_direct(int /*peer*/, bool /*direct*/) {}

  /// Throws if another device has failed, as far as it is known, so that what waits for it ends.
  virtual void check_failure() const {}

  /// From now on, the flight recorder records this group's communications.
  void record(detail::GroupRecorder recorder) { recorder_ = std::move(recorder); }
  /// From now on, the collectives of ops compare what the members were given.
  void compare_given(detail::GivenReader given) { given_ = std::move(given); }

 protected:
  /// The operands of a collective.
  struct Operands {
    Buffer send = {};
    Buffer recv = {};
    std::shared_ptr<Buffer> whole = {};  ///< the result of gather_view
    const Messages* messages = nullptr;  ///< of an exchange
    detail::GivenWindow given = {};      ///< what the member was given since the group's last collective
  };
  /// Starts a collective whose arguments have been checked. Throws Error if it finds that another member has started a
  /// different one.
  virtual Request start_collective(const detail::CollectiveCall& call, const detail::OpInfo& op,
                                   const Operands& operands) = 0;
  /// Whether a shift of these buffers is a collective. If not, it is messages.
  [[nodiscard]] virtual bool shifts(const Buffer& /*send*/, const Buffer& /*recv*/) const { return false; }
  /// Starts a message. `op` is the op, or otherwise the line, that sends or receives it.
  virtual Request start_send(const Buffer& buffer, int to, const detail::OpInfo& op) = 0;
  virtual Request start_recv(const Buffer& buffer, int from, const detail::OpInfo& op) = 0;
  /// Starts a collective of another communicator, whose wrapper has the checked arguments.
  static Request start_in(Communicator& inner, const detail::CollectiveCall& call, const detail::OpInfo& op,
                          const Operands& operands) {
    return inner.start_collective(call, op, operands);
  }
  /// `shifts` of another communicator.
  [[nodiscard]] static bool shifts_in(const Communicator& inner, const Buffer& send, const Buffer& recv) {
    return inner.shifts(send, recv);
  }
  /// How long a communication may take; 0: forever.
  [[nodiscard]] std::chrono::milliseconds timeout() const { return recorder_.timeout(); }
  /// The start of a communication waits for other members: the recorder shows this as it shows `Request::wait`.
  void record_wait() const { starting_->waits(); }
  /// That wait is over.
  void record_run() const { starting_->runs(); }

 private:
  /// Several requests as one.
  struct Several final : Request::Pending {
    std::vector<Request> all;
    explicit Several(std::vector<Request> a) : all(std::move(a)) {}
    ~Several() noexcept override {
      for (Request& request : all) request.drop();  // so its destructor does not wait
    }
    void wait() override {
      for (Request& request : all) request.wait();
    }
    bool test() override {
      return std::ranges::all_of(all, [](Request& request) { return request.test(); });
    }
  };
  /// The op that communicates, or otherwise the line that called the communicator.
  static detail::OpInfo caller(const char* name, const Site& site) {
    if (const detail::OpInfo* const op = detail::Calling::innermost) return *op;
    return {name, {}, site};
  }
  template <class F>
  Request recorded(detail::FlightRecord record, const F& f) {
    starting_ = &record;
    Request request = f();
    if (request.pending_)
      request.record_ = std::move(record);
    else
      record.ends();
    return request;
  }
  Request start(detail::CollectiveCall call, const Site& site, Operands operands) {
    const detail::OpInfo op = caller("", site);
    call.caller = detail::fingerprint(op);
    if (*op.name != '\0') operands.given = given_.next();
    return recorded(recorder_.starts(call, op), [&] { return start_collective(call, op, operands); });
  }

  detail::GroupRecorder recorder_;
  detail::GivenReader given_;
  const detail::FlightRecord* starting_ = nullptr;  ///< of the communication that starts
};

}  // namespace shardlib
