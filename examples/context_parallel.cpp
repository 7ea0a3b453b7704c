// Causal attention over a sequence whose length is sharded: ring attention, where keys and values travel around the
// ring of devices (Liu et al., 2023, arXiv:2310.01889), and Ulysses, where the heads take over the length's axis
// (Jacobs et al., 2023, arXiv:2309.14509), both spelled in other ops, and the library's op of each. The rings also take
// the positions in zigzag order, in which the op computes the same on all devices. A sequence holds three texts, and a
// position sees only its own; the borders of the texts lie within the devices' shards. All are compared with attention
// over the whole sequence.
//
//   context_parallel                             four devices as threads of this process
//   context_parallel --mesh s=2 --length 512     two, and another length
//   mpirun -n 4 context_parallel                 four devices as MPI ranks
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>

#include <shardlib/run/mesh_option.hpp>
#include <shardlib/run/options.hpp>
#include <shardlib/shardlib.hpp>

using namespace shardlib;

using Heads = Tensor<f32, "B L/s H D">;
using Segments = Tensor<i32, "B L/s">;  // which of the sequence's texts a position belongs to
struct Operands {
  Heads q, k, v;
};

// ---- ring attention ------------------------------------------------------------------------------------------------

// Two sharded lengths cannot stand in one product. So the length is split into R, the places in the ring, and the
// positions of one place: C of queries, J of keys. Each device has one place.
struct Keys {
  Tensor<f32, "B R/s J H D"> k, v;
  Tensor<i32, "R/s J"> positions;
  Tensor<i32, "B R/s J"> segments;
};

// The softmax of the keys seen so far: the largest score, the sum of exp(score - highest), and the weighted values.
struct Seen {
  Tensor<f32, "B R/s C H"> highest, total;
  Tensor<f32, "B R/s C H D"> values;
};

// Attention to the keys that this device holds now, without communication.
auto attend(const Seen& seen, const Tensor<f32, "B R/s C H D">& q, const Tensor<i32, "R/s C">& positions,
            const Tensor<i32, "B R/s C">& segments, const Keys& keys) -> Seen {
  const auto products = einsum_unreduced<"B R/s C H D, B R/s J H D -> B R/s C H J">(q, keys.k);
  const auto sees = logical_and(equal(segments, keys.segments), greater_equal(positions, keys.positions));
  const auto scores = where(sees, products, -std::numeric_limits<double>::infinity());
  // The result does not depend on `highest`, which only keeps exp from overflowing: it needs no derivative.
  const auto highest = maximum(seen.highest, max<"B R/s C H J -> B R/s C H">(stop_gradient(scores)));
  const auto share = exp(scores - highest);
  const auto kept = exp(seen.highest - highest);
  return {highest, seen.total * kept + sum<"B R/s C H J -> B R/s C H">(share),
          seen.values * kept + einsum_unreduced<"B R/s C H J, B R/s J H D -> B R/s C H D">(share, keys.v)};
}

auto ring_attention(const Operands& x, const Segments& segments, double scale, SequenceOrder order) -> Heads {
  const Mesh<"s"> mesh(x.q.device());
  const Sizes places{{"R", mesh.size("s")}};
  const auto q = split<"L/s -> R/s C">(x.q * scale, places);
  const auto positions = split<"L/s -> R/s C">(sequence_positions<"L/s">(mesh, x.q.size("L"), order), places);
  const auto texts = split<"L/s -> R/s C">(segments, places);
  Keys keys{split<"L/s -> R/s J">(x.k, places), split<"L/s -> R/s J">(x.v, places), rename<"C -> J">(positions),
            rename<"C -> J">(texts)};
  // A position sees itself, so that the first block, the device's own, makes `highest` finite.
  const auto none = sum<"B R/s C H D -> B R/s C H">(q) * 0.0;
  Seen seen{stop_gradient(none - std::numeric_limits<double>::infinity()), none, q * 0.0};
  for (std::int64_t left = mesh.size("s") - 1; left >= 0; --left) {
    // The next block travels while the device attends to this one.
    const Keys next = left > 0 ? map_tree([](const auto& part) { return shift<over<"s">>(part, 1); }, keys) : keys;
    seen = explicit_activation_checkpointing(attend)(seen, q, positions, texts, keys);
    keys = next;
  }
  return merge<"R/s C -> L/s">(seen.values / seen.total);
}

// ---- Ulysses -------------------------------------------------------------------------------------------------------

// Each device attends with some of the heads, over the whole length, which comes in the contiguous order.
auto attention_by_heads(const Operands& x, const Segments& segments, double scale, SequenceOrder /*contiguous*/)
    -> Heads {
  const auto by_heads = [](const Heads& part) { return all_to_all<"B L/s H D -> B L H/s D">(part); };
  const auto y = causal_attention<"L", "D">(by_heads(x.q), by_heads(x.k), by_heads(x.v),
                                            all_gather<"B L/s -> B L">(segments), scale);
  return all_to_all<"B L H/s D -> B L/s H D">(y);
}

// ---- the ops of both ----------------------------------------------------------------------------------------------

