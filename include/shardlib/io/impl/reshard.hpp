// Definitions of reshard.hpp.
#pragma once

#include "shardlib/io/reshard.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "shardlib/io/agree.hpp"
#include "shardlib/io/box.hpp"
#include "shardlib/io/checkpoint/impl/holders.hpp"
#include "shardlib/io/checkpoint/impl/load.hpp"
#include "shardlib/io/checkpoint/layout.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::io::detail {

/// A box of a leaf that is within one shard of each tree. The offsets of its first element are in elements.
struct Overlap {
  int from, to;  ///< devices
  Index box;
  std::size_t in_source = 0, in_target = 0;
};

/// Calls f(overlap) for all boxes of a leaf that devices need, on all devices in the same order. A device takes what it
/// holds from itself. The others take turns over the holders.
template <class F>
void for_each_overlap(const LeafShards& source, const LeafShards& target, F&& f) {
  const Index source_strides = row_major_strides(source.shard), target_strides = row_major_strides(target.shard);
  const auto dims = source.shard.size();
  for (const auto& [place, devices] : target.holders) {
    const auto [begin, sizes] = target.box(place);
    Index first(dims), count(dims), step(dims), at(dims);
    for (std::size_t i = 0; i < dims; ++i) {
      first[i] = begin[i] / source.shard[i];
      count[i] = (begin[i] + sizes[i] - 1) / source.shard[i] - first[i] + 1;
    }
    do {
      for (std::size_t i = 0; i < dims; ++i) at[i] = first[i] + step[i];
      const auto [source_begin, source_sizes] = source.box(at);
      Overlap overlap{0, 0, Index(dims)};
      for (std::size_t i = 0; i < dims; ++i) {
        const std::int64_t low = std::max(begin[i], source_begin[i]);
        overlap.box[i] = std::min(begin[i] + sizes[i], source_begin[i] + source_sizes[i]) - low;
        overlap.in_source += static_cast<std::size_t>((low - source_begin[i]) * source_strides[i]);
        overlap.in_target += static_cast<std::size_t>((low - begin[i]) * target_strides[i]);
      }
      const std::vector<int>& holders = source.holders.at(at);
      for (const int device : devices) {
        const bool own = std::ranges::find(holders, device) != holders.end();
        overlap.to = device;
        overlap.from = own ? device : holders[static_cast<std::size_t>(device) % holders.size()];
        f(overlap);
      }
    } while (next_place(step, count));
  }
}

/// A tree on all devices, and the leaves of this one.
struct ReshardedTree {
  Leaves all;
  std::map<std::string, shardlib::detail::ValuePtr> mine;
};

/// One batch of leaves: the boxes that this device sends, receives, or has itself.
class Resharding {
 public:
  Resharding(Device& device, const ReshardedTree& source, const ReshardedTree& target,
             const shardlib::detail::OpInfo& op)
      : device_(device), source_(source), target_(target), op_(op) {}

  /// The new shards of this device's leaves, in host memory.
  [[nodiscard]] std::map<std::string, Buffer> move(Leaves::const_iterator first, Leaves::const_iterator last) const {
    const int me = device_.rank();
    const auto peers = static_cast<std::size_t>(device_.size());
    // Calls f(leaf, overlap, bytes of an element) for each box of this device.
    const auto each = [&](const auto& f) {
      for (auto leaf = first; leaf != last; ++leaf)
        for_each_overlap(source_.all.at(leaf->first), leaf->second, [&](const Overlap& overlap) {
          if (overlap.from == me || overlap.to == me) f(*leaf, overlap, size_of(leaf->second.array.dtype));
        });
    };
    std::vector<std::size_t> sent(peers), received(peers);
    std::set<std::string> read;
    each([&](const auto& leaf, const Overlap& overlap, std::size_t item) {
      const std::size_t bytes = static_cast<std::size_t>(volume(overlap.box)) * item;
      if (overlap.from == me) read.insert(leaf.first);
      if (overlap.from == overlap.to) return;
      (overlap.from == me ? sent[index(overlap.to)] : received[index(overlap.from)]) += bytes;
    });
    std::map<std::string, Buffer> held, made;
    std::vector<Buffer> out(peers), in(peers);
    together(device_, op_.describe(), [&] {
      for (const std::string& name : read) held[name] = source_.mine.at(name)->on_host();
      Pool& pool = *device_.host_pool();
      for (auto leaf = first; leaf != last; ++leaf)
        if (const auto mine = target_.mine.find(leaf->first); mine != target_.mine.end()) {
          const auto& like = *mine->second;
          const Buffer& shard = made[leaf->first] = pool.allocate(like.bytes());
          if (like.global.is_padded()) std::memset(shard.data(), 0, shard.bytes());
        }
      for (std::size_t peer = 0; peer < peers; ++peer) {
        if (sent[peer] != 0) out[peer] = pool.allocate(sent[peer]);
        if (received[peer] != 0) in[peer] = pool.allocate(received[peer]);
      }
      std::vector<std::size_t> used(peers);
      each([&](const auto& leaf, const Overlap& overlap, std::size_t item) {
        if (overlap.from != me) return;
        const std::byte* const from = held[leaf.first].data() + overlap.in_source * item;
        const Index strides = row_major_strides(source_.all.at(leaf.first).shard);
        if (overlap.to == me) {
          copy_box(overlap.box, item, from, strides, made[leaf.first].data() + overlap.in_target * item,
                   row_major_strides(leaf.second.shard));
        } else {
          std::size_t& end = used[index(overlap.to)];
          copy_box(overlap.box, item, from, strides, out[index(overlap.to)].data() + end,
                   row_major_strides(overlap.box));
          end += static_cast<std::size_t>(volume(overlap.box)) * item;
        }
      });
    });
    exchange(out, in);
    std::vector<std::size_t> used(peers);
    each([&](const auto& leaf, const Overlap& overlap, std::size_t item) {
      if (overlap.from == me) return;
      std::size_t& end = used[index(overlap.from)];
      copy_box(overlap.box, item, in[index(overlap.from)].data() + end, row_major_strides(overlap.box),
               made[leaf.first].data() + overlap.in_target * item, row_major_strides(leaf.second.shard));
      end += static_cast<std::size_t>(volume(overlap.box)) * item;
    });
    return made;
  }

