// Padded dims: how they are bound, made, placed and shown, what does not work along them, and a whole model whose every
// size is padded. That each op and derivative is right with padding is tested where the op is: check_cases runs every
// case of tests/ops_*_test.cpp a second time, padded.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <shardlib/interop/eigen.hpp>
#include <shardlib/shardlib.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../examples/gpt_model.hpp"
#include "gpt_spelled.hpp"
#include "op_case.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using Grid = Mesh<"d t">;

static_assert(round_up(50257, 64) == 50304 && round_up(64, 64) == 64 && round_up(0, 8) == 0);

/// The whole array without padding, which is checked to be zero.
template <class D, Spec S>
Global whole(const Tensor<D, S>& x) {
  return assemble(*x.value(), detail::parsed<S>);
}
template <class D>
HostArray<D> counting(std::vector<std::int64_t> shape) {
  HostArray<D> host(std::move(shape));
  for (std::size_t i = 0; i < host.data.size(); ++i) host.data[i] = static_cast<D>(static_cast<f32>(i + 1));
  return host;
}
void expect_text(const std::string& text, const std::string& expected) {
  expect(text == expected, "\"" + text + "\" instead of \"" + expected + "\"");
}

TEST_CASE("padded: sizes", "[ops][padding]") {
  on_mesh("d=1,t=3", [](const Grid& mesh) {
    const auto x = ones<f32, "A V/t">(mesh, {{"A", 2}, {"V", 7, 9}});
    expect(x.size("V") == 7 && x.padded_size("V") == 9 && x.size("A") == 2 && x.padded_size("A") == 2, "sizes");
    expect(x.global_shape()[1] == 7 && x.local_shape()[1] == 3 && x.span().size() == 6, "shape");
    const std::vector<std::vector<f32>> shards{{1, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1}, {1, 0, 0, 1, 0, 0}};
    const auto& shard = shards[static_cast<std::size_t>(mesh.axis_index("t"))];
    expect(std::equal(shard.begin(), shard.end(), x.span().begin()), "this device's shard");
    expect_error([&] { static_cast<void>(x.padded_size("B")); }, "padded_size: `A V/t` has no dim `B`");
    // Sizes go where names go.
    const auto y = rename<"V -> C">(rearrange<"A V/t -> V/t A">(x));
    expect(y.size("C") == 7 && y.padded_size("C") == 9, "rename and rearrange");
    expect(all_gather<"A V/t -> A V">(x).padded_size("V") == 9, "all_gather");
    {
      const Scope scope(mesh);
      static_cast<void>(zeros<f32, "V">(mesh, {{"V", 7, 9}}));
      expect(zeros<f32, "V/t">(mesh, {}).padded_size("V") == 9, "a scope knows the padding");
      expect(place<Tensor<f32, "V/t">>(mesh, counting<f32>({7})).padded_size("V") == 9, "and pads what is placed");
    }
  });
}

