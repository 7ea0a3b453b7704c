// Trains a GPT whose feed-forward layers are mixtures of experts: fully sharded data parallel over the axes d and e of
// the mesh, with the experts over e; context parallel over s (each device has a part of every sequence); tensor
// parallel over t.
//
//   moe --data text.txt --mesh d=2,e=2             four devices as threads of this process; dropless
//   moe --data text.txt --mesh e=2,s=2             each sequence over two devices
//   moe --data text.txt --mesh e=4 --capacity 1.25 slots of a fixed number; rows that find none are dropped
//   mpirun -n 4 moe --data text.txt --mesh e=4     four devices as MPI ranks
//   moe --load models/qwen1.5-moe --mesh e=4 ...   weights of Mixtral or Qwen-MoE
//
// moe_model.hpp is the model, moe_setup.hpp has its options and initial weights, moe_step.hpp its training step,
// moe_sampling.hpp its decoding.
// docs/mixture-of-experts.md says what moves.
#include <fmt/format.h>

#include <shardlib/run/dry_run.hpp>
#include <shardlib/run/rope_options.hpp>
#include <shardlib/run/sequence_order.hpp>
#include <shardlib/run/token_tensors.hpp>
#include <shardlib/run/trained.hpp>
#include <shardlib/run/training.hpp>
#include <shardlib/shardlib.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "moe_hugging_face.hpp"
#include "moe_sampling.hpp"
#include "moe_setup.hpp"
#include "moe_step.hpp"
#include "trainers.hpp"

using namespace shardlib;
using moe::MoeMesh;
using moe::Options;

void declare(run::Options& options, Options& o) {
  o.training.batch_axes = "d e";
  o.training.may_change = {"recompute", "gather"};
  o.training.model_settings = {{"experts_per_token", ""}, {"norm_topk_prob", ""}};
  run::declare(options, o.training);
  moe::declare(options, o);
  gpt::declare(options, o.files, "DIR", "initial weights and sizes: Hugging Face's folder of Mixtral or Qwen-MoE");
  run::declare(options, o.gather);
  run::declare(options, o.optimizer);
  moe::declare_presets(options);
}

template <dtype C>
void train(const DevicePtr& device, const Options& o, const run::Data& data, const std::string& toml) {
  const MoeMesh mesh(device);
  moe::Trained<C> trained;
  moe::Model& weights = trained.state.weights;
  weights = moe::initial_weights(mesh, o, o.training.seed);
  run::check_groups(o.optimizer.groups, leaf_names(weights));
  gpt::load_weights(mesh, o.files, o.training, moe::stored_table(moe::kind_of(o)), false, weights);
  run::begin(trained, o.optimizer);
  run::Program program = run::program_of(mesh, trained, o.training);
  program.gradient_bytes = program.weight_bytes;  // their sums are f32, those of one microbatch too
  program.step = [&](const run::Step& step) { return moe::train_step<C>(mesh, trained, o, step); };
  const auto loss_of = [&](const io::TokenBatch& rows) -> double {
    const auto batch = run::token_tensors<moe::Batch, "B/d/e L/s">(mesh, rows, o.training.seq, o.config.order);
    return item(all_reduce<"+d +e +s +t -> ">(moe::loss(trained.model(), batch, o.config, 1).second.cross_entropy));
  };
  program.validate = [&](const io::TokenBatch& rows) { return run::sum_of_parts(o.training, rows, loss_of); };
  program.decode = moe::decoder(mesh, trained, o.config, moe::sizes_of(o, mesh), o.training.seq);
  if (o.gather.per_step) {
    std::int64_t whole = 0;
    for_each_leaf(
        [&]<Spec S>(std::string_view, const Tensor<f32, S>& w) {
          const bool expert = std::is_same_v<Tensor<f32, S>, moe::ExpertWeight<f32, "X/e M/d/s F/t", false>>;
          whole += static_cast<std::int64_t>(w.value()->bytes()) * mesh.size("d") * mesh.size("s") *
                   (expert ? 1 : mesh.size("e"));
        },
        weights);
    program.copy_bytes += whole * static_cast<std::int64_t>(sizeof(C)) / 4;
    program.gradient_bytes = whole;
  }
  // A token multiplies by its own experts alone, and the embedding is a look-up.
  const std::int64_t idle = o.layers * 3 * o.d_model * o.d_ff * (o.experts - o.config.top_k);
  program.dtype = o.dtype;
  program.flops_per_token = run::training_flops_per_token(program.parameters - o.vocabulary * o.d_model - idle,
                                                          o.layers, o.n_q_per_kv * o.n_kv * o.d_head, o.training.seq);
  run::train(device, o.training, data, toml, program);
  moe::write_outputs(device, o, o.files, o.optimizer, o.training, data, program);
}

int program(int argc, char** argv) {
  Options o;
  run::Options options("moe",
                       "Trains a GPT with mixtures of experts, which are sharded over axis e. Sequences are sharded "
                       "over s, if the mesh has it.");
  declare(options, o);
  if (!parse(options, argc, argv)) return 0;
  moe::read_config(options, o, o.files, o.training);
  const auto mesh = run::chosen_mesh(o.training, "d e s t", "s");
  run::batch_must_divide(mesh, o.training);
  o.config.order = run::sequence_order(mesh, o.training, "s");
  run::check_rope(o.config.rope, o.d_head);
  if (o.experts % mesh[1].size != 0)
    throw UsageError(fmt::format("--experts {} is not a multiple of axis e, which has size {}; change one of them",
                                 o.experts, mesh[1].size));
  if (o.config.top_k > o.experts)
    throw UsageError(fmt::format("--experts-per-token {} is more than the {} experts; choose at most as many",
                                 o.config.top_k, o.experts));
  if (o.shared_gate && o.shared == 0)
    throw UsageError("--shared-gate: there is no shared expert: give its width by --shared, or leave the option out");
  if (o.training.rows != "packed")
    throw UsageError("--rows " + o.training.rows +
                     " pads rows, and padding would take slots of experts: use --rows packed");
  // The loss that balances experts is no mean over tokens, and each place of the mesh has slots of its own.
  o.training.may_not_change = {"microbatches"};
  if (o.config.capacity > 0) o.training.may_not_change.emplace_back("mesh");
  const run::Data data = run::open_data(o.training, o.vocabulary);
  o.vocabulary = data.vocabulary;
  run::note_padding(mesh, moe::sizes_of(o, mesh),
                    {{"V", "--vocabulary"}, {"M", "--d-model"}, {"H", "--n-kv"}, {"F", "--d-ff"}, {"G", "--shared"}});
  gpt::check_files(o.files, o.training, data);
  train_or_plan(options, o, mesh, [&](const DevicePtr& device, const Options& used) {
    (used.dtype == "bf16" ? train<bf16> : train<f32>)(device, used, data, options.to_toml());
  });
  return 0;
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] { return program(argc, argv); });
}