 private:
  static std::size_t index(int device) { return static_cast<std::size_t>(device); }
  /// One message to and from each peer that has one.
  void exchange(const std::vector<Buffer>& out, const std::vector<Buffer>& in) const {
    Communicator& all = device_.everybody();
    std::vector<Request> requests;
    for (int peer = 0; peer < all.size(); ++peer)
      if (in[index(peer)]) requests.push_back(all.recv(in[index(peer)], peer, op_.site));
    for (int peer = 0; peer < all.size(); ++peer)
      if (out[index(peer)]) requests.push_back(all.send(out[index(peer)], peer, op_.site));
    for (Request& request : requests) request.wait();
    // A message keeps its memory until it is received, so those of two batches would add up.
    all.barrier(op_.site);
  }

  Device& device_;
  const ReshardedTree& source_;
  const ReshardedTree& target_;
  const shardlib::detail::OpInfo& op_;
};

SHARDLIB_INLINE void reshard(const DevicePtr& device, const NamedValues& from, NamedValues to,
                             const shardlib::detail::UntypedLeaves<shardlib::detail::ValuePtr>& places,
                             const Site& site) {
  namespace core = shardlib::detail;
  const core::Calling op{"reshard", {}, site};
  const auto tree_of = [&](const NamedValues& leaves, const char* which) {
    const std::string what = op.describe() + ": " + which;
    ReshardedTree tree;
    json list = json::array();
    together(*device, what, [&] {
      tree.mine = leaves_of(*device, leaves, list);
      for (const auto& [name, value] : leaves)
        if (value->slot)
          throw Error("the leaf '" + name +
                      "' is differentiated, and reshard has no derivative; call it outside of value_and_grad");
    });
    const std::vector<std::string> lists = gather_texts(*device, list.dump());
    together(*device, what, [&] { tree.all = leaves_together(lists); });
    return tree;
  };
  const ReshardedTree source = tree_of(from, "source");
  ReshardedTree target = tree_of(to, "target");

  std::vector<CheckpointArray> there, here;
  std::set<std::string> names;
  for (const auto& [name, leaf] : source.all) there.push_back(leaf.array);
  for (const auto& [name, leaf] : target.all) {
    here.push_back(leaf.array);
    names.insert(name);
  }
  fail_unless_empty(op.describe() + ": the source does not fit the target:",
                    differences(there, "the source", here, "the target", names, false));

  // A deferred value may communicate, so all are computed now, in the order of the tree.
  for (const auto& [name, value] : from) static_cast<void>(value->data());
  require_equal_holders(*device, op.describe() + ": source", source.all, source.mine, "with `rename_from`");
  // From here on, only the tree itself keeps its old values.
  std::map<std::string, core::ValuePtr*> place_of_leaf;
  for (std::size_t i = 0; i < to.size(); ++i) place_of_leaf[to[i].first] = places.leaves[i].pointer;
  to.clear();
  for (auto& [name, value] : target.mine) value = with_buffer(op, *value, {});

  const std::uint64_t together_below = device->tuning().resharded_together;
  const Resharding resharding(*device, source, target, op);
  for (auto first = target.all.cbegin(); first != target.all.cend();) {
    auto last = first;
    std::uint64_t bytes = 0;
    do bytes += (last++)->second.array.bytes();
    while (last != target.all.cend() && bytes + last->second.array.bytes() <= together_below);
    const auto made = resharding.move(first, last);
    together(*device, op.describe(), [&] {
      for (const auto& [name, shard] : made) {
        const core::Value& like = *target.mine.at(name);
        *place_of_leaf.at(name) = with_buffer(op, like, like.device->to_device(shard));
      }
    });
    first = last;
  }
}

}  // namespace shardlib::io::detail
