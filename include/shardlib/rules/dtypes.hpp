// The dtypes that ops accept, and the dtypes in which they sum.
#pragma once

#include "shardlib/rules/common.hpp"
#include "shardlib/spec/dtype.hpp"

#include <cstddef>
#include <string_view>

namespace shardlib::rules {

/// All operands must have one dtype, of a kind that the op computes with. There is no implicit promotion.
constexpr Verdict same_dtype(std::string_view op, DType a, DType b) {
  const bool logical = op.starts_with("logical_"), arithmetic = op.size() == 1;
  if (a == b && (a == DType::bool_ ? !arithmetic : !logical)) return {};
  const Text operands = Text(op) + ": the operands are " + name(a) + (a == b ? Text() : Text(" and ") + name(b));
  if (logical && a != DType::bool_ && b != DType::bool_)
    return {{}, operands + ", not bool_; compare them first, e.g. `not_equal`"};
  if (a == b) return {{}, operands + ", which has no arithmetic; write `cast<f32>` of them first"};
  // The operand whose numbers are of the poorer kind is cast; of a logical op, the other one.
  const auto kind = [](DType d) { return d == DType::bool_ ? 0 : is_floating(d) ? 2 : 1; };
  const int richer = (kind(a) - kind(b)) * (logical ? -1 : 1);
  const Text first = quoted(Text("cast<") + name(b) + ">") + " of the first",
             second = quoted(Text("cast<") + name(a) + ">") + " of the second";
  return {{},
          operands + ", and no dtype is promoted silently; write " +
              (richer > 0   ? second
               : richer < 0 ? first
                            : second + " or " + first)};
}

/// The dtype of an op that computes only with floating-point numbers.
constexpr Verdict floating_dtype(std::string_view op, DType x) {
  if (is_floating(x)) return {};
  if (op.starts_with("random_"))
    return {{}, Text(op) + ": random numbers are floating, not " + name(x) + "; draw f32 and `cast` them"};
  return {{}, Text(op) + ": the operand is " + name(x) + ", not floating; write `cast<f32>` of it first"};
}

/// / of integers and a floating-point number of C++.
constexpr Verdict rounds_quotient(DType dtype, const TensorSpec& x) {
  return {{},
          "/ of " + quoted(x) + " and a floating-point number: the elements are " + name(dtype) +
              ", so each quotient would lose its fraction; write `cast<f32>(x) / 2.0`, or `x / 2` for whole quotients"};
}

/// The dtype of an op of a tensor and a number, and of negation.
constexpr Verdict arithmetic_dtype(std::string_view op, DType x) {
  if (x != DType::bool_) return {};
  return {{}, Text(op) + ": the operand is bool_, which has no arithmetic; write `cast<f32>` of it first"};
}

/// The dtype of a reduction on one device or over devices.
constexpr Verdict reduced_dtype(std::string_view op, DType x) {
  if (x != DType::bool_ && x != DType::u8) return {};
  const bool pending = op == "all_reduce" || op == "reduce_scatter" || op == "fetch";  // cast takes none
  return {{},
          Text(op) + ": the operand is " + name(x) + ", which is not reduced; write `cast<i32>` of it " +
              (pending ? "before its sum is pending" : "first")};
}

/// The dtype in which reduce_scatter and all_reduce sum over devices. It is the operand's; for bf16 it is f32, and
/// the program has to state it.
constexpr Verdict sum_dtype(std::string_view op, DType x, DType sum) {
  const DType right = x == DType::bf16 ? DType::f32 : x;
  if (sum == right) return {};
  const Text form = Text(op) + "<\"...\", " + name(right) + ">";
  return {{},
          Text(op) + ": " + name(x) + " is not summed in " + name(sum) + "; write `" + form +
              (x == DType::bf16 ? "`: bf16 on the wire, an f32 sum, one rounding" : "`, or leave the dtype out")};
}

/// The message with `, f32` in each `all_reduce<"...">` and `reduce_scatter<"...">` that it recommends: a sum of bf16
/// states its dtype.
constexpr Text sums_in_f32(std::string_view why) {
  Text text;
  for (std::size_t at = 0;;) {
    const std::size_t reduce = detail::find(why, "all_reduce<\"", at);
    const std::size_t scatter = detail::find(why, "reduce_scatter<\"", at);
    const std::size_t call = reduce < scatter ? reduce : scatter;
    if (call == detail::npos) return text + why.substr(at);
    const std::size_t end = detail::find(why, "\">", call) + 1;
    text = text + why.substr(at, end - at) + ", f32";
    at = end;
  }
}
/// A rule, whose remedies for bf16 state the dtype of a sum.
template <auto Rule, DType D>
inline constexpr auto with_dtype = Rule;
template <auto Rule>
struct OfBf16 {
  constexpr Verdict operator()(const auto&... args) const {
    const Verdict verdict = Rule(args...);
    return {verdict.result, sums_in_f32(verdict.why)};
  }
};
template <auto Rule>
inline constexpr auto with_dtype<Rule, DType::bf16> = OfBf16<Rule>{};

/// A tensor made of numbers, which do not say on which mesh it is.
constexpr Verdict no_values(DType dtype, const TensorSpec& x) {
  TensorSpec whole = x;
  whole.partial = {};
  const Text type = Text(name(dtype)) + ", \"" + whole + "\"";
  Text sizes, names;
  for (const Dim& dim : x.dims) {
    names = names + (names.empty() ? "" : ", ") + dim.name;
    if (!dim.is_integer()) sizes = sizes + (sizes.empty() ? "{\"" : ", {\"") + dim.name + "\", 8}";
  }
  return {
      {},
      "a tensor " + quoted(Text(name(dtype)) + "[" + x + "]") +
          " is not made of numbers, which do not say on which mesh it is; write " +
          quoted("full<" + type + ">(mesh, {" + sizes + "}, 1.0)") + ", or for the values of an array " +
          quoted("place<Tensor<" + type + ">>(mesh, HostArray<" + Text(name(dtype)) + ">({" + names + "}, values))") +
          (x.partial.empty() ? Text() : ", and take `to_partial` of it (no traffic)")};
}

/// Reports a tensor whose type differs from the declared type of a return value, a parameter or a variable.
constexpr Verdict assign(DType to_dtype, const TensorSpec& to, DType from_dtype, const TensorSpec& from) {
  const bool same = from == to;
  if (same && from_dtype == to_dtype) return {};
  Text why = "a tensor " + quoted(Text(name(from_dtype)) + "[" + from + "]") + " does not fit the declared type " +
             quoted(Text(name(to_dtype)) + "[" + to + "]");
  if (!same) {
    why = why + ": " + difference(from, to);
    if (const Text advice = conversion(from, to); !advice.empty()) why = why + "; " + advice;
  }
  if (from_dtype != to_dtype)
    why = why + (!same ? "; and the dtype is " : ": the dtype is ") + name(from_dtype) + ", so write " +
          quoted(Text("cast<") + name(to_dtype) + ">");
  return {{}, from_dtype == DType::bf16 ? sums_in_f32(why) : why};
}

/// The dtype in which the backward pass of all_gather sums. The program states it as backward_sum.
constexpr Verdict backward_sum_dtype(bool is_named, DType x, DType sum) {
  const DType right = x == DType::bf16 ? DType::f32 : x;
  const Text form = quoted(Text("all_gather<\"...\", backward_sum<") + name(right) + ">>");
  if (!is_named)
    return {{},
            Text("all_gather: ") + name(sum) + " would be the dtype of what its backward pass sums; write " + form +
                ", or leave it out"};
  if (sum == right) return {};
  return {{},
          Text("all_gather: the gradient of ") + name(x) + " is not summed in " + name(sum) + "; write " + form +
              ", or leave it out"};
}

/// fetch(tree): the arrays of all leaves have one dtype.
constexpr Verdict fetched_leaf(DType arrays, DType leaf, const TensorSpec& x) {
  if (leaf == arrays) return {};
  return {{},
          Text("fetch: the leaf ") + quoted(Text(name(leaf)) + "[" + x + "]") + " is not an array of " + name(arrays) +
              ", and all arrays of a tree have one dtype; if all leaves are " + name(leaf) + ", write `fetch<" +
              name(leaf) + ">(tree)`, else `fetch` each leaf, as in `for_each_leaf`"};
}

/// A view of a tensor that no variable holds.
constexpr Verdict no_view(std::string_view function, const TensorSpec& x) {
  return {{},
          Text(function) + " of " + quoted(x) +
              ": no variable holds the tensor, so its elements are gone when the statement ends; name it first, "
              "`const auto y = relu(x);`, and take " +
              quoted(function == "span" ? Text("y.span()") : Text(function) + "(y)")};
}

/// place(mesh, host arrays): a leaf of the struct.
constexpr Verdict placed_leaf(DType arrays, DType leaf, const TensorSpec& x) {
  if (leaf == arrays) return {};
  return {{},
          Text("place: the leaf ") + quoted(Text(name(leaf)) + "[" + x + "]") + " is not made of an array of " +
              name(arrays) + "; give arrays of " + name(leaf) + ", or `place` each leaf, as in `for_each_leaf`"};
}

/// The dtype of indices into a table.
constexpr Verdict index_dtype(std::string_view op, DType indices) {
  if (indices == DType::i32 || indices == DType::u32) return {};
  return {{}, Text(op) + ": the indices are " + name(indices) + ", not i32 or u32; write `cast<i32>` of them first"};
}

/// The dtype of the condition of where and masked.
constexpr Verdict condition_dtype(std::string_view op, DType condition) {
  if (condition == DType::bool_) return {};
  return {{},
          Text(op) + ": the condition is " + name(condition) + ", not bool_; compare it first, e.g. `greater(x, 0.0)`"};
}

/// The dtypes of a norm with a scale. The result of bf16 and f32 is either; that of f64 is f64.
constexpr Verdict norm_dtypes(std::string_view op, DType x, DType scale, DType bias, DType result) {
  if (const Verdict floats = floating_dtype(op, x); !floats.ok()) return floats;
  const DType sum = x == DType::bf16 ? DType::f32 : x;
  const Text of = Text(op) + " of " + name(x) + ": ";
  if (scale != x && scale != sum)
    return {{},
            of + "the scale is " + name(scale) + ", not " + name(x) + (sum == x ? Text() : " or f32") + "; write " +
                quoted(Text("cast<") + name(sum) + ">") + " of it first"};
  if (bias != scale)
    return {{},
            of + "the bias is " + name(bias) + " and the scale " + name(scale) + ", and both have one dtype; write " +
                quoted(Text("cast<") + name(scale) + ">") + " of the bias first"};
  if (result == x || (sum == DType::f32 && (result == DType::bf16 || result == DType::f32))) return {};
  return {{},
          of + "the result cannot be had as " + name(result) + ", only as " +
              (sum == DType::f32 ? "f32 or bf16" : "f64") + "; write " + quoted(Text("cast<") + name(result) + ">") +
              " of the result"};
}

/// The bias of a product has the dtype of its operands.
constexpr Verdict bias_dtype(std::string_view op, DType operands, DType bias) {
  if (bias == operands) return {};
  return {{},
          Text(op) + " of " + name(operands) + ": the bias is " + name(bias) +
              ", and no dtype is promoted silently; write " + quoted(Text("cast<") + name(operands) + ">") +
              " of the bias first"};
}

/// The dtypes of an einsum: floating-point operands. For bf16 and f32 the result is either; for f64 it is f64.
constexpr Verdict einsum_dtype(DType operands, DType result) {
  const Text title("einsum_unreduced: ");
  if (!is_floating(operands))
    return {{}, title + "the operands are " + name(operands) + ", not floating; write `cast<f32>` of them first"};
  const bool summed_in_f32 = operands == DType::bf16 || operands == DType::f32;
  if (result == operands || (summed_in_f32 && (result == DType::bf16 || result == DType::f32))) return {};
  return {{},
          title + "the sums of " + name(operands) + " cannot be had as " + name(result) + ", only as " +
              (summed_in_f32 ? "f32 or bf16" : "f64") + "; write " + quoted(Text("cast<") + name(result) + ">") +
              " of the result or of the operands"};
}

}  // namespace shardlib::rules
