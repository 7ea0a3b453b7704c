// Wrong programs: specs, meshes, and tensors where another type is declared.
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "shardlib/shapes.hpp"

using namespace shardlib;

// Their members may all be instantiated, also those that are errors of a call.
template class shardlib::Tensor<f32, "M/d">;
template class shardlib::Mesh<"d">;

using Residual = Tensor<f32, "B/d L M/t">;
Residual layer(const Residual& x) {
  return x + x;
}
using Norm = Tensor<f32, "M/t/d">;
auto ones_of_a_named_size(const Mesh<"d t">& mesh, const NamedSize& size) {
  return full<f32, "B/d">(mesh, {size}, 1.0) + zeros<f32, "B/d">(mesh, {{"B", 8}}) * full<f32, "">(mesh, {}, 1.0);
}

// expect: a tensor `f32\[B/d L M \+t\]` does not fit the declared type `f32\[B/d L M/t\]`: dim 3 is `M`, not `M/t`;
// expect: `reduce_scatter<..?B/d L M \+t -> B/d L M/t..?>` \(communicates\)
Residual wrong_return(const Tensor<f32, "B/d L M +t">& x) {
  return x;
}

// expect: a tensor `f32\[B/d L M\]` does not fit the declared type `f32\[B/d L M/t\]`: dim 3 is `M`, not `M/t`; take
// expect: `shard<..?B/d L M -> B/d L M/t..?>` \(no traffic\)
auto wrong_argument(const Tensor<f32, "B/d L M">& x) {
  return layer(x);
}

// expect: a tensor `f32\[L B/d M/t\]` does not fit the declared type `f32\[B/d L M/t\]`: dim 1 is `L`, not `B/d`;
using Checked = decltype(layer(Tensor<f32, "L B/d M/t">()));  // where nothing is called, only typed

// expect: a tensor `f32\[M/d/t\]` does not fit the declared type `f32\[M/t/d\]`: dim 1 is `M/d/t`, not `M/t/d`
Norm order_of_axes(const Tensor<f32, "M/d/t">& x) {
  return x;
}  // seqax's final_layer_norm

// expect: a tensor `bf16\[M/t/d\]` does not fit the declared type `f32\[M/t/d\]`: the dtype is bf16, so write
Norm wrong_dtype(const Tensor<bf16, "M/t/d">& x) {
  return x;
}

// expect: a tensor `f32\[B/d L M\]` does not fit the declared type `f32\[B/d L M/t\]`
void assigned(Residual& to, const Residual& from) {
  to = all_gather<"B/d L M/t -> B/d L M">(from);
}

// expect: a tensor `f32\[M/t\]` does not fit the declared type `f32\[M/t/d\]`
struct Weights {
  Norm scale;
};
Weights wrong_field(const Tensor<f32, "M/t">& scale) {
  return {scale};
}

// expect: tensor spec `M//d`: in `M//d`: `..?..?` is not an axis name \(letters, digits, _\)
using NoAxis = decltype(Tensor<f32, "M//d">());

// expect: tensor spec `A/t B/t`: axis `t` appears twice: a mesh axis can act once in a tensor
using AxisTwice = decltype(Tensor<f32, "A/t B/t">());

// expect: tensor spec `batch, in`: `batch,` is not a dim: write a name, `name/axis`, an integer or `\+axis`, separated
using Commas = decltype(Tensor<f32, "batch, in">());

// expect: tensor spec `2/t`: integer dim `2/t` cannot be sharded: give the dim a name
using ShardedInteger = decltype(Tensor<f32, "2/t">());

// expect: the_spec_is_longer_than_shardlib_allows
using Long =
    Tensor<f32,
           "a_very_long_name_of_a_dim another_very_long_name_of_a_dim a_third_very_long_name_of_a_dim and_a_fourth">;

// expect: mesh `d/t`: write the names of the axes, separated by spaces; sizes come at run time
using NoMesh = decltype(Mesh<"d/t">());

// expect: full: `B/x` uses axis `x`, which the mesh `d t` does not have; correct the spec, or add the axis to the Mesh
auto unknown_axis(const Mesh<"d t">& mesh) {
  return full<f32, "B/x">(mesh, {{"B", 8}}, 1.0);
}

