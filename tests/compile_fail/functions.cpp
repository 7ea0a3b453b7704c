// Wrong programs: functions that run again in the backward pass and do not own what they use; losses and weights that
// value_and_grad cannot take. The program above the cases is the right one.
#include "shardlib/shapes.hpp"

#include <cmath>
#include <functional>

using namespace shardlib;

using Data = Mesh<"d">;
using X = Tensor<f32, "B/d M">;
struct Layer {
  Tensor<f32, "M/d N"> up;
  Tensor<f32, "M/d N"> down;
};
struct Config {
  double scale = 1;
  bool square = false;
};
X layer(const X& x, const Layer& w, const Config& config) {
  const auto hidden = einsum_unreduced<"B/d M, M N -> B/d N">(x, all_gather<"M/d N -> M N">(w.up));
  const auto y = einsum_unreduced<"B/d N, M N -> B/d M">(hidden, all_gather<"M/d N -> M N">(w.down));
  return (config.square ? square(y) : y) * config.scale;
}
auto recomputed(const X& x, const Layer& w, const Config& config, float factor) {
  const auto scaled = [factor](const X& y, const Layer& v, const Config& c) { return layer(y, v, c) * factor; };
  return explicit_activation_checkpointing(scaled)(x, w, config) + explicit_activation_checkpointing(layer)(x, w, config);
}
using Loss = Tensor<f32, "+d">;
Loss loss(const Layer& w, const X& x, const Config& config) {
  return sum(layer(x, w, config));
}
auto step(const Data& mesh, const Layer& w, const X& x, const Config& config) {
  return value_and_grad(mesh, loss, w, x, config);
}
auto with_accuracy(const Data& mesh, const Layer& w, const X& x, const Config& config) {
  const auto both = [](const Layer& v, const X& y, const Config& c) { return std::pair(loss(v, y, c), layer(y, v, c)); };
  const auto [l, gradient, outputs] = value_and_grad(mesh, both, w, x, config);
  return outputs;
}

auto gated(const X& gate, const X& up, float k) {
  return map([k](auto g, auto u) { return g > 0 ? exp(-g) * pow(u, 2) : 0.5F * k; }, gate, up);
}

// A configuration by reference: when the backward pass runs the layer again, it may be gone.
// expect: explicit_activation_checkpointing: the function captures by reference, or holds a pointer or a union, and it runs again in
// expect: the backward pass, when what it refers to may be gone; pass tensors and configurations as arguments
auto config_by_reference(const X& x, const Layer& w, const Config& config) {
  return explicit_activation_checkpointing([&](const X& y, const Layer& v) { return layer(y, v, config); })(x, w);
}

// expect: explicit_activation_checkpointing: the function captures by reference, or holds a pointer or a union
struct Block {
  Config config;
  auto operator()(const X& x, const Layer& w) const {
    return explicit_activation_checkpointing([this](const X& y, const Layer& v) { return layer(y, v, config); })(x, w);
  }
};

// Its gradient would be lost.
// expect: explicit_activation_checkpointing: the function holds more than numbers \(a tensor, a container, a
// expect: pass tensors and configurations as arguments, and capture numbers by value: `\[k\]`
auto weights_by_value(const X& x, const Layer& w, const Config& config) {
  return explicit_activation_checkpointing([w, config](const X& y) { return layer(y, w, config); })(x);
}

// expect: explicit_activation_checkpointing: the function holds more than numbers
auto erased(const X& x, const std::function<X(const X&)>& f) {
  return explicit_activation_checkpointing(f)(x);
}

// expect: explicit_activation_checkpointing: the argument of type `const Config ?\*` holds a pointer, a reference or a union
auto config_by_pointer(const X& x, const Layer& w, const Config* config) {
  return explicit_activation_checkpointing(
      [](const X& y, const Layer& v, const Config* c) { return layer(y, v, *c); })(x, w, config);
}

// The backward pass would take its tensors for constants.
// expect: explicit_activation_checkpointing: `std::pair<.*` is not a tree of tensors: its parts have no names; take a plain
auto weights_in_pair(const X& x, const Layer& w) {
  return explicit_activation_checkpointing([](const X& y, const auto& v) { return y * v.second; })(x, std::pair{w, x});
}

// expect: the field `scale` of a struct of tensors is not a tensor, Array or struct of
struct Scaled {
  X x;
  double scale;
};
auto number_among_tensors(const X& x) {
  return explicit_activation_checkpointing([](const Scaled& s) { return s.x * s.scale; })(Scaled{x, 2});
}

// expect: explicit_activation_checkpointing: `std::vector<.*` is not a tree of tensors: a list of trees needs a name; take
auto list_of_tensors(const X& x) {
  return explicit_activation_checkpointing([](const std::vector<X>& all) { return all.at(0); })(std::vector<X>{x, x});
}

// expect: prefetch: the function captures by reference, or holds a pointer or a union, and it runs again in the backward pass
auto gathers_by_reference(const X& x, const Array<"layers", Layer>& layers, const Config& config) {
  const auto gathers = [&](const Layer& w) { return all_gather<"M/d N -> M N">(config.square ? w.up : w.down); };
  return prefetch(x, gathers, layers, 0);
}

// expect: value_and_grad: `Hidden` is not a tree of tensors: it has private members, a constructor or
class Hidden {
 public:
  Loss run() const { return sum(w_); }

