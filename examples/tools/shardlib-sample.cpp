// Samples from a training run: finds its trainer, its settings, its tokenizer and its newest checkpoint in its folder,
// which it only reads.
//
//   shardlib-sample runs/first --prompt "Once upon a time" --samples 3
#include <shardlib/io/file.hpp>
#include <shardlib/run/options.hpp>
#include <shardlib/support/error.hpp>

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

#include "run_tool.hpp"

using namespace shardlib;
namespace fs = std::filesystem;

// Options that the trainers read in training only.
constexpr std::string_view of_training =
    " --data --validation-data --stream --shuffle --steps --epochs --learning-rate --lr-schedule --warmup "
    "--warmup-from --decay-steps --decay-fraction --final-learning-rate --weight-decay --beta1 --beta2 "
    "--adam-epsilon --clip --resume --no-resume --save-every --keep --keep-every --keep-best --validate-every "
    "--validation-batches --metrics --on-spike --check-replicas --trace --tensorboard --histogram-every "
    "--sample-every ";

// The last command that has trained the run, and the folder in which it was given. Both are in run.json.
struct Command {
  std::vector<std::string> words;
  fs::path directory;
};
Command command_of(const std::string& run) {
  const std::string path = run + "/run.json";
  std::string why = "there is no such file";
  try {
    if (io::file_exists(path)) {
      const auto starts = nlohmann::json::parse(io::as_text(io::read_file(path)));
      why = "it lists no start";
      if (starts.is_array() && !starts.empty()) {
        const auto& start = starts.back();
        const Command command{start.at("command").get<std::vector<std::string>>(), start.value("directory", "")};
        if (!command.words.empty()) return command;
        why = "the command has no words";
      }
    }
  } catch (const nlohmann::json::exception&) {
    why = "it is not the run.json of a run";
  }
  throw UsageError(
      fmt::format("'{}' names no command that has trained the run ({}): call its trainer with --config "
                  "{}/config.toml --run {} --sample-only",
                  path, why, run, run));
}

// The path of --load in the command of a run of adapters, whose checkpoints do not hold these weights. Empty for other
// runs.
std::string base_weights(const Command& command, const std::string& config) {
  const auto entries = run::config_entries_of_file(config);
  if (std::ranges::none_of(entries, [](const auto& e) { return e.key.ends_with("lora") && e.value != "0"; })) return {};
  std::string path;
  for (std::size_t i = 0; i < command.words.size(); ++i) {
    if (command.words[i] == "--load" && i + 1 < command.words.size()) path = command.words[i + 1];
    if (command.words[i].starts_with("--load=")) path = command.words[i].substr(std::string_view("--load=").size());
  }
  if (path.empty()) return {};
  const fs::path whole = command.directory / path;
  if (fs::exists(whole)) return whole.string();
  throw UsageError(
      fmt::format("the run has trained adapters of the weights '{}', which are no longer there: give their "
                  "place by --load PATH",
                  whole.string()));
}

// The trainer in the folder of this tool, which has the same version. If there is none, the one that has trained.
std::string found(const fs::path& program) {
  const fs::path beside = fs::read_symlink("/proc/self/exe").parent_path() / program.filename();
  for (const fs::path& path : {beside, program})
    if (::access(path.c_str(), X_OK) == 0) return path.string();
  throw UsageError(
      fmt::format("the run's trainer '{}' is neither beside shardlib-sample nor at its former path: build "
                  "the examples",
                  program.string()));
}

