// reinterpret: placements on other factorizations of the same devices, with collectives there, against whole arrays; a
// layer of experts over the devices that data and sequence share; the mistakes that only run time can see.
#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "op_case.hpp"
#include "shardlib/run/check_replicas.hpp"
#include "shardlib/run/plan.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using Whole = Mesh<"d s t">;

/// The op of a tensor on the mesh that has e in place of d and s.
template <class X, class F>
Case over_e(const std::string& name, const F& op) {
  return make_case<X>(
      name,
      [op](const auto& x) {
        const Whole mesh(x.device());
        return reinterpret<"e -> d s">(op(reinterpret<"d s -> e">(x, reinterpret<"d s -> e">(mesh))), mesh);
      },
      same());
}

TEST_CASE("reinterpret: every placement, with a collective on the other mesh", "[ops]") {
  const auto gather = make_case<Tensor<f32, "A/d/s B/t">>(
      "gather over e",
      [](const auto& x) {
        const Whole mesh(x.device());
        const auto folded = reinterpret<"d s -> e, t -> u">(mesh);
        return reinterpret<"e -> d s, u -> t">(all_gather<"A B/u">(reinterpret<"d s -> e, t -> u">(x, folded)), mesh);
      },
      same());
  const auto refactored = make_case<Tensor<f32, "A/d/s B">>(
      "one factorization into another, and a gather over its minor axis",
      [](const auto& x) {
        const Whole mesh(x.device());
        const auto other = reinterpret<"d s -> a b">(mesh, {{"a", mesh.size("s")}, {"b", mesh.size("d")}});
        const auto y = all_gather<"A/a B">(reinterpret<"d s -> a b">(x, other));
        return reinterpret<"a b -> d s">(shard<"A/a/b B">(y), mesh);
      },
      same());
  check_cases(
      {gather,
       over_e<Tensor<f32, "A B +d +s">>("scatter over e", [](const auto& y) { return reduce_scatter<"A/e B">(y); }),
       over_e<Tensor<f32, "A B">>("shard over e", [](const auto& y) { return shard<"A/e B">(y); }),
       over_e<Tensor<f32, "A/d/s B +t">>("exchange over e", [](const auto& y) { return all_to_all<"A B/e +t">(y); }),
       refactored},
      {"d=1,s=1,t=1", "d=2,s=1,t=1", "d=2,s=2,t=1", "d=1,s=4,t=1", "d=1,s=2,t=2", "d=2,s=3,t=1"});
}

struct Experts {
  Tensor<f32, "M X"> router;
  Tensor<f32, "X/d/s M F"> up;
  Tensor<f32, "X/d/s F M"> down;
};
using Data = Mesh<"d s">;

/// Each token goes to its best expert: a layer that knows the axis `e` alone.
auto moe(const Tensor<f32, "P/e T M">& x, const Tensor<f32, "M X">& router, const Tensor<f32, "X/e M F">& up,
         const Tensor<f32, "X/e F M">& down) -> Tensor<f32, "P/e T M"> {
  const auto shares = softmax<"X">(einsum_unreduced<"P/e T M, M X -> P/e T X">(x, router));
  const auto chosen = one_hot<"X">(argmax<"P/e T X -> P/e T">(shares), router.size("X")) * shares;
  const auto sent = all_to_all<"P X/e T M">(einsum_unreduced<"P/e T X, P/e T M -> P/e X T M">(chosen, x));
  const auto h = relu(einsum_unreduced<"P X/e T M, X/e M F -> P X/e T F">(sent, up));
  const auto back = all_to_all<"P/e X T M">(einsum_unreduced<"P X/e T F, X/e F M -> P X/e T M">(h, down));
  return sum<"P/e X T M -> P/e T M">(back);
}

auto loss(const Experts& w, const Tensor<f32, "P/d/s T M">& x) -> Tensor<f32, "+d +s"> {
  const Data mesh(x.device());
  const Mesh<"e"> experts = reinterpret<"d s -> e">(mesh);
  const auto there = [&](const auto& tensor) { return reinterpret<"d s -> e">(tensor, experts); };
  const auto y = moe(there(x), there(w.router), there(w.up), there(w.down));
  return sum<"P/d/s T M -> +d +s">(square(x + reinterpret<"e -> d s">(y, mesh)));
}

