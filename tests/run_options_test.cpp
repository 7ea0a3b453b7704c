// run::Options: every type from every source, precedence, presets, exact errors, --help, the stored configuration.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <shardlib/run/dry_run.hpp>
#include <shardlib/run/options.hpp>
#include <shardlib/run/trained.hpp>
#include <shardlib/run/training.hpp>
#include <shardlib/support/version.hpp>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "../examples/gpt_presets.hpp"
#include "scratch.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;
using run::Options;

namespace {

struct Settings {
  std::vector<std::string> data;
  std::int64_t steps = 300, d_model = 256;
  std::uint64_t seed = 0;
  double learning_rate = 3e-3, decay = 0.1;
  std::string prompt = "And God # said", optimizer = "adam", output;
  bool tied = false, resume = true;
};

Options declared(Settings& s) {
  Options o("trainer", "Trains.");
  o.add("--data", s.data, "texts", run::value_name("FILE"));
  o.add("--steps", s.steps, "training steps", run::at_least(1) | run::unit("steps"));
  o.add("--seed", s.seed, "of everything");
  o.add("-o,--output", s.output, "the file", run::command_line_only());
  o.group("model");
  o.add("--d-model", s.d_model, "width", run::size()).flag("--tied", s.tied, "one embedding");
  o.group("optimizer");
  o.add("--learning-rate", s.learning_rate, "peak", run::above(0));
  o.add("--decay", s.decay, "of weights", run::between(0, 1));
  o.add("--optimizer", s.optimizer, "which", run::one_of({"adam", "sgd"}));
  o.group("run").flag("--resume", s.resume, "go on");
  o.add("--prompt", s.prompt, "of samples");
  o.preset("small", {{"d_model", "128"}, {"tied", "true"}}, "for tests");
  o.preset("large", {{"d_model", "1024"}, {"steps", "5000"}});
  return o;
}

bool parse(Options& options, std::vector<const char*> words) {
  words.insert(words.begin(), "trainer");
  return options.parse(static_cast<int>(words.size()), words.data());
}

Settings parsed(const std::vector<const char*>& words) {
  Settings s;
  Options o = declared(s);
  const bool go_on = parse(o, words);
  CHECK(go_on);
  return s;
}

void fails(const std::vector<const char*>& words, const std::string& text,
           std::source_location where = std::source_location::current()) {
  Settings s;
  Options o = declared(s);
  expect_error<UsageError>([&] { static_cast<void>(parse(o, words)); }, text, where);
}

/// A file of settings named run.toml in the present error texts.
class Config {
 public:
  explicit Config(const std::string& toml) { put(path_, toml); }
  [[nodiscard]] std::string option() const { return "--config=" + path_; }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  Scratch folder_;
  std::string path_ = folder_ / "run.toml";
};

void file_fails(const std::string& toml, const std::string& line_and_text,
                std::source_location where = std::source_location::current()) {
  const Config file(toml);
  fails({file.option().c_str()}, file.path() + line_and_text, where);
}

}  // namespace

TEST_CASE("options: each type on the command line", "[run]") {
  const Settings s = parsed({"--data", "a b.txt", "--steps=7", "--seed", "18446744073709551615", "--data=-", "--tied",
                             "--no-resume", "--learning-rate", "1e-4", "--prompt=--x = \"y\"", "-o", "out"});
  CHECK(s.data == std::vector<std::string>{"a b.txt", "-"});
  CHECK(s.steps == 7);
  CHECK(s.seed == std::numeric_limits<std::uint64_t>::max());
  CHECK((s.tied && !s.resume));
  CHECK(s.learning_rate == 1e-4);
  CHECK(s.prompt == "--x = \"y\"");
  CHECK(s.output == "out");
  CHECK(s.optimizer == "adam");
  CHECK(parsed({"--prompt", "-1"}).prompt == "-1");
}

