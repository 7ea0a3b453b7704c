// The leaves of a tree without their types, for code that is the same for all of them: it is compiled once, not once
// for each leaf.
#pragma once

#include <cstddef>
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

template <class V, class Tree>
void add_leaves(UntypedLeaves<V>& list, const Path& path, Tree& tree) {
  using T = std::remove_const_t<Tree>;
  if constexpr (is_tensor<T>) {
    list.leaves.push_back({list.named ? path.text() : std::string(), &UntypedAccess::value(tree),
                           dtype_v<typename T::value_type>, &parsed<T::spec>, T::spec});
  } else if constexpr (is_array<T>) {
    list.arrays.push_back({list.named ? array_place<T>(path) : std::string(), tree.size()});
    for (std::size_t i = 0; i < tree.size(); ++i) add_leaves(list, Path{&path, {}, i}, tree[i]);
  } else {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      const auto parts = fields(tree);
      (add_leaves(list, Path{&path, field_name<typename named_as<T>::type, I>(), 0}, std::get<I>(parts)), ...);
    }
    (std::make_index_sequence<tree_width<T>>{});
  }
}

/// The tree must outlive the list. `untyped_leaves(weights)`
template <class Tree>
[[nodiscard]] auto untyped_leaves(Tree& tree, bool named = true) {
  UntypedLeaves<std::conditional_t<std::is_const_v<Tree>, const ValuePtr, ValuePtr>> list{named};
  add_leaves(list, Path{}, tree);
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
void resize_arrays(Tree& tree, const UntypedLeaves<V>& like, std::size_t& next) {
  if constexpr (is_array<Tree>) {
    tree.resize(like.arrays[next++].size);
    for (auto& entry : tree) resize_arrays(entry, like, next);
  } else if constexpr (has_arrays<Tree>()) {
    std::apply([&](auto&... field) { (resize_arrays(field, like, next), ...); }, fields(tree));
  }
}

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

}  // namespace shardlib