TEST_CASE("reinterpret: experts over the devices of data and sequence, as on one device", "[ops]") {
  std::vector<std::vector<f32>> expected;
  on_meshes({"d=1,s=1", "d=2,s=2", "d=1,s=4"}, [&](const Data& mesh) {
    const Sizes sizes{{"P", 4}, {"T", 3}, {"M", 4}, {"X", 8}, {"F", 6}};
    const Experts w{random_normal<f32, "M X">(mesh, sizes, {1, 0}),
                    random_normal<f32, "X/d/s M F">(mesh, sizes, {1, 1}),
                    random_normal<f32, "X/d/s F M">(mesh, sizes, {1, 2})};
    const auto x = random_normal<f32, "P/d/s T M">(mesh, sizes, {1, 3});
    const auto f = [](const Experts& weights, const Tensor<f32, "P/d/s T M">& batch) {
      return explicit_activation_checkpointing(loss)(weights, batch);
    };
    const auto [value, partial] = value_and_grad(mesh, f, w, x);
    const Experts grads = reduce_gradients(mesh, partial);
    const std::vector<std::vector<f32>> found{fetch(value).data, fetch(grads.router).data, fetch(grads.up).data,
                                              fetch(grads.down).data};
    if (expected.empty() && mesh.device()->size() == 1) expected = found;
    if (expected.empty()) return;  // an idle rank of the first mesh
    for (std::size_t i = 0; i < found.size(); ++i) {
      double most = 0;
      for (const f32 number : expected[i]) most = std::max(most, std::abs(static_cast<double>(number)));
      expect(most > 0, "the router, the experts and the loss depend on the tokens");
      for (std::size_t k = 0; k < found[i].size(); ++k)
        expect(std::abs(found[i][k] - expected[i][k]) <= 1e-5 * most, "leaf " + show(i) + " is that of one device");
    }
  });
}

// A model whose layers have factorizations of their own: attention on d, s, t (heads over t, a ring over s), experts
// over d and s together in one layer, and over all devices in the next.
using Hidden = Tensor<f32, "B/d L/s M">;
struct Attention {
  Tensor<f32, "M/d/s H/t D"> query, key, value;
  Tensor<f32, "H/t D M/d/s"> out;
};
struct OverData {
  Tensor<f32, "M X"> router;
  Tensor<f32, "X/d/s M F/t"> up;
  Tensor<f32, "X/d/s F/t M"> down;
};
struct OverAll {
  Tensor<f32, "M X"> router;
  Tensor<f32, "X/d/s/t M F"> up;
  Tensor<f32, "X/d/s/t F M"> down;
};
struct Layers {
  Attention first_attention;
  OverData first;
  Attention second_attention;
  OverAll second;
};

auto attended(const Hidden& x, const Attention& w) -> Hidden {
  const auto q = einsum_unreduced<"B/d L/s M, M H/t D -> B/d L/s H/t D">(x, all_gather<"M H/t D">(w.query));
  const auto k = einsum_unreduced<"B/d L/s M, M H/t D -> B/d L/s H/t D">(x, all_gather<"M H/t D">(w.key));
  const auto v = einsum_unreduced<"B/d L/s M, M H/t D -> B/d L/s H/t D">(x, all_gather<"M H/t D">(w.value));
  const auto y = causal_attention<"L", "D", over<"s">>(q, k, v);
  return x + einsum<"B/d L/s H/t D, H/t D M -> B/d L/s M">(y, all_gather<"H/t D M">(w.out));
}
/// What the best expert of each token makes of it, by `experts` of "P X/e T M".
template <class F>
auto of_experts(const Tensor<f32, "P/e T M">& x, const Tensor<f32, "M X">& router, const F& experts)
    -> Tensor<f32, "P/e T M"> {
  const auto shares = softmax<"X">(einsum_unreduced<"P/e T M, M X -> P/e T X">(x, router));
  const auto chosen = one_hot<"X">(argmax<"P/e T X -> P/e T">(shares), router.size("X")) * shares;
  const auto sent = all_to_all<"P X/e T M">(einsum_unreduced<"P/e T X, P/e T M -> P/e X T M">(chosen, x));
  return sum<"P/e X T M -> P/e T M">(all_to_all<"P/e X T M">(experts(sent)));
}
auto over_data(const Hidden& x, const OverData& w) -> Hidden {
  const Whole mesh(x.device());
  const Scope scope(mesh);  // P, T and W have other sizes in each layer
  const Mesh<"e t"> folded = reinterpret<"d s -> e">(mesh);
  const auto shards = stack_shards<"B/d L/s M -> P/d/s U W M">(x);
  const auto there = [&](const auto& tensor) { return reinterpret<"d s -> e">(tensor, folded); };
  const auto y = of_experts(there(merge<"U W -> T">(shards)), there(w.router), [&](const auto& rows) {
    const auto h = relu(einsum_unreduced<"P X/e T M, X/e M F/t -> P X/e T F/t">(rows, there(w.up)));
    return einsum<"P X/e T F/t, X/e F/t M -> P X/e T M">(h, there(w.down));
  });
  const auto back = split<"T -> U W">(reinterpret<"e -> d s">(y, mesh), {{"W", shards.size("W")}});
  return x + unstack_shards<"P/d/s U W M -> B/d L/s M">(back);
}
auto over_all(const Hidden& x, const OverAll& w) -> Hidden {
  const Whole mesh(x.device());
  const Scope scope(mesh);
  const Mesh<"e"> folded = reinterpret<"d s t -> e">(mesh);
  const auto own = shard<"B/d/t L/s M">(x);
  const auto shards = stack_shards<"B/d/t L/s M -> P/d/s/t U W M">(own);
  const auto there = [&](const auto& tensor) { return reinterpret<"d s t -> e">(tensor, folded); };
  const auto y = of_experts(there(merge<"U W -> T">(shards)), there(w.router), [&](const auto& rows) {
    const auto h = relu(einsum_unreduced<"P X/e T M, X/e M F -> P X/e T F">(rows, there(w.up)));
    return einsum_unreduced<"P X/e T F, X/e F M -> P X/e T M">(h, there(w.down));
  });
  const auto back = split<"T -> U W">(reinterpret<"e -> d s t">(y, mesh), {{"W", shards.size("W")}});
  return x + all_gather<"B/d L/s M">(unstack_shards<"P/d/s/t U W M -> B/d/t L/s M">(back));
}
auto loss_of_layers(const Layers& w, const Hidden& start) -> Tensor<f32, "+d +s +t"> {
  auto x = attended(start, w.first_attention);
  x = explicit_activation_checkpointing(over_data)(x, w.first);
  x = attended(x, w.second_attention);
  x = explicit_activation_checkpointing(over_all)(x, w.second);
  return to_partial<over<"t">>(sum<"B/d L/s M -> +d +s">(square(x)));
}

