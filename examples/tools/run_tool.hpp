// How a tool that needs no devices ends. `run_program` of launch.hpp would start MPI too.
#pragma once

#include <fmt/format.h>
#include <shardlib/support/error.hpp>
#include <shardlib/support/error_text.hpp>

#include <csignal>
#include <cstdio>
#include <exception>

/// The status of `tool(argc, argv)`: what it returns, or after an error, which is printed, 2 where the call was wrong
/// and else 1. `return run_tool(argc, argv, program)`
inline int run_tool(int argc, char** argv, int (*tool)(int, char**)) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file over the limit of `ulimit -f` is an error, not a silent end
  try {
    const int status = tool(argc, argv);
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
    throw shardlib::Error("cannot write the standard output: is its disk full?");
  } catch (const shardlib::UsageError& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return 2;
  } catch (...) {
    fmt::print(stderr, "error: {}\n", shardlib::detail::error_text(std::current_exception()));
    return 1;
  }
}