// expect: zeros: `M \+t` is partial, and what each summand should be is not said; make it without `\+t` and take
auto zero_summands(const Mesh<"d t">& mesh) {
  return zeros<f32, "M +t">(mesh, {{"M", 8}});
}

// expect: mesh `d d`: axis `d` appears twice
using AxisTwiceInMesh = decltype(Mesh<"d d">());

// expect: the field `n` of a struct of tensors is not a tensor, Array or struct of them; keep it elsewhere
struct WithNumber {
  Tensor<f32, "A"> a;
  int n;
};
auto names_of_a_number(const WithNumber& tree) {
  return leaf_names(tree);
}

// expect: for_each_leaf: `WithBase` is not a tree of tensors: it has a base class; a tree is a tensor, an Array
struct Base {
  Tensor<f32, "A"> a;
};
struct WithBase : Base {
  Tensor<f32, "A"> b;
};
auto leaves_of_a_base(const WithBase& tree) {
  return parameter_count(tree);
}

// expect: map_tree: `int` is not a tree of tensors: it is not a struct; a tree is
struct NumbersInArray {
  Array<"layers", int> layers;
};
auto map_of_numbers(const NumbersInArray& tree) {
  return map_tree([](const auto& x) { return x; }, tree);
}

// expect: `WithConstructor` is not a tree of tensors: it has private members, a constructor or a virtual function
struct WithConstructor {
  Tensor<f32, "A"> a;
  WithConstructor() {}
};
auto count_of_a_class(const WithConstructor& tree) {
  return parameter_count(tree);
}

// expect: get<&Struct::member>\(\) of a gradient: name a member of the struct that was differentiated by
struct Master {
  Tensor<f32, "M"> bias, gain;
};
struct Copies {
  Tensor<f32, "M"> gain, bias;
};
auto gain_for_bias(const gradient_t<Mesh<"d">, Copies>& gradient) {
  return gradient.get<&Master::bias>();
}

// expect: the fields of `Weights` and `Steps` are paired by their places, but `bias` has another place in each; declare the
struct Weights {
  Tensor<f32, "M"> bias, gain;
};
struct Steps {
  Tensor<f32, "M"> gain, bias;
};
auto bias_by_gain(const Weights& weights, const Steps& steps) {
  return map_tree([](const auto& x, const auto& y) { return x + y; }, weights, steps);
}

// a constraint that is never true
// expect: has_dim: `M/t` is not the name of one dim, so no spec has it; write one name alone, without `/` and `\+`
template <Spec S>
requires(!has_dim<S, "M/t">) auto without_model_dim(const Tensor<f32, S>& x) {
  return x;
}
auto with_model_dim(const Residual& x) {
  return without_model_dim(x);
}

// expect: is_partial: `\+t` is not the name of one axis, so no spec has it; write one name alone
static_assert(!is_partial<"M +t", "+t">);

// expect: without_axis: `d t` is not the name of one axis, so no spec has it; write one name alone
static_assert(without_axis<"M/t/d", "d t"> == Spec("M/t/d"));

// expect: without_sum: `d t` is not the name of one axis, so no spec has it; write one name alone
static_assert(without_sum<"M +d +t", "d t"> == Spec("M +d +t"));

// expect: get of a gradient takes no name; write get<&Struct::member>\(\)
struct Weights {
  Norm scale;
  Tensor<f32, "M"> bias;
};
auto gradient_by_name(const gradient_t<Mesh<"d t">, Weights>& g) {
  return g.get<"bias">();
}

// the longer tree would lose a leaf
// expect: trees are paired leaf by leaf, but where one has `Gain`, a struct of 1 field, another has `Affine`, a struct of 2
// expect: fields, so a leaf would have no partner; give trees of one structure
struct Gain {
  Tensor<f32, "M"> gain;
};
struct Affine {
  Tensor<f32, "M"> gain, bias;
};
auto steps_of_another_model(const Gain& weights, const Affine& steps) {
  return map_tree([](const auto& x, const auto& y) { return x + y; }, weights, steps);
}

// expect: where one has `f32\[M\]`, a tensor, another has `Pair`, a struct of 2 fields, so a leaf would have no partner
struct Pair {
  Tensor<f32, "M"> a, b;
};
struct Nested {
  Pair gain, bias;
};
auto leaf_and_struct(const Pair& weights, const Nested& steps) {
  return map_tree([](const auto& x, const auto& y) { return x + y.a; }, weights, steps);
}

