// Definitions of options.hpp: reads the command line, the file and the preset. The command line is split here and not
// by a library: CLI11's checks let NaN through and clamp numbers that overflow, and its help, files and errors would be
// unused.
#pragma once

#include "shardlib/run/options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <ranges>
#include <system_error>

#include "shardlib/device/launch.hpp"
#include "shardlib/run/impl/option_values.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/regular_file.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::run {

/// A parsed command line.
struct Options::Request {
  bool help = false, version = false;
  std::vector<std::string> configs;
  std::string preset, preset_place;  ///< empty: not given
  std::vector<Setting> settings;
  std::vector<std::string> arguments;
};

namespace detail {

inline constexpr const char* see_help = " (see --help)";

[[noreturn]] inline void bad_option(const std::string& message) {
  throw UsageError(message + see_help);
}

}  // namespace detail

SHARDLIB_INLINE Options& Options::known_by(const std::vector<std::string>& programs,
                                           const std::vector<std::string>& names) {
  for (const std::string& name : names) elsewhere_.emplace_back(name, programs);
  return *this;
}

SHARDLIB_INLINE std::string Options::who_knows(const std::string& name) const {
  const std::string positive = name.starts_with("--no-") ? "--" + name.substr(5) : name;
  if (find(positive, false) != none) return {};
  for (const auto& [option, programs] : elsewhere_) {
    if ((option != name && option != positive) || programs.empty()) continue;
    std::string text;
    for (std::size_t i = 0; i < programs.size(); ++i)
      text += (i == 0 ? "" : i + 1 == programs.size() ? " and " : ", ") + programs[i];
    return fmt::format("{} {} it, {} does not", text, programs.size() == 1 ? "knows" : "know", program_);
  }
  return {};
}

SHARDLIB_INLINE void Options::refuse_option(const std::string& name) const {
  if (const std::string who = who_knows(name); !who.empty()) detail::bad_option("unknown option " + name + ": " + who);
  std::vector<std::string> names{"--help", "--version"};
  if (has_settings()) names.emplace_back("--config");
  if (!presets_.empty()) names.emplace_back("--preset");
  for (const Option& option : options_) {
    names.push_back(option.name);
    if (std::holds_alternative<bool*>(option.target)) names.push_back("--no-" + option.name.substr(2));
  }
  detail::bad_option("unknown option " + name + detail::hint(nearest(name, names)));
}

SHARDLIB_INLINE void Options::refuse_argument(const std::string& word) const {
  std::vector<std::string> names;
  for (const Argument& argument : single_arguments_) names.push_back(argument.name);
  if (!names.empty())
    detail::bad_option(fmt::format("'{}' is one argument too many: give {} alone", word, fmt::join(names, " and ")));
  std::error_code error;
  const bool is_data = find("--data", false) != none && std::filesystem::exists(word, error);
  detail::bad_option("'" + word + "': every value here needs its option's name before it" +
                     (is_data ? ", as in --data " + word : ""));
}

SHARDLIB_INLINE Options::Request Options::read_command_line(int argc, const char* const* argv) const {
  Request request;
  const std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  const auto has = [&](const char* word) { return std::ranges::find(words, word) != words.end(); };
  request.help = has("--help") || has("-h");
  request.version = has("--version");
  if (request.help || request.version) return request;

  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (!word.starts_with("-") || word == "-") {
      if (arguments_ == nullptr && request.arguments.size() == single_arguments_.size()) refuse_argument(word);
      request.arguments.push_back(word);
      continue;
    }
    const std::size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    std::size_t index = find(name, false);
    bool no = false;
    if (index == none && name.starts_with("--no-")) {
      index = find("--" + name.substr(5), false);
      no = index != none && std::holds_alternative<bool*>(options_[index].target);
    }
    const bool is_config = name == "--config" && has_settings(), is_preset = name == "--preset" && !presets_.empty();
    if (name == "--help" || name == "--version") throw UsageError(name + " takes no value");
    if (index == none ? !is_config && !is_preset : name.starts_with("--no-") && name != options_[index].name && !no)
      refuse_option(name);
    const bool is_flag = index != none && std::holds_alternative<bool*>(options_[index].target);
    std::string value = no ? "false" : "true";
    if (is_flag && equals != std::string::npos)
      detail::bad_option(
          fmt::format("{}: a flag takes no value; --no-{} switches it off", word, options_[index].name.substr(2)));
    if (!is_flag && equals != std::string::npos) {
      value = word.substr(equals + 1);
    } else if (!is_flag) {
      if (i + 1 == words.size() || words[i + 1].starts_with("--"))
        detail::bad_option(name + " needs a value, as in " + name + "=VALUE");
      value = words[++i];
    }
    if (detail::as_utf8(value) != value) detail::bad_option(name + ": the value is not valid UTF-8");
    // In the program it would be "not given", so an unset variable of a script would be ignored. A stored configuration
    // has such values.
    if (index != none && value.empty() && !options_[index].validator.value_name.empty())
      detail::bad_option(fmt::format("{} is given an empty value: give {}, or leave the option out", name,
                                     options_[index].validator.value_name));
    if (is_config || is_preset) {
      if (value.empty()) detail::bad_option(name + " needs a value, as in " + name + "=VALUE");
      if (is_config) request.configs.push_back(value);
      if (is_preset) request.preset = value, request.preset_place = "--preset";
      continue;
    }
    const auto same = std::ranges::find(request.settings, index, &Setting::option);
    if (same == request.settings.end()) {
      request.settings.push_back({index, name, "command line", detail::see_help, {value}});
    } else if (std::holds_alternative<std::vector<std::string>*>(options_[index].target)) {
      same->texts.push_back(value);
    } else {
      same->texts = {value};  // the later one wins: scripts put the user's options behind their own
    }
  }
  return request;
}

