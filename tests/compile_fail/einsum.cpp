// Wrong programs: einsum_unreduced, einsum_bias and index_unreduced.
#include "shardlib/shapes.hpp"

using namespace shardlib;

auto project(const Tensor<f32, "B/d M/t">& x, const Tensor<f32, "M/t H">& w) {
  return einsum_unreduced<"B/d M/t, M/t H -> B/d H +t">(x, w);
}

// expect: the result is partial over t \(contracting `M/t` sees only the shard of this device\), so its spec must say
// expect: reduce it afterwards with `reduce_scatter` or `all_reduce` \(communicate\)
auto contraction_not_spelled(const Tensor<f32, "B/d M/t">& x, const Tensor<f32, "M/t H">& w) {
  return einsum_unreduced<"B/d M/t, M/t H -> B/d H">(x, w);
}

// expect: dim `H` cannot become `H/t` in the result, as nothing moves between devices; leave the sum over t pending, `\+t`,
// expect: and take `reduce_scatter` afterwards \(communicates\)
auto scattered(const Tensor<f32, "B/d M/t">& x, const Tensor<f32, "M/t H">& w) {
  return einsum_unreduced<"B/d M/t, M/t H -> B/d H/t">(x, w);
}

// expect: the result spec says `\+t`, but no operand is partial over t, and no dim that the result lacks is sharded
auto nothing_pending(const Tensor<f32, "B/d M">& x, const Tensor<f32, "M H">& w) {
  return einsum_unreduced<"B/d M, M H -> B/d H +t">(x, w);
}

// expect: the first operand is `M/t B/d`, but the op spec expects `B/d M/t`: dim 1 is `M/t`, not `B/d`; reorder the
auto transposed(const Tensor<f32, "M/t B/d">& x, const Tensor<f32, "M/t H">& w) {
  return einsum_unreduced<"B/d M/t, M/t H -> B/d H +t">(x, w);
}

// expect: the second operand is `M/t/d H`, but the op spec expects `M/t H`: dim 1 is `M/t/d`, not `M/t`; gather it with
auto weights_not_gathered(const Tensor<f32, "B/d M/t">& x, const Tensor<f32, "M/t/d H">& w) {
  return einsum_unreduced<"B/d M/t, M/t H -> B/d H +t">(x, w);
}

// expect: dim `M` of `M H` is `M/t` in `B/d M/t`, so their shards differ; take `all_gather<..?B/d M/t -> B/d M..?>`
// expect: or `shard<..?M H -> M/t H..?>` \(no traffic\)
auto sharded_in_one_only(const Tensor<f32, "B/d M/t">& x, const Tensor<f32, "M H">& w) {
  return einsum_unreduced<"B/d M/t, M H -> B/d H +t">(x, w);
}

// expect: the first operand is sharded over t \(dim `B/t`\) and the second sharded over t \(dim `H/t`\), so only
auto diagonal_shards(const Tensor<f32, "B/t M">& x, const Tensor<f32, "M H/t">& w) {
  return einsum_unreduced<"B/t M, M H/t -> B/t H">(x, w);
}

// expect: the first operand is partial over t and the second partial over t, and a product of sums is not the sum of
auto product_of_sums(const Tensor<f32, "B M +t">& x, const Tensor<f32, "M H +t">& w) {
  return einsum_unreduced<"B M +t, M H +t -> B H +t">(x, w);
}

// expect: the first operand is partial over t and the second sharded over t \(dim `H/t`\), so a summand would meet one
auto summand_and_shard(const Tensor<f32, "B M +t">& x, const Tensor<f32, "M H/t">& w) {
  return einsum_unreduced<"B M +t, M H/t -> B H +t">(x, w);
}

// expect: dim `M/t/d` of `M/t/d` is `M/d/t` in `M/d/t`, so their shards differ; `all_gather` one of them and `shard` it
auto order_of_axes(const Tensor<f32, "M/t/d">& a, const Tensor<f32, "M/d/t">& b) {
  return einsum_unreduced<"M/t/d, M/d/t -> +d +t">(a, b);
}

// expect: the second operand is `L D`, but the op spec expects `Klen D`: dim 1 is `L`, not `Klen`; if both names mean
// expect: rename<..?L -> Klen..?>` \(free\)
auto attention_without_rename(const Tensor<f32, "L D">& q, const Tensor<f32, "L D">& k) {
  return einsum_unreduced<"L D, Klen D -> L Klen">(q, k);
}

// expect: einsum_unreduced: the operands are f32 and bf16, and no dtype is promoted silently; write `cast<f32>`
auto two_dtypes(const Tensor<f32, "A B">& a, const Tensor<bf16, "B C">& b) {
  return einsum_unreduced<"A B, B C -> A C">(a, b);
}

// expect: einsum_unreduced<`A B, B -> A`>: the op spec has 2 operands, the call has 1
auto missing_operand(const Tensor<f32, "A B">& a) {
  return einsum_unreduced<"A B, B -> A">(a);
}

