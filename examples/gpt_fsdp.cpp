// Trains the GPT of gpt_model.hpp: fully sharded data parallel over mesh axis d, tensor parallel over mesh axis t.
//
//   gpt_fsdp --data text.txt --mesh d=4,t=2     eight devices as threads of this process
//   mpirun -n 2 gpt_fsdp --data text.txt        two devices as MPI ranks
//   gpt_fsdp --preset 84m --data c4.zarr --tokenizer tokenizer.tiktoken --run runs/84m
//
// gpt_fsdp.hpp and gpt_model.hpp are the whole training step; gpt_setup.hpp has the model's options and first values.
// Data, checkpoints and reports are the library's (run/training.hpp).
#include <fmt/format.h>

#include <shardlib/run/dry_run.hpp>

#include <memory>
#include <string>

#include "gpt_fsdp.hpp"

void declare(run::Options& options, Options& o) {
  run::declare(options, o.training);
  o.training.may_change = {"gather"};  // sums in another order
  gpt::declare(options, o);
  gpt::declare(options, o.files);
  options.add("--gather", o.gather, "when weights are gathered and gradients scattered; per-step needs more memory",
              run::one_of({"per-microbatch", "per-step"}));
  // clang-format off
  // The models of seqax's configurations for C4 with the Llama tokenizer.
  const auto seqax = [&](const char* name, const char* width, const char* heads, const char* layers, const char* ff,
                         const char* rate, const char* steps, const char* warmup, const char* save_every, bool x4 = false) {
    options.preset(name, {{"mesh", x4 ? "d=32,t=1" : "d=8,t=1"}, {"d_model", width}, {"n_q_per_kv", "1"}, {"n_kv", heads},
                          {"d_head", "128"}, {"layers", layers}, {"d_ff", ff}, {"vocabulary", "32768"},
                          {"batch", x4 ? "256" : "64"}, {"seq", "1024"}, {"steps", steps}, {"warmup", warmup},
                          {"learning_rate", rate}, {"save_every", save_every}}, x4 ? "on four hosts of 8 GPUs" : "");
  };
  seqax("84m", "512", "8", "8", "4096", "3e-3", "26000", "2600", "2600");
  seqax("270m", "1024", "16", "8", "8192", "3e-4", "92000", "9200", "9200");
  seqax("540m", "2048", "16", "8", "8192", "3e-4", "185000", "18500", "4000");
  seqax("1b", "2048", "16", "8", "16384", "1e-5", "370000", "37000", "10000");
  seqax("2b", "4096", "16", "8", "16384", "1e-5", "740000", "74000", "10000");
  seqax("540m-x4", "2048", "16", "16", "8192", "3e-4", "46250", "4625", "2500", true);
  seqax("1b-x4", "2048", "16", "8", "16384", "1e-5", "92500", "9250", "2500", true);
  seqax("2b-x4", "4096", "16", "8", "16384", "1e-5", "185000", "18500", "2500", true);
  options.preset("local-test-synthetic",
                 {{"mesh", "d=4,t=2"}, {"batch", "64"}, {"seq", "64"}, {"d_model", "256"}, {"n_q_per_kv", "2"},
                  {"n_kv", "2"}, {"d_head", "32"}, {"layers", "2"}, {"vocabulary", "1280"}, {"d_ff", "1024"},
                  {"steps", "50"}, {"warmup", "10"}, {"decay_steps", "100"}, {"learning_rate", "3e-5"},
                  {"save_every", "10"}, {"rope_base", "256"}, {"max_tokens", "0"}},
                 "seqax's run on its sample data set");
  // clang-format on
}

int program(int argc, char** argv) {
  Options o;
  run::Options options("gpt_fsdp", "Trains a GPT, fully sharded and tensor parallel over a mesh of devices.");
  declare(options, o);
  if (!options.parse(argc, argv)) {
    if (world_rank() == 0) fmt::print("{}", options.answer());
    return 0;
  }
  gpt::read_config(options, o, o.files, o.training);
  const auto mesh = run::chosen_mesh(o.training, "d t");
  run::batch_must_divide(mesh, o.training);
  run::check_rope(o.config.rope, o.d_head);
  const run::Data data = run::open_data(o.training, o.vocabulary);
  o.vocabulary = data.vocabulary;
  gpt::check_files(o.files, o.training, data);
  run::note_padding(mesh, gpt::sizes_of(o, mesh[0].size, mesh[1].size));
  run::announce(options, o.training);
  const auto body = [&](const Options& used) -> DeviceBody {
    return [&](const std::shared_ptr<Device>& device) {
      (used.dtype == "bf16" ? train<bf16> : train<f32>)(device, used, data, options.to_toml());
    };
  };
  Options single = o;  // --graph draws one layer
  single.layers = 1;
  if (!run::dry_run(o.training, mesh, body(o), body(single))) launch(mesh, body(o), run::launch_options(o.training));
  return 0;
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] { return program(argc, argv); });
}
