// Trees of stacked tensors: unstack takes them apart, stack makes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/ops/layout.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/types/gradient.hpp"
#include "shardlib/types/leaves.hpp"
#include "shardlib/types/tree.hpp"

namespace shardlib {

template <DimName Dim, class W>
class Unstacked;
template <DimName Dim, class W>
class StackedTree;

namespace detail {

/// The part of a leaf. A leaf that has none is an error elsewhere.
template <DimName Dim, class W>
struct part_of {
  using type = Unstacked<Dim, W>;
};
template <DimName Dim, class D, Spec S>
struct part_of<Dim, Tensor<D, S>> {
  using type = Tensor<D, outcome<rules::unstack, OpName(""), Literal("leaf"), Dim, S>().result>;
};
template <DimName Dim, Spec N, class T>
struct part_of<Dim, Array<N, T>> {
  using type = Array<N, typename part_of<Dim, T>::type>;
};
template <DimName Dim, template <class...> class Of, class... W>
requires is_choice<Of<W...>>
struct part_of<Dim, Of<W...>> {
  using type = Of<typename part_of<Dim, W>::type...>;
};
template <DimName Dim, class W>
using part_t = typename part_of<Dim, W>::type;
template <DimName Dim, class Tuple>
struct part_fields;
template <DimName Dim, class... F>
struct part_fields<Dim, std::tuple<F...>> {
  using type = std::tuple<part_t<Dim, F>...>;
};

template <DimName Dim>
inline constexpr Spec array_dim{std::string_view(Dim)};
template <DimName Dim, class W>
using parts_t = Array<array_dim<Dim>, part_t<Dim, W>>;

/// Whether each leaf has the stacked dim first, or a compile error and false.
template <OpName Name, DimName Dim, class W>
constexpr bool check_stacked() {
  if constexpr (checked_tree<Name, W>)
    return all_leaves<W>([]<class D, Spec S>(std::type_identity<Tensor<D, S>>) {
      return checked<rules::unstack, Name, Literal("leaf"), Dim, S>::ok &&
             legal<rules::unstack, Name, Literal("leaf"), Dim, S>;
    });
  else
    return false;
}

/// Copies a tree to one of the same structure, leaf by leaf.
template <class To, class From>
void copy_leaves(To& to, const From& from) {
  if constexpr (!check_places<To, From>()) {
    return;  // after a compile error
  } else if constexpr (is_tensor<To>) {
    to = from;
  } else if constexpr (has_entries<To>) {
    hold(to, held_by(from));
    each_entry([](const Path&, auto& copy, const auto& entry) { copy_leaves(copy, entry); }, {}, to, from);
  } else {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (copy_leaves(std::get<I>(fields(to)), std::get<I>(fields(from))), ...);
    }
    (std::make_index_sequence<tree_width<To>>{});
  }
}
/// Part `i` of `count` of the stacked leaves. `parts` has those of each leaf that has a value, in the order of the
/// tree.
template <class W, class P>
void collect_part(const W& stacked, P& part, const ValuePtr*& parts, std::size_t i, std::size_t count) {
  if constexpr (is_tensor<W>) {
    if (!UntypedAccess::value(stacked)) return;
    part = P(parts[i]);
    parts += count;
  } else if constexpr (has_entries<W>) {
    hold(part, held_by(stacked));
    each_entry([&](const Path&, const auto& whole, auto& entry) { collect_part(whole, entry, parts, i, count); }, {},
               stacked, part);
  } else {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (collect_part(std::get<I>(fields(stacked)), std::get<I>(fields(part)), parts, i, count), ...);
    }
    (std::make_index_sequence<tree_width<W>>{});
  }
}
[[noreturn, gnu::noinline, gnu::cold]] inline void fail_layers(const OpInfo& op, const Path& path, DimSize first,
                                                               DimSize size) {
  throw Error(op.describe() + ": the leaf `" + path.text() + "` has " + to_string(size) + " parts, but the first has " +
              to_string(first) + "; stack as many tensors in each leaf");
}

