// Wrong programs: gradients that the optimizer cannot take, and products with a Hessian. They need the whole library;
// where it is not to be had, the gallery leaves this file out.
// needs: runtime
#include "shardlib/io/checkpoint/checkpoint.hpp"
#include "shardlib/run/check_replicas.hpp"
#include "shardlib/run/options.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;

using Data = Mesh<"d">;
struct Weights {
  Tensor<f32, "M"> bias;
  Tensor<f32, "M/d F"> w;
};
using Gradients = gradient_t<Data, Weights>;
Tensor<f32, "+d"> loss_of(const Weights& w, const Tensor<f32, "B/d M">& x);
constexpr auto every_leaf = [](std::string_view) { return true; };

void step(const Data& mesh, Weights& w, Weights& mu, Weights& nu, const Gradients& partial) {
  const Weights grads = reduce_gradients(mesh, partial);
  AdamW().update(w, mu, nu, grads, 1e-3, 1 / global_norm(mesh, grads), 0, every_leaf);
}
// Rules need no name where they are an argument.
void step_by_rules(Weights& w, Lion::Moments<Weights>& moments, const Weights& grads) {
  Lion().update(w, moments, grads, 1e-4, 1.0, 0, {{{"bias", {.decay = 0}}, {"w", {.rate = 0.1}}}});
  Lion().update(w, moments, grads, 1e-4, 1.0, 1, LeafRules{{{"*", {.decay = 0.5}}}});
  Lion().update(w, moments, grads, 1e-4, 1.0, 2, {});
}
// A program's own operators of a struct of tensors are the better ones, also templates.
template <class T>
requires std::is_same_v<T, Weights> T operator-(const T& a, const T& b) { return {a.bias - b.bias, a.w - b.w}; }
Weights operator*(const Weights& a, double b) { return {a.bias * b, a.w * b}; }
template <class T>
T operator-(const T& a) requires(std::is_same_v<T, Weights>) { return a * -1.0; }
// Braces hold a shape alone, or a shape and its values.
auto arrays_in_braces(const Data& mesh, std::int64_t n) {
  const HostArray<i32> one{{1}, {7}};
  const HostArray<f32> zeros({n, 4}), named({n, 4}, std::vector<f32>(8)), list({n});
  return std::tuple(one, zeros, named, list, place<Tensor<f32, "M">>(mesh, {{2}, {1.0F, 2.0F}}));
}
Weights step_by_operators(const Weights& w, const Weights& grads) { return w - grads * 0.1; }
Weights negated_by_operator(const Weights& grads) { return -grads; }
// A rule's factors in braces.
void step_by_braces(Weights& w, Weights& mu, Weights& nu, const Weights& grads) {
  AdamW().update(w, mu, nu, grads, 1e-3, 1.0, 0, LeafRules{{{"*", {0.5}}, {"w", {}}}});
}

// expect: AdamW: the gradient `f32\[M \+d\]` of the weight `f32\[M\]` is partial over d; take the sums with
// expect: `reduce_gradients\(mesh, grads\)`, once, after those over microbatches \(communicates\)
void unreduced(Weights& w, Weights& mu, Weights& nu, const Gradients& partial) {
  AdamW().update(w, mu, nu, partial, 1e-3, 1.0, 0, every_leaf);
}

// expect: global_norm: the leaf `f32\[M \+d\]` is partial over d, and the norm of a sum is not that of its parts; take the
double norm_of_parts(const Data& mesh, const Gradients& partial) {
  return global_norm(mesh, partial);
}

// the sum over t would be missing
// expect: global_norm: the leaf `F/t` uses axis `t`, which the mesh `d` does not have; correct the spec, or add the axis
struct OnTwo {
  Tensor<f32, "F/t"> bias;
};
double norm_of_shards(const Data& mesh, const OnTwo& grads) {
  return global_norm(mesh, grads);
}

// the rest of a longer tree would be left out
// expect: where one has `Weights`, a struct of 2 fields, another has `More`, a struct of 3 fields, so a leaf would have no
struct More {
  Tensor<f32, "M"> bias;
  Tensor<f32, "M/d F"> w, up;
};
void gradients_of_another_model(Weights& w, Weights& mu, Weights& nu, const More& grads) {
  AdamW().update(w, mu, nu, grads, 1e-3, 1.0, 0, every_leaf);
}

