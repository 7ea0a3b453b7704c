// One collective as work that its members share. It is used where all members can reach all buffers: threads of one
// process, or ranks of one node.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "shardlib/comm/communicator.hpp"
#include "shardlib/comm/reduce_tree.hpp"
#include "shardlib/memory/nontemporal.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/tuning.hpp"

namespace shardlib::detail {

/// The work of a call: for each member a part, which is what that member receives. A part consists of chunks. Any
/// member may do any chunk once all have posted their buffers.
///
/// In a group that spans nodes, this is the work inside one node. Rank B * members + i is member i of node B.
/// all_gather: the recv of member i already has the blocks of the i-th ranks of all nodes; the others copy them from
/// there. reduce_scatter: the recv of member i gets, for each node's i-th rank, the sum over this node's members, in
/// the dtype of sums that are not complete (dtype_of_sum).
class CollectiveWork {
 public:
  CollectiveWork(const CollectiveCall& call, std::size_t members, const Tuning& tuning)
      : call_(call), members_(members) {
    if (call.elsewhere) return;
    const std::size_t ranks = members * call.nodes;
    // For an all_reduce a block is a slice of the vector, otherwise one rank's block.
    block_ = call.kind == Collective::all_gather ? call.bytes : (call.bytes + ranks - 1) / ranks;
    if (call.kind == Collective::all_reduce) block_ = (block_ + 63) / 64 * 64;
    per_block_ = (block_ + chunk - 1) / chunk;
    const bool moves = call.kind == Collective::all_gather || call.kind == Collective::all_to_all;
    if (call.kind != Collective::gather_view) chunks_ = (moves ? ranks : call.nodes) * per_block_;
    if (call.kind == Collective::reduce_scatter && call.nodes > 1)
      widening_ = size_of(dtype_of_sum(call.dtype)) / size_of(call.dtype);
    nontemporal_ = widening_ == 1 &&
                   (call.kind == Collective::reduce_scatter ? call.nodes : ranks) * block_ >= tuning.nontemporal_from;
    piece_ = block_ / call.rows;
    row_ = ranks * piece_;
  }

  [[nodiscard]] const CollectiveCall& call() const { return call_; }
  [[nodiscard]] std::size_t chunks() const { return chunks_; }  ///< in each part

  /// Does chunk c of member `part`'s part; send(i) and recv(i) are where member i's buffers begin.
  template <class Send, class Recv>
  void run(std::size_t part, std::size_t c, const Send& send, const Recv& recv) const {
    const std::size_t offset = c % per_block_ * chunk;
    const std::size_t bytes = std::min(chunk, block_ - offset);
    const std::size_t block = c / per_block_;  // the block within the part
    // A member's own block comes first. Then each member reads from a different one.
    const std::size_t from = (part + block) % members_;
    switch (call_.kind) {
      case Collective::all_gather: {
        if (call_.nodes > 1 && from == part) break;
        for_pieces(block / members_ * members_ + from, offset, bytes,
                   [&](std::size_t place, std::size_t own, std::size_t n) {
                     copy(recv(part) + place, call_.nodes == 1 ? send(from) + own : recv(from) + place, n);
                   });
        break;
      }
      case Collective::all_to_all:
        copy(recv(part) + from * block_ + offset, send(from) + part * block_ + offset, bytes);
        break;
      case Collective::reduce_scatter: {
        std::vector<const std::byte*> in(members_);
        for_pieces(block * members_ + part, offset, bytes, [&](std::size_t place, std::size_t own, std::size_t n) {
          for (std::size_t i = 0; i < members_; ++i) in[i] = send(i) + place;
          std::byte* out = recv(part) + (block * block_ + own) * widening_;
          reduce(n, in, {&out, 1});
        });
        break;
      }
      case Collective::all_reduce: {
        const std::size_t place = part * block_ + offset;
        if (place >= call_.bytes) break;
        std::vector<const std::byte*> in(members_);
        std::vector<std::byte*> out(members_);
        for (std::size_t i = 0; i < members_; ++i) {
          in[i] = send(i) + place;
          out[i] = recv((part + i) % members_) + place;
        }
        reduce(std::min(bytes, call_.bytes - place), in, out);
        break;
      }
      case Collective::gather_view:
      case Collective::barrier:
      case Collective::shift:
      case Collective::exchange:
        break;
    }
    if (nontemporal_) nontemporal_fence();
  }

  /// Does all chunks of member `part`'s part, and writes them to `out`. It does nothing for the other members.
  template <class Send>
  void run_alone(std::size_t part, const Send& send, std::byte* out) const {
    if (call_.elsewhere) return;
    if (call_.kind == Collective::all_reduce) {
      std::vector<const std::byte*> in(members_);
      for (std::size_t i = 0; i < members_; ++i) in[i] = send(i);
      reduce(call_.bytes, in, {&out, 1});
      if (nontemporal_) nontemporal_fence();
    } else {
      for (std::size_t c = 0; c < chunks_; ++c) run(part, c, send, [out](std::size_t) { return out; });
    }
  }

 private:
  static constexpr std::size_t chunk = 65536;
  /// Calls f(offset in the whole, offset in the block, bytes) for each piece of `bytes` bytes of a rank's block, from
  /// `offset` on.
  template <class F>
  void for_pieces(std::size_t rank, std::size_t offset, std::size_t bytes, const F& f) const {
    for (const std::size_t end = offset + bytes; offset < end;) {
      const std::size_t row = offset / piece_, inside = offset % piece_, n = std::min(end - offset, piece_ - inside);
      f(row * row_ + rank * piece_ + inside, offset, n);
      offset += n;
    }
  }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) const {
    nontemporal_ ? nontemporal_copy(to, from, bytes) : copy_bytes(to, from, bytes);
  }
  /// Writes the same sum of `bytes` bytes to each of `out`, and advances all pointers.
  void reduce(std::size_t bytes, std::span<const std::byte*> in, std::span<std::byte*> out) const {
    constexpr std::size_t strip = 4096;
    const std::size_t step = nontemporal_ ? strip : bytes;
    for (std::size_t done = 0; done < bytes; done += step) {
      const std::size_t now = std::min(step, bytes - done);
      alignas(64) std::array<std::byte, strip> cached;
      std::byte* const result = nontemporal_ ? cached.data() : out[0];
      const std::size_t count = now / size_of(call_.dtype);
      widening_ > 1 ? begin_tree(call_.dtype, call_.op, in, result, count)
                    : reduce_tree(call_.dtype, call_.op, in, result, count);
      for (std::byte*& to : out) {
        if (to != result) copy(to, result, now);
        to += now * widening_;
      }
      for (const std::byte*& from : in) from += now;
    }
  }

  CollectiveCall call_;
  std::size_t members_;
  std::size_t block_ = 0;
  std::size_t per_block_ = 0;
  std::size_t chunks_ = 0;
  std::size_t row_ = 0;       ///< bytes of a row of the whole
  std::size_t piece_ = 0;     ///< bytes of a rank's piece of a row
  std::size_t widening_ = 1;  ///< bytes of a sum for each byte of its summands
  bool nontemporal_ = false;
};

}  // namespace shardlib::detail
