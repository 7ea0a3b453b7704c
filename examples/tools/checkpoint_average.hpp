// shardlib-checkpoint average: the mean of the weights of several checkpoints.
#pragma once

#include <fmt/format.h>
#include <shardlib/io/box.hpp>
#include <shardlib/io/checkpoint/checkpoint.hpp>
#include <shardlib/io/checkpoint/impl/finite.hpp>
#include <shardlib/io/formats/safetensors.hpp>
#include <shardlib/io/formats/safetensors_tree.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "checkpoint_files.hpp"

/// The arguments of `average`: the checkpoints, the target of the mean, and the prefix of its leaves.
struct AverageRequest {
  std::vector<std::string> paths;
  std::string target;  ///< a safetensors file, or the folder in which a checkpoint is made
  std::string prefix = "weights.";
  std::int64_t step = -1;  ///< -1: the step of the newest
};

template <class T>
void add_to(std::vector<double>& sums, std::span<const std::byte> bytes) {
  for (std::size_t i = 0; i < sums.size(); ++i) {
    T x;
    std::memcpy(&x, bytes.data() + i * sizeof(T), sizeof(T));
    sums[i] += static_cast<double>(static_cast<accumulator_t<T>>(x));
  }
}
template <class T>
void store_mean(const std::vector<double>& sums, double count, std::span<std::byte> out) {
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const auto x = static_cast<T>(static_cast<accumulator_t<T>>(sums[i] / count));
    std::memcpy(out.data() + i * sizeof(T), &x, sizeof(T));
  }
}

/// Fills `out` with the mean of a floating leaf. Sums are f64.
inline void mean_of(const std::vector<io::Checkpoint>& checkpoints, const io::CheckpointArray& leaf,
                    std::span<std::byte> out) {
  std::vector<double> sums(static_cast<std::size_t>(io::volume(leaf.shape)));
  const auto with_dtype = [&](const auto& f) {
    visit_dtype(leaf.dtype, [&]<class T>(T zero) {
      if constexpr (floating<T>) f(zero);
    });
  };
  for (const io::Checkpoint& checkpoint : checkpoints) {
    checkpoint.read(leaf.name, io::Index(leaf.shape.size(), 0), leaf.shape, out);
    if (const std::size_t count = io::detail::count_not_finite(out, leaf.dtype); count != 0)
      throw Error(fmt::format("checkpoint '{}': {}: its training had diverged; leave it out", checkpoint.path(),
                              io::detail::not_finite_message(leaf.name, count)));
    with_dtype([&]<class T>(T /*zero*/) { add_to<T>(sums, out); });
  }
  const auto count = static_cast<double>(checkpoints.size());
  with_dtype([&]<class T>(T /*zero*/) { store_mean<T>(sums, count, out); });
}

/// Throws UsageError, which names the leaf, unless both have the same leaves below the prefix.
inline void require_same_leaves(const io::Checkpoint& a, const io::Checkpoint& b, const std::string& prefix) {
  const auto missing = [&](const io::Checkpoint& has, const io::Checkpoint& lacks, const std::string& leaf) {
    throw UsageError(
        fmt::format("the checkpoints differ: the leaf '{}' is in '{}', but not in '{}'; average "
                    "checkpoints of one model",
                    leaf, has.path(), lacks.path()));
  };
  for (const io::CheckpointArray& leaf : a.arrays()) {
    if (!leaf.name.starts_with(prefix)) continue;
    const io::CheckpointArray* const other = b.find(leaf.name);
    if (other == nullptr) missing(a, b, leaf.name);
    if (other->shape != leaf.shape || other->dtype != leaf.dtype)
      throw UsageError(
          fmt::format("the checkpoints differ: the leaf '{}' is {} {} in '{}', but {} {} in '{}'; average "
                      "checkpoints of one model",
                      leaf.name, name(leaf.dtype), io::detail::show_shape(leaf.shape), a.path(), name(other->dtype),
                      io::detail::show_shape(other->shape), b.path()));
  }
  for (const io::CheckpointArray& leaf : b.arrays())
    if (leaf.name.starts_with(prefix) && a.find(leaf.name) == nullptr) missing(b, a, leaf.name);
}

/// Prints the settings in which a checkpoint differs from the newest one, whose settings are stored.
inline void note_settings(const io::Checkpoint& newest, const io::Checkpoint& other) {
  for (const auto& [key, value] : newest.meta().user) {
    const auto found = other.meta().user.find(key);
    if (key.starts_with("setting.") && found != other.meta().user.end() && found->second != value)
      fmt::print("note: {} is {} in '{}', but {} in '{}', whose settings the average has\n", key.substr(8),
                 found->second, other.path(), value, newest.path());
  }
}

