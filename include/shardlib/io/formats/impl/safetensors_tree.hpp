// Definitions of safetensors_tree.hpp.
#pragma once

#include "shardlib/io/formats/safetensors_tree.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "shardlib/io/agree.hpp"
#include "shardlib/io/box.hpp"
#include "shardlib/io/checkpoint/impl/load.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::io {
namespace detail {

/// The positions of a leaf's elements in its stored tensor.
struct StoredPlace {
  Index shape;    ///< of the stored tensor
  Index strides;  ///< of the leaf's dims, in its own order, in elements
  std::int64_t first = 0;
};

/// Whether each index of the leaf's first dim has a stored tensor of its own.
inline bool is_stored_apart(const StoredLeaf& stored) {
  return stored.name.find('*') != std::string::npos;
}
inline std::string name_of_index(const StoredLeaf& stored, std::int64_t index) {
  return std::string(stored.name).replace(stored.name.find('*'), 1, std::to_string(index));
}
/// The stored tensors of a leaf of this shape; a leaf that is not in the file has one with an empty name.
inline std::vector<std::string> stored_names(const StoredLeaf& stored, std::span<const std::int64_t> shape) {
  if (!is_stored_apart(stored)) return {stored.name};
  std::vector<std::string> names;
  for (std::int64_t i = 0; !shape.empty() && i < shape[0]; ++i) names.push_back(name_of_index(stored, i));
  return names;
}

/// Where the leaf is in its stored tensor, or in each of them. Throws UsageError if the table's entry makes no sense
/// for a leaf of this shape.
inline StoredPlace place_of(const std::string& leaf, const StoredLeaf& stored, std::span<const std::int64_t> shape) {
  const auto fail = [&, whole = shape](const std::string& why) {
    throw UsageError("the table's entry for the leaf '" + leaf + "' of " + show_shape(whole) + ": " + why);
  };
  if (is_stored_apart(stored)) {
    if (shape.empty()) fail("the * in '" + stored.name + "' is the index of a first dim, and the leaf has no dim");
    shape = shape.subspan(1);
  }
  const std::size_t rank = shape.size();
  std::vector<int> order = stored.order, merge = stored.merge;
  if (order.empty()) {
    order.resize(rank);
    std::iota(order.begin(), order.end(), 0);
  }
  std::vector<int> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 0; i < std::max(rank, sorted.size()); ++i)
    if (sorted.size() != rank || sorted[i] != static_cast<int>(i)) fail("`order` must name each dim once");
  if (merge.empty()) merge.assign(rank, 1);
  if (std::accumulate(merge.begin(), merge.end(), 0) != static_cast<int>(rank) ||
      std::any_of(merge.begin(), merge.end(), [](int n) { return n < 1; }))
    fail("`merge` must share out all dims");
  const bool parted = stored.parts != 1;
  if (stored.parts < 1 || stored.part < 0 || stored.part >= stored.parts ||
      (parted && (stored.along < 0 || stored.along >= static_cast<int>(merge.size()))))
    fail("there is no part " + std::to_string(stored.part) + " of " + std::to_string(stored.parts) + " along dim " +
         std::to_string(stored.along));
  StoredPlace place;
  place.strides.resize(rank);
  std::vector<std::size_t> first_dim;  // of each stored dim, in `order`
  std::size_t next = 0;
  for (std::size_t g = 0; g < merge.size(); ++g) {
    first_dim.push_back(next);
    std::int64_t size = parted && static_cast<int>(g) == stored.along ? stored.parts : 1;
    for (int k = 0; k < merge[g]; ++k) size *= shape[static_cast<std::size_t>(order[next++])];
    place.shape.push_back(size);
  }
  const Index stored_strides = row_major_strides(place.shape);
  for (std::size_t g = 0; g < merge.size(); ++g) {
    std::int64_t stride = stored_strides[g];
    for (std::size_t i = first_dim[g] + static_cast<std::size_t>(merge[g]); i-- > first_dim[g];) {
      place.strides[static_cast<std::size_t>(order[i])] = stride;
      stride *= shape[static_cast<std::size_t>(order[i])];
    }
  }
  if (parted) {
    const auto along = static_cast<std::size_t>(stored.along);
    place.first = stored.part * (place.shape[along] / stored.parts) * stored_strides[along];
  }
  return place;
}

