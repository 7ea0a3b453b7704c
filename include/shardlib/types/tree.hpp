// Plain structs of tensors as trees: their leaves with names, map and zip. The struct needs no extra code.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/types/entries.hpp"
#include "shardlib/types/fields.hpp"
#include "shardlib/types/signature.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib {

namespace detail {

/// The types of what stands below a node, as a tuple: of its entries or its fields.
template <class T>
struct parts_below {
  using type = field_types<T>;
};
template <class T>
requires has_entries<T>
struct parts_below<T> : entry_types<T> {
};
template <class T>
using parts_below_t = typename parts_below<T>::type;

/// Calls f with a leaf. If the leaf is empty, the error gives its path.
template <class F, class... Leaf>
decltype(auto) with_leaf(const Path& path, F&& f, Leaf&... leaf) {
  try {
    return f(leaf...);
  } catch (const EmptyTensor& error) {
    if (path.above == nullptr) throw;
    throw EmptyTensor("the leaf `" + path.text() + "`: " + error.what());
  }
}

/// The kind of a node of a tree: a tensor, a node with entries, or a struct with its number of fields.
template <class T>
consteval rules::TreeNode tree_node() {
  if constexpr (is_tensor<T>)
    return {rules::TreeNode::tensor};
  else if constexpr (is_array<T>)
    return {rules::TreeNode::array};
  else if constexpr (is_optional<T>)
    return {rules::TreeNode::optional};
  else if constexpr (is_variant<T>)
    return {rules::TreeNode::variant, static_cast<int>(std::tuple_size_v<parts_below_t<T>>)};
  else if constexpr (has_fields<T>())
    return {static_cast<int>(tree_width<T>)};
  else
    return {};
}
// nvcc's front end prints the names of some fields otherwise, so builds without a GPU check their order.
#if defined(__NVCC__)
inline constexpr bool checks_order = false;
#else
inline constexpr bool checks_order = true;
#endif

/// Whether the same stands at a place of both trees; if not, a compile error.
template <class A, class B>
constexpr bool same_node() {
  if constexpr (std::is_same_v<A, B> || tree_node<A>() == tree_node<B>())
    return true;
  else
    return checked<rules::tree_structure, name_of_type<A>, tree_node<A>(), name_of_type<B>, tree_node<B>()>::ok &&
           false;
}

/// The first field of A whose name another field of B has, or the number of fields.
template <class A, class B, std::size_t... I>
consteval std::size_t moved_field(std::index_sequence<I...> /*fields*/) {
  const std::string_view a[] = {field_name<A, I>()...}, b[] = {field_name<B, I>()...};
  for (std::size_t i = 0; i < sizeof...(I); ++i)
    for (std::size_t k = 0; k < sizeof...(I); ++k)
      if (i != k && a[i] == b[k]) return i;
  return sizeof...(I);
}
/// Whether the same stands at a place of both trees, or a compile error and false. If a field of the struct A has
/// another place in B, that is a compile error too, but the result is true. Trees pair fields by their places, so two
/// fields of one type would be swapped.
template <class TreeA, class TreeB>
constexpr bool check_places() {
  using A = typename named_as<TreeA>::type;
  using B = typename named_as<TreeB>::type;
  if constexpr (!same_node<A, B>()) {
    return false;
  } else if constexpr (checks_order && !std::is_same_v<A, B> && std::is_aggregate_v<A> && std::is_aggregate_v<B>) {
    constexpr std::size_t moved = moved_field<A, B>(std::make_index_sequence<tree_width<A>>{});
    if constexpr (moved < tree_width<A>)
      return checked<rules::field_places, name_of_type<A>, name_of_type<B>, Literal(field_name<A, moved>())>::ok;
  }
  return true;
}

/// Calls f(path, leaf, leaf of the second tree, ...) for each leaf. Throws if nodes at the same path
/// have different entries.
template <class F, class Tree, class... More>
void visit(F& f, const Path& path, Tree& tree, More&... more) {
  using T = std::remove_const_t<Tree>;
  if constexpr (!(check_places<T, std::remove_const_t<More>>() && ...)) {
    return;  // after a compile error
  } else if constexpr (is_tensor<T>) {
    f(path, tree, more...);
  } else if constexpr (has_entries<T>) {
    each_entry([&f](const Path& at, auto&... entry) { visit(f, at, entry...); }, path, tree, more...);
  } else {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (visit_field<I>(f, path, tree, more...), ...);
    }
    (std::make_index_sequence<tree_width<T>>{});
  }
}
template <std::size_t I, class F, class Tree, class... More>
void visit_field(F& f, const Path& path, Tree& tree, More&... more) {
  constexpr std::string_view field = field_name<typename named_as<std::remove_const_t<Tree>>::type, I>();
  visit(f, Path{&path, field, 0}, std::get<I>(fields(tree)), std::get<I>(fields(more))...);
}

