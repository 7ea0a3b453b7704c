// Definitions of einsum.hpp.
#pragma once

#include "shardlib/compute/einsum.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "shardlib/compute/elementwise.hpp"
#include "shardlib/compute/reductions.hpp"
#include "shardlib/kernels/einsum_epilogue.hpp"
#include "shardlib/runtime/bindings.hpp"
#include "shardlib/runtime/program_state.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE double einsum_flops(const Value& x, const Value& y) {
  double flops = 2.0 * static_cast<double>(x.count());
  for (int i = 0; i < y.spec->rank(); ++i)
    if (!x.spec->has(y.spec->dims[i].name)) flops *= static_cast<double>(y.local[i]);
  return flops;
}

/// f32 to bf16, in the operand's memory if no other value shares it: then the half of it that is not used is freed.
struct CastInPlace {
  ValuePtr x;
  Buffer operator()(const Value& out) const {
    x->storage->materialize();
    if (x->storage.use_count() > 1 || !x->storage->buffer.unique()) return cast_kernel<bf16, f32>(*x, out);
    const Exec exec = out.device->exec();
    const f32* const from = x->as<const f32>();
    program_state(out.device).work.in_place = true;
    const Buffer result = std::move(x->storage->buffer);
    bf16* const to = result.as<bf16>();
    // Elements k to 2k are written to the places of elements k/2 to k. So pieces that double in size do not overlap
    // with what they read, and what they overwrite has been read.
    const std::int64_t n = out.count(), first = std::min<std::int64_t>(n, 4096);
    const Buffer head = exec.pool->allocate(static_cast<std::size_t>(first) * sizeof(bf16));
    kernels::apply_flat(exec, first, CastElement{}, from, head.as<bf16>());
    exec.copy(to, head.data(), head.bytes());
    for (std::int64_t k = first; k < n; k *= 2)
      kernels::apply_flat(exec, std::min(k, n - k), CastElement{}, from + k, to + k);
    exec.pool->shrink(result, out.bytes());
    return result;
  }
};

SHARDLIB_INLINE void cast_cotangent(const ValuePtr& result, DType operands) {
  if (!result->slot) return;
  result->slot.node->cast_cotangent = [operands](ValuePtr ct) {
    const Calling op("cast", {}, {});
    if (ct->slot || ct.use_count() > 1 || operands != DType::bf16) return cast_floating(op, ct, operands);
    const DevicePtr device = ct->device;
    const TensorSpec& spec = *ct->spec;
    const GlobalSizes sizes = ct->global;
    return evaluate(make_recorded(op, device, operands, spec, sizes, {}), CastInPlace{std::move(ct)});
  };
}

/// The roles of dims in a product, which is made at run time.
inline kernels::EinsumPlan plan_product(const TensorSpec& a, const TensorSpec& b, const TensorSpec& out) {
  Small<std::string_view, 3 * max_dims> names;
  const auto numbers = [&](const TensorSpec& spec) {
    std::vector<int> ids;
    for (const Dim& dim : spec.dims) {
      if (!names.contains(dim.name)) names.push_back(dim.name);
      ids.push_back(names.find(dim.name));
    }
    return ids;
  };
  const std::vector<int> ids_a = numbers(a), ids_b = numbers(b), ids_out = numbers(out);
  return kernels::plan_einsum(ids_a, ids_b, ids_out);
}

/// The cotangent of an operand of spec `of`: einsum_vjp at run time.
inline ValuePtr product_cotangent(const ValuePtr& ct, const ValuePtr& other, const TensorSpec& of,
                                  const GlobalSizes& sizes, ProductKernel product) {
  const TensorSpec& due = lasting_dual(of, {ct->spec, other->spec});
  TensorSpec kept = due;
  for (int i = kept.rank(); i-- > 0;)
    if (!ct->spec->has(kept.dims[i].name) && !other->spec->has(kept.dims[i].name)) kept.dims.erase(i);
  const TensorSpec& spec = lasting(kept);
  const kernels::EinsumPlan plan = plan_product(*ct->spec, *other->spec, spec);
  const ValuePtr grad = record_product_erased(Calling("einsum_unreduced", {}, {}), ct, other, ct->dtype, spec, plan,
                                              product(plan, ct, other), product);
  if (kept.rank() == due.rank()) return grad;
  return evaluate(make_recorded(Calling("broadcast", {}, {}), ct->device, ct->dtype, due, sizes, {}),
                  OfOperand{grad, &repeat_kernel});
}

SHARDLIB_INLINE ValuePtr record_product_erased(const OpInfo& op, const ValuePtr& x, const ValuePtr& y, DType dtype,
                                               const TensorSpec& spec, const kernels::EinsumPlan& plan, Kernel&& kernel,
                                               ProductKernel product) {
  const ValuePtr operands[] = {x, y};
  const GlobalSizes global = sizes_by_name(op, spec, {&x, &y});
  std::vector<EdgeSource> sources;
  if (x->slot || y->slot)
    for (const int i : {0, 1})
      sources.push_back({&operands[i],
                         {&operands[1 - i]},
                         [of = operands[i]->spec, product](const ValuePtr& ct, const Residuals& saved) {
                           return product_cotangent(ct, saved.values[0], *of, saved.sizes, product);
                         }});
  const auto out = make_recorded(op, x->device, dtype, spec, global, sources);
  const ProgramState& s = program_state(x->device);
  if (!s.defers_products || s.mode != ProgramState::Mode::eager || x->dtype != dtype)
    return evaluate(out, std::move(kernel));
  return defer_product(out, std::move(kernel), [plan, x, y](const Value& result, const Value& at) {
    const Exec exec = result.device->exec();
    Buffer product = kernels::has_epilogues(exec) ? allocate(result) : Buffer();
    if (!product ||
        !kernels::einsum_with_epilogue(exec, plan, result.dtype, x->data().data(), view(x->local), y->data().data(),
                                       view(y->local), product.data(), {.slope_at = at.data().data()}))
      return Buffer();
    add_flops(result, einsum_flops(*x, *y));
    return product;
  });
}

SHARDLIB_INLINE EinsumOrder einsum_order(const OpInfo& op, const OpParts& parts, const std::vector<ValuePtr>& x) {
  Bindings names(op, x[0]->device);
  for (const ValuePtr& operand : x) names.bind(*operand);
  const auto size = [&](std::string_view dim) {
    for (const ValuePtr& operand : x)
      if (const int at = operand->spec->find(dim); at >= 0) return static_cast<double>(operand->local[at]);
    return 1.0;
  };
  const unsigned all = (1U << x.size()) - 1;
  EinsumOrder order{};
  std::array<double, std::tuple_size_v<EinsumOrder>> least{};
  for (unsigned set = 1; set <= all; ++set) {
    const unsigned lowest = set & (0U - set);
    if (set == lowest) continue;
    least[set] = std::numeric_limits<double>::infinity();
    for (unsigned first = 1; first < set; ++first) {
      if ((first & ~set) != 0 || (first & lowest) == 0) continue;
      const TensorSpec a = rules::product_of(parts, first), b = rules::product_of(parts, set & ~first);
      double products = 1;
      for (const Dim& dim : a.dims) products *= size(dim.name);
      for (const Dim& dim : b.dims) products *= a.has(dim.name) ? 1.0 : size(dim.name);
      const double cost = least[first] + least[set & ~first] + products;
      if (cost < least[set]) {
        least[set] = cost;
        order[set] = first;
      }
    }
  }
  return order;
}

}  // namespace shardlib::detail
