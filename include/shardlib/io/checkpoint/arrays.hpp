// Checkpoints made of arrays in memory, without a mesh: for programs that convert or combine.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "shardlib/io/checkpoint/folder.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::io {

/// An array for `save_arrays`: `about` describes it, and `fill` fills its bytes, row-major.
struct ArrayToSave {
  CheckpointArray about;
  std::function<void(std::span<std::byte> out)> fill;
};

/// Writes `DIRECTORY/step-00000100`, whole or not at all, and advances LATEST, as `save` does on one device. Not
/// collective; holds all arrays in memory. Throws UsageError if an array has more dims than a tensor can have.
/// `save_arrays("averaged", meta, arrays)`
void save_arrays(const std::string& directory, const CheckpointMeta& meta, const std::vector<ArrayToSave>& arrays);

}  // namespace shardlib::io

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/checkpoint/impl/arrays.hpp"
#endif
