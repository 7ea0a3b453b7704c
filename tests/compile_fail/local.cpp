// Wrong programs: elementwise operations, reductions, layout.
#include "shardlib/shapes.hpp"

using namespace shardlib;

auto normed(const Tensor<f32, "B/d M">& x, const Tensor<f32, "M">& scale) {
  return rms_norm<"M">(x) * scale;
}

// expect: \+ of `A/t` and `A`: dim `A` of `A` is `A/t` in `A/t`, so their shards differ; take `all_gather<
#if SECTION == 1
auto add_shard_and_whole(const Tensor<f32, "A/t">& a, const Tensor<f32, "A">& b) {
  return a + b;
}
#endif

// expect: \+ of `A/t B` and `B/t`: `A/t B` is sharded over t \(dim `A/t`\), but `B/t` is sharded over t \(dim `B/t`\),
#if SECTION == 2
auto add_diagonals(const Tensor<f32, "A/t B">& a, const Tensor<f32, "B/t">& b) {
  return a + b;
}
#endif

// expect: \* of `A \+t` and `A \+t`: both are partial over t, and a product of sums is not the sum of the products
#if SECTION == 3
auto multiply_sums(const Tensor<f32, "A +t">& a) {
  return a * a;
}
#endif

// expect: / of `A` and `A \+t`: the divisor is partial over t, and a quotient by a sum is not the sum of the quotients
#if SECTION == 4
auto divide_by_a_summand(const Tensor<f32, "A">& a, const Tensor<f32, "A +t">& b) {
  return a / b;
}
#endif

// expect: \+ of `A \+t` and a constant: the operand is partial over t, and each device would count the constant again
#if SECTION == 5
auto add_one_per_device(const Tensor<f32, "A +t">& a) {
  return a + 1.0;
}
#endif

// expect: \+: the operands are f32 and bf16, and no dtype is promoted silently; write `cast<f32>` of the second
#if SECTION == 6
auto add_two_dtypes(const Tensor<f32, "A">& a, const Tensor<bf16, "A">& b) {
  return a + b;
}
#endif

// expect: - of `A B` and `B A`: the dims of the result, `A B`, stand in another order in `B A`; `rearrange` one
#if SECTION == 7
auto subtract_transposed(const Tensor<f32, "A B">& a, const Tensor<f32, "B A">& b) {
  return a - b;
}
#endif

// expect: map: the operand `A \+t` is partial over t, and map is not linear, so it has to see the sum
#if SECTION == 8
auto map_a_summand(const Tensor<f32, "A +t">& a, const Tensor<f32, "A">& b) {
  return map([](auto x, auto y) { return x * x + y; }, a, b);
}
#endif

// expect: where of `A \+t` and `A`: `A \+t` is partial over t, but `A` is replicated over t, so the pending sum would
#if SECTION == 9
auto choose_sum_or_value(const Tensor<bool_, "A">& c, const Tensor<f32, "A +t">& a, const Tensor<f32, "A">& b) {
  return where(c, a, b);
}
#endif

// expect: where the constant is 0, `masked` takes a partial operand as it is
#if SECTION == 10
auto mask_a_sum(const Tensor<bool_, "A">& c, const Tensor<f32, "A +t">& a) {
  return where(c, a, 0.0);
}
#endif

// expect: a cast between float and integer is not linear, so it has to see the sum, not the summand of one device
#if SECTION == 11
auto round_a_summand(const Tensor<f32, "A +t">& a) {
  return cast<i32>(a);
}
#endif

// expect: logical_and: the operands are f32, not bool_; compare them first, e.g. `not_equal`
#if SECTION == 12
auto numbers_as_truth(const Tensor<f32, "A">& a) {
  return logical_and(a, a);
}
#endif

// expect: sum<`B/d L -> L`>: the result is partial over d \(summing over `B/d` sees only the shard of this device\),
#if SECTION == 13
auto sum_of_a_shard(const Tensor<f32, "B/d L">& x) {
  return sum<"B/d L -> L">(x);
}
#endif

