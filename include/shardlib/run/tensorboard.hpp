// Writes numbers, texts and histograms for TensorBoard into an event file, in addition to the run's own records.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>

#include "shardlib/run/histogram.hpp"
#include "shardlib/run/metrics.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// Writes one event file, for `tensorboard --logdir` of the folder or a parent. A default-constructed object is off.
class TensorBoard {
 public:
  TensorBoard() = default;
  /// Creates the folder and a new file in it. A resumed run writes another file, whose steps replace the earlier ones
  /// in TensorBoard (`first_step` marks the restart). Throws Error if that fails.
  explicit TensorBoard(const std::string& folder, std::int64_t first_step = 0);

  [[nodiscard]] bool on() const { return file_.is_open(); }        ///< whether it writes
  [[nodiscard]] const std::string& path() const { return path_; }  ///< the path of the event file

  /// Adds one value of the curve `tag`.
  void scalar(std::string_view tag, std::int64_t step, double value);
  /// Adds a text, which TensorBoard's tab TEXT shows as it is.
  void text(std::string_view tag, std::int64_t step, std::string_view text);
  /// Adds a histogram, which the tabs HISTOGRAMS and DISTRIBUTIONS show. If some values are not finite, it also adds
  /// their number to the curve "not_finite/" + tag.
  void histogram(std::string_view tag, std::int64_t step, const Histogram& histogram);
  /// Adds the record's `numbers_of`.
  void write(const Record& record);
  /// Adds the text, as sample; further ones of the same step as sample/2, sample/3 and so on.
  void write(const Sample& sample);
  void flush();  ///< passes added values to the system

 private:
  void event(const std::string& payload);

  std::string path_;
  std::ofstream file_;
  std::int64_t sampled_at_ = INT64_MIN, samples_ = 0;  ///< the step of the last sample, and how many it has
};

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/tensorboard.hpp"
#endif
