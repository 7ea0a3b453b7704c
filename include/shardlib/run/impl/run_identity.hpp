// The identity of a run, which its checkpoints store, and whether a run may resume from a checkpoint.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/run/options.hpp"
#include "shardlib/run/training.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::run::detail {

inline constexpr std::string_view setting_mark = "setting.";

/// The identity of a loader's batches, or `none`.
inline std::string loader_hash(const io::Loader* loader, const std::string& none) {
  return loader != nullptr ? fmt::format("{:016x}", loader->identity()) : none;
}

/// Settings of `declare` that may change when a run resumes: they change at most the order of sums. The contents of
/// --data and the related options are compared instead of their paths. --steps moves the end of the learning rate's
/// schedule, but more steps are the usual reason to resume.
// clang-format off
inline constexpr std::string_view free_settings[] = {
    "preset", "data", "validation_data", "stream", "tokenizer", "mesh", "steps", "microbatches", "save_every", "keep",
    "keep_every", "keep_best", "on_spike", "spike_window", "spike_deviations", "validate_every", "validation_batches", "check_replicas", "device", "sums", "collective_timeout", "trace", "trace_steps", "trace_from", "tensorboard", "histogram_every", "find_nan",
    "sample_every", "max_tokens", "sample_begin", "prompt", "top_k", "top_p", "stop", "samples", "temperature"};
// clang-format on

/// Settings of `declare` that decide the numbers of a model but no shape.
// clang-format off
inline constexpr std::string_view number_settings[] = {
    "norm_epsilon", "rope_base", "rope_factor", "rope_context", "rope_low", "rope_high",
    "rope_yarn", "rope_beta_fast", "rope_beta_slow", "rope_truncate", "rope_amplitude"};
// clang-format on

/// Settings that decide which leaves a model has, and their shapes: no checkpoint of others fits.
// clang-format off
inline constexpr std::string_view leaf_settings[] = {
    "vocabulary", "layers", "d_model", "heads", "n_q_per_kv", "n_kv", "d_head", "d_ff", "context", "norm", "tied", "qkv_bias",
    "qk_norm", "lora", "experts", "shared", "shared_gate"};
// clang-format on

/// The settings that decide the curve, by their names without sections, those of the program included.
inline std::map<std::string, std::string> curve_settings(const Training& training, const std::string& configuration) {
  std::map<std::string, std::string> settings;
  for (const ConfigEntry& entry : config_entries(configuration, "the present configuration")) {
    const std::string name = entry.key.substr(entry.key.rfind('.') + 1);
    const auto in = [&](const auto& names) { return std::ranges::find(names, name) != std::end(names); };
    if (in(training.may_not_change) || (!in(free_settings) && !in(training.may_change))) settings[name] = entry.value;
  }
  return settings;
}

inline void add_frozen_weights(RunIdentity& identity, const Training& training) {
  if (!training.frozen_weights.empty())
    identity.settings[std::string(setting_mark) + "frozen_weights"] = training.frozen_weights;
}

/// Ids mean something else with another tokenizer. Tokens that were prepared need none, so a run that only trains on
/// them may have the default, bytes.
inline void add_tokenizer(RunIdentity& identity, const Data& data, bool bytes) {
  if (data.tokenizer && (bytes || data.tokenizer->fingerprint() != "bytes"))
    identity.settings[std::string(setting_mark) + "tokenizer"] =
        fmt::format("a tokenizer of the fingerprint {:.12}", data.tokenizer->fingerprint());
}

