// Tensor<dtype, "spec"> and Mesh<"axes">: the types only, without code that runs.
#pragma once

#include <concepts>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/rules/all.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/spec/require.hpp"
#include "shardlib/spec/spec.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/types/call_site.hpp"
#include "shardlib/types/whole_number.hpp"

namespace shardlib {

class Device;
using DevicePtr = detail::Handle<Device>;
template <class D, Spec S>
class Tensor;
namespace detail {
struct Value;
using ValuePtr = Handle<const Value>;
struct UntypedAccess;  // types/leaves.hpp

/// The error about an empty tensor: default-constructed, or moved from. If the tensor is a leaf of the weights,
/// `where` names it.
[[noreturn, gnu::noinline, gnu::cold]] inline void fail_empty(DType dtype, std::string_view spec,
                                                              std::string_view where = {}) {
  const Calling* op = where.empty() ? Calling::innermost : nullptr;
  throw EmptyTensor(
      (op != nullptr ? op->describe() + ": " : std::string(where)) + "a tensor `" + std::string(name(dtype)) + "[" +
      std::string(spec) +
      "]` was never given a value, or was moved from; make one with an op, as `zeros` or `place`, before it is used");
}

/// `result_of` for an op whose operands are of dtype D: a remedy that sums bf16 says in which dtype.
template <class D, auto Rule, auto... Args>
inline constexpr Spec result_for = result_of<Rule, Args...>;
template <auto Rule, auto... Args>
inline constexpr Spec result_for<bf16, Rule, Args...> = [] {
  if constexpr (checked<Rule, Args...>::outcome.complaint > 0)
    return result_of<rules::with_dtype<Rule, DType::bf16>, Args...>;
  else
    return result_of<Rule, Args...>;
}();
/// As above, of a rule that takes the op's name first.
template <class D, auto Rule, OpName Name, auto... Args>
inline constexpr Spec named_result_for = result_for<D, Rule, Name, Args...>;
/// As above, of a rule that takes an op spec and the specs of the operands.
template <class D, auto Rule, OpSpec O, Spec... S>
inline constexpr Spec op_result_for = result_for<D, Rule, O, S...>;

/// The dtype of the operand whose sum is pending, for `result_for`: i32 if it is that of the indices, else D.
template <class D, Spec... Indices>
using summed_in = std::conditional_t<(parsed<Indices>.partial.empty() && ...), D, i32>;

/// The result of an operator between tensors.
template <OpName Name, class D, Spec S, Spec T>
constexpr Spec arithmetic_spec() {
  if constexpr (Name == OpName("*"))
    return result_for<D, rules::multiply, S, T>;
  else if constexpr (Name == OpName("/") && floating<D>)
    return result_for<D, rules::divide, S, T>;
  else if constexpr (Name == OpName("/"))
    return result_of<rules::divide_integers, S, T>;
  else
    return result_for<D, rules::add, Name, S, T>;
}
template <OpName Name, class D, Spec S, class E, Spec T>
using arithmetic_t = Tensor<std::enable_if_t<checked<rules::same_dtype, Name, dtype_v<D>, dtype_v<E>>::ok, D>,
                            arithmetic_spec<Name, D, S, T>()>;

/// An operand of an operator, with the line of the call. An operator cannot have an extra parameter for the line. The
/// default argument of this conversion is evaluated at the operator's call instead.
template <class T>
struct Located {
  const T& operand;
  Site site;
  Located(const T& x, Site where = Site::current())  // NOLINT(google-explicit-constructor): it is the operand
      : operand(x), site(where) {}
};
using LocatedNumber = Located<double>;
/// The tensor that a compound operator assigns to.
template <class T>
struct Target {
  T& operand;
  Site site;
  Target(T& x, Site where = Site::current())  // NOLINT(google-explicit-constructor): it is the operand
      : operand(x), site(where) {}
};

template <class D, Spec S, class E, Spec T>
auto add(const Tensor<D, S>& a, const Tensor<E, T>& b, const Site& site) -> arithmetic_t<"+", D, S, E, T>;
template <class D, Spec S, class E, Spec T>
auto subtract(const Tensor<D, S>& a, const Tensor<E, T>& b, const Site& site) -> arithmetic_t<"-", D, S, E, T>;
template <class D, Spec S, class E, Spec T>
auto multiply(const Tensor<D, S>& a, const Tensor<E, T>& b, const Site& site) -> arithmetic_t<"*", D, S, E, T>;
template <class D, Spec S, class E, Spec T>
auto divide(const Tensor<D, S>& a, const Tensor<E, T>& b, const Site& site) -> arithmetic_t<"/", D, S, E, T>;
template <class D, Spec S>
auto negate(const Tensor<D, S>& x, const Site& site)
    -> Tensor<std::enable_if_t<checked<rules::arithmetic_dtype, OpName("-"), dtype_v<D>>::ok, D>, S>;
}  // namespace detail

namespace detail {
/// Whether V is a number or an array of the host, which no tensor is made of.
template <class V>
inline constexpr bool host_values = std::is_arithmetic_v<V>;
template <class V>
inline constexpr bool host_values<std::vector<V>> = std::is_arithmetic_v<V>;
/// S, once the call that has these types is made.
template <Spec S, class...>
inline constexpr Spec same_spec = S;
}  // namespace detail

/// The global size of a dim and its padded size, which the mesh divides: `{50257, 50304}`, or `8` if both are the
/// same. The padding is at the end, holds zeros, and does not count in results. `is_padded` says whether the sizes
/// differ.
struct DimSize {
  std::int64_t size = 0;
  std::int64_t padded = 0;

