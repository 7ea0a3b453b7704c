// Wrong programs: submeshes by an index of an axis.
#include "shardlib/shapes.hpp"

#include <tuple>

using namespace shardlib;

struct Layer {
  Tensor<f32, "M/e F"> w;
};

auto rows(const Mesh<"d e t">& mesh, const Tensor<f32, "B/e/d M/t">& x, const Tensor<f32, "M/t F">& w) {
  const auto layer = [](const Mesh<"d t">&, const Tensor<f32, "B/d M/t">& y, const Tensor<f32, "M/t F">& v) {
    return einsum_unreduced<"B/d M/t, M/t F -> B/d F +t">(y, v);
  };
  return on_submeshes<"B/e">(mesh, layer, x, w);
}
static_assert(std::is_same_v<decltype(rows({}, {}, {})), Tensor<f32, "B/e/d F +t">>);

auto identity = [](const auto& /*part*/, const auto& x) { return x; };

// expect: submesh<`x`>: the mesh `d e t` has no axis `x`; name one of its axes
auto no_axis(const Mesh<"d e t">& mesh) {
  return submesh<"x">(mesh);
}

// expect: submesh<`e`>: the mesh `e` has no axis besides e, and a mesh has at least one; add an axis to the Mesh
auto no_other_axis(const Mesh<"e">& mesh) {
  return submesh<"e">(mesh);
}

// expect: on_submeshes<`N/x`>: the mesh `d e t` has no axis `x`; name one of its axes
auto of_no_axis(const Mesh<"d e t">& mesh, const Tensor<f32, "B">& x) {
  return on_submeshes<"N/x">(mesh, identity, x);
}

// expect: on_submeshes<`e`>: write how results leave the submeshes of an axis e: `N/e`, as shards of a dim, or `\+e`, as
// expect: summands
auto replicated(const Mesh<"d e t">& mesh, const Tensor<f32, "B">& x) {
  return on_submeshes<"e">(mesh, identity, x);
}

// expect: on_submeshes<`N/e`>: argument 1, `B \+e`, is partial over e, so each submesh would compute with a summand of its
// expect: own; reduce it first, with
auto summands(const Mesh<"d e t">& mesh, const Tensor<f32, "B +e">& x) {
  return on_submeshes<"N/e">(mesh, identity, x);
}

// expect: on_submeshes<`N/e`>: argument 2, `B/d/e`, is sharded over e \(dim `B/d/e`\), but not over e first, so that the
// expect: elements of a submesh do not follow each other; shard the dim over e first
auto every_other(const Mesh<"d e t">& mesh, const Tensor<f32, "M">& w, const Tensor<f32, "B/d/e">& x) {
  return on_submeshes<"N/e">(mesh, [](const auto&, const auto&, const auto& y) { return y; }, w, x);
}

// expect: on_submeshes<`N/e`>: argument 1 has `M/e F`, which is sharded over e \(dim `M/e`\) and would have another type in
// expect: the function; pass it as an argument of its own
auto leaf(const Mesh<"d e t">& mesh, const Layer& layer) {
  return on_submeshes<"N/e">(mesh, [](const auto&, const Layer& l) { return l.w; }, layer);
}

// expect: on_submeshes<`N/e`>: argument 1: `B/x` uses axis `x`, which the mesh `d e t` does not have; correct the spec
auto of_another_mesh(const Mesh<"d e t">& mesh, const Tensor<f32, "B/x">& x) {
  return on_submeshes<"N/e">(mesh, identity, x);
}

// expect: on_submeshes<`N/e`>: parameter 2 of the function, `.*Layer`, is given `f32\[B\]`; write f\(part, arguments...\)
auto a_layer(const Mesh<"d e t">& mesh, const Tensor<f32, "B/e">& x) {
  return on_submeshes<"N/e">(mesh, [](const Mesh<"d t">&, const Layer& layer) { return layer.w; }, x);
}

// expect: on_submeshes<`N/e`>: the function has 1 parameter, but is given the submesh and 1 more; write f\(part, arg
auto without_mesh(const Mesh<"d e t">& mesh, const Tensor<f32, "B">& x) {
  return on_submeshes<"N/e">(mesh, [](const Tensor<f32, "B">& y) { return y; }, x);
}

// expect: on_submeshes<`N/e`>: the function returns `B/e`, which is sharded over e \(dim `B/e`\), an axis that its mesh
// expect: `d t` does not have; return what one submesh has
auto sharded_inside(const Mesh<"d e t">& mesh, const Tensor<f32, "B">& x) {
  return on_submeshes<"N/e">(mesh, [](const Mesh<"d t">&, const auto& y) { return shard<"B/e">(y); }, x);
}

// expect: on_submeshes<`\+e`>: the function returns `.*Layer`; return a tensor, or a std::pair or std::tuple of tensors
auto no_tensor(const Mesh<"d e t">& mesh, const Tensor<f32, "B">& x) {
  return on_submeshes<"+e">(mesh, [](const Mesh<"d t">&, const Tensor<f32, "B">&) { return Layer{}; }, x);
}

// expect: value_and_grad: the loss `\+d` is replicated over e
auto not_left(const Mesh<"d e">& mesh, const Tensor<f32, "M">& w) {
  const auto loss = [](const Tensor<f32, "M">& v) { return to_partial<"+d">(sum<"M -> ">(v)); };
  return value_and_grad(mesh, loss, w);
}

// expect: a tensor `f32\[B\]` does not fit the declared type `f32\[B/e\]`
auto still_sharded(const Mesh<"d e t">& mesh, const Tensor<f32, "B/e">& x) {
  return on_submeshes<"N/e">(mesh, [](const Mesh<"d t">&, const Tensor<f32, "B/e">& y) { return y; }, x);
}

// expect: on_submeshes: `std::tuple<.*` is not a tree of tensors: its parts have no names; take a plain struct, or an argument
auto list_of_tensors(const Mesh<"d e t">& mesh, const Tensor<f32, "B">& x) {
  return on_submeshes<"N/e">(mesh, [](const auto&, const auto& all) { return std::get<0>(all); }, std::tuple{x, x});
}

// expect: reinterpret: it does not take these arguments; write `reinterpret<..?d s -> e..?>\(x, new_mesh\)`
auto mesh_in_first_place(const Mesh<"d e">& mesh, const Tensor<f32, "B/d/e M">& x) {
  return reinterpret<"d e -> z">(mesh, x);
}
