// Names and order of dims: rename, rearrange, transpose, merge, split; and arrays put together: concat, stack.
#pragma once

#include <cstring>
#include <vector>

#include "shardlib/detail/inline.hpp"
#include "shardlib/kernels/layout.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/padding.hpp"
#include "shardlib/shapes.hpp"
#include "shardlib/tape.hpp"

namespace shardlib {
namespace detail {

/// The same bytes under another spec of the same local size; nothing is copied, and the transpose is the same.
template <Op Name, class Out, class X>
Out relabel(const OpInfo& op, const X& x, const GlobalSizes& global) {
  return record_unary<Name, Out>(
      op, x, global, [](const Value& in, const Value&) { return in.data(); },
      vjp(x, save(), [op](const auto& ct, const GlobalSizes& global) {
        return relabel<Name, Dual<X, axes_of<X::spec, Out::spec>()>>(op, ct, global);
      }));
}

}  // namespace detail

template <Op Names, dtype D, Spec S>
auto rename(const Tensor<D, S>& x, Site site) -> Tensor<D, detail::result_of<rules::rename, Names, S>> {
  using Out = Tensor<D, detail::result_of<rules::rename, Names, S>>;
  const detail::Calling op{"rename", Names, site};
  return detail::relabel<"rename", Out>(op, x, x.value()->global);
}

template <Op O, dtype D, Spec S>
auto rearrange(const Tensor<D, S>& x, Site site) -> Tensor<D, detail::result_of<rules::rearrange, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::rearrange, O, S>>;
  const detail::Calling op{"rearrange", detail::full_op<"rearrange", O, S>, site};
  detail::GlobalSizes global;
  for (const Dim& dim : detail::parsed<Out::spec>.dims)
    global.push_back(x.value()->global[detail::parsed<S>.find(dim.name)]);
  return detail::record_unary<"rearrange", Out>(
      op, x, global,
      [](const detail::Value& in, const detail::Value& out) {
        int order[max_dims];
        for (int i = 0; i < out.spec->rank(); ++i) order[i] = in.spec->find(out.spec->dims[i].name);
        Buffer result = detail::allocate(out);
        kernels::permute(out.device->exec(), size_of(out.dtype), in.data().data(), detail::view(in.local),
                         std::span<const int>(order, static_cast<std::size_t>(out.spec->rank())), result.data());
        return result;
      },
      detail::vjp(x, detail::save(),
                  [](const auto& ct) { return rearrange<detail::transpose_op<Out, Tensor<D, S>>()>(ct); }));
}

template <Op O, dtype D, Spec S>
auto merge(const Tensor<D, S>& x, Site site) -> Tensor<D, detail::result_of<rules::merge, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::merge, O, S>>;
  static constexpr OpParts parts = parse_op(O);
  const detail::Calling op{"merge", O, site};
  detail::Bindings names(op, x.device());
  names.bind(*x.value());
  DimSize size = 1;
  for (const Dim& dim : parts.in[0].dims) {
    const DimSize part = names[dim];
    if (part.is_padded() && !(dim == parts.in[0].dims[0]))
      detail::fail_padded(op, *x.device(), dim.name, part,
                          "only the first of the merged dims may be padded; choose a size that needs no padding");
    size = {size.size * part.size, size.padded * part.padded};
  }
  names.bind(parts.out.dims[0].name, size);
  return detail::relabel<"merge", Out>(op, x, names.sizes(detail::parsed<Out::spec>));
}

