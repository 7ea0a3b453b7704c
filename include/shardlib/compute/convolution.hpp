// Kernels of windows and conv_unreduced for a device's shards: the elements under each window, and a matrix product.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>
#include <utility>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/einsum.hpp"
#include "shardlib/kernels/einsum.hpp"
#include "shardlib/ops/convolution.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// A tensor and the elements under its windows. If the tensor's first dim is not a length, the elements come in pieces
/// along it, because their array for a whole batch would be large and would not fit into a cache.
class WindowPieces {
 public:
  struct Part {
    std::byte* data;
    Shape shape;
  };

  /// `seen` is the spec of the array of elements, and `others` have its dims. They are one piece if one of `others` has
  /// the first dim elsewhere, or if `whole` is set.
  SHARDLIB_INLINE WindowPieces(const Value& tensor, const TensorSpec& seen, std::initializer_list<const Value*> others,
                               const OpParts& lengths, const WindowLoops& loops, bool whole = false);
  /// Goes to the next piece. The first one is the largest.
  SHARDLIB_INLINE bool next();
  [[nodiscard]] bool is_first() const { return begin_ == 0; }
  /// Whether the value has the dim of the pieces; else it belongs to each of them.
  [[nodiscard]] SHARDLIB_INLINE bool divides(const Value& value) const;
  /// The part of a value that belongs to this piece, if its shard has elements of this size and begins at `data`.
  [[nodiscard]] SHARDLIB_INLINE Part part(const Value& value, std::byte* data, std::size_t element) const;
  /// The shape of the array of elements.
  [[nodiscard]] const Shape& shape() const { return shape_; }
  [[nodiscard]] std::int64_t elements() const { return product(shape_); }
  /// Copies from the tensor's part. Where a window has no element, it has zero.
  SHARDLIB_INLINE void take(const Exec& exec, std::size_t element, const Part& from, std::byte* elements) const;
  /// Adds the elements to the tensor's part, which is of the dtype of accumulation.
  SHARDLIB_INLINE void add(const Exec& exec, DType dtype, const std::byte* elements, const Part& sums) const;

 private:
  const Value& tensor_;
  const TensorSpec& seen_;
  const OpParts& lengths_;
  const WindowLoops& loops_;
  Shape shape_;  ///< of this piece
  std::int64_t begin_ = 0, end_ = 0;

  /// Calls f(shape, first, strides, first of the elements, their strides) for each element of a window.
  template <class F>
  void each_tap(const Shape& tensor, const F& f) const;
};

/// Two for each multiply-add.
[[nodiscard]] SHARDLIB_INLINE double conv_flops(const TensorSpec& seen, const Shape& shape, const Value& y);
/// Zeros of a value's shape, in the dtype of accumulation; and the value's shard from them.
[[nodiscard]] SHARDLIB_INLINE Buffer zero_sums(const Value& value);
[[nodiscard]] SHARDLIB_INLINE Buffer rounded_sums(const Value& value, Buffer&& sums);

/// The convolution by oneDNN. The buffer is empty where oneDNN has no kernel for it, or is not faster.
[[nodiscard]] SHARDLIB_INLINE Buffer conv_of_images(const Convolution<f32>& conv, const Value& out);

template <class D>
Buffer Convolution<D>::operator()(const Value& out) const {
  using A = accumulator_t<D>;
  const Exec exec = out.device->exec();
  if constexpr (std::is_same_v<D, f32>)
    if (Buffer result = conv_of_images(*this, out)) return result;
  const auto array_for = [&](const WindowPieces& pieces, std::size_t element) {
    return out.device->pool()->allocate(static_cast<std::size_t>(pieces.elements()) * element);
  };
  if (transposed) {
    WindowPieces pieces(out, *seen, {&*x, &*y}, *lengths, loops);
    Buffer sums = zero_sums(out);
    const Buffer elements = array_for(pieces, sizeof(A));
    do {
      const auto left = pieces.part(*x, x->data().data(), sizeof(D)),
                 right = pieces.part(*y, y->data().data(), sizeof(D));
      add_flops(out, conv_flops(*seen, pieces.shape(), *y));
      kernels::einsum(exec, *plan, dtype_c<D>, dtype_c<A>, left.data, view(left.shape), right.data, view(right.shape),
                      elements.data());
      pieces.add(exec, dtype_v<A>, elements.data(), pieces.part(out, sums.data(), sizeof(A)));
    } while (pieces.next());
    return rounded_sums(out, std::move(sums));
  }
  // Only sums in the dtype of accumulation can be added to.
  WindowPieces pieces(*x, *seen, {&*y, &out}, *lengths, loops,
                      !std::is_same_v<A, D> && !out.spec->has(x->spec->dims[0].name));
  Buffer result = allocate(out);
  const Buffer elements = array_for(pieces, sizeof(D));
  do {
    pieces.take(exec, sizeof(D), pieces.part(*x, x->data().data(), sizeof(D)), elements.data());
    const auto right = pieces.part(*y, y->data().data(), sizeof(D)), to = pieces.part(out, result.data(), sizeof(D));
    add_flops(out, conv_flops(*seen, pieces.shape(), *y));
    kernels::einsum(exec, *plan, dtype_c<D>, dtype_c<D>, elements.data(), view(pieces.shape()), right.data,
                    view(right.shape), to.data, !pieces.is_first() && !pieces.divides(out));
  } while (pieces.next());
  return result;
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/convolution.hpp"
#endif
