// The orders of positions along a sharded length: who holds which, who computes what of causal attention, and the ops
// that know of positions.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "op_case.hpp"
#include "shardlib/run/sequence_order.hpp"
#include "shardlib/run/token_tensors.hpp"
#include "shardlib/shardlib.hpp"
#include "zigzag.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

constexpr std::int64_t pairs_at(std::int64_t devices, std::int64_t place, std::int64_t local, SequenceOrder order) {
  std::int64_t pairs = local * (local + 1) / 2;  // among its own
  for (std::int64_t step = 1; step < devices; ++step) {
    const auto block = detail::attended_block(order, place, step, local);
    pairs += block.queries * block.keys;
  }
  return pairs;
}
/// Whether all devices compute as many scores in zigzag order, half of all in sum.
constexpr bool is_balanced(std::int64_t devices, std::int64_t local) {
  const std::int64_t length = devices * local;
  for (std::int64_t place = 0; place < devices; ++place)
    if (devices * pairs_at(devices, place, local, SequenceOrder::zigzag) != length * (length + 1) / 2) return false;
  return true;
}
static_assert(is_balanced(1, 6) && is_balanced(2, 6) && is_balanced(3, 2) && is_balanced(4, 10) && is_balanced(8, 64));
static_assert(pairs_at(4, 0, 8, SequenceOrder::contiguous) == 36 &&
              pairs_at(4, 3, 8, SequenceOrder::contiguous) == 228);

/// The positions of all shards, one after the other.
std::vector<std::int64_t> held(SequenceOrder order, std::int64_t devices, std::int64_t local) {
  std::vector<std::int64_t> all;
  for (std::int64_t place = 0; place < devices; ++place)
    for (const auto [first, size] : detail::positions_of_shard(order, place, devices, local))
      for (std::int64_t i = 0; i < size; ++i) all.push_back(first + i);
  return all;
}

}  // namespace

TEST_CASE("an order of positions gives each one to one device", "[ops]") {
  CHECK(held(SequenceOrder::zigzag, 2, 4) == std::vector<std::int64_t>{0, 1, 6, 7, 2, 3, 4, 5});
  for (const auto order : {SequenceOrder::contiguous, SequenceOrder::zigzag})
    for (const std::int64_t devices : {1, 2, 3, 4, 8}) {
      auto all = held(order, devices, 6);
      if (order == SequenceOrder::zigzag) CHECK(std::is_sorted(all.begin(), all.end()) == (devices == 1));
      std::sort(all.begin(), all.end());
      std::vector<std::int64_t> expected(all.size());
      std::iota(expected.begin(), expected.end(), 0);
      CHECK(all == expected);
    }
}

TEST_CASE("the blocks that the devices attend to are the pairs that a causal mask shows", "[ops]") {
  constexpr std::int64_t local = 4;
  for (const auto order : {SequenceOrder::contiguous, SequenceOrder::zigzag})
    for (const std::int64_t devices : {1, 2, 3, 4, 8}) {
      const auto at = held(order, devices, local);
      const std::int64_t n = devices * local;
      std::vector<int> seen(static_cast<std::size_t>(n * n));
      const auto see = [&](std::int64_t query, std::int64_t key) {
        ++seen[static_cast<std::size_t>(at[static_cast<std::size_t>(query)] * n + at[static_cast<std::size_t>(key)])];
      };
      for (std::int64_t place = 0; place < devices; ++place) {
        for (std::int64_t q = 0; q < local; ++q)  // its own keys: the kernel goes by the order in memory
          for (std::int64_t k = 0; k <= q; ++k) see(place * local + q, place * local + k);
        for (std::int64_t step = 1; step < devices; ++step) {
          const auto block = detail::attended_block(order, place, step, local);
          const std::int64_t other = (place - step + devices) % devices;
          for (std::int64_t q = 0; q < block.queries; ++q)
            for (std::int64_t k = 0; k < block.keys; ++k)
              see(place * local + block.first_query + q, other * local + block.first_key + k);
        }
      }
      for (std::int64_t q = 0; q < n; ++q)
        for (std::int64_t k = 0; k < n; ++k) REQUIRE(seen[static_cast<std::size_t>(q * n + k)] == (k <= q ? 1 : 0));
    }
}