TEST_CASE("options: one that has no effect is refused on the command line, but not in a file", "[run]") {
  Settings s;
  const auto with = [&s](const std::vector<const char*>& words) {
    Options o = declared(s);
    o.without_effect({"--decay", "--resume"}, [&s](const Options& all) {
      return s.optimizer == "sgd" && !all.given("--seed") ? "with --optimizer sgd: leave it out" : "";
    });
    return parse(o, words);
  };
  CHECK(with({"--decay=0.2"}));
  expect_error<UsageError>(
      [&] {
        static_cast<void>(with({"--decay=0.2", "--optimizer=sgd"}));
      },
      "--decay has no effect with --optimizer sgd: leave it out");
  expect_error<UsageError>(
      [&] {
        static_cast<void>(with({"--no-resume", "--optimizer=sgd"}));
      },
      "--no-resume has no effect with --optimizer sgd: leave it out");
  CHECK(with({"--decay=0.2", "--optimizer=sgd", "--seed=1"}));
  const Config file("[optimizer]\ndecay = 0.3\n");
  CHECK(with({file.option().c_str(), "--optimizer=sgd"}));
  CHECK(s.decay == 0.3);
  Options o = declared(s);
  expect_error([&] { o.without_effect({"--nothing"}, [](const Options&) { return ""; }); },
               "Options: --nothing is not declared");
}

TEST_CASE("options: an error about an option of other programs names them", "[run]") {
  Settings s;
  const auto fails_of_others = [&](const std::string& word, const std::string& text) {
    Options o = declared(s);
    o.known_by({"gpt"}, {"--lora-rank", "--stages"}).known_by({"gpt", "moe", "mlp"}, {"--experts"});
    expect_error<UsageError>([&] { static_cast<void>(parse(o, {word.c_str()})); }, text);
  };
  fails_of_others("--lora-rank=3", "unknown option --lora-rank: gpt knows it, trainer does not (see --help)");
  fails_of_others("--no-experts",
                  "unknown option --no-experts: gpt, moe and mlp know it, trainer does not (see --help)");
  fails_of_others("--stesp=3", "unknown option --stesp; did you mean --steps? (see --help)");
  const Config file("[model]\nlora_rank = 3\n"), section("[pipeline]\nstages = 3\n");
  fails_of_others(file.option(),
                  file.path() + ":2: unknown key 'lora_rank' in [model]: gpt knows it, trainer does not");
  fails_of_others(section.option(),
                  section.path() + ":2: unknown key 'stages' in [pipeline]: gpt knows it, trainer does not");
}

TEST_CASE("options: the later one wins on the command line", "[run]") {
  const Settings s = parsed({"--steps=1", "--tied", "--steps=2", "--no-tied", "--preset=small", "--preset=large"});
  CHECK(s.steps == 2);
  CHECK_FALSE(s.tied);
  CHECK(s.d_model == 1024);
  CHECK(parsed({"--data=a", "--data=b"}).data == std::vector<std::string>{"a", "b"});
}

