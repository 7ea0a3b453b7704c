// The script of the report: it draws the charts from the page's data, and keeps what the reader chose in the address.
#pragma once

namespace shardlib::run::detail {

// Values, scales and curves.
inline constexpr const char* report_script_curves = R"js(
"use strict";
const page = JSON.parse(document.getElementById("page").textContent);
const round = (v, digits) => String(+v.toPrecision(Math.min(digits, 15)));
const text = {
  // `like`: a number that decides whether there is an exponent, the same for all ticks of an axis.
  number: (v, digits, like = v) => v && (Math.abs(like) < 1e-3 || Math.abs(like) >= 1e6)
    ? (+v.toPrecision(digits)).toExponential().replace("e+", "e") : round(v, digits),
  count: (v, digits) => scaled(v, 1e3, ["", " k", " M", " G", " T"], digits),
  percent: (v, digits) => round(100 * v, digits) + " %",
  bytes: (v, digits) => scaled(v, 1024, [" B", " KiB", " MiB", " GiB", " TiB"], digits),
  seconds: (v, digits) => !v ? "0" : Math.abs(v) < 1e-3 ? round(1e6 * v, digits) + " µs"
    : Math.abs(v) < 1 ? round(1e3 * v, digits) + " ms" : round(v, digits) + " s"
};
function scaled(v, base, units, digits) {
  let i = 0;
  while (Math.abs(v) >= base && i + 1 < units.length) { v /= base; ++i; }
  return round(v, digits) + units[i];
}
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return x - xs[low] <= xs[high] - x ? low : high;
}
// Steps are stored as distances.
function sums(distances) {
  let sum = 0;
  return distances.map(d => sum += d);
}
// The value of one of a run's axes where another has the value v.
function convert(run, from, to, v) {
  const xs = run[from], ys = run[to];
  if (from === to || xs.length < 2) return from === to ? v : ys[0];
  const near = nearest(xs, v), i = Math.min(xs.length - 2, xs[near] > v && near > 0 ? near - 1 : near);
  const part = xs[i + 1] > xs[i] ? (v - xs[i]) / (xs[i + 1] - xs[i]) : 0;
  return ys[i] + Math.min(1, Math.max(0, part)) * (ys[i + 1] - ys[i]);
}
for (const run of page.runs) run.step = sums(run.step);

