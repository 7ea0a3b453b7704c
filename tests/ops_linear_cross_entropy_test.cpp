// linear_cross_entropy: value and cotangents against whole arrays, piece by piece; that logits are stored only where
// they are few; that a replay gives the same bits; what it counts.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "op_case.hpp"
#include "shardlib/comm/dry.hpp"
#include "shardlib/runtime/observe.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

/// -log softmax(x table')[target]; x is rows of the table's width.
void loss_of_products(const std::vector<Global>& in, Global& y) {
  const auto vocabulary = static_cast<std::size_t>(in[1].shape.front());
  const std::size_t width = in[1].data.size() / vocabulary;
  for (std::size_t row = 0; row < y.data.size(); ++row) {
    std::vector<double> logits(vocabulary, 0);
    for (std::size_t v = 0; v < vocabulary; ++v)
      for (std::size_t k = 0; k < width; ++k) logits[v] += in[0].data[row * width + k] * in[1].data[v * width + k];
    const double highest = *std::ranges::max_element(logits);
    double total = 0;
    for (const double logit : logits) total += std::exp(logit - highest);
    y.data[row] = std::log(total) + highest - logits[static_cast<std::size_t>(in[2].data[row])];
  }
}

#define LOSS(dtype, ids, rows, table, targets, op, tolerance_)                                               \
  make_case<Tensor<dtype, rows>, Tensor<dtype, table>, Tensor<ids, targets>>(                                \
      "linear_cross_entropy " #dtype " " op,                                                                 \
      [](const auto& x, const auto& w, const auto& t) { return linear_cross_entropy<op>(x, w, t, stored); }, \
      loss_of_products, {.law = Law::none, .tolerance = tolerance_, .draws = {Draw::odd, Draw::odd, Draw::index}})

/// Cases in which the logits are made anew (0 bytes of them are stored), or stored.
template <std::int64_t stored>
std::vector<Case> cases() {
  return {
      LOSS(f32, i32, "B/d L K", "V/t K", "B/d L", "B/d L K, V/t K -> B/d L V/t", 2e-5),
      LOSS(f32, u32, "B L/d K", "V K", "B L/d", "B L/d K, V K -> B L/d V", 2e-5),
      LOSS(f32, i32, "L K C", "V/t/d K C", "L", "L K C, V/t/d K C -> L V/t/d", 4e-5),
      LOSS(f64, i32, "L/d K", "V/t K", "L/d", "L/d K, V/t K -> L/d V/t", 1e-6),
      LOSS(f64, u32, "K", "V/d/t K", "", "K, V/d/t K -> V/d/t", 1e-6),
      LOSS(bf16, i32, "L/d K", "V/t K", "L/d", "L/d K, V/t K -> L/d V/t", 0.02),
  };
}

TEST_CASE("linear_cross_entropy of logits that are made piece by piece", "[ops]") {
  constexpr std::int64_t pieces_of[] = {64, 1, 1 << 20};
  for (const std::int64_t piece : few(pieces_of, 1)) {
    INFO(piece);
    const Temporarily pieces(tuning.logits_piece, piece);
    check_cases(cases<0>());
  }
}

TEST_CASE("linear_cross_entropy of few logits, which are stored", "[ops]") {
  check_cases(cases<1 << 20>());
}

using Mesh2 = Mesh<"d t">;
struct Weights {
  Tensor<f32, "B/d L M/t"> x;
  Tensor<f32, "V/t M/d"> table;
};
constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
const Sizes sizes{{"B", 4}, {"L", 64}, {"M", 8}, {"V", 1000, 1024}};
Weights weights(const Mesh2& mesh) {
  return {random_normal<f32, "B/d L M/t">(mesh, sizes, {1, 1}), random_normal<f32, "V/t M/d">(mesh, sizes, {1, 2})};
}
auto targets(const Mesh2& mesh) {
  return cast<i32>(random_uniform<f32, "B/d L">(mesh, sizes, {1, 3}) * 999.0);
}
auto losses(const Weights& w, const Tensor<i32, "B/d L">& ids, std::int64_t stored) {
  return linear_cross_entropy<"B/d L M, V/t M -> B/d L V/t">(all_gather<"B/d L M/t -> B/d L M">(w.x),
                                                             all_gather<"V/t M/d -> V/t M">(w.table), ids, stored);
}
/// Loss and gradients; `recompute`: in a function that the backward pass runs again.
auto step(const Mesh2& mesh, const Weights& w, std::int64_t stored, bool recompute) {
  const auto ids = targets(mesh);
  const auto loss = [&](const Weights& in) -> Tensor<f32, "+d +t"> {
    const auto again = explicit_activation_checkpointing(losses);
    return sum<"B/d L +t -> +d +t">(recompute ? again(in, ids, stored) : losses(in, ids, stored));
  };
  return value_and_grad(mesh, loss, w);
}

