// --prompt -: a text that all ranks get from the standard input.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iostream>
#include <string>

#include "shardlib/device/launch.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

#if defined(SHARDLIB_WITH_MPI)
#include "shardlib/comm/mpi/process.hpp"
#endif

namespace shardlib::run::detail {

/// The whole standard input, without a newline at its end. mpirun gives it to the first rank, which sends it to the
/// others: all call it.
inline std::string read_prompt() {
  constexpr std::size_t most = std::size_t{1} << 30, block = std::size_t{1} << 16;
  std::string text;
  if (world_rank() == 0) {
    while (text.size() <= most && std::cin) {
      const std::size_t before = text.size();
      text.resize(before + block);
      std::cin.read(text.data() + before, static_cast<std::streamsize>(block));
      text.resize(before + static_cast<std::size_t>(std::cin.gcount()));
    }
  }
#if defined(SHARDLIB_WITH_MPI)
  namespace mpi = shardlib::detail::mpi;
  if (under_mpi()) {
    std::uint64_t size = text.size();
    mpi::check(MPI_Bcast(&size, 1, MPI_UINT64_T, 0, mpi::process.control), "sharing the prompt", sizeof size);
    text.resize(size);
    if (size <= most)
      mpi::check(MPI_Bcast(text.data(), static_cast<int>(size), MPI_BYTE, 0, mpi::process.control),
                 "sharing the prompt", size);
  }
#endif
  if (text.size() > most) throw UsageError("--prompt -: the standard input is longer than 1 GiB");
  if (text.ends_with('\n')) text.pop_back();
  if (shardlib::detail::as_utf8(text) != text) throw UsageError("--prompt -: the standard input is not valid UTF-8");
  return text;
}

}  // namespace shardlib::run::detail
