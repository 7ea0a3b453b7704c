// linear_cross_entropy: the loss of logits that are made piece by piece, as one op with both cotangents in one pass.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "shardlib/detail/inline.hpp"
#include "shardlib/kernels/gemm.hpp"
#include "shardlib/kernels/rows.hpp"
#include "shardlib/ops/einsum.hpp"
#include "shardlib/ops/loss.hpp"
#include "shardlib/shapes.hpp"
#include "shardlib/tape.hpp"

namespace shardlib {
namespace detail {

/// Bytes of logits that are there at a time: enough rows for a good product, and for few passes over the sum of the
/// table's cotangent. Tests lower it.
inline std::int64_t logits_piece = std::int64_t{1} << 27;

/// Such a loss without the types of its operands: `x` "lead M", `table` "V/axes M", both of f32 or both of f64.
struct LinearCrossEntropy {
  OpInfo op;
  ValuePtr x, table, targets;
  std::string_view highest, sum;  ///< the op specs of the reductions over the vocabulary's axes

  [[nodiscard]] std::int64_t rows() const { return targets->count(); }
  /// Ids of this device. Padding is none: a zero may be far above all logits.
  [[nodiscard]] std::int64_t vocabulary() const { return true_extents(*table)[0]; }
  /// The first of them, among all devices'.
  [[nodiscard]] std::int64_t first_id() const {
    return block_index(*table->device, table->spec->dims[0].axes) * table->local[0];
  }
  [[nodiscard]] std::int64_t width() const {
    std::int64_t product = 1;
    for (int i = 1; i < table->local.size(); ++i) product *= table->local[i];
    return product;
  }
  [[nodiscard]] double product_flops() const {
    return 2.0 * static_cast<double>(rows()) * static_cast<double>(vocabulary()) * static_cast<double>(width());
  }
};

/// Records the op: "lead V/axes" is nowhere whole. `out`: the spec of the loss. `due`: those of the cotangents.
[[nodiscard, gnu::cold]] SHARDLIB_INLINE ValuePtr record_linear_cross_entropy(
    const LinearCrossEntropy& l, const TensorSpec& out, const std::array<const TensorSpec*, 2>& due);

}  // namespace detail

template <Op O, dtype D, Spec S, dtype E, Spec T, dtype I, Spec R>
auto linear_cross_entropy(const Tensor<D, S>& x, const Tensor<E, T>& table, const Tensor<I, R>& targets,
                          std::int64_t stored, Site site)
    -> Tensor<
        detail::after_t<detail::one_dtype<"linear_cross_entropy", D, E> &&
                            detail::is_float<"linear_cross_entropy", D> && detail::is_index<"linear_cross_entropy", I>,
                        accumulator_t<D>>,
        detail::result_of<rules::linear_cross_entropy, O, S, T, R>> {
  using A = accumulator_t<D>;
  static constexpr auto specs = detail::cross_entropy_specs(detail::result_of<rules::einsum, O, S, T>);
  const detail::LinearCrossEntropy l{
      {"linear_cross_entropy", O, site}, x.value(), table.value(), targets.value(), specs.reduce, specs.finish};
  if (l.rows() * table.value()->local[0] * static_cast<std::int64_t>(sizeof(A)) <= stored) {
    return cross_entropy(einsum_unreduced<O, A>(x, table, site), targets, site);
  } else if constexpr (!std::is_same_v<D, A>) {
    return linear_cross_entropy<O>(cast<A>(x), cast<A>(table), targets, stored, site);
  } else {
    using Out = Tensor<A, detail::result_of<rules::linear_cross_entropy, O, S, T, R>>;
    constexpr Spec axes = detail::axes_of<Out::spec, S, T>();
    static constexpr Spec due_x = detail::dual_spec(S, axes), due_table = detail::dual_spec(T, axes);
    return Out(detail::record_linear_cross_entropy(l, detail::parsed<Out::spec>,
                                                   {&detail::parsed<due_x>, &detail::parsed<due_table>}));
  }
}

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/ops/linear_cross_entropy_inl.hpp"
#endif
