// Wrong programs: conv_unreduced.
#include "shardlib/shapes.hpp"

using namespace shardlib;

auto causal(const Tensor<f32, "B/d L C/t">& x, const Tensor<f32, "K C/t">& w) {
  return conv_unreduced<"B/d L C/t, K C/t -> B/d L C/t", "L, K -> L">(x, w, {.before = 3});
}

// expect: dim `L/s` is sharded, so each device sees only its shard of it; gather it first with
auto along_a_sharded_length(const Tensor<f32, "B L/s C">& x, const Tensor<f32, "K C">& w) {
  return conv_unreduced<"B L/s C, K C -> B L/s C", "L, K -> L">(x, w, {.before = 3});
}

// expect: the result is partial over t \(contracting `C/t` sees only the shard of this device\), so its spec must say
auto channels_not_summed(const Tensor<f32, "B L C/t">& x, const Tensor<f32, "K C/t F">& w) {
  return conv_unreduced<"B L C/t, K C/t F -> B L F", "L, K -> L">(x, w, {.before = 3});
}

// expect: must name as many lengths of the operand as dims of the window and lengths of the result, without axes
auto one_window_for_two_lengths(const Tensor<f32, "B H W C">& x, const Tensor<f32, "P C F">& w) {
  return conv_unreduced<"B H W C, P C F -> B H W F", "H W, P -> H W">(x, w);
}

// expect: the result `B L C` has no dim `N`
auto length_forgotten(const Tensor<f32, "B L C">& x, const Tensor<f32, "K C">& w) {
  return conv_unreduced<"B L C, K C -> B L C", "L, K -> N">(x, w);
}

// expect: the weights have dim `K` for the elements of a window, which the result cannot have too
auto window_kept(const Tensor<f32, "B L C">& x, const Tensor<f32, "K C">& w) {
  return conv_unreduced<"B L C, K C -> B N K C", "L, K -> N">(x, w);
}

// expect: dim `F` of the weights is neither in the other operand nor in the result; `sum` over it first
auto channels_lost(const Tensor<f32, "B L C">& x, const Tensor<f32, "K C F">& w) {
  return conv_unreduced<"B L C, K C F -> B N", "L, K -> N">(x, w);
}

// expect: conv_unreduced: the operands are f32 and bf16
auto two_dtypes(const Tensor<f32, "B L C">& x, const Tensor<bf16, "K C">& w) {
  return conv_unreduced<"B L C, K C -> B N C", "L, K -> N">(x, w);
}

// expect: the operand has the length `L` and the result `N`, and a name has one size; write each in one of them only
auto two_lengths_in_one(const Tensor<f32, "B L N">& x, const Tensor<f32, "K">& w) {
  return conv_unreduced<"B L N, K -> B N", "L, K -> N">(x, w);
}

// expect: the weights have dim `L`, along which windows move; `rename` it \(free\)
auto weights_of_each_position(const Tensor<f32, "B L">& x, const Tensor<f32, "L K">& w) {
  return conv_unreduced<"B L, L K -> B L", "L, K -> L">(x, w, {.before = 3});
}

// expect: windows<`L, K -> N`>: dim `L/s` is sharded, so each device sees only its shard of it; gather it first with
auto windows_of_a_sharded_length(const Tensor<f32, "B L/s C">& x) {
  return windows<"L, K -> N">(x, {{"K", 3}});
}

// expect: conv_unreduced: it does not take these arguments; write `conv_unreduced<..?B L C, K C F -> B N F..?, ..?L, K -> N
auto without_lengths(const Tensor<f32, "B L C">& x, const Tensor<f32, "K C F">& w) {
  return conv_unreduced<"B L C, K C F -> B N F">(x, w);
}

// expect: windows: it does not take these arguments; write `windows<..?L, K -> N..?>\(x, {{..?K..?, 3}}\)`
auto window_by_number(const Tensor<f32, "B L C">& x) {
  return windows<"L, K -> N">(x, 3);
}

// expect: windows: it does not take these arguments; write `windows<..?L, K -> N..?>\(x, {{..?K..?, 3}}\)`
auto windows_without_lengths(const Tensor<f32, "B L C">& x) {
  return windows(x, 3);
}

// expect: windows: it does not take these arguments; write `windows<..?L, K -> N..?>\(x, \{\{..?K..?, 3\}\}\)`
auto windows_without_lengths(const Tensor<f32, "B L C">& x) {
  return windows(x, {{"K", 2}});
}
