// The trace of a run's first steps: every op and collective of every device, as <run>/trace.json.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/io/agree.hpp"
#include "shardlib/io/file.hpp"
#include "shardlib/io/impl/posix.hpp"
#include "shardlib/run/trace.hpp"
#include "shardlib/runtime/observe.hpp"
#include "shardlib/runtime/op_report.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::run::detail {

/// One device's part of the trace. All devices call the same functions.
class StepTrace {
 public:
  /// Traces `steps` steps from `first` on. The first device writes `path`; no other process needs to see its folder.
  StepTrace(DevicePtr device, std::string path, std::int64_t first, std::int64_t steps)
      : device_(std::move(device)), path_(std::move(path)), first_(first), end_(first + steps) {}

  /// Call `before` and `after` around each step.
  void before(std::int64_t step) {
    if (step < first_ || step >= end_) return;
    if (!trace_.on()) {
      auto place = device_->axes();
      for (auto& axis : place) axis.size = device_->axis_index(axis.name);
      trace_ = Trace(device_->rank(), to_string(place));
      device_->everybody().barrier();
      trace_.start();
    }
    observing_.emplace(device_, [this](const OpReport& ran) { add(ran); });
    noting_.emplace(shardlib::detail::program_state(device_));
    begin_ns_ = Trace::now();
  }
  void after(std::int64_t step) {
    if (observing_) {
      end_part();
      trace_.event({.name = fmt::format("step {}", step),
                    .track = "steps",
                    .begin_ns = begin_ns_,
                    .duration_ns = Trace::now() - begin_ns_});
    }
    noting_.reset();
    observing_.reset();
    if (step + 1 == end_) finish();
  }
  /// Writes the trace if it is not yet written, for a run that ends early. If that fails, throws the same StorageError
  /// on all devices.
  void finish() {
    if (!trace_.on()) return;
    const std::string mine = std::exchange(trace_, Trace()).json();
    std::exception_ptr error;
    if (device_->rank() != 0) {
      const std::uint64_t size = mine.size();
      send(&size, sizeof size);
      send(mine.data(), mine.size());
    } else {
      error = collect(mine);
    }
    io::agree(*device_, "", error);
    written_ = true;
  }
  /// Whether a step was traced, and the file is there.
  [[nodiscard]] bool written() const { return written_; }

 private:
  using ProgramState = shardlib::detail::ProgramState;
  using OpReport = shardlib::detail::OpReport;

  void add(const OpReport& ran) {
    const ProgramState& state = shardlib::detail::program_state(device_);
    const std::string_view pass = state.pass == ProgramState::Pass::forward    ? "forward"
                                  : state.pass == ProgramState::Pass::backward ? "backward"
                                                                               : "update";
    const std::string_view part = state.part ? std::string_view(state.part->name) : std::string_view();
    if (pass != pass_ || part != part_) {
      end_part();
      pass_ = pass;
      part_ = part;
      part_begin_ns_ = ran.begin_ns;
    }
    part_begin_ns_ = std::min(part_begin_ns_, ran.begin_ns);  // an op ends after the ops that it asked for
    part_end_ns_ = ran.end_ns;
    const bool communicates = ran.work.bytes > 0;
    const auto spec = ran.op.spec.empty() ? shardlib::to_string(ran.spec) : shardlib::detail::Text();
    trace_.event({.name = ran.op.name,
                  .spec = ran.op.spec.empty() ? spec.view() : ran.op.spec,
                  .track = communicates ? "collectives" : "ops",
                  .pass = ran.recomputed ? "recomputed" : pass,
                  .part = part,
                  .bytes = communicates ? ran.work.bytes : static_cast<std::int64_t>(ran.bytes),
                  .touched = shardlib::detail::touched(ran),
                  .flops = ran.work.flops,
                  .begin_ns = ran.begin_ns,
                  .duration_ns = ran.end_ns - ran.begin_ns});
    trace_.counter("memory", static_cast<std::int64_t>(device_->pool()->stats().live), ran.end_ns);
  }
  /// Ends the event of the part of the model that has run.
  void end_part() {
    if (!pass_.empty())
      trace_.event({.name = part_.empty() ? std::string(pass_) : fmt::format("{} {}", pass_, part_),
                    .track = "parts",
                    .begin_ns = part_begin_ns_,
                    .duration_ns = part_end_ns_ - part_begin_ns_});
    pass_ = {};
  }
  void send(const void* data, std::size_t bytes) {
    const Buffer message = device_->host_pool()->allocate(bytes);
    std::memcpy(message.data(), data, bytes);
    device_->everybody().send(message, 0).wait();
  }
  Buffer receive(int from, std::size_t bytes) {
    Buffer message = device_->host_pool()->allocate(bytes);
    device_->everybody().recv(message, from).wait();
    return message;
  }
  /// Receives the parts of all devices as files beside `path`, joins them and removes them. An error is kept until all
  /// devices have reported, because the others would otherwise wait forever.
  std::exception_ptr collect(const std::string& mine) {
    std::exception_ptr error;
    const auto attempt = [&](const auto& f) {
      if (error) return;
      try {
        io::detail::on_own_paths(f);
      } catch (const Error&) {
        error = std::current_exception();
      }
    };
    std::vector<std::string> parts;
    for (int rank = 0; rank < device_->size(); ++rank) {
      Buffer message;
      std::string_view text = mine;
      if (rank > 0) {
        const std::uint64_t size = *receive(rank, sizeof size).as<std::uint64_t>();
        message = receive(rank, size);
        text = {message.as<char>(), size};
      }
      attempt([&] {
        const std::string part = path_ + "." + std::to_string(rank);
        io::replace_file(part, io::as_bytes(text));
        parts.push_back(part);
      });
    }
    attempt([&] { merge_traces(parts, path_); });
    for (const std::string& part : parts) std::remove(part.c_str());
    return error;
  }

  DevicePtr device_;
  std::string path_;
  std::int64_t first_, end_;
  bool written_ = false;
  Trace trace_;
  std::int64_t begin_ns_ = 0;  ///< of the step
  std::string_view pass_;      ///< of the part that runs; empty if none does
  std::string part_;
  std::int64_t part_begin_ns_ = 0, part_end_ns_ = 0;
  std::optional<shardlib::detail::Observing> observing_;
  std::optional<shardlib::detail::NoteReads> noting_;
};

}  // namespace shardlib::run::detail
