// Definitions of folder.hpp.
#pragma once

#include "shardlib/io/checkpoint/folder.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <set>
#include <system_error>

#include "shardlib/io/checkpoint/impl/finite.hpp"
#include "shardlib/io/checkpoint/impl/open_checkpoint.hpp"
#include "shardlib/io/formats/impl/zarr_json.hpp"
#include "shardlib/io/formats/zarr.hpp"
#include "shardlib/io/impl/json.hpp"
#include "shardlib/io/impl/temporary.hpp"
#include "shardlib/support/crc32c.hpp"
#include "shardlib/support/text.hpp"
#include "shardlib/support/warning.hpp"

namespace shardlib::io {
namespace detail {

SHARDLIB_INLINE ManifestFile describe_file(const std::string& folder, const std::string& path) {
  const InputFile file(folder + "/" + path);
  ManifestFile entry{path, file.size(), 0};
  Bytes piece(static_cast<std::size_t>(std::min<std::uint64_t>(file.size(), 1U << 22)));
  for (std::uint64_t at = 0; at < file.size(); at += piece.size()) {
    const std::span<std::byte> part(piece.data(),
                                    static_cast<std::size_t>(std::min<std::uint64_t>(piece.size(), file.size() - at)));
    file.read(at, part);
    entry.crc32c = crc32c(part, entry.crc32c);
  }
  return entry;
}

SHARDLIB_INLINE void write_manifest(const std::string& folder, std::vector<ManifestFile> files) {
  std::sort(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
  std::string rest = " \"format\": " + json(checkpoint_format).dump() +
                     ",\n \"version\": " + std::to_string(checkpoint_version) + ",\n \"files\": {\n";
  for (std::size_t i = 0; i < files.size(); ++i)
    rest += "  " + json(files[i].path).dump() + ": {\"bytes\": " + std::to_string(files[i].bytes) + ", \"crc32c\": \"" +
            hex(files[i].crc32c) + "\"}" + (i + 1 < files.size() ? ",\n" : "\n");
  rest += " }\n}\n";
  const std::string text =
      std::string(manifest_start) + hex(crc32c(as_bytes(rest))) + std::string(manifest_break) + rest;
  replace_file(folder + "/manifest.json", as_bytes(text), true);
}

SHARDLIB_INLINE std::string zarr_dtype_of(DType dtype) {
  constexpr const char* names[] = {"<f4", "<u2", "<f8", "<i4", "<u4", "|u1", "|b1"};
  return names[static_cast<std::size_t>(dtype)];
}

SHARDLIB_INLINE std::string damage_message(const std::string& path, const std::vector<std::string>& damages) {
  std::string message = "checkpoint '" + path + "' is damaged: ";
  for (std::size_t i = 0; i < damages.size() && i < 5; ++i) message += (i > 0 ? "; " : "") + damages[i];
  if (damages.size() > 5) message += "; and " + std::to_string(damages.size() - 5) + " more files";
  return message;
}
SHARDLIB_INLINE std::string refused_message(const std::string& path, const StorageError& error) {
  return std::string(error.what()) + ": start again when it can be read, or move '" + path +
         "' away to go back to an older checkpoint";
}
SHARDLIB_INLINE void warn_damaged(const std::string& message) {
  shardlib::detail::warn(message + "; going back to an older one");
}
SHARDLIB_INLINE void set_aside(const std::string& path, const std::string& what) {
  const std::string aside = path + "." + what;
  try {
    replace_folder(path, aside);
    shardlib::detail::warn("the " + what + " checkpoint is now '" + aside + "': look at it, or remove it");
  } catch (const Error& e) {  // a reader may lack the right to rename
    shardlib::detail::warn("the " + what + " checkpoint still counts among those kept: " + e.what());
  }
}
SHARDLIB_INLINE void fail_none_whole(const std::string& directory, std::size_t count) {
  throw Error("none of the " + std::to_string(count) + " checkpoints in '" + directory +
              "' is whole: restore one, or start afresh in another folder");
}

SHARDLIB_INLINE std::vector<std::string> write_metadata(const std::string& folder, const CheckpointMeta& meta,
                                                        const std::vector<StoredArray>& arrays) {
  const ZarrGroup group = ZarrGroup::create(folder);
  json attributes = {{"format", checkpoint_format},
                     {"version", checkpoint_version},
                     {"step", meta.step},
                     {"data_hash", meta.data_hash},
                     {"user", meta.user}};
  if (meta.validation_loss && std::isfinite(*meta.validation_loss))
    attributes["validation_loss"] = *meta.validation_loss;
  group.set_attributes(attributes);
  std::vector<std::string> files{".zgroup", ".zattrs"};
  for (const auto& [a, chunks, leaves] : arrays) {
    ZarrInfo info;
    info.shape = a.shape;
    info.chunks = chunks;
    info.dtype = zarr_dtype_of(a.dtype);
    if (a.dtype == DType::bool_) info.fill_value = "false";
    const ZarrArray array = ZarrArray::create(folder + "/" + a.name, info);
    json about = {{"_ARRAY_DIMENSIONS", a.dims}};  // xarray's name for them
    if (a.dtype == DType::bf16) about["dtype"] = "bfloat16";
    if (!leaves.empty()) about["leaves"] = leaves;
    array.set_attributes(about);
    files.push_back(a.name + "/.zarray");
    files.push_back(a.name + "/.zattrs");
  }
  return files;
}

/// The step of a checkpoint's folder, or nothing for other names.
SHARDLIB_INLINE std::optional<std::int64_t> step_of(std::string_view name) {
  constexpr std::string_view prefix = "step-";
  std::int64_t step = 0;
  const bool read = name.starts_with(prefix) && shardlib::detail::parse_number(name.substr(prefix.size()), step);
  return read && step >= 0 && checkpoint_name(step) == name ? std::optional(step) : std::nullopt;
}

inline std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator it(directory, error), end; !error && it != end; it.increment(error))
    names.push_back(it->path().filename().string());
  if (error && error != std::errc::no_such_file_or_directory)
    throw StorageError("cannot list the folder '" + directory + "': " + error.message());
  return names;
}

inline CheckpointMeta read_meta(const std::string& path) {
  const json all = read_attributes(path);
  const auto fail = [&](const std::string& key) {
    throw Error("'" + path + "/.zattrs': key \"" + key + "\" is missing or of a wrong type");
  };
  CheckpointMeta meta;
  if (!all.contains("step") || !all["step"].is_number_integer()) fail("step");
  meta.step = all["step"].get<std::int64_t>();
  if (!all.contains("data_hash") || !all["data_hash"].is_string()) fail("data_hash");
  meta.data_hash = all["data_hash"].get<std::string>();
  if (!all.contains("user") || !all["user"].is_object()) fail("user");
  for (const auto& [key, value] : all["user"].items()) {
    if (!value.is_string()) fail("user");
    meta.user[key] = value.get<std::string>();
  }
  if (const auto loss = all.find("validation_loss"); loss != all.end()) {
    if (!loss->is_number()) fail("validation_loss");
    meta.validation_loss = loss->get<double>();
  }
  return meta;
}

/// The steps of the `count` checkpoints with the lowest validation losses, among the steps before and this one. If
/// losses are equal, the newest.
inline std::set<std::int64_t> best_checkpoints(const std::string& directory, std::vector<std::int64_t> steps,
                                               std::int64_t step, std::size_t count) {
  steps.push_back(step);
  std::set<std::int64_t> best;
  std::vector<std::pair<double, std::int64_t>> losses;
  for (const std::int64_t other : count == 0 ? std::vector<std::int64_t>() : steps) {
    try {
      const auto loss = read_meta(directory + "/" + checkpoint_name(other)).validation_loss;
      if (loss && std::isfinite(*loss)) losses.emplace_back(*loss, -other);
    } catch (const StorageError&) {  // it may be one of them
      best.insert(other);
    } catch (const Error&) {  // a damaged one is not the best
    }
  }
  std::sort(losses.begin(), losses.end());
  losses.resize(std::min(losses.size(), count));
  for (const auto& [loss, negative] : losses) best.insert(-negative);
  return best;
}

SHARDLIB_INLINE std::vector<std::int64_t> not_kept(const std::string& directory, std::vector<std::int64_t> before,
                                                   std::int64_t step, const Retention& keep) {
  const auto newest = static_cast<std::size_t>(std::max(keep.newest, 1));
  if (keep.newest < 1 || before.size() < newest) return {};
  std::sort(before.begin(), before.end(), std::greater<>());
  const std::set<std::int64_t> best = best_checkpoints(directory, before, step, static_cast<std::size_t>(keep.best));
  std::vector<std::int64_t> steps(before.begin() + static_cast<std::ptrdiff_t>(newest) - 1, before.end());
  std::erase_if(steps, [&](std::int64_t s) { return best.contains(s) || (keep.every > 0 && s % keep.every == 0); });
  return steps;
}

SHARDLIB_INLINE std::vector<std::string> half_removed(const std::string& directory) {
  std::vector<std::string> paths;
  for (const std::string& name : names_in(directory)) {
    const bool left = name.starts_with("step-") &&
                      (name.find(".tmp-") != std::string::npos || name.find(".old-") != std::string::npos);
    if (left && !owner_of(name)) paths.push_back(directory + "/" + name);
  }
  return paths;
}

SHARDLIB_INLINE void remove_checkpoint(const std::string& path) {
  // Renamed first, so that one half removed is not taken for a damaged one, and on the disk before files go.
  const std::string dying = path + ".old-pruned";
  rename_path(path, dying);
  sync_path(std::filesystem::path(path).parent_path().string());
  remove_folder(dying);
}

SHARDLIB_INLINE void prune_checkpoints(const std::string& directory, std::int64_t step, const Retention& keep) {
  // The checkpoint is complete, and the next save tries again.
  const auto or_warn = [](const std::string& path, const auto& remove) {
    try {
      remove(path);
    } catch (const Error& e) {
      shardlib::detail::warn("'" + path + "' is not needed any more, but was not removed: " + e.what() +
                             "; the next save tries again");
    }
  };
  remove_stale_temporaries(directory);
  for (const std::string& path : half_removed(directory)) or_warn(path, remove_folder);
  std::vector<std::int64_t> before;
  for (const std::string& name : names_in(directory))
    if (const auto other = step_of(name); other && *other < step) before.push_back(*other);
  for (const std::int64_t old : not_kept(directory, std::move(before), step, keep))
    or_warn(directory + "/" + checkpoint_name(old), remove_checkpoint);
}

}  // namespace detail