template <Op O, dtype D, Spec S>
auto split(const Tensor<D, S>& x, Sizes sizes, Site site) -> Tensor<D, detail::result_of<rules::split, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::split, O, S>>;
  static constexpr OpParts parts = parse_op(O);
  const detail::Calling op{"split", O, site};
  detail::Bindings names(op, x.device());
  names.bind(*x.value());
  for (const NamedSize& given : sizes) names.bind(given);
  const Dim& whole = parts.in[0].dims[0];
  // Padding stays at the end if it is a whole number of the first part's elements: the first part takes it.
  DimSize rest = names[whole];
  const Dim* open = nullptr;
  for (const Dim& dim : parts.out.dims) {
    bool given = dim.is_integer();
    for (const NamedSize& size : sizes) given = given || size.name == dim.name;
    if (!given && open != nullptr)
      names.fail("the sizes of `" + std::string(open->name) + "` and `" + std::string(dim.name) +
                 "` are both open: give one of them");
    if (!given) {
      open = &dim;
      continue;
    }
    const DimSize part = names[dim];
    if (part.size == 0 || rest.size % part.size != 0 || rest.padded % part.padded != 0)
      names.fail("dim `" + std::string(whole.name) + "` of size " + detail::to_string(names[whole]) +
                 " does not split by `" + std::string(dim.name) + "` = " + detail::to_string(part));
    rest = {rest.size / part.size, rest.padded / part.padded};
  }
  if (open != nullptr)
    names.bind(open->name, rest);
  else if (rest != DimSize(1))
    names.fail("the sizes of the parts multiply to less than `" + std::string(whole.name) +
               "` = " + detail::to_string(names[whole]));
  for (const Dim& dim : parts.out.dims)
    if (names[dim].is_padded() && !(dim == parts.out.dims[0]))
      detail::fail_padded(op, *x.device(), dim.name, names[dim],
                          "only the first of the parts may be padded; give it the padding, or choose a size that needs "
                          "none");
  return detail::relabel<"split", Out>(op, x, names.sizes(detail::parsed<Out::spec>));
}

template <dtype D, Spec S>
auto transpose(const Tensor<D, S>& x, Site site) -> Tensor<D, detail::result_of<rules::transpose, S>> {
  return rearrange<make_op<S, detail::result_of<rules::transpose, S>>>(x, site);
}
template <Op A, Op B, dtype D, Spec S>
auto transpose(const Tensor<D, S>& x, Site site) -> Tensor<D, detail::result_of<rules::transpose2, A, B, S>> {
  return rearrange<make_op<S, detail::result_of<rules::transpose2, A, B, S>>>(x, site);
}

namespace detail {

/// The part [begin, begin + size) along dim `at`, under the names of Out: the transpose of concat.
template <int At, class Out, class X>
Out take_range(const X& x, std::int64_t begin, DimSize size) {
  GlobalSizes global = x.value()->global;
  global.set(At, size);
  return record_unary<"take_range", Out>(
      OpInfo{"take_range", Out::spec, {}}, x, global, [begin](const Value& in, const Value& out) {
        const auto strides = kernels::row_major(view(in.local));
        Buffer result = allocate(out);
        const auto skip = static_cast<std::size_t>(begin * strides[At]);
        kernels::copy_strided(out.device->exec(), size_of(out.dtype), view(out.local),
                              in.data().data() + skip * size_of(out.dtype), strides, result.data(),
                              kernels::row_major(view(out.local)));
        return result;
      });
}

/// Block number `at` of the first dim, without it: the transpose of stack.
template <class Out, class X>
Out take_part(const X& x, std::int64_t at) {
  GlobalSizes global;
  for (int i = 1; i < x.value()->global.size(); ++i) global.push_back(x.value()->global[i]);
  return record_unary<"take_part", Out>(OpInfo{"take_part", Out::spec, {}}, x, global,
                                        [at](const Value& in, const Value& out) {
                                          Buffer result = allocate(out);
                                          const auto skip = static_cast<std::size_t>(at) * out.bytes();
                                          out.device->exec().copy(result.data(), in.data().data() + skip, out.bytes());
                                          return result;
                                        });
}

/// Sizes of two operands that agree but for dim `at` of each.
SHARDLIB_INLINE void check_same_sizes(const OpInfo& op, const Value& a, const Value& b, int at);

}  // namespace detail

