// Definitions of validator.hpp.
#pragma once

#include "shardlib/run/validator.hpp"

#include <algorithm>
#include <utility>

namespace shardlib::run {

SHARDLIB_INLINE Validator operator|(Validator a, const Validator& b) {
  const bool other_least = b.least > a.least, other_most = b.most < a.most;
  a.exclusive = other_least ? b.exclusive : a.exclusive;
  a.exclusive_most = other_most ? b.exclusive_most : a.exclusive_most;
  a.least = std::max(a.least, b.least);
  a.most = std::min(a.most, b.most);
  if (!b.choices.empty()) a.choices = b.choices;
  if (!b.ending.empty()) a.ending = b.ending;
  if (!b.unit.empty()) a.unit = b.unit;
  if (!b.value_name.empty()) a.value_name = b.value_name;
  a.required = a.required || b.required;
  a.command_line_only = a.command_line_only || b.command_line_only;
  return a;
}

SHARDLIB_INLINE Validator at_least(double least) {
  Validator validator;
  validator.least = least;
  return validator;
}
SHARDLIB_INLINE Validator above(double bound) {
  Validator validator = at_least(bound);
  validator.exclusive = true;
  return validator;
}
SHARDLIB_INLINE Validator below(double bound) {
  Validator validator;
  validator.most = bound;
  validator.exclusive_most = true;
  return validator;
}
SHARDLIB_INLINE Validator between(double least, double most) {
  Validator validator = at_least(least);
  validator.most = most;
  return validator;
}
SHARDLIB_INLINE Validator size(std::int64_t least, std::int64_t most) {
  return between(static_cast<double>(least), static_cast<double>(most));
}
SHARDLIB_INLINE Validator one_of(std::initializer_list<const char*> choices) {
  Validator validator;
  validator.choices.assign(choices.begin(), choices.end());
  return validator;
}
SHARDLIB_INLINE Validator ends_in(std::string ending) {
  Validator validator;
  validator.ending = std::move(ending);
  return validator;
}
SHARDLIB_INLINE Validator unit(std::string name) {
  Validator validator;
  validator.unit = std::move(name);
  return validator;
}
SHARDLIB_INLINE Validator value_name(std::string name) {
  Validator validator;
  validator.value_name = std::move(name);
  return validator;
}
SHARDLIB_INLINE Validator required() {
  Validator validator;
  validator.required = true;
  return validator;
}
SHARDLIB_INLINE Validator command_line_only() {
  Validator validator;
  validator.command_line_only = true;
  return validator;
}

}  // namespace shardlib::run