TEST_CASE("options: errors of the command line", "[run]") {
  fails({"--stesp=3"}, "unknown option --stesp; did you mean --steps? (see --help)");
  fails({"--learn", "3"}, "unknown option --learn; did you mean --learning-rate? (see --help)");
  fails({"--no-tide"}, "unknown option --no-tide; did you mean --no-tied? (see --help)");
  fails({"--no-steps"}, "unknown option --no-steps; did you mean --steps? (see --help)");
  fails({"--xylophone"}, "unknown option --xylophone (see --help)");
  fails({"-x"}, "unknown option -x (see --help)");
  fails({"stray"}, "'stray': every value here needs its option's name before it (see --help)");
  fails({"/"}, "'/': every value here needs its option's name before it, as in --data / (see --help)");
  fails({"--steps"}, "--steps needs a value, as in --steps=VALUE (see --help)");
  fails({"--steps", "--tied"}, "--steps needs a value, as in --steps=VALUE (see --help)");
  fails({"--tied=true"}, "--tied=true: a flag takes no value; --no-tied switches it off (see --help)");
  fails({"--prompt=\xff"}, "--prompt: the value is not valid UTF-8 (see --help)");
  for (const std::string bad : {"0", "-3", "1.0", "1e3", " 1", "1 ", "", "many", "99999999999999999999", "0x10"})
    fails({("--steps=" + bad).c_str()}, "--steps: '" + bad + "' is not a whole number of at least 1 (see --help)");
  fails({"--d-model=16777217"}, "--d-model: '16777217' is not a whole number from 1 to 16777216 (see --help)");
  for (const std::string bad : {"-1", "1.5", "18446744073709551616"})
    fails({("--seed=" + bad).c_str()},
          "--seed: '" + bad + "' is not a whole number from 0 to 18446744073709551615 (see --help)");
  for (const std::string bad : {"0", "-1", "nan", "inf", "-inf", "1e999", "1e", "", "3 "})
    fails({("--learning-rate=" + bad).c_str()},
          "--learning-rate: '" + bad + "' is not a finite number above 0 (see --help)");
  fails({"--decay=1.01"}, "--decay: '1.01' is not a finite number from 0 to 1 (see --help)");
  fails({"--decay=nan"}, "--decay: 'nan' is not a finite number from 0 to 1 (see --help)");
  fails({"--optimizer=adm"}, "--optimizer: 'adm' is not one of adam, sgd; did you mean adam? (see --help)");
  fails({"--optimizer=SGD"}, "--optimizer: 'SGD' is not one of adam, sgd; did you mean sgd? (see --help)");
  fails({"--preset=smal"}, "--preset: 'smal' is not one of small, large; did you mean small?");
  fails({"--preset="}, "--preset needs a value, as in --preset=VALUE (see --help)");
  fails({"--config=/nowhere/x"}, "--config: cannot read '/nowhere/x': No such file or directory");
  fails({"--help=1"}, "--help takes no value");
  fails({"--steps", "3", "--version=2"}, "--version takes no value");
  fails({"--config=/tmp"}, "--config: '/tmp' is a folder: give a file, as in '/tmp/config.toml'");
  // A value with a name in --help is never empty, and where any text will do it may be.
  fails({"--data="}, "--data is given an empty value: give FILE, or leave the option out (see --help)");
  fails({"--data", ""}, "--data is given an empty value: give FILE, or leave the option out (see --help)");
  CHECK(parsed({"--prompt="}).prompt.empty());
}

TEST_CASE("options: bounds are allowed themselves", "[run]") {
  CHECK(parsed({"--steps=1"}).steps == 1);
  CHECK(parsed({"--d-model=16777216"}).d_model == 16777216);
  CHECK(parsed({"--decay=0"}).decay == 0);
  CHECK(parsed({"--decay=1"}).decay == 1);
  CHECK(parsed({"--steps=9223372036854775807"}).steps == std::numeric_limits<std::int64_t>::max());
  CHECK(parsed({"--learning-rate=4.9e-324"}).learning_rate == std::numeric_limits<double>::denorm_min());
}

TEST_CASE("options: each type from a file", "[run]") {
  const Config file(R"(# a comment
data = ["a # b", 'c\d']  # strings with a hash
steps = 1_000
seed = "18446744073709551615"
[model]
d_model = 0x200
tied = true
[optimizer]
learning_rate = 1
decay = 5e-1
optimizer = "sgd"
[run]
resume = false
prompt = """
two
lines"""
)");
  const Settings s = parsed({file.option().c_str()});
  CHECK(s.data == std::vector<std::string>{"a # b", "c\\d"});
  CHECK(s.steps == 1000);
  CHECK(s.seed == std::numeric_limits<std::uint64_t>::max());
  CHECK(s.d_model == 512);
  CHECK((s.tied && !s.resume));
  CHECK(s.learning_rate == 1);
  CHECK(s.decay == 0.5);
  CHECK(s.optimizer == "sgd");
  CHECK(s.prompt == "two\nlines");
}