TEST_CASE("padded: arrays from nothing do not depend on the padding", "[ops][padding]") {
  std::map<std::string, Global> first;
  std::mutex mutex;
  on_meshes({"d=1,t=1", "d=2,t=1", "d=1,t=3", "d=2,t=2", "d=2,t=3"}, [&](const Grid& mesh) {
    poison(*mesh.device());
    const auto check = [&](const std::string& name, const auto& x) {
      Global g = whole(x);
      const std::lock_guard lock(mutex);
      const auto [it, fresh] = first.try_emplace(name, g);
      expect(it->second.shape == g.shape && it->second.data == g.data, name + " depends on the padding");
    };
    const RandomKey key{7, 3};
    for (const std::int64_t unit : {12, 24, 60}) {
      const std::int64_t n = round_up(23, unit), m = round_up(5, unit);
      const Sizes sizes{{"A", 23, n}, {"C", 5, m}, {"elsewhere", 3, 4}};
      check("normal", random_normal<f32, "A/d/t C">(mesh, sizes, key));
      check("normal of bf16", random_normal<bf16, "A C/t">(mesh, sizes, key));
      check("truncated", random_truncated_normal<f32, "C/d A/t">(mesh, sizes, key));
      check("uniform", random_uniform<f64, "A C">(mesh, sizes, key));
      check("dropout", dropout(ones<f32, "A/d C/t">(mesh, sizes), 0.5, key));
      check("full", full<bf16, "A/d C/t">(mesh, sizes, 0.3));
      check("ones of u8", ones<u8, "A/t C">(mesh, sizes));
      check("ones of bool", ones<bool_, "C/t A/d">(mesh, sizes));
      check("ones of f64", ones<f64, "A/t/d">(mesh, sizes));
      check("iota", iota<"A/t/d">(mesh, {23, n}));
      check("causal_mask", causal_mask<"A/d C/t">(mesh, {23, n}, {5, m}));
    }
    // The same without padding.
    const Sizes sizes{{"A", 23}, {"C", 5}};
    check("normal", random_normal<f32, "A C">(mesh, sizes, key));
    check("normal of bf16", random_normal<bf16, "A C">(mesh, sizes, key));
    check("truncated", random_truncated_normal<f32, "C A">(mesh, sizes, key));
    check("uniform", random_uniform<f64, "A C">(mesh, sizes, key));
    check("dropout", dropout(ones<f32, "A C">(mesh, sizes), 0.5, key));
    check("full", full<bf16, "A C">(mesh, sizes, 0.3));
    check("iota", iota<"A">(mesh, 23));
    check("causal_mask", causal_mask<"A C">(mesh, 23, 5));
  });
  REQUIRE((first.size() == 11 || world_rank() > 0));
}

TEST_CASE("padded: host arrays in and out", "[ops][padding]") {
  struct Pair {
    Tensor<f32, "V/t M/d"> table;
    Tensor<f32, "M/t/d"> scale;
  };
  on_meshes({"d=1,t=1", "d=2,t=1", "d=3,t=1", "d=1,t=3", "d=2,t=2"}, [](const Grid& mesh) {
    poison(*mesh.device());
    const auto table = counting<f32>({7, 5}), scale = counting<f32>({5});
    const Sizes sizes{{"V", 7, 12}, {"M", 5, 12}, {"B", 1, 12}};
    const auto x = place<Tensor<f32, "V/t M/d">>(mesh, table, sizes);
    expect(whole(x).data == std::vector<double>(table.data.begin(), table.data.end()), "place");
    expect(fetch(x).data == table.data && fetch(x).shape == table.shape, "fetch");
    expect(fetch(to_partial<"V/t M -> V/t M +d">(all_gather<"V/t M/d -> V/t M">(x))).data == table.data, "sums");
    const auto pair = place<Pair>(mesh, std::vector{table, scale}, {}, sizes);
    expect(pair.scale.padded_size("M") == 12, "a struct");
    const auto back = fetch(pair);
    expect(back[0].data == table.data && back[1].data == scale.data, "a struct, fetched");
    const auto product = spmd(
        mesh, [](const Tensor<f32, "V/t M/d">& t, const Pair& p) { return t * p.table; }, sizes);
    const auto squares = product(table, std::vector{table, scale});
    for (std::size_t k = 0; k < 35; ++k) expect(squares.data[k] == table.data[k] * table.data[k], "spmd of a struct");
    const auto twice = spmd(mesh, [](const Tensor<bf16, "B/d M">& b) { return exp(b); }, {{"B", 1, 12}});
    const auto y = twice(counting<bf16>({1, 5}));
    expect(y.shape == Shape{1, 5} && y.data.size() == 5 && static_cast<f32>(y.data[0]) > 2.7F, "spmd");
  });
}

TEST_CASE("padded: memory of the caller's is checked", "[ops][padding]") {
  on_mesh("d=1,t=2", [](const Grid& mesh) {
    const bool last = mesh.axis_index("t") == 1;
    std::vector<f32> memory{1, 2, 3, 4, 5, 6};
    if (last) memory = {7, 8, 0, 9, 10, 0};
    const auto make = [&] {
      return from_memory<f32, "B V/t">(mesh, {{"B", 2}, {"V", 5, 6}}, std::span<const f32>(memory));
    };
    expect(whole(make()).data == std::vector<double>{1, 2, 3, 7, 8, 4, 5, 6, 9, 10}, "the shard");
    const auto padded = make();
    expect(as_eigen(padded)(1, 2) == (last ? 0 : 6), "Eigen sees the padding");
    memory[5] = 1;
    if (last)
      expect_error(make,
                   "from_memory<`B V/t`>: element 5 of the memory is padding, but not zero; clear the padding first (" +
                       mesh.device()->describe() + ")");
    else
      static_cast<void>(make());
  });
}

