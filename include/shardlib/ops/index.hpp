// index_unreduced: rows of a table by index, the table possibly sharded along the looked-up dim.
#pragma once

#include "shardlib/detail/inline.hpp"
#include "shardlib/kernels/index.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/shapes.hpp"
#include "shardlib/tape.hpp"

namespace shardlib {
namespace detail {

/// The place of the bracketed dim among the table's dims.
template <Op O>
constexpr int looked_up_dim() {
  const OpParts op = parse_op(O);
  for (int i = 0; i < op.in[0].rank(); ++i)
    if (op.in[0].dims[i].bracketed) return i;
  return -1;
}

/// Strides of a lookup: one per dim of the result, 0 where the table or the indices lack it.
struct LookupLoops {
  Extents table_strides, index_strides;
  kernels::Lookup lookup;

  LookupLoops(const Value& table, int row_dim, const Value& indices, const Extents& extents, const TensorSpec& result);
  LookupLoops(const LookupLoops&) = delete;
  LookupLoops& operator=(const LookupLoops&) = delete;

 private:
  Extents extents_;
};

/// The lookup as the einsum that it stands for: cotangent times one-hot rows gives the table's cotangent.
template <Op O, Spec Ct, Spec Indices, Spec Due>
constexpr Op scatter_op() {
  const OpParts op = parse_op(O);
  Dim row = op.in[0].dims[looked_up_dim<O>()];
  row.bracketed = false;
  TensorSpec one_hot = parse_tensor(Indices).spec;
  one_hot.dims.push_back(row);
  return make_op(Ct, to_string(one_hot), Due);
}

/// The op, under the name of the one that the user called.
template <Op O, dtype D, Spec S, dtype I, Spec T>
auto lookup(const OpInfo& op, const Tensor<D, S>& table, const Tensor<I, T>& indices) {
  using Out = Tensor<D, result_of<rules::index, O, S, T>>;
  static constexpr int row = looked_up_dim<O>();
  Bindings names(op, table.device());
  names.bind(*table.value());
  names.bind(*indices.value());
  const auto kernel = [table = table.value(), indices = indices.value()](const Value& out) {
    const LookupLoops loops(*table, row, *indices, out.local, *out.spec);
    Buffer result = allocate(out);
    kernels::gather(out.device->exec(), dtype_c<D>, loops.lookup, table->data().data(), indices->data().data(),
                    result.data());
    return result;
  };
  const auto pull = [](const auto& ct, const auto& ids, const GlobalSizes& global) {
    using Ct = std::remove_cvref_t<decltype(ct)>;
    using Due = Dual<Tensor<D, S>, axes_of<S, T, Out::spec>()>;
    static constexpr Op scatter = scatter_op<O, Ct::spec, T, Due::spec>();
    static constexpr OpParts parts = parse_op(scatter);
    static_assert(rules::detail_::einsum(parts).empty(),
                  "the transpose of index_unreduced is the einsum with one-hot rows");
    // A table that is also multiplied by has a dense cotangent already: rows are added to that.
    return record_addend<Due>(
        OpInfo{"scatter_add", scatter, {}}, ct.device(), global,
        [ct = ct.value(), ids = ids.value()](const Value& out) {
          const LookupLoops loops(out, row, *ids, ct->local, parsed<Out::spec>);
          Buffer result = allocate(out);
          kernels::scatter_add(out.device->exec(), dtype_c<D>, loops.lookup, ct->data().data(), ids->data().data(),
                               result.data(), out.count());
          return result;
        },
        [ct = ct.value(), ids = ids.value()](const Value& out, std::byte* sum) {
          const LookupLoops loops(out, row, *ids, ct->local, parsed<Out::spec>);
          kernels::scatter_add_to(out.device->exec(), dtype_c<D>, loops.lookup, ct->data().data(), ids->data().data(),
                                  sum);
        });
  };
  if constexpr (floating<D>)
    return record<"index_unreduced", Out>(op, table.device(), names.sizes(parsed<Out::spec>), kernel,
                                          vjp(table, save(indices), pull));
  else
    return record<"index_unreduced", Out>(op, table.device(), names.sizes(parsed<Out::spec>), kernel);
}

}  // namespace detail

template <Op O, dtype D, Spec S, dtype I, Spec T>
auto index_unreduced(const Tensor<D, S>& table, const Tensor<I, T>& indices, Site site)
    -> Tensor<detail::after_t<detail::is_index<"index_unreduced", I>, D>, detail::result_of<rules::index, O, S, T>> {
  return detail::lookup<O>(detail::Calling{"index_unreduced", O, site}, table, indices);
}

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/ops/index_inl.hpp"
#endif