/// A file of --config.
struct Options::ConfigFile {
  const Options& options;
  const std::string& file;
  Request& request;                ///< gets the preset that the file names
  std::vector<Setting>& settings;  ///< gets the settings of the file

  void read() {
    const std::string text = naming_option("--config", [&] {
      shardlib::detail::refuse_folder(file, "give a file, as in '" + file + "/config.toml'");
      return detail::read_config_file(file);
    });
    const toml::table root = detail::parse_toml(text, file);
    for (const auto& [key, node] : root) {
      if (const toml::table* section = node.as_table())
        read_section(key, *section);
      else if (key.str() == "preset" && !options.presets_.empty())
        read_preset(key, node);
      else
        read_key("", key, node);
    }
  }

 private:
  template <class At>
  [[nodiscard]] std::string place(const At& at) const {
    return fmt::format("{}:{}", file, at.source().begin.line);
  }
  /// "in [model]".
  [[nodiscard]] static std::string in_section(const std::string& group) {
    return group.empty() ? "at the beginning of the file" : "in [" + shardlib::detail::excerpt(group) + "]";
  }

  void read_section(const toml::key& key, const toml::table& section) {
    const std::string name(key.str());
    const std::vector<std::string> groups = options.groups();
    if (name.empty() || std::ranges::find(groups, name) == groups.end()) {
      for (const auto& [inner, value] : section) refuse_known_elsewhere(name, inner);
      std::string near = nearest(name, groups);
      if (!near.empty()) near = "[" + near + "]";
      throw UsageError(
          fmt::format("{}: unknown section [{}]{}", place(key), shardlib::detail::excerpt(name), detail::hint(near)));
    }
    for (const auto& [inner, value] : section) read_key(name, inner, value);
  }

  void read_preset(const toml::key& key, const toml::node& node) const {
    const auto* text = node.as_string();
    if (text == nullptr)
      throw UsageError(fmt::format("{}: preset: {} is not a preset's name in quotes", place(key),
                                   shardlib::detail::excerpt(detail::line_of(node))));
    if (!request.preset.empty() && request.preset != text->get())
      throw UsageError(
          fmt::format("{} {}: {} already has the preset '{}', and settings of a file override a preset; remove one "
                      "of them",
                      request.preset_place, request.preset, place(key), shardlib::detail::excerpt(text->get())));
    request.preset = text->get();
    if (request.preset_place.empty()) request.preset_place = place(key) + ": preset";
  }

  void read_key(const std::string& group, const toml::key& key, const toml::node& node) {
    const std::string name(key.str());
    const std::size_t index = options.find(name, true);
    if (index == none || options.options_[index].validator.command_line_only) refuse_key(group, key, index);
    const Option& option = options.options_[index];
    if (option.group != group)
      throw UsageError(fmt::format("{}: the key '{}' belongs {}, not {}", place(key), shardlib::detail::excerpt(name),
                                   in_section(option.group), in_section(group)));
    Setting setting{index, place(key) + ": " + name, place(key), "", {}};
    if (!std::visit(detail::FromToml{node, setting.texts}, option.target)) {
      const bool list = std::holds_alternative<std::vector<std::string>*>(option.target);
      std::string expected = std::visit(detail::ExpectedText{option.validator}, option.target);
      if (std::holds_alternative<std::string*>(option.target)) expected += " in quotes";
      if (list) expected = "a list of texts in quotes, as in [\"a\", \"b\"]";
      throw UsageError(
          fmt::format("{}: {} is not {}", setting.place, shardlib::detail::excerpt(detail::line_of(node)), expected));
    }
    settings.push_back(std::move(setting));
  }

  [[noreturn]] void refuse_key(const std::string& group, const toml::key& key, std::size_t index) const {
    const std::string name(key.str());
    if (index != none)
      throw UsageError(fmt::format("{}: '{}' is not a setting of a file: give {} on the command line", place(key),
                                   shardlib::detail::excerpt(name), options.options_[index].name));
    refuse_known_elsewhere(group, key);
    std::vector<std::string> keys;
    for (const Option& option : options.options_) {
      if (option.group == group && !option.validator.command_line_only) keys.push_back(option.key);
    }
    std::string near = nearest(name, keys);
    for (const Option& option : options.options_) {
      if (near.empty() && !option.validator.command_line_only) near = nearest(name, {option.key});
    }
    throw UsageError(fmt::format("{}: unknown key '{}' {}{}", place(key), shardlib::detail::excerpt(name),
                                 in_section(group), detail::hint(near.empty() ? "" : "'" + near + "'")));
  }

