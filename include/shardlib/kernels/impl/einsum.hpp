// Definitions of einsum.hpp.
#pragma once

#include "shardlib/kernels/einsum.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <type_traits>

#include "shardlib/kernels/bf16_gemm.hpp"
#include "shardlib/kernels/body/elementwise.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/kernels/impl/einsum_loops.hpp"
#include "shardlib/kernels/impl/einsum_run.hpp"
#include "shardlib/kernels/layout.hpp"
#include "shardlib/kernels/reduce.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::kernels {

namespace detail {

template <class From, class To>
void convert(const Exec& exec, std::int64_t n, const From* in, To* out) {
  apply_flat(exec, n, body::ConvertElement{}, in, out);
}

/// A dense operand, converted, summed and permuted in scratch memory as the kernels need it.
template <class T>
struct Staged {
  const T* data = nullptr;
  Buffer scratch;

  T* fresh(const Exec& exec, std::int64_t elements) {
    scratch = exec.pool->allocate(static_cast<std::size_t>(elements) * sizeof(T));
    data = scratch.as<T>();
    return scratch.as<T>();
  }
  template <class In>
  void load(const Exec& exec, const void* in, std::int64_t elements) {
    if constexpr (std::is_same_v<In, T>) {
      data = static_cast<const T*>(in);
    } else {
      convert(exec, elements, static_cast<const In*>(in), fresh(exec, elements));
    }
  }
  void sum_away(const Exec& exec, std::span<const std::int64_t> shape, std::span<const bool> summed,
                std::int64_t elements) {
    const Buffer before = scratch;
    const T* in = data;
    kernels::reduce<SumOp>(exec, dtype_v<T>, in, shape, summed, fresh(exec, elements));
  }
};

/// Copies from one order of dims to another. Both orders have the same indices.
inline void reorder(const Exec& exec, std::size_t element_size, std::span<const std::int64_t> sizes,
                    const DimVector& from, const void* in, const DimVector& to, void* out) {
  DimVector shape;
  std::array<int, max_rank> perm{};
  for (int d = 0; d < from.count; ++d) shape.push(sizes[static_cast<std::size_t>(from[d])]);
  for (int d = 0; d < to.count; ++d) {
    for (int e = 0; e < from.count; ++e) {
      if (from[e] == to[d]) perm[static_cast<std::size_t>(d)] = e;
    }
  }
  permute(exec, element_size, in, shape, std::span<const int>(perm.data(), static_cast<std::size_t>(to.count)), out);
}

/// Runs the loop nest on operands that are converted from In to T. Only a result in its order can `add`.
template <class T, class In, class Out>
void einsum_typed(const Exec& exec, const EinsumPlan& plan, const EinsumLoops& s, std::span<const std::int64_t> sizes,
                  const void* lhs, std::span<const std::int64_t> lhs_shape, const void* rhs,
                  std::span<const std::int64_t> rhs_shape, Out* result, bool add) {
  std::array<Staged<T>, 2> operands;
  const std::array<std::span<const std::int64_t>, 2> operand_shapes{lhs_shape, rhs_shape};
  std::array<DimVector, 3> natural;
  for (std::size_t t = 0; t < 3; ++t) natural[t] = tensor_order(plan, static_cast<int>(t));
  const auto elements = [&](const DimVector& order) {
    std::int64_t n = 1;
    for (const std::int64_t i : order.span()) n *= sizes[static_cast<std::size_t>(i)];
    return n;
  };
  for (std::size_t t = 0; t < 2; ++t) {
    Staged<T>& operand = operands[t];
    operand.template load<In>(exec, t == 0 ? lhs : rhs, product(operand_shapes[t]));
    std::array<bool, max_rank> summed{};
    bool any = false;
    for (int i = 0; i < plan.count; ++i) {
      const auto& index = plan.at(i);
      if (index.role != (t == 0 ? Role::lhs_only : Role::rhs_only)) continue;
      summed[static_cast<std::size_t>(t == 0 ? index.lhs : index.rhs)] = true;
      any = true;
    }
    if (any) {
      operand.sum_away(exec, operand_shapes[t], std::span<const bool>(summed.data(), operand_shapes[t].size()),
                       elements(natural[t]));
    }
    if (s.moved[t]) {
      const Buffer before = operand.scratch;
      const T* in = operand.data;
      reorder(exec, sizeof(T), sizes, natural[t], in, s.order[t], operand.fresh(exec, elements(natural[t])));
    }
  }
  if (!s.moved[2]) return run_einsum_loops(exec, s, operands[0].data, operands[1].data, result, add);
  Staged<Out> out;
  run_einsum_loops(exec, s, operands[0].data, operands[1].data, out.fresh(exec, elements(natural[2])), false);
  reorder(exec, sizeof(Out), sizes, s.order[2], out.data, natural[2], result);
}

/// Whether the loop nest multiplies operands of bf16 as they are: on a device, and on CPUs that have instructions for
/// it, where small products are not worth the library's calls. On other CPUs one large product does too: `gemm` then
/// holds copies of pieces in f32, and not of whole operands.
inline bool multiplies_bf16(const Exec& exec, const EinsumPlan& plan, const EinsumLoops& s) {
  constexpr std::int64_t least = 1 << 18;
  if (s.inner != EinsumLoops::Inner::gemm) return false;
  if (!exec.on_device() && s.row.extent * s.column.extent * s.depth.extent < least) return false;
  for (int i = 0; i < plan.count; ++i)
    if (plan.at(i).role == Role::lhs_only || plan.at(i).role == Role::rhs_only) return false;  // are summed first
  if (exec.on_device() || has_bf16_gemm()) return true;
  const std::int64_t m = s.row.extent, n = s.column.extent, k = s.depth.extent;
  return s.kept.count() == 1 && s.summed.count() == 1 && std::max({m * k, k * n, m * n}) > copied_piece;
}

/// Calls f with the element types of input, accumulation and result. Throws if the combination is not supported.
template <class F>
void visit_einsum(DType in, DType out, const F& f) {
  const auto same = [&]<class T>(T zero) { return f(zero, accumulator_t<T>{}, accumulator_t<T>{}); };
  if (in == DType::f32 && out == DType::f32) return same(f32{});
  if (in == DType::f64 && out == DType::f64) return same(f64{});
  if (in == DType::i32 && out == DType::i32) return same(i32{});
  if (in == DType::u32 && out == DType::u32) return same(u32{});
  if (in == DType::bf16 && out == DType::f32) return same(bf16{});
  if (in == DType::bf16 && out == DType::bf16) return f(bf16{}, f32{}, bf16{});
  if (in == DType::f32 && out == DType::bf16) return f(f32{}, f32{}, bf16{});
  throw Error("einsum: no product of " + std::string(name(in)) + " with result " + std::string(name(out)) +
              "; cast the operands to the result's type first");
}

template <DType In, DType Out, class F>
void visit_einsum(StaticDType<In> in, StaticDType<Out> out, const F& f) {
  visit_dtype(in, [&]<class I>(I x) {
    visit_dtype(out, [&]<class O>(O y) {
      static_assert(std::is_same_v<O, I> || std::is_same_v<O, accumulator_t<I>> || std::is_same_v<I, accumulator_t<O>>,
                    "einsum: cast the operands to the result's type first");
      f(x, accumulator_t<I>{}, y);
    });
  });
}

}  // namespace detail

