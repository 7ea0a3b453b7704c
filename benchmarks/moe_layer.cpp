// The mixture of experts of examples/moe_model.hpp, one layer, forward and backward: rows that are moved by index,
// dropless and with a capacity, and the one-hot form of GShard and Switch with the same capacity, on random numbers.
//
//   moe_layer --tokens 2048 --form one-hot       prints a JSON object: milliseconds of each round, and the loss
//   moe_layer --save numbers.safetensors         writes tokens and weights instead, for another implementation
//
// benchmarks/moe.py compares it with PyTorch.
#include <fmt/format.h>

#include <shardlib/io/formats/safetensors.hpp>
#include <shardlib/run/options.hpp>
#include <shardlib/shardlib.hpp>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../examples/moe_model.hpp"

using namespace shardlib;
using moe::MoeMesh;

namespace {

struct Options {
  std::int64_t tokens = 2048, d_model = 512, d_ff = 512, experts = 8, rounds = 5;
  moe::ModelConfig config;
  std::string form = "dropless", save, mesh = "d=1,e=1,t=1";
};

// The tensors that the layer reads and is differentiated by.
struct Layer {
  moe::Tokens<f32> x;
  Tensor<f32, "M X"> router;
  moe::Experts<f32> experts;
};

// The one-hot form. `dispatch` says which token has which slot of which expert, and `combine` has its weight there;
// both have T X C elements. Products with them choose the tokens of the experts, and add up what the experts give.
moe::Sum one_hot_form(const Layer& w, const moe::ModelConfig& config) {
  const MoeMesh mesh(w.x.device());
  const std::int64_t experts = w.router.size("X");
  const auto shares = softmax<"X">(einsum_unreduced<"P/s/d/e T M, M X -> P/s/d/e T X">(w.x, w.router));
  const auto [best, chosen] = top_k<"X", "K">(shares, config.top_k);
  const auto share = best / sum<"P/s/d/e T K -> P/s/d/e T">(best);
  const auto expert = one_hot<"X">(chosen, experts);
  const auto before =
      split<"R -> T K">(cumsum<"R">(merge<"T K -> R">(expert)) - merge<"T K -> R">(expert), {{"K", config.top_k}});
  const auto place = sum<"P/s/d/e T K X -> P/s/d/e T K">(before * expert);
  const auto slot = cast<f32>(equal(place, cast<f32>(iota<"C">(mesh, moe::slots(config, w.x.size("T"), experts)))));
  const auto combine = einsum_unreduced<"P/s/d/e T K X, P/s/d/e T K C -> P/s/d/e T X C">(expert * share, slot);
  const auto dispatch = cast<f32>(greater(stop_gradient(combine), 0.0));
  const auto shards = shard<"P/s/d/e T M -> P/s/d/e T M/t">(w.x);
  const auto sent = einsum_unreduced<"P/s/d/e T X C, P/s/d/e T M/t -> P/s/d/e X C M/t">(dispatch, shards);
  const auto here = all_to_all<"P/s/d/e X C M/t -> P/s/d X/e C M/t">(sent);
  const auto rows = all_gather<"P/s/d X/e C M/t -> P/s/d X/e C M">(here);
  const auto gate = einsum_unreduced<"P/s/d X/e C M, X/e M F/t -> P/s/d X/e C F/t">(rows, w.experts.w_gate);
  const auto up = einsum_unreduced<"P/s/d X/e C M, X/e M F/t -> P/s/d X/e C F/t">(rows, w.experts.w_up);
  const auto done = einsum<"P/s/d X/e C F/t, X/e M F/t -> P/s/d X/e C M/t">(moe::swiglu(gate, up), w.experts.w_down);
  const auto back = all_to_all<"P/s/d X/e C M/t -> P/s/d/e X C M/t">(done);
  return einsum_unreduced<"P/s/d/e T X C, P/s/d/e X C M/t -> P/s/d/e T M/t">(combine, back);
}

moe::Sum output(const Layer& w, const Options& o) {
  if (o.form == "one-hot") return one_hot_form(w, o.config);
  const auto routed = moe::route(w.x, w.router, o.config);
  return o.form == "dropless" ? moe::dropless(w.x, routed.routing, w.experts)
                              : moe::with_capacity(w.x, routed.routing, w.experts, o.config);
}
moe::Loss loss(const Layer& w, const Options& o) {
  const double numbers = static_cast<double>(o.tokens * o.d_model);
  return sum<"P/s/d/e T M/t -> +d +e +s +t">(square(output(w, o))) / numbers;
}

Layer layer(const MoeMesh& mesh, const Options& o) {
  const std::int64_t places = mesh.size("d") * mesh.size("e") * mesh.size("s");
  const Sizes sizes{{"P", places}, {"T", o.tokens / places}, {"M", o.d_model}, {"X", o.experts}, {"F", o.d_ff}};
  std::uint64_t stream = 0;
  const auto draw = [&]<Spec S>(Tensor<f32, S>& w, std::int64_t fan_in) {
    w = random_normal<f32, S>(mesh, sizes, {1, stream++}) / std::sqrt(static_cast<double>(fan_in));
  };
  Layer w;
  draw(w.x, 1);
  draw(w.router, o.d_model);
  draw(w.experts.w_gate, o.d_model);
  draw(w.experts.w_up, o.d_model);
  draw(w.experts.w_down, o.d_ff);
  return w;
}

void save(const Layer& w, const Options& o) {
  std::vector<io::SafetensorsTensor> tensors;
  for_each_leaf(
      [&](std::string_view name, const auto& leaf) {
        const auto host = fetch(leaf);
        const auto bytes = std::as_bytes(std::span(host.data));
        io::Index shape(host.shape.begin(), host.shape.end());
        tensors.push_back(
            {std::string(name), "F32", shape, [kept = io::Bytes(bytes.begin(), bytes.end())] { return kept; }});
      },
      w);
  io::write_safetensors(o.save, tensors, {});
}

// Forward alone, and forward and backward.
void measure(const Layer& w, const MoeMesh& mesh, const Options& o) {
  std::string forward, both;
  double value = 0;
  const auto timed = [](const auto& f) {
    const auto begin = std::chrono::steady_clock::now();
    f();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  };
  for (std::int64_t round = -1; round < o.rounds; ++round) {  // the first one does not count
    const double once = timed([&] { value = item(all_reduce<"+d +e +s +t -> ">(loss(w, o))); });
    const double twice =
        timed([&] { value = item(all_reduce<"+d +e +s +t -> ">(value_and_grad(mesh, loss, w, o).first)); });
    if (round < 0) continue;
    forward += fmt::format("{}{:.3f}", round == 0 ? "" : ", ", once);
    both += fmt::format("{}{:.3f}", round == 0 ? "" : ", ", twice);
  }
  if (mesh.rank() == 0) fmt::print("{{\"forward\": [{}], \"both\": [{}], \"loss\": {}}}\n", forward, both, value);
}

int program(int argc, char** argv) {
  Options o;
  o.config.top_k = 2;
  run::Options options("moe_layer", "Times one layer of a mixture of experts, forward and backward.");
  options.add("--mesh", o.mesh, "devices along d, e, s and t, which are threads");
  options.add("--tokens", o.tokens, "of the batch", run::size());
  options.add("--d-model", o.d_model, "width of a token", run::size());
  options.add("--d-ff", o.d_ff, "width of an expert", run::size());
  options.add("--experts", o.experts, "number of experts", run::size());
  options.add("--experts-per-token", o.config.top_k, "number of experts per token", run::size());
  options.add("--capacity", o.config.capacity, "slots of an expert, as a multiple of its share", run::at_least(0));
  options.add("--form", o.form, "how tokens reach their experts", run::one_of({"dropless", "capacity", "one-hot"}));
  options.add("--rounds", o.rounds, "how often it is measured", run::size());
  options.add("--save", o.save, "write tokens and weights as a safetensors file instead", run::value_name("FILE"));
  if (!options.parse(argc, argv)) return 0;
  if ((o.form == "dropless") != (o.config.capacity == 0))
    throw UsageError("--capacity: the forms capacity and one-hot take one above 0, and dropless has none");
  launch(parse_mesh(o.mesh), [&](const DevicePtr& device) {
    const MoeMesh mesh(device);
    const Layer w = layer(mesh, o);
    if (o.save.empty())
      measure(w, mesh, o);
    else
      save(w, o);
  });
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] { return program(argc, argv); });
}
