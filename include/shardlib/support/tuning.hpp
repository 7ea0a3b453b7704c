// Thresholds, as sizes and times, by which the library chooses between algorithms.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

namespace shardlib {

namespace detail::nccl {
struct Functions;
}

/// Sizes and times at which the library takes another way; bytes where nothing else is said. Programs keep the
/// defaults. Tests lower them, to take every way with small tensors.
/// `launch(mesh, body, {.tuning = {.logits_piece = 4096}})`
struct Tuning {
  /// A member of a collective that receives at least so much bypasses its caches: it would not stay in them anyway.
  std::size_t nontemporal_from = std::size_t{8} << 20;
  /// The longest message of a collective over MPI. A longer one goes in pieces.
  std::size_t collective_piece = std::size_t{1} << 20;
  /// The longest message of a `send` over MPI. A longer one goes in pieces, because MPI counts are ints.
  std::size_t send_piece = std::size_t{1} << 30;
  /// How long an MPI rank waits before it asks whether the ranks that it waits for are still there.
  std::chrono::milliseconds patience{2000};
  /// How many shards in views a process may have mapped, of the 65530 maps that Linux allows it (vm.max_map_count).
  /// At 0 a gather is always a copy.
  std::size_t mapped_shards = 16384;
  /// Rows of a gathered dim at least so long are gathered in place. Copying them one by one would take longer than to
  /// put all in rank order.
  std::size_t row_piece = 64;
  /// While a shard is on its way, an einsum goes in parts of at least this many floating-point operations, because MPI
  /// makes progress only between them. Parts that are added have four times as many.
  double product_part = 1 << 27;
  /// The longest message of such a shard: an einsum begins with the first one while the others are on their way.
  std::size_t shard_message = std::size_t{1} << 18;
  /// Whether oneDNN takes the convolutions of images that it can. Without a value it takes those where it is faster.
  std::optional<bool> image_conv = std::nullopt;
  /// linear_cross_entropy makes the logits in pieces of at most this size.
  std::int64_t logits_piece = std::int64_t{1} << 27;
  /// linear_cross_entropy stores a device's logits up to this size for its backward pass.
  std::int64_t stored_logits = std::int64_t{256} << 20;
  /// An array of a checkpoint up to this size is one file: its writer is sent the shards of the other devices.
  std::uint64_t merged_array = std::uint64_t{1} << 20;
  /// `reshard` moves leaves together up to this size, and a larger leaf alone.
  std::uint64_t resharded_together = std::uint64_t{64} << 20;
  /// For tests that fail or die while a checkpoint is saved: called on each device as it passes a phase. In order:
  /// "planned", "metadata", "chunk" (after each), "chunks", "manifest", "renamed", "latest", "pruned".
  std::function<void(std::string_view phase, int device)> checkpoint_phase = nullptr;
  /// For tests: the simulated device's kernels also run at random moments, which this number chooses. At 0 they run as
  /// late as they can.
  std::uint64_t simulated_seed = 0;
  /// For tests: functions to call in place of libnccl's, also by the simulated device.
  const detail::nccl::Functions* nccl = nullptr;
  /// For tests: for NCCL each device is as in a process of its own.
  bool nccl_apart = false;
};

}  // namespace shardlib
