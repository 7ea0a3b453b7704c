// Wrong programs: collectives and layout casts.
#include "shardlib/shapes.hpp"

using namespace shardlib;

auto gather(const Tensor<f32, "M/t/d H">& w) {
  return all_gather<"M/t/d H -> M/t H">(w);
}

auto dispatched(const Tensor<f32, "R/d/e M">& rows, const Tensor<i32, "P/d/e X">& counts,
                const Tensor<f32, "X/e M F">& w) {
  const auto received = all_to_all<"P/d/e X -> P/d X/e">(counts);
  const auto here = ragged_all_to_all<"R/d/e M -> S/d/e M">(rows, counts, received, {{"S", 8}});
  return grouped_einsum<"S/d/e M, X/e M F -> S/d/e F">(here, w, received);
}

// expect: all_gather<`M H -> M H`>: no dim loses an axis, so nothing would be gathered; drop the gather
auto gather_nothing(const Tensor<f32, "M H">& w) {
  return all_gather<"M H -> M H">(w);
}

// expect: all_gather<`M/t/d H -> M/d H`>: dim `M/t/d` cannot become `M/d`: axes come and go at the end of a dim only
auto gather_the_major_axis(const Tensor<f32, "M/t/d H">& w) {
  return all_gather<"M/t/d H -> M/d H">(w);
}

// expect: the operand is `M/d H`, but the op spec expects `M/t H`: dim 1 is `M/d`, not `M/t`; instead of this op,
// expect: all_gather<..?M/d H -> M H..?>` \(communicates\), or correct the op spec
auto gather_another_axis(const Tensor<f32, "M/d H">& w) {
  return all_gather<"M/t H -> M H">(w);
}

// expect: all_gather<`M/t H -> M H`>: the operand already is what the result should be, `M H`; drop the op
auto gather_twice(const Tensor<f32, "M/t H">& w) {
  return all_gather<"M/t H -> M H">(all_gather<"M/t H -> M H">(w));
}

// expect: the operand is `H M/t`, but the op spec expects `M/t H`: dim 1 is `H`, not `M/t`; reorder the dims with
// expect: rearrange<..?H M/t -> M/t H..?>` \(a local copy\)
auto gather_transposed(const Tensor<f32, "H M/t">& w) {
  return all_gather<"M/t H -> M H">(w);
}

// expect: all_gather<`M/t H -> M/t H`>: no dim loses an axis, so nothing would be gathered; drop the gather
auto gathers_nothing(const Tensor<f32, "M/t H">& w) {
  return all_gather<"M/t H">(w);
}

// expect: reduce_scatter<`M -> M/t`>: the operand `M` is replicated over t, not partial: summing it again would
// expect: take `shard` for the shard of each device without a sum \(no traffic\)
auto scatter_a_replica(const Tensor<f32, "M">& x) {
  return reduce_scatter<"M -> M/t">(x);
}

// expect: the sum over d is neither scattered \(no dim gains `/d`\) nor kept \(`\+d`\) in the result
auto scatter_half(const Tensor<f32, "M +d +t">& x) {
  return reduce_scatter<"M +d +t -> M/t">(x);
}

// expect: all_reduce<`M -> M`>: no sum is pending in `M` that the result lacks, and to reduce a value twice multiplies
auto reduce_a_replica(const Tensor<f32, "M">& x) {
  return all_reduce<"M -> M">(x);
}

// expect: the operand `L V/t \+d` is partial over d, and the maximum of a sum is not that of its parts; reduce it first
auto max_of_summands(const Tensor<f32, "L V/t +d">& x) {
  return all_reduce_max<"L V/t +d -> L">(x);
}

// expect: all_to_all<`A/t B -> A B`>: the sharding over t leaves one dim, but no other dim gains it; take `all_gather`
auto move_to_nowhere(const Tensor<f32, "A/t B">& x) {
  return all_to_all<"A/t B -> A B">(x);
}

// expect: shift<`A`, `t`>: the operand `A` is replicated over t; only the shards of a dim that is sharded over t can be
auto shift_replicas(const Tensor<f32, "A">& x) {
  return shift<"A", "t">(x, 1);
}

// expect: shard<`A B/t -> A/t B`>: dim `B/t` cannot become `B`: this op drops no sharding|the operand is sharded over t
auto shard_what_is_sharded(const Tensor<f32, "A B/t">& x) {
  return shard<"A B/t -> A/t B">(x);
}

// expect: to_partial<`A -> A \+t`>: the operand is `A/t`, but the op spec expects `A`: dim 1 is `A/t`, not `A`; gather
auto shards_as_summands(const Tensor<f32, "A/t">& x) {
  return to_partial<"A -> A +t">(x);
}

// expect: all_gather: the op spec is missing: write what goes in and what comes out, `all_gather<..?M/t -> result..?>
auto gather_what(const Tensor<f32, "M/t">& x) {
  return all_gather(x);
}

// expect: all_gather<`M/d F/t -> M/t F`>: dim `M/d` is not sharded over t, and a gather adds no sharding
auto result_with_other_axis(const Tensor<f32, "M/d F/t">& w) {
  return all_gather<"M/t F">(w);
}

