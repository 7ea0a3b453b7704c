// Writes numbers, texts and histograms for TensorBoard into an event file, in addition to the run's own records. The
// file is a row of TFRecords (length, its checksum, data, its checksum), each a protobuf message tensorflow.Event; both
// formats are small enough to be spelled here.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

#include "shardlib/run/histogram.hpp"
#include "shardlib/run/metrics.hpp"
#include "shardlib/support/crc32c.hpp"
#include "shardlib/support/environment.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/print.hpp"
#include "shardlib/support/stopwatch.hpp"
#include "shardlib/support/warning.hpp"

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

namespace detail {

template <class T>
std::string little_endian(T value) {
  static_assert(std::endian::native == std::endian::little, "TFRecords are little-endian, and so are our machines");
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

/// The checksum of a TFRecord: CRC-32C, rotated and shifted, so that the checksum of data with a checksum is not
/// trivial.
inline std::uint32_t masked_crc(std::string_view bytes) {
  const std::uint32_t crc = io::crc32c(std::as_bytes(std::span(bytes.data(), bytes.size())));
  return std::rotr(crc, 15) + 0xa282ead8U;
}

inline std::string protobuf_varint(std::uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7U) out += static_cast<char>(value | 0x80U);
  return out + static_cast<char>(value);
}

/// Fields by wire type: varint (0), 8 bytes (1), a length and bytes (2), 4 bytes (5).
inline std::string protobuf_key(unsigned field, unsigned wire_type) {
  return protobuf_varint(field << 3U | wire_type);
}
inline std::string protobuf_bytes(unsigned field, std::string_view bytes) {
  return protobuf_key(field, 2) + protobuf_varint(bytes.size()) + std::string(bytes);
}

/// Event: wall_time = 1 and step = 2, which every event has.
inline std::string tensorboard_event(std::int64_t step) {
  return protobuf_key(1, 1) + little_endian(shardlib::detail::unix_seconds()) + protobuf_key(2, 0) +
         protobuf_varint(static_cast<std::uint64_t>(step));
}

/// TensorBoard reads texts as Markdown, in which this shows the text as it is.
inline std::string as_code(std::string_view text) {
  std::string out = "    ";
  for (const char c : text) out += c == '\n' ? std::string("\n    ") : std::string(1, c);
  return out;
}

}  // namespace detail

inline TensorBoard::TensorBoard(const std::string& folder, std::int64_t first_step) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const auto seconds = static_cast<std::int64_t>(shardlib::detail::unix_seconds());
  // TensorBoard reads a folder's files in the order of their names: the time first, and a number for the same second.
  for (int n = 0; path_.empty() || std::filesystem::exists(path_); ++n)
    path_ = fmt::format("{}/events.out.tfevents.{:010}.{}.{}.{}", folder, seconds, shardlib::detail::host_name(),
                        ::getpid(), n);
  const bool resumed = std::filesystem::directory_iterator(folder, error) != std::filesystem::directory_iterator();
  file_.open(path_, std::ios::binary);
  if (!file_) throw Error("cannot write the event file '" + path_ + "': does its folder allow that?");
  // Event: file_version = 3.
  event(detail::tensorboard_event(0) + detail::protobuf_bytes(3, "brain.Event:2"));
  // Event: session_log = 7 with status = 1, START = 1: TensorBoard then drops what was recorded from this step on.
  if (first_step > 0 || resumed)
    event(detail::tensorboard_event(first_step) +
          detail::protobuf_bytes(7, detail::protobuf_key(1, 0) + detail::protobuf_varint(1)));
  flush();
}

inline void TensorBoard::scalar(std::string_view tag, std::int64_t step, double value) {
  if (!on()) return;
  // Event: summary = 5; Summary: value = 1; Value: tag = 1, simple_value = 2.
  const std::string entry = detail::protobuf_bytes(1, detail::as_utf8(tag)) + detail::protobuf_key(2, 5) +
                            detail::little_endian(static_cast<float>(value));
  event(detail::tensorboard_event(step) + detail::protobuf_bytes(5, detail::protobuf_bytes(1, entry)));
}

