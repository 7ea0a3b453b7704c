// Definitions of task.hpp.
#pragma once

#include "shardlib/pipeline/task.hpp"

#include <cstddef>
#include <optional>

#include "shardlib/pipeline/impl/text.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::pipeline {

SHARDLIB_INLINE std::string to_string(TaskKind kind) {
  constexpr const char* names[] = {"fwd", "bwd", "bwdA", "bwdW"};
  return names[static_cast<std::size_t>(kind)];
}

SHARDLIB_INLINE std::string to_string(const Task& task) {
  return to_string(task.kind) + "_" + std::to_string(task.stage) + "__" + std::to_string(task.microbatch);
}

SHARDLIB_INLINE std::string to_string(const FusedTask& task) {
  if (task.parts.size() == 1) return to_string(task.parts.front());
  std::string text;
  for (const Task& part : task.parts) text += (text.empty() ? "" : ", ") + to_string(part);
  return "FusedTask(" + text + ")";
}

namespace detail {

inline std::optional<int> whole_number(std::string_view text) {
  int value = 0;
  // Longer numbers are refused, because lists of that many stages or microbatches would take gigabytes.
  const bool read = text.size() <= 6 && !text.starts_with('-') && shardlib::detail::parse_number(text, value);
  return read ? std::optional(value) : std::nullopt;
}

inline std::optional<Task> plain_task(std::string_view text) {
  for (const TaskKind kind : {TaskKind::fwd, TaskKind::bwd, TaskKind::bwdA, TaskKind::bwdW}) {
    const std::string prefix = to_string(kind) + "_";
    if (!text.starts_with(prefix)) continue;
    const auto middle = text.find("__", prefix.size());
    if (middle == text.npos) return {};
    const auto stage = whole_number(text.substr(prefix.size(), middle - prefix.size()));
    const auto microbatch = whole_number(text.substr(middle + 2));
    if (!stage || !microbatch) return {};
    return Task{kind, *stage, *microbatch};
  }
  return {};
}

}  // namespace detail

SHARDLIB_INLINE std::string to_string(const TaskLists& lists) {
  std::vector<std::vector<std::string>> rows;
  for (std::size_t rank = 0; rank < lists.size(); ++rank) {
    rows.push_back({"rank " + std::to_string(rank) + ":"});
    for (const FusedTask& task : lists[rank]) rows.back().push_back(to_string(task));
  }
  return detail::aligned(rows);
}

SHARDLIB_INLINE FusedTask parse_task(std::string_view text) {
  const std::string_view whole = detail::trimmed(text);
  std::string_view rest = whole;
  constexpr std::string_view opening = "FusedTask(";
  const bool fused = rest.starts_with(opening) && rest.ends_with(')');
  if (fused) rest = rest.substr(opening.size(), rest.size() - opening.size() - 1);
  std::vector<Task> parts;
  for (bool more = true; more;) {
    const auto comma = fused ? rest.find(',') : rest.npos;
    const auto task = detail::plain_task(detail::trimmed(rest.substr(0, comma)));
    if (!task)
      throw UsageError(
          "`" + std::string(whole) +
          "` is not a task; write fwd_STAGE__MICROBATCH, bwd_, bwdA_ or bwdW_ likewise (numbers of up to 6 digits), "
          "or FusedTask(...) of several, separated by commas");
    parts.push_back(*task);
    more = comma != rest.npos;
    if (more) rest = rest.substr(comma + 1);
  }
  return FusedTask(std::move(parts));
}

SHARDLIB_INLINE std::vector<Task> parts_of(const TaskList& list) {
  std::vector<Task> parts;
  for (const FusedTask& task : list) parts.insert(parts.end(), task.parts.begin(), task.parts.end());
  return parts;
}

SHARDLIB_INLINE std::vector<int> stage_owners(const TaskLists& lists) {
  std::vector<int> owners;
  for (std::size_t rank = 0; rank < lists.size(); ++rank) {
    for (const Task& task : parts_of(lists[rank])) {
      if (task.stage < 0) continue;
      const auto stage = static_cast<std::size_t>(task.stage);
      if (owners.size() <= stage) owners.resize(stage + 1, -1);
      if (owners[stage] < 0) owners[stage] = static_cast<int>(rank);
    }
  }
  return owners;
}

}  // namespace shardlib::pipeline