  DimSize() = default;
  /// A `padded_to` of 0 means no padding.
  template <detail::whole_number N>
  constexpr DimSize(N n, std::int64_t padded_to = 0)  // NOLINT(google-explicit-constructor): sizes are numbers
      : size(static_cast<std::int64_t>(n)), padded(padded_to == 0 ? size : padded_to) {}
  [[nodiscard]] constexpr bool is_padded() const { return padded != size; }
  friend constexpr bool operator==(const DimSize&, const DimSize&) = default;
};

/// The size of the dim `name`, optionally with its padded size: `{{"batch", 32}, {"V", 50257, 50304}}`. Sizes are
/// global, before sharding.
struct NamedSize {
  std::string name;
  std::int64_t size = 0;
  std::int64_t padded = 0;  ///< 0: no padding
};
/// A list of sizes, written at the call or built at run time.
using Sizes = std::vector<NamedSize>;

/// The smallest multiple that is at least the size. `{"V", 50257, round_up(50257, 64)}`
constexpr std::int64_t round_up(std::int64_t size, std::int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}
/// A dim's size, padded to a multiple. `padded("V", 50257, 64)`
inline NamedSize padded(std::string name, std::int64_t size, std::int64_t multiple) {
  return {std::move(name), size, round_up(size, multiple)};
}

#if defined(__NVCC__)
// nvcc 13 takes `y = f(x)` for a discarded result; its other warning, 3005, is right.
#pragma nv_diag_suppress 3001
#endif

/// A handle to one device's shard of a global array: `Tensor<f32, "B/d L M +t">`. Copies share the values, which are
/// immutable. Specs never convert implicitly: the program calls an op. `value_type` is the dtype, `spec` the spec,
/// `device` the device that holds the shard.
template <class D, Spec S>
class [[nodiscard("a tensor is never changed: an op returns another one")]] Tensor {
  static_assert(dtype<D>,
                "Tensor: its element type is not one of f32, bf16, f64, i32, u32, u8, bool_; use one of them");
  static_assert(detail::checked<rules::tensor, detail::Literal{std::string_view(S)}>::ok);

 public:
  using value_type = D;
  static constexpr Spec spec = S;

  Tensor() = default;
  explicit Tensor(detail::ValuePtr value) : value_(std::move(value)) {}

  /// A tensor of another type never converts. The error says what differs and which op converts it. The check is in
  /// the noexcept specifier, because a decltype evaluates that as well, but not the body.
  template <class D2, Spec S2>
  requires(!(S2 == S && std::is_same_v<D, D2>))
      Tensor(const Tensor<D2, S2>&)  // NOLINT(google-explicit-constructor): meant to catch implicit conversions
  noexcept(detail::checked<rules::assign, dtype_v<D>, S, dtype_v<D2>, S2>::ok) {}

  /// A compile error for values: a tensor of them is made on a mesh. One number does not convert, because overloads and
  /// `std::vector<Tensor>{4}`, which has four tensors, would take it for a tensor.
  template <class V, class... More>
  requires(detail::host_values<V> && (detail::host_values<More> && ...)) explicit(sizeof...(More) == 0)
      Tensor(const V&, const More&...) {
    static_assert(detail::checked<rules::no_values, dtype_v<D>, detail::same_spec<S, V>>::ok);
  }

