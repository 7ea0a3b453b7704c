// Communication of memory that only the device can access. It goes through copies in host memory.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "shardlib/comm/communicator.hpp"
#include "shardlib/memory/buffer.hpp"

namespace shardlib {

/// A group whose members have their buffers in device memory. `inner` communicates copies of them in host memory.
/// Buffers in host memory are passed to `inner` unchanged.
class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<Pool> host)
      : inner_(std::move(inner)), host_(std::move(host)) {}

  [[nodiscard]] int rank() const override { return inner_->rank(); }
  [[nodiscard]] int size() const override { return inner_->size(); }
  [[nodiscard]] bool takes_rows() const override { return inner_->takes_rows(); }
  [[nodiscard]] bool has_views(std::size_t /*bytes*/) const override { return false; }
  [[nodiscard]] bool exchanges() const override { return inner_->exchanges(); }
  void check_failure() const override { inner_->check_failure(); }

 private:
  /// The buffer, or a copy of it, in host memory.
  [[nodiscard]] Buffer staged(const Buffer& buffer) const {
    const Buffer place = place_for(buffer);
    if (place.data() != buffer.data()) copy(place, buffer);
    return place;
  }
  /// A place in host memory that can receive a result for `buffer`.
  [[nodiscard]] Buffer place_for(const Buffer& buffer) const {
    return buffer.device_memory() == nullptr ? buffer : host_->allocate(buffer.bytes());
  }
  /// A result, and the place in host memory where it is received.
  struct Result {
    Buffer received, result;
  };
  struct Arriving final : Request::Pending {
    Request request;
    std::vector<Result> results;
    Arriving(Request r, std::vector<Result> all) : request(std::move(r)), results(std::move(all)) {}
    ~Arriving() noexcept override { request.drop(); }  // so its destructor does not wait
    bool test() override { return request.test(); }
    void wait() override {
      request.wait();
      for (const auto& [received, result] : results)
        if (result.data() != received.data()) copy(result, received);
    }
  };
  static Request arriving(Request request, std::vector<Result> results) {
    return Request(std::make_unique<Arriving>(std::move(request), std::move(results)));
  }

  [[nodiscard]] bool shifts(const Buffer& send, const Buffer& recv) const override {
    return shifts_in(*inner_, send, recv);
  }
  Request start_collective(const detail::CollectiveCall& call, const detail::OpInfo& op,
                           const Operands& operands) override {
    if (operands.messages != nullptr) return start_exchange(call, op, operands);
    const Buffer recv = place_for(operands.recv);
    return arriving(start_in(*inner_, call, op, {.send = staged(operands.send), .recv = recv, .given = operands.given}),
                    {{recv, operands.recv}});
  }
  Request start_exchange(const detail::CollectiveCall& call, const detail::OpInfo& op, const Operands& operands) {
    Messages on_host;
    std::vector<Result> results;
    for (const auto& [buffer, peer] : operands.messages->receives) {
      results.push_back({place_for(buffer), buffer});
      on_host.receives.push_back({results.back().received, peer});
    }
    for (const auto& [buffer, peer] : operands.messages->sends) on_host.sends.push_back({staged(buffer), peer});
    return arriving(start_in(*inner_, call, op, {.messages = &on_host, .given = operands.given}), std::move(results));
  }
  Request start_send(const Buffer& buffer, int to, const detail::OpInfo& op) override {
    return inner_->send(staged(buffer), to, op.site);
  }
  Request start_recv(const Buffer& buffer, int from, const detail::OpInfo& op) override {
    const Buffer received = place_for(buffer);
    return arriving(inner_->recv(received, from, op.site), {{received, buffer}});
  }

  std::unique_ptr<Communicator> inner_;
  std::shared_ptr<Pool> host_;
};

}  // namespace shardlib
