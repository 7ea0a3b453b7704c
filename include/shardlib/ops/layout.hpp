// Names and order of dims: rename, rearrange, transpose, merge, split, stack_shards. Joining of arrays: concat, stack,
// unstack. Ranges: narrow, pad.
#pragma once

#include <cstdint>
#include <vector>

#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"

namespace shardlib {

namespace detail {
/// Returns the operand's buffer itself.
Buffer same_bytes(const Value& in, const Value& out);
template <OpName Name, class Out, class X>
struct RelabelVjp;
/// The same bytes under another spec of the same local size, without a copy. Its transpose is a relabel as well.
template <OpName Name, class Out, class X>
Out relabel(const OpInfo& op, const X& x, const GlobalSizes& global) {
  return record_unary<Name, Out>(op, x, global, same_bytes, vjp(x, RelabelVjp<Name, Out, X>{op}));
}
template <OpName Name, class Out, class X>
struct RelabelVjp {
  OpInfo op;
  template <class Ct>
  auto operator()(const Ct& ct, const GlobalSizes& global) const {
    return relabel<Name, Dual<X, axes_of<X::spec, Out::spec>()>>(op, ct, global);
  }
};
}  // namespace detail

/// Renames dims, without a copy. `rename<"L -> Klen">(k)`
template <OpSpec Names, dtype D, Spec S>
auto rename(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::rename, Names, S>> {
  using Out = Tensor<D, detail::result_of<rules::rename, Names, S>>;
  const detail::Calling op{"rename", Names, site};
  return detail::relabel<"rename", Out>(op, x, detail::sizes_of(x.value()));
}
SHARDLIB_FORM(rename, "rename<\"L -> Klen\">(x)")

namespace detail {
/// The sizes of `x` in the order of `out`.
GlobalSizes sizes_in_order(const ValuePtr& x, const TensorSpec& out);
Buffer permute(const Value& in, const Value& out);
template <class Out, class X>
inline constexpr auto rearrange_vjp = [](const auto& ct) { return rearrange<transpose_op<Out, X>()>(ct); };
}  // namespace detail

/// Changes the order of the dims, as a local copy. `rearrange<"A B/t -> B/t A">(x)`
template <OpSpec O, dtype D, Spec S>
auto rearrange(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::op_result_for<D, rules::rearrange, O, S>> {
  using Out = Tensor<D, detail::op_result_for<D, rules::rearrange, O, S>>;
  const detail::Calling op{"rearrange", detail::full_op<"rearrange", O, S>, site};
  return detail::record_unary<"rearrange", Out>(op, x, detail::sizes_in_order(x.value(), detail::parsed<Out::spec>),
                                                detail::permute,
                                                detail::vjp(x, detail::rearrange_vjp<Out, Tensor<D, S>>));
}
SHARDLIB_NEEDS_OP_SPEC(rearrange)
SHARDLIB_FORM(rearrange, "rearrange<\"A B -> B A\">(x)")

/// Reverses the order of the dims, like numpy's .T, as a local copy. `transpose(x)` of "A B/t" is "B/t A"
template <dtype D, Spec S>
auto transpose(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::transpose, S>> {
  return rearrange<detail::op_spec_of(S, detail::result_of<rules::transpose, S>)>(x, site);
}
/// Exchanges two dims, as a local copy. `transpose<"A", "B">(x)`
template <DimName A, DimName B, dtype D, Spec S>
auto transpose(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::transpose2, A, B, S>> {
  return rearrange<detail::op_spec_of(S, detail::result_of<rules::transpose2, A, B, S>)>(x, site);
}
template <OpSpec O, dtype D, Spec S>
auto transpose(const Tensor<D, S>& x) -> Tensor<D, detail::op_result_of<rules::transpose_to, O, S>>;
SHARDLIB_FORM(transpose, "transpose<\"A\", \"B\">(x)")

namespace detail {
GlobalSizes merged_sizes(const OpInfo& op, const OpParts& parts, const TensorSpec& out, const ValuePtr& x);
GlobalSizes split_sizes(const OpInfo& op, const OpParts& parts, const TensorSpec& out, const ValuePtr& x,
                        const Sizes& sizes);
}  // namespace detail

/// Merges adjacent dims into one, without a copy. Only the first may be padded. `merge<"H/t D -> E/t">(x)`
template <OpSpec O, dtype D, Spec S>
auto merge(const Tensor<D, S>& x, Site site = Site::current()) -> Tensor<D, detail::op_result_of<rules::merge, O, S>> {
  using Out = Tensor<D, detail::op_result_of<rules::merge, O, S>>;
  static constexpr const OpParts& parts = detail::parsed_op<O>.parts;
  const detail::Calling op{"merge", O, site};
  return detail::relabel<"merge", Out>(op, x, detail::merged_sizes(op, parts, detail::parsed<Out::spec>, x.value()));
}
SHARDLIB_NEEDS_OP_SPEC(merge)

/// Splits one dim into several, without a copy. Give all but one of the new sizes. The padding goes to the first new
/// dim and must be a whole number of its elements. `split<"E/t -> H/t D">(x, {{"H", 8}})`
template <OpSpec O, dtype D, Spec S>
auto split(const Tensor<D, S>& x, Sizes sizes, Site site = Site::current())
    -> Tensor<D, detail::op_result_of<rules::split, O, S>> {
  using Out = Tensor<D, detail::op_result_of<rules::split, O, S>>;
  static constexpr const OpParts& parts = detail::parsed_op<O>.parts;
  const detail::Calling op{"split", O, site};
  return detail::relabel<"split", Out>(op, x,
                                       detail::split_sizes(op, parts, detail::parsed<Out::spec>, x.value(), sizes));
}
SHARDLIB_FORM_WITH_SIZES(split, "split<\"E -> H D\">(x, {{\"D\", 64}})")

namespace detail {
/// The sizes of the stack of a tensor's shards, or of the tensor that the elements of a stack are shards of.
GlobalSizes stacked_sizes(const OpInfo& op, const ValuePtr& x, const TensorSpec& out);
GlobalSizes unstacked_sizes(const OpInfo& op, const ValuePtr& x, const TensorSpec& out);
}  // namespace detail

/// The shard of each device as an element of a new first dim, without traffic or copy: what is sharded over several
/// dims is then sharded over one. A shard has another size than its dim, so it has another name. Dims that keep their
/// axes are not stacked. Throws if a stacked dim is padded. Backward: unstack_shards. `stack_shards<"B/d/e L/s M ->
/// P/s/d/e U W M">(x)`
template <OpSpec O, dtype D, Spec S>
auto stack_shards(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::op_result_of<rules::stack_shards, O, S>> {
  using Out = Tensor<D, detail::op_result_of<rules::stack_shards, O, S>>;
  const detail::Calling op{"stack_shards", detail::full_op<"stack_shards", O, S>, site};
  return detail::relabel<"stack_shards", Out>(op, x, detail::stacked_sizes(op, x.value(), detail::parsed<Out::spec>));
}
/// The inverse of stack_shards. Throws unless the first dim has one element on each device.
/// `unstack_shards<"P/s/d/e U W M -> B/d/e L/s M">(y)`
template <OpSpec O, dtype D, Spec S>
auto unstack_shards(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::op_result_of<rules::unstack_shards, O, S>> {
  using Out = Tensor<D, detail::op_result_of<rules::unstack_shards, O, S>>;
  const detail::Calling op{"unstack_shards", detail::full_op<"unstack_shards", O, S>, site};
  return detail::relabel<"unstack_shards", Out>(op, x,
                                                detail::unstacked_sizes(op, x.value(), detail::parsed<Out::spec>));
}

namespace detail {

/// The sizes of a concat: of the operands along dim `at`, and of the result. The other dims of both operands must
/// agree.
struct Joined {
  DimSize first, second;
  GlobalSizes global;  ///< of the result
};
Joined joined_sizes(const OpInfo& op, const ValuePtr& a, const ValuePtr& b, int at);
struct Concat {
  ValuePtr a, b;
  int at;
  Buffer operator()(const Value& out) const;
};
/// Copies `size` indices along dim `at`, those from `from` on to those from `to` on. All other elements become `fill`.
struct CopyRange {
  int at;
  std::int64_t from, to, size;
  double fill = 0;
  Buffer operator()(const Value& in, const Value& out) const;
};
GlobalSizes with_size(const ValuePtr& x, int at, DimSize size);
/// A range of the cotangent, as an array of `size` along dim `at`, with the dims' names from Due.
template <class Due>
struct RangeVjp {
  CopyRange range;
  DimSize size;
  template <class Ct>
  auto operator()(const Ct& ct) const {
    const CopyRange back{range.at, range.to, range.from, range.size};
    return record_linear<Due>(OpInfo{"copy_range", Due::spec, {}}, ct, with_size(ct.value(), range.at, size), range,
                              back);
  }
};

}  // namespace detail

/// Concatenates two arrays along an unsharded dim, which may be padded only in the second. A name has one size, so
/// each of the three lengths has its own name. `concat<"Past, L -> Klen">(cache, k)`
template <OpSpec O, dtype D, Spec S, dtype E, Spec T>
auto concat(const Tensor<D, S>& a, const Tensor<E, T>& b, Site site = Site::current())
    -> Tensor<detail::after_t<detail::one_dtype<"concat", D, E>, D>, detail::op_result_for<D, rules::concat, O, S, T>> {
  using Out = Tensor<D, detail::op_result_for<D, rules::concat, O, S, T>>;
  static constexpr const OpParts& parts = detail::parsed_op<O>.parts;
  constexpr int at = detail::parsed<S>.find(parts.in[0].dims[0].name);
  constexpr Spec axes = detail::axes_of<Out::spec, S, T>();
  const detail::Calling op{"concat", O, site};
  const detail::Joined sizes = detail::joined_sizes(op, a.value(), b.value(), at);
  return detail::record<"concat", Out>(
      op, a.device(), sizes.global, detail::Concat{a.value(), b.value(), at},
      detail::vjp(a, detail::RangeVjp<Dual<Tensor<D, S>, axes>>{{at, 0, 0, sizes.first.size}, sizes.first}),
      detail::vjp(
          b, detail::RangeVjp<Dual<Tensor<E, T>, axes>>{{at, sizes.first.size, 0, sizes.second.size}, sizes.second}));
}
SHARDLIB_FORM(concat, "concat<\"Past, L -> Klen\">(a, b)")

namespace detail {
/// The size of `x` along dim `at`, if it has the indices [begin, begin + size). Throws if not.
DimSize size_around(const OpInfo& op, const ValuePtr& x, int at, std::int64_t begin, std::int64_t size);
/// The sizes of `out`, whose dim number `at` has this size.
GlobalSizes resized(const OpInfo& op, const TensorSpec& out, const ValuePtr& x, int at, std::int64_t size);
/// Checks the numbers of elements that `pad` adds. Returns the size of `x` along dim `at`.
DimSize size_inside(const OpInfo& op, const ValuePtr& x, int at, std::int64_t before, std::int64_t after, double value);

template <OpSpec O, class Out, class X>
Out pad(const OpInfo& op, const X& x, std::int64_t before, std::int64_t after, double value) {
  static constexpr const OpParts& parts = parsed_op<O>.parts;
  constexpr int at = parsed<X::spec>.find(parts.in[0].dims[0].name);
  const DimSize own = size_inside(op, x.value(), at, before, after, value);
  using Due = Dual<X, axes_of<X::spec, Out::spec>()>;
  return record_unary<"pad", Out>(op, x, resized(op, parsed<Out::spec>, x.value(), at, before + own.size + after),
                                  CopyRange{at, 0, before, own.size, value},
                                  vjp(x, RangeVjp<Due>{{at, before, 0, own.size}, own}));
}
}  // namespace detail

/// The range of `size` indices from `begin` on along an unsharded dim. A name has one size, so the result's dim has a
/// name of its own. Throws on a range outside the dim. Backward: zeros around it. `narrow<"L -> N">(x, 2, 4)`
template <OpSpec O, dtype D, Spec S>
auto narrow(const Tensor<D, S>& x, WholeNumber begin, WholeNumber size, Site site = Site::current())
    -> Tensor<D, detail::named_result_of<rules::resize, "narrow", O, S>> {
  using Out = Tensor<D, detail::named_result_of<rules::resize, "narrow", O, S>>;
  static constexpr const OpParts& parts = detail::parsed_op<O>.parts;
  constexpr int at = detail::parsed<S>.find(parts.in[0].dims[0].name);
  const detail::Calling op{"narrow", O, site};
  const DimSize own = detail::size_around(op, x.value(), at, begin, size);
  using Due = Dual<Tensor<D, S>, detail::axes_of<S, Out::spec>()>;
  return detail::record_unary<"narrow", Out>(op, x, detail::resized(op, detail::parsed<Out::spec>, x.value(), at, size),
                                             detail::CopyRange{at, begin, 0, size},
                                             detail::vjp(x, detail::RangeVjp<Due>{{at, 0, begin, size}, own}));
}
SHARDLIB_FORM(narrow, "narrow<\"L -> N\">(x, 0, 4)")

/// Adds zeros before and after the elements along an unsharded dim. The result's dim has a name of its own. Backward:
/// narrow. `pad<"L -> N">(x, 1, 2)`
template <OpSpec O, dtype D, Spec S>
auto pad(const Tensor<D, S>& x, WholeNumber before, WholeNumber after, Site site = Site::current())
    -> Tensor<D, detail::named_result_of<rules::resize, "pad", O, S>> {
  using Out = Tensor<D, detail::named_result_of<rules::resize, "pad", O, S>>;
  return detail::pad<O, Out>(detail::Calling{"pad", O, site}, x, before, after, 0);
}
/// As above, with another number than 0, so the operand may not be partial. `pad<"L -> N">(x, 1, 2, -1.0)`
template <OpSpec O, dtype D, Spec S>
auto pad(const Tensor<D, S>& x, WholeNumber before, WholeNumber after, double value, Site site = Site::current())
    -> Tensor<D, detail::op_result_for<D, rules::pad_with, O, S>> {
  using Out = Tensor<D, detail::op_result_for<D, rules::pad_with, O, S>>;
  return detail::pad<O, Out>(detail::Calling{"pad", O, site}, x, before, after, value);
}
SHARDLIB_FORM(pad, "pad<\"L -> N\">(x, 1, 1)")

namespace detail {

struct TakePart {
  std::int64_t at;
  Buffer operator()(const Value& in, const Value& out) const;
};
/// The operand as element `at` along a new first dim, whose other elements are zeros.
struct PutPart {
  std::int64_t at;
  Buffer operator()(const Value& in, const Value& out) const;
};
GlobalSizes sizes_of_part(const ValuePtr& x);
/// Takes element `at` along the first dim and drops that dim: the transpose of stack.
template <class Due>
struct StackVjp {
  std::int64_t at;
  template <class Ct>
  auto operator()(const Ct& ct) const {
    return record_linear<Due>(OpInfo{"take_part", Due::spec, {}}, ct, sizes_of_part(ct.value()), TakePart{at},
                              PutPart{at});
  }
};
/// Records a stack of any number of operands, with one VJP for each operand. `size` is that of the new dim: as many,
/// and perhaps padding.
template <class Out, class X>
Out record_stack(const OpInfo& op, const std::vector<X>& parts, DimSize size);
/// Appends the parts of `x` along its first dim. They are the outputs of one node, whose VJP stacks their cotangents to
/// `due`. Returns the size of that dim.
DimSize unstack_to(std::vector<ValuePtr>& parts, const OpInfo& op, const ValuePtr& x, const TensorSpec& part,
                   const TensorSpec& due);

}  // namespace detail

/// Stacks arrays of one type along a new dim, which is the first of the result.
/// `stack<"layer">(std::vector{a, b, c})`
template <DimName Dim, dtype D, Spec S>
auto stack(const std::vector<Tensor<D, S>>& parts, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::stack, Dim, S, S>> {
  const detail::Calling op{"stack", Dim, site};
  return detail::record_stack<Tensor<D, detail::result_of<rules::stack, Dim, S, S>>>(
      op, parts, static_cast<std::int64_t>(parts.size()));
}
/// `stack<"part">(a, b)`
template <DimName Dim, dtype D, Spec S, dtype E, Spec T>
auto stack(const Tensor<D, S>& a, const Tensor<E, T>& b, Site site = Site::current())
    -> Tensor<detail::after_t<detail::one_dtype<"stack", D, E>, D>, detail::result_of<rules::stack, Dim, S, T>> {
  return stack<Dim>(std::vector{a, b}, site);
}
SHARDLIB_FORM(stack, "stack<\"layer\">(a, b)`, or of more tensors `stack<\"layer\">(std::vector{a, b, c})")

namespace detail {
template <OpName Name, Literal What, DimName Dim, Spec S>
inline constexpr Spec part_spec = result_of<rules::unstack, Name, What, Dim, S>;
}

/// The parts along the first dim, which is unsharded: the inverse of stack. A part of 64 bytes or a multiple of that is
/// a view of the operand, without a copy. Backward: stack. `unstack<"L">(x)` of "L B/d M" gives tensors "B/d M"
template <DimName Dim, dtype D, Spec S>
auto unstack(const Tensor<D, S>& x, Site site = Site::current())
    -> std::vector<Tensor<D, detail::part_spec<"unstack", "operand", Dim, S>>> {
  constexpr Spec part = detail::part_spec<"unstack", "operand", Dim, S>;
  using Due = Dual<Tensor<D, S>, detail::axes_of<S>()>;
  const detail::Calling op{"unstack", Dim, site};
  std::vector<detail::ValuePtr> values;
  detail::unstack_to(values, op, x.value(), detail::parsed<part>, detail::parsed<Due::spec>);
  std::vector<Tensor<D, part>> parts;
  for (const detail::ValuePtr& value : values) parts.emplace_back(value);
  return parts;
}

}  // namespace shardlib
