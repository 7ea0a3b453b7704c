// Wrong programs: elementwise operations, reductions, layout.
#include <optional>
#include <string>
#include <vector>

#include "shardlib/shapes.hpp"

using namespace shardlib;

auto normed(const Tensor<f32, "B/d M">& x, const Tensor<f32, "M">& scale) {
  return rms_norm<"M", bf16>(x, scale, 1e-5);
}
bool all_positive(const Tensor<f32, "M">& x) {
  return x && item(all<"M -> ">(greater(x, 0.0)));
}

// A program's own functions of the same names, which are called where the arguments are not those of the op.
namespace own {
struct Config {
  double rate;
};
auto softmax(const Tensor<f32, "B M">& x) {
  return shardlib::softmax<"M">(x);
}
auto rms_norm(const auto& x, const auto& gain) {
  return shardlib::rms_norm<"M">(x) * gain;
}
auto dropout(const auto& x, const Config& config) {
  return shardlib::dropout(x, config.rate, {1, 2});
}
Tensor<f32, "B M"> of_ones_own(const Tensor<f32, "B M">& x, const Tensor<f32, "M">& gain) {
  return dropout(softmax(rms_norm(x, gain)), Config{0.1});
}
struct Logits : Tensor<f32, "B M"> {
  using Tensor::Tensor;
};
auto operator|(const auto& x, const Config& config) {
  return dropout(x, config);
}
auto of_derived(const Logits& x, const Tensor<f32, "M">& gain) {
  return x * gain + x | Config{0.1};
}
}  // namespace own
std::string pad(const std::string& text, int width) {
  return text.substr(0, static_cast<std::size_t>(width));
}
double sum(double a, double b) {
  return a + b;
}
double item(double number) {
  return number;
}
double map(double a, double b) {
  return item(1) + a * b;
}
double of_numbers() {
  return map(2, 3) + sum(1, 2) + static_cast<double>(pad("loss", 10).size());
}

// expect: \+ of `A/t` and `A`: dim `A` of `A` is `A/t` in `A/t`, so their shards differ; take `all_gather<
auto add_shard_and_whole(const Tensor<f32, "A/t">& a, const Tensor<f32, "A">& b) {
  return a + b;
}

// expect: \+ of `A/t B` and `B/t`: `A/t B` is sharded over t \(dim `A/t`\), but `B/t` is sharded over t \(dim `B/t`\),
auto add_diagonals(const Tensor<f32, "A/t B">& a, const Tensor<f32, "B/t">& b) {
  return a + b;
}

// expect: \* of `A \+t` and `A \+t`: both are partial over t, and a product of sums is not the sum of the products
auto multiply_sums(const Tensor<f32, "A +t">& a) {
  return a * a;
}

// expect: / of `A` and `A \+t`: the divisor is partial over t, and a quotient by a sum is not the sum of the quotients
auto divide_by_a_summand(const Tensor<f32, "A">& a, const Tensor<f32, "A +t">& b) {
  return a / b;
}

// expect: \+ of `A \+t` and a constant: the operand is partial over t, and each device would count the constant again
auto add_one_per_device(const Tensor<f32, "A +t">& a) {
  return a + 1.0;
}

// expect: \+: the operands are f32 and bf16, and no dtype is promoted silently; write `cast<f32>` of the second
auto add_two_dtypes(const Tensor<f32, "A">& a, const Tensor<bf16, "A">& b) {
  return a + b;
}

// expect: - of `A B` and `B A`: the dims of the result, `A B`, are in another order in `B A`; `rearrange` one
auto subtract_transposed(const Tensor<f32, "A B">& a, const Tensor<f32, "B A">& b) {
  return a - b;
}

// expect: map: the operand `A \+t` is partial over t, and map is not linear, so it has to see the sum
auto map_a_summand(const Tensor<f32, "A +t">& a, const Tensor<f32, "A">& b) {
  return map([](auto x, auto y) { return x * x + y; }, a, b);
}

// expect: where of `A \+t` and `A`: `A \+t` is partial over t, but `A` is replicated over t, so the pending sum would
auto choose_sum_or_value(const Tensor<bool_, "A">& c, const Tensor<f32, "A +t">& a, const Tensor<f32, "A">& b) {
  return where(c, a, b);
}

// expect: where the constant is 0, `masked\(c, x\)`, which keeps x where c holds, takes a partial x
auto mask_a_sum(const Tensor<bool_, "A">& c, const Tensor<f32, "A +t">& a) {
  return where(c, a, 0.0);
}

// expect: a cast to or from integers is not linear, so it has to see the sum, not the summand of one device
auto round_a_summand(const Tensor<f32, "A +t">& a) {
  return cast<i32>(a);
}

// expect: logical_and: the operands are f32, not bool_; compare them first, e.g. `not_equal`
auto numbers_as_truth(const Tensor<f32, "A">& a) {
  return logical_and(a, a);
}

// expect: sum<`B/d L -> L`>: the result is partial over d \(summing over `B/d` sees only the shard of this device\),
auto sum_of_a_shard(const Tensor<f32, "B/d L">& x) {
  return sum<"B/d L -> L">(x);
}

// expect: max<`L V/t -> L`>: dim `V/t` is sharded, so each device sees only its shard of it; gather it first with
// expect: or take `all_reduce_max`, which sends the maxima only
auto max_of_a_shard(const Tensor<f32, "L V/t">& x) {
  return max<"L V/t -> L">(x);
}

// expect: softmax<`Klen`>: dim `Klen/t` is sharded, so each device sees only its shard of it; gather it first with
auto softmax_of_a_shard(const Tensor<f32, "Qlen Klen/t">& x) {
  return softmax<"Klen">(x);
}

// expect: rms_norm<`H`>: the operand `B/d M` has no dim `H`
auto norm_along_nothing(const Tensor<f32, "B/d M">& x) {
  return rms_norm<"H">(x);
}

