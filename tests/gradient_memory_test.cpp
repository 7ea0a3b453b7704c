// What a backward pass takes no memory for: rows that are added to a gradient, a cotangent in place of another
// array.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "random_bits.hpp"
#include "shardlib/runtime/observe.hpp"
#include "shardlib/shardlib.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using Grid = Mesh<"d t">;
using Table = Tensor<f32, "V/t M/d">;
using Ids = Tensor<i32, "B/d L">;
using Logits = Tensor<f32, "B/d L V/t">;

// GPT-2's first and last op, on one table or on two.
struct Tied {
  Table embed;
};
struct Untied {
  Table embed, unembed;
};

template <dtype C, class W>
Tensor<f32, "+d +t"> loss(const W& w, const Ids& ids, Logits* kept) {
  const auto gathered = [](const Table& x) { return all_gather<"V/t M/d -> V/t M">(cast<C>(x)); };
  const auto table = gathered(w.embed);
  const auto x = all_reduce<"B/d L M +t -> B/d L M", f32>(index_unreduced<"[V/t] M, B/d L -> B/d L M +t">(table, ids));
  const auto out = [&] {
    if constexpr (std::is_same_v<W, Tied>)
      return table;
    else
      return gathered(w.unembed);
  }();
  const auto logits = einsum_unreduced<"B/d L M, V/t M -> B/d L V/t", f32>(cast<C>(x), out);
  if (kept != nullptr) *kept = logits;
  return sum<"B/d L +t -> +d +t">(cross_entropy(logits, ids));
}

struct Two {
  Tensor<f32, "N/d"> x, y;
};
struct Products {
  Tensor<f32, "N/d K"> x, y;
  Tensor<f32, "K C"> w;
};

constexpr std::int64_t batch = 4, length = 8, vocabulary = 1000, table_rows = 1024, width = 32;
Ids ids(const Grid& mesh) {
  const std::int64_t rows = batch / mesh.size("d"), first = rows * mesh.axis_index("d") * length;
  const auto numbers = std::make_shared<std::vector<i32>>();
  for (std::int64_t i = 0; i < rows * length; ++i) numbers->push_back(static_cast<i32>((first + i) * 377 % 20 * 49));
  return from_memory<i32, "B/d L">(mesh, {{"B", batch}, {"L", length}}, std::span<const i32>(*numbers), numbers);
}
Table table(const Grid& mesh) {
  return random_normal<f32, "V/t M/d">(mesh, {{"V", vocabulary, table_rows}, {"M", width}}, {5, 0});
}

template <dtype C>
void expect_gradients(const DevicePtr& device, float tolerance) {
  const Grid mesh(device);
  const Table w = table(mesh);
  const Ids tokens = ids(mesh);
  Logits kept;
  const auto [value, one] = value_and_grad(mesh, loss<C, Tied>, Tied{w}, tokens, nullptr);
  const auto [same, other] = value_and_grad(mesh, loss<C, Tied>, Tied{w}, tokens, &kept);
  const auto [again, two] = value_and_grad(mesh, loss<C, Untied>, Untied{w, w}, tokens, nullptr);
  expect(std::ranges::equal(one.embed.span(), other.embed.span()), "logits that are kept change the gradient");
  const auto kept_logits = kept.span();
  expect(std::ranges::none_of(kept_logits, [](float x) { return !std::isfinite(x); }) &&
             std::ranges::any_of(kept_logits, [](float x) { return std::abs(x) > 2; }),
         "logits that are kept were overwritten");
  const auto sum = two.embed + two.unembed;
  const auto values = one.embed.span(), expected = sum.span();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const float a = values[i], b = expected[i];
    expect(std::abs(a - b) <= tolerance * (1 + std::abs(b)),
           "element " + show(i) + ": " + show(a) + ", not " + show(b));
  }
}

}  // namespace

TEST_CASE("a table that is looked up and multiplied by: its gradient is the sum of both", "[ops][memory]") {
  on_meshes({"d=1,t=1", "d=2,t=1", "d=1,t=2", "d=2,t=2"}, [](const auto& device) {
    expect_gradients<f32>(device, 1e-6F);
    expect_gradients<bf16>(device, 2e-2F);
  });
}

TEST_CASE("a backward pass makes neither a second table of zeros nor a second block of logits", "[ops][memory]") {
  on_mesh("d=1,t=1", [](const DevicePtr& device) {
    const Grid mesh(device);
    const Tied w{table(mesh)};
    const Ids tokens = ids(mesh);
    constexpr std::size_t gradient = table_rows * width * 4, logits = batch * length * table_rows * 4, small = 64 << 10;
    const auto step = [&] { return value_and_grad(mesh, loss<f32, Tied>, w, tokens, nullptr); };
    const auto most = peak(device, [&] { static_cast<void>(step()); });
    expect(most > gradient + logits && most < gradient + logits + small, "took " + std::to_string(most) + " bytes");
    std::multiset<std::string_view> work;  // both write where they have read, which is not a mere renaming
    {
      const detail::Observing observing(device, [&](const auto& ran) {
        if (!detail::only_named(ran)) work.insert(ran.op.name);
      });
      const detail::NoteReads reading(detail::program_state(device));
      static_cast<void>(step());
    }
    expect(work.count("cross_entropy_backward") == 1 && work.count("scatter_add") == 1,
           "ops: " + std::to_string(work.size()));
  });
}