// expect: all_gather<over<d>> of `M F/t`: the operand is replicated over d, so there is nothing to gather over it; drop the gather
auto nothing_over_d(const Tensor<f32, "M F/t">& w) {
  return all_gather<over<"d">>(w);
}

// expect: all_reduce<over<\+t>> of `M \+t`: write the names of axes, separated by spaces: `over<..?d t..?>`
auto sum_over_spelled(const Tensor<f32, "M +t">& y) {
  return all_reduce<over<"+t">>(y);
}

// expect: reduce_scatter<over<t>> of `M \+t`: the axis does not say which dims the result has; write the result
auto scatter_over_t(const Tensor<f32, "M +t">& y) {
  return reduce_scatter<over<"t">>(y);
}

// expect: all_gather: f32 would be the dtype of what its backward pass sums; write `all_gather<..?...?.?.?.?, backward_sum<f32>>`
auto unnamed_dtype(const Tensor<bf16, "M/d">& w) {
  return all_gather<"M", f32>(w);
}

// expect: shift<`A/t`, `d`>: the operand `A/t` is replicated over d
auto shift_over_other(const Tensor<f32, "A/t">& x) {
  return shift<over<"d">>(x, 1);
}

// expect: ignoring return(ed)? value.* declared with (attribute )?.nodiscard.*a tensor is never changed
#pragma GCC diagnostic error "-Wunused-result"
void dropped(const Tensor<f32, "+d +t">& loss) {
  all_reduce<"">(loss);
}

// expect: ragged_all_to_all<`R/d/e M -> S/d/e M`>: the counts of the rows sent are `P/d/e X`, those of the rows received
// expect: `P/d/e X`: the second must be an `all_to_all` of the first, in which one dim gives its last axes to the other
auto counts_that_stay(const Tensor<f32, "R/d/e M">& rows, const Tensor<i32, "P/d/e X">& counts) {
  return ragged_all_to_all<"R/d/e M -> S/d/e M">(rows, counts, counts, {{"S", 8}});
}

// expect: the result, `R/d/e M`, must have the dims of the operand, `R/d/e M`, except the first: the rows that a device
// expect: may get are another number, so that dim has another name
auto unbounded_rows(const Tensor<f32, "R/d/e M">& rows, const Tensor<i32, "P/d/e X">& counts) {
  return ragged_all_to_all<"R/d/e M -> R/d/e M">(rows, counts, all_to_all<"P/d/e X -> P/d X/e">(counts), {});
}

// expect: grouped_einsum<`S/d/e M, X/e M/d F -> S/d/e F`>: the tensor of rows is sharded over d \(dim `S/d/e`\) and that
// expect: of weights sharded over d \(dim `M/d`\), so only diagonal shards would be computed; `all_gather` one of them
auto weights_at_rest(const Tensor<f32, "S/d/e M">& rows, const Tensor<f32, "X/e M/d F">& w,
                     const Tensor<i32, "P/d X/e">& counts) {
  return grouped_einsum<"S/d/e M, X/e M/d F -> S/d/e F">(rows, w, counts);
}

// expect: grouped_einsum<`S/d/e M, X/e M F -> S/d/e F`>: the counts are `P/d/e X`: their second dim must be `X/e`, the
// expect: first of the weights, with the same sharding
auto counts_of_senders(const Tensor<f32, "S/d/e M">& rows, const Tensor<f32, "X/e M F">& w,
                       const Tensor<i32, "P/d/e X">& counts) {
  return grouped_einsum<"S/d/e M, X/e M F -> S/d/e F">(rows, w, counts);
}

// expect: reinterpret<`d s -> e`>: the operand `B/d M` is sharded over d \(dim `B/d`\) and replicated over s, but `d s`
// expect: become `e` together; give the operand one placement over all of them first
auto half_of_an_axis(const Tensor<f32, "B/d M">& x, const Mesh<"e t">& experts) {
  return reinterpret<"d s -> e">(x, experts);
}

// expect: dim `X/s/d` is not sharded over `d s` in this order, which is that of `e`; its shards would be on other devices
auto shards_in_another_order(const Tensor<f32, "X/s/d M">& w, const Mesh<"e t">& experts) {
  return reinterpret<"d s -> e">(w, experts);
}

// expect: reinterpret<`d t -> e`>: the axes `d t` do not follow each other in the mesh `d s t`, which numbers its devices
// expect: in the order of its axes
auto axes_apart(const Mesh<"d s t">& mesh) {
  return reinterpret<"d t -> e">(mesh);
}

// expect: the operand `X/d/s F/t` is sharded over t \(dim `F/t`\), which the mesh `e` does not have; name the axis
auto an_axis_less(const Tensor<f32, "X/d/s F/t">& w, const Mesh<"e">& experts) {
  return reinterpret<"d s -> e">(w, experts);
}

// expect: an InFlight from `L/t M` to `L M` is not a tensor `L M`: its collective may still run; give it to `wait`
auto not_awaited(const Tensor<f32, "L/t M">& x) {
  const Tensor<f32, "L M"> y = all_gather_start<"L/t M -> L M">(x);
  return y;
}