TEST_CASE("padded: texts and pictures", "[ops][padding]") {
  on_mesh("d=1,t=2", [](const Grid& mesh) {
    const auto x = place<Tensor<f32, "B/d V/t">>(mesh, counting<f32>({2, 5}), {{"V", 5, 8}});
    const bool last = mesh.axis_index("t") == 1;
    expect_text(fmt::format("{}", x), "f32[B/d=2 V/t=5 (padded to 8)] on " + mesh.device()->describe() +
                                          ": shard 2x4, min " + (last ? "5, max 10, mean 7.5" : "1, max 9, mean 5"));
    expect_text(fmt::format("{}", zeros<f32, "V/t">(mesh, {{"V", 1, 4}})),
                "f32[V/t=1 (padded to 4)] on " + mesh.device()->describe() + ": shard 2" +
                    (last ? ", empty" : ", min 0, max 0, mean 0"));
    expect_text(visualize_sharding(x),
                "f32[B/d V/t] on mesh d=1,t=2, V=5 (padded to 8)\n"
                "┌───┬───┐\n"
                "│ 0 │ 1 │\n"
                "└───┴───┘\n");
  });
}

TEST_CASE("padded: maxima do not see the padding", "[ops][padding]") {
  on_meshes({"d=1,t=1", "d=2,t=1", "d=1,t=3", "d=2,t=2", "d=2,t=3"}, [](const Grid& mesh) {
    poison(*mesh.device());
    // All negative: the padding's zeros would win. On some meshes the last shards are nothing but padding.
    for (const std::int64_t n : {1, 5, 12})
      for (const std::int64_t padded : {12, 24}) {
        HostArray<f32> host({3, n});
        for (std::size_t i = 0; i < host.data.size(); ++i) host.data[i] = -1 - static_cast<f32>((i * 7) % 11);
        const Sizes sizes{{"B", 3, 6}, {"V", n, padded}};
        const auto x = place<Tensor<f32, "B/d V/t">>(mesh, host, sizes);
        const auto y = all_gather<"B/d V/t -> B/d V">(x);
        std::vector<double> highest, where, all{-100};
        for (std::int64_t b = 0; b < 3; ++b) {
          const auto row = host.data.begin() + b * n, best = std::max_element(row, row + n);
          highest.push_back(static_cast<double>(*best));
          where.push_back(static_cast<double>(best - row));
          all[0] = std::max(all[0], highest.back());
        }
        expect(whole(all_reduce_max<"B/d V/t -> B/d">(x)).data == highest, "all_reduce_max");
        expect(whole(all_reduce_max<"B/d V/t -> ">(x)).data == all, "all_reduce_max of all");
        expect(whole(max<"B/d V -> B/d">(y)).data == highest, "max");
        expect(whole(max<"V B/d -> B/d">(rearrange<"B/d V -> V B/d">(y))).data == highest, "max of columns");
        expect(whole(max<"2 B/d V -> B/d">(broadcast<"B/d V -> 2 B/d V">(y, {}))).data == highest, "max of two dims");
        expect(whole(max<"V B C -> C">(broadcast<"V B -> V B C">(
                         all_gather<"V B/d -> V B">(rearrange<"B/d V -> V B/d">(y)), {{"C", 2, 4}})))
                       .data == std::vector<double>{all[0], all[0]},
               "max of padded dims");
        expect(whole(max<"B/d V -> B/d">(cast<i32>(y))).data == highest, "max of integers");
        for (double& top : highest) top = -top;
        expect(whole(min<"B/d V -> B/d">(-y)).data == highest, "min");
        expect(whole(min<"B/d V -> B/d">(-cast<i32>(y))).data == highest, "min of integers");
        expect(whole(argmax<"B/d V -> B/d">(y)).data == where, "argmax");
        expect(whole(argmax<"V B/d -> B/d">(rearrange<"B/d V -> V B/d">(y))).data == where, "argmax of columns");
        const auto p = softmax<"V">(y);
        for (const double v : whole(sum<"B/d V -> B/d">(p)).data) expect(std::abs(v - 1) < 1e-6, "softmax");
      }
  });
}