TEST_CASE("a backward pass rounds the cotangent of logits in its own memory, and gives the other half back",
          "[ops][memory]") {
  on_mesh("d=1,t=1", [](const DevicePtr& device) {
    const Grid mesh(device);
    const Tied w{table(mesh)};
    const Ids tokens = ids(mesh);
    constexpr std::size_t logits = batch * length * table_rows * 4;
    std::size_t before = 0, after = 0;
    int casts = 0;
    {
      const detail::Observing observing(device, [&](const auto& ran) {
        const std::size_t live = device->pool()->stats().live;
        if (std::string_view(ran.op.name) == "cross_entropy_backward") before = live;
        if (std::string_view(ran.op.name) != "cast" || !ran.work.in_place) return;
        ++casts;
        after = live;
      });
      static_cast<void>(value_and_grad(mesh, loss<bf16, Tied>, w, tokens, nullptr));
    }
    expect(casts == 1, "one for both operands, not " + std::to_string(casts));
    expect(after <= before - logits / 2, std::to_string(before) + " bytes before, " + std::to_string(after) + " after");
  });
  SUCCEED();
}

TEST_CASE("a cotangent is rounded in its own memory alike at every size, and not where another op has it",
          "[ops][memory]") {
  on_mesh("d=1", [](const Mesh<"d">& mesh) {
    for (const std::int64_t n : {1, 4095, 4096, 4097, 12289, 40000}) {
      const Sizes sizes{{"N", n}, {"K", 2}, {"C", 1}};
      const auto random = [&](std::uint64_t seed) { return random_normal<f32, "N/d K">(mesh, sizes, {seed, 0}); };
      const Products p{random(1), random(2), random_normal<f32, "K C">(mesh, sizes, {3, 0})};
      const auto ct = random_normal<f32, "N/d C">(mesh, sizes, {4, 0});
      const auto product = [](const auto& x, const auto& w) {
        return einsum_unreduced<"N/d K, K C -> N/d C", f32>(cast<bf16>(x), cast<bf16>(w));
      };
      const auto alone = [&](const Products& q) { return sum(product(q.x, q.w) * ct) + sum(product(q.y, q.w) * ct); };
      const auto shared = [&](const Products& q) { return sum((product(q.x, q.w) + product(q.y, q.w)) * ct); };
      int in_place = 0;
      const auto grads = [&](const auto& loss) {
        in_place = 0;
        const detail::Observing observing(mesh.device(), [&](const auto& ran) { in_place += ran.work.in_place; });
        return reduce_gradients(mesh, value_and_grad(mesh, loss, p).second);
      };
      const auto of_shared = grads(shared);
      const int shared_in_place = in_place;
      const auto of_alone = grads(alone);
      expect(in_place > shared_in_place, "a cotangent that no other op has is rounded in place");
      expect_same_bits(of_alone, of_shared);
      const auto expected = cast<f32>(einsum_unreduced<"N/d C, K C -> N/d K">(cast<bf16>(ct), cast<bf16>(p.w)));
      expect_same_bits(of_alone.x, expected);
      expect_same_bits(of_alone.y, expected);
    }
  });
  SUCCEED();
}

TEST_CASE("the backward pass of a map writes over the cotangent, and not where another op has it", "[ops][memory]") {
  on_mesh("d=1", [](const Mesh<"d">& mesh) {
    constexpr std::size_t array = 4 << 18, small = 64 << 10;
    const auto random = [&](std::uint64_t seed) {
      return random_normal<f32, "N/d">(mesh, {{"N", array / 4}}, {seed, 0});
    };
    const Two w{random(1), random(2)};
    const auto alone = [](const Two& v) { return sum(exp(v.x)) + sum(exp(v.y)); };
    const auto shared = [](const Two& v) { return sum(exp(v.x) + exp(v.y)); };
    const auto product = [](const Two& v) { return sum(map([](auto x, auto y) { return exp(x) * y; }, v.x, v.y)); };
    const auto grads = [&](const auto& loss) {
      std::optional<Two> found;
      const std::size_t most = peak(mesh.device(), [&] { found = value_and_grad(mesh, loss, w).second; });
      expect(most < 2 * array + small, "took " + std::to_string(most) + " bytes, more than the two gradients");
      return *found;
    };
    const Two of_alone = grads(alone), of_product = grads(product);
    expect_same_bits(of_alone, value_and_grad(mesh, shared, w).second);
    expect_same_bits(of_alone, Two{exp(w.x), exp(w.y)});
    expect_same_bits(of_product, Two{exp(w.x) * w.y, exp(w.x)});
  });
  SUCCEED();
}

TEST_CASE("a tape of many ops that no backward pass has taken is dropped without a call in a call", "[grad][memory]") {
  const auto bottom = detail::Handle<detail::Node>::make();
  detail::Slot last{bottom, 0};
  for (int i = 0; i < 300'000; ++i) {
    auto node = detail::Handle<detail::Node>::make();
    auto operand = detail::Handle<detail::Value>::make();
    operand->slot = last;  // as the residuals of a gradient that is differentiated have
    node->edges.push_back({last, {{operand}, {}}, nullptr});
    last = {node, 0};
  }
  CHECK(bottom.use_count() > 1);
  last = {};
  CHECK(bottom.use_count() == 1);
}