// expect: cross_entropy of `B/d L V/t` and `B L`: the targets must have the dims of the logits without the last one
// expect: \(the vocabulary\); take the shard of each device with `shard<..?B L -> B/d L..?>` \(no traffic\)
auto targets_of_all(const Tensor<f32, "B/d L V/t">& logits, const Tensor<u32, "B L">& targets) {
  return cross_entropy(logits, targets);
}

// expect: rename<`L -> B`>: the operand `B L` already has a dim `B`
auto one_name_twice(const Tensor<f32, "B L">& x) {
  return rename<"L -> B">(x);
}

// expect: rearrange<`A B/t -> B A/t`>: dim `B/t` cannot become `B`: a rearrange only reorders; change the sharding
auto reshard_by_rearrange(const Tensor<f32, "A B/t">& x) {
  return rearrange<"A B/t -> B A/t">(x);
}

// expect: merge<`H D/t -> E/t`>: dim `D/t` is sharded, but axes may be on the major part `H` only; `all_gather` it
auto merge_the_minor_part(const Tensor<f32, "H D/t">& x) {
  return merge<"H D/t -> E/t">(x);
}

// expect: concat<`L, L -> N`>: dim `L/t` is sharded, so each device sees only its shard of it; gather it first
auto concat_shards(const Tensor<f32, "L/t">& a, const Tensor<f32, "L/t">& b) {
  return concat<"L, L -> N">(a, b);
}

// expect: broadcast<`M/t -> B M`>: dim `M/t` must be unchanged in the result, not `M`
auto broadcast_and_gather(const Tensor<f32, "M/t">& x) {
  return broadcast<"M/t -> B M">(x, {{"B", 8}});
}

// expect: max: the op spec is missing: write what goes in and what comes out, `max<..?A B -> result..?>\(x\)`
auto max_of_what(const Tensor<f32, "A B">& x) {
  return max(x);
}

// expect: softmax<`B/d M -> B/d M`>: this op takes the name of one dim of the operand `B/d M`, not an op spec
auto softmax_by_op_spec(const Tensor<f32, "B/d M">& x) {
  return softmax<"B/d M -> B/d M">(x);
}

// expect: - of `A \+t` and a constant: the operand is partial over t, and each device would count the constant again
auto complement_of_a_summand(const Tensor<f32, "A +t">& a) {
  return 1.0 - a;
}

// expect: map: the function does not take one number for each operand, in their order
auto map_of_too_few(const Tensor<f32, "A">& x) {
  return map([](auto a, auto b) { return a + b; }, x);
}

// expect: causal_attention<`L`, `D`>: dim `L/d` is sharded, so each device sees only its shard of it; gather it first
auto attention_of_a_shard(const Tensor<f32, "L/d H/t D">& q) {
  return causal_attention<"L", "D">(q, q, q);
}

// expect: causal_attention<`L`, `D`>: dim `K` of `B L K D` is `K/t` in `B L K/t D`, so their shards differ
auto heads_sharded_in_one(const Tensor<f32, "B L K/t D">& q, const Tensor<f32, "B L K D">& k) {
  return causal_attention<"L", "D">(q, k, k);
}

// expect: the values `B L W` must have the spec of the keys `B L D`; pad narrower values with `pad<..?W -> D..?>`, and the
// expect: result has them after `narrow<..?D -> W..?>` \(local copies\)
auto attention_to_narrower_values(const Tensor<f32, "B L D">& q, const Tensor<f32, "B L W">& v) {
  return causal_attention<"L", "D">(q, q, v);
}

// expect: causal_attention<`L`, `D`>: the keys `B Klen D` have the dim `Klen`, but the queries `B L D` do not
auto keys_under_another_name(const Tensor<f32, "B L D">& q, const Tensor<f32, "B Klen D">& k) {
  return causal_attention<"L", "D">(q, k, k);
}

// expect: causal_attention<`L`, `D`>: dim `B` of `B L` is `B/d` in `B/d L D`, so their shards differ
auto segments_of_all(const Tensor<f32, "B/d L D">& q, const Tensor<i32, "B L">& segments) {
  return causal_attention<"L", "D">(q, q, q, segments);
}

// expect: causal_attention: the operand `L D \+t` is partial over t, and causal_attention is not linear, so it has to see
auto attention_of_summands(const Tensor<f32, "L D">& q, const Tensor<f32, "L D +t">& v) {
  return causal_attention<"L", "D">(q, q, v);
}

// expect: linear_cross_entropy<`B/d M, M V/t -> B/d V/t`>: the logits must be rows over the first dim of the table, made of
auto loss_of_a_table_by_columns(const Tensor<f32, "B/d M">& x, const Tensor<f32, "M V/t">& table,
                                const Tensor<i32, "B/d">& targets) {
  return linear_cross_entropy<"B/d M, M V/t -> B/d V/t">(x, table, targets);
}

// expect: linear_cross_entropy<`B/d M, V/t M -> B/d V/t`> with targets `B`: the targets must have the dims of the logits
auto loss_of_all_targets(const Tensor<f32, "B/d M">& x, const Tensor<f32, "V/t M">& table,
                         const Tensor<i32, "B">& targets) {
  return linear_cross_entropy<"B/d M, V/t M -> B/d V/t">(x, table, targets);
}

// expect: linear_cross_entropy: the indices are f32, not i32 or u32; write `cast<i32>` of them first
auto loss_of_real_targets(const Tensor<f32, "B/d M">& x, const Tensor<f32, "V/t M">& table,
                          const Tensor<f32, "B/d">& targets) {
  return linear_cross_entropy<"B/d M, V/t M -> B/d V/t">(x, table, targets);
}

// expect: split<`Y -> Y P`>: dim `Y` is on both sides, with two sizes, and a name has one size; write another name for the part
auto part_named_as_whole(const Tensor<f32, "Y">& x) {
  return split<"Y -> Y P">(x, {{"P", 4}});
}

// expect: concat<`L, N -> L`>: the result.{1,2}s dim is longer than those of the operands, and a name has one size; give it another
auto longer_by_one_name(const Tensor<f32, "L">& a, const Tensor<f32, "N">& b) {
  return concat<"L, N -> L">(a, b);
}

