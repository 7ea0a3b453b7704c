// Peaks and memory of accelerators, from their data sheets.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <string_view>

#include "shardlib/memory/region.hpp"

namespace shardlib::run {

/// Figures of an accelerator's data sheet.
struct Accelerator {
  std::string_view name;  ///< what --plan-device calls it
  double flops;           ///< dense FLOP/s of bf16, sums in f32
  double f32_flops;       ///< FLOP/s of f32, not TF32: products of f32 are exact ones (docs/gpus.md)
  double memory;          ///< bytes/s
  double bytes;           ///< size of its memory
};
/// The accelerators that --plan-device knows: those on SXM or OAM boards.
inline constexpr std::array accelerators{
    Accelerator{"a100", 312e12, 19.5e12, 2.04e12, 80e9}, Accelerator{"h100", 989e12, 67e12, 3.35e12, 80e9},
    Accelerator{"h200", 989e12, 67e12, 4.8e12, 141e9}, Accelerator{"b200", 2250e12, 75e12, 7.7e12, 180e9},
    Accelerator{"mi300x", 1307e12, 163.4e12, 5.3e12, 192e9}};

/// The peak FLOP/s of a GPU for products of `dtype`, "f32" or "bf16". `model` is the name that its runtime gives. 0 if
/// it is not one of `accelerators`: other boards, PCIe and NVL, have lower peaks, and an instance of MIG is a part of a
/// GPU. `peak_flops("NVIDIA H100 80GB HBM3", "bf16")` is 989e12.
[[nodiscard]] constexpr double peak_flops(std::string_view model, std::string_view dtype) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  const auto is = [&](std::string_view word, std::string_view name) {
    return std::ranges::equal(word, name, {}, lower, lower);
  };
  double peak = 0;
  while (!model.empty()) {
    const std::size_t end = std::min(model.find_first_of(" -"), model.size());
    const std::string_view word = model.substr(0, end);
    if (is(word, "pcie") || is(word, "nvl") || is(word, "mig")) return 0;
    for (const Accelerator& one : accelerators)
      if (is(word, one.name)) peak = dtype == "bf16" ? one.flops : one.f32_flops;
    model.remove_prefix(std::min(end + 1, model.size()));
  }
  return peak;
}

namespace detail {

/// A device's share of its GPU's peak for products of `dtype`: of `given`, or if that is 0 of the data sheet's. NaN if
/// it is not known, as then the sum over devices is not known either.
inline double gpu_peak(const shardlib::detail::HardwareModel& model, std::string_view dtype, double given) {
  const double peak = given > 0 ? given : peak_flops(model.name, dtype);
  return peak > 0 ? peak / model.sharers : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace detail

}  // namespace shardlib::run
