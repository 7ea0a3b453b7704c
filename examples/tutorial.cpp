// The program of docs/tutorial.md: a classifier of points in the plane, tensor parallel over t and fully sharded over
// d.
//
//   tutorial                                one device
//   tutorial --mesh d=2,t=2                 four devices, as threads of this process
//   mpirun -n 4 tutorial --mesh d=2,t=2     four devices, as MPI ranks
//
// Dims: B batch, X coordinates of a point, H hidden, C classes.
#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

#include <shardlib/run/mesh_option.hpp>
#include <shardlib/run/options.hpp>
#include <shardlib/shardlib.hpp>

using namespace shardlib;

struct Classifier {
  Tensor<f32, "X H/t/d"> w1;
  Tensor<f32, "H/t/d"> b1;
  Tensor<f32, "H/t/d C"> w2;
  Tensor<f32, "C/t/d"> b2;
};
static_assert(fully_sharded<Mesh<"d t">, Classifier>);

struct Batch {
  Tensor<f32, "B/d X"> points;
  Tensor<i32, "B/d"> labels;
};

auto logits(const Classifier& w, const Tensor<f32, "B/d X">& points) -> Tensor<f32, "B/d C/t"> {
  const auto w1 = all_gather<"X H/t/d -> X H/t">(w.w1);
  const auto b1 = all_gather<"H/t/d -> H/t">(w.b1);
  const auto hidden = relu(einsum_unreduced<"B/d X, X H/t -> B/d H/t">(points, w1) + b1);
  const auto w2 = all_gather<"H/t/d C -> H/t C">(w.w2);
  const auto b2 = all_gather<"C/t/d -> C/t">(w.b2);
  const auto partial = einsum_unreduced<"B/d H/t, H/t C -> B/d C +t">(hidden, w2);
  return reduce_scatter<"B/d C +t -> B/d C/t">(partial) + b2;
}

auto loss(const Classifier& w, const Batch& batch) -> Tensor<f32, "+d +t"> {
  return mean<"B/d +t -> +d +t">(cross_entropy(logits(w, batch.points), batch.labels));
}

auto accuracy(const Classifier& w, const Batch& batch) -> Tensor<f32, ""> {
  const auto guesses = argmax<"B/d C -> B/d">(all_gather<"B/d C/t -> B/d C">(logits(w, batch.points)));
  return all_reduce<"+d -> ">(mean<"B/d -> +d">(cast<f32>(equal(guesses, batch.labels))));
}

// Points of the square from -1 to 1. The class is the ring around the center in which the point lies.
auto draw(const Mesh<"d t">& mesh, const Sizes& sizes, std::uint64_t number) -> Batch {
  const auto points = random_uniform<f32, "B/d X">(mesh, sizes, {1, number}) * 2.0 - 1.0;
  const auto radius = sqrt(sum<"B/d X -> B/d">(square(points)));
  return {points, cast<i32>(minimum(radius * 6.0, 7.0))};
}

void train(const Mesh<"d t">& mesh) {
  const Sizes sizes{{"B", 256}, {"X", 2}, {"H", 64}, {"C", 8}};
  Classifier weights{random_normal<f32, "X H/t/d">(mesh, sizes, {0, 1}),
                     random_normal<f32, "H/t/d">(mesh, sizes, {0, 2}),
                     random_normal<f32, "H/t/d C">(mesh, sizes, {0, 3}) * 0.125, zeros<f32, "C/t/d">(mesh, sizes)};
  Classifier mu = zeros_like(weights), nu = zeros_like(weights);
  for (std::int64_t step = 0; step <= 500; ++step) {
    const Batch batch = draw(mesh, sizes, static_cast<std::uint64_t>(step));
    const auto [l, grads] = value_and_grad(mesh, loss, weights, batch);
    if (step % 100 == 0) {
      const float value = item(all_reduce<"+d +t -> ">(l)), right = item(accuracy(weights, batch));
      if (mesh.rank() == 0) fmt::print("step {:3}  loss {:.4f}  accuracy {:3.0f} %\n", step, value, 100 * right);
    }
    const double scale = clip_factor(global_norm(mesh, grads), 1.0);
    AdamW{.weight_decay = 0}.update(weights, mu, nu, grads, 0.01, scale, step, [](std::string_view) { return false; });
  }
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    std::string mesh = "d=1,t=1";
    run::Options options("tutorial", "Trains a classifier of points in the plane.");
    options.add("--mesh", mesh, "devices: threads of this process, or MPI ranks under mpirun", run::value_name("AXES"));
    if (!options.parse(argc, argv)) return 0;
    launch(run::mesh_of(mesh, "d t"), [](const DevicePtr& device) { train(Mesh<"d t">(device)); });
    return 0;
  });
}