TEST_CASE("padded: integers are divided where a shard is padding alone", "[ops][padding]") {
  on_mesh("d=4,t=1", [](const Grid& mesh) {
    const Sizes sizes{{"A", 3, 8}};
    const auto x = place<Tensor<i32, "A/d">>(mesh, HostArray<i32>({3}, {6, 7, 8}), sizes);
    const auto y = place<Tensor<i32, "A/d">>(mesh, HostArray<i32>({3}, {2, 3, 4}), sizes);
    expect(whole(x / y).data == std::vector<double>{3, 2, 2}, "quotients");
  });
}

TEST_CASE("padded: what is not finite at the padding stays there", "[ops][padding]") {
  on_mesh("d=2,t=1", [](const Grid& mesh) {
    const auto x = place<Tensor<f32, "B/d M">>(mesh, counting<f32>({3, 5}), {{"B", 3, 4}, {"M", 5, 6}});
    const auto f = [](const Tensor<f32, "B/d M">& v) -> Tensor<f32, "+d +t"> {
      // 0 / 0, log 0, 1 / sqrt 0, and an infinite constant.
      const auto one = map([](auto a, auto b) { return a / b; }, v, v);
      const auto y = one + v / v + log(v) - rsqrt(v) + map([](auto a) { return 1.0F / a; }, v) + sqrt(v);
      return to_partial<"+d -> +d +t">(sum(maximum(y, full<f32, "M">(Grid(v.device()), {{"M", 5, 6}}, -1e30))));
    };
    const auto [l, grads] = value_and_grad(mesh, f, x);
    double expected = 0;
    std::vector<double> slopes;
    for (int i = 1; i <= 15; ++i) {
      expected += 2 + std::log(i) - 1 / std::sqrt(i) + 1.0 / i + std::sqrt(i);
      slopes.push_back(1.0 / i + 0.5 / (i * std::sqrt(i)) - 1.0 / (i * i) + 0.5 / std::sqrt(i));
    }
    const double found = static_cast<double>(item(all_reduce<"+d +t -> ">(l)));
    expect(std::abs(found - expected) < 1e-5 * expected, "value " + show(found) + " instead of " + show(expected));
    const Global gradient = assemble(*grads.value(), parse_tensor("B/d M +t").spec);
    for (std::size_t i = 0; i < 15; ++i) expect(std::abs(gradient.data[i] - slopes[i]) < 1e-5, "gradient");
  });
}

TEST_CASE("padded: merge, split and concat keep the padding at the end", "[ops][padding]") {
  on_mesh("d=1,t=2", [](const Grid& mesh) {
    const auto host = counting<f32>({12});
    const auto x = place<Tensor<f32, "A/t">>(mesh, host, {{"A", 12, 16}});
    const auto by_minor = split<"A/t -> H/t K">(x, {{"K", 4}});
    expect(by_minor.size("H") == 3 && by_minor.padded_size("H") == 4 && by_minor.padded_size("K") == 4, "split by K");
    const auto by_major = split<"A/t -> H/t K">(x, {{"H", 3, 4}});
    expect(by_major.size("K") == 4 && by_major.padded_size("K") == 4, "split by H");
    expect(fetch(by_major).data == host.data, "split");
    const auto back = merge<"H/t K -> A/t">(by_major);
    expect(back.size("A") == 12 && back.padded_size("A") == 16 && fetch(back).data == host.data, "merge");
    // The second of two operands may be padded.
    const Tensor<f32, "B C"> a(detail::as_leaf(*place<Tensor<f32, "B C">>(mesh, counting<f32>({2, 3})).value()));
    const Tensor<f32, "B C"> b(
        detail::as_leaf(*place<Tensor<f32, "B C">>(mesh, counting<f32>({2, 2}), {{"C", 2, 4}}).value()));
    const auto c = concat<"C, C -> N">(a, b);
    expect(c.size("N") == 5 && c.padded_size("N") == 7, "sizes of concat");
    expect(whole(c).data == std::vector<double>{1, 2, 3, 1, 2, 4, 5, 6, 3, 4}, "concat");
    const auto found =
        detail::Backward({{c.value()->slot, detail::detached(*c.value())}}, {a.value()->slot, b.value()->slot}).run();
    expect(whole(Tensor<f32, "B C">(found[0])).data == whole(a).data, "cotangent of the first");
    expect(whole(Tensor<f32, "B C">(found[1])).data == whole(b).data, "cotangent of the second");
    expect(found[1]->global.padded[1] == 4, "its padding");
  });
}

