// shardlib-checkpoint to-seqax and from-seqax: checkpoints of gpt_fsdp --init seqax as seqax has them, and back.
// seqax's format is a zarr v2 group with an array for each leaf of its training state, in which layers are stacked; the
// group's attribute write_completed says that it is complete.
#pragma once

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <shardlib/io/box.hpp>
#include <shardlib/io/checkpoint/checkpoint.hpp>
#include <shardlib/io/formats/zarr.hpp>
#include <shardlib/io/impl/temporary.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "checkpoint_files.hpp"

namespace seqax {

/// A leaf of seqax's model, and the leaves of gpt_fsdp's model that it joins, in order, with their dims.
struct Leaf {
  const char* name;                   ///< follows the name of the tree, with nothing between them (jax's keystr)
  std::vector<const char*> ours;      ///< after the tree's; * is the number of the layer
  std::vector<std::string> our_dims;  ///< as in gpt_model.hpp
};
inline const std::vector<Leaf>& leaves() {
  static const std::vector<Leaf> all{{"embed", {"embed"}, {"V", "M"}},
                                     {"unembed", {"unembed.0"}, {"V", "M"}},
                                     {"transformerln1", {"layers.*.norm1"}, {"M"}},
                                     {"transformerln2", {"layers.*.norm2"}, {"M"}},
                                     {"transformerw_q", {"layers.*.w_q"}, {"M", "Q", "K", "D"}},
                                     {"transformerw_kv", {"layers.*.w_k", "layers.*.w_v"}, {"M", "K", "D"}},
                                     {"transformerw_o", {"layers.*.w_o"}, {"M", "Q", "K", "D"}},
                                     {"transformerw_gate", {"layers.*.w_gate"}, {"M", "F"}},
                                     {"transformerw_up", {"layers.*.w_up"}, {"M", "F"}},
                                     {"transformerw_down", {"layers.*.w_down"}, {"M", "F"}},
                                     {"final_layer_norm", {"final_norm"}, {"M"}}};
  return all;
}
/// The trees of a training state: seqax's name and gpt_fsdp's.
inline constexpr std::pair<const char*, const char*> trees[] = {
    {"weights", "weights."}, {"adam_mu", "mu."}, {"adam_nu", "nu."}};

/// An array of a checkpoint of seqax, which is these leaves of gpt_fsdp's one after the other.
struct Stack {
  std::string name;
  std::vector<std::string> ours;
  std::vector<std::string> our_dims;
  io::Index front;  ///< the dims before those of a leaf: layers, and 2 for keys and values
};
inline std::vector<Stack> stacks(std::int64_t layers) {
  std::vector<Stack> all;
  for (const auto& [theirs, ours] : trees)
    for (const Leaf& leaf : leaves()) {
      Stack& stack = all.emplace_back(Stack{std::string(theirs) + leaf.name, {}, leaf.our_dims, {}});
      const bool layered = std::string_view(leaf.ours[0]).starts_with("layers.");
      if (layered) stack.front.push_back(layers);
      if (leaf.ours.size() > 1) stack.front.push_back(std::ssize(leaf.ours));
      for (std::int64_t i = 0; i < (layered ? layers : 1); ++i)
        for (std::string name : leaf.ours) {
          if (layered) name.replace(name.find('*'), 1, std::to_string(i));
          stack.ours.push_back(ours + name);
        }
    }
  return all;
}

/// Takes the sizes of an array into `sizes`, or says why it does not fit the arrays before it.
inline std::string take_sizes(std::map<std::string, std::int64_t>& sizes, const std::vector<std::string>& dims,
                              std::span<const std::int64_t> shape) {
  if (shape.size() != dims.size()) return fmt::format("has {} dims instead of {}", shape.size(), dims.size());
  for (std::size_t i = 0; i < dims.size(); ++i)
    if (const auto [known, fresh] = sizes.emplace(dims[i], shape[i]); known->second != shape[i])
      return fmt::format("has {} for {}, which is {} in other arrays", shape[i], dims[i], known->second);
  return "";
}

/// The lines of seqax's configuration, and the options of gpt_fsdp, for a model of these sizes.
inline void print_model(const std::map<std::string, std::int64_t>& sizes, std::int64_t layers) {
  fmt::print("the model: layers {}, d_model {}, n_q_per_kv {}, n_kv {}, d_head {}, d_ff {}, vocabulary {}\n", layers,
             sizes.at("M"), sizes.at("Q"), sizes.at("K"), sizes.at("D"), sizes.at("F"), sizes.at("V"));
}

/// Removes a folder that was not completed.
struct Unfinished {
  std::string folder;
  ~Unfinished() {
    std::error_code ignored;
    if (!folder.empty()) std::filesystem::remove_all(folder, ignored);
  }
};

/// Throws UsageError if the settings of the run that saved are those of a model that seqax does not have.
inline void require_seqax(const io::Checkpoint& checkpoint) {
  const auto& user = checkpoint.meta().user;
  const auto setting = [&](const std::string& name, const std::string& otherwise) {
    const auto found = user.find("setting." + name);
    return found == user.end() ? otherwise : found->second;
  };
  const std::string what = fmt::format("checkpoint '{}'", checkpoint.path());
  if (const std::string init = setting("init", "\"depth-scaled\""); init != "\"seqax\"")
    throw UsageError(
        fmt::format("{} is of a run with --init {}: gpt_fsdp then scales attention's scores by 1/sqrt(d_head), and "
                    "seqax does not; the "
                    "moments have no exact counterpart, so convert checkpoints of runs with --init seqax",
                    what, init.substr(1, init.size() - 2)));
  if (const std::string optimizer = setting("optimizer", "\"adamw\""); optimizer != "\"adamw\"")
    throw UsageError(
        fmt::format("{} is of a run with --optimizer {}, but seqax has Adam's moments alone: convert "
                    "checkpoints of runs with --optimizer adamw",
                    what, optimizer.substr(1, optimizer.size() - 2)));
  if (const std::string ema = setting("ema", "0.0"); std::strtod(ema.c_str(), nullptr) != 0)
    throw UsageError(
        fmt::format("{} is of a run with --ema {}, but seqax keeps no average: convert checkpoints of runs "
                    "without it",
                    what, ema));
  for (const auto& [name, value] : {std::pair("norm_epsilon", 1e-6), std::pair("rope_factor", 1.0)})
    if (const std::string text = setting(name, fmt::format("{}", value)); std::strtod(text.c_str(), nullptr) != value)
      throw UsageError(
          fmt::format("{} has the setting {} = {}, but seqax computes with {} alone: it has no option for "
                      "another value",
                      what, name, text, value));
}

/// The sizes of the dims of the checkpoint's leaves, which must be those of the arrays.
inline std::map<std::string, std::int64_t> sizes_of(const io::Checkpoint& checkpoint, const std::vector<Stack>& all) {
  const auto fail = [&](const std::string& leaf, const std::string& why) {
    throw UsageError(
        fmt::format("checkpoint '{}': the leaf '{}' {}; to-seqax takes checkpoints of gpt_fsdp --init seqax",
                    checkpoint.path(), leaf, why));
  };
  if (checkpoint.find("weights.layers.0.norm1") == nullptr) fail("weights.layers.0.norm1", "is missing");
  std::set<std::string> used;
  std::map<std::string, std::int64_t> sizes;
  for (const Stack& stack : all)
    for (const std::string& leaf : stack.ours) {
      const io::CheckpointArray* const array = checkpoint.find(leaf);
      if (array == nullptr)
        fail(leaf,
             leaf.ends_with("unembed.0") ? "is missing (--tied), and seqax does not tie embeddings" : "is missing");
      if (array->dtype != DType::f32) fail(leaf, fmt::format("is {}, and seqax's are f32", name(array->dtype)));
      if (const std::string why = take_sizes(sizes, stack.our_dims, array->shape); !why.empty()) fail(leaf, why);
      used.insert(leaf);
    }
  for (const io::CheckpointArray& array : checkpoint.arrays())
    if (!used.contains(array.name)) fail(array.name, "has no place in seqax's model");
  return sizes;
}

/// Writes an array of seqax into a folder. A chunk is one of our leaves.
inline void write_stack(const io::Checkpoint& checkpoint, const std::string& folder, const Stack& stack,
                        const std::map<std::string, std::int64_t>& sizes) {
  io::ZarrInfo info;
  io::Index shape;
  for (const std::string& dim : stack.our_dims) shape.push_back(sizes.at(dim));
  info.shape = stack.front;
  info.shape.insert(info.shape.end(), shape.begin(), shape.end());
  info.chunks.assign(stack.front.size(), 1);
  for (const std::int64_t size : shape) info.chunks.push_back(std::max<std::int64_t>(size, 1));
  info.compressor.id = "";
  info.fill_value = "null";
  const io::ZarrArray array = io::ZarrArray::create(folder + "/" + stack.name, info);
  io::Index place(stack.front.size(), 0);
  io::Bytes bytes(static_cast<std::size_t>(io::volume(shape)) * sizeof(float));
  for (const std::string& leaf : stack.ours) {
    checkpoint.read(leaf, io::Index(shape.size(), 0), shape, bytes);
    io::Index chunk = place;
    chunk.resize(info.shape.size(), 0);
    array.write_chunk_bytes(chunk, bytes);
    io::next_place(place, stack.front);
  }
}

inline int to_seqax(const std::string& path, const std::string& directory, std::int64_t step_asked) {
  const io::Checkpoint checkpoint = open_verified(path);
  require_seqax(checkpoint);
  std::int64_t layers = 0;
  while (checkpoint.find(fmt::format("weights.layers.{}.norm1", layers)) != nullptr) ++layers;
  const std::vector<Stack> all = stacks(layers);
  const std::map<std::string, std::int64_t> sizes = sizes_of(checkpoint, all);

  const std::int64_t step = step_asked >= 0 ? step_asked : checkpoint.meta().step;
  const std::string made = fmt::format("{}/{:010}", directory, step);  // ten digits, as seqax's step_to_str
  require_new(made);
  io::make_folders(directory);
  io::remove_stale_temporaries(directory);
  Unfinished temporary{io::detail::temporary_name(made)};
  io::make_new_folder(temporary.folder);
  const io::ZarrGroup group = io::ZarrGroup::create(temporary.folder);
  for (const Stack& stack : all) write_stack(checkpoint, temporary.folder, stack, sizes);
  group.set_attributes({{"write_completed", true}});
  for (const auto& entry : std::filesystem::recursive_directory_iterator(temporary.folder))
    io::sync_path(entry.path().string());
  io::sync_path(temporary.folder);
  io::rename_path(temporary.folder, made);
  temporary.folder.clear();
  io::sync_path(directory);
  fmt::print("wrote {} ({})\n", made, counted(all.size(), "array"));
  print_model(sizes, layers);
  if (const auto base = checkpoint.meta().user.find("setting.rope_base"); base != checkpoint.meta().user.end())
    fmt::print("rope_max_timescale is {}: give it in seqax's configuration, because its checkpoints do not hold it\n",
               base->second);
  return 0;
}

/// The step in the name of seqax's folder, "0000000100".
inline std::optional<std::int64_t> step_of(const std::string& name) {
  if (name.empty() || name.size() > 18 || name.find_first_not_of("0123456789") != std::string::npos)
    return std::nullopt;
  return std::stoll(name);
}

/// Throws UsageError if the path is no group, which says what to give.
inline void require_group(const std::string& path) {
  if (!io::file_exists(path)) throw UsageError("there is no folder '" + path + "'");
  if (io::file_exists(path + "/.zgroup")) return;
  std::string newest;
  std::error_code error;
  for (std::filesystem::directory_iterator it(path, error), end; !error && it != end; it.increment(error))
    if (const std::string name = it->path().filename().string(); step_of(name) && name > newest) newest = name;
  throw UsageError(
      fmt::format("'{}' is not a checkpoint of seqax: it has no .zgroup{}", path,
                  newest.empty() ? "" : fmt::format("; give one of the checkpoints in it, '{}/{}'", path, newest)));
}

/// Adds the leaves of this shape that stand in an array of seqax one after the other.
inline void add_leaves(std::vector<io::ArrayToSave>& leaves, const Stack& stack, const io::ZarrArray& array,
                       const io::Index& shape) {
  io::Index place(stack.front.size(), 0);
  for (const std::string& leaf : stack.ours) {
    io::Index offset = place, box(stack.front.size(), 1);
    offset.resize(array.info().shape.size(), 0);
    box.insert(box.end(), shape.begin(), shape.end());
    leaves.push_back({{leaf, DType::f32, shape, stack.our_dims},
                      [array, offset, box](std::span<std::byte> out) { array.read_bytes(offset, box, out); }});
    io::next_place(place, stack.front);
  }
}

inline int from_seqax(const std::string& path, const std::string& directory, std::int64_t step_asked) {
  require_group(path);
  const io::ZarrGroup group = io::ZarrGroup::open(path);
  if (!group.attributes().contains("write_completed"))
    throw Error(
        fmt::format("'{}' is not complete: its .zattrs have no write_completed, and seqax does not load it either; "
                    "give an earlier checkpoint",
                    path));
  const std::optional<std::int64_t> step = step_asked >= 0 ? std::optional(step_asked) : step_of(base_name(path));
  if (!step)
    throw UsageError(
        fmt::format("'{}': the name is not a step, as in 0000000100: give the number of updates as --step", path));
  const auto fail = [&](const std::string& name, const std::string& why) {
    throw UsageError(
        fmt::format("'{}': the array '{}' {}; from-seqax takes checkpoints of seqax's State: weights, adam_mu "
                    "and adam_nu of its Model",
                    path, name, why));
  };
  const auto open = [&](const std::string& name) {
    if (!group.has_array(name)) fail(name, "is missing");
    io::ZarrArray array = group.array(name, {.missing_is_error = true});
    if (array.info().dtype != "<f4") fail(name, "has the dtype " + array.info().dtype + " instead of <f4");
    return array;
  };
  const io::ZarrArray norms = open("weightstransformerln1");
  if (norms.info().shape.size() != 2) fail("weightstransformerln1", "has not 2 dims");
  const std::int64_t layers = norms.info().shape[0];
  if (layers < 1 || layers > 1'000'000) fail("weightstransformerln1", fmt::format("is of {} layers", layers));
  std::map<std::string, std::int64_t> sizes;
  std::set<std::string> used;
  std::vector<io::ArrayToSave> arrays;
  for (const Stack& stack : stacks(layers)) {
    const io::ZarrArray array = open(stack.name);
    used.insert(stack.name);
    const io::Index& shape = array.info().shape;
    const auto front = std::ssize(stack.front);
    if (std::ssize(shape) < front || !std::equal(stack.front.begin(), stack.front.end(), shape.begin()))
      fail(stack.name, fmt::format("is {} and does not begin with {}", io::detail::show_shape(shape),
                                   io::detail::show_shape(stack.front)));
    const io::Index ours(shape.begin() + front, shape.end());
    if (const std::string why = take_sizes(sizes, stack.our_dims, ours); !why.empty()) fail(stack.name, why);
    add_leaves(arrays, stack, array, ours);
  }
  for (const std::string& name : group.arrays())
    if (!used.contains(name)) fail(name, "has no place in gpt_fsdp's model");
  const std::string made = directory + "/" + io::checkpoint_name(*step);
  require_place(directory);
  require_new(made);
  require_latest(directory, *step);
  io::CheckpointMeta meta;
  meta.step = *step;
  meta.user["setting.init"] = "\"seqax\"";  // as TOML, like the settings of runs
  io::save_arrays(directory, meta, arrays);
  fmt::print("wrote {} ({})\n", made, counted_leaves(arrays.size()));
  print_model(sizes, layers);
  fmt::print(
      "give gpt_fsdp these sizes, --init seqax, and rope_max_timescale of seqax's configuration as --rope-base\n");
  for (const std::string& leaf : io::Checkpoint::open(made).not_finite())
    fmt::print(stderr, "warning: {} in '{}'\n", leaf, path);
  return 0;
}

}  // namespace seqax
