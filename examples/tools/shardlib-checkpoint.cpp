// shardlib-checkpoint COMMAND: lists, verifies, prunes and averages checkpoints, and converts them to and from
// safetensors and seqax's format.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <shardlib/device/launch.hpp>
#include <shardlib/io/formats/safetensors_tree.hpp>
#include <shardlib/run/options.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint_average.hpp"
#include "checkpoint_files.hpp"
#include "checkpoint_prune.hpp"
#include "checkpoint_seqax.hpp"

using namespace shardlib;

namespace {

std::uint64_t array_bytes(const io::Checkpoint& checkpoint) {
  std::uint64_t bytes = 0;
  for (const io::CheckpointArray& array : checkpoint.arrays()) bytes += array.bytes();
  return bytes;
}

/// One line a checkpoint, in the order in which a run would resume from them. Metadata and sizes only: `verify` reads
/// the rest.
int list(const std::string& run_or_directory) {
  const std::string directory = directory_of(run_or_directory);
  const std::vector<std::string> paths = io::list_checkpoints(directory);
  if (paths.empty()) fmt::print("no checkpoints in {}\n", directory);
  int damaged = 0;
  std::string first;
  for (const std::string& path : paths) {
    const std::string name = path.substr(path.rfind('/') + 1);
    try {
      const io::Checkpoint checkpoint = io::Checkpoint::open(path);
      if (const std::string file = wrong_size(checkpoint); !file.empty())
        throw Error(fmt::format("'{}' is missing or of another size than the manifest says", file));
      if (first.empty()) first = name;
      fmt::print("{}  step {:>8}  {:>4} leaves  {:>10}\n", name, checkpoint.meta().step, checkpoint.arrays().size(),
                 show_bytes(array_bytes(checkpoint)));
    } catch (const Error& e) {
      fmt::print("{}  DAMAGED: {}\n", name, e.what());
      ++damaged;
    }
  }
  if (!first.empty()) fmt::print("a run resumes from {} (sizes are right, checksums not verified)\n", first);
  return damaged == 0 ? 0 : 1;
}

/// The leaves as the tree that they come from: a line for each, under the parts of their names.
void print_tree(const io::Checkpoint& checkpoint) {
  std::vector<std::string> above;
  std::int64_t elements = 0;
  for (const io::CheckpointArray& array : checkpoint.arrays()) {
    std::vector<std::string> parts{""};
    for (const char c : array.name) {
      if (c == '.')
        parts.emplace_back();
      else
        parts.back() += c;
    }
    std::size_t same = 0;
    while (same + 1 < parts.size() && same < above.size() && above[same] == parts[same]) ++same;
    for (std::size_t i = same; i + 1 < parts.size(); ++i) fmt::print("{:{}}{}\n", "", 2 + 2 * i, parts[i]);
    above.assign(parts.begin(), parts.end() - 1);
    std::string dims, shape;
    for (std::size_t i = 0; i < array.shape.size(); ++i) {
      if (i < array.dims.size()) dims += (i > 0 ? " " : "") + array.dims[i];
      shape += (i > 0 ? " x " : "") + std::to_string(array.shape[i]);
    }
    elements += io::volume(array.shape);
    const std::string name = fmt::format("{:{}}{}", "", 2 * parts.size(), parts.back());
    fmt::print("{:<32} {:<5} {:<24} {:<16} {:>10}\n", name, shardlib::name(array.dtype),
               shape.empty() ? "scalar" : shape, dims, show_bytes(array.bytes()));
  }
  fmt::print("{}, {}, {}\n", counted_leaves(checkpoint.arrays().size()), counted(elements, "element"),
             show_bytes(array_bytes(checkpoint)));
}

int inspect(const std::string& path) {
  const io::Checkpoint checkpoint = io::Checkpoint::open(path);
  const io::CheckpointMeta& meta = checkpoint.meta();
  fmt::print("{}\nstep       {}\ndata hash  {}\n", path, meta.step, meta.data_hash.empty() ? "(none)" : meta.data_hash);
  for (const auto& [key, value] : meta.user) fmt::print("{}: {}\n", key, value);
  print_tree(checkpoint);
  return 0;
}

int verify(const std::string& path) {
  const io::Checkpoint checkpoint = io::Checkpoint::open(path);
  const std::vector<std::string> damages = checkpoint.damages();
  std::uint64_t bytes = 0;
  for (const io::ManifestFile& file : checkpoint.files()) bytes += file.bytes;
  for (const std::string& damage : damages) fmt::print("{}\n", damage);
  if (damages.empty()) {
    if (const std::vector<std::string> leaves = checkpoint.not_finite(); !leaves.empty()) {
      for (const std::string& leaf : leaves) fmt::print("{}\n", leaf);
      throw Error(
          fmt::format("checkpoint '{}' has {} of {} leaves with values that are not finite: all checksums agree, "
                      "but its training had diverged; go back to an older one",
                      path, leaves.size(), checkpoint.arrays().size()));
    }
    fmt::print("{} is whole: {}, {}, all checksums agree\n", path, counted(checkpoint.files().size(), "file"),
               show_bytes(bytes));
    return 0;
  }
  throw Error(fmt::format("checkpoint '{}' is damaged: {} of {}", path, damages.size(),
                          counted(checkpoint.files().size(), "file")));
}

int to_safetensors(const std::string& path, const std::string& file, const std::string& prefix) {
  const io::Checkpoint checkpoint = open_verified(path);
  const auto chosen = [&](const std::string& name) { return name.starts_with(prefix); };
  const auto count = std::ranges::count_if(checkpoint.arrays(), chosen, &io::CheckpointArray::name);
  if (count == 0) throw UsageError("checkpoint '" + path + "' has no leaf whose name begins with '" + prefix + "'");
  io::export_safetensors(checkpoint, file, [&](const std::string& name) {
    return chosen(name) ? io::StoredLeaf{without_prefix(name, prefix)} : io::StoredLeaf{};
  });
  fmt::print("wrote {} ({})\n", file, counted(count, "tensor"));
  return 0;
}

int from_safetensors(const std::string& path, const std::string& directory, std::int64_t step) {
  const io::SafetensorsFile file(path);
  const std::string made = directory + "/" + io::checkpoint_name(step);
  require_place(directory);
  require_new(made);
  if (io::file_exists(directory + "/../config.toml")) require_latest(directory, step);  // the folder of a run
  io::import_safetensors(file, directory, step);
  fmt::print("wrote {} ({})\n", made, counted_leaves(file.entries().size()));
  for (const std::string& leaf : io::Checkpoint::open(made).not_finite())
    fmt::print(stderr, "warning: {} in '{}'\n", leaf, path);
  return 0;
}

struct Arguments {
  std::string path, target, prefix;
  std::int64_t step = 0;
  std::int64_t step_or_same = -1;  ///< -1: that of what is read
  AverageRequest average = {};
  PruneRequest prune = {};
};

/// One command of the tool: declares its arguments, and gives what is to run once they have their values.
struct Command {
  const char* name;
  const char* purpose;
  std::function<int()> (*declare)(run::Options&, Arguments&);
};

const Command commands[] = {
    {"list", "Prints the checkpoints of a folder, beginning with the one from which a run resumes.",
     [](run::Options& o, Arguments& a) -> std::function<int()> {
       o.argument("DIR", a.path, "the folder of a run, or of its checkpoints");
       return [&a] { return list(a.path); };
     }},
    {"inspect", "Prints the leaves, with dtype, shape, dims and size, and the metadata.",
     [](run::Options& o, Arguments& a) -> std::function<int()> {
       o.argument("CKPT", a.path, "one checkpoint, as in runs/a/checkpoints/step-00000100");
       return [&a] { return inspect(a.path); };
     }},
    {"verify", "Reads every file, compares its checksum, and looks for values that are not finite.",
     [](run::Options& o, Arguments& a) -> std::function<int()> {
       o.argument("CKPT", a.path, "one checkpoint");
       return [&a] { return verify(a.path); };
     }},
    {"to-safetensors", "Writes the leaves into one safetensors file, under the same names.",
     [](run::Options& o, Arguments& a) -> std::function<int()> {
       o.argument("CKPT", a.path, "one checkpoint, which is verified first");
       o.argument("FILE", a.target, "the file to write");
       o.add("--prefix", a.prefix,
             "write only leaves whose names begin with this, and leave it out of their names, as in weights.",
             run::command_line_only());
       return [&a] { return to_safetensors(a.path, a.target, a.prefix); };
     }},
    {"from-safetensors", "Converts a safetensors file to a checkpoint; F16 becomes f32.",
     [](run::Options& o, Arguments& a) -> std::function<int()> {
       o.argument("FILE", a.path, "the file to read");
       o.argument("DIR", a.target, "the folder in which the checkpoint is made");
       o.add("--step", a.step, "the checkpoint's step", run::at_least(0) | run::command_line_only());
       return [&a] { return from_safetensors(a.path, a.target, a.step); };
     }},
    {"average",
     "Writes the mean of the weights of several checkpoints of one model as a new checkpoint or a safetensors file. "
     "Sums are f64. Leaves outside of --prefix (moments of the optimizer), the settings and the step are those of the "
     "newest of the checkpoints, bit for bit, so that a program can load the average; a validation loss is left out. "
     "A safetensors file has the averaged leaves alone, without the prefix. Each checkpoint is verified first.",
     [](run::Options& o, Arguments& a) -> std::function<int()> {
       o.argument("TARGET", a.average.target,
                  "a file that ends in .safetensors, or the folder in which the checkpoint is made");
       o.arguments("CKPT", a.average.paths, "the checkpoints, two or more");
       o.add("--prefix", a.average.prefix, "average the leaves whose names begin with this ('' for all)",
             run::command_line_only());
       o.add("--step", a.average.step, "the new checkpoint's step (-1: that of the newest)",
             run::at_least(-1) | run::command_line_only());
       return [&a] { return average(a.average); };
     }},
    {"prune",
     "Removes old complete checkpoints. The checkpoint from which a run resumes is read and verified first, and always "
     "stays. Damaged checkpoints and those of later steps stay too, and do not count. A checkpoint is renamed to "
     "step-00000100.old-pruned before its files are removed: if the command is stopped, the next prune or the next "
     "save removes the rest, and other checkpoints are complete.",
     [](run::Options& o, Arguments& a) -> std::function<int()> {
       o.argument("DIR", a.prune.directory, "the folder of a run, or of its checkpoints");
       o.add("--keep", a.prune.keep, "number of newest checkpoints that stay",
             run::at_least(1) | run::required() | run::command_line_only());
       o.add("--every", a.prune.every, "also keep checkpoints whose step is a multiple of this (0: none)",
             run::at_least(0) | run::command_line_only());
       o.add("--best", a.prune.best, "also keep this many checkpoints with the lowest validation loss",
             run::at_least(0) | run::command_line_only());
       o.flag("--dry-run", a.prune.dry_run, "print what would be removed, and remove nothing",
              run::command_line_only());
       return [&a] { return prune(a.prune); };
     }},
    {"to-seqax",
     "Converts a checkpoint of gpt_fsdp --init seqax to seqax's format: zarr arrays of stacked layers, weights and "
     "moments.",
     [](run::Options& o, Arguments& a) -> std::function<int()> {
       o.argument("CKPT", a.path, "one checkpoint, which is verified first");
       o.argument("DIR", a.target, "seqax's folder of the model, in which the folder 0000000100 is made");
       o.add("--step", a.step_or_same, "the step in its name (-1: the checkpoint's)",
             run::at_least(-1) | run::command_line_only());
       return [&a] { return seqax::to_seqax(a.path, a.target, a.step_or_same); };
     }},
    {"from-seqax", "Converts a checkpoint of seqax, with its moments, to one of gpt_fsdp --init seqax.",
     [](run::Options& o, Arguments& a) -> std::function<int()> {
       o.argument("PATH", a.path, "one checkpoint of seqax, as in models/a/0000000100");
       o.argument("DIR", a.target, "the folder in which the checkpoint is made, as in runs/a/checkpoints");
       o.add("--step", a.step_or_same, "the checkpoint's step (-1: that of PATH's name)",
             run::at_least(-1) | run::command_line_only());
       return [&a] { return seqax::from_seqax(a.path, a.target, a.step_or_same); };
     }}};

std::string_view first_sentence(std::string_view text) {
  const std::size_t end = text.find(". ");
  return end == std::string_view::npos ? text : text.substr(0, end + 1);
}

int tool(int argc, char** argv) {
  const std::string word = argc > 1 ? argv[1] : "";
  if (word == "--help" || word == "-h") {
    fmt::print(
        "shardlib-checkpoint: lists, verifies, prunes and averages checkpoints, and converts them to and from "
        "safetensors and seqax's format.\n\n"
        "usage: shardlib-checkpoint COMMAND ...\n\n");
    for (const Command& command : commands) fmt::print("  {:<18}{}\n", command.name, first_sentence(command.purpose));
    fmt::print(
        "\nshardlib-checkpoint COMMAND --help prints the options of a command.\n"
        "Exit status: 0 for success, 1 for a damaged checkpoint or file, 2 for a wrong request.\n");
    return 0;
  }
  if (word == "--version") {
    fmt::print("{}", run::Options("shardlib-checkpoint", "").version());
    return 0;
  }
  std::vector<std::string> names;
  for (const Command& command : commands) {
    names.emplace_back(command.name);
    if (word != command.name) continue;
    Arguments arguments;
    run::Options options("shardlib-checkpoint " + word, command.purpose);
    const auto run = command.declare(options, arguments);
    return options.parse(argc - 1, argv + 1) ? run() : 0;
  }
  if (word.empty()) throw UsageError(fmt::format("give a command: {} (see --help)", fmt::join(names, ", ")));
  const std::string near = run::nearest(word, names);
  throw UsageError(
      fmt::format("unknown command '{}'; {} (see --help)", word,
                  near.empty() ? fmt::format("there are {}", fmt::join(names, ", ")) : "did you mean " + near + "?"));
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] { return tool(argc, argv); });
}
