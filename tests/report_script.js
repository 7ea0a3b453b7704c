// Runs the script of a report without a browser, on elements that do no more than it asks of them.
//
//   node report_script.js ONE.html COMPARED.html LIVE.html
//
// ONE is a report of one run, COMPARED of two, LIVE of a run in progress. run_report.py calls it where node is installed.
"use strict";
const fs = require("fs");
const vm = require("vm");

let failures = 0;
function check(ok, what) {
  if (ok) return;
  ++failures;
  console.log("FAILED: " + what);
}

class Element {
  constructor(name, page, parent = null) {
    Object.assign(this, {name, page, parent, children: [], attributes: {}, style: {}, listeners: {}, own: "", innerHTML: ""});
    this.clientWidth = 600;
    this.clientHeight = 300;
    this.offsetWidth = 120;
    this.offsetHeight = 80;
  }
  get id() { return this.attributes.id || ""; }
  get hidden() { return "hidden" in this.attributes; }
  set hidden(on) { if (on) this.attributes.hidden = ""; else delete this.attributes.hidden; }
  get open() { return "open" in this.attributes; }
  set open(on) { if (on) this.attributes.open = ""; else delete this.attributes.open; }
  get textContent() { return this.own + this.children.map(c => c.textContent).join(""); }
  set textContent(text) { this.own = text; this.children = []; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  getAttribute(name) { return this.attributes[name]; }
  append(child) { child.parent = this; this.children.push(child); }
  replaceChildren() { this.children = []; }
  addEventListener(name, listener) { (this.listeners[name] ||= []).push(listener); }
  send(name, event = {}) {
    for (const listener of this.listeners[name] || []) listener({preventDefault() {}, button: 0, pointerId: 1, ...event});
  }
  getBoundingClientRect() { return {left: 0, top: 0, right: 600, bottom: 300, width: 600, height: 300}; }
  closest() { return this.name === "figure" ? this : this.parent && this.parent.closest(); }
  focus() { this.page.document.activeElement = this; }
  *below() { for (const c of this.children) { yield c; yield* c.below(); } }
  find(word) {
    const fits = e => word[0] === "." ? (e.attributes.class || "").split(" ").includes(word.slice(1)) : e.name === word;
    return [...this.below()].filter(fits);
  }
  querySelector(word) { return this.find(word)[0]; }
}

// The page, as far as the script sees it. `hash`: of its address. `edit` changes the file's text.
function load(file, hash = "", now = null, edit = text => text) {
  const text = edit(fs.readFileSync(file, "utf8")), page = {timers: [], reloads: 0, clock: 0, now};
  const body = new Element("body", page), bar = new Element("div", page), data = new Element("script", page);
  data.textContent = /id="page">([^]*?)<\/script>/.exec(text)[1];
  const figures = [...text.matchAll(/<figure class="card" id="([^"]*)">([^]*?)<\/figure>/g)].map(([, id, inner]) => {
    const figure = new Element("figure", page), add = (parent, name, words = "", content = "") => {
      const e = new Element(name, page);
      e.attributes = words ? {class: words} : {};
      e.textContent = content;
      parent.append(e);
      return e;
    };
    figure.attributes = {id, class: "card"};
    add(add(figure, "figcaption"), "b", "", /<b>(.*?)<\/b>/.exec(inner)[1]);
    add(add(figure, "div", "plot"), "svg");
    add(figure, "script", "", /<script type="application\/json">([^]*?)<\/script>/.exec(inner)[1]);
    const details = add(figure, "details");
    details.attributes.id = id + "-values";
    return figure;
  });
  const all = () => figures.flatMap(f => f.find("details"));
  page.document = {
    body, hidden: false, activeElement: body, documentElement: {clientHeight: 900}, createElement: name => new Element(name, page),
    getElementById: id => ({page: data, bar})[id],
    querySelector: () => body,
    querySelectorAll: word => word === "figure.card" ? figures : word === "details[open]" ? all().filter(d => d.open) : all()
  };
  const location = {hash, reload() { ++page.reloads; }};
  vm.runInNewContext(/<script>(\(\(\) => \{[^]*)<\/script><\/body>/.exec(text)[1], {
    document: page.document, location, URLSearchParams, console,
    history: {replaceState(state, title, address) { location.hash = address; }},
    performance: {now: () => page.clock}, Date: class extends Date { static now() { return page.now ?? Date.now(); } },
    setInterval: f => page.timers.push(f), ResizeObserver: class { observe() {} }
  });
  return {
    page, bar, location, body,
    svg: id => figures.find(f => f.id === id).querySelector("svg").innerHTML,
    figure: id => figures.find(f => f.id === id),
    plot: id => figures.find(f => f.id === id).querySelector(".plot"),
    figures,
    button: (within, name) => within.find("button").find(b => b.textContent === name)
  };
}
const key = (p, id, name, more = {}) => p.plot(id).send("keydown", {key: name, ...more});
const value = (p, id) => p.plot(id).getAttribute("aria-valuetext");
const zoom = p => (/zoom=([^&]*)/.exec(p.location.hash) || ["", ""])[1].split(",").map(Number);
const labels = (p, id) => [...p.svg(id).matchAll(/text-anchor="middle">([^<]*)</g)].map(m => m[1]);

function drawn(p, where) {
  for (const figure of p.figures) {
    const svg = p.svg(figure.id);
    check(svg.includes("<path class="), `${where}: ${figure.id} is drawn`);
    check(!/NaN|Infinity|undefined|null/.test(svg), `${where}: ${figure.id} has numbers alone`);
  }
}

function one(file) {
  let p = load(file);
  drawn(p, "one run");
  const marks = count => {  // how many heights the marks of events have, and the greatest
    const notes = Array.from({length: count}, (_, i) => ({step: 20 * i, run: 0, text: "resumed"}));
    const edit = text => text.replace(/"notes":\[[^\]]*\]/, '"notes":' + JSON.stringify(notes));
    const found = [...load(file, "", null, edit).svg("loss").matchAll(/class="note"[^>]*d="M\S+ (\S+)V(\S+)"/g)];
    return {count: found.length, height: Math.max(...found.map(m => m[2] - m[1]))};
  };
  check(marks(12).count === 12 && marks(12).height > 200, "an event is a line from top to bottom");
  check(marks(13).count === 13 && marks(13).height < 20, "many events leave the curves free");
  check(p.plot("loss").getAttribute("tabindex") === "0", "a chart takes the focus");
  check(p.plot("loss").getAttribute("role") === "slider", "a chart has the role of what arrows move");
  check(!p.bar.find(".toggle").length, "one run alone cannot be hidden");
  check(p.page.timers.length === 0, "the page of a finished run never loads itself again");

  check(/class="raw"/.test(p.svg("loss")) && /class="smooth"/.test(p.svg("loss")), "each step is faint behind the mean");
  for (const same of ["memory", "learning_rate"]) check(!/class="raw"/.test(p.svg(same)), "but not where they are the same");
  const memory = (bytes, unit, zero) => load(file, "", null, text => text.replaceAll("1.0486e+06", bytes)
    .replace('"unit":"bytes","zero":true', `"unit":"${unit}","zero":${zero}`));
  for (const zero of [true, false]) {
    const lines = [...memory("0", "bytes", zero).svg("memory").matchAll(/>([^<>]*) B</g)].map(m => m[1]);
    check(lines.join() === "0,1", `an axis of zeros begins with 0 B: ${lines}`);
  }
  for (const [bytes, shown] of [["123456", "123460"], ["1234567", "1.2346e6"]]) {
    const other = memory(bytes, "number", true);
    key(other, "memory", "End");
    check(value(other, "memory").endsWith(shown), `an exponent from a million on: ${value(other, "memory")}`);
  }

  const rates = [...p.svg("learning_rate").matchAll(/text-anchor="end">([^<]*)</g)].map(m => m[1]);
  check(rates.join() === "0,2e-4,4e-4,6e-4,8e-4,1e-3", `an axis has one notation: ${rates}`);

  key(p, "loss", "Home");
  check(/^step 0; first 11(\.0+)?;? ?/.test(value(p, "loss")), `the first value is read: ${value(p, "loss")}`);
  check(!value(p, "loss").includes("validation"), "a curve that has not begun is not");
  for (const figure of p.figures) check(!figure.querySelector(".cursor").hidden, "every chart has the cursor");
  check(!p.figure("loss").querySelector(".readout").hidden, "the readout is shown");
  key(p, "loss", "ArrowRight");
  const at = Number(/^step (\d+)/.exec(value(p, "loss"))[1]);
  check(at > 0 && at < 10, `an arrow goes to a point near: ${at}`);
  key(p, "loss", "ArrowLeft");
  check(value(p, "loss").startsWith("step 0;"), "and back");
  key(p, "loss", "End");
  check(value(p, "loss").startsWith("step 299;"), `the last step is reached: ${value(p, "loss")}`);
  check(value(p, "loss").includes("first, validation 5.1"), "and the validation is read beside the loss");
  key(p, "loss", "ArrowRight");
  check(value(p, "loss").startsWith("step 299;"), "and not passed");
  key(p, "loss", "PageUp");
  check(/^step 2[67]\d;/.test(value(p, "loss")), `Page Up goes by a tenth: ${value(p, "loss")}`);

  const whole = p.svg("grad_norm");
  key(p, "loss", "+");
  let [low, high] = zoom(p);
  check(Math.abs(high - low - 149.5) < 1 && high <= 299, `+ shows half: ${low} to ${high}`);
  check(p.svg("grad_norm") !== whole, "all charts show the same range");
  key(p, "loss", "ArrowLeft", {shiftKey: true});
  check(zoom(p)[0] < low && Math.abs(zoom(p)[1] - zoom(p)[0] - (high - low)) < 1e-3, "Shift and an arrow move it");
  check(Number(/^step (\d+)/.exec(value(p, "loss"))[1]) <= zoom(p)[1] + 0.5, "and the cursor stays within");
  key(p, "loss", "Escape");
  check(!p.location.hash.includes("zoom") && p.svg("grad_norm") === whole, "Escape shows the whole range");
  check(p.body.find(".live")[0].textContent === "whole range", "this is announced");

  // From a third to two thirds of the plot's width: left and right of it are 64 and 14 pixels.
  const x = part => 64 + part * (600 - 78);
  p.plot("memory").send("pointerdown", {clientX: x(2 / 3), clientY: 9});
  p.plot("memory").send("pointermove", {clientX: x(1 / 3), clientY: 9});
  check(!p.figure("memory").querySelector(".chosen").hidden, "what is dragged over is marked");
  p.plot("memory").send("pointerup", {clientX: x(1 / 3), clientY: 9});
  [low, high] = zoom(p);
  check(Math.abs(low - 299 / 3) < 0.1 && Math.abs(high - 598 / 3) < 0.1, `a drag zooms: ${low} to ${high}`);
  check(!p.button(p.bar, "Whole range").hidden, "a button leads back");
  drawn(p, "zoomed");
  check(!/class="raw"/.test(p.svg("memory")), "what is the same stays one line");
  p.plot("loss").send("pointerdown", {clientX: 200, clientY: 9});
  p.plot("loss").send("pointerup", {clientX: 202, clientY: 9});
  check(zoom(p)[0] === low, "a click does not zoom");
  p.plot("loss").send("dblclick");
  check(!p.location.hash.includes("zoom") && p.button(p.bar, "Whole range").hidden, "a double click leads back");

  check(labels(p, "loss").join() === "0,50,100,150,200,250,step", `ticks of steps: ${labels(p, "loss")}`);
  p.button(p.bar, "tokens").send("click");
  check(labels(p, "loss").join() === "20 k,40 k,60 k,80 k,100 k,120 k,140 k,tokens", `of tokens: ${labels(p, "loss")}`);
  check(p.button(p.bar, "tokens").getAttribute("aria-pressed") === "true", "the button says so");
  p.button(p.bar, "time").send("click");
  check(labels(p, "loss").join() === "0.5 min,1 min,1.5 min,2 min,2.5 min,time", `of time: ${labels(p, "loss")}`);
  key(p, "loss", "End");
  check(value(p, "loss").startsWith("2 min 30 s;"), `the time is read: ${value(p, "loss")}`);
  key(p, "loss", "-");
  key(p, "loss", "+");
  check(Math.abs(zoom(p)[1] - 150) < 1e-6, "the range is one of times");
  p.button(p.bar, "step").send("click");
  check(Math.abs(zoom(p)[1] - 299) < 0.1 && value(p, "loss").length > 0, "and goes along to steps");

  const linear = p.svg("loss");
  p.button(p.figure("loss"), "log").send("click");
  check(p.svg("loss") !== linear && p.location.hash.includes("views=loss:log"), "the scale changes");
  // What was chosen is found again, by the address alone.
  const again = load(file, p.location.hash);
  check(again.svg("loss") === p.svg("loss") && again.svg("memory") === p.svg("memory"), "the address keeps all choices");
  for (const hash of ["#zoom=9,1", "#zoom=x,y&axis=none&hide=77,loss&views=loss:none,none:log&at=x", "#%%", "#zoom=-1e9,1e9"])
    drawn(load(file, hash), `with the address ${hash}`);
}