// expect: max<`L V/t -> L`>: dim `V/t` is sharded, so each device sees only its shard of it; gather it first with
// expect: or take `all_reduce_max`, which sends the maxima only
#if SECTION == 14
auto max_of_a_shard(const Tensor<f32, "L V/t">& x) {
  return max<"L V/t -> L">(x);
}
#endif

// expect: softmax<`Klen`>: dim `Klen/t` is sharded, so each device sees only its shard of it; gather it first with
#if SECTION == 15
auto softmax_of_a_shard(const Tensor<f32, "Qlen Klen/t">& x) {
  return softmax<"Klen">(x);
}
#endif

// expect: rms_norm<`H`>: the operand `B/d M` has no dim `H`
#if SECTION == 16
auto norm_along_nothing(const Tensor<f32, "B/d M">& x) {
  return rms_norm<"H">(x);
}
#endif

// expect: cross_entropy of `B/d L V/t` and `B L`: the targets must have the dims of the logits without the last one
#if SECTION == 17
auto targets_of_all(const Tensor<f32, "B/d L V/t">& logits, const Tensor<u32, "B L">& targets) {
  return cross_entropy(logits, targets);
}
#endif

// expect: rename<`L -> B`>: the operand `B L` already has a dim `B`
#if SECTION == 18
auto one_name_twice(const Tensor<f32, "B L">& x) {
  return rename<"L -> B">(x);
}
#endif

// expect: rearrange<`A B/t -> B A/t`>: dim `B/t` cannot become `B`: a rearrange only reorders; change the sharding
#if SECTION == 19
auto reshard_by_rearrange(const Tensor<f32, "A B/t">& x) {
  return rearrange<"A B/t -> B A/t">(x);
}
#endif

// expect: merge<`H D/t -> E/t`>: dim `D/t` is sharded, but axes may stand on the major part `H` only; `all_gather` it
#if SECTION == 20
auto merge_the_minor_part(const Tensor<f32, "H D/t">& x) {
  return merge<"H D/t -> E/t">(x);
}
#endif

// expect: concat<`L, L -> N`>: dim `L/t` is sharded, so each device sees only its shard of it; gather it first
#if SECTION == 21
auto concat_shards(const Tensor<f32, "L/t">& a, const Tensor<f32, "L/t">& b) {
  return concat<"L, L -> N">(a, b);
}
#endif

// expect: broadcast<`M/t -> B M`>: dim `M/t` must stand unchanged in the result, not as `M`
#if SECTION == 22
auto broadcast_and_gather(const Tensor<f32, "M/t">& x) {
  return broadcast<"M/t -> B M">(x, {{"B", 8}});
}
#endif

// expect: max: the op spec is missing: write what goes in and what comes out, `max<..?A B -> result..?>\(x\)`
#if SECTION == 23
auto max_of_what(const Tensor<f32, "A B">& x) {
  return max(x);
}
#endif

// expect: softmax<`B/d M -> B/d M`>: this op takes the name of one dim of the operand `B/d M`, not an op spec
#if SECTION == 24
auto softmax_by_op_spec(const Tensor<f32, "B/d M">& x) {
  return softmax<"B/d M -> B/d M">(x);
}
#endif

// expect: - of `A \+t` and a constant: the operand is partial over t, and each device would count the constant again
#if SECTION == 25
auto complement_of_a_summand(const Tensor<f32, "A +t">& a) {
  return 1.0 - a;
}
#endif

// expect: map: the function does not take one number for each operand, in their order
#if SECTION == 26
auto map_of_too_few(const Tensor<f32, "A">& x) {
  return map([](auto a, auto b) { return a + b; }, x);
}
#endif

// expect: causal_attention<`L`, `D`>: dim `L/d` is sharded, so each device sees only its shard of it; gather it first
#if SECTION == 27
auto attention_of_a_shard(const Tensor<f32, "L/d H/t D">& q) {
  return causal_attention<"L", "D">(q, q, q);
}
#endif

// expect: causal_attention<`L`, `D`>: dim `K` of `B L K D` is `K/t` in `B L K/t D`, so their shards differ
#if SECTION == 28
auto heads_sharded_in_one(const Tensor<f32, "B L K/t D">& q, const Tensor<f32, "B L K D">& k) {
  return causal_attention<"L", "D">(q, k, k);
}
#endif