TEST_CASE("reinterpret: layers of one model on three factorizations, as on one device", "[ops]") {
  std::vector<HostArray<f32>> expected;
  on_meshes({"d=1,s=1,t=1", "d=2,s=2,t=1", "d=1,s=4,t=1", "d=1,s=2,t=2", "d=2,s=1,t=2", "d=2,s=2,t=2"},
            [&](const Whole& mesh) {
              const Sizes sizes{{"B", 4}, {"L", 8}, {"M", 8}, {"H", 2}, {"D", 4}, {"X", 8}, {"F", 6}};
              Layers w;
              initialize(mesh, w, sizes, 1, [](std::string_view) { return Normal{0, 0.5}; });
              const auto x = random_normal<f32, "B/d L/s M">(mesh, sizes, {2, 0});
              const auto [value, partial] = value_and_grad(mesh, loss_of_layers, w, x);
              std::vector<HostArray<f32>> found = fetch(reduce_gradients(mesh, partial));
              found.push_back(fetch(value));
              if (expected.empty() && mesh.device()->size() == 1) expected = found;
              if (expected.empty()) return;  // an idle rank of the first mesh
              auto names = leaf_names(w);
              names.emplace_back("the loss");
              for (std::size_t i = 0; i < found.size(); ++i) {
                double most = 0, worst = 0;
                for (const f32 number : expected[i].data) most = std::max(most, std::abs(static_cast<double>(number)));
                for (std::size_t k = 0; k < found[i].data.size(); ++k)
                  worst = std::max(worst, std::abs(static_cast<double>(found[i].data[k]) - expected[i].data[k]));
                expect(most > 0 && worst <= 1e-4 * most,
                       names[i] + " differs from that of one device by " + show(worst / most));
              }
            });
}

TEST_CASE("reinterpret: the plan counts what moves on the other mesh by the mesh's own axes", "[ops]") {
  const run::Plan counted = run::plan(parse_mesh("d=2,s=2"), [](const DevicePtr& device) {
    const Data mesh(device);
    const auto x = zeros<f32, "A/d/s">(mesh, {{"A", 8}});
    device->local<run::Plan>() = run::count_step(
        device, [&] { static_cast<void>(all_gather<"A">(reinterpret<"d s -> e">(x, reinterpret<"d s -> e">(mesh)))); });
  });
  REQUIRE(counted.collectives.size() == 1);
  CHECK(counted.collectives[0].axes == "d s");
}