/// Whether T is a Tensor, an Array, std::optional or std::variant of trees, or a struct of trees. Only such arguments
/// of a function can have gradients.
template <class T>
consteval bool is_tree() {
  if constexpr (is_tensor<T>)
    return true;
  else if constexpr (has_entries<T> || has_fields<T>())
    return []<class... Part>(std::type_identity<std::tuple<Part...>>) {
      return (is_tree<Part>() && ...);
    }(std::type_identity<parts_below_t<T>>{});
  else
    return false;
}
/// Whether a field's type may be part of a tree. Numbers, strings and the like may not.
template <class T>
inline constexpr bool is_field = is_tensor<T> || is_array<T> || (std::is_class_v<T> && std::is_aggregate_v<T>) ||
                                 requires(T& object) {
  object.as_tuple();
};
template <template <class...> class Of, class... T>
requires is_choice<Of<T...>>
inline constexpr bool is_field<Of<T...>> = (is_field<T> && ...);
/// Whether an error is about the field's type, and not about the field: it is no number.
template <class T>
inline constexpr bool is_named_type = std::is_class_v<T>;
template <template <class...> class Of, class... T>
requires is_choice<Of<T...>>
inline constexpr bool is_named_type<Of<T...>> = (is_named_type<T> && ...);

template <class T, class P>
constexpr bool all_leaves(P p);
template <class T, std::size_t I, class P>
constexpr bool all_leaves_of_field(P p) {
  using Field = std::tuple_element_t<I, field_types<T>>;
  if constexpr (is_field<Field>)
    return all_leaves<Field>(p);
  else
    return checked<rules::no_tree_field, Literal(field_name<typename named_as<T>::type, I>())>::ok;
}

/// The reason why T is not a tree.
template <class T>
consteval rules::NoTree no_tree() {
  if constexpr (!std::is_class_v<T>)
    return rules::NoTree::no_struct;
  else if constexpr (std::is_const_v<T>)
    return rules::NoTree::constant;
  else if constexpr (requires { std::tuple_size<T>::value; })
    return rules::NoTree::tuple;
  else if constexpr (requires(const T& x) {
                       x.begin() + x.size();
                       requires std::is_class_v<typename T::value_type>;
                     })
    return rules::NoTree::list;
  else if constexpr (!std::is_aggregate_v<T>)
    return rules::NoTree::not_public;
  else if constexpr (requires { T{any_base<T>{}}; })
    return rules::NoTree::bases;
  else if constexpr (std::is_empty_v<T>)
    return rules::NoTree::empty;
  else if constexpr (decomposes<T>())
    return rules::NoTree::constant;
  else if constexpr (field_count<T>() > 0 && field_count<T>() < 24)
    return rules::NoTree::c_array;
  else
    return rules::NoTree::fields;
}
template <OpName Name, class T, std::size_t I>
constexpr bool checked_part();
/// Whether T is a tree. If not, a compile error names the cause: a field, or a whole struct.
template <OpName Name, class T>
constexpr bool check_tree() {
  if constexpr (is_tensor<T>)
    return true;
  else if constexpr (is_array<T>)  // without a pack, which takes longer to compile
    return check_tree<Name, typename T::value_type>();
  else if constexpr (!std::is_const_v<T> && (has_entries<T> || has_fields<T>()))
    return []<std::size_t... I>(std::index_sequence<I...>) {
      return (checked_part<Name, T, I>() && ...);
    }
  (std::make_index_sequence<std::tuple_size_v<parts_below_t<T>>>{});
  else return checked<rules::tree, Name, false, name_of_type<T>, no_tree<T>()>::ok && false;
}
template <OpName Name, class T, std::size_t I>
constexpr bool checked_part() {
  using Part = std::tuple_element_t<I, parts_below_t<T>>;
  if constexpr (has_entries<T> || is_named_type<Part>)
    return check_tree<Name, Part>();
  else
    return checked<rules::no_tree_field, Literal(field_name<typename named_as<T>::type, I>())>::ok && false;
}
/// Functions of trees evaluate it first, so that its error comes first in the compiler's output.
template <OpName Name, class Tree>
inline constexpr bool checked_tree = check_tree<Name, std::remove_const_t<Tree>>();

