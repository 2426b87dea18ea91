"use strict";
// The start page: every run, and what differs between those that are chosen.

const MOST_COMPARED = 6;
const MOST_SEEDS = 24; // where runs that differ in their seed are one band

// What the table can be sorted by; numbers begin with the largest.
const RUN_ORDERS = { run: (run) => run.name, state: (run) => run.state, reward: (run) => run.reward, "held-out": (run) => run.held_out, step: (run) => run.step, environment: (run) => run.env, objective: (run) => run.preset, model: (run) => run.model };

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
  const choice = (changes) => change("", changes);
  const go = (ids, key) => choice({ runs: [...ids].join(","), metric: key === "reward/mean" ? "" : key });
  const rows = runs.map((run) => {
    const toggle = el("input", {
      type: "checkbox",
      checked: chosen.has(run.id),
      "aria-label": "compare " + run.name,
      onchange: (event) => {
        event.target.checked ? chosen.add(run.id) : chosen.delete(run.id);
        while (chosen.size > (parameters.get("bands") === "1" ? MOST_SEEDS : MOST_COMPARED)) chosen.delete([...chosen][0]);
        go(chosen, metric);
      },
    });
    const place = [...chosen].indexOf(run.id);
    return el(
      "tr.whole-link",
      { onclick: opens(address("run/" + run.id)) },
      el("td.pick", {}, el("label.hit", {}, toggle, place >= 0 && parameters.get("bands") !== "1" && el("span.swatch.c" + place))),
      el("td", {}, el("a.name", { href: address("run/" + run.id), title: run.name }, run.name)),
      el("td", {}, stateOf(run)),
      el("td", {}, sparkline(run.rewards)),
      el("td.num", {}, number(run.reward)),
      el("td.num", { title: "mean reward of the newest evaluation" }, number(run.held_out)),
      el("td.num.wide", {}, run.step + (run.num_steps ? " / " + run.num_steps : "")),
      el("td.wide", {}, run.env || "–"),
      el("td.wide", {}, run.preset || "–"),
      el("td.wide.path", { title: run.model }, run.model ? endOfPath(run.model) : "–"),
      el("td.wide", {}, el("a", { href: address(`run/${run.id}/diagnosis`) }, "diagnosis")),
    );
  });
  const head = ["", "run", "state", "reward", "", "held-out", "step", "environment", "objective", "model", ""];
  const wide = new Set([6, 7, 8, 9, 10]);
  page.append(
    el("h1", {}, "Runs"),
    everyRun.length > 1 && !stored && el("form.filters", { onsubmit: (event) => event.preventDefault() }, el("label.field.find", {}, el("span", {}, "find"), el("input", { name: "find", type: "search", placeholder: "name, state, environment, model", value: words, onchange: (event) => choice({ find: event.target.value.trim() }) })), words && el("span.faint", {}, `${number(runs.length)} of ${number(everyRun.length)}`)),
    everyRun.length
      ? el("div.scroll", {}, el("table.runs", {}, el("thead", {}, el("tr", {}, head.map((name, i) => el("th" + (wide.has(i) ? ".wide" : ""), { "aria-sort": name && name === order ? (["reward", "held-out", "step"].includes(name) ? "descending" : "ascending") : null }, name in RUN_ORDERS && everyRun.length > 1 ? el("button.sort", { onclick: () => choice({ sort: name === order ? "" : name }) }, name, name === order && " ↓") : name)))), el("tbody", {}, rows)))
      : el("p.faint", {}, "No run yet. One that begins under the given directories appears here."),
  );
  if (everyRun.length && !runs.length) page.append(el("p.faint", {}, "No run is like this."));
  if (chosen.size) page.append(...(await comparison([...chosen].map((id) => everyRun.find((run) => run.id === id)), metric, (key) => go(chosen, key), parameters, choice)));
  else if (runs.length > 1) page.append(el("p.faint", {}, `Tick up to ${MOST_COMPARED} runs to lay their curves over each other and see where their configurations differ.`));
  return 1500;
}