TEST_CASE("options: errors of a file name its line", "[run]") {
  file_fails("\nstepz = 4", ":2: unknown key 'stepz' at the beginning of the file; did you mean 'steps'?");
  file_fails("[model]\nd-model = 4", ":2: unknown key 'd-model' in [model]; did you mean 'd_model'?");
  file_fails("[model]\nxylophone = 4", ":2: unknown key 'xylophone' in [model]");
  file_fails("d_model = 4", ":1: the key 'd_model' belongs in [model], not at the beginning of the file");
  file_fails("[run]\nsteps = 4", ":2: the key 'steps' belongs at the beginning of the file, not in [run]");
  file_fails("\n\n[modle]\n", ":3: unknown section [modle]; did you mean [model]?");
  file_fails("[xylophone]\n", ":1: unknown section [xylophone]");
  file_fails("output = 'x'", ":1: 'output' is not a setting of a file: give --output on the command line");
  file_fails("steps = \"3\"", ":1: steps: \"3\" is not a whole number of at least 1");
  file_fails("steps = 3.0", ":1: steps: 3.0 is not a whole number of at least 1");
  file_fails("steps = 0", ":1: steps: '0' is not a whole number of at least 1");
  file_fails("steps = 1979-05-27", ":1: steps: 1979-05-27 is not a whole number of at least 1");
  file_fails("steps = [1, 2]", ":1: steps: [1, 2] is not a whole number of at least 1");
  file_fails("data = \"x\"", ":1: data: \"x\" is not a list of texts in quotes, as in [\"a\", \"b\"]");
  file_fails("data = [1]", ":1: data: [1] is not a list of texts in quotes, as in [\"a\", \"b\"]");
  file_fails("[model]\ntied = 1", ":2: tied: 1 is not true or false");
  file_fails("[run]\nprompt = 3", ":2: prompt: 3 is not a text in quotes");
  file_fails("[optimizer]\noptimizer = \"adm\"", ":2: optimizer: 'adm' is not one of adam, sgd; did you mean adam?");
  file_fails("[optimizer]\nlearning_rate = nan", ":2: learning_rate: 'nan' is not a finite number above 0");
  file_fails("[optimizer]\nlearning_rate = inf", ":2: learning_rate: 'inf' is not a finite number above 0");
  file_fails("preset = \"smal\"", ":1: preset: 'smal' is not one of small, large; did you mean small?");
  file_fails("preset = 3", ":1: preset: 3 is not a preset's name in quotes");
  // What toml++ says of a file that is not TOML is its own.
  for (const auto& [toml, line] : {std::pair{"steps = 1\nsteps = 2", 2},
                                   {"\nsteps = ", 2},
                                   {"[model\n", 1},
                                   {"steps = 99999999999999999999", 1},
                                   {"[run]\nprompt = \"\xff\"", 2}}) {
    const Config file(toml);
    const std::string got = error_of<UsageError>([&] { static_cast<void>(parsed({file.option().c_str()})); });
    CHECK(got.starts_with(file.path() + ":" + std::to_string(line) + ": this is not TOML: "));
  }
}

TEST_CASE("options: defaults, preset, file and command line, in this order", "[run]") {
  const Config file("steps = 40\n[model]\nd_model = 40\n");
  const std::string config = file.option();
  CHECK(parsed({}).d_model == 256);
  CHECK(parsed({"--preset=small"}).d_model == 128);
  CHECK(parsed({"--preset=small"}).tied);
  CHECK_FALSE(parsed({"--no-tied", "--preset=small"}).tied);
  CHECK_FALSE(parsed({"--preset=small", "--no-tied"}).tied);
  CHECK(parsed({"--preset=large", config.c_str()}).d_model == 40);
  CHECK(parsed({config.c_str(), "--preset=large"}).d_model == 40);
  CHECK(parsed({config.c_str(), "--preset=large"}).steps == 40);
  CHECK(parsed({"--d-model=4", config.c_str(), "--preset=large"}).d_model == 4);
  CHECK(parsed({config.c_str(), "--preset=large", "--d-model=4"}).d_model == 4);

  const Config other("steps = 50\n");
  CHECK(parsed({config.c_str(), other.option().c_str()}).steps == 50);
  CHECK(parsed({other.option().c_str(), config.c_str()}).steps == 40);
  CHECK(parsed({config.c_str(), other.option().c_str()}).d_model == 40);

  const Config own("preset = \"small\"\nsteps = 40\n"), large("preset = \"large\"\n");
  fails({own.option().c_str(), large.option().c_str()},
        own.path() + ":1: preset small: " + large.path() +
            ":1 already has the preset 'large', and settings of a file override a preset; remove one of them");
  CHECK(parsed({own.option().c_str()}).d_model == 128);
  CHECK(parsed({own.option().c_str(), "--preset=small"}).d_model == 128);
  fails({own.option().c_str(), "--preset=large"},
        "--preset large: " + own.path() +
            ":1 already has the preset 'small', and settings of a file override a preset; remove one of them");
}

