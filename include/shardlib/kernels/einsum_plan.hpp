// The role of each index in an einsum of two operands.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "shardlib/kernels/strided.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::kernels {

/// An einsum as the role of each index. It is known at compile time, because it does not depend on sizes.
struct EinsumPlan {
  enum class Role : std::int8_t {
    batch,     ///< in both operands and the result
    m,         ///< in lhs and the result
    n,         ///< in rhs and the result
    k,         ///< in both operands, summed
    lhs_only,  ///< only in lhs, summed
    rhs_only   ///< only in rhs, summed
  };
  struct Index {
    Role role = Role::batch;
    std::int8_t lhs = -1;  ///< position among lhs's dims, or -1
    std::int8_t rhs = -1;
    std::int8_t out = -1;
  };
  std::array<Index, std::size_t{2} * max_rank> indices{};
  int count = 0;
  int lhs_rank = 0;
  int rhs_rank = 0;
  int out_rank = 0;

  [[nodiscard]] constexpr const Index& at(int i) const { return indices[static_cast<std::size_t>(i)]; }
};

/// Determines the roles of an einsum's ids. There is one id per dim, unique within a tensor.
constexpr EinsumPlan plan_einsum(std::span<const int> lhs, std::span<const int> rhs, std::span<const int> out) {
  const auto find = [](std::span<const int> ids, int id) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] == id) return static_cast<std::int8_t>(i);
    }
    return static_cast<std::int8_t>(-1);
  };
  if (lhs.size() > max_rank || rhs.size() > max_rank || out.size() > max_rank) {
    throw Error("einsum: a tensor has more than 12 dims; merge some of them");
  }
  EinsumPlan plan;
  plan.lhs_rank = static_cast<int>(lhs.size());
  plan.rhs_rank = static_cast<int>(rhs.size());
  plan.out_rank = static_cast<int>(out.size());
  using Role = EinsumPlan::Role;
  const auto add = [&](int id) {
    EinsumPlan::Index index{Role::batch, find(lhs, id), find(rhs, id), find(out, id)};
    if (index.out >= 0) {
      index.role = index.rhs < 0 ? Role::m : index.lhs < 0 ? Role::n : Role::batch;
    } else {
      index.role = index.rhs < 0 ? Role::lhs_only : index.lhs < 0 ? Role::rhs_only : Role::k;
    }
    plan.indices[static_cast<std::size_t>(plan.count++)] = index;
  };
  for (const int id : lhs) add(id);
  for (const int id : rhs) {
    if (find(lhs, id) < 0) add(id);
  }
  for (const int id : out) {
    if (find(lhs, id) < 0 && find(rhs, id) < 0) throw Error("einsum: a result index is in neither operand");
  }
  return plan;
}

}  // namespace shardlib::kernels
