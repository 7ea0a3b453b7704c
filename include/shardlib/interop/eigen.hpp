// Tensors as Eigen's matrices, without copies. shardlib.hpp does not include this file: a program takes a tenth longer
// to compile with Eigen.
#pragma once

#include <Eigen/Core>

#include "shardlib/runtime/tensor.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib {

/// This device's shard as a row-major Eigen matrix: columns are the last dim, rows all other
/// dims. Padding is part of the shard. `as_eigen(x)`
template <dtype D, Spec S>
auto as_eigen(const Tensor<D, S>& x) {
  using Matrix = Eigen::Matrix<D, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const auto local = x.local_shape();
  const Eigen::Index columns = local.empty() ? 1 : local.back();
  const Eigen::Index rows = columns == 0 ? 0 : static_cast<Eigen::Index>(x.span().size()) / columns;
  return Eigen::Map<const Matrix>(x.span().data(), rows, columns);
}
/// A compile error for a tensor without a name: its elements go with it.
template <dtype D, Spec S>
auto as_eigen(const Tensor<D, S>&& x) {
  static_assert(detail::checked<rules::no_view, OpName("as_eigen"), S>::ok);
  return as_eigen(x);
}

}  // namespace shardlib
