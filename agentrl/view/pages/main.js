"use strict";
// The address after # names the page. Pages that can change are drawn again while they are looked at.

let drawn = 0;
let timer = null;

async function draw({ again = false } = {}) {
  const mine = ++drawn;
  clearTimeout(timer);
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parameters = new URLSearchParams(query || "");
  const [kind, id, what, step, offset] = path.split("/");
  const page = el("main");
  let every = 0;
  try {
    if (kind === "tasks") await tasksPage(page, parameters);
    else if (kind === "evaluations") every = await evaluationsPage(page, parameters);
    else if (kind !== "run") every = await runsPage(page, parameters);
    else if (!what) every = await runPage(page, id, parameters);
    else if (what === "groups") every = await groupsPage(page, id, parameters);
    else if (what === "diagnosis") every = await diagnosisPage(page, id);
    else if (what === "config") every = await configPage(page, id);
    else if (what === "t") every = await trajectoryPage(page, id, Number(step), Number(offset), parameters);
    else throw new NoData("no such page");
  } catch (error) {
    if (!(error instanceof NoData)) console.error(error);
    page.append(el("p.failure", {}, error.message));
    every = stored ? 0 : 3000;
  }
  if (mine !== drawn) return; // the reader went on meanwhile
  const old = document.querySelector("main");
  if (again && busy(old)) {
    timer = setTimeout(draw, every || 1000, { again: true }); // not under the hands of who writes or chooses
    return;
  }
  if (again && old && old.textContent === page.textContent && old.querySelectorAll("path").length === page.querySelectorAll("path").length && sameCurves(old, page)) {
    timer = every && !stored ? setTimeout(draw, every, { again: true }) : null;
    return;
  }
  if (again) keepOpen(old, page);
  const focus = again ? placeOfFocus(old) : null;
  const unsaid = unfinished(old);
  if (!again) hideTip();
  old ? old.replaceWith(page) : document.body.append(page);
  if (focus !== null) page.querySelectorAll("a, button, input, select, [tabindex]")[focus]?.focus({ preventScroll: true });
  if (unsaid) finish(page, unsaid);
  if (!again) window.scrollTo(0, 0);
  document.title = page.querySelector("h1")?.textContent + " · agentrl view";
  document.body.dataset.drawn = location.hash || "#/";
  timer = every && !stored ? setTimeout(draw, every, { again: true }) : null;
}

function busy(old) {
  if (old?.querySelector("input:not([type=checkbox]):focus, select:focus, textarea:focus")) return true;
  return [...(old?.querySelectorAll(".noteform input, .noteform textarea") || [])].some((field) => field.value !== field.defaultValue);
}

// What is being written while an answer arrives is written on in the new page.
function unfinished(old) {
  const field = document.activeElement;
  if (!old?.contains(field) || !field.matches("input[type=search], input[type=number], textarea") || field.value === field.defaultValue) return null;
  return { name: field.name, value: field.value };
}

function finish(page, { name, value }) {
  const field = [...page.querySelectorAll("input, textarea")].find((each) => each.name === name);
  if (!field) return;
  field.value = value;
  field.focus({ preventScroll: true });
}

// What was unfolded stays so where a page is drawn again.
function keepOpen(old, page) {
  const folds = (root) => [...(root?.querySelectorAll("details") || [])];
  const open = new Set(folds(old).filter((each) => each.open).map((each) => each.className));
  for (const each of folds(page)) if (each.className && open.has(each.className)) each.open = true;
}

function sameCurves(old, page) {
  const paths = (root) => [...root.querySelectorAll("path")].map((path) => path.getAttribute("d")).join();
  return paths(old) === paths(page);
}

function placeOfFocus(old) {
  const place = old ? [...old.querySelectorAll("a, button, input, select, [tabindex]")].indexOf(document.activeElement) : -1;
  return place < 0 ? null : place;
}

// Light or dark: as the system has it, until the reader says otherwise.
const THEMES = ["auto", "light", "dark"];
const darkSystem = matchMedia("(prefers-color-scheme: dark)");

function themed() {
  const chosen = kept("theme") || "auto";
  document.documentElement.dataset.theme = chosen === "auto" ? (darkSystem.matches ? "dark" : "light") : chosen;
  return "theme: " + chosen;
}

const themeSwitch = el("button.theme", { title: "light or dark; auto follows the system", onclick: () => (keep("theme", THEMES[(THEMES.indexOf(kept("theme") || "auto") + 1) % 3]), (themeSwitch.textContent = themed())) }, themed());
darkSystem.addEventListener("change", themed);

document.body.append(
  el("div.top", {}, el("a.brand", { href: "#/" }, "agentrl"), stored ? el("span.faint", {}, "report") : [el("a", { href: "#/" }, "all runs"), el("a", { href: "#/evaluations" }, "evaluations")], themeSwitch),
  tip,
);
window.addEventListener("hashchange", () => draw());
if (stored && !location.hash) history.replaceState(null, "", address("run/" + stored.run));
draw();
