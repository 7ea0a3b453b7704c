// Devices as MPI ranks: what everything else sees as a Communicator.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/comm.hpp"
#include "shardlib/comm/mpi_process.hpp"
#include "shardlib/comm/reduce_tree.hpp"
#include "shardlib/comm/single.hpp"
#include "shardlib/device.hpp"
#include "shardlib/error.hpp"

namespace shardlib {

namespace detail::mpi {

/// The longest single message; what is longer goes in pieces, because MPI counts are ints. Tests lower it.
inline std::size_t longest_message = std::size_t{1} << 30;
/// Vectors whose copies from all ranks together stay below this are reduced by everybody: one step instead of two.
inline constexpr std::size_t small_all_reduce = 32768;

inline int to_count(std::size_t bytes) {
  return static_cast<int>(bytes);
}

/// A communication under way: MPI requests, the buffers that they use, and what to do when they are done.
struct Op {
  std::string_view name;
  std::size_t bytes = 0;
  std::vector<MPI_Request> requests = {};
  std::vector<Buffer> buffers = {};
  std::vector<std::size_t> expected = {};  ///< per request: bytes of a user's recv, `anything` otherwise
  std::function<void(Op&)> next = {};      ///< the second phase; may add requests
  std::vector<MPI_Status> statuses = {};
  bool done = false;

  static constexpr std::size_t anything = std::numeric_limits<std::size_t>::max();

  MPI_Request* add(std::size_t expect = anything) {
    expected.push_back(expect);
    return &requests.emplace_back(MPI_REQUEST_NULL);
  }
  void send(MPI_Comm comm, const std::byte* data, std::size_t size, int to, int tag) {
    std::size_t sent = 0;
    do {
      const std::size_t piece = std::min(longest_message, size - sent);
      check(MPI_Isend(data + sent, to_count(piece), MPI_BYTE, to, tag, comm, add()), name, bytes);
      sent += piece;
    } while (sent < size);
  }
  void recv(MPI_Comm comm, std::byte* data, std::size_t size, int from, int tag) {
    std::size_t received = 0;
    do {
      const std::size_t piece = std::min(longest_message, size - received);
      check(MPI_Irecv(data + received, to_count(piece), MPI_BYTE, from, tag, comm, add(piece)), name, bytes);
      received += piece;
    } while (received < size);
  }
  /// True when complete.
  bool advance() {
    if (done) return true;
    statuses.resize(requests.size());
    int all = 0;
    const int code = MPI_Testall(static_cast<int>(requests.size()), requests.data(), &all, statuses.data());
    if (code == MPI_ERR_IN_STATUS) {
      for (const MPI_Status& status : statuses) {
        if (status.MPI_ERROR != MPI_ERR_PENDING) check(status.MPI_ERROR, name, bytes);
      }
    }
    check(code, name, bytes);
    if (all == 0) return false;
    requests.clear();
    done = true;  // for good if what came does not fit
    const auto sizes = std::exchange(expected, {});
    for (std::size_t i = 0; i < sizes.size(); ++i) check_size(statuses[i], sizes[i]);
    if (next) std::exchange(next, nullptr)(*this);
    done = requests.empty() && !next;
    if (done) buffers.clear();
    return done;
  }

 private:
  static void check_size(const MPI_Status& status, std::size_t expect) {
    if (expect == anything) return;
    int count = 0;
    MPI_Get_count(&status, MPI_BYTE, &count);
    const auto received = static_cast<std::size_t>(count);
    if (received != expect) fail_recv(status.MPI_SOURCE, expect, received);
  }
};

/// All communications under way of this rank. Open MPI makes no progress in the background, and an all_reduce has a
/// second phase, so waiting for one request moves all of them on; that is what allows any order of waits.
class Progress {
 public:
  Progress() = default;
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  /// What never completed still belongs to MPI, so its buffers must outlive us.
  ~Progress() {
    static auto* const leaked = new std::list<std::shared_ptr<Op>>;
    leaked->splice(leaked->end(), pending_);
  }

  std::shared_ptr<Op> start(std::shared_ptr<Op> op) {
    if (!op->advance()) pending_.push_back(op);
    return op;
  }
  void advance() {
    pending_.remove_if([](const std::shared_ptr<Op>& op) { return op->advance(); });
  }
  void wait(const Op& op) {
    while (!op.done) advance();
  }
  /// Completes what nobody waits for: sends.
  void drain() {
    while (!pending_.empty()) advance();
  }
  /// After a failure the other members may never come to free a communicator.
  void fail() { failed_ = true; }
  [[nodiscard]] bool may_free() const { return !failed_ && pending_.empty() && running(); }

