"use strict";
// Curves as SVG. A missing value is a gap; an axis never leaves what a value can be.

function bounds(key) {
  if (/fraction|^policy\/ess$/.test(key)) return [0, 1];
  if (/^(time|error|group|rollout)\/|^train\/|(^|\/)(std|entropy|.*_std)$|_abs_mean$|diff_(max|mean)$/.test(key)) return [0, Infinity];
  return [-Infinity, Infinity];
}

function ticks(low, high, target) {
  const raw = (high - low) / Math.max(1, target - 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

// Averages of neighbours where there are more points than a screen has columns; null stays null.
function thinned(steps, values, most = 800) {
  if (steps.length <= most) return steps.map((step, i) => [step, values[i]]);
  const points = [];
  for (let part = 0; part < most; part++) {
    const from = Math.floor((part * steps.length) / most);
    const to = Math.floor(((part + 1) * steps.length) / most);
    const known = values.slice(from, to).filter((v) => v !== null);
    points.push([steps[from], known.length ? known.reduce((a, b) => a + b, 0) / known.length : null]);
  }
  return points;
}

// Exponential moving average without the start-up bias towards the first value.
function smoothed(values, weight = 0.8) {
  let total = 0;
  let normaliser = 0;
  return values.map((value) => {
    if (value === null) return null;
    total = weight * total + (1 - weight) * value;
    normaliser = weight * normaliser + (1 - weight);
    return total / normaliser;
  });
}

// What a curve can be drawn over. Times are those of the steps, added up: pauses of a run that was
// stopped do not count.
const AXES = { "": "step", time: "time", samples: "samples" };
const SUMMED = { time: "time/step_s", samples: "rollout/trajectories" };

// Where each step of a run stands on an axis; null where the run did not record it.
function places(curves, axis) {
  if (!SUMMED[axis]) return curves.steps;
  const added = curves.series[SUMMED[axis]];
  if (!added) return null;
  let sum = 0;
  return added.map((value) => (sum += value || 0));
}

// How a place on an axis is written: a unit, and how many of what is added up it holds.
function unitOf(axis, last) {
  if (axis === "samples") return ["episodes", 1];
  if (axis !== "time") return ["step", 1];
  return last > 7200 ? ["hours", 3600] : last > 120 ? ["minutes", 60] : ["seconds", 1];
}

/* curves: [{name, steps, x, values, kind}], x places on the axis (the steps themselves without it), kind
   "main", "raw" or "c0".."c5"; bands: [{kind, points: [[x, low, high]]}].
   limits: what the values can be; onstep(step): a click or Enter; log: a logarithmic axis, on which
   what is not above 0 is a gap. */
function plot({ curves, bands = [], height, limits = [-Infinity, Infinity], onstep = null, label, log = false, axis: over = "" }) {
  const shown = (value) => number(log ? 10 ** value : value);
  curves = curves.map((c) => ({ ...c, x: c.x || c.steps }));
  if (log) {
    curves = curves.map((c) => ({ ...c, values: c.values.map((v) => (v > 0 ? Math.log10(v) : null)) }));
    bands = bands.map((b) => ({ ...b, points: b.points.filter(([, low]) => low > 0).map(([x, low, high]) => [x, Math.log10(low), Math.log10(high)]) }));
    limits = [-Infinity, Infinity];
  }
  const known = curves.flatMap((c) => c.values.filter((v) => v !== null));
  const steps = curves.flatMap((c) => c.x);
  if (!known.length) return el("div.nodata", {}, log ? "no value above 0" : "no value yet");
  const first = Math.min(...minmax(steps));
  const last = Math.max(...minmax(steps));
  const [unit, size] = unitOf(over, last);
  const ends = minmax([...known, ...bands.flatMap((b) => b.points.flatMap(([, low, high]) => [low, high]))]);
  const margin = (ends[1] - ends[0]) * 0.06 || Math.abs(ends[1]) * 0.1 || 0.5;
  let low = Math.max(ends[0] - margin, Math.min(limits[0], ends[0]));
  let high = Math.min(ends[1] + margin, Math.max(limits[1], ends[1]));
  if (high <= low) [low, high] = [low - 0.5, high + 0.5];
  const top = 8;
  const inner = height - top - 20;
  const x = (step) => (last > first ? (1000 * (step - first)) / (last - first) : 500);
  const y = (value) => (inner * (high - value)) / (high - low);
  const still = { "vector-effect": "non-scaling-stroke" };
  const area = svg("svg", { y: top, width: "100%", height: inner, viewBox: `0 0 1000 ${inner}`, preserveAspectRatio: "none" });
  for (const { kind, points } of bands) {
    if (points.length < 2) continue;
    const upper = points.map(([step, , h]) => `${x(step).toFixed(1)} ${y(h).toFixed(2)}`);
    const lower = points.map(([step, l]) => `${x(step).toFixed(1)} ${y(l).toFixed(2)}`).reverse();
    area.append(svg("path", { class: "band " + kind, d: `M${upper.join("L")}L${lower.join("L")}Z` }));
  }
  const dots = [];
  for (const curve of curves) {
    let path = "";
    let pen = [];
    const lift = () => {
      if (pen.length === 1) dots.push([...pen[0], curve.kind]);
      else if (pen.length) path += "M" + pen.map(([s, v]) => `${x(s).toFixed(1)} ${y(v).toFixed(2)}`).join("L");
      pen = [];
    };
    for (const point of thinned(curve.x, curve.values)) point[1] === null ? lift() : pen.push(point);
    lift();
    if (path) area.append(svg("path", { class: "line " + curve.kind, d: path, ...still }));
  }
  const frame = svg("svg", { class: "area", width: "100%", height });
  const axis = svg("svg", { class: "axis", width: 46, height });
  let marks = [];
  for (let target = height > 150 ? 6 : 3; target < 12 && marks.length < 2; target++) marks = ticks(low, high, target).filter((t) => t >= low && t <= high);
  for (const tick of marks) {
    axis.append(svg("text", { x: 40, y: top + y(tick) + 4, "text-anchor": "end" }, shown(tick)));
    frame.append(svg("line", { class: "grid", x1: 0, x2: "100%", y1: top + y(tick), y2: top + y(tick) }));
  }
  frame.append(area);
  for (const [step, value, kind] of dots) frame.append(svg("circle", { class: "dot " + kind, cx: x(step) / 10 + "%", cy: top + y(value), r: 2 }));
  const round = (place) => (over ? number(place / size) : place);
  const names = height > 150 ? ticks(first / size, Math.max(last / size, first / size + 1), 6).map((t) => t * size).filter((t) => t > first + (last - first) * 0.1 && t < last - (last - first) * (over ? 0.2 : 0.12)) : [];
  for (const step of new Set([first, ...names, last])) {
    const anchor = step === first && last > first ? "start" : step === last && last > first ? "end" : "middle";
    const said = step !== last ? round(step) : over ? `${round(step)} ${unit}` : `${unit} ${step}`;
    frame.append(svg("text", { x: x(step) / 10 + "%", y: height - 4, "text-anchor": anchor }, said));
  }
  const mark = svg("line", { class: "mark", y1: top, y2: top + inner });
  frame.append(mark);
  const box = el("div.plot" + (onstep ? ".clickable" : ""), { tabindex: 0, role: "img", "aria-label": label || "curve" }, axis, frame);
  let at = null;
  const everyStep = [...new Set(steps)].sort((a, b) => a - b);
  const point = (step, px, py) => {
    at = step;
    mark.setAttribute("x1", x(step) / 10 + "%");
    mark.setAttribute("x2", x(step) / 10 + "%");
    mark.classList.add("shown");
    const lines = curves.filter((c) => c.name).map((c) => {
      const index = over ? nearestPlace(c.x, step) : c.x.indexOf(step);
      const value = index < 0 || c.values[index] === null ? "no value" : shown(c.values[index]);
      return `${c.name}  ${value}${over && index >= 0 ? ` (step ${c.steps[index]})` : ""}`;
    });
    showTip([over ? `${round(step)} ${unit}` : `step ${step}`, ...lines, ...(onstep ? ["click or Enter: its groups"] : [])], px, py);
  };
  const nearest = (event) => {
    const outline = frame.getBoundingClientRect();
    const wanted = first + ((event.clientX - outline.left) / outline.width) * (last - first);
    return everyStep.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), everyStep[0]);
  };
  const leave = () => {
    mark.classList.remove("shown");
    hideTip();
  };
  frame.addEventListener("pointermove", (event) => point(nearest(event), event.clientX, event.clientY));
  frame.addEventListener("pointerleave", leave);
  const open = (place) => onstep && onstep(curves[0].steps[curves[0].x.indexOf(place)] ?? place);
  frame.addEventListener("click", (event) => open(nearest(event)));
  box.addEventListener("blur", leave);
  box.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    const outline = frame.getBoundingClientRect();
    if (move !== undefined) {
      const place = (at === null ? everyStep.length : everyStep.indexOf(at)) + move;
      const step = everyStep[Math.min(Math.max(place, 0), everyStep.length - 1)];
      point(step, outline.left + (x(step) / 1000) * outline.width, outline.top + 10);
      event.preventDefault();
    } else if (event.key === "Enter" && at !== null) open(at);
    else if (event.key === "Escape") leave();
  });
  return box;
}

