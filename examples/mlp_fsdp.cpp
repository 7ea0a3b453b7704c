// Fully sharded data parallelism for a small fully connected network: the example of seqax's README in C++.
//
//   mlp_fsdp                    eight devices as threads of this process
//   mlp_fsdp --mesh d=2         two
//   mpirun -n 4 mlp_fsdp        four devices as MPI ranks
#include <shardlib/shardlib.hpp>

using namespace shardlib;

// At rest, weights are sharded over the data parallel axis: `hidden1/d` says that this dim has size `hidden1` in all
// and is sharded over mesh axis d; a device holds (in, hidden1 / size of d).
struct Weights {
  Tensor<f32, "in hidden1/d"> w1;
  Tensor<f32, "hidden1 hidden2/d"> w2;
  Tensor<f32, "hidden2/d"> w3;
};

// Per-device code with explicit communication. If an op's spec disagreed with its operand, or the result with the
// declared return type, this would not compile.
auto forward_pass(const Tensor<f32, "batch/d in">& x, const Weights& w) -> Tensor<f32, "batch/d"> {
  // Weights are gathered just before their use: the core of FSDP.
  const auto w1 = all_gather<"in hidden1/d -> in hidden1">(w.w1);
  // An einsum local to the device. It is "unreduced": a sum over a sharded dim would stay pending, spelled `+d`.
  const auto y = relu(einsum_unreduced<"batch/d in, in hidden1 -> batch/d hidden1">(x, w1));
  const auto w2 = all_gather<"hidden1 hidden2/d -> hidden1 hidden2">(w.w2);
  const auto z = relu(einsum_unreduced<"batch/d hidden1, hidden1 hidden2 -> batch/d hidden2">(y, w2));
  const auto w3 = all_gather<"hidden2/d -> hidden2">(w.w3);
  return einsum_unreduced<"batch/d hidden2, hidden2 -> batch/d">(z, w3);
}

// A loss for the backward pass: partial over d, since each device sums its own part of the batch.
auto loss(const Weights& w, const Tensor<f32, "batch/d in">& x) -> Tensor<f32, "+d"> {
  return mean<"batch/d -> +d">(square(forward_pass(x, w) - 1.0));
}

constexpr std::string_view usage = "usage: mlp_fsdp [--mesh d=N]";

// The mesh that the arguments ask for; empty when they ask for help.
std::vector<AxisSize> chosen_mesh(std::vector<std::string> arguments) {
  std::vector<AxisSize> mesh{{"d", under_mpi() ? world_size() : 8}};
  const std::string mesh_option = "--mesh";
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--help" || arguments[i] == "-h") return {};
    if (arguments[i] == mesh_option && i + 1 < arguments.size()) {
      mesh = parse_mesh(arguments[++i]);
    } else if (arguments[i].starts_with(mesh_option + "=")) {
      mesh = parse_mesh(arguments[i].substr(mesh_option.size() + 1));
    } else {
      throw UsageError(arguments[i] + ": " + std::string(usage));
    }
  }
  if (mesh.size() != 1 || mesh[0].name != "d") throw UsageError("--mesh: the one axis is d, as in --mesh d=4");
  return mesh;
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    const std::vector<AxisSize> chosen = chosen_mesh({argv + 1, argv + argc});
    if (chosen.empty()) {
      if (world_rank() == 0) fmt::print("{}\n", usage);
      return 0;
    }
    launch(chosen, [](const std::shared_ptr<Device>& device) {
      const Mesh<"d"> mesh(device);
      const std::int64_t in = 8, hidden1 = 8, hidden2 = 8, batch = 32;

      // Weights from the host; the type of each says which block this device keeps.
      const auto w = place<Weights>(mesh, std::vector{HostArray<f32>({in, hidden1}), HostArray<f32>({hidden1, hidden2}),
                                                      HostArray<f32>({hidden2})});
      // spmd places host arrays by the types of the parameters and puts the result together by its type.
      const HostArray<f32> y = spmd(mesh, forward_pass)(HostArray<f32>({batch, in}), w);
      if (y.shape != std::vector<std::int64_t>{batch}) throw Error("forward_pass: the result has the wrong shape");

      // Backward: gradients have the types of the weights, sharded the same way.
      Weights trained{
          random_normal<f32, "in hidden1/d">(mesh, {{"in", in}, {"hidden1", hidden1}}, {0, 1}) * 0.3,
          random_normal<f32, "hidden1 hidden2/d">(mesh, {{"hidden1", hidden1}, {"hidden2", hidden2}}, {0, 2}) * 0.3,
          random_normal<f32, "hidden2/d">(mesh, {{"hidden2", hidden2}}, {0, 3}) * 0.3};
      const auto x = random_normal<f32, "batch/d in">(mesh, {{"batch", batch}, {"in", in}}, {0, 4});
      for (int step = 0; step <= 50; ++step) {
        const auto [l, grads] = value_and_grad(mesh, loss, trained, x);
        const f32 value = item(all_reduce<"+d -> ">(l));
        if (mesh.index() == 0 && step % 10 == 0) fmt::print("step {:2}  loss {:.4f}\n", step, value);
        trained = map_tree([](const auto& p, const auto& g) { return p - g * 0.1; }, trained, grads);
      }
      if (mesh.index() == 0) fmt::print("\n{}\n{}", trained.w1, visualize_sharding(trained.w1));
    });
    return 0;
  });
}
