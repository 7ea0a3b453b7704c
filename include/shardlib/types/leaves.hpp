// The leaves of a tree without their types, for code that is the same for all of them: it is compiled once, not once
// for each leaf. Also the names and specs of a tree's leaves, and their number of elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/spec/dtype.hpp"
#include "shardlib/spec/spec.hpp"
#include "shardlib/types/signature.hpp"
#include "shardlib/types/tensor.hpp"
#include "shardlib/types/tree.hpp"

namespace shardlib::detail {

/// A leaf. V is ValuePtr, or const ValuePtr for a tree that is only read.
template <class V>
struct UntypedLeaf {
  std::string name;  ///< "layers/0/w_q"
  V* pointer;        ///< the tensor's value, which is null if the tensor is empty
  DType dtype;
  const TensorSpec* spec;
  std::string_view text;  ///< of the spec

  /// Throws EmptyTensor if the tensor is empty.
  [[nodiscard]] V& value() const {
    if (*pointer == nullptr) [[unlikely]]
      fail_empty(dtype, text, name.empty() ? "" : "the leaf `" + name + "`: ");
    return *pointer;
  }
};

/// The leaves of a tree in the order of declaration, and what its nodes with entries hold.
template <class V>
struct UntypedLeaves {
  struct Node {
    EntriesKind kind;
    std::string place;
    std::size_t held;
  };
  bool named;  ///< else names and places stay empty
  std::vector<UntypedLeaf<V>> leaves = {};
  std::vector<Node> nodes = {};

