// Options of a program. One declaration serves the command line, a TOML file, --help and the stored configuration.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "shardlib/run/validator.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// The declared options of a program. Values win in this order: defaults < --preset < --config < the command line,
/// whatever their order there. If several --config are given, the later one wins. An option --d-model of the group
/// `model` is the key d_model of the section [model] of a file. Every mistake of the user is a UsageError that names
/// the place, what is expected and the nearest known name.
class Options {
 public:
  Options(std::string program, std::string purpose);

  /// Puts the options that follow into this group: a heading of --help and a section of the file. "" is the file's
  /// beginning.
  Options& group(std::string name);

  /// Declares "--name" or "-n,--name"; `value` holds the default and must outlive this object. T: int64_t, uint64_t,
  /// double, string or vector<string>, which takes --name once for each element.
  template <class T>
  Options& add(std::string name, T& value, std::string help, const Validator& validator = {}) {
    static_assert(std::is_constructible_v<Target, T*> && !std::is_same_v<T, bool>,
                  "an option is an int64_t, uint64_t, double, string or vector<string>; a bool is a flag()");
    return declare(std::move(name), &value, std::move(help), validator);
  }
  /// A compile error for an option without its help, or for a value that nothing can be written to.
  template <class T>
  Options& add(const std::string& /*name*/, const T& /*value*/) {
    static_assert(std::is_void_v<T>,
                  "Options::add: the help is missing; write options.add(\"--steps\", steps, \"training steps\")");
    return *this;
  }
  template <class T>
  Options& add(const std::string& /*name*/, const T& /*value*/, const std::string& /*help*/,
               const Validator& /*validator*/ = {}) {
    static_assert(std::is_void_v<T>,
                  "Options::add: the value is a variable that is not const; it holds the default and receives what is "
                  "given: std::int64_t steps = 10; options.add(\"--steps\", steps, \"training steps\")");
    return *this;
  }
  /// Declares "--name", which sets `value`, and "--no-name", which clears it.
  Options& flag(std::string name, bool& value, std::string help, const Validator& validator = {}) {
    return declare(std::move(name), &value, std::move(help), validator);
  }
  /// A compile error for a flag without its help, or for a value that is not a bool or cannot be written to.
  template <class T>
  Options& flag(const std::string& /*name*/, const T& /*value*/) {
    static_assert(std::is_void_v<T>,
                  "Options::flag: the help is missing; write options.flag(\"--tied\", tied, \"one embedding\")");
    return *this;
  }
  template <class T>
  Options& flag(const std::string& /*name*/, const T& /*value*/, const std::string& /*help*/,
                const Validator& /*validator*/ = {}) {
    static_assert(!std::is_same_v<T, bool>,
                  "Options::flag: the value is a variable that is not const; it holds the default and receives what is "
                  "given: bool tied = true; options.flag(\"--tied\", tied, \"one embedding\")");
    static_assert(
        std::is_same_v<T, bool>,
        "Options::flag: the value is a bool; a number or a text is an option, options.add(\"--steps\", steps, "
        "\"training steps\")");
    return *this;
  }
  /// Declares a value without a name, as in `tool FILE`; `name` is its name in --help. Several come in the order of
  /// their declarations.
  [[gnu::cold]] Options& argument(std::string name, std::string& value, std::string help);
  /// Declares any number of arguments, after the single ones, as in `tool FILE...`.
  [[gnu::cold]] Options& arguments(std::string name, std::vector<std::string>& values, std::string help,
                                   bool required = true);
  /// Declares the preset `name`, which sets these options: keys as in the file, values as on the command line.
  [[gnu::cold]] Options& preset(std::string name, std::vector<std::pair<std::string, std::string>> settings,
                                std::string help = "");

  /// Says when options of these names have no effect: then `why` gives the rest of the sentence "--keep has no effect
  /// ...", and otherwise nothing. `parse` refuses such an option on the command line. A file may have it, because a
  /// stored configuration has all settings.
  [[gnu::cold]] Options& without_effect(const std::vector<std::string>& names,
                                        const std::function<std::string(const Options&)>& why);

  /// Says which programs have options of these names, for the error about one that this program does not have.
  /// `options.known_by({"gpt2"}, {"--lora"})`
  [[gnu::cold]] Options& known_by(const std::vector<std::string>& programs, const std::vector<std::string>& names);

