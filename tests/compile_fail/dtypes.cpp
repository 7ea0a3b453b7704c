// Wrong programs: dtypes that an op does not take.
#include "shardlib/shapes.hpp"

using namespace shardlib;

auto right(const Tensor<i32, "A B">& counts, const Tensor<bf16, "A B">& x, const Tensor<bool_, "A B">& mask) {
  const auto total = einsum_unreduced<"A B, A B -> A", f32>(x, masked(mask, x));
  return where(greater(total, 0.0), 1.0 - mean<"A B -> A">(cast<f32>(counts)), 1.0 / total);
}

// expect: exp: the operand is i32, not floating; write `cast<f32>` of it first
auto exp_of_integers(const Tensor<i32, "A">& x) {
  return exp(x);
}

// expect: mean: the operand is i32, not floating; write `cast<f32>` of it first
auto mean_of_integers(const Tensor<i32, "A B">& x) {
  return mean<"A B -> A">(x);
}

// expect: softmax: the operand is i32, not floating; write `cast<f32>` of it first
auto softmax_of_integers(const Tensor<i32, "A B">& x) {
  return softmax<"B">(x);
}

// expect: dropout: the operand is i32, not floating; write `cast<f32>` of it first
auto dropout_of_integers(const Tensor<i32, "A">& x) {
  return dropout(x, 0.1, {1, 2});
}

// expect: random_normal: random numbers are floating, not i32; draw f32 and `cast` them
auto random_integers(const Mesh<"d">& mesh) {
  return random_normal<i32, "A">(mesh, {{"A", 8}}, {1, 2});
}

// expect: index_unreduced: the indices are f32, not i32 or u32; write `cast<i32>` of them first
auto fractional_rows(const Tensor<f32, "V M">& table, const Tensor<f32, "B">& ids) {
  return index_unreduced<"[V] M, B -> B M">(table, ids);
}

// expect: cross_entropy: the indices are f32, not i32 or u32; write `cast<i32>` of them first
auto fractional_targets(const Tensor<f32, "B V">& logits, const Tensor<f32, "B">& targets) {
  return cross_entropy(logits, targets);
}

// expect: where: the condition is f32, not bool_; compare it first, e.g. `greater\(x, 0.0\)`
auto number_as_condition(const Tensor<f32, "A">& x) {
  return where(x, x, 0.0);
}

// expect: masked: the condition is i32, not bool_; compare it first
auto integers_as_mask(const Tensor<i32, "A">& m, const Tensor<f32, "A">& x) {
  return masked(m, x);
}

// expect: sum: the operand is bool_, which is not reduced; write `cast<i32>` of it first
auto count_truths(const Tensor<bool_, "A B">& x) {
  return sum<"A B -> A">(x);
}

// expect: all_reduce: the operand is u8, which is not reduced; write `cast<i32>` of it before its sum is pending
auto sum_bytes(const Tensor<u8, "A +d">& x) {
  return all_reduce<"A +d -> A">(x);
}

// expect: reduce_scatter: the operand is u8, which is not reduced; write `cast<i32>` of it before its sum is pending
auto scatter_bytes(const Tensor<u8, "A +d">& x) {
  return reduce_scatter<"A +d -> A/d">(x);
}

// expect: einsum_unreduced: the operands are i32, not floating; write `cast<f32>` of them first
auto transpose_integers(const Tensor<i32, "A B">& x) {
  return einsum_unreduced<"A B -> B A">(x);
}

// expect: einsum_unreduced: the sums of f32 cannot be had as i32, only as f32 or bf16; write `cast<i32>` of the
auto integer_sums(const Tensor<f32, "A B">& x, const Tensor<f32, "B C">& w) {
  return einsum_unreduced<"A B, B C -> A C", i32>(x, w);
}

// expect: einsum_unreduced: the sums of bf16 cannot be had as f64, only as f32 or bf16; write `cast<f64>` of the
auto wide_sums(const Tensor<bf16, "A B">& x, const Tensor<bf16, "B C">& w) {
  return einsum_unreduced<"A B, B C -> A C", f64>(x, w);
}