TEST_CASE("options: lists are replaced, not joined, by a stronger source", "[run]") {
  const Config file("data = [\"a\", \"b\"]\n");
  CHECK(parsed({file.option().c_str()}).data == std::vector<std::string>{"a", "b"});
  CHECK(parsed({file.option().c_str(), "--data=c"}).data == std::vector<std::string>{"c"});
}

TEST_CASE("options: required, wherever it is given", "[run]") {
  const auto run_with = [](const std::vector<const char*>& words) {
    std::string data;
    Options o("tool", "Works.");
    o.add("--data", data, "text", run::required());
    const bool go_on = parse(o, words);
    CHECK(go_on);
    return data;
  };
  expect_error<UsageError>([&] { run_with({}); }, "--data is required (see --help)");
  CHECK(run_with({"--data="}).empty());
  const Config file("data = \"x\"");
  CHECK(run_with({file.option().c_str()}) == "x");
}

TEST_CASE("options: arguments without a name", "[run]") {
  std::vector<std::string> files;
  const auto tool = [&] {
    Options o("tool", "Works.");
    o.arguments("RUN", files, "folders");
    return o;
  };
  Options one = tool(), none = tool();
  CHECK(parse(one, {"a", "b"}));
  CHECK(files == std::vector<std::string>{"a", "b"});
  CHECK(one.help().find("usage: tool [options] RUN...\n") != std::string::npos);
  expect_error<UsageError>([&] { static_cast<void>(parse(none, {})); }, "RUN is required (see --help)");
  // Where no option can stand in a file, there is none to give.
  CHECK(one.help().find("--config") == std::string::npos);
  expect_error<UsageError>(
      [&] {
        static_cast<void>(parse(none, {"--config=x", "a"}));
      },
      "unknown option --config (see --help)");

  // Single ones come first, in their order.
  std::string from, to;
  const auto mover = [&] {
    Options o("mv", "Moves.");
    o.argument("FROM", from, "a file").argument("TO", to, "another");
    return o;
  };
  Options two = mover(), few = mover(), many = mover();
  CHECK(parse(two, {"a", "b"}));
  CHECK(from + to == "ab");
  CHECK(two.help() ==
        "mv: Moves.\n\nusage: mv [options] FROM TO\n\n"
        "  FROM                        a file\n  TO                          another\n\n"
        "  --help                      print this text\n"
        "  --version                   print the version of shardlib, and what the program was built with\n");
  expect_error<UsageError>([&] { static_cast<void>(parse(few, {"a"})); }, "TO is required (see --help)");
  expect_error<UsageError>(
      [&] {
        static_cast<void>(parse(many, {"a", "b", "c"}));
      },
      "'c' is one argument too many: give FROM and TO alone (see --help)");
  Options both = mover();
  both.arguments("MORE", files, "more", false);
  CHECK(parse(both, {"a", "b"}));
  CHECK(files.empty());
  both = mover();
  both.arguments("MORE", files, "more");
  CHECK(parse(both, {"1", "2", "3", "4"}));
  CHECK((from == "1" && files == std::vector<std::string>{"3", "4"}));
}