// expect: where one has `.*Array<.*Pair>`, an Array, another has `Pair`, a struct of 2 fields, so a leaf would have no
struct Pair {
  Tensor<f32, "M"> a, b;
};
auto list_and_struct(const Array<"layers", Pair>& weights, const Pair& steps) {
  return map_tree([](const auto& x, const auto& y) { return x + y; }, weights, steps);
}

// expect: where one has `std::optional<.*`, a std::optional, another has `f32\[M\]`, a tensor, so a leaf would have no
struct MaybeBiased {
  Tensor<f32, "M"> gain;
  std::optional<Tensor<f32, "M">> bias;
};
struct Biased {
  Tensor<f32, "M"> gain, bias;
};
auto optional_and_tensor(const MaybeBiased& weights, const Biased& steps) {
  return map_tree([](const auto& x, const auto& y) { return x + y; }, weights, steps);
}

// expect: where one has `std::variant<.*`, a std::variant of 1 types?, another has `std::variant<.*`, a std::variant of 2
struct Dense {
  Tensor<f32, "M F"> up;
};
struct Experts {
  Tensor<f32, "X M F"> up;
};
auto layers_of_other_kinds(const std::variant<Dense>& weights, const std::variant<Dense, Experts>& steps) {
  return map_tree([](const auto& x, const auto&) { return x; }, weights, steps);
}

// expect: `std::monostate` is not a tree of tensors: it has no fields; where a model may have nothing, as in place of an
// expect: alternative, take a std::optional; a tree is a tensor, an Array, std::optional or std::variant of trees
struct Dense {
  Tensor<f32, "M F"> up;
};
auto count_of_no_alternative(const Array<"layers", std::variant<std::monostate, Dense>>& layers) {
  return parameter_count(layers);
}

// expect: `const Dense` is not a tree of tensors: it is const, or a field is const or a reference, so nothing can be
// expect: assigned to it; write the type without const and `&`
struct Dense {
  Tensor<f32, "M F"> up;
};
auto count_of_const(const std::optional<const Dense>& tree) {
  return parameter_count(tree);
}

// expect: a list of trees needs a name; take an Array, which is a std::vector with a name, `Array<..?layers..?, Layer>`
struct MaybeListed {
  std::optional<std::vector<Tensor<f32, "M">>> layers;
};
auto count_of_a_vector_that_may_be_missing(const MaybeListed& tree) {
  return parameter_count(tree);
}

// expect: the field `rate` of a struct of tensors is not a tensor, Array or struct of them; keep it elsewhere
struct Scheduled {
  Tensor<f32, "M"> gain;
  std::optional<double> rate;
};
auto count_with_a_number(const Scheduled& tree) {
  return parameter_count(tree);
}

// expect: is not a tree of tensors: it has private members, a constructor or a virtual function
struct Pointed {
  Tensor<f32, "M"> gain;
  std::unique_ptr<Tensor<f32, "M">> bias;
};
auto count_of_a_pointer(const Pointed& tree) {
  return parameter_count(tree);
}

// expect: is not a tree of tensors: a list of trees needs a name; take an Array, which is a std::vector with a name,
// expect: `Array<..?layers..?, Layer>`
struct Listed {
  Tensor<f32, "M"> gain;
  std::vector<Tensor<f32, "M">> layers;
};
auto count_of_a_vector(const Listed& tree) {
  return parameter_count(tree);
}

// expect: map_tree: `WithConst` is not a tree of tensors: it is const, or a field is const or a reference, so nothing can be
struct WithConst {
  const Tensor<f32, "A"> a;
  Tensor<f32, "A"> b;
};
auto doubled_const(const WithConst& tree) {
  return map_tree([](const auto& x) { return x * 2.0; }, tree);
}

// expect: for_each_leaf: `WithView` is not a tree of tensors: it is const, or a field is const or a reference, so nothing can
struct WithView {
  const Tensor<f32, "A">& a;
};
auto size_of_a_view(const WithView& tree) {
  return parameter_count(tree);
}

// expect: for_each_leaf: `WithReference` is not a tree of tensors: it has more than 23 fields, or a reference; a tree
struct WithReference {
  Tensor<f32, "A">& a;
};
auto size_of_a_reference(const WithReference& tree) {
  return parameter_count(tree);
}