TEST_CASE("sequence_positions are those that the devices hold", "[ops]") {
  on_meshes({"d=1,t=1", "d=2,t=1", "d=1,t=4", "d=2,t=2"}, [](const Mesh<"d t">& mesh) {
    for (const auto order : {SequenceOrder::contiguous, SequenceOrder::zigzag}) {
      const auto check = [&](const auto& positions, std::int64_t place, std::int64_t devices) {
        const auto expected = held(order, devices, 24 / devices);
        for (std::size_t i = 0; i < positions.span().size(); ++i)
          expect(positions.span()[i] == expected[static_cast<std::size_t>(place * 24 / devices) + i],
                 "position " + show(positions.span()[i]) + " at " + show(i));
      };
      const int d = mesh.axis_index("d"), t = mesh.axis_index("t");
      check(sequence_positions<"L/t">(mesh, 24, order), t, mesh.size("t"));
      check(sequence_positions<"L/t/d">(mesh, 24, order), t * mesh.size("d") + d, mesh.size());
      check(sequence_positions<"L">(mesh, 24, order), 0, 1);
    }
    // One device has the order of positions, whatever the size.
    if (mesh.size() == 1) {
      const auto padded = sequence_positions<"L/t">(mesh, {5, 7}, SequenceOrder::zigzag);
      expect(padded.span()[4] == 4, "odd, and padded");
    }
  });
}

TEST_CASE("rope in zigzag order turns by the positions", "[ops]") {
  // The reference is the op in the order of positions, whose own test is that of angles.
  on_meshes({"d=1,t=1", "d=2,t=1", "d=1,t=4", "d=2,t=2"}, [](const Mesh<"d t">& mesh) {
    const auto x = random_normal<f64, "B/d L/t K">(mesh, {{"B", 2}, {"L", 24}, {"K", 6}}, {1, 0});
    const auto weights = random_normal<f64, "B/d L/t K">(mesh, {{"B", 2}, {"L", 24}, {"K", 6}}, {1, 1});
    const auto turned = [](const Tensor<f64, "B/d L/t K">& at) {
      const auto y = rope<"L", "K">(ZIGZAG(at, "d t", "B/d ", "L", "/t", "t", " K"), {}, {7, SequenceOrder::zigzag});
      return UNZIGZAG(y, "d t", "B/d ", "L", "/t", "t", " K");
    };
    const auto expected = [](const Tensor<f64, "B/d L/t K">& at) { return rope<"L", "K">(at, {}, 7); };
    const auto gradient = [&](const auto& f) {
      const auto loss = [&](const Tensor<f64, "B/d L/t K">& at) { return sum(f(at) * weights); };
      return std::get<1>(value_and_grad(mesh, loss, x));
    };
    const auto same = [](const auto& a, const auto& b, const char* what) {
      for (std::size_t i = 0; i < a.span().size(); ++i) expect(a.span()[i] == b.span()[i], what);
    };
    same(turned(x), expected(x), "a value");
    same(gradient(turned), gradient(expected), "a gradient");
  });
}

TEST_CASE("token_tensors in zigzag order has the device's two parts of each row", "[ops]") {
  struct Batch {
    Tensor<i32, "B/d L/s"> inputs, targets, segments;
    Tensor<f32, "B/d L/s"> weights;
  };
  on_meshes({"d=1,s=1", "d=1,s=2", "d=2,s=2", "d=1,s=4"}, [](const Mesh<"d s">& mesh) {
    constexpr std::int64_t length = 16;
    io::TokenBatch rows;  // two rows of each device of d
    for (int i = 0; i < 2 * length; ++i) {
      rows.inputs.push_back(i);
      rows.targets.push_back(i + 1);
      rows.segments.push_back(i / 5);
      rows.weights.push_back(static_cast<float>(i));
    }
    const auto batch = run::token_tensors<Batch, "B/d L/s">(mesh, rows, length, SequenceOrder::zigzag);
    const auto at = sequence_positions<"L/s">(mesh, length, SequenceOrder::zigzag);
    const std::size_t local = at.span().size();
    expect(batch.inputs.span().size() == 2 * local && batch.inputs.size("L") == length, "sizes");
    for (std::size_t i = 0; i < 2 * local; ++i) {
      const int token = static_cast<int>(i / local) * static_cast<int>(length) + at.span()[i % local];
      expect(batch.inputs.span()[i] == token && batch.targets.span()[i] == token + 1 &&
                 batch.segments.span()[i] == token / 5 && batch.weights.span()[i] == static_cast<f32>(token),
             "token " + show(batch.inputs.span()[i]) + " at " + show(i));
    }
    if (mesh.size("s") != 2) return;
    const io::TokenBatch shorter{std::vector<std::int32_t>(6), std::vector<std::int32_t>(6),
                                 std::vector<std::int32_t>(6), std::vector<float>(6)};
    static_cast<void>(run::token_tensors<Batch, "B/d L/s">(mesh, shorter, 6));
    expect_error<UsageError>(
        [&] { static_cast<void>(run::token_tensors<Batch, "B/d L/s">(mesh, shorter, 6, SequenceOrder::zigzag)); },
        "token_tensors: rows of 6 tokens do not divide into 4 parts, two for each device in zigzag order (" +
            mesh.device()->describe() + "); choose a length that does, or SequenceOrder::contiguous");
  });
}

