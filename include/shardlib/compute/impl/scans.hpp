// Definitions of scans.hpp.
#pragma once

#include "shardlib/compute/scans.hpp"

#include "shardlib/compute/collectives.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE GatheredEnds::GatheredEnds(const Value& out, int dim, std::int64_t rows, std::size_t bytes,
                                           const std::function<void(void*)>& fill) {
  GroupAxes axes;
  for (const auto axis : out.spec->dims[dim].axes) axes.push_back(axis);
  if (axes.empty()) return;
  auto& group = out.device->group(axes);
  if (group.size() == 1) return;
  const Along d = along(out, dim);
  const Buffer own = out.device->pool()->allocate(static_cast<std::size_t>(rows * d.rows()) * bytes);
  fill(own.data());
  all_ = out.device->pool()->allocate(own.bytes() * static_cast<std::size_t>(group.size()));
  complete(out, [&] { return group.all_gather(own, all_); });
  add_traffic(out, own.bytes() * static_cast<std::size_t>(group.size() - 1), axes);
  ends_ = {all_.data(), rows, group.size(), group.rank()};
}

}  // namespace shardlib::detail
