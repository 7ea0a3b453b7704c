// Definitions of ragged.hpp.
#pragma once

#include "shardlib/compute/ragged.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shardlib/comm/communicator.hpp"
#include "shardlib/compute/impl/exchange.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/runtime/padding.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE RowStarts::RowStarts(const Value& counts, const Value& tensor, const char* rows) {
  counts.device->exec().read(counts.as<const std::int32_t>(), counts.count(), [&](const std::int32_t* n) {
    known = true;
    places = counts.local[0];
    groups = counts.local[1];
    first.resize(static_cast<std::size_t>(places * groups));
    size.resize(first.size());
    for (std::int64_t x = 0; x < groups; ++x)
      for (std::int64_t p = 0; p < places; ++p) {
        if (n[at(p, x)] < 0)
          throw Error("a count of rows is " + std::to_string(n[at(p, x)]) + ", of place " + std::to_string(p) +
                      " and group " + std::to_string(x) + " of this device's shard; counts must not be negative");
        first[at(p, x)] = total;
        size[at(p, x)] = n[at(p, x)];
        total += n[at(p, x)];
      }
  });
  if (!known) total = tensor.local[0];
  if (total > tensor.local[0])
    throw Error("this device counts " + std::to_string(total) + " rows, but " + rows + " " +
                std::to_string(tensor.local[0]) + " of `" + std::string(to_string(tensor.spec->dims[0]).view()) +
                "` here; count fewer rows, or give `" + std::string(tensor.spec->dims[0].name) +
                "` a size of at least " + std::to_string(total) + " for each device");
}

SHARDLIB_INLINE Shape shape_of_group(const Value& x) {
  Shape shape;
  for (int i = 1; i < x.local.size(); ++i) shape.push_back(x.local[i]);
  return shape;
}
SHARDLIB_INLINE Shape shape_of_rows(const Value& x, std::int64_t rows) {
  Shape shape = x.local;
  shape[0] = rows;
  return shape;
}

SHARDLIB_INLINE void zero_rows(const Value& out, const Buffer& result, std::int64_t first) {
  const std::size_t row = static_cast<std::size_t>(product(shape_of_group(out))) * size_of(out.dtype);
  const std::size_t begin = static_cast<std::size_t>(first) * row;
  out.device->exec().zero(result.data() + begin, out.bytes() - begin);
}

/// Counts the floating-point operations of a product with `counted` rows.
inline void add_grouped_flops(const Value& out, const Value& rows, const Value& other, std::int64_t counted) {
  double flops = 2.0 * static_cast<double>(counted);
  for (int i = 1; i < rows.spec->rank(); ++i) flops *= static_cast<double>(rows.local[i]);
  for (int i = 1; i < other.spec->rank(); ++i)
    if (!rows.spec->has(other.spec->dims[i].name)) flops *= static_cast<double>(other.local[i]);
  add_flops(out, flops);
}

SHARDLIB_INLINE Buffer grouped(const Value& out, const Value& rows, const Value& other, const Value& counts,
                               FunctionRef<void(const RowStarts&, const Buffer&)> write) {
  Buffer result = allocate(out);
  const RowStarts starts(counts, rows, "the operand has");
  add_grouped_flops(out, rows, other, starts.total);
  write(starts, result);
  return result;
}

/// The rows that go to a peer or come from it: runs of rows in a tensor, in the order of the message.
struct RowRuns {
  struct Run {
    std::int64_t first, size;
  };
  std::vector<Run> runs;
  std::int64_t rows = 0;

  /// The runs of the places and groups in the ranges, ordered by group, then by place.
  RowRuns(const RowStarts& starts, std::int64_t place, std::int64_t places, std::int64_t group, std::int64_t groups) {
    for (std::int64_t x = group; x < group + groups; ++x)
      for (std::int64_t p = place; p < place + places; ++p)
        add({starts.first[starts.at(p, x)], starts.size[starts.at(p, x)]});
  }
  void add(Run run) {
    if (run.size == 0) return;
    rows += run.size;
    if (!runs.empty() && runs.back().first + runs.back().size == run.first)
      runs.back().size += run.size;
    else
      runs.push_back(run);
  }
  /// Copies between the runs in a tensor and the rows of a message.
  void copy(const Exec& exec, std::byte* tensor, std::byte* message, std::size_t row, bool to_message) const {
    for (const Run& run : runs) {
      std::byte* const there = tensor + static_cast<std::size_t>(run.first) * row;
      const std::size_t bytes = static_cast<std::size_t>(run.size) * row;
      exec.copy(to_message ? message : there, to_message ? there : message, bytes);
      message += bytes;
    }
  }
  /// The rows in place if they are one run, otherwise new memory.
  [[nodiscard]] Buffer message(const Buffer& tensor, std::size_t row, Pool& pool) const {
    const std::size_t bytes = static_cast<std::size_t>(rows) * row;
    if (runs.size() != 1) return pool.allocate(bytes);
    return {tensor.data() + static_cast<std::size_t>(runs[0].first) * row, bytes, std::make_shared<Buffer>(tensor),
            false, tensor.device_memory()};
  }
  /// A message of the rows in the tensor.
  [[nodiscard]] Buffer gathered(const Exec& exec, const Buffer& tensor, std::size_t row, Pool& pool) const {
    Buffer all = message(tensor, row, pool);
    if (runs.size() > 1) copy(exec, tensor.data(), all.data(), row, true);
    return all;
  }
};

