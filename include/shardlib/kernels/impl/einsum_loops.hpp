// The einsum loops for given sizes: permutes of operands, outer loops, and an inner kernel.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "shardlib/kernels/einsum_plan.hpp"
#include "shardlib/kernels/strided.hpp"

namespace shardlib::kernels {

/// The einsum loops for given sizes: permutes of whole tensors if they save time, outer loops, and an inner kernel.
struct EinsumLoops {
  enum class Inner : std::uint8_t {
    gemm,  ///< matrix product of m x n x k
    dot,   ///< sum over one k loop
    scale  ///< product along one kept loop
  };
  /// Strides in lhs, rhs and the result, and 0 where a tensor lacks the index.
  using Loops = Nest<3>;

  Inner inner = Inner::dot;
  Loops kept;                      ///< outer loops over the result's indices
  Loops summed;                    ///< outer loops over summed indices, inside `kept`
  Loops::Loop row;                 ///< gemm: m; dot and scale: the inner loop
  Loops::Loop column;              ///< gemm: n
  Loops::Loop depth;               ///< gemm: k
  std::array<DimVector, 3> order;  ///< the order of the indices of lhs, rhs and result for the inner kernel
  std::array<bool, 3> moved{};     ///< whether each of the three is permuted to get that order
  double cost = 0;                 ///< estimated ns

  [[nodiscard]] constexpr bool permutes() const { return moved[0] || moved[1] || moved[2]; }
};

namespace detail {

using Role = EinsumPlan::Role;
using Loops3 = EinsumLoops::Loops;

struct RoleLoop {
  Role role = Role::batch;
  Loops3::Loop loop;
};

/// The indices of tensor t (0 lhs, 1 rhs, 2 result) in the order of its dims, without those that were summed before.
constexpr DimVector tensor_order(const EinsumPlan& plan, int t) {
  DimVector order;
  const int rank = t == 0 ? plan.lhs_rank : t == 1 ? plan.rhs_rank : plan.out_rank;
  for (int d = 0; d < rank; ++d) {
    for (int i = 0; i < plan.count; ++i) {
      const auto& index = plan.at(i);
      const bool alone = index.role == Role::lhs_only || index.role == Role::rhs_only;
      if (!alone && (t == 0 ? index.lhs : t == 1 ? index.rhs : index.out) == d) order.push(i);
    }
  }
  return order;
}

constexpr void append(const EinsumPlan& plan, DimVector& to, const DimVector& from, Role role) {
  for (int d = 0; d < from.count; ++d) {
    if (plan.at(static_cast<int>(from[d])).role == role) to.push(from[d]);
  }
}

/// True if a matrix with these strides, or its transpose, is row-major.
constexpr bool is_matrix(const Loops3::Loop& x, const Loops3::Loop& y, std::size_t t) {
  return x.extent == 1 || y.extent == 1 || x.strides[t] == 1 || y.strides[t] == 1;
}

/// How tensor t stores the matrix with dims x and y: transposed if only x is contiguous.
struct MatrixLayout {
  bool transposed;
  std::int64_t stride;  ///< between rows

  MatrixLayout(const Loops3::Loop& x, const Loops3::Loop& y, std::size_t t)
      : transposed(y.extent > 1 && y.strides[t] != 1) {
    const Loops3::Loop &rows = transposed ? y : x, &columns = transposed ? x : y;
    stride = rows.extent > 1 ? rows.strides[t] : columns.extent;
  }
};

/// The matrices of a loop nest's inner product: C = A B, or C' = B' A' where the result is stored transposed.
struct EinsumMatrices {
  MatrixLayout a, b, c;
  std::int64_t rows, columns, depth;
  bool swapped;  ///< the left operand of the einsum is B

  explicit EinsumMatrices(const EinsumLoops& s)
      : a(s.row, s.depth, 0),
        b(s.depth, s.column, 1),
        c(s.row, s.column, 2),
        rows(s.row.extent),
        columns(s.column.extent),
        depth(s.depth.extent),
        swapped(c.transposed) {
    if (!swapped) return;
    std::swap(a, b);
    std::swap(rows, columns);
    for (MatrixLayout* const turned : {&a, &b, &c}) turned->transposed = !turned->transposed;
  }
};

/// The loops of the plan for the given orders of dims. Loops of size 1 are removed and adjacent ones merged.
struct MergedLoops {
  std::array<RoleLoop, std::size_t{2} * max_rank> items{};
  int count = 0;
  constexpr RoleLoop& at(int i) { return items[static_cast<std::size_t>(i)]; }

