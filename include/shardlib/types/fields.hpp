// The fields of a plain struct, which needs no extra code: how many there are, references to them, their types and
// their names. C++20 has no way to ask for these, so each is read off something that it does have.
#pragma once

#include <cstddef>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

namespace shardlib::detail {

// ---- how many: the most initializers that the struct takes ----

#if defined(__clang__)  // a std::optional of a std::variant asks for it with a type that a file has alone
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wundefined-internal"
#endif
/// An initializer for a field of any type.
struct any_field {
  template <class T>
  operator T() const;
};
#if defined(__clang__)
#pragma clang diagnostic pop
#endif
template <class T, std::size_t... I>
constexpr bool takes_initializers(std::index_sequence<I...>) {
  return requires {
    T{(static_cast<void>(I), any_field{})...};
  };
}
/// The number of fields of an aggregate; of more than N it is N.
template <class T, std::size_t N = 24>
constexpr std::size_t field_count() {
  if constexpr (N == 0 || takes_initializers<T>(std::make_index_sequence<N>{}))
    return N;
  else
    return field_count<T, N - 1>();
}

template <class T, std::size_t... Before, std::size_t... After>
constexpr bool takes_list(std::index_sequence<Before...> /*before*/, std::index_sequence<After...> /*after*/) {
  return requires {
    T{(static_cast<void>(Before), any_field{})..., {}, (static_cast<void>(After), any_field{})...};
  };
}
/// Whether a field is a C array. field_count counts each of its elements, but one `{}` initializes it.
template <class T, std::size_t I = 0>
constexpr bool has_c_array() {
  if constexpr (I == field_count<T>())
    return false;
  else if constexpr (takes_list<T>(std::make_index_sequence<I>{}, std::make_index_sequence<field_count<T>() - I - 1>{}))
    return has_c_array<T, I + 1>();
  else  // a field that must be initialized takes no `{}` at all
    return takes_list<T>(std::make_index_sequence<I>{}, std::index_sequence<>{}) || has_c_array<T, I + 1>();
}

// ---- references: a structured binding, which lists its names, so that each number of fields needs a line ----

#define SHARDLIB_FIELDS(n, ...)               \
  else if constexpr (field_count<U>() == n) { \
    auto& [__VA_ARGS__] = object;             \
    return std::tie(__VA_ARGS__);             \
  }
/// References to the fields, as a tuple. Other classes than plain structs give theirs by a member `as_tuple`.
template <class T>
constexpr auto fields(T& object) {
  using U = std::remove_const_t<T>;
  if constexpr (requires { object.as_tuple(); })
    return std::apply([](auto&... f) { return std::tie(f...); }, object.as_tuple());
  SHARDLIB_FIELDS(1, a)
  SHARDLIB_FIELDS(2, a, b)
  SHARDLIB_FIELDS(3, a, b, c)
  SHARDLIB_FIELDS(4, a, b, c, d)
  SHARDLIB_FIELDS(5, a, b, c, d, e)
  SHARDLIB_FIELDS(6, a, b, c, d, e, f)
  SHARDLIB_FIELDS(7, a, b, c, d, e, f, g)
  SHARDLIB_FIELDS(8, a, b, c, d, e, f, g, h)
  SHARDLIB_FIELDS(9, a, b, c, d, e, f, g, h, i)
  SHARDLIB_FIELDS(10, a, b, c, d, e, f, g, h, i, j)
  SHARDLIB_FIELDS(11, a, b, c, d, e, f, g, h, i, j, k)
  SHARDLIB_FIELDS(12, a, b, c, d, e, f, g, h, i, j, k, l)
  SHARDLIB_FIELDS(13, a, b, c, d, e, f, g, h, i, j, k, l, m)
  SHARDLIB_FIELDS(14, a, b, c, d, e, f, g, h, i, j, k, l, m, n)
  SHARDLIB_FIELDS(15, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o)
  SHARDLIB_FIELDS(16, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)
  SHARDLIB_FIELDS(17, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q)
  SHARDLIB_FIELDS(18, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r)
  SHARDLIB_FIELDS(19, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s)
  SHARDLIB_FIELDS(20, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t)
  SHARDLIB_FIELDS(21, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u)
  SHARDLIB_FIELDS(22, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v)
  SHARDLIB_FIELDS(23, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w)
  else static_assert(field_count<U>() > 0 && field_count<U>() < 24,
                     "a struct of tensors has 1 to 23 fields; nest structs");
}
#undef SHARDLIB_FIELDS

// ---- types ----

template <class T>
using fields_t = decltype(fields(std::declval<T&>()));
/// The number of the tuple's elements.
template <class T>
inline constexpr std::size_t tree_width = std::tuple_size_v<fields_t<T>>;

template <class Tuple>
struct plain;
template <class... F>
struct plain<std::tuple<F&...>> {
  using type = std::tuple<std::remove_const_t<F>...>;
};
/// The types of the fields, as a tuple.
template <class T>
using field_types = typename plain<fields_t<T>>::type;

// ---- whether they can be had ----

/// Converts only to base classes of T.
template <class T>
struct any_base {
  template <class U>
  requires(std::is_base_of_v<U, T> && !std::is_same_v<U, T>) operator U() const;
};
/// Whether `fields` works for T. Where it does not, calling it would give a compile error from the compiler, not from
/// here.
template <class T>
consteval bool decomposes() {
  if constexpr (requires(T & object) { object.as_tuple(); })
    return true;
  else if constexpr (!std::is_class_v<T> || !std::is_aggregate_v<T> || requires { T{any_base<T>{}}; })
    return false;
  else if constexpr (field_count<T>() == 0 || field_count<T>() > 23)
    return false;
  else
    return !has_c_array<T>();
}
/// Whether T has fields that can be assigned to: none is const, or a reference to const.
template <class T>
consteval bool has_fields() {
  if constexpr (requires(T & object) { object.as_tuple(); })
    return true;
  else if constexpr (decomposes<T>())
    return []<class... F>(std::type_identity<std::tuple<F&...>>) {
      return !(std::is_const_v<F> || ...);
    }(std::type_identity<fields_t<std::remove_const_t<T>>>{});
  else
    return false;
}

// ---- names: the compiler prints a pointer to a member of an object with the member's name ----

/// Holds an object, since compilers refuse to declare one of a function's local struct itself that is never defined.
template <class T>
struct holder {
  T object;
};
#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wundefined-var-template"
#pragma clang diagnostic ignored "-Wundefined-internal"
#endif
template <class T>
extern holder<T> phantom_holder;
/// A struct that is declared, but exists nowhere.
template <class T>
constexpr T& phantom() {
  return phantom_holder<T>.object;
}
#if defined(__clang__)
#pragma clang diagnostic pop
#endif
template <auto* P>
constexpr std::string_view spelled() {
  return __PRETTY_FUNCTION__;
}
template <class T, std::size_t I>
consteval std::string_view field_name() {
  constexpr auto* p = __builtin_addressof(std::get<I>(fields(phantom<T>())));
  constexpr std::string_view text = spelled<p>();
#if defined(__clang__)
  constexpr std::string_view after = "]";  // "...phantom_holder.object.w_q]"
#else
  constexpr std::string_view after = ");";  // "...object.Layer::w_q); std::string_view = ...]"
#endif
  constexpr std::size_t end = text.rfind(after);
  constexpr std::size_t start = text.find_last_of(".:", end) + 1;
  return text.substr(start, end - start);
}
/// The struct whose members name the fields of T: T::fields_of, if there is one.
template <class T>
struct named_as {
  using type = T;
};
template <class T>
requires requires {
  typename T::fields_of;
}
struct named_as<T> {
  using type = typename T::fields_of;
};

}  // namespace shardlib::detail
