// Lookup of table rows by integer indices, and its transpose; the table may be one shard of a larger one.
#pragma once

#include <cstdint>
#include <span>

#include "shardlib/device/exec.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib::kernels {

// A dtype is a DType, or a dtype_c<T> where the type is known.

/// One lookup: result[i...] = table[indices[i...], i...]. Strides in elements, one per result dim, 0 where the table or
/// the indices lack the dim.
struct Lookup {
  std::span<const std::int64_t> shape;          ///< of the result
  std::span<const std::int64_t> table_strides;  ///< without the looked-up dim
  std::span<const std::int64_t> index_strides;
  DType index_dtype = DType::i32;  ///< i32 or u32
  std::int64_t row_stride = 0;     ///< the table's stride along the looked-up dim
  std::int64_t rows = 0;           ///< extent of that dim in this shard
  std::int64_t first_row = 0;      ///< global id of this shard's row 0
  std::int64_t global_rows = 0;    ///< extent of the whole dim; ids outside of it are an error
};

/// The lookup; ids of other shards give 0, ids of no shard an Error.
template <class AnyDType>
void gather(const Exec& exec, AnyDType dtype, const Lookup& lookup, const void* table, const void* indices, void* out);

/// The transpose of gather in its table: table_out, of `table_elements` elements, becomes the sum of the cotangent's
/// rows by id. Sums are taken in f32 for bf16, in an order that depends on the sizes alone.
template <class AnyDType>
void scatter_add(const Exec& exec, AnyDType dtype, const Lookup& lookup, const void* cotangent, const void* indices,
                 void* table_out, std::int64_t table_elements);
/// The same, added to `sums`, which are f32 for bf16.
template <class AnyDType>
void scatter_add_to(const Exec& exec, AnyDType dtype, const Lookup& lookup, const void* cotangent, const void* indices,
                    void* sums);

}  // namespace shardlib::kernels

#ifndef SHARDLIB_COMPILED
#include "shardlib/kernels/impl/index.hpp"
#endif
