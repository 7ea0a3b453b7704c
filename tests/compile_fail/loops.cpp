// Wrong programs: loops whose carry changes its type, stacked leaves without the stacked dim, functions that do not take
// what the loop passes. The program above the cases is the right one.
#include "shardlib/shapes.hpp"

#include <utility>

using namespace shardlib;

using X = Tensor<f32, "B/d M">;
using Hidden = Tensor<f32, "B/d H/t">;
struct Layer {
  Tensor<f32, "M/d H/t"> up;
  Tensor<f32, "H/t M/d"> down;
};
using Layers = Array<"layers", Layer>;
struct Stacked {
  Tensor<f32, "Y M/d H/t"> up;
  Tensor<f32, "Y H/t M/d"> down;
};
struct State {
  X x;
  Tensor<f32, "B/d"> norm;
};
struct Mask {
  Tensor<bool_, "B/d M"> seen;
};
struct Masks {
  Tensor<bool_, "L B/d M"> seen;
};
struct Constants {
  const X a, b;
};
static_assert(detail::field_index(&Constants::a) == 0 && detail::field_index(&Constants::b) == 1);

Tensor<f32, "B/d M +t"> partial_layer(const X& x, const Layer& w) {
  const auto hidden = relu(einsum_unreduced<"B/d M, M H/t -> B/d H/t">(x, all_gather<"M/d H/t -> M H/t">(w.up)));
  return einsum_unreduced<"B/d H/t, H/t M -> B/d M +t">(hidden, all_gather<"H/t M/d -> H/t M">(w.down));
}
X layer(const X& x, const Layer& w) {
  return x + all_reduce<"B/d M +t -> B/d M">(partial_layer(x, w));
}
X step(std::int64_t i, const X& x, const X& y) {
  return x * y * static_cast<double>(i);
}
std::pair<X, Tensor<f32, "B/d">> cell(const X& h, const X& x) {
  return {h * x, sum<"B/d M -> B/d">(x)};
}
auto listed(const X& x, const Layers& w) {
  return scan_layers(layer, w, scan_layers(layer, w, x), {.recompute = {"dots"}});
}
auto stacked(const X& x, const Stacked& w) {
  return scan_layers<"Y">(layer, w, x, {.recompute = {"dots"}});
}
// without recompute, and of numbers, an argument may have any type
auto any_extra(const X& x, const Layers& w, const std::vector<std::pair<int, std::string>>& names) {
  return scan_layers([](const X& y, const Layer& v, const auto& all) { return layer(y, v) * all.first; }, w,
                     fori(4, [](std::int64_t, const X& y, const auto& n) { return y * double(n.size()); }, x,
                          {.recompute = {"dots"}}, names),
                     std::pair{x, 1});
}
auto repeated(const X& x) {
  return fori(4, step, x, x) + fori(4, step, x, {.recompute = {"everything"}}, x);
}
auto recurrent(const X& h, const Tensor<f32, "L B/d M">& xs) {
  return scan<"L">(cell, h, xs);
}
auto recurrent_masks(const X& h, const Masks& masks) {
  return scan<"L">([](const X& x, const Mask& now) { return std::pair(masked(now.seen, x), now); }, h, masks);
}

// expect: scan_layers: the carry is `f32\[B/d M\]`, but the function returns `f32\[B/d M \+t\]`, and the next iteration
// expect: a sum over t is still pending in it; take `all_reduce<..?B/d M \+t -> B/d M..?>` \(communicates\)
auto pending_carry(const X& x, const Layers& w) {
  return scan_layers(partial_layer, w, x);
}

// expect: scan_layers: the carry is `f32\[B/d M\]`, but the function returns `bf16\[B/d M\]`, .*; write `cast<f32>`
auto rounded_carry(const X& x, const Stacked& w) {
  return scan_layers<"Y">([](const X& y, const Layer& v) { return cast<bf16>(layer(y, v)); }, w, x);
}