// The path of a file with those settings of a run of gpt_pipeline that gpt_fsdp knows, because gpt_fsdp samples its
// GPT, also on one device. gpt_fsdp replaces this process and reads the file, which has no name and is gone when
// gpt_fsdp ends.
std::string without_pipeline(const std::string& config) {
  constexpr std::array<std::string_view, 5> others{"preset", "schedule", "stages", "stage_layers", "model"};
  std::string text;
  for (const run::ConfigEntry& entry : run::config_entries_of_file(config)) {
    const std::string_view key = std::string_view(entry.key).substr(entry.key.rfind('.') + 1);
    if (key == "model" && entry.value != "\"gpt\"")
      throw UsageError(fmt::format("'{}' is of a run whose model = {} has no text to sample", config, entry.value));
    if (std::ranges::find(others, key) == others.end()) text += fmt::format("{} = {}\n", entry.key, entry.value);
  }
  const int file = ::memfd_create("config.toml", 0);
  if (file < 0 || ::write(file, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
    throw Error(fmt::format("no memory for a copy of '{}': {}", config, std::strerror(errno)));
  return fmt::format("/proc/self/fd/{}", file);
}

// The mesh of the stored settings with one device: "p=2,d=4,t=2" becomes "d=1,t=1". Empty where there is none.
std::string one_device(const std::string& config) {
  for (const run::ConfigEntry& entry : run::config_entries_of_file(config)) {
    if (!entry.key.ends_with("mesh")) continue;
    const std::string mesh = std::regex_replace(entry.value, std::regex("=[0-9]+"), "=1");
    return std::regex_replace(mesh, std::regex("\"|p=1,"), "");
  }
  return {};
}

int program(int argc, char** argv) {
  const std::string usage =
      "shardlib-sample RUN [OPTION...]: prints texts of a run's newest checkpoint. It writes nothing.\n"
      "The options are those of the run's trainer; these are for sampling:\n"
      "  --prompt TEXT (-: the standard input) --max-tokens N --samples N --temperature X --top-k N --top-p X --stop "
      "TEXT --seed N\n"
      "  --chat: answers the lines of the standard input; /reset begins a new conversation, /quit ends\n"
      "  --turns 'User: {}\\nAssistant:': a turn of --chat, with {} for the message and \\n for a new line\n"
      "  --evaluate FILE.jsonl: multiple-choice questions\n"
      "  --mesh d=2,t=1: devices (default: one); --load PATH: for a run of adapters, the weights that they adapt\n"
      "  (default: where the run had them)\n";
  const std::vector<std::string> given(argv + 1, argv + argc);
  if (!given.empty() && (given[0] == "--help" || given[0] == "-h")) {
    fmt::print("{}", usage);
    return 0;
  }
  if (!given.empty() && given[0] == "--version") {
    fmt::print("{}", run::Options("shardlib-sample", "").version());
    return 0;
  }
  if (given.empty() || given[0].starts_with("-"))
    throw UsageError("give the folder of a run first: shardlib-sample RUN [OPTION...] (see --help)");
  const std::string run = given[0], config = run + "/config.toml";
  if (!io::file_exists(config))
    throw UsageError(
        fmt::format("'{}' is not a folder of a run: it has no config.toml; give the folder that --run made", run));
  const auto gives = [&](std::string_view option) {
    return std::ranges::any_of(given, [&](std::string_view word) {
      return word == option || (word.starts_with(option) && word.substr(option.size()).starts_with('='));
    });
  };
  for (const std::string& word : given)
    if (const std::string name = word.substr(0, word.find('='));
        of_training.find(" " + name + " ") != std::string::npos)
      throw UsageError(name + " has no effect on samples of a run: leave it out");
  if (gives("--chat") && gives("--prompt"))
    throw UsageError("--chat reads its messages from the standard input: leave --prompt out, or leave --chat out");
  const Command command = command_of(run);
  const fs::path trainer = command.directory / command.words[0];
  const bool pipeline = trainer.filename() == "gpt_pipeline";
  std::vector<std::string> words{found(pipeline ? fs::path(trainer).replace_filename("gpt_fsdp") : trainer),
                                 "--config",
                                 pipeline ? without_pipeline(config) : config,
                                 "--run",
                                 run,
                                 "--sample-only"};
  if (const std::string mesh = one_device(config); !mesh.empty()) words.insert(words.end(), {"--mesh", mesh});
  if (!gives("--load"))
    if (const std::string base = base_weights(command, config); !base.empty())
      words.insert(words.end(), {"--load", base});
  words.insert(words.end(), given.begin() + 1, given.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  ::execv(pointers[0], pointers.data());
  throw Error(fmt::format("cannot start '{}': {}; build the examples", words[0], std::strerror(errno)));
}

int main(int argc, char** argv) {
  return run_tool(argc, argv, program);
}
