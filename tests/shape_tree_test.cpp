// Trees: plain structs of tensors, their leaves' names and order, map and zip, and the types of gradients.
#include "catch.hpp"

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "shardlib/shapes.hpp"

using namespace shardlib;

// Specs from specs, for generic code.
static_assert(without_axis<"M/t/d F", "d"> == Spec("M/t F") && without_axis<"M F", "d"> == Spec("M F"));
static_assert(without_axis<"M/t/d", "t"> == Spec("M/d"));
static_assert(without_dim<"B/d L V/t +p", "V"> == Spec("B/d L +p"));
static_assert(with_sum<"M", "t"> == Spec("M +t") && with_sum<"M +t", "t"> == Spec("M +t"));
static_assert(without_sum<"M +d +t", "d"> == Spec("M +t") && without_sum<"M", "d"> == Spec("M"));
static_assert(renamed<"B/d L", "L -> Qlen"> == Spec("B/d Qlen"));
static_assert(has_dim<"B/d M", "M"> && !has_dim<"B/d M", "d">);
static_assert(is_sharded<"B/d M", "d"> && !is_sharded<"B/d M +t", "t">);
static_assert(is_partial<"B/d M +t", "t"> && !is_partial<"B/d M", "d">);
static_assert(make_op<"M/d F", "M F"> == OpSpec("M/d F -> M F"));
static_assert(make_op2<"B/d M", "M F", "B/d F"> == OpSpec("B/d M, M F -> B/d F"));
template <dtype D, Spec S>
auto gathered(const Tensor<D, S>& w) -> Tensor<D, without_axis<S, "d">> {
  return all_gather<over<"d">>(w);
}
static_assert(std::is_same_v<decltype(gathered(Tensor<f32, "M/d F/t">())), Tensor<f32, "M F/t">>);
static_assert(std::is_same_v<decltype(gathered(Tensor<bf16, "M/t/d">())), Tensor<bf16, "M/t">>);
// A spec that a function makes is a result spec, too.
constexpr Spec whole = without_axis<"M/d F/t", "d">;
static_assert(std::is_same_v<decltype(all_gather<whole>(Tensor<f32, "M/d F/t">())), Tensor<f32, whole>>);
static_assert(std::is_same_v<decltype(all_gather<"M", backward_sum<f32>>(Tensor<bf16, "M/t/d">())), Tensor<bf16, "M">>);
static_assert(std::is_same_v<decltype(stack<"S">(Tensor<f32, "A/d">(), Tensor<f32, "A/d">())), Tensor<f32, "S A/d">>);
static_assert(std::is_same_v<decltype(unstack<"S">(Tensor<f32, "S A/d">())), std::vector<Tensor<f32, "A/d">>>);
static_assert(std::is_same_v<decltype(transpose(Tensor<f32, "A B/t">())), Tensor<f32, "B/t A">>);

/// The types know nothing of what a tensor holds, and these tests look at nothing but whether it is the same. No file
/// of this binary may include value.hpp, which has the real one.
struct shardlib::detail::Value : shardlib::detail::Counted {};

// A class of the program may have operators before it is complete. Outside of namespaces, the library's are candidates
// too.
struct Incomplete;
Incomplete& operator+(Incomplete& x, int);
static_assert(std::is_same_v<decltype(std::declval<Incomplete&>() + 1), Incomplete&>);

namespace in_a_namespace {
struct Pair {
  Tensor<f32, "A/d B/t"> left, right;
};
}  // namespace in_a_namespace

