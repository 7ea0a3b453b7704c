// The sentences for operators of C++ that tensors do not have.
#pragma once

#include "shardlib/rules/common.hpp"

#include <string_view>

namespace shardlib::rules {

/// A comparison by an operator of C++.
constexpr Verdict no_operator(std::string_view symbol, std::string_view name, const TensorSpec& x) {
  return {{},
          Text(symbol) + " of " + quoted(x) +
              ": tensors are not compared by an operator, whose result is one bool; write `" + name +
              "(x, y)`, which gives one for each element, or compare numbers, as `item(x)`"};
}

/// An operator of C++ that tensors do not have.
constexpr Verdict no_symbol(std::string_view symbol, std::string_view name, const TensorSpec& x) {
  return {
      {},
      Text(symbol) + " of " + quoted(x) + ": tensors have no such operator; write " + quoted(Text(name) + "(x, y)")};
}
/// An operand of + - * / that is neither a tensor nor a number.
constexpr Verdict no_operand(std::string_view symbol, std::string_view type, const TensorSpec& x) {
  return {{},
          Text(symbol) + " of " + quoted(x) + ": the other operand, " + quoted(type) +
              ", is neither a tensor nor a number; `place` values of the host on the mesh first, and take the value of "
              "what may be empty, `*y`"};
}
/// `x.size(0)`: a dim, or an axis of a mesh, by its number.
constexpr Verdict no_number(std::string_view call, std::string_view what, const TensorSpec& x) {
  const Text name = x.rank() == 0 ? Text("M") : Text(x.dims[0].name);
  return {{},
          Text(call) + " of " + quoted(x) + ": " + what + " has a name and no number; write " +
              quoted(Text(call) + "(\"" + name + "\")")};
}

/// A bool_ tensor as a condition of C++. Other tensors are one: whether they hold a value.
constexpr Verdict no_condition(const TensorSpec& x) {
  return {{},
          "a condition on " + quoted("bool_[" + to_string(x) + "]") +
              " would ask whether the tensor holds a value, not whether its elements are true; write `item(x)` of a "
              "scalar, which `any` and `all` make, or `logical_and`, `logical_or` and `equal(x, 0.0)` in place of "
              "`&&`, `||` and `!`"};
}

/// An element by number.
constexpr Verdict no_subscript(const TensorSpec& x) {
  return {{},
          "[] of " + quoted(x) +
              ": a device holds a shard, so a tensor has no element by number; take a part along an unsharded dim with "
              "`narrow<\"M -> N\">(x, begin, size)` (a local copy), rows by indices with `index_unreduced`, all parts "
              "along the first dim with `unstack`, or read this device's shard with `x.span()[i]`"};
}

}  // namespace shardlib::rules
