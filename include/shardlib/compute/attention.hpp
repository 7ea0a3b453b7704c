// Kernels of causal_attention for a device's shards.
#pragma once

#include <array>
#include <optional>
#include <utility>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/kernels/attention.hpp"
#include "shardlib/ops/attention.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// Shards in memory, of the operands' dtype.
struct AttentionArrays {
  const void *q, *k, *v;
  kernels::AttentionSegments segments;
};
/// What the backward pass also reads, and the cotangents that it writes if they are not null.
struct AttentionCotangents {
  const void *out, *sums, *ct;
  void *dq, *dk, *dv;
};

/// The arguments of an attention, with the kernels for the operands' dtype. If `wide`, results are in the dtype in
/// which that accumulates.
struct AttentionKernels : Attention {
  using Loops = kernels::AttentionLoops;
  double scale = 1;
  void (*forward)(const Exec& exec, const Loops& loops, const AttentionArrays& in, bool wide, void* out,
                  void* sums) = nullptr;
  void (*backward)(const Exec& exec, const Loops& loops, const AttentionArrays& in, bool wide,
                   const AttentionCotangents& cts) = nullptr;
};

/// The loops over the operands' shards. The log-sum-exps have the layout of the queries without the width dim.
[[nodiscard]] SHARDLIB_INLINE kernels::AttentionLoops attention_loops(const AttentionKernels& a);

[[nodiscard]] SHARDLIB_INLINE ValuePtr record_attention_erased(AttentionKernels a, std::optional<double> scale,
                                                               const TensorSpec& sums,
                                                               const std::array<const TensorSpec*, 3>& due);

template <class D>
struct AttentionOf {
  using A = accumulator_t<D>;
  using Loops = kernels::AttentionLoops;
  static const D* shard(const void* x) { return static_cast<const D*>(x); }

  static void forward(const Exec& exec, const Loops& loops, const AttentionArrays& in, bool wide, void* out,
                      void* sums) {
    const auto run = [&](auto* to) {
      kernels::causal_attention(exec, loops, shard(in.q), shard(in.k), shard(in.v), in.segments, to,
                                static_cast<A*>(sums));
    };
    wide ? run(static_cast<A*>(out)) : run(static_cast<D*>(out));
  }
  static void backward(const Exec& exec, const Loops& loops, const AttentionArrays& in, bool wide,
                       const AttentionCotangents& c) {
    const auto run = [&]<class R>(R* dq) {
      kernels::causal_attention_backward(exec, loops, shard(in.q), shard(in.k), shard(in.v), in.segments, shard(c.out),
                                         static_cast<const A*>(c.sums), shard(c.ct), dq, static_cast<R*>(c.dk),
                                         static_cast<R*>(c.dv));
    };
    wide ? run(static_cast<A*>(c.dq)) : run(static_cast<D*>(c.dq));
  }
};

template <class D>
ValuePtr record_attention(Attention a, std::optional<double> scale, const TensorSpec& sums,
                          const std::array<const TensorSpec*, 3>& due) {
  AttentionKernels with{std::move(a)};
  with.forward = &AttentionOf<D>::forward;
  with.backward = &AttentionOf<D>::backward;
  return record_attention_erased(std::move(with), scale, sums, due);
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/attention.hpp"
#endif
