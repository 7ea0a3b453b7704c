// Predicts the time of a step on hypothetical devices: a roofline for what a device computes, and the alpha-beta model
// for what it communicates.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/device/mesh_axes.hpp"
#include "shardlib/run/accelerators.hpp"
#include "shardlib/run/plan.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// A device's connection along a mesh axis.
struct Link {
  double bandwidth = 0;  ///< bytes/s that a device sends while it receives at the same rate
  double latency = 0;    ///< seconds for an empty message
};

/// A device and its links along each axis of the mesh.
struct Machine {
  double flops = 0;            ///< peak FLOP/s, which MFU is measured against
  double efficiency = 1;       ///< share of the peak that products reach
  double memory = 0;           ///< bytes/s, read and written; 0: memory takes no time
  std::vector<AxisSize> mesh;  ///< the mesh of the device
  std::vector<Link> links;     ///< links in the order of the mesh's axes
  double f32_flops = 0;        ///< the peak of a step whose products are all of f32; 0: `flops`
};

/// The seconds of a step, by what takes them.
struct Prediction {
  double products = 0;  ///< local ops with FLOPs: each by its FLOPs or by memory, whichever is longer
  double rest = 0;      ///< other local ops, those of the optimizer too, by memory
  /// Seconds of the collectives over the same axes.
  struct Communication {
    std::string axes;        ///< "d t"
    int devices = 1;         ///< devices in a group
    double latency = 0;      ///< seconds for latency
    double bandwidth = 0;    ///< seconds for bandwidth
    std::int64_t calls = 0;  ///< calls in a step
  };
  std::vector<Communication> communication;  ///< one entry for each set of axes
  double peak_seconds = 0;                   ///< time of the model's own FLOPs at the peak

  [[nodiscard]] double computing() const { return products + rest; }  ///< products and the rest
  /// Latency and bandwidth of all axes.
  [[nodiscard]] double communicating() const {
    double sum = 0;
    for (const Communication& c : communication) sum = sum + c.latency + c.bandwidth;
    return sum;
  }
  [[nodiscard]] double serial() const { return computing() + communicating(); }  ///< if nothing overlaps
  /// If all communication overlaps with computing.
  [[nodiscard]] double overlapped() const { return std::max(computing(), communicating()); }
};

/// The number of messages in sequence in a collective of n devices, by its best algorithms (Thakur, Rabenseifner and
/// Gropp 2005): ceil(log2 n) for gathers, scatters and scans, twice that for all_reduce, n - 1 for all_to_all and for
/// ops that send their shards one by one (attention, einsums; in attention's backward pass three times as many),
/// else 1. `messages_in_sequence("all_reduce", 8)` is 6.
[[nodiscard]] SHARDLIB_INLINE int messages_in_sequence(std::string_view op, int devices);

/// Predicts the seconds of a planned step. A collective over several axes runs at the speed of the slowest.
/// `predict(plan, machine)`
[[nodiscard]] SHARDLIB_INLINE Prediction predict(const Plan& plan, const Machine& machine);

/// An option that takes a number for each axis of the mesh, with the words of its messages. `name` is the option,
/// `least` the smallest number.
struct AxisOption {
  std::string_view name;
  std::string_view number;  ///< describes a number: finite, and at least `least`
  double least = 0;
  std::string_view slow, fast;  ///< example values for the outermost axis and for the others
};
/// The bandwidth of links, option --plan-bandwidth.
inline constexpr AxisOption plan_bandwidth{"--plan-bandwidth", "number of at least 1, in B/s", 1, "25e9", "300e9"};
/// The latency of links, option --plan-latency.
inline constexpr AxisOption plan_latency{"--plan-latency", "number of at least 0, in seconds", 0, "20e-6", "5e-6"};

/// An example of the option's value, "d=25e9,t=300e9", for the axes over which something is sent. Empty if there are
/// none. `example(plan_bandwidth, mesh)`
[[nodiscard]] SHARDLIB_INLINE std::string example(const AxisOption& option, const std::vector<AxisSize>& mesh);

/// Reads "300e9" for all axes of the mesh, or "d=25e9,t=300e9", one number for each axis. An axis of size 1 may be left
/// out; its number is 0. Throws UsageError. `for_each_axis(plan_bandwidth, "d=25e9,t=300e9", mesh)`
[[nodiscard]] SHARDLIB_INLINE std::vector<double> for_each_axis(const AxisOption& option, const std::string& text,
                                                                const std::vector<AxisSize>& mesh);

/// The prediction as a table to print.
[[nodiscard]] SHARDLIB_INLINE std::string to_string(const Prediction& prediction);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/prediction.hpp"
#endif
