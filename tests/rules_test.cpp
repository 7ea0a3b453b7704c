// Every rule function: legal cases with the exact spec of the result, illegal ones with the exact text. Then the laws:
// the backward pass of a legal op is typed by the same rules, and advice is itself legal.
#include "catch.hpp"

#include <concepts>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shape_specs.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/types/spec_functions.hpp"

using namespace shardlib;

namespace {

std::string str(std::string_view s) {
  return std::string(s);
}

template <std::same_as<TensorSpec> S>
std::string str(const S& spec) {
  return str(to_string(spec).view());
}

void legal(const rules::Verdict& verdict, const std::string& result) {
  CHECK(str(verdict.why) == "");
  CHECK(str(verdict.result) == result);
}
void illegal(const rules::Verdict& verdict, const std::string& why) {
  CHECK(str(verdict.why) == why);
}
void misfit(const std::string& declared, const std::string& given, const std::string& why) {
  illegal(rules::assign(DType::f32, declared, DType::f32, given),
          "a tensor `f32[" + given + "]` does not fit the declared type `f32[" + declared + "]`: " + why);
}
/// A check that the rule refuses a call, in a message that begins with the op and its spec: f(spec, operands..., why).
template <class Spec, class... Operands>
auto refusals(const char* op, rules::Verdict (*rule)(Spec, Operands...)) {
  return [=](std::string_view spec, Operands... operands, const std::string& why) {
    illegal(rule(spec, operands...), op + ("<`" + str(spec) + "`>: ") + why);
  };
}

// ---- sentences that many rules share; dims are those of the operand without its pending sum ----

std::string reduce_first(const std::string& dims, const std::string& axis = "t") {
  return "reduce it first, with a `reduce_scatter` or `all_reduce<\"" + dims + " +" + axis + " -> " + dims +
         "\">` (communicate)";
}
std::string needs_sum(const std::string& op, const std::string& dims, const std::string& axis = "t") {
  return op + ": the operand `" + dims + " +" + axis + "` is partial over " + axis + ", and " + op +
         " is not linear, so it has to see the sum, not the summand of one device; " + reduce_first(dims, axis);
}
const std::string names_result = "; the spec names the dims of the result, not those to reduce over";
std::string gather_first(const std::string& dim, const std::string& from, const std::string& to) {
  return "dim `" + dim + "` is sharded, so each device sees only its shard of it; gather it first with `all_gather<\"" +
         from + " -> " + to + "\">` (communicates)";
}
std::string still_pending(const std::string& axis) {
  return "the sum over " + axis + " is still pending in the operand, so the result must keep `+" + axis +
         "`; take `all_reduce` for it before or afterwards (communicates)";
}
std::string nothing_partial(const std::string& axis) {
  return "the result spec says `+" + axis + "`, but no operand is partial over " + axis +
         ", and no dim that the result lacks is sharded over it (likely an unsharded contraction); drop `+" + axis +
         "`";
}
std::string summand_meets_shard(const std::string& dims, const std::string& axis, const std::string& other,
                                const std::string& dim, const std::string& remedy) {
  return "`" + dims + " +" + axis + "` is partial over " + axis + ", but `" + other + "` is sharded over " + axis +
         " (dim `" + dim + "`); the former first needs its sum, with `" + remedy + "` (communicates)";
}
std::string shards_differ(const std::string& dim, const std::string& x, const std::string& other_dim,
                          const std::string& y, const std::string& all_gather, const std::string& shard) {
  return "dim `" + dim + "` of `" + x + "` is `" + other_dim + "` in `" + y +
         "`, so their shards differ; take `all_gather<\"" + all_gather + "\">` (communicates) or `shard<\"" + shard +
         "\">` (no traffic)";
}
std::string split_and_shift(const std::string& split, const std::string& axis) {
  return "; or keep both sharded: `split<\"" + split +
         "\">` names the block of each device (free), and `shift` moves "
         "those of the other operand around " +
         axis + " (communicates)";
}
std::string not_at_end(const std::string& from, const std::string& to, const std::string& legal) {
  return "dim `" + from + "` cannot become `" + to + "`: axes come and go at the end of a dim only (" + legal + ")";
}
std::string other_dims(const std::string& result, const std::string& operand) {
  return "the dims of the result, `" + result + "`, must be those of the operand, `" + operand + "`, in the same order";
}
std::string operand_count(const std::string& spec, const std::string& call) {
  return "the op spec has " + spec + ", the call has " + call +
         "; pass one tensor for each operand, or correct the op spec";
}
std::string bracket_count(const std::string& dims, const std::string& indices, const std::string& example) {
  return "the number of dims in brackets is " + dims + ", and that of index tensors " + indices +
         "; each dim in brackets has an index tensor, in the same order: `" + example + "`";
}
std::string not_on_mesh(const std::string& spec, const std::string& axis, const std::string& mesh) {
  return "`" + spec + "` uses axis `" + axis + "`, which the mesh `" + mesh +
         "` does not have; correct the spec, or add the axis to the Mesh";
}
std::string left_partial(const std::string& axis, const std::string& because) {
  return "the result is partial over " + axis + " (" + because + "), so its spec must say `+" + axis +
         "`; reduce it afterwards with `reduce_scatter` or `all_reduce` (communicate)";
}

TEST_CASE("rules: all_gather") {
  const auto refuse = refusals("all_gather", rules::all_gather);
  legal(rules::all_gather("A/t -> A", "A/t"), "A");
  legal(rules::all_gather("M/t/d H -> M/t H", "M/t/d H"), "M/t H");
  legal(rules::all_gather("M/t/d H -> M H", "M/t/d H"), "M H");
  legal(rules::all_gather("A/d B/t -> A B", "A/d B/t"), "A B");
  legal(rules::all_gather("A/t +d -> A +d", "A/t +d"), "A +d");
  legal(rules::all_gather("A/t 2 -> A 2", "A/t 2"), "A 2");
  refuse("A/t -> A -> A", "A/t", "an op spec has exactly one `->`: `operand, operand -> result`");
  refuse("A/t, B -> A", "A/t", operand_count("2 operands", "1"));
  refuse("[A/t] -> A", "A/t", "brackets belong in the op spec of index_unreduced and scatter_add only");
  refuse("A/t -> A", "A", "the operand already is what the result should be, `A`; drop the op");
  refuse("A/t B -> A B", "B A/t",
         "the operand is `B A/t`, but the op spec expects `A/t B`: dim 1 is `B`, not `A/t`; reorder the dims with "
         "`rearrange<\"B A/t -> A/t B\">` (a local copy), or correct the op spec");
  refuse("A/t B -> A B", "C/t B",
         "the operand is `C/t B`, but the op spec expects `A/t B`: dim 1 is `C/t`, not `A/t`; if both names mean one "
         "size, `rename<\"C -> A\">` (free), or correct the op spec");
  refuse("A/t -> A", "A/d",
         "the operand is `A/d`, but the op spec expects `A/t`: dim 1 is `A/d`, not `A/t`; instead of this op, gather "
         "it with `all_gather<\"A/d -> A\">` (communicates), or correct the op spec");
  refuse("A/t -> A", "A/t +d",
         "the operand is `A/t +d`, but the op spec expects `A/t`: a sum over d is still pending in it; take "
         "`all_reduce<\"A/t +d -> A/t\">` (communicates), or correct the op spec");
  refuse("A/t -> A", "A +t",
         "the operand is `A +t`, but the op spec expects `A/t`: dim 1 is `A`, not `A/t`; instead of this op, take "
         "`all_reduce<\"A +t -> A\">` (communicates), or correct the op spec");
  refuse("A/t B -> A", "A/t B", other_dims("A", "A/t B"));
  refuse("A/t B -> B A", "A/t B", other_dims("B A", "A/t B"));
  refuse("A -> A", "A", "no dim loses an axis, so nothing would be gathered; drop the gather");
  refuse(" -> ", "", "no dim loses an axis, so nothing would be gathered; drop the gather");
  refuse("A/t/d -> A/d", "A/t/d", not_at_end("A/t/d", "A/d", "`A/d/t` can become `A/d`"));
  refuse("A -> A/t", "A",
         "dim `A` is not sharded over t, and a gather adds no sharding; as the operand is replicated over t, take "
         "`shard` (no traffic) for that");
  refuse("A/t B -> A B/t", "A/t B",
         "dim `B` is not sharded over t, and a gather adds no sharding; as the operand is sharded over t (dim `A/t`), "
         "take `all_to_all` (communicates) for that");
  refuse("A +t -> A/t", "A +t",
         "dim `A` is not sharded over t, and a gather adds no sharding; as the operand is partial over t, take "
         "`reduce_scatter` (communicates) for that");
  refuse("A/t +d -> A", "A/t +d", still_pending("d"));
  refuse("A/t -> A +t", "A/t", "the result has `+t`, but no sum over t is pending in the operand; drop `+t`");
  refuse("A/t -> A +d", "A/t", "the result has `+d`, but no sum over d is pending in the operand; drop `+d`");
}

TEST_CASE("rules: reduce_scatter") {
  const auto refuse = refusals("reduce_scatter", rules::reduce_scatter);
  legal(rules::reduce_scatter("A +t -> A/t", "A +t"), "A/t");
  legal(rules::reduce_scatter("A/t +d -> A/t/d", "A/t +d"), "A/t/d");
  legal(rules::reduce_scatter("A +d +t -> A/t/d", "A +t +d"), "A/t/d");
  legal(rules::reduce_scatter("A B +d +t -> A/t B/d", "A B +d +t"), "A/t B/d");
  legal(rules::reduce_scatter("A +d +t -> A/t +d", "A +d +t"), "A/t +d");
  refuse("A +t -> A/t", "A",
         "the operand is `A`, but the op spec expects `A +t`: it has no pending sum over t; instead of this op, take "
         "the shard of each device with `shard<\"A -> A/t\">` (no traffic), or correct the op spec");
  refuse("A +t -> A/t", "A/t", "the operand already is what the result should be, `A/t`; drop the op");
  refuse("A +t -> A/t", "B +t",
         "the operand is `B +t`, but the op spec expects `A +t`: dim 1 is `B`, not `A`; if both names mean one size, "
         "`rename<\"B -> A\">` (free), or correct the op spec");
  refuse("A -> A/t", "A",
         "the operand `A` is replicated over t, not partial: summing it again would multiply it by the size of t; take "
         "`shard` for the shard of each device without a sum (no traffic)");
  refuse("A/t B -> A B/t", "A/t B",
         "dim `A/t` cannot become `A`: this op drops no sharding; take `all_gather` for that (communicates)");
  refuse("A/t B -> A/t B/d", "A/t B",
         "the operand `A/t B` is replicated over d, not partial: summing it again would multiply it by the size of d; "
         "take `shard` for the shard of each device without a sum (no traffic)");
  refuse("A +t +d -> A/t", "A +d +t",
         "the sum over d is neither scattered (no dim gains `/d`) nor kept (`+d`) in the result; take `all_reduce` for "
         "it (communicates)");
  refuse("A +t -> A", "A +t",
         "the sum over t is neither scattered (no dim gains `/t`) nor kept (`+t`) in the result; take `all_reduce` for "
         "it (communicates)");
  refuse("A +t -> A +t", "A +t", "no dim gains an axis, so nothing would be scattered; drop the op");
  refuse("A +t -> A/t +d", "A +t", "the result has `+d`, but no sum over d is pending in the operand; drop `+d`");
  refuse("A/t +d -> A/d/t", "A/t +d", not_at_end("A/t", "A/d/t", "`A/t` can become `A/t/d`"));
  refuse("A +t -> B/t", "A +t", other_dims("B/t", "A +t"));
}

TEST_CASE("rules: all_reduce") {
  const auto refuse = refusals("all_reduce", rules::all_reduce);
  legal(rules::all_reduce("A +t -> A", "A +t"), "A");
  legal(rules::all_reduce("+d +t -> ", "+t +d"), "");
  legal(rules::all_reduce("A/t +d -> A/t", "A/t +d"), "A/t");
  legal(rules::all_reduce("A +t +d -> A +d", "A +t +d"), "A +d");
  refuse("A +t -> A", "A", "the operand already is what the result should be, `A`; drop the op");
  refuse("+d +t -> ", "", "the operand already is what the result should be, `\"\"`; drop the op");
  refuse("+d +t -> ", "+d",
         "the operand is `+d`, but the op spec expects `+d +t`: it has no pending sum over t; instead of this op, take "
         "`all_reduce<\"+d -> \">` (communicates), or correct the op spec");
  refuse("A -> A", "A",
         "no sum is pending in `A` that the result lacks, and to reduce a value twice multiplies it by the size of the "
         "axis; drop the all_reduce");
  refuse("A/t -> A/t", "A/t",
         "no sum is pending in `A/t` that the result lacks, and to reduce a value twice multiplies it by the size of "
         "the axis; drop the all_reduce");
  refuse(
      "A +t -> A/t", "A +t",
      other_dims("A/t", "A +t") + " and with the same sharding; take `reduce_scatter<\"A +t -> A/t\">` (communicates)");
  refuse(
      "M/t N -> M N", "M/t N",
      other_dims("M N", "M/t N") + " and with the same sharding; take `all_gather<\"M/t N -> M N\">` (communicates)");
  refuse("A +t -> A +d", "A +t", "the result has `+d`, but no sum over d is pending in the operand; drop `+d`");
  refuse("A +t -> B", "A +t", other_dims("B", "A +t") + " and with the same sharding");
  refuse("A +t -> A", "A/t",
         "the operand is `A/t`, but the op spec expects `A +t`: dim 1 is `A/t`, not `A`; instead of this op, gather it "
         "with `all_gather<\"A/t -> A\">` (communicates), or correct the op spec");
}

TEST_CASE("rules: all_reduce_max") {
  const auto refuse = refusals("all_reduce_max", rules::all_reduce_max);
  legal(rules::all_reduce_max("A V/t -> A", "A V/t"), "A");
  legal(rules::all_reduce_max("B/d L V/t -> B/d L", "B/d L V/t"), "B/d L");
  legal(rules::all_reduce_max("A V -> A", "A V"), "A");
  legal(rules::all_reduce_max("A/d B/t -> ", "A/d B/t"), "");
  refuse("A V/t +d -> A", "A V/t +d",
         "the operand `A V/t +d` is partial over d, and the maximum of a sum is not that of its parts; " +
             reduce_first("A V/t", "d"));
  refuse("A V/t -> A +t", "A V/t", "a maximum has no pending sum; drop `+t`");
  refuse("A V/t -> A V", "A V/t", "kept dim `V/t` must be unchanged in the result, not `V`");
  refuse("A/d V/t -> A", "A V/t",
         "the operand is `A V/t`, but the op spec expects `A/d V/t`: dim 1 is `A`, not `A/d`; correct the op spec");
  refuse("A V -> A V", "A V", "the result has every dim of the operand, so there is nothing to reduce");
  refuse("A V/t -> C", "A V/t", "dim `C` of the result is not a dim of the operand");
  refuse("A B V/t -> B A", "A B V/t", "dim `A` of the result is in another order than in the operand");
}

TEST_CASE("rules: all_to_all") {
  const auto refuse = refusals("all_to_all", rules::all_to_all);
  legal(rules::all_to_all("A/t B -> A B/t", "A/t B"), "A B/t");
  legal(rules::all_to_all("A/d/t B -> A/d B/t", "A/d/t B"), "A/d B/t");
  legal(rules::all_to_all("A/d/t B -> A B/d/t", "A/d/t B"), "A B/d/t");
  legal(rules::all_to_all("A/d B/t C E -> A B C/t E/d", "A/d B/t C E"), "A B C/t E/d");
  legal(rules::all_to_all("A/t B +d -> A B/t +d", "A/t B +d"), "A B/t +d");
  refuse("A/t B -> A B", "A/t B",
         "the sharding over t leaves one dim, but no other dim gains it; take `all_gather` to drop a sharding "
         "(communicates)");
  refuse("A B -> A B/t", "A B",
         "a dim gains the sharding over t that no other dim gives up; take `shard` to add a sharding (no traffic)");
  refuse("A/t B -> A/t B", "A/t B", "no axis moves; drop the all_to_all");
  refuse("A/t B/d -> A/d B/t", "A/t B/d", not_at_end("A/t", "A/d", "`A/x/y` can become `A/x`, not `A/y`"));
  refuse("A/t/d B -> A/d B/t", "A/t/d B", not_at_end("A/t/d", "A/d", "`A/d/t` can become `A/d`"));
  refuse("A/t B +d -> A B/t", "A/t B +d", still_pending("d"));
  refuse("A/t B -> A B/t", "A B/t", "the operand already is what the result should be, `A B/t`; drop the op");
  refuse("A/t B -> A C/t", "A/t B", other_dims("A C/t", "A/t B"));
}

TEST_CASE("rules: shift") {
  legal(rules::shift("A/t", "t", "A/t"), "A/t");
  legal(rules::shift("A/t/d B +x", "d", "A/t/d B +x"), "A/t/d B +x");
  illegal(rules::shift("A", "t", "A"),
          "shift<`A`, `t`>: the operand `A` is replicated over t; only the shards of a dim that is sharded over t can "
          "be passed round its ring");
  illegal(rules::shift("A +t", "t", "A +t"),
          "shift<`A +t`, `t`>: the operand `A +t` is partial over t; only the shards of a dim that is sharded over t "
          "can be passed round its ring");
  illegal(rules::shift("A/t", "d", "A/t"),
          "shift<`A/t`, `d`>: the operand `A/t` is replicated over d; only the shards of a dim that is sharded over d "
          "can be passed round its ring");
  illegal(rules::shift("A/t", "t", "A"),
          "shift<`A/t`, `t`>: the operand is `A`, but the op spec expects `A/t`: dim 1 is `A`, not `A/t`; correct the "
          "op spec");
  illegal(rules::shift("A//t", "t", "A/t"),
          "shift<`A//t`, `t`>: in `A//t`: `\"\"` is not an axis name (letters, digits, _)");
  illegal(rules::shift("[A/t]", "t", "A/t"),
          "shift<`[A/t]`, `t`>: brackets belong in the op spec of index_unreduced and scatter_add only");
  illegal(rules::shift("A/t -> A/t", "t", "A/t"),
          "shift<`A/t -> A/t`, `t`>: `->` is not a dim: write a name, `name/axis`, an integer or `+axis`, separated by "
          "spaces");
}

TEST_CASE("rules: shard") {
  const auto refuse = refusals("shard", rules::shard);
  legal(rules::shard("A -> A/t", "A"), "A/t");
  legal(rules::shard("A/d B -> A/d/t B", "A/d B"), "A/d/t B");
  legal(rules::shard("A +d -> A/t +d", "A +d"), "A/t +d");
  refuse("A -> A", "A", "no dim gains an axis; drop the op");
  refuse("A +t -> A/t", "A +t",
         "the operand is partial over t, and only a replicated value can be sharded; take `reduce_scatter` "
         "(communicates)");
  refuse("A/t B -> A/t B/d", "A B",
         "the operand is `A B`, but the op spec expects `A/t B`: dim 1 is `A`, not `A/t`; instead of this op, take the "
         "shard of each device with `shard<\"A B -> A/t B/d\">` (no traffic), or correct the op spec");
  refuse("A/t -> A", "A/t",
         "dim `A/t` cannot become `A`: this op drops no sharding; take `all_gather` for that (communicates)");
  refuse("A/t B -> A B/t", "A/t B",
         "dim `A/t` cannot become `A`: this op drops no sharding; take `all_gather` for that (communicates)");
  refuse("A -> A/t", "A/t", "the operand already is what the result should be, `A/t`; drop the op");
  refuse("A +d -> A/t", "A +d", still_pending("d"));
}

TEST_CASE("rules: to_partial") {
  const auto refuse = refusals("to_partial", rules::to_partial);
  legal(rules::to_partial("A -> A +t", "A"), "A +t");
  legal(rules::to_partial(" -> +d +t", ""), "+d +t");
  legal(rules::to_partial("A +d -> A +d +t", "A +d"), "A +d +t");
  legal(rules::to_partial("A/d -> A/d +t", "A/d"), "A/d +t");
  refuse("A/t -> A +t", "A/t", other_dims("A +t", "A/t") + " and with the same sharding");
  refuse("A -> A", "A", "the result has no new `+axis`; drop the to_partial");
  refuse("A +t -> A", "A +t", "the pending sum over t cannot be dropped; take `all_reduce` for it (communicates)");
  refuse("A +t -> A +d", "A +t", "the pending sum over t cannot be dropped; take `all_reduce` for it (communicates)");
  refuse("A -> A +t", "A +t", "the operand already is what the result should be, `A +t`; drop the op");
  refuse("A -> A +t", "A/t",
         "the operand is `A/t`, but the op spec expects `A`: dim 1 is `A/t`, not `A`; gather it with `all_gather<\"A/t "
         "-> A\">` (communicates), or correct the op spec");
}

TEST_CASE("rules: einsum") {
  const auto refuse_einsum = refusals("einsum_unreduced", rules::einsum);
  const auto refuse_einsum1 = refusals("einsum_unreduced", rules::einsum1);
  legal(rules::einsum("A B, B C -> A C", "A B", "B C"), "A C");
  legal(rules::einsum("A/t B, A/t C -> A/t B C", "A/t B", "A/t C"), "A/t B C");
  legal(rules::einsum("A/t B, B C -> A/t C", "A/t B", "B C"), "A/t C");
  legal(rules::einsum("A B/t, B/t C -> A C +t", "A B/t", "B/t C"), "A C +t");
  legal(rules::einsum("A B/t, C -> A C +t", "A B/t", "C"), "A C +t");
  legal(rules::einsum("A B +t, B C -> A C +t", "A B +t", "B C"), "A C +t");
  legal(rules::einsum("A B, B C +t -> A C +t", "A B", "B C +t"), "A C +t");
  legal(rules::einsum("B/d L M/t, M/t H -> B/d L H +t", "B/d L M/t", "M/t H"), "B/d L H +t");
  legal(rules::einsum("A/d/t, A/d/t -> +d +t", "A/d/t", "A/d/t"), "+d +t");
  legal(rules::einsum("A/d B/t, B/t C -> A/d C +t", "A/d B/t", "B/t C"), "A/d C +t");
  legal(rules::einsum(", A/t -> A/t", "", "A/t"), "A/t");
  refuse_einsum("A B/t, B/t C -> A C", "A B/t", "B/t C",
                left_partial("t", "contracting `B/t` sees only the shard of this device"));
  refuse_einsum("A B +t, B C -> A C", "A B +t", "B C", left_partial("t", "a pending sum stays pending"));
  refuse_einsum("A B, B C -> A C +t", "A B", "B C", nothing_partial("t"));
  refuse_einsum("A/t B, A C -> A/t B C", "A/t B", "A C",
                shards_differ("A", "A C", "A/t", "A/t B", "A/t B -> A B", "A C -> A/t C"));
  refuse_einsum("A/t B, B C/t -> A/t C", "A/t B", "B C/t",
                "the first operand is sharded over t (dim `A/t`) and the second sharded over t (dim `C/t`), so only "
                "diagonal shards would be computed; `all_gather` one of them (communicates)" +
                    split_and_shift("A/t -> R/t Q", "t"));
  refuse_einsum("A/t B, C/t B -> A C +t", "A/t B", "C/t B",
                "the first operand is sharded over t (dim `A/t`) and the second sharded over t (dim `C/t`), so only "
                "diagonal shards would be computed; `all_gather` one of them (communicates)" +
                    split_and_shift("A/t -> R/t Q", "t"));
  refuse_einsum("L/s D, K/s D -> L/s K/s", "L/s D", "K/s D",
                "axis `s` appears twice: a mesh axis can act once in a tensor; `all_gather` one of the operands, whose "
                "`L/s` and `K/s` are both sharded over s (communicates)" +
                    split_and_shift("L/s -> R/s C", "s"));
  refuse_einsum("A B +t, B C +t -> A C +t", "A B +t", "B C +t",
                "the first operand is partial over t and the second partial over t, and a product of sums is not the "
                "sum of the products; take `all_reduce` or `reduce_scatter` of one first (communicates)");
  refuse_einsum("A B +t, B/t C -> A C +t", "A B +t", "B/t C",
                "the first operand is partial over t and the second sharded over t (dim `B/t`), so a summand would "
                "meet one shard only; take `all_reduce` or `reduce_scatter` of the one, or `all_gather` of the other "
                "first (all communicate)");
  refuse_einsum("A/t B, B C +t -> A/t C", "A/t B", "B C +t",
                "the first operand is sharded over t (dim `A/t`) and the second partial over t, so a summand would "
                "meet one shard only; take `all_reduce` or `reduce_scatter` of the one, or `all_gather` of the other "
                "first (all communicate)");
  refuse_einsum("M/t/d, M/d/t -> +d +t", "M/t/d", "M/d/t",
                "dim `M/t/d` of `M/t/d` is `M/d/t` in `M/d/t`, so their shards differ; `all_gather` one of them and "
                "`shard` it like the other (communicates)");
  refuse_einsum("A/t B, B C -> A C", "A/t B", "B C",
                "dim `A/t` cannot become `A` in the result, as nothing moves between devices; keep the sharding, or "
                "`all_gather` it first (communicates)");
  refuse_einsum("A B, B C -> A/t C", "A B", "B C",
                "dim `A` cannot become `A/t` in the result, as nothing moves between devices; `shard` it before or "
                "afterwards (no traffic)");
  refuse_einsum("A B/t, B/t C -> A/t C", "A B/t", "B/t C",
                "dim `A` cannot become `A/t` in the result, as nothing moves between devices; leave the sum over t "
                "pending, `+t`, and take `reduce_scatter` afterwards (communicates)");
  refuse_einsum("A B +t, B C -> A C/t", "A B +t", "B C",
                "dim `C` cannot become `C/t` in the result, as nothing moves between devices; leave the sum over t "
                "pending, `+t`, and take `reduce_scatter` afterwards (communicates)");
  refuse_einsum("A B, B C -> A X", "A B", "B C", "dim `X` of the result is in no operand");
  refuse_einsum("2 A, A B -> 2 B", "2 A", "A B",
                "integer dim `2` is not an index: name it first, `rename<\"2 -> name\">`");
  refuse_einsum("A B, B C -> A 2", "A B", "B C",
                "integer dim `2` is not an index: name it first, `rename<\"2 -> name\">`");
  refuse_einsum("A B, B C -> A C", "B A", "B C",
                "the first operand is `B A`, but the op spec expects `A B`: dim 1 is `B`, not `A`; reorder the dims "
                "with `rearrange<\"B A -> A B\">` (a local copy), or correct the op spec");
  refuse_einsum("A B, B C -> A C", "A B", "B C/t",
                "the second operand is `B C/t`, but the op spec expects `B C`: dim 2 is `C/t`, not `C`; gather it with "
                "`all_gather<\"B C/t -> B C\">` (communicates), or correct the op spec");
  refuse_einsum("L D, Klen D -> L Klen", "L D", "L D",
                "the second operand is `L D`, but the op spec expects `Klen D`: dim 1 is `L`, not `Klen`; if both "
                "names mean one size, `rename<\"L -> Klen\">` (free), or correct the op spec");
  refuse_einsum("A B -> A", "A B", "B C", operand_count("1 operand", "2"));
  refuse_einsum("A B, B C, C D -> A D", "A B", "B C", operand_count("3 operands", "2"));
  legal(rules::einsum1("A B/t -> A +t", "A B/t"), "A +t");
  legal(rules::einsum1("A B/t -> B/t A", "A B/t"), "B/t A");
  legal(rules::einsum1("A B/t +d -> A +d +t", "A B/t +d"), "A +d +t");
  refuse_einsum1("A B/t -> A", "A B/t", left_partial("t", "contracting `B/t` sees only the shard of this device"));
  refuse_einsum1("A B/t -> A B", "A B/t",
                 "dim `B/t` cannot become `B` in the result, as nothing moves between devices; keep the sharding, or "
                 "`all_gather` it first (communicates)");
  refuse_einsum1("A B +t -> A", "A B +t", left_partial("t", "a pending sum stays pending"));
  refuse_einsum1("A B -> A", "A B/t",
                 "the operand is `A B/t`, but the op spec expects `A B`: dim 2 is `B/t`, not `B`; gather it with "
                 "`all_gather<\"A B/t -> A B\">` (communicates), or correct the op spec");
}

TEST_CASE("rules: index") {
  const auto refuse = refusals("index_unreduced", rules::index);
  legal(rules::index("[V/t] M, B/d L -> B/d L M +t", "V/t M", "B/d L"), "B/d L M +t");
  legal(rules::index("[V] M, B L -> B L M", "V M", "B L"), "B L M");
  legal(rules::index("B/d L [V/t], B/d L -> B/d L +t", "B/d L V/t", "B/d L"), "B/d L +t");
  legal(rules::index("[V] M/t, B/d -> B/d M/t", "V M/t", "B/d"), "B/d M/t");
  legal(rules::index("[V] M +d, B -> B M +d", "V M +d", "B"), "B M +d");
  legal(rules::index("[V/t/d] M, B -> M B +d +t", "V/t/d M", "B"), "M B +d +t");
  refuse("[V/t] M, B/d L -> B/d L M", "V/t M", "B/d L",
         left_partial("t", "looking up in `V/t` sees only the shard of this device"));
  refuse("[V] M, B/d L -> B/d L M +t", "V M", "B/d L", nothing_partial("t"));
  refuse("V M, B -> B M", "V M", "B", "no dim of the table is in brackets: write `[V/t] M` for a lookup along V");
  refuse("[V] [M], B -> B", "V M", "B", bracket_count("2", "1", "[V] [W] M, B, B -> B M"));
  refuse("[V] M, [B] -> B M", "V M", "B", "brackets belong to the table, the first operand");
  refuse("[V] M, B -> [B] M", "V M", "B", "brackets belong to the table, the first operand");
  refuse("[V/t] M, B/t -> B M +t", "V/t M", "B/t",
         "the indices are sharded over t (dim `B/t`), over which the looked-up dim `V/t` is sharded too: each device "
         "would look up only its own indices in its own rows; `all_gather` one of them (communicates)");
  refuse("[V] M, B +d -> B M +d", "V M", "B +d",
         "the indices `B +d` are partial over d, and a summand is not an index; " + reduce_first("B", "d"));
  refuse("[V] M, V -> M V", "V M", "V", "the looked-up dim `V` is also a dim of the indices");
  refuse("[V] M, B -> B M V", "V M", "B", "the looked-up dim `V` must not be in the result");
  refuse("[V] M, B -> B", "V M", "B", "dim `M` of the table is missing in the result");
  refuse("[V] M, B L -> B M", "V M", "B L", "dim `L` of the indices is missing in the result");
  refuse("[V] M/t, B/t -> B/t M", "V M/t", "B/t",
         "the table is sharded over t (dim `M/t`) and the indices sharded over t (dim `B/t`), so only diagonal shards "
         "would be computed; `all_gather` one of them (communicates)");
  refuse(
      "[V] M +t, B/t -> B/t M", "V M +t", "B/t",
      "the table is partial over t and the indices sharded over t (dim `B/t`), so a summand would meet one shard only; "
      "take `all_reduce` or `reduce_scatter` of the one, or `all_gather` of the other first (all communicate)");
  refuse("[V] B, B/d -> B/d", "V B", "B/d", shards_differ("B", "V B", "B/d", "B/d", "B/d -> B", "V B -> V B/d"));
  refuse("[V] M, B -> B M", "V M/d", "B",
         "the table is `V M/d`, but the op spec expects `V M`: dim 2 is `M/d`, not `M`; gather it with `all_gather<\"V "
         "M/d -> V M\">` (communicates), or correct the op spec");
  refuse("[V] M, B -> B M", "V M", "B/d",
         "the index tensor is `B/d`, but the op spec expects `B`: dim 1 is `B/d`, not `B`; gather it with "
         "`all_gather<\"B/d -> B\">` (communicates), or correct the op spec");
  refuse("[V] 2, B -> B 2", "V 2", "B", "integer dim `2` is not an index: name it first, `rename<\"2 -> name\">`");
}

TEST_CASE("rules: index and scatter_add along several dims") {
  legal(rules::index2("[V/t] [W/d] M, B, B L -> B L M +d +t", "V/t W/d M", "B", "B L"), "B L M +d +t");
  legal(rules::index2("B/d [V] M [W/t], B/d,  -> B/d M +t", "B/d V M W/t", "B/d", ""), "B/d M +t");
  legal(rules::index3("[V] [W] [X], B/d, B/d, B/d -> B/d", "V W X", "B/d", "B/d", "B/d"), "B/d");
  legal(rules::scatter_add2("B/d M, B/d, B/d -> [V] [W/t] M +d", "B/d M", "B/d", "B/d"), "V W/t M +d");
  legal(rules::scatter_add3("B, B, B,  -> [V/t] [W] [X]", "B", "B", "B", ""), "V/t W X");
  const auto look_up = refusals("index_unreduced", rules::index2);
  look_up("[V] M, B, B -> B M", "V M", "B", "B", bracket_count("1", "2", "[V] [W] M, B, B -> B M"));
  look_up("[V] [W], B -> B", "V W", "B", "B", operand_count("2 operands", "3"));
  look_up("[V] [W], B, L -> B L", "V W", "B", "B",
          "the second index tensor is `B`, but the op spec expects `L`: dim 1 is `B`, not `L`; if both names mean one "
          "size, `rename<\"B -> L\">` (free), or correct the op spec");
  look_up("[V] [W/t], B, L/t -> B L +t", "V W/t", "B", "L/t",
          "the indices are sharded over t (dim `L/t`), over which the looked-up dim `W/t` is sharded too: each device "
          "would look up only its own indices in its own rows; `all_gather` one of them (communicates)");
  look_up("[V/t] [W/d], B, B -> B +t", "V/t W/d", "B", "B",
          left_partial("d", "looking up in `W/d` sees only the shard of this device"));
  look_up("[V] [W], B/d, L/d -> B/d L", "V W", "B/d", "L/d",
          "the second operand is sharded over d (dim `B/d`) and the third operand sharded over d (dim `L/d`), so only "
          "diagonal shards would be computed; `all_gather` one of them (communicates)");
  const std::string partial =
      "the indices `B +d` are partial over d, and a summand is not an index; " + reduce_first("B", "d");
  look_up("[V] [W], B, B +d -> B", "V W", "B", "B +d", partial);
  const auto look_up3 = [](const std::string& op, const char* table, const char* k, const std::string& why) {
    illegal(rules::index3(op, table, "B", "B", k), "index_unreduced<`" + op + "`>: " + why);
  };
  legal(rules::index3("[V/t] M [W] [X/d], B, B,  -> B M +d +t", "V/t M W X/d", "B", "B", ""), "B M +d +t");
  look_up3("[V] [W] M, B, B, B -> B M", "V W M", "B", bracket_count("2", "3", "[V] [W] M, B, B -> B M"));
  look_up3("[V] [W] [X], B, B, L -> B L", "V W X", "B",
           "the third index tensor is `B`, but the op spec expects `L`: dim 1 is `B`, not `L`; if both names mean one "
           "size, `rename<\"B -> L\">` (free), or correct the op spec");
  look_up3("[V] [W] [X], B, B, B +d -> B", "V W X", "B +d", partial);
  look_up3("[V] [W] [X], B, B, X -> B X", "V W X", "X", "the looked-up dim `X` is also a dim of the indices");
  look_up3("[V] [W] [X/t], B, B, L/t -> B L +t", "V W X/t", "L/t",
           "the indices are sharded over t (dim `L/t`), over which the looked-up dim `X/t` is sharded too: each device "
           "would look up only its own indices in its own rows; `all_gather` one of them (communicates)");
  look_up3("[V] [W] [X/t], B, B, B -> B", "V W X/t", "B",
           left_partial("t", "looking up in `X/t` sees only the shard of this device"));
  illegal(rules::scatter_add2("B, B, L -> [V] [W]", "B", "B", "L"),
          "scatter_add<`B, B, L -> [V] [W]`>: dim `L` of the indices is missing in the rows");
  illegal(rules::scatter_add2("B, B, B +d -> [V] [W]", "B", "B", "B +d"),
          "scatter_add<`B, B, B +d -> [V] [W]`>: " + partial);
  legal(rules::scatter_add3("B/d C, B/d, B/d, B/d -> [V/t] C [W] [X] +d", "B/d C", "B/d", "B/d", "B/d"),
        "V/t C W X +d");
  const auto scatter3 = [](const std::string& op, const char* k, const std::string& why) {
    illegal(rules::scatter_add3(op, "B/d", "B/d", "B/d", k), "scatter_add<`" + op + "`>: " + why);
  };
  scatter3("B/d, B/d, B/d, B/d -> [V] [W] +d", "B/d", bracket_count("2", "3", "B M, B, B -> [V] [W] M"));
  scatter3("B/d, B/d, B/d, X -> [V] [W] [X] +d", "X", "the dim in brackets `X` is also a dim of an operand");
  scatter3("B/d, B/d, B/d, L -> [V] [W] [X] +d", "L", "dim `L` of the indices is missing in the rows");
  scatter3("B/d, B/d, B/d, B/d -> [V] [W] [X/d]", "B/d",
           "an operand is sharded over d (dim `B/d`), over which the dim in brackets `X/d` is sharded too: each device "
           "would add only its own rows to its own shard; change the sharding of one of them (communicates)");
}

TEST_CASE("rules: + and -") {
  legal(rules::add("+", "A", "A"), "A");
  legal(rules::add("+", "A +t", "A +t"), "A +t");
  legal(rules::add("+", "B/d L M/t", "M/t"), "B/d L M/t");
  legal(rules::add("+", "M", "B/d L M"), "B/d L M");
  legal(rules::add("+", "B/d Qlen", "B/d Klen"), "B/d Qlen Klen");
  legal(rules::add("+", "A", ""), "A");
  legal(rules::add("+", "2 A", "A"), "2 A");
  legal(rules::add("+", "M +t", "B/d M +t"), "B/d M +t");
  illegal(rules::add("+", "A +t", "A"),
          "+ of `A +t` and `A`: `A +t` is partial over t, but `A` is replicated over t, so the pending sum would count "
          "the latter once per device; first take the sum of the former, with `all_reduce<\"A +t -> A\">` "
          "(communicates), or take `to_partial<\"A -> A +t\">` of the latter (no traffic)");
  illegal(rules::add("-", "A", "A +d +t"),
          "- of `A` and `A +d +t`: `A +d +t` is partial over d, but `A` is replicated over d, so the pending sum would "
          "count the latter once per device; first take the sum of the former, with `all_reduce<\"A +d +t -> A\">` "
          "(communicates), or take `to_partial<\"A -> A +d +t\">` of the latter (no traffic)");
  illegal(rules::add("+", "M +d", "B/d M"),
          "+ of `M +d` and `B/d M`: " + summand_meets_shard("M", "d", "B/d M", "B/d", "all_reduce<\"M +d -> M\">"));
  illegal(rules::add("+", "M/t", "M +t"),
          "+ of `M/t` and `M +t`: " + summand_meets_shard("M", "t", "M/t", "M/t", "reduce_scatter<\"M +t -> M/t\">"));
  // Only the sum over t, as both are partial over d.
  illegal(rules::add("+", "B M/t +d", "M +d +t"),
          "+ of `B M/t +d` and `M +d +t`: `M +d +t` is partial over t, but `B M/t +d` is sharded over t (dim `M/t`); "
          "the former first needs its sum, with `reduce_scatter<\"M +d +t -> M/t +d\">` (communicates)");
  illegal(rules::add("+", "M/t/d", "M/t +d"),
          "+ of `M/t/d` and `M/t +d`: " +
              summand_meets_shard("M/t", "d", "M/t/d", "M/t/d", "reduce_scatter<\"M/t +d -> M/t/d\">"));
  // No one op gives this sharding.
  illegal(rules::add("+", "M/t N/s", "M N +t"),
          "+ of `M/t N/s` and `M N +t`: `M N +t` is partial over t, but `M/t N/s` is sharded over t (dim `M/t`); the "
          "former first needs its sum, with a `reduce_scatter` or `all_reduce<\"M N +t -> M N\">` (communicate)");
  illegal(rules::add("+", "A B +t", "A"),
          "+ of `A B +t` and `A`: `A B +t` is partial over t, but `A` is replicated over t, so the pending sum would "
          "count the latter once per device; first take the sum of the former, with a `reduce_scatter` or "
          "`all_reduce<\"A B +t -> A B\">` (communicate), or take `to_partial<\"A -> A +t\">` of the latter (no "
          "traffic)");
  illegal(rules::add("+", "A/t", "A"),
          "+ of `A/t` and `A`: " + shards_differ("A", "A", "A/t", "A/t", "A/t -> A", "A -> A/t"));
  illegal(rules::add("+", "A/t B", "B/t"),
          "+ of `A/t B` and `B/t`: `A/t B` is sharded over t (dim `A/t`), but `B/t` is sharded over t (dim `B/t`), so "
          "only diagonal shards would meet; `all_gather` one of them (communicates)");
  illegal(rules::add("-", "M/t/d", "M/d/t"),
          "- of `M/t/d` and `M/d/t`: dim `M/t/d` of `M/t/d` is `M/d/t` in `M/d/t`, so their shards differ; "
          "`all_gather` one of them and `shard` it like the other (communicates)");
  illegal(rules::add("+", "A B", "B A"),
          "+ of `A B` and `B A`: the dims of the result, `A B`, are in another order in `B A`; `rearrange` one of "
          "the operands (a local copy)");
  illegal(rules::add("+", "A B", "C B"),
          "+ of `A B` and `C B`: the dims of the result, `A B C`, are in another order in `C B`; `rearrange` one of "
          "the operands (a local copy)");
  illegal(rules::add("+", "2 A", "2"),
          "+ of `2 A` and `2`: integer dim `2` of `2` cannot be matched by name; name it first, `rename<\"2 -> "
          "name\">` (free)");
  illegal(rules::add("+", "A/a/b/c", "B/d/e/f/g"),
          "+ of `A/a/b/c` and `B/d/e/f/g`: the operands name more than 6 axes");
}

TEST_CASE("rules: *") {
  legal(rules::multiply("A", "A"), "A");
  legal(rules::multiply("A +t", "A"), "A +t");
  legal(rules::multiply("A", "B +t"), "A B +t");
  legal(rules::multiply("A +d", "A +t"), "A +d +t");
  legal(rules::multiply("B/d L M", "M"), "B/d L M");
  illegal(rules::multiply("A +t", "A +t"),
          "* of `A +t` and `A +t`: both are partial over t, and a product of sums is not the sum of the products; take "
          "`all_reduce` or `reduce_scatter` of one first (communicates)");
  illegal(rules::multiply("A/t", "B +t"),
          "* of `A/t` and `B +t`: " + summand_meets_shard("B", "t", "A/t", "A/t", "all_reduce<\"B +t -> B\">"));
  illegal(rules::multiply("A/t", "A"),
          "* of `A/t` and `A`: " + shards_differ("A", "A", "A/t", "A/t", "A/t -> A", "A -> A/t"));
  illegal(rules::multiply("A/t B", "A B/t"),
          "* of `A/t B` and `A B/t`: `A/t B` is sharded over t (dim `A/t`), but `A B/t` is sharded over t (dim `B/t`), "
          "so only diagonal shards would meet; `all_gather` one of them (communicates)");
  illegal(rules::multiply("+a +b +c +d", "+e +f +g"),
          "* of `+a +b +c +d` and `+e +f +g`: the operands name more than 6 axes");
}

TEST_CASE("rules: /") {
  legal(rules::divide("A", "B"), "A B");
  legal(rules::divide("A +t", "A"), "A +t");
  legal(rules::divide("+d +t", ""), "+d +t");
  illegal(
      rules::divide("A", "A +t"),
      "/ of `A` and `A +t`: the divisor is partial over t, and a quotient by a sum is not the sum of the quotients; " +
          reduce_first("A"));
  illegal(rules::divide("+t", "+t"),
          "/ of `+t` and `+t`: the divisor is partial over t, and a quotient by a sum is not the sum of the quotients; "
          "reduce it first, with `all_reduce<\"+t -> \">` (communicates)");
  illegal(rules::divide("A +t", "B/t"),
          "/ of `A +t` and `B/t`: " + summand_meets_shard("A", "t", "B/t", "B/t", "all_reduce<\"A +t -> A\">"));
  illegal(rules::divide("A/t", "A/d"),
          "/ of `A/t` and `A/d`: dim `A/t` of `A/t` is `A/d` in `A/d`, so their shards differ; `all_gather` one of "
          "them and `shard` it like the other (communicates)");
  legal(rules::divide_integers("A/t", "A/t"), "A/t");
  illegal(rules::divide_integers("A +t", "A"),
          "/ of `A +t` and `A`: the dividend is partial over t, and the integer quotient of each summand drops a "
          "remainder of its own; " +
              reduce_first("A"));
  legal(rules::divide_by_number(true, "A +t"), "A +t");
  legal(rules::divide_by_number(false, "A/t"), "A/t");
  illegal(rules::divide_by_number(false, "+t"),
          "/ of `+t` and a number: the dividend is partial over t, and the integer quotient of each summand drops a "
          "remainder of its own; reduce it first, with `all_reduce<\"+t -> \">` (communicates)");
}

TEST_CASE("rules: map, and the functions of one operand") {
  legal(rules::map1("exp", "B/d L M/t"), "B/d L M/t");
  illegal(rules::map1("exp", "A +t"), needs_sum("exp", "A"));
  legal(rules::map2("maximum", "A/t B", "B"), "A/t B");
  illegal(rules::map2("less", "A", "A +t"), needs_sum("less", "A"));
  illegal(rules::map2("maximum", "A/t", "A"),
          "maximum of `A/t` and `A`: " + shards_differ("A", "A", "A/t", "A/t", "A/t -> A", "A -> A/t"));
  illegal(rules::map2("where", "A +t", "A"),
          needs_sum("where", "A") +
              "; where the constant is 0, `masked(c, x)`, which keeps x where c holds, takes a partial x");
  const auto map = [](const auto&... specs) { return rules::map_of("map", TensorSpec(specs)...); };
  legal(map("A", "B", "C"), "A B C");
  legal(map("A", "B", "B A"), "B A");
  legal(map("A", "", "A B", "B"), "A B");
  illegal(map("A", "", "A B", "B +d"), needs_sum("map", "B", "d"));
}

TEST_CASE("rules: where") {
  legal(rules::where("B/d Qlen Klen", "B/d Qlen Klen K/t", ""), "B/d Qlen Klen K/t");
  legal(rules::where("A", "A +t", "A +t"), "A +t");
  legal(rules::where("A", "A B", "B"), "A B");
  illegal(rules::where("A +t", "A", "A"), needs_sum("where", "A"));
  illegal(rules::where("A", "A +t", "A"),
          "where of `A +t` and `A`: `A +t` is partial over t, but `A` is replicated over t, so the pending sum would "
          "count the latter once per device; first take the sum of the former, with `all_reduce<\"A +t -> A\">` "
          "(communicates), or take `to_partial<\"A -> A +t\">` of the latter (no traffic)");
  illegal(rules::where("A/t", "B +t", "B +t"),
          "where of `B +t` and `A/t`: " + summand_meets_shard("B", "t", "A/t", "A/t", "all_reduce<\"B +t -> B\">"));
  illegal(rules::where("A/t", "A", "A"),
          "where of `A` and `A/t`: " + shards_differ("A", "A", "A/t", "A/t", "A/t -> A", "A -> A/t"));
}

TEST_CASE("rules: constants, linear functions, casts") {
  legal(rules::add_constant("+", "A/t"), "A/t");
  illegal(
      rules::add_constant("+", "A/d +t"),
      "+ of `A/d +t` and a constant: the operand is partial over t, and each device would count the constant again; " +
          reduce_first("A/d"));
  legal(rules::linear("A +t"), "A +t");
  illegal(rules::no_operator(">", "greater", "A/t"),
          "> of `A/t`: tensors are not compared by an operator, whose result is one bool; write `greater(x, y)`, which "
          "gives one for each element, or compare numbers, as `item(x)`");
  illegal(rules::no_condition("A/t"),
          "a condition on `bool_[A/t]` would ask whether the tensor holds a value, not whether its elements are true; "
          "write `item(x)` of a scalar, which `any` and `all` make, or `logical_and`, `logical_or` and `equal(x, 0.0)` "
          "in place of `&&`, `||` and `!`");
  illegal(rules::no_subscript("A/t M"),
          "[] of `A/t M`: a device holds a shard, so a tensor has no element by number; take a part along an unsharded "
          "dim with `narrow<\"M -> N\">(x, begin, size)` (a local copy), rows by indices with `index_unreduced`, all "
          "parts along the first dim with `unstack`, or read this device's shard with `x.span()[i]`");
  legal(rules::cast(true, true, "A +t"), "A +t");
  legal(rules::cast(false, true, "A/t"), "A/t");
  illegal(rules::cast(false, true, "A +t"), needs_sum("a cast to or from integers", "A"));
  illegal(rules::cast(true, false, "A +t"), needs_sum("a cast to or from integers", "A"));
}

TEST_CASE("rules: sum and mean") {
  const auto refuse = refusals("sum", rules::sum);
  legal(rules::sum("A/t B -> B +t", "A/t B"), "B +t");
  legal(rules::sum("A B -> ", "A B"), "");
  legal(rules::sum("A/d B/t -> +d +t", "A/d B/t"), "+d +t");
  legal(rules::sum("A B +t -> A +t", "A B +t"), "A +t");
  legal(rules::sum("2 A/t -> 2 +t", "2 A/t"), "2 +t");
  legal(rules::sum("2 2 -> ", "2 2"), "");
  legal(rules::mean("A/t B -> B +t", "A/t B"), "B +t");
  refuse("A/t B -> B", "A/t B", left_partial("t", "summing over `A/t` sees only the shard of this device"));
  refuse("2 A/t -> 2", "2 A/t", left_partial("t", "summing over `A/t` sees only the shard of this device"));
  refuse("A B -> B +t", "A B", nothing_partial("t"));
  refuse("A B +t -> A", "A B +t", left_partial("t", "a pending sum stays pending"));
  refuse("A B -> A B", "A B", "the result has every dim of the operand, so there is nothing to reduce");
  refuse("A B -> C", "A B", "dim `C` of the result is not a dim of the operand");
  refuse("A B C -> C A", "A B C", "dim `A` of the result is in another order than in the operand");
  refuse("A/t B -> A", "A/t B", "kept dim `A/t` must be unchanged in the result, not `A`");
  refuse("2 2 A -> 2 A", "2 2 A",
         "integer dim `2` appears twice, and the op spec does not say which one to reduce; name one first, "
         "`rename<\"2 2 -> name1 name2\">`");
  // The short form may be meant for the dims to sum over.
  illegal(rules::sum("X", "B/d X/t"),
          "sum<`B/d X/t -> X`>: kept dim `X/t` must be unchanged in the result, not `X`" + names_result);
  illegal(rules::local_max("max", "C", "A B"),
          "max<`A B -> C`>: dim `C` of the result is not a dim of the operand" + names_result);
  illegal(
      rules::all_reduce_max("B A", "A B V/t"),
      "all_reduce_max<`A B V/t -> B A`>: dim `A` of the result is in another order than in the operand" + names_result);
  illegal(rules::sum("2 A", "2 2 A"),
          "sum<`2 2 A -> 2 A`>: integer dim `2` appears twice, and the op spec does not say which one to reduce; name "
          "one first, `rename<\"2 2 -> name1 name2\">`");
  illegal(rules::mean("A/t B -> B", "A/t B"),
          "mean<`A/t B -> B`>: " + left_partial("t", "summing over `A/t` sees only the shard of this device"));
}

TEST_CASE("rules: max, argmax") {
  legal(rules::local_max("max", "A V -> A", "A V"), "A");
  legal(rules::local_max("max", "A/d B V -> A/d", "A/d B V"), "A/d");
  legal(rules::local_max("argmax", "A/d V -> A/d", "A/d V"), "A/d");
  illegal(rules::local_max("max", "A V/t -> A", "A V/t"),
          "max<`A V/t -> A`>: " + gather_first("V/t", "A V/t", "A V") +
              ", or take `all_reduce_max`, which sends the maxima only");
  illegal(rules::local_max("argmax", "A V/t -> A", "A V/t"),
          "argmax<`A V/t -> A`>: " + gather_first("V/t", "A V/t", "A V"));
  illegal(
      rules::local_max("argmax", "A V", "A V"),
      "argmax<`A V -> A V`>: the result has every dim of the operand, so there is nothing to reduce" + names_result);
  illegal(rules::local_max("argmax", "A B V -> A", "A B V"),
          "argmax<`A B V -> A`>: an index is one along one dim: leave out exactly one");
  illegal(rules::local_max("max", "A V +t -> A", "A V +t"), needs_sum("max", "A V"));
  illegal(rules::local_max("max", "A V -> A +t", "A V"), "max<`A V -> A +t`>: a maximum has no pending sum; drop `+t`");
  illegal(rules::local_max("min", "A V -> A +t", "A V"),
          "min<`A V -> A +t`>: the result of min has no pending sum; drop `+t`");
  illegal(rules::local_max("min", "A V/t -> A", "A V/t"), "min<`A V/t -> A`>: " + gather_first("V/t", "A V/t", "A V"));
  illegal(rules::local_max("max", "A V -> A V", "A V"),
          "max<`A V -> A V`>: the result has every dim of the operand, so there is nothing to reduce");
}

TEST_CASE("rules: one_hot, tril, triu, diagonal") {
  const auto refuse = refusals("one_hot", rules::one_hot);
  legal(rules::one_hot("V/t", "B/d L"), "B/d L V/t");
  legal(rules::one_hot("V", ""), "V");
  refuse("V X", "B", "write the new dim, with the axes that shard it, as in `V/t`");
  refuse("B/t", "B/d",
         "the indices `B/d` already have a dim `B`, and a name has one size; write another name for the new one");
  refuse("V/d", "B/d",
         "the indices `B/d` are sharded over d (dim `B/d`), so `V/d` cannot be sharded over d as well; take another "
         "axis or none");
  legal(rules::triangle("tril", "L", "K", "B/d K/t L +p"), "B/d K/t L +p");
  illegal(rules::triangle("tril", "L", "X", "L K"), "tril<`L`, `X`>: the operand `L K` has no dim `X`");
  illegal(rules::triangle("triu", "L", "L", "L K"),
          "triu<`L`, `L`>: a triangle has two dims; write that of the rows, then that of the columns");
  illegal(rules::triangle("triu", "L", "2", "L 2"),
          "triu<`L`, `2`>: integer dim `2` has no name; `rename` it first (free)");
  legal(rules::diagonal("X", "Y", "B/d X/t Y +p"), "B/d X/t +p");
  legal(rules::diagonal("Y", "X", "X B/d Y"), "B/d Y");
  illegal(rules::diagonal("X", "Z", "X Y"), "diagonal<`X`, `Z`>: the operand `X Y` has no dim `Z`");
  illegal(rules::diagonal("X", "X", "X Y"),
          "diagonal<`X`, `X`>: a diagonal is of two dims; write the one that stays, then the one that goes");
  illegal(rules::diagonal("X", "Y", "X Y/t"), "diagonal<`X`, `Y`>: " + gather_first("Y/t", "X Y/t", "X Y") +
                                                  ", or let it stay: `diagonal<\"Y\", \"X\">` (no traffic)");
}

TEST_CASE("rules: narrow, pad, scatter_add") {
  legal(rules::resize("narrow", "L -> N", "B/d L +t"), "B/d N +t");
  legal(rules::resize("pad", "2 -> N", "2 M/t"), "N M/t");
  illegal(rules::resize("narrow", "L", "L"),
          "narrow<`L`>: write the dim's name in the operand and in the result, `narrow<\"L -> N\">`");
  illegal(rules::resize("pad", "L/t -> N", "L/t"),
          "pad<`L/t -> N`>: write the dim's name in the operand and in the result, `pad<\"L -> N\">`, without axes");
  illegal(rules::resize("narrow", "L -> N", "B L/t"), "narrow<`L -> N`>: " + gather_first("L/t", "B L/t", "B L"));
  illegal(
      rules::resize("narrow", "L -> L", "L"),
      "narrow<`L -> L`>: the result's dim has another size, and a name has one size; give it another name than `L`");
  illegal(rules::resize("pad", "L -> 8", "L"),
          "pad<`L -> 8`>: the size of the result's dim is a number in the call; name the dim");
  illegal(rules::resize("pad", "L -> B", "B L"), "pad<`L -> B`>: the operand `B L` already has a dim `B`");
  legal(rules::pad_with("L -> N", "L M/t"), "N M/t");
  illegal(
      rules::pad_with("L -> N", "L +t"),
      "pad of `L +t` and a constant: the operand is partial over t, and each device would count the constant again; " +
          reduce_first("L"));

  legal(rules::scatter_add("B/d L M, B/d L -> [V/t] M +d", "B/d L M", "B/d L"), "V/t M +d");
  const auto scatter = refusals("scatter_add", rules::scatter_add);
  scatter("L M, L -> V M", "L M", "L", "no dim of the result is in brackets: write `[V] M` to add rows along V");
  scatter("L M, L -> [V] [M]", "L M", "L", bracket_count("2", "1", "B M, B, B -> [V] [W] M"));
  scatter("[L] M, L -> [V] M", "L M", "L", "brackets belong to the result");
  scatter("L V, L -> [V]", "L V", "L", "the dim in brackets `V` is also a dim of an operand");
  scatter("M, L -> [V] M", "M", "L", "dim `L` of the indices is missing in the rows");
  scatter("L/t, L/t -> [V/t]", "L/t", "L/t",
          "an operand is sharded over t (dim `L/t`), over which the dim in brackets `V/t` is sharded too: each device "
          "would add only its own rows to its own shard; change the sharding of one of them (communicates)");
  scatter("L, L +t -> [V]", "L", "L +t",
          "the indices `L +t` are partial over t, and a summand is not an index; " + reduce_first("L"));
}

TEST_CASE("rules: ragged_all_to_all, grouped_einsum") {
  const auto moves = [](const char* rows, const char* sent, const char* received, const std::string& result) {
    legal(rules::ragged_all_to_all(std::string(rows) + " -> " + result, rows, sent, received), result);
  };
  moves("R/d/e M", "P/d/e X", "P/d X/e", "S/d/e M");
  moves("S/d/e M/t +p", "P/d X/e", "P/d/e X", "R/d/e M/t +p");
  moves("R/d/e", "P/d/e X", "P X/d/e", "S/d/e");
  legal(rules::ragged_all_to_all("S/d/e M", "R/d/e M", "P/d/e X", "P/d X/e"), "S/d/e M");
  const auto ragged = [](const std::string& rows, const std::string& result, const char* sent, const char* received,
                         const std::string& why) {
    const std::string op = rows + " -> " + result;
    illegal(rules::ragged_all_to_all(op, rows, sent, received), "ragged_all_to_all<`" + op + "`>: " + why);
  };
  ragged("", "", "P/e X", "P X/e", "the operand has no dim of rows");
  for (const char* result : {"R/e M", "S/e N", "S/e"})
    ragged("R/e M", result, "P/e X", "P X/e",
           "the result, `" + std::string(result) +
               "`, must have the dims of the operand, `R/e M`, except the first: the rows that a device may get are "
               "another number, so that dim has another name");
  ragged("R/d/e M", "S/d M", "P/d/e X", "P/d X/e",
         "dim `R/d/e` cannot become `S/d`: the rows stay sharded over the same axes, in the same order");
  ragged("R/e M", "S/e M +t", "P/e X", "P X/e",
         "the result has `+t`, but no sum over t is pending in the operand; drop `+t`");
  ragged("R/e M", "S/e M", "P/e", "P X/e",
         "the counts of the rows sent are `P/e`, but must have two dims: places, and the groups of their rows, as "
         "`P/d/e X` has");
  ragged("R/e M", "S/e M", "P/e X", "P X/e +t",
         "the counts of the rows received are `P X/e +t`, partial over t, and a summand counts no rows; " +
             reduce_first("P X/e"));
  ragged("R/d/e M", "S/d/e M", "P/e X", "P X/e",
         "the counts of the rows sent are `P/e X`, but the rows are `R/d/e`: a device has the counts of its own rows "
         "only if both are sharded over the same axes; change the sharding of one of them");
  for (const auto& [sent, received] : {std::pair{"P/d X/e", "P/d X/e"}, {"P/d X/e", "P/e X/d"}, {"P/d/e X", "Q/d X/e"}})
    ragged("R/d/e M", "S/d/e M", sent, received,
           "the counts of the rows sent are `" + std::string(sent) + "`, those of the rows received `" + received +
               "`: the second must be an `all_to_all` of the first, in which one dim gives its last axes to the other, "
               "as from `P/d/e X` to `P/d X/e`");

  const auto multiplies = [](const char* rows, const char* weights, const char* counts, const std::string& result) {
    const std::string op = std::string(rows) + ", " + weights + " -> " + result;
    legal(rules::grouped_einsum(op, rows, weights, counts), result);
  };
  multiplies("S/d/e M", "X/e M F/t", "P/d X/e", "S/d/e F/t");
  multiplies("S/d/e F/t", "X/e F/t M", "P/d X/e", "S/d/e M +t");
  multiplies("S/d M", "X M F", "P/d X", "S/d F");
  const auto grouped = [](const std::string& rows, const std::string& weights, const char* counts,
                          const std::string& result, const std::string& why) {
    const std::string op = rows + ", " + weights + " -> " + result;
    illegal(rules::grouped_einsum(op, rows, weights, counts), "grouped_einsum<`" + op + "`>: " + why);
  };
  grouped("S/d/e M", "X/e M/d F", "P/d X/e", "S/d/e F",
          "the tensor of rows is sharded over d (dim `S/d/e`) and that of weights sharded over d (dim `M/d`), so only "
          "diagonal shards would be computed; `all_gather` one of them (communicates)");
  grouped("S/d/e M/t", "X/e M/t F", "P/d X/e", "S/d/e F",
          left_partial("t", "contracting `M/t` sees only the shard of this device"));
  grouped("S/d/e M", "X M F", "P/d X/e", "S/d/e F",
          "the counts are `P/d X/e`: their second dim must be `X`, the first of the weights, with the same sharding");
  grouped("S/d/e M", "X/e M F", "P X/e", "S/d/e F",
          "the counts are `P X/e`, but the rows are `S/d/e`: a device has the counts of its own rows only if both are "
          "sharded over the same axes; change the sharding of one of them");
  grouped("S/d/e M", "X/e M F", "P/d X/e", "F S/d/e",
          "the dim of the rows, `S/d/e`, must be the first of the result, with the same sharding");
  grouped("S/d/e M", "X/e M F", "P/d X/e", "S/d/e F X",
          "the first dim of the weights, `X`, counts groups of rows, so neither the rows nor the result have it");
  grouped("S/d/e M", "X/e M S", "P/d X/e", "S/d/e", "the dim of the rows, `S`, is also a dim of the weights");
  grouped("S/d/e M G", "X/e M F", "P/d X/e", "S/d/e F",
          "dim `G` of the rows is neither in the other operand nor in the result; `sum` over it first");
  grouped("S/d/e M", "X/e M F G", "P/d X/e", "S/d/e F",
          "dim `G` of the weights is neither in the other operand nor in the result; `sum` over it first");
  grouped("S/d/e M", "", "P/d X/e", "S/d/e M",
          "the rows and the weights have one dim at least: that of the rows, and that of the groups");
}

TEST_CASE("rules: ops along a dim") {
  const auto refuse_linear_scan = refusals("linear_scan", rules::linear_scan);
  const auto refuse_conv = refusals("conv_unreduced", rules::conv);
  const auto refuse_windows = refusals("windows", rules::windows);
  const auto refuse_take_along = refusals("take_along", rules::take_along);
  legal(rules::along("softmax", "Klen", "B/d Qlen Klen K/t"), "B/d Qlen Klen K/t");
  legal(rules::along("rms_norm", "M", "B/d L M"), "B/d L M");
  illegal(rules::along("rms_norm", "M", "B/d L M/t"), "rms_norm<`M`>: " + gather_first("M/t", "B/d L M/t", "B/d L M"));
  illegal(rules::along("softmax", "V", "A V +t"), needs_sum("softmax", "A V"));
  illegal(rules::along("softmax", "X", "A V"), "softmax<`X`>: the operand `A V` has no dim `X`");
  illegal(rules::along("softmax", "V/t", "A V/t"), "softmax<`V/t`>: name the dim only, without axes: `V`");
  illegal(rules::along("softmax", "2", "2 2"), "softmax<`2`>: integer dim `2` appears twice; `rename` it first (free)");
  legal(rules::softmax("softmax", "V", "A/t V"), "A/t V");
  illegal(rules::softmax("log_softmax", "V", "A V/t"),
          "log_softmax<`V`>: " + gather_first("V/t", "A V/t", "A V") +
              ", or write `log_softmax<\"V\", over<\"t\">>`, which sends maxima and sums only (communicates)");
  illegal(rules::softmax("softmax", "V", "A V +t"), needs_sum("softmax", "A V"));
  legal(rules::softmax_over("softmax", "V", "over<t>", "B/d V/t"), "B/d V/t");
  legal(rules::softmax_over("softmax", "V", "over<t d>", "V/t/d"), "V/t/d");
  illegal(rules::softmax_over("softmax", "V", "over<t>", "V/t/d"),
          "softmax<`V`, over<t>>: dim `V/t/d` is sharded over t d, and the call names exactly these axes; write "
          "`softmax<\"V\", over<\"t d\">>`");
  illegal(rules::softmax_over("softmax", "V", "over<t>", "V"),
          "softmax<`V`, over<t>>: dim `V` is not sharded, so nothing would be communicated; write `softmax<\"V\">`");
  illegal(rules::softmax_over("softmax", "X", "over<t>", "V/t"),
          "softmax<`X`, over<t>>: the operand `V/t` has no dim `X`");
  illegal(rules::softmax_over("softmax", "V", "over<t>", "V/t +d"), needs_sum("softmax", "V/t", "d"));
  legal(rules::logsumexp("A/t V -> A/t", "A/t V"), "A/t");
  illegal(rules::logsumexp("A V/t -> A", "A V/t"),
          "logsumexp<`A V/t -> A`>: " + gather_first("V/t", "A V/t", "A V") +
              ", or write `logsumexp<\"A V/t -> A\", over<\"t\">>`, which sends maxima and sums only (communicates)");
  legal(rules::logsumexp_over("A V/t", "over<d>", "A V/t W/d"), "A V/t");
  legal(rules::logsumexp_over("A B/d V/t -> A", "over<d t>", "A B/d V/t"), "A");
  illegal(rules::logsumexp_over("A B/d V/t -> A", "over<t d>", "A B/d V/t"),
          "logsumexp<`A B/d V/t -> A`>: the removed dims are sharded over d t, and the call names exactly these axes; "
          "write `logsumexp<\"A B/d V/t -> A\", over<\"d t\">>`");
  illegal(rules::logsumexp_over("A V -> A", "over<t>", "A V"),
          "logsumexp<`A V -> A`>: dim `V` is not sharded, so nothing would be communicated; write "
          "`logsumexp<\"A V -> A\">`");
  illegal(rules::logsumexp_over("A V/t -> A +t", "over<t>", "A V/t"),
          "logsumexp<`A V/t -> A +t`>: the result has no pending sum, which the op takes; drop `+t`");
  illegal(rules::logsumexp_over("A V/t +d -> A", "over<t>", "A V/t +d"), needs_sum("logsumexp", "A V/t", "d"));
  legal(rules::affine_norm("layer_norm", "M", "B/d M L/t", "M", "M"), "B/d M L/t");
  illegal(rules::scaled_norm("rms_norm", "M", "B M", "M/d +t"),
          "rms_norm<`M`>: the scale is `M/d +t`, not `M`; take its sum and gather it first (communicates)");
  illegal(rules::affine_norm("layer_norm", "M", "B M", "M", "B"),
          "layer_norm<`M`>: the bias is `B`, not `M`; if both names mean one size, `rename<\"B -> M\">` (free)");
  legal(rules::linear_along("cumsum", "L", "B/d L +t"), "B/d L +t");
  illegal(rules::linear_along("cumsum", "L", "B L/t"),
          "cumsum<`L`>: " + gather_first("L/t", "B L/t", "B L") +
              ", or write `linear_scan<\"L\", over<\"t\">>` with factors of 1, which gathers the last sums only "
              "(communicates)");
  illegal(rules::linear_along("flip", "L", "B L/t"), "flip<`L`>: " + gather_first("L/t", "B L/t", "B L"));
  legal(rules::linear_scan("L", "B/d L", "B/d L"), "B/d L");
  refuse_linear_scan(
      "L", "B L", "B L/t",
      gather_first("L/t", "B L/t", "B L") +
          ", or write `linear_scan<\"L\", over<\"t\">>`, which gathers the last states only (communicates)");
  legal(rules::linear_scan_over("L", "over<t>", "B/d L/t", "B/d L/t"), "B/d L/t");
  legal(rules::linear_scan_over("L", "over<t d>", "L/t/d", "L/t/d"), "L/t/d");
  illegal(rules::linear_scan_over("L", "over<t>", "L/t/d", "L/t/d"),
          "linear_scan<`L`, over<t>>: dim `L/t/d` is sharded over t d, and the states of all its shards are gathered; "
          "write `linear_scan<\"L\", over<\"t d\">>`");
  illegal(rules::linear_scan_over("L", "over<t>", "L", "L"),
          "linear_scan<`L`, over<t>>: dim `L` is not sharded, so nothing would be communicated; write "
          "`linear_scan<\"L\">`");
  illegal(rules::linear_scan_over("X", "over<t>", "L/t", "L/t"),
          "linear_scan<`X`, over<t>>: the operand `L/t` has no dim `X`");
  illegal(rules::linear_scan_over("L", "over<t>", "B L/t", "B/d L/t"),
          "linear_scan<`L`, over<t>>: the factors `B L/t` must have the spec of the summands `B/d L/t`: dim 1 is `B`, "
          "not `B/d`; take the shard of each device with `shard<\"B L/t -> B/d L/t\">` (no traffic)");
  illegal(rules::linear_scan_over("L", "over<t>", "L/t +d", "L/t"), needs_sum("linear_scan", "L/t", "d"));
  refuse_linear_scan("L", "B L", "B/d L",
                     "the factors `B L` must have the spec of the summands `B/d L`: dim 1 is `B`, not `B/d`; take the "
                     "shard of each device with `shard<\"B L -> B/d L\">` (no traffic)");
  refuse_linear_scan("L", "L", "B L",
                     "the factors `L` must have the spec of the summands `B L`: dim 1 is `L`, not `B`");
  for (const char* partial : {"a", "b"})
    illegal(rules::linear_scan("L", *partial == 'a' ? "L +t" : "L", *partial == 'b' ? "L +t" : "L"),
            needs_sum("linear_scan", "L"));
  legal(rules::top_k("V", "K", "V B/d"), "K B/d");
  illegal(rules::top_k("V", "K", "B V/t"), "top_k<`V`, `K`>: " + gather_first("V/t", "B V/t", "B V"));
  illegal(rules::top_k("V", "K/t", "B V"), "top_k<`V`, `K/t`>: write the name of the result's dim, without axes");
  illegal(rules::top_k("V", "V", "B V"),
          "top_k<`V`, `V`>: the operand `B V` already has a dim `V`, and a name has one size; write another name for "
          "the result's dim");
  illegal(rules::top_k("V", "K", "V +t"), needs_sum("top_k", "V"));
  legal(rules::conv("B/d L C/t, K C/t -> B/d L C/t", "L, K -> L", "B/d L C/t", "K C/t"), "B/d L C/t");
  legal(rules::conv("B/d L C/t, K C/t F -> B/d N F +t", "L, K -> N", "B/d L C/t", "K C/t F"), "B/d N F +t");
  legal(rules::conv("H W C, P Q C F/t -> Y X F/t", "H W, P Q -> Y X", "H W C", "P Q C F/t"), "Y X F/t");
  refuse_conv("B L/t, K -> B L", "L, K -> L", "B L/t", "K", gather_first("L/t", "B L/t", "B L"));
  refuse_conv("L C/t, K C/t -> L", "L, K -> L", "L C/t", "K C/t",
              left_partial("t", "contracting `C/t` sees only the shard of this device"));
  for (const char* lengths : {"L", "L -> N", "L K -> N", "L, K -> N M", "L/t, K -> N", "L, 4 -> N", " ,  -> "})
    CHECK(str(rules::conv("L, K -> N", lengths, "L", "K").why).find("`L, K -> N`, or `H W, P Q -> Y X`") !=
          std::string::npos);
  refuse_conv("L, K -> N", "L, K -> N", "L", "K/t",
              "the tensor of weights is `K/t`, but the op spec expects `K`: dim 1 is `K/t`, not `K`; gather it with "
              "`all_gather<\"K/t -> K\">` (communicates), or correct the op spec");
  refuse_conv("L 2, K -> N", "L, K -> N", "L 2", "K",
              "integer dim `2` is not an index: name it first, `rename<\"2 -> name\">`");
  refuse_conv("L C, K -> N", "L, K -> N", "L C", "K",
              "dim `C` of the operand is neither in the other operand nor in the result; `sum` over it first");
  legal(rules::windows("L, K -> N", "B/d L C/t"), "B/d N K C/t");
  legal(rules::windows("L, K -> L", "L C +t"), "L K C +t");
  legal(rules::windows("H W, P Q -> Y X", "B H W C"), "B Y X P Q C");
  refuse_windows("L, K -> N", "B L/t", gather_first("L/t", "B L/t", "B L"));
  refuse_windows("L, B -> N", "B L",
                 "the operand `B L` already has a dim `B`, and a name has one size; give it another name");
  refuse_windows("L, K -> B", "B L",
                 "the operand `B L` already has a dim `B`, and a name has one size; give it another name");
  refuse_windows("L, L -> N", "B L",
                 "the operand `B L` already has a dim `L`, and a name has one size; give it another name");
  refuse_windows("L, K -> K", "B L",
                 "dim `K` cannot be both the elements of a window and the windows; give one another name");
  CHECK(str(rules::windows("L -> N", "L").why).find("windows move as `L -> N` says, which must name") !=
        std::string::npos);
  legal(rules::einsum3("A B, B C/t, C/t D -> A D +t", "A B", "B C/t", "C/t D"), "A D +t");
  legal(rules::einsum_reduced3("A B, B C/t, C/t D -> A D/t", "A B", "B C/t", "C/t D"), "A D/t");
  legal(rules::einsum4("A, B, C, D -> A B C D", "A", "B", "C", "D"), "A B C D");
  legal(rules::einsum_reduced4("A/t, A/t, A/t, B -> B", "A/t", "A/t", "A/t", "B"), "B");
  illegal(rules::einsum_of_more("einsum", "A, A, A, A, A -> A"),
          "einsum<`A, A, A, A, A -> A`>: a product has at most 4 operands; multiply some of them first");
  illegal(rules::einsum3("A/t B, B C, C D/t -> A D +t", "A/t B", "B C", "C D/t"),
          "einsum_unreduced<`A/t B, B C, C D/t -> A D +t`>: the first operand is sharded over t (dim `A/t`) and the "
          "third operand sharded over t (dim `D/t`), so only diagonal shards would be computed; `all_gather` one of "
          "them (communicates)" +
              split_and_shift("A/t -> R/t Q", "t"));
  illegal(rules::einsum3("A, B, A B -> ", "A", "B", "A C"),
          "einsum_unreduced<`A, B, A B -> `>: the third operand is `A C`, but the op spec expects `A B`: dim 2 is `C`, "
          "not `B`; if both names mean one size, `rename<\"C -> B\">` (free), or correct the op spec");
  illegal(rules::einsum4("A, B, A B -> ", "A", "B", "A B", "A"),
          "einsum_unreduced<`A, B, A B -> `>: " + operand_count("3 operands", "4"));
  illegal(rules::einsum_reduced3("A, A B, B -> A", "A", "A B", "B"),
          "einsum<`A, A B, B -> A`>: no sum over devices is completed in `A`, so nothing would be communicated; write "
          "`einsum_unreduced`");
  // Every order of the products is legal.
  for (const char* text :
       {"A B, B C/t, C/t D -> A D +t", "A/d B +t, B C/x, C/x D -> A/d D +t +x", "A/t, A/t, A/t, A/t B -> B +t",
        "A/d K, K H/t, H/t, A/d K V/x -> V/x +d +t", "A, B, C, D -> A D"}) {
    const OpParts op = parse_op(text);
    const unsigned all = (1U << op.in.size()) - 1;
    for (unsigned set = 1; set <= all; ++set)
      for (unsigned first = 1; first < set; ++first) {
        if ((first & ~set) != 0) continue;
        const TensorSpec a = rules::product_of(op, first), b = rules::product_of(op, set & ~first);
        const auto pair = to_string(a) + ", " + to_string(b) + " -> " + to_string(rules::product_of(op, set));
        legal(rules::einsum(pair.view(), a, b), str(rules::product_of(op, set)));
      }
  }
  legal(rules::take_along("V", "B/d V +t", "B/d K"), "B/d K +t");
  legal(rules::take_along("V", "B/d V", "B/d V"), "B/d V");
  legal(rules::take_along("V", "V B/d", "K/t B/d"), "K/t B/d");
  refuse_take_along(
      "V", "B V/t", "B K",
      gather_first("V/t", "B V/t", "B V") + ", or write `index_unreduced`, whose rows of other shards are 0");
  refuse_take_along("X", "B V", "B K", "the operand `B V` has no dim `X`");
  refuse_take_along("V", "B V", "B K +t",
                    "the indices `B K +t` are partial over t, and a summand is not an index; " + reduce_first("B K"));
  refuse_take_along("V", "B/d V", "B K",
                    "the indices `B K` must have the dims of the operand `B/d V` except `V`: dim 1 is `B`, not `B/d`; "
                    "take the shard of each device with `shard<\"B K -> B/d K\">` (no traffic)");
  refuse_take_along("V", "B V", "B",
                    "the indices `B` have no dim in the place of `V`; for one element of each row write "
                    "`index_unreduced<\"B [V], B -> B\">(x, ids)`");
  refuse_take_along("V", "V +t", "K/t",
                    "the operand is partial over t and the indices sharded over t (dim `K/t`), so a device would take "
                    "only its own summands; " +
                        reduce_first("V"));
  legal(rules::rope("L", "D", "B/d L Q K/t D"), "B/d L Q K/t D");
  legal(rules::rope("L", "D", "L/t D"), "L/t D");
  legal(rules::rope("L", "D", "L D +t"), "L D +t");
  illegal(rules::rope("L", "D", "L D/t"), "rope<`L`, `D`>: " + gather_first("D/t", "L D/t", "L D"));
  illegal(rules::rope("L", "D", "B D"), "rope<`L`, `D`>: the operand `B D` has no dim `L` to take positions from");
  illegal(rules::rope("L", "D", "L B"), "rope<`L`, `D`>: the operand `L B` has no dim `D`");
  illegal(rules::rope("D", "D", "D"), "rope<`D`, `D`>: positions come from another dim than the one that is rotated");
  legal(rules::cross_entropy("B/d L V/t", "B/d L"), "B/d L +t");
  legal(rules::cross_entropy("B/d L V", "B/d L"), "B/d L");
  legal(rules::cross_entropy("V/t/d", ""), "+d +t");
  illegal(rules::cross_entropy("B/d L V/t", "B L"),
          "cross_entropy of `B/d L V/t` and `B L`: the targets must have the dims of the logits without the last one "
          "(the vocabulary); take the shard of each device with `shard<\"B L -> B/d L\">` (no traffic)");
  illegal(rules::cross_entropy("B/d L V/t", "L B/d"),
          "cross_entropy of `B/d L V/t` and `L B/d`: the targets must have the dims of the logits without the last one "
          "(the vocabulary); reorder the dims with `rearrange<\"L B/d -> B/d L\">` (a local copy)");
  illegal(rules::cross_entropy("B L V", "B"),
          "cross_entropy of `B L V` and `B`: the targets must have the dims of the logits without the last one (the "
          "vocabulary)");
  illegal(rules::cross_entropy("", ""),
          "cross_entropy of `\"\"` and `\"\"`: the targets must have the dims of the logits without the last one (the "
          "vocabulary)");
  illegal(rules::cross_entropy("B V +t", "B"), needs_sum("cross_entropy", "B V"));
  illegal(rules::cross_entropy("B V", "B +t"), needs_sum("cross_entropy", "B"));
}

TEST_CASE("rules: linear_cross_entropy") {
  const auto loss = [](std::string_view op, std::string_view x, std::string_view table, std::string_view targets) {
    return rules::linear_cross_entropy(op, x, table, targets);
  };
  legal(loss("B/d L M, V/t M -> B/d L V/t", "B/d L M", "V/t M", "B/d L"), "B/d L +t");
  legal(loss("B/d L M, V M -> B/d L V", "B/d L M", "V M", "B/d L"), "B/d L");
  legal(loss("L H D, V/t/d H D -> L V/t/d", "L H D", "V/t/d H D", "L"), "L +d +t");
  legal(loss("M, V/t M -> V/t", "M", "V/t M", ""), "+t");
  legal(loss("L, V/t -> L V/t", "L", "V/t", "L"), "L +t");
  const std::string rows =
      ">: the logits must be rows over the first dim of the table, made of whole rows of both operands, as `B L M, V M "
      "-> B L V`; `rearrange` an operand (a local copy)";
  const auto mislaid = [&](std::string_view op, std::string_view x, std::string_view table) {
    illegal(loss(op, x, table, "B"), "linear_cross_entropy<`" + std::string(op) + "`" + rows);
  };
  mislaid("B M, M V -> B V", "B M", "M V");
  mislaid("B M, V M -> V B", "B M", "V M");
  mislaid("M B, V M -> B V", "M B", "V M");
  mislaid("B M N, V N M -> B V", "B M N", "V N M");
  mislaid("B M, V B M -> B V", "B M", "V B M");
  mislaid("B M, V -> B V", "B M", "V");
  mislaid("B M, V M -> B", "B M", "V M");
  mislaid("M, V M -> ", "M", "V M");
  illegal(loss("B M, V M -> B V", "B/d M", "V M", "B"),
          "linear_cross_entropy<`B M, V M -> B V`>: the first operand is `B/d M`, but the op spec expects `B M`: dim 1 "
          "is `B/d`, not `B`; gather it with `all_gather<\"B/d M -> B M\">` (communicates), or correct the op spec");
  illegal(loss("B M/t, V M/t -> B V +t", "B M/t", "V M/t", "B"),
          "linear_cross_entropy<`B M/t, V M/t -> B V +t`>: the logits would be partial over t, and a loss is of their "
          "sum; make the operands whole first, with `all_gather` or `all_reduce`, or reduce the `einsum_unreduced` and "
          "take its `cross_entropy` (all communicate)");
  illegal(
      loss("B/d M, V M -> B/d V", "B/d M", "V M", "B"),
      "linear_cross_entropy<`B/d M, V M -> B/d V`> with targets `B`: the targets must have the dims of the logits "
      "without the last one (the vocabulary); take the shard of each device with `shard<\"B -> B/d\">` (no traffic)");
  illegal(loss("B M, V M -> B V", "B M", "V M", "B +t"), needs_sum("linear_cross_entropy", "B"));
}

TEST_CASE("rules: causal_attention") {
  const auto attention = [](std::string_view q, std::string_view k, std::string_view v = "") {
    return rules::causal_attention("L", "D", q, k, v.empty() ? k : v);
  };
  const auto in_segments = [](std::string_view q, std::string_view k, std::string_view s) {
    return rules::causal_attention_in_segments("L", "D", q, k, k, s);
  };
  legal(attention("B/d L Q K/t D", "B/d L K/t D"), "B/d L Q K/t D");
  legal(attention("B/d L H/t D", "B/d L H/t D"), "B/d L H/t D");
  legal(attention("L D", "D L"), "L D");
  legal(attention("L Q/t D", "L D"), "L Q/t D");
  legal(in_segments("B/d L Q K/t D", "B/d L K/t D", "B/d L"), "B/d L Q K/t D");
  legal(in_segments("L Q/t D", "L D", "Q/t L"), "L Q/t D");
  const auto refuse = [](const rules::Verdict& verdict, const std::string& why) {
    illegal(verdict, "causal_attention<`L`, `D`>: " + why);
  };
  refuse(attention("L/t D", "L/t D"), gather_first("L/t", "L/t D", "L D") +
                                          ", or write `causal_attention<\"L\", \"D\", over<\"t\">>`, which sends keys "
                                          "and values from shard to shard (communicates)");
  refuse(attention("L D/t", "L D/t"), gather_first("D/t", "L D/t", "L D"));
  refuse(attention("Qlen D", "Klen D"), "the operand `Qlen D` has no dim `L`");
  refuse(attention("L D", "Klen D"),
         "the keys `Klen D` have the dim `Klen`, but the queries `L D` do not; the keys may only lack dims of the "
         "queries (`rename` is free)");
  refuse(attention("B L D", "B D"), "the keys `B D` have no dim `L`, along which positions count");
  refuse(attention("B L D", "B L"), "the keys `B L` have no dim `D`, over which products are summed");
  refuse(attention("L K/t D", "L K D"),
         shards_differ("K", "L K D", "K/t", "L K/t D", "L K/t D -> L K D", "L K D -> L K/t D"));
  refuse(attention("B/t L K D", "B L K/t D"),
         "`B/t L K D` is sharded over t (dim `B/t`), but `B L K/t D` is sharded over t (dim `K/t`), so only diagonal "
         "shards would meet; `all_gather` one of them (communicates)");
  refuse(attention("L D", "L D", "D L"), "the values `D L` must have the spec of the keys `L D`");
  refuse(
      attention("B L D", "B L D", "B L W"),
      "the values `B L W` must have the spec of the keys `B L D`; pad narrower values with `pad<\"W -> D\">`, and the "
      "result has them after `narrow<\"D -> W\">` (local copies)");
  refuse(attention("2 2 L D", "L D"), "integer dim `2` appears twice; `rename` it first (free)");
  illegal(rules::causal_attention("L", "L", "L", "L", "L"),
          "causal_attention<`L`, `L`>: positions count along another dim than the one that products are summed over");
  illegal(attention("L D", "L D +t"), needs_sum("causal_attention", "L D"));
  illegal(in_segments("L D", "L D", "L +t"), needs_sum("causal_attention", "L"));
  refuse(in_segments("B/d L D", "B/d L D", "B L"),
         shards_differ("B", "B L", "B/d", "B/d L D", "B/d L D -> B L D", "B L -> B/d L"));
  refuse(in_segments("B L D", "B L D", "B"), "the segments `B` have no dim `L`, along which positions count");
  refuse(in_segments("B L D", "B L D", "L D"), "the segments `L D` have the dim `D`; all of a head is in one segment");
  refuse(in_segments("L D", "L Klen", "L"),
         "the keys `L Klen` have the dim `Klen`, but the queries `L D` do not; the keys may only lack dims of the "
         "queries (`rename` is free)");
}

TEST_CASE("rules: layout") {
  const auto refuse_concat = refusals("concat", rules::concat);
  const auto refuse_stack = refusals("stack", rules::stack);
  const auto refuse_rename = refusals("rename", rules::rename);
  const auto refuse_rearrange = refusals("rearrange", rules::rearrange);
  const auto refuse_merge = refusals("merge", rules::merge);
  const auto refuse_split = refusals("split", rules::split);
  const auto refuse_broadcast = refusals("broadcast", rules::broadcast);
  legal(rules::concat("P, L -> K", "B/d P D", "B/d L D"), "B/d K D");
  legal(rules::concat("L, L -> N", "L +t", "L +t"), "N +t");
  refuse_concat("P, L -> K", "B/d P", "B L",
                "the second operand, `B L`, must have the other dims of the first, `B/d P`: dim 1 is `B`, not `B/d`; "
                "take the shard of each device with `shard<\"B L -> B/d L\">` (no traffic)");
  refuse_concat("P, L -> K", "P +t", "L",
                "the second operand, `L`, must have the other dims of the first, `P +t`: it has no pending sum over t; "
                "take `to_partial<\"L -> L +t\">` (no traffic)");
  refuse_concat("P, L -> K", "P L", "L X",
                "the second operand, `L X`, must have the other dims of the first, `P L`: dim 2 is `X`, not `L`");
  refuse_concat("P, L -> K", "P/t", "L/t", gather_first("P/t", "P/t", "P"));
  refuse_concat("X, L -> K", "L", "L", "the operand `L` has no dim `X`");
  refuse_concat("2, L -> K", "2 A", "L A", "an integer dim has one exact size; name it first, `rename<\"2 -> name\">`");
  refuse_concat(
      "L, M -> L", "L", "M",
      "the result's dim is longer than those of the operands, and a name has one size; give it another name than `L`");
  refuse_concat("L, M -> N", "N L", "N M", "the operand `N L` already has a dim `N`");
  const std::string form = ": write the dim's name in each operand and in the result, `concat<\"L1, L2 -> L\">(a, b)`";
  illegal(rules::concat("L", "L", "L"), "concat<`L`>" + form);
  illegal(rules::concat("L A, L -> N", "L A", "L"), "concat<`L A, L -> N`>" + form + ", without axes");

  legal(rules::stack("S", "B/d L +t", "B/d L +t"), "S B/d L +t");
  legal(rules::stack("S", "", ""), "S");
  refuse_stack("S", "B/d", "B",
               "the operands are stacked as they are, but `B` is not `B/d`: dim 1 is `B`, not `B/d`; take the shard of "
               "each device with `shard<\"B -> B/d\">` (no traffic)");
  refuse_stack("B", "B", "B", "the operand `B` already has a dim `B`");
  refuse_stack("S/t", "B", "B", "write the name of the new dim, without axes");
  legal(rules::unstack("unstack", "operand", "S", "S B/d L +t"), "B/d L +t");
  legal(rules::unstack("unstack", "operand", "S", "S"), "");
  illegal(rules::unstack("unstack", "operand", "S", "B/d"), "unstack<`S`>: the operand `B/d` has no dim `S`");
  illegal(rules::unstack("scan", "leaf", "S", "B/d"),
          "scan<`S`>: the leaf `B/d` has no dim `S`; `stack` the tensors of all layers along it, or pass this one as "
          "an argument");
  illegal(rules::unstack("unstack", "operand", "S", "B/d S +t"),
          "unstack<`S`>: the operand `B/d S +t` has other dims before `S`; reorder the dims with `rearrange<\"B/d S +t "
          "-> S B/d +t\">` (a local copy)");
  illegal(rules::unstack("unstack", "operand", "S", "S/d B"),
          "unstack<`S`>: the operand `S/d B` is sharded along `S`, so no device has all parts; gather that dim first, "
          "or shard another one");
  illegal(rules::unstack("unstack", "operand", "S/d", "S/d B"),
          "unstack<`S/d`>: write the name of the stacked dim, without axes");
  illegal(rules::unstack("unstack", "operand", "2", "2 B"),
          "unstack<`2`>: write the name of the stacked dim, without axes");
  legal(rules::transpose("A B/t 2 +d"), "2 B/t A +d");
  illegal(rules::transpose("A"), "transpose: `A` has fewer than two dims; drop the op");
  legal(rules::transpose2("A", "C", "A B/t C/d"), "C/d B/t A");
  illegal(rules::transpose2("A", "X", "A B"), "transpose<`A`, `X`>: the operand `A B` has no dim `X`");
  illegal(rules::transpose2("A", "A", "A B"), "transpose<`A`, `A`>: write two dims");
  const std::string twice = " is on both sides, with two sizes, and a name has one size; write another name for the ";
  illegal(rules::split("Y -> Y P", "Y"), "split<`Y -> Y P`>: dim `Y`" + twice + "part");
  illegal(rules::split("Y/t -> P/t Y", "Y/t"), "split<`Y/t -> P/t Y`>: dim `Y`" + twice + "part");
  illegal(rules::merge("A B -> A", "A B"), "merge<`A B -> A`>: dim `A`" + twice + "result");
  legal(rules::rename("L -> Klen", "B/d L K/t D"), "B/d Klen K/t D");
  legal(rules::rename("A B -> B A", "A/t B"), "B/t A");
  legal(rules::rename("2 -> k_v", "2 A +t"), "k_v A +t");
  legal(rules::rename("2 2 -> a b", "2 2"), "a b");
  refuse_rename("L -> ", "L", "write as many names on the right as on the left");
  refuse_rename("L -> K", "B", "the operand `B` has no dim `L`");
  refuse_rename("L -> B", "B L", "the operand `B L` already has a dim `B`");
  refuse_rename("L/t -> K/t", "L/t", "write names of dims only, without axes; `L` keeps its sharding");
  refuse_rename("L +t -> K", "L +t", "write names of dims only; a pending sum stays pending");
  refuse_rename("L -> 2", "L", "a dim cannot be renamed to an integer");
  refuse_rename("2 -> a", "2 2", "integer dim `2` appears more than once in `2 2`; rename all of them");
  refuse_rename("L, B -> K", "L", operand_count("2 operands", "1"));
  refuse_rename("[L] -> K", "L", "brackets belong in the op spec of index_unreduced and scatter_add only");
  legal(rules::rearrange("A B/t -> B/t A", "A B/t"), "B/t A");
  legal(rules::rearrange("A B 2 +d -> 2 A B +d", "A B 2 +d"), "2 A B +d");
  refuse_rearrange("A B/t -> B A/t", "A B/t",
                   "dim `B/t` cannot become `B`: a rearrange only reorders; change the sharding before or afterwards");
  refuse_rearrange("A B -> A", "A B", "the result must have exactly the dims of the operand");
  refuse_rearrange("A B -> B C", "A B", "dim `C` is not in the operand");
  refuse_rearrange("A B +t -> B A", "A B +t", still_pending("t"));
  refuse_rearrange("2 2 3 -> 2 3 3", "2 2 3", "integer dim `2` appears twice; `rename` one of the two first (free)");
  refuse_rearrange("A B -> B A", "B A", "the operand already is what the result should be, `B A`; drop the op");
  legal(rules::merge("H/t D -> E/t", "B H/t D"), "B E/t");
  legal(rules::merge("2 2 -> 4", "A 2 2 +d"), "A 4 +d");
  legal(rules::merge("A B C -> E", "A B C"), "E");
  refuse_merge(
      "H D/t -> E/t", "H D/t",
      "dim `D/t` is sharded, but axes may be on the major part `H` only; `all_gather` it first (communicates)");
  refuse_merge("H/t D -> E", "H/t D", "`E` must have the axes of the major part `H/t`");
  refuse_merge("H D -> E", "H B D", "the operand `H B D` has no `H D` side by side");
  refuse_merge("H -> E", "H", "write the adjacent dims to merge, and one name: `H/t D -> E/t`");
  refuse_merge("H D -> B", "B H D", "dim `B` appears twice: rename one of the two");
  refuse_merge("H D -> 4", "H D", "the size of the result is not known here; write a name for it");
  refuse_merge("2 2 -> 5", "2 2", "the product of the sizes `2 2` is not 5");
  refuse_merge("H D +t -> E", "H D +t", "write dims only; a pending sum stays pending");
  legal(rules::split("E/t -> H/t D", "B E/t"), "B H/t D");
  legal(rules::split("4 -> A 2", "4"), "A 2");
  legal(rules::split("E -> H 2", "E +t"), "H 2 +t");
  refuse_split("E/t -> H D/t", "E/t", "dim `D/t` is sharded, but axes may be on the major part `H` only");
  refuse_split("E/t -> H D", "E/t", "`E/t` must have the axes of the major part `H`");
  refuse_split("E -> H", "E", "write the dim to split, and its parts: `E/t -> H/t D`");
  refuse_split("E -> H D", "B", "the operand `B` has no `E`");
  refuse_split("E -> B D", "B E", "dim `B` appears twice: rename one of the two");
  refuse_split("E -> 2 D", "A/a B C F G I J K N E", "the result has more than 10 dims");
  refuse_split("4 -> 2 3", "4", "the product of the sizes `2 3` is not 4");
  legal(rules::stack_shards("B/d/e L/s M/t -> P/s/d/e U W M/t", "B/d/e L/s M/t"), "P/s/d/e U W M/t");
  legal(rules::stack_shards("P/d U 2 +t", "B/d 2 +t"), "P/d U 2 +t");
  legal(rules::unstack_shards("P/s/d U W -> B/d L/s", "P/s/d U W"), "B/d L/s");
  const auto stack = refusals("stack_shards", rules::stack_shards);
  stack("B/d -> P/d", "B/d",
        "the stack has one dim more, the first, with an element for each device: `B/d L/s -> P/d/s U W`");
  stack("B/d L -> 2 U L", "B/d L", "the first dim of the stack, `2`, lacks the axis d of dim `B/d`; write it there");
  stack("B/d L -> P/d U N", "B/d L", "dim `L` is not sharded, so it stays in the stack; write `L` there, not `N`");
  stack("B/d/t L -> P/d U/t L", "B/d/t L",
        "dim `B/d/t` cannot be `U/t` in the stack; leave it as it is, or give all its axes to the first");
  stack("B/d L -> P/d 2 L", "B/d L", "dim `B/d` cannot be `2`; write a name, which takes any size");
  stack("B/d L -> P/d B L", "B/d L", "dim `B` would have two sizes; write another name in the stack");
  stack("B/d L -> B/d U L", "B/d L", "dim `B` would have two sizes; write another name in the stack");
  stack("B/d L/s -> P/d/s L B", "B/d L/s", "dim `L` would have two sizes; write another name in the stack");
  stack("B/d L/s -> P/d U W", "B/d L/s",
        "the first dim of the stack, `P/d`, lacks the axis s of dim `L/s`; write it there");
  stack("B/d L -> P/d/t U L", "B/d L",
        "the first dim of the stack, `P/d/t`, has the axis t, which it gets from no dim; leave it out there");
  stack("B/d L -> P B/d L", "B/d L",
        "no dim gives its axes to the first, so there are no shards to stack; drop the op");
  stack("B/d +t -> P/d U", "B/d +t", still_pending("t"));
  stack("B/d, L -> P/d U", "B/d", operand_count("2 operands", "1"));
  illegal(rules::unstack_shards("P/d U W -> B/d L/s", "P/d U W"),
          "unstack_shards<`P/d U W -> B/d L/s`>: the first dim of the stack, `P/d`, lacks the axis s of dim `L/s`; "
          "write it there");
  illegal(rules::unstack_shards("P/d/s U W -> B/d", "P/d/s U W"),
          "unstack_shards<`P/d/s U W -> B/d`>: the stack has one dim more, the first, with an element for each device: "
          "`B/d L/s -> P/d/s U W`");
  legal(rules::broadcast("M -> B/d M", "M"), "B/d M");
  legal(rules::broadcast("M +t -> B/d M +t", "M +t"), "B/d M +t");
  legal(rules::broadcast(" -> A/t", ""), "A/t");
  refuse_broadcast("M/t -> B M", "M/t", "dim `M/t` must be unchanged in the result, not `M`");
  refuse_broadcast("M -> B/d M/t", "M", "dim `M` must be unchanged in the result, not `M/t`");
  refuse_broadcast("M/t -> B/t M", "M/t", "dim `M/t` must be unchanged in the result, not `M`");
  refuse_broadcast("M +t -> B M", "M +t", still_pending("t"));
  refuse_broadcast("M -> B", "M", "the result lacks dim `M` of the operand");
  refuse_broadcast("A B -> B A C", "A B", "the dims of the operand must be in the same order in the result");
  refuse_broadcast("M +d -> B/d M", "M +d", still_pending("d"));
  refuse_broadcast("M -> M", "M", "the result has no new dim; drop the broadcast");
  refuse_broadcast("2 -> 2 2", "2", "integer dim `2` appears twice; give the new one a name");
  refuse_broadcast("A B -> B C", "A B", "the result lacks dim `A` of the operand");
}

TEST_CASE("rules: reinterpret") {
  const auto refuse_reinterpret_mesh = refusals("reinterpret", rules::reinterpret_mesh);
  const auto refuse_reinterpret = refusals("reinterpret", rules::reinterpret);
  legal(rules::reinterpret_mesh("d s -> e", "d s t"), "e t");
  legal(rules::reinterpret_mesh("e->d s", "e t"), "d s t");
  legal(rules::reinterpret_mesh("d s -> f, t -> e", "d s t"), "f e");
  legal(rules::reinterpret_mesh("d -> s, s -> d", "d s t"), "s d t");
  legal(rules::reinterpret("d s -> e", "e t", "X/d/s M F/t"), "X/e M F/t");
  legal(rules::reinterpret("d s -> e", "e t", "A/t/d/s B"), "A/t/e B");
  legal(rules::reinterpret("e -> d s", "d s t", "B/e M +t"), "B/d/s M +t");
  legal(rules::reinterpret("d s -> e", "e t", "M +d +s +t"), "M +e +t");
  legal(rules::reinterpret("d s -> e", "e t", "B/t"), "B/t");
  legal(rules::reinterpret("d s t -> f e", "f e", "B/d/s/t"), "B/f/e");
  legal(rules::reinterpret("d -> s, s -> d", "s d", "A/d B/s"), "A/s B/d");
  refuse_reinterpret_mesh("d s", "d s",
                          "write axes and what takes their place, `d s -> e`, with commas between several such groups");
  refuse_reinterpret_mesh("d/s -> e", "d s",
                          "mesh `d/s`: write the names of the axes, separated by spaces; sizes come at run time");
  refuse_reinterpret_mesh("d s -> e, s -> t", "d s", "axis `s` is in two groups");
  refuse_reinterpret_mesh("d x -> e", "d s t", "the mesh `d s t` has no axis `x`");
  refuse_reinterpret_mesh("d t -> e", "d s t",
                          "the axes `d t` do not follow each other in the mesh `d s t`, which numbers its devices in "
                          "the order of its axes; name axes that do, or order those of the mesh otherwise");
  refuse_reinterpret_mesh("d s -> t", "d s t", "the result has the axis `t` twice; choose another name");
  refuse_reinterpret("d s -> e", "d s t", "X/d/s", "the mesh `d s t` has no axis `e`");
  refuse_reinterpret("d s -> e", "e t", "B/d M",
                     "the operand `B/d M` is sharded over d (dim `B/d`) and replicated over s, but `d s` become `e` "
                     "together; give the operand one placement over all of them first");
  refuse_reinterpret("d s -> e", "e t", "B/d L/s",
                     "the operand `B/d L/s` is sharded over d (dim `B/d`) and sharded over s (dim `L/s`), but `d s` "
                     "become `e` together; give the operand one placement over all of them first");
  refuse_reinterpret("d s -> e", "e t", "M +d",
                     "the operand `M +d` is partial over d and replicated over s, but `d s` become `e` together; give "
                     "the operand one placement over all of them first");
  refuse_reinterpret("d s -> e", "e t", "B/s/d",
                     "dim `B/s/d` is not sharded over `d s` in this order, which is that of `e`; its shards would be "
                     "on other devices");
  refuse_reinterpret("d s -> e", "e", "X/d/s F/t",
                     "the operand `X/d/s F/t` is sharded over t (dim `F/t`), which the mesh `e` does not have; name "
                     "the axis that takes its place, as in `d s -> e, t -> ...`, or take a mesh that has it");
  refuse_reinterpret("d s -> t", "t", "A/d/s B/t", "the result has the axis `t` twice; choose another name");
}

TEST_CASE("law: the cotangent of a reinterpreted tensor is its dual, reinterpreted back") {
  const Axes fine = rules::mesh_axes("d s t"), coarse = rules::mesh_axes("e t");
  for (const char* spec : {"X/d/s M F/t", "A/t/d/s B", "M +d +s", "M +d +s +t", "B/t", "", "B/d/s +t"}) {
    const TensorSpec x(spec);
    const auto there = rules::reinterpret("d s -> e", "e t", x);
    REQUIRE(str(there.why) == "");
    legal(rules::reinterpret("e -> d s", "d s t", rules::dual(there.result, coarse)), str(rules::dual(x, fine)));
  }
}

TEST_CASE("rules: submeshes") {
  legal(rules::submesh("e", "d e t"), "d t");
  legal(rules::submesh("d", "d e"), "e");
  legal(rules::on_submeshes("N/e", "d e t"), "d t");
  legal(rules::on_submeshes("+t", "d e t"), "d e");
  const auto enter = [](const char* leaving, bool of_tree, const char* x) {
    return rules::enter_submesh(leaving, "d e t", 2, of_tree, x);
  };
  legal(enter("N/e", false, "B/d M/t"), "B/d M/t");
  legal(enter("N/e", true, "M/t/d"), "M/t/d");
  legal(enter("+e", false, "A/e B/d +t"), "A B/d +t");
  legal(enter("+e", false, "A B/e/t/d"), "A B/t/d");
  legal(enter("A/e", false, ""), "");
  const auto leave = [](const char* leaving, const char* y) { return rules::leave_submesh(leaving, "d e t", y); };
  legal(leave("N/e", "B/d M +t"), "N/e B/d M +t");
  legal(leave("N/e", ""), "N/e");
  legal(leave("M/e", "B/d M/t"), "B/d M/e/t");
  legal(leave("M/e", "B/d M"), "B/d M/e");
  legal(leave("+e", "B/d M +t"), "B/d M +e +t");
  for (const char* text : {"e", "N/e M", "N/e/d", "+d +e", "N +e", "[N/e]"})
    CHECK(
        str(rules::on_submeshes(text, "d e t").why) ==
        "on_submeshes<`" + std::string(text) +
            "`>: write how results leave the submeshes of an axis e: `N/e`, as shards of a dim, or `+e`, as summands");
  illegal(rules::submesh("x", "d e t"), "submesh<`x`>: the mesh `d e t` has no axis `x`; name one of its axes");
  illegal(rules::submesh("e", "e"),
          "submesh<`e`>: the mesh `e` has no axis besides e, and a mesh has at least one; add an axis to the Mesh, "
          "whose size is 1 where the devices lack it");
  illegal(enter("N/e", false, "B +e"),
          "on_submeshes<`N/e`>: argument 2, `B +e`, is partial over e, so each submesh would compute with a summand of "
          "its own; " +
              reduce_first("B", "e"));
  illegal(enter("N/e", true, "B +e"),
          "on_submeshes<`N/e`>: argument 2 has `B +e`, which is partial over e, so each submesh would compute with a "
          "summand of its own; " +
              reduce_first("B", "e"));
  illegal(enter("N/e", false, "B/d/e"),
          "on_submeshes<`N/e`>: argument 2, `B/d/e`, is sharded over e (dim `B/d/e`), but not over e first, so that "
          "the elements of a submesh do not follow each other; shard the dim over e first");
  illegal(enter("N/e", true, "X/e M"),
          "on_submeshes<`N/e`>: argument 2 has `X/e M`, which is sharded over e (dim `X/e`) and would have another "
          "type in the function; pass it as an argument of its own");
  illegal(enter("N/e", false, "B/x"), "on_submeshes<`N/e`>: argument 2: " + not_on_mesh("B/x", "x", "d e t"));
  illegal(leave("N/e", "B +e"),
          "on_submeshes<`N/e`>: the function returns `B +e`, which is partial over e, an axis that its mesh `d t` does "
          "not have; return what one submesh has");
  illegal(leave("N/e", "a b c d e f g h i j"),
          "on_submeshes<`N/e`>: the function returns `a b c d e f g h i j` of 10 dims, and `N/e` would be one more");
}

TEST_CASE("law: the cotangent of what comes to a submesh is what leaves it, and the reverse") {
  const Axes whole = rules::mesh_axes("d e t"), part = rules::mesh_axes("d t");
  for (const char* spec : {"A/e/t B/d", "A/e B", "A/e +d +t", "A/e/d +t"}) {
    const TensorSpec x(spec);
    const auto inside = rules::enter_submesh("A/e", "d e t", 1, false, x);
    REQUIRE(str(inside.why) == "");
    legal(rules::leave_submesh("A/e", "d e t", inside.result), spec);
    legal(rules::leave_submesh("A/e", "d e t", rules::dual(inside.result, part)), str(rules::dual(x, whole)));
  }
  for (const char* spec : {"A/t B/d", "B +t", ""}) {  // replicated
    const TensorSpec x(spec);
    const auto inside = rules::enter_submesh("+e", "d e t", 1, false, x);
    REQUIRE(str(inside.why) == "");
    legal(rules::leave_submesh("+e", "d e t", rules::dual(inside.result, part)), str(rules::dual(x, whole)));
    const auto summands = rules::leave_submesh("+e", "d e t", x);
    REQUIRE(str(summands.why) == "");
    legal(rules::enter_submesh("+e", "d e t", 1, false, rules::dual(summands.result, whole)),
          str(rules::dual(x, part)));
  }
}

TEST_CASE("rules: an optimizer's update") {
  const auto update = [](DType weight, bool fit, DType gradient, const char* spec) {
    return rules::update("Lion", weight, "M", fit, gradient, spec);
  };
  legal(update(DType::f32, true, DType::f32, "M"), "");
  legal(update(DType::f32, true, DType::bf16, "M"), "");
  illegal(update(DType::bf16, true, DType::f32, "M"),
          "Lion: the weight `bf16[M]` is not f32; keep the weights in f32, and give Lion copies in another dtype");
  illegal(update(DType::f32, false, DType::f32, "M"),
          "Lion: a moment of the weight `f32[M]` has another type; make it with `zeros_like`");
  illegal(update(DType::f32, true, DType::i32, "M"),
          "Lion: the gradient `i32[M]` of the weight `f32[M]` is neither f32 nor bf16; `cast` it");
  illegal(update(DType::f32, true, DType::f32, "M +d"),
          "Lion: the gradient `f32[M +d]` of the weight `f32[M]` is partial over d; take the sums with "
          "`reduce_gradients(mesh, grads)`, once, after those over microbatches (communicates)");
}

TEST_CASE("rules: what is added in place") {
  const auto add = [](DType sum, DType added, const char* spec) {
    return rules::add_in_place("accumulate", sum, "M +r", added, spec);
  };
  legal(add(DType::f32, DType::f32, "M +r"), "");
  legal(add(DType::f32, DType::bf16, "M +r"), "");
  illegal(add(DType::bf16, DType::f32, "M +r"),
          "accumulate: the leaf `bf16[M +r]` is not f32; keep sums and averages in f32");
  illegal(add(DType::f32, DType::f64, "M +r"),
          "accumulate: the leaf `f64[M +r]`, which is added to `f32[M +r]`, is neither f32 nor bf16; `cast` it");
  illegal(add(DType::f32, DType::f32, "M/r"),
          "accumulate: the leaf `f32[M/r]`, which is added to `f32[M +r]`, has another spec: dim 1 is `M/r`, not `M`");
}

TEST_CASE("rules: the mesh, the loss, weights, gradients") {
  legal(rules::mesh("d t"), "d t");
  legal(rules::mesh("d"), "d");
  illegal(rules::mesh("d/t"), "mesh `d/t`: write the names of the axes, separated by spaces; sizes come at run time");
  illegal(rules::mesh(""), "mesh `\"\"`: write the names of the axes, separated by spaces; sizes come at run time");
  illegal(rules::mesh("2"), "mesh `2`: write the names of the axes, separated by spaces; sizes come at run time");
  illegal(rules::mesh("d d"), "mesh `d d`: axis `d` appears twice");
  illegal(rules::mesh("a b c d e f g"), "mesh `a b c d e f g`: a mesh has at most 6 axes");
  legal(rules::on_mesh("d t", "M/t/d"), "M/t/d");
  illegal(rules::on_mesh("d t", "M/x"), not_on_mesh("M/x", "x", "d t"));
  legal(rules::create("full", "d t", "A/d"), "A/d");
  illegal(rules::create("full", "d t", "A/x"), "full: " + not_on_mesh("A/x", "x", "d t"));
  illegal(rules::create("random_normal", "d t", "A +t"),
          "random_normal: `A +t` is partial, and what each summand should be is not said; make it without `+t` and "
          "take `to_partial` (no traffic)");
  legal(rules::create("causal_mask", "d t", "Qlen Klen"), "Qlen Klen");
  illegal(rules::create("causal_mask", "d t", "Qlen"),
          "causal_mask: `Qlen` must have two dims, rows and columns: `Qlen Klen`");
  legal(rules::iota("d t", "L/t"), "L/t");
  illegal(rules::iota("d t", "A B"), "iota<`A B`>: write exactly one dim");
  illegal(rules::iota("d", "L/t"), "iota: " + not_on_mesh("L/t", "t", "d"));
  legal(rules::loss("d t", DType::f32, "+d +t"), "+d +t");
  legal(rules::loss("d", DType::f32, "+d"), "+d");
  illegal(rules::loss("d t", DType::f32, ""),
          "value_and_grad: the loss `\"\"` is replicated over d: each device of d would count it again, so the "
          "gradients would be too large by the size of the axis; leave the sum pending, `+d +t`, and reduce it outside "
          "the differentiated function, or, if nothing is summed over d, take `to_partial<\" -> +d +t\">` of it (no "
          "traffic)");
  illegal(rules::loss("d t", DType::f32, "+d"),
          "value_and_grad: the loss `+d` is replicated over t: each device of t would count it again, so the gradients "
          "would be too large by the size of the axis; leave the sum pending, `+d +t`, and reduce it outside the "
          "differentiated function, or, if nothing is summed over t, take `to_partial<\"+d -> +d +t\">` of it (no "
          "traffic)");
  illegal(rules::loss("d t", DType::f32, "B +d +t"),
          "value_and_grad: the loss `B +d +t` has dims; `sum` it to a scalar whose sum over the devices is pending, "
          "`+d +t`");
  illegal(rules::loss("d", DType::f32, "+d +t"), "value_and_grad: the loss " + not_on_mesh("+d +t", "t", "d"));
  illegal(rules::loss("d t", DType::f32, "+e"),  // a misspelled axis
          "value_and_grad: the loss " + not_on_mesh("+e", "e", "d t"));
  illegal(rules::returned_loss(true, false),
          "value_and_grad: the function returns nothing; return the loss, a Tensor, or std::pair(loss, what it returns "
          "besides)");
  illegal(rules::returned_loss(false, true),
          "value_and_grad: the function returns a plain number, which has no derivative; return the loss, a Tensor, or "
          "std::pair(loss, what it returns besides)");
  illegal(rules::loss("d", DType::i32, "+d"),
          "value_and_grad: the loss `+d` is i32, not floating, so it has no derivative");
  legal(rules::weight("d t", DType::f32, "M/t/d"), "M/t/d");
  legal(rules::weight("d t", DType::bf16, "M"), "M");
  illegal(rules::weight("d t", DType::i32, "M"),
          "value_and_grad: the weight `i32[M]` is not floating, so it has no gradient; pass it as an argument");
  illegal(rules::weight("d t", DType::f32, "M +d"),
          "value_and_grad: the weight `f32[M +d]` is partial over d; " + reduce_first("M", "d"));
  illegal(rules::weight("d t", DType::f32, "M/x"), "value_and_grad: the weight " + not_on_mesh("M/x", "x", "d t"));
  legal(rules::item(""), "");
  illegal(rules::item("A"), "item: `A` is not a scalar; reduce it, or read the local shard with span()");
  illegal(rules::item("+d +t"),
          "item: `+d +t` is partial over d: devices would read different numbers and could diverge; reduce it first, "
          "with `all_reduce<\"+d +t -> \">` (communicates)");
  legal(rules::fully_sharded("d t", "M/t/d"), "M/t/d");
  legal(rules::fully_sharded("d t", "A/d B/t"), "A/d B/t");
  illegal(rules::fully_sharded("d t", "A/d"),
          "fully_sharded: `A/d` is not sharded over t, so every device of t keeps a copy; shard one of its dims, e.g. "
          "`dim/t`");
  illegal(rules::fully_sharded("d t", "A/d +t"),
          "fully_sharded: `A/d +t` is not sharded over t, so every device of t keeps a copy; shard one of its dims, "
          "e.g. `dim/t`");
  illegal(rules::fully_sharded("d", "A/d B/t"), "fully_sharded: " + not_on_mesh("A/d B/t", "t", "d"));
  legal(rules::cotangent("relu", "A +d", "A +d"), "A +d");
  illegal(rules::cotangent("relu", "A", "A +d"),
          "relu: its VJP returns a cotangent `A` where `A +d` is due: it has no pending sum over d; the cotangent of "
          "an operand has its dims, and is partial where the operand is replicated, and the reverse");
  illegal(rules::cotangent_dtype("relu", DType::bf16, DType::f32),
          "relu: its VJP returns a cotangent of bf16 where f32 is due; take `cast<f32>` of it");
  legal(rules::own_function("ewma", true, true), "");
  illegal(rules::own_function("ewma", true, false),
          "ewma: its kernel captures by reference, or holds a pointer or a union, and it runs after the call, when "
          "what it refers "
          "to may be gone; capture numbers by value: `[k]`, and pass tensors to `custom::operands`");
  legal(rules::own_vjp("A/d", 2, true, true), "");
  illegal(rules::own_vjp("A/d", 2, true, false),
          "custom::vjp: the function returns no tensor; return the cotangent of the operand");
  illegal(rules::own_vjp("A/d +unnamed", 2, false, false),
          "custom::vjp: the function does not take the cotangent `A/d +unnamed` and 2 saved tensors, as f(ct, "
          "saved...); name what it needs besides the cotangent in `custom::save`");
}

TEST_CASE("rules: pending sums over axes without names") {
  const std::string naming =
      "`+unnamed` stands for the axes of the mesh that no type of the op names, and `custom::vjp(mesh, x, f)` names "
      "them";
  legal(rules::multiply("A/d +unnamed", "A/d"), "A/d +unnamed");
  legal(rules::cotangent("f", "A/d +unnamed", "A/d +unnamed"), "A/d +unnamed");
  illegal(rules::map1("exp", "A/d +unnamed"),
          "exp: the operand `A/d +unnamed` is partial over unnamed, and exp is not linear, so it has to see the sum, "
          "not the summand of one device; reduce it first, with an `all_reduce` over axes that have names: " +
              naming);
  illegal(rules::add("+", "A +unnamed", "A"),
          "+ of `A +unnamed` and `A`: `A +unnamed` is partial over unnamed, but `A` is replicated over unnamed, so the "
          "pending sum would count the latter once per device; first take the sum of the former, with an `all_reduce` "
          "over axes that have names: " +
              naming);
  illegal(rules::all_reduce("A +unnamed -> A", "A +unnamed"),
          "all_reduce<`A +unnamed -> A`>: this op acts over axes that have names: " + naming);
  illegal(rules::to_partial("A -> A +unnamed", "A"),
          "to_partial<`A -> A +unnamed`>: this op acts over axes that have names: " + naming);
  legal(rules::all_reduce("A +t +unnamed -> A +unnamed", "A +t +unnamed"), "A +unnamed");
  misfit("A", "A +unnamed", "a sum over unnamed is still pending in it, and " + naming);
  legal(rules::fetch("A/d +t"), "A/d +t");
  illegal(rules::fetch("A/d +unnamed"),
          "fetch: the sums that are pending in `A/d +unnamed` cannot be taken: " + naming);
  illegal(rules::mesh("d unnamed"),
          "mesh `d unnamed`: `unnamed` stands for axes without a name; give the axis another name");
}

TEST_CASE("rules: types") {
  illegal(rules::tensor("B/d L +t +d"),
          "tensor spec `B/d L +t +d`: axis `d` appears twice: a mesh axis can act once in a tensor");
  legal(rules::tensor(""), "");
  illegal(rules::tensor("[V]"),
          "tensor spec `[V]`: brackets belong in the op spec of index_unreduced and scatter_add only");
  illegal(rules::tensor("A//t"), "tensor spec `A//t`: in `A//t`: `\"\"` is not an axis name (letters, digits, _)");
  legal(rules::assign(DType::f32, "A", DType::f32, "A"), "");
  illegal(rules::assign(DType::f32, "A", DType::bf16, "A"),
          "a tensor `bf16[A]` does not fit the declared type `f32[A]`: the dtype is bf16, so write `cast<f32>`");
  misfit("A", "A +t", "a sum over t is still pending in it; take `all_reduce<\"A +t -> A\">` (communicates)");
  misfit("A/t", "A +t", "dim 1 is `A`, not `A/t`; take `reduce_scatter<\"A +t -> A/t\">` (communicates)");
  misfit("A", "A/t", "dim 1 is `A/t`, not `A`; gather it with `all_gather<\"A/t -> A\">` (communicates)");
  misfit("A/t", "A", "dim 1 is `A`, not `A/t`; take the shard of each device with `shard<\"A -> A/t\">` (no traffic)");
  misfit("A +t", "A", "it has no pending sum over t; take `to_partial<\"A -> A +t\">` (no traffic)");
  misfit("A B/t", "A/t B",
         "dim 1 is `A/t`, not `A`; move the sharding with `all_to_all<\"A/t B -> A B/t\">` (communicates)");
  misfit("A B", "B A", "dim 1 is `B`, not `A`; reorder the dims with `rearrange<\"B A -> A B\">` (a local copy)");
  misfit("B Klen", "B L", "dim 2 is `L`, not `Klen`; if both names mean one size, `rename<\"L -> Klen\">` (free)");
  misfit("A/t", "B", "dim 1 is `B`, not `A/t`");
  misfit("A/d", "A/t/d", "dim 1 is `A/t/d`, not `A/d`");
  misfit("A B", "A", "dim `B` is missing");
  misfit("A", "A 2", "dim `2` is one too many");
  illegal(rules::assign(DType::f32, "A", DType::i32, "A +t"),
          "a tensor `i32[A +t]` does not fit the declared type `f32[A]`: a sum over t is still pending in it; take "
          "`all_reduce<\"A +t -> A\">` (communicates); and the dtype is i32, so write `cast<f32>`");
  misfit("", "+d +t", "a sum over d is still pending in it; take `all_reduce<\"+d +t -> \">` (communicates)");
  legal(rules::same_dtype("+", DType::f32, DType::f32), "");
  illegal(rules::same_dtype("+", DType::f32, DType::bf16),
          "+: the operands are f32 and bf16, and no dtype is promoted silently; write `cast<f32>` of the second or "
          "`cast<bf16>` of the first");
  illegal(rules::same_dtype("*", DType::f32, DType::bool_),
          "*: the operands are f32 and bool_, and no dtype is promoted silently; write `cast<f32>` of the second");
  illegal(rules::same_dtype("concat", DType::i32, DType::bf16),
          "concat: the operands are i32 and bf16, and no dtype is promoted silently; write `cast<bf16>` of the first");
  illegal(rules::same_dtype("logical_and", DType::bool_, DType::i32),
          "logical_and: the operands are bool_ and i32, and no dtype is promoted silently; write `cast<bool_>` of the "
          "second");
  illegal(rules::same_dtype("logical_or", DType::i32, DType::f32),
          "logical_or: the operands are i32 and f32, not bool_; compare them first, e.g. `not_equal`");
  illegal(rules::same_dtype("*", DType::bool_, DType::bool_),
          "*: the operands are bool_, which has no arithmetic; write `cast<f32>` of them first");
  legal(rules::same_dtype("logical_and", DType::bool_, DType::bool_), "");
  illegal(rules::same_dtype("logical_or", DType::f32, DType::f32),
          "logical_or: the operands are f32, not bool_; compare them first, e.g. `not_equal`");
  legal(rules::norm_dtypes("rms_norm", DType::bf16, DType::f32, DType::f32, DType::bf16), "");
  legal(rules::norm_dtypes("rms_norm", DType::f32, DType::f32, DType::f32, DType::bf16), "");
  illegal(rules::norm_dtypes("rms_norm", DType::i32, DType::f32, DType::f32, DType::i32),
          "rms_norm: the operand is i32, not floating; write `cast<f32>` of it first");
  illegal(rules::norm_dtypes("rms_norm", DType::bf16, DType::f64, DType::f64, DType::bf16),
          "rms_norm of bf16: the scale is f64, not bf16 or f32; write `cast<f32>` of it first");
  legal(rules::bias_dtype("einsum_bias", DType::bf16, DType::bf16), "");
  illegal(
      rules::bias_dtype("einsum_bias", DType::bf16, DType::f32),
      "einsum_bias of bf16: the bias is f32, and no dtype is promoted silently; write `cast<bf16>` of the bias first");
  legal(rules::einsum_dtype(DType::bf16, DType::f32), "");
  legal(rules::einsum_dtype(DType::f32, DType::bf16), "");
  legal(rules::einsum_dtype(DType::f64, DType::f64), "");
  illegal(rules::einsum_dtype(DType::i32, DType::i32),
          "einsum_unreduced: the operands are i32, not floating; write `cast<f32>` of them first");
  illegal(rules::einsum_dtype(DType::f32, DType::i32),
          "einsum_unreduced: the sums of f32 cannot be had as i32, only as f32 or bf16; write `cast<i32>` of the "
          "result or of the operands");
  illegal(rules::einsum_dtype(DType::f64, DType::bf16),
          "einsum_unreduced: the sums of f64 cannot be had as bf16, only as f64; write `cast<bf16>` of the result or "
          "of the operands");
  legal(rules::floating_dtype("exp", DType::bf16), "");
  illegal(rules::floating_dtype("exp", DType::i32),
          "exp: the operand is i32, not floating; write `cast<f32>` of it first");
  illegal(rules::floating_dtype("random_normal", DType::i32),
          "random_normal: random numbers are floating, not i32; draw f32 and `cast` them");
  legal(rules::arithmetic_dtype("+", DType::u8), "");
  illegal(rules::arithmetic_dtype("+", DType::bool_),
          "+: the operand is bool_, which has no arithmetic; write `cast<f32>` of it first");
  legal(rules::sum_dtype("all_reduce", DType::bf16, DType::f32), "");
  legal(rules::sum_dtype("all_reduce", DType::i32, DType::i32), "");
  illegal(rules::sum_dtype("all_reduce", DType::bf16, DType::bf16),
          "all_reduce: bf16 is not summed in bf16; write `all_reduce<\"...\", f32>`: bf16 on the wire, an f32 sum, one "
          "rounding");
  illegal(rules::sum_dtype("reduce_scatter", DType::f64, DType::f32),
          "reduce_scatter: f64 is not summed in f32; write `reduce_scatter<\"...\", f64>`, or leave the dtype out");
  legal(rules::reduced_dtype("sum", DType::u32), "");
  illegal(rules::reduced_dtype("sum", DType::u8),
          "sum: the operand is u8, which is not reduced; write `cast<i32>` of it first");
  illegal(rules::reduced_dtype("all_reduce", DType::bool_),
          "all_reduce: the operand is bool_, which is not reduced; write `cast<i32>` of it before its sum is pending");
  legal(rules::index_dtype("index_unreduced", DType::u32), "");
  illegal(rules::index_dtype("index_unreduced", DType::u8),
          "index_unreduced: the indices are u8, not i32 or u32; write `cast<i32>` of them first");
  legal(rules::condition_dtype("where", DType::bool_), "");
  illegal(rules::condition_dtype("where", DType::f32),
          "where: the condition is f32, not bool_; compare it first, e.g. `greater(x, 0.0)`");
}
TEST_CASE("calls that lack something or are the wrong way round", "[rules]") {
  illegal(
      rules::no_op_spec("all_gather", "A/t"),
      "all_gather: the op spec is missing: write what goes in and what comes out, `all_gather<\"A/t -> result\">(x)`");
  illegal(rules::no_op_spec2("einsum_unreduced", "A", "B"),
          "einsum_unreduced: the op spec is missing: write what goes in and what comes out, `einsum_unreduced<\"A, B "
          "-> result\">(x, y)`");
  illegal(rules::no_tree_field("rate"),
          "the field `rate` of a struct of tensors is not a tensor, Array or struct of them; keep it elsewhere, as in "
          "an argument of its own");
  const std::string form = "; write value_and_grad(mesh, f, weights, arguments...) for f(weights, arguments...)";
  illegal(rules::callable(1, -1, -1, false, "", ""),
          "value_and_grad: the function does not take the weights and 1 more argument in this order, each by value or "
          "as a const reference" +
              form);
  illegal(rules::callable(2, 1, -1, false, "", ""),
          "value_and_grad: the function has 1 parameter, but is given the weights and 2 more arguments" + form);
  illegal(rules::callable(1, 2, 0, true, "Weights", "Weights"),
          "value_and_grad: parameter 1 of the function, `Weights`, is not const; write `const Weights&`");
  illegal(rules::callable(1, 2, 0, false, "Weights", "Batch"),
          "value_and_grad: parameter 1 of the function, the weights, is `Weights`, but is given `Batch`" + form);
  illegal(rules::callable(1, 2, 1, false, "Batch", "Weights"),
          "value_and_grad: parameter 2 of the function, argument 1, is `Batch`, but is given `Weights`" + form);
}

TEST_CASE("rules: op specs that the operand completes", "[rules]") {
  legal(rules::all_gather("M F/t", "M/d F/t"), "M F/t");
  legal(rules::all_gather(over<"d">, "M/d F/t"), "M F/t");
  legal(rules::all_gather(over<"d">, "M/t/d"), "M/t");
  legal(rules::all_gather(over<"d t">, "M/t/d F"), "M F");
  legal(rules::all_gather(over<"t d">, "M/d F/t +p"), "M F +p");
  legal(rules::all_reduce("", "+d +t"), "");
  legal(rules::all_reduce(over<"t">, "M +d +t"), "M +d");
  legal(rules::to_partial(over<"t">, "M"), "M +t");
  legal(rules::reduce_scatter("B/d M/t", "B/d M +t"), "B/d M/t");
  legal(rules::all_to_all("A B/t", "A/t B"), "A B/t");
  legal(rules::shard("A/t", "A"), "A/t");
  legal(rules::sum("B +t", "A/t B"), "B +t");
  legal(rules::mean("+d", "B/d"), "+d");
  legal(rules::local_max("max", "A", "A B"), "A");
  legal(rules::all_reduce_max("A", "A V/t"), "A");
  legal(rules::einsum1("A +t", "A B/t"), "A +t");
  legal(rules::rearrange("B/t A", "A B/t"), "B/t A");
  legal(rules::broadcast("B/d M", "M"), "B/d M");
  legal(rules::shift_over(over<"t">, "A/t B"), "A/t B");
  // Messages are those of the op spec in full.
  illegal(rules::all_gather("M F", "M/d F/t +t2"),
          "all_gather<`M/d F/t +t2 -> M F`>: the sum over t2 is still pending in the operand, so the result must keep "
          "`+t2`; take `all_reduce` for it before or afterwards (communicates)");
  illegal(rules::all_gather("M", "M"),
          "all_gather<`M -> M`>: no dim loses an axis, so nothing would be gathered; drop the gather");
  illegal(rules::all_reduce("M", "M/t +d"),
          "all_reduce<`M/t +d -> M`>: " + other_dims("M", "M/t +d") + " and with the same sharding");
  // The axes alone.
  illegal(rules::all_gather(over<"d">, "M F/t"),
          "all_gather<over<d>> of `M F/t`: the operand is replicated over d, so there is nothing to gather over it; "
          "drop the gather");
  illegal(rules::all_gather(over<"t">, "M +t"),
          "all_gather<over<t>> of `M +t`: the operand is partial over t, so there is nothing to gather over it; take "
          "`all_reduce` for a pending sum (communicates)");
  illegal(rules::all_gather(over<"t">, "M/t/d"),
          "all_gather<over<t>> of `M/t/d`: dim `M/t/d` is sharded over d last, and a gather takes the last axes of a "
          "dim; gather that axis too, or first");
  illegal(rules::all_reduce(over<"t">, "M"),
          "all_reduce<over<t>> of `M`: the operand is replicated over t: no sum over it is pending, and to reduce a "
          "value twice multiplies it by the size of the axis; drop the all_reduce");
  illegal(rules::to_partial(over<"t">, "M/t"),
          "to_partial<over<t>> of `M/t`: the operand is sharded over t (dim `M/t`), and only a replicated value can "
          "become a summand");
  for (const auto& [name, rule] : {std::pair{"reduce_scatter", &rules::reduce_scatter},
                                   {"shard", &rules::shard},
                                   {"all_to_all", &rules::all_to_all},
                                   {"sum", &rules::sum}})
    illegal(rule(over<"t">, "M +d"),
            std::string(name) +
                "<over<t>> of `M +d`: the axis does not say which dims the result has; write the result, `" + name +
                "<\"...\">(x)`");
  illegal(rules::all_gather(over<"M/t">, "M/t"),
          "all_gather<over<M/t>> of `M/t`: write the names of axes, separated by spaces: `over<\"d t\">`");
  illegal(rules::all_reduce(over<"+t">, "M +t"),
          "all_reduce<over<+t>> of `M +t`: write the names of axes, separated by spaces: `over<\"d t\">`");
  illegal(rules::all_gather(over<"t,d">, "M/t/d"),
          "all_gather<over<t,d>> of `M/t/d`: write the names of axes, separated by spaces: `over<\"d t\">`");
  illegal(rules::shift_over("t", "A/t"),
          "shift<`t`>: write the axis whose ring the shards pass round, `shift<over<\"t\">>(x, k)`");
  illegal(rules::shift_over(over<"d">, "A/t"),
          "shift<`A/t`, `d`>: the operand `A/t` is replicated over d; only the shards of a dim that is sharded over d "
          "can be passed round its ring");
}

TEST_CASE("rules: what a backward sum states, and einsum by one name", "[rules]") {
  const auto refuse = refusals("einsum", rules::einsum_reduced);
  CHECK(rules::backward_sum_dtype(true, DType::bf16, DType::f32).ok());
  CHECK(rules::backward_sum_dtype(true, DType::f32, DType::f32).ok());
  illegal(rules::backward_sum_dtype(true, DType::bf16, DType::bf16),
          "all_gather: the gradient of bf16 is not summed in bf16; write `all_gather<\"...\", backward_sum<f32>>`, or "
          "leave it out");
  illegal(rules::backward_sum_dtype(false, DType::f32, DType::f32),
          "all_gather: f32 would be the dtype of what its backward pass sums; write `all_gather<\"...\", "
          "backward_sum<f32>>`, or leave it out");
  CHECK(rules::einsum_reduced("B/d M/t, M/t H -> B/d H/t", "B/d M/t", "M/t H").ok());
  CHECK(rules::einsum_reduced("B/d M/t, M/t H -> B/d H", "B/d M/t", "M/t H").ok());
  CHECK(rules::einsum_reduced("B/d L, B/d H/t -> L H/t/d", "B/d L", "B/d H/t").ok());
  CHECK(rules::einsum_reduced("B/d M/t, M/t H -> H +d", "B/d M/t", "M/t H").ok());
  refuse("B/d M, M F -> B/d F", "B/d M", "M F",
         "no sum over devices is completed in `B/d F`, so nothing would be communicated; write `einsum_unreduced`");
  refuse("B/d M/t, M/t F -> B F", "B/d M/t", "M/t F",
         "each device's products are `B/d F +t`, and no single `reduce_scatter` or `all_reduce` turns that into `B F`; "
         "write `einsum_unreduced`, and then each collective");
  refuse("B/d M/t, M/t F -> F/t", "B/d M/t", "M/t F",
         "each device's products are `F +d +t`, and no single `reduce_scatter` or `all_reduce` turns that into `F/t`; "
         "write `einsum_unreduced`, and then each collective");
  refuse("B M/t, M F -> B F", "B M/t", "M F",
         shards_differ("M", "M F", "M/t", "B M/t", "B M/t -> B M", "M F -> M/t F"));
}

TEST_CASE("rules: einsum with a bias") {
  const auto bias = [](const char* op, const char* x, const char* y, const char* b) {
    return rules::einsum_bias("einsum_bias", op, x, y, b);
  };
  const auto refuse = [&](const char* op, const char* x, const char* y, const char* b, const std::string& why) {
    illegal(bias(op, x, y, b), "einsum_bias<`" + std::string(op) + "`>: " + why);
  };
  legal(bias("B/d L M, M F/t -> B/d L F/t", "B/d L M", "M F/t", "F/t"), "B/d L F/t");
  legal(bias("A B, B C -> C A", "A B", "B C", "A"), "C A");
  legal(bias("A B, B C -> A C", "A B", "B C", ""), "A C");
  legal(bias("A/t B, A/t C -> A/t B C", "A/t B", "A/t C", "A/t C"), "A/t B C");
  const std::string summand =
      "each device's products are `A C +t`, a summand over t: the sum would count the bias once per device; write "
      "`einsum_unreduced`, take its sum with a `reduce_scatter` or `all_reduce<\"A C +t -> A C\">` (communicate), and "
      "then add the bias with `+`";
  refuse("A B/t, B/t C -> A C", "A B/t", "B/t C", "C", summand);
  refuse("A B/t, B/t C -> A C +t", "A B/t", "B/t C", "C", summand);
  refuse("A B, B C +t -> A C +t", "A B", "B C +t", "C", summand);
  illegal(
      rules::einsum_bias("einsum_bias_gelu", "A B/t, B/t C -> A C", "A B/t", "B/t C", "C"),
      "einsum_bias_gelu<`A B/t, B/t C -> A C`>: each device's products are `A C +t`, a summand over t: the sum would "
      "count the bias once per device, and gelu is not linear; write `einsum_unreduced`, take its sum with a "
      "`reduce_scatter` or `all_reduce<\"A C +t -> A C\">` (communicate), and then add the bias with `+`");
  refuse("A B, B C -> A C", "A B", "B C", "C +t", "the bias `C +t` is partial over t; " + reduce_first("C"));
  refuse("A B, B C -> A C", "A B", "B C", "D C",
         "dim `D` of the bias `D C` is not in the result `A C`; `+` after `einsum_unreduced` broadcasts the product "
         "along it");
  refuse("A B, B C -> A C", "A B", "B C", "C A",
         "the dims of the result, `A C`, are in another order in `C A`; `rearrange` one of the operands (a local "
         "copy)");
  refuse(
      "A B, B C/t -> A C/t", "A B", "B C/t", "C",
      "the bias `C` is `C/t` in the result, so their shards differ; take the shard of each device with `shard<\"C -> "
      "C/t\">` (no traffic)");
  refuse(
      "A B, B C/t -> A C/t", "A B", "B C/t", "C/d",
      "the bias `C/d` is `C/t` in the result, so their shards differ; `all_gather` it and `shard` it like the result "
      "(communicates)");
  refuse("A B, B C -> A C", "A B", "B C", "C/t",
         "the bias `C/t` is `C` in the result, so their shards differ; gather it with `all_gather<\"C/t -> C\">` "
         "(communicates)");
  refuse("A B, B C -> A C +t", "A B", "B C", "C", nothing_partial("t"));
}

TEST_CASE("rules: einsum with a sum over two axes, in any order of them") {
  legal(rules::einsum_reduced("A B/t/d, B/t/d C -> A C", "A B/t/d", "B/t/d C"), "A C");
  legal(rules::einsum_reduced("A B/t/d, B/t/d C -> A/d C/t", "A B/t/d", "B/t/d C"), "A/d C/t");
}

TEST_CASE("rules: shards that travel while an einsum runs") {
  const auto refuse_einsum_gathering = refusals("einsum_unreduced", rules::einsum_gathering);
  const auto refuse_einsum_scatter = refusals("einsum_scatter", rules::einsum_scatter);
  legal(rules::gathering("L/t M -> L M", "L/t M"), "L M");
  legal(rules::gathering("over<d>", "M/t/d F"), "M/t F");
  illegal(rules::gathering("L/t/d M -> L M", "L/t/d M"),
          "gathering<`L/t/d M -> L M`>: a product takes the shards of one dim over one axis, not those of `L` over t "
          "and `L` over d; take `all_gather` for all but one of them before (communicates)");
  illegal(rules::gathering("L M -> L M", "L M"),
          "gathering<`L M -> L M`>: no dim loses an axis, so nothing would be gathered; drop the gather");
  illegal(rules::gathering("over<t>", "L M"),
          "gathering<over<t>> of `L M`: the operand is replicated over t, so there is nothing to gather over it; drop "
          "the gather");

  legal(rules::einsum_gathering("L M, M F/t -> L F/t", "L/t M", "L M", "M F/t", true), "L F/t");
  legal(rules::einsum_gathering("M F/t, L M -> L F/t", "L/t M", "L M", "M F/t", false), "L F/t");
  legal(rules::einsum_gathering("L M, M F/t -> L F/t", "L M/t", "L M", "M F/t", true), "L F/t");
  refuse_einsum_gathering("L M, M F/t -> L F", "L/t M", "L M", "M F/t", true,
                          "dim `F/t` cannot become `F` in the result, as nothing moves between devices; keep the "
                          "sharding, or `all_gather` it first (communicates)");
  refuse_einsum_gathering(
      "M F +t, L M -> L F +t", "L/t M", "L M", "M F +t", false,
      "the first operand `M F +t` is partial over t, so all devices along t would multiply the same shards, each in an "
      "order of its own; shard a dim of it over t, or take `all_gather` in place of `gathering` (both communicate)");
  refuse_einsum_gathering("L M, M F/t K -> L F/t", "L/t M", "L M", "M F/t K", true,
                          "dim `K` is in the second operand alone and summed, so every shard would be summed along it "
                          "again; take `sum` along it before");

  legal(rules::einsum_reduced_gathering("L/d M/t, M/t F -> L/d F/t", "M/t/d F", "M/t F", "L/d M/t", false), "L/d F/t");
  illegal(rules::einsum_reduced_gathering("L/d M, M F/t -> L/d F/t", "M/d F/t", "M F/t", "L/d M", false),
          "einsum<`L/d M, M F/t -> L/d F/t`>: no sum over devices is completed in `L/d F/t`, so nothing would be "
          "communicated; write `einsum_unreduced`");

  legal(rules::einsum_scatter("L F/t, F/t M -> L/t M", "L F/t", "F/t M"), "L/t M");
  legal(rules::einsum_scatter("L/d F/t, L/d F/t M -> M/t +d", "L/d F/t", "L/d F/t M"), "M/t +d");
  refuse_einsum_scatter("L F/t, F/t M -> L M", "L F/t", "F/t M",
                        "each device's products are `L M +t`, and no `reduce_scatter` turns that into `L M`; write "
                        "`einsum_unreduced`, and then each collective");
  refuse_einsum_scatter("L F/t/d, F/t/d M -> L/d M/t", "L F/t/d", "F/t/d M",
                        "the products of one dim are scattered over one axis, not those of `L` over d and `M` over t; "
                        "take `einsum`, or scatter one of them afterwards (both communicate)");
  refuse_einsum_scatter(
      "L F +t, F M -> L/t M", "L F +t", "F M",
      "the first operand is partial over t, and its cotangent, which is one value on all of them, would be added in "
      "another order on each; take `einsum`, or `reduce_scatter` of the operand before (both communicate)");
  refuse_einsum_scatter("L F/t K, F/t M -> L/t M", "L F/t K", "F/t M",
                        "dim `K` is in the first operand alone and summed, so every shard would be summed along it "
                        "again; take `sum` along it before");
}

TEST_CASE("loops", "[rules]") {
  CHECK(rules::carry("fori", DType::f32, "B/d", DType::f32, "B/d").ok());
  illegal(
      rules::carry("fori", DType::f32, "B/d", DType::bf16, "B/d +t"),
      "fori: the carry is `f32[B/d]`, but the function returns `bf16[B/d +t]`, and the next iteration takes it: a "
      "sum over t is still pending in it; take `all_reduce<\"B/d +t -> B/d\", f32>` (communicates); write `cast<f32>`");
  illegal(rules::carry_type("scan", "State", "f32[B/d]"),
          "scan: the carry is `State`, but the function returns `f32[B/d]`, and the next iteration takes it; return "
          "`State` as the first of the pair");
  illegal(rules::loop_function("scan_layers", 2, -1, -1, false, "", ""),
          "scan_layers: the function does not take the 2 arguments that the loop passes; write f(carry, layer, extra "
          "arguments...)");
  illegal(rules::loop_function("fori", 3, 2, -1, false, "", ""),
          "fori: the function has 2 parameters, but the loop passes 3; write f(i, carry, extra arguments...)");
  illegal(
      rules::loop_function("fori", 2, 2, -1, false, "", ""),
      "fori: the function changes what it holds, as a `mutable` lambda does, but every iteration calls the same one; "
      "let the carry hold what changes, or write the loop in C++");
  illegal(rules::loop_function("scan", 2, 2, 1, true, "State", "State"),
          "scan: parameter 2 of the function, `State`, is not const; write `const State&`");
  illegal(rules::loop_function("scan", 2, 2, 0, false, "State", "f32[B]"),
          "scan: parameter 1 of the function is `State`, but the loop passes `f32[B]`; write f(carry, x, extra "
          "arguments...)");
  CHECK(rules::scan_result(true, "").ok());
  illegal(rules::scan_result(false, "State"),
          "scan: the function returns `State`; return std::pair(carry, y), where y is a tensor or a tree of tensors, "
          "which the loop stacks");
  illegal(rules::field_places("StackedNorm", "Norm", "bias"),
          "the fields of `StackedNorm` and `Norm` are paired by their places, but `bias` has another place in each; "
          "declare the fields in one order");
  illegal(
      rules::tree_structure("Gain", {1}, "Affine", {2}),
      "trees are paired leaf by leaf, but where one has `Gain`, a struct of 1 field, another has `Affine`, a struct of "
      "2 fields, so a leaf would have no partner; give trees of one structure");
  illegal(
      rules::tree_structure("Bias", {rules::TreeNode::optional}, "Kinds", {rules::TreeNode::variant, 2}),
      "trees are paired leaf by leaf, but where one has `Bias`, a std::optional, another has `Kinds`, a std::variant "
      "of 2 types, so a leaf would have no partner; give trees of one structure");
  illegal(rules::tree_structure("f32[M]", {rules::TreeNode::tensor}, "int", {}),
          "trees are paired leaf by leaf, but where one has `f32[M]`, a tensor, another has `int`, no tree, so a leaf "
          "would have no partner; give trees of one structure");
  CHECK(rules::layer_list(true, "").ok());
  illegal(rules::layer_list(false, "Model"),
          "scan_layers: `Model` is not an Array of layers; for a tree of stacked tensors name the stacked dim, "
          "`scan_layers<\"layer\">(f, stacked, x)`");
}

TEST_CASE("functions that run again, and trees", "[rules]") {
  illegal(
      rules::map_function(false, true),
      "map: the function takes plain numbers, which have no derivative; write `auto` for the types of its parameters");
  illegal(rules::plain_number(true),
          "map: a number of the function becomes a plain one here, which has no derivative; call exp, log, pow, "
          "maximum and the like without std::, write `x > 0` in place of `if (x)`, and cast no number");

  CHECK(rules::owned_function("map", true, true).ok());
  illegal(rules::owned_function("map", false, true),
          "map: the function captures by reference, or holds a pointer or a union, and it runs again in the backward "
          "pass, when "
          "what it refers to may be gone; capture nothing, or numbers by value: `[k]`");
  illegal(rules::owned_function("explicit_activation_checkpointing", false, false),
          "explicit_activation_checkpointing: the function holds more than numbers (a tensor, a container, a "
          "std::function), of which it cannot be told that they outlast the backward pass, where it runs again; pass "
          "tensors and configurations as arguments, and capture numbers by value: `[k]`");
  CHECK(rules::owned_argument("f", true, "int").ok());
  illegal(rules::owned_argument("f", false, "int*"),
          "f: the argument of type `int*` holds a pointer, a reference or a union, and the function runs again in the "
          "backward pass, when what it refers to may be gone; pass a type that owns what it needs");
  CHECK(rules::tree("f", true, "Weights", rules::NoTree::fields).ok());
  const std::string is =
      "; a tree is a tensor, an Array, std::optional or std::variant of trees, or a plain struct of 1 to 23 trees "
      "(nest structs for more), all public";
  illegal(rules::tree("f", false, "int", rules::NoTree::no_struct),
          "f: `int` is not a tree of tensors: it is not a struct" + is);
  illegal(rules::tree("f", false, "W", rules::NoTree::not_public),
          "f: `W` is not a tree of tensors: it has private members, a constructor or a virtual function" + is);
  illegal(rules::tree("f", false, "W", rules::NoTree::bases),
          "f: `W` is not a tree of tensors: it has a base class" + is);
  illegal(
      rules::tree("f", false, "W", rules::NoTree::tuple),
      "f: `W` is not a tree of tensors: its parts have no names; take a plain struct, or an argument for each" + is);
  illegal(rules::tree("f", false, "W", rules::NoTree::fields),
          "f: `W` is not a tree of tensors: it has more than 23 fields, or a reference" + is);
  illegal(rules::tree("f", false, "std::monostate", rules::NoTree::empty),
          "f: `std::monostate` is not a tree of tensors: it has no fields; where a model may have nothing, as in place "
          "of an alternative, take a std::optional" +
              is);
  illegal(
      rules::tree("f", false, "W", rules::NoTree::constant),
      "f: `W` is not a tree of tensors: it is const, or a field is const or a reference, so nothing can be assigned to "
      "it; write the type without const and `&`" +
          is);
  illegal(rules::tree("f", false, "W", rules::NoTree::c_array),
          "f: `W` is not a tree of tensors: a field is a C array; take an Array, `Array<\"layers\", Layer>`, or a "
          "std::array "
          "where it holds no tensors" +
              is);
  illegal(rules::einsum("A B, B C -> A C", "B C", "A B"),
          "einsum_unreduced<`A B, B C -> A C`>: the operands are swapped: the first is `B C`, the second `A B`; swap "
          "them in the call or in the op spec");
  illegal(rules::along("softmax", "B/d M -> B/d M", "B/d M"),
          "softmax<`B/d M -> B/d M`>: this op takes the name of one dim of the operand `B/d M`, not an op spec");
  illegal(rules::along("softmax", "M/t", "B/d M"), "softmax<`M/t`>: name the dim only, without axes: `M`");
  illegal(rules::mesh("d t d"), "mesh `d t d`: axis `d` appears twice");
  legal(rules::mesh("d dd"), "d dd");
}
// ---- laws, over every small spec ----

std::string dual(const std::string& spec) {
  Axes mesh;
  mesh.push_back("d");
  mesh.push_back("t");
  return str(rules::dual(spec, mesh));
}
std::string arrow(const std::string& from, const std::string& to) {
  return from + " -> " + to;
}
std::vector<std::string> pairs_of_dims() {
  return test::specs_of_any({{}, {"A"}, {"B"}, {"A", "B"}, {"B", "A"}});
}
bool same_dims(const std::string& a, const std::string& b) {
  return rules::same_names(parse_tensor(a).spec, parse_tensor(b).spec);
}
/// A cotangent brought to the dims of the operand it belongs to, as every VJP of a broadcasting op ends.
std::string unbroadcast(const std::string& cotangent, const std::string& operand) {
  if (same_dims(cotangent, operand)) return cotangent;
  const std::string op = arrow(cotangent, dual(operand));
  const auto verdict = rules::sum(op, cotangent);
  return verdict.ok() ? str(verdict.result) : "illegal: " + str(verdict.why);
}

TEST_CASE("law: the dual of the dual is the spec itself, and sharded stays") {
  for (const auto& x : pairs_of_dims()) {
    CHECK(dual(dual(x)) == str(to_string(parse_tensor(x).spec)));
    CHECK(rules::cotangent("op", dual(x), dual(x)).ok());
    for (const char* axis : {"d", "t"}) {
      const auto a = parse_tensor(x).spec.placement(axis);
      const std::string back = dual(x);
      const auto b = parse_tensor(back).spec.placement(axis);
      CHECK((a.kind == Placement::sharded ? a == b : a.kind != b.kind && b.kind != Placement::sharded));
    }
  }
}

TEST_CASE("law: a collective's transpose maps the dual of its result to the dual of its operand") {
  using Rule = rules::Verdict (*)(const ParsedOp&, const TensorSpec&);
  struct Pair {
    const char* name;
    Rule forward, backward;
    int legal;
  };
  // The counts are those of the enumeration below: a rule that grows stricter or laxer shows.
  Pair pairs[] = {{"all_gather", rules::all_gather, rules::reduce_scatter, 0},
                  {"reduce_scatter", rules::reduce_scatter, rules::all_gather, 0},
                  {"all_reduce", rules::all_reduce, rules::all_reduce, 0},
                  {"all_to_all", rules::all_to_all, rules::all_to_all, 0},
                  {"to_partial", rules::to_partial, rules::to_partial, 0},
                  {"rearrange", rules::rearrange, rules::rearrange, 0},
                  {"sum", rules::sum, rules::broadcast, 0},
                  {"mean", rules::mean, rules::broadcast, 0},
                  {"broadcast", rules::broadcast, rules::sum, 0}};
  const auto specs = pairs_of_dims();
  int shards = 0;
  for (const auto& x : specs)
    for (const auto& z : specs) {
      for (Pair& pair : pairs) {
        const std::string op = arrow(x, z);
        const auto forward = pair.forward(op, x);
        if (!forward.ok()) continue;
        ++pair.legal;
        CHECK(str(forward.result) == str(to_string(parse_tensor(z).spec)));
        const std::string ct = dual(z), transposed = arrow(ct, dual(x));
        const auto backward = pair.backward(transposed, ct);
        INFO(pair.name << " " << x << " -> " << z);
        CHECK(str(backward.why) == "");
        CHECK(str(backward.result) == dual(x));
      }
      // The transpose of shard pads with zeros, S -> P: what a reduce_scatter takes back.
      if (rules::shard(arrow(x, z), x).ok()) {
        ++shards;
        CHECK(str(rules::reduce_scatter(arrow(dual(x), dual(z)), dual(x)).why) == "");
      }
    }
  std::string counts;
  for (const Pair& pair : pairs) counts += std::string(pair.name) + " " + std::to_string(pair.legal) + ", ";
  CHECK(counts + "shard " + std::to_string(shards) ==
        "all_gather 60, reduce_scatter 60, all_reduce 37, all_to_all 40, to_partial 37, rearrange 96, sum 128, mean "
        "128, broadcast 128, shard 60");
}

TEST_CASE("law: a shift's transpose is a shift of the dual") {
  int legal = 0;
  for (const auto& x : pairs_of_dims())
    for (const char* axis : {"d", "t"}) {
      if (!rules::shift(x, axis, x).ok()) continue;
      ++legal;
      CHECK(rules::shift(dual(x), axis, dual(x)).ok());
    }
  CHECK(legal == 56);
}

TEST_CASE("law: the transposes of an einsum are einsums of duals, then a broadcast along what was summed away") {
  const auto xs = test::specs_of_any({{}, {"A"}, {"B"}, {"A", "B"}});
  const auto ys = test::specs_of_any({{"B"}, {"B", "C"}});
  const auto zs = test::specs_of_any({{}, {"A"}, {"B"}, {"C"}, {"A", "B"}, {"A", "C"}, {"A", "B", "C"}});
  // The dims of the operand that the cotangent or the other operand has.
  const auto reach = [](const std::string& operand, const std::string& a, const std::string& b) {
    TensorSpec reached = parse_tensor(operand).spec;
    for (int i = reached.rank() - 1; i >= 0; --i)
      if (!parse_tensor(a).spec.has(reached.dims[i].name) && !parse_tensor(b).spec.has(reached.dims[i].name))
        reached.dims.erase(i);
    return str(to_string(reached));
  };
  const auto transpose = [&](const std::string& z, const std::string& other, const std::string& x) {
    const std::string reached = reach(dual(x), z, other);
    const auto verdict = rules::einsum(dual(z) + ", " + other + " -> " + reached, dual(z), other);
    CHECK(str(verdict.why) == "");
    if (reached != dual(x)) CHECK(str(rules::broadcast(arrow(reached, dual(x)), reached).why) == "");
  };
  int legal = 0;
  for (const auto& x : xs)
    for (const auto& y : ys)
      for (const auto& z : zs) {
        if (!rules::einsum(x + ", " + y + " -> " + z, x, y).ok()) continue;
        ++legal;
        INFO("einsum " << x << ", " << y << " -> " << z);
        transpose(z, y, x);
        transpose(z, x, y);
      }
  CHECK(legal == 992);
}

TEST_CASE("law: the cotangents of elementwise ops have the duals of their operands") {
  const auto specs = pairs_of_dims();
  int sums = 0, products = 0, quotients = 0, maps = 0, wheres = 0;
  for (const auto& a : specs)
    for (const auto& b : specs) {
      INFO(a << " and " << b);
      if (const auto z = rules::add("+", a, b); z.ok()) {
        ++sums;
        const auto ct = dual(str(z.result));
        CHECK(unbroadcast(ct, a) == dual(a));
        CHECK(unbroadcast(ct, b) == dual(b));
      }
      if (const auto z = rules::multiply(a, b); z.ok()) {
        ++products;
        const auto ct = dual(str(z.result));
        CHECK(unbroadcast(str(rules::multiply(ct, b).result), a) == dual(a));
        CHECK(unbroadcast(str(rules::multiply(ct, a).result), b) == dual(b));
      }
      if (const auto z = rules::divide(a, b); z.ok()) {
        ++quotients;
        const auto ct = dual(str(z.result));
        CHECK(unbroadcast(str(rules::divide(ct, b).result), a) == dual(a));
        const auto numerator = rules::multiply(ct, a);  // -ct * a / (b * b)
        CHECK(unbroadcast(str(rules::divide(numerator.result, rules::multiply(b, b).result).result), b) == dual(b));
      }
      if (const auto z = rules::map2("map", a, b); z.ok()) {
        ++maps;
        const std::string of_result = dual(str(z.result));
        const auto ct = rules::multiply(of_result, z.result);  // the derivative has the result's spec
        CHECK(unbroadcast(str(ct.result), a) == dual(a));
        CHECK(unbroadcast(str(ct.result), b) == dual(b));
      }
      if (const auto z = rules::where(a, b, b); z.ok()) {
        ++wheres;
        const auto ct = dual(str(z.result));
        CHECK(unbroadcast(str(rules::where(a, ct, ct).result), b) == dual(b));
      }
    }
  CHECK(std::vector{sums, products, quotients, maps, wheres} == std::vector{352, 543, 352, 207, 352});
}

TEST_CASE("law: the cotangent of a looked-up table is scattered to the table's dual") {
  int legal = 0;
  for (const auto& table : test::specs_of_any({{"V"}, {"V", "M"}, {"V", "B"}}))
    for (const auto& indices : test::specs_of_any({{}, {"B"}, {"B", "L"}})) {
      const TensorSpec rows = parse_tensor(table).spec;
      const std::string v = str(to_string(rows.dims[0]));
      const std::string bracketed = "[" + v + "]" + table.substr(v.size());
      for (const auto& z : test::specs_of_any({{}, {"B"}, {"M"}, {"B", "M"}, {"B", "L"}, {"B", "L", "M"}})) {
        if (!rules::index(bracketed + ", " + indices + " -> " + z, table, indices).ok()) continue;
        ++legal;
        INFO("index " << bracketed << ", " << indices << " -> " << z);
        // One-hot indices: the indices with the looked-up dim.
        const std::string one_hot = indices + (indices.empty() ? "" : " ") + v;
        CHECK(str(rules::einsum(dual(z) + ", " + one_hot + " -> " + dual(table), dual(z), one_hot).why) == "");
      }
    }
  CHECK(legal == 206);
  legal = 0;
  for (const auto& table : test::specs_of_any({{"V", "W"}}))
    for (const auto& i : test::specs_of_any({{"B"}}))
      for (const auto& j : test::specs_of_any({{"B"}}))
        for (const auto& z : test::specs_of_any({{"B"}})) {
          const TensorSpec rows = parse_tensor(table).spec;
          const std::string v = str(to_string(rows.dims[0])), w = str(to_string(rows.dims[1]));
          const std::string sums = table.substr(v.size() + 1 + w.size());
          const std::string op = "[" + v + "] [" + w + "]" + sums + ", " + i + ", " + j + " -> " + z;
          if (!rules::index2(op, table, i, j).ok()) continue;
          ++legal;
          INFO("index " << op);
          const std::string of_v = i + " " + v, of_w = j + " " + w;
          CHECK(str(rules::einsum3(dual(z) + ", " + of_v + ", " + of_w + " -> " + dual(table), dual(z), of_v, of_w)
                        .why) == "");
        }
  // On an axis: all replicated, the table partial, or V, W or B sharded; on two axes also one dim in either order.
  CHECK(legal == 5 * 5 + 3);
}

TEST_CASE("law: the cotangent of logits is their dual") {
  int legal = 0;
  for (const auto& logits : test::specs_of_any({{"V"}, {"B", "V"}}))
    for (const auto& targets : test::specs_of_any({{}, {"B"}}))
      if (const auto z = rules::cross_entropy(logits, targets); z.ok()) {
        ++legal;
        CHECK(str(rules::multiply(logits, dual(str(z.result))).result) == dual(logits));  // (softmax - one_hot) * ct
      }
  CHECK(legal == 16);
}

TEST_CASE("law: the cotangents of both operands of linear_cross_entropy are products with that of the logits") {
  int legal = 0;
  for (const auto& x : test::specs_of_any({{"M"}, {"B", "M"}}))
    for (const auto& table : test::specs_of_any({{"V", "M"}}))
      for (const auto& logits : test::specs_of_any({{"V"}, {"B", "V"}}))
        for (const auto& targets : test::specs_of_any({{}, {"B"}})) {
          const std::string op = x + ", " + table + " -> " + logits;
          if (!rules::linear_cross_entropy(op, x, table, targets).ok()) continue;
          ++legal;
          INFO(op);
          const std::string ct = dual(logits);
          CHECK(str(rules::einsum(ct + ", " + table + " -> " + dual(x), ct, table).why) == "");
          CHECK(str(rules::einsum(ct + ", " + x + " -> " + dual(table), ct, x).why) == "");
        }
  CHECK(legal == 16);  // as many as of cross_entropy: M is whole
}

TEST_CASE("rules: causal_attention along a sharded length") {
  const auto attention = [](std::string_view over, std::string_view q, std::string_view k) {
    return rules::causal_attention_over("L", "D", over, q, k, k);
  };
  const auto in_segments = [](std::string_view q, std::string_view k, std::string_view s) {
    return rules::causal_attention_over_in_segments("L", "D", "over<s>", q, k, k, s);
  };
  legal(attention("over<s>", "B/d L/s Q K/t D", "B/d L/s K/t D"), "B/d L/s Q K/t D");
  legal(attention("over<s t>", "L/s/t Q D", "D L/s/t"), "L/s/t Q D");
  legal(in_segments("B/d L/s Q K/t D", "B/d L/s K/t D", "L/s"), "B/d L/s Q K/t D");
  const auto refuse = [](const rules::Verdict& verdict, const std::string& why) {
    illegal(verdict, "causal_attention<`L`, `D`, over<s>>: " + why);
  };
  refuse(attention("over<s>", "B L D", "B L D"),
         "dim `L` is not sharded, so nothing would be communicated; write `causal_attention<\"L\", \"D\">`");
  refuse(attention("over<s>", "L/s/t D", "L/s/t D"),
         "dim `L/s/t` is sharded over s t, and the keys of all its shards are seen; write `causal_attention<\"L\", "
         "\"D\", over<\"s t\">>`");
  refuse(attention("over<s>", "L/t D", "L/t D"),
         "dim `L/t` is sharded over t, and the keys of all its shards are seen; write `causal_attention<\"L\", \"D\", "
         "over<\"t\">>`");
  refuse(attention("over<s>", "X/s D", "X/s D"), "the operand `X/s D` has no dim `L`");
  refuse(attention("over<s>", "L/s D", "L D"),
         shards_differ("L", "L D", "L/s", "L/s D", "L/s D -> L D", "L D -> L/s D"));
  refuse(attention("over<s>", "L/s D/t", "L/s D/t"), gather_first("D/t", "L/s D/t", "L/s D"));
  refuse(attention("over<s>", "B L/s D", "B D"), "the keys `B D` have no dim `L`, along which positions count");
  refuse(in_segments("B L/s D", "B L/s D", "B L"),
         shards_differ("L", "B L", "L/s", "B L/s D", "B L/s D -> B L D", "B L -> B L/s"));
  refuse(in_segments("L/s D", "L/s D", "L/s D"),
         "the segments `L/s D` have the dim `D`; all of a head is in one segment");
}

TEST_CASE("rules: ulysses_attention") {
  const auto attention = [](std::string_view exchange, std::string_view q, std::string_view k) {
    return rules::ulysses_attention(exchange, "D", q, k, k);
  };
  legal(attention("L/s H -> L H/s", "B/d L/s Q H D", "B/d L/s H D"), "B/d L/s Q H D");
  legal(attention("L/u/s H/t -> L H/t/u/s", "L/u/s H/t D", "H/t L/u/s D"), "L/u/s H/t D");
  const auto refuse = [](const rules::Verdict& verdict, const std::string& why) {
    illegal(verdict, "ulysses_attention<`L/s H -> L H/s`, `D`>: " + why);
  };
  refuse(attention("L/s H -> L H/s", "B L/s D", "B L/s D"),
         "the queries `B L/s D` have no dim `H`, which the exchange names");
  refuse(attention("L/s H -> L H/s", "L/s H D", "L/s D"), "the keys `L/s D` have no dim `H`, which the exchange names");
  refuse(attention("L/s H -> L H/s", "L/s H/t D", "L/s H/t D"),
         "the queries `L/s H/t D` have `H/t`, but the exchange begins with `H`");
  refuse(attention("L/s H -> L H/s", "L/s H D/t", "L/s H D/t"),
         "after the exchange, causal_attention<`L`, `D`>: " + gather_first("D/t", "L H/s D/t", "L H/s D"));
  illegal(attention("L/s H -> L H", "L/s H D", "L/s H D"),
          "ulysses_attention<`L/s H -> L H`, `D`>: the exchange is an all_to_all<`L/s H -> L H`>: the sharding over s "
          "leaves one dim, but no other dim gains it; take `all_gather` to drop a sharding (communicates)");
  illegal(attention("L/s H +d -> L H/s +d", "L/s H D", "L/s H D"),
          "ulysses_attention<`L/s H +d -> L H/s +d`, `D`>: write the length and the heads before and after the "
          "exchange, as in `L/s H -> L H/s`");
  illegal(attention("L/s/t H -> L/s H/t", "L/s/t H D", "L/s/t H D"),
          "ulysses_attention<`L/s/t H -> L/s H/t`, `D`>: the length, which is the first dim, is still sharded after "
          "the exchange: `L/s`; all of its axes move to the heads");
  illegal(attention("L/s -> L", "L/s H D", "L/s H D"),
          "ulysses_attention<`L/s -> L`, `D`>: write the length and the heads before and after the exchange, as in "
          "`L/s H -> L H/s`");
  illegal(attention("L/s D -> L D/s", "L/s D", "L/s D"),
          "ulysses_attention<`L/s D -> L D/s`, `D`>: the products are summed over another dim than the heads");
  const auto in_segments = [](std::string_view segments) {
    return rules::ulysses_attention_in_segments("L/s H -> L H/s", "D", "B/d L/s H D", "B/d L/s H D", "B/d L/s H D",
                                                segments);
  };
  legal(in_segments("B/d L/s"), "B/d L/s H D");
  legal(in_segments("L/s"), "B/d L/s H D");
  refuse(in_segments("B/d L"), "the segments `B/d L` have `L`, but the exchange begins with `L/s`");
  refuse(in_segments("L/s H"), "the segments `L/s H` have the dim `H`, but all heads of a position are in one segment");
  refuse(in_segments("B L/s"),
         "after the exchange, causal_attention<`L`, `D`>: " +
             shards_differ("B", "B L", "B/d", "B/d L H/s D", "B/d L H/s D -> B L H/s D", "B L -> B/d L"));
}

TEST_CASE("law: the cotangents of keys and values are summed over the query heads that share them") {
  int legal = 0;
  for (const auto& q : test::specs_of_any({{"L", "D"}, {"L", "Q", "D"}, {"B", "L", "K", "D"}}))
    for (const auto& k : test::specs_of_any({{"L", "D"}, {"B", "L", "D"}, {"B", "L", "K", "D"}}))
      if (const auto z = rules::causal_attention("L", "D", q, k, k); z.ok()) {
        ++legal;
        const std::string ct = dual(str(z.result));
        INFO(q << " and " << k);
        CHECK(str(rules::einsum(ct + ", " + q + " -> " + dual(k), ct, q).why) == "");
      }
  // Each axis is replicated or on a batch dim, two of them in both orders; keys follow the queries where they have the
  // dim.
  CHECK(legal == 1 + 5 + 3 * 11);
}

// ---- advice ----

/// The ops that a text suggests, `name<"from -> to">`.
struct Advice {
  std::string op, spec;
};
std::vector<Advice> advice_in(const std::string& text) {
  std::vector<Advice> found;
  for (std::size_t end = text.find("\">`"); end != std::string::npos; end = text.find("\">`", end + 1)) {
    const std::size_t start = text.rfind('`', end);
    const std::size_t open = text.find("<\"", start);
    found.push_back({text.substr(start + 1, open - start - 1), text.substr(open + 2, end - open - 2)});
  }
  return found;
}
rules::Verdict follow(const Advice& advice, const std::string& x) {
  if (advice.op == "all_gather") return rules::all_gather(advice.spec, x);
  if (advice.op == "reduce_scatter") return rules::reduce_scatter(advice.spec, x);
  if (advice.op == "all_reduce") return rules::all_reduce(advice.spec, x);
  if (advice.op == "all_to_all") return rules::all_to_all(advice.spec, x);
  if (advice.op == "shard") return rules::shard(advice.spec, x);
  if (advice.op == "to_partial") return rules::to_partial(advice.spec, x);
  if (advice.op == "rearrange") return rules::rearrange(advice.spec, x);
  if (advice.op == "rename") return rules::rename(advice.spec, x);
  return {{}, "no such op: " + rules::Text(advice.op)};
}

TEST_CASE("law: a suggested op is legal on one of the operands") {
  int suggestions = 0;
  const auto check = [&](const rules::Verdict& verdict, const std::vector<std::string>& operands) {
    for (const Advice& advice : advice_in(str(verdict.why))) {
      ++suggestions;
      bool ok = false;
      for (const auto& x : operands) ok = ok || follow(advice, x).ok();
      INFO(str(verdict.why));
      CHECK(ok);
    }
  };
  const auto specs = pairs_of_dims();
  for (const auto& a : specs) {
    check(rules::map1("exp", a), {a});
    check(rules::along("softmax", "A", a), {a});
    check(rules::item(a), {a});
    for (const auto& b : specs) {
      check(rules::assign(DType::f32, a, DType::f32, b), {b});
      check(rules::add("+", a, b), {a, b});
      check(rules::multiply(a, b), {a, b});
      check(rules::divide(a, b), {a, b});
      check(rules::where(a, b, b), {a, b});
      check(rules::concat("A, A -> N", a, b), {a, b});
      check(rules::all_gather("A/t B -> A B", a), {a});
      check(rules::reduce_scatter("A +t -> A/t", a), {a});
      check(rules::einsum("A B/t, B/t -> A +t", a, b), {a, b});
      check(rules::einsum(a + ", " + b + " -> A", a, b), {a, b});
    }
  }
  CHECK(suggestions > 10000);
}

TEST_CASE("law: a conversion to the declared type is advised wherever one op does it") {
  CHECK(advice_in(str(rules::assign(DType::f32, "A", DType::f32, "A/t/d").why)).size() == 1);
  const auto specs = pairs_of_dims();
  for (const auto& a : specs)
    for (const auto& b : specs) {
      if (parse_tensor(a).spec == parse_tensor(b).spec) continue;
      bool possible = false;
      for (const char* op :
           {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shard", "to_partial", "rearrange"})
        possible = possible || follow({op, arrow(a, b)}, a).ok();
      const auto advice = advice_in(str(rules::assign(DType::f32, b, DType::f32, a).why));
      INFO(a << " -> " << b);
      CHECK((possible ? advice.size() == 1 : advice.empty() || advice[0].op == "rename"));
      if (!advice.empty()) CHECK(str(follow(advice[0], a).result) == str(to_string(parse_tensor(b).spec)));
    }
}

}  // namespace