  /// Throws if nodes at the same path have different entries. Both trees have one structure by their types. The error
  /// begins with the name of the function that needs them.
  template <class U>
  void require_structure_of(const UntypedLeaves<U>& first, std::string_view function) const {
    for (std::size_t i = 0; i < first.nodes.size(); ++i)
      if (nodes[i].held != first.nodes[i].held)
        fail_structure(function, first.nodes[i].kind, first.nodes[i].place, first.nodes[i].held, nodes[i].held);
  }
};

/// The one way to a tensor's value that may be empty, or that is to be replaced.
struct UntypedAccess {
  template <class D, Spec S>
  static ValuePtr& value(Tensor<D, S>& x) {
    return x.value_;
  }
  template <class D, Spec S>
  static const ValuePtr& value(const Tensor<D, S>& x) {
    return x.value_;
  }
};

/// A table that describes the type of a tensor, a node with entries or a struct for walks over trees. A walk that reads
/// these tables is compiled once, not once for each type of tree.
struct TypeTable {
  struct Entries {
    std::byte* first;
    std::size_t held;  ///< as `held_by`
  };
  DType dtype{};                            ///< of a tensor
  const TensorSpec* spec = nullptr;         ///< of a tensor; else null
  std::string_view name = {};               ///< the text of the tensor's spec, or the name of the Array's stacked dim
  Entries (*entries)(void*) = nullptr;      ///< of a node with entries; else null
  EntriesKind kind = {};                    ///< of such a node
  std::size_t width = 0;                    ///< the bytes of an Array's entry, or the number of fields
  const TypeTable* const* below = nullptr;  ///< the tables of parts_below_t
  const std::string_view* field_names = nullptr;
  void (*fields)(void*, void**) = nullptr;  ///< writes the addresses of a struct's fields
};
template <class T>
constexpr TypeTable make_type_table();
template <class T>
inline constexpr TypeTable type_table = make_type_table<T>();
template <class Parts>
struct PartTables;
template <class... T>
struct PartTables<std::tuple<T...>> {
  static constexpr const TypeTable* tables[] = {&type_table<T>...};
};
template <class T>
inline constexpr const TypeTable* const* tables_below = PartTables<parts_below_t<T>>::tables;
template <class T, class Fields = std::make_index_sequence<tree_width<T>>>
struct FieldTables;
template <class T, std::size_t... I>
struct FieldTables<T, std::index_sequence<I...>> {
  static constexpr std::string_view names[] = {field_name<typename named_as<T>::type, I>()...};
  static void write(void* tree, void** out) {
    const auto parts = detail::fields(*static_cast<T*>(tree));
    ((out[I] = const_cast<std::tuple_element_t<I, field_types<T>>*>(&std::get<I>(parts))), ...);
  }
};
template <class T>
constexpr TypeTable make_type_table() {
  if constexpr (is_tensor<T>) {
    static_assert(std::is_standard_layout_v<T>, "the address of a tensor is that of its value");
    return {.dtype = dtype_v<typename T::value_type>, .spec = &parsed<T::spec>, .name = T::spec};
  } else if constexpr (has_entries<T>) {
    constexpr auto entries = [](void* tree) -> TypeTable::Entries {
      auto& node = *static_cast<T*>(tree);
      std::byte* first = nullptr;
      const auto find = [&](auto* entries) { first = reinterpret_cast<std::byte*>(entries); };
      if constexpr (is_array<T>)
        find(node.data());
      else
        at_entry<T>(held_by(node),
                    [&]<std::size_t I>(std::integral_constant<std::size_t, I>) { find(&entry<I>(node)); });
      return {first, held_by(node)};
    };
    return {.name = array_name<T>(),
            .entries = entries,
            .kind = entries_kind<T>(),
            .width = sizeof(std::tuple_element_t<0, parts_below_t<T>>),
            .below = tables_below<T>};
  } else {
    using Fields = FieldTables<T>;
    return {.width = tree_width<T>, .below = tables_below<T>, .field_names = Fields::names, .fields = Fields::write};
  }
}

template <class V>
[[gnu::noinline, gnu::cold]] void add_leaves(UntypedLeaves<V>& list, const Path& path, const TypeTable& at,
                                             void* tree) {
  const auto text = [&] { return list.named ? path.text() : std::string(); };
  if (at.spec != nullptr) {
    list.leaves.push_back({text(), static_cast<V*>(tree), at.dtype, at.spec, at.name});
  } else if (at.entries != nullptr) {
    const auto [first, held] = at.entries(tree);
    list.nodes.push_back({at.kind, list.named && path.above == nullptr ? std::string(at.name) : text(), held});
    if (at.kind.is_array)
      for (std::size_t i = 0; i < held; ++i) add_leaves(list, Path{&path, {}, i}, **at.below, first + i * at.width);
    else if (first != nullptr)
      add_leaves(list, path, *at.below[at.kind.alternatives == nullptr ? 0 : held], first);
  } else {
    std::vector<void*> parts(at.width);
    at.fields(tree, parts.data());
    for (std::size_t i = 0; i < at.width; ++i)
      add_leaves(list, Path{&path, at.field_names[i], 0}, *at.below[i], parts[i]);
  }
}

/// The tree must outlive the list. `untyped_leaves(weights)`
template <class Tree>
[[nodiscard]] auto untyped_leaves(Tree& tree, bool named = true) {
  UntypedLeaves<std::conditional_t<std::is_const_v<Tree>, const ValuePtr, ValuePtr>> list{named};
  add_leaves(list, Path{}, type_table<std::remove_const_t<Tree>>, const_cast<std::remove_const_t<Tree>*>(&tree));
  return list;
}

template <class P, std::size_t I, class... Trees>
constexpr bool all_leaves_of_parts(P p);
/// True if the predicate holds for the types of the leaves at each place of several trees of one structure.
template <class P, class Tree, class... More>
constexpr bool all_leaves_of(P p) {
  if constexpr (!(check_places<Tree, More>() && ...))
    return false;
  else if constexpr (is_tensor<Tree>)
    return p(std::type_identity<Tree>{}, std::type_identity<More>{}...);
  else if constexpr (is_array<Tree>)  // without a pack, which takes longer to compile
    return all_leaves_of<P, typename Tree::value_type, typename More::value_type...>(p);
  else
    return []<std::size_t... I>(std::index_sequence<I...>, P q) {
      return (all_leaves_of_parts<P, I, Tree, More...>(q) && ...);
    }
  (std::make_index_sequence<std::tuple_size_v<parts_below_t<Tree>>>{}, p);
}
template <class P, std::size_t I, class... Trees>
constexpr bool all_leaves_of_parts(P p) {
  return all_leaves_of<P, std::tuple_element_t<I, parts_below_t<Trees>>...>(p);
}

/// Whether the type does not tell the number of leaves: it has a node with entries.
template <class T>
constexpr bool is_open() {
  if constexpr (is_tensor<T>)
    return false;
  else if constexpr (has_entries<T>)
    return true;
  else
    return []<class... F>(std::type_identity<std::tuple<F...>>) {
      return (is_open<F>() || ...);
    }(std::type_identity<field_types<T>>{});
}
template <std::size_t I, class T, class U>
constexpr bool alike_at();
/// Whether two types are trees of one structure; if not, a compile error.
template <class T, class U>
constexpr bool alike() {
  if constexpr (!same_node<T, U>())
    return false;
  else if constexpr (is_tensor<T>)
    return true;
  else if constexpr (is_array<T>)
    return alike<typename T::value_type, typename U::value_type>();
  else
    return []<std::size_t... I>(std::index_sequence<I...>) {
      return (alike_at<I, T, U>() && ...);
    }
  (std::make_index_sequence<std::tuple_size_v<parts_below_t<T>>>{});
}
template <std::size_t I, class T, class U>
constexpr bool alike_at() {
  return alike<std::tuple_element_t<I, parts_below_t<T>>, std::tuple_element_t<I, parts_below_t<U>>>();
}
/// Gives the nodes of an empty tree their entries, in order.
template <class V, class Tree>
[[gnu::cold]] void hold_as(Tree& tree, const UntypedLeaves<V>& like, std::size_t& next) {
  const auto inside = [&]<class Part>(Part& part) {
    if constexpr (is_open<Part>()) hold_as(part, like, next);
  };
  if constexpr (has_entries<Tree>) {
    hold(tree, like.nodes[next++].held);
    each_entry([&](const Path&, auto& entry) { inside(entry); }, {}, tree);
  } else {
    std::apply([&](auto&... field) { (inside(field), ...); }, fields(tree));
  }
}

/// The global number of elements.
[[nodiscard]] std::int64_t element_count(const Value& value);

}  // namespace shardlib::detail

