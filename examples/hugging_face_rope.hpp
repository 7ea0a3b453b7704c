// Rotary positions in config.json of Hugging Face's transformers: `rope_theta` and the object `rope_scaling`, or, as
// transformers 5 writes them, both in `rope_parameters`. A file may have both forms.
#pragma once

#include <fmt/format.h>

#include <shardlib/run/hugging_face.hpp>
#include <shardlib/shapes.hpp>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>

namespace gpt {

using namespace shardlib;

// Gives the options of rotary positions the values of a file. `rope` are their targets, `positions` is the file's
// max_position_embeddings.
class RopeConfig {
 public:
  RopeConfig(run::Options& options, run::HuggingFaceConfig& config, const RopeAngles& rope, std::int64_t positions)
      : options_(options), config_(config), rope_(rope), positions_(positions) {
    // Older versions say `type`; those in between both.
    type_ = config.first_of(
        {"rope_scaling.rope_type", "rope_scaling.type", "rope_parameters.rope_type", "rope_parameters.type"});
    config.require(type_, {quoted("default"), quoted("linear"), quoted("dynamic"), quoted("llama3"), quoted("yarn")});
    kind_ = config.has(type_) ? config.value(type_) : quoted("default");
    kept_ = R"({"rope_type": )" + kind_;
  }

  // Returns `rope_scaling` for an export. `base` is that of a file without one.
  std::string imply(const char* base, std::int64_t seq) {
    config_.imply(options_, "--rope-base",
                  config_.first_of({"rope_theta", "rope_parameters.rope_theta", "rope_scaling.rope_theta"}), base);
    as_type("--rope-yarn", kind_ == quoted("yarn") ? "true" : "false");
    if (kind_ == quoted("default")) {
      as_type("--rope-factor", "1");
      return "null";
    }
    if (kind_ == quoted("dynamic")) {
      dynamic(seq);
    } else if (kind_ == quoted("yarn")) {
      yarn();
    } else {
      imply_key("--rope-factor", "factor");
      if (kind_ == quoted("linear")) as_type("--rope-context", "0");
      if (kind_ == quoted("llama3")) llama3();
    }
    if (rope_.factor == 1 && (kind_ == quoted("yarn") || kind_ == quoted("llama3")))
      config_.refuse(key("factor"), "above 1");
    return kept_ + "}";
  }

 private:
  [[nodiscard]] static std::string quoted(const char* text) { return '"' + std::string(text) + '"'; }
  // The key in full, of the object that names the type if both have it or none.
  [[nodiscard]] std::string key(const std::string& name) {
    const bool newer = type_.starts_with("rope_parameters.");
    return config_.first_of(
        {(newer ? "rope_parameters." : "rope_scaling.") + name, (newer ? "rope_scaling." : "rope_parameters.") + name});
  }
  // `key`, which an export repeats.
  std::string kept(const std::string& name, const std::string& otherwise = "") {
    const std::string found = key(name), value = config_.has(found) ? config_.value(found) : otherwise;
    if (!value.empty()) kept_ += fmt::format(R"(, "{}": {})", name, value);
    return found;
  }
  void imply_key(const char* option, const char* name) { config_.imply(options_, option, kept(name)); }
  void as_type(const char* option, const char* value) {
    options_.imply(option, value, fmt::format("'{}': {}", config_.path(), type_));
  }

  void llama3() {
    imply_key("--rope-low", "low_freq_factor");
    imply_key("--rope-high", "high_freq_factor");
    imply_key("--rope-context", "original_max_position_embeddings");
    if (rope_.low_freq_factor >= rope_.high_freq_factor)
      config_.refuse(key("low_freq_factor"), fmt::format("below the {} of 'high_freq_factor'", rope_.high_freq_factor));
  }

  // It stretches texts that are longer than `positions`, each by its own length, and no others.
  void dynamic(std::int64_t seq) {
    if (seq > positions_)
      config_.refuse(
          type_, fmt::format("another one, or --seq, which is {}, is at most 'max_position_embeddings', which is {}",
                             seq, positions_));
    static_cast<void>(config_.value(kept("factor")));
    as_type("--rope-factor", "1");
  }

  // As in transformers 5. Earlier versions ignored some of these keys.
  void yarn() {
    // An export may have another max_position_embeddings, so it names what follows from it.
    const auto imply_or = [&](const char* option, const char* name, const std::string& otherwise, bool named = false) {
      config_.imply(options_, option, kept(name, named ? otherwise : ""), otherwise);
    };
    imply_or("--rope-context", "original_max_position_embeddings", std::to_string(positions_), true);
    imply_or("--rope-factor", "factor",
             run::json_float(static_cast<double>(positions_) / static_cast<double>(rope_.context)), true);
    imply_or("--rope-beta-fast", "beta_fast", "32");
    imply_or("--rope-beta-slow", "beta_slow", "1");
    imply_or("--rope-truncate", "truncate", "true");
    if (rope_.beta_slow >= rope_.beta_fast)
      config_.refuse(key("beta_slow"), fmt::format("below the {} of 'beta_fast'", rope_.beta_fast));
    const double part = number("mscale"), whole = number("mscale_all_dim");
    const auto scale = [&](double x) { return 0.1 * x * std::log(rope_.factor) + 1; };
    imply_or("--rope-amplitude", "attention_factor",
             part != 0 && whole != 0 ? fmt::format("{}", scale(part) / scale(whole)) : "0");
    if (config_.has(key("attention_factor")) && rope_.amplitude == 0)
      config_.refuse(key("attention_factor"), "above 0");
  }
  // 0 if it is absent.
  double number(const char* name) {
    const std::string found = kept(name);
    if (!config_.has(found)) return 0;
    const std::string& text = config_.value(found);
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (*end != 0) config_.refuse(found, "a number");
    return value;
  }

  run::Options& options_;
  run::HuggingFaceConfig& config_;
  const RopeAngles& rope_;
  std::int64_t positions_;
  std::string type_, kind_, kept_;
};

// `rope_scaling` of a model that no file has given.
inline std::string rope_scaling_json(const RopeAngles& rope) {
  using run::json_float;
  if (rope.factor == 1) return "null";
  if (rope.context <= 0) return fmt::format(R"({{"rope_type": "linear", "factor": {}}})", json_float(rope.factor));
  std::string text = fmt::format(R"({{"rope_type": "{}", "factor": {}, "original_max_position_embeddings": {})",
                                 rope.yarn ? "yarn" : "llama3", json_float(rope.factor), rope.context);
  const auto add = [&](const char* key, double value) { text += fmt::format(R"(, "{}": {})", key, json_float(value)); };
  if (rope.yarn) {
    add("beta_fast", rope.beta_fast);
    add("beta_slow", rope.beta_slow);
    add("attention_factor", rope.scale());
    text += fmt::format(R"(, "truncate": {})", rope.truncate);
  } else {
    add("low_freq_factor", rope.low_freq_factor);
    add("high_freq_factor", rope.high_freq_factor);
  }
  return text + "}";
}

}  // namespace gpt
