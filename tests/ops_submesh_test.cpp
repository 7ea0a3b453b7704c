// submesh and on_submeshes: how tensors come to the devices with one index of an axis and leave them, forward and
// backward, against whole arrays; submeshes that compute different things, against one device; mistakes of run time.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "op_case.hpp"
#include "shardlib/run/plan.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using Whole = Mesh<"d e t">;

TEST_CASE("on_submeshes: each way in and out, with collectives inside", "[ops]") {
  const std::vector<std::string> meshes{"d=1,e=1,t=1", "d=2,e=2,t=1", "d=1,e=2,t=2",
                                        "d=2,e=3,t=1", "d=1,e=4,t=1", "d=2,e=2,t=2"};
  std::vector<Case> cases;  // E is never padded, other dims may be
  cases.push_back(make_case<Tensor<f32, "E/e/t B/d">>(
      "shards in and out",
      [](const auto& x) {
        return on_submeshes<"E/e">(
            Whole(x.device()), [](const Mesh<"d t">&, const Tensor<f32, "E/t B/d">& y) { return y; }, x);
      },
      same()));
  cases.push_back(make_case<Tensor<f32, "E/e/t B/d">>(
      "shards in and out, gathered and scattered inside",
      [](const auto& x) {
        return on_submeshes<"E/e">(
            Whole(x.device()), [](const Mesh<"d t">&, const auto& y) { return shard<"E/d B">(all_gather<"E B">(y)); },
            x);
      },
      same()));
  cases.push_back(make_case<Tensor<f32, "E/e B/d +t">>(
      "partial over an axis of the submesh",
      [](const auto& x) {
        return on_submeshes<"E/e">(
            Whole(x.device()), [](const Mesh<"d t">&, const auto& y) { return reduce_scatter<"E B/d/t">(y); }, x);
      },
      same()));
  cases.push_back(make_case<Tensor<f32, "E/e B">, Tensor<f32, "B C/t">>(
      "a replicated argument, with rows apart",
      [](const auto& x, const auto& w) {
        return on_submeshes<"E/e">(
            Whole(x.device()),
            [](const Mesh<"d t">&, const Tensor<f32, "E B">& rows, const Tensor<f32, "B C/t">& all) {
              return einsum_unreduced<"E B, B C/t -> E C/t">(rows, all);
            },
            x, w);
      },
      products()));
  cases.push_back(make_case<Tensor<f32, "E/e B/d">, Tensor<f32, "B/d C">>(
      "a pending sum of the submesh, and one over all",
      [](const auto& x, const auto& w) {
        const auto y = on_submeshes<"E/e">(
            Whole(x.device()),
            [](const Mesh<"d t">&, const auto& rows, const auto& all) {
              return all_reduce<"E C">(einsum_unreduced<"E B/d, B/d C -> E C +d">(rows, all));
            },
            x, w);
        return y;
      },
      products()));
  cases.push_back(make_case<Tensor<f32, "E/e B">, Tensor<f32, "E/e C">>(
      "summands",
      [](const auto& x, const auto& w) {
        const auto parts = on_submeshes<"+e">(
            Whole(x.device()),
            [](const Mesh<"d t">&, const Tensor<f32, "E B">& rows, const Tensor<f32, "E C">& more) {
              return einsum_unreduced<"E B, E C -> B C">(rows, more);
            },
            x, w);
        return all_reduce<"B C">(parts);
      },
      products()));
  check_cases(cases, meshes);
}

using Rows = Tensor<f32, "B/d M">;

/// What the submesh of index 0 computes, and that of index 1, as functions of any mesh. Only the second uses the bias.
template <Spec X>
auto first(const Tensor<f32, X>& x, const Tensor<f32, "M F">& up) {
  return sum<make_op<"B/d F", "+d">>(relu(einsum_unreduced<"B/d M, M F -> B/d F">(x, up)));
}
auto second(const Rows& x, const Tensor<f32, "M F">& up, const Tensor<f32, "F">& bias) {
  return sum<"B/d F -> +d">(tanh(einsum_unreduced<"B/d M, M F -> B/d F">(x, up) + bias));
}
struct Model {
  Tensor<f32, "M/d F"> up;
  Tensor<f32, "F/e"> bias;
};

