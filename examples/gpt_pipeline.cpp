// Trains the GPT of gpt_model.hpp as a pipeline: stages over mesh axis p, each of them fully sharded over d and tensor
// parallel over t.
//
//   gpt_pipeline --data text.txt --mesh p=2,d=2,t=1 --microbatches 8 --schedule interleaved-1f1b
//   mpirun -n 2 gpt_pipeline --data text.txt --mesh p=2 --microbatches 8 --run runs/first
//   gpt_pipeline --mesh p=4 --microbatches 16 --schedule dualpipe-v --show-schedule
//
// gpt_stages.hpp has what a stage does. A run's checkpoints hold the whole model: every other layout goes on from them,
// gpt_fsdp too, which can also sample from them.
#include <shardlib/io/file.hpp>
#include <shardlib/pipeline/timeline.hpp>
#include <shardlib/run/checkpoints.hpp>
#include <shardlib/run/dry_run.hpp>
#include <shardlib/run/plan.hpp>
#include <shardlib/shardlib.hpp>

#include <fstream>
#include <numeric>

#include "gpt_stages.hpp"

using namespace shardlib;
using Staged = pipeline::StagedMesh<"p", "p d t">;

struct Options {
  run::Training training;
  std::int64_t layers = 4, d_model = 256, n_q_per_kv = 2, n_kv = 2, d_head = 64, d_ff = 768, vocabulary = 0;
  bool tied = false;
  std::string attention = "fused";
  gpt::Form form;
  std::string schedule = "1f1b", timeline;
  std::int64_t stages = 0;
  bool show_schedule = false;
};

// ---- weights --------------------------------------------------------------------------------------------------------

struct TrainState {
  gpt::StageModel weights, mean, variance;
};

// Sizes of the model's dims, padded so that a stage's mesh divides them, and the vocabulary so that GEMMs have round
// shapes.
Sizes sizes_of(const Options& o, std::int64_t d, std::int64_t t) {
  const auto dim = [](std::string_view name, std::int64_t size, std::int64_t parts) {
    return NamedSize{name, size, round_up(size, parts)};
  };
  return {dim("V", o.vocabulary, std::lcm<std::int64_t>(64, t)),
          dim("M", o.d_model, d * t),
          {"Q", o.n_q_per_kv},
          dim("K", o.n_kv, t),
          {"D", o.d_head},
          dim("F", o.d_ff, t)};
}

// The numbers that gpt_fsdp begins with, of what this rank holds: they are keyed by the place in the whole model.
gpt::StageModel initial_weights(const Staged& mesh, const pipeline::Schedule& schedule, const Options& o) {
  const pipeline::LayerMap layer_map(schedule, o.layers);
  const auto& stage = mesh.stage();
  const Sizes sizes = sizes_of(o, stage.size("d"), stage.size("t"));
  std::uint64_t stream = 0;
  const auto init = [&]<class D, Spec S>(Tensor<D, S>& w, std::int64_t fan_in) {
    w = random_truncated_normal<D, S>(stage, sizes, {o.training.seed, stream++}) /
        std::sqrt(static_cast<double>(fan_in));
  };
  const auto gain = [&](auto& w) { w = ones<f32, "M/t/d">(stage, sizes); };
  const std::int64_t branches = 2 * o.layers;

  gpt::StageModel w = gpt::empty_stages(schedule, layer_map, mesh.rank(), o.tied);
  for (auto& embed : w.embed) init(embed, o.d_model);
  stream = 1;
  for (auto& unembed : w.unembed) init(unembed, o.d_model);
  const auto layers = layer_map.of_rank(mesh.rank());
  for (std::size_t i = 0; i < layers.size(); ++i) {
    stream = (o.tied ? 1 : 2) + 7 * static_cast<std::uint64_t>(layers[i]);
    gpt::Layer& layer = w.layers[i];
    gain(layer.norm1);
    gain(layer.norm2);
    init(layer.w_q, o.d_model);
    init(layer.w_k, o.d_model);
    init(layer.w_v, o.d_model);
    init(layer.w_o, o.n_q_per_kv * o.n_kv * o.d_head * branches);
    init(layer.w_gate, o.d_model);
    init(layer.w_up, o.d_model);
    init(layer.w_down, o.d_ff * branches);
  }
  for (auto& norm : w.final_norm) gain(norm);
  return w;
}

