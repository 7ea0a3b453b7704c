// The trace of a run's first steps: every op and collective of every device, as <run>/trace.json.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/device.hpp"
#include "shardlib/observe.hpp"
#include "shardlib/run/trace.hpp"

namespace shardlib::run::detail {

/// One device's part. All devices call the same functions.
class StepTrace {
 public:
  /// Traces `steps` steps from `first` on. The folder of `path` is one that all processes see.
  StepTrace(std::shared_ptr<Device> device, std::string path, std::int64_t first, std::int64_t steps)
      : device_(std::move(device)), path_(std::move(path)), first_(first), end_(first + steps) {}

  /// Before and after each step; `after` gives the seconds in collectives of a step that was traced.
  void before(std::int64_t step) {
    if (step < first_ || step >= end_) return;
    if (!trace_.on()) {
      auto place = device_->axes();
      for (auto& axis : place) axis.size = device_->coordinate(axis.name);
      trace_ = Trace(device_->index(), to_string(place));
      everybody().barrier();
      trace_.start();
    }
    communication_ns_ = 0;
    observing_.emplace(device_, [this](const State::Ran& ran) { add(ran); });
  }
  std::optional<double> after(std::int64_t step) {
    if (!observing_) return std::nullopt;
    observing_.reset();
    if (step + 1 == end_) finish();
    return static_cast<double>(communication_ns_) * 1e-9;
  }
  /// Writes the trace, if there is one still to write: for a run that ends early.
  void finish() {
    if (!trace_.on()) return;
    trace_.write(part(device_->index()));
    trace_ = Trace();
    everybody().barrier();
    if (device_->index() != 0) return;
    std::vector<std::string> parts;
    for (int rank = 0; rank < device_->count(); ++rank) parts.push_back(part(rank));
    merge_traces(parts, path_);
    for (const std::string& p : parts) std::remove(p.c_str());
  }

 private:
  using State = shardlib::detail::State;

  void add(const State::Ran& ran) {
    const bool communicates = ran.work.bytes > 0;
    const auto spec = ran.op.spec.empty() ? shardlib::to_string(ran.spec) : shardlib::detail::Text();
    trace_.event(ran.op.name, ran.op.spec.empty() ? spec.view() : ran.op.spec, communicates ? "collectives" : "ops",
                 communicates ? ran.work.bytes : static_cast<std::int64_t>(ran.bytes), ran.begin_ns,
                 ran.end_ns - ran.begin_ns);
    if (communicates) communication_ns_ += ran.end_ns - ran.begin_ns - ran.work.inner_ns;
  }
  Communicator& everybody() {
    std::vector<std::string_view> axes;
    for (const AxisSize& axis : device_->axes()) axes.push_back(axis.name);
    return device_->group(axes);
  }
  [[nodiscard]] std::string part(int rank) const { return path_ + "." + std::to_string(rank); }

  std::shared_ptr<Device> device_;
  std::string path_;
  std::int64_t first_, end_;
  Trace trace_;
  std::optional<shardlib::detail::Observing> observing_;
  std::int64_t communication_ns_ = 0;
};

}  // namespace shardlib::run::detail
