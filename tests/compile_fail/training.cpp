// Wrong programs: silent bugs of real trainers, which the types turn into errors. The program above the cases is
// the right one. Where a bug has a number, it is that of the issue in the project named.
#include "shardlib/shapes.hpp"

using namespace shardlib;

using M2 = Mesh<"d t">;
struct Weights {
  Tensor<f32, "M/d F/t"> w;
  Tensor<f32, "M"> bias;  // replicated: its gradient is "M +d +t"
};
using Batch = Tensor<f32, "B/d M">;

Tensor<f32, "B/d M/t"> block(const Weights& weights, const Batch& x) {
  const auto w = all_gather<"M/d F/t -> M F/t">(weights.w);
  const auto hidden = relu(einsum_unreduced<"B/d M, M F/t -> B/d F/t">(x, w));
  const auto y = einsum_unreduced<"B/d F/t, M F/t -> B/d M +t">(hidden, w);
  return reduce_scatter<"B/d M +t -> B/d M/t">(y) + shard<"M -> M/t">(weights.bias);
}
Tensor<f32, "+d +t"> loss(const Weights& weights, const Batch& x) {
  return sum<"B/d M/t -> +d +t">(square(block(weights, x)));
}
Weights update(const M2& mesh, const Weights& weights, const Batch& x, double rate) {
  const auto [value, gradient] = value_and_grad(mesh, loss, weights, x);
  const auto bias = all_reduce<"M +d +t -> M">(gradient.get<&Weights::bias>());
  return {weights.w - gradient.get<&Weights::w>() * rate, weights.bias - bias * rate};
}
struct Sharded {
  Tensor<f32, "M/d F/t"> w;
  Tensor<f32, "M/t/d"> scale;
};
static_assert(fully_sharded<M2, Sharded>);

// torchtitan 1805, 2388, 2217; Megatron-LM 1446; gpt-neox 1257: the gradient of a replicated parameter is not reduced
// expect: - of `M` and `M \+d \+t`: `M \+d \+t` is partial over d, but `M` is replicated over d, so the pending sum
// expect: all_reduce<..?M \+d \+t -> M..?>`
auto unreduced_update(const Weights& p, const gradient_t<M2, Weights>& g) {
  return p.bias - g.get<&Weights::bias>() * 0.1;
}

// the same, where the update says what it returns
// expect: a tensor `f32\[M \+d\]` does not fit the declared type `f32\[M\]`: a sum over d is still pending in it; take
// expect: all_reduce<..?M \+d -> M..?>` \(communicates\)
Tensor<f32, "M"> half_reduced(const gradient_t<M2, Weights>& g) {
  return all_reduce<"M +d +t -> M +d">(g.get<&Weights::bias>());
}

// jax 3970: the loss is reduced inside the differentiated function, so gradients are too large by the number of devices
// expect: value_and_grad: the loss `..?..?` is replicated over d: each device of d would count it again, so the
// expect: leave the sum pending, `\+d \+t`, and reduce it outside the differentiated function
auto reduced_loss(const M2& mesh, const Weights& weights, const Batch& x) {
  return value_and_grad(
      mesh, [](const Weights& w, const Batch& b) { return all_reduce<"+d +t -> ">(loss(w, b)); }, weights, x);
}

// the same for one axis of the two
// expect: value_and_grad: the loss `\+d` is replicated over t: each device of t would count it again
// expect: or, if nothing is summed over t, take `to_partial<..?\+d -> \+d \+t..?>` of it \(no traffic\)
auto half_reduced_loss(const M2& mesh, const Weights& weights, const Batch& x) {
  return value_and_grad(
      mesh, [](const Weights& w, const Batch& b) { return all_reduce<"+d +t -> +d">(loss(w, b)); }, weights, x);
}

// expect: value_and_grad: the loss `B/d` has dims; `sum` it to a scalar whose sum over the devices is pending, `\+d
auto loss_per_example(const M2& mesh, const Weights& weights, const Batch& x) {
  return value_and_grad(
      mesh, [](const Weights&, const Batch& b) { return sum<"B/d M -> B/d">(b); }, weights, x);
}

// torchtitan 2106, pytorch 157340: a row-parallel layer adds its bias on each device before the sum
// expect: \+ of `B/d M \+t` and `M`: `B/d M \+t` is partial over t, but `M` is replicated over t, so the pending sum
// expect: to_partial<..?M -> M \+t..?>` of the latter \(no traffic\)
auto bias_per_device(const Tensor<f32, "B/d F/t">& hidden, const Tensor<f32, "M F/t">& w, const Tensor<f32, "M">& b) {
  return reduce_scatter<"B/d M +t -> B/d M/t">(einsum_unreduced<"B/d F/t, M F/t -> B/d M +t">(hidden, w) + b);
}

// torchtitan 3412, pytorch 172932: a partial value is labeled replicated
// expect: a tensor `f32\[B/d M \+t\]` does not fit the declared type `f32\[B/d M\]`: a sum over t is still pending in
// expect: all_reduce<..?B/d M \+t -> B/d M..?>` \(communicates\)
Tensor<f32, "B/d M"> labeled_replicated(const Tensor<f32, "B/d F/t">& hidden, const Tensor<f32, "M F/t">& w) {
  return einsum_unreduced<"B/d F/t, M F/t -> B/d M +t">(hidden, w);
}

// pytorch 163193: a function that is not linear is applied to summands
// expect: gelu: the operand `B/d M \+t` is partial over t, and gelu is not linear, so it has to see the sum
// expect: all_reduce<..?B/d M \+t -> B/d M..?>` \(communicate\)
auto gelu_of_summands(const Tensor<f32, "B/d F/t">& hidden, const Tensor<f32, "M F/t">& w) {
  return gelu(einsum_unreduced<"B/d F/t, M F/t -> B/d M +t">(hidden, w));
}