 private:
  bool failed_ = false;
  std::list<std::shared_ptr<Op>> pending_;
};

struct OpRequest final : Request::State {
  std::shared_ptr<Progress> progress;
  std::shared_ptr<Op> op;
  OpRequest(std::shared_ptr<Progress> p, std::shared_ptr<Op> o) : progress(std::move(p)), op(std::move(o)) {}
  bool test() override {
    progress->advance();
    return op->done;
  }
  void wait() override { progress->wait(*op); }
};

}  // namespace detail::mpi

/// A group of MPI ranks. A `send` never waits for its receiver: the posted handle keeps the memory alive, and later
/// calls complete it.
class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(MPI_Comm comm, std::shared_ptr<detail::mpi::Progress> progress, std::shared_ptr<Pool> pool)
      : comm_(comm), progress_(std::move(progress)), pool_(std::move(pool)) {
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
  }
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;
  ~MpiCommunicator() override {
    if (progress_->may_free()) MPI_Comm_free(&comm_);
  }

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }

  Request all_gather(Buffer send, Buffer recv) override {
    detail::check_fit("all_gather", size_, send, recv, detail::Fit::recv_n_times);
    const auto op = make_op("all_gather", send, recv);
    const std::size_t block = send.bytes();
    if (recv.bytes() <= detail::mpi::longest_message) {
      const int count = detail::mpi::to_count(block);
      check(*op, MPI_Iallgather(send.data(), count, MPI_BYTE, recv.data(), count, MPI_BYTE, comm_, op->add()));
    } else {
      const int tag = next_tag();
      detail::copy_bytes(recv.data() + index(rank_) * block, send.data(), block);
      for_peers([&](int peer) {
        op->recv(comm_, recv.data() + index(peer) * block, block, peer, tag);
        op->send(comm_, send.data(), block, peer, tag);
      });
    }
    return start(op);
  }
  Request all_to_all(Buffer send, Buffer recv) override {
    detail::check_all_to_all(size_, send, recv);
    const auto op = make_op("all_to_all", send, recv);
    const std::size_t block = send.bytes() / index(size_);
    if (recv.bytes() <= detail::mpi::longest_message) {
      const int count = detail::mpi::to_count(block);
      check(*op, MPI_Ialltoall(send.data(), count, MPI_BYTE, recv.data(), count, MPI_BYTE, comm_, op->add()));
    } else {
      const int tag = next_tag();
      detail::copy_bytes(recv.data() + index(rank_) * block, send.data() + index(rank_) * block, block);
      for_peers([&](int peer) {
        op->recv(comm_, recv.data() + index(peer) * block, block, peer, tag);
        op->send(comm_, send.data() + index(peer) * block, block, peer, tag);
      });
    }
    return start(op);
  }
  Request reduce_scatter(Buffer send, Buffer recv, DType dtype, Reduction reduction) override {
    detail::check_reduction("reduce_scatter", size_, send, recv, detail::Fit::send_n_times, dtype);
    const auto op = make_op("reduce_scatter", send, recv);
    const std::size_t block = recv.bytes();
    const auto slice = [block](int r) { return Slice{index(r) * block, block}; };
    exchange_and_reduce(*op, send, slice, recv.data(), dtype, reduction, next_tag());
    return start(op);
  }
  Request all_reduce(Buffer send, Buffer recv, DType dtype, Reduction reduction) override {
    detail::check_reduction("all_reduce", size_, send, recv, detail::Fit::same, dtype);
    const auto op = make_op("all_reduce", send, recv);
    if (send.bytes() * index(size_) <= detail::mpi::small_all_reduce) {
      all_reduce_small(*op, send, recv, dtype, reduction);
    } else {
      all_reduce_sliced(*op, send, recv, dtype, reduction);
    }
    return start(op);
  }
  Request send_recv(Buffer send, int to, Buffer recv, int from) override {
    this->send(std::move(send), to);
    return this->recv(std::move(recv), from);
  }
  Request send(Buffer buffer, int to) override {
    detail::check_peer("send to", size_, to);
    const auto op = make_op("send", buffer, {});
    op->send(comm_, buffer.data(), buffer.bytes(), to, message_tag);
    progress_->start(op);
    return {};
  }
  Request recv(Buffer buffer, int from) override {
    detail::check_peer("recv from", size_, from);
    const auto op = make_op("recv", buffer, {});
    op->recv(comm_, buffer.data(), buffer.bytes(), from, message_tag);
    return start(op);
  }
  void barrier() override {
    const auto op = make_op("barrier", {}, {});
    check(*op, MPI_Ibarrier(comm_, op->add()));
    start(op).wait();
  }

 private:
  using Op = detail::mpi::Op;
  struct Slice {
    std::size_t begin;
    std::size_t bytes;
  };
  static constexpr int message_tag = 0;

  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  static void check(const Op& op, int code) { detail::mpi::check(code, op.name, op.bytes); }
  static std::shared_ptr<Op> make_op(std::string_view name, const Buffer& send, const Buffer& recv) {
    return std::make_shared<Op>(Op{.name = name, .bytes = send.bytes(), .buffers = {send, recv}});
  }
  Request start(const std::shared_ptr<Op>& op) {
    return Request(std::make_unique<detail::mpi::OpRequest>(progress_, progress_->start(op)));
  }
  /// Messages of a collective have a tag of their own, because second phases start in any order. The standard promises
  /// tags up to 32767.
  int next_tag() {
    calls_ = calls_ % 32767 + 1;
    return calls_;
  }
  /// Everybody meets a different peer in each step.
  template <class F>
  void for_peers(const F& f) const {
    for (int step = 1; step < size_; ++step) f((rank_ + step) % size_);
  }

  /// Sends slice(j) of `send` to rank j, then reduces what came for this rank into `out`.
  template <class SliceOf>
  void exchange_and_reduce(Op& op, const Buffer& send, const SliceOf& slice, std::byte* out, DType dtype,
                           Reduction reduction, int tag) {
    const Slice mine = slice(rank_);
    const Buffer received = pool_->allocate(index(size_ - 1) * mine.bytes);
    op.buffers.push_back(received);
    std::vector<const std::byte*> in(index(size_), send.data() + mine.begin);
    for_peers([&](int peer) {
      std::byte* place = received.data() + index(peer < rank_ ? peer : peer - 1) * mine.bytes;
      in[index(peer)] = place;
      op.recv(comm_, place, mine.bytes, peer, tag);
      op.send(comm_, send.data() + slice(peer).begin, slice(peer).bytes, peer, tag);
    });
    op.next = [=, in = std::move(in)](Op&) {
      detail::reduce_tree(dtype, reduction, in, out, mine.bytes / size_of(dtype));
    };
  }
  void all_reduce_sliced(Op& op, const Buffer& send, const Buffer& recv, DType dtype, Reduction reduction) {
    const std::size_t count = send.bytes() / size_of(dtype);
    const std::size_t step = (count + index(size_) - 1) / index(size_) * size_of(dtype);
    const auto slice = [step, bytes = send.bytes()](int r) {
      const std::size_t begin = std::min(index(r) * step, bytes);
      return Slice{begin, std::min(step, bytes - begin)};
    };
    const int tag = next_tag();
    exchange_and_reduce(op, send, slice, recv.data() + slice(rank_).begin, dtype, reduction, tag);
    op.next = [=, this, reduce = std::move(op.next), out = recv.data()](Op& phase) {
      reduce(phase);
      for_peers([&](int peer) {
        phase.recv(comm_, out + slice(peer).begin, slice(peer).bytes, peer, tag);
        phase.send(comm_, out + slice(rank_).begin, slice(rank_).bytes, peer, tag);
      });
    };
  }
  void all_reduce_small(Op& op, const Buffer& send, const Buffer& recv, DType dtype, Reduction reduction) {
    const std::size_t bytes = send.bytes();
    const Buffer all = pool_->allocate(index(size_) * bytes);
    op.buffers.push_back(all);
    const int count = detail::mpi::to_count(bytes);
    check(op, MPI_Iallgather(send.data(), count, MPI_BYTE, all.data(), count, MPI_BYTE, comm_, op.add()));
    std::vector<const std::byte*> in;
    for (int r = 0; r < size_; ++r) in.push_back(all.data() + index(r) * bytes);
    op.next = [=, in = std::move(in), out = recv.data()](Op&) {
      detail::reduce_tree(dtype, reduction, in, out, bytes / size_of(dtype));
    };
  }

  MPI_Comm comm_;
  int rank_ = 0;
  int size_ = 1;
  int calls_ = 0;
  std::shared_ptr<detail::mpi::Progress> progress_;
  std::shared_ptr<Pool> pool_;
};