template <Op O, dtype D, Spec S, dtype E, Spec T>
auto concat(const Tensor<D, S>& a, const Tensor<E, T>& b, Site site)
    -> Tensor<detail::after_t<detail::one_dtype<"concat", D, E>, D>, detail::result_of<rules::concat, O, S, T>> {
  using Out = Tensor<D, detail::result_of<rules::concat, O, S, T>>;
  static constexpr OpParts parts = parse_op(O);
  constexpr int at = detail::parsed<S>.find(parts.in[0].dims[0].name);
  const detail::Calling op{"concat", O, site};
  const DimSize first = a.value()->global[at], second = b.value()->global[at];
  if (first.is_padded())
    detail::fail_padded(op, *a.device(), parts.in[0].dims[0].name, first,
                        "the padding of the first operand would lie before the second; choose a size that needs none");
  detail::check_same_sizes(op, *a.value(), *b.value(), at);
  detail::GlobalSizes global = a.value()->global;
  global.set(at, {first.size + second.size, first.padded + second.padded});
  const auto kernel = [x = a.value(), y = b.value()](const detail::Value& out) {
    Buffer result = detail::allocate(out);
    const auto strides = kernels::row_major(detail::view(out.local));
    std::size_t offset = 0;
    for (const auto& part : {x, y}) {
      kernels::copy_strided(out.device->exec(), size_of(out.dtype), detail::view(part->local), part->data().data(),
                            kernels::row_major(detail::view(part->local)), result.data() + offset, strides);
      offset += static_cast<std::size_t>(part->local[at] * strides[at]) * size_of(out.dtype);
    }
    return result;
  };
  constexpr Spec axes = detail::axes_of<Out::spec, S, T>();
  return detail::record<"concat", Out>(
      op, a.device(), global, kernel,
      detail::vjp(a, detail::save(),
                  [first](const auto& ct) { return detail::take_range<at, Dual<Tensor<D, S>, axes>>(ct, 0, first); }),
      detail::vjp(b, detail::save(), [first, second](const auto& ct) {
        return detail::take_range<at, Dual<Tensor<E, T>, axes>>(ct, first.size, second);
      }));
}

template <Op Dim, dtype D, Spec S>
auto stack(const std::vector<Tensor<D, S>>& parts, Site site) -> Tensor<D, detail::result_of<rules::stack, Dim, S, S>> {
  using Out = Tensor<D, detail::result_of<rules::stack, Dim, S, S>>;
  const detail::Calling op{"stack", Dim, site};
  if (parts.empty()) throw Error(op.describe() + ": there is nothing to stack; give one tensor at least");
  const detail::Value& like = *parts[0].value();
  detail::GlobalSizes global;
  global.push_back(static_cast<std::int64_t>(parts.size()));
  for (int i = 0; i < like.global.size(); ++i) global.push_back(like.global[i]);
  std::vector<detail::EdgeSource> sources;
  std::vector<detail::ValuePtr> values;
  for (const Tensor<D, S>& part : parts) {
    detail::check_same_sizes(op, like, *part.value(), -1);
    const auto number = static_cast<std::int64_t>(sources.size());
    sources.push_back(detail::erased<"stack", Out>(detail::vjp(part, detail::save(), [number](const auto& ct) {
      return detail::take_part<Dual<Tensor<D, S>, detail::axes_of<Out::spec>()>>(ct, number);
    })));
    values.push_back(part.value());
  }
  const auto kernel = [values](const detail::Value& out) {
    Buffer result = detail::allocate(out);
    std::byte* to = result.data();
    for (const detail::ValuePtr& part : values) {
      out.device->exec().copy(to, part->data().data(), part->bytes());
      to += part->bytes();
    }
    return result;
  };
  return Out(
      detail::record_erased(op, parts[0].device(), dtype_v<D>, detail::parsed<Out::spec>, global, kernel, sources));
}
template <Op Dim, dtype D, Spec S, dtype E, Spec T>
auto stack(const Tensor<D, S>& a, const Tensor<E, T>& b, Site site)
    -> Tensor<detail::after_t<detail::one_dtype<"stack", D, E>, D>, detail::result_of<rules::stack, Dim, S, T>> {
  return stack<Dim>(std::vector{a, b}, site);
}

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/ops/layout_inl.hpp"
#endif
