// Pipeline schedules: the lists of JaxPP's tutorial, the other schedules' lists by hand, their properties at random
// sizes, CSV, what is refused, and what ranks send each other.
#include <algorithm>
#include <cstddef>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <shardlib/pipeline/communication.hpp>
#include <shardlib/pipeline/schedule.hpp>
#include <shardlib/pipeline/validate.hpp>
#include <string>
#include <utility>
#include <vector>

#include "pipeline_schedules.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::pipeline;
using namespace shardlib::test;

namespace {

std::vector<std::string> texts(const TaskList& list) {
  std::vector<std::string> out;
  for (const FusedTask& task : list) out.push_back(to_string(task));
  return out;
}

/// Runs each rank's operations in their order, as far as step(rank, operation) does them. Returns whether that was all.
template <class F>
bool all_run(const std::vector<Operations>& plan, const F& step) {
  std::vector<std::size_t> place(plan.size());
  for (bool progress = true; std::exchange(progress, false);)
    for (std::size_t rank = 0; rank < plan.size(); ++rank)
      for (; place[rank] < plan[rank].size() && step(rank, plan[rank][place[rank]]); ++place[rank]) progress = true;
  for (std::size_t rank = 0; rank < plan.size(); ++rank)
    if (place[rank] < plan[rank].size()) return false;
  return true;
}

using Ends = std::pair<std::size_t, std::size_t>;  // from, to

/// Runs a plan as the simplest executor would: in order, waiting at each receive, messages between two ranks in the
/// order in which they were sent. False when it hangs.
bool runs_blocking(const std::vector<Operations>& plan) {
  std::map<Ends, std::deque<Message>> channels;
  const bool all = all_run(plan, [&](std::size_t rank, const Operation& operation) {
    const auto peer = static_cast<std::size_t>(operation.peer);
    if (operation.kind == Operation::Kind::send) channels[{rank, peer}].push_back(operation.message);
    if (operation.kind != Operation::Kind::receive) return true;
    auto& channel = channels[{peer, rank}];
    if (channel.empty()) return false;
    expect(channel.front() == operation.message,
           "got the " + to_string(channel.front()) + " for " + to_string(operation));
    channel.pop_front();
    return true;
  });
  if (!all) return false;
  for (const auto& [ends, channel] : channels) expect(channel.empty(), "a message was not received");
  return true;
}

/// Runs a plan as GPUs with NCCL do: receives are posted without waiting, and a task waits for its message. The n-th
/// message from a rank to another one is on its way when both have posted their n-th, and no other message is in its
/// stream. False when it hangs.
bool runs_by_streams(const std::vector<Operations>& plan, int num_stages) {
  std::map<Ends, std::vector<Message>> sent, received;
  std::vector<std::map<Message, std::pair<Ends, std::size_t>>> posted(plan.size());  // between whom, as their n-th
  const bool all = all_run(plan, [&](std::size_t rank, const Operation& operation) {
    const auto peer = static_cast<std::size_t>(operation.peer);
    if (operation.kind == Operation::Kind::send) {
      sent[{rank, peer}].push_back(operation.message);
    } else if (operation.kind == Operation::Kind::receive) {
      const Ends ends{peer, rank};
      posted[rank][operation.message] = {ends, received[ends].size()};
      received[ends].push_back(operation.message);
    } else if (const auto input = input_of(operation.task, num_stages); input && posted[rank].contains(*input)) {
      const auto& [ends, number] = posted[rank].at(*input);
      return number < sent[ends].size();
    }
    return true;
  });
  if (all) expect(sent == received, "NCCL would take a message for another one");
  return all;
}

}  // namespace

