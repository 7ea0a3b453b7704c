// Compile errors for arithmetic of structs of tensors.
#pragma once

#include <type_traits>

#include "shardlib/types/tensor.hpp"
#include "shardlib/types/tree.hpp"

namespace shardlib {

namespace detail {
/// A struct or an Array of tensors, for which there are no operators. Whether an incomplete type is one is not known.
template <class T>
concept tree_of_several = requires {
  sizeof(T);
}
&&!is_tensor<T> && !is_choice<T> && is_tree<T>();
/// The other operand of such an operator. The conversion makes any operator of the program the better one.
struct OtherOperand {
  template <class X>
  OtherOperand(const X&);  // NOLINT(google-explicit-constructor): it is the operand
};
struct OtherNumber {
  template <class X>
  requires std::is_arithmetic_v<X> OtherNumber(X);  // NOLINT(google-explicit-constructor): it is the operand
};
}  // namespace detail

// A compile error for arithmetic of structs of tensors.
#define SHARDLIB_NO_TREE_OPERATOR(op, Tree)                                           \
  static_assert(std::is_void_v<Tree>, #op                                             \
                " has no form for structs of tensors; write "                         \
                "map_tree([](const auto& w, const auto& g) { return w - g * 0.1; }, " \
                "weights, grads), or accumulate(sums, grads) for a sum")
#define SHARDLIB_TREE_OPERATOR(op)                           \
  template <detail::tree_of_several Tree>                    \
  Tree operator op(const Tree& tree, detail::OtherOperand) { \
    SHARDLIB_NO_TREE_OPERATOR(op, Tree);                     \
    return tree;                                             \
  }
#define SHARDLIB_TREE_OPERATORS(op)                                \
  SHARDLIB_TREE_OPERATOR(op)                                       \
  SHARDLIB_TREE_OPERATOR(op## =)                                   \
  template <detail::tree_of_several Tree>                          \
  Tree operator op(detail::OtherNumber number, const Tree& tree) { \
    return tree op number;                                         \
  }
/// A compile error that names `accumulate`. `accumulate(sums, grads)`
SHARDLIB_TREE_OPERATORS(+)
/// A compile error that names `map_tree`. `map_tree([](const auto& w, const auto& g) { return w - g; }, weights,
/// grads)`
SHARDLIB_TREE_OPERATORS(-)
/// A compile error that names `map_tree`. `map_tree([](const auto& g) { return g * 0.1; }, grads)`
SHARDLIB_TREE_OPERATORS(*)
/// A compile error that names `map_tree`. `map_tree([](const auto& g) { return g / 2.0; }, grads)`
SHARDLIB_TREE_OPERATORS(/)
#undef SHARDLIB_TREE_OPERATORS
#undef SHARDLIB_TREE_OPERATOR
namespace detail {
/// The operand of a minus. The conversion makes any operator of the program the better one.
struct Negated {
  template <tree_of_several Tree>
  Negated(const Tree&) {  // NOLINT(google-explicit-constructor): it is the operand
    SHARDLIB_NO_TREE_OPERATOR(-, Tree);
  }
  template <class Any>
  operator Any() const;  // NOLINT(google-explicit-constructor): one mistake gives one error
};
}  // namespace detail
inline detail::Negated operator-(detail::Negated tree) {
  return tree;
}
#undef SHARDLIB_NO_TREE_OPERATOR

}  // namespace shardlib
