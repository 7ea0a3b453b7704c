// report.html: the records of a run, as one page that needs no network. Several runs are shown side by side. Also the
// records as a table for other programs: spreadsheets, pandas, W&B, MLflow.
#pragma once

#include <string>
#include <vector>

#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// The report of these runs as an HTML page. A run is the folder of a RunDirectory or a metrics file. While a
/// run is in progress, its page loads itself again each `every` seconds, which should be how often it is written; 0:
/// never. Throws UsageError for a path that is not a run, Error for a damaged record. `report({"runs/first"})`
[[nodiscard]] SHARDLIB_INLINE std::string report(const std::vector<std::string>& runs, double every = 0);

/// Writes the page to a file. Throws UsageError if it cannot be written. `write_report({"runs/first", "runs/second"},
/// "compare.html")`
SHARDLIB_INLINE void write_report(const std::vector<std::string>& runs, const std::string& file, double every = 0);

/// The seconds after which a training run writes its report again.
inline constexpr double report_interval = 30;

/// Whether a process writes to the run in this folder: false for a metrics file. `in_progress("runs/first")`
[[nodiscard]] SHARDLIB_INLINE bool in_progress(const std::string& run);

/// The records of runs as CSV (RFC 4180), one line a step: run, step, time and the numbers of `numbers_of`, each name
/// a column. Cells without a number are empty; numbers that are not finite are nan and inf. Runs are given, and errors
/// are, as for `report`. `to_csv({"runs/first", "runs/second"})`
[[nodiscard]] SHARDLIB_INLINE std::string to_csv(const std::vector<std::string>& runs);
/// The same as a flat JSON object a line, with null for numbers that are not finite:
/// {"run": "first", "step": 0, "time": 1.7e9, "train/loss": 10.8, "speed/mfu": 0.4}. `to_jsonl({"runs/first"})`
[[nodiscard]] SHARDLIB_INLINE std::string to_jsonl(const std::vector<std::string>& runs);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/report.hpp"
#endif