/// Reads a device's shard of a stored tensor into memory of the shard's shape. The stored tensor has the leaf's dims
/// from `from_dim` on. Padding is not written.
inline void load_stored_tensor(const SafetensorsFiles& files, const std::string& name, const StoredPlace& place,
                               const shardlib::detail::Value& like, int from_dim, std::byte* out) {
  namespace core = shardlib::detail;
  const SafetensorsFiles::Found found = files.find(name);
  const SafetensorsEntry& entry = *found.entry;
  const core::Shape shape = core::true_shape(like);
  const Index part(shape.begin() + from_dim, shape.end()), local(like.local.begin() + from_dim, like.local.end());
  // Reads in the file's order of dims, which is contiguous, then sorts into the leaf's order.
  std::vector<std::size_t> order(part.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::pair(-place.strides[a], a) < std::pair(-place.strides[b], b);
  });
  std::int64_t first = place.first;
  Index box, from_strides, to_strides;
  const Index local_strides = row_major_strides(local);
  for (const std::size_t i : order) {
    box.push_back(part[i]);
    from_strides.push_back(place.strides[i]);
    to_strides.push_back(local_strides[i]);
    const auto& axes = like.spec->dims[from_dim + static_cast<int>(i)].axes;
    first += core::shard_index(*like.device, axes) * local[i] * place.strides[i];
  }
  Bytes values = volume(box) == 0 ? Bytes{} : read_strided(*found.file, entry, first, from_strides, box);
  if (like.dtype == DType::f32 && entry.dtype != "F32") {
    Bytes wide(static_cast<std::size_t>(volume(box)) * sizeof(float));
    to_f32(entry.dtype, values, {reinterpret_cast<float*>(wide.data()), wide.size() / sizeof(float)}, name);
    values = std::move(wide);
  }
  copy_box(box, size_of(like.dtype), values.data(), row_major_strides(box), out, to_strides);
}

/// This device's shard of a leaf; padding becomes zeros.
inline shardlib::detail::ValuePtr load_shard(const SafetensorsFiles& files, const StoredLeaf& stored,
                                             const std::string& leaf, const shardlib::detail::Value& like) {
  namespace core = shardlib::detail;
  const StoredPlace place = place_of(leaf, stored, core::view(like.global.logical));
  const core::Shape part = core::true_shape(like);
  const Buffer buffer = like.device->host_pool()->allocate(like.bytes());
  if (buffer.bytes() > 0 && !std::equal(part.begin(), part.end(), like.local.begin()))
    std::memset(buffer.data(), 0, buffer.bytes());
  if (!is_stored_apart(stored)) {
    load_stored_tensor(files, stored.name, place, like, 0, buffer.data());
  } else {
    const std::int64_t first = core::shard_index(*like.device, like.spec->dims[0].axes) * like.local[0];
    const std::size_t bytes = like.local[0] == 0 ? 0 : like.bytes() / static_cast<std::size_t>(like.local[0]);
    for (std::int64_t i = 0; i < part[0]; ++i)
      load_stored_tensor(files, name_of_index(stored, first + i), place, like, 1,
                         buffer.data() + static_cast<std::size_t>(i) * bytes);
  }
  return with_buffer({"load", {}, {}}, like, like.device->to_device(buffer));
}

