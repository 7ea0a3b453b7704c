// Definitions of convolution.hpp.
#pragma once

#include "shardlib/compute/convolution.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "shardlib/autodiff/accumulator.hpp"
#include "shardlib/comm/reduce_tree.hpp"
#include "shardlib/kernels/convolution.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/kernels/layout.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/runtime/bindings.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

/// How far a window reaches.
inline std::int64_t reach(DimSize elements, const Window& at) {
  return (elements.size - 1) * at.dilation + 1;
}
/// The zeros with which the result has the length of the operand: before a causal window, or around a centered one.
inline std::string zeros_around(std::int64_t zeros) {
  const std::string before =
      std::to_string(zeros) + (zeros == 1 ? " zero" : " zeros") + ", as in {.before = " + std::to_string(zeros) + "}";
  if (zeros < 2) return before;
  return before + " (causal) or {.before = " + std::to_string(zeros / 2) +
         ", .after = " + std::to_string(zeros - zeros / 2) + "} (centered)";
}
/// The number of positions of a window along one length. Throws if there is none.
inline std::int64_t positions(const Bindings& names, const Dim& length, DimSize size, const Dim& window,
                              DimSize elements, const Window& at) {
  const std::string l(length.name), k(window.name);
  if (at.stride < 1 || at.before < 0 || at.after < 0)
    names.fail("along `" + l + "` windows move by " + std::to_string(at.stride) + ", with " +
               std::to_string(at.before) + " zeros before and " + std::to_string(at.after) +
               " after; give a stride of 1 or more, and no negative number of zeros");
  const std::int64_t room = std::numeric_limits<std::int64_t>::max() - size.size;
  if (at.before > room || at.after > room - at.before)
    names.fail("along `" + l + "` of size " + std::to_string(size.size) + " there would be " +
               std::to_string(at.before) + " zeros before and " + std::to_string(at.after) +
               " after, which are more than can be counted; give smaller numbers");
  const std::int64_t whole = size.size + at.before + at.after;
  if (at.dilation < 1)
    names.fail("along `" + l + "` the elements of a window are " + std::to_string(at.dilation) +
               " apart; give a dilation of 1 or more");
  if (elements.size < 1 || elements.size > whole ||
      (elements.size > 1 && at.dilation > (whole - 1) / (elements.size - 1)))
    names.fail("a window of " + std::to_string(elements.size) + " elements, `" + k + "`" +
               (at.dilation > 1 ? ", which are " + std::to_string(at.dilation) + " apart" : "") +
               ", has no place along `" + l + "` of size " + std::to_string(size.size) + " with " +
               std::to_string(at.before + at.after) +
               " zeros; take a smaller window, or add zeros, as in {.before = 1, .after = 1}");
  return (whole - reach(elements, at)) / at.stride + 1;
}

SHARDLIB_INLINE WindowSizes window_sizes(const OpInfo& op, const OpParts& lengths, const TensorSpec& out,
                                         const ValuePtr& x, const ValuePtr& w, const Sizes& given,
                                         std::initializer_list<Window> windows) {
  Bindings names(op, x->device);
  names.bind(*x);
  if (w != nullptr) names.bind(*w);
  for (const NamedSize& size : given) names.bind(size);
  const int rank = lengths.out.rank();
  if (windows.size() != 1 && static_cast<int>(windows.size()) != rank)
    names.fail(std::to_string(windows.size()) + " windows are given for " + std::to_string(rank) +
               " lengths; give one for all, or one for each");
  WindowSizes sizes;
  for (int i = 0; i < rank; ++i) {
    const Window& window = windows.begin()[windows.size() == 1 ? 0 : i];
    const Dim &length = lengths.in[0].dims[i], &result = lengths.out.dims[i];
    const DimSize size = names[length], elements = names[lengths.in[1].dims[i]];
    const std::int64_t n = positions(names, length, size, lengths.in[1].dims[i], elements, window);
    if (result.name != length.name)
      names.bind(result.name, n);
    else if (n != size.size)
      names.fail("windows have " + std::to_string(n) + " positions along `" + std::string(length.name) +
                 "`, which has size " + std::to_string(size.size) +
                 "; give the length of the result a name of its own" +
                 (window.stride == 1 ? ", or " + zeros_around(reach(elements, window) - 1) : ""));
    sizes.loops.push_back({elements.size, window.stride, window.before, window.dilation});
  }
  sizes.global = names.sizes(out);
  return sizes;
}

SHARDLIB_INLINE double conv_flops(const TensorSpec& seen, const Shape& shape, const Value& y) {
  double flops = 2.0 * static_cast<double>(product(shape));
  for (int i = 0; i < y.spec->rank(); ++i)
    if (!seen.has(y.spec->dims[i].name)) flops *= static_cast<double>(y.local[i]);
  return flops;
}