// expect: map_tree: `WithCArray` is not a tree of tensors: a field is a C array; take an Array, `Array<..?layers..?, Layer>`
struct WithCArray {
  Tensor<f32, "A"> first, layers[3];
};
auto doubled_c_array(const WithCArray& tree) {
  return map_tree([](const auto& x) { return x * 2.0; }, tree);
}

// expect: zeros: it does not take these arguments; write `zeros<f32, ..?B/d L..?>\(mesh, {{..?B..?, 8}, {..?L..?, 16}}\)`
auto zeros_without_a_mesh() {
  return zeros<f32, "A">({{"A", 8}});
}

// expect: zeros: it does not take these arguments; write `zeros<f32, ..?B/d L..?>\(mesh, {{..?B..?, 8}, {..?L..?, 16}}\)`
auto zeros_without_a_dtype(const Mesh<"d t">& mesh) {
  return zeros<"A">(mesh, {{"A", 8}});
}

// expect: full: it does not take these arguments; write `full<f32, ..?B/d L..?>\(mesh, {{..?B..?, 8}, {..?L..?, 16}}, 1.0\)`
auto sizes_without_names(const Mesh<"d t">& mesh) {
  return full<f32, "A B">(mesh, {8, 16}, 1.0);
}

// expect: random_normal: it does not take these arguments; write `random_normal<f32, ..?B/d L..?>\(mesh,
auto random_numbers_without_a_mesh() {
  return random_normal<f32, "A">({{"A", 8}}, {1, 2});
}

// expect: full: it does not take these arguments; write `full<f32, ..?B/d L..?>\(mesh, {{..?B..?, 8}, {..?L..?, 16}}, 1.0\)`
auto full_of_what(const Mesh<"d t">& mesh) {
  return full<f32, "A">(mesh, {{"A", 8}});
}

// expect: random_normal: it does not take these arguments; write `random_normal<f32, ..?B/d L..?>\(mesh,
auto random_numbers_of_a_seed(const Mesh<"d t">& mesh) {
  return random_normal<f32, "A">(mesh, {{"A", 8}}, 42);
}

// expect: zeros: it does not take these arguments; write `zeros<f32, ..?B/d L..?>\(mesh, {{..?B..?, 8}, {..?L..?, 16}}\)`
auto zeros_without_sizes(const Mesh<"d t">& mesh) {
  return zeros<f32, "A">(mesh);
}

// expect: a tensor `f32\[A/d 3\]` is not made of numbers, which do not say on which mesh it is; write
// expect: `full<f32, ..?A/d 3..?>\(mesh, {{..?A..?, 8}}, 1.0\)`, or for the values of an array
// expect: `place<Tensor<f32, ..?A/d 3..?>>\(mesh, HostArray<f32>\({A, 3}, values\)\)`
void tensor_of_numbers() {
  const Tensor<f32, "A/d 3"> x = {1.0F, 2.0F, 3.0F};
}

// expect: a tensor `f32\[\+d\]` is not made of numbers, .*, and take `to_partial` of it
auto sum_from_zero(const Tensor<f32, "B/d">& x) {
  Tensor<f32, "+d"> total(0.0);
  total += sum(x);
  return total;
}

// expect: a tensor `f32\[A\]` is not made of numbers, which do not say on which mesh it is
auto tensor_of_a_host_vector(const std::vector<float>& values) {
  return Tensor<f32, "A">(values);
}

// expect: a Mesh is made of the device that `launch` gives to its function, and `launch` has the sizes: launch\(
void mesh_of_a_number() {
  const Mesh<"d"> mesh(4);
}

// expect: a Mesh is made of the device that `launch` gives to its function, and `launch` has the sizes: launch\(
void mesh_of_numbers() {
  const Mesh<"d t"> mesh(4, 2);
}

// expect: a Mesh is made of the device that `launch` gives to its function, and `launch` has the sizes: launch\(
void mesh_of_another_mesh(const Mesh<"d t">& mesh) {
  const Mesh<"d"> other(mesh);
}

// expect: a Mesh is made of the device that `launch` gives to its function, and `launch` has the sizes: launch\(
void mesh_of_sizes_in_braces() {
  const Mesh<"d t"> mesh({{"d", 4}, {"t", 2}});
}