inline RunIdentity run_identity(const Training& training, const Data& data, const std::string& configuration) {
  const bool streams = !data.train && !training.text_stream.empty();
  RunIdentity identity{loader_hash(data.train.get(), streams ? "stream" : ""), {}};
  for (const auto& [name, value] : curve_settings(training, configuration))
    identity.settings[std::string(setting_mark) + name] = value;
  std::string& about = identity.settings[std::string(setting_mark) + "data"];
  if (data.train)
    about = fmt::format("{} tokens of hash {:016x}", data.train->source().tokens(), data.train->source().identity());
  else if (streams)
    about = fmt::format("a stream of {}, tokenizer {:.12}", training.text_stream, data.tokenizer->fingerprint());
  else
    identity.settings.erase(std::string(setting_mark) + "data");
  if (data.train) identity.settings["data.name"] = shardlib::detail::as_utf8(data.train->source().name());
  add_frozen_weights(identity, training);
  add_tokenizer(identity, data, false);
  return identity;
}

/// The settings that decide the model's numbers and their meaning: for samples, exports and answers of a run.
inline RunIdentity model_identity(const Training& training, const Data& data, const std::string& configuration) {
  RunIdentity identity;
  for (const auto& [name, value] : curve_settings(training, configuration))
    if (training.model_settings.contains(name) || std::ranges::find(number_settings, name) != std::end(number_settings))
      identity.settings[std::string(setting_mark) + name] = value;
  add_frozen_weights(identity, training);
  add_tokenizer(identity, data, true);
  return identity;
}

/// The names in --allow-change, with _ for -.
inline std::vector<std::string> allowed_changes(const Training& training) {
  std::vector<std::string> names;
  std::istringstream list(training.allow_change);
  for (std::string name; std::getline(list, name, ',');) {
    if (name.starts_with("--")) name.erase(0, 2);
    std::replace(name.begin(), name.end(), '-', '_');
    names.push_back(name);
  }
  return names;
}

/// Throws UsageError for a name in --allow-change that is not a setting.
inline void check_allowed(const Training& training, const std::string& configuration) {
  if (training.allow_change.empty()) return;
  std::vector<std::string> known{"data", "tokenizer"};
  for (const auto& [name, value] : curve_settings(training, configuration)) known.push_back(name);
  if (!training.frozen_weights.empty()) known.emplace_back("frozen_weights");
  for (const std::string& name : allowed_changes(training)) {
    if (std::ranges::find(known, name) != known.end()) continue;
    const std::string near = nearest(name, known);
    throw UsageError(
        fmt::format("--allow-change: '{}' is not a setting that is compared with the checkpoint{}; those are {}", name,
                    near.empty() ? "" : "; did you mean " + near + "?", fmt::join(known, ", ")));
  }
}

/// The value of a setting that a checkpoint does not name, because its program had no such setting, as TOML has it;
/// empty: not known.
inline std::string value_if_absent(const Training& training, const std::string& name) {
  if (name == "shuffle") return "\"yes\"";
  if (name == "optimizer") return "\"adamw\"";
  if (name == "dtype") return "\"f32\"";
  if (name == "ema") return "0.0";
  if (name == "rope_yarn") return "false";
  if (name == "lr_mult" || name == "decay_mult" || name == "freeze") return "[]";
  const auto at = training.model_settings.find(name);
  return at == training.model_settings.end() || at->second.empty() ? "" : '"' + at->second + '"';
}

/// The part of a setting that is compared. For files, as SafetensorsFiles::describe names them, that is the checksum,
/// which covers the names of all tensors. (Older checkpoints spell their number as "1 tensors".)
inline std::string_view compared(std::string_view name, std::string_view value) {
  const auto last = value.rfind(',');
  return name != "frozen_weights" || last == std::string_view::npos ? value : value.substr(last);
}

inline constexpr std::string_view allowed_mark = "allowed by --allow-change: ";