SHARDLIB_INLINE WindowPieces::WindowPieces(const Value& tensor, const TensorSpec& seen,
                                           std::initializer_list<const Value*> others, const OpParts& lengths,
                                           const WindowLoops& loops, bool whole)
    : tensor_(tensor), seen_(seen), lengths_(lengths), loops_(loops) {
  const auto dim = tensor.spec->dims[0].name;
  whole = whole || lengths.in[0].has(dim);
  for (const Value* value : others) whole = whole || value->spec->find(dim) > 0;
  for (const Dim& of : seen.dims)
    for (const Value* from : others)
      if (const int at = from->spec->find(of.name); at >= 0) {
        shape_.push_back(from->local[at]);
        break;
      }
  end_ = shape_[0];
  if (whole || end_ == 0) return;
  // A device has other caches, and its kernels take a while to start.
  const std::int64_t most = tensor.device->exec().on_device() ? 1 << 26 : 1 << 20;
  shape_[0] = std::clamp(most * end_ / std::max<std::int64_t>(1, product(shape_)), std::int64_t{1}, end_);
}

SHARDLIB_INLINE bool WindowPieces::next() {
  begin_ += shape_[0];
  if (begin_ >= end_) return false;
  shape_[0] = std::min(shape_[0], end_ - begin_);
  return true;
}

SHARDLIB_INLINE bool WindowPieces::divides(const Value& value) const {
  return value.spec->has(tensor_.spec->dims[0].name);
}

SHARDLIB_INLINE WindowPieces::Part WindowPieces::part(const Value& value, std::byte* data, std::size_t element) const {
  Part part{data, value.local};
  if (shape_[0] == end_ || !divides(value)) return part;
  part.shape[0] = begin_;
  part.data += static_cast<std::size_t>(product(part.shape)) * element;
  part.shape[0] = shape_[0];
  return part;
}

template <class F>
void WindowPieces::each_tap(const Shape& tensor, const F& f) const {
  const TensorSpec &from = lengths_.in[0], &window = lengths_.in[1], &to = lengths_.out;
  const kernels::DimVector strides = kernels::row_major(view(tensor)), all = kernels::row_major(view(shape_));
  kernels::DimVector place;  // the stride, in the array of elements, of each dim of the tensor
  for (const Dim& dim : tensor_.spec->dims) {
    const int length = from.find(dim.name);
    place.push(all[seen_.find(length < 0 ? dim.name : to.dims[length].name)]);
  }
  std::int64_t taps = 1;
  for (const WindowLoop& loop : loops_) taps *= loop.elements;
  for (std::int64_t tap = 0; tap < taps; ++tap) {
    kernels::DimVector part(view(tensor)), steps = strides;
    std::int64_t rest = tap, first = 0, to_first = 0;
    for (int i = loops_.size(); i-- > 0;) {
      const WindowLoop& loop = loops_[i];
      const std::int64_t k = rest % loop.elements;
      rest /= loop.elements;
      const int at = tensor_.spec->find(from.dims[i].name);
      // The positions n whose element n * stride + k * dilation - before is in the tensor.
      const std::int64_t shift = k * loop.dilation - loop.before;
      const std::int64_t begin = shift >= 0 ? 0 : (-shift + loop.stride - 1) / loop.stride;
      const std::int64_t end = tensor[at] <= shift ? 0
                                                   : std::min(shape_[seen_.find(to.dims[i].name)],
                                                              (tensor[at] - 1 - shift) / loop.stride + 1);
      part.at(at) = std::max<std::int64_t>(0, end - begin);
      first += (begin * loop.stride + shift) * strides[at];
      to_first += begin * place[at] + k * all[seen_.find(window.dims[i].name)];
      steps.at(at) *= loop.stride;
    }
    if (kernels::product(part) > 0) f(part, first, steps, to_first, place);
  }
}

SHARDLIB_INLINE void WindowPieces::take(const Exec& exec, std::size_t element, const Part& from,
                                        std::byte* elements) const {
  exec.zero(elements, static_cast<std::size_t>(product(shape_)) * element);
  each_tap(from.shape, [&](const kernels::DimVector& part, std::int64_t first, const kernels::DimVector& strides,
                           std::int64_t to_first, const kernels::DimVector& place) {
    kernels::copy_strided(exec, element, part, from.data + static_cast<std::size_t>(first) * element, strides,
                          elements + static_cast<std::size_t>(to_first) * element, place);
  });
}

SHARDLIB_INLINE void WindowPieces::add(const Exec& exec, DType dtype, const std::byte* elements,
                                       const Part& sums) const {
  visit_dtype(dtype, [&]<class T>(T) {
    if constexpr (floating<T>) {
      using A = accumulator_t<T>;
      each_tap(sums.shape, [&](const kernels::DimVector& part, std::int64_t first, const kernels::DimVector& strides,
                               std::int64_t from_first, const kernels::DimVector& place) {
        kernels::apply(exec, part, kernels::body::AddElement{},
                       kernels::Operand<const T>(reinterpret_cast<const T*>(elements) + from_first, place),
                       kernels::Operand<A>(reinterpret_cast<A*>(sums.data) + first, strides));
      });
    }
  });
}