/// Throws unless each member of the group, this device too, sends this device the rows that it expects: `numbers` are
/// those that they send.
inline void compare_rows(const Communicator& group, const Buffer& numbers, const std::vector<RowRuns>& of) {
  for (int peer = 0; peer < group.size(); ++peer) {
    const std::int64_t sent = numbers.as<const std::int64_t>()[peer],
                       expected = of[static_cast<std::size_t>(peer)].rows;
    if (sent == expected) continue;
    const auto rank = [](int r) { return "rank " + std::to_string(r); };
    throw Error(rank(peer) + " of " + std::to_string(group.size()) + " sends " + std::to_string(sent) + " rows to " +
                rank(group.rank()) + ", which expects " + std::to_string(expected) +
                "; take `all_to_all` of the counts of the rows that are sent");
  }
}

/// Moves the rows of `from` to the other devices along the axes, and those that come from them into `result`: `to` and
/// `of` have each device's.
inline void move_rows(const Value& out, const GroupAxes& axes, const std::vector<RowRuns>& to,
                      const std::vector<RowRuns>& of, const Buffer& from, const Buffer& result) {
  Communicator& group = out.device->group(axes);
  const auto n = static_cast<std::size_t>(group.size()), self = static_cast<std::size_t>(group.rank());
  Pool& host = *out.device->host_pool();
  const Buffer mine = host.allocate(n * sizeof(std::int64_t)), theirs = host.allocate(mine.bytes());
  std::ranges::transform(to, mine.as<std::int64_t>(), &RowRuns::rows);
  Request compared = begin(out, [&] { return group.all_to_all(mine, theirs); });
  const std::size_t row = static_cast<std::size_t>(product(shape_of_group(out))) * size_of(out.dtype);
  const Exec exec = out.device->exec();
  Pool& pool = *out.device->pool();
  std::size_t bytes = 0;
  std::vector<Buffer> leaving(n), messages(n);
  // The numbers of rows travel meanwhile.
  for (std::size_t peer = 0; peer < n; ++peer)
    if (peer != self && to[peer].rows != 0) leaving[peer] = to[peer].gathered(exec, from, row, pool);
  complete(out, [&] { return std::move(compared); });
  compare_rows(group, theirs, of);
  Exchange exchange(out, group);
  // Each device begins with its neighbor.
  for (std::size_t i = 1; i < n; ++i) {
    const std::size_t peer = (self + i) % n;
    if (to[peer].rows == 0) continue;
    const Buffer message = std::exchange(leaving[peer], {});
    bytes += message.bytes();
    exchange.send(message, static_cast<int>(peer));
  }
  for (std::size_t i = 1; i < n; ++i) {
    const std::size_t peer = (self + n - i) % n;
    if (of[peer].rows == 0) continue;
    messages[peer] = of[peer].message(result, row, pool);
    exchange.receive(messages[peer], static_cast<int>(peer));
  }
  exchange.begin();
  if (n > 1) add_traffic(out, bytes, axes);
  const Buffer own = to[self].gathered(exec, from, row, pool);
  of[self].copy(exec, result.data(), own.data(), row, false);
  exchange.wait();
  for (std::size_t peer = 0; peer < n; ++peer)
    if (of[peer].runs.size() > 1 && messages[peer])
      of[peer].copy(exec, result.data(), messages[peer].data(), row, false);
}

SHARDLIB_INLINE Buffer RaggedExchange::operator()(const Value& out) const {
  if (out.global[0].is_padded())
    fail_padded(out.made_by, *out.device, out.spec->dims[0].name, out.global[0],
                "rows are counted on each device; choose a size that needs none");
  // The number of the dim of the counts that loses the axes. The other dim gains them.
  const int lose = sent->spec->dims[0].axes.size() > received->spec->dims[0].axes.size() ? 0 : 1;
  GroupAxes axes;
  for (int k = received->spec->dims[lose].axes.size(); k < sent->spec->dims[lose].axes.size(); ++k)
    axes.push_back(sent->spec->dims[lose].axes[k]);
  auto& group = out.device->group(axes);
  const auto n = static_cast<std::size_t>(group.size());
  const Buffer from = rows->data();
  Buffer result = allocate(out);
  const RowStarts mine(*sent, *rows, "the operand has"), gets(*received, out, "the result has");
  if (!mine.known) {  // as if the rows spread evenly
    const std::size_t bytes = std::min(rows->bytes(), out.bytes()) / n * (n - 1);
    const Buffer messages = out.device->pool()->allocate(bytes);
    if (n > 1) add_traffic(out, bytes, axes);
    return result;
  }
  std::vector<RowRuns> to, of;
  for (std::int64_t peer = 0; peer < group.size(); ++peer) {
    const std::int64_t gained = received->local[1 - lose], lost = sent->local[lose];
    if (lose == 0) {
      to.emplace_back(mine, 0, mine.places, peer * gained, gained);
      of.emplace_back(gets, peer * lost, lost, 0, gets.groups);
    } else {
      to.emplace_back(mine, peer * gained, gained, 0, mine.groups);
      of.emplace_back(gets, 0, gets.places, peer * lost, lost);
    }
  }
  move_rows(out, axes, to, of, from, result);
  zero_rows(out, result, gets.total);
  return result;
}

}  // namespace shardlib::detail