// The axis of all charts: its title, a value as text, ticks.
const axes = {
  step: {title: "step", text: v => "step " + Math.round(v).toLocaleString("en"), least: 1},
  tokens: {title: "tokens", text: v => text.count(v, 5) + " tokens", least: 1},
  seconds: {title: "time", text: duration, least: 0}
};
function duration(s) {
  const two = v => String(Math.floor(v)).padStart(2, "0");
  if (s < 60) return text.seconds(s, 3);
  if (s < 3600) return Math.floor(s / 60) + " min " + two(s % 60) + " s";
  if (s < 86400) return Math.floor(s / 3600) + " h " + two(s % 3600 / 60) + " min";
  return Math.floor(s / 86400) + " d " + two(s % 86400 / 3600) + " h";
}
function round_step(raw) {
  const power = 10 ** Math.floor(Math.log10(raw)), part = raw / power;
  return power * (part < 1.5 ? 1 : part < 3.5 ? 2 : part < 7.5 ? 5 : 10);
}
function multiples(step, low, high) {
  const values = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step && values.length < 50; ++k)
    values.push(k * step);
  return values;
}
// Positions of the lines of a scale, with their texts.
function y_ticks(scale, about, unit) {
  let values = [], step = 0;
  if (scale.log) {
    const decades = Math.log10(scale.high / scale.low), stride = Math.max(1, Math.ceil(decades / about));
    for (let power = Math.floor(Math.log10(scale.low)); power <= Math.ceil(Math.log10(scale.high)); power += stride)
      for (const factor of [1, 1.5, 2, 3, 5, 7]) {
        const v = factor * 10 ** power, wanted = factor === 1 || (decades < 3 && (factor === 2 || factor === 5));
        if ((wanted || decades < 0.8) && v >= scale.low && v <= scale.high) values.push(v);
      }
  }
  if (values.length < 2) {
    const raw = (scale.high - scale.low) / about;
    step = unit === "bytes" ? 2 ** Math.max(0, Math.round(Math.log2(raw))) : round_step(raw);
    values = multiples(step, scale.low, scale.high);
  }
  const most = Math.max(...values.map(Math.abs)), like = step && (most >= 0.01 || step >= 1e-3) ? most : step || undefined;
  return values.map(v => [v, text[unit](v, v && step ? Math.max(3, Math.ceil(Math.log10(Math.abs(v) / step)) + 2) : 4, like)]);
}
function x_ticks(axis, low, high, most) {
  const wide = step => (high - low) / step <= most;
  let step = axis === "seconds" ? round_step((high - low) / most) : Math.max(1, round_step((high - low) / most));
  if (!wide(step)) step = round_step(1.6 * step);
  if (axis !== "seconds")
    return multiples(step, low, high).map(v => [v, high < 1e5 ? String(Math.round(v))
      : text.count(v, v ? Math.max(3, Math.ceil(Math.log10(v / step)) + 2) : 3)]);
  const clock = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  if (step >= 1) step = clock.find(wide) || 86400 * Math.ceil(round_step(1.6 * (high - low) / most / 86400));
  const [unit, name] = high >= 172800 ? [86400, " d"] : high >= 7200 ? [3600, " h"] : high >= 120 ? [60, " min"]
    : high >= 1 ? [1, " s"] : [1e-3, " ms"];
  return multiples(step, low, high).map(v => [v, round(v / unit, 6) + name]);
}
// A range a little wider than the values. A log scale begins at most six decades below the largest value.
function scale_of(values, log, from_zero) {
  let low = Infinity, high = -Infinity;
  for (const v of values) {
    if (v === null || (log && v <= 0)) continue;
    if (v < low) low = v;
    if (v > high) high = v;
  }
  if (low > high) [low, high] = log ? [0.1, 1] : [0, 1];
  if (log) {
    low = Math.max(low, high * 1e-6);
    const margin = Math.max((high / low) ** 0.04, 1.01);
    low /= margin; high *= margin;
    const span = Math.log(high / low);
    return {log, low, high, at: v => v > 0 ? Math.log(v / low) / span : NaN};
  }
  if (low === 0 && high === 0) high = 1;  // not from -1 on: bytes are not negative
  if (from_zero) low = Math.min(low, 0);
  const margin = Math.max(0.04 * (high - low), 1e-3 * Math.abs(high)) || 1;
  if (!from_zero || low !== 0) low -= margin;
  high += margin;
  return {log, low, high, at: v => (v - low) / (high - low)};
}
// The mean, or the median, of the values less than `half` away, for the points from `first` to `last`. At the end the
// window is cut off. At the beginning the mean's narrows on both sides, so that a falling curve begins where it does.
function smoothed(xs, ys, half, median, first, last) {
  const out = new Array(ys.length).fill(null), sorted = [];  // the median's window in order
  const place = v => {
    let low = 0, high = sorted.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < v) low = middle + 1; else high = middle;
    }
    return low;
  };
  let begin = first;
  while (begin > 0 && xs[begin - 1] >= xs[first] - half) --begin;
  for (let i = first, end = begin; i <= last; ++i) {
    if (median) {
      for (; end < xs.length && xs[end] <= xs[i] + half; ++end)
        if (ys[end] !== null) sorted.splice(place(ys[end]), 0, ys[end]);
      for (; xs[begin] < xs[i] - half; ++begin) if (ys[begin] !== null) sorted.splice(place(ys[begin]), 1);
      if (sorted.length) out[i] = sorted[sorted.length >> 1];
      continue;
    }
    const reach = Math.min(half, xs[i] - xs[0]);
    while (begin > 0 && xs[begin - 1] >= xs[i] - reach) --begin;
    while (xs[begin] < xs[i] - reach) ++begin;
    let sum = 0, count = 0;
    for (end = begin; end < xs.length && xs[end] <= xs[i] + reach; ++end) if (ys[end] !== null) ++count;
    for (let k = begin; k < end; ++k) if (ys[k] !== null) sum += ys[k] / count;
    if (count) out[i] = sum;
  }
  return out;
}
)js";

}  // namespace shardlib::run::detail