/// The loss on two submeshes. The gathers of the bias over e, and of the weights over d, communicate backward too:
/// every device has to take part, though the submesh of index 0 uses no bias.
auto loss_on_two(const Model& w, const Rows& x) -> Tensor<f32, "+d +e"> {
  const Mesh<"d e"> mesh(x.device());
  const auto bias = all_gather<"F">(w.bias);
  const int e = mesh.axis_index("e");
  return on_submeshes<"+e">(
      mesh,
      [e](const Mesh<"d">&, const Tensor<f32, "M/d F">& up, const Rows& rows, const Tensor<f32, "F">& b) {
        const auto all = all_gather<"M F">(up);
        return e == 0 ? first(rows, all) : second(rows, all, b);
      },
      w.up, x, bias);
}
/// The same on a mesh with e=1.
auto loss_on_one(const Model& w, const Rows& x) -> Tensor<f32, "+d +e"> {
  const auto all = all_gather<"M F">(w.up);
  return to_partial<"+d +e">(first(x, all) + second(x, all, all_gather<"F">(w.bias)));
}

TEST_CASE("on_submeshes: two submeshes compute different parts of a loss, as one device does", "[ops]") {
  std::vector<std::vector<f32>> expected;
  for (const char* shape : {"d=1,e=1", "d=1,e=2", "d=2,e=2"})
    for (const char* recompute : {"no", "marked", "everything"})
      on_mesh(shape, [&](const Mesh<"d e">& mesh) {
        const Sizes sizes{{"B", 4}, {"M", 6}, {"F", 8}};
        const Model w{random_normal<f32, "M/d F">(mesh, sizes, {2, 0}), random_normal<f32, "F/e">(mesh, sizes, {2, 1})};
        const auto x = random_normal<f32, "B/d M">(mesh, sizes, {2, 2});
        const bool one = mesh.size("e") == 1, plain = std::string_view(recompute) == "no";
        const auto f = [&](const Model& weights, const Rows& rows) {
          if (one) return loss_on_one(weights, rows);
          return plain ? loss_on_two(weights, rows)
                       : explicit_activation_checkpointing(loss_on_two, {recompute})(weights, rows);
        };
        const auto [value, partial] = value_and_grad(mesh, f, w, x);
        const Model grads = reduce_gradients(mesh, partial);
        const std::vector<std::vector<f32>> found{fetch(value).data, fetch(grads.up).data, fetch(grads.bias).data};
        if (expected.empty() && mesh.device()->size() == 1) expected = found;
        if (expected.empty()) return;  // an idle rank of the first mesh
        for (std::size_t i = 0; i < found.size(); ++i) {
          expect(std::ranges::any_of(expected[i], [](f32 number) { return number != 0; }), "all parts have a gradient");
          for (std::size_t k = 0; k < found[i].size(); ++k)
            expect(std::abs(found[i][k] - expected[i][k]) <= 1e-5F * (1 + std::abs(expected[i][k])),
                   std::string(shape) + ", " + recompute + ": leaf " + show(i) + " is that of one device");
        }
      });
}

struct Layer {
  Tensor<f32, "F"> scale;
  Tensor<f32, "F/t"> shift;
};
struct Config {
  double factor;
  explicit Config(double f) : factor(f) {}
};

TEST_CASE("on_submeshes: a new dim, trees, other arguments, several results", "[ops]") {
  on_meshes({"d=1,e=2,t=1", "d=1,e=4,t=1", "d=2,e=2,t=2", "d=2,t=2", "d=2,e=4"}, [](const Whole& mesh) {
    const int e = mesh.axis_index("e"), n = mesh.size("e");
    const Sizes sizes{{"F", 8}, {"B", 4}};
    const Layer layer{full<f32, "F">(mesh, sizes, 2.0), full<f32, "F/t">(mesh, sizes, 3.0)};
    const auto ids = iota<"B/d">(mesh, 4);
    const auto f = [e](const Mesh<"d t">& part, const Layer& w, const Tensor<i32, "B/d">& rows, const Config& config) {
      expect(part.size("d") == w.scale.device()->size("d") && part.device() == w.scale.device(), "on the part");
      const auto own = full<f32, "F">(part, {{"F", 8}}, config.factor * e);
      return std::pair(w.scale * own + all_gather<"F">(w.shift), rows + e);
    };
    const auto [y, moved] = on_submeshes<"N/e">(mesh, f, layer, ids, Config(10));
    static_assert(decltype(y)::spec == Spec("N/e F"));
    static_assert(decltype(moved)::spec == Spec("N/e B/d"));
    expect(y.size("N") == n && y.device() == mesh.device(), "one element for each submesh");
    const auto all = fetch(y).data;
    const auto numbers = fetch(moved).data;
    for (int i = 0; i < n; ++i) {
      for (int k = 0; k < 8; ++k)
        expect(all[static_cast<std::size_t>(8 * i + k)] == 20.F * static_cast<f32>(i) + 3, "y");
      for (int k = 0; k < 4; ++k) expect(numbers[static_cast<std::size_t>(4 * i + k)] == k + i, "ids");
    }
    // What leaves as shards of a new dim is a summand after a sum over that dim.
    const auto sums = fetch(all_reduce<"F">(sum<"N/e F -> F +e">(y))).data;
    const auto summed = on_submeshes<"+e">(
        mesh,
        [&](const Mesh<"d t">& part, const Layer& w) {
          return std::get<0>(f(part, w, iota<"B/d">(part, 4), Config(10)));
        },
        layer);
    expect_equal(fetch(all_reduce<"F">(summed)).data, sums);
  });
}

