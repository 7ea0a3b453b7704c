// The nodes of a tree that say at run time alone what stands below them: an Array, a std::optional, a std::variant.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/support/error.hpp"
#include "shardlib/types/signature.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib {

/// A list of layers with the same struct: `Array<"layers", Layer>`. `dim` is the name of the stacked dim. The number
/// of layers is known at run time.
template <Spec Name, class T>
class Array : public std::vector<T> {
 public:
  static constexpr Spec dim = Name;
  using std::vector<T>::vector;
};

/// Whether the type is an Array, or a Gradient of one.
template <class T>
inline constexpr bool is_array = false;
template <Spec N, class T>
inline constexpr bool is_array<Array<N, T>> = true;

namespace detail {

template <class T>
inline constexpr bool is_optional = false;
template <class T>
inline constexpr bool is_optional<std::optional<T>> = true;
/// Whether the type is a std::variant. A member tells, because <variant> costs much to compile.
template <class T>
inline constexpr bool is_variant = false;
template <template <class...> class Of, class... T>
requires requires(const Of<T...>& x) {
  x.valueless_by_exception();
}
inline constexpr bool is_variant<Of<T...>> = true;
/// Whether the type is one of the two: a template whose gradient, say, is the same template of the types' gradients.
template <class T>
inline constexpr bool is_choice = is_optional<T> || is_variant<T>;
/// Whether a node of this type has entries: those of an Array, 0 or 1 of a std::optional, the one alternative of a
/// std::variant.
template <class T>
inline constexpr bool has_entries = is_array<T> || is_choice<T>;

/// The types of the entries, as a tuple: one, or all alternatives.
template <class T>
struct entry_types {
  using type = std::tuple<typename T::value_type>;
};
template <template <class...> class Of, class... T>
requires is_variant<Of<T...>>
struct entry_types<Of<T...>> {
  using type = std::tuple<T...>;
};

/// The path of a node in a tree: its parent's path and a field's name or an index in an Array. It becomes text only
/// on demand. The root has the name of the function that visits the tree, for errors. A std::optional or std::variant
/// and what it holds have one path.
struct Path {
  const Path* above = nullptr;
  std::string_view field;
  std::size_t index = 0;

  [[nodiscard, gnu::noinline, gnu::cold]] std::string text() const {
    if (above == nullptr) return {};
    const std::string before = above->text(), last = field.empty() ? std::to_string(index) : std::string(field);
    return before.empty() ? last : before + "/" + last;
  }
  [[nodiscard]] std::string_view function() const { return above == nullptr ? field : above->function(); }
};

/// The words of an error about a node with entries.
struct EntriesKind {
  bool is_array;
  const std::string_view* alternatives = nullptr;  ///< the names of a std::variant's types; null for other nodes

  [[nodiscard]] std::string text(std::size_t held) const {
    if (is_array) return std::to_string(held) + (held == 1 ? " entry" : " entries");
    if (alternatives == nullptr) return held == 0 ? "no value" : "a value";
    return "`" + std::string(alternatives[held]) + "`";
  }
};
template <class Entries>
struct entry_names;
template <class... T>
struct entry_names<std::tuple<T...>> {
  static constexpr std::string_view names[] = {std::string_view(name_of_type<T>)...};
};
template <class T>
constexpr EntriesKind entries_kind() {
  if constexpr (is_variant<T>)
    return {false, entry_names<typename entry_types<T>::type>::names};
  else
    return {is_array<T>};
}
[[noreturn, gnu::noinline, gnu::cold]] inline void fail_structure(std::string_view function, const EntriesKind& kind,
                                                                  const std::string& place, std::size_t held,
                                                                  std::size_t other) {
  const std::string is = kind.text(held), due = kind.is_array ? std::to_string(other) : kind.text(other);
  throw Error(std::string(function) + ": trees of different structure: the " +
              (kind.is_array                  ? "Array"
               : kind.alternatives == nullptr ? "std::optional"
                                              : "std::variant") +
              (place.empty() ? "" : " `" + place + "`") + " has " + is + " in the first tree and " + due +
              (is == due ? ", which is another alternative," : "") + " in another; build them from one configuration");
}
/// The name of an Array's stacked dim.
template <class T>
constexpr std::string_view array_name() {
  if constexpr (requires { T::dim; })
    return T::dim;
  else
    return {};
}

/// A number for the entries that a node holds: the size of an Array, 1 or 0 for a std::optional, the index of a
/// std::variant's alternative.
template <class T>
std::size_t held_by(const T& node) {
  if constexpr (is_array<T>) {
    return node.size();
  } else if constexpr (is_optional<T>) {
    return node.has_value() ? 1 : 0;
  } else {
    if (node.valueless_by_exception())
      throw Error("a std::variant of a tree has lost its value in an assignment that threw; assign to it again");
    return node.index();
  }
}
/// Calls f with the index of the entry's type, as a constant, where a std::optional or std::variant has an entry.
template <class T, class F>
void at_entry(std::size_t held, const F& f) {
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    ((held == I + (is_optional<T> ? 1 : 0) ? f(std::integral_constant<std::size_t, I>()) : void()), ...);
  }
  (std::make_index_sequence<std::tuple_size_v<typename entry_types<T>::type>>{});
}
/// The entry of a std::optional or std::variant that has it.
template <std::size_t I, class T>
auto& entry(T& node) {
  if constexpr (is_optional<std::remove_const_t<T>>)
    return *node;
  else
    return *get_if<I>(&node);  // of std, which this header need not know
}
/// Gives a node new entries: as many of an Array, or the std::optional's or std::variant's.
template <class T>
void hold(T& node, std::size_t held) {
  if constexpr (is_array<T>) {
    node = T(held);
  } else if constexpr (is_optional<T>) {
    if (held > 0)
      node.emplace();
    else
      node.reset();
  } else {
    at_entry<T>(held, [&]<std::size_t I>(std::integral_constant<std::size_t, I>) { node.template emplace<I>(); });
  }
}
/// Throws if another tree's node holds another number or another alternative.
template <class T, class U>
void require_same_entries(const Path& path, const T& node, const U& other) {
  if (held_by(node) != held_by(other))
    fail_structure(path.function(), entries_kind<T>(),
                   path.above == nullptr ? std::string(array_name<T>()) : path.text(), held_by(node), held_by(other));
}
/// Calls f(path, entry, entry of the second tree's node, ...) for each entry, after require_same_entries.
template <class F, class Tree, class... More>
void each_entry(const F& f, const Path& path, Tree& tree, More&... more) {
  using T = std::remove_const_t<Tree>;
  (require_same_entries<T>(path, tree, more), ...);
  const std::size_t held = held_by(tree);
  if constexpr (is_array<T>)
    for (std::size_t i = 0; i < held; ++i) f(Path{&path, {}, i}, tree[i], more[i]...);
  else
    at_entry<T>(held, [&]<std::size_t I>(std::integral_constant<std::size_t, I>) {
      f(path, entry<I>(tree), entry<I>(more)...);
    });
}

}  // namespace detail
}  // namespace shardlib
