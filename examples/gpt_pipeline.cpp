// Trains a model as a pipeline: stages over mesh axis p, each of them fully sharded over d and tensor parallel over t,
// and the GPT context parallel over s and replicated over r, if the mesh has it.
//
//   gpt_pipeline --data text.txt --mesh p=2,d=2,t=1 --microbatches 8 --schedule interleaved-1f1b
//   mpirun -n 2 gpt_pipeline --data text.txt --mesh p=2 --microbatches 8 --run runs/first
//   gpt_pipeline --layers 8 --mesh p=4 --microbatches 16 --schedule dualpipe-v --show-schedule
//   gpt_pipeline --mesh p=2,d=4 --show-placement
//   gpt_pipeline --preset jaxpp-tutorial --mesh p=4 --schedule interleaved-1f1b --stages 8
//
// The model is the GPT of gpt_model.hpp, or with --model jaxpp-tutorial the transformer of JaxPP's tutorial notebook;
// gpt_stages.hpp and tutorial_stages.hpp have the stages. A run's checkpoints hold the whole model, so every other
// layout can resume from them, and for the GPT also gpt_fsdp.
#include <fmt/format.h>

#include <shardlib/io/agree.hpp>
#include <shardlib/io/file.hpp>
#include <shardlib/io/reshard.hpp>
#include <shardlib/pipeline/execute.hpp>
#include <shardlib/pipeline/timeline.hpp>
#include <shardlib/run/dry_run.hpp>
#include <shardlib/run/graph.hpp>
#include <shardlib/run/microbatches.hpp>
#include <shardlib/run/plan.hpp>
#include <shardlib/run/run_directory.hpp>
#include <shardlib/run/token_tensors.hpp>
#include <shardlib/run/trained.hpp>
#include <shardlib/shardlib.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "gpt_sampling.hpp"
#include "gpt_setup.hpp"
#include "gpt_stages.hpp"
#include "pipeline_text.hpp"
#include "trainers.hpp"
#include "tutorial_stages.hpp"

using namespace shardlib;

struct Options : gpt::ModelOptions, TrainerOptions {
  std::string model = "gpt", schedule = "1f1b", timeline, stage_layers;
  std::int64_t stages = 0;
  bool show_schedule = false, show_placement = false, fuse_steady_state = false;
};
constexpr std::int64_t most_shown_microbatches = 1024;

// The layers of each stage: those of --stage-layers, or as evenly as possible.
pipeline::LayerMap chosen_layers(const Options& o, const pipeline::Schedule& schedule) {
  if (o.stage_layers.empty())
    return naming_option(fmt::format("--layers {}", o.layers), [&] { return pipeline::LayerMap(schedule, o.layers); });
  std::vector<int> counts;
  // getline ignores an empty word at the end.
  std::istringstream list(o.stage_layers.ends_with(',') ? o.stage_layers + ',' : o.stage_layers);
  for (std::string word; std::getline(list, word, ',');) {
    if (word.empty() || word.size() > 6 || word.find_first_not_of("0123456789") != std::string::npos)
      throw UsageError(fmt::format("--stage-layers {}: '{}' is not a number; give one for each stage, as in 2,3,3",
                                   o.stage_layers, word));
    counts.push_back(std::stoi(word));
  }
  if (const auto all = std::accumulate(counts.begin(), counts.end(), std::int64_t{0}); all != o.layers)
    throw UsageError(fmt::format("--stage-layers {} are {} layers, but --layers is {}", o.stage_layers, all, o.layers));
  return naming_option("--stage-layers " + o.stage_layers, [&] { return pipeline::LayerMap(schedule, counts); });
}

// The models' common layout: the schedule, and the layers that it places on each rank.
template <Spec Axes>
struct Layout {
  using Staged = pipeline::StagedMesh<"p", Axes>;
  Layout(const Staged& m, const pipeline::Schedule& s, const Options& options)
      : mesh(m), schedule(s), o(options), layer_map(chosen_layers(options, s)), layers(layer_map.of_rank(m.rank())) {}
  // The names of the whole model: for the GPT those of gpt_fsdp, so that each loads what the other has saved.
  [[nodiscard]] io::Rename names_in_model() const {
    return [held = layers](const std::string& name) { return gpt::name_in_model(name, held); };
  }
  const Staged& mesh;
  const pipeline::Schedule& schedule;
  const Options& o;
  pipeline::LayerMap layer_map;
  std::vector<int> layers;  // of this rank
};