// expect: where one has `Weights`, a struct of 2 fields, another has `Less`, a struct of 1 field, so a leaf would have no
struct Less {
  Tensor<f32, "M"> bias;
};
void moments_of_another_model(Weights& w, Less& mu, Less& nu, const Weights& grads) {
  AdamW().update(w, mu, nu, grads, 1e-3, 1.0, 0, every_leaf);
}

// expect: AdamW: a moment of the weight `f32\[M\]` has another type; make it with `zeros_like`
struct Half {
  Tensor<bf16, "M"> bias;
};
struct One {
  Tensor<f32, "M"> bias;
};
void half_moments(One& w, Half& mu, Half& nu, const One& grads) {
  AdamW().update(w, mu, nu, grads, 1e-3, 1.0, 0, every_leaf);
}

// expect: AdamW: the gradient `f32\[M/d\]` of the weight `f32\[M\]` has another spec: dim 1 is `M/d`, not `M`
struct Sharded {
  Tensor<f32, "M/d"> bias;
};
struct Whole {
  Tensor<f32, "M"> bias;
};
void other_spec(Whole& w, Whole& mu, Whole& nu, const Sharded& grads) {
  AdamW().update(w, mu, nu, grads, 1e-3, 1.0, 0, every_leaf);
}

// expect: decays\(name\) of an optimizer returns a bool, or LeafFactors: LeafFactors\{.decay = 0.1\} for a factor
void number_as_factor(Weights& w, Weights& mu, Weights& nu, const Weights& grads) {
  AdamW().update(w, mu, nu, grads, 1e-3, 1.0, 0, [](std::string_view name) { return name == "bias" ? 0.0 : 0.1; });
}

// expect: decays\(name\) of an optimizer takes the name of a leaf, \[\]\(std::string_view name\) \{ return true; \}
void rule_without_a_name(Weights& w, Weights& mu, Weights& nu, const Weights& grads) {
  AdamW().update(w, mu, nu, grads, 1e-3, 1.0, 0, [] { return true; });
}

// expect: an optimizer writes weights, moments and copies, so none of them is const; write update\(weights, moments, grads, rate
void gradients_first(Weights& w, Weights& mu, Weights& nu, const Weights& grads) {
  AdamW().update(w, grads, mu, nu, 1e-3, 1.0, 0, every_leaf);
}

// expect: spmd: the argument for a Tensor is a HostArray of its dtype, or such a Tensor
auto placed_vector(const Data& mesh, const std::vector<float>& host) {
  return spmd(mesh, [](const Tensor<f32, "B/d">& x) { return x; })(host);
}

// expect: accumulate: the leaf `f32\[M/d F\]`, which is added to `f32\[M F\]`, has another spec: dim 1 is `M/d`, not `M`
struct WholeSums {
  Tensor<f32, "M"> bias;
  Tensor<f32, "M F"> w;
};
void other_layout(WholeSums& sums, const Weights& grads) {
  accumulate(sums, grads);
}

// expect: the field `rate` of a struct of tensors is not a tensor, Array or struct of them; keep it elsewhere
struct WithRate {
  Tensor<f32, "M"> bias;
  float rate;
};
void number_in_a_tree(WithRate& w, WithRate& mu, WithRate& nu, const WithRate& grads) {
  AdamW().update(w, mu, nu, grads, 1e-3, 1.0, 0, every_leaf);
}

// a leaf that is not gathered
// expect: a tensor `f32\[M\]` does not fit the declared type `bf16\[M\]`: the dtype is f32, so write `cast<bf16>`
struct Whole {
  Tensor<bf16, "M"> bias;
  Tensor<f32, "M F"> w;
};
auto gathered_in_another_dtype(const Weights& w) {
  return gather_weights<Whole>(w);
}

// expect: Adafactor: a leaf has the same number for two dims, so that rows and columns cannot be told apart
struct Square {
  Tensor<f32, "O 3 3"> w;
};
void two_threes(const Square& w) {
  auto moments = Adafactor::init(w);
}

// expect: reshard moves values, not sums still to be taken: reduce the `\+axis` first
#include "shardlib/io/reshard.hpp"
struct Sums {
  Tensor<f32, "M +d"> bias;
};
void of_sums(const Data& mesh, const Sums& from, Sums& to) {
  io::reshard(mesh, from, to);
}

