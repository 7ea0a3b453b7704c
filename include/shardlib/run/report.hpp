// report.html: the records of a run, as one page that needs no network. Several runs are shown side by side.
#pragma once

#include <string>
#include <vector>

#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// The report of these runs as an HTML page. A run is the folder of a RunDirectory or a metrics file. Of a run that
/// goes on, the page loads itself again each `every` seconds, which should be how often it is written; 0: never. Throws
/// UsageError for a path that is not a run, Error for a damaged record. `report({"runs/first"})`
[[nodiscard]] SHARDLIB_INLINE std::string report(const std::vector<std::string>& runs, double every = 0);

/// Writes the page to a file. Throws UsageError if it cannot be written. `write_report({"runs/first", "runs/second"},
/// "compare.html")`
SHARDLIB_INLINE void write_report(const std::vector<std::string>& runs, const std::string& file, double every = 0);

/// How often a training run writes its report, in seconds.
inline constexpr double report_interval = 30;

/// Whether a process writes to the run in this folder: false for a metrics file. `goes_on("runs/first")`
[[nodiscard]] SHARDLIB_INLINE bool goes_on(const std::string& run);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/report.hpp"
#endif