// expect: causal_attention<`L`, `D`>: the keys `B Klen D` have the dim `Klen`, but the queries `B L D` do not
#if SECTION == 29
auto keys_under_another_name(const Tensor<f32, "B L D">& q, const Tensor<f32, "B Klen D">& k) {
  return causal_attention<"L", "D">(q, k, k);
}
#endif

// expect: causal_attention<`L`, `D`>: dim `B` of `B L` is `B/d` in `B/d L D`, so their shards differ
#if SECTION == 30
auto segments_of_all(const Tensor<f32, "B/d L D">& q, const Tensor<i32, "B L">& segments) {
  return causal_attention<"L", "D">(q, q, q, segments);
}
#endif

// expect: causal_attention: the operand `L D \+t` is partial over t, and causal_attention is not linear, so it has to see
#if SECTION == 31
auto attention_of_summands(const Tensor<f32, "L D">& q, const Tensor<f32, "L D +t">& v) {
  return causal_attention<"L", "D">(q, q, v);
}
#endif

// expect: linear_cross_entropy<`B/d M, M V/t -> B/d V/t`>: the logits must be rows over the first dim of the table, made of
#if SECTION == 32
auto loss_of_a_table_by_columns(const Tensor<f32, "B/d M">& x, const Tensor<f32, "M V/t">& table,
                                const Tensor<i32, "B/d">& targets) {
  return linear_cross_entropy<"B/d M, M V/t -> B/d V/t">(x, table, targets);
}
#endif

// expect: linear_cross_entropy<`B/d M, V/t M -> B/d V/t`> with targets `B`: the targets must have the dims of the logits
#if SECTION == 33
auto loss_of_all_targets(const Tensor<f32, "B/d M">& x, const Tensor<f32, "V/t M">& table,
                         const Tensor<i32, "B">& targets) {
  return linear_cross_entropy<"B/d M, V/t M -> B/d V/t">(x, table, targets);
}
#endif

// expect: linear_cross_entropy: the indices are f32, not i32 or u32; write `cast<i32>` of them first
#if SECTION == 34
auto loss_of_real_targets(const Tensor<f32, "B/d M">& x, const Tensor<f32, "V/t M">& table,
                          const Tensor<f32, "B/d">& targets) {
  return linear_cross_entropy<"B/d M, V/t M -> B/d V/t">(x, table, targets);
}
#endif

// expect: split<`Y -> Y P`>: dim `Y` stands on both sides, with two sizes, and a name has one size; write another name for the part
#if SECTION == 35
auto part_named_as_whole(const Tensor<f32, "Y">& x) {
  return split<"Y -> Y P">(x, {{"P", 4}});
}
#endif

// expect: concat<`L, N -> L`>: the result.{1,2}s dim is longer than those of the operands, and a name has one size; give it another
#if SECTION == 36
auto longer_by_one_name(const Tensor<f32, "L">& a, const Tensor<f32, "N">& b) {
  return concat<"L, N -> L">(a, b);
}
#endif

// expect: stack<`S`>: the operands are stacked as they are, but `B` is not `B/d`: dim 1 is `B`, not `B/d`; take the shard
#if SECTION == 37
auto stack_of_two(const Tensor<f32, "B/d">& a, const Tensor<f32, "B">& b) {
  return stack<"S">(a, b);
}
#endif

// expect: transpose<`A`, `X`>: the operand `A B` has no dim `X`
#if SECTION == 38
auto transpose_of_missing(const Tensor<f32, "A B">& x) {
  return transpose<"A", "X">(x);
}
#endif

// expect: a tensor `f32\[B/d M\]` does not fit the declared type `f32\[M\]`
#if SECTION == 39
void widened(Tensor<f32, "M">& total, const Tensor<f32, "B/d M">& x) {
  total += x;
}
#endif

// expect: cumsum<`L`>: dim `L/t` is sharded, so each device sees only its shard of it; gather it first with
#if SECTION == 40
auto sums_of_a_shard(const Tensor<f32, "B L/t">& x) {
  return cumsum<"L">(x);
}
#endif