/// Lists everything in which the tree and the file differ; throws if that is not empty.
inline void compare(const SafetensorsFiles& files, const NamedValues& leaves, const std::set<std::string>& used,
                    const StoredTable& table, const SafetensorsOptions& options) {
  std::vector<std::string> wrong;
  std::set<std::string> left;
  for (const SafetensorsFile& file : files.files())
    for (const SafetensorsEntry& entry : file.entries())
      if (!used.contains(entry.name)) left.insert(entry.name);
  const std::string whole = files.is_folder() ? "the folder" : "the file";
  for (const auto& [name, value] : leaves) {
    const StoredLeaf stored = table(name);
    if (stored.name.empty()) continue;
    const auto shape = shardlib::detail::view(value->global.logical);
    const StoredPlace place = place_of(name, stored, shape);
    for (const std::string& tensor : stored_names(stored, shape)) {
      const auto [file, entry] = files.find(tensor);
      const std::string what = "'" + tensor + "' (leaf '" + name + "') ";
      if (entry == nullptr) {
        wrong.push_back(what + "is not in " + whole + did_you_mean(tensor, left));
        continue;
      }
      const std::string there = files.is_folder() ? "'" + file->path() + "'" : whole;
      if (entry->shape != place.shape)
        wrong.push_back(what + "is " + show_shape(entry->shape) + " in " + there + ", but " + show_shape(place.shape) +
                        " in the program");
      const bool to_single = value->dtype == DType::f32 && (entry->dtype == "F16" || entry->dtype == "BF16");
      if (entry->dtype != safetensors_dtype(value->dtype) && !to_single)
        wrong.push_back(what + "is " + entry->dtype + " in " + there + ", but " +
                        std::string(shardlib::name(value->dtype)) + " in the program");
    }
  }
  for (const std::string& name : left)
    if (!options.may_be_left || !options.may_be_left(name))
      wrong.push_back("'" + name + "' is in " + whole + ", but not in the program");
  fail_unless_empty(whole + " '" + files.path() + "' does not fit this program:", wrong);
}

SHARDLIB_INLINE std::vector<shardlib::detail::ValuePtr> load_stored(const DevicePtr& device, const std::string& path,
                                                                    const NamedValues& leaves, const StoredTable& table,
                                                                    const SafetensorsOptions& options) {
  // Pipeline stages hold different leaves: what any of them uses is not left over.
  const std::set<std::string> used =
      names_together(*device, leaves, [&](const std::string& leaf, const shardlib::detail::Value& value) {
        return stored_names(table(leaf), shardlib::detail::view(value.global.logical));
      });
  std::vector<shardlib::detail::ValuePtr> values;
  together(*device, "", [&] {
    const SafetensorsFiles files(path);
    compare(files, leaves, used, table, options);
    for (const auto& [name, value] : leaves) {
      const StoredLeaf stored = table(name);
      values.push_back(stored.name.empty() ? value : load_shard(files, stored, name, *value));
    }
  });
  return values;
}

/// A leaf of a checkpoint, or one index of its first dim, which is a stored tensor or a part of one.
struct StoredPiece {
  const CheckpointArray* array;
  StoredLeaf stored;
  StoredPlace place;
  std::optional<std::int64_t> index;
};

/// Copies a piece from the checkpoint to its place in the stored tensor.
inline void read_piece(const Checkpoint& checkpoint, const StoredPiece& piece, std::span<std::byte> whole) {
  Index first(piece.array->shape.size(), 0), shape = piece.array->shape, strides = piece.place.strides;
  if (piece.index) {
    first[0] = *piece.index;
    shape[0] = 1;
    strides.insert(strides.begin(), 0);
  }
  const std::size_t item = size_of(piece.array->dtype);
  Bytes values(static_cast<std::size_t>(volume(shape)) * item);
  checkpoint.read(piece.array->name, first, shape, values);
  copy_box(shape, item, values.data(), row_major_strides(shape),
           whole.data() + static_cast<std::size_t>(piece.place.first) * item, strides);
}

/// The stored tensors of a checkpoint, which must outlive the result.
inline std::vector<SafetensorsTensor> stored_tensors(const Checkpoint& checkpoint, const StoredTable& table) {
  using Piece = StoredPiece;
  std::map<std::string, std::vector<Piece>> by_name;
  for (const CheckpointArray& array : checkpoint.arrays()) {
    const StoredLeaf stored = table(array.name);
    if (stored.name.empty()) continue;
    const StoredPlace place = place_of(array.name, stored, array.shape);
    const auto names = stored_names(stored, array.shape);
    for (std::size_t i = 0; i < names.size(); ++i)
      by_name[names[i]].push_back(
          {&array, stored, place,
           is_stored_apart(stored) ? std::optional(static_cast<std::int64_t>(i)) : std::nullopt});
  }
  std::vector<SafetensorsTensor> tensors;
  for (const auto& [name, pieces] : by_name) {
    const Piece& one = pieces.front();
    std::set<int> parts;
    for (const Piece& piece : pieces) {
      if (piece.place.shape != one.place.shape || piece.array->dtype != one.array->dtype ||
          piece.stored.parts != one.stored.parts || !parts.insert(piece.stored.part).second)
        throw UsageError("the table's parts of '" + name + "' do not fit together: '" + one.array->name + "' and '" +
                         piece.array->name + "'");
    }
    if (static_cast<int>(pieces.size()) != one.stored.parts)
      throw UsageError("the table gives " + std::to_string(pieces.size()) + " of the " +
                       std::to_string(one.stored.parts) + " parts of '" + name + "'");
    const auto bytes = [&checkpoint, pieces = pieces] {
      const Piece& any = pieces.front();
      Bytes whole(static_cast<std::size_t>(volume(any.place.shape)) * size_of(any.array->dtype));
      for (const Piece& piece : pieces) read_piece(checkpoint, piece, whole);
      return whole;
    };
    tensors.push_back({name, safetensors_dtype(one.array->dtype), one.place.shape, bytes});
  }
  return tensors;
}

}  // namespace detail