SHARDLIB_INLINE Checkpoint Checkpoint::open(const std::string& path) {
  if (!file_exists(path + "/manifest.json")) {
    if (file_exists(path + "/.zgroup")) throw Error("checkpoint '" + path + "' is damaged: 'manifest.json' is missing");
    std::string why = file_exists(path) ? "it has no manifest.json" : "there is no such folder";
    for (const std::string& folder : {path, path + "/checkpoints"})
      if (is_folder(folder))
        if (const auto inside = list_checkpoints(folder); !inside.empty())
          why += "; give one of its checkpoints, such as '" + inside.front() + "'";
    throw UsageError("'" + path + "' is not a checkpoint: " + why);
  }
  auto impl = std::make_shared<Impl>();
  impl->path = path;
  impl->files = detail::read_manifest(path);
  constexpr std::string_view array_file = "/.zarray";
  std::vector<std::string> damages;
  for (const ManifestFile& file : impl->files)
    if (file.path.starts_with(".z") || file.path.find("/.z") != std::string::npos)
      if (auto damage = detail::damage_of(path, file)) damages.push_back(std::move(*damage));
  if (!damages.empty()) throw Error(detail::damage_message(path, damages));
  impl->meta = detail::read_meta(path);
  for (const ManifestFile& file : impl->files) {
    if (!file.path.ends_with(array_file)) continue;
    const std::string name = file.path.substr(0, file.path.size() - array_file.size());
    impl->add(name, ZarrArray::open(path + "/" + name, {.missing_is_error = true}));
  }
  std::sort(impl->arrays.begin(), impl->arrays.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return Checkpoint(std::move(impl));
}

SHARDLIB_INLINE const std::string& Checkpoint::path() const {
  return impl_->path;
}
SHARDLIB_INLINE const CheckpointMeta& Checkpoint::meta() const {
  return impl_->meta;
}
SHARDLIB_INLINE const std::vector<CheckpointArray>& Checkpoint::arrays() const {
  return impl_->arrays;
}
SHARDLIB_INLINE const std::vector<ManifestFile>& Checkpoint::files() const {
  return impl_->files;
}
SHARDLIB_INLINE const CheckpointArray* Checkpoint::find(const std::string& name) const {
  const auto it = std::ranges::find(impl_->arrays, name, &CheckpointArray::name);
  return it == impl_->arrays.end() ? nullptr : &*it;
}
SHARDLIB_INLINE std::vector<std::string> Checkpoint::damages(std::size_t first, std::size_t every) const {
  std::vector<std::string> found;
  for (std::size_t i = first; i < impl_->files.size(); i += every)
    if (auto damage = detail::damage_of(impl_->path, impl_->files[i])) found.push_back(std::move(*damage));
  return found;
}
SHARDLIB_INLINE std::vector<std::string> Checkpoint::not_finite() const {
  std::vector<std::string> found;
  for (const CheckpointArray& array : impl_->arrays) {
    if (!is_floating(array.dtype)) continue;
    // Reads rows of the first dim in pieces of 64 MB or one row.
    const std::int64_t rows = array.shape.empty() ? 1 : array.shape[0];
    const std::int64_t row_bytes = static_cast<std::int64_t>(array.bytes()) / std::max<std::int64_t>(rows, 1);
    const std::int64_t step = std::max<std::int64_t>((1 << 26) / std::max<std::int64_t>(row_bytes, 1), 1);
    Index offset(array.shape.size()), shape = array.shape;
    std::size_t count = 0;
    for (std::int64_t row = 0; row < rows; row += step) {
      const std::int64_t n = std::min(step, rows - row);
      if (!shape.empty()) offset[0] = row, shape[0] = n;
      Bytes piece(static_cast<std::size_t>(n * row_bytes));
      read(array.name, offset, shape, piece);
      count += detail::count_not_finite(piece, array.dtype);
    }
    if (count != 0) found.push_back(detail::not_finite_message(array.name, count));
  }
  return found;
}
SHARDLIB_INLINE void Checkpoint::read(const std::string& name, const Index& offset, const Index& shape,
                                      std::span<std::byte> out) const {
  const auto it = impl_->places.find(name);
  if (it == impl_->places.end()) throw Error("checkpoint '" + impl_->path + "' has no leaf '" + name + "'");
  const auto& [array, row] = it->second;
  if (!row) return array.read_bytes(offset, shape, out);
  Index from{*row}, sizes{1};
  from.insert(from.end(), offset.begin(), offset.end());
  sizes.insert(sizes.end(), shape.begin(), shape.end());
  array.read_bytes(from, sizes, out);
}

SHARDLIB_INLINE std::string checkpoint_name(std::int64_t step) {
  const std::string digits = std::to_string(step);
  return "step-" + std::string(digits.size() < 8 ? 8 - digits.size() : 0, '0') + digits;
}

SHARDLIB_INLINE std::vector<std::string> list_checkpoints(const std::string& directory) {
  std::vector<std::int64_t> steps;
  for (const std::string& name : detail::names_in(directory))
    if (const auto step = detail::step_of(name)) steps.push_back(*step);
  std::sort(steps.begin(), steps.end(), std::greater<>());
  // Steps after LATEST are of an abandoned run: it was resumed from an earlier step.
  Bytes bytes;
  try {
    if (file_exists(directory + "/LATEST")) bytes = read_file(directory + "/LATEST");
  } catch (const Error& e) {
    shardlib::detail::warn(std::string(e.what()) +
                           "; the newest checkpoint is tried first: remove LATEST before the next save");
  }
  std::string_view name = as_text(bytes);
  if (name.ends_with('\n')) name.remove_suffix(1);
  if (const auto latest = detail::step_of(name))
    std::sort(steps.begin(), steps.end(), [latest = *latest](std::int64_t a, std::int64_t b) {
      return std::pair(a <= latest, a) > std::pair(b <= latest, b);
    });
  std::vector<std::string> paths;
  for (const std::int64_t step : steps) paths.push_back(directory + "/" + checkpoint_name(step));
  return paths;
}

SHARDLIB_INLINE std::optional<std::string> newest_whole(const std::string& directory) {
  const std::vector<std::string> paths = list_checkpoints(directory);
  for (const std::string& path : paths) {
    std::string message;
    try {
      const auto damages = Checkpoint::open(path).damages();
      if (damages.empty()) return path;
      message = detail::damage_message(path, damages);
    } catch (const StorageError& e) {
      throw StorageError(detail::refused_message(path, e));
    } catch (const Error& e) {
      message = e.what();
    }
    detail::warn_damaged(message);
  }
  if (!paths.empty()) detail::fail_none_whole(directory, paths.size());
  return std::nullopt;
}

}  // namespace shardlib::io