TEST_CASE("the lists of JaxPP's tutorial", "[pipeline]") {
  const auto four = Interleaved1F1B({.num_stages = 4, .mpmd_dim = 4}).tasks(4);
  REQUIRE(texts(four[2]) == std::vector<std::string>{"fwd_2__0", "fwd_2__1", "fwd_2__2", "bwd_2__0", "fwd_2__3",
                                                     "bwd_2__1", "bwd_2__2", "bwd_2__3"});
  REQUIRE(texts(four[3]) == std::vector<std::string>{"FusedTask(fwd_3__0, bwd_3__0)", "FusedTask(fwd_3__1, bwd_3__1)",
                                                     "FusedTask(fwd_3__2, bwd_3__2)", "FusedTask(fwd_3__3, bwd_3__3)"});

  const auto eight = Interleaved1F1B({.num_stages = 8, .mpmd_dim = 4}).tasks(4);
  REQUIRE(texts(eight[0]) == std::vector<std::string>{"fwd_0__0", "fwd_0__1", "fwd_0__2", "fwd_0__3", "fwd_4__0",
                                                      "fwd_4__1", "fwd_4__2", "fwd_4__3", "bwd_4__0", "bwd_4__1",
                                                      "bwd_4__2", "bwd_4__3", "bwd_0__0", "bwd_0__1", "bwd_0__2",
                                                      "bwd_0__3"});
  REQUIRE(texts(eight[3]) == std::vector<std::string>{"fwd_3__0", "fwd_3__1", "fwd_3__2", "fwd_3__3",
                                                      "FusedTask(fwd_7__0, bwd_7__0)", "FusedTask(fwd_7__1, bwd_7__1)",
                                                      "FusedTask(fwd_7__2, bwd_7__2)", "FusedTask(fwd_7__3, bwd_7__3)",
                                                      "bwd_3__0", "bwd_3__1", "bwd_3__2", "bwd_3__3"});
}

TEST_CASE("the lists of schedules with one stage a rank", "[pipeline]") {
  const auto gpipe = GPipe(2).tasks(3);
  for (int rank = 0; rank < 2; ++rank)
    REQUIRE(gpipe[static_cast<std::size_t>(rank)] == brief(rank, "fwd 0 1 2 bwd 0 1 2"));

  const auto standard = Std1F1B(3).tasks(4);
  REQUIRE(standard[0] == brief(0, "fwd 0 1 2 bwd 0 fwd 3 bwd 1 2 3"));
  REQUIRE(standard[1] == brief(1, "fwd 0 1 bwd 0 fwd 2 bwd 1 fwd 3 bwd 2 3"));
  REQUIRE(standard[2] == brief(2, "fwd 0 bwd 0 fwd 1 bwd 1 fwd 2 bwd 2 fwd 3 bwd 3"));

  const auto eager = Eager1F1B(3).tasks(6);
  REQUIRE(eager[0] == brief(0, "fwd 0 1 2 3 4 bwd 0 fwd 5 bwd 1 2 3 4 5"));
  REQUIRE(eager[1] == brief(1, "fwd 0 1 2 bwd 0 fwd 3 bwd 1 fwd 4 bwd 2 fwd 5 bwd 3 4 5"));
  REQUIRE(eager[2] == brief(2, "fwd 0 bwd 0 fwd 1 bwd 1 fwd 2 bwd 2 fwd 3 bwd 3 fwd 4 bwd 4 fwd 5 bwd 5"));

  const auto zero = ZeroBubble(3).tasks(4);
  REQUIRE(zero[0] == brief(0, "fwd 0 1 2 bwdA 0 bwdW 0 fwd 3 bwdA 1 bwdW 1 bwdA 2 bwdW 2 bwdA 3 bwdW 3"));
  REQUIRE(zero[1] == brief(1, "fwd 0 1 bwdA 0 fwd 2 bwdA 1 bwdW 0 fwd 3 bwdA 2 bwdW 1 bwdA 3 bwdW 2 3"));
  REQUIRE(zero[2] == brief(2, "fwd 0 bwdA 0 fwd 1 bwdA 1 fwd 2 bwdA 2 bwdW 0 fwd 3 bwdA 3 bwdW 1 2 3"));
}

