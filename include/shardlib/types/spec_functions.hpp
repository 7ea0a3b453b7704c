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

/// Checks that the text by which a spec function looks for a dim or an axis is one name.
constexpr Verdict one_name(std::string_view function, std::string_view what, std::string_view text) {
  const ParsedTensor parsed = parse_tensor(text);
  if (parsed.error.empty() && parsed.spec.rank() == 1 && parsed.spec.dims[0].name == text) return {};
  return {{},
          Text(function) + ": " + quoted(text) + " is not the name of one " + what +
              ", so no spec has it; write one name alone, without `/` and `+`"};
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
/// Always true; a compile error of the function of this name unless the text names one dim, or one axis.
template <OpName Name, DimName Dim, Literal What = "dim">
inline constexpr bool names_dim = checked<rules::one_name, Name, What, Dim>::ok;
template <OpName Name, AxisName Axis, Literal What = "axis">
inline constexpr bool names_axis = checked<rules::one_name, Name, What, Axis>::ok;
template <OpName Name, Spec S, AxisName Axis>
constexpr bool is_placed(Placement::Kind kind) {
  return names_axis<Name, Axis> && parsed<S>.placement(Axis).kind == kind;
}

}  // namespace detail

/// Whether the spec has the dim: `has_dim<"B/d M", "M">`
template <Spec S, DimName Dim>
inline constexpr bool has_dim = detail::names_dim<"has_dim", Dim>&& detail::parsed<S>.has(Dim);
/// Whether some dim of the spec is sharded over the axis: `is_sharded<"B/d M", "d">`
template <Spec S, AxisName Axis>
inline constexpr bool is_sharded = detail::is_placed<"is_sharded", S, Axis>(Placement::sharded);
/// Whether the spec is partial over the axis: `is_partial<"M +t", "t">`
template <Spec S, AxisName Axis>
inline constexpr bool is_partial = detail::is_placed<"is_partial", S, Axis>(Placement::partial);

/// The spec without the axis in its dims, or the spec itself if no dim has it. `without_axis<"M/t/d F", "d">` is "M/t
/// F".
template <Spec S, AxisName Axis>
inline constexpr Spec without_axis = detail::names_axis<"without_axis", Axis>
                                         ? detail::spec_of(detail::spec_without_axis(detail::parsed<S>, Axis))
                                         : S;
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
inline constexpr Spec without_sum = detail::names_axis<"without_sum", Axis>
                                        ? detail::spec_of(detail::spec_with_sum(detail::parsed<S>, Axis, false))
                                        : S;
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
