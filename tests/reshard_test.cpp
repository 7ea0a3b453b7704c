// reshard: trees between all devices and pipeline stages, and between factorizations of the same devices, bit for bit;
// what it takes of memory; what does not fit is one error on all devices. On threads and under mpirun.
#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <shardlib/comm/dry.hpp>
#include <shardlib/io/agree.hpp>
#include <shardlib/io/checkpoint/checkpoint.hpp>
#include <shardlib/io/reshard.hpp>
#include <shardlib/pipeline/staged_mesh.hpp>
#include <shardlib/shardlib.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "random_bits.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using DT = Mesh<"d t">;
using Staged = pipeline::StagedMesh<"p", "p d t">;

struct Layer {
  Tensor<f32, "M/d F/t"> w;
  Tensor<bf16, "F/t/d"> bias;
};
struct Weights {
  Tensor<f32, "V/t M/d"> embed;
  Array<"layers", Layer> layers;
  Tensor<f64, "M/t/d"> norm;
  Tensor<bool_, "V/d"> mask;
};
struct State {
  Weights weights, mu;
  Tensor<u32, ""> steps;
};

/// One rank's part. The embedding is tied: the first and the last rank have it.
struct StageWeights {
  Array<"embed", Tensor<f32, "V/t M/d">> embed;
  Array<"layers/p", Layer> layers;
  Array<"norm", Tensor<f64, "M/t/d">> norm;
  Array<"mask", Tensor<bool_, "V/d">> mask;
};
struct StageState {
  StageWeights weights, mu;
  Tensor<u32, ""> steps;
};

constexpr std::int64_t V = 10, M = 13, F = 7;
constexpr int layers = 5;

/// Random bits that tell the leaf's name in the model and `salt`.
template <class T, Spec A>
void fill_leaf(const Mesh<A>& mesh, T& leaf, const std::string& name, int salt) {
  using D = typename T::value_type;
  const std::int64_t n = mesh.size();
  const Sizes sizes{{"V", V, round_up(V, n)}, {"M", M, round_up(M, n)}, {"F", F, round_up(F, n)}};
  std::vector<std::int64_t> shape;
  for (const auto& dim : detail::parsed<T::spec>.dims) shape.push_back(dim.name == "V" ? V : dim.name == "M" ? M : F);
  std::uint64_t x = static_cast<std::uint64_t>(salt) * 1000003U;
  for (const char c : name) x = (x + static_cast<unsigned char>(c)) * 6364136223846793005U + 1442695040888963407U;
  HostArray<D> host(std::move(shape));
  fill_with_bits(host, x);
  leaf = place<T>(mesh, host, sizes);
}
template <class Tree, Spec A>
void fill(const Mesh<A>& mesh, Tree& tree, const io::Rename& name_in_model, int salt) {
  for_each_leaf(
      [&](std::string_view path, auto& leaf) {
        std::string name(path);
        for (char& c : name) c = c == '/' ? '.' : c;
        fill_leaf(mesh, leaf, name_in_model ? name_in_model(name) : name, salt);
      },
      tree);
}

State whole_state(const DT& mesh, int salt) {
  State state;
  state.weights.layers.resize(layers);
  state.mu.layers.resize(layers);
  fill(mesh, state, {}, salt);
  return state;
}

/// Ranks take turns over the layers.
struct Cut {
  std::vector<int> held;
  bool first, last;

  explicit Cut(const Staged& mesh) : first(mesh.rank() == 0), last(mesh.rank() == mesh.ranks() - 1) {
    for (int layer = mesh.rank(); layer < layers; layer += mesh.ranks()) held.push_back(layer);
  }
  [[nodiscard]] io::Rename name_in_model() const {
    return [numbers = held](const std::string& name) -> std::string {
      const std::size_t at = name.find("layers.");
      if (at == std::string::npos) return name.ends_with(".0") ? name.substr(0, name.size() - 2) : name;
      const auto local = static_cast<std::size_t>(name[at + 7] - '0');
      return name.substr(0, at + 7) + std::to_string(numbers.at(local)) + name.substr(at + 8);
    };
  }
  [[nodiscard]] StageState state(const Staged& mesh, int salt) const {
    StageState state;
    for (StageWeights* part : {&state.weights, &state.mu}) {
      part->embed.resize(first || last ? 1 : 0);
      part->layers.resize(held.size());
      part->norm.resize(last ? 1 : 0);
      part->mask.resize(first ? 1 : 0);
    }
    fill(mesh.stage(), state, name_in_model(), salt);
    return state;
  }
};