// expect: all_gather<`A/t B -> A/d B`>: dim `A/t` is not sharded over d, and a gather adds no sharding
auto started_to_another_axis(const Tensor<f32, "A/t B">& x) {
  return all_gather_start<"A/t B -> A/d B">(x);
}

// expect: reduce_scatter<`A B -> A/t B`>: the operand `A B` is replicated over t, not partial
auto started_without_a_sum(const Tensor<f32, "A B">& x) {
  return reduce_scatter_start<"A B -> A/t B">(x);
}

// expect: wait: it does not take this argument; write `wait\(all_gather_start<..?\.\.\...?>\(x\)\)`
auto wait_for_a_tensor(const Tensor<f32, "L/t M">& x) {
  return wait(x);
}

// expect: an InFlight from `L/t M` to `L M` is not a tensor `L M`: its collective may still run; give it to `wait`
auto op_of_what_is_in_flight(const Tensor<f32, "L/t M">& x) {
  return tanh(all_gather_start<"L/t M -> L M">(x));
}

// expect: an InFlight from `L/t M` to `L M` is not a tensor `L M`: its collective may still run; give it to `wait`
auto sum_with_what_is_in_flight(const Tensor<f32, "L/t M">& x, const Tensor<f32, "L M">& y) {
  return y + all_gather_start<"L/t M -> L M">(x);
}

// expect: an InFlight from `L/t M` to `L M` is not a tensor `L M`: its collective may still run; give it to `wait`
auto product_of_what_is_in_flight(const Tensor<f32, "L/t M">& x, const Tensor<f32, "M K">& w) {
  return einsum_unreduced<"L M, M K -> L K">(all_gather_start<"L/t M -> L M">(x), w);
}

// expect: an InFlight from `L/t M` to `L M` is not a tensor `L M`: its collective may still run; give it to `wait`
auto sum_of_two_in_flight(const Tensor<f32, "L/t M">& x) {
  return all_gather_start<"L/t M -> L M">(x) + all_gather_start<"L/t M -> L M">(x);
}

// expect: an InFlight from `L/t M` to `L M` is not a tensor `L M`: its collective may still run; give it to `wait`
auto product_of_two_in_flight(const Tensor<f32, "L/t M">& x, const Tensor<f32, "M/t K">& w) {
  return einsum_unreduced<"L M, M K -> L K">(all_gather_start<"L/t M -> L M">(x), all_gather_start<"M/t K -> M K">(w));
}

// expect: an InFlight from `M/t` to `M` is not a tensor `M`: its collective may still run; give it to `wait`
auto norm_with_a_scale_in_flight(const Tensor<f32, "B M">& x, const Tensor<f32, "M/t">& scale) {
  return rms_norm<"M">(x, all_gather_start<"M/t -> M">(scale), 1e-5);
}

// expect: an InFlight from `B M/t` to `B M` is not a tensor `B M`: its collective may still run; give it to `wait`
auto norm_of_what_is_in_flight(const Tensor<f32, "B M/t">& x, const Tensor<f32, "M">& scale) {
  return layer_norm<"M">(all_gather_start<"B M/t -> B M">(x), scale, scale);
}

// expect: an InFlight from `M/t F` to `M F` is not a tensor `M F`: its collective may still run; give it to `wait`
auto bias_of_what_is_in_flight(const Tensor<f32, "B M">& x, const Tensor<f32, "M/t F">& w, const Tensor<f32, "F">& bias) {
  return einsum_bias<"B M, M F -> B F">(x, all_gather_start<"M/t F -> M F">(w), bias);
}

// expect: all_gather: it does not take these arguments; write `all_gather<..?M/d F -> M F..?>\(x\)`, or by the axis
// expect: `all_gather<over<..?d..?>>\(x\)`
auto gather_by_an_argument(const Tensor<f32, "M/d F">& x) {
  return all_gather(x, "d");
}

// expect: shift: it does not take these arguments; write `shift<over<..?t..?>>\(x, 1\)`
auto shift_by_what(const Tensor<f32, "M/t F">& x) {
  return shift<over<"t">>(x);
}

// expect: grouped_einsum: it does not take these arguments; write `grouped_einsum<..?S M, X M F -> S F..?>\(rows, weights, cou
auto rows_without_counts(const Tensor<f32, "S M">& rows, const Tensor<f32, "X M F">& w) {
  return grouped_einsum<"S M, X M F -> S F">(rows, w);
}

// expect: all_gather: it does not take these arguments; write `all_gather<..?M/d F -> M F..?>\(x\)`, or by the axis
auto op_spec_in_parentheses(const Tensor<f32, "M/d F">& w) {
  return all_gather("M/d F -> M F", w);
}

// expect: all_reduce: it does not take these arguments; write `all_reduce<..?M \+t -> M..?>\(x\)`, or by the axis
auto sum_in_parentheses(const Tensor<f32, "M +t">& x) {
  return all_reduce("M +t -> M", x);
}
