// Wrong programs: pipelines whose stages, loss, outputs or layers do not go together. The program above the cases is
// the right one; execute.hpp makes the same checks where it is run.
#include "shardlib/pipeline/program.hpp"

using namespace shardlib;
using pipeline::StagePlace;

using Staged = pipeline::StagedMesh<"p", "p d t">;
using X = Tensor<f32, "B/d M/t">;
using Loss = Tensor<f32, "+d +t">;
struct Weights {
  Array<"embed", Tensor<f32, "V/t M/d">> embed;
  Array<"layers/p", Tensor<f32, "M/t/d">> layers;
};

struct Right {
  X enter(const Weights&, const StagePlace&) const;
  X stage(const Weights&, const X&, const StagePlace&) const;
  Loss loss(const Weights&, const X&, const StagePlace&) const;
};
static_assert(pipeline::valid_program<Staged, Right, Weights>);
struct RightOutputs : Right {
  std::tuple<Loss, pipeline::Concat<"N", X>, pipeline::Concat<"M", Tensor<f32, "B/d M">>, pipeline::Max<X>> loss(
      const Weights&, const X&, const StagePlace&) const;
};
static_assert(pipeline::valid_program<Staged, RightOutputs, Weights>);
struct Pair {
  X x;
  Tensor<f32, "B/d"> y;
};
struct RightPair {
  Pair enter(const Weights&, const StagePlace&) const;
  Pair stage(const Weights&, const Pair&, const StagePlace&) const;
  Loss loss(const Weights&, const Pair&, const StagePlace&) const;
};
static_assert(pipeline::valid_program<Staged, RightPair, Weights>);

// expect: pipeline: `stage` takes `f32\[B/d M/t\]`, but returns `f32\[B/d M \+t\]`; the next stage takes what this one
// expect: reduce_scatter<..?B/d M \+t -> B/d M/t..?>`
struct ForgetsItsSum : Right {
  Tensor<f32, "B/d M +t"> stage(const Weights&, const X&, const StagePlace&) const;
};
static_assert(pipeline::valid_program<Staged, ForgetsItsSum, Weights>);

// expect: pipeline: `stage` takes `f32\[B/d M/t\]`, but returns `bf16\[B/d M/t\]`; the next stage takes what this one
struct ChangesItsDtype : Right {
  Tensor<bf16, "B/d M/t"> stage(const Weights&, const X&, const StagePlace&) const;
};
static_assert(pipeline::valid_program<Staged, ChangesItsDtype, Weights>);

// expect: pipeline: `stage` returns another type than it takes; the next stage takes what this one returns
struct DropsOne : RightPair {
  X stage(const Weights&, const Pair&, const StagePlace&) const;
};
static_assert(pipeline::valid_program<Staged, DropsOne, Weights>);

// expect: value_and_grad: the loss `\+d` is replicated over t: each device of t would count it again
struct CountsTwice : Right {
  Tensor<f32, "+d"> loss(const Weights&, const X&, const StagePlace&) const;
};
static_assert(pipeline::valid_program<Staged, CountsTwice, Weights>);

// expect: value_and_grad: the loss `B/d \+t` has dims; `sum` it to a scalar whose sum over the devices is pending
struct LossPerRow : Right {
  Tensor<f32, "B/d +t"> loss(const Weights&, const X&, const StagePlace&) const;
};
static_assert(pipeline::valid_program<Staged, LossPerRow, Weights>);

// expect: pipeline: the program has no `enter\(weights, place\) -> X` that is const and takes these weights
struct NoEnter {
  X stage(const Weights&, const X&, const StagePlace&) const;
  Loss loss(const Weights&, const X&, const StagePlace&) const;
};
static_assert(pipeline::valid_program<Staged, NoEnter, Weights>);

// expect: pipeline: the program has no `stage\(weights, X, place\) -> X` that is const and takes these weights and what
struct StageNotConst : Right {
  X stage(const Weights&, const X&, const StagePlace&);
};
static_assert(pipeline::valid_program<Staged, StageNotConst, Weights>);

// expect: pipeline: the program has no `loss\(weights, X, place\) -> Loss` that is const and takes these weights and
struct LossOfOtherArguments : Right {
  Loss loss(const Weights&, const X&) const;
};
static_assert(pipeline::valid_program<Staged, LossOfOtherArguments, Weights>);

// expect: pipeline: a stage hands over a tensor, or a plain struct of tensors; an Array, a std::optional and a std::variant have no fixed length
using Many = Array<"x", X>;
struct HandsOverMany {
  Many enter(const Weights&, const StagePlace&) const;
  Many stage(const Weights&, const Many&, const StagePlace&) const;
  Loss loss(const Weights&, const Many&, const StagePlace&) const;
};
static_assert(pipeline::valid_program<Staged, HandsOverMany, Weights>);

// the layers lie on the ranks of another axis than the stages
// expect: pipeline: the label `layers/d` of an Array among the weights spreads its entries over another axis than `p`
// expect: write `layers/p`
struct Elsewhere {
  Array<"layers/d", Tensor<f32, "M/t/d">> layers;
};
struct OnElsewhere {
  X enter(const Elsewhere&, const StagePlace&) const;
  X stage(const Elsewhere&, const X&, const StagePlace&) const;
  Loss loss(const Elsewhere&, const X&, const StagePlace&) const;
};
static_assert(pipeline::valid_program<Staged, OnElsewhere, Elsewhere>);

// the same: the stage axis of this mesh is another one
// expect: pipeline: the label `layers/p` of an Array among the weights spreads its entries over another axis than `s`
static_assert(pipeline::valid_program<pipeline::StagedMesh<"s", "s d t">, Right, Weights>);

// expect: Concat<`B`>: dim `B/d` is sharded, so each device sees only its shard of it; gather it first
// expect: or keep the microbatches apart along a dim that the tensor has not
struct ConcatenatesShards : Right {
  std::tuple<Loss, pipeline::Concat<"B", X>> loss(const Weights&, const X&, const StagePlace&) const;
};
static_assert(pipeline::valid_program<Staged, ConcatenatesShards, Weights>);

// expect: pipeline: `loss` returns its loss, or a tuple of the loss and outputs, each a `pipeline::Concat<"dim", Tensor>`
struct SaysNotHow : Right {
  std::tuple<Loss, X> loss(const Weights&, const X&, const StagePlace&) const;
};
static_assert(pipeline::valid_program<Staged, SaysNotHow, Weights>);

// a maximum has no gradient
// expect: pipeline: `loss` returns a Concat or a Max in place of the loss, but these have no gradient; return the loss
struct LearnsFromAMaximum : Right {
  pipeline::Max<Tensor<f32, "">> loss(const Weights&, const X&, const StagePlace&) const;
};
static_assert(pipeline::valid_program<Staged, LearnsFromAMaximum, Weights>);

// the largest part is not the largest sum
// expect: Max: the operand `B/d \+t` is partial over t, and Max is not linear
struct MaximumOfParts : Right {
  std::tuple<Loss, pipeline::Max<Tensor<f32, "B/d +t">>> loss(const Weights&, const X&, const StagePlace&) const;
};
static_assert(pipeline::valid_program<Staged, MaximumOfParts, Weights>);

// expect: Schedule: it is made of a name, owners and a generator; a schedule of the library has a function,
// expect: make_schedule\("1f1b", num_stages, mpmd_dim\)
auto schedule_by_its_name() {
  return pipeline::Schedule("1f1b", 2);
}
