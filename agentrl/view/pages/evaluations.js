"use strict";
// Evaluations: a table for each suite, and every sample of each task of those that are chosen.

const MOST_EVALUATIONS = 6;
const LETTERS = "ABCDEF";

async function evaluationsPage(page, parameters) {
  const everything = await ask("evaluations");
  const chosen = (parameters.get("chosen") || "").split(",").map((id) => everything.find((each) => each.id === id)).filter(Boolean);
  const go = (changes) => change("evaluations", { offset: "", ...changes });
  const toggle = (id) => {
    const ids = chosen.map((each) => each.id);
    const next = ids.includes(id) ? ids.filter((each) => each !== id) : [...ids, id].slice(-MOST_EVALUATIONS);
    go({ chosen: next.join(","), show: "" });
  };
  page.append(el("h1", {}, "Evaluations"));
  if (!everything.length) page.append(el("p.faint", {}, "None yet. `agentrl eval --out DIR` and `agentrl suite` write them."));
  const suites = [...new Set(everything.map((each) => each.suite))].sort();
  page.append(...suites.map((suite) => suiteTable(suite, everything.filter((each) => each.suite === suite), chosen, toggle)));
  if (chosen.length) page.append(await matrixCard(chosen, parameters, go));
  else if (everything.length) page.append(el("p.faint", {}, `Choose up to ${MOST_EVALUATIONS} to see every sample of each task in them.`));
  return 0;
}

function suiteTable(suite, cells, chosen, toggle) {
  const models = [...new Set(cells.map((cell) => cell.model))];
  const benchmarks = [...new Set(cells.map((cell) => cell.benchmark))];
  const shown = (cell) => {
    if (!cell) return "–";
    const place = chosen.indexOf(cell);
    const interval = cell.low === null ? null : el("span.faint.wide", {}, ` ${number(cell.low)} to ${number(cell.high)}`);
    return [
      el("label.hit", {}, el("input", { type: "checkbox", checked: place >= 0, "aria-label": `choose ${cell.model}, ${cell.benchmark}`, onchange: () => toggle(cell.id) }), place >= 0 && el("b", {}, LETTERS[place])),
      el("a", { href: address(`run/${cell.id}/groups`), title: cell.path }, cell.value === null ? "all failed" : number(cell.value)),
      interval,
      cell.num_failed > 0 && el("span.tag.bad", {}, plural(cell.num_failed, "failure")),
    ];
  };
  const figure = (benchmark) => cells.find((cell) => cell.benchmark === benchmark).figure;
  return el(
    "section.card",
    {},
    el("h2", {}, suite ? "Suite " + suite : "Evaluations"),
    el(
      "div.scroll",
      {},
      el(
        "table.evaluations",
        {},
        el("thead", {}, el("tr", {}, el("th", {}, "model"), benchmarks.map((name) => el("th", {}, `${name} (${figure(name)})`)))),
        el("tbody", {}, models.map((model) => el("tr", {}, el("td", {}, el("b", {}, model)), benchmarks.map((name) => el("td.num", {}, shown(cells.find((cell) => cell.model === model && cell.benchmark === name))))))),
      ),
    ),
  );
}

async function matrixCard(chosen, parameters, go) {
  const show = parameters.get("show") || "all";
  const offset = Number(parameters.get("offset") || 0);
  const ids = chosen.map((each) => each.id);
  const found = await ask("evaluations/tasks", { runs: ids.join(","), show, offset });
  const last = LETTERS[chosen.length - 1];
  const shows = { all: "all", ...(chosen.length > 1 ? { first: `A right, ${last} wrong`, last: `${last} right, A wrong`, differ: "they differ" } : {}), all_solve: "every sample solves it", none_solves: "none does", failed: "without a reward" };
  const square = (id, sample) =>
    el("a.sample" + (sample.error ? ".failed" : sample.solved ? ".solved" : sample.reward > 0 ? ".part" : ""), {
      href: address(`run/${id}/t/${sample.step}/${sample.offset}`),
      title: sample.error || "reward " + number(sample.reward),
      "aria-label": "open the sample, " + (sample.error || "reward " + number(sample.reward)),
    }, sample.error ? "×" : sample.solved ? "✓" : "·");
  const name = (task) => (chosen.length === 1 ? el("a", { href: address(`run/${ids[0]}/groups`, { task: task.task_id }) }, task.task_id) : el("a", { href: address("tasks", { first: ids[0], second: ids[chosen.length - 1], task: task.task_id }), title: `A and ${last} side by side` }, task.task_id));
  const to = (place) => hereWith("evaluations", { offset: place || "" });
  return el(
    "section.card.matrix",
    {},
    el("div.row", {}, el("h2", {}, "Every sample"), el("label.field", {}, el("span", {}, "show"), el("select", { name: "show", onchange: (event) => go({ show: event.target.value === "all" ? "" : event.target.value }) }, Object.entries(shows).map(([value, text]) => el("option", { value, selected: value === show }, text)))), el("span.faint.count", {}, `${plural(found.num_found, "task")} of ${number(found.num_shared)} that all of them played`, found.num_tasks > found.num_shared && `; ${number(found.num_tasks - found.num_shared)} others are left out`)),
    el("p.faint", {}, "Right is who solves a task in more than half of its samples. A square opens its trajectory, a task's name ", chosen.length > 1 ? `shows A and ${last} side by side.` : "its group."),
    el(
      "div.scroll",
      {},
      el(
        "table",
        {},
        el("thead", {}, el("tr", {}, el("th", {}, "task"), chosen.map((each, i) => el("th", { title: each.path }, el("b", {}, LETTERS[i]), ` ${each.model}, ${each.benchmark}`)))),
        el("tbody", {}, found.tasks.map((task) => el("tr", {}, el("td", {}, name(task)), task.samples.map((samples, i) => el("td", {}, el("span.samples", {}, samples.map((sample) => square(ids[i], sample))), samples.length > 1 && el("span.faint.num", {}, " " + number(task.shares[i]))))))),
      ),
    ),
    found.num_found > found.tasks.length && el("nav.pager", {}, offset > 0 && el("a.button", { href: to(Math.max(0, offset - 100)) }, "previous"), el("span.faint", {}, `${number(offset + 1)} to ${number(offset + found.tasks.length)}`), offset + found.tasks.length < found.num_found && el("a.button", { href: to(offset + found.tasks.length) }, "next")),
  );
}
