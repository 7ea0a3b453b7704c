// The grammar of specs: every error's text, canonical form, round trips, and texts that make no sense.
#include "catch.hpp"

#include <algorithm>
#include <random>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "shardlib/rules/all.hpp"
#include "shardlib/types/tensor.hpp"

using namespace shardlib;

namespace {

std::string str(std::string_view s) {
  return std::string(s);
}
std::string error(std::string_view spec) {
  return str(parse_tensor(spec).error);
}
std::string op_error(std::string_view spec) {
  return str(parse_op(spec).error);
}
std::string canonical(std::string_view spec) {
  return str(to_string(parse_tensor(spec).spec));
}
std::string canonical_op(std::string_view spec) {
  return str(to_string(parse_op(spec)));
}

TEST_CASE("grammar: what a spec means") {
  const std::string text = "B/d M/t/x 2 +z";
  const auto spec = parse_tensor(text).spec;
  REQUIRE(error(text) == "");
  REQUIRE(spec.rank() == 3);
  CHECK(spec.dims[0].name == "B");
  CHECK(spec.dims[1].axes.size() == 2);
  CHECK(spec.dims[1].axes[0] == "t");
  CHECK(spec.dims[1].axes[1] == "x");
  CHECK(spec.dims[2].is_integer());
  CHECK(spec.dims[2].integer == 2);
  CHECK(!spec.dims[0].is_integer());
  CHECK(spec.placement("d") == Placement{Placement::sharded, 0});
  CHECK(spec.placement("x") == Placement{Placement::sharded, 1});
  CHECK(spec.placement("z") == Placement{Placement::partial, -1});
  CHECK(spec.placement("elsewhere") == Placement{Placement::replicated, -1});
  CHECK(spec.find("M") == 1);
  CHECK(spec.find("d") == -1);

  CHECK(parse_tensor("").spec == TensorSpec{});
  CHECK(parse_tensor("  ").spec == TensorSpec{});
  CHECK(parse_tensor("_a1/_b2").spec.dims[0].axes[0] == "_b2");
  CHECK(parse_tensor("d/d").spec.dims[0].name == "d");  // dims and axes have names of their own
  CHECK(parse_tensor("2 2 2").spec.rank() == 3);        // integers are sizes, not names
  CHECK(parse_tensor("0 1000000000").spec.dims[1].integer == 1000000000);
  CHECK(parse_tensor("[V/t] M").spec.dims[0].bracketed);
  CHECK(!parse_tensor("[V/t] M").spec.dims[1].bracketed);
}

TEST_CASE("grammar: what differs and what does not") {
  const auto same = [](std::string_view a, std::string_view b) { return parse_tensor(a).spec == parse_tensor(b).spec; };
  CHECK(same("A +d +t", "A +t +d"));
  CHECK(!same("M/t/d", "M/d/t"));
  CHECK(!same("A B", "B A"));
  CHECK(!same("A", "A +d"));
  CHECK(!same("A", "A/d"));
  CHECK(!same("2", "3"));
}

TEST_CASE("grammar: canonical form") {
  CHECK(canonical("  A/t   B  +t2  ") == "A/t B +t2");
  CHECK(canonical("A +t +d +a") == "A +a +d +t");
  CHECK(canonical("M/t/d") == "M/t/d");
  CHECK(canonical("[V/t]  M") == "[V/t] M");
  CHECK(canonical("") == "");
  CHECK(canonical_op(" A/t  ->A ") == "A/t -> A");
  CHECK(canonical_op("A,B  ,C->A B C +t +d") == "A, B, C -> A B C +d +t");
  CHECK(canonical_op("+t +d->") == "+d +t -> ");
  CHECK(canonical_op("->A") == "-> A");
  // Equal specs are one C++ type; specs that differ are not.
  static_assert(std::is_same_v<Tensor<f32, "A  B/t +d +x ">, Tensor<f32, "A B/t +x +d">>);
  static_assert(!std::is_same_v<Tensor<f32, "A/t/d">, Tensor<f32, "A/d/t">>);
  static_assert(std::is_same_v<Mesh<" d  t">, Mesh<"d t">>);
  static_assert(OpSpec("A/t->A") == OpSpec("A/t -> A"));
  static_assert(Spec("A +t +d") == Spec("A +d +t"));
  static_assert(sizeof(Tensor<f32, "?">) > 0);  // what a wrong op returns is no second error
  static_assert(std::is_same_v<Dual<Tensor<f32, "M/t">, "d t">, Tensor<f32, "M/t +d">>);
  static_assert(std::is_same_v<Dual<Tensor<f32, "+d +t">, "d t">, Tensor<f32, "">>);
  static_assert(std::is_same_v<Dual<Tensor<bf16, "A/d">, "d t z">, Tensor<bf16, "A/d +z +t">>);
}

TEST_CASE("grammar: the text of each error in a tensor spec") {
  CHECK(error("A//t") == "in `A//t`: `\"\"` is not an axis name (letters, digits, _)");
  CHECK(error("A/t/") == "in `A/t/`: `\"\"` is not an axis name (letters, digits, _)");
  CHECK(error("A/2") == "in `A/2`: `2` is not an axis name (letters, digits, _)");
  CHECK(error("A/t+d") == "in `A/t+d`: `t+d` is not an axis name (letters, digits, _)");
  CHECK(error("+") == "in `+`: `\"\"` is not an axis name (letters, digits, _)");
  CHECK(error("A + t") == "in `+`: `\"\"` is not an axis name (letters, digits, _)");
  CHECK(error("+t/d") == "in `+t/d`: `t/d` is not an axis name (letters, digits, _)");
  CHECK(error("A/t B/t") == "axis `t` appears twice: a mesh axis can act once in a tensor");
  CHECK(error("A/t/t") == "axis `t` appears twice: a mesh axis can act once in a tensor");
  CHECK(error("A/t +t") == "axis `t` appears twice: a mesh axis can act once in a tensor");
  CHECK(error("+t +t") == "axis `t` appears twice: a mesh axis can act once in a tensor");
  CHECK(error("A/a/b/c B/d/e/f +g") == "axis `g` is one too many: a spec has at most 6");
  CHECK(error("A/a/b/c/d/e/f/g") == "axis `g` is one too many: a spec has at most 6");
  CHECK(error("+a +b +c +d +e +f") == "");
  CHECK(error("A A") == "dim `A` appears twice: rename one of the two");
  CHECK(error("A/t A") == "dim `A` appears twice: rename one of the two");
  CHECK(error("[A] A") == "dim `A` appears twice: rename one of the two");
  CHECK(error("/t") == "`/t` is not a dim: write a name, `name/axis`, an integer or `+axis`, separated by spaces");
  CHECK(error("A+t") == "`A+t` is not a dim: write a name, `name/axis`, an integer or `+axis`, separated by spaces");
  CHECK(error("a-b") == "`a-b` is not a dim: write a name, `name/axis`, an integer or `+axis`, separated by spaces");
  CHECK(error("A,B") == "`A,B` is not a dim: write a name, `name/axis`, an integer or `+axis`, separated by spaces");
  CHECK(error("A\tB") == "`A\tB` is not a dim: write a name, `name/axis`, an integer or `+axis`, separated by spaces");
  CHECK(error("[A") == "`[A` is not a dim: write a name, `name/axis`, an integer or `+axis`, separated by spaces");
  CHECK(error("[]") == "`[]` is not a dim: write a name, `name/axis`, an integer or `+axis`, separated by spaces");
  CHECK(error("[") == "`[` is not a dim: write a name, `name/axis`, an integer or `+axis`, separated by spaces");
  CHECK(error("A -> B") == "`->` is not a dim: write a name, `name/axis`, an integer or `+axis`, separated by spaces");
  CHECK(error("2x") == "`2x` is neither a name (it starts with a digit) nor an integer");
  CHECK(error("2/t") == "integer dim `2/t` cannot be sharded: give the dim a name");
  CHECK(error("02") == "the integer dim `02` has a leading zero");
  CHECK(error("1000000001") == "the integer dim `1000000001` is too large");
  CHECK(error("99999999999999999999999999") == "the integer dim `99999999999999999999999999` is too large");
  CHECK(error("+t A") == "dim `A` comes after a `+axis`: dims come first");
  CHECK(error("a b c d e f g h i j") == "");
  CHECK(error("a b c d e f g h i j k") == "dim `k` is one too many: a spec has at most 10");
}

TEST_CASE("grammar: the text of each error in an op spec") {
  const std::string arrow = "an op spec has exactly one `->`: `operand, operand -> result`";
  CHECK(op_error("A B") == arrow);
  CHECK(op_error("A -> B -> C") == arrow);
  CHECK(op_error("") == arrow);
  CHECK(op_error("A - > B") == arrow);
  CHECK(op_error("A -> B, C") == "an op has one result: commas are between operands only");
  CHECK(op_error("A, B, C, D -> E") == "");
  CHECK(op_error("A, B, C, D, E -> F") == "an op spec has at most 4 operands");
  CHECK(op_error("A A -> A") == "dim `A` appears twice: rename one of the two");
  CHECK(op_error("A -> A A") == "dim `A` appears twice: rename one of the two");
  CHECK(op_error("A, B/t/t -> A") == "axis `t` appears twice: a mesh axis can act once in a tensor");
  CHECK(op_error(",, -> ") == "");
  CHECK(parse_op(",, -> ").in.size() == 3);
  CHECK(parse_op("->").in.size() == 1);
}

/// A random legal spec: its canonical text, and the same written carelessly.
struct Written {
  std::string canonical, careless;
};
Written random_spec(std::mt19937& random) {
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  const auto spaces = [&] { return std::string(1 + below(3), ' '); };
  std::vector<std::string> axes = {"d", "t", "x", "stage", "_y", "z9"}, names = {"A", "B", "L", "d", "Klen", "m_2"};
  std::shuffle(axes.begin(), axes.end(), random);
  std::shuffle(names.begin(), names.end(), random);
  Written written;
  written.careless = below(2) == 0 ? " " : "";
  for (std::size_t i = below(names.size() + 1); i > 0; --i) {
    std::string dim = below(5) == 0 ? std::to_string(below(100)) : names[i - 1];
    const bool integer = dim != names[i - 1];
    while (!integer && !axes.empty() && below(3) == 0) {
      dim += "/" + axes.back();
      axes.pop_back();
    }
    written.canonical += (written.canonical.empty() ? "" : " ") + dim;
    written.careless += dim + spaces();
  }
  std::vector<std::string> partial;
  while (!axes.empty() && below(3) != 0) {
    partial.push_back("+" + axes.back());
    axes.pop_back();
  }
  for (const auto& axis : partial) written.careless += axis + spaces();
  std::sort(partial.begin(), partial.end());
  for (const auto& axis : partial) written.canonical += (written.canonical.empty() ? "" : " ") + axis;
  return written;
}

TEST_CASE("grammar: random specs survive parsing and printing") {
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    const Written a = random_spec(random), b = random_spec(random);
    INFO("`" << a.careless << "`, `" << b.careless << "`");
    REQUIRE(error(a.careless) == "");
    CHECK(canonical(a.careless) == a.canonical);
    CHECK(canonical(a.canonical) == a.canonical);
    CHECK(parse_tensor(a.careless).spec == parse_tensor(a.canonical).spec);
    CHECK((parse_tensor(a.careless).spec == parse_tensor(b.careless).spec) == (a.canonical == b.canonical));
    const std::string op = a.careless + "," + b.careless + "->" + a.careless;
    REQUIRE(op_error(op) == "");
    CHECK(canonical_op(op) == canonical_op(canonical_op(op)));
    CHECK(parse_op(op).in[1] == parse_tensor(b.canonical).spec);
  }
}