// expect: linear_scan<`L`>: the factors `L` must have the spec of the summands `B L`
#if SECTION == 41
auto scan_by_shared_factors(const Tensor<f32, "L">& a, const Tensor<f32, "B L">& b) {
  return linear_scan<"L">(a, b);
}
#endif

// expect: top_k<`V`, `K`>: dim `V/t` is sharded, so each device sees only its shard of it; gather it first with
#if SECTION == 42
auto largest_of_a_shard(const Tensor<f32, "B V/t">& x) {
  return top_k<"V", "K">(x, 4);
}
#endif

// expect: top_k<`V`, `V`>: the operand `B V` already has a dim `V`, and a name has one size; write another name
#if SECTION == 43
auto largest_by_one_name(const Tensor<f32, "B V">& x) {
  return top_k<"V", "V">(x, 4);
}
#endif

// expect: sort: the operand `V \+t` is partial over t, and sort is not linear, so it has to see the sum
#if SECTION == 44
auto sorted_summands(const Tensor<f32, "V +t">& x) {
  return sort<"V">(x);
}
#endif

// expect: narrow<`L -> L`>: the result.{1,2}s dim has another size, and a name has one size; give it another name than `L`
#if SECTION == 45
auto range_by_one_name(const Tensor<f32, "L">& x) {
  return narrow<"L -> L">(x, 0, 4);
}
#endif

// expect: pad of `L \+t` and a constant: the operand is partial over t, and each device would count the constant again
#if SECTION == 46
auto ones_around_summands(const Tensor<f32, "L +t">& x) {
  return pad<"L -> N">(x, 1, 1, 1.0);
}
#endif

// expect: scatter_add<`B/d M, B/d -> \[V\] M`>: the result is partial over d \(adding `B/d` sees only the shard of
#if SECTION == 47
auto added_on_one_device(const Tensor<f32, "B/d M">& x, const Tensor<i32, "B/d">& ids) {
  return scatter_add<"B/d M, B/d -> [V] M">(x, ids, {{"V", 8}});
}
#endif

// expect: min: the operand `B V \+t` is partial over t, and min is not linear, so it has to see the sum
#if SECTION == 48
auto least_of_summands(const Tensor<f32, "B V +t">& x) {
  return min<"B V +t -> B">(x);
}
#endif

// expect: softplus: the operand `A \+t` is partial over t, and softplus is not linear, so it has to see the sum
#if SECTION == 49
auto softplus_of_a_summand(const Tensor<f32, "A +t">& a) {
  return softplus(a);
}
#endif

// expect: pow: the operand `A \+t` is partial over t, and pow is not linear, so it has to see the sum
#if SECTION == 50
auto power_of_a_summand(const Tensor<f32, "A +t">& a) {
  return pow(a, 2.0);
}
#endif

// expect: mod of `A/t` and `A`: dim `A` of `A` is `A/t` in `A/t`, so their shards differ
#if SECTION == 51
auto rest_of_shard_and_whole(const Tensor<i32, "A/t">& a, const Tensor<i32, "A">& b) {
  return mod(a, b);
}
#endif

// expect: floor: the operand is i32, not floating; write `cast<f32>` of it first
#if SECTION == 52
auto floor_of_integers(const Tensor<i32, "A">& a) {
  return floor(a);
}
#endif

// expect: logsumexp<`B V/t -> B`>: dim `V/t` is sharded, so each device sees only its shard of it; gather it first with
#if SECTION == 53
auto log_of_the_sum_of_a_shard(const Tensor<f32, "B V/t">& x) {
  return logsumexp<"B V/t -> B">(x);
}
#endif

// expect: prod: the operand `B V \+t` is partial over t, and prod is not linear, so it has to see the sum
#if SECTION == 54
auto product_of_summands(const Tensor<f32, "B V +t">& x) {
  return prod<"B V +t -> B">(x);
}
#endif

// expect: any: the condition is f32, not bool_
#if SECTION == 55
auto any_of_numbers(const Tensor<f32, "B V">& x) {
  return any<"B V -> B">(x);
}
#endif

// expect: roll<`L`>: dim `L/t` is sharded, so each device sees only its shard of it; gather it first with
#if SECTION == 56
auto roll_of_a_shard(const Tensor<f32, "B L/t">& x) {
  return roll<"L">(x, 1);
}
#endif

