// Files that are no files, and what stands in the way of writing one.
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include <shardlib/io/file.hpp>
#include <shardlib/io/impl/posix.hpp>
#include <shardlib/pipeline/schedule.hpp>
#include <shardlib/run/metrics.hpp>
#include <shardlib/run/options.hpp>

#include "scratch.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

TEST_CASE("a pipe or a device is refused before it is read, by every reader", "[io]") {
  const Scratch scratch;
  const std::string pipe = scratch / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  const auto refused = [](const std::string& path, const std::string& kind) {
    return "cannot read '" + path + "': it is " + kind +
           ", and reading that could wait for ever; give the path of a regular file";
  };
  for (const auto& [path, kind] : {std::pair{pipe, "a pipe"}, std::pair{std::string("/dev/zero"), "a device"}}) {
    const std::string wanted = refused(path, kind);
    expect_error<UsageError>([&] { static_cast<void>(io::read_file(path)); }, wanted);
    expect_error<UsageError>([&] { static_cast<void>(pipeline::read_csv(path)); }, wanted);
    expect_error<UsageError>([&] { static_cast<void>(run::read_records(path)); }, wanted);
    std::int64_t steps = 1;
    run::Options options("trainer", "Trains.");
    options.add("--steps", steps, "steps");
    const std::string config = "--config=" + path;
    const char* const arguments[] = {"trainer", config.c_str()};
    expect_error<UsageError>([&] { static_cast<void>(options.parse(2, arguments)); }, wanted);
  }
}

TEST_CASE("a temporary file follows no link, and takes the place of a dead process's", "[io]") {
  const Scratch scratch;
  const std::string target = scratch / "target", temporary = scratch / "file.tmp";
  put(target, "precious");
  std::filesystem::create_symlink(target, temporary);
  int file = io::detail::create_file(temporary);
  REQUIRE(file >= 0);
  ::close(file);
  CHECK(contents(target) == "precious");
  CHECK(!std::filesystem::is_symlink(temporary));
  put(temporary, "left by a dead process");
  file = io::detail::create_file(temporary);
  REQUIRE(file >= 0);
  ::close(file);
  CHECK(contents(temporary).empty());
}
