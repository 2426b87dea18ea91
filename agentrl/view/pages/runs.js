"use strict";
// The start page: every run, and what differs between those that are chosen.

const MOST_COMPARED = 6;

// What the table can be sorted by; numbers begin with the largest.
const RUN_ORDERS = { run: (run) => run.name, state: (run) => run.state, reward: (run) => run.reward, step: (run) => run.step, environment: (run) => run.env, objective: (run) => run.preset, model: (run) => run.model };

function sortedRuns(runs, by) {
  const value = RUN_ORDERS[by];
  if (!value) return runs; // the newest first, as the server has them
  const least = (run) => value(run) === null || value(run) === undefined;
  const compare = (a, b) => (typeof value(a) === "number" ? value(b) - value(a) : String(value(a)).localeCompare(String(value(b)), undefined, { numeric: true }));
  return [...runs].sort((a, b) => least(a) - least(b) || (least(a) ? 0 : compare(a, b)));
}

async function runsPage(page, parameters) {
  const everyRun = await ask("runs");
  const [order, words] = [parameters.get("sort") || "", parameters.get("find") || ""];
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (run) => [run.name, run.state, run.env, run.preset, run.model, run.path].join(" ").toLowerCase();
  const runs = sortedRuns(everyRun.filter((run) => wanted.every((word) => text(run).includes(word))), order);
  const chosen = new Set((parameters.get("runs") || "").split(",").filter((id) => everyRun.some((run) => run.id === id)));
  const metric = parameters.get("metric") || "reward/mean";
  const change = (changes) => (location.hash = address("", { ...Object.fromEntries(parameters), ...changes }));
  const go = (ids, key) => change({ runs: [...ids].join(","), metric: key === "reward/mean" ? "" : key });
  const rows = runs.map((run) => {
    const toggle = el("input", {
      type: "checkbox",
      checked: chosen.has(run.id),
      "aria-label": "compare " + run.name,
      onchange: (event) => {
        event.target.checked ? chosen.add(run.id) : chosen.delete(run.id);
        while (chosen.size > MOST_COMPARED) chosen.delete([...chosen][0]);
        go(chosen, metric);
      },
    });
    const place = [...chosen].indexOf(run.id);
    return el(
      "tr",
      {},
      el("td.pick", {}, el("label.hit", {}, toggle, place >= 0 && el("span.swatch.c" + place))),
      el("td", {}, el("a.name", { href: address("run/" + run.id), title: run.path }, run.name)),
      el("td", {}, stateOf(run)),
      el("td", {}, sparkline(run.rewards)),
      el("td.num", {}, number(run.reward)),
      el("td.num.wide", {}, run.step + (run.num_steps ? " / " + run.num_steps : "")),
      el("td.wide", {}, run.env || "–"),
      el("td.wide", {}, run.preset || "–"),
      el("td.wide.path", { title: run.model }, run.model ? endOfPath(run.model) : "–"),
      el("td.wide", {}, el("a", { href: address(`run/${run.id}/diagnosis`) }, "diagnosis")),
    );
  });
  const head = ["", "run", "state", "reward", "", "step", "environment", "objective", "model", ""];
  const wide = new Set([5, 6, 7, 8, 9]);
  page.append(
    el("h1", {}, "Runs"),
    everyRun.length > 1 && !stored && el("form.filters", { onsubmit: (event) => event.preventDefault() }, el("label.field.find", {}, el("span", {}, "find"), el("input", { name: "find", type: "search", placeholder: "name, state, environment, model", value: words, onchange: (event) => change({ find: event.target.value.trim() }) })), words && el("span.faint", {}, `${number(runs.length)} of ${number(everyRun.length)}`)),
    everyRun.length
      ? el("div.scroll", {}, el("table.runs", {}, el("thead", {}, el("tr", {}, head.map((name, i) => el("th" + (wide.has(i) ? ".wide" : ""), { "aria-sort": name && name === order ? (["reward", "step"].includes(name) ? "descending" : "ascending") : null }, name in RUN_ORDERS && everyRun.length > 1 ? el("button.sort", { onclick: () => change({ sort: name === order ? "" : name }) }, name, name === order && " ↓") : name)))), el("tbody", {}, rows)))
      : el("p.faint", {}, "No run yet. One that begins under the given directories appears here."),
  );
  if (everyRun.length && !runs.length) page.append(el("p.faint", {}, "No run is like this."));
  if (chosen.size) page.append(...(await comparison([...chosen].map((id) => everyRun.find((run) => run.id === id)), metric, (key) => go(chosen, key), parameters, change)));
  else if (runs.length > 1) page.append(el("p.faint", {}, `Tick up to ${MOST_COMPARED} runs to lay their curves over each other and see where their configurations differ.`));
  return document.activeElement?.closest?.(".filters") ? 0 : 1500;
}

async function comparison(runs, metric, choose, parameters, change) {
  const [log, smooth] = [parameters.get("log") === "1", parameters.get("smooth") === "1"];
  const found = await Promise.all(runs.map(async (run) => ({ run, curves: await ask(`runs/${run.id}/metrics`), details: await ask("runs/" + run.id) })));
  const keys = [...new Set(found.flatMap(({ curves }) => Object.keys(curves.series)))].sort();
  const select = el("select", { "aria-label": "metric", onchange: (event) => choose(event.target.value) }, keys.map((key) => el("option", { value: key, selected: key === metric }, key)));
  const lines = found.map(({ run, curves }, i) => {
    const values = curves.series[metric] || curves.steps.map(() => null);
    return { name: run.name, steps: curves.steps, values: smooth ? smoothed(values) : values, kind: "c" + i };
  });
  const settings = [...new Set(found.flatMap(({ details }) => Object.keys(details.config)))];
  const differing = settings.filter((key) => new Set(found.map(({ details }) => details.config[key])).size > 1);
  return [
    el("section.card", {}, el("div.row", {}, el("h2", {}, "Overlay"), select), curveControls(parameters, change, { filter: false }), plot({ curves: lines, height: 260, limits: bounds(metric), label: metric + " of several runs", log }), el("div.legend", {}, found.map(({ run }, i) => el("span", {}, el("span.swatch.c" + i), run.name)))),
    found.length > 1 &&
      el(
        "section.card",
        {},
        el("h2", {}, "Where their configurations differ"),
        differing.length
          ? el("div.scroll", {}, el("table.diff", {}, el("thead", {}, el("tr", {}, el("th", {}, "key"), found.map(({ run }) => el("th", {}, run.name)))), el("tbody", {}, differing.map((key) => el("tr", {}, el("td", {}, el("code", {}, key)), found.map(({ details }) => el("td", {}, el("code", {}, details.config[key] ?? "–"))))))))
          : el("p.faint", {}, "nowhere"),
      ),
  ].filter(Boolean);
}