// ---- the GPT --------------------------------------------------------------------------------------------------------

using PipelineMesh = Mesh<"p r d s t">;

template <dtype C>
class WholeGpt;

// C is the dtype of computation.
template <dtype C>
class Gpt : Layout<"p r d s t"> {
 public:
  using Layout::names_in_model, Layout::Staged;
  using Sampled = WholeGpt<C>;
  using Weights = gpt::StageModel<f32>;
  using Copies = gpt::StageModel<C>;
  using Whole = gpt::StageModel<C, true>;  // with --gather per-step, what the stages read
  using Batches = std::vector<gpt::Batch>;
  using Activation = gpt::Residual;
  using Layout::Layout;

  // A model with the leaves of the whole one. Its tensors are empty, or those of a layer of this rank.
  template <dtype D>
  [[nodiscard]] gpt::Model<D> leaves_of_whole(const gpt::StageModel<D>& w) const {
    gpt::Model<D> whole;
    whole.unembed.resize(o.tied ? 0 : 1);
    whole.layers.assign(static_cast<std::size_t>(o.layers), w.layers.at(0));
    return whole;
  }
  [[nodiscard]] std::vector<std::string> leaf_names(const Weights& w) const {
    return shardlib::leaf_names(leaves_of_whole(w));
  }
  // The initial weights of gpt_fsdp that this rank holds. They depend on the layer's number in the whole model.
  [[nodiscard]] Weights initial_weights() const {
    const gpt::Initializer first{mesh.stage(), o, o.training.seed};
    Weights w = gpt::empty_stages(schedule, layer_map, mesh.rank(), o.tied);
    for (auto& embed : w.embed) first.embed(embed);
    for (auto& unembed : w.unembed) first.unembed(unembed);
    for (std::size_t i = 0; i < layers.size(); ++i) first.layer(w.layers[i], layers[i]);
    for (auto& norm : w.final_norm) first.scale(norm);
    return w;
  }
  [[nodiscard]] Batches batches(const std::vector<io::TokenBatch>& microbatches) const {
    Batches batches;
    for (const io::TokenBatch& rows : microbatches)
      batches.push_back(
          run::token_tensors<gpt::Batch, "B/r/d L/s">(mesh.stage(), rows, o.training.seq, o.config.order));
    return batches;
  }
  template <bool OfWhole = false>
  [[nodiscard]] gpt::Stages<C, OfWhole> program(const Batches& batches, const gpt::StepDropout& dropout = {}) const {
    return {layer_map, batches, o.config, dropout};
  }
  [[nodiscard]] Sizes activation_sizes(std::int64_t rows) const {
    Sizes sizes = gpt::sizes_of(o, mesh.stage().device()->axes());
    sizes.insert(sizes.end(), {{"B", rows}, {"L", o.training.seq}});
    return sizes;
  }
  [[nodiscard]] std::vector<int> owners(std::string_view leaf) const { return gpt::owners(schedule, o.tied, leaf); }
  // Two ranks hold a tied embedding, and only the first one counts its gradient.
  [[nodiscard]] bool counts(std::string_view name) const {
    return mesh.rank() == schedule.rank_of(0) || !name.starts_with("embed");
  }
  // The number of parameters of the whole model, which no rank holds.
  [[nodiscard]] std::int64_t parameters() const {
    const std::int64_t heads = o.n_q_per_kv * o.n_kv * o.d_head, keys = o.n_kv * o.d_head;
    const std::int64_t layer = o.d_model * (2 + 2 * heads + 2 * keys + 3 * o.d_ff) +
                               (o.qkv_bias ? heads + 2 * keys : 0) + (o.qk_norm ? 2 * o.d_head : 0);
    return (o.tied ? 1 : 2) * o.vocabulary * o.d_model + o.layers * layer + o.d_model;
  }
  [[nodiscard]] double flops_per_token() const { return gpt::flops_per_token(o, parameters(), o.training.seq); }
  [[nodiscard]] static Tensor<f32, ""> total(const Tensor<f32, "+d +p +r +s +t">& loss) {
    return all_reduce<"+d +p +r +s +t -> ">(loss);
  }
};

