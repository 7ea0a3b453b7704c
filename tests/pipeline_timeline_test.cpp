// Timelines of pipelines as SVG: what is drawn where, and what is refused.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <regex>
#include <shardlib/pipeline/schedule.hpp>
#include <shardlib/pipeline/timeline.hpp>
#include <string>
#include <utility>
#include <vector>

#include "support.hpp"

using namespace shardlib;
using namespace shardlib::pipeline;
using namespace shardlib::test;

namespace {

int count(const std::string& text, const std::string& what) {
  int n = 0;
  for (auto at = text.find(what); at != text.npos; at = text.find(what, at + 1)) ++n;
  return n;
}

struct Box {
  double x, y, width;
  std::string kind, says;
};

std::vector<Box> boxes(const std::string& svg) {
  static const std::regex pattern(
      "<rect x=\"([0-9.]+)\" y=\"([0-9.]+)\" width=\"([0-9.]+)\" height=\"[0-9.]+\" class=\"task (\\w+)\" "
      "fill-opacity=\"[0-9.]+\"/><title>([^<]*)</title>");
  std::vector<Box> found;
  for (auto i = std::sregex_iterator(svg.begin(), svg.end(), pattern); i != std::sregex_iterator(); ++i)
    found.push_back({std::stod((*i)[1]), std::stod((*i)[2]), std::stod((*i)[3]), (*i)[4], (*i)[5]});
  return found;
}

/// Every element is closed, in order.
bool well_formed(const std::string& svg) {
  static const std::regex tag("<(/?)(\\w+)[^<>]*?(/?)>");
  std::vector<std::string> open;
  for (auto i = std::sregex_iterator(svg.begin(), svg.end(), tag); i != std::sregex_iterator(); ++i) {
    if ((*i)[1].length() > 0) {
      if (open.empty() || open.back() != (*i)[2]) return false;
      open.pop_back();
    } else if ((*i)[3].length() == 0) {
      open.push_back((*i)[2]);
    }
  }
  return open.empty() && count(svg, "<") == std::distance(std::sregex_iterator(svg.begin(), svg.end(), tag), {});
}

}  // namespace

TEST_CASE("a planned timeline", "[pipeline]") {
  const TaskLists lists = ZeroBubble(2).tasks(4);
  const Simulation result = simulate(lists);
  const std::string svg = to_svg({.title = "ZeroBubble, p < 3 & \"m\"", .planned = result.intervals});
  REQUIRE(well_formed(svg));
  REQUIRE(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\""));
  REQUIRE(count(svg, "ZeroBubble, p &lt; 3 &amp; &quot;m&quot;") == 2);
  REQUIRE(count(svg, "planned: 13, bubble 7.692 %") == 1);
  REQUIRE(count(svg, "measured") == 0);
  REQUIRE(count(svg, "later stage") == 0);
  // It fetches nothing: the only address is the name of the language.
  REQUIRE(count(svg, "http") == 1);
  REQUIRE(count(svg, "href") == 0);

  const auto drawn = boxes(svg);
  REQUIRE(drawn.size() == 24);
  const double unit = drawn[0].width;
  for (std::size_t i = 0; i < drawn.size(); ++i) {
    const Interval& interval = result.intervals[i];
    REQUIRE(drawn[i].kind == to_string(interval.task.kind));
    REQUIRE(std::abs(drawn[i].x - drawn[0].x - unit * interval.begin) < 0.2);
    REQUIRE(std::abs(drawn[i].width - unit * (interval.end - interval.begin)) < 0.02);
    REQUIRE((drawn[i].y == drawn[0].y) == (interval.rank == 0));
  }
  REQUIRE(drawn[0].says == "fwd_0__0 on rank 0: 0 to 1");
}

TEST_CASE("planned above measured, on one scale", "[pipeline]") {
  const TaskLists lists = DualPipeV({.num_stages = 4, .mpmd_dim = 2}).tasks(4);
  Costs costs = even_costs(lists, {0.1, 0.2, 0.1, 0.1});
  const Simulation plan = simulate(lists, costs);
  costs.latency = 0.05;
  // Clocks begin anywhere.
  auto measured = simulate(lists, costs).intervals;
  for (Interval& interval : measured) interval.begin += 1000, interval.end += 1000;
  const std::string svg = to_svg({.title = "DualPipeV", .planned = plan.intervals, .measured = measured});
  REQUIRE(well_formed(svg));
  REQUIRE(count(svg, "planned: 1.25 s, bubble 4 %") == 1);
  REQUIRE(count(svg, "measured: 1.4 s, bubble 14.29 %") == 1);
  REQUIRE(count(svg, "paler: a later stage of the rank") == 1);
  const auto drawn = boxes(svg);
  REQUIRE(drawn.size() == 2 * plan.intervals.size());
  const auto& first_measured = drawn[plan.intervals.size()];
  REQUIRE(first_measured.x == drawn[0].x);
  REQUIRE(std::abs(first_measured.width - drawn[0].width) < 0.02);
  REQUIRE(first_measured.y > drawn[plan.intervals.size() - 1].y);
  REQUIRE(first_measured.says == "fwd_0__0 on rank 0: 0 to 50 ms");

  // The longer of the two fills the width, whichever it is.
  for (const auto& [above, below] : {std::pair{plan.intervals, measured}, {measured, plan.intervals}}) {
    double right = 0;
    for (const Box& box : boxes(to_svg({.title = "", .planned = above, .measured = below})))
      right = std::max(right, box.x + box.width);
    REQUIRE(std::abs(right - 1180) < 0.1);
  }
}

TEST_CASE("a timeline of many tasks is wide, within limits", "[pipeline]") {
  const auto opening = [](int microbatches) {
    const std::string svg = to_svg({.title = "", .planned = simulate(GPipe(2).tasks(microbatches)).intervals});
    return svg.substr(svg.find("viewBox"), svg.find(" font-family") - svg.find("viewBox"));
  };
  REQUIRE(opening(1) == "viewBox=\"0 0 1200 150\"");
  REQUIRE(opening(64) == "viewBox=\"0 0 2384 150\"");
  REQUIRE(opening(1000) == "viewBox=\"0 0 8080 150\"");
}

TEST_CASE("timelines that cannot be drawn", "[pipeline]") {
  expect_error<UsageError>([] { (void)to_svg({.title = "empty", .planned = {}}); },
                           "timeline: there is nothing to draw; give it planned or measured intervals");
  const Task task{TaskKind::fwd, 0, 3};
  expect_error<UsageError>(
      [&] {
        (void)to_svg({.title = "", .planned = {}, .measured = {{1, task, 2, 1.5}}});
      },
      "timeline: fwd_0__3 on rank 1 lasts from 2 to 1.5; give a rank of at least 0 and a time that "
      "does not run backwards");
  expect_error<UsageError>(
      [&] {
        (void)to_svg({.title = "", .planned = {{-1, task, 1, 2}}});
      },
      "timeline: fwd_0__3 on rank -1 lasts from 1 to 2; give a rank of at least 0 and a time that "
      "does not run backwards");
  // Tasks without a length, and nothing else, are a picture all the same.
  REQUIRE(well_formed(to_svg({.title = "", .planned = {{0, task, 1, 1}}})));
}
