// The gradients of the model against finite differences, on all meshes of at most four devices.

#include <shardlib/shardlib.hpp>

#include "model.hpp"

using namespace shardlib;

int main(int argc, char** argv) {
  return run_program(argc, argv, [] {
    launch_on_meshes({"d"}, 4, [](const DevicePtr& device) {
      const Mesh<"d"> mesh(device);
      const auto weights = my::initial_weights<f64>(mesh, {{"V", 8}, {"M", 4}, {"F", 8}});
      const HostArray<i32> inputs({4, 2}, {0, 1, 2, 3, 4, 5, 0, 2}), targets({4, 2}, {1, 2, 3, 4, 5, 0, 1, 3});
      const my::Batch batch{place<Tensor<i32, "B/d L">>(mesh, inputs), place<Tensor<i32, "B/d L">>(mesh, targets)};
      check_gradients(mesh, my::loss<f64>, weights, batch);  // throws where they differ
    });
    return 0;
  });
}
