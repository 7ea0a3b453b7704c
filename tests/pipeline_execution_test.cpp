// Pipelines that run: the GPT of examples/gpt_model.hpp in stages gives the loss and all gradients of the whole one
// under every schedule.
#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline_model.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

/// Each schedule for p ranks, with one stage on each (v = 1) and with two. That of the CSV has the first stage on the
/// last rank.
std::vector<pipeline::Schedule> every_schedule(int p) {
  auto all = schedules(p);
  auto lists = pipeline::GPipe(p).tasks(microbatches);
  std::reverse(lists.begin(), lists.end());
  all.push_back(pipeline::parse_csv(pipeline::to_csv(lists), "backwards.csv"));
  return all;
}

/// The names of all weights of the whole model that a rank holds: what it must have gradients of.
std::set<std::string> names_of_rank(const pipeline::Schedule& schedule, int rank, bool tied, const Whole& whole) {
  const auto held = pipeline::LayerMap(schedule, layers).of_rank(rank);
  const bool first = schedule.rank_of(0) == rank, last = schedule.rank_of(schedule.num_stages() - 1) == rank;
  std::set<std::string> names;
  for (const auto& [name, gradient] : whole.gradients) {
    if (name == "embed" ? first || (last && tied) : !name.starts_with("layers/") && last) names.insert(name);
    for (const int layer : held)
      if (name.starts_with("layers/" + std::to_string(layer) + "/")) names.insert(name);
  }
  return names;
}

void expect_unpipelined(const std::string& mesh, bool tied) {
  const Whole& whole = unpipelined(tied, std::string_view(mesh).substr(mesh.find("d=")));
  for (const pipeline::Schedule& schedule : every_schedule(parse_mesh(mesh)[0].size))
    on_mesh(mesh, [&](const DevicePtr& device) {
      const std::string what = schedule.name() + " on " + mesh + (tied ? ", tied" : "");
      const Result result = staged<gpt::Stages<f32>>(device, schedule, whole.weights, tied);
      expect_close(result, whole, what);
      const int rank = device->axis_index("p");
      std::set<std::string> names;
      for (const auto& [name, gradient] : result.gradients) names.insert(name);
      expect(names == names_of_rank(schedule, rank, tied, whole), what + ": gradients of all weights of the rank");
      // The simulator counts what the tasks keep; these are the tapes that were there.
      const auto lists = schedule.tasks(microbatches);
      const double due =
          pipeline::simulate(lists, pipeline::even_costs(lists)).peak_in_flight[static_cast<std::size_t>(rank)];
      expect(std::abs(result.step.peak_in_flight - due) < 1e-9,
             what + ": " + show(result.step.peak_in_flight) + " in flight instead of " + show(due));
    });
}

}  // namespace

TEST_CASE("pipeline: under every schedule loss and all gradients are those of the model that is not cut",
          "[pipeline]") {
  for (const std::string ranks : {"p=1", "p=2", "p=4"})
    for (const std::string stage : {"d=1,s=1,t=1", "d=2,s=1,t=1", "d=1,s=1,t=2", "d=1,s=2,t=1"})
      expect_unpipelined(ranks + "," + stage, false);
  expect_unpipelined("p=2,d=2,s=1,t=2", false);
  expect_unpipelined("p=2,r=2,d=1,s=1,t=1", false);
}

TEST_CASE("pipeline: an embedding that first and last stage share gets the sum of their gradients", "[pipeline]") {
  for (const char* mesh : {"p=2,d=1,s=1,t=1", "p=4,d=1,s=1,t=1", "p=2,d=2,s=1,t=1"}) expect_unpipelined(mesh, true);
}

TEST_CASE("pipeline: when which rank ran which task", "[pipeline]") {
  const Whole& whole = unpipelined(false);
  for (const pipeline::Schedule& schedule : main_schedules(2))
    on_mesh("p=2,d=1,s=1,t=1", [&](const DevicePtr& device) {
      const Result result = staged<gpt::Stages<f32>>(device, schedule, whole.weights, false);
      const auto lists = schedule.tasks(microbatches);
      const auto& mine = result.step.intervals;
      const int rank = device->axis_index("p");
      expect(mine.size() == pipeline::parts_of(lists[static_cast<std::size_t>(rank)]).size(), "one for each task");
      const GptStaged mesh(device);
      const auto all = pipeline::all_intervals(mesh, lists, mine);
      std::size_t tasks = 0, place = 0;
      for (const auto& list : lists) tasks += pipeline::parts_of(list).size();
      expect(all.size() == tasks, schedule.name() + ": the intervals of all ranks");
      for (const auto& interval : all) {
        expect(interval.end >= interval.begin && interval.end < 0, "times of " + to_string(interval.task));
        if (interval.rank != rank) continue;
        expect(interval.task == mine[place].task, "a rank's tasks in its order");
        expect(std::abs(interval.end - interval.begin - (mine[place].end - mine[place].begin)) < 1e-6, "its times");
        ++place;
      }
      // An activation arrives no earlier than it was made, whichever clock.
      for (const auto& made : all)
        for (const auto& taken : all)
          if (made.task.kind == pipeline::TaskKind::fwd && taken.task.kind == pipeline::TaskKind::fwd &&
              made.task.microbatch == taken.task.microbatch && made.task.stage + 1 == taken.task.stage)
            expect(taken.begin >= made.end, to_string(taken.task) + " begins behind " + to_string(made.task));
      expect_error([&] { (void)pipeline::all_intervals(mesh, lists, {}); },
                   "all_intervals: rank " + show(rank) + " gives 0 intervals, but its list has " + show(mine.size()) +
                       " tasks; give the schedule's lists and the intervals of one step");
    });
}

TEST_CASE("pipeline: a weight's gradient has the same bits under all schedules that cut the model alike",
          "[pipeline]") {
  const Whole& whole = unpipelined(false);
  on_mesh("p=2,d=1,s=1,t=1", [&](const DevicePtr& device) {
    const Result first = staged<gpt::Stages<f32>>(device, pipeline::GPipe(2), whole.weights, false);
    for (const pipeline::Schedule& schedule :
         {pipeline::Schedule(pipeline::Std1F1B(2)), pipeline::Schedule(pipeline::Eager1F1B(2)),
          pipeline::Schedule(pipeline::ZeroBubble(2)),
          pipeline::parse_csv("fwd_0__7,fwd_0__6,fwd_0__5,fwd_0__4,fwd_0__3,fwd_0__2,fwd_0__1,fwd_0__0,bwd_0__7,"
                              "bwdA_0__6,bwd_0__5,bwd_0__4,bwd_0__3,bwd_0__2,bwd_0__1,bwd_0__0,bwdW_0__6\n"
                              "fwd_1__7,fwd_1__6,fwd_1__5,fwd_1__4,fwd_1__3,fwd_1__2,fwd_1__1,fwd_1__0,bwd_1__7,"
                              "bwdA_1__6,bwd_1__5,bwd_1__4,bwd_1__3,bwd_1__2,bwd_1__1,bwd_1__0,bwdW_1__6\n",
                              "microbatches in reverse")}) {
      const Result result = staged<gpt::Stages<f32>>(device, schedule, whole.weights, false);
      expect(result.loss == first.loss, schedule.name() + ": the loss's bits");
      for (const auto& [name, gradient] : first.gradients)
        expect(std::memcmp(gradient.data.data(), result.gradients.at(name).data.data(),
                           gradient.data.size() * sizeof(f32)) == 0,
               schedule.name() + ": the bits of " + name);
    }
  });
}