// Keys and values travel inside the op.
auto fused_ring(const Operands& x, const Segments& segments, double scale, SequenceOrder order) -> Heads {
  return causal_attention<"L", "D", over<"s">>(x.q, x.k, x.v, segments, scale, order);
}

auto fused_ulysses(const Operands& x, const Segments& segments, double scale, SequenceOrder /*contiguous*/) -> Heads {
  return ulysses_attention<"L/s H -> L H/s", "D">(x.q, x.k, x.v, segments, scale);
}

// ---- the comparison -----------------------------------------------------------------------------------------------

// Every device has all keys and all scores of its queries.
auto whole_attention(const Operands& x, const Segments& segments, double scale, SequenceOrder order) -> Heads {
  const auto whole = [](const Heads& part) { return rename<"L -> J">(all_gather<"B L/s H D -> B L H D">(part)); };
  const auto positions = sequence_positions<"L/s">(Mesh<"s">(x.q.device()), x.q.size("L"), order);
  const auto before = greater_equal(positions, rename<"L -> J">(all_gather<"L/s -> L">(positions)));
  const auto sees = logical_and(equal(segments, rename<"L -> J">(all_gather<"B L/s -> B L">(segments))), before);
  const auto products = einsum_unreduced<"B L/s H D, B J H D -> B H L/s J">(x.q * scale, whole(x.k));
  const auto share = softmax<"J">(where(sees, products, -1e30));
  return einsum_unreduced<"B H L/s J, B J H D -> B L/s H D">(share, whole(x.v));
}

using Attention = Heads (*)(const Operands&, const Segments&, double, SequenceOrder);

auto loss(const Operands& x, const Heads& weights, const Segments& segments, double scale, SequenceOrder order,
          Attention attention) -> Tensor<f32, "+s"> {
  return sum<"B L/s H D -> +s">(attention(x, segments, scale, order) * weights);
}

// The largest difference between two tensors, as a part of the largest element of the second.
double difference(const Heads& a, const Heads& b) {
  const auto largest = [](const Heads& x) { return item(all_reduce_max<"L/s -> ">(max<"B L/s H D -> L/s">(abs(x)))); };
  return static_cast<double>(largest(a - b)) / static_cast<double>(largest(b));
}

void compare(const DevicePtr& device, std::int64_t length, std::int64_t heads) {
  const Mesh<"s"> mesh(device);
  const Sizes sizes{{"B", 2}, {"L", length}, {"H", heads}, {"D", 32}};
  const auto random = [&](std::uint32_t stream) { return random_normal<f32, "B L/s H D">(mesh, sizes, {0, stream}); };
  const Operands x{random(1), random(2), random(3)};
  const Heads weights = random(4);
  const double scale = 0.25;
  const auto check = [&](const char* name, SequenceOrder order, Attention attention) {
    const auto texts =
        floor_divide(sequence_positions<"L/s">(mesh, length, order), static_cast<double>(length / 3 + 1));
    const Segments segments = broadcast<"L/s -> B L/s">(texts, sizes);
    const auto gradients = [&](Attention of) {
      return std::get<1>(value_and_grad(mesh, loss, x, weights, segments, scale, order, of));
    };
    const auto grads = gradients(attention), expected = gradients(whole_attention);
    const double output = difference(attention(x, segments, scale, order), whole_attention(x, segments, scale, order));
    const double gradient =
        std::max({difference(grads.q, expected.q), difference(grads.k, expected.k), difference(grads.v, expected.v)});
    if (mesh.rank() == 0) fmt::print("{:17} differs by {:.1e}, its gradients by {:.1e}\n", name, output, gradient);
    if (!(output < 1e-4 && gradient < 1e-4))
      throw Error(fmt::format("{} attention differs from attention over the whole sequence", name));
  };
  check("ring", SequenceOrder::contiguous, ring_attention);
  check("fused ring", SequenceOrder::contiguous, fused_ring);
  check("ulysses", SequenceOrder::contiguous, attention_by_heads);
  check("fused ulysses", SequenceOrder::contiguous, fused_ulysses);
  // The same numbers, taken as those of other positions.
  check("ring zigzag", SequenceOrder::zigzag, ring_attention);
  check("fused ring zigzag", SequenceOrder::zigzag, fused_ring);
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    std::string mesh = under_mpi() ? fmt::format("s={}", world_size()) : "s=4";
    std::int64_t length = 256, heads = 4;
    run::Options options("context_parallel", "Compares ways of attention over a length that is sharded over axis s.");
    options.add("--mesh", mesh, "devices: threads of this process, or MPI ranks under mpirun", run::value_name("s=N"));
    options.add("--length", length, "positions; a multiple of twice the devices", run::size(1));
    options.add("--heads", heads, "heads; a multiple of the devices", run::size(1));
    if (!options.parse(argc, argv)) return 0;
    const auto axes = run::mesh_of(mesh, "s");
    const std::int64_t devices = device_count(axes);
    for (const auto& [option, size, parts] : {std::tuple("--length", length, 2 * devices), {"--heads", heads, devices}})
      if (size % parts != 0)
        throw UsageError(
            fmt::format("{} {} does not divide over --mesh {}: choose a multiple of {}", option, size, mesh, parts));
    launch(axes, [&](const DevicePtr& device) { compare(device, length, heads); });
    return 0;
  });
}
