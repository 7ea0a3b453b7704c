// Programs of pipelines: what stages hand over, replicated weights, messages, backward passes in halves, what goes
// wrong.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "pipeline_model.hpp"
#include "random_bits.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

// Stages that hand over two tensors, of which one is replicated over t: its gradient comes back partial. Replicated
// weights, one of them used by every stage: their gradients are partial, and the shared one's are summed over all
// ranks.
struct Pair {
  Tensor<f64, "B/d M"> x;
  Tensor<f64, "B/d N/t"> y;
};
struct PairWeights {
  Tensor<f64, "M"> gain;
  Array<"layers/p", Tensor<f64, "M N/t">> layers;
};
struct PairStages {
  std::vector<std::size_t> first;  // layer of each stage
  std::size_t count = 1;

  [[nodiscard]] Pair enter(const PairWeights& w, const pipeline::StagePlace& at) const {
    const Mesh<"d t"> mesh(w.gain.device());
    const Sizes sizes{{"B", 4}, {"M", 6}, {"N", 8}};
    const auto x = random_normal<f64, "B/d M">(mesh, sizes, {2, static_cast<std::uint64_t>(at.microbatch)});
    return {x * w.gain, zeros<f64, "B/d N/t">(mesh, sizes)};
  }
  [[nodiscard]] Pair stage(const PairWeights& w, Pair z, const pipeline::StagePlace& at) const {
    const std::size_t begin = first[static_cast<std::size_t>(at.stage)];
    for (std::size_t i = begin; i < begin + count; ++i) {
      const auto& layer = w.layers[i];
      z.y = z.y + tanh(einsum_unreduced<"B/d M, M N/t -> B/d N/t">(z.x * w.gain, layer));
      z.x = z.x + all_reduce<"B/d M +t -> B/d M">(einsum_unreduced<"B/d N/t, M N/t -> B/d M +t">(z.y, layer));
    }
    return z;
  }
  [[nodiscard]] auto loss(const PairWeights&, const Pair& z, const pipeline::StagePlace&) const
      -> Tensor<f64, "+d +t"> {
    return sum<"B/d N/t -> +d +t">(square(z.y)) + to_partial<"+d -> +d +t">(sum<"B/d M -> +d">(tanh(z.x)));
  }
};
PairWeights pair_weights(const Mesh<"d t">& mesh, const std::vector<int>& held) {
  const Sizes sizes{{"M", 6}, {"N", 8}};
  PairWeights w{random_normal<f64, "M">(mesh, sizes, {1, 100}), {}};
  for (const int layer : held)
    w.layers.push_back(random_normal<f64, "M N/t">(mesh, sizes, {1, static_cast<std::uint64_t>(layer)}) * 0.3);
  return w;
}

// The same without a stage axis, whose labels spread nothing.
struct ChainWeights {
  Tensor<f64, "M/d"> gain;
  Array<"layers", Tensor<f64, "M/d N/t">> layers;
};
struct Chain {
  using X = Tensor<f64, "B/d M">;
  [[nodiscard]] X enter(const ChainWeights& w, const pipeline::StagePlace& at) const {
    const Mesh<"d t"> mesh(w.gain.device());
    return random_normal<f64, "B/d M">(mesh, {{"B", 4}, {"M", 8}}, {2, static_cast<std::uint64_t>(at.microbatch)}) *
           all_gather<"M/d -> M">(w.gain);
  }
  [[nodiscard]] X stage(const ChainWeights& w, X x, const pipeline::StagePlace& at) const {
    const std::size_t per_stage = w.layers.size() / static_cast<std::size_t>(at.num_stages);
    for (std::size_t i = 0; i < per_stage; ++i) {
      const auto layer = all_gather<"M/d N/t -> M N/t">(w.layers[static_cast<std::size_t>(at.stage) * per_stage + i]);
      const auto hidden = tanh(einsum_unreduced<"B/d M, M N/t -> B/d N/t">(x, layer));
      x = x + all_reduce<"B/d M +t -> B/d M">(einsum_unreduced<"B/d N/t, M N/t -> B/d M +t">(hidden, layer));
    }
    return x;
  }
  [[nodiscard]] auto loss(const ChainWeights&, const X& x, const pipeline::StagePlace&) const -> Tensor<f64, "+d +t"> {
    return to_partial<"+d -> +d +t">(sum<"B/d M -> +d">(square(x)));
  }
};

}  // namespace

