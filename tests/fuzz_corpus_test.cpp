// The files of tests/fuzz/corpus through their readers: what the fuzzer starts from, and what it has found.
#include <filesystem>
#include <string>

#include "fuzz/targets.hpp"
#include "scratch.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

TEST_CASE("fuzz: the readers take every file of the corpus, or say in a sentence why not", "[fuzz]") {
  if (world_rank() != 0) return;
  const fuzz::Folder folder;
  for (const fuzz::Target& target : fuzz::targets) {
    std::size_t files = 0, read = 0;
    for (const auto& entry : std::filesystem::directory_iterator(std::string(SHARDLIB_FUZZ_CORPUS "/") + target.name)) {
      INFO(entry.path().string());
      const std::string input = contents(entry.path().string());
      CHECK_NOTHROW(fuzz::run_target(target, folder, input));
      ++files;
      try {
        target.run(folder, input);
        ++read;
      } catch (const Error&) {
      }
    }
    INFO(target.name);
    CHECK(files >= 2);
    CHECK(read >= 1);  // one at least is not a mistake
    const std::string name = target.name;
    CHECK((read < files || name == "text" || name == "tokenizer_text" || name == "spec"));  // and one is, for targets that throw
  }
}

}  // namespace
