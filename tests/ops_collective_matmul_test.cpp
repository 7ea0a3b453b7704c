// Einsums whose operand is still gathering, or whose result is still scattering: values, cotangents and adjoint law, in
// whole and in parts, and what they communicate and hold.
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "op_case.hpp"
#include "shardlib/comm/dry.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

#define FIRST(dtype, shard, whole, other, out)                                                     \
  make_case<Tensor<dtype, shard>, Tensor<dtype, other>>(                                           \
      "gathering " #dtype " " shard ", " other " -> " out,                                         \
      [](const auto& x, const auto& y) {                                                           \
        return einsum_unreduced<whole ", " other " -> " out>(gathering<shard " -> " whole>(x), y); \
      },                                                                                           \
      products())
#define SECOND(dtype, other, shard, whole, out)                                                    \
  make_case<Tensor<dtype, other>, Tensor<dtype, shard>>(                                           \
      other ", gathering " #dtype " " shard " -> " out,                                            \
      [](const auto& x, const auto& y) {                                                           \
        return einsum_unreduced<other ", " whole " -> " out>(x, gathering<shard " -> " whole>(y)); \
      },                                                                                           \
      products())
#define SCATTER(dtype, lhs, rhs, out)                                               \
  make_case<Tensor<dtype, lhs>, Tensor<dtype, rhs>>(                                \
      "einsum_scatter " #dtype " " lhs ", " rhs " -> " out,                         \
      [](const auto& x, const auto& y) {                                            \
        return einsum_scatter<lhs ", " rhs " -> " out, accumulator_t<dtype>>(x, y); \
      },                                                                            \
      products())

std::vector<Case> gathering_cases() {
  return {
      // a gathered dim that stays: first, or behind others; in the first operand, or the second
      FIRST(f32, "L/t M", "L M", "M F/t", "L F/t"),
      FIRST(f32, "B/d L/t M", "B/d L M", "M F/t", "B/d L F/t"),
      FIRST(f32, "B L/t M", "B L M", "M F/t", "F/t B L"),
      SECOND(f32, "F/t M", "B L/t M", "B L M", "B F/t L"),
      // a gathered dim that is summed: the other operand in slices
      FIRST(f32, "B M/t", "B M", "M F/t", "B F/t"),
      FIRST(f32, "B L/t M", "B L M", "B L F/t", "M F/t"),
      SECOND(f32, "B/d L M/t", "M/t/d F", "M/t F", "B/d L F +t"),
      // one that is in both operands and in the result
      FIRST(f32, "B L/t M", "B L M", "L M F/t", "L B F/t"),
      // an operand whose sum over another axis is pending
      FIRST(f32, "L/t M +d", "L M +d", "M F/t", "L F/t +d"),
  };
}

std::vector<Case> scattering_cases() {
  return {
      // a dim of the first operand, of the second, and of both
      SCATTER(f32, "L F/t", "F/t M", "L/t M"),
      SCATTER(f32, "B/d L F/t", "F/t M", "B/d L/t M"),
      SCATTER(f32, "B/d L F/t", "F/t M", "B/d L M/t"),
      SCATTER(f32, "F/t M", "B L F/t", "L B M/t"),
      SCATTER(f32, "B L F/t", "L F/t M", "M B L/t"),
      // FSDP: the gradient of a weight that two axes shard
      SCATTER(f32, "B/d L M/t", "B/d L F", "M/t/d F"),
      // another sum stays pending
      SCATTER(f32, "B/d F/t", "B/d F/t M", "M/t +d"),
  };
}

/// Meshes whose axes show each way of a shard; eight devices are below.
const std::vector<std::string> meshes{"d=1,t=1", "d=2,t=1", "d=1,t=2", "d=2,t=2"};
const std::vector<std::string> few_meshes{"d=1,t=2", "d=2,t=2"};

}  // namespace

TEST_CASE("einsum_unreduced of an operand that gathers", "[ops]") {
  check_cases(gathering_cases(), meshes);
  check_cases({FIRST(f64, "B/d L/t M", "B/d L M", "M F/t", "B/d L F/t"), FIRST(f64, "B M/t", "B M", "M F/t", "B F/t")},
              few_meshes);
}

TEST_CASE("einsum_scatter", "[ops]") {
  check_cases(scattering_cases(), meshes);
  check_cases({SCATTER(f64, "B/d L F/t", "F/t M", "B/d L/t M"), SCATTER(f64, "B/d L F/t", "F/t M", "B/d L M/t")},
              few_meshes);
}

