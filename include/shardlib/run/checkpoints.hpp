// A run's checkpoints: a program's state, a tree of tensors, to and from the run's folder.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "shardlib/io/checkpoint/checkpoint.hpp"
#include "shardlib/run/check_replicas.hpp"
#include "shardlib/run/training.hpp"

namespace shardlib::run {

/// How `train` saves and loads `state`, which must outlive the result. Its leaves must be there, with their sizes, when
/// a checkpoint is loaded. `rename`: as in io::SaveOptions. `checkpoints_of(mesh, state, training)`
template <Spec A, class Tree>
[[nodiscard]] Checkpoints checkpoints_of(const Mesh<A>& mesh, Tree& state, const Training& training,
                                         const io::Rename& rename = {}) {
  Checkpoints c;
  if (mesh.device()->is_dry()) return c;
  c.check_replicas = [mesh, rename, &state](const std::string& when, const ReplicatedNumbers& numbers) {
    check_replicas(mesh, state, when, numbers, rename);
  };
  if (training.directory.empty()) return c;
  const std::string folder = training.directory + "/checkpoints";
  const auto saver = std::make_shared<io::AsyncSaver>(
      mesh, folder, io::SaveOptions{.keep = static_cast<int>(training.keep), .finite = true, .rename = rename});
  c.save = [saver, &state](std::int64_t step, const RunIdentity& identity) {
    saver->save(step, state, {step, identity.data, identity.settings});
  };
  c.load = [mesh, folder, rename, &state]() -> std::optional<Checkpoints::Loaded> {
    const auto path = io::newest_whole(mesh, folder);
    if (!path) return std::nullopt;
    io::LoadOptions verified;  // newest_whole has compared all files with the manifest
    verified.verify = false;
    verified.rename = rename;
    const io::CheckpointMeta meta = io::load(mesh, *path, state, verified);
    return Checkpoints::Loaded{meta.step, {meta.data_hash, meta.user}};
  };
  c.poll = [saver] { saver->poll(); };
  c.flush = [saver] { saver->flush(); };
  return c;
}

}  // namespace shardlib::run