TEST_CASE("pipeline: without a stage axis the loop accumulates gradients", "[pipeline]") {
  static_assert(pipeline::valid_program<pipeline::StagedMesh<"", "d t">, Chain, ChainWeights>);
  for (const char* name : {"d=1,t=1", "d=2,t=1", "d=2,t=2"})
    on_mesh(name, [&](const DevicePtr& device) {
      const pipeline::StagedMesh<"", "d t"> mesh(device);
      const Sizes sizes{{"M", 8}, {"N", 6}};
      ChainWeights weights{random_normal<f64, "M/d">(mesh.stage(), sizes, {1, 100}), {}};
      for (std::uint64_t layer = 0; layer < 4; ++layer)
        weights.layers.push_back(random_normal<f64, "M/d N/t">(mesh.stage(), sizes, {1, layer}) * 0.3);
      const Chain chain;
      Tensor<f64, "+d +t"> loss;
      using Gradients = Gradient<Mesh<"d t">, ChainWeights>;
      Gradients due;
      for (int m = 0; m < 3; ++m) {
        const auto whole = [&](const ChainWeights& w) {
          const pipeline::StagePlace at{0, 1, m};
          return chain.loss(w, chain.stage(w, chain.enter(w, at), at), at);
        };
        const auto [l, g] = value_and_grad(mesh.stage(), whole, weights);
        loss = loss ? loss + l : l;
        due = m == 0 ? Gradients(g) : map_tree([](const auto& a, const auto& b) { return a + b; }, due, g);
      }
      const Sizes batch{{"B", 4}, {"M", 8}, {"N", 6}};
      const auto step = pipeline::value_and_grad(mesh, pipeline::GPipe(1), 3, chain, weights, batch);
      static_assert(std::is_same_v<std::decay_t<decltype(step.loss)>, Tensor<f64, "+d +t">>);
      const auto same = [&](const auto& is, const auto& expected) {
        expect(std::memcmp(is.span().data(), expected.span().data(), is.span().size_bytes()) == 0,
               std::string(name) + ": other bits");
      };
      same(step.loss, loss);
      for_each_leaf([&](std::string_view, const auto& is, const auto& expected) { same(is, expected); }, step.gradients,
                    due);
      const auto two = pipeline::value_and_grad(mesh, pipeline::Interleaved1F1B({.num_stages = 2, .mpmd_dim = 1}), 3,
                                                chain, weights, batch);
      for_each_leaf([&](std::string_view, const auto& is, const auto& expected) { same(is, expected); }, two.gradients,
                    due);
      expect_error<UsageError>(
          [&] { static_cast<void>(pipeline::value(mesh, pipeline::Std1F1B(2), 2, chain, weights, batch)); },
          "Std1F1B(num_stages=2) is for 2 ranks, but the mesh has no stage axis; choose a schedule for 1 rank, as "
          "GPipe(1)");
    });
}

TEST_CASE("pipeline: stages hand over structs, and replicated weights get partial gradients", "[pipeline]") {
  // All stages in a row on one device, differentiated as one function.
  double loss = 0;
  std::vector<HostArray<f64>> due;  // of the gain, then of each layer
  detail::run_device(DevicePtr::make(parse_mesh("d=1,t=1"), 0), 1, [&](const DevicePtr& device) {
    const Mesh<"d t"> mesh(device);
    const PairStages stages{{0}, 4};
    for (int m = 0; m < 4; ++m) {
      const auto whole = [&](const PairWeights& w) {
        const pipeline::StagePlace at{0, 1, m};
        return stages.loss(w, stages.stage(w, stages.enter(w, at), at), at);
      };
      const auto [l, gradients] = value_and_grad(mesh, whole, pair_weights(mesh, {0, 1, 2, 3}));
      loss += item(all_reduce<"+d +t -> ">(l));
      const auto values = fetch<f64>(gradients);
      if (due.empty()) due.assign(values.size(), {});
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (due[i].data.empty()) due[i] = HostArray<f64>(values[i].shape);
        for (std::size_t k = 0; k < values[i].data.size(); ++k) due[i].data[k] += values[i].data[k];
      }
    }
  });
  const auto expect_near = [](const HostArray<f64>& is, const HostArray<f64>& expected, const std::string& what) {
    expect(is.data.size() == expected.data.size(), what + ": the size");
    for (std::size_t k = 0; k < is.data.size(); ++k)
      expect(std::abs(is.data[k] - expected.data[k]) < 1e-11 * (1 + std::abs(expected.data[k])), what);
  };
  for (const char* name : {"p=2,d=1,t=2", "p=2,d=2,t=1", "p=4,d=1,t=1"})
    on_mesh(name, [&](const Staged& mesh) {
      const int p = mesh.ranks();
      for (const pipeline::Schedule& schedule :
           {pipeline::Schedule(pipeline::Std1F1B(p)), pipeline::Schedule(pipeline::ZeroBubble(p))}) {
        const pipeline::LayerMap layer_map(schedule, 4);
        const auto mine = layer_map.of_rank(mesh.rank());
        PairStages stages{{}, layer_map.layers_of_stage(0)};
        for (int s = 0; s < p; ++s) stages.first.push_back(layer_map.first_of_stage(s));
        const auto step = pipeline::value_and_grad(mesh, schedule, 4, stages, pair_weights(mesh.stage(), mine),
                                                   {{"B", 4}, {"M", 6}, {"N", 8}});
        static_assert(std::is_same_v<std::decay_t<decltype(step.gradients.get<&PairWeights::gain>())>,
                                     Tensor<f64, "M +d +p +t">>);
        const double mine_and_others = item(all_reduce<"+d +p +t -> ">(step.loss));
        expect(std::abs(mine_and_others - loss) < 1e-11 * std::abs(loss), std::string(name) + ": the loss");
        std::vector<int> all;
        for (int rank = 0; rank < p; ++rank) all.push_back(rank);
        const Tensor<f64, "M +d +t"> gain = mesh.sum_over(all, step.gradients.get<&PairWeights::gain>());
        expect_near(fetch(gain), due[0], std::string(name) + ": the gradient of gain");
        const PairWeights reduced = reduce_gradients(mesh, step.gradients, [&](std::string_view leaf) {
          expect(leaf == "gain", "owners are asked for leaves outside of the layers alone, not " + std::string(leaf));
          return all;
        });
        expect_near(fetch(reduced.gain), due[0], std::string(name) + ": the sum of a tree");
        expect(reduced.gain.device() == mesh.stage().device(), "a gradient is where its weight is");
        const auto& layers_of_rank = step.gradients.get<&PairWeights::layers>();
        for (std::size_t i = 0; i < mine.size(); ++i)
          expect_near(fetch(layers_of_rank[i]), due[1 + static_cast<std::size_t>(mine[i])],
                      std::string(name) + ": the gradient of layer " + show(mine[i]));
      }
    });
}

