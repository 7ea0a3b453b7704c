// Fully sharded data parallelism for a small fully connected network: the example of seqax's README in C++.
//
//   mlp_fsdp                    eight devices as threads of this process
//   mlp_fsdp --mesh d=2         two
//   mpirun -n 4 mlp_fsdp        four devices as MPI ranks
//   mlp_fsdp --run runs/mlp --steps 100     writes a checkpoint there, and resumes from the newest, on any mesh
#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <vector>

#include <shardlib/io/checkpoint/checkpoint.hpp>
#include <shardlib/io/file.hpp>
#include <shardlib/run/mesh_option.hpp>
#include <shardlib/run/options.hpp>
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

constexpr std::int64_t hidden = 8;  // units of each hidden layer

struct Settings {
  std::string mesh = under_mpi() ? fmt::format("d={}", world_size()) : "d=8", run;
  std::int64_t steps = 51;
};

std::string checkpoints_of(const Settings& settings) {
  return settings.run + "/checkpoints";
}

void train(const DevicePtr& device, const Settings& settings) {
  const Mesh<"d"> mesh(device);
  const std::int64_t in = 8, hidden1 = hidden, hidden2 = hidden, batch = 32;

  // Weights from the host; the type of each says which shard this device keeps.
  const auto w = place<Weights>(
      mesh, std::vector{HostArray<f32>({in, hidden1}), HostArray<f32>({hidden1, hidden2}), HostArray<f32>({hidden2})});
  // spmd places host arrays by the types of the parameters and puts the result together by its type.
  const HostArray<f32> y = spmd(mesh, forward_pass)(HostArray<f32>({batch, in}), w);
  if (y.shape != std::vector<std::int64_t>{batch}) throw Error("forward_pass: the result has the wrong shape");

  // Backward: gradients have the types of the weights, sharded the same way.
  const Sizes sizes{{"batch", batch}, {"in", in}, {"hidden1", hidden1}, {"hidden2", hidden2}};
  Weights trained{random_normal<f32, "in hidden1/d">(mesh, sizes, {0, 1}) * 0.3,
                  random_normal<f32, "hidden1 hidden2/d">(mesh, sizes, {0, 2}) * 0.3,
                  random_normal<f32, "hidden2/d">(mesh, sizes, {0, 3}) * 0.3};
  const auto x = random_normal<f32, "batch/d in">(mesh, sizes, {0, 4});

  // With --run the program resumes from the newest whole checkpoint, which any mesh may have written.
  std::int64_t step = 0;
  if (!settings.run.empty())
    if (const auto newest = io::newest_whole(mesh, checkpoints_of(settings))) {
      step = io::load(mesh, *newest, trained).step;
      if (mesh.rank() == 0 && step >= settings.steps)
        fmt::print("--steps {} leaves nothing to train\n", settings.steps);
    }
  for (; step < settings.steps; ++step) {
    const auto [l, grads] = value_and_grad(mesh, loss, trained, x);
    const f32 value = item(all_reduce<"+d -> ">(l));
    if (mesh.rank() == 0 && step % 10 == 0) fmt::print("step {:2}  loss {:.4f}\n", step, value);
    trained = map_tree([](const auto& p, const auto& g) { return p - g * 0.1; }, trained, grads);
  }
  if (!settings.run.empty()) io::save(mesh, checkpoints_of(settings), step, trained);
  if (mesh.rank() == 0) fmt::print("\n{}\n{}", trained.w1, visualize_sharding(trained.w1));
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    Settings settings;
    run::Options options("mlp_fsdp", "Trains a small network, fully sharded over the devices of axis d.");
    options.add("--mesh", settings.mesh, "devices: threads of this process, or MPI ranks under mpirun",
                run::value_name("d=N"));
    options.add("--steps", settings.steps, "training steps", run::size(0));
    options.add("--run", settings.run, "folder of the run's checkpoints; an existing run is resumed",
                run::value_name("DIR"));
    if (!options.parse(argc, argv)) return 0;
    const auto mesh = run::mesh_of(settings.mesh, "d");
    if (hidden % device_count(mesh) != 0)
      throw UsageError(
          fmt::format("--mesh {}: {} hidden units do not divide over the devices: choose 1, 2, 4 or 8 of them",
                      settings.mesh, hidden));
    // The save after the last step would be too late to find that there can be no such folder.
    if (!settings.run.empty()) naming_option("--run", [&] { io::make_folders(checkpoints_of(settings)); });
    launch(mesh, [&](const DevicePtr& device) { train(device, settings); });
    return 0;
  });
}
