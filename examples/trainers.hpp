// The options that only some of the trainers have: the others name these programs in the error about such an option.
#pragma once

#include <shardlib/run/options.hpp>

// tests/programs.py compares it with the texts of --help.
inline void declare_others(shardlib::run::Options& options) {
  options.known_by({"gpt2"}, {"--heads", "--context", "--norm", "--activation", "--epsilon", "--attention",
                              "--prefetch", "--lora", "--lora-alpha"});
  options.known_by({"gpt_fsdp", "gpt_pipeline", "moe"},
                   {"--n-q-per-kv", "--n-kv", "--d-head", "--norm-epsilon", "--rope-base", "--rope-factor",
                    "--rope-context", "--rope-low", "--rope-high", "--qkv-bias", "--qk-norm"});
  options.known_by({"gpt_fsdp", "gpt_pipeline"}, {"--init", "--collective-matmul"});
  options.known_by({"gpt2", "gpt_fsdp", "gpt_pipeline"}, {"--dtype", "--tied", "--dropout", "--optimizer", "--ema"});
  options.known_by({"gpt2", "gpt_fsdp", "moe"}, {"--load", "--export", "--logits"});
  options.known_by({"gpt_pipeline"}, {"--schedule", "--stages", "--stage-layers", "--show-schedule", "--show-placement",
                                      "--timeline", "--model"});
  options.known_by({"moe"}, {"--experts", "--experts-per-token", "--norm-topk-prob", "--shared", "--shared-gate",
                             "--capacity", "--balance", "--router-z"});
}