TEST_CASE("pipeline: gradients of leaves outside of the Arrays over the stage axis are partial over it", "[pipeline]") {
  struct Layer {
    Tensor<f32, "M/d/t"> a;
    Tensor<f32, "M/d"> b;
  };
  struct Inner {
    Array<"layers/p", Layer> layers;
    Tensor<f32, "M/d/t"> outside;
  };
  struct Weights {
    Array<"embed", Tensor<f32, "V M/d/t">> embed;
    Array<"full/p", Tensor<f32, "M/d/t">> full;
    Inner inner;
  };
  using M = pipeline::StagedMesh<"p", "p d t">;
  using G = gradient_t<M, Weights>;
  const G g{};
  static_assert(std::is_same_v<std::decay_t<decltype(g.get<&Weights::embed>()[0])>, Tensor<f32, "V M/d/t +p">>);
  static_assert(std::is_same_v<std::decay_t<decltype(g.get<&Weights::full>())>, Array<"full/p", Tensor<f32, "M/d/t">>>);
  const auto& inner = g.get<&Weights::inner>();
  static_assert(std::is_same_v<std::decay_t<decltype(inner.get<&Inner::outside>())>, Tensor<f32, "M/d/t +p">>);
  const auto& layers = inner.get<&Inner::layers>();
  static_assert(std::is_same_v<std::decay_t<decltype(layers)>, Gradient<Mesh<"d t">, Array<"layers/p", Layer>>>);
  // A tree that has no such leaf, or a mesh without a stage axis: as on the mesh of a stage.
  static_assert(
      std::is_same_v<gradient_t<M, Array<"full/p", Tensor<f32, "M/d/t">>>, Array<"full/p", Tensor<f32, "M/d/t">>>);
  static_assert(std::is_same_v<gradient_t<M, Array<"layers/p", Layer>>, std::decay_t<decltype(layers)>>);
  static_assert(std::is_same_v<gradient_t<pipeline::StagedMesh<"", "d t">, Weights>, Gradient<Mesh<"d t">, Weights>>);
  static_assert(std::is_same_v<gradient_t<M, Tensor<f32, "M/d">>, Tensor<f32, "M/d +p +t">>);
  static_assert(
      std::is_same_v<gradient_t<M, Array<"embed", Tensor<f32, "M/d/t">>>::value_type, Tensor<f32, "M/d/t +p">>);
}

TEST_CASE("pipeline: ranks of stages", "[pipeline]") {
  using namespace pipeline;
  expect(ranks_of(Std1F1B(4), {0, 3}) == std::vector{0, 3}, "both ends");
  expect(ranks_of(Std1F1B(4), {3, 0, 3}) == std::vector{0, 3}, "in ascending order, once");
  expect(ranks_of(DualPipeV({.num_stages = 8, .mpmd_dim = 4}), {0, 7}) == std::vector{0}, "one rank has both ends");
}