TEST_CASE("submesh: each trains a model of its own, and submeshes and other axes within", "[ops]") {
  on_meshes({"d=2,e=2,t=1", "d=2,e=2,t=2"}, [](const Whole& mesh) {
    const int t = mesh.size("t");
    const auto part = submesh<"e">(mesh);
    static_assert(std::is_same_v<decltype(part), const Mesh<"d t">>);
    expect(part.device() == submesh<"e">(mesh).device(), "asked again, the same device");
    expect(part.size() == 2 * t && part.rank() == t * mesh.axis_index("d") + mesh.axis_index("t"), "its devices");
    const int e = mesh.axis_index("e");
    const f32 tens = 10.F * static_cast<f32>(e);
    const auto x = random_normal<f32, "B/d M">(part, {{"B", 4}, {"M", 6}}, {3, 0});
    auto w = random_normal<f32, "M/t">(part, {{"M", 6}}, {3, 1});
    const auto start = fetch(w).data;
    const auto loss = [e](const Tensor<f32, "M/t">& weights, const Tensor<f32, "B/d M">& rows) {
      const auto y = einsum_unreduced<"B/d M/t, M/t -> B/d +t">(shard<"B/d M/t">(rows), weights);
      const auto r = reduce_scatter<"B/d/t">(y);
      return e == 0 ? sum<"B/d/t -> +d +t">(square(r)) : sum<"B/d/t -> +d +t">(square(r - 1.0)) * 2.0;
    };
    // A number of steps of its own, too: submeshes do not wait for each other.
    for (int step = 0; step < 2 + e; ++step) {
      const auto [value, grads] = value_and_grad(part, loss, w, x);
      w = w - reduce_gradients(part, grads) * 0.01;
    }
    const auto both = fetch(on_submeshes<"N/e">(mesh, [&](const Mesh<"d t">&) { return w; })).data;
    expect(both.size() == 12 && both[0] != both[6] && both[0] != start[0] && both[6] != start[0], "two models");

    const auto own = submesh<"d">(part);
    const auto y = on_submeshes<"R/d">(part, [&](const Mesh<"t">& inner) {
      expect(inner.device() == own.device() && inner.size() == t, "a submesh of a submesh");
      const auto seen = reinterpret<"t -> u">(inner);
      return reinterpret<"u -> t">(all_gather<"A">(full<f32, "A/u">(seen, {{"A", 2}}, 10.0 * e + mesh.axis_index("d"))),
                                   inner);
    });
    expect_equal(fetch(y).data, std::vector<f32>{tens, tens, tens + 1, tens + 1});

    const auto folded = reinterpret<"d e -> f">(mesh);
    const auto z = on_submeshes<"F/f">(folded, [&](const Mesh<"t">& inner) {
      return full<f32, "A/t">(inner, {{"A", 2}}, folded.axis_index("f"));
    });
    expect_equal(fetch(all_gather<"F A">(z)).data, std::vector<f32>{0, 0, 1, 1, 2, 2, 3, 3});
  });
}