/// A mesh of the same devices.
DT refactored(const DT& mesh, std::int64_t d) {
  return reinterpret<"d t -> d t">(mesh, {{"d", d}, {"t", mesh.size() / d}});
}

}  // namespace

TEST_CASE("reshard: between all devices and the stages of a pipeline", "[reshard]") {
  const Temporarily limit(tuning.resharded_together,
                          std::uint64_t{GENERATE(std::uint64_t{64} << 20, std::uint64_t{0})});
  on_meshes({"p=1,d=2,t=1", "p=2,d=1,t=1", "p=2,d=2,t=1", "p=2,d=1,t=2", "p=4,d=1,t=1", "p=3,d=1,t=1", "p=2,d=2,t=2",
             "p=4,d=2,t=1"},
            [&](const Staged& mesh) {
              const DT all = reinterpret<"p d -> d">(mesh.whole());
              const State model = whole_state(all, 1);
              const Cut cut(mesh);

              StageState stage = cut.state(mesh, 2);
              io::reshard(mesh.whole(), model, stage, {.rename_to = cut.name_in_model()});
              expect_same_bits(stage, cut.state(mesh, 1));
              expect_same_bits(model, whole_state(all, 1));

              State again = whole_state(all, 3);
              io::reshard(mesh.whole(), stage, again, {.rename_from = cut.name_in_model()});
              expect_same_bits(again, model);
            });
}

namespace {
struct Sharded {
  Tensor<f32, "V/d M/t"> x;
  Tensor<i32, "M/t/d"> y;
  Tensor<u8, "V M F/d/t"> z;
};
struct Otherwise {
  Tensor<f32, "V M/d"> x;  // replicated over t
  Tensor<i32, "M"> y;
  Tensor<u8, "V/t M/d F"> z;
};
}  // namespace

TEST_CASE("reshard: between factorizations of the same devices", "[reshard]") {
  for (const auto& [axes, d] : std::vector<std::pair<std::string, int>>{
           {"d=1,t=1", 1}, {"d=2,t=1", 1}, {"d=4,t=1", 2}, {"d=1,t=4", 4}, {"d=4,t=2", 2}, {"d=2,t=3", 6}})
    on_mesh(axes, [&, d = d](const DevicePtr& device) {
      const DT mesh(device), other = refactored(mesh, d);
      Sharded source, back;
      Otherwise target, expected;
      fill(mesh, source, {}, 1);
      fill(mesh, back, {}, 2);
      fill(other, target, {}, 2);
      fill(other, expected, {}, 1);
      io::reshard(mesh, source, target);
      expect_same_bits(target, expected);
      io::reshard(other, target, back);
      expect_same_bits(back, source);

      State turned = whole_state(other, 2);
      io::reshard(mesh, whole_state(mesh, 1), turned);
      expect_same_bits(turned, whole_state(other, 1));

      // Into the tree that is read.
      struct Pair {
        Tensor<f32, "A/d"> first, second;
      } pair{full<f32, "A/d">(mesh, {{"A", 12}}, 1.0), full<f32, "A/d">(mesh, {{"A", 12}}, 2.0)};
      io::reshard(mesh, pair, pair, {.rename_to = [](const std::string& name) {
                    return std::string(name == "first" ? "second" : "first");
                  }});
      for (const float x : pair.first.span()) expect(x == 2, "second is first");
      for (const float x : pair.second.span()) expect(x == 1, "first is second");
    });
}

