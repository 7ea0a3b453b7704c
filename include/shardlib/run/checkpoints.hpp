// A run's checkpoints: saves a program's state, a tree of tensors, in the run's folder, and loads it.
#pragma once

#include <charconv>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "shardlib/io/agree.hpp"
#include "shardlib/io/checkpoint/checkpoint.hpp"
#include "shardlib/io/checkpoint/folder.hpp"
#include "shardlib/run/training.hpp"

namespace shardlib::run {

namespace detail {

inline constexpr const char* skipped_key = "data.skipped_batches";

/// Converts RunIdentity to checkpoint metadata.
[[nodiscard]] inline io::CheckpointMeta meta_of(const Checkpoints::Saved& saved) {
  io::CheckpointMeta meta{saved.step, saved.identity.data, saved.identity.settings, saved.validation_loss};
  if (saved.skipped_batches != 0) meta.user[skipped_key] = std::to_string(saved.skipped_batches);
  return meta;
}

/// The inverse of meta_of.
[[nodiscard]] inline Checkpoints::Saved saved_of(const io::CheckpointMeta& meta) {
  Checkpoints::Saved saved{meta.step, {meta.data_hash, meta.user}, 0, meta.validation_loss};
  if (const auto skipped = saved.identity.settings.extract(skipped_key)) {
    const std::string& text = skipped.mapped();
    std::from_chars(text.data(), text.data() + text.size(), saved.skipped_batches);
  }
  return saved;
}

/// Renames the checkpoint of a step. One device does so for all.
inline void set_aside_diverged(Device& device, const std::string& folder, std::int64_t step) {
  io::together(device, "", [&] {
    if (device.rank() == 0) io::detail::set_aside(folder + "/" + io::checkpoint_name(step), "diverged");
  });
}

}  // namespace detail

/// The functions by which `train` saves and loads `state`, which must outlive the result. Before a load, the leaves
/// must exist with their sizes. `rename` is as in io::SaveOptions. `checkpoints_of(mesh, state, training)`
template <Spec A, class Tree>
[[nodiscard]] Checkpoints checkpoints_of(const Mesh<A>& mesh, Tree& state, const Training& training,
                                         const io::Rename& rename = {}) {
  Checkpoints c;
  c.leaves = [rename, &state] { return io::detail::named_values(state, rename); };
  if (training.directory.empty()) return c;
  const std::string folder = training.directory + "/checkpoints";
  const auto saver = std::make_shared<io::AsyncSaver>(mesh, folder,
                                                      io::SaveOptions{.keep = static_cast<int>(training.keep),
                                                                      .keep_every = training.keep_every,
                                                                      .keep_best = static_cast<int>(training.keep_best),
                                                                      .finite = true,
                                                                      .rename = rename});
  c.save = [saver, &state](const Checkpoints::Saved& saved) { saver->save(saved.step, state, detail::meta_of(saved)); };
  const bool read_only = training.sample_only;
  c.load = [mesh, folder, rename, read_only, &state](
               std::int64_t before,
               const std::function<void(const Checkpoints::Saved&)>& check) -> std::optional<Checkpoints::Saved> {
    const auto newest = io::open_newest(mesh, folder, before, read_only);
    if (!newest) return std::nullopt;
    if (check) check(detail::saved_of(newest->meta()));
    io::LoadOptions verified;  // open_newest has already compared all files with the manifest
    verified.verify = false;
    verified.rename = rename;
    return detail::saved_of(io::load(mesh, *newest, state, verified));
  };
  c.set_aside = [mesh, folder](std::int64_t step) { detail::set_aside_diverged(*mesh.device(), folder, step); };
  const auto completes = [saver](const auto& f) {
    return [saver, f] {
      const bool before = saver->in_flight();
      f(*saver);
      return before && !saver->in_flight();
    };
  };
  c.poll = completes([](io::AsyncSaver& s) { s.poll(); });
  c.flush = completes([](io::AsyncSaver& s) { s.flush(); });
  return c;
}

/// The same checkpoints for a program that computes with copies of its state. `renew` makes the copies after each load.
/// `renewing(checkpoints_of(mesh, state, training), copies, [&] { return cast_tree<Model<bf16>>(state.weights); })`
template <class Copies, class Renew>
[[nodiscard]] Checkpoints renewing(Checkpoints checkpoints, Copies& copies, const Renew& renew) {
  if (const auto load = checkpoints.load)
    checkpoints.load = [load, &copies, renew](std::int64_t before, const auto& check) {
      copies = {};  // frees the copies first, because loading briefly needs both the old and the new state
      const auto found = load(before, check);
      copies = renew();
      return found;
    };
  return checkpoints;
}

}  // namespace shardlib::run