// expect: one_hot<`V/d`>: the indices `B/d` are sharded over d \(dim `B/d`\), so `V/d` cannot be sharded over d as well
#if SECTION == 57
auto one_hot_over_one_axis(const Tensor<i32, "B/d">& ids) {
  return one_hot<"V/d">(ids, 8);
}
#endif

// expect: tril<`L`, `K`>: the operand `B L` has no dim `K`
#if SECTION == 58
auto triangle_of_one_dim(const Tensor<f32, "B L">& x) {
  return tril<"L", "K">(x);
}
#endif

// expect: cumprod: the operand `L \+t` is partial over t, and cumprod is not linear, so it has to see the sum
#if SECTION == 59
auto products_of_summands(const Tensor<f32, "L +t">& x) {
  return cumprod<"L">(x);
}
#endif

// expect: take_along<`V`>: dim `V/t` is sharded, so each device sees only its shard of it; gather it first with
// expect: or write `index_unreduced`, whose rows of other shards are 0
#if SECTION == 60
auto take_of_a_shard(const Tensor<f32, "B V/t">& x, const Tensor<i32, "B K">& ids) {
  return take_along<"V">(x, ids);
}
#endif

// expect: take_along<`V`>: the indices `B K` must have the dims of the operand `B/d V` but for `V`: dim 1 is `B`, not
#if SECTION == 61
auto take_for_other_rows(const Tensor<f32, "B/d V">& x, const Tensor<i32, "B K">& ids) {
  return take_along<"V">(x, ids);
}
#endif

// expect: take_along: the indices are f32, not i32 or u32; write `cast<i32>` of them first
#if SECTION == 62
auto take_at_numbers(const Tensor<f32, "B V">& x, const Tensor<f32, "B K">& ids) {
  return take_along<"V">(x, ids);
}
#endif

// expect: linear_scan<`L`>: dim `L/s` is sharded, so each device sees only its shard of it; gather it first with
// expect: or write `linear_scan<..?L..?, over<..?s..?>>`, which gathers the last states only \(communicates\)
#if SECTION == 63
auto scan_of_a_shard(const Tensor<f32, "B L/s">& a, const Tensor<f32, "B L/s">& b) {
  return linear_scan<"L">(a, b);
}
#endif

// expect: dim `L/s/t` is sharded over s t, and the states of all its shards are gathered; write
#if SECTION == 64
auto scan_over_one_axis(const Tensor<f32, "B L/s/t">& a, const Tensor<f32, "B L/s/t">& b) {
  return linear_scan<"L", over<"s">>(a, b);
}
#endif

// expect: dim `L` is not sharded, so nothing would be communicated; write `linear_scan<..?L..?>`
#if SECTION == 65
auto scan_over_nothing(const Tensor<f32, "B L">& a, const Tensor<f32, "B L">& b) {
  return linear_scan<"L", over<"s">>(a, b);
}
#endif

// expect: or write `causal_attention<..?L..?, ..?D..?, over<..?s..?>>`, which sends keys and values from shard to shard
#if SECTION == 66
auto attention_in_a_shard(const Tensor<f32, "B L/s D">& x) {
  return causal_attention<"L", "D">(x, x, x);
}
#endif

// expect: causal_attention<`L`, `D`, over<s>>: dim `L/s/t` is sharded over s t, and the keys of all its shards are seen
#if SECTION == 67
auto attention_over_one_axis(const Tensor<f32, "B L/s/t D">& x) {
  return causal_attention<"L", "D", over<"s">>(x, x, x);
}
#endif

// expect: dim `L` is not sharded, so nothing would be communicated; write `causal_attention<..?L..?, ..?D..?>`
#if SECTION == 68
auto attention_over_nothing(const Tensor<f32, "B L D">& x) {
  return causal_attention<"L", "D", over<"s">>(x, x, x);
}
#endif

// expect: causal_attention<`L`, `D`, over<s>>: dim `L` of `B L D` is `L/s` in `B L/s D`, so their shards differ
#if SECTION == 69
auto attention_to_a_whole_length(const Tensor<f32, "B L/s D">& q, const Tensor<f32, "B L D">& k) {
  return causal_attention<"L", "D", over<"s">>(q, k, k);
}
#endif