TEST_CASE("pipeline: a rank that holds a weight must be among its owners", "[pipeline]") {
  struct Shared {
    Tensor<f32, "M/d/t"> scale;
  };
  on_mesh("p=2,d=1,t=1", [](const Staged& mesh) {
    using G = gradient_t<Staged, Shared>;
    const auto parts = [&] {
      G grads;
      const auto set = [&]<Spec S>(std::string_view, Tensor<f32, S>& leaf) {
        leaf = mesh.part_of_sum(full<f32, "M/d/t">(mesh.stage(), {{"M", 2}}, mesh.rank() + 1.0));
      };
      for_each_leaf(set, grads);
      return grads;
    };
    const Shared sum = reduce_gradients(mesh, parts(), [](std::string_view) { return std::vector{0, 1}; });
    expect(sum.scale.span()[0] == 3 && sum.scale.span()[1] == 3, "the sum of both");
    const std::string rank = show(mesh.rank());
    for (const auto& [owners, given] : {std::pair{std::vector{1 - mesh.rank()}, show(1 - mesh.rank())},
                                        {std::vector{1, 0}, std::string("1 0")},
                                        {std::vector{0, 0, 1, 1}, std::string("0 0 1 1")},
                                        {std::vector<int>{}, std::string()}}) {
      expect_error(
          [&] { static_cast<void>(reduce_gradients(mesh, parts(), [&](std::string_view) { return owners; })); },
          "reduce_gradients: the weight `scale` is on rank " + rank + " of p, but its owners are [" + given +
              "]; name all ranks that hold it, in ascending order");
      expect_error([&] { static_cast<void>(mesh.sum_over(owners, parts().template get<&Shared::scale>())); },
                   "sum_over: the tensor is on rank " + rank + " of p, but its owners are [" + given +
                       "]; name all ranks that hold it, in ascending order");
    }
  });
}

TEST_CASE("pipeline: the norm is that of all ranks, and the norm of one stage is an error", "[pipeline]") {
  struct Mixed {
    Array<"embed", Tensor<f32, "M/d">> embed;
    Array<"layers/p", Tensor<f32, "M/d/t">> layers;
  };
  on_meshes({"p=2,d=1,t=1", "p=2,d=2,t=1", "p=4,d=1,t=1"}, [](const Staged& mesh) {
    const Sizes sizes{{"M", 2}};
    Mixed grads;
    grads.layers.push_back(full<f32, "M/d/t">(mesh.stage(), sizes, 2));
    const double layers = 8 * mesh.ranks();
    const double norm = pipeline::global_norm(mesh, grads.layers);
    expect(std::abs(norm - std::sqrt(layers)) < 1e-6, "of layers " + show(norm));
    grads.embed.push_back(full<f32, "M/d">(mesh.stage(), sizes, 3));
    const double all = pipeline::global_norm(
        mesh, grads, [&](std::string_view leaf) { return mesh.rank() == 1 || !leaf.starts_with("embed"); });
    expect(std::abs(all - std::sqrt(layers + 18)) < 1e-6, "the embedding counts once " + show(all));
    const std::string of_stage =
        "global_norm: the mesh is one stage of a pipeline, so each rank of p would get another number, the norm of its "
        "own stages; write `pipeline::global_norm(mesh, grads, counts)` with the StagedMesh";
    ERROR_IS(of_stage, global_norm(mesh.stage(), grads));
    ERROR_IS(of_stage, global_norm(submesh<"d">(mesh.stage()), Array<"layers", Tensor<f32, "M/t">>{}));
    const std::string of_whole = error_of([&] { static_cast<void>(global_norm(mesh.whole(), grads.layers)); });
    expect(of_whole.starts_with("global_norm: the leaf `0` is on another mesh than the one given, ") &&
               of_whole.find("pipeline::global_norm(mesh, grads, counts)") != std::string::npos,
           of_whole);
    const auto whole = ones<f32, "M/d/p">(mesh.whole(), {{"M", 8}});
    expect(std::abs(global_norm(mesh.whole(), whole) - std::sqrt(8.0)) < 1e-6, "of the whole mesh");
  });
}

namespace {

/// A weight on the rank of the first stage, or on that of the last; the others have none.
using OneWeight = Array<"weight", Tensor<f64, "M/d/t">>;
struct FewStages {
  using X = Tensor<f64, "B M">;
  bool at_first;
  DevicePtr device;

  [[nodiscard]] static X scaled(const X& x, const OneWeight& w) { return x * all_gather<"M/d/t -> M">(w.at(0)); }
  [[nodiscard]] X enter(const OneWeight& w, const pipeline::StagePlace& at) const {
    const auto x = full<f64, "B M">(Mesh<"d t">(device), {{"B", 2}, {"M", 4}}, at.microbatch + 1.0);
    return at_first ? scaled(x, w) : x;
  }
  [[nodiscard]] X stage(const OneWeight&, const X& x, const pipeline::StagePlace&) const { return x * 0.5; }
  [[nodiscard]] auto loss(const OneWeight& w, const X& x, const pipeline::StagePlace&) const -> Tensor<f64, "+d +t"> {
    const auto squares = square(at_first ? x : scaled(x, w));
    return to_partial<" -> +d +t">(sum<"B M -> ">(squares));
  }
};

}  // namespace