// expect: integer dim `2` is not an index: name it first, `rename<..?2 -> name..?>`
auto integer_index(const Tensor<f32, "2 A">& a, const Tensor<f32, "A B">& b) {
  return einsum_unreduced<"2 A, A B -> 2 B">(a, b);
}

// expect: the result is partial over t \(looking up in `V/t` sees only the shard of this device\), so its spec must
auto lookup_not_spelled(const Tensor<f32, "V/t M">& table, const Tensor<u32, "B/d L">& ids) {
  return index_unreduced<"[V/t] M, B/d L -> B/d L M">(table, ids);
}

// expect: no dim of the table is in brackets: write `\[V/t\] M` for a lookup along V
auto no_brackets(const Tensor<f32, "V/t M">& table, const Tensor<u32, "B/d L">& ids) {
  return index_unreduced<"V/t M, B/d L -> B/d L M +t">(table, ids);
}

// expect: the indices are sharded over t \(dim `L/t`\), over which the looked-up dim `V/t` is sharded too
auto own_rows_only(const Tensor<f32, "V/t M">& table, const Tensor<u32, "L/t">& ids) {
  return index_unreduced<"[V/t] M, L/t -> L M +t">(table, ids);
}

// an embedding at rest, FSDP's, of tokens whose batch is over the same axis
// expect: axis `d` appears twice: a mesh axis can act once in a tensor; `all_gather` one of the operands, whose `V/d` and
// expect: `B/d` are both sharded over d \(communicates\)
auto embedding_at_rest(const Tensor<f32, "V/d M">& table, const Tensor<u32, "B/d L">& ids) {
  return index_unreduced<"[V/d] M, B/d L -> B/d L M +d">(table, ids);
}

// expect: einsum_unreduced: the op spec is missing: write what goes in and what comes out,
// expect: `einsum_unreduced<..?A B, B C -> result..?>\(x, y\)`
auto no_op_spec(const Tensor<f32, "A B">& x, const Tensor<f32, "B C">& w) {
  return einsum_unreduced(x, w);
}

// expect: the operands are swapped: the first is `M/t H`, the second `B/d M/t`; swap them in the call or in the op spec
auto swapped(const Tensor<f32, "B/d M/t">& x, const Tensor<f32, "M/t H">& w) {
  return einsum_unreduced<"B/d M/t, M/t H -> B/d H +t">(w, x);
}

// expect: einsum<`B/d M, M F -> B/d F`>: no sum over devices is completed in `B/d F`, so nothing would be communicated; write `einsum_unreduced`
auto nothing_to_sum(const Tensor<f32, "B/d M">& x, const Tensor<f32, "M F">& w) {
  return einsum<"B/d M, M F -> B/d F">(x, w);
}

// expect: axis `s` appears twice: a mesh axis can act once in a tensor; `all_gather` one of the operands, whose `L/s` and
// expect: or keep both sharded: `split<"?..?L/s -> R/s C..?"?>` names the block of each device \(free\), and `shift` moves
auto two_sharded_lengths(const Tensor<f32, "B L/s H D">& q, const Tensor<f32, "B K/s H D">& k) {
  return einsum_unreduced<"B L/s H D, B K/s H D -> B H L/s K/s">(q, k);
}

// expect: so only diagonal shards would be computed; `all_gather` one of them \(communicates\); or keep both sharded:
// expect: `split<"?..?L/s -> R/s C..?"?>`
auto one_sharded_length(const Tensor<f32, "B L/s H D">& q, const Tensor<f32, "B K/s H D">& k) {
  return einsum_unreduced<"B L/s H D, B K/s H D -> B H L/s K">(q, k);
}

// expect: the first operand is partial over t and the third operand partial over t, and a product of sums is not the sum
auto two_summands_of_three(const Tensor<f32, "A B +t">& x, const Tensor<f32, "B C">& y, const Tensor<f32, "C +t">& z) {
  return einsum_unreduced<"A B +t, B C, C +t -> A +t">(x, y, z);
}

// expect: the second operand is `C B`, but the op spec expects `B C`: dim 1 is `C`, not `B`
auto second_of_four(const Tensor<f32, "A B">& x, const Tensor<f32, "C B">& y, const Tensor<f32, "C">& z) {
  return einsum_unreduced<"A B, B C, C, A -> A">(x, y, z, z);
}

// expect: einsum<`A B, B C, C -> A`>: no sum over devices is completed in `A`, so nothing would be communicated; write
auto nothing_to_sum_of_three(const Tensor<f32, "A B">& x, const Tensor<f32, "B C">& y, const Tensor<f32, "C">& z) {
  return einsum<"A B, B C, C -> A">(x, y, z);
}

// expect: the number of dims in brackets is 2, and that of index tensors 1; each dim in brackets has an index tensor, in
auto one_index_of_two(const Tensor<f32, "V W/t M">& table, const Tensor<i32, "B">& ids) {
  return index_unreduced<"[V] [W/t] M, B -> B M +t">(table, ids);
}