TEST_CASE("the lists of schedules with several stages a rank", "[pipeline]") {
  const auto dual = DualPipeV({.num_stages = 4, .mpmd_dim = 2}).tasks(4);
  REQUIRE(texts(dual[0]) ==
          std::vector<std::string>{"fwd_0__0", "fwd_0__1", "fwd_0__2", "fwd_3__0", "bwdA_3__0", "bwdW_3__0", "fwd_3__1",
                                   "FusedTask(fwd_0__3, bwdA_3__1, bwdW_3__1)",
                                   "FusedTask(fwd_3__2, bwdA_0__0, bwdW_0__0)", "FusedTask(bwdA_3__2, bwdW_3__2)",
                                   "FusedTask(fwd_3__3, bwdA_0__1, bwdW_0__1)", "FusedTask(bwdA_3__3, bwdW_3__3)",
                                   "FusedTask(bwdA_0__2, bwdW_0__2)", "FusedTask(bwdA_0__3, bwdW_0__3)"});
  REQUIRE(texts(dual[1]) ==
          std::vector<std::string>{
              "fwd_1__0", "fwd_2__0", "fwd_1__1", "fwd_2__1", "fwd_1__2", "FusedTask(bwdA_2__0, bwdW_2__0)",
              "FusedTask(fwd_2__2, bwdA_1__0, bwdW_1__0)", "FusedTask(fwd_1__3, bwdA_2__1, bwdW_2__1)",
              "FusedTask(fwd_2__3, bwdA_1__1, bwdW_1__1)", "FusedTask(bwdA_2__2, bwdW_2__2)",
              "FusedTask(bwdA_1__2, bwdW_1__2)", "bwdA_2__3", "FusedTask(bwdA_1__3, bwdW_1__3)", "bwdW_2__3"});

  // Two rounds of two microbatches.
  const auto rounds = Interleaved1F1B({.num_stages = 4, .mpmd_dim = 2}).tasks(4);
  REQUIRE(texts(rounds[0]) == std::vector<std::string>{"fwd_0__0", "fwd_0__1", "fwd_2__0", "fwd_2__1", "fwd_0__2",
                                                       "bwd_2__0", "fwd_0__3", "bwd_2__1", "fwd_2__2", "bwd_0__0",
                                                       "fwd_2__3", "bwd_0__1", "bwd_2__2", "bwd_2__3", "bwd_0__2",
                                                       "bwd_0__3"});
  const auto ahead = KimiK2({.num_stages = 4, .mpmd_dim = 2}).tasks(4);  // one more forward pass at the beginning
  REQUIRE(texts(ahead[0]) == std::vector<std::string>{"fwd_0__0", "fwd_0__1", "fwd_2__0", "fwd_2__1", "fwd_0__2",
                                                      "fwd_0__3", "bwd_2__0", "fwd_2__2", "bwd_2__1", "fwd_2__3",
                                                      "bwd_0__0", "bwd_0__1", "bwd_2__2", "bwd_2__3", "bwd_0__2",
                                                      "bwd_0__3"});
  const auto apart = InterleavedGPipe({.num_stages = 4, .mpmd_dim = 2}).tasks(2);
  REQUIRE(texts(apart[1]) == std::vector<std::string>{"fwd_1__0", "fwd_1__1", "fwd_3__0", "fwd_3__1", "bwd_3__0",
                                                      "bwd_3__1", "bwd_1__0", "bwd_1__1"});
  const auto fused = Interleaved1F1B({.num_stages = 4, .mpmd_dim = 2, .fuse_steady_state = true}).tasks(4);
  REQUIRE(texts(fused[0]) == std::vector<std::string>{"fwd_0__0", "fwd_0__1", "fwd_2__0", "fwd_2__1",
                                                      "FusedTask(fwd_0__2, bwd_2__0)", "FusedTask(fwd_0__3, bwd_2__1)",
                                                      "FusedTask(fwd_2__2, bwd_0__0)", "FusedTask(fwd_2__3, bwd_0__1)",
                                                      "bwd_2__2", "bwd_2__3", "bwd_0__2", "bwd_0__3"});
}

TEST_CASE("stages and ranks", "[pipeline]") {
  const Schedule looped = Interleaved1F1B({.num_stages = 6, .mpmd_dim = 3});
  REQUIRE(looped.num_stages() == 6);
  REQUIRE(looped.mpmd_dim() == 3);
  REQUIRE(looped.rank_of(4) == 1);
  REQUIRE(looped.stages_of(1) == std::vector<int>{1, 4});
  const Schedule folded = DualPipeV({.num_stages = 6, .mpmd_dim = 3});
  REQUIRE(folded.stages_of(0) == std::vector<int>{0, 5});
  REQUIRE(folded.stages_of(2) == std::vector<int>{2, 3});
  REQUIRE(GPipe(3).stages_of(2) == std::vector<int>{2});
  expect_error<UsageError>([&] { (void)looped.rank_of(6); },
                           "Interleaved1F1B(num_stages=6, mpmd_dim=3): there is no stage 6 among its 6");
}