TEST_CASE("options: the stored configuration gives itself", "[run]") {
  const std::vector<std::vector<const char*>> lines{
      {},
      {"--data=a # b", "--data=q\"uo\\te", "--seed=18446744073709551615", "--learning-rate=0.1",
       "--prompt=line\n\ttab \x01 \x7f \xc3\xa9 ' \"\"\"", "--preset=small", "--d-model=3", "--no-resume"},
      {"--learning-rate=1e-300", "--decay=0.30000000000000004", "--seed=9223372036854775808", "--preset=large"},
      {"--learning-rate=1e22", "--seed=9223372036854775807", "--steps=9223372036854775807"}};
  for (const auto& words : lines) {
    Settings first, second;
    Options a = declared(first), b = declared(second);
    CHECK(parse(a, words));
    const Config file(a.to_toml());
    CHECK(parse(b, {file.option().c_str()}));
    CHECK(b.to_toml() == a.to_toml());
    CHECK(second.data == first.data);
    CHECK(second.prompt == first.prompt);
    CHECK(second.seed == first.seed);
    CHECK(second.steps == first.steps);
    CHECK(second.learning_rate == first.learning_rate);
    CHECK(second.decay == first.decay);
    CHECK(second.resume == first.resume);
  }
  Settings s;
  Options o = declared(s);
  CHECK(parse(o, {"--preset=small", "--data=x", "-o", "y"}));
  CHECK(o.to_toml() == R"(preset = "small"
data = ["x"]
steps = 300
seed = 0

[model]
d_model = 128
tied = true

[optimizer]
learning_rate = 0.003
decay = 0.1
optimizer = "adam"

[run]
resume = true
prompt = "And God # said"
)");
  CHECK(o.describe() ==
        "--data                 [\"x\"]  (command line)\n"
        "--output               \"y\"  (command line)\n"
        "--d-model              128  (preset small)\n"
        "--tied                 true  (preset small)\n");
}

TEST_CASE("options: --help", "[run]") {
  Settings s;
  Options o = declared(s);
  CHECK_FALSE(parse(o, {"--steps=wrong", "--help"}));
  CHECK_FALSE(parse(o, {"-h"}));
  CHECK(o.answer() == o.help());
  CHECK_FALSE(parse(o, {"--version", "--steps=wrong"}));
  CHECK(o.answer().starts_with("trainer: shardlib " + shardlib::detail::version_text()));
  CHECK(o.answer().find(", with Kokkos ") != std::string::npos);
  CHECK(o.answer().ends_with(launcher_name() == "host" ? "; the host runs the kernels\n"
                                                       : "; " + std::string(launcher_name()) + " runs the kernels\n"));
  std::string turns = "User: {}\\n";
  Options other("sampler", "Samples.");
  other.add("--turns", turns, "a turn");
  CHECK(other.help().find(R"((default "User: {}\n"))") != std::string::npos);  // as it is typed, not as TOML has it
  CHECK(o.help(80) == R"(trainer: Trains.

usage: trainer [options]

  --data FILE                 texts
  --steps N                   training steps (default 300 steps; at least 1)
  --seed N                    of everything (default 0)
  -o, --output TEXT           the file
  --config FILE               TOML file of settings: keys are option names with
                              _ for -, sections are the groups below; of several
                              files the later one wins
  --preset NAME               a named set of settings, listed below
  --help                      print this text
  --version                   print the version of shardlib, and what the
                              program was built with

model:
  --d-model N                 width (default 256)
  --[no-]tied                 one embedding

optimizer:
  --learning-rate X           peak (default 0.003; above 0)
  --decay X                   of weights (default 0.1; from 0 to 1)
  --optimizer adam|sgd        which (default adam)

run:
  --[no-]resume               go on (default true)
  --prompt TEXT               of samples (default "And God # said")

presets:
  small                       for tests: d_model=128 tied=true
  large                       d_model=1024 steps=5000

The command line wins over --config, which wins over --preset.
)");
}

