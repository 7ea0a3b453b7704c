// Definitions of graph.hpp.
#pragma once

#include "shardlib/run/graph.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string_view>
#include <utility>

#include "shardlib/comm/dry.hpp"
#include "shardlib/run/unit.hpp"
#include "shardlib/runtime/observe.hpp"
#include "shardlib/runtime/op_report.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/support/print.hpp"

namespace shardlib::run {

namespace detail {

/// Collects the nodes and edges of a dry run. Shards are identified by their addresses. Addresses are reused, so a
/// shard belongs to the op that wrote there last.
class Graph {
 public:
  explicit Graph(bool whole_step) : whole_step_(whole_step) {}

  void add(const shardlib::detail::OpReport& ran, const shardlib::detail::ProgramState& state) {
    using Pass = shardlib::detail::ProgramState::Pass;
    using Read = shardlib::detail::OpRead;
    if (state.pass == Pass::none && !(whole_step_ && state.counting)) return;
    const auto& reads = ran.work.reads;
    // Also if the op below costs nothing: its result would hide the shard's earlier name.
    for (const Read& read : reads)
      if (!read.what.empty() && !producers_.contains(read.shard)) producers_[read.shard] = input(read);
    if (shardlib::detail::only_named(ran)) return;
    const std::size_t number = nodes_.size();
    std::set<const void*> seen;
    begun_ = begun_ || state.pass != Pass::none;
    const bool backward = state.pass == Pass::backward;
    for (const Read& read : reads) {
      if (read.what.empty() || !seen.insert(read.shard).second) continue;
      const std::size_t from = producers_.at(read.shard);
      edges_.insert({from, number, spec_text(*read.spec), read.bytes});
      if (backward && nodes_[from].kind == Kind::forward) nodes_[from].kept = read.bytes;
    }
    producers_[ran.shard] = number;
    Node node{ran.op.name, std::string(ran.op.spec)};
    node.kind = backward                      ? Kind::backward
                : state.pass == Pass::forward ? Kind::forward
                : begun_                      ? Kind::update
                                              : Kind::before;
    node.recomputed = ran.recomputed;
    node.flops = ran.work.flops;
    node.bytes = ran.work.bytes;
    if (node.bytes > 0) node.color = color(ran.work);
    nodes_.push_back(std::move(node));
  }

  /// Makes one node of neighboring ops that neither communicate nor multiply matrices, where that leaves the graph
  /// without a cycle. Inputs become lines of the ops that read them.
  void fold() {
    folded_ = true;
    std::vector<std::size_t> into(nodes_.size());
    std::iota(into.begin(), into.end(), std::size_t{0});
    std::vector<std::vector<std::size_t>> next(nodes_.size());  // of each set: the nodes at the ends of its arrows
    for (const Edge& edge : edges_) next[edge.from].push_back(edge.to);
    for (const Edge& edge : edges_) {
      const std::size_t from = into[edge.from], to = into[edge.to];
      if (from == to || !alike(nodes_[edge.from], nodes_[edge.to]) || another_way(into, next, from, to)) continue;
      // The name of a set is its first member, so its members are in the order in which they ran.
      const std::size_t kept = std::min(from, to), gone = std::max(from, to);
      std::ranges::replace(into, gone, kept);
      next[kept].insert(next[kept].end(), next[gone].begin(), next[gone].end());
    }
    std::set<Edge> edges;
    for (const Edge& edge : edges_)
      if (into[edge.from] != into[edge.to]) edges.insert({into[edge.from], into[edge.to], edge.spec, edge.bytes});
    edges_ = std::move(edges);
    std::map<std::size_t, std::vector<std::string>> names;
    for (std::size_t i = 0; i < nodes_.size(); ++i)
      if (nodes_[i].kind != Kind::input) names[into[i]].push_back(nodes_[i].name);
    for (const auto& [set, members] : names) {
      if (members.size() == 1) continue;
      nodes_[set].name = listed(members);
      nodes_[set].spec.clear();
    }
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (into[i] == i) continue;
      nodes_[into[i]].kept += nodes_[i].kept;
      nodes_[i].kind = Kind::folded;
    }
    for (const Edge& edge : edges_)
      if (nodes_[edge.from].kind == Kind::input)
        nodes_[edge.to].inputs += fmt::format("\n[{},\n{}]", nodes_[edge.from].name, bytes_text(edge.bytes));
    std::erase_if(edges_, [&](const Edge& edge) { return nodes_[edge.from].kind == Kind::input; });
    for (Node& node : nodes_)
      if (node.kind == Kind::input) node.kind = Kind::folded;
  }