TEST_CASE("reinterpret: no copy, one device for each factorization, and its mistakes", "[ops]") {
  on_mesh("d=2,s=1,t=2", [](const Whole& mesh) {
    const auto folded = reinterpret<"d s -> e">(mesh);
    expect(reinterpret<"d s -> e">(mesh).device() == folded.device(), "asked again, the same device");
    expect(reinterpret<"e -> d s">(folded, {{"d", 2}, {"s", 1}}).device() == mesh.device(),
           "the inverse gives the mesh itself");
    expect(folded.rank() == mesh.rank() && folded.size("e") == 2, "ranks stay");
    const auto x = ones<f32, "A/d/s B/t">(mesh, {{"A", 4}, {"B", 2}});
    const auto y = reinterpret<"d s -> e">(x, folded);
    expect(y.value()->data().data() == x.value()->data().data(), "the same memory");

    const std::string here = mesh.device()->describe(), there = here + " seen as mesh e=2,t=2";
    const auto bias = ones<f32, "B/t">(mesh, {{"B", 2}});
    ERROR_IS("+ of `A/e B/t` and `B/t`: its operands are on different meshes: " + here + " and " + there +
                 "; `reinterpret` one of them (no traffic) (" + there + ")",
             (void)(y + bias));
    ERROR_IS("reinterpret<`d s -> a b`>: `d s` are 2 devices, but the new axes a=2,b=3,t=2 have 6 in their place (" +
                 here + ")",
             (void)reinterpret<"d s -> a b">(mesh, {{"a", 2}, {"b", 3}}));
    ERROR_IS("reinterpret<`d s -> a b`>: the size of the new axis `b` is missing; give it: {\"b\", ...} (" + here + ")",
             (void)reinterpret<"d s -> a b">(mesh, {{"a", 2}}));
    ERROR_IS("reinterpret<`d s -> e`>: `t` is none of the new axes, so its size cannot be given (" + here + ")",
             (void)reinterpret<"d s -> e">(mesh, {{"t", 2}}));
    const auto columns = ones<f32, "B/t">(mesh, {{"B", 2}});
    ERROR_IS(
        "reinterpret<`t -> e`>: `e` of mesh e=2,t=2 are other devices than `t` of mesh d=2,s=1,t=2, or have "
        "another order, so shards would change places; name the axes that they replace (" +
            here + ")",
        (void)reinterpret<"t -> e">(columns, folded));
    ERROR_IS(
        "reinterpret<`s t -> u`>: `s t` of mesh d=2,s=1,t=2 are 2 devices, but `u` of mesh u=4 are 4; choose sizes "
        "with equal products (" +
            here + ")",
        (void)reinterpret<"s t -> u">(ones<f32, "B/s/t">(mesh, {{"B", 2}}), reinterpret<"d s t -> u">(mesh)));
    const auto single = DevicePtr::make(std::vector<AxisSize>{{"e", 1}}, 0);
    ERROR_IS("reinterpret<`t -> e`>: the tensor is on " + here + ", and the mesh is one of " + single->describe() +
                 "; make the mesh of the tensor's own, by `reinterpret` of that mesh",
             (void)reinterpret<"t -> e">(columns, Mesh<"e">(single)));
    const auto w = ones<f32, "">(folded, {});
    const auto square_of = [](const Tensor<f32, "">& v) { return to_partial<"+d +s +t">(v * v); };
    ERROR_IS("value_and_grad: the weight is on " + there +
                 ", but the call is for mesh d=2,s=1,t=2; `reinterpret` it for that mesh (no traffic)",
             (void)value_and_grad(mesh, square_of, w));
  });
}

struct OnAView {
  Tensor<f32, "X/e"> w;
};

TEST_CASE("reinterpret: two meshes of one type, replicas of a view, and axes that are not there", "[ops]") {
  on_mesh("d=2,s=1,t=2", [](const Whole& mesh) {
    const Whole other = reinterpret<"d s -> d s">(mesh, {{"d", 1}, {"s", 2}});
    const auto a = ones<f32, "N/d A">(mesh, {{"N", 4}, {"A", 2}});
    const auto b = ones<f32, "N/d B">(other, {{"N", 4}, {"B", 3}});
    const std::string said = error_of([&] { (void)concat<"A, B -> C">(a, b); });
    expect(said.find("its operands are on different meshes") != std::string::npos, "concat: " + said);
    // Each device holds numbers of its own, as the leaf's own axes say.
    const auto w = random_normal<f32, "X/d/s">(mesh, {{"X", 8}}, {1, 0});
    const OnAView tree{reinterpret<"d s -> e">(w, reinterpret<"d s -> e">(mesh))};
    run::check_replicas(mesh, tree, "now");
  });
  on_mesh("d=4", [](const DevicePtr& device) {
    const Mesh<"d e t"> view(reinterpret<"d -> e">(Mesh<"d">(device)).device());
    expect(view.size("d") == 1 && view.size("e") == 4, "the view lacks d, whose devices e has");
    const auto x = all_gather<"A/e -> A">(ones<f32, "A/e">(view, {{"A", 8}}));
    expect(x.span().size() == 8 && x.span()[7] == 1, "e gathers");
  });
  on_mesh("d=2,t=2", [](const Whole& mesh) {
    const auto folded = reinterpret<"d s -> e">(mesh);
    expect(reinterpret<"e -> d s">(folded, {{"d", 2}, {"s", 1}}).device() == mesh.device(),
           "the inverse is the mesh itself, which lacks s");
  });
}

}  // namespace