// Of the whole model, which no rank has.
std::int64_t parameters_of(const Options& o) {
  const std::int64_t heads = o.n_q_per_kv * o.n_kv * o.d_head, keys = o.n_kv * o.d_head;
  const std::int64_t layer = o.d_model * (2 + 2 * heads + 2 * keys + 3 * o.d_ff);
  return (o.tied ? 1 : 2) * o.vocabulary * o.d_model + o.layers * layer + o.d_model;
}

// ---- a training step ------------------------------------------------------------------------------------------------

class Trainer {
 public:
  Trainer(const Staged& mesh, const pipeline::Schedule& schedule, const Options& o)
      : mesh_(mesh), schedule_(schedule), o_(o), layer_map_(schedule, o.layers) {
    state.weights = initial_weights(mesh, schedule, o);
    state.mean = zeros_like(state.weights);
    state.variance = zeros_like(state.weights);
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  TrainState state;

  // Loss and gradients of all microbatches under the schedule, clipping by the norm over all ranks, AdamW on each
  // rank's own weights.
  run::StepResult step(const std::vector<io::TokenBatch>& microbatches, std::int64_t step, double learning_rate) {
    const run::Training& t = o_.training;
    const bool measure = !timeline_file().empty() && step + 1 == t.steps;
    const auto batches = place(microbatches);
    auto [loss, grads, intervals, in_flight] =
        pipeline::value_and_grad(mesh_, schedule_, static_cast<int>(t.microbatches), program(batches), state.weights,
                                 activation_sizes(batches), measure);
    // A tied embedding stands on two ranks: both get the sum of what they have found, and update alike.
    const auto owners = gpt::embedding_owners(schedule_, o_.tied);
    for (auto& embed : grads.embed) embed = mesh_.sum_over(owners, embed);
    const bool counts_embed = mesh_.rank() == schedule_.rank_of(0);
    const double norm = pipeline::global_norm(
        mesh_, grads, [&](std::string_view name) { return counts_embed || !name.starts_with("embed"); });
    const run::StepResult result{item(all_reduce<"+d +p +t -> ">(loss)), norm};
    run::check_finite(result, step);
    const AdamW optimizer{.beta1 = t.beta1, .beta2 = t.beta2, .weight_decay = t.weight_decay};
    optimizer.update(state.weights, state.mean, state.variance, grads, learning_rate, run::clip_factor(norm, t.clip),
                     step, [](std::string_view) { return true; });
    if (!intervals.empty() && mesh_.whole().index() == 0) draw(intervals);
    return result;
  }

  [[nodiscard]] double validate(const io::TokenBatch& rows) const {
    const auto batches = place({rows});
    return item(all_reduce<"+d +p +t -> ">(
        pipeline::value(mesh_, schedule_, 1, program(batches), state.weights, activation_sizes(batches))));
  }

  // The names that gpt_fsdp gives to the same tensors, so that each loads what the other has saved.
  [[nodiscard]] io::Rename names_in_model() const {
    return [layers = layer_map_.of_rank(mesh_.rank())](const std::string& name) {
      return gpt::name_in_model(name, layers);
    };
  }

 private:
  // This device's rows as tensors.
  [[nodiscard]] std::vector<gpt::Batch> place(const std::vector<io::TokenBatch>& microbatches) const {
    std::vector<gpt::Batch> batches;
    for (const io::TokenBatch& rows : microbatches) {
      const auto host = std::make_shared<io::TokenBatch>(rows);
      const std::int64_t length = o_.training.seq;
      const Sizes sizes{{"B", std::ssize(rows.inputs) / length * mesh_.stage().size("d")}, {"L", length}};
      const auto tensor = [&]<class T>(const std::vector<T>& values) {
        return from_memory<T, "B/d L">(mesh_.stage(), sizes, std::span<const T>(values), host);
      };
      batches.push_back({tensor(host->inputs), tensor(host->targets), tensor(host->segments), tensor(host->weights)});
    }
    return batches;
  }
  [[nodiscard]] gpt::Stages program(const std::vector<gpt::Batch>& batches) const {
    const std::int64_t length = o_.training.seq;
    Tensor<bool_, "Qlen Klen"> causal;  // for attention that is spelled; the library's needs none
    if (o_.attention == "einsum") causal = causal_mask<"Qlen Klen">(mesh_.stage(), length, length);
    return {layer_map_, batches, causal, o_.form};
  }
  [[nodiscard]] Sizes activation_sizes(const std::vector<gpt::Batch>& batches) const {
    Sizes sizes = sizes_of(o_, mesh_.stage().size("d"), mesh_.stage().size("t"));
    sizes.insert(sizes.end(), {{"B", batches[0].inputs.size("B")}, {"L", o_.training.seq}});
    return sizes;
  }

  [[nodiscard]] std::string timeline_file() const {
    const std::string& run = o_.training.directory;
    return !o_.timeline.empty() ? o_.timeline : run.empty() ? "" : run + "/timeline.svg";
  }
  // What was measured below what the simulator makes of its task times.
  void draw(const std::vector<pipeline::Interval>& measured) const {
    const auto lists = schedule_.tasks(static_cast<int>(o_.training.microbatches));
    const auto plan = pipeline::simulate(lists, pipeline::measured_costs(measured));
    const std::string svg = pipeline::to_svg(
        {.title = schedule_.name() + ", mesh " + o_.training.mesh, .planned = plan.intervals, .measured = measured});
    io::replace_file(timeline_file(), io::as_bytes(svg));
  }

  const Staged& mesh_;
  const pipeline::Schedule& schedule_;
  const Options& o_;
  pipeline::LayerMap layer_map_;
};

// ---- the program ----------------------------------------------------------------------------------------------------

void declare(run::Options& options, Options& o) {
  run::declare(options, o.training);
  options.group("pipeline");
  options.add("--schedule", o.schedule,
              "gpipe, 1f1b, eager-1f1b, interleaved-1f1b, zero-bubble, dualpipe-v, or a file that ends in .csv");
  options.add("--stages", o.stages, "stages that the layers are cut into (0: 2 p if interleaved or dualpipe-v, else p)",
              run::size(0));
  options.flag("--show-schedule", o.show_schedule, "no training: prints the tasks of each rank, and how they would run",
               run::command_line_only());
  options.add("--timeline", o.timeline,
              "picture of the last step, planned and measured (default: timeline.svg in --run's folder)",
              run::value_name("FILE.svg") | run::command_line_only());
  options.group("model");
  options.add("--layers", o.layers, "layers", run::size());
  options.add("--d-model", o.d_model, "width of the residual stream", run::size());
  options.add("--n-q-per-kv", o.n_q_per_kv, "query heads per key-value head", run::size());
  options.add("--n-kv", o.n_kv, "key-value heads", run::size());
  options.add("--d-head", o.d_head, "width of a head", run::size());
  options.add("--d-ff", o.d_ff, "width of the feed-forward layer", run::size());
  options.add("--vocabulary", o.vocabulary, "token ids (0: the tokenizer's)", run::size(0));
  options.add("--rope-base", o.form.rope_base, "base of rotary positions", run::above(1));
  options.flag("--tied", o.tied, "use the embedding as the unembedding too");
  options.add("--attention", o.attention, "of training: the library's in one op, or gpt_model.hpp's in einsums",
              run::one_of({"fused", "einsum"}));
  options.flag("--library-loss", o.form.library_loss, "the library's cross_entropy instead of gpt_model.hpp's");
}

pipeline::Schedule chosen_schedule(const Options& o, int ranks) {
  int stages = static_cast<int>(o.stages);
  if (stages == 0 && o.schedule.ends_with(".csv")) stages = pipeline::read_csv(o.schedule).num_stages();
  if (stages == 0) stages = o.schedule == "interleaved-1f1b" || o.schedule == "dualpipe-v" ? 2 * ranks : ranks;
  return pipeline::make_schedule(o.schedule, stages, ranks);
}

void train(const std::shared_ptr<Device>& device, const Options& o, const pipeline::Schedule& schedule,
           const run::Data& data, const std::string& toml) {
  const Staged mesh(device);
  Trainer trainer(mesh, schedule, o);
  run::Program program;
  program.checkpoints = run::checkpoints_of(mesh.whole(), trainer.state, o.training, trainer.names_in_model());
  program.step = [&](const auto& microbatches, std::int64_t step, double rate) {
    return trainer.step(microbatches, step, rate);
  };
  program.validate = [&](const io::TokenBatch& rows) { return trainer.validate(rows); };
  program.parameters = parameters_of(o);
  program.weight_bytes = run::block_bytes(trainer.state.weights);
  program.optimizer_bytes = run::block_bytes(trainer.state.mean) + run::block_bytes(trainer.state.variance);
  program.flops_per_token = run::training_flops_per_token(program.parameters - (o.tied ? 0 : o.vocabulary * o.d_model),
                                                          o.layers, o.n_q_per_kv * o.n_kv * o.d_head, o.training.seq);
  program.context = o.training.seq;
  run::train(device, o.training, data, toml, program);
}

int program(int argc, char** argv) {
  Options o;
  run::Options options("gpt_pipeline",
                       "Trains a GPT in pipeline stages. It does not sample: gpt_fsdp does, from the same run.");
  declare(options, o);
  if (!options.parse(argc, argv)) {
    if (world_rank() == 0) fmt::print("{}", options.help());
    return 0;
  }
  if (o.training.prompt != run::Training{}.prompt || o.training.sample_every > 0)
    throw UsageError("gpt_pipeline does not sample: gpt_fsdp does, from the same --run folder");
  o.training.sample.max_tokens = 0;
  const auto mesh = run::chosen_mesh(o.training, "p d t");
  const pipeline::Schedule schedule = chosen_schedule(o, mesh[0].size);
  const auto lists = schedule.tasks(static_cast<int>(o.training.microbatches));
  if (o.show_schedule) {
    if (world_rank() == 0)
      fmt::print("{}{}", to_string(lists), to_string(pipeline::simulate(lists, pipeline::even_costs(lists))));
    return 0;
  }
  static_cast<void>(pipeline::LayerMap(schedule, o.layers));
  run::batch_must_divide(mesh, o.training);
  if (o.d_head % 2 != 0)
    throw UsageError(fmt::format("--d-head {}: rotary positions turn pairs; choose a multiple of 2", o.d_head));
  const run::Data data = run::open_data(o.training, o.vocabulary);
  o.vocabulary = data.vocabulary;
  run::note_padding(mesh, sizes_of(o, mesh[1].size, mesh[2].size));
  run::announce(options, o.training);
  const auto body = [&](const Options& used) -> DeviceBody {
    return [&](const std::shared_ptr<Device>& device) { train(device, used, schedule, data, options.to_toml()); };
  };
  Options single = o;  // --graph draws a layer of each stage
  single.layers = schedule.num_stages();
  if (run::dry_run(o.training, mesh, body(o), body(single))) return 0;
  if (!o.timeline.empty() && !std::ofstream(o.timeline, std::ios::app))
    throw UsageError(fmt::format("cannot write the file '{}': check --timeline", o.timeline));
  launch(mesh, body(o));
  return 0;
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] { return program(argc, argv); });
}
