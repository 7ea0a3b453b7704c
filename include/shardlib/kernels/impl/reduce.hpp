// Definitions of reduce.hpp.
#pragma once

#include "shardlib/kernels/reduce.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <type_traits>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/wrapping.hpp"

namespace shardlib::kernels {

namespace detail {

struct SumOp {
  static constexpr const char* name = "sum";
  template <class T>
  static constexpr T identity() {
    return T(0);
  }
  template <class T>
  static T combine(T a, T b) {
    return shardlib::detail::WrappingSum{}(a, b);
  }
};

struct ProdOp {
  static constexpr const char* name = "prod";
  template <class T>
  static constexpr T identity() {
    return T(1);
  }
  template <class T>
  static T combine(T a, T b) {
    return shardlib::detail::WrappingProduct{}(a, b);
  }
};

struct MaxOp {
  static constexpr const char* name = "max";
  template <class T>
  static constexpr T identity() {
    if constexpr (std::is_floating_point_v<T>) return -std::numeric_limits<T>::infinity();
    return std::numeric_limits<T>::lowest();
  }
  template <class T>
  static T combine(T a, T b) {
    return b > a || b != b ? b : a;  // a NaN is the maximum
  }
};

struct MinOp {
  static constexpr const char* name = "min";
  template <class T>
  static constexpr T identity() {
    if constexpr (std::is_floating_point_v<T>) return std::numeric_limits<T>::infinity();
    return std::numeric_limits<T>::max();
  }
  template <class T>
  static T combine(T a, T b) {
    return b < a || b != b ? b : a;  // a NaN is the minimum, too
  }
};

/// Combines rows of W columns. Every 32 rows of one level give one row of the next level. The rounding error of long
/// sums is then close to that of a pairwise sum.
template <class Op, class Acc, std::size_t W>
class Cascade {
 public:
  template <class T>
  void add(const T* row, std::size_t width) {
    Acc* sum = levels_[0];
    if (counts_[0] == 0) {
      for (std::size_t j = 0; j < width; ++j) sum[j] = static_cast<Acc>(row[j]);
    } else {
      for (std::size_t j = 0; j < width; ++j) sum[j] = Op::combine(sum[j], static_cast<Acc>(row[j]));
    }
    ++counts_[0];
    for (std::size_t l = 0; l + 1 < depth && counts_[l] == 32; ++l) carry(l, width);
  }
  /// The combined row, valid until the next call. At least one row must have been added.
  Acc* finish(std::size_t width) {
    Acc* result = nullptr;
    for (std::size_t l = 0; l < depth; ++l) {
      if (counts_[l] == 0) continue;
      if (result != nullptr) combine_rows(result, levels_[l], width);
      result = levels_[l];
    }
    return result;
  }

 private:
  static constexpr std::size_t depth = 4;
  static void combine_rows(const Acc* from, Acc* to, std::size_t width) {
    for (std::size_t j = 0; j < width; ++j) to[j] = Op::combine(to[j], from[j]);
  }
  void carry(std::size_t l, std::size_t width) {
    if (counts_[l + 1] == 0) {
      std::copy_n(levels_[l], width, levels_[l + 1]);
    } else {
      combine_rows(levels_[l], levels_[l + 1], width);
    }
    ++counts_[l + 1];
    counts_[l] = 0;
  }
  Acc levels_[depth][W];
  std::array<std::int64_t, depth> counts_{};
};

/// Combines n contiguous elements, as 64 interleaved lanes.
template <class Op, class Acc, class T>
void add_lanes(Cascade<Op, Acc, 64>& cascade, const T* x, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + 64 <= n; i += 64) cascade.add(x + i, 64);
  if (i == n) return;
  Acc tail[64];
  std::fill_n(tail, 64, Op::template identity<Acc>());
  for (std::int64_t j = i; j < n; ++j) tail[j - i] = static_cast<Acc>(x[j]);
  cascade.add(tail, 64);
}

template <class Op, class Acc>
Acc fold_lanes(Cascade<Op, Acc, 64>& cascade) {
  Acc* lanes = cascade.finish(64);
  for (std::size_t half = 32; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) lanes[j] = Op::combine(lanes[j], lanes[j + half]);
  }
  return lanes[0];
}

/// Reduces one contiguous row.
template <class Op, class Acc, class T>
Acc reduce_row(const T* x, std::int64_t n) {
  if (n == 0) return Op::template identity<Acc>();
  Cascade<Op, Acc, 64> cascade;
  add_lanes(cascade, x, n);
  return fold_lanes(cascade);
}

/// Removes the innermost loop if its elements are contiguous, and returns its size.
inline std::int64_t pop_contiguous(Nest<1>& nest) {
  return nest.depth > 0 && nest.loop(nest.depth - 1).strides[0] == 1 ? nest.pop().extent : 1;
}

