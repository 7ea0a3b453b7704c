// flat-tokens (seqax's format): tokens in a zarr group, a split each for training and validation. docs/data.md
// specifies it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/io/data/token_source.hpp"
#include "shardlib/io/formats/zarr.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::io {

/// A flat-tokens array: a group of `encoded_tokens` and `seq_starts`.
class FlatTokens final : public TokenSource {
 public:
  /// Decompressed tokens kept unless another number is given.
  static constexpr std::size_t default_cache_bytes = std::size_t{512} << 20;
  /// `path` is the split's folder. Keeps up to `cache_bytes` of decompressed tokens. Throws UsageError where the group
  /// or an array is missing or of another type, or where there are no tokens (then `remedy` is what helps), Error where
  /// they contradict each other.
  explicit FlatTokens(const std::string& path, std::size_t cache_bytes = default_cache_bytes,
                      std::string_view remedy = other_data);

 private:
  void read_tokens(std::int64_t first, std::span<EncodedToken> out) const override;
  [[nodiscard]] std::int64_t count_documents() const override;
  [[nodiscard]] TokenRange find_document(std::int64_t index) const override;

  ZarrArray encoded_tokens_, seq_starts_;
  mutable std::mutex mutex_;
  mutable std::optional<std::vector<std::int64_t>> empty_;  // documents without tokens, sorted; found at first need
};

/// The parts of a data set: `train` for training, `validation` for measuring the loss.
enum class Split { train, validation };
/// The name of the folder: "train" or "validation".
[[nodiscard]] std::string to_string(Split split);

/// The sizes of the chunks that FlatTokensWriter writes.
struct FlatTokensOptions {
  std::int64_t chunk_tokens = std::int64_t{1} << 18;     ///< tokens a file, 4 bytes each before compression
  std::int64_t chunk_documents = std::int64_t{1} << 16;  ///< starts a file, 8 bytes each before compression
};

/// The part of a split that has been written: documents, tokens, and the largest id, max_token_id.
struct FlatTokensProgress {
  std::int64_t documents = 0, tokens = 0;
  std::uint32_t max_token_id = 0;
};

/// Writes a flat-tokens data set document by document, with little memory. Everything goes to `path`.partial, which
/// `finish` renames to `path`, so a data set of that name is complete. A writer that finds a `path`.partial continues
/// after its last `commit`, so that a killed job can be started again.
class FlatTokensWriter {
 public:
  /// Throws UsageError if `path` exists, if another process writes it, or if a `path`.partial has other chunks.
  explicit FlatTokensWriter(std::string path, FlatTokensOptions options = {});
  FlatTokensWriter(const FlatTokensWriter&) = delete;
  FlatTokensWriter& operator=(const FlatTokensWriter&) = delete;
  /// Leaves the `path`.partial with the last commit where `finish` was not called.
  ~FlatTokensWriter();

  /// Adds a document; one without tokens is left out. Throws UsageError for an id of 2^31 or more.
  void add(Split split, std::span<const std::uint32_t> ids);
  [[nodiscard]] const FlatTokensProgress& progress(Split split) const;  ///< what has been added so far
  /// Everything added so far is on the disk, durably, together with `note`: whatever the caller needs to continue from
  /// here, such as the place in its input.
  void commit(const std::string& note = "");
  /// The note of the last commit; empty at the start.
  [[nodiscard]] const std::string& note() const { return note_; }
  /// Completes the data set and gives it its name; until then the last commit is what a writer continues after. Throws
  /// UsageError where `train` is empty.
  void finish();

 private:
  struct Output;
  [[nodiscard]] std::string partial() const { return path_ + ".partial"; }
  void resume(const std::string& record);
  void sync();
  void check_open() const;
  void require_own_folder(bool begun) const;
  void remove_temporaries() const;

  std::string path_, note_;
  FlatTokensOptions options_;
  std::shared_ptr<const void> lock_;
  std::array<std::unique_ptr<Output>, 2> splits_;
};

}  // namespace shardlib::io

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/data/impl/flat_tokens.hpp"
#endif
