// Schedules in virtual time: the known overheads and activations of each schedule, the bounds that hold for all of
// them, transfers by hand, and what is refused.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <shardlib/pipeline/communication.hpp>
#include <shardlib/pipeline/schedule.hpp>
#include <shardlib/pipeline/simulate.hpp>
#include <string>
#include <vector>

#include "pipeline_schedules.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::pipeline;
using namespace shardlib::test;

namespace {

bool close(double a, double b) {
  return std::abs(a - b) <= 1e-9 * std::max({1.0, std::abs(a), std::abs(b)});
}

Simulation simulated(const std::string& name, int p, int m, const TaskTimes& whole = {}) {
  const bool two = name.starts_with("interleaved-") || name == "kimi-k2" || name == "dualpipe-v";
  const TaskLists lists = make_schedule(name, two ? 2 * p : p, p).tasks(m);
  return simulate(lists, even_costs(lists, whole));
}

}  // namespace

TEST_CASE("bubbles and activations of each schedule", "[pipeline]") {
  // Forward 1, backward 2, of which half is for the weights: the overhead beyond 3 m, and the activations of each rank.
  struct Row {
    std::string name;
    double overhead2, overhead4;
    std::vector<double> in_flight2, in_flight4;
    double percent2, percent4;  // as tables have them
  };
  const std::vector<Row> table{
      {"gpipe", 3, 9, {4, 4}, {16, 16, 16, 16}, 20.0, 15.8},
      {"1f1b", 3, 9, {2, 1}, {4, 3, 2, 1}, 20.0, 15.8},
      {"eager-1f1b", 3, 9, {3, 1}, {7, 5, 3, 1}, 20.0, 15.8},
      {"interleaved-1f1b", 1.5, 4.5, {2.5, 1.5}, {5.5, 4.5, 3.5, 2.5}, 11.1, 8.6},
      {"interleaved-gpipe", 1.5, 4.5, {4, 4}, {16, 16, 16, 16}, 11.1, 8.6},
      {"kimi-k2", 1.5, 4.5, {3, 2}, {6, 5, 4, 3}, 11.1, 8.6},
      {"zero-bubble", 1, 3, {2, 2}, {4, 4, 4, 4}, 7.7, 5.9},
      {"dualpipe-v", 0.5, 2.5, {2.5, 2.5}, {4.5, 4.5, 4.5, 4.5}, 4.0, 5.0},
  };
  REQUIRE(table.size() == schedule_names().size());
  for (const Row& row : table) {
    INFO(row.name);
    const Simulation small = simulated(row.name, 2, 4), large = simulated(row.name, 4, 16);
    REQUIRE(small.makespan == 12 + row.overhead2);
    REQUIRE(large.makespan == 48 + row.overhead4);
    REQUIRE(close(small.bubble, row.overhead2 / small.makespan));
    REQUIRE(close(large.bubble, row.overhead4 / large.makespan));
    REQUIRE(std::abs(100 * small.bubble - row.percent2) <= 0.0500001);
    REQUIRE(std::abs(100 * large.bubble - row.percent4) <= 0.0500001);
    REQUIRE(small.idle == std::vector<double>(2, row.overhead2));
    REQUIRE(large.idle == std::vector<double>(4, row.overhead4));
    REQUIRE(small.peak_in_flight == row.in_flight2);
    REQUIRE(large.peak_in_flight == row.in_flight4);
  }
}