/// This process as one device of a mesh whose devices are the first ranks of MPI_COMM_WORLD.
class MpiWorld final : public Backend {
 public:
  std::unique_ptr<Communicator> group(const std::vector<int>& members, int,
                                      const std::shared_ptr<Pool>& pool) override {
    using detail::mpi::check;
    MPI_Group world = MPI_GROUP_NULL;
    MPI_Group group = MPI_GROUP_NULL;
    MPI_Comm comm = MPI_COMM_NULL;
    // Groups that form at the same time need distinct tags; the standard promises tags up to 32767.
    std::uint32_t tag = 0;
    for (const int member : members) tag = tag * 31 + static_cast<std::uint32_t>(member) + 1;
    check(MPI_Comm_group(MPI_COMM_WORLD, &world), "group", 0);
    check(MPI_Group_incl(world, static_cast<int>(members.size()), members.data(), &group), "group", 0);
    check(MPI_Comm_create_group(MPI_COMM_WORLD, group, static_cast<int>(tag % 32768), &comm), "group", 0);
    MPI_Group_free(&group);
    MPI_Group_free(&world);
    return std::make_unique<MpiCommunicator>(comm, progress_, pool);
  }
  /// Completes the sends that nobody waited for.
  void drain() { progress_->drain(); }
  /// Leaves the communicators to MPI_Finalize.
  void fail() { progress_->fail(); }

 private:
  std::shared_ptr<detail::mpi::Progress> progress_ = std::make_shared<detail::mpi::Progress>();
};

}  // namespace shardlib