// Megatron-LM 5916: the gradient norm counts replicas
// expect: all_reduce<`\+d \+t -> `>: the operand is `\+d`, but the op spec expects `\+d \+t`: it has no pending sum
auto norm_counts_replicas(const Tensor<f32, "M/d">& gradient) {
  return all_reduce<"+d +t -> ">(sum<"M/d -> +d">(square(gradient)));
}

// the same: the squares of a sharded and of a replicated gradient in one sum
// expect: \+ of `\+d \+t` and `..?..?`: `\+d \+t` is partial over d, but `..?..?` is replicated over d, so the pending
auto norm_of_both(const Tensor<f32, "M/d F/t">& w, const Tensor<f32, "M">& bias) {
  return all_reduce<"+d +t -> ">(sum(square(w)) + sum(square(bias)));
}

// expect: square: the operand `M \+d \+t` is partial over d, and square is not linear, so it has to see the sum
auto norm_of_unreduced(const gradient_t<M2, Weights>& g) {
  return sum(square(g.get<&Weights::bias>()));
}

// expect: item: `\+d \+t` is partial over d: devices would read different numbers and could diverge; reduce it first
auto print_own_loss(const Weights& weights, const Batch& x) {
  return item(loss(weights, x));
}

// expect: / of `\+d \+t` and `\+d`: the divisor is partial over d, and a quotient by a sum is not the sum of the
auto mean_over_own_tokens(const Tensor<f32, "+d +t">& total, const Tensor<f32, "B/d">& valid) {
  return total / sum<"B/d -> +d">(valid);
}

// expect: fully_sharded: `M` is not sharded over d, so every device of d keeps a copy; shard one of its dims
static_assert(fully_sharded<M2, Weights>);

// expect: value_and_grad: the weight `M/x` uses axis `x`, which the mesh `d t` does not have
struct Elsewhere {
  Tensor<f32, "M/x"> w;
};
auto unknown_axis(const M2& mesh, const Elsewhere& weights) {
  return value_and_grad(
      mesh, [](const Elsewhere&) { return Tensor<f32, "+d +t">(); }, weights);
}

// expect: a tensor `f32\[B M\]` does not fit the declared type `f32\[B/d M\]`: dim 1 is `B`, not `B/d`; take the shard
auto batch_not_sharded(const M2& mesh, const Weights& weights, const Tensor<f32, "B M">& x) {
  return value_and_grad(mesh, loss, weights, x);
}

// expect: a tensor `f32\[B M\]` does not fit the declared type `f32\[B/d M\]`: dim 1 is `B`, not `B/d`; take the shard
auto checkpointed(const Weights& weights, const Tensor<f32, "B M">& x) {
  return explicit_activation_checkpointing(block)(weights, x);
}

// expect: value_and_grad: the function returns a plain number, which has no derivative; return the loss, a Tensor, or
// expect: std::pair\(loss, what it returns besides\)
auto loss_on_the_host(const M2& mesh, const Weights& weights, const Batch& x) {
  return value_and_grad(
      mesh, [](const Weights& w, const Batch& b) { return item(all_reduce<"+d +t -> ">(loss(w, b))); }, weights, x);
}

// expect: value_and_grad: the function returns nothing; return the loss, a Tensor, or std::pair\(loss, what it returns
auto no_loss(const M2& mesh, const Weights& weights, const Batch& x) {
  const auto [value, gradient] = value_and_grad(
      mesh, [](const Weights& w, const Batch& b) { const auto l = loss(w, b); }, weights, x);
  return gradient.get<&Weights::bias>();
}

// expect: value_and_grad: the function returns no Tensor; return the loss, a Tensor, or std::pair\(loss, what it returns
auto loss_in_a_tuple(const M2& mesh, const Weights& weights, const Batch& x) {
  const auto [value, gradient] = value_and_grad(
      mesh, [](const Weights& w, const Batch& b) { return std::tuple(loss(w, b), b); }, weights, x);
  return gradient.get<&Weights::bias>();
}

// expect: value_and_grad: the function returns a plain number, which has no derivative; return the loss, a Tensor, or
auto number_beside_its_auxiliary(const M2& mesh, const Weights& weights, const Batch& x) {
  const auto [value, gradient, inputs] = value_and_grad(
      mesh, [](const Weights&, const Batch& b) { return std::pair(1.0, b); }, weights, x);
  return inputs;
}

// expect: value_and_grad: parameter 1 of the function, the weights, is `Weights`, but is given `f32\[B/d M\]`; write
auto batch_first(const M2& mesh, const Weights& weights, const Batch& x) {
  return value_and_grad(mesh, loss, x, weights);
}

// expect: value_and_grad: the function has 2 parameters, but is given the weights and 0 more arguments \(arguments in braces are not counted
auto no_batch(const M2& mesh, const Weights& weights) {
  return value_and_grad(mesh, loss, weights);
}

// expect: value_and_grad: it does not take these arguments; write `value_and_grad\(mesh, f, weights, ...\)`
auto no_mesh(const Weights& weights, const Batch& x) {
  return value_and_grad(loss, weights, x);
}

// expect: the field `rate` of a struct of tensors is not a tensor, Array or struct of them; keep it elsewhere
struct WithRate {
  Tensor<f32, "M/d F/t"> w;
  float rate;
};
auto rate_among_weights(const M2& mesh, const WithRate& weights) {
  return value_and_grad(
      mesh, [](const WithRate& p) { return sum(p.w); }, weights);
}