function compared(file) {
  const p = load(file), toggles = p.bar.find(".toggle");
  drawn(p, "two runs");
  check(toggles.map(t => t.textContent).join() === "first,second", "each run has a button");
  check(toggles.every(t => t.getAttribute("aria-pressed") === "true"), "all are shown");
  toggles[0].send("click");
  check(toggles[0].getAttribute("aria-pressed") === "false" && p.location.hash.includes("hide=0"), "one is hidden");
  check(!p.svg("loss").includes("var(--c0)") && p.svg("loss").includes("var(--c1)"), "its curves are");
  check(p.figure("breakdown0").hidden, "and its own chart is");
  key(p, "loss", "End");
  check(value(p, "loss").startsWith("step 199; second "), `the others have the whole width: ${value(p, "loss")}`);
  toggles[1].send("click");
  key(p, "loss", "End");
  check(!p.svg("loss").includes("var(--c1)"), "no run is shown");
  toggles[0].send("click");
  check(p.svg("loss").includes("var(--c0)") && !p.figure("breakdown0").hidden, "a run comes back");
}

function live(file) {
  const p = load(file), tick = seconds => { p.page.clock = 1000 * seconds; for (const f of p.page.timers) f(); };
  check(p.page.timers.length === 1 && p.bar.textContent.includes("the run is in progress"), "the page says that the run is in progress");
  key(p, "loss", "+");
  p.plot("loss").focus();
  p.figure("loss").find("details")[0].open = true;
  tick(10);
  check(p.page.reloads === 0, "not yet");
  tick(31);
  check(p.page.reloads === 1, "it loads itself again");
  const again = load(file, p.location.hash);
  check(zoom(again).join() === zoom(p).join() && again.svg("loss") === p.svg("loss"), "with the range");
  check(again.page.document.activeElement === again.plot("loss"), "the focus");
  check(again.figure("loss").find("details")[0].open, "and what was open");
  p.plot("loss").send("pointerdown", {clientX: 200, clientY: 9});
  tick(62);
  check(p.page.reloads === 1, "not while the reader drags");
  p.plot("loss").send("pointerup", {clientX: 200, clientY: 9});
  p.button(p.bar, "Pause").send("click");
  tick(93);
  check(p.page.reloads === 1 && p.location.hash.includes("paused"), "not while it is paused");
  p.button(p.bar, "Pause").send("click");
  p.page.now = Date.now() + 3600e3;
  tick(124);
  check(p.page.reloads === 2, "and else again, however long the page was not looked at");
  const late = load(file, "", Date.now() + 3600e3);
  late.page.clock = 124e3;
  for (const f of late.page.timers) f();
  check(late.page.reloads === 0 && late.bar.textContent.includes("no news"), "not when nothing was written for long");
}

one(process.argv[2]);
compared(process.argv[3]);
live(process.argv[4]);
process.exit(failures ? 1 : 0);