TEST_CASE("pipeline: ranks without weights pass gradients on, or need none", "[pipeline]") {
  for (const bool at_first : {true, false})
    for (const pipeline::Schedule& schedule : schedules(4))
      on_meshes({"p=4,d=1,t=1", "p=4,d=2,t=1"}, [&](const Staged& mesh) {
        const int stages = schedule.num_stages(), holder = schedule.rank_of(at_first ? 0 : stages - 1);
        OneWeight w;
        if (mesh.rank() == holder) w.push_back(full<f64, "M/d/t">(mesh.stage(), {{"M", 4}}, 0.7));
        const FewStages program{at_first, mesh.stage().device()};
        const auto step = pipeline::value_and_grad(mesh, schedule, microbatches, program, w, {{"B", 2}, {"M", 4}});
        // Of microbatch m: 2 x 4 times the square of 0.7 (m + 1) / 2^stages.
        double loss = 0, slope = 0;
        for (int m = 0; m < microbatches; ++m) {
          const double x = (m + 1) * std::pow(0.5, stages);
          loss += 8 * 0.49 * x * x;
          slope += 2 * 2 * 0.7 * x * x;
        }
        const std::string what = schedule.name() + (at_first ? ", first" : ", last");
        expect(std::abs(item(all_reduce<"+d +p +t -> ">(step.loss)) - loss) < 1e-12 * loss, what + ": the loss");
        expect(step.gradients.size() == (mesh.rank() == holder ? 1U : 0U), what + ": gradients of what is held");
        for (const auto& gradient : step.gradients)
          for (const double value : gradient.span())
            expect(std::abs(value - slope) < 1e-12 * slope, what + ": the gradient is " + show(value));
      });
}

TEST_CASE("pipeline: a rank that runs other tasks than the first one is an error", "[pipeline]") {
  on_mesh("p=2,d=1,t=1", [](const Staged& mesh) {
    const FewStages program{false, mesh.stage().device()};
    OneWeight w;
    if (mesh.rank() == 1) w.push_back(full<f64, "M/d/t">(mesh.stage(), {{"M", 4}}, 0.7));
    const auto loss_under = [&](const pipeline::Schedule& schedule) {
      const auto step = pipeline::value_and_grad(mesh, schedule, 2, program, w, {{"B", 2}, {"M", 4}});
      return item(all_reduce<"+d +p +t -> ">(step.loss));
    };
    // It would take the second microbatch for the first one.
    const auto backwards = pipeline::parse_csv(
        "fwd_0__1,fwd_0__0,bwd_0__1,bwd_0__0\nfwd_1__1,fwd_1__0,bwd_1__1,bwd_1__0\n", "backwards.csv");
    const pipeline::Schedule forwards = pipeline::GPipe(2);
    const auto apart = [&] {
      expect_error<UsageError>([&] { loss_under(mesh.rank() == 0 ? forwards : backwards); },
                               "pipeline: rank 1 of p runs other tasks (backwards.csv for 2 microbatches) than rank 0 "
                               "(GPipe(num_stages=2) for 2 microbatches); give all ranks the same schedule, for the "
                               "same number of microbatches");
    };
    apart();
    expect(loss_under(forwards) == loss_under(backwards), "the same sums");
    apart();  // also after a step that all have run: a rank that changes alone must not wait for the others
  });
}

TEST_CASE("pipeline: a stage whose input has no gradient may prefetch", "[pipeline]") {
  using X = Tensor<f64, "B/d M">;
  using Layers = Array<"layers/p", Tensor<f64, "M/d">>;
  struct Gains {
    bool ahead;
    [[nodiscard]] X enter(const Layers& w, const pipeline::StagePlace& at) const {
      const auto stream = static_cast<std::uint64_t>(at.microbatch);
      return random_normal<f64, "B/d M">(Mesh<"d t">(w[0].device()), {{"B", 4}, {"M", 8}}, {2, stream});
    }
    [[nodiscard]] X stage(const Layers& all, X x, const pipeline::StagePlace& at) const {
      const auto first = all.begin() + at.stage / 2 * 2;
      const Layers w(first, first + 2);
      const auto gathered = [](const Tensor<f64, "M/d">& gain) { return all_gather<"M/d -> M">(gain); };
      // The derivative by the first stage's first gain needs no gain, so the backward pass gathers one for nothing.
      const auto layer = [](const X& y, const Tensor<f64, "M/d">& gain) { return y * all_gather<"M/d -> M">(gain); };
      for (std::size_t i = 0; i < w.size(); ++i) {
        if (ahead) x = prefetch(x, gathered, w, i);
        x = explicit_activation_checkpointing(layer)(x, w[i]);
      }
      return ahead ? prefetch(x, gathered, w, w.size()) : x;
    }
    [[nodiscard]] auto loss(const Layers&, const X& x, const pipeline::StagePlace&) const -> Tensor<f64, "+d +t"> {
      return to_partial<"+d -> +d +t">(sum<"B/d M -> +d">(square(x)));
    }
  };
  on_meshes({"p=2,d=1,t=1", "p=2,d=2,t=1"}, [](const Staged& mesh) {
    const Sizes sizes{{"B", 4}, {"M", 8}};
    Layers w;
    for (std::uint64_t i = 0; i < 4; ++i) w.push_back(random_normal<f64, "M/d">(mesh.stage(), sizes, {1, i}));
    const pipeline::Interleaved1F1B schedule({.num_stages = 4, .mpmd_dim = 2});
    const auto plain = pipeline::value_and_grad(mesh, schedule, 4, Gains{false}, w, sizes);
    const auto ahead = pipeline::value_and_grad(mesh, schedule, 4, Gains{true}, w, sizes);
    expect_same_bits(plain.gradients, ahead.gradients);
  });
}