// expect: hessian_vector_product: the direction has the types of the weights; complete the sums of a product first, with
auto partial_direction(const Data& mesh, const Tensor<f32, "M">& w, const Tensor<f32, "M +d">& direction) {
  const auto loss = [](const Tensor<f32, "M">& x) { return to_partial<" -> +d">(sum(x * x)); };
  return hessian_vector_product(mesh, loss, w, direction);
}

// expect: hessian_vector_product: the weights are f32 or f64, because a difference of bf16 gradients has no digits
auto step_of_bf16(const Data& mesh, const Tensor<bf16, "M">& w) {
  const auto loss = [](const Tensor<bf16, "M">& x) { return to_partial<" -> +d">(sum(cast<f32>(x * x))); };
  return hessian_vector_product(mesh, 0.0, loss, w, w);
}

// expect: global_norm: it does not take this argument; write `global_norm\(mesh, grads\)`
double norm_without_a_mesh(const Weights& grads) {
  return global_norm(grads);
}

// expect: squared_global_norm: it does not take this argument; write `squared_global_norm\(mesh, grads\)`
auto squared_norm_without_a_mesh(const Weights& grads) {
  return squared_global_norm(grads);
}

// expect: fetch: the leaf `bf16\[M\]` is not an array of f32, and all arrays of a tree have one dtype; if all leaves are bf16,
// expect: write `fetch<bf16>\(tree\)`, else `fetch` each leaf
struct TwoDtypes {
  Tensor<f32, "M"> a;
  Tensor<bf16, "M"> b;
};
auto arrays_of_two_dtypes(const TwoDtypes& tree) {
  return fetch(tree);
}

// expect: reduce_gradients: it does not take this argument; write `reduce_gradients\(mesh, grads\)`
auto reduced_without_a_mesh(const Gradients& grads) {
  return reduce_gradients(grads);
}

// expect: value_and_grad: it does not take these arguments; write `value_and_grad\(mesh, f, weights, ...\)`
auto gradient_without_a_mesh(const Weights& w) {
  return value_and_grad([](const Weights& v) { return sum<"M/d F -> +d">(v.w); }, w);
}

// expect: place: it does not take these arguments; write `place<Tensor<f32, ..?M..?>>\(mesh, HostArray<f32>\({size}, values\)
auto tensor_of_a_vector(const Data& mesh, const std::vector<float>& values) {
  return place<Tensor<f32, "M">>(mesh, values);
}

// expect: an optimizer writes weights, moments and copies, so none of them is const
void update_of_const(const Weights& w, Weights& mu, Weights& nu, const Weights& grads) {
  AdamW().update(w, mu, nu, grads, 1e-3, 1.0, 0, every_leaf);
}

// expect: AdamW: it does not take these arguments; write `update\(weights, moments, grads, rate, scale, step, decays\)`, with the
void moments_of_another_optimizer(Weights& w, SGD::Moments<Weights>& moments, const Weights& grads) {
  AdamW().update(w, moments, grads, 1e-3, 1.0, 0, every_leaf);
}

// expect: SGD: it does not take these arguments; write `update\(weights, moments, grads, rate, scale, step, decays\)`, with the
void moments_without_a_struct(Weights& w, Weights& mu, const Weights& grads) {
  SGD().update(w, mu, grads, 1e-3, 1.0, 0, every_leaf);
}

// expect: Adafactor: it does not take these arguments; write `update\(weights, moments, grads, rate, scale, step, decays\)`
struct Other {
  Tensor<f32, "M"> bias;
};
void moments_of_other_weights(Weights& w, Adafactor::Moments<Other>& moments, const Weights& grads) {
  Adafactor().update(w, moments, grads, 1e-3, 1.0, 0, every_leaf);
}

// expect: \* has no form for structs of tensors; write map_tree\(\[\]\(const auto& w, const auto& g\) { return w - g \* 0.1; }, weights,
struct Bias {
  Tensor<f32, "M"> bias;
};
void step_without_map_tree(Bias& w, const Bias& grads) {
  w = w - grads * 0.1;
}

// expect: \+= has no form for structs of tensors; write map_tree\(\[\]\(const auto& w, const auto& g\) { return w - g \* 0.1; }, weights,
// expect: accumulate\(sums, grads\)
void sum_without_accumulate(Weights& sums, const Weights& grads) {
  sums += grads;
}

// expect: - has no form for structs of tensors; write map_tree\(\[\]\(const auto& w, const auto& g\) { return w - g \* 0.1; }, weights,
struct Biases {
  Tensor<f32, "M"> bias;
};
Biases step_down(const Biases& grads) {
  return -grads;
}