TEST_CASE("every schedule is valid at every size, and runs with blocking receives", "[pipeline]") {
  if (world_rank() != 0) return;  // once is enough
  std::mt19937 random(5);
  std::set<std::string> seen;
  for (int i = 0; i < 300; ++i) {
    const auto [schedule, microbatches] = any_schedule(random);
    INFO(schedule.name() + ", " + std::to_string(microbatches) + " microbatches");
    seen.insert(schedule.name().substr(0, schedule.name().find('(')));
    const TaskLists lists = schedule.tasks(microbatches);  // validates
    REQUIRE(static_cast<int>(lists.size()) == schedule.mpmd_dim());
    for (int stage = 0; stage < schedule.num_stages(); ++stage)
      REQUIRE(stage_owners(lists)[static_cast<std::size_t>(stage)] == schedule.rank_of(stage));

    // Each stage has each microbatch's tasks once, counted without `validate`.
    std::map<Task, int> count;
    for (const TaskList& list : lists)
      for (const Task& task : parts_of(list)) ++count[task];
    for (int stage = 0; stage < schedule.num_stages(); ++stage) {
      for (int m = 0; m < microbatches; ++m) {
        REQUIRE(count[{TaskKind::fwd, stage, m}] == 1);
        REQUIRE(count[{TaskKind::bwdA, stage, m}] == count[{TaskKind::bwdW, stage, m}]);
        REQUIRE(count[{TaskKind::bwd, stage, m}] + count[{TaskKind::bwdA, stage, m}] == 1);
      }
    }

    const auto plan = communication_plan(lists);
    REQUIRE(runs_blocking(plan));
    // Receives that stand ahead are the same ones in the same order.
    const int ahead = std::uniform_int_distribution(1, 5)(random);
    const auto early = communication_plan(lists, ahead);
    for (const auto& posted : {plan, communication_plan(lists, 1), early})
      REQUIRE(runs_by_streams(posted, schedule.num_stages()));
    for (std::size_t rank = 0; rank < plan.size(); ++rank) {
      std::vector<Operation> a, b;
      std::map<Task, std::ptrdiff_t> posted, run;
      std::ptrdiff_t tasks = 0;
      for (const auto& o : plan[rank])
        if (o.kind != Operation::Kind::receive) a.push_back(o);
      for (const auto& o : early[rank]) {
        if (o.kind != Operation::Kind::receive) b.push_back(o);
        if (o.kind == Operation::Kind::receive) posted[o.task] = tasks;
        if (o.kind == Operation::Kind::run) run[o.task] = tasks++;
      }
      REQUIRE(a == b);
      for (const auto& [task, place] : posted) REQUIRE(place <= std::max<std::ptrdiff_t>(0, run[task] - ahead));
    }
  }
  REQUIRE(seen.size() == 8);
}

TEST_CASE("a rank's operations", "[pipeline]") {
  const auto plan = communication_plan(Std1F1B(2).tasks(2));
  std::string text;
  for (const Operation& operation : plan[0]) text += to_string(operation) + "\n";
  REQUIRE(text ==
          "fwd_0__0\n"
          "send(activation of microbatch 0 from stage 0 to 1, rank 1)\n"
          "fwd_0__1\n"
          "send(activation of microbatch 1 from stage 0 to 1, rank 1)\n"
          "receive(gradient of microbatch 0 from stage 1 to 0, rank 1)\n"
          "bwd_0__0\n"
          "receive(gradient of microbatch 1 from stage 1 to 0, rank 1)\n"
          "bwd_0__1\n");
  // With split backward passes the gradient leaves after the first half, and stages of one rank send nothing.
  const auto dual = communication_plan(DualPipeV({.num_stages = 2, .mpmd_dim = 1}).tasks(2));
  for (const Operation& operation : dual[0]) REQUIRE(operation.kind == Operation::Kind::run);
  const auto zero = communication_plan(ZeroBubble(2).tasks(2))[1];
  for (std::size_t i = 0; i + 1 < zero.size(); ++i) {
    if (zero[i].kind == Operation::Kind::send) REQUIRE(zero[i].task.kind == TaskKind::bwdA);
    if (zero[i].task.kind == TaskKind::bwdA && zero[i].kind == Operation::Kind::run)
      REQUIRE(zero[i + 1].kind == Operation::Kind::send);
  }
  expect_error<UsageError>([&] { (void)communication_plan(GPipe(2).tasks(1), -1); },
                           "communication_plan: receive_ahead is -1; it counts the tasks by which receives are posted "
                           "early, so give 0 or more");
}

