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
    if (kind !== "run") every = await runsPage(page, parameters);
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
  if (again && old && old.textContent === page.textContent && old.querySelectorAll("path").length === page.querySelectorAll("path").length && sameCurves(old, page)) {
    timer = every && !stored ? setTimeout(draw, every, { again: true }) : null;
    return;
  }
  const focus = again ? placeOfFocus(old) : null;
  if (!again) hideTip();
  old ? old.replaceWith(page) : document.body.append(page);
  if (focus !== null) page.querySelectorAll("a, button, input, select, [tabindex]")[focus]?.focus({ preventScroll: true });
  if (!again) window.scrollTo(0, 0);
  document.title = page.querySelector("h1")?.textContent + " · agentrl view";
  document.body.dataset.drawn = location.hash || "#/";
  timer = every && !stored ? setTimeout(draw, every, { again: true }) : null;
}

function sameCurves(old, page) {
  const paths = (root) => [...root.querySelectorAll("path")].map((path) => path.getAttribute("d")).join();
  return paths(old) === paths(page);
}

function placeOfFocus(old) {
  const place = old ? [...old.querySelectorAll("a, button, input, select, [tabindex]")].indexOf(document.activeElement) : -1;
  return place < 0 ? null : place;
}

document.body.append(
  el("div.top", {}, el("a.brand", { href: "#/" }, "agentrl"), stored ? el("span.faint", {}, "report") : el("a", { href: "#/" }, "all runs")),
  tip,
);
window.addEventListener("hashchange", () => draw());
if (stored && !location.hash) history.replaceState(null, "", address("run/" + stored.run));
draw();