TEST_CASE("pipeline: a stage axis that the device has not is one rank", "[pipeline]") {
  on_mesh("d=2,t=1", [](const DevicePtr& device) {
    const pipeline::StagedMesh<"p", "p d t"> mesh(device);
    const pipeline::StagedMesh<"", "d t"> without(device);
    expect(mesh.rank() == 0 && mesh.ranks() == 1, "one rank");
    const Sizes sizes{{"B", 4}, {"M", 8}, {"N", 6}};
    ChainWeights weights{random_normal<f64, "M/d">(mesh.stage(), sizes, {1, 100}), {}};
    weights.layers.push_back(random_normal<f64, "M/d N/t">(mesh.stage(), sizes, {1, 0}));
    const auto step = pipeline::value_and_grad(mesh, pipeline::GPipe(1), 3, Chain{}, weights, sizes);
    const auto due = pipeline::value_and_grad(without, pipeline::GPipe(1), 3, Chain{}, weights, sizes);
    expect(item(all_reduce<"+d +p +t -> ">(step.loss)) == item(all_reduce<"+d +t -> ">(due.loss)), "the loss");
    for_each_leaf([](std::string_view, const auto& is,
                     const auto& expected) { expect(std::ranges::equal(is.span(), expected.span()), "the gradients"); },
                  step.gradients, due.gradients);
  });
}

TEST_CASE("pipeline: a weight that no stage of its rank uses is an error, unless it is frozen", "[pipeline]") {
  struct Forgetful : Chain {
    bool frozen = false;
    [[nodiscard]] X stage(const ChainWeights& w, const X& x, const pipeline::StagePlace&) const {
      if (frozen) static_cast<void>(stop_gradient(w.layers[0]));
      return x;
    }
  };
  on_mesh("d=1,t=1", [](const DevicePtr& device) {
    const pipeline::StagedMesh<"", "d t"> mesh(device);
    const Sizes sizes{{"B", 4}, {"M", 8}, {"N", 6}};
    ChainWeights weights{ones<f64, "M/d">(mesh.stage(), sizes), {}};
    weights.layers.push_back(ones<f64, "M/d N/t">(mesh.stage(), sizes));
    Forgetful program;
    const auto step = [&] { return pipeline::value_and_grad(mesh, pipeline::GPipe(1), 2, program, weights, sizes); };
    const std::string message = error_of([&] { static_cast<void>(step()); });
    expect(message.starts_with("pipeline::value_and_grad: no stage of this rank has a result that depends on the "
                               "weight `layers/0`, so its gradient would be zero; use it in a stage"),
           message);
    program.frozen = true;
    const auto frozen = step();
    for (const double v : frozen.gradients.get<&ChainWeights::layers>()[0].span()) expect(v == 0, "frozen");
  });
}

TEST_CASE("pipeline: a tensor of another microbatch is an error, unless its gradient is stopped", "[pipeline]") {
  struct Caching : Chain {
    bool frozen = false;
    mutable std::optional<Tensor<f64, "M">> gain;
    [[nodiscard]] X stage(const ChainWeights& w, const X& x, const pipeline::StagePlace&) const {
      if (!gain) gain = all_gather<"M/d -> M">(w.gain);
      return x * (frozen ? stop_gradient(*gain) : *gain);
    }
  };
  on_mesh("d=2,t=1", [](const DevicePtr& device) {
    const pipeline::StagedMesh<"", "d t"> mesh(device);
    const Sizes sizes{{"B", 4}, {"M", 8}, {"N", 6}};
    const ChainWeights weights{random_normal<f64, "M/d">(mesh.stage(), sizes, {1, 100}), {}};
    const auto gradient = [&](int microbatches, const Caching& program) {
      return values_of<f64>(pipeline::value_and_grad(mesh, pipeline::GPipe(1), microbatches, program, weights, sizes)
                                .gradients.get<&ChainWeights::gain>()
                                .value()
                                ->data());
    };
    static_cast<void>(gradient(1, Caching{}));
    const std::string message = error_of([&] { static_cast<void>(gradient(2, Caching{})); });
    expect(message.find(": it takes the result of all_gather<`M/d -> M`> at ") != std::string::npos &&
               message.find(", or from another microbatch of a pipeline, so its gradient would be lost; ") !=
                   std::string::npos,
           message);
    Caching caches, fresh;
    caches.frozen = fresh.frozen = true;
    static_cast<void>(gradient(2, caches));
    fresh.gain = stop_gradient(*caches.gain);
    expect_equal(gradient(2, caches), gradient(2, fresh));
    // Where nothing is differentiated, the cache of a differentiated step is a tensor like any other.
    caches.frozen = false;
    static_cast<void>(pipeline::value(mesh, pipeline::GPipe(1), 2, caches, weights, sizes));
  });
}

