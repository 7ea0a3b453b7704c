// Trains the GPT of gpt_model.hpp: fully sharded data parallel over mesh axis d, context parallel over s (each device
// has a part of every sequence), tensor parallel over t. Over r the weights are replicated (hybrid sharding).
//
//   gpt_fsdp --data text.txt --mesh d=4,t=2     eight devices as threads of this process
//   gpt_fsdp --data text.txt --mesh s=4 --seq 32768
//   gpt_fsdp --data text.txt --mesh r=2,d=4     weights sharded over the 4 devices of a node, in each of 2 nodes
//   mpirun -n 2 gpt_fsdp --data text.txt        two devices as MPI ranks
//   gpt_fsdp --preset 84m --data c4.zarr --tokenizer tokenizer.tiktoken --run runs/84m
//
// gpt_fsdp.hpp and gpt_model.hpp are the whole training step; gpt_setup.hpp has the model's options and initial
// weights. Data, checkpoints and reports are the library's (run/training.hpp).
#include "gpt_fsdp.hpp"
#include "gpt_presets.hpp"

void declare(run::Options& options, Options& o) {
  run::declare(options, o.training);
  o.training.batch_axes = "r d";
  o.training.may_change = {"recompute", "gather", "collective_matmul"};  // the same numbers, except for rounding
  o.training.model_settings = {{"init", "depth-scaled"}};                // what checkpoints without --init have
  gpt::declare(options, o, o.training);
  gpt::declare(options, o.files, "DIR", "initial weights and sizes: Hugging Face's folder of Llama, Mistral or Qwen");
  run::declare(options, o.gather);
  run::declare(options, o.optimizer);
  declare_presets(options);
}

int program(int argc, char** argv) {
  Options o;
  run::Options options(
      "gpt_fsdp",
      "Trains a GPT on a mesh of devices: fully sharded over axes d (batch) and s (length of sequences), tensor "
      "parallel over t, replicated over r (batch), if the mesh has it.");
  declare(options, o);
  if (!parse(options, argc, argv)) return 0;
  gpt::read_config(options, o, o.files, o.training);
  const auto mesh = run::chosen_mesh(o.training, "r d s t", "r");
  run::batch_must_divide(mesh, o.training);
  const run::Data data = gpt::prepare(mesh, o, o.training);
  gpt::check_files(o.files, o.training, data);
  train_or_plan(options, o, mesh, [&](const DevicePtr& device, const Options& used) {
    (used.dtype == "bf16" ? train<bf16> : train<f32>)(device, used, data, options.to_toml());
  });
  return 0;
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] { return program(argc, argv); });
}
