// Definitions of schedule.hpp: schedules as CSV.
#pragma once

#include "shardlib/pipeline/schedule.hpp"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <utility>
#include <vector>

#include "shardlib/pipeline/impl/text.hpp"
#include "shardlib/pipeline/validate.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/regular_file.hpp"

namespace shardlib::pipeline {

SHARDLIB_INLINE std::string to_csv(const TaskLists& lists) {
  std::string text;
  for (const TaskList& list : lists) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      const std::string quote = list[i].parts.size() == 1 ? "" : "\"";
      text += (i == 0 ? "" : ",") + quote + to_string(list[i]) + quote;
    }
    text += "\n";
  }
  return text;
}

namespace detail {

/// The cells of a row: commas separate them, except within quotes and parentheses.
inline std::vector<std::string> csv_cells(std::string_view row) {
  std::vector<std::string> cells(1);
  bool quoted = false;
  int depth = 0;
  for (const char c : row) {
    if (c == '"') {
      quoted = !quoted;
    } else if (c == ',' && !quoted && depth == 0) {
      cells.emplace_back();
    } else {
      depth += (c == '(') - (c == ')');
      cells.back() += c;
    }
  }
  return cells;
}

inline TaskLists csv_lists(std::string_view text, const std::string& name) {
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);  // spreadsheets put it before UTF-8
  TaskLists lists;
  while (!text.empty()) {
    const auto end = std::min(text.find('\n'), text.size());
    const std::vector<std::string> cells = csv_cells(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    lists.emplace_back();
    for (std::size_t i = 0; i < cells.size(); ++i) {
      if (trimmed(cells[i]).empty()) continue;
      try {
        lists.back().push_back(parse_task(cells[i]));
      } catch (const UsageError& e) {
        throw UsageError(name + ", row " + std::to_string(lists.size()) + ", cell " + std::to_string(i + 1) + ": " +
                         e.what());
      }
    }
  }
  // Editors and spreadsheets leave empty rows at the end.
  while (!lists.empty() && lists.back().empty()) lists.pop_back();
  if (lists.empty()) throw UsageError(name + " holds no task; write a row of tasks for each rank");
  return lists;
}

}  // namespace detail

SHARDLIB_INLINE Schedule parse_csv(std::string_view text, const std::string& name) {
  TaskLists lists = detail::csv_lists(text, name);
  int microbatches = 0;
  for (const TaskList& list : lists)
    for (const Task& task : parts_of(list)) microbatches = std::max(microbatches, task.microbatch + 1);
  std::vector<int> owners = stage_owners(lists);
  validate(name, lists, owners, microbatches);
  return Schedule(name, std::move(owners), [lists = std::move(lists), name, microbatches](int wanted) {
    if (wanted != microbatches)
      throw UsageError(name + ": the number of microbatches is " + std::to_string(microbatches) + " and cannot be " +
                       std::to_string(wanted) + "; run " + std::to_string(microbatches) +
                       ", or take a schedule that is made for any number");
    return lists;
  });
}

SHARDLIB_INLINE Schedule read_csv(const std::string& path) {
  shardlib::detail::require_regular_file(path);
  shardlib::detail::refuse_folder(path, "give a file of tasks");
  std::ifstream file(path, std::ios::binary);
  std::string text;
  char block[4096];
  while (file.read(block, sizeof block), file.gcount() > 0) text.append(block, static_cast<std::size_t>(file.gcount()));
  if (!file.is_open() || file.bad())
    throw UsageError("cannot read the schedule '" + path + "': " + std::strerror(errno));
  return parse_csv(text, path);
}

}  // namespace shardlib::pipeline