TEST_CASE("einsums with shards that travel over up to 8 devices", "[ops]") {
  check_cases(
      {
          FIRST(f32, "A/t M", "A M", "M F/t", "A F/t"),
          FIRST(f32, "B A/t", "B A", "A F/t", "B F/t"),
          FIRST(f32, "C A/t M", "C A M", "M F/t", "C A F/t"),
          SCATTER(f32, "A F/t", "F/t M", "A/t M"),
          SCATTER(f32, "B F/t", "F/t A", "B A/t"),
      },
      {"d=1,t=4", "d=1,t=8", "d=2,t=4"});
}

TEST_CASE("einsums of bf16 with shards that travel", "[ops]") {
  std::vector<Case> cases{
      FIRST(bf16, "B/d L/t M", "B/d L M", "M F/t", "B/d L F/t"),
      FIRST(bf16, "B M/t", "B M", "M F/t", "B F/t"),
      make_case<Tensor<bf16, "B M/t">, Tensor<bf16, "M F/t">>(
          "gathering bf16 to f32",
          [](const auto& x, const auto& y) {
            return einsum_unreduced<"B M, M F/t -> B F/t", f32>(gathering<over<"t">>(x), y);
          },
          products()),
      SCATTER(bf16, "B/d L F/t", "F/t M", "B/d L/t M"),
      SCATTER(bf16, "B/d L F/t", "F/t M", "B/d L M/t"),
  };
  // As in the table of einsum: what one device has whole is rounded once.
  check_cases(cases, {"d=1,t=1"});
  for (Case& c : cases) c.options.tolerance = 0.01;
  check_cases(cases, few_meshes);
}

TEST_CASE("einsums with shards that travel, in parts between which MPI makes progress", "[ops]") {
  if (device_kind() != DeviceKind::cpu) {
    SUCCEED("a device multiplies a shard in one part, as in the cases above");
    return;
  }
  const Temporarily<double> parts(tuning.product_part, 1);
  check_cases(gathering_cases(), few_meshes);
  check_cases(scattering_cases(), few_meshes);
  // Messages that end inside of a part, and inside of a row
  const Temporarily<std::size_t> messages(tuning.shard_message, 20);
  check_cases(gathering_cases(), {"d=1,t=2"});
  check_cases(scattering_cases(), {"d=1,t=2"});
  check_cases({FIRST(f32, "A/t M", "A M", "M F/t", "A F/t"), FIRST(f32, "B A/t", "B A", "A F/t", "B F/t"),
               SCATTER(f32, "A F/t", "F/t M", "A/t M"), SCATTER(f32, "B F/t", "F/t A", "B A/t")},
              {"d=1,t=4", "d=1,t=8"});
}

TEST_CASE("einsums with shards that travel: devices that disagree on a size", "[ops]") {
  if (under_mpi()) return;  // there the job would end
  const Temporarily<std::size_t> messages(tuning.shard_message, 4096);
  const std::string error = error_of([] {
    on_mesh("d=1,t=2", [](const Mesh<"d t">& mesh) {
      const std::int64_t length = mesh.rank() == 0 ? 256 : 512;  // whole messages, four and eight
      const auto x = ones<f32, "L/t M">(mesh, {{"L", length}, {"M", 32}});
      const auto w = ones<f32, "M F/t">(mesh, {{"M", 32}, {"F", 2}});
      static_cast<void>(einsum_unreduced<"L M, M F/t -> L F/t">(gathering<"L/t M -> L M">(x), w));
    });
  });
  expect(error.find(": send and recv must agree on the size") != std::string::npos, error);
}

TEST_CASE("einsum of an operand that gathers, with the sum over another axis", "[ops]") {
  check_cases({
      make_case<Tensor<f32, "B/d L M/t">, Tensor<f32, "M/t/d F">>(
          "einsum, the second gathers",
          [](const auto& x, const auto& w) {
            return einsum<"B/d L M/t, M/t F -> B/d L F/t">(x, gathering<"M/t/d F -> M/t F">(w));
          },
          products()),
      make_case<Tensor<f32, "M/t/d F">, Tensor<f32, "B/d L M/t">>(
          "einsum, the first gathers",
          [](const auto& w, const auto& x) {
            return einsum<"M/t F, B/d L M/t -> B/d L F">(gathering<over<"d">>(w), x);
          },
          products()),
  });
}