// expect: a Mesh is made of the device that `launch` gives to its function, and `launch` has the sizes: launch\(
void mesh_of_sizes_alone() {
  const Mesh mesh({{"d", 4}});
}

// expect: a Mesh is made of the device that `launch` gives to its function, and `launch` has the sizes: launch\(
struct AxisAndSize {};
void mesh_of_a_vector(const std::vector<AxisAndSize>& sizes) {
  const Mesh mesh(sizes);
}

// expect: a Mesh has the names of its axes in its type; write `const Mesh<..?d t..?> mesh\(device\)`
void mesh_of_a_device_alone(const DevicePtr& device) {
  const Mesh mesh(device);
}

// expect: zeros: it does not take these arguments; write `zeros<f32, ..?B/d L..?>\(mesh, {{..?B..?, 8}, {..?L..?, 16}}\)`
auto one_size_without_the_list(const Mesh<"d t">& mesh) {
  return zeros<f32, "A">(mesh, {"A", 8});
}

// expect: zeros: it does not take these arguments; write `zeros<f32, ..?B/d L..?>\(mesh, {{..?B..?, 8}, {..?L..?, 16}}\)`
auto zeros_of_the_device(const Mesh<"d t">& mesh) {
  return zeros<f32, "A">(mesh.device(), {{"A", 8}});
}

// expect: zeros: it does not take these arguments; write `zeros<f32, ..?B/d L..?>\(mesh, {{..?B..?, 8}, {..?L..?, 16}}\)`
auto zeros_of_a_type(const Mesh<"d t">& mesh) {
  return zeros<Tensor<f32, "A">>(mesh, {{"A", 8}});
}

// expect: random_normal: it does not take these arguments; write `random_normal<f32, ..?B/d L..?>\(mesh,
Tensor<f32, "?"> random_numbers_of_no_spec(const Mesh<"d t">& mesh) {
  return random_normal(mesh, {{"A", 8}}, {1, 2});
}

// expect: span of `M`: no variable holds the tensor, so its elements are gone when the statement ends; name it first,
// expect: `const auto y = relu\(x\);`, and take `y.span\(\)`
float sum_of_a_temporary(const Tensor<f32, "M">& x) {
  float total = 0;
  for (const float v : relu(x).span()) total += v;
  return total;
}

// expect: for_each_leaf: the function does not take a name and a leaf of each tree; write
// expect: `for_each_leaf\(\[\]\(std::string_view name, auto& leaf\) \{ ... \}, tree\)`
struct TwoLeaves {
  Tensor<f32, "M"> a;
  Tensor<f32, "M/d"> b;
};
void leaf_without_a_name(TwoLeaves& w) {
  for_each_leaf([](auto& leaf) { leaf = leaf * 2.0; }, w);
}

// expect: for_each_leaf: the function does not take a name and a leaf of each tree; write
struct OfTwoSpecs {
  Tensor<f32, "M"> a;
  Tensor<f32, "M/d"> b;
};
void leaves_of_one_spec(OfTwoSpecs& w) {
  for_each_leaf([](std::string_view, Tensor<f32, "M">& leaf) { leaf = leaf * 2.0; }, w);
}

// expect: for_each_leaf: the function does not take a name and a leaf of each tree; write
struct OfTwoTrees {
  Tensor<f32, "M"> a;
};
void leaves_of_two_trees(OfTwoTrees& w, const OfTwoTrees& grads) {
  for_each_leaf([](std::string_view, auto& leaf) { leaf = leaf * 2.0; }, w, grads);
}

// expect: map_tree: the function does not take a leaf of each tree, without the name; write
// expect: `map_tree\(\[\]\(const auto& leaf\) \{ return leaf \* 2.0; \}, tree\)`
struct Named {
  Tensor<f32, "M"> a;
  Tensor<f32, "M/d"> b;
};
auto map_with_a_name(const Named& w) {
  return map_tree([](std::string_view, const auto& leaf) { return leaf * 2.0; }, w);
}

// expect: map_tree: the function returns no tensor; return the one for the place of the leaf, or take for_each_leaf
struct Printed {
  Tensor<f32, "M"> a;
  Tensor<f32, "M/d"> b;
};
auto map_to_nothing(const Printed& w) {
  return map_tree([](const auto& leaf) { static_cast<void>(leaf); }, w);
}
