// Definitions of options.hpp: declarations, --help and the stored configuration.
#pragma once

#include "shardlib/run/options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>

#include "shardlib/device/exec.hpp"
#include "shardlib/run/impl/option_values.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/kokkos.hpp"
#include "shardlib/support/regular_file.hpp"
#include "shardlib/support/version.hpp"

namespace shardlib::run {

namespace detail {
/// Throws Error for a name that the command line could not give.
inline void require_name(const std::string& name, const std::string& short_name) {
  const auto is_name = [](std::string_view text) {
    return !text.empty() && text.front() != '-' &&
           std::ranges::all_of(text, [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '_'; });
  };
  if (!is_name(std::string_view(name).substr(2)))
    throw Error("Options: '" + name + "' is not the name of an option: write letters, digits, - and _ after the --");
  if (!short_name.empty() && (short_name.size() != 2 || short_name[0] != '-' || !is_name(short_name.substr(1))))
    throw Error("Options: '" + short_name + "' is not the short name of " + name +
                ": write one letter after a -, as in \"-n,--steps\"");
}
}  // namespace detail

// ---- declarations ---------------------------------------------------------------------------------------------------

SHARDLIB_INLINE Options::Options(std::string program, std::string purpose)
    : program_(std::move(program)), purpose_(std::move(purpose)) {}

SHARDLIB_INLINE Options& Options::group(std::string name) {
  group_ = std::move(name);
  return *this;
}

SHARDLIB_INLINE Options& Options::declare(std::string name, Target target, std::string help,
                                          const Validator& validator) {
  std::string short_name;
  if (const std::size_t comma = name.find(','); comma != std::string::npos) {
    short_name = name.substr(0, comma);
    name.erase(0, comma + 1);
  }
  if (!name.starts_with("--")) throw Error("Options: '" + name + "' must begin with --");
  detail::require_name(name, short_name);
  std::string key = name.substr(2);
  std::replace(key.begin(), key.end(), '-', '_');
  for (const std::string& other : {name, short_name})
    if (find(other, false) != none || other == "--help" || other == "--version" || other == "--config" ||
        other == "--preset")
      throw Error("Options: " + other + " is declared twice");
  if (const std::size_t other = find(key, true); other != none)
    throw Error("Options: " + name + " and " + options_[other].name + " have the same key of a file, " + key);
  if (!validator.required && !std::visit(detail::AllowsDefault{validator}, target))
    throw Error("Options: the default of " + name + ", " + std::visit(detail::TomlText(), target) + ", is not " +
                std::visit(detail::ExpectedText{validator}, target));
  options_.push_back({std::move(name), std::move(short_name), std::move(key), group_, std::move(help), validator,
                      target, std::visit(detail::TomlText(), target)});
  return *this;
}

SHARDLIB_INLINE Options& Options::argument(std::string name, std::string& value, std::string help) {
  single_arguments_.push_back({std::move(name), std::move(help), &value});
  return *this;
}

SHARDLIB_INLINE Options& Options::arguments(std::string name, std::vector<std::string>& values, std::string help,
                                            bool required) {
  arguments_name_ = std::move(name);
  arguments_help_ = std::move(help);
  arguments_ = &values;
  arguments_required_ = required;
  return *this;
}

SHARDLIB_INLINE Options& Options::preset(std::string name, std::vector<std::pair<std::string, std::string>> settings,
                                         std::string help) {
  if (std::ranges::find(presets_, name, &Preset::name) != presets_.end())
    throw Error("Options: the preset " + name + " is declared twice");
  presets_.push_back({std::move(name), std::move(help), std::move(settings)});
  return *this;
}

SHARDLIB_INLINE Options& Options::without_effect(const std::vector<std::string>& names,
                                                 const std::function<std::string(const Options&)>& why) {
  for (const std::string& name : names) {
    if (find(name, false) == none) throw Error("Options: " + name + " is not declared");
    no_effects_.push_back({find(name, false), why});
  }
  return *this;
}

SHARDLIB_INLINE std::size_t Options::find(std::string_view name, bool by_key) const {
  for (std::size_t i = 0; i < options_.size() && !name.empty(); ++i) {
    if (by_key ? options_[i].key == name : options_[i].name == name || options_[i].short_name == name) return i;
  }
  return none;
}

SHARDLIB_INLINE std::vector<std::string> Options::groups() const {
  std::vector<std::string> names{""};
  for (const Option& option : options_)
    if (std::ranges::find(names, option.group) == names.end()) names.push_back(option.group);
  return names;
}

SHARDLIB_INLINE bool Options::has_settings() const {
  return std::ranges::any_of(options_, [](const Option& o) { return !o.validator.command_line_only; });
}

// ---- what is printed ------------------------------------------------------------------------------------------------

namespace detail {

/// The text after the option's name in --help: "N", "FILE", "a|b"; nothing for a flag.
struct ValueName {
  const Validator& validator;
  [[nodiscard]] std::string or_else(const char* other) const {
    if (!validator.value_name.empty()) return " " + validator.value_name;
    if (!validator.choices.empty()) return fmt::format(" {}", fmt::join(validator.choices, "|"));
    return other;
  }
  std::string operator()(const std::int64_t*) const { return or_else(" N"); }
  std::string operator()(const std::uint64_t*) const { return or_else(" N"); }
  std::string operator()(const double*) const { return or_else(" X"); }
  std::string operator()(const std::string*) const { return or_else(" TEXT"); }
  std::string operator()(const std::vector<std::string>*) const { return or_else(" TEXT"); }
  std::string operator()(const bool*) const { return ""; }
};

/// "(default 300 steps; at least 1)", without parts that say nothing.
inline std::string facts(const Validator& validator, const std::string& default_text) {
  std::string text;
  const auto fact = [&](const std::string& one) {
    if (!one.empty()) text += (text.empty() ? "" : "; ") + one;
  };
  const bool silent = default_text == "false" || default_text == "\"\"" || default_text == "[]";
  if (validator.required) {
    fact("required");
  } else if (!silent) {
    const bool plain = default_text.starts_with('"') && default_text.find(' ') == std::string::npos;
    std::string shown = plain ? default_text.substr(1, default_text.size() - 2) : default_text;
    for (std::size_t at = 0; (at = shown.find(R"(\\)", at)) != std::string::npos; ++at) shown.erase(at, 1);  // of TOML
    fact("default " + shown + (validator.unit.empty() ? "" : " " + validator.unit));
  }
  if (!validator.unit.empty() && (validator.required || silent)) fact("in " + validator.unit);
  const bool any_size = validator.least >= 0 && validator.least <= 1 && validator.most == largest_size;
  if (!any_size) fact(range_text(validator));
  return text.empty() ? "" : " (" + text + ")";
}

/// The words of the text in lines of at most `width`, each but the first behind `indent` spaces.
inline std::string wrapped(const std::string& text, std::size_t indent, std::size_t width) {
  std::string out;
  std::size_t at = indent;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::size_t length = end - begin;
    if (at > indent && at + 1 + length > width) {
      out += "\n" + std::string(indent, ' ');
      at = indent;
    } else if (at > indent) {
      out += " ";
      ++at;
    }
    out += text.substr(begin, length);
    at += length;
    begin = end + 1;
  }
  return out;
}

/// Formats two columns: the name, and the wrapped text to its right, or below it if the name is too long.
inline std::string two_columns(const std::string& left, const std::string& text, std::size_t width) {
  constexpr std::size_t column = 30;
  std::string out = "  " + left;
  if (left.size() + 4 > column) {
    out += "\n" + std::string(column, ' ');
  } else {
    out += std::string(column - out.size(), ' ');
  }
  return out + wrapped(text, column, width) + "\n";
}

}  // namespace detail