namespace {

using Grid = Mesh<"d t">;
template <dtype D>
struct Mlp {
  Tensor<D, "M F/t"> up;
  Tensor<D, "F/t M"> down;
};
template <dtype D>
struct Trained {
  Tensor<D, "B/d L/t M"> x;
  Tensor<D, "M F/t"> up;
  Tensor<D, "F/t M"> down;
};
template <dtype D>
using Activations = Tensor<D, "B/d L/t M">;

template <dtype D>
auto traveling(const Activations<D>& x, const Mlp<D>& w) -> Activations<D> {
  const auto h = einsum_unreduced<"B/d L M, M F/t -> B/d L F/t">(gathering<over<"t">>(x), w.up);
  return einsum_scatter<"B/d L F/t, F/t M -> B/d L/t M", accumulator_t<D>>(square(h), w.down);
}
template <dtype D>
auto gathered(const Activations<D>& x, const Mlp<D>& w) -> Activations<D> {
  const auto h = einsum_unreduced<"B/d L M, M F/t -> B/d L F/t">(all_gather<over<"t">>(x), w.up);
  return einsum<"B/d L F/t, F/t M -> B/d L/t M", accumulator_t<D>>(square(h), w.down);
}

/// Value and gradients of a layer whose shards travel, with recompute, and of one that gathers and scatters them.
template <dtype D>
void check_layer(const Grid& mesh, const Sizes& sizes, double tolerance) {
  const auto x = random_normal<D, "B/d L/t M">(mesh, sizes, {3, 1});
  const Mlp<D> weights{random_normal<D, "M F/t">(mesh, sizes, {3, 2}), random_normal<D, "F/t M">(mesh, sizes, {3, 3})};
  const Trained<D> operands{x, weights.up, weights.down};
  const auto graded = [&](const auto& layer) {
    const auto loss = [&](const Trained<D>& o) -> Tensor<f32, "+d +t"> {
      return sum(cast<f32>(square(layer(o.x, Mlp<D>{o.up, o.down}))));
    };
    return std::get<1>(value_and_grad(mesh, loss, operands));
  };
  const auto found = graded(traveling<D>), again = graded(explicit_activation_checkpointing(traveling<D>)),
             expected = graded(gathered<D>);
  const auto close = [&](const auto& a, const auto& b, double at_most, const char* what) {
    const double difference = off(a, b);
    expect(difference <= at_most, std::string(what) + " is off by " + show(difference));
  };
  const auto all_close = [&](const auto& a, const auto& b, double at_most) {
    close(a.template get<&Trained<D>::x>(), b.template get<&Trained<D>::x>(), at_most, "the gradient of x");
    close(a.template get<&Trained<D>::up>(), b.template get<&Trained<D>::up>(), at_most, "the gradient of up");
    close(a.template get<&Trained<D>::down>(), b.template get<&Trained<D>::down>(), at_most, "the gradient of down");
  };
  close(traveling<D>(x, weights), gathered<D>(x, weights), tolerance, "the result");
  all_close(found, expected, tolerance);
  all_close(again, found, 0);
}

}  // namespace

TEST_CASE("a layer whose shards travel is the one that gathers and scatters them", "[ops]") {
  on_meshes({"d=1,t=1", "d=1,t=2", "d=2,t=2", "d=1,t=4", "d=1,t=5", "d=2,t=4", "d=1,t=8"}, [](const Grid& mesh) {
    // On one device, the bits are the same.
    const bool alone = mesh.size("t") == 1;
    const Sizes sizes{{"B", 2}, {"L", 80}, {"M", 24}, {"F", 40}};
    const Sizes padded{{"B", 2}, {"L", 33, 40}, {"M", 24}, {"F", 37, 40}};
    check_layer<f64>(mesh, sizes, alone ? 0 : 1e-13);
    check_layer<f64>(mesh, padded, alone ? 0 : 1e-13);
    check_layer<f32>(mesh, padded, alone ? 0 : 1e-5);
    check_layer<bf16>(mesh, sizes, alone ? 0 : 0.03);
  });
}