TEST_CASE("on_submeshes: a name has a size of its own inside", "[ops]") {
  on_mesh("d=1,e=2,t=1", [](const Whole& mesh) {
    const auto w = random_normal<f32, "X/e M/t">(mesh, {{"X", 4}, {"M", 2}}, {4, 0});
    const auto loss = [&](const Tensor<f32, "X/e M/t">& weights) -> Tensor<f32, "+d +e +t"> {
      const auto y = on_submeshes<"X/e">(
          mesh,
          [](const Mesh<"d t">& part, const Tensor<f32, "X M/t">& rows) {
            expect(rows.size("X") == 2, "half of the rows");
            return rows * ones<f32, "X">(part, {});  // whose size the call knows
          },
          weights);
      expect(y.size("X") == 4, "all rows");
      return to_partial<"+d +e +t">(sum<"X/e M/t -> +e +t">(square(y)));
    };
    const auto [value, grads] = value_and_grad(mesh, loss, w);
    expect_equal(fetch(reduce_gradients(mesh, grads)).data, fetch(w * 2.0).data);
  });
}

TEST_CASE("on_submeshes: a collective over the axis finds results of different sizes", "[ops]") {
  if (under_mpi()) return;  // where each rank would end the program
  const std::string said = error_of([] {
    on_mesh("d=1,e=2,t=1", [](const Whole& mesh) {
      const auto y = on_submeshes<"N/e">(mesh, [&](const Mesh<"d t">& part) {
        return ones<f32, "B">(part, {{"B", 2 + mesh.axis_index("e")}});
      });
      (void)all_gather<"N B">(y);
    });
  });
  CHECK(said.find("every device of a group must make the same calls") != std::string::npos);
}

TEST_CASE("on_submeshes: a recompute policy may name an op that one submesh runs", "[ops]") {
  on_mesh("d=1,e=2,t=1", [](const Whole& mesh) {
    const auto x = ones<f32, "B">(mesh, {{"B", 3}});
    const auto layer = [](const Tensor<f32, "B">& v) {
      const Whole of(v.device());
      const int e = of.axis_index("e");
      return on_submeshes<"+e">(
          of, [e](const Mesh<"d t">&, const auto& y) { return e == 0 ? y * 2.0 : tanh(y); }, v);
    };
    const auto loss = [&](const Tensor<f32, "B">& v) {
      return to_partial<"+e -> +d +e +t">(sum<"B +e -> +e">(explicit_activation_checkpointing(layer, {"tanh"})(v)));
    };
    const auto grads = reduce_gradients(mesh, std::get<1>(value_and_grad(mesh, loss, x)));
    const double tanh_of_one = std::tanh(1.0);
    for (const f32 g : grads.span()) expect(std::abs(g - (3 - tanh_of_one * tanh_of_one)) < 1e-6, show(g));
    // So may that of a function that one submesh calls, but not that of a function that runs on the whole mesh.
    const auto half = [e = mesh.axis_index("e")](const Mesh<"d t">&, const auto& y) {
      return explicit_activation_checkpointing([e](const auto& v) { return e == 0 ? v * 2.0 : tanh(v); }, {"tanh"})(y);
    };
    static_cast<void>(on_submeshes<"+e">(mesh, half, x));
    const auto misspelled = explicit_activation_checkpointing([](const auto& v) { return tanh(v); }, {"tanhh"});
    const std::string why = error_of([&] { static_cast<void>(misspelled(x)); });
    expect(why.starts_with("explicit_activation_checkpointing: the policy keeps the results of `tanhh`"), why);
  });
}

TEST_CASE("on_submeshes: no copy, and no traffic", "[ops]") {
  on_mesh("d=1,e=2,t=1", [](const DevicePtr& device) {
    const auto x = ones<f32, "A/e B">(Whole(device), {{"A", 4}, {"B", 2}});
    const auto y = on_submeshes<"A/e">(
        Whole(device), [](const Mesh<"d t">&, const auto& rows) { return rows; }, x);
    expect(x.value()->data().data() == y.value()->data().data(), "the same memory");
  });
  const run::Plan counted = run::plan(parse_mesh("d=2,e=2"), [](const DevicePtr& device) {
    const Mesh<"d e"> mesh(device);
    const auto x = zeros<f32, "A/d">(mesh, {{"A", 8}});
    device->local<run::Plan>() = run::count_step(device, [&] {
      static_cast<void>(on_submeshes<"+e">(
          mesh, [](const Mesh<"d">&, const auto& rows) { return all_gather<"A">(rows); }, x));
    });
  });
  REQUIRE(counted.collectives.size() == 1);
  CHECK(counted.collectives[0].axes == "d");
}