TEST_CASE("a message that is needed late is received when it is sent", "[pipeline]") {
  // Rank 1 takes microbatch 1 first, though rank 0 makes it last.
  const Schedule schedule = parse_csv(
      "fwd_0__0,fwd_0__1,bwd_0__1,bwd_0__0\n"
      "fwd_1__1,bwd_1__1,fwd_1__0,bwd_1__0\n",
      "crossed.csv");
  const auto plan = communication_plan(schedule.tasks(2));
  REQUIRE(runs_blocking(plan));
  REQUIRE(runs_by_streams(communication_plan(schedule.tasks(2), 1), 2));
  std::string text;
  for (std::size_t i = 0; i < 3; ++i) text += to_string(plan[1][i]) + "\n";
  REQUIRE(text ==
          "receive(activation of microbatch 0 from stage 0 to 1, rank 0)\n"
          "receive(activation of microbatch 1 from stage 0 to 1, rank 0)\n"
          "fwd_1__1\n");
  REQUIRE(plan[1][0].task == Task{TaskKind::fwd, 1, 0});
}

TEST_CASE("sizes that a schedule has no lists for", "[pipeline]") {
  expect_error<UsageError>([] { GPipe(0); }, "GPipe(num_stages=0): num_stages must be at least 1");
  expect_error<UsageError>([] { Std1F1B(-1); }, "Std1F1B(num_stages=-1): num_stages must be at least 1");
  expect_error<UsageError>([] { Interleaved1F1B({.num_stages = 4, .mpmd_dim = 0}); },
                           "Interleaved1F1B(num_stages=4, mpmd_dim=0): mpmd_dim must be at least 1");
  expect_error<UsageError>(
      [] { InterleavedGPipe({.num_stages = 6, .mpmd_dim = 4}); },
      "InterleavedGPipe(num_stages=6, mpmd_dim=4): every rank must have as many stages as the others, but mpmd_dim "
      "does not divide num_stages; take 8 stages, or another number of ranks");
  expect_error<UsageError>(
      [] { Interleaved1F1B({.num_stages = 6, .mpmd_dim = 4}); },
      "Interleaved1F1B(num_stages=6, mpmd_dim=4): every rank must have as many stages as the others, but mpmd_dim does "
      "not divide num_stages; take 8 stages, or another number of ranks");
  expect_error<UsageError>(
      [] { DualPipeV({.num_stages = 4, .mpmd_dim = 4}); },
      "DualPipeV(num_stages=4, mpmd_dim=4): every rank has two stages, so num_stages must be 2 * mpmd_dim = 8");
  expect_error<UsageError>([] { (void)GPipe(2).tasks(0); },
                           "GPipe(num_stages=2): 0 microbatches; a training step needs at least 1");
  expect_error<UsageError>(
      [] { (void)ZeroBubble(4).tasks(3); },
      "ZeroBubble(num_stages=4): it needs at least num_stages=4 microbatches to fill the pipeline, not 3");
  expect_error<UsageError>(
      [] { (void)DualPipeV({.num_stages = 4, .mpmd_dim = 2}).tasks(3); },
      "DualPipeV(num_stages=4, mpmd_dim=2): it needs at least num_stages=4 microbatches to fill the pipeline, not 3");
  expect_error<UsageError>(
      [] { (void)Interleaved1F1B({.num_stages = 8, .mpmd_dim = 4}).tasks(11); },
      "Interleaved1F1B(num_stages=8, mpmd_dim=4): 11 microbatches make 2 rounds of at least mpmd_dim=4, which must all "
      "have the same size, but 2 does not divide 11; take 10 or 12 microbatches");
}