TEST_CASE("pipeline: messages of one's own, and a device's submesh", "[pipeline]") {
  on_mesh("p=2,d=2,t=1", [](const DevicePtr& device) {
    const Staged mesh(device);
    expect(mesh.stage().size() == 2 && mesh.stage().rank() == mesh.whole().axis_index("d"), "the stage's mesh");
    expect(Device::submesh(device, "p") == mesh.stage().device(), "asked again, the same device");
    expect(mesh.stage().device()->describe() == device->describe(), "messages name the device of the whole mesh");
    const Sizes sizes{{"B", 4}, {"M", 6}};
    using X = Tensor<f32, "B/d M">;
    const auto of_rank = [&](int rank) {
      return random_normal<f32, "B/d M">(mesh.stage(), sizes, {5, static_cast<std::uint64_t>(rank)});
    };
    // Both send first: sends do not wait.
    const int other = 1 - mesh.rank();
    for (int i = 0; i < 3; ++i) mesh.send(of_rank(mesh.rank()) * (i + 1.0), other);
    for (int i = 0; i < 3; ++i) {
      const X got = mesh.receive<X>(sizes, other), due = of_rank(other) * (i + 1.0);
      expect(std::equal(got.span().begin(), got.span().end(), due.span().begin()), "messages arrive in order");
    }
    expect_error([&] { (void)Device::submesh(device, "x"); }, "unknown axis 'x': the mesh is p=2,d=2,t=1");
  });
}

namespace {
// Stages whose devices along t compute different things.
struct TowerWeights {
  Array<"layers/p", Tensor<f64, "M">> layers;
};
struct Towers {
  using X = Tensor<f64, "B/d M">;
  [[nodiscard]] static X enter(const TowerWeights& w, const pipeline::StagePlace& at) {
    const Mesh<"d t"> mesh(w.layers[0].device());
    return random_normal<f64, "B/d M">(mesh, {{"B", 4}, {"M", 6}}, {2, static_cast<std::uint64_t>(at.microbatch)});
  }
  [[nodiscard]] static X layer(const X& x, const Tensor<f64, "M">& gain) {
    const Mesh<"d t"> mesh(x.device());
    const auto tower = [t = mesh.axis_index("t")](const Mesh<"d">&, const X& rows, const Tensor<f64, "M">& g) {
      return t == 0 ? tanh(rows * g) : rows * square(g);
    };
    return x + all_reduce<"B/d M">(on_submeshes<"+t">(mesh, tower, x, gain));
  }
  [[nodiscard]] static X stage(const TowerWeights& w, const X& x, const pipeline::StagePlace&) {
    return layer(x, w.layers[0]);
  }
  [[nodiscard]] static auto loss(const TowerWeights&, const X& x, const pipeline::StagePlace&) -> Tensor<f64, "+d +t"> {
    return to_partial<"+d -> +d +t">(sum<"B/d M -> +d">(square(x)));
  }
};
}  // namespace

TEST_CASE("pipeline: a stage may run programs of its own on submeshes", "[pipeline]") {
  on_meshes({"p=2,d=1,t=2", "p=2,d=2,t=2"}, [&](const Staged& mesh) {
    const auto gain = [&](int layer) {
      return random_normal<f64, "M">(mesh.stage(), {{"M", 6}}, {1, static_cast<std::uint64_t>(layer)});
    };
    const Towers towers;
    const auto step = pipeline::value_and_grad(mesh, pipeline::Std1F1B(2), 3, towers, TowerWeights{{gain(mesh.rank())}},
                                               {{"B", 4}, {"M", 6}});
    std::vector<double> due(6);
    for (int m = 0; m < 3; ++m) {
      const auto whole = [&](const TowerWeights& w) {
        const pipeline::StagePlace at{0, 1, m};
        const auto x = Towers::layer(Towers::enter(w, at), w.layers[0]);
        return Towers::loss(w, Towers::layer(x, w.layers[1]), at);
      };
      const auto grads = value_and_grad(mesh.stage(), whole, TowerWeights{{gain(0), gain(1)}}).second;
      const auto own = fetch(grads.get<&TowerWeights::layers>()[static_cast<std::size_t>(mesh.rank())]);
      for (std::size_t i = 0; i < due.size(); ++i) due[i] += own.data[i];
    }
    const auto found = fetch(step.gradients.get<&TowerWeights::layers>()[0]);
    for (std::size_t i = 0; i < due.size(); ++i)
      expect(due[i] != 0 && std::abs(found.data[i] - due[i]) <= 1e-12 * std::abs(due[i]),
             show(found.data[i]) + " instead of " + show(due[i]));
  });
}

