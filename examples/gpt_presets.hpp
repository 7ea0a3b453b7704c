// The presets of gpt_fsdp: the configurations of seqax.
#pragma once

#include <shardlib/run/options.hpp>

// clang-format off
inline void declare_presets(shardlib::run::Options& options) {
  // The models of seqax's configurations for C4 with the Llama tokenizer.
  const auto seqax = [&](const char* name, const char* width, const char* heads, const char* layers, const char* ff,
                         const char* rate, const char* steps, const char* warmup, const char* save_every, bool x4 = false) {
    options.preset(name, {{"mesh", x4 ? "d=32,t=1" : "d=8,t=1"}, {"d_model", width}, {"n_q_per_kv", "1"}, {"n_kv", heads},
                          {"d_head", "128"}, {"layers", layers}, {"d_ff", ff}, {"vocabulary", "32768"},
                          {"batch", x4 ? "256" : "64"}, {"seq", "1024"}, {"steps", steps}, {"warmup", warmup},
                          {"learning_rate", rate}, {"save_every", save_every}, {"init", "seqax"}, {"warmup_from", "0"}}, x4 ? "on four hosts of 8 GPUs" : "");
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
                  {"save_every", "10"}, {"rope_base", "256"}, {"max_tokens", "0"}, {"init", "seqax"}, {"warmup_from", "0"}},
                 "seqax's run on its sample data set");
}
// clang-format on