// expect: stack<`S`>: the operands are stacked as they are, but `B` is not `B/d`: dim 1 is `B`, not `B/d`; take the shard
auto stack_of_two(const Tensor<f32, "B/d">& a, const Tensor<f32, "B">& b) {
  return stack<"S">(a, b);
}

// expect: transpose<`A B -> B A`>: it reverses all dims, or exchanges two; take `rearrange` with this op spec
auto transpose_to_an_order(const Tensor<f32, "A B">& x) {
  return transpose<"A B -> B A">(x);
}

// expect: transpose<`A`, `X`>: the operand `A B` has no dim `X`
auto transpose_of_missing(const Tensor<f32, "A B">& x) {
  return transpose<"A", "X">(x);
}

// expect: a tensor `f32\[B/d M\]` does not fit the declared type `f32\[M\]`
void widened(Tensor<f32, "M">& total, const Tensor<f32, "B/d M">& x) {
  total += x;
}

// expect: cumsum<`L`>: dim `L/t` is sharded, so each device sees only its shard of it; gather it first with
auto sums_of_a_shard(const Tensor<f32, "B L/t">& x) {
  return cumsum<"L">(x);
}

// expect: linear_scan<`L`>: the factors `L` must have the spec of the summands `B L`
auto scan_by_shared_factors(const Tensor<f32, "L">& a, const Tensor<f32, "B L">& b) {
  return linear_scan<"L">(a, b);
}

// expect: top_k<`V`, `K`>: dim `V/t` is sharded, so each device sees only its shard of it; gather it first with
auto largest_of_a_shard(const Tensor<f32, "B V/t">& x) {
  return top_k<"V", "K">(x, 4);
}

// expect: top_k: it does not take these arguments; write `top_k<..?V..?, ..?K..?>\(x, 4\)`
auto top_k_of_a_fraction(const Tensor<f32, "B V">& x) {
  return top_k<"V", "K">(x, 4.5).values;
}

// expect: roll: it does not take these arguments; write `roll<..?L..?>\(x, 1\)`
auto roll_by_a_fraction(const Tensor<f32, "B L">& x) {
  return roll<"L">(x, 0.5);
}

// expect: narrow: it does not take these arguments; write `narrow<..?L -> N..?>\(x, 0, 4\)`
auto range_of_a_floating_size(const Tensor<f32, "B L">& x, double share) {
  return narrow<"L -> N">(x, 0, share * 8);
}

// expect: shift: it does not take these arguments; write `shift<over<..?t..?>>\(x, 1\)`
auto shift_by_a_fraction(const Tensor<f32, "A/t">& x) {
  return shift<over<"t">>(x, 1.5F);
}

// expect: iota: it does not take these arguments; write `iota<..?L..?>\(mesh, 128\)`, whose dtype is `i32`
auto iota_of_a_floating_size(const Mesh<"d t">& mesh) {
  return iota<"L">(mesh, 128.0);
}

// expect: rope: it does not take these arguments; write `rope<..?L..?, ..?D..?>\(x, \{.base = 10000\}\)`
auto rope_from_a_fraction(const Tensor<f32, "B L D">& x, const RopeAngles& angles) {
  return rope<"L", "D">(x, angles, 2.5);
}

// expect: top_k<`V`, `V`>: the operand `B V` already has a dim `V`, and a name has one size; write another name
auto largest_by_one_name(const Tensor<f32, "B V">& x) {
  return top_k<"V", "V">(x, 4);
}

// expect: sort: the operand `V \+t` is partial over t, and sort is not linear, so it has to see the sum
auto sorted_summands(const Tensor<f32, "V +t">& x) {
  return sort<"V">(x);
}

// expect: narrow<`L -> L`>: the result.{1,2}s dim has another size, and a name has one size; give it another name than `L`
auto range_by_one_name(const Tensor<f32, "L">& x) {
  return narrow<"L -> L">(x, 0, 4);
}

// expect: pad of `L \+t` and a constant: the operand is partial over t, and each device would count the constant again
auto ones_around_summands(const Tensor<f32, "L +t">& x) {
  return pad<"L -> N">(x, 1, 1, 1.0);
}

// expect: scatter_add<`B/d M, B/d -> \[V\] M`>: the result is partial over d \(adding `B/d` sees only the shard of
auto added_on_one_device(const Tensor<f32, "B/d M">& x, const Tensor<i32, "B/d">& ids) {
  return scatter_add<"B/d M, B/d -> [V] M">(x, ids, {{"V", 8}});
}

// expect: min: the operand `B V \+t` is partial over t, and min is not linear, so it has to see the sum
auto least_of_summands(const Tensor<f32, "B V +t">& x) {
  return min<"B V +t -> B">(x);
}

// expect: softplus: the operand `A \+t` is partial over t, and softplus is not linear, so it has to see the sum
auto softplus_of_a_summand(const Tensor<f32, "A +t">& a) {
  return softplus(a);
}

// expect: pow: the operand `A \+t` is partial over t, and pow is not linear, so it has to see the sum
auto power_of_a_summand(const Tensor<f32, "A +t">& a) {
  return pow(a, 2.0);
}

// expect: mod of `A/t` and `A`: dim `A` of `A` is `A/t` in `A/t`, so their shards differ
auto rest_of_shard_and_whole(const Tensor<i32, "A/t">& a, const Tensor<i32, "A">& b) {
  return mod(a, b);
}

// expect: floor: the operand is i32, not floating; write `cast<f32>` of it first
auto floor_of_integers(const Tensor<i32, "A">& a) {
  return floor(a);
}

// expect: logsumexp<`B V/t -> B`>: dim `V/t` is sharded, so each device sees only its shard of it; gather it first with
auto log_of_the_sum_of_a_shard(const Tensor<f32, "B V/t">& x) {
  return logsumexp<"B V/t -> B">(x);
}

// expect: prod: the operand `B V \+t` is partial over t, and prod is not linear, so it has to see the sum
auto product_of_summands(const Tensor<f32, "B V +t">& x) {
  return prod<"B V +t -> B">(x);
}

// expect: any: the condition is f32, not bool_
auto any_of_numbers(const Tensor<f32, "B V">& x) {
  return any<"B V -> B">(x);
}