TEST_CASE("options: mistakes of the program", "[run]") {
  std::int64_t x = 0;
  expect_error([&] { Options("p", "").add("steps", x, ""); }, "Options: 'steps' must begin with --");
  expect_error([&] { Options("p", "").add("--x", x, "").add("--x", x, ""); }, "Options: --x is declared twice");
  expect_error([&] { Options("p", "").add("--help", x, ""); }, "Options: --help is declared twice");
  expect_error([&] { Options("p", "").add("-x,--x", x, "").add("-x,--y", x, ""); }, "Options: -x is declared twice");
  expect_error([&] { Options("p", "").add("--x-y", x, "").add("--x_y", x, ""); },
               "Options: --x_y and --x-y have the same key of a file, x_y");
  for (const char* name : {"--x=N", "--an x", "--", "---x"})
    expect_error([&] { Options("p", "").add(name, x, ""); },
                 "Options: '" + std::string(name) +
                     "' is not the name of an option: write letters, digits, - and _ after the --");
  expect_error([&] { Options("p", "").add("x,--x", x, ""); },
               "Options: 'x' is not the short name of --x: write one letter after a -, as in \"-n,--steps\"");
  std::string text = "third";
  expect_error([&] { Options("p", "").add("--x", x, "", run::at_least(1)); },
               "Options: the default of --x, 0, is not a whole number of at least 1");
  expect_error(
      [&] {
        Options("p", "").add("--x", text, "", run::one_of({"first", "second"}));
      },
      "Options: the default of --x, \"third\", is not one of first, second");
  Options o("p", "");
  o.preset("a", {{"y", "1"}});
  expect_error([&] { static_cast<void>(parse(o, {})); }, "Options: the preset a sets the unknown key 'y'");
  expect_error([&] { o.preset("a", {}); }, "Options: the preset a is declared twice");
}

TEST_CASE("options: configurations compared", "[run]") {
  const auto before = run::config_entries("a = 1\n[m]\nx = \"s\"\nl = [1, 2]\ngone = true\n", "f");
  const auto after = run::config_entries("a = 1\n[m]\nnew = 0.5\nx = \"t\"\nl = [1, 2]\n", "f");
  CHECK(before == std::vector<run::ConfigEntry>{{"a", "1"}, {"m.x", "\"s\""}, {"m.l", "[1, 2]"}, {"m.gone", "true"}});
  CHECK(run::config_changes(before, after) ==
        std::vector<std::string>{"m.x: \"s\" -> \"t\"", "m.gone: true -> (absent)", "m.new: (absent) -> 0.5"});
  CHECK(run::config_changes(before, before).empty());
}

TEST_CASE("options: the nearest name", "[run]") {
  const std::vector<std::string> names{"steps", "seed", "learning_rate"};
  CHECK(run::nearest("stpes", names) == "steps");
  CHECK(run::nearest("step", names) == "steps");
  CHECK(run::nearest("learning", names) == "learning_rate");
  CHECK(run::nearest("lerning_rate", names) == "learning_rate");
  CHECK(run::nearest("x", names).empty());
  CHECK(run::nearest("", names).empty());
  CHECK(run::nearest("banana", names).empty());
}

