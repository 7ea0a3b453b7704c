// The shards of a group's devices inside the whole, and the order in which they are sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "shardlib/comm/communicator.hpp"
#include "shardlib/compute/collectives.hpp"
#include "shardlib/kernels/layout.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/spec.hpp"

namespace shardlib::detail {

/// A dim that the group's devices hold in `parts` shards.
struct DimSplit {
  int dim;
  std::int64_t parts;
};

/// Copies between a whole shard and a row of sub-shards in rank order (ranks are row-major over the cuts). `to_rows`
/// splits the shard; else it joins the sub-shards.
inline void regroup(const Exec& exec, std::size_t element, const std::vector<DimSplit>& cuts, const Shape& whole,
                    const std::byte* from, std::byte* to, bool to_rows) {
  Shape part = whole;
  for (const DimSplit& cut : cuts) part[cut.dim] /= cut.parts;
  const auto whole_strides = kernels::row_major(view(whole)), in_part = kernels::row_major(view(part));
  std::vector<std::int64_t> shape, in_whole, in_rows;
  std::int64_t row = product(part);
  for (const DimSplit& cut : cuts) row *= cut.parts;
  for (const DimSplit& cut : cuts) {
    row /= cut.parts;
    shape.push_back(cut.parts);
    in_rows.push_back(row);
    in_whole.push_back(part[cut.dim] * whole_strides[cut.dim]);
  }
  for (int i = 0; i < whole.size(); ++i) {
    shape.push_back(part[i]);
    in_rows.push_back(in_part[i]);
    in_whole.push_back(whole_strides[i]);
  }
  kernels::copy_strided(exec, element, shape, from, to_rows ? in_whole : in_rows, to, to_rows ? in_rows : in_whole);
}

/// The dims on which `more` has axes that `less` lacks: the axes of the group, in order, and the cuts.
struct Difference {
  GroupAxes axes;
  std::vector<DimSplit> cuts;
};
inline Difference resharded(const Device& device, const TensorSpec& less, const TensorSpec& more) {
  Difference d;
  for (int i = 0; i < more.rank(); ++i) {
    std::int64_t parts = 1;
    for (int k = less.dims[i].axes.size(); k < more.dims[i].axes.size(); ++k) {
      d.axes.push_back(more.dims[i].axes[k]);
      parts *= device.size(more.dims[i].axes[k]);
    }
    if (more.dims[i].axes.size() > less.dims[i].axes.size()) d.cuts.push_back({i, parts});
  }
  return d;
}

/// The number of rows that the cut splits, if the group can access the shards in place. Else it needs copies of the
/// shards in rank order.
inline std::optional<std::size_t> rows_in_place(const Communicator& group, const Value& whole,
                                                const std::vector<DimSplit>& cuts) {
  if (cuts.size() != 1) return std::nullopt;
  std::size_t rows = 1;
  for (int i = 0; i < cuts[0].dim; ++i) rows *= static_cast<std::size_t>(whole.local[i]);
  if (rows <= 1) return 1;
  const std::size_t piece = whole.bytes() / rows / static_cast<std::size_t>(cuts[0].parts);
  return group.takes_rows() && piece >= whole.device->tuning().row_piece ? std::optional(rows) : std::nullopt;
}

}  // namespace shardlib::detail
