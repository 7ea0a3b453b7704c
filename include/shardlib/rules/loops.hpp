// Typing rules of loops: scan_layers, fori, scan; and of the functions of for_each_leaf and map_tree.
#pragma once

#include "shardlib/rules/dtypes.hpp"
#include "shardlib/rules/grad.hpp"
#include "shardlib/spec/dtype.hpp"

#include <string_view>

namespace shardlib::rules {

/// The function of for_each_leaf or map_tree.
enum class LeafFunction { not_called, no_tensor };
constexpr Verdict leaf_function(std::string_view op, LeafFunction wrong) {
  if (wrong == LeafFunction::no_tensor)
    return {
        {},
        Text(op) + ": the function returns no tensor; return the one for the place of the leaf, or take for_each_leaf"};
  return {{},
          Text(op) + (op == "map_tree" ? ": the function does not take a leaf of each tree, without the name; write "
                                         "`map_tree([](const auto& leaf) { return leaf * 2.0; }, tree)`"
                                       : ": the function does not take a name and a leaf of each tree; write "
                                         "`for_each_leaf([](std::string_view name, auto& leaf) { ... }, tree)`")};
}

/// scan_layers, fori, scan: the reason why the function does not accept what the loop passes to it, `args` arguments.
constexpr Verdict loop_function(std::string_view op, int args, int parameters, int at, bool not_const,
                                std::string_view declared, std::string_view given) {
  const Text form = Text("; write ") + (op == "fori"   ? "f(i, carry, extra arguments...)"
                                        : op == "scan" ? "f(carry, x, extra arguments...)"
                                                       : "f(carry, layer, extra arguments...)");
  if (at < 0 && parameters == args)
    return {{},
            Text(op) +
                ": the function changes what it holds, as a `mutable` lambda does, but every iteration calls the "
                "same one; let the carry hold what changes, or write the loop in C++"};
  return misfit(Text(op) + ": ", parameters, at, not_const, declared,
                "the " + number(args) + " arguments that the loop passes" + form,
                "the loop passes " + number(args) + form,
                " is " + quoted(declared) + ", but the loop passes " + quoted(given) + form);
}

/// scan_layers, fori, scan: the function returns another tensor than it takes.
constexpr Verdict carry(std::string_view op, DType carry_dtype, const TensorSpec& carry, DType returned_dtype,
                        const TensorSpec& returned) {
  const TensorSpec &is = returned, &due = carry;
  if (is == due && returned_dtype == carry_dtype) return {};
  Text why = Text(op) + ": the carry is " + quoted(Text(name(carry_dtype)) + "[" + to_string(due) + "]") +
             ", but the function returns " + quoted(Text(name(returned_dtype)) + "[" + to_string(is) + "]") +
             ", and the next iteration takes it";
  if (!(is == due)) {
    why = why + ": " + difference(is, due);
    if (const Text advice = conversion(is, due); !advice.empty())
      why = why + "; " + (returned_dtype == DType::bf16 ? sums_in_f32(advice) : advice);
  }
  if (returned_dtype != carry_dtype) why = why + "; write " + quoted(Text("cast<") + name(carry_dtype) + ">");
  return {{}, why};
}
/// The same of other types.
constexpr Verdict carry_type(std::string_view op, std::string_view carry, std::string_view returned) {
  return {{},
          Text(op) + ": the carry is " + quoted(carry) + ", but the function returns " + quoted(returned) +
              ", and the next iteration takes it; return " + quoted(carry) +
              (op == "scan" ? " as the first of the pair" : "")};
}
/// scan: the function returns the carry, and a tensor or a tree.
constexpr Verdict scan_result(bool is_pair, std::string_view returned) {
  if (is_pair) return {};
  return {{},
          "scan: the function returns " + quoted(returned) +
              "; return std::pair(carry, y), where y is a tensor or a tree of tensors, which the loop stacks"};
}
/// scan_layers: the layers are an Array.
constexpr Verdict layer_list(bool is_list, std::string_view type) {
  if (is_list) return {};
  return {{},
          "scan_layers: " + quoted(type) +
              " is not an Array of layers; for a tree of stacked tensors name the stacked dim, "
              "`scan_layers<\"layer\">(f, stacked, x)`"};
}

}  // namespace shardlib::rules