SHARDLIB_INLINE std::string Options::help(int width) const {
  const auto columns = static_cast<std::size_t>(std::max(width, 60));
  const auto line = [&](const std::string& left, const std::string& text) {
    return detail::two_columns(left, text, columns);
  };
  std::string out = detail::wrapped(program_ + ": " + purpose_, 0, columns) + "\n\nusage: " + program_;
  for (const Option& option : options_) {
    if (option.validator.required)
      out += " " + option.name + std::visit(detail::ValueName{option.validator}, option.target);
  }
  out += " [options]";
  for (const Argument& argument : single_arguments_) out += " " + argument.name;
  if (arguments_ != nullptr) out += " " + arguments_name_ + "...";
  out += "\n";
  if (arguments_ != nullptr || !single_arguments_.empty()) out += "\n";
  for (const Argument& argument : single_arguments_) out += line(argument.name, argument.help);
  if (arguments_ != nullptr) out += line(arguments_name_, arguments_help_);
  for (const std::string& group : groups()) {
    out += group.empty() ? "\n" : "\n" + group + ":\n";
    for (const Option& option : options_) {
      if (option.group != group) continue;
      const std::string before = option.short_name.empty() ? "" : option.short_name + ", ";
      const bool flag = std::holds_alternative<bool*>(option.target);
      const std::string name = flag ? "--[no-]" + option.name.substr(2) : option.name;
      out += line(before + name + std::visit(detail::ValueName{option.validator}, option.target),
                  option.help + detail::facts(option.validator, option.default_text));
    }
    if (!group.empty()) continue;
    if (has_settings())
      out += line("--config FILE", std::string("TOML file of settings: keys are option names with _ for -") +
                                       (groups().size() > 1 ? ", sections are the groups below" : "") +
                                       "; of several files the later one wins");
    if (!presets_.empty()) out += line("--preset NAME", "a named set of settings, listed below");
    out += line("--help", "print this text");
    out += line("--version", "print the version of shardlib, and what the program was built with");
  }
  if (!presets_.empty()) out += "\npresets:\n";
  for (const Preset& preset : presets_) {
    std::vector<std::string> settings;
    for (const auto& [key, value] : preset.settings) settings.push_back(key + "=" + value);
    out += line(preset.name,
                preset.help + (preset.help.empty() ? "" : ": ") + fmt::format("{}", fmt::join(settings, " ")));
  }
  if (has_settings() && !presets_.empty()) out += "\nThe command line wins over --config, which wins over --preset.\n";
  return out;
}

