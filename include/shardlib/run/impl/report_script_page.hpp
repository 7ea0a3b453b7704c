// The middle of the report's script: charts, and what a reader does with them.
#pragma once

namespace shardlib::run::detail {

// One cursor, one range and one axis for all charts.
inline constexpr const char* report_script_page = R"js(
const state = {axis: "step", zoom: null, hidden: new Set(), views: {}, at: null, paused: false};
const margin = {left: 64, right: 14, top: 8, bottom: 36};
const charts = [...document.querySelectorAll("figure.card")].map(card => {
  const data = JSON.parse(card.querySelector("script").textContent), plot = card.querySelector(".plot");
  for (const s of data.series) s.x = {step: sums(s.step)};
  card.setAttribute("aria-label", card.querySelector("b").textContent);
  return {...data, card, plot, left: margin.left, svg: plot.querySelector("svg"), title: card.querySelector("b").textContent,
    cursor: add("div", plot, {class: "cursor", hidden: ""}), chosen: add("div", plot, {class: "chosen", hidden: ""}),
    readout: add("div", card, {class: "readout", hidden: ""})};
});
const bar = document.getElementById("bar");
const live = add("div", document.body, {class: "live", role: "status"});
function add(name, parent, attributes, content) {
  const e = document.createElement(name);
  for (const key in attributes) e.setAttribute(key, attributes[key]);
  if (content !== undefined) e.textContent = content;
  parent.append(e);
  return e;
}
const shown = c => c.series.filter(s => !state.hidden.has(s.run));
const xs_of = s => s.x[state.axis] = s.x[state.axis]
  || s.x.step.map(v => convert(page.runs[s.run], "step", state.axis, v));
const first_run = () => page.runs.find((_, i) => !state.hidden.has(i)) || page.runs[0];
function whole() {
  const runs = page.runs.filter((_, i) => !state.hidden.has(i)), some = runs.length ? runs : page.runs;
  const low = Math.min(...some.map(r => r[state.axis][0])), high = Math.max(...some.map(r => r[state.axis].at(-1)));
  return high > low ? [low, high] : [low - 0.5, low + 0.5];
}
const range = () => state.zoom || whole();
// The position of each value; `x_pixel` is for one.
function x_scale(c) {
  const [low, high] = range(), width = c.plot.clientWidth - c.left - margin.right;
  return v => c.left + (v - low) / (high - low) * width;
}
const x_pixel = (c, v) => x_scale(c)(v);
function x_value(c, clientX) {
  const [low, high] = range(), box = c.plot.getBoundingClientRect();
  const part = (clientX - box.left - c.left) / (box.width - c.left - margin.right);
  return low + Math.min(1, Math.max(0, part)) * (high - low);
}

// ---- drawing ----
function curves_of(c) {
  const [low, high] = range(), half = 0.01 * (high - low);
  return shown(c).map(s => {
    const xs = xs_of(s);
    const first = Math.max(0, nearest(xs, low) - 1), last = Math.min(xs.length - 1, nearest(xs, high) + 1);
    const ys = s.marked ? s.y : smoothed(xs, s.y, half, c.robust, first, last);
    const differs = (v, i) => v !== null && Math.abs(v - s.y[i]) > 1e-9 * Math.abs(v);
    const thick = !s.marked && (s.low !== undefined || ys.some(differs));
    return {s, xs, ys, first, last, thick};
  });
}
function y_scale(c, curves, view) {
  const [low, high] = range(), values = [], inside = (k, x) => x >= k && x <= high;
  if (c.stacked) return scale_of(curves.length ? curves.at(-1).top : [], false, true);
  // Without the beginning, which is often far above all that follows, and without outliers.
  const start = view === "close" && low === whole()[0] ? low + 0.1 * (high - low) : low;
  for (const {s, xs, ys, first, last} of curves) {
    const own = [];
    for (let i = first; i <= last; ++i) {
      if (!inside(start, xs[i]) || s.y[i] === null) continue;
      values.push(ys[i]);
      own.push(s.low ? s.low[i] : s.y[i], s.high ? s.high[i] : s.y[i]);
    }
    own.sort((a, b) => a - b);
    if (view !== "close") for (const v of own) values.push(v);
    else if (own.length) values.push(own[own.length / 20 | 0], own[own.length - 1 - (own.length / 20 | 0)]);
  }
  return scale_of(values, view === "log", view === "linear" && c.zero);
}
function path(c, curve, ys, pixel, order) {
  const x = x_scale(c);
  let d = "", down = false, alone = false;
  for (let k = curve.first; k <= curve.last; ++k) {
    const i = order < 0 ? curve.last + curve.first - k : k, at = ys[i] === null ? NaN : pixel(ys[i]);
    if (isFinite(at)) d += (down || order ? d ? "L" : "M" : "M") + x(curve.xs[i]).toFixed(1) + " " + at.toFixed(1);
    if (alone && !isFinite(at)) d += "h0";
    alone = !down && isFinite(at);
    down = isFinite(at);
  }
  return d + (alone ? "h0" : "");
}
function draw(c) {
  c.card.hidden = c.stacked && !shown(c).length;
  const w = c.plot.clientWidth, h = c.plot.clientHeight;
  if (!w) return;
  const [low, high] = range(), bottom = h - margin.bottom, right = w - margin.right;
  const curves = curves_of(c), view = state.views[c.card.id] || "linear";
  let edge = null;
  if (c.stacked) for (const curve of curves) {
    curve.base = edge || curve.ys.map(() => 0);
    edge = curve.top = curve.ys.map((v, i) => curve.base[i] + (v || 0));
  }
  const scale = y_scale(c, curves, view);
  // Far outside is as good as just outside.
  const y = v => Math.max(-2 * h, Math.min(3 * h, bottom - scale.at(v) * (bottom - margin.top)));
  const ticks = y_ticks(scale, h > 260 ? 5 : 4, c.unit);
  c.left = Math.max(margin.left, ...ticks.map(([, label]) => 8 * label.length + 8));
  const x_at = x_scale(c);
  let out = "";
  for (const [v, label] of ticks)
    out += `<path class="grid" d="M${c.left} ${y(v).toFixed(1)}H${right}"/><text x="${c.left - 7}" y="${
      (y(v) + 4).toFixed(1)}" text-anchor="end">${label}</text>`;
  for (const [v, label] of x_ticks(state.axis, low, high, (right - c.left) / 64))
    out += `<text x="${Math.min(x_at(v), w - 4 * label.length - 4).toFixed(1)}" y="${bottom + 17}" text-anchor="middle">${
      label}</text>`;
  out += `<text x="${(c.left + right) / 2}" y="${h - 6}" text-anchor="middle">${axes[state.axis].title}</text>`;
  // A picture of its own clips what is outside, except marks at the ends.
  const clip = [c.left - 5, margin.top, right - c.left + 10, bottom - margin.top];
  out += `<svg x="${clip[0]}" y="${clip[1]}" width="${clip[2]}" height="${clip[3]}" viewBox="${clip.join(" ")}">`;
  const notes = c.notes.filter(n => !state.hidden.has(n.run))
    .map(n => ({color: page.runs[n.run].color, x: x_at(convert(page.runs[n.run], "step", state.axis, n.step))}))
    .filter(n => n.x >= c.left && n.x <= right);
  const top = notes.length > 12 ? bottom - 14 : margin.top;  // many whole lines would hide the curves
  for (const {x, color} of notes)
    out += `<path class="note" style="stroke:var(--${color})" d="M${x.toFixed(1)} ${top}V${bottom}"/>`;
  const color = (s, kind) => `style="${kind}:var(--${s.color})"`;
  for (const curve of curves) {
    const {s, ys} = curve;
    if (c.stacked && curve.first === curve.last) {
      const i = curve.first;
      out += `<path class="area" ${color(s, "fill")} d="M${x_at(curve.xs[i]) - 20} ${y(curve.top[i])}h40V${
        y(curve.base[i])}h-40Z"/>`;
    } else if (c.stacked) {
      out += `<path class="area" ${color(s, "fill")} d="${path(c, curve, curve.top, y, 0)}${
        path(c, curve, curve.base, y, -1).replace("M", "L")}Z"/>`;
    } else if (s.low && curve.thick) {
      out += bands(c, curve, scale, y).map(d => `<path class="band" ${color(s, "fill")} d="${d}"/>`).join("");
    } else if (curve.thick) {
      out += `<path class="raw" ${color(s, "stroke")} d="${path(c, curve, s.y, y, 0)}"/>`;
    }
  }
  for (const curve of c.stacked ? [] : curves) {
    const {s, xs, ys, first, last} = curve;
    out += `<path class="${s.marked ? "marked" : "smooth"}" ${color(s, "stroke")} d="${path(c, curve, ys, y, 0)}"/>`;
    if (last - first > (s.marked ? 26 : 42)) continue;
    for (let i = first; i <= last; ++i)
      if (ys[i] !== null && isFinite(y(ys[i])))
        out += `<path class="dot" ${color(s, "stroke")} d="M${x_at(xs[i]).toFixed(1)} ${y(ys[i]).toFixed(1)}h0"/>`;
  }
  c.svg.innerHTML = out + "</svg>";
  c.curves = curves;
}
// Between the extremes; one for each stretch without a gap.
function bands(c, curve, scale, y) {
  const found = [], {s, first, last} = curve, floor = v => scale.log && v <= 0 ? scale.low : v;
  for (let i = first; i <= last; ++i) {
    const begin = i, ok = k => k <= last && s.low[k] !== null && (!scale.log || s.high[k] > 0);
    while (ok(i)) ++i;
    if (i - begin < 2) continue;
    const part = {xs: curve.xs, first: begin, last: i - 1};
    found.push(path(c, part, s.high, y, 0) + path(c, part, s.low.map(floor), y, -1).replace("M", "L") + "Z");
  }
  return found;
}

// ---- reading values ----
function values_at(c) {
  const format = v => text[c.unit](v, 5), rows = [], [low, high] = range();
  for (const {s, xs, ys, thick} of c.curves || []) {
    const i = nearest(xs, state.at), slack = 0.005 * (high - low);
    if (state.at < xs[0] - slack || state.at > xs.at(-1) + slack || ys[i] === null) continue;
    const own = s.low ? s.low[i] !== null ? ` (${format(s.low[i])} to ${format(s.high[i])})` : ""
      : thick && s.y[i] !== null && !c.stacked ? ` (step: ${format(s.y[i])})` : "";
    rows.push({color: s.color, name: s.name, value: format(ys[i]) + own});
  }
  if (c.stacked) rows.reverse();
  for (const note of c.notes)
    if (!state.hidden.has(note.run) && Math.abs(x_pixel(c, convert(page.runs[note.run], "step", state.axis, note.step))
      - x_pixel(c, state.at)) < 4 && rows.length < 20)
      rows.push({color: page.runs[note.run].color, name: note.text, value: ""});
  return rows;
}
function show_cursor(active, x, y) {
  const [low, high] = range();
  if (state.at !== null) state.at = Math.min(high, Math.max(low, state.at));
  for (const c of charts) {
    c.cursor.hidden = state.at === null;
    if (state.at !== null)
      c.cursor.style.cssText = `left:${x_pixel(c, state.at)}px;top:${margin.top}px;bottom:${margin.bottom}px`;
    c.readout.hidden = true;
  }
  if (!active || state.at === null) return;
  const rows = values_at(active), title = axes[state.axis].text(state.at), box = active.card.getBoundingClientRect();
  const plot = active.plot.getBoundingClientRect(), readout = active.readout;
  active.plot.setAttribute("aria-valuenow", String(Math.round(state.at)));
  active.plot.setAttribute("aria-valuetext", [title, ...rows.map(r => r.name + " " + r.value)].join("; "));
  readout.replaceChildren();
  add("div", readout, {style: "color:var(--dim)"}, title);
  for (const r of rows) {
    const row = add("div", readout);
    add("i", row, {style: `margin:0;background:var(--${r.color})`});
    add("span", row, {}, r.name);
    if (r.value) add("span", row, {}, r.value);
  }
  readout.hidden = false;
  // Beside the cursor, or below the picture where there is no room.
  const width = readout.offsetWidth, by_key = x === undefined;
  const left = by_key ? plot.left - box.left + x_pixel(active, state.at) : x - box.left;
  const fits = left + 18 + width <= box.width || left - width - 18 >= 4;
  readout.style.left = (!fits ? 4 : left + 18 + width > box.width ? left - width - 18 : left + 18) + "px";
  const top = !fits ? plot.bottom - box.top + 2 : Math.max(36, (by_key ? plot.top + 30 : y) - box.top - 20);
  const lowest = document.documentElement.clientHeight - readout.offsetHeight - 6 - box.top;  // all of it can be seen
  readout.style.top = Math.min(top, Math.max(lowest, 4)) + "px";
}
)js";

}  // namespace shardlib::run::detail
