// The measured peak of the machine. On CPUs, MFU (model FLOPs utilization) is a fraction of it.
#pragma once

#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// The measured f32 FLOP/s of fused multiply-adds from registers on `threads` threads at once (0: one for each core
/// that this process may use). It uses the widest vectors of the CPU, whatever this program was compiled for, because
/// the GEMM library also chooses at run time. It takes about 0.15 s. A GEMM cannot be faster, so a model's FLOPs over
/// its time and this figure is at most 1. Ranks of one machine call it together and add up, so that all share its power
/// budget.
[[nodiscard]] SHARDLIB_INLINE double measured_peak_flops(int threads = 0);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/peak.hpp"
#endif