// expect: roll<`L`>: dim `L/t` is sharded, so each device sees only its shard of it; gather it first with
auto roll_of_a_shard(const Tensor<f32, "B L/t">& x) {
  return roll<"L">(x, 1);
}

// expect: one_hot<`V/d`>: the indices `B/d` are sharded over d \(dim `B/d`\), so `V/d` cannot be sharded over d as well
auto one_hot_over_one_axis(const Tensor<i32, "B/d">& ids) {
  return one_hot<"V/d">(ids, 8);
}

// expect: tril<`L`, `K`>: the operand `B L` has no dim `K`
auto triangle_of_one_dim(const Tensor<f32, "B L">& x) {
  return tril<"L", "K">(x);
}

// expect: cumprod: the operand `L \+t` is partial over t, and cumprod is not linear, so it has to see the sum
auto products_of_summands(const Tensor<f32, "L +t">& x) {
  return cumprod<"L">(x);
}

// expect: take_along<`V`>: dim `V/t` is sharded, so each device sees only its shard of it; gather it first with
// expect: or write `index_unreduced`, whose rows of other shards are 0
auto take_of_a_shard(const Tensor<f32, "B V/t">& x, const Tensor<i32, "B K">& ids) {
  return take_along<"V">(x, ids);
}

// expect: take_along<`V`>: the indices `B K` must have the dims of the operand `B/d V` except `V`: dim 1 is `B`, not
auto take_for_other_rows(const Tensor<f32, "B/d V">& x, const Tensor<i32, "B K">& ids) {
  return take_along<"V">(x, ids);
}

// expect: take_along<`A`>: the indices `B/d` have no dim in the place of `A`; for one element of each row write
// expect: write `index_unreduced<.{1,2}B/d \[A\], B/d -> B/d
auto values_of_actions(const Tensor<f32, "B/d A">& values, const Tensor<i32, "B/d">& actions) {
  return take_along<"A">(values, actions);
}

// expect: take_along: the indices are f32, not i32 or u32; write `cast<i32>` of them first
auto take_at_numbers(const Tensor<f32, "B V">& x, const Tensor<f32, "B K">& ids) {
  return take_along<"V">(x, ids);
}

// expect: linear_scan<`L`>: dim `L/s` is sharded, so each device sees only its shard of it; gather it first with
// expect: or write `linear_scan<..?L..?, over<..?s..?>>`, which gathers the last states only \(communicates\)
auto scan_of_a_shard(const Tensor<f32, "B L/s">& a, const Tensor<f32, "B L/s">& b) {
  return linear_scan<"L">(a, b);
}

// expect: softmax<`V`>: dim `V/t` is sharded, so each device sees only its shard of it; gather it first with
// expect: or write `softmax<..?V..?, over<..?t..?>>`, which sends maxima and sums only \(communicates\)
auto softmax_of_a_shard(const Tensor<f32, "B/d V/t">& x) {
  return softmax<"V">(x);
}

// expect: or write `log_softmax<..?V..?, over<..?t..?>>`, which sends maxima and sums only \(communicates\)
auto log_softmax_of_a_shard(const Tensor<f32, "B/d V/t">& x) {
  return log_softmax<"V">(x);
}

// expect: log_softmax<`V`, over<d>>: dim `V/t` is sharded over t, and the call names exactly these axes; write
auto log_softmax_over_another_axis(const Tensor<f32, "B/d V/t">& x) {
  return log_softmax<"V", over<"d">>(x);
}

// expect: log_softmax of `B/d V/t`: write the name of the dim along which it acts, `log_softmax<..?V..?>\(\.\.\.\)`
auto log_softmax_without_a_dim(const Tensor<f32, "B/d V/t">& x) {
  return log_softmax(x, -1);
}

// expect: or write `logsumexp<..?B/d V/t -> B/d..?, over<..?t..?>>`, which sends maxima and sums only \(communicates\)
auto logsumexp_of_a_shard(const Tensor<f32, "B/d V/t">& x) {
  return logsumexp<"B/d">(x);
}

// expect: logsumexp<`B/d V -> B/d`>: dim `V` is not sharded, so nothing would be communicated; write
auto logsumexp_over_nothing(const Tensor<f32, "B/d V">& x) {
  return logsumexp<"B/d", over<"t">>(x);
}

// expect: dim `L/s/t` is sharded over s t, and the states of all its shards are gathered; write
auto scan_over_one_axis(const Tensor<f32, "B L/s/t">& a, const Tensor<f32, "B L/s/t">& b) {
  return linear_scan<"L", over<"s">>(a, b);
}

// expect: dim `L` is not sharded, so nothing would be communicated; write `linear_scan<..?L..?>`
auto scan_over_nothing(const Tensor<f32, "B L">& a, const Tensor<f32, "B L">& b) {
  return linear_scan<"L", over<"s">>(a, b);
}

// expect: or write `causal_attention<..?L..?, ..?D..?, over<..?s..?>>`, which sends keys and values from shard to shard
auto attention_in_a_shard(const Tensor<f32, "B L/s D">& x) {
  return causal_attention<"L", "D">(x, x, x);
}

// expect: causal_attention<`L`, `D`, over<s>>: dim `L/s/t` is sharded over s t, and the keys of all its shards are seen
auto attention_over_one_axis(const Tensor<f32, "B L/s/t D">& x) {
  return causal_attention<"L", "D", over<"s">>(x, x, x);
}

// expect: dim `L` is not sharded, so nothing would be communicated; write `causal_attention<..?L..?, ..?D..?>`
auto attention_over_nothing(const Tensor<f32, "B L D">& x) {
  return causal_attention<"L", "D", over<"s">>(x, x, x);
}

// expect: causal_attention<`L`, `D`, over<s>>: dim `L` of `B L D` is `L/s` in `B L/s D`, so their shards differ
auto attention_to_a_whole_length(const Tensor<f32, "B L/s D">& q, const Tensor<f32, "B L D">& k) {
  return causal_attention<"L", "D", over<"s">>(q, k, k);
}

