// Definitions of convolution.hpp.
#pragma once

#include "shardlib/compute/convolution.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <utility>

#include "shardlib/kernels/layout.hpp"
#include "shardlib/kernels/reduce.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/runtime/bindings.hpp"

namespace shardlib::detail {

/// How far a window reaches.
inline std::int64_t reach(DimSize elements, const Window& at) {
  return (elements.size - 1) * at.dilation + 1;
}
/// The number of positions of a window along one length. Throws if there is none.
inline std::int64_t positions(const Bindings& names, const Dim& length, DimSize size, const Dim& window,
                              DimSize elements, const Window& at) {
  const std::string l(length.name), k(window.name);
  if (at.stride < 1 || at.before < 0 || at.after < 0)
    names.fail("along `" + l + "` windows move by " + std::to_string(at.stride) + ", with " +
               std::to_string(at.before) + " zeros before and " + std::to_string(at.after) +
               " after; give a stride of 1 or more, and no negative number of zeros");
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
      names.fail(
          "windows have " + std::to_string(n) + " positions along `" + std::string(length.name) + "`, which has size " +
          std::to_string(size.size) + "; give the length of the result a name of its own" +
          (window.stride == 1 ? ", or " + std::to_string(reach(elements, window) - 1) +
                                    " zeros, as in {.before = " + std::to_string(reach(elements, window) - 1) + "}"
                              : ""));
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

SHARDLIB_INLINE UnderWindows::UnderWindows(const Value& x, const Value& y, const Value& out, const TensorSpec& seen,
                                           const OpParts& lengths, const WindowLoops& loops, bool transposed) {
  // The lengths of x have other names and sizes in `seen`, so x comes last.
  for (const Dim& dim : seen.dims)
    for (const Value* from : {&out, &y, &x})
      if (const int at = from->spec->find(dim.name); at >= 0) {
        shape.push_back(from->local[at]);
        break;
      }
  const Exec exec = out.device->exec();
  const std::size_t element = size_of(x.dtype);
  elements = out.device->pool()->allocate(static_cast<std::size_t>(product(shape)) * element);
  exec.zero(elements.data(), elements.bytes());

  const TensorSpec &from = transposed ? lengths.out : lengths.in[0], &to = transposed ? lengths.in[0] : lengths.out;
  const kernels::Dims in = kernels::row_major(view(x.local)), all = kernels::row_major(view(shape));
  kernels::Dims place;  // the stride, in the array of all windows, of each dim of x
  for (const Dim& dim : x.spec->dims) {
    const int length = from.find(dim.name);
    place.push(all[seen.find(length < 0 ? dim.name : to.dims[length].name)]);
  }
  std::int64_t taps = 1;
  for (const WindowLoop& loop : loops) taps *= loop.elements;
  for (std::int64_t tap = 0; tap < taps; ++tap) {
    kernels::Dims part(view(x.local)), in_part = in, to_part = place;
    std::int64_t rest = tap, in_first = 0, to_first = 0;
    for (int i = loops.size(); i-- > 0;) {
      const WindowLoop& loop = loops[i];
      const std::int64_t k = rest % loop.elements;
      rest /= loop.elements;
      const int at = x.spec->find(from.dims[i].name), seen_at = seen.find(to.dims[i].name);
      const std::int64_t operand = transposed ? shape[seen_at] : x.local[at];
      const std::int64_t result = transposed ? x.local[at] : shape[seen_at];
      // The positions n whose element n * stride + k * dilation - before is in the operand.
      const std::int64_t shift = k * loop.dilation - loop.before;
      const std::int64_t first = shift >= 0 ? 0 : (-shift + loop.stride - 1) / loop.stride;
      const std::int64_t end = operand <= shift ? 0 : std::min(result, (operand - 1 - shift) / loop.stride + 1);
      part.at(at) = std::max<std::int64_t>(0, end - first);
      const std::int64_t own = first * loop.stride + shift;  // the operand's element of the first position
      in_first += (transposed ? first : own) * in[at];
      if (const int own_k = x.spec->find(lengths.in[1].dims[i].name); own_k >= 0) {
        in_first += k * in[own_k];
        part.at(own_k) = 1;
      }
      to_first += (transposed ? own : first) * place[at] + k * all[seen.find(lengths.in[1].dims[i].name)];
      (transposed ? to_part : in_part).at(at) *= loop.stride;
    }
    if (kernels::product(part) == 0) continue;
    kernels::copy_strided(exec, element, part, x.data().data() + static_cast<std::size_t>(in_first) * element, in_part,
                          elements.data() + static_cast<std::size_t>(to_first) * element, to_part);
  }
}

SHARDLIB_INLINE Buffer TakeWindows::operator()(const Value& in, const Value& out) const {
  return std::move(UnderWindows(in, in, out, *out.spec, *lengths, loops, false).elements);
}
SHARDLIB_INLINE Buffer SumWindows::operator()(const Value& in, const Value& out) const {
  TensorSpec seen = *in.spec;
  std::array<bool, max_dims> summed{};
  for (int i = 0; i < seen.rank(); ++i) {
    summed[static_cast<std::size_t>(i)] = lengths->in[1].has(seen.dims[i].name);
    if (const int at = lengths->out.find(seen.dims[i].name); at >= 0) seen.dims[i] = lengths->in[0].dims[at];
  }
  const UnderWindows windows(in, in, out, seen, *lengths, loops, true);
  Buffer result = allocate(out);
  kernels::reduce<kernels::detail::SumOp>(out.device->exec(), out.dtype, windows.elements.data(), view(windows.shape),
                                          std::span(summed).first(static_cast<std::size_t>(seen.rank())),
                                          result.data());
  return result;
}

}  // namespace shardlib::detail