// The whole GPT, fully sharded over all devices, from which samples are drawn as gpt_fsdp draws them. The weights are
// moved there in memory before the first token after a step, and freed at the next step.
template <dtype C>
class WholeGpt {
 public:
  using Stages = Gpt<C>;
  WholeGpt(const Stages& model, const PipelineMesh& mesh, const Options& o)
      : model_(model), mesh_(mesh), whole_(reinterpret<"p r d -> d">(mesh).device()), o_(o) {}
  WholeGpt(const WholeGpt&) = delete;
  WholeGpt& operator=(const WholeGpt&) = delete;

  // Makes the program draw samples. `trained` and this must outlive it.
  void add_to(run::Program& program, run::Trained<typename Stages::Weights, typename Stages::Copies>& trained) {
    program.begin_step = [this, before = program.begin_step] {
      before();
      weights_.clear();
    };
    const auto weights = [this, &trained]() -> const gpt::Model<C>& {
      if (weights_.empty()) {
        auto& to = weights_.emplace_back(model_.leaves_of_whole(trained.model()));
        const Sizes sizes = gpt::sizes_of(o_, whole_.device()->axes());
        for_each_leaf([&]<dtype D, Spec S>(std::string_view, Tensor<D, S>& leaf) { leaf = zeros<D, S>(whole_, sizes); },
                      to);
        io::reshard(mesh_, trained.model(), to, {.rename_from = model_.names_in_model()});
      }
      return weights_[0];
    };
    program.decode = gpt::decoder<C>(whole_, weights, o_, o_.training.seq);
  }

 private:
  const Stages& model_;
  const PipelineMesh& mesh_;
  const Mesh<"r d s t"> whole_;
  const Options& o_;
  std::vector<gpt::Model<C>> weights_;  // one or none
};

// ---- the transformer of JaxPP's tutorial ----------------------------------------------------------------------------

template <dtype C>
class Tutorial : Layout<"p d t"> {
 public:
  // It has no text to sample.
  struct Sampled {
    Sampled(const Tutorial&, const Mesh<"p d t">&, const Options&) {}
    template <class Trained>
    void add_to(run::Program&, Trained&) {}
  };
  using Layout::names_in_model, Layout::Staged;
  using Weights = tutorial::StageModel<f32>;
  using Copies = tutorial::StageModel<C>;
  using Whole = tutorial::StageModel<C, true>;
  using Batches = std::vector<tutorial::Batch>;
  using Activation = tutorial::Hidden;
  using Layout::Layout;

  // Sizes of the model's dims, padded so that the devices of a stage divide them.
  static Sizes sizes_of(const Options& o, std::int64_t devices) {
    return {padded("M", o.d_model, devices),
            padded("H", o.n_q_per_kv * o.n_kv, devices),
            {"D", o.d_head},
            padded("F", o.d_ff, devices)};
  }

