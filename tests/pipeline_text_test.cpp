// Schedules as text: tasks, CSV files, names.
#include <random>
#include <shardlib/pipeline/schedule.hpp>
#include <string>

#include "pipeline_schedules.hpp"
#include "scratch.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::pipeline;
using namespace shardlib::test;

TEST_CASE("tasks as text", "[pipeline]") {
  for (const std::string text :
       {"fwd_2__0", "bwd_0__13", "bwdA_7__999999", "bwdW_11__2", "FusedTask(fwd_3__0, bwdA_4__1, bwdW_4__1)"})
    REQUIRE(to_string(parse_task(text)) == text);
  REQUIRE(to_string(parse_task("  FusedTask(fwd_3__0,bwd_3__0)\t")) == "FusedTask(fwd_3__0, bwd_3__0)");
  for (const std::string text : {"",
                                 "fwd",
                                 "fwd_",
                                 "fwd_2",
                                 "fwd_2_0",
                                 "fwd_2__",
                                 "fwd___0",
                                 "fwd_-1__0",
                                 "fwd_2__-1",
                                 "fwd_2__0x",
                                 "fwd_2__+1",
                                 "fwd_2__1000000",
                                 "bwdB_2__0",
                                 "Fwd_2__0",
                                 "fwd_2__0 fwd_2__1",
                                 "fwd_2__0, fwd_2__1",
                                 "FusedTask()",
                                 "FusedTask(fwd_2__0,)",
                                 "FusedTask(fwd_2__0",
                                 "FusedTask(FusedTask(fwd_2__0))"})
    expect_error<UsageError>([&] { (void)parse_task(text); },
                             "`" + text +
                                 "` is not a task; write fwd_STAGE__MICROBATCH, bwd_, bwdA_ or bwdW_ likewise (numbers "
                                 "of up to 6 digits), or FusedTask(...) of several, separated by commas");
  REQUIRE(to_string(TaskLists{brief(0, "fwd 0 10 bwd 0"), brief(1, "fwd 0 1 bwd 0")}) ==
          "rank 0: fwd_0__0 fwd_0__10 bwd_0__0\n"
          "rank 1: fwd_1__0 fwd_1__1  bwd_1__0\n");
}

TEST_CASE("schedules as CSV", "[pipeline]") {
  std::mt19937 random(7);
  for (int i = 0; i < 40; ++i) {
    const auto [schedule, microbatches] = any_schedule(random);
    const TaskLists lists = schedule.tasks(microbatches);
    const Schedule again = parse_csv(to_csv(lists), "again.csv");
    REQUIRE(again.tasks(microbatches) == lists);
    REQUIRE(again.num_stages() == schedule.num_stages());
    for (int stage = 0; stage < schedule.num_stages(); ++stage)
      REQUIRE(again.rank_of(stage) == schedule.rank_of(stage));
  }
  REQUIRE(to_csv(Interleaved1F1B({.num_stages = 2, .mpmd_dim = 2}).tasks(2)) ==
          "fwd_0__0,fwd_0__1,bwd_0__0,bwd_0__1\n\"FusedTask(fwd_1__0, bwd_1__0)\",\"FusedTask(fwd_1__1, bwd_1__1)\"\n");

  // As spreadsheets and people write it: a byte order mark, other line ends, empty cells, no quotes, no last line end.
  const Schedule loose = parse_csv(
      "\xEF\xBB\xBF"
      "fwd_0__0, ,bwd_0__0,\r\n,FusedTask(fwd_1__0, bwd_1__0),\"\"\r\n\r\n",
      "loose.csv");
  REQUIRE(to_csv(loose.tasks(1)) == "fwd_0__0,bwd_0__0\n\"FusedTask(fwd_1__0, bwd_1__0)\"\n");
  REQUIRE(parse_csv("fwd_0__0,bwd_0__0", "one.csv").tasks(1).size() == 1);

  expect_error<UsageError>([&] { (void)loose.tasks(2); },
                           "loose.csv: the number of microbatches is 1 and cannot be 2; run 1, or take a schedule that "
                           "is made for any number");
  expect_error<UsageError>(
      [] { (void)parse_csv("fwd_0__0,bwd_0__0\nfwd_1__0,,bwd_1_0\n", "typo.csv"); },
      "typo.csv, row 2, cell 3: `bwd_1_0` is not a task; write fwd_STAGE__MICROBATCH, bwd_, bwdA_ or bwdW_ likewise "
      "(numbers of up to 6 digits), or FusedTask(...) of several, separated by commas");
  for (const std::string empty : {"", "\n", ",,\n \n"})
    expect_error<UsageError>([&] { (void)parse_csv(empty, "empty.csv"); },
                             "empty.csv holds no task; write a row of tasks for each rank");
  expect_error<UsageError>([] { (void)parse_csv("\nfwd_0__0,bwd_0__0\n", "gap.csv"); },
                           "gap.csv, rank 0: it has no stage, so it would only wait; use fewer ranks, or more stages");

  const Scratch scratch;
  put(scratch / "s.csv", to_csv(ZeroBubble(2).tasks(3)));
  REQUIRE(read_csv(scratch / "s.csv").tasks(3) == ZeroBubble(2).tasks(3));
  REQUIRE(make_schedule(scratch / "s.csv", 2, 2).tasks(3) == ZeroBubble(2).tasks(3));
  const std::string none = scratch / "none.csv";
  expect_error<UsageError>([&] { (void)read_csv(none); },
                           "cannot read the schedule '" + none + "': No such file or directory");
  expect_error<UsageError>([&] { (void)read_csv(scratch.path()); },
                           "'" + scratch.path() + "' is a folder: give a file of tasks");
}

TEST_CASE("schedules by name", "[pipeline]") {
  REQUIRE(make_schedule("gpipe", 3, 3).name() == "GPipe(num_stages=3)");
  REQUIRE(make_schedule("1f1b", 3, 3).name() == "Std1F1B(num_stages=3)");
  REQUIRE(make_schedule("eager-1f1b", 3, 3).name() == "Eager1F1B(num_stages=3)");
  REQUIRE(make_schedule("zero-bubble", 3, 3).name() == "ZeroBubble(num_stages=3)");
  REQUIRE(make_schedule("interleaved-1f1b", 6, 3).name() == "Interleaved1F1B(num_stages=6, mpmd_dim=3)");
  REQUIRE(make_schedule("interleaved-gpipe", 6, 3).name() == "InterleavedGPipe(num_stages=6, mpmd_dim=3)");
  REQUIRE(make_schedule("kimi-k2", 6, 3).name() == "KimiK2(num_stages=6, mpmd_dim=3)");
  REQUIRE(make_schedule("dualpipe-v", 6, 3).name() == "DualPipeV(num_stages=6, mpmd_dim=3)");
  for (const std::string& name : schedule_names()) {
    const int stages = name == "dualpipe-v" ? 4 : 2;
    REQUIRE(make_schedule(name, stages, 2).tasks(4).size() == 2);
  }
  expect_error<UsageError>([] { (void)make_schedule("1f1b", 4, 2); },
                           "schedule `1f1b` has 4 stages on 4 ranks, but the program has 4 on 2; choose as many ranks "
                           "and stages as the schedule has, or another schedule");
  expect_error<UsageError>([] { (void)make_schedule("2f2b", 4, 4); },
                           "there is no schedule `2f2b`; there are gpipe, 1f1b, eager-1f1b, zero-bubble, "
                           "interleaved-1f1b, interleaved-gpipe, kimi-k2, dualpipe-v, and files that end in .csv");
}
