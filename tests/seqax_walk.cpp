// A walk through one training step of seqax's model, types only: FSDP over d, tensor parallelism over t, the residual
// stream sharded M/t. Each step says the type of its result, what its backward pass looks like, and at least one wrong
// neighbor that must not compile. There is nothing to run: this file is tested by being compiled.
//
//   B batch  L sequence  M model  Q queries per key/value head  K key/value heads  D head  F feed-forward  V vocabulary
#include <type_traits>
#include <utility>

#include "shardlib/shapes.hpp"

namespace shardlib::seqax {

template <Spec S>
Tensor<f32, S> x();  // a tensor of that spec, for use in decltype
template <class D, Spec S>
Tensor<D, S> ids();

/// `OP(result, expression)`: the expression has the type Tensor<f32, result>.
#define OP(result, ...) static_assert(std::is_same_v<decltype(__VA_ARGS__), Tensor<f32, result>>)
/// `DUAL(ct, primal)`: the cotangent of `primal` is of spec `ct`.
#define DUAL(ct, primal) static_assert(std::is_same_v<Dual<Tensor<f32, primal>, "d t">, Tensor<f32, ct>>)

using Mesh2 = Mesh<"d t">;

// ---- weights, all fully sharded at rest ----------------------------------------------------------------------------

struct Layer {
  Tensor<f32, "M/t/d"> ln1, ln2;
  Tensor<f32, "M/d Q K/t D"> w_q;
  Tensor<f32, "M/d K/t D"> w_k, w_v;
  Tensor<f32, "M/d Q K/t D"> w_o;
  Tensor<f32, "M/d F/t"> w_gate, w_up, w_down;
};
struct Model {
  Tensor<f32, "V/t M/d"> embed, unembed;
  Array<"layers", Layer> layers;
  Tensor<f32, "M/t/d"> final_layer_norm;
};
static_assert(fully_sharded<Mesh2, Model>);
static_assert(std::is_same_v<gradient_t<Mesh2, Model>, Model>);  // each leaf is its own dual
DUAL("V/t M/d", "V/t M/d");
DUAL("M/t/d", "M/t/d");
DUAL("M/d Q K/t D", "M/d Q K/t D");
static_assert(!legal<rules::fully_sharded, Spec("d t"), Spec("M/d F")>);

// ---- embedding -----------------------------------------------------------------------------------------------------

OP("V/t M", all_gather<"V/t M/d -> V/t M">(x<"V/t M/d">()));
DUAL("V/t M +d", "V/t M");
OP("V/t M/d", reduce_scatter<"V/t M +d -> V/t M/d">(x<"V/t M +d">()));  // backward
static_assert(!legal<rules::all_gather, OpSpec("V/t M/d -> V/t M"), Spec("V/t M")>);
static_assert(!legal<rules::all_reduce, OpSpec("V/t M -> V/t M"), Spec("V/t M")>);

OP("B/d L M +t", index_unreduced<"[V/t] M, B/d L -> B/d L M +t">(x<"V/t M">(), ids<u32, "B/d L">()));
DUAL("B/d L M", "B/d L M +t");
OP("V/t M +d", einsum_unreduced<"B/d L M, B/d L V/t -> V/t M +d">(x<"B/d L M">(), x<"B/d L V/t">()));  // scatter-add
static_assert(!legal<rules::index, OpSpec("[V/t] M, B/d L -> B/d L M"), Spec("V/t M"), Spec("B/d L")>);
static_assert(!legal<rules::index, OpSpec("[V/t] M/d, B/d L -> B/d L M/d +t"), Spec("V/t M/d"), Spec("B/d L")>);
static_assert(!legal<rules::index, OpSpec("[V/t] M, B/t L -> B/t L M +t"), Spec("V/t M"), Spec("B/t L")>);
static_assert(!legal<rules::einsum, OpSpec("B/d L M, B/d L V/t -> V/t M"), Spec("B/d L M"), Spec("B/d L V/t")>);

OP("B/d L M/t", reduce_scatter<"B/d L M +t -> B/d L M/t">(x<"B/d L M +t">()));
DUAL("B/d L M/t", "B/d L M/t");
OP("B/d L M", all_gather<"B/d L M/t -> B/d L M">(x<"B/d L M/t">()));  // backward
static_assert(!legal<rules::shard, OpSpec("B/d L M +t -> B/d L M/t"), Spec("B/d L M +t")>);
static_assert(!legal<rules::reduce_scatter, OpSpec("B/d L M -> B/d L M/t"), Spec("B/d L M")>);
static_assert(!legal<rules::reduce_scatter, OpSpec("B/d L M +t -> B/d L M/t"), Spec("B/d L M/t")>);

// ---- pre-attention norm --------------------------------------------------------------------------------------------

OP("M", all_gather<"M/t/d -> M">(x<"M/t/d">()));
DUAL("M +d +t", "M");
OP("M/t/d", reduce_scatter<"M +d +t -> M/t/d">(x<"M +d +t">()));  // backward, one collective over both axes
static_assert(!legal<rules::all_gather, OpSpec("M/t/d -> M"), Spec("M/d/t")>);  // seqax's final_layer_norm
static_assert(!legal<rules::all_gather, OpSpec("M/t/d -> M/d"), Spec("M/t/d")>);
static_assert(!legal<rules::reduce_scatter, OpSpec("M +d -> M/t/d"), Spec("M +d")>);

OP("B/d L M", all_gather<"B/d L M/t -> B/d L M">(x<"B/d L M/t">()));
DUAL("B/d L M +t", "B/d L M");
OP("B/d L M/t", reduce_scatter<"B/d L M +t -> B/d L M/t">(x<"B/d L M +t">()));  // backward

OP("B/d L M", rms_norm<"M">(x<"B/d L M">()));
static_assert(
    !legal<rules::along, OpName("rms_norm"), DimName("M"), Spec("B/d L M/t")>);  // a shard's norm is not the norm
static_assert(!legal<rules::along, OpName("rms_norm"), DimName("M"), Spec("B/d L M +t")>);  // nor is a summand's
OP("B/d L M +t", x<"B/d L M +t">() * x<"B/d L M">());                                       // backward: ct * derivative

OP("B/d L M", x<"B/d L M">() * x<"M">());                                // the gain, broadcast by name
OP("B/d L M +t", x<"B/d L M +t">() * x<"B/d L M">());                    // backward to the gain: ct * normed,
OP("M +d +t", sum<"B/d L M +t -> M +d +t">(x<"B/d L M +t">()));          // summed over what the gain lacks
static_assert(!legal<rules::multiply, Spec("B/d L M"), Spec("M/t/d")>);  // not gathered
static_assert(
    !legal<rules::sum, OpSpec("B/d L M +t -> M +t"), Spec("B/d L M +t")>);  // the forgotten sum over the batch

// ---- queries, keys, values -----------------------------------------------------------------------------------------

OP("M Q K/t D", all_gather<"M/d Q K/t D -> M Q K/t D">(x<"M/d Q K/t D">()));
DUAL("M Q K/t D +d", "M Q K/t D");
OP("M/d Q K/t D", reduce_scatter<"M Q K/t D +d -> M/d Q K/t D">(x<"M Q K/t D +d">()));  // backward

OP("B/d L Q K/t D", einsum_unreduced<"B/d L M, M Q K/t D -> B/d L Q K/t D">(x<"B/d L M">(), x<"M Q K/t D">()));
DUAL("B/d L Q K/t D", "B/d L Q K/t D");
OP("B/d L M +t",  // backward to the activations: a contraction over K/t
   einsum_unreduced<"B/d L Q K/t D, M Q K/t D -> B/d L M +t">(x<"B/d L Q K/t D">(), x<"M Q K/t D">()));
OP("M Q K/t D +d",  // backward to the weights: a contraction over B/d
   einsum_unreduced<"B/d L Q K/t D, B/d L M -> M Q K/t D +d">(x<"B/d L Q K/t D">(), x<"B/d L M">()));
static_assert(!legal<rules::einsum, OpSpec("B/d L M, M/d Q K/t D -> B/d L Q K/t D"), Spec("B/d L M"),
                     Spec("M/d Q K/t D")>);  // weights not gathered
static_assert(!legal<rules::einsum, OpSpec("B/d L M/t, M Q K/t D -> B/d L Q K/t D"), Spec("B/d L M/t"),
                     Spec("M Q K/t D")>);  // activations not gathered
static_assert(!legal<rules::einsum, OpSpec("B/d L M, M Q K/t D -> B/d L Q K/t D +t"), Spec("B/d L M"),
                     Spec("M Q K/t D")>);  // nothing was contracted over t
static_assert(
    !legal<rules::einsum, OpSpec("B/d L Q K/t D, M Q K/t D -> B/d L M"), Spec("B/d L Q K/t D"), Spec("M Q K/t D")>);
static_assert(!legal<rules::einsum, OpSpec("B/d L Q K/t D, B/d L M -> M Q K/t D"), Spec("B/d L Q K/t D"),
                     Spec("B/d L M")>);  // torchtitan #1805: a gradient not summed over the data axis

OP("B/d L K/t D", einsum_unreduced<"B/d L M, M K/t D -> B/d L K/t D">(x<"B/d L M">(), x<"M K/t D">()));
OP("B/d L M +t", x<"B/d L M +t">() + x<"B/d L M +t">());  // backward: q, k and v send their cotangents to one x
static_assert(!legal<rules::add, OpName("+"), Spec("B/d L M +t"), Spec("B/d L M")>);

OP("B/d L Q K/t D", rope<"L", "D">(x<"B/d L Q K/t D">()));
static_assert(
    !legal<rules::rope, DimName("L"), DimName("K"), Spec("B/d L Q K/t D")>);  // turns among heads that lie elsewhere
static_assert(!legal<rules::rope, DimName("Qlen"), DimName("D"), Spec("B/d L Q K/t D")>);

OP("B/d Qlen Q K/t D", rename<"L -> Qlen">(x<"B/d L Q K/t D">()));
OP("B/d Klen K/t D", rename<"L -> Klen">(x<"B/d L K/t D">()));
static_assert(!legal<rules::rename, OpSpec("L -> K"), Spec("B/d L K/t D")>);

// ---- attention -----------------------------------------------------------------------------------------------------

OP("B/d Qlen Klen Q K/t",
   einsum_unreduced<"B/d Qlen Q K/t D, B/d Klen K/t D -> B/d Qlen Klen Q K/t">(x<"B/d Qlen Q K/t D">(),
                                                                               x<"B/d Klen K/t D">()));
DUAL("B/d Qlen Klen Q K/t", "B/d Qlen Klen Q K/t");
OP("B/d Qlen Q K/t D", einsum_unreduced<"B/d Qlen Klen Q K/t, B/d Klen K/t D -> B/d Qlen Q K/t D">(
                           x<"B/d Qlen Klen Q K/t">(), x<"B/d Klen K/t D">()));  // backward to q
OP("B/d Klen K/t D", einsum_unreduced<"B/d Qlen Klen Q K/t, B/d Qlen Q K/t D -> B/d Klen K/t D">(
                         x<"B/d Qlen Klen Q K/t">(), x<"B/d Qlen Q K/t D">()));  // backward to k
static_assert(!legal<rules::einsum, OpSpec("B/d Qlen Q K/t D, B/d Klen K/t D -> B/d Qlen Klen Q K/t"),
                     Spec("B/d Qlen Q K/t D"), Spec("B/d L K/t D")>);  // k still has the name L
static_assert(!legal<rules::einsum, OpSpec("B/d Qlen Q K/t D, B/d Klen K D -> B/d Qlen Klen Q K/t"),
                     Spec("B/d Qlen Q K/t D"), Spec("B/d Klen K D")>);  // heads sharded in one operand only

OP("B/d Qlen Klen Q K/t", x<"B/d Qlen Klen Q K/t">() * 0.125);
static_assert(std::is_same_v<decltype(causal_mask<"Qlen Klen">(Mesh2{}, 128, 128)), Tensor<bool_, "Qlen Klen">>);
static_assert(
    std::is_same_v<decltype(equal(rename<"L -> Qlen">(ids<u32, "B/d L">()), rename<"L -> Klen">(ids<u32, "B/d L">()))),
                   Tensor<bool_, "B/d Qlen Klen">>);
static_assert(std::is_same_v<decltype(logical_and(ids<bool_, "Qlen Klen">(), ids<bool_, "B/d Qlen Klen">())),
                             Tensor<bool_, "B/d Qlen Klen">>);
OP("B/d Qlen Klen Q K/t", where(ids<bool_, "B/d Qlen Klen">(), x<"B/d Qlen Klen Q K/t">(), -1e10));
OP("B/d Qlen Klen Q K/t", masked(ids<bool_, "B/d Qlen Klen">(), x<"B/d Qlen Klen Q K/t">()));  // backward
static_assert(!legal<rules::create, OpName("causal_mask"), Spec("d t"), Spec("Qlen")>);
static_assert(!legal<rules::map2, OpName("equal"), Spec("B/d Qlen"), Spec("B Klen")>);
static_assert(!legal<rules::map2, OpName("where"), Spec("B/d Qlen Klen Q K/t"), Spec("B Qlen Klen")>);

OP("B/d Qlen Klen Q K/t", softmax<"Klen">(x<"B/d Qlen Klen Q K/t">()));
static_assert(!legal<rules::along, OpName("softmax"), DimName("K"), Spec("B/d Qlen Klen Q K/t")>);
static_assert(!legal<rules::along, OpName("softmax"), DimName("L"), Spec("B/d Qlen Klen Q K/t")>);

OP("B/d Qlen Q K/t D",
   einsum_unreduced<"B/d Qlen Klen Q K/t, B/d Klen K/t D -> B/d Qlen Q K/t D">(x<"B/d Qlen Klen Q K/t">(),
                                                                               x<"B/d Klen K/t D">()));
OP("B/d Qlen Klen Q K/t", einsum_unreduced<"B/d Qlen Q K/t D, B/d Klen K/t D -> B/d Qlen Klen Q K/t">(
                              x<"B/d Qlen Q K/t D">(), x<"B/d Klen K/t D">()));  // backward to the probabilities
OP("B/d Klen K/t D", einsum_unreduced<"B/d Qlen Q K/t D, B/d Qlen Klen Q K/t -> B/d Klen K/t D">(
                         x<"B/d Qlen Q K/t D">(), x<"B/d Qlen Klen Q K/t">()));  // backward to v
OP("B/d L Q K/t D", causal_attention<"L", "D">(x<"B/d L Q K/t D">(), x<"B/d L K/t D">(), x<"B/d L K/t D">(),
                                               ids<u32, "B/d L">()));  // all of the above in one op
static_assert(!legal<rules::causal_attention, DimName("L"), DimName("D"), Spec("B/d L Q K/t D"), Spec("B/d L K D"),
                     Spec("B/d L K D")>);  // heads sharded in one operand only

OP("B/d Qlen M +t",
   einsum_unreduced<"B/d Qlen Q K/t D, M Q K/t D -> B/d Qlen M +t">(x<"B/d Qlen Q K/t D">(), x<"M Q K/t D">()));
DUAL("B/d Qlen M", "B/d Qlen M +t");
OP("B/d Qlen Q K/t D", einsum_unreduced<"B/d Qlen M, M Q K/t D -> B/d Qlen Q K/t D">(x<"B/d Qlen M">(),
                                                                                     x<"M Q K/t D">()));  // backward
OP("M Q K/t D +d",
   einsum_unreduced<"B/d Qlen M, B/d Qlen Q K/t D -> M Q K/t D +d">(x<"B/d Qlen M">(), x<"B/d Qlen Q K/t D">()));
static_assert(!legal<rules::einsum, OpSpec("B/d Qlen Q K/t D, M Q K/t D -> B/d Qlen M"), Spec("B/d Qlen Q K/t D"),
                     Spec("M Q K/t D")>);  // torchtitan #3412: a partial value labeled replicated

OP("B/d L M +t", rename<"Qlen -> L">(x<"B/d Qlen M +t">()));
OP("B/d L M/t", reduce_scatter<"B/d L M +t -> B/d L M/t">(x<"B/d L M +t">()));
OP("B/d L M/t", x<"B/d L M/t">() + x<"B/d L M/t">());                                   // the residual
static_assert(!legal<rules::add, OpName("+"), Spec("B/d L M/t"), Spec("B/d L M +t")>);  // before the reduce_scatter
static_assert(!legal<rules::add, OpName("+"), Spec("B/d L M +t"), Spec("M")>);  // torchtitan #2106: a bias per device
static_assert(!legal<rules::map1, OpName("gelu"), Spec("B/d L M +t")>);         // pytorch #163193

// ---- feed-forward --------------------------------------------------------------------------------------------------

OP("M F/t", all_gather<"M/d F/t -> M F/t">(x<"M/d F/t">()));
OP("M/d F/t", reduce_scatter<"M F/t +d -> M/d F/t">(x<"M F/t +d">()));  // backward
static_assert(!legal<rules::all_gather, OpSpec("M/d F/t -> M F"), Spec("F/t M/d")>);

OP("B/d L F/t", einsum_unreduced<"B/d L M, M F/t -> B/d L F/t">(x<"B/d L M">(), x<"M F/t">()));
OP("B/d L M +t", einsum_unreduced<"B/d L F/t, M F/t -> B/d L M +t">(x<"B/d L F/t">(), x<"M F/t">()));  // backward
OP("M F/t +d", einsum_unreduced<"B/d L F/t, B/d L M -> M F/t +d">(x<"B/d L F/t">(), x<"B/d L M">()));
static_assert(!legal<rules::einsum, OpSpec("B/d L M, M F/t -> B/d L F"), Spec("B/d L M"), Spec("M F/t")>);

constexpr auto swiglu = [](auto gate, auto up) { return gate * up; };  // stands for swish(gate) * up
OP("B/d L F/t", map(swiglu, x<"B/d L F/t">(), x<"B/d L F/t">()));
OP("B/d L F/t", x<"B/d L F/t">() * x<"B/d L F/t">());  // backward: ct * derivative
static_assert(!legal<rules::map2, OpName("map"), Spec("B/d L F/t"), Spec("B/d L F")>);
static_assert(!legal<rules::map2, OpName("map"), Spec("B/d L F/t"), Spec("B/d L F +t")>);

OP("B/d L M +t", einsum_unreduced<"B/d L F/t, M F/t -> B/d L M +t">(x<"B/d L F/t">(), x<"M F/t">()));
OP("B/d L F/t", einsum_unreduced<"B/d L M, M F/t -> B/d L F/t">(x<"B/d L M">(), x<"M F/t">()));  // backward
OP("M F/t +d", einsum_unreduced<"B/d L M, B/d L F/t -> M F/t +d">(x<"B/d L M">(), x<"B/d L F/t">()));
static_assert(!legal<rules::einsum, OpSpec("B/d L F/t, M F/t -> B/d L M"), Spec("B/d L F/t"), Spec("M F/t")>);

// ---- logits --------------------------------------------------------------------------------------------------------

OP("B/d L V/t", einsum_unreduced<"B/d L M, V/t M -> B/d L V/t">(x<"B/d L M">(), x<"V/t M">()));
DUAL("B/d L V/t", "B/d L V/t");
OP("B/d L M +t", einsum_unreduced<"B/d L V/t, V/t M -> B/d L M +t">(x<"B/d L V/t">(), x<"V/t M">()));  // backward
OP("V/t M +d", einsum_unreduced<"B/d L V/t, B/d L M -> V/t M +d">(x<"B/d L V/t">(), x<"B/d L M">()));
OP("V/t M +d", x<"V/t M +d">() + x<"V/t M +d">());  // a tied embedding: both uses
static_assert(!legal<rules::einsum, OpSpec("B/d L M/t, V/t M -> B/d L V/t"), Spec("B/d L M/t"), Spec("V/t M")>);

// ---- loss ----------------------------------------------------------------------------------------------------------

OP("B/d L V/t", stop_gradient(x<"B/d L V/t">()));
OP("B/d L", all_reduce_max<"B/d L V/t -> B/d L">(x<"B/d L V/t">()));
static_assert(!legal<rules::local_max, OpName("max"), OpSpec("B/d L V/t -> B/d L"), Spec("B/d L V/t")>);  // local only
static_assert(!legal<rules::all_reduce_max, OpSpec("B/d L V -> B/d L"), Spec("B/d L V +t")>);

OP("B/d L V/t", x<"B/d L V/t">() - x<"B/d L">());
OP("B/d L V/t", exp(x<"B/d L V/t">()));
OP("B/d L +t", sum<"B/d L V/t -> B/d L +t">(x<"B/d L V/t">()));
OP("B/d L V/t", broadcast<"B/d L -> B/d L V/t">(x<"B/d L">(), {{"V", 32}}));  // backward
static_assert(!legal<rules::sum, OpSpec("B/d L V/t -> B/d L"), Spec("B/d L V/t")>);
static_assert(!legal<rules::map1, OpName("log"), Spec("B/d L +t")>);  // the log of a summand

OP("B/d L", all_reduce<"B/d L +t -> B/d L">(x<"B/d L +t">()));
DUAL("B/d L +t", "B/d L");
OP("B/d L", all_reduce<"B/d L +t -> B/d L">(x<"B/d L +t">()));  // backward: the same op
static_assert(!legal<rules::all_reduce, OpSpec("B/d L +t -> B/d L"), Spec("B/d L")>);
static_assert(!legal<rules::all_reduce, OpSpec("B/d L +t -> B/d L"), Spec("B/d L/t")>);
OP("B/d L", log(x<"B/d L">()));
OP("B/d L +t", x<"B/d L +t">() / x<"B/d L">());  // backward: ct / z

OP("B/d L +t", index_unreduced<"B/d L [V/t], B/d L -> B/d L +t">(x<"B/d L V/t">(), ids<u32, "B/d L">()));
OP("B/d L V/t", einsum_unreduced<"B/d L, B/d L V/t -> B/d L V/t">(x<"B/d L">(), x<"B/d L V/t">()));  // scatter-add
static_assert(!legal<rules::index, OpSpec("B/d L [V/t], B/d L -> B/d L"), Spec("B/d L V/t"), Spec("B/d L")>);
static_assert(!legal<rules::index, OpSpec("B/d L [V/t], B L -> B/d L +t"), Spec("B/d L V/t"), Spec("B L")>);

OP("B/d L +t", to_partial<"B/d L -> B/d L +t">(x<"B/d L">()));
OP("B/d L +t", to_partial<"B/d L -> B/d L +t">(x<"B/d L">()));  // backward: the same op
OP("B/d L +t", x<"B/d L +t">() - x<"B/d L +t">());
static_assert(!legal<rules::add, OpName("-"), Spec("B/d L"), Spec("B/d L +t")>);  // log_z once per device
static_assert(!legal<rules::to_partial, OpSpec("B/d L/t -> B/d L +t"), Spec("B/d L/t")>);
OP("B/d L +t", cross_entropy(x<"B/d L V/t">(), ids<u32, "B/d L">()));  // all of the above in one op
static_assert(!legal<rules::cross_entropy, Spec("B/d L V/t"), Spec("B L")>);
OP("B/d L +t", linear_cross_entropy<"B/d L M, V/t M -> B/d L V/t">(x<"B/d L M">(), x<"V/t M">(), ids<u32, "B/d L">()));

OP("B/d L +t", x<"B/d L +t">() * x<"B/d L">());  // weights of the tokens: 0 where a sequence is padded
OP("+d +t", sum<"B/d L +t -> +d +t">(x<"B/d L +t">()));
OP("+d +t", sum(x<"B/d L +t">()));
DUAL("", "+d +t");
OP("B/d L", broadcast<" -> B/d L">(x<"">(), {{"B", 8}, {"L", 16}}));  // backward, from the seed 1
static_assert(!legal<rules::sum, OpSpec("B/d L +t -> +d"), Spec("B/d L +t")>);
static_assert(!legal<rules::sum, OpSpec("B/d L +t -> "), Spec("B/d L +t")>);

OP("+d", sum<"B/d L -> +d">(x<"B/d L">()));  // the number of tokens, everywhere the same
OP("", all_reduce<"+d -> ">(x<"+d">()));
OP("+d +t", x<"+d +t">() / x<"">());
static_assert(!legal<rules::divide, Spec("+d +t"), Spec("+d")>);  // divided by a device's own count

static_assert(legal<rules::loss, Spec("d t"), DType::f32, Spec("+d +t")>);
static_assert(
    !legal<rules::loss, Spec("d t"), DType::f32, Spec("")>);  // jax #3970: reduced inside, counted by each device
static_assert(!legal<rules::loss, Spec("d t"), DType::f32, Spec("+d")>);  // still counted by each device of t
static_assert(!legal<rules::loss, Spec("d"), DType::f32, Spec("+d +t")>);

constexpr auto loss_of = [](const Model&, const Tensor<u32, "B/d L">&) { return Tensor<f32, "+d +t">(); };
static_assert(
    std::is_same_v<decltype(value_and_grad(Mesh2{}, loss_of, std::declval<const Model&>(), ids<u32, "B/d L">())),
                   std::pair<Tensor<f32, "+d +t">, Model>>);

// ---- metrics, gradient norm, update --------------------------------------------------------------------------------

OP("", all_reduce<"+d +t -> ">(x<"+d +t">()));
static_assert(std::is_same_v<decltype(item(x<"">())), f32>);
static_assert(!legal<rules::item, Spec("+d +t")>);  // each device would print its own

OP("+d +t", sum(square(x<"M/d Q K/t D">())));
OP("+d +t", sum(square(x<"M/t/d">())));
OP("+d +t", sum(square(x<"V/t M/d">())));
OP("+d +t", x<"+d +t">() + x<"+d +t">());
OP("", sqrt(all_reduce<"+d +t -> ">(x<"+d +t">())));
static_assert(
    !legal<rules::all_reduce, OpSpec("+d +t -> "), Spec("")>);  // Megatron-LM #5916: a norm that counts replicas
static_assert(!legal<rules::add, OpName("+"), Spec("+d +t"), Spec("+d")>);  // of a leaf replicated over t
static_assert(!legal<rules::map1, OpName("square"), Spec("M F/t +d")>);     // of a gradient not yet summed
static_assert(!legal<rules::map1, OpName("sqrt"), Spec("+d +t")>);

OP("M/d F/t", x<"M/d F/t">() * x<"">());                               // clipping: times a scalar
OP("M/d F/t", x<"M/d F/t">() * 0.9 + x<"M/d F/t">() * 0.1);            // the first moment
OP("M/d F/t", x<"M/d F/t">() * 0.99 + square(x<"M/d F/t">()) * 0.01);  // the second
OP("M/d F/t", x<"M/d F/t">() / (sqrt(x<"M/d F/t">()) + 1e-8));         // the step
OP("M/d F/t", x<"M/d F/t">() - (x<"M/d F/t">() + x<"M/d F/t">() * 0.1) * 3e-4);
OP("M", x<"M">() - all_reduce<"M +d -> M">(x<"M +d">()) * 3e-4);          // a replicated weight, reduced once
static_assert(!legal<rules::add, OpName("-"), Spec("M"), Spec("M +d")>);  // Megatron-LM #1446, not reduced at all
static_assert(!legal<rules::add, OpName("-"), Spec("M/d F/t"), Spec("M F/t")>);
static_assert(!legal<rules::add, OpName("-"), Spec("M/d F/t"), Spec("M F/t +d")>);

#undef OP
#undef DUAL

}  // namespace shardlib::seqax