// expect: causal_attention<`L`, `D`, over<s>>: dim `L` of `B L` is `L/s` in `B L/s D`, so their shards differ
auto attention_in_whole_segments(const Tensor<f32, "B L/s D">& x, const Tensor<i32, "B L">& segments) {
  return causal_attention<"L", "D", over<"s">>(x, x, x, segments);
}

// expect: / of `\+d` and a number: the dividend is partial over d, and the integer quotient of each summand drops
auto half_of_each_summand(const Tensor<i32, "B/d">& x) {
  return sum<"B/d -> +d">(x) / 2;
}

// expect: / of `B/d H W` and a floating-point number: the elements are u8, so each quotient would lose its fraction;
auto images_from_zero_to_one(const Tensor<u8, "B/d H W">& images) {
  return cast<f32>(images / 255.0);
}

// expect: the elements are i32, so each quotient would lose its fraction; write `cast<f32>\(x\) / 2.0`, or `x / 2` for
auto halves(Tensor<i32, "B/d"> x) {
  x /= 2.0;
  return x;
}

// expect: the dividend is partial over d, and the integer quotient of each summand drops a remainder of its own
auto mean_of_each_summand(const Tensor<i32, "B/d">& x, const Tensor<i32, "">& n) {
  return sum<"B/d -> +d">(x) / n;
}

// expect: sin: the operand `A \+t` is partial over t, and sin is not linear, so it has to see the sum
auto sine_of_summands(const Tensor<f32, "A +t">& x) {
  return sin(x);
}

// expect: cos: the operand `A \+t` is partial over t, and cos is not linear, so it has to see the sum
auto cosine_of_summands(const Tensor<f32, "A +t">& x) {
  return cos(x);
}

// expect: erf: the operand `A \+t` is partial over t, and erf is not linear, so it has to see the sum
auto erf_of_summands(const Tensor<f32, "A +t">& x) {
  return erf(x);
}

// expect: log1p: the operand `A \+t` is partial over t, and log1p is not linear, so it has to see the sum
auto log1p_of_summands(const Tensor<f32, "A +t">& x) {
  return log1p(x);
}

// expect: expm1: the operand `A \+t` is partial over t, and expm1 is not linear, so it has to see the sum
auto expm1_of_summands(const Tensor<f32, "A +t">& x) {
  return expm1(x);
}

// expect: round: the operand `A \+t` is partial over t, and round is not linear, so it has to see the sum
auto rounded_summands(const Tensor<f32, "A +t">& x) {
  return round(x);
}

// expect: sign: the operand `A \+t` is partial over t, and sign is not linear, so it has to see the sum
auto signs_of_summands(const Tensor<f32, "A +t">& x) {
  return sign(x);
}

// expect: clamp: the operand `A \+t` is partial over t, and clamp is not linear, so it has to see the sum
auto clamped_summands(const Tensor<f32, "A +t">& x) {
  return clamp(x, 0.0, 1.0);
}

// expect: floor_divide: the operand `A \+t` is partial over t, and floor_divide is not linear, so it has to see the sum
auto quotients_of_summands(const Tensor<i32, "A +t">& x) {
  return floor_divide(x, 2.0);
}

// expect: cummax<`L`>: dim `L/t` is sharded, so each device sees only its shard of it; gather it first with `all_gather<
auto maxima_along_a_shard(const Tensor<f32, "B L/t">& x) {
  return cummax<"L">(x);
}

// expect: argsort<`V`>: dim `V/t` is sharded, so each device sees only its shard of it; gather it first with `all_gather<
auto order_of_a_shard(const Tensor<f32, "B V/t">& x) {
  return argsort<"V">(x);
}

// expect: flip<`L`>: dim `L/t` is sharded, so each device sees only its shard of it; gather it first with `all_gather<
auto reversed_shards(const Tensor<f32, "B L/t">& x) {
  return flip<"L">(x);
}

// expect: var<`B M/t -> B`>: dim `M/t` is sharded, so each device sees only its shard of it; gather it first with `all_gather<
auto variance_of_shards(const Tensor<f32, "B M/t">& x) {
  return var<"B M/t -> B">(x);
}

// expect: vector_norm<`B M/t -> B`>: dim `M/t` is sharded, so each device sees only its shard of it; gather it first with `all_gather<
auto norm_of_shards(const Tensor<f32, "B M/t">& x) {
  return vector_norm<"B M/t -> B">(x);
}

// expect: all<`B M/t -> B`>: dim `M/t` is sharded, so each device sees only its shard of it; gather it first with `all_gather<
auto all_of_shards(const Tensor<bool_, "B M/t">& x) {
  return all<"B M/t -> B">(x);
}

// expect: diagonal<`X`, `Y`>: dim `Y/t` is sharded, so each device sees only its shard of it; gather it first with
// expect: or let it stay: `diagonal<..?Y..?, ..?X..?>` \(no traffic\)
auto diagonal_along_a_shard(const Tensor<f32, "X Y/t">& x) {
  return diagonal<"X", "Y">(x);
}

// expect: ulysses_attention<`L/s H -> L H/s`, `D`>: the queries `L/s H/t D` have `H/t`, but the exchange begins with `H`
auto ulysses_of_sharded_heads(const Tensor<f32, "L/s H/t D">& x) {
  return ulysses_attention<"L/s H -> L H/s", "D">(x, x, x);
}

// expect: ulysses_attention<`L/s/t H -> L/s H/t`, `D`>: the length, which is the first dim, is still sharded after the
auto ulysses_of_a_part_of_the_axes(const Tensor<f32, "L/s/t H D">& x) {
  return ulysses_attention<"L/s/t H -> L/s H/t", "D">(x, x, x);
}

// expect: stack_shards<`B/d L/s M -> P/d U W M`>: the first dim of the stack, `P/d`, lacks the axis s of dim `L/s`
auto stack_shards_of_one_axis(const Tensor<f32, "B/d L/s M">& x) {
  return stack_shards<"B/d L/s M -> P/d U W M">(x);
}

