// Two translation units that include the whole library and use tensors, partly with the same instantiations: linking
// them shows that no header defines a symbol twice, running them that both see one library.
#include <string>

#include <shardlib/shardlib.hpp>

using namespace shardlib;

auto product(const Tensor<f32, "A/d B">& x, const Tensor<f32, "B C">& y) -> Tensor<f32, "A/d C">;  // other.cpp

int main(int argc, char** argv) {
  return run_program(argc, argv, [] {
    launch({{"d", under_mpi() ? world_size() : 2}}, [](const DevicePtr& device) {
      const Mesh<"d"> mesh(device);
      const Sizes sizes{{"A", 4}, {"B", 3}, {"C", 5}};
      const auto z = product(ones<f32, "A/d B">(mesh, sizes), ones<f32, "B C">(mesh, sizes));
      const f32 total = item(all_reduce<"+d -> ">(sum(z)));
      if (total != 4 * 3 * 5) throw Error("the sum of the product is " + std::to_string(total));
      // Counted by the ops of both units in one place.
      const auto& counts = detail::program_state(device).counts;
      if (counts.at("ones").calls != 3) throw Error("the other unit has a state of its own");
    });
    return 0;
  });
}
