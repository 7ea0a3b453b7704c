// The version of the library. CMake and the pkg-config file read it from here.
#pragma once

#include <string>

// Until 1.0 a minor version may break programs; a patch version never does. CHANGELOG.md lists the changes.
#define SHARDLIB_VERSION_MAJOR 0
#define SHARDLIB_VERSION_MINOR 1
#define SHARDLIB_VERSION_PATCH 0
/// For `#if SHARDLIB_VERSION >= 200`, which is 0.2.0.
#define SHARDLIB_VERSION (SHARDLIB_VERSION_MAJOR * 10000 + SHARDLIB_VERSION_MINOR * 100 + SHARDLIB_VERSION_PATCH)

namespace shardlib::detail {
/// "0.1.0"
inline std::string version_text() {
  return std::to_string(SHARDLIB_VERSION_MAJOR) + "." + std::to_string(SHARDLIB_VERSION_MINOR) + "." +
         std::to_string(SHARDLIB_VERSION_PATCH);
}

/// The commit of the library's source: "3244ea5c0ffe", with "-dirty" if files had been edited, or "unknown".
#ifdef SHARDLIB_HAS_COMMIT  // of shardlib::compiled from a clone: cmake/ShardlibCommit.cmake writes the definition
std::string commit_text();
#else
inline std::string commit_text() {
  return "unknown";
}
#endif
}  // namespace shardlib::detail