  /// Sets the values. If --help or --version is given, prints answer() on the first rank and returns false: then leave.
  [[nodiscard, gnu::cold]] bool parse(int argc, const char* const* argv);
  /// After `parse`: gives an option a value that follows from something else, such as a model's file, which `origin`
  /// names. Throws UsageError if the user has given another one. `options.imply("--layers", "12", "'config.json'")`
  [[gnu::cold]] void imply(const std::string& name, const std::string& value, const std::string& origin);
  /// After `parse`: whether the command line, a file or a preset has given the option.
  [[nodiscard]] bool given(const std::string& name) const;
  /// The text for --help or --version, whichever was given.
  [[nodiscard]] std::string answer() const { return asks_version_ ? version() : help(); }

  /// The text of --help, in lines of at most `width` characters.
  [[nodiscard]] std::string help(int width = 100) const;
  /// The text of --version: the version of the library, and what the program was built with.
  [[nodiscard]] std::string version() const;
  /// The resolved configuration as TOML. Passed back as --config, it gives the same one.
  [[nodiscard]] std::string to_toml() const;
  /// The non-default settings, one a line, with where each comes from.
  [[nodiscard]] std::string describe() const;

 private:
  using Target = std::variant<std::int64_t*, std::uint64_t*, double*, std::string*, bool*, std::vector<std::string>*>;
  struct Option {
    std::string name, short_name, key, group, help;
    Validator validator;
    Target target;
    std::string default_text;  ///< as TOML
    std::string origin = {};   ///< empty: the default
  };
  struct Preset {
    std::string name, help;
    std::vector<std::pair<std::string, std::string>> settings;
  };
  /// One value to set. `place` begins its error message.
  struct Setting {
    std::size_t option = 0;
    std::string place, origin, remedy;
    std::vector<std::string> texts;
  };
  struct NoEffect {
    std::size_t option = 0;
    std::function<std::string(const Options&)> why;
  };
  struct Request;
  struct ConfigFile;

  [[gnu::cold]] Options& declare(std::string name, Target target, std::string help, const Validator& validator);
  [[nodiscard]] Request read_command_line(int argc, const char* const* argv) const;
  [[noreturn]] void refuse_option(const std::string& name) const;
  [[noreturn]] void refuse_argument(const std::string& word) const;
  [[nodiscard]] std::vector<Setting> read_preset(const Request& request) const;
  void apply(const Setting& setting);
  void refuse_without_effect(const Request& request) const;
  [[nodiscard]] std::size_t find(std::string_view name, bool by_key) const;
  [[nodiscard]] std::vector<std::string> groups() const;
  /// "gpt2 knows it, gpt_fsdp does not", for an option that this program does not have; empty if none is known to have
  /// it.
  [[nodiscard]] std::string who_knows(const std::string& name) const;
  /// Whether a file may contain any option.
  [[nodiscard]] bool has_settings() const;

  static constexpr std::size_t none = static_cast<std::size_t>(-1);
  std::string program_, purpose_, group_;
  std::vector<Option> options_;
  std::vector<Preset> presets_;
  std::vector<NoEffect> no_effects_;
  std::vector<std::pair<std::string, std::vector<std::string>>>
      elsewhere_;       ///< each option, and the programs that have it
  std::string preset_;  ///< the chosen one
  bool asks_version_ = false;
  struct Argument {
    std::string name, help;
    std::string* value;
  };
  std::vector<Argument> single_arguments_;
  std::string arguments_name_, arguments_help_;
  std::vector<std::string>* arguments_ = nullptr;
  bool arguments_required_ = false;
};

/// One key of a TOML text and its value: "model.d_model", "768".
struct ConfigEntry {
  std::string key, value;
  friend bool operator==(const ConfigEntry&, const ConfigEntry&) = default;
};

/// The keys of a TOML text in order. `name` is its name in errors. Throws UsageError with the line of a mistake.
/// `config_entries("steps = 10", "the preset")`
[[nodiscard]] SHARDLIB_INLINE std::vector<ConfigEntry> config_entries(std::string_view toml, const std::string& name);
/// The keys of a TOML file, read by `config_entries`. Throws UsageError if it cannot be read.
[[nodiscard]] SHARDLIB_INLINE std::vector<ConfigEntry> config_entries_of_file(const std::string& path);

/// The differences between two configurations: "model.d_model: 256 -> 512". `config_changes(stored, present)`
[[nodiscard]] SHARDLIB_INLINE std::vector<std::string> config_changes(const std::vector<ConfigEntry>& before,
                                                                      const std::vector<ConfigEntry>& after);

/// The candidate nearest to `word` by edit distance, or that `word` begins. Empty if none is near. `nearest("sped",
/// {"seed", "steps"})`
[[nodiscard]] SHARDLIB_INLINE std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/options.hpp"
#include "shardlib/run/impl/options_parse.hpp"
#endif
