// Writes report.html for a run, or for two and more runs side by side.
//
//   shardlib-report runs/first                        writes runs/first/report.html
//   shardlib-report runs/first runs/second -o cmp.html
//   shardlib-report runs/first runs/second -o cmp.html --follow 30    again every 30 s, while a run is in progress
//   shardlib-report runs/first --csv first.csv        writes the numbers as a table instead
#include <shardlib/io/file.hpp>
#include <shardlib/run/options.hpp>
#include <shardlib/run/report.hpp>
#include <shardlib/run/run_directory.hpp>
#include <shardlib/support/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "run_tool.hpp"

using namespace shardlib;

void write_table(const std::string& table, const std::string& file) {
  if (file == "-") {
    fmt::print("{}", table);
    return;
  }
  io::replace_file(file, io::as_bytes(table));
  fmt::print("wrote {}\n", file);
}

/// Throws UsageError if the file that the option names is one that a run writes, or is read here, does not begin as
/// what replaces it does, or cannot be written. A run's page can be made again, so another page may replace it.
void require_free(const std::string& file, const std::vector<std::string>& runs, const std::string& option,
                  const std::string& begin) {
  namespace fs = std::filesystem;
  if (file == "-") return;
  const bool is_page = option == "--output" && fs::path(file).filename() == "report.html";
  for (const std::string& run : runs) {
    if (!is_page) run::require_no_run_file(file, option, run);
    if (std::error_code gone; fs::equivalent(file, run, gone))
      throw UsageError(fmt::format("{} '{}': the file is read as a run: choose another one", option, file));
  }
  io::require_writable(file, option);
  if (io::begins_otherwise(file, begin))
    throw UsageError(option + ": the file '" + file + "' holds something else, which would be lost: choose another " +
                     "path, or move it away");
}

int program(int argc, char** argv) {
  std::vector<std::string> runs;
  std::string output, csv, jsonl;
  std::int64_t follow = 0;
  run::Options options("shardlib-report", "Writes one page with the curves, texts and settings of training runs.");
  options.arguments("RUN", runs, "folder of a run, or a metrics file; the curves of the first run are blue");
  options.add("-o,--output", output,
              "the page (default: report.html in the run's folder, for several runs in the current folder)",
              run::value_name("FILE") | run::command_line_only());
  options.add("--follow", follow, "write the page again every SECONDS until all runs have ended; 0: write it once",
              run::at_least(0) | run::value_name("SECONDS") | run::command_line_only());
  options.add("--csv", csv, "write the numbers of all steps as a table instead; -: to the standard output",
              run::value_name("FILE") | run::command_line_only());
  options.add("--jsonl", jsonl, "the same as JSON lines, an object for each step, for W&B and MLflow",
              run::value_name("FILE") | run::command_line_only());
  if (!options.parse(argc, argv)) return 0;
  if (!csv.empty() || !jsonl.empty()) {
    if ((!csv.empty() && !jsonl.empty()) || !output.empty() || follow > 0)
      throw UsageError("give one of --csv, --jsonl and the page's options --output and --follow");
    if (csv.empty())
      require_free(jsonl, runs, "--jsonl", "{\"run\": ");
    else
      require_free(csv, runs, "--csv", "run,step,");
    write_table(csv.empty() ? run::to_jsonl(runs) : run::to_csv(runs), csv.empty() ? jsonl : csv);
    return 0;
  }
  const bool own_page = output.empty() && runs.size() == 1 && std::filesystem::is_directory(runs[0]);
  if (output.empty()) output = own_page ? runs[0] + "/report.html" : "report.html";
  require_free(output, runs, "--output", "<!DOCTYPE html>");
  for (bool more = true; more;) {
    const bool live = std::any_of(runs.begin(), runs.end(), [](const auto& run) { return run::in_progress(run); });
    more = live && follow > 0;
    // A training run keeps writing the page in its own folder.
    const double every = more ? static_cast<double>(follow) : live && own_page ? run::report_interval : 0;
    try {
      run::write_report(runs, output, every);
      fmt::print("wrote {}\n", output);
      std::fflush(stdout);
    } catch (const Error& error) {  // a run without records yet, for instance
      if (!more) throw;
      fmt::print(stderr, "{}; trying again in {} s\n", error.what(), follow);
    }
    if (more) std::this_thread::sleep_for(std::chrono::seconds(follow));
  }
  return 0;
}

int main(int argc, char** argv) {
  return run_tool(argc, argv, program);
}