inline void require_distinct(const std::vector<std::string>& paths) {
  if (paths.size() < 2)
    throw UsageError(fmt::format("{} checkpoint is given: an average needs two or more", paths.size()));
  for (std::size_t i = 0; i < paths.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      if (std::error_code none; std::filesystem::equivalent(paths[i], paths[j], none))
        throw UsageError(fmt::format("the checkpoint '{}' is given twice: give each one once", paths[i]));
}

/// Whether the average becomes a file, not a checkpoint in a folder.
inline bool to_file(const AverageRequest& request) {
  return request.target.ends_with(".safetensors");
}

/// Throws UsageError if the average, of this path and step, has no place.
inline void require_target(const AverageRequest& request, const std::string& made, std::int64_t step) {
  if (io::file_exists(request.target + "/manifest.json"))
    throw UsageError("'" + request.target +
                     "' is a checkpoint: the first argument is the folder or file that gets the average, then come "
                     "the checkpoints");
  if (!to_file(request)) require_place(request.target);
  require_new(made);
  if (!to_file(request)) require_latest(request.target, step);
}

/// What the average is made of.
struct Averaging {
  const AverageRequest& request;
  const std::vector<io::Checkpoint>& checkpoints;
  const io::Checkpoint& newest;

  [[nodiscard]] bool chosen(const io::CheckpointArray& leaf) const { return leaf.name.starts_with(request.prefix); }
  [[nodiscard]] bool averages(const io::CheckpointArray& leaf) const { return chosen(leaf) && is_floating(leaf.dtype); }
  /// Fills `out` with the leaf of the average.
  void fill(const io::CheckpointArray& leaf, std::span<std::byte> out) const {
    if (averages(leaf))
      mean_of(checkpoints, leaf, out);
    else
      newest.read(leaf.name, io::Index(leaf.shape.size(), 0), leaf.shape, out);
  }
};

/// Writes the leaves below the prefix, without it, as one safetensors file.
inline void write_file(const Averaging& all, const io::CheckpointMeta& meta) {
  std::vector<io::SafetensorsTensor> tensors;
  for (const io::CheckpointArray& leaf : all.newest.arrays())
    if (all.chosen(leaf))
      tensors.push_back(
          {without_prefix(leaf.name, all.request.prefix), io::safetensors_dtype(leaf.dtype), leaf.shape, [&] {
             io::Bytes bytes(static_cast<std::size_t>(leaf.bytes()));
             all.fill(leaf, bytes);
             return bytes;
           }});
  io::write_safetensors(all.request.target, std::move(tensors), io::safetensors_metadata(meta));
}
/// Writes all leaves as a checkpoint.
inline void write_checkpoint(const Averaging& all, const io::CheckpointMeta& meta) {
  std::vector<io::ArrayToSave> arrays;
  for (const io::CheckpointArray& leaf : all.newest.arrays())
    arrays.push_back({leaf, [&](std::span<std::byte> out) { all.fill(leaf, out); }});
  io::save_arrays(all.request.target, meta, arrays);
}

inline int average(const AverageRequest& request) {
  require_distinct(request.paths);
  std::vector<io::Checkpoint> checkpoints;
  for (const std::string& path : request.paths) checkpoints.push_back(io::Checkpoint::open(path));
  const io::Checkpoint& newest =
      *std::max_element(checkpoints.begin(), checkpoints.end(),
                        [](const io::Checkpoint& a, const io::Checkpoint& b) { return a.meta().step < b.meta().step; });
  const Averaging all{request, checkpoints, newest};
  const auto count =
      std::ranges::count_if(newest.arrays(), [&](const io::CheckpointArray& leaf) { return all.averages(leaf); });
  if (count == 0)
    throw UsageError(
        fmt::format("checkpoint '{}' has no floating-point leaf whose name begins with '{}': give the beginning of its "
                    "weights' names as --prefix, or --prefix '' for all leaves",
                    newest.path(), request.prefix));
  for (const io::Checkpoint& checkpoint : checkpoints) require_same_leaves(newest, checkpoint, request.prefix);
  const bool file = to_file(request);
  io::CheckpointMeta meta = newest.meta();
  if (request.step >= 0) meta.step = request.step;
  const std::string made = file ? request.target : request.target + "/" + io::checkpoint_name(meta.step);
  require_target(request, made, meta.step);
  for (const std::string& path : request.paths) static_cast<void>(open_verified(path));
  for (const io::Checkpoint& checkpoint : checkpoints) note_settings(newest, checkpoint);
  if (std::ranges::any_of(newest.arrays(), [&](const io::CheckpointArray& leaf) {
        return leaf.name.starts_with("ema.0.") && !all.chosen(leaf);
      }))
    fmt::print(
        "note: the run samples and exports from its moving average, the leaves 'ema.0.', of which the newest is "
        "kept; --prefix ema.0. averages them instead\n");

  std::string names;
  for (const io::Checkpoint& checkpoint : checkpoints)
    names += (names.empty() ? "" : ", ") + base_name(checkpoint.path());
  meta.user["average_of"] = names;
  meta.validation_loss.reset();  // it was of other weights
  if (file)
    write_file(all, meta);
  else
    write_checkpoint(all, meta);
  fmt::print(
      "wrote {}: the mean of {} of {}{}\n", made, counted_leaves(count), counted(checkpoints.size(), "checkpoint"),
      file ? ""
           : fmt::format("; {} from {}", counted_leaves(std::ssize(newest.arrays()) - count, "other "), newest.path()));
  return 0;
}