SHARDLIB_INLINE std::string Options::version() const {
  std::string with = shardlib::detail::kokkos_text();
#if defined(SHARDLIB_WITH_MPI)
  with += ", MPI";
#endif
#if defined(SHARDLIB_WITH_DNNL)
  with += ", oneDNN";
#endif
#if defined(SHARDLIB_WITH_OPENMP)
  with += ", OpenMP";
#endif
  return fmt::format("{}: shardlib {} (commit {}), with {}; {} runs the kernels\n", program_,
                     shardlib::detail::version_text(), shardlib::detail::commit_text(), with,
                     launcher_name() == "host" ? "the host" : launcher_name());
}

SHARDLIB_INLINE std::string Options::to_toml() const {
  std::string out = preset_.empty() ? "" : "preset = " + detail::quote(preset_) + "\n";
  for (const std::string& group : groups()) {
    std::string section;
    for (const Option& option : options_) {
      if (option.group != group || option.validator.command_line_only) continue;
      section += option.key + " = " + std::visit(detail::TomlText(), option.target) + "\n";
    }
    if (!group.empty() && !section.empty()) out += (out.empty() ? "[" : "\n[") + group + "]\n";
    out += section;
  }
  return out;
}

SHARDLIB_INLINE std::string Options::describe() const {
  std::string out;
  for (const Option& option : options_) {
    if (option.origin.empty()) continue;
    out += fmt::format("{:<22} {}  ({})\n", option.name, std::visit(detail::TomlText(), option.target), option.origin);
  }
  return out;
}

// ---- configurations as entries --------------------------------------------------------------------------------------

SHARDLIB_INLINE std::vector<ConfigEntry> config_entries(std::string_view toml, const std::string& name) {
  struct Placed {
    toml::source_position at;
    ConfigEntry entry;
  };
  std::vector<Placed> placed;
  const auto collect = [&](const auto& self, const toml::table& table, const std::string& prefix) -> void {
    for (const auto& [key, node] : table) {
      const std::string path = prefix + std::string(key.str());
      if (const toml::table* inner = node.as_table()) {
        self(self, *inner, path + ".");
      } else {
        placed.push_back({key.source().begin, {path, detail::line_of(node)}});
      }
    }
  };
  collect(collect, detail::parse_toml(toml, name), "");
  // A table is sorted by name; the file's order says more.
  std::ranges::sort(placed, {}, &Placed::at);
  std::vector<ConfigEntry> entries;
  for (Placed& one : placed) entries.push_back(std::move(one.entry));
  return entries;
}

SHARDLIB_INLINE std::vector<ConfigEntry> config_entries_of_file(const std::string& path) {
  shardlib::detail::refuse_folder(path, "a run has a file there; move the folder away");
  return config_entries(detail::read_config_file(path), path);
}

SHARDLIB_INLINE std::vector<std::string> config_changes(const std::vector<ConfigEntry>& before,
                                                        const std::vector<ConfigEntry>& after) {
  const auto value_of = [](const std::vector<ConfigEntry>& entries, const std::string& key) {
    const auto at = std::ranges::find(entries, key, &ConfigEntry::key);
    return at == entries.end() ? std::string("(absent)") : at->value;
  };
  std::vector<std::string> changes;
  for (const ConfigEntry& entry : before) {
    const std::string now = value_of(after, entry.key);
    if (now != entry.value) changes.push_back(entry.key + ": " + entry.value + " -> " + now);
  }
  for (const ConfigEntry& entry : after) {
    if (value_of(before, entry.key) == "(absent)") changes.push_back(entry.key + ": (absent) -> " + entry.value);
  }
  return changes;
}

SHARDLIB_INLINE std::string nearest(std::string_view name, const std::vector<std::string>& candidates) {
  std::string best, word(name);
  for (char& c : word)  // H100 is h100, not a100
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  // A third of the letters may be wrong; a beginning of the name counts as one mistake.
  std::size_t least = std::max<std::size_t>(2, word.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const bool begins = word.size() >= 4 && candidate.starts_with(word);
    const std::size_t distance = begins ? 1 : detail::edit_distance(word, candidate);
    if (distance < least && distance < word.size()) {
      least = distance;
      best = candidate;
    }
  }
  return best;
}

}  // namespace shardlib::run