// expect: unstack_shards<`P/d U -> U/d`>: dim `U` would have two sizes; write another name in the stack
auto unstack_shards_to_one_name(const Tensor<f32, "P/d U">& x) {
  return unstack_shards<"P/d U -> U/d">(x);
}

// expect: rope<`L`, `D`>: dim `D/t` is sharded, so each device sees only its shard of it; gather it first with
auto rope_of_sharded_pairs(const Tensor<f32, "B/d L D/t">& x) {
  return rope<"L", "D">(x);
}

// expect: triu<`L`, `X`>: the operand `B L K` has no dim `X`
auto triu_without_the_dim(const Tensor<f32, "B L K">& x) {
  return triu<"L", "X">(x);
}

// expect: iota<`L K`>: write exactly one dim
auto iota_of_two_dims(const Mesh<"d t">& mesh) {
  return iota<"L K">(mesh, 8);
}

// expect: sequence_positions: `L/s` uses axis `s`, which the mesh `d t` does not have; correct the spec, or add the axis to
auto positions_over_another_mesh(const Mesh<"d t">& mesh) {
  return sequence_positions<"L/s">(mesh, 8, SequenceOrder::zigzag);
}

// expect: > of `B/d M`: tensors are not compared by an operator, whose result is one bool; write `greater\(x, y\)`, which
auto positive(const Tensor<f32, "B/d M">& x) {
  return where(x > 0.0, x, 0.0);
}

// expect: == of `M`: tensors are not compared by an operator, whose result is one bool; write `equal\(x, y\)`
bool same_elements(const Tensor<f32, "M">& a, const Tensor<f32, "M">& b) {
  return a == b;
}

// expect: a condition on `bool_\[\]` would ask whether the tensor holds a value, not whether its elements are true; write
// expect: `item\(x\)` of a scalar, which `any` and `all` make
bool all_equal(const Tensor<f32, "M">& a, const Tensor<f32, "M">& b) {
  if (all<"M -> ">(equal(a, b))) return true;
  return false;
}

// expect: a condition on `bool_\[M\]` would ask whether the tensor holds a value, not whether its elements are true; write
auto inside(const Tensor<f32, "M">& x) {
  return greater(x, 0.0) && less(x, 1.0);
}

// expect: \[\] of `B/d M`: a device holds a shard, so a tensor has no element by number; take a part along an unsharded dim
auto first_row(const Tensor<f32, "B/d M">& x) {
  return x[0];
}

// expect: argmax<`A B V -> A`>: an index is one along one dim: leave out exactly one
auto index_of_two_dims(const Tensor<f32, "A B V">& x) {
  return argmax<"A B V -> A">(x);
}

// expect: dropout: it does not take these arguments; write `dropout\(x, 0.1, {seed, stream}\)`
auto dropout_without_a_key(const Tensor<f32, "A">& x) {
  return dropout(x, 0.1);
}

// expect: dropout: it does not take these arguments; write `dropout\(x, 0.1, {seed, stream}\)`
auto dropout_of_a_seed(const Tensor<f32, "A">& x) {
  return dropout(x, 0.1, 7);
}

// expect: softmax of `B M`: write the name of the dim along which it acts, `softmax<..?M..?>\(...\)`
auto softmax_by_number(const Tensor<f32, "B M">& x) {
  return softmax(x, -1);
}

// expect: sort of `B M`: write the name of the dim along which it acts, `sort<..?M..?>\(...\)`
auto sort_without_a_dim(const Tensor<f32, "B M">& x) {
  return sort(x);
}

// the sentence comes before what the result does not fit
// expect: dropout: it does not take these arguments; write `dropout\(x, 0.1, {seed, stream}\)`
auto twice_dropout_without_a_key(const Tensor<f32, "A">& x) {
  return dropout(x, 0.1) * 2.0 + x;
}

// expect: where of `A` and two numbers: they give the result no dtype
auto product_with_numbers(const Tensor<bool_, "A">& seen, const Tensor<f32, "A">& x) {
  return where(seen, 1.0, 0.0) * x;
}

// expect: clamp: it does not take these arguments; write `clamp\(x, low, high\)`
auto one_bound(const Tensor<f32, "A">& x) {
  return clamp(x, 1.0);
}

// expect: less: it does not take these arguments; write `greater\(x, number\)`
auto number_less_than_elements(const Tensor<f32, "A">& x) {
  return masked(less(0, x), x);
}

// expect: mod: it does not take these arguments; write `mod\(x, 8.0\)`, or of two tensors `mod\(a, b\)`
auto rest_of_a_number(const Tensor<i32, "A">& x) {
  return mod(8, x);
}

// expect: floor_divide: it does not take these arguments; write `floor_divide\(x, 2.0\)`, or of two tensors
auto quotients_of_a_number(const Tensor<i32, "A">& x) {
  return floor_divide(8.0, x);
}

// expect: linear_scan: it does not take these arguments; write `linear_scan<..?L..?>\(decay, x\)` with a tensor `decay`
auto scan_by_a_number(const Tensor<f32, "L">& x) {
  return linear_scan<"L">(0.9, x);
}

// expect: layer_norm: it does not take these arguments; write `layer_norm<..?M..?>\(x, scale, bias, 1e-5\)`
auto norm_without_a_bias(const Tensor<f32, "B M">& x, const Tensor<f32, "M">& scale) {
  return layer_norm<"M">(x, scale);
}

// expect: rms_norm<`M`>: the scale is `M/t/d`, not `M`; gather it with `all_gather<..?M/t/d -> M..?>` \(communicates\)
auto norm_with_a_sharded_scale(const Tensor<f32, "B/d M">& x, const Tensor<f32, "M/t/d">& scale) {
  return rms_norm<"M">(x, scale);
}

// expect: layer_norm<`M`>: the bias is `M \+t`, not `M`; take `all_reduce<..?M \+t -> M..?, f32>` \(communicates\)
auto norm_with_a_pending_bias(const Tensor<bf16, "B/d M">& x, const Tensor<bf16, "M">& scale, const Tensor<bf16, "M +t">& bias) {
  return layer_norm<"M">(x, scale, bias);
}