// expect: \+: the operand is bool_, which has no arithmetic; write `cast<f32>` of it first
auto one_more_truth(const Tensor<bool_, "A">& x) {
  return x + 1.0;
}

// expect: \*: the operands are f32 and bool_, and no dtype is promoted silently; write `cast<f32>` of the second
auto times_a_mask(const Tensor<f32, "A">& x, const Tensor<bool_, "A">& mask) {
  return x * mask;
}

// expect: /: the operand is i32, not floating; write `cast<f32>` of it first
auto reciprocal_of_integers(const Tensor<i32, "A">& x) {
  return 1.0 / x;
}

// expect: greater: the operand `A \+t` is partial over t, and greater is not linear, so it has to see the sum
auto compare_summands(const Tensor<f32, "A +t">& x) {
  return greater(x, 0.0);
}

// expect: Tensor: its element type is not one of f32, bf16, f64, i32, u32, u8, bool_; use one of them
using Longs = decltype(Tensor<long, "A">());

// expect: causal_attention of segments: the indices are f32, not i32 or u32; write `cast<i32>` of them first
auto fractional_segments(const Tensor<f32, "L D">& q, const Tensor<f32, "L">& segments) {
  return causal_attention<"L", "D">(q, q, q, segments);
}

// expect: causal_attention: .*f32.*bf16.*, and no dtype is promoted silently; write `cast<f32>` of the second
auto narrow_values(const Tensor<f32, "L D">& q, const Tensor<bf16, "L D">& v) {
  return causal_attention<"L", "D">(q, q, v);
}

// expect: reduce_scatter: bf16 is not summed in bf16; write `reduce_scatter<.*, f32>`: bf16 on the wire, an f32 sum
auto unstated_sum(const Tensor<bf16, "A +t">& x) {
  return reduce_scatter<"A +t -> A/t">(x);
}

// expect: all_reduce: f32 is not summed in f64; write `all_reduce<.*, f32>`, or leave the dtype out
auto wider_sum(const Tensor<f32, "A +t">& x) {
  return all_reduce<"A +t -> A", f64>(x);
}

// expect: all_gather: bf16 would be the dtype of what its backward pass sums; write `all_gather<.*, backward_sum<f32>>`
auto narrow_gradient(const Tensor<bf16, "A/t">& w) {
  return all_gather<"A/t -> A", bf16>(w);
}

// expect: exp: the operand `A \+t` is partial over t, .*; reduce it first, with a `reduce_scatter` or
// expect: `all_reduce<..?A \+t -> A..?, f32>` \(communicate\)
auto summand_of_bf16(const Tensor<bf16, "A +t">& x) {
  return exp(x);
}

// expect: a tensor `bf16\[A \+t\]` does not fit the declared type `bf16\[A/t\]`: .*; take
// expect: `reduce_scatter<..?A \+t -> A/t..?, f32>` \(communicates\)
Tensor<bf16, "A/t"> scattered_sum_of_bf16(const Tensor<bf16, "A +t">& x) {
  return x;
}

// expect: where of `A` and two numbers: they give the result no dtype; write `cast<f32>\(c\)`, which is 1 where
auto numbers_without_a_dtype(const Tensor<bool_, "A">& seen) {
  return where(seen, 1.0, 0.0);
}

// expect: all_gather<`L M/t -> L M`>: the operand is `L M/t \+d`, .*; take
// expect: `all_reduce<..?L M/t \+d -> L M/t..?, f32>` \(communicates\)
auto started_summand_of_bf16(const Tensor<bf16, "L M/t +d">& x) {
  return all_gather_start<"L M/t -> L M">(x);
}

// expect: map: the operand `A \+t` is partial over t, .*; reduce it first, with a `reduce_scatter` or
// expect: `all_reduce<..?A \+t -> A..?, f32>` \(communicate\)
auto mapped_summands_of_bf16(const Tensor<bf16, "A +t">& x) {
  return map([](auto v) { return v * v; }, x);
}

