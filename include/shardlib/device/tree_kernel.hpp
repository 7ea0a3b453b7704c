// The sums of communicators, as a kernel.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "shardlib/comm/reduce_tree.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/memory/region.hpp"
#include "shardlib/memory/stream.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// Reduces n elements of each rank, whose arrays are `stride` elements apart. The tree is the one
/// of reduce_tree, which does the same on the host. An item is a piece of the result.
template <class T, class Op>
struct ReduceTree {
  static constexpr std::int64_t piece = 1024;
  const T* in;
  std::int64_t stride, ranks, n;
  T* out;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t longest = piece;
    const std::int64_t first = item * longest;
    team.lanes(std::min(longest, n - first), [=, this](std::int64_t i) { reduce(first + i); });
  }

 private:
  SHARDLIB_FUNCTION void reduce(std::int64_t i) const {
    using A = accumulator_t<T>;
    const Op op;
    A whole[32];  // the sums of trees over 1, 2, 4 ... ranks that cover the ranks so far
    A value = whole[0] = static_cast<A>(in[i]);
    int level = 0;
    for (std::int64_t r = 1; r < ranks; ++r) {
      value = static_cast<A>(in[r * stride + i]);
      for (level = 0; (r >> level & 1) != 0; ++level) value = op(whole[level], value);
      whole[level] = value;
    }
    for (++level; ranks >> level != 0; ++level) {  // `value` is the sum of the smallest tree
      if ((ranks >> level & 1) != 0) value = op(whole[level], value);
    }
    out[i] = static_cast<T>(value);
  }
};

/// Starts that kernel in a stream of the device that has the memory of `in` and `out`. The ranks' arrays of n elements
/// follow each other in `in`, and `out` gets their sums. Both must live until the stream has run it.
SHARDLIB_INLINE void reduce_in_stream(Stream& stream, DType dtype, Reduction op, const Buffer& in, std::size_t ranks,
                                      std::size_t n, const Buffer& out);

/// Loads all forms of that kernel on a GPU, before its first operation of NCCL. Later it could hang: a load may wait
/// until the GPU is idle, so for an operation of NCCL that waits for a device whose thread waits for this load. NCCL
/// loads its own kernels when it makes a communicator. Does nothing for memory of no GPU.
SHARDLIB_INLINE void load_reductions(Region& memory);

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/device/impl/tree_kernel.hpp"
#endif
