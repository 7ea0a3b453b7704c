// report.html: the records of a run, as one page that needs no network. Several runs are shown side by side.
#pragma once

#include <string>
#include <vector>

#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// The report of these runs as an HTML page. A run is the folder of a RunDirectory or a metrics file. Throws UsageError
/// for a path that is not a run, Error for a damaged record.
[[nodiscard]] SHARDLIB_INLINE std::string report(const std::vector<std::string>& runs);

/// Writes the page to a file. Throws UsageError if it cannot be written. `write_report({"runs/first", "runs/second"},
/// "compare.html")`
SHARDLIB_INLINE void write_report(const std::vector<std::string>& runs, const std::string& file);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/report.hpp"
#endif
