// Wrong programs: gradients of weights that several ranks of a pipeline hold. They need the whole library; where it is
// not to be had, the gallery leaves this file out.
// needs: runtime
#include "shardlib/pipeline/execute.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;

using Staged = pipeline::StagedMesh<"p", "p d t">;
struct Weights {
  Tensor<f32, "M/t"> scale;  // of all stages
  Array<"layers/p", Tensor<f32, "M/t/d">> layers;
};
using Parts = gradient_t<Staged, Weights>;
constexpr auto every_leaf = [](std::string_view) { return true; };

void step(const Staged& mesh, const pipeline::Schedule& schedule, Weights& w, Weights& mu, Weights& nu,
          const Parts& parts) {
  const auto owners = [&](std::string_view) { return pipeline::ranks_of(schedule, {0, 1}); };
  const Weights grads = reduce_gradients(mesh, parts, owners);
  const auto counts = [&](std::string_view leaf) { return mesh.rank() == 0 || leaf != "scale"; };
  AdamW().update(w, mu, nu, grads, 1e-3, 1 / pipeline::global_norm(mesh, grads, counts), 0, every_leaf);
}

// no sum over the ranks: each would update its copy by its own stages' part
// expect: AdamW: the gradient `f32\[M/t \+d \+p\]` of the weight `f32\[M/t\]` is partial over d; take the sums with
void forgotten_sum(Weights& w, Weights& mu, Weights& nu, const Parts& parts) {
  AdamW().update(w, mu, nu, parts, 1e-3, 1.0, 0, every_leaf);
}

// the same with a fully sharded weight
// expect: AdamW: the gradient `f32\[V/t M/d \+p\]` of the weight `f32\[V/t M/d\]` is partial over p; take the sums with
struct Tied {
  Array<"embed", Tensor<f32, "V/t M/d">> embed;
};
void forgotten_embedding(Tied& w, Tied& mu, Tied& nu, const gradient_t<Staged, Tied>& parts) {
  AdamW().update(w, mu, nu, parts, 1e-3, 1.0, 0, every_leaf);
}

// a second sum is a multiple of the first
// expect: sum_over: `M/t \+d` is not partial over the stage axis p: the sum over the ranks is taken already, and a second
auto doubled_sum(const Staged& mesh, const std::vector<int>& owners, const Tensor<f32, "M/t +d +p">& part) {
  return mesh.sum_over(owners, mesh.sum_over(owners, part));
}

// expect: reduce_gradients: the gradient `f32\[M/t \+d \+p\]` is of a weight outside of the Arrays over p, which several
// expect: reduce_gradients\(mesh, grads, owners\)
auto without_owners(const Staged& mesh, const Parts& parts) {
  return reduce_gradients(mesh, parts);
}

// expect: reduce_gradients: owners\(leaf name\) returns a std::vector<int>, the ranks that hold the weight
auto one_owner(const Staged& mesh, const Parts& parts) {
  return reduce_gradients(mesh, parts, [](std::string_view) { return 0; });
}

// expect: reduce_gradients: the gradient `f32\[M/t \+d \+p\]` is partial over p, which the mesh `d t` does not have
// expect: reduce_gradients\(mesh, grads, owners\)
auto of_a_stage(const Staged& mesh, const Parts& parts) {
  return reduce_gradients(mesh.stage(), parts);
}

// expect: global_norm: the leaf `f32\[M/t \+d \+p\]` is partial over d, and the norm of a sum is not that of its parts
double norm_of_parts(const Staged& mesh, const Parts& parts) {
  return pipeline::global_norm(mesh, parts, every_leaf);
}

// each rank would count the shared weight
// expect: pipeline::global_norm: a leaf is outside of the Arrays over p, so several ranks may hold it, of which one counts
double counted_by_all(const Staged& mesh, const Weights& grads) {
  return pipeline::global_norm(mesh, grads);
}

// expect: random_normal: it does not take these arguments; write `random_normal<f32, ..?B/d L..?>\(mesh.stage\(\), sizes, {seed, 0}\)`
auto tensor_of_all_stages(const Staged& mesh) {
  return random_normal<f32, "M/t">(mesh, {{"M", 8}}, {1, 0});
}

// expect: initialize: it does not take these arguments; write `initialize\(mesh.stage\(\), weights, sizes, seed, distribution\)`
void weights_of_all_stages(const Staged& mesh, Weights& w) {
  initialize(mesh, w, {{"M", 8}}, 1, [](std::string_view) { return Normal{0, 1}; });
}

// expect: value_and_grad: it does not take these arguments; write `value_and_grad\(mesh, schedule, microbatches, program, weights,
auto microbatches_first(const Staged& mesh, const pipeline::Schedule& schedule, const Weights& w, const Sizes& sizes) {
  return pipeline::value_and_grad(mesh, 4, schedule, every_leaf, w, sizes);
}
