// Definitions of checkpoints.hpp.
#pragma once

#include "shardlib/run/checkpoints.hpp"

#include <charconv>

#include "shardlib/io/agree.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run::detail {

inline constexpr const char* skipped_key = "data.skipped_batches";

SHARDLIB_INLINE io::CheckpointMeta meta_of(const Checkpoints::Saved& saved) {
  io::CheckpointMeta meta{saved.step, saved.identity.data, saved.identity.settings, saved.validation_loss};
  if (saved.skipped_batches != 0) meta.user[skipped_key] = std::to_string(saved.skipped_batches);
  return meta;
}

SHARDLIB_INLINE Checkpoints::Saved saved_of(const io::CheckpointMeta& meta) {
  Checkpoints::Saved saved{meta.step, {meta.data_hash, meta.user}, 0, meta.validation_loss};
  if (const auto skipped = saved.identity.settings.extract(skipped_key)) {
    const std::string& text = skipped.mapped();
    std::from_chars(text.data(), text.data() + text.size(), saved.skipped_batches);
  }
  return saved;
}

SHARDLIB_INLINE void set_aside_diverged(Device& device, const std::string& folder, std::int64_t step) {
  io::together(device, "", [&] {
    if (device.rank() == 0) io::detail::set_aside(folder + "/" + io::checkpoint_name(step), "diverged");
  });
}

}  // namespace shardlib::run::detail
