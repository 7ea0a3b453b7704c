// shardlib-checkpoint COMMAND: looks at checkpoints, checks them, and converts them to and from safetensors.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <shardlib/io/formats/safetensors_tree.hpp>
#include <shardlib/device/launch.hpp>
#include <shardlib/run/options.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

using namespace shardlib;

namespace {

std::string show_bytes(std::uint64_t bytes) {
  constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(units); ++unit) value /= 1024;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

std::uint64_t array_bytes(const io::Checkpoint& checkpoint) {
  std::uint64_t bytes = 0;
  for (const io::CheckpointArray& array : checkpoint.arrays()) bytes += array.bytes();
  return bytes;
}

/// The first file whose size is not the manifest's, or "".
std::string wrong_size(const io::Checkpoint& checkpoint) {
  for (const io::ManifestFile& file : checkpoint.files()) {
    std::error_code missing;
    const auto bytes = std::filesystem::file_size(checkpoint.path() + "/" + file.path, missing);
    if (missing || bytes != file.bytes) return file.path;
  }
  return "";
}

/// One line a checkpoint, in the order in which a run would resume from them. Metadata and sizes only: `verify` reads
/// the rest.
int list(const std::string& directory) {
  if (!io::file_exists(directory)) throw UsageError("there is no directory '" + directory + "'");
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
      fmt::print("{}  step {:>8}  {:>4} arrays  {:>10}\n", name, checkpoint.meta().step, checkpoint.arrays().size(),
                 show_bytes(array_bytes(checkpoint)));
    } catch (const Error& e) {
      fmt::print("{}  DAMAGED: {}\n", name, e.what());
      ++damaged;
    }
  }
  if (!first.empty()) fmt::print("a run resumes from {} (sizes are right, checksums not verified)\n", first);
  return damaged == 0 ? 0 : 1;
}

/// The arrays as the tree that they come from: a line for each, under the parts of their names.
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
  fmt::print("{} arrays, {} elements, {}\n", checkpoint.arrays().size(), elements, show_bytes(array_bytes(checkpoint)));
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
      throw Error(fmt::format("checkpoint '{}' has {} of {} leaves with values that are not finite: all checksums agree, "
                              "but its training had diverged; go back to an older one",
                              path, leaves.size(), checkpoint.arrays().size()));
    }
    fmt::print("{} is whole: {} files, {}, all checksums agree\n", path, checkpoint.files().size(), show_bytes(bytes));
    return 0;
  }
  throw Error(
      fmt::format("checkpoint '{}' is damaged: {} of {} files", path, damages.size(), checkpoint.files().size()));
}

int to_safetensors(const std::string& path, const std::string& file, const std::string& prefix) {
  const io::Checkpoint checkpoint = io::Checkpoint::open(path);
  if (const auto damages = checkpoint.damages(); !damages.empty())
    throw Error(io::detail::damage_message(path, damages));
  const auto chosen = [&](const std::string& name) { return name.starts_with(prefix); };
  const auto count = std::ranges::count_if(checkpoint.arrays(), chosen, &io::CheckpointArray::name);
  if (count == 0) throw UsageError("checkpoint '" + path + "' has no array whose name begins with '" + prefix + "'");
  io::export_safetensors(checkpoint, file, [&](const std::string& name) {
    return chosen(name) ? io::StoredLeaf{name.substr(prefix.size())} : io::StoredLeaf{};
  });
  fmt::print("wrote {} ({} tensors)\n", file, count);
  return 0;
}

int from_safetensors(const std::string& path, const std::string& directory, std::int64_t step) {
  const io::SafetensorsFile file(path);
  const std::string made = directory + "/" + io::checkpoint_name(step);
  if (io::file_exists(made)) throw UsageError("'" + made + "' already exists: choose another --step or directory");
  io::import_safetensors(file, directory, step);
  fmt::print("wrote {} ({} arrays)\n", made, file.entries().size());
  for (const std::string& leaf : io::Checkpoint::open(made).not_finite())
    fmt::print(stderr, "warning: {} in '{}'\n", leaf, path);
  return 0;
}

struct Arguments {
  std::string path, target, prefix;
  std::int64_t step = 0;
};

/// One command of the tool: declares its arguments, and gives what is to run once they have their values.
struct Command {
  const char* name;
  const char* purpose;
  std::function<int()> (*declare)(run::Options&, Arguments&);
};

const Command commands[] = {
    {"list", "The checkpoints of a directory, the first to resume from first.",
     [](run::Options& o, Arguments& a) -> std::function<int()> {
       o.argument("DIR", a.path, "a run's directory of checkpoints");
       return [&a] { return list(a.path); };
     }},
    {"inspect", "The tree of arrays: dtype, shape, dims, size; and the metadata.",
     [](run::Options& o, Arguments& a) -> std::function<int()> {
       o.argument("CKPT", a.path, "one checkpoint, as in runs/a/checkpoints/step-00000100");
       return [&a] { return inspect(a.path); };
     }},
    {"verify", "Reads every file, compares its checksum, and looks for values that are not finite.",
     [](run::Options& o, Arguments& a) -> std::function<int()> {
       o.argument("CKPT", a.path, "one checkpoint");
       return [&a] { return verify(a.path); };
     }},
    {"to-safetensors", "Writes the arrays into one safetensors file, under the same names.",
     [](run::Options& o, Arguments& a) -> std::function<int()> {
       o.argument("CKPT", a.path, "one checkpoint, which is verified first");
       o.argument("FILE", a.target, "the file to write");
       o.add("--prefix", a.prefix, "write only arrays whose names begin with this, and remove it (weights.)",
             run::command_line_only());
       return [&a] { return to_safetensors(a.path, a.target, a.prefix); };
     }},
    {"from-safetensors", "Makes a checkpoint of a safetensors file; F16 becomes f32.",
     [](run::Options& o, Arguments& a) -> std::function<int()> {
       o.argument("FILE", a.path, "the file to read");
       o.argument("DIR", a.target, "the directory in which the checkpoint is made");
       o.add("--step", a.step, "the checkpoint's step", run::at_least(0) | run::command_line_only());
       return [&a] { return from_safetensors(a.path, a.target, a.step); };
     }}};

int tool(int argc, char** argv) {
  const std::string word = argc > 1 ? argv[1] : "";
  if (word == "--help" || word == "-h") {
    fmt::print(
        "shardlib-checkpoint: looks at checkpoints, checks them, and converts them to and from safetensors.\n\n"
        "usage: shardlib-checkpoint COMMAND ...\n\n");
    for (const Command& command : commands) fmt::print("  {:<18}{}\n", command.name, command.purpose);
    fmt::print(
        "\nshardlib-checkpoint COMMAND --help says more.\n"
        "Exit status: 0 if all is well, 1 for a damaged checkpoint or file, 2 for a wrong request.\n");
    return 0;
  }
  std::vector<std::string> names;
  for (const Command& command : commands) {
    names.emplace_back(command.name);
    if (word != command.name) continue;
    Arguments arguments;
    run::Options options("shardlib-checkpoint " + word, command.purpose);
    const auto run = command.declare(options, arguments);
    if (options.parse(argc - 1, argv + 1)) return run();
    fmt::print("{}", options.answer());
    return 0;
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
