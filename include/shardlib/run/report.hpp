// report.html: what a run has recorded, as one page that needs no network; two or more runs side by side.
#pragma once

#include <string>
#include <vector>

#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// The report of these runs as a page of HTML: folders of RunDirectory, or metrics files. Throws UsageError for what is
/// no run, Error for a damaged record.
[[nodiscard]] SHARDLIB_INLINE std::string report(const std::vector<std::string>& runs);

/// Writes the page to a file. Throws UsageError when that cannot be written. `write_report({"runs/first",
/// "runs/second"}, "compare.html")`
SHARDLIB_INLINE void write_report(const std::vector<std::string>& runs, const std::string& file);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/report.hpp"
#endif