SHARDLIB_INLINE StoredTable table_of(std::map<std::string, StoredLeaf> leaves) {
  return [leaves = std::move(leaves)](const std::string& leaf) -> StoredLeaf {
    std::string name, number;  // the leaf's with * for its first number, and that
    for (std::size_t begin = leaf.starts_with("weights.") ? 8 : 0, end = 0; end != std::string::npos; begin = end + 1) {
      end = leaf.find('.', begin);
      std::string part = leaf.substr(begin, end - begin);
      if (number.empty() && part.find_first_not_of("0123456789") == std::string::npos)
        number = std::exchange(part, "*");
      name += (name.empty() ? "" : ".") + part;
    }
    const auto found = leaves.find(name);
    if (found == leaves.end()) return {};
    StoredLeaf stored = found->second;
    const std::size_t star = number.empty() ? std::string::npos : stored.name.find('*');
    if (star != std::string::npos) stored.name.replace(star, 1, number);
    return stored;
  };
}

SHARDLIB_INLINE std::map<std::string, std::string> safetensors_metadata(const CheckpointMeta& meta) {
  std::map<std::string, std::string> about = meta.user;
  about["step"] = std::to_string(meta.step);
  about["data_hash"] = meta.data_hash;
  about["format"] = "pt";  // what Hugging Face's loaders look for: tensors as PyTorch lays them out
  return about;
}

SHARDLIB_INLINE void export_safetensors(const Checkpoint& checkpoint, const std::string& path,
                                        const StoredTable& table) {
  write_safetensors(path, detail::stored_tensors(checkpoint, table), safetensors_metadata(checkpoint.meta()));
}

SHARDLIB_INLINE void export_safetensors_folder(const Checkpoint& checkpoint, const std::string& folder,
                                               const StoredTable& table, std::uint64_t most_bytes) {
  write_safetensors_folder(folder, detail::stored_tensors(checkpoint, table), safetensors_metadata(checkpoint.meta()),
                           most_bytes);
}

SHARDLIB_INLINE void import_safetensors(const SafetensorsFile& file, const std::string& directory, std::int64_t step) {
  std::vector<ArrayToSave> arrays;
  for (const SafetensorsEntry& entry : file.entries()) {
    const std::string where = "'" + file.path() + "': tensor '" + entry.name + "'";
    std::optional<DType> dtype;
    for (const DType d : {DType::f32, DType::bf16, DType::f64, DType::i32, DType::u32, DType::u8, DType::bool_})
      if (safetensors_dtype(d) == entry.dtype) dtype = d;
    const bool half = entry.dtype == "F16";
    if (half) dtype = DType::f32;
    if (!dtype) throw UsageError(where + ": checkpoints have no dtype " + entry.dtype);
    ArrayToSave& array = arrays.emplace_back();
    array.about = {entry.name, *dtype, entry.shape, {}};
    for (std::size_t i = 0; i < entry.shape.size(); ++i) array.about.dims.push_back("dim_" + std::to_string(i));
    array.fill = [&file, &entry, half](std::span<std::byte> out) {
      if (!half) return file.read_bytes(entry, 0, out);
      file.read_f32(entry, Index(entry.shape.size(), 0), entry.shape,
                    {reinterpret_cast<float*>(out.data()), out.size() / sizeof(float)});
    };
  }
  CheckpointMeta meta;
  meta.step = step;
  meta.user = file.metadata();
  save_arrays(directory, meta, arrays);
}

}  // namespace shardlib::io
