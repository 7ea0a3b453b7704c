// Definitions of checkpoint.hpp.
#pragma once

#include "shardlib/io/checkpoint/checkpoint.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <list>
#include <new>
#include <set>
#include <span>

#include "shardlib/comm/collective_call.hpp"
#include "shardlib/device/mesh_axes.hpp"
#include "shardlib/io/agree.hpp"
#include "shardlib/io/box.hpp"
#include "shardlib/io/checkpoint/impl/load.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::io::detail {

/// Lists everything in which the tree and the checkpoint differ; throws if that is not empty.
inline void compare(const Checkpoint& checkpoint, const NamedValues& leaves, const std::set<std::string>& all_names,
                    bool ignore_extra) {
  std::vector<CheckpointArray> here;
  for (const auto& [name, value] : leaves) {
    const auto shape = shardlib::detail::view(value->global.logical);
    here.push_back({name, value->dtype, {shape.begin(), shape.end()}, {}});
    for (const auto& dim : value->spec->dims) here.back().dims.emplace_back(dim.name);
  }
  fail_unless_empty("the checkpoint '" + checkpoint.path() + "' does not fit this program:",
                    differences(checkpoint.arrays(), "the checkpoint", here, "the program", all_names, ignore_extra));
}

/// Reads this device's shard of an array; padding becomes zeros.
inline shardlib::detail::ValuePtr load_value(const Checkpoint& checkpoint, const std::string& name,
                                             const shardlib::detail::Value& like) {
  namespace core = shardlib::detail;
  const std::size_t item = size_of(like.dtype);
  const core::Shape part = core::true_shape(like);
  const Buffer buffer = like.device->host_pool()->allocate(like.bytes());
  Index offset, shape(part.begin(), part.end()), local(like.local.begin(), like.local.end());
  for (int i = 0; i < part.size(); ++i)
    offset.push_back(
        std::min(core::shard_index(*like.device, like.spec->dims[i].axes) * like.local[i], like.global.logical[i]));
  const std::span<std::byte> bytes(buffer.data(), buffer.bytes());
  if (shape == local) {
    checkpoint.read(name, offset, shape, bytes);
  } else {
    Bytes tight(static_cast<std::size_t>(volume(shape)) * item);
    checkpoint.read(name, offset, shape, tight);
    std::memset(bytes.data(), 0, bytes.size());
    copy_box(shape, item, tight.data(), row_major_strides(shape), bytes.data(), row_major_strides(local));
  }
  return with_buffer({"load", {}, {}}, like, like.device->to_device(buffer));
}

/// Every device checks its share of the files, and returns the damage that all devices have found. Opens the
/// checkpoint, unless it is. Throws Error if devices have read different manifests, StorageError if the storage refuses
/// to read the checkpoint, which then may be whole.
inline std::vector<std::string> damages_together(Device& device, const std::string& path,
                                                 std::optional<Checkpoint>& checkpoint) {
  std::string mine;
  std::exception_ptr refused;
  try {
    if (!checkpoint) checkpoint = Checkpoint::open(path);
    shardlib::detail::Fingerprint files;
    for (const ManifestFile& file : checkpoint->files()) files.add(file.path).add(file.bytes).add(file.crc32c);
    mine = std::to_string(files.value()) + "\n";
    for (const std::string& damage :
         checkpoint->damages(static_cast<std::size_t>(device.rank()), static_cast<std::size_t>(device.size())))
      mine += damage + "\n";
  } catch (const StorageError& e) {
    refused = std::make_exception_ptr(StorageError(refused_message(path, e)));
  } catch (const std::bad_alloc&) {
    refused = std::current_exception();
  } catch (const std::exception& e) {
    mine = '\0' + std::string(e.what());
  }
  agree(device, "", refused);
  const std::vector<std::string> all = gather_texts(device, mine);
  if (const auto unread = std::ranges::find_if(all, [](const auto& text) { return text.starts_with('\0'); });
      unread != all.end())
    return {*unread};
  const auto manifest = [](const std::string& text) { return text.substr(0, text.find('\n')); };
  for (std::size_t i = 1; i < all.size(); ++i)
    if (manifest(all[i]) != manifest(all[0]))
      throw Error(
          fmt::format("device {} reads another checkpoint under '{}' than device 0: give all of them the same "
                      "folder, on a file system that all nodes share",
                      i, path));
  std::vector<std::string> found;
  for (const std::string& text : all) {
    for (std::size_t begin = text.find('\n') + 1; begin < text.size();) {
      const std::size_t end = text.find('\n', begin);
      found.push_back(text.substr(begin, end - begin));
      begin = end + 1;
    }
  }
  return found;
}
/// The message for what damages_together has found.
inline std::string together_message(const std::string& path, const std::vector<std::string>& damages) {
  return damages.front()[0] == '\0' ? damages.front().substr(1) : damage_message(path, damages);
}

