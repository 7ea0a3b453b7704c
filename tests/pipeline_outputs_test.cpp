// What the last stage gives of each microbatch, concatenated or reduced by max: the logits and losses of the model that
// is not cut.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "pipeline_model.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using Logits = Tensor<f32, "B/r/d L/s V/t">;
using Losses = Tensor<f32, "B L">;
using AllLogits = Tensor<f32, "N B/r/d L/s V/t">;

/// Per token; of all rows on every device, so that the batch can be concatenated.
Losses losses_of(const Logits& logits, const gpt::Batch& batch) {
  const auto losses = all_reduce<"B/r/d L/s +t -> B/r/d L/s">(gpt::token_losses(logits, batch.targets));
  return all_gather<"B/r/d L/s -> B L">(losses);
}

struct WithOutputs : gpt::Stages<f32> {
  [[nodiscard]] Logits logits(const gpt::StageModel<f32>& w, const gpt::Residual& x) const {
    const auto table = all_gather<"V/t M/d/s -> V/t M">(w.unembed.empty() ? w.embed.at(0) : w.unembed[0]);
    return gpt::output_logits(x, w.final_norm.at(0), table, config);
  }
  [[nodiscard]] const gpt::Batch& at(const pipeline::StagePlace& place) const {
    return batches[static_cast<std::size_t>(place.microbatch)];
  }
  [[nodiscard]] auto loss(const gpt::StageModel<f32>& w, const gpt::Residual& x,
                          const pipeline::StagePlace& place) const
      -> std::tuple<Tensor<f32, "+d +r +s +t">, pipeline::Concat<"N", Logits>, pipeline::Concat<"B", Losses>,
                    pipeline::Max<Logits>, pipeline::Max<Tensor<f32, "">>> {
    const auto y = logits(w, x);
    const auto losses = losses_of(y, at(place));
    return {gpt::mean_loss(y, at(place)), {y}, {losses}, {y}, {max<"B L -> ">(losses)}};
  }
  [[nodiscard]] auto outputs(const gpt::StageModel<f32>& w, const gpt::Residual& x, const pipeline::StagePlace&) const
      -> pipeline::Concat<"N", Logits> {
    return {logits(w, x)};
  }
};

/// Of the model that is not cut, microbatch after microbatch.
struct Due {
  HostArray<f32> logits{{microbatches, microbatch_rows, length, vocabulary}},
      losses{{microbatches * microbatch_rows, length}};
  /// Over the microbatches.
  [[nodiscard]] HostArray<f32> largest_logits() const {
    HostArray<f32> most({microbatch_rows, length, vocabulary});
    for (std::size_t i = 0; i < most.data.size(); ++i) {
      most.data[i] = logits.data[i];
      for (std::size_t at = i; at < logits.data.size(); at += most.data.size())
        most.data[i] = std::max(most.data[i], logits.data[at]);
    }
    return most;
  }
};
Due due_on(const std::string& stage_mesh, const Whole& whole) {
  Due due;
  on_threads(stage_mesh, [&](const DevicePtr& device) {
    const Mesh<"r d s t"> mesh(device);
    gpt::Model<f32> model;
    model.unembed.resize(1);
    model.layers.resize(layers);
    for_each_leaf(
        [&](std::string_view name, auto& leaf) {
          leaf = place<std::remove_cvref_t<decltype(leaf)>>(mesh, whole.weights.at(std::string(name)));
        },
        model);
    for (int m = 0; m < microbatches; ++m) {
      const auto of = batch(mesh, m);
      const auto y = gpt::logits(model, of.inputs, of.segments, gpt::ModelConfig{});
      const auto put = [&](const HostArray<f32>& from, HostArray<f32>& to) {
        if (mesh.rank() == 0) std::ranges::copy(from.data, to.data.begin() + m * std::ssize(from.data));
      };
      put(fetch(y), due.logits);
      put(fetch(losses_of(y, of)), due.losses);
    }
  });
  return due;
}

