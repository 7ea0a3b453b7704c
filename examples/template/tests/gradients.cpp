// The gradients of the model against finite differences, on one device and on two.

#include <shardlib/shardlib.hpp>

#include "model.hpp"

using namespace shardlib;

int main(int argc, char** argv) {
  return run_program(argc, argv, [] {
    for (const int devices : {1, 2})
      launch({{"d", devices}}, [](const DevicePtr& device) {
        const Mesh<"d"> mesh(device);
        const auto weights = my::initial_weights<f64>(mesh, {{"V", 6}, {"M", 4}, {"F", 8}});
        const HostArray<i32> inputs({2, 3}, {0, 1, 2, 3, 4, 5}), targets({2, 3}, {1, 2, 3, 4, 5, 0});
        const my::Batch batch{place<Tensor<i32, "B/d L">>(mesh, inputs), place<Tensor<i32, "B/d L">>(mesh, targets)};
        check_gradients(mesh, my::loss<f64>, weights, batch);  // throws where they differ
      });
    return 0;
  });
}
