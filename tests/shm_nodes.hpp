// Ranks of one node that behave as if they were on several.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "shardlib/comm/shm/node.hpp"

namespace shardlib::test {

/// Has the ranks share memory as if they were on these nodes: one number for each rank, negative for none.
class Nodes {
 public:
  explicit Nodes(const std::vector<int>& node_of) : kept_(detail::shm::node) {
    detail::shm::node =
        std::make_shared<detail::shm::NodeRanks>(kept_->arena(), kept_->ranks(), node_of, kept_->rings());
  }
  Nodes(const Nodes&) = delete;
  Nodes& operator=(const Nodes&) = delete;
  ~Nodes() { detail::shm::node = std::move(kept_); }

 private:
  std::shared_ptr<detail::shm::NodeRanks> kept_;
};

}  // namespace shardlib::test
