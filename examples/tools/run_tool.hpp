// How a tool that needs no devices ends. `run_program` of launch.hpp would start MPI too.
#pragma once

#include <fmt/format.h>
#include <shardlib/device/impl/standard_streams.hpp>
#include <shardlib/support/error.hpp>
#include <shardlib/support/error_text.hpp>

#include <csignal>
#include <cstdio>
#include <exception>
#include <string>

/// The status that `tool(argc, argv)` returns. If it throws, prints the error and returns 2 for a wrong call, else 1.
/// `return run_tool(argc, argv, program)`
inline int run_tool(int argc, char** argv, int (*tool)(int, char**)) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file over the limit of `ulimit -f` is an error, not a silent end
  try {
    const int status = tool(argc, argv);
    const std::string output = shardlib::detail::output_error();
    if (output.empty()) return status;
    throw shardlib::Error(output);
  } catch (const shardlib::UsageError& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return 2;
  } catch (...) {
    fmt::print(stderr, "error: {}\n", shardlib::detail::error_text(std::current_exception()));
    return 1;
  }
}