// expect: \*= has no form for structs of tensors; write map_tree\(\[\]\(const auto& w, const auto& g\) { return w - g \* 0.1; }, weights,
void clip_without_map_tree(Weights& grads, double scale) {
  grads *= scale;
}

// expect: AdamW: it does not take these arguments; write `update\(weights, moments, grads, rate, scale, step, decays\)`
void rate_alone(Weights& w, AdamW::Moments<Weights>& moments, const Weights& grads) {
  AdamW().update(w, moments, grads, 1e-3);
}

// expect: AdamW: it does not take these arguments; write `update\(.*, with the moments that its `init\(weights\)` has made. Weights and
void const_weights(const Weights& w, AdamW::Moments<Weights>& moments, const Weights& grads) {
  AdamW().update(w, moments, grads, 1e-3, 1.0, 0, every_leaf);
}

// expect: Lion: it does not take these arguments; write `update\(weights, moments, grads, rate, scale, step, decays\)`
void update_without_decays(Weights& w, Lion::Moments<Weights>& moments, const Weights& grads) {
  Lion().update(w, moments, grads, 1e-4, 1.0, 0);
}

// the number would be the momentum
// expect: the settings of an optimizer have names, as in `AdamW{.weight_decay = 0.1}`; weights and the rate are arguments of
auto rate_as_a_setting() {
  return SGD(0.1);
}

// expect: the settings of an optimizer have names, as in `AdamW{.weight_decay = 0.1}`; weights and the rate are arguments of
void weights_as_a_setting(Weights& w) {
  AdamW optimizer(w, 1e-3);
}

// expect: place: it does not take these arguments; write `place<Tensor<f32, ..?M..?>>\(mesh, HostArray<f32>\({size}, values\)
auto tensor_by_its_spec(const Data& mesh, const HostArray<f32>& host) {
  return place<"M">(mesh, host);
}

// expect: place: it does not take this argument; write `place<Tensor<f32, ..?M..?>>\(mesh, HostArray<f32>\({size}, values\)
auto tensor_on_no_mesh(const HostArray<f32>& host) {
  return place<Tensor<f32, "M">>(host);
}

// expect: fetch: it does not take these arguments; write `fetch\(x\)`
auto fetched_with_a_mesh(const Data& mesh, const Weights& w) {
  return fetch(mesh, w.bias);
}

// expect: spmd: it does not take this argument; write `spmd\(mesh, f\)\(x, weights\)`
auto function_on_no_mesh(const HostArray<f32>& host) {
  return spmd([](const Tensor<f32, "B/d">& x) { return x; })(host);
}

// expect: initialize: it does not take these arguments; write `initialize\(mesh, weights, sizes, seed, distribution\)`
void values_without_a_seed(const Data& mesh, Weights& w) {
  initialize(mesh, w, {{"M", 8}, {"F", 8}}, [](std::string_view) { return Normal{0, 0.1}; });
}

// expect: initialize: it does not take these arguments; write `initialize\(mesh, weights, sizes, seed, distribution\)`
void values_without_a_mesh(Weights& w) {
  initialize(w, {{"M", 8}, {"F", 8}}, 1, [](std::string_view) { return Normal{0, 0.1}; });
}

// expect: initialize: distribution\(name\) takes the name of a leaf and returns a Normal, \[\]\(std::string_view name\)
void values_of_a_number(const Data& mesh, Weights& w) {
  initialize(mesh, w, {{"M", 8}, {"F", 8}}, 1, [](std::string_view) { return 0.1; });
}

// expect: initialize: it writes the leaves of the tree, which must not be const
void values_of_const(const Data& mesh, const Weights& w) {
  initialize(mesh, w, {{"M", 8}, {"F", 8}}, 1, [](std::string_view) { return Normal{0, 0.1}; });
}

// expect: update_average: it does not take these arguments; write `update_average\(average, weights, 0.999\)`
void average_without_a_part(Weights& average, const Weights& w) {
  update_average(average, w);
}

// expect: update_average: it writes the average, which must not be const
void average_first(const Weights& w, Weights& average) {
  update_average(w, average, 0.999);
}

// expect: where one has `Weights`, a struct of 2 fields, another has `Less`, a struct of 1 field, so a leaf would have no
struct Less {
  Tensor<f32, "M"> bias;
};
void average_of_another_model(Weights& average, const Less& w) {
  update_average(average, w, 0.999);
}