inline void TensorBoard::text(std::string_view tag, std::int64_t step, std::string_view text) {
  if (!on()) return;
  // Value: tag = 1, tensor = 8, metadata = 9. TensorProto: dtype = 1, DT_STRING = 7; string_val = 8, and a shape
  // without dims where there is none. SummaryMetadata: plugin_data = 1; PluginData: plugin_name = 1.
  const std::string tensor = detail::protobuf_key(1, 0) + detail::protobuf_varint(7) +
                             detail::protobuf_bytes(8, detail::as_utf8(detail::as_code(text)));
  const std::string entry = detail::protobuf_bytes(1, detail::as_utf8(tag)) + detail::protobuf_bytes(8, tensor) +
                            detail::protobuf_bytes(9, detail::protobuf_bytes(1, detail::protobuf_bytes(1, "text")));
  event(detail::tensorboard_event(step) + detail::protobuf_bytes(5, detail::protobuf_bytes(1, entry)));
  flush();
}

inline void TensorBoard::histogram(std::string_view tag, std::int64_t step, const Histogram& h) {
  if (!on()) return;
  if (h.not_finite > 0) scalar("not_finite/" + std::string(tag), step, static_cast<double>(h.not_finite));
  // Buckets from the first to the last that has values. Neighbors without values become one.
  const auto has_values = [&](int bucket) { return h.counts[static_cast<std::size_t>(bucket)] > 0; };
  int first = 0, last = Histogram::buckets - 1;
  while (first <= last && !has_values(first)) ++first;
  while (first <= last && !has_values(last)) --last;
  std::string limits, counts;
  double num = 0;
  for (int bucket = first; bucket <= last; ++bucket) {
    if (!has_values(bucket) && !has_values(bucket + 1)) continue;
    const auto count = static_cast<double>(h.counts[static_cast<std::size_t>(bucket)]);
    limits += detail::little_endian(Histogram::right_edge(bucket));
    counts += detail::little_endian(count);
    num += count;
  }
  // HistogramProto: min = 1, max = 2, num = 3, sum = 4, sum_squares = 5, bucket_limit = 6, bucket = 7. TensorBoard
  // converts it to the tensor of its plugin; unlike that tensor it has the sums, and old versions read it, too.
  std::string proto;
  for (unsigned field = 1; const double number : {h.min, h.max, num, h.sum, h.sum_squares})
    proto += detail::protobuf_key(field++, 1) + detail::little_endian(number);
  proto += detail::protobuf_bytes(6, limits) + detail::protobuf_bytes(7, counts);
  // Value: tag = 1, histo = 5.
  const std::string entry = detail::protobuf_bytes(1, detail::as_utf8(tag)) + detail::protobuf_bytes(5, proto);
  event(detail::tensorboard_event(step) + detail::protobuf_bytes(5, detail::protobuf_bytes(1, entry)));
}

inline void TensorBoard::write(const Sample& s) {
  samples_ = s.step == sampled_at_ ? samples_ + 1 : 1;
  sampled_at_ = s.step;
  text(samples_ == 1 ? "sample" : fmt::format("sample/{}", samples_), std::max<std::int64_t>(s.step, 0), s.text);
}

inline void TensorBoard::write(const Record& r) {
  if (!on()) return;
  for (const auto& [name, number] : numbers_of(r)) scalar(name, r.step, number);
  flush();
}

inline void TensorBoard::flush() {
  if (!on()) return;
  file_.flush();
  if (file_) return;
  shardlib::detail::warn(
      fmt::format("cannot write to the event file '{}': is the disk full? It gets no more events", path_));
  file_.close();
}

inline void TensorBoard::event(const std::string& payload) {
  const std::string length = detail::little_endian(static_cast<std::uint64_t>(payload.size()));
  file_ << length << detail::little_endian(detail::masked_crc(length)) << payload
        << detail::little_endian(detail::masked_crc(payload));
}

}  // namespace shardlib::run