// The last place that is not beyond this one.
function nearestPlace(x, place) {
  if (!x.length || place < x[0] || place > x[x.length - 1] * 1.02) return -1;
  return x.findLastIndex((each) => each <= place);
}

// A chart as a file: an SVG that needs no style sheet, or its numbers as CSV.
function exports(name, of, rows) {
  const file = name.replace(/[^\w.-]+/g, "-");
  return el(
    "span.exports",
    {},
    el("button.link", { title: "this chart as an SVG picture", onclick: (event) => download(file + ".svg", "image/svg+xml", svgOf(of(event.target), name)) }, "SVG"),
    el("button.link", { title: "its numbers as CSV", onclick: () => download(file + ".csv", "text/csv", csvOf(rows())) }, "CSV"),
  );
}

function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

const DRAWN_STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "font-size", "font-family", "visibility"];

function svgOf(box, title) {
  const [axis, frame] = box.querySelectorAll(":scope > svg");
  const [width, height] = [box.clientWidth, Number(frame.getAttribute("height"))];
  const copy = (node, attributes) => {
    const made = node.cloneNode(true);
    const [from, to] = [[node, ...node.querySelectorAll("*")], [made, ...made.querySelectorAll("*")]];
    from.forEach((each, i) => {
      const style = getComputedStyle(each);
      for (const name of DRAWN_STYLES) to[i].setAttribute(name, style.getPropertyValue(name));
    });
    set(made, attributes);
    return made;
  };
  const place = Number(axis.getAttribute("width"));
  const whole = svg("svg", { xmlns: "http://www.w3.org/2000/svg", width, height: height + 24, viewBox: `0 0 ${width} ${height + 24}` });
  const page = getComputedStyle(document.body);
  whole.append(
    svg("rect", { width: "100%", height: "100%", fill: page.backgroundColor }),
    svg("text", { x: 8, y: 16, fill: page.color, "font-family": "sans-serif", "font-size": 13 }, title),
    svg("g", { transform: "translate(0 24)" }, copy(axis, {}), copy(frame, { x: place, width: width - place, overflow: "visible" })),
  );
  return new XMLSerializer().serializeToString(whole);
}

function csvOf(rows) {
  const cell = (value) => (value === null || value === undefined ? "" : typeof value === "number" ? String(value) : `"${String(value).replaceAll('"', '""').replace(/^[=+@-]/, "'$&")}"`);
  return rows.map((row) => row.map(cell).join(",") + "\r\n").join("");
}

// Curves side by side, a line for each step: what a CSV holds.
function csvRows(curves, over) {
  const first = over ? [AXES[over]] : [];
  const rows = curves.flatMap((c) => c.steps.map((step, i) => [c.name, step, ...(over ? [c.x[i]] : []), c.values[i]]));
  return [["curve", "step", ...first, "value"], ...rows];
}

function minmax(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

function sparkline(values) {
  const line = svg("svg", { class: "spark", width: 120, height: 24, viewBox: "0 0 120 24", "aria-hidden": "true" });
  if (values.length < 2) return line;
  const [low, high] = minmax(values);
  const y = (v) => (high > low ? 21 - (18 * (v - low)) / (high - low) : 12);
  const points = values.map((v, i) => `${((118 * i) / (values.length - 1) + 1).toFixed(1)} ${y(v).toFixed(1)}`);
  line.append(svg("path", { class: "line main", d: "M" + points.join("L") }));
  return line;
}
