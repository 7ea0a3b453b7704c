// Lookup of table rows by integer indices, along one dim or several, and its transpose. The table may be a shard of a
// larger one.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "shardlib/device/exec.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib::kernels {

// The type of `dtype` is DType, or that of dtype_c<T> if the dtype is known at compile time.

/// One lookup: result[i...] = table[indices[i...], i...]. Strides are in elements, one for each dim of the result,
/// and 0 where the table or the indices lack the dim.
struct Lookup {
  std::span<const std::int64_t> shape;          ///< shape of the result
  std::span<const std::int64_t> table_strides;  ///< without the looked-up dim
  std::span<const std::int64_t> index_strides;
  DType index_dtype = DType::i32;  ///< i32 or u32
  std::int64_t row_stride = 0;     ///< the table's stride along the looked-up dim
  std::int64_t rows = 0;           ///< size of that dim in this shard
  std::int64_t first_row = 0;      ///< global id of this shard's row 0
  std::int64_t global_rows = 0;    ///< global size of the dim; other ids are an error
  bool joined = false;             ///< the ids are those of join_ids, which has checked them
  std::string_view dim = {};       ///< name of the looked-up dim, for errors
};

/// Joins the ids of one more dim to the ids of a lookup along several dims, which are zeros at first: adds the number
/// of the row times `row_stride`, or sets the largest u32 where another shard has the row. `indices` is what the ids
/// are called in an error. Throws Error on an id outside the dim.
template <class I>
void join_ids(const Exec& exec, const Lookup& lookup, const I* ids, const char* indices, u32* joined);

/// The lookup. An id of another shard gives 0. Throws Error on an id outside the dim.
template <class AnyDType>
void gather(const Exec& exec, AnyDType dtype, const Lookup& lookup, const void* table, const void* indices, void* out);

/// The transpose of gather for its table: adds the cotangent's row to `sums` for each id. Sums of bf16 are taken in f32
/// and rounded once. The order of the additions depends only on the sizes.
template <class AnyDType>
void scatter_add(const Exec& exec, AnyDType dtype, const Lookup& lookup, const void* cotangent, const void* indices,
                 void* sums);

}  // namespace shardlib::kernels

#ifndef SHARDLIB_COMPILED
#include "shardlib/kernels/impl/index.hpp"
#endif
