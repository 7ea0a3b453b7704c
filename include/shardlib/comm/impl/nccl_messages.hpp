// Messages between two GPUs by NCCL.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "shardlib/comm/checks.hpp"
#include "shardlib/comm/impl/nccl_connection.hpp"
#include "shardlib/comm/impl/nccl_members.hpp"

namespace shardlib::detail::nccl {

/// The messages of a group's member that go from GPU to GPU. Those from one member to another have a connection and a
/// stream of their own, because an operation of NCCL holds back all that comes later in its stream until the other
/// member has started its part. So a message waits only for what its two members have begun before it: a program that
/// does not deadlock when sends never wait does not deadlock here either. The length of each message goes through host
/// memory. The receiver waits for the length. If the sender fails, is missing or sends another length, the receiver
/// learns it there, as on other backends. The data does not wait for the length.
class DirectMessages {
 public:
  DirectMessages(Communicator& staged, const Use& use) : staged_(staged), use_(use) {}
  DirectMessages(const DirectMessages&) = delete;
  DirectMessages& operator=(const DirectMessages&) = delete;
  ~DirectMessages() {
    // The end of a connection waits for the other member. All members end their connections in the same order.
    while (!connections_.empty()) connections_.erase(connections_.begin());
  }

  /// Communicator::set_direct. `timeout`: how long an operation may take; 0: forever.
  void set_direct(int peer, bool direct, std::chrono::milliseconds timeout) {
    if (peer == staged_.rank()) return;
    std::optional<bool>& possible = possible_[peer];
    if (direct && !possible) possible = connect(peer, timeout);
    direct_[peer] = direct && *possible;
  }
  /// Whether a message goes from GPU to GPU. Both members agree.
  [[nodiscard]] bool takes(const Buffer& buffer, int peer) const {
    const auto known = direct_.find(peer);
    return known != direct_.end() && known->second && buffer.device_memory() != nullptr && buffer.bytes() > 0;
  }
  void send(const Doing& doing, const Buffer& buffer) {
    forget_sent();
    const Buffer length = length_of(buffer.bytes());
    put_send(doing, buffer);
    staged_.send(length, doing.peer, doing.op.site);
  }
  std::unique_ptr<Request::Pending> recv(const Doing& doing, const Buffer& buffer) {
    forget_sent();
    const Buffer length = length_of(0);
    auto data = put_recv(doing, buffer);
    return std::make_unique<Arriving>(connection(doing), staged_.recv(length, doing.peer, doing.op.site), length,
                                      std::move(data), doing);
  }

 private:
  using Ends = std::pair<int, int>;  ///< from, to

  /// A message that is received: the host waits for its length, and the device's stream then waits for its data.
  struct Arriving final : Request::Pending {
    Connection& by;
    Request announced;
    Buffer length;
    std::unique_ptr<Request::Pending> data;
    Doing doing;
    Arriving(Connection& c, Request a, Buffer l, std::unique_ptr<Request::Pending> d, Doing of)
        : by(c), announced(std::move(a)), length(std::move(l)), data(std::move(d)), doing(std::move(of)) {}
    ~Arriving() noexcept override { announced.drop(); }  // so its destructor does not wait
    bool test() override { return announced.test() && data->test(); }
    void wait() override { wait_recorded({}); }
    void wait_recorded(const FlightRecord& record) override {
      by.or_abort([&] {
        record.waits();
        announced.wait();
        record.runs();
        if (const std::uint64_t sent = *length.as<std::uint64_t>(); sent != doing.call.bytes)
          fail_recv(doing.peer, doing.call.bytes, sent);
      });
      data->wait_recorded(record);
    }
  };

  static Buffer length_of(std::uint64_t bytes) {
    const auto length = std::make_shared<std::uint64_t>(bytes);
    return {length.get(), sizeof *length, length};
  }
  Connection& connection(const Doing& doing) {
    return connections_.at(doing.sends ? Ends{staged_.rank(), doing.peer} : Ends{doing.peer, staged_.rank()});
  }
  /// Frees what other members have received. A device whose messages are received late keeps them until then.
  void forget_sent() {
    for (auto& [ends, connection] : connections_) connection.forget_ended();
  }
  // The sender is rank 0 of a connection, the receiver rank 1.
  void put_send(const Doing& doing, const Buffer& buffer) {
    Connection& by = connection(doing);
    by.start_dropped(doing, {buffer}, [&](const Connection::Started&) {
      by.messages(doing, [&](const auto& send_to, const auto&) { send_to(1, buffer.data(), buffer.bytes()); });
    });
  }
  std::unique_ptr<Request::Pending> put_recv(const Doing& doing, const Buffer& buffer) {
    Connection& by = connection(doing);
    return by.start(doing, {buffer}, [&](const Connection::Started&) {
      by.messages(doing, [&](const auto&, const auto& recv_from) { recv_from(0, buffer.data(), buffer.bytes()); });
    });
  }

  /// Connects this member with another one, in both directions, if NCCL can be used between them.
  bool connect(int peer, std::chrono::milliseconds timeout) {
    const int rank = staged_.rank();
    // Other members may read and write them after this one has failed. An id is that of the messages from its member.
    const auto members = std::make_shared<std::array<Member, 2>>();
    auto& [mine, theirs] = *members;
    mine = member(use_, rank, new_id(use_, {.peer = peer}));
    staged_.send_recv(Buffer(&mine, sizeof mine, members), peer, Buffer(&theirs, sizeof theirs, members), peer).wait();
    // Where a GPU waits for another one, calls of CUDA by other threads of the process could wait, too, as for a new
    // group. Their devices would have to meet for each message.
    if (!obstacle(*members).empty() || shares_process(*members)) return false;
    const Ends away{rank, peer}, here{peer, rank};
    for (const Ends& ends : {std::min(away, here), std::max(away, here)}) {
      const bool sends = ends == away;
      const auto made = connections_.try_emplace(ends, staged_, use_, use_.pool->device_memory()->make_stream()).first;
      const Doing first{.call = {.bytes = 1}, .peer = peer, .sends = sends};
      Connection& by = made->second;
      // With the first message NCCL connects the two in both calls. Later it would keep the sender waiting.
      const Buffer byte = use_.pool->allocate(first.call.bytes);
      by.or_abort([&] {
        by.open(first, sends ? mine.id : theirs.id, 2, sends ? 0 : 1, timeout);
        if (sends)
          put_send(first, byte);
        else
          static_cast<void>(put_recv(first, byte));
        by.await_dropped();
      });
    }
    return true;
  }

  Communicator& staged_;
  const Use& use_;
  std::map<Ends, Connection> connections_;
  std::map<int, std::optional<bool>> possible_;  ///< of each other member that was asked: whether they are connected
  std::map<int, bool> direct_;
};

}  // namespace shardlib::detail::nccl