// expect: scan_layers<`Y`>: the leaf `M/d` has no dim `Y`; `stack` the tensors of all layers along it, or pass this one
struct WithScale {
  Tensor<f32, "Y M/d H/t"> up;
  Tensor<f32, "M/d"> scale;
};
auto unstacked_leaf(const X& x, const WithScale& w) {
  return scan_layers<"Y">([](const X& y, const auto&) { return y; }, w, x);
}

// expect: scan_layers<`Y`>: the leaf `M/d Y` has other dims before `Y`; reorder the dims with
struct Last {
  Tensor<f32, "M/d Y"> scale;
};
auto stacked_last(const X& x, const Last& w) {
  return scan_layers<"Y">([](const X& y, const auto&) { return y; }, w, x);
}

// expect: scan_layers<`Y`>: the leaf `Y/d M` is sharded along `Y`, so no device has all parts; gather that dim first
struct Sharded {
  Tensor<f32, "Y/d M"> scale;
};
auto sharded_layers(const X& x, const Sharded& w) {
  return scan_layers<"Y">([](const X& y, const auto&) { return y; }, w, x);
}

// expect: scan_layers: `Stacked` is not an Array of layers; for a tree of stacked tensors name the stacked dim
auto no_dim(const X& x, const Stacked& w) {
  return scan_layers(layer, w, x);
}

// the layer's struct has a gathered weight
// expect: a tensor `f32\[M/d H/t\]` does not fit the declared type `f32\[M H/t\]`: dim 1 is `M/d`, not `M`; gather it
struct Gathered {
  Tensor<f32, "M H/t"> up;
  Tensor<f32, "H/t M/d"> down;
};
auto other_layer(const X& x, const Stacked& w) {
  return scan_layers<"Y">([](const X& y, const Gathered&) { return y; }, w, x);
}

// a part is copied field by field
// expect: the fields of `Norm` and `StackedNorm` are paired by their places, but `bias` has another place in each; declare
struct StackedNorm {
  Tensor<f32, "Y M"> gain, bias;
};
struct Norm {
  Tensor<f32, "M"> bias, gain;
};
auto gain_for_bias(const X& x, const StackedNorm& w) {
  return scan_layers<"Y">([](const X& y, const Norm& norm) { return y * norm.gain + norm.bias; }, w, x);
}

// expect: fori: the carry is `State`, but the function returns `f32\[B/d M\]`, and the next iteration takes it; return
auto part_of_carry(const State& s) {
  return fori(4, [](std::int64_t, const State& now) { return now.x; }, s);
}

// without a `return` a loop would leave the carry as it is
// expect: scan_layers: the carry is `f32\[B/d M\]`, but the function returns `void`, and the next iteration takes it; return
auto forgotten_return(const X& x, const Layers& w) {
  return scan_layers([](X y, const Layer& v) { y = layer(y, v); }, w, x);
}

// expect: fori: the carry is `State`, but the function returns `void`, and the next iteration takes it; return `State`
auto forgotten_return_of_a_struct(const State& s) {
  return fori(4, [](std::int64_t, State now) { now.x *= 2.0; }, s);
}

// expect: scan: the function returns `void`; return std::pair\(carry, y\), where y is a tensor
auto forgotten_return_of_a_pair(const X& h, const Tensor<f32, "L B/d M">& xs) {
  return scan<"L">([](X now, const X& x) { now += x; }, h, xs);
}

// expect: scan_layers: the function changes what it holds, as a `mutable` lambda does, but every iteration calls the same
auto counting(const X& x, const Layers& w) {
  return scan_layers([i = 0.0](const X& y, const Layer& v) mutable { return layer(y, v) * ++i; }, w, x);
}

// expect: fori: the function has 1 parameter, but the loop passes 2; write f\(i, carry, extra arguments...\)
auto without_index(const X& x) {
  return fori(4, [](const X& y) { return y + y; }, x);
}

// expect: fori: it does not take these arguments; write `fori\(8, f, carry\)`
auto fractional_count(const X& x) {
  return fori(2.5, step, x, x);
}