struct Chain {
  Tensor<f32, "M/d F"> up;
  Tensor<f32, "F M/d"> down;
};
using Chains = Array<"layers", Chain>;
auto gathered_chain(const Chain& w) {
  return std::pair(all_gather<"M F">(w.up), all_gather<"F M">(w.down));
}
Rows chain_layer(const Rows& x, const Chain& w) {
  const auto [up, down] = gathered_chain(w);
  return x + einsum_unreduced<"B/d F, F M -> B/d M">(tanh(einsum_unreduced<"B/d M, M F -> B/d F">(x, up)), down);
}
/// Of index 0 all layers, and of index 1 all but the last.
auto chains(const Chains& w, const Rows& x, bool ahead) -> Tensor<f32, "+d +e +t"> {
  const Whole mesh(x.device());
  const auto through = [ahead, e = mesh.axis_index("e")](const Mesh<"d t">&, const Rows& rows, const Chains& layers) {
    Rows y = rows;
    const std::size_t count = layers.size() - static_cast<std::size_t>(e);
    Chains own;
    for (std::size_t i = 0; i < count; ++i) own.push_back(layers[i]);
    for (std::size_t i = 0; i < count; ++i) {
      if (ahead) y = prefetch(y, gathered_chain, own, i);
      y = explicit_activation_checkpointing(chain_layer)(y, own[i]);
    }
    if (ahead) y = prefetch(y, gathered_chain, own, count);
    return sum<"B/d M -> +d">(square(y));
  };
  return to_partial<over<"t">>(on_submeshes<"+e">(mesh, through, x, w));
}

TEST_CASE("on_submeshes: prefetch inside changes no bit and no traffic", "[ops][prefetch]") {
  on_meshes({"d=2,e=2,t=1", "d=1,e=2,t=2", "d=2,e=2,t=2"}, [](const Whole& mesh) {
    const Sizes sizes{{"B", 4}, {"M", 8}, {"F", 6}};
    Chains layers(3);
    std::uint64_t stream = 0;
    for (Chain& layer : layers)
      layer = {random_normal<f32, "M/d F">(mesh, sizes, {1, stream++}),
               random_normal<f32, "F M/d">(mesh, sizes, {1, stream++})};
    const auto x = random_normal<f32, "B/d M">(mesh, sizes, {2, 0});
    std::vector<std::vector<HostArray<f32>>> found;
    std::vector<std::int64_t> calls;
    for (const bool ahead : {false, true}) {
      auto& counts = detail::program_state(mesh.device()).counts;
      counts.clear();
      const auto [value, grads] = value_and_grad(mesh, chains, layers, x, ahead);
      calls.push_back(counts["all_gather"].calls + 1000 * counts["reduce_scatter"].calls);
      found.push_back(fetch(reduce_gradients(mesh, grads)));
      found.back().push_back(fetch(value));
      expect(detail::program_state(mesh.device()).pending.empty(), "nothing stays under way");
    }
    expect(calls[0] == calls[1], show(calls[1]) + " instead of " + show(calls[0]));
    for (std::size_t i = 0; i < found[0].size(); ++i)
      expect(found[0][i].data == found[1][i].data, "leaf " + show(i) + " has the same bits");
  });
}

TEST_CASE("on_submeshes: a plan for each index counts what its submesh does", "[ops][plan]") {
  const auto axes = parse_mesh("d=2,e=3");
  const auto step = [](const DevicePtr& device) {
    const Mesh<"d e"> mesh(device);
    const auto x = zeros<f32, "A/d B">(mesh, {{"A", 8}, {"B", 4}});
    const auto f = [e = mesh.axis_index("e")](const Mesh<"d">&, const Tensor<f32, "A/d B">& rows) {
      if (e == 0) return sum<"A B -> ">(all_gather<"A B">(rows));
      const auto product = einsum_unreduced<"A/d B, A/d B -> +d">(rows, e == 1 ? rows : rows + 1.0);
      return all_reduce<"">(e == 1 ? product : product * 2.0);
    };
    static_cast<void>(on_submeshes<"+e">(mesh, f, x));
  };
  const auto plans = run::plan_along("e", axes, [&](const DevicePtr& device) {
    device->local<run::Plan>() = run::count_step(device, [&] { step(device); });
  });
  REQUIRE(plans.size() == 3);
  const char* const ops[] = {"all_gather", "all_reduce", "all_reduce"};
  for (std::size_t e = 0; e < plans.size(); ++e) {
    REQUIRE(plans[e].collectives.size() == 1);
    CHECK(plans[e].collectives[0].op == ops[e]);
    CHECK(plans[e].collectives[0].axes == "d");
    CHECK(plans[e].flops == (e == 0 ? 0.0 : 2.0 * 4 * 4));
  }
  CHECK(plans[2].local.size() == plans[1].local.size() + 2);
  // As the devices of the submesh do.
  on_mesh("d=2,e=3", [&](const DevicePtr& device) {
    auto& counts = detail::program_state(device).counts;
    counts.clear();
    step(device);
    const auto e = static_cast<std::size_t>(device->axis_index("e"));
    expect(static_cast<std::int64_t>(counts[ops[e]].bytes) == plans[e].sent(), show(counts[ops[e]].bytes));
  });
}

