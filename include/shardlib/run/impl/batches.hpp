// This device's rows of the batches of a run, and the shares of their tokens in the loss.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/io/data/loader.hpp"
#include "shardlib/io/data/read_ahead.hpp"
#include "shardlib/io/data/text_stream.hpp"
#include "shardlib/io/data/token_batch.hpp"
#include "shardlib/run/training.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib::run::detail {

/// The words about the data in the first line of a run.
inline std::string described_data(const Training& training, const Data& data) {
  const std::string about = data.train                     ? fmt::format("{} tokens of data, seen {:.2f} times",
                                                                         data.train->source().tokens(), data.train->epochs(training.steps))
                            : training.text_stream.empty() ? "no data"
                                                           : "texts of " + training.text_stream;
  return fmt::format("{} tokens a step, {}", training.batch * training.seq, about);
}

/// Reduces one number of each device; the result is the same everywhere.
inline double reduce(const DevicePtr& device, double value, Reduction op, Site site = Site::current()) {
  if (device->size() == 1) return value;
  Pool& pool = *device->host_pool();
  const Buffer send = pool.allocate(sizeof(double)), received = pool.allocate(sizeof(double));
  *send.as<double>() = value;
  device->everybody().all_reduce(send, received, DType::f64, op, site).wait();
  return *received.as<double>();
}

/// This device's part of a batch, one of several equal parts.
struct BatchPlace {
  std::int64_t index = 0, parts = 1;

  BatchPlace(const Device& device, const Training& training) {
    for (const std::string& axis : batch_axes(device.axes(), training)) {
      index = index * device.size(axis) + device.axis_index(axis);
      parts *= device.size(axis);
    }
  }
};

/// The batches of one run, read ahead: `Batches(device, training, data)`.
class Batches {
 public:
  Batches(const DevicePtr& device, const Training& training, const Data& data)
      : device_(device), training_(training), data_(data), place_(*device, training) {}

  /// From now on `microbatches` is called for `step` and those after it; step s trains on batch s + skipped.
  void seek(std::int64_t step, std::int64_t skipped) {
    ahead_.reset();
    ahead_.emplace(reader(step, skipped), step * training_.microbatches);
  }
  /// The microbatches of a step. The weights add up to 1 over all of them and all devices.
  [[nodiscard]] std::vector<io::TokenBatch> microbatches(std::int64_t step) {
    std::vector<io::TokenBatch> parts;
    for (std::int64_t i = 0; i < training_.microbatches; ++i)
      parts.push_back(ahead_->get(step * training_.microbatches + i));
    if (data_.train || !training_.text_stream.empty()) share_loss(parts);
    return parts;
  }
  /// The mean loss of the tokens of the validation batches.
  [[nodiscard]] double validation_loss(const std::function<double(const io::TokenBatch&)>& loss_of) const {
    const io::Loader& loader = *data_.validation;
    const std::int64_t batches = std::min(training_.validation_batches, loader.steps_per_epoch());
    double losses = 0, tokens = 0;
    for (std::int64_t i = 0; i < batches; ++i) {
      io::TokenBatch batch = rows(loader, i, 0, 1);
      const double counted = share_loss({&batch, 1});  // the last batch may be filled up
      losses += loss_of(batch) * counted;
      tokens += counted;
    }
    return losses / tokens;
  }

 private:
  /// This device's rows of a batch that is cut into `parts` parts.
  io::TokenBatch rows(const io::Loader& loader, std::int64_t step, std::int64_t part, std::int64_t parts) const {
    const std::int64_t mine = training_.batch / parts / place_.parts;
    return loader.rows(step, part * training_.batch / parts + place_.index * mine, mine);
  }
  /// Returns a microbatch of training; they are numbered across steps.
  io::ReadAhead::Make reader(std::int64_t step, std::int64_t skipped) {
    const std::int64_t parts = training_.microbatches;
    if (data_.train)
      return
          [this, parts, skipped](std::int64_t i) { return rows(*data_.train, i / parts + skipped, i % parts, parts); };
    const std::int64_t size = training_.batch / parts, mine = size / place_.parts;
    if (training_.text_stream.empty())
      return [this, mine](std::int64_t) { return io::detail::empty_rows(mine, training_.seq); };
    // A resumed run begins at other places of the texts, or it would see the first ones again and again.
    const std::uint64_t seed =
        step == 0 ? training_.seed : io::detail::hash_in(training_.seed, static_cast<std::uint64_t>(step));
    if (!stream_)
      stream_ = std::make_shared<io::TextStream>(
          training_.text_stream,
          io::TextStreamOptions{size, training_.seq, seed, io::TextOptions{data_.tokenizer, false},
                                static_cast<std::uint32_t>(data_.vocabulary),
                                static_cast<std::int32_t>(training_.row_begin)},
          place_.index * mine, mine);
    return [stream = stream_](std::int64_t) { return stream->next(); };
  }

  /// Turns the weights of a step's rows into shares of its loss, which add up to 1 over all rows and devices. Returns
  /// the number of tokens that count. The sums are of whole numbers, so they are the same on every mesh.
  double share_loss(std::span<io::TokenBatch> parts) const {
    double mine = 0;
    for (const io::TokenBatch& rows : parts) mine += std::accumulate(rows.weights.begin(), rows.weights.end(), 0.0);
    const std::int64_t copies = device_->size() / place_.parts;  // devices that have the same rows
    const double tokens = reduce(device_, mine, Reduction::sum) / static_cast<double>(copies);
    for (io::TokenBatch& rows : parts)
      for (float& weight : rows.weights) weight = static_cast<float>(weight / tokens);
    return tokens;
  }

  DevicePtr device_;
  const Training& training_;
  const Data& data_;
  BatchPlace place_;
  std::shared_ptr<io::TextStream> stream_;  ///< its position is not part of a checkpoint
  std::optional<io::ReadAhead> ahead_;
};

}  // namespace shardlib::run::detail