// expect: index_unreduced<`\[V\] M, B -> B M`>: the index tensor is `B \+d`, .*; take
// expect: `all_reduce<..?B \+d -> B..?>` \(communicates\)
auto pending_indices_of_bf16_rows(const Tensor<bf16, "V M">& table, const Tensor<i32, "B +d">& indices) {
  return index_unreduced<"[V] M, B -> B M">(table, indices);
}

// expect: rms_norm of f32: the scale is bf16, not f32; write `cast<f32>` of it first
auto norm_with_a_narrow_scale(const Tensor<f32, "B M">& x, const Tensor<bf16, "M">& scale) {
  return rms_norm<"M">(x, scale);
}

// expect: layer_norm of bf16: the bias is bf16 and the scale f32, and both have one dtype; write `cast<f32>` of the bias first
auto norm_with_two_dtypes(const Tensor<bf16, "B M">& x, const Tensor<f32, "M">& scale, const Tensor<bf16, "M">& bias) {
  return layer_norm<"M">(x, scale, bias);
}

// expect: einsum_bias: it does not take these arguments; write
// expect: `cast<f32>\(einsum_bias<..?A B, B C -> A C..?>\(x, y, bias\)\)`
auto bias_of_a_wide_result(const Tensor<bf16, "B M">& x, const Tensor<bf16, "M F">& w, const Tensor<bf16, "F">& b) {
  return einsum_bias<"B M, M F -> B F", f32>(x, w, b);
}

// expect: einsum_bias_gelu: it does not take these arguments; write
// expect: `cast<f32>\(einsum_bias_gelu<..?A B, B C -> A C..?>\(x, y, bias\)\)`
auto gelu_of_a_wide_result(const Tensor<bf16, "B M">& x, const Tensor<bf16, "M F">& w, const Tensor<bf16, "F">& b) {
  return einsum_bias_gelu<"B M, M F -> B F", f32>(x, w, b);
}

// expect: rms_norm: it does not take this argument; write `rms_norm<..?M..?, bf16>\(x, scale\)`, or without a scale
// expect: `cast<bf16>\(rms_norm<..?M..?>\(x\)\)`
auto narrow_norm_without_a_scale(const Tensor<f32, "B M">& x) {
  return rms_norm<"M", bf16>(x, 1e-5);
}

// expect: layer_norm: it does not take this argument; write `layer_norm<..?M..?, bf16>\(x, scale, bias\)`, or without both
// expect: `cast<bf16>\(layer_norm<..?M..?>\(x\)\)`
auto narrow_norm_without_scale_and_bias(const Tensor<f32, "B M">& x) {
  return layer_norm<"M", bf16>(x);
}

// expect: rms_norm of f64: the result cannot be had as bf16, only as f64; write `cast<bf16>` of the result
auto narrow_norm(const Tensor<f64, "B M">& x, const Tensor<f64, "M">& scale) {
  return rms_norm<"M", bf16>(x, scale);
}

// expect: rms_norm: it does not take these arguments; write `rms_norm<..?M..?, bf16>\(x, scale, 1e-6\)`
auto dtype_for_the_dim(const Tensor<bf16, "B/d M">& x, const Tensor<f32, "M">& scale) {
  return rms_norm<bf16>(x, scale);
}

// expect: layer_norm: it does not take these arguments; write `layer_norm<..?M..?, bf16>\(x, scale, bias, 1e-5\)`
auto dtype_before_the_dim(const Tensor<bf16, "B/d M">& x, const Tensor<f32, "M">& scale) {
  return layer_norm<bf16, "M">(x, scale, scale);
}

// expect: softmax: it does not take these arguments; write `softmax<..?M..?>\(x\)`
auto softmax_in_a_dtype(const Tensor<bf16, "B/d L">& x) {
  return softmax<f32>(x);
}
