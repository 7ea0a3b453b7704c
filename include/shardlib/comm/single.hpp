// The communicator of a group of one device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "shardlib/comm/communicator.hpp"
#include "shardlib/comm/reduce_tree.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib {

/// A group of one. Collectives copy, and messages to itself are queued.
class SingleCommunicator final : public Communicator {
 public:
  [[nodiscard]] int rank() const override { return 0; }
  [[nodiscard]] int size() const override { return 1; }

  [[nodiscard]] bool takes_rows() const override { return true; }

  [[nodiscard]] bool has_views(std::size_t /*bytes*/) const override { return true; }

 private:
  using Mail = std::map<std::uint64_t, Buffer>;

  struct Receive final : Request::Pending {
    std::shared_ptr<Mail> mail;
    std::uint64_t number;
    Buffer buffer;
    Receive(std::shared_ptr<Mail> m, std::uint64_t n, Buffer b) : mail(std::move(m)), number(n), buffer(std::move(b)) {}
    bool test() override { return mail->contains(number); }
    void wait() override {
      const auto message = mail->extract(number);
      if (message.empty())
        throw Error("recv from rank 0: the only device of a group waits for its own message: send first");
      if (message.mapped().bytes() != buffer.bytes()) detail::fail_recv(0, buffer.bytes(), message.mapped().bytes());
      copy(buffer, message.mapped());
    }
  };

  Request start_collective(const detail::CollectiveCall& call, const detail::OpInfo&,
                           const Operands& operands) override {
    if (call.kind == detail::Collective::gather_view)
      *operands.whole = operands.send;
    else
      copy(operands.recv, operands.send);
    return {};
  }
  Request start_send(const Buffer& buffer, int, const detail::OpInfo&) override {
    mail_->emplace(sent_++, buffer);
    return {};
  }
  Request start_recv(const Buffer& buffer, int, const detail::OpInfo&) override {
    return Request(std::make_unique<Receive>(mail_, received_++, buffer));
  }

  std::shared_ptr<Mail> mail_ = std::make_shared<Mail>();
  std::uint64_t sent_ = 0;
  std::uint64_t received_ = 0;
};

}  // namespace shardlib
