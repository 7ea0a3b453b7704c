# Run by `cmake -P` before each build: writes the commit of SOURCE, as GIT describes it, into the source file OUTPUT. The
# file changes only with the commit, or when the first file is edited after one.
execute_process(COMMAND "${GIT}" --no-optional-locks -C "${SOURCE}" describe --always --dirty --abbrev=12 "--exclude=*"
                OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT commit MATCHES "^[0-9a-f]+(-dirty)?$")
  set(commit unknown)
endif()
file(CONFIGURE OUTPUT "${OUTPUT}" CONTENT "#include \"shardlib/support/version.hpp\"

namespace shardlib::detail {
std::string commit_text() {
  return \"${commit}\";
}
}  // namespace shardlib::detail
")
