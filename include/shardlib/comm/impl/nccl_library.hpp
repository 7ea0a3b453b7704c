// Definitions of nccl.hpp: where NCCL's functions come from.
#pragma once

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <string>
#include <type_traits>

#include "shardlib/comm/nccl.hpp"
#include "shardlib/support/environment.hpp"

namespace shardlib::detail::nccl {

SHARDLIB_INLINE Library load(const std::string& file) {
  static std::mutex mutex;
  static std::map<std::string, Functions> loaded;  // whose addresses stay
  const std::lock_guard lock(mutex);
  if (const auto known = loaded.find(file); known != loaded.end()) return {.functions = &known->second};
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = dlerror();
    return {.reason = file + " cannot be loaded (" + (why == nullptr ? "no reason given" : why) + ")"};
  }
  Functions functions;
  std::string missing;
  const auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
  };
  const auto require = [&](const char* name, auto& function) {
    find(name, function);
    if (function == nullptr && missing.empty()) missing = name;
  };
  for_functions(functions, require, find);
  if (!missing.empty()) return {.reason = file + " has no " + missing + ": it needs NCCL 2.10 or later"};
  return {.functions = &loaded.emplace(file, functions).first->second};
}

SHARDLIB_INLINE bool is_wanted() {
  return switched_on("SHARDLIB_NCCL", "1", "write 0 to have GPUs communicate through host memory, or 1 for NCCL");
}

SHARDLIB_INLINE Library library(const Functions* given) {
  if (given != nullptr) return {.functions = given};
#if defined(SHARDLIB_LAUNCHER_HIP)
  constexpr const char* file = "librccl.so.1";  // RCCL has NCCL's functions
#else
  constexpr const char* file = "libnccl.so.2";
#endif
  static const Library result = is_wanted() ? load(file) : Library{.reason = "SHARDLIB_NCCL is 0"};
  return result;
}

}  // namespace shardlib::detail::nccl
