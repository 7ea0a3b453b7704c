// Functions from specs to specs, for code that is generic over specs.
#pragma once

#include <string_view>

#include "shardlib/rules/all.hpp"
#include "shardlib/spec/require.hpp"
#include "shardlib/spec/spec.hpp"

namespace shardlib {
namespace rules {

/// Checks that the spec has the dim that a spec function names.
constexpr Verdict spec_has(std::string_view function, const TensorSpec& x, std::string_view dim) {
  if (x.has(dim)) return {x, {}};
  return {x, Text(function) + ": " + quoted(x) + " has no dim " + quoted(dim)};
}

}  // namespace rules

namespace detail {

constexpr TensorSpec spec_without_axis(TensorSpec spec, std::string_view axis) {
  for (Dim& dim : spec.dims)
    if (const int at = dim.axes.find(axis); at >= 0) dim.axes.erase(at);
  return spec;
}
constexpr TensorSpec spec_without_dim(TensorSpec spec, std::string_view name) {
  if (const int at = spec.find(name); at >= 0) spec.dims.erase(at);
  return spec;
}
constexpr TensorSpec spec_with_sum(TensorSpec spec, std::string_view axis, bool pending) {
  const int at = spec.partial.find(axis);
  if (pending && at < 0) spec.add_partial(axis);
  if (!pending && at >= 0) spec.partial.erase(at);
  return spec;
}

/// Whether the function of this name may take the dim from the spec. nvcc loses the type of a text that is not a
/// parameter.
template <OpName Name, Spec S, DimName Dim>
inline constexpr bool may_drop = checked<rules::spec_has, Name, S, Dim>::ok;

}  // namespace detail

/// Whether the spec has the dim: `has_dim<"B/d M", "M">`
template <Spec S, DimName Dim>
inline constexpr bool has_dim = detail::parsed<S>.has(Dim);
/// Whether some dim of the spec is sharded over the axis: `is_sharded<"B/d M", "d">`
template <Spec S, AxisName Axis>
inline constexpr bool is_sharded = detail::parsed<S>.placement(Axis).kind == Placement::sharded;
/// Whether the spec is partial over the axis: `is_partial<"M +t", "t">`
template <Spec S, AxisName Axis>
inline constexpr bool is_partial = detail::parsed<S>.placement(Axis).kind == Placement::partial;

/// The spec without the axis in its dims, or the spec itself if no dim has it. `without_axis<"M/t/d F", "d">` is "M/t
/// F".
template <Spec S, AxisName Axis>
inline constexpr Spec without_axis = detail::spec_of(detail::spec_without_axis(detail::parsed<S>, Axis));
/// The spec without the dim, which must be there. `without_dim<"B/d L V/t", "V">` is "B/d L".
template <Spec S, DimName Dim>
inline constexpr Spec without_dim = detail::may_drop<"without_dim", S, Dim>
                                        ? detail::spec_of(detail::spec_without_dim(detail::parsed<S>, Dim))
                                        : S;
/// The spec made partial over the axis, which may not shard a dim. `with_sum<"M", "t">` is "M +t".
template <Spec S, AxisName Axis>
inline constexpr Spec with_sum =
    detail::result_of<rules::tensor,
                      detail::Literal(to_string(detail::spec_with_sum(detail::parsed<S>, Axis, true)).view())>;
/// The spec without the partial sum over the axis. `without_sum<"M +t", "t">` is "M".
template <Spec S, AxisName Axis>
inline constexpr Spec without_sum = detail::spec_of(detail::spec_with_sum(detail::parsed<S>, Axis, false));
/// The spec with renamed dims, like the result of `rename`. `renamed<"B/d L", "L -> Qlen">` is "B/d Qlen".
template <Spec S, OpSpec Names>
inline constexpr Spec renamed = detail::result_of<rules::rename, Names, S>;

/// The op spec from an operand to a result: `all_gather<make_op<S, without_axis<S, "d">>>(w)`
template <Spec In, Spec Out>
inline constexpr OpSpec make_op = detail::op_spec_of(In, Out);
/// The op spec of two operands: `einsum_unreduced<make_op2<"B/d M", "M F", "B/d F">>(x, w)`
template <Spec A, Spec B, Spec Out>
inline constexpr OpSpec make_op2 = detail::op_spec_of(A, B, Out);

/// The axes that an op acts over, instead of an op spec: `all_gather<over<"d">>(w)`, `all_reduce<over<"d t">>(y)`
template <AxisName Axes>
inline constexpr OpSpec over = OpSpec((detail::Text("over<") + std::string_view(Axes) + ">").view());

}  // namespace shardlib