namespace {
template <Spec S>
struct Many {
  Array<"w", Tensor<f32, S>> w;
};
constexpr std::size_t leaves = 16;

/// The most host memory that `reshard` takes beyond two trees of 16 leaves of 64 KiB.
template <Spec From, Spec To>
std::size_t taken(const DT& mesh) {
  Many<From> from;
  Many<To> to;
  for (std::size_t i = 0; i < leaves; ++i) {
    from.w.push_back(full<f32, From>(mesh, {{"A", 128}, {"B", 128}}, static_cast<double>(i)));
    to.w.push_back(zeros<f32, To>(mesh, {{"A", 128}, {"B", 128}}));
    static_cast<void>(from.w[i].span());
    static_cast<void>(to.w[i].span());
  }
  Pool& pool = *mesh.device()->host_pool();
  pool.reset_peak();
  const std::size_t before = pool.stats().live;
  io::reshard(mesh, from, to);
  const std::size_t most = pool.stats().peak - before;
  for (std::size_t i = 0; i < leaves; ++i)
    for (const float x : to.w[i].span()) expect(x == static_cast<float>(i), "the leaf's number");
  return most;
}
}  // namespace

TEST_CASE("reshard: leaves move in batches, and what a device has stays", "[reshard]") {
  constexpr std::size_t KiB = 1024;
  const auto more = [](std::size_t most, std::size_t bytes) {
    expect(most >= bytes, fmt::format("only {} bytes", most));
  };
  const auto less = [](std::size_t most, std::size_t bytes) { expect(most < bytes, fmt::format("{} bytes", most)); };
  {
    const Temporarily one(tuning.resharded_together, std::uint64_t{0});
    // The shard that is read, where it is not in host memory.
    const std::size_t copy = shardlib::test::device_kind() == DeviceKind::cpu ? 0 : 32 * KiB;
    on_mesh("d=2,t=1", [&](const DevicePtr& device) {
      // 32 KiB are new, 16 go to the other device and 16 come from it.
      less(taken<"A/d B", "A B/d">(DT(device)), copy + 96 * KiB);
      // 64 KiB are new, 32 go to the other device and 32 come from it. MPI may free a message with the next one.
      less(taken<"A/d B", "A B">(DT(device)), copy + (under_mpi() ? 192 : 160) * KiB);
    });
    // 32 KiB are new. Two devices hold each shard, and neither sends it.
    on_mesh("d=2,t=2", [&](const DevicePtr& device) { less(taken<"A/t B", "A/t B">(DT(device)), copy + 48 * KiB); });
  }
  on_mesh("d=2,t=1", [&](const DevicePtr& device) { more(taken<"A/d B", "A B/d">(DT(device)), leaves * 32 * KiB); });
}

namespace {
struct Before {
  Tensor<f32, "A/d"> kept, renamed_a, longer, narrow, gone;
};
struct After {
  Tensor<f32, "A/d"> kept, renamed_b;
  Tensor<f32, "A/d B"> longer;
  Tensor<i32, "A/d"> narrow;
};
using Line = Mesh<"d">;
struct One {
  Tensor<f32, "A/d"> kept;
};
}  // namespace