TEST_CASE("einsums with shards that travel have the same bits in each run, and on all replicas", "[ops]") {
  on_mesh("d=2,t=4", [](const DevicePtr& device) {
    const Grid mesh(device);
    const Sizes sizes{{"L", 16}, {"M", 40}, {"F", 8}};
    const auto x = random_normal<f32, "L M/t">(mesh, sizes, {4, 1});
    const auto w = random_normal<f32, "M F/t">(mesh, sizes, {4, 2});
    const auto v = random_normal<f32, "F/t M">(mesh, sizes, {4, 3});
    const auto h = einsum_unreduced<"L M, M F/t -> L F/t">(gathering<over<"t">>(x), w);
    const auto y = einsum_scatter<"L F/t, F/t M -> L M/t">(h, v);
    // Along d all is replicated.
    for (const auto* const result : {&h.value(), &y.value()}) {
      const Buffer mine = (*result)->on_host();
      const auto all = everybodys(*device, mine.data(), mine.bytes());
      const auto other = static_cast<std::size_t>(device->rank() < 4 ? device->rank() + 4 : device->rank() - 4);
      expect(std::memcmp(mine.data(), all.data() + other * mine.bytes(), mine.bytes()) == 0, "a replica differs");
    }
    const auto again =
        einsum_scatter<"L F/t, F/t M -> L M/t">(einsum_unreduced<"L M, M F/t -> L F/t">(gathering<over<"t">>(x), w), v);
    expect(off(again, y) == 0, "another run differs");
  });
}

TEST_CASE("einsums with shards that travel: traffic, arithmetic and memory", "[ops]") {
  const Sizes sizes{{"B", 2}, {"L", 256}, {"M", 64}, {"F", 128}};
  const auto count = [&](const DevicePtr& device, const auto& layer) {
    const Grid mesh(device);
    const auto x = zeros<f32, "B/d L/t M">(mesh, sizes);
    const Mlp<f32> w{zeros<f32, "M F/t">(mesh, sizes), zeros<f32, "F/t M">(mesh, sizes)};
    static_cast<void>(value_and_grad(
        mesh, [&](const Mlp<f32>& m, const Activations<f32>& o) -> Tensor<f32, "+d +t"> { return sum(layer(o, m)); }, w,
        x));
    return detail::program_state(device).counts;
  };
  const auto flops = [](const auto& counts) {
    double all = 0;
    for (const auto& [name, one] : counts) all += one.flops;
    return all;
  };
  const auto check = [&](const DevicePtr& device) {
    std::map<std::string, std::string> axes;
    const detail::Observing observing(device, [&](const detail::OpReport& ran) {
      for (const auto axis : ran.work.axes) axes[ran.op.name] = std::string(axis);
    });
    const auto counts = count(device, traveling<f32>);
    const std::int64_t shard =
        2 * 64 * 64 * static_cast<std::int64_t>(sizeof(f32));  // of x, of y, and of its cotangent
    // The gathering einsum is there forward, and for the gradient of `up`. The cotangent of x is not asked for.
    expect(counts.at("einsum_unreduced").bytes == 2 * 3 * shard, "x travels twice");
    expect(counts.at("einsum_scatter").bytes == 3 * shard, "three shards are sent");
    expect(counts.at("einsum_scatter_backward").bytes == 3 * shard, "the cotangent travels once");
    expect(axes.at("einsum_unreduced") == "t" && axes.at("einsum_scatter") == "t" &&
               axes.at("einsum_scatter_backward") == "t",
           "reports name the axis");
    return flops(counts);
  };
  on_mesh("d=1,t=4", [&](const DevicePtr& device) {
    const double travel = check(device);
    const double all = flops(count(device, gathered<f32>));
    expect(travel > 0 && all == 2 * travel, "both layers have the same products: " + show(travel) + ", " + show(all));
  });
  const auto dry = DevicePtr::make(parse_mesh("d=1,t=4"), 0, std::make_shared<DryWorld>(Peers::mpi));
  check(dry);
  // A product holds three shards of an operand, not all of them; one that scatters, the shards on their way, and no sum
  // of all.
  const Grid mesh(dry);
  const auto x = zeros<f32, "B/d L/t M">(mesh, {{"B", 1}, {"L", 1 << 16}, {"M", 64}});
  const auto w = zeros<f32, "M F/t">(mesh, {{"M", 64}, {"F", 4}});
  const std::size_t of_x = x.value()->bytes();
  const auto of_ring = peak(
      dry, [&] { static_cast<void>(einsum_unreduced<"B/d L M, M F/t -> B/d L F/t">(gathering<over<"t">>(x), w)); });
  expect(of_ring < of_x * 5 / 2, "two shards besides its own and a small result: " + show(of_ring));
  const auto h = zeros<f32, "B/d L F/t">(mesh, {{"B", 1}, {"L", 1 << 16}, {"F", 4}});
  const auto v = zeros<f32, "F/t M">(mesh, {{"F", 4}, {"M", 64}});
  const auto of_scatter = peak(dry, [&] { static_cast<void>(einsum_scatter<"B/d L F/t, F/t M -> B/d L/t M">(h, v)); });
  expect(of_scatter <= 5 * of_x, "not the sum of all: " + show(of_scatter));
}
