"use strict";
// Elements, texts and numbers. Nothing is ever parsed as HTML: what a model or an environment wrote
// becomes text nodes, with control, direction and invisible characters spelled out.

const UNSAFE =
  /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]|[\u{e0000}-\u{e007f}]/gu;

function inert(text) {
  const nodes = [];
  let end = 0;
  for (const match of String(text).matchAll(UNSAFE)) {
    if (match.index > end) nodes.push(document.createTextNode(text.slice(end, match.index)));
    const name = "U+" + match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    const mark = document.createElement("span");
    mark.className = "ctl";
    mark.textContent = match[0] === "\x1b" ? "ESC" : name;
    nodes.push(mark);
    end = match.index + match[0].length;
  }
  if (end < String(text).length) nodes.push(document.createTextNode(String(text).slice(end)));
  return nodes;
}

function plain(text) {
  return String(text).replace(UNSAFE, (c) => "[U+" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + "]");
}

// el("a.name", {href: "#/"}, "text", child, [more]); on* are listeners, null children are left out.
function el(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  set(node, attributes);
  append(node, children);
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(node, attributes);
  append(node, children);
  return node;
}

function set(node, attributes) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "title" || key.startsWith("aria-")) node.setAttribute(key, plain(value));
    else node.setAttribute(key, value === true ? "" : value);
  }
}

function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(...(child instanceof Node ? [child] : inert(child)));
  }
}

// A key or a metric, whose name is broken between its words where it has to be.
function breakable(name) {
  return String(name).split(/(?<=[/_.])/).map((part) => [part, el("wbr")]);
}

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(1);
  if (size < 1) return String(Number(value.toFixed(4)));
  if (size < 1000) return String(Number(value.toPrecision(3)));
  for (const [unit, scale] of [["k", 1e3], ["M", 1e6], ["G", 1e9], ["T", 1e12]]) {
    if (size < 999.5 * scale) return Number((value / scale).toPrecision(3)) + unit;
  }
  return value.toExponential(1);
}

function signed(value) {
  return value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + number(value);
}

function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return whole + " s";
  if (whole < 3600) return Math.floor(whole / 60) + " min";
  if (whole < 172800) return Math.floor(whole / 3600) + " h " + Math.floor((whole % 3600) / 60) + " min";
  return Math.floor(whole / 86400) + " days";
}

function ago(time) {
  return duration(Date.now() / 1000 - time) + " ago";
}

function plural(count, word, many = word + "s") {
  return number(count) + " " + (count === 1 ? word : many);
}

// The end of a path, which tells models apart; the whole stands in the title beside it.
function endOfPath(path) {
  return path.split("/").slice(-2).join("/");
}

// What the server answers; in an exported report, what was stored of it.
const STORED = document.getElementById("stored");
const stored = STORED ? JSON.parse(STORED.textContent) : null;

class NoData extends Error {}

async function ask(path, parameters = {}) {
  const asked = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const address = "api/" + path + (asked.length ? "?" + new URLSearchParams(asked) : "");
  if (stored) {
    if (address in stored) return stored[address];
    throw new NoData("This report holds a part of the run. `agentrl view RUN_DIR` shows everything.");
  }
  let response;
  try {
    response = await fetch(address);
  } catch {
    throw new NoData("`agentrl view` does not answer: was it stopped?");
  }
  return answerOf(response);
}

async function answerOf(response) {
  const text = await response.text();
  if (response.ok) return JSON.parse(text);
  throw new NoData(text.startsWith("{") ? JSON.parse(text).error || text : text);
}

// A row of a table opens what it is of, except where it holds a control or a link of its own.
function opens(to) {
  return (event) => event.target.closest("a, button, input, label") || String(getSelection()) || (location.href = to);
}

function address(path, parameters = {}) {
  const asked = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return "#/" + path + (asked.length ? "?" + new URLSearchParams(asked) : "");
}

// What the address names now. A page that waits for its answer is still on the screen: what is chosen
// there is added to the newest address, not to the one that the page was made from.
function here() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { path, parameters: Object.fromEntries(new URLSearchParams(query || "")) };
}

function hereWith(path, changes) {
  const now = here();
  return address(path, { ...(now.path === path ? now.parameters : {}), ...changes });
}

function change(path, changes) {
  location.hash = hereWith(path, changes);
}

const STATES = { training: "training", finished: "finished", stopped: "stopped", failed: "failed", dead: "dead", damaged: "damaged", unknown: "unknown" };

function stateOf(run) {
  const since = run.time || run.written;
  const words = {
    training: "training",
    finished: "finished",
    stopped: "stopped",
    failed: "failed",
    dead: "dead since " + (since ? new Date(since * 1000).toLocaleTimeString() : "?"),
    damaged: "damaged",
    unknown: since ? "last line " + ago(since) : "no step yet",
  };
  return el("span.state." + (STATES[run.state] || "unknown"), { title: run.message || run.state }, words[run.state] || "unknown");
}

// What a browser keeps of a reader's choices; some forbid it, and then it is kept until the page ends.
const choices = new Map();

function kept(name) {
  try {
    return localStorage.getItem("agentrl-" + name);
  } catch {
    return choices.get(name) ?? null;
  }
}

function keep(name, value) {
  try {
    localStorage.setItem("agentrl-" + name, value);
  } catch {
    choices.set(name, value);
  }
}

// One tooltip for everything that can be pointed at, tapped or reached with the keyboard.
const tip = el("div.tip", { role: "status" });

function showTip(lines, x, y) {
  tip.replaceChildren(...lines.map((line) => el("div", {}, line)));
  tip.classList.add("shown");
  const box = tip.getBoundingClientRect();
  const left = Math.min(x + 14, document.documentElement.clientWidth - box.width - 8);
  const top = y + 20 + box.height > window.innerHeight ? y - box.height - 12 : y + 20;
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = Math.max(8, top) + "px";
}

function hideTip() {
  tip.classList.remove("shown");
}