TEST_CASE("padded: errors", "[ops][padding][errors]") {
  on_mesh("d=1,t=2", [](const Grid& mesh) {
    const std::string here = " (" + mesh.device()->describe() + ")";
    const std::string pad = "; give the dim one padded size, in a `Scope` or where the tensors are made";
    const auto v = zeros<f32, "V">(mesh, {{"V", 5, 6}});
    ERROR_IS("zeros<`V`>: dim `V` of size 5 cannot be padded to 4, which is less" + here,
             zeros<f32, "V">(mesh, {{"V", 5, 4}}));
    ERROR_IS(
        "zeros<`V/t`>: dim `V/t` of size 250 (padded to 255) does not divide evenly into 2 shards; choose a multiple "
        "of 2, or pad it: {\"V\", 250, 256}" +
            here,
        zeros<f32, "V/t">(mesh, {{"V", 250, 255}}));
    ERROR_IS("+ of `V` and `V`: dim `V` is 5, but 5 (padded to 6) in another operand" + pad + here,
             v + zeros<f32, "V">(mesh, {{"V", 5}}));
    ERROR_IS("* of `V` and `V`: dim `V` is 5 (padded to 8), but 5 (padded to 6) in another operand" + pad + here,
             v * zeros<f32, "V">(mesh, {{"V", 5, 8}}));
    ERROR_IS("einsum_unreduced<`V, V -> `>: dim `V` is 4 (padded to 6), but 5 (padded to 6) in another operand" + here,
             einsum_unreduced<"V, V -> ">(v, zeros<f32, "V">(mesh, {{"V", 4, 6}})));
    {
      const Scope scope(mesh);
      static_cast<void>(v + v);
      ERROR_IS(
          "zeros<`V`>: dim `V` is 6, but 5 (padded to 6) in + of `V`, and a name has one size within this Scope; "
          "`rename` one of the two, or open a `Scope` around the part that means another size" +
              here,
          zeros<f32, "V">(mesh, {{"V", 6}}));
    }
    ERROR_IS("place<`V/t`>: dim `V` is 6, but 5 (padded to 6) in another operand" + here,
             place<Tensor<f32, "V/t">>(mesh, HostArray<f32>({6}), {{"V", 5, 6}}));
    ERROR_IS(
        "shift<`V/t`>: dim `V` is 5 (padded to 6), and a shift would bring its padding between the shards; choose a "
        "size that needs none" +
            here,
        shift<"V/t", "t">(zeros<f32, "V/t">(mesh, {{"V", 5, 6}}), 1));
    static_cast<void>(shift<"A/t V", "t">(zeros<f32, "A/t V">(mesh, {{"A", 4}, {"V", 5, 6}}), 1));
    ERROR_IS(
        "rope<`D`>: dim `D` is 6 (padded to 8), and rotary embedding pairs its halves, which padding would move; "
        "choose a size that needs none" +
            here,
        rope<"L", "D">(zeros<f32, "L D">(mesh, {{"L", 3, 4}, {"D", 6, 8}})));
    ERROR_IS(
        "merge<`A V -> B`>: dim `V` is 5 (padded to 6), and only the first of the merged dims may be padded; choose a "
        "size that needs no padding" +
            here,
        merge<"A V -> B">(zeros<f32, "A V">(mesh, {{"A", 4}, {"V", 5, 6}})));
    ERROR_IS(
        "concat<`V, V -> N`>: dim `V` is 5 (padded to 6), and the padding of the first operand would be before the "
        "second; choose a size that needs none" +
            here,
        concat<"V, V -> N">(v, v));
    ERROR_IS("concat<`A, A -> N`>: dim `V` is 5 (padded to 6) in one operand, but 5 in another" + here,
             concat<"A, A -> N">(zeros<f32, "A V">(mesh, {{"A", 4}, {"V", 5, 6}}),
                                 zeros<f32, "A V">(mesh, {{"A", 4}, {"V", 5}})));
    const auto a = zeros<f32, "A">(mesh, {{"A", 12, 16}});
    ERROR_IS(
        "split<`A -> H K`>: dim `A` of size 12 (padded to 16) does not split by `K` = 3; choose a size that divides "
        "it" +
            here,
        split<"A -> H K">(a, {{"K", 3}}));
    ERROR_IS(
        "split<`A -> H K`>: dim `K` is 3 (padded to 4), and only the first of the parts may be padded; give it the "
        "padding, or choose a size that needs none" +
            here,
        split<"A -> H K">(a, {{"H", 4}}));
    ERROR_IS(
        "index_unreduced<`[V] M, B -> B M`>: gather: index 5 is outside dim `V` of size 5; check the data against that "
        "size" +
            here,
        wait_for(index_unreduced<"[V] M, B -> B M">(
            zeros<f32, "V M">(mesh, {{"V", 5, 6}, {"M", 2}}),
            place<Tensor<i32, "B">>(mesh, HostArray<i32>({2}, {4, 5}), {{"B", 2, 4}}))));
    const auto none = zeros<f32, "A V">(mesh, {{"A", 4}, {"V", 0, 6}});
    const std::string no_elements = ": dim `V` has size 0; it needs at least one element" + here;
    ERROR_IS("argmax<`A V -> A`>" + no_elements, argmax<"A V -> A">(none));
    ERROR_IS("max<`A V -> A`>" + no_elements, max<"A V -> A">(none));
    ERROR_IS("min<`A V -> `>" + no_elements, min<"A V -> ">(none));
    ERROR_IS("all_reduce_max<`A V -> A`>" + no_elements, all_reduce_max<"A V -> A">(none));
    const auto no_condition = greater(none, 0.0);
    expect(!item(any<"A V -> ">(no_condition)) && item(all<"A V -> ">(no_condition)), "none is true, and none false");
    expect(std::exp(item(logsumexp<"A V -> ">(none))) == 0, "the log of no summand");
    expect(max<"V A -> V">(rearrange<"A V -> V A">(none)).size("V") == 0, "neither has the result elements");
  });
}