TEST_CASE("options: the presets of gpt_fsdp are seqax's configurations", "[run]") {
  struct Model {
    const char *name, *mesh, *batch, *d_model, *n_kv, *layers, *d_ff, *learning_rate, *steps, *warmup, *save_every;
  };
  for (const Model& m : std::vector<Model>{
           {"84m", "d=8,t=1", "64", "512", "8", "8", "4096", "3e-3", "26000", "2600", "2600"},
           {"270m", "d=8,t=1", "64", "1024", "16", "8", "8192", "3e-4", "92000", "9200", "9200"},
           {"540m", "d=8,t=1", "64", "2048", "16", "8", "8192", "3e-4", "185000", "18500", "4000"},
           {"1b", "d=8,t=1", "64", "2048", "16", "8", "16384", "1e-5", "370000", "37000", "10000"},
           {"2b", "d=8,t=1", "64", "4096", "16", "8", "16384", "1e-5", "740000", "74000", "10000"},
           {"540m-x4", "d=32,t=1", "256", "2048", "16", "16", "8192", "3e-4", "46250", "4625", "2500"},
           {"1b-x4", "d=32,t=1", "256", "2048", "16", "8", "16384", "1e-5", "92500", "9250", "2500"},
           {"2b-x4", "d=32,t=1", "256", "4096", "16", "8", "16384", "1e-5", "185000", "18500", "2500"}}) {
    std::map<std::string, std::string> expected{{"mesh", m.mesh},
                                                {"batch", m.batch},
                                                {"d_model", m.d_model},
                                                {"n_kv", m.n_kv},
                                                {"layers", m.layers},
                                                {"d_ff", m.d_ff},
                                                {"learning_rate", m.learning_rate},
                                                {"steps", m.steps},
                                                {"warmup", m.warmup},
                                                {"save_every", m.save_every},
                                                {"n_q_per_kv", "1"},
                                                {"d_head", "128"},
                                                {"vocabulary", "32768"},
                                                {"seq", "1024"},
                                                {"init", "seqax"},
                                                {"warmup_from", "0"}};
    std::map<std::string, std::string> values = expected;
    for (const char* other : {"decay_steps", "rope_base", "max_tokens"}) values[other] = expected[other] = "";
    Options o("test", "Tests.");
    for (auto& [key, value] : values) {
      value.clear();
      std::string name = "--" + key;
      std::replace(name.begin(), name.end(), '_', '-');
      o.add(name, value, "a setting");
    }
    declare_presets(o);
    CAPTURE(m.name);
    const std::string preset = std::string("--preset=") + m.name;
    CHECK(parse(o, {preset.c_str()}));
    CHECK(values == expected);
  }
}

TEST_CASE("options: those of the optimizer have a group of their own, and --gather is of the training", "[run]") {
  run::Training training;
  run::GatherPolicy gather;
  run::OptimizerOptions optimizer;
  std::int64_t d_model = 1;
  Options o("test", "Tests.");
  run::declare(o, training);
  o.group("model").add("--d-model", d_model, "width");
  run::declare(o, gather);
  run::declare(o, optimizer);
  const Config file(
      "[optimizer]\noptimizer = \"lion\"\nema = 0.5\nlr_mult = [\"a=2\"]\ndecay_mult = [\"b=3\"]\nfreeze = "
      "[\"c\"]\n[training]\ngather = \"per-step\"\n");
  CHECK(parse(o, {file.option().c_str()}));
  CHECK(optimizer.name == "lion");
  CHECK(optimizer.ema == 0.5);
  CHECK(optimizer.groups("a").rate == 2);
  CHECK(optimizer.groups("b").decay == 3);
  CHECK(optimizer.groups("c").rate == 0);
  CHECK(gather.name == "per-step");
}

TEST_CASE("options: the last pattern of a leaf counts, and a frozen one has no rate", "[run]") {
  run::ParameterGroups groups;
  Options o("test", "Tests.");
  run::declare(o, groups);
  CHECK(parse(o, {"--lr-mult=layers/*=0.5", "--lr-mult=layers/1/*=2", "--decay-mult=*/b=0", "--decay-mult=embed=3",
                  "--freeze=layers/2/*", "--lr-mult=layers/2/w=4"}));
  const auto is = [&](const char* leaf, double rate, double decay, bool decays = true) {
    const LeafFactors found = groups(leaf, decays);
    CAPTURE(leaf);
    CHECK(found.rate == rate);
    CHECK(found.decay == decay);
  };
  is("layers/0/w", 0.5, 1);
  is("layers/1/w", 2, 1);
  is("layers/1/b", 2, 0);
  is("layers/2/w", 0, 1);  // frozen, whatever its factor
  is("embed", 1, 3);
  is("norm", 1, 1);
  is("norm", 1, 0, false);   // the program's own rule
  is("embed", 1, 3, false);  // which an option overrides
}