async function comparison(runs, metric, choose, parameters, choice) {
  const [log, smooth, asBands] = ["log", "smooth", "bands"].map((name) => parameters.get(name) === "1");
  const over = parameters.get("axis") in AXES ? parameters.get("axis") : "";
  const found = await Promise.all(runs.map(async (run) => ({ run, curves: await ask(`runs/${run.id}/metrics`), details: await ask("runs/" + run.id) })));
  const keys = [...new Set(found.flatMap(({ curves }) => Object.keys(curves.series)))].sort();
  const select = el("select", { "aria-label": "metric", onchange: (event) => choose(event.target.value) }, keys.map((key) => el("option", { value: key, selected: key === metric }, key)));
  const lines = found.map(({ run, curves }, i) => {
    const values = curves.series[metric] || curves.steps.map(() => null);
    return { name: run.name, steps: curves.steps, x: places(curves, over), values: smooth ? smoothed(values) : values, kind: "c" + i };
  });
  const lacking = lines.filter((line) => !line.x).map((line) => line.name);
  const placed = lines.filter((line) => line.x);
  const banded = asBands ? bandsOf(placed, found) : { curves: placed, bands: [] };
  const chart = plot({ ...banded, height: 260, limits: bounds(metric), label: metric + " of several runs", log, axis: over });
  const settings = [...new Set(found.flatMap(({ details }) => Object.keys(details.config)))].filter((key) => key === "run.seed" || !NAMES_OF_A_RUN.has(key));
  const differing = settings.filter((key) => new Set(found.map(({ details }) => details.config[key])).size > 1);
  return [
    el(
      "section.card",
      {},
      el("div.row", {}, el("h2", {}, "Overlay"), select, exports(metric, () => chart, () => csvRows(banded.curves, over))),
      curveControls(parameters, choice, { filter: false, seeds: found.length > 1 }),
      lacking.length > 0 && el("p.faint", {}, `Left out: ${lacking.join(", ")} recorded no ${SUMMED[over]}.`),
      chart,
      el("div.legend", {}, banded.curves.map((curve) => el("span", {}, el("span.swatch." + curve.kind), curve.name)), banded.bands.length > 0 && el("span", {}, "a band spans the least and the largest of its seeds, the line is their mean")),
    ),
    found.length > 1 &&
      el(
        "section.card",
        {},
        el("h2", {}, "Where their configurations differ"),
        differing.length
          ? el("div.scroll", {}, el("table.diff", {}, el("thead", {}, el("tr", {}, el("th", {}, "key"), found.map(({ run }) => el("th", {}, run.name)))), el("tbody", {}, differing.map((key) => el("tr", {}, el("td", {}, el("code", {}, breakable(key))), found.map(({ details }) => el("td", {}, el("code", {}, details.config[key] ?? "–"))))))))
          : el("p.faint", {}, "nowhere"),
      ),
    found.length === 2 && !stored && (await tasksCard(...found.map(({ run }) => run))),
  ].filter(Boolean);
}

// Runs whose configurations are the same but for the seed, and for where they are kept, are one curve.
const NAMES_OF_A_RUN = new Set(["run.seed", "run.name", "run.dir"]);

function bandsOf(lines, found) {
  const configs = new Map(found.map(({ run, details }) => [run.name, details.config]));
  const sorts = new Map();
  for (const line of lines) {
    const key = JSON.stringify(Object.entries(configs.get(line.name)).filter(([name]) => !NAMES_OF_A_RUN.has(name)).sort());
    sorts.set(key, [...(sorts.get(key) || []), line]);
  }
  const [curves, bands] = [[], []];
  for (const members of sorts.values()) {
    const kind = "c" + (curves.length % MOST_COMPARED);
    const steps = [...new Set(members.flatMap((line) => line.steps))].sort((a, b) => a - b);
    const points = steps.map((step) => {
      const there = members.map((line) => [line, line.steps.indexOf(step)]).filter(([, i]) => i >= 0);
      const values = there.map(([line, i]) => line.values[i]).filter((value) => value !== null);
      const x = there.reduce((sum, [line, i]) => sum + line.x[i], 0) / there.length;
      return { x, values, mean: values.length ? values.reduce((a, b) => a + b, 0) / values.length : null };
    });
    const name = members.length > 1 ? `${members[0].name} and ${plural(members.length - 1, "other seed")}` : members[0].name;
    curves.push({ name, kind, steps, x: points.map((p) => p.x), values: points.map((p) => p.mean) });
    if (members.length > 1) bands.push({ kind, points: points.filter((p) => p.values.length).map((p) => [p.x, ...minmax(p.values)]) });
  }
  return { curves, bands };
}

// One task in two runs ------------------------------------------------------------------------

async function tasksCard(first, second) {
  const { num_tasks: count, tasks } = await ask("tasks", { first: first.id, second: second.id });
  const to = (task) => address("tasks", { first: first.id, second: second.id, task });
  const rows = tasks.map((task) => el("tr", {}, el("td", {}, el("a", { href: to(task.task_id) }, task.task_id)), el("td.num", {}, number(task.first)), el("td.num", {}, number(task.second)), el("td.num", {}, el("span." + tone(task.second - task.first), {}, signed(task.second - task.first)))));
  return el(
    "details.card.tasks",
    {},
    el("summary", {}, el("b", {}, "Tasks that both played"), ` ${number(count)}, the most different first`),
    count ? el("div.scroll", {}, el("table", {}, el("thead", {}, el("tr", {}, ["task", "mean reward, " + first.name, second.name, "difference"].map((name) => el("th", {}, name)))), el("tbody", {}, rows))) : el("p.faint", {}, "They have no task in common."),
  );
}

async function tasksPage(page, parameters) {
  const [first, second, task] = ["first", "second", "task"].map((name) => parameters.get(name) || "");
  const runs = await Promise.all([first, second].map((id) => ask("runs/" + id)));
  const found = await Promise.all([first, second].map((id) => ask(`runs/${id}/groups`, { task_id: task, sort: "oldest" })));
  page.append(
    el("h1", {}, task),
    el("p.faint", {}, "One task in two runs, the oldest groups first. ", el("a", { href: address("", { runs: [first, second].join(",") }) }, "their curves")),
    el("div.two", {}, runs.map((run, i) => el("section", {}, el("h2", {}, el("a", { href: address("run/" + run.id) }, run.name), " ", el("span.faint", {}, plural(found[i].num_found, "group"))), found[i].groups.map((group) => groupCard(run.id, group))))),
  );
  return 0;
}