  [[nodiscard]] std::string text(const std::string& title) const {
    std::string out = fmt::format(
        "digraph {{\n  label={}; labelloc=t; fontname=\"sans-serif\"; fontsize=16; bgcolor=transparent; nodesep=0.02; "
        "ranksep=0.3;{}\n  node [fontname=\"sans-serif\", fontsize=12, margin=\"0.06,0.03\", color=\"#444444\"];\n"
        "  edge [fontname=\"sans-serif\", fontsize=12, color=\"#777777\", fontcolor=\"#555555\", arrowsize=0.7];\n",
        quote(title), folded_ ? " newrank=true;" : "");  // else `dot` places the passes side by side
    out += nodes(Kind::input);
    for (const auto& [kind, name] : {std::pair{Kind::before, "before"},
                                     {Kind::forward, "forward"},
                                     {Kind::backward, "backward"},
                                     {Kind::update, "update"}})
      if (const std::string part = nodes(kind); !part.empty())
        out +=
            fmt::format("  subgraph cluster_{} {{\n    label=\"{}\"; color=\"#aaaaaa\";\n{}  }}\n", name, name, part);
    if (!colors_.empty()) {
      out += "  subgraph cluster_axes {\n    label=\"collectives over\"; color=\"#aaaaaa\";\n";
      for (const auto& [axes, number] : colors_)
        out += fmt::format("    {} [label={}, shape=box, style=\"rounded,filled\", {}];\n", quote("axes " + axes),
                           quote(axes), fill(number));
      out += "  }\n";
    }
    std::set<std::pair<std::size_t, std::string>> told;  // a value is described at its first arrow
    std::set<std::size_t> goes_on, begun;
    for (const Edge& edge : edges_) {
      const Kind from = nodes_[edge.from].kind, to = nodes_[edge.to].kind;
      if (from == Kind::forward && to == Kind::forward) goes_on.insert(edge.from);
      if (from == Kind::backward) begun.insert(edge.to);
      const std::string label = in_lines(edge.spec) + "\n" + bytes_text(edge.bytes);
      if (from == Kind::backward || to != Kind::backward)
        out += fmt::format("  n{} -> n{} [label={}];\n", edge.from, edge.to,
                           told.emplace(edge.from, label).second || !folded_ ? quote(label) : "\"\"");
      else if (folded_)  // `svg` draws it: `dot` would make room for it in every row
        out += fmt::format("  // kept n{} n{}\n", edge.from, edge.to);
      else  // both passes begin at the top, so such an edge moves no node down
        out += fmt::format("  n{} -> n{} [constraint=false, style=dotted];\n", edge.from, edge.to);
    }
    if (folded_) {
      // Rows are narrower than columns: the colors stand in the first one, and an invisible node is between the passes.
      out += "  between [shape=point, style=invis];\n";
      bool first = true;
      for (std::size_t i = 0; i < nodes_.size(); ++i) {
        if (nodes_[i].kind == Kind::forward && std::exchange(first, false))
          for (const auto& [axes, number] : colors_)
            out += fmt::format("  {} -> n{} [style=invis];\n", quote("axes " + axes), i);
        if (nodes_[i].kind == Kind::forward && !goes_on.contains(i))
          out += fmt::format("  n{} -> between [style=invis];\n", i);
        if (nodes_[i].kind == Kind::backward && !begun.contains(i))
          out += fmt::format("  between -> n{} [style=invis];\n", i);
      }
    }
    return out + "}\n";
  }

 private:
  /// `before` and `update` are a step's ops outside of value_and_grad: before the first one, and after it.
  enum class Kind { input, before, forward, backward, update, folded };
  struct Node {
    std::string name, spec;
    Kind kind = Kind::input;
    bool recomputed = false;
    double flops = 0;
    std::int64_t bytes = 0;   ///< sent
    std::size_t kept = 0;     ///< bytes that the backward pass reads
    std::size_t color = 0;    ///< of the axes, from 1 on
    std::string inputs = {};  ///< a line for each that is folded into the op
  };
  struct Edge {
    std::size_t from, to;
    std::string spec;
    std::size_t bytes;
    auto operator<=>(const Edge&) const = default;
  };