/// Sets `size` to that of the stacked dim, which has no more parts than its true size.
template <DimName Dim, class W>
auto unstack_tree(const OpInfo& op, const W& stacked, DimSize& size) -> parts_t<Dim, W> {
  std::vector<ValuePtr> parts;
  size = -1;
  const auto cut = [&]<class D, Spec S>(const Path& path, const Tensor<D, S>& leaf) {
    if (!UntypedAccess::value(leaf)) return;
    using Due = Dual<Tensor<D, S>, axes_of<S>()>;
    const DimSize own = unstack_to(parts, {"unstack", op.spec, op.site}, leaf.value(),
                                   parsed<part_t<Dim, Tensor<D, S>>::spec>, parsed<Due::spec>);
    if (size.size >= 0 && size != own) fail_layers(op, path, size, own);
    size = own;
  };
  visit(cut, {}, stacked);
  if (size.size < 0) throw EmptyTensor(op.describe() + ": no leaf of the tree has a value");
  parts_t<Dim, W> layers(static_cast<std::size_t>(size.size));
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const ValuePtr* leaf = parts.data();
    collect_part(stacked, layers[i], leaf, i, layers.size());
  }
  return layers;
}

/// The stacked type of a leaf, of a node with entries and of a struct.
template <DimName Dim, class W>
struct stack_of {
  using type = StackedTree<Dim, W>;
};
template <DimName Dim, class D, Spec S>
struct stack_of<Dim, Tensor<D, S>> {
  using type = Tensor<D, result_of<rules::stack, Dim, S, S>>;
};
template <DimName Dim, Spec N, class T>
struct stack_of<Dim, Array<N, T>> {
  using type = Array<N, typename stack_of<Dim, T>::type>;
};
template <DimName Dim, template <class...> class Of, class... W>
requires is_choice<Of<W...>>
struct stack_of<Dim, Of<W...>> {
  using type = Of<typename stack_of<Dim, W>::type...>;
};
template <DimName Dim, class W>
using stack_t = typename stack_of<Dim, W>::type;
template <DimName Dim, class Tuple>
struct stack_fields;
template <DimName Dim, class... F>
struct stack_fields<Dim, std::tuple<F...>> {
  using type = std::tuple<stack_t<Dim, F>...>;
};

/// Stacks the leaves at one place of several trees. A leaf that no tree has stays without a value.
template <DimName Dim, class To, class W>
void stack_leaves(const OpInfo& op, const Path& path, To& to, const std::vector<const W*>& trees, DimSize stacked) {
  if constexpr (is_tensor<W>) {
    std::vector<W> parts;
    bool any = trees.empty();
    for (const W* part : trees) any = any || UntypedAccess::value(*part) != nullptr, parts.push_back(*part);
    if (any) to = record_stack<To>(op, parts, stacked);
  } else if constexpr (has_entries<W>) {
    if (trees.empty()) return;
    const std::size_t held = held_by(*trees.front());
    for (const W* tree : trees)
      if (held_by(*tree) != held) fail_structure(op.describe(), entries_kind<W>(), path.text(), held, held_by(*tree));
    hold(to, held);
    if constexpr (is_array<W>) {
      for (std::size_t i = 0; i < held; ++i) {
        std::vector<const typename W::value_type*> elements;
        for (const W* list : trees) elements.push_back(&(*list)[i]);
        stack_leaves<Dim>(op, {&path, {}, i}, to[i], elements, stacked);
      }
    } else {
      at_entry<W>(held, [&]<std::size_t I>(std::integral_constant<std::size_t, I>) {
        std::vector<const std::tuple_element_t<I, parts_below_t<W>>*> entries;
        for (const W* tree : trees) entries.push_back(&entry<I>(*tree));
        stack_leaves<Dim>(op, path, entry<I>(to), entries, stacked);
      });
    }
  } else {
    const auto member = [&]<std::size_t I>(std::integral_constant<std::size_t, I>) {
      std::vector<const std::tuple_element_t<I, field_types<W>>*> members;
      for (const W* tree : trees) members.push_back(&std::get<I>(fields(*tree)));
      constexpr std::string_view name = field_name<typename named_as<W>::type, I>();
      stack_leaves<Dim>(op, {&path, name}, std::get<I>(fields(to)), members, stacked);
    };
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (member(std::integral_constant<std::size_t, I>()), ...);
    }
    (std::make_index_sequence<tree_width<W>>{});
  }
}
template <DimName Dim, class W>
auto stack_trees(const OpInfo& op, const std::vector<W>& trees, DimSize size) -> stack_t<Dim, W> {
  if (trees.empty()) throw Error(op.describe() + ": there is nothing to stack; give one tree at least");
  std::vector<const W*> all;
  for (const W& tree : trees) all.push_back(&tree);
  stack_t<Dim, W> stacked;
  stack_leaves<Dim>(op, {}, stacked, all, size);
  return stacked;
}