TEST_CASE("linear_cross_entropy: a replay gives the same bits, stored logits nearly so", "[ops]") {
  for (const char* text : {"d=1,t=1", "d=2,t=1", "d=1,t=2", "d=2,t=2"}) {
    INFO(text);
    const Temporarily pieces(tuning.logits_piece, std::int64_t{40000});
    on_mesh(text, [](const Mesh2& mesh) {
      const Weights w = weights(mesh);
      const auto [loss, grads] = step(mesh, w, 0, false);
      const auto [again, same] = step(mesh, w, 0, true);
      const auto [other, near] = step(mesh, w, most, false);
      expect(loss.span()[0] == again.span()[0] && std::ranges::equal(grads.x.span(), same.x.span()) &&
                 std::ranges::equal(grads.table.span(), same.table.span()),
             "a replay changes the bits");
      const auto close = [](const auto& found, const auto& right, const char* what) {
        const auto a = found.span(), b = right.span();
        for (std::size_t i = 0; i < a.size(); ++i)
          expect(std::abs(a[i] - b[i]) <= 1e-4F, std::string(what) + ": " + show(a[i]) + " and " + show(b[i]));
      };
      expect(std::abs(loss.span()[0] - other.span()[0]) <= 1e-3F * std::abs(other.span()[0]), "the loss");
      close(grads.x, near.x, "the gradient of x");
      close(grads.table, near.table, "the gradient of the table");
    });
  }
}

TEST_CASE("linear_cross_entropy takes memory for a piece of the logits, and says what it computes", "[ops][memory]") {
  const std::size_t logits = std::size_t{4} * 64 * 1024 * sizeof(f32), piece = logits / 8;
  const Temporarily pieces(tuning.logits_piece, static_cast<std::int64_t>(piece));
  on_mesh("d=1,t=1", [&](const DevicePtr& device) {
    const Mesh2 mesh(device);
    const auto taken = [](const DevicePtr& on, std::int64_t stored) {
      const Mesh2 there(on);
      const Weights w = weights(there);
      return peak(on, [&] { step(there, w, stored, false); });
    };
    const std::size_t small = 64 << 10;  // both gradients, and some numbers for each row
    const std::size_t in_pieces = taken(device, 0);
    expect(in_pieces > piece && in_pieces < piece + small, "in pieces: " + std::to_string(in_pieces) + " bytes");
    expect(taken(device, most) > logits, "stored");
    const auto dry = DevicePtr::make(parse_mesh("d=1,t=1"), 0, std::make_shared<DryWorld>(Peers::threads), 1, tuning);
    expect(taken(dry, 0) == in_pieces, "a dry run takes the same memory");

    auto& counts = detail::program_state(device).counts;
    counts.clear();
    step(mesh, weights(mesh), 0, false);
    const double product = 2.0 * 4 * 64 * 1000 * 8;
    expect(counts.at("linear_cross_entropy").flops == product, "one product forward");
    expect(counts.at("linear_cross_entropy_backward").flops == 3 * product, "three backward");
    expect(!counts.contains("einsum_unreduced"), "no logits are stored");
  });
}

