// A group of MPI ranks, behind the interface Communicator.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/comm/collective_work.hpp"
#include "shardlib/comm/communicator.hpp"
#include "shardlib/comm/mpi/process.hpp"
#include "shardlib/comm/mpi/progress.hpp"
#include "shardlib/comm/mpi/watch.hpp"
#include "shardlib/comm/reduce_tree.hpp"
#include "shardlib/comm/shm/group.hpp"
#include "shardlib/comm/shm/node.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/tuning.hpp"

namespace shardlib {

/// A group of MPI ranks. Ranks of one node do their collectives in shared memory. A `send` never waits for its
/// receiver: the posted handle keeps the memory alive, and later calls complete it.
class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(MPI_Comm comm, std::uint64_t launch, std::shared_ptr<detail::mpi::GroupLog> log,
                  std::shared_ptr<detail::mpi::ProgressEngine> progress, std::shared_ptr<Pool> pool)
      : comm_(comm), launch_(launch), log_(std::move(log)), progress_(std::move(progress)), pool_(std::move(pool)) {
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    if (!is_in_node()) detail::mpi::check(MPI_Comm_dup(comm_, &check_), "group", 0);
  }
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;
  ~MpiCommunicator() override {
    const auto shared = std::exchange(log_->shared, nullptr);  // the log stays
    if (!progress_->may_free()) return;
    MPI_Comm_free(&comm_);
    if (check_ != MPI_COMM_NULL) MPI_Comm_free(&check_);
    if (shared) shared->leave();
  }

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }

  [[nodiscard]] bool takes_rows() const override { return is_in_node(); }
  /// Inside a node an exchange or a shift is messages, which start without a comparison of the calls.
  [[nodiscard]] bool exchanges() const override { return !is_in_node(); }

  [[nodiscard]] bool has_views(std::size_t bytes) const override { return is_in_node() && detail::fits_view(bytes); }
  void check_failure() const override { progress_->check_others(*log_); }

 private:
  using MpiOp = detail::mpi::MpiOp;
  using LeaveQuery = detail::mpi::LeaveQuery;
  struct Slice {
    std::size_t begin;
    std::size_t bytes;
  };
  static constexpr int message_tag = 0;

  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  static void check(const MpiOp& op, int code) { detail::mpi::check(code, op.name, op.bytes); }
  /// Identifies the communication of an op: its number in the group, or between this rank and a peer.
  struct MessageId {
    LeaveQuery::Kind kind;
    int peer;
    std::uint64_t number;
  };
  MessageId next() { return {LeaveQuery::collective, -1, log_->collectives++}; }
  std::shared_ptr<MpiOp> make_mpi_op(std::string_view name, const Buffer& send, const Buffer& recv,
                                     const MessageId& place) {
    return progress_->add({.name = name,
                           .bytes = send.bytes(),
                           .buffers = {send, recv},
                           .group = log_,
                           .question = {launch_, log_->key(), place.kind, place.number},
                           .peer = place.peer});
  }
  Request start(const std::shared_ptr<MpiOp>& op) {
    progress_->start(op);
    return Request(std::make_unique<detail::mpi::MpiOpRequest>(progress_, op));
  }

  [[nodiscard]] bool shifts(const Buffer& /*send*/, const Buffer& /*recv*/) const override { return exchanges(); }
  Request start_collective(const detail::CollectiveCall& call, const detail::OpInfo& op,
                           const Operands& operands) override {
    using detail::Collective;
    const auto work = make_mpi_op(detail::name(call.kind), operands.send, operands.recv, next());
    if (is_in_node()) {
      // The SharedRound compares the calls.
      work->shared = call.kind == Collective::gather_view
                         ? std::make_shared<detail::shm::SharedRound>(log_->shared, call, op, operands.send,
                                                                      operands.whole, operands.given)
                         : std::make_shared<detail::shm::SharedRound>(log_->shared, call, op, operands.send,
                                                                      operands.recv, operands.given);
      return start(work);
    }
    work->compare_calls(check_, rank_, call, op, operands.given);
    switch (call.elsewhere ? Collective::barrier : call.kind) {
      case Collective::all_gather:
      case Collective::gather_view:
        all_gather(*work, call, op, operands.send, operands.recv);
        break;
      case Collective::all_to_all:
        all_to_all(*work, operands.send, operands.recv);
        break;
      case Collective::reduce_scatter:
        reduce_scatter(*work, call, op, operands.send, operands.recv);
        break;
      case Collective::all_reduce:
        if (operands.send.bytes() * index(size_) <= detail::small_all_reduce)
          all_reduce_small(*work, operands.send, operands.recv, call.dtype, call.op);
        else if (sums_nodes_first())
          all_reduce_over_nodes(*work, call, op, operands.send, operands.recv);
        else
          all_reduce_sliced(*work, operands.send, operands.recv, call.dtype, call.op);
        break;
      case Collective::exchange:
        exchange(*work, *operands.messages);
        break;
      case Collective::shift:
        exchange(*work, {.sends = {{operands.send, (rank_ + call.places) % size_}},
                         .receives = {{operands.recv, (rank_ - call.places + size_) % size_}}});
        break;
      case Collective::barrier:
        check(*work, MPI_Ibarrier(comm_, work->add()));
        break;
    }
    return start(work);
  }
  Request start_send(const Buffer& buffer, int to, const detail::OpInfo& /*op*/) override {
    const auto op = make_mpi_op("send", buffer, {}, {LeaveQuery::send, to, log_->sent[index(to)]++});
    op->send(comm_, buffer.data(), buffer.bytes(), to, message_tag);
    progress_->start(op);
    return {};
  }
  Request start_recv(const Buffer& buffer, int from, const detail::OpInfo& /*op*/) override {
    const auto op = make_mpi_op("recv", buffer, {}, {LeaveQuery::recv, from, log_->received[index(from)]++});
    op->recv(comm_, buffer.data(), buffer.bytes(), from, message_tag);
    return start(op);
  }

  /// In pieces, which MPI sends at once, while the ranks compute. A message of a `send` waits for its receiver.
  void exchange(MpiOp& op, const Messages& messages) {
    const int tag = tag_of(op);
    for (const auto& [buffer, peer] : messages.receives) {
      op.buffers.push_back(buffer);
      op.recv(comm_, buffer.data(), buffer.bytes(), peer, tag);
    }
    for (const auto& [buffer, peer] : messages.sends) {
      op.buffers.push_back(buffer);
      op.send(comm_, std::as_const(buffer).data(), buffer.bytes(), peer, tag);
    }
  }
  void all_gather(MpiOp& op, const detail::CollectiveCall& call, const detail::OpInfo& caller, const Buffer& send,
                  const Buffer& recv) {
    if (log_->shared) return all_gather_over_nodes(op, call, caller, send, recv);
    const std::size_t block = send.bytes();
    if (block <= log_->tuning.collective_piece) {
      const int count = detail::mpi::to_count(block);
      return check(op, MPI_Iallgather(send.data(), count, MPI_BYTE, recv.data(), count, MPI_BYTE, comm_, op.add()));
    }
    const int tag = tag_of(op);
    detail::copy_bytes(recv.data() + index(rank_) * block, send.data(), block);
    for_peers([&](int peer) {
      op.recv(comm_, recv.data() + index(peer) * block, block, peer, tag);
      op.send(comm_, send.data(), block, peer, tag);
    });
  }
  void all_to_all(MpiOp& op, const Buffer& send, const Buffer& recv) {
    const std::size_t block = send.bytes() / index(size_);
    if (block <= log_->tuning.collective_piece) {
      const int count = detail::mpi::to_count(block);
      return check(op, MPI_Ialltoall(send.data(), count, MPI_BYTE, recv.data(), count, MPI_BYTE, comm_, op.add()));
    }
    const int tag = tag_of(op);
    detail::copy_bytes(recv.data() + index(rank_) * block, send.data() + index(rank_) * block, block);
    for_peers([&](int peer) {
      op.recv(comm_, recv.data() + index(peer) * block, block, peer, tag);
      op.send(comm_, send.data() + index(peer) * block, block, peer, tag);
    });
  }
  void reduce_scatter(MpiOp& op, const detail::CollectiveCall& call, const detail::OpInfo& caller, const Buffer& send,
                      const Buffer& recv) {
    if (sums_nodes_first()) {
      detail::CollectiveCall inside = call;
      inside.nodes = log_->shared->nodes();
      return sum_over_nodes(op, inside, caller, send, recv.data(), recv.bytes());
    }
    const std::size_t block = recv.bytes();
    const auto slice = [block](int r) { return Slice{index(r) * block, block}; };
    exchange_and_reduce(op, send, slice, recv.data(), call.dtype, call.op, tag_of(op));
  }
  [[nodiscard]] bool is_in_node() const { return log_->shared && log_->shared->nodes() == 1; }
  /// Calls f for the ranks of the other nodes that have the same place on their node.
  template <class F>
  void for_counterparts(const F& f) const {
    const int members = static_cast<int>(log_->shared->size());
    for (int peer = (rank_ + members) % size_; peer != rank_; peer = (peer + members) % size_) f(peer);
  }
  /// Whether members of several nodes sum inside their nodes first. Only for a power of two is a node's sum a whole
  /// branch of the tree.
  [[nodiscard]] bool sums_nodes_first() const { return log_->shared && std::has_single_bit(log_->shared->size()); }
  using Round = std::shared_ptr<detail::shm::SharedRound>;
  /// Sends each block to each node once. The other ranks of that node read it there.
  void all_gather_over_nodes(MpiOp& op, detail::CollectiveCall call, const detail::OpInfo& caller, const Buffer& send,
                             const Buffer& recv) {
    call.nodes = log_->shared->nodes();
    const auto round = std::make_shared<detail::shm::SharedRound>(log_->shared, call, caller, Buffer(), recv);
    detail::copy_bytes(round->recv().data() + index(rank_) * send.bytes(), send.data(), send.bytes());
    spread_over_nodes(op, round, send.bytes());
  }
  /// Sends this rank's block of the round's recv to the counterparts, then gathers inside the node.
  void spread_over_nodes(MpiOp& op, const Round& round, std::size_t block) {
    const int tag = tag_of(op);
    std::byte* const to = round->recv().data();
    for_counterparts([&](int peer) {
      op.recv(comm_, to + index(peer) * block, block, peer, tag);
      op.send(comm_, to + index(rank_) * block, block, peer, tag);
    });
    op.next = [round, then = std::move(op.next)](MpiOp& phase) {
      phase.shared = round;
      phase.next = then;
    };
  }
  /// The ranks of a node first sum what they have for each rank, so that one block instead of many goes to each rank.
  /// This rank's block of `block` bytes goes to `out`, then `then` runs.
  void sum_over_nodes(MpiOp& op, const detail::CollectiveCall& call, const detail::OpInfo& caller, const Buffer& send,
                      std::byte* out, std::size_t block, const std::function<void(MpiOp&)>& then = nullptr) {
    const int tag = tag_of(op);
    const std::size_t count = block / size_of(call.dtype), members = log_->shared->size(), nodes = call.nodes;
    const std::size_t part = count * size_of(detail::dtype_of_sum(call.dtype));
    const Buffer sums = pool_->allocate(nodes * part);
    const Buffer received = pool_->allocate((nodes - 1) * part);
    op.buffers.insert(op.buffers.end(), {sums, received});
    op.shared = std::make_shared<detail::shm::SharedRound>(log_->shared, call, caller, send, sums);
    op.next = [=, this](MpiOp& phase) {
      const auto place = [&](int rank) { return index(rank) / members * part; };
      std::vector<const std::byte*> in(nodes, sums.data() + place(rank_));
      for_counterparts([&](int peer) {
        std::byte* const to = received.data() + place(peer) - (peer < rank_ ? 0 : part);
        in[index(peer) / members] = to;
        phase.recv(comm_, to, part, peer, tag);
        phase.send(comm_, sums.data() + place(peer), part, peer, tag);
      });
      phase.next = [=, in = std::move(in)](MpiOp& last) {
        detail::end_tree(call.dtype, call.op, in, out, count);
        if (then) then(last);
      };
    };
  }
  /// A sum over the nodes of equal slices, and a gather of them, over one link from each rank to each other node.
  void all_reduce_over_nodes(MpiOp& op, detail::CollectiveCall call, const detail::OpInfo& caller, const Buffer& send,
                             const Buffer& recv) {
    const std::size_t element = size_of(call.dtype), ranks = index(size_);
    const std::size_t block = (send.bytes() / element + ranks - 1) / ranks * element;
    Buffer from = send, to = recv;
    if (block * ranks != send.bytes()) {
      from = pool_->allocate(block * ranks);
      to = pool_->allocate(block * ranks);
      detail::copy_bytes(from.data(), send.data(), send.bytes());
      std::fill(from.data() + send.bytes(), from.data() + from.bytes(), std::byte{0});
      op.buffers.insert(op.buffers.end(), {from, to});
    }
    call.nodes = log_->shared->nodes();
    call.kind = detail::Collective::all_gather;
    call.bytes = block;
    const auto round = std::make_shared<detail::shm::SharedRound>(log_->shared, call, caller, Buffer(), to);
    call.kind = detail::Collective::reduce_scatter;
    call.bytes = from.bytes();
    sum_over_nodes(op, call, caller, from, round->recv().data() + index(rank_) * block, block, [=, this](MpiOp& phase) {
      if (to.data() != recv.data())
        phase.next = [=](MpiOp& /*last*/) { detail::copy_bytes(recv.data(), to.data(), recv.bytes()); };
      spread_over_nodes(phase, round, block);
    });
  }
  /// Each collective has a tag of its own, because second phases start in any order. The standard promises tags up to
  /// 32767.
  static int tag_of(const MpiOp& op) { return static_cast<int>(op.question.number % 32767) + 1; }
  /// Each rank has a different peer in each step.
  template <class F>
  void for_peers(const F& f) const {
    for (int step = 1; step < size_; ++step) f((rank_ + step) % size_);
  }

  /// Sends slice(j) of `send` to rank j, then reduces the received blocks into `out`.
  template <class SliceOf>
  void exchange_and_reduce(MpiOp& op, const Buffer& send, const SliceOf& slice, std::byte* out, DType dtype,
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
    op.next = [=, in = std::move(in)](MpiOp&) {
      detail::reduce_tree(dtype, reduction, in, out, mine.bytes / size_of(dtype));
    };
  }
  void all_reduce_sliced(MpiOp& op, const Buffer& send, const Buffer& recv, DType dtype, Reduction reduction) {
    const std::size_t count = send.bytes() / size_of(dtype);
    const std::size_t step = (count + index(size_) - 1) / index(size_) * size_of(dtype);
    const auto slice = [step, bytes = send.bytes()](int r) {
      const std::size_t begin = std::min(index(r) * step, bytes);
      return Slice{begin, std::min(step, bytes - begin)};
    };
    const int tag = tag_of(op);
    exchange_and_reduce(op, send, slice, recv.data() + slice(rank_).begin, dtype, reduction, tag);
    op.next = [=, this, reduce = std::move(op.next), out = recv.data()](MpiOp& phase) {
      reduce(phase);
      for_peers([&](int peer) {
        phase.recv(comm_, out + slice(peer).begin, slice(peer).bytes, peer, tag);
        phase.send(comm_, out + slice(rank_).begin, slice(rank_).bytes, peer, tag);
      });
    };
  }
  void all_reduce_small(MpiOp& op, const Buffer& send, const Buffer& recv, DType dtype, Reduction reduction) {
    const std::size_t bytes = send.bytes();
    const Buffer all = pool_->allocate(index(size_) * bytes);
    op.buffers.push_back(all);
    const int count = detail::mpi::to_count(bytes);
    check(op, MPI_Iallgather(send.data(), count, MPI_BYTE, all.data(), count, MPI_BYTE, comm_, op.add()));
    std::vector<const std::byte*> in;
    for (int r = 0; r < size_; ++r) in.push_back(all.data() + index(r) * bytes);
    op.next = [=, in = std::move(in), out = recv.data()](MpiOp&) {
      detail::reduce_tree(dtype, reduction, in, out, bytes / size_of(dtype));
    };
  }

  MPI_Comm comm_;
  MPI_Comm check_ = MPI_COMM_NULL;  ///< compares calls; null if the members share memory
  int rank_ = 0;
  int size_ = 1;
  std::uint64_t launch_;
  std::shared_ptr<detail::mpi::GroupLog> log_;
  std::shared_ptr<detail::mpi::ProgressEngine> progress_;
  std::shared_ptr<Pool> pool_;
};

}  // namespace shardlib