// expect: einsum_unreduced<`A, A, A, A, A -> A`>: a product has at most 4 operands; multiply some of them first
auto five_factors(const Tensor<f32, "A">& x) {
  return einsum_unreduced<"A, A, A, A, A -> A">(x, x, x, x, x);
}

// expect: einsum<`A/t, A, A, A, A, A -> `>: a product has at most 4 operands; multiply some of them first
auto six_summed_factors(const Tensor<f32, "A/t">& x, const Tensor<f32, "A">& y) {
  return einsum<"A/t, A, A, A, A, A -> ">(x, y, y, y, y, y);
}

// expect: einsum_unreduced: it does not take these arguments; write `einsum_unreduced<..?A B, B C -> A C..?>\(x, y\)`
auto op_spec_in_parentheses(const Tensor<f32, "A B">& x, const Tensor<f32, "B C">& y) {
  return einsum_unreduced("A B, B C -> A C", x, y);
}

// expect: einsum: it does not take these arguments; write `einsum<..?A B/t, B/t C -> A C..?>\(x, y\)`
auto op_spec_of_einsum_in_parentheses(const Tensor<f32, "A B">& x, const Tensor<f32, "B C">& y) {
  return einsum("A B, B C -> A C", x, y);
}

// expect: einsum_bias<`B/d F/t, F/t M -> B/d M`>: each device..?s products are `B/d M \+t`, a summand over t: the sum would
// expect: count the bias once per device; write `einsum_unreduced`, take its sum with a `reduce_scatter` or
// expect: `all_reduce<..?B/d M \+t -> B/d M..?>` \(communicate\), and then add the bias with `\+`
auto bias_of_summands(const Tensor<f32, "B/d F/t">& x, const Tensor<f32, "F/t M">& w, const Tensor<f32, "M">& bias) {
  return einsum_bias<"B/d F/t, F/t M -> B/d M">(x, w, bias);
}

// expect: einsum_bias_gelu<`B/d F/t, F/t M -> B/d M \+t`>: each device..?s products are `B/d M \+t`, a summand over t: the
// expect: sum would count the bias once per device, and gelu is not linear; write `einsum_unreduced`, take its sum
// expect: all_reduce<..?B/d M \+t -> B/d M..?, f32>
auto gelu_of_summands(const Tensor<bf16, "B/d F/t">& x, const Tensor<bf16, "F/t M">& w, const Tensor<bf16, "M">& b) {
  return einsum_bias_gelu<"B/d F/t, F/t M -> B/d M +t">(x, w, b);
}

// expect: einsum_bias_gelu<`B M, M F/t -> B F/t`>: the bias `F` is `F/t` in the result, so their shards differ; take the
// expect: `shard<..?F -> F/t..?>` \(no traffic\)
auto whole_bias(const Tensor<f32, "B M">& x, const Tensor<f32, "M F/t">& w, const Tensor<f32, "F">& bias) {
  return einsum_bias_gelu<"B M, M F/t -> B F/t">(x, w, bias);
}

// expect: einsum_bias<`B M, M F -> B F`>: the bias `F \+d` is partial over d; reduce it first, with a `reduce_scatter` or
auto pending_bias(const Tensor<f32, "B M">& x, const Tensor<f32, "M F">& w, const Tensor<f32, "F +d">& bias) {
  return einsum_bias<"B M, M F -> B F">(x, w, bias);
}

// expect: einsum_bias<`B M, M F -> B F`>: dim `G` of the bias `G` is not in the result `B F`; `\+` after `einsum_unreduced`
auto bias_of_another_dim(const Tensor<f32, "B M">& x, const Tensor<f32, "M F">& w, const Tensor<f32, "G">& bias) {
  return einsum_bias<"B M, M F -> B F">(x, w, bias);
}

// expect: einsum_bias of f32: the bias is bf16, and no dtype is promoted silently; write `cast<f32>` of the bias first
auto bias_of_another_dtype(const Tensor<f32, "B M">& x, const Tensor<f32, "M F">& w, const Tensor<bf16, "F">& bias) {
  return einsum_bias<"B M, M F -> B F">(x, w, bias);
}

// expect: einsum_bias: it does not take these arguments; write `einsum_bias<..?A B, B C -> A C..?>\(x, y, bias\)`
auto product_without_bias(const Tensor<f32, "B M">& x, const Tensor<f32, "M F">& w) {
  return einsum_bias<"B M, M F -> B F">(x, w);
}

// expect: einsum_bias_gelu: it does not take these arguments; write `einsum_bias_gelu<..?A B, B C -> A C..?>\(x, y, bias\)`
auto bias_op_spec_in_parentheses(const Tensor<f32, "B M">& x, const Tensor<f32, "M F">& w,
                                 const Tensor<f32, "F">& bias) {
  return einsum_bias_gelu("B M, M F -> B F", x, w, bias);
}