template <dtype D>
struct Operands {
  Tensor<D, "B/d L M"> x;
  Tensor<D, "V/t M"> table;
};
using Narrow = Operands<bf16>;
TEST_CASE("linear_cross_entropy of bf16: a device multiplies it as it is, a CPU f32 copies that it does not keep",
          "[ops][simulated]") {
  struct Numbers {
    double loss = 0;
    std::vector<double> x, table;
    std::size_t kept = 0;
  };
  const auto of = [](DeviceKind kind) {
    Numbers numbers;
    const auto body = [&](const DevicePtr& device) {
      const Mesh2 mesh(device);
      const Narrow w{random_normal<bf16, "B/d L M">(mesh, sizes, {1, 1}),
                     random_normal<bf16, "V/t M">(mesh, sizes, {1, 2})};
      const auto ids = targets(mesh);
      const auto loss = [&](const Narrow& in) {
        return sum<"B/d L +t -> +d +t">(
            linear_cross_entropy<"B/d L M, V/t M -> B/d L V/t">(in.x, in.table, ids, std::int64_t{0}));
      };
      const auto [value, grads] = value_and_grad(mesh, loss, w);
      const std::size_t kept = detail::program_state(device).residual_bytes;
      const double total = item(all_reduce<"+d +t -> ">(value));
      const auto dx = fetch(grads.get<&Narrow::x>());
      const auto dtable = fetch(grads.get<&Narrow::table>());
      if (device->rank() != 0) return;
      numbers = {total, {}, {}, kept};
      for (const bf16 g : dx.data) numbers.x.push_back(static_cast<float>(g));
      for (const bf16 g : dtable.data) numbers.table.push_back(static_cast<float>(g));
    };
    on_mesh("d=1,t=2", body, {.kind = kind});
    return numbers;
  };
  for (const std::int64_t piece : {40000, 1 << 20}) {  // several pieces of logits, and one
    INFO(piece);
    const Temporarily pieces(tuning.logits_piece, piece);
    const Numbers cpu = of(DeviceKind::cpu), device = of(DeviceKind::simulated);
    if (cpu.x.empty()) continue;  // a rank that has none
    CHECK(cpu.kept == device.kept);
    CHECK(std::abs(device.loss - cpu.loss) <= 1e-5 * cpu.loss);
    const auto close = [](const std::vector<double>& a, const std::vector<double>& b) {
      double difference = 0, size = 0;
      for (std::size_t i = 0; i < a.size(); ++i) {
        difference += (a[i] - b[i]) * (a[i] - b[i]);
        size += b[i] * b[i];
      }
      return difference <= 1e-4 * size && size > 0;
    };
    CHECK(close(device.x, cpu.x));
    CHECK(close(device.table, cpu.table));
  }
}

TEST_CASE("linear_cross_entropy of bf16 takes no more memory on a CPU than that of f32", "[ops][memory]") {
  const Temporarily pieces(tuning.logits_piece, std::int64_t{40000});
  const auto taken = [](const DevicePtr& device, auto element) {
    using D = decltype(element);
    const Mesh2 mesh(device);
    const Sizes wide{{"B", 4}, {"L", 64}, {"M", 64}, {"V", 4096}};
    const Operands<D> w{random_normal<D, "B/d L M">(mesh, wide, {1, 1}), random_normal<D, "V/t M">(mesh, wide, {1, 2})};
    const auto ids = zeros<i32, "B/d L">(mesh, wide);
    const auto loss = [&](const Operands<D>& in) {
      return sum<"B/d L +t -> +d +t">(
          linear_cross_entropy<"B/d L M, V/t M -> B/d L V/t">(in.x, in.table, ids, std::int64_t{0}));
    };
    return peak(device, [&] { static_cast<void>(value_and_grad(mesh, loss, w)); });
  };
  const auto compare = [&](const DevicePtr& device) {
    const auto dry = DevicePtr::make(parse_mesh("d=1,t=1"), 0, std::make_shared<DryWorld>(Peers::threads), 1, tuning);
    const std::size_t f32s = taken(device, f32()), bf16s = taken(device, bf16());
    // The forward pass has the table in f32, as the backward pass of f32 has its gradient.
    expect(bf16s * 10 < f32s * 11, show(bf16s) + " bytes in bf16, " + show(f32s) + " in f32");
    expect(taken(dry, bf16()) == bf16s, "a dry run takes the same memory");
  };
  on_mesh("d=1,t=1", compare, {.kind = DeviceKind::cpu});
}

