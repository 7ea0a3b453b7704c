// Writes report.html for a run, or for two and more runs side by side.
//
//   shardlib-report runs/first                        writes runs/first/report.html
//   shardlib-report runs/first runs/second -o cmp.html
#include <shardlib/support/error.hpp>
#include <shardlib/run/options.hpp>
#include <shardlib/run/report.hpp>

#include <fmt/format.h>

#include <filesystem>
#include <string>
#include <vector>

#include "run_tool.hpp"

using namespace shardlib;

int program(int argc, char** argv) {
  std::vector<std::string> runs;
  std::string output;
  run::Options options("shardlib-report", "Writes one page with the curves, texts and settings of training runs.");
  options.arguments("RUN", runs, "folder of a run, or a metrics file; the first one's colour is blue");
  options.add("-o,--output", output,
              "the page (default: report.html in the run's folder; for several runs in this one)",
              run::value_name("FILE") | run::command_line_only());
  if (!options.parse(argc, argv)) {
    fmt::print("{}", options.answer());
    return 0;
  }
  if (output.empty()) {
    const bool in_folder = runs.size() == 1 && std::filesystem::is_directory(runs[0]);
    output = in_folder ? runs[0] + "/report.html" : "report.html";
  }
  run::write_report(runs, output);
  fmt::print("wrote {}\n", output);
  return 0;
}

int main(int argc, char** argv) {
  return run_tool(argc, argv, program);
}