// expect: causal_attention<`L`, `D`, over<s>>: dim `L` of `B L` is `L/s` in `B L/s D`, so their shards differ
#if SECTION == 70
auto attention_in_whole_segments(const Tensor<f32, "B L/s D">& x, const Tensor<i32, "B L">& segments) {
  return causal_attention<"L", "D", over<"s">>(x, x, x, segments);
}
#endif

// expect: / of `\+d` and a number: the dividend is partial over d, and the integer quotient of each summand drops
#if SECTION == 71
auto half_of_each_summand(const Tensor<i32, "B/d">& x) {
  return sum<"B/d -> +d">(x) / 2.0;
}
#endif

// expect: the dividend is partial over d, and the integer quotient of each summand drops a remainder of its own
#if SECTION == 72
auto mean_of_each_summand(const Tensor<i32, "B/d">& x, const Tensor<i32, "">& n) {
  return sum<"B/d -> +d">(x) / n;
}
#endif

// expect: sin: the operand `A \+t` is partial over t, and sin is not linear, so it has to see the sum
#if SECTION == 73
auto sine_of_summands(const Tensor<f32, "A +t">& x) {
  return sin(x);
}
#endif

// expect: cos: the operand `A \+t` is partial over t, and cos is not linear, so it has to see the sum
#if SECTION == 74
auto cosine_of_summands(const Tensor<f32, "A +t">& x) {
  return cos(x);
}
#endif

// expect: erf: the operand `A \+t` is partial over t, and erf is not linear, so it has to see the sum
#if SECTION == 75
auto erf_of_summands(const Tensor<f32, "A +t">& x) {
  return erf(x);
}
#endif

// expect: log1p: the operand `A \+t` is partial over t, and log1p is not linear, so it has to see the sum
#if SECTION == 76
auto log1p_of_summands(const Tensor<f32, "A +t">& x) {
  return log1p(x);
}
#endif

// expect: expm1: the operand `A \+t` is partial over t, and expm1 is not linear, so it has to see the sum
#if SECTION == 77
auto expm1_of_summands(const Tensor<f32, "A +t">& x) {
  return expm1(x);
}
#endif

// expect: round: the operand `A \+t` is partial over t, and round is not linear, so it has to see the sum
#if SECTION == 78
auto rounded_summands(const Tensor<f32, "A +t">& x) {
  return round(x);
}
#endif

// expect: sign: the operand `A \+t` is partial over t, and sign is not linear, so it has to see the sum
#if SECTION == 79
auto signs_of_summands(const Tensor<f32, "A +t">& x) {
  return sign(x);
}
#endif

// expect: clamp: the operand `A \+t` is partial over t, and clamp is not linear, so it has to see the sum
#if SECTION == 80
auto clamped_summands(const Tensor<f32, "A +t">& x) {
  return clamp(x, 0.0, 1.0);
}
#endif

// expect: floor_divide: the operand `A \+t` is partial over t, and floor_divide is not linear, so it has to see the sum
#if SECTION == 81
auto quotients_of_summands(const Tensor<i32, "A +t">& x) {
  return floor_divide(x, 2.0);
}
#endif

// expect: cummax<`L`>: dim `L/t` is sharded, so each device sees only its shard of it; gather it first with `all_gather<
#if SECTION == 82
auto maxima_along_a_shard(const Tensor<f32, "B L/t">& x) {
  return cummax<"L">(x);
}
#endif

// expect: argsort<`V`>: dim `V/t` is sharded, so each device sees only its shard of it; gather it first with `all_gather<
#if SECTION == 83
auto order_of_a_shard(const Tensor<f32, "B V/t">& x) {
  return argsort<"V">(x);
}
#endif

// expect: flip<`L`>: dim `L/t` is sharded, so each device sees only its shard of it; gather it first with `all_gather<
#if SECTION == 84
auto reversed_shards(const Tensor<f32, "B L/t">& x) {
  return flip<"L">(x);
}
#endif

