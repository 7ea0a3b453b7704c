// Environment variables that switch something on or off, and the name of the machine.
#pragma once

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string>
#include <string_view>

#include "shardlib/support/error.hpp"

namespace shardlib::detail {

/// Whether an environment variable is 1. Throws UsageError, which says what 0 and 1 mean, if it is neither.
inline bool switched_on(const std::string& variable, std::string_view unset, std::string_view meaning) {
  const char* const value = std::getenv(variable.c_str());
  const std::string_view text = value == nullptr ? unset : value;
  if (text != "0" && text != "1") throw UsageError(variable + "=" + std::string(text) + ": " + std::string(meaning));
  return text == "1";
}

/// The name of this machine, or nothing where the system does not say it.
inline std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

}  // namespace shardlib::detail
