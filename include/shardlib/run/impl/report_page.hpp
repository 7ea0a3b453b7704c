// The style and the script of the report.
#pragma once

namespace shardlib::run::detail {

// Colours of runs (c) are told apart by people who cannot tell red from green; those of parts (p) are muted.
inline constexpr const char* report_style = R"css(
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1b1f24;--dim:#667080;--line:#e3e6ea;--mark:#fff3c4;
--c0:#0b68c4;--c1:#d9570a;--c2:#0a8a5f;--c3:#b5368f;--c4:#8a6d00;--c5:#5b4bd0;--c6:#c02640;--c7:#4b5563;
--p0:#4e8fd0;--p1:#e39a5b;--p2:#5fb59a;--p3:#c98bbd;--p4:#c9b458;--p5:#9a94d8;--p6:#d97f8d;--p7:#9aa3ad}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--card:#1d2126;--ink:#e6e9ed;--dim:#98a2b0;--line:#333a43;
--mark:#4a4220;--c0:#5eb0ff;--c1:#ff9a52;--c2:#3fcf9f;--c3:#f08bd0;--c4:#d9bd4a;--c5:#a69bff;--c6:#ff7d92;--c7:#aab4c0;
--p0:#3c6f9f;--p1:#a86f3f;--p2:#3f8570;--p3:#8f5f86;--p4:#8f7f3a;--p5:#6d68a0;--p6:#9c5863;--p7:#6b737d}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif}
main{max-width:1360px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:24px;margin:0 0 4px;font-weight:650}
h2{font-size:17px;margin:34px 0 12px;font-weight:650}
p.sub{margin:0 0 18px;color:var(--dim)}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));gap:16px}
.card,.box{background:var(--card);border:1px solid var(--line);border-radius:10px;margin:0;padding:12px 14px}
.card{position:relative}
.box{overflow-x:auto}
figcaption{display:flex;flex-wrap:wrap;align-items:center;gap:4px 12px;min-height:26px;margin-bottom:4px}
figcaption b{font-weight:600}
svg{display:block;width:100%;height:auto;touch-action:pan-y}
.tick{font-size:12.5px;fill:var(--dim);font-variant-numeric:tabular-nums}
.grid{stroke:var(--line);stroke-width:1}
path{fill:none;stroke-linejoin:round;stroke-linecap:round}
.raw{stroke-width:1;opacity:.28}
.smooth{stroke-width:2}
.marked{stroke-width:1.6;stroke-dasharray:6 4}
.mark{stroke:var(--card);stroke-width:1}
.event{stroke-width:1.2;stroke-dasharray:2 3}
.area{stroke:none}
.cursor{stroke:var(--dim);stroke-width:1;stroke-dasharray:3 3}
.zoom,.log,[data-view=zoom] .linear,[data-view=log] .linear{display:none}
[data-view=zoom] .zoom,[data-view=log] .log{display:inline}
.views{margin-left:auto;display:inline-flex;border:1px solid var(--line);border-radius:20px;overflow:hidden}
.views button{font:inherit;font-size:13px;line-height:1.4;padding:1px 11px;border:0;background:transparent;
color:var(--dim);cursor:pointer}
.views button[aria-pressed=true]{background:var(--line);color:var(--ink)}
.readout{position:absolute;z-index:2;pointer-events:none;background:var(--card);border:1px solid var(--line);
border-radius:8px;padding:6px 10px;font-size:13px;box-shadow:0 3px 14px rgba(0,0,0,.18);white-space:nowrap;
font-variant-numeric:tabular-nums}
.readout div{display:flex;gap:8px;align-items:center}
.readout span:last-child{margin-left:auto;padding-left:12px}
.key,.run{white-space:nowrap}
.keys{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:13px;color:var(--dim)}
i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;flex:none}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;color:var(--dim);font-size:13px}
tr:last-child td{border-bottom:0}
td.num,th.num{text-align:right}
td code{font:13px/1.4 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
tr.differs td{background:var(--mark)}
tr.differs td:first-child{box-shadow:-8px 0 0 var(--mark)}
details{margin:6px 0}
summary{cursor:pointer;font-weight:600}
pre{margin:8px 0 4px;padding:10px 12px;background:var(--bg);border-radius:8px;white-space:pre-wrap;overflow-wrap:anywhere;
font:13px/1.5 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre b{color:var(--dim);font-weight:400}
)css";

// Colours of curves and parts as rules: .c0{stroke:...} for each number.
inline constexpr const char* report_script = R"js(
"use strict";
(() => {
const text = {
  number: v => v && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e5) ? v.toExponential(3) : v.toPrecision(5),
  count: v => scaled(v, 1e3, ["", " k", " M", " G", " T"]),
  percent: v => (100 * v).toPrecision(3) + " %",
  bytes: v => scaled(v, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]),
  seconds: v => Math.abs(v) < 1e-3 ? (1e6 * v).toPrecision(3) + " µs"
    : Math.abs(v) < 1 ? (1e3 * v).toPrecision(3) + " ms" : v.toPrecision(3) + " s"
};
function scaled(v, base, units) {
  let i = 0;
  while (Math.abs(v) >= base && i + 1 < units.length) { v /= base; ++i; }
  return String(+v.toPrecision(4)) + units[i];
}
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return x - xs[low] <= xs[high] - x ? low : high;
}
const cards = [...document.querySelectorAll(".card")].map(card => ({
  card, svg: card.querySelector("figure > svg"), cursor: card.querySelector(".cursor"),
  readout: card.querySelector(".readout"), low: +card.dataset.low, high: +card.dataset.high,
  left: +card.dataset.left, right: +card.dataset.right, format: text[card.dataset.unit],
  series: JSON.parse(card.querySelector("script").textContent).series
}));
function element(name, parent, content) {
  const e = document.createElement(name);
  if (content !== undefined) e.textContent = content;
  parent.append(e);
  return e;
}
function leave() {
  for (const c of cards) { c.cursor.setAttribute("x1", -9); c.cursor.setAttribute("x2", -9); c.readout.hidden = true; }
}
function move(c, event) {
  const box = c.svg.getBoundingClientRect(), view = c.svg.viewBox.baseVal.width;
  const at = (event.clientX - box.left) * view / box.width;
  const part = Math.min(1, Math.max(0, (at - c.left) / (c.right - c.left)));
  const step = c.low + part * (c.high - c.low);
  for (const other of cards) {
    const x = other.left + (step - other.low) / (other.high - other.low) * (other.right - other.left);
    const inside = x >= other.left && x <= other.right ? x : -9;
    other.cursor.setAttribute("x1", inside);
    other.cursor.setAttribute("x2", inside);
    if (other !== c) other.readout.hidden = true;
  }
  c.readout.replaceChildren();
  element("div", c.readout, "step " + Math.round(step)).style.color = "var(--dim)";
  for (const s of c.series) {
    if (!s.x.length || step < s.x[0] - 0.5 || step > s.x[s.x.length - 1] + 0.5) continue;
    const i = nearest(s.x, step), value = s.smooth ? s.smooth[i] : s.y[i];
    if (value === null) continue;
    const row = element("div", c.readout);
    element("i", row).style.cssText = "margin:0;background:var(--" + (s.part === undefined ? "c" + s.color
      : "p" + s.part) + ")";
    element("span", row, s.name);
    element("span", row, c.format(value) + (s.smooth && s.y[i] !== null ? "  (raw " + c.format(s.y[i]) + ")" : ""));
  }
  c.readout.hidden = false;
  const width = c.readout.offsetWidth, card = c.card.getBoundingClientRect(), x = event.clientX - card.left;
  c.readout.style.left = Math.max(4, x + 18 + width > card.width ? x - width - 18 : x + 18) + "px";
  c.readout.style.top = Math.max(36, event.clientY - card.top - 20) + "px";
}
for (const c of cards) {
  c.svg.addEventListener("pointermove", event => move(c, event));
  c.svg.addEventListener("pointerleave", leave);
  const buttons = [...c.card.querySelectorAll(".views button")];
  for (const button of buttons) button.addEventListener("click", () => {
    c.card.dataset.view = button.textContent;
    for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
  });
}
})();
)js";

}  // namespace shardlib::run::detail
