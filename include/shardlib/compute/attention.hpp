// Kernels of causal_attention for a device's shards.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/kernels/attention.hpp"
#include "shardlib/ops/attention.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// Shards in memory, of the operands' dtype, and the rows along the length with which the loops begin.
struct AttentionArrays {
  const void *q, *k, *v;
  kernels::AttentionSegments segments;
  std::int64_t first_query = 0, first_key = 0;
};
/// Further inputs of the backward pass, and the cotangents that it writes if they are not null.
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

[[nodiscard]] SHARDLIB_INLINE ValuePtr record_attention_erased(AttentionKernels a, std::optional<double> scale,
                                                               const TensorSpec& sums,
                                                               const std::array<const TensorSpec*, 3>& due);

template <class D>
struct AttentionOf {
  using A = accumulator_t<D>;
  using Loops = kernels::AttentionLoops;

  /// Arrays from the first rows of the loops on.
  struct Rows {
    const Loops& loops;
    const AttentionArrays& in;

    template <class T>
    T* at(T* x, std::size_t operand, std::int64_t row) const {
      return x == nullptr ? nullptr : x + row * loops.along_length[operand];
    }
    const D* queries(const void* x) const { return of_queries(static_cast<const D*>(x)); }
    const D* keys(const void* x) const { return of_keys(static_cast<const D*>(x)); }
    template <class T>
    T* of_queries(T* x, std::size_t operand = Loops::query) const {
      return at(x, operand, in.first_query);
    }
    template <class T>
    T* of_keys(T* x) const {
      return at(x, Loops::key, in.first_key);
    }
    kernels::AttentionSegments segments() const {
      return {of_queries(in.segments.queries, Loops::segment), at(in.segments.keys, Loops::segment, in.first_key)};
    }
  };

  static void forward(const Exec& exec, const Loops& loops, const AttentionArrays& in, bool wide, void* out,
                      void* sums) {
    const Rows rows{loops, in};
    const auto run = [&](auto* to) {
      kernels::causal_attention(exec, loops, rows.queries(in.q), rows.keys(in.k), rows.keys(in.v), rows.segments(),
                                rows.of_queries(to), rows.of_queries(static_cast<A*>(sums), Loops::sum));
    };
    wide ? run(static_cast<A*>(out)) : run(static_cast<D*>(out));
  }
  static void backward(const Exec& exec, const Loops& loops, const AttentionArrays& in, bool wide,
                       const AttentionCotangents& c) {
    const Rows rows{loops, in};
    const auto run = [&]<class R>(R* dq) {
      kernels::causal_attention_backward(
          exec, loops, rows.queries(in.q), rows.keys(in.k), rows.keys(in.v), rows.segments(), rows.queries(c.out),
          rows.of_queries(static_cast<const A*>(c.sums), Loops::sum), rows.queries(c.ct), rows.of_queries(dq),
          rows.of_keys(static_cast<R*>(c.dk)), rows.of_keys(static_cast<R*>(c.dv)));
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