/// Throws UsageError, the same on all devices, if the run would continue the checkpoint with another curve, unless
/// --allow-change names the differences. Returns a sentence for each allowed change. A setting that only one side has
/// is not compared, unless `value_if_absent` knows its value and the checkpoint has a record of settings. `trains`:
/// the run has steps left.
inline std::vector<std::string> require_same_run(const Checkpoints::Saved& found, const RunIdentity& now,
                                                 const Training& training, bool trains) {
  std::vector<std::string> notes, differing, names, fixed;
  const auto& before = found.identity.settings;
  const auto value_of = [](const std::map<std::string, std::string>& settings, const std::string& key) {
    const auto name = settings.find("data.name");
    const bool named = key == std::string(setting_mark) + "data" && name != settings.end();
    return named ? "'" + name->second + "' with " + settings.at(key) : settings.at(key);
  };
  const std::vector<std::string> allowed = allowed_changes(training);
  const auto differs = [&](const std::string& name, const std::string& was, const std::string& is) {
    const std::string change = fmt::format("{} is {} in the checkpoint, but {} now", name, was, is);
    if (std::ranges::find(allowed, name) != allowed.end()) {
      notes.push_back(std::string(allowed_mark) + change);
      return;
    }
    differing.push_back(change);
    (std::ranges::find(leaf_settings, name) == std::end(leaf_settings) ? names : fixed).push_back(name);
  };
  const bool recorded =
      std::ranges::any_of(before, [](const auto& setting) { return setting.first.starts_with(setting_mark); });
  for (const auto& [key, value] : now.settings) {
    if (!recorded || !key.starts_with(setting_mark)) continue;
    const std::string name = key.substr(setting_mark.size());
    const bool known = before.contains(key);
    const std::string was = known ? before.at(key) : value_if_absent(training, name);
    if (!known && was.empty()) continue;
    if (compared(name, was) == compared(name, value)) continue;
    differs(name, known ? value_of(before, key) : was, value_of(now.settings, key));
  }
  // A run records no tokenizer while it has the default, bytes, and only trains on tokens that were prepared.
  const std::string tokenizer = std::string(setting_mark) + "tokenizer";
  if (before.contains(tokenizer) && !now.settings.contains(tokenizer))
    differs("tokenizer", before.at(tokenizer), "bytes");
  if (!differing.empty()) {
    std::string remedy = "give the checkpoint's values";
    if (trains) remedy += names.empty() ? ", or choose another --run" : ", choose another --run";
    if (!names.empty()) remedy += fmt::format(", or allow the change with --allow-change {}", fmt::join(names, ","));
    if (!names.empty() && !fixed.empty())
      remedy +=
          fmt::format(", but not that of {}, which decides the leaves of the checkpoint", fmt::join(fixed, " and "));
    throw UsageError(fmt::format("the run in '{}' {}: {}; {}", training.directory,
                                 trains ? fmt::format("would resume from step {} with another curve", found.step)
                                        : "has another model or tokenizer",
                                 fmt::join(differing, "; "), remedy));
  }
  return notes;
}

/// The checkpoint from which a run resumes, if there is one, and the notes of require_same_run.
struct Resumed {
  std::optional<Checkpoints::Saved> saved = {};
  std::vector<std::string> notes = {};
};

/// Loads the newest checkpoint. `same`, a call of require_same_run, comes before its leaves: where a setting decides
/// which leaves there are, the error names the setting, unless --allow-change does.
inline Resumed load_same_run(const Checkpoints& checkpoints, const Training& training,
                             const std::function<std::vector<std::string>(const Checkpoints::Saved&)>& same) {
  Resumed found;
  if (!checkpoints.load) return found;
  bool has_compared = false;
  try {
    found.saved = checkpoints.load(INT64_MAX, [&](const Checkpoints::Saved& saved) {
      found.notes = same(saved);
      has_compared = true;
    });
  } catch (const UsageError& error) {
    if (!has_compared) throw;
    std::string text = error.what();
    for (const std::string& note : found.notes)
      text += "\n  --allow-change makes no checkpoint fit: " + note.substr(allowed_mark.size());
    text += fmt::format(
        "\n  start the program that made the run with the run's settings, --config {}/config.toml and no options that "
        "differ; or choose another --run",
        training.directory);
    throw UsageError(text);
  }
  return found;
}

}  // namespace shardlib::run::detail
