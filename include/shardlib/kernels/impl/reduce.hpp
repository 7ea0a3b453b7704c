// Definitions of reduce.hpp.
#pragma once

#include "shardlib/kernels/reduce.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <type_traits>

#include "shardlib/kernels/body/elementwise.hpp"
#include "shardlib/kernels/body/reduce.hpp"
#include "shardlib/kernels/body/reduce_backward.hpp"
#include "shardlib/kernels/body/reduction.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/kernels/impl/floating.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::kernels {

namespace detail {

/// Removes the innermost loop if its elements are contiguous, and returns its size.
inline std::int64_t pop_contiguous(Nest<1>& nest) {
  return nest.depth > 0 && nest.loop(nest.depth - 1).strides[0] == 1 ? nest.pop().extent : 1;
}

/// Reduces `reduced` for every element of `kept`, in `pieces`.
template <class Op, class In, class Out, class Acc>
void reduce_part(const Exec& exec, const In* in, Nest<1> kept, Nest<1> reduced, bool rows_reduced, std::int64_t pieces,
                 const body::Results<Out, Acc>& results) {
  if (rows_reduced) {  // reduces each contiguous run to one value
    using Kernel = body::ReduceRuns<Op, Acc, In, Out>;
    constexpr std::int64_t chunk = Kernel::chunk;
    const std::int64_t n = pop_contiguous(reduced);
    const std::int64_t chunks = (n + chunk - 1) / chunk;
    const std::int64_t rows = reduced.count() * chunks;
    const std::int64_t outs = kept.count();
    const std::int64_t group = std::max<std::int64_t>(1, chunk / (reduced.count() * n));
    const std::int64_t groups = (outs + group - 1) / group;
    return exec.for_items(groups * pieces, 0, Kernel{in, kept, reduced, n, chunks, rows, outs, group, pieces, results});
  }
  using Kernel = body::ReduceColumns<Op, Acc, In, Out>;
  const std::int64_t n = pop_contiguous(kept);
  const std::int64_t tiles = (n + Kernel::width - 1) / Kernel::width;
  exec.for_items(kept.count() * tiles * pieces, 0,
                 Kernel{in, kept, reduced, n, tiles, reduced.count(), pieces, results});
}

template <class Op, class T>
void reduce(const Exec& exec, const T* in, std::span<const std::int64_t> shape, std::span<const bool> reduced_dims,
            std::span<const std::int64_t> part, T* out) {
  using Acc = accumulator_t<T>;
  const DimVector strides = row_major(shape);
  Nest<1> kept;
  Nest<1> reduced;
  bool rows_reduced = true;  // whether the innermost dim is reduced
  std::int64_t outs = 1;
  std::int64_t per_out = 1;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const std::int64_t extent = reduced_dims[d] && !part.empty() ? part[d] : shape[d];
    (reduced_dims[d] ? reduced : kept).push(extent, {strides[static_cast<int>(d)]});
    if (extent != 1) rows_reduced = reduced_dims[d];
    (reduced_dims[d] ? per_out : outs) *= extent;
  }
  const std::int64_t total = outs * per_out;
  if (outs == 0) return;
  if (total == 0) return apply_flat(exec, outs, body::ConstantElement<T>{T(Op::template identity<Acc>())}, out);
  const body::Results<T, Acc> whole{out, nullptr, outs};
  // If there are few results and much data, splits each reduction into pieces. The number of pieces depends only on
  // sizes and the kind of device, so that results are the same bit for bit. A GPU needs more pieces to be busy.
  const std::int64_t most_pieces = exec.gpu() != nullptr ? 256 : 16;
  const std::int64_t piece_size = exec.gpu() != nullptr ? 1 << 15 : 1 << 17;
  const std::int64_t rows = rows_reduced ? (per_out + 4095) / 4096 : per_out;
  const std::int64_t pieces =
      outs > 4096 ? 1 : std::clamp<std::int64_t>(total / piece_size, 1, std::min<std::int64_t>(rows, most_pieces));
  if (pieces == 1) return reduce_part<Op>(exec, in, kept, reduced, rows_reduced, 1, whole);
  const Buffer scratch = exec.pool->allocate(static_cast<std::size_t>(pieces * outs) * sizeof(Acc));
  reduce_part<Op>(exec, in, kept, reduced, rows_reduced, pieces, body::Results<T, Acc>{out, scratch.as<Acc>(), outs});
  Nest<1> columns;
  Nest<1> parts;
  columns.push(outs, {1});
  parts.push(pieces, {outs});
  reduce_part<Op>(exec, scratch.as<const Acc>(), columns, parts, outs == 1, 1, whole);
}

