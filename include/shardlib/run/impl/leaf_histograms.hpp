// Definitions of leaf_histograms.hpp.
#pragma once

#include "shardlib/run/leaf_histograms.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>

#include "shardlib/comm/collective_call.hpp"
#include "shardlib/io/agree.hpp"
#include "shardlib/io/box.hpp"
#include "shardlib/io/checkpoint/impl/holders.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::run::detail {

/// The histogram of this device's shard without its padding.
inline Histogram histogram_of_shard(const ScaledLeaf& leaf) {
  const shardlib::detail::Value& x = *leaf.value;
  const shardlib::detail::Shape box = shardlib::detail::true_shape(x);
  const io::Index kept(box.begin(), box.end()),
      strides = io::row_major_strides(io::Index(x.local.begin(), x.local.end()));
  const Buffer shard = x.on_host();
  Histogram found;
  visit_dtype(x.dtype, [&]<class T>(T) {
    io::for_each_run(kept, strides, strides, [&](std::int64_t begin, std::int64_t, std::int64_t n) {
      for (const T element : std::span(shard.as<T>() + begin, static_cast<std::size_t>(n)))
        found.add(leaf.scale * static_cast<double>(accumulator_t<T>(element)));
    });
  });
  return found;
}

SHARDLIB_INLINE std::map<std::string, Histogram> leaf_histograms(Device& device,
                                                                 const std::vector<ScaledLeaf>& leaves) {
  if (device.is_dry()) return {};  // a step that calls it can be planned
  nlohmann::json list = nlohmann::json::array();
  for (const auto& [name, value, scale] : leaves) {
    if (!value) throw Error("leaf_histograms: the leaf '" + name + "' is empty");
    static_cast<void>(value->data());  // on all devices: a deferred value may need them to communicate
    const io::detail::ShardPlace shard = io::detail::shard_place(name, *value);
    list.push_back({shard.leaf, shard.place});
  }
  const io::detail::Leaves all = io::detail::leaves_together(io::gather_texts(device, list.dump()));

  // Two tables with a row for each leaf, in the order of names: of what is summed over devices, and of ends, of which
  // they take the maximum.
  constexpr std::size_t summed = Histogram::buckets + 3, compared = 2;
  Pool& pool = *device.host_pool();
  const auto rows = [&](std::size_t columns) { return pool.allocate(all.size() * columns * sizeof(double)); };
  const Buffer sums = rows(summed), total = rows(summed), extremes = rows(compared), extreme = rows(compared);
  std::fill_n(sums.as<double>(), all.size() * summed, 0.0);
  std::fill_n(extremes.as<double>(), all.size() * compared, -DBL_MAX);
  for (const ScaledLeaf& leaf : leaves) {
    const auto at = all.find(leaf.name);
    const auto& holders = at->second.holders;
    const auto mine = holders.find(io::detail::place_of(*leaf.value));
    // The first of the devices with the same shard counts it.
    if (mine == holders.end() || mine->second.front() != device.rank()) continue;
    const Histogram h = histogram_of_shard(leaf);
    const auto row = static_cast<std::size_t>(std::distance(all.begin(), at));
    double* const out = std::ranges::copy(h.counts, sums.as<double>() + row * summed).out;
    out[0] = static_cast<double>(h.not_finite), out[1] = h.sum, out[2] = h.sum_squares;
    double* const ends = extremes.as<double>() + row * compared;
    ends[0] = -h.min, ends[1] = h.max;
  }
  device.everybody().all_reduce(sums, total, DType::f64, Reduction::sum).wait();
  device.everybody().all_reduce(extremes, extreme, DType::f64, Reduction::max).wait();

  std::map<std::string, Histogram> result;
  const double* row = total.as<double>();
  const double* ends = extreme.as<double>();
  for (const auto& [name, leaf] : all) {
    Histogram& h = result[name];
    for (std::int64_t& count : h.counts) count = static_cast<std::int64_t>(*row++);
    h.not_finite = static_cast<std::int64_t>(*row++);
    h.sum = *row++;
    h.sum_squares = *row++;
    h.min = -*ends++;
    h.max = *ends++;
  }
  return result;
}

}  // namespace shardlib::run::detail
