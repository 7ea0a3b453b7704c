// libFuzzer over the targets: SHARDLIB_FUZZ_TARGET names one, and scripts/fuzz.sh runs them.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "targets.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace shardlib::fuzz;
  static const Folder folder;
  static const Target& target = []() -> const Target& {
    const char* const wanted = std::getenv("SHARDLIB_FUZZ_TARGET");
    for (const Target& one : targets)
      if (wanted != nullptr && std::string_view(wanted) == one.name) return one;
    std::fprintf(stderr, "SHARDLIB_FUZZ_TARGET names no target; they are:");
    for (const Target& one : targets) std::fprintf(stderr, " %s", one.name);
    std::fprintf(stderr, "\n");
    std::exit(2);
  }();
  try {
    run_target(target, folder, std::string_view(reinterpret_cast<const char*>(data), size));
  } catch (const Defect& defect) {
    std::fprintf(stderr, "%s: %s\n", target.name, defect.what());
    std::abort();
  }
  return 0;
}