  // The names in the whole model.
  [[nodiscard]] std::vector<std::string> leaf_names(Weights w) const {
    w.layers.resize(static_cast<std::size_t>(o.layers));
    return shardlib::leaf_names(w);
  }
  // Flax's initial weights: kernels by LeCun's rule, truncated and scaled to its variance; biases 0, scales 1.
  [[nodiscard]] Weights initial_weights() const {
    const Mesh<"d t">& stage = mesh.stage();
    const Sizes sizes = model_sizes();
    Weights w;
    for (const int number : layers) {
      auto& block = w.layers.emplace_back();
      std::uint64_t stream = 6 * static_cast<std::uint64_t>(number);
      const auto draw = [&]<Spec S>(Tensor<f32, S>& kernel, std::int64_t fan_in) {
        const double deviation = 1.0 / std::sqrt(static_cast<double>(fan_in)) / 0.87962566103423978;
        kernel = random_truncated_normal<f32, S>(stage, sizes, {o.training.seed, stream++}) * deviation;
      };
      for (auto* kernel : {&block.w_q, &block.w_k, &block.w_v}) draw(*kernel, o.d_model);
      draw(block.w_o, heads() * o.d_head);
      draw(block.w_up, o.d_model);
      draw(block.w_down, o.d_ff);
      for (auto* bias : {&block.b_q, &block.b_k, &block.b_v}) *bias = zeros<f32, "H/t/d D">(stage, sizes);
      block.b_up = zeros<f32, "F/t/d">(stage, sizes);
      for (auto* bias : {&block.b_o, &block.b_down, &block.norm1.bias, &block.norm2.bias})
        *bias = zeros<f32, "M/t/d">(stage, sizes);
      for (auto* scale : {&block.norm1.scale, &block.norm2.scale}) *scale = ones<f32, "M/t/d">(stage, sizes);
    }
    return w;
  }
  // The notebook's inputs and targets are all ones.
  [[nodiscard]] Batches batches(const std::vector<io::TokenBatch>& microbatches) const {
    Sizes sizes = model_sizes();
    sizes.insert(sizes.end(), {{"B", o.training.batch / std::ssize(microbatches)}, {"L", o.training.seq}});
    const auto numbers = ones<f32, "B/d L M">(mesh.stage(), sizes);
    return Batches(microbatches.size(), {numbers, numbers});
  }
  template <bool OfWhole = false>
  [[nodiscard]] tutorial::Stages<C, OfWhole> program(const Batches& batches,
                                                     const gpt::StepDropout& /*dropout*/ = {}) const {
    return {layer_map, batches, o.config.recompute};
  }
  [[nodiscard]] Sizes activation_sizes(std::int64_t rows) const {
    Sizes sizes = model_sizes();
    sizes.insert(sizes.end(), {{"B", rows}, {"L", o.training.seq}});
    return sizes;
  }
  [[nodiscard]] static std::vector<int> owners(std::string_view) { return {}; }  // all leaves are in layers
  [[nodiscard]] bool counts(std::string_view) const { return true; }
  [[nodiscard]] std::int64_t parameters() const {
    const std::int64_t width = heads() * o.d_head;
    return o.layers * (4 * o.d_model * width + 3 * width + 2 * o.d_model * o.d_ff + o.d_ff + 6 * o.d_model);
  }
  [[nodiscard]] double flops_per_token() const {
    return run::training_flops_per_token(parameters(), o.layers, heads() * o.d_head, o.training.seq);
  }
  [[nodiscard]] static Tensor<f32, ""> total(const Tensor<f32, "+d +p +t">& loss) {
    return all_reduce<"+d +p +t -> ">(loss);
  }

 private:
  [[nodiscard]] std::int64_t heads() const { return o.n_q_per_kv * o.n_kv; }
  [[nodiscard]] Sizes model_sizes() const { return sizes_of(o, mesh.stage().size()); }
};

// ---- a training step ------------------------------------------------------------------------------------------------