  static std::string bytes_text(std::size_t bytes) { return unit_text(Unit::bytes, static_cast<double>(bytes)); }
  static std::string spec_text(const TensorSpec& spec) { return std::string(shardlib::to_string(spec).view()); }
  /// In a folded graph, each spec of an op spec on a line of its own.
  [[nodiscard]] std::string in_lines(std::string spec) const {
    if (!folded_) return spec;
    for (const auto& [sign, cut] : {std::pair<std::string_view, std::string_view>{", ", ",\n"}, {" -> ", "\n→ "}})
      for (std::size_t at = spec.find(sign); at != std::string::npos; at = spec.find(sign, at + cut.size()))
        spec.replace(at, sign.size(), cut);
    return spec;
  }
  std::size_t input(const shardlib::detail::OpRead& read) {
    nodes_.push_back({read.what, spec_text(*read.spec)});
    return nodes_.size() - 1;
  }
  static bool alike(const Node& a, const Node& b) {
    const auto small = [](const Node& x) { return x.kind != Kind::input && x.flops == 0 && x.bytes == 0; };
    return small(a) && small(b) && a.kind == b.kind && a.recomputed == b.recomputed;
  }
  /// Whether a path leads from one set of nodes to another one through a third.
  [[nodiscard]] static bool another_way(const std::vector<std::size_t>& into,
                                        const std::vector<std::vector<std::size_t>>& next, std::size_t from,
                                        std::size_t to) {
    std::vector<bool> seen(into.size());
    std::vector<std::size_t> todo{from};
    while (!todo.empty()) {
      const std::size_t at = todo.back();
      todo.pop_back();
      for (const std::size_t node : next[at]) {
        const std::size_t set = into[node];
        if (set == at || seen[set] || (at == from && set == to)) continue;
        if (set == to) return true;
        seen[set] = true;
        todo.push_back(set);
      }
    }
    return false;
  }
  /// "cast, norm, ...", in lines of about 20 characters.
  static std::string listed(const std::vector<std::string>& names) {
    constexpr std::size_t most = 4, width = 20;
    std::vector<std::string> distinct;
    for (const std::string& name : names)
      if (std::ranges::find(distinct, name) == distinct.end()) distinct.push_back(name);
    std::string text;
    std::size_t line = 0;
    for (std::size_t i = 0; i < std::min(distinct.size(), most); ++i) {
      const bool fits = line + distinct[i].size() <= width;
      text += (i == 0 ? "" : fits ? ", " : ",\n") + distinct[i];
      line = (fits ? line : 0) + distinct[i].size();
    }
    return text + (distinct.size() > most ? ", ..." : "") + fmt::format("\n({} ops)", names.size());
  }
  std::size_t color(const shardlib::detail::OpWork& work) {
    return colors_.try_emplace(fmt::format("{}", fmt::join(work.axes, " ")), colors_.size() + 1).first->second;
  }
  /// The look of a node that communicates over the axes of this number; 0 for other nodes.
  static std::string fill(std::size_t number) {
    constexpr const char* palette[] = {"#f4a582", "#92c5de", "#b8e186", "#d8b5e8", "#fee08b", "#8dd3c7"};
    const std::size_t i = (number - 1) % std::size(palette);
    return fmt::format("fillcolor=\"{}\", class=\"axes{}\"", palette[i], i);
  }
  [[nodiscard]] std::string nodes(Kind kind) const {
    std::string out;
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      const Node& node = nodes_[i];
      if (node.kind != kind) continue;
      std::string label = node.name + node.inputs;
      if (!node.spec.empty()) label += "\n" + in_lines(node.spec);
      if (node.recomputed) label += "\n(recomputed)";
      if (node.flops > 0) label += "\n" + unit_text(Unit::count, node.flops) + (node.flops < 1e3 ? " FLOP" : "FLOP");
      if (node.bytes > 0) label += "\nsends " + bytes_text(static_cast<std::size_t>(node.bytes));
      if (node.kept > 0) label += "\nkept: " + bytes_text(node.kept);
      const std::string look = node.bytes > 0        ? fill(node.color)
                               : kind == Kind::input ? "fillcolor=\"#ffffff\", class=\"input\""
                               : node.flops > 0      ? "fillcolor=\"#dddddd\", class=\"product\""
                                                     : "fillcolor=\"#f6f6f6\", class=\"op\"";
      out += fmt::format("    n{} [label={}, shape=box, style=\"{}filled{}\", {}];\n", i, quote(label),
                         kind == Kind::input ? "" : "rounded,", node.recomputed ? ",dashed" : "", look);
    }
    return out;
  }

  std::vector<Node> nodes_;
  std::set<Edge> edges_;
  std::map<const void*, std::size_t> producers_;
  std::map<std::string, std::size_t> colors_;
  bool whole_step_, begun_ = false, folded_ = false;
};

}  // namespace detail

SHARDLIB_INLINE std::string dot(const std::vector<AxisSize>& mesh, const std::function<void(const DevicePtr&)>& body,
                                const GraphOptions& options) {
  const auto device = DevicePtr::make(mesh, 0, std::make_shared<DryWorld>());
  detail::Graph graph(options.whole_step);
  {
    auto& state = shardlib::detail::program_state(device);
    const shardlib::detail::NoteReads noting(state, true);
    const shardlib::detail::Observing observing(device,
                                                [&](const shardlib::detail::OpReport& ran) { graph.add(ran, state); });
    body(device);
  }
  device->clear_local();
  if (options.fold) graph.fold();
  return graph.text(mesh.empty() ? "one device" : "mesh " + to_string(mesh));
}

}  // namespace shardlib::run
