// Batches of byte tokens straight from a text file: a pure function of (seed, step), the same on every mesh.
#pragma once

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <ios>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/error.hpp"

namespace shardlib::io {

/// Rows of one batch, row-major "rows length". `inputs` are the targets shifted right by one, 0 where a row or a
/// document starts; `segments` number the documents within a row, for the attention mask.
struct TextBatch {
  std::vector<std::int32_t> inputs, targets, segments;
};

/// A text file cut into windows of `length` bytes. Each epoch visits every window once, in an order that `seed`
/// shuffles; what is left over at the end of the file or of an epoch is not used. Documents are separated by
/// "<|endoftext|>".
class TextBatches {
 public:
  TextBatches(const std::string& path, std::int64_t batch, std::int64_t length, std::uint64_t seed)
      : batch_(batch), length_(length), seed_(seed) {
    if (batch < 1 || length < 1) throw UsageError("TextBatches: a batch has at least one row, a row at least one byte");
    const std::string raw = contents(path);
    constexpr std::string_view separator = "<|endoftext|>";
    std::size_t begin = 0;
    while (begin <= raw.size()) {
      const std::size_t end = std::min(raw.find(separator, begin), raw.size());
      if (end > begin) starts_.push_back(static_cast<std::int64_t>(text_.size()));
      text_.append(raw, begin, end - begin);
      begin = end + separator.size();
    }
    windows_ = static_cast<std::int64_t>(text_.size()) / length_;
    if (windows_ < batch_)
      throw UsageError("the text file '" + path + "' has " + std::to_string(text_.size()) + " bytes, enough for " +
                       std::to_string(windows_) + " rows of " + std::to_string(length_) + ", but a batch has " +
                       std::to_string(batch_) + ": choose a longer text, or a smaller --batch or --seq");
  }

  [[nodiscard]] std::int64_t bytes() const { return static_cast<std::int64_t>(text_.size()); }
  [[nodiscard]] std::int64_t steps_per_epoch() const { return windows_ / batch_; }

  /// Rows [first, first + rows) of the batch of a step: each device asks for its own.
  [[nodiscard]] TextBatch rows(std::int64_t step, std::int64_t first, std::int64_t rows) const {
    if (step < 0 || first < 0 || rows < 0 || first + rows > batch_)
      throw Error("TextBatches: rows " + std::to_string(first) + " to " + std::to_string(first + rows) + " of step " +
                  std::to_string(step) + " are outside the batch of " + std::to_string(batch_));
    TextBatch out;
    for (std::int64_t r = first; r < first + rows; ++r) {
      const auto epoch = static_cast<std::uint64_t>(step / steps_per_epoch());
      const std::int64_t window = shuffled((step % steps_per_epoch()) * batch_ + r, epoch);
      append_window(window * length_, out);
    }
    return out;
  }

 private:
  static std::string contents(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::string text, block(std::size_t{1} << 20, '\0');
    while (file.read(block.data(), static_cast<std::streamsize>(block.size())) || file.gcount() > 0)
      text.append(block, 0, static_cast<std::size_t>(file.gcount()));
    // A file that did not open, or a folder, which opens but cannot be read.
    if (!file.eof()) throw UsageError("cannot read the text file '" + path + "': check --data");
    return text;
  }

  void append_window(std::int64_t begin, TextBatch& out) const {
    auto next = std::upper_bound(starts_.begin(), starts_.end(), begin - 1);
    std::int32_t segment = 0;
    for (std::int64_t i = begin; i < begin + length_; ++i) {
      const bool starts = next != starts_.end() && *next == i;
      if (starts) {
        ++next;
        if (i > begin) ++segment;
      }
      const auto byte = [&](std::int64_t at) {
        return static_cast<unsigned char>(text_[static_cast<std::size_t>(at)]);
      };
      out.inputs.push_back(starts || i == begin ? 0 : byte(i - 1));
      out.targets.push_back(byte(i));
      out.segments.push_back(segment);
    }
  }

  /// Position `i` of a permutation of the windows that needs no memory: a four-round Feistel network over the next
  /// power of four, walked until it lands inside (Black and Rogaway 2002).
  [[nodiscard]] std::int64_t shuffled(std::int64_t i, std::uint64_t epoch) const {
    unsigned half = 1;
    while ((std::int64_t{1} << (2 * half)) < windows_) ++half;
    const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
    auto x = static_cast<std::uint64_t>(i);
    do {
      std::uint64_t left = x >> half, right = x & mask;
      for (std::uint64_t round = 0; round < 4; ++round)
        left = std::exchange(right, left ^ (mix(right + (round << 32) + (epoch << 34), seed_) & mask));
      x = (left << half) | right;
    } while (x >= static_cast<std::uint64_t>(windows_));
    return static_cast<std::int64_t>(x);
  }
  /// The finaliser of splitmix64 (Steele et al. 2014).
  static std::uint64_t mix(std::uint64_t x, std::uint64_t seed) {
    x += 0x9e3779b97f4a7c15U * (seed + 1);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31);
  }

  std::int64_t batch_, length_, windows_ = 0;
  std::uint64_t seed_;
  std::string text_;
  std::vector<std::int64_t> starts_;
};

}  // namespace shardlib::io
