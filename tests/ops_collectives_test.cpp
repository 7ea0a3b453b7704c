// Collectives and layout casts against the whole arrays, each with its transpose; the values of shift are in
// ops_exhaustive_typed_test.cpp.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "op_case.hpp"
#include "shardlib/comm/dry.hpp"
#include "shardlib/runtime/observe.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

/// op<"from -> to"> leaves the whole array as it is.
#define COLLECTIVE(op, dtype, from, to) \
  make_case<Tensor<dtype, from>>(       \
      #op " " #dtype " " from " -> " to, [](const auto& x) { return op<from " -> " to>(x); }, same())
/// The sums of bf16 state their dtype.
#define COLLECTIVE_SUM(op, dtype, sum, from, to) \
  make_case<Tensor<dtype, from>>(                \
      #op " " #dtype " " from " -> " to, [](const auto& x) { return op<from " -> " to, sum>(x); }, same())

/// A collective that is awaited where it starts.
template <OpSpec O, class Sum = void>
auto awaited_all_gather(const auto& x) {
  return wait(all_gather_start<O, Sum>(x));
}
template <OpSpec O, class Sum = void>
auto awaited_reduce_scatter(const auto& x) {
  return wait(reduce_scatter_start<O, Sum>(x));
}

/// The cases, in which pieces of rows are short, with copies in rank order and without.
void check_rows(const std::vector<Case>& cases) {
  check_cases(cases);
  const Temporarily in_place(tuning.row_piece, std::size_t{1});
  check_cases(cases);
}

TEST_CASE("all_gather", "[ops]") {
  check_rows({
      COLLECTIVE(all_gather, f32, "A/t B", "A B"),
      COLLECTIVE(all_gather, f32, "B A/t", "B A"),
      COLLECTIVE(all_gather, f32, "A/t/d B", "A/t B"),
      COLLECTIVE(all_gather, f32, "A/t/d", "A"),
      COLLECTIVE(all_gather, f32, "C A/d/t", "C A"),
      COLLECTIVE(all_gather, f32, "A/d B/t", "A B"),
      COLLECTIVE(all_gather, f32, "A/d C B/t", "A/d C B"),
      COLLECTIVE(all_gather, f32, "A/t B +d", "A B +d"),
      COLLECTIVE(all_gather, f32, "A/d/t/p C", "A/d C"),
      COLLECTIVE(all_gather, f32, "A/p/d B/t", "A/p B"),
      COLLECTIVE_SUM(all_gather, bf16, backward_sum<f32>, "A/t/d B", "A B"),
      COLLECTIVE(all_gather, f64, "B A/t/d", "B A/t"),
  });
}

TEST_CASE("reduce_scatter", "[ops]") {
  check_rows({
      COLLECTIVE(reduce_scatter, f32, "A B +t", "A/t B"),
      COLLECTIVE(reduce_scatter, f32, "B A +t", "B A/t"),
      COLLECTIVE(reduce_scatter, f32, "A B +d +t", "A/t/d B"),
      COLLECTIVE(reduce_scatter, f32, "A +d +t", "A/d/t"),
      COLLECTIVE(reduce_scatter, f32, "A C B +d +t", "A/d C B/t"),
      COLLECTIVE(reduce_scatter, f32, "A/t B +d", "A/t/d B"),
      COLLECTIVE(reduce_scatter, f32, "B A +d +t", "B A/t +d"),
      COLLECTIVE(reduce_scatter, f32, "A/d B +p +t", "A/d/p B/t"),
      COLLECTIVE(reduce_scatter, f32, "A C +d +p +t", "A/p/t/d C"),
      COLLECTIVE_SUM(reduce_scatter, bf16, f32, "A B +d +t", "A B/t/d"),
      COLLECTIVE(reduce_scatter, f64, "B A/t +d", "B/d A/t"),
  });
}

TEST_CASE("all_gather_start and wait", "[ops]") {
  check_rows({
      COLLECTIVE(awaited_all_gather, f32, "A/t B", "A B"),
      COLLECTIVE(awaited_all_gather, f32, "B A/t", "B A"),
      COLLECTIVE(awaited_all_gather, f32, "C A/d/t", "C A"),
      COLLECTIVE(awaited_all_gather, f32, "A/d B/t", "A B"),
      COLLECTIVE(awaited_all_gather, f32, "A/t B +d", "A B +d"),
      COLLECTIVE_SUM(awaited_all_gather, bf16, backward_sum<f32>, "A/t/d B", "A B"),
      COLLECTIVE(awaited_all_gather, f64, "B A/t/d", "B A/t"),
  });
}

TEST_CASE("reduce_scatter_start and wait", "[ops]") {
  check_rows({
      COLLECTIVE(awaited_reduce_scatter, f32, "A B +t", "A/t B"),
      COLLECTIVE(awaited_reduce_scatter, f32, "B A +t", "B A/t"),
      COLLECTIVE(awaited_reduce_scatter, f32, "A C B +d +t", "A/d C B/t"),
      COLLECTIVE(awaited_reduce_scatter, f32, "B A +d +t", "B A/t +d"),
      COLLECTIVE_SUM(awaited_reduce_scatter, bf16, f32, "A B +d +t", "A B/t/d"),
      COLLECTIVE(awaited_reduce_scatter, f64, "B A/t +d", "B/d A/t"),
  });
}

TEST_CASE("all_reduce", "[ops]") {
  check_cases({
      COLLECTIVE(all_reduce, f32, "A +t", "A"),
      COLLECTIVE(all_reduce, f32, "A B +d +t", "A B"),
      COLLECTIVE(all_reduce, f32, "A B +d +t", "A B +d"),
      COLLECTIVE(all_reduce, f32, "A/d B +t", "A/d B"),
      COLLECTIVE(all_reduce, f32, "+d +t", ""),
      COLLECTIVE(all_reduce, f32, "A +d +p +t", "A +p"),
      COLLECTIVE_SUM(all_reduce, bf16, f32, "A +d +t", "A"),
      COLLECTIVE(all_reduce, f64, "A +t", "A"),
  });
}

TEST_CASE("all_to_all", "[ops]") {
  check_cases({
      COLLECTIVE(all_to_all, f32, "A/t B", "A B/t"),
      COLLECTIVE(all_to_all, f32, "A B/t", "A/t B"),
      COLLECTIVE(all_to_all, f32, "A/t/d D B", "A/t D B/d"),
      COLLECTIVE(all_to_all, f32, "A/d/t B", "A B/d/t"),
      COLLECTIVE(all_to_all, f32, "D B A/t/d", "D B/t/d A"),
      COLLECTIVE(all_to_all, f32, "A/d B/t", "A/d/t B"),
      COLLECTIVE(all_to_all, f32, "C/d H/t L V", "C H L/d V/t"),
      COLLECTIVE(all_to_all, f32, "C/d H/t L V", "C H L/t V/d"),
      COLLECTIVE(all_to_all, f32, "A/t B +d", "A B/t +d"),
      COLLECTIVE(all_to_all, f32, "A/p/t B/d", "A/p B/d/t"),
      COLLECTIVE(all_to_all, f32, "A/d/t/p B C", "A/d B/t/p C"),
      COLLECTIVE(all_to_all, bf16, "A/t B", "A B/t"),
      COLLECTIVE(all_to_all, f64, "B A/t/d", "B/d A/t"),
  });
}

TEST_CASE("shard", "[ops]") {
  check_cases({
      COLLECTIVE(shard, f32, "A B", "A/t B"),
      COLLECTIVE(shard, f32, "B A", "B A/t"),
      COLLECTIVE(shard, f32, "A/t B", "A/t/d B"),
      COLLECTIVE(shard, f32, "A", "A/t/d"),
      COLLECTIVE(shard, f32, "C A", "C A/d/t"),
      COLLECTIVE(shard, f32, "A C B", "A/d C B/t"),
      COLLECTIVE(shard, f32, "A B +d", "A/t B +d"),
      COLLECTIVE(shard, f32, "A/d B", "A/d/p B/t"),
      COLLECTIVE(shard, bf16, "A B", "A B/t"),
      COLLECTIVE(shard, f64, "A/d B", "A/d B/t"),
  });
}

TEST_CASE("to_partial", "[ops]") {
  check_cases({
      COLLECTIVE(to_partial, f32, "A", "A +t"),
      COLLECTIVE(to_partial, f32, "A B", "A B +d +t"),
      COLLECTIVE(to_partial, f32, "A/d B", "A/d B +t"),
      COLLECTIVE(to_partial, f32, "A +d", "A +d +t"),
      COLLECTIVE(to_partial, f32, "", "+d"),
      COLLECTIVE(to_partial, f32, "A +t", "A +d +p +t"),
      COLLECTIVE(to_partial, bf16, "A/t", "A/t +d"),
  });
}

TEST_CASE("collectives of integers and truth values", "[ops]") {
  const auto draws = [](Case c, Draw draw) {
    c.in[0].draw = draw;
    return c;
  };
  check_cases({
      draws(COLLECTIVE(all_gather, i32, "A/t/d B", "A B"), Draw::integers),
      draws(COLLECTIVE(all_gather, u8, "B A/t", "B A"), Draw::naturals),
      draws(COLLECTIVE(all_gather, bool_, "A/d B/t", "A B"), Draw::naturals),
      draws(COLLECTIVE(all_to_all, u32, "A/t B", "A B/t"), Draw::naturals),
      draws(COLLECTIVE(shard, bool_, "A B", "A/d B/t"), Draw::naturals),
      draws(COLLECTIVE(reduce_scatter, i32, "A B +d +t", "A/t B/d"), Draw::integers),
      draws(COLLECTIVE(all_reduce, i32, "A +d +t", "A"), Draw::integers),
      draws(COLLECTIVE(to_partial, i32, "A", "A +t"), Draw::integers),
  });
}

TEST_CASE("all_reduce_max", "[ops]") {
#define MAXIMUM(dtype, from, to, draw)                                                                            \
  make_case<Tensor<dtype, from>>("all_reduce_max " #dtype " " from " -> " to,                                     \
                                 [](const auto& x) { return all_reduce_max<from " -> " to>(x); }, extrema(false), \
                                 {.draws = {draw}, .gradient = false})
  check_cases({
      MAXIMUM(f32, "C A/t/d B", "C B", Draw::odd),
      MAXIMUM(bf16, "A V/t", "A", Draw::odd),
      MAXIMUM(i32, "A V/d", "A", Draw::integers),
  });
#undef MAXIMUM
}

// ---- transfers of shift that are under way --------------------------------------------------------------------------

using Ring = Mesh<"d">;
using Block = Tensor<f32, "A/d B">;

Block block(const Ring& mesh) {
  return random_normal<f32, "A/d B">(mesh, {{"A", 2 * mesh.size("d")}, {"B", 3}}, {7, 0});
}
/// The shards that were random_normal's, `by` places further.
bool moved(const Block& y, const Block& x, int by) {
  const auto whole = all_gather<"A/d B -> A B">(x);
  const auto n = static_cast<int>(y.span().size()), devices = static_cast<int>(Ring(x.device()).size("d"));
  const int from = (Ring(x.device()).axis_index("d") + devices - by) % devices;
  return std::memcmp(y.span().data(), whole.span().data() + from * n, y.span().size_bytes()) == 0;
}
/// Whether a shift is, or may be, a collective of NCCL: then all devices must call it before any goes on.
bool may_be_of_nccl() {
  return test_device() == "nccl" || test_device() == "gpu";
}
std::size_t under_way(const DevicePtr& device) {
  return detail::program_state(device).pending.size();
}

/// Each block meets each device. The next one leaves before the device computes with the present one.
Tensor<f32, "+d"> around(const Block& x) {
  const auto devices = Ring(x.device()).size("d");
  const auto one = [](const Block& here, const Block& sum) { return sum + tanh(here) * (sum + 1.0); };
  Block here = x, sum = x * 0.0;
  for (std::int64_t step = 0; step < devices; ++step) {
    const Block next = step + 1 < devices ? shift<over<"d">>(here, 1) : here;
    sum = explicit_activation_checkpointing(one)(here, sum);
    here = next;
  }
  return shardlib::sum<"A/d B -> +d">(sum);
}

TEST_CASE("a shift has started when it returns, and its result waits for it", "[ops][shift]") {
  on_mesh("d=2", [](const DevicePtr& device) {
    const Ring mesh(device);
    const Block x = block(mesh);
    const auto total = [&] { return item(all_reduce<"+d -> ">(sum<"A/d B -> +d">(x))); };
    // The first device waits in the sum for the second one, which calls shift only after the sum. So the first one's
    // shift must not wait for the second one's. Where it is a collective, all call both in the same order.
    const bool first = mesh.axis_index("d") == 0 || may_be_of_nccl() || device->group({"d"}).exchanges();
    if (!first) total();
    const Block y = shift<over<"d">>(x, 1);
    const auto& counts = detail::program_state(device).counts;
    expect(counts.at("shift").calls == 1 && counts.at("shift").bytes == 24, "it counts when it starts");
    expect(under_way(device) == 1, "it waits for the transfer");
    if (first) total();
    expect(moved(y, x, 1) && under_way(device) == 0, "the result");
    // One from before a function is differentiated, which the function reads.
    const Block before = shift<over<"d">>(x, 1);
    const auto squares = [](const Block& w, const Block& b) { return sum<"A/d B -> +d">(w * b); };
    expect(moved(value_and_grad(mesh, squares, x, before).second, x, 1), "the gradient");
    total();
    expect(under_way(device) == 0, "the function has read it");
    // What the program drops, by itself or by an error, is received all the same.
    static_cast<void>(shift<over<"d">>(x, 1));
    const auto failing = [&](const Block& w) -> Tensor<f32, "+d"> {
      const Block dropped = shift<over<"d">>(w, 1);
      throw Error("enough " + std::to_string(dropped.value()->count()));
    };
    expect_error([&] { static_cast<void>(value_and_grad(mesh, failing, x)); }, "enough 6");
    const Block other = shift<over<"d">>(x * 2.0, -1);
    expect(moved(other, x * 2.0, -1), "the result of the next one");
    total();
    for (int i = 0; i < 100'000 && under_way(device) > 0; ++i) static_cast<void>(x * 2.0);
    expect(under_way(device) == 0, "a transfer stays under way after its result was dropped");
  });
}

TEST_CASE("transfers of shift run during the ops that do not read them, forward and backward", "[ops][shift]") {
  const auto step = [](const DevicePtr& device) {
    return value_and_grad(Ring(device), around, block(Ring(device))).second;
  };
  const auto traffic = [&](const DevicePtr& device) {
    auto& counts = detail::program_state(device).counts;
    counts.clear();
    static_cast<void>(step(device));
    return "shift " + std::to_string(counts["shift"].calls) + " calls " + std::to_string(counts["shift"].bytes) +
           " bytes";
  };
  const auto dry = DevicePtr::make(parse_mesh("d=4"), 0, std::make_shared<DryWorld>());
  const std::string planned = traffic(dry);
  dry->clear_local();
  expect(planned == "shift 6 calls 144 bytes", planned);
  on_mesh("d=4", [&](const DevicePtr& device) {
    const detail::ProgramState& state = detail::program_state(device);
    std::vector<std::size_t> forward, backward;
    {
      const detail::Observing watch(device, [&](const detail::OpReport& ran) {
        if (std::string_view(ran.op.name) == "tanh")
          (ran.recomputed ? backward : forward).push_back(state.pending.size());
      });
      static_cast<void>(step(device));
    }
    // A cotangent is added to that of the same block when both are there, which is one step later.
    expect_equal(forward, {1, 1, 1, 0});
    expect_equal(backward, {0, 0, 1, 1});
    expect(traffic(device) == planned, "a dry run counts " + planned);
    // In a replay each shift waits where its result is read.
    const auto again = [](const Block& x) { return explicit_activation_checkpointing(around)(x); };
    const Block gradient = step(device), replayed = value_and_grad(Ring(device), again, block(Ring(device))).second;
    expect(std::memcmp(gradient.span().data(), replayed.span().data(), gradient.span().size_bytes()) == 0, "bits");
  });
}

TEST_CASE("a shift that cannot start names op, place and reason, and leaves the state as it was", "[ops][shift]") {
  const auto device = DevicePtr::make(parse_mesh("d=2"), 0);
  const Block x = block(Ring(device));
  double& flops = detail::program_state(device).work.flops;
  flops = 7;  // of an op around this one
  const int line = __LINE__ + 1;
  const std::string alone = error_of([&] { static_cast<void>(shift<over<"d">>(x, 1)); });
  CHECK(alone == "shift<`A/d B`> at " + std::string(__FILE__) + ":" + std::to_string(line) +
                     ": group of 2 devices: this device was made without a backend, so it cannot communicate (device 0 "
                     "(d=0) of mesh d=2): devices that do come from launch (device 0 (d=0) of mesh d=2)");
  CHECK((flops == 7 && under_way(device) == 0));
  const auto shifted = shift<over<"d">>(x, 2);
  CHECK(shifted.span().data() == x.span().data());  // round the ring: there is no transfer
}

TEST_CASE("a shift by the least number comes back by as much", "[ops][shift]") {
  on_mesh("d=3", [](const DevicePtr& device) {
    const Ring mesh(device);
    const Block x = block(mesh);
    constexpr std::int64_t least = std::numeric_limits<std::int64_t>::min();  // as 1 in a ring of 3
    expect(moved(shift<over<"d">>(x, least), x, 1), "the result");
    const auto product = [](const Block& w, const Block& b) {
      return sum<"A/d B -> +d">(shift<over<"d">>(w, least) * b);
    };
    expect(moved(value_and_grad(mesh, product, x, x * 1.0).second, x, -1), "the gradient");
  });
}

TEST_CASE("errors while a shift is under way", "[ops][shift]") {
  if (under_mpi()) return;  // the job would end
  REQUIRE_THROWS_WITH(on_mesh("d=2",
                              [](const DevicePtr& device) {
                                const Block x = block(Ring(device)), y = shift<over<"d">>(x, 1);
                                if (device->rank() == 0) throw Error("enough");
                                static_cast<void>(item(all_reduce<"+d -> ">(sum<"A/d B -> +d">(y))));
                              }),
                      "enough");
  int line = 0;
  const std::string absent = error_of([&] {
    on_mesh("d=2", [&](const DevicePtr& device) {
      const Block x = block(Ring(device));
      if (device->rank() == 0) return;
      line = __LINE__ + 1;
      const Block y = shift<over<"d">>(x, 1);
      static_cast<void>(y * 2.0);
    });
  });
  const auto text = [&](const std::string& call) {
    return "shift<`A/d B`> at " + std::string(__FILE__) + ":" + std::to_string(line) + ": " + call +
           "device 0 (rank 0 of 2) has returned without taking part: every device of a group must make the same calls "
           "(device 1 (d=1) of mesh d=2)";
  };
  CHECK((absent == text("recv: ") || (may_be_of_nccl() && absent == text(""))));
}

template <class D>
void check_order(const std::string& text) {
  on_mesh(text, [&](const DevicePtr& device) {
    const auto& mesh = device->axes();
    const Coordinates here = coordinates_of(mesh, device->rank());
    constexpr std::size_t n = 48;
    const Global whole{{"A"}, {n}, std::vector<double>(n)};
    static const TensorSpec both = parse_tensor("A +d +t").spec, one = parse_tensor("A +t").spec;
    const auto rough_value = [&](const TensorSpec& spec) {
      auto value = place(device, dtype_v<D>, spec, whole);
      std::vector<D> elements(n);
      // Replicas over an axis that the spec lacks hold the same bits.
      const int d = spec.partial.contains("d") ? here.at("d") : 0;
      for (std::size_t i = 0; i < n; ++i) elements[i] = rough<D>(d * 10 + here.at("t"), i);
      device->exec().copy(value->data().data(), elements.data(), n * sizeof(D));
      return value;
    };
    // Summands in the order of the mesh: d is its first axis, whatever order the op names.
    const auto sum_at = [&](std::size_t i, bool over_d) {
      std::vector<float> summands;
      for (int d = 0; d < (over_d ? size_of_axis(mesh, "d") : 1); ++d)
        for (int t = 0; t < size_of_axis(mesh, "t"); ++t)
          summands.push_back(static_cast<float>(rough<D>(d * 10 + t, i)));
      return static_cast<D>(tree_sum(summands));
    };
    const Tensor<D, "A +d +t"> x(rough_value(both));
    const Tensor<D, "A +t"> xt(rough_value(one));
    const auto expect_bits = [&](const auto& y, bool over_d) {
      const Shard shard = shard_of(mesh, here, *y.value()->spec, {n});
      for (std::size_t i = 0; i < shard.offsets.size(); ++i) {
        const D expected = sum_at(shard.offsets[i], over_d);
        expect(std::memcmp(&y.span()[i], &expected, sizeof(D)) == 0,
               std::string(to_string(*y.value()->spec).view()) + " element " + show(i) + " is " + show(y.span()[i]) +
                   " instead of " + show(expected));
      }
    };
    expect_bits(all_reduce<"A +d +t -> A", f32>(x), true);
    expect_bits(reduce_scatter<"A +d +t -> A/d/t", f32>(x), true);
    expect_bits(all_reduce<"A +t -> A", f32>(xt), false);
    expect_bits(reduce_scatter<"A +t -> A/t", f32>(xt), false);
  });
}

TEST_CASE("sums have the bits of the balanced tree over the mesh, on threads and MPI", "[ops]") {
  for (const std::string mesh : {"d=1,t=1", "d=2,t=1", "d=1,t=3", "d=2,t=2", "d=4,t=1", "d=2,t=3", "d=2,t=4"}) {
    INFO(mesh);
    check_order<f32>(mesh);
    check_order<bf16>(mesh);
  }
}

}  // namespace
