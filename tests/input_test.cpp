// Paths that are not files, and what stands in the way of writing one.
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <shardlib/io/file.hpp>
#include <shardlib/io/impl/posix.hpp>
#include <shardlib/io/impl/temporary.hpp>
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
           ", and reading that could wait forever; give the path of a regular file";
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
    expect_error<UsageError>([&] { static_cast<void>(options.parse(2, arguments)); }, "--config: " + wanted);
  }
}

TEST_CASE("a path that no later try can open is a usage error", "[io]") {
  const Scratch scratch;
  const std::string loop = scratch / "loop", longest = scratch / std::string(5000, 'x');
  std::filesystem::create_symlink("loop", loop);
  for (const auto& [path, why] : {std::pair{loop, "Too many levels of symbolic links"},
                                  {longest, "File name too long"},
                                  {scratch.path(), "Is a directory"}})
    expect_error<UsageError>([&] { static_cast<void>(io::read_file(path)); }, "cannot read '" + path + "': " + why);
  expect_error<UsageError>([&] { static_cast<void>(io::file_exists(loop)); },
                           "cannot look for '" + loop + "': Too many levels of symbolic links");
  const Scratch other;
  const std::string folder = other / "folder", away = other / "away";
  std::filesystem::create_symlink("not-mounted", away);
  expect_error<StorageError>([&] { io::make_folders(away); },
                             "cannot make the folder '" + away +
                                 "': it is a symbolic link to 'not-mounted', which is not "
                                 "there (is its disk mounted?)");
  io::make_new_folder(folder);
  std::filesystem::create_directory_symlink("..", folder + "/up");
  expect_error<UsageError>(
      [&] { static_cast<void>(io::files_below(folder)); },
      "cannot list the folder '" + folder + "': a symbolic link in it leads to a folder above it; remove the link");
}

TEST_CASE("a file that someone removes while it is written may be written again", "[io]") {
  const Scratch scratch;
  io::make_new_folder(scratch / "folder");
  io::OutputFile file(scratch / "folder/file");
  std::filesystem::remove_all(scratch / "folder");
  const std::string message = error_of<StorageError>([&] { file.commit(true); });
  CHECK_THAT(message,
             Catch::Matchers::StartsWith("cannot rename '" + scratch.path() + "/folder/file.tmp-") &&
                 Catch::Matchers::EndsWith("to '" + scratch.path() + "/folder/file': No such file or directory"));
}

TEST_CASE("an error about an option's value names the option and keeps its kind", "[run]") {
  const auto failing = []<class E>(const E& error) {
    return [error] { naming_option("--load", [&] { throw error; }); };
  };
  expect_error<UsageError>(failing(UsageError("no such file")), "--load: no such file");
  expect_error<StorageError>(failing(StorageError("no rights")), "--load: no rights");
  expect_error<Error>(failing(Error("it is damaged")), "--load: it is damaged");
  CHECK_THROWS_AS(failing(Aborted())(), Aborted);
}

TEST_CASE("a folder takes the place of another, also where the file system cannot swap them", "[io]") {
  const auto check = [](void (*replace)(const std::string&, const std::string&)) {
    const Scratch scratch;
    const std::string from = scratch / "new", to = scratch / "step";
    for (const std::string& path : {from, to}) {
      io::make_new_folder(path);
      put(path + "/file", path);
    }
    put(to + "/old", "old");
    replace(from, to);
    CHECK(files_below(scratch.path()) == std::vector<std::string>{"step/file"});
    CHECK(contents(to + "/file") == from);
    CHECK(error_of([&] { replace(scratch / "none", to); }).find("rename '" + (scratch / "none") + "' to") !=
          std::string::npos);
    CHECK(files_below(scratch.path()) == std::vector<std::string>{"step/file"});
  };
  check(io::replace_folder);
  check(io::detail::replace_by_renames);
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

TEST_CASE("temporaries of dead processes are removed, those of living ones and other files stay", "[io]") {
  if (under_mpi()) return;  // a rank must not fork
  namespace fs = std::filesystem;
  const Scratch scratch;
  /// A process that is in the middle of a file and a folder until it is killed.
  const auto writer = [&](const std::string& name) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      const io::OutputFile file(scratch / name);
      fs::create_directories(io::detail::temporary_name(scratch / name) + "/inner");
      put(scratch / (name + ".ready"), "");
      for (;;) ::pause();
    }
    while (!io::file_exists(scratch / (name + ".ready"))) ::usleep(1000);
    return child;
  };
  const auto count = [&](const std::string& begin) {
    int found = 0;
    for (const auto& entry : fs::directory_iterator(scratch.path()))
      found += entry.path().filename().string().starts_with(begin + ".tmp-") ? 1 : 0;
    return found;
  };
  const pid_t dead = writer("dead"), living = writer("living"), zombie = writer("zombie");
  for (const pid_t child : {dead, zombie}) kill(child, SIGKILL);
  REQUIRE(waitpid(dead, nullptr, 0) == dead);
  siginfo_t ended{};
  REQUIRE(waitid(P_PID, static_cast<id_t>(zombie), &ended, WEXITED | WNOWAIT) == 0);
  const io::OutputFile mine(scratch / "mine");
  // Another process had this one's number before, and another machine has it too.
  const auto owner = io::detail::this_process();
  const auto name = [&](const std::string& begin, const std::string& machine, std::int64_t start) {
    const std::string path = scratch / (begin + ".tmp-" + machine + "-" + std::to_string(owner.process) + "-" +
                                        std::to_string(start) + "-0");
    put(path, "");
    return path;
  };
  name("before", owner.machine, owner.start + 1);
  name("elsewhere", "00000000", 1);
  const std::string old = name("old", "00000000", 1);
  fs::last_write_time(old, fs::file_time_type::clock::now() - std::chrono::hours(25));
  const std::vector<std::string> others{"notes.tmp-", "a.tmp-4000000-0", "b.tmp-12345678-x-1-0",
                                        "c.tmp-123-4000000-1-0"};
  for (const std::string& other : others) put(scratch / other, "");
  CHECK((count("dead") == 2 && count("living") == 2 && count("zombie") == 2 && count("mine") == 1));

  io::remove_stale_temporaries(scratch.path());
  CHECK(count("dead") == 0);
  CHECK(count("zombie") == 0);
  CHECK(count("before") == 0);
  CHECK(count("old") == 0);
  CHECK(count("living") == 2);
  CHECK(count("mine") == 1);
  CHECK(count("elsewhere") == 1);
  for (const std::string& other : others) CHECK(io::file_exists(scratch / other));
  io::remove_stale_temporaries(scratch / "nowhere");

  kill(living, SIGKILL);
  REQUIRE(waitpid(living, nullptr, 0) == living);
  REQUIRE(waitpid(zombie, nullptr, 0) == zombie);
  io::remove_stale_temporaries(scratch.path());
  CHECK(count("living") == 0);
}
