// The types of gradients: the tree's own type if all leaves are fully sharded, else the Dual of each leaf.
#pragma once

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <vector>

#include "shardlib/types/tree.hpp"

namespace shardlib {

template <class M, class W>
class Gradient;

namespace detail {

// A named type, so that a tree and the trees in it share what it is instantiated to.
template <class M>
struct IsSelfDual {
  template <class D, Spec S>
  constexpr bool operator()(std::type_identity<Tensor<D, S>> /*leaf*/) const {
    return dual_spec<S, M::axes>() == S;
  }
};
template <class M, class W>
inline constexpr bool self_dual = all_leaves<W>(IsSelfDual<M>());

template <class M, class W>
struct gradient_of {
  using type = Gradient<M, W>;
};
template <class M, class W>
requires self_dual<M, W>
struct gradient_of<M, W> {
  using type = W;
};
template <class M, class D, Spec S>
requires(!self_dual<M, Tensor<D, S>>) struct gradient_of<M, Tensor<D, S>> {
  using type = Dual<Tensor<D, S>, M::axes>;
};

/// The mesh on which the gradient of W is typed. A pipeline has one of its own: some leaves have one copy for each
/// rank.
template <class M, class W>
struct gradient_mesh {
  using type = M;
};

}  // namespace detail

/// The gradient of a tree of weights on mesh M: W itself if every leaf is fully sharded (each leaf is then its own
/// dual), a Dual for a single tensor, a std::optional or std::variant of gradients for one of trees, else a Gradient.
template <class M, class W>
using gradient_t = typename detail::gradient_of<typename detail::gradient_mesh<M, W>::type, W>::type;

namespace detail {

template <class M, template <class...> class Of, class... T>
requires(is_choice<Of<T...>> && !self_dual<M, Of<T...>>) struct gradient_of<M, Of<T...>> {
  using type = Of<gradient_t<M, T>...>;
};

template <class M, class Tuple>
struct gradient_fields;
template <class M, class... F>
struct gradient_fields<M, std::tuple<F...>> {
  using type = std::tuple<gradient_t<M, F>...>;
};

template <class W, class T>
void take_member_of(T W::*member);
/// Whether it is a pointer to a member of W. A member of another struct would select the field at the same place.
template <class W, auto Member>
inline constexpr bool is_member_of = requires {
  take_member_of<W>(Member);
};
/// The index of the field of W that the member pointer selects.
template <class W, class T, std::size_t I = 0>
constexpr std::size_t field_index(T W::*member) {
  using Field = std::tuple_element_t<I, field_types<W>>;
  if constexpr (std::is_same_v<Field, std::remove_const_t<T>>) {
    if (&std::get<I>(fields(phantom<W>())) == &(phantom<W>().*member)) return I;
  }
  if constexpr (I + 1 < tree_width<W>)
    return field_index<W, T, I + 1>(member);
  else
    return I;
}

}  // namespace detail

/// The gradient of a struct with a leaf that is replicated over some axis. The gradient of that leaf is partial
/// there, and the program has to reduce it before an update. `gradient.get<&Weights::bias>()` is a
/// `Tensor<f32, "M +d">`. Through `as_tuple` and `fields_of`, functions of trees accept it together with W.
template <class M, class W>
class Gradient {
 public:
  using fields_of = W;
  /// The gradient of one member of W.
  template <auto Member>
  [[nodiscard]] const auto& get() const {
    static_assert(detail::is_member_of<W, Member>,
                  "get<&Struct::member>() of a gradient: name a member of the struct that was differentiated by");
    return std::get<detail::field_index(Member)>(fields_);
  }
  /// A compile error for a member's name.
  template <detail::Literal Name>
  void get() const {
    static_assert(detail::is_member_of<W, Name>, "get of a gradient takes no name; write get<&Struct::member>()");
  }
  auto& as_tuple() { return fields_; }
  const auto& as_tuple() const { return fields_; }

 private:
  typename detail::gradient_fields<M, detail::field_types<W>>::type fields_;
};

/// The gradient of layers with replicated leaves: one Gradient for each layer.
template <class M, Spec N, class T>
class Gradient<M, Array<N, T>> : public std::vector<gradient_t<M, T>> {
 public:
  using std::vector<gradient_t<M, T>>::vector;
};

template <class M, Spec N, class T>
inline constexpr bool is_array<Gradient<M, Array<N, T>>> = true;

namespace detail {

template <class T>
inline constexpr bool is_gradient = false;
template <class M, class W>
inline constexpr bool is_gradient<Gradient<M, W>> = true;

}  // namespace detail
}  // namespace shardlib