/// All rules on one op spec and operands, whatever they are.
void apply_all(std::string_view op, std::string_view x, std::string_view y) {
  using namespace rules;
  // As Tensor<...> does after an error in its spec: what parses of it.
  const TensorSpec o = parse_tensor(op).spec, a = parse_tensor(x).spec, b = parse_tensor(y).spec;
  for (auto rule : {all_gather, reduce_scatter, all_reduce, all_reduce_max, all_to_all, shard, to_partial, einsum1, sum,
                    mean, rename, rearrange, merge, split, broadcast}) {
    static_cast<void>(rule(op, a));
    static_cast<void>(rule(x, b));
  }
  for (auto rule : {multiply, divide, cross_entropy, on_mesh, iota, one_hot, rules::fully_sharded}) {
    static_cast<void>(rule(o, a));
    static_cast<void>(rule(a, b));
  }
  for (auto rule : {einsum, rules::index, concat}) static_cast<void>(rule(op, a, b));
  for (auto rule : {add, map2, cotangent}) static_cast<void>(rule(op, a, b));
  for (auto rule : {along, rope}) static_cast<void>(rule(op, x, b));
  static_cast<void>(shift(op, x, b));
  static_cast<void>(local_max(op, x, b));
  static_cast<void>(where(o, a, b));
  static_cast<void>(create(op, a, b));
  static_cast<void>(triangle("tril", op, x, b));
  static_cast<void>(diagonal(op, x, b));
  static_cast<void>(map1("exp", a));
  static_cast<void>(map_of("map", o, a, b));
  static_cast<void>(map_of("map", o, a, b, a));
  static_cast<void>(causal_attention("A", "B", a, b, o));
  static_cast<void>(causal_attention_in_segments("A", "B", a, a, a, b));
  static_cast<void>(causal_attention_over("A", "B", op, a, b, o));
  static_cast<void>(causal_attention_over_in_segments("A", "B", x, a, a, a, b));
  static_cast<void>(ulysses_attention(op, x, a, a, b));
  static_cast<void>(ulysses_attention_in_segments(op, x, a, a, a, b));
  static_cast<void>(linear_cross_entropy(op, a, b, a));
  static_cast<void>(add_constant("+", a));
  static_cast<void>(item(a));
  static_cast<void>(mesh(x));
  static_cast<void>(rules::tensor(x));
  static_cast<void>(weight(a, DType::f32, b));
  static_cast<void>(loss(a, DType::f32, b));
  static_cast<void>(assign(DType::f32, a, DType::bf16, b));
  static_cast<void>(dual(a, mesh_axes(b)));
}