TEST_CASE("reshard: what does not fit is one error on all devices", "[reshard]") {
  on_mesh("d=2", [&](const Line& mesh) {
    const auto four = [&](double x) { return full<f32, "A/d">(mesh, {{"A", 4}}, x); };
    After after{four(3), four(3), ones<f32, "A/d B">(mesh, {{"A", 4}, {"B", 2}}), zeros<i32, "A/d">(mesh, {{"A", 4}})};
    expect_error<UsageError>(
        [&] {
          io::reshard(mesh, Before{four(1), four(1), four(1), four(1), four(1)}, after);
        },
        "reshard: the source does not fit the target:\n"
        "  'longer' is [4] in the source, but [4, 2] in the target\n"
        "  'narrow' is f32 in the source, but i32 in the target\n"
        "  'renamed_b' is not in the source (nearest there: 'renamed_a')\n"
        "  'gone' is in the source, but not in the target\n"
        "  'renamed_a' is in the source, but not in the target");
    expect(after.kept.span()[0] == 3, "the target has changed");
    auto turned = zeros<f32, "B A/d">(mesh, {{"A", 4}, {"B", 4}});
    expect_error<UsageError>(
        [&] {
          io::reshard(mesh, ones<f32, "A/d B">(mesh, {{"A", 4}, {"B", 4}}), turned);
        },
        "reshard: the source does not fit the target:\n"
        "  'value' has the dims A B in the source, but B A in the target: take it in that order, then `rearrange` it, "
        "or `rename` the dims if only their names have changed");

    const One one{four(1)};
    One none, target{four(3)};
    expect_error([&] { io::reshard(mesh, none, target); },
                 "reshard: source: the leaf 'kept' is empty: give it a value first");
    expect_error([&] { io::reshard(mesh, one, none); },
                 "reshard: target: the leaf 'kept' is empty: give it a value first");
    // Also if one device alone is wrong.
    expect_error([&] { io::reshard(mesh, one, mesh.rank() == 0 ? none : target); },
                 "reshard: target: the leaf 'kept' is empty: give it a value first (on device 0 (d=0) of mesh d=2)");
    struct Two {
      Tensor<f32, "A/d"> a, b;
    } two{four(1), four(1)};
    expect_error([&] { io::reshard(mesh, two, target, {.rename_from = [](const auto&) { return "kept"; }}); },
                 "reshard: source: two leaves have the name 'kept'");
    const Line alone(DevicePtr::make(std::vector<AxisSize>{{"d", 1}}, 0, nullptr, 1, tuning));
    expect_error(
        [&] {
          io::reshard(mesh, One{ones<f32, "A/d">(alone, {{"A", 4}})}, target);
        },
        "reshard: source: the leaf 'kept' is on another mesh; make it on the mesh of this call, or on a "
        "submesh or `reinterpret` of it");
    const One other{full<f32, "A/d">(mesh, {{"A", mesh.rank() == 0 ? 4 : 6}}, 1.0)};
    expect_error([&] { io::reshard(mesh, other, target); },
                 "reshard: source: the leaf 'kept' has another shape, dtype or layout on device 1");
    expect(target.kept.span()[0] == 3, "the target has changed");

    const auto loss = [&](const One& w) {
      io::reshard(mesh, w, target);
      return sum<"A/d -> +d">(w.kept);
    };
    expect_error([&] { static_cast<void>(value_and_grad(mesh, loss, one)); },
                 "reshard: source: the leaf 'kept' is differentiated, and reshard has no derivative; call it outside "
                 "of value_and_grad");
  });
}

TEST_CASE("reshard: submeshes with different values under one name are an error", "[reshard]") {
  on_mesh("d=2,e=2", [](const Mesh<"d e">& mesh) {
    const auto part = submesh<"e">(mesh);
    const auto own = full<f32, "A/d">(part, {{"A", 4}}, mesh.axis_index("e"));
    auto target = full<f32, "A/d/e">(mesh, {{"A", 4}}, 3);
    expect_error([&] { io::reshard(mesh, own, target); },
                 "reshard: source: the leaf 'value' has other values on device 1 than on device 0; if they are "
                 "of several submeshes, give the leaves of each names of its own with `rename_from`");
    expect(target.span()[0] == 3, "the target has changed");
  });
}

TEST_CASE("reshard, save, load and gather_texts: not in a dry run", "[reshard]") {
  const auto device = DevicePtr::make(parse_mesh("d=2"), 0, std::make_shared<DryWorld>());
  const Line mesh(device);
  const One from{ones<f32, "A/d">(mesh, {{"A", 4}})};
  One to{ones<f32, "A/d">(mesh, {{"A", 4}})};
  const std::string why =
      "a dry run has one device, which cannot know what the others hold; leave reshard, save, load and the like out of "
      "it: `if (!mesh.device()->is_dry())`";
  expect_error([&] { io::reshard(mesh, from, to); }, "reshard: source: " + why);
  expect_error([&] { io::save(mesh, "nowhere", 7, from); }, "checkpoint 'nowhere/step-00000007' was not saved: " + why);
  expect_error([&] { io::load(mesh, "nowhere", to); }, why);
  expect_error([&] { static_cast<void>(io::gather_texts(*device, "")); }, why);
  expect_error([&] { io::agree(*device, "reading", nullptr); }, why);
}