// expect: var<`B M/t -> B`>: dim `M/t` is sharded, so each device sees only its shard of it; gather it first with `all_gather<
#if SECTION == 85
auto variance_of_shards(const Tensor<f32, "B M/t">& x) {
  return var<"B M/t -> B">(x);
}
#endif

// expect: vector_norm<`B M/t -> B`>: dim `M/t` is sharded, so each device sees only its shard of it; gather it first with `all_gather<
#if SECTION == 86
auto norm_of_shards(const Tensor<f32, "B M/t">& x) {
  return vector_norm<"B M/t -> B">(x);
}
#endif

// expect: all<`B M/t -> B`>: dim `M/t` is sharded, so each device sees only its shard of it; gather it first with `all_gather<
#if SECTION == 87
auto all_of_shards(const Tensor<bool_, "B M/t">& x) {
  return all<"B M/t -> B">(x);
}
#endif

// expect: diagonal<`X`, `Y`>: dim `Y/t` is sharded, so each device sees only its shard of it; gather it first with
// expect: or let it stay: `diagonal<..?Y..?, ..?X..?>` \(no traffic\)
#if SECTION == 88
auto diagonal_along_a_shard(const Tensor<f32, "X Y/t">& x) {
  return diagonal<"X", "Y">(x);
}
#endif

// expect: ulysses_attention<`L/s H -> L H/s`, `D`>: the queries `L/s H/t D` have `H/t`, but the exchange begins with `H`
#if SECTION == 89
auto ulysses_of_sharded_heads(const Tensor<f32, "L/s H/t D">& x) {
  return ulysses_attention<"L/s H -> L H/s", "D">(x, x, x);
}
#endif

// expect: ulysses_attention<`L/s/t H -> L/s H/t`, `D`>: the length, which is the first dim, is still sharded after the
#if SECTION == 90
auto ulysses_of_a_part_of_the_axes(const Tensor<f32, "L/s/t H D">& x) {
  return ulysses_attention<"L/s/t H -> L/s H/t", "D">(x, x, x);
}
#endif

// expect: stack_shards<`B/d L/s M -> P/d U W M`>: the first dim of the stack, `P/d`, lacks the axis s of dim `L/s`
#if SECTION == 91
auto stack_shards_of_one_axis(const Tensor<f32, "B/d L/s M">& x) {
  return stack_shards<"B/d L/s M -> P/d U W M">(x);
}
#endif

// expect: unstack_shards<`P/d U -> U/d`>: dim `U` would have two sizes; write another name in the stack
#if SECTION == 92
auto unstack_shards_to_one_name(const Tensor<f32, "P/d U">& x) {
  return unstack_shards<"P/d U -> U/d">(x);
}
#endif

// expect: rope<`L`, `D`>: dim `D/t` is sharded, so each device sees only its shard of it; gather it first with
#if SECTION == 93
auto rope_of_sharded_pairs(const Tensor<f32, "B/d L D/t">& x) {
  return rope<"L", "D">(x);
}
#endif

// expect: triu<`L`, `X`>: the operand `B L K` has no dim `X`
#if SECTION == 94
auto triu_without_the_dim(const Tensor<f32, "B L K">& x) {
  return triu<"L", "X">(x);
}
#endif

// expect: iota<`L K`>: write exactly one dim
#if SECTION == 95
auto iota_of_two_dims(const Mesh<"d t">& mesh) {
  return iota<"L K">(mesh, 8);
}
#endif

// expect: sequence_positions: `L/s` uses axis `s`, which the mesh `d t` does not have; correct the spec, or add the axis to
#if SECTION == 96
auto positions_over_another_mesh(const Mesh<"d t">& mesh) {
  return sequence_positions<"L/s">(mesh, 8, SequenceOrder::zigzag);
}
#endif

// expect: > of `B/d M`: tensors are not compared by an operator, whose result is one bool; write `greater\(x, y\)`, which
#if SECTION == 97
auto positive(const Tensor<f32, "B/d M">& x) {
  return where(x > 0.0, x, 0.0);
}
#endif

// expect: == of `M`: tensors are not compared by an operator, whose result is one bool; write `equal\(x, y\)`
#if SECTION == 98
bool same_elements(const Tensor<f32, "M">& a, const Tensor<f32, "M">& b) {
  return a == b;
}
#endif
