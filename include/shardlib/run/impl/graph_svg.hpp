// Definitions of graph.hpp: the picture, which is as wide as its window, is moved and enlarged there, and follows its
// theme.
#pragma once

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/io/file.hpp"
#include "shardlib/io/impl/temporary.hpp"
#include "shardlib/run/graph.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::run {

namespace detail {

/// Colors for a dark window, where those of the file are for a bright one and for paper.
inline constexpr std::string_view graph_style = R"(<style>
svg { background: #ffffff; cursor: grab }
.kept { fill: none; stroke: #777777; stroke-dasharray: 1 4; stroke-linecap: round }
@media screen and (prefers-color-scheme: dark) {
  svg { background: #16181d }
  text { fill: #e8e8e8 }
  .cluster polygon { stroke: #5a5f6b }
  .node path, .node polygon { stroke: #9aa0ac }
  .edge path { stroke: #8b919d }
  .edge polygon { stroke: #8b919d; fill: #8b919d }
  .edge text { fill: #b4bac6 }
  .kept { stroke: #9aa0ac }
  .input polygon { fill: #16181d }
  .op path { fill: #23262e }
  .product path { fill: #454b58 }
  .axes0 path { fill: #8c4a2f }
  .axes1 path { fill: #2f6285 }
  .axes2 path { fill: #4b7124 }
  .axes3 path { fill: #6a4180 }
  .axes4 path { fill: #74611a }
  .axes5 path { fill: #246b61 }
}
</style>
)";

/// The picture is as wide as the window. The wheel, dragging and keys move it; with Ctrl the wheel enlarges at the
/// pointer, + and - at the middle. 0 shows all, and a double click the width again.
inline constexpr std::string_view graph_script = R"(<script><![CDATA[
const svg = document.documentElement, whole = svg.viewBox.baseVal;
const all = [whole.x, whole.y, whole.width, whole.height];
let view = null, drag = null, moved = false;
const show = () => svg.setAttribute("viewBox", view.join(" "));
const reset = () => {
  const width = Math.max(all[2], innerWidth / 1.3), height = width * innerHeight / innerWidth;
  view = [all[0] + (all[2] - width) / 2, all[1], width, height];
  moved = false;
  show();
};
const move = (x, y) => {
  [x, y].forEach((by, i) => {
    const ends = [all[i], all[i] + all[i + 2] - view[i + 2]];
    view[i] = Math.max(Math.min(...ends), Math.min(Math.max(...ends), view[i] + by));
  });
  moved = true;
  show();
};
const point = (x, y) => new DOMPoint(x, y).matrixTransform(svg.getScreenCTM().inverse());
const zoom = (by, at) => {
  const size = Math.min(4, Math.max(0.02, view[2] / by / all[2])) * all[2] / view[2];
  view = [at.x - (at.x - view[0]) * size, at.y - (at.y - view[1]) * size, view[2] * size, view[3] * size];
  moved = true;
  show();
};
const middle = () => ({x: view[0] + view[2] / 2, y: view[1] + view[3] / 2});
svg.addEventListener("wheel", e => {
  e.preventDefault();
  const unit = e.deltaMode === 1 ? 16 : 1, size = unit * view[2] / innerWidth;
  if (e.ctrlKey || e.metaKey) zoom(Math.exp(-unit * e.deltaY / 400), point(e.clientX, e.clientY));
  else move(e.deltaX * size, e.deltaY * size);
}, {passive: false});
svg.addEventListener("pointerdown", e => {
  if (e.button !== 0) return;
  drag = point(e.clientX, e.clientY);
  svg.setPointerCapture(e.pointerId);
});
svg.addEventListener("pointermove", e => {
  if (!drag) return;
  const to = point(e.clientX, e.clientY);
  move(drag.x - to.x, drag.y - to.y);
});
svg.addEventListener("pointerup", () => { drag = null; });
svg.addEventListener("dblclick", reset);
addEventListener("resize", () => { if (!moved) reset(); });
addEventListener("keydown", e => {
  const part = {ArrowUp: -0.1, ArrowDown: 0.1, PageUp: -0.9, PageDown: 0.9, Home: -1e6, End: 1e6}[e.key];
  if (part) move(0, part * view[3]);
  const side = {ArrowLeft: -0.1, ArrowRight: 0.1}[e.key];
  if (side) move(side * view[2], 0);
  if (e.key === "+" || e.key === "=") zoom(1.25, middle());
  if (e.key === "-") zoom(0.8, middle());
  if (e.key === "0") { view = all.slice(); moved = true; show(); }
});
reset();
]]></script>
)";

/// The SVG of `dot` with dotted curves for the lines "// kept n1 n2" of its text, behind the nodes.
inline std::string with_kept(std::string svg, std::string_view dot) {
  struct Place {
    double x, top, bottom;  ///< of a node's text
  };
  std::map<std::string, Place, std::less<>> places;
  for (std::size_t at = svg.find("class=\"node"); at != std::string::npos; at = svg.find("class=\"node", at + 1)) {
    const std::string_view group(svg.data() + at, svg.find("</g>", at) - at);
    const auto number = [&](std::string_view before, std::size_t from) {
      return std::strtod(group.data() + group.find(before, from) + before.size(), nullptr);
    };
    const std::size_t name = group.find("<title>") + 7, text = group.find("<text "), last = group.rfind("<text ");
    if (text < group.size())
      places[std::string(group.substr(name, group.find('<', name) - name))] = {
          number(" x=\"", text), number(" y=\"", text), number(" y=\"", last)};
  }
  std::string curves;
  constexpr std::string_view mark = "  // kept ";
  for (std::size_t at = dot.find(mark); at != std::string_view::npos; at = dot.find(mark, at + 1)) {
    std::istringstream words(std::string(dot.substr(at + mark.size(), dot.find('\n', at) - at - mark.size())));
    std::string from, to;
    words >> from >> to;
    const Place &a = places.at(from), &b = places.at(to);
    const double middle = (a.bottom + b.top) / 2;
    curves += fmt::format("<path class=\"kept\" d=\"M{:.0f},{:.0f} C{:.0f},{:.0f} {:.0f},{:.0f} {:.0f},{:.0f}\"/>\n",
                          a.x, a.bottom, a.x, middle, b.x, middle, b.x, b.top);
  }
  if (!curves.empty()) svg.insert(svg.find("<g id=\"node"), curves);
  return svg;
}

/// A node or an arrow of the SVG of `dot`.
struct GraphPart {
  std::size_t title, length;  ///< place of its title, which is a name: "n1", or "n1&#45;&gt;n2"
  std::string name, text;     ///< the lines that it shows
};

/// The SVG of `dot` with titles that say what nodes and arrows show, in place of their names. A browser shows them at
/// the pointer, so that they can be read while the whole picture is in the window.
inline std::string with_titles(std::string svg) {
  constexpr std::string_view open = "<title>", line = "<text ", arrow = "&#45;&gt;";
  std::vector<GraphPart> parts;
  std::map<std::string, std::string, std::less<>> nodes;  // the first line of each
  for (std::size_t at = svg.find("<g id="); at != std::string::npos; at = svg.find("<g id=", at + 1)) {
    const std::string_view group(svg.data() + at, svg.find("</g>", at) - at);
    const std::size_t begin = group.find(open), end = group.find("</title>");
    const bool is_node = group.find("class=\"node") < begin;
    if (end >= group.size() || (!is_node && group.find("class=\"edge") > begin)) continue;
    const std::size_t name = begin + open.size();
    GraphPart part{at + name, end - name, std::string(group.substr(name, end - name)), {}};
    for (std::size_t text = group.find(line); text < group.size(); text = group.find(line, text + 1)) {
      const std::size_t from = group.find('>', text) + 1;
      part.text += (part.text.empty() ? "" : "\n") + std::string(group.substr(from, group.find('<', from) - from));
    }
    if (is_node) nodes[part.name] = part.text.substr(0, part.text.find('\n'));
    parts.push_back(std::move(part));
  }
  for (auto part = parts.rbegin(); part != parts.rend(); ++part) {  // the places before stay
    std::string title = part->text;
    if (const std::size_t at = part->name.find(arrow); at != std::string::npos)
      title = nodes[part->name.substr(0, at)] + " → " + nodes[part->name.substr(at + arrow.size())] +
              (title.empty() ? "" : "\n" + title);
    svg.replace(part->title, part->length, title);
  }
  return svg;
}

/// The SVG of `dot`, as large as its window, with style and script.
inline std::string fitted(std::string svg) {
  const std::size_t begin = svg.find("<svg "), view = svg.find("viewBox=", begin), end = svg.find('>', begin);
  if (end == std::string::npos || view == std::string::npos || view > end)
    throw Error("`dot -Tsvg` has written a file that is not an SVG picture");
  svg.insert(end + 1, "\n" + std::string(graph_style) + std::string(graph_script));
  svg.replace(begin, view - begin, "<svg width=\"100%\" height=\"100%\" ");
  return svg;
}

}  // namespace detail

SHARDLIB_INLINE std::string svg(const std::string& dot) {
  // `dot` reads and writes files, which go away with their folder.
  std::string folder = (std::filesystem::temp_directory_path() / "shardlib-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr)
    throw UsageError("cannot draw a graph: no temporary folder '" + folder + "' can be made: " + std::strerror(errno));
  const io::detail::TemporaryFolder removed(folder);
  const std::string text = folder + "/graph.dot", picture = folder + "/graph.svg";
  io::replace_file(text, io::as_bytes(dot));
  const pid_t child = fork();
  if (child == 0) {
    execlp("dot", "dot", "-Tsvg", "-o", picture.c_str(), text.c_str(), static_cast<char*>(nullptr));
    _exit(127);
  }
  int status = -1;
  const bool ran = child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status);
  if (ran && WEXITSTATUS(status) == 127)
    throw UsageError("a graph needs the program `dot`: install the package graphviz");
  if (!ran || WEXITSTATUS(status) != 0) throw UsageError("cannot draw a graph: `dot -Tsvg` has failed");
  const auto drawn = io::read_file(picture);
  const std::string plain(reinterpret_cast<const char*>(drawn.data()), drawn.size());
  return detail::fitted(detail::with_titles(detail::with_kept(plain, dot)));
}

SHARDLIB_INLINE void write_svg(const std::string& dot, const std::string& path) {
  try {
    const io::OutputFile tried(path);
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
  io::replace_file(path, io::as_bytes(svg(dot)));
}

}  // namespace shardlib::run