namespace {

struct Layer {
  Tensor<f32, "M/t/d"> ln1;
  Tensor<f32, "M/d F/t"> w_gate2;
};
struct Model {
  Tensor<f32, "V/t M/d"> embed;
  Array<"layers", Layer> layers;
  in_a_namespace::Pair pair;
  Tensor<f32, "M/t/d"> norm;
};
struct Biased {
  Tensor<f32, "M/d H/t"> w;
  Tensor<f32, "H/t"> bias;
  Tensor<bf16, "M"> gain;
  Tensor<f32, "M"> shift;
};
struct Deep {
  Biased first;
  Array<"layers", Biased> layers;
  Layer whole;
  Tensor<f32, ""> scale;
};
struct Dense {
  Tensor<f32, "M/t/d"> up;
};
struct Experts {
  Tensor<f32, "M X"> router;
  Array<"experts", Tensor<f32, "M/t/d">> up;
};
struct Block {
  std::optional<Tensor<f32, "M/t/d">> bias;
  std::variant<Dense, Experts> mlp;
};
struct Mixed {
  Array<"layers", Block> layers;
  Array<"kinds", std::variant<Dense, Experts>> kinds;
  std::optional<std::variant<Dense, Biased>> last;
};
template <Spec S>
struct Templated {
  Tensor<f32, S> only;
};
struct Wide {
  Tensor<f32, "A"> a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16, a17, a18, a19, a20, a21, a22,
      a23;
};

using M2 = Mesh<"d t">;

detail::ValuePtr something() {
  return detail::Handle<detail::Value>::make();
}
template <class T>
bool holds(const T& tensor, const detail::ValuePtr& thing) {
  return tensor.value() == thing;
}

// ---- at compile time ----

static_assert(detail::field_name<Layer, 0>() == "ln1");
static_assert(detail::field_name<Layer, 1>() == "w_gate2");
static_assert(detail::field_name<Model, 1>() == "layers");
static_assert(detail::field_name<Model, 2>() == "pair");
static_assert(detail::field_name<in_a_namespace::Pair, 1>() == "right");
static_assert(detail::field_name<Templated<"A/t +d">, 0>() == "only");
static_assert(detail::field_name<Wide, 22>() == "a23");
static_assert(detail::field_name<Wide, 9>() == "a10");
static_assert(detail::tree_width<Wide> == 23);
static_assert(detail::tree_width<Templated<"">> == 1);
static_assert(detail::tree_width<Model> == 4);

static_assert(detail::all_leaves<Model>([]<class D, Spec S>(std::type_identity<Tensor<D, S>>) {
  return std::is_same_v<D, f32>;
}));
static_assert(!detail::all_leaves<Deep>([]<class D, Spec S>(std::type_identity<Tensor<D, S>>) {
  return std::is_same_v<D, f32>;
}));
static_assert(is_array<Array<"layers", Layer>> && !is_array<std::vector<Layer>>);
static_assert(Array<"layers", Layer>::dim == Spec("layers"));

static_assert(fully_sharded<M2, Model>);
static_assert(fully_sharded<Mesh<"d">, Templated<"A/d B">>);
static_assert(!legal<rules::fully_sharded, Spec("d"), Spec("M/d H/t")>);  // t is not on the mesh
static_assert(!legal<rules::fully_sharded, Spec("d t z"), Spec("M/d H/t")>);

// A tree of fully sharded leaves is its own gradient; a single tensor's gradient is its dual.
static_assert(std::is_same_v<gradient_t<M2, Model>, Model>);
static_assert(std::is_same_v<gradient_t<M2, Array<"layers", Layer>>, Array<"layers", Layer>>);
static_assert(std::is_same_v<gradient_t<M2, Tensor<f32, "M/t/d">>, Tensor<f32, "M/t/d">>);
static_assert(std::is_same_v<gradient_t<M2, Tensor<f32, "M/t">>, Tensor<f32, "M/t +d">>);
static_assert(std::is_same_v<gradient_t<M2, Tensor<f32, "">>, Tensor<f32, "+d +t">>);
static_assert(std::is_same_v<gradient_t<Mesh<"d">, Tensor<f32, "M/d">>, Tensor<f32, "M/d">>);
static_assert(std::is_same_v<gradient_t<Mesh<"t">, Tensor<f32, "M/d">>, Tensor<f32, "M/d +t">>);

// With a replicated leaf, each member's type is its own gradient's.
using G = gradient_t<M2, Biased>;
static_assert(std::is_same_v<G, Gradient<M2, Biased>> && detail::is_gradient<G> && !detail::is_gradient<Biased>);
template <auto Member, class Tree>
using member_t = std::remove_cvref_t<decltype(std::declval<const Tree&>().template get<Member>())>;
static_assert(std::is_same_v<member_t<&Biased::w, G>, Tensor<f32, "M/d H/t">>);
static_assert(std::is_same_v<member_t<&Biased::bias, G>, Tensor<f32, "H/t +d">>);
static_assert(std::is_same_v<member_t<&Biased::gain, G>, Tensor<bf16, "M +d +t">>);
static_assert(std::is_same_v<member_t<&Biased::shift, G>, Tensor<f32, "M +d +t">>);

using DeepG = gradient_t<M2, Deep>;
static_assert(std::is_same_v<member_t<&Deep::first, DeepG>, G>);
static_assert(std::is_same_v<member_t<&Deep::layers, DeepG>::value_type, G>);
static_assert(std::is_same_v<member_t<&Deep::whole, DeepG>, Layer>);
static_assert(std::is_same_v<member_t<&Deep::scale, DeepG>, Tensor<f32, "+d +t">>);
static_assert(is_array<member_t<&Deep::layers, DeepG>>);

// A std::optional or std::variant of gradients is the gradient of one of trees.
static_assert(std::is_same_v<gradient_t<M2, std::optional<Dense>>, std::optional<Dense>>);
static_assert(std::is_same_v<gradient_t<M2, std::optional<Tensor<f32, "M">>>, std::optional<Tensor<f32, "M +d +t">>>);
static_assert(std::is_same_v<gradient_t<M2, std::variant<Dense, Biased>>, std::variant<Dense, G>>);
static_assert(detail::tree_width<Mixed> == 3 && detail::field_name<Mixed, 2>() == "last");
static_assert(!detail::is_tree<std::optional<double>>() && !detail::is_tree<std::variant<std::monostate, Dense>>());

// ---- at run time ----

Model model(std::size_t layers) {
  Model m;
  m.layers.resize(layers);
  return m;
}

TEST_CASE("trees: names of leaves are paths in the order of declaration") {
  CHECK(leaf_names(model(2)) == std::vector<std::string>{"embed", "layers/0/ln1", "layers/0/w_gate2", "layers/1/ln1",
                                                         "layers/1/w_gate2", "pair/left", "pair/right", "norm"});
  CHECK(leaf_names(model(0)) == std::vector<std::string>{"embed", "pair/left", "pair/right", "norm"});
  CHECK(leaf_names(model(11).layers)[21] == "10/w_gate2");
  CHECK(leaf_names(Wide{})[22] == "a23");
  CHECK(leaf_names(Tensor<f32, "A">{}) == std::vector<std::string>{""});
  struct Local {
    Tensor<f32, "A"> x;
  };
  CHECK(leaf_names(Local{}) == std::vector<std::string>{"x"});
}

TEST_CASE("trees: shardings are the leaves' specs") {
  CHECK(shardings(model(1)) == std::vector<std::string>{"V/t M/d", "M/t/d", "M/d F/t", "A/d B/t", "A/d B/t", "M/t/d"});
}

TEST_CASE("trees: map_tree takes each leaf to its place and leaves its argument alone") {
  const std::array things{something(), something()};
  Model m = model(2);
  m.layers[1].w_gate2 = Tensor<f32, "M/d F/t">(things[0]);
  m.norm = Tensor<f32, "M/t/d">(things[1]);
  const Model same = map_tree([](const auto& leaf) { return leaf; }, m);
  CHECK(holds(same.layers[1].w_gate2, things[0]));
  CHECK(holds(same.norm, things[1]));
  CHECK(!same.embed);

  const Model empty = map_tree([](const auto& leaf) { return std::remove_cvref_t<decltype(leaf)>(); }, m);
  CHECK(!empty.norm);
  CHECK(empty.layers.size() == 2);
  CHECK(holds(m.norm, things[1]));

  // Two trees: the one's leaf where it holds something, else the other's.
  Model other = model(2);
  other.embed = Tensor<f32, "V/t M/d">(things[1]);
  const Model both = map_tree([](const auto& a, const auto& b) { return a ? a : b; }, m, other);
  CHECK(holds(both.embed, things[1]));
  CHECK(holds(both.layers[1].w_gate2, things[0]));
}

TEST_CASE("trees: for_each_leaf may change leaves, and zips trees") {
  const auto thing = something();
  Model m = model(1);
  std::vector<std::string> visited;
  for_each_leaf(
      [&](std::string_view name, auto& leaf) {
        leaf = std::remove_cvref_t<decltype(leaf)>(thing);
        visited.emplace_back(name);
      },
      m);
  CHECK(visited == leaf_names(m));
  CHECK(holds(m.layers[0].ln1, thing));
  CHECK(holds(m.pair.right, thing));

  Model shorter = model(0);
  CHECK_THROWS_WITH(
      for_each_leaf([](std::string_view, const auto&, const auto&) {}, m, shorter),
      "for_each_leaf: trees of different structure: the Array `layers` has 1 entry in the first tree and 0 in another; "
      "build them from one configuration");
}

Mixed mixed() {
  Mixed m;
  m.layers = {Block{Tensor<f32, "M/t/d">(), Dense()}, Block{std::nullopt, Experts{{}, {{}, {}}}}};
  m.kinds = {Experts(), Dense()};
  m.last = Biased();
  return m;
}

TEST_CASE("trees: what a std::optional or a std::variant holds has its path") {
  Mixed m = mixed();
  CHECK(leaf_names(m) == std::vector<std::string>{"layers/0/bias", "layers/0/mlp/up", "layers/1/mlp/router",
                                                  "layers/1/mlp/up/0", "layers/1/mlp/up/1", "kinds/0/router",
                                                  "kinds/1/up", "last/w", "last/bias", "last/gain", "last/shift"});
  std::vector<std::string> visited;
  const auto visit = [&](std::string_view name, auto& leaf) {
    visited.emplace_back(name);
    leaf = std::remove_cvref_t<decltype(leaf)>(something());
  };
  for_each_leaf(visit, m);
  CHECK(visited == leaf_names(m));
  CHECK(std::get<0>(m.layers[0].mlp).up);
  CHECK(shardings(m)[2] == "M X");
  m.last.reset();
  CHECK(leaf_names(m).size() == 7);
  CHECK(leaf_names(std::optional(Dense())) == std::vector<std::string>{"up"});
  CHECK(leaf_names(std::variant<Dense, Tensor<f32, "M">>(std::in_place_index<1>)) == std::vector<std::string>{""});
}

TEST_CASE("trees: map and zip go into a std::optional and the alternative of a std::variant") {
  const auto thing = something();
  Mixed m = mixed(), other = mixed();
  std::get<1>(m.layers[1].mlp).up[1] = Tensor<f32, "M/t/d">(thing);
  *other.layers[0].bias = Tensor<f32, "M/t/d">(thing);
  const Mixed both = map_tree([](const auto& a, const auto& b) { return a ? a : b; }, m, other);
  CHECK(holds(std::get<1>(both.layers[1].mlp).up[1], thing));
  CHECK(holds(*both.layers[0].bias, thing));
  CHECK(!*m.layers[0].bias);

  using MixedG = gradient_t<M2, Mixed>;
  const auto gradient = same_structure<MixedG>(m);
  CHECK(leaf_names(gradient) == leaf_names(m));
  const auto& last = gradient.get<&Mixed::last>();
  CHECK(!std::get<1>(*last).get<&Biased::bias>());
  CHECK(std::string_view(std::remove_cvref_t<decltype(std::get<1>(*last).get<&Biased::bias>())>::spec) == "H/t +d");
  std::size_t leaves = 0;
  for_each_leaf([&](std::string_view, const auto&, const auto&) { ++leaves; }, m, gradient);
  CHECK(leaves == leaf_names(m).size());
}

TEST_CASE("trees: an error says what a std::optional or a std::variant holds in each tree") {
  const auto zip = [](const auto& a, const auto& b) {
    for_each_leaf([](std::string_view, const auto&, const auto&) {}, a, b);
  };
  const Mixed m = mixed();
  Mixed other = m;
  other.layers[0].bias.reset();
  CHECK_THROWS_WITH(zip(m, other),
                    "for_each_leaf: trees of different structure: the std::optional `layers/0/bias` has a value in the "
                    "first tree and no value in another; build them from one configuration");
  CHECK_THROWS_WITH(zip(std::optional<Dense>(), std::optional(Dense())),
                    "for_each_leaf: trees of different structure: the std::optional has no value in the first tree and "
                    "a value in another; build them from one configuration");
  other = m;
  other.kinds[1] = Experts();
  std::string text;
  try {
    zip(m, other);
  } catch (const Error& error) {
    text = error.what();
  }
  CHECK(text.starts_with("for_each_leaf: trees of different structure: the std::variant `kinds/1` has `"));
  CHECK(text.ends_with("Experts` in another; build them from one configuration"));
  CHECK(text.find("Dense` in the first tree and `") != std::string::npos);
  using Twins = std::variant<Tensor<f32, "M">, Tensor<f32, "M">>;
  CHECK_THROWS_WITH(zip(Twins(std::in_place_index<0>), Twins(std::in_place_index<1>)),
                    "for_each_leaf: trees of different structure: the std::variant has `f32[M]` in the first tree and "
                    "`f32[M]`, which is another alternative, in another; build them from one configuration");
}

TEST_CASE("trees: a gradient zips with its weights, and has their names") {
  Deep weights;
  weights.layers.resize(1);
  DeepG gradient;
  detail::fields(gradient);  // its fields are a tree's
  std::get<1>(gradient.as_tuple()).resize(1);
  std::vector<std::string> specs;
  for_each_leaf(
      [&]<class D, Spec S, class E, Spec T>(std::string_view name, const Tensor<D, S>&, const Tensor<E, T>&) {
        static_assert(std::is_same_v<D, E>);
        specs.push_back(std::string(name) + ": " + std::string(std::string_view(T)));
      },
      weights, gradient);
  CHECK(specs == std::vector<std::string>{"first/w: M/d H/t", "first/bias: H/t +d", "first/gain: M +d +t",
                                          "first/shift: M +d +t", "layers/0/w: M/d H/t", "layers/0/bias: H/t +d",
                                          "layers/0/gain: M +d +t", "layers/0/shift: M +d +t", "whole/ln1: M/t/d",
                                          "whole/w_gate2: M/d F/t", "scale: +d +t"});
  CHECK(leaf_names(gradient) == leaf_names(weights));

  // Members of one type are told apart.
  const std::array things{something(), something()};
  std::get<2>(std::get<0>(gradient.as_tuple()).as_tuple()) = Tensor<bf16, "M +d +t">(things[0]);
  std::get<3>(std::get<0>(gradient.as_tuple()).as_tuple()) = Tensor<f32, "M +d +t">(things[1]);
  CHECK(holds(gradient.get<&Deep::first>().get<&Biased::gain>(), things[0]));
  CHECK(holds(gradient.get<&Deep::first>().get<&Biased::shift>(), things[1]));

  const DeepG copy = map_tree([](const auto& leaf) { return leaf; }, gradient);
  CHECK(holds(copy.get<&Deep::first>().get<&Biased::shift>(), things[1]));
}

class ReadOnly {
 public:
  struct Names {
    Tensor<f32, "M"> scale, shift;
  };
  using fields_of = Names;
  [[nodiscard]] auto as_tuple() const { return std::tie(scale_, shift_); }

 private:
  Tensor<f32, "M"> scale_, shift_;
};

TEST_CASE("trees: a class may give its fields only to be read") {
  CHECK(leaf_names(ReadOnly()) == std::vector<std::string>{"scale", "shift"});
  CHECK(shardings(ReadOnly()) == std::vector<std::string>{"M", "M"});
}

}  // namespace