// expect: fori: the function captures by reference, or holds a pointer or a union, and it runs again in the backward pass
// expect: pass tensors and configurations as arguments, and capture numbers by value: `\[k\]`
auto captured(const X& x, const X& y) {
  return fori(4, [&](std::int64_t, const X& z) { return z + y; }, x, {.recompute = {"dots"}});
}

// expect: scan: the function returns `f32\[B/d M\]`; return std::pair\(carry, y\), where y is a tensor
auto no_pair(const X& h, const Tensor<f32, "L B/d M">& xs) {
  return scan<"L">([](const X& now, const X& x) { return now + x; }, h, xs);
}

// expect: scan<`L`>: the leaf `B/d L M` has other dims before `L`; reorder the dims with `rearrange<
auto length_second(const X& h, const Tensor<f32, "B/d L M">& xs) {
  return scan<"L">(cell, h, xs);
}

// expect: scan_layers: parameter 2 of the function is `Stacked`, but the loop passes `Layer`; write f\(carry, layer
auto wrong_layer(const X& x, const Layers& w) {
  return scan_layers([](const X& y, const Stacked&) { return y; }, w, x);
}

// f takes what `gather` returns
// expect: scan_layers: parameter 2 of the function is `Layer`, but the loop passes `Gathered`; write f\(carry, layer
struct Gathered {
  Tensor<f32, "M H/t"> up;
};
Gathered gather(const Layer& w) {
  return {all_gather<"M H/t">(w.up)};
}
auto layer_at_rest(const X& x, const Layers& w) {
  return scan_layers(with_prefetch(gather, layer), w, x, {.recompute = {"dots"}});
}

// expect: unstack<`L`>: the operand `L/d M` is sharded along `L`, so no device has all parts
auto sharded_parts(const Tensor<f32, "L/d M">& x) {
  return unstack<"L">(x);
}

// expect: with_prefetch: it does not take this argument; write `with_prefetch\(gather, f\)`
auto prefetch_without_gather(const X& x, const Layers& w) {
  return scan_layers(with_prefetch(layer), w, x);
}

// expect: with_prefetch: the function captures by reference, or holds a pointer or a union
auto captured_gather(const X& x, const Layers& w) {
  const auto gather = [&](const Layer& v) { return w.empty() ? v : w[0]; };
  return scan_layers(with_prefetch(gather, layer), w, x);
}

// a tuple's tensors would be taken for constants of the layer
// expect: scan_layers: `std::pair<.*` is not a tree of tensors: its parts have no names; take a plain struct, or an argument
auto pair_of_extras(const X& x, const Layers& w) {
  return scan_layers([](const X& y, const Layer& v, const auto& extra) { return layer(y, v) * extra.first; }, w, x,
                     {.recompute = {"dots"}}, std::pair{x, 1});
}

// expect: the field `rate` of a struct of tensors is not a tensor, Array or struct of them; keep it elsewhere
struct Scaled {
  X x;
  double rate;
};
auto number_in_extra(const X& x) {
  return fori(4, [](std::int64_t, const X& y, const Scaled& s) { return y * s.x * s.rate; }, x,
              {.recompute = {"everything"}}, Scaled{x, 0.5});
}

// expect: fori: it does not take these arguments; write `fori\(8, f, carry\)`
auto count_in_second_place(const Tensor<f32, "B M">& x) {
  return fori([](auto, const auto& c) { return c * 2.0; }, 8, x);
}

// expect: scan: it does not take these arguments; write `scan<..?L..?>\(f, carry, xs\)`
auto scan_without_a_dim(const Tensor<f32, "B M">& h, const Tensor<f32, "L B M">& x) {
  return scan([](const auto& c, const auto& e) { return std::pair(c + e, c); }, h, x);
}

// expect: scan_layers: it does not take these arguments; write `scan_layers\(f, w.layers, x\)`
auto layers_without_a_carry(const Layers& w) {
  return scan_layers(layer, w);
}