TEST_CASE("the formulas of the overheads at any size", "[pipeline]") {
  if (world_rank() != 0) return;  // once is enough
  for (int p = 1; p <= 8; ++p) {
    for (const int rounds : {2, 3, 5}) {
      const int m = rounds * p;
      for (const auto& [F, A, W] : {std::array{1.0, 1.0, 1.0}, {1.0, 2.0, 1.0}, {2.0, 1.5, 0.5}}) {
        const TaskTimes times{.fwd = F, .bwd = A + W, .bwdA = A, .bwdW = W};
        const double work = m * (F + A + W), others = p - 1, B = A + W;
        INFO("p " << p << " m " << m << " F " << F << " A " << A << " W " << W);
        for (const std::string name : {"gpipe", "1f1b", "eager-1f1b"})
          REQUIRE(close(simulated(name, p, m, times).makespan, work + others * (F + B)));
        REQUIRE(close(simulated("zero-bubble", p, m, times).makespan, work + others * (F + B - 2 * W)));
        for (const int v : {1, 2, 3, 4}) {
          const TaskLists lists = Interleaved1F1B({.num_stages = v * p, .mpmd_dim = p}).tasks(m);
          const Simulation result = simulate(lists, even_costs(lists, times));
          REQUIRE(close(result.makespan, work + others * (F + B) / v));
          for (int rank = 0; rank < p; ++rank) {
            const int chunks = std::min(v * m, (v - 1) * p + 2 * (p - 1 - rank) + 1);
            REQUIRE(close(result.peak_in_flight[static_cast<std::size_t>(rank)], chunks / static_cast<double>(v)));
          }
        }
      }
      for (int rank = 0; rank < p; ++rank) {
        const auto r = static_cast<std::size_t>(rank);
        REQUIRE(simulated("gpipe", p, m).peak_in_flight[r] == m);
        REQUIRE(simulated("1f1b", p, m).peak_in_flight[r] == p - rank);
        REQUIRE(simulated("eager-1f1b", p, m).peak_in_flight[r] == std::min(m, 2 * (p - rank) - 1));
        REQUIRE(simulated("zero-bubble", p, m).peak_in_flight[r] == p);
        REQUIRE(simulated("dualpipe-v", p, m).peak_in_flight[r] == p + 0.5);
      }
    }
  }
}

TEST_CASE("the overhead of DualPipeV does not depend on the number of microbatches", "[pipeline]") {
  // By the simulator; there is no simple formula, as the end of the pipeline depends on whether a rank is odd.
  const std::vector<double> overheads{0, 0.5, 1.5, 2.5, 4, 5, 6.5, 7.5};
  for (int p = 1; p <= 8; ++p)
    for (const int m : {2 * p, 2 * p + 1, 3 * p, 40})
      REQUIRE(simulated("dualpipe-v", p, m).makespan == 3 * m + overheads[static_cast<std::size_t>(p - 1)]);
}

TEST_CASE("what holds of every simulation", "[pipeline]") {
  if (world_rank() != 0) return;  // once is enough
  std::mt19937 random(11);
  const auto time = [&] { return std::uniform_real_distribution(0.0, 3.0)(random); };
  for (int i = 0; i < 200; ++i) {
    const auto [schedule, microbatches] = any_schedule(random);
    INFO(schedule.name() + ", " + std::to_string(microbatches) + " microbatches");
    const TaskLists lists = schedule.tasks(microbatches);
    const int stages = schedule.num_stages();
    Costs costs{.stages = {}, .latency = time()};
    for (int s = 0; s < stages; ++s) costs.stages.push_back({time(), time(), time(), time()});
    const bool limited = i % 2 == 0;
    if (limited) {
      costs.bytes = time();
      costs.bandwidth = 1.5;
    }
    const Simulation result = simulate(lists, costs);

    std::map<Task, Interval> of;
    double serial = 0;
    for (const Interval& interval : result.intervals) {
      REQUIRE(of.emplace(interval.task, interval).second);
      REQUIRE(interval.rank == schedule.rank_of(interval.task.stage));
      REQUIRE(close(interval.end - interval.begin,
                    costs.stages[static_cast<std::size_t>(interval.task.stage)].of(interval.task.kind)));
      serial += interval.end - interval.begin;
    }
    REQUIRE(of.size() == result.intervals.size());

    // Each task begins when its rank is free and its input is there, not earlier, and without a limit of the bandwidth
    // not later.
    const double transfer = costs.latency + costs.bytes / costs.bandwidth;
    double sent = 0;
    for (const TaskList& list : lists) {
      double free = 0;
      for (const Task& task : parts_of(list)) {
        double ready = free;
        if (input_of(task, stages)) {
          const int source = task.kind == TaskKind::fwd ? task.stage - 1 : task.stage + 1;
          Task made{task.kind == TaskKind::fwd ? TaskKind::fwd : TaskKind::bwd, source, task.microbatch};
          if (!of.contains(made)) made.kind = TaskKind::bwdA;
          const bool crosses = schedule.rank_of(source) != schedule.rank_of(task.stage);
          ready = std::max(ready, of.at(made).end + (crosses ? transfer : 0));
          if (crosses) sent += transfer;
        }
        const double begin = of.at(task).begin;
        REQUIRE((begin > ready || close(begin, ready)));
        if (!limited) REQUIRE(close(begin, ready));
        free = of.at(task).end;
      }
    }

    // The makespan: at least any rank's work and any microbatch's way there and back, at most everything in turn.
    const double ranks = schedule.mpmd_dim();
    double idle = 0;
    for (std::size_t rank = 0; rank < lists.size(); ++rank) {
      double busy = 0;
      for (const Task& task : parts_of(lists[rank])) busy += of.at(task).end - of.at(task).begin;
      REQUIRE(close(result.idle[rank] + busy, result.makespan));
      REQUIRE(result.peak_in_flight[rank] <= microbatches);
      REQUIRE(result.peak_in_flight[rank] > 0);
      idle += result.idle[rank];
    }
    REQUIRE(close(result.bubble, idle / ranks / result.makespan));
    for (int m = 0; m < microbatches; ++m) {
      double way = 0;
      for (int s = 0; s < stages; ++s) {
        const TaskTimes& times = costs.stages[static_cast<std::size_t>(s)];
        way += times.fwd + (of.contains({TaskKind::bwd, s, m}) ? times.bwd : times.bwdA);
        if (s > 0 && schedule.rank_of(s) != schedule.rank_of(s - 1)) way += 2 * transfer;
      }
      REQUIRE((result.makespan > way || close(result.makespan, way)));
    }
    REQUIRE((result.makespan < serial + sent || close(result.makespan, serial + sent)));
  }
}