// ---- a whole model -------------------------------------------------------------------------------------------------

/// The loss of the GPT and all its gradients, whole; of another one that is tied, with attention in einsums and the
/// library's cross_entropy.
struct Step {
  double loss = 0;
  std::vector<std::string> names;
  std::vector<HostArray<f32>> gradients;
};

using GptMesh = Mesh<"r d s t">;

Step step(const GptMesh& mesh, const std::vector<NamedSize>& named, bool other) {
  std::map<std::string_view, NamedSize> size;
  for (const NamedSize& s : named) size[s.name] = s;
  const Sizes sizes{size["B"], size["L"], size["M"], size["Q"], size["K"], size["D"], size["F"], size["V"]};
  gpt::Model<f32> model;
  if (!other) model.unembed.resize(1);
  model.layers.resize(2);
  std::uint64_t stream = 0;
  for_each_leaf(
      [&]<Spec S>(std::string_view name, Tensor<f32, S>& w) {
        const auto normal = random_normal<f32, S>(mesh, sizes, {1, stream++}) * 0.3;
        w = name.find("norm") != std::string_view::npos ? normal + 1.0 : normal;
      },
      model);
  const std::int64_t rows = size["B"].size, length = size["L"].size;
  const auto tokens = [&](std::uint64_t seed, std::int64_t below) {
    HostArray<i32> host({rows, length});
    for (std::size_t i = 0; i < host.data.size(); ++i)
      host.data[i] = static_cast<i32>(mix(seed + i) % static_cast<std::uint64_t>(below));
    return host;
  };
  auto segments = tokens(3, 1);
  for (std::size_t i = 0; i < segments.data.size(); ++i)
    segments.data[i] = static_cast<i32>(i % static_cast<std::size_t>(length) / 4);
  const auto put = [&](const HostArray<i32>& host) { return place<Tensor<i32, "B/r/d L/s">>(mesh, host, sizes); };
  const gpt::Batch batch{put(tokens(1, size["V"].size)), put(tokens(2, size["V"].size)), put(segments),
                         full<f32, "B/r/d L/s">(mesh, sizes, 1 / static_cast<double>(rows * length))};
  const DimSize positions{length, size["L"].padded};
  const auto loss = [&](const gpt::Model<f32>& w) {
    if (!other) return gpt::loss(w, batch, {});
    const auto causal = causal_mask<"Qlen/s Klen">(mesh, positions, positions);
    return gpt_spelled::library_loss(gpt_spelled::logits(w, batch, causal, {}), batch);
  };
  auto [l, pending] = value_and_grad(mesh, loss, model);
  const auto gradients = reduce_gradients(mesh, std::move(pending));
  for_each_leaf(
      [&]<Spec S>(std::string_view name, const Tensor<f32, S>& g) {
        for (const double v : whole(g).data) expect(std::isfinite(v), std::string(name) + " is finite");
      },
      gradients);
  return {static_cast<double>(item(all_reduce<"+d +r +s +t -> ">(l))), leaf_names(model), fetch(gradients)};
}

