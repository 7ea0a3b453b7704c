// Ranks of one node that behave as if they were on several, and values whose sums depend on the order.
#pragma once

#include <cmath>
#include <memory>
#include <random>
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

inline std::vector<float> rough(int rank, std::size_t count) {
  std::mt19937 random(static_cast<unsigned>(rank) + 1);
  std::vector<float> values;
  for (std::size_t i = 0; i < count; ++i) {
    values.push_back(std::ldexp(static_cast<float>(random()) - 2147483648.0F, static_cast<int>(random() % 12)));
  }
  return values;
}

}  // namespace shardlib::test