template <class Model>
class Trainer {
 public:
  using Staged = typename Model::Staged;
  Trainer(const Staged& mesh, const pipeline::Schedule& schedule, const Options& o)
      : model(mesh, schedule, o), mesh_(mesh), schedule_(schedule), o_(o) {
    trained.state.weights = model.initial_weights();
    run::check_groups(o.optimizer.groups, model.leaf_names(trained.state.weights));
    run::begin(trained, o.optimizer);
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  const Model model;
  run::Trained<typename Model::Weights, typename Model::Copies> trained;

  // Clipping by the norm over all ranks, --optimizer on each rank's own weights. Patterns of leaves are of their names
  // in the whole model.
  run::StepResult step(const run::Step& step) {
    const auto factors = [&, name = model.names_in_model()](std::string_view leaf) {
      return o_.optimizer.groups(name(std::string(leaf)));
    };
    auto [loss, pending] = summed_grads(step);
    const auto grads =
        reduce_gradients(mesh_, std::move(pending), [&](std::string_view leaf) { return model.owners(leaf); });
    const auto squares = pipeline::squared_global_norm(
        mesh_, grads, [&](std::string_view leaf) { return model.counts(leaf) && factors(leaf).rate != 0; });
    // The host reads the loss and the norm together. The host of a GPU waits for the step here, and nowhere else.
    const auto result = run::step_result(run::Scalars{Model::total(loss)}, squares);
    return run::update(trained, o_.optimizer, o_.training, step, grads, result, factors);
  }

  [[nodiscard]] double validate(const io::TokenBatch& rows) {
    const auto microbatches = static_cast<int>(o_.training.microbatches);
    const auto batches = model.batches(io::split_rows(rows, microbatches));
    return item(Model::total(pipeline::value(mesh_, schedule_, microbatches, model.program(batches), trained.model(),
                                             model.activation_sizes(batches[0].inputs.size("B")))));
  }

  // Draws the last step as measured, and above it the simulation with its task times.
  void draw() const {
    const std::string& run = o_.training.directory;
    const std::string file = !o_.timeline.empty() ? o_.timeline : run.empty() ? "" : run + "/timeline.svg";
    if (file.empty()) return;
    const auto lists = schedule_.tasks(static_cast<int>(o_.training.microbatches));
    const auto measured = pipeline::all_intervals(mesh_, lists, intervals_);
    if (mesh_.whole().rank() != 0) return;
    const auto plan = pipeline::simulate(lists, pipeline::measured_costs(measured));
    const std::string svg = pipeline::to_svg(
        {.title = schedule_.name() + ", mesh " + o_.training.mesh, .planned = plan.intervals, .measured = measured});
    io::replace_file(file, io::as_bytes(svg));
  }

 private:
  // Loss and gradients of all microbatches under the schedule. With --gather per-step a rank gathers its weights before
  // its first task, and scatters the sums of their gradients after its last one.
  auto summed_grads(const run::Step& step) {
    const auto batches = model.batches(step.microbatches);
    const gpt::StepDropout dropout{o_.dropout, o_.training.seed, step.number, o_.training.microbatches};
    const auto by = [&](const auto& program, const auto& weights) {
      auto result = pipeline::value_and_grad(mesh_, schedule_, static_cast<int>(o_.training.microbatches), program,
                                             weights, model.activation_sizes(batches[0].inputs.size("B")));
      intervals_ = std::move(result.intervals);
      return std::pair{std::move(result.loss), std::move(result.gradients)};
    };
    if (!o_.gather.per_step) return by(model.program(batches, dropout), trained.copies);
    using Gradients = gradient_t<Staged, typename Model::Copies>;
    return run::gathered_once<typename Model::Whole, Gradients>(
        trained.copies, [&](const auto& whole) { return by(model.template program<true>(batches, dropout), whole); });
  }

  const Staged& mesh_;
  const pipeline::Schedule& schedule_;
  const Options& o_;
  std::vector<pipeline::Interval> intervals_;  // of the last step, this rank's
};

// ---- the program ----------------------------------------------------------------------------------------------------

// Options without effect here: shardlib-sample has those for texts of a run, and the tutorial's model draws no samples.
void declare_without_effect(run::Options& options, const Options& o) {
  options.without_effect({"--sample-only", "--chat", "--turns", "--evaluate"}, [](const run::Options&) {
    return "in gpt_pipeline: leave it out, and use shardlib-sample RUN, which starts gpt_fsdp with the settings of the "
           "run";
  });
  options.without_effect(
      {"--sample-every", "--prompt", "--sample-begin", "--top-k", "--top-p", "--stop", "--samples", "--temperature"},
      [&o](const run::Options&) {
        return o.model == "gpt" ? "" : "with --model jaxpp-tutorial, which has no text: leave it out";
      });
  options.without_effect({"--max-tokens"}, [&o](const run::Options&) {  // 0 is allowed: it draws no samples
    return o.model == "gpt" || o.training.sample.max_tokens == 0
               ? ""
               : "with --model jaxpp-tutorial, which has no text: leave it out";
  });
}

void declare(run::Options& options, Options& o) {
  run::declare(options, o.training);
  // These say where and when the layers run, and what is computed again. They do not change what the layers compute.
  o.training.may_change = {"schedule", "stages", "stage_layers", "recompute", "gather", "collective_matmul"};
  o.training.model_settings = {{"init", "depth-scaled"}};  // what checkpoints without --init have
  declare_without_effect(options, o);
  options.group("pipeline");
  options.add(
      "--schedule", o.schedule,
      "gpipe, 1f1b, eager-1f1b, interleaved-1f1b, interleaved-gpipe, kimi-k2, zero-bubble, dualpipe-v, or a file "
      "that ends in .csv");
  options.add("--stages", o.stages, "number of stages (0: 2 p if a rank of the schedule has several, else p)",
              run::size(0));
  options.add("--stage-layers", o.stage_layers,
              "layers of each stage, as in 2,3,3 (default: even, the first stages with one more)");
  options.flag("--show-schedule", o.show_schedule,
               "no training: print the tasks of each rank, a simulation of them, and the transfers between ranks",
               run::command_line_only());
  options.flag(
      "--fuse-steady-state", o.fuse_steady_state,
      "with --show-schedule: interleaved-1f1b or kimi-k2 with each pair of a forward and a backward task fused",
      run::command_line_only());
  options.without_effect({"--fuse-steady-state"}, [&o](const run::Options&) -> std::string {
    if (!o.show_schedule) return "without --show-schedule: a training step is the same, so leave it out";
    return o.schedule == "interleaved-1f1b" || o.schedule == "kimi-k2"
               ? ""
               : "with --schedule " + o.schedule + ": give interleaved-1f1b or kimi-k2, or leave it out";
  });
  options.flag("--show-placement", o.show_placement,
               "no training: print the arrays that each rank holds, with shardings and bytes",
               run::command_line_only());
  options.add("--timeline", o.timeline,
              "picture of the last step, planned and measured (default: timeline.svg in --run's folder)",
              run::value_name("FILE.svg") | run::ends_in(".svg") | run::command_line_only());
  options.without_effect({"--timeline"}, [&o](const run::Options&) {
    return o.show_schedule || o.show_placement || o.training.plan || !o.training.graph.empty()
               ? "in a call that does not train: leave it out"
               : "";
  });
  gpt::declare(options, o, o.training);
  options.add("--model", o.model, "the GPT, or the transformer of JaxPP's tutorial, which makes its own data",
              run::one_of({"gpt", "jaxpp-tutorial"}));
  run::declare(options, o.gather);
  run::declare(options, o.optimizer);
  // clang-format off
  options.preset("jaxpp-tutorial", {{"model", "jaxpp-tutorial"}, {"layers", "8"}, {"d_model", "1024"},
                                    {"n_q_per_kv", "1"}, {"n_kv", "8"}, {"d_head", "16"}, {"d_ff", "4096"},
                                    {"batch", "8"}, {"microbatches", "4"}, {"seq", "2048"}, {"steps", "6"},
                                    {"learning_rate", "1e-3"}, {"warmup", "0"}, {"final_learning_rate", "1"},
                                    {"beta2", "0.999"}, {"weight_decay", "1e-4"}, {"clip", "0"}},
                 "the model, sizes and optimizer of JaxPP's tutorial notebook");
  // clang-format on
}

// Refuses options that the tutorial's model does not have. It makes its own data, so none need be given.
void check_tutorial(const Options& o) {
  const run::Training& t = o.training;
  const gpt::ModelOptions plain;
  for (const auto& [given, option] : {std::pair{!t.data.empty(), "--data"},
                                      {!t.text_stream.empty(), "--stream"},
                                      {!t.validation_data.empty(), "--validation-data"},
                                      {t.validate_every > 0, "--validate-every"},
                                      {t.sample_every > 0, "--sample-every"},
                                      {o.optimizer.ema != 0, "--ema"},
                                      {o.vocabulary != 0, "--vocabulary"},
                                      {o.tied, "--tied"},
                                      {o.qkv_bias, "--qkv-bias"},
                                      {o.qk_norm, "--qk-norm"},
                                      {o.config.collective_matmul, "--collective-matmul"},
                                      {o.config.rope.context != 0, "--rope-context"},
                                      {t.rows != "packed", "--rows"},
                                      {t.row_begin != 0, "--row-begin"},
                                      {t.tokenizer != run::Training{}.tokenizer, "--tokenizer"},
                                      {o.config.rope.base != plain.config.rope.base, "--rope-base"},
                                      {o.config.rope.factor != 1, "--rope-factor"},
                                      {o.config.norm_epsilon != plain.config.norm_epsilon, "--norm-epsilon"},
                                      {o.init != plain.init, "--init"},
                                      {o.dropout != 0, "--dropout"},
                                      {t.epochs > 0, "--epochs"},
                                      {t.shuffle != "yes", "--shuffle"}})
    if (given)
      throw UsageError(
          fmt::format("{} does not go with --model jaxpp-tutorial, which has no tokens and makes up its "
                      "inputs and targets; leave it out, or give --model gpt",
                      option));
}

pipeline::Schedule chosen_schedule(const Options& o, int ranks) {
  const std::string option =
      o.stages == 0 ? fmt::format("--schedule {}, --mesh {}", o.schedule, o.training.mesh)
                    : fmt::format("--schedule {}, --stages {}, --mesh {}", o.schedule, o.stages, o.training.mesh);
  return naming_option(option, [&] {
    int stages = static_cast<int>(o.stages);
    if (stages == 0 && o.schedule.ends_with(".csv")) stages = pipeline::read_csv(o.schedule).num_stages();
    const bool two = o.schedule.starts_with("interleaved-") || o.schedule == "kimi-k2" || o.schedule == "dualpipe-v";
    if (stages == 0) stages = two ? 2 * ranks : ranks;
    if (!o.fuse_steady_state) return pipeline::make_schedule(o.schedule, stages, ranks);
    const pipeline::Interleaved1F1B::Arguments fused{
        .num_stages = stages, .mpmd_dim = ranks, .fuse_steady_state = true};
    if (o.schedule == "kimi-k2") return pipeline::Schedule(pipeline::KimiK2(fused));
    return pipeline::Schedule(pipeline::Interleaved1F1B(fused));
  });
}

template <class Model>
void train(const DevicePtr& device, const Options& o, const pipeline::Schedule& schedule, const run::Data& data,
           const std::string& toml) {
  const typename Model::Staged mesh(device);
  Trainer<Model> trainer(mesh, schedule, o);
  auto& trained = trainer.trained;
  run::Program program = run::program_of(mesh.whole(), trained, o.training,
                                         [stored = run::stored_names(), in_model = trainer.model.names_in_model()](
                                             const std::string& leaf) { return stored(in_model(leaf)); });
  typename Model::Sampled sampled(trainer.model, mesh.whole(), o);
  sampled.add_to(program, trained);
  program.step = [&](const run::Step& step) { return trainer.step(step); };
  program.validate = [&](const io::TokenBatch& rows) { return trainer.validate(rows); };
  program.finish = [&] { trainer.draw(); };
  program.parameters = trainer.model.parameters();
  program.gradient_bytes = run::shard_bytes(trained.copies);
  if (o.gather.per_step) {
    const auto& axes = mesh.whole().device()->axes();
    run::note_gathered(program, trained, axis_size(axes, "d") * axis_size(axes, "s"));
  }
  program.flops_per_token = trainer.model.flops_per_token();
  program.dtype = o.dtype;
  run::train(device, o.training, data, toml, program);
}

// The output of --show-schedule and --show-placement, which do not train.
template <class Model>
std::string shown(const std::vector<AxisSize>& axes, const Options& o, const pipeline::Schedule& schedule) {
  std::string text;
  const auto microbatches = static_cast<int>(o.training.microbatches);
  for (const DevicePtr& device : pipeline_text::dry_devices(axes)) {
    const typename Model::Staged mesh(device);
    const Model model(mesh, schedule, o);
    if (o.show_schedule && mesh.rank() == 0) {
      const auto of = [&]<Spec S>(std::type_identity<Tensor<f32, S>>) {
        return zeros<f32, S>(mesh.stage(), model.activation_sizes(o.training.batch / microbatches)).value()->bytes();
      };
      text +=
          pipeline_text::schedule_text(schedule, chosen_layers(o, schedule), o.layers, microbatches,
                                       static_cast<std::int64_t>(of(std::type_identity<typename Model::Activation>{})));
    }
    if (o.show_placement) {
      const Trainer<Model> trainer(mesh, schedule, o);
      if (!text.empty()) text += '\n';
      text += pipeline_text::placement_text(schedule, mesh.rank(), chosen_layers(o, schedule).of_rank(mesh.rank()),
                                            model.names_in_model(), trainer.trained);
    }
  }
  return text;
}

auto chosen_shown(const Options& o) {
  if (o.model == "jaxpp-tutorial") return o.dtype == "bf16" ? shown<Tutorial<bf16>> : shown<Tutorial<f32>>;
  return o.dtype == "bf16" ? shown<Gpt<bf16>> : shown<Gpt<f32>>;
}

auto chosen_training(const Options& o) {
  if (o.model == "jaxpp-tutorial") return o.dtype == "bf16" ? train<Tutorial<bf16>> : train<Tutorial<f32>>;
  return o.dtype == "bf16" ? train<Gpt<bf16>> : train<Gpt<f32>>;
}

// Draws one layer and one microbatch, with both ends of the pipeline on one rank.
template <class F>
void draw_layer(const Options& o, std::vector<AxisSize> mesh, const F& body) {
  Options single = one_layer(o);
  single.training.microbatches = 1;
  single.stage_layers.clear();
  single.training.batch /= o.training.microbatches;
  mesh[0].size = 1;
  const pipeline::Schedule whole = pipeline::GPipe(1);
  run::write_svg(run::dot(mesh, body(single, whole), {.fold = true}), o.training.graph);
  fmt::print("graph: {}\n", o.training.graph);
}

int program(int argc, char** argv) {
  Options o;
  run::Options options("gpt_pipeline", "Trains a model in pipeline stages, and samples with all devices together.");
  declare(options, o);
  if (!parse(options, argc, argv)) return 0;
  const bool is_tutorial = o.model == "jaxpp-tutorial";
  if (!is_tutorial) o.training.batch_axes = "r d";
  const auto mesh = run::chosen_mesh(o.training, is_tutorial ? "p d t" : "p r d s t", is_tutorial ? "" : "r");
  const bool shows = o.show_schedule || o.show_placement;
  const bool plans = o.training.plan, stops = shows && !plans && o.training.graph.empty();
  if (shows) o.training.plan = true;         // a plan needs no data
  run::batch_must_divide(mesh, o.training);  // before the tasks are made, because each takes memory
  if (o.show_schedule && o.training.microbatches > most_shown_microbatches)
    throw UsageError(
        fmt::format("--show-schedule prints the tasks of at most {} microbatches, but --microbatches is "
                    "{}: give fewer, as the tasks in the middle repeat",
                    most_shown_microbatches, o.training.microbatches));
  const pipeline::Schedule schedule = chosen_schedule(o, mesh[0].size);
  static_cast<void>(chosen_layers(o, schedule));  // first, because the tasks of a million stages take gigabytes
  static_cast<void>(schedule.tasks(static_cast<int>(o.training.microbatches)));
  run::Data data;
  if (is_tutorial) {
    check_tutorial(o);
    o.training.sample.max_tokens = 0;
    run::note_padding(mesh, Tutorial<f32>::sizes_of(o, mesh[1].size * mesh[2].size),
                      {{"M", "--d-model"}, {"H", "--n-kv * --n-q-per-kv"}, {"F", "--d-ff"}});
  } else {
    data = gpt::prepare(mesh, o, o.training);
  }
  if (shows && world_rank() == 0) fmt::print("{}{}", chosen_shown(o)(mesh, o, schedule), stops ? "" : "\n");
  if (stops) return 0;
  o.training.plan = plans;
  const auto body = [&](const Options& used, const pipeline::Schedule& under) -> DeviceBody {
    return
        [&, run = chosen_training(o)](const DevicePtr& device) { run(device, used, under, data, options.to_toml()); };
  };
  if (!o.training.graph.empty() && world_rank() == 0) {
    run::require_no_run_file(o.training.graph, "--graph", o.training.directory);
    io::require_writable(o.training.graph, "--graph");
  }
  run::choose_gather(o.gather, o.training, mesh, body(o, schedule), "p");
  run::announce(options, o.training);
  if (!o.training.graph.empty() && world_rank() == 0) draw_layer(o, mesh, body);
  run::Training planned = o.training;
  planned.graph = "";
  if (run::dry_run(planned, mesh, body(o, schedule), {}, "p", &o.config.recompute, &o.gather) ||
      !o.training.graph.empty())
    return 0;
  o.training.step_svg = planned.step_svg;
  o.training.planned_peak = planned.planned_peak;
  const auto check_and_train = [&, train = body(o, schedule)](const DevicePtr& device) {
    io::together(*device, "", [&] {  // one rank draws, and the others' machines may not have the folder
      if (device->rank() == 0 && !o.timeline.empty()) run::require_output(o.training, o.timeline, "--timeline");
    });
    train(device);
  };
  launch(mesh, check_and_train, run::launch_options(o.training));
  return 0;
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] { return program(argc, argv); });
}