// expect: rms_norm<`M`>: the scale is `N`, not `M`; if both names mean one size, `rename<..?N -> M..?>` \(free\)
auto norm_with_a_scale_of_another_dim(const Tensor<f32, "B/d M">& x, const Tensor<f32, "N">& scale) {
  return rms_norm<"M">(x, scale);
}

// expect: layer_norm<`M`>: the scale is `B/d M`, not `M`; along other dims write `layer_norm<..?M..?>\(x\) \* scale \+ bias`
auto norm_with_a_scale_of_more_dims(const Tensor<f32, "B/d M">& x, const Tensor<f32, "M">& bias) {
  return layer_norm<"M">(x, x, bias);
}

// expect: layer_norm: the operand `B M \+t` is partial over t, and layer_norm is not linear
auto norm_of_a_pending_sum(const Tensor<f32, "B M +t">& x, const Tensor<f32, "M">& scale) {
  return layer_norm<"M">(x, scale, scale);
}

// expect: rms_norm<`M`>: dim `M/t` is sharded, so each device sees only its shard of it
auto norm_of_shards_with_a_scale(const Tensor<f32, "B M/t">& x, const Tensor<f32, "M/t">& scale) {
  return rms_norm<"M">(x, scale);
}

// expect: sum<`B/d X/t -> X`>: kept dim `X/t` must be unchanged in the result, not `X`; the spec names the dims of the result, not those to reduce over
auto sum_of_the_dims_to_sum(const Tensor<f32, "B/d X/t">& x) {
  return sum<"X">(x);
}

// expect: sum: the op spec is missing: write what goes in and what comes out, `sum<..?A B -> result..?>\(x\)`
auto sum_by_number(const Tensor<f32, "A B">& x) {
  return sum(x, 1);
}

// expect: mean: the op spec is missing: write what goes in and what comes out, `mean<..?A B -> result..?>\(x\)`
auto mean_by_number(const Tensor<f32, "A B">& x) {
  return mean(x, -1);
}

// expect: stack: it does not take these arguments; write `stack<..?layer..?>\(a, b\)`
auto stack_without_a_dim(const Tensor<f32, "A">& x) {
  return stack(x, x);
}

// expect: concat: it does not take these arguments; write `concat<..?Past, L -> Klen..?>\(a, b\)`
auto concat_without_a_dim(const Tensor<f32, "A">& x) {
  return concat(x, x);
}

// expect: map: it does not take these arguments; write `map\(\[k\]\(auto v\) { return k \* v; }, x\)`
auto map_with_the_tensor_first(const Tensor<f32, "A">& x) {
  return map(x, [](auto v) { return v * v; });
}

// expect: map: it does not take these arguments; write `map\(\[k\]\(auto v\) { return k \* v; }, x\)`
auto map_of_a_number(const Tensor<f32, "A">& x) {
  return map([](auto v, auto k) { return v * k; }, x, 2.0);
}

// expect: item: it does not take this argument; write `item\(metrics.loss\)`
struct Metrics {
  Tensor<f32, ""> loss;
};
auto item_of_a_struct(const Metrics& metrics) {
  return item(metrics);
}

// an axis number would be a bool, which says in which order
// expect: sort: it does not take these arguments; write `sort<..?V..?>\(x\)`, or with the largest first
auto sort_by_name_and_number(const Tensor<f32, "B V">& x) {
  return sort<"V">(x, -1);
}

// expect: cumsum: it does not take these arguments; write `cumsum<..?L..?>\(x\)`, or from the end `cumsum<..?L..?>\(x, true\)`
auto cumsum_by_name_and_number(const Tensor<f32, "B L">& x) {
  return cumsum<"L">(x, 1);
}

// expect: linear_scan: it does not take these arguments; write `linear_scan<..?L..?>\(decay, x\)` with a tensor `decay`
auto scan_from_a_state(const Tensor<f32, "B L">& x) {
  return linear_scan<"L">(x, x, 0.0);
}

// a size would be the epsilon
// expect: layer_norm: it does not take these arguments; write `layer_norm<..?M..?>\(x, scale, bias, 1e-5\)`
auto norm_of_a_size(const Tensor<f32, "B M">& x) {
  return layer_norm<"M">(x, 768);
}

// expect: rms_norm: it does not take these arguments; write `rms_norm<..?M..?>\(x, scale, 1e-6\)`
auto norm_by_number(const Tensor<f32, "B M">& x) {
  return rms_norm<"M">(x, -1);
}

// expect: softmax: it does not take these arguments; write `softmax<..?M..?>\(x\)`
auto softmax_by_name_and_number(const Tensor<f32, "B M">& x) {
  return softmax<"M">(x, -1);
}

// `true` would be a scale of 1
// expect: causal_attention: it does not take these arguments; write `causal_attention<..?L..?, ..?D..?>\(q, k, v\)`, where L is
auto attention_that_is_causal(const Tensor<f32, "B L D">& x) {
  return causal_attention<"L", "D">(x, x, x, true);
}

// `1 / 8` is 0
// expect: with segments and a scale, a floating-point number, `causal_attention<..?L..?, ..?D..?>\(q, k, v, segments, 0.125\)`
auto attention_of_a_scale_that_is_an_integer(const Tensor<f32, "B L D">& x) {
  return causal_attention<"L", "D">(x, x, x, 1 / 8);
}

// expect: with segments and a scale, a floating-point number, `causal_attention<..?L..?, ..?D..?>\(q, k, v, segments, 0.125\)`
auto attention_of_segments_and_a_width(const Tensor<f32, "B L D">& x, const Tensor<i32, "B L">& segments) {
  return causal_attention<"L", "D">(x, x, x, segments, 64);
}

// expect: or with a scale, a floating-point number, `ulysses_attention<..?L/s H -> L H/s..?, ..?D..?>\(q, k, v, 0.125\)`
auto ulysses_of_a_width(const Tensor<f32, "B L/s H D">& x) {
  return ulysses_attention<"L/s H -> L H/s", "D">(x, x, x, 64);
}

