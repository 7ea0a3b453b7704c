// The numbers of runs as a table for other programs: spreadsheets, pandas, W&B, MLflow.
#pragma once

#include <string>
#include <vector>

#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// The records of runs as CSV (RFC 4180), one line a step: run, step, time and the numbers of `numbers_of`, each name
/// a column. Cells without a number are empty; numbers that are not finite are nan and inf. Runs are given, and errors
/// are, as for `report`. `to_csv({"runs/first", "runs/second"})`
[[nodiscard]] SHARDLIB_INLINE std::string to_csv(const std::vector<std::string>& runs);

/// The same as a flat JSON object a line, with null for numbers that are not finite:
/// {"run": "first", "step": 0, "time": 1.7e9, "train/loss": 10.8, "speed/mfu": 0.4}. `to_jsonl({"runs/first"})`
[[nodiscard]] SHARDLIB_INLINE std::string to_jsonl(const std::vector<std::string>& runs);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/export.hpp"
#endif