/// Reduces the rows [first, last) of the nest `reduced` for every element of `kept`. The results are dense.
template <class Op, class Acc, class T, class Store>
void reduce_part(const Exec& exec, const T* in, Nest<1> kept, Nest<1> reduced, bool rows_reduced, std::int64_t pieces,
                 const Store& store) {
  constexpr std::int64_t width = 256;
  if (rows_reduced) {  // reduces each contiguous run to one value
    constexpr std::int64_t chunk = 4096;
    const std::int64_t n = pop_contiguous(reduced);
    const std::int64_t chunks = (n + chunk - 1) / chunk;
    const std::int64_t rows = reduced.count() * chunks;
    const std::int64_t outs = kept.count();
    const std::int64_t group = std::max<std::int64_t>(1, chunk / (reduced.count() * n));
    const std::int64_t groups = (outs + group - 1) / group;
    exec.for_each(groups * pieces, [&](std::int64_t item) {
      const std::int64_t piece = item % pieces;
      const std::int64_t begin = item / pieces * group;
      Walk<1> out(kept, begin);
      for (std::int64_t o = begin; o < std::min(outs, begin + group); ++o, out.next()) {
        Cascade<Op, Acc, 64> cascade;
        const std::int64_t first = rows * piece / pieces;
        Walk<1> row(reduced, first / chunks);
        for (std::int64_t r = first; r < rows * (piece + 1) / pieces; ++r) {
          const std::int64_t start = r % chunks * chunk;
          add_lanes(cascade, in + out.offsets[0] + row.offsets[0] + start, std::min(chunk, n - start));
          if (r % chunks == chunks - 1) row.next();
        }
        const Acc value = fold_lanes(cascade);
        store(piece, o, &value, std::int64_t{1});
      }
    });
    return;
  }
  const std::int64_t n = pop_contiguous(kept);
  const std::int64_t tiles = (n + width - 1) / width;
  const std::int64_t rows = reduced.count();
  exec.for_each(kept.count() * tiles * pieces, [&](std::int64_t item) {
    const std::int64_t piece = item % pieces;
    const std::int64_t outer = item / pieces / tiles;
    const std::int64_t start = item / pieces % tiles * width;
    const auto length = std::min(width, n - start);
    Cascade<Op, Acc, static_cast<std::size_t>(width)> cascade;
    const std::int64_t first = rows * piece / pieces;
    const Walk<1> out(kept, outer);
    Walk<1> row(reduced, first);
    for (std::int64_t r = first; r < rows * (piece + 1) / pieces; ++r, row.next()) {
      cascade.add(in + out.offsets[0] + row.offsets[0] + start, static_cast<std::size_t>(length));
    }
    store(piece, outer * n + start, cascade.finish(static_cast<std::size_t>(length)), length);
  });
}

template <class Op, class T>
void reduce(const Exec& exec, const T* in, std::span<const std::int64_t> shape, std::span<const bool> reduced_dims,
            std::span<const std::int64_t> part, T* out) {
  using Acc = accumulator_t<T>;
  const Dims strides = row_major(shape);
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
  if (total == 0) {
    exec.for_each(outs, [=](std::int64_t i) { out[i] = T(Op::template identity<Acc>()); });
    return;
  }
  const auto write = [&](std::int64_t /*piece*/, std::int64_t first, const Acc* values, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) out[first + i] = T(values[i]);
  };
  // If there are few results and much data, splits each reduction into pieces. The number of pieces depends only on
  // sizes, so that results are the same bit for bit.
  constexpr std::int64_t piece_size = 1 << 17;
  const std::int64_t rows = rows_reduced ? (per_out + 4095) / 4096 : per_out;
  const std::int64_t pieces =
      outs > 4096 ? 1 : std::clamp<std::int64_t>(total / piece_size, 1, std::min<std::int64_t>(rows, 16));
  if (pieces == 1) return reduce_part<Op, Acc>(exec, in, kept, reduced, rows_reduced, 1, write);
  const Buffer scratch = exec.pool->allocate(static_cast<std::size_t>(pieces * outs) * sizeof(Acc));
  const auto keep = [&](std::int64_t piece, std::int64_t first, const Acc* values, std::int64_t n) {
    std::copy_n(values, n, scratch.as<Acc>() + piece * outs + first);
  };
  reduce_part<Op, Acc>(exec, in, kept, reduced, rows_reduced, pieces, keep);
  Nest<1> columns;
  Nest<1> parts;
  columns.push(outs, {1});
  parts.push(pieces, {outs});
  reduce_part<Op, Acc>(exec, scratch.as<const Acc>(), columns, parts, outs == 1, 1, write);
}