 private:
  Tensor<f32, "M/d"> w_;
};
auto private_weights(const Data& mesh, const Hidden& w) {
  return value_and_grad(mesh, [](const Hidden& v) { return v.run(); }, w);
}

// expect: value_and_grad: `Constructed` is not a tree of tensors: it has private members, a constructor or
struct Constructed {
  Constructed() {}
  Tensor<f32, "M/d"> w;
};
auto constructed_weights(const Data& mesh, const Constructed& w) {
  const auto [l, gradient] = value_and_grad(mesh, [](const Constructed& v) { return sum(v.w); }, w);
  return gradient;
}

// expect: value_and_grad: `Derived` is not a tree of tensors: it has a base class; a tree is a tensor, an Array
struct Base {
  Tensor<f32, "M/d"> a;
};
struct Derived : Base {
  Tensor<f32, "M/d"> b;
};
auto derived_weights(const Data& mesh, const Derived& w) {
  return value_and_grad(mesh, [](const Derived& v) { return sum(v.a); }, w);
}

// expect: value_and_grad: parameter 1 of the function, `Layer`, is not const; write `const Layer&`
auto changing(const Data& mesh, const Layer& w, const X& x) {
  return value_and_grad(mesh, [](Layer& v, const X& y) { return sum(layer(y, v, {})); }, w, x);
}

// expect: value_and_grad: parameter 3 of the function, argument 2, is `Config`, but is given `double`; write
auto number_for_config(const Data& mesh, const Layer& w, const X& x) {
  return value_and_grad(mesh, loss, w, x, 0.5);
}

// expect: value_and_grad: the function has 3 parameters, but is given the weights and 1 more argument; write value_and_grad
auto no_config(const Data& mesh, const Layer& w, const X& x) {
  return value_and_grad(mesh, loss, w, x);
}

// expect: value_and_grad: the function does not take the weights and 1 more argument in this order, each by value or as a
auto generic(const Data& mesh, const Layer& w, const X& x) {
  return value_and_grad(mesh, [](const auto& v) { return sum(v.up); }, w, x);
}

// expect: value_and_grad: it does not take these arguments; write `value_and_grad\(mesh, f, weights, ...\)`, where f is one function
template <dtype D>
Tensor<D, "+d"> loss_in(const Layer& w, const Tensor<D, "B/d M">& x);
auto template_alone(const Data& mesh, const Layer& w, const X& x) {
  return value_and_grad(mesh, loss_in, w, x);
}

// expect: value_and_grad: it does not take these arguments; write `value_and_grad\(mesh, f, weights, ...\)`, where f is one function
Loss two_losses(const Layer& w, const X& x);
Loss two_losses(const X& w, const X& x);
auto overloaded_function(const Data& mesh, const Layer& w, const X& x) {
  return value_and_grad(mesh, two_losses, w, x);
}

// expect: value_and_grad: the loss `B/d M` has dims; `sum` it to a scalar whose sum over the devices is pending, `\+d`
auto outputs_first(const Data& mesh, const Layer& w, const X& x) {
  return value_and_grad(
      mesh, [](const Layer& v, const X& y) { return std::pair(layer(y, v, {}), sum(y)); }, w, x);
}

// expect: map: the function captures by reference, or holds a pointer or a union, and it runs again in the backward pass, when what
// expect: it refers to may be gone; capture nothing, or numbers by value: `\[k\]`
auto scaled_by_reference(const X& x, const Config& config) {
  return map([&](auto v) { return v * static_cast<float>(config.scale); }, x);
}

// expect: map: a number of the function becomes a plain one here, which has no derivative; call exp, log, pow, maximum
// expect: and the like without std::, write `x > 0` in place of `if \(x\)`, and cast no number
auto std_power(const X& x) {
  return map([](auto v) { return std::pow(v, 2); }, x);
}

// expect: map: a number of the function becomes a plain one here, which has no derivative
auto std_exp(const X& x) {
  return map([](auto v) { return std::exp(v); }, x);
}

// expect: map: a number of the function becomes a plain one here, which has no derivative
auto cast_number(const X& x) {
  return map([](auto v) { return v * static_cast<float>(v); }, x);
}

// expect: map: a number of the function becomes a plain one here, which has no derivative
auto number_as_condition(const X& x) {
  return map([](auto v) { return v ? v : 1.0; }, x);
}

// expect: map: the function returns nothing; return the number for the result
auto no_result(const X& x) {
  return map([](auto v) { static_cast<void>(v * 2); }, x);
}

// expect: map: the function takes plain numbers, which have no derivative; write `auto` for the types of its parameters
auto plain_parameter(const X& x) {
  return map([](float v) { return v * 2; }, x);
}

// expect: explicit_activation_checkpointing: it does not take these arguments; write
// expect: `explicit_activation_checkpointing\(f, {..?dots..?}\)\(x\)`
auto called_at_once(const X& x, const Layer& w, const Config& config) {
  return explicit_activation_checkpointing(layer, x, w, config);
}

// expect: explicit_activation_checkpointing: it does not take these arguments; write
// expect: `explicit_activation_checkpointing\(f, {..?dots..?}\)\(x\)`
auto policy_without_braces(const X& x, const Layer& w, const Config& config) {
  return explicit_activation_checkpointing(layer, "dots")(x, w, config);
}

// expect: save_for_backward: it does not take these arguments; write `save_for_backward\(q\)`
auto saved_by_a_name(const X& x) {
  return save_for_backward(x, "q");
}