  /// A key of another program, perhaps in a section of its own.
  void refuse_known_elsewhere(const std::string& group, const toml::key& key) const {
    std::string name = "--" + std::string(key.str());
    std::ranges::replace(name, '_', '-');
    if (const std::string who = options.who_knows(name); !who.empty())
      throw UsageError(fmt::format("{}: unknown key '{}' {}: {}", place(key), key.str(), in_section(group), who));
  }
};

SHARDLIB_INLINE std::vector<Options::Setting> Options::read_preset(const Request& request) const {
  for (const Preset& preset : presets_)
    for (const auto& [key, value] : preset.settings)
      if (find(key, true) == none)
        throw Error("Options: the preset " + preset.name + " sets the unknown key '" + key + "'");
  std::vector<Setting> settings;
  if (request.preset.empty()) return settings;
  const auto chosen = std::ranges::find(presets_, request.preset, &Preset::name);
  if (chosen == presets_.end()) {
    std::vector<std::string> names;
    for (const Preset& preset : presets_) names.push_back(preset.name);
    throw UsageError(fmt::format("{}: '{}' is not one of {}{}", request.preset_place,
                                 shardlib::detail::excerpt(request.preset), fmt::join(names, ", "),
                                 detail::hint(nearest(request.preset, names))));
  }
  for (const auto& [key, value] : chosen->settings) {
    const std::size_t index = find(key, true);
    const std::string place = "preset " + chosen->name;
    settings.push_back({index, place + ": " + key, place, "", {value}});
  }
  return settings;
}

SHARDLIB_INLINE void Options::apply(const Setting& setting) {
  Option& option = options_[setting.option];
  if (!std::visit(detail::Assign{setting.texts, option.validator}, option.target)) {
    std::vector<std::string> shown;
    for (const std::string& text : setting.texts) shown.push_back("'" + shardlib::detail::excerpt(text) + "'");
    const std::string near = setting.texts.size() == 1 ? nearest(setting.texts[0], option.validator.choices) : "";
    throw UsageError(fmt::format("{}: {} is not {}{}{}", setting.place, fmt::join(shown, ", "),
                                 std::visit(detail::ExpectedText{option.validator}, option.target), detail::hint(near),
                                 setting.remedy));
  }
  option.origin = setting.origin;
}

SHARDLIB_INLINE void Options::imply(const std::string& name, const std::string& value, const std::string& origin) {
  const std::size_t index = find(name, false);
  if (index == none) throw Error("Options: there is no " + name + " that " + origin + " could give a value");
  Option& option = options_[index];
  const std::string given_by = option.origin, before = std::visit(detail::TomlText(), option.target);
  apply({index, origin, origin, "", {value}});
  if (given_by.empty()) return;
  const std::string now = std::visit(detail::TomlText(), option.target);
  if (now != before)
    throw UsageError(fmt::format("{} is {} ({}), but {} is {}: leave the option out", name, before, given_by, origin,
                                 shardlib::detail::excerpt(now)));
  option.origin = given_by;
}

SHARDLIB_INLINE bool Options::given(const std::string& name) const {
  const std::size_t index = find(name, false);
  return index != none && !options_[index].origin.empty();
}

SHARDLIB_INLINE void Options::refuse_without_effect(const Request& request) const {
  for (const Setting& setting : request.settings)
    for (const NoEffect& one : std::views::reverse(no_effects_))  // a program's own reasons say more than the library's
      if (one.option == setting.option)
        if (const std::string why = one.why(*this); !why.empty())
          throw UsageError(fmt::format("{} has no effect {}", setting.place, why));
}

SHARDLIB_INLINE bool Options::parse(int argc, const char* const* argv) {
  Request request = read_command_line(argc, argv);
  asks_version_ = request.version && !request.help;
  if (request.help || request.version) {
    if (world_rank() == 0) fmt::print("{}", answer());
    return false;
  }
  std::vector<Setting> config;
  for (const std::string& file : request.configs) ConfigFile{*this, file, request, config}.read();
  for (const Setting& setting : read_preset(request)) apply(setting);
  preset_ = request.preset;
  for (const Setting& setting : config) apply(setting);
  for (const Setting& setting : request.settings) apply(setting);
  for (const Option& option : options_) {
    if (option.validator.required && option.origin.empty()) detail::bad_option(option.name + " is required");
  }
  refuse_without_effect(request);
  const std::vector<std::string>& given = request.arguments;
  const std::size_t singles = single_arguments_.size();
  if (given.size() < singles) detail::bad_option(single_arguments_[given.size()].name + " is required");
  for (std::size_t i = 0; i < singles; ++i) *single_arguments_[i].value = given[i];
  if (arguments_ == nullptr) return true;
  if (given.size() == singles && arguments_required_) detail::bad_option(arguments_name_ + " is required");
  arguments_->assign(given.begin() + static_cast<std::ptrdiff_t>(singles), given.end());
  return true;
}

}  // namespace shardlib::run
