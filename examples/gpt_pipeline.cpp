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

#include "gpt_setup.hpp"
#include "gpt_stages.hpp"

using namespace shardlib;
using Staged = pipeline::StagedMesh<"p", "p d t">;

struct Options : gpt::ModelOptions {
  run::Training training;
  std::string schedule = "1f1b", timeline;
  std::int64_t stages = 0;
  bool show_schedule = false;
};

// ---- weights --------------------------------------------------------------------------------------------------------

struct TrainState {
  gpt::StageModel weights, mean, variance;
};

// The numbers that gpt_fsdp begins with, of what this rank holds: they are keyed by the place in the whole model.
gpt::StageModel initial_weights(const Staged& mesh, const pipeline::Schedule& schedule, const Options& o) {
  const pipeline::LayerMap layer_map(schedule, o.layers);
  const gpt::FirstValues first(mesh.stage(), o, o.training.seed);
  gpt::StageModel w = gpt::empty_stages(schedule, layer_map, mesh.rank(), o.tied);
  for (auto& embed : w.embed) first.embed(embed);
  for (auto& unembed : w.unembed) first.unembed(unembed);
  const auto layers = layer_map.of_rank(mesh.rank());
  for (std::size_t i = 0; i < layers.size(); ++i) first.layer(w.layers[i], layers[i]);
  for (auto& norm : w.final_norm) first.gain(norm);
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
  [[nodiscard]] std::vector<gpt::Batch> place(const std::vector<io::TokenBatch>& microbatches) const {
    std::vector<gpt::Batch> batches;
    for (const io::TokenBatch& rows : microbatches)
      batches.push_back(gpt::place(mesh_.stage(), rows, o_.training.seq));
    return batches;
  }
  [[nodiscard]] gpt::Stages program(const std::vector<gpt::Batch>& batches) const {
    return {layer_map_, batches, gpt::causal(mesh_.stage(), o_, o_.training.seq), o_.form};
  }
  [[nodiscard]] Sizes activation_sizes(const std::vector<gpt::Batch>& batches) const {
    Sizes sizes = gpt::sizes_of(o_, mesh_.stage().size("d"), mesh_.stage().size("t"));
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
  gpt::declare(options, o);
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
  program.flops_per_token = gpt::flops_per_token(o, program.parameters, o.training.seq);
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
  gpt::check_head(o);
  const run::Data data = run::open_data(o.training, o.vocabulary);
  o.vocabulary = data.vocabulary;
  run::note_padding(mesh, gpt::sizes_of(o, mesh[1].size, mesh[2].size));
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
