// The messages of an op that all devices of a group run.
#pragma once

#include <algorithm>
#include <vector>

#include "shardlib/comm/communicator.hpp"
#include "shardlib/compute/collectives.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/runtime/value.hpp"

namespace shardlib::detail {

/// An exchange of an op, message by message. Where `Communicator::exchange` is a collective, all begin at `begin`;
/// otherwise each begins when it is added. Every device of the group calls `begin` and `wait`.
class Exchange {
 public:
  /// `made` is a value that the op makes. `answered`: `wait` also waits until what was sent has been read, so that its
  /// memory is free then, and peaks do not depend on when others read.
  Exchange(const Value& made, Communicator& group, bool answered = false)
      : made_(&made), group_(&group), together_(group.exchanges()), answered_(answered && !together_) {}

  void send(const Buffer& buffer, int to) {
    if (together_) return messages_.sends.push_back({buffer, to});
    // The receiver answers with an empty message. (MPI looks at older operations first: the receive precedes the send.)
    if (answered_ && add(to_, to)) start(answers_, [&] { return group_->recv({}, to); });
    static_cast<void>(detail::begin(*made_, [&] { return group_->send(buffer, to); }));
  }
  void receive(const Buffer& buffer, int from) {
    if (together_) return messages_.receives.push_back({buffer, from});
    if (answered_) add(from_, from);
    start(requests_, [&] { return group_->recv(buffer, from); });
  }
  /// All messages have been added.
  void begin() {
    if (together_) start(requests_, [&] { return group_->exchange(messages_); });
    messages_ = {};
  }
  /// Waits for what this device receives.
  void wait() {
    complete(requests_);
    for (const int peer : from_) static_cast<void>(detail::begin(*made_, [&] { return group_->send({}, peer); }));
    complete(answers_);
  }

 private:
  static bool add(std::vector<int>& peers, int peer) {
    if (std::ranges::find(peers, peer) != peers.end()) return false;
    peers.push_back(peer);
    return true;
  }
  template <class F>
  void start(std::vector<Request>& requests, const F& f) {
    requests.push_back(detail::begin(*made_, f));
  }
  void complete(std::vector<Request>& requests) {
    for (Request& request : requests) detail::complete(*made_, [&] { return std::move(request); });
  }

  const Value* made_;
  Communicator* group_;
  bool together_, answered_;
  Communicator::Messages messages_;
  std::vector<Request> requests_, answers_;
  std::vector<int> to_, from_;  ///< the peers that answer this device, and those that it answers
};

}  // namespace shardlib::detail