TEST_CASE("token_tensors takes a batch whose dims have other names", "[ops]") {
  struct Batch {
    Tensor<i32, "rows/d len/s"> inputs, targets, segments;
    Tensor<f32, "rows/d len/s"> weights;
  };
  on_mesh("d=2,s=2", [](const DevicePtr& device) {
    const Mesh<"d s"> mesh(device);
    const io::TokenBatch rows{{0, 1, 2, 3}, {1, 2, 3, 4}, {0, 0, 0, 0}, {1, 1, 1, 1}};
    const auto batch = run::token_tensors<Batch, "rows/d len/s">(mesh, rows, 4);
    expect(batch.inputs.size("rows") == 2 && batch.inputs.size("len") == 4, "sizes");
    expect(batch.targets.span()[0] == 2 * mesh.axis_index("s") + 1, "the first target of the device's part");
  });
  SUCCEED();
}

TEST_CASE("zigzag order: a length that does not divide, or is padded", "[ops]") {
  on_mesh("d=1,t=2", [](const Mesh<"d t">& mesh) {
    const auto refuses = [&](const auto& f, const std::string& op, const std::string& why) {
      expect_error(f, op + ": " + why + " (" + mesh.device()->describe() + ")");
    };
    const std::string odd =
        "dim `L` of size 6 over 2 devices has no zigzag order, in which each holds two parts of 4; choose a multiple "
        "of 4, or SequenceOrder::contiguous";
    const std::string padded =
        "dim `L` is 7 (padded to 8), and in zigzag order padding would be between positions; choose a size that "
        "needs none";
    for (const bool is_padded : {false, true}) {
      const NamedSize length = is_padded ? NamedSize{"L", 7, 8} : NamedSize{"L", 6};
      const std::string& why = is_padded ? padded : odd;
      const auto x = zeros<f32, "L/t K">(mesh, {length, {"K", 4}});
      refuses([&] { static_cast<void>(rope<"L", "K">(x, {}, SequenceOrder::zigzag)); }, "rope<`K`>", why);
      refuses([&] { static_cast<void>(causal_attention<"L", "K", over<"t">>(x, x, x, {}, SequenceOrder::zigzag)); },
              "causal_attention<`K`>", why);
      refuses(
          [&] {
            static_cast<void>(sequence_positions<"L/t">(mesh, {length.size, length.padded}, SequenceOrder::zigzag));
          },
          "sequence_positions<`L/t`>", why);
    }
  });
}

TEST_CASE("sequence_order: zigzag if twice the devices divide the length", "[run]") {
  run::Training t;
  t.sample_only = true;  // no note
  const auto order = [&](const char* mesh, std::int64_t length) {
    t.seq = length;
    return run::sequence_order(parse_mesh(mesh), t, "s");
  };
  CHECK(order("d=2", 7) == SequenceOrder::contiguous);
  CHECK(order("d=2,s=3", 12) == SequenceOrder::zigzag);
  CHECK(order("d=2,s=3", 9) == SequenceOrder::contiguous);
  t.sample_only = false;
  expect_error<UsageError>([&] { static_cast<void>(order("d=2,s=3", 10)); },
                           "--seq 10 does not divide over s = 3 (mesh d=2,s=3): choose a multiple of 3, or of 6 for "
                           "equal work");
}