/// A struct like W, whose fields have other types.
template <class W, class Fields>
class FieldsLike {
 public:
  using fields_of = W;
  template <auto Member>
  [[nodiscard]] const auto& get() const {
    static_assert(is_member_of<W, Member>,
                  "get<&Struct::member>() of a part: name a member of the struct that was unstacked");
    return std::get<detail::field_index(Member)>(fields_);
  }
  template <class T>
  requires(std::is_aggregate_v<T>&& detail::has_fields<T>() && detail::tree_width<T> == detail::tree_width<W>)
  operator T() const {  // NOLINT(google-explicit-constructor): the function of a loop says which struct it takes
    T part;
    detail::copy_leaves(part, *this);
    return part;
  }
  auto& as_tuple() { return fields_; }
  const auto& as_tuple() const { return fields_; }

 private:
  Fields fields_;
};

}  // namespace detail

/// One part of a struct of stacked tensors: each leaf is without the stacked dim. It converts to a struct that has
/// these tensors as fields, in the same order. `get` returns the part of one member, `layer.get<&Stacked::w>()`, and
/// through `as_tuple` functions of trees accept it.
template <DimName Dim, class W>
class Unstacked : public detail::FieldsLike<W, typename detail::part_fields<Dim, detail::field_types<W>>::type> {};

/// A struct of stacked tensors: each leaf has the new dim first. It converts to a struct that has these tensors as
/// fields, in the same order, and `get` returns one member: `ys.get<&Step::mean>()`.
template <DimName Dim, class W>
class StackedTree : public detail::FieldsLike<W, typename detail::stack_fields<Dim, detail::field_types<W>>::type> {};

/// The same of a struct of stacked tensors, as an Array of Unstacked. Throws if leaves have different sizes.
/// `for (const Layer layer : unstack<"layer">(stacked))`
template <DimName Dim, class W, class = std::enable_if_t<!is_tensor<W>>>
auto unstack(const W& stacked, Site site = Site::current())
    -> std::enable_if_t<detail::check_stacked<"unstack", Dim, W>(), detail::parts_t<Dim, W>> {
  const detail::Calling op{"unstack", Dim, site};
  DimSize size = 0;
  return detail::unstack_tree<Dim>(op, stacked, size);
}

/// Stacks the leaves of trees of one structure along a new dim, which is the first of each leaf: the inverse of
/// unstack. `const StackedLayer w = stack<"layer">(layers);`
template <DimName Dim, class W, class = std::enable_if_t<!is_tensor<W>>>
auto stack(const std::vector<W>& trees, Site site = Site::current())
    -> std::enable_if_t<detail::checked_tree<"stack", W>, StackedTree<Dim, W>> {
  const detail::Calling op{"stack", Dim, site};
  return detail::stack_trees<Dim>(op, trees, static_cast<std::int64_t>(trees.size()));
}

}  // namespace shardlib
