// Counter-based random numbers: a pure function of (seed, stream, global index), so they are the same on every mesh.
#pragma once

#include <cstdint>
#include <span>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/philox.hpp"

namespace shardlib::kernels {

/// A uniform f32 in [0, 1).
inline float uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return detail::to_uniform(bits(seed, stream, index));
}

namespace body {
struct Uniform;
struct Normal;
struct TruncatedNormal;
}  // namespace body

/// Fills a dense local shard of a global array with body::Uniform, Normal or TruncatedNormal draws. For each dim,
/// `global_strides` are the strides of the global array, and `offsets` the position of the shard. An element depends
/// only on its global position.
template <class Draw, class T>
void fill_random(const Exec& exec, T* out, std::span<const std::int64_t> shape,
                 std::span<const std::int64_t> global_strides, std::span<const std::int64_t> offsets,
                 std::uint64_t seed, std::uint64_t stream);

}  // namespace shardlib::kernels

#ifndef SHARDLIB_COMPILED
#include "shardlib/kernels/impl/random.hpp"
#endif
