// The op that makes the first NaN: named with its line, forward and backward, on one device of several.
#include "catch.hpp"

#include <cmath>
#include <string>

#include "shardlib/shardlib.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

TEST_CASE("FindNan names the first op whose result has a NaN", "[interop]") {
  on_mesh("d=2", [](const Mesh<"d">& mesh) {
    HostArray<f32> host({4, 2}, {1, 2, 3, 4, 5, -6, -7, 8});
    const auto x = place<Tensor<f32, "B/d L">>(mesh, host);
    const auto logarithm = log(x);
    expect(std::isnan(logarithm.span()[1]) == (mesh.device()->rank() == 1), "without it nothing happens");
    const FindNan guard(mesh);
    static_cast<void>(exp(x));
    static_cast<void>(x / (x - x) * x);  // infinities are numbers
    if (mesh.device()->rank() == 0) {
      static_cast<void>(log(x));
      return;
    }
    const int line = __LINE__ + 1;
    const std::string error = error_of([&] { static_cast<void>(log(x)); });
    expect(error == "log at " + std::string(__FILE__) + ":" + std::to_string(line) +
                        " makes a NaN, the first of this program: element 1 of the shard of `B/d L`, and 2 of its 4 "
                        "elements; look at its operands, of which none had a NaN since FindNan was made (device 1 "
                        "(d=1) of mesh d=2)",
           error);
    // In the padding, a quotient is 0 / 0 for a moment.
    const auto padded = place<Tensor<f32, "B/d L">>(mesh, HostArray<f32>({3, 1}, {1, 2, 3}), {{"B", 3, 4}});
    expect(error_of([&] { static_cast<void>(padded / padded); }) == "no error");
  });
}

TEST_CASE("FindNan looks at the backward pass and at bf16, not at integers", "[interop]") {
  on_mesh("d=1", [](const Mesh<"d">& mesh) {
    const auto x = place<Tensor<f32, "L/d">>(mesh, HostArray<f32>({2}, {0, 1}));
    const FindNan guard(mesh);
    // sqrt's derivative at 0 is infinite, and 0 times that is a NaN.
    const auto loss = [](const Tensor<f32, "L/d">& w) { return sum(sqrt(w) * 0.0); };
    const std::string line = std::string(" at ") + __FILE__ + ":" + std::to_string(__LINE__ - 1);
    const std::string error = error_of([&] { static_cast<void>(value_and_grad(mesh, loss, x)); });
    expect(error.starts_with("map_backward" + line +
                             " makes a NaN, the first of this program: element 0 of the shard of `L/d`"),
           error);
    // A VJP with a kernel of its own for all operands.
    const auto product = [](const Tensor<f32, "L/d">& a, const Tensor<f32, "L/d">& b) {
      const auto y = map([](auto p, auto q) { return sqrt(p) * sqrt(q); }, a, b);
      return sum(y * 0.0);
    };
    struct Both {
      Tensor<f32, "L/d"> a, b;
    };
    const std::string of_both = error_of([&] {
      static_cast<void>(value_and_grad(
          mesh, [&](const Both& w) { return product(w.a, w.b); }, Both{x, x}));
    });
    expect(of_both.find("map_backward at ") == 0, of_both);
    static_cast<void>(cast<i32>(x));
    const std::string narrow = error_of([&] { static_cast<void>(log(cast<bf16>(x) - 2.0)); });
    expect(narrow.starts_with("log at "), narrow);
  });
}
