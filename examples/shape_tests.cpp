// Shape tests at compile time: the layers of gpt_fsdp, checked without data, Kokkos, MPI, or running anything.
//
//   g++ -std=c++20 -fsyntax-only -I include examples/shape_tests.cpp
//
// This is JAX's eval_shape: decltype names the type of a result, and static_assert compares it. A wrong dim, a missing
// gather, a forgotten or doubled reduction in gpt_model.hpp stops the compiler with a sentence; so does a stage
// that does not return what the next one takes.
#include <shardlib/shapes.hpp>

#include <type_traits>
#include <utility>

#include "gpt_decoding.hpp"
#include "gpt_stages.hpp"
#include "tutorial_stages.hpp"

using namespace shardlib;

// The type of f's result for arguments of these types; of a member function, the first one is the object.
template <auto f, class... Args>
using result = std::invoke_result_t<decltype(f), const Args&...>;
template <class Is, class Expected>
inline constexpr bool same = std::is_same_v<Is, Expected>;

using gpt::Batch, gpt::Ids, gpt::ModelConfig, gpt::NewTokens, gpt::Residual;
using Layer = gpt::Layer<f32>;
using Model = gpt::Model<f32>;
using Cache = gpt::Cache<f32>;
using Hidden = Tensor<f32, "B/r/d L/s M">;
using GptMesh = Mesh<"r d s t">;

// Layers: what goes in and what comes out. A branch ends with the sum over t, of which each device has a shard.
static_assert(same<result<gpt::gathered_norm<f32>, Residual, Tensor<f32, "M/t/d/s">, ModelConfig>, Hidden>);
static_assert(same<result<&Layer::attention, Layer, Hidden, Ids, ModelConfig>, Residual>);
static_assert(same<result<&Layer::feed_forward, Layer, Hidden, ModelConfig>, Residual>);
static_assert(same<result<gpt::layer<f32>, Residual, Ids, Layer, ModelConfig>, Residual>);

// The model: logits sharded over the vocabulary, a loss that is a sum over the whole mesh.
static_assert(same<result<gpt::logits<f32>, Model, Ids, Ids, ModelConfig>, Tensor<f32, "B/r/d L/s V/t">>);
static_assert(same<result<gpt::token_losses, Tensor<f32, "B/r/d L/s V/t">, Ids>, Tensor<f32, "B/r/d L/s +t">>);
static_assert(same<result<gpt::loss<f32>, Model, Batch, ModelConfig>, Tensor<f32, "+d +r +s +t">>);

// In bf16 products and gradients are bf16, and the residual stream and the loss stay f32.
static_assert(
    same<result<&gpt::Layer<bf16>::attention, gpt::Layer<bf16>, Tensor<bf16, "B/r/d L/s M">, Ids, ModelConfig>,
         Tensor<bf16, "B/r/d L/s M/t">>);
static_assert(same<result<gpt::layer<bf16>, Residual, Ids, gpt::Layer<bf16>, ModelConfig>, Residual>);

// The bodies of templates are checked where they are instantiated: all that the loss and decoding call, in both dtypes.
template auto gpt::loss(const gpt::Model<f32>&, const Batch&, const ModelConfig&) -> Tensor<f32, "+d +r +s +t">;
template auto gpt::loss(const gpt::Model<bf16>&, const Batch&, const ModelConfig&) -> Tensor<f32, "+d +r +s +t">;
template auto gpt::cached_logits(const gpt::Model<f32>&, Array<"layers", gpt::Cache<f32>>&, const NewTokens&,
                                 const ModelConfig&) -> Tensor<f32, "B/r/d L/s V/t">;
template struct gpt::Stages<f32>;
template struct tutorial::Stages<bf16>;

// The library's cross_entropy has the types of gpt_model.hpp's own.
static_assert(same<decltype(cross_entropy(std::declval<Tensor<f32, "B/r/d L/s V/t">>(), std::declval<Ids>())),
                   result<gpt::token_losses, Tensor<f32, "B/r/d L/s V/t">, Ids>>);

// Decoding: attention to a cache has the type of training's.
using Cached = decltype(gpt::cached_attention(std::declval<Hidden>(), std::declval<Cache&>(), std::declval<NewTokens>(),
                                              std::declval<Layer>(), ModelConfig{}));
static_assert(same<Cached, result<&Layer::attention, Layer, Hidden, Ids, ModelConfig>>);

// Training: every weight is fully sharded over d, s and t. It is replicated over r, so its gradient is a sum over r
// that is still pending, which no update takes: only the reduced one has the weight's own type.
static_assert(fully_sharded<Mesh<"d s t">, Model>);
static_assert(same<gradient_t<GptMesh, Tensor<f32, "M/d/s F/t">>, Tensor<f32, "M/d/s F/t +r">>);
using LossAndGradient = decltype(value_and_grad(std::declval<GptMesh>(), gpt::loss<f32>, std::declval<Model>(),
                                                std::declval<Batch>(), ModelConfig{}));
static_assert(same<LossAndGradient, std::pair<Tensor<f32, "+d +r +s +t">, gradient_t<GptMesh, Model>>>);

// Pipelines: a stage returns what the next one takes, and layers lie on the ranks of the stage axis.
using Staged = pipeline::StagedMesh<"p", "p r d s t">;
static_assert(pipeline::valid_program<Staged, gpt::Stages<f32>, gpt::StageModel<f32>>);
static_assert(
    pipeline::valid_program<pipeline::StagedMesh<"p", "p d t">, tutorial::Stages<f32>, tutorial::StageModel<f32>>);

// Cotangents: replicated and partial swap, sharded stays.
static_assert(same<Dual<Hidden, "r d s t">, Tensor<f32, "B/r/d L/s M +t">>);
static_assert(same<Dual<Residual, "r d s t">, Residual>);

// `legal` tests that a wrong program does not compile.
static_assert(!legal<rules::all_gather, OpSpec("M/t/d/s -> M/d/s"), Spec("M/t/d/s")>, "gathers act on the last axes");
static_assert(!legal<rules::add, OpName("+"), Spec("B/r/d L/s M/t"), Spec("B/r/d L/s M +t")>,
              "a residual needs the reduce_scatter");
static_assert(!legal<rules::loss, Spec("r d s t"), DType::f32, Spec("+d +r +s")>,
              "a loss replicated over t would count twice");