void expect_same(const HostArray<f32>& is, const HostArray<f32>& due, const std::string& what) {
  expect(is.shape == due.shape, what + ": the shape");
  expect(distance(is, due, what) < 1e-5, what + " differ by " + show(distance(is, due, what)));
}

}  // namespace

TEST_CASE("pipeline: outputs of all microbatches are those of the model that is not cut", "[pipeline]") {
  for (const char* mesh_text : {"p=1,d=1,s=1,t=1", "p=2,d=1,s=1,t=1", "p=4,d=1,s=1,t=1", "p=2,d=2,s=1,t=1",
                                "p=2,d=1,s=1,t=2", "p=2,d=1,s=2,t=1"}) {
    const std::string mesh_name = mesh_text, stage_mesh = mesh_name.substr(mesh_name.find("d="));
    const Whole& whole = unpipelined(false, stage_mesh);
    const Due due = due_on(stage_mesh, whole);
    for (const pipeline::Schedule& schedule : schedules(parse_mesh(mesh_name)[0].size))
      on_mesh(mesh_name, [&](const DevicePtr& device) {
        const std::string what = schedule.name() + " on " + mesh_name;
        const Staging staging(device, schedule, whole.weights, false);
        const auto program = staging.program<WithOutputs>();
        const GptStaged& mesh = staging.mesh;
        const auto& model = staging.model;
        const bool last = mesh.rank() == schedule.rank_of(schedule.num_stages() - 1);
        using Outputs = std::optional<std::tuple<AllLogits, Losses, Logits, Tensor<f32, "">>>;
        const auto expect_all = [&](const Outputs& outputs, const char* of) {
          expect(outputs.has_value() == last, what + ", " + of + ": the rank of the last stage has the outputs");
          if (!outputs) return;
          const auto& [logits, losses, largest_logits, largest_loss] = *outputs;
          expect_same(fetch(logits), due.logits, what + ", " + of + ": the logits");
          expect_same(fetch(losses), due.losses, what + ", " + of + ": the losses");
          expect_same(fetch(largest_logits), due.largest_logits(), what + ", " + of + ": the largest logits");
          expect(std::abs(item(largest_loss) - *std::ranges::max_element(due.losses.data)) < 1e-5F,
                 what + ", " + of + ": the largest loss");
        };
        const auto step = pipeline::value_and_grad(mesh, schedule, microbatches, program, model, activation_sizes);
        expect_all(step.outputs, "value_and_grad");
        const auto value = pipeline::value(mesh, schedule, microbatches, program, model, activation_sizes);
        expect_all(value.outputs, "value");
        const std::optional<std::tuple<AllLogits>> alone =
            pipeline::outputs(mesh, schedule, microbatches, program, model, activation_sizes);
        expect(alone.has_value() == last, what + ": the logits alone");
        if (alone) expect_same(fetch(std::get<0>(*alone)), due.logits, what + ": the logits alone");

        // What is kept in addition leaves the loss and the gradients as they were, to the bit.
        const auto plain = pipeline::value_and_grad(mesh, schedule, microbatches, staging.program<gpt::Stages<f32>>(),
                                                    model, activation_sizes);
        expect(std::memcmp(plain.loss.value()->data().data(), step.loss.value()->data().data(), sizeof(f32)) == 0,
               what + ": the bits of the loss");
        for_each_leaf(
            [&](std::string_view name, const auto& a, const auto& b) {
              expect(std::equal(a.span().begin(), a.span().end(), b.span().begin(), b.span().end()),
                     what + ": the bits of " + std::string(name));
            },
            plain.gradients, step.gradients);
      });
  }
}