// expect: accumulate: it writes the sums, so they must not be const
void const_sums(const Weights& sums, const Weights& grads) {
  accumulate(sums, grads);
}

// expect: gather_weights: it does not take this argument; write `gather_weights<Gathered>\(weights\)`, where Gathered is
auto gathered_into_nothing(const Weights& w) {
  return gather_weights(w);
}

// expect: scatter_gradients: it does not take this argument; write `scatter_gradients<Weights>\(std::move\(sums\)\)`
auto scattered_into_nothing(const Weights& sums) {
  return scatter_gradients(sums);
}

// expect: reshard: it does not take these arguments; write `reshard\(mesh, from, to\)`
void reshard_without_a_mesh(const Weights& from, Weights& to) {
  io::reshard(from, to);
}

// expect: save: it does not take these arguments; write `save\(mesh, directory, step, tree\)`
void save_without_a_mesh(const Weights& w) {
  io::save("checkpoints", 3, w);
}

// expect: load: it does not take these arguments; write `load\(mesh, path, tree\)`, whose tree is not const
void load_without_a_mesh(Weights& w) {
  io::load("checkpoints/step-00000003", w);
}

// expect: check_replicas: it does not take these arguments; write `check_replicas\(mesh, weights, ..?after step 7..?\)`
void check_without_a_time(const Data& mesh, const Weights& w) {
  run::check_replicas(mesh, w);
}

// expect: saved_residuals: it does not take these arguments; write `saved_residuals\(f, weights, ...\)`
auto residuals_of_weights(const Weights& w, const Tensor<f32, "B/d M">& x) {
  return saved_residuals(w, loss_of, x);
}

// expect: check_gradients: it does not take these arguments; write `check_gradients\(mesh, f, weights, ...\)`
void check_without_a_mesh(const Weights& w, const Tensor<f32, "B/d M">& x) {
  check_gradients(loss_of, w, x);
}

// expect: hessian_vector_product: it does not take these arguments; write `hessian_vector_product\(mesh, f, weights,
auto product_without_a_mesh(const Weights& w, const Weights& v, const Tensor<f32, "B/d M">& x) {
  return hessian_vector_product(loss_of, w, v, x);
}

// expect: launch: the mesh is not a list of axes with their sizes; write launch\(
void mesh_as_a_text() {
  launch("d=2", [](const DevicePtr&) {});
}

// expect: launch: the function does not take a device; write launch\(
void body_without_a_device() {
  launch({{"d", 2}}, [] {});
}

// expect: launch: the mesh is not a list of axes with their sizes; write launch\(
void one_axis_without_the_list() {
  launch({"d", 2}, [](const DevicePtr&) {});
}

// expect: launch: the mesh is not a list of axes with their sizes; write launch\(
void launched_on_a_mesh(const Data& mesh) {
  launch(mesh, [](const DevicePtr&) {});
}

// expect: run_program: the program takes nothing and returns the exit status; write return run_program\(argc, argv, \[&\]
int program_without_a_status(int argc, char** argv) {
  return run_program(argc, argv, [] { launch({{"d", 2}}, [](const DevicePtr&) {}); });
}

// expect: place: it does not take these arguments; write `place<Tensor<f32, ..?M..?>>\(mesh, HostArray<f32>\({size}, values\)\)`
auto vector_with_sizes(const Data& mesh, const std::vector<float>& values, const Sizes& sizes) {
  return place<Tensor<f32, "M">>(mesh, values, sizes);
}

// expect: place: it does not take these arguments; write `place<Tensor<f32, ..?M..?>>\(mesh, HostArray<f32>\({size}, values\)\)`
auto placed_without_a_mesh(const DevicePtr& device, const HostArray<f32>& host) {
  return place<Tensor<f32, "M">>(device, host);
}

// expect: place: the leaf `f32\[M\]` is not made of an array of f64; give arrays of f32, or `place` each leaf
struct PlacedOne {
  Tensor<f32, "M"> bias;
};
auto placed_in_another_dtype(const Data& mesh, const std::vector<HostArray<f64>>& host) {
  return place<PlacedOne>(mesh, host);
}

// expect: HostArray: it is made of a shape and values of its dtype; write HostArray<f32>\({8, 4}, std::vector<f32>\(32,
auto array_without_a_shape(const std::vector<f32>& values) {
  return HostArray<f32>(values);
}