SHARDLIB_INLINE Buffer zero_sums(const Value& value) {
  Buffer sums =
      value.device->pool()->allocate(static_cast<std::size_t>(value.count()) * size_of(dtype_of_sum(value.dtype)));
  value.device->exec().zero(sums.data(), sums.bytes());
  return sums;
}
SHARDLIB_INLINE Buffer rounded_sums(const Value& value, Buffer&& sums) {
  const DType dtype = dtype_of_sum(value.dtype);
  if (dtype == value.dtype) return std::move(sums);
  Buffer result = allocate(value);
  convert_numbers(value.device->exec(), value.count(), dtype, sums, value.dtype, result);
  return result;
}

/// The sizes of a convolution of images, if the dims of images and results are in the order of oneDNN: first those that
/// the weights lack, then lengths, then channels. The weights may have any order.
inline std::optional<kernels::ImageConv> as_image_conv(const Value& images, const Value& weights, const Value& results,
                                                       const OpParts& lengths, const WindowLoops& loops) {
  const TensorSpec &in = *images.spec, &window = *weights.spec, &out = *results.spec;
  const int rank = loops.size(), batch = in.rank() - rank - 1;
  if (rank > 2 || batch < 0 || out.rank() != in.rank() || window.rank() != rank + 2) return {};
  const kernels::DimVector distances = kernels::row_major(view(weights.local));
  const int channel = window.find(in.dims[in.rank() - 1].name), filter = window.find(out.dims[in.rank() - 1].name);
  if (channel < 0 || filter < 0 || channel == filter) return {};
  kernels::ImageConv conv{.channels = weights.local[channel],
                          .filters = weights.local[filter],
                          .channel = distances[channel],
                          .filter = distances[filter],
                          .rank = rank};
  for (int d = 0; d < batch; ++d) {
    if (in.dims[d].name != out.dims[d].name) return {};
    conv.images *= images.local[d];
  }
  for (int i = 0; i < rank; ++i) {
    const int d = batch + i, at = lengths.in[0].find(in.dims[d].name);
    if (at < 0 || lengths.out.find(out.dims[d].name) != at) return {};
    const int k = window.find(lengths.in[1].dims[at].name);
    const WindowLoop& loop = loops[at];
    if (k < 0 || weights.local[k] != loop.elements) return {};
    conv.lengths[static_cast<std::size_t>(i)] = {images.local[d], loop.elements, results.local[d], loop.stride,
                                                 loop.dilation,   loop.before,   distances[k]};
  }
  return conv;
}

SHARDLIB_INLINE Buffer conv_of_images(const Convolution<f32>& conv, const Value& out) {
  using kernels::ConvPass;
  OpParts lengths = *conv.lengths;
  WindowLoops loops = conv.loops;
  const bool backwards = loops[0].dilation < 0;  // over the cotangent: see ConvOperandVjp
  if (backwards) {
    std::swap(lengths.in[0], lengths.out);
    for (WindowLoop& loop : loops) {
      loop.before = -loop.before;
      loop.dilation = -loop.dilation;
    }
  }
  const ConvPass pass = backwards || conv.transposed                ? ConvPass::images
                        : out.spec->has(lengths.in[1].dims[0].name) ? ConvPass::weights
                                                                    : ConvPass::result;
  const Value& images = pass == ConvPass::images ? out : *conv.x;
  const Value& weights = pass == ConvPass::weights ? out : *conv.y;
  const Value& results = pass == ConvPass::images ? *conv.x : pass == ConvPass::weights ? *conv.y : out;
  const auto sizes = as_image_conv(images, weights, results, lengths, loops);
  const Exec exec = out.device->exec();
  if (!sizes || !kernels::has_image_conv(exec, pass, *sizes, out.device->tuning().image_conv)) return {};
  const WindowPieces all(conv.transposed ? out : *conv.x, *conv.seen, {&*conv.y, conv.transposed ? &*conv.x : &out},
                         *conv.lengths, conv.loops, true);
  add_flops(out, conv_flops(*conv.seen, all.shape(), *conv.y));
  Buffer result = allocate(out);
  const auto numbers = [&](const Value& value) { return (&value == &out ? result : value.data()).as<float>(); };
  kernels::image_conv(exec, pass, *sizes, numbers(images), numbers(weights), numbers(results));
  return result;
}

SHARDLIB_INLINE Buffer TakeWindows::operator()(const Value& in, const Value& out) const {
  const WindowPieces all(in, *out.spec, {&out}, *lengths, loops, true);
  Buffer result = allocate(out);
  all.take(out.device->exec(), size_of(out.dtype), all.part(in, in.data().data(), 0), result.data());
  return result;
}
SHARDLIB_INLINE Buffer SumWindows::operator()(const Value& in, const Value& out) const {
  const WindowPieces all(out, *in.spec, {&in}, *lengths, loops, true);
  Buffer sums = zero_sums(out);
  all.add(out.device->exec(), in.dtype, in.data().data(), all.part(out, sums.data(), 0));
  return rounded_sums(out, std::move(sums));
}

}  // namespace shardlib::detail