TEST_CASE("linear_cross_entropy communicates as cross_entropy does, in ops of their own", "[ops]") {
  on_mesh("d=1,t=2", [](const Mesh2& mesh) {
    const auto work = [&](std::int64_t stored) {
      std::map<std::string, detail::OpWork> of;
      const detail::Observing observing(mesh.device(), [&](const detail::OpReport& ran) {
        detail::OpWork& sum = of[ran.op.label()];
        sum.bytes += ran.work.bytes;
        sum.flops += ran.work.flops;
      });
      step(mesh, weights(mesh), stored, false);
      return of;
    };
    const auto in_pieces = work(0), whole = work(most);
    for (const char* op : {"all_reduce_max<`B/d L V/t -> B/d L`>", "all_reduce<`B/d L +t -> B/d L`>"}) {
      expect(in_pieces.at(op).bytes > 0 && in_pieces.at(op).bytes == whole.at(op).bytes,
             std::string(op) + " sends other bytes");
    }
    const auto& loss = in_pieces.at("linear_cross_entropy<`B/d L M, V/t M -> B/d L V/t`>");
    expect(loss.bytes == 0 && loss.flops == 2.0 * 4 * 64 * 8 * (mesh.rank() == 0 ? 512 : 488),
           "the loss is local, of true ids");
  });
}

TEST_CASE("linear_cross_entropy: padding counts nowhere, however low the logits are", "[ops]") {
  // Padded logits are 0, and exp(0 - highest) is infinite: with tokens that count for nothing they would make NaNs.
  on_meshes({"d=1,t=1", "d=2,t=1", "d=1,t=2", "d=2,t=2", "d=1,t=4"}, [](const Mesh2& mesh) {
    const Sizes padded{{"B", 3, 4}, {"L", 5}, {"M", 6, 8}, {"V", 9, 16}};  // of t=4 the last shard is all padding
    const Weights w{full<f32, "B/d L M/t">(mesh, padded, 10), full<f32, "V/t M/d">(mesh, padded, -2)};
    const auto ids = full<i32, "B/d L">(mesh, padded, 3);
    const auto counts = cast<f32>(iota<"L">(mesh, 5)) + zeros<f32, "B/d L">(mesh, padded);
    const auto of = [&](std::int64_t stored) {
      const auto loss = [&](const Weights& in) { return sum<"B/d L +t -> +d +t">(losses(in, ids, stored) * counts); };
      return value_and_grad(mesh, loss, w);
    };
    const auto [loss, grads] = of(0);
    const auto [expected_loss, expected] = of(most);
    const auto close = [](const auto& found, const auto& right) {
      const auto a = found.span(), b = right.span();
      for (std::size_t i = 0; i < b.size(); ++i)
        expect(std::abs(a[i] - b[i]) <= 1e-4F * (1 + std::abs(b[i])), show(a[i]) + ", not " + show(b[i]));
    };
    close(loss, expected_loss);
    close(grads.x, expected.x);
    close(grads.table, expected.table);
  });
}

TEST_CASE("linear_cross_entropy of no rows: the table's cotangent is zero", "[ops]") {
  on_mesh("d=1,t=2", [](const Mesh2& mesh) {
    const Sizes none{{"B", 0}, {"L", 64}, {"M", 8}, {"V", 1000, 1024}};
    poison(*mesh.device());
    const Weights w{zeros<f32, "B/d L M/t">(mesh, none), weights(mesh).table};
    const auto ids = zeros<i32, "B/d L">(mesh, none);
    const auto loss = [&](const Weights& in) { return sum<"B/d L +t -> +d +t">(losses(in, ids, -1)); };
    const auto [value, grads] = value_and_grad(mesh, loss, w);
    expect(value.span()[0] == 0, "a loss of nothing");
    expect(std::ranges::all_of(grads.table.span(), [](float g) { return g == 0; }), "a gradient of nothing");
  });
}

TEST_CASE("linear_cross_entropy: a target outside the vocabulary", "[ops][errors]") {
  on_meshes({"d=1,t=1", "d=1,t=2"}, [&](const Mesh2& mesh) {
    const Weights w = weights(mesh);
    for (const int id : {-1, 1000}) {
      const auto ids = full<i32, "B/d L">(mesh, sizes, id);
      expect_error([&] { wait_for(losses(w, ids, 0)); },
                   "linear_cross_entropy<`B/d L M, V/t M -> B/d L V/t`>: target " + std::to_string(id) +
                       " is outside the vocabulary, the table's 1000 rows; check the data against the "
                       "vocabulary size (" +
                       mesh.device()->describe() + ")");
    }
  });
}

}  // namespace