TEST_CASE("grammar: what looks canonical is, or is no spec") {
  const std::vector<std::string> parts{"A", "B/t", "2", "[C]", "+t", "+d", " ", ",", "->"};
  std::size_t found = 0;
  const auto check = [&](const auto& extend, const std::string& text, int more) -> void {
    if (detail::looks_canonical(text)) {
      const bool op = text.find("->") != std::string::npos;
      if (op ? op_error(text).empty() : error(text).empty()) {
        ++found;
        if ((op ? canonical_op(text) : canonical(text)) != text) FAIL("'" << text << "'");
      }
    }
    if (more > 0)
      for (const auto& part : parts) extend(extend, text + part, more - 1);
  };
  check(check, "", 5);
  // Longer ones have a space around whatever they need.
  for (const char* text : {"A B/t, B/t C -> A C +t", "A, B +d -> A B +d", "A +t -> +t", "[A/t] B, C -> C B +t"})
    CHECK(detail::looks_canonical(text));
  for (const char* text : {"A  B", " A", "A ", "+t +d", "A,B -> A", "A->B", "A -> ", "-> A", "A, -> A", "A , B -> A"})
    CHECK(!detail::looks_canonical(text));
  CHECK(found > 100);
}

TEST_CASE("malformed texts never crash, and what parses is printed as it is parsed") {
  std::mt19937 random(2);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  const std::vector<std::string> pieces = {"A",  "B",  "/t", "/d", "+t", "+d", "2",  " ",  " ",    ",",  "->", "[",
                                           "]",  "/",  "+",  "-",  "é",  "_",  "9a", "\t", "0",    "/a", "/b", "+e",
                                           "+f", "+g", "/h", "C",  "D",  "E",  "F ", "G ", "H/i ", "x ", "y "};
  const auto text = [&](std::size_t longest) {
    std::string s;
    for (std::size_t n = below(longest); n > 0; --n) s += pieces[below(pieces.size())];
    if (below(50) == 0) s += '\0';
    return s;
  };
  int tensors = 0, ops = 0;
  for (int i = 0; i < 1200; ++i) {
    const std::string op = text(14), x = i % 3 == 0 ? random_spec(random).careless : text(8), y = text(40);
    if (const auto parsed = parse_tensor(x); parsed.error.empty()) {
      ++tensors;
      CHECK(parse_tensor(canonical(x)).spec == parsed.spec);
    }
    if (parse_op(op).error.empty()) {
      ++ops;
      CHECK(canonical_op(canonical_op(op)) == canonical_op(op));
    }
    apply_all(op, x, y);
    // An op whose operand fits, so that the rules get past their first check.
    const std::string fitting = random_spec(random).canonical;
    apply_all(fitting + " -> " + (i % 2 == 0 ? op : random_spec(random).canonical), fitting, y);
    apply_all(fitting + ", " + x + " -> " + fitting, fitting, x);
  }
  CHECK(tensors > 300);
  CHECK(ops > 5);
}

TEST_CASE("a message that grows too long ends in three dots") {
  detail::Text text;
  for (int i = 0; i < 300; ++i) text += "0123456789";
  CHECK(text.size() == 1200);
  CHECK(str(text).substr(1190) == "0123456...");
  CHECK(str(detail::number(-1205)) == "-1205");
}

}  // namespace