namespace {

/// No stages to speak of: a microbatch's number, in rows that are padded, or as many as its number.
struct Odd {
  bool padded = false;
  [[nodiscard]] auto enter(const Tensor<f32, "M">& w, const pipeline::StagePlace&) const -> Tensor<f32, "M"> {
    return w;
  }
  [[nodiscard]] auto stage(const Tensor<f32, "M">&, const Tensor<f32, "M">& x, const pipeline::StagePlace&) const
      -> Tensor<f32, "M"> {
    return x;
  }
  [[nodiscard]] auto outputs(const Tensor<f32, "M">& w, const Tensor<f32, "M">&, const pipeline::StagePlace& at) const
      -> pipeline::Concat<"R", Tensor<f32, "R">> {
    const NamedSize size{"R", 3 + (padded ? 0 : at.microbatch), padded ? 4 : 0};
    return {full<f32, "R">(Mesh<"d t">(w.device()), {size}, at.microbatch)};
  }
};

/// Each microbatch has numbers of its own, and the one in the middle a NaN.
struct Extremes {
  [[nodiscard]] auto enter(const Tensor<f32, "M">& w, const pipeline::StagePlace&) const -> Tensor<f32, "M"> {
    return w;
  }
  [[nodiscard]] auto stage(const Tensor<f32, "M">&, const Tensor<f32, "M">& x, const pipeline::StagePlace&) const
      -> Tensor<f32, "M"> {
    return x;
  }
  [[nodiscard]] auto outputs(const Tensor<f32, "M">&, const Tensor<f32, "M">& x, const pipeline::StagePlace& at) const
      -> pipeline::Max<Tensor<f32, "M">> {
    const Mesh<"d t"> mesh(x.device());
    const f32 nan = std::numeric_limits<f32>::quiet_NaN(), m = static_cast<f32>(at.microbatch);
    return {place<Tensor<f32, "M">>(mesh, HostArray<f32>({3}, {m, at.microbatch == 1 ? nan : m, -m}))};
  }
};

}  // namespace

TEST_CASE("pipeline: Max keeps a NaN, whichever microbatch has it", "[pipeline]") {
  for (const char* text : {"p=1,d=1,t=1", "p=2,d=1,t=1"})
    on_mesh(text, [](const Staged& mesh) {
      const auto w = ones<f32, "M">(mesh.stage(), {{"M", 3}});
      const auto outputs = pipeline::outputs(mesh, pipeline::GPipe(mesh.ranks()), 3, Extremes(), w, {{"M", 3}});
      expect(outputs.has_value() == (mesh.rank() == mesh.ranks() - 1), "on the last rank");
      if (!outputs) return;
      const auto most = fetch(std::get<0>(*outputs)).data;
      expect(most[0] == 2 && std::isnan(most[1]) && most[2] == 0,
             show(most[0]) + " " + show(most[1]) + " " + show(most[2]));
    });
}

TEST_CASE("pipeline: outputs that cannot be concatenated are refused", "[pipeline]") {
  for (const bool padded : {false, true})
    expect_error(
        [&] {
          on_threads("p=1,d=1,t=1", [&](const DevicePtr& device) {
            const Staged mesh(device);
            const auto w = ones<f32, "M">(mesh.stage(), {{"M", 2}});
            (void)pipeline::outputs(mesh, pipeline::GPipe(1), 2, Odd{padded}, w, {{"M", 2}});
          });
        },
        padded ? "fwd_0__0: Concat: dim `R` is 3 (padded to 4), and the padding of a microbatch would be before the "
                 "next one; choose a size that needs none"
               : "fwd_0__1: Concat: microbatch 1 has other sizes than those before it; all microbatches of a step have "
                 "one shape (device 0 (p=0,d=0,t=0) of mesh p=1,d=1,t=1)");
  on_threads("p=1,d=1,t=1", [](const DevicePtr& device) {
    const Staged mesh(device);
    const auto w = ones<f32, "M">(mesh.stage(), {{"M", 2}});
    expect_error<UsageError>(
        [&] {
          (void)pipeline::outputs(mesh, pipeline::GPipe(1), 0, Odd{}, w, {{"M", 2}});
        },
        "GPipe(num_stages=1): 0 microbatches; a forward pass needs at least 1");
  });
}