inline body::ReducedResults reduced_results(std::span<const std::int64_t> shape, std::span<const bool> reduced,
                                            std::span<const std::int64_t> part) {
  const DimVector strides = row_major(shape);
  Nest<1> kept;
  Nest<1> taken;
  for (std::size_t d = 0; d < shape.size(); ++d)
    (reduced[d] ? taken : kept).push(reduced[d] && !part.empty() ? part[d] : shape[d], {strides[static_cast<int>(d)]});
  return {kept, taken};
}

}  // namespace detail

template <class Op, class AnyDType>
void reduce(const Exec& exec, AnyDType dtype, const void* in, std::span<const std::int64_t> shape,
            std::span<const bool> reduced, void* out, std::span<const std::int64_t> part) {
  visit_dtype(dtype, [&]<class T>(T) {
    if constexpr (std::is_same_v<T, u8> || std::is_same_v<T, bool_>) {
      throw Error(std::string(Op::name) + ": no reduction of " + std::string(name(dtype_v<T>)) + "; cast to i32 first");
    } else {
      detail::reduce<Op>(exec, static_cast<const T*>(in), shape, reduced, part, static_cast<T*>(out));
    }
  });
}

template <class T>
void sum_of_squares(const Exec& exec, std::int64_t n, const T* in, accumulator_t<T>* out) {
  using Acc = accumulator_t<T>;
  using Kernel = body::SquaresOfPiece<T>;
  const std::int64_t pieces = (n + Kernel::piece - 1) / Kernel::piece;
  constexpr std::int64_t few = 4096;  // up to this number one kernel is enough
  if (n > 0 && n <= few) return exec.for_items(1, 0, Kernel{in, n, out});
  const auto add_pieces = [&](const Acc* sums) {
    detail::reduce<detail::SumOp>(exec, sums, std::array{pieces}, std::array{true}, {}, out);
  };
  if (exec.on_device() && n > 0) {
    using Groups = body::SquaresOfGroups<T>;
    using Sums = body::SumOfGroups<Acc>;
    static_assert(Kernel::piece == Groups::group * Sums::groups_of_piece);
    const std::int64_t groups = (n + Groups::group - 1) / Groups::group;
    const Buffer scratch =
        exec.pool->allocate(static_cast<std::size_t>(groups * Groups::columns + pieces) * sizeof(Acc));
    Acc* const columns = scratch.as<Acc>();
    Acc* const sums = pieces == 1 ? out : columns + groups * Groups::columns;
    exec.for_items_on_device((groups + Groups::together - 1) / Groups::together, 0, Groups{in, n, columns});
    exec.for_items_on_device(pieces, 0, Sums{columns, groups, sums});
    if (pieces > 1) add_pieces(sums);
    return;
  }
  const Buffer scratch = exec.pool->allocate(static_cast<std::size_t>(pieces) * sizeof(Acc));
  Acc* const sums = scratch.as<Acc>();
  exec.for_items(pieces, 0, Kernel{in, n, sums});
  add_pieces(sums);
}

template <class AnyDType>
void argmax(const Exec& exec, AnyDType dtype, const void* in, const Along& a, i32* out) {
  visit_dtype(dtype, [&]<class T>(T) {
    exec.for_items(a.rows(), 0, body::Argmax<T>{static_cast<const T*>(in), out, a});
  });
}

template <class AnyDType>
void extremum_backward(const Exec& exec, AnyDType dtype, const void* in, std::span<const std::int64_t> shape,
                       std::span<const bool> reduced, const void* extrema, const void* ct, void* out,
                       std::span<const std::int64_t> part) {
  const auto results = detail::reduced_results(shape, reduced, part);
  detail::visit_floating(dtype, "max", [&]<class T>(T) {
    exec.for_items(results.items(), 0,
                   body::ExtremumBackward<T>{results, static_cast<const T*>(in), static_cast<const T*>(extrema),
                                             static_cast<const T*>(ct), static_cast<T*>(out)});
  });
}

template <class AnyDType>
void prod_backward(const Exec& exec, AnyDType dtype, const void* in, std::span<const std::int64_t> shape,
                   std::span<const bool> reduced, const void* ct, void* out, std::span<const std::int64_t> part) {
  const auto results = detail::reduced_results(shape, reduced, part);
  detail::visit_floating(dtype, "prod", [&]<class T>(T) {
    exec.for_items(
        results.items(), 0,
        body::ProdBackward<T>{results, static_cast<const T*>(in), static_cast<const T*>(ct), static_cast<T*>(out)});
  });
}

}  // namespace shardlib::kernels
