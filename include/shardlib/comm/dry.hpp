// A communicator of any size that checks arguments and moves nothing. A dry run uses it to count the ops of one device.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "shardlib/comm/backend.hpp"
#include "shardlib/comm/communicator.hpp"
#include "shardlib/comm/reduce_tree.hpp"

namespace shardlib {

/// From where reductions read the peers' blocks. This decides what memory they take.
enum class Peers {
  threads,  ///< read in place
  node,     ///< MPI within a node: read in place, and long ones gathered as views
  mpi,      ///< MPI: received into scratch memory first
  gpus      ///< GPUs that communicate by NCCL: received into scratch memory first
};

/// A group whose other members do not exist.
class DryCommunicator final : public Communicator {
 public:
  DryCommunicator(int rank, int size, Peers peers, std::shared_ptr<Pool> pool)
      : rank_(rank), size_(size), peers_(peers), pool_(std::move(pool)) {}

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }

  [[nodiscard]] bool takes_rows() const override { return peers_ == Peers::threads || peers_ == Peers::node; }

  [[nodiscard]] bool has_views(std::size_t bytes) const override {
    return peers_ == Peers::node && detail::fits_view(bytes);
  }

 private:
  /// A request that holds its memory until `wait`.
  struct Scratch final : Request::Pending {
    Buffer first, second;
    Scratch(Buffer one, Buffer other) : first(std::move(one)), second(std::move(other)) {}
    void wait() override {}
    bool test() override { return true; }
  };
  Request start_collective(const detail::CollectiveCall& call, const detail::OpInfo&,
                           const Operands& operands) override {
    using detail::Collective;
    if (call.kind == Collective::gather_view) {
      *operands.whole = view(operands.send);
      return {};
    }
    if (call.kind == Collective::barrier) return {};
    const std::size_t n = static_cast<std::size_t>(size_), element = size_of(call.dtype), count = call.bytes / element;
    const bool scatters = call.kind == Collective::reduce_scatter, reduces = call.kind == Collective::all_reduce;
    if (peers_ == Peers::gpus) {
      const detail::GpuSlices parts = detail::gpu_slices(count, element, n);
      return n == 1     ? Request()
             : scatters ? with(call.bytes)
             : reduces  ? with(parts.slice * n * element, parts.left * n * element)
                        : Request();
    }
    return with(operands.send, scatters ? operands.recv.bytes() : reduces ? (count + n - 1) / n * element : 0);
  }
  Request start_send(const Buffer&, int, const detail::OpInfo&) override { return {}; }
  Request start_recv(const Buffer&, int, const detail::OpInfo&) override { return {}; }

  /// A view at addresses of its own, without memory. It keeps the block alive.
  [[nodiscard]] Buffer view(Buffer send) const {
    static std::atomic<std::uintptr_t> next = std::uintptr_t{1} << 61;
    const std::size_t bytes = static_cast<std::size_t>(size_) * send.bytes();
    if (send.is_read_only()) send = pool_->allocate(send.bytes());  // a copy is lent
    const auto owner = std::make_shared<Buffer>(std::move(send));
    return {reinterpret_cast<void*>(next.fetch_add(bytes)), bytes, owner, true};
  }
  /// The scratch memory of a collective. Over MPI, a reduction receives one `block` from each peer. Within a node,
  /// buffers outside the arenas, such as views, are copied.
  Request with(const Buffer& send, std::size_t block) {
    const std::size_t bytes = peers_ == Peers::mpi ? static_cast<std::size_t>(size_ - 1) * block
                              : peers_ == Peers::node && send.is_read_only() ? send.bytes()
                                                                             : 0;
    return with(bytes);
  }
  Request with(std::size_t bytes, std::size_t more = 0) {
    if (bytes + more == 0) return {};
    const auto block = [&](std::size_t n) { return n == 0 ? Buffer() : pool_->allocate(n); };
    return Request(std::make_unique<Scratch>(block(bytes), block(more)));
  }

  int rank_;
  int size_;
  Peers peers_;
  std::shared_ptr<Pool> pool_;
};

/// A mesh with one running device. It runs dry: `Device(axes, 0, std::make_shared<DryWorld>())`. Its pool hands
/// out addresses without memory, its kernels and communicators do nothing, and `item` returns 1. Everything is counted.
class DryWorld final : public Backend {
 public:
  explicit DryWorld(Peers peers = Peers::threads) : peers_(peers) {}

  std::unique_ptr<Communicator> group(const std::vector<int>& members, int rank,
                                      const std::shared_ptr<Pool>& pool) override {
    return std::make_unique<DryCommunicator>(rank, static_cast<int>(members.size()), peers_, pool);
  }
  [[nodiscard]] bool is_dry() const override { return true; }

 private:
  Peers peers_;
};

}  // namespace shardlib
