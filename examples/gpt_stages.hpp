// The GPT of gpt_model.hpp cut into pipeline stages: which rank holds which weights, and what a stage does.
#pragma once

#include <shardlib/pipeline/program.hpp>

#include <string>
#include <string_view>
#include <vector>

#include "gpt_model.hpp"

namespace gpt {

// The weights of one pipeline rank: its layers; the first rank has the embedding, the last one the output layer.
template <dtype C, bool Whole = false>
struct StageModel {
  Array<"embed", Weight<C, "V/t M/d/s", Whole>> embed;      // of the first stage, and if it is tied of the last one
  Array<"unembed", Weight<C, "V/t M/d/s", Whole>> unembed;  // of the last stage, if not tied
  Array<"layers/p", Layer<C, Whole>> layers;
  Array<"final_norm", Weight<C, "M/t/d/s", Whole>> final_norm;  // of the last stage
};

static_assert(fully_sharded<Mesh<"d s t">, StageModel<f32>>);

// The stages of the model, as pipeline::value_and_grad calls them.
template <dtype C, bool Whole = false>
struct Stages {
  const pipeline::LayerMap& layer_map;
  const std::vector<Batch>& batches;  // of each microbatch
  ModelConfig config;
  StepDropout dropout = {};  // not in evaluation

  [[nodiscard]] auto enter(const StageModel<C, Whole>& w, const pipeline::StagePlace& at) const -> Residual {
    const auto x = token_embeddings(gathered<"V/t M">(w.embed.at(0)), batch(at).inputs);
    return drop(x, dropout.of(at.microbatch).at(0));
  }
  [[nodiscard]] auto stage(const StageModel<C, Whole>& w, Residual x, const pipeline::StagePlace& at) const
      -> Residual {
    const std::size_t first = layer_map.first_of_stage(at.stage), count = layer_map.layers_of_stage(at.stage);
    ModelConfig of_microbatch = config;
    of_microbatch.dropout = dropout.of(at.microbatch);
    std::size_t number = layer_map.layers_before_stage(at.stage);
    for (std::size_t i = first; i < first + count; ++i)
      x = explicit_activation_checkpointing(layer<C, Whole>, config.recompute)(x, batch(at).segments, w.layers.at(i),
                                                                               of_microbatch.of_layer(number++));
    return x;
  }
  [[nodiscard]] auto loss(const StageModel<C, Whole>& w, const Residual& x, const pipeline::StagePlace& at) const
      -> Tensor<f32, "+d +r +s +t"> {
    const auto table = gathered<"V/t M">(w.unembed.empty() ? w.embed.at(0) : w.unembed[0]);
    return mean_loss(output_logits(x, w.final_norm.at(0), table, config), batch(at));
  }

 private:
  [[nodiscard]] const Batch& batch(const pipeline::StagePlace& at) const {
    return batches.at(static_cast<std::size_t>(at.microbatch));
  }
};

// The weights that a rank has, still without values.
inline StageModel<f32> empty_stages(const pipeline::Schedule& schedule, const pipeline::LayerMap& layers, int rank,
                                    bool tied) {
  const bool first = schedule.rank_of(0) == rank, last = schedule.rank_of(schedule.num_stages() - 1) == rank;
  StageModel<f32> w;
  w.embed.resize(first || (last && tied) ? 1 : 0);
  w.unembed.resize(last && !tied ? 1 : 0);
  w.layers.resize(layers.of_rank(rank).size());
  w.final_norm.resize(last ? 1 : 0);
  return w;
}

// The name of a leaf in the whole model, gpt::Model: "layers/0/w_q" of a rank is another layer's. In checkpoints names
// have dots, and something before: "weights.layers.0.w_q".
inline std::string name_in_model(const std::string& name, const std::vector<int>& layers) {
  const std::size_t at = name.find("layers");
  if (at != std::string::npos) {
    const std::size_t begin = at + 7, end = name.find_first_of("./", begin);
    const auto local = static_cast<std::size_t>(std::stoi(name.substr(begin, end - begin)));
    return name.substr(0, begin) + std::to_string(layers.at(local)) + name.substr(end);
  }
  return name.find("unembed") != std::string::npos ? name : name.substr(0, name.size() - 2);  // "embed/0" is "embed"
}

// The ranks that hold a leaf outside of the layers. A tied embedding is on the ranks of the first and the last stage.
// Both get the sum of its gradients, and make the same update.
inline std::vector<int> owners(const pipeline::Schedule& schedule, bool tied, std::string_view leaf) {
  const int last = schedule.num_stages() - 1;
  if (!leaf.starts_with("embed")) return pipeline::ranks_of(schedule, {last});
  return tied ? pipeline::ranks_of(schedule, {0, last}) : pipeline::ranks_of(schedule, {0});
}

}  // namespace gpt
