// Definitions of rule.hpp.
#pragma once

#include "shardlib/run/rule.hpp"

#include <algorithm>
#include <utility>

namespace shardlib::run {

SHARDLIB_INLINE Rule operator|(Rule a, const Rule& b) {
  const bool other_least = b.least > a.least, other_most = b.most < a.most;
  a.exclusive = other_least ? b.exclusive : a.exclusive;
  a.exclusive_most = other_most ? b.exclusive_most : a.exclusive_most;
  a.least = std::max(a.least, b.least);
  a.most = std::min(a.most, b.most);
  if (!b.choices.empty()) a.choices = b.choices;
  if (!b.unit.empty()) a.unit = b.unit;
  if (!b.value_name.empty()) a.value_name = b.value_name;
  a.required = a.required || b.required;
  a.command_line_only = a.command_line_only || b.command_line_only;
  return a;
}

SHARDLIB_INLINE Rule at_least(double least) {
  Rule rule;
  rule.least = least;
  return rule;
}
SHARDLIB_INLINE Rule above(double bound) {
  Rule rule = at_least(bound);
  rule.exclusive = true;
  return rule;
}
SHARDLIB_INLINE Rule below(double bound) {
  Rule rule;
  rule.most = bound;
  rule.exclusive_most = true;
  return rule;
}
SHARDLIB_INLINE Rule between(double least, double most) {
  Rule rule = at_least(least);
  rule.most = most;
  return rule;
}
SHARDLIB_INLINE Rule size(std::int64_t least) {
  return between(static_cast<double>(least), static_cast<double>(largest_size));
}
SHARDLIB_INLINE Rule one_of(std::initializer_list<const char*> choices) {
  Rule rule;
  rule.choices.assign(choices.begin(), choices.end());
  return rule;
}
SHARDLIB_INLINE Rule unit(std::string name) {
  Rule rule;
  rule.unit = std::move(name);
  return rule;
}
SHARDLIB_INLINE Rule value_name(std::string name) {
  Rule rule;
  rule.value_name = std::move(name);
  return rule;
}
SHARDLIB_INLINE Rule required() {
  Rule rule;
  rule.required = true;
  return rule;
}
SHARDLIB_INLINE Rule command_line_only() {
  Rule rule;
  rule.command_line_only = true;
  return rule;
}

}  // namespace shardlib::run