/// Whether a T holds tensors, as far as its type shows: in a struct, pair, tuple, list, optional, variant or pointer.
/// `Depth` bounds the search in a type that holds others of its own.
template <class T, int Depth = 6>
consteval bool holds_tensor();
template <int Depth, class... Parts>
consteval bool any_holds_tensor() {
  return (holds_tensor<std::remove_cvref_t<Parts>, Depth - 1>() || ...);
}
template <int Depth, template <class...> class Of, class... Parts>
consteval bool parts_hold_tensor(std::type_identity<Of<Parts...>> /*of*/) {
  return any_holds_tensor<Depth, Parts...>();
}
template <int Depth, class T>
consteval bool parts_hold_tensor(std::type_identity<T> /*of*/) {
  return false;
}
template <class T, int Depth>
consteval bool holds_tensor() {
  if constexpr (is_tensor<T>)
    return true;
  else if constexpr (Depth == 0 || !std::is_class_v<T>)
    return false;
  else if constexpr (requires {
                       typename T::value_type;
                       requires !std::is_same_v<typename T::value_type, T>;
                     })
    return any_holds_tensor<Depth, typename T::value_type>();
  else if constexpr (requires { sizeof(typename T::element_type); })
    return any_holds_tensor<Depth, typename T::element_type>();
  else if constexpr (
      requires(const T& x) { x.valueless_by_exception(); } || requires { std::tuple_size<T>::value; })
    return parts_hold_tensor<Depth>(std::type_identity<T>{});
  else if constexpr (decomposes<T>())
    return parts_hold_tensor<Depth>(std::type_identity<field_types<T>>{});
  else
    return no_tree<T>() == rules::NoTree::c_array;  // of what, its type does not show
}
/// Whether the arguments of a function that runs again, or on another mesh, are trees of tensors or hold none. If not,
/// a compile error: the function would get the tensors as they are.
template <OpName Name, class... Args>
constexpr bool check_arguments() {
  [[maybe_unused]] constexpr auto check = []<class T>(std::type_identity<T>) {  // g++ warns of no arguments
    if constexpr (!is_tree<T>() && holds_tensor<T>())
      return checked_tree<Name, T>;
    else
      return true;
  };
  return (check(std::type_identity<Args>{}) && ...);
}

/// True if the predicate holds for the type of every leaf.
template <class T, class P>
constexpr bool all_leaves(P p) {
  if constexpr (is_tensor<T>)
    return p(std::type_identity<T>{});
  else if constexpr (has_entries<T>)
    return [&p]<class... Entry>(std::type_identity<std::tuple<Entry...>>) {
      return (all_leaves<Entry>(p) && ...);
    }(std::type_identity<parts_below_t<T>>{});
  else
    return []<std::size_t... I>(std::index_sequence<I...>, P q) {
      return (all_leaves_of_field<T, I>(q) && ...);
    }
  (std::make_index_sequence<tree_width<T>>{}, p);
}

// nvcc's front end finds that a lambda does not take what it takes.
#if defined(__NVCC__)
inline constexpr bool checks_functions = false;
#else
inline constexpr bool checks_functions = true;
#endif
/// Whether a function of a tree takes these arguments, for one leaf; if not, a compile error, the same one for all
/// leaves. A result is due where `Returns`.
template <OpName Name, bool Returns, class F, class... Args>
constexpr bool takes_leaf() {
  if constexpr (!checks_functions)
    return true;
  else if constexpr (!std::is_invocable_v<F&, Args...>)
    return checked<rules::leaf_function, Name, rules::LeafFunction::not_called>::ok && false;
  else if constexpr (Returns && !is_tensor<std::remove_cvref_t<std::invoke_result_t<F&, Args...>>>)
    return checked<rules::leaf_function, Name, rules::LeafFunction::no_tensor>::ok && false;
  else
    return true;
}

}  // namespace detail

/// Calls f(name, leaf, leaf of the second tree, ...) for each leaf, in the order of declaration. Names are paths:
/// "layers/0/w_q". All trees have the structure of the first.
/// `for_each_leaf([](std::string_view name, auto& leaf) { ... }, weights)`
template <class F, class Tree, class... More>
void for_each_leaf(F&& f, Tree& tree, More&... more) {
  if constexpr (detail::checked_tree<"for_each_leaf", Tree>) {
    const auto named = [&f](const detail::Path& path, auto&... leaves) {
      if constexpr (detail::takes_leaf<"for_each_leaf", false, F, std::string_view, decltype(leaves)...>()) {
        const std::string name = path.text();
        detail::with_leaf(
            path, [&](auto&... l) { f(std::string_view(name), l...); }, leaves...);
      }
    };
    detail::visit(named, {nullptr, "for_each_leaf"}, tree, more...);
  }
}

/// Returns a tree of the same type with f(leaf, leaf of the second tree, ...) in place of each leaf.
/// `map_tree([](const auto& w, const auto& g) { return w - g * 0.1; }, weights, grads)`
template <class F, class Tree, class... More>
[[nodiscard]] Tree map_tree(F&& f, const Tree& tree, const More&... more) {
  Tree result = tree;
  if constexpr (detail::checked_tree<"map_tree", Tree>) {
    const auto assign = [&f](const detail::Path& path, auto& out, const auto&... in) {
      if constexpr (detail::takes_leaf<"map_tree", true, F, decltype(in)...>()) out = detail::with_leaf(path, f, in...);
    };
    detail::visit(assign, {nullptr, "map_tree"}, result, tree, more...);
  }
  return result;
}

/// True if every axis of the mesh shards every leaf, so that no device holds a second copy of a shard.
/// `static_assert(fully_sharded<Mesh<"d t">, Model>)` names the leaf for which this is not so.
template <class M, class Tree>
inline constexpr bool fully_sharded = detail::checked_tree<"fully_sharded", Tree>&& detail::all_leaves<Tree>(
    []<class D, Spec S>(std::type_identity<Tensor<D, S>>) {
      return detail::checked<rules::fully_sharded, M::axes, S>::ok;
    });

}  // namespace shardlib