  /// The global size of a dim, without padding.
  [[nodiscard]] std::int64_t size(std::string_view dim, Site site = Site::current()) const;
  /// A compile error for a dim's number, or for no argument. Without it, 0 would convert to a null pointer.
  template <std::integral... I>
  std::int64_t size(I...) const {
    static_assert(
        detail::checked<rules::no_number, OpName("size"), detail::Literal("a dim"), detail::same_spec<S, I...>>::ok);
    return 0;
  }
  /// The global size of a dim with its padding: the sum of the shards' sizes.
  [[nodiscard]] std::int64_t padded_size(std::string_view dim, Site site = Site::current()) const;
  /// The shape of this device's shard in memory, padding included, in the order of the spec.
  [[nodiscard]] std::span<const std::int64_t> local_shape() const;
  /// The global sizes without padding, in the order of the spec.
  [[nodiscard]] std::span<const std::int64_t> global_shape() const;
  /// This device's shard, row-major in the order of the spec. It includes the padding, as zeros. It is the shard itself
  /// in host memory, or a copy of device memory, which the next call renews.
  [[nodiscard]] std::span<const D> span() const&;
  /// A compile error for a tensor without a name, as in `for (float v : relu(x).span())`: its elements go with it.
  template <class = void>  // so that `template class Tensor<f32, "M">;` compiles
  std::span<const D> span() const&& {
    static_assert(detail::checked<rules::no_view, OpName("span"), S>::ok);
    return {};
  }
  [[nodiscard]] const DevicePtr& device() const;

  /// True if the tensor holds a value. It does not compile for bool_, where a program would mean the elements.
  explicit operator bool() const {
    if constexpr (std::is_same_v<D, bool_>) static_assert(detail::checked<rules::no_condition, S>::ok);
    return value_ != nullptr;
  }
  /// The type-erased value, for ops. This and all members above throw if the tensor is empty.
  [[nodiscard]] const detail::ValuePtr& value() const {
    if (!value_) [[unlikely]]
      detail::fail_empty(dtype_v<D>, S);
    return value_;
  }

  /// A compile error that names the ops which take a part.
  template <class I, Spec X = S>
  auto operator[](const I& at) const->Tensor<D, detail::result_of<rules::no_subscript, X>>;

  // Elementwise arithmetic, which broadcasts by name. The result has the dims of the operand with the most dims, then
  // the dims that only the other operand has: "M" and "B/d L M" give "B/d L M".
  template <class E, Spec T>
  friend auto operator+(detail::Located<Tensor> a, const Tensor<E, T>& b)->detail::arithmetic_t<"+", D, S, E, T> {
    return detail::add(a.operand, b, a.site);
  }
  template <class E, Spec T>
  friend auto operator-(detail::Located<Tensor> a, const Tensor<E, T>& b)->detail::arithmetic_t<"-", D, S, E, T> {
    return detail::subtract(a.operand, b, a.site);
  }
  template <class E, Spec T>
  friend auto operator*(detail::Located<Tensor> a, const Tensor<E, T>& b)->detail::arithmetic_t<"*", D, S, E, T> {
    return detail::multiply(a.operand, b, a.site);
  }
  template <class E, Spec T>
  friend auto operator/(detail::Located<Tensor> a, const Tensor<E, T>& b)->detail::arithmetic_t<"/", D, S, E, T> {
    return detail::divide(a.operand, b, a.site);
  }
  friend auto operator-(detail::Located<Tensor> x) {
    return detail::negate(x.operand, x.site);
  }

  /// `a += b` is `a = a + b`, where the result must have the type of a. The other operators do the same.
  template <class E, Spec T>
  friend Tensor& operator+=(detail::Target<Tensor> a, const Tensor<E, T>& b) {
    return a.operand = detail::add(a.operand, b, a.site);
  }
  template <class E, Spec T>
  friend Tensor& operator-=(detail::Target<Tensor> a, const Tensor<E, T>& b) {
    return a.operand = detail::subtract(a.operand, b, a.site);
  }
  template <class E, Spec T>
  friend Tensor& operator*=(detail::Target<Tensor> a, const Tensor<E, T>& b) {
    return a.operand = detail::multiply(a.operand, b, a.site);
  }
  template <class E, Spec T>
  friend Tensor& operator/=(detail::Target<Tensor> a, const Tensor<E, T>& b) {
    return a.operand = detail::divide(a.operand, b, a.site);
  }
  friend Tensor& operator+=(detail::Target<Tensor> a, double number) {
    return a.operand = a.operand + detail::LocatedNumber(number, a.site);
  }
  friend Tensor& operator-=(detail::Target<Tensor> a, double number) {
    return a.operand = a.operand - detail::LocatedNumber(number, a.site);
  }
  friend Tensor& operator*=(detail::Target<Tensor> a, double number) {
    return a.operand = a.operand * detail::LocatedNumber(number, a.site);
  }
  template <class N>
  requires std::is_convertible_v<N, double>
  friend Tensor& operator/=(detail::Target<Tensor> a, N number) {
    if constexpr (std::is_floating_point_v<N> && !floating<D>) return a.operand = a.operand / number;  // an error
    return a.operand = a.operand / detail::LocatedNumber(static_cast<double>(number), a.site);
  }

