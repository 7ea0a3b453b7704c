// Wrong programs: einsums of an operand that gathers, or with a result that scatters.
#include "shardlib/shapes.hpp"

using namespace shardlib;

auto column_parallel(const Tensor<bf16, "B/d L/t M">& x, const Tensor<bf16, "M F/t">& w) {
  return einsum_unreduced<"B/d L M, M F/t -> B/d L F/t">(gathering<over<"t">>(x), w);
}
auto row_parallel(const Tensor<bf16, "B/d L F/t">& x, const Tensor<bf16, "F/t M">& w) {
  return einsum_scatter<"B/d L F/t, F/t M -> B/d L/t M", f32>(x, w);
}
auto fully_sharded(const Tensor<f32, "B/d L M/t">& x, const Tensor<f32, "M/t/d F">& w) {
  return einsum<"B/d L M/t, M/t F -> B/d L F/t">(x, gathering<"M/t F">(w));
}

// expect: a Gathering of `L/t M` is not a tensor `L M`: only an einsum takes its shards as they arrive; give it to
// expect: or gather all of it with `all_gather<..?L/t M -> L M..?>` \(communicates\)
auto gathering_as_a_tensor(const Tensor<f32, "L/t M">& x) {
  const Tensor<f32, "L M"> y = gathering<over<"t">>(x);
  return y;
}

// expect: a Gathering of `L/t M` is not a tensor `L M`: only an einsum takes its shards as they arrive; give it to
auto op_of_a_gathering(const Tensor<f32, "L/t M">& x) {
  return relu(gathering<over<"t">>(x));
}

// expect: a Gathering of `L/t M` is not a tensor `L M`: only an einsum takes its shards as they arrive; give it to
auto bias_of_a_gathering(const Tensor<f32, "L/t M">& x, const Tensor<f32, "M F">& w, const Tensor<f32, "F">& bias) {
  return einsum_bias_gelu<"L M, M F -> L F">(gathering<over<"t">>(x), w, bias);
}

// expect: gathering<`A/t B/d -> A B`>: a product takes the shards of one dim over one axis, not those of `A` over t and
// expect: `B` over d; take `all_gather` for all but one of them before
auto two_gathered_dims(const Tensor<f32, "A/t B/d">& x) {
  return gathering<"A B">(x);
}

// expect: gathering<`A/t B -> A B/d`>: dim `B` is not sharded over d, and a gather adds no sharding
auto gathering_that_shards(const Tensor<f32, "A/t B">& x) {
  return gathering<"A B/d">(x);
}

// expect: einsum_unreduced<`L M, M F/t -> L F`>: dim `F/t` cannot become `F` in the result, as nothing moves between
auto result_of_the_wrong_shard(const Tensor<f32, "L/t M">& x, const Tensor<f32, "M F/t">& w) {
  return einsum_unreduced<"L M, M F/t -> L F">(gathering<over<"t">>(x), w);
}

// expect: einsum_unreduced<`L M, M F -> L F`>: the second operand `M F` is replicated over t, so all devices along t would
// expect: multiply the same shards, each in an order of its own; shard a dim of it over t, or take `all_gather` in place of
auto the_same_on_all_devices(const Tensor<f32, "L/t M">& x, const Tensor<f32, "M F">& w) {
  return einsum_unreduced<"L M, M F -> L F">(gathering<over<"t">>(x), w);
}

// expect: einsum_unreduced<`L M K, M F/t -> L F/t`>: dim `K` is in the first operand alone and summed
auto summed_alone(const Tensor<f32, "L/t M K">& x, const Tensor<f32, "M F/t">& w) {
  return einsum_unreduced<"L M K, M F/t -> L F/t">(gathering<over<"t">>(x), w);
}

// expect: einsum_scatter<`L F/t, F/t M -> L M`>: each device..?s products are `L M \+t`, and no `reduce_scatter` turns that
// expect: into `L M`; write `einsum_unreduced`, and then each collective
auto nothing_scattered(const Tensor<f32, "L F/t">& x, const Tensor<f32, "F/t M">& w) {
  return einsum_scatter<"L F/t, F/t M -> L M">(x, w);
}

// expect: the first operand is partial over t, and its cotangent, which is one value on all of them, would be added in
auto a_pending_sum(const Tensor<f32, "L F +t">& x, const Tensor<f32, "F M">& w) {
  return einsum_scatter<"L F +t, F M -> L/t M">(x, w);
}

// expect: the products of one dim are scattered over one axis, not those of `L` over d and `M` over t
auto two_scattered_dims(const Tensor<f32, "L F/t/d">& x, const Tensor<f32, "F/t/d M">& w) {
  return einsum_scatter<"L F/t/d, F/t/d M -> L/d M/t">(x, w);
}

// expect: einsum_scatter: bf16 is not summed in bf16; write `einsum_scatter<.*, f32>`
auto sum_without_a_dtype(const Tensor<bf16, "L F/t">& x, const Tensor<bf16, "F/t M">& w) {
  return einsum_scatter<"L F/t, F/t M -> L/t M">(x, w);
}

// expect: gathering: the op spec is missing
auto no_op_spec(const Tensor<f32, "L/t M">& x) {
  return gathering(x);
}