TEST_CASE("backward in halves: only the VJPs that are needed run, and the sums are the same bits", "[pipeline]") {
  on_mesh("d=2,t=1", [](const DevicePtr& device) {
    using X = Tensor<f32, "B/d M">;
    struct Weights {
      Tensor<f32, "M/d N"> a, b;
    };
    const Mesh<"d t"> mesh(device);
    const Sizes sizes{{"B", 4}, {"M", 8}, {"N", 8}};
    const auto layer = [](const X& x, const Weights& w) -> X {
      const auto y = tanh(einsum_unreduced<"B/d M, M N -> B/d N">(x, all_gather<"M/d N -> M N">(w.a)));
      return x + einsum_unreduced<"B/d N, M N -> B/d M">(y, all_gather<"M/d N -> M N">(w.b)) * x;
    };
    for (const bool recompute : {false, true}) {
      const auto record = [&](X& x, Weights& w, bool halves) {
        x = X(detail::as_leaf(*random_normal<f32, "B/d M">(mesh, sizes, {1, 0}).value()));
        w.a = Tensor<f32, "M/d N">(detail::as_leaf(*random_normal<f32, "M/d N">(mesh, sizes, {1, 1}).value()));
        w.b = Tensor<f32, "M/d N">(detail::as_leaf(*random_normal<f32, "M/d N">(mesh, sizes, {1, 2}).value()));
        // Each weight is used twice, so that sums are taken.
        X y = x;
        for (int i = 0; i < 2; ++i) y = recompute ? explicit_activation_checkpointing(layer)(y, w) : layer(y, w);
        detail::Backward pass({{y.value()->slot, detail::detached(*x.value())}},
                              {x.value()->slot, w.a.value()->slot, w.b.value()->slot});
        const auto scattered = [&] { return detail::program_state(device).counts["reduce_scatter"].calls; };
        const auto before = scattered();
        if (!halves) return pass.run();
        auto found = pass.run({true, false, false});
        expect(found[0] && !found[1] && !found[2], "the input's gradient alone");
        expect(scattered() == before, "the weights' gradients are not reduced yet");
        auto rest = pass.run();
        expect(!rest[0] && rest[1] && rest[2], "then the weights' gradients");
        expect(scattered() == before + 4, "each is reduced once");
        rest[0] = found[0];
        return rest;
      };
      X x;
      Weights w;
      const auto whole = record(x, w, false), halves = record(x, w, true);
      for (std::size_t i = 0; i < whole.size(); ++i)
        expect(std::memcmp(whole[i]->data().data(), halves[i]->data().data(), whole[i]->bytes()) == 0,
               "the bits of gradient " + show(i));
    }
  });
}

namespace {

struct Throwing : gpt::Stages<f32> {
  [[nodiscard]] auto stage(const gpt::StageModel<f32>& w, const gpt::Residual& x, const pipeline::StagePlace& at) const
      -> gpt::Residual {
    if (at.stage == 1 && at.microbatch == 3) throw Error("the disk is full");
    return gpt::Stages<f32>::stage(w, x, at);
  }
};

}  // namespace

TEST_CASE("pipeline: what fails ends all ranks with one message", "[pipeline]") {
  const Whole& whole = unpipelined(false);
  const auto run = [&](const std::string& mesh, const auto& step) {
    on_threads(mesh, [&](const DevicePtr& device) { step(device); });
  };
  for (const pipeline::Schedule& schedule : schedules(2))
    expect_error(
        [&] {
          run("p=2,d=1,s=1,t=2",
              [&](const DevicePtr& device) { (void)staged<Throwing>(device, schedule, whole.weights, false); });
        },
        "fwd_1__3: the disk is full");
  expect_error<UsageError>(
      [&] {
        run("p=2,d=1,s=1,t=1", [&](const DevicePtr& device) {
          (void)staged<gpt::Stages<f32>>(device, pipeline::Std1F1B(4), whole.weights, false);
        });
      },
      "Std1F1B(num_stages=4) is for 4 ranks, but the mesh has p=2; choose p=4, or a schedule for 2 ranks");
  expect_error<UsageError>([] { (void)pipeline::LayerMap(pipeline::Std1F1B(3), 2); },
                           "2 layers are too few for the 3 stages of Std1F1B(num_stages=3): each needs one; choose "
                           "more layers, or fewer stages");
  expect_error<UsageError>(
      [] {
        (void)pipeline::LayerMap(pipeline::Std1F1B(3), std::vector{1, 2});
      },
      "2 numbers of layers are given for the 3 stages of Std1F1B(num_stages=3); give one for each stage");
  expect_error<UsageError>(
      [] {
        (void)pipeline::LayerMap(pipeline::Std1F1B(3), std::vector{1, 0, 2});
      },
      "stage 1 of Std1F1B(num_stages=3) has 0 layers; each stage needs at least one");
  expect_error(
      [&] {
        run("p=2,d=1,s=1,t=1", [&](const DevicePtr& device) {
          (void)staged<gpt::Stages<f32>>(device, pipeline::Std1F1B(2), whole.weights, false,
                                         {{"B", microbatch_rows}, {"L", length + 1}, {"M", 16}});
        });
      },
      "fwd_0__0: stage 0 hands over `B/r/d L/s M/t` with L = 6, but the sizes given for the pipeline say 7; give what "
      "a microbatch has (device 0 (p=0,d=0,s=0,t=0) of mesh p=2,d=1,s=1,t=1)");
}