 private:
  friend struct detail::UntypedAccess;
  detail::ValuePtr value_;
};

/// Whether the type is a Tensor.
template <class T>
inline constexpr bool is_tensor = false;
template <class D, Spec S>
inline constexpr bool is_tensor<Tensor<D, S>> = true;
/// Any Tensor, of any dtype and spec.
template <class T>
concept tensor = is_tensor<std::remove_cvref_t<T>>;

namespace detail {
/// One axis as `{"d", 4}`, for compile errors about such braces.
struct LoneAxis {
  LoneAxis(const char*, int);  // NOLINT(google-explicit-constructor): for braces
};
}  // namespace detail

/// The names of the mesh's axes, in order, as a type. Their sizes are known at run time. For a `Mesh<"d t">`, `axes`
/// are these names, `size` is the number of devices along an axis, and `device` is this device.
template <Spec Axes>
class Mesh {
  static_assert(detail::checked<rules::mesh, detail::Literal{std::string_view(Axes)}>::ok);

 public:
  static constexpr Spec axes = Axes;

  Mesh() = default;
  /// One device's view of the mesh. The device's axes must be those of the type, in their order; an axis that the
  /// device lacks has size 1.
  explicit Mesh(DevicePtr device);
  /// A compile error for an argument that is not a device, such as sizes. Those in braces have the default type.
  template <class X = std::vector<detail::LoneAxis>, class... More>
  requires(!std::is_convertible_v<const X&, const Mesh&> &&
           (sizeof...(More) > 0 || !std::is_convertible_v<X, DevicePtr>)) explicit Mesh(const X&, const More&...) {
    static_assert(std::is_void_v<X>,
                  "a Mesh is made of the device that `launch` gives to its function, and `launch` has the sizes: "
                  "launch({{\"d\", 4}}, [](const DevicePtr& device) { const Mesh<\"d\"> mesh(device); ... })");
  }

  [[nodiscard]] int size(std::string_view axis) const;
  /// A compile error for an axis' number. Without it, 0 would convert to a null pointer.
  template <std::integral I>
  int size(I) const {
    static_assert(
        detail::checked<rules::no_number, OpName("size"), detail::Literal("an axis"), detail::same_spec<Axes, I>>::ok);
    return 0;
  }
  template <std::integral I>
  int axis_index(I) const {
    static_assert(detail::checked<rules::no_number, OpName("axis_index"), detail::Literal("an axis"),
                                  detail::same_spec<Axes, I>>::ok);
    return 0;
  }
  /// This device's index along the axis.
  [[nodiscard]] int axis_index(std::string_view axis) const;
  /// The number of devices. `rank` is this device's number among them (row-major, the last axis fastest).
  [[nodiscard]] int size() const;
  [[nodiscard]] int rank() const;
  [[nodiscard]] const DevicePtr& device() const;

 private:
  DevicePtr device_;
};
/// Compile errors: `Mesh mesh(device)` lacks the names of the axes, and `Mesh mesh({{"d", 4}})` and
/// `Mesh mesh(parse_mesh("d=4"))` have sizes.
Mesh(const DevicePtr&)->Mesh<"??">;
Mesh(const std::vector<detail::LoneAxis>&)->Mesh<"d">;
template <class Size>
Mesh(const std::vector<Size>&) -> Mesh<"d">;

namespace detail {

/// All axes of the specs, as the spec of a mesh.
template <Spec... S>
constexpr Spec axes_of() {
  Small<std::string_view, 3 * max_axes> axes;
  (rules::collect_axes(parsed<S>, axes), ...);
  Text text;
  for (auto axis : axes) text = text + (text.empty() ? "" : " ") + axis;
  return Spec(text.view());
}

/// The spec of the cotangent of S on these axes.
template <Spec S, Spec Axes>
constexpr Spec dual_spec() {
  return spec_of(rules::dual(parsed<S>, rules::mesh_axes(parsed<Axes>)));
}

template <class T, Spec Axes>
struct dual;
template <class D, Spec S, Spec Axes>
struct dual<Tensor<D, S>, Axes> {
  using type = Tensor<D, dual_spec<S, Axes>()>;
};

}  // namespace detail

/// The type of a cotangent on the axes of a mesh: replicated becomes partial, partial becomes replicated, and sharded
/// stays. `Dual<Tensor<f32, "M/t">, "d t">` is `Tensor<f32, "M/t +d">`.
template <class T, Spec Axes>
using Dual = typename detail::dual<T, Axes>::type;

}  // namespace shardlib
