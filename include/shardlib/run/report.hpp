// report.html: what a run has recorded, as one page that needs no network; two or more runs side by side.
#pragma once

#include <string>
#include <vector>

#include "shardlib/detail/inline.hpp"

namespace shardlib::run {

/// The page for these runs: folders of RunDirectory, or metrics files. Throws UsageError for what is no run, Error for
/// a damaged record.
[[nodiscard]] SHARDLIB_INLINE std::string report(const std::vector<std::string>& runs);

/// Writes the page to a file. Throws UsageError when that cannot be written.
SHARDLIB_INLINE void write_report(const std::vector<std::string>& runs, const std::string& file);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/report_inl.hpp"
#endif