TEST_CASE("transfers take their time", "[pipeline]") {
  const auto begins = [](const Simulation& result) {
    std::map<std::string, double> out;
    for (const Interval& interval : result.intervals) out[to_string(interval.task)] = interval.begin;
    return out;
  };
  // A message takes 2 on the link and 0.25 until it arrives. The second one waits for the first.
  const TaskLists lists = GPipe(2).tasks(2);
  auto at = begins(simulate(lists, {.latency = 0.25, .bytes = 10, .bandwidth = 5}));
  REQUIRE(at["fwd_0__1"] == 1);
  REQUIRE(at["fwd_1__0"] == 3.25);
  REQUIRE(at["fwd_1__1"] == 5.25);
  REQUIRE(at["bwd_1__0"] == 6.25);
  REQUIRE(at["bwd_1__1"] == 8.25);
  REQUIRE(at["bwd_0__0"] == 10.5);
  REQUIRE(at["bwd_0__1"] == 12.5);
  // The two directions are links of their own: gradients back do not wait for activations there. Other stages have
  // other times.
  at = begins(simulate(Std1F1B(2).tasks(2),
                       {.stages = {{1, 2, 1, 1}, {0.5, 0.5, 1, 1}}, .latency = 0, .bytes = 4, .bandwidth = 1}));
  REQUIRE(at["fwd_1__0"] == 5);
  REQUIRE(at["bwd_1__0"] == 5.5);
  REQUIRE(at["fwd_1__1"] == 9);
  REQUIRE(at["bwd_0__0"] == 10);
  REQUIRE(at["bwd_0__1"] == 14);

  // Eager 1F1B hides what 1F1B waits for.
  const Costs slow{.latency = 1.5};  // half a forward and a backward pass
  const double standard = simulate(Std1F1B(4).tasks(16), slow).makespan;
  const double eager = simulate(Eager1F1B(4).tasks(16), slow).makespan;
  REQUIRE(eager == 57 + 6 * 1.5);
  REQUIRE(standard > eager + 30);
}

