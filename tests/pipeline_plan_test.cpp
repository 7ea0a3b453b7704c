// --plan of a program whose ranks differ prints the memory of each place along the stage axis.
#include <cstdint>
#include <shardlib/run/plan.hpp>
#include <shardlib/run/training.hpp>
#include <shardlib/shardlib.hpp>
#include <string>

#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

TEST_CASE("a plan for each place along an axis", "[pipeline][plan]") {
  const auto mesh = parse_mesh("d=2,p=3,t=2");
  run::Training training;
  training.plan = true;
  // A step multiplies as many matrices as its place along p, and one.
  const auto body = [&](const DevicePtr& device) {
    const Mesh<"d p t"> all(device);
    const int place = all.axis_index("p");
    REQUIRE((all.axis_index("d") == 0 && all.axis_index("t") == 0));
    run::Program program;
    program.step = [&](const run::Step&) {
      const auto x = ones<f32, "A B">(all, {{"A", 16}, {"B", 16}});
      for (int i = 0; i <= place; ++i) (void)einsum_unreduced<"A B, A B -> A">(x, x);
      return run::StepResult{};
    };
    program.weight_bytes = 1000 * (place + 1);
    run::train(device, training, {}, "", program);
  };
  const auto plans = run::plan_along("p", mesh, body);
  REQUIRE(plans.size() == 3);
  const double one = 2 * 16 * 16;
  for (std::size_t place = 0; place < plans.size(); ++place) {
    REQUIRE(plans[place].weights == 1000 * static_cast<std::int64_t>(place + 1));
    REQUIRE(plans[place].flops == static_cast<double>(place + 1) * one);
    REQUIRE(plans[place].all_flops == 4 * (1 + 2 + 3) * one);
  }
  const std::string text = run::to_string("p", plans);
  REQUIRE(text.starts_with(run::to_string(plans[0])));
  const std::string table = text.substr(text.find("above: a device of p = 0;"));
  REQUIRE(table.find("\n           2    3.000 kB    3.000 kB") != std::string::npos);
  REQUIRE(run::to_string("p", {plans[0]}) == run::to_string(plans[0]));
  // Where all do the same, the FLOPs of all are those of one, as often as there are devices.
  REQUIRE(run::plan(mesh, body).all_flops == 12 * one);
  expect_error([&] { (void)run::plan_along("x", mesh, body); }, "plan_along: the mesh d=2,p=3,t=2 has no axis x");
}