TEST_CASE("on_submeshes: mistakes of run time", "[ops]") {
  on_mesh("d=2,e=2,t=1", [](const Whole& mesh) {
    const auto part = submesh<"e">(mesh);
    const std::string here = mesh.device()->describe(), there = here + ", in its submesh d=2,t=1";
    const auto x = ones<f32, "B">(mesh, {{"B", 2}});
    const auto own = ones<f32, "B">(part, {{"B", 2}});
    const auto nothing = [](const Mesh<"d t">& m, const auto&...) { return ones<f32, "B">(m, {{"B", 2}}); };
    expect_error(
        [&] { (void)on_submeshes<"N/e">(mesh, [&](const Mesh<"d t">&) { return x + own; }); },
        "+ of `B` and `B`: its operands are on different meshes: " + there + " and " + here +
            "; tensors come to a submesh as arguments of `on_submeshes`, and leave it as results (no traffic) (" +
            here + ")");
    expect_error(
        [&] { (void)on_submeshes<"N/e">(mesh, nothing, own); },
        "on_submeshes<`N/e`>: argument 1 is on " + there +
            ", but the call is for mesh d=2,e=2,t=1; the function may capture what is on its submesh already (" + here +
            ")");
    expect_error([&] { (void)on_submeshes<"+e">(mesh, [&](const Mesh<"d t">&) { return x; }); },
                 "on_submeshes<`+e`>: the result of the function is on " + here +
                     "; return a tensor that is made on the submesh that the function gets, or of its arguments (" +
                     here + ")");
    const auto padded = ones<f32, "B/e">(mesh, {{"B", 3, 4}});
    expect_error([&] { (void)on_submeshes<"N/e">(mesh, nothing, padded); },
                 "on_submeshes<`N/e`>: argument 1 is padded along `B/e`, of size 3 (padded to 4), and the padding "
                 "would be that of some submeshes alone; choose a size that needs none (" +
                     here + ")");
    expect_error(
        [&] {
          (void)on_submeshes<"B/e">(mesh, [](const Mesh<"d t">& m) { return ones<f32, "B/d">(m, {{"B", 3, 4}}); });
        },
        "on_submeshes<`B/e`>: the result of the function is padded along `B/d`, of size 3 (padded to 4), and the "
        "padding would be that of some submeshes alone; choose a size that needs none (" +
            here + ")");
    expect_error<EmptyTensor>(
        [&] { (void)on_submeshes<"N/e">(mesh, nothing, Tensor<f32, "B">()); },
        "on_submeshes<`N/e`>: a tensor `f32[B]` was never given a value, or was moved from; make one with an op, as "
        "`zeros` or `place`, before it is used");
    const auto square_of = [](const Tensor<f32, "B">& v) { return to_partial<"+d +e +t">(sum<"B -> ">(v * v)); };
    expect_error(
        [&] { (void)value_and_grad(mesh, square_of, own); },
        "value_and_grad: the weight is on " + there +
            ", but the call is for mesh d=2,e=2,t=1, and a gradient is typed by the axes of one mesh; call "
            "value_and_grad with the mesh of the weights, or bring tensors over with `on_submeshes` (no traffic)");
    expect_error([&] { (void)Whole(part.device()); },
                 "axis 'e' is not one of this mesh, which is a part of mesh d=2,e=2,t=1 at one place of it");
  });
}

}  // namespace