namespace shardlib {

/// A tree of empty tensors whose Arrays have the sizes of another tree's, and whose std::optionals and std::variants
/// hold what the other's hold. `same_structure<Model<bf16>>(weights)`
template <class To, class From>
[[nodiscard]] To same_structure(const From& from) {
  To to;
  if constexpr (detail::alike<To, From>() && detail::is_open<To>()) {
    std::size_t next = 0;
    detail::hold_as(to, detail::untyped_leaves(from, false), next);
  }
  return to;
}

/// The names of the leaves, in order: "layers/0/w_q". `leaf_names(weights)`
template <class Tree>
[[nodiscard]] std::vector<std::string> leaf_names(const Tree& tree) {
  std::vector<std::string> names;
  if constexpr (detail::checked_tree<"for_each_leaf", Tree>)
    for (const auto& leaf : detail::untyped_leaves(tree).leaves) names.push_back(leaf.name);
  return names;
}

/// The specs of the leaves, in order, for example for a checkpoint. `shardings(weights)`
template <class Tree>
[[nodiscard]] std::vector<std::string> shardings(const Tree& tree) {
  std::vector<std::string> specs;
  if constexpr (detail::checked_tree<"for_each_leaf", Tree>)
    for (const auto& leaf : detail::untyped_leaves(tree, false).leaves) specs.emplace_back(leaf.text);
  return specs;
}

/// The global number of elements of all leaves. `parameter_count(weights)`
template <class Tree>
[[nodiscard]] std::int64_t parameter_count(const Tree& tree) {
  std::int64_t count = 0;
  if constexpr (detail::checked_tree<"for_each_leaf", Tree>)
    for (const auto& leaf : detail::untyped_leaves(tree).leaves) count += detail::element_count(*leaf.value());
  return count;
}

}  // namespace shardlib
