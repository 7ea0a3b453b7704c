// The last part of the report's script: zoom, axes, runs, keyboard, and reloading while a run is in progress.
#pragma once

namespace shardlib::run::detail {

inline constexpr const char* report_script_input = R"js(
// ---- what the reader chose: in the address, so that the page finds it again when it loads itself ----
function save(all) {
  const put = new URLSearchParams(), active = document.activeElement && document.activeElement.closest(".card");
  if (state.axis !== "step") put.set("axis", state.axis);
  if (state.zoom) put.set("zoom", state.zoom.map(v => round(v, 8)).join(","));
  if (state.hidden.size) put.set("hide", [...state.hidden].join(","));
  const views = Object.entries(state.views).filter(v => v[1] !== "linear")
    .map(v => encodeURIComponent(v[0]) + ":" + v[1]);  // ids may have commas
  if (views.length) put.set("views", views.join(","));
  if (state.paused) put.set("paused", "1");
  if (all) {
    if (state.at !== null) put.set("at", round(state.at, 8));
    if (active && document.activeElement === active.querySelector(".plot")) put.set("chart", active.id);
    put.set("open", [...document.querySelectorAll("details[open]")].map(d => encodeURIComponent(d.id)).join(","));
  }
  const address = String(put).replaceAll("%2C", ",").replaceAll("%3A", ":");
  try { history.replaceState(null, "", "#" + address); } catch (none) { location.hash = address; }
}
function restore() {
  const got = new URLSearchParams(location.hash.slice(1));
  const list = key => (got.get(key) || "").split(",").filter(Boolean).map(decodeURIComponent);
  if (axes_known().includes(got.get("axis"))) state.axis = got.get("axis");
  const zoom = list("zoom").map(Number), at = Number(got.get("at"));
  for (const run of list("hide")) if (page.runs[run]) state.hidden.add(Number(run));
  if (zoom.length === 2 && zoom[0] < zoom[1]) set_zoom(...zoom);
  for (const view of list("views")) state.views[view.slice(0, view.lastIndexOf(":"))] = view.slice(view.lastIndexOf(":") + 1);
  for (const c of charts)
    if (c.stacked || !c.views.includes(state.views[c.card.id])) delete state.views[c.card.id];
  state.paused = got.has("paused");
  if (got.has("at") && isFinite(at)) state.at = at;
  if (got.has("open")) for (const d of document.querySelectorAll("details")) d.open = list("open").includes(d.id);
  const active = charts.find(c => c.card.id === got.get("chart"));
  return () => { if (active) { active.plot.focus({preventScroll: true}); show_cursor(active); } };
}
const axes_known = () => Object.keys(axes).filter(a => page.runs.some(r => r[a].at(-1) > (a === "step" ? -1 : 0)));
function views_of(c) {
  const curves = curves_of(c), linear = y_scale(c, curves, "linear"), close = y_scale(c, curves, "close"), views = ["linear"];
  if (c.series.some(s => s.y.length > 20) && linear.high - linear.low > 1.5 * (close.high - close.low)) views.push("close");
  if (c.series.some(s => s.y.some(v => v > 0))) views.push("log");
  return views;
}
function set_zoom(low, high) {
  const [first, last] = whole(), least = Math.max(axes[state.axis].least, 1e-6 * (last - first));
  const span = Math.min(last - first, Math.max(high - low, least));
  low = Math.max(first, Math.min(last - span, (low + high - span) / 2));
  state.zoom = span > 0.999 * (last - first) ? null : [low, low + span];
}
function draw_all() {
  const [low, high] = range();
  for (const c of charts) {
    draw(c);
    c.plot.setAttribute("aria-valuemin", String(Math.round(low)));
    c.plot.setAttribute("aria-valuemax", String(Math.round(high)));
  }
}
function update(say) {
  reset.hidden = !state.zoom;
  draw_all();
  show_cursor(null);
  save(false);
  if (say) live.textContent = say;
}
function zoom_to(low, high) {
  set_zoom(low, high);
  update(state.zoom ? axes[state.axis].text(state.zoom[0]) + " to " + axes[state.axis].text(state.zoom[1]) : "whole range");
}
function show_all() {
  state.zoom = null;
  update("whole range");
}
function set_axis(axis) {
  const before = state.axis, run = first_run();
  const moved = v => convert(run, before, axis, v), zoom = state.zoom;
  state.axis = axis;
  state.zoom = null;
  if (zoom) set_zoom(moved(zoom[0]), moved(zoom[1]));
  if (state.at !== null) state.at = moved(state.at);
  update("horizontal axis: " + axes[axis].title);
}

// ---- buttons ----
function choice(parent, label, names, now, choose) {
  const group = add("span", parent, {class: "views", role: "group", "aria-label": label});
  const buttons = names.map(([key, name]) => [key, add("button", group, {type: "button"}, name)]);
  const press = () => { for (const [key, button] of buttons) button.setAttribute("aria-pressed", String(key === now())); };
  for (const [key, button] of buttons) button.addEventListener("click", () => { choose(key); press(); });
  press();
}
for (const c of charts) c.views = c.stacked ? ["linear"] : views_of(c);  // of the whole range
const focus_again = restore();
bar.replaceChildren();
if (page.runs.length > 1) {
  const group = add("span", bar, {role: "group", "aria-label": "runs shown"});
  page.runs.forEach((run, i) => {
    const button = add("button", group, {type: "button", class: "toggle", "aria-pressed": String(!state.hidden.has(i))});
    add("i", button, {style: `background:var(--${run.color})`});
    add("span", button, {}, run.name);
    button.addEventListener("click", () => {
      if (!state.hidden.delete(i)) state.hidden.add(i);
      button.setAttribute("aria-pressed", String(!state.hidden.has(i)));
      if (state.zoom) set_zoom(...state.zoom);
      update(run.name + (state.hidden.has(i) ? " hidden" : " shown"));
    });
  });
}
const axis_label = add("span", bar, {}, "over ");
choice(axis_label, "horizontal axis", axes_known().map(a => [a, axes[a].title]), () => state.axis, set_axis);
const reset = add("button", bar, {type: "button"}, "Whole range");
reset.addEventListener("click", show_all);
for (const c of charts) {
  if (!c.stacked && c.views.length > 1)
    choice(c.card.querySelector("figcaption"), "vertical scale of " + c.title, c.views.map(v => [v, v]),
      () => state.views[c.card.id] || "linear", view => { state.views[c.card.id] = view; update(); });
}

// ---- pointer and keyboard ----
let drag = null, last_input = -1e9;
function end_drag() {
  if (drag) drag.c.chosen.hidden = true;
  drag = null;
}
// To the next point of a curve, or by a part of the range if points are denser.
function step_cursor(c, direction, part) {
  const [low, high] = range(), curve = c.curves && c.curves[0];
  if (!curve) return;
  if (state.at === null) { state.at = direction > 0 ? low : high; return; }
  const xs = curve.xs, target = state.at + direction * part * (high - low);
  let i = nearest(xs, target);
  if (direction * (xs[i] - state.at) <= 1e-9 * (high - low) && xs[i + direction] !== undefined) i += direction;
  state.at = xs[i];
}
function key(c, event) {
  const [low, high] = range(), span = high - low, middle = state.at === null ? (low + high) / 2 : state.at;
  const side = event.key === "ArrowLeft" ? -1 : event.key === "ArrowRight" ? 1 : 0;
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (side && event.shiftKey) zoom_to(low + side * span / 4, high + side * span / 4);
  else if (side) step_cursor(c, side, 0.01);
  else if (event.key === "PageUp" || event.key === "PageDown") step_cursor(c, event.key === "PageUp" ? -1 : 1, 0.1);
  else if (event.key === "Home") state.at = low;
  else if (event.key === "End") state.at = high;
  else if (event.key === "+" || event.key === "=") zoom_to(middle - span / 4, middle + span / 4);
  else if (event.key === "-") zoom_to(middle - span, middle + span);
  else if (event.key === "Escape" && drag) end_drag();
  else if (event.key === "Escape") show_all();
  else return;
  event.preventDefault();
  show_cursor(c);
}
for (const c of charts) {
  const set = (name, value) => c.plot.setAttribute(name, value);
  set("tabindex", "0");
  set("role", "slider");
  set("aria-label", c.title);
  set("aria-describedby", "help");
  set("aria-valuenow", String(Math.round(whole()[0])));
  set("aria-valuetext", "no value chosen");
  c.plot.addEventListener("pointermove", event => {
    last_input = performance.now();
    if (drag && drag.c !== c) return;
    state.at = x_value(c, event.clientX);
    show_cursor(c, event.clientX, event.clientY);
    if (!drag || Math.abs(event.clientX - drag.from) < 6) return;
    const ends = [x_pixel(c, drag.at), x_pixel(c, state.at)].sort((a, b) => a - b);
    c.chosen.hidden = false;
    c.chosen.style.cssText =
      `left:${ends[0]}px;width:${ends[1] - ends[0]}px;top:${margin.top}px;bottom:${margin.bottom}px`;
  });
  c.plot.addEventListener("pointerdown", event => {
    if (event.button !== 0) return;
    state.at = x_value(c, event.clientX);
    drag = {c, from: event.clientX, at: state.at};
    if (c.plot.setPointerCapture) c.plot.setPointerCapture(event.pointerId);
    show_cursor(c, event.clientX, event.clientY);
  });
  c.plot.addEventListener("pointerup", event => {
    const done = drag;
    end_drag();
    if (!done || Math.abs(event.clientX - done.from) < 6) return;
    const at = x_value(c, event.clientX);
    zoom_to(Math.min(at, done.at), Math.max(at, done.at));
  });
  c.plot.addEventListener("pointercancel", end_drag);
  c.plot.addEventListener("pointerleave", event => {
    if (drag || event.pointerType === "touch") return;  // a finger has no other way to stay
    state.at = null;
    show_cursor(null);
  });
  c.plot.addEventListener("dblclick", show_all);
  c.plot.addEventListener("keydown", event => { last_input = performance.now(); key(c, event); });
  c.plot.addEventListener("blur", () => { c.readout.hidden = true; });
}

// ---- a run in progress ----
function watch() {
  const status = add("span", bar), words = add("span", status);
  const silent = Date.now() / 1000 - page.written > Math.max(600, 10 * page.every);  // when the page was loaded
  const button = add("button", status, {type: "button", "aria-pressed": String(state.paused)}, "Pause");
  const tell = () => {
    const when = new Date(1000 * page.written).toLocaleTimeString();
    words.textContent = silent ? `no news since ${when}: has the run ended?`
      : `the run is in progress; as of ${when}` + (state.paused ? "" : `, again every ${Math.round(page.every)} s`);
  };
  button.addEventListener("click", () => {
    state.paused = !state.paused;
    button.setAttribute("aria-pressed", String(state.paused));
    save(false);
    tell();
  });
  tell();
  // Not while the reader drags or reads.
  setInterval(() => {
    tell();
    if (state.paused || silent || document.hidden || drag || performance.now() - last_input < 5000) return;
    if (performance.now() < 1000 * page.every) return;
    save(true);
    location.reload();
  }, 1000);
}
if (page.every > 0) watch();
reset.hidden = !state.zoom;
draw_all();
if (state.at !== null) show_cursor(null);
focus_again();
const focused = () => charts.find(c => c.plot === document.activeElement) || null;
new ResizeObserver(() => { draw_all(); show_cursor(focused()); }).observe(document.querySelector(".grid2"));
)js";

}  // namespace shardlib::run::detail