TEST_CASE("a part of a fused task hands over when it is done", "[pipeline]") {
  // Stage 1 sends the gradient of its activations before it has that of its weights.
  const TaskLists lists{{Task{TaskKind::fwd, 0, 0}, Task{TaskKind::bwd, 0, 0}},
                        {FusedTask({{TaskKind::fwd, 1, 0}, {TaskKind::bwdA, 1, 0}, {TaskKind::bwdW, 1, 0}})}};
  const Simulation result = simulate(lists, {.stages = {{1, 2, 1, 5}}});
  REQUIRE(result.intervals[1].task == Task{TaskKind::bwd, 0, 0});
  REQUIRE(result.intervals[1].begin == 3);
  REQUIRE(result.makespan == 8);
}

TEST_CASE("a simulation as text", "[pipeline]") {
  REQUIRE(to_string(simulated("interleaved-1f1b", 2, 4)) ==
          "makespan 13.5, bubble 11.11 %\n"
          "rank 0: idle 1.5, activations in flight 2.5\n"
          "rank 1: idle 1.5, activations in flight 1.5\n");
}

TEST_CASE("a simulation that cannot go on shows where", "[pipeline]") {
  const auto fwd = [](int s, int m) { return Task{TaskKind::fwd, s, m}; };
  const auto bwd = [](int s, int m) { return Task{TaskKind::bwd, s, m}; };
  const TaskLists stuck{{fwd(0, 0), bwd(0, 0), fwd(0, 1), bwd(0, 1)}, {fwd(1, 1), bwd(1, 1), fwd(1, 0), bwd(1, 0)}};
  expect_error<UsageError>([&] { (void)simulate(stuck, {}, "mine"); },
                           "mine cannot make progress: its ranks wait for each other; move a task that is waited for "
                           "further ahead in its rank's list\n"
                           "  rank 0 waits at bwd_0__0 for bwd_1__0, which is task 4 of rank 1\n"
                           "  rank 1 waits at fwd_1__1 for fwd_0__1, which is task 3 of rank 0\n"
                           "rank 0: fwd_0__0     >>bwd_0__0<< fwd_0__1 bwd_0__1\n"
                           "rank 1: >>fwd_1__1<< bwd_1__1     fwd_1__0 bwd_1__0\n");
  // A list that lacks a task, with split backward passes and within a fused task.
  const TaskLists lacking{{fwd(0, 0), FusedTask({{TaskKind::bwdA, 0, 0}, {TaskKind::bwdW, 0, 0}})},
                          {fwd(1, 0), Task{TaskKind::bwdW, 1, 0}}};
  expect_error<UsageError>(
      [&] { (void)simulate(lacking); },
      "the schedule cannot make progress: its ranks wait for each other; move a task that is waited "
      "for further ahead in its rank's list\n"
      "  rank 0 waits at bwdA_0__0 for bwdA_1__0, which no rank has\n"
      "  rank 1 waits at bwdW_1__0 for bwdA_1__0, which no rank has\n"
      "rank 0: fwd_0__0 >>FusedTask(bwdA_0__0, bwdW_0__0)<<\n"
      "rank 1: fwd_1__0 >>bwdW_1__0<<\n");
}

TEST_CASE("costs that make no sense", "[pipeline]") {
  const TaskLists lists = GPipe(3).tasks(2);
  const auto refused = [&](const Costs& costs, const std::string& why) {
    expect_error<UsageError>([&] { (void)simulate(lists, costs); }, "simulate: " + why);
  };
  refused({.stages = {{}, {}}},
          "there are task times of 2 stages, but 3 stages; give one for each, or a single one for all");
  refused({.stages = {{}, {1, -2, 1, 1}, {}}},
          "the bwd time of stage 1 is -2; it must be a finite number of at least 0");
  refused({.latency = std::nan("")}, "the latency is nan; it must be a finite number of at least 0");
  refused({.bytes = std::numeric_limits<double>::infinity()},
          "the size of a message is inf; it must be a finite number of at least 0");
  refused({.bandwidth = 0}, "the bandwidth is 0; it must be above 0");
  expect_error<UsageError>(
      [] {
        (void)simulate({{Task{TaskKind::fwd, -1, 0}}});
      },
      "simulate: fwd_-1__0 is of no stage; stages count from 0");
}