SHARDLIB_INLINE NamedValues named_values(const shardlib::detail::UntypedLeaves<const shardlib::detail::ValuePtr>& tree,
                                         const Rename& rename) {
  NamedValues leaves;
  for (const auto& leaf : tree.leaves) {
    std::string name = leaf.name.empty() ? "value" : leaf.name;
    std::replace(name.begin(), name.end(), '/', '.');
    leaves.emplace_back(rename ? rename(name) : name, *leaf.pointer);
  }
  return leaves;
}

SHARDLIB_INLINE std::vector<shardlib::detail::ValuePtr> load_values(const DevicePtr& device, const std::string& path,
                                                                    std::optional<Checkpoint>& checkpoint,
                                                                    const NamedValues& leaves,
                                                                    const LoadOptions& options) {
  const std::set<std::string> all_names =
      names_together(*device, leaves, [](const std::string& name, const auto&) { return std::vector{name}; });
  together(*device, "", [&] {
    if (!checkpoint) checkpoint = Checkpoint::open(path);
    compare(*checkpoint, leaves, all_names, options.ignore_extra);
  });
  if (options.verify)
    if (const auto damages = damages_together(*device, path, checkpoint); !damages.empty())
      throw Error(together_message(path, damages) + ": restore it, or go back to an older one");
  std::vector<shardlib::detail::ValuePtr> values;
  together(*device, "", [&] {
    for (const auto& [name, value] : leaves) values.push_back(load_value(*checkpoint, name, *value));
  });
  return values;
}

SHARDLIB_INLINE std::optional<Checkpoint> open_newest(Device& device, const std::string& directory, std::int64_t before,
                                                      bool read_only) {
  // One device lists the folder, so that all try the same checkpoints in the same order.
  std::string list;
  together(device, "", [&] {
    if (device.rank() != 0) return;
    for (const std::string& path : list_checkpoints(directory))
      if (*step_of(path.substr(path.rfind('/') + 1)) < before) list += path + '\0';  // no path has this character
  });
  list = gather_texts(device, list)[0];
  std::vector<std::string> damaged;
  for (std::size_t begin = 0; begin < list.size();) {
    const std::size_t end = list.find('\0', begin);
    const std::string path = list.substr(begin, end - begin);
    std::optional<Checkpoint> checkpoint;
    const auto damages = damages_together(device, path, checkpoint);
    if (damages.empty()) {
      // Damaged checkpoints would otherwise count among those to keep, and whole ones would be removed instead.
      if (device.rank() == 0 && !read_only)
        std::ranges::for_each(damaged, [](const std::string& p) { set_aside(p, "damaged"); });
      return checkpoint;
    }
    if (device.rank() == 0) warn_damaged(together_message(path, damages));
    damaged.push_back(path);
    begin = end + 1;
  }
  if (!damaged.empty()) fail_none_whole(directory, damaged.size());
  return std::nullopt;
}

}  // namespace shardlib::io::detail

namespace shardlib::io {

SHARDLIB_INLINE void save_arrays(const std::string& directory, const CheckpointMeta& meta,
                                 const std::vector<ArrayToSave>& arrays) {
  namespace core = shardlib::detail;
  // A mesh of one device, on which each array is one shard.
  const auto device = DevicePtr::make(std::vector<AxisSize>{}, 0);
  std::list<TensorSpec> specs;  // values point to their specs
  detail::NamedValues leaves;
  for (const auto& [about, fill] : arrays) {
    if (about.shape.size() > static_cast<std::size_t>(max_dims))
      throw UsageError("'" + about.name + "' has " + std::to_string(about.shape.size()) +
                       " dims, but a tensor has at most " + std::to_string(max_dims) + ": merge some, or leave it out");
    TensorSpec& spec = specs.emplace_back();
    core::GlobalSizes sizes;
    for (std::size_t i = 0; i < about.shape.size(); ++i) {
      Dim dim;
      dim.name = about.dims.at(i);
      spec.dims.push_back(dim);
      sizes.push_back(about.shape[i]);
    }
    const auto value = core::make_value({"save_arrays", {}, {}}, device, about.dtype, spec, sizes);
    value->storage->buffer = core::allocate(*value);
    fill({value->storage->buffer.data(), value->storage->buffer.bytes()});
    leaves.emplace_back(about.name, value);
  }
  detail::CheckpointWriter writer(device, directory, {});
  writer.start(meta, leaves, false);
  writer.finish();
}

}  // namespace shardlib::io
