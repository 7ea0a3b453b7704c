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

/// The leaves of a tree in the order of declaration, and the sizes of its Arrays.
template <class V>
struct UntypedLeaves {
  struct ArraySize {
    std::string place;
    std::size_t size;
  };
  bool named;  ///< else names and places stay empty
  std::vector<UntypedLeaf<V>> leaves = {};
  std::vector<ArraySize> arrays = {};

  /// Throws if Arrays at the same path have different sizes. Both trees have one structure by their types. The error
  /// begins with the name of the function that needs them.
  template <class U>
  void require_structure_of(const UntypedLeaves<U>& first, std::string_view function) const {
    for (std::size_t i = 0; i < first.arrays.size(); ++i)
      if (arrays[i].size != first.arrays[i].size)
        fail_structure(function, first.arrays[i].place, first.arrays[i].size, arrays[i].size);
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

/// What a walk over a tree has to know of the type of a tensor, an Array or a struct. A walk that reads these tables is
/// compiled once, not once for each type of tree.
struct TypeTable {
  struct Entries {
    std::byte* first;
    std::size_t size;
  };
  DType dtype{};                            ///< of a tensor
  const TensorSpec* spec = nullptr;         ///< of a tensor; else null
  std::string_view name = {};               ///< the text of the tensor's spec, or the name of the Array's stacked dim
  Entries (*entries)(void*) = nullptr;      ///< of an Array; else null
  std::size_t width = 0;                    ///< an entry's bytes, or the number of fields
  const TypeTable* const* below = nullptr;  ///< the tables of the fields, or the one of all entries
  const std::string_view* field_names = nullptr;
  void (*fields)(void*, void**) = nullptr;  ///< writes the addresses of a struct's fields
};
template <class T>
constexpr TypeTable make_type_table();
template <class T>
inline constexpr TypeTable type_table = make_type_table<T>();
template <class T>
inline constexpr const TypeTable* entry_table = &type_table<typename T::value_type>;
template <class T, class Fields = std::make_index_sequence<tree_width<T>>>
struct FieldTables;
template <class T, std::size_t... I>
struct FieldTables<T, std::index_sequence<I...>> {
  static constexpr std::string_view names[] = {field_name<typename named_as<T>::type, I>()...};
  static constexpr const TypeTable* tables[] = {&type_table<std::tuple_element_t<I, field_types<T>>>...};
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
  } else if constexpr (is_array<T>) {
    constexpr auto entries = [](void* tree) -> TypeTable::Entries {
      auto& array = *static_cast<T*>(tree);
      return {reinterpret_cast<std::byte*>(array.data()), array.size()};
    };
    return {
        .name = array_name<T>(), .entries = entries, .width = sizeof(typename T::value_type), .below = &entry_table<T>};
  } else {
    using Fields = FieldTables<T>;
    return {.width = tree_width<T>, .below = Fields::tables, .field_names = Fields::names, .fields = Fields::write};
  }
}

template <class V>
[[gnu::noinline, gnu::cold]] void add_leaves(UntypedLeaves<V>& list, const Path& path, const TypeTable& at,
                                             void* tree) {
  const auto text = [&] { return list.named ? path.text() : std::string(); };
  if (at.spec != nullptr) {
    list.leaves.push_back({text(), static_cast<V*>(tree), at.dtype, at.spec, at.name});
  } else if (at.entries != nullptr) {
    const auto [first, size] = at.entries(tree);
    list.arrays.push_back({list.named && path.above == nullptr ? std::string(at.name) : text(), size});
    for (std::size_t i = 0; i < size; ++i) add_leaves(list, Path{&path, {}, i}, **at.below, first + i * at.width);
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
constexpr bool all_leaves_of_fields(P p);
/// True if the predicate holds for the types of the leaves at each place of several trees of one structure.
template <class P, class Tree, class... More>
constexpr bool all_leaves_of(P p) {
  if constexpr (!(check_places<Tree, More>() && ...))
    return false;
  else if constexpr (is_tensor<Tree>)
    return p(std::type_identity<Tree>{}, std::type_identity<More>{}...);
  else if constexpr (is_array<Tree>)
    return all_leaves_of<P, typename Tree::value_type, typename More::value_type...>(p);
  else
    return []<std::size_t... I>(std::index_sequence<I...>, P q) {
      return (all_leaves_of_fields<P, I, Tree, More...>(q) && ...);
    }
  (std::make_index_sequence<tree_width<Tree>>{}, p);
}
template <class P, std::size_t I, class... Trees>
constexpr bool all_leaves_of_fields(P p) {
  return all_leaves_of<P, std::tuple_element_t<I, field_types<Trees>>...>(p);
}

template <class T>
constexpr bool has_arrays() {
  if constexpr (is_tensor<T>)
    return false;
  else if constexpr (is_array<T>)
    return true;
  else
    return []<class... F>(std::type_identity<std::tuple<F...>>) {
      return (has_arrays<F>() || ...);
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
  (std::make_index_sequence<tree_width<T>>{});
}
template <std::size_t I, class T, class U>
constexpr bool alike_at() {
  return alike<std::tuple_element_t<I, field_types<T>>, std::tuple_element_t<I, field_types<U>>>();
}
/// Gives the Arrays of an empty tree their sizes, in order.
template <class V, class Tree>
[[gnu::cold]] void resize_arrays(Tree& tree, const UntypedLeaves<V>& like, std::size_t& next) {
  if constexpr (is_array<Tree>) {
    tree = Tree(like.arrays[next++].size);
    if constexpr (has_arrays<typename Tree::value_type>())
      for (auto& entry : tree) resize_arrays(entry, like, next);
  } else {
    const auto resize = [&]<class Field>(Field& field) {
      if constexpr (has_arrays<Field>()) resize_arrays(field, like, next);
    };
    std::apply([&](auto&... field) { (resize(field), ...); }, fields(tree));
  }
}

/// The global number of elements.
[[nodiscard]] std::int64_t element_count(const Value& value);

}  // namespace shardlib::detail

namespace shardlib {

/// A tree of empty tensors whose Arrays have the sizes of another tree's. `same_structure<Model<bf16>>(weights)`
template <class To, class From>
[[nodiscard]] To same_structure(const From& from) {
  To to;
  if constexpr (detail::alike<To, From>() && detail::has_arrays<To>()) {
    std::size_t next = 0;
    detail::resize_arrays(to, detail::untyped_leaves(from, false), next);
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
