// Definitions of nccl.hpp.
#pragma once

#include "shardlib/comm/nccl.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shardlib/comm/impl/nccl_connection.hpp"
#include "shardlib/comm/impl/nccl_members.hpp"
#include "shardlib/comm/impl/nccl_messages.hpp"
#include "shardlib/comm/reduce_tree.hpp"
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

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::unique_ptr<Communicator> staged, Use use)
      : staged_(std::move(staged)),
        use_(std::move(use)),
        connection_(*staged_, use_, use_.stream),
        messages_(*staged_, use_) {}

  [[nodiscard]] int rank() const override { return staged_->rank(); }
  [[nodiscard]] int size() const override { return staged_->size(); }
  [[nodiscard]] bool takes_rows() const override { return false; }
  [[nodiscard]] bool has_views(std::size_t /*bytes*/) const override { return false; }
  void check_failure() const override { staged_->check_failure(); }
  [[nodiscard]] bool exchanges() const override { return state_ != State::uses_host || staged_->exchanges(); }
  void set_direct(int peer, bool direct) override { messages_.set_direct(peer, direct, timeout()); }

 private:
  enum class State : std::uint8_t { undecided, uses_nccl, uses_host };
  using Started = Connection::Started;

  [[nodiscard]] std::size_t ranks() const { return static_cast<std::size_t>(size()); }
  [[nodiscard]] const Functions& nccl() const { return connection_.nccl(); }
  [[nodiscard]] ncclComm* comm() const { return connection_.comm(); }
  [[nodiscard]] CUstream_st* stream() const { return connection_.handle(); }
  [[nodiscard]] Flights& flights() const { return *use_.pool->device_memory()->flights(); }
  [[nodiscard]] static bool on_gpu(const Buffer& send, const Buffer& recv) {
    return send.device_memory() != nullptr && recv.device_memory() != nullptr && send.bytes() > 0;
  }

  Request start_collective(const CollectiveCall& call, const OpInfo& op, const Operands& operands) override {
    const Buffer &send = operands.send, &recv = operands.recv;
    const bool exchanges = call.kind == Collective::exchange;
    if (state_ == State::uses_host || !(exchanges || on_gpu(send, recv))) return start_in(*staged_, call, op, operands);
    flights().ask();
    record_wait();
    const Doing doing{.call = call, .op = op};
    meet(doing, operands.given);
    if (state_ == State::undecided) connection_.or_abort([&] { begin_use(doing); });
    if (state_ == State::uses_host) {
      record_run();
      if (call.kind == Collective::shift) return staged_->shift(send, recv, call.places, op.site);
      if (exchanges) return staged_->exchange(*operands.messages, op.site);
      return start_in(*staged_, call, op, operands);
    }
    auto arriving = connection_.start(doing, buffers_of(operands), [&](Started& started) {
      put(started, operands);
      if (shares_process_) meet(doing);
    });
    record_run();
    return Request(std::move(arriving));
  }
  static std::vector<Buffer> buffers_of(const Operands& operands) {
    if (operands.messages == nullptr) return {operands.send, operands.recv};
    std::vector<Buffer> all;
    for (const auto* const list : {&operands.messages->sends, &operands.messages->receives})
      for (const Message& message : *list) all.push_back(message.buffer);
    return all;
  }
  [[nodiscard]] bool shifts(const Buffer& send, const Buffer& recv) const override {
    return (state_ != State::uses_host && on_gpu(send, recv)) || shifts_in(*staged_, send, recv);
  }
  Request start_send(const Buffer& buffer, int to, const OpInfo& op) override {
    if (!messages_.takes(buffer, to)) return staged_->send(buffer, to, op.site);
    flights().ask();
    messages_.send(message(buffer, to, true, op), buffer);
    return {};
  }
  Request start_recv(const Buffer& buffer, int from, const OpInfo& op) override {
    if (!messages_.takes(buffer, from)) return staged_->recv(buffer, from, op.site);
    flights().ask();
    return Request(messages_.recv(message(buffer, from, false, op), buffer));
  }
  static Doing message(const Buffer& buffer, int peer, bool sends, const OpInfo& op) {
    return {.call = {.bytes = buffer.bytes()}, .op = op, .peer = peer, .sends = sends};
  }

  /// Waits for the other members to come to the same place of the same call. Throws Error if one is in another, or was
  /// given other values.
  // An operation of NCCL occupies its GPU until all members have started it. Meanwhile a call of CUDA on another thread
  // of the process can wait for that GPU: a memory allocation, or the first start of a kernel, which loads it. So no
  // member may continue after a call of NCCL before all that share its process have made it.
  void meet(const Doing& doing, const GivenWindow& given = {}) {
    CollectiveCall compared = doing.call;
    compared.elsewhere = true;
    start_in(*staged_, compared, doing.op, {.given = given}).wait();
  }
  /// Decides, like all members, whether the group uses NCCL. It does so with the first collective, since a
  /// communicator of NCCL takes memory of the GPU, and many groups have none.
  void begin_use(const Doing& doing) {
    const UniqueId id = rank() == 0 ? new_id(use_, doing) : UniqueId();
    const std::vector<Member> all = nccl::meet(*staged_, member(use_, rank(), id));
    if (const std::string why = obstacle(all); !why.empty()) {
      if (use_.sums == GpuSums::nccl)
        throw UsageError("--sums nccl: NCCL cannot be used, as " + why + "; change that, or leave --sums out");
      state_ = State::uses_host;
      return;
    }
    connection_.open(doing, all[0].id, size(), rank(), timeout());
    shares_process_ = shares_process(all);
    if (shares_process_) meet(doing);
    state_ = State::uses_nccl;
  }

  /// Puts the operations of a collective into the stream.
  void put(Started& started, const Operands& operands) const {
    const Doing& doing = started.doing;
    const Buffer &send = operands.send, &recv = operands.recv;
    switch (doing.call.kind) {
      case Collective::all_gather:
        return all_gather(doing, send.data(), send.bytes(), recv.data());
      case Collective::all_to_all:
        return exchange_blocks(doing, send.data(), recv.data(), send.bytes() / ranks());
      case Collective::reduce_scatter:
        return reduce_scatter(started, send, recv);
      case Collective::all_reduce:
        return all_reduce(started, send, recv);
      case Collective::shift:
        return shift_by(doing, send, recv);
      case Collective::exchange:
        return exchange_messages(doing, *operands.messages);
      case Collective::gather_view:
      case Collective::barrier:
        break;
    }
  }
  void all_gather(const Doing& doing, const std::byte* send, std::size_t bytes, std::byte* recv) const {
    connection_.check(doing, "ncclAllGather", nccl().AllGather(send, recv, bytes, Type::uint8, comm(), stream()));
  }
  /// Block j of `send` goes to rank j, and block i of `recv` comes from rank i.
  void exchange_blocks(const Doing& doing, const std::byte* send, std::byte* recv, std::size_t block) const {
    connection_.messages(doing, [&](const auto& send_to, const auto& recv_from) {
      for (int peer = 0; peer < size(); ++peer) {
        const std::size_t at = static_cast<std::size_t>(peer) * block;
        if (!send_to(peer, send + at, block) || !recv_from(peer, recv + at, block)) return;
      }
    });
  }
  void shift_by(const Doing& doing, const Buffer& send, const Buffer& recv) const {
    const int n = size(), places = doing.call.places;
    connection_.messages(doing, [&](const auto& send_to, const auto& recv_from) {
      if (send_to((rank() + places) % n, send.data(), send.bytes()))
        recv_from((rank() - places + n) % n, recv.data(), recv.bytes());
    });
  }
  void exchange_messages(const Doing& doing, const Communicator::Messages& all) const {
    connection_.messages(doing, [&](const auto& send_to, const auto& recv_from) {
      for (const Message& message : all.sends)
        if (!send_to(message.peer, message.buffer.data(), message.buffer.bytes())) return;
      for (const Message& message : all.receives)
        if (!recv_from(message.peer, message.buffer.data(), message.buffer.bytes())) return;
    });
  }
  void reduce_scatter(Started& started, const Buffer& send, const Buffer& recv) const {
    const Doing& doing = started.doing;
    const DType dtype = doing.call.dtype;
    const std::size_t n = recv.bytes() / size_of(dtype);
    if (sums_by_nccl(doing.call)) {
      const auto sum =
          nccl().ReduceScatter(send.data(), recv.data(), n, type_of(dtype), Operation::sum, comm(), stream());
      return connection_.check(doing, "ncclReduceScatter", sum);
    }
    const Buffer received = connection_.scratch(started, send.bytes());
    exchange_blocks(doing, send.data(), received.data(), recv.bytes());
    use_.tree(*use_.stream, dtype, doing.call.op, received, ranks(), n, recv);
  }
  void all_reduce(Started& started, const Buffer& send, const Buffer& recv) const {
    const Doing& doing = started.doing;
    const DType dtype = doing.call.dtype;
    const std::size_t element = size_of(dtype), n = send.bytes() / element;
    if (sums_by_nccl(doing.call)) {
      const auto sum = nccl().AllReduce(send.data(), recv.data(), n, type_of(dtype), Operation::sum, comm(), stream());
      return connection_.check(doing, "ncclAllReduce", sum);
    }
    const auto [slice, left] = gpu_slices(n, element, ranks());
    const std::size_t sliced = slice * ranks();
    if (slice > 0) {
      const Buffer received = connection_.scratch(started, sliced * element);
      const Buffer sum = recv.slice(static_cast<std::size_t>(rank()) * slice * element, slice * element);
      exchange_blocks(doing, send.data(), received.data(), slice * element);
      use_.tree(*use_.stream, dtype, doing.call.op, received, ranks(), slice, sum);
      all_gather(doing, sum.data(), sum.bytes(), recv.data());
    }
    if (left > 0) {
      const Buffer received = connection_.scratch(started, left * element * ranks());
      all_gather(doing, send.data() + sliced * element, left * element, received.data());
      use_.tree(*use_.stream, dtype, doing.call.op, received, ranks(), left,
                recv.slice(sliced * element, left * element));
    }
  }
  /// The tree takes all maxima: NCCL does not promise that a NaN stays one.
  [[nodiscard]] bool sums_by_nccl(const CollectiveCall& call) const {
    return use_.sums == GpuSums::nccl && call.op == Reduction::sum;
  }

  std::unique_ptr<Communicator> staged_;
  Use use_;
  State state_ = State::undecided;
  bool shares_process_ = false;  ///< whether two members are threads of one process
  Connection connection_;        ///< of all members, from the first collective on
  DirectMessages messages_;
};

SHARDLIB_INLINE std::unique_ptr<Communicator> group(std::unique_ptr<Communicator> staged, const Use& use) {
  return std::make_unique<NcclCommunicator>(std::move(staged), use);
}

}  // namespace shardlib::detail::nccl
