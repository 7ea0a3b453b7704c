// The patch embedding of a vision transformer: images become vectors of their patches, and a small classifier of
// textures learns from them. The embedding is a convolution whose windows do not overlap. It equals an einsum over the
// patches that `split` makes. The program compares both, their gradients too, and trains with the convolution.
//
//   patch_embedding --mesh d=2,t=2                 four devices, as threads of this process
//   mpirun -n 4 patch_embedding --mesh d=2,t=2     four devices, as MPI ranks
//
// Dims: B batch, H height, W width, C colors, Y and X rows and columns of patches, P and Q those of pixels in a patch,
// M model, K classes. Images are sharded over d, the model over t, and the weights at rest over both.
#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <shardlib/run/mesh_option.hpp>
#include <shardlib/run/options.hpp>
#include <shardlib/shardlib.hpp>

using namespace shardlib;

using Images = Tensor<f32, "B/d H W C">;
using Embedded = Tensor<f32, "B/d Y X M/t">;
struct Weights {
  Tensor<f32, "P Q C M/t/d"> patch;
  Tensor<f32, "Y X M/t/d"> position;
  Tensor<f32, "M/t/d K"> head;
};
static_assert(fully_sharded<Mesh<"d t">, Weights>);

auto convolution(const Images& images, const Tensor<f32, "P Q C M/t">& w) -> Embedded {
  return conv_unreduced<"B/d H W C, P Q C M/t -> B/d Y X M/t", "H W, P Q -> Y X">(images, w, {.stride = w.size("P")});
}
auto split_and_einsum(const Images& images, const Tensor<f32, "P Q C M/t">& w) -> Embedded {
  const auto rows = split<"H -> Y P">(images, {{"P", w.size("P")}});
  const auto patches = split<"W -> X Q">(rows, {{"Q", w.size("Q")}});
  return einsum_unreduced<"B/d Y P X Q C, P Q C M/t -> B/d Y X M/t">(patches, w);
}

template <auto Embed>
auto loss(const Weights& w, const Images& images, const Tensor<i32, "B/d">& classes) -> Tensor<f32, "+d +t"> {
  const auto x = Embed(images, all_gather<"P Q C M/t">(w.patch)) + all_gather<"Y X M/t">(w.position);
  const auto seen = mean<"B/d Y X M/t -> B/d M/t">(gelu(x));
  const auto logits = einsum<"B/d M/t, M/t K -> B/d K/t">(seen, all_gather<"M/t K">(w.head));
  return mean<"B/d +t -> +d +t">(cross_entropy(logits, classes));
}

// Noise with horizontal stripes, vertical stripes, a checkerboard, or nothing: four classes. The sign is random.
auto textures(const Mesh<"d t">& mesh, const Sizes& sizes, std::uint64_t number) {
  const auto stripes = [](const auto& i) { return 1.0 - 2.0 * cast<f32>(mod(i, 2)); };
  const auto across = stripes(iota<"H">(mesh, 16));
  const auto down = stripes(iota<"W">(mesh, 16));
  const auto classes = cast<i32>(random_uniform<f32, "B/d">(mesh, sizes, {1, number}) * 4.0);
  const auto signs = sign(random_uniform<f32, "B/d">(mesh, sizes, {2, number}) - 0.5);
  const auto of = [&](int k) { return cast<f32>(equal(classes, k)) * signs; };
  const auto texture = of(2) * across * down + of(0) * across + of(1) * down;  // B/d H W
  return std::pair(random_normal<f32, "B/d H W C">(mesh, sizes, {3, number}) + texture, classes);
}

void train(const Mesh<"d t">& mesh) {
  const Sizes sizes{{"B", 32}, {"H", 16}, {"W", 16}, {"C", 3},  {"P", 4},
                    {"Q", 4},  {"Y", 4},  {"X", 4},  {"M", 32}, {"K", 4}};
  Weights w{random_normal<f32, "P Q C M/t/d">(mesh, sizes, {0, 1}) * 0.15, zeros<f32, "Y X M/t/d">(mesh, sizes),
            random_normal<f32, "M/t/d K">(mesh, sizes, {0, 2}) * 0.2};
  Weights mu = zeros_like(w), nu = zeros_like(w);
  for (std::int64_t step = 0; step <= 100; ++step) {
    const auto [images, classes] = textures(mesh, sizes, static_cast<std::uint64_t>(step));
    const auto [l, grads] = value_and_grad(mesh, loss<convolution>, w, images, classes);
    if (step % 20 == 0) {
      const auto [other, by_split] = value_and_grad(mesh, loss<split_and_einsum>, w, images, classes);
      const auto apart = map_tree([](const auto& a, const auto& b) { return a - b; }, grads, by_split);
      const double most = global_norm(mesh, apart) / global_norm(mesh, grads);
      const float value = item(all_reduce<"">(l)), difference = std::abs(value - item(all_reduce<"">(other)));
      if (mesh.rank() == 0) fmt::print("step {:3}  loss {:.4f}\n", step, value);
      if (!(difference < 5e-5 && most < 5e-5))
        throw Error(
            fmt::format("the embeddings differ: losses by {}, gradients by {} of their norm", difference, most));
    }
    AdamW{.weight_decay = 0}.update(w, mu, nu, grads, 0.01, 1.0, step, [](std::string_view) { return false; });
  }
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    std::string mesh = "d=1,t=1";
    run::Options options("patch_embedding", "Trains a classifier of textures, and compares two embeddings of patches.");
    options.add("--mesh", mesh, "devices: threads of this process, or MPI ranks under mpirun", run::value_name("AXES"));
    if (!options.parse(argc, argv)) return 0;
    launch(run::mesh_of(mesh, "d t"), [](const DevicePtr& device) { train(Mesh<"d t">(device)); });
    return 0;
  });
}