// expect: causal_attention: it does not take these arguments; write `causal_attention<..?L..?, ..?D..?>\(q, k, v\)`, where L is
auto attention_along_one_dim(const Tensor<f32, "B L D">& x) {
  return causal_attention<"L">(x, x, x);
}

// expect: ulysses_attention: it does not take these arguments; write `ulysses_attention<..?L/s H -> L H/s..?, ..?D..?>\(q, k, v\)`
auto ulysses_without_the_width(const Tensor<f32, "B L/s H D">& x) {
  return ulysses_attention<"L/s H -> L H/s">(x, x, x);
}

// expect: rope: it does not take these arguments; write `rope<..?L..?, ..?D..?>\(x, {.base = 10000}\)`, where L is the dim of
auto rope_along_one_dim(const Tensor<f32, "B L D">& x) {
  return rope<"L">(x);
}

// expect: diagonal: it does not take these arguments; write `diagonal<..?X..?, ..?Y..?>\(x\)`
auto diagonal_of_all_dims(const Tensor<f32, "A B">& x) {
  return diagonal(x);
}

// expect: triu: it does not take these arguments; write `triu<..?Qlen..?, ..?Klen..?>\(x\)`
auto triangle_without_dims(const Tensor<f32, "A B">& x) {
  return triu(x, 1);
}

// expect: sequence_positions: it does not take these arguments; write `sequence_positions<..?L/s..?>\(mesh, 128, SequenceOrder
auto positions_without_order(const Mesh<"s">& mesh) {
  return sequence_positions<"L/s">(mesh, 128);
}

// expect: max: it does not take these arguments; write `max<..?A B -> A..?>\(x\)`, or for the larger of two elements `maximum\(
auto max_of_two(const Tensor<f32, "B M">& x) {
  return max(x, 0.0);
}

// expect: sum: it does not take these arguments; write `sum<..?A B -> A..?>\(x\)`
auto sum_that_keeps_dims(const Tensor<f32, "A B">& x) {
  return sum<"A B -> A">(x, true);
}

// expect: iota: it does not take these arguments; write `iota<..?L..?>\(mesh, 128\)`, whose dtype is `i32`
auto iota_without_a_size(const Mesh<"d">& mesh) {
  return iota<"L">(mesh);
}

// expect: iota: it does not take these arguments; write `iota<..?L..?>\(mesh, 128\)`, or of another dtype `cast<f32>\(iota
auto iota_of_a_dtype(const Mesh<"d">& mesh) {
  return iota<f32, "L">(mesh, 8);
}

// expect: rearrange: it does not take these arguments; write `rearrange<..?A B -> B A..?>\(x\)`
auto op_spec_as_an_argument(const Tensor<f32, "A B">& x) {
  return rearrange(x, "A B -> B A");
}

// expect: narrow: it does not take these arguments; write `narrow<..?L -> N..?>\(x, 0, 4\)`
auto range_without_its_begin(const Tensor<f32, "L">& x) {
  return narrow<"L -> N">(x, 4);
}

// expect: cast: it does not take these arguments; write `cast<bf16>\(x\)`
auto cast_to_what(const Tensor<f32, "L">& x) {
  return cast(x);
}

// expect: cast: it does not take this argument; write `cast<f32>\(x\)`, where f32 is one of f32, bf16, f64, i32, u32, u8 and
auto cast_to_long(const Tensor<f32, "L">& x) {
  return cast<long>(x);
}

// expect: masked: it does not take these arguments; write `masked\(c, x\)`, or with another number than 0 where c is false
auto masked_with_a_number(const Tensor<bool_, "L">& c, const Tensor<f32, "L">& x) {
  return masked(c, x, -1e9);
}

// expect: & of `L`: tensors have no such operator; write `logical_and\(x, y\)`
auto both_masks(const Tensor<bool_, "L">& a, const Tensor<bool_, "L">& b) {
  return a & b;
}

// expect: \+ of `B M`: the other operand, `std::vector<float.*`, is neither a tensor nor a number; `place` values of the host
auto sum_with_a_vector(const Tensor<f32, "B M">& x, const std::vector<float>& y) {
  return x + y;
}

// expect: \* of `B M`: the other operand, `std::optional<.*`, is neither a tensor nor a number; `place` values of the host on
// expect: take the value of what may be empty, `\*y`
auto product_with_an_optional(const std::optional<Tensor<f32, "M">>& scale, const Tensor<f32, "B M">& x) {
  return scale * x;
}

// 0 would be a null pointer
// expect: size of `B/d M`: a dim has a name and no number; write `size\(..?B..?\)`
auto size_by_number(const Tensor<f32, "B/d M">& x) {
  return x.size(0);
}

// expect: size of `B/d M`: a dim has a name and no number; write `size\(..?B..?\)`
auto size_of_all(const Tensor<f32, "B/d M">& x) {
  return x.size();
}

// expect: axis_index of `d t`: an axis has a name and no number; write `axis_index\(..?d..?\)`
auto index_by_number(const Mesh<"d t">& mesh) {
  return mesh.axis_index(0);
}

// expect: softmax<`axis -1`>: this op takes the name of one dim of the operand `B/d M`, not an op spec
auto softmax_along_a_number(const Tensor<f32, "B/d M">& x) {
  return shardlib::softmax<-1>(x);
}

// expect: argmax<`B/d M -> axis 1`>: dim `axis` of the result is not a dim of the operand; the spec names the dims of the result, not those to reduce over
auto argmax_along_a_number(const Tensor<f32, "B/d M">& x) {
  return argmax<1>(x);
}

// expect: split: it does not take these arguments; write `split<..?E -> H D..?>\(x, \{\{..?D..?, 64\}\}\)`
auto split_without_an_op_spec(const Tensor<f32, "B/d M">& x) {
  return split(x, {{"H", 2}});
}

// expect: broadcast: it does not take these arguments; write `broadcast<..?M -> B M..?>\(x, \{\{..?B..?, 8\}\}\)`
auto broadcast_without_an_op_spec(const Tensor<f32, "B/d M">& x) {
  return broadcast(x, {{"K", 2}});
}