  constexpr MergedLoops(const EinsumPlan& plan, std::span<const std::int64_t> sizes,
                        const std::array<DimVector, 3>& order) {
    for (int i = 0; i < plan.count; ++i) {
      const Role role = plan.at(i).role;
      const std::int64_t size = sizes[static_cast<std::size_t>(i)];
      if (size == 1 || role == Role::lhs_only || role == Role::rhs_only) continue;
      RoleLoop item{role, {size, {}}};
      for (std::size_t t = 0; t < 3; ++t) {
        std::int64_t stride = 1;
        for (int d = order[t].count; d-- > 0;) {
          if (order[t][d] == i) item.loop.strides[t] = stride;
          stride *= sizes[static_cast<std::size_t>(order[t][d])];
        }
      }
      at(count++) = item;
    }
    while (merge_one()) {
    }
  }

 private:
  constexpr bool merge_one() {
    for (int i = 0; i < count; ++i) {
      for (int j = 0; j < count; ++j) {
        const auto& inner = at(j).loop;
        bool adjacent = i != j && at(i).role == at(j).role;
        for (std::size_t t = 0; t < 3; ++t) {
          adjacent = adjacent && at(i).loop.strides[t] == inner.strides[t] * inner.extent;
        }
        if (!adjacent) continue;
        at(i).loop = {at(i).loop.extent * inner.extent, inner.strides};
        at(j) = at(--count);
        return true;
      }
    }
    return false;
  }
};

/// Builds the loops and the inner kernel for a given choice of inner loops (indices into `loops`, -1 for none).
constexpr EinsumLoops build(MergedLoops& loops, EinsumLoops::Inner inner, int row, int column, int depth) {
  EinsumLoops s;
  s.inner = inner;
  if (row >= 0) s.row = loops.at(row).loop;
  if (column >= 0) s.column = loops.at(column).loop;
  if (depth >= 0) s.depth = loops.at(depth).loop;
  // Outer loops are in the memory order of the result, then of the left operand.
  std::array<bool, std::size_t{2} * max_rank> used{};
  for (int round = 0; round < loops.count; ++round) {
    int best = -1;
    for (int i = 0; i < loops.count; ++i) {
      if (used[static_cast<std::size_t>(i)] || i == row || i == column || i == depth) continue;
      const auto& x = loops.at(i).loop.strides;
      if (best < 0 || x[2] > loops.at(best).loop.strides[2] ||
          (x[2] == loops.at(best).loop.strides[2] && x[0] > loops.at(best).loop.strides[0])) {
        best = i;
      }
    }
    if (best < 0) break;
    used[static_cast<std::size_t>(best)] = true;
    const auto& loop = loops.at(best).loop;
    (loops.at(best).role == Role::k ? s.summed : s.kept).push(loop.extent, loop.strides);
  }
  return s;
}

/// The estimated time in ns. The constants were measured on one core with AVX-512 and oneDNN; only their ratios
/// matter.
constexpr double inner_cost(EinsumLoops::Inner inner, const Loops3::Loop& row, const Loops3::Loop& column,
                            const Loops3::Loop& depth) {
  const auto m = static_cast<double>(row.extent);
  if (inner == EinsumLoops::Inner::gemm) {
    const auto n = static_cast<double>(column.extent);
    const auto k = static_cast<double>(depth.extent);
    return 150.0 + 2.0 * m * n * k / 150.0 + (m * k + k * n + 2.0 * m * n) * 0.1;
  }
  bool unit = true;
  for (std::size_t t = 0; t < 3; ++t) unit = unit && row.strides[t] <= 1;
  return 12.0 + m * (unit ? 0.12 : 1.0);
}

/// The cheapest inner kernel for the given orders of dims.
constexpr EinsumLoops choose_inner(const EinsumPlan& plan, std::span<const std::int64_t> sizes,
                                   const std::array<DimVector, 3>& order, bool matrices) {
  using Inner = EinsumLoops::Inner;
  MergedLoops loops(plan, sizes, order);
  double total = 1;
  for (int i = 0; i < loops.count; ++i) total *= static_cast<double>(loops.at(i).loop.extent);
  double best = -1;
  Inner inner = Inner::dot;
  int chosen[3] = {-1, -1, -1};
  const auto loop = [&](int i) { return i < 0 ? Loops3::Loop{} : loops.at(i).loop; };
  const auto consider = [&](Inner kind, int row, int column, int depth) {
    const Loops3::Loop r = loop(row);
    const Loops3::Loop c = loop(column);
    const Loops3::Loop d = loop(depth);
    if (kind == Inner::gemm && !(matrices && is_matrix(r, d, 0) && is_matrix(d, c, 1) && is_matrix(r, c, 2))) return;
    const auto covered = static_cast<double>(r.extent * c.extent * d.extent);
    const double cost = total / covered * inner_cost(kind, r, c, d);
    if (best >= 0 && cost >= best) return;
    best = cost;
    inner = kind;
    chosen[0] = row;
    chosen[1] = column;
    chosen[2] = depth;
  };
  const auto is = [&](int i, Role role) { return i < 0 || loops.at(i).role == role; };
  consider(Inner::dot, -1, -1, -1);
  for (int i = 0; i < loops.count; ++i) consider(is(i, Role::k) ? Inner::dot : Inner::scale, i, -1, -1);
  for (int m = -1; m < loops.count; ++m) {
    if (!is(m, Role::m)) continue;
    for (int n = -1; n < loops.count; ++n) {
      if (!is(n, Role::n)) continue;
      for (int k = -1; k < loops.count; ++k) {
        if (is(k, Role::k)) consider(Inner::gemm, m, n, k);
      }
    }
  }
  EinsumLoops s = build(loops, inner, chosen[0], chosen[1], chosen[2]);
  s.order = order;
  s.cost = best;
  return s;
}

}  // namespace detail

/// The cheapest loop nest for the given sizes, one size (at least 1) for each index of the plan. `matrices` says
/// whether the element type has a matrix product.
constexpr EinsumLoops choose_einsum_loops(const EinsumPlan& plan, std::span<const std::int64_t> sizes, bool matrices) {
  using detail::Role;
  const std::array<DimVector, 3> natural{detail::tensor_order(plan, 0), detail::tensor_order(plan, 1),
                                         detail::tensor_order(plan, 2)};
  EinsumLoops best = detail::choose_inner(plan, sizes, natural, matrices);
  double flops = 2;
  for (int i = 0; i < plan.count; ++i) {
    const bool alone = plan.at(i).role == Role::lhs_only || plan.at(i).role == Role::rhs_only;
    flops *= alone ? 1.0 : static_cast<double>(sizes[static_cast<std::size_t>(i)]);
  }
  // A permute cannot gain much if the loops already run near the arithmetic limit, or if the problem is small.
  if (best.cost < 1000 || best.cost < 1.3 * flops / 150.0) return best;
  for (unsigned moves = 1; moves < 8; ++moves) {
    std::array<DimVector, 3> order = natural;
    if ((moves & 1U) != 0) {
      order[0] = DimVector();
      detail::append(plan, order[0], natural[2], Role::batch);
      detail::append(plan, order[0], natural[2], Role::m);
      detail::append(plan, order[0], natural[1], Role::k);
    }
    if ((moves & 2U) != 0) {
      order[1] = DimVector();
      detail::append(plan, order[1], natural[2], Role::batch);
      detail::append(plan, order[1], order[0], Role::k);
      detail::append(plan, order[1], natural[2], Role::n);
    }
    if ((moves & 4U) != 0) {
      order[2] = DimVector();
      detail::append(plan, order[2], order[0], Role::batch);
      detail::append(plan, order[2], order[0], Role::m);
      detail::append(plan, order[2], order[1], Role::n);
    }
    EinsumLoops candidate = detail::choose_inner(plan, sizes, order, matrices);
    for (std::size_t t = 0; t < 3; ++t) {
      if ((moves >> t & 1U) == 0) continue;
      candidate.moved[t] = true;
      double elements = 1;
      for (const std::int64_t i : order[t].span()) elements *= static_cast<double>(sizes[static_cast<std::size_t>(i)]);
      candidate.cost += 300.0 + elements;
    }
    if (candidate.cost < best.cost) best = candidate;
  }
  return best;
}

}  // namespace shardlib::kernels