template <class AnyIn, class AnyOut>
void einsum(const Exec& exec, const EinsumPlan& plan, AnyIn in, AnyOut out, const void* lhs,
            std::span<const std::int64_t> lhs_shape, const void* rhs, std::span<const std::int64_t> rhs_shape,
            void* result, bool add) {
  std::array<std::int64_t, std::size_t{2} * max_rank> index_sizes{};
  std::int64_t outs = 1;
  std::int64_t total = 1;
  for (int i = 0; i < plan.count; ++i) {
    const auto& index = plan.at(i);
    const std::int64_t size = index.lhs >= 0 ? lhs_shape[static_cast<std::size_t>(index.lhs)]
                                             : rhs_shape[static_cast<std::size_t>(index.rhs)];
    if (index.rhs >= 0 && rhs_shape[static_cast<std::size_t>(index.rhs)] != size) {
      throw Error("einsum: dim " + std::to_string(index.lhs) + " of lhs has size " + std::to_string(size) +
                  ", but dim " + std::to_string(index.rhs) + " of rhs, the same index, has " +
                  std::to_string(rhs_shape[static_cast<std::size_t>(index.rhs)]) + "; give them one size");
    }
    index_sizes[static_cast<std::size_t>(i)] = size;
    total *= size;
    if (index.out >= 0) outs *= size;
  }
  if (outs == 0 || (total == 0 && add)) return;
  detail::visit_einsum(in, out, [&]<class In, class T, class Out>(In, T, Out) {
    if (total == 0) {
      exec.zero(result, static_cast<std::size_t>(outs) * sizeof(Out));
      return;
    }
    const std::span<const std::int64_t> sizes(index_sizes.data(), static_cast<std::size_t>(plan.count));
    const EinsumLoops s = choose_einsum_loops(plan, sizes, std::is_floating_point_v<T>);
    if (add && !std::is_same_v<T, Out>)
      throw Error("einsum: only a result in the dtype of accumulation can be added to");
    if constexpr (std::is_same_v<T, Out>) {
      if (add && (s.moved[2] || (exec.on_device() && s.inner != EinsumLoops::Inner::gemm))) {
        detail::Staged<T> product;
        einsum(exec, plan, in, out, lhs, lhs_shape, rhs, rhs_shape, product.fresh(exec, outs));
        return apply_flat(exec, outs, body::AddElement{}, product.data, static_cast<T*>(result));
      }
    }
    const auto run = [&]<class Operand, class To>(Operand, To* to) {
      detail::einsum_typed<Operand, In>(exec, plan, s, sizes, lhs, lhs_shape, rhs, rhs_shape, to, add);
    };
    bool narrow = false;
    if constexpr (std::is_same_v<In, bf16>) {
      narrow = detail::multiplies_bf16(exec, plan, s);
      if (narrow && (std::is_same_v<T, Out> || s.summed.count() == 1)) return run(In(), static_cast<Out*>(result));
    }
    if constexpr (std::is_same_v<T, Out>) {
      run(T(), static_cast<T*>(result));
    } else {
      detail::Staged<T> wide;
      T* const sums = wide.fresh(exec, outs);
      if constexpr (std::is_same_v<In, bf16>) narrow ? run(In(), sums) : run(T(), sums);
      if constexpr (!std::is_same_v<In, bf16>) run(T(), sums);
      detail::convert(exec, outs, wide.data, static_cast<Out*>(result));
    }
  });
}

