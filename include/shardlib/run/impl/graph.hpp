// Definitions of graph.hpp.
#pragma once

#include "shardlib/run/graph.hpp"

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <string_view>

#include "shardlib/comm/dry.hpp"
#include "shardlib/io/file.hpp"
#include "shardlib/runtime/observe.hpp"
#include "shardlib/runtime/op_report.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/print.hpp"

namespace shardlib::run {

namespace detail {

/// Collects the nodes and edges of a dry run. Shards are identified by their addresses. Addresses are reused, so a
/// shard belongs to the op that wrote there last.
class Graph {
 public:
  void add(const shardlib::detail::OpReport& ran, shardlib::detail::ProgramState::Pass pass) {
    if (pass == shardlib::detail::ProgramState::Pass::none) return;
    const bool backward = pass == shardlib::detail::ProgramState::Pass::backward;
    using Read = shardlib::detail::OpRead;
    const auto& reads = ran.work.reads;
    // Also if the op below costs nothing: its result would hide the shard's earlier name.
    for (const Read& read : reads)
      if (!read.what.empty() && !producers_.contains(read.shard)) producers_[read.shard] = input(read);
    if (shardlib::detail::only_named(ran)) return;
    const std::string id = fmt::format("n{}", count_++);
    std::vector<const void*> seen;
    for (const Read& read : reads) {
      if (read.what.empty() || std::ranges::find(seen, read.shard) != seen.end()) continue;
      seen.push_back(read.shard);
      edges_ += fmt::format("  {} -> {} [label={}];\n", producers_.at(read.shard), id, quote(spec_text(*read.spec)));
    }
    producers_[ran.shard] = id;
    std::string label = ran.op.name;
    if (!ran.op.spec.empty()) label += "\n" + std::string(ran.op.spec);
    if (ran.recomputed) label += "\n(recomputed)";
    const std::string style = ran.recomputed ? "rounded,filled,dashed" : "rounded,filled";
    parts_[backward ? 1 : 0] += fmt::format("    {} [label={}, shape=box, style={}, fillcolor={}];\n", id, quote(label),
                                            quote(style), quote(colour(ran.work)));
  }
  [[nodiscard]] std::string text(const std::string& title) const {
    std::string out = fmt::format(
        "digraph {{\n  label={}; labelloc=t; fontname=\"sans-serif\"; fontsize=16;\n"
        "  node [fontname=\"sans-serif\", fontsize=11, color=\"#444444\"];\n"
        "  edge [fontname=\"sans-serif\", fontsize=9, color=\"#777777\", fontcolor=\"#555555\"];\n",
        quote(title));
    out += inputs_;
    for (std::size_t i = 0; i < 2; ++i)
      if (!parts_[i].empty())
        out += fmt::format("  subgraph cluster_{} {{\n    label=\"{}\"; color=\"#aaaaaa\";\n{}  }}\n", i,
                           i == 0 ? "forward" : "backward", parts_[i]);
    if (!colours_.empty()) {
      out += "  subgraph cluster_2 {\n    label=\"collectives over\"; color=\"#aaaaaa\";\n";
      for (const auto& [axes, fill] : colours_)
        out += fmt::format("    {} [label={}, shape=box, style=\"rounded,filled\", fillcolor=\"{}\"];\n",
                           quote("axes " + axes), quote(axes), fill);
      out += "  }\n";
    }
    return out + edges_ + "}\n";
  }

 private:
  static std::string spec_text(const TensorSpec& spec) { return std::string(shardlib::to_string(spec).view()); }
  std::string input(const shardlib::detail::OpRead& read) {
    const std::string id = fmt::format("n{}", count_++);
    inputs_ += fmt::format("  {} [label={}, shape=box, style=filled, fillcolor=\"#ffffff\"];\n", id,
                           quote(read.what + "\n" + spec_text(*read.spec)));
    return id;
  }
  std::string colour(const shardlib::detail::OpWork& work) {
    if (work.bytes == 0) return work.flops > 0 ? "#dddddd" : "#f6f6f6";
    constexpr const char* palette[] = {"#f4a582", "#92c5de", "#b8e186", "#d8b5e8", "#fee08b", "#8dd3c7"};
    std::string axes;
    for (const auto axis : work.axes) axes += (axes.empty() ? "" : " ") + std::string(axis);
    return colours_.try_emplace(axes, palette[colours_.size() % std::size(palette)]).first->second;
  }

  int count_ = 0;
  std::string inputs_, edges_;
  std::string parts_[2];
  std::map<const void*, std::string> producers_;
  std::map<std::string, std::string> colours_;
};

}  // namespace detail

SHARDLIB_INLINE std::string dot(const std::vector<AxisSize>& mesh, const std::function<void(const DevicePtr&)>& body) {
  const auto device = DevicePtr::make(mesh, 0, std::make_shared<DryWorld>());
  detail::Graph graph;
  {
    auto& state = shardlib::detail::program_state(device);
    const shardlib::detail::NoteReads noting(state, true);
    const shardlib::detail::Observing observing(
        device, [&](const shardlib::detail::OpReport& ran) { graph.add(ran, state.pass); });
    body(device);
  }
  device->clear_local();
  return graph.text(mesh.empty() ? "one device" : "mesh " + to_string(mesh));
}

SHARDLIB_INLINE void write_svg(const std::string& dot, const std::string& path) {
  // `dot` reads and writes files beside it, so that a failure leaves no half picture.
  struct Beside {
    std::string text, svg;
    ~Beside() {
      std::remove(text.c_str());
      std::remove(svg.c_str());
    }
  };
  const Beside beside{path + ".dot", path + ".new"};
  io::write_file(beside.text, io::as_bytes(dot));
  const pid_t child = fork();
  if (child == 0) {
    execlp("dot", "dot", "-Tsvg", "-o", beside.svg.c_str(), beside.text.c_str(), static_cast<char*>(nullptr));
    _exit(127);
  }
  int status = -1;
  const bool ran = child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status);
  if (ran && WEXITSTATUS(status) == 0) return io::replace_file(path, io::read_file(beside.svg));
  if (ran && WEXITSTATUS(status) == 127)
    throw UsageError("the graph '" + path + "' needs the program `dot`: install the package graphviz");
  throw UsageError("cannot draw the graph '" + path + "': `dot -Tsvg` has failed");
}

}  // namespace shardlib::run
