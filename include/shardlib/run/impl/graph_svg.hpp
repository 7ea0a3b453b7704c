// Definitions of graph.hpp: the picture, which fits the window, is moved and enlarged there, and follows its theme.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

#include "shardlib/io/file.hpp"
#include "shardlib/run/graph.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::run {

namespace detail {

/// Colours for a dark window, where those of the file are for a bright one and for paper.
inline constexpr std::string_view graph_style = R"(<style>
svg { background: #ffffff; cursor: grab }
@media screen and (prefers-color-scheme: dark) {
  svg { background: #16181d }
  text { fill: #e8e8e8 }
  .cluster polygon { stroke: #5a5f6b }
  .node path, .node polygon { stroke: #9aa0ac }
  .edge path { stroke: #8b919d }
  .edge polygon { stroke: #8b919d; fill: #8b919d }
  .edge text { fill: #b4bac6 }
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

/// The wheel enlarges at the pointer, dragging moves; + and - enlarge at the middle, 0 and a double click show all.
inline constexpr std::string_view graph_script = R"(<script><![CDATA[
const svg = document.documentElement, whole = svg.viewBox.baseVal;
const all = [whole.x, whole.y, whole.width, whole.height];
let view = all.slice(), drag = null;
const show = () => svg.setAttribute("viewBox", view.join(" "));
const point = (x, y) => new DOMPoint(x, y).matrixTransform(svg.getScreenCTM().inverse());
const zoom = (by, at) => {
  const size = Math.min(4, Math.max(0.02, view[2] / by / all[2])) * all[2] / view[2];
  view = [at.x - (at.x - view[0]) * size, at.y - (at.y - view[1]) * size, view[2] * size, view[3] * size];
  show();
};
const middle = () => ({x: view[0] + view[2] / 2, y: view[1] + view[3] / 2});
svg.addEventListener("wheel", e => {
  e.preventDefault();
  zoom(Math.exp(-e.deltaY / 400), point(e.clientX, e.clientY));
}, {passive: false});
svg.addEventListener("pointerdown", e => {
  if (e.button !== 0) return;
  drag = point(e.clientX, e.clientY);
  svg.setPointerCapture(e.pointerId);
});
svg.addEventListener("pointermove", e => {
  if (!drag) return;
  const to = point(e.clientX, e.clientY);
  view[0] += drag.x - to.x;
  view[1] += drag.y - to.y;
  show();
});
svg.addEventListener("pointerup", () => { drag = null; });
const reset = () => { view = all.slice(); show(); };
svg.addEventListener("dblclick", reset);
addEventListener("keydown", e => {
  if (e.key === "+" || e.key === "=") zoom(1.25, middle());
  if (e.key === "-") zoom(0.8, middle());
  if (e.key === "0") reset();
});
]]></script>
)";

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
  struct Removed {
    const std::string& folder;
    ~Removed() {
      std::error_code none;
      std::filesystem::remove_all(folder, none);
    }
  } const removed{folder};
  const std::string text = folder + "/graph.dot", picture = folder + "/graph.svg";
  io::write_file(text, io::as_bytes(dot));
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
  return detail::fitted({reinterpret_cast<const char*>(drawn.data()), drawn.size()});
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
