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

  /// *Throws* EmptyTensor if the tensor is empty.
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
  std::vector<UntypedLeaf<V>> leaves;
  std::vector<ArraySize> arrays;

  /// *Throws* if Arrays at the same path have different sizes. Both trees have one structure by their types.
  template <class U>
  void require_structure_of(const UntypedLeaves<U>& first) const {
    for (std::size_t i = 0; i < first.arrays.size(); ++i)
      if (arrays[i].size != first.arrays[i].size)
        fail_structure(first.arrays[i].place, first.arrays[i].size, arrays[i].size);
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
    list.leaves.push_back(
        {path.text(), &UntypedAccess::value(tree), dtype_v<typename T::value_type>, &parsed<T::spec>, T::spec});
  } else if constexpr (is_array<T>) {
    list.arrays.push_back({array_place<T>(path), tree.size()});
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
[[nodiscard]] auto untyped_leaves(Tree& tree) {
  UntypedLeaves<std::conditional_t<std::is_const_v<Tree>, const ValuePtr, ValuePtr>> list;
  add_leaves(list, Path{}, tree);
  return list;
}

template <class P, std::size_t I, class... Trees>
constexpr bool all_leaves_of_fields(P p);
/// True if the predicate holds for the types of the leaves at each place of several trees of one structure.
template <class P, class Tree, class... More>
constexpr bool all_leaves_of(P p) {
  if constexpr (is_tensor<Tree>)
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

}  // namespace shardlib::detail