TEST_CASE("padded: a GPT's loss and gradients are those without padding", "[ops][padding][model]") {
  // `unpadded`, then what is padded of it.
  struct Run {
    std::vector<NamedSize> unpadded, padded;
  };
  const NamedSize Q{"Q", 2}, D{"D", 4};
  const std::vector<Run> runs{
      // The vocabulary.
      {{{"B", 4}, {"L", 8}, {"M", 16}, Q, {"K", 4}, D, {"F", 24}, {"V", 250}},
       {{"B", 4}, {"L", 8}, {"M", 16}, Q, {"K", 4}, D, {"F", 24}, {"V", 250, 256}}},
      // A batch of one row, on devices that have none of it.
      {{{"B", 1}, {"L", 8}, {"M", 16}, Q, {"K", 4}, D, {"F", 24}, {"V", 32}},
       {{"B", 1, 4}, {"L", 8}, {"M", 16}, Q, {"K", 4}, D, {"F", 24}, {"V", 32}}},
      // Everything.
      {{{"B", 3}, {"L", 7}, {"M", 13}, Q, {"K", 3}, D, {"F", 21}, {"V", 29}},
       {{"B", 3, 4}, {"L", 7, 10}, {"M", 13, 16}, Q, {"K", 3, 4}, D, {"F", 21, 24}, {"V", 29, 44}}},
  };
  for (const Run& run : runs)
    for (const bool other : {false, true}) {
      std::optional<Step> expected;
      // Under mpirun each rank needs it: this is on threads everywhere.
      detail::run_device(DevicePtr::make(parse_mesh("d=1,s=1,t=1"), 0), 1,
                         [&](const DevicePtr& device) { expected = step(GptMesh(device), run.unpadded, other); });
      for (const std::string mesh : {"d=1,s=1,t=1", "d=2,s=1,t=2", "d=4,s=1,t=1", "d=1,s=1,t=4", "d=1,s=2,t=2"}) {
        INFO(mesh << " " << run.padded[7].size << " " << other);
        on_mesh(mesh, [&](const DevicePtr& device) {
          poison(*device);
          const Step found = step(GptMesh(device), run.padded, other);
          expect(std::abs(found.loss - expected->loss) < 1e-5 * expected->loss,
                 "loss " + show(found.loss) + " instead of " + show(expected->loss));
          for (std::size_t i = 0; i < found.names.size(); ++i) {
            const auto &a = found.gradients[i], &e = expected->gradients[i];
            expect(a.shape == e.shape, found.names[i] + " has another shape");
            double largest = 0, worst = 0;
            for (std::size_t k = 0; k < e.data.size(); ++k) {
              largest = std::max(largest, std::abs(static_cast<double>(e.data[k])));
              worst = std::max(worst, std::abs(static_cast<double>(a.data[k] - e.data[k])));
            }
            expect(largest > 0 && worst <= 2e-5 * largest,
                   found.names[i] + " differs by " + show(worst) + " of " + show(largest));
          }
        });
      }
    }
}

}  // namespace