TEST_CASE("what validate refuses", "[pipeline]") {
  const auto refused = [](const std::string& csv, const std::string& why) {
    expect_error<UsageError>([&] { (void)parse_csv(csv, "mine.csv"); }, "mine.csv" + why);
  };
  refused("fwd_0__0,bwd_0__0,fwd_0__0\n", ", rank 0: fwd_0__0 is listed here twice; remove one");
  refused("bwd_0__0,fwd_0__0\n",
          ", rank 0: bwd_0__0 has no fwd_0__0 before it; the backward pass needs what the forward pass has kept, so "
          "that must come first");
  refused("fwd_0__0,bwdW_0__0,bwdA_0__0\n",
          ", rank 0: bwdW_0__0 has no bwdA_0__0 before it; the gradients of the weights need those of the activations, "
          "so that must come first");
  refused("fwd_0__0,bwdA_0__0\n",
          ", rank 0: bwdW_0__0 is missing, though bwdA_0__0 is there: the weights of stage 0 would lack the gradients "
          "of microbatch 0; add it after that task");
  refused("fwd_0__0\n", ", rank 0: bwd_0__0 is missing; add it, or bwdA_0__0 and bwdW_0__0");
  refused("fwd_0__1,bwd_0__1\n", ", rank 0: fwd_0__0 is missing; each stage takes each microbatch forward once");
  refused("fwd_0__0,bwd_0__0,bwdW_0__0\n",
          ", rank 0: bwdW_0__0 comes after bwd_0__0: bwd is bwdA and bwdW in one, so the gradients would count twice; "
          "keep one of the two forms");
  refused("fwd_0__0,bwdA_0__0,bwd_0__0\n",
          ", rank 0: bwd_0__0 comes after bwdA_0__0: bwd is bwdA and bwdW in one, so the gradients would count twice; "
          "keep one of the two forms");
  refused("fwd_0__0,fwd_0__1,bwd_0__0\nbwd_0__1\n",
          ", rank 1: it has no stage, so it would only wait; use fewer ranks, or more stages");
  refused("fwd_0__0,bwd_0__0,fwd_1__1,bwd_1__1,fwd_0__1,bwd_0__1\nfwd_2__0,fwd_1__0,bwd_1__0\n",
          ", rank 1: fwd_1__0 is listed here, but stage 1 belongs to rank 0, which holds its weights; move it there");
  refused("fwd_0__0,bwd_0__0\nfwd_2__0,bwd_2__0\n",
          ": stage 1 is on no rank; there are 2 lists of tasks, so give it to a rank from 0 to 1");

  // A schedule of one's own whose lists are not for the sizes it was asked for.
  const Schedule wrong("mine", {0}, [](int m) { return GPipe(1).tasks(m + 1); });
  expect_error<UsageError>([&] { (void)wrong.tasks(2); },
                           "mine, rank 0: fwd_0__2 is of a microbatch that does not exist: the microbatches are 0 to "
                           "1; remove it, or run more microbatches");
  const Schedule wide("mine", {0}, [](int m) { return GPipe(2).tasks(m); });
  expect_error<UsageError>([&] { (void)wide.tasks(2); },
                           "mine, rank 1: it has no stage, so it would only wait; use fewer ranks, or more stages");
  expect_error<UsageError>([] { validate("mine", {brief(1, "fwd 0")}, {0}, 1); },
                           "mine, rank 0: fwd_1__0 is of a stage that does not exist: the stages are 0 to 0; remove "
                           "it, or make the schedule for more stages");
  expect_error<UsageError>([] { validate("mine", {}, {}, 1); }, "mine: it has no stage; give it at least one");
  expect_error<UsageError>([] { validate("mine", {brief(0, "fwd 0 bwd 0")}, {0}, 0); },
                           "mine: 0 microbatches; a training step needs at least 1");
}

TEST_CASE("ranks that would wait for each other forever", "[pipeline]") {
  // Rank 1 wants microbatch 1 first, which rank 0 makes only after it has the gradient of microbatch 0.
  CHECK(error_of<UsageError>([] {
          (void)parse_csv("fwd_0__0,bwd_0__0,fwd_0__1,bwd_0__1\nfwd_1__1,bwd_1__1,fwd_1__0,bwd_1__0\n", "stuck.csv");
        }).starts_with("stuck.csv cannot make progress: its ranks wait for each other; "));
}