template <class AnyIn, class AnyOut>
void einsum1(const Exec& exec, AnyIn in, AnyOut out, std::span<const int> in_ids, std::span<const std::int64_t> shape,
             std::span<const int> out_ids, const void* operand, void* result) {
  std::array<bool, max_rank> summed{};
  DimVector kept;  // positions in the operand
  DimVector wanted;
  std::int64_t outs = 1;
  for (std::size_t d = 0; d < in_ids.size(); ++d) {
    summed[d] = std::find(out_ids.begin(), out_ids.end(), in_ids[d]) == out_ids.end();
    if (summed[d]) continue;
    kept.push(static_cast<std::int64_t>(d));
    outs *= shape[d];
  }
  for (const int id : out_ids) {
    const auto at = std::find(in_ids.begin(), in_ids.end(), id);
    if (at == in_ids.end()) throw Error("einsum: a result index is not in the operand");
    wanted.push(at - in_ids.begin());
  }
  detail::visit_einsum(in, out, [&]<class In, class T, class Out>(In, T, Out) {
    if (outs == 0) return;
    detail::Staged<T> staged;
    staged.template load<In>(exec, operand, product(shape));
    if (kept.count < static_cast<int>(in_ids.size())) {
      staged.sum_away(exec, shape, std::span<const bool>(summed.data(), in_ids.size()), outs);
    }
    if constexpr (std::is_same_v<T, Out>) {
      detail::reorder(exec, sizeof(T), shape, kept, staged.data, wanted, result);
    } else {
      detail::Staged<T> wide;
      detail::reorder(exec, sizeof(T), shape, kept, staged.data, wanted, wide.fresh(exec, outs));
      detail::convert(exec, outs, wide.data, static_cast<Out*>(result));
    }
  });
}

}  // namespace shardlib::kernels
