// The erased communicator: one group of devices, bytes in, bytes out. Backends stand in comm/.
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <utility>

#include "shardlib/memory/buffer.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib {

/// How a collective reduces: `sum` adds, `max` takes the largest.
enum class Reduction { sum, max };

/// A communication under way. `wait` completes it; a Request that is dropped without `wait` is waited for, unless an
/// exception drops it: a failing device must not wait for the others.
class Request {
 public:
  /// What a backend implements.
  struct Pending {
    virtual ~Pending() = default;
    virtual void wait() = 0;  ///< blocks; may be called once
    virtual bool test() = 0;  ///< makes progress; true when `wait` would not block
  };
  Request() = default;
  explicit Request(std::unique_ptr<Pending> pending) : pending_(std::move(pending)) {}
  Request(Request&&) noexcept = default;
  Request& operator=(Request&&) = delete;
  ~Request() noexcept(false) {
    if (std::uncaught_exceptions() <= exceptions_) wait();
  }
  void wait() {
    if (auto pending = std::move(pending_)) pending->wait();
  }
  bool test() { return !pending_ || pending_->test(); }  ///< makes progress; true when `wait` would not block
  /// Waits for it no more, and leaves it to itself; its buffers stay alive as long as the other devices need them.
  void drop() { pending_.reset(); }

 private:
  std::unique_ptr<Pending> pending_;
  int exceptions_ = std::uncaught_exceptions();
};

/// One group of devices, seen from one member, number `rank` of `size`. Every member calls the same operations in the
/// same order. Blocks are in rank order. Nonblocking operations keep handles to their buffers until they complete; the
/// receive buffer is defined, and the send buffer may be overwritten, only after `wait`.
class Communicator {
 public:
  virtual ~Communicator() = default;
  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;

  /// Whether `rows` may be more than 1. What all_gather makes and reduce_scatter takes then consists of so many rows,
  /// and a rank's block of its pieces of each: it is written or read where it stands, without a copy in rank order.
  [[nodiscard]] virtual bool takes_rows() const = 0;

  /// Every device contributes `send` (s bytes); `recv` holds size() * s bytes.
  virtual Request all_gather(Buffer send, Buffer recv, std::size_t rows = 1) = 0;
  /// Whether blocks of so many bytes can be gathered as a view.
  [[nodiscard]] virtual bool has_views(std::size_t bytes) const = 0;
  /// all_gather without a copy: once complete, `*whole` is a view of the blocks where the devices have them, for as
  /// long as a handle to it exists; writing to it is a fault. While any device has a view of a `send`, that is not
  /// `unique`.
  virtual Request gather_view(Buffer send, std::shared_ptr<Buffer> whole) = 0;
  /// Block j of `send` goes to rank j; block i of `recv` comes from rank i. Both hold size() equal blocks.
  virtual Request all_to_all(Buffer send, Buffer recv) = 0;
  /// `send` holds size() blocks; `recv` gets the reduction of block rank() of all members. Sums follow the balanced
  /// binary tree over ranks: sum(lo, hi) = sum(lo, mid) + sum(mid, hi), mid = lo + bit_floor(hi - lo - 1), the same on
  /// every backend. bf16 has bf16 on the wire, an f32 sum and one rounding.
  virtual Request reduce_scatter(Buffer send, Buffer recv, DType dtype, Reduction op, std::size_t rows = 1) = 0;
  /// `recv` gets the reduction of all members' `send`, the same bits on every rank (same tree as reduce_scatter).
  virtual Request all_reduce(Buffer send, Buffer recv, DType dtype, Reduction op) = 0;
  /// Sends to `to` and receives from `from` (ranks of the group) at once; messages of a pair stay in order.
  Request send_recv(Buffer send, int to, Buffer recv, int from) {
    this->send(std::move(send), to);
    return this->recv(std::move(recv), from);
  }
  virtual Request send(Buffer buffer, int to) = 0;
  virtual Request recv(Buffer buffer, int from) = 0;
  virtual void barrier() = 0;  ///< returns once every member has called it
};

}  // namespace shardlib
