// Which of a program's pages the system holds in memory.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

/// How many pages that lie within these bytes are there.
inline std::size_t resident_pages(const std::byte* data, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page;
  const std::size_t pages = (reinterpret_cast<std::uintptr_t>(data) + bytes - begin) / page;
  std::vector<unsigned char> states(pages);
  if (mincore(reinterpret_cast<void*>(begin), pages * page, states.data()) != 0) throw std::runtime_error("mincore");
  return static_cast<std::size_t>(std::ranges::count_if(states, [](unsigned char s) { return (s & 1) != 0; }));
}