// expect: HostArray: it is made of a shape and values of its dtype; write HostArray<f32>\({8, 4}, std::vector<f32>\(32,
auto array_of_other_values(const std::vector<double>& values) {
  return HostArray<f32>({8, 4}, values);
}

// expect: HostArray: it is made of a shape and values of its dtype; write HostArray<f32>\({8, 4}, std::vector<f32>\(32,
auto array_of_sizes_without_braces() {
  return HostArray<f32>(4, 2);
}

// expect: fetch: it does not take this argument; write `fetch\(x\)`, or for an array of another dtype `fetch\(cast<f32>\(x\)\)`
auto fetched_in_another_dtype(const Tensor<bf16, "M">& x) {
  return fetch<f32>(x);
}

// expect: as_kokkos of `M`: no variable holds the tensor, so its elements are gone when the statement ends; name it first
auto view_of_a_temporary(const Tensor<f32, "M">& x) {
  return as_kokkos(x * 2.0);
}

// expect: from_memory: the tensor uses the memory of a vector without a name, which is gone when the statement ends; name
auto tensor_over_a_temporary(const Data& mesh) {
  return from_memory<f32, "M">(mesh, {{"M", 4}}, std::vector<f32>(4));
}

// expect: spmd: the argument for a struct of tensors is a std::vector of a HostArray for each leaf, or such a struct
auto one_array_for_a_struct(const Data& mesh, const HostArray<f32>& host) {
  return spmd(mesh, [](const Weights& w) { return w.bias; })(host);
}

// expect: update: the step is a whole number, and comes after the scale of the gradients; write update\(weights, moments,
void scale_behind_the_step(Weights& w, AdamW::Moments<Weights>& moments, const Weights& grads) {
  AdamW().update(w, moments, grads, 1e-3, 0, 1.0, every_leaf);
}

// expect: Options::add: the help is missing; write options.add\("--steps", steps, "training steps"\)
void option_without_help(run::Options& options, std::int64_t& steps) {
  options.add("--steps", steps);
}

// expect: Options::add: the value is a variable that is not const; it holds the default and receives what is given
void option_of_a_number(run::Options& options) {
  options.add("--steps", 10, "training steps");
}

// expect: cast: it does not take this argument; write `cast_tree<Model<bf16>>\(weights\)`, where Model<bf16> is the struct with
auto cast_of_a_tree(const Weights& w) {
  return cast<bf16>(w);
}

// expect: load: it does not take these arguments; write `load\(mesh, path, tree\)`, whose tree is not const and has the sizes
auto loaded_by_its_type(const Data& mesh) {
  return io::load<Weights>(mesh, "runs/first/checkpoints/step-00000100");
}

// expect: Options::flag: the help is missing; write options.flag\("--tied", tied, "one embedding"\)
void flag_without_help(run::Options& options, bool& tied) {
  options.flag("--tied", tied);
}

// expect: Options::flag: the value is a bool; a number or a text is an option, options.add\("--steps", steps, "training steps"\)
void flag_of_a_number(run::Options& options, std::int64_t& steps) {
  options.flag("--steps", steps, "training steps");
}

// expect: Options::flag: the value is a variable that is not const; it holds the default and receives what is given: bool tied
void flag_of_a_constant(run::Options& options) {
  const bool tied = true;
  options.flag("--tied", tied, "one embedding");
}

// a factor of the rate, or of the decay?
// expect: LeafRules: it takes a list of rules, of a pattern and LeafFactors each; write LeafRules{{{"\*norm\*", {.decay = 0}}}}
void rule_of_a_number(Weights& w, AdamW::Moments<Weights>& moments, const Weights& grads) {
  AdamW().update(w, moments, grads, 1e-3, 1.0, 0, {{"*norm*", 0.0}});
}

// expect: LeafRules: it takes a list of rules, of a pattern and LeafFactors each; write LeafRules{{{"\*norm\*", {.decay = 0}}}}
void rules_of_numbers(const Data& mesh, const Weights& grads) {
  static_cast<void>(global_norm(mesh, grads, LeafRules{{{"*norm*", 0.0}, {"bias", 0}}}));
}

// expect: LeafRules: it takes a list of rules, of a pattern and LeafFactors each; write LeafRules{{{"\*norm\*", {.decay = 0}}}}
void rule_in_no_list(Weights& average, const Weights& w) {
  update_average(average, w, 0.999, {{"*norm*", {.rate = 0}}});
}