template <class Op, class AnyDType>
void reduce(const Exec& exec, AnyDType dtype, const void* in, std::span<const std::int64_t> shape,
            std::span<const bool> reduced_dims, std::span<const std::int64_t> part, void* out) {
  visit_dtype(dtype, [&]<class T>(T) {
    if constexpr (std::is_same_v<T, u8> || std::is_same_v<T, bool_>) {
      throw Error(std::string(Op::name) + ": no reduction of " + std::string(name(dtype_v<T>)) + "; cast to i32 first");
    } else {
      reduce<Op>(exec, static_cast<const T*>(in), shape, reduced_dims, part, static_cast<T*>(out));
    }
  });
}

}  // namespace detail

template <class AnyDType>
void sum(const Exec& exec, AnyDType dtype, const void* in, std::span<const std::int64_t> shape,
         std::span<const bool> summed, void* out) {
  detail::reduce<detail::SumOp>(exec, dtype, in, shape, summed, {}, out);
}

template <class T>
accumulator_t<T> sum_of_squares(const Exec& exec, std::int64_t n, const T* in) {
  using Acc = accumulator_t<T>;
  constexpr std::int64_t piece = 1 << 16, row = 64, rows = 32, ahead = 512;
  const std::int64_t pieces = (n + piece - 1) / piece;
  const Buffer scratch = exec.pool->allocate(static_cast<std::size_t>(pieces + 1) * sizeof(Acc));
  Acc* const sums = scratch.as<Acc>();
  exec.for_each(pieces, [=](std::int64_t item) {
    detail::Cascade<detail::SumOp, Acc, row> cascade;
    const std::int64_t end = std::min(n, (item + 1) * piece);
    for (std::int64_t begin = item * piece; begin < end; begin += rows * row) {
      // Sums like the cascade's first level, but without its stores.
      Acc squares[row] = {};
      for (std::int64_t r = begin; r < std::min(end, begin + rows * row); r += row) {
        const auto add = [&, x = in + r](std::int64_t i) {
          squares[i] += static_cast<Acc>(x[i]) * static_cast<Acc>(x[i]);
        };
        load_ahead(in, r + ahead, row);
        independent(std::min(row, end - r), add);
      }
      cascade.add(squares, row);
    }
    sums[item] = detail::fold_lanes(cascade);
  });
  exec.for_each(1, [=](std::int64_t) { sums[pieces] = detail::reduce_row<detail::SumOp, Acc>(sums, pieces); });
  Acc sum = 0;
  exec.copy(&sum, sums + pieces, sizeof sum);
  return sum;
}

template <class AnyDType>
void max(const Exec& exec, AnyDType dtype, const void* in, std::span<const std::int64_t> shape,
         std::span<const bool> reduced, void* out, std::span<const std::int64_t> part) {
  detail::reduce<detail::MaxOp>(exec, dtype, in, shape, reduced, part, out);
}
template <class AnyDType>
void min(const Exec& exec, AnyDType dtype, const void* in, std::span<const std::int64_t> shape,
         std::span<const bool> reduced, void* out, std::span<const std::int64_t> part) {
  detail::reduce<detail::MinOp>(exec, dtype, in, shape, reduced, part, out);
}

template <class AnyDType>
void prod(const Exec& exec, AnyDType dtype, const void* in, std::span<const std::int64_t> shape,
          std::span<const bool> reduced, void* out, std::span<const std::int64_t> part) {
  detail::reduce<detail::ProdOp>(exec, dtype, in, shape, reduced, part, out);
}

template <class AnyDType>
void argmax(const Exec& exec, AnyDType dtype, const void* in, std::int64_t outer, std::int64_t n, std::int64_t inner,
            i32* out, std::int64_t padding) {
  const std::int64_t counted = n - padding;
  if (counted == 0 && outer * inner > 0) throw Error("argmax: the dim has size 0; it needs at least one element");
  visit_dtype(dtype, [&]<class T>(T) {
    using Acc = std::conditional_t<std::is_same_v<T, bool_>, u8, accumulator_t<T>>;
    exec.for_each(outer * inner, [&](std::int64_t item) {
      const T* x = static_cast<const T*>(in) + item / inner * n * inner + item % inner;
      auto best = static_cast<Acc>(x[0]);
      std::int64_t at = 0;
      for (std::int64_t i = 1; i < counted; ++i) {
        const auto v = static_cast<Acc>(x[i * inner]);
        if (v > best || (v != v && best == best)) {
          best = v;
          at = i;
        }
      }
      out[item] = static_cast<i32>(at);
    });
  });
}

}  // namespace shardlib::kernels
